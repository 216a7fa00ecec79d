"""Grading in a page: the grader and a student's part in one interpreter come to what they come to in processes."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minipaged.course import page
from minipaged.course.grader.assignment import Submission, find_assignment
from minipaged.course.grader.formats import as_json
from minipaged.course.grader.grading import grade
from minipaged.course.grader.handouts import files_of
from minipaged.course.grader.mutants import find_seeded
from minipaged.course.sandbox import answering, contract, page_process
from tests.course.conftest import FEWER_IN_A_PAGE
from tests.course.submissions import hostile
from tests.effort import one_case_in, quick_cases, thorough

NAMES = ("block-allocator", "block-table", "scheduler", "prefix-cache", "eviction", "windows", "speculative")
REFERENCE = find_seeded("block-allocator").right["the reference"]


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, number in FEWER_IN_A_PAGE:
        monkeypatch.setattr(module, name, number)


@pytest.fixture(autouse=True)
def modules_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page has neither NumPy nor torch. Their thousands of members would be looked through for each test here."""
    there = [module for module in answering.WATCHED_MODULES if module not in ("numpy", "torch")]
    monkeypatch.setattr(answering, "WATCHED_MODULES", there)


@pytest.fixture
def four_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block allocators are graded by the first four tests alone, where one that fails is enough."""
    assignment = find_assignment("block-allocator")
    fewer = replace(assignment, tests=assignment.tests[:4], measure=None)
    monkeypatch.setattr(page, "find_assignment", {"block-allocator": fewer}.__getitem__)


class Clock:
    """Goes on by a hundredth of a second per look of the page's process, which looks every so many lines of student
    code: so an endless loop is over soon, and the machine may be busy."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now


def in_a_page(name: str, source: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The grade, and what was told of each test on the way."""
    told: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_process, "time", clock := Clock())
        patch.setattr(contract, "time", SimpleNamespace(monotonic=lambda: clock.now))
        graded = json.loads(page.run(name, source, lambda text: told.append(json.loads(text))))
    assert None in told  # it goes on
    return graded, [test for test in told if test]


def in_processes(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command line says with --no-model, but for the speed."""
    monkeypatch.chdir(folder)  # so that counterexamples name the same place
    submission = Submission(Path(f"{name.replace('-', '_')}.py"))
    submission.path.write_text(source)
    graded = grade(replace(find_assignment(name), measure=None), submission, model=None)
    return {**json.loads(as_json(graded)), "isolation": {}}


BUGS = [
    one
    for bugs in zip_longest(*([(name, bug) for bug in find_seeded(name).mutants] for name in NAMES))
    for one in bugs
    if one is not None
]


@quick_cases(1)
@one_case_in(6)
@pytest.mark.parametrize(("name", "bug"), BUGS, ids=[f"{name}: {bug}" for name, bug in BUGS])
def test_a_seeded_bug_gets_the_points_and_counterexamples_that_it_gets_in_processes(
    name: str, bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find_seeded(name).mutants[bug].source
    here, told = in_a_page(name, source)
    assert here == in_processes(name, source, tmp_path, monkeypatch)
    assert [test["name"] for test in told] == [test["name"] for test in here["tests"]]
    for test in told:
        assert not test.get("unwritten")
        if test["run"]:  # what is stepped through can be followed to its end, where the code pane has a line
            broken = test["run"]["broken"]
            assert len(test["run"]["current"]) == len(test["run"]["events"]) + 1 or broken["line"] is None
            assert broken["line"] is None or source.splitlines()[broken["line"] - 1].strip()


@quick_cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_right_part_passes_all_that_there_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(iter(find_seeded(name).right.values()))
    here, _ = in_a_page(name, source)
    points = sum(test.points for test in find_assignment(name).tests if test.stage != "model")
    assert here["score"] == here["max_score"] == points
    assert here == in_processes(name, source, tmp_path, monkeypatch)


def test_a_starter_is_told_what_is_still_to_be_written() -> None:
    graded, told = in_a_page("block-allocator", files_of("block-allocator")["block_allocator.py"])
    assert graded["score"] == 0
    assert told[0]["counterexample"]["drawing"][:2] == ["still to be written:", "line 18   __init__(num_blocks)"]
    assert told[1]["same"] == "a new pool"
    unwritten = [test["unwritten"] for test in told]
    assert unwritten == [test["status"] == "failed" for test in graded["tests"]]
    assert unwritten.count(True) == 7


@pytest.mark.usefixtures("four_tests")
def test_the_line_in_which_it_went_wrong_is_marked() -> None:
    """Where it raised; or else the last one that ran of a method, not counting those by which it is looked at."""
    for piece, wrong, line in (
        ("self._ref_counts[block] += 1", "self._ref_counts[block] += 2", "self._ref_counts[block] += 2"),
        ("self._ref_counts[block] += 1", "self._ref_counts[block] /= 0", "self._ref_counts[block] /= 0"),
        ("if self._ref_counts[block] == 1:", "if True:", "return block  # the caller is its only holder"),
        ("block = self._free.pop()", "while True: block = 0", "while True: block = 0"),
    ):
        source = REFERENCE.replace(piece, wrong)
        _, told = in_a_page("block-allocator", source)
        broken = next(test["run"]["broken"] for test in told if test["status"] == "failed")
        assert source.splitlines()[broken["line"] - 1].strip() == line


@quick_cases(3)
@pytest.mark.usefixtures("four_tests")
@pytest.mark.parametrize(
    ("in_allocate", "verdict", "message"),
    [
        ("while True: block = 0", "timed-out", "a call did not end within 1 second"),
        (
            "while True:\n    try: block = 0\n    except Exception: pass",
            "timed-out",
            "a call did not end within 1 second",
        ),
        ("print('x' * 100_000)", "flooded-output", "more than a megabyte"),
        ("import random; random.random = lambda: 4", "tampered", "it replaced random.random"),
        ("from minipaged.reference import block_allocator", "forbidden", "read minipaged.reference"),
        ("import minipaged.course.grader.search", "forbidden", "which belongs to the grader"),
    ],
)
def test_what_a_part_does_to_the_page_fails_the_test_in_which_it_does_it(
    in_allocate: str, verdict: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "CALL_SECONDS", 1.0)
    _, told = in_a_page("block-allocator", hostile(in_allocate=in_allocate))
    failed = next(test for test in told if test["status"] == "failed")
    assert failed["counterexample"]["verdict"] == verdict
    assert message in failed["message"]
    assert failed["hint"]


@pytest.mark.usefixtures("four_tests")
def test_what_it_prints_is_told_the_beginning_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    _, told = in_a_page("block-allocator", hostile(in_allocate="print('here I am')"))
    assert told[1]["output"].startswith("here I am\nhere I am\n")
    assert len(told[1]["output"]) <= 4000
    in_a_page("block-allocator", hostile(in_allocate="print('here I am'); return 99"))  # whose run is looked at again
    assert capsys.readouterr().out == ""


def test_what_cannot_be_graded_is_told_with_its_line() -> None:
    graded, told = in_a_page("block-allocator", "import random\n\ndef broken(:\n")
    assert graded == {
        "error": "block_allocator.py does not load: SyntaxError: invalid syntax (block_allocator.py:3)",
        "line": 3,
    }
    assert not told
    assert in_a_page("block-allocator", "x = 1\n")[0]["line"] is None


@pytest.mark.usefixtures("four_tests")
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = (Path.cwd(), list(sys.path), sys.gettrace(), sys.stdout, sys.unraisablehook)
    in_a_page("block-allocator", REFERENCE.replace("if self._ref_counts[block] == 1:", "if True:"))
    assert before == (
        Path.cwd(),
        list(sys.path),
        sys.gettrace(),
        sys.stdout,
        sys.unraisablehook,
    )
    assert not {"block_allocator", "block_allocator_submission"} & {*sys.modules}


@pytest.mark.usefixtures("four_tests")
def test_what_was_replaced_is_put_back() -> None:
    seeds, generator = random.random, vars(random.Random)
    replaces = "import random; random.random = lambda: 4; random.Random.random = lambda self: 4"
    in_a_page("block-allocator", hostile(in_allocate=replaces))
    assert random.random is seeds
    assert "random" not in generator


@pytest.mark.usefixtures("four_tests")
def test_a_loop_while_it_is_made_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the run is looked at again: lines of such members are counted, though none of them is the one."""
    monkeypatch.setattr(page, "CALL_SECONDS", 1.0)
    source = files_of("block-allocator")["block_allocator.py"].replace(
        "raise NotImplementedError", "while True: block = 0", 1
    )
    _, told = in_a_page("block-allocator", source)
    assert "a call did not end within 1 second" in told[0]["message"]


@pytest.mark.usefixtures("four_tests")
def test_after_a_call_that_was_ended_no_other_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of the same message: those would not be ended any more."""
    monkeypatch.setattr(page, "CALL_SECONDS", 1.0)
    monkeypatch.setitem(sys.modules, "calls_of_this_test", calls := ModuleType("calls_of_this_test"))
    calls.made = []  # type: ignore[attr-defined]
    source = hostile(in_allocate="import calls_of_this_test as noted\nnoted.made.append(0)\nwhile True: block = 0")
    for number, method in enumerate(
        ("def num_free(self) -> int:\n", "def __init__(self, num_blocks: int) -> None:\n"), 1
    ):
        assert method in source
        note = f"        import calls_of_this_test as noted; noted.made.append({number})\n"
        source = source.replace(method, method + note)
    _, told = in_a_page("block-allocator", source)
    assert told[1]["counterexample"]["verdict"] == "timed-out"
    made = calls.made  # type: ignore[attr-defined]
    assert {made[i + 1] for i, call in enumerate(made[:-1]) if call == 0} == {2}  # of the next allocator, in all tests


@thorough
def test_of_a_hidden_test_a_page_tells_the_points_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assignment = find_assignment("block-allocator")
    hidden = replace(assignment, tests=tuple(replace(test, hidden=True) for test in assignment.tests[:4]))
    monkeypatch.setattr(page, "find_assignment", lambda name: hidden)
    _, told = in_a_page("block-allocator", find_seeded("block-allocator").mutants["share-not-counted"].source)
    failed = next(test for test in told if test["status"] == "failed")
    assert failed["message"] == "A hidden test; what it found is not shown."
    said = [failed[key] for key in ("meaning", "hint", "output", "counterexample", "run", "same")]
    assert said == ["", "", "", None, None, None]
