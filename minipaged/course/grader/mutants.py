"""Bugs on purpose (mutants), to grade the students' tests by: a right part with one mistake each.

Each assignment has them in its `mutants.py`, as `SEEDED`. Most are mistakes that shipped somewhere once.
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
    """One bug."""

    name: str
    meaning: str
    """What is wrong, in words."""
    test: str
    """The grader's test that is to find it."""
    source: str
    """The whole file."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """The right parts of an assignment, and the wrong ones."""

    right: Mapping[str, str]
    """Whole files, by what there is to say of them. They are written differently."""
    mutants: Mapping[str, Mutant]
    """By name. The grader's tests go from the simple to the difficult, and so do the bugs."""


def seeded(right: Mapping[str, str], bugs: Mapping[str, tuple[str, ...]]) -> Seeded:
    """Mutants of the first of the right ones. `bugs`: by name (or "name: meaning") the test that is to find it, and
    pieces of the source that occur once, each with what stands there instead."""
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
    """A file of ours, as in "engine/policy"."""
    return (Path(minipaged.__file__).parent / f"{module}.py").read_text()


def find_seeded(assignment: str) -> Seeded:
    """Those of one assignment. Raises CannotBeGraded where there is none of that name."""
    found: Seeded = importlib.import_module(f"{FOLDER}.{name_of(assignment).replace('-', '_')}.mutants").SEEDED
    return found
