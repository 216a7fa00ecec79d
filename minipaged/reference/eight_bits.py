"""Keys and values in 8 bits, so that the same memory holds nearly four times as many blocks as in float32.

Each head of each token is rounded by itself: its largest number maps to the largest number that 8 bits can express. The
factor, its *scale*, is stored in float32 beside the slot:

    scale = max |x| / largest        code = the nearest to x / scale        x ≈ code × scale

    int8    whole numbers up to 127: all steps are equal, and the error is at most scale / 2
    fp8     floats with 4 exponent bits and 3 fraction bits, up to 448: small numbers have small steps

A scale depends only on its own token. Appending therefore never changes the tokens already stored, and a token has the
same code in whatever batch it was computed. A block contains its scales, so copying, swapping and sharing work as
before.

Some checkpoints bring *static* scales: one for all tokens of a layer or of a head, found on a few texts beforehand.
They replace the computed scales and are stored in the same place, so no other code needs to know of them.
"""

from __future__ import annotations

import numpy as np

from minipaged.models.quantized.stored import Array, e4m3_values, round_to_e4m3

LARGEST = {"int8": 127, "fp8": 448}
"""The largest number that a code represents. (int8 also has -128, which only a static scale can produce.)"""
SMALLEST_SCALE = np.finfo(np.float32).tiny
"""The scale of a head of zeros, so that nothing is divided by 0."""


def quantize(values: Array, kv_cache_dtype: str, static_scales: Array | None = None) -> tuple[Array, Array]:
    """Return heads [..., head_dim] as codes of the same shape (int8, or the bits of e4m3 floats) and their scales
    [...], float32.

    `static_scales` [...], or a shape that broadcasts to it, are used unchanged; numbers too large for them are clipped.
    A head that holds NaN or infinity gets a scale that is NaN or infinite, so that reading it does not give a finite
    number.
    """
    values = values.astype(np.float32)  # [..., head_dim]
    largest = np.float32(LARGEST[kv_cache_dtype])
    sizes = np.abs(values).max(axis=-1)  # [...]
    if static_scales is None:
        scales = np.maximum(sizes / largest, SMALLEST_SCALE)  # [...]
    else:
        scales = np.where(np.isfinite(sizes), static_scales, sizes)  # [...]
    with np.errstate(invalid="ignore"):  # the code of a NaN does not matter
        scaled = values / scales[..., None]  # [..., head_dim], within ±largest unless the scales are static
        if kv_cache_dtype == "int8":
            return np.rint(scaled.clip(-largest - 1, largest)).astype(np.int8), scales
        rounded = round_to_e4m3(scaled.clip(-largest, largest))  # [..., head_dim]
    codes = np.searchsorted(e4m3_values()[:127], np.abs(rounded))  # [..., head_dim]: codes 0 to 126 are 0 to 448
    return (codes | np.signbit(rounded) << 7).astype(np.uint8), scales


def dequantize(codes: Array, scales: Array) -> Array:
    """Return the numbers [..., head_dim], float32, that the codes [..., head_dim] and their scales [...] represent."""
    values = codes.astype(np.float32) if codes.dtype == np.int8 else e4m3_values()[codes]  # [..., head_dim]
    with np.errstate(invalid="ignore"):  # 0 × infinity
        product: Array = values * scales[..., None]  # [..., head_dim]
    return product
