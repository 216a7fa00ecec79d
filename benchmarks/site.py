"""`python -m benchmarks.site`, after `make docs`: how smoothly the stepper plays, and how soon a page is seen.

A recorded run of 500 events plays in Chromium, whose processor is slowed down to a quarter, for five seconds at each
speed; what counts is the time from frame to frame. Then each page of `site/` is opened from its file, on the processor
as it is: the time until anything is painted (first contentful paint), and until the largest piece is.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from minipaged import SamplingParams
from minipaged.stepper import Storyteller, record
from tests.browser import ROOT, chromium

EVENTS, SLOWER, SECONDS = 500, 4, 5
DESKTOP: Any = {"viewport": {"width": 1280, "height": 900}}
FRAMES = """async (seconds) => {
  const stepper = document.querySelector("paged-stepper"), times = [];
  stepper.go(Math.floor(stepper.events.length / 2));
  stepper.play();
  await new Promise((done) => {
    const frame = (now) => {
      times.push(now);
      now - times[0] < 1000 * seconds ? requestAnimationFrame(frame) : done();
    };
    requestAnimationFrame(frame);
  });
  stepper.pause();
  return times.slice(1).map((time, i) => time - times[i]);
}"""
PAINTED = """() => new Promise((done) => new PerformanceObserver((list) => done([
  performance.getEntriesByName("first-contentful-paint")[0].startTime, list.getEntries().at(-1).startTime,
])).observe({type: "largest-contentful-paint", buffered: true}))"""


def recorded() -> str:
    """A page with a run in which samples fork and copy, and requests are swapped out and in."""
    model = Storyteller(["one two three four five six seven eight nine ten", "one two three four FIVE SIX SEVEN"])
    with record("", model.decode) as run:
        engine = model.engine(num_blocks=12, block_size=4, num_swap_blocks=8, preemption="swap", max_model_len=20)
        while len(run.events) < EVENTS:
            for prompt, n in [("one two three", 2), ("one two three four five", 1), ("one two three four", 1)]:
                engine.add_request(model.encode(prompt), SamplingParams(n=n, max_tokens=5, seed=1))
            while engine.has_unfinished_requests():
                engine.step()
    return run.page()


def frames(browser: Browser) -> None:
    page = browser.new_page(**DESKTOP)
    page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": SLOWER})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.html").write_text(recorded())
        page.goto(f"file://{folder}/run.html")
        page.wait_for_timeout(1500)
        for speed in ("1×", "4×"):
            page.get_by_role("combobox", name="Speed").select_option(speed)
            gaps = sorted(page.evaluate(FRAMES, SECONDS))
            late = sum(gap > 25 for gap in gaps)
            print(
                f"speed {speed}: {1000 * len(gaps) / sum(gaps):.1f} frames a second, median "
                f"{gaps[len(gaps) // 2]:.1f} ms, longest {gaps[-1]:.0f} ms, {late} of {len(gaps)} late"
            )
    page.close()


def painted(browser: Browser) -> None:
    found = []
    for path in sorted((ROOT / "site").rglob("*.html")):
        page = browser.new_page(**DESKTOP)
        page.goto(path.as_uri())
        found.append((*page.evaluate(PAINTED), path.relative_to(ROOT / "site")))
        page.close()
    for which, name in ((0, "first"), (1, "largest")):
        slowest = max(found, key=lambda each: each[which])
        middle = sorted(each[which] for each in found)[len(found) // 2]
        print(f"{name} picture of {len(found)} pages: median {middle:.0f} ms, {slowest[2]} {slowest[which]:.0f} ms")


if __name__ == "__main__":
    with sync_playwright() as playwright:
        browser = chromium(playwright)
        frames(browser)
        painted(browser)
        browser.close()
