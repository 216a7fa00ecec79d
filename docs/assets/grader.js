/* <paged-grader>: an assignment, written and graded in the page.
 *
 * It holds as JSON the `assignment`, the `file` that a student writes, its starter (`code`), the `tests` with their
 * points, the `command` that grades the same file outside of a page, whether that measures its `speed`, and what its calls
 * are (`means`) in a run that is stepped through, if they are something else there. Until its button is pressed it is
 * that button. The grader is minipaged's own (minipaged/course/page.py): it tells of each test
 * when it is done, and of a failed one with the run that shows it, which is stepped through here, beside the student's
 * own lines.
 */
(() => {
  "use strict";
  const MOST_MS = 30_000; // of silence: the grader ends a call that does not return, if it can; and tells that it goes on
  const {CodeEditor, STYLE, button, make} = globalThis.pagedCode;

  const RESULTS = `
.results{margin:12px 0;scroll-margin-top:64px}
.score{font-size:18px;font-weight:600;margin:12px 0 4px}
.tests{list-style:none;margin:0;padding:0;border:1px solid var(--line);border-radius:6px}
.tests>li+li{border-top:1px solid var(--line)}
summary,.test{display:grid;grid-template-columns:9ch 1fr auto;gap:4px 12px;align-items:baseline;padding:8px 12px;min-height:40px}
summary{position:relative;padding-right:32px;cursor:pointer;list-style:none}
summary::-webkit-details-marker{display:none}
summary::after{content:"▸";position:absolute;right:12px;top:8px}
[open]>summary::after{content:"▾"}
.points{font-variant-numeric:tabular-nums}
.name{overflow-wrap:anywhere}
.invariant{color:var(--dim)}
@media (max-width:480px){summary,.test{grid-template-columns:9ch 1fr}.invariant{grid-column:2}.invariant:empty{display:none}}
code{font:.95em ui-monospace,monospace;overflow-wrap:anywhere}
.failed .points{color:var(--bad);font-weight:600}
.passed .points{color:var(--good);font-weight:600}
.found{padding:0 12px 12px}
.found p{margin:8px 0;overflow-wrap:anywhere}
.found pre{overflow:auto;border:1px solid var(--line);border-radius:6px;background:var(--soft)}
:host{--good:light-dark(#0b6b2e,#7fd99a)}
`;

  /** How a test ended: its status, but for one that failed because of what the starter file has in place of code. */
  const kindOf = ({status, unwritten}) => unwritten ? "unwritten" : status;

  /** Text whose `names` are code. */
  const marked = (text) => text.split(/`([^`\n]+)`/).map((part, i) => i % 2 ? make("code", {}, part) : part);

  class PagedGrader extends CodeEditor {
    static SCRIPTS = ["python.js", "grading.js"];
    static MODULE = "minipaged.course.page";
    instead = "";

    connectedCallback() {
      if (this.shadowRoot) return;
      Object.assign(this, JSON.parse(this.querySelector("script[type='application/json']").textContent));
      this.prepare(this.code, "Grade", "Ctrl+Enter grades.");
      this.stopper.after(button(`Save ${this.file}`, () => this.save()));
      this.results = make("div", {class: "results"});
      const opener = button(this.kept() === null ? "Write it here" : "Go on with your version", () => this.open());
      this.attachShadow({mode: "open"}).append(make("style", {}, STYLE + RESULTS), make("div", {class: "bar"}, opener,
        make("small", {}, "Loads Python and the grader from this site, about 9 MB. What you write stays in this browser.")));
    }
    open() {
      this.area.value = this.kept() ?? this.area.value;
      this.shadowRoot.querySelector(".bar").replaceWith(this.text, this.foot, this.results);
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
      this.say(this.before === null ? "The code is as it was." : "The code is as it was. Yours is kept: “Undo reset” brings it back.");
    }

    // --- Grading ------------------------------------------------------------------------------------

    async run() {
      if (this.working || !await this.load()) return;
      const [tests, kinds] = [make("ol", {class: "tests"}), []];
      this.results.replaceChildren(tests);
      this.shown = false; // whether a failed test is open
      const waits = () => tests.childElementCount < this.tests.length
        && this.say(`Grading: test ${tests.childElementCount + 1} of ${this.tests.length} …`);
      waits();
      const graded = await this.ask([this.assignment, this.area.value], MOST_MS, (test) => {
        kinds.push(kindOf(test));
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
      const capped = graded.capped ? ` With a failed test, ${graded.cap} at most.` : "";
      const is = (...asked) => kinds.filter((kind) => asked.includes(kind)).length;
      const parts = [[is("failed"), "failed"], [is("unwritten"), "not written yet"], [is("skipped", "not-graded"), "not run"]];
      const counted = parts.filter(([many]) => many).map(([many, what]) => `${many} ${what}`).join(", ");
      const wrong = is("failed", "unwritten");
      const elsewhere = this.elsewhere();
      if (wrong) elsewhere.prepend(`${counted}. `);
      this.results.prepend(make("p", {class: "score"}, `${graded.score} of ${graded.max_score} points.${capped}`), elsewhere);
      this.say(wrong ? `Graded: ${counted}. The first is open.` : "Graded: all passed.");
      if (this.results.getBoundingClientRect().top > innerHeight / 2) this.results.scrollIntoView();
    }
    /** What the points are for that there are only on the command line. */
    elsewhere() {
      const sum = (tests) => tests.reduce((points, test) => points + test.points, 0);
      const left = this.tests.filter(({stage}) => stage === "model");
      const speed = this.speed ? "measures the speed" : "";
      const adds = left.length
        ? `The other ${sum(left)} of ${sum(this.tests)} are for ${left.map(({name}) => name).join(" and ")}, on the command `
          + `line${speed && `, which also ${speed}`}: `
        : `The command line ${speed || "says the same"}: `;
      return make("p", {}, adds, make("code", {}, this.command));
    }
    /** One test, as a line; and for a failed one what there is to learn from it. */
    test({name, score, max_score: most, status, unwritten, invariant, message, run, ...more}) {
      const kind = kindOf({status, unwritten});
      const said = {skipped: "not run", "not-graded": "not here", unwritten: "to write"}[kind] ?? `${score}/${most}`;
      const parts = [make("span", {class: "points"}, said), make("span", {class: "name"}, ...marked(name)),
        make("span", {class: "invariant"}, invariant ?? "")];
      if (status !== "failed") {
        return make("li", {class: kind}, make("div", {class: "test"}, ...parts));
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
      return make("li", {class: kind}, details);
    }
    found({message, invariant, meaning, hint, same, counterexample, run, output}) {
      const found = make("div", {class: "found"});
      const text = (title, body) => found.append(make("p", {}, make("b", {}, title), ...marked(body)));
      const block = (label, body) => {
        if (label) found.append(make("p", {}, label));
        found.append(make("pre", {tabindex: "0", role: "group", "aria-label": label || message}, body));
      };
      found.append(make("p", {}, ...marked(message)));
      if (same) {
        found.append(make("p", {}, `It fails like “${same}”.`));
        return found;
      }
      if (meaning) text(invariant ? `${invariant}: ` : "", meaning);
      if (hint) text("Hint: ", hint);
      if (run) {
        if (this.means) found.append(make("p", {}, ...marked(`In the run ${this.means}.`)));
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
