"""Assignment 1: right ones get full marks, however unusual; every seeded bug is caught, drawn and told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from minipaged.course.assignments.block_allocator import checks as block_allocator
from minipaged.course.assignments.block_allocator.checks import ASSIGNMENT, LARGE_POOLS
from minipaged.course.assignments.block_allocator.mutants import SEEDED
from minipaged.course.grader.assignment import Bench, Failure, GradeStatus, Submission, TestResult
from minipaged.course.grader.formats import text
from minipaged.course.grader.grading import grade, run_test
from minipaged.events import StepFailed
from tests.course import harness
from tests.course.harness import folded, run_script, submit
from tests.course.submissions import REFERENCE, RIGHT, right, right_with_many
from tests.effort import quick_cases, thorough

MUTANTS = SEEDED.mutants
result_of = partial(harness.result_of, ASSIGNMENT)


def first_failure(submission: Submission, seed: int = 0) -> TestResult | None:
    """Of the tests in order, without the real model."""
    for test in ASSIGNMENT.tests:
        if test.stage != "model":
            with Bench(ASSIGNMENT, submission, seed) as bench:
                result = run_test(test, bench)
            if result.status is not GradeStatus.PASSED:
                return result
    return None


@quick_cases(1)
@pytest.mark.usefixtures("examples_of_a_right_part")
@pytest.mark.parametrize("name", RIGHT)
def test_right_but_unusual_allocators_get_full_marks(name: str, tmp_path: Path) -> None:
    result = grade(ASSIGNMENT, submit(right(name), tmp_path, "Mine"), model=None)
    assert result.full_marks, text(result)
    assert (result.score, result.max_score) == (90, 90)


def check_script(failure: Failure | None, folder: Path, right_one: str, most_calls: int) -> None:
    """It is short, fails by itself, and passes with a right allocator in the place of the wrong one."""
    assert failure is not None
    assert failure.script is not None
    assert failure.script.count("allocator.") <= most_calls
    ran = run_script(failure.script, folder)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "Error" in ran.stderr or "OutOfBlocks" in ran.stderr
    (folder / "mine.py").write_text(right_one)
    fixed = run_script(failure.script, folder)
    assert fixed.returncode == 0, fixed.stderr


@thorough
def test_a_failure_is_drawn_and_told_as_events_that_can_be_folded(tmp_path: Path) -> None:
    result = first_failure(submit(MUTANTS["copy-keeps-the-reference"].source, tmp_path))
    assert result is not None
    assert result.failure is not None
    assert result.failure.drawing == (
        "block                0      1  num_free",
        "held by              A      B",
        "ref_count should be  1      1  0",
        "your allocator says  2 <--  1  0",
        "tables: A: [0]  B: [1]",
    )
    state = folded(result.failure)
    assert [sequence.table for sequence in state.sequences.values()] == [[0], [1]]
    assert [state.ref_count(block) for block in range(2)] == [1, 1]
    last = result.failure.events[-1]
    assert isinstance(last, StepFailed)
    assert last.error.startswith("invariant 'exact-references' broken: ")


def test_a_random_allocator_is_repeatable_too(tmp_path: Path) -> None:
    """One that hands a block out twice now and then, by chance."""
    source = right("random order").replace(
        "self.pool.remove(block)", "random.random() < 0.5 or self.pool.remove(block)"
    )
    submission = submit(source, tmp_path, "Mine")
    first, again = (result_of("allocate and free", submission, seed=3) for _ in range(2))
    assert first.failure is not None
    assert first == again
    assert first.failure.script is not None
    assert "random.seed(3)" in first.failure.script
    assert run_script(first.failure.script, tmp_path).returncode == 1


@thorough
def test_a_failed_test_caps_the_score(tmp_path: Path) -> None:
    """A bug that only the last property finds costs more than its points."""
    source = MUTANTS["copy-gives-up-first"].source
    result = grade(ASSIGNMENT, submit(source, tmp_path), model=None)
    failed = [one.test.name for one in result.results if one.status is GradeStatus.FAILED]
    assert failed == ["a call that raises changes nothing", "long runs in large pools"]
    assert (result.score, result.capped) == (60, False)
    result.assignment = replace(ASSIGNMENT, cap=50)
    assert (result.score, result.capped) == (50, True)


LATE = """
class Late(BlockAllocator):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.calls = 0
    def share(self, block):
        self.calls += 1
        if self.calls != 40: super().share(block)
"""


@thorough
def test_a_bug_that_shows_after_many_calls_is_found_and_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_allocator, "LARGE_POOLS", LARGE_POOLS)
    submission = submit(REFERENCE + LATE, tmp_path, "Late")
    result = result_of("long runs in large pools", submission)
    assert result.failure is not None
    assert result.failure.script is not None
    assert result.failure.script.count("\nallocator.share") == 40, "exactly as many as it takes"
    assert run_script(result.failure.script, tmp_path).returncode == 1


HUNDREDS = """
class Hundreds(BlockAllocator):
    def allocate(self):
        block = super().allocate()
        if self.num_blocks - self.num_free > 256: self.share(block)
        return block
"""


@thorough
def test_a_bug_that_shows_in_pools_of_hundreds_of_blocks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_allocator, "LARGE_POOLS", LARGE_POOLS)
    result = result_of("long runs in large pools", submit(REFERENCE + HUNDREDS, tmp_path, "Hundreds"))
    assert result.failure is not None
    assert "ref_count" in result.failure.message
    assert result.failure.script is not None
    assert 257 <= result.failure.script.count("allocator.allocate()") < 400
    assert run_script(result.failure.script, tmp_path).returncode == 1


def test_the_engine_alone_catches_a_bug_too_and_gives_a_script(tmp_path: Path) -> None:
    submission = submit(MUTANTS["share-stops-at-two"].source, tmp_path)
    result = result_of("the engine, on a small model", submission)
    assert result.failure is not None
    assert result.failure.script is not None
    assert run_script(result.failure.script, tmp_path).returncode == 1


# --- Several blocks at once: optional -------------------------------------------------------------


@pytest.mark.usefixtures("examples_of_a_right_part")
def test_a_right_allocator_with_all_optional_methods_gets_full_marks_and_is_told(tmp_path: Path) -> None:
    grade_of = grade(ASSIGNMENT, submit(right_with_many(), tmp_path, "Bulk"), model=None)
    assert grade_of.full_marks, text(grade_of)
    assert (grade_of.score, grade_of.max_score) == (90, 90)
    assert "\nallocate_many, share_many, free_many: also checked\n" in text(grade_of)


def test_methods_of_the_contract_are_not_the_students(tmp_path: Path) -> None:
    """The reference inherits the three; that one writes one of them is told of that one."""
    one = "    def free_many(self, blocks):\n        super().free_many(blocks)\n"
    for source, name, also in (
        (REFERENCE, "BlockAllocator", ()),
        (right("bitmap"), "Mine", ()),
        (REFERENCE + "\n\nclass One(BlockAllocator):\n" + one, "One", ("free_many",)),
    ):
        with Bench(ASSIGNMENT, submit(source, tmp_path, name), 0) as bench:
            assert bench.also == also


ALLOCATED = "        if n > self.num_free:\n            raise OutOfBlocks\n"
HELD_OFTEN_ENOUGH = "self.ref_count(block) < blocks.count(block)"
FREED = "for block in blocks:\n            self.free(block)"
SHARED = "for block in blocks:\n            self.share(block)"
GONE_THROUGH = "blocks = list(blocks)\n        for block in blocks:\n            self.held"
WRONG = {
    "partial allocation": (
        [(ALLOCATED, "")],
        "a call that raises changes nothing",
        "allocator.allocate_many(2) was refused, but changed something: num_free is 0; it should be 1",
    ),
    "shared once": (
        [(SHARED, SHARED.replace("blocks", "set(blocks)"))],
        "reference counts",
        "after allocator.share_many([a, a]) ref_count(0) is 2; it should be 3",
    ),
    "freed once": (
        [(FREED, FREED.replace("blocks", "set(blocks)")), (HELD_OFTEN_ENOUGH, "self.ref_count(block) < 1")],
        "calls that make no sense are refused",
        "allocator.free_many([0, a]) returned None; it has to raise BlockNotAllocated: block 0 is freed 2 times, but "
        "ref_count(0) is 1",
    ),
    "the same block several times": (
        [("for _ in range(n)]", "for _ in range(n)][:1] * n")],
        "allocate and free",
        "allocator.allocate_many(2) returned [1, 1]: block 1 is in it twice",
    ),
    "too few": (
        [("for _ in range(n)]", "for _ in range(min(n, 1))]")],
        "allocate and free",
        "allocator.allocate_many(2) returned [1]; it has to return a list of 2 blocks",
    ),
    "fewer than none": (
        [("        if n < 0:\n            raise ValueError(n)\n", "")],
        "calls that make no sense are refused",
        "allocator.allocate_many(-1) returned []; it has to raise ValueError: the number of blocks is negative",
    ),
    "shares the first": (
        [("        for block in blocks:\n            self.held(block)\n", "")],
        "a call that raises changes nothing",
        "allocator.share_many([a, 1]) was refused, but changed something: ref_count(0) is 2; it should be 1",
    ),
    "frees the first": (
        [(HELD_OFTEN_ENOUGH, "self.ref_count(block) < 1")],
        "a call that raises changes nothing",
        "allocator.free_many([0, a]) was refused, but changed something: num_free is 1; it should be 0",
    ),
    "gone through twice": (
        [(GONE_THROUGH, GONE_THROUGH.replace("blocks = list(blocks)\n        ", ""))],
        "reference counts",
        "after allocator.share_many(iter([a])) ref_count(0) is 1; it should be 2",
    ),
}
"""Pieces of the right one and what stands there instead, the property that is to find it, and what it says."""


@quick_cases(1)
@pytest.mark.parametrize("name", WRONG)
def test_each_bug_of_an_optional_method_is_found_and_its_counterexample_fails_by_itself(
    name: str, tmp_path: Path
) -> None:
    pieces, test, message = WRONG[name]
    source = right_with_many()
    for piece, wrong in pieces:
        assert source.count(piece) == 1, piece
        source = source.replace(piece, wrong)
    failure = result_of(test, submit(source, tmp_path, "Bulk")).failure
    assert failure is not None
    assert failure.message == message
    folded(failure)
    check_script(failure, tmp_path, right_with_many(), most_calls=8)
