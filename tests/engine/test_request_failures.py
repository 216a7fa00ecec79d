"""What goes wrong with one request ends that request, with its error, and no other; a listener's error ends nothing.

For each workload, the first, second, third, ... chance for it to go wrong is taken, one in each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minipaged.contracts import Tier
from minipaged.engine.detokenizer import CONTEXT_TOKENS, Decode
from minipaged.events import Event, RequestFinished, SequenceFinished
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.testing.content_runner import ContentRunner, GivenRow
from tests.effort import one_case_in, quick_cases
from tests.engine.test_failure_injection import WORKLOADS, Fault, Fuse
from tests.late_device import LATE, LateRunner
from tests.workloads import FAST, REFERENCE, Workload, WorkloadRequest, WorkloadRun, letters


def run_to_its_end(run: WorkloadRun) -> dict[str, str]:
    """The errors of the requests that failed. All others have the tokens and the text that they have alone; those that
    failed have a beginning of theirs; and nothing of anybody is left."""
    events: list[Event] = []
    run.engine.listeners.append(events.append)
    run.to_the_end()
    errors = {name: output.error for name, output in run.outputs.items() if output.error is not None}
    run.check_outputs(failed=errors)
    run.check_nothing_leaked()
    for name in errors:
        output = run.outputs[name]
        assert not output.finished
        reasons = {completion.finish_reason for completion in output.outputs}
        assert all(one.stop_reason is None for one in output.outputs if one.finish_reason == "error")
        assert "error" in reasons or isinstance(run.workload.requests[int(name[1:])].params, BeamSearchParams)
    assert {e.request for e in events if isinstance(e, RequestFinished) and e.reason == "failed"} == errors.keys()
    assert {e.request for e in events if isinstance(e, SequenceFinished) and e.reason == "error"} <= errors.keys()
    return errors


# --- NaN in one row of the logits -----------------------------------------------------------------


def with_nan(runner: type[ContentRunner], in_pass: int, in_row: int, seen: list[int]) -> Callable[..., ContentRunner]:
    """A runner that damages one row in one pass. `seen`: how many rows each pass has."""

    class Damaged(runner):  # type: ignore[misc, valid-type]
        def compute(self, rows: Sequence[GivenRow]) -> np.ndarray:
            logits: np.ndarray = super().compute(rows)
            seen.append(len(logits))
            if len(seen) == in_pass + 1:
                logits[in_row, 1:] = np.nan
            return logits

    return Damaged


ASYNC = {name: replace(w, config=replace(w.config, async_scheduling=True)) for name, w in WORKLOADS.items()}


@quick_cases(2)
@one_case_in(3)
@pytest.mark.parametrize(
    ("tier", "runner", "workloads"),
    [
        (REFERENCE, ContentRunner, WORKLOADS),
        (FAST, ContentRunner, WORKLOADS),
        (FAST, ContentRunner, ASYNC),
        (LATE, LateRunner, ASYNC),
    ],
    ids=["reference", "fast", "fast and asynchronous", "a late device"],
)
@pytest.mark.parametrize("name", ["swap", "recompute, prefix caching"])
def test_nan_in_a_row_of_logits_ends_the_request_that_needs_it(
    tier: Tier, runner: type[ContentRunner], workloads: dict[str, Workload], name: str
) -> None:
    """Conservation, exact-references; every row of every pass in turn."""
    workload, passes = workloads[name], list[int]()
    assert run_to_its_end(WorkloadRun(workload, tier, with_nan(runner, -1, 0, passes))) == {}
    failed: set[str] = set()
    for number, num_rows in enumerate(passes):
        for row in range(num_rows):
            errors = run_to_its_end(WorkloadRun(workload, tier, with_nan(runner, number, row, [])))
            assert len(errors) == 1 or (not errors and workload.config.async_scheduling)  # a row that is thrown away
            assert all("the model's logits for the next token hold NaN" in error for error in errors.values())
            failed |= errors.keys()
    assert len(failed) == len(workload.requests), "each of them, sooner or later"


def test_nan_in_the_row_of_a_sample_that_has_ended_meanwhile_is_nobodys() -> None:
    """Its siblings go on: the row of the step in flight was thrown away."""
    config = EngineConfig(num_blocks=40, max_model_len=32, vocab_size=11, block_size=2, async_scheduling=True)
    params = SamplingParams(n=2, seed=1, max_tokens=9, stop_token_ids=(1, 2, 3), ignore_eos=True)
    for seed in range(50):
        workload = Workload(config, (WorkloadRequest(0, (1, 2, 3), replace(params, seed=seed)),), swap_is_cheap=True)
        plain = WorkloadRun(workload)
        run_to_its_end(plain)
        first, second = sorted(len(one.token_ids) for one in plain.outputs["r0"].outputs)
        row = [len(one.token_ids) for one in plain.outputs["r0"].outputs].index(first)
        if 1 < first < second - 1:
            passes: list[int] = []
            assert run_to_its_end(WorkloadRun(workload, make_runner=with_nan(ContentRunner, first, row, passes))) == {}
            assert passes[first - 1 : first + 2] == [2, 2, 1]
            return
    raise AssertionError("no seed has one sample end before the other")


def test_keys_and_values_that_led_to_nan_are_offered_to_nobody() -> None:
    """Another request with the same prompt computes it anew, and is served."""
    config = EngineConfig(num_blocks=8, max_model_len=32, vocab_size=11, block_size=2, debug=True)
    requests = [WorkloadRequest(at, (1, 2, 3, 4, 5), SamplingParams(seed=1, max_tokens=4)) for at in (0, 1)]
    workload = Workload(config, tuple(requests), swap_is_cheap=True)
    run = WorkloadRun(workload, make_runner=with_nan(ContentRunner, 0, 0, []))
    assert run_to_its_end(run).keys() == {"r0"}
    assert run.outputs["r1"].num_cached_tokens == 0


# --- A decoder that raises ------------------------------------------------------------------------

ALL_KINDS = (
    WorkloadRequest(0, (1, 3, 5, 7), SamplingParams(n=3, seed=1, max_tokens=5, stop=["KK"], ignore_eos=True)),
    WorkloadRequest(0, (1, 3, 5, 8, 1), BeamSearchParams(beam_width=2, max_tokens=4)),
    WorkloadRequest(1, (1, 3, 5, 7, 9, 4, 1, 1), SamplingParams(seed=2, max_tokens=16, ignore_eos=True)),
    WorkloadRequest(2, (4,), SamplingParams(temperature=0, seed=3, max_tokens=7, ignore_eos=True)),
    WorkloadRequest(2, (4, 4, 4), SamplingParams(n=2, seed=4, max_tokens=7, stop="no such text"), cancelled=20),
)


@quick_cases(2)
@one_case_in(3)
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_decoder_that_raises_ends_one_request(workload: Workload, async_scheduling: bool) -> None:
    """Whichever of its calls raises; the tokens of those that failed are a beginning of what they have alone."""
    config = replace(workload.config, async_scheduling=async_scheduling)
    workload = replace(workload, requests=ALL_KINDS, config=config)
    calls = Fuse("decode")
    assert run_to_its_end(WorkloadRun(workload, decode=decoding(calls))) == {}
    failed: set[str] = set()
    for number in range(1, calls.calls + 1):
        errors = run_to_its_end(WorkloadRun(workload, decode=decoding(Fuse("decode", number))))
        assert len(errors) == 1, f"call {number}"
        assert all(f"Fault: call {number} of decode; check that" in error for error in errors.values())
        failed |= errors.keys()
    assert len(failed) == len(ALL_KINDS), "each of them, sooner or later"


def decoding(fuse: Fuse) -> Decode:
    def decode(token_ids: Sequence[int]) -> str:
        fuse.check("decode")
        return letters(token_ids)

    return decode


@pytest.mark.parametrize("token", range(11))
def test_a_token_that_has_no_text_ends_those_that_choose_it_and_those_whose_prompt_ends_with_it(token: int) -> None:
    """It is among their tokens where nobody read along; else they end before it. The last tokens of a prompt are
    decoded before those of the output."""

    def decode(token_ids: Sequence[int]) -> str:
        if token in token_ids:
            raise KeyError(token)
        return letters(token_ids)

    workload = replace(WORKLOADS["swap"], requests=tuple(replace(one, cancelled=None) for one in ALL_KINDS))
    plain, run = (WorkloadRun(workload, decode=one) for one in (None, decode))
    run_to_its_end(plain)
    errors = run_to_its_end(run)
    decoded_it = {
        name
        for name, output in plain.outputs.items()
        if any(
            token in (*output.prompt_token_ids[-CONTEXT_TOKENS:], *completion.token_ids)
            for completion in output.outputs
        )
    }
    assert errors.keys() == decoded_it
    assert all(f"KeyError: {token}; check that the tokenizer is this model's" in error for error in errors.values())


def test_with_the_tokenizer_of_another_model_every_request_fails() -> None:
    run = WorkloadRun(replace(WORKLOADS["swap"], requests=ALL_KINDS), decode=lambda token_ids: str(1 / 0))
    assert run_to_its_end(run).keys() == run.outputs.keys()
    assert all(completion.text == "" for output in run.outputs.values() for completion in output.outputs)


def test_a_panic_of_the_decoder_is_its_requests_failure_and_an_interrupt_is_not() -> None:
    """The tokenizers library raises what is no Exception."""
    from tokenizers import decoders

    panicking = decoders.Strip(" ", 2, 1)
    workload = replace(WORKLOADS["swap"], requests=ALL_KINDS)
    run = WorkloadRun(workload, decode=lambda token_ids: str(panicking.decode([""])))
    errors = run_to_its_end(run)
    assert errors.keys() == run.outputs.keys()
    assert all("PanicException" in error for error in errors.values())

    def interrupted(token_ids: Sequence[int]) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_to_its_end(WorkloadRun(replace(WORKLOADS["swap"], requests=ALL_KINDS), decode=interrupted))


# --- A listener that raises -----------------------------------------------------------------------


@quick_cases(1)
@pytest.mark.parametrize("name", ["swap, prefix caching", "recompute"])
def test_a_listener_that_raises_fails_the_call_and_every_request_goes_on(name: str) -> None:
    """At whichever event. All listeners are given all events; all updates come."""
    workload = replace(WORKLOADS[name], requests=ALL_KINDS)
    expected = heard_in(workload)
    for number in range(1, len(expected) + 1):
        fuse, events = Fuse("listen", number), list[Event]()
        run = WorkloadRun(workload, listeners=[lambda event, fuse=fuse: fuse.check("listen"), events.append])
        failed_calls = 0
        for now in range(500):
            try:
                goes_on = advance(run, now)
            except Fault:
                failed_calls += 1
                goes_on = True
            if not goes_on:
                break
        run.check_outputs()
        run.check_nothing_leaked()
        assert failed_calls == 1, f"event {number}"
        assert events == expected, f"event {number}"
        assert fuse.calls == len(expected)


def heard_in(workload: Workload) -> list[Event]:
    events: list[Event] = []
    run = WorkloadRun(workload, listeners=[events.append])
    now = 0
    while advance(run, now):
        now += 1
    return events


def advance(run: WorkloadRun, now: int) -> bool:
    """As Run.advance does, and on after an error: what a call did stays done."""
    errors: list[Exception] = []

    def attempt(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            return call(*given, **named)
        except Fault as error:
            errors.append(error)
            return []

    engine = run.engine
    for name, request in run.named_requests():
        if request.arrives == now:
            attempt(engine.add_request, request.prompt, request.params, request_id=name)
        if request.cancelled == now:
            attempt(engine.abort, name)
    for update in attempt(engine.step):
        run.updates[update.request_id].append(update)
        if update.output:
            run.outputs[update.request_id] = update.output
    engine.check_invariants()
    if errors:
        raise errors[0]
    return engine.has_unfinished_requests() or any(r.arrives > now for r in run.workload.requests)
