"""Compile the GPU kernels for real GPUs, on a machine that need not have one, and say what the machine code is like.

    python -m tests.fast.compile_kernels                    all kernels, for every architecture
    python -m tests.fast.compile_kernels --arch 90          for one
    python -m tests.fast.compile_kernels --arch 90 --sass prefill-bf16-d128-g4    print the machine code of one

Each kernel is compiled with the very arguments its launcher would give it, then read back with the tools in Triton's
own wheel. One JSON object a line: registers a thread, bytes of shared memory, spills (loads and stores of local memory,
where registers go that do not fit) and which tensor-core instructions there are. Interpreting (TRITON_INTERPRET=1) and
compiling exclude each other in one process, so the tests run this in one of its own.

A kernel is added by adding an `Entry` to `entries()`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minipaged.fast.gpu import attention

ARCHITECTURES = (80, 90, 100)
"""Compute capability, times ten: A100, H100 and H200, B200."""

LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")

TENSOR_CORES = ("HMMA", "HGMMA", "UTCHMMA")
"""What multiplies 16-bit matrices in machine code: a warp; four warps, on sm_90; a whole multiprocessor, on sm_100."""

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel as one launcher would compile it, and what its machine code must be like."""

    name: str
    kernel: Any
    """The `@triton.jit` function."""
    arguments: dict[str, str]
    """Triton types of the arguments that are not compile-time constants, in order: "*bf16", "i32", "fp32"."""
    options: dict[str, Any]
    """What the launcher passes by keyword: compile-time constants, num_warps, num_stages."""
    odd: frozenset[str] = frozenset()
    """Integer arguments that are not multiples of 16, besides those on which the kernel is not specialized."""
    tensor_cores: bool = False
    """There must be tensor-core instructions."""
    wgmma: bool = False
    """On sm_90 they must be wgmma (HGMMA), the only ones that reach the peak there."""


def entries(arch: int) -> Iterator[Entry]:
    yield from attention_entries(arch)


# --- attention -------------------------------------------------------------------------------------

POINTER = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
NAME = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

STRIDES = dict.fromkeys(
    (
        "query_token_stride",
        "query_head_stride",
        "out_token_stride",
        "out_head_stride",
        "block_stride",
        "kv_head_stride",
        "slot_stride",
        "table_stride",
    ),
    "i32",
)
LENGTHS = {"context_lens": "*i32", "seqs": "i32", "kv_heads": "i32", "programs": "i32", "max_splits": "i32"}

ATTENTION = (
    # dtype, head_dim, group, block size
    (torch.bfloat16, 64, 3, 16),  # SmolLM2
    (torch.bfloat16, 128, 4, 16),  # Llama 3 8B
    (torch.float16, 128, 8, 1),  # as many heads as Llama 3 70B has for each key/value head; the smallest block
    (torch.bfloat16, 256, 4, 16),  # the widest head
    (torch.float32, 64, 3, 16),
)


def attention_entries(arch: int) -> Iterator[Entry]:
    for dtype, head_dim, group, block_size in ATTENTION:
        arrays = dict.fromkeys(("query", "keys", "values"), POINTER[dtype])
        where = {"tables": "*i32", "rows": "*i32", "out": POINTER[dtype]}
        shape = f"{NAME[dtype]}-d{head_dim}-g{group}-b{block_size}"
        on_tensor_cores = dtype != torch.float32  # tf32 would lose half of the digits
        decode = attention.decode_options(dtype, head_dim, group, block_size, arch, split=True)
        yield Entry(
            f"decode-{shape}",
            attention._decode_kernel,
            arrays | where | {"partial_o": "*fp32", "partial_lse": "*fp32"} | LENGTHS | {"scale": "fp32"} | STRIDES,
            decode,
            tensor_cores=on_tensor_cores,
        )
        prompts = {}  # by rows of a tile: long prompts, and a few tokens each
        for max_query_len in (1024, 8):
            options = attention.prefill_options(dtype, head_dim, group, block_size, arch, max_query_len)
            prompts[options["ROWS"]] = options
        lengths = {"query_start": "*i32", "context_lens": "*i32", "seqs": "i32"}
        for rows, options in prompts.items():
            yield Entry(
                f"prefill-{shape}-rows{rows}",
                attention._prefill_kernel,
                arrays | where | lengths | {"scale": "fp32"} | STRIDES,
                options,
                tensor_cores=on_tensor_cores,
                wgmma=on_tensor_cores and rows == 128,
            )
    yield Entry(
        "reduce-bf16-d128",
        attention._reduce_kernel,
        {"out": "*bf16", "partial_o": "*fp32", "partial_lse": "*fp32"}
        | LENGTHS
        | {"out_token_stride": "i32", "out_head_stride": "i32"},
        attention.reduce_options(attention.decode_options(torch.bfloat16, 128, 4, 16, arch, split=True)),
    )


# --- compiling and reading back --------------------------------------------------------------------


def compiled(entry: Entry, arch: int) -> Any:
    """As the launcher's just-in-time compiler would: pointers and integers that are multiples of 16 are known to be."""
    constants = {name: value for name, value in entry.options.items() if name not in LAUNCH_OPTIONS}
    launch = {name: value for name, value in entry.options.items() if name in LAUNCH_OPTIONS}
    signature = {name: entry.arguments.get(name, "constexpr") for name in entry.kernel.arg_names}
    unaligned = entry.odd | {parameter.name for parameter in entry.kernel.params if parameter.do_not_specialize}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") or kind in ("i32", "i64")) and name not in unaligned
    }
    source = ASTSource(entry.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)


def machine_code(binary: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return _output_of("nvdisasm", "--print-code", file.name)


def report(entry: Entry, arch: int) -> dict[str, Any]:
    kernel = compiled(entry, arch)
    binary = kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = _output_of("cuobjdump", "--dump-resource-usage", file.name)
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", machine_code(binary), re.MULTILINE)
    assert len(opcodes) > 20, f"the machine code of {entry.name} could not be read"
    return {
        "kernel": entry.name,
        "arch": arch,
        "warps": kernel.metadata.num_warps,
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "spills": opcodes.count("LDL") + opcodes.count("STL"),
        "shared_bytes": kernel.metadata.shared,
        "instructions": len(opcodes),
        "tensor_cores": [name for name in TENSOR_CORES if name in opcodes],
        "tensor_cores_needed": entry.tensor_cores,
        "wgmma_needed": entry.wgmma and arch == 90,
    }


def _output_of(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the GPU kernels and print what the machine code is like.")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES)
    parser.add_argument("--sass", metavar="KERNEL", help="print the machine code of this kernel instead")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only kernels whose names begin so")
    chosen = parser.parse_args()
    for arch in ARCHITECTURES if chosen.arch is None else (chosen.arch,):
        for entry in entries(arch):
            if chosen.sass == entry.name:
                print(machine_code(compiled(entry, arch).asm["cubin"]))
            elif chosen.sass is None and entry.name.startswith(chosen.only):
                print(json.dumps(report(entry, arch)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
