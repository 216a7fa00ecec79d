"""The hash that identifies a full block. It is chained: hash(parent's hash, tokens of the block).

K/V of a block depend on all tokens up to the block's end and on nothing else. So prompts that begin with the same
tokens begin with the same hashes, wherever these are computed: in an engine's prefix cache, which finds blocks by them,
and in a router in front of several engines, which sends a prompt to the engine that has its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

ChainHash = Callable[[int, tuple[int, ...]], int]

NO_HASH = 0
"""Stands where there is no hash: as the parent's hash of a sequence's first block."""


def chain_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """The hash of a block, from its parent's hash and its own tokens (numbers only, so every process gets the same)."""
    return hash((parent, tokens))


def hash_blocks(
    tokens: Sequence[int], block_size: int, start: int, stop: int, parent: int, chain_hash: ChainHash = chain_hash
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield number, hash and tokens of each logical block from start to stop - 1. `parent`: the hash before `start`."""
    for logical in range(start, stop):
        block_tokens = tuple(tokens[logical * block_size : (logical + 1) * block_size])
        parent = chain_hash(parent, block_tokens)
        yield logical, parent, block_tokens


def block_hashes(tokens: Sequence[int], block_size: int) -> list[int]:
    """The hashes of all full blocks of `tokens`, in order."""
    return [key for _, key, _ in hash_blocks(tokens, block_size, 0, len(tokens) // block_size, NO_HASH)]
