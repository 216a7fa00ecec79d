"""The recorder: the events of one engine, and which lines of its source ran before each of them.

Nothing is told twice: the events are the engine's own (docs/events.md), caught where it emits them, and the lines are
those that Python ran, read from the files that it ran them from. So a page made from a recording cannot show code that
does something else.

Watched are the functions in WATCHED, where block tables, counts and queues change, and the classes that a caller names.
One line of each step is *the* line: the one that ANCHORS names, in the function that the event is about. Where none of
these ran since the event before, it is the last line that ran at all. Where an allocator or a block table tells, and
one of the caller's ran, it is a line of that: the last one of the method that tells, if it has one, leaving out return
statements, and the lines of loops, which run once more when a loop is over.

Where a part is watched that holds blocks, it is asked after each event what it believes; what differs from the tables,
as they follow from the events, is shown beside them. A run that breaks off says where, and why.
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
"""Under which a notebook has the data, beside the stepper itself."""

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
        "Committer._commit_beams",
        "Committer._end_sequence",
        "Committer._finish_request",
    ),
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
    "engine/prefix_cache.py": ("PrefixCache.match", "PrefixCache.publish", "PrefixCache.evict"),
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
"""Functions by file: what the left half of the stepper can show."""

Anchor = tuple[str, str]
"""A function, and what one of its lines begins with."""

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
        ("BlockManager.append", "self._emit(TokensComputed("),
    ),
    "block_copied": (("BlockAllocator.copy_on_write", "self._ref_counts[block] -= 1"),),
    "prefix_reused": (("BlockTable.adopt", "self._blocks = list(blocks)"),),
    "blocks_loaded": (("BlockTable.append", "self._blocks += new"),),
    "sequence_forked": (("BlockTable.fork", "child.adopt(self._blocks)"),),
    "blocks_freed": (("BlockAllocator.free", "self._ref_counts[block] -= 1"),),
    "swapped_out": (("BlockTable.relocate", "self._blocks = list(blocks)"),),
    "swapped_in": (("BlockTable.relocate", "self._blocks = list(blocks)"),),
    "block_cached": (("PrefixCache.publish", "self._entries[key] = "),),
    "block_deduplicated": (("BlockTable.replace", "self._blocks[logical_block] = block"),),
    "block_evicted": (("PrefixCache.evict", "self._allocator.free(block)"),),
    "token_generated": (
        ("_attend", "o[:s, :, r:] = "),  # if the model has any attention
        ("Committer._commit_samples", "self._commit_token("),
        ("Committer._commit_beams", "self.append_token("),
    ),
    "beam_finished": (("Committer._commit_beams", "self._emit(BeamFinished("),),
    "sequence_finished": (("Committer._end_sequence", "sequence.finish_reason = reason"),),
    "request_finished": (("Committer._finish_request", "request.state = RequestState.FINISHED"),),
}
"""The line that each event is about: of these, the first that ran."""

RED = "In red: how many hold the block, by the events so far; and how many by the allocator's own count."
"""What is said where an allocator's counts are first seen to differ."""

Lines = list[tuple[CodeType, int]]
"""Lines of functions, in the order in which they ran."""


@dataclass(frozen=True)
class Believed:
    """What the parts under test say of themselves."""

    counts: dict[int, int] = field(default_factory=dict)
    """Of each block of the device: its reference count, as the allocator has it."""
    tables: dict[int, list[int]] = field(default_factory=dict)
    """Of each sequence: the blocks of its table, as the table has them."""


@dataclass
class Break:
    """The end of a run that could not go on."""

    message: str
    lines: Lines
    """Those that ran after the last event, until what is wrong was seen."""
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Blocks whose count is wrong: what it should be by the calls so far, and what the allocator says."""
    should: dict[int, int] = field(default_factory=dict)
    """Of the blocks that should be held by the calls so far: how many should hold each."""
    num_events: int = 0
    """Before the call in which it was seen."""


@dataclass
class Recording:
    """One engine's events, but for those that change nothing a page shows, each with the lines that ran before it."""

    title: str
    decode: Callable[[list[int]], str] | None = None
    """Token ids to text; without it the page shows numbers."""
    events: list[Event] = field(default_factory=list)
    lines: list[Lines] = field(default_factory=list)
    own: set[CodeType] = field(default_factory=set)
    """Methods of the caller's block allocators and block tables."""
    notes: dict[int, str] = field(default_factory=dict)
    """What else there is to say of a step, by the index of its event: put behind the step's own sentence."""

    believed: list[Believed] = field(default_factory=list)
    """After each event; empty where no part is watched that holds blocks."""
    broken: Break | None = None
    _since: Lines = field(default_factory=list)
    """Lines that ran after the latest event."""
    _caught: Break | None = None
    """What the engine's guard around an allocator has found since the latest event."""

    @contextmanager
    def breaks(self, *errors: type[Exception]) -> Iterator[None]:
        """Within it one of these errors ends the run, and is kept as its last step."""
        try:
            yield
        except errors as error:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        message = f"{type(error).__name__}: {error}".rstrip(": ")
        lines = list(self._since)
        if self.events and isinstance(self.events[-1], StepFailed):  # the engine has cleared up: all lines of that step
            start = max(i for i, event in enumerate(self.events) if isinstance(event, StepStarted))
            lines = [line for before in self.lines[start + 1 :] for line in before] + lines
        raised = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__) if frame.f_code in self.own]
        lines += raised[-1:]  # not the last line that ran, if it was called again for clearing up
        self.broken = replace(self._caught or Break("", lines), message=message)

    def note(self, text: str) -> None:
        """Say something more of the latest event."""
        latest = len(self.events) - 1
        self.notes[latest] = f"{self.notes[latest]} {text}" if latest in self.notes else text

    def data(self) -> dict[str, Any]:
        """What the stepper is fed with, as JSON has it."""
        words = words_of(self.events, self.decode) if self.decode else None
        lines = [*self.lines, self.broken.lines] if self.broken else self.lines
        code, failure = _code(self.events, lines, self.own), self._failure()
        doubted = {i: wrong.get("blocks", {}) for i, wrong in failure.get("beliefs", {}).items()}
        notes = self._notes(doubted)
        return as_data(self.title, self.events, words=words, notes=notes, code=code, doubted=doubted) | failure

    def _notes(self, doubted: Mapping[int, Collection[int]]) -> dict[int, str]:
        """With what the words in red mean, where they stand first, and how far the picture goes, where a call broke."""
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
        """Blocks whose count should have changed by the calls since the last event: as the picture has it, and now."""
        assert self.broken
        state = State()
        try:
            for event in self.events:
                state.apply(event)
        except (LookupError, ValueError):
            return {}  # nobody knows what the picture says
        should = self.broken.should
        counts = {block: (state.ref_count(block), should.get(block, 0)) for block in range(state.device.num_blocks)}
        return {block: (was, now) for block, (was, now) in counts.items() if was != now}

    def _failure(self) -> dict[str, Any]:
        """What the parts under test have wrong, after each event, and how the run broke off."""
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
        """A page of HTML that needs nothing else."""
        return page(self.data())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """What a notebook shows: the stepper; the docs take the data and bring the script themselves."""
        data = self.data()
        return {"text/html": element(data, with_script=True), KIND: data}


@contextmanager
def record(
    title: str = "", decode: Callable[[list[int]], str] | None = None, watch: Iterable[type] = ()
) -> Iterator[Recording]:
    """Record the engine that is made in this block, until the block ends. It must be the only one that runs there.

    `watch`: classes whose methods are shown beside the engine's own, a part of yours for instance.
    Raises InvalidRequest when the block made no engine, or more than one.
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
    """Python calls `on_call` for each function that starts, and what it returns for each line of that function."""

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
            return  # the lines that led to it are shown with the next event
        if isinstance(event, EngineStarted):
            if self._queue is not None:
                raise InvalidRequest("a recording is of one engine; this block has made a second one")
            self._queue = queue
            queue.listeners.append(lambda event: None)  # or there would be no events of single tokens
        if queue is self._queue:
            self._recording.events.append(event)
            self._recording.lines.append(self._recording._since)
            self._recording.believed.append(self._ask())
            self._recording.broken = None  # it has gone on
            if not isinstance(event, StepFailed):
                self._recording._caught = None
        self._recording._since = []

    def _ask(self) -> Believed:
        """What the parts under test believe. One that cannot be asked believes nothing."""
        if not self._recording.own:
            return Believed()
        blocks = self._engine.blocks
        allocator = getattr(blocks.allocator, "_inner", blocks.allocator)
        sequences = [s for request in self._engine._requests.values() for s in request.sequences if not s.swapped]
        try:
            counts = {block: int(allocator.ref_count(block)) for block in range(blocks.allocator.num_blocks)}
            return Believed(counts, {s.sequence_id: [int(block) for block in s.table.blocks] for s in sequences})
        except Exception:
            return Believed()

    def _on_broken(self, guard: CheckedAllocator) -> None:
        """An allocator has broken its contract: how the engine clears up after that is not of interest."""
        if self._engine is None or guard is not self._engine.blocks.allocator or self._recording._caught:
            return
        should, says = guard._counts, self._ask().counts
        wrong = {block: (should.get(block, 0), count) for block, count in says.items() if count != should.get(block, 0)}
        recording = self._recording
        recording._caught = Break("", list(recording._since), wrong, dict(should), len(recording.events))


def _held(count: int) -> str:
    """As a block's corner has it."""
    return f"×{count}" if count else "free"


def _methods(part: type) -> Iterator[CodeType]:
    """What to watch of a class: its methods, but for the one that is asked for the sake of checks, after each call."""
    for name, member in vars(part).items():
        if isinstance(member, FunctionType) and name != "ref_count":
            yield member.__code__


def _holds_blocks(part: type) -> bool:
    """Whether this is a block allocator or a block table."""
    return hasattr(part, "copy_on_write") or hasattr(part, "slot_mapping")


def _wrong(events: Sequence[Event], believed: Sequence[Believed]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Where the parts under test say something else than the tables, after the event of each index.

    Events come after the call that caused them, so that an allocator may be ahead of the tables; only what is still
    wrong when a step begins or ends is wrong.
    """
    state, differing = State(), list[dict[tuple[str, int], Any]]()
    with suppress(LookupError, ValueError):  # from a contradiction on nobody knows what the tables say
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
    """The sources of the functions that ran, and for each event which of their lines did; equal ones once."""
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
    """The line to light; with no event, where the run broke off."""
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
            return anchored[-1] if anchored else _last_doing(told)  # somebody else's class of that name
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
    return path.name if path.is_file() else "the code above"  # a cell is no file


def function_of(code: CodeType) -> dict[str, Any]:
    """Its source, as the stepper shows it."""
    lines, first = inspect.getsourcelines(code)
    margin = len(lines[0]) - len(lines[0].lstrip())
    return {
        "name": code.co_qualname,
        "file": _file(code),
        "first": first,
        "source": [line[margin:].rstrip() for line in lines],
    }
