"""Show attention in a web page: a query walks its block table, step by step.

    watch_attention(attend, KVCache, q, K, V, table=[7, 1, 3], num_blocks=8, block_size=4)

This module computes no attention. It runs the reference tier's `attend` and records its variables: the scores of each
block, m, l and o after the block, and the factor exp(m_old - m_new). `attend` runs once for every arrangement of the
blocks in the pool, so that a reader can move them. The cache is NaN in every slot without a key. `attend` also runs on
a cache with the whole context in one block: its loop then has one turn, which is the softmax over all scores at once.
Everything runs once more with a query 100 times as long, for whose scores exp overflows without m.

`attention.js` is the web component that shows the result.
"""

from __future__ import annotations

import html
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from types import FrameType
from typing import Any

from minipaged.errors import InvalidRequest
from minipaged.stepper.page import element, page_around

SCRIPT = Path(__file__).with_name("attention.js")
KIND = "application/vnd.minipaged.attention+json"
"""The MIME type of a walk in the output of a notebook cell."""
STEPS_END = ("o", "scores", "fade")
"""Variables of `attend`. A new value of one of them ends a step of the page."""
STEPS = ("starts", "reads", "rescales", "adds")
"""The kinds of the first steps of every walk. The last step of a walk divides."""
LENGTHS = (1, 100)
"""The factors by which the query is multiplied."""
MOST_TABLES = 1_000
"""The most arrangements of the blocks. The page contains a number, and sometimes a run, for each."""

Run = dict[str, Any]
"""One call of `attend`: its turns, with the variables after each; the answer; and for each step a sentence, in which
{block} is a placeholder for the turn's block, and a reason for m."""


@dataclass(frozen=True)
class Walk:
    """The recorded runs of `attend` for some queries of one sequence, for all arrangements of its blocks."""

    title: str
    block_size: int
    num_blocks: int
    taken: list[int]
    """Blocks that belong to another sequence."""
    num_keys: int
    tables: list[list[int]]
    """All arrangements of the sequence's blocks, beginning with the one that was passed."""
    queries: list[dict[str, Any]]
    """A dict for each query: its position, and for each of LENGTHS the query, the run over the whole context in one
    block, the distinct runs over the tables, and the index of each table's run."""
    code: dict[str, list[str]]
    """The lines of `attend` that run in a step of each kind."""

    def data(self) -> dict[str, Any]:
        """The data for `attention.js`, as a JSON object."""
        return dict(vars(self))

    def page(self) -> str:
        """A self-contained HTML page."""
        how = "Step with the buttons, or with the arrow keys once the picture has the focus."
        return page_around(
            self.title or "A query walks its block table", how, as_element(self.data(), with_script=True)
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The output in a notebook. The docs use only the data, because they include the script themselves."""
        data = self.data()
        return {"text/html": as_element(data, with_script=True), "text/plain": in_words(data), KIND: data}


def as_element(data: dict[str, Any], *, id: str = "", with_script: bool = False) -> str:
    """The walk as an HTML element. It shows the numbers as text if scripts are off."""
    instead = f"<pre>{html.escape(in_words(data))}</pre>"
    return element(data, tag="paged-attention", script=SCRIPT, instead=instead, id=id, with_script=with_script)


def in_words(data: dict[str, Any]) -> str:
    """The walk of the last query as a text, two lines per turn."""
    query = data["queries"][-1]
    run = query["lengths"][0]["runs"][0]
    lines = [f"The query at position {query['position']} walks its block table {data['tables'][0]}:"]
    for turn in run["turns"]:
        scores = ", ".join(f"{score:.2f}" for score in turn["scores"])
        block = data["tables"][0][turn["j"]]
        lines.append(f"  {turn['j']} → block {block}: scores {scores}")
        lines.append(f"      m = {turn['m']:.3f}, exp(m_old - m_new) = {turn['fade']:.3f}, l = {turn['l']:.3f}")
    lines.append(f"o / l = {', '.join(f'{x:.4f}' for x in run['answer'])}")
    lines.append(f"The same in each of {len(data['tables'])} places where its blocks could lie.")
    return "\n".join(lines)


def watch_attention(
    attend: Callable[..., Any],
    kv_cache: Callable[..., Any],
    query: Any,
    keys: Any,
    values: Any,
    table: Sequence[int],
    *,
    num_blocks: int,
    block_size: int,
    taken: Sequence[int] = (),
    title: str = "",
) -> Walk:
    """Run the reference's `attend` over its `KVCache`, for one head, and record its variables.

    query: [queries, head_dim] or [head_dim], at the last positions of the context. keys, values: [context, head_dim].
    table: the physical block of each logical block, in a pool of `num_blocks`; `taken` belong to another sequence. All
    arrangements of the sequence's blocks in the rest of the pool are recorded. Raises InvalidRequest if there are more
    than MOST_TABLES, or if the table cannot hold the keys.
    """
    import numpy as np

    query = np.atleast_2d(query)  # [queries, head_dim]
    free = [block for block in range(num_blocks) if block not in taken]
    if len(set(table)) < len(table) or not set(table) <= set(free) or len(table) != -(-len(keys) // block_size):
        raise InvalidRequest(
            f"a table of blocks {list(table)} cannot hold {len(keys)} keys: it takes {-(-len(keys) // block_size)} "
            f"different ones of the free blocks, {free}"
        )
    if (ways := math.perm(len(free), len(table))) > MOST_TABLES:
        raise InvalidRequest(
            f"{len(table)} blocks can be arranged in {len(free)} places in {ways:,} ways, and attention would run for "
            f"each; use a smaller pool or a shorter table, with at most {MOST_TABLES:,} ways"
        )
    tables = [list(table), *(list(way) for way in permutations(free, len(table)) if way != tuple(table))]
    positions = range(len(keys) - len(query), len(keys))
    watch = _Watch(attend)

    def run(one: Any, cache: Any, blocks: list[int], position: int) -> Run:
        return watch.run(one[None], cache, 0, np.array(blocks), position, len(one) ** -0.5)  # one: [head_dim]

    queries: list[dict[str, Any]] = [{"position": position, "lengths": []} for position in positions]
    for known, one in zip(queries, query, strict=True):
        position = known["position"]
        whole = _filled(kv_cache, [0], 1, position + 1, keys, values)
        for length in LENGTHS:
            ran = run(length * one, whole, [0], position)
            known["lengths"].append({"query": _numbers(length * one), "whole": ran, "runs": [], "of": []})
    for blocks in tables:
        cache = _filled(kv_cache, blocks, num_blocks, block_size, keys, values)
        for known, one in zip(queries, query, strict=True):
            for length, kept in zip(LENGTHS, known["lengths"], strict=True):
                ran = run(length * one, cache, blocks, known["position"])
                if ran not in kept["runs"]:
                    kept["runs"].append(ran)
                kept["of"].append(kept["runs"].index(ran))
    for known in queries:
        for ran in (ran for kept in known["lengths"] for ran in kept["runs"]):
            ran["sentences"] = _sentences(ran["turns"], known["position"], block_size)
            ran["reasons"] = _reasons(ran["turns"])
    return Walk(title, block_size, num_blocks, list(taken), len(keys), tables, queries, watch.code())


def _filled(kv_cache: Callable[..., Any], blocks: list[int], num_blocks: int, size: int, keys: Any, values: Any) -> Any:
    """A one-layer cache with as many of the keys and values as the blocks hold, and NaN in every other slot."""
    cache = kv_cache(num_layers=1, num_blocks=num_blocks, block_size=size, num_kv_heads=1, head_dim=keys.shape[1])
    cache.poison(range(num_blocks))
    slots = [block * size + offset for block in blocks for offset in range(size)][: len(keys)]
    cache.write(0, slots, keys[: len(slots), None], values[: len(slots), None])  # [slots, 1 head, head_dim] each
    return cache


class _Watch:
    """Runs a function and records its variables. Python calls `on_line` before each of its lines, and at its end."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        self._attend = attend

    def run(self, *arguments: Any) -> Run:
        self._turns: list[dict[str, Any]] = []
        self._lines: list[list[int]] = [[]]  # the lines of each step
        self._values: list[Any] = [None] * len(STEPS_END)
        before = sys.gettrace()
        sys.settrace(self.on_call)
        try:
            answer = self._attend(*arguments)  # [1 head, head_dim]
        finally:
            sys.settrace(before)
        return {"turns": self._turns, "answer": _numbers(answer[0])}

    def on_call(self, frame: FrameType, kind: str, argument: object) -> Callable[..., Any] | None:
        return self.on_line if frame.f_code is self._attend.__code__ else None

    def on_line(self, frame: FrameType, kind: str, argument: object) -> Callable[..., Any]:
        now = frame.f_locals
        values = [now.get(name) for name in STEPS_END]
        changed = [name for name, was, value in zip(STEPS_END, self._values, values, strict=True) if was is not value]
        if changed:
            self._values = values
            self._lines.append([])
        if changed == ["o"] and "fade" in now:  # a turn is over
            turn: dict[str, Any] = {name: now[name] for name in ("j", "n")}
            turn |= {name: _numbers(now[name])[0] for name in ("old", "m", "fade", "l")}  # the only head
            self._turns.append(turn | {name: _numbers(now[name][0]) for name in ("scores", "p", "o")})
        if kind == "line":
            self._lines[-1].append(frame.f_lineno)
        return self.on_line

    def code(self) -> dict[str, list[str]]:
        """The source lines of the latest run's first steps and last step, by kind of step."""
        source, first = inspect.getsourcelines(self._attend)
        steps = [*zip(STEPS, self._lines, strict=False), ("divides", self._lines[-1])]
        return {step: [source[line - first].split("  # noqa")[0].rstrip() for line in lines] for step, lines in steps}


# --- Sentences ------------------------------------------------------------------------------------


def _sentences(turns: list[dict[str, Any]], position: int, block_size: int) -> list[str]:
    """The sentence of each step; {block} is a placeholder for the physical block of its turn."""
    start = (
        f"The query at position {position} may see keys 0 to {position}. Nothing is summed yet: m is -∞, l and o are 0."
    )
    end = "After the last block o / l is the answer: the full softmax's, though one block at a time was looked at."
    return [start, *(sentence for turn in turns for sentence in _of_turn(turn, block_size)), end]


def _of_turn(turn: dict[str, Any], block_size: int) -> tuple[str, str, str]:
    j, n, m, fade = turn["j"], turn["n"], _short(turn["m"]), _short(turn["fade"])
    slots = f"all {n} slots count" if n == block_size else f"only its first {n} of {block_size} slots count"
    if turn["old"] is None:
        rescales = f"m becomes {m}. Nothing was summed before: exp(m_old - m_new) is exp(-∞), which is 0."
    elif turn["fade"] == 1:
        rescales = f"No score here is above m, so it stays {m}, and what was summed keeps its worth: the factor is 1."
    else:
        rises = f"A score is above m, which rises from {_short(turn['old'])} to {m}."
        rescales = f"{rises} What was summed fades: it is worth exp(m_old - m_new) = {fade} as much."
    sums = "The block's own terms are added: exp(score - m) to l, times its value to o."
    return (
        f"Logical block {j} is block {{block}} of the pool. It is read; {slots}. Each key has a score, scale × q·k.",
        rescales,
        f"{sums} Now o / l is the attention over keys 0 to {j * block_size + n - 1}.",
    )


def _reasons(turns: list[dict[str, Any]]) -> list[str]:
    """A sentence for each step that says why the maximum m is needed: the value of exp without it, in float32."""
    import numpy as np

    said = ["Without m the terms would be exp(score). How large may a score become?"]
    for turn in turns:
        without = f"Without m the largest term so far would be exp({_short(turn['m'])})"
        with np.errstate(over="ignore"):
            largest = float(np.exp(np.float32(turn["m"])))
        if math.isinf(largest):
            reason = f"{without}: infinite in float32, and ∞ / ∞ is not a number. With m it is exp(0) = 1."
        else:
            reason = f"{without} = {_short(largest)}: float32 can hold it."
        said += [said[-1], reason, reason]  # reading a block does not change m
    return [*said, said[-1]]


def _short(x: float) -> str:
    """A number with three decimals, or with an exponent if it is very small or large."""
    return f"{x:.1e}" if x and not 5e-4 <= abs(x) < 1e5 else f"{x:.3f}"


def _numbers(values: Any) -> list[float | None]:
    """The values for JSON, each with the fewest digits that identify it in its type; minus infinity becomes None."""
    return [None if value == -float("inf") else float(str(value)) for value in values]
