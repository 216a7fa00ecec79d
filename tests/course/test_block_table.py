"""Assignment 2: right tables get full marks, however unusual; failures are drawn and told. (Starter and seeded bugs are
in `test_every_assignment.py`.)"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from minipaged.course.assignments.block_table.checks import ASSIGNMENT
from minipaged.course.assignments.block_table.mutants import REFERENCE, SEEDED
from minipaged.course.grader.assignment import Submission
from tests.course import harness
from tests.course.harness import folded, submit
from tests.course.submissions import REFERENCE as ALLOCATOR

MUTANTS = SEEDED.mutants
result_of = partial(harness.result_of, ASSIGNMENT)


def test_a_method_that_is_not_written_yet_is_named(tmp_path: Path) -> None:
    source = REFERENCE.replace("child = BlockTable", "raise NotImplementedError\n        child = BlockTable")
    result = result_of("copy-on-write", submit(source, tmp_path))
    assert result.message.startswith("fork is not written yet (mine.py:")


def test_a_failure_is_drawn_and_told_as_events_that_can_be_folded(tmp_path: Path) -> None:
    result = result_of("copy-on-write", submit(MUTANTS["never copies"].source, tmp_path))
    assert result.failure is not None
    wrong = "a.append(1) will write into block 1, which is held by a and b: the table needs a copy of its own"
    assert result.message == wrong
    assert result.failure.drawing == (
        "table  tokens  blocks  your table says",
        "a      3       [0, 1]  4 tokens, [0, 1] <--",
        "b      3       [0, 1]  3 tokens, [0, 1]",
        "block of allocator   0  1  2",
        "ref_count should be  2  2  0",
        "it is                2  2  0",
    )
    memory = folded(result.failure)
    assert [sequence.table for sequence in memory.sequences.values()] == [[0, 1], [0, 1]]


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
