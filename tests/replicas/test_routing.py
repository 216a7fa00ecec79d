"""Routers: whom they choose, what they know of the replicas' prefix caches, and that no replica is buried or idle."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.engine.engine import Engine
from minipaged.errors import NoReplica
from minipaged.events import BlockCached, BlockEvicted, StepStarted
from minipaged.handover.block_hashes import block_hashes, salt_number, salted
from minipaged.params import EngineConfig, RequestOutputKind, SamplingParams
from minipaged.replicas.routing import CacheNews, LeastLoaded, PrefixAware, RoundRobin, Router
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100, SimulatedRunner, simulated_tier
from tests.effort import examples

BLOCK_SIZE = 4
NAMES = ("a", "b", "c", "d")


def prefix_aware(names: Sequence[str] = NAMES, **settings: int) -> PrefixAware:
    return with_replicas(PrefixAware(BLOCK_SIZE, **settings), names)


AnyRouter = TypeVar("AnyRouter", bound=Router)


def with_replicas(router: AnyRouter, names: Sequence[str] = NAMES) -> AnyRouter:
    for name in names:
        router.added(name)
    return router


def prompt(seed: int, num_tokens: int = 40) -> list[int]:
    """Prompts of different seeds have no block in common."""
    return [seed * 1000 + i for i in range(num_tokens)]


def idle(names: Sequence[str] = NAMES) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def sent(router: Router, prompts: Sequence[Sequence[int]], loads: Mapping[str, int]) -> list[str]:
    return [router.choose(token_ids, loads) for token_ids in prompts]


def stored(hashes: Iterable[int]) -> list[tuple[int, bool]]:
    """As a replica tells that it has these now."""
    return [(one, True) for one in hashes]


def small_engine(news: CacheNews, num_blocks: int = 12) -> Engine:
    config = EngineConfig(num_blocks=num_blocks, max_model_len=24, vocab_size=8, block_size=BLOCK_SIZE)
    runner = SimulatedRunner(replace(OPT_13B_ON_AN_A100, max_model_len=24), BLOCK_SIZE)
    return Engine(config, simulated_tier(), runner, listeners=[news], clock=runner.clock)


def hashes_in_the_cache(engine: Engine) -> set[int]:
    cache = engine.blocks.prefix_cache
    assert cache
    full = [block for block in cache.blocks if len(cache.entry_of[block].tokens) == BLOCK_SIZE]
    return {cache.hash_of(block) for block in full}


# --- Who may be chosen ------------------------------------------------------------------------------

EVERY_ROUTER = pytest.mark.parametrize(
    "make", [RoundRobin, LeastLoaded, lambda: PrefixAware(BLOCK_SIZE, most_stored=9, most_coming=7)]
)
some_names = st.sets(st.sampled_from(NAMES))
some_prompts = st.lists(st.integers(0, 1), max_size=30)


@EVERY_ROUTER
@settings(max_examples=examples(200))
@given(data=st.data())
def test_who_is_chosen_was_added_is_not_removed_and_has_a_load(make: type[RoundRobin], data: st.DataObject) -> None:
    router, living = make(), set[str]()
    for _ in range(data.draw(st.integers(1, 12))):
        for name in data.draw(some_names):
            if name in living:
                router.removed(name)
            else:
                router.added(name)
            living ^= {name}
        loads = {name: data.draw(st.integers(0, 30)) for name in data.draw(some_names)}
        token_ids = data.draw(some_prompts)
        if living & loads.keys():
            assert router.choose(token_ids, loads) in living & loads.keys()
        else:
            with pytest.raises(NoReplica):
                router.choose(token_ids, loads)


def test_round_robin_takes_turns_whoever_comes_and_goes() -> None:
    router = with_replicas(RoundRobin(), "abc")
    assert sent(router, [[1]] * 4, idle("abc")) == ["a", "b", "c", "a"]
    router.removed("b")
    router.added("d")
    assert sent(router, [[1]] * 4, idle("acd")) == ["c", "a", "d", "c"]


def test_the_least_loaded_is_chosen() -> None:
    assert with_replicas(LeastLoaded()).choose([1], {"a": 2, "b": 1, "c": 5, "d": 2}) == "b"


# --- What is known ----------------------------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_what_the_router_knows_is_what_the_replicas_caches_have(data: st.DataObject) -> None:
    """After their news; with evictions, several steps between news, and one that hears of everything late."""
    news = {name: CacheNews() for name in "ab"}
    engines = {name: small_engine(news[name]) for name in "ab"}
    router = prefix_aware("ab")
    for _ in range(data.draw(st.integers(1, 10))):
        token_ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
        name = router.choose(token_ids, {name: len(engines[name].unfinished_requests) for name in "ab"})
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 4)), ignore_eos=True)
        engines[name].add_request(token_ids, params, output_kind=RequestOutputKind.FINAL_ONLY)
        for _ in range(data.draw(st.integers(0, 6))):
            engines[name].step()
        if data.draw(st.booleans()):
            router.told(name, *news[name].latest())
            assert router.known(name) == hashes_in_the_cache(engines[name])
    for name, engine in engines.items():
        late = prefix_aware("ab")
        late.told(name, *news[name].latest())
        assert late.known(name) == hashes_in_the_cache(engine)


def test_blocks_are_evicted_in_these_runs() -> None:
    """Or the test above would say nothing of them."""
    news = CacheNews()
    engine = small_engine(news, num_blocks=6)
    router = prefix_aware("a")
    for seed in range(4):
        engine.add_request([seed] * 20, SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
        router.told("a", *news.latest())
        assert set(block_hashes([seed] * 20, BLOCK_SIZE)) <= router.known("a") == hashes_in_the_cache(engine)
    assert engine.stats.prefix_cache_evictions
    assert not set(block_hashes([0] * 20, BLOCK_SIZE)) & router.known("a")


@settings(max_examples=examples(200))
@given(data=st.data(), most_stored=st.integers(1, 8), most_coming=st.integers(1, 8))
def test_what_is_known_of_a_replica_is_bounded(data: st.DataObject, most_stored: int, most_coming: int) -> None:
    router, number = prefix_aware("a", most_stored=most_stored, most_coming=most_coming), 0
    for _ in range(data.draw(st.integers(1, 8))):
        hashes = block_hashes(data.draw(some_prompts), BLOCK_SIZE)
        if data.draw(st.booleans()):
            number += len(hashes)
            router.told("a", number, stored(hashes))
            assert {*hashes[:most_stored]} <= router.known("a"), "the latest is forgotten, or children after parents"
        else:
            router.choose(data.draw(some_prompts), {"a": 0})
        assert len(router.known("a")) <= most_stored
        assert len(router._known["a"].coming) <= most_coming


def test_what_is_coming_is_bounded_where_nothing_is_ever_told() -> None:
    router = prefix_aware("a", most_coming=15)
    for seed in range(1, 5):
        router.choose(prompt(seed), {"a": 0})
    coming = router._known["a"].coming
    last, before = block_hashes(prompt(4), BLOCK_SIZE), block_hashes(prompt(3), BLOCK_SIZE)
    assert set(coming) == {*last, *before[:5]}, "children are forgotten before their parents"


def test_the_least_recently_used_is_forgotten_first() -> None:
    router = prefix_aware("a", most_stored=2 * 10)
    for seed in (1, 2):
        router.told("a", seed * 10, stored(block_hashes(prompt(seed), BLOCK_SIZE)))
    router.choose(prompt(1), {"a": 0})
    router.told("a", 30, stored(block_hashes(prompt(3), BLOCK_SIZE)))
    assert router.known("a") == {*block_hashes(prompt(1), BLOCK_SIZE), *block_hashes(prompt(3), BLOCK_SIZE)}


def test_a_prefix_goes_where_it_is_stored_and_no_longer_when_it_is_evicted() -> None:
    router = prefix_aware()
    hashes = block_hashes(prompt(1), BLOCK_SIZE)
    router.told("c", 10, stored(hashes))
    loads = {"a": 3, "b": 4, "c": 5, "d": 4}
    assert router.choose(prompt(1), loads) == "c"
    router.told("c", 20, [*stored(hashes), *((one, False) for one in hashes)])
    assert router.choose(prompt(1), loads) == "a"


def test_too_short_a_match_does_not_outweigh_a_smaller_load() -> None:
    router = prefix_aware(least_match=0.3)
    router.told("c", 2, stored(block_hashes(prompt(1, 8), BLOCK_SIZE)))
    loads = {"a": 3, "b": 4, "c": 5, "d": 4}
    assert router.choose(prompt(1, 28), loads) == "a"  # 8 of 28
    router.told("a", 7, [(one, False) for one in block_hashes(prompt(1, 28), BLOCK_SIZE)])
    assert router.choose(prompt(1, 26), loads) == "c"


def test_the_salt_is_part_of_the_prefix() -> None:
    """A replica that has a prompt with one salt is of no use to another, which is spread as new prompts are."""
    router = with_replicas(PrefixAware(BLOCK_SIZE), "ab")
    mine, theirs = (salted(prompt(1), salt_number(salt)) for salt in ("mine", "theirs"))
    assert sent(router, [mine, mine, theirs, theirs, mine, prompt(1), theirs], idle("ab")) == [*"aabbabb"]


def test_what_an_engine_publishes_of_a_salted_prompt_is_what_its_router_looks_for() -> None:
    news, router = CacheNews(), with_replicas(PrefixAware(BLOCK_SIZE), "ab")
    engine, tokens = small_engine(news), [1, 2, 3, 4, 5, 6, 7, 1, 2]
    for salt in (None, "mine"):
        engine.add_request(tokens, SamplingParams(max_tokens=1, ignore_eos=True), cache_salt=salt)
        while engine.has_unfinished_requests():
            engine.step()
    router.told("a", *news.latest())
    mine, theirs = (salted(tokens, salt_number(salt)) for salt in ("mine", "theirs"))
    assert router.known("a") == {*block_hashes(tokens, BLOCK_SIZE), *block_hashes(mine, BLOCK_SIZE)}
    assert sent(router, [mine, tokens, mine], {"a": 1, "b": 0}) == ["a", "a", "a"]
    assert sent(router, [theirs], {"a": 1, "b": 0}) == ["b"]


def test_a_burst_with_one_new_prefix_does_not_scatter() -> None:
    """The first of it is not computed yet, and nothing was told of it."""
    router = prefix_aware(apart=8)
    loads = idle()
    for i in range(8):
        name = router.choose([*prompt(1), i], loads)
        loads[name] += 1
    assert loads == {"a": 8, "b": 0, "c": 0, "d": 0}


def test_a_replica_that_comes_back_has_an_empty_cache() -> None:
    router = prefix_aware()
    router.told("c", 10, stored(block_hashes(prompt(1), BLOCK_SIZE)))
    router.removed("c")
    router.told("c", 10, stored(block_hashes(prompt(1), BLOCK_SIZE)))  # news that came too late
    router.added("c")
    assert router.known("c") == frozenset()
    router.told("c", 1, stored([1]))
    router.added("c")  # known already
    assert router.known("c") == {1}


# --- Faults that were shipped elsewhere ----------------------------------------------------------------


def test_a_replica_that_knows_least_does_not_get_all_new_prompts() -> None:
    """sglang #14305: all new work went to the worker with the smallest tree."""
    router = prefix_aware()
    for name in "abc":
        router.told(name, 1000, stored(range(1000)))
    loads = idle()
    for i in range(40):
        loads[router.choose(prompt(i), loads)] += 1
    assert loads == dict.fromkeys(NAMES, 10)


@pytest.mark.parametrize("make", [LeastLoaded, lambda: PrefixAware(BLOCK_SIZE)])
def test_new_prompts_are_spread_where_loads_are_never_counted(make: type[RoundRobin]) -> None:
    """sglang #15473: all went to worker 0."""
    router = with_replicas(make())
    assert Counter(sent(router, [prompt(i) for i in range(40)], idle())) == dict.fromkeys(NAMES, 10)


def test_a_hot_prefix_idles_nobody() -> None:
    """production-stack #1035: who had it got all, the others nothing. Requests come 4 in the time in which each replica
    ends 1, so that one alone would drown."""
    router = prefix_aware()
    queues = {name: deque[int]() for name in NAMES}
    total = Counter[str]()
    for i in range(800):
        name = router.choose([*prompt(1), i], {name: len(queue) for name, queue in queues.items()})
        queues[name].append(i)
        total[name] += 1
        if i % 4 == 3:
            for queue in queues.values():
                if queue:
                    queue.popleft()
    assert max(total.values()) < 1.5 * 800 / 4
    assert max(map(len, queues.values())) <= 2 * 8


@settings(max_examples=examples(200))
@given(data=st.data(), apart=st.integers(0, 10), hot=st.integers(1, 3))
def test_nobody_who_has_much_more_to_do_than_another_is_given_more(data: st.DataObject, apart: int, hot: int) -> None:
    """Whatever comes and ends, with one, two or three hot prefixes: the balance that `apart` and `ratio` promise."""
    router = prefix_aware(apart=apart)
    loads = idle()
    for i in range(data.draw(st.integers(1, 80))):
        name = router.choose([*prompt(data.draw(st.integers(1, hot))), i], loads)
        least = min(loads.values())
        assert loads[name] - least <= apart or loads[name] <= router.ratio * least
        loads[name] += 1
        if data.draw(st.booleans()):
            ended = data.draw(st.sampled_from(NAMES))
            loads[ended] = max(0, loads[ended] - 1)


# --- News -------------------------------------------------------------------------------------------


def test_news_are_each_change_of_a_hash_in_whatever_block() -> None:
    news = CacheNews()
    for event in (
        BlockCached(0, 0, 5, block_hash=50),
        BlockCached(0, 1, 6, block_hash=60),
        StepStarted(1),
        BlockEvicted(5),
        BlockCached(1, 0, 7, block_hash=50),
        BlockEvicted(6),
    ):
        news(event)
    assert news.latest() == (5, [(50, True), (60, True), (50, False), (50, True), (60, False)])
    router = prefix_aware("a")
    router.told("a", *news.latest())
    assert router.known("a") == {50}


def test_what_a_router_knows_it_is_not_told_again() -> None:
    """The same news come many times, and what was done in between is newer: here a prompt that is to be computed."""
    router = prefix_aware("a")
    hashes = block_hashes(prompt(1), BLOCK_SIZE)
    gone = [*stored(hashes), *((one, False) for one in hashes)]
    router.told("a", 20, gone)
    router.choose(prompt(1), {"a": 0})
    router.told("a", 20, gone)
    assert set(router._known["a"].coming) == set(hashes)
    router.told("a", 21, [*gone[1:], (hashes[0], True)])
    assert router.known("a") == {hashes[0]}


def test_of_news_that_nobody_asks_for_the_latest_are_kept() -> None:
    """And a router that has missed some goes on from there."""
    news = CacheNews(most=3)
    router = prefix_aware("a")
    for block in range(10):
        news(BlockCached(0, 0, block, block_hash=block))
        if block == 1:
            router.told("a", *news.latest())
    assert news.latest() == (10, [(7, True), (8, True), (9, True)])
    router.told("a", *news.latest())
    assert router.known("a") == {0, 1, 7, 8, 9}


def test_a_cache_of_more_blocks_than_are_told_at_once_is_known_whole() -> None:
    """What was cached first, and is asked for again and again, is not forgotten for what was cached last."""
    news = CacheNews(most=10)
    engine = small_engine(news, num_blocks=200)
    router = prefix_aware("a")
    for seed in range(6):
        engine.add_request([seed] * 20, SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
        router.told("a", *news.latest())
    assert len(router.known("a")) == 30
    assert router.known("a") == hashes_in_the_cache(engine)
