/* <paged-grader>: an assignment, written and graded in the page.
 *
 * It holds as JSON the `assignment`, the `file` that a student writes, its starter (`code`), the `tests` with their
 * points, the `command` that grades the same file outside of a page, and whether that measures its `speed`. Until its
 * button is pressed it is that button. The grader is minipaged's own (minipaged/course/page.py): it tells of each test
 * when it is done, and of a failed one with the run that shows it, which is stepped through here, beside the student's
 * own lines.
 */
(() => {
  "use strict";
  const MOST_MS = 30_000; // of silence: the grader ends a call that does not return, if it can; and tells that it goes on
  const {CodeEditor, STYLE, button, make} = globalThis.pagedCode;

  const RESULTS = `
.results{margin:12px 0}
.score{font-size:18px;font-weight:600;margin:12px 0 4px}
.tests{list-style:none;margin:0;padding:0;border:1px solid var(--line);border-radius:6px}
.tests>li+li{border-top:1px solid var(--line)}
summary,.test{display:flex;gap:4px 12px;align-items:baseline;flex-wrap:wrap;padding:8px 12px;min-height:40px}
summary{cursor:pointer;list-style:none}
summary::-webkit-details-marker{display:none}
summary::after{content:"▸"}
[open]>summary::after{content:"▾"}
.points{flex:none;min-width:6ch;font-variant-numeric:tabular-nums}
.invariant{color:var(--dim);margin-left:auto}
.failed .points{color:var(--bad);font-weight:600}
.passed .points{color:var(--good);font-weight:600}
.found{padding:0 12px 12px}
.found p{margin:8px 0;overflow-wrap:anywhere}
.found pre{overflow:auto;border:1px solid var(--line);border-radius:6px;background:var(--soft)}
:host{--good:light-dark(#0b6b2e,#7fd99a)}
`;

  class PagedGrader extends CodeEditor {
    static SCRIPTS = ["python.js", "grading.js"];
    static MODULE = "minipaged.course.page";
    instead = "";

    connectedCallback() {
      if (this.shadowRoot) return;
      Object.assign(this, JSON.parse(this.querySelector("script[type='application/json']").textContent));
      this.prepare(this.code, "Grade", "Ctrl+Enter grades.");
      this.bar.insertBefore(button(`Save ${this.file}`, () => this.save()), this.bar.lastChild);
      this.results = make("div", {class: "results"});
      const opener = button(this.kept() === null ? "Write it here" : "Go on with your version", () => this.open());
      this.attachShadow({mode: "open"}).append(make("style", {}, STYLE + RESULTS), make("div", {class: "bar"}, opener,
        make("small", {}, "Loads Python and the grader from this site, about 9 MB. What you write stays in this browser.")));
    }
    open() {
      this.area.value = this.kept() ?? this.area.value;
      this.shadowRoot.querySelector(".bar").replaceWith(this.text, this.bar, this.said, this.results);
      this.count();
      this.area.focus({preventScroll: true});
      this.load().then((loaded) => { if (loaded) this.say("Python is here. Write the part, and have it graded."); });
    }
    save() {
      const url = URL.createObjectURL(new Blob([this.area.value], {type: "text/x-python"}));
      make("a", {href: url, download: this.file}).click();
      setTimeout(() => URL.revokeObjectURL(url), 1000);
    }
    reset() {
      super.reset();
      this.results.replaceChildren();
      this.count();
      this.say("The code is as it was.");
    }

    // --- Grading ------------------------------------------------------------------------------------

    async run() {
      if (this.working || !await this.load()) return;
      const tests = make("ol", {class: "tests"});
      this.results.replaceChildren(tests);
      this.shown = false; // whether a failed test is open
      const waits = () => tests.childElementCount < this.tests.length
        && this.say(`Grading: test ${tests.childElementCount + 1} of ${this.tests.length} …`);
      waits();
      const graded = await this.ask([this.assignment, this.area.value], MOST_MS, (test) => {
        tests.append(this.test(test));
        waits();
      });
      if (!graded) return; // ended, and it has been said why
      if (graded.error) {
        this.results.replaceChildren();
        this.count(graded.line);
        this.say(graded.error, true);
        return;
      }
      const left = this.tests.filter(({stage}) => stage === "model").map(({name, points}) => `${name} (${points} points)`);
      const capped = graded.capped ? ` With a failed test, ${graded.cap} at most.` : "";
      this.results.prepend(make("p", {class: "score"}, `${graded.score} of ${graded.max_score} points.${capped}`));
      this.results.append(make("p", {}, `The command line adds ${[...left, ...this.speed ? ["the speed"] : []].join(" and ")}: `,
        make("code", {}, this.command)));
      const failed = graded.tests.filter(({status}) => status === "failed").length;
      this.say(failed ? `Graded: ${failed} of ${this.tests.length} tests failed. The first of them is open.` : "Graded: all passed.");
      this.said.scrollIntoView({block: "nearest"});
    }
    /** One test, as a line; and for a failed one what there is to learn from it. */
    test({name, score, max_score: most, status, invariant, message, run, ...more}) {
      const said = {skipped: "not run", "not-graded": "not here"}[status] ?? `${score}/${most}`;
      const parts = [make("span", {class: "points"}, said), make("span", {}, name),
        make("span", {class: "invariant"}, invariant ?? "")];
      if (status !== "failed") {
        return make("li", {class: status}, make("div", {class: "test"}, ...parts));
      }
      const details = make("details", {}, make("summary", {}, ...parts));
      const fill = () => {
        if (details.childElementCount > 1) return;
        details.append(this.found({message, run, invariant, ...more}));
      };
      details.addEventListener("toggle", fill);
      if (!this.shown) {
        this.shown = details.open = true;
        this.count(...run?.broken?.line ? [run.broken.line] : []);
        fill();
      }
      return make("li", {class: status}, details);
    }
    found({message, invariant, meaning, hint, same, counterexample, run, output}) {
      const found = make("div", {class: "found"});
      const text = (title, body) => found.append(make("p", {}, make("b", {}, title), body));
      const block = (label, body) => {
        if (label) found.append(make("p", {}, label));
        found.append(make("pre", {tabindex: "0", role: "group", "aria-label": label || message}, body));
      };
      found.append(make("p", {}, message));
      if (same) {
        found.append(make("p", {}, `It fails like “${same}”.`));
        return found;
      }
      if (meaning) text(invariant ? `${invariant}: ` : "", meaning);
      if (hint) text("Hint: ", hint);
      if (run) {
        const data = make("script", {type: "application/json"}, JSON.stringify(run));
        const last = run.events.length + Boolean(run.broken); // where it broke is a step of its own
        found.append(make("p", {}, "The run that shows it, at its last step:"), make("paged-stepper", {start: last}, data));
      }
      const drawing = counterexample?.drawing ?? [];
      if (drawing.length) block(counterexample.script ? "What there was where it went wrong" : "", drawing.join("\n"));
      if (counterexample?.script) block("counterexample.py, with your file beside it", counterexample.script);
      if (output) block("Printed", output);
      return found;
    }
  }

  customElements.define("paged-grader", PagedGrader);
})();
