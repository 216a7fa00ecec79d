"""The policy that students' policies are compared with on prompts."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

PATIENCE = 300
"""The number of uses that a block is kept for longer, for each doubling of its own uses."""


class OurEviction:
    """The block that was used longest ago leaves first. A block that was used more often counts as used more recently.

    But first leave the texts whose first block only one request has used. A new chat shares its first block, a document
    shares nothing.
    """

    def __init__(self, device: int, host: int) -> None:
        self._floors: dict[str, dict[int, int | None]] = {"device": {}, "host": {}}  # block -> its parent
        self._clock = 0
        self._last_use: dict[int, int] = {}
        self._num_uses: dict[int, int] = {}  # of blocks that have left the cache too
        self._first: dict[int, int] = {}  # block -> the first block of its text

    def use(self, block: int, parent: int | None) -> None:
        self._floors["host"].pop(block, None)
        self._floors["device"][block] = parent
        self._clock += 1
        self._last_use[block] = self._clock
        self._num_uses[block] = self._num_uses.get(block, 0) + 1
        self._first[block] = block if parent is None else self._first[parent]

    def evict(self, floor: str, pinned: Sequence[int]) -> int | None:
        blocks = self._floors[floor]
        kept = {*pinned, *blocks.values()}  # a block that is another one's parent has a child
        block = min((one for one in blocks if one not in kept), key=self._worth, default=None)
        if block is not None:
            parent = blocks.pop(block)
            if floor == "device":
                self._floors["host"][block] = parent
        return block

    def _worth(self, block: int) -> tuple[bool, float]:
        is_shared = self._num_uses[self._first[block]] > 1
        return is_shared, self._last_use[block] + PATIENCE * log2(self._num_uses[block])
