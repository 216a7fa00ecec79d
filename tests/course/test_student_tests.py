"""`minipaged grade-tests`: the students' tests, graded by the bugs that they find."""

from __future__ import annotations

from pathlib import Path

import pytest

from minipaged.course.assignments.block_allocator.mutants import MUTANTS
from minipaged.course.grader import student_tests
from minipaged.course.grader.assignment import CannotBeGraded, Grade, Status, Submission
from minipaged.course.grader.student_tests import RIGHT, grade_tests, run_tests
from tests.effort import quick_cases, thorough

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


def submit(source: str, folder: Path) -> Submission:
    path = folder / "test_mine.py"
    path.write_text(source)
    return Submission(path)


def killed(grade: Grade) -> set[str]:
    return {result.test.name for result in grade.results if result.status is Status.PASSED and result.test.points}


@thorough
def test_thorough_tests_find_every_bug(tmp_path: Path) -> None:
    grade = grade_tests("block-allocator", submit(THOROUGH, tmp_path))
    assert killed(grade) == {mutant.name for mutant in MUTANTS}
    assert grade.full_marks
    assert grade.score == len(MUTANTS) >= 25


FOUR = ("num-free-never-changes", "never-copies", "one-block-too-many", "double-free-accepted")


def some_mutants(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(student_tests, "MUTANTS", tuple(mutant for mutant in MUTANTS if mutant.name in names))


def test_weak_tests_find_few_and_are_told_what_they_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_mutants(monkeypatch, *FOUR)
    grade = grade_tests("block-allocator", submit(WEAK, tmp_path))
    assert killed(grade) == {"num-free-never-changes", "one-block-too-many"}
    assert (grade.score, grade.max_score, grade.full_marks) == (2, 4, False)
    messages = {result.test.name: result.message for result in grade.results}
    assert messages["never-copies"] == "not found: a shared block is written to as it is"
    assert messages["num-free-never-changes"] == "found by test_allocate"


@quick_cases(3)
@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            "def test_it():\n    assert BlockAllocator(2).num_free == 7",
            "test_it fails on a right allocator: assert 2 == 7",
        ),
        ("def test_order():\n    assert BlockAllocator(2).allocate() == 0", "test_order fails on a right allocator"),
        ("def test_it():\n    import os; os._exit(0)", "exit status 0"),
        ("def test_it():\n    open('/etc/passwd')", "read /etc/passwd"),
        ("def test_it():\n    import subprocess; subprocess.run(['true'])", "started another process"),
        ("def test_it():\n    BlockAllocator(10**9)", "the tests may make pools of 1,000,000 blocks together"),
    ],
)
def test_tests_that_fail_on_a_right_allocator_prove_nothing(test: str, message: str, tmp_path: Path) -> None:
    grade = grade_tests("block-allocator", submit(HEAD + test, tmp_path))
    assert (grade.score, grade.full_marks) == (0, False)
    assert any(message in result.message for result in grade.results if result.status is Status.FAILED)
    assert len(grade.results) == len(RIGHT), "no bug was tried"


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
    with pytest.raises(CannotBeGraded, match="is what the tests import; hand in the file with the tests"):
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
    for _, _, kind in RIGHT:
        assert run_tests(submit(spying, tmp_path), kind).passed == ("test_spy",)
    assert run_tests(submit(spying, tmp_path), MUTANTS[0].allocator()).passed == ("test_spy",)


@thorough
def test_tests_that_do_not_end_on_a_bug_have_found_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_mutants(monkeypatch, "num-free-never-changes")
    monkeypatch.setattr(
        student_tests, "LIMITS", student_tests.Limits(call_seconds=4, memory_bytes=2 << 30, open_files=256)
    )
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
    assert run_tests(submit(source, tmp_path), RIGHT[0][2]).passed == ("test_all_free",)
