"""What the tests of the course have in common: fewer examples than a grade has, enough for these tests; and workers
that are copies of the same few processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from minipaged.course.assignments.beam_search import checks as beam_search
from minipaged.course.assignments.block_allocator import checks as block_allocator
from minipaged.course.assignments.block_table import checks as block_table
from minipaged.course.assignments.eviction import checks as eviction
from minipaged.course.assignments.paged_attention import checks as paged_attention
from minipaged.course.assignments.scheduler import checks as scheduler
from minipaged.course.assignments.speculative import checks as speculative
from minipaged.course.assignments.under_load import checks as under_load
from minipaged.course.grader import assignment, search, student_tests
from minipaged.course.sandbox import process
from minipaged.course.sandbox.process import WorkerPool
from tests.effort import examples

FEWER = (
    (search, "EXAMPLES", 100),
    (block_allocator, "LARGE_POOLS", (8, 33)),
    (block_allocator, "ENGINE_WORKLOADS", 5),
    (block_allocator, "TIMED_WORKLOADS", 5),
    (block_table, "ENGINE_WORKLOADS", 3),
    (paged_attention, "ENGINE_RUNS", 2),
    (paged_attention, "ROUNDS", 2),
    (scheduler, "ENGINE_WORKLOADS", 3),
    (scheduler, "TRACED_REQUESTS", 20),
    (beam_search, "ENGINE_WORKLOADS", 4),
    (under_load, "ENGINE_WORKLOADS", 2),
    (eviction, "NUM_PROMPTS", 100),
    (speculative, "ENGINE_WORKLOADS", 4),
    (speculative, "DRAWS", 10_000),
)
FEWER_IN_A_PAGE = (
    (search, "EXAMPLES", 20),
    (block_allocator, "LARGE_POOLS", (8, 33)),
    *((assignment, "ENGINE_WORKLOADS", 2) for assignment in (block_allocator, block_table, scheduler, speculative)),
    (eviction, "NUM_PROMPTS", 100),
    (speculative, "DRAWS", 10_000),
)
"""What is graded twice, in a page and on the command line, has fewer still."""


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, number in FEWER:
        monkeypatch.setattr(module, name, number)


@pytest.fixture
def examples_of_a_right_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is to be found in one: a few examples are enough, and the nightly profile has more than a grade."""
    monkeypatch.setattr(search, "EXAMPLES", examples(100))


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    """For all tests of a file: what they are copies of never runs student code."""
    with WorkerPool() as workers:
        yield workers


@pytest.fixture(autouse=True)
def few_programs(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test grades, its workers are copies, and what they are copies of is started once a file."""
    for module in (assignment, student_tests):
        monkeypatch.setattr(module, "start_process", workers.start)
    for module in (process, student_tests):
        monkeypatch.setattr(module, "WorkerPool", lambda: nullcontext(workers))
