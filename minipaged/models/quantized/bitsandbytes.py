"""bitsandbytes' NF4 (and FP4): 4-bit codes, which index a table of 16 values, with a scale for every 64 weights.

    weight                                    uint8 [out * in / 2, 1]    2 weights per byte, the first in the upper half
    weight.absmax                             float32 [blocks]
    weight.quant_map                          float32 [16]               the table
    weight.quant_state.bitsandbytes__nf4      uint8, a JSON text         shape, blocksize, dtype

    w = table[q] * absmax of its block

Blocks run through the matrix row by row. With double quantization the scales are quantized too: absmax is then a uint8
index into `nested_quant_map` [256]. The scale is the value there, times `nested_absmax` of its block of 256 scales,
plus one offset for the whole matrix.
"""

from __future__ import annotations

import json
import math
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
    setting,
)
from minipaged.models.quantized.stored import Array, Codebook4, Rounding, StoredMatrix, pack, unpack

BLOCK, NESTED_BLOCK = 64, 256


class NF4(Format):
    """The NF4 or FP4 format with one checkpoint's settings, which are the same for all modules."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("load_in_8bit") or not config.get("load_in_4bit"):
            raise ModelError(
                "quantization_config: bitsandbytes' LLM.int8() is not supported; use a 4-bit checkpoint (NF4), or the "
                "original"
            )
        kind: str = setting(config, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        setting(config, "bnb_4bit_quant_storage", ("uint8",), "uint8")
        self.double: bool = setting(config, "bnb_4bit_use_double_quant", (True, False), False)
        self.state = f".weight.quant_state.bitsandbytes__{kind}"
        self.name = f"bitsandbytes, {kind}"

    def parts(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        blocks = divided(math.prod(shape), BLOCK)
        parts = {
            ".weight": TensorSpec(("U8",), ((divided(math.prod(shape), 2), 1),)),
            ".weight.absmax": TensorSpec(("U8" if self.double else "F32",), ((blocks,),)),
            ".weight.quant_map": TensorSpec(("F32",), ((16,),)),
            self.state: TensorSpec(("U8",), ()),
        }
        if self.double:
            parts[".weight.nested_absmax"] = TensorSpec(("F32",), ((divided(blocks, NESTED_BLOCK),),))
            parts[".weight.nested_quant_map"] = TensorSpec(("F32",), ((256,),))
        return parts

    def matrix(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        names = (".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map")
        check_finite(tensors, *names)
        state = self._state(tensors[self.state].values, shape)
        outputs, inputs = shape
        scales = tensors[".weight.absmax"].values  # [blocks]
        if self.double:
            levels = tensors[".weight.nested_quant_map"].values[scales]  # [blocks]
            levels *= np.repeat(tensors[".weight.nested_absmax"].values, NESTED_BLOCK)[: len(scales)]
            scales = levels + np.float32(state["nested_offset"])
        group = math.gcd(inputs, BLOCK)  # a block may extend into the next row, but a group may not
        first = np.arange(0, outputs * inputs, group) // BLOCK  # the block of each group
        codes = _swapped(tensors[".weight"].values.reshape(1, -1))  # [1, bytes]
        if inputs % 2:  # a byte may also extend into the next row
            codes = pack(unpack(codes, 4, outputs * inputs).reshape(shape), 4)
        return Codebook4(
            shape=shape,
            rounding=state["dtype"],
            codes=codes.reshape(outputs, -1),
            table=tensors[".weight.quant_map"].values,
            scales=scales[first].reshape(outputs, inputs // group),
            group_size=group,
        )

    def _state(self, text: Array, shape: tuple[int, int]) -> dict[str, Any]:
        """The settings in the JSON text, checked."""
        try:
            state = json.loads(text.tobytes())
            found = (tuple(state["shape"]), state["blocksize"], state["dtype"])
            nested = (state["nested_blocksize"], math.isfinite(state["nested_offset"])) if self.double else None
        except (ValueError, KeyError, TypeError):
            raise ModelError(f"{self.state} is damaged: its JSON reads {text.tobytes()[:200]!r}") from None
        rounding: tuple[Rounding, ...] = ("float32", "float16", "bfloat16")
        if found[:2] != (shape, BLOCK) or found[2] not in rounding or nested not in (None, (NESTED_BLOCK, True)):
            raise ModelError(
                f"{self.state} reads {state}; expected the shape {list(shape)}, blocks of {BLOCK}, "
                f"and one of the types {', '.join(rounding)}"
            )
        return dict(state)


def _swapped(codes: Array) -> Array:
    """The bytes with their halves swapped."""
    swapped: Array = codes << np.uint8(4)
    swapped |= codes >> np.uint8(4)
    return swapped


class BitsAndBytesFormats(Formats):
    """NF4 or FP4 for all modules, except those with an unquantized weight."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.plain = NF4(config)

    def of(self, module: str, dtypes: Mapping[str, str]) -> Format | None:
        return None if dtypes.get(f"{module}.weight") in FLOATS else self.plain
