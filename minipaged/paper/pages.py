"""Renders a figure's result as HTML: the checks with their verdicts, the sentences, and the sources of the numbers.

The report (`report.py`) and the pages of the site (`docs/build.py`) consist of these pieces. The HTML is well-formed
and carries no style but the classes `fails`, `holds` and `open`. It has no blank lines, so that Markdown keeps it
unchanged.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from minipaged.paper.figure import CheckKind, Figure
from minipaged.paper.figures.fig12 import FIG_12, MEDIAN, TOLERANCE

COLUMNS = ("paper", "ours", "difference", "tolerance", "verdict")
VERDICTS = {"holds": "holds", "fails": "fails", "not judged": "open"}
"""Verdict -> CSS class."""


def cells(check: Mapping[str, Any]) -> list[str]:
    """Return a check as one row of a table: what, paper, ours, difference, tolerance, verdict."""

    def number(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:{',.0f' if abs(value) >= 1000 else '.3g'}}{check['unit']}"

    def apart(value: float | None, sign: str) -> str:
        if value is None:
            return "-"
        unit = " points" if check["unit"] == " %" else check["unit"]
        return f"{value:{sign}.1%}" if check["relative"] else f"{value:{sign}.3g}{unit}"

    return [
        check["what"] + " (calibrated)" * (check["kind"] == "calibrated"),
        number(check["paper"]),
        number(check["ours"]),
        apart(check["difference"], "+"),
        apart(check["tolerance"], ""),
        check["verdict"],
    ]


def text(words: str) -> str:
    """Return plain text as HTML. Text between backquotes becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words, quote=False))


def table(head: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return an HTML table. A row is the class of its last cell, and the HTML of all its cells. A table that is too
    wide scrolls separately, with the keyboard too."""
    lines = ['<div class="scrolls" tabindex="0" role="group" aria-label="Table"><table class="figures">']
    lines.append("<thead><tr>" + "".join(f"<th>{one}</th>" for one in head) + "</tr></thead><tbody>")
    for name, row in rows:
        *others, last = (f"<td>{cell}</td>" for cell in row)
        lines.append("<tr>" + "".join(others) + last.replace("<td>", f'<td class="{name}">', 1) + "</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def checks_table(data: Mapping[str, Any]) -> str:
    """Return the table of a figure's checks: the paper's numbers beside ours."""
    rows = [(VERDICTS[check["verdict"]], [text(cell) for cell in cells(check)]) for check in data["checks"]]
    return table(("what", *COLUMNS), rows)


def section(figure: Figure) -> str:
    """Return a sentence that names the figure's section in the paper."""
    return "Not in the paper." if figure.section == "beyond" else f"Section {figure.section} of the paper."


def command(figure: Figure, data: Mapping[str, Any]) -> str:
    """Return the command that makes the figure again."""
    made = data["made"]
    words = ["minipaged", "paper", "run", data["figure"]]
    words += ["--quick"] * made["quick"] + ["--seed", str(made["seed"])] * (made["seed"] != 0)
    words += ["--traces", "FOLDER"] * figure.needs_traces
    return " ".join(words)


def body(figure: Figure, data: Mapping[str, Any], level: int) -> str:
    """Return the page of a figure without its heading and picture. `level` is the level of the headings: 2 for h2."""

    def heading(words: str) -> str:
        return f"<h{level}>{words}</h{level}>"

    made = data["made"]
    parts = [heading("What came out" if figure.section == "beyond" else "Beside the paper"), checks_table(data)]
    parts += [f"<p>{text(note)}</p>" for note in data["notes"]]
    if data["sentences"]:
        rows = [
            (
                "holds" if one["holds_in_paper"] else "fails",
                [
                    f"“{text(one['says'])}” (section {one['section']})",
                    text(one["ours"]),
                    text(one["in_paper"]) + ("" if one["holds_in_paper"] else ": not borne out"),
                ],
            )
            for one in data["sentences"]
        ]
        parts += [heading("What the paper says, and what its own figure comes to")]
        parts += [table(("sentence", "ours", "the paper's own figure"), rows)]
    parts += [heading("Make it again"), f"<pre><code>$ {html.escape(command(figure, data))}</code></pre>"]
    parts += [
        f"<p>Seed {made['seed']}, minipaged {made['minipaged']}, Python {made['python']}, NumPy {made['numpy']}"
        f"{'; short traces (--quick), by which knees come out too high' if made['quick'] else ''}.</p>"
    ]
    if figure.change_it:
        experiments = "".join(f"<li>{text(one)}</li>" for one in figure.change_it)
        parts += [f'<div class="change">{heading("Change it")}<ol>{experiments}</ol></div>']
    for model, facts in data["machines"].items():
        rows = [("kind", [text(fact["what"]), text(fact["value"]), fact["kind"]]) for fact in facts]
        parts += [heading(f"Where the machine's numbers come from: {model}"), table(("what", "value", "from"), rows)]
    return "\n".join(parts)


def summary(results: Mapping[str, Mapping[str, Any]], links: Mapping[str, str]) -> str:
    """Return a table with the checks of all figures, failed ones first. `links` maps a figure's name to its page."""
    rows = []
    for name, data in results.items():
        for check in data["checks"]:
            figure = f'<a href="{html.escape(links[name])}">{text(label(name))}</a>'
            rows.append((VERDICTS[check["verdict"]], [figure, *(text(cell) for cell in cells(check))]))
    rows.sort(key=lambda row: row[0] != VERDICTS["fails"])
    return f"<p>{text(counts(results.values()))}</p>\n" + table(("figure", "what", *COLUMNS), rows)


def label(name: str) -> str:
    """Return the figure's name as tables show it."""
    return f"Fig. {name}" if name[0].isdigit() else name


def counts(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the number of verdicts, in words. Predicted, calibrated and exact checks are counted separately."""
    checks = [check for data in results for check in data["checks"]]

    def told(before: str, kind: CheckKind) -> str:
        found = [check["verdict"] for check in checks if check["kind"] == kind]
        return before * bool(found) + ", ".join(
            f"{found.count(verdict)} {words}"
            for verdict, words in (("holds", "hold"), ("fails", "fail"), ("not judged", "not judged"))
            if verdict in found
        )

    parts = told("", "predicted"), told("of what calibrates ", "calibrated"), told("of what is exact ", "exact")
    words = "; ".join(part for part in parts if part)
    return words[:1].upper() + words[1:]


def knees(results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return a sentence on the errors of all judged knees of Fig. 12, or None if no knee was judged."""
    panels = [results[figure.name] for figure in FIG_12 if figure.name in results]
    checks = [check for panel in panels for check in panel["checks"] if check["verdict"] != "not judged"]
    judged = [check for check in checks if check["tolerance"] == TOLERANCE]
    if not judged:
        return None
    off = [abs(check["difference"]) for check in judged if check["difference"] is not None]
    never = len(judged) - len(off)
    middle, worst = median([*off, *[float("inf")] * never]), max(off, default=float("inf"))
    good = middle <= MEDIAN and worst <= TOLERANCE and not never
    return (
        f"The {len(judged)} knees of Orca and vLLM in {len(panels)} panel{'s' * (len(panels) > 1)} of Fig. 12: median "
        f"error {middle:.1%} (to be within {MEDIAN:.0%}), worst {worst:.1%} (within {TOLERANCE:.0%})"
        f"{f'; {never} never come' if never else ''}: {'holds' if good else 'fails'}."
    )
