"""The KV connector: the interface by which an engine hands full blocks over to other engines (disaggregation).

    prefilling engine                                                decoding engine
    computes a prompt ──store──► connector: K and V of full blocks ──load──► begins the same prompt with them

K and V of a full block depend on the tokens up to its end and on nothing else (the invariant content). So a block is
requested by these tokens, and it does not matter which engine has computed it, or when. A connector may lose blocks: an
engine computes those that it cannot load. A connector must never return other blocks than those requested.

vLLM's interface is `KVConnectorBase_V1`. Ours has no asynchronous half: an engine stores blocks before it frees them,
and loads their content before it allocates blocks for it. So no block is held for a reader that may never come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """The properties that two engines must have in common, so that one can use the other's blocks."""

    model: str
    """The checkpoint's fingerprint (`models.hub.fingerprint`)."""
    dtype: str
    """The data type in which K and V are computed."""
    kv_cache_dtype: str
    """The format in which K and V are stored: as they are computed ("auto"), or in 8 bits."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""
    block_bytes: int
    """Bytes per block. They follow from the properties above, so engines do not compare them."""

    def compared(self) -> dict[str, Any]:
        """The properties that engines compare, by name."""
        return {name: value for name, value in asdict(self).items() if name != "block_bytes"}


class KVConnector(Protocol):
    """A place where engines leave full blocks for other engines, and find those of others.

    `token_ids` are a sequence's tokens from its beginning; its *logical* blocks are numbered from 0. If its request has
    a salt, the first token has it (`block_hashes.salted`), so a request finds only blocks of its own salt. A block's
    content is bytes, those of `Runner.read_blocks`.
    """

    def check(self, handshake: Handshake) -> None:
        """Raise InvalidRequest if the blocks of other engines are of another kind than `handshake`. Called before the
        engine's model is loaded. It must leave nothing behind, because the engine may fail to start."""

    def open(self, handshake: Handshake) -> None:
        """Take the kind of this engine's blocks, which is final now. Called once, before the methods below. Raises the
        errors of `check`."""

    def lacking(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[int]:
        """Return the numbers in start .. stop - 1 of the blocks that are missing here and that `store` would accept.
        The engine has the others too, so they count as used now."""

    def store(self, token_ids: Sequence[int], blocks: Mapping[int, bytes]) -> Sequence[int]:
        """Store these blocks, given by logical number. Return the numbers of those that are stored now."""

    def load(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[bytes]:
        """Return the content of the logical blocks from `start` on, stopping at the first missing block or `stop`."""
