"""Grades students' own tests by the bugs that they find: `minipaged grade-tests block-allocator test_mine.py`.

The tests are written for pytest. They import the part as if it were a file beside them (`from block_allocator import
BlockAllocator`). They run on the right parts first, where all of them have to pass, and then on each mutant, where at
least one has to fail. The score is the number of mutants found (killed).

Each run has a fresh worker (`sandbox/worker.py`), which also has the part under test. The part's source is in no file,
and mutants have the same names as right parts, so that tests can distinguish them only by their behaviour.
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
    GradeStatus,
    Submission,
    Test,
    TestResult,
    find_assignment,
    start_process,
)
from minipaged.course.grader.mutants import find_seeded
from minipaged.course.grader.test_runner import LOADING
from minipaged.course.sandbox.contract import Misbehaviour, Raised, StartSandbox, Verdict
from minipaged.course.sandbox.process import WorkerPool

RUNNER = "minipaged.course.grader.test_runner"
CALL_SECONDS, MEMORY_BYTES = 30.0, 2 << 30
"""Limits for all tests of a file together. An assignment's own limits apply if they are higher."""
TOGETHER = 2
"""The number of runs at the same time."""
LEAD = 3
"""The number of missed bugs listed before the score, simplest first."""
RIGHT = (
    "A test has to pass on every right part. Does yours demand more than the handout says, or one particular solution?"
)


@dataclass(frozen=True, slots=True)
class StudentTestRun:
    """The result of one run of the tests."""

    passed: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    """Pairs of a failed test's name and the reason."""
    verdict: str | None = None
    """How the tests misbehaved in their process, if they did."""
    message: str = ""
    output: str = ""


def grade_tests(name: str, tests: Submission, *, report: Callable[[Grade], None] = lambda grade: None) -> Grade:
    """Grade a file of tests. Raises CannotBeGraded if the file does not load or has no tests."""
    part = find_assignment(name)
    part.check_needs()
    module = part.name.replace("-", "_")
    if tests.path.stem == module:
        raise CannotBeGraded(
            f"{tests.path.name} is the file that the tests import; name the file with the tests, as in test_mine.py"
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
        # If a test fails on a right part, its failure on a mutant proves nothing.
        if not any(result.status is GradeStatus.FAILED for result in grade.results):
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


def _passes(test: Test, outcome: StudentTestRun) -> TestResult:
    if outcome.verdict:
        failure = Failure(outcome.message, verdict=outcome.verdict)
        return TestResult(test, GradeStatus.FAILED, outcome.message, failure, outcome.output)
    if outcome.failed:
        name, why = outcome.failed[0]
        message = f"{name} fails on a right part: {why}\n{test.meaning}\nThe parts with bugs were therefore not tried."
        return TestResult(test, GradeStatus.FAILED, message, output=outcome.output)
    return TestResult(test, GradeStatus.PASSED, f"{len(outcome.passed)} tests")


def _kills(test: Test, outcome: StudentTestRun) -> TestResult:
    if outcome.verdict == Verdict.TIMED_OUT:  # the tests ended in time on right parts
        return TestResult(test, GradeStatus.PASSED, "found: the tests did not end")
    if outcome.verdict:
        failure = Failure(outcome.message, verdict=outcome.verdict)
        return TestResult(test, GradeStatus.FAILED, outcome.message, failure, outcome.output)
    if outcome.failed:
        return TestResult(test, GradeStatus.PASSED, f"found by {outcome.failed[0][0]}")
    said = NOT_FOUND if test.meaning == test.name else f"{NOT_FOUND}: {test.meaning}"
    return TestResult(test, GradeStatus.FAILED, said)


def run_tests(part: Assignment, tests: Submission, source: str, start: StartSandbox | None = None) -> StudentTestRun:
    """Run the file of tests in a fresh worker, on the part with this source. `start` starts the worker; the default is
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
                return StudentTestRun(message=str(answer.error), failed=((LOADING, str(answer.error)),))
            process.finish()
            passed, failed, message = answer
            return StudentTestRun(
                tuple(passed), tuple((name, why) for name, why in failed), None, message, process.output
            )
    except Misbehaviour as misbehaviour:
        return StudentTestRun(verdict=misbehaviour.verdict, message=misbehaviour.message)


def _unused(bench: object) -> None:
    raise AssertionError("grade_tests runs these tests")
