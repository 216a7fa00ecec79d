"""Bars, cells and curves say in widths, patterns and words what they are given."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minipaged.stepper.pictures import FILLS, Bars, Cells, Curves, _ticks

ROOT = Path(__file__).parents[2]

BARS = Bars(
    [("one & only", [("used", 30), ("free", 10)]), ("other", [("free", 20)])],
    {"used": "full", "free": "lines"},
    unit=" slots",
)


def test_parts_are_as_wide_as_they_are_large_and_rows_have_one_scale() -> None:
    svg = ElementTree.fromstring(BARS._repr_html_())
    boxes = [rect for rect in svg.iter("{http://www.w3.org/2000/svg}rect") if "url" not in rect.get("fill", "")]
    widths = [float(rect.get("width", 0)) for rect in boxes[:3]]
    assert [round(width / widths[1]) for width in widths] == [3, 1, 2]


def test_every_kind_has_a_pattern_and_is_named() -> None:
    text = BARS._repr_html_()
    assert 'fill="url(#fill-lines)"' in text
    assert {">used<", ">free<"} <= set(re.findall(r">\w+<", text))


def test_nothing_is_written_on_a_pattern_and_letters_can_be_read_on_their_colour() -> None:
    cells = Cells([("a", [(kind, kind) for kind in FILLS])], {kind: kind for kind in FILLS})
    text = cells._repr_html_()
    strips = [float(y) for y in re.findall(r'y="([\d.]+)" height="7" fill="url', text)][: len(FILLS) - 2]
    written = [float(y) for y in re.findall(r'y="([\d.]+)" text-anchor="middle" fill="[^"]*">(?!empty)', text)]
    assert (len(strips), len(written)) == (3, 4)
    assert max(written) + 3 < min(strips)
    for colour, ink, _ in FILLS.values():
        if colour != "none":
            dark, light = sorted(map(luminance, (colour, ink + ink[1:])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_bars_have_an_axis_with_its_unit_unless_they_are_shares_of_different_wholes() -> None:
    texts = re.findall(r">([^<]+)</text>", BARS._repr_html_())
    assert {"0", "20", "40", "slots"} <= set(texts)
    bare = Bars([("a", [("x", 1)])], {"x": "full"}, axis="millions")
    assert {"0", "1", "millions"} <= set(re.findall(r">([^<]+)</text>", bare._repr_html_()))
    same = Bars([("a", [("x", 1), ("y", 3)]), ("b", [("x", 4)])], {"x": "full", "y": "dots"}, percent=True)
    assert {"0", "100", "per cent"} <= set(re.findall(r">([^<]+)</text>", same._repr_html_()))
    other = Bars([("a", [("x", 1)]), ("b", [("x", 4)])], {"x": "full"}, percent=True)
    assert "per cent" not in other._repr_html_()


def test_who_cannot_see_the_picture_is_told_what_is_in_it() -> None:
    assert BARS.as_text() == "one & only: used 30 slots, free 10 slots; other: free 20 slots"
    assert 'aria-label="one &amp; only: used 30 slots' in BARS._repr_html_()


def test_cells_stand_in_columns_with_their_words_in_them() -> None:
    cells = Cells(
        [("one & only", [("<a>", "used"), ("b", "free")]), ("other", [("c", "free")])],
        {"used": "dots", "free": "empty"},
    )
    text = cells._repr_html_()
    svg = ElementTree.fromstring(text)
    rects = [rect for rect in svg.iter("{http://www.w3.org/2000/svg}rect") if "url" not in rect.get("fill", "")]
    boxes = [(rect.get("x"), rect.get("width")) for rect in rects[:3]]
    assert boxes[0] == boxes[2] != boxes[1]
    assert {"&lt;a&gt;", "b", "c"} <= set(re.findall(r">([^<]+)</text>", text))
    assert cells.as_text() == "one & only: <a> used, b free; other: c free"


CURVES = Curves([("one & only", [(0, 0.5), (10, 1.0)]), ("other", [(5, 0.25)])], x="seconds", y="share", percent=True)


def points(svg: ElementTree.Element) -> list[list[tuple[float, float]]]:
    lines = svg.iter("{http://www.w3.org/2000/svg}polyline")
    return [[tuple(map(float, each.split(","))) for each in line.get("points", "").split()] for line in lines]  # type: ignore[misc]


def test_curves_are_drawn_to_scale_from_a_common_origin() -> None:
    svg = ElementTree.fromstring(CURVES._repr_html_())
    (begin, end), [other] = points(svg)
    floor = max(float(y) for y in re.findall(r'd="M50 ([\d.]+)H', CURVES._repr_html_()))
    assert other[0] - begin[0] == pytest.approx((end[0] - begin[0]) / 2)
    assert [floor - y for _, y in (begin, end, other)] == pytest.approx([110, 220, 55], abs=0.1)


def test_curves_say_what_their_axes_are_and_which_is_which() -> None:
    text = CURVES._repr_html_()
    written = re.findall(r">([^<]+)</text>", text)
    assert {"seconds", "share", "one &amp; only", "other", "0%", "100%", "0", "10"} <= set(written)
    strokes = re.findall(r'<polyline [^>]*stroke="(#\w+)"[^>]*stroke-dasharray="([^"]*)"', text)
    assert len({colour for colour, _ in strokes}) == len({dashes for _, dashes in strokes}) == 2
    assert CURVES.as_text() == "share over seconds: one & only 0: 50%, 10: 100%; other 5: 25%"


def test_names_of_curves_that_end_in_one_place_are_written_one_below_the_other() -> None:
    same = Curves([(name, [(0, 0), (1, 1)]) for name in "abcd"], x="x", y="y")
    heights = re.findall(r' y="([\d.]+)">[abcd]</text>', same._repr_html_())
    assert [round(float(b) - float(a)) for a, b in pairwise(heights)] == [18, 18, 18]


def test_notes_stand_below_and_are_told_too() -> None:
    picture = Curves([("a", [(0, 1), (1, 2)])], x="x", y="y", notes=["one & only", "two"])
    assert re.findall(r">(one[^<]*|two)</text>", picture._repr_html_()) == ["one &amp; only", "two"]
    assert picture.as_text() == "y over x: a 0: 1, 1: 2. one & only. two"


def test_a_page_draws_all_that_a_picture_is_made_of() -> None:
    """Of a reader's picture the editor keeps what it knows, and drops the rest."""
    script = (ROOT / "docs" / "assets" / "editor.js").read_text()
    [known] = re.findall(r"DRAWN = new Set\(\[(.*)\]\)", script)
    cells = Cells([("a", [(kind, kind) for kind in FILLS])], {kind: kind for kind in FILLS})
    used = {tag for picture in (BARS, cells, CURVES) for tag in re.findall(r"<(\w+)", picture._repr_html_())}
    assert used == set(re.findall(r"\w+", known))


@pytest.mark.parametrize(
    ("most", "ticks"), [(4.5, [0, 1, 2, 3, 4]), (60, [0, 10, 20, 30, 40, 50, 60]), (1, None), (37, None), (0.004, None)]
)
def test_ticks_are_few_round_numbers(most: float, ticks: list[float] | None) -> None:
    found = _ticks(most)
    assert ticks is None or found == ticks
    assert 4 <= len(found) <= 9
    assert found[0] == 0
    assert found[-1] <= most < found[-1] + found[1]
