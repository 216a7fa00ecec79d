"""Techniques that came after the paper, on the same simulated machines: chunked prefill against prefill-first steps,
other orders of service, K/V in 8 bits, and recomputing against swapping if a block is one piece of memory.

The paper has no curves to compare with here. A figure's notes name results that others have published, if their setting
is similar enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minipaged.engine.policy import carry_seconds
from minipaged.paper import published
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, Plot, Style
from minipaged.paper.figures.block_sizes import BLOCK_SIZES, NOT_SIMULATED, RATES, crossover, trace
from minipaged.paper.machines import machine
from minipaged.paper.serving import BATCH_TOKENS, PREFILL_FIRST, ServingSetup

OURS: Style = "ours"
QUICK_SECONDS, SECONDS = 200.0, 1200.0


# --- Chunked prefill ------------------------------------------------------------------------------

OBJECTIVES = {"quick start": (0.5, 0.20), "balanced": (1.0, 0.15), "even pace": (4.0, 0.125)}
"""Assumed objectives: the limits on seconds to the first token, and on mean seconds per token after it. A request must
meet both."""
MISSED = 0.1
"""Assumed: the share of requests that may miss an objective."""
STALL = 0.3
"""Assumed: seconds between two tokens that a reader notices as a stall. 1 % of the times between tokens may be longer.
"""


def share_met(each: Sequence[tuple[float, float]], first: float, after: float) -> float:
    """Return the share of requests within both limits. `each` has their times to first token and times per token."""
    return sum(seconds <= first and pace <= after for seconds, pace in each) / len(each)


class ChunkedPrefill(Figure):
    """Goodput of chunked prefill and of whole prompts: the highest rate at which 9 of 10 requests meet objectives."""

    name = "beyond/chunked-prefill"
    title = "Chunked prefill against prompts first: goodput (ShareGPT, OPT-175B)"
    section = "beyond"
    look = (
        "No chunk size is best for every goal. Small chunks keep decoding fast, but a prompt then takes many steps. "
        "If the first token must come quickly, large chunks win. Prefill-first steps are close to them there, but "
        "far behind where the time per token counts: each such step reads all weights once more, in addition to the "
        "decodes' step. The difference is largest in the slowest 1 % of the times between two tokens, which means do "
        "not show. Smaller chunks have shorter stalls. With prompts first, decoding requests wait for whole prompts."
    )
    change_it = (
        "Serve OPT-13B, whose steps are short (`MODEL`, and `RATES` from 0.5 to 2): what is left to choose?",
        "Allow only 1 % of the requests to miss (`MISSED`): which of the five loses most?",
        "Keep prompts whole, but run one pass per step (`WholePrompts` on a `SimulatedRunner`): how much of the loss "
        "remains?",
    )
    MODEL, DATASET = "OPT-175B", "ShareGPT"
    RATES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5)
    AT = 2.0
    """The rate of the bar charts."""
    KINDS: Mapping[str, tuple[str, int]] = {
        "chunks of 128": ("", 128),
        "chunks of 256": ("", 256),
        "chunks of 512": ("", 512),
        "chunks of 2,048": ("", 2048),
        "prompts first": (PREFILL_FIRST, BATCH_TOKENS),
    }
    """Name -> (policy, limit of tokens per step)."""

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        seconds = QUICK_SECONDS / 4 if quick else SECONDS / 2
        return [
            ServingSetup(
                "vLLM",
                self.MODEL,
                self.DATASET,
                rate,
                seconds,
                seed,
                batch_tokens=tokens,
                policy=policy,
                each=True,
            )
            for policy, tokens in self.KINDS.values()
            for rate in self.RATES
        ]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        of: dict[tuple[str, int], dict[float, Any]] = {kind: {} for kind in self.KINDS.values()}
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
            of[job.policy, job.batch_tokens][job.rate] = result
        plots, checks = [], []
        for objective, (first, after) in OBJECTIVES.items():
            missed = {
                name: [(rate, 1 - share_met(of[kind][rate]["each"], first, after)) for rate in self.RATES]
                for name, kind in self.KINDS.items()
            }
            lines = [Line(name, OURS, [(rate, 100 * (1 - y)) for rate, y in line]) for name, line in missed.items()]
            title = f"{objective}: {first:g} s, and {1e3 * after:g} ms a token"
            plots.append(Plot(title, "requests/s", "% of requests that keep to both", lines))
            checks += [
                Check(f"{objective}, {name}", None, published.knee(line, MISSED), None, unit="/s")
                for name, line in missed.items()
            ]
        slowest = {
            name: [(rate, of[kind][rate]["between"]["percentiles"]["p99"]) for rate in self.RATES]
            for name, kind in self.KINDS.items()
        }
        plots += self._bars([of[kind][self.AT] for kind in self.KINDS.values()])
        lines = [Line(name, OURS, line) for name, line in slowest.items()]
        plots.append(Plot("stalls: the slowest 1 % of times between two tokens", "requests/s", "from so many s", lines))
        for name, kind in self.KINDS.items():
            longest, tail = of[kind][self.AT]["between"]["longest"], dict(slowest[name])[self.AT]
            checks += [
                Check(f"99 % of times between tokens, {self.AT:g}/s, {name}", None, tail, None, unit=" s"),
                Check(f"the longest, {self.AT:g}/s, {name}", None, longest, None, unit=" s"),
            ]
        return FigureResult(plots, checks, notes=self._notes(slowest))

    def _notes(self, slowest: Mapping[str, Sequence[published.Point]]) -> list[str]:
        """Return the figure's notes. `slowest` is the 99th percentile of the times between tokens, by rate."""
        return [
            f"Goodput is the rate up to which no more than {MISSED:.0%} of the requests miss an objective. The "
            "objectives are assumed, and were chosen after first runs. No number: more miss it at the lowest rate.",
            "Prompts first (prefill-prioritizing) is this engine's step in two passes, the prompts' and the "
            f"decodes', with at most {BATCH_TOKENS:,} tokens. Prompts are admitted whole, which by itself costs "
            "nothing. The cost is that weights are read twice. vLLM at that time ran several steps of prompts "
            "before decoding requests got a token. Here they get one after each, so vLLM's stalls were longer.",
            "Times between two tokens are of all successive tokens of all requests. The longest times belong to "
            "preempted requests, if there were any.",
            f"No more than 1 % of these times are longer than {STALL:g} s (assumed, after first runs): "
            f"{up_to(slowest)}. Sarathi-Serve reports gains of 2.6 and 3.7 times in such rates (Mistral-7B, Yi-34B). "
            "Its limits, models and prompts differ, so they are not compared.",
        ]

    def _bars(self, results: Sequence[Mapping[str, Any]]) -> list[Plot]:
        """Return bar charts of three kinds of times at the rate AT, with a group of bars for each of KINDS."""
        groups = [name.removeprefix("chunks of ") for name in self.KINDS]
        between = [{**one["between"]["percentiles"], "longest": one["between"]["longest"]} for one in results]
        most = {"median": "p50", "90 %": "p90"}
        plots = []
        for title, times, bars in (
            ("time to first token", [one["first_token"] for one in results], most),
            ("time per output token", [one["per_token"] for one in results], most),
            ("time between two tokens", between, {"median": "p50", "99 %": "p99", "longest": "longest"}),
        ):
            lines = [Line(label, OURS, list(enumerate(time[key] for time in times))) for label, key in bars.items()]
            slow = title != "time per output token"  # these times differ by orders of magnitude
            plots.append(Plot(f"{title} at {self.AT:g} requests/s", "", "s", lines, groups=groups, log_y=slow))
        return plots


def up_to(slowest: Mapping[str, Sequence[published.Point]]) -> str:
    """Return a text with the rate up to which each line stays within STALL."""

    def rate(line: Sequence[published.Point]) -> str:
        if line[0][1] > STALL:
            return "at no rate here"
        passes = published.knee(line, STALL)
        return f"up to {passes:.2f}/s" if passes else "at every rate here"

    return "; ".join(f"{name} {rate(line)}" for name, line in slowest.items())


# --- Orders of service ----------------------------------------------------------------------------

URGENT = 0.2
"""Assumed: the share of requests with priority, which is one step of it (`PriorityFirst.PLACES` places)."""


class OrdersOfService(Figure):
    """Latency of three of the engine's policies: first come first served, shortest first, and priority."""

    name = "beyond/policies"
    title = "Orders of service: mean latency against rate (ShareGPT, OPT-13B)"
    section = "beyond"
    look = (
        "While nothing waits, the order makes no difference. Beyond the knee, shortest-first lowers the mean latency "
        "by a factor of up to 2.7. The longest requests pay for it: the 99th percentile more than doubles, although "
        "the wait is limited (`PLACES`). Priority leaves the mean unchanged and only decides which requests wait. At "
        "the highest rate, urgent requests take three fifths of the time. The others, which are four times as many, "
        "take a tenth more."
    )
    change_it = (
        "Set PLACES to 0.1 in `ShortestFirst`: how much of the gain is left, and which requests wait longest now?",
        "Estimate lengths by a power of two (`estimate`): what does it cost not to know them exactly?",
        "Give priority to four of five requests (`URGENT`): what do they still gain, and which requests pay for it?",
    )
    RATES = (1.5, 1.75, 1.9, 2.0, 2.1)
    POLICIES = ("fcfs", "shortest-first", "priority")
    CLASSES: Mapping[str, str] = {"urgent": "latency_urgent", "others": "latency_others"}

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        seconds = QUICK_SECONDS if quick else SECONDS
        return [
            ServingSetup("vLLM", "OPT-13B", "ShareGPT", rate, seconds, seed, policy=policy, urgent=URGENT)
            for policy in self.POLICIES
            for rate in self.RATES
        ]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        of: dict[str, dict[float, Any]] = {policy: {} for policy in self.POLICIES}
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
            of[job.policy][job.rate] = result

        def line(label: str, policy: str, time: str, percentile: str) -> Line:
            return Line(label, OURS, [(rate, of[policy][rate][time][percentile]) for rate in self.RATES])

        plots = [
            Plot(
                f"latency, {what}",
                "requests/s",
                "s",
                [line(policy, policy, "latency", percentile) for policy in self.POLICIES],
            )
            for what, percentile in (("mean", "mean"), ("99 %", "p99"))
        ]
        plots += [
            Plot(
                f"latency of two classes, {what}",
                "requests/s",
                "s",
                [
                    line(f"{name}, {policy}", policy, time, percentile)
                    for policy in ("fcfs", "priority")
                    for name, time in self.CLASSES.items()
                ],
            )
            for what, percentile in (("mean", "mean"), ("99 %", "p99"))
        ]
        last = self.RATES[-1]
        first_come = of["fcfs"][last]
        checks = [
            Check(
                f"{policy}: mean latency ÷ first come's, {last:g}/s",
                None,
                of[policy][last]["latency"]["mean"] / first_come["latency"]["mean"],
                None,
                unit="×",
            )
            for policy in self.POLICIES[1:]
        ]
        checks += [
            Check(
                f"priority, {name}: the same",
                None,
                of["priority"][last][time]["mean"] / first_come[time]["mean"],
                None,
                unit="×",
            )
            for name, time in self.CLASSES.items()
        ]
        return FigureResult(
            plots,
            checks,
            notes=[
                "Learning-to-rank schedulers come close to shortest-first without knowing lengths. A published one "
                "lowers the latency of a chatbot by a factor of 2.8. Here lengths are known, as in a trace.",
                f"Assumed: {URGENT:.0%} of the requests, drawn at random, have priority. With the other policies the "
                "same two classes are measured, and differ only by chance.",
            ],
        )


# --- K and V in 8 bits ----------------------------------------------------------------------------


class EightBits(Figure):
    """Keys and values in 8 bits: the memory holds twice as many blocks, and attention reads half the bytes."""

    name = "beyond/kv-8-bits"
    title = "K and V in 8 bits: normalized latency against rate (ShareGPT, OPT-13B)"
    section = "beyond"
    look = "Twice the blocks do not double the rate, because a step with more rows takes longer."
    change_it = (
        "Halve the bytes but keep the number of blocks (`kv_memory_bytes` halved): how much of the gain comes from "
        "reading less?",
        "Serve OPT-175B (`model`, and lower `RATES`), which already has 60 thousand slots: does it gain less?",
        "Use 4 bits (another line of `RATES`, with rates up to 5): is there still a gain?",
    )
    RATES: Mapping[int, tuple[float, ...]] = {
        16: (1.5, 1.75, 1.9, 2.0, 2.2),
        8: (1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75),
    }

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        seconds = QUICK_SECONDS if quick else SECONDS
        return [
            ServingSetup("vLLM", "OPT-13B", "ShareGPT", rate, seconds, seed, kv_bits=bits)
            for bits, rates in self.RATES.items()
            for rate in rates
        ]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        lines: dict[int, list[published.Point]] = {bits: [] for bits in self.RATES}
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
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
        return FigureResult([plot], [*checks, Check("8 bits ÷ 16 bits", None, gain, None, unit="×")])


# --- Swap or recompute ----------------------------------------------------------------------------

FASTER = 2.0
"""Assumed: a link of 25 GB/s, twice the speed of the paper's. (A PCIe 4.0 link of 16 lanes has 32 by its data sheet.)
"""


class OnePiece(Figure):
    """Swapping against recomputing, with blocks of one piece of memory and with blocks of 80 pieces (as in Fig. 19)."""

    name = "beyond/swap-or-recompute"
    title = "Swap or recompute, blocks in one piece and in 80 (OPT-13B)"
    section = "beyond"
    look = (
        "In Fig. 19, swapping small blocks is slow, because each block takes 80 copies of a few kilobytes. A block "
        "that is one piece of memory takes little more than the link's time, whatever its size. In the runs this "
        "alone makes the steep end of the curve flat. On the paper's link swapping never wins, with one piece or "
        "with 80. On a link twice as fast, blocks in 80 pieces win from 16 to 128 tokens, and blocks in one piece "
        "from 1 to 128."
    )
    change_it = (
        "Use a link of 50 GB/s (`FASTER`): up to which block size is recomputing never cheaper?",
        "Raise the rate by a tenth (`RATES` in figures/block_sizes.py): do more preemptions move the crossover?",
        "Double the arithmetic (`KERNELS` in paper/machines.py): where do the lines cross?",
    )
    TOKENS = 256
    """Tokens of the sequence in the first plot, as in Fig. 19a."""
    LINKS: Mapping[str, float] = {"the paper's link": 1.0, f"a link {FASTER:g} times as fast": FASTER}
    PIECES: Mapping[str, bool] = {"80 pieces": False, "one piece": True}

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        recompute = [trace("ShareGPT", size, quick=quick, seed=seed, preemption="recompute") for size in BLOCK_SIZES]
        swap = [replace(one, preemption="swap") for one in recompute]
        return [
            *recompute,
            *(
                replace(one, link=link, one_piece=one_piece)
                for link in self.LINKS.values()
                for one_piece in self.PIECES.values()
                for one in swap
            ),
        ]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        of: dict[tuple[str | None, float, bool], list[float]] = {}
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
            of.setdefault((job.preemption, job.link, job.one_piece), []).append(result["normalized_latency"])
        recompute = of["recompute", 1.0, False]
        plots, checks = [self._one_sequence()], []
        for name, link in self.LINKS.items():
            ours = {f"swap, {pieces}": of["swap", link, one_piece] for pieces, one_piece in self.PIECES.items()}
            lines = [
                Line(label, OURS, list(zip(BLOCK_SIZES, latencies, strict=True)))
                for label, latencies in (("recompute", recompute), *ours.items())
            ]
            title = f"a whole trace, {name}"
            plots.append(
                Plot(title, "block size (tokens)", "normalized latency (s/token)", lines, log_x=True, log_y=True)
            )
            for label, latencies in ours.items():
                checks += [
                    Check(f"{label}, {name}: ÷ recompute, {size}", None, latencies[i] / recompute[i], None, unit="×")
                    for i, size in enumerate(BLOCK_SIZES)
                    if size in (1, 16, 256)
                ]
                crosses = crossover(latencies, recompute)
                checks.append(Check(f"{label}, {name}: log2 of the crossover", None, crosses, None))
        return FigureResult(
            plots,
            checks,
            notes=[
                f"The trace is that of Fig. 19b, {RATES['ShareGPT']:g} requests/s. {NOT_SIMULATED}",
                "A line that is below recomputing from the first block size on, or never, has no crossover.",
            ],
        )

    def _one_sequence(self) -> Plot:
        """Return a plot of the costs of swapping and recomputing one sequence, computed from the machine."""
        here = machine("OPT-13B")
        lines = []
        for label, one_piece in self.PIECES.items():
            copies = 1 if one_piece else here.copies_per_block
            costs = {size: replace(here.costs(size), copies_per_block=copies) for size in BLOCK_SIZES}
            both = [(size, 2e3 * carry_seconds(costs[size], self.TOKENS // size)) for size in BLOCK_SIZES]
            lines.append(Line(f"swap, {label}", OURS, both))
        recompute = 1e3 * here.step_seconds(1, self.TOKENS, self.TOKENS)  # as in Fig. 19a
        lines.append(Line("recompute", OURS, [(size, recompute) for size in BLOCK_SIZES]))
        title = f"a sequence of {self.TOKENS} tokens, by itself"
        return Plot(title, "block size (tokens)", "ms, out and in", lines, log_x=True)


BEYOND = (ChunkedPrefill(), OrdersOfService(), EightBits(), OnePiece())
