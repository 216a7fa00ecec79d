"""Handing K/V over between engines: what an engine asks of whoever carries its full blocks to others (disaggregation).

    prefilling engine                                                decoding engine
    computes a prompt ──store──► connector: K and V of full blocks ──load──► begins the same prompt with them

K and V of a full block depend on the tokens up to its end and on nothing else (the invariant content). So that is what
a block is asked for by, and it does not matter who has computed it, or when. A connector may lose blocks: what cannot
be had is computed. It must never give others than those that were asked for.

vLLM's is `KVConnectorBase_V1`; ours has no asynchronous half: an engine stores before it lets go of the blocks, and has
what it loads before it takes blocks for it. So nothing is held for a reader who may never come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """All that has to be the same in two engines, so that one can use the other's blocks."""

    model: str
    """What the checkpoint is known by (`models.hub.fingerprint`)."""
    dtype: str
    """What K and V are computed in."""
    kv_cache_dtype: str
    """What they are kept in: as they are computed ("auto"), or in 8 bits."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block."""


class KVConnector(Protocol):
    """Where full blocks are left for other engines, and found.

    `token_ids` are those of a sequence from its beginning; its *logical* blocks are numbered from 0. A block is bytes,
    those of `Runner.read_blocks`.
    """

    def check(self, handshake: Handshake) -> None:
        """Raise InvalidRequest where the blocks of others are not like those that an engine will have. Called before
        its model is loaded; of an engine that then comes to nothing, nothing is to stay behind."""

    def open(self, handshake: Handshake) -> None:
        """What the blocks of this engine are, which stands now. Called once, before those below. Raises what `check`
        raises."""

    def lacking(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[int]:
        """Which of the logical blocks start .. stop - 1 are not there, and would be taken."""

    def store(self, token_ids: Sequence[int], blocks: Mapping[int, bytes]) -> Sequence[int]:
        """Take these blocks, by their logical numbers. Returns those that are there now."""

    def load(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[bytes]:
        """The logical blocks from `start` on, up to the first that cannot be had, or to `stop`."""
