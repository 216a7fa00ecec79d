"""The two block allocators, side by side: whatever the one answers, the other answers, to the block and to the word.

Each call goes to both. What they return or raise, and all counts afterwards, must be the same; at the end both are
emptied, which shows the order of their free blocks. Checked after every call, those that raise included:
atomic-failure. (That the reference is right is shown by `tests/reference/test_block_allocator.py`.)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from minipaged import contracts
from minipaged.errors import BlockNotAllocated
from minipaged.fast import block_allocator as fast
from minipaged.reference import block_allocator as reference
from tests.effort import examples, scaled

FORMS: dict[str, Callable[[list[int]], Iterable[int]]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "values": lambda blocks: dict(enumerate(blocks)).values(),
    "array i": lambda blocks: array("i", blocks),
    "array q": lambda blocks: array("q", blocks),
    "int32": lambda blocks: np.array(blocks, np.int32),
    "int64": lambda blocks: np.array(blocks, np.int64),
    "every other int64": lambda blocks: np.repeat(np.array(blocks, np.int64), 2)[::2],
}
"""In what the blocks of a `*_many` call may come."""

FAR_OUTSIDE = (2**31, 2**32, -(2**31) - 1, 2**63, 2**64, -(2**64))
"""Numbers that are small again, 0 even, for somebody who keeps too few bits of them."""


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, as plain numbers; or what it raises."""
    try:
        result = call()
    except Exception as error:
        return type(error), str(error)
    if result is None:
        return None
    return [int(block) for block in result] if isinstance(result, Sequence) else int(result)


class Pair(RuleBasedStateMachine):
    """A reference and a fast allocator, given the same calls."""

    largest_pool: int

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.num_blocks = data.draw(st.integers(1, self.largest_pool))
        self.allocators: list[contracts.BlockAllocator] = [
            reference.BlockAllocator(self.num_blocks),
            fast.BlockAllocator(self.num_blocks),
        ]
        num_held = data.draw(st.integers(0, self.num_blocks))
        self.both(lambda allocator: allocator.allocate_many(num_held))

    def both(self, call: Callable[[contracts.BlockAllocator], Any]) -> None:
        expected, actual = (outcome(lambda a=a: call(a)) for a in self.allocators)
        assert actual == expected

    def number(self, data: st.DataObject) -> int:
        """A block, or now and then a number outside the pool."""
        outside = st.sampled_from([-self.num_blocks, -1, self.num_blocks, *FAR_OUTSIDE])
        block = st.integers(0, self.num_blocks - 1)
        return data.draw(st.integers(0, 9).flatmap(lambda chance: block if chance else outside))

    def several(self, data: st.DataObject) -> list[int]:
        """Blocks that are held, each at most as often as it is held; and often a number that is wrong among them."""
        counts = [self.allocators[0].ref_count(block) for block in range(self.num_blocks)]
        held = [block for block, count in enumerate(counts) for _ in range(count)]
        some = data.draw(st.permutations(held))[data.draw(st.integers(0, len(held))) :]
        free = [block for block, count in enumerate(counts) if count == 0]
        wrong = data.draw(st.sampled_from(["nothing", "nothing", "a number", "a free block"]))
        if wrong == "a number":
            some.insert(data.draw(st.integers(0, len(some))), self.number(data))
        elif wrong == "a free block" and free:
            some.insert(data.draw(st.integers(0, len(some))), data.draw(st.sampled_from(free)))
        return some

    @rule()
    def allocate(self) -> None:
        self.both(lambda allocator: allocator.allocate())

    @rule(data=st.data(), method=st.sampled_from(["share", "free", "ref_count", "copy_on_write"]))
    def name_one(self, data: st.DataObject, method: str) -> None:
        block = self.number(data)
        self.both(lambda allocator: getattr(allocator, method)(block))

    @rule(data=st.data())
    def allocate_many(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(-1, self.num_blocks + 1))
        self.both(lambda allocator: allocator.allocate_many(n))

    @rule(data=st.data(), method=st.sampled_from(["share_many", "free_many"]), form=st.sampled_from(list(FORMS)))
    def name_many(self, data: st.DataObject, method: str, form: str) -> None:
        blocks = self.several(data)
        if form in ("array i", "int32"):
            assume(all(-(2**31) <= block < 2**31 for block in blocks))
        elif form not in ("list", "tuple", "iterator", "values"):
            assume(all(-(2**63) <= block < 2**63 for block in blocks))
        self.both(lambda allocator: getattr(allocator, method)(FORMS[form](blocks)))

    @rule(data=st.data(), method=st.sampled_from(["share_many", "free_many"]))
    def name_something_else(self, data: st.DataObject, method: str) -> None:
        """Half a block, in the middle of others: refused, and nothing changed."""
        blocks: list[Any] = self.several(data)
        blocks.insert(data.draw(st.integers(0, len(blocks))), 0.5)
        for allocator in self.allocators:
            with pytest.raises((TypeError, BlockNotAllocated)):
                getattr(allocator, method)(blocks)

    @invariant()
    def the_same_blocks_are_held_as_often(self) -> None:
        expected, actual = (
            (a.num_blocks, a.num_free, [a.ref_count(block) for block in range(self.num_blocks)])
            for a in self.allocators
        )
        assert actual == expected

    def teardown(self) -> None:
        """The free blocks come in the same order."""
        if hasattr(self, "allocators"):
            self.both(lambda allocator: allocator.allocate_many(allocator.num_free))


@scaled
@pytest.mark.parametrize(
    ("many", "largest_pool"),
    [
        pytest.param(3, 7, id="a few by the loop, more by NumPy"),
        pytest.param(fast.MANY, 7, id="all by the loop"),
        pytest.param(fast.MANY, 2 * fast.MANY, id="as it is"),
    ],
)
def test_every_call_has_the_same_outcome(many: int, largest_pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "MANY", many)
    machine = type("Machine", (Pair,), {"largest_pool": largest_pool})
    thorough = 250 if largest_pool < 10 else 30
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(thorough), stateful_step_count=25))


@pytest.mark.parametrize("method", ["share_many", "free_many"])
@pytest.mark.parametrize("wrong", [2 * fast.MANY - 1, -1, -2 * fast.MANY, 2 * fast.MANY, *FAR_OUTSIDE])
def test_one_wrong_number_among_many_is_found_and_named(method: str, wrong: int) -> None:
    """Atomic-failure; the first of these numbers is a block that is free."""
    outcomes = []
    for allocator in (reference.BlockAllocator(2 * fast.MANY), fast.BlockAllocator(2 * fast.MANY)):
        blocks = list(allocator.allocate_many(fast.MANY))
        blocks.insert(7, wrong)
        refused = outcome(lambda a=allocator, blocks=blocks: getattr(a, method)(blocks))
        counts = [allocator.ref_count(block) for block in range(allocator.num_blocks)]
        outcomes.append((refused, counts, outcome(lambda a=allocator: a.allocate_many(a.num_free))))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0][0] is BlockNotAllocated
