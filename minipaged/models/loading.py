"""Read a checkpoint folder: `config.json` and the weights in safetensors files.

A safetensors file is a table of contents followed by raw bytes:

    8 bytes          length N of the header, little endian
    N bytes          JSON: {name: {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [begin, end]}, ...}
    the rest         the tensors, C order, little endian; offsets count from here

A large model is split into several such files, and `model.safetensors.index.json` lists the file of each tensor.

This module parses the header itself, because the safetensors library cannot return NumPy arrays of bf16, the dtype of
most published Llamas, or of 8-bit floats. Each tensor's bytes are read once, straight into its own array, without
memory mapping. Loading therefore needs the memory of the weights, plus one tensor if a dtype is converted.

A quantized matrix consists of several tensors: packed codes, scales, zeros. Its format (`quantized/`) names them and
combines them into one `StoredMatrix`, which is still packed.

A rank with a part of a model (`shards.py`) reads only the bytes of that part. Rows of a matrix are contiguous in the
file; columns are a piece of each row. Quantized matrices are the exception: the rank reads each one whole and keeps
its part, because only the formats know how codes and groups are laid out.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minipaged.errors import ModelError
from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.models.end_tokens import end_token_ids
from minipaged.models.json_files import parse_json, read_json
from minipaged.models.quantized import check_unquantized, formats_of
from minipaged.models.quantized.format import FLOATS, Format, Formats, Tensor, TensorSpec
from minipaged.models.quantized.stored import StoredMatrix
from minipaged.models.shards import Shard, cut, cut_weights, local_name, part_of, shard_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PIECE = 1 << 20
"""The number of elements, or bytes, compared at a time."""

STORED_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "BF16": "<u2",
        "F8_E4M3": "u1",
        "F8_E5M2": "u1",
        "F8_E8M0": "u1",
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "i1",
        "U8": "u1",
        "BOOL": "u1",
    }.items()
}
"""The NumPy dtype for reading each safetensors dtype. NumPy has no bf16: its 16 bits are read as an integer and widened
to float32. 8-bit floats stay integers."""

QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json")
"""Files in which older versions of AutoGPTQ and AutoAWQ wrote the `quantization_config` that is now in config.json."""


def load_config(folder: Path) -> ModelConfig:
    """The model's configuration, from `config.json`, with the end tokens of all files that name some.

    As in transformers, the embedding and the head are not tied if the checkpoint has both and they differ.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} holds no config.json; name a folder in the format of the Hugging Face hub")
    config = ModelConfig.from_dict(read_json(path))
    if formats := load_formats(folder):  # raises for an unsupported format
        config = replace(config, kv_cache_dtype=formats.kv_cache_dtype)
    if config.tie_word_embeddings and any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        # A separate head in the checkpoint takes precedence over config.json.
        stored = checkpoint_tensors(folder)
        config = replace(config, tie_word_embeddings=not {HEAD, EMBEDDING} <= stored.keys() or _head_is_tied(stored))
    return replace(config, eos_token_ids=end_token_ids(folder, config))


def load_formats(folder: Path) -> Formats | None:
    """The formats of the checkpoint's quantized matrices, or None if it has none.

    Raises ModelError for a format that is not supported.
    """
    config = read_json(folder / "config.json")
    quantization = config.get("quantization_config") or config.get("compression_config")
    files = (folder / name for name in QUANTIZATION_FILES)
    if not quantization and (found := next((file for file in files if file.is_file()), None)):
        quantization = read_json(found)
    if not quantization:
        return None
    try:
        if not isinstance(quantization, dict):
            raise ModelError(f"quantization_config reads {quantization!r}; expected an object")
        return formats_of(quantization)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: npt.DTypeLike = np.float32,
    progress: Callable[[int, int], None] | None = None,
    convert: Callable[[npt.NDArray[Any]], Any] | None = None,
    shard: Shard | None = None,
) -> dict[str, Any]:
    """Return all weights of the model by name.

    Each is an array of `dtype` that owns its memory, or the result of `convert` on the array; a quantized matrix is a
    StoredMatrix. `config` describes the whole model. `shard`: return only this rank's weights, under their names in
    the rank's own part (`shards.local_config`).

    If the checkpoint has scales for keys and values, they are included as float32 arrays [1] or [heads]:
    "model.layers.0.self_attn.k_scale", ...

    `progress` is called after each weight with (weights read, weights to read). Raises ModelError for a tensor that is
    missing, unexpected, of the wrong shape or dtype, or has invalid contents, and for a truncated file. Every rank
    checks the whole model.
    """
    shard = shard or shard_of(config, rank=0, size=1)
    stored = checkpoint_tensors(folder)
    if config.tie_word_embeddings and EMBEDDING not in stored and HEAD in stored:  # tied, but stored as the head
        stored[EMBEDDING] = stored.pop(HEAD)
    wanted = _wanted(folder, config, stored)
    _check(folder, config, wanted, stored)
    parts = {each.name: part for each in wanted if (part := cut(config, shard, each.name)) is not None}
    weights: dict[str, Any] = {}
    # Read in the order of the files, so that the disk can read ahead.
    places = {each.name: min((stored[t].file, stored[t].offset) for t in each.parts if t in stored) for each in wanted}
    for each in sorted((each for each in wanted if each.name in parts), key=lambda each: places[each.name]):
        name, part = local_name(shard, each.name), parts[each.name]
        if each.format is not None:
            whole = _read_matrix(each, each.format, stored)
            kept = part_of(whole, part, each.name)
            weights[name] = whole if kept is whole else copy.deepcopy(kept)  # a view would keep the whole in memory
        else:
            values = _read_tensor(stored[each.name], part)
            if config.gemma and name.endswith("norm.weight"):  # stored as w - 1; bfloat16 and float16 would round w
                values = values.astype(np.result_type(values, np.float32)) + 1
            weights[name] = convert(values) if convert else values.astype(dtype, copy=False)
        if progress is not None:
            progress(len(weights), len(parts))
    return weights | cut_weights(config, shard, _kv_scales(config, stored))


def static_scales(config: ModelConfig, weights: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """The scales for keys and values among the weights: [layers, 2, kv_heads], where 2 is keys and values.

    Raises ModelError if a layer has none.
    """
    scales = np.empty((config.num_hidden_layers, 2, config.num_key_value_heads), np.float32)
    for layer, (i, part) in itertools.product(range(config.num_hidden_layers), enumerate("kv")):
        name = f"model.layers.{layer}.self_attn.{part}_scale"
        if name not in weights:
            raise ModelError(
                f"tensor '{name}' is missing, though config.json has a kv_cache_scheme; set "
                f"kv_cache_dtype='{config.kv_cache_dtype}' to compute the scales at run time"
            )
        scales[layer, i] = weights[name]  # [1] or [kv_heads]
    return scales


@dataclass(frozen=True, slots=True)
class Wanted:
    """One weight of the model, with the tensors that it is read from."""

    name: str
    shape: tuple[int, ...]
    parts: dict[str, TensorSpec]
    """The tensors by full name."""
    format: Format | None
    """The weight's quantization format. None: it is one tensor of floats."""

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def _wanted(folder: Path, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> list[Wanted]:
    formats = load_formats(folder)
    if formats is None:
        try:
            check_unquantized(stored)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from None
    dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    wanted = []
    shapes = weight_shapes(config)
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        format_ = formats.of(module, dtypes) if formats and len(shape) == 2 else None
        if format_ is None:
            wanted.append(Wanted(name, shape, {name: TensorSpec(FLOATS, (shape,))}, None))
            continue
        try:
            parts = format_.parts((shape[0], shape[1]))
        except ModelError as error:
            raise ModelError(f"{folder}: '{module}' cannot be stored as {format_.name}: {error}") from None
        if f"{module}.bias" in shapes:
            parts.pop(".bias", None)  # the bias is a separate weight
        wanted.append(Wanted(name, shape, {f"{module}{part}": each for part, each in parts.items()}, format_))
    return wanted


def _check(folder: Path, config: ModelConfig, wanted: list[Wanted], stored: Mapping[str, StoredTensor]) -> None:
    """Raises ModelError unless the stored tensors are the wanted ones."""
    parts = {name: (part, each) for each in wanted for name, part in each.parts.items()}
    required = [name for name, (part, _) in parts.items() if part.required]
    if missing := sorted(set(required) - stored.keys()):
        part, each = parts[missing[0]]
        raise ModelError(
            f"{folder}: tensor '{missing[0]}' is missing ({len(missing)} of {len(required)} are); "
            f"{_asking(each)} asks for it{_with_shape(part)}"
        )
    others = stored.keys() - parts.keys() - _kv_names(config).keys()
    surplus = sorted(name for name in others if not _is_redundant(name, config, stored))
    if surplus:
        raise ModelError(
            f"{folder}: tensor '{surplus[0]}' has no place in the model that config.json describes "
            f"({len(surplus)} such tensors); is it the config.json of these weights?"
        )
    for name, (part, each) in parts.items():
        if name not in stored:
            continue
        tensor = stored[name]
        if tensor.dtype not in part.dtypes:
            raise ModelError(
                f"{tensor.file}: tensor '{name}' has dtype {tensor.dtype}; supported are {', '.join(part.dtypes)}"
            )
        if part.shapes and tensor.shape not in part.shapes:
            raise ModelError(
                f"{tensor.file}: tensor '{name}' has shape {tensor.shape}, but {_asking(each)} asks for "
                f"{' or '.join(map(str, part.shapes))}"
            )


def _asking(wanted: Wanted) -> str:
    return "config.json" if wanted.format is None else f"config.json ({wanted.format.name})"


def _with_shape(part: TensorSpec) -> str:
    return f" with shape {part.shapes[0]}" if part.shapes else ""


def _read_matrix(wanted: Wanted, format_: Format, stored: Mapping[str, StoredTensor]) -> StoredMatrix:
    read = {
        name.removeprefix(wanted.module): Tensor(_read_tensor(stored[name]), stored[name].dtype)
        for name in wanted.parts
        if name in stored
    }
    try:
        return format_.matrix((wanted.shape[0], wanted.shape[1]), read)
    except ModelError as error:
        part = str(error).partition(" ")[0]
        file = stored[f"{wanted.module}{part}"].file
        raise ModelError(f"{file}: tensor '{wanted.module}{part}'{str(error).removeprefix(part)}") from None


def _kv_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The names that tools give to scales for keys and values, each with the names that we use."""
    names: dict[str, tuple[str, ...]] = {}
    for i in range(config.num_hidden_layers):
        attention = f"model.layers.{i}.self_attn"
        for part in "kv":
            for name in (f"{part}_scale", f"{part}_proj.{part}_scale", f"{part}_proj.output_scale"):
                names[f"{attention}.{name}"] = (f"{attention}.{part}_scale",)
        names[f"{attention}.kv_scale"] = (f"{attention}.k_scale", f"{attention}.v_scale")
    return names


def _kv_scales(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, npt.NDArray[np.float32]]:
    """The checkpoint's scales for keys and values: one per layer, or one per KV head of a layer."""
    scales: dict[str, npt.NDArray[np.float32]] = {}
    for name, ours in _kv_names(config).items():
        if name not in stored:
            continue
        tensor = stored[name]
        if tensor.dtype not in FLOATS or math.prod(tensor.shape) not in (1, config.num_key_value_heads):
            raise ModelError(
                f"{tensor.file}: tensor '{name}' has dtype {tensor.dtype} and shape {tensor.shape}; expected a float, "
                f"or one for each of {config.num_key_value_heads} heads"
            )
        values = _read_tensor(tensor).astype(np.float32).reshape(-1)
        if not (np.isfinite(values) & (values > 0)).all():
            raise ModelError(f"{tensor.file}: tensor '{name}' holds scales that are not positive numbers")
        for each in ours:
            if not np.array_equal(scales.setdefault(each, values), values):
                raise ModelError(f"{tensor.file}: tensor '{name}' and another one for '{each}' differ; leave only one")
    return scales


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one tensor's bytes, with its shape and dtype."""

    file: Path
    offset: int
    """Bytes from the start of the file."""
    shape: tuple[int, ...]
    dtype: str
    """A key of STORED_DTYPES."""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The table of contents of one safetensors file, checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if 8 + header_size > size:
            raise ModelError(f"{path} is truncated: {size} bytes, but its header alone takes {8 + header_size}")
        header = parse_json(file.read(header_size), path)
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
    """One entry of the table of contents, and the tensor's size in bytes."""
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


def checkpoint_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors in a model's files, by name.

    As in transformers, a whole `model.safetensors` takes precedence over an index. If several files hold a tensor, the
    index chooses one.
    """
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise ModelError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}; only safetensors checkpoints and .gguf files are read"
        )
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{folder / INDEX} has no 'weight_map' from tensors to names of files")
    files: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or "\\" in file:
            raise ModelError(f"{folder / INDEX} names the file {file!r}; only names of files beside it are read")
        if not (folder / file).is_file():
            raise ModelError(f"{folder}: {INDEX} names the file {file}, which is not there")
        files[file] = read_header(folder / file)
    tensors: dict[str, StoredTensor] = {}
    for name in sorted({*weight_map, *itertools.chain.from_iterable(files.values())}):
        holders = [file for file, header in files.items() if name in header]
        chosen = weight_map.get(name, holders[0] if len(holders) == 1 else None)
        if chosen is None:
            raise ModelError(
                f"{folder}: {' and '.join(holders)} each have a tensor '{name}', and {INDEX} does not say which "
                "counts; add it there, or leave it in one file only"
            )
        if chosen not in holders:
            raise ModelError(f"{folder}: {INDEX} says that tensor '{name}' is in {chosen}, which does not hold it")
        tensors[name] = files[chosen][name]
    return tensors


def _read_tensor(stored: StoredTensor, part: tuple[slice, ...] = ()) -> npt.NDArray[Any]:
    """Read a tensor, or neighbouring rows or columns of it."""
    dtype, shape, offset = STORED_DTYPES[stored.dtype], stored.shape, stored.offset
    if part:
        rows = range(shape[0])[part[0]]
        offset += rows.start * math.prod(shape[1:]) * dtype.itemsize
        shape = (len(rows), *shape[1:])
    values: npt.NDArray[Any]
    if part[1:] and len(columns := range(shape[1])[part[1]]) < shape[1]:
        values = _read_columns(stored.file, offset, dtype, (shape[0], shape[1]), columns)
    else:
        values = np.fromfile(stored.file, dtype, count=math.prod(shape), offset=offset).reshape(shape)
    if stored.dtype == "BF16":
        # bf16 is the upper half of fp32: sign, exponent and the first 7 bits of the fraction.
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return values


def _read_columns(
    path: Path, offset: int, dtype: np.dtype[Any], shape: tuple[int, int], columns: range
) -> npt.NDArray[Any]:
    """Read neighbouring columns of the matrix [rows, columns] at `offset`, row by row."""
    values = np.empty((shape[0], len(columns)), dtype)
    with path.open("rb", buffering=0) as file:  # a buffer would also read the bytes in between
        for i, row in enumerate(values):
            file.seek(offset + (i * shape[1] + columns.start) * dtype.itemsize)
            file.readinto(row)
    return values


def _is_redundant(name: str, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor carries no information beyond the rest: a tied head, or rotary frequencies, which are computed
    from config.json, as in transformers."""
    is_tied_head = name == HEAD and config.tie_word_embeddings and _head_is_tied(stored)
    return is_tied_head or name.endswith("rotary_emb.inv_freq")


def _head_is_tied(stored: Mapping[str, StoredTensor]) -> bool:
    """Whether the head and the embedding hold the same numbers. They are compared piece by piece."""
    one, other = stored[EMBEDDING], stored[HEAD]
    if one.shape != other.shape or not one.shape:
        return False
    if one.dtype == other.dtype:  # compare bytes, at the speed of reading
        return _same_bytes(one, other)
    if not {one.dtype, other.dtype} <= set(FLOATS):
        return False
    step = max(1, PIECE // max(1, math.prod(one.shape[1:])))  # rows
    pieces = ((slice(row, row + step),) for row in range(0, one.shape[0], step))
    return all(np.array_equal(_read_tensor(one, part), _read_tensor(other, part)) for part in pieces)


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors of the same dtype and shape hold the same bytes."""
    left = math.prod(one.shape) * STORED_DTYPES[one.dtype].itemsize
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        while left > 0:
            if first.read(min(left, PIECE)) != second.read(min(left, PIECE)):
                return False
            left -= PIECE
    return True
