"""A GGUF file becomes the checkpoint it was made from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from minipaged.errors import ModelError
from minipaged.models.config import RopeScaling
from minipaged.models.gguf import convert
from minipaged.models.loading import load_config, load_weights
from minipaged.models.quantized.stored import StoredMatrix
from minipaged.models.tokenizer import Tokenizer
from tests.effort import examples, thorough
from tests.end_to_end import yardstick

MakeLlama = Callable[..., LlamaForCausalLM]
WriteGGUF = Callable[..., Path]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def load(folder: Path) -> dict[str, np.ndarray]:
    return load_weights(folder, load_config(folder))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
        {"num_attention_heads": 2, "num_key_value_heads": 2},
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "qwen3", "head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    ],
)
def test_converting_gives_the_weights_that_went_in(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, shape: dict[str, Any]
) -> None:
    model = tiny_llama(**shape)
    convert(write_gguf(model), tmp_path / "out")
    weights = load(tmp_path / "out")
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert weights.keys() == expected.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(values, expected[name].numpy(), err_msg=name)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 128},
        {"model_type": "gemma2", "head_dim": 16, "tie_word_embeddings": True},
        {"model_type": "gemma3_text", "head_dim": 16, "tie_word_embeddings": True},
    ],
)
def test_the_weights_are_those_that_transformers_reads_from_the_same_file(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, shape: dict[str, Any]
) -> None:
    """Which knows by itself in what order an architecture's rows are written."""
    path = write_gguf(tiny_llama(**shape))
    convert(path, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    weights = load(tmp_path / "out")
    if "tie_word_embeddings" in shape:
        del theirs["lm_head.weight"]
    assert weights.keys() == theirs.keys()
    for name, values in weights.items():
        adds_1 = "gemma" in str(shape) and name.endswith("norm.weight")  # so does loading
        np.testing.assert_array_equal(values, theirs[name].numpy() + int(adds_1), err_msg=name)


@pytest.mark.parametrize("packed", [True, False])
def test_quantized_weights_are_those_that_gguf_expands_them_to(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, packed: bool
) -> None:
    model, q8 = tiny_llama(), gguf.GGMLQuantizationType.Q8_0
    convert(write_gguf(model, quantization=q8), tmp_path / "out", packed=packed)
    weights = load(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        exact = model.state_dict()[name].numpy()
        expected = gguf.quants.dequantize(gguf.quants.quantize(exact, q8), q8)  # by rows, so the order is no matter
        assert not np.array_equal(expected, exact)
        assert isinstance(weights[name], StoredMatrix) == packed
        np.testing.assert_array_equal(weights[name].rows() if packed else weights[name], expected)


def test_transformers_reads_the_converted_folder_and_computes_the_same(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    model = tiny_llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0})
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    convert(write_gguf(model, **scaling), tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(read, LlamaForCausalLM)
    ids = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_the_config_says_what_the_metadata_says(tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path) -> None:
    model = tiny_llama()
    convert(write_gguf(model), tmp_path / "out")
    model.config.save_pretrained(tmp_path / "theirs")
    theirs = load_config(tmp_path / "theirs")
    assert load_config(tmp_path / "out") == replace(theirs, eos_token_ids=(2, 0))  # 0 is <|endoftext|>
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_llama3_frequencies_give_back_their_parameters(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    model = tiny_llama(rope_parameters=LLAMA3, hidden_size=256)  # head_dim 64
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    divisors = (plain / model.model.rotary_emb.inv_freq).float().numpy()
    assert divisors.min() == 1
    assert divisors.max() == 32
    convert(write_gguf(model, extra_tensors={"rope_freqs.weight": divisors}), tmp_path / "out")
    assert load_config(tmp_path / "out").rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)

    divisors[15] *= 1.01
    path = write_gguf(model, extra_tensors={"rope_freqs.weight": divisors})
    with pytest.raises(ModelError, match=r"rope_freqs.weight does not hold .* factor 32.0; use the safetensors"):
        convert(path, tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architecture": "phi3"},
            "general.architecture is 'phi3'; only 'llama', 'qwen2', 'qwen3', 'gemma2' and 'gemma3'",
        ),
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"split.count": 3}, "split into 3 files"),
        ({"llama.rope.dimension_count": 8}, "only 8 of 16 dimensions"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'; supported are 'none' and 'linear'"),
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.block_count": 3}, "tensor 'model.layers.2.input_layernorm.weight' is missing .9 tensors"),
        ({"llama.feed_forward_length": 100}, r"gate_proj.weight' has shape \(96, 64\), but .* \(100, 64\)"),
        ({"extra_tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "q_proj.bias' is not part of"),
        ({"llama.attention.head_count": "four"}, "its metadata contradicts itself"),
        ({"tokenizer.ggml.model": "t5"}, "kind 't5'.*put the model's tokenizer.json .* beside"),
        ({"tokenizer.ggml.pre": "jais"}, "the rule 'jais'.*put the model's tokenizer.json .* beside"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    path = write_gguf(tiny_llama(), **changes)
    with pytest.raises(ModelError, match=says) as raised:
        convert(path, tmp_path / "out")
    assert str(path) in str(raised.value)


MEANS_NOTHING: list[dict[str, Any]] = [
    {"llama.vocab_size": 320, "llama.attention.value_length": 16, "llama.attention.layer_norm_epsilon": 1e-5},
    {"llama.tensor_data_layout": "Meta AI original pth", "llama.attention.causal": True, "general.type": "model"},
    {"llama.rope.scaling.original_context_length": 64, "llama.rope.scaling.finetuned": True},
    {"llama.rope.scaling.attn_factor": 1.0, "llama.logit_scale": 1.0, "llama.residual_scale": 0.0},
    {"llama.attention.scale": 0.25, "llama.attention.clamp_kqv": 0.0, "llama.unheard_of": 0, "llama.pooling_type": 0},
    {"llama.expert_count": 0, "llama.expert_used_count": 0, "llama.use_parallel_residual": False},
    {"llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": [2, 2]},
    {"llama.feed_forward_length": [96, 96], "llama.rope.dimension_sections": [0, 0, 0, 0]},
    {"llama.attention.sliding_window": 128, "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
    {"llama.rope.scaling.type": "none", "llama.rope.scaling.yarn_ext_factor": 1.0},
    {"llama.rope.scaling.factor": 0.0, "llama.rope.scale_linear": 4.0},  # the newer name counts
    {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0},
    {"general.name": "tiny", "general.quantized_by": "somebody", "quantize.imatrix.chunks_count": 3, "split.count": 1},
]


@pytest.mark.parametrize("changes", MEANS_NOTHING)
def test_a_key_that_changes_nothing_is_let_through(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, changes: dict[str, Any]
) -> None:
    convert(write_gguf(tiny_llama()), tmp_path / "without")
    convert(write_gguf(tiny_llama(), **changes), tmp_path / "with")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()


CHANGES_THE_RESULT: list[tuple[str, Any]] = [
    ("llama.attention.value_length", 8),
    ("llama.attention.causal", False),
    ("llama.attention.scale", 0.5),
    ("llama.attention.clamp_kqv", 8.0),
    ("llama.attention.max_alibi_bias", 8.0),
    ("llama.attention.sliding_window_pattern", [True, False]),
    ("llama.attn_logit_softcapping", 50.0),
    ("llama.final_logit_softcapping", 30.0),
    ("llama.logit_scale", 0.0625),
    ("llama.residual_scale", 0.22),
    ("llama.embedding_scale", 12.0),
    ("llama.expert_used_count", 2),
    ("llama.use_parallel_residual", True),
    ("llama.pooling_type", 1),
    ("llama.tensor_data_layout", "reference"),
    ("llama.rope.dimension_sections", [8, 4, 4, 0]),
    ("llama.rope.scaling.attn_factor", 1.2),
    ("llama.rope.scaling.alpha", 1000.0),
    ("llama.rope.freq_base_swa", 10000.0),
    ("llama.unheard_of", 3),
    ("adapter.type", "lora"),
    ("general.type", "adapter"),
    ("diffusion.shift_logits", True),
]


@pytest.mark.parametrize(("key", "value"), CHANGES_THE_RESULT)
def test_a_key_that_changes_the_result_is_refused_by_name(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, key: str, value: Any
) -> None:
    with pytest.raises(ModelError, match=rf"{re.escape(key)} is .*use the safetensors checkpoint"):
        convert(write_gguf(tiny_llama(), **{key: value}), tmp_path / "out")


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"])
def test_layers_that_differ_are_refused(tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelError, match=rf"llama.{key} differs between layers .\[4, 2\]"):
        convert(write_gguf(tiny_llama(), **{f"llama.{key}": [4, 2]}), tmp_path / "out")


@pytest.mark.parametrize(
    "said",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
        {"rope.scaling.type": "linear", "rope.scale_linear": 4.0},
        {"rope.scaling.factor": 4.0, "rope.scale_linear": 8.0},
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_rope_factor_is_linear_under_either_name(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, model_type: str, said: dict[str, Any]
) -> None:
    convert(write_gguf(tiny_llama(model_type), **{f"{model_type}.{k}": v for k, v in said.items()}), tmp_path / "out")
    assert load_config(tmp_path / "out").rope_scaling == RopeScaling("linear", 4.0)


def test_two_scalings_of_the_frequencies_are_refused(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"llama.rope.scaling.factor": 4.0}
    ones = np.ones(8, np.float32)
    convert(write_gguf(tiny_llama(), extra_tensors={"rope_freqs.weight": ones}, **changes), tmp_path / "one")
    assert load_config(tmp_path / "one").rope_scaling == RopeScaling("linear", 4.0)
    path = write_gguf(tiny_llama(), extra_tensors={"rope_freqs.weight": ones * 2}, **changes)
    with pytest.raises(ModelError, match=r"scaling.factor is 4.0, and rope_freqs.weight scales too"):
        convert(path, tmp_path / "two")


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ({}, [2, 0]),
        ({"eot": 5}, [2, 5, 0]),
        ({"eot": 5, "eom": 7}, [2, 5, 7, 0]),
        ({"eos": None, "eom": 7}, [7, 0, 2]),
        ({"eos": 0, "eot": 0}, [0, 2]),
        ({"eos": 2**32 - 1}, [0, 2]),  # how old files write that there is none
        ({"eot": 320}, [2, 0]),
    ],
)
def test_end_tokens_are_those_of_llama_cpp(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, said: dict[str, int | None], ends: list[int]
) -> None:
    """The ids of the file, and control tokens by their names: 0 is <|endoftext|>, 2 is <|im_end|>."""
    changes = {f"tokenizer.ggml.{role}_token_id": token_id for role, token_id in said.items()}
    convert(write_gguf(tiny_llama(), **changes), tmp_path / "out")
    assert load_config(tmp_path / "out").eos_token_ids == tuple(ends)


@pytest.mark.parametrize("token_type", [1, 4])
def test_a_token_that_looks_like_a_control_token_is_one_as_in_llama_cpp(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, gguf_metadata: dict[str, Any], token_type: int
) -> None:
    """Whatever its type. (But "</s>" is a piece of HTML too.)"""
    types, names = gguf_metadata["tokenizer.ggml.token_type"], gguf_metadata["tokenizer.ggml.tokens"]
    changes = {"tokenizer.ggml.token_type": [token_type, *types[1:]]}
    convert(write_gguf(tiny_llama(), **changes), tmp_path / "out")
    assert load_config(tmp_path / "out").eos_token_ids == (2, 0)
    assert Tokenizer(tmp_path / "out").special_token_ids >= {0, 2}
    changes["tokenizer.ggml.tokens"] = ["</s>", *names[1:]]
    convert(write_gguf(tiny_llama(), **changes), tmp_path / "html")
    assert load_config(tmp_path / "html").eos_token_ids == (2,)


def test_the_files_beside_name_end_tokens_too(tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path) -> None:
    convert(write_gguf(tiny_llama()), tmp_path / "known")
    shutil.copyfile(tmp_path / "known" / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_start|>"}')
    convert(write_gguf(tiny_llama()), tmp_path / "out")
    assert load_config(tmp_path / "out").eos_token_ids == (2, 0, 1)


def test_a_tokenizer_beside_the_file_is_used(tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path) -> None:
    convert(write_gguf(tiny_llama()), tmp_path / "known")
    path = write_gguf(tiny_llama(), **{"tokenizer.ggml.pre": "unheard-of"})
    theirs = (tmp_path / "known" / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(theirs)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    convert(path, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == theirs
    tokenizer = Tokenizer(tmp_path / "out")
    assert tokenizer.eos_token_id == 0
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])[0] == 1  # the template is still the file's


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere_is_a_model_error(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "whole.gguf"
    if not path.exists():
        write_gguf(tiny_llama(num_hidden_layers=1), name=path.name)
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: data.draw(st.integers(0, 12_000) | st.integers(0, len(whole) - 1), label="bytes left")])
    with pytest.raises(ModelError, match=r"cut\.gguf .* is not a GGUF file, or it is truncated or damaged"):
        convert(cut, tmp_path / "out")


def test_a_file_cut_within_its_weights_names_the_tensor_and_its_shape(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    path = write_gguf(tiny_llama(num_hidden_layers=1))
    last = max(gguf.GGUFReader(path).tensors, key=lambda tensor: tensor.data_offset)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: last.data_offset + last.n_bytes - 1])
    shape = re.escape(str(last.shape.tolist()[::-1]))
    with pytest.raises(ModelError, match=rf"the file ends within or before tensor {last.name}, of shape {shape}"):
        convert(cut, tmp_path / "out")


@thorough
def test_conversion_and_tokenizer_work_where_torch_is_not_installed(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    path = write_gguf(tiny_llama())
    program = f"""
import sys
sys.modules["torch"] = None  # importing it now fails
from pathlib import Path
from minipaged.models.gguf import convert
from minipaged.models.loading import load_config, load_weights
from minipaged.models.tokenizer import Tokenizer
folder = Path({str(tmp_path / "out")!r})
convert(Path({str(path)!r}), folder)
print(len(load_weights(folder, load_config(folder))))
print(Tokenizer(folder).encode_chat([{{"role": "user", "content": "hi"}}])[:1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["21", "[1]"], done.stderr


@pytest.mark.model
def test_smollm2_has_the_weights_that_transformers_reads_from_the_same_file(smollm2: Path) -> None:
    assert {name: yardstick.digest(values) for name, values in load(smollm2).items()} == yardstick.kept()["weights"]
