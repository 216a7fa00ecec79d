"""Reads `tests.toml`, which lies beside each handout. Points and texts are changed there, not in code.

Each `[[test]]` has a name, which identifies its check, its points, the invariant that it checks (if any), a sentence on
the invariant's meaning there, and a hint where to look, which never gives the answer.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from minipaged.course.grader.assignment import Assignment, CannotBeGraded, Check, Stage, Test
from minipaged.course.grader.handouts import folder_of
from minipaged.errors import Invariant

KINDS: dict[str, type] = {
    "name": str,
    "points": int,
    "meaning": str,
    "hint": str,
    "invariant": str,
    "stage": str,
    "hidden": bool,
}
OPTIONAL = ("invariant", "stage", "hidden")


def described(name: str, checks: Mapping[str, Check], **more: Any) -> Assignment:
    """Return the assignment with its `tests.toml`; `checks` has each test's function by name. Raises CannotBeGraded."""
    cap, tests = read_tests(folder_of(name) / "tests.toml", checks)
    return Assignment(name=name, tests=tests, cap=cap, **more)


def read_tests(path: Path, checks: Mapping[str, Check]) -> tuple[int, tuple[Test, ...]]:
    """Return the cap and the tests in order. Raises CannotBeGraded with the place of the mistake."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotBeGraded(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CannotBeGraded(f"{path}: {error}") from None
    require(path, "the file", document, {"cap": int, "test": list}, ())
    found: dict[str, Test] = {}
    for number, entry in enumerate(document["test"], 1):
        if type(entry) is not dict:
            raise CannotBeGraded(f"{path}: test number {number} is {entry!r}; each begins with [[test]]")
        where = f"[[test]] number {number} ({entry.get('name', 'without a name')!r})"
        require(path, where, entry, KINDS, OPTIONAL)
        words = {key: " ".join(entry[key].split()) for key in ("meaning", "hint")}
        name, invariant, stage = entry["name"], entry.get("invariant"), entry.get("stage", "properties")
        one_of(path, f"{where}: name", name, list(checks))
        one_of(path, f"{where}: stage", stage, get_args(Stage))
        if invariant is not None:
            one_of(path, f"{where}: invariant", invariant, list(map(str, Invariant)))
        if name in found:
            raise CannotBeGraded(f"{path}: {where} is there twice")
        known = invariant and Invariant(invariant)
        found[name] = Test(
            name,
            entry["points"],
            known,
            **words,
            check=checks[name],
            stage=stage,
            hidden=entry.get("hidden", False),
        )
    if missing := [name for name in checks if name not in found]:
        raise CannotBeGraded(f"{path} has no [[test]] with the name {missing[0]!r}")
    return document["cap"], tuple(found.values())


def require(
    path: Path, where: str, table: Mapping[str, Any], kinds: Mapping[str, type], optional: tuple[str, ...]
) -> None:
    """Raise CannotBeGraded unless the table has all required keys, no unknown ones, and values of the right types."""
    for key, value in table.items():
        one_of(path, f"{where}: key", key, list(kinds))
        if type(value) is not kinds[key]:
            raise CannotBeGraded(f"{path}: {where}: {key} is {value!r}; it has to be of type {kinds[key].__name__}")
    if missing := [key for key in kinds if key not in table and key not in optional]:
        raise CannotBeGraded(f"{path}: {where} has no {missing[0]}")


def one_of(path: Path, what: str, value: str, known: Sequence[str]) -> None:
    """Raise CannotBeGraded with the known values if this is not one of them."""
    if value not in known:
        raise CannotBeGraded(f"{path}: {what} {value!r} is not known; choose one of {', '.join(map(repr, known))}")
