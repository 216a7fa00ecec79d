/* The live page: what an engine's blocks, queues and figures are now, and were a moment ago.
 *
 * /live/events tells what has changed, ten times a second at most (minipaged/serve/live/watch.py says how). A frame is
 * applied to the state before it; the last frames are kept, and a copy of the state now and then, so that one can step
 * back. The page decides nothing, and works out nothing that the server could tell.
 */
const KEPT = 600; // frames that can be gone back to
const SPACING = 50; // frames between two copies of the state
const MOST_ENDED = 64; // requests that have ended, which the server remembers
const MOST_ROWS = 24;
const SECONDS = 60; // of the plots
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*";
// White letters can be read on them, and they stand out from a white page and from a dark one; neighbours are unlike.
const COLORS = ["#096ed2", "#b94e0a", "#027c7c", "#cf0a98", "#417d0a", "#714dfc", "#976500", "#057898", "#db084a",
  "#037e5b", "#ad2dda", "#78710d"];
const NO_LETTER = LETTERS.length - 1; // for sequences that came when all letters were taken
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
/** Set a text only where it changes: what is unchanged is neither drawn nor read out again. */
const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const count = (n, thing) => `${n.toLocaleString("en")} ${thing}${n === 1 ? "" : "s"}`;

// --- State ----------------------------------------------------------------------------------------

class Blocks {
  constructor(number) {
    this.letter = new Int8Array(number).fill(-1); // of the first holder; -1: nobody
    this.holders = new Uint16Array(number);
    this.filled = new Uint16Array(number);
    this.cached = new Uint8Array(number);
  }
  get length() { return this.letter.length; }
  apply(runs) {
    for (const [first, number, letter, holders, filled, cached] of runs) {
      const end = first + number;
      this.letter.fill(letter, first, end);
      this.holders.fill(holders, first, end);
      this.filled.fill(filled, first, end);
      this.cached.fill(cached, first, end);
    }
  }
  copy() {
    const same = new Blocks(0);
    for (const name of ["letter", "holders", "filled", "cached"]) same[name] = this[name].slice();
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
    this.sizes = [0, 0, 1, 1]; // device blocks, host blocks, slots of a block, tokens of the longest sequence
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
    // One that is told is not changed: a copy of this state has it too.
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
    this.copies = []; // the states before every SPACING-th of them
  }
  get last() { return this.first + this.frames.length - 1; }
  push(frame) {
    if (this.frames.length === KEPT + SPACING) {
      this.frames.splice(0, SPACING);
      this.copies.shift();
      this.first += SPACING;
    }
    if (this.frames.length % SPACING === 0) this.copies.push(this.latest.copy());
    this.frames.push({...frame, figures: frame.figures.slice(-1)}); // the others are kept for the plots
    this.latest.apply(frame);
  }
  /** The state after a frame. */
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
const MOST_HEIGHT = 460;

class MemoryMap {
  /** `beside`: a map whose cells are as large as these may be. */
  constructor(canvas, describe, beside) {
    this.canvas = canvas;
    this.describe = describe;
    this.beside = beside;
    this.blocks = new Blocks(0);
    this.marked = new Set();
    this.cursor = 0;
    canvas.addEventListener("pointermove", (at) => this.point(at));
    canvas.addEventListener("pointerdown", (at) => this.point(at));
    canvas.addEventListener("focus", () => this.move(this.cursor));
    canvas.addEventListener("blur", () => this.draw());
    canvas.addEventListener("keydown", (key) => {
      const {cursor, columns} = this;
      const to = {ArrowLeft: cursor - 1, ArrowRight: cursor + 1, ArrowUp: cursor - columns,
        ArrowDown: cursor + columns, Home: 0, End: this.blocks.length - 1}[key.key];
      if (to === undefined || key.altKey || key.ctrlKey || key.metaKey) return;
      key.preventDefault();
      this.move(to);
    });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }
  point(at) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((at.clientX - box.left) / this.pitch);
    const block = Math.floor((at.clientY - box.top) / this.pitch) * this.columns + column;
    if (column < this.columns && block < this.blocks.length) this.move(block);
  }
  move(block) {
    this.cursor = Math.max(0, Math.min(this.blocks.length - 1, block));
    this.draw();
    this.tell();
  }
  tell() {
    const text = this.describe(this.cursor);
    this.canvas.setAttribute("aria-valuenow", this.cursor);
    this.canvas.setAttribute("aria-valuetext", text);
    return text;
  }
  layOut() {
    const width = this.canvas.clientWidth;
    const number = Math.max(1, this.blocks.length);
    const fits = (pitch) => Math.ceil(number / Math.max(1, Math.floor(width / pitch))) * pitch <= MOST_HEIGHT;
    this.pitch = PITCHES.find((pitch) => pitch <= (this.beside?.pitch ?? pitch) && fits(pitch)) ?? PITCHES.at(-1);
    this.columns = Math.max(1, Math.floor(width / this.pitch));
    const height = Math.ceil(number / this.columns) * this.pitch;
    const scale = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    return pen;
  }
  draw(blocks = this.blocks, marked = this.marked, size = this.size) {
    Object.assign(this, {blocks, marked, size});
    if (!this.canvas.clientWidth) return;
    const pen = this.layOut();
    const {color: strong, caretColor: faint} = getComputedStyle(this.canvas); // as they are in this light
    const side = this.pitch - (this.pitch > 24 ? 4 : this.pitch > 12 ? 2 : 1);
    for (let i = 0; i < blocks.length; i++) {
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
  /** Solid; its letter and number of holders where there is room, and below them how full it is if it is not. */
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
    if (part < 1) { // a gauge: the white part is filled
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
    if (holders > 1) { // a frame too
      pen.strokeStyle = "#fff";
      pen.lineWidth = 1;
      pen.strokeRect(x + 1.5, y + 1.5, side - 3, side - 3);
    }
  }
  /** Hollow, and hatched where there is room: never as dark as what is held. */
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
  /** A dashed frame, or a dot in the middle. */
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

/** The place of the last figures that are at least so old when those at `i` come; of the first where none are. */
const before = (series, i, seconds) => {
  let j = i;
  while (j > 0 && series[i][T] - series[j][T] < seconds) j--;
  return j;
};
/** Tokens generated in the second before; a second later there were none, if nothing came. */
const rates = (series) => series.flatMap((now, i) => {
  const then = series[before(series, i, 1)];
  const rate = (now[GENERATED] - then[GENERATED]) / Math.max(0.1, Math.min(1, now[T] - then[T]));
  const silent = i + 1 < series.length && series[i + 1][T] - now[T] > 1;
  return silent ? [[now[T], rate], [now[T] + 1, 0]] : [[now[T], rate]];
});
/** Share of the prompt tokens of the ten seconds before that were in the prefix cache. */
const hits = (series) => series.flatMap((now, i) => {
  const then = series[before(series, i, 10)];
  const queried = now[QUERIED] - then[QUERIED];
  return queried ? [[now[T], (100 * (now[FOUND] - then[FOUND])) / queried]] : [];
});
const plain = (column) => (series) => series.map((figures) => [figures[T], figures[column]]);
const lastOf = (points) => points.at(-1)?.[1];
/** Twice what three quarters of the values stay below: one that took very long does not flatten the others. */
const fence = (values) => Math.max(1, 2 * values.toSorted((a, b) => a - b)[Math.floor(0.75 * (values.length - 1))]);
const rounded = (value, unit) => (value === undefined ? "–" : `${Math.round(value).toLocaleString("en")} ${unit}`.trim());

const PLOTS = [
  {title: "tokens a second", lines: [rates],
    text: ([rate], now) => rounded(now[RUNNING] ? lastOf(rate) : 0, "")},
  {title: "running, waiting (dashed), swapped (dotted)", lines: [RUNNING, WAITING, SWAPPED].map(plain),
    text: (_, now) => `${now[RUNNING]}, ${now[WAITING]}, ${now[SWAPPED]}`},
  {title: "time to first token", bars: true,
    lines: [(series) => series.filter((figures) => figures[TTFT] !== null).map((figures) => [figures[T], figures[TTFT]])],
    text: ([ttft]) => rounded(lastOf(ttft), "ms")},
  {title: "prompt tokens found in the cache", lines: [hits], most: 100,
    text: ([share], now) => rounded(lastOf(share) ?? (now[QUERIED] ? (100 * now[FOUND]) / now[QUERIED] : undefined), "%")},
  {title: "blocks held", lines: [plain(HELD)], text: (_, now) => rounded(now[HELD], "")},
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
  /** `series`: all figures; `shown`: the place of those that the page shows, the last if it is live. */
  draw(series, shown, live) {
    const {lines, bars, most, text, title} = this.plot;
    const end = series.at(-1)[T];
    const drawn = lines.map((line) => line(series).filter(([t]) => t >= end - SECONDS));
    const values = drawn.flat().map(([, value]) => value);
    const highest = most ?? Math.max(1, ...values);
    const top = bars && values.length ? Math.min(highest, fence(values)) : highest;
    const x = (t) => (300 * (t - end + SECONDS)) / SECONDS;
    const y = (value) => 57 - (54 * value) / top;
    const bar = (t, value) => (value <= top
      ? [shape("polyline", {points: `${x(t)},57 ${x(t)},${y(value)}`})]
      : [[57, 12], [6, 0]].map(([from, to]) => shape("polyline", {points: `${x(t)},${from} ${x(t)},${to}`})));
    const children = drawn.flatMap((points, i) => (bars
      ? points.flatMap(([t, value]) => bar(t, value))
      : [shape("polyline", {class: `dash${i}`, points: points.map(([t, value]) => `${x(t)},${y(value)}`).join(" ")})]));
    if (!live) children.push(shape("line", {x1: x(series[shown][T]), x2: x(series[shown][T]), y1: 0, y2: 60}));
    this.svg.replaceChildren(...children);
    const until = series.slice(0, shown + 1);
    say(this.value, text(lines.map((line) => line(until)), until.at(-1)));
    const cut = highest > top ? `, cut at ${rounded(top, "")}` : "";
    say(this.top, most ? "" : ` (most ${rounded(highest, "")}${cut})`);
    this.svg.setAttribute("aria-label", `${title}, the last minute: ${this.value.textContent} now${this.top.textContent}`);
  }
}

// --- The page -------------------------------------------------------------------------------------

const history = new History();
let series = []; // the figures of the last changes
let shown = null; // the number of the frame that is shown; null: the newest
let state = history.latest;
let stepped = null; // the frame that `state` is after, if that is not the newest
let drawing = false;
let highlighted = null; // the answer whose blocks are shown

const plots = PLOTS.map((plot) => new Plot(plot));
find("plots").append(...plots.map((plot) => plot.figure));

/** What there is to say of a block. */
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
let told = null; // the map whose block the line below tells of
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
    if (!state.sizes[0]) return; // nothing was told yet
    drawMemory();
    const last = series.findLastIndex((figures) => figures[T] <= state.figures[T]);
    for (const plot of plots) plot.draw(series, Math.max(0, last), shown === null);
    drawRequests();
    noteTurns();
  });
};

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

const drawMemory = () => {
  const {sizes, device, host} = state;
  const {held, shared, cached, free} = device.counts();
  say(find("counts"), `Device memory: ${count(sizes[0], "block")} of ${count(sizes[2], "slot")}: ${held} held`
    + ` (${shared} shared), ${cached} only cached, ${free} free`);
  find("host-memory").hidden = !host.length;
  say(find("host-counts"), `Host memory: ${host.counts().held} of ${count(host.length, "block")} held`);
  const marked = new Set(highlighted?.blocks());
  maps.device.draw(device, marked, sizes[2]);
  maps.host.draw(host, new Set(), sizes[2]);
  for (const [name, map] of Object.entries(maps)) map.canvas.setAttribute("aria-valuemax", state[name].length - 1);
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
  say(find("more"), live.length > MOST_ROWS ? `and ${live.length - MOST_ROWS} more that go on` : "");
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

/** The data of server-sent events, as they come; a sign of life has none. */
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
    status(key ? "this key is not the server's" : "this server has a key", true);
    await askForKey();
    return;
  }
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  status("connected");
  showModel();
  for await (const text of dataOf(response)) {
    const frame = JSON.parse(text);
    series = [...(frame.whole ? [] : series), ...frame.figures].slice(-KEPT);
    history.push(frame);
    if (history.latest.error) status(`what the engine does cannot be followed: ${history.latest.error}`, true);
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

const turns = []; // the answers
let messages = [];
let answering = null; // what aborts the answer that is being read

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
    this.id = null;
    this.request = null;
  }
  blocks() {
    return (this.request?.runs ?? []).flatMap(([first, number]) => Array.from({length: number}, (_, i) => first + i));
  }
  /** What the events say of the request, by its id. */
  noteRequest(requests) {
    this.request = [...requests].findLast((request) => request.id === this.id) ?? this.request;
    if (!this.request) return;
    const {found, prompt, generated} = this.request;
    const blocks = this.blocks().length;
    say(this.note, (found
      ? `Shared ${count(blocks, "block")} with what was there before: ${found} of ${prompt} prompt tokens were in the cache.`
      : `Shared no block: all ${count(prompt, "prompt token")} were computed.`)
      + ` ${count(generated, "token")} generated.${this.usage ?? ""}`);
    this.button.hidden = !found;
  }
}

const noteTurns = () => {
  for (const turn of turns.slice(-3)) if (turn.id) turn.noteRequest(history.latest.requests.values());
};

const readAnswer = async (turn, signal) => {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", signal, headers: {"Content-Type": "application/json", ...headers()},
    // Small models ramble at temperature 1; these are what `minipaged chat` has.
    body: JSON.stringify({messages, temperature: 0.2, top_p: 0.9, stream: true, stream_options: {include_usage: true}}),
  });
  if (!response.ok) {
    const {error} = await response.json().catch(() => ({error: `the server answered ${response.status}`}));
    throw new Error(error.message ?? error);
  }
  for await (const text of dataOf(response)) {
    if (text === "[DONE]") return;
    const chunk = JSON.parse(text);
    if (chunk.error) throw new Error(chunk.error.message ?? chunk.error);
    turn.id = chunk.id;
    turn.text.append(chunk.choices[0]?.delta.content ?? "");
    const cached = chunk.usage?.prompt_tokens_details?.cached_tokens;
    if (cached !== undefined) turn.usage = ` (usage: ${cached} cached)`;
  }
};

const setAnswering = (is) => {
  find("send").setAttribute("aria-disabled", is); // and not `disabled`, which would take its focus
  find("stop").disabled = !is;
  say(find("wait"), is ? "Send waits for the answer to end; Stop ends it." : "");
};

const answer = async (question) => {
  messages.push({role: "user", content: question});
  const turn = new Turn();
  turns.push(turn);
  find("turns").append(make("li", {}, make("b", {}, "you"), make("p", {class: "text"}, question)), turn.item);
  answering = new AbortController();
  setAnswering(true);
  const mine = messages;
  try {
    await readAnswer(turn, answering.signal);
  } catch (error) {
    const stopped = error.name === "AbortError";
    turn.item.append(make("p", stopped ? {class: "note"} : {class: "error", role: "alert"}, stopped ? "Stopped." : error.message));
  }
  if (turn.text.textContent) mine.push({role: "assistant", content: turn.text.textContent});
  else mine.pop(); // a question without an answer would be asked again with the next one
  if (find("stop") === document.activeElement) find("question").focus(); // it would lose the focus
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

globalThis.minipaged = {history, maps, shown: () => state}; // for whoever looks with the browser's console
followAlways();
