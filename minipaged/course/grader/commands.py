"""The code behind `minipaged grade` and `minipaged grade-tests`.

The exit status is 0 for full marks, 1 for less, 2 for a submission that cannot be graded, 130 after Ctrl-C. With
`--output FILE` the file has the result so far after every test. It is written to a temporary file and moved into place,
so that the file is never incomplete.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minipaged.course.grader.assignment import (
    CannotBeGraded,
    Grade,
    Submission,
    TestResult,
    find_assignment,
    needs_hypothesis,
)
from minipaged.course.grader.formats import FORMATS, closing, fails_like, heading, result_lines
from minipaged.course.grader.grading import grade


@dataclass(frozen=True, slots=True)
class Report:
    """The format and the destination of a grade."""

    form: str = "terminal"
    output: Path | None = None
    counterexamples: Path | None = None
    """The folder for the failures' scripts and recorded runs. Each submission has a subfolder of its name."""

    def __post_init__(self) -> None:
        if self.form not in FORMATS:
            raise CannotBeGraded(f"--format is {self.form!r}; choose one of {', '.join(FORMATS)}")

    def so_far(self, grade: Grade) -> None:
        """Write or print the grade. Called after each test, and once more at the end."""
        if self.output:
            write_whole(self.output, FORMATS[self.form](grade))
            if grade.finished:
                print(f"score: {grade.score} of {grade.max_score}, written to {self.output}", flush=True)
        elif self.form == "terminal":
            if grade.finished:
                print("\n".join(closing(grade)), flush=True)
            else:
                before = heading(grade) if len(grade.results) == 1 else []
                print("\n".join([*before, *result_lines(grade.results[-1], grade.results[:-1])]), flush=True)
        elif grade.finished:
            print(FORMATS[self.form](grade), end="", flush=True)
        if self.counterexamples and not grade.finished:
            folder = self.counterexamples / grade.submission.path.stem
            self._keep_counterexample(folder, grade.results[-1], grade.results[:-1])

    def refused(self, assignment: str, submission: Submission | None, message: str) -> None:
        """Report that the submission cannot be graded, in the output file too, for programs that wait for it."""
        print(f"cannot be graded: {message}", file=sys.stderr)
        written = FORMATS[self.form](Grade.refused(assignment, submission, message))
        if self.output:
            with contextlib.suppress(CannotBeGraded):  # an unwritable file may itself be the error
                write_whole(self.output, written)
        elif self.form != "terminal":
            print(written, end="")

    def _keep_counterexample(self, folder: Path, result: TestResult, earlier: Sequence[TestResult]) -> None:
        stem = re.sub(r"\W+", "-", result.test.name.lower()).strip("-")
        failure = None if result.test.hidden else result.failure
        contents = {
            ".py": failure and failure.script,
            ".jsonl": failure and "".join(f"{event.to_json()}\n" for event in failure.events),
        }
        for suffix, content in contents.items():
            file = folder / f"{stem}{suffix}"
            if content:
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(file, content)
                if self.form == "terminal" and not self.output and fails_like(result, earlier) is None:
                    print(f"          {'saved as' if suffix == '.py' else 'as a run'}: {file}", flush=True)
            else:
                file.unlink(missing_ok=True)  # left by an earlier run


def write_whole(path: Path, content: str) -> None:
    """Write the file as a whole; on an error the old file stays. Raises CannotBeGraded."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(content, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CannotBeGraded(f"cannot write {path}: {error.strerror}") from None


def run_grade(
    name: str,
    spec: str,
    report: Report,
    *,
    seed: int,
    model: str | None,
    carried: Sequence[str] = (),
    call_seconds: float | None = None,
    test_seconds: float | None = None,
) -> int:
    """Run `minipaged grade` and return the exit status."""

    def work() -> Grade:
        assignment = find_assignment(name)
        limits = assignment.limits
        if call_seconds is not None:
            limits = replace(limits, call_seconds=call_seconds)
        if test_seconds is not None:
            limits = replace(limits, test_seconds=test_seconds)
        return grade(
            replace(assignment, limits=limits),
            Submission.parse(spec),
            seed=seed,
            carried=dict(_carried(one) for one in carried),
            model=model,
            report=report.so_far,
        )

    return _status(name, spec, report, work)


def run_grade_tests(name: str, spec: str, report: Report) -> int:
    """Run `minipaged grade-tests` and return the exit status."""

    def work() -> Grade:
        with needs_hypothesis():
            from minipaged.course.grader.student_tests import grade_tests

        return grade_tests(name, Submission.parse(spec), report=report.so_far)

    return _status(f"{name} tests", spec, report, work)


def _status(name: str, spec: str, report: Report, work: Callable[[], Grade]) -> int:
    try:
        if os.name != "posix":
            raise CannotBeGraded("grading needs Linux or macOS, which can isolate student code")
        return 0 if work().full_marks else 1
    except CannotBeGraded as error:
        try:
            submission = Submission.parse(spec)
        except CannotBeGraded:
            submission = None
        report.refused(name, submission, str(error))
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _carried(spec: str) -> tuple[str, Submission]:
    name, equals, file = spec.partition("=")
    if not equals:
        raise CannotBeGraded(
            f"--with is {spec!r}; write it as ASSIGNMENT=FILE.py, for example block-allocator=my_allocator.py"
        )
    return name, Submission.parse(file)
