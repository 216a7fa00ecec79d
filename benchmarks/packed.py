"""Products on packed matrices, on a machine without a GPU, beside our own on bfloat16 and torch's on 4 bits.

    python -m benchmarks.packed [--repetitions R] [--quick] [--json FILE]

The contestants take turns, so that a machine that slows down slows all of them; reported are medians, and ratios of
medians. All run in this one process, with as many threads as there are cores. Weights are random.

- A model's pass: every matrix of SmolLM2-135M once, one after another, as its Q4_1 file has them: 30 layers of 4 bits
  in groups of 32 with minima, and a head of 8 bits. (For a prompt of 512 tokens the head is asked for the last one
  only, so there it is left out.) The peer is the same pass on the same matrices in bfloat16.
- One large matrix, 8192 x 2048, and one token: how fast the weights come. The peer is torch's product of bfloat16 with
  4 bits. Either is asked for several such matrices in turns, which no cache holds."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.side_by_side import Result, at_least, median_seconds, report
from minipaged.fast.cpu.llama import linears, use_threads
from minipaged.fast.cpu.packed import PackedMatrix, Room
from minipaged.fast.kernels import Linear
from minipaged.models.quantized.stored import Grouped, pack

LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
"""[out, in] of q, k and v; o; gate and up; down."""
HEAD = (49152, 576)
GOALS = {1: 1.7, 8: 1.0, 32: 1.0, 512: None}
LARGE = (8192, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure products on packed matrices on a CPU.")
    parser.add_argument("--repetitions", type=int, default=30, help="runs of each contestant; the median counts")
    parser.add_argument("--quick", action="store_true", help="a model of two layers: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and machine to this file")
    arguments = parser.parse_args()
    use_threads()
    with torch.inference_mode():
        results = [large_matrix(arguments.repetitions)]
        results += model_passes(2 if arguments.quick else 30, arguments.repetitions)
    report(results, {"repetitions": arguments.repetitions, "quick": arguments.quick}, arguments.json)


def model_passes(layers: int, repetitions: int) -> list[Result]:
    """Bytes of packed weights a second, for so many tokens at a time."""
    matrices = [random_matrix(shape, 4, 32) for shape in LAYER * layers] + [random_matrix(HEAD, 8, 32)]
    room = Room()
    packed = [PackedMatrix(matrix, None, torch.bfloat16, room) for matrix in matrices]
    sizes = [matrix.shape for matrix in matrices]
    dense = linears(
        sizes,
        (torch.from_numpy(matrix.rows()).bfloat16() for matrix in matrices),
        [None] * len(sizes),
        torch.empty(0).bfloat16(),
    )
    del matrices
    results = []
    for tokens, goal in GOALS.items():
        some = slice(None) if tokens < 512 else slice(-1)
        inputs = [torch.randn(tokens, size[1]).bfloat16() for size in sizes]
        turns = {"packed": passes(packed[some], inputs), "dense": passes(dense[some], inputs)}
        for turn in turns.values():
            turn()
        medians = median_seconds(repetitions if tokens < 512 else max(3, repetitions // 5), turns, quiet=True)
        gigabytes = sum(matrix.nbytes for matrix in packed[some]) / 1e9
        rates = [gigabytes / medians[name] for name in ("packed", "dense")]
        what = f"a model's matrices, {tokens} token{'s' * (tokens > 1)}"
        results.append(at_least(what, rates[0], "GB/s", "bfloat16", rates[1], goal))
    return results


def large_matrix(repetitions: int) -> Result:
    """Bytes of packed weights a second."""
    matrix = random_matrix(LARGE, 4, 64)
    ours = [PackedMatrix(matrix, None, torch.bfloat16) for _ in range(8)]
    x = torch.randn(1, LARGE[1]).bfloat16()
    codes = torch.randint(0, 16, LARGE, dtype=torch.int32)
    scales = torch.randn(LARGE[1] // 64, LARGE[0], 2).bfloat16()  # [groups, out, scale and zero]
    theirs = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1) for _ in range(8)]
    size = (codes.numel() / 2 + scales.nbytes) / 1e9

    def product(packed: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 64, scales)

    turns: dict[str, Callable[[], object]] = {
        "ours": lambda: [matrix(x) for matrix in ours],
        "theirs": lambda: [product(packed) for packed in theirs],
    }
    for turn in turns.values():
        turn()
    medians = median_seconds(repetitions, turns, quiet=True)
    bytes_ours = sum(matrix.nbytes for matrix in ours) / 1e9
    result = at_least(
        f"{LARGE[0]} x {LARGE[1]} of 4 bits, 1 token",
        bytes_ours / medians["ours"],
        "GB/s",
        "torch",
        8 * size / medians["theirs"],
        None,
    )
    return Result(
        result.what, result.value, result.unit, result.against, result.ratio, ">= 35 GB/s", result.value >= 35
    )


def passes(matrices: Sequence[Linear], inputs: Sequence[Tensor]) -> Callable[[], object]:
    return lambda: [matrix(x) for matrix, x in zip(matrices, inputs, strict=False)]


def random_matrix(shape: tuple[int, int], bits: int, group_size: int) -> Grouped:
    """As a GGUF file has it: 4 bits with minima (Q4_1), 8 without (Q8_0)."""
    r, scales = np.random.default_rng(0), (shape[0], shape[1] // group_size)
    return Grouped(
        shape=shape,
        rounding="float32",
        bits=bits,
        codes=pack(r.integers(0, 2**bits, shape, dtype=np.uint8), bits),
        scales=r.uniform(0.01, 0.02, scales).astype(np.float16),
        zeros=0 if bits == 4 else 128,
        minima=-r.uniform(0.1, 0.2, scales).astype(np.float16) if bits == 4 else None,
        group_size=group_size,
    )


if __name__ == "__main__":
    main()
