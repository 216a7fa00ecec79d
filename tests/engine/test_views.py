"""What a policy is shown late: the blocks of a request that waits, and the costs of a runner (`engine/views.py`)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, asdict, fields
from typing import Any

import pytest

from minipaged.engine.engine import Engine
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.sequence import RequestState
from minipaged.engine.views import LateCosts, plain
from minipaged.params import EngineConfig, SamplingParams
from minipaged.scheduling import Costs, RequestView
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100, TOKEN, SimulatedRunner, simulated_tier


class OneByOne(FirstComeFirstServed):
    """Lets a request in when nothing runs, and keeps the views of those that wait until then."""

    looks = False

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.kept: list[RequestView] = []
        self.needed: list[int] = []

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        if not len(running):
            return [waiting[0].request_id]
        self.kept += waiting
        if self.looks:
            self.needed += [view.blocks_needed for view in waiting]
        return []


class OneByOneAsking(OneByOne):
    """Asks for the cached tokens too."""

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        if len(running):
            self.needed += [view.num_cached_tokens for view in waiting]
        return super().admit(waiting, running, num_free, tokens_left)


class OneByOneLooking(OneByOne):
    looks = True


def engine_of(policy: type[OneByOne]) -> tuple[Engine, OneByOne]:
    """One request runs, and one waits whose prompt is the first one's with all of its output; ten steps were run."""
    runner = SimulatedRunner(OPT_13B_ON_AN_A100, block_size=4)
    config = EngineConfig(block_size=4, num_blocks=64, max_model_len=64, vocab_size=10)
    engine = Engine(config, simulated_tier(), runner, policy=policy, clock=runner.clock)
    engine.add_request([1] * 10, SamplingParams(max_tokens=20), request_id="runs")
    engine.step()
    engine.add_request([1] * 10 + [TOKEN] * 20, SamplingParams(), request_id="waits")
    for _ in range(9):
        engine.step()
    made = engine.scheduler.policy
    assert isinstance(made, OneByOne)
    return engine, made


def test_blocks_are_counted_anew_at_each_question_when_there_is_a_prefix_cache() -> None:
    """The second request needs a block less whenever the first has filled one."""
    _, policy = engine_of(OneByOneLooking)
    assert policy.needed == [6, 6, 5, 5, 5, 5, 4, 4, 4]
    assert [view.blocks_needed for view in policy.kept] == policy.needed, "what was looked at stays as it was"


def test_cached_tokens_are_counted_anew_at_each_question() -> None:
    """Whole blocks of 4 of the first request's tokens, as it fills them."""
    _, policy = engine_of(OneByOneAsking)
    assert policy.needed == [8, 8, 12, 12, 12, 12, 16, 16, 16]
    assert [view.num_cached_tokens for view in policy.kept] == policy.needed, "what was looked at stays as it was"


def test_a_request_that_keeps_its_blocks_finds_none() -> None:
    """It waits in the host pool, and comes back with all that it has computed."""
    engine, _ = engine_of(OneByOneAsking)
    waits = engine.scheduler.waiting[0]
    assert engine.blocks.num_cached_tokens(waits) == 16
    waits.state = RequestState.SWAPPED
    assert engine.blocks.num_cached_tokens(waits) == 0


def test_blocks_that_nobody_looked_at_are_over_when_the_request_waits_no_more() -> None:
    engine, policy = engine_of(OneByOne)
    [view, *others] = policy.kept
    assert all(other is view for other in others)
    engine.abort("waits")
    for _ in range(2):
        with pytest.raises(LookupError, match="the policy's method has returned"):
            _ = view.blocks_needed
        with pytest.raises(LookupError, match="the policy's method has returned"):
            _ = view.num_cached_tokens
    assert (view.request_id, view.prompt_tokens) == ("waits", 30)


def test_a_view_is_like_any_other_request_view() -> None:
    _, policy = engine_of(OneByOne)
    [view, *_] = policy.kept
    for copied in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        assert (copied, hash(copied), repr(copied)) == (view, hash(view), repr(view))
    assert isinstance(view, RequestView)
    assert [each.name for each in fields(view)] == [each.name for each in fields(RequestView)]
    assert RequestView(**asdict(view)) == plain(view)
    for name in asdict(view):
        with pytest.raises(FrozenInstanceError):
            setattr(view, name, 7)


class Measuring(SimulatedRunner):
    measured = 0

    def costs(self) -> Costs:
        self.measured += 1
        return super().costs()


def test_a_runner_is_asked_for_its_costs_once_and_when_one_is_read() -> None:
    runner = Measuring(OPT_13B_ON_AN_A100, block_size=4)
    costs = LateCosts(runner)
    assert not hasattr(costs, "seconds")
    assert runner.measured == 0
    assert asdict(costs) == asdict(runner._costs)
    assert (plain(costs), pickle.loads(pickle.dumps(costs))) == (runner._costs, costs)
    assert runner.measured == 1
    with pytest.raises(FrozenInstanceError):
        costs.block_bytes = 7  # type: ignore[misc]
