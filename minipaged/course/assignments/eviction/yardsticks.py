"""The two policies between which students' policies are measured: the least recently used, and one that knows the
future."""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache

from minipaged.simulation.floored_cache import Floor, Path, prompts, serve


class InOrder:
    """Evicts the first block of an order among those that may leave."""

    def __init__(self) -> None:
        self._on: dict[Floor, dict[int, int | None]] = {"device": {}, "host": {}}

    def use(self, block: int, parent: int | None) -> None:
        self._on["host"].pop(block, None)
        self._on["device"].pop(block, None)
        self._on["device"][block] = parent

    def evict(self, floor: Floor, pinned: Sequence[int]) -> int | None:
        kept = {*pinned, *self._on[floor].values()}
        block = min((one for one in self._on[floor] if one not in kept), key=self.turn, default=None)
        if block is not None:
            parent = self._on[floor].pop(block)
            if floor == "device":
                self._on["host"][block] = parent
        return block

    def turn(self, block: int) -> tuple[float, ...]:
        raise NotImplementedError


class LeastRecentlyUsed(InOrder):
    """Evicts the block that was used longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._used: dict[int, int] = {}
        self._clock = 0

    def use(self, block: int, parent: int | None) -> None:
        super().use(block, parent)
        self._clock += 1
        self._used[block] = self._clock

    def turn(self, block: int) -> tuple[float, ...]:
        return (self._used[block],)


class Clairvoyant(InOrder):
    """Knows all requests, and evicts the block whose next use is farthest away (Belady, 1966)."""

    def __init__(self, requests: Sequence[Path]) -> None:
        super().__init__()
        self._requests = requests
        self._now = 0
        self._uses: dict[int, list[int]] = defaultdict(list)  # block -> the numbers of the requests that use it
        self._place: dict[int, int] = {}  # block -> its place in its text
        for number, path in enumerate(requests):
            for place, block in enumerate(path):
                self._uses[block].append(number)
                self._place[block] = place

    def requests(self) -> Iterator[Path]:
        """Yield the requests, and note which one is being served."""
        for number, path in enumerate(self._requests):
            self._now = number
            yield path

    def turn(self, block: int) -> tuple[float, ...]:
        uses = self._uses[block]
        later = bisect(uses, self._now)
        return -(uses[later] if later < len(uses) else math.inf), -self._place[block]


@cache
def shares(seed: int, num_requests: int) -> tuple[float, float]:
    """Return the shares of seconds that the least recently used and the clairvoyant policy save, of these `prompts`."""
    requests = prompts(seed, num_requests)
    clairvoyant = Clairvoyant(requests)
    return serve(requests, LeastRecentlyUsed()), serve(clairvoyant.requests(), clairvoyant)
