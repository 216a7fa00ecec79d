"""A checkpoint that is cut short, mislabelled or contradicts itself is an error that names the tensor."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minipaged.errors import ModelError
from minipaged.models.loading import load_config, load_weights
from tests.effort import examples, one_case_in
from tests.models.quantized.samples import SAMPLES, Raw, read, tensors_of, write, write_sample

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
SAME_SIZE = {"F32": "I32", "F16": "I16", "F8_E4M3": "F8_E5M2", "I64": "F64", "I32": "F32", "I8": "U8", "U8": "I8"}
"""What a tensor could be mislabelled as."""
NAN = {"F32": b"\x00\x00\xc0\x7f", "F16": b"\x00\x7e", "BF16": b"\xc0\x7f", "F8_E4M3": b"\x7f"}
QUANTIZED = [name for name in SAMPLES if name != "ct_int8_kv_tensor"]


def load(folder: Path) -> None:
    load_weights(folder, load_config(folder))


def is_optional(name: str, tensor: str) -> bool:
    """Whether the model is whole without it."""
    config = SAMPLES[name]["quantization_config"]
    part = tensor.rpartition(".")[2]
    return (
        part == "weight_shape"
        or (part == "g_idx" and not config["desc_act"])
        or (part == "qzeros" and config.get("sym", False))
        or part in ("k_scale", "v_scale")
    )


def drop(tensors: dict[str, Raw], name: str) -> str:
    del tensors[name]
    return f"'{name}' is missing"


def shorten(tensors: dict[str, Raw], name: str) -> str:
    """One row, or number, less."""
    tensor = tensors[name]
    rest = len(tensor.data) // tensor.shape[0] * (tensor.shape[0] - 1)
    tensors[name] = Raw(tensor.dtype, [tensor.shape[0] - 1, *tensor.shape[1:]], tensor.data[:rest])
    return f"'{name}'"


def turn(tensors: dict[str, Raw], name: str) -> str:
    """The same bytes, packed the other way."""
    tensor = tensors[name]
    shape = tensor.shape[::-1] if tensor.shape[::-1] != tensor.shape else [*tensor.shape, 1]
    tensors[name] = Raw(tensor.dtype, shape, tensor.data)
    return f"'{name}' has shape {tuple(shape)}"


def mislabel(tensors: dict[str, Raw], name: str) -> str:
    tensor = tensors[name]
    tensors[name] = Raw(SAME_SIZE[tensor.dtype], tensor.shape, tensor.data)
    return f"'{name}' has dtype {SAME_SIZE[tensor.dtype]}"


def spoil(tensors: dict[str, Raw], name: str) -> str:
    """The last number is none."""
    tensor = tensors[name]
    nan = NAN[tensor.dtype]
    tensors[name] = Raw(tensor.dtype, tensor.shape, tensor.data[: -len(nan)] + nan)
    return f"'{name}'"


DAMAGES: list[Callable[[dict[str, Raw], str], str]] = [drop, shorten, turn, mislabel, spoil]


@one_case_in(4)
@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_wrong_with_a_tensor_is_told_by_its_name(name: str, tmp_path: Path, data: st.DataObject) -> None:
    folder = write_sample(name, tmp_path)
    tensors = read(folder / "model.safetensors")
    own = tensors_of(name)
    tensor = data.draw(st.sampled_from(sorted(own)), label="tensor")
    damage = data.draw(st.sampled_from(DAMAGES), label="damage")
    dtype = tensors[tensor].dtype
    is_dense = dtype in ("F16", "BF16") and tensor.endswith(".weight")
    if (damage is spoil and (dtype not in NAN or is_dense)) or (damage is mislabel and dtype not in SAME_SIZE):
        return
    if damage is turn and ("quant_state" in tensor or tensors[tensor].shape == [1]):
        return  # a text, and one number, may have any shape
    expected = damage(tensors, tensor)
    write(folder / "model.safetensors", tensors)
    if damage is drop and is_optional(name, tensor):
        load(folder)
        return
    with pytest.raises(ModelError) as raised:
        load(folder)
    assert expected in str(raised.value)


@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere_is_named(name: str, tmp_path: Path, data: st.DataObject) -> None:
    path = write_sample(name, tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1), label="bytes left")])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(tmp_path)


def change(folder: Path, name: str, values: np.ndarray) -> None:
    """Put other values into a tensor."""
    tensors = read(folder / "model.safetensors")
    tensors[name].data = np.ascontiguousarray(values).tobytes()
    write(folder / "model.safetensors", tensors)


K_PROJ = "model.layers.0.self_attn.k_proj"


TOOLS = {
    "gptq_int4_g32_sym_actorder": r"\.g_idx' has a name that GPTQ gives",
    "awq_int4_g32": r"\.qweight' has a name that GPTQ or AWQ gives",
    "ct_w4a16_g32_sym": r"\.weight_packed' has a name that compressed-tensors gives",
    "ct_w8a8_int8_dynamic": r"\.weight_scale' has a name that FP8 or compressed-tensors gives",
    "fp8_block64": r"\.weight_scale_inv' has a name that FP8",
    "bnb_nf4": r"\.weight\.absmax' has a name that bitsandbytes gives",
}


@pytest.mark.parametrize(("name", "tool"), TOOLS.items())
def test_quantized_weights_whose_config_says_nothing_of_it_are_told_by_their_tool(
    name: str, tool: str, tmp_path: Path
) -> None:
    folder = write_sample(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"{tool}.*quantization_config that says how is missing in config.json; take"):
        load(folder)


def test_groups_that_are_not_there_are_told(tmp_path: Path) -> None:
    folder = write_sample("gptq_int4_g32_sym_actorder", tmp_path)
    change(folder, f"{K_PROJ}.g_idx", np.full(128, 4, "<i4"))
    with pytest.raises(ModelError, match=rf"'{K_PROJ}\.g_idx' names groups from 4 to 4; there are 0 to 3"):
        load(folder)


def test_a_shape_that_contradicts_itself_is_told(tmp_path: Path) -> None:
    folder = write_sample("ct_w4a16_g32_sym", tmp_path)
    change(folder, f"{K_PROJ}.weight_shape", np.array([64, 127], "<i8"))
    with pytest.raises(ModelError, match=rf"'{K_PROJ}\.weight_shape' reads \[64, 127\]; expected \[64, 128\]"):
        load(folder)


def test_a_bias_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    """AutoGPTQ writes zeros where there is none."""
    folder = write_sample("gptq_int4_g32_asym", tmp_path)
    tensors = read(folder / "model.safetensors")
    tensors[f"{K_PROJ}.bias"] = Raw("F16", [64], bytes(128))
    write(folder / "model.safetensors", tensors)
    load(folder)
    change(folder, f"{K_PROJ}.bias", np.ones(64, "<f2"))
    with pytest.raises(ModelError, match=rf"'{K_PROJ}\.bias' is not zero; use a model without biases"):
        load(folder)


def test_scales_of_zero_that_are_divided_by_are_told(tmp_path: Path) -> None:
    folder = write_sample("ct_nvfp4a16", tmp_path)
    change(folder, f"{K_PROJ}.weight_global_scale", np.zeros(1, "<f4"))
    with pytest.raises(ModelError, match=rf"'{K_PROJ}\.weight_global_scale' is 0.0; expected a positive number"):
        load(folder)


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b'{"shape": [64, 128], "blocksize": 32, "dtype": "float32"}'])
def test_a_quant_state_that_is_none_is_told(tmp_path: Path, text: bytes) -> None:
    folder = write_sample("bnb_nf4", tmp_path)
    name = f"{K_PROJ}.weight.quant_state.bitsandbytes__nf4"
    tensors = read(folder / "model.safetensors")
    tensors[name] = Raw("U8", [len(text)], text)
    write(folder / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load(folder)


ATTENTION = "model.layers.0.self_attn"
KV_NAMES = [
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale",),
]


@pytest.mark.parametrize("names", KV_NAMES, ids=str)
def test_scales_for_keys_and_values_come_with_the_weights(names: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_sample("ct_fp8_kv_tensor", tmp_path)
    tensors = read(folder / "model.safetensors")
    scales = [tensors.pop(f"{ATTENTION}.{part}_scale") for part in "kv"]
    tensors |= {f"{ATTENTION}.{name}": scale for name, scale in zip(names, scales, strict=False)}
    write(folder / "model.safetensors", tensors)
    weights = load_weights(folder, load_config(folder))
    for part, expected in zip("kv", scales if len(names) == 2 else [scales[0]] * 2, strict=True):
        scale = weights[f"{ATTENTION}.{part}_scale"]
        assert scale.dtype == np.float32
        np.testing.assert_array_equal(scale, np.frombuffer(expected.data, "<f2"))
        assert scale > 0


@pytest.mark.parametrize(
    "values", [np.zeros(1, "<f2"), np.ones(3, "<f2"), np.full(2, np.nan, "<f2"), np.ones(1, "<i2")]
)
def test_scales_for_keys_and_values_that_cannot_be_are_told(values: np.ndarray, tmp_path: Path) -> None:
    folder = write_sample("ct_fp8_kv_tensor", tmp_path)
    tensors = read(folder / "model.safetensors")
    dtype = "F16" if values.dtype == np.float16 else "I16"
    tensors[f"{ATTENTION}.k_scale"] = Raw(dtype, [len(values)], values.tobytes())
    write(folder / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.self_attn\.k_scale'"):
        load(folder)


def test_a_quantized_head_is_not_taken_for_one_that_is_tied(tmp_path: Path) -> None:
    folder = write_sample("gptq_int4_g32_asym", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    load(folder)
    tensors = read(folder / "model.safetensors")
    tensors["lm_head.qweight"] = tensors.pop("lm_head.weight")
    write(folder / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=r"'lm_head\.qweight' has no place"):
        load(folder)


# --- What is not read -----------------------------------------------------------------------------

CT = "ct_w4a16_g32_sym"


def group(**changes: Any) -> dict[str, Any]:
    """The sample's only group, with other settings."""
    (plain,) = SAMPLES[CT]["quantization_config"]["config_groups"].values()
    return {"config_groups": {"group_0": plain | changes}}


REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "planar GPTQ": ("gptq_int4_g32_sym", {"checkpoint_format": "gptq_p"}, ["'gptq_p'", "gptq_v2"]),
    "Marlin": ("gptq_int4_g32_sym", {"checkpoint_format": "marlin"}, ["'marlin'"]),
    "5 bits": ("gptq_int4_g32_sym", {"bits": 5}, ["bits = 5", "2, 3, 4, 8"]),
    "no bits": ("gptq_int4_g32_sym", {"bits": None}, ["bits = None"]),
    "words of 16 bits": ("gptq_int4_g32_sym", {"pack_dtype": "int16"}, ["pack_dtype", "'int16'"]),
    "groups of nothing": ("gptq_int4_g32_sym", {"group_size": 0}, ["group_size = 0"]),
    "zeros of 3 bits by nobody": (
        "gptq_int4_g32_sym",
        {"bits": 3, "sym": False, "meta": None},
        ["AutoGPTQ", "gptq_v2"],
    ),
    "AWQ for single tokens": ("awq_int4_g32", {"version": "gemv"}, ["'gemv'", "'gemm'"]),
    "AWQ, another order": ("awq_int4_g32", {"version": "GEMV_FAST"}, ["'gemv_fast'"]),
    "llm-awq": ("awq_int4_g32", {"backend": "llm-awq"}, ["'llm-awq'", "'gemm'"]),
    "AWQ of 8 bits": ("awq_int4_g32", {"bits": 8}, ["bits = 8"]),
    "LLM.int8()": ("bnb_nf4", {"load_in_8bit": True, "load_in_4bit": False}, ["LLM.int8()", "NF4"]),
    "FP8 with more exponent": ("fp8_block64", {"fmt": "e5m2"}, ["'e5m2'"]),
    "half a block": ("fp8_block64", {"weight_block_size": [64]}, ["weight_block_size = [64]"]),
    "sparse": (CT, {"format": "marlin-24"} | group(format=None), ["'marlin-24'", "'pack-quantized'"]),
    "sparsity": (CT, {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config"]),
    "rotations": (CT, {"transform_config": {"config_groups": {"a": 1}}}, ["transform_config"]),
    "outputs": (CT, group(output_activations={"num_bits": 8}), ["outputs"]),
    "inputs of 4 bits": (CT, group(input_activations={"num_bits": 4, "type": "float"}), ["num_bits = 4"]),
    "a scale for a whole batch": (
        CT,
        group(input_activations={"num_bits": 8, "type": "int", "dynamic": True, "strategy": "tensor"}),
        ["strategy = 'tensor'", "'token'"],
    ),
    "inputs alone": (CT, group(weights=None, input_activations={"num_bits": 8}), ["quantizes no weights"]),
    "a KV cache in 4 bits": (CT, {"kv_cache_scheme": {"num_bits": 4, "strategy": "tensor"}}, ["num_bits = 4"]),
    "no list": (CT, {"ignore": "lm_head"}, ["ignore = 'lm_head'"]),
    "torchao": (CT, {"quant_method": "torchao"}, ["'torchao'", "GPTQ", ".gguf", "original"]),
    "modelopt": (CT, {"quant_method": "modelopt"}, ["'modelopt'"]),
    "HQQ": (CT, {"quant_method": "hqq"}, ["'hqq'"]),
    "no method": (CT, {"quant_method": None}, ["quant_method = None"]),
    "a method that is none": (CT, {"quant_method": ["gptq"]}, ["['gptq']"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name_before_anything_is_read(case: str, tmp_path: Path) -> None:
    name, changes, words = REFUSED[case]
    folder = write_sample(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as raised:
        load_config(folder)
    assert all(word in str(raised.value) for word in ("quantization_config", str(folder), *words)), raised.value


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values within."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*way, key)
        yield from places(value[key], (*way, key))


VALUES = st.sampled_from(
    [None, True, -1, 0, 3, 8, 1.5, "", "(", "re:(", "group", [], ["re:("], [1, 2], {}, {"(": 1}, {"a": {}}]
)


@one_case_in(4)
@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_config_with_any_other_value_is_read_or_a_model_error(name: str, tmp_path: Path, data: st.DataObject) -> None:
    folder = write_sample(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    settings = config["quantization_config"]
    *way, last = data.draw(st.sampled_from(list(places(settings))), label="place")
    for key in way:
        settings = settings[key]
    settings[last] = data.draw(VALUES, label="value")
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(ModelError):
        load(folder)


@pytest.mark.parametrize(
    ("name", "file"), [("gptq_int4_g32_asym", "quantize_config"), ("awq_int4_g32", "quant_config")]
)
def test_older_files_beside_the_config_are_read(name: str, file: str, tmp_path: Path) -> None:
    folder = write_sample(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    if name.startswith("awq"):
        settings = {"w_bit": settings["bits"], "q_group_size": settings["group_size"], "version": "GEMM"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is missing"):
        load(folder)
    (folder / f"{file}.json").write_text(json.dumps(settings))
    load(folder)
