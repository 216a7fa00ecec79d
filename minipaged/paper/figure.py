"""What a figure of the executable paper is: jobs to run, and what is made of their results.

A figure's file says all before anything is run: which jobs, what is drawn, which numbers of the paper are compared with
ours, and how far they may be apart (`Check.tolerance`). A result is plain data, the same for the same seed; drawings
(`drawing.py`), tables and pages are made from it and from nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Verdict = Literal["holds", "fails", "not judged"]
Style = Literal["ours", "paper", "calibrated"]
"""Solid lines are ours, dashed ones the paper's; marks alone are points that calibrated the machine."""
CheckKind = Literal["predicted", "calibrated", "exact"]


class Job(Protocol):
    """One run. A frozen dataclass: what it says is all that its result depends on."""

    def run(self) -> Any:
        """A dataclass of numbers, or lists of them."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot."""

    label: str
    style: Style
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Plot:
    """Axes with lines. A plot of bars has one line for each colour, and `groups` names the places on the x axis."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    y_max: float | None = None
    log_x: bool = False
    log_y: bool = False
    groups: Sequence[str] = ()
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """Of a block table."""

    block: int
    filled: int
    """Its slots with tokens."""


@dataclass(frozen=True, slots=True)
class Table:
    """A block table, in logical order."""

    label: str
    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Box:
    """A block of the pool."""

    number: int
    words: Sequence[str]
    """The tokens in it."""
    holders: int
    """Its reference count."""
    marked: bool = False
    """Whether it is to be seen first."""
    said: str = ""
    """A word on it."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A picture of block tables, and of the pool that they lead into, at one moment of a run."""

    title: str
    block_size: int
    tables: Sequence[Table]
    pool: Sequence[Box]


@dataclass(frozen=True, slots=True)
class Check:
    """One number of the paper, and ours."""

    what: str
    paper: float | None
    """None where the paper prints none."""
    ours: float | None
    """None where ours never comes to it."""
    tolerance: float | None
    """How far ours may be from it: a part of the paper's where `relative`, else in its unit. None: no verdict."""
    relative: bool = True
    unit: str = ""
    kind: CheckKind = "predicted"
    """*calibrated*: by the paper's number the machine was calibrated; *exact*: it follows from what goes in, as in the
    paper's own examples. Neither is a prediction."""

    @property
    def difference(self) -> float | None:
        """Ours less the paper's; a part of the paper's where `relative`."""
        if self.paper is None or self.ours is None:
            return None
        return (self.ours - self.paper) / (self.paper if self.relative else 1)

    @property
    def verdict(self) -> Verdict:
        if self.tolerance is None or self.paper is None:
            return "not judged"
        return "holds" if self.difference is not None and abs(self.difference) <= self.tolerance else "fails"


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """A sentence of the paper about its figure, and whether its own figure, and ours, bear it out."""

    says: str
    section: str
    in_paper: str
    """What the paper's own numbers come to."""
    ours: str
    holds_in_paper: bool


@dataclass(frozen=True, slots=True)
class FigureResult:
    """What a figure has come to."""

    plots: Sequence[Plot | Blocks]
    checks: Sequence[Check]
    sentences: Sequence[PaperClaim] = ()
    notes: Sequence[str] = ()
    """What else is to be known, each a sentence or two."""
    recording: Mapping[str, Any] | None = None
    """The run to step through, as the stepper takes it (`stepper/page.py`)."""


class Figure(ABC):
    """One figure or table. Its class's docstring says what is shown; `look` and `change_it` are for its page."""

    name: str = ""
    """As on the command line: 12a, or beyond/prefix-caching."""
    title: str = ""
    section: str = ""
    """Of the paper."""
    look: str = ""
    """What to look at."""
    change_it: Sequence[str] = ()
    """Three experiments to try."""
    why: Mapping[str, str] = {}
    """Why checks fail: a part of their `what` -> what is known of the reason, or that it is not known."""
    alone: bool = False
    """Whether its jobs measure, and so run one after another."""
    needs_traces: bool = False
    """Whether it is made from files that are not here; see `given`."""

    def given(self, traces: Path) -> Figure:
        """The same with the traces in this folder."""
        del traces
        return self

    @abstractmethod
    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        """What has to be run, each once. `quick`: shorter traces, by which knees come out too high."""

    @abstractmethod
    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        """What they have come to."""
