"""Fig. 18: the cost of blocks. (a) Time of the attention kernel, measured on the machine that runs this. (b) Latency of
a whole trace by block size, simulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minipaged.paper import published
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, PaperClaim, Plot
from minipaged.paper.figures.block_sizes import BLOCK_SIZES, LONG, NOT_SIMULATED, RATES, best, good, trace
from minipaged.paper.kernel import BLOCK_SIZE, HEAD_DIM, HEADS, DecodeAttention, tiers_here
from minipaged.paper.serving import ServingSetup

# --- a --------------------------------------------------------------------------------------------

CONTEXTS, BATCHES = (64, 128, 256), (8, 32)
REPETITIONS, QUICK_REPETITIONS = 60, 15


class Fig18a(Figure):
    """Time of paged attention / time of contiguous attention, by context and batch."""

    name = "18a"
    title = "Fig. 18a: attention over blocks / over contiguous memory, measured here"
    section = "7.1"
    look = (
        "In the paper, looking up keys through a table makes attention a fifth to almost a half slower; other "
        "operations are not affected. The comparison is of two programs, not of two layouts: how well each is "
        "written counts as much as the table."
    )
    alone = True
    change_it = (
        "Put the blocks in order (`np.arange` instead of `rng.permutation` in paper/kernel.py): does the order cost "
        "anything?",
        "Use blocks of 1, and of 128 (`BLOCK_SIZE`): at which size does the reference tier come close to plain NumPy?",
        "Use contexts of 2,048: which of the two programs gains more from long contexts, and on which tier?",
    )

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        repetitions = QUICK_REPETITIONS if quick else REPETITIONS
        return [
            DecodeAttention(tier, batch, context, repetitions)
            for tier in tiers_here()
            for batch in BATCHES
            for context in CONTEXTS
        ]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        printed = published.other("18a attention kernel (us), context 64,128,256")
        paper = {
            batch: [
                ours / theirs
                for ours, theirs in zip(
                    printed[f"vLLM batch {batch}"], printed[f"FasterTransformer batch {batch}"], strict=True
                )
            ]
            for batch in BATCHES
        }
        plots, checks = [], []
        for batch in BATCHES:
            lines = [Line("GPU kernels", "paper", list(enumerate(paper[batch])))]
            for tier in dict.fromkeys(job.tier for job in results if isinstance(job, DecodeAttention)):
                points = []
                for job, found in results.items():
                    assert isinstance(job, DecodeAttention)
                    if (job.tier, job.batch) == (tier, batch):
                        i, ratio = CONTEXTS.index(job.context), found["paged"] / found["contiguous"]
                        points.append((i, ratio))
                        what = f"{tier}, batch {batch}, context {job.context}"
                        checks.append(Check(what, paper[batch][i], ratio, None))
                lines.append(Line(tier, "ours", points))
            contexts = [str(context) for context in CONTEXTS]
            plots.append(Plot(f"batch {batch}", "context (tokens)", "paged / contiguous time", lines, groups=contexts))
        everything = [ratio - 1 for ratios in paper.values() for ratio in ratios]
        few, many = ([ratio - 1 for ratio in paper[batch]] for batch in BATCHES)
        here = [check.ours - 1 for check in checks if check.ours is not None]
        says = "20-26% higher attention kernel latency, compared to the highly-optimized FasterTransformer"
        sentence = PaperClaim(
            says,
            self.section,
            f"{min(many):.0%} to {max(many):.0%} with 32 sequences, {min(few):.0%} to {max(few):.0%} with 8",
            f"{min(here):+.0%} to {max(here):+.0%}, on other hardware and against other programs",
            round(min(everything), 2) >= 0.2 and round(max(everything), 2) <= 0.26,
        )
        return FigureResult(
            plots,
            checks,
            [sentence],
            [
                "Nothing is judged, because hardware and kernels differ from the paper's. These numbers are "
                "measured: even with the same seed they differ on each machine and each time. A stored result is "
                "not measured again. Use a new folder (--output) to measure again.",
                f"{HEADS} heads of {HEAD_DIM}, blocks of {BLOCK_SIZE} in random order. The reference tier is compared "
                "with NumPy over one array, and the fast tier with torch's scaled_dot_product_attention. Below 1, the "
                "paged program is the faster one.",
            ],
        )


# --- b --------------------------------------------------------------------------------------------

DOUBLINGS = 1.0
"""Tolerance of the best block size, and of the ends of the good range, in doublings. 1 is a factor of 2."""
DATASETS = ("ShareGPT", "Alpaca")


class Fig18b(Figure):
    """Normalized latency by block size."""

    name = "18b"
    title = "Fig. 18b: latency by block size, OPT-13B"
    section = "7.2"
    look = (
        "Large blocks waste memory, because half of each sequence's last block is unused on average. Alpaca's "
        "sequences have 78 tokens, so blocks of 256 are the same as contiguous memory."
    )
    change_it = (
        "Raise the rates by a tenth (`RATES` in figures/block_sizes.py): which block sizes fall behind first?",
        "Add a cost for each block that a step reads (`SimulatedRunner.run`): at which cost do our curves match the "
        "paper's?",
        "Enable prefix caching (`enable_prefix_caching` in serving.py) with prompts that begin alike: small blocks "
        "share more.",
    )

    why: Mapping[str, str] = {
        "log2 of the block size": "in this simulation small blocks have no disadvantage (see the first of these "
        "notes). So the best size is the smallest but one, and all sizes below 16 are good.",
    }

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [trace(dataset, size, quick=quick, seed=seed) for dataset in DATASETS for size in BLOCK_SIZES]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        printed = published.other("18b normalized latency (s/token) by block size")
        of: dict[tuple[str, int], Any] = {}
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
            of[job.dataset, job.block_size] = result
        plots, checks, shares = [], [], []
        for dataset in DATASETS:
            paper = printed[dataset]
            ours = [of[dataset, size]["normalized_latency"] for size in BLOCK_SIZES]
            lines = [
                Line(dataset, "ours", list(zip(BLOCK_SIZES, ours, strict=True))),
                Line(dataset, "paper", list(zip(BLOCK_SIZES, paper, strict=True))),
            ]
            rate = f"{dataset}, {RATES[dataset]:g} req/s"
            plots.append(
                Plot(rate, "block size (tokens)", "normalized latency (s/token)", lines, log_x=True, log_y=True)
            )
            checks += [
                Check(f"{dataset}: blocks of {size}", paper[i], ours[i], None, unit=" s")
                for i, size in enumerate(BLOCK_SIZES)
            ]
            names = f"smallest with at most {LONG:g} x the latency of 16", f"largest with at most {LONG:g} x that"
            pairs = (("best", best(paper), best(ours)), *zip(names, good(paper), good(ours), strict=True))
            checks += [
                Check(f"{dataset}: log2 of the block size, {what}", a, b, DOUBLINGS, relative=False)
                for what, a, b in pairs
            ]
            small, large = (of[dataset, size]["queued"]["tokens"] for size in (16, 256))
            shares.append(f"{dataset} {small:.0%} and {large:.0%}")
        return FigureResult(
            plots,
            checks,
            notes=[
                NOT_SIMULATED,
                "The paper does not give its rates and durations. Ours are chosen so that blocks of 16 have about its "
                "latencies. Latencies are not judged. The ends of the range of good block sizes are.",
                "Shares of the KV memory with tokens, while a request waits, with blocks of 16 and of 256: "
                f"{'; '.join(shares)}.",
            ],
        )


FIG_18 = (Fig18a(), Fig18b())
