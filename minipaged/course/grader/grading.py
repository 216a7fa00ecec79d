"""Runs the tests of one assignment on one submission, in order.

Each test has a fresh worker and ends with the worker's completion message: a check that found no mistake proves nothing
if the worker was tampered with, has died, or left threads running. `report` is called after each test, so that its
result is on disk before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from minipaged.course.grader.assignment import (
    Assignment,
    Bench,
    CannotBeGraded,
    Failed,
    Failure,
    Grade,
    GradeStatus,
    Submission,
    Test,
    TestResult,
)
from minipaged.course.grader.counterexample import UNWRITTEN, raised_message
from minipaged.course.grader.handouts import to_do
from minipaged.course.sandbox.contract import Misbehaviour, StartSandbox, StudentError, Verdict
from minipaged.errors import ModelError

VERDICT_HINTS = {
    Verdict.TIMED_OUT: "Look for a loop that does not end when there is nothing left to find.",
    Verdict.OUT_OF_MEMORY: "Look for a list that grows with every call or without end.",
    Verdict.ENDED: "Report errors by raising them; your part has no reason to end the process.",
    Verdict.FLOODED_OUTPUT: "Remove the prints, or print less.",
    Verdict.FORGED_MESSAGE: "Only the return values of your methods count; write to no socket or file descriptor.",
    Verdict.FORBIDDEN: "Your part needs no files, processes or network.",
    Verdict.TAMPERED: "Do not change other modules; the grader compares with values that your code cannot reach.",
    Verdict.LEFT_THREADS: "Your part needs no threads; if you start some, join them before you return.",
    Verdict.RAISED_IN_DEL: "Python may run __del__ at any time: raise no errors in it, or remove it.",
}


def grade(
    assignment: Assignment,
    submission: Submission,
    *,
    seed: int = 0,
    carried: Mapping[str, Submission] | None = None,
    model: str | None = "smollm2-135m-instruct",
    report: Callable[[Grade], None] = lambda grade: None,
    start: StartSandbox | None = None,
) -> Grade:
    """Grade a submission. Raises CannotBeGraded.

    With `model=None` the tests of the model stage are left out. `start` starts the sandbox of each test; by default
    these are processes of a `WorkerPool`.
    """
    if start is not None:
        return _grade(assignment, submission, seed, carried or {}, model, report, start)
    from minipaged.course.sandbox.process import WorkerPool

    with WorkerPool() as workers:
        return _grade(assignment, submission, seed, carried or {}, model, report, workers.start)


def _grade(
    assignment: Assignment,
    submission: Submission,
    seed: int,
    carried: Mapping[str, Submission],
    model: str | None,
    report: Callable[[Grade], None],
    start: StartSandbox,
) -> Grade:
    for name in carried:
        if name not in assignment.builds_on:
            known = ", ".join(assignment.builds_on) or "none"
            raise CannotBeGraded(f"{assignment.name} does not build on {name!r}; parts it accepts with --with: {known}")
    assignment.check_needs()
    result = Grade(assignment, submission, seed)

    def bench() -> Bench:
        return Bench(assignment, submission, seed, carried, model or "", start)

    with bench() as first:  # raises here if the file cannot be graded
        try:
            result.isolation = first.process.isolation
            result.also_checked = first.also
        except Misbehaviour as misbehaviour:
            raise CannotBeGraded(
                f"{submission.path.name} does not load: {misbehaviour.verdict}: {misbehaviour.message}"
            ) from None
    reached = assignment.tests[0].stage
    for test in assignment.tests:
        if test.stage == "model" and model is None:
            result.results.append(TestResult(test, GradeStatus.NOT_GRADED, "left out on request (--no-model)"))
        elif test.stage != reached and any(one.status is GradeStatus.FAILED for one in result.results):
            result.results.append(TestResult(test, GradeStatus.SKIPPED, "not run: everything above has to pass first"))
        else:
            reached = test.stage
            with bench() as one:
                result.results.append(run_test(test, one))
        report(result)
    if assignment.measure and not any(one.status is GradeStatus.FAILED for one in result.results):
        with bench() as one:
            try:
                result.performance = assignment.measure(one)
            except (Misbehaviour, Exception) as error:  # the score stands; only the speed is lost
                result.isolation["performance"] = f"not measured: {error}"
    result.finished = True
    report(result)
    return result


def run_test(test: Test, bench: Bench) -> TestResult:
    """Run one test in a fresh worker."""
    try:
        test.check(bench)
        bench.process.finish()
        failure = None
    except Failed as failed:
        failure = _tampering(bench) or failed.failure
    except Misbehaviour as misbehaviour:
        failure = misbehaviour.failure or Failure(misbehaviour.message, verdict=misbehaviour.verdict)
    except StudentError as error:
        failure = Failure(raised_message("it", error, "your code"))
    except ModelError as error:
        raise CannotBeGraded(f"{test.name} needs a model: {error}; --no-model grades without one") from None
    except CannotBeGraded:
        raise
    except Exception as error:  # a return value that confuses the grader must not pass
        failure = Failure(f"the grader could not interpret what your code returned: {error!r}")
    finally:
        bench.restart()
    if failure and UNWRITTEN in failure.message and (left := to_do(bench.submission.path)):
        failure = replace(failure, drawing=("still to be written:", *left), script=None, events=())
    if failure is None:
        return TestResult(test, GradeStatus.PASSED, output=bench.output)
    return TestResult(test, GradeStatus.FAILED, failure.message, failure, bench.output)


def _tampering(bench: Bench) -> Failure | None:
    """Return a failure if the submission replaced members of other modules. It takes precedence over other failures."""
    try:
        bench.process.finish()
    except Misbehaviour as misbehaviour:
        if misbehaviour.verdict is Verdict.TAMPERED:
            return Failure(misbehaviour.message, verdict=misbehaviour.verdict)
    return None
