"""`LLM.stream`, and what becomes of the others when one request of `LLM.generate` fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, BeamSearchParams, CompletionOutput, InvalidRequest, RequestOutput, SamplingParams
from minipaged.cli import main
from minipaged.fast.llama import Llama
from minipaged.mirror import MirroredRunner
from tests.workloads import check_stream, ended

LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["step by step", "asynchronously"])
def llm(small_llama: Path, request: pytest.FixtureRequest) -> LLM:
    """Without a prefix cache: in bfloat16 a prompt that is found in part is rounded differently."""
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "enable_prefix_caching": False}
    return LLM(small_llama, debug=True, async_scheduling=request.param, **sizes)


def near(output: RequestOutput) -> tuple[CompletionOutput, ...]:
    """What is equal to its outputs up to rounding: in other company a product may be added up in another order."""
    return tuple(replace(one, cumulative_logprob=pytest.approx(one.cumulative_logprob)) for one in output.outputs)


def assert_all_given_back(llm: LLM) -> None:
    llm.engine.check_invariants()
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.blocks.num_available == llm.config.num_blocks


@pytest.mark.parametrize(
    "params",
    [
        LONG,
        SamplingParams(n=3, seed=2, max_tokens=16, stop=["e", "ab"], logprobs=1),
        SamplingParams(
            n=3,
            seed=2,
            max_tokens=16,
            stop=["e", "ab"],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            prompt_logprobs=1,
            bad_words=["th", "one"],
            logit_bias={2: 3.0},
            logprob_token_ids=[5, 6],
        ),
        BeamSearchParams(2, max_tokens=9),
    ],
    ids=["one", "samples", "all that may be asked", "beams"],
)
def test_a_stream_joins_to_what_generate_returns(llm: LLM, params: SamplingParams | BeamSearchParams) -> None:
    llm.generate("The one", LONG)  # both then find its blocks
    updates = list(llm.stream("The one", params))
    check_stream(updates)
    [expected] = (
        llm.generate("The one", params) if isinstance(params, SamplingParams) else llm.beam_search("The one", params)
    )
    assert updates[-1].output is not None
    assert updates[-1].output.outputs == expected.outputs
    assert updates[-1].output.prompt == "The one"
    assert updates[-1].output.prompt_logprobs == expected.prompt_logprobs
    assert_all_given_back(llm)


def test_a_word_that_greedy_decoding_writes_is_not_written_where_it_is_bad(llm: LLM) -> None:
    """Of one token and of several, which takes the tokens before it."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None

    def words(token_ids: Sequence[int]) -> set[tuple[int, ...]]:
        return {tuple(token_ids[i : i + n]) for n in (1, 2, 3) for i in range(len(token_ids))}

    [plain] = llm.generate("The one", LONG)
    lengths = set()
    for tokens in sorted(words(plain.outputs[0].token_ids)):
        word = tokenizer.decode(tokens)
        if tuple(tokenizer.encode(word, add_special_tokens=False)) == tokens and len(tokens) not in lengths:
            [output] = llm.generate("The one", replace(LONG, bad_words=[word]))
            assert tokens not in words(output.outputs[0].token_ids)
            assert len(output.outputs[0].token_ids) == 24
            lengths.add(len(tokens))
    assert lengths == {1, 2, 3}


def test_a_special_token_is_shown_where_it_is_not_to_be_skipped(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, allowed_token_ids=[2], ignore_eos=True)
    [hidden] = llm.generate("The one", params)
    [shown] = llm.generate("The one", replace(params, skip_special_tokens=False))
    assert hidden.outputs[0].text == ""
    assert shown.outputs[0].text == "<|im_end|>" * 2
    assert hidden.outputs[0].token_ids == shown.outputs[0].token_ids == (2, 2)


def test_whoever_does_not_want_the_rest_of_a_stream_lets_it_go(llm: LLM) -> None:
    for count, _ in enumerate(llm.stream([3, 4], LONG), start=1):
        if count == 5:
            break
    assert_all_given_back(llm)
    stream = llm.stream([3, 4], LONG)
    next(stream)
    assert llm.stats().blocks_used > 0
    stream.close()  # type: ignore[attr-defined]
    assert_all_given_back(llm)


def test_a_stream_of_a_bad_prompt_is_refused_when_it_is_first_asked(llm: LLM) -> None:
    stream = llm.stream("")
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        next(stream)
    assert_all_given_back(llm)


def test_generate_may_be_called_while_a_stream_is_read_and_neither_takes_from_the_other(llm: LLM) -> None:
    """Nor from a request that somebody added to the engine by hand."""
    alone = [list(llm.stream([3, 4], LONG)), llm.generate([5, 6], LONG), llm.generate([7, 8], LONG)]
    by_hand = llm.engine.add_request([7, 8], LONG)
    updates = []
    for count, update in enumerate(llm.stream([3, 4], LONG)):
        updates.append(update)
        if count == 3:
            [between] = llm.generate([5, 6], LONG)
    check_stream(updates)
    assert updates[-1].output.outputs == near(alone[0][-1].output)  # type: ignore[union-attr]
    assert between.outputs == near(alone[1][0])  # type: ignore[arg-type]
    theirs = []
    while llm.engine.has_unfinished_requests():
        theirs += llm.engine.step()
    check_stream(theirs)
    assert {update.request_id for update in theirs} == {by_hand}
    assert ended(theirs)[0].outputs == near(alone[2][0])  # type: ignore[arg-type]
    assert_all_given_back(llm)


# --- One request fails ----------------------------------------------------------------------------


def damage(llm: LLM, monkeypatch: pytest.MonkeyPatch, in_pass: int, row: int) -> None:
    """The logits of one row of one pass hold NaN."""
    runner, passes = llm.engine.runner, list[int]()
    name = "forward" if isinstance(runner, MirroredRunner) else "_forward"
    forward = getattr(runner, name)

    def damaged(*batch: Any) -> Any:
        logits = 1 * forward(*batch)
        passes.append(len(logits))
        if len(passes) == in_pass:
            logits[row, 7] = float("nan")
        return logits

    monkeypatch.setattr(runner, name, damaged)


@pytest.mark.parametrize("tier", ["reference", "fast"])
@pytest.mark.parametrize(
    "params", [LONG, replace(LONG, temperature=1, seed=3, presence_penalty=0.5, logprobs=2)], ids=["greedy", "drawn"]
)
def test_nan_in_one_row_ends_that_request_and_the_others_get_their_tokens(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch, tier: str, params: SamplingParams
) -> None:
    prompts = ["The one", "and", "or not", "the"]
    whole = LLM(small_llama, tier=tier, num_blocks=64, debug=True).generate(prompts, params)
    llm = LLM(small_llama, tier=tier, num_blocks=64, debug=True)
    with monkeypatch.context() as patch:
        damage(llm, patch, in_pass=4, row=2)
        outputs = llm.generate(prompts, params)
    for place, (output, expected) in enumerate(zip(outputs, whole, strict=True)):
        if place != 2:
            assert (output.finished, output.error) == (True, None)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.outputs[0].text == expected.outputs[0].text
            continue
        [completion] = output.outputs
        assert (output.finished, completion.finish_reason) == (False, "error")
        assert completion.token_ids == expected.outputs[0].token_ids[:3]
        assert output.error is not None
        assert output.error.startswith("the model's logits for the next token hold NaN (first at token 7)")
    assert_all_given_back(llm)
    assert llm.generate(prompts, params)[2].outputs[0].token_ids == whole[2].outputs[0].token_ids


@pytest.mark.parametrize(("prompts", "place"), [(["The one"], ""), (["and", "The one"], "prompt 1: ")])
def test_a_failed_request_is_an_error_on_the_command_line(
    small_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prompts: list[str],
    place: str,
) -> None:
    """What there is of its text is printed, and the others' too."""
    arguments = ["--num-blocks=64", "--tier=fast", "--temperature=0", "--ignore-eos", "--max-tokens=6", *prompts]
    with pytest.raises(SystemExit):
        main(["generate", "--model", str(small_llama), *arguments])
    whole = capsys.readouterr().out
    right = Llama._forward

    def forward(self: Llama) -> Any:
        logits = 1 * right(self)
        for number, row in enumerate(self.mirror.rows):
            if row.stop == 11:
                logits[number] = float("nan")
        return logits

    monkeypatch.setattr(Llama, "_forward", forward)
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--model", str(small_llama), *arguments])
    out, err = capsys.readouterr()
    assert exit_.value.code == 1
    assert f"error: {place}the model's logits for the next token hold NaN" in err
    assert err.count("error: ") == 1
    assert whole.startswith(out.rstrip("\n"))
    assert len(out) < len(whole)


get_freeze_count = gc.get_freeze_count  # which tests/conftest.py replaces


@pytest.fixture
def nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a program that has no other LLM, and leaves the garbage collector alone."""
    monkeypatch.setattr(gc, "get_freeze_count", get_freeze_count)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_is_frozen")
def test_an_llm_that_goes_leaves_the_garbage_collector_as_it_was(small_llama: Path) -> None:
    llm = LLM(small_llama, num_blocks=64)
    llm.generate("The one", LONG)
    engine = weakref.ref(llm.engine)
    assert gc.get_freeze_count() > 0
    del llm
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert engine() is None, "nothing of it is kept"


@pytest.mark.usefixtures("nothing_is_frozen")
def test_what_python_freezes_of_its_own_keeps_no_llm_from_freezing(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # of Python 3.12
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    llm = LLM(small_llama, num_blocks=64)
    del llm
    assert calls == ["freeze", "unfreeze"]


@pytest.mark.usefixtures("nothing_is_frozen")
def test_a_program_that_ends_collects_nothing_that_is_frozen(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It all goes anyway; to go through it takes seconds."""
    real, made = weakref.finalize, []

    def finalize(*arguments: Any) -> Any:
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr(weakref, "finalize", finalize)
    LLM(small_llama, num_blocks=64)
    assert made
    assert not any(each.atexit for each in made)


@pytest.mark.usefixtures("nothing_is_frozen")
def test_an_llm_leaves_the_garbage_collector_to_whoever_has_seen_to_it_before(small_llama: Path) -> None:
    first = LLM(small_llama, num_blocks=64)
    frozen = gc.get_freeze_count()
    second = LLM(small_llama, num_blocks=64)
    assert 0 < gc.get_freeze_count() <= frozen  # those that die meanwhile are frozen no more
    del second
    assert 0 < gc.get_freeze_count() <= frozen
    del first
    assert gc.get_freeze_count() == 0
