"""The block table of a sequence in the paper's baselines, and a request's chunks.

A sequence has one contiguous chunk. Its block table lists the adjacent blocks of the chunk, all of them from the first
token on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minipaged.engine.sequence import SequenceState
from minipaged.errors import InvalidRequest
from minipaged.paper.buddy import BuddyAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.steps import CopyPair


class Chunk(BlockTable):
    """A block table whose blocks are one chunk, allocated before the first token."""

    def __init__(self, block_size: int, buddies: BuddyAllocator) -> None:
        super().__init__(block_size, buddies)
        self._buddies = buddies

    def take(self, blocks: list[int]) -> None:
        """Set the table's chunk. An empty list removes it without freeing it."""
        self._blocks = blocks

    def blocks_needed(self, num_new_tokens: int) -> int:
        return 0

    def append(self, num_new_tokens: int) -> list[CopyPair]:
        """Add tokens. Raises InvalidRequest if they exceed the chunk."""
        room = len(self._blocks) * self.block_size
        if self._blocks and self._num_tokens + num_new_tokens > room:
            raise InvalidRequest(
                f"a sequence of {self._num_tokens} tokens outgrows its chunk of {room}: give it a larger estimate "
                "(`orca.ESTIMATES`)"
            )
        self._num_tokens += num_new_tokens
        return []

    def trim(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens. The chunk is freed only if none is kept."""
        if num_tokens == 0 and self._blocks:
            self._buddies.give_back(self._blocks[0])
            self._blocks = []
        self._num_tokens = num_tokens


@dataclass(slots=True)
class Family:
    """The state that the sequences of one request share."""

    final: int
    """Tokens that each sequence will have when it ends."""
    expected: int
    """Tokens that each sequence was expected to have."""
    spare: list[list[int]]
    """Chunks reserved for sequences that do not exist yet."""
    searches: bool
    """Whether the request is a beam search. It forks until its end, so the chunk of a dead beam is kept for a new one.
    """
    owed: list[tuple[SequenceState, list[int]]] = field(default_factory=list)
    """Sequences that were forked while no chunk was spare, each with the blocks to copy. They take the chunks of the
    next sequences that end."""
    living: int = 1
    """The number of sequences that exist and have not been freed."""
