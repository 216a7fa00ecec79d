"""Checkpoints made by other tools (`samples/README.md`), as folders that can be loaded, whole or damaged."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).with_name("samples")
SAMPLES: dict[str, dict[str, Any]] = json.loads((HERE / "samples.json").read_text())
WHOLE = [name for name, sample in SAMPLES.items() if sample["whole"]]
HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 128, 320, 256, 4, 2, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass
class Raw:
    """A tensor as its bytes."""

    dtype: str
    shape: list[int]
    data: bytes


def read(path: Path) -> dict[str, Raw]:
    """The tensors of a safetensors file."""
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    return {
        name: Raw(entry["dtype"], entry["shape"], whole[slice(*(begin + offset for offset in entry["data_offsets"]))])
        for name, entry in header.items()
    }


def write(path: Path, tensors: dict[str, Raw]) -> None:
    """The other way round."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values()))


def tensors_of(name: str) -> dict[str, Raw]:
    """A sample's own tensors."""
    return read(HERE / f"{name}.safetensors")


def write_sample(name: str, folder: Path) -> Path:
    """The sample as a checkpoint. What it lacks are random numbers in float16, in one layer."""
    folder.mkdir(parents=True, exist_ok=True)
    sample, tensors = SAMPLES[name], tensors_of(name)
    quantization = json.loads(json.dumps(sample["quantization_config"]))
    if sample["whole"]:
        tensors |= read(HERE / "embedding.safetensors")
        layers = 2
    else:
        layers = 1
        modules = {tensor.rsplit(".", 1)[0] for tensor in tensors} | {t.partition(".weight")[0] for t in tensors}
        rest = {
            weight: shape for weight, shape in shapes(layers).items() if weight.removesuffix(".weight") not in modules
        }
        tensors |= random_weights(rest)
        if quantization["quant_method"] == "compressed-tensors":
            quantization["ignore"] = [weight.removesuffix(".weight") for weight in rest]
    write(folder / "model.safetensors", tensors)
    config = CONFIG | {"num_hidden_layers": layers, "dtype": "float16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shapes(layers: int) -> dict[str, list[int]]:
    """All weights of the model."""
    found = {"model.embed_tokens": [VOCAB, HIDDEN], "lm_head": [VOCAB, HIDDEN], "model.norm": [HIDDEN]}
    for i in range(layers):
        found |= {
            f"model.layers.{i}.{part}": shape
            for part, shape in {
                "input_layernorm": [HIDDEN],
                "post_attention_layernorm": [HIDDEN],
                "self_attn.q_proj": [HEADS * HEAD_DIM, HIDDEN],
                "self_attn.k_proj": [KV_HEADS * HEAD_DIM, HIDDEN],
                "self_attn.v_proj": [KV_HEADS * HEAD_DIM, HIDDEN],
                "self_attn.o_proj": [HIDDEN, HEADS * HEAD_DIM],
                "mlp.gate_proj": [INTERMEDIATE, HIDDEN],
                "mlp.up_proj": [INTERMEDIATE, HIDDEN],
                "mlp.down_proj": [HIDDEN, INTERMEDIATE],
            }.items()
        }
    return {f"{name}.weight": shape for name, shape in found.items()}


def random_weights(shapes: dict[str, list[int]]) -> dict[str, Raw]:
    """Weights in float16 by which activations keep their size."""
    r = np.random.default_rng(0)
    made = {}
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 or "embed" in name else 1 / math.sqrt(shape[1])
        made[name] = Raw("F16", shape, (scale * r.standard_normal(shape)).astype("<f2").tobytes())
    return made
