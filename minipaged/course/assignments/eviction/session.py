"""Calls a student's eviction policy, and checks each answer against the blocks on each floor.

An `EvictionSession` has one policy in the worker, and a `FlooredCache` in the grader that asks it. There is not one
right answer: any block may leave that is on the floor, not pinned, and without children there. So a script makes the
same requests on a `FlooredCache` of its own, which follows the answers of a policy, whatever they are.

In the session's events, each request is a sequence with one token per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Self

from minipaged import events as ev
from minipaged.course.grader.assignment import Bench
from minipaged.course.grader.counterexample import aligned
from minipaged.course.grader.session import Session
from minipaged.course.sandbox.contract import Handle, Raised
from minipaged.errors import Invariant
from minipaged.simulation.floored_cache import Floor, FlooredCache, WrongEviction

FLOORS: tuple[Floor, ...] = ("device", "host")


@dataclass(frozen=True, slots=True)
class EvictionStep:
    """One step of a program: its kind, the tokens of a request (one for each block), and a number that chooses."""

    kind: str
    tokens: tuple[int, ...] = ()
    a: int = 0


class EvictionSession(Session):
    """One policy of the student's, and the cache that asks it."""

    KIND = "a policy"

    def __init__(self, bench: Bench, device: int, host: int, *, beside: Self | None = None) -> None:
        """`beside` is an earlier session with the same steps; this one's answers have to be equal to those."""
        super().__init__(bench, beside=beside)
        self._beside = beside
        self._cache = FlooredCache(self, device, host, self._moved)
        self._variable = "again" if beside else "cache"
        self._blocks: dict[tuple[int, ...], int] = {}
        """The number of each block, by the tokens of its text."""
        self._tables: dict[int, list[int]] = {}
        """The places on the device of each running request's blocks, by the request's number."""
        self._places: dict[Floor, dict[int, int]] = {"device": {}, "host": {}}
        """Block -> its place on the floor."""
        self._events: list[ev.Event] = [ev.EngineStarted(device, host + 1, 1, 64)]
        made = f"{self._name}({device}, {host})"
        self._lines.append(f"{self._variable} = FlooredCache({made}, {device}, {host})")
        if beside is None:
            self._policy = self._make(made, device, host)
        else:  # `_make` would seed the random module again
            self._policy = self._call((self._module, self._name, (device, host)), made)

    def run(self, steps: Sequence[EvictionStep]) -> None:
        """Carry out the steps, and compare the answers with those of the earlier session."""
        for number, step in enumerate(steps, 1):
            self._events.append(ev.StepStarted(number))
            try:
                getattr(self, f"_{step.kind}")(step)
            except WrongEviction as error:
                self._fail(str(error), invariant=Invariant.PINNED_IN_FLIGHT if "is pinned" in str(error) else None)
            self._events.append(ev.StepFinished(number, 1, 1, 0.0))
        if self._beside and (before := self._beside._cache.evicted) != (now := self._cache.evicted):
            first = next(place for place, (one, other) in enumerate(zip(before, now, strict=False)) if one != other)
            self._fail(
                f"two policies got the same calls; evict({now[first][0]!r}, ...) of one returned {before[first][1]}, "
                f"of the other {now[first][1]}",
                'assert again.evicted == cache.evicted, f"{again.evicted}, and before {cache.evicted}"',
            )

    # --- The steps of programs --------------------------------------------------------------------

    def _begin(self, step: EvictionStep) -> None:
        """Begin a request, which goes on running."""
        texts = [step.tokens[: length + 1] for length in range(len(step.tokens))]
        path = [self._blocks.setdefault(text, len(self._blocks)) for text in texts]
        number = self._cache.num_requests
        self._lines.append(f"{self._variable}.begin({path})  # request {number}")
        name = f"r{number}"
        self._events += [ev.RequestArrived(name, number, step.tokens, 1), ev.RequestAdmitted(name)]
        there = self._places["device"]
        self._tables[number] = found = [there[block] for block in takewhile(there.__contains__, path)]
        if found:
            self._events.append(ev.PrefixReused(number, tuple(found), "cache", len(found)))
        self._cache.begin(path)

    def _visit(self, step: EvictionStep) -> None:
        """Begin a request, and end it at once."""
        self._begin(step)
        self._finish(max(self._tables))

    def _end(self, step: EvictionStep) -> None:
        """End a request that runs."""
        if self._tables:
            self._finish([*self._tables][step.a % len(self._tables)])

    def _finish(self, number: int) -> None:
        self._lines.append(f"{self._variable}.end({number})")
        self._cache.end(number)
        self._freed(number)

    def _freed(self, number: int) -> None:
        if table := self._tables.pop(number):
            self._events.append(ev.BlocksFreed(number, tuple(table)))
        name = f"r{number}"
        self._events += [ev.SequenceFinished(name, number, "length"), ev.RequestFinished(name, "finished")]

    def _evict(self, step: EvictionStep) -> None:
        """Evict a block, though there may be room."""
        floor = FLOORS[step.a % 2]
        self._lines.append(f"{self._variable}.evict({floor!r})")
        self._cache.evict(floor)

    def _drain(self, step: EvictionStep) -> None:
        """End all requests, and evict all blocks."""
        self._lines.append(f"{self._variable}.drain()")
        for number in [*self._tables]:
            self._freed(number)
        self._cache.drain()

    # --- The policy that the cache asks -----------------------------------------------------------

    def use(self, block: int, parent: int | None) -> None:
        self._call((self._policy, "use", (block, parent)), f"policy.use({block}, {parent})")

    def evict(self, floor: Floor, pinned: Sequence[int]) -> Any:
        shown = f"policy.evict({floor!r}, {pinned})"
        answer = self._call((self._policy, "evict", (floor, pinned)), shown)
        if isinstance(answer, Handle):
            self._fail(f"{shown} returned an object of type {answer.kind}; it has to return a block, or None")
        return answer

    def _call(self, call: tuple[Any, str, Sequence[Any]], shown: str) -> Any:
        [answer] = self._ask([call], shown)
        if isinstance(answer, Raised):
            self._raised(call[1], answer.error, shown)
        return answer

    def _moved(self, block: int, source: Floor | None, destination: Floor | None) -> None:
        """Note where a block lies now."""
        left = self._places[source].pop(block) if source else None
        taken = self._places[destination].values() if destination else ()
        place = next(place for place in range(len(taken) + 1) if place not in taken)
        if destination:
            self._places[destination][block] = place
        if destination == "device":
            number = self._cache.num_requests - 1
            table = self._tables[number]
            if left is None:
                self._events.append(ev.TokensComputed(number, len(table) + 1, (place,), 0))
            else:
                self._events += [ev.BlocksPromoted(number, ((left, place),)), ev.HostBlockDropped(left, "room")]
            self._events.append(ev.BlockCached(number, len(table), place, 0, 1))
            table.append(place)
        elif left is not None:
            if destination == "host":
                self._events += [ev.BlockDemoted(left, place), ev.BlockEvicted(left)]
            else:
                self._events.append(ev.HostBlockDropped(left, "room"))

    # --- Telling ----------------------------------------------------------------------------------

    def _imports(self) -> list[str]:
        return ["from minipaged.simulation.floored_cache import FlooredCache"]

    def _interrupted(self, shown: str) -> str:
        return shown

    def _story(self, message: str) -> tuple[ev.Event, ...]:
        return (*self._events, ev.StepFailed(len(self._events), message, ()))

    def _draw(self) -> tuple[str, ...]:
        cache, rows = self._cache, [["block", "parent", "lies on", "pinned by"]]
        for floor in FLOORS:
            for block, parent in cache.on[floor].items():
                by = [f"request {number}" for number, held in cache.running.items() if block in held]
                rows.append([str(block), "-" if parent is None else str(parent), f"the {floor}", ", ".join(by)])
        return tuple(aligned(rows)) if len(rows) > 1 else ("nothing is cached",)
