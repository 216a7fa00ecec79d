// What the theme leaves out for those who use a keyboard or a screen reader.
addEventListener("load", () => {
  document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap")) wide.tabIndex = 0; // tables that scroll
});

// Nor is the button of a code block a landmark; the theme makes them when it has time.
const plain = () => {
  for (const nav of document.querySelectorAll(".md-code__nav:not([role])")) nav.setAttribute("role", "presentation");
};
new MutationObserver(plain).observe(document.body, {childList: true, subtree: true});

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
  opening.addEventListener("animationend", name);
  opening.classList.add("plays");
  button.hidden = false;
}
