"""Reads a checkpoint folder: `config.json` and the weights in safetensors files.

A safetensors file is a table of contents and then raw bytes:

    8 bytes          length N of the header, little endian
    N bytes          JSON: {name: {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [begin, end]}, ...}
    the rest         the tensors, C order, little endian; offsets count from here

A large model is split into several such files, and `model.safetensors.index.json` says which tensor is where.

The header is read by hand, since the safetensors library's NumPy side cannot give bf16, which most Llamas are
published in. Each tensor's bytes go straight into its own array: nothing is mapped or read twice, so that loading
needs the memory of the weights and, where a dtype is converted, of one tensor more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minipaged.errors import ModelError
from minipaged.models.config import ModelConfig, token_ids, weight_shapes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

STORED_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""How the bytes of each dtype are read. NumPy has no bf16: its 16 bits are read as an integer and widened."""


def load_config(folder: Path) -> ModelConfig:
    """The model's shape, from `config.json`; the tokens that end a text from `generation_config.json` if it says."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} holds no config.json; name a folder in the format of the Hugging Face hub")
    config = ModelConfig.from_dict(read_json(path))
    # A chat model often ends its turn with another token than the base model ends a document with. transformers
    # lets generation_config.json decide, and so do we.
    generation = folder / "generation_config.json"
    if generation.is_file() and (eos := token_ids(read_json(generation).get("eos_token_id"), "eos_token_id")):
        config = replace(config, eos_token_ids=eos)
    return config


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: npt.DTypeLike = np.float32,
    progress: Callable[[int, int], None] | None = None,
    convert: Callable[[npt.NDArray[Any]], Any] | None = None,
) -> dict[str, Any]:
    """All weights of the model by name, as arrays of `dtype` that own their memory, or as what `convert` makes of each.

    `progress` is called after each tensor with (tensors read, tensors in all). Raises ModelError for a tensor that
    is missing, unexpected, of the wrong shape or of a dtype that is not a float, and for a file that is cut short.
    """
    shapes = weight_shapes(config)
    stored = _contents(folder)
    if missing := sorted(shapes.keys() - stored.keys()):
        raise ModelError(
            f"{folder}: tensor '{missing[0]}' is missing ({len(missing)} of {len(shapes)} are); "
            f"config.json asks for it with shape {shapes[missing[0]]}"
        )
    if surplus := sorted(name for name in stored.keys() - shapes.keys() if not _is_redundant(name, config)):
        raise ModelError(
            f"{folder}: tensor '{surplus[0]}' has no place in the model that config.json describes "
            f"({len(surplus)} such tensors); is it the config.json of these weights?"
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ModelError(
                f"{stored[name].file}: tensor '{name}' has shape {stored[name].shape}, but config.json asks for {shape}"
            )
    weights: dict[str, Any] = {}
    # In the order of the files, so that a disk reads ahead.
    for name in sorted(shapes, key=lambda name: (stored[name].file, stored[name].offset)):
        values = _read_tensor(stored[name])
        weights[name] = convert(values) if convert else values.astype(dtype, copy=False)
        if progress is not None:
            progress(len(weights), len(shapes))
    return weights


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor's bytes are."""

    file: Path
    offset: int
    """In bytes, from the start of the file."""
    shape: tuple[int, ...]
    dtype: str
    """A key of STORED_DTYPES."""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The table of contents of one safetensors file, checked against the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if 8 + header_size > size:
            raise ModelError(f"{path} is truncated: {size} bytes, but its header alone takes {8 + header_size}")
        header = _parse_json(file.read(header_size), path)
    header.pop("__metadata__", None)
    tensors, end_of_file = {}, 8 + header_size
    for name, entry in header.items():
        tensor, num_bytes = _parse_entry(path, name, entry, data_start=8 + header_size)
        tensors[name] = tensor
        end_of_file = max(end_of_file, tensor.offset + num_bytes)
    if size < end_of_file:
        raise ModelError(
            f"{path} is truncated: {size} bytes, expected {end_of_file}; fetch it again "
            "(a model known by name: minipaged model fetch --again)"
        )
    return tensors


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> tuple[StoredTensor, int]:
    """One line of the table of contents, and how many bytes the tensor takes."""
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path} is damaged: its entry for '{name}' reads {entry}") from None
    if dtype not in STORED_DTYPES:
        raise ModelError(f"{path}: tensor '{name}' has dtype {dtype}; supported are {', '.join(STORED_DTYPES)}")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ModelError(f"{path} is damaged: its entry for '{name}' reads {entry}")
    num_bytes = math.prod(shape) * STORED_DTYPES[dtype].itemsize
    if end - begin != num_bytes:
        raise ModelError(
            f"{path} is damaged: tensor '{name}' of shape {shape} and dtype {dtype} takes {num_bytes} bytes, "
            f"but {end - begin} are set aside for it"
        )
    return StoredTensor(path, data_start + begin, shape, dtype), num_bytes


def _contents(folder: Path) -> dict[str, StoredTensor]:
    """The tables of contents of all of a model's files, as one."""
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise ModelError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}; only safetensors checkpoints and .gguf files are read"
        )
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{folder / INDEX} has no 'weight_map'")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise ModelError(f"{folder}: {INDEX} names the file {file}, which is not there")
        tensors |= read_header(folder / file)
    return tensors


def _read_tensor(stored: StoredTensor) -> npt.NDArray[Any]:
    dtype, num_values = STORED_DTYPES[stored.dtype], math.prod(stored.shape)
    values: npt.NDArray[Any] = np.fromfile(stored.file, dtype, count=num_values, offset=stored.offset)
    values = values.reshape(stored.shape)
    if stored.dtype == "BF16":
        # bf16 is the upper half of an fp32: sign, exponent and the first 7 bits of the fraction.
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return values


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints carry although they follow from the rest."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`, or ModelError."""
    return _parse_json(path.read_bytes(), path)


def _parse_json(data: bytes, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise ModelError(f"{path} is damaged: its JSON does not parse ({error})") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} is damaged: its JSON is not an object")
    return parsed
