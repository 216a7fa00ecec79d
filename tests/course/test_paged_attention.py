"""Assignment 3: right ones get full marks, however unusual; failures are drawn and told. (Starter and seeded bugs are
in `test_every_assignment.py`.)"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from minipaged.course.assignments.paged_attention.checks import ASSIGNMENT
from minipaged.course.assignments.paged_attention.mutants import MEMORY, SEEDED
from tests.course import harness
from tests.course.harness import ROOT, folded, submit

MUTANTS = SEEDED.mutants
REFERENCE = (ROOT / "minipaged" / "reference" / "attention.py").read_text()
result_of = partial(harness.result_of, ASSIGNMENT)


def test_memory_that_is_not_counted_counts_against_it(tmp_path: Path) -> None:
    """Python lets everybody reset the peak."""
    source = MUTANTS["gathers the whole context"].source.replace("    return output", "    RESET\n    return output")
    source = source.replace("RESET", "del everything, block_tables\n    __import__('tracemalloc').reset_peak()")
    result = result_of(MEMORY, submit(source, tmp_path))
    assert "stopped tracemalloc, or reset its peak" in result.message


def test_a_failure_says_where_and_its_events_can_be_folded(tmp_path: Path) -> None:
    result = result_of("contexts over several blocks", submit(MUTANTS["sums do not fade"].source, tmp_path))
    assert result.failure is not None
    assert "sequence 0, position 1 (of 2), query head 0: the output is [" in result.message
    memory = folded(result.failure)
    assert [len(sequence.table) for sequence in memory.sequences.values()] == [2]


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
