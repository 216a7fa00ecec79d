"""Products on packed matrices, and a model of them, on a machine without a GPU: beside our own in bfloat16, torch's on
4 bits, and llama.cpp.

    python -m benchmarks.packed [--repetitions R] [--quick] [--llama-cpp PYTHON FILE.gguf] [--json FILE]

The contestants take turns, so that a machine that slows down slows all of them; reported are medians, and ratios of
medians. All but llama.cpp run in this one process, with as many threads as there are cores. Weights are random, but for
the model's.

- A model's pass: every matrix of SmolLM2-135M once, one after another, as its Q4_1 file has them: 30 layers of 4 bits
  in groups of 32 with minima, and a head of 8 bits. (For a prompt of 512 tokens the head is asked for the last one
  only, so there it is left out.) The peer is the same pass on the same matrices in bfloat16.
- One large matrix, 8192 x 2048, and one token: how fast the weights come. The peer is torch's product of bfloat16 with
  4 bits. Either is asked for several such matrices in turns, which no cache holds.
- The model: SmolLM2 from its Q4_1 file, greedy, past the end of sequence, beside itself in bfloat16; a tenth as many
  repetitions. `--llama-cpp`: one sequence beside llama.cpp too, with as many threads and the same file. PYTHON is one
  that has llama-cpp-python, FILE.gguf the file that `smollm2-135m-instruct-q4_1` was made from
  (`benchmarks.llama_cpp_peer`)."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.fast import NEW_TOKENS, PROMPT, served
from benchmarks.side_by_side import Result, at_least, median_seconds, report
from minipaged import LLM
from minipaged.fast.cpu.llama import linears
from minipaged.fast.cpu.packed import PackedMatrix, Room
from minipaged.fast.cpu.threads import use_threads
from minipaged.fast.kernels import Linear
from minipaged.models.pypi import SMOLLM2_Q4_1
from minipaged.models.quantized.stored import Grouped, pack

LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
"""[out, in] of q, k and v; o; gate and up; down."""
HEAD = (49152, 576)
GOALS = {1: 1.7, 8: 1.0, 32: 1.0, 512: None}
LARGE = (8192, 2048)
PEER = Path(__file__).with_name("llama_cpp_peer.py")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure products on packed matrices on a CPU.")
    parser.add_argument("--repetitions", type=int, default=30, help="runs of each contestant; the median counts")
    parser.add_argument("--quick", action="store_true", help="a model of two layers: to see that it runs")
    parser.add_argument("--llama-cpp", nargs=2, type=Path, metavar=("PYTHON", "FILE.gguf"), help="measure it, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and machine to this file")
    arguments = parser.parse_args()
    use_threads()
    with torch.inference_mode():
        results = [large_matrix(arguments.repetitions)]
        results += model_passes(2 if arguments.quick else 30, arguments.repetitions)
    results += models(arguments.llama_cpp, 8 if arguments.quick else NEW_TOKENS, max(3, arguments.repetitions // 10))
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


def models(llama_cpp: tuple[Path, Path] | None, new_tokens: int, repetitions: int) -> list[Result]:
    """Tokens a second of 1, 8 and 32 sequences."""
    names = {"packed": "smollm2-135m-instruct-q4_1", "dense": "smollm2-135m-instruct"}
    sizes = {"num_blocks": 640, "num_swap_blocks": 1, "max_num_seqs": 32, "enable_prefix_caching": False}
    llms = {
        each: LLM(name, tier="fast", device="cpu", dtype="bfloat16", **sizes)  # type: ignore[arg-type]
        for each, name in names.items()
    }
    prompt = llms["packed"].need_tokenizer().encode(PROMPT)
    results = []
    for number in (1, 8, 32):
        jobs = [(prompt, new_tokens)] * number
        turns: dict[str, Callable[[], object]] = {
            each: lambda llm=llm, jobs=jobs: served(llm, jobs) for each, llm in llms.items()
        }
        for turn in turns.values():
            turn()
        if number == 1 and llama_cpp:
            theirs = peer(*llama_cpp)
            found, ours = theirs(prompt, new_tokens), served(llms["packed"], jobs)[0]
            same = next((i for i in range(new_tokens) if ours[i] != found[i]), new_tokens)
            print(f"the same first {same} of {new_tokens} tokens as llama.cpp", file=sys.stderr)
            turns["llama.cpp"] = lambda theirs=theirs: theirs(prompt, new_tokens)
        medians = median_seconds(repetitions, turns)
        rates = {each: number * new_tokens / seconds for each, seconds in medians.items()}
        what = f"SmolLM2 in Q4_1, {number} sequence{'s' * (number > 1)}"
        results.append(at_least(what, rates["packed"], "tokens/s", "bfloat16", rates["dense"], GOALS[number]))
        if "llama.cpp" in rates:
            results.append(at_least(what, rates["packed"], "tokens/s", "llama.cpp", rates["llama.cpp"], 1.0))
    return results


def peer(python: Path, file: Path) -> Callable[[list[int], int], list[int]]:
    """llama.cpp on that file: a prompt and how many tokens in, those tokens out. It ends with this process."""
    if hashlib.sha256(file.read_bytes()).hexdigest() != SMOLLM2_Q4_1.member_sha256:
        raise SystemExit(f"{file} is not the file that {SMOLLM2_Q4_1.member} was published as")
    process = subprocess.Popen(
        [python, PEER, file, str(torch.get_num_threads())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    ask, answers = process.stdin, process.stdout

    def generate(prompt: list[int], count: int) -> list[int]:
        print(json.dumps([prompt, count]), file=ask, flush=True)
        tokens: list[int] = json.loads(answers.readline())
        return tokens

    return generate


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
