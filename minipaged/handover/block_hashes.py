"""What a full block is known by: a chain of hashes, hash(parent's hash, tokens of the block).

K/V of a block depend on all tokens up to the block's end and on nothing else. So two prompts that begin with the same
tokens begin with the same hashes, whoever computes them: the prefix cache of an engine, which finds blocks by them, and
a router in front of several engines, which sends a prompt where its blocks are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

ChainHash = Callable[[int, tuple[int, ...]], int]

NO_HASH = 0
"""What stands for the parent's hash where a block is the first."""


def chain_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """The hash of a block from its parent's and its own tokens (numbers only, so the same in every process)."""
    return hash((parent, tokens))


def hash_blocks(
    tokens: Sequence[int], block_size: int, start: int, stop: int, parent: int, chain_hash: ChainHash = chain_hash
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Of each logical block from start to stop - 1 its number, hash and tokens. `parent`: the hash before them."""
    for logical in range(start, stop):
        block_tokens = tuple(tokens[logical * block_size : (logical + 1) * block_size])
        parent = chain_hash(parent, block_tokens)
        yield logical, parent, block_tokens


def block_hashes(tokens: Sequence[int], block_size: int) -> list[int]:
    """The hashes of all full blocks of `tokens`, from the first on."""
    return [key for _, key, _ in hash_blocks(tokens, block_size, 0, len(tokens) // block_size, NO_HASH)]
