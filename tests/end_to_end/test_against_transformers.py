"""minipaged serves what transformers computes: greedy tokens, logits, logprobs and beams.

The yardstick is transformers' own model on the same checkpoint folder (`yardstick.py`). The whole of minipaged runs:
scheduler, chunked prefill, paged cache, sampling. Small random models stand for the shapes that a Llama can have;
`test_smollm2.py` has the real one. Greedy tokens may differ only at a proven tie (`ties.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from minipaged import LLM, BeamSearchParams, SamplingParams
from tests.effort import quick_cases
from tests.end_to_end.small_llama import make_small_llama
from tests.end_to_end.ties import check_same_or_tied
from tests.end_to_end.yardstick import assert_same_beams, assert_same_logprobs, beams, greedy, load, logprobs

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
    "biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"model_type": "mistral", "sliding_window": None},
    "Qwen2": {"model_type": "qwen2"},
    "Qwen3, tied": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "Qwen3 with biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "stored in bf16": {"dtype": torch.bfloat16},
    "stored in fp16, in several files": {"dtype": torch.float16, "shard_size": "50KB"},
}
SMALL_PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(3, 128, 2)), [64] * (CHUNK + 1)]

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


@quick_cases(2)
def test_greedy_tokens_of_a_small_model_are_those_of_transformers(serve: Serve, shape: Path):
    theirs = load(shape)
    outputs = serve(shape).generate(SMALL_PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    for prompt, output in zip(SMALL_PROMPTS, outputs, strict=True):
        check_same_or_tied(shape, prompt, output.outputs[0].token_ids, greedy(theirs, prompt, 24))


@quick_cases(2)
def test_logprobs_of_a_small_model_are_those_of_transformers(serve: Serve, shape: Path):
    theirs = load(shape)
    params = SamplingParams(temperature=1, seed=5, max_tokens=12, logprobs=4, ignore_eos=True)
    for prompt, output in zip(SMALL_PROMPTS, serve(shape).generate(SMALL_PROMPTS, params), strict=True):
        [completion] = output.outputs
        assert_same_logprobs(completion, logprobs(theirs, prompt, completion.token_ids), count=4)


@quick_cases(1)
def test_prompt_logprobs_of_a_small_model_are_those_of_transformers(serve: Serve, shape: Path):
    """In one chunk and in several, the last of which has one token; of a prompt that the cache has, too."""
    theirs = load(shape)
    params = SamplingParams(max_tokens=1, prompt_logprobs=3)
    prompts = [*SMALL_PROMPTS, SMALL_PROMPTS[-1]]
    for prompt, output in zip(prompts, serve(shape).generate(prompts, params), strict=True):
        first, *found = output.prompt_logprobs or ()
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)  # [prompt - 1, vocab]
        assert first is None
        for token, told, row in zip(prompt[1:], found, expected, strict=True):
            assert told is not None
            assert list(told)[:3] == row.topk(3).indices.tolist()
            assert set(told) == {*row.topk(3).indices.tolist(), token}
            assert list(told.values()) == pytest.approx(row[list(told)].tolist(), abs=2e-4)


@quick_cases(2)
def test_beams_of_a_small_model_are_those_of_transformers(serve: Serve, shape: Path):
    theirs, params = load(shape), BeamSearchParams(beam_width=3, max_tokens=10)
    for prompt, output in zip(SMALL_PROMPTS, serve(shape).beam_search(SMALL_PROMPTS, params), strict=True):
        assert_same_beams(output.outputs, beams(theirs, prompt, params))


@pytest.fixture(scope="module")
def often_ending(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LlamaForCausalLM]:
    """A small model for which a sixth of the vocabulary ends the text, so that beams of many lengths compete."""
    folder = make_small_llama(tmp_path_factory.mktemp("often_ending"), seed=3, eos_token_id=list(range(100, 121)))
    (folder / "tokenizer_config.json").unlink()  # transformers' generate does not ask the tokenizer what ends a text
    return serve(folder), load(folder)


@quick_cases(2)
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


@quick_cases(1)
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
