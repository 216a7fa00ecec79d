"""GGUF files of models with windows are served beyond them as transformers computes, packed or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaForCausalLM, PreTrainedModel

from minipaged import LLM, SamplingParams
from minipaged.errors import ModelError
from minipaged.llm import LoadedModel
from minipaged.models.gguf import convert
from minipaged.models.loading import load_config, load_weights
from minipaged.models.quantized.gguf_blocks import BLOCKS
from minipaged.models.quantized.stored import StoredMatrix
from minipaged.recordings.replay_steps import logits_of
from tests.end_to_end.small_llama import make_small_llama
from tests.end_to_end.ties import check_same_or_tied
from tests.end_to_end.yardstick import greedy, last_logits, load
from tests.models.conftest import gguf_tensors

MakeLlama = Callable[..., LlamaForCausalLM]
WriteGGUF = Callable[..., Path]

WINDOW = 11
ONE_IN_SIX = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA_2 = {"model_type": "gemma2", "num_hidden_layers": 3, "query_pre_attn_scalar": 16}
GEMMA_2 |= {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}
QWEN = {"use_sliding_window": True, "max_window_layers": 1}
PATTERN = [False, True]
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma 3": (ONE_IN_SIX, {}),
    "Gemma 3 that caps its logits": (ONE_IN_SIX | {"final_logit_softcapping": 3.0}, {}),
    "Gemma 2": (GEMMA_2, {}),
    "Mistral": ({"model_type": "mistral"}, {}),
    **{
        model_type: (
            {"model_type": model_type} | QWEN,
            {
                f"{model_type}.attention.sliding_window": WINDOW,
                f"{model_type}.attention.sliding_window_pattern": PATTERN,
            },
        )
        for model_type in ("qwen2", "qwen3")
    },
}
"""The settings of a model, and the keys of its GGUF file that the writer does not know."""
PROMPT = list(range(20, 64))  # four windows


@pytest.mark.parametrize(("settings", "keys"), MODELS.values(), ids=MODELS.keys())
def test_beyond_its_window_it_computes_what_transformers_computes(
    settings: dict[str, Any], keys: dict[str, Any], write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    settings = {"sliding_window": WINDOW, "head_dim": 16, "vocab_size": 320, "eos_token_id": None} | settings
    folder = make_small_llama(tmp_path / "theirs", **settings)
    theirs = load(folder)
    convert(write_gguf(theirs, **keys), tmp_path / "ours")
    unnamed = {"eos_token_ids": (), "bos_token_id": None}
    assert replace(load_config(tmp_path / "ours"), **unnamed) == replace(load_config(folder), **unnamed)
    check_served(tmp_path / "ours", folder, theirs)


def check_served(ours: Path, folder: Path, theirs: PreTrainedModel) -> None:
    """Fail unless both tiers have the logits, within the window and beyond it, and the greedy text of `theirs`, whose
    checkpoint is in `folder`."""
    expected = greedy(theirs, PROMPT, 12)
    for tier in ("reference", "fast"):
        loaded = LoadedModel.load(ours, tier, device="cpu", dtype="float32")
        for length in (WINDOW, WINDOW + 1, 4 * WINDOW):
            logits, found = last_logits(theirs, PROMPT[:length]), logits_of(loaded, PROMPT[:length])
            assert np.linalg.norm(found - logits) < 1e-4 * np.linalg.norm(logits), (tier, length)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm = LLM(ours, tier=tier, device="cpu", dtype="float32", num_blocks=60)  # type: ignore[arg-type]
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params)
        check_same_or_tied(folder, PROMPT, output.outputs[0].token_ids, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gemma_of_mixed_blocks_is_served_packed(tied: bool, write_gguf: WriteGGUF, tmp_path: Path) -> None:
    """The matrices are packed as in Q4_K_M: Q4_K, Q6_K where more counts, and Q8_0."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "query_pre_attn_scalar": 64}
    settings = {"sliding_window": WINDOW, "vocab_size": 320, "eos_token_id": None, "tie_word_embeddings": tied}
    theirs = load(make_small_llama(tmp_path / "random", **(ONE_IN_SIX | shape | settings)))
    blocks = {}
    with torch.no_grad():
        for name, values in gguf_tensors(theirs).items():
            kind = "Q8_0" if name in ("token_embd.weight", "output.weight") else "Q4_K"
            kind = "Q6_K" if name.endswith(("ffn_down.weight", "attn_v.weight")) else kind
            if values.ndim == 2:
                blocks[name] = random_blocks(kind, values.shape, np.random.default_rng(len(blocks)))
        for name, weight in theirs.named_parameters():
            if weight.ndim == 2:
                data, kind = blocks[gguf_name(name)]
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)))
    theirs.save_pretrained(tmp_path / "theirs")
    convert(write_gguf(theirs, blocks=blocks), tmp_path / "ours")
    weights = load_weights(tmp_path / "ours", load_config(tmp_path / "ours"))
    assert sum(isinstance(each, StoredMatrix) for each in weights.values()) == len(blocks)
    check_served(tmp_path / "ours", tmp_path / "theirs", theirs)


def random_blocks(kind: str, shape: tuple[int, ...], r: np.random.Generator) -> tuple[np.ndarray, GGMLQuantizationType]:
    """Blocks of any bytes; their scales give the weights a mean of about 0 and the spread of `make_small_llama`'s."""
    weights, size = BLOCKS[kind]
    data = r.integers(0, 256, (shape[0], shape[1] // weights, size), dtype=np.uint8)
    scale = {"Q8_0": 2.5 / 74, "Q4_K": 1.5 / 257, "Q6_K": 1.5 / 1369}[kind] / shape[1] ** 0.5
    places = {"Q8_0": {0: scale}, "Q4_K": {0: scale, 2: 7.5 * scale}, "Q6_K": {208: scale}}[kind]
    for place, value in places.items():
        data[:, :, place : place + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return data.reshape(shape[0], -1), GGMLQuantizationType[kind]


def gguf_name(name: str) -> str:
    names = {"embed_tokens": "token_embd", "lm_head": "output", "o_proj": "attn_output"}
    names |= {f"{part}_proj": f"attn_{part}" for part in "qkv"} | {
        f"{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")
    }
    *parts, stem, kind = name.split(".")
    return f"blk.{parts[2]}.{names[stem]}.{kind}" if "layers" in parts else f"{names[stem]}.{kind}"


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("packed", [True, False])
def test_norms_of_a_gemma_lose_the_1_that_the_file_adds(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, kind: GGMLQuantizationType, packed: bool
) -> None:
    model = tiny_llama("gemma2", head_dim=16)
    name = "model.layers.1.post_feedforward_layernorm.weight"
    written = {"blk.1.post_ffw_norm.weight": ((model.state_dict()[name].numpy() + 1).astype(np.float16), None)}
    convert(write_gguf(model, quantization=kind, blocks=written), tmp_path / "out", packed=packed)
    weights = load_weights(tmp_path / "out", load_config(tmp_path / "out"))
    assert weights[name].dtype == np.float32
    np.testing.assert_allclose(weights[name], written["blk.1.post_ffw_norm.weight"][0], rtol=0, atol=1e-7)


def test_a_gguf_file_is_served_by_its_path(
    write_gguf: WriteGGUF, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokenizer that it holds."""
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "cache"))
    settings = ONE_IN_SIX | {"sliding_window": WINDOW, "head_dim": 16, "vocab_size": 320}
    path = write_gguf(load(make_small_llama(tmp_path / "theirs", **settings)))
    llm = LLM(str(path), tier="reference", num_blocks=200)
    assert llm.config.max_model_len == 256
    assert llm.config.group_windows.count(WINDOW) > llm.config.group_windows.count(None) == 1
    (output,) = llm.generate(["in the thing and " * 4], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert output.prompt_token_ids[0] == 2  # <bos>
    assert len(output.outputs[0].token_ids) == 20


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_scores_of_a_gemma_27b_are_divided_as_llama_cpp_divides_them(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, architecture: str, layers: int
) -> None:
    """The file does not say it. hidden_size / heads is 168 in the largest Gemma 3, and head_dim 128."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 32}
    for name, count in (("27b", layers), ("other", layers - 1)):
        convert(write_gguf(tiny_llama(architecture, num_hidden_layers=count, **shape)), tmp_path / name)
    assert load_config(tmp_path / "27b").query_pre_attn_scalar == 8
    assert load_config(tmp_path / "other").query_pre_attn_scalar == 32


WINDOWS: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...]]] = {
    "one in three": ("gemma3_text", {"gemma3.attention.sliding_window_pattern": 3}, (9, 9, None, 9)),
    "all have it": ("gemma3_text", {"gemma3.attention.sliding_window_pattern": 0}, (9, 9, 9, 9)),
    "a list": (
        "gemma3_text",
        {"gemma3.attention.sliding_window_pattern": [False, True, True, False]},
        (None, 9, 9, None),
    ),
    "none has it": ("gemma3_text", {"gemma3.attention.sliding_window": None}, ()),
    "Gemma 2's own": ("gemma2", {"gemma2.attention.sliding_window": None}, (4096, None, 4096, None)),
    "the same in each layer": ("gemma2", {"gemma2.attention.sliding_window": [9, 9, 9, 9]}, (9, None, 9, None)),
    "longer than a text": ("gemma2", {"gemma2.attention.sliding_window": 500}, (500, None, 500, None)),
    "Mistral's": ("llama", {"llama.attention.sliding_window": 9}, (9, 9, 9, 9)),
    "none of Mistral's": ("llama", {"llama.attention.sliding_window": 0}, ()),
    "no layer of a Qwen": (
        "qwen2",
        {"qwen2.attention.sliding_window": 9, "qwen2.attention.sliding_window_pattern": [False] * 4},
        (),
    ),
}


@pytest.mark.parametrize(("model_type", "changes", "windows"), WINDOWS.values(), ids=WINDOWS.keys())
def test_layers_with_a_window_are_those_of_llama_cpp(
    tiny_llama: MakeLlama,
    write_gguf: WriteGGUF,
    tmp_path: Path,
    model_type: str,
    changes: dict[str, Any],
    windows: tuple[int | None, ...],
) -> None:
    model = tiny_llama(model_type, num_hidden_layers=4, head_dim=16, sliding_window=9)
    convert(write_gguf(model, **changes), tmp_path / "out")
    config = load_config(tmp_path / "out")
    assert (config.layer_windows, config.max_position_embeddings) == (windows, 128)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_qwen_that_does_not_name_its_layers_is_served_up_to_its_window(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, model_type: str
) -> None:
    """Up to its length, it makes no difference which layers have it."""
    convert(write_gguf(tiny_llama(model_type), **{f"{model_type}.attention.sliding_window": 64}), tmp_path / "out")
    config = load_config(tmp_path / "out")
    assert (config.layer_windows, config.max_position_embeddings) == ((), 64)


@pytest.mark.parametrize("said", [None, 5000.0])
def test_layers_with_a_window_have_the_rotary_base_that_the_file_names(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, said: float | None
) -> None:
    convert(write_gguf(tiny_llama("gemma3_text"), **{"gemma3.rope.freq_base_swa": said}), tmp_path / "out")
    config = load_config(tmp_path / "out")
    assert (config.window_rope_theta, config.rope_theta) == (said or 10000.0, 1e6)


def test_gemma_2_has_the_caps_of_llama_cpp_where_the_file_names_none(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    changes = dict.fromkeys(("gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping"))
    convert(write_gguf(tiny_llama("gemma2", attn_logit_softcapping=7.0), **changes), tmp_path / "out")
    config = load_config(tmp_path / "out")
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("model_type", "key", "value", "says"),
    [
        ("llama", "llama.attention.sliding_window_pattern", PATTERN, "a 'llama' with a window is a Mistral"),
        ("gemma2", "gemma2.attention.sliding_window_pattern", [True], "does not fit 2 layers with a window of 9"),
        ("gemma2", "gemma2.attention.sliding_window", [9, 7], "differs between layers"),
        ("gemma2", "gemma2.rope.freq_base_swa", 5000.0, "use the safetensors checkpoint"),
        ("gemma3_text", "gemma3.attn_logit_softcapping", 50.0, "use the safetensors checkpoint"),
        ("gemma3_text", "gemma3.rope.local.freq_base", 10000.0, "use the safetensors checkpoint"),
        ("gemma3_text", "gemma3.attention.scale", 0.3, "use the safetensors checkpoint"),
        ("gemma3_text", "gemma3.rope.scaling.type", "yarn", "supported are 'none' and 'linear'"),
    ],
)
def test_a_window_or_a_gemma_that_cannot_run_is_refused_by_name(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path, model_type: str, key: str, value: Any, says: str
) -> None:
    changes = {"llama.attention.sliding_window": 9} if model_type == "llama" else {}
    path = write_gguf(tiny_llama(model_type, sliding_window=9), **changes, **{key: value})
    with pytest.raises(ModelError, match=rf"{key} .*{says}"):
        convert(path, tmp_path / "out")
