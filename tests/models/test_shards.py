"""Each rank has its part of a model: together all of it, each number once, and a whole number of query heads for a KV
head. What a rank reads from a checkpoint is what would be cut out of the whole, and no byte more."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from minipaged.errors import InvalidRequest, ModelError
from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.models.gguf import convert
from minipaged.models.loading import load_config, load_weights, static_scales
from minipaged.models.quantized.stored import StoredMatrix
from minipaged.models.shards import (
    cut,
    cut_weights,
    local_config,
    local_name,
    shard_of,
    shards_of,
)
from tests.models.quantized.samples import SAMPLES, write_sample

MakeLlama = Callable[..., PreTrainedModel]


@st.composite
def shared_out(draw: st.DrawFn) -> tuple[ModelConfig, int, int]:
    """A model of any shape, and as many ranks and stages as it may have."""
    kv_heads, group, layers = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 7))
    size = draw(st.integers(1, kv_heads * group))
    biases = draw(st.booleans())
    config = ModelConfig(
        vocab_size=draw(st.integers(size, 90)),
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=draw(st.integers(size, 90) | st.integers(1, 40).map((32).__mul__).filter(size.__le__)),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=64,
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=None,
        eos_token_ids=(),
        qkv_bias=biases,
        o_bias=biases,
        mlp_bias=biases,
        qk_norm=draw(st.booleans()),
    )
    return config, size, draw(st.integers(1, layers))


def numbers(ranges: list[range]) -> list[int]:
    return [number for each in ranges for number in each]


@given(case=shared_out())
def test_ranks_have_everything_once_in_order_and_as_evenly_as_can_be(case: tuple[ModelConfig, int, int]) -> None:
    config, size, num_stages = case
    stages = shards_of(config, size, num_stages)
    assert [len(ranks) for ranks in stages] == [size] * num_stages
    assert numbers([ranks[0].layers for ranks in stages]) == [*range(config.num_hidden_layers)]
    lengths = {"layers": [len(ranks[0].layers) for ranks in stages]}
    for stage, ranks in enumerate(stages):
        assert [(shard.stage, shard.rank) for shard in ranks] == [(stage, rank) for rank in range(size)]
        assert {shard.layers for shard in ranks} == {ranks[0].layers}
        assert [shard.is_first for shard in ranks] == [stage == 0] * size
        assert [shard.is_last for shard in ranks] == [stage == num_stages - 1] * size
        for part, count in (("heads", config.num_attention_heads), ("vocab", config.vocab_size)):
            assert numbers([getattr(shard, part) for shard in ranks]) == [*range(count)]
        assert numbers([shard.intermediate for shard in ranks]) == [*range(config.intermediate_size)]
        lengths["vocab"] = [len(shard.vocab) for shard in ranks]
        lengths["intermediate"] = [len(shard.intermediate) for shard in ranks]
        lengths["kv_heads"] = [len(shard.kv_heads) for shard in ranks]
    columns = lengths.pop("intermediate")
    assert max(columns) - min(columns) in (0, run := math.gcd(*columns))
    longest = math.gcd(config.intermediate_size, 128)
    assert run >= longest or config.intermediate_size < 2 * run * size, "runs twice as long would do"
    assert columns == sorted(columns, reverse=True)
    for part, found in lengths.items():
        assert min(found) > 0
        assert max(found) - min(found) <= 1, part
        assert found == sorted(found, reverse=True), "the first ones have more"


@given(case=shared_out())
def test_a_rank_has_a_whole_number_of_query_heads_for_each_of_its_kv_heads(case: tuple[ModelConfig, int, int]) -> None:
    config, size, _ = case
    ranks = [shard_of(config, rank, size) for rank in range(size)]
    whole_group = config.num_attention_heads // config.num_key_value_heads
    for shard in ranks:
        group, rest = divmod(len(shard.heads), len(shard.kv_heads))
        assert rest == 0
        for i, head in enumerate(shard.heads):  # the KV head that it takes there is the one that it takes in the whole
            assert shard.kv_heads[i // group] == head // whole_group
    holders = Counter(numbers([shard.kv_heads for shard in ranks]))
    assert holders.keys() == {*range(config.num_key_value_heads)}
    if size <= config.num_key_value_heads:
        assert {*holders.values()} == {1}
    else:
        assert {len(shard.kv_heads) for shard in ranks} == {1}
        assert max(holders.values()) - min(holders.values()) <= 1
        heads = [len(shard.heads) for shard in ranks]
        for kv_head in holders:
            of_one = [count for count, shard in zip(heads, ranks, strict=True) if kv_head in shard.kv_heads]
            assert max(of_one) - min(of_one) <= 1


@settings(max_examples=40)
@given(case=shared_out())
def test_every_weight_is_somebodys_and_has_the_shape_that_a_model_of_its_own_would_have(
    case: tuple[ModelConfig, int, int],
) -> None:
    """Each number once in its stage; but norms, which all ranks have, and K and V of a KV head that several have."""
    config, size, num_stages = case
    stages = shards_of(config, size, num_stages)
    names = weight_shapes(config)
    held = {name: np.zeros((num_stages, *shape), int) for name, shape in names.items()}
    for shard in (shard for ranks in stages for shard in ranks):
        own = local_config(config, shard)
        expected, found = weight_shapes(own), {}
        for name, shape in names.items():
            if (part := cut(config, shard, name)) is not None:
                held[name][shard.stage][part] += 1
                found[local_name(shard, name)] = np.empty(shape)[part].shape
        for name in expected.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
            expected[name] = (len(shard.vocab), config.hidden_size)
        for name, shape in found.items():
            assert expected.pop(name) == shape, name
        for name in expected:  # what is another's
            if name.endswith(("o_proj.bias", "down_proj.bias")):
                assert shard.rank > 0
            else:
                assert name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
                assert not (shard.is_first and shard.is_last)
    shared = size > config.num_key_value_heads
    for name, counts in held.items():
        own_stages = {stage for stage in range(num_stages) if counts[stage].any()}
        if "norm" in name:
            assert {*counts[[*own_stages]].flat} == {size}, name
        elif shared and ("k_proj" in name or "v_proj" in name):
            assert counts[[*own_stages]].min() >= 1
        else:
            assert {*counts[[*own_stages]].flat} == {1}, name
        if ".layers." in name:
            (stage,) = own_stages
            assert int(name.split(".")[2]) in stages[stage][0].layers
        elif "embed" in name:
            assert own_stages == {0, num_stages - 1} if config.tie_word_embeddings else {0}
        else:
            assert own_stages == {num_stages - 1}


def small_config(**changes: Any) -> ModelConfig:
    written = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 4,
    }
    return ModelConfig.from_dict(written | changes)


def test_smollm2s_heads_are_dealt_to_four_ranks() -> None:
    ranks = [shard_of(small_config(intermediate_size=1536, vocab_size=49152), rank, 4) for rank in range(4)]
    assert [shard.heads for shard in ranks] == [range(2), range(2, 3), range(3, 6), range(6, 9)]
    assert [shard.kv_heads for shard in ranks] == [range(1), range(1), range(1, 2), range(2, 3)]
    assert [len(shard.intermediate) for shard in ranks] == [384] * 4


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, (10, 1), r"tensor_parallel_size is 10, but the model has num_attention_heads = 9, .*; use 9 or fewer"),
        ({"intermediate_size": 5}, (6, 1), r"tensor_parallel_size is 6, .* intermediate_size = 5, .*; use 5 or fewer"),
        ({"vocab_size": 3}, (4, 1), r"tensor_parallel_size is 4, .* vocab_size = 3, .*; use 3 or fewer"),
        ({}, (1, 5), r"pipeline_parallel_size is 5, but .* num_hidden_layers = 4, .*; use 4 or fewer"),
    ],
)
def test_a_rank_without_a_part_is_refused(changes: dict[str, int], sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}$"):
        shards_of(small_config(**changes), *sizes)
    shards_of(small_config(**changes), *(size - 1 or 1 for size in sizes))


# --- Reading a part -------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "intermediate_size": 97, "vocab_size": 101},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
}
LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 3)]


def written(make: MakeLlama, folder: Path, dtype: torch.dtype = torch.float32, **shape: Any) -> Path:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3} | shape
    make(**sizes).to(dtype).save_pretrained(folder, max_shard_size="40KB")
    return folder


def check_reading(folder: Path) -> None:
    """What each rank reads is cut out of the whole."""
    config = load_config(folder)
    whole = load_weights(folder, config)
    for size, num_stages in LAYOUTS:
        for shard in (shard for ranks in shards_of(config, size, num_stages) for shard in ranks):
            check_equal(load_weights(folder, config, shard=shard), cut_weights(config, shard, whole))


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        if isinstance(values, StoredMatrix):
            assert dataclasses.replace(values).nbytes == expected[name].nbytes, name
            np.testing.assert_array_equal(values.rows(), expected[name].rows(), err_msg=name)
        else:
            assert values.dtype == np.float32
            np.testing.assert_array_equal(values, expected[name], err_msg=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_reads_what_is_cut_out_of_the_whole(shape: str, tiny_llama: MakeLlama, tmp_path: Path) -> None:
    folder = written(tiny_llama, tmp_path, **SHAPES[shape])
    assert len([*folder.glob("*.safetensors")]) > 3
    check_reading(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rank_reads_its_part_in_any_dtype(dtype: torch.dtype, tiny_llama: MakeLlama, tmp_path: Path) -> None:
    check_reading(written(tiny_llama, tmp_path, dtype))


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar: by this process, from files or their cache


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts by /proc")
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_rank_reads_no_other_ranks_bytes(num_stages: int, tiny_llama: MakeLlama, tmp_path: Path) -> None:
    """But for headers and configs, and the end of what is read at once from a file: a page for each run of bytes."""
    model = tiny_llama(hidden_size=256, intermediate_size=2048, vocab_size=4096, num_attention_heads=8)
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    for ranks in shards_of(config, 4, num_stages):
        for shard in ranks:
            before = bytes_read()
            weights = load_weights(tmp_path, config, shard=shard)
            read = bytes_read() - before
            needed = sum(values.nbytes for values in weights.values())
            assert needed < size / (3 if num_stages == 1 else 4)
            assert needed <= read < needed + 4096 * len(weights) + 20_000


def test_progress_counts_the_ranks_weights(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    config = load_config(written(tiny_llama, tmp_path))
    seen: list[tuple[int, int]] = []
    shard = shard_of(config, 1, 2, stage=1, num_stages=2)
    weights = load_weights(tmp_path, config, progress=lambda *done: seen.append(done), shard=shard)
    assert seen == [(i + 1, len(weights)) for i in range(len(weights))]


def test_a_tensor_that_is_missing_is_missed_by_every_rank(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    config = load_config(written(tiny_llama, tmp_path, num_hidden_layers=2))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    config = dataclasses.replace(config, num_hidden_layers=3)
    assert index["weight_map"]
    for ranks in shards_of(config, 1, 3):
        with pytest.raises(ModelError, match=r"'model\.layers\.2\..*' is missing \(9 of 30 are\)"):
            load_weights(tmp_path, config, shard=ranks[0])


# --- What is quantized ----------------------------------------------------------------------------

ALL = {2, 3, 4}
REFUSED = {
    "ct_fp8_dynamic": ALL,
    "ct_fp8_kv_tensor": ALL,
    "ct_w8a8_int8_dynamic": ALL,
    "fp8_block128_partly": ALL,
    "ct_fp8_block": {2, 4},  # of three ranks each has whole groups
}
"""For so many ranks: inputs of one token, on several ranks, would share a scale that is found anew each time."""


@pytest.mark.parametrize("name", SAMPLES)
def test_a_quantized_matrix_that_is_cut_has_the_same_weights(name: str, tmp_path: Path) -> None:
    """Groups that are cut, too, and GPTQ's act-order."""
    folder = write_sample(name, tmp_path)
    config = load_config(folder)
    stored = load_weights(folder, config)
    whole = {name: weight.rows() if isinstance(weight, StoredMatrix) else weight for name, weight in stored.items()}
    for shard in (shard_of(config, rank, size) for size in ALL for rank in range(size)):
        if shard.size in REFUSED.get(name, ()):
            continue
        found, expected = load_weights(folder, config, shard=shard), cut_weights(config, shard, whole)
        assert found.keys() == expected.keys()
        for key, weight in found.items():
            values = weight.rows() if isinstance(weight, StoredMatrix) else weight
            np.testing.assert_array_equal(values, expected[key], err_msg=key)
            if isinstance(weight, StoredMatrix):
                assert values.shape == weight.shape
                assert weight.codes.size / values.size == stored[key].codes.size / whole[key].size  # type: ignore[attr-defined]
                assert all(part.base is None for part in arrays_of(weight)), "it keeps the whole in memory"


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_share_a_scale_found_anew_for_each_token_are_not_parted(name: str, tmp_path: Path) -> None:
    folder = write_sample(name, tmp_path)
    config = load_config(folder)
    for size in REFUSED[name]:
        shards = [shard_of(config, rank, size) for rank in range(size)]
        with pytest.raises(
            ModelError, match=r"'model\.layers\.0\..*(o|down)_proj\.weight' cannot be cut .*; use another"
        ):
            [load_weights(folder, config, shard=shard) for shard in shards]


def arrays_of(matrix: StoredMatrix) -> list[np.ndarray]:
    values = (getattr(matrix, field.name) for field in dataclasses.fields(matrix))
    return [value for value in values if isinstance(value, np.ndarray)]


def test_the_blocks_of_a_gguf_file_are_cut_too(
    tiny_llama: MakeLlama, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """It is converted as a whole, once; ranks read the folder that it became. Its embedding is packed as well."""
    convert(write_gguf(tiny_llama(), quantization=GGMLQuantizationType.Q8_0), tmp_path / "converted")
    config = load_config(tmp_path / "converted")
    stored = load_weights(tmp_path / "converted", config)
    whole = {name: weight.rows() if isinstance(weight, StoredMatrix) else weight for name, weight in stored.items()}
    assert isinstance(stored["model.embed_tokens.weight"], StoredMatrix)
    for shard in (shard_of(config, rank, size) for size in ALL for rank in range(size)):
        found = load_weights(tmp_path / "converted", config, shard=shard)
        expected = cut_weights(config, shard, whole)
        assert found.keys() == expected.keys()
        for key, weight in found.items():
            values = weight.rows() if isinstance(weight, StoredMatrix) else weight
            np.testing.assert_array_equal(values, expected[key], err_msg=key)


def test_stages_share_out_what_ranks_cannot(tmp_path: Path) -> None:
    folder = write_sample("ct_fp8_kv_tensor", tmp_path)
    config = load_config(folder)
    whole = load_weights(folder, config)
    for stage in range(2):
        shard = shard_of(config, 0, 1, stage, num_stages=2)
        own, weights = local_config(config, shard), load_weights(folder, config, shard=shard)
        name = "model.layers.{}.self_attn.o_proj.weight"
        np.testing.assert_array_equal(weights[name.format(0)].rows(), whole[name.format(stage)].rows())
        np.testing.assert_array_equal(static_scales(own, weights), static_scales(config, whole)[stage : stage + 1])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_scales_for_each_kv_head_go_where_the_head_goes(size: int) -> None:
    config = dataclasses.replace(small_config(), num_attention_heads=8, num_key_value_heads=2)
    names = [f"model.layers.{i}.self_attn.{part}_scale" for i in range(4) for part in "kv"]
    of_each = {name: np.array([2 * i, 2 * i + 1], np.float32) for i, name in enumerate(names)}
    of_all = {name: each[:1] for name, each in of_each.items()}
    for shard in (shard_of(config, rank, size) for rank in range(size)):
        own = local_config(config, shard)
        found = static_scales(own, cut_weights(config, shard, of_each))  # [layers, 2, kv_heads]
        heads = slice(shard.kv_heads.start, shard.kv_heads.stop)
        np.testing.assert_array_equal(found, static_scales(config, of_each)[:, :, heads])
        found = static_scales(own, cut_weights(config, shard, of_all))
        np.testing.assert_array_equal(found, static_scales(config, of_all)[:, :, heads])
