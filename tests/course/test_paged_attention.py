"""Assignment 3: the starter is told where to begin, right functions get full marks, every seeded bug is caught."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from minipaged.course.assignments.paged_attention import checks as paged_attention
from minipaged.course.assignments.paged_attention.checks import ASSIGNMENT
from minipaged.course.assignments.paged_attention.mutants import LLAMA, MEMORY, PLAIN, SEEDED
from minipaged.course.grader import search
from minipaged.course.grader.assignment import Status, Submission
from minipaged.course.grader.formats import text
from minipaged.course.grader.grading import grade
from minipaged.events import StepFailed, from_json
from minipaged.llm import LoadedModel
from minipaged.replay.state import State
from tests.course import harness
from tests.course.harness import ROOT, run_script, submit
from tests.effort import quick_cases, thorough

MUTANTS = SEEDED.mutants
STARTER = ROOT / "assignments" / "3_paged_attention" / "starter.py"
REFERENCE = (ROOT / "minipaged" / "reference" / "attention.py").read_text()
result_of = partial(harness.result_of, ASSIGNMENT)


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for these tests, and faster."""
    monkeypatch.setattr(search, "EXAMPLES", 60)
    monkeypatch.setattr(paged_attention, "ENGINE_RUNS", 2)
    monkeypatch.setattr(paged_attention, "ROUNDS", 2)


def test_the_untouched_starter_gets_no_points_and_is_told_where_to_begin() -> None:
    result = grade(ASSIGNMENT, Submission(STARTER), model=None)
    assert result.score == 0
    assert [one.status for one in result.results] == [Status.FAILED] * 8 + [Status.SKIPPED, Status.NOT_GRADED]
    for one in result.results[:8]:
        assert one.message == (
            "paged_attention is not written yet (starter.py:23): replace its `raise NotImplementedError`"
        )


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


@quick_cases(3)
@pytest.mark.parametrize("name", [name for name in MUTANTS if MUTANTS[name].test != LLAMA])
def test_every_seeded_bug_is_caught_and_its_counterexample_fails_by_itself(name: str, tmp_path: Path) -> None:
    result = result_of(MUTANTS[name].test, submit(MUTANTS[name].source, tmp_path))
    assert result.failure is not None
    assert result.failure.drawing or MUTANTS[name].test == MEMORY
    assert result.failure.script is not None
    ran = run_script(result.failure.script, tmp_path)
    assert ran.returncode == 1, result.failure.script + ran.stdout + ran.stderr
    (tmp_path / "mine.py").write_text(PLAIN)
    fixed = run_script(result.failure.script, tmp_path)
    assert fixed.returncode == 0, "the script fails with a right one too:\n" + result.failure.script + fixed.stderr


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


def test_the_same_seed_gives_the_same_counterexample(tmp_path: Path) -> None:
    submission = submit(MUTANTS["sees the future"].source, tmp_path)
    first, again = (result_of("several new tokens: causal", submission) for _ in range(2))
    assert first.failure is not None
    assert first == again


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


def test_the_model_test_fails_for_a_wrong_attention(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = LoadedModel.load
    monkeypatch.setattr(LoadedModel, "load", lambda model, tier: load(tiny_model, tier))
    for source, status in ((REFERENCE, Status.PASSED), (MUTANTS["sees the future"].source, Status.FAILED)):
        result = result_of("SmolLM2", submit(source, tmp_path))
        assert result.status is status, result.message
