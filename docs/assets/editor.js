/* <paged-editor>: the code of a tutorial, edited and run in the page, and stepped through.
 *
 * The element stands between the code that it is about and the stepper with the recorded run of it, and holds that code
 * as JSON. Until its button is pressed it is that button. Then Python is loaded from the site (python.js: Pyodide and
 * the parts of minipaged that run in it, see docs/python_in_page.py), and the code can be changed and run. What ran is
 * recorded by minipaged.stepper, there as in the build, and takes the place of the recorded run.
 *
 * Python runs in a worker, so that an endless loop can be stopped: by ending the worker. The worker's address is a
 * `data:` one. It is then nobody's, and can reach neither the site nor what it keeps; and a page that was opened from a
 * file may start it.
 */
(() => {
  "use strict";
  const MOST_MS = 10_000; // for one run
  const PYTHON = new URL("python.js", document.currentScript.src).href;

  // --- Python -------------------------------------------------------------------------------------

  /** What the worker does; its text is sent there. */
  const work = () => {
    const unpack = async (text) => {
      const packed = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
      const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
      return new Uint8Array(await new Response(stream).arrayBuffer());
    };
    const start = async (parts) => {
      const files = {};
      for (const [name, text] of Object.entries(parts)) files[name] = await unpack(text);
      const json = (name) => JSON.parse(new TextDecoder().decode(files[name]));
      const load = (name) => import(URL.createObjectURL(new Blob([files[name]], {type: "text/javascript"})));
      self.fetch = async (url) => { // Pyodide asks for its files; there is nothing else to be had
        const name = String(url).split("/").at(-1);
        const type = name.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
        return files[name] ? new Response(files[name], {headers: {"content-type": type}}) : Response.error();
      };
      const {loadPyodide} = await load("pyodide.mjs");
      const python = await loadPyodide({
        indexURL: "http://nowhere.invalid/", packageBaseUrl: "http://nowhere.invalid/", lockFileContents: json("lock.json"),
        createPyodideModule: (await load("pyodide.asm.mjs")).default,
        stdin: () => null, // nobody types there: `input()` raises EOFError
      });
      for (const [path, source] of Object.entries(json("minipaged.json"))) {
        python.FS.mkdirTree(path.slice(0, path.lastIndexOf("/")));
        python.FS.writeFile(path, source);
      }
      return python.pyimport("minipaged.stepper.edited").run;
    };
    let run;
    self.onmessage = async ({data}) => {
      try {
        if (data.parts) {
          run = await start(data.parts);
          self.postMessage({ready: true});
        } else {
          self.postMessage({done: JSON.parse(run(data.text))});
        }
      } catch (error) {
        self.postMessage({failed: String(error?.message ?? error)});
      }
    };
  };

  let script; // a promise of python.js, for all editors of the page
  const parts = () => script ??= new Promise((done, failed) => {
    const node = document.createElement("script");
    node.src = PYTHON;
    node.onload = () => done(globalThis.pythonInPage);
    node.onerror = () => {
      script = null; // so that it can be tried again
      node.remove();
      failed(new Error(`${PYTHON} could not be loaded`));
    };
    document.head.append(node);
  });

  /** One Python, that can be ended. */
  class Python {
    async load() {
      const texts = await parts();
      if (this.ended) throw new Error("ended");
      const source = `data:text/javascript;charset=utf-8,${encodeURIComponent(`(${work})()`)}`;
      this.worker = new Worker(source, {type: "module"});
      await this.ask({parts: texts});
    }
    run(text) { return this.ask({text}); }
    end() {
      this.ended = true;
      this.worker?.terminate();
      this.fail?.(new Error("ended"));
    }
    ask(what) {
      return new Promise((done, failed) => {
        this.fail = failed;
        this.worker.onmessage = ({data}) => data.failed ? failed(new Error(data.failed)) : done(data.done);
        this.worker.onerror = (error) => failed(new Error(error.message || "the browser starts no worker here"));
        this.worker.postMessage(what);
      });
    }
  }

  // --- The element --------------------------------------------------------------------------------

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };

  const STYLE = `
:host{display:block;margin:1em 0;--fg:light-dark(#1d2129,#e6e8ee);--dim:light-dark(#555c69,#a9b0bf);
 --line:light-dark(#c3c9d4,#4a5060);--soft:light-dark(#f2f4f8,#262a34);--mark:light-dark(#0b57d0,#8ab4ff);
 --bad:light-dark(#a3163d,#ffab91);color:var(--fg);font:14px/1.45 system-ui,sans-serif}
*{box-sizing:border-box}
[hidden]{display:none!important}
.bar{display:flex;flex-wrap:wrap;gap:6px;align-items:center;padding:8px 0}
button{min-width:44px;min-height:40px;padding:0 12px;color:inherit;background:var(--soft);font:inherit;
 border:1px solid var(--line);border-radius:6px;cursor:pointer}
[aria-disabled=true]{opacity:.45;cursor:default}
:focus-visible{outline:3px solid var(--mark);outline-offset:2px}
small{color:var(--dim);font-size:13px}
.text{display:flex;border:1px solid var(--line);border-radius:6px;background:var(--soft)}
pre,textarea{margin:0;padding:10px 8px;font:13px/1.5 ui-monospace,monospace;tab-size:4}
.numbers{color:var(--dim);text-align:right;user-select:none;border-right:1px solid var(--line);flex:none;min-width:6ch}
textarea{flex:1;min-width:0;border:0;resize:none;background:none;color:inherit;white-space:pre;overflow:auto hidden}
.said{min-height:1.5em;margin:8px 0;overflow-wrap:anywhere}
.said.bad{border-left:4px solid var(--bad);padding-left:8px}
.printed{max-height:12rem;overflow:auto;border:1px dashed var(--line);border-radius:6px;white-space:pre-wrap}
`;

  class PagedEditor extends HTMLElement {
    connectedCallback() {
      if (this.shadowRoot) return;
      this.original = JSON.parse(this.querySelector("script[type='application/json']").textContent);
      this.key = `minipaged: ${this.getAttribute("name")}`;
      this.around = this.closest(".editable");
      this.recorded = this.around.querySelector("paged-stepper");
      const kept = this.kept();
      this.opener = make("button", {type: "button"}, kept === null ? "Edit and run this code" : "Go on with your version");
      this.opener.addEventListener("click", () => this.open(kept ?? this.original));
      this.attachShadow({mode: "open"}).append(make("style", {}, STYLE),
        make("div", {class: "bar"}, this.opener, make("small", {}, "Loads Python from this site, about 8 MB.")));
    }
    disconnectedCallback() { this.python?.end(); }

    open(text) {
      const button = (label, act) => {
        const node = make("button", {type: "button"}, label);
        node.addEventListener("click", act);
        return node;
      };
      this.runner = button("Run", () => this.run());
      this.stopper = button("Stop", () => this.working && this.stop("Stopped."));
      this.resetter = button("Reset", () => this.reset());
      this.numbers = make("pre", {class: "numbers", "aria-hidden": "true"});
      this.area = make("textarea", {"aria-label": "The code, to be changed", "aria-describedby": "keys", wrap: "off",
        spellcheck: "false", autocapitalize: "off", autocomplete: "off"});
      this.area.value = text;
      this.area.addEventListener("input", () => { this.keep(); this.count(); });
      this.area.addEventListener("keydown", (key) => this.press(key));
      this.said = make("p", {class: "said", role: "status"});
      this.printed = make("pre", {class: "printed", tabindex: "0", role: "region", "aria-label": "Printed"});
      this.printed.hidden = true;
      const keys = make("small", {id: "keys"}, "Ctrl+Enter runs. Tab indents; Escape, then Tab, leaves the code.");
      this.shadowRoot.replaceChildren(make("style", {}, STYLE),
        make("div", {class: "text"}, this.numbers, this.area),
        make("div", {class: "bar"}, this.runner, this.stopper, this.resetter, keys), this.said, this.printed);
      for (const shown of this.around.querySelectorAll(":scope > .highlight")) shown.hidden = true;
      this.count();
      this.area.focus({preventScroll: true});
      this.load().then((loaded) => { if (loaded) this.say("Python is here. Change the code, and run it."); });
    }

    // --- The text -----------------------------------------------------------------------------------

    /** What a reader wrote here before, or null. A browser may refuse to keep anything. */
    kept() {
      try { return localStorage.getItem(this.key); } catch { return null; }
    }
    keep() {
      try {
        if (this.area.value === this.original) localStorage.removeItem(this.key);
        else localStorage.setItem(this.key, this.area.value);
      } catch { /* then it lives as long as the page */ }
    }
    /** Line numbers, as many as there are lines, with a sign at the line where something went wrong. */
    count(wrong = null) {
      const lines = this.area.value.split("\n").map((_, i) => i + 1 === wrong ? `▶ ${i + 1}` : `${i + 1}`);
      this.area.rows = lines.length;
      this.numbers.textContent = lines.join("\n");
    }
    press(key) {
      const {value, selectionStart: start, selectionEnd: end} = this.area;
      const from = value.lastIndexOf("\n", start - 1) + 1; // where the line begins
      const put = (text) => document.execCommand("insertText", false, text); // unlike setRangeText it can be undone
      const leaving = this.leaving;
      this.leaving = key.key === "Escape" || (leaving && key.key === "Shift");
      if (key.key === "Enter" && (key.ctrlKey || key.metaKey)) {
        this.run();
      } else if (key.key === "Enter" && !key.shiftKey) {
        const line = value.slice(from, start);
        put(`\n${line.match(/^ */)[0]}${/:\s*(#.*)?$/.test(line) ? "    " : ""}`);
      } else if (key.key === "Tab" && !leaving && !key.ctrlKey && !key.altKey) {
        if (start === end && !key.shiftKey) {
          put(" ".repeat(4 - (start - from) % 4));
        } else { // whole lines
          const lines = value.slice(from, end).split("\n");
          const moved = lines.map((line) => key.shiftKey ? line.replace(/^ {1,4}/, "") : `    ${line}`).join("\n");
          this.area.setSelectionRange(from, end);
          put(moved);
          this.area.setSelectionRange(start === end ? Math.max(from, start - 4) : from, from + moved.length);
        }
      } else {
        return;
      }
      key.preventDefault();
    }

    // --- Running ------------------------------------------------------------------------------------

    say(text, bad = false) {
      this.said.textContent = text;
      this.said.classList.toggle("bad", bad);
    }
    busy(is) { // not `disabled`: the button that was pressed would lose the focus
      this.working = is;
      this.runner.setAttribute("aria-disabled", is);
      this.stopper.setAttribute("aria-disabled", !is);
    }
    /** Whether Python is there now; if not, it has been said why. */
    async load() {
      if (this.python) return true;
      const python = this.python = new Python();
      this.busy(true);
      this.say("Loading Python …");
      try {
        await python.load();
      } catch (error) {
        if (this.python === python) {
          const way = location.protocol === "file:"
            ? "This page was opened from a file, and not every browser lets a file do this: make docs-serve serves the site"
            : "Load the page again, or try another browser";
          this.stop(`Python could not be loaded: ${error.message}. ${way}. The run below can still be stepped through.`);
        }
        return false;
      }
      this.busy(false);
      return true;
    }
    async run() {
      if (this.working || !await this.load()) return;
      const python = this.python;
      this.busy(true);
      this.say("Running …");
      this.count();
      const limit = setTimeout(() => this.stop(`Stopped after ${MOST_MS / 1000} seconds: is there an endless loop?`), MOST_MS);
      try {
        const result = await python.run(this.area.value);
        this.busy(false);
        this.show(result);
      } catch (error) {
        if (this.python === python) this.stop(`Python broke down: ${error.message}.`);
      } finally {
        clearTimeout(limit);
      }
    }
    /** The Python of now is ended; the next run has a new one. */
    stop(why) {
      const python = this.python;
      this.python = null;
      python?.end();
      this.busy(false);
      this.say(why, true);
    }
    reset() {
      if (this.working) this.stop("Stopped.");
      this.area.focus({preventScroll: true});
      this.area.select();
      document.execCommand("insertText", false, this.original); // so that it can be undone
      this.resetter.focus();
      this.printed.hidden = true;
      this.around.querySelector("paged-stepper").replaceWith(this.recorded);
      this.say("The code is as it was, and so is the run below.");
    }
    show({run, printed, error, line}) {
      this.printed.textContent = printed ?? "";
      this.printed.hidden = !printed;
      this.count(line);
      if (run) {
        const data = make("script", {type: "application/json"}, JSON.stringify(run));
        const stepper = make("paged-stepper", {id: this.recorded.id}, data);
        this.around.querySelector("paged-stepper").replaceWith(stepper);
        if (error) stepper.go(stepper.events.length);
      }
      const steps = run ? `${run.events.length} steps` : "";
      if (error) this.say(`${error}. ${run ? `Below are the ${steps} until then.` : ""}`, true);
      else this.say(`Your version ran: ${steps}, below.`);
    }
  }

  customElements.define("paged-editor", PagedEditor);
})();
