"""A prefix cache with two floors, without tokens: which block leaves a floor is up to a policy, and costs seconds.

    device    the blocks that requests use
                │ evict   ▲ use
                ▼         │
    host      the blocks that the device has given up
                │ evict
                ▼
              gone: its next use computes it again

A block is a number. Its parent is the block before it in the text. A request uses a path: a first block, which has no
parent, then children. It finds the blocks at the beginning of its path that lie on either floor, and computes the
others. What it has found or computed is *pinned* until the request ends.

On each floor, a block leaves only after its children on that floor. So the parent of a block on the device lies on the
device too, and the parents of all blocks are in the cache: a block without its parent could not be found.

`prompts` makes requests up: chats below a few shared system prompts, and documents that nobody reads again. Equal seeds
give equal requests. `serve` serves them with a policy, and returns the share of seconds that the cache has saved.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count, takewhile
from typing import Literal, Protocol

from minipaged.errors import MinipagedError

Floor = Literal["device", "host"]
Path = list[int]
"""The blocks of a request, in the order of its text."""

COMPUTE_SECONDS = 1.0
"""The time that it takes to compute a block."""
CARRY_SECONDS = 0.1
"""The time that it takes to carry a block from the host to the device."""
DEVICE_BLOCKS, HOST_BLOCKS = 72, 144
"""The sizes of the floors when `prompts` are served."""
AT_ONCE = 3
"""The number of requests that run at the same time, and whose blocks are pinned."""


class EvictionPolicy(Protocol):
    """Decides which block leaves a floor."""

    def use(self, block: int, parent: int | None) -> object:
        """Note that a request uses this block. From now on it lies on the device, wherever it was."""

    def evict(self, floor: Floor, pinned: Sequence[int]) -> int | None:
        """Return the block that leaves the floor, down to the host, or out of the cache; None if none may leave."""


class WrongEviction(MinipagedError):
    """A policy evicts a block that may not leave, or none although one may."""


class FlooredCache:
    """The blocks on each floor, and the requests that use them. Asks a policy which block leaves a floor."""

    def __init__(
        self,
        policy: EvictionPolicy,
        device: int,
        host: int,
        moved: Callable[[int, Floor | None, Floor | None], object] = lambda *_: None,
    ) -> None:
        """`device` and `host`: the number of blocks that each floor has room for. `moved` is called for each block that
        moves, with the floors that it comes from and goes to; None is outside of the cache."""
        self._policy = policy
        self._moved = moved
        self.sizes: dict[Floor, int] = {"device": device, "host": host}
        self.on: dict[Floor, dict[int, int | None]] = {"device": {}, "host": {}}
        """Block -> its parent, for each floor."""
        self._children: dict[Floor, Counter[int | None]] = {"device": Counter(), "host": Counter()}
        self.running: dict[int, Path] = {}
        """The blocks that each running request pins, by the number of the request."""
        self.num_requests = 0
        self.evicted: list[tuple[Floor, int | None]] = []
        """All answers of the policy."""
        self.num_blocks = 0
        """The number of blocks of all requests so far."""
        self.seconds = 0.0
        """The time that they took."""

    @property
    def saved(self) -> float:
        """The share of seconds that the cache has saved. Without a cache, each block is computed."""
        return 1 - self.seconds / (COMPUTE_SECONDS * self.num_blocks)

    @property
    def pinned(self) -> list[int]:
        """The blocks that running requests have found or computed."""
        return sorted({block for held in self.running.values() for block in held})

    def floor_of(self, block: int) -> Floor | None:
        """Return the floor that the block lies on."""
        return next((floor for floor, blocks in self.on.items() if block in blocks), None)

    # --- Requests ---------------------------------------------------------------------------------

    def begin(self, path: Sequence[int]) -> int:
        """Begin a request that uses these blocks, and return its number. It runs, and pins its blocks, until `end`.

        When no block may leave a device that is full, the rest of the path is computed and not cached.
        """
        number = self.num_requests
        self.num_requests += 1
        self.running[number] = held = [*takewhile(self.floor_of, path)]
        self.num_blocks += len(path)
        for place, (parent, block) in enumerate(zip([None, *path], path, strict=False)):
            floor = self.floor_of(block)
            is_full = len(self.on["device"]) >= self.sizes["device"]
            if floor != "device" and is_full and self.evict("device") is None:
                self.seconds += COMPUTE_SECONDS * (len(path) - place)
                break
            self.seconds += {"device": 0.0, "host": CARRY_SECONDS, None: COMPUTE_SECONDS}[floor]
            self._policy.use(block, parent)
            if floor != "device":
                self._move(block, parent, floor, "device")
            if place >= len(held):
                held.append(block)
        return number

    def end(self, number: int) -> None:
        """End a request: its blocks stay, and are not pinned by it any more."""
        del self.running[number]

    def evict(self, floor: Floor) -> int | None:
        """Let a block leave the floor, which may be full or not, and return it. Returns None if no block may leave.

        A block that leaves the device goes to the host, and so may make another one leave the host, or itself. Raises
        WrongEviction.
        """
        pinned = self.pinned
        block = self._policy.evict(floor, pinned)
        if why := self._why_wrong(floor, block, pinned):
            allowed = " or ".join(map(str, self.may_leave(floor, pinned))) or "None"
            returned = f"policy.evict({floor!r}, {pinned}) returned {block!r}"
            raise WrongEviction(f"{returned}; it should return {allowed}: {why}")
        self.evicted.append((floor, block))
        if block is not None:
            self._move(block, self.on[floor][block], floor, "host" if floor == "device" else None)
        if len(self.on["host"]) > self.sizes["host"]:
            self.evict("host")
        return block

    def drain(self) -> None:
        """End all requests and evict all blocks. Raises WrongEviction, also for a block that the policy has lost."""
        self.running.clear()
        for floor in self.on:
            while self.evict(floor) is not None:
                pass

    # --- Which block may leave --------------------------------------------------------------------

    def may_leave(self, floor: Floor, pinned: Collection[int]) -> list[int]:
        """Return the blocks of the floor that are not pinned and have no child on it."""
        return [block for block in self.on[floor] if self._why_wrong(floor, block, pinned) is None]

    def _why_wrong(self, floor: Floor, block: object, pinned: Collection[int]) -> str | None:
        """Return the reason why this answer is wrong, or None."""
        if block is None:
            return next((f"block {one} may leave" for one in self.may_leave(floor, pinned)), None)
        if isinstance(block, bool) or not isinstance(block, int):
            return "a block is an int"
        if block not in self.on[floor]:
            return f"block {block} is on the {self.floor_of(block)}" if self.floor_of(block) else "it is not cached"
        if block in pinned:
            return f"block {block} is pinned"
        if self._children[floor][block]:
            child = next(one for one, parent in self.on[floor].items() if parent == block)
            return f"block {block} is the parent of block {child}, which is on the {floor} too"
        return None

    def _move(self, block: int, parent: int | None, source: Floor | None, destination: Floor | None) -> None:
        if source:
            del self.on[source][block]
            self._children[source][parent] -= 1
        if destination:
            self.on[destination][block] = parent
            self._children[destination][parent] += 1
        self._moved(block, source, destination)


def serve(requests: Iterable[Sequence[int]], policy: EvictionPolicy) -> float:
    """Serve the requests, AT_ONCE of them at a time, and return the share of seconds that the cache has saved.

    The cache has DEVICE_BLOCKS and HOST_BLOCKS. Raises WrongEviction.
    """
    cache = FlooredCache(policy, DEVICE_BLOCKS, HOST_BLOCKS)
    for path in requests:
        if len(cache.running) == AT_ONCE:
            cache.end(min(cache.running))
        cache.begin(path)
    return cache.saved


def prompts(seed: int, num_requests: int) -> list[Path]:
    """Return made-up requests: turns of chats below shared system prompts, and documents that are read once."""
    drawn, names = random.Random(f"prompts {seed}"), count()

    def new(least: int, most: int) -> Path:
        return [next(names) for _ in range(drawn.randint(least, most))]

    systems = [new(3, 8) for _ in range(8)]
    popular = [1 / place for place in range(1, 9)]
    chats: list[Path] = []  # those that may go on, the one that was silent longest first
    requests: list[Path] = []
    while len(requests) < num_requests:
        kind = drawn.random()
        if kind < 0.3:
            requests.append(new(8, 20))
            continue
        if kind < 0.75 and chats:
            chat = chats.pop(-1 - min(len(chats) - 1, int(drawn.expovariate(1 / 12))))
        else:
            [chat] = drawn.choices(systems, popular)
        chat = chat + new(1, 4)
        requests.append(chat)
        if len(chat) < 22 and drawn.random() < 0.7:
            chats = [*chats[-39:], chat]
    return requests
