"""Makes docs/gpu.md, and the picture in docs/assets/roofline.svg, of the files that `python -m benchmarks.gpu` wrote.

    python -m benchmarks.gpu.page benchmarks/results/gpu-nvidia-h200-20261121150412.json [FILE ...]
    python -m benchmarks.gpu.page        without measurements: what is aimed at, and that nothing is measured yet

What stands between the two marks of the page is written anew; what is written by hand around them stays: why a target
is missed, say. Several files are parts of one whole (checks here, measurements there) or repetitions: where two have
the same row, the later file counts. Dry runs and quick ones are refused: the page shows nothing that was not measured.
Without files a page that has measurements stays as it is, and the command fails.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import CHECKS, Row
from benchmarks.gpu.targets import first_line, verdicts

DOCS = Path(__file__).parents[2] / "docs"
BEGIN = "<!-- measured: what follows is written by `python -m benchmarks.gpu.page` -->"
END = "<!-- end of what is written by the command -->"

AROUND = f"""\
# The fast tier on a GPU

{BEGIN}
{END}

## Why a target is missed

Nothing is measured yet.
"""
"""The page before it is written for the first time."""

Run = dict[str, Any]


class Refused(Exception):
    """These files make no page. The message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.page", description="Make docs/gpu.md of measured runs; of none: the targets."
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN.json", help="what `python -m benchmarks.gpu` wrote")
    try:
        runs = {file.name: read(file) for file in parser.parse_args(arguments).runs}
        write(merged(runs), DOCS)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2
    return 0


def read(file: Path) -> Run:
    try:
        run = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{file} cannot be read: {error}") from None
    if not isinstance(run, dict) or not {"machine", "rows", "dry_run", "quick", "command"} <= run.keys():
        raise Refused(f"{file} is no run of `python -m benchmarks.gpu`")
    if run["dry_run"]:
        raise Refused(f"{file} is a dry run: nothing in it was measured. Run `python -m benchmarks.gpu` on a GPU.")
    if run["quick"]:
        raise Refused(f"{file} is a quick run: its requests are fewer and shorter. Run it again without --quick.")
    return run


def merged(runs: dict[str, Run]) -> Run | None:
    """One run of several: its rows are those of the last file that has them. None: there are no runs."""
    if not runs:
        return None
    rows: dict[tuple[str, str], Row] = {}
    for run in runs.values():
        rows |= {(row["section"], row["name"]): row for row in run["rows"]}
    machines = [run["machine"] for run in runs.values()]
    for key in ("card", "versions"):
        if any(machine[key] != machines[0][key] for machine in machines):
            raise Refused(f"these runs are not of one machine: {key} differs. Give those of one only.")
    made = [f"`{run['command']}`, {run['machine']['date']}, seed {run['seed']}: {name}" for name, run in runs.items()]
    return {"machine": machines[0], "made": made, "rows": list(rows.values())}


def write(run: Run | None, docs: Path) -> None:
    page, picture = docs / "gpu.md", docs / "assets" / "roofline.svg"
    before = page.read_text() if page.exists() else AROUND
    head, begin, rest = before.partition(BEGIN)
    written, end, tail = rest.partition(END)
    if not begin or not end:
        raise Refused(f"{page} has lost the marks between which it is written:\n{BEGIN}\n{END}")
    if run is None and written.strip() and NOT_MEASURED not in written:
        raise Refused(
            f"{page} has measurements, and no runs are given to take their place; name the files of runs. To have a "
            "page without measurements, remove what stands between its two marks first."
        )
    drawn = None if run is None else roofline(run["rows"])
    if drawn is None:
        picture.unlink(missing_ok=True)
    else:
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(drawn)
    parts = [NOT_MEASURED, OF_TARGETS, targets_table([])] if run is None else measured(run, drawn is not None)
    page.write_text("\n\n".join([head + BEGIN, *parts, END + tail]))


# --- The page ----------------------------------------------------------------------------------------


NOT_MEASURED = """\
**Not yet measured.** The fast tier has not run on a GPU: no figure of one is claimed anywhere. What can be known
without one is in [tuning.md](tuning.md): what the compiler makes of the kernels, and what to expect."""

OF_TARGETS = """\
A rate's target is a share of what the same card does in the same run: of a large copy, or of a large matrix product.
Beside it stands what that comes to on an H200."""


def said_of_checks(rows: Sequence[Row]) -> str:
    """Figures of kernels that are wrong are worth nothing: so the page says first what was checked."""
    counts = Counter(row["status"] for row in rows if row["section"] in CHECKS)
    if not counts:
        return "**No checks are in these runs**: whether the results are right was not looked at."
    failed = "**" if counts["failed"] else ""
    return f"{failed}Checks: {counts['ok']} passed, {counts['failed']} failed, {counts['skipped']} skipped.{failed}"


def measured(run: Run, drawn: bool) -> list[str]:
    machine, rows = run["machine"], run["rows"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    failed = [row for row in rows if row["status"] == "failed"]
    skipped = [row for row in rows if row["status"] == "skipped"]
    parts = [
        f"{machine['card']} ({machine['multiprocessors']} multiprocessors), {machine['cores']} CPU cores; CUDA"
        f" {machine['cuda']}, Python {machine['python']}, {versions}.",
        "Made by\n\n" + "\n".join(f"- {line}" for line in run["made"]),
        said_of_checks(rows),
        f"{OF_TARGETS} The last column but one names the measurement that is worst off; it stands for all.",
        targets_table(rows),
    ]
    if drawn:
        parts.append("## The roofline\n\n![Each kernel below the ceilings of this card](assets/roofline.svg)")
    parts += [all_rows(rows), *won_and_lost(rows)]
    for title, some in (("Failed", failed), ("Skipped", skipped)):
        if some:
            said = (first_line(str(row.get("error") or row.get("reason"))) for row in some)
            lines = [f"- {row['section']}, {row['name']}: {why}" for row, why in zip(some, said, strict=True)]
            parts.append(f"## {title}\n\n" + "\n".join(lines))
    return parts


def targets_table(rows: Sequence[Row]) -> str:
    lines = ["| what | target | measured | where | |", "|---|---|---|---|---|"]
    for found in verdicts(rows):
        goal = found.goal
        lines.append(f"| {goal.what} | {goal.say_aim()} | {found.measured} | {found.where} | {found.verdict} |")
    return "\n".join(lines)


def all_rows(rows: Sequence[Row]) -> str:
    """Every measurement: how fast, which share of its ceiling, and how many times as fast as each peer."""
    lines = [
        "| what | measured | time | share | peers, and how many times as fast as they it is |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["status"] != "ok" or not ("rate" in row or "seconds" in row) or ": transformers " in row["name"]:
            continue
        tokens = "tokens_per_second" in row
        speed = (
            f"{row['tokens_per_second']:,.0f} tokens/s"
            if tokens
            else say_rate(row["rate"], row)
            if "rate" in row
            else ""
        )
        time = f"{row['seconds'] * 1e6:,.1f} µs" if row["seconds"] < 0.1 else f"{row['seconds']:.2f} s"
        share = f"{row['share']:.1%} of {'the floor' if tokens else row['ceiling']}" if "share" in row else ""
        ratios = row.get("ratios", {})
        beside = [f"{name} {ratios[name]:.2f} x" for name in row.get("peers", {}) if name in ratios]
        lines.append(f"| {row['name']} | {speed} | {time} | {share} | {'; '.join(beside)} |")
    return "## Every measurement\n\n" + "\n".join(lines)


def say_rate(rate: float, row: Row) -> str:
    if row["unit"] == "TFLOP/s":
        return f"{rate / 1e12:.1f} TFLOP/s"
    return f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"


def won_and_lost(rows: Sequence[Row]) -> list[str]:
    """By peer, from the ratios; and the peers that were not there. Variants of our own are no peers."""
    ratios: dict[str, list[tuple[float, str]]] = {}
    absent: dict[str, str] = {}
    for row in rows:
        if row["section"] == "tuning" or row["name"] == "mixed batch":
            continue
        for name, ratio in row.get("ratios", {}).items():
            ratios.setdefault(name, []).append((ratio, row["name"]))
        for name, peer in row.get("peers", {}).items():
            if isinstance(peer, str):
                absent.setdefault(name, f"{first_line(peer)} ({row['name']})")
    won: list[str] = []
    lost: list[str] = []
    for name, found in ratios.items():
        for lines, some in ((won, [f for f in found if f[0] >= 1]), (lost, [f for f in found if f[0] < 1])):
            if some:
                (least, where), (most, there) = min(some), max(some)
                spread = f"{least:.2f} x ({where})" + (f" to {most:.2f} x ({there})" if len(some) > 1 else "")
                lines.append(f"- {name}: {len(some)} of {len(found)} measurements, {spread}")
    named = [f"- {name}: {why}" for name, why in absent.items()]
    return [
        f"## {title}\n\n" + ("\n".join(lines) or "- nowhere")
        for title, lines in (("Where it is as fast or faster", won), ("Where it is slower", lost))
    ] + (["## Peers that were missing or would not\n\n" + "\n".join(named)] if named else [])


# --- The roofline ------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 1000, 560, 70, 30, 610, 500
"""The picture, and within it the field that is drawn on; right of that is the list of the points."""

DRAWN = r"(decode (1|32) x 2048|prefill 4 x 4096) D\d+ group \d|(?!decode|prefill).*"
"""The rows that are points: of attention one shape or two, for the others lie upon them."""

STYLE = """
svg { --paper: #ffffff; --ink: #24292f; --faint: #d0d7de; --roof: #0969da; --point: #bc4c00 }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #e6edf3; --faint: #30363d; --roof: #58a6ff; --point: #f0883e } }
text { font: 12px system-ui, sans-serif; fill: var(--ink) }
.roof { stroke: var(--roof); stroke-width: 2; fill: none }
.grid { stroke: var(--faint) }
.point { fill: var(--point) }
.number { fill: var(--paper); font-size: 9px; text-anchor: middle }
"""


def roofline(rows: Sequence[Row]) -> str | None:
    """The picture, as SVG: operations a second over operations a byte, both logarithmic. None: nothing to draw.

    The roof is measured: the copy's bytes a second times the operations for each byte, up to the matrix product's. What
    only moves bytes has no place here: its share of the copy is in the table.
    """
    measured = [row for row in rows if row["status"] == "ok"]
    ceilings = {row["ceiling"]: row["rate"] for row in measured if row["section"] == "ceilings"}
    points = [
        (row["operations"] / row["bytes"], row["operations"] / row["seconds"], row["name"])
        for row in measured
        if row["section"] == "kernels" and "operations" in row and re.fullmatch(DRAWN, row["name"])
    ]
    if not points or not {"copy", "matmul"} <= ceilings.keys():
        return None
    copy, matmul = ceilings["copy"], ceilings["matmul"]
    low_x, high_x = decades([x for x, _, _ in points] + [matmul / copy])
    low_y, high_y = decades([y for _, y, _ in points] + [matmul])

    def x_of(intensity: float) -> float:
        return LEFT + (math.log10(intensity) - low_x) / (high_x - low_x) * (RIGHT - LEFT)

    def y_of(rate: float) -> float:
        return BOTTOM - (math.log10(rate) - low_y) / (high_y - low_y) * (BOTTOM - TOP)

    shapes = []
    for power in range(low_x, high_x + 1):
        x = x_of(10.0**power)
        shapes.append(f'<path class="grid" d="M{x:.1f} {TOP}V{BOTTOM}"/>')
        shapes.append(f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(low_y, high_y + 1):
        y = y_of(10.0**power)
        shapes.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        shapes.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0 ** (power - 12):g}</text>')
    start = max(10.0**low_x, 10.0**low_y / copy)  # where the slope comes into the field
    corner = f"{x_of(matmul / copy):.1f} {y_of(matmul):.1f}"
    shapes.append(f'<path class="roof" d="M{x_of(start):.1f} {y_of(start * copy):.1f}L{corner}H{RIGHT}"/>')
    for number, (x, y, _) in enumerate(points, 1):
        shapes.append(f'<circle class="point" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="7"/>')
        shapes.append(f'<text class="number" x="{x_of(x):.1f}" y="{y_of(y) + 3:.1f}">{number}</text>')
    said = [f"roof: copy {copy / 1e12:.2f} TB/s, matrix product {matmul / 1e12:.0f} TFLOP/s"]
    said += [f"{number}  {name}: {y / 1e12:.3g} TFLOP/s" for number, (_, y, name) in enumerate(points, 1)]
    height = max(HEIGHT, TOP + 16 * len(said) + 20)
    shapes += [f'<text x="{RIGHT + 25}" y="{TOP + 16 * i}">{escape(line)}</text>' for i, line in enumerate(said)]
    shapes.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 40}" text-anchor="middle">operations a byte</text>')
    shapes.append(f'<text x="{LEFT}" y="{TOP - 12}" text-anchor="middle">TFLOP/s</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>Each kernel below the ceilings of this card</title>\n<style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" style="fill: var(--paper)"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def decades(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten below and above all of them."""
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 0.1)


if __name__ == "__main__":
    sys.exit(main())
