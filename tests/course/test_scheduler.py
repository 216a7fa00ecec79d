"""Assignment 4: right ones get full marks, however unusual; failures are drawn and told. (Starter and seeded bugs are
in `test_every_assignment.py`.)"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from minipaged.course.assignments.scheduler.checks import ASSIGNMENT
from minipaged.course.assignments.scheduler.mutants import ENGINE, IDLE, NEVER, PURE, REFERENCE, SEEDED, VICTIM
from minipaged.course.grader.assignment import GradeStatus, Submission
from minipaged.events import StepFailed
from tests.course import harness
from tests.course.harness import folded, run_script, submit
from tests.course.submissions import REFERENCE as ALLOCATOR

MUTANTS = SEEDED.mutants
result_of = partial(harness.result_of, ASSIGNMENT)


def test_a_failure_is_drawn_and_told_as_events_that_can_be_folded(tmp_path: Path) -> None:
    result = result_of(VICTIM, submit(MUTANTS["the oldest is starved"].source, tmp_path))
    assert result.failure is not None
    heading, *rest = result.failure.drawing
    assert heading.split()[:4] == ["request", "arrived", "state", "sequences"]
    assert any(line.startswith("pool: ") for line in rest)
    memory = folded(result.failure)
    last = result.failure.events[-1]
    assert isinstance(last, StepFailed)
    assert last.error == result.message
    assert {request.name for request in memory.requests.values()} >= {"A", "B"}


def test_what_is_wrong_from_the_start_is_not_taken_for_a_matter_of_memory(tmp_path: Path) -> None:
    submission = submit(MUTANTS["everything fits"].source, tmp_path)
    first, pure = (result_of(name, submission) for name in (NEVER, PURE))
    assert first.failure == pure.failure, "told as 'fails like ...'"


def test_a_request_that_waits_for_tokens_is_told_how_many_it_needs(tmp_path: Path) -> None:
    """The student forgot that a prompt may run in chunks."""
    forgot = REFERENCE.replace("request.tokens_to_run if request.decodes else 1", "request.tokens_to_run")
    result = result_of(IDLE, submit(forgot, tmp_path))
    assert re.search(r"has to be admitted; it needs at least 1 token of the \d+ left for it, and ", result.message)


LATE = REFERENCE.replace(
    "key=self.turn).request_id", "key=lambda r: r.arrival * (-1) ** (len(r.request_id) - 1)).request_id"
)


def test_the_engine_alone_catches_a_bug_too_and_gives_a_script(tmp_path: Path) -> None:
    """One that shows with longer names only."""
    result = result_of(ENGINE, submit(LATE, tmp_path))
    assert result.status is GradeStatus.FAILED
    assert result.message.startswith("in the engine, workload ")
    assert result.failure is not None
    assert result.failure.script is not None
    assert result.failure.script.count("answer = ") == 1, "one question shows it"
    assert run_script(result.failure.script, tmp_path).returncode == 1


def test_a_carried_allocator_is_used_and_its_bug_is_named_in_the_engine(tmp_path: Path) -> None:
    for source, status in (
        (ALLOCATOR, GradeStatus.PASSED),
        (ALLOCATOR.replace("[block] += 1", "[block] += 0"), GradeStatus.FAILED),
    ):
        (tmp_path / "allocator.py").write_text(source)
        carried = {"block-allocator": Submission(tmp_path / "allocator.py")}
        result = result_of(ENGINE, submit(REFERENCE, tmp_path), carried=carried)
        assert result.status is status, result.message
    assert "exact-references" in result.message
