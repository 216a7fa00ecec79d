"""What a format of quantized weights has to say: which tensors hold one matrix, and how they make it up.

`loading.py` asks, checks that the tensors are there with the shapes and types named, reads them, and hands them back.
So each format's file has its own arithmetic in it, and no reading.
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
    """What one tensor of a matrix has to be."""

    dtypes: tuple[str, ...]
    """Safetensors' names: "I32", ..."""
    shapes: tuple[Shape, ...]
    """Any of these."""
    required: bool = True


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, read."""

    values: Array
    """BF16 as float32, floats of 8 bits as their bits in uint8."""
    dtype: str
    """As it was stored."""

    @property
    def rounding(self) -> Rounding:
        return ROUNDINGS[self.dtype]


class Format(ABC):
    """How the matrices of one checkpoint, or of some of its modules, are stored."""

    name: str
    """As an error has it: "GPTQ, 4 bits, groups of 128"."""

    @abstractmethod
    def parts(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """The tensors that hold a matrix [out, in], by what stands behind the module's name: ".qweight", ...

        Raises ModelError for a shape that the format cannot hold.
        """

    @abstractmethod
    def matrix(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """The matrix, from those of its parts that are there. Raises ModelError, beginning with a part's name, for
        contents that cannot be."""


class Formats(ABC):
    """Which module of a checkpoint is stored how."""

    kv_cache_dtype: str = "auto"
    """"int8" or "fp8" where the checkpoint has scales with which keys and values are to be rounded."""

    @abstractmethod
    def of(self, module: str, dtypes: Mapping[str, str]) -> Format | None:
        """The format of a module ("model.layers.0.mlp.up_proj"), or None: its weight is stored as it is.

        `dtypes`: of all tensors in the checkpoint, by name.
        """


Value = TypeVar("Value")


def setting(config: Mapping[str, Any], key: str, known: tuple[Value, ...], default: Value | None = None) -> Value:
    """`config[key]`, which has to be one of `known`."""
    value = config.get(key, default)
    if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
        raise ModelError(
            f"quantization_config: {key} = {value!r} is not read; supported are {', '.join(map(repr, known))}"
        )
    return next(each for each in known if each == value)


def group_size_of(config: Mapping[str, Any], key: str = "group_size", default: int | None = None) -> int | None:
    """Inputs of a group; None (written as -1 or null): all of a row."""
    value = config.get(key, default)
    if value in (-1, None):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"quantization_config: {key} = {value!r}; expected a whole number, 1 or more, or -1")
    return value


def pattern_of(text: str) -> re.Pattern[str]:
    """A regular expression, which has to be one."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ModelError(f"quantization_config: {text!r} is no regular expression ({error})") from None


def divided(count: int, size: int) -> int:
    """How many parts of `size` it takes to hold `count`."""
    return -(-count // size)


def check_finite(tensors: Mapping[str, Tensor], *names: str) -> None:
    """Scales have to be numbers: one that is none would make all logits none."""
    for name in names:
        if name in tensors and not np.isfinite(tensors[name].values).all():
            raise ModelError(f"{name} holds numbers that are infinite or none at all")


def check_float8(tensors: Mapping[str, Tensor], name: str) -> None:
    """The same for floats of 8 bits, of which two codes are no numbers."""
    codes = tensors[name].values
    if (codes == 0x7F).any() or (codes == 0xFF).any():
        raise ModelError(f"{name} holds numbers that are infinite or none at all")
