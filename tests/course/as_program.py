"""Runs a script in a worker that has imported already what the script needs."""

from __future__ import annotations

import runpy
import traceback


def run(path: str) -> tuple[int, str]:
    """Exit status and what is written to stderr."""
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        return 1, traceback.format_exc()
    return 0, ""
