"""FP8: 8-bit floats with a scale for each block of 128 x 128 (DeepSeek's format, in transformers and vLLM).

    weight             F8_E4M3 [out, in]
    weight_scale_inv   float32 or F8_E8M0 [blocks of outputs, blocks of inputs]    the last blocks may be smaller

    w = value of q * s

Despite its name, `weight_scale_inv` is a factor. (In GPTQModel's files it is a divisor, and the config says so with
`weight_scale_semantics: "inverse"`.) Without blocks there is one `weight_scale` for the matrix. The inputs are
quantized too. Each token has its own scales: one for all its inputs, or one for each group as wide as a block. A
checkpoint may instead contain one scale for all tokens, from calibration.
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
    check_float8,
    divided,
    setting,
)
from minipaged.models.quantized.stored import Activations, Array, Float8, StoredMatrix


class FP8(Format):
    """The FP8 format with one checkpoint's settings, which are the same for all modules."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        setting(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        scheme: str = setting(config, "activation_scheme", ("dynamic", "static"), "dynamic")
        self.is_static = scheme == "static"
        self.divide = config.get("weight_scale_semantics") == "inverse"
        size = config.get("weight_block_size")
        if size is not None and not (
            isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)
        ):
            raise ModelError(f"quantization_config: weight_block_size = {size!r}; expected two whole numbers, or null")
        self.block: tuple[int, int] | None = None if size is None else (size[0], size[1])
        self.name = "FP8" if self.block is None else f"FP8 in blocks of {self.block[0]} x {self.block[1]}"
        self.scale = ".weight_scale" if self.block is None else ".weight_scale_inv"

    def parts(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
        if self.block is not None:
            shapes = (tuple(divided(n, size) for n, size in zip(shape, self.block, strict=True)),)
        parts = {".weight": TensorSpec(("F8_E4M3",), (shape,)), self.scale: TensorSpec((*FLOATS, "F8_E8M0"), shapes)}
        if self.is_static:
            parts[".input_scale"] = TensorSpec(FLOATS, ((), (1,)))
        return parts

    def matrix(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        check_float8(tensors, ".weight")
        scales = float_scales(tensors[self.scale], self.scale)
        check_finite(tensors, ".input_scale")
        if self.divide:
            scales = 1 / scales
        if not np.isfinite(scales).all():
            raise ModelError(f"{self.scale} holds values that are infinite or NaN")
        calibrated = float(tensors[".input_scale"].values.reshape(())) if self.is_static else None
        return Float8(
            shape=shape,
            rounding="float32",
            codes=tensors[".weight"].values,
            scales=scales.reshape(-1, scales.shape[-1] if self.block else 1),
            block=self.block or shape,
            activations=Activations("float8", None if self.block is None else self.block[1], scale=calibrated),
        )


def float_scales(tensor: Tensor, name: str) -> Array:
    """Convert scales to float32 from floats or from powers of 2 (F8_E8M0: 2 ** (u - 127))."""
    if tensor.dtype in FLOATS:
        return tensor.values.astype(np.float32)
    if (tensor.values == 255).any():
        raise ModelError(f"{name} holds values that are infinite or NaN")
    powers: Array = np.ldexp(np.float32(1), tensor.values.astype(np.int32) - 127)
    return powers


class FP8Formats(Formats):
    """FP8 for all modules, except those with an unquantized weight."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.plain = FP8(config)

    def of(self, module: str, dtypes: Mapping[str, str]) -> Format | None:
        return None if dtypes.get(f"{module}.weight") in FLOATS else self.plain
