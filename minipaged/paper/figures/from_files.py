"""Figures that are made from files which are not shipped: recorded requests, in a folder that is named for a run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from minipaged.errors import InvalidRequest
from minipaged.paper.figure import Figure, Job


class MissingTrace(InvalidRequest):
    """A file that a figure is made from is not there; the message says which, and where it can be had."""


class FromFiles(Figure):
    """A figure from files in the folder with the traces."""

    section = "beyond"
    needs_traces = True
    files: ClassVar[Sequence[str]]
    source: ClassVar[str]
    """Where they can be had."""

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
        """The jobs, with the files at these places."""
