"""Any policy: the engine's own, others, one that answers at random, ones that lie, ones that raise.

Whoever decides, every invariant holds and every request ends with its own tokens; and an answer that cannot be carried
out costs a step and nothing else.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.engine.block_manager import BlockManager
from minipaged.engine.engine import Engine
from minipaged.engine.policies import POLICIES
from minipaged.engine.policies.longest_prefix_first import LongestPrefixFirst
from minipaged.engine.policies.priority import PriorityFirst
from minipaged.engine.policies.shortest_first import ShortestFirst
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.sequence import Request
from minipaged.errors import InvalidRequest, Invariant, InvariantViolation
from minipaged.events import Event, RequestAdmitted, RequestPreempted, RequestRefused
from minipaged.outputs import RequestOutput
from minipaged.params import EngineConfig, SamplingParams
from minipaged.scheduling import Costs, MakePolicy, RequestView, Way
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100, SimulatedRunner, simulated_tier
from minipaged.testing.workloads import prompt_of
from tests.effort import examples, one_case_in, quick_cases, scaled, seeds
from tests.workloads import Workload, WorkloadRequest, WorkloadRun, random_workload, run_workload

QUESTIONS = ("share_tokens", "victim", "way_back", "admit")
"""Those of a step; `fits` is asked when a request arrives."""


class Dice(FirstComeFirstServed):
    """Answers at random whatever can be carried out."""

    dice = random.Random(0)

    def share_tokens(self, running: Sequence[RequestView]) -> dict[str, int]:
        left, tokens = self.max_tokens, dict[str, int]()
        for view in self.dice.sample(list(running), len(running)):
            most = min(view.tokens_to_run, left)
            some = most if view.tokens_to_run <= left else 0 if view.decodes else most
            tokens[view.request_id] = some if view.decodes or not tokens else self.dice.randint(0, some)
            left -= tokens[view.request_id]
        if not any(tokens.values()):
            return super().share_tokens(running)
        return tokens

    def victim(self, running: Sequence[RequestView]) -> str:
        return self.dice.choice(list(running)).request_id

    def way_back(self, request: RequestView, host_free: int) -> Way:
        ways: tuple[Way, ...] = ("swap", "recompute")
        return self.dice.choice(ways)

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        room = self.max_sequences - sum(view.num_sequences for view in running)
        admitted: list[str] = []
        for view in self.dice.sample(list(waiting), len(waiting)):
            least = view.tokens_to_run if view.decodes else 1
            fits = view.num_sequences <= room and view.blocks_needed <= num_free and least <= tokens_left
            if fits and (self.dice.random() < 0.7 or not (running or admitted)):
                admitted.append(view.request_id)
                room, num_free = room - view.num_sequences, num_free - view.blocks_needed
                tokens_left -= view.tokens_to_run
        return admitted


@quick_cases(2)
@one_case_in(5)
@scaled
@pytest.mark.parametrize("policy", [PriorityFirst, ShortestFirst, LongestPrefixFirst, Dice])
@pytest.mark.parametrize("some", seeds(500, 50, tried=False), ids=str)
def test_every_invariant_holds_whoever_decides(policy: MakePolicy, some: range) -> None:
    """Content, exclusive-write, exact-references, conservation, liveness, scheduling-invariance."""
    for seed in some:
        Dice.dice = random.Random(seed)
        try:
            run_workload(seed, policy=policy)
        except Exception as error:
            error.add_note(f"Workload {seed}, decided by {policy}.")
            raise


@scaled
@pytest.mark.parametrize("policy", [PriorityFirst, Dice])
def test_with_steps_that_overlap_too(policy: MakePolicy) -> None:
    for seed in range(examples(200)):
        Dice.dice = random.Random(seed)
        workload = random_workload(seed)
        run = WorkloadRun(replace(workload, config=replace(workload.config, async_scheduling=True)), policy=policy)
        run.to_the_end()
        run.check_outputs()
        run.check_nothing_leaked()


# --- When it is asked, and what it is told --------------------------------------------------------


class Spy(FirstComeFirstServed):
    """Counts the questions, looks whether they make a difference, and keeps every other thing that it was told."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.asked: Counter[str] = Counter()
        self.told: list[tuple[Sequence[RequestView], list[tuple[object, ...]] | None]] = []

    def note(self, question: str, *told: Sequence[RequestView]) -> None:
        self.asked[question] += 1
        look = self.asked[question] % 2
        self.told += [(views, all_of(views) if look else None) for views in told]

    def fits(self, request: RequestView) -> bool:
        self.note("fits")
        return super().fits(request)

    def share_tokens(self, running: Sequence[RequestView]) -> dict[str, int]:
        self.note("share_tokens", running)
        assert sum(view.tokens_to_run for view in running) > self.max_tokens
        return super().share_tokens(running)

    def victim(self, running: Sequence[RequestView]) -> str:
        self.note("victim", running)
        assert len(running) > 1
        return super().victim(running)

    def way_back(self, request: RequestView, host_free: int) -> Way:
        self.note("way_back", [request])
        assert 0 < request.num_blocks <= host_free
        return super().way_back(request, host_free)

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        self.note("admit", waiting, running)
        assert waiting
        assert num_free > 0
        assert tokens_left > 0
        if self.asked["admit"] % 2:
            assert self.max_sequences > sum(view.num_sequences for view in running)
        return super().admit(waiting, running, num_free, tokens_left)


def all_of(views: Sequence[RequestView]) -> list[tuple[object, ...]]:
    return [tuple(getattr(view, field.name) for field in fields(RequestView)) for view in views]


def simulated(policy: MakePolicy = FirstComeFirstServed, **config: Any) -> Engine:
    runner = SimulatedRunner(OPT_13B_ON_AN_A100, block_size=4)
    sizes = {"num_blocks": 100, "max_model_len": 64, "vocab_size": 64, "enable_prefix_caching": False, **config}
    return Engine(EngineConfig(block_size=4, **sizes), simulated_tier(), runner, policy=policy, clock=runner.clock)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def outputs_of(engine: Engine) -> list[RequestOutput]:
    """Of all that it has, served to the end."""
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [update.output for update in engine.step() if update.output]
    return outputs


def spy(engine: Engine) -> Spy:
    assert isinstance(engine.scheduler.policy, Spy)
    return engine.scheduler.policy


def test_a_step_in_which_all_runs_and_nobody_waits_asks_nothing() -> None:
    engine = simulated(Spy)
    for _ in range(3):
        engine.add_request([1] * 5, params(20))
    engine.step()
    assert spy(engine).asked == {"fits": 3, "admit": 1}
    for _ in range(18):
        engine.step()
    assert len(engine.scheduler.running) == 3
    assert spy(engine).asked == {"fits": 3, "admit": 1}


def test_who_was_let_in_by_nobody_is_asked_about_again_only_when_there_is_more() -> None:
    engine = simulated(Spy, num_blocks=10)
    engine.add_request([1] * 20, params(8))
    engine.step()
    engine.add_request([1] * 20, params(2))  # 5 blocks, and one is held back for the first
    asked = []
    while engine.has_unfinished_requests():
        before = spy(engine).asked["admit"]
        engine.step()
        asked.append(spy(engine).asked["admit"] - before)
    assert asked == [1, 0, 0, 0, 0, 0, 0, 1, 0], "when it waits, and when the first has ended"


def test_who_is_first_after_somebody_came_in_is_asked_about_in_the_next_step() -> None:
    """Though less is free than when nobody came in: somebody else was the first then."""
    engine = simulated(num_blocks=10, max_num_batched_tokens=16)
    engine.add_request([1] * 16, params(4), request_id="first")
    engine.step()
    engine.add_request([1] * 24, params(8), request_id="large")
    engine.add_request([1] * 3, params(8), request_id="small")
    running = []
    for _ in range(5):
        engine.step()
        running.append([request.request_id for request in engine.scheduler.running])
    assert running[2:] == [[], ["large"], ["large", "small"]]


@pytest.fixture(scope="module")
def spied() -> list[Engine]:
    """The engines of 60 workloads, which have run to the end."""
    engines = []
    for seed in range(60):
        run = WorkloadRun(random_workload(seed), policy=Spy)
        run.to_the_end()
        engines.append(run.engine)
    return engines


def test_every_question_is_asked_in_some_workload_and_only_where_it_makes_a_difference(spied: list[Engine]) -> None:
    """The Spy looks at that."""
    asked = Counter[str]()
    for engine in spied:
        asked += spy(engine).asked
    assert asked.keys() == {"fits", *QUESTIONS}


def test_what_a_policy_was_told_stays_as_it_was_and_what_it_did_not_look_at_is_over(spied: list[Engine]) -> None:
    over = 0
    for engine in spied:
        for views, then in spy(engine).told:
            if then is not None:
                assert all_of(views) == then
                for view in views:
                    with pytest.raises(AttributeError):
                        view.arrival = 7  # type: ignore[misc]
                continue
            try:
                all_of(views)
            except LookupError:
                over += 1
    assert over > 0, "never was anything made late"


def test_the_engine_refuses_exactly_what_the_policy_would_refuse() -> None:
    """The two know the same of what a request can come to hold: the block manager, and the policy."""

    class Knows(FirstComeFirstServed):
        def fits(self, request: RequestView) -> bool:
            assert super().fits(request)
            return True

    refused = 0
    for seed in range(300):
        workload = random_workload(seed)
        config = replace(workload.config, num_blocks=max(1, workload.config.num_blocks // 2))
        run = WorkloadRun(replace(workload, config=config), policy=Knows)
        right = FirstComeFirstServed(
            config.num_blocks, config.block_size, config.max_num_seqs, config.max_num_batched_tokens, COSTS
        )
        for request in workload.requests:
            try:
                run.engine.add_request(request.prompt, request.params)
            except InvalidRequest as error:
                if "max_model_len" in str(error):
                    continue
                refused += 1
                prompt_tokens = len(prompt_of(request))
                room = config.max_model_len - prompt_tokens
                num_sequences = getattr(request.params, "n", 0) or request.params.beam_width  # type: ignore[union-attr]
                most = min(request.params.max_tokens or room, room)
                assert not right.fits(RequestView("", 0, num_sequences, prompt_tokens, most))
    assert refused > 50


COSTS = Costs(1.0, 1, 1, 1.0, 1.0)


# --- Policies that lie ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Lie:
    question: str
    answer: Callable[..., Any]
    """Given what the question is asked with, and the right answer last."""
    message: str


LIES = {
    "tokens for somebody unknown": Lie("share_tokens", lambda r, right: {**right, "?": 1}, "'?', which is not running"),
    "more tokens than it has to run": Lie(
        "share_tokens", lambda r, right: {v.request_id: v.tokens_to_run + 1 for v in r}, "has . to run|has .. to run"
    ),
    "more tokens than there are": Lie(
        "share_tokens",
        lambda r, right: {v.request_id: v.tokens_to_run for v in r},
        "tokens in all; a batch has room for",
    ),
    "tokens below nothing": Lie("share_tokens", lambda r, right: dict.fromkeys(right, -1), "-1 tokens for"),
    "half a token": Lie("share_tokens", lambda r, right: dict.fromkeys(right, 0.5), "0.5 tokens for"),
    "no tokens for anybody": Lie("share_tokens", lambda r, right: {}, "no tokens for any request"),
    "tokens as a list": Lie("share_tokens", lambda r, right: list(right), "it must return a dict"),
    "a victim that waits or never was": Lie("victim", lambda r, right: "?", "'?', which is not running"),
    "no victim": Lie("victim", lambda r, right: None, "None, which is not running"),
    "the view of a victim": Lie("victim", lambda r, right: r[0], "which is not running"),
    "a third way": Lie("way_back", lambda v, free, right: "wait", "'wait'; it must return 'swap' or 'recompute'"),
    "somebody unknown comes in": Lie("admit", lambda *_: ["?"], "'?', which is not waiting"),
    "somebody comes in twice": Lie("admit", lambda w, *_: [w[0].request_id] * 2, "twice|needs"),
    "all come in": Lie(
        "admit", lambda w, *_: [v.request_id for v in w], "needs . (blocks|tokens|sequences); . are left"
    ),
    "nobody comes in": Lie("admit", lambda *_: [], "no request, though nothing is running"),
    "a name": Lie("admit", lambda w, *_: w[0].request_id, "it must return a list of request_ids"),
    "a number": Lie("admit", lambda *_: 3, "it must return a list of request_ids"),
}


def crowded(**config: Any) -> Workload:
    """Small in every respect, so that every question is asked."""
    sizes = {"num_blocks": 10, "num_swap_blocks": 8, "block_size": 2, "max_model_len": 20, "vocab_size": 11}
    requests = (
        WorkloadRequest(0, (1, 3, 5, 7), SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True)),
        WorkloadRequest(0, (1, 3, 5, 8, 1), SamplingParams(seed=4, max_tokens=9, ignore_eos=True)),
        WorkloadRequest(1, (1, 3, 5, 7, 9, 4, 1, 1, 6), SamplingParams(seed=2, max_tokens=8, ignore_eos=True)),
        WorkloadRequest(1, (2, 3, 5, 7, 9, 4, 1, 1, 6), SamplingParams(seed=2, max_tokens=4, ignore_eos=True)),
        WorkloadRequest(2, (4,), SamplingParams(temperature=0, seed=3, max_tokens=7, ignore_eos=True)),
    )
    return Workload(
        EngineConfig(**sizes, max_num_batched_tokens=4, preemption="auto", debug=True, **config),
        requests,
        swap_is_cheap=True,
    )


def lying(lie: Lie) -> type[FirstComeFirstServed]:
    """First come, first served, but for this lie, until it is made honest."""

    class Liar(FirstComeFirstServed):
        honest = False

        def __getattribute__(self, name: str) -> Any:
            right = super().__getattribute__(name)
            if name != lie.question or self.honest:
                return right
            return lambda *asked: lie.answer(*asked, right(*asked))

    return Liar


@pytest.mark.parametrize("overlap", [False, True], ids=["", "async"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_policy_that_lies_is_told_so_by_name_and_nothing_is_lost(lie: Lie, overlap: bool) -> None:
    """Liveness, conservation, exact-references: a lie costs a step; and when it behaves, all end with their tokens."""
    run = WorkloadRun(crowded(async_scheduling=overlap), policy=lying(lie))
    told: list[InvariantViolation] = []
    for now in range(500):
        try:
            goes_on = run.advance(now)
        except InvariantViolation as error:
            told.append(error)
            run.engine.check_invariants()
            assert run.engine.blocks.num_used == 0, "whoever ran waits to be recomputed"
            assert not run.engine.scheduler.running
            goes_on = True
        if len(told) == 3:
            run.engine.scheduler.policy.honest = True  # type: ignore[attr-defined]
        if not goes_on:
            break
    assert told, "nobody has noticed"
    for error in told:
        assert error.invariant is Invariant.LIVENESS
        assert str(error).startswith(f"invariant 'liveness' broken: the policy Liar: {lie.question} returned ")
        assert re.search(lie.message, str(error))
    run.check_outputs()
    run.check_nothing_leaked()


def test_a_policy_that_lies_can_be_replaced() -> None:
    run, told = WorkloadRun(crowded(), policy=lying(LIES["a victim that waits or never was"])), False
    for now in range(500):
        try:
            if not run.advance(now):
                break
        except InvariantViolation as error:
            assert re.search(r"choose from: r\d", str(error))  # noqa: PT017
            run.engine.scheduler.policy, told = PriorityFirst(10, 2, 256, 4, COSTS), True
    assert told
    run.check_outputs()
    run.check_nothing_leaked()


def test_who_holds_more_blocks_than_paging_would_makes_no_room_for_others() -> None:
    """Another memory may have given them to it: nothing is held back for it then, and nothing made up."""
    policy = FirstComeFirstServed(100, 4, 256, 2048, COSTS)
    large = RequestView("large", 0, 1, 8, 4, tokens_to_run=1, decodes=True, num_blocks=64, num_tokens=9)
    waiting = [RequestView(name, i, 1, 8, 4, tokens_to_run=8, blocks_needed=2) for i, name in enumerate("abc", 1)]
    assert policy.soon(large, large.num_blocks) == 0
    assert policy.admit(waiting, [large], 4, 2048) == ["a"]  # and one more block for its first decode


@pytest.mark.parametrize("answer", [1, None, "yes"])
def test_whether_a_request_is_taken_is_yes_or_no(answer: object) -> None:
    engine = simulated(lying(Lie("fits", lambda view, right: answer, "")))
    with pytest.raises(InvariantViolation, match=r"fits returned .*; it must return True or False"):
        engine.add_request([1], params(2))
    assert not engine.has_unfinished_requests()
    engine.scheduler.policy = FirstComeFirstServed(100, 4, 256, 2048, COSTS)
    engine.add_request([1], params(2))
    while engine.has_unfinished_requests():
        engine.step()


def test_a_policy_may_refuse_what_could_be_served_and_not_take_what_could_not() -> None:
    events: list[Event] = []
    engine = simulated(lying(Lie("fits", lambda view, right: view.prompt_tokens < 8, "")), num_blocks=4)
    engine.listeners.append(events.append)
    with pytest.raises(InvalidRequest, match="the engine's policy, Liar, does not take this request"):
        engine.add_request([1] * 8, params(2))
    assert isinstance(events[-1], RequestRefused)
    with pytest.raises(InvalidRequest, match="could never be served"):
        engine.add_request([1] * 7, params(20))
    engine.add_request([1] * 7, params(2))
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (None, "policy is None; it must be a class"),
        (FirstComeFirstServed(1, 1, 1, 1, COSTS), "it must be a class"),
        (lambda *settings: "fcfs", "the policy str lacks fits, share_tokens, victim, way_back, admit; it needs all"),
    ],
    ids=["None", "one that is made", "a function of something else"],
)
def test_what_is_no_policy_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        simulated(policy)


@pytest.mark.parametrize("priority", [0.5, "1", None, True])
def test_a_priority_is_a_whole_number(priority: Any) -> None:
    engine = simulated()
    with pytest.raises(InvalidRequest, match=r"priority is .*; it must be a whole number"):
        engine.add_request([1], params(2), priority=priority)
    assert not engine.has_unfinished_requests()


class Mine(FirstComeFirstServed):
    """Nobody knows what it looks at."""


@pytest.mark.parametrize("policy", [FirstComeFirstServed, ShortestFirst, LongestPrefixFirst, PriorityFirst, Mine])
def test_a_priority_that_would_change_nothing_is_refused(policy: MakePolicy) -> None:
    engine = simulated(policy)
    engine.add_request([1], params(2), priority=0)
    if policy in (FirstComeFirstServed, ShortestFirst, LongestPrefixFirst):
        with pytest.raises(InvalidRequest, match=r"priority is -3, and .* not look at it: .*policy='priority'"):
            engine.add_request([1], params(2), priority=-3)
    else:
        engine.add_request([1], params(2), priority=-3)


# --- Policies that raise --------------------------------------------------------------------------


class Fault(Exception):
    """What they raise."""


def raising(question: str, number: int) -> type[FirstComeFirstServed]:
    """First come, first served, but when it is asked this for the `number`-th time."""

    class Raises(FirstComeFirstServed):
        times = 0

        def __getattribute__(self, name: str) -> Any:
            if name == question:
                self.times += 1
                if self.times == number:
                    raise Fault(question)
            return super().__getattribute__(name)

    return Raises


@pytest.mark.parametrize("overlap", [False, True], ids=["", "async"])
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["", "prefix caching"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_request_gets_its_tokens_and_no_block_leaks_whichever_question_raises(
    question: str, prefix_caching: bool, overlap: bool
) -> None:
    """Atomic-failure, exact-references, liveness."""
    workload = crowded(enable_prefix_caching=prefix_caching, async_scheduling=overlap)
    for number in range(2, 1000):  # looking whether it is there, when it is made, is the first
        run, raised = WorkloadRun(workload, policy=raising(question, number)), 0
        for now in range(500):
            try:
                goes_on = run.advance(now)
            except Fault:
                raised, goes_on = raised + 1, True
                run.engine.check_invariants()
            if not goes_on:
                break
        run.check_outputs()
        run.check_nothing_leaked()
        if not raised:
            break
    assert number > 2, "it was never asked"
    assert raised == 0, "there is no end to the questions"


def test_a_policy_that_raises_when_a_request_arrives_costs_that_request_alone() -> None:
    engine = simulated(raising("fits", 3))
    engine.add_request([1] * 5, params(4), request_id="first")
    with pytest.raises(Fault):
        engine.add_request([1] * 5, params(4), request_id="second")
    engine.add_request([1] * 5, params(4), request_id="second")
    assert sorted(output.request_id for output in outputs_of(engine)) == ["first", "second"]
    assert engine.blocks.num_used == 0


# --- Nobody starves -------------------------------------------------------------------------------


class Patient(PriorityFirst):
    PLACES = 5


class Brief(ShortestFirst):
    PLACES = 2


class Near(LongestPrefixFirst):
    TOKENS_PER_PLACE = 1
    MOST = 5


@dataclass(frozen=True)
class Arrival:
    step: int
    priority: int
    max_tokens: int
    prompt: int = 0
    """Prompts of the same number begin with the same blocks. Those of 0 fill none."""


def passed(policy: MakePolicy, arrivals: Sequence[Arrival]) -> list[int]:
    """By how many that arrived after it each request was passed: that came in, or ran first, while it waited."""
    engine = simulated(policy, max_num_seqs=2, enable_prefix_caching=True)
    admitted, arrived = list[int](), 0
    engine.listeners.append(
        lambda event: admitted.append(int(event.request)) if isinstance(event, RequestAdmitted) else None
    )
    due = sorted(arrivals, key=lambda arrival: arrival.step)
    step = 0
    while arrived < len(due) or engine.has_unfinished_requests():
        while arrived < len(due) and due[arrived].step <= step:
            one = due[arrived]
            prompt = [one.prompt] * 20 if one.prompt else [1] * 3
            engine.add_request(prompt, params(one.max_tokens), request_id=str(arrived), priority=one.priority)
            arrived += 1
        engine.step()
        step += 1
    assert sorted(admitted) == list(range(len(due))), "all came in, and nobody was preempted"
    return [sum(other > one for other in admitted[: admitted.index(one)]) for one in range(len(due))]


arrivals = st.lists(st.builds(Arrival, st.integers(0, 30), st.integers(-2, 2), st.integers(1, 12)), max_size=40)


@given(arrivals)
def test_nobody_is_passed_by_more_than_its_priority_costs(arrivals: list[Arrival]) -> None:
    """Liveness: the bound that `PriorityFirst` states."""
    due = sorted(arrivals, key=lambda arrival: arrival.step)
    least = min((one.priority for one in due), default=0)
    for one, times in zip(due, passed(Patient, due), strict=True):
        assert times <= Patient.PLACES * (one.priority - least)


@given(arrivals)
def test_nobody_is_passed_by_more_than_its_length_costs(arrivals: list[Arrival]) -> None:
    """Liveness: the bound that `ShortestFirst` states."""
    due = sorted(arrivals, key=lambda arrival: arrival.step)
    for one, times in zip(due, passed(Brief, due), strict=True):
        assert times <= Brief.PLACES * one.max_tokens


behind_prompts = st.builds(Arrival, st.integers(0, 30), st.just(0), st.integers(1, 12), st.integers(0, 3))


@given(st.lists(behind_prompts, max_size=40))
def test_nobody_is_passed_by_more_than_a_cached_prefix_is_worth(arrivals: list[Arrival]) -> None:
    """Liveness: the bound that `LongestPrefixFirst` states, whatever is cached."""
    due = sorted(arrivals, key=lambda arrival: arrival.step)
    assert max(passed(Near, due), default=0) < Near.MOST


@pytest.mark.parametrize(
    ("policy", "late", "bound"),
    [
        (Patient, Arrival(0, 1, 4), 5),
        (Brief, Arrival(0, 0, 12), 2 * (12 - 4)),
        (FirstComeFirstServed, Arrival(0, 0, 40), 0),
    ],
)
def test_under_a_stream_that_never_ends_it_comes_in_after_as_many_as_were_stated(
    policy: MakePolicy, late: Arrival, bound: int
) -> None:
    """The bound is reached, and not only kept. (Two run, and in each step two more arrive.)"""
    stream = [Arrival(step, 0, 4) for step in range(40) for _ in range(2)]
    first = [Arrival(0, 0, 4)] * 2
    times = passed(policy, [*first, late, *stream])
    assert times[2] in (bound, bound - 1), "ties go to whoever arrived first"


def test_without_places_it_would_starve() -> None:
    """What the bound is good for."""

    class Starves(PriorityFirst):
        PLACES = 10**9

    stream = [Arrival(step, 0, 4) for step in range(40) for _ in range(2)]
    assert passed(Starves, [Arrival(0, 1, 4), *stream])[0] == len(stream)


def test_whose_prompt_is_cached_comes_first_as_long_as_the_others_need_not_wait_for_ever() -> None:
    """A stream behind one prompt, and one request behind another: the bound is reached, and without it, it starves."""

    class Starves(Near):
        MOST = 10**9

        def turn(self, request: RequestView) -> tuple[float, ...]:
            return -request.num_cached_tokens, request.arrival

    stream = [Arrival(step, 0, 4, prompt=1) for step in range(40) for _ in range(2)]
    first, late = [Arrival(0, 0, 4, prompt=1)] * 2, Arrival(1, 0, 4, prompt=2)
    assert passed(Near, [*first, late, *stream[2:]])[2] == Near.MOST - 1
    assert passed(Starves, [*first, late, *stream[2:]])[2] == len(stream[2:])
    assert passed(FirstComeFirstServed, [*first, late, *stream[2:]])[2] == 0


def test_the_cache_is_looked_up_for_tokens_only_if_the_policy_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(self: BlockManager, request: object) -> int:
        raise Fault

    monkeypatch.setattr(BlockManager, "num_cached_tokens", found)
    arrivals = [Arrival(0, 0, 4, prompt=1)] * 5
    for policy in (FirstComeFirstServed, PriorityFirst, ShortestFirst):
        passed(policy, arrivals)
    with pytest.raises(Fault):
        passed(LongestPrefixFirst, arrivals)


def test_only_the_first_that_wait_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[int]()
    right = BlockManager.num_cached_tokens

    def counted(self: BlockManager, request: Request) -> int:
        looked.append(request.order)
        return right(self, request)

    monkeypatch.setattr(BlockManager, "num_cached_tokens", counted)
    engine = simulated(Near, max_num_seqs=2, enable_prefix_caching=True)
    for i in range(20):
        engine.add_request([1] * 3, params(4), request_id=str(i))
    engine.step()
    assert {*looked} == {*range(Near.MOST)}


def test_smaller_numbers_come_first_and_equals_in_order_of_arrival() -> None:
    engine, admitted = simulated(PriorityFirst, max_num_seqs=1), list[str]()
    engine.listeners.append(
        lambda event: admitted.append(event.request) if isinstance(event, RequestAdmitted) else None
    )
    for name, priority in (("a", 1), ("b", 0), ("c", -3), ("d", 0), ("e", 2)):
        engine.add_request([1, 2], params(2), request_id=name, priority=priority)
    while engine.has_unfinished_requests():
        engine.step()
    assert admitted == ["c", "b", "d", "a", "e"]


def test_by_priority_the_least_important_makes_room() -> None:
    """Though it arrived first."""
    engine = simulated(PriorityFirst, num_blocks=6, preemption="recompute")
    preempted: list[str] = []
    engine.listeners.append(lambda e: preempted.append(e.request) if isinstance(e, RequestPreempted) else None)
    engine.add_request([1] * 8, params(12), request_id="can wait", priority=1)
    engine.add_request([1] * 8, params(12), request_id="important", priority=0)
    while engine.has_unfinished_requests():
        engine.step()
    assert preempted == ["can wait"]


def test_the_shortest_first_has_the_shortest_mean_wait_by_an_oracle_too() -> None:
    lengths = [20, 3, 9, 1, 14, 2, 6]

    def mean_end(policy: MakePolicy) -> float:
        engine = simulated(policy, max_num_seqs=1)
        for tokens in lengths:
            engine.add_request([1], params(tokens))
        return sum(output.metrics.finished_time for output in outputs_of(engine))

    oracle = partial(ShortestFirst, estimate=lambda view: lengths[view.arrival])
    longest = partial(ShortestFirst, estimate=lambda view: -lengths[view.arrival])
    assert mean_end(ShortestFirst) == mean_end(oracle) < mean_end(FirstComeFirstServed) < mean_end(longest)


def test_the_policies_are_known_by_name() -> None:
    assert {
        "fcfs": FirstComeFirstServed,
        "priority": PriorityFirst,
        "shortest-first": ShortestFirst,
        "longest-prefix-first": LongestPrefixFirst,
    } == POLICIES
