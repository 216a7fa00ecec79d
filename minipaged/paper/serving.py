"""One workload served by one system at one rate: a point of a curve.

The engine, its scheduler, its tables and allocators are the real ones; the machine is simulated. Systems differ in what
goes through two doors of the engine, memory and policy, and in the limits that go with them: `systems` has a record of
each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from minipaged.engine.block_manager import BlockManager
from minipaged.engine.engine import Engine
from minipaged.engine.memory import MakeMemory
from minipaged.engine.policies import POLICIES
from minipaged.engine.sequence import Request
from minipaged.errors import InvalidRequest
from minipaged.paper.divergence import DIVERGENCE
from minipaged.paper.faster_transformer import FasterTransformer
from minipaged.paper.machines import FURTHER_BEAM, FURTHER_SAMPLE, machine
from minipaged.paper.orca import ESTIMATES, Orca
from minipaged.paper.orca_memory import OrcaMemory
from minipaged.paper.vllm import VLLM, PromptsApart, WholePrompts
from minipaged.paper.workloads import MAX_MODEL_LEN, PaperRequest, arrivals
from minipaged.params import BeamSearchParams, EngineConfig, RequestOutputKind, SamplingParams
from minipaged.scheduling import MakePolicy, Way
from minipaged.simulation.simulated import Machine, SimulatedRunner, simulated_tier
from minipaged.simulation.traces import Percentiles

BATCH_TOKENS = 2560
"""vLLM's limit of a step in the paper's days."""
NO_LIMIT = 1 << 20
PREFILL_FIRST = "prefill-first"
"""The policy `vllm.WholePrompts`, on a machine whose steps are `vllm.PromptsApart`."""
VOCABULARY = 1 << 20
"""Tokens only have to differ where a prefix is not shared."""


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """What is served, by whom."""

    system: str
    """The name of one of `systems`: vLLM, Orca (Max), Orca (Pow2), Orca (Oracle) or FasterTransformer."""
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
    divergence: str = "measured"
    """Which beams survive: one of `divergence.DIVERGENCE`."""
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
    """Of vLLM: one of `engine.policies.POLICIES`, or PREFILL_FIRST, in the place of its own of then."""
    urgent: float = 0.0
    """So large a share of the requests is drawn; by the policy "priority" they are one step above the others."""
    one_piece: bool = False
    """Whether a block is one piece of memory, and not one for K and one for V in each layer."""
    link: float = 1.0
    """Times the speed of the machine's link to the host."""
    each: bool = False
    """Whether the times of every request are kept, and how long there was between two tokens (with one sequence each).
    """
    kv_bits: int = 16
    """Of a number of K or V: with fewer there are more blocks, and attention reads fewer bytes."""

    def run(self) -> ServingResult:
        """Serve it."""
        return serve(self, self.arrivals())

    def arrivals(self) -> list[PaperRequest]:
        """The requests, in order of arrival."""
        return arrivals(self.dataset, self.rate, self.seconds, self.seed, self.prefix)


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
class Between:
    """How long those who had a token waited for the next, in seconds."""

    percentiles: Percentiles
    longest: float


@dataclass(slots=True)
class Pace:
    """Looks after each step who has got a token, and how long after the one before."""

    runner: SimulatedRunner
    latest: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Request -> tokens it has, and when the last of them came."""
    seconds: list[float] = field(default_factory=list)

    def note(self, running: Iterable[Request]) -> None:
        """Who computes its prompt, or waits to come back, gets none, and its time goes on."""
        for request in running:
            self.has(request.request_id, len(request.sequences[0].output_token_ids))

    def has(self, request_id: str, num_tokens: int) -> None:
        before, since = self.latest.get(request_id, (0, 0.0))
        if num_tokens == before:
            return
        now = self.runner.now
        if before:  # a first token is its prompt's
            now += self.runner.owed if isinstance(self.runner, PromptsApart) else 0.0
            self.seconds.append(now - since)
        self.latest[request_id] = num_tokens, now

    def between(self) -> Between:
        return Between(Percentiles.of(self.seconds), max(self.seconds, default=0.0))


@dataclass(frozen=True, slots=True)
class ServingResult:
    """What it came to. Means are over steps."""

    requests: int
    normalized_latency: float
    """Mean over requests of latency / output tokens, seconds a token (section 6.1)."""
    mean_running: float
    """Requests in a batch, looked at after each step, without those that ended in it."""
    mean_running_arriving: float
    """The same over the steps up to the last arrival (Fig. 13): after it the batch empties, however long the trace."""
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
    latency_urgent: Percentiles
    """The same as `latency` of those with priority, and of those without."""
    latency_others: Percentiles
    queued: Queued
    """What the memory held while a request waited: with one sequence a request, or entries count twice."""
    each: list[tuple[float, float]]
    """Of every request what `first_token` and `per_token` are of, if they are to be kept."""
    between: Between | None
    """Any two tokens of a request, one after the other, if it is to be kept."""


class Doors(NamedTuple):
    """What goes through the two doors of one engine."""

    memory: MakeMemory
    policy: MakePolicy


@dataclass(frozen=True, slots=True)
class System:
    """A system that serves: everything in which it differs from the others.

    The defaults are those of Orca, which keeps a chunk for each sequence: a chunk is never shared, and never given up.
    """

    doors: Callable[[ServingSetup], Doors]
    """Makes a new engine's memory and policy."""
    limits_steps: bool = False
    """Whether a step has at most `ServingSetup.batch_tokens` tokens."""
    caches_prefixes: bool = False
    """Whether requests with the same prefix share its blocks."""
    preempts: bool = False
    """Whether requests can be preempted. Those that are swapped out need blocks on the host."""
    judged: bool = True
    """Whether its knees get a verdict. FasterTransformer's get none: how large its batches could be is not known."""


def systems() -> dict[str, System]:
    """The table of all systems, by name. Each estimate of `orca.ESTIMATES` makes one, including those added later."""
    return {
        "FasterTransformer": System(lambda serving: contiguous(FasterTransformer()), judged=False),
        **dict.fromkeys(ESTIMATES, System(lambda serving: contiguous(Orca(serving.system)))),
        "vLLM": System(paged, limits_steps=True, caches_prefixes=True, preempts=True),
    }


def contiguous(baseline: Orca) -> Doors:
    """The baselines' doors, which belong together: the policy asks the memory for chunks."""
    return Doors(baseline.memory, baseline.policy)


def paged(serving: ServingSetup) -> Doors:
    """vLLM's doors: this engine's own memory, and vLLM's policy of then or the one that the serving names."""
    if serving.policy and serving.policy != PREFILL_FIRST:
        return Doors(BlockManager, POLICIES[serving.policy])
    policy = WholePrompts if serving.policy == PREFILL_FIRST else VLLM
    return Doors(BlockManager, partial(policy, preemption=serving.preemption))


def engine_of(serving: ServingSetup, runner: SimulatedRunner) -> Engine:
    """The system, on the machine."""
    system = systems()[serving.system]
    num_blocks = runner.machine.num_blocks(serving.block_size)
    may_swap = system.preempts and (serving.n > 1 or serving.preemption == "swap")
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCABULARY,
        block_size=serving.block_size,
        enable_prefix_caching=system.caches_prefixes and serving.prefix > 0,
        max_num_seqs=serving.most_running,
        max_num_batched_tokens=serving.batch_tokens if system.limits_steps else NO_LIMIT,
        num_swap_blocks=num_blocks if may_swap else 0,
    )
    tier = replace(simulated_tier(), beam_search=DIVERGENCE[serving.divergence])
    memory, policy = system.doors(serving)
    return Engine(config, tier, runner, memory=memory, policy=policy, clock=runner.clock)


def prompt_of(serving: ServingSetup, one: PaperRequest, number: int) -> Sequence[int]:
    """After the prefix a token of its own, so that nothing else is shared; `number`: of the request, from 1 on."""
    if not serving.prefix:
        return range(one.prompt_tokens)
    return [*range(serving.prefix), MAX_MODEL_LEN + number, *[0] * (one.prompt_tokens - serving.prefix - 1)]


def params_of(serving: ServingSetup, one: PaperRequest) -> SamplingParams | BeamSearchParams:
    """Its output has exactly so many tokens."""
    if serving.beams:
        return BeamSearchParams(beam_width=serving.n, max_tokens=one.output_tokens, ignore_eos=True)
    return SamplingParams(n=serving.n, max_tokens=one.output_tokens, ignore_eos=True)


def machine_of(serving: ServingSetup, further: float | None) -> Machine:
    """The model's, as this serving changes it. `further`: in the place of FURTHER_SAMPLE or FURTHER_BEAM."""
    here = machine(serving.model)
    if further is None:
        further = FURTHER_BEAM if serving.beams else FURTHER_SAMPLE
    return replace(
        here,
        kv_bytes_per_token=here.kv_bytes_per_token * serving.kv_bits // 16,
        seconds_per_row=here.seconds_per_row * (1 + (serving.n - 1) * further) / serving.n,
        link_bytes_per_second=here.link_bytes_per_second * serving.link,
        copies_per_block=1 if serving.one_piece else here.copies_per_block,
    )


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request that was served, in seconds."""

    urgent: bool
    tokens: int
    latency: float
    first_token: float
    per_token: float


def serve(serving: ServingSetup, asked: Sequence[PaperRequest], further: float | None = None) -> ServingResult:
    """Let these requests come, each at its time, and serve all of them to their end. `further`: see `machine_of`.
    Raises InvalidRequest where there is none."""
    if not asked:
        raise InvalidRequest(
            f"no request comes in {serving.seconds:g} s at {serving.rate:g} a second; take a longer trace, or a "
            "higher rate"
        )
    make = PromptsApart if serving.policy == PREFILL_FIRST else SimulatedRunner
    runner = make(machine_of(serving, further), serving.block_size)
    engine = engine_of(serving, runner)
    urgent = np.random.default_rng((serving.seed, 5)).random(len(asked)) < serving.urgent  # [requests]
    coming, arrived = deque(zip(asked, urgent.tolist(), strict=True)), dict[str, tuple[PaperRequest, bool]]()
    times: list[Times] = []
    running, queue, pace = 0, Queue(), Pace(runner) if serving.each else None
    arriving = 1, 0
    while coming or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            runner.now = max(runner.now, coming[0][0].seconds)
        while coming and coming[0][0].seconds <= runner.now:
            one, is_urgent = coming.popleft()
            request_id = engine.add_request(
                prompt_of(serving, one, len(asked) - len(coming)),
                params_of(serving, one),
                output_kind=RequestOutputKind.FINAL_ONLY,
                priority=-1 if is_urgent and serving.policy == "priority" else 0,
            )
            arrived[request_id] = one, is_urgent
        before = runner.now
        for update in engine.step():
            if update.output:
                metrics, tokens = update.output.metrics, len(update.output.outputs[0].token_ids)
                (one, is_urgent), first = arrived.pop(update.request_id), metrics.first_token_time
                assert first is not None
                if pace:
                    pace.has(update.request_id, tokens)
                after = (metrics.finished_time - first) / max(1, tokens - 1)
                latency = metrics.finished_time - one.seconds
                times.append(Times(is_urgent, tokens, latency, first - one.seconds, after))
        running += len(engine.scheduler.running)
        if pace:
            pace.note(engine.scheduler.running)
        if coming:
            arriving = engine.stats.steps, running
        if engine.scheduler.waiting:
            queue.note(engine, runner.now - before)
    stats = engine.stats
    return ServingResult(
        requests=len(times),
        normalized_latency=math.fsum(one.latency / one.tokens for one in times) / len(times),
        mean_running=running / stats.steps,
        mean_running_arriving=arriving[1] / arriving[0],
        saved_share=stats.share_saved,
        preempted=stats.preempted_by_swap + stats.preempted_by_recompute,
        seconds=runner.now,
        steps=stats.steps,
        latency=Percentiles.of(one.latency for one in times),
        first_token=Percentiles.of(one.first_token for one in times),
        per_token=Percentiles.of(one.per_token for one in times),
        latency_urgent=Percentiles.of(one.latency for one in times if one.urgent),
        latency_others=Percentiles.of(one.latency for one in times if not one.urgent),
        queued=queue.means(stats.blocks_total * serving.block_size),
        each=[(one.first_token, one.per_token) for one in times] if serving.each else [],
        between=pace.between() if pace else None,
    )
