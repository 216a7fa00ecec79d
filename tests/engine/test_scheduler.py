"""Who runs, who waits, who is preempted: one small scenario for each rule (paper, sections 4.3 and 4.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minipaged.contracts import Batch
from minipaged.engine.engine import Engine
from minipaged.engine.memory import AllocStatus
from minipaged.engine.sequence import RequestState
from minipaged.errors import InvalidRequest
from minipaged.events import BlocksFreed, Event, RequestPreempted, SequenceFinished, StepStarted, SwappedOut
from minipaged.outputs import RequestOutput
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.testing.content_runner import ContentRunner
from tests.workloads import REFERENCE, ended


class Scene:
    """An engine on the content oracle, with blocks of four tokens; prompts are given by their length alone."""

    def __init__(self, num_blocks: int, *, swap_is_cheap: bool = True, **config: Any) -> None:
        settings = {"block_size": 4, "max_model_len": 64, "vocab_size": 50, "enable_prefix_caching": False, **config}
        self.config = EngineConfig(num_blocks=num_blocks, debug=True, **settings)
        swap_blocks, block_size = self.config.num_swap_blocks, self.config.block_size
        self.runner = Recorder(num_blocks, swap_blocks, block_size, self.config.vocab_size, swap_is_cheap)
        self.events: list[Event] = []
        self.engine = Engine(self.config, REFERENCE, self.runner, listeners=[self.events.append])
        self.runner.engine = self.engine
        self.outputs: dict[str, RequestOutput] = {}
        self.prompts = 0

    def add(self, name: str, prompt: int, max_tokens: int = 8, n: int = 1, *, beams: int = 0) -> None:
        params: SamplingParams | BeamSearchParams
        if beams:
            params = BeamSearchParams(beam_width=beams, max_tokens=max_tokens)
        else:
            params = SamplingParams(n=n, seed=0, max_tokens=max_tokens)
        self.prompts += 1
        tokens = [(7 * self.prompts + i) % 50 for i in range(prompt)]
        self.engine.add_request(tokens, params, request_id=name)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in ended(self.engine.step()):
                self.outputs[output.request_id] = output

    def to_the_end(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()
        self.check_all_given_back()

    def check_all_given_back(self) -> None:
        blocks = self.engine.blocks
        assert blocks.num_available == blocks.allocator.num_blocks
        assert not blocks.host_allocator or blocks.host_allocator.num_free == blocks.host_allocator.num_blocks

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.engine.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.engine.scheduler.waiting]

    @property
    def preempted(self) -> list[tuple[str, str]]:
        return [(event.request, event.mode) for event in self.events if isinstance(event, RequestPreempted)]

    def step_until(self, happened: Callable[[], object]) -> None:
        for _ in range(100):
            if happened():
                return
            self.step()
        raise AssertionError("it never happened")


class Recorder(ContentRunner):
    """Remembers the number of query tokens of each row of the last batch."""

    rows: tuple[int, ...] = ()

    def forward(self, batch: Batch) -> Any:
        self.rows = tuple(len(row.token_ids) for row in batch)
        return super().forward(batch)


# --- Admission ------------------------------------------------------------------------------------


def test_requests_are_admitted_in_order_of_arrival_and_nobody_overtakes() -> None:
    scene = Scene(num_blocks=6)
    scene.add("first", prompt=16)
    scene.add("large", prompt=20, max_tokens=1)  # 5 blocks: LATER
    scene.add("small", prompt=2)  # would fit at once
    scene.step()
    assert (scene.running, scene.waiting) == (["first"], ["large", "small"])
    scene.to_the_end()
    finished = [event.request for event in scene.events if event.name == "request_finished"]
    assert finished == ["first", "large", "small"]


def test_a_newcomer_must_leave_a_block_for_each_sequence_that_runs() -> None:
    """Or it would be preempted, and its work lost, as soon as those sequences grow."""
    scene = Scene(num_blocks=7)
    scene.add("two samples", prompt=4, n=2, max_tokens=9)  # 5 blocks in the end
    scene.step(2)
    scene.add("newcomer", prompt=12, max_tokens=4)  # 3 blocks; of the 4 that are free 2 are kept back
    scene.step()
    assert (scene.running, scene.waiting) == (["two samples"], ["newcomer"])
    scene.to_the_end()
    assert scene.engine.stats.preempted_by_recompute == 0


def test_what_nobody_can_come_to_need_is_not_held_back() -> None:
    scene = Scene(num_blocks=7)
    scene.add("two samples", prompt=4, n=2, max_tokens=5)  # 3 blocks in the end, and it has them
    scene.step(2)
    scene.add("newcomer", prompt=12, max_tokens=4)  # 3 blocks, then 4: all that are free
    scene.step()
    assert (scene.running, scene.waiting) == (["two samples", "newcomer"], [])
    scene.to_the_end()
    assert scene.engine.stats.preempted_by_recompute == 0


def test_the_answer_to_admission_is_ok_later_or_never() -> None:
    scene = Scene(num_blocks=4)
    scene.add("waits", prompt=12, max_tokens=5)
    [request] = scene.engine.scheduler.waiting
    assert scene.engine.blocks.can_admit(request) is AllocStatus.OK
    held = scene.engine.blocks.allocator.allocate_many(2)
    assert scene.engine.blocks.can_admit(request) is AllocStatus.LATER
    scene.engine.blocks.allocator.free_many(held)
    request.max_output_tokens = 6  # prompt and output: 5 blocks
    assert scene.engine.blocks.can_admit(request) is AllocStatus.NEVER


def test_what_could_never_fit_is_refused_at_once_and_does_not_block_the_queue() -> None:
    scene = Scene(num_blocks=4)
    with pytest.raises(InvalidRequest, match="could never be served"):
        scene.add("never", prompt=12, max_tokens=6)
    scene.add("just fits", prompt=12, max_tokens=5)
    scene.to_the_end()
    assert len(scene.outputs["just fits"].outputs[0].token_ids) == 5


def test_at_most_max_num_seqs_sequences_run_at_once() -> None:
    scene = Scene(num_blocks=20, max_num_seqs=3)
    scene.add("two", prompt=4, n=2)
    scene.add("two more", prompt=4, n=2)
    scene.add("one", prompt=4)
    scene.step(2)
    assert (scene.running, scene.waiting) == (["two"], ["two more", "one"])
    scene.to_the_end()


def test_a_request_whose_prefix_is_cached_needs_room_for_the_rest_only() -> None:
    scene = Scene(num_blocks=7, enable_prefix_caching=True)  # one of them spare for the first
    prompt = list(range(16))
    for name in ("first", "second"):
        params = SamplingParams(temperature=0, max_tokens=8 if name == "first" else 2)
        scene.engine.add_request(prompt, params, request_id=name)
        scene.step()
    assert scene.running[0] == "first"
    assert scene.engine.stats.blocks_used == 6  # 5 + 4 without sharing
    scene.to_the_end()
    assert scene.outputs["second"].num_cached_tokens == 15  # of its fourth block it has the first three slots


# --- Tokens of one batch --------------------------------------------------------------------------


def test_decoding_goes_first_and_prompts_share_what_is_left_of_the_batch() -> None:
    scene = Scene(num_blocks=20, max_num_batched_tokens=10)
    scene.add("a", prompt=4)
    scene.add("b", prompt=4)
    scene.step()
    assert scene.runner.rows == (4, 4)
    scene.add("long", prompt=18)
    scene.step()
    assert scene.runner.rows == (1, 1, 8)
    scene.step()
    assert scene.runner.rows == (1, 1, 8)
    scene.step()
    assert scene.runner.rows == (1, 1, 2)
    scene.step()
    assert scene.runner.rows == (1, 1, 1)
    scene.to_the_end()


def test_an_older_request_decodes_on_while_a_younger_one_computes_its_prompt_and_the_other_way_round() -> None:
    scene = Scene(num_blocks=20, max_num_batched_tokens=6)
    scene.add("long", prompt=20)
    scene.step()
    scene.add("short", prompt=2)
    scene.step(2)
    assert scene.runner.rows == (6,)  # no room for the younger one: nothing is left of the batch
    scene.step()
    assert scene.runner.rows == (2, 2)
    scene.step()
    assert scene.runner.rows == (1, 1)
    scene.to_the_end()


def test_blocks_are_taken_chunk_by_chunk() -> None:
    scene = Scene(num_blocks=20, max_num_batched_tokens=4)
    scene.add("long", prompt=20)
    used = []
    for _ in range(5):
        scene.step()
        used.append(scene.engine.blocks.num_used)
    assert used == [1, 2, 3, 4, 5]


# --- Preemption -----------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted_first_and_the_oldest_never() -> None:
    scene = Scene(num_blocks=10, num_swap_blocks=20, preemption="swap")
    for name, prompt in (("oldest", 8), ("middle", 4), ("latest", 12)):  # the middle one would be cheaper
        scene.add(name, prompt, max_tokens=12)
        scene.step()
    scene.to_the_end()
    victims = [name for name, _ in scene.preempted]
    assert victims[0] == "latest"
    assert "oldest" not in victims
    assert scene.outputs["oldest"].metrics.num_preemptions == 0


@pytest.mark.parametrize("cheapest", ["second", "third"])
def test_among_those_that_arrived_together_the_last_is_preempted_whatever_it_costs_to_bring_back(cheapest: str) -> None:
    scene = Scene(num_blocks=9, num_swap_blocks=20, preemption="swap")
    scene.add("first", prompt=4, max_tokens=12)
    scene.step()
    scene.add("second", prompt=4 if cheapest == "second" else 12, max_tokens=12)
    scene.add("third", prompt=4 if cheapest == "third" else 12, max_tokens=12)
    scene.step_until(lambda: scene.preempted)
    assert scene.preempted == [("third", "swap")]
    scene.to_the_end()


def test_the_oldest_is_not_preempted_even_if_it_is_the_cheapest_to_bring_back() -> None:
    """Liveness: somebody always gets on."""
    scene = Scene(num_blocks=7, num_swap_blocks=20, preemption="swap")
    scene.add("short", prompt=4, max_tokens=12)
    scene.add("long", prompt=16, max_tokens=12)
    scene.step_until(lambda: scene.preempted)
    assert scene.preempted == [("long", "swap")]
    scene.to_the_end()


def test_all_sequences_of_a_request_are_preempted_and_come_back_together() -> None:
    scene = Scene(num_blocks=10, num_swap_blocks=20, preemption="swap")
    scene.add("old", prompt=7, max_tokens=18)
    scene.step()
    scene.add("three", prompt=7, max_tokens=9, n=3)
    scene.step_until(lambda: scene.preempted)
    three = scene.engine.scheduler.waiting[0]
    assert (three.state, [sequence.swapped for sequence in three.sequences]) == (RequestState.SWAPPED, [True] * 3)
    scene.step_until(lambda: "three" in scene.running)
    assert [sequence.swapped for sequence in three.sequences] == [False] * 3
    scene.to_the_end()


def test_a_shared_block_is_swapped_once_and_is_shared_again_afterwards() -> None:
    scene = Scene(num_blocks=10, num_swap_blocks=20, preemption="swap")
    scene.add("old", prompt=7, max_tokens=18)
    scene.step()
    scene.add("three", prompt=8, max_tokens=9, n=3)
    scene.step_until(lambda: scene.preempted)
    [swapped] = [event for event in scene.events if isinstance(event, SwappedOut)]
    three = scene.engine.scheduler.waiting[0]
    entries = [block for sequence in three.sequences for block in sequence.table.blocks]
    assert len(swapped.pairs) == len(set(entries)) < len(entries)
    scene.step_until(lambda: "three" in scene.running)
    first, second = (three.sequences[i].table.blocks[:2] for i in (0, 1))
    assert list(first) == list(second)
    scene.to_the_end()


def test_swapping_falls_back_to_recomputing_when_the_host_pool_is_full() -> None:
    scene = Scene(num_blocks=6, num_swap_blocks=1, preemption="swap")
    scene.add("first", prompt=8, max_tokens=12)
    scene.add("second", prompt=8, max_tokens=12)
    scene.to_the_end()
    assert ("second", "recompute") in scene.preempted


@pytest.mark.parametrize(("swap_is_cheap", "mode"), [(True, "swap"), (False, "recompute")])
def test_auto_takes_whichever_way_back_costs_less(swap_is_cheap: bool, mode: str) -> None:
    scene = Scene(num_blocks=6, num_swap_blocks=20, preemption="auto", swap_is_cheap=swap_is_cheap)
    scene.add("first", prompt=8, max_tokens=12)
    scene.add("second", prompt=8, max_tokens=12)
    scene.to_the_end()
    assert {how for _, how in scene.preempted} == {mode}


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_group_preempted_by_recompute_shares_its_blocks_again(enable_prefix_caching: bool) -> None:
    """Liveness: four sequences of 6 blocks each fit into 12 blocks only because they share 4."""
    scene = Scene(num_blocks=12, preemption="recompute", enable_prefix_caching=enable_prefix_caching)
    scene.add("old", prompt=12, max_tokens=20)
    scene.step()
    scene.add("four", prompt=16, max_tokens=8, n=4)
    scene.step_until(lambda: scene.preempted)
    four = scene.engine.scheduler.waiting[0]
    assert four.request_id == "four"
    scene.step_until(lambda: "four" in scene.running and four.sequences[3].num_remaining <= 1)
    tables = [list(sequence.table.blocks[:4]) for sequence in four.sequences]
    assert tables[1:] == tables[:-1]
    scene.to_the_end()


def test_preemption_does_not_change_what_is_generated() -> None:
    """Scheduling-invariance, on the smallest example."""
    tokens = []
    for num_blocks in (50, 6):
        scene = Scene(num_blocks=num_blocks, preemption="recompute")
        scene.add("first", prompt=8, max_tokens=12)
        scene.add("second", prompt=8, max_tokens=12)
        scene.to_the_end()
        tokens.append([scene.outputs[name].outputs[0].token_ids for name in ("first", "second")])
    assert scene.preempted
    assert tokens[0] == tokens[1]


# --- Endings --------------------------------------------------------------------------------------


def test_dropped_beams_free_their_blocks_in_the_same_step() -> None:
    scene = Scene(num_blocks=40)
    scene.add("beams", prompt=5, max_tokens=16, beams=4)
    while scene.engine.has_unfinished_requests():
        scene.step()
        held = {block for r in scene.engine.scheduler.running for s in r.sequences for block in s.table.blocks}
        assert scene.engine.blocks.num_used == len(held)
    starts = [i for i, event in enumerate(scene.events) if isinstance(event, StepStarted)]
    drops = [
        (i, event) for i, event in enumerate(scene.events) if isinstance(event, SequenceFinished) and i < starts[-1]
    ]
    assert drops
    for i, event in drops:
        freed = scene.events[i + 1]
        assert isinstance(freed, BlocksFreed)
        assert freed.sequence == event.sequence


def test_a_finished_sequence_gives_its_blocks_back_while_its_siblings_go_on() -> None:
    scene = Scene(num_blocks=40, eos_token_ids=(2, 3, 4, 5, 6, 7, 8, 9))
    scene.add("four", prompt=5, max_tokens=20, n=4)
    scene.step_until(lambda: any(isinstance(event, SequenceFinished) for event in scene.events))
    [four] = scene.engine.scheduler.running
    assert 0 < len(four.sequences) < 4
    assert scene.engine.blocks.num_used == len({b for s in four.sequences for b in s.table.blocks})
    scene.to_the_end()


def waiting(scene: Scene) -> bool:
    return "other" in scene.waiting and not scene.preempted


def running(scene: Scene) -> bool:
    return "other" in scene.running and all(s.num_remaining == 1 for s in scene.engine.scheduler.running[-1].sequences)


def mid_prefill(scene: Scene) -> bool:
    return "other" in scene.running and 0 < scene.engine.scheduler.running[-1].sequences[0].num_computed < 9


def swapped(scene: Scene) -> bool:
    return any(request.state is RequestState.SWAPPED for request in scene.engine.scheduler.waiting)


@pytest.mark.parametrize("state", [waiting, running, mid_prefill, swapped])
def test_cancelling_gives_all_blocks_back_in_every_state(state: Callable[[Scene], bool]) -> None:
    """Exact-references; and the other request is not disturbed."""
    scene = Scene(num_blocks=8, num_swap_blocks=20, preemption="swap", max_num_batched_tokens=6)
    scene.add("oldest", prompt=5, max_tokens=20)
    scene.add("other", prompt=9, max_tokens=12, n=2)
    scene.step_until(lambda: state(scene))
    scene.engine.abort("other")
    held = {block for r in scene.engine.scheduler.running for s in r.sequences for block in s.table.blocks}
    assert scene.engine.blocks.num_used == len(held)
    assert "other" not in scene.running + scene.waiting
    scene.step()
    assert scene.outputs["other"].finished is False
    assert {output.finish_reason for output in scene.outputs["other"].outputs} == {"abort"}
    scene.to_the_end()
    assert len(scene.outputs["oldest"].outputs[0].token_ids) == 20


def test_cancelling_what_is_unknown_or_over_does_nothing() -> None:
    scene = Scene(num_blocks=8)
    scene.add("one", prompt=5, max_tokens=2)
    scene.engine.abort("no such request")
    scene.to_the_end()
    number_of_events = len(scene.events)
    scene.engine.abort("one")
    assert len(scene.events) == number_of_events


def test_a_listener_may_cancel_a_request_and_add_another() -> None:
    scene = Scene(num_blocks=8)

    def change_of_mind(event: Event) -> None:
        if event.name == "token_generated" and "two" not in scene.outputs and "one" in scene.running:
            scene.engine.abort("one")
            scene.add("two", prompt=3, max_tokens=2)

    scene.engine.listeners.append(change_of_mind)
    scene.add("one", prompt=5, max_tokens=9)
    scene.to_the_end()
    assert scene.outputs["one"].finished is False
    assert len(scene.outputs["one"].outputs[0].token_ids) == 1
    assert scene.outputs["two"].finished is True
    arrivals = [event.name for event in scene.events if event.name.startswith("request_")]
    assert arrivals.index("request_finished") < len(arrivals) - 1, "events keep their order"


def test_a_step_with_nothing_to_do_does_nothing() -> None:
    scene = Scene(num_blocks=8)
    assert not scene.engine.has_unfinished_requests()
    assert scene.engine.step() == []
    assert scene.events == []
