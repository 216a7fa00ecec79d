"""What is written is what was made: read back here, byte for byte what other tools write, and read by them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from minipaged.errors import InvalidRequest
from minipaged.models.config import ModelConfig
from minipaged.models.loading import load_config, load_weights
from minipaged.models.quantized import formats_of
from minipaged.models.quantized.format import Tensor
from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import Grouped, StoredMatrix, pack
from minipaged.models.quantized.writing import (
    LAYOUTS,
    Layout,
    as_tensors,
    check_shapes,
    matrices,
    settings_of,
    write_quantized,
)
from tests.end_to_end.small_llama import make_small_llama
from tests.models.quantized.samples import CONFIG, SAMPLES, tensors_of, write_sample


@st.composite
def made(draw: st.DrawFn) -> tuple[Recipe, Layout, Grouped]:
    """A matrix with any codes, scales and zeros, and the recipe that it could have come from."""
    layout = draw(st.sampled_from(LAYOUTS))
    bits, symmetric = draw(st.sampled_from((2, 3, 4, 8))), draw(st.booleans())
    size, groups = draw(st.sampled_from((8, 16, 32))), draw(st.integers(1, 4))
    unit = 32 if bits == 3 else 32 // bits
    num_outputs = draw(st.integers(1, 3)) * unit if layout == "gptq" else draw(st.integers(1, 40))
    if layout == "gptq" and size * groups % unit:
        groups = unit // np.gcd(size, unit)
    by_index = layout == "gptq" and draw(st.booleans())
    whole = groups == 1 and draw(st.booleans())
    recipe = Recipe("gptq", bits, -1 if whole else size, symmetric, "group" if by_index else "none")
    r = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_inputs = size * groups
    zeros = r.integers(0, 2**bits, (num_outputs, groups), np.uint8)
    zeros[r.random(zeros.shape) < 0.5] = 0  # those that borrow
    index = r.permutation(np.arange(num_inputs, dtype=np.int32) // size)
    in_order = (index == np.arange(num_inputs) // size).all()
    matrix = Grouped(
        shape=(num_outputs, num_inputs),
        rounding="float16",
        bits=bits,
        codes=pack(r.integers(0, 2**bits, (num_outputs, num_inputs), np.uint8), bits),
        scales=r.random((num_outputs, groups)).astype(np.float16),
        zeros=2 ** (bits - 1) if symmetric else zeros,
        group_size=size,
        group_index=index if by_index and not in_order else None,
    )
    return recipe, layout, matrix


@given(made())
def test_our_reader_finds_what_was_written(case: tuple[Recipe, Layout, Grouped]) -> None:
    recipe, layout, matrix = case
    written = as_tensors(matrix, layout, recipe.symmetric)
    format_ = formats_of(settings_of(recipe, layout)).of("model.layers.0.mlp.up_proj", {})
    assert format_ is not None
    parts = format_.parts(matrix.shape)
    assert written.keys() <= parts.keys()
    assert {name for name, part in parts.items() if part.required} <= written.keys()
    for name, tensor in written.items():
        assert tensor.dtype in parts[name].dtypes
        assert tensor.shape in parts[name].shapes
    found = format_.matrix(matrix.shape, {name: Tensor(each.read(), each.dtype) for name, each in written.items()})
    assert_same(found, matrix)


def assert_same(found: StoredMatrix, made: StoredMatrix) -> None:
    assert type(found) is type(made)
    for field in dataclasses.fields(made):
        ours, theirs = getattr(found, field.name), getattr(made, field.name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert ours == theirs, field.name


OF_TOOLS = {
    "ct_w4a16_g32_sym": (4, 32, True),
    "ct_w4a16_g32_asym": (4, 32, False),
    "gptq_int4_g32_sym": (4, 32, True),
    "gptq_int4_channel_sym": (4, -1, True),
    "gptq_int8_g32_sym": (8, 32, True),
    "gptq_int4_g32_sym_actorder": (4, 32, True),
    "gptq_v2_int4_g32_asym": (4, 32, False),
}
"""Samples whose layout is written here too."""


@pytest.mark.parametrize("name", OF_TOOLS)
def test_the_bytes_are_those_that_other_tools_write(name: str, tmp_path: Path) -> None:
    """llm-compressor's and GPTQModel's matrices, read and written again."""
    layout: Layout = "compressed-tensors" if name.startswith("ct") else "gptq"
    folder = write_sample(name, tmp_path)
    weights = load_weights(folder, load_config(folder))
    theirs, compared = tensors_of(name), 0
    for weight, matrix in weights.items():
        if isinstance(matrix, Grouped):
            for part, tensor in as_tensors(matrix, layout, OF_TOOLS[name][2]).items():
                expected = theirs[weight.removesuffix(".weight") + part]
                assert list(tensor.shape) == expected.shape, part
                if tensor.dtype == expected.dtype:  # scales may be in bf16 there
                    assert tensor.read().tobytes() == expected.data, part
                    compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", OF_TOOLS)
def test_the_settings_are_those_that_other_tools_write(name: str) -> None:
    """Each one that is written has their name and value; they write more, which has no bearing on the weights."""
    layout: Layout = "compressed-tensors" if name.startswith("ct") else "gptq"
    bits, size, symmetric = OF_TOOLS[name]
    order = "group" if name.endswith("actorder") else "none"
    ours = settings_of(Recipe("gptq", bits, size, symmetric, order), layout)  # type: ignore[arg-type]
    theirs = SAMPLES[name]["quantization_config"]
    for key, value in ours.items():
        if key == "config_groups":
            (group,) = theirs[key].values()
            assert all(group["weights"][name] == each for name, each in value["group_0"]["weights"].items())
            assert group["targets"] == value["group_0"]["targets"]
        elif key != "meta":
            assert theirs[key] == value, key


# --- Whole models ---------------------------------------------------------------------------------


def some_matrices(config: ModelConfig, recipe: Recipe) -> dict[str, Grouped]:
    """A random matrix in each one's place."""
    r = np.random.default_rng(0)
    found = {}
    for name, (outputs, inputs) in matrices(config).items():
        groups = inputs // recipe.size(inputs)
        zeros = r.integers(0, recipe.top + 1, (outputs, groups), np.uint8)
        found[name] = Grouped(
            shape=(outputs, inputs),
            rounding="float16",
            bits=recipe.bits,
            codes=pack(r.integers(0, recipe.top + 1, (outputs, inputs), np.uint8), recipe.bits),
            scales=(r.random((outputs, groups)) * 0.1 / 2**recipe.bits).astype(np.float16),
            zeros=2 ** (recipe.bits - 1) if recipe.symmetric else zeros,
            group_size=recipe.size(inputs),
        )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_read_back_to_the_last_bit(layout: Layout, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whatever type its other weights have, which are copied; a norm that has changed is rounded to it. Shards too."""
    source, folder = make_small_llama(tmp_path / "source", dtype=dtype, shard_size="20KB"), tmp_path / "made"
    folder.mkdir()
    config, recipe = load_config(source), Recipe(group_size=32)
    changed: dict[str, Any] = dict(some_matrices(config, recipe))
    norm = np.random.default_rng(1).standard_normal(config.hidden_size).astype(np.float32)
    changed["model.layers.1.input_layernorm.weight"] = norm
    write_quantized(source, folder, changed, recipe, layout)
    before, after = load_weights(source, config), load_weights(folder, load_config(folder))
    assert before.keys() == after.keys()
    for name, each in after.items():
        if name in changed and isinstance(each, StoredMatrix):
            assert_same(each, changed[name])
        elif name in changed:
            np.testing.assert_array_equal(each, torch.from_numpy(norm).to(dtype).float().numpy())
        else:
            np.testing.assert_array_equal(each, before[name])
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (folder, source))
    assert ours.pop("quantization_config") == settings_of(recipe, layout)
    assert ours == theirs


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, -1), (3, 32)])
def test_transformers_loads_compressed_tensors(bits: int, group_size: int, symmetric: bool, tmp_path: Path) -> None:
    """And finds the same weights."""
    source, folder = make_small_llama(tmp_path / "source"), tmp_path / "made"
    folder.mkdir()
    recipe = Recipe(bits=bits, group_size=group_size, symmetric=symmetric)
    changed = some_matrices(load_config(source), recipe)
    write_quantized(source, folder, changed, recipe, "compressed-tensors")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    found = theirs.state_dict()
    for name, matrix in changed.items():
        np.testing.assert_array_equal(found[name].float().numpy(), matrix.rows())


LLAMA = ModelConfig.from_dict(CONFIG | {"num_hidden_layers": 2})  # inputs: 128 and 320


@pytest.mark.parametrize(
    ("settings", "layout", "said"),
    [
        ({"group_size": 128}, "gptq", r"does not divide the 320 inputs of .*down_proj.*; choose 8, 16, 32, 64, or -1"),
        ({"group_size": 7}, "gptq", "does not divide the 128 inputs"),
        ({"act_order": "group"}, "compressed-tensors", "no longer supports; use act_order='static', or format"),
        ({}, "awq", "format is 'awq'; choose compressed-tensors or gptq"),
    ],
)
def test_what_cannot_be_written_is_refused(settings: dict[str, Any], layout: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check_shapes(LLAMA, Recipe(**settings), layout)
    check_shapes(LLAMA, Recipe(**settings | {"group_size": 64, "act_order": "static"}), "gptq")


def test_gptqs_words_have_to_be_full() -> None:
    """compressed-tensors fills the last one up."""
    odd = dataclasses.replace(LLAMA, intermediate_size=324)
    with pytest.raises(InvalidRequest, match=r"324 x 128 weights, which do not fill 32-bit words with 3-bit codes"):
        check_shapes(odd, Recipe(bits=3, group_size=4), "gptq")
    check_shapes(odd, Recipe(bits=3, group_size=4), "compressed-tensors")
