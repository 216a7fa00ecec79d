"""AWQ, version "gemm": 4-bit codes packed along the outputs, eight in each 32-bit word (AutoAWQ, GPTQModel).

    qweight   int32 [in, out / 8]
    qzeros    int32 [groups, out / 8]
    scales    float [groups, out]

    w = (q - z) * s

From the lowest bits on, the eight codes of a word belong to outputs 8c + 0, 2, 4, 6, 1, 3, 5, 7: the order in which
AutoAWQ's GPU kernel unpacks them. AWQ also scales each input of a matrix, and divides the preceding norm or matrix by
the same factor; the stored weights already include that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minipaged.errors import ModelError
from minipaged.models.quantized.format import (
    FLOATS,
    Format,
    Formats,
    Tensor,
    TensorSpec,
    check_finite,
    divided,
    group_size_of,
    setting,
)
from minipaged.models.quantized.stored import Array, Grouped, StoredMatrix, pack

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of each of eight neighbouring outputs."""


class AWQ(Format):
    """The AWQ format with one checkpoint's settings, which are the same for all modules."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        version = str(config.get("version", config.get("checkpoint_format", "gemm"))).lower()
        if version != "gemm" or config.get("backend") == "llm-awq":  # other backends are kernels for the same layout
            layout = f"version {version!r}" if version != "gemm" else "backend 'llm-awq'"
            raise ModelError(
                f"quantization_config: AWQ of {layout} packs its numbers in a different order and is not supported; "
                "use a checkpoint of version 'gemm', the most common one"
            )
        setting({"bits": config.get("bits", config.get("w_bit"))}, "bits", (4,))
        key = "group_size" if "group_size" in config else "q_group_size"
        self.group_size = group_size_of(config, key)
        self.name = f"AWQ, 4 bits, groups of {self.group_size or 'a whole row'}"

    def parts(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        outputs, inputs = shape
        if outputs % 8:
            raise ModelError(f"a matrix of {outputs} x {inputs} does not fill 32-bit words with 8 outputs each")
        groups = divided(inputs, self.group_size or inputs)
        return {
            ".qweight": TensorSpec(("I32",), ((inputs, outputs // 8),)),
            ".qzeros": TensorSpec(("I32",), ((groups, outputs // 8),)),
            ".scales": TensorSpec(FLOATS, ((groups, outputs),)),
        }

    def matrix(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        check_finite(tensors, ".scales")
        outputs, inputs = shape
        codes = np.empty((outputs, divided(inputs, 2)), np.uint8)
        zeros = np.empty((outputs, len(tensors[".qzeros"].values)), np.uint8)
        for i in range(8):  # an eighth of the matrix at a time
            codes[i::8] = pack(_field(tensors[".qweight"].values, i), 4)
            zeros[i::8] = _field(tensors[".qzeros"].values, i)
        return Grouped(
            shape=shape,
            rounding=tensors[".scales"].rounding,
            bits=4,
            codes=codes,
            scales=np.ascontiguousarray(tensors[".scales"].values.T),
            zeros=zeros,
            group_size=self.group_size or inputs,
        )


def _field(words: Array, output: int) -> Array:
    """Words [rows, out / 8] int32 -> the codes of every eighth output, from `output` on: [out / 8, rows] uint8."""
    byte, is_upper = divmod(PLACES[output], 2)
    pairs = words.view(np.uint8)[:, byte::4]  # [rows, out / 8]: one byte of each word
    return np.ascontiguousarray((pairs >> np.uint8(4) if is_upper else pairs & np.uint8(15)).T)


class AWQFormats(Formats):
    """AWQ for all modules, except those with an unquantized weight."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.plain = AWQ(config)

    def of(self, module: str, dtypes: Mapping[str, str]) -> Format | None:
        is_plain = f"{module}.weight" in dtypes and f"{module}.qweight" not in dtypes
        return None if is_plain else self.plain
