"""One workload served by one system at one rate: a point of a curve.

The engine, its scheduler, its tables and allocators are the real ones; the machine is simulated. Systems differ in what
goes through two doors of the engine, memory and policy, and in nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from minipaged.engine.engine import Engine
from minipaged.engine.policies import POLICIES
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.paper.divergence import DivergingBeams
from minipaged.paper.faster_transformer import FasterTransformer
from minipaged.paper.machines import machine
from minipaged.paper.orca import Orca, OrcaMemory
from minipaged.paper.workloads import MAX_MODEL_LEN, Asked, arrivals
from minipaged.params import BeamSearchParams, EngineConfig, RequestOutputKind, SamplingParams
from minipaged.scheduling import MakePolicy, RequestView, Way
from minipaged.simulated import SimulatedRunner, simulated_tier
from minipaged.traces import Percentiles

BATCH_TOKENS = 2560
"""vLLM's limit of a step in the paper's days; Orca's baselines had none."""
WATERMARK = 0.01
"""Of all blocks, what vLLM's newcomers left free then."""
FURTHER_SAMPLE, FURTHER_BEAM = 0.2, 0.8
"""What the second and each further sample, or beam, of a request costs beside its tokens, as a part of what the first
one costs (`Machine.seconds_per_row`, mostly the host's work). Calibrated by the flat points of Fig. 14: a test says how
well they are met."""
NO_LIMIT = 1 << 20
VOCABULARY = 1 << 20
"""Tokens only have to differ where a prefix is not shared."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served, by whom."""

    system: str
    """vLLM, Orca (Max), Orca (Pow2), Orca (Oracle) or FasterTransformer."""
    model: str
    dataset: str
    rate: float
    """Requests a second."""
    seconds: float
    """For so long requests arrive. All of them are served to their end."""
    seed: int = 0
    n: int = 1
    """Sequences of each request."""
    beams: bool = False
    """Whether they are beams, and not samples."""
    prefix: int = 0
    """So many tokens of its prompt each request shares with all others."""
    block_size: int = 16
    most_running: int = NO_LIMIT
    """Sequences that run at once, however many there is room for."""
    preemption: Way | None = None
    """Of vLLM: the only way back. None: single sequences recompute, others swap, as vLLM did then."""
    batch_tokens: int = BATCH_TOKENS
    """Of vLLM: most tokens of a step."""
    policy: str = ""
    """Of vLLM: one of `engine.policies.POLICIES` in the place of its own of then."""
    kv_bits: int = 16
    """Of a number of K or V: with fewer there are more blocks, and attention reads fewer bytes."""

    def run(self) -> Served:
        """Serve it."""
        return serve(self, arrivals(self.dataset, self.rate, self.seconds, self.seed, self.prefix))


@dataclass(frozen=True, slots=True)
class Queued:
    """Means over the steps in which a request waited: what the memory holds while more is wanted of it.

    Shares are of the KV memory, told apart as in Fig. 2. Of Orca, what a chunk holds beyond the tokens that were
    expected (its rounding to a power of two) is no internal fragmentation there, but among *external and others*.
    """

    steps: int
    seconds: float
    """All of them together, simulated."""
    running: float
    """Requests in a batch."""
    held: float
    """Of the KV memory, blocks that somebody has."""
    tokens: float
    reserved: float
    internal: float


@dataclass(slots=True)
class Queue:
    """Sums for `Queued`, of slots and requests."""

    steps: int = 0
    seconds: float = 0.0
    running: int = 0
    held: int = 0
    tokens: int = 0
    reserved: int = 0
    internal: int = 0

    def note(self, engine: Engine, seconds: float) -> None:
        """One step, in which a request waited."""
        memory = engine.blocks
        self.steps += 1
        self.seconds += seconds
        self.running += len(engine.scheduler.running)
        self.held += memory.num_used * memory.block_size
        tokens = memory.num_tokens
        self.tokens += tokens
        if isinstance(memory, OrcaMemory):
            self.reserved += memory.final_tokens - tokens
            self.internal += memory.expected_tokens - memory.final_tokens
        else:
            self.internal += memory.num_entries * memory.block_size - tokens

    def means(self, num_slots: int) -> Queued:
        """With a KV memory of so many slots."""
        steps, slots = max(1, self.steps), max(1, self.steps) * num_slots
        return Queued(
            steps=self.steps,
            seconds=self.seconds,
            running=self.running / steps,
            held=self.held / slots,
            tokens=self.tokens / slots,
            reserved=self.reserved / slots,
            internal=self.internal / slots,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What it came to. Shares and means are over steps."""

    requests: int
    normalized_latency: float
    """Mean over requests of latency / output tokens, seconds a token (section 6.1)."""
    mean_running: float
    """Requests in a batch, looked at after each step, without those that ended in it."""
    mean_running_arriving: float
    """The same over the steps up to the last arrival (Fig. 13): after it the batch empties, however long the trace."""
    token_share: float
    """Of the KV memory, what held tokens; the rest as in Fig. 2: reserved, internal, and what nobody has."""
    reserved_share: float
    internal_share: float
    saved_share: float
    """Blocks saved by sharing (Fig. 15)."""
    preempted: int
    seconds: float
    """Simulated."""
    steps: int
    latency: Percentiles
    """From arrival to the last token; `first_token`: to the first one, in seconds."""
    first_token: Percentiles
    per_token: Percentiles
    """From the first token to the last, of each one after the first, in seconds."""
    queued: Queued
    """The same over the steps in which a request waited: with one sequence a request, or entries count twice."""


class VLLM(FirstComeFirstServed):
    """vLLM's policy in the paper's days: this engine's own but for two things. Which way back depends on the number of
    sequences. And newcomers leave a hundredth of all blocks free (its *watermark*), not one for each sequence that
    runs: memory is fuller, and preemptions are more."""

    def __init__(self, *settings: Any, preemption: Way | None) -> None:
        super().__init__(*settings)
        self.preemption = preemption

    def soon(self, request: RequestView, num_blocks: int) -> int:
        return 0

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """As long as the watermark stays free; but who is alone may have all."""
        watermark = int(WATERMARK * self.num_blocks) if running else 0
        return super().admit(waiting, running, num_free - watermark, tokens_left)

    def way_back(self, request: RequestView, host_free: int) -> Way:
        return self.preemption or ("recompute" if request.num_sequences == 1 else "swap")


def engine_of(serving: Serving, runner: SimulatedRunner) -> Engine:
    """The system, on the machine."""
    num_blocks = runner.machine.num_blocks(serving.block_size)
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCABULARY,
        block_size=serving.block_size,
        enable_prefix_caching=serving.prefix > 0 and serving.system == "vLLM",
        max_num_seqs=serving.most_running,
        max_num_batched_tokens=NO_LIMIT,
    )
    tier = replace(simulated_tier(), beam_search=DivergingBeams)
    if serving.system == "vLLM":
        host = num_blocks if serving.n > 1 or serving.preemption == "swap" else 0
        policy: MakePolicy = partial(VLLM, preemption=serving.preemption)
        if serving.policy:
            policy = POLICIES[serving.policy]
        config = replace(config, max_num_batched_tokens=serving.batch_tokens, num_swap_blocks=host)
        return Engine(config, tier, runner, policy=policy, clock=runner.clock)
    system = FasterTransformer() if serving.system == "FasterTransformer" else Orca(serving.system)
    return Engine(config, tier, runner, memory=system.memory, policy=system.policy, clock=runner.clock)


def prompt_of(serving: Serving, one: Asked, number: int) -> Sequence[int]:
    """After the prefix a token of its own, so that nothing else is shared; `number`: of the request, from 1 on."""
    if not serving.prefix:
        return range(one.prompt_tokens)
    return [*range(serving.prefix), MAX_MODEL_LEN + number, *[0] * (one.prompt_tokens - serving.prefix - 1)]


def params_of(serving: Serving, one: Asked) -> SamplingParams | BeamSearchParams:
    """Its output has exactly so many tokens."""
    if serving.beams:
        return BeamSearchParams(beam_width=serving.n, max_tokens=one.output_tokens, ignore_eos=True)
    return SamplingParams(n=serving.n, max_tokens=one.output_tokens, ignore_eos=True)


def serve(serving: Serving, asked: Sequence[Asked]) -> Served:
    """Let these requests come, each at its time, and serve all of them to their end."""
    here = machine(serving.model)
    here = replace(here, kv_bytes_per_token=here.kv_bytes_per_token * serving.kv_bits // 16)
    further = FURTHER_BEAM if serving.beams else FURTHER_SAMPLE
    here = replace(here, seconds_per_row=here.seconds_per_row * (1 + (serving.n - 1) * further) / serving.n)
    runner = SimulatedRunner(here, serving.block_size)
    engine = engine_of(serving, runner)
    coming, arrived = deque(asked), dict[str, float]()
    normalized, latency, first_token, per_token = (list[float]() for _ in range(4))
    running, queue = 0, Queue()
    arriving = 1, 0
    while coming or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            runner.now = max(runner.now, coming[0].seconds)
        while coming and coming[0].seconds <= runner.now:
            one = coming.popleft()
            request_id = engine.add_request(
                prompt_of(serving, one, len(asked) - len(coming)),
                params_of(serving, one),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            arrived[request_id] = one.seconds
        before = runner.now
        for update in engine.step():
            if update.output:
                metrics, tokens = update.output.metrics, len(update.output.outputs[0].token_ids)
                came, first = arrived.pop(update.request_id), metrics.first_token_time
                assert first is not None
                latency.append(metrics.finished_time - came)
                normalized.append(latency[-1] / tokens)
                first_token.append(first - came)
                per_token.append((metrics.finished_time - first) / max(1, tokens - 1))
        running += len(engine.scheduler.running)
        if coming:
            arriving = engine.stats.steps, running
        if engine.scheduler.waiting:
            queue.note(engine, runner.now - before)
    stats = engine.stats
    slots = stats.steps * stats.blocks_total * serving.block_size
    tokens, reserved = stats.contiguous.tokens, stats.contiguous.reserved
    by_orca = serving.system != "vLLM"
    return Served(
        requests=len(normalized),
        normalized_latency=math.fsum(normalized) / len(normalized),
        mean_running=running / stats.steps,
        mean_running_arriving=arriving[1] / arriving[0],
        token_share=(tokens if by_orca else stats.paged.tokens) / slots,
        reserved_share=reserved / slots if by_orca else 0.0,
        internal_share=(stats.paged.internal_fragmentation - (reserved if by_orca else 0)) / slots,
        saved_share=stats.share_saved,
        preempted=stats.preempted_by_swap + stats.preempted_by_recompute,
        seconds=runner.now,
        steps=stats.steps,
        latency=Percentiles.of(latency),
        first_token=Percentiles.of(first_token),
        per_token=Percentiles.of(per_token),
        queued=queue.means(stats.blocks_total * serving.block_size),
    )
