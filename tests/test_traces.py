"""Traces on the simulated machine: every request ends, blocks are conserved, and the clock tells what it cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.engine.policies.in_turn import Turn
from minipaged.engine.policies.shortest_first import ShortestFirst
from minipaged.engine.policy import recompute_seconds, swap_seconds
from minipaged.errors import InvalidRequest
from minipaged.events import (
    Event,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    TokenGenerated,
    read_jsonl,
)
from minipaged.params import PreemptionMode
from minipaged.scheduling import Objectives, RequestView
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100, Machine, SimulatedRunner, simulated_tier
from minipaged.simulation.traces import (
    Percentiles,
    ServedRequest,
    TraceReplay,
    TraceRequest,
    attainment,
    poisson_trace,
    read_trace,
)
from minipaged.steps import BlockMoves
from tests.effort import examples

MACHINE = Machine(
    name="a machine of round figures",
    weight_bytes=1000.0,
    kv_bytes_per_token=10,
    kv_memory_bytes=10 * 64,
    max_model_len=48,
    flops_per_token=100.0,
    weight_bytes_per_second=1000.0,
    kv_bytes_per_second=500.0,
    flops_per_second=1000.0,
    link_bytes_per_second=100.0,
    seconds_per_copy=0.5,
    copies_per_block=2,
    seconds_per_step=0.25,
    seconds_per_row=0.125,
)


def run(replay: TraceReplay, most_steps: int = 20_000) -> TraceReplay:
    """To the end; a replay that does not get there breaks liveness."""
    for step, _ in enumerate(replay):
        assert step < most_steps, "liveness: the replay does not end"
    return replay


def overload(num_requests: int) -> list[TraceRequest]:
    """All at once, and more than any pool of the tests holds together."""
    return [TraceRequest(0.001 * i, context_tokens=8 + i % 5, generated_tokens=12 + i % 7) for i in range(num_requests)]


# --- Serving --------------------------------------------------------------------------------------

TRACES = st.lists(
    st.builds(TraceRequest, st.floats(0, 40), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12
)


@settings(max_examples=examples(150))
@given(
    requests=TRACES,
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_slots=st.integers(16, 96),
    num_swap_blocks=st.integers(0, 12),
    preemption=st.sampled_from(["auto", "swap", "recompute"]),
    max_num_seqs=st.sampled_from([2, 256]),
    max_num_batched_tokens=st.sampled_from([7, 2048]),
    pace=st.sampled_from([0.5, 1.0, 100.0]),
)
def test_every_request_of_a_trace_ends_with_its_length_and_gives_all_blocks_back(
    requests: list[TraceRequest],
    block_size: int,
    num_slots: int,
    num_swap_blocks: int,
    preemption: PreemptionMode,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    pace: float,
) -> None:
    """liveness, conservation, exact-references (`debug` checks them after every step)"""
    num_blocks = max(1, num_slots // block_size)
    generated: Counter[str] = Counter()
    arrived: dict[str, int] = {}

    def listen(event: Event) -> None:
        if isinstance(event, TokenGenerated):
            generated[event.request] += 1
        elif isinstance(event, RequestArrived):
            arrived[event.request] = len(event.prompt_token_ids)

    replay = run(
        TraceReplay(
            requests,
            MACHINE,
            block_size=block_size,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            preemption="auto" if num_swap_blocks == 0 else preemption,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            pace=pace,
            listeners=[listen],
            debug=True,
        )
    )
    summary = replay.summary()

    def blocks(request: TraceRequest) -> int:  # the last token is never run
        return -(-(request.context_tokens + request.generated_tokens - 1) // block_size)

    fit = [r for r in requests if r.context_tokens + r.generated_tokens <= MACHINE.max_model_len]
    served = [r for r in fit if blocks(r) <= num_blocks]
    assert (summary.served, summary.refused_too_large) == (len(served), len(fit) - len(served))
    assert summary.refused_too_long == len(requests) - len(fit)
    assert Counter((arrived[name], count) for name, count in generated.items()) == Counter(
        (r.context_tokens, r.generated_tokens) for r in served
    )
    assert summary.generated_tokens == sum(r.generated_tokens for r in served)
    manager = replay.engine.blocks
    assert manager.allocator.num_free == num_blocks
    assert manager.host_allocator is None or manager.host_allocator.num_free == num_swap_blocks
    assert summary.peak_blocks_used <= num_blocks
    assert 0 <= summary.mean_blocks_used <= summary.peak_blocks_used
    shares = summary.contiguous_share_reserved + summary.contiguous_share_internal
    assert not served or summary.contiguous_share_of_tokens + shares == pytest.approx(1)


@pytest.mark.parametrize(("preemption", "other"), [("swap", "recompute"), ("recompute", "swap")])
def test_a_trace_that_overloads_the_pool_preempts_and_still_ends(preemption: PreemptionMode, other: str) -> None:
    replay = run(TraceReplay(overload(60), MACHINE, block_size=4, num_blocks=16, preemption=preemption))
    summary = replay.summary()
    assert summary.served == 60
    assert getattr(summary, f"preempted_by_{preemption}") > 10
    assert getattr(summary, f"preempted_by_{other}") == 0
    assert summary.peak_waiting > 50
    assert summary.peak_blocks_used == 16
    assert (summary.tokens_recomputed > 0) == (preemption == "recompute")
    assert (summary.blocks_swapped_out > 0) == (preemption == "swap")


def test_with_auto_the_machines_speeds_decide_how_to_preempt() -> None:
    """Swapping here starts at a second a block; 4 tokens are computed in 0.4 seconds. A better link turns it round."""
    slow_link = run(TraceReplay(overload(40), MACHINE, block_size=4, num_blocks=16)).summary()
    fast = replace(MACHINE, link_bytes_per_second=1e9, seconds_per_copy=0.0)
    fast_link = run(TraceReplay(overload(40), fast, block_size=4, num_blocks=16)).summary()
    assert slow_link.preempted_by_recompute > 0 == slow_link.preempted_by_swap
    assert fast_link.preempted_by_swap > 0 == fast_link.preempted_by_recompute


def test_the_same_trace_gives_the_same_run_event_for_event() -> None:
    def events() -> list[str]:
        lines: list[str] = []
        listen = [lambda event: lines.append(event.to_json())]
        run(TraceReplay(overload(30), MACHINE, block_size=4, num_blocks=16, listeners=listen))
        return lines

    first = events()
    assert first == events()
    kinds = Counter(type(event) for event in read_jsonl(first))
    assert kinds[RequestFinished] == 30
    assert kinds[RequestPreempted] > 0


def test_a_replay_can_be_looked_at_between_steps() -> None:
    replay = TraceReplay(overload(20), MACHINE, block_size=4, num_blocks=16)
    seen = [(replay.num_running, replay.num_waiting, replay.num_served, replay.summary().steps) for _ in replay]
    assert [step for *_, step in seen] == list(range(1, len(seen) + 1))
    assert max(running for running, *_ in seen) == replay.summary().peak_running > 1
    assert max(waiting for _, waiting, *_ in seen) == replay.summary().peak_waiting > 1
    assert seen[-1][:3] == (0, 0, 20)


# --- The clock ------------------------------------------------------------------------------------


def by_hand(context: int, generated: int) -> list[float]:
    """The steps of a request that has MACHINE to itself: a prefill, then a token a step."""
    prefill = 0.25 + 0.125 + max(1000 / 1000, context * 100 / 1000) + 10 * context / 500
    decode = [0.25 + 0.125 + max(1000 / 1000, 100 / 1000) + 10 * (context + i) / 500 for i in range(1, generated)]
    return [prefill, *decode]


def test_the_seconds_of_a_request_alone_are_its_steps_by_hand() -> None:
    steps: list[float] = []
    listen = [lambda event: steps.append(event.seconds) if isinstance(event, StepFinished) else None]
    summary = run(TraceReplay([TraceRequest(0, 30, 5)], MACHINE, listeners=listen)).summary()
    assert by_hand(30, 5)[:2] == pytest.approx([0.375 + 3.0 + 0.6, 0.375 + 1.0 + 0.62])  # arithmetic, then memory
    assert steps == pytest.approx(by_hand(30, 5))
    assert summary.seconds == summary.latency.p99 == pytest.approx(sum(by_hand(30, 5)))
    assert summary.first_token.mean == pytest.approx(by_hand(30, 5)[0])
    assert summary.normalized_latency.mean == pytest.approx(sum(by_hand(30, 5)) / 5)
    assert summary.tokens_per_second == pytest.approx(5 / sum(by_hand(30, 5)))


@pytest.mark.parametrize("pace", [1.0, 0.25])
def test_the_clock_waits_for_the_next_arrival_when_there_is_nothing_to_do(pace: float) -> None:
    summary = run(TraceReplay([TraceRequest(0, 10, 3), TraceRequest(500, 10, 3)], MACHINE, pace=pace)).summary()
    alone = sum(by_hand(10, 3))
    assert summary.latency == Percentiles(*[pytest.approx(alone)] * 4)
    assert summary.seconds == pytest.approx(500 / pace + alone)
    assert summary.steps == 6


def test_a_request_that_comes_within_a_step_waits_for_its_end_and_its_latency_counts_from_its_arrival() -> None:
    summary = run(TraceReplay([TraceRequest(0, 10, 1), TraceRequest(1, 10, 1)], MACHINE)).summary()
    [step] = by_hand(10, 1)
    assert step > 1
    assert summary.latency.p50 == pytest.approx(step)
    assert summary.latency.p99 == pytest.approx(2 * step - 1)


def test_moving_blocks_costs_seconds() -> None:
    runner = SimulatedRunner(MACHINE, block_size=4)
    runner.move(BlockMoves(swap_out=[(0, 0), (1, 1)], swap_in=[(5, 5)]))
    assert runner.clock() == pytest.approx(3 * (2 * 0.5 + 4 * 10 / 100))
    assert swap_seconds(runner.costs(), 3) == pytest.approx(2 * runner.clock())
    before = runner.clock()
    runner.move(BlockMoves(copy=[(0, 1)]))
    assert runner.clock() - before == pytest.approx(2 * 4 * 10 / 500)
    assert recompute_seconds(runner.costs(), 30) == pytest.approx(3.0)


def test_the_papers_machine_has_the_papers_sizes() -> None:
    """Section 3 and Table 1: 800 KB a token, 15.7 thousand slots."""
    assert OPT_13B_ON_AN_A100.kv_bytes_per_token == 800 * 1024
    assert 15_700 <= OPT_13B_ON_AN_A100.num_blocks(16) * 16 < 15_800
    assert recompute_seconds(OPT_13B_ON_AN_A100.costs(block_size=16), 7620) == pytest.approx(1)


def test_percentiles_are_values_of_the_list() -> None:
    assert Percentiles.of(range(1, 101)) == Percentiles(50.5, 50, 90, 99)
    assert Percentiles.of([7.0]) == Percentiles(7, 7, 7, 7)
    assert Percentiles.of([]) == Percentiles(0, 0, 0, 0)


@pytest.mark.parametrize("pace", [0.0, -1.0, float("nan"), float("inf")])
def test_a_pace_that_is_none_is_refused(pace: float) -> None:
    with pytest.raises(InvalidRequest, match="pace is"):
        TraceReplay(overload(1), MACHINE, pace=pace)


# --- Making one up --------------------------------------------------------------------------------


def test_a_made_up_trace_has_its_rate_its_phases_and_its_lengths() -> None:
    made = poisson_trace([(400, 5.0), (100, 1.0)], seed=3, context_tokens=100, generated_tokens=40, longest=200)
    times = [one.seconds for one in made]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 500
    assert sum(time < 400 for time in times) == pytest.approx(2000, rel=0.1)
    assert sum(time >= 400 for time in times) == pytest.approx(100, rel=0.3)
    gaps = [after - before for before, after in pairwise(time for time in times if time < 400)]
    assert mean(gap > 0.2 for gap in gaps) == pytest.approx(math.exp(-1), abs=0.03), "the mark of a Poisson process"
    assert {1, 200} <= {one.context_tokens for one in made} <= set(range(1, 201))
    assert mean(one.generated_tokens for one in made) == pytest.approx(40, rel=0.1)


def test_a_made_up_trace_is_the_same_for_the_same_seed() -> None:
    assert (
        poisson_trace([(20, 2.0)], seed=1) == poisson_trace([(20, 2.0)], seed=1) != poisson_trace([(20, 2.0)], seed=2)
    )


@pytest.mark.parametrize("phases", [[], [(0, 1)], [(10, 0)], [(10, -1)], [(math.inf, 1)], [(10, math.nan)]])
def test_phases_without_requests_or_end_are_refused(phases: list[tuple[float, float]]) -> None:
    with pytest.raises(InvalidRequest, match=r"each needs seconds and requests a second, both above 0, as in \[\(60"):
        poisson_trace(phases)


# --- How well a request was served ----------------------------------------------------------------


def test_times_are_those_of_the_steps_and_objectives_bind_both() -> None:
    """One request of 3 + 5 tokens alone: a step of its prompt, and four more."""
    replay = run(TraceReplay([TraceRequest(2.0, 3, 5)], MACHINE))
    [served] = replay.served
    first, others = MACHINE.step_seconds(1, 3, 3), [MACHINE.step_seconds(1, 1, 3 + n) for n in (1, 2, 3, 4)]
    assert served.first_token == pytest.approx(first)
    assert served.latency == pytest.approx(first + sum(others))
    assert served.between_tokens == pytest.approx(sum(others) / 4)
    for late, stutters in ((0, 0), (1, 0), (0, 1), (1, 1)):
        objectives = Objectives(served.first_token * (1 - late / 2), served.between_tokens * (1 - stutters / 2))
        assert attainment([served], objectives) == (not late and not stutters)


def test_of_a_single_token_there_is_nothing_between_and_of_no_requests_all_are_served() -> None:
    [served] = run(TraceReplay([TraceRequest(0.0, 3, 1)], MACHINE)).served
    assert served.between_tokens == 0
    assert attainment([], Objectives(0.0, 0.0)) == 1
    assert attainment([served] * 3 + [ServedRequest(served.request, 1e9, 1e9)], Objectives(1e6, 0.0)) == 0.75


# --- Any order --------------------------------------------------------------------------------------


def first_tokens(replay: TraceReplay) -> list[int]:
    """Of requests with different prompts, in which order they had their first tokens: the prompts' lengths."""
    arrived = min(one.request.seconds for one in replay.served)
    ordered = sorted(replay.served, key=lambda one: one.request.seconds - arrived + one.first_token)
    return [one.request.context_tokens for one in ordered]


CROWD = [TraceRequest(number / 1000, tokens, 4) for number, tokens in enumerate((30, 20, 40, 10))]


@pytest.mark.parametrize(
    ("turn", "order"),
    [
        (lambda request, now: request.arrival, [30, 20, 40, 10]),
        (lambda request, now: -request.arrival, [30, 10, 40, 20]),
        (lambda request, now: request.prompt_tokens, [30, 10, 20, 40]),
        (lambda request, now: (request.prompt_tokens > 15, -request.prompt_tokens), [30, 10, 40, 20]),
        (lambda request, now: 7, [30, 20, 40, 10]),
    ],
)
def test_requests_come_in_when_it_is_their_turn(turn: Callable[[RequestView, float], Turn], order: list[int]) -> None:
    """The first finds nobody before it. One runs at a time, and the others arrive within its first step."""
    assert MACHINE.step_seconds(1, 30, 30) > 0.003
    assert first_tokens(run(TraceReplay(CROWD, MACHINE, turn=turn, max_num_seqs=1))) == order


def test_who_waits_is_shown_with_the_time_at_which_it_arrived() -> None:
    """Each in a step of its own; the first is still running then."""
    crowd = [replace(request, seconds=2000 * request.seconds) for request in CROWD]
    replay = TraceReplay(crowd, MACHINE, turn=lambda request, now: -request.arrival_time, max_num_seqs=1)
    assert first_tokens(run(replay)) == [30, 10, 40, 20]


def test_a_turn_beside_a_policy_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="give one of them"):
        TraceReplay(CROWD, MACHINE, turn=lambda request, now: 0, policy=ShortestFirst)


def test_no_token_is_drawn_on_a_simulated_machine() -> None:
    with pytest.raises(InvalidRequest, match="it has no logits"):
        simulated_tier().sample(None, [])


def test_whose_turn_is_last_makes_room_and_the_time_is_the_engines() -> None:
    asked: list[float] = []
    events: list[Event] = []

    def turn(request: RequestView, now: float) -> float:
        asked.append(now - request.arrival_time)
        return -request.arrival

    crowd = [TraceRequest(0.0, 8, 24), TraceRequest(0.001, 8, 24)]
    replay = run(TraceReplay(crowd, MACHINE, block_size=4, num_blocks=12, turn=turn, listeners=[events.append]))
    preempted = [event.request for event in events if isinstance(event, RequestPreempted)]
    assert set(preempted) == {next(event.request for event in events if isinstance(event, RequestArrived))}
    assert all(waited >= 0 for waited in asked)
    assert max(asked) <= replay.runner.now


# --- Reading --------------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-17 00:00:00.0000000,879,55"""
PLAIN = "time,context_tokens,generated_tokens\n10.5,374,44\n14.8,396,109\n20663.8,879,55\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("text", [AZURE, "\ufeff" + PLAIN, PLAIN.replace("\n", "\n\n")])
def test_a_trace_is_read_with_its_times_from_the_first_request_on(tmp_path: Path, text: str) -> None:
    requests = read_trace(write(tmp_path, text))
    assert [(r.context_tokens, r.generated_tokens) for r in requests] == [(374, 44), (396, 109), (879, 55)]
    assert [r.seconds for r in requests] == pytest.approx([0, 4.3, 20653.3], abs=0.05)


def test_columns_may_come_in_any_order_and_lines_too(tmp_path: Path) -> None:
    text = "model,generated_tokens,time,context_tokens\nx,1,9,2\nx,3,4.5,4\n"
    assert read_trace(write(tmp_path, text)) == [TraceRequest(0, 4, 3), TraceRequest(4.5, 2, 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv is empty; .* TIMESTAMP,ContextTokens,GeneratedTokens or time,context_tokens,generated_tokens"),
        ("time,context_tokens\n1,2\n", "line 1: the columns are time,context_tokens; a trace has "),
        ("Time,Context_tokens,generated_tokens\n1,2,3\n", "line 1: the columns are"),
        ("time,context_tokens,generated_tokens\n", "has a header and no requests"),
        (PLAIN + "1,2\n", "line 5: generated_tokens is missing; every line needs all three"),
        (PLAIN + "x,2,3\n", "line 5: time is 'x'; it must be seconds, 0 or more"),
        (PLAIN + "\n\nx,2,3\n", "line 7: time is 'x'"),
        (PLAIN + "-1,2,3\n", "line 5: time is '-1'; it must be seconds, 0 or more"),
        (PLAIN + "nan,2,3\n", "line 5: time is 'nan'"),
        (PLAIN + "inf,2,3\n", "line 5: time is 'inf'"),
        (PLAIN + "1,-2,3\n", "line 5: context_tokens is '-2'; it must be a whole number of tokens, 1 to "),
        (PLAIN + "1,2.5,3\n", r"line 5: context_tokens is '2\.5'; it must be a whole number"),
        (PLAIN + "1,2,0\n", "line 5: generated_tokens is '0'; it must be a whole number of tokens, 1 to "),
        (PLAIN + "1,2,\n", "line 5: generated_tokens is ''"),
        (PLAIN + "1,²,3\n", "line 5: context_tokens is '²'"),
        (PLAIN + "1,9999999999,3\n", "line 5: context_tokens is '9999999999'; .* 1 to 1,000,000,000"),
        (AZURE + "\r\nyesterday,1,2\r\n", "line 5: TIMESTAMP is 'yesterday'; it must be a date and a time, as in "),
        (AZURE + "\r\n3.5,1,2\r\n", r"line 5: TIMESTAMP is '3\.5'; it must be a date and a time"),
        (PLAIN + '"1,2,3\n', "line 5: not valid CSV"),
    ],
)
def test_a_trace_with_a_mistake_is_refused_by_line_and_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_trace(write(tmp_path, text))


def test_a_trace_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InvalidRequest, match="binary is not a text file"):
        read_trace(tmp_path / "binary")
    with pytest.raises(InvalidRequest, match=r"cannot read the trace .*: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match=r"cannot read the trace .*: Is a directory"):
        read_trace(tmp_path)
