"""What is aimed at, and how a run compares with it: one list for the judging, the table and the page.

What a rate should be depends on the card. So it is a share of a ceiling that was measured in the same run. What that
comes to on an H200 is told beside it.

A goal is about all rows whose names match; it is met when each of them meets it, so the worst of them is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.gpu.harness import Row


@dataclass(frozen=True)
class Goal:
    what: str
    rows: str
    """A regular expression for the whole name of a row."""
    figure: str
    """What of the row is meant: seconds, share (of its ceiling, or of the floor), busy, or "x PEER": how many times as
    fast as that peer it is."""
    aim: float
    of: str = ""
    """The end of the aim's text: what it is a share of, and what that comes to."""

    def about(self, row: Row) -> bool:
        return re.fullmatch(self.rows, row["name"]) is not None

    def value(self, row: Row) -> float | None:
        """The row's figure; None where it was not measured."""
        peer = self.figure.removeprefix("x ")
        found = row.get("ratios", {}).get(peer) if peer != self.figure else row.get(self.figure)
        return found if isinstance(found, float) else None

    def reached(self, value: float) -> bool:
        return value <= self.aim if self.figure == "seconds" else value >= self.aim

    def say(self, value: float, row: Row) -> str:
        """The value with its unit; `row` tells which."""
        if self.figure == "seconds":
            return f"{value * 1e6:.1f} µs"
        if self.figure == "share":
            return f"{value:.1%} of {'the floor' if 'tokens_per_second' in row else row['ceiling']}"
        if self.figure == "busy":
            return f"{value:.1%}"
        return f"{value:.3g} x {self.figure.removeprefix('x ')}"

    def say_aim(self) -> str:
        if self.figure == "seconds":
            return f"≤ {self.aim * 1e6:g} µs"
        if self.figure in ("share", "busy"):
            return f"≥ {self.aim:.0%}{self.of}"
        return f"≥ {self.aim:g} x {self.figure.removeprefix('x ')}"


DECODE = "decode, batch ≥ 32, context ≥ 2k, D 128, group 4, block 16, bf16"
DECODE_ROWS = r"decode (32|128) x (2048|8192) D128 group 4"
D128_AIM = " of matmul (400 TFLOP/s on an H200)"
D64_AIM = " of matmul (330 TFLOP/s on an H200)"
FLASH = "x SDPA flash, contiguous"

GOALS = [
    Goal(DECODE, DECODE_ROWS, "share", 0.84, " of copy (3.6 TB/s on an H200)"),
    Goal(DECODE, DECODE_ROWS, "x FlashInfer", 0.95),
    Goal("decode, batch 1, context 1k, in a CUDA graph", r"decode 1 x 1024 D128 group 4", "seconds", 15e-6),
    Goal("causal prefill, 4k to 8k, D 128", r"prefill \d x (4096|8192) D128 group 4", "share", 0.51, D128_AIM),
    Goal("causal prefill, 4k to 8k, D 128", r"prefill \d x (4096|8192) D128 group 4", FLASH, 1.0),
    Goal("causal prefill, 4k to 8k, D 64", r"prefill \d x (4096|8192) D64 group 4", "share", 0.42, D64_AIM),
    Goal("causal prefill, 4k to 8k, D 64", r"prefill \d x (4096|8192) D64 group 4", FLASH, 1.0),
    Goal("write K/V, alone and with the rotation", r"write|rope_and_write", "share", 0.8, " of copy"),
    Goal("batched copy of ≥ 256 blocks", r"copy of \d+ blocks of .*", "share", 0.8, " of copy"),
    Goal("swap, blocks of 0.5 to 2 MB", r"swap (out|in), blocks of .*", "share", 0.9, " of one large pinned copy"),
    *(
        Goal(f"engine, shapes of {model}", rf"{re.escape(model)}: minipaged", figure, aim, of)
        for model, share in (("Llama-3.2-1B", 0.45), ("SmolLM2-135M", 0.25))
        for figure, aim, of in (
            ("share", share, " of the floor"),
            ("x generate", 4.0, ""),
            ("x generate_batch", 4.0, ""),
        )
    ),
    Goal("GPU busy while 256 sequences decode", r".*: minipaged", "busy", 0.95),
]


def judge(row: Row, ceilings: dict[str, float]) -> None:
    """Add each figure's share of its ceiling, how many times as fast as each peer it is, and which aims are reached."""
    peers = {name: peer for name, peer in row.get("peers", {}).items() if isinstance(peer, dict)}
    for figures in (row, *peers.values()):
        if isinstance(figures.get("rate"), float) and figures.get("ceiling") in ceilings:
            figures["share"] = figures["rate"] / ceilings[figures["ceiling"]]
    ratios = {name: speed(row) / speed(peer) for name, peer in peers.items() if speed(row) and speed(peer)}
    if ratios:
        row["ratios"] = ratios
    for goal in GOALS:
        if goal.about(row):
            row.setdefault("target", {})[goal.figure] = goal.aim
            if (value := goal.value(row)) is not None:
                row.setdefault("met", {})[goal.figure] = goal.reached(value)


def speed(figures: Row) -> float:
    """What grows as a thing gets faster; 0 where it was not measured."""
    found = figures.get("tokens_per_second", figures.get("rate"))
    return found if isinstance(found, float) else 0.0


@dataclass(frozen=True)
class Verdict:
    goal: Goal
    measured: str
    where: str
    """The row that is worst off."""
    verdict: str


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """Each goal's worst row, or why there is none."""
    rows = list(rows)
    found = []
    for goal in GOALS:
        about = [row for row in rows if goal.about(row)]
        values = [(value, row) for row in about if (value := goal.value(row)) is not None]
        if not values:
            found.append(Verdict(goal, "not yet measured", why_not(goal, about), "open"))
            continue
        pick = max if goal.figure == "seconds" else min
        value, row = pick(values, key=lambda pair: pair[0])
        if not goal.reached(value):
            found.append(Verdict(goal, goal.say(value, row), row["name"], "MISSED"))
        elif len(values) < len(about):
            found.append(Verdict(goal, goal.say(value, row), f"not all rows: {why_not(goal, about)}", "open"))
        else:
            found.append(Verdict(goal, goal.say(value, row), row["name"], "met"))
    return found


def why_not(goal: Goal, about: Sequence[Row]) -> str:
    """What the rows of an unmeasured goal say: a peer that is missing, a job that failed or was skipped."""
    for row in about:
        if row["status"] != "ok":
            return first_line(str(row.get("reason") or row.get("error", row["status"])))
        if isinstance(peer := row.get("peers", {}).get(goal.figure.removeprefix("x ")), str):
            return first_line(peer)
    return ""


def first_line(text: str) -> str:
    return text.partition("\n")[0][:160]
