"""The state of a run, folded from the engine's events alone.

The engine is never asked: it says what happens, and whoever follows its events from the first on knows every queue,
block table and reference count (paper, Figs. 6 and 8). So any run can be drawn, also one that was written to a file.

`State` is what the engine had after some number of events; `apply` follows one more.

A request is in one of three queues, as are its sequences:

    waiting     new, or preempted and to be recomputed: its sequences hold nothing
    running     its sequences hold device blocks
    swapped     preempted, its sequences hold host blocks (section 4.5)

An event costs no more than the blocks it names, however many sequences there are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from string import ascii_lowercase, ascii_uppercase
from typing import Literal

from minipaged.events import (
    BlockCached,
    BlockCopied,
    BlockDeduplicated,
    BlockEvicted,
    BlocksFreed,
    BlocksLoaded,
    BlocksStored,
    EngineStarted,
    Event,
    PrefixReused,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    RequestRefused,
    SequenceFinished,
    SequenceForked,
    StepFailed,
    StepFinished,
    StepStarted,
    SwappedIn,
    SwappedOut,
    TokenGenerated,
    TokensComputed,
)

LETTERS = ascii_uppercase + ascii_lowercase
NO_LETTER = "*"
"""For the sequences that hold blocks when all letters are taken."""
KEPT_REQUESTS = 8
"""How many finished requests are remembered, so that their texts can still be read."""
RECENT_STEPS = 20
"""Over how many steps tokens per second are taken."""


@dataclass(eq=False, slots=True)
class LiveSequence:
    """One sequence: its tokens, and where their keys and values are."""

    number: int
    request: LiveRequest
    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    letter: str = ""
    """What it is called, from when it first holds blocks."""
    table: list[int] = field(default_factory=list)
    """Its blocks in logical order; once it has ended, those that it gave back."""
    num_computed: int = 0
    """Filled slots of the table."""
    swapped: bool = False
    """Whether `table` holds numbers of host blocks."""
    ended: str | None = None
    """The reason, once it has finished."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    def tokens_in(self, logical_block: int, block_size: int) -> tuple[int, ...]:
        """Those whose slots are in one block of its table, as far as they are filled and known."""
        start, stop = logical_block * block_size, min(self.num_computed, (logical_block + 1) * block_size)
        after = len(self.prompt)
        return (*self.prompt[start:stop], *self.output[max(0, start - after) : max(0, stop - after)])


@dataclass(eq=False, slots=True)
class LiveRequest:
    """One request and its sequences."""

    name: str
    order: int
    """Of arrival."""
    prompt: tuple[int, ...]
    queue: Literal["waiting", "running", "swapped"] = "waiting"
    sequences: list[LiveSequence] = field(default_factory=list)
    """Those that go on."""
    done: list[LiveSequence] = field(default_factory=list)
    """Those that have ended, without the beams that were dropped."""
    preempted: bool = False
    """Whether it was preempted and is not back yet."""
    joining: bool = False
    """Whether it was just admitted for the first time, and has computed nothing."""


@dataclass(slots=True)
class PoolState:
    """The blocks of one memory: who holds each, and how full it is. Blocks that nobody holds are in no dict."""

    num_blocks: int
    holders: dict[int, list[int]] = field(default_factory=dict)
    """Block -> the numbers of the sequences whose tables hold it."""
    filled: dict[int, int] = field(default_factory=dict)
    """Block -> its filled slots."""
    num_filled: int = 0
    """Filled slots of all held blocks."""
    last_request: dict[int, str] = field(default_factory=dict)
    """Block -> the request that gave it back last."""
    most_used: int = 0
    highest: int = -1
    """The highest block ever held."""

    def hold(self, block: int, sequence: LiveSequence, filled: int) -> None:
        """One more table entry names the block."""
        self.holders.setdefault(block, []).append(sequence.number)
        self.highest = max(self.highest, block)
        self.most_used = max(self.most_used, len(self.holders))
        self.fill(block, filled)

    def fill(self, block: int, filled: int) -> None:
        """The block has so many filled slots now."""
        self.num_filled += filled - self.filled.get(block, 0)
        self.filled[block] = filled

    def release(self, block: int, sequence: LiveSequence) -> None:
        """One table entry less. Of the last holder of all, the name is kept."""
        holders = self.holders[block]
        holders.remove(sequence.number)
        if not holders:
            del self.holders[block]
            self.num_filled -= self.filled.pop(block)
            self.last_request[block] = sequence.request.name

    def copy(self) -> PoolState:
        return PoolState(
            self.num_blocks,
            {block: [*holders] for block, holders in self.holders.items()},
            dict(self.filled),
            self.num_filled,
            dict(self.last_request),
            self.most_used,
            self.highest,
        )


@dataclass(slots=True)
class State:
    """Everything that is known after some number of events."""

    block_size: int = 1
    max_model_len: int = 1
    step: int = 0
    device: PoolState = field(default_factory=lambda: PoolState(0))
    host: PoolState = field(default_factory=lambda: PoolState(0))
    cached: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Device blocks that the prefix cache holds, beside the sequences that do, and the tokens in them."""
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    sequences: dict[int, LiveSequence] = field(default_factory=dict)
    waiting: list[LiveRequest] = field(default_factory=list)
    """In order of arrival; those that are swapped out among them, as in the engine."""
    running: list[LiveRequest] = field(default_factory=list)
    num_swapped: int = 0
    """How many of the waiting are swapped out."""
    finished: deque[LiveRequest] = field(default_factory=lambda: deque(maxlen=KEPT_REQUESTS))
    """The last few, which change no more."""
    forks: list[tuple[LiveSequence, LiveSequence]] = field(default_factory=list)
    """Parent and child, of this step."""
    dropped: dict[int, tuple[LiveSequence, tuple[int, ...]]] = field(default_factory=dict)
    """Beams dropped in this step, with the blocks that they gave back."""
    contiguous_tokens: int = 0
    """Tokens of all sequences on the device, each counted with its whole context: nothing is shared."""
    num_on_device: int = 0
    """Sequences that hold device blocks: a contiguous cache would have reserved room for each."""
    num_arrived: int = 0
    num_generated: int = 0
    most_sequences: int = 0
    """In the largest batch."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often each kind of event occurred, and how many blocks or tokens some were about."""
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Seconds of the last steps, and the tokens generated by then."""
    letters: deque[str] = field(default_factory=lambda: deque(LETTERS))
    """Those that are free. The one that was freed first is taken next, so that a letter seldom changes hands."""

    # --- What can be read off ---------------------------------------------------------------------

    def ref_count(self, block: int) -> int:
        """Of a device block: table entries, and the prefix cache."""
        return len(self.device.holders.get(block, ())) + (block in self.cached)

    @property
    def num_cached_only(self) -> int:
        """Blocks that nobody but the prefix cache holds: they count as room."""
        return len(self.cached) - sum(block in self.device.holders for block in self.cached)

    @property
    def num_free(self) -> int:
        """Device blocks that nobody holds, the prefix cache included."""
        return self.device.num_blocks - len(self.device.holders) - self.num_cached_only

    @property
    def swapped(self) -> list[LiveRequest]:
        return [request for request in self.waiting if request.queue == "swapped"]

    def tokens_per_second(self) -> float | None:
        """Over the last steps; None before there are two."""
        if len(self.recent) < 2:
            return None
        seconds = sum(seconds for seconds, _ in self.recent) - self.recent[0][0]
        return (self.recent[-1][1] - self.recent[0][1]) / seconds if seconds > 0 else None

    def _pool_of(self, sequence: LiveSequence) -> PoolState:
        return self.host if sequence.swapped else self.device

    # --- One event more ---------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Follow one event. They must come in order, from the first. Raises LookupError or ValueError if they do not.

        The first event of another run starts everything anew.
        """
        self.counts[event.name] += 1
        match event:
            case TokensComputed():
                self._extend(self.sequences[event.sequence], event)
            case TokenGenerated():
                self.sequences[event.sequence].output.append(event.token_id)
                self.num_generated += 1
            case StepStarted():
                self.step = event.step
                self.forks, self.dropped = [], {}
            case StepFinished():
                self.most_sequences = max(self.most_sequences, event.num_sequences)
                self.recent.append((event.seconds, self.num_generated))
            case BlockCopied():
                self._copy(event)
            case BlocksFreed():
                self._give_back(self.sequences[event.sequence], event.blocks)
            case SequenceForked():
                self._fork(event)
            case SequenceFinished():
                self._end(self.sequences[event.sequence], event.reason)
            case BlockCached():
                self._cache(self.sequences[event.sequence], event)
            case BlockEvicted():
                self._evict(event.block)
            case BlockDeduplicated():
                self._deduplicate(event)
            case PrefixReused():
                self._reuse(self.sequences[event.sequence], event)
            case BlocksLoaded():
                self._load(self.sequences[event.sequence], event.blocks)
            case BlocksStored():
                self.counts["blocks stored"] += len(event.blocks)
            case _:
                self._apply_to_request(event)

    def _apply_to_request(self, event: Event) -> None:
        match event:
            case EngineStarted():
                self.__init__()  # type: ignore[misc]
                self.device, self.host = PoolState(event.num_blocks), PoolState(event.num_swap_blocks)
                self.block_size, self.max_model_len = event.block_size, event.max_model_len
                self.counts[event.name] += 1
            case RequestArrived():
                self._arrive(event)
            case RequestAdmitted():
                self._start(self.requests[event.request])
                self.requests[event.request].joining = not self.requests[event.request].preempted
            case RequestPreempted():
                self._stop(self.requests[event.request])
                self.counts[f"preempted by {event.mode}"] += 1
            case SwappedOut():
                self._move(event.request, event.pairs, to_host=True)
                self.counts["blocks swapped out"] += len(event.pairs)
            case SwappedIn():
                self._move(event.request, event.pairs, to_host=False)
                self._start(self.requests[event.request])
                self.counts["blocks swapped in"] += len(event.pairs)
            case RequestFinished():
                self._finish(event.request)
            case StepFailed():
                for name in event.requests:
                    self._recover(self.requests[name])
            case RequestRefused():
                pass

    # --- Queues -----------------------------------------------------------------------------------

    def _arrive(self, event: RequestArrived) -> None:
        prompt = event.prompt_token_ids
        request = LiveRequest(event.request, self.num_arrived, prompt)
        sequence = LiveSequence(event.sequence, request, prompt)
        request.sequences.append(sequence)
        self.num_arrived += 1
        self.requests[event.request] = request
        self.sequences[event.sequence] = sequence
        self.waiting.append(request)

    def _start(self, request: LiveRequest) -> None:
        _take(self.waiting, request)
        insort(self.running, request, key=_order)
        self.num_swapped -= request.queue == "swapped"
        request.queue = "running"

    def _stop(self, request: LiveRequest) -> None:
        _take(self.running, request)
        insort(self.waiting, request, key=_order)
        request.queue = "waiting"
        request.preempted = True

    def _recover(self, request: LiveRequest) -> None:
        """A step has failed: its blocks are gone, also those on the host."""
        if request.queue == "running":
            self._stop(request)
        elif request.queue == "swapped":
            self.num_swapped -= 1
            request.queue = "waiting"

    def _finish(self, name: str) -> None:
        request = self.requests.pop(name)
        _take(self.running if request.queue == "running" else self.waiting, request)
        self.num_swapped -= request.queue == "swapped"
        self.finished.append(request)

    # --- Sequences --------------------------------------------------------------------------------

    def _name(self, sequence: LiveSequence) -> None:
        if not sequence.letter:
            sequence.letter = self.letters.popleft() if self.letters else NO_LETTER

    def _fork(self, event: SequenceForked) -> None:
        parent = self.sequences[event.parent]
        child = LiveSequence(event.child, parent.request, parent.prompt, [*parent.output], swapped=parent.swapped)
        self._name(child)
        self.sequences[event.child] = child
        parent.request.sequences.append(child)
        self._adopt(child, parent.table, parent.num_computed)
        self.forks.append((parent, child))

    def _end(self, sequence: LiveSequence, reason: str) -> None:
        """Its blocks are given back next, if it holds any; then nothing is left of it."""
        sequence.ended = reason
        if reason == "dropped":
            self.dropped[sequence.number] = (sequence, ())
        if not sequence.table:
            self._forget(sequence)

    def _forget(self, sequence: LiveSequence) -> None:
        del self.sequences[sequence.number]
        sequence.request.sequences.remove(sequence)
        if sequence.ended != "dropped":
            sequence.request.done.append(sequence)
        if sequence.letter not in ("", NO_LETTER):
            self.letters.append(sequence.letter)

    # --- Block tables -----------------------------------------------------------------------------

    def _extend(self, sequence: LiveSequence, event: TokensComputed) -> None:
        self.counts["tokens computed"] += event.num_tokens - sequence.num_computed
        self.counts["tokens recomputed"] += event.recomputed
        self._grow(sequence, event.num_tokens, event.new_blocks)
        sequence.request.preempted = sequence.request.joining = False

    def _load(self, sequence: LiveSequence, blocks: tuple[int, ...]) -> None:
        self.counts["blocks loaded"] += len(blocks)
        self._grow(sequence, sequence.num_computed + len(blocks) * self.block_size, blocks)

    def _grow(self, sequence: LiveSequence, num_tokens: int, new_blocks: tuple[int, ...]) -> None:
        self._name(sequence)
        size, start = self.block_size, sequence.num_computed
        if not sequence.table:
            self.num_on_device += 1
        self.contiguous_tokens += num_tokens - start
        sequence.table += new_blocks
        sequence.num_computed = num_tokens
        for block in new_blocks:
            self.device.hold(block, sequence, 0)
        # A faulty table may have fewer blocks than tokens: they are followed, too.
        for logical in range(start // size, min(len(sequence.table), -(-num_tokens // size))):
            self.device.fill(sequence.table[logical], min(size, num_tokens - logical * size))

    def _reuse(self, sequence: LiveSequence, event: PrefixReused) -> None:
        if sequence.table:
            raise ValueError(f"the table of sequence {sequence.number} begins already, with {sequence.table}")
        self._name(sequence)
        self._adopt(sequence, list(event.blocks), len(event.blocks) * self.block_size)
        if event.source == "cache":
            self.counts["tokens found in cache"] += len(event.blocks) * self.block_size

    def _copy(self, event: BlockCopied) -> None:
        if self.ref_count(event.source) != event.holders:
            raise ValueError(
                f"block {event.source} has {self.ref_count(event.source)} holders before the copy, not {event.holders}"
            )
        self._replace(event.sequence, event.logical_block, event.source, event.destination)

    def _adopt(self, sequence: LiveSequence, blocks: list[int], num_computed: int) -> None:
        """An empty table begins with blocks that others hold, or the prefix cache."""
        sequence.table, sequence.num_computed = [*blocks], num_computed
        pool = self._pool_of(sequence)
        for logical, block in enumerate(blocks):
            pool.hold(block, sequence, min(self.block_size, num_computed - logical * self.block_size))
        if blocks and not sequence.swapped:
            self.num_on_device += 1
            self.contiguous_tokens += num_computed

    def _replace(self, number: int, logical: int, old: int, new: int) -> None:
        """One entry of a table names another block with the same content."""
        sequence = self.sequences[number]
        self._check_entry(sequence, logical, old)
        filled = self.device.filled[old]
        self.device.release(old, sequence)
        self.device.hold(new, sequence, filled)
        sequence.table[logical] = new

    def _check_entry(self, sequence: LiveSequence, logical: int, block: int) -> None:
        if sequence.table[logical] != block:
            raise ValueError(
                f"entry {logical} of the table of sequence {sequence.number} is {sequence.table[logical]}, not {block}"
            )

    def _give_back(self, sequence: LiveSequence, blocks: tuple[int, ...]) -> None:
        if sequence.table != list(blocks):
            raise ValueError(f"sequence {sequence.number} holds blocks {sequence.table}, not {list(blocks)}")
        pool = self._pool_of(sequence)
        for block in blocks:
            pool.release(block, sequence)
        if not sequence.swapped:
            self.num_on_device -= 1
            self.contiguous_tokens -= sequence.num_computed
        if sequence.number in self.dropped:
            self.dropped[sequence.number] = (sequence, blocks)
        if sequence.ended:
            self._forget(sequence)
        else:
            sequence.table, sequence.num_computed, sequence.swapped = [], 0, False

    def _move(self, name: str, pairs: Iterable[tuple[int, int]], *, to_host: bool) -> None:
        """Relocate all tables of a request; a block that they share is moved once and stays shared."""
        request, new = self.requests[name], dict(pairs)
        source, target = (self.device, self.host) if to_host else (self.host, self.device)
        for sequence in request.sequences:
            filled = [
                min(self.block_size, sequence.num_computed - i * self.block_size) for i in range(len(sequence.table))
            ]
            for block, slots in zip(sequence.table, filled, strict=True):
                source.release(block, sequence)
                target.hold(new[block], sequence, slots)
            sequence.table = [new[block] for block in sequence.table]
            sequence.swapped = to_host
            if sequence.table:
                self.num_on_device += -1 if to_host else 1
                self.contiguous_tokens += -sequence.num_computed if to_host else sequence.num_computed
        if to_host:
            request.queue = "swapped"
            self.num_swapped += 1
        else:
            request.preempted = False

    # --- The prefix cache -------------------------------------------------------------------------

    def _cache(self, sequence: LiveSequence, event: BlockCached) -> None:
        self._check_entry(sequence, event.logical_block, event.block)
        self.cached[event.block] = sequence.tokens_in(event.logical_block, self.block_size)

    def _deduplicate(self, event: BlockDeduplicated) -> None:
        if event.cached not in self.cached:
            raise ValueError(f"block {event.cached} is not in the prefix cache")
        self._replace(event.sequence, event.logical_block, event.own, event.cached)

    def _evict(self, block: int) -> None:
        if self.ref_count(block) != 1:
            raise ValueError(
                f"block {block} has {self.ref_count(block)} holders; only what nobody else holds is evicted"
            )
        del self.cached[block]

    # --- A copy to come back to -------------------------------------------------------------------

    def copy(self) -> State:
        """The same state, which later events do not change."""
        requests: dict[str, LiveRequest] = {}
        sequences: dict[int, LiveSequence] = {}
        for name, old in self.requests.items():
            new = LiveRequest(name, old.order, old.prompt, old.queue)
            new.done, new.preempted, new.joining = [*old.done], old.preempted, old.joining
            new.sequences = [
                LiveSequence(
                    s.number, new, s.prompt, [*s.output], s.letter, [*s.table], s.num_computed, s.swapped, s.ended
                )
                for s in old.sequences
            ]
            sequences |= {sequence.number: sequence for sequence in new.sequences}
            requests[name] = new

        def same(sequence: LiveSequence) -> LiveSequence:
            return sequences.get(sequence.number, sequence)  # one that has ended changes no more

        return State(
            self.block_size,
            self.max_model_len,
            self.step,
            self.device.copy(),
            self.host.copy(),
            dict(self.cached),
            requests,
            sequences,
            [requests[request.name] for request in self.waiting],
            [requests[request.name] for request in self.running],
            self.num_swapped,
            deque(self.finished, maxlen=KEPT_REQUESTS),
            [(same(parent), same(child)) for parent, child in self.forks],
            {number: (same(sequence), blocks) for number, (sequence, blocks) in self.dropped.items()},
            self.contiguous_tokens,
            self.num_on_device,
            self.num_arrived,
            self.num_generated,
            self.most_sequences,
            Counter(self.counts),
            deque(self.recent, maxlen=RECENT_STEPS),
            deque(self.letters),
        )


def _order(request: LiveRequest) -> int:
    return request.order


def _take(queue: list[LiveRequest], request: LiveRequest) -> None:
    """Remove the request from a queue, which is in order of arrival."""
    place = bisect_left(queue, request.order, key=_order)
    if place == len(queue) or queue[place] is not request:
        raise ValueError(f"request {request.name} is not where this event says")
    del queue[place]
