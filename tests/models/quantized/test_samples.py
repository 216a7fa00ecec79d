"""What other tools have quantized is read as they read it themselves: every weight to its last bit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from minipaged import LLM, SamplingParams
from minipaged.contracts import BatchRow
from minipaged.errors import ModelError
from minipaged.models import gguf
from minipaged.models.loading import load_config, load_weights, static_scales
from minipaged.models.quantized.stored import StoredMatrix, round_to
from minipaged.reference.kv_cache import KVCache
from minipaged.reference.llama import Llama
from tests.effort import quick_cases
from tests.models.quantized.samples import CONFIG, HERE, SAMPLES, WHOLE, random_weights, read, write, write_sample

IDS = np.load(HERE / "input_ids.npy")
KV_SAMPLES = ["ct_fp8_kv_tensor", "ct_int8_kv_tensor"]
EVERY = 6
"""Of the logits after the tokens, those after every so manyth are kept."""


@pytest.mark.parametrize("name", SAMPLES)
def test_every_weight_is_the_tools(name: str, tmp_path: Path) -> None:
    folder = write_sample(name, tmp_path)
    weights = load_weights(folder, load_config(folder))
    for weight, expected in SAMPLES[name]["weights"].items():
        matrix = weights[weight]
        values = matrix.rows() if isinstance(matrix, StoredMatrix) else matrix
        assert values.dtype == np.float32
        rounded = np.ascontiguousarray(round_to(values, SAMPLES[name]["dtype"]))
        assert hashlib.sha256(rounded.tobytes()).hexdigest() == expected, weight


def test_matrices_stay_packed(tmp_path: Path) -> None:
    """All samples but one have some that are quantized, and each takes about the bytes of its tensors."""
    dense = set()
    for name in SAMPLES:
        folder = write_sample(name, tmp_path / name)
        weights = load_weights(folder, load_config(folder))
        packed = [matrix for matrix in weights.values() if isinstance(matrix, StoredMatrix)]
        if not packed:
            dense.add(name)
        for matrix in packed:
            assert matrix.nbytes <= np.prod(matrix.shape) * 1.3, name  # bytes a weight; float32 would be 4
    assert dense == {"ct_int8_kv_tensor"}


@pytest.mark.parametrize("name", WHOLE)
def test_logits_are_those_of_transformers_on_the_tools_weights(name: str, tmp_path: Path) -> None:
    folder = write_sample(name, tmp_path)
    weights = load_weights(folder, load_config(folder))
    plain = {
        name: dataclasses.replace(weight, activations=None) if isinstance(weight, StoredMatrix) else weight
        for name, weight in weights.items()
    }
    check_close(logits_of(folder, plain), np.load(HERE / f"{name}.npz")["logits_fp32"])


def test_logits_are_those_of_the_tool_where_inputs_are_quantized_too(tmp_path: Path) -> None:
    """Up to codes that rounding makes others: of an input halfway between two, the last bit decides. (With torch's
    products in place of NumPy's there was no difference at all, on the machine on which the sample was made.)"""
    name = "ct_w8a8_int8_static"
    folder, kept = write_sample(name, tmp_path), np.load(HERE / f"{name}.npz")
    weights = {
        name: dataclasses.replace(weight, rounding="float32") if isinstance(weight, StoredMatrix) else weight
        for name, weight in load_weights(folder, load_config(folder)).items()
    }
    theirs = kept["logits_tool"]
    error = np.abs(logits_of(folder, weights) - theirs).max()
    without = np.abs(kept["logits_fp32"] - theirs).max()
    assert error < 0.4 * without


@pytest.mark.parametrize("name", KV_SAMPLES)
def test_logits_are_those_of_the_tool_where_keys_and_values_are_quantized_too(name: str, tmp_path: Path) -> None:
    """With the scales that the checkpoint brings, and with no others."""
    folder, theirs = write_sample(name, tmp_path), np.load(HERE / f"{name}.npz")["logits_tool"]
    config = load_config(folder)
    weights = {
        name: dataclasses.replace(weight, rounding="float32") if isinstance(weight, StoredMatrix) else weight
        for name, weight in load_weights(folder, config).items()
    }
    check_close(logits_of(folder, weights, config.kv_cache_dtype, static_scales(config, weights)), theirs)
    own_scales = logits_of(folder, weights, config.kv_cache_dtype)
    assert np.abs(own_scales - theirs).max() > 0.01 * np.abs(theirs).max()


@pytest.mark.parametrize("tier", ["reference", "fast"])
def test_both_tiers_take_a_checkpoints_scales_for_keys_and_values_unless_others_are_asked_for(
    tier: Any, tmp_path: Path
) -> None:
    folder, theirs = write_sample("ct_int8_kv_tensor", tmp_path), np.load(HERE / "ct_int8_kv_tensor.npz")
    prompts = [{"prompt_token_ids": ids[: EVERY + 1].tolist()} for ids in IDS]
    settings = {"tier": tier, "device": "cpu", "dtype": "float32", "num_blocks": 8, "block_size": 2}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    apart = {}
    for kv_cache_dtype in ("auto", "int8"):
        llm = LLM(folder, kv_cache_dtype=kv_cache_dtype, **settings)
        assert llm.engine.runner.kv_cache.block_bytes == llm.loaded.block_bytes(2, kv_cache_dtype) == 2 * 2 * 4 * 36
        errors = []
        for output, logits in zip(llm.generate(prompts, params), theirs["logits_tool"][:, 1], strict=True):
            expected = torch.from_numpy(logits).log_softmax(0)
            told = output.outputs[0].logprobs[0]
            errors += [abs(logprob - expected[token].item()) for token, logprob in told.items()]
        apart[kv_cache_dtype] = max(errors)
    assert apart["auto"] < 1e-4 < 1e-3 < apart["int8"]


def test_a_layer_without_its_scales_is_told_and_does_without_where_it_may(tmp_path: Path) -> None:
    folder = write_sample("ct_int8_kv_tensor", tmp_path)
    tensors = read(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_scale"]
    write(folder / "model.safetensors", tensors)
    for tier in ("reference", "fast"):
        settings: Any = {"tier": tier, "device": "cpu", "num_blocks": 8}
        with pytest.raises(ModelError, match=r"'model\.layers\.1\.self_attn\.v_scale' .*kv_cache_dtype='int8'"):
            LLM(folder, **settings)
        llm = LLM(folder, kv_cache_dtype="int8", **settings)
        assert llm.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=1))


def test_dynamic_scales_are_in_no_checkpoint(tmp_path: Path) -> None:
    folder = write_sample("ct_fp8_kv_tensor", tmp_path)
    assert load_config(folder).kv_cache_dtype == "fp8"
    change_scheme(folder, {"dynamic": True})
    assert load_config(folder).kv_cache_dtype == "auto"


def test_logits_of_a_gguf_file_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_write_tokenizer", lambda *there_is_none: None)
    gguf.convert(HERE / "gguf_q4_1.gguf", tmp_path)
    weights = load_weights(tmp_path, load_config(tmp_path))
    assert isinstance(weights["model.embed_tokens.weight"], StoredMatrix)
    assert (tmp_path / "model.safetensors").stat().st_size < 1.05 * (HERE / "gguf_q4_1.gguf").stat().st_size
    check_close(logits_of(tmp_path, weights), np.load(HERE / "gguf_q4_1.npz")["logits_fp32"])


@quick_cases(5)
@pytest.mark.parametrize("name", SAMPLES)
def test_both_tiers_generate_what_transformers_does_with_these_weights(name: str, tmp_path: Path) -> None:
    folder = write_sample(name, tmp_path)
    if name in KV_SAMPLES:
        change_scheme(folder, None)  # transformers' cache has floats here
    config, weights = load_config(folder), load_weights(folder, load_config(folder))
    activations = {
        name: weight.activations
        for name, weight in weights.items()
        if isinstance(weight, StoredMatrix) and weight.activations is not None
    }
    theirs = LlamaForCausalLM(LlamaConfig(**(CONFIG | {"num_hidden_layers": config.num_hidden_layers})))
    theirs.load_state_dict(
        {
            name: torch.from_numpy(weight.rows() if isinstance(weight, StoredMatrix) else weight)
            for name, weight in weights.items()
            if not name.endswith("_scale")
        }
    )
    for weight, how in activations.items():

        def quantize(module: Any, inputs: tuple[torch.Tensor], how: Any = how) -> tuple[torch.Tensor]:
            (x,) = inputs
            return (torch.from_numpy(how.applied(x.flatten(0, 1).numpy())).view(x.shape),)

        theirs.get_submodule(weight.removesuffix(".weight")).register_forward_pre_hook(quantize)
    prompt = IDS[0, :12].tolist()
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    told = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    best = torch.cat(told.logits).topk(2).values  # [tokens, 2]
    # Inputs halfway between two codes take either: logits differ by up to 3 %, and then a narrow choice may as well.
    narrow = (best[:, 0] - best[:, 1] < (0.1 * best[:, 0] if activations else 1e-3)).tolist()
    num_sure = [*narrow, True].index(True)
    expected = told.sequences[0, len(prompt) :].tolist()[:num_sure]
    params = SamplingParams(temperature=0, max_tokens=6)
    for tier in ("reference", "fast"):
        llm = LLM(folder, tier=tier, device="cpu", dtype="float32", num_blocks=8)  # type: ignore[arg-type]
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
        assert list(output.outputs[0].token_ids)[:num_sure] == expected, tier


def change_scheme(folder: Path, change: dict[str, Any] | None) -> None:
    """Make the checkpoint say something else of its keys and values, or nothing."""
    config = json.loads((folder / "config.json").read_text())
    scheme = config["quantization_config"].pop("kv_cache_scheme")
    if change is not None:
        config["quantization_config"]["kv_cache_scheme"] = scheme | change
    (folder / "config.json").write_text(json.dumps(config))


def logits_of(
    folder: Path, weights: dict[str, Any], kv_cache_dtype: str = "auto", scales: np.ndarray | None = None
) -> np.ndarray:
    """The reference tier's logits [sequences, every so manyth token, vocab]."""
    config = load_config(folder)
    sizes = (config.num_hidden_layers, 4, 16, config.num_key_value_heads, config.head_dim)
    cache = KVCache(*sizes, kv_cache_dtype=kv_cache_dtype, static_scales=scales)
    llama = Llama(config, weights, cache)
    found = []
    for ids in IDS:
        llama.forward([BatchRow(tuple(ids.tolist()), 0, (0, 1), wants_logits=True, num_prompt_logits=len(ids))])
        found.append(llama._logits(llama.prompt_hidden)[::EVERY])
    return np.stack(found)


def check_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("tied", [True, False])
def test_both_tiers_generate_from_gguf_blocks(
    tied: bool, tiny_llama: Callable[..., LlamaForCausalLM], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """Embedding and head are packed too, and may be one matrix."""
    path = write_gguf(tiny_llama(tie_word_embeddings=tied), quantization=GGMLQuantizationType.Q8_0)
    gguf.convert(path, tmp_path / "packed")
    gguf.convert(path, tmp_path / "expanded", packed=False)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "expanded")
    prompt = [5, 6, 7, 300]
    tokens = torch.tensor([prompt])
    expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=6)
    for tier in ("reference", "fast"):
        llm = LLM(tmp_path / "packed", tier=tier, device="cpu", dtype="float32", num_blocks=8)  # type: ignore[arg-type]
        (output,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=6))
        assert list(output.outputs[0].token_ids) == expected[0, len(prompt) :].tolist(), tier


def test_a_quantized_cousin_with_biases_runs_with_them(tmp_path: Path) -> None:
    folder = write_sample("gptq_int4_g32_sym_actorder", tmp_path)
    path, places = folder / "model.safetensors", ["q_proj", "k_proj", "v_proj"]
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        f"model.layers.{i}.self_attn.{part}.bias": [64 if part != "q_proj" else 128] for i in (0, 1) for part in places
    }
    write(path, read(path) | random_weights(shapes))
    weights = load_weights(folder, load_config(folder))
    assert isinstance(weights["model.layers.1.self_attn.q_proj.weight"], StoredMatrix)
    theirs = Qwen2ForCausalLM(Qwen2Config(**{key: config[key] for key in (*CONFIG, "num_hidden_layers")}))
    theirs.load_state_dict(
        {
            name: torch.from_numpy(weight.rows() if isinstance(weight, StoredMatrix) else weight)
            for name, weight in weights.items()
        }
    )
    prompt = IDS[0, :12].tolist()
    tokens = torch.tensor([prompt])
    told = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=6)
    params = SamplingParams(temperature=0, max_tokens=6)
    for tier in ("reference", "fast"):
        llm = LLM(folder, tier=tier, device="cpu", dtype="float32", num_blocks=8)  # type: ignore[arg-type]
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
        assert list(output.outputs[0].token_ids) == told[0, len(prompt) :].tolist(), tier
