"""minipaged serves what transformers computes: greedy tokens, logits, logprobs and beams.

The yardstick is transformers' own model on the same checkpoint folder (`yardstick.py`). The whole of minipaged runs:
scheduler, chunked prefill, paged cache, sampling. Small random models stand for the shapes that a Llama can have;
`test_smollm2.py` has the real one. Greedy tokens may differ only at a proven tie (`ties.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.llm import LoadedModel
from tests.effort import quick_cases
from tests.end_to_end.small_llama import make_small_llama
from tests.end_to_end.ties import check_same_or_tied
from tests.end_to_end.yardstick import Beams, assert_same_beams, assert_same_logprobs, beams, greedy, load, logprobs

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


@pytest.fixture(params=["reference", "fast"])
def tier(request: pytest.FixtureRequest) -> str:
    """Both tiers of a model are tested one after the other, against the same answers of transformers."""
    return str(request.param)


class Model:
    """A small model, which transformers and each tier load once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.theirs = load(folder)
        self._loaded: dict[str, LoadedModel] = {}

    def serve(self, tier: str) -> LLM:
        """A new LLM in float32: it has seen no prompt yet."""
        if tier not in self._loaded:
            self._loaded[tier] = LoadedModel.load(self.folder, tier, dtype="float32")
        return LLM(self._loaded[tier], num_blocks=64, block_size=8, max_num_batched_tokens=CHUNK, debug=True)


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A small model of each shape."""
    return Model(make_small_llama(tmp_path_factory.mktemp("shape"), **request.param))


@pytest.fixture(scope="module")
def greedy_texts(shape: Model) -> list[list[int]]:
    return [greedy(shape.theirs, prompt, 24) for prompt in SMALL_PROMPTS]


@quick_cases(4)
def test_greedy_tokens_of_a_small_model_are_those_of_transformers(
    shape: Model, greedy_texts: list[list[int]], tier: str
):
    outputs = shape.serve(tier).generate(SMALL_PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    for prompt, output, theirs in zip(SMALL_PROMPTS, outputs, greedy_texts, strict=True):
        check_same_or_tied(shape.folder, prompt, output.outputs[0].token_ids, theirs)


@quick_cases(4)
def test_logprobs_of_a_small_model_are_those_of_transformers(shape: Model, tier: str):
    params = SamplingParams(temperature=1, seed=5, max_tokens=12, logprobs=4, ignore_eos=True)
    for prompt, output in zip(SMALL_PROMPTS, shape.serve(tier).generate(SMALL_PROMPTS, params), strict=True):
        [completion] = output.outputs
        assert_same_logprobs(completion, logprobs(shape.theirs, prompt, completion.token_ids), count=4)


@quick_cases(2)
def test_prompt_logprobs_of_a_small_model_are_those_of_transformers(shape: Model, tier: str):
    """In one chunk and in several, the last of which has one token; of a prompt that the cache has, too."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=3)
    prompts = [*SMALL_PROMPTS, SMALL_PROMPTS[-1]]
    for prompt, output in zip(prompts, shape.serve(tier).generate(prompts, params), strict=True):
        first, *found = output.prompt_logprobs or ()
        with torch.inference_mode():
            expected = shape.theirs(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)
        assert first is None
        for token, told, row in zip(prompt[1:], found, expected, strict=True):  # expected: [prompt - 1, vocab]
            assert told is not None
            assert list(told)[:3] == row.topk(3).indices.tolist()
            assert set(told) == {*row.topk(3).indices.tolist(), token}
            assert list(told.values()) == pytest.approx(row[list(told)].tolist(), abs=2e-4)


BEAMS = BeamSearchParams(beam_width=3, max_tokens=10)


@pytest.fixture(scope="module")
def beams_of_a_shape(shape: Model) -> list[Beams]:
    return [beams(shape.theirs, prompt, BEAMS) for prompt in SMALL_PROMPTS]


@quick_cases(4)
def test_beams_of_a_small_model_are_those_of_transformers(shape: Model, beams_of_a_shape: list[Beams], tier: str):
    for output, theirs in zip(shape.serve(tier).beam_search(SMALL_PROMPTS, BEAMS), beams_of_a_shape, strict=True):
        assert_same_beams(output.outputs, theirs)


# --- Texts that end -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def often_ending(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A small model for which a sixth of the vocabulary ends the text, so that beams of many lengths compete."""
    folder = make_small_llama(tmp_path_factory.mktemp("often_ending"), seed=3, eos_token_id=list(range(100, 121)))
    (folder / "tokenizer_config.json").unlink()  # transformers' generate does not ask the tokenizer what ends a text
    return Model(folder)


ENDING_PROMPTS = [[3], [10, 20, 30], [90, 50, 70, 60], [11, 12]]
RANKINGS: list[tuple[float, Any]] = [
    (length_penalty, early_stopping)
    for length_penalty in (-1.0, 0.0, 0.7, 1.0, 2.0)
    for early_stopping in (True, False, "never")
]


@pytest.fixture(scope="module", params=RANKINGS, ids=str)
def ranking(request: pytest.FixtureRequest) -> BeamSearchParams:
    """Each way to rank beams, and to stop."""
    length_penalty, early_stopping = request.param
    return BeamSearchParams(4, max_tokens=14, length_penalty=length_penalty, early_stopping=early_stopping)


@pytest.fixture(scope="module")
def ranked(often_ending: Model, ranking: BeamSearchParams) -> list[Beams]:
    return [beams(often_ending.theirs, prompt, ranking) for prompt in ENDING_PROMPTS]


@quick_cases(2)
def test_beams_that_end_at_different_lengths_are_ranked_and_stopped_as_by_transformers(
    often_ending: Model, ranking: BeamSearchParams, ranked: list[Beams], tier: str
):
    lengths = set()
    for output, theirs in zip(often_ending.serve(tier).beam_search(ENDING_PROMPTS, ranking), ranked, strict=True):
        assert_same_beams(output.outputs, theirs)
        lengths |= {len(beam.token_ids) for beam in output.outputs}
    assert len(lengths) > 1


ONE_TOKEN_PROMPTS = [[token] for token in range(3, 33)]


@pytest.fixture(scope="module")
def ended_texts(often_ending: Model) -> list[list[int]]:
    return [greedy(often_ending.theirs, prompt, 16) for prompt in ONE_TOKEN_PROMPTS]


@quick_cases(1)
def test_a_text_ends_where_transformers_ends_it(often_ending: Model, ended_texts: list[list[int]], tier: str):
    outputs = often_ending.serve(tier).generate(ONE_TOKEN_PROMPTS, SamplingParams(temperature=0, max_tokens=16))
    lengths = set()
    for output, theirs in zip(outputs, ended_texts, strict=True):
        [completion] = output.outputs
        assert list(completion.token_ids) == theirs
        assert completion.finish_reason == ("length" if completion.token_ids[-1] < 100 else "stop")
        lengths.add(len(completion.token_ids))
    assert {1, 16} < lengths  # at once, in between, not at all
