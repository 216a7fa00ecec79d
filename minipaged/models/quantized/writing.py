"""Write quantized checkpoints that other programs can read: compressed-tensors' packed integers, and GPTQ's.

`gptq.py` and `compressed_tensors.py` describe the layouts of the tensors. These programs read them:

| layout | transformers | vLLM (by its source; not run) |
|---|---|---|
| compressed-tensors | with the package compressed-tensors; in floats (`dequantize=True`) without a GPU | yes |
| gptq, symmetric | with gptqmodel and optimum | 4 and 8 bits, unless groups are in act-order |
| gptq, with zeros | with gptqmodel and optimum | no |

A symmetric recipe (`sym`) is written in GPTQ's first format, which all readers support. A recipe with different zeros
is written in the second format, because some readers accept zeros of the first one from GPTQModel only: other tools
have written damaged ones. A model's other tensors are copied byte by byte.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from minipaged.errors import InvalidRequest
from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.models.json_files import read_json
from minipaged.models.loading import STORED_DTYPES, StoredTensor, checkpoint_tensors
from minipaged.models.quantized.format import Tensor, divided
from minipaged.models.quantized.gptq import ONES
from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import Array, Grouped, pack, round_to

Layout = Literal["compressed-tensors", "gptq"]
LAYOUTS: tuple[Layout, ...] = ("compressed-tensors", "gptq")

COPIED = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "vocab.*", "merges.txt"),
)
"""Files next to the weights that are copied, because they do not depend on the weights' format."""


def check_shapes(config: ModelConfig, recipe: Recipe, layout: Layout) -> None:
    """Raises InvalidRequest if the recipe does not fit the model's matrices or the layout does not support it."""
    if layout not in LAYOUTS:
        raise InvalidRequest(f"format is {layout!r}; choose {' or '.join(LAYOUTS)}")
    if recipe.method == "gptq" and recipe.act_order == "group" and layout != "gptq":
        raise InvalidRequest(
            f"act_order is 'group', which {layout} no longer supports; use act_order='static', or format='gptq'"
        )
    for name, shape in matrices(config).items():
        if shape[1] % recipe.size(shape[1]):
            common = np.gcd.reduce([inputs for _, inputs in matrices(config).values()])
            fitting = [size for size in range(8, common + 1) if common % size == 0]
            choices = (
                f"choose {', '.join(map(str, fitting))}, or -1 for whole rows" if fitting else "choose -1: whole rows"
            )
            raise InvalidRequest(
                f"group_size is {recipe.group_size}, which does not divide the {shape[1]} inputs of {name}; {choices}"
            )
        if layout == "gptq" and (shape[0] * recipe.bits % 32 or shape[1] * recipe.bits % 32):
            raise InvalidRequest(
                f"{name} has {shape[0]} x {shape[1]} weights, which do not fill 32-bit words with {recipe.bits}-bit "
                "codes, as the format gptq requires; use format='compressed-tensors'"
            )


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The shapes [out, in] of the weights that are quantized, by name: all matrices but the embedding and the head."""
    shapes = weight_shapes(config).items()
    return {name: (shape[0], shape[1]) for name, shape in shapes if len(shape) == 2 and ".layers." in name}


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor to be written to a file."""

    dtype: str
    """The dtype by safetensors' name."""
    shape: tuple[int, ...]
    read: Callable[[], Array]
    """A function that returns the values, from memory or from another file."""

    @classmethod
    def of(cls, dtype: str, values: Array) -> TensorToWrite:
        """A tensor with the given `values`, of a NumPy type as wide as `dtype`."""
        values = np.ascontiguousarray(values, STORED_DTYPES[dtype])
        return cls(dtype, values.shape, lambda: values)

    @classmethod
    def copied(cls, stored: StoredTensor) -> TensorToWrite:
        """A tensor with the bytes of one in another file."""
        count = int(np.prod(stored.shape))

        def read() -> Array:
            return np.fromfile(stored.file, STORED_DTYPES[stored.dtype], count=count, offset=stored.offset)

        return cls(stored.dtype, stored.shape, read)


def as_tensors(matrix: Grouped, layout: Layout, symmetric: bool) -> dict[str, TensorToWrite]:
    """The tensors of one matrix, by the suffix after the module's name."""
    num_outputs, num_groups = matrix.scales.shape
    if isinstance(matrix.zeros, int):
        zeros = np.full((num_groups, num_outputs), matrix.zeros, np.uint8)  # [groups, out]
    else:
        zeros = matrix.zeros.T  # [groups, out]
    zero_words = as_words(pack(zeros, matrix.bits))  # [groups, words]
    codes = as_words(matrix.codes)  # [out, words]
    if layout == "compressed-tensors":
        tensors = {
            ".weight_packed": TensorToWrite.of("I32", codes.view(np.int32)),
            ".weight_scale": TensorToWrite.of("F16", matrix.scales),
            ".weight_shape": TensorToWrite.of("I64", np.array(matrix.shape)),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = TensorToWrite.of("I32", zero_words.T.view(np.int32))
        return tensors
    if symmetric:  # the first format holds the zeros less 1, subtracted from whole words
        zero_words = zero_words - np.resize(np.array(ONES[matrix.bits], np.uint32), zero_words.shape[1])
    index = np.arange(matrix.shape[1]) // matrix.group_size if matrix.group_index is None else matrix.group_index
    return {
        ".qweight": TensorToWrite.of("I32", codes.T.view(np.int32)),
        ".qzeros": TensorToWrite.of("I32", zero_words.view(np.int32)),
        ".scales": TensorToWrite.of("F16", matrix.scales.T),
        ".g_idx": TensorToWrite.of("I32", index),
    }


def as_words(packed: Array) -> Array:
    """View bytes as words: [rows, bytes] uint8 -> [rows, words] uint32, with the last word padded with zeros."""
    num_words = divided(packed.shape[1], 4)
    words = np.zeros((len(packed), 4 * num_words), np.uint8)
    words[:, : packed.shape[1]] = packed
    return words.view("<u4")


def settings_of(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """The `quantization_config` to write in config.json."""
    whole_rows = recipe.group_size == -1
    if layout == "compressed-tensors":
        weights = {
            "num_bits": recipe.bits,
            "type": "int",
            "symmetric": recipe.symmetric,
            "strategy": "channel" if whole_rows else "group",
            "group_size": None if whole_rows else recipe.group_size,
            "dynamic": False,
        }
        group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    return {
        "quant_method": "gptq",
        "bits": recipe.bits,
        "group_size": recipe.group_size,
        "sym": recipe.symmetric,
        "desc_act": recipe.method == "gptq" and recipe.act_order == "group",
        "checkpoint_format": "gptq" if recipe.symmetric else "gptq_v2",
        "lm_head": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": ["minipaged"], "method": recipe.method},
    }


def write_quantized(
    source: Path, folder: Path, changed: Mapping[str, Grouped | Array], recipe: Recipe, layout: Layout
) -> None:
    """Write the model in `source`, with the weights in `changed` replaced, into the existing folder `folder`.

    A replacement that is an array gets the dtype of the tensor it replaces.
    """
    tensors: dict[str, TensorToWrite] = {}
    for name, stored in checkpoint_tensors(source).items():
        new = changed.get(name)
        if isinstance(new, Grouped):
            module = name.removesuffix(".weight")
            parts = as_tensors(new, layout, recipe.symmetric)
            tensors |= {f"{module}{part}": each for part, each in parts.items()}
        elif new is not None:
            tensors[name] = TensorToWrite.of(stored.dtype, as_stored(new, stored.dtype))
        else:
            tensors[name] = TensorToWrite.copied(stored)
    write_safetensors(folder / "model.safetensors", tensors)
    config = read_json(source / "config.json") | {"quantization_config": settings_of(recipe, layout)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in found(source, COPIED):
        shutil.copyfile(file, folder / file.name)


def as_stored(values: Array, dtype: str) -> Array:
    """Convert floats for writing as `dtype`: BF16 becomes the upper halves of float32."""
    if dtype == "BF16":
        halves: Array = round_to(values.astype(np.float32), Tensor(values, dtype).rounding).view(np.uint32) >> 16
        return halves
    return values


def found(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The files in `folder` whose names match one of the patterns, sorted."""
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def write_safetensors(path: Path, tensors: Mapping[str, TensorToWrite]) -> None:
    """Write a safetensors file (see loading.py) tensor by tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0  # bytes
    for name, tensor in tensors.items():
        begin, end = end, end + STORED_DTYPES[tensor.dtype].itemsize * int(np.prod(tensor.shape))
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.read().data)
