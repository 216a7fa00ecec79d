"""The interface of a quantization format: the tensors that hold one matrix, and how to combine them.

`loading.py` gets the list of tensors from the format, checks their shapes and dtypes, reads them, and passes them back
to the format. Each format's file therefore contains only the format's arithmetic and no file access.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from minipaged.errors import ModelError
from minipaged.models.quantized.stored import Array, Rounding, StoredMatrix

FLOATS = ("F32", "F16", "BF16")
ROUNDINGS: dict[str, Rounding] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The requirements for one tensor of a matrix."""

    dtypes: tuple[str, ...]
    """The allowed dtypes by safetensors' names: "I32", ..."""
    shapes: tuple[Shape, ...]
    """The allowed shapes. Empty: any shape."""
    required: bool = True


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor that was read from a checkpoint."""

    values: Array
    """The tensor's elements: BF16 as float32, 8-bit floats as their bits in uint8."""
    dtype: str
    """The dtype in the checkpoint, by safetensors' name."""

    @property
    def rounding(self) -> Rounding:
        return ROUNDINGS[self.dtype]


class Format(ABC):
    """The storage format of all matrices in a checkpoint, or of some modules' matrices."""

    name: str
    """The format's name in error messages: "GPTQ, 4 bits, groups of 128"."""

    @abstractmethod
    def parts(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """The tensors that hold a matrix [out, in], by the suffix after the module's name: ".qweight", ...

        Raises ModelError for a shape that the format cannot store.
        """

    @abstractmethod
    def matrix(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """The matrix that the parts in `tensors` hold; optional parts may be missing. Raises ModelError for invalid
        contents, with a message that begins with the part's name."""


class Formats(ABC):
    """The formats of all modules in a checkpoint."""

    kv_cache_dtype: str = "auto"
    """"int8" or "fp8" if the checkpoint has scales for storing keys and values in that type."""

    @abstractmethod
    def of(self, module: str, dtypes: Mapping[str, str]) -> Format | None:
        """The format of a module ("model.layers.0.mlp.up_proj"), or None if its weight is not quantized.

        `dtypes`: the dtypes of all tensors in the checkpoint, by name.
        """


Value = TypeVar("Value")


def setting(config: Mapping[str, Any], key: str, known: tuple[Value, ...], default: Value | None = None) -> Value:
    """Return `config[key]`. Raises ModelError unless it is one of `known`."""
    value = config.get(key, default)
    if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
        raise ModelError(
            f"quantization_config: {key} = {value!r} is not supported; use one of {', '.join(map(repr, known))}"
        )
    return next(each for each in known if each == value)


def group_size_of(config: Mapping[str, Any], key: str = "group_size", default: int | None = None) -> int | None:
    """The number of inputs in a group. None, written as -1 or null, means the whole row."""
    value = config.get(key, default)
    if value in (-1, None):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"quantization_config: {key} = {value!r}; expected a whole number, 1 or more, or -1")
    return value


def pattern_of(text: str) -> re.Pattern[str]:
    """Compile a regular expression. Raises ModelError if it is invalid."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ModelError(f"quantization_config: {text!r} is not a regular expression ({error})") from None


def divided(count: int, size: int) -> int:
    """The number of parts of `size` that hold `count`: the quotient, rounded up."""
    return -(-count // size)


def check_finite(tensors: Mapping[str, Tensor], *names: str) -> None:
    """Raise ModelError if a scale is infinite or NaN: it would make all logits NaN."""
    for name in names:
        if name in tensors and not np.isfinite(tensors[name].values).all():
            raise ModelError(f"{name} holds values that are infinite or NaN")


def check_float8(tensors: Mapping[str, Tensor], name: str) -> None:
    """Raise ModelError if an 8-bit float has one of the two codes for NaN."""
    codes = tensors[name].values
    if (codes == 0x7F).any() or (codes == 0xFF).any():
        raise ModelError(f"{name} holds values that are infinite or NaN")
