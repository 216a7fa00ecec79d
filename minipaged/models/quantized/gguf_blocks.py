"""GGUF's blocks (llama.cpp): the codes, scales and minima of 32 or 256 weights in one run of bytes.

Each row of a matrix is a sequence of blocks. Blocks of 32 weights (d, m: float16):

    Q4_0   d, 16 bytes: the lower halves are weights 0 to 15, the upper ones 16 to 31        w = d (q - 8)
    Q4_1   d, m, 16 bytes as in Q4_0                                                         w = d q + m
    Q5_0   d, 4 bytes: a fifth bit for each weight, 16 bytes as in Q4_0                      w = d (q - 16)
    Q5_1   d, m, 4 bytes, 16 bytes                                                           w = d q + m
    Q8_0   d, 32 signed bytes                                                                w = d q

Blocks of 256 weights have 8 or 16 groups, whose scales of 6 or 8 bits (sc) are multiplied by one d:

    Q4_K   d, dmin, 12 bytes: 8 scales, 8 minima; 128 bytes: each 32 of them hold two groups,
           one in the lower halves, one in the upper ones                                    w = d sc q - dmin mn
    Q5_K   as Q4_K, plus 32 bytes of fifth bits: bit g of byte i belongs to weight i of group g
    Q6_K   128 bytes of the lower 4 bits, 64 of the upper 2, 16 signed scales, d             w = d sc (q - 32)

The conversion of a GGUF file (`minipaged/models/gguf.py`) keeps these blocks unchanged, as uint8 [out, bytes of a row],
and lists each tensor's type in the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from minipaged.errors import ModelError
from minipaged.models.quantized.format import Format, Formats, Tensor, TensorSpec
from minipaged.models.quantized.stored import Array, Grouped, StoredMatrix, pack

BLOCKS: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""The number of weights and of bytes in a block."""

ROWS = 1 << 20
"""The number of weights to unpack at a time."""


class GGUFBlocks(Format):
    """The format of matrices with one GGUF block type."""

    def __init__(self, kind: str) -> None:
        if kind not in BLOCKS:
            raise ModelError(
                f"quantization_config: packed GGUF blocks of type {kind} are not supported; use one of "
                f"{', '.join(BLOCKS)}"
            )
        self.kind = kind
        self.name = f"GGUF, {kind}"

    def parts(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        outputs, inputs = shape
        weights, size = BLOCKS[self.kind]
        if inputs % weights:
            raise ModelError(f"a matrix of {outputs} x {inputs} does not divide into {self.kind} blocks of {weights}")
        return {".weight": TensorSpec(("U8",), ((outputs, inputs // weights * size),))}

    def matrix(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        outputs, inputs = shape
        weights, size = BLOCKS[self.kind]
        blocks = tensors[".weight"].values.reshape(outputs, inputs // weights, size)
        step = max(1, ROWS // inputs)
        fields: dict[str, Any] = {}
        for first in range(0, outputs, step):
            for name, value in READERS[self.kind](blocks[first : first + step]).items():
                if isinstance(value, int):
                    fields[name] = value
                    continue
                if name not in fields:
                    fields[name] = np.empty((outputs, value.shape[1]), value.dtype)
                fields[name][first : first + step] = value
        for name in ("scales", "super_scales", "minima", "super_minima"):
            if name in fields and fields[name].dtype == np.float16 and not np.isfinite(fields[name]).all():
                raise ModelError(".weight holds scales that are infinite or NaN")
        return Grouped(shape=shape, rounding="float32", **fields)


def _float16(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of each block: [rows, blocks]."""
    values: Array = np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0]
    return values


def _packed(codes: Array, bits: int) -> Array:
    """Pack codes [rows, ...], in the order of the inputs -> [rows, bytes]."""
    return pack(codes.reshape(len(codes), -1), bits)


def _halves(packed: Array) -> Array:
    """Split bytes [..., bytes] -> [..., 2, bytes]: the lower halves, then the upper ones."""
    return np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-2)


def _fifth_bits(packed: Array) -> Array:
    """Unpack bits [rows, blocks, 4] -> [rows, blocks, 2, 16]: 16 for each set bit, otherwise 0."""
    bits = np.unpackbits(packed, axis=2, bitorder="little")  # [rows, blocks, 32]
    return bits.reshape(*packed.shape[:2], 2, 16) << np.uint8(4)


def _q4_0(blocks: Array) -> dict[str, Any]:
    codes = _packed(_halves(blocks[:, :, 2:]), 4)
    return {"bits": 4, "codes": codes, "scales": _float16(blocks, 0), "zeros": 8, "group_size": 32}


def _q4_1(blocks: Array) -> dict[str, Any]:
    codes, minima = _packed(_halves(blocks[:, :, 4:]), 4), _float16(blocks, 2)
    return {"bits": 4, "codes": codes, "scales": _float16(blocks, 0), "zeros": 0, "minima": minima, "group_size": 32}


def _q5_0(blocks: Array) -> dict[str, Any]:
    codes = _packed(_halves(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6]), 5)
    return {"bits": 5, "codes": codes, "scales": _float16(blocks, 0), "zeros": 16, "group_size": 32}


def _q5_1(blocks: Array) -> dict[str, Any]:
    codes = _packed(_halves(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8]), 5)
    minima = _float16(blocks, 2)
    return {"bits": 5, "codes": codes, "scales": _float16(blocks, 0), "zeros": 0, "minima": minima, "group_size": 32}


def _q8_0(blocks: Array) -> dict[str, Any]:
    codes = (blocks[:, :, 2:] ^ np.uint8(128)).reshape(len(blocks), -1)
    return {"bits": 8, "codes": codes, "scales": _float16(blocks, 0), "zeros": 128, "group_size": 32}


def _with_minima(blocks: Array, bits: int, codes: Array) -> dict[str, Any]:
    """The fields of Grouped for Q4_K and Q5_K: d, dmin, and 12 bytes with 8 scales and 8 minima of 6 bits each."""
    first, second, third = (blocks[:, :, at : at + 4] for at in (4, 8, 12))  # [rows, blocks, 4] each
    six, four, two = np.uint8(63), np.uint8(15), np.uint8(6)
    scales = np.concatenate((first & six, third & four | first >> two << np.uint8(4)), axis=2)
    minima = np.concatenate((second & six, third >> np.uint8(4) | second >> two << np.uint8(4)), axis=2)
    return {
        "bits": bits,
        "codes": _packed(codes, bits),
        "scales": scales.reshape(len(blocks), -1),
        "super_scales": _float16(blocks, 0),
        "zeros": 0,
        "minima": minima.reshape(len(blocks), -1),
        "super_minima": -_float16(blocks, 2),
        "group_size": 32,
    }


def _q4_k(blocks: Array) -> dict[str, Any]:
    return _with_minima(blocks, 4, _halves(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32)))


def _q5_k(blocks: Array) -> dict[str, Any]:
    low = _halves(blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32))  # [rows, blocks, 4, 2, 32]
    group = np.arange(8, dtype=np.uint8)[:, None]
    high = blocks[:, :, None, 16:48] >> group & np.uint8(1)  # [rows, blocks, 8, 32]
    return _with_minima(blocks, 5, low | high.reshape(low.shape) << np.uint8(4))


def _q6_k(blocks: Array) -> dict[str, Any]:
    low = _halves(blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64))  # [rows, blocks, 2, 2, 64]
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    pairs = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = pairs >> shifts & np.uint8(3)  # [rows, blocks, 2, 4, 32]
    scales = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8)
    return {
        "bits": 6,
        "codes": _packed(low | high.reshape(low.shape) << np.uint8(4), 6),
        "scales": scales.reshape(len(blocks), -1),
        "super_scales": _float16(blocks, 208),
        "zeros": 32,
        "group_size": 16,
    }


READERS: dict[str, Callable[[Array], dict[str, Any]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""The reader of each type: blocks [rows, blocks per row, bytes] -> fields of Grouped."""


class GGUFFormats(Formats):
    """The format of each module, from the converted folder's config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        types = config.get("tensor_types")
        if not isinstance(types, dict):
            raise ModelError("quantization_config: 'tensor_types' with each matrix's block type is missing")
        self.formats = {module: GGUFBlocks(str(kind)) for module, kind in types.items()}

    def of(self, module: str, dtypes: Mapping[str, str]) -> Format | None:
        return self.formats.get(module)
