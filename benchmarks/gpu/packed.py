"""Packed matrices: are their products right, and how fast are they beside a product with the same weights in 16 bits?

With few rows what counts is how fast the packed bytes go by, with many how many operations are done. The peer's rate is
told in the same bytes, those of the packed weights, so that the ratio is that of the times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.harness import Job, Row, Setting, num_inputs, time_calls, work
from minipaged.fast.gpu import packed
from minipaged.fast.linear import expanded
from minipaged.models.quantized.stored import Activations, Codebook4, Float8, Grouped, StoredMatrix


@dataclass(frozen=True)
class Form:
    """How a matrix is packed."""

    bits: int = 4
    group_size: int = 128
    """0: all inputs are one."""
    zeros: bool = False
    """Each group has its own. Otherwise one for all."""
    minima: bool = False
    in_order: bool = True
    """Groups are runs of neighbours."""
    kind: str = "int"
    """Or float8 or table."""
    activations: Activations | None = None


FORMS = {
    "int4 g128": Form(),
    "int4 g128 zeros act-order": Form(zeros=True, in_order=False),
    "int4 channel": Form(group_size=0),
    "Q4_1": Form(group_size=32, minima=True),
    "Q8_0": Form(bits=8, group_size=32),
    "NF4": Form(group_size=64, kind="table"),
    "FP8 blocks": Form(kind="float8"),
    "W8A8 INT8": Form(bits=8, group_size=0, activations=Activations("int8")),
    "W8A8 INT8 zeros": Form(bits=8, group_size=0, activations=Activations("int8", symmetric=False)),
    "W8A8 FP8": Form(kind="float8", group_size=0, activations=Activations("float8")),
    "W8A8 FP8 blocks": Form(kind="float8", activations=Activations("float8", group_size=128)),
}

TIMED = ("int4 g128", "Q4_1", "Q8_0", "W8A8 INT8", "W8A8 FP8", "W8A8 FP8 blocks")


def random_matrix(form: Form, shape: tuple[int, int], seed: int) -> StoredMatrix:
    """Any codes, and scales by which sums keep their size."""
    r = np.random.default_rng(seed)
    outputs, inputs = shape
    size = form.group_size or inputs
    groups = -(-inputs // size)
    codes = r.integers(0, 256, (outputs, inputs * form.bits // 8), dtype=np.uint8)  # any bytes are codes
    scales = (r.uniform(0.5, 1.5, (outputs, groups)) / 2**form.bits / inputs**0.5).astype(np.float16)
    if form.kind == "float8":
        codes = r.integers(0, 126, shape, dtype=np.uint8) | r.integers(0, 2, shape, dtype=np.uint8) << 7  # numbers
        blocks = scales[: -(-outputs // size)].astype(np.float32)
        how, block = form.activations, (size, size)
        return Float8(shape=shape, rounding="float32", codes=codes, scales=blocks, block=block, activations=how)
    if form.kind == "table":
        table = np.linspace(-1, 1, 16, dtype=np.float32) ** 3
        single = scales.astype(np.float32)
        return Codebook4(
            shape=shape, rounding="float32", codes=codes, table=table, scales=single, group_size=size
        )  # fmt: skip
    return Grouped(
        shape=shape,
        rounding="float32",
        activations=form.activations,
        bits=form.bits,
        codes=codes,
        scales=scales,
        zeros=r.integers(0, 16, (outputs, groups), dtype=np.uint8) if form.zeros else 2 ** (form.bits - 1),
        minima=-scales if form.minima else None,
        group_size=size,
        group_index=None if form.in_order else r.permutation(np.arange(inputs) // size).astype(np.int32),
    )


def exact_product(matrix: StoredMatrix, x: Tensor) -> Tensor:
    """In float64, on the floats that codes stand for: those of the inputs, too."""
    if matrix.activations is not None:
        applied = matrix.activations.applied(x.float().cpu().numpy())
        x = torch.from_numpy(applied).to(x.device)
    return x.double() @ expanded(matrix, x.device, torch.float64).T


def timings(setting: Setting) -> list[Job]:
    sizes = [(1, 14336, 4096), (16, 14336, 4096), (64, 14336, 4096), (4096, 14336, 4096)]
    sizes = [(2, 64, 256)] if setting.tiny else sizes[:1] + sizes[3:] if setting.quick else sizes
    jobs = [
        Job(f"packed {name}, {_said(size)}", partial(time_packed, name, size, setting))
        for size in sizes
        for name in TIMED
    ]
    if setting.tiny:
        return jobs
    small = [(1, 6144, 4096), (1, 4096, 14336), (1, 49152, 576), (1, 576, 1536)]
    return jobs + [
        Job(f"packed {name}, {_said(size)}", partial(time_packed, name, size, setting))
        for size in small
        for name in (("Q4_1",) if size[1] == 576 or size[2] == 576 else ("int4 g128",))
    ]


def tuning(setting: Setting) -> list[Job]:
    """The choices of `gpu/packed.py` beside others, for one row, some rows and many."""
    programs = {f"{n} programs a multiprocessor": {"PROGRAMS_PER_SM": n} for n in (1, 2, 4)}
    narrow = {"tiles of 64 outputs": {"TILE_OUT": 64}, "5 stages": {"num_stages": 5}, "3 stages": {"num_stages": 3}}
    small = {"tiles of 64 rows": {"TILE_ROWS": 64}, "2 stages": {"num_stages": 2}}
    sizes = [(2, 64, 256)] if setting.tiny else [(1, 14336, 4096), (64, 14336, 4096), (4096, 14336, 4096)]
    trials = [programs | narrow, programs | narrow, small]
    return [
        Job(f"packed int4 g128, {_said(size)}, tuning", partial(time_packed, "int4 g128", size, setting, others))
        for size, others in zip(sizes, trials, strict=False)
    ]


def _said(size: tuple[int, int, int]) -> str:
    rows, outputs, inputs = size
    return f"{rows} {'row' if rows == 1 else 'rows'} of {inputs} to {outputs}"


def time_packed(
    name: str, size: tuple[int, int, int], setting: Setting, others: dict[str, dict[str, int]] | None = None
) -> Row:
    """`others`: choices to be timed beside ours, in place of torch."""
    rows, outputs, inputs = size
    stored = random_matrix(FORMS[name], (outputs, inputs), setting.seed)
    first = packed.packed(stored, None, setting.half, setting.device)
    assert first is not None
    moved, operations = first.nbytes, 2 * rows * outputs * inputs
    copies = num_inputs(moved, setting)
    matrices = [first, *(packed.packed(stored, None, setting.half, setting.device) for _ in range(copies - 1))]
    x = torch.randn(rows, inputs, device=setting.device).to(setting.half)
    weights = expanded(stored, setting.device, setting.half)

    def timed(calls: list[Callable[[], object]]) -> Row:
        timing = time_calls(calls, setting)
        return timing.row(operations, "TFLOP/s", "matmul") if rows > 64 else timing.row(moved, "GB/s", "copy")

    ours: list[Callable[[], object]] = [partial(matrix, x) for matrix in matrices if matrix is not None]
    found = timed(ours) | work(operations, moved + (rows * inputs + rows * outputs) * setting.half.itemsize)
    if others is None:
        dense = [weights, *(weights.clone() for _ in range(num_inputs(weights.nbytes, setting) - 1))]
        peer = timed([partial(torch.nn.functional.linear, x, weight) for weight in dense])
        return found | {"peers": {"torch, 16 bits": peer}}
    return found | {
        "peers": {other: timed([changed(changes, call) for call in ours]) for other, changes in others.items()}
    }


def changed(changes: dict[str, int], call: Callable[[], object]) -> Callable[[], object]:
    """Ours, but for some of the choices: constants of `gpu/packed.py`, or what its `tile_options` returns."""
    constants = {name: value for name, value in changes.items() if hasattr(packed, name)}
    options = {name: value for name, value in changes.items() if name not in constants}
    real = packed.tile_options

    def call_changed() -> object:
        with patch.multiple(packed, tile_options=lambda *given, **more: real(*given, **more) | options, **constants):
            return call()

    return call_changed
