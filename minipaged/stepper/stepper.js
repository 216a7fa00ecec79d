/* <paged-stepper>: steps through the events of a run, forward and back, next to the source lines that ran.
 *
 * The element contains a <script type="application/json"> written by `minipaged.stepper.page.as_data`: the engine's
 * events (docs/events.md), a sentence for each, and optionally the text of tokens and the lines that ran before each.
 * `Fold` computes every block table, count, queue and token from the events; it makes no decision of the engine.
 * Tests compare it with the project's fold, minipaged/replay/state.py.
 * It opens at step 1, or at the step in the attribute `start`.
 * Step n is the state after the n-th event. A state is kept every CHECKPOINT events, so that going back is fast.
 */
(() => {
  "use strict";
  const CHECKPOINT = 100;

  // --- Folding ---

  const empty = () => ({
    pool: null, // the engine_started event
    step: 0,
    sequences: new Map(), // number -> {id, request, tokens, drafted, verified, prompt, table, filled, swapped, done}
    arrivals: [],
    waiting: [],
    running: [],
    finished: [], // sequences, each with a reason
    cached: new Map(), // block -> the tokens in it
    floor: new Map(), // host block that the floor below the prefix cache keeps -> the tokens in it
  });

  const leave = (queue, request) => queue.splice(queue.indexOf(request), 1);
  const move = (state, request, from, to) => {
    leave(from, request);
    to.push(request);
    to.sort((a, b) => state.arrivals.indexOf(a) - state.arrivals.indexOf(b)); // both are in order of arrival
  };
  const its = (state, e) => state.sequences.get(e.sequence);
  const allOf = (state) => [...state.sequences.values()];
  const ofRequest = (state, request) => allOf(state).filter((s) => s.request === request && !s.done);
  const isSwapped = (state, request) => ofRequest(state, request).some((s) => s.swapped);

  const cloned = (s) => ({...s, tokens: [...s.tokens], table: [...s.table]});
  const relocate = (state, e, swapped) => {
    const to = new Map(e.pairs);
    for (const s of ofRequest(state, e.request)) {
      s.table = s.table.map((block) => to.get(block) ?? block);
      s.swapped = swapped;
    }
  };
  const HOLE = -1; // a table entry whose block a window has passed
  /** The tokens that a sequence has, and those drafted to come next. */
  const all = (s) => s.drafted.length > s.tokens.length ? s.drafted : s.tokens;
  /** The number of tokens that it has or, as drafted tokens that stand, is going to have. */
  const sure = (s) => Math.max(s.tokens.length, s.verified);
  /** The class of the token at a position. A draft is drawn hollow, a refused one struck out; a pending one is unknown. */
  const signOf = (s, i) => i < sure(s) ? "" : i >= all(s).length ? "pending" : s.verified < s.tokens.length ? "draft" : "refused";
  /** With G groups of layers, the entries of logical block i are i * G to i * G + G - 1, one for each group. */
  const slotsOf = (state, s, entry) => {
    const size = state.pool.block_size;
    const from = Math.floor(entry / state.pool.group_windows.length) * size;
    return all(s).slice(from, Math.min(s.filled, from + size)).map((token, i) => [token, signOf(s, from + i)]);
  };
  /** By full blocks. */
  const extend = (state, e, s) => {
    s.table.push(...e.blocks ?? e.pairs.map((pair) => pair[1]));
    s.filled = s.table.length * state.pool.block_size;
  };

  const follow = {
    engine_started(state, e) { state.pool = e; },
    step_started(state, e) { state.step = e.step; },
    step_failed(state, e) {
      for (const r of e.requests) if (state.running.includes(r)) move(state, r, state.running, state.waiting);
    },
    request_arrived(state, e) {
      state.sequences.set(e.sequence, {
        id: e.sequence, request: e.request, tokens: [...e.prompt_token_ids], drafted: [], verified: 0,
        prompt: e.prompt_token_ids.length, table: [], filled: 0, swapped: false, done: false,
      });
      state.arrivals = [...state.arrivals.filter((r) => r !== e.request), e.request];
      state.waiting.push(e.request);
    },
    request_admitted(state, e) { move(state, e.request, state.waiting, state.running); },
    request_preempted(state, e) { move(state, e.request, state.running, state.waiting); },
    request_finished(state, e) {
      leave(state.running.includes(e.request) ? state.running : state.waiting, e.request);
    },
    sequence_forked(state, e) {
      state.sequences.set(e.child, {...cloned(state.sequences.get(e.parent)), id: e.child, request: e.request, done: false});
    },
    token_generated(state, e, s) { s.tokens.push(e.token_id); },
    sequence_finished(state, e, s) {
      state.finished.push({...s, reason: e.reason});
      s.done = true;
      if (!s.table.length) state.sequences.delete(s.id);
    },
    blocks_freed(state, e, s) {
      if (s.done) state.sequences.delete(s.id);
      else Object.assign(s, {table: [], filled: 0, swapped: false, drafted: [], verified: 0});
    },
    tokens_computed(state, e, s) {
      s.table.push(...e.new_blocks);
      s.filled = e.num_tokens;
    },
    tokens_drafted(state, e, s) { s.drafted = [...s.tokens, ...e.token_ids]; },
    tokens_accepted(state, e, s) { s.verified = s.tokens.length + e.num_accepted; },
    blocks_rolled_back(state, e, s) {
      s.table.length -= e.blocks.length;
      s.filled = e.num_tokens;
      s.drafted = s.drafted.slice(0, s.filled);
    },
    blocks_passed(state, e, s) { for (const entry of e.entries) s.table[entry] = HOLE; },
    block_copied(state, e, s) { s.table[e.logical_block] = e.destination; },
    prefix_reused(state, e, s) {
      Object.assign(s, {table: [...e.blocks], filled: e.num_tokens || e.blocks.length * state.pool.block_size});
    },
    blocks_loaded: extend,
    blocks_promoted: extend,
    swapped_out(state, e) { relocate(state, e, true); },
    swapped_in(state, e) {
      relocate(state, e, false);
      move(state, e.request, state.waiting, state.running);
    },
    block_cached(state, e, s) {
      const slots = slotsOf(state, s, e.logical_block).slice(0, e.num_tokens || state.pool.block_size);
      state.cached.set(e.block, slots.map(([token]) => token));
    },
    block_deduplicated(state, e, s) { s.table[e.logical_block] = e.cached; },
    block_evicted(state, e) { state.cached.delete(e.block); },
    block_demoted(state, e) { state.floor.set(e.host_block, state.cached.get(e.block)); },
    host_block_dropped(state, e) { state.floor.delete(e.host_block); },
  };

  const copied = (state) => ({
    ...state, arrivals: [...state.arrivals], waiting: [...state.waiting], running: [...state.running],
    finished: [...state.finished], cached: new Map(state.cached), floor: new Map(state.floor),
    sequences: new Map(allOf(state).map((s) => [s.id, cloned(s)])),
  });
  /** Apply one event. An impossible one, in a run with a faulty part, changes nothing. */
  const advance = (state, e) => {
    try {
      follow[e.event]?.(state, e, its(state, e));
    } catch { /* its sentence says so */ }
  };

  class Fold {
    constructor(events) {
      this.events = events;
      this.kept = [empty()];
      this.latest = [0, empty()]; // the last one that was read
    }
    /** The state after the first n events. Callers must not change it. */
    at(n) {
      let from = Math.min(Math.floor(n / CHECKPOINT), this.kept.length - 1) * CHECKPOINT;
      let start = this.kept[from / CHECKPOINT];
      if (from <= this.latest[0] && this.latest[0] <= n) [from, start] = this.latest;
      const state = copied(start);
      for (let i = from; i < n; i++) {
        advance(state, this.events[i]);
        if ((i + 1) % CHECKPOINT === 0 && this.kept.length === (i + 1) / CHECKPOINT) this.kept.push(copied(state));
      }
      this.latest = [n, state];
      return state;
    }
  }

  /** The whole run: each request's states and what happened to it, and the part of the pool in use.
   * Kinds: waiting, running, swapped, recomputing (running again, until what was dropped is computed). */
  const survey = (events) => {
    const state = empty();
    const rows = new Map(); // request -> {sequences, spans: [{kind, from, to}], marks: [{kind, at}]}, numbers of steps
    const again = new Set();
    const used = []; // device blocks at step n: held by tables, and held by the prefix cache only
    const sizes = []; // roughly the length of the text on the sequences
    const every = Math.ceil(events.length / 600);
    const kindOf = (request) => {
      if (state.running.includes(request)) return again.has(request) ? "recomputing" : "running";
      if (state.waiting.includes(request)) return isSwapped(state, request) ? "swapped" : "waiting";
    };
    events.forEach((e, i) => {
      const n = i + 1;
      const of = e.request ?? its(state, e)?.request;
      advance(state, e);
      if (e.event === "request_arrived") rows.set(of, {sequences: [e.sequence], spans: [], marks: []});
      if (e.event === "sequence_forked") rows.get(of)?.sequences.push(e.child);
      if (e.event === "request_preempted" && e.mode === "recompute") again.add(of);
      if (e.event === "token_generated") again.delete(of);
      for (const r of e.requests ?? [of]) {
        if (e.requests) again.add(r); // their step has failed
        const row = rows.get(r);
        if (!row) continue;
        const kind = kindOf(r);
        const open = row.spans.findLast((span) => span.to === null);
        if (open?.kind !== kind) {
          if (open) open.to = n;
          if (kind) row.spans.push({kind, from: n, to: null});
        }
        const mark = MARKS[e.event];
        if (mark) row.marks.push({kind: mark, at: n});
      }
      if (i % every === 0 || n === events.length) {
        const held = holders(state, false);
        used.push([n, held.size, [...state.cached.keys()].filter((block) => !held.has(block)).length]);
      }
      sizes.push([...allOf(state), ...shownOf(state.finished)].reduce((sum, s) =>
        sum + 20 + Math.min(60, all(s).length) + (s.reason ? 0 : 4 * s.table.length), 0));
    });
    for (const row of rows.values()) for (const span of row.spans) span.to ??= events.length;
    return {rows, used, sizes};
  };
  /** The sequences to draw. */
  const shownOf = (finished) => finished.filter((s) => s.reason !== "dropped").slice(-MOST_FINISHED);
  const MARKS = {sequence_forked: "fork", block_copied: "copy", request_preempted: "preemption", request_finished: "end"};

  /** The table entries for each block of one pool: block -> [{id, entry}]. */
  const holders = (state, host) => {
    const found = new Map();
    for (const s of allOf(state)) {
      if (s.swapped !== host) continue;
      s.table.forEach((block, entry) => {
        if (block === HOLE) return;
        if (!found.has(block)) found.set(block, []);
        found.get(block).push({id: s.id, entry});
      });
    }
    return found;
  };

  // --- Drawing ---

  /** `tag`: may have a dot and classes behind it. `parts`: children, and objects of attributes. */
  const make = (tag, ...parts) => {
    const [name, classes] = tag.split(".");
    const node = document.createElement(name);
    if (classes) node.className = classes;
    for (const part of parts) {
      if (part?.constructor !== Object) node.append(part ?? "");
      else for (const [key, value] of Object.entries(part)) if ((value ?? false) !== false) node.setAttribute(key, value);
    }
    return node;
  };

  /** Replace the children of a node that differ. `items`: for each, the data that it shows, and a function to make it. */
  const patch = (parent, items) => {
    const old = [...parent.children];
    items.forEach(([parts, build], i) => {
      const sign = JSON.stringify(parts);
      if (old[i]?.sign === sign) return;
      const node = build();
      node.sign = sign;
      if (old[i]) old[i].replaceWith(node);
      else parent.append(node);
    });
    for (const child of old.slice(items.length)) child.remove();
  };
  const on = (node, names, act) => {
    for (const name of names.split(" ")) node.addEventListener(name, act);
    return node;
  };
  const HIDDEN = {"aria-hidden": true};
  const rect = (node) => node?.getBoundingClientRect();

  /** The demo's colours (minipaged/demo/view.py), with those on which text is white. */
  const HUES = "0087ff d75f00 008700 af00af 008787 d70000 875fff af5f00 5f87af d70087 878700 5f875f".split(" ");
  const DARK = [2, 3, 5, 7, 9];
  const hueOf = (id) => `--hue:#${HUES[id % HUES.length]};--ink:${DARK.includes(id % HUES.length) ? "#fff" : "#000"}`;
  /** The letters of a sequence: A to Z, AA, AB ... */
  const letterOf = (id) => (id >= 26 ? letterOf(Math.floor(id / 26) - 1) : "") + String.fromCharCode(65 + id % 26);
  const numberOf = (letters) => [...letters].reduce((n, sign) => 26 * n + sign.charCodeAt(0) - 64, 0) - 1;
  const chip = (id) => make("b.chip", {style: hueOf(id), title: `sequence ${letterOf(id)}`}, letterOf(id));
  /** A request's name, with its sequences' letters if they differ: "3 (D, E)". */
  const called = (state, name) => {
    const letters = ofRequest(state, name).map((s) => letterOf(s.id)).join(", ");
    return letters && letters !== name ? `${name} (${letters})` : name;
  };

  const MOST_TOKENS = 60; // shown of a sequence, from its end
  const MOST_FINISHED = 12; // sequences
  const SPEEDS = [["½×", 0.5], ["1×", 1], ["2×", 2], ["4×", 4]];
  const FLIGHT = 500; // milliseconds
  /** The moves of an event, by names of pool cells, and a word. Here: the word, the pools from and to which blocks move
   * ("": given up), the pairs. */
  const MOVES = Object.fromEntries([
    ["block_copied", "copied", "block", "block", (e) => [[e.source, e.destination]]],
    ["swapped_out", "out", "block", "host"],
    ["swapped_in", "in", "host", "block"],
    ["block_deduplicated", "same", "block", "block", (e) => [[e.own, e.cached]]],
    ["blocks_rolled_back", "back", "block", ""],
    ["blocks_passed", "passed", "block", ""],
    ["block_evicted", "evicted", "block", "", (e) => [[e.block]]],
    ["block_demoted", "down", "block", "host", (e) => [[e.block, e.host_block]]],
    ["blocks_promoted", "up", "host", "block"],
    ["host_block_dropped", "dropped", "host", "", (e) => [[e.host_block]]],
  ].map(([name, word, from, to, pairs = (e) => e.pairs ?? e.blocks.map((b) => [b])]) =>
    [name, (e) => [pairs(e).map(([a, b]) => [`${from} ${a}`, to && `${to} ${b}`]), word]]));
  const OF_INTEREST = [...Object.keys(MOVES), "sequence_forked", "request_preempted", "prefix_reused", "blocks_loaded",
    "request_refused", "blocks_freed", "step_failed", "tokens_drafted", "tokens_accepted", "broken_here"];
  const SHAPES = { // marks on the timeline, around 0, 0
    fork: "M-4-4L0 0L4-4M0 0V5", copy: "M-4-4H2V2H-4ZM-1-1H5V5H-1Z", preemption: "M-4-4L4 4M4-4L-4 4", end: "M-3-5H1V5H-3",
  };
  const KINDS = {running: "running", waiting: "waiting", swapped: "swapped out", recomputing: "recomputing"};

  /** The legend: each sign with its meaning. */
  const legend = (state) => [
    [chip(0), "a sequence"],
    [make("b.who", chip(0), chip(1)), "×2: two hold the block"],
    [make("b.tok", "prompt")], [make("b.tok out", "generated")],
    [make("b.tok todo", "known"), "not in the cache yet"], [make("s", "word"), "left in this step"],
    [make("b.tok draft", "draft"), make("b.tok refused", "refused"), "until the step says how many stand"],
    [make("b.entry new", "0 → 7 (3/4)"), "logical block 0 is block 7, 3 of 4 slots filled; thick: changed in this step"],
    ...state.pool.group_windows.some(Number) ? [[make("b.entry hole", "0 → -"), "a hole: the window has passed its tokens"]] : [],
  ].map((sign) => make("span", ...sign.flatMap((part) => [part, " "])));
  const KEYS = "Point at a block, a table entry or a token, or tap it, to see what belongs to it. Keys: ← and → by steps of this page,"
    + " with Shift by steps of the engine; n to the next event of interest; Home and End; ↑ and ↓ within the pool, a block table, or the code.";

  const STYLE = `
:host{display:block;container-type:inline-size;margin:1.5em 0;text-align:left;
 --edge:1px solid var(--line);--mono:ui-monospace,monospace;
 --bg:var(--md-default-bg-color,light-dark(#fff,#1b1d24));--fg:light-dark(#1d2129,#e6e8ee);
 --dim:light-dark(#555c69,#a9b0bf);--line:light-dark(#c3c9d4,#4a5060);--soft:light-dark(#f2f4f8,#262a34);
 --bad:light-dark(#a3163d,#ffab91);--ran:light-dark(#e8eefb,#2a3350);--now:light-dark(#ffe28a,#6b5200);--mark:light-dark(#0b57d0,#8ab4ff)}
:host([hidden]){display:none}
*{box-sizing:border-box}
.all{background:var(--bg);color:var(--fg);font:14px/1.45 system-ui,sans-serif;border:var(--edge);border-radius:8px}
.head{position:sticky;top:var(--stepper-top,0);z-index:3;background:var(--bg);border-radius:8px}
.bar,.signs,.pools,.strip,.legend,dl{display:flex;flex-wrap:wrap}
.bar{gap:6px;align-items:center;padding:8px}
button,select{min-width:44px;min-height:40px;padding:0 8px;color:inherit;background:var(--soft);font:inherit;
 border:var(--edge);border-radius:6px;cursor:pointer}
button:disabled{opacity:.45;cursor:default}
.n{font-variant-numeric:tabular-nums;white-space:nowrap;margin-left:auto}
a{color:var(--mark);padding:8px 2px}
:focus-visible{outline:3px solid var(--mark);outline-offset:2px}.time :focus-visible{outline-offset:-3px}
.saying{display:grid;border-bottom:var(--edge)}
.saying>*{grid-area:1/1;margin:0;padding:4px 12px 10px;font-size:16px}
.room{visibility:hidden}
.say.bad{box-shadow:inset 6px 0 var(--bad)}
.claim{height:34px;overflow:hidden;font-size:11px;line-height:16px;font-weight:700;color:var(--bad)}
.pool>.wrong{border-color:var(--bad);box-shadow:inset 0 0 0 2px var(--bad)}
.chip{display:inline-block;min-width:1.5em;padding:0 .3em;border-radius:4px;text-align:center;font-size:.85em;line-height:1.45;
 background:var(--hue,var(--dim));color:var(--ink,var(--bg))}
.time{position:relative;padding:6px 0 0;border-bottom:var(--edge);
 svg{display:block;width:100%;overflow:visible}
 text{font-size:11px;fill:var(--dim)}
 .running,.recomputing{fill:var(--hue)}
 .stripes{fill:url(#stripes)}
 .waiting{fill:none;stroke:var(--dim);stroke-width:2;stroke-dasharray:2 3}
 .swapped{fill:var(--bg);stroke:var(--hue);stroke-width:2}
 .tick,.whole{fill:none;stroke:var(--line)}
 .halo{fill:none;stroke:var(--bg);stroke-width:5}
 .sign{fill:none;stroke:var(--fg);stroke-width:1.8}
 .held{fill:var(--dim)}.kept{fill:var(--line)}
 input{position:absolute;top:0;margin:0;appearance:none;background:none;cursor:pointer;touch-action:pan-y;
  --thumb:linear-gradient(90deg,#0000 5px,var(--mark) 5px 7px,#0000 7px),linear-gradient(var(--mark) 8px,#0000 8px)}
 input::-webkit-slider-runnable-track{height:100%;background:none}
 input::-webkit-slider-thumb{appearance:none;width:12px;height:100%;border:0;border-radius:0;forced-color-adjust:none;background:var(--thumb)}
 input::-moz-range-track{height:100%;background:none}
 input::-moz-range-thumb{width:12px;height:100%;border:0;border-radius:0;background:var(--thumb)}
 .bad{stroke:var(--bad);stroke-width:2.5}.badly{fill:var(--bad);font-weight:700}}
.signs{gap:0 12px;margin:0;padding:0 12px 4px;font-size:12px;color:var(--dim);
 svg{display:inline-block;width:16px;height:12px;margin-right:4px;vertical-align:-1px}}
.tabs{display:none;gap:6px;padding:6px 8px 0;button{flex:1}}
[aria-pressed=true]{background:var(--mark);color:var(--bg);font-weight:600}
.cols{display:grid;grid-template-columns:minmax(0,1fr)}
.stage{position:relative;min-width:0;overflow-x:clip}
.state{padding:4px 12px 12px;position:relative}
.arrows{position:absolute;inset:0;width:100%;height:100%;pointer-events:none;z-index:1;overflow:hidden}
.pool>li,.entry{position:relative;z-index:2}
.arrows{
 path{fill:none;stroke:color-mix(in srgb,var(--hue),var(--fg) 30%);stroke-width:1.5;opacity:.5}
 .far{opacity:.12}
 .strong{stroke-width:2.5;opacity:1}}
.state:has(.lit) .moves{opacity:.15}
.moves{z-index:3;
 path{stroke:var(--mark);stroke-width:3;opacity:1}
 text{font-weight:700;font-size:12px;fill:var(--fg);text-anchor:middle;paint-order:stroke;stroke:var(--bg);stroke-width:5px}}
.flier{position:absolute;z-index:3;pointer-events:none;box-shadow:0 4px 14px #0006;
 >b,.refs{visibility:hidden}}
.code{min-width:0;height:24rem;overflow:auto;border-top:var(--edge);padding:8px 0;position:relative}
@container(min-width:700px){
 .cols.two{grid-template-columns:minmax(0,4fr) minmax(0,5fr)}
 .two .code{order:-1;border-top:0;border-right:var(--edge);height:0;min-height:100%}}
@container(max-width:699.9px){
 .tabs{display:flex}.bar{gap:4px;padding:6px}
 .bar button,.bar select{min-width:38px;padding:0 5px}
 .all:not([data-tab=memory]) .memory,.all:not([data-tab=sequences]) .seqs,.all:not([data-tab=code]) .code,
 .all[data-tab=code] .state{display:none}}
.title{font-size:13px;margin:10px 0 4px;color:var(--dim);font-weight:600}
ul,ol{list-style:none;margin:0;padding:0}
.pools{gap:0 16px}.pools>div{min-width:0}
.pools .title,.slots li,.tok{white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.pool{--least:96px;display:grid;grid-template-columns:repeat(auto-fill,minmax(var(--least),1fr));gap:6px}
.pool.small{--least:72px;gap:4px}.pool.judged{--least:128px}
.pool>li,.flier{border:1px solid var(--hue,var(--fg));border-radius:6px;padding:2px 4px 4px;font-size:12px;min-width:0;background:var(--soft)}
.pool>.new,.entry.new{outline:3px solid var(--mark);outline-offset:0}
.lit{box-shadow:0 0 0 4px var(--now)}
.pool>.lit,.entry.lit{background:var(--now)}
.pool>.lit,.pool>.lit .claim{color:var(--fg)}
.tok.lit,.slots .lit{background:var(--mark)!important;color:var(--bg)!important;box-shadow:none}
:is(.pool,.flier) b{font-size:14px}.refs{float:right}
.who{display:flex;height:18px;margin:1px 0 2px;overflow:hidden;border-radius:4px;
 .chip{flex:1 1 0;min-width:0;padding:0;font-size:12px;line-height:18px;border-radius:0;white-space:nowrap}
 .cache{flex:none;background:var(--dim);color:var(--bg);padding:0 3px;font-size:11px}}
.fill{display:flex;height:6px;border:var(--edge);border-radius:3px;background:var(--bg)}
.fill i{border:1px solid var(--dim);background:var(--dim)}
.free :is(.fill,.slots){visibility:hidden}
.free .gone{visibility:visible}.who .gone{line-height:16px}
.slots{display:grid;grid-template-columns:repeat(auto-fit,minmax(40%,1fr));gap:2px}
.slots li{border:var(--edge);border-radius:3px;height:19px;padding:0 2px;
 font:11px/17px var(--mono);background:var(--bg);color:var(--fg)}
.seqs{overflow:auto;margin:8px -12px 0;padding:0 12px 4px;border-top:var(--edge)}
.seq{border-left:4px solid var(--hue,var(--line));padding-left:8px;margin:6px 0;
 p{margin:2px 0}.claim{height:auto;font-size:12px}}
.strip{gap:5px;align-items:stretch}.strip+.strip{margin-top:5px}
.table{display:contents}
.entry{background:var(--bg);border:1px solid var(--hue);border-radius:4px;padding:0 4px;font-size:12px;max-width:100%}
.hole{border-style:dashed;align-self:end;color:var(--dim)}
.tok{display:inline-block;background:var(--soft);border:var(--edge);border-radius:3px;padding:0 3px;margin:2px 2px 1px 0;max-width:100%;
 vertical-align:bottom;font:12px/18px var(--mono)}
.entry .tok{border-color:var(--hue);border-bottom-width:3px;line-height:16px}
.tok.out{font-weight:700}
.tok.todo{border-style:dashed;border-color:var(--fg)}
.who .gone,.pool>.free{border:1px dashed var(--line);background:none;color:var(--dim)}
:is(.tok,.slots li,.fill i):is(.draft,.refused,.pending){border-style:dashed;border-color:var(--dim);background:none;color:var(--dim);font-style:italic}
.refused{text-decoration:line-through}
.key{padding:4px 12px;border-top:var(--edge);font-size:12px;color:var(--dim);
 summary{cursor:pointer;padding:6px 0}p{margin:0 0 8px}}
.legend{gap:6px 16px;
 .who{display:inline-flex;width:56px;margin:0;vertical-align:bottom}.entry{font-weight:400;margin:0 4px}}
dl{gap:2px 8px;margin:6px 0 0;font-size:13px}
dt{color:var(--dim)}dd{margin:0 10px 0 0}
.code .name{font:600 12px/1.4 var(--mono);margin:8px 12px 2px;color:var(--dim);overflow-wrap:anywhere}
.code pre{margin:0;font:12px/1.5 var(--mono)}
.more{display:block;min-height:32px;margin:0 8px 0 auto;font-size:12px}.code:has(.none) .more{display:none}
.l[data-key]{cursor:pointer;&:hover{text-decoration:underline dotted}}
.l{display:grid;grid-template-columns:4.6em 1fr;padding-right:8px;color:var(--dim)}
.l i{font-style:normal;text-align:right;padding-right:8px;user-select:none}
.l span{white-space:pre-wrap;overflow-wrap:anywhere}
.ran{background:var(--ran);color:var(--fg)}
.now{background:var(--now);color:light-dark(#000,#fff);font-weight:700;box-shadow:inset 4px 0 var(--mark)}
.none{margin:12px;color:var(--dim)}
@media(pointer:coarse){.l{min-height:24px}}
@media(forced-colors:active){.now,.lit{outline:2px solid}}
`;

  class PagedStepper extends HTMLElement {
    static Fold = Fold;
    static holders = holders;
    chip(id) { return chip(id); }

    connectedCallback() {
      if (this.shadowRoot) return void this.listen(); // it was removed and inserted again
      this.data = JSON.parse(this.querySelector("script[type='application/json']").textContent);
      this.events = this.data.events;
      this.beliefs = this.data.beliefs ?? {};
      if (this.data.broken) { // one more step: the break of the run
        this.events = [...this.events, {event: "broken_here"}];
        this.data.sentences.push(`Broken here: ${this.data.broken.message}.`);
      }
      this.fold = new Fold(this.events);
      this.whole = survey(this.events);
      this.used = {false: new Set(), true: new Set()}; // blocks that the run ever holds: device, host
      for (const e of this.events) {
        for (const block of e.event === "blocks_loaded" ? e.blocks : e.new_blocks ?? []) this.used.false.add(block);
        for (const cell of MOVES[e.event]?.(e)[0].flat().filter(Boolean) ?? []) {
          const [pool, block] = cell.split(" ");
          this.used[pool === "host"].add(Number(block));
        }
      }
      this.last = this.events.length;
      this.build();
      this.go(this.linked() ?? Number(this.getAttribute("start") ?? 1));
      this.listen();
    }
    /** Listen to the page, until the element is removed. */
    listen() {
      this.gone = new AbortController();
      addEventListener("hashchange", () => { // may also name a heading
        if (this.id && location.hash === `#${this.id}`) this.go(this.linked() ?? this.n);
      }, {signal: this.gone.signal});
      this.sizes = new ResizeObserver(() => this.fit());
      this.sizes.observe(this.all); // also when a folded part is opened
    }
    /** The step of `?step=n#id` if it names this stepper; without an id it names the page's first. */
    linked() {
      const wanted = new URLSearchParams(location.search).get("step");
      const steppers = [...document.querySelectorAll("paged-stepper")];
      const named = steppers.find((s) => s.id && `#${s.id}` === location.hash);
      return wanted !== null && (named ?? steppers[0]) === this ? parseInt(wanted, 10) || 1 : null;
    }
    disconnectedCallback() {
      this.pause();
      this.gone.abort();
      this.sizes.disconnect();
    }

    build() {
      const root = this.attachShadow({mode: "open"});
      const button = (label, sign, act) => on(make("button", {"aria-label": label, title: label}, sign), "click", act);
      this.back = button("Previous step", "◀", () => this.seek(this.n - 1));
      this.next = button("Next step", "▶", () => this.seek(this.n + 1));
      this.skip = button("Next event of interest (n)", "▶|", () => this.seek(this.interesting()));
      this.player = button("Play", "Play", () => (this.timer ? this.pause() : this.play()));
      this.speed = make("select", {"aria-label": "Speed"}, ...SPEEDS.map(([name, value]) => make("option", {value}, name)));
      this.speed.value = 1;
      on(this.speed, "change", () => this.timer && (this.pause(), this.play()));
      this.number = make("span.n");
      this.link = make("a", {href: "?step=1"}, "link");
      this.say = make("p.say", {"aria-live": "polite", "aria-atomic": "true"});
      const pane = (name, label) => make("div", {class: name, role: "group", "aria-label": label, tabindex: 0});
      this.memory = make("div.memory", make("div.pools"));
      this.pools = {};
      this.seqs = pane("seqs", "Queues, sequences and their block tables"); // it scrolls
      on(this.seqs, "scroll", () => this.drawArrows());
      this.arrows = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      this.arrows.classList.add("arrows");
      this.arrows.ariaHidden = "true";
      this.moves = this.arrows.cloneNode();
      this.moves.classList.add("moves");
      this.fliers = make("div", HIDDEN);
      this.state = make("div.state", this.memory, this.seqs, this.arrows, this.moves);
      const stage = make("div.stage", this.state, this.fliers);
      on(this.state, "pointerover focusin", (e) => this.light(e.target));
      on(this.state, "pointerleave focusout", () => this.light(null));
      this.code = pane("code", "Source lines that ran in this step");
      const everything = "Everything that ran";
      this.more = button(everything, everything, () => {
        this.more.ariaPressed = this.more.ariaPressed !== "true";
        this.go(this.n);
      });
      this.more.ariaPressed = "false";
      this.more.className = "more";
      this.lines = make("div");
      on(this.lines, "click", (e) => this.nextRun(e.target.closest("[data-key]")));
      this.code.append(this.more, this.lines);
      const withCode = this.data.functions.length > 0;
      this.cols = make(`div.cols ${withCode ? "two" : ""}`, stage, withCode ? this.code : null);
      const bar = make("div.bar", this.back, this.next, this.skip, this.player, this.speed, this.number, this.link);
      this.saying = make("div.saying", this.say);
      this.time = this.buildTimeline();
      this.all = make("div.all", {role: "group", "data-tab": "memory",
        "aria-label": this.data.title || "A run of the engine, step by step"},
      this.time, make("div.head", bar, this.saying), this.buildTabs(withCode), this.cols,
      make("details.key", make("summary", "Signs and keys"), make("p.legend", ...legend(this.fold.at(1))), make("p", KEYS)));
      root.append(make("style", STYLE), this.all);
      on(root, "keydown", (key) => this.press(key)); // only keys pressed inside count
    }

    /** A phone shows one of them at a time. */
    buildTabs(withCode) {
      const names = ["Memory", "Sequences", ...(withCode ? ["Code"] : [])];
      const tabs = names.map((name, i) => on(make("button", {"aria-pressed": `${i === 0}`}, name), "click", () => {
        this.all.dataset.tab = name.toLowerCase();
        tabs.forEach((each, j) => { each.ariaPressed = i === j; });
        this.width = 0; // hidden parts could not be measured
        this.fit();
      }));
      return make("div.tabs", {role: "group", "aria-label": "Shown"}, ...tabs);
    }

    press(key) {
      if (key.altKey || key.ctrlKey || key.metaKey || key.target.matches("select")) return;
      const to = key.shiftKey ? {ArrowLeft: this.engineStep(-1), ArrowRight: this.engineStep(1)}[key.key]
        : {ArrowLeft: this.n - 1, ArrowRight: this.n + 1, Home: 1, End: this.last, n: this.interesting()}[key.key];
      if (to !== undefined) this.seek(to);
      else if (["Enter", " "].includes(key.key) && key.target.matches(".l")) this.nextRun(key.target);
      else if (!this.rove(key.target, {ArrowUp: -1, ArrowDown: 1}[key.key])) return;
      key.preventDefault();
      key.stopPropagation(); // the page may have its own use for an n
    }
    /** Up and down move within the pool or a block table, each of which is one stop of the Tab key. */
    rove(from, by) {
      const items = by && from.dataset.key ? [...from.parentElement.children].filter((item) => item.dataset.key) : [];
      const to = items[items.indexOf(from) + by];
      to?.focus();
      return items.length > 0;
    }
    /** The beginning of the next (or previous) engine step. */
    engineStep(by) {
      const starts = this.events.flatMap((e, i) => e.event === "step_started" ? [i + 1] : []);
      return by > 0 ? starts.find((n) => n > this.n) ?? this.last : starts.findLast((n) => n < this.n) ?? 1;
    }
    interesting() {
      const at = this.events.findIndex((e, i) => i >= this.n && (OF_INTEREST.includes(e.event) || this.data.notes?.[i]));
      return at < 0 ? this.last : at + 1;
    }

    within(n) { return Math.max(1, Math.min(this.last, n)); }
    seek(n) {
      this.pause();
      this.go(n);
    }
    play() {
      if (this.n === this.last) this.go(1);
      this.timer = setInterval(() => {
        this.go(this.n + 1);
        if (this.n === this.last) this.pause();
      }, 1500 / this.speed.value);
      this.playerSays("Pause");
    }
    pause() {
      clearInterval(this.timer);
      this.timer = null;
      this.playerSays("Play");
    }
    playerSays(word) {
      this.player.textContent = this.player.title = this.player.ariaLabel = word;
    }

    word(token) { return this.data.words?.[token] ?? String(token ?? "?"); }
    /** A word with signs for line breaks and spaces. */
    visible(token) { return this.word(token).replaceAll("\n", "↵").replace(/^ +$/, (spaces) => "␣".repeat(spaces.length)); }

    go(wanted) {
      const n = this.within(wanted);
      const focused = this.shadowRoot.activeElement;
      const key = focused?.dataset.key;
      const forward = n > this.n;
      this.n = n;
      const before = this.fold.at(n - 1);
      const after = this.fold.at(n);
      this.back.disabled = n === 1;
      this.next.disabled = this.skip.disabled = n === this.last;
      this.slider.value = n;
      this.slider.ariaValueText = `step ${n} of ${this.last}, engine step ${after.step}`;
      this.number.textContent = `${n} / ${this.last}`;
      this.link.href = `?step=${n}${this.id ? `#${this.id}` : ""}`;
      this.link.ariaLabel = `Link to step ${n}`;
      this.say.replaceChildren(...this.told(n));
      this.say.classList.toggle("bad", this.events[n - 1].event === "broken_here");
      this.believed = this.beliefs[n - 1] ?? {};
      this.fliers.replaceChildren(); // those of the previous step
      this.drawMemory(before, after);
      patch(this.seqs, this.drawSequences(before, after));
      if (this.data.functions.length) this.drawCode(n - 1);
      this.showChanges();
      this.drawArrows();
      this.drawMoves();
      if (forward && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.fly();
      // The focused element may now be disabled or replaced; the keys must still work.
      if (key) (this.shadowRoot.querySelector(`[data-key="${key}"]`) ?? this.slider).focus({preventScroll: true});
      else if (focused?.disabled) this.slider.focus({preventScroll: true});
    }

    /** The sentence of a step, with its sequences as chips, and its note. */
    told(n) {
      const parts = this.data.sentences[n - 1].split(/(?<=\b[Ss]equence )([A-Z]+)\b/);
      const note = this.data.notes?.[n - 1];
      return [...parts.map((part, i) => i % 2 ? chip(numberOf(part)) : part),
        ...(note ? [make("b", ` ${note}`)] : [])];
    }

    // --- Size ---

    /** Reserve room for the longest sentence and the most sequences, so that nothing shifts. */
    fit() {
      const width = this.all.clientWidth;
      if (!width || width === this.width) return;
      this.width = width;
      const length = (i) => this.data.sentences[i].length + (this.data.notes?.[i]?.length ?? 0);
      const rooms = [...this.events.keys()].sort((a, b) => length(b) - length(a)).slice(0, 40)
        .map((i) => make("p.room", HIDDEN, ...this.told(i + 1)));
      this.saying.replaceChildren(this.say, ...rooms);
      const {sizes} = this.whole;
      const fullest = [...sizes.keys()].sort((a, b) => sizes[b] - sizes[a]).slice(0, 4);
      this.seqs.style.height = "auto";
      const heights = fullest.map((i) => {
        this.believed = this.beliefs[i] ?? {};
        patch(this.seqs, this.drawSequences(this.fold.at(i), this.fold.at(i + 1)));
        return this.seqs.offsetHeight;
      });
      if (this.seqs.offsetParent) this.seqs.style.height = `${Math.min(Math.max(...heights) + 4, 420)}px`;
      this.drawTimeline();
      this.go(this.n);
    }

    // --- The timeline ---

    buildTimeline() {
      this.slider = make("input", {type: "range", min: 1, max: this.last, value: 1, "aria-label": "Step"});
      on(this.slider, "input", () => this.seek(Number(this.slider.value)));
      on(this.slider, "pointermove", (e) => {
        const n = this.within(Math.round(1 + (e.offsetX - 6) / (this.slider.clientWidth - 12) * (this.last - 1)));
        this.slider.title = `${n}: ${this.data.sentences[n - 1]}`;
      });
      this.plot = make("div", HIDDEN);
      const rows = [...this.whole.rows.values()];
      const shown = (name, of) => rows.some((row) => row[of].some(({kind}) => kind === name));
      const sign = (inside, name) => `<span><svg viewBox="-8 -6 16 12" style="--hue:var(--fg)">${inside}</svg>${name}</span>`;
      const signs = make("p.signs", HIDDEN);
      signs.innerHTML = [
        ...Object.entries(KINDS).flatMap(([kind, name]) => shown(kind, "spans") ? [sign(this.drawSpan(kind, -8, 8, -5, 10), name)] : []),
        ...Object.entries(SHAPES).flatMap(([kind, d]) => shown(kind, "marks") ? [sign(`<path class="sign" d="${d}"/>`, kind)] : []),
        sign('<path class="held" d="M-8 6V2L-2-3H3V-5H8V6Z"/>', "blocks in use"),
        ...(this.whole.used.some(([, , kept]) => kept) ? [sign('<path class="kept" d="M-8-5H8V6H-8Z"/>', "only in the prefix cache")] : []),
      ].join("");
      return make("div.time", this.plot, this.slider, signs);
    }
    drawSpan(kind, from, to, top, height) {
      const box = (name, by = 0) => `<rect class="${name}" x="${from + by}" y="${top + by}" width="${Math.max(1, to - from - 2 * by)}" height="${height - 2 * by}"/>`;
      if (kind === "waiting") return `<path class="waiting" d="M${from} ${top + height / 2}H${to}"/>`;
      return box(kind, kind === "swapped" ? 1 : 0) + (kind === "recomputing" ? box("stripes") : "");
    }
    drawTimeline() {
      const {rows, used} = this.whole;
      const size = this.last;
      const names = new Map([...rows].map(([name, row]) => {
        const both = `${name}: ${row.sequences.map(letterOf).join(" ")}`;
        return [row, row.sequences.length === 1 && name === letterOf(row.sequences[0]) || both.length > 12 ? name : both];
      }));
      const longest = Math.max(5, ...[...names.values()].map((name) => Math.min(12, name.length)));
      const gutter = 10 + 7 * longest;
      const width = this.time.clientWidth - gutter - 8;
      const x = this.x = (n) => gutter + 6 + (n - 1) / Math.max(1, size - 1) * (width - 12);
      const lanes = []; // one per request; if there are very many, consecutive requests share one
      for (const row of rows.values()) {
        const free = rows.size > 50 && lanes.find((lane) => lane.at(-1).spans.at(-1).to <= row.spans[0].from);
        if (free) free.push(row);
        else lanes.push([row]);
      }
      const tall = Math.max(3, Math.min(16, Math.floor(150 / Math.max(1, lanes.length))));
      const [top, under] = [16, 16 + lanes.length * tall + 4];
      const low = under + 26;
      const drawn = [`<defs><pattern id="stripes" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
        <path d="M1 0V5" stroke="var(--bg)" stroke-width="2"/></pattern></defs>`];
      let free = -Infinity; // the start of the room for a number
      let last = -Infinity; // tick
      this.events.forEach((e, i) => {
        const at = x(i + 1);
        if (e.event !== "step_started" || at < last + 3) return;
        last = at;
        drawn.push(`<path class="tick" d="M${at} ${top - 3}V${low}"/>`);
        if (at < free || at > gutter + width - (this.data.broken ? 58 : 7 * String(e.step).length + 7)) return;
        drawn.push(`<text x="${at + 2}" y="11">${e.step}</text>`);
        free = at + 10 + 7 * String(e.step).length;
      });
      const label = (y, text) => make("text", {x: gutter - 4, y, "text-anchor": "end"}, text).outerHTML;
      drawn.push(label(11, "engine"));
      lanes.forEach((lane, i) => lane.forEach((row) => {
        const y = top + i * tall;
        if (tall >= 11 && lane.length === 1) {
          const whole = names.get(row);
          const name = whole.length > 12 ? `…${whole.slice(-11)}` : whole;
          drawn.push(label(y + tall / 2 + 4, name));
        }
        drawn.push(`<g style="${row.sequences[1] ? "--hue:var(--dim)" : hueOf(row.sequences[0])}">`,
          ...row.spans.map(({kind, from, to}) => this.drawSpan(kind, x(from), x(to), y + tall * 0.15, tall * 0.7)), "</g>");
        for (const {kind, at} of row.marks) {
          const d = `d="${SHAPES[kind]}" transform="translate(${x(at)} ${y + tall / 2}) scale(${Math.min(1, tall / 14)})"`;
          drawn.push(`<path class="halo" ${d}/><path class="sign" ${d}/>`);
        }
      }));
      if (this.data.broken) {
        drawn.push(`<path class="bad" d="M${x(size)} ${top - 3}V${low}"/><text class="badly" x="${x(size)}" y="11" text-anchor="end">broken</text>`);
      }
      const high = (blocks) => low - blocks / Math.max(1, this.events[0].num_blocks) * 24;
      const area = (name, value) => {
        const points = used.map((point, i) => `H${x(point[0])}V${high(value(point))}`);
        return `<path class="${name}" d="M${x(1)} ${low}${points.join("")}H${x(size)}V${low}Z"/>`;
      };
      drawn.push(area("kept", ([, held, kept]) => held + kept), area("held", ([, held]) => held),
        `<rect class="whole" x="${x(1)}" y="${low - 24}" width="${Math.max(1, x(size) - x(1))}" height="24"/>`,
        label(low - 8, "pool"));
      this.plot.innerHTML = `<svg height="${low + 4}">${drawn.join("")}</svg>`;
      Object.assign(this.slider.style, {left: `${gutter}px`, width: `${width}px`, height: `${low + 8}px`});
    }

    // --- Memory ---

    drawMemory(before, after) {
      for (const host of this.used.true.size ? [false, true] : [false]) this.drawPool(before, after, host);
    }

    drawPool(before, after, host) {
      const {block_size: size, num_blocks, num_swap_blocks} = after.pool;
      const total = host ? num_swap_blocks : num_blocks;
      const now = holders(after, host);
      const then = before.pool ? holders(before, host) : new Map();
      // The blocks that the prefix cache keeps, or the floor below it.
      const [kept, keptThen] = [after, before].map((state) => host ? state.floor : state.cached);
      const held = new Set([...now.keys(), ...kept.keys()]);
      // A small pool is shown whole; a large one without blocks that the run never holds.
      const shown = total <= 64 ? [...Array(total).keys()] : [...this.used[host]].sort((a, b) => a - b);
      const small = shown.length > 24;
      const judged = !host && Object.values(this.beliefs).some(({blocks}) => blocks); // at every step
      const first = this.data.broken?.should && this.n === this.last ? "should be" : "tables";
      const cells = shown.map((block, place) => {
        const who = now.get(block) ?? [];
        const cached = kept.has(block);
        const refs = who.length + cached;
        const ids = (who) => who.map((h) => h.id);
        const sequences = [...new Set(ids(who))];
        // A holder may share only the first tokens of a block.
        const contents = (state, who, kept) => [...who.map((h) => slotsOf(state, state.sequences.get(h.id), h.entry)),
          (kept.get(block) ?? []).map((token) => [token, ""])].reduce((most, tokens) => tokens.length > most.length ? tokens : most);
        const tokens = contents(after, who, kept);
        const old = then.get(block) ?? [];
        const oldTokens = contents(before, old, keptThen);
        const changed = `${[ids(who), cached, tokens]}` !== `${[ids(old), keptThen.has(block), oldTokens]}`;
        const most = (small ? 4 : 6) - 2 * cached; // chips for which there is room
        const claim = !host && this.believed.blocks?.[block];
        const gone = refs === 0 && oldTokens.length > 0; // for one step it shows its old tokens
        const was = gone ? ids(old) : [];
        return [[tokens, gone && oldTokens, sequences, refs, cached, was, changed, claim, first], () => {
          const many = sequences.length > most ? sequences.slice(most - 1) : [];
          const owners = [...sequences.slice(0, sequences.length - many.length).map(chip),
            many.length ? make("b.chip", {title: many.map(letterOf).join(" ")}, `+${many.length}`) : null,
            cached ? make("b.chip cache", host ? "floor" : "cache") : null];
          owners.push(...was.map((id) => make("b.chip gone", HIDDEN, letterOf(id))));
          const shownTokens = gone ? oldTokens : tokens;
          const drafted = tokens.filter(([, sign]) => sign).length;
          const part = (sign, n) => n ? make(`i.${sign}`, {style: `width:${100 * n / size}%`}) : null;
          const slots = small || size > 8 ? make("span.fill", {title: `${tokens.length} of ${size} slots filled${drafted ? `, ${drafted} drafted` : ""}`},
            part("", tokens.length - drafted), part("draft", drafted))
            : make(`ol.slots ${gone ? "gone" : ""}`, {"aria-label": "slots", "aria-hidden": !refs},
              ...Array.from({length: size}, (_, i) => {
                const [token, sign] = shownTokens[i] ?? [];
                const empty = token === undefined;
                return make("li", {"data-offset": i, class: gone ? "refused" : sign, title: empty ? "empty slot" : this.word(token) + (sign && `, ${sign}`)},
                  empty ? " " : this.visible(token).trim());
              }));
          return make("li", {class: `${refs ? "" : "free"} ${changed ? "new" : ""} ${claim ? "wrong" : ""}`,
            style: sequences.length === 1 && hueOf(sequences[0]), tabindex: place ? -1 : 0, "data-key": `${host ? "host" : "block"} ${block}`,
            "data-block": block, "data-refs": refs},
          make("b", block), make("span.refs", refs ? `×${refs}` : "free"),
          make("div.who", ...owners.flatMap((owner) => [" ", owner])), slots,
          judged ? make("div.claim", ...(claim ? [`${first} ×${claim[0]} ·`, make("br"), `allocator says ×${claim[1]}`] : [])) : null);
        }];
      });
      const hidden = total - shown.length;
      const title = `${host ? "Host pool" : "Block pool"}: ${total - held.size} of ${total} free`
        + (hidden ? `; ${hidden} that this run never holds are not shown` : "");
      const pool = this.pools[host] ??= this.buildPool(`pool ${small ? "small" : ""} ${judged ? "judged" : ""}`,
        `flex:${shown.length} 1 ${host ? 160 : 264}px`);
      pool.title.textContent = pool.title.title = title;
      pool.list.ariaLabel = `${title}. Number, reference count, owners.`;
      patch(pool.list, cells);
    }
    buildPool(name, style) {
      const [title, list] = [make("p.title"), make("ul", {class: name})];
      this.memory.firstChild.append(make("div", {style}, title, list));
      return {title, list};
    }

    // --- Queues and sequences ---

    drawSequences(before, after) {
      const parts = [[["queues", after.running, after.waiting, ...allOf(after).map((s) => [s.request, s.id, s.swapped, s.done])],
        () => this.drawQueues(after)]];
      for (const s of allOf(after)) {
        const old = before.sequences.get(s.id);
        parts.push([[s, old?.table, old?.filled, after.running.includes(s.request), this.believed.tables?.[s.id]],
          () => this.drawSequence(before, after, s)]);
      }
      const done = after.finished.filter((s) => s.reason !== "dropped");
      if (done.length) {
        const most = done.length > MOST_FINISHED ? `, the last ${MOST_FINISHED} of ${done.length}` : "";
        parts.push([["finished", most], () => make("p.title", `Finished${most}`)]);
      }
      for (const s of shownOf(done)) {
        parts.push([["finished", s], () => make("div.seq", {style: hueOf(s.id)},
          make("p", "sequence ", chip(s.id), ` of request ${s.request}`),
          make("p.tokens", ...this.drawTokens(s, 0, s.tokens.length, s.tokens.length)))]);
      }
      return parts;
    }

    drawQueues(state) {
      const row = (name, requests) => [make("dt", name), make("dd", requests.map((r) => called(state, r)).join(", ") || "nobody")];
      const out = state.waiting.filter((r) => isSwapped(state, r));
      return make("dl", ...row("running", state.running), ...row("waiting", state.waiting.filter((r) => !out.includes(r))),
        ...(out.length ? row("swapped out", out) : []));
    }

    /** A block table, with each block's tokens above its entry, then the tokens not in the cache yet. */
    drawSequence(before, after, s) {
      const size = after.pool.block_size;
      const old = before.sequences.get(s.id);
      const where = s.done ? "ended" : s.swapped ? "swapped out" : after.running.includes(s.request) ? "running" : "waiting";
      const windows = after.pool.group_windows;
      const entries = windows.map(() => []); // of each group
      s.table.forEach((block, i) => {
        const logical = Math.floor(i / windows.length);
        const until = (t, ...ends) => Math.min(t.filled, (logical + 1) * size, ...ends);
        const [from, to] = [logical * size, until(s)];
        const changed = old?.table[i] !== block || until(old) !== to || until(old, sure(old)) !== until(s, sure(s));
        const hole = block === HOLE;
        const host = s.swapped && !hole ? "host " : "";
        entries[i % windows.length].push(make("li", {class: `entry ${changed ? "new" : ""} ${hole ? "hole" : ""}`, tabindex: logical ? -1 : 0,
          "data-key": `entry ${s.id} ${i}`, "data-to": `${host || "block "}${block}`, "data-sequence": s.id},
        ...hole ? [] : this.drawTokens(s, from, to, s.filled),
        make("div", `${logical} → ${host}`, make("b", hole ? "-" : block), hole ? "" : ` (${to - from}/${size})`)));
      });
      const rest = this.drawTokens(s, Math.min(s.filled, entries[0].length * size), all(s).length, s.filled);
      const claim = this.believed.tables?.[s.id];
      const strips = windows.map((window, group) => {
        const of = windows.some(Number) && s.table.length ? `group ${group}, ${window ? `last ${window}` : "all"}` : "";
        const label = `Block table of sequence ${letterOf(s.id)}${of && `, ${of}`}: logical block, physical block, filled slots`;
        return make("div.strip tokens", of && make("small", of),
          s.table.length ? make("ol.table", {"aria-label": label}, ...entries[group]) : null, group ? null : make("span", ...rest));
      });
      return make("div.seq", {style: hueOf(s.id)},
        make("p", make("b", "sequence "), chip(s.id), `${s.request === letterOf(s.id) ? "" : ` of request ${s.request}`}, ${where}`,
          s.table.length ? "" : "; its block table is empty"),
        claim ? make("p.claim", `should be blocks ${s.table.join(", ") || "none"} · the table says ${claim.join(", ") || "none"}`) : null,
        ...strips);
    }

    /** Tokens `from` to `to` of a sequence that are among the last ones shown. */
    drawTokens(s, from, to, filled) {
      const first = Math.max(0, s.tokens.length - MOST_TOKENS);
      const size = this.events[0].block_size;
      const spans = [];
      for (let i = Math.max(from, first); i < to; i++) {
        const sign = signOf(s, i);
        spans.push(make("span", {class: `tok ${sign || (i >= s.prompt ? "out" : "")} ${i >= filled ? "todo" : ""}`, "data-offset": i % size,
          title: (sign || (i >= s.prompt ? "generated" : "prompt")) + (i >= filled ? ", not in the cache yet" : "")},
        this.visible(all(s)[i])));
      }
      return from < first && first < to ? ["… ", ...spans] : spans;
    }

    // --- Arrows ---

    cells() { return new Map([...this.memory.querySelectorAll("[data-block]")].map((cell) => [cell.dataset.key, cell])); }

    /** Arrows from table entries to blocks. They begin at the edge if an entry is scrolled out of sight. */
    drawArrows() {
      const blocks = this.cells();
      const entries = [...this.seqs.querySelectorAll(".entry")];
      if (!this.memory.offsetParent || !this.seqs.offsetParent) {
        this.arrows.replaceChildren();
        return;
      }
      const [all, frame] = [rect(this.state), rect(this.seqs)];
      const [many, count] = [new Map(), new Map()]; // arrows per block: in total, and so far
      for (const {dataset: {to}} of entries) many.set(to, (many.get(to) ?? 0) + 1);
      this.arrows.innerHTML = entries.map((entry) => {
        const {to, key, sequence} = entry.dataset;
        const [a, b] = [rect(entry), rect(blocks.get(to))];
        if (!b) return ""; // a faulty allocator returned a block that does not exist
        const nth = (count.get(to) ?? 0) + 1;
        count.set(to, nth);
        const x = a.left + Math.min(a.width / 2, 40) - all.left;
        const start = Math.max(frame.top, Math.min(frame.bottom, a.top));
        const y = start - all.top;
        const tx = b.left - all.left + b.width * nth / (many.get(to) + 1);
        const ty = b.bottom - all.top - 1;
        const middle = (y + ty) / 2;
        return `<path class="${start === a.top ? "" : "far"} ${entry.matches(".new") ? "strong" : ""}" data-from="${key}" data-to="${to}" style="${hueOf(Number(sequence))}"
          d="M${x} ${y}C${x} ${middle} ${tx} ${middle} ${tx} ${ty}m-3 5l3-5l3 5"/>`;
      }).join("");
      this.light(this.shadowRoot.activeElement);
    }

    /** The source and target boxes of the event's moves, in the coordinates of the state, and its word. */
    moved() {
      const e = this.events[this.n - 1];
      const [pairs, word] = MOVES[e.event]?.(e) ?? [[], ""];
      const cells = this.cells();
      const all = rect(this.state);
      const box = (cell) => {
        const {left, top, width, height} = rect(cell);
        return {left: left - all.left, top: top - all.top, width, height};
      };
      const boxes = this.memory.offsetParent ? pairs.filter(([from, to]) => cells.has(from) && (!to || cells.has(to))) : [];
      return [boxes.map(([from, to]) => {
        const a = box(cells.get(from));
        return {a, b: to ? box(cells.get(to)) : {...a, top: a.top - 0.7 * a.height}, cell: cells.get(to || from)};
      }), word];
    }
    /** Draw an arrow for each move, with the event's word. */
    drawMoves() {
      const [boxes, word] = this.moved();
      const drawn = boxes.map(({a, b}, i) => {
        const [dx, dy] = [b.left - a.left, b.top - a.top];
        const across = Math.abs(dx) > Math.abs(dy);
        const [sx, sy] = across ? [Math.sign(dx), 0] : [0, Math.sign(dy)];
        const inside = (box, by) => // near the edge, so that text stays visible
          [box.left + box.width / 2 + by * sx * (box.width / 2 - 8), box.top + box.height / 2 + by * sy * (box.height / 2 - 8)];
        const [[x, y], [tx, ty]] = [inside(a, 1), inside(b, -1)];
        const [mx, my] = [(x + tx) / 2, (y + ty) / 2 - Math.min(50, Math.abs(tx - x) / 4)]; // upwards
        const length = Math.hypot(tx - mx, ty - my) || 1;
        const [ux, uy] = [(tx - mx) / length * 9, (ty - my) / length * 9];
        return `<path d="M${x} ${y}Q${mx} ${my} ${tx} ${ty}M${tx - ux - uy / 2} ${ty - uy + ux / 2}L${tx} ${ty}L${tx - ux + uy / 2} ${ty - uy - ux / 2}"/>`
          + (i ? "" : `<text x="${b.left + b.width / 2}" y="${b.top + 5}">${word}</text>`);
      });
      this.moves.innerHTML = drawn.join("");
    }
    /** Animate the moves when stepping forward. */
    fly() {
      for (const {a, b, cell} of this.moved()[0]) {
        const style = `left:${a.left}px;top:${a.top}px;width:${a.width}px;height:${a.height}px;${cell.getAttribute("style") ?? ""}`;
        const flier = make("div.flier", {style}, ...[...cell.childNodes].map((child) => child.cloneNode(true)));
        this.fliers.append(flier);
        const there = `translate(${b.left - a.left}px,${b.top - a.top}px)`;
        flier.animate([{transform: "none"}, {transform: there, opacity: cell.matches(".free") ? 0 : 1}], {duration: FLIGHT, easing: "ease-in-out"})
          .finished.then(() => flier.remove(), () => {});
        for (const late of [cell, this.moves]) late.animate({opacity: [0.15, 0.15]}, FLIGHT); // until it arrives
      }
    }

    /** Mark the parts that belong to the one with the pointer or focus: table entries, a block, a token's slot. */
    light(target) {
      const holder = target?.closest?.("[data-key]");
      const block = holder && (holder.dataset.to ?? holder.dataset.key);
      const offset = target?.dataset?.offset;
      const entry = holder?.dataset.to && holder;
      for (const cell of this.state.querySelectorAll("[data-key]")) {
        const lit = Boolean(cell.dataset.key === block || (entry ? cell === entry : holder && cell.dataset.to === block));
        cell.classList.toggle("lit", lit);
        for (const token of cell.querySelectorAll("[data-offset]")) token.classList.toggle("lit", lit && token.dataset.offset === offset);
      }
      for (const path of this.arrows.children) {
        const lit = entry ? path.dataset.from === entry.dataset.key : path.dataset.to === block;
        path.classList.toggle("strong", Boolean(holder ? lit : this.seqs.querySelector(`.new[data-key="${path.dataset.from}"]`)));
      }
    }

    // --- Code ---

    /** The function of the highlighted line, or on demand all that ran. A click on a line goes to its next run. */
    drawCode(index) {
      const {functions, lines, lines_of: linesOf, current} = this.data;
      this.ever ??= new Set(lines.flatMap((ran) => ran.flatMap(([f, own]) => own.map((line) => `line ${f} ${line}`))));
      const lit = current[index];
      const all = lines[linesOf[index]];
      const ran = this.more.ariaPressed === "true" || !lit ? all : all.filter(([f]) => f === lit[0]);
      const parts = ran.map(([f, own]) => [[f, own, lit], () => {
        const {name, file, first, source} = functions[f];
        const set = new Set(own);
        return make("div", make("p.name", `${name}  ${file}`), make("pre", ...source.map((text, i) => {
          const line = first + i;
          const key = `line ${f} ${line}`;
          const now = lit && lit[0] === f && lit[1] === line;
          const leads = this.ever.has(key) ? {role: "button", tabindex: now ? 0 : -1, "data-key": key,
            title: "To the next step that runs this line"} : {};
          return make("div", {class: `l ${set.has(line) ? "ran" : ""} ${now ? "now" : ""}`, "data-line": line, ...leads},
            make("i", `${now ? "▶" : set.has(line) ? "·" : ""} ${line}`),
            make("span", {style: `padding-left:${text.search(/\S|$/) + 3}ch;text-indent:-3ch`}, text.trimStart() || " ")); // wraps with an indent
        })));
      }]);
      patch(this.lines, parts.length ? parts
        : [["none", () => make("p.none", "None of the lines shown on this page ran in this step.")]]);
    }
    /** Scroll to this step's line and changes, after everything is drawn, so that layout is measured once. */
    showChanges() {
      const places = [[this.code, this.lines.querySelector(".now")], [this.seqs, this.seqs.querySelector(".new")]];
      const by = places.map(([frame, inside]) => inside && rect(inside).top
        - rect(frame).top - frame.clientHeight / 2);
      places.forEach(([frame], i) => { frame.scrollTop += by[i] ?? 0; });
    }
    /** Go to the next step that runs a line; after the last, to the first. */
    nextRun(row) {
      if (!row) return;
      const [f, line] = row.dataset.key.split(" ").slice(1).map(Number);
      const {lines, lines_of: linesOf} = this.data;
      const runs = lines.map((ran) => ran.some(([g, own]) => g === f && own.includes(line)));
      const steps = linesOf.flatMap((which, i) => runs[which] ? [i + 1] : []);
      this.seek(steps.find((n) => n > this.n) ?? steps[0]);
    }
  }

  if (!customElements.get("paged-stepper")) customElements.define("paged-stepper", PagedStepper);
})();
