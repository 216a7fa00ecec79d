"""Figures that need trace files which the package does not contain. A run names their folder (`--traces`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from minipaged.errors import InvalidRequest
from minipaged.paper.figure import Figure, Job


class MissingTrace(InvalidRequest):
    """Raised if a figure's trace file is missing. The message names the file, and where to get it."""


class FromFiles(Figure):
    """A figure that is made from files in the folder with the traces."""

    section = "beyond"
    needs_traces = True
    files: ClassVar[Sequence[str]]
    source: ClassVar[str]
    """The place where the files can be downloaded."""

    def __init__(self, traces: Path | None = None) -> None:
        self._traces = traces

    def given(self, traces: Path) -> Self:
        return type(self)(traces)

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        missing = [file for file in self.files if self._traces is None or not (self._traces / file).is_file()]
        if self._traces is None or missing:
            raise MissingTrace(f"{self.name} needs --traces FOLDER, with {' and '.join(missing)}: {self.source}")
        return self.jobs_with([str(self._traces / file) for file in self.files], quick, seed)

    @abstractmethod
    def jobs_with(self, paths: Sequence[str], quick: bool, seed: int) -> list[Job]:
        """Return the jobs. `paths` are the paths of `files`."""
