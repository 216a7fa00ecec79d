"""Real requests instead of drawn ones: the times and lengths of an Azure trace, and pairs of ShareGPT's lengths.

The paper draws arrivals from a Poisson process, and only histograms of its lengths are known. Traces that services have
recorded since test both simplifications. Requests that exceed the model's context are left out, and the notes state
their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minipaged.paper import published
from minipaged.paper.figure import Check, FigureResult, Job, Line, Plot
from minipaged.paper.figures.from_files import FromFiles
from minipaged.paper.serving import ServingResult, ServingSetup, serve
from minipaged.paper.workloads import (
    MAX_MODEL_LEN,
    PaperRequest,
    at_random,
    at_rate,
    azure,
    draw_pairs,
    in_any_order,
    poisson,
    sharegpt,
    that_fit,
)

QUICK_SECONDS, SECONDS = 200.0, 3600.0
QUICK_REQUESTS = 500


@dataclass(frozen=True, slots=True)
class OfFile:
    """The result of serving requests from a file."""

    served: ServingResult
    of_file: int
    """The number of requests that were read from the file."""
    too_long: int
    """The number of these that were left out because they are too long."""


def of_file(asked: list[PaperRequest], fit: list[PaperRequest], served: ServingResult) -> OfFile:
    return OfFile(served, len(asked), len(asked) - len(fit))


def left_out(results: Mapping[Job, Any]) -> str:
    """Return a note on the number of requests that were left out."""
    one = next(iter(results.values()))
    return (
        f"{one['too_long']:,} of {one['of_file']:,} requests are left out: prompt and output together have "
        f"{MAX_MODEL_LEN:,} tokens or more, which the model cannot hold."
    )


@dataclass(frozen=True, slots=True)
class ServedTrace:
    """A job that serves a trace by vLLM, with the trace's times scaled to a rate."""

    path: str
    rate: float
    seed: int
    poisson: bool = False
    """Whether arrivals are a Poisson process instead of the trace's times."""
    shuffled: bool = False
    """Whether the requests are shuffled among the times."""
    most: int = 0
    """The number of requests to use from the trace. 0: all."""
    model: str = "OPT-13B"

    def run(self) -> OfFile:
        asked = azure(Path(self.path))[: self.most or None]
        fit = coming = that_fit(asked)
        if self.shuffled:
            coming = in_any_order(coming, self.seed)
        coming = at_rate(coming, self.rate)
        if self.poisson:
            coming = at_random(coming, self.seed)
        serving = ServingSetup("vLLM", self.model, "Azure", self.rate, coming[-1].seconds, self.seed)
        return of_file(asked, fit, serve(serving, coming))


class Azure(FromFiles):
    """Latency by rate, for three versions of a trace: as recorded, shuffled, and shuffled with Poisson arrivals."""

    name = "beyond/azure"
    title = "Real arrivals: Azure's trace of conversations against a Poisson process (OPT-13B, vLLM)"
    files = ("azure_llm_2023_conv.csv",)
    source = (
        "AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset (Patel et al., ISCA 2024; CC-BY 4.0)"
    )
    look = (
        "From second to second the trace is hardly more uneven than a Poisson process. But within its hour the rate "
        "rises by two fifths and falls again. This alone (the trace's times with shuffled lengths) makes the queue "
        "grow earlier. In the trace, requests of the busy minutes are shorter, which compensates for a part of it."
    )
    change_it = (
        "Take every fifth request at its original time, without scaling the times (`at_rate`): what is left of the "
        "bursts?",
        "Keep the order of the lengths and only draw the times (`at_random`): which of the three curves is nearest?",
        'Serve with `policy="shortest-first"`: does the policy matter more with bursts or without?',
    )
    RATES = (0.6, 0.8, 0.9, 1.0, 1.1, 1.2)
    KINDS: Mapping[str, tuple[bool, bool]] = {
        "the trace": (False, False),
        "its times, any order": (False, True),
        "Poisson, any order": (True, True),
    }
    """Name -> (poisson, shuffled)."""
    AT = 1.0
    """The rate at which the tails are compared."""

    def jobs_with(self, paths: Sequence[str], quick: bool, seed: int) -> list[Job]:
        most = QUICK_REQUESTS if quick else 0
        return [ServedTrace(paths[0], rate, seed, *kind, most) for kind in self.KINDS.values() for rate in self.RATES]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        of_kind: dict[tuple[bool, bool], dict[float, Any]] = {kind: {} for kind in self.KINDS.values()}
        for job, result in results.items():
            assert isinstance(job, ServedTrace)
            of_kind[job.poisson, job.shuffled][job.rate] = result["served"]

        def plot(title: str, time: str, percentile: str) -> Plot:
            lines = [
                Line(name, "ours", [(rate, of_kind[kind][rate][time][percentile]) for rate in self.RATES])
                for name, kind in self.KINDS.items()
            ]
            return Plot(title, "requests/s", "s", lines, log_y=time == "first_token")

        plots = [
            plot("time to first token, mean", "first_token", "mean"),
            plot("time to first token, 99 %", "first_token", "p99"),
            plot("time per output token, mean", "per_token", "mean"),
            plot("time per output token, 99 %", "per_token", "p99"),
        ]
        checks = []
        for name, kind in self.KINDS.items():
            line = [(rate, of_kind[kind][rate]["normalized_latency"]) for rate in self.RATES]
            checks.append(Check(f"{name}: knee", None, published.knee(line), None, unit="/s"))
        for name, kind in self.KINDS.items():
            tail = of_kind[kind][self.AT]["first_token"]["p99"]
            checks.append(Check(f"{name}: 99 % of TTFT at {self.AT:g}/s", None, tail, None, unit=" s"))
        slowed = (
            "The trace's times are stretched to each rate: its bursts keep their requests, and last longer. Knees are "
            f"at {published.KNEE} s/token of normalized latency, as in Fig. 12. Any order: the requests are shuffled."
        )
        return FigureResult(plots, checks, notes=[left_out(results), slowed])


@dataclass(frozen=True, slots=True)
class ServedLengths:
    """A job that serves requests with lengths from a file and Poisson arrivals, on one system."""

    path: str
    system: str
    rate: float
    seconds: float
    seed: int
    apart: bool = False
    """Whether outputs are paired with prompts at random."""
    model: str = "OPT-13B"

    def run(self) -> OfFile:
        asked = sharegpt(Path(self.path))
        fit = that_fit(asked)
        coming = poisson(partial(draw_pairs, fit, apart=self.apart), self.rate, self.seconds, self.seed)
        serving = ServingSetup(self.system, self.model, "ShareGPT", self.rate, self.seconds, self.seed)
        return of_file(asked, fit, serve(serving, coming))


class ShareGPTPairs(FromFiles):
    """Fig. 12a with real pairs of lengths. The prompts include the history of their conversations."""

    name = "beyond/sharegpt"
    title = "Fig. 12a with real pairs of ShareGPT's lengths (OPT-13B)"
    files = ("sharegpt_lengths.csv.gz",)
    source = (
        "data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv of github.com/microsoft/sarathi-serve "
        "(Agrawal et al., OSDI 2024; Apache-2.0), compressed by gzip"
    )
    look = (
        "Here a prompt is a whole conversation, four times as long as in Fig. 11, so every knee comes earlier. "
        "Compare the distances between the systems. The order is the paper's. But the longer the prompts, the fewer "
        "of a sequence's tokens are still to come, and the less there is to gain by not reserving them. Whether "
        "prompts and outputs are paired as recorded or at random (as in Fig. 12 here) makes hardly any difference."
    )
    change_it = (
        "Leave out prompts of more than 500 tokens (`that_fit`): do the knees come back to the paper's?",
        "Serve OPT-175B (`model`, and raise `RATES`), which has four times the slots: how far is Orca (Oracle) then?",
        "Cut prompts to their last 1,024 tokens instead of leaving requests out: which system gains?",
    )
    RATES: Mapping[str, tuple[float, ...]] = {
        "Orca (Max)": (0.3, 0.4, 0.45, 0.5, 0.6),
        "Orca (Pow2)": (0.3, 0.4, 0.5, 0.55, 0.6, 0.7),
        "Orca (Oracle)": (0.3, 0.5, 0.6, 0.65, 0.7, 0.8),
        "vLLM": (0.3, 0.6, 0.8, 0.9, 1.0, 1.1),
    }

    def jobs_with(self, paths: Sequence[str], quick: bool, seed: int) -> list[Job]:
        seconds = QUICK_SECONDS if quick else SECONDS
        asked = [(system, rate, False) for system, rates in self.RATES.items() for rate in rates]
        asked += [("vLLM", rate, True) for rate in self.RATES["vLLM"]]
        return [ServedLengths(paths[0], system, rate, seconds, seed, apart) for system, rate, apart in asked]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        ours: dict[str, list[published.Point]] = {}
        for job, result in results.items():
            assert isinstance(job, ServedLengths)
            name = f"{job.system}, paired anew" if job.apart else job.system
            ours.setdefault(name, []).append((job.rate, result["served"]["normalized_latency"]))
        lines = [Line(name, "ours", sorted(points)) for name, points in ours.items()]
        lines += [Line(system, "paper", published.with_exit("12a", system)) for system in self.RATES]
        knees = {name: published.knee(sorted(points)) for name, points in ours.items()}
        paper = {system: published.knee(published.with_exit("12a", system)) for system in self.RATES}
        checks = [Check(f"{name}, requests/s", paper.get(name), knee, None, unit="/s") for name, knee in knees.items()]
        for system in list(self.RATES)[:-1]:
            pairs = [(of["vLLM"], of[system]) for of in (paper, knees)]
            in_paper, in_ours = (a / b if a and b else None for a, b in pairs)
            checks.append(Check(f"vLLM ÷ {system}", in_paper, in_ours, None, unit="×"))
        plot = Plot(self.title, "requests/s", "normalized latency (s/token)", lines, y_max=1.0)
        other = "The paper's lines and numbers are those of Fig. 12a, which has other lengths, so nothing is judged."
        return FigureResult([plot], checks, notes=[left_out(results), other])


REAL_REQUESTS = (Azure(), ShareGPTPairs())
