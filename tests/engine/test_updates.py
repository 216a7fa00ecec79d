"""What `step` returns: the updates of a request, joined, are its output, whatever becomes of it on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.contracts import Logits, Sampled, SamplingInput
from minipaged.engine.detokenizer import NOT_WHOLE, Decode
from minipaged.engine.engine import Engine
from minipaged.errors import InvalidRequest
from minipaged.events import RequestPreempted
from minipaged.outputs import CompletionUpdate, RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams, EngineConfig, RequestOutputKind, SamplingParams
from minipaged.testing.content_runner import ContentRunner
from tests.effort import examples
from tests.tokens import PIECES, bytes_alone, bytes_joined, text_behind, token
from tests.workloads import REFERENCE, check_stream

CONFIG = EngineConfig(
    num_blocks=10,
    num_swap_blocks=8,
    max_model_len=40,
    vocab_size=len(PIECES),
    block_size=4,
    max_num_batched_tokens=16,
    eos_token_ids=(token(b""),),
    debug=True,
)
Params = SamplingParams | BeamSearchParams
DELTA, FINAL_ONLY = RequestOutputKind


class Bench:
    """An engine that was given some requests. With `script`, sample i of every request gets the tokens `script[i]`."""

    def __init__(
        self,
        config: EngineConfig = CONFIG,
        decode: Decode | None = bytes_joined,
        script: Sequence[Sequence[int]] = (),
    ) -> None:
        self.script = script
        self.updates: dict[str, list[RequestUpdate]] = defaultdict(list)
        self.preempted: set[str] = set()
        sizes = (config.num_blocks, config.num_swap_blocks, config.block_size, config.vocab_size)
        runner = ContentRunner(*sizes, choose=self.sample)
        self.engine = Engine(config, REFERENCE, runner, decode=decode)
        runner.engine = self.engine
        self.engine.listeners.append(
            lambda event: self.preempted.add(event.request) if isinstance(event, RequestPreempted) else None
        )

    def sample(self, logits: Logits, inputs: Sequence[SamplingInput]) -> list[Sampled]:
        if self.script:
            places = [(i.stream, i.position - len(i.prompt_token_ids)) for i in inputs]
            return [Sampled(self.script[stream][place], -0.5, None) for stream, place in places]
        return list(REFERENCE.sample(logits, inputs))

    def add(self, params: Params, kind: RequestOutputKind = DELTA, prompt: Sequence[int] = (1, 2, 3)) -> str:
        return self.engine.add_request(prompt, params, output_kind=kind)

    def step(self) -> list[RequestUpdate]:
        updates = self.engine.step()
        for update in updates:
            self.updates[update.request_id].append(update)
        return updates

    def finish(self) -> dict[str, RequestOutput]:
        """Step to the end; every request's updates are its output."""
        while self.engine.has_unfinished_requests():
            self.step()
        blocks = self.engine.blocks
        assert blocks.num_available == blocks.allocator.num_blocks
        outputs: dict[str, RequestOutput] = {}
        for name, updates in self.updates.items():
            check_stream(updates)
            assert updates[-1].output is not None
            outputs[name] = updates[-1].output
        return outputs


# --- Anything at all ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    params: Params
    kind: RequestOutputKind
    arrives: int
    aborted: int | None


stop_strings = st.lists(st.text("ab €😀", min_size=1, max_size=4), max_size=3)
sampling = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    seed=st.integers(0, 99),
    max_tokens=st.integers(1, 12),
    stop=stop_strings,
    include_stop_str_in_output=st.booleans(),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    stop_token_ids=st.sampled_from([(), (token(b"a"),)]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    ignore_eos=st.booleans(),
    top_k=st.sampled_from([0, 3]),
)
beams = st.builds(BeamSearchParams, beam_width=st.integers(1, 3), max_tokens=st.integers(1, 8))
asked = st.builds(
    Asked,
    prompt=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12).map(tuple),
    params=st.one_of(sampling, sampling, sampling, beams, sampling.map(lambda p: replace(p, min_tokens=p.max_tokens))),
    kind=st.sampled_from(RequestOutputKind),
    arrives=st.sampled_from([0, 0, 0, 2]),
    aborted=st.sampled_from([None, None, None, *range(12)]),
)
configs = st.builds(
    replace,
    st.just(CONFIG),
    num_blocks=st.integers(6, 12),
    preemption=st.sampled_from(["swap", "recompute"]),
    async_scheduling=st.booleans(),
    enable_prefix_caching=st.booleans(),
)


def serve(config: EngineConfig, decode: Decode, requests: Sequence[Asked]) -> tuple[dict[str, RequestOutput], Bench]:
    bench = Bench(config, decode)
    for now in range(200):
        for number, one in enumerate(requests):
            if one.arrives == now:
                with suppress(InvalidRequest):  # more than the pool holds
                    bench.engine.add_request(one.prompt, one.params, request_id=str(number), output_kind=one.kind)
            if one.aborted == now:
                bench.engine.abort(str(number))
        bench.step()
        if now >= 2 and not bench.engine.has_unfinished_requests():
            break
    return bench.finish(), bench


@settings(max_examples=examples(500, least=60))
@given(configs, st.sampled_from([bytes_joined, bytes_alone]), st.lists(asked, min_size=1, max_size=4))
def test_the_updates_of_every_request_join_to_its_output_which_is_the_same_either_way(
    config: EngineConfig, decode: Decode, requests: list[Asked]
) -> None:
    """Stream-equals-final and text-of-all; and what is told at the end alone is what was told on the way."""
    outputs, bench = serve(config, decode, requests)
    for name, output in outputs.items():
        one = requests[int(name)]
        if one.kind is FINAL_ONLY or isinstance(one.params, BeamSearchParams):
            assert len(bench.updates[name]) == 1
        for completion in output.outputs:
            if decode is bytes_joined and not isinstance(completion.stop_reason, str):
                assert completion.text == text_behind(output.prompt_token_ids, completion.token_ids)
    swapped = {DELTA: FINAL_ONLY, FINAL_ONLY: DELTA}
    others, _ = serve(config, decode, [replace(one, kind=swapped[one.kind]) for one in requests])
    assert {n: (o.outputs, o.finished) for n, o in others.items()} == {
        n: (o.outputs, o.finished) for n, o in outputs.items()
    }


def test_updates_do_not_mind_preemption() -> None:
    """A pool too small for all: each loses its blocks again and again, and its text goes on where it was."""
    for mode in ("swap", "recompute"):
        outputs = []
        for num_blocks in (40, 9):
            bench = Bench(replace(CONFIG, num_blocks=num_blocks, preemption=mode))  # type: ignore[arg-type]
            for seed in range(4):
                bench.add(SamplingParams(n=2, seed=seed, max_tokens=14, stop=["ab €"]), prompt=(1, 2, seed))
            outputs.append([output.outputs for output in bench.finish().values()])
            assert (len(bench.preempted) > 1) == (num_blocks == 9)
        assert sorted(outputs[0], key=str) == sorted(outputs[1], key=str)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=2, seed=4, max_tokens=9, stop=["a€", "€😀"], logprobs=1),
        SamplingParams(seed=4, max_tokens=9),
        BeamSearchParams(2, max_tokens=9),
    ],
    ids=["samples", "one", "beams"],
)
def test_a_request_may_be_aborted_at_every_step(
    params: Params, kind: RequestOutputKind, async_scheduling: bool
) -> None:
    config = replace(CONFIG, async_scheduling=async_scheduling)
    whole = Bench(config)
    whole.add(params, kind)
    [expected] = whole.finish().values()
    for steps in range(12):
        bench = Bench(config)
        name, other = bench.add(params, kind), bench.add(params, prompt=(4,))
        for _ in range(steps):
            bench.step()
        ended = bool(bench.updates[name]) and bench.updates[name][-1].output is not None
        bench.engine.abort(name)
        bench.engine.check_invariants()
        outputs = bench.finish()
        assert outputs[name].finished == ended
        assert outputs[other].finished
        if not isinstance(params, BeamSearchParams):
            for part, all_of_it in zip(outputs[name].outputs, expected.outputs, strict=False):
                assert part.token_ids == all_of_it.token_ids[: len(part.token_ids)]
                assert ended or part.finish_reason in ("abort", all_of_it.finish_reason)
                assert part.stop_reason is not None or part.text == text_behind((1, 2), part.token_ids)


# --- One by one -----------------------------------------------------------------------------------


def script(*pieces: bytes | str) -> list[int]:
    return [token(piece) for piece in pieces]


def deltas(bench: Bench, params: SamplingParams) -> list[tuple[tuple[int, ...], str]]:
    name = bench.add(params)
    bench.finish()
    return [(new.new_token_ids, new.new_text) for update in bench.updates[name] for new in update.completions]


def test_each_step_tells_its_token_and_the_text_that_is_known_by_then() -> None:
    tokens = script("a", b"\xe2", b"\x82", b"\xac", " ", "b", b"\xf0")
    told = deltas(Bench(script=[tokens]), SamplingParams(max_tokens=7, stop=[" a", "b b"], ignore_eos=True))
    assert [text for _, text in told] == ["a", "", "", "€", "", " ", "b" + NOT_WHOLE]
    assert [one for one, _ in told] == [(token,) for token in tokens]


def test_a_stop_string_is_cut_off_and_what_was_held_back_before_it_comes_at_the_end() -> None:
    bench = Bench(script=[script("a", "b", "a", "b", " ", "a")])
    name = bench.add(SamplingParams(max_tokens=6, stop=["ab "]))
    [output] = bench.finish().values()
    new = [update.completions[0] for update in bench.updates[name]]
    assert [one.new_text for one in new] == ["", "", "ab", "", ""]
    assert new[-1] == CompletionUpdate(0, (token(" "),), "", None, "stop", "ab ")
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab", "ab ")


def test_of_several_samples_each_is_told_until_it_ends() -> None:
    bench = Bench(script=[script("a", "b", ""), script(""), script("b", "")])
    name = bench.add(SamplingParams(n=3, max_tokens=3))
    bench.finish()
    told = [{new.index: new.finish_reason for new in update.completions} for update in bench.updates[name]]
    assert told == [{0: None, 1: "stop", 2: None}, {0: None, 2: "stop"}, {0: "stop"}]
    assert [update.output is None for update in bench.updates[name]] == [True, True, False]


def test_nothing_is_told_while_a_prompt_is_computed_in_chunks_or_beams_are_searched() -> None:
    bench = Bench()
    bench.add(BeamSearchParams(2, max_tokens=4), prompt=range(20))
    quiet = 0
    while not bench.step():
        quiet += 1
    assert quiet == 4  # two chunks of the prompt, and the first three tokens


def test_text_is_made_only_where_somebody_wants_it() -> None:
    calls: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        calls.append(len(token_ids))
        return bytes_joined(token_ids)

    for kind, stop, wanted in ((FINAL_ONLY, "", False), (DELTA, "", True), (FINAL_ONLY, "no such text", True)):
        calls.clear()
        bench = Bench(decode=decode, script=[script(*"ab ab ab")])
        bench.add(SamplingParams(max_tokens=8, stop=stop or ()), kind)
        for _ in range(5):
            bench.step()
        assert bool(calls) == wanted
        [output] = bench.finish().values()
        assert output.outputs[0].text == "ab ab ab"


def test_updates_wait_for_the_next_call_when_a_step_raises_and_can_be_given_back() -> None:
    bench = Bench(script=[script(*"ab ab")])
    name = bench.add(SamplingParams(max_tokens=5))

    def complain(event: object) -> None:
        raise RuntimeError(event)

    bench.engine.listeners.append(complain)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            bench.step()
    bench.engine.listeners.remove(complain)
    taken = bench.engine.take_updates()
    assert [update.completions[0].new_text for update in taken] == ["a", "b"]
    bench.engine.keep_updates(taken)
    assert [update.completions[0].new_text for update in bench.step()] == ["a", "b", " "]
    assert bench.finish()[name].outputs[0].text == "ab ab"


def test_a_request_whose_tokens_have_no_text_keeps_its_tokens() -> None:
    def decode(token_ids: Sequence[int]) -> str:
        raise ValueError("no such token")

    bench = Bench(decode=decode, script=[script("a", "b")])
    name = bench.add(SamplingParams(max_tokens=9, stop_token_ids=script("b")), FINAL_ONLY)
    output = bench.finish()[name]
    assert [update.completions for update in bench.updates[name]] == [
        (CompletionUpdate(0, tuple(script("a", "b")), "", None, "error", None),)
    ]
    assert (output.finished, output.error) == (
        False,
        "the tokens [1, 2, 3] at the end of 3 could not be decoded: ValueError: no such token; check that the "
        "tokenizer is this model's",
    )


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    for kind in RequestOutputKind:
        bench = Bench(decode=None, script=[script("a", "b")])
        bench.add(SamplingParams(max_tokens=2), kind)
        [output] = bench.finish().values()
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (tuple(script("a", "b")), "")


def test_an_unknown_output_kind_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"output_kind is 'delta'; choose RequestOutputKind\.DELTA or "):
        Bench().add(SamplingParams(), "delta")  # type: ignore[arg-type]
