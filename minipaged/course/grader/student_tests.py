"""The students' own tests, graded by the bugs that they find: `minipaged grade-tests block-allocator test_mine.py`.

The tests are pytest's. They import the part as if it lay beside them, `from block_allocator import BlockAllocator`, and
get one under test: first two that are right, on which they have to pass, then each of the mutants, on which at least
one has to fail. The score is the share of mutants that are found (killed).

The tests run in a worker (`worker.py`), the allocators under test in the grader's process: what a test sees of them are
answers to calls, so that it cannot tell a mutant by its source or its name.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from minipaged.course.assignments.block_allocator.mutants import MUTANTS
from minipaged.course.grader.assignment import (
    Assignment,
    CannotBeGraded,
    Failure,
    Grade,
    Status,
    Submission,
    Test,
    TestResult,
)
from minipaged.course.grader.test_runner import LOADING, MODULE
from minipaged.course.sandbox.contract import Limits, Misbehaviour, Raised, Verdict
from minipaged.course.sandbox.process import WorkerProcess
from minipaged.engine.checked_allocator import MEMBERS
from minipaged.tiers import reference_tier

LIMITS = Limits(call_seconds=30.0, test_seconds=60.0, memory_bytes=2 << 30, open_files=256)
MOST_BLOCKS = 1_000_000
"""Blocks in all pools that one run of the tests may make: they lie in the grader's memory."""
TOGETHER = 2
"""Runs at the same time."""


class UnderTest:
    """One allocator under test, as the worker may use it."""

    OFFERED: ClassVar[tuple[str, ...]] = MEMBERS

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator

    @property
    def num_blocks(self) -> Any:
        return self._allocator.num_blocks

    @property
    def num_free(self) -> Any:
        return self._allocator.num_free

    def allocate(self) -> Any:
        return self._allocator.allocate()

    def share(self, block: Any) -> Any:
        return self._allocator.share(block)

    def free(self, block: Any) -> Any:
        return self._allocator.free(block)

    def ref_count(self, block: Any) -> Any:
        return self._allocator.ref_count(block)

    def copy_on_write(self, block: Any) -> Any:
        return self._allocator.copy_on_write(block)


class Factory:
    """Makes the allocators under test."""

    OFFERED: ClassVar[tuple[str, ...]] = ("make",)

    def __init__(self, kind: Callable[[int], Any]) -> None:
        self._kind = kind
        self._blocks_left = MOST_BLOCKS

    def make(self, num_blocks: Any) -> UnderTest:
        if isinstance(num_blocks, int) and num_blocks > 0:
            self._blocks_left -= num_blocks + 100  # what a pool takes beside its blocks
            if self._blocks_left < 0:
                raise ValueError(f"the tests may make pools of {MOST_BLOCKS:,} blocks together")
        return UnderTest(self._kind(num_blocks))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of the tests."""

    passed: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    """Tests and why."""
    verdict: str | None = None
    """What the tests did to their process, if they did not end in order."""
    message: str = ""
    output: str = ""


class OtherOrder(reference_tier().block_allocator):  # type: ignore[misc]
    """As right as the reference: the highest block comes first, and then the one that was freed first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free.reverse()

    def free(self, block: int) -> None:
        before = len(self._free)
        super().free(block)
        if len(self._free) > before:
            self._free.insert(0, self._free.pop())


RIGHT: tuple[tuple[str, str, Callable[[int], Any]], ...] = (
    (
        "the reference",
        "A test has to pass on a right allocator. Does it ask for more than the contract says? For a certain block?",
        reference_tier().block_allocator,
    ),
    (
        "blocks in another order",
        "The contract does not say which free block is handed out; a test must not ask for a certain one.",
        OtherOrder,
    ),
)


def grade_tests(name: str, tests: Submission, *, report: Callable[[Grade], None] = lambda grade: None) -> Grade:
    """Grade a file of tests. Raises CannotBeGraded when there is no test in it that runs."""
    if name != "block-allocator":
        raise CannotBeGraded(f"there are no seeded bugs for {name!r}; tests can be graded for: block-allocator")
    if tests.path.stem == MODULE:
        raise CannotBeGraded(
            f"{tests.path.name} is what the tests import; hand in the file with the tests, test_mine.py say"
        )
    right = tuple(Test(f"passes on {what}", 0, None, why, "", _unused) for what, why, _ in RIGHT)
    mutants = tuple(Test(mutant.name, 1, None, mutant.description, "", _unused) for mutant in MUTANTS)
    assignment = Assignment(f"{name} tests", "", (), (*right, *mutants), len(mutants))
    grade = Grade(assignment, tests, seed=0)
    for test, (_, _, kind) in zip(right, RIGHT, strict=True):
        outcome = run_tests(tests, kind)
        if outcome.failed and outcome.failed[0][0] == LOADING:
            raise CannotBeGraded(f"{tests.path.name} does not load: {outcome.failed[0][1]}")
        if not outcome.passed and not outcome.failed and not outcome.verdict:
            raise CannotBeGraded(f"{tests.path.name} has no tests: {outcome.message or 'none was found'}")
        grade.results.append(_passes(test, outcome))
        report(grade)
    if not any(result.status is Status.FAILED for result in grade.results):  # else nothing is proved by a failing test
        with ThreadPoolExecutor(TOGETHER) as pool:
            runs = pool.map(lambda mutant: run_tests(tests, mutant.allocator()), MUTANTS)
            for test, outcome in zip(mutants, runs, strict=True):
                grade.results.append(_kills(test, outcome))
                report(grade)
    grade.finished = True
    report(grade)
    return grade


def _passes(test: Test, outcome: Outcome) -> TestResult:
    if outcome.verdict:
        failure = Failure(outcome.message, verdict=outcome.verdict)
        return TestResult(test, Status.FAILED, outcome.message, failure, outcome.output)
    if outcome.failed:
        name, why = outcome.failed[0]
        message = f"{name} fails on a right allocator: {why}\n{test.meaning}\nSo the wrong ones were not tried."
        return TestResult(test, Status.FAILED, message, output=outcome.output)
    return TestResult(test, Status.PASSED, f"{len(outcome.passed)} tests")


def _kills(test: Test, outcome: Outcome) -> TestResult:
    if outcome.verdict == Verdict.TIMED_OUT:  # on a right allocator they ended in time
        return TestResult(test, Status.PASSED, "found: the tests did not end")
    if outcome.verdict:
        failure = Failure(outcome.message, verdict=outcome.verdict)
        return TestResult(test, Status.FAILED, outcome.message, failure, outcome.output)
    if outcome.failed:
        return TestResult(test, Status.PASSED, f"found by {outcome.failed[0][0]}")
    return TestResult(test, Status.FAILED, f"not found: {test.meaning}")


def run_tests(tests: Submission, kind: Callable[[int], Any]) -> Outcome:
    """Run the file in a worker of its own, on allocators that `kind` makes."""
    try:
        with WorkerProcess(LIMITS, ("minipaged.course.grader.test_runner",)) as process:
            path = process.copy(tests.path)
            [answer] = process.batch([(process.modules[0], "run", (path, Factory(kind)))])
            if isinstance(answer, Raised):
                return Outcome(message=str(answer.error), failed=((LOADING, str(answer.error)),))
            process.finish()
            passed, failed, message = answer
            return Outcome(tuple(passed), tuple((name, why) for name, why in failed), None, message, process.output)
    except Misbehaviour as misbehaviour:
        return Outcome(verdict=misbehaviour.verdict, message=misbehaviour.message)


def _unused(bench: object) -> None:
    raise AssertionError("these are graded by grade_tests")
