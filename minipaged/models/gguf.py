"""Convert a GGUF file (llama.cpp's format) to a folder in transformers' format.

It may hold a Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3 (its text model).

A GGUF file is a whole model: metadata (the shape of the model, its tokenizer, its chat template) and the weights,
usually quantized. The conversion happens once, and every later start just reads safetensors:

- quantized matrices stay packed, block by block (`quantized/gguf_blocks.py`), if their type can be read that way.
  Matrices of other types become fp32, tensor by tensor, and so do all matrices if the caller wants that;
- the tensors get the names of transformers' checkpoints;
- the rows of q_proj and k_proj return to transformers' order. Rotary embedding rotates pairs of dimensions: llama.cpp
  pairs neighbours (0, 1), (2, 3), ...; transformers pairs the halves (0, d/2), (1, d/2 + 1), .... Therefore
  llama.cpp's converter has moved the rows of a Llama. It leaves Qwen's and Gemma's rows, because there it pairs halves
  too;
- the norms of a Gemma lose the 1 that llama.cpp's converter has added: transformers stores w - 1.

Files name the window of a model, but seldom the layers that have it. Then they are those that llama.cpp gives it
(`WINDOW_PERIODS`).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minipaged.errors import ModelError
from minipaged.models.config import ARCHITECTURES, GEMMAS, ModelConfig, RopeScaling, weight_shapes
from minipaged.models.gguf_tokenizer import build_tokenizer, end_token_ids, token_id, tokenizer_config
from minipaged.models.loading import STORED_DTYPES
from minipaged.models.quantized.gguf_blocks import BLOCKS
from minipaged.models.rope import divisors as divisors_of
from minipaged.models.rope import plain_frequencies
from minipaged.models.tokenizer_files import OLDER_CONFIG, TOKENIZER

if TYPE_CHECKING:
    from gguf import ReaderTensor

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""`blk.{i}.<key>.weight` in GGUF is `model.layers.{i}.<value>.weight` in transformers; the same holds for `.bias`."""

GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
"""For each general.architecture that is read, transformers' model_type. A 'llama' with a window is a Mistral."""

WINDOW_PERIODS = {"llama": 0, "gemma2": 2, "gemma3": 6}
"""Which layers have the window, where the file does not say it: all but each n-th; 0: all. Qwen2 and Qwen3 have no such
rule."""

ROPE_FREQS = "rope_freqs.weight"
"""[head_dim / 2]: the divisor of each rotary frequency. Only Llama 3.1 and similar models have this tensor."""


def convert(
    gguf_path: Path, folder: Path, progress: Callable[[int, int], None] | None = None, *, packed: bool = True
) -> None:
    """Write the model in `gguf_path` into `folder`: config, weights, tokenizer, chat template.

    `packed`: keep quantized matrices as they are, which only this program can read; otherwise all weights become fp32.
    A tokenizer.json next to the GGUF file takes precedence over the tokenizer inside it. `progress` is called with
    (bytes of weights written, total bytes). Raises ModelError if the file is damaged, the model is not supported, or
    the tokenizer cannot be built; `folder` may then hold some of the files.
    """
    metadata, tensors = _read(gguf_path)
    try:
        config = _config(metadata, tensors)
        names = GEMMA_LAYER_NAMES if config["model_type"] in GEMMAS else LAYER_NAMES
        sources = {_name(name, names): tensor for name, tensor in tensors.items() if name != ROPE_FREQS}
        kinds = {name: tensor.tensor_type.name for name, tensor in sources.items() if _dtype(tensor) == "U8"}
        if kinds and packed:
            types = {name.removesuffix(".weight"): kind for name, kind in kinds.items()}
            config["quantization_config"] = {"quant_method": "gguf", "tensor_types": types}
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "config.json", config)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(folder / "generation_config.json", ids)
        _write_tokenizer(folder, gguf_path, metadata)
        model_config, rows_are_moved = ModelConfig.from_dict(config), config["model_type"] in ("llama", "mistral")
        _write_weights(folder / "model.safetensors", model_config, sources, rows_are_moved, packed, progress)
    except ModelError as error:
        raise ModelError(f"{gguf_path}: {error}") from None
    except OSError:  # says which file; the disk may be full
        raise
    except KeyError as error:
        raise ModelError(f"{gguf_path}: {error} is missing, and every supported model needs it") from None
    except Exception as error:
        raise ModelError(f"{gguf_path} is damaged: its metadata contradicts itself ({error})") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """The metadata by key and the tensors by name. Weights are read from the file when they are used."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """A GGUFReader whose error names the tensor where a truncated file ends, instead of passing on NumPy's."""

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            try:
                super()._build_tensors(start_offs, fields)
            except (ValueError, IndexError) as error:
                for field in fields:
                    try:
                        super()._build_tensors(start_offs, [field])
                    except (ValueError, IndexError):
                        name, shape = bytes(field.parts[1]).decode(), field.parts[3].tolist()[::-1]
                        raise ValueError(f"the file ends within or before tensor {name}, of shape {shape}") from error
                raise

    try:
        reader = Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    except Exception as error:
        # The reader trusts the file, so damage can raise any exception from its arithmetic on the damaged numbers.
        size = path.stat().st_size
        raise ModelError(f"{path} ({size} bytes) is not a GGUF file, or it is truncated or damaged ({error})") from None
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    """The `config.json` of the model, in the format of transformers v4 (v5 reads it too)."""
    architecture = metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:  # to GGUF, Mistral is a 'llama'
        *known, last = map(repr, MODEL_TYPES)
        raise ModelError(f"general.architecture is {architecture!r}; only {', '.join(known)} and {last} are supported")
    if experts := metadata.get(f"{architecture}.expert_count"):
        raise ModelError(f"the model is a mixture of {experts} experts; only dense models are supported")
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"the model is split into {metadata['split.count']} files; merge them with llama-gguf-split")
    own = _own_settings(metadata, f"{architecture}.")
    hidden_size, num_heads = own["embedding_length"], own["attention.head_count"]
    head_dim = own.get("attention.key_length", hidden_size // num_heads)
    # llama.cpp recognises the largest Gemma by its layers; its scores are not divided by the square root of head_dim.
    largest = own["block_count"] == LAYERS_OF_27B.get(architecture)
    score_divisor = hidden_size // num_heads if largest else head_dim
    _check_settings(metadata, own, architecture, head_dim, score_divisor)
    bos, pad = (token_id(metadata, role) for role in ("bos", "padding"))
    model_type = MODEL_TYPES[architecture]
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type][0]],
        "model_type": model_type,
        "torch_dtype": "float32",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "rms_norm_eps": _shortest(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(own.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(own, f"{architecture}.rope", tensors, head_dim),
        "max_position_embeddings": own["context_length"],
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": bos,
        "eos_token_id": end_token_ids(metadata),
        "pad_token_id": pad,
    }
    if model_type in GEMMAS:
        del config["hidden_act"]
        config |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": score_divisor}
    if model_type == "gemma2":  # llama.cpp has these defaults
        config["attn_logit_softcapping"] = own.get("attn_logit_softcapping", 50.0) or None
        config["final_logit_softcapping"] = own.get("final_logit_softcapping", 30.0) or None
    if model_type == "gemma3_text":
        config["final_logit_softcapping"] = own.get("final_logit_softcapping") or None
        config["rope_local_base_freq"] = _shortest(own.get("rope.freq_base_swa", 10000.0))
    return config | _window_settings(own, architecture)


LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _window_settings(own: GgufMetadata, architecture: str) -> dict[str, Any]:
    """The settings of config.json that say which layers have a window, and of how many tokens."""
    key, pattern_key = "attention.sliding_window", "attention.sliding_window_pattern"
    num_layers, length = own["block_count"], own["context_length"]
    window = own.get(key, 4096 if architecture == "gemma2" else 0)
    pattern = own.get(pattern_key, WINDOW_PERIODS.get(architecture) if window else None)
    if isinstance(pattern, list):
        slides = [bool(each) for each in pattern]
    else:
        slides = [not pattern or i % pattern < pattern - 1 for i in range(num_layers)]
    if pattern is not None and (len(slides) != num_layers or (any(slides) and not window)):
        raise ModelError(
            f"{own.prefix}{pattern_key} is {pattern!r}, which does not fit {num_layers} layers with a window of "
            f"{window} tokens; use the safetensors checkpoint of this model, whose config.json names the layers"
        )
    if architecture in ("gemma2", "gemma3"):  # in Gemma 3, such layers have rotary frequencies of their own, too
        kinds = ["sliding_attention" if each and window else "full_attention" for each in slides]
        return {"sliding_window": window or length, "layer_types": kinds}
    if not any(slides) or not 0 < window < length:
        return {}
    if architecture == "llama":
        if not all(slides):
            raise ModelError(
                f"{own.prefix}{pattern_key} is {pattern!r}, but a 'llama' with a window is a Mistral, all of whose "
                "layers have it; use the safetensors checkpoint of this model"
            )
        return {"architectures": [ARCHITECTURES["mistral"][0]], "model_type": "mistral", "sliding_window": window}
    if pattern is None:  # up to the window's length, it makes no difference which layers have it
        return {"max_position_embeddings": window}
    kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


class GgufMetadata(dict[str, Any]):
    """The metadata of one architecture, by keys without its prefix. A KeyError names the key with the prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def __missing__(self, key: str) -> Any:
        raise KeyError(self.prefix + key)


def _own_settings(metadata: Mapping[str, Any], prefix: str) -> GgufMetadata:
    """The settings of the model's shape. A list with the same number for each layer becomes that number."""
    own = GgufMetadata(prefix)
    for key, value in metadata.items():
        name = key.removeprefix(prefix)
        if name == key:
            continue
        if name in OF_EACH_LAYER and isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{key} differs between layers ({value}); only models with equal layers are supported")
            value = value[0]
        own[name] = value
    return own


OF_EACH_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv", "attention.sliding_window")

READ = {
    *("block_count", "context_length", "embedding_length", *OF_EACH_LAYER, "attention.key_length"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
}
"""The keys of an architecture that the conversion reads into config.json."""
READ_OF_GEMMA = {
    "gemma2": {"attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": {"final_logit_softcapping", "rope.freq_base_swa"},
}
"""Keys that it reads of these architectures only."""

ANY = object()
HARMLESS: dict[str, tuple[Any, ...]] = {
    "vocab_size": (ANY,),  # the embedding's shape gives it
    "attention.layer_norm_epsilon": (ANY,),  # for layer norms, which no supported model has
    "attention.causal": (True,),
    "tensor_data_layout": ("Meta AI original pth",),  # the order of rows that the conversion reverses
    "rope.scaling.original_context_length": (ANY,),  # a YaRN setting, like the next two
    "rope.scaling.finetuned": (ANY,),
    "rope.scaling.yarn_log_multiplier": (ANY,),
    "rope.scaling.attn_factor": (1.0,),
    "residual_scale": (1.0, 0.0),
    "embedding_scale": (1.0, 0.0),
    "logit_scale": (1.0, 0.0),
}
"""Keys of an architecture, with the values that change nothing. A key that is not listed here changes nothing if its
value is False, zero, or an empty text or list. Any other value is refused, whether or not the key is known."""

OTHER_FILES = ("adapter.", "clip.", "diffusion.", "xielu.")
"""Prefixes of keys that only files of unsupported kinds contain."""


def _check_settings(
    metadata: Mapping[str, Any], own: Mapping[str, Any], architecture: str, head_dim: int, score_divisor: int
) -> None:
    """Raises ModelError for a key that would change the result but is not supported."""
    if (rotary_dim := own.get("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(
            f"only {rotary_dim} of {head_dim} dimensions of a head are rotary; a model that runs here must rotate all"
        )
    harmless = HARMLESS | {
        "rope.dimension_count": (head_dim,),
        "attention.value_length": (head_dim,),
    }
    odd = {
        f"{architecture}.{key}": value
        for key, value in own.items()
        if key not in READ | READ_OF_GEMMA.get(architecture, set())
        and not (key.startswith("rope.scaling.") and own.get("rope.scaling.type") == "none")
        and not (_is_one_of(value, harmless[key]) if key in harmless else _says_nothing(value))
    }
    if (scale := own.get("attention.scale")) and math.isclose(scale, score_divisor**-0.5, rel_tol=1e-5):
        del odd[f"{architecture}.attention.scale"]
    odd |= {key: value for key, value in metadata.items() if key.startswith(OTHER_FILES)}
    if (kind := metadata.get("general.type", "model")) != "model":
        odd["general.type"] = kind
    if odd:
        key, value = min(odd.items())
        raise ModelError(
            f"{key} is {value!r}, which is not supported; use the safetensors checkpoint of this model, or a file "
            "that was converted without this key"
        )


def _says_nothing(value: Any) -> bool:
    return not any(value) if isinstance(value, list) else not value


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    return ANY in harmless or value in harmless


def _rope_scaling(
    own: Mapping[str, Any], prefix: str, tensors: Mapping[str, ReaderTensor], head_dim: int
) -> dict[str, Any] | None:
    """The rotary scaling, by llama.cpp's rules: a factor without a type is linear, and a factor of 0 means none.
    `scale_linear` is the older name of the factor."""
    kind = own.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ModelError(f"{prefix}.scaling.type is {kind!r}; supported are 'none' and 'linear'")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 0.0)) if kind == "linear" else 0.0
    if factor not in (0.0, 1.0):
        if ROPE_FREQS in tensors and not (tensors[ROPE_FREQS].data == 1).all():
            raise ModelError(f"{prefix}.scaling.factor is {factor}, and {ROPE_FREQS} scales too; only one may")
        return {"rope_type": "linear", "factor": _shortest(factor)}
    if ROPE_FREQS not in tensors:
        return None
    # The file holds the result of Llama 3's scaling, not its parameters. All of Meta's models share the parameters
    # except for the factor, which is the largest divisor. Use them if they reproduce the file's divisors.
    divisors = tensors[ROPE_FREQS].data  # [head_dim / 2]
    scaling = RopeScaling("llama3", _shortest(float(divisors.max())), 1.0, 4.0, 8192)
    expected = divisors_of(scaling, plain_frequencies(own.get("rope.freq_base", 10000.0), head_dim))
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4, atol=0):
        raise ModelError(
            f"{ROPE_FREQS} does not hold the frequencies of Llama 3.1 to 3.3 with factor {scaling.factor}; "
            "use the safetensors checkpoint of this model, whose config.json gives the parameters"
        )
    return asdict(scaling)


def _write_tokenizer(folder: Path, gguf_path: Path, metadata: Mapping[str, Any]) -> None:
    beside, settings = gguf_path.parent, tokenizer_config(metadata)
    if (beside / "tokenizer.json").is_file():
        for name in (TOKENIZER, OLDER_CONFIG, "added_tokens.json"):
            if (beside / name).is_file():
                shutil.copyfile(beside / name, folder / name)
    else:
        build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    if (beside / "tokenizer_config.json").is_file():
        settings |= json.loads((beside / "tokenizer_config.json").read_text(encoding="utf-8"))
    _write_json(folder / "tokenizer_config.json", settings)


def _write_weights(
    path: Path,
    config: ModelConfig,
    sources: Mapping[str, ReaderTensor],
    rows_are_moved: bool,
    packed: bool,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write a safetensors file (see loading.py) tensor by tensor, so that memory never holds all weights."""
    shapes = weight_shapes(config)
    if odd := sorted(sources.keys() ^ shapes.keys()):
        there = "missing" if odd[0] in shapes else "not part of a supported model"
        raise ModelError(f"tensor '{odd[0]}' is {there} ({len(odd)} tensors are missing or unexpected)")
    header: dict[str, dict[str, Any]] = {}
    end = 0  # bytes
    for name, shape in shapes.items():
        stored = tuple(int(n) for n in reversed(sources[name].shape))  # GGUF counts dimensions from the fastest
        if stored != shape:
            raise ModelError(f"tensor '{name}' has shape {stored}, but by the metadata it should have {shape}")
        dtype = _dtype(sources[name]) if packed and not _is_gemmas_norm(name, config) else "F32"
        written = sources[name].data.shape if dtype == "U8" else shape
        begin, end = end, end + STORED_DTYPES[dtype].itemsize * int(np.prod(written))
        header[name] = {"dtype": dtype, "shape": [int(n) for n in written], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            values = _values(name, sources[name], header[name]["dtype"], config, rows_are_moved)
            file.write(values.data)
            if progress is not None:
                progress(header[name]["data_offsets"][1], end)


def _dtype(tensor: ReaderTensor) -> str:
    """The safetensors dtype for writing the tensor unchanged: U8 for the bytes of packed blocks."""
    kind = tensor.tensor_type.name
    return "U8" if kind in BLOCKS else "F16" if kind == "F16" else "F32"


def _values(name: str, tensor: ReaderTensor, dtype: str, config: ModelConfig, rows_are_moved: bool) -> npt.NDArray[Any]:
    """The tensor's values as `dtype`, with their rows in transformers' order, ready to be written."""
    from gguf.quants import dequantize

    if dtype != "F32":
        values: npt.NDArray[Any] = tensor.data  # [rows, bytes] uint8, or float16
    else:
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ModelError(f"tensor '{name}' has type {kind}, which cannot be dequantized") from None
    if _is_gemmas_norm(name, config):
        values = values - np.float32(1)
    elif name.endswith(("q_proj.weight", "q_proj.bias")) and rows_are_moved:
        values = _split_halves(values, config.num_attention_heads)
    elif name.endswith(("k_proj.weight", "k_proj.bias")) and rows_are_moved:
        values = _split_halves(values, config.num_key_value_heads)
    return np.ascontiguousarray(values, STORED_DTYPES[dtype])


def _is_gemmas_norm(name: str, config: ModelConfig) -> bool:
    return config.gemma and name.endswith("norm.weight")


def _split_halves(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorder each head's rows from llama.cpp's order (0, d/2, 1, d/2 + 1, ...) to transformers' (0, 1, ..., d - 1)."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, inputs]; a bias has no inputs
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _name(gguf_name: str, layer_names: Mapping[str, str]) -> str:
    """The tensor's name in transformers; a name without a counterpart stays as it is."""
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if gguf_name in whole:
        return whole[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, ("weight" | "bias") as kind] if part in layer_names:
            return f"model.layers.{layer}.{layer_names[part]}.{kind}"
    return gguf_name


def _shortest(value: float) -> float:
    """The shortest decimal with the same fp32 value. GGUF stores 1e-5 as an fp32, which reads 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
