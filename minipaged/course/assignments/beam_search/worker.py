"""Times a student's beam search in the worker. The module is loaded before the student's file."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any


def seconds(module: ModuleType, name: str, params: Any, prompt_length: int, max_length: int, logits: Any) -> float:
    """Return the seconds of a search from the prompt to max_length. All steps have the same logits [beams, vocab]."""
    search = getattr(module, name)(params, prompt_length, max_length, ())
    sums = [0.0]
    started = time.perf_counter()
    for _ in range(max_length - prompt_length):
        step = search.step(logits, list(range(len(sums))), sums)
        sums = [move.cumulative_logprob for move in step.survivors]
    return time.perf_counter() - started
