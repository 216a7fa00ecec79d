"""The trace scene: thousands of requests of a real service against a simulated machine (paper, section 6).

The other scenes show single requests; this one shows numbers: the use of the pool, the length of the queue, the number
of preemptions, and the memory that the same load would waste if every request reserved `max_model_len` slots. The
engine is the real one; it runs on the simulated machine of `minipaged/simulation/simulated.py`.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from minipaged.contracts import BlockAllocator
from minipaged.demo.player import NextScene, Player, Quit
from minipaged.demo.recording import Screencast
from minipaged.demo.show import make_console, player
from minipaged.demo.terminal import is_live
from minipaged.demo.view import Caption
from minipaged.errors import InvalidRequest
from minipaged.replay.timeline import Timeline
from minipaged.simulation.traces import TraceReplay, TraceSummary, read_trace

WIDTH = 80
BAR_CELLS = 20
ROWS = 12
"""The number of lines printed while the trace runs."""
END = object()
"""A marker for the end of the steps."""


def play_trace(
    trace: Path,
    *,
    num_requests: int,
    pace: float = 1.0,
    block_size: int | None = None,
    num_blocks: int | None = None,
    allocator: Callable[[int], BlockAllocator] | None = None,
    speed: float | None = None,
    color: bool = True,
    record: Path | None = None,
    json_output: bool = False,
) -> TraceSummary:
    """Replay the first `num_requests` of the trace, print the progress, and return a summary.

    A terminal shows the run live, as fast as the engine or at the given `speed`, and then the summary. `json_output`:
    print only the summary, as JSON. Raises InvalidRequest if the trace cannot be read or a size is out of range.
    """
    if json_output and record:
        raise InvalidRequest("--record draws the trace, but --json prints only its summary; choose one")
    if num_requests < 1:
        raise InvalidRequest(f"requests is {num_requests}; it must be 1 or more")
    requests = read_trace(trace)[:num_requests]
    replay = TraceReplay(
        requests,
        block_size=16 if block_size is None else block_size,
        num_blocks=num_blocks,
        allocator=allocator,
        pace=pace,
    )
    started = time.perf_counter()
    if json_output:
        for _ in replay:
            pass
        print(json.dumps(asdict(replay.summary()), indent=2))
        return replay.summary()
    span = requests[-1].seconds / pace
    due, queue_at_last_arrival, steps = 1, 0, iter(replay)

    def advance() -> bool:
        nonlocal queue_at_last_arrival
        if replay.num_coming:
            queue_at_last_arrival = replay.num_waiting
        return next(steps, END) is not END

    console = make_console(color=color)
    if is_live(sys.stdout, console):
        recording = Screencast(record) if record else None
        try:
            with player(console, lambda token_ids: "", speed or 1.0, recording) as one:
                assert one is not None
                _watch(one, replay, advance, paced=speed is not None)
        except (NextScene, Quit):
            return replay.summary()
    elif record:
        raise InvalidRequest("--record with --scene trace needs a terminal, and this is none; leave --record out")
    else:
        print(*_opening(replay, len(requests), span), sep="\n", flush=True)
    while advance():
        if replay.num_served + replay.num_refused >= due * len(requests) / ROWS:
            print(_row(replay), flush=True)
            due = (replay.num_served + replay.num_refused) * ROWS // len(requests) + 1
    summary = replay.summary()
    print(*_closing(replay, summary, time.perf_counter() - started), sep="\n", flush=True)
    if span and queue_at_last_arrival > summary.peak_running:
        keeps_up = 0.9 * pace * span / summary.seconds
        print(
            *_wrap(
                f"=> Requests came faster than this machine serves them: {queue_at_last_arrival:,} were waiting when "
                f"the last one came. With --pace {keeps_up:.2g} it would about keep up."
            ),
            sep="\n",
        )
    return summary


def _watch(one: Player, replay: TraceReplay, advance: Callable[[], bool], *, paced: bool) -> None:
    """Show the replay live. The trace has no words, so none are shown."""
    timeline = Timeline()
    replay.engine.listeners.append(timeline.append)
    watch = "Watch the pool: it fills until a block is missing, and then the latest to come is preempted (section 4.5)."
    one.caption = Caption("A trace on a simulated machine", watch)
    one.play(timeline, advance, paced=paced)
    one.close((_waste(replay, replay.summary()),))


def _opening(replay: TraceReplay, num_requests: int, span: float) -> Iterator[str]:
    config, machine = replay.engine.config, replay.machine
    yield from _wrap(
        f"{num_requests:,} requests of the trace, which arrive within {span:,.0f} s, on the real engine and a "
        f"simulated machine ({machine.name}): only its costs are computed. Its pool has {config.num_blocks:,} blocks "
        f"of {config.block_size} tokens. Watch the pool: it fills until a block is missing, and then the latest to "
        "come is preempted (section 4.5)."
    )
    yield ""
    numbers = f"{'second':>8} {'served':>7} {'waiting':>8} {'running':>8}"
    yield f"{numbers}  {'blocks used':<{BAR_CELLS + 7}} {'preempted':>10}"


def _row(replay: TraceReplay) -> str:
    stats = replay.engine.stats
    share = replay.engine.blocks.num_used / stats.blocks_total
    bar = ("#" * round(share * BAR_CELLS)).ljust(BAR_CELLS, ".")
    preempted = stats.preempted_by_swap + stats.preempted_by_recompute
    return (
        f"{replay.runner.now:>8.0f} {replay.num_served:>7} {replay.num_waiting:>8} {replay.num_running:>8}  "
        f"{bar} {share:>5.0%}  {preempted:>10}"
    )


def _closing(replay: TraceReplay, s: TraceSummary, wall_seconds: float) -> Iterator[str]:
    config = replay.engine.config
    yield ""
    yield from _wrap(
        f"Served {s.served:,} requests and {s.generated_tokens:,} tokens in {s.seconds:,.0f} s, "
        f"{s.tokens_per_second:,.0f} tokens/s ({s.steps:,} steps; simulated in {wall_seconds:.1f} s)."
    )
    if replay.num_refused:
        yield from _wrap(
            f"Refused {s.refused_too_long:,} longer than max_model_len ({config.max_model_len}) and "
            f"{s.refused_too_large:,} larger than the pool."
        )
    yield from _wrap(
        f"Blocks used: {s.mean_blocks_used:,.0f} of {s.num_blocks:,} in the mean, {s.peak_blocks_used:,} at most. "
        f"Requests in a batch: {s.mean_running:.1f}, {s.peak_running} at most; waiting: {s.mean_waiting:.1f}, "
        f"{s.peak_waiting} at most."
    )
    yield from _wrap(
        f"Preempted {s.preempted_by_swap:,} times by swapping ({s.blocks_swapped_out:,} blocks copied out) and "
        f"{s.preempted_by_recompute:,} times by recomputing ({s.tokens_recomputed:,} tokens)."
    )
    for name, times, unit in (
        ("to the last token", s.latency, "s"),
        ("to the first token", s.first_token, "s"),
        ("normalized", s.normalized_latency, "s/token"),
    ):
        figures = ", ".join(f"{label} {_short(seconds)}" for label, seconds in asdict(times).items())
        yield f"Latency {name + ':':<20}{figures} {unit}"
    yield from _wrap(f"=> {_waste(replay, s)}")


def _waste(replay: TraceReplay, s: TraceSummary) -> str:
    if not s.served:
        return "Nothing was served, so nothing was measured."
    return (
        f"Of the memory it took, paging wasted {1 - s.paged_share_of_tokens:.1%}, the ends of last blocks. Had every "
        f"request reserved {replay.engine.config.max_model_len} slots, {s.contiguous_share_reserved:.1%} would have "
        f"waited for tokens to come and {s.contiguous_share_internal:.1%} for tokens that never came; in the paper, "
        f"earlier systems wasted 61.8 % to 79.6 % (Fig. 2). The pool has room for {s.contiguous_requests} such "
        f"requests; up to {s.peak_running} ran."
    )


def _short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="   " if text.startswith("=>") else "")
