"""Times a student's block tables in the worker.

The module is loaded before the student's file. The tables use the reference's allocator, which is in the worker too,
since a call to the grader takes longer than the work to be measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def seconds(
    module: ModuleType, name: str, block_size: int, allocator: Any, prompts: Sequence[int], num_tokens: int
) -> float:
    """Return the seconds for tables of prompts with these lengths, a fork of each, and then growth token by token."""
    tables = [getattr(module, name)(block_size, allocator) for _ in prompts]
    started = time.perf_counter()
    for table, prompt in zip(tables, prompts, strict=True):
        table.append(prompt)
        table.slot_mapping(0, prompt)
    tables += [table.fork() for table in tables]
    for _ in range(num_tokens):
        for table in tables:
            table.blocks_needed(1)
            table.append(1)
            table.slot_mapping(table.num_tokens - 1, table.num_tokens)
    for table in tables:
        table.trim(0)
    return time.perf_counter() - started
