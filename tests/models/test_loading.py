"""Weights read from safetensors are transformers' weights, and a damaged checkpoint is told apart."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from minipaged.errors import ModelError
from minipaged.models import loading
from minipaged.models.loading import load_config, load_weights
from tests.effort import examples

MakeLlama = Callable[..., LlamaForCausalLM]


@pytest.fixture
def checkpoint(tiny_llama: MakeLlama, tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def load(folder: Path) -> dict[str, np.ndarray]:
    return load_weights(folder, load_config(folder))


def change(folder: Path, change_tensors: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_those_of_transformers(
    tiny_llama: MakeLlama, tmp_path: Path, dtype: torch.dtype, shard_size: str, tied: bool
) -> None:
    model = tiny_llama(tie_word_embeddings=tied).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    weights = load(tmp_path)
    expected = model.state_dict()
    if tied:
        del expected["lm_head.weight"]
    assert weights.keys() == expected.keys()
    for name, values in weights.items():
        assert values.dtype == np.float32
        assert values.flags.owndata or values.base.flags.owndata
        np.testing.assert_array_equal(values, expected[name].float().numpy(), err_msg=name)


def test_every_bf16_number_is_read_bit_for_bit(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).reshape(1024, 64)
    model = tiny_llama(vocab_size=1024).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"model.embed_tokens.weight": every}))
    read = load(tmp_path)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(read.view(np.uint32), every.float().numpy().view(np.uint32))


def test_weights_come_in_the_dtype_asked_for(checkpoint: Path) -> None:
    config = load_config(checkpoint)
    exact, half = load_weights(checkpoint, config), load_weights(checkpoint, config, np.float16)
    for name, values in half.items():
        assert values.dtype == np.float16
        np.testing.assert_array_equal(values, exact[name].astype(np.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_loading_needs_the_weights_and_one_tensor_more(
    tiny_llama: MakeLlama, tmp_path: Path, dtype: torch.dtype
) -> None:
    tiny_llama(hidden_size=256, intermediate_size=512, vocab_size=512).to(dtype).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    tracemalloc.start()
    weights = load_weights(tmp_path, config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sizes = [values.nbytes for values in weights.values()]
    assert peak < sum(sizes) + max(sizes) + 200_000


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_process_that_reads_smollm2_stays_well_under_twice_its_size(smollm2: Path) -> None:
    # VmHWM and not getrusage: the latter counts the parent's memory too, from before the child became a new program.
    program = f"""
from pathlib import Path
from minipaged.models import loading
from minipaged.models.loading import load_config, load_weights
folder = Path({str(smollm2)!r})
weights = load_weights(folder, load_config(folder))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(sum(values.nbytes for values in weights.values()), int(peak.split()[1]) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    size, peak = map(int, done.stdout.split())
    assert size == 134_515_008 * 4
    assert peak < 1.2 * size


def test_progress_counts_the_tensors(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    weights = load_weights(checkpoint, load_config(checkpoint), progress=lambda *done: seen.append(done))
    assert seen == [(i + 1, len(weights)) for i in range(len(weights))]


# --- Two sources for one tensor -------------------------------------------------------------------


def as_transformers(folder: Path) -> dict[str, np.ndarray]:
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    return {name: values.numpy() for name, values in state.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has", ["both", "both, equal", "the embedding", "the head"])
def test_a_tied_head_is_the_one_that_transformers_takes(
    tiny_llama: MakeLlama, tmp_path: Path, has: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that differs from the embedding is the model's, and one that is alone is the embedding too."""
    monkeypatch.setattr(loading, "PIECE", 300)  # numbers, so that there are many pieces
    tiny_llama().to(dtype).save_pretrained(tmp_path)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    changes: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        "both": lambda t: t.update({head: t[embedding].index_fill(0, torch.tensor([319]), 0.5)}),  # in its last row
        "both, equal": lambda t: t.update({head: t[embedding].clone()}),
        "the embedding": lambda t: t.pop(head),
        "the head": lambda t: t.pop(embedding),
    }
    change(tmp_path, lambda tensors: [changes[has](tensors)].clear())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    expected, found = as_transformers(tmp_path), load(tmp_path)
    assert load_config(tmp_path).tie_word_embeddings == (has != "both")
    assert (head in found) == (has == "both")
    np.testing.assert_array_equal(found[embedding], expected[embedding])
    np.testing.assert_array_equal(found.get(head, found[embedding]), expected[head])


def test_a_head_is_not_dropped_unread(checkpoint: Path) -> None:
    """Also where somebody else than `load_config` says that it is tied."""
    config = replace(load_config(checkpoint), tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"'lm_head.weight' has no place"):
        load_weights(checkpoint, config)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ROPES)
def test_rotary_frequencies_come_from_the_config_as_in_transformers_whatever_an_old_file_keeps(
    tiny_llama: MakeLlama, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    model = tiny_llama(rope_parameters=ROPES[kind])
    model.save_pretrained(tmp_path)
    without, name = load(tmp_path), "model.layers.0.self_attn.rotary_emb.inv_freq"
    theta = ROPES[kind]["rope_theta"]
    plain = 1 / theta ** (torch.arange(0, 16, 2) / 16)
    for frequencies in (model.model.rotary_emb.inv_freq, plain, plain * 1.05):
        change(tmp_path, lambda tensors, stored=frequencies: tensors.update({name: stored.to(dtype).clone()}))
        assert load(tmp_path).keys() == without.keys()


def test_the_index_decides_which_file_a_tensor_is_from(checkpoint: Path) -> None:
    tensors, name = load_file(checkpoint / "model.safetensors"), "model.norm.weight"
    expected = load(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    others = {key: torch.zeros_like(values) for key, values in tensors.items()}
    for first in (False, True):
        right, wrong = ("a.safetensors", "b.safetensors") if first else ("b.safetensors", "a.safetensors")
        save_file(tensors, checkpoint / right)
        save_file(others, checkpoint / wrong)
        weight_map = dict.fromkeys(tensors, right)
        # The other file is named for a tensor of its own.
        save_file(others | {"model.layers.0.self_attn.k_scale": torch.ones(1)}, checkpoint / wrong)
        write_index(checkpoint, weight_map | {"model.layers.0.self_attn.k_scale": wrong})
        found = load(checkpoint)
        for key, values in expected.items():
            np.testing.assert_array_equal(found[key], values)
        del weight_map[name]
        write_index(checkpoint, weight_map | {"model.layers.0.self_attn.k_scale": wrong})
        message = rf"a.safetensors and b.safetensors each have a tensor '{name}', and .* does not say which"
        with pytest.raises(ModelError, match=message):
            load(checkpoint)


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("other", ["self_attn.k_proj.k_scale", "self_attn.k_proj.output_scale", "self_attn.kv_scale"])
def test_a_scale_under_two_names_has_one_value(checkpoint: Path, other: str) -> None:
    layer, one = "model.layers.0", torch.ones(1)
    change(checkpoint, lambda t: t.update({f"{layer}.self_attn.k_scale": one, f"{layer}.{other}": one.clone()}))
    assert load(checkpoint)[f"{layer}.self_attn.k_scale"] == 1
    change(checkpoint, lambda t: t.update({f"{layer}.{other}": one * 2}))
    with pytest.raises(ModelError, match=rf"'{layer}.{other}' and another one for '{layer}.self_attn.k_scale' differ"):
        load(checkpoint)


def test_a_whole_file_counts_before_an_index_as_in_transformers(checkpoint: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(64)}, checkpoint / "a.safetensors")
    write_index(checkpoint, {"model.norm.weight": "a.safetensors"})
    np.testing.assert_array_equal(
        load(checkpoint)["model.norm.weight"], as_transformers(checkpoint)["model.norm.weight"]
    )
    assert load(checkpoint)["model.norm.weight"].any()


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}, "'lm_head.weight' is in b.safe"),
        ({"no.such.weight": "a.safetensors"}, "'no.such.weight' is in a.safetensors, which does not hold it"),
        ({"model.norm.weight": "../a.safetensors"}, r"names the file '\.\./a.safetensors'; only names of files beside"),
        ({"model.norm.weight": "/etc/passwd"}, "names the file '/etc/passwd'; only names of files beside it"),
        ({"model.norm.weight": ".."}, r"names the file \.\., which is not there"),
        ({"model.norm.weight": ""}, "names the file"),
        ({"model.norm.weight": 3}, "no 'weight_map' from tensors to names of files"),
        ({"model.norm.weight": None}, "no 'weight_map' from tensors to names of files"),
        (["a.safetensors"], "no 'weight_map'"),
        (None, "no 'weight_map'"),
    ],
)
def test_an_index_that_says_something_else_than_the_files_is_refused(
    checkpoint: Path, weight_map: object, says: str
) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
    save_file({"model.layers.0.self_attn.k_scale": torch.ones(1)}, checkpoint / "b.safetensors")
    save_file({"model.norm.weight": torch.zeros(64)}, checkpoint.parent / "a.safetensors")
    write_index(checkpoint, weight_map)
    with pytest.raises(ModelError, match=says):
        load(checkpoint)


def test_generation_config_says_which_tokens_end_a_text(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_config(checkpoint).eos_token_ids == (7, 9)
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.5}')
    assert load_config(checkpoint).eos_token_ids == (2,)


# --- Damage ---------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named_with_its_shape(checkpoint: Path) -> None:
    change(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"'lm_head.weight' is missing \(1 of 21 are\).*\(320, 64\)"):
        load(checkpoint)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change(checkpoint, lambda tensors: tensors.update({name: torch.zeros(64, 96)}))
    with pytest.raises(ModelError, match=rf"'{name}' has shape \(64, 96\), but config.json asks for \(96, 64\)"):
        load(checkpoint)


def test_a_tensor_with_no_place_in_the_model_is_named(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"'model.layers.1.input_layernorm.weight' has no place.*9 such tensors"):
        load(checkpoint)


def test_a_dtype_that_is_no_float_is_named(checkpoint: Path) -> None:
    change(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"'model.norm.weight' has dtype I8; supported are F32, F16, BF16"):
        load(checkpoint)


def test_a_truncated_file_is_named_with_its_size_and_the_expected_size(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match=rf"model.safetensors is truncated: {len(whole) - 1000} .*{len(whole)}"):
        load(checkpoint)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere_is_a_model_error(checkpoint: Path, data: st.DataObject) -> None:
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    cut = data.draw(st.integers(0, header_end) | st.integers(0, len(whole) - 1), label="bytes left")
    try:
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            load(checkpoint)
    finally:
        path.write_bytes(whole)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_read_or_a_model_error_and_nothing_else(checkpoint: Path, data: st.DataObject) -> None:
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    place = data.draw(st.integers(0, header_end - 1), label="place")
    byte = data.draw(st.sampled_from(b'0129-.[]{}",: x\xff\x00'), label="byte")
    try:
        path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
        load(checkpoint)
    except ModelError:
        pass
    finally:
        path.write_bytes(whole)


def test_a_shard_that_is_not_there_is_named(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"names the file {shard.name}, which is not there"):
        load(tmp_path)


def test_a_folder_without_weights_or_config_says_what_is_read(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor .*gguf"):
        load(checkpoint)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json is damaged"):
        load(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(ModelError, match=r"holds no config.json"):
        load(checkpoint)
