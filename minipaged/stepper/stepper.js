/* <paged-stepper>: steps through the events of a run, forward and back, beside the source lines that ran.
 *
 * The element holds a <script type="application/json"> with what `minipaged.stepper.page.as_data` writes: the engine's
 * events as in docs/events.md, a sentence for each, and perhaps the text of tokens and the lines that ran before each.
 * `Fold` follows the events and so knows every block table, count, queue and token; it decides nothing that the engine
 * decides. Tests hold it to the fold of the project, minipaged/replay/state.py.
 * Step n is the state after the n-th event. A state is kept every CHECKPOINT events, so that going back is short.
 */
(() => {
  "use strict";
  const CHECKPOINT = 100;

  // --- Folding ------------------------------------------------------------------------------------

  const empty = () => ({
    pool: null, // the engine_started event
    step: 0,
    sequences: new Map(), // number -> {id, request, tokens, prompt, table, filled, swapped, done}
    arrivals: [],
    waiting: [],
    running: [],
    finished: [], // {request, id, tokens, prompt, reason}
    cached: new Map(), // block -> the tokens in it
  });

  const move = (state, request, from, to) => {
    from.splice(from.indexOf(request), 1);
    to.push(request);
    to.sort((a, b) => state.arrivals.indexOf(a) - state.arrivals.indexOf(b)); // both are in order of arrival
  };
  const ofRequest = (state, request) => [...state.sequences.values()].filter((s) => s.request === request && !s.done);

  const relocate = (state, e, swapped) => {
    const to = new Map(e.pairs);
    for (const s of ofRequest(state, e.request)) {
      s.table = s.table.map((block) => to.get(block));
      s.swapped = swapped;
    }
  };
  const blockTokens = (state, s, logical) => {
    const size = state.pool.block_size;
    return s.tokens.slice(logical * size, Math.min(s.filled, (logical + 1) * size));
  };

  const follow = {
    engine_started: (state, e) => { state.pool = e; },
    step_started: (state, e) => { state.step = e.step; },
    step_failed: (state, e) => {
      for (const r of e.requests) if (state.running.includes(r)) move(state, r, state.running, state.waiting);
    },
    request_arrived: (state, e) => {
      state.sequences.set(e.sequence, {
        id: e.sequence, request: e.request, tokens: [...e.prompt_token_ids], prompt: e.prompt_token_ids.length,
        table: [], filled: 0, swapped: false, done: false,
      });
      state.arrivals = [...state.arrivals.filter((r) => r !== e.request), e.request];
      state.waiting.push(e.request);
    },
    request_admitted: (state, e) => move(state, e.request, state.waiting, state.running),
    request_preempted: (state, e) => move(state, e.request, state.running, state.waiting),
    request_finished: (state, e) => {
      const queue = state.running.includes(e.request) ? state.running : state.waiting;
      queue.splice(queue.indexOf(e.request), 1);
    },
    sequence_forked: (state, e) => {
      const parent = state.sequences.get(e.parent);
      state.sequences.set(e.child, {...structuredClone(parent), id: e.child, request: e.request, done: false});
    },
    token_generated: (state, e) => { state.sequences.get(e.sequence).tokens.push(e.token_id); },
    sequence_finished: (state, e) => {
      const s = state.sequences.get(e.sequence);
      state.finished.push({request: s.request, id: s.id, tokens: s.tokens, prompt: s.prompt, reason: e.reason});
      s.done = true;
      if (!s.table.length) state.sequences.delete(s.id);
    },
    blocks_freed: (state, e) => {
      const s = state.sequences.get(e.sequence);
      if (s.done) state.sequences.delete(s.id);
      else Object.assign(s, {table: [], filled: 0, swapped: false});
    },
    tokens_computed: (state, e) => {
      const s = state.sequences.get(e.sequence);
      s.table.push(...e.new_blocks);
      s.filled = e.num_tokens;
    },
    block_copied: (state, e) => { state.sequences.get(e.sequence).table[e.logical_block] = e.destination; },
    prefix_reused: (state, e) => {
      const s = state.sequences.get(e.sequence);
      s.table = [...e.blocks];
      s.filled = e.blocks.length * state.pool.block_size;
    },
    blocks_loaded: (state, e) => {
      const s = state.sequences.get(e.sequence);
      s.table.push(...e.blocks);
      s.filled += e.blocks.length * state.pool.block_size;
    },
    swapped_out: (state, e) => relocate(state, e, true),
    swapped_in: (state, e) => {
      relocate(state, e, false);
      move(state, e.request, state.waiting, state.running);
    },
    block_cached: (state, e) => {
      state.cached.set(e.block, blockTokens(state, state.sequences.get(e.sequence), e.logical_block));
    },
    block_deduplicated: (state, e) => { state.sequences.get(e.sequence).table[e.logical_block] = e.cached; },
    block_evicted: (state, e) => { state.cached.delete(e.block); },
  };

  class Fold {
    constructor(events) {
      this.events = events;
      this.kept = [empty()];
    }
    /** The state after the first n events; to be looked at, not changed. */
    at(n) {
      let from = Math.min(Math.floor(n / CHECKPOINT), this.kept.length - 1);
      const state = structuredClone(this.kept[from]);
      for (let i = from * CHECKPOINT; i < n; i++) {
        follow[this.events[i].event]?.(state, this.events[i]);
        if ((i + 1) % CHECKPOINT === 0 && this.kept.length === (i + 1) / CHECKPOINT) {
          this.kept.push(structuredClone(state));
        }
      }
      return state;
    }
  }

  /** Which table entries hold each block of one pool: block -> [{id, logical}]. */
  const holders = (state, host) => {
    const found = new Map();
    for (const s of state.sequences.values()) {
      if (s.swapped !== host) continue;
      s.table.forEach((block, logical) => {
        if (!found.has(block)) found.set(block, []);
        found.get(block).push({id: s.id, logical});
      });
    }
    return found;
  };

  // --- Drawing ------------------------------------------------------------------------------------

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== false) node.setAttribute(name, value);
    node.append(...children.filter((child) => child !== null));
    return node;
  };

  const STYLE = `
:host{display:block;container-type:inline-size;margin:1.5em 0;text-align:left;
 --bg:var(--md-default-bg-color,light-dark(#fff,#1b1d24));--fg:light-dark(#1d2129,#e6e8ee);
 --dim:light-dark(#555c69,#a9b0bf);--line:light-dark(#c3c9d4,#4a5060);--soft:light-dark(#f2f4f8,#262a34);
 --ran:light-dark(#e8eefb,#2a3350);--now:light-dark(#ffe28a,#6b5200);--mark:light-dark(#0b57d0,#8ab4ff)}
:host([hidden]){display:none}
*{box-sizing:border-box}
.all{background:var(--bg);color:var(--fg);font:14px/1.45 system-ui,sans-serif;border:1px solid var(--line);border-radius:8px}
.bar{display:flex;flex-wrap:wrap;gap:6px;align-items:center;padding:8px;border-bottom:1px solid var(--line)}
button{min-width:44px;min-height:40px;padding:0 10px;color:inherit;background:var(--soft);font:inherit;
 border:1px solid var(--line);border-radius:6px;cursor:pointer}
button:disabled{opacity:.45;cursor:default}
input{flex:1 1 200px;min-width:120px;height:40px;margin:0;accent-color:var(--mark)}
.n{font-variant-numeric:tabular-nums;white-space:nowrap}
a{color:var(--mark);padding:8px 2px}
:focus-visible{outline:3px solid var(--mark);outline-offset:2px}
.say{margin:0;padding:10px 12px;min-height:4.4em;font-size:16px;border-bottom:1px solid var(--line)}
.cols{display:grid;grid-template-columns:minmax(0,1fr)}
.state{padding:4px 12px 12px;min-width:0}
.code{min-width:0;max-height:24rem;overflow:auto;border-top:1px solid var(--line);padding:8px 0;position:relative}
@container(min-width:700px){
 .cols.two{grid-template-columns:minmax(0,11fr) minmax(0,10fr)}
 .two .code{order:-1;border-top:0;border-right:1px solid var(--line);max-height:34rem}}
h3{font-size:13px;margin:12px 0 4px;color:var(--dim);font-weight:600}
ul,ol{list-style:none;margin:0;padding:0}
.pool{display:grid;grid-template-columns:repeat(auto-fill,minmax(92px,1fr));gap:6px}
.pool>li{border:1px solid var(--fg);border-radius:6px;padding:3px 5px;font-size:12px;min-width:0;background:var(--soft)}
.even{grid-auto-rows:1fr}
.pool>.free{border:1px dashed var(--line);background:none;color:var(--dim)}
.pool>.many{border-style:double;border-width:3px;padding:1px 3px}
.pool>.new,.table>.new{outline:3px solid var(--mark);outline-offset:0}
.pool b{font-size:14px}.pool .refs{float:right}
.slots{display:grid;grid-template-columns:repeat(auto-fit,minmax(36px,1fr));gap:2px;margin-top:3px}
.slots li{border:1px solid var(--line);border-radius:3px;min-height:19px;padding:0 2px;overflow:hidden;text-overflow:ellipsis;
 white-space:nowrap;font:11px/17px ui-monospace,monospace;background:var(--bg);color:var(--fg)}
.seq{border-left:3px solid var(--line);padding-left:8px;margin:8px 0}
.seq p{margin:2px 0}
.tokens span{display:inline-block;border:1px solid var(--line);border-radius:3px;padding:0 3px;margin:1px 2px 1px 0;
 font:12px/18px ui-monospace,monospace;white-space:pre}
.tokens .out{font-weight:700}
.tokens .todo{border-style:dashed;border-color:var(--fg)}
.table{display:flex;flex-wrap:wrap;gap:5px;align-items:center;font-size:12px}
.table>li{border:1px solid var(--line);border-radius:4px;padding:0 5px}
.key{margin:6px 0;font-size:12px;color:var(--dim)}
dl{display:grid;grid-template-columns:auto 1fr;gap:2px 10px;margin:0}
dt{color:var(--dim)}dd{margin:0}
.code h4{font:600 12px/1.4 ui-monospace,monospace;margin:8px 12px 2px;color:var(--dim);overflow-wrap:anywhere}
.code pre{margin:0;font:12px/1.5 ui-monospace,monospace}
.l{display:grid;grid-template-columns:4.6em 1fr;padding-right:8px;color:var(--dim)}
.l i{font-style:normal;text-align:right;padding-right:8px;user-select:none}
.l span{white-space:pre-wrap;overflow-wrap:anywhere}
.ran{background:var(--ran);color:var(--fg)}
.now{background:var(--now);color:light-dark(#000,#fff);font-weight:700;box-shadow:inset 4px 0 var(--mark)}
.none{margin:12px;color:var(--dim)}
@media(forced-colors:active){.now{outline:2px solid}}
`;

  class PagedStepper extends HTMLElement {
    static Fold = Fold;
    static holders = holders;

    connectedCallback() {
      if (this.shadowRoot) return;
      this.data = JSON.parse(this.querySelector("script[type='application/json']").textContent);
      this.events = this.data.events;
      this.fold = new Fold(this.events);
      this.used = {false: new Set(), true: new Set()}; // the blocks that this run ever holds, of the device and the host
      for (const e of this.events) {
        for (const block of [...e.new_blocks ?? [], e.destination ?? []].flat()) this.used.false.add(block);
        for (const [from, to] of e.pairs ?? []) {
          this.used[e.event === "swapped_in"].add(from);
          this.used[e.event !== "swapped_in"].add(to);
        }
      }
      this.build();
      this.go(this.linked() ?? 1);
      addEventListener("hashchange", () => { // to a heading, too: that is for no stepper
        if (this.id && location.hash === `#${this.id}`) this.go(this.linked() ?? this.n);
      });
      this.closest("details")?.addEventListener("toggle", () => this.go(this.n)); // what is folded cannot be scrolled
    }
    /** The step of `?step=n#id`, if that is for this stepper; without an id it is for the first of the page. */
    linked() {
      const wanted = new URLSearchParams(location.search).get("step");
      const steppers = [...document.querySelectorAll("paged-stepper")];
      const named = steppers.find((s) => s.id && `#${s.id}` === location.hash);
      return wanted !== null && (named ?? steppers[0]) === this ? Number.parseInt(wanted, 10) || 1 : null;
    }
    disconnectedCallback() { this.pause(); }

    build() {
      const root = this.attachShadow({mode: "open"});
      const button = (label, sign, act) => {
        const node = make("button", {type: "button", "aria-label": label, title: label}, sign);
        node.addEventListener("click", act);
        return node;
      };
      this.back = button("Previous step", "◀", () => { this.pause(); this.go(this.n - 1); });
      this.player = button("Play", "Play", () => (this.timer ? this.pause() : this.play()));
      this.next = button("Next step", "▶", () => { this.pause(); this.go(this.n + 1); });
      this.slider = make("input", {type: "range", min: 1, max: this.events.length, value: 1, "aria-label": "Step"});
      this.slider.addEventListener("input", () => { this.pause(); this.go(Number(this.slider.value)); });
      this.number = make("span", {class: "n"});
      this.link = make("a", {href: "?step=1"}, "link");
      this.say = make("p", {class: "say", "aria-live": "polite", "aria-atomic": "true"});
      const region = (name, label) => make("div", {class: name, role: "region", "aria-label": label});
      this.state = region("state", "Blocks, sequences and queues after this step");
      this.code = region("code", "Source lines that ran in this step");
      this.code.tabIndex = 0; // it scrolls
      const withCode = this.data.functions.length > 0;
      this.cols = make("div", {class: withCode ? "cols two" : "cols"}, this.state, withCode ? this.code : null);
      const bar = make("div", {class: "bar"}, this.back, this.next, this.player, this.slider, this.number, this.link);
      const title = this.data.title || "A run of the engine, step by step";
      root.append(make("style", {}, STYLE),
        make("div", {class: "all", role: "group", "aria-label": title}, bar, this.say, this.cols));
      // A key counts only when it is pressed inside.
      root.addEventListener("keydown", (key) => {
        const to = {ArrowLeft: this.n - 1, ArrowRight: this.n + 1, Home: 1, End: this.events.length}[key.key];
        if (to === undefined || key.altKey || key.ctrlKey || key.metaKey) return;
        key.preventDefault();
        this.pause();
        this.go(to);
      });
    }

    play() {
      if (this.n === this.events.length) this.go(1);
      this.timer = setInterval(() => {
        this.go(this.n + 1);
        if (this.n === this.events.length) this.pause();
      }, 1500);
      this.player.textContent = "Pause";
      this.player.setAttribute("aria-label", "Pause");
    }
    pause() {
      clearInterval(this.timer);
      this.timer = null;
      this.player.textContent = "Play";
      this.player.setAttribute("aria-label", "Play");
    }

    word(token) { return this.data.words?.[token] ?? String(token); }
    /** A word of line breaks or spaces alone would look like nothing. */
    visible(token) { return this.word(token).replaceAll("\n", "↵").replace(/^ +$/, (spaces) => "␣".repeat(spaces.length)); }

    go(wanted) {
      const n = Math.max(1, Math.min(this.events.length, wanted));
      const focused = this.shadowRoot.activeElement;
      this.n = n;
      const before = this.fold.at(n - 1);
      const after = this.fold.at(n);
      this.back.disabled = n === 1;
      this.next.disabled = n === this.events.length;
      if (focused?.disabled) this.slider.focus(); // a button at its end would lose the focus, and the keys with it
      this.slider.value = n;
      this.slider.setAttribute("aria-valuetext", `step ${n} of ${this.events.length}`);
      this.number.textContent = `${n} / ${this.events.length}`;
      this.link.href = `?step=${n}${this.id ? `#${this.id}` : ""}`;
      this.link.setAttribute("aria-label", `Link to step ${n}`);
      this.say.textContent = this.data.sentences[n - 1];
      const note = this.data.notes?.[n - 1];
      if (note) this.say.append(make("b", {}, ` ${note}`));
      this.drawState(before, after);
      if (this.data.functions.length) this.drawCode(n - 1);
    }

    drawState(before, after) {
      const parts = [];
      for (const host of [false, true]) {
        if (!host || this.used.true.size) parts.push(...this.drawPool(before, after, host));
      }
      parts.push(make("p", {class: "key"}, "×2: two hold the block. Thick frame: changed in this step."
        + " Dashed token: known, but not in the cache yet. 0 → 7 (3/4): logical block 0 is block 7, 3 of 4 slots filled."));
      parts.push(make("h3", {}, "Queues"), this.drawQueues(after));
      const live = [...after.sequences.values()];
      if (live.length) parts.push(make("h3", {}, "Sequences, their tokens and block tables"));
      for (const s of live) parts.push(this.drawSequence(before, after, s));
      const done = after.finished.filter((s) => s.reason !== "dropped");
      if (done.length) parts.push(make("h3", {}, "Finished"));
      for (const s of done) parts.push(make("div", {class: "seq"}, make("p", {}, `s${s.id} of request ${s.request}`),
        this.drawTokens(s.tokens, s.prompt, s.tokens.length)));
      this.state.replaceChildren(...parts);
    }

    drawPool(before, after, host) {
      const {block_size: size, num_blocks, num_swap_blocks} = after.pool;
      const total = host ? num_swap_blocks : num_blocks;
      const now = holders(after, host);
      const then = before.pool ? holders(before, host) : new Map();
      const cached = (state, block) => !host && state.cached.has(block);
      const held = new Set([...now.keys(), ...(host ? [] : after.cached.keys())]);
      // A small pool is shown whole; of a large one the blocks that this run ever holds.
      const shown = total <= 64 ? [...Array(total).keys()] : [...this.used[host]].sort((a, b) => a - b);
      const cells = shown.map((block) => {
        const who = now.get(block) ?? [];
        const refs = who.length + cached(after, block);
        const sequences = [...new Set(who.map((h) => h.id))];
        const owners = [...sequences.map((id) => `s${id}`), ...(cached(after, block) ? ["cache"] : [])];
        const contents = (state, h) => blockTokens(state, state.sequences.get(h.id), h.logical);
        const tokens = who.length ? contents(after, who[0]) : cached(after, block) ? after.cached.get(block) : [];
        const old = then.get(block) ?? [];
        const oldTokens = old.length ? contents(before, old[0]).length : cached(before, block) ? size : 0;
        const changed = refs !== old.length + cached(before, block) || tokens.length !== oldTokens
          || who.some((h) => !old.some((o) => o.id === h.id));
        const slots = size <= 8 ? make("ol", {class: "slots", "aria-label": "slots"},
          ...Array.from({length: refs ? size : 0}, (_, i) => make("li", {title: i < tokens.length
            ? this.word(tokens[i]) : "empty slot"}, i < tokens.length ? this.visible(tokens[i]).trim() : " ")))
          : make("div", {}, refs ? `${tokens.length} / ${size} filled` : "");
        const kind = refs === 0 ? "free" : refs > 1 ? "many" : "";
        return make("li", {class: `${kind} ${changed ? "new" : ""}`, "data-block": block, "data-refs": refs},
          make("b", {}, String(block)), make("span", {class: "refs"}, refs ? `×${refs}` : "free"),
          make("div", {}, owners.join(" ")), slots);
      });
      const hidden = total - shown.length;
      const title = `${host ? "Host pool (swapped out)" : "Block pool"}: ${total - held.size} of ${total} blocks free`
        + (hidden ? `; ${hidden} that this run never holds are not shown` : "");
      return [make("h3", {}, title),
        make("ul", {class: total <= 16 ? "pool even" : "pool", "aria-label": `${title}. Number, reference count, owners.`}, ...cells)];
    }

    drawQueues(state) {
      const swapped = (r) => ofRequest(state, r).some((s) => s.swapped);
      const row = (name, requests) => [make("dt", {}, name), make("dd", {}, requests.join(", ") || "nobody")];
      const out = state.waiting.filter(swapped);
      return make("dl", {}, ...row("running", state.running), ...row("waiting", state.waiting.filter((r) => !swapped(r))),
        ...(out.length ? row("swapped out", out) : []));
    }

    drawSequence(before, after, s) {
      const size = after.pool.block_size;
      const old = before.sequences.get(s.id);
      const where = s.done ? "ended" : s.swapped ? "swapped out" : after.running.includes(s.request) ? "running" : "waiting";
      const entries = s.table.map((block, logical) => {
        const filled = Math.min(size, s.filled - logical * size);
        const changed = !old || old.table[logical] !== block || Math.min(size, old.filled - logical * size) !== filled;
        return make("li", {class: changed ? "new" : ""}, `${logical} → `, make("b", {}, String(block)),
          ` (${filled}/${size})`);
      });
      return make("div", {class: "seq"}, make("p", {}, make("b", {}, `s${s.id}`), ` of request ${s.request}, ${where}`),
        this.drawTokens(s.tokens, s.prompt, s.filled),
        entries.length ? make("ul", {class: "table", "aria-label":
          `Block table of sequence ${s.id}: logical block, physical block, filled slots`}, ...entries)
          : make("p", {}, "empty block table"));
    }

    drawTokens(tokens, prompt, filled) {
      const MOST = 60;
      const first = Math.max(0, tokens.length - MOST); // of a long text, its end
      const spans = tokens.slice(first).map((token, i) => make("span", {
        class: `${first + i >= prompt ? "out" : ""} ${first + i >= filled ? "todo" : ""}`,
        title: (first + i >= prompt ? "generated" : "prompt") + (first + i >= filled ? ", not in the cache yet" : ""),
      }, this.visible(token)));
      return make("p", {class: "tokens"}, first ? `… ${first} before … ` : "", ...spans);
    }

    /** A line that is too long goes on below its own beginning, a little further in. */
    drawLine(text) {
      const indent = text.search(/\S|$/);
      return make("span", {style: `padding-left:${indent + 3}ch;text-indent:-3ch`}, text.slice(indent) || " ");
    }

    drawCode(index) {
      const {functions, lines, lines_of: linesOf, current} = this.data;
      const ran = lines[linesOf[index]];
      const lit = current[index];
      const parts = ran.map(([f, own]) => {
        const {name, file, first, source} = functions[f];
        const set = new Set(own);
        return make("div", {}, make("h4", {}, `${name}  ${file}`), make("pre", {}, ...source.map((text, i) => {
          const line = first + i;
          const now = lit && lit[0] === f && lit[1] === line;
          return make("div", {class: `l ${set.has(line) ? "ran" : ""} ${now ? "now" : ""}`, "data-line": line},
            make("i", {}, `${now ? "▶" : set.has(line) ? "·" : ""} ${line}`), this.drawLine(text));
        })));
      });
      this.code.replaceChildren(...(parts.length ? parts
        : [make("p", {class: "none"}, "None of the lines shown on this page ran in this step.")]));
      const now = this.code.querySelector(".now");
      if (now) this.code.scrollTop += now.getBoundingClientRect().top - this.code.getBoundingClientRect().top
        - this.code.clientHeight / 2;
    }
  }

  if (!customElements.get("paged-stepper")) customElements.define("paged-stepper", PagedStepper);
})();
