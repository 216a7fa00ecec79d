"""Llama's cousins serve what transformers computes, in a crowd: prompts in chunks, prefix hits, too few blocks for all.

`test_against_transformers.py` has them each request by itself, among the shapes of a Llama, and `test_windows.py`
beyond their windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, SamplingParams
from tests.effort import quick_cases
from tests.end_to_end.small_llama import make_small_llama
from tests.end_to_end.ties import check_same_or_tied
from tests.end_to_end.yardstick import greedy, load

WINDOW = 56
COUSINS: dict[str, dict[str, Any]] = {
    "Qwen3": {"model_type": "qwen3", "head_dim": 32},
    "Qwen2": {"model_type": "qwen2"},
    "Mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "Llama with biases": {"attention_bias": True, "mlp_bias": True},
}
STEM = list(range(20, 52))
PROMPTS = [[*STEM, 7], [5], [*STEM[:20], 9, 8], [*STEM, 60, 61, 62, 63], list(range(90, 60, -3))]
MAX_TOKENS = 20
"""Of the longest: 32 + 4 + 20 = WINDOW."""


@pytest.fixture(scope="module", params=COUSINS.values(), ids=COUSINS.keys())
def cousin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model of each."""
    return make_small_llama(tmp_path_factory.mktemp("cousin"), eos_token_id=None, **request.param)


@pytest.fixture(scope="module")
def expected(cousin: Path) -> list[list[int]]:
    """What transformers says to each prompt."""
    theirs = load(cousin)
    return [greedy(theirs, prompt, MAX_TOKENS) for prompt in PROMPTS]


@quick_cases(2)
@pytest.mark.parametrize("tier", ["fast", "reference"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_crowd_is_told_what_transformers_says(
    cousin: Path, expected: list[list[int]], preemption: str, tier: str
) -> None:
    sizes = {"block_size": 4, "num_blocks": 24, "num_swap_blocks": 40, "max_num_batched_tokens": 16}
    llm = LLM(cousin, tier=tier, dtype="float32", debug=True, preemption=preemption, **sizes)
    for _ in range(2):  # the second time the cache knows them
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        for prompt, output, theirs in zip(PROMPTS, outputs, expected, strict=True):
            check_same_or_tied(cousin, prompt, output.outputs[0].token_ids, theirs)
    stats = llm.engine.current_stats()
    assert stats.prefix_cache_hit_tokens > 0
    assert getattr(stats, f"preempted_by_{preemption}") > 0
