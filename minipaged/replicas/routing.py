"""Routers, which choose one of several engines (replicas) for each request.

A prompt costs less on a replica that has computed its beginning. So a router in front of replicas with prefix caches
has two conflicting goals: send a prompt to the replica that has its blocks, and give all replicas equal loads.
`PrefixAware` follows the first goal until the loads differ too much, and then the second. `RoundRobin` and
`LeastLoaded` ignore prefixes, and serve as baselines.

`PrefixAware` keeps a set of block hashes for each replica, computed as the prefix cache computes them
(`block_hashes.py`). A hash in it is either

- *stored*: the replica has reported the block as cached (`CacheNews`), and has not reported its eviction;
- *coming*: a prompt with this block was sent to the replica, which has not reported the block yet. Otherwise a burst
  of prompts with one new prefix would scatter before its first block is computed.

The number of each kind is bounded per replica. The least recently used hashes are forgotten first.

A replica publishes the latest changes of its cache, and the number of all changes so far. From that number a router
sees which of them are new to it. A router that has missed changes, because it started late or there were too many at
once, does not get them again. So its sets may be out of date. They can also be wrong: a request may be aborted before
it has computed its blocks. The only cost is that a prompt is computed again which another replica had in its cache.

The caller counts the loads: the number of unfinished requests of each replica that may be chosen now. A router must be
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
"""(hash of a block, whether it is in the cache now)."""
MOST_TOLD = 1 << 12
"""The number of changes that a replica publishes each time. They are its latest ones, also if it has published them
before. They take 50 KB, and suffice for 32,000 tokens per second in blocks of 16, if each new block evicts another."""


class Router(Protocol):
    """Chooses a replica for each request."""

    def choose(self, token_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        """Return the id of the replica to send a request to. The caller must send it there, because the router counts
        on it. `token_ids`: the prompt, with the request's salt (`block_hashes.salted`), which is part of the prefix.
        `loads`: replica id -> its number of unfinished requests. Only replicas in `loads` that were added and
        not removed can be chosen. Raises NoReplica if there is none."""

    def added(self, replica: str) -> None:
        """Add a replica with an empty cache. Does nothing if the router has it already."""

    def removed(self, replica: str) -> None:
        """Forget a replica that is gone."""


class RoundRobin(Router):
    """Chooses the replica that was chosen longest ago."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}  # replica -> number of its last choice
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
    """Chooses the replica with the fewest unfinished requests; among equals, the one chosen longest ago.

    So replicas with equal loads take turns, also if the caller never counts loads. A router that takes the first of
    several equals would send everything to one replica (sglang #15473).
    """

    def choose(self, token_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        return self._chosen(min(self._candidates(loads), key=lambda replica: (loads[replica], self._turns[replica])))


class PrefixAware(RoundRobin):
    """Chooses the replica that has computed the longest beginning of the prompt, unless its load is too high.

    The rule is SGLang's, with two changes. The limits are for loads of tens of requests instead of hundreds, and the
    rule looks at the load of the replica with the longest match instead of the highest load. A prompt goes to the least
    loaded replica instead if

    - the replica with the longest match has more than `apart` requests more than the least loaded replica, and also
      more than `ratio` times its number; or
    - the longest match is shorter than `least_match` of the prompt.
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
        """`block_size`: tokens per block in the replicas' engines. `most_stored`, `most_coming`: the largest numbers of
        hashes of each kind that are kept per replica."""
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
        of_use = hashes[: (len(token_ids) - 1) // self.block_size]  # the engine must run at least one token
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
        """Update a replica's hashes. `number`: the number of all changes of its cache so far; `changes`: the last ones.
        Ignored for a replica that was removed."""
        if replica in self._known:
            self._known[replica].follow(number, changes)

    def known(self, replica: str) -> frozenset[int]:
        """Return the stored hashes of a replica: the blocks that it has reported as cached."""
        return frozenset(self._known[replica].hashes)


class KnownBlocks:
    """The hashes of blocks in one replica's prefix cache, or soon in it. The most recently used is last."""

    def __init__(self, most_stored: int, most_coming: int) -> None:
        self.number = 0
        """The number of cache changes that the replica has reported so far."""
        self.hashes: OrderedDict[int, None] = OrderedDict()
        self.coming: OrderedDict[int, None] = OrderedDict()
        self._most_stored = most_stored
        self._most_coming = most_coming

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of leading hashes that the replica has or will have."""
        return next(
            (i for i, one in enumerate(hashes) if one not in self.hashes and one not in self.coming), len(hashes)
        )

    def expect(self, hashes: Sequence[int]) -> None:
        """Note that a prompt with these blocks was sent to the replica. Children are added before their parents, so
        that they are forgotten before them."""
        for one in reversed(hashes):
            if one in self.hashes:
                self.hashes.move_to_end(one)
            else:
                _use(self.coming, one)
        _forget(self.coming, self._most_coming)

    def follow(self, number: int, changes: Sequence[Change]) -> None:
        """Apply the changes that are new. Only the last change of each hash counts. They are applied in reverse,
        because parents are computed before their children, and must be forgotten after them."""
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
    """A listener that collects the changes of an engine's prefix cache: `Engine(..., listeners=[news])`.

    The engine's thread calls it with events. Any thread may call `latest`. Blocks that are not full have no hash, and
    are no news: an engine may find more of a prompt than a router counts on.
    """

    def __init__(self, most: int = MOST_TOLD) -> None:
        """`most`: the number of latest changes to keep."""
        self._hash_of: dict[int, int] = {}  # cached block -> its hash
        self._number = 0  # the number of all changes so far
        self._changes: deque[Change] = deque(maxlen=most)
        self._lock = Lock()

    def __call__(self, event: Event) -> None:
        match event:
            case BlockCached() if event.block_hash or not event.num_tokens:
                self._hash_of[event.block] = event.block_hash
                self._note(event.block_hash, True)
            case BlockEvicted() if event.block in self._hash_of:
                self._note(self._hash_of.pop(event.block), False)

    def _note(self, block_hash: int, is_there: bool) -> None:
        with self._lock:
            self._number += 1
            self._changes.append((block_hash, is_there))

    def latest(self) -> tuple[int, list[Change]]:
        """Return the number of changes so far, and the latest of them, as the arguments of `PrefixAware.told`."""
        with self._lock:
            return self._number, list(self._changes)
