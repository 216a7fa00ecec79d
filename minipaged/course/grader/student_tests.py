"""The students' own tests, graded by the bugs that they find: `minipaged grade-tests block-allocator test_mine.py`.

The tests are pytest's. They import the part as if it lay beside them, `from block_allocator import BlockAllocator`, and
get one under test: first those that are right, on which they have to pass, then each of the mutants, on which at least
one has to fail. The score is the share of mutants that are found (killed).

Each run is one in a fresh worker (`sandbox/worker.py`), and the part under test is there too. No file has its source,
and its names are those of any other: tests that only call it cannot tell a mutant from a right one but by what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from minipaged.course.grader.assignment import (
    Assignment,
    CannotBeGraded,
    Failure,
    Grade,
    Submission,
    Test,
    TestResult,
    TestStatus,
    find_assignment,
    start_process,
)
from minipaged.course.grader.mutants import find_seeded
from minipaged.course.grader.test_runner import LOADING
from minipaged.course.sandbox.contract import Misbehaviour, Raised, StartSandbox, Verdict
from minipaged.course.sandbox.process import WorkerPool

RUNNER = "minipaged.course.grader.test_runner"
CALL_SECONDS, MEMORY_BYTES = 30.0, 2 << 30
"""For all tests of a file together, where an assignment does not allow its parts more."""
TOGETHER = 2
"""Runs at the same time."""
LEAD = 3
"""Bugs that the closing lines begin with: the simplest of those that no test found."""
RIGHT = "A test has to pass on every right part. Does it ask for more than the handout says? For one way to do it?"


@dataclass(frozen=True, slots=True)
class TestRun:
    """One run of the tests."""

    passed: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    """Tests and why."""
    verdict: str | None = None
    """What the tests did to their process, if they did not end in order."""
    message: str = ""
    output: str = ""


def grade_tests(name: str, tests: Submission, *, report: Callable[[Grade], None] = lambda grade: None) -> Grade:
    """Grade a file of tests. Raises CannotBeGraded when there is no test in it that runs."""
    part = find_assignment(name)
    part.check_needs()
    module = part.name.replace("-", "_")
    if tests.path.stem == module:
        raise CannotBeGraded(
            f"{tests.path.name} is what the tests import; hand in the file with the tests, test_mine.py say"
        )
    seeded = find_seeded(part.name)
    order = [test.name for test in part.tests]
    bugs = sorted(seeded.mutants.values(), key=lambda mutant: order.index(mutant.test))
    right = tuple(Test(f"passes on {what}", 0, None, RIGHT, "", _unused) for what in seeded.right)
    mutants = tuple(Test(mutant.name, 1, None, mutant.meaning, "", _unused) for mutant in bugs)
    grade = Grade(Assignment(f"{part.name} tests", "", (), (*right, *mutants), len(mutants)), tests, seed=0)
    with WorkerPool() as workers:
        run = partial(run_tests, part, tests, start=workers.start)
        for test, source in zip(right, seeded.right.values(), strict=True):
            outcome = run(source)
            if outcome.failed and outcome.failed[0][0] == LOADING:
                raise CannotBeGraded(f"{tests.path.name} does not load: {outcome.failed[0][1]}")
            if not outcome.passed and not outcome.failed and not outcome.verdict:
                raise CannotBeGraded(f"{tests.path.name} has no tests: {outcome.message or 'none was found'}")
            grade.results.append(_passes(test, outcome))
            report(grade)
        # Where one fails on a right part, nothing is proved by a failing test.
        if not any(result.status is TestStatus.FAILED for result in grade.results):
            with ThreadPoolExecutor(TOGETHER) as pool:
                runs = pool.map(run, [mutant.source for mutant in bugs])
                for test, outcome in zip(mutants, runs, strict=True):
                    grade.results.append(_kills(test, outcome))
                    report(grade)
            missed = [one.test.meaning for one in grade.results if one.message.startswith(NOT_FOUND)]
            if missed:
                grade.lead = ("the simplest bugs that no test finds:", *(f"- {one}" for one in missed[:LEAD]))
    grade.finished = True
    report(grade)
    return grade


NOT_FOUND = "not found"


def _passes(test: Test, outcome: TestRun) -> TestResult:
    if outcome.verdict:
        failure = Failure(outcome.message, verdict=outcome.verdict)
        return TestResult(test, TestStatus.FAILED, outcome.message, failure, outcome.output)
    if outcome.failed:
        name, why = outcome.failed[0]
        message = f"{name} fails on a right part: {why}\n{test.meaning}\nSo the wrong ones were not tried."
        return TestResult(test, TestStatus.FAILED, message, output=outcome.output)
    return TestResult(test, TestStatus.PASSED, f"{len(outcome.passed)} tests")


def _kills(test: Test, outcome: TestRun) -> TestResult:
    if outcome.verdict == Verdict.TIMED_OUT:  # on a right one they ended in time
        return TestResult(test, TestStatus.PASSED, "found: the tests did not end")
    if outcome.verdict:
        failure = Failure(outcome.message, verdict=outcome.verdict)
        return TestResult(test, TestStatus.FAILED, outcome.message, failure, outcome.output)
    if outcome.failed:
        return TestResult(test, TestStatus.PASSED, f"found by {outcome.failed[0][0]}")
    said = NOT_FOUND if test.meaning == test.name else f"{NOT_FOUND}: {test.meaning}"
    return TestResult(test, TestStatus.FAILED, said)


def run_tests(part: Assignment, tests: Submission, source: str, start: StartSandbox | None = None) -> TestRun:
    """Run the file in a worker of its own, on the part that this is the source of. `start` makes the worker; None:
    `start_process`."""
    most = part.limits
    limits = replace(
        most,
        call_seconds=max(CALL_SECONDS, most.call_seconds),
        memory_bytes=max(MEMORY_BYTES, most.memory_bytes),
        open_files=256,
    )
    try:
        with (start or start_process)(limits, (RUNNER, *part.modules)) as process:
            given = (process.copy(tests.path), part.name.replace("-", "_"), source)
            [answer] = process.batch([(process.modules[0], "run", given)])
            if isinstance(answer, Raised):
                return TestRun(message=str(answer.error), failed=((LOADING, str(answer.error)),))
            process.finish()
            passed, failed, message = answer
            return TestRun(tuple(passed), tuple((name, why) for name, why in failed), None, message, process.output)
    except Misbehaviour as misbehaviour:
        return TestRun(verdict=misbehaviour.verdict, message=misbehaviour.message)


def _unused(bench: object) -> None:
    raise AssertionError("these are graded by grade_tests")
