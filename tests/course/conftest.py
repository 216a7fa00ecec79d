"""What the tests of the course have in common: fewer examples than a grade has. Enough for these tests, and faster."""

from __future__ import annotations

import pytest

from minipaged.course.assignments.beam_search import checks as beam_search
from minipaged.course.assignments.block_allocator import checks as block_allocator
from minipaged.course.assignments.block_table import checks as block_table
from minipaged.course.assignments.paged_attention import checks as paged_attention
from minipaged.course.assignments.scheduler import checks as scheduler
from minipaged.course.assignments.under_load import checks as under_load
from minipaged.course.grader import search

FEWER = (
    (search, "EXAMPLES", 100),
    (block_allocator, "ENGINE_WORKLOADS", 5),
    (block_allocator, "TIMED_WORKLOADS", 5),
    (block_table, "ENGINE_WORKLOADS", 3),
    (paged_attention, "ENGINE_RUNS", 2),
    (paged_attention, "ROUNDS", 2),
    (scheduler, "ENGINE_WORKLOADS", 3),
    (scheduler, "TRACED_REQUESTS", 20),
    (beam_search, "ENGINE_WORKLOADS", 4),
    (under_load, "ENGINE_WORKLOADS", 2),
)


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, number in FEWER:
        monkeypatch.setattr(module, name, number)
