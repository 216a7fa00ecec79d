/* <paged-editor>: the code of a tutorial, edited and run in the page, and stepped through or seen as a picture.
 *
 * The element stands between the code that it is about and what that showed when the site was built, a stepper with the
 * recorded run or a picture. It holds as JSON: `code`, `needed` (what has to run before it), and `sliders`, the numbers
 * in it that a reader may choose. Until its button is pressed it is that button, and the sliders. Then Python is loaded
 * from the site (python.js: Pyodide and the parts of minipaged that run in it, see docs/python_in_page.py), and the code
 * can be changed and run. What is run is recorded or drawn by minipaged.stepper, there as in the build, and takes the
 * place of what was there. Moving a slider does all that, too: it changes the number in the code, and runs it.
 *
 * Python runs in a worker, so that an endless loop can be stopped: by ending the worker. The worker's address is a
 * `data:` one. It is then nobody's, and can reach neither the site nor what it keeps; and a page that was opened from a
 * file may start it.
 */
(() => {
  "use strict";
  const MOST_MS = 10_000; // for one run
  const PAUSE_MS = 250; // after a slider has moved: where it stands then is what is run
  const BEFORE = ", before it was reset";
  const HERE = new URL(".", document.currentScript.src).href;

  // --- Python -------------------------------------------------------------------------------------

  /** What the worker does; its text is sent there. */
  const work = () => {
    const unpack = async (text) => {
      const signs = atob(text);
      const packed = new Uint8Array(signs.length);
      for (let i = 0; i < signs.length; i++) packed[i] = signs.charCodeAt(i); // Uint8Array.from takes 20 times as long
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
      const sources = Object.keys(files).filter((name) => name.endsWith(".sources.json"));
      for (const [path, source] of sources.flatMap((name) => Object.entries(json(name)))) {
        python.FS.mkdirTree(path.slice(0, path.lastIndexOf("/")));
        python.FS.writeFile(path, source);
      }
      for (const name of Object.keys(files)) if (name.endsWith(".whl")) python.unpackArchive(files[name], "wheel");
      return python;
    };
    const tell = (text) => self.postMessage({told: JSON.parse(text)});
    let run;
    self.onmessage = async ({data}) => {
      try {
        if (data.parts) {
          run = (await start(data.parts)).pyimport(data.module).run;
          self.postMessage({done: true});
        } else {
          self.postMessage({done: JSON.parse(run(...data.given, ...data.tells ? [tell] : []))});
        }
      } catch (error) {
        self.postMessage({failed: String(error?.message ?? error)});
      }
    };
  };

  const loading = new Map(); // promises of scripts, by their names, for all editors of the page
  const partsOf = (name) => {
    if (!loading.has(name)) {
      loading.set(name, new Promise((done, failed) => {
        const node = document.createElement("script");
        node.src = `${HERE}${name}`;
        node.onload = () => done(globalThis.pythonInPage[name]);
        node.onerror = () => {
          loading.delete(name); // so that it can be tried again
          node.remove();
          failed(new Error(`${node.src} could not be loaded`));
        };
        document.head.append(node);
      }));
    }
    return loading.get(name);
  };

  /** One Python, that can be ended. */
  class Python {
    /** With what is in these scripts; it will run this module's `run`. */
    async load(scripts, module) {
      const parts = Object.assign({}, ...await Promise.all(scripts.map(partsOf)));
      if (this.ended) throw new Error("ended");
      const source = `data:text/javascript;charset=utf-8,${encodeURIComponent(`(${work})()`)}`;
      this.worker = new Worker(source, {type: "module"});
      await this.ask({parts, module});
    }
    /** `told`: is given what it tells meanwhile. */
    run(given, told) { return this.ask({given, tells: Boolean(told)}, told); }
    end() {
      this.ended = true;
      this.worker?.terminate();
      this.fail?.(new Error("ended"));
    }
    ask(what, told) {
      return new Promise((done, failed) => {
        this.fail = failed;
        this.worker.onmessage = ({data}) => {
          if ("told" in data) told(data.told);
          else if (data.failed) failed(new Error(data.failed));
          else done(data.done);
        };
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

  const button = (label, act) => {
    const node = make("button", {type: "button"}, label);
    node.addEventListener("click", act);
    return node;
  };

  const DRAWN = new Set(["svg", "defs", "pattern", "path", "polyline", "circle", "rect", "text"]);
  /** A picture made by the reader's code, as an element in which nothing runs. */
  const picture = (text) => {
    const svg = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
    for (const node of [svg, ...svg.querySelectorAll("*")]) {
      if (!DRAWN.has(node.nodeName)) node.remove();
      for (const {name} of [...node.attributes]) if (name.startsWith("on")) node.removeAttribute(name);
    }
    return make("div", {class: "picture"}, document.importNode(svg, true));
  };

  // --- Colours ------------------------------------------------------------------------------------

  const WORDS = "and as assert async await break case class continue def del elif else except False finally for from " +
    "global if import in is lambda match None nonlocal not or pass raise return True try while with yield";
  const PYTHON_PARTS = new RegExp([
    /(?<comment>#.*)/,
    /(?<string>(?<!\w)[bfr]{0,2}(?:"""[^]*?(?:"""|(?![^]))|'''[^]*?(?:'''|(?![^]))|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))/,
    new RegExp(`(?<keyword>\\b(?:${WORDS.replaceAll(" ", "|")})\\b)`),
    /(?<number>\b\d[\w.]*)/,
    /(?<function>(?<=\b(?:def|class) )\w+|^ *@.*)/,
  ].map(({source}) => source).join("|"), "gm");
  /** Python's text in colours, roughly: what is no Python yet is shown as it is. */
  const coloured = (text) => {
    const parts = [];
    let end = 0;
    for (const match of text.matchAll(PYTHON_PARTS)) {
      const [kind] = Object.entries(match.groups).find(([, found]) => found !== undefined);
      parts.push(text.slice(end, match.index), make("span", {class: kind}, match[0]));
      end = match.index + match[0].length;
    }
    return [...parts, `${text.slice(end)}\n`];
  };

  const STYLE = `
:host{display:block;margin:1em 0;--fg:light-dark(#1d2129,#e6e8ee);--dim:light-dark(#555c69,#a9b0bf);
 --line:light-dark(#c3c9d4,#4a5060);--soft:light-dark(#f2f4f8,#262a34);--mark:light-dark(#0b57d0,#8ab4ff);
 --bad:light-dark(#a3163d,#ffab91);color:var(--fg);font:14px/1.45 system-ui,sans-serif}
*{box-sizing:border-box}
[hidden]{display:none!important}
.bar{display:flex;flex-wrap:wrap;gap:6px;align-items:center;padding:8px 0}
.foot{position:sticky;bottom:0;z-index:1;background:var(--md-default-bg-color,Canvas);scroll-margin-top:64px}
.foot .bar{padding:8px 0 0}
.end{scroll-margin-top:64px}
button{min-width:44px;min-height:40px;padding:0 12px;color:inherit;background:var(--soft);font:inherit;
 border:1px solid var(--line);border-radius:6px;cursor:pointer}
.main{color:light-dark(#fff,#000);background:var(--mark);border-color:var(--mark);font-weight:600}
[aria-disabled=true]{opacity:.45;cursor:default}
:focus-visible{outline:3px solid var(--mark);outline-offset:2px}
small{color:var(--dim);font-size:13px}
.text{display:flex;border:1px solid var(--line);border-radius:6px;background:var(--soft)}
pre,textarea{margin:0;padding:10px 8px;font:13px/1.5 ui-monospace,monospace;tab-size:4}
.numbers{color:var(--dim);text-align:right;user-select:none;border-right:1px solid var(--line);flex:none;min-width:6ch}
.code{flex:1;min-width:0;position:relative;overflow:hidden}
.paint{position:absolute;inset:0 auto auto 0;pointer-events:none;white-space:pre}
.comment{color:var(--md-code-hl-comment-color,inherit)}.string{color:var(--md-code-hl-string-color,inherit)}
.keyword{color:var(--md-code-hl-keyword-color,inherit)}.number{color:var(--md-code-hl-number-color,inherit)}
.function{color:var(--md-code-hl-function-color,inherit)}
textarea{display:block;width:100%;position:relative;border:0;resize:none;background:none;color:inherit;white-space:pre;
 overflow:auto hidden;-webkit-text-fill-color:transparent;caret-color:var(--fg)}
textarea::selection{background:light-dark(#0b57d033,#8ab4ff4d)}
@media (forced-colors:active){.paint{display:none}textarea{-webkit-text-fill-color:currentcolor}}
.said{min-height:1.5em;max-height:30vh;overflow:auto;margin:0;padding:6px 0;overflow-wrap:anywhere}
.past{color:var(--dim)}
.said.bad{border-left:4px solid var(--bad);padding-left:8px}
.sliders{display:grid;grid-template-columns:auto minmax(8rem,1fr) 5ch;gap:0 12px;align-items:center;max-width:44rem}
.sliders input{width:100%;min-height:40px;accent-color:var(--mark)}
.sliders span{text-align:right;font-variant-numeric:tabular-nums}
@media (max-width:480px){.sliders{grid-template-columns:minmax(8rem,1fr) 5ch}.sliders label{grid-column:1/-1;margin-top:6px}}
@media (pointer:coarse){#keys{display:none}}
.printed{max-height:12rem;overflow:auto;border:1px dashed var(--line);border-radius:6px;white-space:pre-wrap}
`;

  /** Code to be changed, and a Python that takes it. What is done with it is in the classes that extend this one. */
  class CodeEditor extends HTMLElement {
    static SCRIPTS = ["python.js"];

    /** `code`: as it was at first; `act`: on the button; what `keys` do is said beside it. */
    prepare(code, act, keys) {
      this.original = code;
      this.key = `minipaged: ${this.getAttribute("name")}`;
      this.runner = button(act, () => this.run());
      this.runner.className = "main";
      this.stopper = button("Stop", () => this.working && this.stop("Stopped."));
      this.resetter = button("Reset", () => this.reset());
      this.undoer = button("Undo reset", () => this.undo());
      this.numbers = make("pre", {class: "numbers", "aria-hidden": "true"});
      this.area = make("textarea", {"aria-label": "The code, to be changed", "aria-describedby": "keys", wrap: "off",
        spellcheck: "false", autocapitalize: "off", autocomplete: "off"});
      this.area.value = code;
      this.area.addEventListener("input", () => { this.keep(); this.count(); this.changed(); });
      this.area.addEventListener("keydown", (key) => this.press(key));
      this.area.addEventListener("scroll", () => { this.paint.style.left = `${-this.area.scrollLeft}px`; });
      this.paint = make("pre", {class: "paint", "aria-hidden": "true"});
      this.said = make("p", {class: "said", role: "status"});
      const help = make("small", {id: "keys"}, `${keys} Tab indents; Escape, then Tab, leaves the code.`);
      this.text = make("div", {class: "text"}, this.numbers, make("div", {class: "code"}, this.paint, this.area));
      this.bar = make("div", {class: "bar"}, this.runner, this.stopper, this.resetter, this.undoer, help);
      this.foot = make("div", {class: "foot"}, this.bar, this.said); // stays in view below code that is longer than the screen
      this.end = make("div", {class: "end"}); // of the code, where it stands when scrolled there
      this.undone(this.stored(this.key + BEFORE));
      this.busy(false);
    }
    changed() {}
    disconnectedCallback() { this.python?.end(); }

    // --- The text -----------------------------------------------------------------------------------

    /** What a reader wrote here before, or null. */
    kept() { return this.stored(this.key); }
    keep() { this.store(this.key, this.area.value === this.original ? null : this.area.value); }
    stored(key) { // a browser may refuse to keep anything
      try { return localStorage.getItem(key); } catch { return null; }
    }
    store(key, text) {
      try {
        if (text === null) localStorage.removeItem(key);
        else localStorage.setItem(key, text);
      } catch { /* then it lives as long as the page */ }
    }
    /** Line numbers, as many as there are lines, with a sign at those where something went wrong. */
    count(...wrong) {
      const lines = this.area.value.split("\n").map((_, i) => wrong.includes(i + 1) ? `▶ ${i + 1}` : `${i + 1}`);
      this.area.rows = lines.length;
      this.numbers.textContent = lines.join("\n");
      this.paint.replaceChildren(...coloured(this.area.value));
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

    // --- Python -------------------------------------------------------------------------------------

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
        await python.load(this.constructor.SCRIPTS, this.constructor.MODULE);
      } catch (error) {
        if (this.python === python) {
          const way = location.protocol === "file:"
            ? "This page was opened from a file, and not every browser lets a file do this: make docs-serve serves the site"
            : "Load the page again, or try another browser";
          this.stop(`Python could not be loaded: ${error.message}. ${way}.${this.instead}`);
        }
        return false;
      }
      this.busy(false);
      return true;
    }
    /** What Python makes of it, or null where it was ended. `most`: milliseconds of silence that are let pass. */
    async ask(given, most, told) {
      const python = this.python;
      const end = () => this.stop(`Stopped after ${most / 1000} seconds: is there an endless loop?`);
      let limit = setTimeout(end, most);
      const heard = told && ((what) => {
        clearTimeout(limit);
        limit = setTimeout(end, most);
        if (what) told(what); // null is a sign of life
      });
      this.busy(true);
      this.count();
      try {
        const result = await python.run(given, heard);
        this.busy(false);
        return result;
      } catch (error) {
        if (this.python === python) this.stop(`Python broke down: ${error.message}.`);
        return null;
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
      if (this.area.value !== this.original) this.undone(this.area.value);
      this.replace(this.original);
      (this.undoer.hidden ? this.resetter : this.undoer).focus({preventScroll: true});
    }
    /** What was reset comes back; what was written since then takes its place. */
    undo(says = "Your version is back.") {
      const [now, before] = [this.area.value, this.before];
      this.undone(now === this.original ? null : now);
      this.replace(before);
      this.resetter.focus({preventScroll: true});
      this.say(says);
    }
    /** `before`: what "Undo reset" brings back, or null. It is kept until then. */
    undone(before) {
      this.before = before;
      this.store(this.key + BEFORE, before);
      this.undoer.hidden = before === null;
    }
    replace(code) {
      if (this.working) this.stop("Stopped.");
      this.area.focus({preventScroll: true});
      this.area.select();
      document.execCommand("insertText", false, code); // so that the browser can undo it, too
    }
  }

  /** A cell of a tutorial, whose run or picture it shows. */
  class PagedEditor extends CodeEditor {
    static MODULE = "minipaged.stepper.edited";
    instead = " What is below was made when the site was.";

    connectedCallback() {
      if (this.shadowRoot) return;
      const {code, needed, sliders} = JSON.parse(this.querySelector("script[type='application/json']").textContent);
      this.needed = needed;
      this.prepare(code, "Run", "Ctrl+Enter runs.");
      this.around = this.closest(".editable");
      this.recorded = this.shown = this.around.querySelector("paged-stepper, .picture");
      this.shows = code; // of which the run or the picture is shown
      const what = this.recorded.matches(".picture") ? "picture" : "run";
      this.below = `the ${what} below`;
      this.past = make("p", {class: "past"}, `The ${what} from before is hidden: it is not of this code.`);
      this.past.hidden = true;
      const kept = this.kept(); // its result is not there, so that the sliders do not begin with it
      const opener = button(kept === null ? "Edit and run this code" : "Go on with your version", () => this.open(kept));
      this.printed = make("pre", {class: "printed", tabindex: "0", role: "group", "aria-label": "Printed"});
      this.printed.hidden = true;
      this.sliders = sliders.map((slider) => this.slider(slider));
      this.follow();
      const loads = `${sliders.length ? "A slider or this button loads" : "Loads"} Python from this site, about 8 MB.`;
      this.attachShadow({mode: "open"}).append(make("style", {}, STYLE),
        make("div", {class: "bar"}, opener, make("small", {}, loads)));
      if (!sliders.length) return;
      this.shadowRoot.append(make("div", {class: "sliders"}, ...this.sliders.flatMap(({nodes}) => nodes)), this.said,
        this.printed, this.past);
    }
    disconnectedCallback() {
      clearTimeout(this.pause);
      super.disconnectedCallback();
    }
    changed() { this.follow(); }

    open(kept) {
      this.foot.append(this.said);
      this.shadowRoot.querySelector(".bar").replaceWith(this.text, this.end, this.foot);
      this.shadowRoot.append(this.printed, this.past);
      this.area.value = kept ?? this.area.value;
      this.follow();
      for (const shown of this.around.querySelectorAll(":scope > .highlight")) shown.hidden = true;
      this.count();
      this.area.focus({preventScroll: true});
      if (this.python) return; // a slider has loaded it, or is about to
      this.load().then((loaded) => {
        if (loaded) this.say("Python is here. Change the code, and run it.");
        if (loaded && this.again) this.run(false);
      });
    }

    // --- Sliders ------------------------------------------------------------------------------------

    slider({name, what, values}) {
      const input = make("input", {type: "range", id: name, min: 0, max: values.length - 1, step: 1});
      const shown = make("span", {"aria-hidden": "true"});
      const line = new RegExp(`^${name} = (\\d+)`, "m"); // where it stands in the code
      input.addEventListener("input", () => {
        shown.textContent = values[input.value];
        input.setAttribute("aria-valuetext", values[input.value]);
        this.area.value = this.area.value.replace(line, `${name} = ${values[input.value]}`);
        this.count();
        if (this.bar.isConnected) this.keep();
        clearTimeout(this.pause);
        this.pause = setTimeout(() => this.slid(), PAUSE_MS);
      });
      const follow = () => {
        const value = Number(this.area.value.match(line)?.[1]);
        const nearest = values.reduce((best, other) => Math.abs(other - value) < Math.abs(best - value) ? other : best);
        input.value = values.indexOf(nearest);
        input.disabled = Number.isNaN(value);
        shown.textContent = Number.isNaN(value) ? "" : value;
        input.setAttribute("aria-valuetext", shown.textContent);
      };
      return {nodes: [make("label", {for: name}, what), input, shown], follow};
    }
    /** The sliders stand where the code says. */
    follow() { for (const {follow} of this.sliders) follow(); }
    slid() {
      this.again = this.working; // then it is run when this run, or loading, has ended
      if (this.working) return;
      this.run(false); // the slider stays under the finger
    }

    // --- Running ------------------------------------------------------------------------------------

    /** `seen`: what comes of it is moved into view. */
    async run(seen = true) {
      if (this.working || !await this.load()) return;
      this.again = false;
      this.say("Running …");
      const code = this.area.value;
      const result = await this.ask([code, this.needed], MOST_MS);
      const stays = result || this.area.value === code; // it was not reset, or brought back, while it ran
      this.hide(Boolean(stays) && code !== this.shows && !result?.run && !result?.picture);
      if (!result) return;
      this.show(result, code);
      if (seen && result.error) this.said.scrollIntoView({block: "nearest"});
      else if (seen && this.shown.getBoundingClientRect().top > innerHeight / 2) this.end.scrollIntoView();
      if (this.again) this.run(false);
    }
    stop(why) {
      clearTimeout(this.pause);
      this.again = false;
      super.stop(why);
    }
    reset() {
      clearTimeout(this.pause);
      super.reset();
      this.printed.hidden = true;
      this.put(this.recorded, this.original);
      this.say(`The code is as it was, and so is ${this.below}.`);
    }
    undo() {
      clearTimeout(this.pause);
      super.undo("Your version is back. Run it to see what it does.");
    }
    put(node, code) {
      this.shown.replaceWith(node);
      this.shown = node;
      this.shows = code;
      this.hide(false);
    }
    /** Whether what is shown is hidden, because other code ran since and showed nothing. */
    hide(is) {
      this.shown.hidden = is;
      this.past.hidden = !is;
    }
    show({run, picture: drawn, printed, error, line}, code) {
      this.printed.textContent = printed ?? "";
      this.printed.hidden = !printed;
      const own = run?.broken?.line ?? line; // in the reader's own method; `line` is where that was called
      this.count(own);
      if (run) {
        const data = make("script", {type: "application/json"}, JSON.stringify(run));
        const stepper = make("paged-stepper", {id: this.recorded.id}, data);
        this.put(stepper, code);
        if (error) stepper.go(stepper.events.length);
      }
      if (drawn) this.put(picture(drawn), code);
      if (error) {
        const at = own === line ? error
          : `${error.replace(/^Line \d+(, in \w+)?/, `Line ${own}, in ${run.broken.name}`)}. It came out in line ${line}`;
        this.say(`${at}. ${run ? `Below are the ${run.events.length + Boolean(run.broken)} steps until then.` : ""}`, true);
      } else {
        this.say(`Your version ran: ${run ? `${run.events.length} steps` : "a picture"}, below.`);
      }
    }
  }

  customElements.define("paged-editor", PagedEditor);
  globalThis.pagedCode = {CodeEditor, STYLE, button, make}; // for grader.js
})();
