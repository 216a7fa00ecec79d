"""`minipaged grade-tests`: the students' tests, graded by the bugs that they find."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from textwrap import indent

import pytest

from minipaged.course.grader import student_tests
from minipaged.course.grader.assignment import (
    ASSIGNMENTS,
    Bench,
    CannotBeGraded,
    Failed,
    Grade,
    GradeStatus,
    Submission,
    find_assignment,
)
from minipaged.course.grader.formats import text
from minipaged.course.grader.handouts import folder_of
from minipaged.course.grader.mutants import Seeded, find_seeded
from minipaged.course.grader.student_tests import grade_tests, run_tests
from minipaged.course.sandbox.contract import Limits
from minipaged.course.sandbox.process import WorkerPool
from tests.course import harness
from tests.course.harness import run_script, run_script_in_worker
from tests.effort import one_case_in, quick_cases, thorough

HEAD = """
import pytest
from block_allocator import BlockAllocator
from minipaged import BlockNotAllocated, OutOfBlocks
"""

THOROUGH = (
    HEAD
    + """
import random

METHODS = ["allocate", "share", "free", "copy_on_write"]


@pytest.mark.parametrize("seed", range(12))
def test_against_a_dict(seed):
    r = random.Random(seed)
    n, counts = 1 + seed % 3, {}
    allocator = BlockAllocator(n)
    for _ in range(40):
        method, block = r.choice(METHODS), r.choice([-1, n, *range(n), *counts, *counts])
        error = None
        if method != "allocate" and block not in counts:
            error = BlockNotAllocated
        elif len(counts) == n and (method == "allocate" or (method == "copy_on_write" and counts[block] > 1)):
            error = OutOfBlocks
        args = () if method == "allocate" else (block,)
        if error:
            with pytest.raises(error):
                getattr(allocator, method)(*args)
        else:
            result = getattr(allocator, method)(*args)
            if method == "share":
                counts[block] += 1
            elif method == "copy_on_write" and counts[block] == 1:
                assert result == block
            else:
                if method != "allocate":
                    counts[block] -= 1
                    counts = {b: c for b, c in counts.items() if c}
                if method != "free":
                    assert result in range(n) and result not in counts
                    counts[result] = 1
        assert allocator.num_free == n - len(counts)
        assert all(allocator.ref_count(b) == counts.get(b, 0) for b in range(n))


def test_pools():
    assert BlockAllocator(3).num_blocks == 3
    for wrong in (0, -1):
        with pytest.raises(ValueError):
            BlockAllocator(wrong)
    for outside in (-1, 3):
        with pytest.raises(BlockNotAllocated):
            BlockAllocator(3).ref_count(outside)
"""
)

WEAK = (
    HEAD
    + """
def test_allocate():
    allocator = BlockAllocator(2)
    assert allocator.allocate() in (0, 1)
    assert allocator.num_free == 1
"""
)


submit = partial(harness.submit, file="test_mine.py")


def killed(grade: Grade) -> set[str]:
    return {result.test.name for result in grade.results if result.status is GradeStatus.PASSED and result.test.points}


SEEDED = find_seeded("block-allocator")
ALLOCATOR = find_assignment("block-allocator")


@thorough
def test_thorough_tests_find_every_bug(tmp_path: Path) -> None:
    grade = grade_tests("block-allocator", submit(THOROUGH, tmp_path))
    assert killed(grade) == SEEDED.mutants.keys()
    assert grade.full_marks
    assert grade.score == len(SEEDED.mutants) >= 25
    assert not grade.lead


FOUR = ("num-free-never-changes", "never-copies", "one-block-too-many", "double-free-accepted")


def some_mutants(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    some = Seeded(SEEDED.right, {name: SEEDED.mutants[name] for name in names})
    monkeypatch.setattr(student_tests, "find_seeded", lambda assignment: some)


def test_weak_tests_find_few_and_are_told_what_they_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_mutants(monkeypatch, *FOUR)
    grade = grade_tests("block-allocator", submit(WEAK, tmp_path))
    assert killed(grade) == {"num-free-never-changes", "one-block-too-many"}
    assert (grade.score, grade.max_score, grade.full_marks) == (2, 4, False)
    messages = {result.test.name: result.message for result in grade.results}
    assert messages["never-copies"] == "not found: a shared block is written to without a copy"
    assert messages["num-free-never-changes"] == "found by test_allocate"
    assert grade.lead == (
        "the simplest bugs that no test finds:",
        "- a shared block is written to without a copy",
        "- a free block can be freed again",
    )
    assert "\n".join(grade.lead) in text(grade)


@quick_cases(3)
@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            "def test_it():\n    assert BlockAllocator(2).num_free == 7",
            "test_it fails on a right part: assert 2 == 7",
        ),
        ("def test_order():\n    assert BlockAllocator(2).allocate() == 0", "test_order fails on a right part"),
        ("def test_it():\n    import os; os._exit(0)", "exit status 0"),
        ("def test_it():\n    open('/etc/passwd')", "read /etc/passwd"),
        ("def test_it():\n    import subprocess; subprocess.run(['true'])", "started another process"),
        ("def test_it():\n    BlockAllocator(10**9)", "MemoryError"),
    ],
)
def test_tests_that_fail_on_a_right_allocator_prove_nothing(test: str, message: str, tmp_path: Path) -> None:
    grade = grade_tests("block-allocator", submit(HEAD + test, tmp_path))
    assert (grade.score, grade.full_marks) == (0, False)
    assert any(message in result.message for result in grade.results if result.status is GradeStatus.FAILED)
    assert len(grade.results) == len(SEEDED.right), "no bug was tried"


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("", "test_mine.py has no tests"),
        ("import nowhere", "test_mine.py does not load: .*No module named 'nowhere'"),
        ("def test_it(:", "test_mine.py does not load: .*test_mine.py.*, line .*SyntaxError"),
    ],
)
def test_a_file_in_which_no_test_can_run_cannot_be_graded(test: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CannotBeGraded, match=message):
        grade_tests("block-allocator", submit(HEAD + test, tmp_path))


def test_the_part_in_place_of_its_tests_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "block_allocator.py").write_text(HEAD)
    with pytest.raises(CannotBeGraded, match="is the file that the tests import; name the file with the tests"):
        grade_tests("block-allocator", Submission(tmp_path / "block_allocator.py"))


def test_tests_cannot_tell_a_bug_by_its_source_or_name(tmp_path: Path) -> None:
    spying = (
        HEAD
        + """
import inspect
def test_spy():
    allocator = BlockAllocator(2)
    told = repr(allocator) + repr(type(allocator)) + repr(vars(allocator)) + repr(BlockAllocator)
    assert "mutant" not in told
    assert "reference" not in told
"""
    )
    for source in (*SEEDED.right.values(), SEEDED.mutants["never-copies"].source):
        assert run_tests(ALLOCATOR, submit(spying, tmp_path), source).passed == ("test_spy",)


@pytest.mark.parametrize(
    "read", ["inspect.getsource(BlockAllocator)", "BlockAllocator.share.__code__", "dis.dis(BlockAllocator.share)"]
)
def test_tests_cannot_read_what_they_test(read: str, tmp_path: Path) -> None:
    source = f"{HEAD}\nimport dis, inspect\ndef test_spy():\n    {read}\n"
    outcome = run_tests(ALLOCATOR, submit(source, tmp_path), SEEDED.right["the reference"])
    [(_, why)] = outcome.failed
    assert "is a built-in class" in why or "the tests read the code of what they test" in why


@thorough
def test_tests_that_do_not_end_on_a_bug_have_found_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_mutants(monkeypatch, "num-free-never-changes")
    monkeypatch.setattr(student_tests, "CALL_SECONDS", 4)
    short = replace(ALLOCATOR, limits=Limits(call_seconds=4))
    monkeypatch.setattr(student_tests, "find_assignment", lambda name: short)
    looping = (
        HEAD
        + """
def test_until_empty():
    allocator = BlockAllocator(3)
    while allocator.num_free:
        try:
            allocator.allocate()
        except OutOfBlocks:
            pass
"""
    )
    assert "num-free-never-changes" in killed(grade_tests("block-allocator", submit(looping, tmp_path)))


def test_tests_may_use_hypothesis(tmp_path: Path) -> None:
    source = (
        HEAD
        + """
from hypothesis import given, strategies as st
@given(st.integers(1, 5))
def test_all_free(n):
    assert BlockAllocator(n).num_free == n
"""
    )
    for right in SEEDED.right.values():
        assert run_tests(ALLOCATOR, submit(source, tmp_path), right).passed == ("test_all_free",)


# --- Every assignment -----------------------------------------------------------------------------


@quick_cases(3)
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_a_first_test_passes_on_every_right_part_and_fails_on_the_starter(name: str, tmp_path: Path) -> None:
    test = submit((folder_of(name) / "first_test.py").read_text(), tmp_path)
    [(_, why)] = run_tests(find_assignment(name), test, (folder_of(name) / "starter.py").read_text()).failed
    assert "NotImplementedError" in why
    for source in find_seeded(name).right.values():
        outcome = run_tests(find_assignment(name), test, source)
        assert outcome.passed, outcome
        assert not outcome.failed


IN_TURN = sorted(ASSIGNMENTS, key="triton-decode".__eq__)
"""A bug of each, again and again. One that Triton's interpreter runs takes 5 s, so those come last."""
BUGS = [
    (name, bug)
    for bugs in zip_longest(*([(n, b) for b in find_seeded(n).mutants] for n in IN_TURN))
    for name, bug in filter(None, bugs)
]
CRASHES = (
    *("numbers-from-one", "wrong-error-when-full", "one-past-the-end"),
    *("it raises", "a view is written to", "slots past the end", "a hole is given back", "in advance"),
)
"""The bugs in which the student's own code raises."""
SAID = {
    ("paged-attention", "a small Llama"): "a small Llama, blocks of 1: ",
    ("triton-decode", "a small Llama"): "a small Llama, blocks of 4: ",
    ("quantize", "a small Llama"): "a small Llama, 3 bits by round_column: its perplexity is ",
    ("quantize", "a whole matrix"): "times as much as with ours",
}
"""What is said where there is no script."""


@quick_cases(len(IN_TURN) - 1)  # a bug of each but the last
@one_case_in(6)
@pytest.mark.parametrize(("name", "bug"), BUGS, ids=lambda value: str(value))
def test_every_seeded_bug_is_caught_and_its_counterexample_fails_by_itself_and_as_a_test(
    name: str, bug: str, tmp_path: Path, workers: WorkerPool
) -> None:
    """And passes as a test of right parts: so every bug that has one can be found by a student's test, too."""
    part, mutant = find_assignment(name), find_seeded(name).mutants[bug]
    path = tmp_path / f"{name.replace('-', '_')}.py"
    path.write_text(mutant.source)
    found_by = next(one for one in part.tests if one.name == mutant.test)
    with Bench(part, Submission(path), 0) as bench, pytest.raises(Failed) as failed:
        found_by.check(bench)
    failure = failed.value.failure
    assert failure.crashed == (bug in CRASHES)
    assert SAID.get((name, found_by.name), "") in failure.message
    if failure.script is None:
        # It is found while a whole model runs, or in a whole matrix that goes through the grader's own loop.
        assert found_by.stage != "properties" or found_by.name == "a whole matrix"
        return
    assert name != "triton-decode" or failure.drawing
    assert name != "quantize" or failure.drawing or re.search(" returned(?: scales)?: ", failure.message)
    assert name != "block-allocator" or failure.script.count("allocator.") <= 12, "short enough to follow"
    if name == "triton-decode":
        ran = run_script_in_worker(failure.script, part, path, tmp_path, workers)
    else:
        ran = run_script(failure.script, tmp_path)
    assert ran.returncode == 1, failure.script + ran.stdout + ran.stderr
    assert "Traceback" in ran.stderr
    body = "\n".join(line for line in failure.script.splitlines() if not line.startswith("sys.path"))
    test = submit("def test_it():\n" + indent(body, "    "), tmp_path)
    assert run_tests(part, test, mutant.source).failed
    for right in find_seeded(name).right.values():
        assert run_tests(part, test, right).passed == ("test_it",)


def test_what_bugs_are_called_and_found_by_fits_the_assignment() -> None:
    for name in ASSIGNMENTS:
        seeded, tests = find_seeded(name), {test.name for test in find_assignment(name).tests}
        assert len(seeded.right) >= 2
        assert len(seeded.mutants) >= 12
        assert {mutant.test for mutant in seeded.mutants.values()} <= tests
        assert f"then {len(seeded.mutants)} with one bug each" in (folder_of(name) / "handout.md").read_text()
        assert len({mutant.source for mutant in seeded.mutants.values()}) == len(seeded.mutants)
