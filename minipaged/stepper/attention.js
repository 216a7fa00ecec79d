/* <paged-attention>: a query walks its block table, block by block, next to a softmax over all scores at once.
 *
 * It contains the JSON that `Walk.data` (attention.py) writes: the variables of the reference's `attend` after each turn
 * of its loop, for each arrangement of the blocks, and a sentence for each step. The script computes only products of
 * these: the rest of a sum after m has risen.
 * Step 1 is the start. Three steps for each block read it, rescale the sums, and add its terms. The last step divides.
 */
(() => {
  "use strict";
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== false) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const button = (label, act, sign = label) => {
    const node = make("button", {type: "button", "aria-label": sign !== label && label, title: sign !== label && label}, sign);
    node.addEventListener("click", act);
    return node;
  };

  // --- The numbers ---

  const sumOf = (numbers) => numbers.reduce((sum, x) => sum + x, 0);

  /** The state after step n: the sums, and each key's score and weight. */
  const stateAt = ({turns, answer}, n) => {
    const last = n === 3 * turns.length + 2;
    const kind = n === 1 ? "starts" : last ? "divides" : ["reads", "rescales", "adds"][(n - 2) % 3];
    const t = Math.min(Math.floor((n + 1) / 3), turns.length) - 1; // the step's turn
    const turn = turns[t];
    const before = turns[t - 1] ?? {m: null, l: 0, o: answer.map(() => 0)};
    const done = turns.slice(0, kind === "adds" || last ? t + 1 : Math.max(t, 0)); // turns whose terms are added
    const faded = turns.slice(0, kind === "reads" ? t : t + 1); // turns whose factor has been applied
    const left = done.map((_, i) => faded.slice(i + 1).reduce((product, {fade}) => product * fade, 1));
    const {m, l, o} = done.length > t && turn ? turn : kind !== "rescales" ? before
      : {m: turn.m, l: before.l * turn.fade, o: before.o.map((x) => x * turn.fade)};
    return {
      kind, t, turn, before, m, l, o,
      scores: turns.slice(0, t + 1).flatMap(({scores}) => scores),
      weights: done.flatMap(({p}, i) => p.map((weight) => weight * left[i])),
      parts: done.map(({p}, i) => sumOf(p) * left[i]), // the parts of l
      answer: last ? answer : l ? o.map((x) => x / l) : [], // l is 0 before the first turn, and if `fade` underflows
    };
  };
  const apart = (a, b) => Math.max(...a.map((x, i) => Math.abs(x - b[i])));
  const exactly = (x) => x ? `within ${(10 ** Math.ceil(Math.log10(x))).toExponential(0)}` : "to the last bit";
  const number = (x) => x === null ? "-∞" : Number.isInteger(x) ? String(x)
    : Math.abs(x) < 5e-4 || Math.abs(x) >= 1e5 ? x.toExponential(1) : x.toFixed(3);

  // --- The picture ---

  /** Logical blocks, in shades of the stepper's A, each with what can be read on it. */
  const HUES = [["#0087ff", "#000"], ["#0a66b8", "#fff"], ["#0092a8", "#000"], ["#5f6df5", "#000"]];
  const hue = (logical) => `--hue:${HUES[logical % 4][0]};--ink:${HUES[logical % 4][1]};`;
  const SIGNS = "A shade of blue: a logical block of this sequence, A. Thick: the block of this step. Dashed: the full softmax, with"
    + " all scores at hand. Hatched: behind the query's position. Keys: ← and → by steps, Home and End.";

  const STYLE = `
:host{display:block;container-type:inline-size;margin:1.5em 0;text-align:left;
 --bg:var(--md-default-bg-color,light-dark(#fff,#1b1d24));--fg:light-dark(#1d2129,#e6e8ee);
 --dim:light-dark(#555c69,#a9b0bf);--line:light-dark(#c3c9d4,#4a5060);--soft:light-dark(#f2f4f8,#262a34);
 --ran:light-dark(#e8eefb,#2a3350);--mark:light-dark(#0b57d0,#8ab4ff);
 --later:repeating-linear-gradient(45deg,var(--line) 0 1px,var(--bg) 1px 6px)}
:host([hidden]),[hidden]{display:none}
*{box-sizing:border-box;margin:0}
ul,ol{list-style:none;padding:0}
.all{background:var(--bg);color:var(--fg);font:14px/1.45 system-ui,sans-serif;border:1px solid var(--line);border-radius:8px}
.head{position:sticky;top:var(--stepper-top,0);z-index:3;background:inherit;border-radius:8px 8px 0 0;border-bottom:1px solid var(--line)}
.tools{display:flex;gap:6px;align-items:center;padding:8px}
button,select{min-width:44px;min-height:40px;padding:0 8px;color:inherit;background:var(--soft);font:inherit;
 border:1px solid var(--line);border-radius:6px;cursor:pointer}
button:disabled{opacity:.45;cursor:default}
[aria-pressed=true]{background:var(--mark);color:var(--bg)}
.n,.factor,dd{font-variant-numeric:tabular-nums;white-space:nowrap}
input{flex:1;min-width:40px;height:40px;accent-color:var(--mark);cursor:pointer}
:focus-visible{outline:3px solid var(--mark);outline-offset:2px}
.rooms{display:grid}.rooms>*{grid-area:1/1}
.room{visibility:hidden}
.saying>*{padding:0 12px 10px;font-size:16px}
.cols{display:grid;grid-template-columns:minmax(0,1fr);gap:0 24px;padding:0 12px 8px}
@container(min-width:700px){.cols{grid-template:auto 1fr/minmax(0,9fr) minmax(0,11fr)}.sums{grid-area:1/2/3/2}}
.title{font-size:13px;margin:10px 0 4px;color:var(--dim);font-weight:600}
.row{display:flex;justify-content:space-between;align-items:center;gap:8px;margin-top:6px;padding-bottom:8px}.row button{flex:none}
.vector{display:grid;grid-template-columns:repeat(4,8.5ch);font:12px/1.6 ui-monospace,monospace}.vector i{text-align:right;font-style:normal}
.memory{position:relative}
.table{display:flex;flex-wrap:wrap;gap:8px}
.table li{border:1px solid var(--hue);border-left-width:5px;border-radius:6px;padding:3px 5px;font-size:13px;background:var(--bg)}
.table select{min-width:46px;min-height:36px;font-weight:700;padding:0 2px}
.pool{display:grid;grid-template-columns:repeat(4,1fr);gap:6px}
.pool>li{border:1px dashed var(--line);border-radius:6px;padding:2px 4px 4px;font-size:12px;color:var(--dim);min-width:0;height:53px}
.pool>.own{border:1px solid var(--hue);background:var(--soft);color:var(--fg)}.pool>.taken{border-style:solid}
:is(.pool,.table)>.now{outline:3px solid var(--mark)}
.pool b{font-size:14px}.chip{float:right;border-radius:4px;padding:0 .35em;background:var(--hue,var(--dim));color:var(--ink,var(--bg));font-weight:700}
.slots{display:grid;grid-auto-flow:column;grid-auto-columns:1fr;gap:2px;margin-top:2px}
.slots li{border:1px solid var(--line);border-radius:3px;height:19px;text-align:center;font:11px/17px ui-monospace,monospace;background:var(--bg)}
.slots .later{border-style:dashed;color:var(--dim)}
.arrows{position:absolute;inset:0;width:100%;height:100%;pointer-events:none;overflow:visible}
.arrows path{fill:none;stroke:var(--hue);stroke-width:1.5;opacity:.5}.arrows .now{stroke-width:3;opacity:1}
.mask button{display:flex;width:100%;min-height:30px;gap:8px;align-items:center;margin:3px 0;font-size:12px}
.mask b{min-width:6em;text-align:left;font-weight:inherit}
.mask span{flex:1;height:14px;border:1px solid var(--line);background:var(--hue)}.mask .later{background:var(--later)}
.plot{position:relative;height:clamp(88px,15cqw,104px);overflow:hidden}
.plot i{position:absolute;transition:all .4s}
.plot .bar{background:var(--hue)}.plot .ghost{border:1.5px dashed var(--fg)}
.plot .later{inset:0;background:var(--later)}
.plot .line{inset:auto 0;height:1px;background:var(--dim)}.plot .m{height:2px;background:var(--mark)}
.plot b{position:absolute;right:2px;bottom:2px;font:700 12px/15px system-ui,sans-serif;color:var(--mark);background:var(--bg);padding:0 3px}
.stack{height:20px}
.axis{display:grid;font:11px/15px system-ui,sans-serif;text-align:center;color:var(--dim)}
.axis b{border-top:4px solid var(--hue);margin:0 1px;font-weight:400;white-space:nowrap;overflow:hidden}
.why{display:grid;grid-template-columns:auto 1fr;gap:10px;align-items:center}
dl{display:grid;grid-template-columns:auto minmax(0,1fr);gap:2px 8px;font-size:13px}.factor,.same,.why{font-size:13px;margin-top:8px}
dt{color:var(--dim);font:600 13px/1.5 ui-monospace,monospace}
pre{font:12px/1.5 ui-monospace,monospace}
pre span{display:block;white-space:pre-wrap;overflow-wrap:anywhere;background:var(--ran);padding-right:4px;text-indent:-3ch}
.key{padding:4px 12px;border-top:1px solid var(--line);font-size:12px;color:var(--dim)}
.key summary{cursor:pointer;padding:6px 0}
@media(prefers-reduced-motion:reduce){.plot i{transition:none}}
@media(forced-colors:active){.plot *,.axis b,.mask span{forced-color-adjust:none}}
`;

  class PagedAttention extends HTMLElement {
    connectedCallback() {
      if (this.shadowRoot) return void this.sizes.observe(this.all);
      this.data = JSON.parse(this.querySelector("script[type='application/json']").textContent);
      Object.assign(this, {n: 1, query: this.data.queries.length - 1, long: 0, table: 0, tried: new Set()});
      this.build();
      this.choose(this.query, 0);
      this.sizes = new ResizeObserver(() => this.drawArrows());
      this.sizes.observe(this.all);
    }
    disconnectedCallback() {
      this.play(false);
      this.sizes.disconnect();
    }
    /** To the end; or stop. */
    play(on) {
      clearInterval(this.timer);
      if (on && this.n === this.last) this.go(1);
      this.timer = on && setInterval(() => {
        this.go(this.n + 1);
        if (this.n === this.last) this.play(false);
      }, 1500);
      this.player.textContent = on ? "Pause" : "Play";
    }
    seek(n) {
      this.play(false);
      this.go(n);
    }

    /** What ran for the query, its length and the place of the blocks that are chosen. */
    get known() { return this.data.queries[this.query].lengths[this.long]; }
    get run() { return this.known.runs[this.known.of[this.table]]; }
    get last() { return this.run.sentences.length; }
    get blocks() { return this.data.tables[this.table]; }
    /** How many keys a query has read. */
    seen(query) { return sumOf(this.data.queries[query].lengths[0].runs[0].turns.map(({n}) => n)); }

    build() {
      const {block_size: size, num_keys: keys, queries, tables, num_blocks: total, taken, code} = this.data;
      const ofBlock = (i) => hue(Math.floor(i / size));
      const titled = (text, ...nodes) => [make("p", {class: "title"}, text), ...nodes];
      this.back = button("Previous step", () => this.seek(this.n - 1), "◀");
      this.next = button("Next step", () => this.seek(this.n + 1), "▶");
      this.slider = make("input", {type: "range", min: 1, "aria-label": "Step"});
      this.slider.addEventListener("input", () => this.seek(Number(this.slider.value)));
      this.player = button("Play", () => this.play(!this.timer));
      this.count = make("span", {class: "n"});
      this.say = make("p", {"aria-live": "polite", "aria-atomic": "true"});
      this.because = make("p");
      const both = queries.flatMap(({lengths}) => lengths.flatMap(({runs}) => runs));
      const head = make("div", {class: "head"}, make("div", {class: "tools"}, this.back, this.next, this.player, this.slider, this.count),
        this.rooms("saying", this.say, both.flatMap((run) => run.sentences.map((text) => text.replace("{block}", total)))));

      const free = [...Array(total).keys()].filter((block) => !taken.includes(block));
      this.choices = tables[0].map((_, logical) => {
        const choice = make("select", {"aria-label": `Physical block of logical block ${logical}`},
          ...free.map((block) => make("option", {value: block}, String(block))));
        choice.addEventListener("change", () => this.put(logical, Number(choice.value)));
        return choice;
      });
      this.entries = make("ol", {class: "table", "aria-label": "Block table: logical block, physical block, slots that count"},
        ...this.choices.map((choice, logical) => make("li", {style: hue(logical)}, `${logical} → `, choice, make("span"))));
      this.pool = make("ul", {class: "pool", "aria-label": `The pool of ${total} blocks: number, holder, positions of the keys in it`});
      this.arrows = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      this.arrows.classList.add("arrows");
      this.arrows.setAttribute("aria-hidden", "true");
      const shuffle = button("Shuffle the blocks", () =>
        this.arrange((this.table + 1 + Math.floor(Math.random() * (tables.length - 1))) % tables.length));
      [this.vector, this.heading, this.same] = [make("p", {class: "vector"}), make("p"), make("p", {role: "status"})];
      this.mask = queries.map(({position}, i) => button(`query at ${position}: sees keys 0 to ${this.seen(i) - 1}`,
        () => this.choose(i, this.long), ""));
      this.mask.forEach((row, i) => row.append(make("b", {}, `query at ${queries[i].position}`), ...Array.from({length: keys},
        (_, key) => make("span", {style: ofBlock(key), class: key >= this.seen(i) && "later"}))));
      const memory = make("div", {}, this.rooms("title", this.heading, queries.map((_, i) => this.headed(i, 1))), this.vector,
        this.memory = make("div", {class: "memory"}, make("div", {class: "row"}, ...titled("Its block table", shuffle)), this.entries,
          ...titled("The pool", this.pool), this.arrows),
        this.rooms("same", this.same, queries.flatMap(({lengths}) => lengths.map((known) => this.compared(known, 0, tables.length)))),
        ...(queries.length > 1 ? titled("Which keys each query of the chunk sees", make("div", {class: "mask"}, ...this.mask)) : []));

      this.stretch = button("Query × 100", () => this.choose(this.query, 1 - this.long));
      [this.scores, this.weights, this.stack, this.output] = [this.plot(keys, ofBlock), this.plot(keys, ofBlock),
        this.plot(this.choices.length, hue, "stack"), this.plot(this.run.answer.length, () => "--hue:var(--mark);")];
      this.names = this.choices.map((_, logical) => make("b", {style: `${hue(logical)}grid-row:2;grid-column:span ${Math.min(size, keys - logical * size)}`}));
      const axis = make("div", {class: "axis", "aria-hidden": "true", style: `grid-template-columns:repeat(${keys},1fr)`},
        ...Array.from({length: keys}, (_, i) => make("span", {}, String(i))), ...this.names);
      [this.factor, this.ofL, this.ofO] = [make("p", {class: "factor"}), make("dd"), make("dd", {class: "vector"})];
      this.range = make("p", {class: "title"});
      const sums = make("div", {class: "sums"}, this.range, this.scores, axis,
        make("div", {class: "why"}, this.stretch, this.rooms("", this.because, both.flatMap((run) => run.reasons))),
        ...titled("Weights, exp(score - m); dashed: full softmax", this.weights),
        ...titled("l, their sum", this.stack),
        this.factor, make("dl", {}, make("dt", {}, "l"), this.ofL, make("dt", {}, "o"), this.ofO),
        ...titled("o / l, the attention so far", this.output));

      this.code = make("pre");
      const lines = make("div", {class: "rooms"}, ...Object.keys(code).map((kind) => this.drawCode(make("pre", {class: "room", "aria-hidden": "true"}), kind)), this.code);
      const rest = make("div", {}, ...titled("Lines of attend that ran in this step", lines));
      this.all = make("div", {class: "all", role: "group", "aria-label": this.data.title || "A query walks its block table"},
        head, make("div", {class: "cols"}, memory, sums, rest),
        make("details", {class: "key"}, make("summary", {}, "Signs and keys"), make("p", {}, SIGNS)));
      this.attachShadow({mode: "open"}).append(make("style", {}, STYLE), this.all);
      this.all.addEventListener("keydown", (key) => this.press(key));
    }
    headed(i, long) { return `The query, at position ${this.data.queries[i].position}${long ? ", 100 times as long" : ""}`; }
    /** A text, with room for all that it may be: nothing moves. */
    rooms(name, node, texts) {
      return make("div", {class: `rooms ${name}`}, ...[...new Set(texts)].map((text) => make("p", {class: "room", "aria-hidden": "true"}, text)), node);
    }
    press(key) {
      const to = {ArrowLeft: this.n - 1, ArrowRight: this.n + 1, Home: 1, End: this.last}[key.key];
      if (to === undefined || key.altKey || key.ctrlKey || key.metaKey || key.target.matches("select")) return;
      this.seek(to);
      key.preventDefault();
      key.stopPropagation();
    }

    // --- The reader's choices ---

    /** Another query or length: another run. */
    choose(query, long) {
      Object.assign(this, {query, long});
      this.mask.forEach((row, i) => row.setAttribute("aria-pressed", i === query));
      this.stretch.setAttribute("aria-pressed", long === 1);
      this.heading.textContent = this.headed(query, long);
      this.drawVector(this.vector, this.known.query);
      this.slider.max = this.last;
      this.arrange(this.table);
    }
    /** Another place for the blocks; what moves flies there. */
    arrange(table) {
      const cells = () => [...this.pool.querySelectorAll(".own")];
      const places = new Map(cells().map((cell) => [cell.dataset.logical, cell.getBoundingClientRect()]));
      this.table = table;
      this.tried.add(table);
      this.choices.forEach((choice, logical) => { choice.value = this.blocks[logical]; });
      [...this.entries.children].forEach((entry, i) => { entry.lastChild.textContent = ` (${this.run.turns[i]?.n ?? 0}/${this.data.block_size})`; });
      this.names.forEach((name, logical) => { name.textContent = `${logical} → ${this.blocks[logical]}`; });
      this.drawPool();
      this.same.textContent = this.compared(this.known, table, this.tried.size);
      this.go(this.n);
      if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
      for (const cell of cells()) {
        const [from, to] = [places.get(cell.dataset.logical), cell.getBoundingClientRect()];
        if (from) cell.animate([{transform: `translate(${from.left - to.left}px,${from.top - to.top}px)`}, {transform: "none"}], {duration: 500, easing: "ease-in-out"});
      }
    }
    /** Put a logical block elsewhere; where another one of the sequence lies, they change places. */
    put(logical, block) {
      const wanted = this.blocks.map((other, i) => i === logical ? block : other === block ? this.blocks[logical] : other);
      this.arrange(this.data.tables.findIndex((table) => String(table) === String(wanted)));
    }

    drawPool() {
      const {num_blocks: total, block_size: size, num_keys: keys, taken} = this.data;
      const limit = this.seen(this.query);
      this.pool.replaceChildren(...Array.from({length: total}, (_, block) => {
        const logical = this.blocks.indexOf(block);
        const name = make("b", {}, String(block));
        if (taken.includes(block)) return make("li", {class: "taken", style: "--hue:#d75f00;--ink:#000"}, name, make("span", {class: "chip"}, "B"), make("div", {}, "another's"));
        if (logical < 0) return make("li", {}, name, " free");
        const slots = Array.from({length: size}, (_, i) => logical * size + i);
        return make("li", {class: "own", style: hue(logical), "data-logical": logical}, name,
          make("span", {class: "chip", title: `logical block ${logical} of this sequence`}, `A ${logical}`),
          make("ol", {class: "slots"}, ...slots.map((i) => make("li", {class: i >= limit && "later"}, i < keys ? String(i) : " "))));
      }));
    }
    /** What their place changes in the answer: nothing. */
    compared({runs, of, whole}, table, tried) {
      const {tables} = this.data;
      const [{answer}, first] = [runs[of[table]], runs[of[0]].answer];
      const most = Math.max(...runs.map((run) => apart(run.answer, first)));
      return `The same answer as with blocks at ${tables[0].join(", ")} (${exactly(apart(answer, first))}), and as the full softmax's`
        + ` (${exactly(apart(answer, whole.answer))}). Tried: ${tried} of ${of.length} places. attend ran in each, and all agree ${exactly(most)}.`;
    }

    // --- A step ---

    go(wanted) {
      this.n = Math.max(1, Math.min(this.last, wanted));
      const now = this.now = stateAt(this.run, this.n);
      const focused = this.shadowRoot.activeElement;
      this.back.disabled = this.n === 1;
      this.next.disabled = this.n === this.last;
      this.slider.value = this.n;
      this.slider.setAttribute("aria-valuetext", `step ${this.n} of ${this.last}`);
      this.count.textContent = `${this.n} / ${this.last}`;
      this.say.textContent = this.run.sentences[this.n - 1].replace("{block}", this.blocks[now.t]);
      this.because.textContent = this.run.reasons[this.n - 1];
      this.current = now.kind === "divides" ? -1 : now.t;
      [...this.entries.children].forEach((entry, logical) => entry.classList.toggle("now", logical === this.current));
      for (const cell of this.pool.children) cell.classList.toggle("now", cell.dataset.logical === String(this.current));
      this.drawArrows();
      this.drawSums(now);
      this.drawCode(this.code, now.kind);
      if (focused?.disabled) this.slider.focus({preventScroll: true}); // the keys still work
    }
    drawCode(node, kind) {
      node.replaceChildren(...this.data.code[kind].map((line) => make("span", {style: `padding-left:${line.search(/\S/) - 1}ch`}, line.trim())));
      return node;
    }
    drawVector(node, values) { node.replaceChildren(...values.map((x) => make("i", {}, x.toFixed(3)))); }

    /** Room for so many bars, each with an outline; they stay, and grow and shrink. */
    plot(count, hues, name = "") {
      const node = make("div", {class: `plot ${name}`, role: "img"});
      const bars = (kind) => Array.from({length: count}, () => make("i", {class: kind}));
      Object.assign(node, {hues, bars: bars("bar"), ghosts: bars("ghost"), zero: make("i", {class: "line"}),
        later: make("i", {class: "later", hidden: ""}), m: make("i", {class: "line m", hidden: ""}, make("b"))});
      node.append(node.later, ...node.bars, node.zero, ...node.ghosts, node.m);
      return node;
    }
    /** Bars upwards and downwards from zero, within [low, high]. Returns where a value is, in percent from the top. */
    fill(plot, label, values, outlines, low, high) {
      const y = (value) => 100 * (high - value) / (high - low || 1);
      const wide = 100 / plot.bars.length;
      const lay = (bar, value, i, inset) => {
        bar.hidden = value === undefined;
        bar.style.cssText = `left:calc(${i * wide}% + ${inset}px);width:calc(${wide}% - ${2 * inset}px);top:${y(Math.max(value, 0))}%;`
          + `height:${Math.abs(value) * 100 / (high - low || 1)}%;${plot.hues(i)}`;
      };
      plot.bars.forEach((bar, i) => lay(bar, values[i], i, 3));
      plot.ghosts.forEach((ghost, i) => lay(ghost, outlines[i], i, 1));
      plot.zero.style.top = `calc(${y(0)}% - 1px)`;
      const list = (numbers) => numbers.map(number).join(", ") || "nothing yet";
      plot.setAttribute("aria-label", `${label}: ${list(values)}.${outlines.length ? ` By the full softmax: ${list(outlines)}.` : ""}`);
      return y;
    }

    drawSums({kind, turn, before, m, l, o, scores, weights, parts, answer}) {
      const [{turns}, whole, keys, limit] = [this.run, this.known.whole, this.data.num_keys, this.seen(this.query)];
      const ends = (numbers) => [Math.min(0, ...numbers), Math.max(0, ...numbers)];
      const [low, high] = ends(turns.flatMap((each) => each.scores));
      this.range.textContent = `Scores, scale × q·k: ${number(low)} to ${number(high)}; m, the largest so far`;
      const y = this.fill(this.scores, `Scores; m is ${number(m)}`, scores, [], low, high + 0.2 * (high - low)); // room for m's name
      this.scores.m.hidden = m === null;
      this.scores.m.style.top = `calc(${y(m)}% - 1px)`;
      this.scores.m.firstChild.textContent = `m = ${number(m)}`;
      this.fill(this.weights, "Weights", weights, whole.turns[0].p, 0, 1.04);
      for (const {later} of [this.scores, this.weights]) {
        later.hidden = limit === keys;
        later.style.left = `${100 * limit / keys}%`;
      }
      this.fill(this.output, "o / l", answer, whole.answer, ...ends([...whole.answer, ...turns.flatMap((each) => each.o.map((x) => x / each.l))]));

      const most = Math.max(whole.turns[0].l, ...turns.map((each) => each.l));
      let left = 0;
      const lay = (bar, size, style) => { bar.style.cssText = `left:${100 * left / most}%;width:${100 * size / most}%;top:0;height:100%;${style}`; };
      lay(this.stack.ghosts[0], whole.turns[0].l, "z-index:1");
      this.stack.bars.forEach((bar, i) => {
        lay(bar, parts[i] ?? 0, hue(i));
        left += parts[i] ?? 0;
        this.stack.ghosts[i].hidden = i > 0;
      });
      this.stack.zero.hidden = true;
      this.stack.setAttribute("aria-label", `l, block by block: ${parts.map(number).join(", ") || "nothing yet"}. By the full softmax: ${number(whole.turns[0].l)}.`);

      const fades = turn && kind !== "reads" && kind !== "divides";
      const exponent = fades && number(turn.old === null ? null : before.m - m);
      this.factor.textContent = `exp(m_old - m_new)${fades ? ` = exp(${exponent}) = ${number(turn.fade)}` : ": –"}`;
      this.ofL.textContent = number(l) + (fades ? ` = ${number(turn.fade)} × ${number(before.l)}` : "")
        + (kind === "adds" ? ` + ${number(sumOf(turn.p))}` : "");
      this.drawVector(this.ofO, o);
    }

    /** From each entry of the table to its block. */
    drawArrows() {
      const all = this.memory.getBoundingClientRect();
      this.arrows.innerHTML = this.choices.map((choice, logical) => {
        const a = choice.getBoundingClientRect();
        const cell = this.pool.children[this.blocks[logical]];
        const [x, y] = [a.left + a.width / 2 - all.left, a.bottom - all.top];
        const [tx, ty] = [cell.offsetLeft + cell.offsetWidth / 2, cell.offsetTop + 2]; // its destination
        const middle = (y + ty) / 2;
        return `<path class="${logical === this.current ? "now" : ""}" style="${hue(logical)}" d="M${x} ${y}C${x} ${middle} ${tx} ${middle} ${tx} ${ty}m-4-6l4 6l4-6"/>`;
      }).join("");
    }
  }

  if (!customElements.get("paged-attention")) customElements.define("paged-attention", PagedAttention);
})();
