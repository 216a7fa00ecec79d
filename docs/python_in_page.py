"""Python for the pages: Pyodide, and those parts of minipaged that need nothing else, in one script.

A page asks for `python.js` when its reader wants to run something, and never before. It is a script, and what it holds
is text (each file compressed, in base64), because a page that was opened from a file may load scripts and nothing else.
minipaged's files are those of the source, as they are when the site is built.
"""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

from docs import npm

ROOT = Path(__file__).parent.parent
PYODIDE = "pyodide@314.0.7"
PYODIDE_SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
PARTS = ("*.py", "engine/**/*.py", "models/*.py", "reference/*.py", "replay/*.py", "stepper/*.py")
"""Of minipaged. A few of them need NumPy (attention, say), and importing them fails; the engine needs none of those."""
NOTICE = (
    f"/*! {PYODIDE}, https://pyodide.org, under the Mozilla Public License 2.0; its source: "
    "https://github.com/pyodide/pyodide. It holds CPython and its standard library, under the PSF License. */\n"
)


def write(script: Path) -> None:
    """Write `python.js`. Raises npm.NotFetched."""
    archive = npm.fetch(PYODIDE, PYODIDE_SHA512)
    files = {name: npm.read(archive, name) for name in FILES}
    # Of the packages that could be loaded from elsewhere, none.
    lock = {"info": json.loads(npm.read(archive, "pyodide-lock.json"))["info"], "packages": {}}
    files["lock.json"] = json.dumps(lock).encode()
    files["minipaged.json"] = json.dumps(sources()).encode()
    texts = {name: base64.b64encode(gzip.compress(data, 9, mtime=0)).decode() for name, data in files.items()}
    script.write_text(f"{NOTICE}globalThis.pythonInPage = {json.dumps(texts)};\n")


def sources() -> dict[str, str]:
    """The files of minipaged, by their paths."""
    paths = sorted(path for part in PARTS for path in (ROOT / "minipaged").glob(part))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
