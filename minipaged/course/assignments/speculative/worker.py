"""Draws many tokens with a student's `verify` in the worker. The module is loaded before the student's file."""

from __future__ import annotations

from random import Random
from typing import Any


def outcomes(speculative: Any, p: Any, q: Any, number: Any, seed: Any) -> Any:
    """Draw drafts from the rows of `q`, and verify each with random numbers. Returns how often each outcome came."""
    r = Random(seed)
    counts: Any = {}
    for _ in range(number):
        drafted = [r.choices(range(len(row)), row)[0] for row in q]
        u, v = [r.random() for _ in q], [r.random() for _ in p]
        tokens = tuple(speculative.verify(p, q, drafted, u, v))
        counts[tokens] = counts.get(tokens, 0) + 1
    return counts
