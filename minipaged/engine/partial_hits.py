"""Partial hits: a prompt that shares only the first tokens of a cached block begins with these.

    cached:     [ 1  2  3  4 ][ 5  6  7  8 ]
    newcomer:   [ 1  2  3  4 ][ 5  6  9 ...       six tokens are found, not four

The newcomer holds the block of 5 and 6 by reference, with two of its slots filled. Its first write is an ordinary
copy-on-write (paper, section 4.4, Fig. 8). Sometimes it takes the block over instead (`beginning_of`).

A block that is cached with fewer tokens than it has slots is a *partial entry*: the last block of a request that has
finished. No hash leads to it. It is found as a child of the block before it, as every cached block is.

No more blocks are taken than without partial hits, and admission counts the same: the copy takes the place of a block
that the newcomer would take anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from minipaged.contracts import BlockAllocator, BlockTable
from minipaged.engine.cached_blocks import NO_PARENT, CachedBlock
from minipaged.engine.prefix_cache import PrefixCache


class Beginning(NamedTuple):
    """The computed blocks with which a sequence begins."""

    blocks: Sequence[int]
    num_tokens: int
    source: Literal["cache", "sibling"] = "cache"
    takes_over: bool = False
    """Whether the cache gives the last block up to the sequence, which will write into it."""
    num_pinned: int = 0
    """1 if the last block stops being available until it has been copied, else 0."""


def beginning_of(
    cache: PrefixCache, tokens: Sequence[int], num_spare: int = 0, *, within_block: bool = True
) -> Beginning:
    """Return the cached blocks with which a sequence of these tokens can begin, taking no more blocks than it would
    without a partial hit.

    The copy takes the place of a block that the sequence would take anyway. But until it is made, its source must stay
    as it is. A source that sequences hold does that at no cost. A source that only the cache holds counted as
    available; so one of `num_spare` available blocks that nobody was promised is needed, or the sequence takes the
    source over. That is possible if no cached block follows it.

    A sequence that goes on where a partial entry ends takes it over even if blocks are spare: most such sequences are
    the next turn of a conversation, and the entry will be found again, with more tokens. Until then, another sequence
    that goes on in the same place finds only the full blocks.
    """
    blocks, num_tokens = cache.match(tokens)
    shared = num_tokens % cache.block_size
    if not shared:
        return Beginning(blocks, num_tokens)
    last = cache.entry_of[blocks[-1]]
    if within_block and not cache.is_evictable(last.block):
        return Beginning(blocks, num_tokens)
    if within_block and num_spare > 0 and shared < len(last.tokens):
        return Beginning(blocks, num_tokens, num_pinned=1)
    if within_block and last.block not in cache.children:
        return Beginning(blocks, num_tokens, takes_over=True)
    return Beginning(blocks[:-1], num_tokens - shared)


def keep(cache: PrefixCache, tokens: Sequence[int], table: BlockTable, allocator: BlockAllocator) -> CachedBlock | None:
    """Cache the block of the last `tokens` as a partial entry, and return it. The table's sequence has computed these
    tokens, and is about to end.

    Nothing is cached (None) if that block is full, or if an entry begins with its tokens already; if its parent is not
    cached, because of a hash collision; or if another sequence holds it too, which may be about to write into it.
    """
    logical, num_tokens = divmod(len(tokens), cache.block_size)
    parent = table.blocks[logical - 1] if logical else NO_PARENT
    if not num_tokens or (logical and parent not in cache) or allocator.ref_count(table.blocks[logical]) > 1:
        return None
    entry = CachedBlock(table.blocks[logical], parent, tuple(tokens[logical * cache.block_size :]))
    if cache.children.longest(parent, entry.tokens)[1] == num_tokens:
        return None
    cache.add(entry)
    return entry
