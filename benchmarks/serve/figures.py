"""From what happened in a run to its figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.serve.run import Record, Run

LATE = 0.010
"""Seconds: where one request or chunk in a hundred was later than this by the tool's own doing, it says so."""
BUSY = 0.8
"""Of one core: a tool that takes more of it has no time to be punctual."""
KEPT_UP = 0.9
"""A server keeps up with a rate when it delivers this share of the tokens that are asked of it in the same time."""
SETTLED = 0.25
"""The first part of the arrivals, in which batches are still filling up, is left out of that share."""

OBJECTIVES: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot,
    "itl": lambda record: max(record.itl, default=None),
    "latency": lambda record: record.latency,
}
"""What can be asked of each request: `itl` is its longest pause."""


@dataclass(frozen=True)
class Spread:
    """Of a list of times, in seconds. The p-th percentile is the smallest value that p % of them do not exceed."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None where there are no values."""
        array = np.fromiter(values, dtype=float)
        if not array.size:
            return None
        p50, p95, p99 = np.percentile(array, (50, 95, 99), method="inverted_cdf").tolist()
        return cls(float(array.mean()), p50, p95, p99, float(array.max()))


@dataclass(frozen=True)
class Figures:
    """Of one run at one server. Times in seconds, from when a request should have been sent."""

    requests: int
    completed: int
    errors: dict[str, int]
    """How many requests failed, by kind."""
    seconds: float
    """From the first request to the end of the last one that completed."""
    requests_per_second: float
    """Completed."""
    output_tokens_per_second: float
    """Of those completed."""
    ttft: Spread | None
    """Time to the first token."""
    tpot: Spread | None
    """Time per output token after the first, request by request: (latency - TTFT) / (n - 1)."""
    itl: Spread | None
    """Inter-token latency: from a chunk to the next one, of all requests together."""
    latency: Spread | None
    """To the last token."""
    goodput: float | None
    """Requests a second that completed and met all objectives; None without objectives."""
    share_met: float | None
    """Of all requests, those."""
    share_delivered: float | None
    """Tokens that arrived, of those asked for, in the last three quarters of the arrivals. None: all came at once."""
    keeps_up: bool | None
    """Whether the server delivered 90 % of them, with no error, and 90 % of the requests met the objectives."""
    behind_because: list[str]
    """Which of these it did not, in words."""
    prompt_tokens: tuple[float, float]
    """The mean that was asked for, and what the server counted (0 where it does not tell), of those completed."""
    output_tokens: tuple[float, float]
    share_cached: float
    """Of the prompts' tokens, found in the server's prefix cache."""
    tokens_per_chunk: float
    """More than 1: the server sends several tokens at once, and the ITL is that of chunks."""
    send_delay: Spread | None
    """How much later than intended the tool sent a request."""
    loop_lag: Spread | None
    """How late the tool's event loop was: so late may a chunk have been read."""
    cpu_share: float
    """Of one core, that the tool took."""
    late_because: list[str]
    """What of the figures may be the tool's own doing, in words; empty: nothing that counts."""

    @classmethod
    def of(cls, run: Run, objectives: dict[str, float]) -> Figures:
        records = run.records
        done = [record for record in records if record.error is None]
        seconds = max((record.ended or 0.0 for record in done), default=run.seconds)
        tokens = sum(record.output_tokens or 0 for record in done)
        met = sum(meets(record, objectives) for record in done)
        errors = Counter(record.error for record in records if record.error)
        delivered = share_delivered(records)
        counted = sum(record.prompt_tokens or 0 for record in done)
        share_met = met / max(1, len(records)) if objectives else None
        behind = [] if delivered is None else behind_because(delivered, errors.total(), share_met)
        delays = Spread.of(record.sent - record.intended for record in records if record.sent is not None)
        lags, share = Spread.of(run.loop_lags), run.cpu_seconds / run.seconds
        at_once = delivered is None
        return cls(
            requests=len(records),
            completed=len(done),
            errors=dict(errors),
            seconds=seconds,
            requests_per_second=len(done) / seconds,
            output_tokens_per_second=tokens / seconds,
            ttft=Spread.of(record.ttft for record in done if record.ttft is not None),
            tpot=Spread.of(record.tpot for record in done if record.tpot is not None),
            itl=Spread.of(gap for record in done for gap in record.itl),
            latency=Spread.of(record.latency for record in done if record.latency is not None),
            goodput=met / seconds if objectives else None,
            share_met=share_met,
            share_delivered=delivered,
            keeps_up=None if delivered is None else not behind,
            behind_because=behind,
            prompt_tokens=(_mean([r.prompt_tokens_asked for r in done]), _mean([r.prompt_tokens or 0 for r in done])),
            output_tokens=(_mean([r.output_tokens_asked for r in done]), _mean([r.output_tokens or 0 for r in done])),
            share_cached=sum(record.cached_tokens for record in done) / max(1, counted),
            tokens_per_chunk=tokens / max(1, sum(len(record.chunks) for record in done)),
            send_delay=delays,
            loop_lag=lags,
            cpu_share=share,
            late_because=late_because(None if at_once else delays, lags, share),
        )


def meets(record: Record, objectives: dict[str, float]) -> bool:
    """Whether a request that completed met all of them. What it does not have (one token has no TPOT) it meets."""
    times = [(OBJECTIVES[name](record), limit) for name, limit in objectives.items()]
    return all(time is None or time <= limit for time, limit in times)


def share_delivered(records: list[Record]) -> float | None:
    """1 where the server keeps up, however long its answers take: as much is under way at the end of the arrivals as at
    the beginning. Past the knee, what it can do over what it is asked."""
    end = max((record.intended for record in records), default=0.0)
    if end == 0.0:
        return None
    begin = end * SETTLED
    asked = sum(record.output_tokens_asked for record in records if record.intended >= begin)
    delivered = 0.0
    for record in records:
        if record.chunks:
            tokens = (record.output_tokens or len(record.chunks)) / len(record.chunks)
            delivered += tokens * sum(begin <= chunk <= end for chunk in record.chunks)
    return delivered / asked


def behind_because(delivered: float, num_failed: int, share_met: float | None) -> list[str]:
    """What keeping up asks for and this run did not have. `share_met`: None without objectives."""
    found = []
    if delivered < KEPT_UP:
        found.append(f"{delivered:.1%} of the tokens came while they were asked for, not {KEPT_UP:.0%}")
    if num_failed:
        found.append(f"{num_failed} requests failed")
    if share_met is not None and share_met < KEPT_UP:
        found.append(f"{share_met:.1%} of the requests met the objectives, not {KEPT_UP:.0%}")
    return found


def late_because(delays: Spread | None, lags: Spread | None, cpu_share: float) -> list[str]:
    """`delays`: None where all requests were meant to be sent at once, which nobody can."""
    found = []
    if delays and delays.p99 > LATE:
        found.append(f"one request in a hundred was sent more than {delays.p99 * 1e3:.0f} ms late")
    if lags and lags.p99 > LATE:
        found.append(f"one chunk in a hundred may have been read more than {lags.p99 * 1e3:.0f} ms late")
    if cpu_share > BUSY:
        found.append(f"the tool took {cpu_share:.0%} of a core")
    return found


def parse_objective(text: str) -> tuple[str, float]:
    """`ttft=200ms` or `latency=5s`: the name, and the seconds. Raises ValueError."""
    name, _, limit = text.partition("=")
    scale = 1e-3 if limit.endswith("ms") else 1.0
    number = limit.removesuffix("ms" if limit.endswith("ms") else "s")
    try:
        seconds = float(number) * scale if limit != number else math.nan
    except ValueError:
        seconds = math.nan
    if name not in OBJECTIVES or not 0 < seconds < math.inf:
        raise ValueError(
            f"{text!r} is no objective; it is one of {', '.join(OBJECTIVES)} with a time: ttft=200ms tpot=0.05s"
        )
    return name, seconds


def _mean(values: list[int]) -> float:
    return sum(values) / max(1, len(values))
