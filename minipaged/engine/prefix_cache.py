"""Automatic prefix caching: full blocks are kept after use, and found again by their tokens and all tokens before them.

The K/V of a block depend on all tokens up to the block's end and on nothing else (the invariant content). So a block is
identified by a chain of hashes: hash(parent's hash, tokens of the block). Equal hashes are no proof: an entry also
stores its tokens and its parent's block, and a lookup compares both.

Ownership: the cache holds one reference on each cached block, like one more sequence. A cached block is

- *in use* while sequences hold it too (reference count 2 or more);
- *evictable* when only the cache holds it (reference count 1): it counts as available, and is given back when blocks
  are needed, least recently used first.

A holder of a cached block also holds all its cached parents. (`publish` ensures this: it replaces a block that was
computed twice by the one already cached.) Blocks are released last first, so children are released before their
parents, and evicting in order of release never leaves a child without its parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minipaged.contracts import BlockAllocator, BlockTable
from minipaged.handover.block_hashes import NO_HASH, ChainHash, chain_hash, hash_blocks

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A cached block, with what a lookup compares."""

    block: int
    parent_block: int
    tokens: tuple[int, ...]


class PrefixCache:
    """Full blocks by content. Tests pass a bad `chain_hash` to show that collisions are harmless."""

    def __init__(self, block_size: int, allocator: BlockAllocator, chain_hash: ChainHash = chain_hash) -> None:
        self.block_size = block_size
        self._allocator = allocator
        self._chain_hash = chain_hash
        self._entries: dict[int, CachedBlock] = {}
        self._hash_of: dict[int, int] = {}  # block -> key of its entry
        self._evictable: OrderedDict[int, None] = OrderedDict()  # in order of release

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    @property
    def blocks(self) -> Iterable[int]:
        """Every cached block."""
        return self._hash_of.keys()

    @property
    def num_evictable(self) -> int:
        """Blocks that could be given back now."""
        return len(self._evictable)

    def hash_of(self, block: int) -> int:
        """The hash that identifies a cached block (`block_hashes.py`)."""
        return self._hash_of[block]

    def is_evictable(self, block: int) -> bool:
        return block in self._evictable

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The cached blocks that hold the longest prefix of `tokens`; at least one token is left to run."""
        found: list[int] = []
        parent = NO_PARENT
        for _, key, block_tokens in self._chain(tokens, 0, (len(tokens) - 1) // self.block_size, NO_HASH):
            entry = self._entries.get(key)
            if entry is None or entry.tokens != block_tokens or entry.parent_block != parent:
                break
            found.append(entry.block)
            parent = entry.block
        return found

    def reused(self, blocks: Iterable[int]) -> None:
        """Note that sequences hold these cached blocks again: they are not evictable."""
        for block in blocks:
            self._evictable.pop(block, None)

    def released(self, blocks: Iterable[int]) -> None:
        """Note that a sequence gave up these blocks, last first. Blocks that only the cache holds become evictable."""
        for block in blocks:
            if block in self._hash_of and self._allocator.ref_count(block) == 1:
                self._evictable[block] = None

    def publish(self, tokens: Sequence[int], table: BlockTable, num_published: int) -> Iterator[tuple[int, int, int]]:
        """Cache the full blocks of `tokens` from logical block `num_published` on, one per iteration.

        Yields (logical block, the table's own block, the cached block). They are equal if the cache took a reference on
        the table's own block. If the content was already cached, the table now holds the cached block instead.
        """
        parent = table.blocks[num_published - 1] if num_published else NO_PARENT
        key = self._hash_of.get(parent, NO_HASH)
        if num_published and parent not in self._hash_of:
            return  # a hash collision kept its parent out of the cache
        chain = self._chain(tokens, num_published, len(tokens) // self.block_size, key)
        for logical, key, block_tokens in chain:
            own = table.blocks[logical]
            entry = self._entries.get(key)
            if entry is None:
                self._allocator.share(own)
                self._entries[key] = CachedBlock(own, parent, block_tokens)
                self._hash_of[own] = key
                yield logical, own, own
            elif entry.tokens != block_tokens or entry.parent_block != parent:
                return  # a hash collision: this block and its children are not cached
            elif entry.block != own:
                table.replace(logical, entry.block)
                self.reused([entry.block])
                yield logical, own, entry.block
            parent = table.blocks[logical]

    def _chain(
        self, tokens: Sequence[int], start: int, stop: int, key: int
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield (number, hash, tokens) of logical blocks start to stop - 1. `key`: the hash of the preceding block."""
        return hash_blocks(tokens, self.block_size, start, stop, key, self._chain_hash)

    def evict(self, num_blocks: int) -> list[int]:
        """Give back the `num_blocks` least recently used evictable blocks."""
        evicted: list[int] = []
        for _ in range(num_blocks):
            block, _ = self._evictable.popitem(last=False)
            del self._entries[self._hash_of.pop(block)]
            self._allocator.free(block)
            evicted.append(block)
        return evicted
