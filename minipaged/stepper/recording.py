"""The recorder: the events of one engine, and which lines of its source ran before each of them.

Nothing is told twice: the events are the engine's own (docs/events.md), caught where it emits them, and the lines are
those that Python ran, read from the files that it ran them from. So a page made from a recording cannot show code that
does something else.

Watched are the functions in WATCHED, where block tables, counts and queues change, and the classes that a caller names.
One line of each step is *the* line: the last that ran in the function that the event is about (TELLING), leaving out
return statements, and the lines of loops, which run once more when a loop is over. Where that function did not run
since the event before, it is the last line that ran at all. Where an allocator or a block table tells, and one of the
caller's ran, it is a line of that: of the method that tells, if it has one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from linecache import getline
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import minipaged
from minipaged.engine.event_queue import EventQueue
from minipaged.errors import InvalidRequest
from minipaged.events import EngineStarted, Event, TokensComputed
from minipaged.stepper.page import UNSEEN, as_data, element, page, words_of

ROOT = Path(minipaged.__file__).parent

WATCHED: dict[str, tuple[str, ...]] = {
    "engine/engine.py": (
        "Engine.add_request",
        "Engine._launch",
        "Engine._finish_step",
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
        "Scheduler._admit",
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

TELLING: dict[str, str] = {
    "request_arrived": "Engine.add_request",
    "step_started": "Engine._launch",
    "step_finished": "Engine._finish_step",
    "request_admitted": "Scheduler._admit",
    "request_preempted": "Scheduler._preempt",
    "tokens_computed": "BlockTable.append",
    "block_copied": "BlockAllocator.copy_on_write",
    "prefix_reused": "BlockTable.adopt",
    "blocks_loaded": "BlockTable.append",
    "sequence_forked": "BlockTable.fork",
    "blocks_freed": "BlockAllocator.free",
    "swapped_out": "BlockTable.relocate",
    "swapped_in": "BlockTable.relocate",
    "block_deduplicated": "BlockTable.replace",
    "token_generated": "_attend",
}
"""The function that each event is about. A token comes from attention, if the model has any."""

Lines = list[tuple[CodeType, int]]
"""Lines of functions, in the order in which they ran."""


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

    def note(self, text: str) -> None:
        """Say something more of the latest event."""
        latest = len(self.events) - 1
        self.notes[latest] = f"{self.notes[latest]} {text}" if latest in self.notes else text

    def data(self) -> dict[str, Any]:
        """What the stepper is fed with, as JSON has it."""
        words = words_of(self.events, self.decode) if self.decode else None
        return as_data(
            self.title, self.events, words=words, notes=self.notes, code=_code(self.events, self.lines, self.own)
        )

    def page(self) -> str:
        """A page of HTML that needs nothing else."""
        return page(self.data())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """What a notebook shows: the stepper; the docs take the data and bring the script themselves."""
        data = self.data()
        return {"text/html": element(data, with_script=True), "application/vnd.minipaged.run+json": data}


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
    finally:
        sys.settrace(before)
    if not recording.events or not isinstance(recording.events[0], EngineStarted):
        raise InvalidRequest("nothing to step through: make the engine (or the LLM) inside the `with record()` block")


class _Tracer:
    """Python calls `on_call` for each function that starts, and what it returns for each line of that function."""

    def __init__(self, recording: Recording, watch: Iterable[type]) -> None:
        self._recording = recording
        self._queue: EventQueue | None = None
        self._lines: Lines = []
        self._watched = {(str(ROOT / file), name) for file, names in WATCHED.items() for name in names}
        for part in watch:
            self._watched |= {(code.co_filename, code.co_qualname) for code in _methods(part)}

    def on_call(self, frame: FrameType, kind: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code is EventQueue.__call__.__code__:
            self._on_emit(frame.f_locals["self"], frame.f_locals["event"])
            return None
        return self.on_line if (code.co_filename, code.co_qualname) in self._watched else None

    def on_line(self, frame: FrameType, kind: str, argument: object) -> Callable[..., Any]:
        if kind == "line":
            self._lines.append((frame.f_code, frame.f_lineno))
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
            self._recording.lines.append(self._lines)
        self._lines = []


def _methods(part: type) -> Iterator[CodeType]:
    """What to watch of a class: its methods, but for the one that is asked for the sake of checks, after each call."""
    for name, member in vars(part).items():
        if isinstance(member, FunctionType) and name != "ref_count":
            yield member.__code__


def _holds_blocks(part: type) -> bool:
    """Whether this is a block allocator or a block table."""
    return hasattr(part, "copy_on_write") or hasattr(part, "slot_mapping")


def _code(events: Iterable[Event], lines: Iterable[Lines], own: Set[CodeType]) -> dict[str, Any]:
    """The sources of the functions that ran, and for each event which of their lines did; equal ones once."""
    numbers: dict[CodeType, int] = {}
    functions: list[dict[str, Any]] = []
    unique: dict[tuple[tuple[int, tuple[int, ...]], ...], int] = {}
    lines_of: list[int] = []
    current: list[tuple[int, int] | None] = []
    for event, before in zip(events, lines, strict=True):
        ran: dict[int, set[int]] = {}  # in the order of calls
        for code, line in before:
            if code not in numbers:
                numbers[code] = len(numbers)
                functions.append(_function(code))
            ran.setdefault(numbers[code], set()).add(line)
        key = tuple((number, tuple(sorted(lines))) for number, lines in ran.items())
        lines_of.append(unique.setdefault(key, len(unique)))
        lit = _telling_line(event, before, own)
        current.append((numbers[lit[0]], lit[1]) if lit else None)
    return {"functions": functions, "lines": list(unique), "lines_of": lines_of, "current": current}


def _telling_line(event: Event, before: Lines, own: Set[CodeType]) -> tuple[CodeType, int] | None:
    """The line to light."""
    name = TELLING.get(event.name, "")
    if isinstance(event, TokensComputed) and event.new_blocks:
        name = "BlockAllocator.allocate"  # its sentence is about the blocks
    in_own = [(code, line) for code, line in before if code in own and name.startswith("Block")]
    telling = [(code, line) for code, line in in_own if code.co_name == name.rpartition(".")[2]]
    told = telling or in_own or [(code, line) for code, line in before if code.co_qualname == name]
    doing = [
        (code, line)
        for code, line in told
        if not getline(code.co_filename, line).lstrip().startswith(("return", "for ", "while "))
    ]
    return next((lines[-1] for lines in (doing, told, before) if lines), None)


def _file(code: CodeType) -> str:
    path = Path(code.co_filename)
    if path.is_relative_to(ROOT.parent):
        return path.relative_to(ROOT.parent).as_posix()
    return path.name if path.is_file() else "the code above"  # a cell is no file


def _function(code: CodeType) -> dict[str, Any]:
    lines, first = inspect.getsourcelines(code)
    margin = len(lines[0]) - len(lines[0].lstrip())
    return {
        "name": code.co_qualname,
        "file": _file(code),
        "first": first,
        "source": [line[margin:].rstrip() for line in lines],
    }
