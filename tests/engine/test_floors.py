"""The floor in host memory below the prefix cache: what is evicted comes back, pinned while it moves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, SamplingParams
from minipaged.engine import floors
from minipaged.engine.floors import BlockName, FlooredBlockManager, HostFloor
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.errors import InvalidRequest, InvariantViolation
from minipaged.events import BlockDemoted, BlocksPromoted, HostBlockDropped
from minipaged.params import EngineConfig
from minipaged.replay.state import State
from minipaged.scheduling import RequestView, Way
from minipaged.setup.settings import Settings
from minipaged.steps import BlockMoves
from minipaged.testing.content_runner import ContentRunner
from tests.effort import one_case_in, scaled, seeds, thorough
from tests.engine.test_partial_hits import Served
from tests.late_device import LATE, LateRunner
from tests.workloads import FAST, REFERENCE, Workload, WorkloadRun, random_workload

TIER = {"kv_cache_tiers": ("host",)}
FIRST, OTHER = range(1, 10), range(20, 34)  # of blocks of 4: two full blocks and a token; three and two tokens


def floored(seed: int) -> Workload:
    """The random workload of this seed, with a floor of few blocks, and with steps in flight every other time."""
    workload = random_workload(seed)
    config = replace(
        workload.config,
        **TIER,
        enable_prefix_caching=True,
        num_swap_blocks=workload.config.num_swap_blocks or 6,
        async_scheduling=bool(seed % 2),
    )
    return replace(workload, config=config, swap_is_cheap=seed % 8 != 0)


def run_floored(seed: int, make_runner: type[ContentRunner] | None = None) -> WorkloadRun:
    workload = floored(seed)
    late = workload.config.async_scheduling
    make = make_runner or (LateRunner if late else ContentRunner)
    run = WorkloadRun(workload, LATE if late else REFERENCE, make_runner=make, steady=seed % 4 < 2)
    run.to_the_end()
    run.check_outputs()
    run.check_nothing_leaked()
    return run


@one_case_in(4)
@scaled
@pytest.mark.parametrize("seeds", seeds(1000, 100), ids=str)
def test_every_invariant_holds_with_a_floor_in_random_workloads(seeds: range) -> None:
    """Pinned-in-flight shows in content, as the moves run by kind; and in exact-references of the host pool."""
    for seed in seeds:
        try:
            run_floored(seed)
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


@one_case_in(2)
@scaled
@pytest.mark.parametrize("seeds", seeds(200, 50), ids=str)
def test_every_invariant_holds_with_a_floor_and_several_lanes(seeds: range) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        workload = floored(seed)
        config = replace(workload.config, pipeline_parallel_size=2 + seed % 2, async_scheduling=False)
        run = WorkloadRun(replace(workload, config=config), LATE, make_runner=LateRunner)
        run.to_the_end()
        run.check_outputs()
        run.check_nothing_leaked()
        happened.update(run.happened)
    assert happened["blocks promoted"]


def test_the_workloads_use_the_floor_in_every_way() -> None:
    happened: Counter[str] = Counter()
    ways = {"block demoted", "blocks promoted", "host block dropped: room", "preempted by swap"}
    for seed in range(400):
        happened.update(set(run_floored(seed).happened))
        if all(happened[way] > 1 for way in ways):
            return
    raise AssertionError(happened)


# --- Single runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [REFERENCE, FAST], ids=["reference", "fast"])
def test_what_was_evicted_comes_back_by_a_hit(tier: Any) -> None:
    served = Served(num_blocks=4, tier=tier, num_swap_blocks=8, **TIER)
    served.serve(FIRST)
    served.serve(OTHER)
    [*demoted] = served.of(BlockDemoted)
    again = served.serve(FIRST)
    [promoted] = served.of(BlocksPromoted)
    assert [host for host, _ in promoted.pairs] == [event.host_block for event in demoted][:2][::-1]
    assert again.num_cached_tokens == 8
    assert served.engine.stats.blocks_promoted == 2


def test_a_block_that_the_floor_keeps_is_not_moved_down_again() -> None:
    served = Served(num_blocks=4, num_swap_blocks=8, **TIER)
    for prompt in (FIRST, OTHER, FIRST):
        served.serve(prompt)
    before = served.engine.stats.blocks_demoted
    served.serve(OTHER)
    assert served.engine.stats.blocks_demoted == before


def test_the_floor_forgets_the_least_recently_used_block() -> None:
    served = Served(num_blocks=4, num_swap_blocks=3, **TIER)
    for prompt in (FIRST, OTHER, range(40, 50)):
        served.serve(prompt)
    demoted = [event.host_block for event in served.of(BlockDemoted)]
    dropped = served.of(HostBlockDropped)
    assert dropped
    assert [event.host_block for event in dropped] == demoted[: len(dropped)]
    assert {event.reason for event in dropped} == {"room"}


def test_no_child_stays_on_the_floor_behind_its_parent() -> None:
    """It could not be found there. Children come down first, and after a hit they are dropped first too."""
    allocator = REFERENCE.block_allocator(4)
    dropped: list[Any] = []
    floor = HostFloor(allocator, dropped.append, lambda leaving: ())  # type: ignore[arg-type]
    parent, child = floors.names_of(range(8), 4, 2)
    blocks = [*floor.keep([child, parent]).values()][::-1]
    floor.launched()
    floor.moves_done()
    assert floor.match([parent, child]) == blocks
    floor.give_back(1)
    assert [event.host_block for event in dropped] == [blocks[1]]
    assert floor.match([parent, child]) == [blocks[0]]


@pytest.mark.parametrize(("num_swap_blocks", "found"), [(3, 12), (6, 24), (7, 24)])
def test_of_more_blocks_than_the_floor_has_the_beginning_of_a_prompt_is_kept(num_swap_blocks: int, found: int) -> None:
    """One step evicts six full blocks. A child without its parents could not be found."""
    served = Served(num_blocks=8, num_swap_blocks=num_swap_blocks, max_num_batched_tokens=64, **TIER)
    first = range(20, 45)
    served.serve(first)
    served.serve(range(49, 20, -1))
    assert len(served.of(BlockDemoted)) == found // 4
    assert served.serve(first).num_cached_tokens == found


def test_a_block_that_moves_down_again_is_used() -> None:
    """Others leave the floor before it: for the blocks that move down with it, and later its own children."""
    dropped: list[Any] = []
    floor = HostFloor(REFERENCE.block_allocator(3), dropped.append, lambda leaving: ())  # type: ignore[arg-type]
    parent, child = floors.names_of(range(8), 4, 2)
    one, two, three = (floors.name_of(None, [token]) for token in (1, 2, 3))
    blocks: dict[bytes, int] = {}

    def keep(*names: BlockName) -> list[int]:
        """Keep them, and return the blocks that had to leave."""
        dropped.clear()
        blocks.update(filled := floor.keep(names))
        assert floor.num_available == len([*floor.held]) - 2 * len(filled), "what is filled is kept and pinned"
        floor.launched()
        floor.moves_done()
        return [event.host_block for event in dropped]

    assert keep(parent, one, two) == []
    assert keep(child, parent) == [blocks[one.digest]]
    assert keep(one) == [blocks[two.digest]]
    assert keep(two) == [blocks[child.digest]]
    assert keep(three) == [blocks[parent.digest]]


def test_a_swap_is_offered_the_host_blocks_that_the_floor_would_give_back() -> None:
    offered: list[int] = []

    class Asks(FirstComeFirstServed):
        def way_back(self, victim: RequestView, num_host_blocks: int) -> Way:
            offered.append(num_host_blocks)
            return super().way_back(victim, num_host_blocks)

    sizes = {"num_blocks": 12, "num_swap_blocks": 9, "block_size": 4, "max_model_len": 48, "vocab_size": 50}
    config = EngineConfig(**sizes, **TIER, preemption="auto", debug=True)
    run = WorkloadRun(Workload(config, (), swap_is_cheap=True), policy=Asks)
    for prompts in ([range(1, 14)], [range(5, 36)], [range(30, 43), range(31, 44)]):
        for prompt in prompts:
            run.engine.add_request([*prompt], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        while run.engine.has_unfinished_requests():
            run.engine.step()
    assert run.happened["block demoted"]
    assert offered == [9], "kept blocks count too"


def test_where_computing_is_faster_nothing_is_moved() -> None:
    served = Served(num_blocks=4, num_swap_blocks=8, **TIER)
    served.run.runner.swap_is_cheap = False
    for prompt in (FIRST, OTHER, FIRST):
        served.serve(prompt)
    assert not served.of(BlockDemoted)


def test_the_events_are_complete() -> None:
    """Folded, they give what the floor keeps, at every step; and no event names a block that it does not keep."""
    for seed in range(60):
        state = State()
        tier, runner = (LATE, LateRunner) if seed % 2 else (REFERENCE, ContentRunner)
        run = WorkloadRun(floored(seed), tier, make_runner=runner, listeners=[state.apply])
        run.to_the_end()
        memory = run.engine.blocks
        assert isinstance(memory, FlooredBlockManager)
        assert sorted(state.demoted) == sorted(memory.floor.held)


# --- Steps that fail ------------------------------------------------------------------------------


class Loses(ContentRunner):
    """Its first moves up or down raise, after they were made in part."""

    lost: int = 0

    def move(self, moves: BlockMoves) -> None:
        if (moves.swap_in or moves.swap_out) and self.lost < 3:
            self.lost += 1
            super().move(moves._replace(swap_in=(), swap_out=()))
            raise ConnectionError("the link is down")
        super().move(moves)


def test_what_fails_to_move_is_computed() -> None:
    lost = Counter[str]()
    for seed in range(0, 120, 2):
        run = WorkloadRun(floored(seed), make_runner=Loses)
        for now in range(500):
            try:
                if not run.advance(now):
                    break
            except ConnectionError:
                run.engine.check_invariants()
        run.check_outputs()
        run.check_nothing_leaked()
        lost.update(set(run.happened))
    assert lost["host block dropped: lost"] > 3


def test_a_load_that_always_fails_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ContentRunner.move

    def never_loads(self: ContentRunner, moves: BlockMoves) -> None:
        if moves.swap_in:
            raise ConnectionError("the link is down")
        right(self, moves)

    served = Served(num_blocks=4, num_swap_blocks=8, **TIER)
    served.serve(FIRST)
    served.serve(OTHER)
    monkeypatch.setattr(ContentRunner, "move", never_loads)
    name = served.add(FIRST)
    for _ in range(5):
        try:
            served.step()
        except ConnectionError:
            assert {event.reason for event in served.of(HostBlockDropped)} == {"lost"}
    assert served.outputs[name].finished


# --- Planted bugs ---------------------------------------------------------------------------------


def find_a_failure(seeds: Iterable[int] = range(500)) -> None:
    for seed in seeds:
        try:
            run_floored(seed)
        except (InvariantViolation, AssertionError):
            return
    raise AssertionError("the oracle found nothing")


def test_the_oracle_finds_a_pinned_block_that_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making room for a load evicts what is being loaded (sglang, PR 27631)."""

    def forgets(self: HostFloor, blocks: Iterable[int]) -> None:
        list(blocks)

    monkeypatch.setattr(HostFloor, "pin", forgets)
    find_a_failure()


def test_the_oracle_finds_a_lost_load_that_is_taken_for_done() -> None:
    class LosesLoads(ContentRunner):
        def move(self, moves: BlockMoves) -> None:
            super().move(moves._replace(swap_in=()))

    for seed in range(0, 400, 2):
        try:
            run_floored(seed, LosesLoads)
        except InvariantViolation:
            return
    raise AssertionError("the oracle found nothing")


def test_the_oracle_finds_lost_moves_that_the_floor_takes_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(self: HostFloor) -> None:
        self.launched()
        while self._in_flight:
            self.moves_done()

    monkeypatch.setattr(HostFloor, "moves_lost", trusting)
    with pytest.raises((InvariantViolation, AssertionError)):
        test_what_fails_to_move_is_computed()


def test_the_oracle_finds_a_stale_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is named by all tokens up to its end, not by its own."""
    right = floors.name_of
    monkeypatch.setattr(floors, "name_of", lambda parent, tokens: right(b"", tokens))
    find_a_failure()


# --- Settings -------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"num_blocks": 4, "max_model_len": 40, "vocab_size": 50}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv_cache_tiers": ("disk",), "num_swap_blocks": 4}, "give \\('host',\\)"),
        ({"kv_cache_tiers": 3, "num_swap_blocks": 4}, "must hold strings"),
        ({"kv_cache_tiers": ("host",), "num_swap_blocks": 4, "enable_prefix_caching": False}, "leave one of them out"),
        ({"kv_cache_tiers": ("host",), "num_swap_blocks": 0}, "num_swap_blocks is 0"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        EngineConfig(**SIZES, **given)
    with pytest.raises(InvalidRequest, match=says):
        Settings(**given)


def test_one_string_names_one_floor() -> None:
    config = EngineConfig(**SIZES, num_swap_blocks=4, kv_cache_tiers="host")  # type: ignore[arg-type]
    assert config.kv_cache_tiers == ("host",)


# --- An LLM ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "ranks", "kv_cache_dtype"),
    [
        ("reference", 1, "auto"),
        ("reference", 2, "int8"),
        pytest.param("fast", 1, "auto", marks=thorough),
        pytest.param("fast", 1, "fp8", marks=thorough),
        pytest.param("fast", 2, "auto", marks=thorough),
    ],
)
def test_an_llm_with_a_floor_gives_the_same_tokens(
    tiny_model: Path, tier: str, ranks: int, kv_cache_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in parts: every rank moves its part of a block."""
    monkeypatch.setattr(floors, "carry_seconds", lambda costs, num_blocks: 0.0)
    r = random.Random(5)
    prompts = [[r.randrange(3, 250) for _ in range(40)] for _ in range(4)] * 2
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    given: dict[str, Any] = {"block_size": 4, "num_blocks": 24, "num_swap_blocks": 60, "max_model_len": 64}
    given |= {"tier": tier, "device": "cpu", "dtype": "float32", "tensor_parallel_size": ranks}
    given |= {"kv_cache_dtype": kv_cache_dtype}
    told = []
    for tiers in ((), ("host",)):
        with closing(LLM(tiny_model, **given, kv_cache_tiers=tiers)) as llm:
            told.append([llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts])
            assert bool(llm.stats().blocks_promoted) == bool(tiers)
    assert told[0] == told[1]
