"""A figure of the executable paper: the jobs to run, and the plots and checks made from their results.

A figure's file fixes everything before a run: the jobs, the plots, the paper's numbers to compare with, and how far
ours may be from them (`Check.tolerance`). A result is plain data. The same seed gives the same result. Drawings
(`drawing.py`), tables and pages are made from the result alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Verdict = Literal["holds", "fails", "not judged"]
Style = Literal["ours", "paper", "calibrated"]
"""The style of a line: ours solid, the paper's dashed. Points that calibrated the machine are marks without a line."""
CheckKind = Literal["predicted", "calibrated", "exact"]


class Job(Protocol):
    """One run, as a frozen dataclass. Its result depends on its fields alone."""

    def run(self) -> Any:
        """Run the job. Returns a dataclass of numbers or lists of numbers."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot."""

    label: str
    style: Style
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with axes and lines. A bar chart has one line for each colour; `groups` are its labels on the x axis."""

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
    """An entry of a block table."""

    block: int
    filled: int
    """The number of slots with tokens."""


@dataclass(frozen=True, slots=True)
class Table:
    """A block table, its entries in logical order."""

    label: str
    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Box:
    """A block of the pool."""

    number: int
    words: Sequence[str]
    """The tokens in the block."""
    holders: int
    """The block's reference count."""
    marked: bool = False
    """Whether the block is highlighted."""
    said: str = ""
    """A label beside the block."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A picture of the block tables and the pool of blocks at one moment of a run."""

    title: str
    block_size: int
    tables: Sequence[Table]
    pool: Sequence[Box]


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison of one number of the paper with ours."""

    what: str
    paper: float | None
    """The paper's number, or None if the paper prints none."""
    ours: float | None
    """Our number, or None if our run has none (a curve that never reaches its knee)."""
    tolerance: float | None
    """The largest allowed difference: a fraction of the paper's number if `relative`, otherwise in `unit`. None: the
    check is not judged."""
    relative: bool = True
    unit: str = ""
    kind: CheckKind = "predicted"
    """*calibrated*: the machine was fitted to the paper's number. *exact*: the number follows from the input, as in the
    paper's small examples. Neither is a prediction."""

    @property
    def difference(self) -> float | None:
        """Our number minus the paper's, as a fraction of the paper's if `relative`."""
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
    """A sentence of the paper about its figure, with the numbers that the paper's figure and ours give for it."""

    says: str
    section: str
    in_paper: str
    """The result according to the paper's own figure."""
    ours: str
    """The result according to our figure."""
    holds_in_paper: bool
    """Whether the paper's own figure supports the sentence."""


@dataclass(frozen=True, slots=True)
class FigureResult:
    """The result of a figure."""

    plots: Sequence[Plot | Blocks]
    checks: Sequence[Check]
    sentences: Sequence[PaperClaim] = ()
    notes: Sequence[str] = ()
    """Remarks, each of one or two sentences."""
    recording: Mapping[str, Any] | None = None
    """The run to step through, in the stepper's format (`stepper/page.py`)."""


class Figure(ABC):
    """One figure or table. The docstring of its class says what it shows."""

    name: str = ""
    """The name on the command line: 12a, or beyond/prefix-caching."""
    title: str = ""
    section: str = ""
    """The section of the paper, or "beyond"."""
    look: str = ""
    """What to look at, for the figure's page."""
    change_it: Sequence[str] = ()
    """Three experiments to try, for the figure's page."""
    why: Mapping[str, str] = {}
    """Reasons why checks fail: a part of their `what` -> the reason, or that it is not known."""
    alone: bool = False
    """Whether its jobs measure time and must therefore run one after another."""
    needs_traces: bool = False
    """Whether it needs trace files that the package does not contain; see `given`."""

    def given(self, traces: Path) -> Figure:
        """Return this figure with the traces of this folder."""
        del traces
        return self

    @abstractmethod
    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        """Return the jobs to run, each once. `quick` shortens the traces; knees then come out too high."""

    @abstractmethod
    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        """Make the figure's result from the results of its jobs."""
