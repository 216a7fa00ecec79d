// What the theme leaves out for those who use a keyboard or a screen reader.
addEventListener("load", () => {
  document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap")) wide.tabIndex = 0; // tables that scroll
});

// On a phone a table of few columns that is too wide has the cells of a row below each other, with the columns' names.
addEventListener("load", () => {
  const tables = [...document.querySelectorAll(".md-typeset__scrollwrap table:not([class])")].filter((table) => {
    const names = [...table.querySelectorAll("th")].map((name) => name.textContent);
    for (const row of table.querySelectorAll("tbody tr")) [...row.cells].forEach((cell, i) => { cell.dataset.name = names[i] ?? ""; });
    return names.length <= 5;
  });
  const frames = tables.map((table) => table.closest(".md-typeset__scrollwrap"));
  let width; // of the window, when they were last looked at
  const stack = () => {
    if (width === innerWidth) return;
    width = innerWidth;
    for (const frame of frames) frame.classList.remove("stacks");
    const wide = frames.filter((frame, i) => tables[i].scrollWidth > frame.clientWidth);
    for (const frame of wide) frame.classList.add("stacks");
  };
  stack();
  addEventListener("resize", stack); // a phone is turned
});

// Nor is the button of a code block a landmark; the theme makes them when it has time.
const plain = () => {
  for (const nav of document.querySelectorAll(".md-code__nav:not([role])")) nav.setAttribute("role", "presentation");
};
new MutationObserver(plain).observe(document.body, {childList: true, subtree: true});

// The theme has n lead to the next page; where a stepper is pointed at, n is its key.
addEventListener("keydown", (key) => {
  const stepper = document.querySelector("paged-stepper:hover");
  if (!stepper || key.key !== "n" || key.altKey || key.ctrlKey || key.metaKey) return;
  if (key.composedPath()[0].matches?.("input:not([type=range]), textarea, select")) return; // somebody writes
  stepper.seek(stepper.interesting());
  key.stopImmediatePropagation();
}, {capture: true});

// The picture that the home page opens with is a still of its end. Where things may move it plays, once; again on demand.
const opening = document.querySelector(".opening");
if (opening && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
  const button = opening.querySelector("button");
  const parts = () => opening.getAnimations({subtree: true}).filter((part) => part instanceof CSSAnimation); // not those of the button
  const has = (state) => parts().some((part) => part.playState === state);
  const name = () => { button.textContent = has("running") ? "Pause" : has("paused") ? "Play" : "Play again"; };
  button.addEventListener("click", () => {
    const [running, paused] = [has("running"), has("paused")];
    for (const part of parts()) { // what has ended stays so, unless all of it has
      if (running && part.playState === "running") part.pause();
      else if (!running && (!paused || part.playState === "paused")) part.play();
    }
    name();
  });
  let frame; // hundreds of parts may end in one, and each would look through all of them
  opening.addEventListener("animationend", () => {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(name);
  });
  opening.classList.add("plays");
  button.hidden = false;
}
