"""Inputs for paged attention, and their right outputs. A failing case becomes a self-contained script.

The right output is softmax attention in float64 over contiguous keys and values. In the cache every sequence's blocks
are at random places. Slots without a token contain NaN, or 0 in cases about something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minipaged.course.grader.assignment import Bench, Failed, Failure
from minipaged.course.grader.counterexample import aligned, make_script, sources_of
from minipaged.course.grader.session import telling
from minipaged.course.sandbox.contract import Handle, Raised
from minipaged.errors import Invariant
from minipaged.events import EngineStarted, Event, RequestAdmitted, RequestArrived, StepFailed, TokensComputed


def make_inputs(
    seed: Any,
    block_size: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    contexts: Any,
    queries: Any,
    size: Any,
    empty: Any,
    dtype: Any,
) -> Any:
    """Return the query, each sequence's keys and values, the cache's blocks, and the block tables."""
    rng = np.random.default_rng(seed)
    query = (size * rng.standard_normal((sum(queries), heads, head_dim))).astype(dtype)
    keys = [(size * rng.standard_normal((n, kv_heads, head_dim))).astype(dtype) for n in contexts]
    values = [rng.standard_normal((n, kv_heads, head_dim)).astype(dtype) for n in contexts]
    num_blocks = [-(-n // block_size) for n in contexts]
    free = rng.permutation(sum(num_blocks) + 2)  # two blocks stay free
    blocks = np.full((len(free), 1, 2, block_size, kv_heads, head_dim), empty, dtype)  # 1 layer; keys, values
    tables = np.full((len(contexts), max(num_blocks) + 1), -1)
    for s, n in enumerate(contexts):
        tables[s, : num_blocks[s]], free = free[: num_blocks[s]], free[num_blocks[s] :]
        at = np.arange(n)
        blocks[tables[s, at // block_size], 0, 0, at % block_size] = keys[s]
        blocks[tables[s, at // block_size], 0, 1, at % block_size] = values[s]
    return query, keys, values, blocks, tables


def softmax_attention(query: Any, keys: Any, values: Any, queries: Any, scale: Any) -> Any:
    """Return the right output: attention in float64 over each sequence's contiguous keys and values."""
    outputs = []
    for q, k, v in zip(np.split(query, np.cumsum(queries)[:-1]), keys, values, strict=True):
        group = q.shape[1] // k.shape[1]  # query heads that read the same key/value head
        k, v = np.repeat(np.float64(k), group, axis=1), np.repeat(np.float64(v), group, axis=1)
        scores = np.einsum("qhd,khd->hqk", np.float64(q), k) * scale
        position = np.arange(len(k) - len(q), len(k))
        scores[:, np.arange(len(k)) > position[:, None]] = -np.inf  # a query sees no later key
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v))
    return np.concatenate(outputs)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One call of `paged_attention`. Each sequence has `contexts` tokens, and `queries` of them are new."""

    block_size: int
    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 4
    seed: int = 0
    size: float = 1.0
    """The factor of queries and keys: 100 makes scores of ten thousand."""
    empty: float = 0.0
    """The content of slots without a token."""

    @property
    def scale(self) -> float:
        return float(1 / np.sqrt(self.head_dim))

    @property
    def tolerance(self) -> float:
        return 1e-2 if self.size > 1 else 1e-4

    def inputs(self) -> tuple[Any, ...]:
        inputs: tuple[Any, ...] = make_inputs(
            *(self.seed, self.block_size, self.heads, self.kv_heads, self.head_dim),
            *(self.contexts, self.queries, self.size, self.empty, np.float32),
        )
        return inputs

    def arguments(self, bench: Bench) -> tuple[Any, ...]:
        """Return the arguments of `paged_attention`, with a cache in the worker."""
        query, _, _, blocks, tables = self.inputs()
        cache = filled_cache(bench, blocks)
        start = np.concatenate(([0], np.cumsum(self.queries)))
        return query, cache, 0, tables, start, np.array(self.contexts), self.scale

    def check(self, bench: Bench) -> None:
        """Raise Failed if the student's function returns a wrong output or changes its arguments."""
        query, keys, values, blocks, tables = self.inputs()
        right = softmax_attention(query, keys, values, self.queries, self.scale)
        module, name = bench.part
        worker = bench.process.modules[1]
        arguments = self.arguments(bench)
        tell = partial(self._failure, bench, tables)
        with telling(name, tell):
            answer, changed = bench.process.batch(
                [(worker, "attend", (module, name, *arguments)), (worker, "changed", (arguments[1], blocks))]
            )
            if isinstance(answer, Raised):
                raise answer.error
        output, touched = answer
        if message := self._wrong(output, right, query.dtype):
            raise Failed(tell(message))
        if changed or touched:
            what = "the KV cache" if changed else touched[0]
            raise Failed(tell(f"{name} changed {what}; attention must not change its arguments", changed=True))

    def _wrong(self, output: Any, right: Any, dtype: Any) -> str:
        """Return a sentence on what is wrong with the output, or an empty string if it is right."""
        if not isinstance(output, np.ndarray):
            kind = output.kind if isinstance(output, Handle) else type(output).__name__
            return f"it returned an object of type {kind}, not an array"
        if output.shape != right.shape:
            return f"it returned an array of shape {output.shape}; it should be [tokens, heads, head_dim] {right.shape}"
        if output.dtype != dtype:
            return f"it returned an array of {output.dtype}; it should be {dtype}, like the query"
        error = np.abs(output - right).max(axis=-1)  # [tokens, heads]
        wrong = np.argwhere(~(error <= self.tolerance))
        if not len(wrong):
            return ""
        token, head = (int(i) for i in wrong[0])
        ends = np.cumsum(self.queries)
        s = int(np.searchsorted(ends, token, side="right"))
        position = self.contexts[s] - int(ends[s]) + token
        where = f"sequence {s}, position {position} (of {self.contexts[s]}), query head {head}"
        found, should = (np.array2string(row[token, head, :3], precision=3, separator=", ") for row in (output, right))
        more = "begins with " if self.head_dim > 3 else "is "
        return f"{where}: the output {more}{found}; it should be {should}"

    def _failure(self, bench: Bench, tables: Any, message: str, *, changed: bool = False, **more: Any) -> Failure:
        name = bench.part[1]
        sizes = "block_size, heads, kv_heads, head_dim, contexts, queries, size, empty"
        made = f"make_inputs({self.seed}, {sizes}, np.float32)"
        body = [
            *sources_of(make_inputs, softmax_attention),
            f"contexts, queries = {list(self.contexts)}, {list(self.queries)}  # each sequence's tokens and new tokens",
            f"heads, kv_heads, head_dim = {self.heads}, {self.kv_heads}, {self.head_dim}",
            f"block_size = {self.block_size}",
            f'size, empty = {self.size}, float("{self.empty}")  # factor of queries and keys; content of unused slots',
            f"inputs = {made}",
            "query, keys, values, blocks, block_tables = inputs",
            "kv_cache = KVCache(1, len(blocks), block_size, kv_heads, head_dim)",
            "kv_cache.device_blocks[:] = blocks",
            "query_start, scale = np.concatenate(([0], np.cumsum(queries))), float(1 / np.sqrt(head_dim))",
            f"output = {name}(query, kv_cache, 0, block_tables, query_start, np.array(contexts), scale)",
            "expected = softmax_attention(query, keys, values, queries, scale)",
            'assert isinstance(output, np.ndarray), f"not an array: {output!r}"',
            'assert output.shape == expected.shape, f"{output.shape} is not {expected.shape}"',
            'assert output.dtype == query.dtype, f"{output.dtype} is not {query.dtype}"',
            f"right = (abs(output - expected) <= {self.tolerance}).all(axis=-1)  # [tokens, heads]",
            'assert right.all(), f"not right:\\n{output[~right]}\\nexpected:\\n{expected[~right]}"',
        ]
        if changed:
            body += [
                "assert np.array_equal(kv_cache.device_blocks, blocks, equal_nan=True), 'the cache was changed'",
                f"again = {made}",
                "assert np.array_equal(query, again[0]) and np.array_equal(block_tables, again[4]), 'inputs changed'",
            ]
        imports = ["import numpy as np", "from minipaged.reference.kv_cache import KVCache"]
        script = make_script(bench.submission, name, Invariant.CONTENT, message, imports, body)
        events = events_of(self.block_size, self.contexts, tables, message)
        return Failure(message, None, self._draw(tables), script, events, **more)

    def _draw(self, tables: Any) -> tuple[str, ...]:
        rows = [["sequence", "context", "new", "block table"]]
        for s, (n, new) in enumerate(zip(self.contexts, self.queries, strict=True)):
            rows.append([str(s), str(n), str(new), str(tables[s].tolist())[:60]])
        sizes = f"block_size {self.block_size}, {self.heads} query heads, {self.kv_heads} key/value heads"
        return (*aligned(rows), f"{sizes}, head_dim {self.head_dim}")


def events_of(block_size: int, contexts: Sequence[int], tables: Any, message: str) -> tuple[Event, ...]:
    """Return events in which the sequences get their blocks, and then the call fails."""
    num_blocks = int((tables >= 0).sum()) + 2
    events: list[Event] = [EngineStarted(num_blocks, 0, block_size, num_blocks * block_size)]
    for s, n in enumerate(contexts):
        blocks = tuple(int(block) for block in tables[s] if block >= 0)
        events += [RequestArrived(f"r{s}", s, (0,) * n, 1), RequestAdmitted(f"r{s}")]
        events.append(TokensComputed(s, n, blocks, 0))
    return (*events, StepFailed(1, message, ()))


def filled_cache(bench: Bench, blocks: Any) -> Any:
    """Make a KV cache in the worker with these blocks."""
    num_blocks, layers, _, block_size, kv_heads, head_dim = blocks.shape
    cache_module, worker = bench.process.modules
    cache = cache_module.call("KVCache", layers, num_blocks, block_size, kv_heads, head_dim)
    return worker.call("fill", cache, blocks)
