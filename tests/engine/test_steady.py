"""steady-equals-plain: the short way of steps in which all go on decoding gives what the engine's own way gives."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from minipaged.contracts import BlockTable, StepResult, Tier
from minipaged.engine.batch import Plan
from minipaged.engine.engine import Engine
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.views import plain
from minipaged.errors import InvalidRequest
from minipaged.events import Event
from minipaged.outputs import RequestUpdate
from minipaged.params import EngineConfig, RequestOutputKind, SamplingParams, SpeculativeConfig
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.scheduling import MakePolicy, RequestView, Way
from minipaged.steps import StepInput
from minipaged.testing.content_runner import ContentRunner
from tests.effort import one_case_in, quick_cases, scaled, seeds
from tests.late_device import LATE, LateRunner
from tests.workloads import FAST, REFERENCE


@dataclass
class Request:
    arrives: int
    prompt: list[int]
    params: SamplingParams
    kind: RequestOutputKind
    cancelled: int | None


@dataclass
class Scene:
    """Requests that decode for a while, and what may come between."""

    seed: int
    config: EngineConfig
    requests: list[Request]
    somebody_listens: bool


def scene_of(seed: int, *, async_scheduling: bool, lanes: int = 1) -> Scene:
    r = random.Random(seed)
    block_size, stem = r.choice([1, 2, 4, 16]), [r.randrange(11) for _ in range(20)]
    requests = []
    for _ in range(r.randint(1, 5)):
        params = SamplingParams(
            n=r.choice([1, 1, 2, 3]),
            temperature=r.choice([0.0, 1.0]),
            seed=r.randrange(99),
            max_tokens=r.randint(5, 60),
            ignore_eos=r.random() < 0.7,
            stop_token_ids=r.choice([(), (), (), (7,)]),
            min_tokens=r.choice([0, 0, 4]),
            presence_penalty=r.choice([0.0, 0.0, 0.0, 0.5]),
            logprobs=r.choice([None, None, None, None, 1]),
        )
        kind = r.choice(list(RequestOutputKind))
        prompt = [*stem[: r.randint(0, 20)], r.randrange(11)]
        cancelled = r.randint(5, 60) if r.random() < 0.2 else None
        requests.append(Request(r.choice([0, 0, r.randint(0, 40)]), prompt, params, kind, cancelled))
    config = EngineConfig(
        num_blocks=r.choice([60, 120, 300, 600]) // block_size,
        num_swap_blocks=r.choice([0, 50]),
        block_size=block_size,
        max_model_len=80,
        vocab_size=11,
        eos_token_ids=(2,),
        enable_prefix_caching=r.random() < 0.7,
        max_num_batched_tokens=r.choice([16, 2048]),
        async_scheduling=async_scheduling,
        pipeline_parallel_size=lanes,
    )
    return Scene(seed, config, requests, somebody_listens=r.random() < 0.5)


Shown = tuple[object, ...]
"""A question, and all that the policy is shown with it."""


class Looking(FirstComeFirstServed):
    """Looks at all that it is shown, and keeps it."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.shown: list[Shown] = []

    def fits(self, request: RequestView) -> bool:
        self.shown.append(("fits", plain(request)))
        return super().fits(request)

    def share_tokens(self, running: Sequence[RequestView]) -> dict[str, int]:
        self.shown.append(("share_tokens", *map(plain, running)))
        return super().share_tokens(running)

    def victim(self, running: Sequence[RequestView]) -> str:
        self.shown.append(("victim", *map(plain, running)))
        return super().victim(running)

    def way_back(self, request: RequestView, host_free: int) -> Way:
        self.shown.append(("way_back", plain(request), host_free))
        return super().way_back(request, host_free)

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        self.shown.append(("admit", [*map(plain, waiting)], [*map(plain, running)], num_free, tokens_left))
        return super().admit(waiting, running, num_free, tokens_left)


@dataclass
class Account:
    """All that can be seen of a run."""

    steps: list[StepInput] = field(default_factory=list)
    updates: list[list[RequestUpdate]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    pool: list[int] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)


def account_of(
    scene: Scene,
    tier: Tier = REFERENCE,
    kind: type[ContentRunner] = ContentRunner,
    fails_at: int | None = None,
    allocate_fails_at: int | None = None,
    *,
    steady: bool = True,
    policy: MakePolicy = FirstComeFirstServed,
) -> Account:
    account, config = Account(), scene.config

    class Runner(kind):  # type: ignore[misc, valid-type]
        def run(self, step: StepInput) -> StepResult:
            account.steps.append(step)
            if len(account.steps) == fails_at:
                raise ZeroDivisionError
            return super().run(step)

    class Allocator(BlockAllocator):
        def allocate(self) -> int:
            account.happened["allocated"] += 1
            if account.happened["allocated"] == allocate_fails_at:
                raise ZeroDivisionError
            return super().allocate()

    sizes = (config.num_blocks, config.num_swap_blocks, config.block_size, config.vocab_size, True)
    runner = Runner(*sizes, tier.sample)
    engine = Engine(config, tier, runner, allocator=Allocator, policy=policy, clock=lambda: 0.0, steady=steady)
    if scene.somebody_listens:
        engine.listeners.append(account.events.append)
    for now in range(400):
        for number, request in enumerate(scene.requests):
            if request.arrives == now:
                try:
                    engine.add_request(request.prompt, request.params, request_id=str(number), output_kind=request.kind)
                except InvalidRequest:
                    account.happened["refused"] += 1
            if request.cancelled == now:
                engine.abort(str(number))
        try:
            account.updates.append(engine.step())
        except ZeroDivisionError:
            account.happened["failed"] += 1
        account.happened["steady"] += bool(engine._steady and engine._steady._batches)
        if now > 40 and not engine.has_unfinished_requests():
            break
    engine.check_invariants()
    assert not engine.has_unfinished_requests()
    account.stats = asdict(engine.current_stats())
    account.shown = getattr(engine.scheduler.policy, "shown", [])
    account.happened["allocated while it ran"] = account.happened["allocated"]
    account.pool = list(engine.blocks.allocator.allocate_many(engine.blocks.allocator.num_free))
    account.happened["preempted"] = engine.stats.preempted_by_swap + engine.stats.preempted_by_recompute
    account.happened["deduplicated or shared"] = engine.stats.prefix_cache_hit_tokens
    account.happened["drafted"] = engine.stats.tokens_drafted
    account.happened["evicted"] = engine.stats.prefix_cache_evictions
    return account


def check_same(scene: Scene, *arguments: Any, **options: Any) -> Account:
    steady, straight = (account_of(scene, *arguments, steady=steady, **options) for steady in (True, False))
    assert steady.steps == straight.steps
    assert steady.updates == straight.updates
    assert steady.events == straight.events
    assert steady.stats == straight.stats
    assert steady.pool == straight.pool, "the free blocks lie in the same order"
    assert steady.shown == straight.shown
    return steady


LOOKUP = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=2)


@one_case_in(4)
@scaled
@pytest.mark.parametrize("seeds", seeds(400, 20, least=40), ids=str)
@pytest.mark.parametrize("way", ["sync", "async", "drafting"])
def test_both_ways_give_the_same(seeds: range, way: str) -> None:
    """Every step said to the runner, every update, every count, and the order of the free blocks."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            tier, scene = FAST if seed % 2 else REFERENCE, scene_of(seed, async_scheduling=way == "async")
            if way == "drafting":
                scene = replace(scene, config=replace(scene.config, speculative_config=LOOKUP))
            happened += check_same(scene, tier).happened
        except Exception as error:
            error.add_note(f"in scene {seed}")
            raise
    assert happened["steady"] > (5 if way == "drafting" else 10) * len(seeds)
    assert (happened["drafted"] > len(seeds)) == (way == "drafting")


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_the_scenes_bring_about_what_ends_the_short_way(async_scheduling: bool) -> None:
    happened: Counter[str] = Counter()
    for seed in range(40):
        happened += account_of(scene_of(seed, async_scheduling=async_scheduling)).happened
    assert min(happened[name] for name in ("preempted", "deduplicated or shared", "evicted")) > 0


def crowded(seed: int, *, async_scheduling: bool, lanes: int) -> Scene:
    """A scene with more requests than there are blocks and tokens for, so that the policy is asked."""
    scene = scene_of(seed, async_scheduling=async_scheduling, lanes=lanes)
    scene.requests += scene_of(seed + 1000, async_scheduling=async_scheduling).requests
    config = scene.config
    swap = config.num_swap_blocks and 120
    tokens = 16 if seed % 3 else 4
    small = {"num_blocks": 120 // config.block_size, "num_swap_blocks": swap, "max_num_batched_tokens": tokens}
    return replace(scene, config=replace(config, **small))


@scaled
@pytest.mark.parametrize("seeds", seeds(200, 20, least=20), ids=str)
@pytest.mark.parametrize(
    ("async_scheduling", "lanes"), [(False, 1), (True, 1), (False, 2)], ids=["sync", "async", "two lanes"]
)
def test_a_policy_is_asked_and_shown_the_same(async_scheduling: bool, lanes: int, seeds: range) -> None:
    """At each question, of those that run and of those that wait."""
    asked: Counter[str] = Counter()
    for seed in seeds:
        try:
            scene = crowded(seed, async_scheduling=async_scheduling, lanes=lanes)
            asked.update(str(question) for question, *_ in check_same(scene, policy=Looking).shown)
        except Exception as error:
            error.add_note(f"in scene {seed}")
            raise
    assert asked.keys() == {"fits", "share_tokens", "victim", "way_back", "admit"}


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_nothing_is_kept_of_requests_that_have_ended_when_there_are_no_others(
    async_scheduling: bool, lanes: int
) -> None:
    """Not one of their sequences, each of which has a block table of its own."""
    sizes = {"num_blocks": 60, "max_model_len": 64, "vocab_size": 11, "pipeline_parallel_size": lanes}
    config = EngineConfig(**sizes, async_scheduling=async_scheduling)
    engine = Engine(config, REFERENCE, ContentRunner(60, 0, 16, 11, True, REFERENCE.sample))
    tables = weakref.WeakSet[BlockTable]()
    for lengths in ([20], [9, 40], [9, 9, 20]):
        for aborts in (False, True):
            for length in lengths:
                n = 2 if length == 20 else 1
                engine.add_request([1, 2, 3], SamplingParams(n=n, max_tokens=length, ignore_eos=True, seed=1))
            for step in count():
                engine.step()
                tables.update(sequence.table for request in engine.scheduler.running for sequence in request.sequences)
                for name in engine.unfinished_requests if aborts and step == 12 else ():
                    engine.abort(name)
                if not engine.has_unfinished_requests():
                    break
            gc.collect()
            assert not tables, f"of {lengths}"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_idle_lane_keeps_nothing_while_another_works(async_scheduling: bool) -> None:
    sizes = {"num_blocks": 60, "max_model_len": 64, "vocab_size": 11, "pipeline_parallel_size": 2}
    config = EngineConfig(**sizes, async_scheduling=async_scheduling)
    engine = Engine(config, REFERENCE, ContentRunner(60, 0, 16, 11, True, REFERENCE.sample))
    tables = weakref.WeakSet[BlockTable]()
    for max_tokens in (9, 50):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1))
    while len(engine.unfinished_requests) != 1:
        engine.step()
        tables.update(sequence.table for request in engine.scheduler.running for sequence in request.sequences)
    for _ in range(4):
        engine.step()
    gc.collect()
    assert len(tables) == 1


def test_a_lane_goes_on_when_a_sequence_ends_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of the other lane take the short way before and after."""
    long_way: list[int] = []
    schedule = Scheduler.schedule

    def noted(self: Scheduler, ahead: Plan | None = None, lane: int = 0) -> Plan:
        long_way.append(lane)
        return schedule(self, ahead, lane)

    monkeypatch.setattr(Scheduler, "schedule", noted)
    config = EngineConfig(num_blocks=60, max_model_len=64, vocab_size=11, pipeline_parallel_size=2)
    engine = Engine(config, REFERENCE, ContentRunner(60, 0, 16, 11, True, REFERENCE.sample))
    for max_tokens in (40, 20, 40, 40):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1))
    engine.step()
    assert [len(lane.running) for lane in engine.scheduler.lanes] == [2, 2]
    [shorter] = [request for request in engine.scheduler.running if request.max_output_tokens == 20]
    while len(engine.unfinished_requests) == 4:
        engine.step()
    ended_in = shorter.lane
    num_before = len(long_way)
    for _ in range(10):
        engine.step()
    assert long_way[num_before:] == [ended_in]


@scaled
@pytest.mark.parametrize("seeds", seeds(100, 50), ids=str)
def test_the_short_way_works_on_a_device_that_is_as_late_as_it_may_be(seeds: range) -> None:
    for seed in seeds:
        check_same(scene_of(seed, async_scheduling=True), LATE, LateRunner)


@quick_cases(1)
@one_case_in(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_an_error_on_the_short_way_costs_time_and_nothing_else(async_scheduling: bool, seed: int) -> None:
    """At each step of some runs: the same as by the other way, which the failure injection tests are about."""
    scene = scene_of(seed, async_scheduling=async_scheduling)
    for number in range(1, len(account_of(scene).steps), 3):
        account = check_same(scene, REFERENCE, ContentRunner, number)
        assert account.happened["failed"] == 1


@quick_cases(3)
@one_case_in(3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_an_allocator_that_fails_on_the_short_way_costs_time_and_nothing_else(
    async_scheduling: bool, seed: int
) -> None:
    scene = scene_of(seed, async_scheduling=async_scheduling)
    number = account_of(scene).happened["allocated while it ran"]
    for at in range(number // 4, number, max(1, number // 5)):
        account = check_same(scene, REFERENCE, ContentRunner, None, at)
        assert account.happened["failed"] + account.happened["refused"] > 0


def test_who_comes_to_listen_is_told_of_everything_from_then_on() -> None:
    engine = Engine(
        EngineConfig(num_blocks=60, max_model_len=64, vocab_size=11), REFERENCE, ContentRunner(60, 0, 16, 11)
    )
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True, seed=1))
    for _ in range(12):
        engine.step()
    assert engine._steady
    assert engine._steady._batches
    heard: list[str] = []
    engine.listeners.append(lambda event: heard.append(event.name))
    engine.step()
    assert heard == ["step_started", "tokens_computed", "step_scheduled", "token_generated", "step_finished"]
