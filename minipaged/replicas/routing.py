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

Both are bounded for each replica, the least recently used go first.

A replica publishes the latest changes of its cache, and how many there were in all. By that number a router sees which
of them it knows. What it has missed (it came late, or there were too many at once), nobody tells it again. So what is
known may be late, or wrong, as it is where a request was aborted and has computed nothing; then a prompt is computed
again where it could have been found, no more.

Loads are the caller's to count: requests sent and not ended, for each replica that may be chosen now. A router is
called from one thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import count
from threading import Lock
from typing import Protocol

from minipaged.errors import NoReplica
from minipaged.events import BlockCached, BlockEvicted, Event
from minipaged.handover.block_hashes import block_hashes

Change = tuple[int, bool]
"""The hash of a block, and whether it is in the cache now."""
MOST_TOLD = 1 << 12
"""Changes that a replica publishes each time, those it has told before among them: 50 KB. Enough for
32,000 tokens a second, in blocks of 16, each of which pushes out another."""


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

    def told(self, replica: str, number: int, changes: Sequence[Change]) -> None:
        """The replica's prefix cache has changed so often, in the end so. News of one that has gone is ignored."""
        if replica in self._known:
            self._known[replica].follow(number, changes)

    def known(self, replica: str) -> frozenset[int]:
        """What the replica has, as far as it has told."""
        return frozenset(self._known[replica].hashes)


class KnownBlocks:
    """What one replica's prefix cache has, or will have, as far as the router knows: hashes, the latest used last."""

    def __init__(self, most_stored: int, most_coming: int) -> None:
        self.number = 0
        """Changes that there were, as far as it has told."""
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

    def follow(self, number: int, changes: Sequence[Change]) -> None:
        """Of each hash the last change counts. Parents are computed first, and are to be forgotten last."""
        new, self.number = number - self.number, number
        for one, is_there in reversed(dict(changes[max(0, len(changes) - new) :]).items()):
            self.coming.pop(one, None)
            if is_there:
                _use(self.hashes, one)
            else:
                self.hashes.pop(one, None)
        _forget(self.hashes, self._most_stored)


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

    def __init__(self, most: int = MOST_TOLD) -> None:
        """`most`: changes that are told each time, the latest."""
        self._hash_of: dict[int, int] = {}  # cached block -> its hash
        self._number = 0  # of changes until now
        self._changes: deque[Change] = deque(maxlen=most)
        self._lock = Lock()

    def __call__(self, event: Event) -> None:
        match event:
            case BlockCached():
                self._hash_of[event.block] = event.block_hash
                self._note(event.block_hash, True)
            case BlockEvicted():
                self._note(self._hash_of.pop(event.block), False)

    def _note(self, block_hash: int, is_there: bool) -> None:
        with self._lock:
            self._number += 1
            self._changes.append((block_hash, is_there))

    def latest(self) -> tuple[int, list[Change]]:
        """How many changes there were, and the last of them: `PrefixAware.told`."""
        with self._lock:
            return self._number, list(self._changes)
