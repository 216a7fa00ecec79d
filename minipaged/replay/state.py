"""The state of a run, computed from the engine's events alone.

The events of a run, from the first one on, determine every queue, block table and reference count (paper, Figs. 6 and
8). The engine itself is never asked, so a run can also be drawn from a file.

`State` is the engine's state after some number of events. `apply` advances it by one event.

A request, with all its sequences, is in one of three queues:

    waiting     new, or preempted for recomputation: its sequences hold no blocks
    running     its sequences hold device blocks
    swapped     preempted: its sequences hold host blocks (section 4.5)

The cost of an event depends on the number of blocks it names, and not on the number of sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from string import ascii_lowercase, ascii_uppercase
from typing import Literal

from minipaged import events as ev
from minipaged.events import HOLE, Event

LETTERS = ascii_uppercase + ascii_lowercase
NO_LETTER = "*"
"""The label of a sequence that gets its first blocks when all letters are taken."""
KEPT_REQUESTS = 8
"""The number of finished requests that are kept, so that their texts can still be read."""
RECENT_STEPS = 20
"""The number of steps over which tokens per second are averaged."""


@dataclass(eq=False, slots=True)
class LiveSequence:
    """One sequence: its tokens, and the blocks of their keys and values."""

    number: int
    request: LiveRequest
    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    letter: str = ""
    """The sequence's label, which it gets with its first blocks."""
    table: list[int] = field(default_factory=list)
    """The block table, in logical order, with a HOLE for each block that a window has passed. With several groups of
    layers it has an entry in each for every logical block. After the sequence's end: the blocks that it gave back."""
    num_computed: int = 0
    """The number of filled slots in the table's blocks."""
    swapped: bool = False
    """Whether the blocks in `table` are host blocks."""
    ended: str | None = None
    """Why the sequence ended; None while it runs."""
    num_groups: int = 1
    drafted: tuple[int, ...] = ()
    """Tokens that may come next: drafted in this step, and not generated yet."""
    num_standing: int = 0
    """The number of tokens in `drafted`, from the first, that are verified and stand."""

    @property
    def blocks(self) -> list[int]:
        """The blocks in the table."""
        return [block for block in self.table if block != HOLE]

    def tables(self) -> list[list[int]]:
        """Return the block table of each group of layers."""
        return [self.table[group :: self.num_groups] for group in range(self.num_groups)]

    def filled(self, entry: int, block_size: int) -> int:
        """Return the number of filled slots in the block of an entry of the table."""
        return min(block_size, self.num_computed - entry // self.num_groups * block_size)

    def unverified(self, entry: int, block_size: int) -> int:
        """Return the number of filled slots in the block of an entry whose tokens are only drafted, or not known."""
        start = entry // self.num_groups * block_size
        return max(0, self.filled(entry, block_size) - max(0, self.num_verified - start))

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    @property
    def num_verified(self) -> int:
        """The number of tokens that the sequence has or is going to have. The others in its slots are only drafted."""
        return len(self.prompt) + len(self.output) + self.num_standing

    def tokens_in(self, entry: int, block_size: int) -> tuple[int, ...]:
        """Return the tokens in one block of the table, without slots that are empty or whose token is unknown."""
        start = entry // self.num_groups * block_size
        stop = min(self.num_computed, start + block_size)
        after = len(self.prompt)
        return (*self.prompt[start:stop], *self.output[max(0, start - after) : max(0, stop - after)])


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request and its sequences."""

    name: str
    order: int
    """The request's number in order of arrival."""
    prompt: tuple[int, ...]
    queue: Literal["waiting", "running", "swapped"] = "waiting"
    sequences: list[LiveSequence] = field(default_factory=list)
    """The sequences that have not ended."""
    done: list[LiveSequence] = field(default_factory=list)
    """The sequences that have ended, without dropped beams."""
    preempted: bool = False
    """Whether the request was preempted and has not resumed yet."""
    joining: bool = False
    """Whether the request was just admitted for the first time, and has computed nothing yet."""


@dataclass(slots=True)
class PoolState:
    """The blocks of one pool: which sequences hold each, and how full it is."""

    num_blocks: int
    holders: dict[int, list[int]] = field(default_factory=dict)
    """Block -> the numbers of the sequences whose tables hold it. Blocks without holders are left out."""
    filled: dict[int, int] = field(default_factory=dict)
    """Block -> the number of its filled slots. Blocks without holders are left out."""
    num_filled: int = 0
    """The number of filled slots over all held blocks."""
    by_group: Counter[int] = field(default_factory=Counter)
    """Group of layers -> the number of held blocks with keys and values of its layers."""
    last_request: dict[int, str] = field(default_factory=dict)
    """Block -> the last request to give it back."""
    most_used: int = 0
    """The largest number of blocks held at one time."""
    highest: int = -1
    """The highest block number ever held."""

    def hold(self, block: int, sequence: LiveSequence, entry: int, filled: int) -> None:
        """Note that an entry of a sequence's table holds the block. `filled`: the number of its filled slots."""
        self.by_group[entry % sequence.num_groups] += block not in self.holders
        self.holders.setdefault(block, []).append(sequence.number)
        self.highest = max(self.highest, block)
        self.most_used = max(self.most_used, len(self.holders))
        self.fill(block, max(filled, self.filled.get(block, 0)))  # others may have filled more of it

    def fill(self, block: int, filled: int) -> None:
        """Set the number of filled slots of a block."""
        self.num_filled += filled - self.filled.get(block, 0)
        self.filled[block] = filled

    def release(self, block: int, sequence: LiveSequence, entry: int) -> None:
        """Note that an entry of a sequence's table no longer holds the block. With the last holder gone, keep the
        request's name in `last_request`."""
        holders = self.holders[block]
        holders.remove(sequence.number)
        if not holders:
            del self.holders[block]
            self.num_filled -= self.filled.pop(block)
            self.by_group[entry % sequence.num_groups] -= 1
            self.last_request[block] = sequence.request.name

    def copy(self) -> PoolState:
        return PoolState(
            self.num_blocks,
            {block: [*holders] for block, holders in self.holders.items()},
            dict(self.filled),
            self.num_filled,
            Counter(self.by_group),
            dict(self.last_request),
            self.most_used,
            self.highest,
        )


@dataclass(slots=True)
class State:
    """The engine's state after some number of events."""

    block_size: int = 1
    max_model_len: int = 1
    group_windows: tuple[int | None, ...] = (None,)
    """The window of each group of layers, in tokens; None: its layers see everything."""
    step: int = 0
    device: PoolState = field(default_factory=lambda: PoolState(0))
    host: PoolState = field(default_factory=lambda: PoolState(0))
    cached: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Device blocks that the prefix cache holds -> the tokens in them. Sequences may hold them too."""
    demoted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Host blocks that the floor below the prefix cache keeps -> the tokens in them."""
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    sequences: dict[int, LiveSequence] = field(default_factory=dict)
    waiting: list[LiveRequest] = field(default_factory=list)
    """The waiting requests, in order of arrival. As in the engine, the swapped requests are among them."""
    running: list[LiveRequest] = field(default_factory=list)
    num_swapped: int = 0
    """The number of requests in `waiting` that are swapped out."""
    finished: deque[LiveRequest] = field(default_factory=lambda: deque(maxlen=KEPT_REQUESTS))
    """The last few finished requests, which no longer change."""
    forks: list[tuple[LiveSequence, LiveSequence]] = field(default_factory=list)
    """(parent, child) of each fork in this step."""
    dropped: dict[int, tuple[LiveSequence, tuple[int, ...]]] = field(default_factory=dict)
    """Beams dropped in this step, each with the blocks that it gave back."""
    contiguous_tokens: int = 0
    """The number of tokens of all sequences on the device, if no token were shared."""
    num_on_device: int = 0
    """The number of sequences that hold device blocks. A contiguous cache would reserve room for each."""
    num_arrived: int = 0
    num_generated: int = 0
    most_sequences: int = 0
    """The number of sequences in the largest batch."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of events of each kind, and the number of blocks or tokens that some kinds were about."""
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """(seconds, total tokens generated at its end) of each of the last steps."""
    letters: deque[str] = field(default_factory=lambda: deque(LETTERS))
    """The free letters. The one freed first is taken next, so that a letter is not reused soon."""

    # --- Derived figures --------------------------------------------------------------------------

    def ref_count(self, block: int) -> int:
        """Return a device block's reference count: its table entries, plus one if it is in the prefix cache."""
        return len(self.device.holders.get(block, ())) + (block in self.cached)

    @property
    def num_cached_only(self) -> int:
        """The number of blocks that only the prefix cache holds. They can be evicted to make room."""
        return len(self.cached) - sum(block in self.device.holders for block in self.cached)

    @property
    def num_free(self) -> int:
        """The number of device blocks that neither a sequence nor the prefix cache holds."""
        return self.device.num_blocks - len(self.device.holders) - self.num_cached_only

    @property
    def held_by_group(self) -> list[int]:
        """For each group of layers, the number of device blocks that sequences hold."""
        return [self.device.by_group[group] for group in range(len(self.group_windows))]

    @property
    def swapped(self) -> list[LiveRequest]:
        return [request for request in self.waiting if request.queue == "swapped"]

    def tokens_per_second(self) -> float | None:
        """Return the tokens generated per second, averaged over the last steps; None before there are two."""
        if len(self.recent) < 2:
            return None
        seconds = sum(seconds for seconds, _ in self.recent) - self.recent[0][0]
        return (self.recent[-1][1] - self.recent[0][1]) / seconds if seconds > 0 else None

    def _pool_of(self, sequence: LiveSequence) -> PoolState:
        return self.host if sequence.swapped else self.device

    # --- Applying an event ------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Advance the state by one event. The first event of a run (EngineStarted) resets the state.

        Events must come in order, from the first. Raises LookupError or ValueError if they do not.
        """
        self.counts[event.name] += 1
        match event:
            case ev.TokensComputed():
                self._extend(self.sequences[event.sequence], event)
            case ev.TokenGenerated():
                self._generate(self.sequences[event.sequence], event.token_id)
            case ev.StepStarted():
                self.step = event.step
                self.forks, self.dropped = [], {}
            case ev.StepFinished():
                self.most_sequences = max(self.most_sequences, event.num_sequences)
                self.recent.append((event.seconds, self.num_generated))
            case ev.BlockCopied():
                self._copy(event)
            case ev.BlocksPassed():
                self._pass(self.sequences[event.sequence], event)
            case ev.BlocksRolledBack():
                self._roll_back(self.sequences[event.sequence], event)
            case ev.BlocksFreed():
                self._give_back(self.sequences[event.sequence], event.blocks)
            case ev.SequenceForked():
                self._fork(event)
            case ev.SequenceFinished():
                self._end(self.sequences[event.sequence], event.reason)
            case ev.BlockCached():
                self._cache(self.sequences[event.sequence], event)
            case ev.BlockEvicted():
                self._evict(event.block)
            case ev.BlockDeduplicated():
                self._deduplicate(event)
            case ev.PrefixReused():
                self._reuse(self.sequences[event.sequence], event)
            case ev.BlocksLoaded():
                self._load(self.sequences[event.sequence], event.blocks)
            case ev.TokensDrafted() | ev.TokensAccepted():
                self._draft(self.sequences[event.sequence], event)
            case ev.BlocksStored():
                self.counts["blocks stored"] += len(event.blocks)
            case ev.BlockDemoted() | ev.BlocksPromoted() | ev.HostBlockDropped():
                self._apply_to_floor(event)
            case _:
                self._apply_to_request(event)

    def _apply_to_floor(self, event: ev.BlockDemoted | ev.BlocksPromoted | ev.HostBlockDropped) -> None:
        match event:
            case ev.BlockDemoted():
                self.demoted[event.host_block] = self.cached[event.block]
            case ev.BlocksPromoted():
                if missing := [host for host, _ in event.pairs if host not in self.demoted]:
                    raise ValueError(f"host block {missing[0]} is not on the floor below the prefix cache")
                sequence, blocks = self.sequences[event.sequence], tuple(block for _, block in event.pairs)
                self._grow(sequence, sequence.num_computed + len(blocks) * self.block_size, blocks)
            case ev.HostBlockDropped():
                del self.demoted[event.host_block]

    def _apply_to_request(self, event: Event) -> None:
        match event:
            case ev.EngineStarted():
                self.__init__()  # type: ignore[misc]
                self.device, self.host = PoolState(event.num_blocks), PoolState(event.num_swap_blocks)
                self.block_size, self.max_model_len = event.block_size, event.max_model_len
                self.group_windows = event.group_windows
                self.counts[event.name] += 1
            case ev.RequestArrived():
                self._arrive(event)
            case ev.RequestAdmitted():
                self._start(self.requests[event.request])
                self.requests[event.request].joining = not self.requests[event.request].preempted
            case ev.RequestPreempted():
                self._stop(self.requests[event.request])
                self.counts[f"preempted by {event.mode}"] += 1
            case ev.SwappedOut():
                self._move(event.request, event.pairs, to_host=True)
                self.counts["blocks swapped out"] += len(event.pairs)
            case ev.SwappedIn():
                self._move(event.request, event.pairs, to_host=False)
                self._start(self.requests[event.request])
                self.counts["blocks swapped in"] += len(event.pairs)
            case ev.RequestFinished():
                self._finish(event.request)
            case ev.StepFailed():
                for name in event.requests:
                    self._recover(self.requests[name])
            case ev.RequestRefused():
                pass

    # --- Queues -----------------------------------------------------------------------------------

    def _arrive(self, event: ev.RequestArrived) -> None:
        prompt = event.prompt_token_ids
        request = LiveRequest(event.request, self.num_arrived, prompt)
        sequence = LiveSequence(event.sequence, request, prompt, num_groups=len(self.group_windows))
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
        """Put a request back to waiting after a failed step. Its device and host blocks are lost."""
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

    def _generate(self, sequence: LiveSequence, token: int) -> None:
        sequence.output.append(token)
        self.num_generated += 1
        if sequence.num_standing:
            sequence.drafted, sequence.num_standing = sequence.drafted[1:], sequence.num_standing - 1

    def _name(self, sequence: LiveSequence) -> None:
        if not sequence.letter:
            sequence.letter = self.letters.popleft() if self.letters else NO_LETTER

    def _fork(self, event: ev.SequenceForked) -> None:
        parent = self.sequences[event.parent]
        child = LiveSequence(event.child, parent.request, parent.prompt, [*parent.output], swapped=parent.swapped)
        child.num_groups = parent.num_groups
        self._name(child)
        self.sequences[event.child] = child
        parent.request.sequences.append(child)
        self._adopt(child, parent.table, parent.num_computed)
        self.forks.append((parent, child))

    def _end(self, sequence: LiveSequence, reason: str) -> None:
        """Mark a sequence as ended. It is forgotten when it has given back its blocks; now, if it holds none."""
        sequence.ended = reason
        if reason == "dropped":
            self.dropped[sequence.number] = (sequence, ())
        if not sequence.table:
            self._forget(sequence)

    def _forget(self, sequence: LiveSequence) -> None:
        del self.sequences[sequence.number]
        sequence.request.sequences.remove(sequence)
        sequence.drafted = ()  # some may stand after its last token
        if sequence.ended != "dropped":
            sequence.request.done.append(sequence)
        if sequence.letter not in ("", NO_LETTER):
            self.letters.append(sequence.letter)

    # --- Block tables -----------------------------------------------------------------------------

    def _extend(self, sequence: LiveSequence, event: ev.TokensComputed) -> None:
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
        for entry, block in enumerate(new_blocks, len(sequence.table) - len(new_blocks)):
            self.device.hold(block, sequence, entry, 0)
        # A faulty allocator can leave the table with too few blocks for its tokens. Such a run is followed too.
        groups = sequence.num_groups
        for entry in range(start // size * groups, min(len(sequence.table), -(-num_tokens // size) * groups)):
            if sequence.table[entry] != HOLE:  # before a block of which nothing was filled
                self.device.fill(sequence.table[entry], sequence.filled(entry, size))

    def _reuse(self, sequence: LiveSequence, event: ev.PrefixReused) -> None:
        if sequence.table:
            raise ValueError(f"the table of sequence {sequence.number} already holds blocks {sequence.table}")
        self._name(sequence)
        self._adopt(sequence, list(event.blocks), event.num_found(self.block_size))
        if event.source == "cache":
            self.counts["tokens found in cache"] += event.num_found(self.block_size)

    def _copy(self, event: ev.BlockCopied) -> None:
        if self.ref_count(event.source) != event.holders:
            raise ValueError(
                f"block {event.source} has {self.ref_count(event.source)} holders before the copy, not {event.holders}"
            )
        self._replace(event.sequence, event.logical_block, event.source, event.destination)

    def _adopt(self, sequence: LiveSequence, blocks: list[int], num_computed: int) -> None:
        """Start an empty table with blocks that another sequence or the prefix cache holds."""
        sequence.table, sequence.num_computed = [*blocks], num_computed
        pool = self._pool_of(sequence)
        for entry, block in enumerate(blocks):
            if block != HOLE:
                pool.hold(block, sequence, entry, sequence.filled(entry, self.block_size))
        if blocks and not sequence.swapped:
            self.num_on_device += 1
            self.contiguous_tokens += num_computed

    def _replace(self, number: int, entry: int, old: int, new: int) -> None:
        """Replace a table entry by another block with the same content."""
        sequence = self.sequences[number]
        self._check_entry(sequence, entry, old)
        self.device.release(old, sequence, entry)
        self.device.hold(new, sequence, entry, sequence.filled(entry, self.block_size))
        sequence.table[entry] = new

    def _check_entry(self, sequence: LiveSequence, entry: int, block: int) -> None:
        if sequence.table[entry] != block:
            raise ValueError(
                f"entry {entry} of the table of sequence {sequence.number} is {sequence.table[entry]}, not {block}"
            )

    def _pass(self, sequence: LiveSequence, event: ev.BlocksPassed) -> None:
        for entry, block in zip(event.entries, event.blocks, strict=True):
            self._check_entry(sequence, entry, block)
            self.device.release(block, sequence, entry)
            sequence.table[entry] = HOLE
        self.counts["blocks passed"] += len(event.blocks)

    def _roll_back(self, sequence: LiveSequence, event: ev.BlocksRolledBack) -> None:
        kept = len(sequence.table) - len(event.blocks)
        if tuple(sequence.table[kept:]) != event.blocks:
            raise ValueError(
                f"the table of sequence {sequence.number} ends with {sequence.table[kept:]}, not {list(event.blocks)}"
            )
        for entry, block in enumerate(event.blocks, kept):
            self.device.release(block, sequence, entry)
        del sequence.table[kept:]
        self.contiguous_tokens -= sequence.num_computed - event.num_tokens
        sequence.num_computed = event.num_tokens
        sequence.drafted = sequence.drafted[: sequence.num_standing]
        for entry in range(kept - sequence.num_groups, kept):  # it has written into these, so they are its own
            self.device.fill(sequence.table[entry], sequence.filled(entry, self.block_size))
        self.counts["blocks rolled back"] += len(event.blocks)

    def _draft(self, sequence: LiveSequence, event: ev.TokensDrafted | ev.TokensAccepted) -> None:
        if isinstance(event, ev.TokensDrafted):
            sequence.drafted, sequence.num_standing = event.token_ids, 0
            self.counts["tokens drafted"] += len(event.token_ids)
        else:
            sequence.num_standing = event.num_accepted
            self.counts["tokens accepted"] += event.num_accepted

    def _give_back(self, sequence: LiveSequence, blocks: tuple[int, ...]) -> None:
        if sequence.blocks != list(blocks):
            raise ValueError(f"sequence {sequence.number} holds blocks {sequence.blocks}, not {list(blocks)}")
        pool = self._pool_of(sequence)
        for entry, block in enumerate(sequence.table):
            if block != HOLE:
                pool.release(block, sequence, entry)
        if not sequence.swapped:
            self.num_on_device -= 1
            self.contiguous_tokens -= sequence.num_computed
        if sequence.number in self.dropped:
            self.dropped[sequence.number] = (sequence, blocks)
        if sequence.ended:
            self._forget(sequence)
        else:
            sequence.table, sequence.num_computed, sequence.swapped = [], 0, False
            sequence.drafted, sequence.num_standing = (), 0  # their step has failed

    def _move(self, name: str, pairs: Iterable[tuple[int, int]], *, to_host: bool) -> None:
        """Move all blocks of a request to the other pool. `pairs` maps old to new; a shared block stays shared."""
        request, new = self.requests[name], dict(pairs)
        source, target = (self.device, self.host) if to_host else (self.host, self.device)
        for sequence in request.sequences:
            for entry, block in enumerate(sequence.table):
                if block != HOLE:
                    source.release(block, sequence, entry)
                    target.hold(new[block], sequence, entry, sequence.filled(entry, self.block_size))
            sequence.table = [HOLE if block == HOLE else new[block] for block in sequence.table]
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

    def _cache(self, sequence: LiveSequence, event: ev.BlockCached) -> None:
        self._check_entry(sequence, event.logical_block, event.block)
        tokens = sequence.tokens_in(event.logical_block, self.block_size)
        self.cached[event.block] = tokens[: event.num_tokens or self.block_size]

    def _deduplicate(self, event: ev.BlockDeduplicated) -> None:
        if event.cached not in self.cached:
            raise ValueError(f"block {event.cached} is not in the prefix cache")
        self._replace(event.sequence, event.logical_block, event.own, event.cached)

    def _evict(self, block: int) -> None:
        if self.ref_count(block) != 1:
            raise ValueError(
                f"block {block} has {self.ref_count(block)} holders; only a block with no other holder is evicted"
            )
        del self.cached[block]

    # --- Copies -----------------------------------------------------------------------------------

    def copy(self) -> State:
        """Return a copy that later events do not change."""
        requests: dict[str, LiveRequest] = {}
        sequences: dict[int, LiveSequence] = {}
        for name, old in self.requests.items():
            new = LiveRequest(name, old.order, old.prompt, old.queue)
            new.done, new.preempted, new.joining = [*old.done], old.preempted, old.joining
            new.sequences = [replace(s, request=new, output=[*s.output], table=[*s.table]) for s in old.sequences]
            sequences |= {sequence.number: sequence for sequence in new.sequences}
            requests[name] = new

        def same(sequence: LiveSequence) -> LiveSequence:
            return sequences.get(sequence.number, sequence)  # a sequence that has ended does not change, and is shared

        return State(
            self.block_size,
            self.max_model_len,
            self.group_windows,
            self.step,
            self.device.copy(),
            self.host.copy(),
            dict(self.cached),
            dict(self.demoted),
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
    """Remove a request from a queue that is sorted by arrival. Raises ValueError if it is not there."""
    place = bisect_left(queue, request.order, key=_order)
    if place == len(queue) or queue[place] is not request:
        raise ValueError(f"request {request.name} is not in the queue that this event takes it from")
    del queue[place]
