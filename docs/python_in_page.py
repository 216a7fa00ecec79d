"""Python for the pages: Pyodide, and those parts of minipaged that need nothing else, in two scripts.

A page asks for `python.js` when its reader wants to run something, and never before; and for `grading.js`, when that is
to be graded. They are scripts, and what they hold is text (each file compressed, in base64), because a page that was
opened from a file may load scripts and nothing else. minipaged's files are those of the source, as they are when the
site is built.

The grader looks for counterexamples with the Hypothesis that has been tested (constraints.txt), built for Pyodide: so
it finds in a page what it finds on a command line.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from docs import npm, wheels

ROOT = Path(__file__).parent.parent
PYODIDE = "pyodide@314.0.7"
PYODIDE_SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
PARTS = (
    *("*.py", "api/*.py", "engine/**/*.py", "handover/*.py", "models/*.py", "reference/*.py", "replay/*.py"),
    *("setup/*.py", "simulation/*.py", "stepper/*.py", "tiers/*.py"),
)
"""Of minipaged. A few of them need NumPy (attention, say), and importing them fails; the engine needs none of those."""
WHEELS = {
    "hypothesis==6.170.15": "1138c03edf4c4401afb28e50255644b4ab4e1ad52864456cd4e84458ba8c671a",
    "sortedcontainers==2.4.0": "a163dcaede0f1c021485e957a39245190e74249897e2ae4b2aa38595db237ee0",
}
"""What the grader needs, with the digests of the package index."""
GRADED = [
    handout.parent.name.partition("_")[2]
    for handout in sorted((ROOT / "assignments").glob("*/handout.md"))
    if "\n<!-- grade " in handout.read_text()
]
"""Assignments that have a place to be written in: those that need no NumPy."""
GRADING = (
    *("course/*.py", "course/grader/*.py", "course/sandbox/*.py", "course/assignments/*.py", "testing/*.py"),
    *(f"course/assignments/{name}/*.py" for name in GRADED),
)
"""Of minipaged, besides; and what the assignments are in data."""
NOTICE = (
    f"/*! {PYODIDE}, https://pyodide.org, under the Mozilla Public License 2.0; its source: "
    "https://github.com/pyodide/pyodide. It holds CPython and its standard library, under the PSF License. */\n"
)
GRADING_NOTICE = (
    "/*! Hypothesis, https://hypothesis.works, under the Mozilla Public License 2.0; its source: "
    "https://github.com/HypothesisWorks/hypothesis. sortedcontainers, under the Apache License 2.0. */\n"
)


def write(folder: Path) -> None:
    """Write `python.js`. Raises npm.NotFetched."""
    archive = npm.fetch(PYODIDE, PYODIDE_SHA512)
    files = {name: npm.read(archive, name) for name in FILES}
    # Of the packages that could be loaded from elsewhere, none.
    lock = {"info": json.loads(npm.read(archive, "pyodide-lock.json"))["info"], "packages": {}}
    files["lock.json"] = json.dumps(lock).encode()
    files["minipaged.sources.json"] = json.dumps(sources(PARTS)).encode()
    _write(folder / "python.js", NOTICE, files)


def write_grading(folder: Path) -> None:
    """Write `grading.js`. Raises npm.NotFetched."""
    fetched = [wheels.fetch(package, sha256) for package, sha256 in WHEELS.items()]
    grading = {wheel.name: wheel.read_bytes() for wheel in fetched}
    grading["grading.sources.json"] = json.dumps({**sources(GRADING), **handed_out()}).encode()
    _write(folder / "grading.js", GRADING_NOTICE, grading)


def _write(script: Path, notice: str, files: Mapping[str, bytes]) -> None:
    texts = {name: base64.b64encode(gzip.compress(data, 9, mtime=0)).decode() for name, data in files.items()}
    script.write_text(f'{notice}(globalThis.pythonInPage ??= {{}})["{script.name}"] = {json.dumps(texts)};\n')


def sources(parts: Sequence[str]) -> dict[str, str]:
    """Files of minipaged, by their paths."""
    paths = sorted({path for part in parts for path in (ROOT / "minipaged").glob(part)})
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def handed_out() -> dict[str, str]:
    """The tests of the assignments, by the paths that they have where minipaged is installed."""
    files = sorted((ROOT / "assignments").glob("*/tests.toml"))
    return {f"minipaged/course/handed_out/{file.parent.name}/{file.name}": file.read_text() for file in files}
