"""Fig. 13: the number of requests in each system's batch when more arrive than it can serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minipaged.paper import published
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, Plot
from minipaged.paper.machines import SETTINGS, machine
from minipaged.paper.serving import ServingSetup

MODEL = "OPT-13B"
SYSTEMS = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM")
ORACLE = "Orca (Oracle)"
RATES = {"ShareGPT": 2.0, "Alpaca": 30.0}
"""Requests per second, as in the paper."""
TOLERANCES = {"ShareGPT": 0.05, "Alpaca": 0.20}
SECONDS = {"ShareGPT": SETTINGS[MODEL].seconds, "Alpaca": 300.0}
"""Durations of the arrivals: an hour of ShareGPT, as in the paper. An overloaded system reaches its mean within the
time of a few requests. vLLM is not overloaded all the time. Its mean rises with the trace for half an hour, and is
lower in quick runs. An hour of Alpaca would be 108,000 requests. Each takes seconds, so a few minutes suffice."""
QUICK_SECONDS = {"ShareGPT": 240.0, "Alpaca": 60.0}


def serving(system: str, dataset: str, *, quick: bool, seed: int) -> ServingSetup:
    """Return the job for one bar. Fig. 2 uses it too."""
    seconds = (QUICK_SECONDS if quick else SECONDS)[dataset]
    return ServingSetup(system, MODEL, dataset, RATES[dataset], seconds, seed)


class Fig13(Figure):
    """The mean number of requests in a batch, for each system."""

    name = "13"
    title = "Fig. 13: requests in a batch, OPT-13B"
    section = "6.2"
    look = (
        "All systems have the same memory. In Orca (Max) it has room for 7 sequences of the longest length, however "
        "short the requests are: 7 with either dataset. Paging fits 4 to 5 times as many requests of ShareGPT, and "
        "18 times as many of Alpaca."
    )
    change_it = (
        "Give the machine 24 GiB for K and V (`SETTINGS` in paper/machines.py): do all bars double?",
        "Double the rate (`RATES`): which bars grow, and which were full already?",
        "Give vLLM blocks of 256 tokens (`ServingSetup(block_size=256)`): on which dataset does it hurt?",
    )

    why: Mapping[str, str] = {
        "ShareGPT, vLLM": "here the memory is full while requests wait, as with the other systems. The paper's "
        "batch was smaller, although requests waited there too. What else limited it is not known.",
    }

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [serving(system, dataset, quick=quick, seed=seed) for dataset in RATES for system in SYSTEMS]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        of: dict[tuple[str, str], Any] = {}
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
            of[job.dataset, job.system] = result
        plots, checks = [], []
        for dataset, rate in RATES.items():
            paper = published.other("13 batched requests OPT-13B")[f"{dataset} {rate:g} req/s"]
            ours = {system: of[dataset, system]["mean_running_arriving"] for system in SYSTEMS}
            bars = [
                Line("simulated", "ours", [(i, ours[system]) for i, system in enumerate(SYSTEMS)]),
                Line("printed", "paper", [(i, paper[system]) for i, system in enumerate(SYSTEMS)]),
            ]
            plots.append(Plot(f"{dataset}, {rate:g} req/s", "", "requests in a batch", bars, groups=SYSTEMS))
            checks += [
                Check(f"{dataset}, {system}", paper[system], ours[system], TOLERANCES[dataset]) for system in SYSTEMS
            ]
        slots = machine(MODEL).num_blocks(1)
        share, bars_of = published.other("2 share of KV memory (%)"), published.other("13 batched requests OPT-13B")
        batched = bars_of["ShareGPT 2 req/s"]["vLLM"]
        each = share[ORACLE]["token states"] / 100 * slots / bars_of["ShareGPT 2 req/s"][ORACLE]
        return FigureResult(
            plots,
            checks,
            notes=[
                "Means are over the steps up to the last arrival. After it the batch empties. Those steps would "
                "weigh more the shorter the trace is.",
                "vLLM on ShareGPT is near its knee: the longer the trace, the more of it is served from a queue. "
                f"By the paper's bar of {ORACLE} and its share of tokens in Fig. 2, a request holds {each:.0f} tokens. "
                f"Times {batched:g} requests, this is {each * batched / slots:.0%} of the memory. So the memory of "
                "the paper's vLLM was not always full, although its queue grew.",
            ],
        )


FIG_13 = Fig13()
