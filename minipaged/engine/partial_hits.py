"""Partial hits: a prompt that shares only the first tokens of a cached block begins with these.

    cached:     [ 1  2  3  4 ][ 5  6  7  8 ]
    newcomer:   [ 1  2  3  4 ][ 5  6  9 ...       six tokens are found, not four

The newcomer takes a reference on the second block, and counts only the first two slots of it. Its first write copies
the block: an ordinary copy-on-write (paper, section 4.4, Fig. 8). Sometimes it takes the block over instead: the cache
gives the block up, and the newcomer writes into it (`beginning_of`).

When a request finishes, its last block is rarely full. The cache keeps it as a *partial entry*: a cached block with
fewer tokens than slots. No hash leads to it. It is found among the children of the block before it.

A request takes no more blocks than without its partial hit, because the copy takes the place of a block that it would
take anyway. So admission counts the same blocks with and without partial hits.
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
    """The sequence's tokens in these blocks. Of the last block, they may be only the first ones."""
    source: Literal["cache", "sibling"] = "cache"
    """Where the blocks come from: the prefix cache, or a sibling (another sequence of the same request)."""
    takes_over: bool = False
    """Whether the cache gives up the last block, so that the sequence may write into it without a copy."""
    num_pinned: int = 0
    """1 if the last block was available, and is not until it has been copied; else 0."""


def beginning_of(
    cache: PrefixCache, tokens: Sequence[int], num_spare: int = 0, *, within_block: bool = True
) -> Beginning:
    """Return the cached blocks with which a sequence of these tokens can begin.

    A partial hit must cost no block. The copy costs none, because it takes the place of a block that the sequence would
    take anyway. But the source of the copy has to stay as it is until the copy is made. The first of these that is
    possible is done:

    1. Sequences hold the source. Then it stays anyway.
    2. Only the cache holds the source, so it counted as available. A spare block makes up for it until the copy is
       made (`num_pinned`).
    3. The sequence takes the source over, if no cached block follows it.
    4. The sequence begins with the full blocks only.

    A sequence that goes on exactly where a partial entry ends does not use a spare block: it takes the entry over. Most
    such sequences are the next turn of a conversation. When this turn ends, the block is cached again, with more
    tokens. Until then, another sequence that goes on in the same place finds only the full blocks.

    num_spare: available blocks that no request was promised.
    within_block: whether partial hits are allowed.
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
    """Cache the last block of a sequence that is about to end as a partial entry, and return the entry.

    tokens: all tokens that the sequence has computed. They are in the table's blocks.

    Returns None, and caches nothing, if

    - the block is full;
    - a cached block after the same parent begins with its tokens already;
    - its parent is not cached, because of a hash collision;
    - another sequence holds the block too, and may be about to write into it.
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
