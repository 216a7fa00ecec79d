"""SmolLM2, served by both tiers, says what transformers says: tokens, logits, logprobs, beams, chat.

What transformers says is kept (`yardstick.json`); `test_yardstick.py` makes it anew. Greedy tokens may differ only at a
proven tie (`ties.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.fast.cpu.llama import DenseMatrix
from minipaged.fast.cpu.product import TiledMatrix, num_bytes
from minipaged.recordings.replay_steps import logits_of
from tests.effort import one_case_in
from tests.end_to_end import yardstick
from tests.end_to_end.ties import check_same_or_tied
from tests.end_to_end.yardstick import assert_same_beams, assert_same_logprobs
from tests.memory import give_back

CHUNK = 32
"""`max_num_batched_tokens`: the longest prompt runs in chunks."""

pytestmark = pytest.mark.model


@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK])
@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)], ids=str)
def test_a_matrix_of_this_size_gives_the_same_however_it_is_laid_out(rows: int, columns: int, num_tokens: int):
    """For one token and for many: in oneDNN's layout, without oneDNN, and in tiles, as the model is served below."""
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, columns, generator=random) for size in (rows, num_tokens))
    in_tiles = TiledMatrix(weight, None, np.empty(num_bytes(weight), np.uint8))
    laid_out = DenseMatrix(weight, None)
    with patch.object(torch.backends.mkldnn, "is_available", lambda: False):
        as_rows = DenseMatrix(weight, None)
    assert as_rows._packed is None
    expected = x @ weight.T
    for matrix in (laid_out, as_rows, in_tiles):
        assert (matrix(x) - expected).norm() <= 1e-6 * expected.norm()


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return yardstick.kept()


@pytest.fixture(scope="module")
def smollm2(tier: str, smollm2_folder: Path) -> LLM:
    give_back()  # the other tier's weights
    return LLM("smollm2-135m-instruct", tier=tier, dtype="float32", num_blocks=64, max_num_batched_tokens=CHUNK)


def test_greedy_tokens_are_those_of_transformers(smollm2: LLM, smollm2_folder: Path, kept: dict[str, Any]):
    params = SamplingParams(temperature=0, max_tokens=yardstick.GREEDY_TOKENS)
    outputs = smollm2.generate(yardstick.TEXTS, params)
    assert max(len(output.prompt_token_ids) for output in outputs) > CHUNK
    for output, theirs in zip(outputs, kept["texts"], strict=True):
        prompt = list(output.prompt_token_ids)
        assert prompt == theirs["prompt"]
        check_same_or_tied(smollm2_folder, prompt, output.outputs[0].token_ids, theirs["greedy"])


def test_greedy_tokens_are_the_same_where_tokens_are_drafted(
    smollm2: LLM, smollm2_folder: Path, kept: dict[str, Any]
) -> None:
    """In fewer steps than the longest output has tokens."""
    asked = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    llm = LLM(smollm2.loaded, num_blocks=64, speculative_config=asked)
    prompt = smollm2.need_tokenizer().encode(REPEATED)
    params = SamplingParams(temperature=0, max_tokens=24)
    [plain], [output] = (each.generate([prompt], params) for each in (smollm2, llm))
    tokens = output.outputs[0].token_ids
    check_same_or_tied(smollm2_folder, prompt, tokens, plain.outputs[0].token_ids)
    stats = llm.stats()
    assert stats.tokens_drafted >= stats.tokens_accepted > len(tokens) / 3
    assert stats.steps < len(tokens) * 2 / 3
    assert not llm.config.async_scheduling


REPEATED = "The cat sat on the mat. The dog lay on the rug. The cat sat on the mat. The dog lay on the rug. The cat"


@one_case_in(4)
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, len(yardstick.TEXTS)))]
)
def test_beams_are_those_of_transformers(smollm2: LLM, number: int, kept: dict[str, Any]):
    [output] = smollm2.beam_search(yardstick.TEXTS[number], yardstick.BEAMS)
    assert_same_beams(output.outputs, [(tokens, score) for tokens, score in kept["texts"][number]["beams"]])


def test_logits_are_within_rounding_of_those_of_transformers(smollm2: LLM, kept: dict[str, Any]):
    theirs = kept["logits"]
    assert len(theirs["prompt"]) > 100
    ours = logits_of(smollm2.loaded, theirs["prompt"])[:: yardstick.LOGITS_EVERY]
    # About 2e-6 apart; a RoPE base that is wrong by a thousandth makes it 7e-5.
    assert np.abs(ours - np.array(theirs["values"])).max() <= 1e-5 * theirs["largest"]


def test_logprobs_are_those_of_transformers(smollm2: LLM, kept: dict[str, Any]):
    params = SamplingParams(temperature=0, max_tokens=yardstick.LOGPROB_TOKENS, logprobs=yardstick.LOGPROBS)
    [output] = smollm2.generate(yardstick.TEXTS[0], params)
    assert_same_logprobs(output.outputs[0], [dict(row) for row in kept["logprobs"]], yardstick.LOGPROBS)


def test_a_chat_is_seen_as_through_transformers(smollm2: LLM, kept: dict[str, Any]):
    [output] = smollm2.chat(yardstick.MESSAGES, SamplingParams(temperature=0, max_tokens=yardstick.CHAT_TOKENS))
    assert list(output.prompt_token_ids) == kept["chat"]["prompt"]
    assert list(output.outputs[0].token_ids) == kept["chat"]["greedy"]
    assert output.outputs[0].text == kept["chat"]["text"]
