"""What one sequence of the paper's baselines has in the place of a list of blocks, and one request of chunks.

A block table fits here too: the chunk's blocks are neighbours, and all of them are there from the first token on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minipaged.engine.sequence import SequenceState
from minipaged.errors import InvalidRequest
from minipaged.paper.buddy import BuddyAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.steps import CopyPair


class Chunk(BlockTable):
    """A table whose blocks are one chunk, there from the first token on."""

    def __init__(self, block_size: int, buddies: BuddyAllocator) -> None:
        super().__init__(block_size, buddies)
        self._buddies = buddies

    def take(self, blocks: list[int]) -> None:
        """Let it be this chunk."""
        self._blocks = blocks

    def blocks_needed(self, num_new_tokens: int) -> int:
        return 0

    def append(self, num_new_tokens: int) -> list[CopyPair]:
        """Raises InvalidRequest where it would go on beyond the chunk."""
        room = len(self._blocks) * self.block_size
        if self._blocks and self._num_tokens + num_new_tokens > room:
            raise InvalidRequest(
                f"a sequence of {self._num_tokens} tokens outgrows its chunk of {room}: expect more (`ESTIMATES`)"
            )
        self._num_tokens += num_new_tokens
        return []

    def trim(self, num_tokens: int) -> None:
        """Of a chunk everything is kept, or nothing."""
        if num_tokens == 0 and self._blocks:
            self._buddies.give_back(self._blocks[0])
            self._blocks = []
        self._num_tokens = num_tokens


@dataclass(slots=True)
class Family:
    """The sequences of one request."""

    final: int
    """Tokens that each of them will have in the end,"""
    expected: int
    """and those it was expected to have."""
    spare: list[list[int]]
    """Chunks for sequences to come."""
    searches: bool
    """Whether it is a beam search: that forks until its end, so a chunk that a beam leaves is kept for another."""
    owed: list[tuple[SequenceState, list[int]]] = field(default_factory=list)
    """Forked while no chunk was spare, and the blocks to copy: the next that ends gives its chunk."""
    living: int = 1
