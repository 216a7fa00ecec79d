"""Who gets a request, where several engines (replicas) could serve it.

A prompt whose beginning one replica has computed costs less there. So a router in front of replicas with prefix caches
has two aims that pull apart: to send a prompt where its blocks are, and to give everybody as much to do. `PrefixAware`
follows the first until loads are too far apart, and then the second. `RoundRobin` and `LeastLoaded` know nothing of
prefixes: what it is compared with.

What `PrefixAware` knows of each replica are the hashes of the blocks in its prefix cache, computed as the cache
computes them (`block_hashes.py`). A hash is there

- *stored*, when the replica has told so (`CacheNews`), until it tells that the block is evicted;
- *coming*, when a prompt with that block was sent there and nothing was told yet: otherwise a burst with one new
  prefix would scatter before its first block is computed.

Both are bounded for each replica, the least recently used go first. What is known may be late or wrong (a request that
was aborted computes nothing); then a prompt is computed again where it could have been found, no more.

Loads are the caller's to count: requests sent and not ended, for each replica that may be chosen now. A router is
called from one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from threading import Lock
from typing import Protocol

from minipaged.block_hashes import block_hashes
from minipaged.errors import NoReplica
from minipaged.events import BlockCached, BlockEvicted, Event


class Router(Protocol):
    """Chooses a replica for each request."""

    def choose(self, token_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        """The id of one of the replicas in `loads` (id -> requests outstanding there) that were added and not removed.
        Raises NoReplica when there is none. The caller sends the request there: the router reckons with it."""

    def added(self, replica: str) -> None:
        """A replica has come, with an empty cache. One that is known already stays as it is."""

    def removed(self, replica: str) -> None:
        """A replica has gone; what was known of it is forgotten."""


class RoundRobin(Router):
    """Whoever was chosen longest ago."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}  # replica -> when it was last chosen, counted in choices
        self._next_turn = count()

    def choose(self, token_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        return self._chosen(min(self._candidates(loads), key=self._turns.__getitem__))

    def added(self, replica: str) -> None:
        self._turns.setdefault(replica, next(self._next_turn))

    def removed(self, replica: str) -> None:
        self._turns.pop(replica, None)

    def _candidates(self, loads: Mapping[str, int]) -> list[str]:
        found = [replica for replica in loads if replica in self._turns]
        if not found:
            raise NoReplica("no replica is there to take the request; wait until one has started")
        return found

    def _chosen(self, replica: str) -> str:
        self._turns[replica] = next(self._next_turn)
        return replica


class LeastLoaded(RoundRobin):
    """Whoever has the fewest requests outstanding; of several, whoever was chosen longest ago.

    So they take turns where loads are equal, or are never counted: a router that takes the first of equals sends
    everything to one (sglang #15473).
    """

    def choose(self, token_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        return self._chosen(min(self._candidates(loads), key=lambda replica: (loads[replica], self._turns[replica])))


class PrefixAware(RoundRobin):
    """Whoever has computed the longest beginning of the prompt, unless it has too much to do already.

    The rule is SGLang's, with limits for loads of tens of requests instead of hundreds, and asked of the replica that
    would be chosen instead of the most loaded one. A prompt goes to the least loaded replica

    - where the one with the longest match has more than `apart` requests more than the least loaded, and more than
      `ratio` times as many;
    - where no match is `least_match` of the prompt or more.
    """

    def __init__(
        self,
        block_size: int,
        *,
        apart: int = 8,
        ratio: float = 1.5,
        least_match: float = 0.3,
        most_stored: int = 1 << 16,
        most_coming: int = 1 << 14,
    ) -> None:
        """`block_size`: of the replicas' engines, in tokens. `most_stored`, `most_coming`: known of a replica."""
        super().__init__()
        self.block_size = block_size
        self.apart = apart
        self.ratio = ratio
        self.least_match = least_match
        self._most_stored = most_stored
        self._most_coming = most_coming
        self._known: dict[str, KnownBlocks] = {}

    def choose(self, token_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        candidates = self._candidates(loads)
        hashes = block_hashes(token_ids, self.block_size)
        of_use = hashes[: (len(token_ids) - 1) // self.block_size]  # at least one token has to run
        matches = {replica: self._known[replica].match(of_use) for replica in candidates}

        def most_matched(replica: str) -> tuple[int, int, int]:
            return -matches[replica], loads[replica], self._turns[replica]

        def least_loaded(replica: str) -> tuple[int, int, int]:
            return loads[replica], -matches[replica], self._turns[replica]

        chosen, idlest = min(candidates, key=most_matched), min(candidates, key=least_loaded)
        too_busy = loads[chosen] - loads[idlest] > self.apart and loads[chosen] > self.ratio * loads[idlest]
        if too_busy or matches[chosen] * self.block_size < self.least_match * len(token_ids):
            chosen = idlest
        self._known[chosen].expect(hashes)
        return self._chosen(chosen)

    def added(self, replica: str) -> None:
        super().added(replica)
        self._known.setdefault(replica, KnownBlocks(self._most_stored, self._most_coming))

    def removed(self, replica: str) -> None:
        super().removed(replica)
        self._known.pop(replica, None)

    # --- What replicas publish ----------------------------------------------------------------------

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        """The replica's prefix cache has these blocks now. News of a replica that has gone is ignored."""
        if replica in self._known:
            self._known[replica].stored(hashes)

    def evicted(self, replica: str, hashes: Iterable[int]) -> None:
        """It has these no longer."""
        if replica in self._known:
            self._known[replica].evicted(hashes)

    def holds(self, replica: str, hashes: Iterable[int]) -> None:
        """It has these and no others: for who was not told everything from the beginning on."""
        if replica in self._known:
            self._known[replica].holds(hashes)

    def known(self, replica: str) -> frozenset[int]:
        """What the replica has, as far as it has told."""
        return frozenset(self._known[replica].hashes)


class KnownBlocks:
    """What one replica's prefix cache has, or will have, as far as the router knows: hashes, the latest used last."""

    def __init__(self, most_stored: int, most_coming: int) -> None:
        self.hashes: OrderedDict[int, None] = OrderedDict()
        self.coming: OrderedDict[int, None] = OrderedDict()
        self._most_stored = most_stored
        self._most_coming = most_coming

    def match(self, hashes: Sequence[int]) -> int:
        """How many of them, from the first on, are there."""
        return next(
            (i for i, one in enumerate(hashes) if one not in self.hashes and one not in self.coming), len(hashes)
        )

    def expect(self, hashes: Sequence[int]) -> None:
        """A prompt with these blocks goes there. Children first, so that they are forgotten before their parents."""
        for one in reversed(hashes):
            if one in self.hashes:
                self.hashes.move_to_end(one)
            else:
                _use(self.coming, one)
        _forget(self.coming, self._most_coming)

    def stored(self, hashes: Iterable[int]) -> None:
        for one in reversed(list(hashes)):
            self.coming.pop(one, None)
            _use(self.hashes, one)
        _forget(self.hashes, self._most_stored)

    def evicted(self, hashes: Iterable[int]) -> None:
        for one in hashes:
            self.hashes.pop(one, None)
            self.coming.pop(one, None)

    def holds(self, hashes: Iterable[int]) -> None:
        held = list(hashes)
        self.evicted(self.hashes.keys() - held)
        self.stored(one for one in held if one not in self.hashes)


def _use(hashes: OrderedDict[int, None], one: int) -> None:
    hashes[one] = None
    hashes.move_to_end(one)


def _forget(hashes: OrderedDict[int, None], most: int) -> None:
    while len(hashes) > most:
        hashes.popitem(last=False)


class CacheNews:
    """A listener for an engine's events, which a replica publishes from: `Engine(..., listeners=[news])`.

    The engine's thread calls it with events; any thread may ask.
    """

    def __init__(self, most: int = 1 << 17) -> None:
        """`most`: news kept for who never asks; then the oldest are dropped."""
        self._most = most
        self._hash_of: dict[int, int] = {}  # cached block -> its hash, in order of caching
        self._news: OrderedDict[int, bool] = OrderedDict()  # hash -> whether it is there now, in order of happening
        self._lock = Lock()

    def __call__(self, event: Event) -> None:
        match event:
            case BlockCached():
                with self._lock:
                    self._hash_of[event.block] = event.block_hash
                    self._tell(event.block_hash, True)
            case BlockEvicted():
                with self._lock:
                    self._tell(self._hash_of.pop(event.block), False)

    def _tell(self, block_hash: int, is_there: bool) -> None:
        self._news[block_hash] = is_there
        self._news.move_to_end(block_hash)
        if len(self._news) > self._most:
            self._news.popitem(last=False)

    def take(self) -> tuple[list[int], list[int]]:
        """The hashes that were stored and evicted since it was last asked: `Router.stored`, `Router.evicted`. One that
        was both is only what happened to it last."""
        with self._lock:
            news, self._news = self._news, OrderedDict()
        return [one for one, there in news.items() if there], [one for one, there in news.items() if not there]

    def held(self, most: int | None = None) -> list[int]:
        """The hashes of all cached blocks, or of the `most` that were cached last: `PrefixAware.holds`."""
        with self._lock:
            hashes = list(self._hash_of.values())
        return hashes if most is None else hashes[max(0, len(hashes) - most) :]
