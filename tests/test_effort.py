"""Which cases of a test run in which profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import effort


class Case:
    """A case of a test, as pytest collects it."""

    def __init__(self, number: int, *marks: pytest.MarkDecorator) -> None:
        self.nodeid = f"tests/test_it.py::test_it[{number}]"
        self.marks = {mark.name: mark.mark for mark in marks}
        self.stash = pytest.Stash()
        self.fixturenames: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = getattr(pytest.mark, name).mark


def chosen(cases: list[Case], profile: str, seed: int = 0) -> tuple[list[int], list[int]]:
    """The numbers of the cases that are left to the thorough profile, and of those that do not run in this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(effort, "settings", SimpleNamespace(get_current_profile_name=lambda: profile))
        left_out = effort.choose(cast("list[Any]", cases), seed)
    assert {case for case in cases if effort.NOT_DRAWN in case.stash} == left_out
    return (
        [i for i, case in enumerate(cases) if case.get_closest_marker("thorough")],
        [i for i, case in enumerate(cases) if case in left_out],
    )


def cases(number: int, *marks: pytest.MarkDecorator) -> list[Case]:
    return [Case(i, *marks) for i in range(number)]


def test_the_first_cases_are_quick_and_never_left_out() -> None:
    sampled = effort.quick_cases(2), effort.one_case_in(3)
    assert chosen(cases(9, effort.quick_cases(2)), "thorough") == ([*range(2, 9)], [])
    for profile in ("quick", "nightly"):
        assert chosen(cases(9, *sampled), profile) == ([*range(2, 9)], [])
    later, left_out = chosen(cases(9, *sampled), "thorough")
    assert later == [*range(2, 9)]
    assert len(left_out) == 7 - 3  # three of seven: one of every three, rounded up
    assert {*left_out} < {*later}


def test_another_seed_draws_other_cases_and_the_same_one_the_same() -> None:
    drawn = [chosen(cases(40, effort.thorough, effort.one_case_in(4)), "thorough", seed)[1] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [len(left_out) for left_out in drawn] == [30] * 3


def test_where_some_cases_are_marked_the_others_are_not_drawn_from() -> None:
    marked = [Case(i, effort.one_case_in(4), *([effort.thorough] if i else [])) for i in range(9)]
    assert 0 not in chosen(marked, "thorough")[1]
    assert len(chosen(marked, "thorough")[1]) == 6
    assert len(chosen(cases(8, effort.one_case_in(4)), "thorough")[1]) == 6, "none is marked: all have more examples"


def test_what_needs_a_browser_is_thorough() -> None:
    in_browser = cases(2, effort.quick_cases(1))
    for case in in_browser:
        case.fixturenames = ("page", "browser")
    assert chosen(in_browser, "quick") == ([0, 1], [])
