"""A Llama in parts computes what it computes in one piece, whatever its sizes, and however it is shared out.

Logits differ by the order of sums: in float64 by 1e-12 at most, in float32 by 1e-5, of the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minipaged.contracts import BatchRow, PromptInput, SamplingInput
from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.models.loading import load_config, load_weights
from minipaged.models.shards import cut_weights, local_config, shards_of
from minipaged.params import SamplingParams
from minipaged.reference.kv_cache import Array, KVCache
from minipaged.reference.llama import Llama
from minipaged.reference.sharded import ShardedLlama, total
from minipaged.steps import BlockMoves
from tests.models.quantized.samples import write_sample

BLOCK_SIZE, NUM_BLOCKS = 4, 12
LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 3)]


def random_model(seed: int, dtype: Any) -> tuple[ModelConfig, dict[str, Array]]:
    """SmolLM2's 9 heads and 3 KV heads, or others; sizes that no number of ranks divides; every cousin."""
    r = np.random.default_rng(seed)
    kv_heads, group = [(3, 3), (1, 4), (2, 2), (5, 1), (4, 3)][seed % 5]
    model_type = ["llama", "qwen2", "qwen3", "mistral"][seed % 4]
    config = ModelConfig.from_dict(
        {
            "model_type": model_type,
            "vocab_size": int(r.integers(11, 60)) * 2 + 1,
            "hidden_size": int(r.integers(8, 40)),
            "intermediate_size": int(r.integers(8, 40)) * 2 + 1 if seed % 3 else 512,
            "num_hidden_layers": 3,
            "num_attention_heads": kv_heads * group,
            "num_key_value_heads": kv_heads,
            "head_dim": int(r.choice([2, 4, 8])),
            "sliding_window": None,
            "tie_word_embeddings": seed % 2 == 0,
            **({"attention_bias": True, "mlp_bias": True} if seed % 4 == 0 else {}),
        }
    )
    weights = {
        name: (r.uniform(0.5, 1.5, shape) if "norm" in name else r.normal(0, 1 / np.sqrt(shape[-1]), shape))
        for name, shape in weight_shapes(config).items()
    }
    return config, {name: values.astype(dtype) for name, values in weights.items()}


def llama_of(config: ModelConfig, weights: dict[str, Array], dtype: Any, kv_cache_dtype: str = "auto") -> Llama:
    sizes = (NUM_BLOCKS, BLOCK_SIZE, config.num_key_value_heads, config.head_dim, NUM_BLOCKS)
    return Llama(config, weights, KVCache(config.num_hidden_layers, *sizes, dtype, kv_cache_dtype))


def sharded(
    config: ModelConfig, weights: dict[str, Array], dtype: Any, layout: tuple[int, int], kv_cache_dtype: str = "auto"
) -> ShardedLlama:
    shards = shards_of(config, *layout)
    stages = [
        [
            llama_of(local_config(config, shard), cut_weights(config, shard, weights), dtype, kv_cache_dtype)
            for shard in ranks
        ]
        for ranks in shards
    ]
    return ShardedLlama(config, shards, stages)


def row(tokens: Sequence[int], start: int, blocks: Sequence[int], num_prompt_logits: int = 0) -> BatchRow:
    return BatchRow(list(tokens), start, blocks, wants_logits=True, num_prompt_logits=num_prompt_logits)


def logits_of(llama: Llama, vocab_size: int, seed: int) -> Array:
    """Of a prompt in two chunks beside another one, and of decoding, after swapping, poisoning and copying blocks."""
    r = np.random.default_rng(seed)
    first, second = (r.integers(vocab_size, size=size).tolist() for size in (11, 6))
    found = [llama.forward([row(first[:6], 0, [7, 2])])]
    found.append(llama.forward([row(first[6:10], 6, [7, 2, 5]), row(second[:5], 0, [0, 9])]))
    llama.move(BlockMoves(swap_out=((7, 3), (2, 1)), poison=(7, 2), swap_in=(), copy=()))
    llama.move(BlockMoves(swap_out=(), poison=(), swap_in=((3, 11), (1, 10)), copy=((9, 4),)))
    found.append(llama.forward([row(first[10:], 10, [11, 10, 5]), row(second[5:], 5, [0, 4])]))
    return np.concatenate(found)


@pytest.mark.parametrize(("dtype", "within"), [(np.float64, 1e-12), (np.float32, 1e-5)])
@pytest.mark.parametrize("seed", range(20))
def test_logits_are_those_of_the_llama_in_one_piece(seed: int, dtype: Any, within: float) -> None:
    config, weights = random_model(seed, dtype)
    expected = logits_of(llama_of(config, weights, dtype), config.vocab_size, seed)
    assert np.isfinite(expected).all()
    for layout in LAYOUTS:
        if layout[0] <= config.num_attention_heads:
            found = logits_of(sharded(config, weights, dtype, layout), config.vocab_size, seed)
            assert found.dtype == dtype
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() <= within * np.abs(expected).max(), layout


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_keys_and_values_in_8_bits_have_the_scales_that_they_have_in_one_piece(kv_cache_dtype: str) -> None:
    """In float64 no key is so near to the border of a code that rounding would move it."""
    config, weights = random_model(0, np.float64)
    expected = logits_of(llama_of(config, weights, np.float64, kv_cache_dtype), config.vocab_size, 0)
    found = logits_of(sharded(config, weights, np.float64, (4, 2), kv_cache_dtype), config.vocab_size, 0)
    assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize(
    "name",
    [
        "gptq_int4_g32_sym_actorder",
        "awq_int4_g32",
        "ct_w8a8_int8_static",
        "bnb_nf4",
        "fp8_block64",
        "ct_int8_kv_tensor",
    ],
)
def test_ranks_compute_with_the_packed_weights_that_they_read(name: str, tmp_path: Path) -> None:
    folder = write_sample(name, tmp_path)
    config = load_config(folder)
    expected = logits_of(llama_of(config, load_weights(folder, config), np.float32), config.vocab_size, 0)
    for layout in ((2, 1), (4, config.num_hidden_layers)):
        shards = shards_of(config, *layout)
        read = [[load_weights(folder, config, shard=shard) for shard in ranks] for ranks in shards]
        stages = [
            [llama_of(local_config(config, shard), weights, np.float32) for shard, weights in zip(*ranks, strict=True)]
            for ranks in zip(shards, read, strict=True)
        ]
        found = logits_of(ShardedLlama(config, shards, stages), config.vocab_size, 0)
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max(), layout


def test_each_rank_keeps_its_own_kv_heads_in_the_same_blocks() -> None:
    config, weights = random_model(0, np.float64)
    whole, parts = llama_of(config, weights, np.float64), sharded(config, weights, np.float64, (2, 3))
    for llama in (whole, parts):
        logits_of(llama, config.vocab_size, 1)
    for shards, ranks in zip(parts.shards, parts.stages, strict=True):
        for shard, rank in zip(shards, ranks, strict=True):
            part = np.s_[:, shard.layers.start : shard.layers.stop, :, :, shard.kv_heads.start : shard.kv_heads.stop]
            np.testing.assert_allclose(rank.kv_cache.device_blocks, whole.kv_cache.device_blocks[part], atol=1e-12)
            np.testing.assert_allclose(rank.kv_cache.host_blocks, whole.kv_cache.host_blocks[part], atol=1e-12)


def test_prompts_are_told_and_tokens_chosen_by_all_logits() -> None:
    config, weights = random_model(3, np.float64)
    prompt = [1, 5, config.vocab_size - 1, 0, 7, 3]
    told, chosen = [], []
    for llama in (llama_of(config, weights, np.float64), sharded(config, weights, np.float64, (3, 2))):
        logits = llama.forward([row(prompt, 0, [3, 1], num_prompt_logits=5)])
        told.append(llama.prompt_logprobs([PromptInput(0, prompt[1:], 3)])[0])
        inputs = [SamplingInput(0, SamplingParams(seed=1, logprobs=4), prompt, [], seed, 0) for seed in range(9)]
        chosen.append(llama.sample(logits, inputs))
    for ours, theirs in (told, chosen):
        assert [each.token_id for each in ours] == [each.token_id for each in theirs]
        assert [[*(each.top_logprobs or ())] for each in ours] == [[*(each.top_logprobs or ())] for each in theirs]
        assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-12)
    assert len({each.token_id for each in chosen[0]}) > 3
    assert len(told[0]) == 5


def test_a_swapped_block_is_a_copy_on_each_rank() -> None:
    config, weights = random_model(0, np.float32)
    one, all_ranks = llama_of(config, weights, np.float32).costs(), sharded(config, weights, np.float32, (4, 3)).costs()
    assert (one.copies_per_block, all_ranks.copies_per_block) == (1, 12)
    assert all_ranks.block_bytes == one.block_bytes * 4 // 3  # one of three KV heads is there twice
    assert all_ranks.prefill_tokens_per_second > 0


def test_the_sum_is_in_the_order_of_the_ranks() -> None:
    parts = [np.array([1.0]), np.array([2.0**-53]), np.array([2.0**-53])]
    assert total(parts) == 1
    assert total(parts[::-1]) > 1


def test_blocks_of_several_ranks_are_not_handed_over() -> None:
    """Those of the first would be taken for all of them."""
    parts = sharded(*random_model(0, np.float64), np.float64, (2, 1))
    with pytest.raises(NotImplementedError, match="each rank has a part of every block"):
        parts.read_blocks([0])
    with pytest.raises(NotImplementedError, match="each rank has a part of every block"):
        parts.move(BlockMoves(load=((0, b""),)))
