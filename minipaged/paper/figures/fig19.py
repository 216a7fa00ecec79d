"""Fig. 19: swapping and recomputing preempted requests, by block size.

(a) The cost of each for one sequence of 256 tokens. (b) The latency of a whole trace with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minipaged.engine.policy import carry_seconds
from minipaged.paper import published
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, PaperClaim, Plot
from minipaged.paper.figures.block_sizes import BLOCK_SIZES, MODEL, NOT_SIMULATED, RATES, crossover, trace
from minipaged.paper.machines import machine
from minipaged.paper.serving import ServingSetup
from minipaged.scheduling import Way

TOKENS = 256
"""Tokens that are swapped or recomputed. The paper does not state the number; its bandwidths imply 256."""

# --- a --------------------------------------------------------------------------------------------

SWAP_TOLERANCE = 0.05
"""Tolerance of the time to swap out and in, as a fraction. Two numbers of the machine, the link's speed and the time to
start a copy, are fitted to these nine points. So this checks a fit and is no prediction."""
RECOMPUTE_TOLERANCE = 0.10
"""Tolerance of the time of a prefill by the cost model, as a fraction. None of these points was used for calibration.
"""
CROSSOVER_TOLERANCE = 1.0
"""Tolerance of the crossover, in doublings of the block size."""


@dataclass(frozen=True, slots=True)
class WaysBack:
    """A job that computes the costs of swapping and recomputing one sequence."""

    model: str
    block_size: int
    tokens: int

    def run(self) -> ComebackCosts:
        """Compute them by the machine's cost model."""
        made = machine(self.model)
        blocks = -(-self.tokens // self.block_size)
        return ComebackCosts(
            carry_seconds(made.costs(self.block_size), blocks), made.step_seconds(1, self.tokens, self.tokens)
        )


@dataclass(frozen=True, slots=True)
class ComebackCosts:
    """Costs of swapping and recomputing, in seconds."""

    one_way: float
    """Time to swap out, or to swap in."""
    recompute: float
    """Time of a step that computes the tokens as a prompt."""


class Fig19a(Figure):
    """Times to recompute, to swap in and to swap out."""

    name = "19a"
    title = f"Fig. 19a: what a way back costs, {TOKENS} tokens"
    section = "7.3"
    look = (
        "Swapping pays for each copy. Recomputing does not depend on blocks. With two pools per layer, a block of "
        "one token takes 80 copies of 10 KB, and most of the time is spent starting them."
    )
    change_it = (
        "Make each block one piece (`copies_per_block=1` in paper/machines.py): where is the crossover now?",
        "Move 64 tokens, or 1,024 (`TOKENS`). A step reads the weights once, however few tokens it computes.",
        "Use a link of 50 GB/s (`LINK_BYTES_PER_SECOND`): which block sizes gain nothing from it?",
    )

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [WaysBack(MODEL, size, TOKENS) for size in BLOCK_SIZES]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        printed = published.other("19a time (ms) by block size")
        found = [results[WaysBack(MODEL, size, TOKENS)] for size in BLOCK_SIZES]
        one_way = [1e3 * one["one_way"] for one in found]
        ours = {
            "Recompute": [1e3 * one["recompute"] for one in found],
            "Swap in": one_way,
            "Swap out": one_way,
            "Swap in + out": [2 * ms for ms in one_way],
        }
        lines = []
        for name, style, of in (
            ("Recompute", "ours", ours),
            ("Swap in + out", "ours", ours),
            ("Swap in", "ours", ours),
            ("Recompute", "paper", printed),
            ("Swap in + out", "paper", printed),
            ("Swap in", "paper", printed),
            ("Swap out", "paper", printed),
        ):
            label = "Swap in, and out" if name == "Swap in" and style == "ours" else name
            lines.append(Line(label, style, list(zip(BLOCK_SIZES, of[name], strict=True))))  # type: ignore[arg-type]
        checks = [
            Check(
                f"{name}, blocks of {size}",
                printed[name][i],
                ours[name][i],
                {"Recompute": RECOMPUTE_TOLERANCE, "Swap in + out": SWAP_TOLERANCE}.get(name),
                unit=" ms",
                kind="predicted" if name == "Recompute" else "calibrated",
            )
            for name in ours
            for i, size in enumerate(BLOCK_SIZES)
            if size in (1, 4, 16, 64, 256)
        ]
        checks.append(
            Check(
                "log2 of the block size from which on swapping costs less",
                crossover(printed["Swap in + out"], printed["Recompute"]),
                crossover(ours["Swap in + out"], ours["Recompute"]),
                CROSSOVER_TOLERANCE,
                relative=False,
            )
        )
        return FigureResult(
            [Plot(self.title, "block size (tokens)", "ms", lines, log_x=True, y_max=150)],
            checks,
            [self._sentence(printed, ours)],
            [
                f"The paper does not say how many tokens it moved. With {TOKENS} tokens its times imply 12 to 13 GB/s, "
                "a plausible speed of a link.",
                "Our machine has one speed for both directions, the mean of the paper's two, so a single direction "
                "is not judged. The judged times of swapping calibrated the machine. Those of recomputing did not.",
            ],
        )

    def _sentence(self, printed: Mapping[str, list[float]], ours: Mapping[str, list[float]]) -> PaperClaim:
        def shares(of: Mapping[str, list[float]]) -> str:
            parts = [a / b for a, b in zip(of["Recompute"], of["Swap in + out"], strict=True)]
            return f"{min(parts):.0%} to {max(parts):.0%} of it"

        return PaperClaim(
            "recomputation overhead is never higher than 20% of swapping's latency",
            self.section,
            f"{shares(printed)}; true only if it means slower by 20 %",
            shares(ours),
            max(a / b for a, b in zip(printed["Recompute"], printed["Swap in + out"], strict=True)) <= 0.2,
        )


# --- b --------------------------------------------------------------------------------------------

DATASET = "ShareGPT"
WAYS: dict[str, Way] = {"Recompute": "recompute", "Swap": "swap"}
LATENCY_TOLERANCE = 0.25
"""Tolerance of the ratio of swapping's to recomputing's latency at each block size, as a fraction."""


class Fig19b(Figure):
    """Normalized latency by block size, with swapping and with recomputing."""

    name = "19b"
    title = "Fig. 19b: latency with swapping or recomputing, OPT-13B"
    section = "7.3"
    look = (
        "With medium blocks, swapping and recomputing are close: swapping is 12 to 15 % slower. Every third request "
        "is preempted, and a preemption costs about one step. With small blocks, swapping is much slower because of "
        "its thousands of copies. With large blocks fewer requests fit, and more are preempted."
    )
    change_it = (
        "Raise the rate by a tenth (`RATES`): with more preemptions, at which block sizes do the curves separate?",
        "Make each block one piece of memory (`copies_per_block=1`): how slow is swapping with blocks of 1 then?",
        "Swap long requests and recompute short ones (`way_back` in `paper/vllm.py`): is that better than either "
        "alone?",
    )

    why: Mapping[str, str] = {
        "swapping": "with small blocks only swapping becomes slow here, because of its copies. On the paper's GPU "
        "reading K and V becomes slow too, which affects both, so they stay close. With large blocks swapping wins "
        "in the paper and loses here: recomputing costs less here, because it happens in steps that run anyway.",
    }

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [
            trace(DATASET, size, quick=quick, seed=seed, preemption=way)
            for way in WAYS.values()
            for size in BLOCK_SIZES
        ]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        printed = published.other("19b normalized latency (s/token) by block size, OPT-13B ShareGPT")
        of: dict[tuple[Way | None, int], Any] = {}
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
            of[job.preemption, job.block_size] = result
        ours = {name: [of[way, size]["normalized_latency"] for size in BLOCK_SIZES] for name, way in WAYS.items()}
        lines = [
            Line(name, style, list(zip(BLOCK_SIZES, values[name], strict=True)))  # type: ignore[arg-type]
            for style, values in (("ours", ours), ("paper", printed))
            for name in WAYS
        ]
        checks = [
            Check(f"recompute, blocks of {size}", printed["Recompute"][i], ours["Recompute"][i], None, unit=" s")
            for i, size in enumerate(BLOCK_SIZES)
        ]
        checks += [
            Check(
                f"swapping / recomputing, blocks of {size}",
                printed["Swap"][i] / printed["Recompute"][i],
                ours["Swap"][i] / ours["Recompute"][i],
                LATENCY_TOLERANCE,
            )
            for i, size in enumerate(BLOCK_SIZES)
        ]
        checks.append(
            Check(
                "log2 of the block size from which on swapping is faster",
                crossover(printed["Swap"], printed["Recompute"]),
                crossover(ours["Swap"], ours["Recompute"]),
                CROSSOVER_TOLERANCE,
                relative=False,
            )
        )
        preempted = ", ".join(f"{of['recompute', size]['preempted']} with {size}" for size in (1, 16, 256))
        return FigureResult(
            [Plot(self.title, "block size (tokens)", "normalized latency (s/token)", lines, log_x=True, log_y=True)],
            checks,
            notes=[
                f"Requests per second: {RATES[DATASET]}, chosen so that blocks of 16 come near the paper's latency. "
                "The paper does not give its rate and duration. So latencies are not judged, only their ratio.",
                NOT_SIMULATED,
                f"Preemptions with recomputing, by block size: {preempted}.",
                "For some block sizes Fig. 19a favours swapping, but our trace favours recomputing. In Fig. 19a a "
                "prefill is a separate step. Here it joins the step of the decoding requests, and a swap costs time "
                "before that step. The paper's gain from swapping large blocks does not appear.",
            ],
        )


FIG_19 = (Fig19a(), Fig19b())
