"""Random workloads on engines that hand blocks over, on a memory that remembers which tokens wrote each slot.

Whatever is lost or cut on the way, whoever is preempted or cancelled: every request has the tokens that it has alone,
every slot holds what its reader takes it for, and nothing leaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from minipaged.contracts import Batch
from minipaged.engine.connected_memory import ConnectedBlockManager
from minipaged.engine.sequence import Request
from minipaged.errors import InvariantViolation
from minipaged.events import Event, PrefixReused
from minipaged.params import SamplingParams
from minipaged.replay.state import State
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves
from minipaged.testing.content_runner import Prefixes
from tests.effort import examples, one_case_in, scaled, seeds
from tests.engine.test_failure_injection import Fuse, crowded, run_through
from tests.handover.oracle import HandsOver, InMemory, connected_run, losing
from tests.replay.test_state import check_any_prefix
from tests.workloads import Workload, WorkloadRequest, WorkloadRun, random_workload


def cached_workload(seed: int, **config: Any) -> Workload:
    """Every other one with steps in flight."""
    workload = random_workload(seed)
    settings: dict[str, Any] = {"enable_prefix_caching": True, "async_scheduling": bool(seed % 2)} | config
    return replace(workload, config=replace(workload.config, **settings))


def hand_over(seed: int, **config: Any) -> Counter[str]:
    """The workload on one engine, then on another one that has what the first has left, as far as that is not lost."""
    workload, prefixes = cached_workload(seed, **config), Prefixes()
    connector = InMemory(workload.config.block_size, losing(seed, share=(0, 0, 0.1)[seed % 3]))
    happened: Counter[str] = Counter()
    for _ in range(2):
        events: list[Event] = []
        run = connected_run(workload, connector, prefixes, listeners=[events.append])
        run.to_the_end()
        run.check_outputs()
        run.check_nothing_leaked()
        happened += run.happened
        state = State()
        for event in events:  # raises where one does not follow from those before
            state.apply(event)
        stats = run.engine.current_stats()
        assert (stats.blocks_stored, stats.blocks_loaded) == (
            state.counts["blocks stored"],
            state.counts["blocks loaded"],
        )
    return happened


@one_case_in(4)
@scaled
@pytest.mark.parametrize("seeds", seeds(500, 50, least=50), ids=str)
def test_every_invariant_holds_where_blocks_are_handed_over(seeds: range) -> None:
    """Content, exclusive-write, exact-references, conservation, liveness, scheduling-invariance."""
    for seed in seeds:
        try:
            hand_over(seed)
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise


@scaled
def test_and_where_steps_of_several_lanes_are_in_flight() -> None:
    """A block is written with the step in whose lane its request came in, and before those of others can find it."""
    happened: Counter[str] = Counter()
    for seed in range(examples(60, least=10)):
        happened += hand_over(seed, pipeline_parallel_size=2 + seed % 2, async_scheduling=False)
    assert happened["loaded"]


RICH_WORKLOADS = (4, 8, 105)
"""Looked at first: in these, when this was written, all of it has happened."""


def test_the_workloads_bring_about_everything_that_can_happen_to_what_was_loaded() -> None:
    """Several samples and beams, chunks, hits before what is loaded, both ways of preemption, cancelling."""
    wanted = {
        "stored",
        "loaded",
        "loaded behind hits",
        "loaded, then preempted by swap",
        "loaded, then preempted by recompute",
        "loaded, then cancelled",
        "prompt computed in chunks",
        "block deduplicated",
        "block evicted",
    }
    happened: Counter[str] = Counter()
    for seed in dict.fromkeys((*RICH_WORKLOADS, *range(300))):
        happened += hand_over(seed)
        if wanted <= {*+happened}:
            return
    raise AssertionError(f"never: {wanted - {*+happened}}")


@pytest.mark.parametrize("seed", RICH_WORKLOADS)
def test_any_prefix_of_the_events_gives_what_the_engine_had(seed: int) -> None:
    workload, prefixes = cached_workload(seed), Prefixes()
    connector = InMemory(workload.config.block_size)
    connected_run(workload, connector, prefixes).to_the_end()
    run = connected_run(workload, connector, prefixes)
    check_any_prefix(run, seed)
    assert run.engine.stats.blocks_loaded


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """Also where all of its blocks are full and had: logits come from running a token."""
    workload = cached_workload(0)
    size = workload.config.block_size
    requests = [WorkloadRequest(0, tuple(range(1, 1 + 2 * size)), SamplingParams(temperature=0, seed=0, max_tokens=3))]
    sizes = {"num_blocks": 64, "max_model_len": 60, "vocab_size": 100, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    workload = replace(workload, requests=requests, config=replace(workload.config, **sizes))
    connector, prefixes = InMemory(size), Prefixes()
    for loaded in (0, 1):
        run = connected_run(workload, connector, prefixes)
        run.to_the_end()
        run.check_outputs()
        assert run.engine.current_stats().blocks_loaded == loaded
        assert len(connector.blocks) == 2


def test_a_part_of_a_block_is_shared_only_where_the_connector_has_no_full_one() -> None:
    one = SamplingParams(temperature=0, seed=0, max_tokens=1)
    sizes = {"block_size": 4, "num_blocks": 64, "max_model_len": 60, "vocab_size": 100, "max_num_seqs": 8}
    workload = cached_workload(0, max_num_batched_tokens=64, **sizes)
    connector, prefixes = InMemory(4), Prefixes()

    def found(*prompts: tuple[int, ...]) -> list[int | None]:
        requests = tuple(WorkloadRequest(5 * i, prompt, one) for i, prompt in enumerate(prompts))
        reused = list[Event]()
        run = connected_run(replace(workload, requests=requests), connector, prefixes, listeners=[reused.append])
        run.to_the_end()
        run.check_outputs()
        run.check_nothing_leaked()
        return [event.num_tokens for event in reused if isinstance(event, PrefixReused)]

    assert found((1, 2, 3, 4, 5, 6, 9, 9, 9)) == []  # now the connector has two blocks
    # Both from the connector: of the second, the engine has had only the first two tokens.
    assert found((1, 2, 3, 4, 5, 6, 8, 8), (1, 2, 3, 4, 5, 6, 9, 9, 7)) == [4]
    # Of these blocks the connector lacks the second, and the engine has two tokens of it.
    assert found((1, 2, 3, 4, 5, 6, 9, 9, 7), (1, 2, 3, 4, 5, 6, 7, 7, 7)) == [6]


# --- What can fail --------------------------------------------------------------------------------


def wired(workload: Workload, fuse: Fuse, connector: InMemory, prefixes: Prefixes) -> WorkloadRun:
    """A run in which all that has to do with handing over asks the fuse first."""

    class Runner(HandsOver):
        def move(self, moves: BlockMoves) -> None:
            if moves.load:
                fuse.check("write blocks")
            super().move(moves)
            if moves.load:
                fuse.check("after writing blocks")

        def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
            fuse.check("read blocks")
            return super().read_blocks(blocks)

        def forward(self, batch: Batch) -> Any:
            if self.mirror.rows:
                fuse.check("forward")
            return super().forward(batch)

    class Connector(InMemory):
        def lacking(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[int]:
            fuse.check("lacking")
            return super().lacking(token_ids, start, stop)

        def store(self, token_ids: Sequence[int], blocks: Mapping[int, bytes]) -> Sequence[int]:
            fuse.check("store")
            return super().store(token_ids, blocks)

        def load(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[bytes]:
            fuse.check("load")
            return super().load(token_ids, start, stop)

    mine = Connector(workload.config.block_size)
    mine.blocks = connector.blocks
    return connected_run(workload, mine, prefixes, make_runner=Runner)


@pytest.mark.parametrize(
    "part",
    ["write blocks", "after writing blocks", "read blocks", "forward", "lacking", "store", "load"],
)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_whatever_raises_costs_a_step_and_no_request(part: str, preemption: str) -> None:
    """At each of the first calls of each part; what was half written is nobody's, and is not found later."""
    workload, prefixes = crowded(preemption, prefix_caching=True), Prefixes()
    errors = 0
    for blows_at in range(1, 6):
        connector = InMemory(workload.config.block_size)
        connected_run(workload, connector, prefixes).to_the_end()
        if part in ("read blocks", "store"):
            connector.blocks.clear()
        errors += run_through(wired(workload, Fuse(part, blows_at), connector, prefixes))
    assert errors > 1


def test_a_block_that_was_not_written_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle must not be blind to what is loaded."""
    monkeypatch.setattr(HandsOver, "move", lambda self, moves: super(HandsOver, self).move(moves))
    with pytest.raises(InvariantViolation, match="content"):
        hand_over(RICH_WORKLOADS[0])


def test_a_loaded_block_that_is_offered_before_it_is_written_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails would leave it in the prefix cache, with nothing in it."""
    right = ConnectedBlockManager.load

    def load(self: ConnectedBlockManager, request: Request, costs: Costs) -> None:
        right(self, request, costs)
        self.publish(request.sequences[0], request.sequences[0].num_computed)

    monkeypatch.setattr(ConnectedBlockManager, "load", load)
    with pytest.raises(InvariantViolation, match="content"):
        test_whatever_raises_costs_a_step_and_no_request("write blocks", "recompute")
