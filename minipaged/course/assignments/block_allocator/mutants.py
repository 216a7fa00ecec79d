"""Bugs on purpose: the reference's block allocator with one mistake each, to grade the students' tests by.

A mutant is the source of `reference/block_allocator.py` with one piece replaced. Most are mistakes that shipped
somewhere once: a count that is missed, a copy where none is needed, a double free accepted, a block handed out twice.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from minipaged.tiers import reference_tier

GUARD_OF_SHARE = "def share(self, block: int) -> None:\n        self._check_held(block)\n"
GUARD_OF_FREE = "def free(self, block: int) -> None:\n        self._check_held(block)\n"
GUARD_OF_COPY = "def copy_on_write(self, block: int) -> int:\n        self._check_held(block)\n"
RETURN_TO_POOL = "if self._ref_counts[block] == 0:\n            self._free.append(block)"
COUNT_DOWN = "self._ref_counts[block] -= 1\n        if self._ref_counts"
COPY = "copy = self.allocate()  # first, since it may raise\n        self._ref_counts[block] -= 1\n        return copy"
POP = "block = self._free.pop()"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug, by name."""

    name: str
    description: str
    right: str
    """A piece of the reference's source that occurs once."""
    wrong: str
    """What stands there instead."""

    def source(self) -> str:
        """The whole file, with the bug."""
        source = reference_source()
        assert source.count(self.right) == 1, f"{self.name}: the piece occurs {source.count(self.right)} times"
        return source.replace(self.right, self.wrong)

    def allocator(self) -> type[Any]:
        """The class, with the bug."""
        names: dict[str, Any] = {"__name__": f"mutant_{self.name.replace('-', '_')}"}
        exec(compile(self.source(), f"<mutant {self.name}>", "exec"), names)
        kind: type[Any] = names["BlockAllocator"]
        return kind


def reference_source() -> str:
    """The file that the mutants are made of."""
    module = inspect.getmodule(reference_tier().block_allocator)
    assert module is not None
    return inspect.getsource(module)


MUTANTS = (
    # --- The pool ---------------------------------------------------------------------------------
    Mutant("empty-pool-accepted", "a pool of 0 blocks is made", "if num_blocks < 1:", "if num_blocks < 0:"),
    Mutant(
        "last-block-missing",
        "the last block of the pool is never handed out",
        "list(reversed(range(num_blocks)))",
        "list(reversed(range(max(1, num_blocks - 1))))",
    ),
    Mutant(
        "one-block-too-many",
        "a block past the end of the pool is handed out",
        "list(reversed(range(num_blocks)))",
        "list(reversed(range(num_blocks + 1)))",
    ),
    Mutant(
        "numbers-from-one",
        "blocks are numbered from 1",
        "list(reversed(range(num_blocks)))",
        "list(range(num_blocks, 0, -1))",
    ),
    Mutant(
        "num-free-counts-holders",
        "num_free counts a shared block once for each holder",
        "return len(self._free)",
        "return self.num_blocks - sum(self._ref_counts)",
    ),
    Mutant(
        "num-free-never-changes",
        "num_free stays at the size of the pool",
        "return len(self._free)",
        "return self.num_blocks",
    ),
    # --- allocate ---------------------------------------------------------------------------------
    Mutant("new-block-uncounted", "allocate leaves the reference count at 0", "self._ref_counts[block] = 1", "pass"),
    Mutant(
        "new-block-counted-twice",
        "allocate sets the count to 2",
        "self._ref_counts[block] = 1",
        "self._ref_counts[block] = 2",
    ),
    Mutant(
        "stays-on-the-free-list", "allocate forgets to take the block off the free list", POP, "block = self._free[-1]"
    ),
    Mutant(
        "two-blocks-for-one",
        "allocate takes two blocks off the free list: one leaks",
        POP,
        "block = self._free.pop()\n        del self._free[-1:]",
    ),
    Mutant(
        "keeps-one-back",
        "OutOfBlocks while one block is still free",
        "if not self._free:",
        "if len(self._free) <= (self.num_blocks > 1):",
    ),
    Mutant(
        "wrong-error-when-full",
        "IndexError, not OutOfBlocks, when no block is free",
        "if not self._free:",
        "if False:",
    ),
    Mutant(
        "hands-out-a-held-block",
        "when none is free, block 0 is handed out again",
        'raise OutOfBlocks(f"all {self.num_blocks} blocks are held")',
        "return 0",
    ),
    # --- share ------------------------------------------------------------------------------------
    Mutant("share-not-counted", "share does not count", "self._ref_counts[block] += 1", "pass"),
    Mutant(
        "share-stops-at-two",
        "a third holder is not counted",
        "self._ref_counts[block] += 1",
        "self._ref_counts[block] = 2",
    ),
    Mutant(
        "free-blocks-can-be-shared",
        "share accepts a block that nobody holds",
        GUARD_OF_SHARE,
        "def share(self, block: int) -> None:\n        self.ref_count(block)\n",
    ),
    # --- free -------------------------------------------------------------------------------------
    Mutant(
        "double-free-accepted",
        "a free block can be freed again",
        GUARD_OF_FREE,
        "def free(self, block: int) -> None:\n        if self.ref_count(block) == 0:\n            return\n",
    ),
    Mutant(
        "block-free-twice",
        "a second free puts the block on the free list twice, so that it is handed out twice",
        GUARD_OF_FREE + "        " + COUNT_DOWN,
        "def free(self, block: int) -> None:\n        self.ref_count(block)\n"
        "        self._ref_counts[block] = max(0, self._ref_counts[block] - 1)\n        if self._ref_counts",
    ),
    Mutant(
        "freed-while-shared",
        "the first holder to go frees the block",
        RETURN_TO_POOL,
        "self._ref_counts[block] = 0\n        self._free.append(block)",
    ),
    Mutant(
        "on-the-free-list-while-shared",
        "a block with holders left is on the free list too",
        RETURN_TO_POOL,
        "self._free.append(block)",
    ),
    Mutant(
        "freed-at-one",
        "a block is returned to the pool while one still holds it",
        "if self._ref_counts[block] == 0:\n            self._free",
        "if self._ref_counts[block] == 1:\n            self._free",
    ),
    Mutant("never-free-again", "freed blocks are not handed out again: they leak", RETURN_TO_POOL, "pass"),
    Mutant(
        "third-holder-cannot-leave",
        "free does not count down from three holders",
        COUNT_DOWN,
        "self._ref_counts[block] -= self._ref_counts[block] != 3\n        if self._ref_counts",
    ),
    Mutant("count-stays-after-free", "free does not count down", COUNT_DOWN, "if self._ref_counts"),
    # --- ref_count --------------------------------------------------------------------------------
    Mutant(
        "negative-blocks",
        "-1 is taken for the last block",
        "if not 0 <= block < self.num_blocks:",
        "if not block < self.num_blocks:",
    ),
    Mutant(
        "one-past-the-end",
        "the number after the last block gives IndexError, not BlockNotAllocated",
        "if not 0 <= block < self.num_blocks:",
        "if not 0 <= block <= self.num_blocks:",
    ),
    Mutant(
        "count-is-held-or-not",
        "ref_count says 1 for any held block",
        "return self._ref_counts[block]\n",
        "return min(1, self._ref_counts[block])\n",
    ),
    # --- copy_on_write ----------------------------------------------------------------------------
    Mutant(
        "copies-the-unshared",
        "a block with one holder is copied as well",
        "if self._ref_counts[block] == 1:\n            return block  # nobody else reads it",
        "pass",
    ),
    Mutant(
        "never-copies",
        "a shared block is written to as it is",
        "if self._ref_counts[block] == 1:\n            return",
        "if self._ref_counts[block] >= 1:\n            return",
    ),
    Mutant(
        "writes-with-two-holders",
        "only a block with three holders or more is copied",
        "if self._ref_counts[block] == 1:\n            return",
        "if self._ref_counts[block] <= 2:\n            return",
    ),
    Mutant(
        "copy-keeps-the-reference",
        "after a copy the writer still counts as a holder of the old block",
        COPY,
        "return self.allocate()",
    ),
    Mutant(
        "copy-gives-up-first",
        "the reference is given up before allocate, which may raise",
        COPY,
        "self._ref_counts[block] -= 1\n        return self.allocate()",
    ),
    Mutant(
        "copy-gives-up-all",
        "after a copy nobody counts as a holder of the old block",
        COPY,
        "copy = self.allocate()\n        self._ref_counts[block] = 0\n        return copy",
    ),
    Mutant(
        "copy-frees-the-old",
        "after a copy the old block is on the free list, though others hold it",
        COPY,
        COPY.replace("return", "self._free.append(block)\n        return"),
    ),
    Mutant(
        "free-blocks-can-be-copied",
        "copy_on_write accepts a block that nobody holds",
        GUARD_OF_COPY,
        GUARD_OF_COPY.replace("self._check_held(block)", "if self.ref_count(block) == 0:\n            return block"),
    ),
    Mutant(
        "full-pool-writes-in-place",
        "with no block free, a shared block is written to as it is",
        GUARD_OF_COPY,
        GUARD_OF_COPY + "        if not self._free:\n            return block\n",
    ),
)
