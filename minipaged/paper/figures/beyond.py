"""What came after the paper, on the same machines: chunked prefill, other orders of service, K/V in 8 bits, and
recomputing against swapping where a block is one piece of memory.

There are no curves of the paper to be met here. What others have published is named in each figure's notes, where their
setting is near enough to be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minipaged.engine.policy import carry_seconds
from minipaged.paper import published
from minipaged.paper.figure import Check, Figure, Job, Line, Outcome, Plot, Style
from minipaged.paper.machines import machine
from minipaged.paper.serving import Serving

OURS: Style = "ours"
QUICK_SECONDS, SECONDS = 200.0, 1200.0


class ChunkedPrefill(Figure):
    """How many tokens a step may have: a prompt that does not fit is computed in pieces."""

    name = "beyond/chunked-prefill"
    title = "Chunked prefill: tokens of a step against waiting times (chatbot's prompts, OPT-13B)"
    section = "beyond"
    look = (
        "A large budget lets a prompt of a thousand tokens run at once, and all who decode wait for it; a small one "
        "spreads it over many steps. So the median time to the first token wants large budgets, and the time per "
        "output token small ones. The slowest first tokens are those that waited in the queue, and that is shorter "
        "where steps are."
    )
    change_it = (
        "Serve Alpaca, whose prompts have 19 tokens: is there anything left to decide?",
        "Double the rate (`RATE`): which of the two times breaks first?",
        "Give the machine twice the arithmetic (`KERNELS` in paper/machines.py): what do large budgets still cost?",
    )
    RATE = 0.6
    BUDGETS = (128, 256, 512, 1024, 2048, 4096)

    def _serving(self, budget: int, seconds: float, seed: int) -> Serving:
        return Serving("vLLM", "OPT-13B", "chat", self.RATE, seconds, seed, batch_tokens=budget)

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [self._serving(budget, QUICK_SECONDS if quick else SECONDS, seed) for budget in self.BUDGETS]

    def outcome(self, results: Mapping[Job, Any]) -> Outcome:
        by_budget = {job.batch_tokens: result for job, result in results.items() if isinstance(job, Serving)}

        def line(label: str, time: str, percentile: str) -> Line:
            return Line(label, OURS, [(budget, by_budget[budget][time][percentile]) for budget in self.BUDGETS])

        plots = [
            Plot(
                "time to first token",
                "tokens of a step, at most",
                "s",
                [line("median", "first_token", "p50"), line("99 %", "first_token", "p99")],
                log_x=True,
            ),
            Plot(
                "time per output token",
                "tokens of a step, at most",
                "s",
                [line("median", "per_token", "p50"), line("99 %", "per_token", "p99")],
                log_x=True,
            ),
        ]
        note = (
            "Sarathi-Serve compares with a scheduler that runs prompts alone, before anything else; this engine has "
            "none, so a budget that holds any prompt whole is the nearest to it. Its 2.6 and 3.7 times (Mistral-7B, "
            "Yi-34B, under limits of the 99th percentile) are not compared."
        )
        return Outcome(plots, [], notes=[note])


class OrdersOfService(Figure):
    """First come first served, and the shortest first, through the policy door."""

    name = "beyond/policies"
    title = "Orders of service: mean latency against rate (ShareGPT, OPT-13B)"
    section = "beyond"
    look = (
        "While nothing waits the order makes no difference. Beyond the knee the shortest first brings the mean down, "
        "up to 2.7 times, at the cost of the longest: the 99 % wait more than twice as long, though the wait has a "
        "limit (`PLACES`)."
    )
    change_it = (
        "Let PLACES be 0.1 in `ShortestFirst`: how much of the gain is left, and who waits longest now?",
        "Estimate lengths by a power of two (`estimate`): what does it cost not to know?",
        "Look at normalized latency in place of latency: does the winner change?",
    )
    RATES = (1.5, 1.75, 1.9, 2.0, 2.1)
    POLICIES = ("fcfs", "shortest-first")

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        seconds = QUICK_SECONDS if quick else SECONDS
        return [
            Serving("vLLM", "OPT-13B", "ShareGPT", rate, seconds, seed, policy=policy)
            for policy in self.POLICIES
            for rate in self.RATES
        ]

    def outcome(self, results: Mapping[Job, Any]) -> Outcome:
        lines: dict[str, list[tuple[float, float]]] = {policy: [] for policy in self.POLICIES}
        worst: dict[str, list[tuple[float, float]]] = {policy: [] for policy in self.POLICIES}
        for job, result in results.items():
            assert isinstance(job, Serving)
            lines[job.policy].append((job.rate, result["latency"]["mean"]))
            worst[job.policy].append((job.rate, result["latency"]["p99"]))
        plots = [
            Plot(
                f"latency, {what}", "requests/s", "s", [Line(name, OURS, sorted(points)) for name, points in of.items()]
            )
            for what, of in (("mean", lines), ("99 %", worst))
        ]
        note = (
            "Learning-to-rank schedulers come close to the shortest job first without knowing lengths; of them 2.8 "
            "times lower latency of a chatbot is published. Here lengths are known, as in a trace."
        )
        return Outcome(plots, [], notes=[note])


class EightBits(Figure):
    """Keys and values in 8 bits: the same memory holds twice the blocks, and attention reads half the bytes."""

    name = "beyond/kv-8-bits"
    title = "K and V in 8 bits: normalized latency against rate (ShareGPT, OPT-13B)"
    section = "beyond"
    look = "Twice the blocks do not give twice the rate: with more rows in it a step takes longer."
    change_it = (
        "Only half the bytes, not twice the blocks (`kv_memory_bytes` halved): how much of the gain was reading?",
        "The same for OPT-175B (`model`, and lower `RATES`), which has 60 thousand slots already: does it gain less?",
        "Four bits (a line of `RATES`, which go on to 5): is there still a gain?",
    )
    RATES: Mapping[int, tuple[float, ...]] = {
        16: (1.5, 1.75, 1.9, 2.0, 2.2),
        8: (1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75),
    }

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        seconds = QUICK_SECONDS if quick else SECONDS
        return [
            Serving("vLLM", "OPT-13B", "ShareGPT", rate, seconds, seed, kv_bits=bits)
            for bits, rates in self.RATES.items()
            for rate in rates
        ]

    def outcome(self, results: Mapping[Job, Any]) -> Outcome:
        lines: dict[int, list[published.Point]] = {bits: [] for bits in self.RATES}
        for job, result in results.items():
            assert isinstance(job, Serving)
            lines[job.kv_bits].append((job.rate, result["normalized_latency"]))
        plot = Plot(
            self.title,
            "requests/s",
            "normalized latency (s/token)",
            [Line(f"{bits} bits", OURS, sorted(points)) for bits, points in lines.items()],
            y_max=1.0,
        )
        knees = {bits: published.knee(sorted(points)) for bits, points in lines.items()}
        checks = [Check(f"{bits} bits, requests/s", None, knee, None, unit="/s") for bits, knee in knees.items()]
        gain = knees[8] / knees[16] if knees[8] and knees[16] else None
        return Outcome([plot], [*checks, Check("8 bits ÷ 16 bits", None, gain, None, unit="×")])


class OnePiece(Figure):
    """Swapping against recomputing where a block is one piece of memory, and where it is 80 (as in Fig. 19a)."""

    name = "beyond/swap-or-recompute"
    title = "Swap or recompute: a sequence of 256 tokens, blocks in one piece and in 80 (OPT-13B)"
    section = "beyond"
    look = (
        "In Fig. 19a small blocks are poor at swapping, because each is 80 copies of a few kilobytes. A block that is "
        "one piece of memory takes the link's time and hardly more, whatever its size: today's offloading lays K and V "
        "out so, and the question of the figure has another answer."
    )
    change_it = (
        "A link of 50 GB/s (`LINK_BYTES_PER_SECOND`): at which length is recomputing never the cheaper way?",
        "Sequences of 2,048 tokens: which of the two grows faster?",
        "Two machines' worth of arithmetic: where do the lines cross?",
    )
    TOKENS = 256
    SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return []

    def outcome(self, results: Mapping[Job, Any]) -> Outcome:
        here = machine("OPT-13B")
        lines = []
        for copies, label in ((here.copies_per_block, "swap, 80 pieces a block"), (1, "swap, one piece a block")):
            costs = {size: replace(here.costs(size), copies_per_block=copies) for size in self.SIZES}
            both = [(size, 2e3 * carry_seconds(costs[size], self.TOKENS // size)) for size in self.SIZES]
            lines.append(Line(label, OURS, both))
        recompute = 1e3 * here.step_seconds(1, self.TOKENS, self.TOKENS)  # as in Fig. 19a
        lines.append(Line("recompute", OURS, [(size, recompute) for size in self.SIZES]))
        one, many = dict(lines[1].points), dict(lines[0].points)
        checks = [
            Check("one piece, blocks of 1: swap ÷ recompute", None, one[1] / recompute, None, unit="×"),
            Check("80 pieces, blocks of 1: swap ÷ recompute", None, many[1] / recompute, None, unit="×"),
        ]
        return Outcome([Plot(self.title, "block size", "ms, out and in", lines, log_x=True)], checks)


BEYOND = (ChunkedPrefill(), OrdersOfService(), EightBits(), OnePiece())
