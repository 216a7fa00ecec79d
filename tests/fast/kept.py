"""What a program has printed is kept between test runs, as long as nothing has changed that it is made of.

    kept("compiled-kernels", "tests.fast.compile_kernels")        what `python -m tests.fast.compile_kernels` prints

Some programs compile for minutes and print the same each time. A kept result counts only for the same arguments, the
same versions of Python and of the packages, the same settings of these in the environment, and the same content of each
file of the project that the program has loaded (and of all of `minipaged/fast`, parts of which are read as text). The
results lie in `build/kept`, which may be removed at any time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock

from tests.left_running import OURS

ROOT = Path(__file__).parents[2]
PACKAGES = ("triton", "torch", "numpy", "numba", "llvmlite")
SETTINGS = ("TRITON", "LLVM", "MLIR", "PTXAS", "DISABLE_", "ENABLE_", "NUMBA", "TORCH", "PYTORCH", "CUDA", "MINIPAGED")
"""How the names of variables begin that say how packages work."""


def kept(name: str, module: str, *arguments: str, root: Path = ROOT) -> str:
    """What `python -m module arguments` prints in `root`: the result kept by this name, or a new one.

    Triton compiles there, unless the program says that it interprets. Test processes wait for each other.
    Raises AssertionError if the program fails.
    """
    folder = root / "build" / "kept"
    folder.mkdir(parents=True, exist_ok=True)
    at, loaded = folder / f"{name}.json", folder / f"{name}.loaded"
    environment = {variable: value for variable, value in os.environ.items() if variable != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"  # the tensors are small
    read_as_text = [file.relative_to(root).as_posix() for file in (root / "minipaged" / "fast").rglob("*.py")]
    circumstances = [
        [module, *arguments],
        [sys.version, platform.platform(), *(f"{each} {importlib.metadata.version(each)}" for each in PACKAGES)],
        sorted(
            [variable, value]
            for variable, value in environment.items()
            if variable.startswith(SETTINGS) and variable != OURS
        ),
        hashes(root, read_as_text),
    ]
    with FileLock(folder / f"{name}.lock"):
        result = json.loads(at.read_text()) if at.exists() else {}
        if result.get("circumstances") == circumstances and result["files"] == hashes(root, result["files"]):
            return str(result["printed"])
        began = time.time()
        command = [sys.executable, "-m", "tests.fast.kept", str(loaded), module, *arguments]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        files = json.loads(loaded.read_text())
        if max((root / file).stat().st_mtime for file in files) < began:  # nobody has edited one meanwhile
            result = {"circumstances": circumstances, "files": hashes(root, files), "printed": done.stdout}
            whole = at.with_suffix(".new")
            whole.write_text(json.dumps(result))
            whole.replace(at)  # a run that is ended here leaves no half of it
        return done.stdout


def hashes(root: Path, files: Iterable[str]) -> dict[str, str]:
    """What each file of the project contains; nothing for one that is gone."""
    return {
        file: hashlib.sha256((root / file).read_bytes()).hexdigest() if (root / file).exists() else ""
        for file in sorted(files)
    }


# --- In the program's process ---------------------------------------------------------------------


def main(loaded: str, module: str, *arguments: str) -> None:
    """Run the program, and write down which files of the project in the current folder it has loaded."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # programs end by sys.exit, too
        Path(loaded).write_text(json.dumps(loaded_files(module, Path.cwd())))


def loaded_files(module: str, root: Path) -> list[str]:
    found = {Path(file) for each in [*sys.modules.values()] if (file := getattr(each, "__file__", None))}
    spec = importlib.util.find_spec(module)  # which is in `sys.modules` only while it runs
    assert spec
    assert spec.origin
    ours = [file for file in {*found, Path(spec.origin)} if file.is_relative_to(root)]
    return sorted(file.relative_to(root).as_posix() for file in ours if not file.is_relative_to(sys.prefix))  # packages


if __name__ == "__main__":
    main(*sys.argv[1:])
