"""Mutants, which grade the students' tests: each is a right part with one seeded bug.

Each assignment defines them as `SEEDED` in its `mutants.py`. Most are bugs that shipped somewhere once.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import minipaged
from minipaged.course.grader.assignment import FOLDER, name_of


@dataclass(frozen=True, slots=True)
class Mutant:
    """A part with one seeded bug."""

    name: str
    meaning: str
    """A description of the bug."""
    test: str
    """The name of the grader's test that must find it."""
    source: str
    """The source of the whole file."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """The right parts of an assignment, and its mutants."""

    right: Mapping[str, str]
    """Sources of whole files, by description. They are written differently."""
    mutants: Mapping[str, Mutant]
    """Mutants by name, from simple to difficult like the grader's tests."""


def seeded(right: Mapping[str, str], bugs: Mapping[str, tuple[str, ...]]) -> Seeded:
    """Return the right parts with mutants of the first one.

    `bugs` maps "name" or "name: meaning" to the test that must find the bug, followed by pairs of strings: a piece of
    the source that occurs once, and its replacement.
    """
    base, mutants = next(iter(right.values())), []
    for words, (test, *pieces) in bugs.items():
        name, _, meaning = words.partition(": ")
        source = base
        for piece, wrong in zip(pieces[::2], pieces[1::2], strict=True):
            assert source.count(piece) == 1, f"{name}: the piece occurs {source.count(piece)} times"
            source = source.replace(piece, wrong)
        mutants.append(Mutant(name, meaning or name, test, source))
    return Seeded(right, {one.name: one for one in mutants})


def source_of(module: str) -> str:
    """Return the source of a module of minipaged, such as "engine/policy"."""
    return (Path(minipaged.__file__).parent / f"{module}.py").read_text()


def find_seeded(assignment: str) -> Seeded:
    """Return the seeded bugs of an assignment. Raises CannotBeGraded for an unknown name."""
    found: Seeded = importlib.import_module(f"{FOLDER}.{name_of(assignment).replace('-', '_')}.mutants").SEEDED
    return found
