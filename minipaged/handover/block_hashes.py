"""The hash that identifies a full block. It is chained: hash(parent's hash, tokens of the block).

K/V of a block depend on all tokens up to the block's end and on nothing else. So prompts that begin with the same
tokens begin with the same hashes, wherever these are computed: in an engine's prefix cache, which finds blocks by them,
and in a router in front of several engines, which sends a prompt to the engine that has its blocks.

A *salt* keeps the blocks of some requests apart from all others, although their K/V would be equal. It changes the
first of the tokens by which blocks are named (`salted`), and so the name of the first block and of every block after
it. The model never sees the changed token.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

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


# --- Salts ----------------------------------------------------------------------------------------


def salt_number(cache_salt: str | None) -> int:
    """The number that stands for a salt: 0 without one, else a digest of 128 bits, plus 1, times 2^64."""
    if cache_salt is None:
        return 0
    digest = blake2b(cache_salt.encode(), digest_size=16).digest()
    return (int.from_bytes(digest, "little") + 1) << 64


def salted(tokens: Sequence[int], salt: int) -> Sequence[int]:
    """The tokens by which blocks are named: the first is lowered by the salt's number, the others are as they are. So
    equal first tokens mean equal tokens and equal salts. Without a salt (0) these are the tokens themselves."""
    return [int(tokens[0]) - salt, *tokens[1:]] if salt and len(tokens) else tokens


def token_bytes(tokens: Sequence[int]) -> bytes:
    """The tokens as bytes, for digests: 8 for each, and 32 for one with a salt, which may only be the first."""
    if tokens and tokens[0] < -(1 << 63):
        return tokens[0].to_bytes(32, "little", signed=True) + array("q", tokens[1:]).tobytes()
    return array("q", tokens).tobytes()
