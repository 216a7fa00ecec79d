"""Traces record when the requests of a service arrived and how long they were. A simulated machine serves them again.

A trace has no texts, only (time, context tokens, generated tokens) for each request. Memory management depends on no
more than that if nothing is shared. `TraceReplay` adds the requests to a real `Engine` at their times, on the clock of
a `SimulatedRunner`, and each generates exactly the number of tokens in the trace. Prefix caching is off, because a
trace does not say which requests had a common beginning.

All times are simulated seconds and nothing is random: the same trace gives the same run, event for event. If there is
no recorded trace, `poisson_trace` makes one up; equal seeds give equal traces.
"""

from __future__ import annotations

import csv
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NoReturn

from minipaged.contracts import BlockAllocator
from minipaged.engine.engine import Engine
from minipaged.engine.policies.in_turn import InTurn, Turn
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.stats import Stats
from minipaged.errors import InvalidRequest
from minipaged.events import Listener
from minipaged.params import EngineConfig, PreemptionMode, RequestOutputKind, SamplingParams
from minipaged.scheduling import MakePolicy, Objectives, RequestView
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100, Machine, SimulatedRunner, simulated_tier

# --- Reading --------------------------------------------------------------------------------------

HEADERS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("time", "context_tokens", "generated_tokens"),
)
"""The two sets of columns that a trace may have: those of the Azure LLM inference traces (Patel et al., ISCA 2024),
where times are dates, and plain ones, where times are seconds."""
MOST_TOKENS = 10**9
"""The largest number of tokens that is accepted; a larger one is a mistake in the file."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    seconds: float
    """Time of arrival, counted from the first request of the trace."""
    context_tokens: int
    generated_tokens: int


def read_trace(path: Path) -> list[TraceRequest]:
    """Read the requests of a CSV file, in order of arrival. Raises InvalidRequest, naming the line and the mistake."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _parse(file, str(path))
    except OSError as error:
        raise InvalidRequest(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not a text file; a trace is a CSV file with a header line") from None


def _parse(lines: Iterable[str], name: str) -> list[TraceRequest]:
    expected = " or ".join(",".join(header) for header in HEADERS)
    reader = csv.DictReader(lines, strict=True)
    found: list[TraceRequest] = []
    try:
        given = reader.fieldnames
        if given is None:
            raise InvalidRequest(f"{name} is empty; a trace is a CSV file whose first line is {expected}")
        header = next((header for header in HEADERS if set(header) <= set(given)), None)
        if header is None:
            raise InvalidRequest(f"{name}, line 1: the columns are {','.join(given)}; a trace has {expected}")
        for row in reader:
            where = f"{name}, line {reader.reader.line_num}"
            time, context, generated = (_Cell(where, column, row[column]) for column in header)
            found.append(TraceRequest(time.seconds(), context.tokens(), generated.tokens()))
    except csv.Error as error:
        raise InvalidRequest(f"{name}, line {reader.reader.line_num}: not valid CSV: {error}") from None
    if not found:
        raise InvalidRequest(f"{name} has a header and no requests; give it a line for each request")
    found.sort(key=lambda request: request.seconds)
    first = found[0].seconds
    return [TraceRequest(r.seconds - first, r.context_tokens, r.generated_tokens) for r in found]


@dataclass(frozen=True, slots=True)
class _Cell:
    """One value of the file, which can be read as a time or as a number of tokens."""

    where: str
    column: str
    text: str | None
    """The value's text; None if the line is too short."""

    def seconds(self) -> float:
        """The value as seconds: a number, or a date, counted from 1970 (in UTC if it has no time zone). Digits after
        microseconds are dropped."""
        text = self._present()
        if self.column == HEADERS[0][0]:
            try:
                when = datetime.fromisoformat(text)
                return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
            except (ValueError, OverflowError):
                self._refuse("a date and a time, as in 2023-11-16 18:15:46.6805900")
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            self._refuse("seconds, 0 or more")
        return seconds

    def tokens(self) -> int:
        text = self._present()
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
        if not 1 <= number <= MOST_TOKENS:
            self._refuse(f"a whole number of tokens, 1 to {MOST_TOKENS:,}")
        return number

    def _present(self) -> str:
        if self.text is None:
            raise InvalidRequest(f"{self.where}: {self.column} is missing; every line needs all three columns")
        return self.text.strip()

    def _refuse(self, expected: str) -> NoReturn:
        raise InvalidRequest(f"{self.where}: {self.column} is {self.text!r}; it must be {expected}")


# --- Making up a trace ----------------------------------------------------------------------------


def poisson_trace(
    phases: Sequence[tuple[float, float]],
    *,
    seed: int = 0,
    context_tokens: float = 200,
    generated_tokens: float = 250,
    longest: int = 1000,
) -> list[TraceRequest]:
    """Make up independent requests: a Poisson process, in which the next request is equally likely at any moment.

    `phases`: (seconds, requests per second), one after another. Each request's two numbers of tokens are drawn from
    exponential distributions with these means, and kept between 1 and `longest`. Raises InvalidRequest for bad phases.
    """
    if not phases or any(not (0 < seconds < math.inf and 0 < rate < math.inf) for seconds, rate in phases):
        raise InvalidRequest(
            f"the phases are {list(phases)}; each needs seconds and requests a second, both above 0, as in [(60, 2.5)]"
        )
    draw = random.Random(seed)

    def tokens(mean: float) -> int:
        return min(longest, 1 + int(draw.expovariate(1 / mean)))

    made, begin = [], 0.0
    for seconds, rate in phases:
        now = begin + draw.expovariate(rate)
        while now < begin + seconds:
            made.append(TraceRequest(now, tokens(context_tokens), tokens(generated_tokens)))
            now += draw.expovariate(rate)
        begin += seconds
    return made


# --- How well a request was served ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request and when it was served, in seconds from its arrival."""

    request: TraceRequest
    first_token: float
    """TTFT, the time to the first token."""
    latency: float
    """Time to the last token."""

    @property
    def between_tokens(self) -> float:
        """TPOT, the average time per output token after the first; 0 if there is only one token."""
        return (self.latency - self.first_token) / max(1, self.request.generated_tokens - 1)


def attainment(served: Sequence[ServedRequest], objectives: Objectives) -> float:
    """The share of these requests that meet both objectives; 1 if there are no requests."""
    met = [objectives.met(one.first_token, one.between_tokens) for one in served]
    return sum(met) / len(met) if met else 1.0


# --- Serving --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles of a list of times, in seconds; all 0 for an empty list."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        """Compute the mean and the percentiles. The p-th is the smallest value that p % of the values do not exceed."""
        ordered = sorted(values)
        if not ordered:
            return cls(0, 0, 0, 0)
        p50, p90, p99 = (ordered[math.ceil(len(ordered) * p / 100) - 1] for p in (50, 90, 99))
        return cls(math.fsum(ordered) / len(ordered), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The results of a replay so far. Seconds are simulated; means are over steps."""

    served: int
    refused_too_long: int
    """Requests whose context and output together exceed `max_model_len`."""
    refused_too_large: int
    """Requests that fit into `max_model_len` but not into the pool."""
    seconds: float
    steps: int
    generated_tokens: int
    num_blocks: int
    mean_blocks_used: float
    peak_blocks_used: int
    paged_share_of_tokens: float
    """Share of the slots taken that held a token (paper, Fig. 2). The rest is internal fragmentation."""
    contiguous_share_of_tokens: float
    """Share of slots that would have held a token if every sequence had reserved `max_model_len` slots. The rest is the
    two kinds of waste below."""
    contiguous_share_reserved: float
    """Share of slots that would have been reserved for tokens that came later."""
    contiguous_share_internal: float
    """Share of slots that would have been reserved for tokens that never came."""
    mean_running: float
    """Requests that ran, on average."""
    peak_running: int
    contiguous_requests: int
    """Requests that the same memory could hold with `max_model_len` slots each."""
    mean_waiting: float
    """Requests that waited, on average, including preempted ones."""
    peak_waiting: int
    preempted_by_swap: int
    preempted_by_recompute: int
    blocks_swapped_out: int
    tokens_recomputed: int
    latency: Percentiles
    """Time from arrival to the last token."""
    first_token: Percentiles
    """Time from arrival to the first token."""
    normalized_latency: Percentiles
    """Latency of each request per generated token, in seconds: the paper's measure of serving (section 6.1)."""

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class TraceReplay:
    """Serves a trace on a real engine with a simulated machine. Iterate over it to run it, one step at a time:

        replay = TraceReplay(read_trace(Path("trace.csv")))
        for _ in replay:
            ...  # draw replay.engine, if you like
        print(replay.summary())

    `num_blocks`: None for the number that the machine's memory holds. `num_swap_blocks`: None for the same number.
    `pace`: seconds of the trace per simulated second; with 0.5 requests arrive half as fast. Requests that can never
    fit into `max_model_len` (None: the machine's) or the pool are refused and counted; all others end, if the policy is
    fair. `turn(request, now)` replaces a policy; it returns the order in which requests are served
    (`engine/policies/in_turn.py`).
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        machine: Machine = OPT_13B_ON_AN_A100,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        num_swap_blocks: int | None = None,
        preemption: PreemptionMode = "auto",
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        pace: float = 1.0,
        allocator: Callable[[int], BlockAllocator] | None = None,
        policy: MakePolicy = FirstComeFirstServed,
        turn: Callable[[RequestView, float], Turn] | None = None,
        listeners: Sequence[Listener] = (),
        debug: bool = False,
    ) -> None:
        if not 0 < pace < math.inf:
            raise InvalidRequest(
                f"pace is {pace}; it must be a number above 0 (1 is as fast as the trace was recorded)"
            )
        if num_blocks is None:
            num_blocks = machine.num_blocks(max(1, block_size))
        max_model_len = machine.max_model_len if max_model_len is None else max_model_len
        config = EngineConfig(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=max(1, max_model_len),  # the prompts are 0, 1, 2, ...
            block_size=block_size,
            num_swap_blocks=num_blocks if num_swap_blocks is None else num_swap_blocks,
            preemption=preemption,
            enable_prefix_caching=False,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            debug=debug,
        )
        self.machine = machine
        self.runner = SimulatedRunner(machine, block_size)
        if turn is not None:
            if policy is not FirstComeFirstServed:
                raise InvalidRequest("turn and policy both decide whose turn it is; give one of them")
            policy = partial(InTurn, by=turn, clock=self.runner.clock)
        self.engine = Engine(
            config,
            simulated_tier(),
            self.runner,
            allocator=allocator,
            policy=policy,
            listeners=listeners,
            clock=self.runner.clock,
        )
        self._pace = pace
        self._coming = deque(sorted(requests, key=lambda request: request.seconds))
        self._arrived: dict[str, TraceRequest] = {}
        self._refused_too_long = self._refused_too_large = 0
        self.served: list[ServedRequest] = []
        """The requests that have ended, in the order in which they did."""
        self._running_steps = self._peak_running = 0
        self._waiting_steps = self._peak_waiting = 0

    def __iter__(self) -> Iterator[None]:
        """Run until every request has ended, one step at a time."""
        engine, runner = self.engine, self.runner
        while self._coming or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():  # nothing to do before the next one arrives
                runner.now = max(runner.now, self._arrival(self._coming[0]))
            while self._coming and self._arrival(self._coming[0]) <= runner.now:
                self._add(self._coming.popleft())
            if not engine.has_unfinished_requests():
                continue  # all of them were refused
            for output in (update.output for update in engine.step() if update.output):
                request, metrics = self._arrived.pop(output.request_id), output.metrics
                arrived = self._arrival(request)
                assert metrics.first_token_time is not None
                self.served.append(
                    ServedRequest(request, metrics.first_token_time - arrived, metrics.finished_time - arrived)
                )
            self._note_queues()
            yield

    @property
    def num_coming(self) -> int:
        """The number of requests that have yet to arrive."""
        return len(self._coming)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait now, including preempted ones."""
        return len(self.engine.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.engine.scheduler.running)

    @property
    def num_served(self) -> int:
        return len(self.served)

    @property
    def num_refused(self) -> int:
        return self._refused_too_long + self._refused_too_large

    def _arrival(self, request: TraceRequest) -> float:
        return request.seconds / self._pace

    def _add(self, request: TraceRequest) -> None:
        """Add a request to the engine, or refuse it. (The engine itself would cut its output at `max_model_len`.)"""
        if request.context_tokens + request.generated_tokens > self.engine.config.max_model_len:
            self._refused_too_long += 1
            return
        params = SamplingParams(max_tokens=request.generated_tokens, ignore_eos=True)
        try:
            request_id = self.engine.add_request(
                range(request.context_tokens), params, output_kind=RequestOutputKind.FINAL_ONLY
            )
        except InvalidRequest:
            self._refused_too_large += 1
        else:
            self._arrived[request_id] = request

    def _note_queues(self) -> None:
        self._running_steps += self.num_running
        self._waiting_steps += self.num_waiting
        self._peak_running = max(self._peak_running, self.num_running)
        self._peak_waiting = max(self._peak_waiting, self.num_waiting)

    def summary(self) -> TraceSummary:
        """The results of the steps run so far."""
        stats: Stats = self.engine.stats
        config, steps, contiguous = self.engine.config, max(1, stats.steps), stats.contiguous
        taken = max(1, contiguous.taken)
        return TraceSummary(
            served=self.num_served,
            refused_too_long=self._refused_too_long,
            refused_too_large=self._refused_too_large,
            seconds=self.runner.now,
            steps=stats.steps,
            generated_tokens=stats.generated_tokens,
            num_blocks=config.num_blocks,
            mean_blocks_used=stats.block_steps / steps,
            peak_blocks_used=stats.peak_blocks_used,
            paged_share_of_tokens=stats.paged.share_of_tokens(),
            contiguous_share_of_tokens=contiguous.share_of_tokens(),
            contiguous_share_reserved=contiguous.reserved / taken,
            contiguous_share_internal=contiguous.internal_fragmentation / taken,
            mean_running=self._running_steps / steps,
            peak_running=self._peak_running,
            contiguous_requests=config.num_blocks * config.block_size // config.max_model_len,
            mean_waiting=self._waiting_steps / steps,
            peak_waiting=self._peak_waiting,
            preempted_by_swap=stats.preempted_by_swap,
            preempted_by_recompute=stats.preempted_by_recompute,
            blocks_swapped_out=stats.blocks_swapped_out,
            tokens_recomputed=stats.tokens_recomputed,
            latency=Percentiles.of(one.latency for one in self.served),
            first_token=Percentiles.of(one.first_token for one in self.served),
            normalized_latency=Percentiles.of(one.latency / one.request.generated_tokens for one in self.served),
        )
