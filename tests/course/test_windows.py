"""Assignment 11: failures are drawn and told, and right classes answer as the engine does. (Starter and seeded bugs are
in `test_every_assignment.py` and `test_student_tests.py`.)"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minipaged.course.assignments.windows.checks import ASSIGNMENT
from minipaged.course.assignments.windows.mutants import FIRST, LAST_SEEN_BY, SEEDED
from minipaged.course.grader.formats import explanation
from minipaged.engine.grouped_prefix_cache import GroupedPrefixCache
from minipaged.engine.grouped_table import GroupedTable
from minipaged.events import HOLE
from minipaged.handover.block_hashes import block_hashes
from minipaged.reference.block_allocator import BlockAllocator
from tests.course import harness
from tests.course.harness import folded, run_script, submit

result_of = partial(harness.result_of, ASSIGNMENT)
PASSED, GROUPS = "what a window has passed", "each group by its window"
OTHERS, HIT = "blocks that others hold", "a hit of a group with a window"


def test_a_block_given_back_too_early_is_drawn_and_told_as_events_that_can_be_folded(tmp_path: Path) -> None:
    failure = result_of(GROUPS, submit(SEEDED.mutants["one window for all"].source, tmp_path)).failure
    assert failure is not None
    assert failure.message == (
        "windows.give_back(a, 2) returned [[0, 1], [2, 3]]; it should return [[0, 1], [None, 3]]: in group 1 "
        "(window 2) the token at 2 sees positions 1 to 2, and block 0 of the table has position 0"
    )
    assert failure.drawing == (
        "tables of  group  window  blocks",
        "a          0      -       0 1",
        "a          1      2       2 3",
    )
    memory = folded(failure)
    assert memory.group_windows == (None, 2)
    assert [sequence.tables() for sequence in memory.sequences.values()] == [[[0, 1], [2, 3]]]


def test_a_wrong_hit_is_told_by_the_first_block_that_is_missing(tmp_path: Path) -> None:
    failure = result_of(HIT, submit(SEEDED.mutants["without its window"].source, tmp_path)).failure
    assert failure is not None
    assert failure.message == (
        "windows.longest_hit([[None, 1]]) returned [[None, 1]]; it should return [[]]: in group 0 (window 3) the token "
        "at 2 sees positions 0 to 2, and block 0 is not cached"
    )
    assert set(folded(failure).cached) == {1}


def test_siblings_and_copies_are_events_that_can_be_folded(tmp_path: Path) -> None:
    """In a class that keeps the references of all blocks but those of the second sequence."""
    failure = result_of(OTHERS, submit(SEEDED.mutants["taken from a sibling"].source, tmp_path)).failure
    assert failure is not None
    assert failure.invariant == "exact-references"
    assert [len(sequence.tables()[0]) for sequence in folded(failure).sequences.values()] == [4, 4]


def test_a_wrong_window_is_told_as_such_where_references_are_tested(tmp_path: Path) -> None:
    result = result_of(OTHERS, submit(SEEDED.mutants["a window too small"].source, tmp_path))
    assert result.test.invariant == "exact-references"
    assert explanation(result)[0].endswith("(broken: window-content)")


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("return list(range(", "return (range(", "returned an object of type range; it should return [0]"),
        ("return tables", "return None", "returned None; it should return [[]]: a list for each group"),
        ("return tables", "return tables[0]", "it should return [[]]: a list for each group"),
        ("return tables", "return [*tables, []]", "it should return [[]]: a list for each group"),
    ],
)
def test_an_answer_of_another_kind_is_told(right: str, wrong: str, told: str, tmp_path: Path) -> None:
    assert FIRST.count(right) == 1
    test = "what a token sees" if "range" in right else PASSED
    failure = result_of(test, submit(FIRST.replace(right, wrong), tmp_path)).failure
    assert failure is not None
    assert told in failure.message
    assert failure.script is not None
    assert run_script(failure.script, tmp_path).returncode == 1


@pytest.mark.parametrize("source", [FIRST, LAST_SEEN_BY])
def test_right_classes_answer_as_the_engine_does(source: str) -> None:
    made = dict[str, Any]()
    exec(source, made)
    for seed in range(200):
        r = random.Random(seed)
        block_size, groups = r.randint(1, 3), r.randint(1, 3)
        windows = [r.choice([None, r.randint(2, 9)]) for _ in range(groups)]
        pools = [BlockAllocator(NUM_BLOCKS) for _ in range(2)]
        students, table = made["Windows"](block_size, windows, pools[0]), GroupedTable(block_size, pools[1], windows)
        cache = GroupedPrefixCache(block_size, pools[1], windows)
        tokens = [r.randint(0, 9) for _ in range(8 * block_size)]
        table.append(len(tokens))
        for _ in range(NUM_BLOCKS):
            pools[0].allocate()
        list(cache.publish(tokens, table, 0))
        tables = in_groups(table.entries, groups)
        for position in sorted(r.randint(0, len(tokens)) for _ in range(3)):
            passed = [block for _, block in table.give_back(position)]
            tables = students.give_back(tables, position)
            assert tables == in_groups(table.entries, groups), seed
            assert {pools[0].ref_count(block) for block in passed} <= {0}, seed
            for _ in passed:
                pools[0].allocate()  # the hit below takes a second reference on each block that it holds
        table.trim(0)
        cache.released(r.sample(range(8 * groups), 8 * groups))
        cache.evict(r.randint(0, 4 * groups))
        found = cache.match([*tokens, 1])
        assert students.longest_hit(in_groups(cached_of(cache, tokens, groups), groups)) == in_groups(found, groups), (
            seed
        )
        assert [block for block in range(NUM_BLOCKS) if pools[0].ref_count(block) == 2] == sorted({*found} - {HOLE})


NUM_BLOCKS = 8 * 3


def in_groups(entries: Sequence[int], groups: int) -> list[list[int | None]]:
    """A table for each group, as students get it."""
    holes = [None if block == HOLE else block for block in entries]
    return [holes[group::groups] for group in range(groups)]


def cached_of(cache: GroupedPrefixCache, tokens: Sequence[int], groups: int) -> list[int]:
    """What is cached of each block of the text, in all groups."""
    keys = (cache._nodes.get(key) for key in block_hashes(tokens, cache.block_size))
    return [block for node in keys for block in (node.blocks if node else [HOLE] * groups)]
