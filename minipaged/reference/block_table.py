"""The block table: where the tokens of one sequence are (paper, section 4.2, Fig. 6).

A sequence sees its KV cache as logical blocks 0, 1, 2, ... without gaps. The table gives the physical block of each,
like the page table of a process. Blocks are added on demand: only when the last one is full.

    position p  ->  logical block p // block_size  ->  slot = blocks[p // block_size] * block_size + p % block_size

Ownership: the table holds one reference on each block in `blocks`. All blocks but the last are full. Full blocks are
never written again, so they can be shared freely. The last block may be partly filled. Before `append` gives out slots
in it, it makes sure that this table is the only holder (copy-on-write, section 4.4, Fig. 8; the invariant
exclusive-write).
"""

from __future__ import annotations

from collections.abc import Sequence

from minipaged import contracts
from minipaged.contracts import BlockAllocator
from minipaged.steps import CopyPair


class BlockTable(contracts.BlockTable):
    """A list of physical blocks and the number of filled slots."""

    def __init__(self, block_size: int, allocator: BlockAllocator) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block has at least 1 slot")
        self.block_size = block_size
        self._allocator = allocator
        self._blocks: list[int] = []
        self._num_tokens = 0

    @property
    def blocks(self) -> Sequence[int]:
        return self._blocks

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def blocks_needed(self, num_new_tokens: int) -> int:
        if num_new_tokens < 0:
            raise ValueError(f"cannot append {num_new_tokens} tokens")
        in_all = self._blocks_for(self._num_tokens + num_new_tokens)
        return in_all - len(self._blocks) + self._writes_into_shared_block(num_new_tokens)

    def append(self, num_new_tokens: int) -> list[CopyPair]:
        needed = self.blocks_needed(num_new_tokens)
        if not needed:  # true in all but one of `block_size` decode steps
            self._num_tokens += num_new_tokens
            return []
        copies: list[CopyPair] = []
        copied = self._writes_into_shared_block(num_new_tokens)
        new = self._allocator.allocate_many(needed - copied)
        if copied:
            source = self._blocks[-1]
            try:
                self._blocks[-1] = self._allocator.copy_on_write(source)
            except BaseException:
                self._allocator.free_many(reversed(new))
                raise
            copies.append((source, self._blocks[-1]))
        self._blocks += new
        self._num_tokens += num_new_tokens
        return copies

    def adopt(self, blocks: Sequence[int]) -> None:
        if self._blocks:
            raise ValueError(f"only an empty table can adopt blocks; this one holds {len(self._blocks)}")
        self._allocator.share_many(blocks)
        self._blocks = list(blocks)
        self._num_tokens = len(blocks) * self.block_size

    def fork(self) -> BlockTable:
        child = BlockTable(self.block_size, self._allocator)
        child.adopt(self._blocks)
        child._num_tokens = self._num_tokens  # the last block may be partly filled
        return child

    def trim(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot trim to {num_tokens} tokens; the table holds {self._num_tokens}")
        kept = self._blocks_for(num_tokens)
        self._allocator.free_many(reversed(self._blocks[kept:]))
        del self._blocks[kept:]
        self._num_tokens = num_tokens

    def replace(self, logical_block: int, block: int) -> None:
        if not 0 <= logical_block < len(self._blocks):
            raise ValueError(f"there is no logical block {logical_block}; the table holds {len(self._blocks)} blocks")
        old = self._blocks[logical_block]
        self._allocator.share(block)
        self._blocks[logical_block] = block
        self._allocator.free(old)

    def relocate(self, blocks: Sequence[int], allocator: BlockAllocator) -> None:
        if len(blocks) != len(self._blocks):
            raise ValueError(f"{len(blocks)} blocks cannot take the place of {len(self._blocks)}")
        self._allocator.free_many(reversed(self._blocks))
        self._blocks = list(blocks)
        self._allocator = allocator

    def slot_mapping(self, start: int, stop: int) -> list[int]:
        if not 0 <= start <= stop <= self._num_tokens:
            raise ValueError(f"positions {start} to {stop} are not all within the table's {self._num_tokens} tokens")
        return [
            self._blocks[position // self.block_size] * self.block_size + position % self.block_size
            for position in range(start, stop)
        ]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def _writes_into_shared_block(self, num_new_tokens: int) -> bool:
        """Whether the next tokens go into a last block that is partly filled and has other holders too."""
        last_is_full = self._num_tokens == len(self._blocks) * self.block_size
        return num_new_tokens > 0 and not last_is_full and self._allocator.ref_count(self._blocks[-1]) > 1
