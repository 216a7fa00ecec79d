"""Bad input gets one clear message, costs nothing and breaks nothing: through LLM and through the command line.

After every refusal the engine is empty, every block is back, and the same LLM serves the next request.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged import LLM, BeamSearchParams, InvalidRequest, InvariantViolation, MinipagedError, ModelError
from minipaged import SamplingParams as Sampling
from minipaged.cli import main
from minipaged.events import Event, RequestRefused, StepFinished
from minipaged.llm import LoadedModel
from minipaged.reference.block_allocator import BlockAllocator
from tests.end_to_end.small_llama import make_small_llama, write_tokenizer
from tests.workloads import ended

GREEDY = Sampling(temperature=0, max_tokens=12)
BLOCKS = {"num_blocks": 10, "block_size": 4, "max_model_len": 100}
"""A pool of 40 tokens, smaller than the longest sequence that is allowed."""


@pytest.fixture(scope="module")
def loaded(small_llama: Path) -> LoadedModel:
    return LoadedModel.load(small_llama)


SERVED = [3, 4]
"""The prompt that is served after whatever went wrong."""


def says(llm: LLM) -> tuple[int, ...]:
    return llm.generate(SERVED, GREEDY)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> tuple[int, ...]:
    """What an LLM says to which nothing bad was ever done."""
    return says(LLM(loaded, num_blocks=10))


@pytest.fixture(scope="module")
def shared(loaded: LoadedModel) -> LLM:
    return LLM(loaded, debug=True, **BLOCKS)


@pytest.fixture
def llm(shared: LLM, expected: tuple[int, ...]) -> Iterator[LLM]:
    """The LLM of all tests, which must be in order after whatever each of them did to it."""
    yield shared
    check_in_order(shared, expected)


@pytest.fixture(params=[False, True], ids=["plain", "async"])
def llm_either_way(loaded: LoadedModel, expected: tuple[int, ...], request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A new one for each test, with and without a step in flight between two calls of `step`."""
    llm = LLM(loaded, debug=True, async_scheduling=request.param, **BLOCKS)
    yield llm
    check_in_order(llm, expected)


def check_in_order(llm: LLM, expected: tuple[int, ...]) -> None:
    """Nothing is left behind, and the next request is served as ever."""
    blocks = llm.engine.blocks
    assert not llm.engine.has_unfinished_requests()
    assert not llm.engine.scheduler.running
    assert not llm.engine.scheduler.waiting
    assert blocks.num_used == 0
    assert blocks.host_allocator is None or blocks.host_allocator.num_free == blocks.host_allocator.num_blocks
    assert says(llm) == expected


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line as the shell would: exit status, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


def one_error_line(stderr: str) -> str:
    """The message, of which nothing but one line may be there: no traceback, no progress."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def options(settings: dict[str, Any]) -> list[str]:
    """Keyword arguments as the command line writes them."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


# --- Prompts --------------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "no text": ("", "the prompt is empty"),
    "no tokens": ([[]], "the prompt is empty"),
    "a token past the vocabulary": ([3, 128], "prompt token 1 is 128, .* 0 to 127"),
    "a negative token": ([3, 4, -1], "prompt token 2 is -1, .* 0 to 127"),
    "a fraction": ([3.0], "prompt token 0 is 3.0, .* 0 to 127"),
    "text among tokens": ([3, "a"], "prompt token 1 is 'a', .* 0 to 127"),
    "half a character": ("\ud800", "UTF-8"),
    "longer than max_model_len": ([3] * 100, "100 tokens.* max_model_len is 100; shorten"),
    "longer than the whole pool": ([3] * 60, "needs 15 blocks of 4 tokens.* the whole pool has 10; .*num_blocks"),
}
TOO_MUCH: dict[str, tuple[Any, str]] = {
    "an output that cannot fit": (Sampling(max_tokens=90), "23 blocks of 4 .* pool has 10; .*max_tokens .90."),
    "siblings that cannot fit": (Sampling(n=4, max_tokens=12), "16 blocks of 4 .* pool has 10; .* n .4."),
    "more siblings than run at once": (Sampling(n=257), "n is 257, but at most 256 .*max_num_seqs"),
    "a stop token past the vocabulary": (Sampling(stop_token_ids=[128]), "stop_token_ids has 128, .* 0 to 127"),
    "more logprobs than tokens": (Sampling(logprobs=129), "logprobs is 129; .* 128 tokens"),
}


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_what_is_wrong_with_it(llm: LLM, prompt: Any, message: str):
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_second_prompt_does_not_leave_the_first_one_behind(llm: LLM, prompt: Any, message: str):
    steps = llm.stats().steps
    bad = prompt if isinstance(prompt, str) or not prompt or isinstance(prompt[0], list) else [prompt]
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(["a good prompt", *([bad] if isinstance(bad, str) else bad), "another"], GREEDY)
    assert llm.stats().steps == steps  # refused before anything ran


@pytest.mark.parametrize(("params", "message"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_request_that_could_never_be_served_is_refused_at_once(llm: LLM, params: Sampling, message: str):
    refused: list[Event] = []
    listener = lambda event: refused.append(event) if isinstance(event, RequestRefused) else None  # noqa: E731
    llm.engine.listeners.append(listener)
    try:
        with pytest.raises(InvalidRequest, match=message):
            llm.generate("abc", params)
    finally:
        llm.engine.listeners.remove(listener)
    assert len(refused) == 1


def test_more_beams_than_tokens_are_refused(llm: LLM):
    with pytest.raises(InvalidRequest, match="beam_width is 129, more than the vocabulary's 128 tokens"):
        llm.beam_search("abc", BeamSearchParams(beam_width=129))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_params_for_another_number_of_prompts_are_refused(llm: LLM, number: int):
    with pytest.raises(InvalidRequest, match=f"2 prompts need 2 params, or one for all; got {number}"):
        llm.generate(["a", "b"], [GREEDY] * number)


def test_params_of_the_other_kind_are_refused_by_name(llm: LLM):
    with pytest.raises(InvalidRequest, match="params must be SamplingParams, not BeamSearchParams"):
        llm.generate("a", BeamSearchParams())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="params must be BeamSearchParams, not SamplingParams"):
        llm.beam_search(["a", "b"], [BeamSearchParams(), GREEDY])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "prompts", [None, 5, b"hello", {"prompt_token_ids": b"hello"}, [b"hello"], [{"prompt_token_ids": {}}], [None, [3]]]
)
def test_what_is_neither_text_nor_token_ids_is_refused(llm: LLM, prompts: Any):
    with pytest.raises(InvalidRequest, match=r"^a prompt is a text or a list of token ids, not "):
        llm.generate(prompts, GREEDY)


def test_requests_added_by_hand_keep_their_outputs_while_generate_runs(llm: LLM):
    by_hand = llm.engine.add_request([3, 4], Sampling(temperature=0, max_tokens=2, ignore_eos=True))
    assert llm.generate([5, 6], GREEDY)[0].prompt_token_ids == (5, 6)
    with pytest.raises(InvalidRequest):
        llm.generate([-1], GREEDY)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += ended(llm.engine.step())
    assert [output.request_id for output in outputs] == [by_hand]
    assert len(outputs[0].outputs[0].token_ids) == 2


def test_threads_can_share_an_llm(llm: LLM):
    alone = [llm.generate([token, 4], GREEDY)[0].outputs[0].token_ids for token in range(3, 9)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda token: llm.generate([token, 4], GREEDY)[0].outputs[0].token_ids, range(3, 9)))
    assert together == alone


def test_stats_tell_how_many_blocks_are_held_now(loaded: LoadedModel):
    llm = LLM(loaded, **BLOCKS)  # others have held blocks of theirs
    llm.generate([3, 4], GREEDY)
    stats = llm.stats()
    assert stats.blocks_used == 0
    assert stats.peak_blocks_used > 0
    llm.engine.add_request([3, 4], GREEDY)
    llm.engine.step()
    assert llm.stats().blocks_used == 1
    llm.engine.abort(llm.engine.unfinished_requests[0])
    llm.engine.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--beam-width=2", "--temperature=0.5"), "--temperature has no meaning with --beam-width"),
        (("--beam-width=2", "--stop=a"), "--stop has no meaning with --beam-width"),
        (("--beam-width=2", "--repetition-penalty=1.2"), "--repetition-penalty has no meaning with --beam-width"),
        (("--early-stopping=true",), "--early-stopping has no meaning without --beam-width"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    cli: Callable[..., tuple[int, str, str]], small_llama: Path, arguments: tuple[str, ...], message: str
):
    code, _, err = cli("generate", "--model", small_llama, "--num-blocks=20", *arguments, "abc")
    assert code == 1
    assert message in one_error_line(err)


def test_no_prompts_give_no_outputs(llm: LLM):
    assert llm.generate([]) == []


def test_each_prompt_can_have_params_of_its_own(llm: LLM):
    outputs = llm.generate(["a", "b"], [GREEDY, Sampling(temperature=0, max_tokens=3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "the prompt is empty"), ("a" * 100, "max_model_len is 100"), ("a" * 60, "the whole pool has 10")],
)
def test_the_command_line_refuses_a_bad_prompt_in_one_line(
    cli: Callable[..., tuple[int, str, str]], small_llama: Path, text: str, message: str
):
    code, out, err = cli("generate", "--model", small_llama, *options(BLOCKS), text)
    assert (code, out) == (1, "")
    assert message in one_error_line(err)


# --- Parameters and settings ----------------------------------------------------------------------

BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "no samples": ({"n": 0}, "n is 0; it must be 1 or more"),
    "top_p of nothing": ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
    "top_p above one": ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1"),
    "top_p not a number": ({"top_p": float("nan")}, "top_p is nan; it must be above 0 and at most 1"),
    "top_k below -1": ({"top_k": -2}, "top_k is -2"),
    "min_p above one": ({"min_p": 2.0}, "min_p is 2.0; it must be between 0 and 1"),
    "a negative temperature": ({"temperature": -1.0}, "temperature is -1.0"),
    "no tokens to generate": ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
    "more tokens at least than at most": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, more than max_tokens"),
    "an empty stop string": ({"stop": ""}, "stop holds an empty string"),
    "a large penalty": ({"presence_penalty": 3.0}, "presence_penalty is 3.0; it must be between -2 and 2"),
    "no repetition penalty": ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be above 0"),
    "logprobs below zero": ({"logprobs": -1}, "logprobs is -1"),
}
BAD_BEAMS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer than no beams": ({"beam_width": -1}, "beam_width is -1; it must be 1 or more"),
    "more beams than tokens": ({"beam_width": 129}, "beam_width is 129, more than the vocabulary's 128"),
    "a penalty that overflows": ({"beam_width": 2, "length_penalty": 1e9}, "length_penalty is 1000000000.0"),
    "an unknown stopping rule": ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping is 'soon'"),
}
BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown tier": ({"tier": "slow"}, "tier is 'slow'; choose 'reference', 'fast' or 'auto'"),
    "a device of the other tier": ({"tier": "reference", "device": "cuda"}, "device is 'cuda'; .* 'cpu' only"),
    "a dtype of the other tier": ({"tier": "reference", "dtype": "bfloat16"}, "'bfloat16'; .* float32, float64"),
    "a dtype that only the reference has": ({"tier": "fast", "dtype": "float64"}, "'float64'; .* bfloat16, float16"),
    "an unknown device": (
        {"tier": "fast", "device": "tpu"},
        "device is 'tpu'; the fast tier supports cpu, cuda and auto",
    ),
    "an unknown dtype": ({"dtype": "int3"}, "dtype is 'int3'; choose auto, bfloat16, float16, float32, float64"),
    "half precision on a CPU": ({"device": "cpu", "dtype": "float16"}, "use bfloat16 or float32 on 'cpu'"),
    "blocks of nothing": ({"block_size": 0}, "block_size is 0; it must be between 1 and 256"),
    "blocks too large": ({"block_size": 257}, "block_size is 257; it must be between 1 and 256"),
    "an empty pool": ({"num_blocks": 0}, "num_blocks is 0; it must be 1 or more"),
    "a pool larger than any memory": ({"num_blocks": 10**12}, "num_blocks is 1000000000000: .* lower num_blocks"),
    "a host pool below zero": ({"num_swap_blocks": -1}, "num_swap_blocks is -1; it must be 0 or more"),
    "no sequences": ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be 1 or more"),
    "no tokens a batch": ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0; it must be 1 or more"),
    "a context of nothing": ({"max_model_len": 0}, "max_model_len is 0; it must be 1 or more"),
    "a context beyond the model's": ({"max_model_len": 257}, "max_model_len is 257; .* at most 256"),
    "all memory and more": ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5; .* at most 1"),
    "an unknown preemption": ({"preemption": "drop"}, "preemption is 'drop'; choose 'swap', 'recompute' or 'auto'"),
    "keys and values in 4 bits": (
        {"kv_cache_dtype": "int4"},
        "kv_cache_dtype is 'int4'; choose 'auto', 'int8' or 'fp8'",
    ),
    "swapping to nowhere": ({"preemption": "swap", "num_swap_blocks": 0}, "'swap' but num_swap_blocks is 0"),
}
if not torch.cuda.is_available():
    message = "device is 'cuda', but .*; use device='cpu'"
    BAD_SETTINGS["a GPU where there is none"] = ({"tier": "fast", "device": "cuda"}, message)


@pytest.mark.parametrize(("params", "message"), BAD_PARAMS.values(), ids=BAD_PARAMS)
def test_sampling_params_out_of_range_are_refused_when_made(params: dict[str, Any], message: str):
    with pytest.raises(InvalidRequest, match=message):
        Sampling(**params)


WRONG_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "a share in words": ({"gpu_memory_utilization": "half"}, "gpu_memory_utilization is 'half'; .* a number above 0"),
    "an allocator that makes none": ({"allocator": object()}, "allocator is <object .*; it must be a class"),
    "a policy that makes none": ({"scheduling_policy": object()}, "policy is <object .*; it must be a class"),
    "a policy of no name": (
        {"scheduling_policy": "lifo"},
        "scheduling_policy is 'lifo'; choose 'fcfs', 'priority', 'shortest-first', 'longest-prefix-first', or",
    ),
    "yes for True": ({"async_scheduling": "yes"}, "async_scheduling is 'yes'; it must be True or False"),
}
"""What only Python lets through."""

IN_PYTHON = BAD_SETTINGS | WRONG_TYPES


@pytest.mark.parametrize(("settings", "message"), IN_PYTHON.values(), ids=IN_PYTHON)
def test_settings_out_of_range_are_refused_when_the_llm_is_made(
    small_llama: Path, settings: dict[str, Any], message: str
):
    with pytest.raises(InvalidRequest, match=message):
        LLM(small_llama, **settings)


ALL_BAD = BAD_PARAMS | BAD_BEAMS | BAD_SETTINGS


@pytest.mark.parametrize("setting", [{"tier": "fast"}, {"device": "cpu"}, {"dtype": "float32"}], ids=str)
def test_what_was_settled_when_a_model_was_loaded_cannot_be_chosen_again(small_llama: Path, setting: dict[str, Any]):
    loaded = LoadedModel.load(small_llama)
    with pytest.raises(InvalidRequest, match="settled when the model was loaded"):
        LLM(loaded, **setting)


@pytest.mark.parametrize(("settings", "message"), ALL_BAD.values(), ids=ALL_BAD)
def test_the_command_line_refuses_the_same_in_one_line(
    cli: Callable[..., tuple[int, str, str]], small_llama: Path, settings: dict[str, Any], message: str
):
    code, out, err = cli("generate", "--model", small_llama, "abc", *options({"num_blocks": 64} | settings))
    assert (code, out) == (1, "")
    assert re.search(message, one_error_line(err))


def test_a_wrong_usage_of_the_command_line_exits_with_2(cli: Callable[..., tuple[int, str, str]]):
    assert cli("generate", "abc", "--no-such-option")[0] == 2
    assert cli("generate")[0] == 2
    assert cli("generate", "abc", "--num-blocks", "many")[0] == 2


# --- Models ---------------------------------------------------------------------------------------


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


BAD_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another architecture": (
        lambda folder: edit_config(folder, architectures=["GemmaForCausalLM"], model_type="gemma"),
        "GemmaForCausalLM.*only Llama",
    ),
    "a truncated checkpoint": (cut_short, "model.safetensors is truncated: .* bytes, expected"),
    "weights of another shape": (
        lambda folder: edit_config(folder, intermediate_size=100),
        r"tensor 'model.layers.0.mlp.*' has shape .*96.*, but config.json asks for .*100",
    ),
    "weights of more layers": (
        lambda folder: edit_config(folder, num_hidden_layers=1),
        "tensor 'model.layers.1.* has no place in the model that config.json describes",
    ),
    "weights of fewer layers": (
        lambda folder: edit_config(folder, num_hidden_layers=3),
        "tensor 'model.layers.2.* is missing .*asks for it with shape",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors"),
    "a damaged config": (lambda folder: (folder / "config.json").write_text('{"vocab'), "config.json is damaged"),
    "a damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json is damaged"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_MODELS.values(), ids=BAD_MODELS)
def test_a_model_that_cannot_run_is_refused_by_what_is_wrong_with_it(
    cli: Callable[..., tuple[int, str, str]],
    small_llama: Path,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    message: str,
):
    folder = tmp_path / "model"
    shutil.copytree(small_llama, folder)
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        LLM(folder, num_blocks=10)
    code, out, err = cli("generate", "--model", folder, "--num-blocks=10", "abc")
    assert (code, out) == (1, "")
    assert re.search(message, one_error_line(err))


def test_an_unknown_model_name_lists_the_known_ones(cli: Callable[..., tuple[int, str, str]]):
    with pytest.raises(ModelError, match=r"no model 'smollm3'\. Known models: smollm2-135m-instruct"):
        LLM("smollm3")
    for arguments in (("generate", "abc", "--model"), ("model", "fetch"), ("model", "where")):
        code, out, err = cli(*arguments, "smollm3")
        assert (code, out) == (1, "")
        assert "Known models: smollm2-135m-instruct" in one_error_line(err)


def test_a_model_without_a_tokenizer_takes_token_ids_and_says_so(
    small_llama: Path, expected: tuple[int, ...], tmp_path: Path
):
    folder = tmp_path / "model"
    shutil.copytree(small_llama, folder)
    (folder / "tokenizer.json").unlink()
    llm = LLM(folder, num_blocks=10)
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json; put the tokenizer there, or give token ids"):
        llm.generate("abc")
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        llm.chat([{"role": "user", "content": "abc"}])
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        llm.generate([3, 4], Sampling(stop="a"))
    check_in_order(llm, expected)
    assert llm.generate([3, 4], GREEDY)[0].outputs[0].text == ""


def test_what_a_model_cannot_do_is_told_before_its_weights_are_read(
    cli: Callable[..., tuple[int, str, str]], small_llama: Path, tmp_path: Path
):
    folder = tmp_path / "model"
    shutil.copytree(small_llama, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"max_model_len is 1000000; this model was made for at most \d+ tokens"):
        LLM(folder, max_model_len=1_000_000)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors"):
        LLM(folder)
    commands = [("generate", "abc", "--model", folder), ("chat", "--model", folder), ("demo", "--model", folder)]
    for command in [*commands, ("perplexity", folder)]:
        code, out, err = cli(*command)
        assert (code, out) == (1, "")
        assert "holds no tokenizer.json; put the tokenizer there" in one_error_line(err)


def test_a_chat_with_a_model_that_has_no_template_points_to_generate(
    cli: Callable[..., tuple[int, str, str]], small_llama: Path, expected: tuple[int, ...], tmp_path: Path
):
    folder = tmp_path / "model"
    shutil.copytree(small_llama, folder)
    write_tokenizer(folder, chat_template=None)
    llm = LLM(folder, num_blocks=10)
    with pytest.raises(ModelError, match="has no chat template; use generate"):
        llm.chat([{"role": "user", "content": "abc"}])
    check_in_order(llm, expected)
    code, out, err = cli("generate", "--model", folder, "--num-blocks=10", "--chat", "abc")
    assert (code, out) == (1, "")
    assert "has no chat template" in one_error_line(err)


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], "hello", ["hello"]])
def test_messages_without_role_and_content_are_refused(llm: LLM, messages: Any):
    with pytest.raises(InvalidRequest, match=r"the chat is empty|a message has a"):
        llm.chat(messages)


# --- Allocators -----------------------------------------------------------------------------------


class GivesTheSameBlockTwice(BlockAllocator):
    def allocate(self) -> int:
        super().allocate()
        return 0


class KeepsFreedBlocks(BlockAllocator):
    def free(self, block: int) -> None:
        if self.ref_count(block) > 1:
            super().free(block)


class ForgetsToCount(BlockAllocator):
    def share(self, block: int) -> None:
        self.ref_count(block)


class CopiesNothing(BlockAllocator):
    def copy_on_write(self, block: int) -> int:
        return block


class IsEmptyTooSoon(BlockAllocator):
    @property
    def num_free(self) -> int:
        return max(0, super().num_free - 1)


MISBEHAVING = {
    GivesTheSameBlockTwice: "exclusive-write",
    KeepsFreedBlocks: "conservation",
    ForgetsToCount: "exact-references",
    CopiesNothing: "exclusive-write",
    IsEmptyTooSoon: "conservation",
}


@pytest.mark.parametrize(("allocator", "invariant"), MISBEHAVING.items(), ids=[c.__name__ for c in MISBEHAVING])
def test_an_allocator_that_misbehaves_is_named_with_the_invariant_it_broke(
    loaded: LoadedModel, llm: LLM, allocator: type[BlockAllocator], invariant: str
):
    sizes = BLOCKS | {"enable_prefix_caching": False}  # or the cache keeps all blocks, and none is given back
    with pytest.raises(InvariantViolation, match=f"invariant '{invariant}' broken: {allocator.__name__}: ") as error:
        LLM(loaded, allocator=allocator, **sizes).generate("abcdefg", Sampling(n=2, max_tokens=8, ignore_eos=True))
    assert error.value.invariant == invariant
    # The `llm` fixture beside it, on the same weights, still serves.


@pytest.fixture
def student_file(tmp_path: Path) -> Path:
    """What a student hands in: allocators that subclass nothing of ours."""
    file = tmp_path / "my_allocator.py"
    file.write_text(
        """
from minipaged.contracts import BlockAllocator as Contract
from minipaged.errors import BlockNotAllocated, OutOfBlocks

class Mine:
    def __init__(self, num_blocks):
        if num_blocks < 1:
            raise ValueError(num_blocks)
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks
    @property
    def num_free(self):
        return self.counts.count(0)
    def allocate(self):
        if not self.num_free:
            raise OutOfBlocks("none left")
        block = len(self.counts) - 1 - self.counts[::-1].index(0)
        self.counts[block] = 1
        return block
    def share(self, block):
        self.check(block)
        self.counts[block] += 1
    def free(self, block):
        self.check(block)
        self.counts[block] -= 1
    def ref_count(self, block):
        if not 0 <= block < self.num_blocks:
            raise BlockNotAllocated(block)
        return self.counts[block]
    def copy_on_write(self, block):
        self.check(block)
        if self.counts[block] == 1:
            return block
        new = self.allocate()
        self.counts[block] -= 1
        return new
    def check(self, block):
        if self.ref_count(block) == 0:
            raise BlockNotAllocated(block)

class Leaks(Mine):
    def free(self, block):
        self.check(block)

class Half:
    def __init__(self, num_blocks):
        self.num_blocks = self.num_free = num_blocks

class Unfinished(Contract):
    def __init__(self, num_blocks):
        pass

class Todo(Mine):
    def share(self, block):
        raise NotImplementedError("to do")

not_a_class = 7
"""
    )
    return file


def test_a_students_allocator_serves_from_a_file(
    cli: Callable[..., tuple[int, str, str]], student_file: Path, small_llama: Path
):
    arguments = ("generate", "--model", small_llama, "--temperature=0", "--num-blocks=20", "--n=3", "--json", "abcdef")
    events = student_file.with_name("events.jsonl")
    code, ours, _ = cli(*arguments)
    assert code == 0
    code, theirs, _ = cli(*arguments, "--allocator", f"{student_file}:Mine", "--events", events)
    assert code == 0
    assert [[o["token_ids"] for o in out["outputs"]] for out in json.loads(theirs)] == [
        [o["token_ids"] for o in out["outputs"]] for out in json.loads(ours)
    ]
    assert '"new_blocks":[19' in events.read_text()  # theirs hands out the last block first, ours the first


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{file}:Leaks", "invariant 'exact-references' broken: Leaks: after free("),  # the cache keeps the block
        ("{file}:Half", "Half is no block allocator: it lacks allocate, share, free, ref_count, copy_on_write"),
        ("{file}:Unfinished", "Unfinished is no block allocator: it lacks num_blocks, num_free, allocate, share, free"),
        ("{file}:Yours", "my_allocator.py has no class Yours; it has "),
        ("{file}:not_a_class", "my_allocator.py has no class not_a_class; it has "),
        ("{file}", "write it as FILE.py:Class"),
        ("Mine", "write it as FILE.py:Class"),
        ("{file}:", "write it as FILE.py:Class"),
        ("elsewhere.py:Mine", "there is no file elsewhere.py"),
        ("{broken}:Mine", "broken.py does not load: SyntaxError"),
        ("{file}:Todo", "the allocator raised NotImplementedError: to do ({file}:"),
    ],
)
def test_an_allocator_that_cannot_be_used_is_refused_in_one_line(
    cli: Callable[..., tuple[int, str, str]], student_file: Path, small_llama: Path, spec: str, message: str
):
    broken = student_file.with_name("broken.py")
    broken.write_text("def (")
    allocator = spec.format(file=student_file, broken=broken)
    code, _, err = cli("generate", "--model", small_llama, "--num-blocks=20", "--n=2", "--allocator", allocator, "abc")
    assert code == 1
    assert message.replace("{file}", str(student_file)) in one_error_line(err)


POLICY = """
class Mine:
    \"\"\"One at a time, the latest first.\"\"\"

    def __init__(self, *settings):
        self.max_tokens = settings[3]

    def fits(self, request):
        return True

    def share_tokens(self, running):
        return {r.request_id: min(r.tokens_to_run, self.max_tokens) for r in running[:1]}

    def victim(self, running):
        return running[0].request_id

    def way_back(self, request, host_free):
        return "recompute"

    def admit(self, waiting, running, num_free, tokens_left):
        return [] if running else [max(waiting, key=lambda r: r.arrival).request_id]

class Half:
    def __init__(self, *settings):
        pass
    fits = victim = len

class Lies(Mine):
    def admit(self, *asked):
        return ["nobody"]

class Todo(Mine):
    def admit(self, *asked):
        raise NotImplementedError("to do")

class NoRoom(Mine):
    def fits(self, request):
        return False
"""


def test_a_students_policy_serves_from_a_file(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path, small_llama: Path
):
    """With the same tokens, in another order."""
    (tmp_path / "mine.py").write_text(POLICY)
    events = tmp_path / "events.jsonl"
    arguments = ("generate", "--model", small_llama, "--temperature=0", "--num-blocks=20", "--json", "abcdef", "bcd")
    finished = {}
    said = set()
    for policy in ("fcfs", f"{tmp_path / 'mine.py'}:Mine"):
        code, out, _ = cli(*arguments, "--scheduling-policy", policy, "--events", events)
        assert code == 0
        said.add(json.dumps([[o["token_ids"] for o in one["outputs"]] for one in json.loads(out)]))
        told = map(json.loads, events.read_text().splitlines())
        finished[policy] = [event["request"] for event in told if event["event"] == "request_finished"]
    assert len(said) == 1
    assert [*finished.values()] == [["0", "1"], ["1", "0"]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{file}:Half", "the policy Half lacks share_tokens, way_back, admit; it needs all of fits, share_tokens, "),
        (
            "{file}:Lies",
            "the policy Lies: admit returned 'nobody', which is not waiting; choose from: 0",
        ),
        ("{file}:NoRoom", "the engine's policy, NoRoom, does not take this request, though it could be served"),
        ("{file}:Todo", "the policy raised NotImplementedError: to do ({file}:"),
        ("{file}:Yours", "mine.py has no class Yours; it has Mine, Half, Lies, Todo, NoRoom"),
        ("elsewhere.py:Mine", "--scheduling-policy: there is no file elsewhere.py"),
        (":Mine", "--scheduling-policy is ':Mine'; write it as FILE.py:Class, e.g. my_policy.py:Mine"),
        (
            "lottery",
            "policy is 'lottery'; choose 'fcfs', 'priority', 'shortest-first', 'longest-prefix-first', or give a class "
            "of your own",
        ),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused_in_one_line(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path, small_llama: Path, spec: str, message: str
):
    file = tmp_path / "mine.py"
    file.write_text(POLICY)
    policy = spec.format(file=file)
    code, _, err = cli("generate", "--model", small_llama, "--num-blocks=20", "--scheduling-policy", policy, "abc")
    assert code == 1
    assert message.replace("{file}", str(file)) in one_error_line(err)


def test_the_prompt_of_the_smallest_priority_comes_first(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path, small_llama: Path
):
    events = tmp_path / "events.jsonl"
    arguments = ("generate", "--model", small_llama, "--max-num-seqs=1", "--scheduling-policy=priority", "a", "b", "c")
    code, _, _ = cli(*arguments, "--priority=1", "--priority=2", "--priority=0", "--events", events)
    assert code == 0
    told = map(json.loads, events.read_text().splitlines())
    assert [event["request"] for event in told if event["event"] == "request_admitted"] == ["2", "0", "1"]
    code, _, err = cli(*arguments, "--priority=1")
    assert code == 1
    assert "3 prompts need 3 priorities; got 1" in one_error_line(err)


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupt(event: Event, *, after_step: int) -> None:
    """A listener that presses Ctrl-C."""
    if isinstance(event, StepFinished) and event.step == after_step:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("params", [Sampling(n=2, max_tokens=12, ignore_eos=True), BeamSearchParams(2, max_tokens=12)])
def test_ctrl_c_in_the_middle_of_a_run_gives_every_block_back(llm_either_way: LLM, params: Any):
    llm = llm_either_way
    listener = lambda event: interrupt(event, after_step=5)  # noqa: E731
    llm.engine.listeners.append(listener)
    run = llm.generate if isinstance(params, Sampling) else llm.beam_search
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(["abc", "abd"], params)
    llm.engine.listeners.remove(listener)
    assert signal.getsignal(signal.SIGINT) == before
    assert llm.stats().steps == 5 + llm.config.async_scheduling  # one more was in flight


def test_ctrl_c_within_the_last_step_is_not_lost(llm_either_way: LLM):
    llm = llm_either_way
    listener = lambda event: interrupt(event, after_step=3)  # noqa: E731
    llm.engine.listeners.append(listener)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", Sampling(max_tokens=3, ignore_eos=True))
    llm.engine.listeners.remove(listener)


def test_a_second_ctrl_c_within_a_step_stops_it_at_once_and_gives_every_block_back(
    llm_either_way: LLM, monkeypatch: pytest.MonkeyPatch
):
    """The step dies between the moves of its blocks and its results: all that it had begun is undone."""
    llm = llm_either_way
    runner = llm.engine.runner
    sample, calls = runner.sample, []

    def impatient(logits: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return sample(logits, inputs)

    monkeypatch.setattr(runner, "sample", impatient)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "abd"], Sampling(n=2, max_tokens=12, ignore_eos=True))
    assert llm.stats().steps == 3 - llm.config.async_scheduling  # the third was in flight, and goes too
    assert len(calls) == 4


def test_an_error_within_a_step_is_passed_on_and_gives_every_block_back(
    llm_either_way: LLM, monkeypatch: pytest.MonkeyPatch
):
    llm = llm_either_way
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(["abc", "abd"], GREEDY)


def test_ctrl_c_on_the_command_line_exits_with_130(tmp_path: Path):
    folder = make_small_llama(tmp_path, max_position_embeddings=100_000)
    arguments = ["--model", str(folder), "--num-blocks=6000", "--max-tokens=90000", "--ignore-eos", "abc"]
    with subprocess.Popen(
        [sys.executable, "-m", "minipaged", "generate", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)  # it streams
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    told = ["", "finishing the step; Ctrl-C again stops at once", "", "interrupted; every block has been given back"]
    assert err.decode().splitlines() == told


# --- Whatever goes wrong is an error of ours ------------------------------------------------------


@pytest.mark.parametrize("error", [InvalidRequest, ModelError, InvariantViolation])
def test_every_error_on_purpose_can_be_caught_as_one_kind(error: type[Exception]):
    assert issubclass(error, MinipagedError)


def test_a_file_for_events_that_cannot_be_written_is_refused(
    cli: Callable[..., tuple[int, str, str]], small_llama: Path, tmp_path: Path
):
    path: Sequence[str | Path] = ("--events", tmp_path / "nowhere" / "events.jsonl")
    code, out, err = cli("generate", "--model", small_llama, "--num-blocks=20", "abc", *path)
    assert (code, out) == (1, "")
    assert "cannot write events to" in one_error_line(err)
