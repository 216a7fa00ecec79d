"""Inputs for a decode kernel, and checks of its output. A failing case becomes a self-contained script.

The right output is that of assignment 3: softmax attention in float64 over contiguous keys and values. In the cache
every sequence's blocks are at random places, in the fast tier's layout. Slots without a token contain NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from minipaged.course.assignments.paged_attention.cases import events_of, make_inputs, softmax_attention
from minipaged.course.grader.assignment import Bench, Failed, Failure
from minipaged.course.grader.counterexample import aligned, make_script, sources_of
from minipaged.course.grader.session import telling
from minipaged.course.sandbox.contract import Verdict
from minipaged.errors import Invariant

UNTOUCHED = -4096
"""The content of `out` before the call; `worker.call` fills it in."""


def laid_out(blocks: Any, block_tables: Any) -> Any:
    """Return the only layer of a cache [num_blocks, 1, 2, block_size, kv_heads, head_dim] in the fast tier's layout,
    and the block tables as int32."""
    return blocks[:, 0].swapaxes(2, 3), block_tables.astype(np.int32)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One call of `paged_decode`. `contexts` has each sequence's number of tokens."""

    block_size: int
    contexts: tuple[int, ...]
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 4
    seed: int = 0
    size: float = 1.0
    """The factor of queries and keys: 60 makes scores of some thousands."""
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        return float(1 / np.sqrt(self.head_dim))

    @property
    def tolerance(self) -> float:
        return 1e-2 if self.size > 1 or self.dtype == "float16" else 1e-4

    def smaller(self) -> Iterator[DecodeCase]:
        """Yield smaller cases, the smallest first."""
        if len(self.contexts) > 1:
            yield from (replace(self, contexts=(n,)) for n in self.contexts)
        for s, n in enumerate(self.contexts):
            for fewer in (n // 2, n - self.block_size):
                if fewer > 0:
                    yield replace(self, contexts=(*self.contexts[:s], fewer, *self.contexts[s + 1 :]))
        if self.head_dim > 1:
            yield replace(self, head_dim=self.head_dim // 2)

    def check(self, bench: Bench) -> None:
        """Raise Failed if the student's function writes a wrong output, or writes elsewhere."""
        query, keys, values, *rest = make_inputs(
            *(self.seed, self.block_size, self.heads, self.kv_heads, self.head_dim),
            *(self.contexts, [1] * len(self.contexts), self.size, np.nan, self.dtype),
        )
        cache, tables = laid_out(*rest)
        right = softmax_attention(query, keys, values, [1] * len(query), self.scale)
        arguments = (*bench.part, query, cache, tables, np.array(self.contexts, np.int32), self.scale)
        name = bench.part[1]
        tell = partial(self._failure, bench, tables)
        with telling(name, tell):
            output, written = bench.process.modules[0].call("decode", *arguments)
        if message := self._wrong(output, right):
            raise Failed(tell(message))
        if written:
            message = f"{name} wrote to {written[0]}; only its kernel may write, and only to `out`"
            raise Failed(tell(message, Invariant.EXCLUSIVE_WRITE))

    def _wrong(self, output: Any, right: Any) -> str:
        """Return a sentence on what is wrong with the output, or an empty string if it is right."""
        if not isinstance(output, np.ndarray) or output.shape != right.shape:  # only a tampered worker sends that
            return f"it gave {getattr(output, 'shape', output)!r} instead of an array of shape {right.shape}"
        wrong = np.argwhere(~(np.abs(output - right).max(axis=-1) <= self.tolerance))  # [seqs, heads]
        if not len(wrong):
            return ""
        s, head = (int(i) for i in wrong[0])
        where = f"sequence {s} (context {self.contexts[s]}), query head {head}"
        if (output[s, head] == UNTOUCHED).any():
            return f"{where}: a part of `out` was not written"
        found, should = (np.array2string(row[s, head, :3], precision=4, separator=", ") for row in (output, right))
        more = "begins with " if self.head_dim > 3 else "is "
        message = f"{where}: its output {more}{found}; it should be {should}"
        if np.isnan(output[s, head]).any():
            message += " (slots without a token contain NaN; 0 / 0 and inf - inf give NaN too)"
        return message

    def _failure(
        self, bench: Bench, tables: Any, message: str, invariant: Invariant | None = None, **more: Any
    ) -> Failure:
        from minipaged.course.assignments.triton_decode.worker import call

        if more.get("verdict") is Verdict.ENDED:
            message += " (a kernel that reads or writes far outside its tensors can cause this)"
        name = bench.part[1]
        body = [
            *sources_of(make_inputs, softmax_attention, laid_out, call),
            f"contexts = {list(self.contexts)}  # each sequence's number of tokens",
            f"heads, kv_heads, head_dim = {self.heads}, {self.kv_heads}, {self.head_dim}",
            f"block_size = {self.block_size}",
            f'size, dtype = {self.size}, "{self.dtype}"  # the factor and dtype of queries and keys',
            "queries, empty = [1] * len(contexts), np.nan",
            "query, keys, values, *rest = make_inputs("
            f"{self.seed}, block_size, heads, kv_heads, head_dim, contexts, queries, size, empty, dtype)",
            "cache, block_tables = laid_out(*rest)",
            "scale = float(1 / np.sqrt(head_dim))",
            f"output, written = call({name}, query, cache, block_tables, np.array(contexts, np.int32), scale)",
            "expected = softmax_attention(query, keys, values, queries, scale)",
            f"right = (abs(output - expected) <= {self.tolerance}).all(axis=-1)  # [seqs, heads]",
            'assert right.all(), f"not right:\\n{output[~right]}\\nexpected:\\n{expected[~right]}"',
            'assert not written, f"it wrote to {written}"',
        ]
        imports = [
            "import os",
            "",
            'os.environ["TRITON_INTERPRET"] = "1"  # set before triton is imported: no GPU is needed, and prints work',
            'DEVICE = "cpu"',
            "",
            "import numpy as np",
            "import torch",
        ]
        script = make_script(bench.submission, name, invariant or Invariant.CONTENT, message, imports, body)
        events = events_of(self.block_size, self.contexts, tables, message)
        return Failure(message, invariant, self._draw(tables), script, events, **more)

    def _draw(self, tables: Any) -> tuple[str, ...]:
        rows = [["sequence", "context", "in the last block", "block table"]]
        for s, n in enumerate(self.contexts):
            last = n - (n - 1) // self.block_size * self.block_size
            rows.append([str(s), str(n), f"{last} of {self.block_size}", str(tables[s].tolist())[:60]])
        sizes = f"block_size {self.block_size}, {self.heads} query heads, {self.kv_heads} key/value heads"
        return (*aligned(rows), f"{sizes}, head_dim {self.head_dim}, {self.dtype}")
