"""The HTML files of `minipaged paper`: the report of all results, and the page of one figure that can be stepped
through. Each is a single file without external resources."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from minipaged.paper import published
from minipaged.paper.drawing import svg
from minipaged.paper.figures import FIGURES
from minipaged.paper.pages import body, counts, knees, section, summary, text
from minipaged.paper.running import file_name
from minipaged.stepper.page import element

STYLE = """
:root { color-scheme: light dark; --text: #1b1b1f; --back: #ffffff; --soft: #5a5a66; --line: #d4d4dc; --box: #f3f3f8;
  --fails: #b00020; --holds: #17692f; --link: #2a3eb1; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6ec; --back: #17171c; --soft: #b4b4c2; --line: #44444f;
  --box: #22222a; --fails: #ff8a80; --holds: #7ddb95; --link: #a9b7ff; } }
body { margin: 0 auto; padding: 1rem; color: var(--text); background: var(--back);
  font: 1rem/1.5 system-ui, sans-serif; }
a { color: var(--link); }
h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
svg { max-width: 100%; height: auto; background: #ffffff; }
pre { white-space: pre-wrap; background: var(--box); padding: .6rem; }
.scrolls { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th, td.open, td.kind { color: var(--soft); }
td.fails { color: var(--fails); font-weight: 700; }
td.holds { color: var(--holds); }
.change { background: var(--box); padding: .1rem 1rem; }
"""

WHAT_IT_IS = (
    "In the terms of ACM's artifact review and badging, these results are replicated in simulation: software other "
    "than the authors' serves their workloads. They are not reproduced. No GPU was used. The duration of a step is a "
    "cost model (the law), whose speeds are calibrated by the points of the paper at which nothing waits. The judged "
    "knees were never among these points. Checks of points that were are marked as calibrated."
)


def figure_page(data: Mapping[str, Any]) -> str:
    """Return the page of a result that has a recorded run to step through."""
    figure = FIGURES[data["figure"]]
    parts = [
        f"<h1>{text(data['title'])}</h1>",
        f"<p>{section(figure)} {text(counts([data]))}.</p>",
        f"<h2>What to look at</h2>\n<p>{text(figure.look)}</p>",
        "<p>Step with the buttons or on the timeline, or with the arrow keys once the stepper has the focus.</p>",
        element(data["recording"], with_script=True),
        body(figure, data, level=2),
    ]
    return _whole(data["title"], parts, wide=80)


def report(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the report. `results` maps figures to results, in the order in which they are shown."""
    parts = [
        "<h1>The PagedAttention paper, made again</h1>",
        f"<p>{text(published.source())}</p>",
        f"<p>{text(WHAT_IT_IS)}</p>",
        "<h2>All verdicts</h2>",
    ]
    if (line := knees(results)) is not None:
        parts.append(f"<p>{text(line)}</p>")
    parts.append(summary(results, {name: f"#{file_name(name)}" for name in results}))
    for name, data in results.items():
        figure = FIGURES[name]
        parts += [
            f'<section id="{file_name(name)}">',
            f"<h2>{text(data['title'])}</h2>",
            f"<p>{section(figure)} {text(counts([data]))}</p>",
            svg(data),
            f"<p>{text(figure.look)}</p>",
            body(figure, data, level=3),
            "</section>",
        ]
    return _whole("The PagedAttention paper, made again", parts, wide=62)


def _whole(title: str, parts: Iterable[str], wide: int) -> str:
    """Return an HTML page with these parts. `wide` is its maximum width in rem."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}body {{ max-width: {wide}rem; }}</style></head>\n"
        "<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body></html>\n"
    )
