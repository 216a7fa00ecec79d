"""Assignment 4, `scheduler`: who is admitted, who is preempted, and how they come back (paper, section 4.5).

The properties are moments that Hypothesis makes up (`scheduler_scenes.py`): some requests run, some wait, and the
student's scheduler is asked about them. Then the real engine serves random workloads with the student's scheduler in
place of its own, on a model that checks every read: all requests have to end, with the tokens that each generates
alone. Then SmolLM2. The performance index is about what the rules leave open: how many blocks to hold back from
newcomers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from minipaged.contracts import BlockAllocator
from minipaged.course.assignments.block_allocator.checks import PROMPTS, RemoteAllocator
from minipaged.course.assignments.scheduler.scenes import MAX_MODEL_LEN, PRICES, Scene, scenes
from minipaged.course.assignments.scheduler.session import (
    METHODS,
    Rule,
    Scenery,
    Session,
    Settings,
    StudentPolicy,
    counted,
)
from minipaged.course.grader.assignment import Assignment, Bench, Failed, Failure, Performance, Test
from minipaged.course.grader.search import search
from minipaged.course.sandbox.contract import StudentError
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.sequence import RequestState
from minipaged.errors import Invariant, InvariantViolation
from minipaged.events import EngineStarted, Event, RequestArrived, StepFailed, StepStarted
from minipaged.params import SamplingParams
from minipaged.scheduling import MakePolicy, RequestView
from minipaged.testing.plain_model import PlainModel
from minipaged.testing.workloads import Run, Workload, random_workload
from minipaged.traces import TraceReplay, TraceRequest

if TYPE_CHECKING:
    from minipaged.llm import LLM

ENGINE_WORKLOADS = 16
TRACED_REQUESTS = 80
"""Of the trace that the performance index is about."""

RUNNING, WAITING, SWAPPED = RequestState.RUNNING, RequestState.WAITING, RequestState.SWAPPED


# --- Properties -----------------------------------------------------------------------------------


def check_fits(bench: Bench) -> None:
    """New requests of any size; pools about as large as they need."""

    def run(drawn: tuple[Settings, RequestView, int]) -> None:
        settings, request, more = drawn
        bench.process.forget()
        most = request.prompt_tokens // settings.block_size
        each = -(-(request.prompt_tokens + request.max_output_tokens - 1) // settings.block_size)
        settings = replace(settings, num_blocks=max(1, most + request.num_sequences * (each - most) + more))
        Session(bench, settings, partial(arrival, settings, request)).fits(request)

    room = st.sampled_from([4, 4, 4, 3, 2, 1])
    settings = st.builds(Settings, st.just(1), st.sampled_from([2, 3, 4, 1]), room, room, st.just(PRICES))
    requests = st.builds(
        RequestView,
        st.just("A"),
        st.just(0),
        num_sequences=st.sampled_from([1, 2, 3]),
        prompt_tokens=st.integers(1, 8),
        max_output_tokens=st.sampled_from([2, 1, 1, 1, 3, 4, 8]),
    )
    search(bench, st.tuples(settings, requests, st.sampled_from([0, -1, -2])), run)


def arrival(settings: Settings, request: RequestView, message: str) -> Scenery:
    """A request that comes to an engine where nobody else is."""
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


def property_of(ask: Callable[[Session, Scene], object], **kinds: Any) -> Callable[[Bench], None]:
    """A check that asks about such scenes."""

    def check(bench: Bench) -> None:
        def run(scene: Scene) -> None:
            bench.process.forget()
            ask(Session(bench, scene.settings, scene.scenery), scene)

        search(bench, scenes(**kinds), run)

    return check


def ask_share_tokens(session: Session, scene: Scene) -> None:
    if running := scene.views(RUNNING):
        session.share_tokens(running)


check_share_tokens = property_of(
    ask_share_tokens, states=("running",), num_requests=(2, 5), pool=(20, 40), tokens=(3, 12)
)


def ask_victims(session: Session, scene: Scene) -> None:
    """Until one is left, as when ever more blocks are short."""
    running = scene.views(RUNNING)
    while len(running) > 1:
        name = session.victim(running)
        running = [view for view in running if view.request_id != name]


def ask_way_back(session: Session, scene: Scene) -> None:
    host = scene.blocks.host_allocator
    for view in scene.views(RUNNING):
        if view.num_blocks:
            session.way_back(view, host.num_free if host else 0)


def ask_admit(*rules: Rule) -> Callable[[Session, Scene], None]:
    def ask(session: Session, scene: Scene) -> None:
        running, waiting = scene.views(RUNNING), scene.views(WAITING, SWAPPED)
        taken = sum(session.right.share_tokens(running).values())
        left = max(1, scene.settings.max_num_batched_tokens - taken - scene.tokens_gone)
        if waiting:
            session.admit(waiting, running, scene.blocks.num_available, left, rules)

    return ask


def check_nothing_changes(bench: Bench) -> None:
    """Some of the questions, each twice; and those that depend on the sizes, with another scheduler made in between.

    Whether those two are answered right by one scheduler alone is asked first, as other tests ask: what is wrong from
    the start has nothing to do with memory, and is told as it is there.
    """
    check_fits(bench)
    check_share_tokens(bench)

    def run(drawn: tuple[Scene, Scene | None, set[str]]) -> None:
        scene, another, methods = drawn
        bench.process.forget()
        session = Session(bench, scene.settings, scene.scenery)
        if another:
            Session(bench, another.settings, scene.scenery, beside=session)
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


def crowded_workloads(seed: int) -> Iterator[tuple[int, Workload]]:
    """Random workloads in which the engine's own scheduler preempts; how they come back is the scheduler's choice."""
    for number in count(1000 * seed):
        workload = random_workload(number)
        workload = replace(workload, config=replace(workload.config, preemption="auto"))
        run = Run(workload, model=PlainModel())
        run.to_the_end()
        if run.happened["preempted by swap"] + run.happened["preempted by recompute"]:
            yield number, workload


def allocator_of(bench: Bench) -> Callable[[int], BlockAllocator] | None:
    """The student's own, if one was brought along."""
    carried = bench.carried_part("block-allocator")
    return (lambda num_blocks: RemoteAllocator(bench, num_blocks, carried)) if carried else None


def check_engine(bench: Bench) -> None:
    """Prefix caching, forks, beam search, chunks of prompts, cancelled requests: all that waits and runs, ends."""
    for number, workload in islice(crowded_workloads(bench.seed), ENGINE_WORKLOADS):
        bench.process.forget()
        events: list[Event] = []
        policy = None
        try:
            allocator, own = allocator_of(bench), partial(StudentPolicy, bench)
            run = Run(workload, allocator=allocator, policy=own, listeners=[events.append], model=PlainModel())
            policy = StudentPolicy.of(run.engine)
            run.to_the_end()
            run.check_outputs()
            run.check_nothing_leaked()
        except Exception as error:
            raise in_engine(error, policy, f"in the engine, workload {number}", events) from None


def in_engine(error: Exception, policy: StudentPolicy | None, where: str, events: list[Event]) -> Failed:
    """What went wrong while an engine used the part, with the engine's events up to there."""
    if isinstance(error, Failed):
        failure = policy.shorter(error).failure if policy else error.failure
    else:
        invariant = error.invariant if isinstance(error, InvariantViolation) else None
        known = isinstance(error, InvariantViolation | StudentError)
        failure = Failure(str(error) if known else f"{type(error).__name__}: {error}", invariant)
    message = f"{where}: {failure.message}"
    if events and isinstance(events[-1], StepFailed):
        events[-1] = replace(events[-1], error=message)
    else:
        events.append(StepFailed(0, message, ()))
    return Failed(replace(failure, message=message, events=tuple(events)))


# --- SmolLM2 --------------------------------------------------------------------------------------


CROWDED: dict[str, Any] = {"block_size": 4, "num_blocks": 12, "num_swap_blocks": 12, "max_model_len": 64}
"""Of an LLM: a pool that is too small for all of `texts` at once."""


def texts(llm: LLM, seed: int) -> list[list[tuple[int, ...]]]:
    """The tokens of a few samples."""
    assert llm.tokenizer
    prompts = [llm.tokenizer.encode(prompt)[:15] for prompt in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(n=2, temperature=0.8, seed=seed, max_tokens=8))
    return [[tuple(one.token_ids) for one in output.outputs] for output in outputs]


def check_model(bench: Bench) -> None:
    """The same texts as with the engine's own scheduler."""
    from minipaged.llm import LLM, LoadedModel

    loaded = LoadedModel.load(bench.model, "reference")
    events: list[Event] = []
    expected = texts(LLM(loaded, **CROWDED), bench.seed)
    policy = None
    try:
        allocator, own = allocator_of(bench), partial(StudentPolicy, bench)
        llm = LLM(loaded, allocator=allocator, scheduling_policy=own, listeners=[events.append], **CROWDED)
        policy = StudentPolicy.of(llm.engine)
        found = texts(llm, bench.seed)
    except Exception as error:
        raise in_engine(error, policy, "with SmolLM2", events) from None
    if found != expected:
        raise Failed(Failure(f"SmolLM2's tokens are {found!r}; they should be {expected!r}", events=tuple(events)))


# --- How well it serves ---------------------------------------------------------------------------


def measure(bench: Bench) -> Performance:
    """Tokens a second of a simulated machine that is given more than it can hold, beside the engine's own scheduler."""
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

ASSIGNMENT = Assignment(
    name="scheduler",
    title="Scheduler: admission and preemption",
    part="Scheduler",
    members=("fits", "share_tokens", "victim", "way_back", "admit"),
    cap=70,
    modules=("copy", "minipaged.scheduling"),
    builds_on=("block-allocator",),
    measure=measure,
    tests=(
        Test(
            name="what can never fit",
            points=10,
            invariant=Invariant.LIVENESS,
            meaning="A request that the whole pool could not hold, or the largest batch, is refused at once; if it "
            "waited, it would wait for ever, and all that came after it too.",
            hint="Draw the block tables of a request with two sequences when they are longest. Which blocks do both "
            "have in common for sure, and which token never gets a slot?",
            check=check_fits,
        ),
        Test(
            name="the token budget",
            points=10,
            invariant=Invariant.LIVENESS,
            meaning="Those that decode get their tokens first, or a long prompt would hold them up; what is left of "
            "the batch goes to the prompts, in order of arrival, and a prompt that is longer runs in chunks.",
            hint="Do it by hand for a batch of 8 tokens, with two requests that decode and two prompts of 5.",
            check=check_share_tokens,
        ),
        Test(
            name="first come, first served",
            points=10,
            invariant=Invariant.LIVENESS,
            meaning="Nobody overtakes: if somebody has to wait, so do all that arrived later, even if they would fit. "
            "A large request would otherwise see small ones go past it for ever.",
            hint="What does your loop do after the first request for which there is no room? And which request is the "
            "first: is the list in order of arrival?",
            check=property_of(ask_admit("order"), num_requests=(2, 5), pool=(-9, -1), beyond_most=True, room=(3, 8)),
        ),
        Test(
            name="room in the batch",
            points=10,
            invariant=None,
            meaning="A request comes in with all of its sequences or not at all. The batch has room for max_num_seqs "
            "sequences and max_num_batched_tokens tokens, and each that runs takes at least one token.",
            hint="What do those that you admitted a moment ago take away from those that come after them? And how many "
            "tokens does a request need that decodes with three sequences?",
            check=property_of(
                ask_admit("batch"),
                states=("running", "swapped", "swapped", "new"),
                num_sequences=(1, 2, 3),
                pool=(30, 60),
                room=(3, 6),
                tokens=(3, 9),
            ),
        ),
        Test(
            name="room in the pool",
            points=10,
            invariant=Invariant.CONSERVATION,
            meaning="Nobody is admitted whose blocks are not there: the blocks of all that come in together have to be "
            "free.",
            hint="Two requests that need three blocks each, and five are free: who comes in?",
            check=property_of(ask_admit("blocks"), pool=(3, 12), room=(4, 8)),
        ),
        Test(
            name="nobody waits for nothing",
            points=10,
            invariant=Invariant.LIVENESS,
            meaning="You may hold back blocks for those that run. But when nothing runs, the first comes in, or nobody "
            "ever would; and so does everybody for whom there is room whatever the others come to need.",
            hint="What does your admit return when nothing runs at all? Can those that run still come to need all "
            "that you hold back for them? And is a prompt that is longer than the tokens left a reason to wait?",
            check=property_of(
                ask_admit("no idling"),
                states=("running", "swapped", "dropped", "new", "running", "new"),
                num_requests=(1, 3),
                pool=(-1, 0),
                beyond_most=True,
                room=(6, 12),
                tokens=(12, 30),
            ),
        ),
        Test(
            name="who is preempted",
            points=10,
            invariant=Invariant.LIVENESS,
            meaning="When blocks are short, the latest arrival makes room. So the oldest always gets on, it ends some "
            "day, and preempting comes to an end.",
            hint="If victims are chosen by anything else, can two requests take turns in preempting each other?",
            check=property_of(ask_victims, states=("running",), num_requests=(2, 5), pool=(10, 40), room=(2, 8)),
        ),
        Test(
            name="the way back",
            points=10,
            invariant=None,
            meaning="Swapping pays for bytes and for each copy that is started, on the way out and on the way in; "
            "recomputing pays for tokens. Whichever costs less is right, if the host has room for the blocks.",
            hint="Work out both by hand for one block. Which of the costs do not depend on how large a block is, and "
            "how often is each of them paid?",
            check=property_of(
                ask_way_back, states=("running",), num_requests=(2, 5), pool=(12, 40), room=(4, 8), with_costs=True
            ),
        ),
        Test(
            name="a question changes nothing",
            points=5,
            invariant=Invariant.ATOMIC_FAILURE,
            meaning="The engine may ask the same again, or ask and then decide otherwise. The answer depends on what "
            "is asked and on what the scheduler was made with, and nothing that it was given is changed.",
            hint="What do you keep in self after __init__, or in the class? And do you take anything out of a list "
            "that you were given?",
            check=check_nothing_changes,
        ),
        Test(
            name="the engine, on a small model",
            points=10,
            invariant=Invariant.LIVENESS,
            meaning="Every request that is admitted ends, whoever was preempted on the way, and with the same tokens "
            "as alone.",
            hint="The engine asks as the tests above do, with more requests, beam searches and a prefix cache.",
            check=check_engine,
            stage="engine",
        ),
        Test(
            name="SmolLM2",
            points=5,
            invariant=Invariant.SCHEDULING_INVARIANCE,
            meaning="Who runs when has no influence on the text.",
            hint="Compare with what the engine's test says; the model is larger, the questions are the same.",
            check=check_model,
            stage="model",
        ),
    ),
)
