"""Automatic prefix caching: blocks are kept after use, and found again by their tokens and all tokens before them.

The K/V of a block depend on all tokens up to the block's end and on nothing else (the invariant content). So a full
block is identified by a chain of hashes: hash(parent's hash, tokens of the block). Equal hashes are no proof: an entry
also stores its tokens and its parent's block, and a lookup compares both. After the last full block that is found, the
child of it that begins with most of the other tokens is found too (`partial_hits.py`).

Ownership: the cache holds one reference on each cached block, like one more sequence. A cached block is

- *in use* while sequences hold it too (reference count 2 or more);
- *evictable* when only the cache holds it (reference count 1): it counts as available, and is given back when blocks
  are needed, least recently used first. Partial entries come before all others, the last released first.

A holder of a cached block also holds all its cached parents. (`publish` ensures this: it replaces a block that was
computed twice by the one already cached.) Blocks are released last first, so children are released before their
parents, and evicting in order of release never leaves a child without its parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from minipaged.contracts import BlockAllocator, BlockTable
from minipaged.engine.cached_blocks import NO_PARENT, CachedBlock, Children, Match
from minipaged.handover.block_hashes import NO_HASH, ChainHash, chain_hash, hash_blocks


class PrefixCache:
    """Blocks by content. Tests pass a bad `chain_hash` to show that collisions are harmless."""

    def __init__(self, block_size: int, allocator: BlockAllocator, chain_hash: ChainHash = chain_hash) -> None:
        self.block_size = block_size
        self._allocator = allocator
        self._chain_hash = chain_hash
        self._entries: dict[int, CachedBlock] = {}  # full blocks, by hash
        self.entry_of: dict[int, CachedBlock] = {}  # block -> its entry, which may be a partial one
        self.children = Children()
        self._evictable: OrderedDict[int, None] = OrderedDict()  # in order of release

    def __contains__(self, block: int) -> bool:
        return block in self.entry_of

    @property
    def blocks(self) -> Iterable[int]:
        """Every cached block."""
        return self.entry_of.keys()

    @property
    def num_evictable(self) -> int:
        """Blocks that could be given back now."""
        return len(self._evictable)

    def hash_of(self, block: int) -> int:
        """The hash that identifies a full cached block (`block_hashes.py`)."""
        return self.entry_of[block].key

    def is_evictable(self, block: int) -> bool:
        return block in self._evictable

    def match(self, tokens: Sequence[int]) -> Match:
        """The cached blocks that hold the longest prefix of `tokens`; at least one token is left to run."""
        found: list[CachedBlock] = []
        self.look_up(tokens, found)
        blocks, start = [entry.block for entry in found], len(found) * self.block_size
        rest = tuple(tokens[start : min(start + self.block_size, len(tokens) - 1)])
        block, num_tokens = self.children.longest(blocks[-1] if blocks else NO_PARENT, rest)
        return Match([*blocks, block] if num_tokens else blocks, start + num_tokens)

    def look_up(self, tokens: Sequence[int], found: list[CachedBlock]) -> None:
        """Bring `found` up to date: the full cached blocks with which `tokens` begin; at least one token is left to
        run. What an earlier call has found is not looked up again: a block is evicted only after its children, so all
        before one that is still cached are cached too.
        """
        while found and self.entry_of.get(found[-1].block) is not found[-1]:
            found.pop()
        parent, key = (found[-1].block, found[-1].key) if found else (NO_PARENT, NO_HASH)
        most = (len(tokens) - 1) // self.block_size
        chain = hash_blocks(tokens, self.block_size, len(found), most, key, self._chain_hash)
        for _, key, block_tokens in chain:
            entry = self._entries.get(key)
            if entry is None or entry.tokens != block_tokens or entry.parent_block != parent:
                break
            found.append(entry)
            parent = entry.block

    def reused(self, blocks: Iterable[int]) -> None:
        """Note that sequences hold these cached blocks again: they are not evictable."""
        for block in blocks:
            self._evictable.pop(block, None)

    def released(self, blocks: Iterable[int]) -> None:
        """Note that a sequence gave up these blocks, last first. Blocks that only the cache holds become evictable."""
        for block in blocks:
            if block in self.entry_of and self._allocator.ref_count(block) == 1:
                self._evictable[block] = None
                if len(self.entry_of[block].tokens) < self.block_size:  # a partial entry is worth less than its room
                    self._evictable.move_to_end(block, last=False)

    def publish(self, tokens: Sequence[int], table: BlockTable, num_published: int) -> Iterator[tuple[int, int, int]]:
        """Cache the full blocks of `tokens` from logical block `num_published` on, one per iteration.

        Yields (logical block, the table's own block, the cached block). They are equal if the cache took a reference on
        the table's own block. If the content was already cached, the table now holds the cached block instead.
        """
        parent = table.blocks[num_published - 1] if num_published else NO_PARENT
        if num_published and parent not in self.entry_of:
            return  # a hash collision kept its parent out of the cache
        key = self.entry_of[parent].key if num_published else NO_HASH
        num_full = len(tokens) // self.block_size
        chain = hash_blocks(tokens, self.block_size, num_published, num_full, key, self._chain_hash)
        for logical, key, block_tokens in chain:
            own = table.blocks[logical]
            entry = self._entries.get(key)
            if entry is None:
                self.add(entry := CachedBlock(own, parent, block_tokens, key))
                self._entries[key] = entry
                yield logical, own, own
            elif entry.tokens != block_tokens or entry.parent_block != parent:
                return  # a hash collision: this block and its children are not cached
            elif entry.block != own:
                table.replace(logical, entry.block)
                self.reused([entry.block])
                yield logical, own, entry.block
            parent = table.blocks[logical]

    def add(self, entry: CachedBlock) -> None:
        """Take a reference on a block, and let it be found after its parent."""
        self._allocator.share(entry.block)
        self.entry_of[entry.block] = entry
        self.children.add(entry)

    def redundant(self, block: int) -> int | None:
        """The partial entry whose tokens are the beginning of this cached block's, if there is one."""
        return self.children.shorter(self.entry_of[block])

    def evict(self, num_blocks: int) -> list[int]:
        """Give back `num_blocks` evictable blocks: partial entries, then the least recently used full blocks."""
        evicted = self.next_evicted(num_blocks)
        for block in evicted:
            self.drop(block)
        return evicted

    def next_evicted(self, num_blocks: int) -> list[int]:
        """The blocks that `evict` would give back now."""
        return list(islice(self._evictable, max(0, num_blocks)))

    def drop(self, block: int) -> None:
        """Give up the cache's reference on a block without cached children."""
        entry = self.entry_of.pop(block)
        self.children.remove(entry)
        if len(entry.tokens) == self.block_size:
            del self._entries[entry.key]
        self._evictable.pop(block, None)
        self._allocator.free(block)
