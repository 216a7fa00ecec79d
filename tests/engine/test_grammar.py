"""Requests whose outputs have a grammar: what the engine sends with a step, and what it does with the chosen tokens.

The grammar is a random one (`testing/random_grammar.py`), the model has no weights. The content oracle checks at each
step that every sequence chooses among the tokens that its grammar allows after its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from minipaged.engine.engine import Engine
from minipaged.errors import InvalidRequest
from minipaged.params import EngineConfig, SamplingParams, StructuredOutputsParams
from minipaged.steps import StepInput
from minipaged.testing.content_runner import ContentRunner
from minipaged.testing.random_grammar import RandomGrammar, RandomState
from tests.effort import scaled, seeds, thorough
from tests.workloads import REFERENCE, TIERS, Workload, WorkloadRequest, WorkloadRun, structured

CONFIG = EngineConfig(num_blocks=40, block_size=4, max_model_len=64, vocab_size=20, eos_token_ids=(2,), debug=True)
FORM = StructuredOutputsParams(grammar="a")


def run_structured(seed: int, tier: str) -> WorkloadRun:
    run = WorkloadRun(structured(seed), tier=TIERS[tier])
    run.to_the_end()
    run.check_outputs()
    run.check_nothing_leaked()
    return run


@scaled
@pytest.mark.parametrize("seeds", seeds(200, 10), ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_outputs_follow_their_grammars_in_random_workloads(tier: str, seeds: range) -> None:
    """Each output is that of a request served alone, chosen by the reference: with preemption, forks, cancelling,
    prefix hits, stop strings, penalties, asynchronous scheduling and lanes."""
    for seed in seeds:
        try:
            run_structured(seed, tier)
        except Exception as error:
            error.add_note(f"workload {seed}")
            raise


@thorough
@scaled
@pytest.mark.parametrize("seeds", seeds(4000, 100, tried=False), ids=str)
def test_outputs_follow_their_grammars_in_many_random_workloads(seeds: range) -> None:
    test_outputs_follow_their_grammars_in_random_workloads("reference", seeds)


def test_everything_happens_to_sequences_with_a_grammar() -> None:
    happened: Counter[str] = Counter()
    for seed in range(70):
        run = run_structured(seed, "reference")
        happened += run.happened
        happened.update(
            f"ended by {completion.finish_reason}"
            for name, request in run.named_requests()
            if name in run.outputs and getattr(request.params, "structured_outputs", None)
            for completion in run.outputs[name].outputs
        )
    assert happened.keys() >= {
        *("ended by stop", "ended by length", "ended by abort", "preempted by recompute", "preempted by swap"),
        *("prefix reused from cache", "block copied", "cancelled while in flight", "prompt computed in chunks"),
    }


# --- One request ----------------------------------------------------------------------------------


class Scripted(RandomState):
    """A grammar that allows one token after another, and may end after the last."""

    script = (5, 7, 5)

    def __init__(self, final: Collection[int], place: int = 0) -> None:
        self._final = frozenset(final)
        self._place = place
        self._grammar = RandomGrammar(FORM, CONFIG.vocab_size)
        self.is_complete = place == len(self.script) and not final
        self.allowed = {self.script[place]} if place < len(self.script) else set(final)

    def consume(self, token_id: int) -> bool:
        assert token_id in self.allowed
        Scripted.__init__(self, self._final, self._place + 1)
        return self.is_complete

    def fork(self) -> Scripted:
        return Scripted(self._final, self._place)


class ScriptedGrammar:
    def begin(self, final_token_ids: Collection[int]) -> Scripted:
        return Scripted(final_token_ids)


class Watching(ContentRunner):
    """Remembers its steps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[StepInput] = []

    def run(self, step: StepInput) -> Any:
        self.steps.append(step)
        return super().run(step)


def served(config: EngineConfig = CONFIG, **params: Any) -> tuple[Any, list[StepInput]]:
    """The output of one request whose grammar is the scripted one, and the steps."""
    runner = Watching(config.num_blocks, config.num_swap_blocks, config.block_size, config.vocab_size)
    engine = Engine(config, REFERENCE, runner, compile_grammar=lambda form: ScriptedGrammar())
    runner.engine = engine
    engine.add_request((1, 3, 4, 9, 9), SamplingParams(structured_outputs=FORM, **params))
    updates = []
    while engine.has_unfinished_requests():
        updates += engine.step()
    return updates[-1].output, runner.steps


def test_the_end_token_is_forced_when_nothing_else_is_allowed() -> None:
    output, _ = served(max_tokens=10, temperature=1.0, seed=1)
    assert output.outputs[0].token_ids == (5, 7, 5, 2)
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"config": replace(CONFIG, eos_token_ids=())}], ids=str)
def test_without_an_end_token_an_output_ends_when_its_grammar_does(more: dict[str, Any]) -> None:
    output, _ = served(max_tokens=10, **more)
    assert output.outputs[0].token_ids == (5, 7, 5)
    assert output.outputs[0].finish_reason == "stop"


def test_an_output_that_is_cut_says_so() -> None:
    output, _ = served(max_tokens=2)
    assert output.outputs[0].token_ids == (5, 7)
    assert output.outputs[0].finish_reason == "length"


def test_the_request_s_own_stop_token_ends_it_where_the_grammar_may_end() -> None:
    output, _ = served(max_tokens=10, ignore_eos=True, stop_token_ids=[11])
    assert output.outputs[0].token_ids == (5, 7, 5, 11)
    assert output.outputs[0].stop_reason == 11


def test_forked_samples_have_states_of_their_own() -> None:
    output, steps = served(max_tokens=10, n=3, temperature=1.0, seed=1)
    assert [one.token_ids for one in output.outputs] == [(5, 7, 5, 2)] * 3
    assert [len(step.allowed) for step in steps] == [1, 3, 3, 3]


def test_only_steps_that_choose_tokens_carry_bits() -> None:
    """A chunk of a prompt that is not the last carries none, and a step of others' sequences carries none."""
    _, steps = served(replace(CONFIG, max_num_batched_tokens=2), max_tokens=3)
    assert [[one.bits for one in step.allowed] for step in steps] == [
        *([], []),
        *([(1 << token).to_bytes(4, "little")] for token in Scripted.script),
    ]


@pytest.mark.parametrize("steady", [True, False])
def test_a_step_with_a_grammar_waits_for_the_tokens_before(steady: bool) -> None:
    """With asynchronous scheduling a request with a grammar never has two steps in flight; one without has."""

    def most_in_flight(**params: Any) -> int:
        config = replace(CONFIG, async_scheduling=True)
        runner = ContentRunner(config.num_blocks, 0, config.block_size, config.vocab_size)
        engine = Engine(config, REFERENCE, runner, compile_grammar=lambda form: ScriptedGrammar(), steady=steady)
        runner.engine = engine
        engine.add_request((1, 3), SamplingParams(max_tokens=9, ignore_eos=True, **params))
        most = 0
        launched = committed = 0
        launch, commit = engine._ahead._launch, engine._ahead._commit  # type: ignore[union-attr]

        def launching(*arguments: Any) -> Any:
            nonlocal launched, most
            launched += 1
            most = max(most, launched - committed)
            return launch(*arguments)

        def committing(*arguments: Any) -> Any:
            nonlocal committed
            committed += 1
            return commit(*arguments)

        engine._ahead._launch, engine._ahead._commit = launching, committing  # type: ignore[union-attr]
        while engine.has_unfinished_requests():
            engine.step()
        assert launched == committed
        return most

    assert most_in_flight() == 2
    assert most_in_flight(structured_outputs=FORM) == 1


def test_a_token_that_the_grammar_does_not_allow_ends_its_request_alone() -> None:
    """A runner that ignores the bits, say."""
    choose = REFERENCE.sample

    def ignoring(logits: Any, inputs: Any) -> Any:
        return choose(logits, [replace(one, allowed=None) for one in inputs])

    workload = Workload(
        CONFIG,
        (
            WorkloadRequest(0, (1, 3), SamplingParams(temperature=0, seed=1, max_tokens=9, structured_outputs=FORM)),
            WorkloadRequest(0, (1, 3), SamplingParams(temperature=0, seed=1, max_tokens=9)),
        ),
        swap_is_cheap=True,
    )
    run = WorkloadRun(workload)
    run.runner._choose = ignoring
    run.to_the_end()
    run.check_outputs(failed={"r0"})
    run.check_nothing_leaked()
    assert "none of the allowed ones" in (run.outputs["r0"].error or "")


def test_an_engine_without_a_tokenizer_refuses_a_grammar() -> None:
    runner = ContentRunner(CONFIG.num_blocks, 0, CONFIG.block_size, CONFIG.vocab_size)
    engine = Engine(CONFIG, REFERENCE, runner)
    with pytest.raises(InvalidRequest, match="structured_outputs need a tokenizer"):
        engine.add_request((1,), SamplingParams(structured_outputs=FORM))
