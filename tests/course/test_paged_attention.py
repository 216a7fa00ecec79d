"""Assignment 3: right ones get full marks, however unusual; failures are drawn and told. (Starter and seeded bugs are
in `test_every_assignment.py`.)"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from minipaged.course.assignments.paged_attention import checks as paged_attention
from minipaged.course.assignments.paged_attention.checks import ASSIGNMENT
from minipaged.course.assignments.paged_attention.mutants import LLAMA, MEMORY, PLAIN, SEEDED
from minipaged.course.grader import search
from minipaged.course.grader.assignment import Status
from minipaged.course.grader.formats import text
from minipaged.course.grader.grading import grade
from minipaged.events import StepFailed, from_json
from minipaged.replay.state import State
from tests.course import harness
from tests.course.harness import ROOT, submit
from tests.effort import thorough

MUTANTS = SEEDED.mutants
REFERENCE = (ROOT / "minipaged" / "reference" / "attention.py").read_text()
result_of = partial(harness.result_of, ASSIGNMENT)


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for these tests, and faster."""
    monkeypatch.setattr(search, "EXAMPLES", 60)
    monkeypatch.setattr(paged_attention, "ENGINE_RUNS", 2)
    monkeypatch.setattr(paged_attention, "ROUNDS", 2)


@thorough
@pytest.mark.model
def test_the_reference_gets_full_marks_with_smollm2(tmp_path: Path) -> None:
    result = grade(ASSIGNMENT, submit(REFERENCE, tmp_path))
    assert result.full_marks, text(result)
    assert "100 of 100" in text(result)
    assert result.performance is not None
    assert result.performance.index > 0  # how fast: python -m benchmarks.learners


@thorough
def test_an_unusual_but_right_attention_gets_full_marks_and_its_speed_told(tmp_path: Path) -> None:
    """Loops over queries, blocks and heads: a hundred times slower, and as right."""
    result = grade(ASSIGNMENT, submit(PLAIN, tmp_path), model=None)
    assert result.full_marks, text(result)
    assert result.performance is not None
    assert 0 < result.performance.index < 0.5


def test_memory_that_is_not_counted_counts_against_it(tmp_path: Path) -> None:
    """Python lets everybody reset the peak."""
    source = MUTANTS["gathers the whole context"].source.replace("    return output", "    RESET\n    return output")
    source = source.replace("RESET", "del everything, block_tables\n    __import__('tracemalloc').reset_peak()")
    result = result_of(MEMORY, submit(source, tmp_path))
    assert "stopped tracemalloc, or reset what it had counted" in result.message


def test_what_is_kept_between_calls_shows_in_a_whole_model(tmp_path: Path) -> None:
    [name] = [name for name in MUTANTS if MUTANTS[name].test == LLAMA]
    result = result_of(LLAMA, submit(MUTANTS[name].source, tmp_path))
    assert result.status is Status.FAILED
    assert result.message.startswith("a small Llama, blocks of 1: ")


def test_a_failure_says_where_and_its_events_can_be_folded(tmp_path: Path) -> None:
    result = result_of("contexts over several blocks", submit(MUTANTS["sums do not fade"].source, tmp_path))
    assert result.failure is not None
    assert "sequence 0, position 1 (of 2), query head 0: the output is [" in result.message
    memory = State()
    for event in result.failure.events:
        memory.apply(from_json(event.to_json()))  # as `minipaged demo --replay` reads it
    assert [len(sequence.table) for sequence in memory.sequences.values()] == [2]
    assert isinstance(result.failure.events[-1], StepFailed)


def test_the_answer_lies_nowhere_in_the_worker(tmp_path: Path) -> None:
    """Neither the reference's attention nor the yardstick can be imported."""
    for module, name in (
        ("reference.attention", "paged_attention"),
        ("course.assignments.paged_attention.cases", "softmax_attention"),
    ):
        source = f"def paged_attention(*arguments):\n    from minipaged.{module} import {name} as it\n    return it\n"
        result = result_of("one query, one block", submit(source, tmp_path))
        assert result.failure is not None
        assert result.failure.verdict == "forbidden"
