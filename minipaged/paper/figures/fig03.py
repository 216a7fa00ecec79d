"""Fig. 3: requests in contiguous chunks, and the waste in them, drawn from a run of Orca's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipaged.engine.engine import Engine
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, Plot
from minipaged.paper.machines import machine
from minipaged.paper.orca import ESTIMATES, OrcaPolicy
from minipaged.paper.orca_memory import Estimate, OrcaMemory
from minipaged.paper.serving import VOCABULARY
from minipaged.paper.workloads import MAX_MODEL_LEN, draw_lengths
from minipaged.params import EngineConfig, SamplingParams
from minipaged.simulation.simulated import SimulatedRunner, simulated_tier

MODEL = "OPT-13B"
PRINTED = {"A": (8, 2, 2038), "B": (4, 1, 507)}
"""Slots of the figure's two requests: with tokens, reserved, never used."""
TOLERANCE = 0.0
"""Tolerance of these numbers, in slots. They are counted, not measured."""
REQUESTS = ((7, 4, 2041), (3, 3, 509))
"""The two requests as sent to the engine: prompt, output and expected output. The last token of an output never
takes a slot."""
STEPS = 2
"""The number of steps before the picture: one for the prompts, one for a token."""
NUM_SLOTS = 3072
"""Slots of the memory: those of A and B, and 512 more."""
DATASET, NUM_REAL, REAL_STEPS = "ShareGPT", 60, 1000
"""The second picture: the dataset, the number of requests that arrive together, and the number of steps. The memory is
that of an A100 of 40 GB."""


@dataclass(frozen=True, slots=True)
class MemoryScene:
    """A job that serves requests, which arrive together, for some steps."""

    requests: tuple[tuple[int, int, int], ...]
    """Prompt, output and expected output of each, in tokens. Equal outputs must have equal expectations."""
    num_slots: int
    steps: int

    def run(self) -> Chunks:
        """Serve them, with blocks of one slot each, and return the chunks."""
        expected = {output: most for _, output, most in self.requests}
        memories: list[OrcaMemory] = []
        estimate: Estimate = expected.__getitem__

        def make(*doors: Any) -> OrcaMemory:
            config, _, _, writer, emit = doors
            memories.append(OrcaMemory(config, writer, emit, estimate))
            return memories[0]

        config = EngineConfig(
            num_blocks=self.num_slots,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY,
            block_size=1,
            enable_prefix_caching=False,
            max_num_seqs=len(self.requests),
            max_num_batched_tokens=self.num_slots,
        )
        runner = SimulatedRunner(machine(MODEL), block_size=1)
        engine = Engine(
            config,
            simulated_tier(),
            runner,
            memory=make,
            policy=lambda *settings: OrcaPolicy(*settings, memory=memories[0]),
            clock=runner.clock,
            steady=False,  # its tables are read between steps
        )
        asked = {}
        for prompt, output, most in self.requests:
            request_id = engine.add_request(range(prompt), SamplingParams(max_tokens=output, ignore_eos=True))
            asked[request_id] = prompt + output - 1, min(prompt + most, MAX_MODEL_LEN)
        for _ in range(self.steps):
            engine.step()
        chunks = []
        for request in engine.scheduler.running:
            table = request.sequences[0].table
            final, longest = asked[request.request_id]
            chunks.append(
                ReservedChunk(
                    table.blocks[0], len(table.blocks), table.num_tokens, final - table.num_tokens, longest - final
                )
            )
        return Chunks(sorted(chunks, key=lambda chunk: chunk.first), engine.blocks.allocator.num_free)


@dataclass(frozen=True, slots=True)
class ReservedChunk:
    """The chunk of one request, in slots."""

    first: int
    size: int
    tokens: int
    reserved: int
    """Slots for tokens still to come."""
    internal: int
    """Slots for tokens that were expected and never come."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """All chunks of a memory, in order of their positions."""

    chunks: list[ReservedChunk]
    free: int
    """Slots that belong to no chunk."""


class Fig3(Figure):
    """Chunks of the paper's two requests, and of requests of ShareGPT that fill a memory."""

    name = "3"
    title = "Fig. 3: what existing systems keep in contiguous chunks"
    section = "3.1"
    look = (
        "From its first step on, each request has a chunk for the longest output it may have. A few slots hold "
        "tokens, and some are reserved for tokens to come. Nearly all slots in the left picture are for tokens that "
        "never come. Waiting requests cannot use any of these."
    )
    change_it = (
        "Let A expect 256 tokens (`REQUESTS`): how many such requests fit in addition to B?",
        "Take the right picture after 10 steps, and after 3,000 (`REAL_STEPS`): does the share of tokens settle?",
        'Expect the true outputs of the requests on the right (`ESTIMATES["Orca (Oracle)"]`): how many fit?',
    )

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        real = draw_lengths(DATASET, NUM_REAL, np.random.default_rng((seed, 0)))
        most = ESTIMATES["Orca (Max)"]
        expected = tuple((prompt, output, most(output)) for prompt, output in real)
        return [
            MemoryScene(REQUESTS, NUM_SLOTS, STEPS),
            MemoryScene(expected, machine(MODEL).num_blocks(1), REAL_STEPS),
        ]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        two, real = results.values()  # in the order of `jobs`
        plots = [
            self._plot(
                "the paper's two requests",
                two,
                [
                    f"{name}\n{chunk['tokens']} + {chunk['reserved']} + {chunk['internal']:,}"
                    for name, chunk in zip(PRINTED, two["chunks"], strict=True)
                ],
            ),
            self._plot(f"{DATASET} in {MODEL}'s KV memory", real, [f"{chunk['first']:,}" for chunk in real["chunks"]]),
        ]
        parts = ("tokens", "reserved", "internal")
        checks = [
            Check(f"{name}: {part}", slots[i], chunk[part], TOLERANCE, relative=False, unit=" slots", kind="exact")
            for (name, slots), chunk in zip(PRINTED.items(), two["chunks"], strict=True)
            for i, part in enumerate(parts)
        ]
        total = sum(chunk["size"] for chunk in real["chunks"]) + real["free"]
        held = sum(chunk["tokens"] for chunk in real["chunks"])
        return FigureResult(
            plots,
            checks,
            notes=[
                f"Left: {two['free']} slots are free, but no third request like A fits (external fragmentation).",
                f"Right: {NUM_REAL} requests arrive together. After {REAL_STEPS} steps, {len(real['chunks'])} have a "
                f"chunk, and {held:,} of {total:,} slots hold a token ({held / total:.0%}). Fig. 2 has the means.",
            ],
        )

    def _plot(self, title: str, picture: Mapping[str, Any], names: list[str]) -> Plot:
        parts = {"tokens": "tokens", "reserved": "reserved", "internal": "internal fragmentation"}
        bars = [
            Line(label, "ours", [(i, chunk[part]) for i, chunk in enumerate(picture["chunks"])] + [(len(names), 0)])
            for part, label in parts.items()
        ]
        free = [(i, 0) for i in range(len(names))] + [(len(names), picture["free"])]
        return Plot(
            title,
            "chunk, from this slot on",
            "slots",
            [*bars, Line("nobody's", "ours", free)],
            y_max=2700,
            groups=[*names, "free"],
            stacked=True,
        )


FIG_3 = Fig3()
