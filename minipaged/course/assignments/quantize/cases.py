"""Inputs for a quantizer, and checks of its output. A failing case becomes a self-contained script.

The checks are functions that the grader and the scripts share: `wrong_...` returns a sentence on the mistake, or an
empty string. They compute in float64; they pack bits into a Python integer, and solve the equations that GPTQ's formula
is for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from minipaged.course.grader.assignment import Bench, Failed, Failure
from minipaged.course.grader.counterexample import aligned, make_script, sources_of
from minipaged.course.grader.session import telling
from minipaged.course.sandbox.contract import Handle
from minipaged.models.quantized.stored import pack

# --- Checks -----------------------------------------------------------------------------------------


def wrong_array(name: Any, array: Any, shape: Any, dtype: Any) -> Any:
    """Return a sentence if this is not an array of this shape and dtype, or an empty string."""
    if not isinstance(array, np.ndarray):
        return f"{name}: an object of type {getattr(array, 'kind', type(array).__name__)}, not an array"
    if array.shape != shape or array.dtype != dtype:
        return f"{name}: {array.dtype} of shape {array.shape}; it should be {np.dtype(dtype)} of shape {shape}"
    return ""


def packed_right(codes: Any, bits: Any) -> Any:
    """Return the right bytes: each row is one integer with the first code in the lowest bits, cut into bytes."""
    numbers = [sum(int(code) << (i * bits) for i, code in enumerate(row)) for row in codes]
    num_bytes = -(-len(codes[0]) * bits // 8)
    return np.array([list(number.to_bytes(num_bytes, "little")) for number in numbers], np.uint8)


def wrong_packing(codes: Any, bits: Any, packed: Any) -> Any:
    """Return a sentence on what is wrong with the packed bytes of these codes, or an empty string."""
    right = packed_right(codes, bits)
    if wrong := wrong_array("pack returned", packed, right.shape, np.uint8):
        return wrong
    for row, byte in np.argwhere(packed != right):
        found, should = int(packed[row, byte]), int(right[row, byte])
        return f"row {row}: byte {byte} is {found} ({found:08b}); it should be {should} ({should:08b})"
    return ""


def wrong_unpacking(codes: Any, unpacked: Any) -> Any:
    """Return a sentence on what is wrong with the unpacked codes, or an empty string."""
    if wrong := wrong_array("unpack returned", unpacked, codes.shape, np.uint8):
        return wrong
    for row, i in np.argwhere(unpacked != codes):
        return f"row {row}: the code of input {i} is {unpacked[row, i]}; it should be {codes[row, i]}"
    return ""


def steps_right(groups: Any, bits: Any, symmetric: Any) -> Any:
    """Return the step and the lowest value of each group's grid, both [rows, groups]."""
    low, high = groups.min(axis=-1, initial=0), groups.max(axis=-1, initial=0)
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    return np.maximum((np.float64(high) - low) / (2**bits - 1), 2.0**-24), low


def wrong_codes(weights: Any, bits: Any, codes: Any, scales: Any, zeros: Any) -> Any:
    """Return the row and a sentence for the first weight whose code is not the nearest one, or None.

    weights, codes: [n, inputs]. scales, zeros: [n].
    """
    top = 2**bits - 1
    s, z = np.asarray(scales, np.float64)[:, None], np.asarray(zeros, np.float64)[:, None]
    nearest = np.clip(np.rint(weights / s) + z, 0, top)
    for n, i in np.argwhere(
        (codes > top) | ~(abs(weights - (codes - z) * s) <= abs(weights - (nearest - z) * s) + s / 1000)
    ):
        w, q, best = weights[n, i], codes[n, i], int(nearest[n, i])
        if q > top:
            return n, f"the code of weight {i} is {q}; the largest one of {bits} bits is {top}"
        means, closest = (np.float32((code - z[n, 0]) * s[n, 0]) for code in (float(q), best))
        off = abs(w - means) / s[n, 0]
        return n, (
            f"weight {i} is {w:.4g}, but its code {q} means {means:.4g}, {off:.3g} steps away; "
            f"code {best} means {closest:.4g}"
        )
    return None


def wrong_rounding(groups: Any, bits: Any, symmetric: Any, answer: Any) -> Any:
    """Return a sentence on what is wrong with the codes, scales and zeros of these groups, or an empty string."""
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        return "round_to_nearest should return three arrays: codes, scales, zeros"
    codes, scales, zeros = answer
    checks = (("codes", codes, groups.shape, np.uint8), ("scales", scales, groups.shape[:2], np.float16))
    for name, array, shape, dtype in (*checks, ("zeros", zeros, groups.shape[:2], np.uint8)):
        if wrong := wrong_array(f"round_to_nearest returned {name}", array, shape, dtype):
            return wrong
    steps, low = steps_right(groups, bits, symmetric)
    for row, g in np.ndindex(scales.shape):
        where, s, z = f"row {row}, group {g}", scales[row, g], int(zeros[row, g])
        step = np.float16(steps[row, g])
        if not 0 < s <= step + np.spacing(step) or s < step - np.spacing(step):  # NaN fails too
            return f"{where}: its scale is {s:.4g}; it should be {step:.4g}, so that the codes span the whole range"
        if symmetric and z != 2 ** (bits - 1):
            return f"{where}: its zero is {z}; in a symmetric grid of {bits} bits it should be {2 ** (bits - 1)}"
        if not symmetric and not abs(z - min(-low[row, g] / np.float64(s), 2**bits - 1)) <= 0.501:
            below = f"{low[row, g]:.4g} is {-low[row, g] / np.float64(s):.4g} steps below 0"
            return f"{where}: its zero is {z}; {below}, so it should be the nearest code, at most {2**bits - 1}"
        if wrong := wrong_codes(
            groups[row, g][None], bits, codes[row, g][None], scales[row, g][None], zeros[row, g][None]
        ):
            return f"{where}: {wrong[1]}"
    return ""


def upper_root_of_inverse(H: Any) -> Any:
    """Return the upper triangular U with U.T @ U = inverse(H)."""
    R = np.linalg.cholesky(H[::-1, ::-1])[::-1, ::-1]  # upper triangular too, and R @ R.T = H
    return np.linalg.inv(R)


def column_right(weights: Any, H: Any, codes: Any, scales: Any, zeros: Any) -> Any:
    """Return the other columns, changed by the d that minimizes the error of the outputs (least squares).

    If d0 is the change of the first column, d solves H[1:, 1:] d = -H[1:, 0] d0.
    """
    d0 = (np.float64(codes) - zeros) * np.float64(scales) - weights[:, 0]  # [rows]
    return weights[:, 1:] + np.linalg.solve(H[1:, 1:], -H[1:, :1] * d0).T  # [rows, columns after]


def wrong_column(weights: Any, H: Any, scales: Any, zeros: Any, bits: Any, answer: Any) -> Any:
    """Return a sentence on what is wrong with the codes of the first column or with the others, or an empty string."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return "round_column should return two arrays: the codes, and the other columns"
    codes, rest = answer
    if wrong := wrong_array("round_column returned codes", codes, scales.shape, np.uint8):
        return wrong
    if wrong := wrong_array("round_column returned other columns", rest, weights[:, 1:].shape, np.float32):
        return wrong
    if wrong := wrong_codes(weights[:, :1], bits, codes[:, None], scales, zeros):
        return f"row {wrong[0]}: {wrong[1]}"
    right = column_right(weights, H, codes, scales, zeros)
    for row, j in np.argwhere(~(abs(rest - right) <= 1e-3 * abs(np.hstack([weights[:, 1:], right])).max(initial=0))):
        lost = weights[row, 0] - (float(codes[row]) - float(zeros[row])) * float(scales[row])
        return (
            f"row {row}: rounding the first column lost {lost:.4g}; weight {j + 1} should therefore change from "
            f"{weights[row, j + 1]:.4g} to {right[row, j]:.4g}, but it is {rest[row, j]:.4g}"
        )
    return ""


# --- Cases ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QuantizeCase(ABC):
    """One call of a quantizer's method."""

    METHOD: ClassVar[str]
    SHARED: ClassVar[Sequence[Any]]
    """Our functions that the script contains."""

    bits: int
    symmetric: bool

    @abstractmethod
    def arguments(self) -> tuple[Any, ...]:
        """Return the method's arguments."""

    @abstractmethod
    def wrong(self, answer: Any) -> str:
        """Return a sentence on what is wrong with the answer, or an empty string."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Return the script's lines that use `quantizer` and set `wrong`."""

    def drawing(self, answer: Any) -> tuple[str, ...]:
        """Draw the arguments and the answer side by side. The answer has the right shapes and dtypes."""
        return ()

    def check(self, bench: Bench) -> None:
        """Raise Failed if the student's method returns a wrong answer."""
        arguments = self.arguments()
        with telling(self.METHOD, partial(self._failure, bench)):
            quantizer = bench.make(self.bits, self.symmetric)
            assert isinstance(quantizer, Handle)
            answer = quantizer.call(self.METHOD, *arguments)
        if wrong := self.wrong(answer):
            drawing = () if " return" in wrong else self.drawing(answer)  # only arrays of the right form can be drawn
            raise Failed(self._failure(bench, wrong, drawing))

    def _failure(self, bench: Bench, message: str, drawing: tuple[str, ...] = (), **more: Any) -> Failure:
        name = bench.part[1]
        body = [
            *sources_of(*self.SHARED),
            f"bits, symmetric = {self.bits}, {self.symmetric}",
            f"quantizer = {name}(bits, symmetric)",
            *self.lines(),
            "assert not wrong, wrong",
        ]
        script = make_script(bench.submission, name, None, message, ["import numpy as np"], body)
        return Failure(message, None, drawing, script, **more)


@dataclass(frozen=True, slots=True)
class Packing(QuantizeCase):
    """A call of `pack`."""

    METHOD = "pack"
    SHARED: ClassVar[Sequence[Any]] = (wrong_array, packed_right, wrong_packing)

    codes: tuple[tuple[int, ...], ...]
    """The codes, [rows, count]."""

    def arguments(self) -> tuple[Any, ...]:
        return (np.array(self.codes, np.uint8),)

    def wrong(self, answer: Any) -> str:
        [codes] = self.arguments()
        return str(wrong_packing(codes, self.bits, answer))

    def lines(self) -> list[str]:
        return [
            f"codes = np.array({[list(row) for row in self.codes]}, np.uint8)",
            "packed = quantizer.pack(codes.copy())",
            "wrong = wrong_packing(codes, bits, packed)",
        ]

    def drawing(self, answer: Any) -> tuple[str, ...]:
        right = packed_right(self.codes, self.bits)
        row = int(np.argwhere(answer != right)[0, 0])
        numbers = zip(right[row], answer[row], strict=True)
        bytes_ = [(f"{a:08b}", f"{b:08b}", " " if a == b else "<--") for a, b in numbers]
        codes = " ".join(f"{code:0{self.bits}b}" for code in reversed(self.codes[row]))
        rows = [["byte", "should be", "your pack says", ""]]
        rows += [[str(i), *each] for i, each in enumerate(bytes_)]
        return (f"codes of row {row}, the first at the right: {codes}", *aligned(rows))


@dataclass(frozen=True, slots=True)
class Unpacking(Packing):
    """A call of `unpack` with the bytes of these codes."""

    METHOD = "unpack"
    SHARED: ClassVar[Sequence[Any]] = (wrong_array, packed_right, wrong_unpacking)

    def arguments(self) -> tuple[Any, ...]:
        return packed_right(self.codes, self.bits), len(self.codes[0])

    def wrong(self, answer: Any) -> str:
        return str(wrong_unpacking(np.array(self.codes, np.uint8), answer))

    def lines(self) -> list[str]:
        return [
            f"codes = np.array({[list(row) for row in self.codes]}, np.uint8)",
            "unpacked = quantizer.unpack(packed_right(codes, bits), codes.shape[1])",
            "wrong = wrong_unpacking(codes, unpacked)",
        ]

    def drawing(self, answer: Any) -> tuple[str, ...]:
        row = int(np.argwhere(answer != np.array(self.codes))[0, 0])
        packed = packed_right(self.codes, self.bits)[row]
        pairs = zip(self.codes[row], answer[row].tolist(), strict=True)
        rows = [["input", "should be", "your unpack says", ""]]
        rows += [[str(i), str(a), str(b), " " if a == b else "<--"] for i, (a, b) in enumerate(pairs)]
        bits = " ".join(f"{byte:08b}" for byte in packed[::-1])
        return (f"bytes of row {row}, the first at the right: {bits}", *aligned(rows))


@dataclass(frozen=True, slots=True)
class Rounding(QuantizeCase):
    """A call of `round_to_nearest`."""

    METHOD = "round_to_nearest"
    SHARED: ClassVar[Sequence[Any]] = (wrong_array, steps_right, wrong_codes, wrong_rounding)

    groups: tuple[tuple[tuple[float, ...], ...], ...]
    """The weights, [rows, groups, size]."""

    def arguments(self) -> tuple[Any, ...]:
        return (np.array(self.groups, np.float32),)

    def wrong(self, answer: Any) -> str:
        [groups] = self.arguments()
        return str(wrong_rounding(groups, self.bits, self.symmetric, answer))

    def lines(self) -> list[str]:
        groups = [[list(group) for group in row] for row in self.groups]
        return [
            f"groups = np.array({groups}, np.float32)",
            "answer = quantizer.round_to_nearest(groups.copy())",
            "wrong = wrong_rounding(groups, bits, symmetric, answer)",
        ]

    def drawing(self, answer: Any) -> tuple[str, ...]:
        codes, scales, zeros = answer
        row, g = next(
            (row, g)
            for row, g in np.ndindex(scales.shape)
            if wrong_rounding(
                self.arguments()[0][row : row + 1, g : g + 1],
                *(self.bits, self.symmetric),
                tuple(each[row : row + 1, g : g + 1] for each in answer),
            )
        )
        s, z = float(scales[row, g]), float(zeros[row, g])
        rows = [["weight", "your code", "it means", "steps away"]]
        for w, q in zip(self.groups[row][g], codes[row, g].tolist(), strict=True):
            means = (q - z) * s
            rows.append([f"{w:.4g}", str(q), f"{means:.4g}", f"{abs(w - means) / s:.2f}" if s > 0 else ""])
        return (f"row {row}, group {g}: scale {s:.4g}, zero {z:.0f}", *aligned(rows))


@dataclass(frozen=True, slots=True)
class Column(QuantizeCase):
    """A call of `round_column`, which rounds the first column; the other columns compensate for the error."""

    METHOD = "round_column"
    SHARED: ClassVar[Sequence[Any]] = (
        wrong_array,
        wrong_codes,
        upper_root_of_inverse,
        column_right,
        wrong_column,
    )

    weights: tuple[tuple[float, ...], ...]
    """The weights, [rows, columns]."""
    hessian: tuple[tuple[float, ...], ...]
    """H, [columns, columns], symmetric and positive definite."""

    def _grid(self) -> tuple[Any, Any]:
        return grid_right(np.array(self.weights, np.float32), self.bits, self.symmetric)

    def arguments(self) -> tuple[Any, ...]:
        U = upper_root_of_inverse(np.array(self.hessian)).astype(np.float32)
        return np.array(self.weights, np.float32), U, *self._grid()

    def wrong(self, answer: Any) -> str:
        weights = np.array(self.weights, np.float32)
        return str(wrong_column(weights, np.array(self.hessian), *self._grid(), self.bits, answer))

    def lines(self) -> list[str]:
        scales, zeros = (each.tolist() for each in self._grid())
        return [
            f"weights = np.array({[list(row) for row in self.weights]}, np.float32)",
            f"H = np.array({[list(row) for row in self.hessian]})",
            f"scales, zeros = np.array({scales}, np.float16), np.array({zeros}, np.uint8)",
            "U = upper_root_of_inverse(H).astype(np.float32)",
            "answer = quantizer.round_column(weights.copy(), U, scales, zeros)",
            "wrong = wrong_column(weights, H, scales, zeros, bits, answer)",
        ]

    def drawing(self, answer: Any) -> tuple[str, ...]:
        codes, rest = answer
        weights, (scales, zeros) = np.array(self.weights, np.float32), self._grid()
        right = column_right(weights, np.array(self.hessian), codes, scales, zeros)
        rows = [["row", "first weight", "your code", "it means", "the others should become", "yours"]]
        for row, w in enumerate(weights[:, 0]):
            means = (float(codes[row]) - float(zeros[row])) * float(scales[row])
            others = [np.array2string(each[row], precision=3, separator=", ") for each in (right, rest)]
            rows.append([str(row), f"{w:.4g}", str(codes[row]), f"{means:.4g}", *(each[:60] for each in others)])
        return tuple(aligned(rows))


# --- A whole quantizer --------------------------------------------------------------------------------


def grid_right(weights: Any, bits: int, symmetric: bool) -> tuple[Any, Any]:
    """Return the right scales [...] float16 and zeros [...] uint8 of groups [..., inputs of a group]."""
    steps, low = steps_right(weights, bits, symmetric)
    scales = steps.astype(np.float16)
    zeros = np.minimum(np.rint(-low / np.float64(scales)), 2**bits - 1)
    if symmetric:
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    return scales, zeros.astype(np.uint8)


class Yardstick:
    """The right quantizer, in float64, with the methods of a student's."""

    def __init__(self, bits: int, symmetric: bool) -> None:
        self._bits, self._symmetric = bits, symmetric

    def pack(self, codes: Any) -> Any:
        return pack(codes, self._bits)

    def round_to_nearest(self, groups: Any) -> Any:
        scales, zeros = grid_right(groups, self._bits, self._symmetric)
        return self._codes(groups, scales[..., None], zeros[..., None]), scales, zeros

    def round_column(self, weights: Any, U: Any, scales: Any, zeros: Any) -> Any:
        codes = self._codes(weights[:, 0], scales, zeros)
        error = (weights[:, 0] - (np.float64(codes) - zeros) * np.float64(scales)) / U[0, 0]
        return codes, weights[:, 1:] - error[:, None] * U[0, 1:]

    def _codes(self, weights: Any, scales: Any, zeros: Any) -> Any:
        return np.clip(np.rint(weights / np.float64(scales)) + zeros, 0, 2**self._bits - 1).astype(np.uint8)
