"""What is kept of what transformers says of SmolLM2 is what it says now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.effort import one_case_in, thorough
from tests.end_to_end import yardstick
from tests.end_to_end.ties import check_same_or_tied

pytestmark = [pytest.mark.model, thorough]

KEPT = yardstick.kept()


def test_the_digests_of_weights_that_are_kept_are_those_of_what_transformers_reads_now(tmp_path: Path) -> None:
    """First: it takes as much memory as all the others, which share a model."""
    assert yardstick.weight_digests(yardstick.fetch_gguf(tmp_path)) == KEPT["weights"]


@pytest.fixture(scope="module")
def theirs(smollm2_folder: Path) -> LlamaForCausalLM:
    return yardstick.load(smollm2_folder)


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder)


@one_case_in(3)
@pytest.mark.parametrize("then", KEPT["texts"], ids=range(len(KEPT["texts"])))
def test_what_is_kept_of_a_text_is_what_transformers_says_now(
    theirs: LlamaForCausalLM, tokenizer: Any, smollm2_folder: Path, then: dict[str, Any]
) -> None:
    now = yardstick.continuations(theirs, tokenizer, then["text"])
    assert now["prompt"] == then["prompt"]
    check_same_or_tied(smollm2_folder, now["prompt"], now["greedy"], then["greedy"])
    assert [tokens for tokens, _ in now["beams"]] == [tokens for tokens, _ in then["beams"]]
    assert [score for _, score in now["beams"]] == pytest.approx([score for _, score in then["beams"]], rel=1e-4)


def test_the_other_things_that_are_kept_are_what_transformers_says_now(
    theirs: LlamaForCausalLM, tokenizer: Any
) -> None:
    assert KEPT.keys() == {"made by", "with", "texts", "logprobs", "logits", "chat", "weights"}
    assert [then["text"] for then in KEPT["texts"]] == yardstick.TEXTS
    first = KEPT["texts"][0]
    for now, then in zip(yardstick.likeliest(theirs, first["prompt"], first["greedy"]), KEPT["logprobs"], strict=True):
        assert [token for token, _ in now] == [token for token, _ in then]
        assert [value for _, value in now] == pytest.approx([value for _, value in then], abs=1e-4)
    logits = yardstick.some_logits(theirs, tokenizer)
    assert logits.keys() == KEPT["logits"].keys()
    assert logits["prompt"] == KEPT["logits"]["prompt"]
    apart = np.abs(np.array(logits["values"]) - np.array(KEPT["logits"]["values"])).max()
    assert apart <= 1e-5 * KEPT["logits"]["largest"]
    assert yardstick.chat(theirs, tokenizer) == KEPT["chat"]
