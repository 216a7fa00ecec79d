"""Assignment 9: failures are drawn and told, and the right cache finds what the engine's own finds. (Starter and seeded
bugs are in `test_every_assignment.py`.)"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minipaged.course.assignments.prefix_cache.checks import ASSIGNMENT
from minipaged.course.assignments.prefix_cache.mutants import CHILDREN, SEEDED
from minipaged.engine.partial_hits import keep
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from tests.course import harness
from tests.course.harness import folded, submit

result_of = partial(harness.result_of, ASSIGNMENT)


def test_a_failure_is_drawn_and_told_as_events_that_can_be_folded(tmp_path: Path) -> None:
    source = SEEDED.mutants["the shorter one stays"].source
    failure = result_of("the last block is kept", submit(source, tmp_path)).failure
    assert failure is not None
    assert failure.message == (
        "after cache.publish([0, 1, 0, 1, 1, 0], b) block 2 has reference count 1; it should be 0: nobody holds it"
    )
    assert failure.drawing == (
        "block  after  cached tokens  held by",
        "0      -      0 1            b, the cache",
        "1      0      0 1            b, the cache",
        "3      1      1 0            b, the cache",
        "b: [0, 1, 0, 1, 1, 0] in [0, 1, 3]",
    )
    memory = folded(failure)
    assert [sequence.table for sequence in memory.sequences.values()] == [[0, 1, 3]]
    assert set(memory.cached) == {0, 1, 3}


@pytest.mark.parametrize("answer", ["None", "found", "(found, None)", "(found, num_tokens, 0)", "([None], 1)"])
def test_an_answer_of_another_kind_is_told(answer: str, tmp_path: Path) -> None:
    source = CHILDREN.replace("return found, num_tokens", f"return {answer}")
    failure = result_of("an empty cache", submit(source, tmp_path)).failure
    assert failure is not None
    assert "it has to return a list of blocks, and a number of tokens" in failure.message
    assert failure.script is not None
    harness.run_script(failure.script, tmp_path)


def ours(tokens: list[int], table: BlockTable, cache: PrefixCache, allocator: BlockAllocator) -> None:
    """Publish as the engine does when a sequence ends."""
    list(cache.publish(tokens, table, 0))
    if (entry := keep(cache, tokens, table, allocator)) and (shorter := cache.redundant(entry.block)) is not None:
        cache.drop(shorter)


def test_the_right_cache_finds_as_many_tokens_as_the_engines_own() -> None:
    for seed in range(200):
        r, made = random.Random(seed), dict[str, Any]()
        exec(CHILDREN, made)
        block_size = r.randint(1, 4)
        pools = BlockAllocator(200), BlockAllocator(200)
        students, own = made["PrefixCache"](block_size, pools[0]), PrefixCache(block_size, pools[1])
        for _ in range(8):
            tokens = [r.randint(0, 1) for _ in range(r.randint(1, 9))]
            assert students.match(tokens)[1] == own.match(tokens).num_tokens, seed
            tables = [BlockTable(block_size, pool) for pool in pools]
            for table in tables:
                table.append(len(tokens))
            students.publish(tokens, tables[0])
            ours(tokens, tables[1], own, pools[1])
            for table in tables:
                table.trim(0)
