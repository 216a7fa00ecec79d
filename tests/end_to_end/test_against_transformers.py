"""minipaged serves what transformers computes: greedy tokens, logits, logprobs and beams.

The yardstick is transformers' `LlamaForCausalLM` in float32, one prompt at a time, on the same checkpoint folder. The
whole of minipaged runs: tokenizer, scheduler, chunked prefill, paged cache, sampling. Small random models stand for
the shapes that a Llama can have; SmolLM2 is the real one. Greedy tokens may differ only at a proven tie (`ties.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.outputs import CompletionOutput
from tests.end_to_end.small_llama import make_small_llama
from tests.end_to_end.ties import check_same_or_tied, computed_logits

CHUNK = 32
"""`max_num_batched_tokens` throughout: prompts longer than that run in chunks."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped-query attention": {},
    "one key/value head for all": {"num_key_value_heads": 1},
    "a key/value head for each query head": {"num_key_value_heads": 4},
    "SmolLM2's 9 heads in groups of 3, tied": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "heads of 32, wider than the hidden size": {"head_dim": 32},
    "heads of 256": {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
    "one layer": {"num_hidden_layers": 1},
    "five layers, another epsilon": {"num_hidden_layers": 5, "rms_norm_eps": 1e-2},
    "linear RoPE scaling": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "Llama 3 RoPE scaling": {"rope_parameters": LLAMA3_ROPE},
    "stored in bf16": {"dtype": torch.bfloat16},
    "stored in fp16, in several files": {"dtype": torch.float16, "shard_size": "50KB"},
}
SMALL_PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(3, 128, 2)), [64] * (CHUNK + 1)]

REAL_PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    "Water boils at",
    "Überraschung! 東京は",
    "A cache that hands out memory in pages wastes little of it. " * 4,  # runs in chunks
]


# --- The yardstick --------------------------------------------------------------------------------


def load(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def greedy(model: LlamaForCausalLM, prompt: Sequence[int], max_tokens: int) -> list[int]:
    tokens = torch.tensor([list(prompt)])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=max_tokens)
    return out[0, len(prompt) :].tolist()


def beams(model: LlamaForCausalLM, prompt: Sequence[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """The best sequences, each up to and including its end of sequence, with their scores."""
    tokens = torch.tensor([list(prompt)])
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
    )
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    found = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        found.append((row[:length], score))
    return found


def logprobs(model: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Log-probabilities [len(output), vocab] of all tokens in the place of each token of `output`."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        return torch.log_softmax(logits.double(), dim=-1).numpy()


def assert_same_beams(ours: Sequence[CompletionOutput], theirs: list[tuple[list[int], float]]) -> None:
    assert [list(beam.token_ids) for beam in ours] == [tokens for tokens, _ in theirs]
    assert [beam.score for beam in ours] == pytest.approx([score for _, score in theirs], rel=1e-4, abs=1e-5)


def assert_same_logprobs(output: CompletionOutput, theirs: np.ndarray, count: int) -> None:
    """`count` likeliest tokens and the chosen one at each step, with transformers' log-probabilities."""
    assert output.logprobs is not None
    chosen = []
    for step, (token, reported) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        best = np.argsort(-theirs[step], kind="stable")[:count].tolist()
        assert set(reported) == {*best, token}
        assert list(reported)[:count] == best
        assert [reported[t] for t in reported] == pytest.approx([theirs[step, t] for t in reported], abs=1e-4)
        chosen.append(theirs[step, token])
    assert output.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-3)


# --- Small random models of every shape -----------------------------------------------------------


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model of each shape."""
    return make_small_llama(tmp_path_factory.mktemp("shape"), **request.param)


Serve = Callable[..., LLM]


@pytest.fixture(scope="module")
def serve(tier: str) -> Serve:
    """Makes an LLM of each tier, in float32, from a folder and settings."""
    sizes = {"num_blocks": 64, "block_size": 8, "max_num_batched_tokens": CHUNK}
    return lambda folder, **settings: LLM(folder, tier=tier, dtype="float32", debug=True, **sizes, **settings)


def test_greedy_tokens_of_a_small_model_are_those_of_transformers(serve: Serve, shape: Path):
    theirs = load(shape)
    outputs = serve(shape).generate(SMALL_PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    for prompt, output in zip(SMALL_PROMPTS, outputs, strict=True):
        check_same_or_tied(shape, prompt, output.outputs[0].token_ids, greedy(theirs, prompt, 24))


def test_logprobs_of_a_small_model_are_those_of_transformers(serve: Serve, shape: Path):
    theirs = load(shape)
    params = SamplingParams(temperature=1, seed=5, max_tokens=12, logprobs=4, ignore_eos=True)
    for prompt, output in zip(SMALL_PROMPTS, serve(shape).generate(SMALL_PROMPTS, params), strict=True):
        [completion] = output.outputs
        assert_same_logprobs(completion, logprobs(theirs, prompt, completion.token_ids), count=4)


def test_beams_of_a_small_model_are_those_of_transformers(serve: Serve, shape: Path):
    theirs, params = load(shape), BeamSearchParams(beam_width=3, max_tokens=10)
    for prompt, output in zip(SMALL_PROMPTS, serve(shape).beam_search(SMALL_PROMPTS, params), strict=True):
        assert_same_beams(output.outputs, beams(theirs, prompt, params))


@pytest.fixture(scope="module")
def often_ending(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LlamaForCausalLM]:
    """A small model for which a sixth of the vocabulary ends the text, so that beams of many lengths compete."""
    folder = make_small_llama(tmp_path_factory.mktemp("often_ending"), seed=3, eos_token_id=list(range(100, 121)))
    return serve(folder), load(folder)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
def test_beams_that_end_at_different_lengths_are_ranked_and_stopped_as_by_transformers(
    often_ending: tuple[LLM, LlamaForCausalLM], length_penalty: float, early_stopping: Any
):
    ours, theirs = often_ending
    params = BeamSearchParams(4, max_tokens=14, length_penalty=length_penalty, early_stopping=early_stopping)
    prompts = [[3], [10, 20, 30], [90, 50, 70, 60], [11, 12]]
    lengths = set()
    for prompt, output in zip(prompts, ours.beam_search(prompts, params), strict=True):
        assert_same_beams(output.outputs, beams(theirs, prompt, params))
        lengths |= {len(beam.token_ids) for beam in output.outputs}
    assert len(lengths) > 1


def test_a_text_ends_where_transformers_ends_it(often_ending: tuple[LLM, LlamaForCausalLM]):
    ours, theirs = often_ending
    prompts = [[token] for token in range(3, 33)]
    lengths = set()
    for prompt, output in zip(
        prompts, ours.generate(prompts, SamplingParams(temperature=0, max_tokens=16)), strict=True
    ):
        [completion] = output.outputs
        assert list(completion.token_ids) == greedy(theirs, prompt, 16)
        assert completion.finish_reason == ("length" if completion.token_ids[-1] < 100 else "stop")
        lengths.add(len(completion.token_ids))
    assert {1, 16} < lengths  # at once, in between, not at all


# --- SmolLM2 --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(tier: str, smollm2_folder: Path) -> LLM:
    return LLM("smollm2-135m-instruct", tier=tier, dtype="float32", num_blocks=128, max_num_batched_tokens=CHUNK)


@pytest.fixture(scope="module")
def smollm2_theirs(smollm2_folder: Path) -> LlamaForCausalLM:
    return load(smollm2_folder)


@pytest.mark.model
def test_smollm2s_greedy_tokens_are_those_of_transformers(
    smollm2: LLM, smollm2_theirs: LlamaForCausalLM, smollm2_folder: Path
):
    outputs = smollm2.generate(REAL_PROMPTS, SamplingParams(temperature=0, max_tokens=16))
    assert max(len(output.prompt_token_ids) for output in outputs) > CHUNK
    for output in outputs:
        prompt = output.prompt_token_ids
        check_same_or_tied(smollm2_folder, prompt, output.outputs[0].token_ids, greedy(smollm2_theirs, prompt, 16))


@pytest.mark.model
def test_smollm2s_logits_are_within_rounding_of_those_of_transformers(
    tier: str, smollm2: LLM, smollm2_theirs: LlamaForCausalLM, smollm2_folder: Path
):
    assert smollm2.tokenizer is not None
    tokens = smollm2.tokenizer.encode("Blocks of keys and values lie scattered in memory, 16 tokens each. " * 8)
    with torch.no_grad():
        theirs = smollm2_theirs(torch.tensor([tokens])).logits[0, -1].numpy()
    ours = computed_logits(smollm2_folder, tokens, tier)
    assert len(tokens) > 100
    # About 2e-6 apart; a RoPE base that is wrong by a thousandth makes it 7e-5.
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.model
def test_smollm2s_logprobs_are_those_of_transformers(smollm2: LLM, smollm2_theirs: LlamaForCausalLM):
    [output] = smollm2.generate(REAL_PROMPTS[0], SamplingParams(temperature=0, max_tokens=8, logprobs=5))
    [completion] = output.outputs
    theirs = logprobs(smollm2_theirs, output.prompt_token_ids, completion.token_ids)
    assert_same_logprobs(completion, theirs, count=5)


@pytest.mark.model
def test_smollm2s_beams_are_those_of_transformers(smollm2: LLM, smollm2_theirs: LlamaForCausalLM):
    params = BeamSearchParams(beam_width=4, max_tokens=16)
    for output in smollm2.beam_search(REAL_PROMPTS, params):
        assert_same_beams(output.outputs, beams(smollm2_theirs, output.prompt_token_ids, params))


@pytest.mark.model
def test_smollm2_sees_the_same_chat_as_through_transformers(
    smollm2: LLM, smollm2_theirs: LlamaForCausalLM, smollm2_folder: Path
):
    messages = [{"role": "user", "content": "Name a colour."}]
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    [output] = smollm2.chat(messages, SamplingParams(temperature=0, max_tokens=12))
    assert list(output.prompt_token_ids) == prompt
    assert list(output.outputs[0].token_ids) == greedy(smollm2_theirs, prompt, 12)
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
