"""Assignment 5: right ones get full marks, however unusual; failures are drawn and told. (Starter and seeded bugs are
in `test_every_assignment.py`.)"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from minipaged.course.assignments.beam_search import checks as beam_search
from minipaged.course.assignments.beam_search.checks import ASSIGNMENT
from minipaged.course.assignments.beam_search.mutants import FIRST, REFERENCE, SEEDED, TOGETHER
from minipaged.course.grader.assignment import Bench, GradeStatus, Performance, Submission
from minipaged.events import StepFailed
from tests.course import harness
from tests.course.harness import folded, run_script, submit
from tests.effort import quick_cases

MUTANTS = SEEDED.mutants
result_of = partial(harness.result_of, ASSIGNMENT)


def test_a_failure_is_drawn_and_told_as_events_that_can_be_folded(tmp_path: Path) -> None:
    result = result_of(TOGETHER, submit(MUTANTS["all stem from the first beam"].source, tmp_path))
    assert result.failure is not None
    heading, *candidates = [line for line in result.failure.drawing if "block table" not in line]
    assert heading.split() == ["rank", "beam", "token", "sum", "should", "be", "your", "search", "says"]
    assert any(line.endswith("<--") for line in candidates)
    memory = folded(result.failure)
    last = result.failure.events[-1]
    assert isinstance(last, StepFailed)
    assert last.error == result.message
    assert len(memory.sequences) > 1


LATE = REFERENCE.replace(
    "return BeamStep(survivors, finished)",
    "return BeamStep(survivors[::-1] if logits.shape[1] > 5 else survivors, finished)",
)


def test_the_engine_alone_catches_a_bug_too_and_gives_a_script(tmp_path: Path) -> None:
    """One that shows with wide vocabularies only."""
    result = result_of("the engine, on a small model", submit(LATE, tmp_path))
    assert result.status is GradeStatus.FAILED
    assert result.message.startswith("in the engine, workload ")
    assert result.failure is not None
    assert result.failure.script is not None
    assert run_script(result.failure.script, tmp_path).returncode == 1


def test_speed_is_measured_beside_the_references(tmp_path: Path) -> None:
    slow = REFERENCE.replace(
        "        sums = ", "        for _ in range(20):\n            log_softmax(logits, rows)\n        sums = ", 1
    )
    assert slow != REFERENCE
    own, slower = (measured(submit(source, tmp_path)) for source in (REFERENCE, slow))
    assert own.operations == "steps"
    assert slower.index < 0.8 * own.index


def measured(submission: Submission) -> Performance:
    with Bench(ASSIGNMENT, submission, 0) as bench:
        return beam_search.measure(bench)


NOT_STEPS = ("None", "3", "BeamStep(None, [])", "BeamStep([0], [])", "BeamStep([], [(1, 2, 3)])", "object()")


@quick_cases(2)
@pytest.mark.parametrize("value", NOT_STEPS)
def test_what_is_no_step_is_told_so(value: str, tmp_path: Path) -> None:
    source = REFERENCE.replace("return BeamStep(survivors, finished)", f"return {value}")
    result = result_of(FIRST, submit(source, tmp_path))
    assert "it has to return a BeamStep" in result.message
    assert result.failure is not None
    assert result.failure.script is not None
    assert run_script(result.failure.script, tmp_path).returncode == 1
