/* The live page: an engine's blocks, queues and figures, now and in the last minute.
 *
 * /live/events sends the changes, at most ten times a second (minipaged/serve/live/watch.py has the format). A frame is
 * applied to the state before it. The last frames are kept, with a copy of the state now and then, so that one can step
 * back. The page computes nothing that the server could send.
 */
const KEPT = 600; // frames that one can step back to
const SPACING = 50; // frames between two copies of the state
const MOST_ENDED = 64; // ended requests that are kept, as on the server
const MOST_ROWS = 24;
const SECONDS = 60; // on the time axis of the plots
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*";
// White letters are readable on each color, each stands out from light and dark pages, and neighbours are unlike.
const COLORS = ["#096ed2", "#b94e0a", "#027c7c", "#cf0a98", "#417d0a", "#714dfc", "#976500", "#057898", "#db084a",
  "#037e5b", "#ad2dda", "#78710d"];
const NO_LETTER = LETTERS.length - 1; // for sequences that started when all letters were taken
const NO_COLOR = "#6b6f78";
const colorOf = (letter) => (letter === NO_LETTER ? NO_COLOR : COLORS[letter % COLORS.length]);
const GONE_ON = new Set(["waiting", "running", "swapped"]);

const find = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== false) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
/** Set a node's text only if it changes, so that an equal text is neither drawn nor read out again. */
const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const count = (n, thing) => `${n.toLocaleString("en")} ${thing}${n === 1 ? "" : "s"}`;

// --- State ----------------------------------------------------------------------------------------

class Blocks {
  constructor(number) {
    this.letter = new Int8Array(number).fill(-1); // of the first holder; -1: no holder
    this.holders = new Uint16Array(number);
    this.filled = new Uint16Array(number);
    this.cached = new Uint8Array(number);
    this.reached = 0; // the highest block ever used, plus 1
  }
  get length() { return this.letter.length; }
  apply(runs) {
    for (const [first, number, letter, holders, filled, cached] of runs) {
      const end = first + number;
      this.letter.fill(letter, first, end);
      this.holders.fill(holders, first, end);
      this.filled.fill(filled, first, end);
      this.cached.fill(cached, first, end);
      if (holders || cached) this.reached = Math.max(this.reached, end);
    }
  }
  copy() {
    const same = new Blocks(0);
    for (const name of ["letter", "holders", "filled", "cached"]) same[name] = this[name].slice();
    same.reached = this.reached;
    return same;
  }
  counts() {
    const found = {held: 0, shared: 0, cached: 0};
    for (let i = 0; i < this.length; i++) {
      if (this.holders[i]) found.held++;
      if (this.holders[i] > 1) found.shared++;
      if (!this.holders[i] && this.cached[i]) found.cached++;
    }
    return {...found, free: this.length - found.held - found.cached};
  }
}

class State {
  constructor() {
    this.sizes = [0, 0, 1, 1, [null]]; // device blocks, host blocks, slots per block, tokens of the longest sequence, windows
    this.device = new Blocks(0);
    this.host = new Blocks(0);
    this.requests = new Map(); // number -> {number, id, queue, letters, prompt, found, runs, ttft, generated}
    this.figures = [0, 0, 0, 0, 0, 0, 0, 0, 0, null];
    this.error = "";
  }
  apply(frame) {
    if (frame.whole) {
      this.sizes = frame.sizes;
      this.device = new Blocks(frame.sizes[0]);
      this.host = new Blocks(frame.sizes[1]);
      this.requests.clear();
      this.error = "";
    }
    this.device.apply(frame.device ?? []);
    this.host.apply(frame.host ?? []);
    const rows = frame.requests ?? [];
    for (const [number, id, queue, letters, prompt, found, runs, ttft, generated] of rows) {
      this.requests.set(number, {number, id, queue, letters, prompt, found, runs, ttft, generated});
    }
    // A request is replaced and not changed, because copies of this state share it.
    for (const [number, generated] of frame.grown ?? []) {
      this.requests.set(number, {...this.requests.get(number), generated});
    }
    if (rows.length) this.forgetEnded();
    this.figures = frame.figures.at(-1) ?? this.figures;
    this.error = frame.error ?? this.error;
  }
  forgetEnded() {
    const ended = [...this.requests.values()].filter((r) => !GONE_ON.has(r.queue)).sort((a, b) => a.number - b.number);
    for (const request of ended.slice(0, -MOST_ENDED)) this.requests.delete(request.number);
  }
  copy() {
    const same = new State();
    Object.assign(same, this, {device: this.device.copy(), host: this.host.copy(), requests: new Map(this.requests)});
    return same;
  }
}

class History {
  constructor() {
    this.latest = new State();
    this.first = 0; // the number of the earliest frame that is kept
    this.frames = [];
    this.copies = []; // the states before every SPACING-th frame
  }
  get last() { return this.first + this.frames.length - 1; }
  push(frame) {
    if (this.frames.length === KEPT + SPACING) {
      this.frames.splice(0, SPACING);
      this.copies.shift();
      this.first += SPACING;
    }
    if (this.frames.length % SPACING === 0) this.copies.push(this.latest.copy());
    this.frames.push({...frame, figures: frame.figures.slice(-1)}); // `series` keeps the other figures, for the plots
    this.latest.apply(frame);
  }
  /** Return the state after a frame. */
  at(number) {
    const place = number - this.first;
    const copied = Math.floor(place / SPACING);
    const state = this.copies[copied].copy();
    for (let i = copied * SPACING; i <= place; i++) state.apply(this.frames[i]);
    return state;
  }
}

// --- The map --------------------------------------------------------------------------------------

const PITCHES = [56, 44, 32, 24, 18, 14, 11, 9, 7, 6, 5]; // CSS pixels from one block to the next
const FEWEST = 256; // blocks drawn at least, if the pool has them

/** Return the number of blocks to draw: at least those ever used, in powers of two, so that the map seldom changes. */
const drawnOf = (reached, all) => {
  let number = FEWEST;
  while (number < reached) number *= 2;
  return Math.min(number, all);
};

/** A map of a pool's blocks. The allocator starts with the first blocks, and blocks are drawn only when they come into
 * use. The box around the map has a maximum height (live.css). If the smallest cells do not fit, it scrolls, and only
 * the visible part is drawn. */
class MemoryMap {
  /** `beside`: another map, whose cells are never smaller than this one's. */
  constructor(canvas, describe, beside) {
    this.canvas = canvas;
    this.describe = describe;
    this.beside = beside;
    this.box = canvas.parentElement;
    this.blocks = new Blocks(0);
    this.number = 0; // blocks that are drawn
    this.marked = new Set();
    this.cursor = 0;
    canvas.addEventListener("pointermove", (at) => this.point(at));
    canvas.addEventListener("pointerdown", (at) => this.point(at));
    canvas.addEventListener("focus", () => this.move(this.cursor));
    canvas.addEventListener("blur", () => this.draw());
    canvas.addEventListener("keydown", (key) => {
      const {cursor, columns} = this;
      const to = {ArrowLeft: cursor - 1, ArrowRight: cursor + 1, ArrowUp: cursor - columns,
        ArrowDown: cursor + columns, Home: 0, End: this.number - 1}[key.key];
      if (to === undefined || key.altKey || key.ctrlKey || key.metaKey) return;
      key.preventDefault();
      this.move(to);
    });
    this.box.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.box);
  }
  point(at) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((at.clientX - box.left) / this.pitch);
    const block = Math.floor((at.clientY - box.top) / this.pitch) * this.columns + column;
    if (column < this.columns && block < this.number) this.move(block);
  }
  move(block) {
    this.cursor = Math.max(0, Math.min(this.number - 1, block));
    this.reveal(this.cursor);
    this.draw();
    this.tell();
  }
  /** Scroll a block into view, by as little as possible. */
  reveal(block) {
    const top = Math.floor(block / this.columns) * this.pitch;
    const {scrollTop, clientHeight} = this.box;
    if (top < scrollTop) this.box.scrollTop = top;
    else if (top + this.pitch > scrollTop + clientHeight) this.box.scrollTop = top + this.pitch - clientHeight;
  }
  tell() {
    const text = this.describe(this.cursor);
    this.canvas.setAttribute("aria-valuenow", this.cursor);
    this.canvas.setAttribute("aria-valuetext", text);
    return text;
  }
  layOut() {
    const width = this.canvas.clientWidth;
    const most = parseFloat(getComputedStyle(this.box).maxHeight);
    const fits = (pitch) => Math.ceil(this.number / Math.max(1, Math.floor(width / pitch))) * pitch <= most;
    this.pitch = PITCHES.find((pitch) => pitch <= (this.beside?.pitch ?? pitch) && fits(pitch)) ?? PITCHES.at(-1);
    this.columns = Math.max(1, Math.floor(width / this.pitch));
    const height = Math.ceil(this.number / this.columns) * this.pitch;
    const scale = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const first = Math.floor(this.box.scrollTop / this.pitch);
    const rows = Math.ceil(this.box.clientHeight / this.pitch) + 1;
    pen.clearRect(0, first * this.pitch, width, rows * this.pitch);
    return [pen, first * this.columns, Math.min(this.number, (first + rows) * this.columns)];
  }
  draw(blocks = this.blocks, number = this.number, marked = this.marked, size = this.size) {
    Object.assign(this, {blocks, number, marked, size});
    if (!this.canvas.clientWidth) return;
    const [pen, first, end] = this.layOut();
    const {color: strong, caretColor: faint} = getComputedStyle(this.canvas); // they depend on the color scheme
    const side = this.pitch - (this.pitch > 24 ? 4 : this.pitch > 12 ? 2 : 1);
    for (let i = first; i < end; i++) {
      const x = (i % this.columns) * this.pitch + 1;
      const y = Math.floor(i / this.columns) * this.pitch + 1;
      pen.globalAlpha = marked.size && !marked.has(i) ? 0.2 : 1;
      if (blocks.holders[i]) this.drawHeld(pen, blocks, i, x, y, side);
      else if (blocks.cached[i]) this.drawCached(pen, side < 10 ? faint : strong, x, y, side);
      else this.drawFree(pen, faint, x, y, side);
    }
    pen.globalAlpha = 1;
    if (document.activeElement === this.canvas) {
      pen.strokeStyle = strong;
      pen.lineWidth = 2;
      pen.strokeRect((this.cursor % this.columns) * this.pitch, Math.floor(this.cursor / this.columns) * this.pitch,
        side + 2, side + 2);
    }
  }
  /** Draw a held block: solid. A large cell has a letter and the number of holders, and a gauge if it is not full. */
  drawHeld(pen, blocks, i, x, y, side) {
    const [letter, holders] = [blocks.letter[i], blocks.holders[i]];
    pen.fillStyle = colorOf(letter);
    pen.fillRect(x, y, side, side);
    pen.fillStyle = "#fff";
    if (side < 10) {
      const dot = Math.max(1, Math.floor(side / 3));
      if (holders > 1) pen.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
      return;
    }
    const part = blocks.filled[i] / this.size;
    if (part < 1) { // the gauge: its white part is filled
      const inset = side > 16 ? 4 : 2;
      pen.fillStyle = "#0009";
      pen.fillRect(x + inset, y + side - inset - 2, side - 2 * inset, 2);
      pen.fillStyle = "#fff";
      pen.fillRect(x + inset, y + side - inset - 2, (side - 2 * inset) * part, 2);
    }
    const name = LETTERS[letter];
    const text = holders === 1 ? name : side >= 28 ? `${name}×${holders}` : holders > 9 ? "+" : `${holders}`;
    pen.font = `700 ${Math.min(16, Math.round(side * (text.length > 2 ? 0.42 : 0.62)))}px system-ui, sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(text, x + side / 2, y + side / 2, side);
    if (holders > 1) { // a shared block has a frame too
      pen.strokeStyle = "#fff";
      pen.lineWidth = 1;
      pen.strokeRect(x + 1.5, y + 1.5, side - 3, side - 3);
    }
  }
  /** Draw a cached block: hollow, and hatched in a large cell. It is never as dark as a held block. */
  drawCached(pen, color, x, y, side) {
    pen.strokeStyle = color;
    pen.lineWidth = 1;
    pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    if (side < 10) return;
    pen.beginPath();
    for (let d = 5; d < 2 * side; d += 5) {
      pen.moveTo(x + Math.max(0, d - side), y + Math.min(d, side));
      pen.lineTo(x + Math.min(d, side), y + Math.max(0, d - side));
    }
    pen.stroke();
  }
  /** Draw a free block: a dashed frame, or a dot in a small cell. */
  drawFree(pen, color, x, y, side) {
    pen.strokeStyle = pen.fillStyle = color;
    if (side < 10) {
      pen.fillRect(x + Math.floor(side / 2), y + Math.floor(side / 2), 1, 1);
      return;
    }
    pen.lineWidth = 1;
    pen.setLineDash([2, 2]);
    pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    pen.setLineDash([]);
  }
}

// --- Plots ----------------------------------------------------------------------------------------

const [T, STEP, RUNNING, WAITING, SWAPPED, GENERATED, QUERIED, FOUND, HELD, TTFT] = Array(10).keys();

/** Return the index of the last figures that are at least `seconds` older than those at `i`; 0 if there are none. */
const before = (series, i, seconds) => {
  let j = i;
  while (j > 0 && series[i][T] - series[j][T] < seconds) j--;
  return j;
};
/** Return tokens per second over the last second. It falls to 0 a second after figures without successors. */
const rates = (series, now) => series.flatMap((figures, i) => {
  const then = series[before(series, i, 1)];
  const rate = (figures[GENERATED] - then[GENERATED]) / Math.max(0.1, Math.min(1, figures[T] - then[T]));
  const silent = (series[i + 1]?.[T] ?? now) - figures[T] > 1;
  return silent ? [[figures[T], rate], [figures[T] + 1, 0]] : [[figures[T], rate]];
});
/** Return the percentage of prompt tokens found in the prefix cache, over the last ten seconds. */
const hits = (series) => series.flatMap((now, i) => {
  const then = series[before(series, i, 10)];
  const queried = now[QUERIED] - then[QUERIED];
  return queried ? [[now[T], (100 * (now[FOUND] - then[FOUND])) / queried]] : [];
});
const plain = (column) => (series) => series.map((figures) => [figures[T], figures[column]]);
const ttfts = (series) => plain(TTFT)(series).filter(([, ttft]) => ttft !== null);
/** Return twice the upper quartile, as the top of the plot, so that one very long bar does not flatten the others. */
const fence = (values) => Math.max(1, 2 * values.toSorted((a, b) => a - b)[Math.floor(0.75 * (values.length - 1))]);
const rounded = (value, unit) => (value === undefined ? "–" : `${Math.round(value).toLocaleString("en")} ${unit}`.trim());

// `text` formats the values of the lines at a moment. It also receives the figures of that moment.
const PLOTS = [
  {title: "tokens a second", lines: [rates], text: ([rate]) => rounded(rate, "")},
  {title: "running, waiting (dashed), swapped (dotted)", lines: [RUNNING, WAITING, SWAPPED].map(plain),
    text: (numbers) => numbers.join(", ")},
  {title: "time to first token", bars: true, lines: [ttfts], text: ([ttft]) => rounded(ttft, "ms")},
  {title: "prompt tokens found in the cache", lines: [hits], highest: 100,
    text: ([share], now) => rounded(share ?? (now[QUERIED] ? (100 * now[FOUND]) / now[QUERIED] : undefined), "%")},
  {title: "blocks held", lines: [plain(HELD)], text: ([held]) => rounded(held, "")},
];
const SVG = "http://www.w3.org/2000/svg";
const shape = (tag, attributes) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

class Plot {
  constructor(plot) {
    this.plot = plot;
    this.svg = shape("svg", {viewBox: "0 0 300 60", preserveAspectRatio: "none", role: "img"});
    this.value = make("b");
    this.top = make("span");
    const caption = make("figcaption", {}, make("span", {}, `${plot.title}: `), make("span", {}, this.value, this.top));
    this.figure = make("figure", {}, caption, this.svg);
  }
  /** `series`: all figures; `figures`: the ones shown, which are the newest if the page is live. */
  draw(series, figures, now, live) {
    const {lines, bars, highest, text, title} = this.plot;
    const at = live ? now : figures[T];
    const end = Math.min(now, at + SECONDS); // keeps the moment that is shown in the plot
    const begin = end - SECONDS;
    const known = lines.map((line) => line(series, now));
    // A value on a line holds until the next, so the last value before the minute is drawn too. A bar has one moment.
    const drawn = known.map((points) => {
      const last = bars ? -1 : points.findLastIndex(([t]) => t < begin);
      return points.filter(([t], i) => (t >= begin || i === last) && t <= end);
    });
    const values = drawn.flat().map(([, value]) => value);
    const most = Math.max(...values);
    const scale = highest ?? Math.max(1, most);
    const top = bars && values.length ? Math.min(scale, fence(values)) : scale;
    const x = (t) => (300 * (Math.max(t, begin) - begin)) / SECONDS;
    const y = (value) => 57 - (54 * value) / top;
    const bar = ([t, value]) => (value <= top ? `M${x(t)},57V${y(value)}` : `M${x(t)},57V12M${x(t)},6V0`); // broken
    const steps = (points) => points.map(([t, value], i) => `${i ? "H" : "M"}${x(t)}${i ? "V" : ","}${y(value)}`);
    const children = drawn.map((points, i) => shape("path", {class: `dash${i}`,
      d: bars ? points.map(bar).join("") : points.length ? `${steps(points).join("")}H${x(now)}` : ""}));
    if (!live) children.push(shape("line", {x1: x(at), x2: x(at), y1: 0, y2: 60}));
    this.svg.replaceChildren(...children);
    say(this.value, text(known.map((points) => points.findLast(([t]) => t <= at)?.[1]), figures));
    const broken = most > top ? `; broken bars: over ${rounded(top, "")}` : "";
    say(this.top, highest || !values.length ? "" : ` (most ${rounded(most, "")}${broken})`);
    this.svg.setAttribute("aria-label", `${title}, the last minute: ${this.value.textContent} now${this.top.textContent}`);
  }
}

// --- The page -------------------------------------------------------------------------------------

const history = new History();
let series = []; // the figures of the last frames
let ahead = 0; // seconds by which the server's clock is ahead of this page's
let shown = null; // the number of the frame that is shown; null: the newest
let state = history.latest;
let stepped = null; // the number of the frame that gave `state`; null: the newest
let drawing = false;
let highlighted = null; // the answer whose blocks are highlighted
let revealed = null; // the answer to whose blocks the map was scrolled

const plots = PLOTS.map((plot) => new Plot(plot));
find("plots").append(...plots.map((plot) => plot.figure));

/** Return a function that describes a block in words. */
const describe = (blocks, host) => (block) => {
  const holders = blocks().holders[block];
  const name = `${host ? "host block" : "block"} ${block}`;
  if (!holders) return blocks().cached[block] ? `${name}: only the prefix cache holds it` : `${name}: free`;
  const letter = LETTERS[blocks().letter[block]];
  const owner = letter === "*" ? null : [...state.requests.values()].find((r) => r.letters.includes(letter));
  const who = letter === "*" ? "a sequence without a letter" : `${letter}${owner ? ` of ${owner.id}` : ""}`;
  const others = holders > 1 ? ` and ${count(holders - 1, "other sequence")}` : "";
  const cached = blocks().cached[block] ? ", and by the prefix cache" : "";
  return `${name}: held by ${who}${others}${cached}; ${blocks().filled[block]} of ${count(state.sizes[2], "slot")} filled`;
};
const maps = {};
let told = null; // the map whose block the line below describes
for (const [name, host] of [["device", false], ["host", true]]) {
  maps[name] = new MemoryMap(find(name), describe(() => state[name], host), maps.device);
  for (const kind of ["pointermove", "pointerdown", "focus", "keydown"]) {
    find(name).addEventListener(kind, () => { told = maps[name]; say(find("tip"), told.tell()); });
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

const draw = () => {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (shown !== null) shown = Math.max(shown, history.first);
    if (shown === null) state = history.latest;
    else if (shown !== stepped) state = history.at(shown);
    stepped = shown;
    drawHistory();
    if (!state.sizes[0]) return; // no frame has come yet
    drawMemory();
    drawPlots();
    drawRequests();
    noteTurns();
  });
};

const drawPlots = () => {
  if (!series.length) return;
  const now = Math.max(performance.now() / 1000 + ahead, series.at(-1)[T]);
  for (const plot of plots) plot.draw(series, state.figures, now, shown === null);
};
/** Redraws the plots every second, also without new frames, while the page is visible. */
let ticking = null;
const tick = () => {
  clearInterval(ticking);
  ticking = document.hidden ? null : setInterval(drawPlots, 1000);
  if (!document.hidden) drawPlots();
};
document.addEventListener("visibilitychange", tick);
tick();

const drawHistory = () => {
  const at = shown ?? history.last;
  const slider = find("when");
  slider.min = history.first;
  slider.max = Math.max(history.first, history.last);
  slider.value = at;
  find("back").disabled = at <= history.first;
  find("next").disabled = at >= history.last;
  say(find("pause"), shown === null ? "Pause" : "Live");
  const age = history.latest.figures[T] - state.figures[T];
  const when = shown === null ? "now" : `${age.toFixed(1)} s before the newest`;
  const text = `step ${state.figures[STEP]}, change ${at + 1}: ${when}.`;
  slider.setAttribute("aria-valuetext", text);
  say(find("moment"), `${text} The last ${KEPT} changes are kept, of at most ten a second.`);
};

/** Say how many blocks each group of layers holds, if some layers have a window. */
const drawGroups = () => {
  const [, , , , windows] = state.sizes;
  const [held, passed] = state.figures.slice(TTFT + 1);
  find("groups").hidden = !held;
  if (!held) return;
  const groups = windows.map((window, i) => `${held[i]} in group ${i} (${window === null ? "sees all" : `last ${count(window, "token")}`})`);
  say(find("groups"), `Held by layers: ${groups.join(", ")}. Windows have passed ${count(passed, "block")}, which were given back.`);
};

const drawMemory = () => {
  const {sizes, device, host} = state;
  const {held, shared, cached, free} = device.counts();
  say(find("counts"), `Device memory: ${count(sizes[0], "block")} of ${count(sizes[2], "slot")}: ${held} held`
    + ` (${shared} shared), ${cached} only cached, ${free} free`);
  drawGroups();
  find("host-memory").hidden = !host.length;
  const onHost = host.counts().held;
  say(find("host-counts"), `Host memory: ${onHost || "none"} of ${count(host.length, "block")} held`);
  find("host").parentElement.hidden = !history.latest.host.reached; // most runs never use it
  const marked = new Set(highlighted?.blocks());
  for (const [name, map] of Object.entries(maps)) {
    const all = state[name].length;
    // The map keeps its size when one steps back.
    const number = drawnOf(Math.max(state[name].reached, history.latest[name].reached), all);
    map.draw(state[name], number, name === "device" ? marked : new Set(), sizes[2]);
    map.canvas.setAttribute("aria-valuemax", Math.max(0, number - 1));
    const rest = [];
    if (number < all) rest.push(`… ${count(all - number, "more block")} not used yet`);
    if (map.box.scrollHeight > map.box.clientHeight) rest.push("The map scrolls.");
    say(find(`${name}-rest`), rest.join(". "));
    find(`${name}-rest`).hidden = !rest.length || map.box.hidden;
  }
  if (highlighted !== revealed && marked.size) maps.device.reveal(Math.min(...marked));
  revealed = highlighted;
  if (told) say(find("tip"), told.tell());
};

const ORDER = ["running", "swapped", "waiting"];
const drawRequests = () => {
  const all = [...state.requests.values()];
  const live = all.filter((r) => GONE_ON.has(r.queue))
    .sort((a, b) => ORDER.indexOf(a.queue) - ORDER.indexOf(b.queue) || a.number - b.number);
  const ended = all.filter((r) => !GONE_ON.has(r.queue)).sort((a, b) => b.number - a.number);
  const rows = [...live.slice(0, MOST_ROWS), ...ended.slice(0, Math.max(6, MOST_ROWS - live.length))];
  find("rows").replaceChildren(...rows.map((request) => {
    const letters = [...request.letters].map((letter) => {
      const swatch = make("span", {class: "swatch"}, letter);
      swatch.style.background = colorOf(LETTERS.indexOf(letter));
      return swatch;
    });
    const ttft = request.ttft === null ? "" : `${Math.round(request.ttft)} ms`;
    const id = request.id.length > 24 ? `${request.id.slice(0, 12)}…${request.id.slice(-8)}` : request.id;
    return make("tr", {}, make("td", {}, ...letters), make("td", {title: request.id}, id),
      ...[request.queue, request.prompt, request.found, request.generated, ttft].map((cell) => make("td", {}, `${cell}`)));
  }));
  say(find("more"), live.length > MOST_ROWS ? `and ${live.length - MOST_ROWS} more that have not ended` : "");
};

const go = (number) => {
  shown = Math.max(history.first, Math.min(history.last, number));
  draw();
};
find("back").addEventListener("click", () => go((shown ?? history.last) - 1));
find("next").addEventListener("click", () => go((shown ?? history.last) + 1));
find("when").addEventListener("input", () => go(Number(find("when").value)));
find("pause").addEventListener("click", () => {
  shown = shown === null && history.last >= 0 ? history.last : null;
  draw();
});

// --- The stream -----------------------------------------------------------------------------------

let key = sessionStorage.getItem("key") ?? "";
const headers = () => (key ? {Authorization: `Bearer ${key}`} : {});
const status = (text, bad = false) => {
  say(find("status"), text);
  find("status").className = bad ? "bad" : "";
};

/** Yield the data of server-sent events, as they come. A keep-alive has none. */
async function* dataOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

const askForKey = () => new Promise((resolve) => {
  find("key").hidden = false;
  find("key").addEventListener("submit", (submitted) => {
    submitted.preventDefault();
    key = find("secret").value;
    sessionStorage.setItem("key", key); // until this tab is closed
    find("secret").value = "";
    find("key").hidden = true;
    resolve();
  }, {once: true});
});

const follow = async () => {
  const response = await fetch("/live/events", {headers: headers()});
  if (response.status === 401) {
    status(key ? "this key is not the server's" : "this server requires a key", true);
    await askForKey();
    return;
  }
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  ahead = Number(response.headers.get("Live-Clock")) - performance.now() / 1000;
  status("connected");
  showModel();
  for await (const text of dataOf(response)) {
    const frame = JSON.parse(text);
    series = [...(frame.whole ? [] : series), ...frame.figures].slice(-KEPT);
    history.push(frame);
    ahead = Math.max(ahead, series.at(-1)[T] - performance.now() / 1000); // this computer's clock stops while it sleeps
    if (history.latest.error) status(`the page cannot follow the engine: ${history.latest.error}`, true);
    draw();
  }
  throw new Error("the server has closed the connection");
};

const showModel = async () => {
  const response = await fetch("/v1/models", {headers: headers()});
  if (response.ok) say(find("model"), (await response.json()).data[0].id);
};

const followAlways = async () => {
  for (;;) {
    try {
      await follow();
    } catch (error) {
      status(`not connected, trying again: ${error.message}`, true);
      await new Promise((resolve) => { setTimeout(resolve, 1000); });
    }
  }
};

// --- Chat -----------------------------------------------------------------------------------------

/** A tool that this page offers to the model: it may ask how its own memory is used. */
const TOOL = {type: "function", function: {
  name: "count_blocks",
  description: "Count the blocks of the KV cache: held by sequences, kept by the prefix cache only, and free.",
  parameters: {type: "object", properties: {}},
}};
const MOST_ROUNDS = 3; // answers to one question; the last one may call no tool
const resultOf = (name) => {
  if (name !== TOOL.function.name) return {error: `there is no tool ${name}`};
  const {held, cached, free} = history.latest.device.counts();
  return {held, cached, free};
};

const turns = []; // the answers
let messages = [];
let answering = null; // the controller that aborts the answer being read

class Turn {
  constructor() {
    this.text = make("p", {class: "text"});
    this.note = make("span");
    this.button = make("button", {type: "button", class: "quiet", "aria-pressed": "false", hidden: ""}, "Show them");
    this.button.addEventListener("click", () => {
      highlighted = highlighted === this ? null : this;
      for (const turn of turns) turn.button.setAttribute("aria-pressed", turn === highlighted);
      draw();
    });
    this.item = make("li", {}, make("b", {}, "minipaged"), this.text, make("p", {class: "note"}, this.note, " ", this.button));
    this.name = crypto.getRandomValues(new Uint32Array(4)).join("."); // identifies its request before the answer comes
    this.request = null;
    say(this.note, "Sent: the engine takes it up after its current step.");
  }
  blocks() {
    return (this.request?.runs ?? []).flatMap(([first, number]) => Array.from({length: number}, (_, i) => first + i));
  }
  /** Describe the progress of the answer's request. */
  noteRequest(requests) {
    this.request = requests.findLast((request) => request.id.includes(this.name)) ?? this.request;
    if (!this.request) return;
    const {queue, found, prompt, generated} = this.request;
    if (!generated) {
      const cached = found ? `, of which ${found.toLocaleString("en")} were in the cache` : "";
      const tokens = `${count(prompt, "prompt token")}${cached}`;
      const alone = requests.every((other) => other === this.request || !GONE_ON.has(other.queue));
      say(this.note, queue === "running" || (queue === "waiting" && alone) ? `Reading ${tokens} …`
        // The events of a step come when it ends.
        : queue === "waiting" ? `Waiting for its turn, or being read already: ${tokens}.` : "");
      return;
    }
    const blocks = this.blocks().length;
    say(this.note, (found
      ? `Shared ${count(blocks, "block")} with earlier requests: ${found} of ${prompt} prompt tokens were in the cache.`
      : `Shared no block: all ${count(prompt, "prompt token")} were computed.`)
      + ` ${count(generated, "token")} generated.${this.usage ?? ""}`);
    this.button.hidden = !found;
  }
}

const noteTurns = () => {
  for (const turn of turns.slice(-3)) turn.noteRequest([...history.latest.requests.values()]);
};

/** Show the answer as it comes, and return the tool calls in it. */
const readAnswer = async (turn, signal, tools) => {
  const calls = [];
  const response = await fetch("/v1/chat/completions", {
    method: "POST", signal, headers: {"Content-Type": "application/json", ...headers()},
    // Small models ramble at temperature 1. These are the defaults of `minipaged chat`.
    body: JSON.stringify({messages, temperature: 0.2, top_p: 0.9, request_id: turn.name, stream: true,
      stream_options: {include_usage: true}, ...tools}),
  });
  if (!response.ok) {
    const {error} = await response.json().catch(() => ({error: `the server answered ${response.status}`}));
    throw new Error(error.message ?? error);
  }
  for await (const text of dataOf(response)) {
    if (text === "[DONE]") break;
    const chunk = JSON.parse(text);
    if (chunk.error) throw new Error(chunk.error.message ?? chunk.error);
    const delta = chunk.choices[0]?.delta ?? {};
    turn.text.append(delta.content ?? "");
    for (const {index, id, function: {name, arguments: piece}} of delta.tool_calls ?? []) {
      calls[index] ??= {id, type: "function", function: {name, arguments: ""}};
      calls[index].function.arguments += piece;
    }
    const cached = chunk.usage?.prompt_tokens_details?.cached_tokens;
    if (cached !== undefined) turn.usage = ` (usage: ${cached} cached)`;
  }
  return calls;
};

/** Show the calls of an answer, and add them and their results to the conversation. */
const carryOut = (calls, turn, conversation) => {
  conversation.push({role: "assistant", content: turn.text.textContent, tool_calls: calls});
  for (const call of calls) {
    const {name, arguments: given} = call.function, result = JSON.stringify(resultOf(name));
    turn.note.parentElement.before(make("p", {class: "text"}, `${name}(${given}) → ${result}`));
    conversation.push({role: "tool", tool_call_id: call.id, content: result});
  }
};

const setAnswering = (is) => {
  find("send").setAttribute("aria-disabled", is); // not `disabled`, which would take away its focus
  find("stop").disabled = !is;
  say(find("wait"), is ? "Send waits for the answer to end; Stop ends it." : "");
};

const answer = async (question) => {
  const mine = messages, before = mine.length;
  mine.push({role: "user", content: question});
  find("turns").append(make("li", {}, make("b", {}, "you"), make("p", {class: "text"}, question)));
  answering = new AbortController();
  setAnswering(true);
  const {signal} = answering;
  let turn;
  try {
    for (let round = 1, calls = null; calls === null || calls.length; round++) {
      if (calls) carryOut(calls, turn, mine);
      turn = new Turn();
      turns.push(turn);
      find("turns").append(turn.item);
      calls = await readAnswer(turn, signal, find("offer").checked && round < MOST_ROUNDS ? {tools: [TOOL]} : {});
      signal.throwIfAborted(); // the conversation may be over
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!turn.request) say(turn.note, "");
    turn.item.append(make("p", stopped ? {class: "note"} : {class: "error", role: "alert"}, stopped ? "Stopped." : error.message));
  }
  if (turn.text.textContent) mine.push({role: "assistant", content: turn.text.textContent});
  else mine.length = before; // a question without an answer would be asked again with the next one
  if (find("stop") === document.activeElement) find("question").focus(); // a disabled button would lose the focus
  answering = null;
  setAnswering(false);
  draw();
};

find("ask").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  const question = find("question").value.trim();
  if (!question) return;
  if (answering) {
    say(find("wait"), "Your message stays here: send it when the answer has ended, or Stop that first.");
    return;
  }
  find("question").value = "";
  answer(question);
});
find("question").addEventListener("keydown", (pressed) => {
  if (pressed.key !== "Enter" || pressed.shiftKey || pressed.isComposing) return;
  pressed.preventDefault();
  find("ask").requestSubmit();
});
find("stop").addEventListener("click", () => answering?.abort());
find("anew").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  turns.length = 0;
  highlighted = null;
  find("turns").replaceChildren();
  draw();
});

globalThis.minipaged = {history, maps, shown: () => state}; // for the browser's console
followAlways();
