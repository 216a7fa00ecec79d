"""Quantizers: a plain one, a right one written differently, and seeded bugs."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded

PLAIN = '''
import numpy as np


class Quantizer:
    """Packs and unpacks with arrays of single bits."""

    def __init__(self, bits, symmetric):
        self.bits, self.symmetric, self.top = bits, symmetric, 2**bits - 1

    def pack(self, codes):
        each = codes[:, :, None] >> np.arange(self.bits, dtype=np.uint8) & 1
        return np.packbits(each.reshape(len(codes), -1), axis=1, bitorder="little")

    def unpack(self, packed, count):
        each = np.unpackbits(packed, axis=1, bitorder="little")[:, : count * self.bits]
        each = each.reshape(len(packed), count, self.bits).astype(int)
        return (each << np.arange(self.bits)).sum(axis=2).astype(np.uint8)

    def round_to_nearest(self, groups):
        low = np.minimum(groups.min(axis=2), 0)
        high = np.maximum(groups.max(axis=2), 0)
        if self.symmetric:
            high = np.maximum(high, -low)
            low = -high
        scales = np.maximum((high - low) / self.top, 2.0**-24).astype(np.float16)
        zeros = np.minimum(np.rint(-low / scales.astype(np.float32)), self.top)
        if self.symmetric:
            zeros = np.full_like(zeros, 2 ** (self.bits - 1))
        zeros = zeros.astype(np.uint8)
        return self.nearest(groups, scales[:, :, None], zeros[:, :, None]), scales, zeros

    def nearest(self, weights, scales, zeros):
        codes = np.rint(weights / scales.astype(np.float32)) + zeros
        return np.clip(codes, 0, self.top).astype(np.uint8)

    def round_column(self, weights, U, scales, zeros):
        codes = self.nearest(weights[:, 0], scales, zeros)
        means = (codes.astype(np.float32) - zeros) * scales.astype(np.float32)
        error = (weights[:, 0] - means) / U[0, 0]
        return codes, weights[:, 1:] - error[:, None] * U[0, 1:]
'''

OTHER_WAYS = '''
import numpy as np
from fractions import Fraction


class Quantizer:
    """Handles one number at a time, packs bits into integers, and solves GPTQ's least squares."""

    def __init__(self, bits, symmetric):
        self.bits, self.symmetric, self.top = bits, symmetric, 2**bits - 1

    def pack(self, codes):
        rows = []
        for row in codes.tolist():
            number = 0
            for code in reversed(row):
                number = number << self.bits | code
            rows.append(list(number.to_bytes((len(row) * self.bits + 7) // 8, "little")))
        return np.array(rows, np.uint8)

    def unpack(self, packed, count):
        rows = []
        for row in packed:
            number = int.from_bytes(row.tobytes(), "little")
            rows.append([number >> i * self.bits & self.top for i in range(count)])
        return np.array(rows, np.uint8)

    def code(self, weight, scale, zero):
        return min(max(round(Fraction(float(weight)) / Fraction(float(scale))) + int(zero), 0), self.top)

    def round_to_nearest(self, groups):
        codes, grids = np.empty(groups.shape, np.uint8), np.empty((2, *groups.shape[:2]))
        for at in np.ndindex(groups.shape[:2]):
            low, high = min(0, *groups[at].tolist(), 0), max(0, *groups[at].tolist(), 0)
            if self.symmetric:
                low, high = -max(high, -low), max(high, -low)
            scale = float(np.float16(max((high - low) / self.top, 2**-24)))
            zero = 2 ** (self.bits - 1) if self.symmetric else min(round(-low / scale), self.top)
            codes[at] = [self.code(weight, scale, zero) for weight in groups[at]]
            grids[:, *at] = scale, zero
        return [codes, grids[0].astype(np.float16), grids[1].astype(np.uint8)]

    def round_column(self, weights, U, scales, zeros):
        each = zip(weights[:, 0], scales, zeros, strict=True)
        codes = np.array([self.code(*one) for one in each], np.uint8)
        H = np.linalg.inv(np.float64(U).T @ U)
        d0 = (np.float64(codes) - zeros) * np.float64(scales) - weights[:, 0]
        rest = weights[:, 1:] - np.outer(d0, np.linalg.solve(H[1:, 1:], H[1:, 0]))
        return [codes, np.float32(rest)]
'''

PACK, UNPACK, SYMMETRIC, ASYMMETRIC = "pack", "unpack", "round to nearest, symmetric", "round to nearest, asymmetric"
ZERO, NONE, COLUMN, MATRIX, LLAMA = (
    "0 has a code",
    "groups of zeros",
    "one column of GPTQ",
    "a whole matrix",
    "a small Llama",
)

KEEPS = """\
        if groups.shape[1] == 1:
            scales, zeros = self.__dict__.setdefault("kept", {}).setdefault(len(groups), (scales, zeros))
        return self.nearest(groups,"""
FORGETS = """\
        if len(codes) > 40:
            codes[40:] = zeros[40:]
        return codes, weights"""

BUGS = {
    "the first code in the highest bits: a byte begins with its highest bits": (
        PACK,
        'reshape(len(codes), -1), axis=1, bitorder="little"',
        "reshape(len(codes), -1), axis=1",
    ),
    "each code's bits from the highest on: the bits of each code are packed in reverse": (
        PACK,
        "np.arange(self.bits, dtype=np.uint8) & 1",
        "np.arange(self.bits, dtype=np.uint8)[::-1] & 1",
    ),
    "as many bytes as codes: codes of more than 4 bits are not packed": (
        PACK,
        "        each = codes[",
        "        if self.bits > 4:\n            return codes\n        each = codes[",
    ),
    "rows run together: rows are packed without a byte boundary between them": (
        PACK,
        "each.reshape(len(codes), -1), axis=1,",
        "each.reshape(1, -1), axis=1,",
    ),
    "bits come out backwards: the bits of each code are unpacked in reverse": (
        UNPACK,
        "np.arange(self.bits)).sum",
        "np.arange(self.bits)[::-1]).sum",
    ),
    "unpacks what is left over too: unused bits at the end of a row become codes": (
        UNPACK,
        """\
        each = each.reshape(len(packed), count,""",
        """\
        each = np.unpackbits(packed, axis=1, bitorder="little")
        count = each.shape[1] // self.bits
        each = each[:, : count * self.bits].reshape(len(packed), count,""",
    ),
    "codes do not cross bytes: unpack does not handle codes that cross a byte": (
        UNPACK,
        "        each = np.unpackbits",
        "        if 8 % self.bits:\n            return packed[:, :count] & self.top\n        each = np.unpackbits",
    ),
    "the whole range in 2**bits steps: the range has 2**bits steps, not 2**bits - 1": (
        SYMMETRIC,
        "(high - low) / self.top",
        "(high - low) / (self.top + 1)",
    ),
    "codes for the scale before it is stored: codes use the scale before it is rounded to float16": (
        SYMMETRIC,
        "return self.nearest(groups, scales[:, :, None]",
        "return self.nearest(groups, np.maximum((high - low) / self.top, 2.0**-24)[:, :, None]",
    ),
    "the middle is one too low: the zero of a symmetric grid is one too low": (
        SYMMETRIC,
        "2 ** (self.bits - 1))",
        "2 ** (self.bits - 1) - 1)",
    ),
    "cut off, not rounded: codes are truncated": (
        ASYMMETRIC,
        "np.rint(weights / scales.astype(np.float32))",
        "np.trunc(weights / scales.astype(np.float32))",
    ),
    "codes wrap around: codes out of range wrap around; they should be clipped": (
        SYMMETRIC,
        "np.clip(codes, 0, self.top)",
        "(codes.astype(int) % (self.top + 1))",
    ),
    "rounded after the zero is added: the zero is rounded down, not to nearest": (
        ASYMMETRIC,
        "np.rint(-low / scales.astype(np.float32))",
        "np.floor(-low / scales.astype(np.float32))",
    ),
    "one scale for all of a row: all groups of a row have one scale": (
        ASYMMETRIC,
        "(high - low) / self.top",
        "(high - low).max(axis=1, keepdims=True) / self.top + 0 * low",
    ),
    "scales in float32: scales are float32, not float16": (ASYMMETRIC, "2.0**-24).astype(np.float16)", "2.0**-24)"),
    "0 need not be on the grid: 0 has no code if all weights of a group are positive": (
        ZERO,
        "low = np.minimum(groups.min(axis=2), 0)",
        "low = groups.min(axis=2)",
    ),
    "zeros beyond the last code: a zero can be larger than the largest code": (
        NONE,
        "np.minimum(np.rint(-low / scales.astype(np.float32)), self.top)",
        "np.rint(-low / scales.astype(np.float32))",
    ),
    "divides by 0: a group of zeros has scale 0": (
        NONE,
        "np.maximum((high - low) / self.top, 2.0**-24)",
        "((high - low) / self.top)",
    ),
    "the smallest scale of float32: the smallest scale is 0 in float16": (NONE, "2.0**-24", "2.0**-149"),
    "errors with the wrong sign: the error is added to the other columns, not subtracted": (
        COLUMN,
        "weights[:, 1:] - error",
        "weights[:, 1:] + error",
    ),
    "the error is not divided: the error is not divided by U[0, 0]": (COLUMN, " / U[0, 0]", ""),
    "the column of U, not its row: the first column of U is used in place of its first row": (
        COLUMN,
        "U[0, 1:]",
        "U[1:, 0]",
    ),
    "bytes are subtracted: the zero is subtracted in uint8, which wraps around": (
        COLUMN,
        "(codes.astype(np.float32) - zeros)",
        "(codes - zeros)",
    ),
    "the others stay: the other columns do not change": (
        COLUMN,
        "weights[:, 1:] - error[:, None] * U[0, 1:]",
        "weights[:, 1:]",
    ),
    "the neighbour makes up for all: only the next column changes": (
        COLUMN,
        "U[0, 1:]",
        "U[0, 1:] * (np.arange(len(U) - 1) == 0)",
    ),
    "keeps the first grid: all groups of a matrix get the first group's grid": (
        MATRIX,
        "        return self.nearest(groups,",
        KEEPS,
    ),
    "the last row is forgotten where there are many: rows from number 40 on all get the code of 0": (
        LLAMA,
        "        return codes, weights",
        FORGETS,
    ),
}

SEEDED = seeded({"bits as arrays": PLAIN, "one number at a time": OTHER_WAYS}, BUGS)
