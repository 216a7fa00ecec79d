"""Record the events of one engine, and the lines of source that ran before each event.

The events are the engine's own (docs/events.md), recorded when it emits them. The lines are those that Python ran, read
from the files that it ran. A page made from a recording therefore cannot show code that differs from the code that ran.

The recorder watches the functions in WATCHED, where block tables, counts and queues change, and the classes that the
caller names. The page highlights one line of each step: the one that ANCHORS names for the event. If none of the
anchors ran since the previous event, it is the last line that ran. If the anchor is in an allocator or a block table
and the caller's own class ran, it is a line of that class, preferably of the method with the anchor's name. It is the
last such line except returns and the heads of loops, which run once more when a loop ends.

If a watched class holds blocks, the recorder reads its counts and tables after each event. The page shows where they
differ from the tables that follow from the events. If a run breaks off, the page shows where and why.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from linecache import getline
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, FunctionType
from typing import Any

import minipaged
from minipaged.engine.checked_allocator import CheckedAllocator
from minipaged.engine.event_queue import EventQueue
from minipaged.errors import InvalidRequest
from minipaged.events import EngineStarted, Event, StepFailed, StepFinished, StepStarted, TokensComputed
from minipaged.replay.state import State
from minipaged.replay.teller import listed
from minipaged.stepper.page import UNSEEN, as_data, element, page, words_of

ROOT = Path(minipaged.__file__).parent
KIND = "application/vnd.minipaged.run+json"
"""The MIME type of a recording's data in the output of a notebook cell, in addition to the stepper's HTML."""

WATCHED: dict[str, tuple[str, ...]] = {
    "engine/engine.py": (
        "Engine.add_request",
        "Engine._finish_step",
    ),
    "engine/launch.py": (
        "Launcher.launch",
        "Launcher.begin",
    ),
    "engine/commit.py": (
        "Committer._commit_samples",
        "Committer._commit_drafted",
        "Committer._roll_back",
        "Committer._commit_beams",
        "Committer._end_sequence",
        "Committer._finish_request",
    ),
    "engine/drafts.py": ("Drafts.added_to",),
    "engine/scheduler.py": (
        "Scheduler.schedule",
        "Scheduler._whole",
        "Scheduler._part",
        "Scheduler._preempt",
        "Scheduler.admit",
    ),
    "engine/policy.py": (
        "FirstComeFirstServed.share_tokens",
        "FirstComeFirstServed.victim",
        "FirstComeFirstServed.way_back",
        "FirstComeFirstServed.admit",
    ),
    "engine/block_manager.py": (
        "BlockManager.begin",
        "BlockManager.append",
        "BlockManager.fork",
        "BlockManager.publish",
        "BlockManager.free",
        "BlockManager.swap_out",
        "BlockManager.swap_in",
        "BlockManager._move",
    ),
    "engine/floors.py": (
        "FlooredBlockManager.load",
        "FlooredBlockManager._demote",
        "HostFloor.keep",
        "HostFloor.give_back",
        "HostFloor._drop",
    ),
    "engine/grouped_memory.py": (
        "GroupedBlockManager.begin",
        "GroupedBlockManager.give_back",
        "GroupedBlockManager._give_back",
    ),
    "engine/grouped_table.py": (
        "GroupedTable.append",
        "GroupedTable.adopt",
        "GroupedTable.fork",
        "GroupedTable.trim",
        "GroupedTable.replace",
        "GroupedTable.relocate",
        "GroupedTable.give_back",
    ),
    "engine/grouped_prefix_cache.py": (
        "GroupedPrefixCache.match",
        "GroupedPrefixCache.publish",
        "GroupedPrefixCache.evict",
        "GroupedPrefixCache._drop",
    ),
    "engine/prefix_cache.py": (
        "PrefixCache.match",
        "PrefixCache.publish",
        "PrefixCache.add",
        "PrefixCache.evict",
        "PrefixCache.drop",
    ),
    "reference/block_allocator.py": (
        "BlockAllocator.allocate",
        "BlockAllocator.share",
        "BlockAllocator.free",
        "BlockAllocator.copy_on_write",
    ),
    "reference/block_table.py": (
        "BlockTable.append",
        "BlockTable.adopt",
        "BlockTable.fork",
        "BlockTable.trim",
        "BlockTable.replace",
        "BlockTable.relocate",
    ),
    "reference/attention.py": ("_attend",),
    "reference/beam_search.py": ("BeamSearch.step",),
}
"""The functions that are watched, by file. The left half of the stepper can show them."""

Anchor = tuple[str, str]
"""A function, and the beginning of one of its lines."""

MOVED: tuple[Anchor, ...] = (
    ("BlockTable.relocate", "self._blocks = list(blocks)"),
    ("GroupedTable.relocate", "self._entries = [HOLE"),
)
"""The candidates for a request that was swapped out or in."""
ANCHORS: dict[str, tuple[Anchor, ...]] = {
    "request_arrived": (("Engine.add_request", "self.scheduler.add(request)"),),
    "request_refused": (("Engine.add_request", "self._emit(RequestRefused("),),
    "step_started": (("Launcher.begin", "self._emit.step_started("),),
    "step_finished": (("Engine._finish_step", "self._emit.step_finished("),),
    "request_admitted": (("Scheduler.admit", "self._emit(RequestAdmitted("),),
    "request_preempted": (("Scheduler._preempt", "self._emit(RequestPreempted("),),
    "tokens_computed": (
        ("BlockAllocator.allocate", "self._ref_counts[block] = 1"),  # where there are new blocks
        ("BlockTable.append", "self._num_tokens += num_new_tokens"),
        ("GroupedTable.append", "self._num_tokens += num_new_tokens"),
        ("BlockManager.append", "self._emit(TokensComputed("),
    ),
    "block_copied": (
        ("BlockAllocator.copy_on_write", "self._ref_counts[block] -= 1"),
        ("GroupedTable.append", "self._entries[i] = new.pop(0)"),
    ),
    "prefix_reused": (
        ("BlockTable.adopt", "self._blocks = list(blocks)"),
        ("GroupedTable.adopt", "self._entries = list(blocks)"),
    ),
    "blocks_promoted": (("FlooredBlockManager.load", "self._swap_in += pairs"),),
    "blocks_loaded": (("BlockTable.append", "self._blocks += new"),),
    "sequence_forked": (
        ("BlockTable.fork", "child.adopt(self._blocks)"),
        ("GroupedTable.fork", "child.adopt(self._entries)"),
    ),
    "tokens_drafted": (("Drafts.added_to", "drafts[sequence.sequence_id] = drafted"),),
    "tokens_accepted": (("Committer._commit_drafted", "self._emit(TokensAccepted("),),
    "blocks_rolled_back": (("Committer._roll_back", "given_back = self._blocks.trim("),),
    "blocks_passed": (("GroupedTable.give_back", "self._entries[i] = HOLE"),),
    "blocks_freed": (("BlockAllocator.free", "self._ref_counts[block] -= 1"),),
    "swapped_out": MOVED,
    "swapped_in": MOVED,
    "block_cached": (
        ("PrefixCache.add", "self.entry_of[entry.block] = entry"),
        ("GroupedPrefixCache.publish", "child.blocks[group] = own"),
    ),
    "block_deduplicated": (
        ("BlockTable.replace", "self._blocks[logical_block] = block"),
        ("GroupedTable.replace", "self._entries[logical_block] = block"),
    ),
    "block_demoted": (("FlooredBlockManager._demote", "self._swap_out.append("),),
    "host_block_dropped": (("HostFloor._drop", "self._allocator.free(kept.block)"),),
    "block_evicted": (
        ("PrefixCache.drop", "self._allocator.free(block)"),
        ("GroupedPrefixCache._drop", "self._allocator.free(each)"),
    ),
    "token_generated": (
        ("_attend", "o[:s, :, rows] = "),  # if the model has any attention
        ("Committer._commit_samples", "self._commit_token("),
        ("Committer._commit_drafted", "self._commit_token("),
        ("Committer._commit_beams", "self.append_token("),
    ),
    "beam_finished": (("Committer._commit_beams", "self._emit(BeamFinished("),),
    "sequence_finished": (("Committer._end_sequence", "sequence.finish_reason = reason"),),
    "request_finished": (("Committer._finish_request", "request.state = RequestState.FINISHED"),),
}
"""The candidates for the line to highlight, by event. The first one that ran is chosen."""

RED = "In red: how many hold the block, by the events so far; and how many by the allocator's own count."
"""The note for the first event after which an allocator's counts are wrong."""

Lines = list[tuple[CodeType, int]]
"""Lines of functions, in the order in which they ran."""


@dataclass(frozen=True)
class Believed:
    """The reference counts and block tables that the classes under test report."""

    counts: dict[int, int] = field(default_factory=dict)
    """The reference count of each device block, from the allocator."""
    tables: dict[int, list[int]] = field(default_factory=dict)
    """The blocks of each sequence, from its block table."""


@dataclass
class Break:
    """The end of a run that could not continue."""

    message: str
    lines: Lines
    """The lines that ran from the last event until the error was found."""
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The blocks with a wrong count: the correct count by the calls so far, and the allocator's count."""
    should: dict[int, int] = field(default_factory=dict)
    """The correct count of each held block, by the calls so far."""
    num_events: int = 0
    """The number of events before the call in which the error was found."""


@dataclass
class Recording:
    """The events of one engine that change what a page shows, each with the lines that ran before it."""

    title: str
    decode: Callable[[list[int]], str] | None = None
    """A function that converts token ids to text; without it the page shows numbers."""
    events: list[Event] = field(default_factory=list)
    lines: list[Lines] = field(default_factory=list)
    """The lines that ran before each event, since the previous one."""
    own: set[CodeType] = field(default_factory=set)
    """Methods of the caller's block allocators and block tables."""
    notes: dict[int, str] = field(default_factory=dict)
    """Text to append to a step's sentence, by the index of the step's event."""

    believed: list[Believed] = field(default_factory=list)
    """The reports of the classes under test after each event; empty if no watched class holds blocks."""
    broken: Break | None = None
    """The end of the run, if it broke off."""
    _since: Lines = field(default_factory=list)
    """The lines that have run since the latest event."""
    _caught: Break | None = None
    """An error that the engine's checks of an allocator have found since the latest event."""

    @contextmanager
    def breaks(self, *errors: type[Exception]) -> Iterator[None]:
        """A context in which any of these errors ends the run. The error is recorded as the run's last step."""
        try:
            yield
        except errors as error:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        message = f"{type(error).__name__}: {error}".rstrip(": ")
        lines = list(self._since)
        if self.events and isinstance(
            self.events[-1], StepFailed
        ):  # the engine has rolled back: show all lines of that step
            start = max(i for i, event in enumerate(self.events) if isinstance(event, StepStarted))
            lines = [line for before in self.lines[start + 1 :] for line in before] + lines
        raised = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__) if frame.f_code in self.own]
        lines += raised[-1:]  # the line that raised: rolling back may have run others
        self.broken = replace(self._caught or Break("", lines), message=message)

    def note(self, text: str) -> None:
        """Append text to the sentence of the latest event."""
        latest = len(self.events) - 1
        self.notes[latest] = f"{self.notes[latest]} {text}" if latest in self.notes else text

    def data(self) -> dict[str, Any]:
        """The data for `stepper.js`, as a JSON object."""
        words = words_of(self.events, self.decode) if self.decode else None
        lines = [*self.lines, self.broken.lines] if self.broken else self.lines
        code, failure = _code(self.events, lines, self.own), self._failure()
        doubted = {i: wrong.get("blocks", {}) for i, wrong in failure.get("beliefs", {}).items()}
        notes = self._notes(doubted)
        return as_data(self.title, self.events, words=words, notes=notes, code=code, doubted=doubted) | failure

    def _notes(self, doubted: Mapping[int, Collection[int]]) -> dict[int, str]:
        """The notes, including an explanation of the first counts in red, and of the picture at a call that failed."""
        notes, last, broken = dict(self.notes), len(self.events), self.broken
        first = min((i for i, blocks in doubted.items() if blocks and i < last), default=None)
        if first is not None:
            notes[first] = f"{RED} {notes.get(first, '')}".rstrip()
        if broken and broken.counts and broken.num_events < last:
            notes[last] = (
                "The counts in red are from the call that broke; the picture, from after the step was given up."
            )
        if broken and broken.num_events == last and (moved := self._moved()):
            gone = listed(
                f"block {block}{' should have gone' if not i else ''} from {_held(was)} to {_held(now)}"
                for i, (block, (was, now)) in enumerate(sorted(moved.items()))
            )
            notes[last] = f"The picture is from before the call that broke. By what was called since, {gone}."
        return notes

    def _moved(self) -> dict[int, tuple[int, int]]:
        """The blocks whose correct count changed after the last event: the count in the picture, and the new one."""
        assert self.broken
        state = State()
        try:
            for event in self.events:
                state.apply(event)
        except (LookupError, ValueError):
            return {}  # the events contradict each other, so the state is unknown
        should = self.broken.should
        counts = {block: (state.ref_count(block), should.get(block, 0)) for block in range(state.device.num_blocks)}
        return {block: (was, now) for block, (was, now) in counts.items() if was != now}

    def _failure(self) -> dict[str, Any]:
        """The wrong counts and tables of the classes under test after each event, and the break if there is one."""
        beliefs: dict[int, dict[str, Any]] = dict(_wrong(self.events, self.believed))
        if not self.broken:
            return {"beliefs": beliefs} if beliefs else {}
        if self.broken.counts:
            beliefs[len(self.events)] = {"blocks": self.broken.counts}
        elif self.events and len(self.events) - 1 in beliefs:
            beliefs[len(self.events)] = beliefs[len(self.events) - 1]
        message, last = self.broken.message, _last_own(self.broken.lines, self.own)
        if last:
            message += f". The last line that ran of the part under test is {last[1]}, in {last[0].co_qualname}"
        line, name = (last[1], last[0].co_qualname) if last else (None, None)
        broken = {"message": message, "line": line, "name": name, "should": bool(self.broken.counts)}
        return {"beliefs": beliefs, "broken": broken}

    def page(self) -> str:
        """A self-contained HTML page."""
        return page(self.data())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The stepper for a notebook. The docs use only the data, because they include the script themselves."""
        data = self.data()
        return {"text/html": element(data, with_script=True), KIND: data}


@contextmanager
def record(
    title: str = "", decode: Callable[[list[int]], str] | None = None, watch: Iterable[type] = ()
) -> Iterator[Recording]:
    """Record the engine that is made in this block, until the block ends. No other engine may run in it.

    `watch`: classes whose methods are shown in addition to the engine's own, such as your own block allocator.
    Raises InvalidRequest if the block makes no engine, or more than one.
    """
    watch = list(watch)
    recording = Recording(title, decode)
    recording.own = {code for part in watch if _holds_blocks(part) for code in _methods(part)}
    tracer = _Tracer(recording, watch)
    before = sys.gettrace()
    sys.settrace(tracer.on_call)
    try:
        yield recording
    except BaseException as error:
        recording._break(error)
        raise
    finally:
        sys.settrace(before)
    if not recording.events or not isinstance(recording.events[0], EngineStarted):
        raise InvalidRequest("nothing to step through: make the engine (or the LLM) inside the `with record()` block")


class _Tracer:
    """A trace function. Python calls `on_call` at each function call, and the result of it at each line of the call."""

    def __init__(self, recording: Recording, watch: Iterable[type]) -> None:
        self._recording = recording
        self._queue: EventQueue | None = None
        self._engine: Any = None
        self._watched = {(str(ROOT / file), name) for file, names in WATCHED.items() for name in names}
        for part in watch:
            self._watched |= {(code.co_filename, code.co_qualname) for code in _methods(part)}

    def on_call(self, frame: FrameType, kind: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code is EventQueue.__call__.__code__:
            if isinstance(frame.f_locals["event"], EngineStarted) and frame.f_back:
                self._engine = frame.f_back.f_locals["self"]
            self._on_emit(frame.f_locals["self"], frame.f_locals["event"])
            return None
        if code is CheckedAllocator._broken.__code__:
            self._on_broken(frame.f_locals["self"])
            return None
        return self.on_line if (code.co_filename, code.co_qualname) in self._watched else None

    def on_line(self, frame: FrameType, kind: str, argument: object) -> Callable[..., Any]:
        if kind == "line":
            self._recording._since.append((frame.f_code, frame.f_lineno))
        return self.on_line

    def _on_emit(self, queue: EventQueue, event: Event) -> None:
        if isinstance(event, UNSEEN):
            return  # the next event shows the lines that ran before it
        if isinstance(event, EngineStarted):
            if self._queue is not None:
                raise InvalidRequest("a recording is of one engine; this block has made a second one")
            self._queue = queue
            queue.listeners.append(lambda event: None)  # without a listener there are no events for single tokens
        if queue is self._queue:
            self._recording.events.append(event)
            self._recording.lines.append(self._recording._since)
            self._recording.believed.append(self._ask())
            self._recording.broken = None  # the run has continued
            if not isinstance(event, StepFailed):
                self._recording._caught = None
        self._recording._since = []

    def _ask(self) -> Believed:
        """The counts and tables that the classes under test report; none if reading them fails."""
        if not self._recording.own:
            return Believed()
        blocks = self._engine.blocks
        allocator = getattr(blocks.allocator, "_inner", blocks.allocator)
        sequences = [s for request in self._engine._requests.values() for s in request.sequences if not s.swapped]
        try:
            counts = {block: int(allocator.ref_count(block)) for block in range(blocks.allocator.num_blocks)}
            return Believed(counts, {s.sequence_id: [int(block) for block in s.entries] for s in sequences})
        except Exception:
            return Believed()

    def _on_broken(self, guard: CheckedAllocator) -> None:
        """Keep the state in which an allocator has broken its contract, before the engine rolls back."""
        if self._engine is None or guard is not self._engine.blocks.allocator or self._recording._caught:
            return
        should, says = guard._counts, self._ask().counts
        wrong = {block: (should.get(block, 0), count) for block, count in says.items() if count != should.get(block, 0)}
        recording = self._recording
        recording._caught = Break("", list(recording._since), wrong, dict(should), len(recording.events))


def _held(count: int) -> str:
    """A reference count as the page shows it in a block's corner."""
    return f"×{count}" if count else "free"


def _methods(part: type) -> Iterator[CodeType]:
    """The methods of a class to watch: all but `ref_count`, which checks call after each operation."""
    for name, member in vars(part).items():
        if isinstance(member, FunctionType) and name != "ref_count":
            yield member.__code__


def _holds_blocks(part: type) -> bool:
    """Whether this is a block allocator or a block table."""
    return hasattr(part, "copy_on_write") or hasattr(part, "slot_mapping")


def _wrong(events: Sequence[Event], believed: Sequence[Believed]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The counts and tables of the classes under test that differ from the events, by the index of the event.

    Events come after the call that caused them, so that an allocator may be ahead of the tables. A difference therefore
    counts only if it still exists when a step begins or ends.
    """
    state, differing = State(), list[dict[tuple[str, int], Any]]()
    with suppress(LookupError, ValueError):  # after a contradiction the state is unknown
        for event, says in zip(events, believed, strict=True):
            state.apply(event)
            tables = [(block, state.ref_count(block)) for block in says.counts]
            different: dict[tuple[str, int], Any] = {
                ("blocks", block): (count, says.counts[block]) for block, count in tables if count != says.counts[block]
            }
            for number, table in says.tables.items():
                if number in state.sequences and state.sequences[number].table != table:
                    different["tables", number] = table
            differing.append(different)
    still = set[tuple[str, int]]()
    for i in reversed(range(len(differing))):
        settled = isinstance(events[i], StepStarted | StepFinished) or i == len(differing) - 1
        still = {key for key in differing[i] if settled or key in still}
        if still:
            wrong: dict[str, Any] = {}
            for kind, number in sorted(still):
                wrong.setdefault(kind, {})[number] = differing[i][kind, number]
            yield i, wrong


def _code(events: Iterable[Event], lines: Iterable[Lines], own: Set[CodeType]) -> dict[str, Any]:
    """The source of each function that ran, and the lines that ran before each event, without duplicates."""
    numbers: dict[CodeType, int] = {}
    functions: list[dict[str, Any]] = []
    unique: dict[tuple[tuple[int, tuple[int, ...]], ...], int] = {}
    lines_of: list[int] = []
    current: list[tuple[int, int] | None] = []
    for event, before in zip_longest(events, lines):  # a run that broke off has lines after its last event
        ran: dict[int, set[int]] = {}  # in the order of calls
        for code, line in before:
            if code not in numbers:
                numbers[code] = len(numbers)
                functions.append(function_of(code))
            ran.setdefault(numbers[code], set()).add(line)
        key = tuple((number, tuple(sorted(lines))) for number, lines in ran.items())
        lines_of.append(unique.setdefault(key, len(unique)))
        lit = _telling_line(event, before, own)
        current.append((numbers[lit[0]], lit[1]) if lit else None)
    return {"functions": functions, "lines": list(unique), "lines_of": lines_of, "current": current}


def _last_own(lines: Lines, own: Set[CodeType]) -> tuple[CodeType, int] | None:
    return next(((code, line) for code, line in reversed(lines) if code in own), None)


def _telling_line(event: Event | None, before: Lines, own: Set[CodeType]) -> tuple[CodeType, int] | None:
    """The line to highlight for an event; for None, the line at which the run broke off."""
    if event is None:
        return _last_own(before, own) or (before[-1] if before else None)
    anchors = ANCHORS.get(event.name, ())
    if isinstance(event, TokensComputed) and not event.new_blocks:
        anchors = anchors[1:]
    if anchors and anchors[0][0].startswith("Block"):
        in_own = [(code, line) for code, line in before if code in own]
        telling = [(code, line) for code, line in in_own if code.co_name == anchors[0][0].rpartition(".")[2]]
        if told := telling or in_own:
            return _last_doing(told)
    for name, start in anchors:
        if told := [(code, line) for code, line in before if code.co_qualname == name]:
            anchored = [(code, line) for code, line in told if _text(code, line).startswith(start)]
            return anchored[-1] if anchored else _last_doing(told)  # a different class with that name
    return before[-1] if before else None


def _last_doing(told: Lines) -> tuple[CodeType, int]:
    passing = ("return", "for ", "while ")
    return next(((code, line) for code, line in reversed(told) if not _text(code, line).startswith(passing)), told[-1])


def _text(code: CodeType, line: int) -> str:
    return getline(code.co_filename, line).lstrip()


def _file(code: CodeType) -> str:
    path = Path(code.co_filename)
    if path.is_relative_to(ROOT.parent):
        return path.relative_to(ROOT.parent).as_posix()
    return path.name if path.is_file() else "the code above"  # a notebook cell is not a file


def function_of(code: CodeType) -> dict[str, Any]:
    """A function's name, file, first line and source, for the stepper."""
    lines, first = inspect.getsourcelines(code)
    margin = len(lines[0]) - len(lines[0].lstrip())
    return {
        "name": code.co_qualname,
        "file": _file(code),
        "first": first,
        "source": [line[margin:].rstrip() for line in lines],
    }
