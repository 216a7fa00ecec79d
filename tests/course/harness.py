"""What tests of every assignment do: hand something in, run one test on it, run the script of a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import minipaged
from minipaged.course.grader.assignment import Assignment, Bench, Failed, Failure, Submission, Test, TestResult
from minipaged.course.grader.grading import run_test
from minipaged.course.sandbox.contract import Misbehaviour
from minipaged.course.sandbox.process import WorkerPool
from minipaged.events import StepFailed, from_json
from minipaged.replay.state import State

ROOT = Path(minipaged.__file__).parent.parent


def submit(source: str, folder: Path, name: str | None = None, *, file: str = "mine.py") -> Submission:
    path = folder / file
    path.write_text(source)
    return Submission(path, name)


def result_of(
    assignment: Assignment,
    name: str,
    submission: Submission,
    seed: int = 0,
    *,
    carried: Mapping[str, Submission] | None = None,
) -> TestResult:
    """Of the test of that name alone."""
    [test] = [test for test in assignment.tests if test.name == name]
    with Bench(assignment, submission, seed, carried or {}) as bench:
        return run_test(test, bench)


def failure_of(test: Test, path: Path, bench: Bench) -> Failure | None:
    """What the test finds in that file, in a worker that has graded others."""
    bench.submission = Submission(path)
    assert bench.process
    bench._load_part()
    try:
        test.check(bench)
    except Failed as failed:
        return failed.failure
    except Misbehaviour as misbehaviour:
        bench.restart()
        found: Failure | None = misbehaviour.failure
        return found
    return None


def folded(failure: Failure) -> State:
    """What the failure's events come to, read as `minipaged demo --replay` reads them; the last is the failed step."""
    state = State()
    for event in failure.events:
        state.apply(from_json(event.to_json()))
    assert isinstance(failure.events[-1], StepFailed)
    return state


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "counterexample.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-B", path],  # the next one may be of the same second and size
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=120,
        check=False,
    )


def run_script_in_worker(
    script: str, part: Assignment, submission: Path, folder: Path, workers: WorkerPool
) -> subprocess.CompletedProcess[str]:
    """Runs a script whose imports take seconds: the worker has made them before."""
    path = folder / "counterexample.py"
    path.write_text(script.replace(json.dumps(str(submission.parent)), '"."'))
    limits = replace(part.limits, call_seconds=120.0)
    with workers.start(limits, ("tests.course.as_program", *part.modules)) as process:
        process.copy(submission)
        status, said = process.modules[0].call("run", process.copy(path))
        process.finish()
    return subprocess.CompletedProcess(path, status, "", said)
