"""Serves one workload on one system at one rate: a point of a curve.

The engine, its scheduler, block tables and allocators are real. The machine is simulated. Systems differ in the memory
and the policy of their engine, and in the limits that go with them. `systems` describes each.
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
"""vLLM's limit of tokens per step at the time of the paper."""
NO_LIMIT = 1 << 20
PREFILL_FIRST = "prefill-first"
"""The policy `vllm.WholePrompts`, with the runner `vllm.PromptsApart`."""
VOCABULARY = 1 << 20
"""The vocabulary's size: large enough for a distinct token per request (`prompt_of`)."""


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """A job that serves one workload on one system."""

    system: str
    """The system's name, a key of `systems()`: vLLM, Orca (Max), Orca (Pow2), Orca (Oracle) or FasterTransformer."""
    model: str
    dataset: str
    rate: float
    """Requests per second."""
    seconds: float
    """The time during which requests arrive. All of them are served until they finish."""
    seed: int = 0
    n: int = 1
    """Sequences of each request."""
    beams: bool = False
    """Whether a request's sequences are beams instead of samples."""
    divergence: str = "measured"
    """The rule for which beams survive, a key of `divergence.DIVERGENCE`."""
    prefix: int = 0
    """Tokens at the beginning of its prompt that each request shares with all others."""
    block_size: int = 16
    most_running: int = NO_LIMIT
    """The limit of sequences that run at once, even if more would fit."""
    preemption: Way | None = None
    """vLLM's handling of preempted requests. None: requests of one sequence recompute and others swap, as in the paper.
    """
    batch_tokens: int = BATCH_TOKENS
    """vLLM's limit of tokens per step."""
    policy: str = ""
    """vLLM's policy: a key of `engine.policies.POLICIES`, or PREFILL_FIRST. Empty: its policy at the time of the paper.
    """
    urgent: float = 0.0
    """The share of requests that are urgent, drawn at random. Policy "priority" puts them one step above the others."""
    one_piece: bool = False
    """Whether a block is one piece of memory. If not, it has a piece for K and one for V in each layer."""
    link: float = 1.0
    """A factor on the speed of the machine's link to the host."""
    each: bool = False
    """Whether to keep the times of every request, and the times between tokens (one sequence per request only)."""
    kv_bits: int = 16
    """Bits of each number in K and V. With fewer bits there are more blocks, and attention reads fewer bytes."""

    def run(self) -> ServingResult:
        """Serve the workload."""
        return serve(self, self.arrivals())

    def arrivals(self) -> list[PaperRequest]:
        """Draw the requests, in order of arrival."""
        return arrivals(self.dataset, self.rate, self.seconds, self.seed, self.prefix)


@dataclass(frozen=True, slots=True)
class Queued:
    """Means over the steps during which a request waited, so that the memory was in demand.

    `held`, `tokens`, `reserved` and `internal` are shares of the KV memory, with the categories of Fig. 2. Orca rounds
    chunks up to a power of two. The slots beyond the expected tokens count as *external and others* there, not as
    internal fragmentation.
    """

    steps: int
    """The number of these steps."""
    seconds: float
    """Simulated seconds of all these steps together."""
    running: float
    """Requests in a batch."""
    held: float
    """The share of blocks that are in use."""
    tokens: float
    """The share of slots with tokens."""
    reserved: float
    """The share of slots reserved for tokens still to come."""
    internal: float
    """The share of slots lost to internal fragmentation."""


@dataclass(slots=True)
class Queue:
    """Running sums for `Queued`, in slots and requests."""

    steps: int = 0
    seconds: float = 0.0
    running: int = 0
    held: int = 0
    tokens: int = 0
    reserved: int = 0
    internal: int = 0

    def note(self, engine: Engine, seconds: float) -> None:
        """Add one step during which a request waited."""
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
        """Return the means. `num_slots` is the size of the KV memory."""
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
    """Times between two successive tokens of a request, in seconds."""

    percentiles: Percentiles
    longest: float


@dataclass(slots=True)
class Pace:
    """Measures the times between successive tokens of each request. It looks at running requests after each step."""

    runner: SimulatedRunner
    latest: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Request -> its number of tokens, and the time of the last one."""
    seconds: list[float] = field(default_factory=list)
    """All times between two successive tokens so far."""

    def note(self, running: Iterable[Request]) -> None:
        """Note the tokens of all running requests. A request that gets no token, because it computes its prompt or is
        preempted, keeps the time of its last token."""
        for request in running:
            self.has(request.request_id, len(request.sequences[0].output_token_ids))

    def has(self, request_id: str, num_tokens: int) -> None:
        """Note that a request has this number of tokens now."""
        before, since = self.latest.get(request_id, (0, 0.0))
        if num_tokens == before:
            return
        now = self.runner.now
        if before:  # the first token comes from the prompt's pass
            now += self.runner.owed if isinstance(self.runner, PromptsApart) else 0.0
            self.seconds.append(now - since)
        self.latest[request_id] = num_tokens, now

    def between(self) -> Between:
        return Between(Percentiles.of(self.seconds), max(self.seconds, default=0.0))


@dataclass(frozen=True, slots=True)
class ServingResult:
    """The result of serving one workload."""

    requests: int
    normalized_latency: float
    """Mean over requests of latency / output tokens, in seconds per token (section 6.1)."""
    mean_running: float
    """Mean number of requests in a batch, over steps. A request does not count in the step in which it finishes."""
    mean_running_arriving: float
    """`mean_running` over the steps up to the last arrival only (Fig. 13). After it the batch empties."""
    saved_share: float
    """The share of blocks saved by sharing (Fig. 15)."""
    preempted: int
    """The number of preemptions."""
    seconds: float
    """Simulated seconds until the last request finished."""
    steps: int
    latency: Percentiles
    """Seconds from arrival to the last token."""
    first_token: Percentiles
    """Seconds from arrival to the first token."""
    per_token: Percentiles
    """Seconds per token after the first one, averaged within each request."""
    latency_urgent: Percentiles
    """`latency` of the urgent requests."""
    latency_others: Percentiles
    """`latency` of the other requests."""
    queued: Queued
    """The use of the memory while a request waited. Right only with one sequence per request; else shared blocks count
    twice."""
    each: list[tuple[float, float]]
    """The time to first token and the time per token of every request, if `ServingSetup.each`."""
    between: Between | None
    """Times between two successive tokens, if `ServingSetup.each`."""


class Doors(NamedTuple):
    """The memory and the policy of an engine."""

    memory: MakeMemory
    policy: MakePolicy


@dataclass(frozen=True, slots=True)
class System:
    """The properties in which a serving system differs from others.

    The defaults describe Orca. It keeps a chunk for each sequence, which is never shared and never taken away.
    """

    doors: Callable[[ServingSetup], Doors]
    """A function that makes the memory and policy of a new engine."""
    limits_steps: bool = False
    """Whether a step has at most `ServingSetup.batch_tokens` tokens."""
    caches_prefixes: bool = False
    """Whether requests with the same prefix share its blocks."""
    preempts: bool = False
    """Whether requests can be preempted. Swapping them out needs blocks on the host."""
    judged: bool = True
    """Whether its knees are judged. FasterTransformer's are not, because its batch sizes are not known."""


def systems() -> dict[str, System]:
    """Return all systems by name. Each estimate in `orca.ESTIMATES` makes one, including estimates added later."""
    return {
        "FasterTransformer": System(lambda serving: contiguous(FasterTransformer()), judged=False),
        **dict.fromkeys(ESTIMATES, System(lambda serving: contiguous(Orca(serving.system)))),
        "vLLM": System(paged, limits_steps=True, caches_prefixes=True, preempts=True),
    }


def contiguous(baseline: Orca) -> Doors:
    """Return the memory and policy of a baseline. They belong together: the policy asks the memory for chunks."""
    return Doors(baseline.memory, baseline.policy)


def paged(serving: ServingSetup) -> Doors:
    """Return vLLM's memory and policy: this engine's own memory, with the policy that `serving` names."""
    if serving.policy and serving.policy != PREFILL_FIRST:
        return Doors(BlockManager, POLICIES[serving.policy])
    policy = WholePrompts if serving.policy == PREFILL_FIRST else VLLM
    return Doors(BlockManager, partial(policy, preemption=serving.preemption))


def engine_of(serving: ServingSetup, runner: SimulatedRunner) -> Engine:
    """Make an engine for the system, on the machine of the runner."""
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
    """Return the prompt of request `number`, counted from 1. A token of its own follows the shared prefix, so that it
    shares nothing else."""
    if not serving.prefix:
        return range(one.prompt_tokens)
    return [*range(serving.prefix), MAX_MODEL_LEN + number, *[0] * (one.prompt_tokens - serving.prefix - 1)]


def params_of(serving: ServingSetup, one: PaperRequest) -> SamplingParams | BeamSearchParams:
    """Return the parameters with which each output has exactly the workload's number of tokens."""
    if serving.beams:
        return BeamSearchParams(beam_width=serving.n, max_tokens=one.output_tokens, ignore_eos=True)
    return SamplingParams(n=serving.n, max_tokens=one.output_tokens, ignore_eos=True)


def machine_of(serving: ServingSetup, further: float | None) -> Machine:
    """Return the model's machine with the changes of this serving.

    `further` replaces FURTHER_SAMPLE or FURTHER_BEAM, the cost of a request's further sequences."""
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
    """Times of one served request, in seconds."""

    urgent: bool
    tokens: int
    """The number of output tokens of its first sequence."""
    latency: float
    first_token: float
    per_token: float


def serve(serving: ServingSetup, asked: Sequence[PaperRequest], further: float | None = None) -> ServingResult:
    """Serve these requests, each from its time of arrival on, until all have finished. `further`: see `machine_of`.

    Raises InvalidRequest if there are no requests."""
    if not asked:
        raise InvalidRequest(
            f"no request arrives within {serving.seconds:g} s at {serving.rate:g} requests/s; use a longer trace or a "
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
