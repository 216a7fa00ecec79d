"""Bars and cells say in widths, patterns and words what they are given."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from minipaged.stepper.pictures import Bars, Cells

BARS = Bars(
    [("one & only", [("used", 30), ("free", 10)]), ("other", [("free", 20)])],
    {"used": "full", "free": "lines"},
    unit=" slots",
)


def test_parts_are_as_wide_as_they_are_large_and_rows_have_one_scale() -> None:
    svg = ElementTree.fromstring(BARS._repr_html_())
    widths = [float(rect.get("width", 0)) for rect in svg.iter("{http://www.w3.org/2000/svg}rect")][:3]
    assert [round(width / widths[1]) for width in widths] == [3, 1, 2]


def test_every_kind_has_a_pattern_and_is_named() -> None:
    text = BARS._repr_html_()
    assert 'fill="url(#fill-lines)"' in text
    assert {">used<", ">free<"} <= set(re.findall(r">\w+<", text))


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
    boxes = [(rect.get("x"), rect.get("width")) for rect in svg.iter("{http://www.w3.org/2000/svg}rect")][:3]
    assert boxes[0] == boxes[2] != boxes[1]
    assert {"&lt;a&gt;", "b", "c"} <= set(re.findall(r">([^<]+)</text>", text))
    assert cells.as_text() == "one & only: <a> used, b free; other: c free"
