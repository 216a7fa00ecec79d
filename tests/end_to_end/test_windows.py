"""Models whose layers forget serve what transformers computes, far beyond their windows.

The windows are no multiples of a block, and the prompts' chunks cut them.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.engine import Engine
from minipaged.errors import InvalidRequest, ModelError
from minipaged.handover.shared_storage import SharedStorageConnector
from minipaged.llm import LoadedModel
from minipaged.models.loading import load_config
from minipaged.models.quantized.recipe import Recipe
from minipaged.params import EngineConfig
from minipaged.quantizing.checkpoint import quantize
from minipaged.recordings.replay_steps import logits_of
from minipaged.testing.content_runner import ContentRunner
from tests.effort import thorough
from tests.end_to_end.small_llama import make_small_llama
from tests.end_to_end.ties import check_same_or_tied
from tests.end_to_end.yardstick import greedy, last_logits, load
from tests.workloads import REFERENCE

WINDOW = 11
MODELS: dict[str, dict[str, Any]] = {
    "Gemma 3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "Mistral": {"model_type": "mistral"},
    "Gemma 2": {"model_type": "gemma2", "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0},
    "Qwen2, its last layer": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
}
STEM = list(range(20, 53))  # three windows
PROMPTS = [[*STEM, 7], [5], [*STEM[:20], 9, 8], [*STEM, *range(60, 72)], list(range(90, 60, -3))]
MAX_TOKENS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model of each."""
    settings = {"sliding_window": WINDOW, "head_dim": 16, "eos_token_id": None} | request.param
    return make_small_llama(tmp_path_factory.mktemp("forgetful"), **settings)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What transformers says to each prompt."""
    theirs = load(model)
    return [greedy(theirs, prompt, MAX_TOKENS) for prompt in PROMPTS]


POOLS = {("recompute", 4, 7): (18, 30, 42), ("swap", 3, 16): (22, 46, 60)}
"""Blocks, for a model with one, two or three groups of layers: too few for the crowd, with (preemption, block size,
chunk)."""


@pytest.mark.parametrize("tier", ["fast", "reference"])
@pytest.mark.parametrize(
    ("preemption", "block_size", "chunk"),
    [("swap", 3, 16), *(pytest.param("recompute", *each, marks=thorough) for each in [(4, 7), (16, 64)])],
)
def test_a_crowd_is_told_what_transformers_says(
    model: Path, expected: list[list[int]], preemption: str, block_size: int, chunk: int, tier: str
) -> None:
    groups = len(load_config(model).groups.windows)
    pools = POOLS.get((preemption, block_size, chunk))
    sizes = {"block_size": block_size, "num_blocks": pools[groups - 1] if pools else 60, "num_swap_blocks": 200}
    on = {"tier": tier, "device": "cpu", "dtype": "float32"}
    llm = LLM(model, debug=True, preemption=preemption, max_num_batched_tokens=chunk, **sizes, **on)
    for _ in range(2):  # the second time the cache knows them
        outputs = llm.generate(PROMPTS, PARAMS)
        for prompt, output, theirs in zip(PROMPTS, outputs, expected, strict=True):
            check_same_or_tied(model, prompt, output.outputs[0].token_ids, theirs)
    stats = llm.engine.current_stats()
    assert stats.prefix_cache_hit_tokens > 0
    assert getattr(stats, f"preempted_by_{preemption}") > 0 or not pools


@pytest.mark.parametrize("tier", ["fast", "reference"])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 4 * WINDOW])
def test_logits_are_those_of_transformers(model: Path, length: int, tier: str) -> None:
    tokens = [*STEM, *range(60, 71)][:length]
    loaded = LoadedModel.load(model, tier, device="cpu", dtype="float32")
    theirs, ours = last_logits(load(model), tokens), logits_of(loaded, tokens)
    assert np.linalg.norm(ours - theirs) < 1e-4 * np.linalg.norm(theirs)


@pytest.mark.parametrize("tier", ["reference", pytest.param("fast", marks=thorough)])  # the latter in two processes
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_in_parts_it_says_the_same(model: Path, expected: list[list[int]], sizes: dict[str, int], tier: str) -> None:
    with closing(LLM(model, tier=tier, device="cpu", dtype="float32", num_blocks=40, **sizes)) as llm:
        outputs = llm.generate(PROMPTS[:1], PARAMS)
    check_same_or_tied(model, PROMPTS[0], outputs[0].outputs[0].token_ids, expected[0])


@pytest.mark.parametrize("tier", ["reference", pytest.param("fast", marks=thorough)])
@pytest.mark.parametrize("sizes", [{}, {"pipeline_parallel_size": 2}])
def test_texts_that_no_window_is_shorter_than_are_served_without_groups(
    model: Path, expected: list[list[int]], sizes: dict[str, int], tier: str, tmp_path: Path
) -> None:
    """All that models without windows have is there then. Gemma's rotary embeddings stay those of its windows."""
    on = {"tier": tier, "device": "cpu", "dtype": "float32"}
    with closing(
        LLM(model, num_blocks=8, block_size=4, num_swap_blocks=4, max_model_len=WINDOW, debug=True, **on, **sizes)
    ) as llm:
        assert (llm.config.group_windows, type(llm.engine.blocks)) == ((None,), BlockManager)
        [output] = llm.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=WINDOW - 1, ignore_eos=True))
        check_same_or_tied(model, PROMPTS[1], output.outputs[0].token_ids, expected[1][: WINDOW - 1])
        longer = LLM(llm.loaded, num_blocks=30, max_model_len=WINDOW + 1)
        assert longer.config.has_windows
    if not sizes:
        floor = {"kv_cache_tiers": ("host", "disk"), "kv_cache_folder": tmp_path, "num_swap_blocks": 4}
        LLM(model, num_blocks=8, max_model_len=WINDOW, **floor, **on)
        with pytest.raises(InvalidRequest, match=f"leave it out, or give a max_model_len of at most {WINDOW}, beyond"):
            LLM(model, num_blocks=8, max_model_len=WINDOW + 1, **floor, **on)
        with pytest.raises(
            InvalidRequest, match=f"leave kv_cache_tiers out, or give a max_model_len of at most {WINDOW}"
        ):
            LLM(model, num_blocks=8, num_swap_blocks=4, kv_cache_tiers=("host",), **on)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_block_takes_what_all_stages_need_for_it(model: Path, num_stages: int) -> None:
    """Each stage has room for as many layers as its largest group has there."""
    loaded = LoadedModel.load(model, "reference")
    if num_stages > loaded.config.num_hidden_layers:
        return
    llm = LLM(loaded, num_blocks=9, pipeline_parallel_size=num_stages)
    runner: Any = llm.engine.runner
    stages = [stage[0] for stage in runner.stages] if num_stages > 1 else [runner]
    needed = sum(stage.kv_cache.block_bytes for stage in stages)
    assert needed == loaded.block_bytes(16, pipeline_parallel_size=num_stages)


def test_norms_of_a_gemma_are_not_rounded_when_1_is_added(tmp_path: Path) -> None:
    """bfloat16 has 8 significant bits: in 1 + 1/256 + 1/1024 the last ones would be lost."""
    folder = make_small_llama(tmp_path, model_type="gemma2", head_dim=16, dtype=torch.bfloat16)
    theirs, ours = last_logits(load(folder), STEM), logits_of(LoadedModel.load(folder, "reference"), STEM)
    assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("tier", ["fast", "reference"])
def test_a_mistral_is_served_up_to_its_maximum(tmp_path: Path, tier: str) -> None:
    folder = make_small_llama(tmp_path, model_type="mistral", sliding_window=WINDOW)
    assert LLM(folder, tier=tier, device="cpu", num_blocks=30).config.max_model_len == 256
    with pytest.raises(InvalidRequest, match="max_model_len is 257; this model was made for at most 256 tokens"):
        LLM(folder, tier=tier, device="cpu", num_blocks=30, max_model_len=257)


def test_a_gemma_is_not_quantized(tmp_path: Path) -> None:
    folder = make_small_llama(tmp_path / "model", model_type="gemma2", head_dim=16)
    with pytest.raises(ModelError, match="is a Gemma"):
        quantize(folder, tmp_path / "out", Recipe("rtn", 8))


def test_what_knows_no_groups_of_layers_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_small_llama(tmp_path / "model", model_type="gemma2", head_dim=16, sliding_window=WINDOW)
    connector = SharedStorageConnector(tmp_path / "shared", max_bytes=1 << 20)
    with pytest.raises(InvalidRequest, match=r"kv_connector is given, but some of the model's layers have a window"):
        LLM(folder, tier="reference", num_blocks=30, kv_connector=connector)
    with pytest.raises(InvalidRequest, match=r"kv_cache_tiers is \('host',\), but some of the model's layers have a w"):
        LLM(folder, tier="reference", num_blocks=30, num_swap_blocks=9, kv_cache_tiers=("host",))
    config = EngineConfig(num_blocks=9, max_model_len=9, vocab_size=9, group_windows=(None, 4))
    with pytest.raises(InvalidRequest, match=r"BlockManager keeps one block table for all layers"):
        Engine(config, REFERENCE, ContentRunner(9, 0, 16, 9), memory=BlockManager)
