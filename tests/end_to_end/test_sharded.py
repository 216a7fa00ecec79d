"""However many ranks and stages share a model: requests get the tokens that they get from one, whatever happens to
their blocks. Every cache moves the same ones.

Greedy tokens are compared in float32 and may part only at a proven tie; samples and beams in float64 (`ties.py`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from minipaged import LLM, InvalidRequest, RequestOutput, SamplingParams
from minipaged.contracts import BatchRow
from minipaged.llm import LoadedModel
from minipaged.tiers import ReferenceTier
from tests.effort import one_case_in, quick_cases, thorough
from tests.end_to_end import yardstick
from tests.end_to_end.small_llama import make_small_llama
from tests.end_to_end.test_scheduling_invariance import (
    DTYPE,
    JOBS,
    CopiesForSiblings,
    check_nothing_is_held,
    check_same,
    largest_need,
    outputs_alone,
    run,
)
from tests.end_to_end.ties import check_same_or_tied

LAYOUTS = [(4, 2), (2, 1), (3, 1), (1, 2)]
"""Tensor and pipeline parallel sizes, of a model with 9 heads, 3 KV heads and 2 layers."""


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's heads, and sizes that nothing divides."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    sizes = {"hidden_size": 72, "intermediate_size": 97}
    return make_small_llama(tmp_path_factory.mktemp("nine_heads"), tie_word_embeddings=True, **heads, **sizes)


@pytest.fixture(scope="module")
def alone(nine_heads: Path) -> dict[str, list[RequestOutput]]:
    return {kind: outputs_alone(nine_heads, jobs, DTYPE[kind]) for kind, jobs in JOBS.items()}


@quick_cases(6)
@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_whatever_happens_ranks_give_the_tokens_of_one(
    nine_heads: Path, alone: dict[str, list[RequestOutput]], layout: tuple[int, int], preemption: Any, kind: str
) -> None:
    """Chunks, prefix hits, preemption and copies on write; memory that is nobody's holds NaN on every rank."""
    llm = LLM(
        nine_heads,
        tier="reference",
        tensor_parallel_size=layout[0],
        pipeline_parallel_size=layout[1],
        block_size=4,
        num_blocks=largest_need(JOBS[kind], 4) + 4,
        num_swap_blocks=100,
        preemption=preemption,
        max_num_batched_tokens=11,
        max_model_len=128,
        dtype=DTYPE[kind],
        debug=True,
    )
    copies = CopiesForSiblings(llm)
    check_same(nine_heads, JOBS[kind], run(llm, JOBS[kind], [0, 0, 0, 0, 5, 5, 9]), alone[kind])
    check_nothing_is_held(llm)
    stats = llm.stats()
    assert stats.prefix_cache_hit_tokens > 0
    assert (stats.preempted_by_swap > 0) == (preemption == "swap")
    assert (stats.preempted_by_recompute > 0) == (preemption == "recompute")
    assert (copies.number > 0) == (kind != "greedy")


def test_a_block_takes_what_all_ranks_need_for_it(nine_heads: Path) -> None:
    loaded = LoadedModel.load(nine_heads, "reference")
    for layout, num_kv_heads in {(1, 1): 3, (3, 2): 3, (4, 1): 4, (9, 2): 9}.items():
        size, num_stages = layout
        llm = LLM(loaded, num_blocks=2, tensor_parallel_size=size, pipeline_parallel_size=num_stages)
        runner: Any = llm.engine.runner
        stages = [[runner]] if layout == (1, 1) else runner.stages
        assert [len(ranks) for ranks in stages] == [size] * num_stages
        caches = [rank.kv_cache for ranks in stages for rank in ranks]
        expected = loaded.block_bytes(16) * num_kv_heads // 3
        assert sum(cache.block_bytes for cache in caches) == expected == loaded.block_bytes(16, "auto", size)


def test_prompts_are_told_of_by_ranks_too(nine_heads: Path) -> None:
    loaded = LoadedModel.load(nine_heads, "reference", dtype="float64")
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2)
    prompt = {"prompt_token_ids": [*range(3, 90)]}
    one, parts = (LLM(loaded, num_blocks=16, tensor_parallel_size=size).generate(prompt, params)[0] for size in (1, 4))  # type: ignore[arg-type]
    assert parts.outputs[0].token_ids == one.outputs[0].token_ids
    for ours, theirs in zip(parts.prompt_logprobs or (), one.prompt_logprobs or (), strict=True):
        assert ours == (theirs and pytest.approx(theirs, abs=1e-10))
    assert len(parts.prompt_logprobs or ()) == 87


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_parallel_size": 10}, r"tensor_parallel_size is 10, .* num_attention_heads = 9, .*; use 9 or fewer"),
        ({"pipeline_parallel_size": 3}, r"pipeline_parallel_size is 3, .* num_hidden_layers = 2, .*; use 2 or fewer"),
        ({"tensor_parallel_size": 10**12}, r"tensor_parallel_size is 10{12}, but .*; use 9 or fewer"),
    ],
)
def test_more_ranks_than_the_model_has_parts_are_refused(
    nine_heads: Path, sizes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded."""
    monkeypatch.setattr(ReferenceTier, "load_weights", lambda *_: pytest.fail("the weights were loaded"))
    with pytest.raises(InvalidRequest, match=f"^{message}$"):
        LLM(nine_heads, tier="reference", **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_no_rank_at_all_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is 0; it must be 1 or more"):
        LLM("/no/such/model", **{name: 0})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> LoadedModel:
    return LoadedModel.load(smollm2_folder, "reference", dtype="float32")


Said = tuple[list[RequestOutput], np.ndarray]


def said_by(loaded: LoadedModel, **parts: int) -> Said:
    """The outputs for all texts, and the logits [1, vocab] after the first one."""
    llm = LLM(loaded, num_blocks=64, max_model_len=512, **parts)  # type: ignore[arg-type]
    outputs = llm.generate(yardstick.TEXTS, SamplingParams(temperature=0, max_tokens=16))
    runner: Any = llm.engine.runner
    return outputs, runner.forward([BatchRow(outputs[0].prompt_token_ids, 0, range(32), wants_logits=True)])


@pytest.fixture(scope="module")
def said_in_one_piece(smollm2: LoadedModel) -> Said:
    return said_by(smollm2)


@thorough
@one_case_in(2)
@pytest.mark.model
@pytest.mark.parametrize("layout", [(2, 1), (3, 1), (4, 1), (2, 2)], ids=str)
def test_smollm2_in_parts_computes_what_it_does_in_one_piece(
    smollm2: LoadedModel, said_in_one_piece: Said, layout: tuple[int, int]
) -> None:
    """The same tokens, and each logit of a prompt within 1e-5 of the largest."""
    parts, found = said_by(smollm2, tensor_parallel_size=layout[0], pipeline_parallel_size=layout[1])
    whole, expected = said_in_one_piece
    for ours, theirs in zip(parts, whole, strict=True):
        tokens = ours.outputs[0].token_ids
        check_same_or_tied(smollm2.folder, ours.prompt_token_ids, tokens, theirs.outputs[0].token_ids)
        assert len(tokens) > 8
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_parts_on_the_reference_tier_are_said(nine_heads: Path) -> None:
    settings: dict[str, Any] = {"num_blocks": 8, "num_swap_blocks": 0}
    loaded = LoadedModel.load(nine_heads, "reference")
    assert LLM(loaded, **settings).description == loaded.tier.description
    parted = LLM(loaded, **settings, tensor_parallel_size=3, pipeline_parallel_size=2).description
    assert parted == (
        "reference tier on cpu: NumPy, float32, in 6 parts in one process (tensor parallel 3, pipeline parallel 2)"
    )


def test_engines_that_share_a_machine_share_its_free_memory(nine_heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they reserve together is no more than the share of what was free, the pools for swapping with it."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 << 20))
    loaded = LoadedModel.load(nine_heads, "reference")

    def pools(sharers: int, **settings: int) -> int:
        config = LLM(loaded, host_sharers=sharers, **settings).config
        return (config.num_blocks + config.num_swap_blocks) * loaded.block_bytes(config.block_size)

    alone, of_two, of_three = pools(1), pools(2), pools(3)
    assert alone > 0.8 * 0.9 * (4 << 20)
    assert 2 * of_two <= 0.9 * (4 << 20)
    assert 3 * of_three <= 0.9 * (4 << 20)
    assert of_three < of_two < alone
    few = loaded.block_bytes(16) * 8
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=few))
    assert pools(4, num_blocks=8) - few <= few / 4 / 2  # half of its part, for swapping
    with pytest.raises(InvalidRequest, match="host_sharers is 0; it must be 1 or more"):
        pools(0)
