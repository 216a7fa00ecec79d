"""Assignment 2: the starter is told where to begin, right tables get full marks, every seeded bug is caught."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from minipaged.course.assignments.block_table import checks as block_table
from minipaged.course.assignments.block_table.checks import ASSIGNMENT
from minipaged.course.assignments.block_table.mutants import REFERENCE, SEEDED, UNUSUAL
from minipaged.course.grader import search
from minipaged.course.grader.assignment import Status, Submission
from minipaged.course.grader.formats import text
from minipaged.course.grader.grading import grade
from minipaged.events import StepFailed, from_json
from minipaged.llm import LoadedModel
from minipaged.replay.state import State
from tests.course import harness
from tests.course.harness import ROOT, run_script, submit
from tests.course.submissions import REFERENCE as ALLOCATOR
from tests.effort import quick_cases, thorough

MUTANTS = SEEDED.mutants
STARTER = ROOT / "assignments" / "2_block_table" / "starter.py"
result_of = partial(harness.result_of, ASSIGNMENT)


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for these tests, and faster."""
    monkeypatch.setattr(search, "EXAMPLES", 100)
    monkeypatch.setattr(block_table, "ENGINE_WORKLOADS", 3)


def test_the_untouched_starter_gets_no_points_and_is_told_where_to_begin() -> None:
    result = grade(ASSIGNMENT, Submission(STARTER), model=None)
    assert result.score == 0
    assert [one.status for one in result.results] == [Status.FAILED] * 9 + [Status.SKIPPED, Status.NOT_GRADED]
    for one in result.results[:9]:
        assert one.message == "__init__ is not written yet (starter.py:16): replace its `raise NotImplementedError`"


def test_a_method_that_is_not_written_yet_is_named(tmp_path: Path) -> None:
    source = REFERENCE.replace("child = BlockTable", "raise NotImplementedError\n        child = BlockTable")
    result = result_of("copy-on-write", submit(source, tmp_path))
    assert result.message.startswith("fork is not written yet (mine.py:")


@thorough
@pytest.mark.model
def test_the_reference_gets_full_marks_with_smollm2_and_a_carried_allocator(tmp_path: Path) -> None:
    (tmp_path / "allocator.py").write_text(ALLOCATOR)
    carried = {"block-allocator": Submission(tmp_path / "allocator.py")}
    result = grade(ASSIGNMENT, submit(REFERENCE, tmp_path), carried=carried)
    assert result.full_marks, text(result)
    assert "100 of 100" in text(result)
    assert result.performance is not None
    assert result.performance.index > 0  # how fast: python -m benchmarks.learners


@thorough
def test_an_unusual_but_right_table_gets_full_marks(tmp_path: Path) -> None:
    result = grade(ASSIGNMENT, submit(UNUSUAL, tmp_path), model=None)
    assert result.full_marks, text(result)


@quick_cases(3)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_seeded_bug_is_caught_and_its_counterexample_fails_by_itself(name: str, tmp_path: Path) -> None:
    result = result_of(MUTANTS[name].test, submit(MUTANTS[name].source, tmp_path))
    assert result.failure is not None
    assert result.failure.drawing or name == "a block of 0 slots"
    assert result.failure.script is not None
    ran = run_script(result.failure.script, tmp_path)
    assert ran.returncode == 1, result.failure.script + ran.stdout + ran.stderr
    (tmp_path / "mine.py").write_text(REFERENCE)
    fixed = run_script(result.failure.script, tmp_path)
    assert fixed.returncode == 0, "the script fails with a right table too:\n" + result.failure.script + fixed.stderr


def test_a_failure_is_drawn_and_told_as_events_that_can_be_folded(tmp_path: Path) -> None:
    result = result_of("copy-on-write", submit(MUTANTS["never copies"].source, tmp_path))
    assert result.failure is not None
    assert result.message == "a.append(1) is to write into block 1, which a and b hold: it needs a copy of its own"
    assert result.failure.drawing == (
        "table  tokens  blocks  your table says",
        "a      3       [0, 1]  4 tokens, [0, 1] <--",
        "b      3       [0, 1]  3 tokens, [0, 1]",
        "block of allocator   0  1  2",
        "ref_count should be  2  2  0",
        "it is                2  2  0",
    )
    memory = State()
    for event in result.failure.events:
        memory.apply(from_json(event.to_json()))  # as `minipaged demo --replay` reads it
    assert [sequence.table for sequence in memory.sequences.values()] == [[0, 1], [0, 1]]
    assert isinstance(result.failure.events[-1], StepFailed)


def test_the_same_seed_gives_the_same_counterexample(tmp_path: Path) -> None:
    submission = submit(MUTANTS["trim gives nothing back"].source, tmp_path)
    first, again = (result_of("trim gives back, last first", submission) for _ in range(2))
    assert first.failure is not None
    assert first == again


def test_the_engine_alone_catches_a_bug_too(tmp_path: Path) -> None:
    result = result_of("the engine, on a small model", submit(MUTANTS["never copies"].source, tmp_path))
    assert result.failure is not None
    assert "exclusive-write" in result.message


def test_a_carried_allocator_with_a_bug_is_named_in_the_engine(tmp_path: Path) -> None:
    (tmp_path / "allocator.py").write_text(ALLOCATOR.replace("self._ref_counts[block] += 1", "pass"))
    carried = {"block-allocator": Submission(tmp_path / "allocator.py")}
    result = result_of("the engine, on a small model", submit(REFERENCE, tmp_path), carried=carried)
    assert result.failure is not None
    assert "exact-references" in result.message
    assert "the allocator that you brought along: after " in result.message


def test_the_model_test_fails_for_a_wrong_table(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = LoadedModel.load
    monkeypatch.setattr(LoadedModel, "load", lambda model, tier: load(tiny_model, tier))
    for source, status in ((REFERENCE, Status.PASSED), (MUTANTS["fork without references"].source, Status.FAILED)):
        result = result_of("SmolLM2", submit(source, tmp_path))
        assert result.status is status, result.message
