"""What is data of an assignment: every file fits its checks, and what does not fit is told where and what."""

from __future__ import annotations

from pathlib import Path

import pytest

from minipaged.course.grader.assignment import ASSIGNMENTS, CannotBeGraded, find_assignment
from minipaged.course.grader.points import read_tests
from minipaged.errors import Invariant

GOOD = """
cap = 70
[[test]]
name = "one"
points = 5
invariant = "content"
meaning = \"\"\"
Two
lines.\"\"\"
hint = ""
[[test]]
name = "two"
points = 3
stage = "engine"
hidden = true
meaning = "m"
hint = "h"
"""
CHECKS = {"one": lambda bench: None, "two": lambda bench: None}


def test_what_is_written_is_what_the_tests_have(tmp_path: Path) -> None:
    (tmp_path / "tests.toml").write_text(GOOD)
    cap, (one, two) = read_tests(tmp_path / "tests.toml", CHECKS)
    assert (cap, one.points, one.invariant, one.meaning) == (70, 5, Invariant.CONTENT, "Two lines.")
    assert (one.stage, one.hidden, two.stage, two.hidden) == ("properties", False, "engine", True)
    assert one.check is CHECKS["one"]


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("cap = 70", "", "the file has no cap"),
        ("cap = 70", "cap = 70\ntop = 1", "the file: key 'top' is not known; choose one of 'cap', 'test'"),
        ("points = 5", 'points = "5"', r"number 1 \('one'\): points is '5'; it has to be of type int"),
        ("points = 5", "points = true", "points is True; it has to be of type int"),
        ("points = 5", "point = 5", "key 'point' is not known; choose one of 'name', 'points', 'meaning'"),
        ("points = 5", "", r"number 1 \('one'\) has no points"),
        ('name = "two"', 'name = "tow"', "number 2 .*: name 'tow' is not known; choose one of 'one', 'two'"),
        ('name = "two"', 'name = "one"', r"number 2 \('one'\) is there twice"),
        ('"content"', '"contents"', "invariant 'contents' is not known; choose one of 'conservation', "),
        ('"engine"', '"motor"', "stage 'motor' is not known; choose one of 'properties', 'engine', 'model'"),
        ("cap = 70", "cap: 70", r"tests\.toml: .*line 2"),
    ],
)
def test_what_does_not_fit_is_told(right: str, wrong: str, told: str, tmp_path: Path) -> None:
    assert right in GOOD
    (tmp_path / "tests.toml").write_text(GOOD.replace(right, wrong))
    with pytest.raises(CannotBeGraded, match=told):
        read_tests(tmp_path / "tests.toml", CHECKS)


def test_a_check_without_an_entry_and_a_file_that_is_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(CannotBeGraded, match=r"cannot read .*tests\.toml: No such file"):
        read_tests(tmp_path / "tests.toml", CHECKS)
    (tmp_path / "tests.toml").write_text(GOOD)
    with pytest.raises(CannotBeGraded, match=r"tests\.toml has no \[\[test\]\] with the name 'three'"):
        read_tests(tmp_path / "tests.toml", {**CHECKS, "three": CHECKS["one"]})


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_the_points_of_every_assignment_sum_to_100(name: str) -> None:
    assert find_assignment(name).max_score == 100


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (b'cap = 1\ntest = ["a"]\n', r"tests\.toml: test number 1 is 'a'; each begins with \[\[test\]\]"),
        (b"cap = 1 # \xff\n", r"tests\.toml: .*codec can't decode"),
    ],
)
def test_what_is_no_table_or_no_text_is_told(contents: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "tests.toml").write_bytes(contents)
    with pytest.raises(CannotBeGraded, match=told):
        read_tests(tmp_path / "tests.toml", CHECKS)
