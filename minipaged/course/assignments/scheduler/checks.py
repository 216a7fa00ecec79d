"""Assignment 4, `scheduler`: the choice of requests to admit, to preempt, and to resume (paper, section 4.5).

The properties use random scenes (`scenes.py`) in which some requests run and some wait, and compare the answers of the
student's scheduler with the rules. Then the real engine serves random workloads with the student's scheduler in place
of its own, on a model that checks every read: all requests have to end, with the tokens that each generates alone. Then
SmolLM2. The performance index depends on a choice that the rules leave open: the number of blocks to hold back from new
requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from hypothesis import strategies as st

from minipaged.course.assignments.block_allocator.checks import carried_allocator
from minipaged.course.assignments.scheduler.scenes import MAX_MODEL_LEN, PRICES, SchedulerScene, scenes
from minipaged.course.assignments.scheduler.session import (
    METHODS,
    Rule,
    Scenery,
    SchedulerSession,
    SchedulerSettings,
    StudentPolicy,
    counted,
)
from minipaged.course.grader.assignment import Bench, Check, Failed, Performance
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.grader.serving import Parts, check_texts, check_workloads, crowded_workloads
from minipaged.engine.engine import Engine
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.sequence import RequestState
from minipaged.events import EngineStarted, RequestArrived, StepFailed, StepStarted
from minipaged.scheduling import MakePolicy, RequestView
from minipaged.simulation.traces import TraceReplay, TraceRequest

ENGINE_WORKLOADS = 16
TRACED_REQUESTS = 80
"""The number of requests in the trace that the performance index is measured on."""

RUNNING, WAITING, SWAPPED = RequestState.RUNNING, RequestState.WAITING, RequestState.SWAPPED


# --- Properties -----------------------------------------------------------------------------------


def check_fits(bench: Bench) -> None:
    """Check `fits` for new requests of any size, in pools about as large as they need."""

    def run(drawn: tuple[SchedulerSettings, RequestView, int]) -> None:
        settings, request, more = drawn
        most = request.prompt_tokens // settings.block_size
        each = -(-(request.prompt_tokens + request.max_output_tokens - 1) // settings.block_size)
        settings = replace(settings, num_blocks=max(1, most + request.num_sequences * (each - most) + more))
        SchedulerSession(bench, settings, partial(arrival, settings, request)).fits(request)

    room = st.sampled_from([4, 4, 4, 3, 2, 1])
    settings = st.builds(SchedulerSettings, st.just(1), st.sampled_from([2, 3, 4, 1]), room, room, st.just(PRICES))
    requests = st.builds(
        RequestView,
        st.just("A"),
        st.just(0),
        num_sequences=st.sampled_from([1, 2, 3]),
        prompt_tokens=st.integers(1, 8),
        max_output_tokens=st.sampled_from([2, 1, 1, 1, 3, 4, 8]),
    )
    search(bench, st.tuples(settings, requests, st.sampled_from([0, -1, -2])), run)


def arrival(settings: SchedulerSettings, request: RequestView, message: str) -> Scenery:
    """Return the drawing and events of a request that arrives at an idle engine."""
    name, prompt = request.request_id, tuple(range(request.prompt_tokens))
    drawing = (
        f"{name}: a prompt of {counted(len(prompt), 'token')}, {counted(request.num_sequences, 'sequence')}, up to "
        f"{counted(request.max_output_tokens, 'more token')} each",
        f"pool: {' '.join('.' * settings.num_blocks)}   (blocks of {counted(settings.block_size, 'token')})",
        f"batch: {counted(settings.max_num_seqs, 'sequence')}, {counted(settings.max_num_batched_tokens, 'token')}",
    )
    events = (
        EngineStarted(settings.num_blocks, 0, settings.block_size, MAX_MODEL_LEN),
        StepStarted(1),
        RequestArrived(name, 1, prompt, request.num_sequences),
        StepFailed(1, message, (name,)),
    )
    return Scenery(drawing, events)


def property_of(ask: Callable[[SchedulerSession, SchedulerScene], object], **kinds: Any) -> Callable[[Bench], None]:
    """Return a check that calls `ask` for random scenes."""

    def run(bench: Bench, scene: SchedulerScene) -> None:
        ask(SchedulerSession(bench, scene.settings, scene.scenery), scene)

    return lambda bench: search(bench, scenes(**kinds), partial(run, bench))


def ask_share_tokens(session: SchedulerSession, scene: SchedulerScene) -> None:
    if running := scene.views(RUNNING):
        session.share_tokens(running)


check_share_tokens = property_of(
    ask_share_tokens, states=("running",), num_requests=(2, 5), pool=(20, 40), tokens=(3, 12)
)


def ask_victims(session: SchedulerSession, scene: SchedulerScene) -> None:
    """Ask for victims until one request is left."""
    running = scene.views(RUNNING)
    while len(running) > 1:
        name = session.victim(running)
        running = [view for view in running if view.request_id != name]


def ask_way_back(session: SchedulerSession, scene: SchedulerScene) -> None:
    host = scene.blocks.host_allocator
    for view in scene.views(RUNNING):
        if view.num_blocks:
            session.way_back(view, host.num_free if host else 0)


def ask_admit(*rules: Rule) -> Callable[[SchedulerSession, SchedulerScene], None]:
    def ask(session: SchedulerSession, scene: SchedulerScene) -> None:
        running, waiting = scene.views(RUNNING), scene.views(WAITING, SWAPPED)
        taken = sum(session.right.share_tokens(running).values())
        left = max(1, scene.settings.max_num_batched_tokens - taken - scene.tokens_gone)
        if waiting:
            session.admit(waiting, running, scene.blocks.num_available, left, rules)

    return ask


def check_nothing_changes(bench: Bench) -> None:
    """Check that calls change nothing: some methods are called twice, and `share_tokens` and `fits` after another
    scheduler with other sizes was made.

    `fits` and `share_tokens` are first checked with a single scheduler, as by their own tests. A mistake found there is
    not one of memory, and gets the same message as there.
    """
    check_fits(bench)
    check_share_tokens(bench)

    def run(drawn: tuple[SchedulerScene, SchedulerScene | None, set[str]]) -> None:
        scene, another, methods = drawn
        session = SchedulerSession(bench, scene.settings, scene.scenery)
        if another:
            SchedulerSession(bench, another.settings, scene.scenery, beside=session)
        running, waiting = scene.views(RUNNING), scene.views(WAITING, SWAPPED)
        if running and "share_tokens" in methods:
            session.unchanged("share_tokens", running)
            session.share_tokens(running)
        if running and "victim" in methods:
            session.unchanged("victim", running)
        if running and "way_back" in methods:
            session.unchanged("way_back", running[0], 3)
        if waiting and "admit" in methods:
            session.unchanged("admit", waiting, running, scene.blocks.num_available, 4)
        if waiting and "fits" in methods:
            session.unchanged("fits", waiting[0])
            session.fits(waiting[0])

    crowd = scenes(num_requests=(2, 4), tokens=(2, 8))
    search(bench, st.tuples(crowd, st.none(), st.sets(st.sampled_from(METHODS), min_size=1)), run)
    another = scenes(num_requests=(1, 1), pool=(1, 4))
    search(bench, st.tuples(crowd, another, st.just({"share_tokens", "fits"})), run)


# --- The engine -----------------------------------------------------------------------------------


class StudentScheduler:
    """Makes an engine's parts from the student's scheduler, and from the student's allocator if there is one."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._policy: StudentPolicy | None = None

    def make_parts(self) -> Parts:
        self._policy = None
        return Parts(allocator=carried_allocator(self._bench), policy=partial(StudentPolicy, self._bench))

    def attach(self, engine: Engine) -> None:
        self._policy = StudentPolicy.of(engine)

    def explain(self, error: Exception) -> Exception:
        """Return the failure with a script of one call, if that call fails without the engine."""
        return self._policy.shorter(error) if self._policy and isinstance(error, Failed) else error


def check_engine(bench: Bench) -> None:
    """Check that all requests end, with prefix caching, forks, beam search, chunked prompts, and cancelled requests."""
    asked, workloads = StudentScheduler(bench), islice(crowded_workloads(bench.seed), ENGINE_WORKLOADS)
    check_workloads(bench, workloads, asked.make_parts, asked.attach, asked.explain)


def check_model(bench: Bench) -> None:
    """Check that SmolLM2 writes the same texts as with the engine's own scheduler."""
    asked = StudentScheduler(bench)
    check_texts(bench, asked.make_parts, asked.attach, asked.explain)


# --- Performance ----------------------------------------------------------------------------------


def measure(bench: Bench) -> Performance:
    """Measure the tokens per second of an overloaded simulated machine, and those with the engine's own scheduler."""
    r = random.Random(bench.seed)
    requests = [
        TraceRequest(number / 4, r.randint(16, 256), 1 + int(r.expovariate(1 / 160)))
        for number in range(TRACED_REQUESTS)
    ]

    def tokens_per_second(policy: MakePolicy) -> float:
        replay = TraceReplay(requests, num_blocks=160, num_swap_blocks=160, policy=policy)
        for _ in replay:
            pass
        return replay.summary().tokens_per_second

    students, own = tokens_per_second(partial(StudentPolicy, bench)), tokens_per_second(FirstComeFirstServed)
    return Performance(students, own, "simulated tokens")


# --- The assignment -------------------------------------------------------------------------------

CHECKS: dict[str, Check] = {
    "what can never fit": check_fits,
    "the token budget": check_share_tokens,
    "first come, first served": property_of(
        ask_admit("order"), num_requests=(2, 5), pool=(-9, -1), beyond_most=True, room=(3, 8)
    ),
    "room in the batch": property_of(
        ask_admit("batch"),
        states=("running", "swapped", "swapped", "new"),
        num_sequences=(1, 2, 3),
        pool=(30, 60),
        room=(3, 6),
        tokens=(3, 9),
    ),
    "room in the pool": property_of(ask_admit("blocks"), pool=(3, 12), room=(4, 8)),
    "nobody waits for nothing": property_of(
        ask_admit("no idling"),
        states=("running", "swapped", "dropped", "new", "running", "new"),
        num_requests=(1, 3),
        pool=(-1, 0),
        beyond_most=True,
        room=(6, 12),
        tokens=(12, 30),
    ),
    "who is preempted": property_of(ask_victims, states=("running",), num_requests=(2, 5), pool=(10, 40), room=(2, 8)),
    "the way back": property_of(
        ask_way_back, states=("running",), num_requests=(2, 5), pool=(12, 40), room=(4, 8), with_costs=True
    ),
    "a question changes nothing": check_nothing_changes,
    "the engine, on a small model": check_engine,
    "SmolLM2": check_model,
}

ASSIGNMENT = described(
    "scheduler",
    CHECKS,
    part="Scheduler",
    members=("fits", "share_tokens", "victim", "way_back", "admit"),
    modules=("copy", "minipaged.scheduling"),
    builds_on=("block-allocator",),
    measure=measure,
)
