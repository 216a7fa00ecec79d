"""Compile the GPU kernels for real GPUs, on a machine that need not have one, and say what the machine code is like.

    python -m tests.fast.compile_kernels                    all kernels, for every architecture
    python -m tests.fast.compile_kernels --arch 90          for one
    python -m tests.fast.compile_kernels --sample 7         half of the shapes of attention, drawn by this seed
    python -m tests.fast.compile_kernels --arch 90 --sass prefill-bf16-d128-g4    print the machine code of one

Each kernel is compiled with the very arguments its launcher would give it, then read back with the tools in Triton's
own wheel. One JSON object a line: registers a thread, bytes of shared memory, how many programs a multiprocessor holds
with that, spills (loads and stores of local memory, where registers go that do not fit), which tensor-core instructions
there are, and how many accesses to global memory are as wide as can be. Interpreting (TRITON_INTERPRET=1) and compiling
exclude each other in one process, so the tests run this in one of its own.

A kernel is added by adding an `Entry` to `entries()`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minipaged.fast.gpu import attention, block_table, kv_cache, llama, packed, sampling
from tests.effort import drawn

ARCHITECTURES = (80, 90, 100)
"""Compute capability, times ten: A100, H100 and H200, B200."""

LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")

WGMMA = ("HGMMA", "IGMMA", "QGMMA")
TENSOR_CORES = ("HMMA", "IMMA", *WGMMA, "UTCHMMA", "UTCQMMA")
"""What multiplies matrices (of 16 bits, of int8, of 8-bit floats) in machine code: a warp; four warps, on sm_90; a
whole multiprocessor, on sm_100."""

ASYNC_PROXY = ("wgmma.mma_async", "tcgen05.mma")
"""What multiplies matrices from shared memory, in PTX."""

ORDER = ("bar.sync", "fence.proxy.async")
"""What stands between writing shared memory and reading it."""

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
    """On sm_90 they must be wgmma (`WGMMA`), the only ones that reach the peak there."""
    shared_bytes: int | None = None
    """The shared memory that it is reckoned to take, if somebody asks before it is compiled."""
    wide: frozenset[str] = frozenset()
    """Which of "loads" and "stores" must mostly be of 16 bytes on sm_90, the widest that a thread can make there."""


def entries(arch: int, sample: str | None = None) -> Iterator[Entry]:
    """All kernels for one architecture. With `sample`, a seed: of attention, whose kernels take longest to compile, one
    shape in `ONE_SHAPE_IN`."""
    yield from attention_entries(
        arch, ATTENTION if sample is None else drawn(ONE_SHAPE_IN, ATTENTION, f"{sample} {arch}")
    )
    yield from cache_entries(arch)
    yield from model_entries(arch)
    yield from packed_entries(arch)
    yield from draw_entries()
    if arch == 90:  # a few instructions each, which are the same everywhere
        yield from small_entries()


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

ALONE = {"lots": None, "max_shared_splits": None}
"""No blocks that are read once for many sequences."""
TOGETHER = {"lots": "*i32", "max_shared_splits": "i32"}

VARIANTS = {"window": "i32", "soft_cap": "fp32", "sinks": "*fp32"}
"""What some models' layers have; None in others."""

CODES = {"int8": "*i8", "fp8": "*u8"}
"""Keys and values in 8 bits."""

ATTENTION = (
    # dtype, head_dim, group, block size, keys and values, variants
    (torch.bfloat16, 64, 3, 16, "auto", ()),  # SmolLM2
    (torch.bfloat16, 128, 4, 16, "auto", ()),  # Llama 3 8B
    (
        torch.float16,
        128,
        8,
        1,
        "auto",
        (),
    ),  # as many heads as Llama 3 70B has for each key/value head; the smallest block
    (torch.bfloat16, 256, 4, 16, "auto", ()),  # the widest head
    (torch.bfloat16, 256, 32, 16, "auto", ()),  # with as many heads as any model has for each key/value head
    (torch.float32, 64, 3, 16, "auto", ()),
    (torch.float32, 256, 4, 16, "auto", ()),
    (torch.bfloat16, 64, 3, 16, "int8", ()),
    (torch.bfloat16, 128, 4, 16, "int8", ()),
    (torch.bfloat16, 128, 4, 16, "fp8", ()),
    (torch.bfloat16, 256, 32, 16, "fp8", ()),
    (torch.float32, 64, 3, 16, "int8", ()),
    (torch.bfloat16, 128, 4, 16, "auto", ("window",)),  # Mistral 7B
    (torch.bfloat16, 64, 8, 16, "auto", ("window", "sinks")),  # gpt-oss: every other layer
    (torch.bfloat16, 64, 8, 16, "auto", ("sinks",)),
    (torch.bfloat16, 256, 2, 16, "auto", ("window", "soft_cap")),  # Gemma 2 9B: every other layer
    (torch.bfloat16, 256, 2, 16, "auto", ("soft_cap",)),
    (torch.bfloat16, 128, 4, 16, "fp8", ("window",)),
    (torch.bfloat16, 256, 32, 16, "int8", ("window", "soft_cap", "sinks")),
    (torch.float32, 64, 3, 16, "auto", ("window", "soft_cap", "sinks")),
)


ONE_SHAPE_IN = 2
"""A sample compiles one of every two of these shapes."""


def attention_entries(
    arch: int, shapes: Sequence[tuple[torch.dtype, int, int, int, str, tuple[str, ...]]]
) -> Iterator[Entry]:
    for dtype, head_dim, group, block_size, kind, variants in shapes:
        in_8_bits = kind in CODES
        arrays = {"query": POINTER[dtype]} | dict.fromkeys(("keys", "values"), CODES.get(kind, POINTER[dtype]))
        arrays |= {"kv_scales": "*fp32"} if in_8_bits else {}
        scales = {} if in_8_bits else {"kv_scales": None}
        where = {"tables": "*i32", "rows": "*i32", "out": POINTER[dtype]}
        shape = f"{NAME[dtype]}-d{head_dim}-g{group}-b{block_size}" + (f"-{kind}" if in_8_bits else "")
        shape += "".join(f"-{variant}" for variant in variants)
        on_tensor_cores = dtype != torch.float32  # tf32 would lose half of the digits
        decode = attention.decode_options(dtype, head_dim, group, block_size, arch, in_8_bits, split=True)
        partial = {"partial_o": "*fp32", "partial_lse": "*fp32"}
        decoding = arrays | where | partial | LENGTHS | {"scale": "fp32"} | STRIDES
        decodes = [("decode", {}, scales | ALONE)]
        if "window" not in variants:  # otherwise nothing is shared
            decodes.append(("decode-rest", TOGETHER, scales))
        for name, types, constants in decodes:
            with_variants, without = varied(attention._decode_kernel, variants)
            yield Entry(
                f"{name}-{shape}",
                attention._decode_kernel,
                decoding | types | with_variants,
                decode | constants | without,
                tensor_cores=on_tensor_cores,
                shared_bytes=None if in_8_bits else attention.shared_bytes(dtype, decode, arch),
            )
        together = attention.shared_options(dtype, head_dim, group, block_size, arch, in_8_bits)
        shared = dict.fromkeys(("members", "starts", "num_tokens", "lots"), "*i32")
        shared |= dict.fromkeys(("prefixes", "max_shared_splits", "splits"), "i32")
        strides = {name: kind for name, kind in STRIDES.items() if not name.startswith("out_")}
        with_variants, without = varied(attention._shared_kernel, variants)
        if "window" not in variants and "sinks" not in variants:  # of sinks it knows nothing
            yield Entry(
                f"shared-{shape}",
                attention._shared_kernel,
                arrays | where | partial | shared | {"scale": "fp32"} | strides | with_variants,
                together | scales | without,
                tensor_cores=on_tensor_cores,
                wgmma=on_tensor_cores and together["ROWS"] == 128,
                shared_bytes=None if in_8_bits else attention.shared_bytes(dtype, together, arch),
            )
        prompts = {}  # by rows of a tile: long prompts, and a few tokens each
        for max_query_len in (1024, 8):
            options = attention.prefill_options(
                dtype, head_dim, group, block_size, arch, in_8_bits, max_query_len, windowed="window" in variants
            )
            prompts[options["ROWS"]] = options
        lengths = {"query_start": "*i32", "context_lens": "*i32", "seqs": "i32"}
        with_variants, without = varied(attention._prefill_kernel, variants)
        for rows, options in prompts.items():
            yield Entry(
                f"prefill-{shape}-rows{rows}",
                attention._prefill_kernel,
                arrays | where | lengths | {"scale": "fp32"} | STRIDES | with_variants,
                options | scales | without,
                tensor_cores=on_tensor_cores,
                wgmma=on_tensor_cores and rows == 128,
                shared_bytes=None if in_8_bits else attention.shared_bytes(dtype, options, arch),
            )
    reduction = attention.reduce_options(attention.decode_options(torch.bfloat16, 128, 4, 16, arch, False, split=True))
    parts = {"out": "*bf16", "partial_o": "*fp32", "partial_lse": "*fp32"} | LENGTHS
    parts |= {"out_token_stride": "i32", "out_head_stride": "i32"}
    for variants in ((), ("window",)):
        with_variants, without = varied(attention._reduce_kernel, variants)
        name = "-".join(("reduce-bf16-d128", *variants))
        yield Entry(name, attention._reduce_kernel, parts | with_variants, reduction | ALONE | without)
    yield Entry("reduce-shared-bf16-d128", attention._reduce_kernel, parts | TOGETHER, reduction | {"window": None})


def varied(kernel: Any, variants: tuple[str, ...]) -> tuple[dict[str, str], dict[str, None]]:
    """The types of a kernel's arguments for these variants, and constants for the others."""
    own = [variant for variant in VARIANTS if variant in kernel.arg_names]
    return {each: VARIANTS[each] for each in own if each in variants}, {
        each: None for each in own if each not in variants
    }


# --- the cache, the tables, and what lies between the matrix products ------------------------------

BOTH = frozenset({"loads", "stores"})


def dtypes(arch: int) -> tuple[torch.dtype, ...]:
    """All of them for Hopper; elsewhere the one that is used most."""
    return (torch.bfloat16, torch.float32) if arch == 90 else (torch.bfloat16,)


def cache_entries(arch: int) -> Iterator[Entry]:
    cache_strides = ("block_stride", "head_stride", "slot_stride")
    norms, scales = ("query_norm", "key_norm"), ("kv_scales", "static_scales")
    shapes = [(32, 8, 128, 16)]  # heads, kv heads, head dim, block size
    if arch == 90:
        shapes += [(9, 3, 64, 16), (32, 32, 80, 16), (4, 2, 36, 7)]  # the last ones: padded to 128; odd in every way
    for dtype in dtypes(arch):
        for heads, kv_heads, head_dim, block_size in shapes[:1] if dtype == torch.float32 else shapes:
            shape = f"{NAME[dtype]}-d{head_dim}-h{heads}"
            odd = frozenset(cache_strides if head_dim == 36 else ())
            wide = frozenset() if head_dim == 36 else BOTH
            half, dims = triton.next_power_of_2(head_dim // 2), triton.next_power_of_2(head_dim)
            sizes = {"NUM_KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "num_warps": 2}
            angles, places = {"cos": "*fp32", "sin": "*fp32"}, {"positions": "*i32", "slots": "*i32"}
            cache = dict.fromkeys(("keys", "values"), POINTER[dtype])
            rotated = (
                {"qkv": POINTER[dtype], **angles, **places, "query": POINTER[dtype], **cache}
                | dict.fromkeys(("qkv_stride", *cache_strides), "i32")
                | {"eps": "fp32"}
            )
            options = sizes | {"NUM_HEADS": heads, "HEADS": max(1, kv_cache.TILE // half), "HALF": half}
            options |= {"enable_fp_fusion": False}
            yield Entry(
                f"rope-and-write-{shape}",
                kv_cache._rope_and_write,
                rotated,
                options | dict.fromkeys((*norms, *scales)),
                odd=odd,
                wide=wide,
            )
            for kind, given in (("int8", scales[:1]), ("fp8", scales)):  # each token's own scales, and a checkpoint's
                codes = dict.fromkeys(("keys", "values"), CODES[kind]) | dict.fromkeys(given, "*fp32")
                yield Entry(
                    f"rope-and-write-{shape}-{kind}",
                    kv_cache._rope_and_write,
                    rotated | codes,
                    options | dict.fromkeys((*norms, *scales[len(given) :])),
                    odd=odd | frozenset(given if head_dim == 36 else ()),
                )
            yield Entry(
                f"rope-and-write-normed-{shape}",  # Qwen3
                kv_cache._rope_and_write,
                rotated | dict.fromkeys(norms, POINTER[dtype]),
                options | dict.fromkeys(scales),
                odd=odd | frozenset(norms if head_dim == 36 else ()),
                wide=wide
                & {"stores"},  # the weights, which all heads share, are loaded a number a thread, like cos and sin
            )
            yield Entry(
                f"write-{shape}",
                kv_cache._write,
                {"slots": "*i32", "k": POINTER[dtype], "v": POINTER[dtype], **cache}
                | dict.fromkeys(("k_stride", "v_stride", *cache_strides), "i32"),
                sizes | {"HEADS": max(1, kv_cache.TILE // dims), "DIMS": dims} | dict.fromkeys(scales),
                odd=odd,
                wide=wide,
            )
    blocks = {
        "i64-llama-3-8b": ("*i64", 32 * 2 * 8 * 16 * 128 * 2 // 8),
        "i64-smollm2": ("*i64", 30 * 2 * 3 * 16 * 64 * 2 // 8),
        "i32-odd": ("*i32", 4097),
    }
    for name, (words, count) in blocks.items() if arch == 90 else ():
        yield Entry(
            f"copy-blocks-{name}",
            kv_cache._copy_blocks,
            {"words": words, "pairs": "*i32"},
            {"WORDS": count, "PIECE": min(kv_cache.PIECE, triton.next_power_of_2(count)), "num_warps": 4},
            wide=BOTH if words == "*i64" else frozenset(),
        )


def model_entries(arch: int) -> Iterator[Entry]:
    for dtype in dtypes(arch):
        pointer, name = POINTER[dtype], NAME[dtype]
        half_on_hopper = arch == 90 and dtype != torch.float32
        for hidden in (576, 4096, 16384) if half_on_hopper else (4096,):
            width = triton.next_power_of_2(hidden)
            warps = min(16, max(1, width * dtype.itemsize // 512))
            options = {"HIDDEN": hidden, "WIDTH": width, "num_warps": warps, "enable_fp_fusion": False}
            x = {"x": pointer, "weight": pointer, "normed": pointer, "x_stride": "i32", "eps": "fp32"}
            yield Entry(f"rms-norm-{name}-{hidden}", llama._rms_norm, x, options, wide=BOTH)
            both = x | {"residual": pointer, "residual_stride": "i32"}
            yield Entry(f"add-rms-norm-{name}-{hidden}", llama._add_rms_norm, both, options, wide=BOTH)
        for intermediate in (1536, 14336) if half_on_hopper else (14336,):
            for gate in ("swiglu", "geglu"):
                options = {"INTERMEDIATE": intermediate, "TILE": llama.TILE, "GELU": gate == "geglu", "num_warps": 4}
                yield Entry(
                    f"{gate}-{name}-{intermediate}",
                    llama._gate,
                    {"gate_up": pointer, "activated": pointer, "gate_up_stride": "i32"},
                    options | {"enable_fp_fusion": False},
                    wide=BOTH,
                )
        for vocab in (49152, 128256) if half_on_hopper else (128256,):
            yield Entry(
                f"tile-peaks-{name}-{vocab}",
                sampling._tile_peaks,
                {"logits": pointer, "tile_tokens": "*i64", "tile_peaks": "*fp32", "tile_totals": "*fp32"}
                | {"logits_stride": "i32"},
                {"VOCAB": vocab, "TILE": sampling.TILE, "num_warps": 8, "enable_fp_fusion": False},
                wide=frozenset({"loads"}),
            )
            yield Entry(
                f"tile-allowed-{name}-{vocab}",
                sampling._tile_allowed,
                {"logits": pointer, "rows": "*i64", "allowed": "*i32", "tile_tokens": "*i64"}
                | dict.fromkeys(("tile_logits", "tile_peaks", "tile_totals"), "*fp32")
                | dict.fromkeys(("logits_stride", "allowed_stride"), "i32"),
                {"VOCAB": vocab, "TILE": sampling.TILE, "num_warps": 8, "enable_fp_fusion": False},
            )


HALF, SINGLE = {"scales": "*fp16"}, {"scales": "*fp32"}

PACKED: dict[str, tuple[int, dict[str, Any]]] = {
    # form, and what else its kernel is compiled for: constants, and types of tensors that others do without
    "int4-zeros-g128": (packed.NIBBLES.value, {"BLOCK": 128, "GROUP": 128, "zeros": "*u8"} | HALF),
    "fp8-blocks": (packed.FLOATS.value, {"BLOCK": 128, "GROUP": 128} | SINGLE),
    "w8a8-int8": (packed.INT8.value, {"BLOCK": 128, "GROUP": 0, "x_scales": "*fp32"} | HALF),
    "w8a8-fp8-blocks": (
        packed.FLOAT8.value,
        {"BLOCK": 128, "GROUP": 128, "X_GROUP": 128, "group_scales": "*fp32"} | SINGLE,
    ),
    # on Hopper only
    "w8a8-fp8": (packed.FLOAT8.value, {"BLOCK": 128, "GROUP": 0, "x_scales": "*fp32"} | SINGLE),
    "int4-g64": (packed.NIBBLES.value, {"BLOCK": 64, "GROUP": 64, "ZERO": 8} | HALF),
    "int4-channel": (packed.NIBBLES.value, {"BLOCK": 128, "GROUP": 0, "ZERO": 8} | HALF),
    "q4-1": (packed.NIBBLES.value, {"BLOCK": 32, "GROUP": 32, "minima": "*fp16"} | HALF),
    "q8-0": (packed.BYTES.value, {"BLOCK": 32, "GROUP": 32, "ZERO": 128} | HALF),
    "nf4": (packed.TABLE.value, {"BLOCK": 64, "GROUP": 64, "table": "*bf16"} | SINGLE),
}


def packed_entries(arch: int) -> Iterator[Entry]:
    """Products with packed matrices: a row, and many."""
    for name, (form, given) in list(PACKED.items())[: 10 if arch == 90 else 4]:
        if form == packed.FLOAT8.value and arch < 89:
            continue
        dtypes = [torch.bfloat16, torch.float16, torch.float32] if name == "int4-g64" else [torch.bfloat16]
        numbers = (1, 24, 512) if name == "int4-zeros-g128" else (1, 512)
        for dtype, rows in itertools.product(dtypes, numbers):
            yield packed_entry(f"packed-{name}-{NAME[dtype]}", form, dtype, given, rows, arch)


def packed_entry(name: str, form: int, dtype: torch.dtype, given: dict[str, Any], rows: int, arch: int) -> Entry:
    sums = "zeros" in given or "minima" in given
    options = packed.tile_options(
        rows, form, dtype, given["BLOCK"], sums=sums, several=given["GROUP"] > 0, capability=arch
    )
    both_sides = {packed.INT8.value: "*i8", packed.FLOAT8.value: "*fp8e4nv"}
    arguments = {
        "x": both_sides.get(form, POINTER[dtype]),
        "codes": both_sides.get(form, "*i32"),
        "out": POINTER[dtype],
        "partial": "*fp32",
        **{argument: kind for argument, kind in given.items() if isinstance(kind, str)},
        **dict.fromkeys(("rows", "outputs", "inputs", "x_stride", "steps", "steps_a_split"), "i32"),
    }
    constants = {argument: value for argument, value in given.items() if not isinstance(value, str)}
    optional = ("zeros", "minima", "table", "group_scales", "x_scales", "x_zeros", "row_sums", "bias")
    left_out = dict.fromkeys(argument for argument in optional if argument not in arguments)
    on_tensor_cores = dtype != torch.float32
    return Entry(
        f"{name}-rows{options['TILE_ROWS']}",
        packed._multiply,
        arguments,
        {"ZERO": 0, "X_GROUP": 0, "WHOLE": True, "FORM": form} | left_out | constants | options,
        tensor_cores=on_tensor_cores,
        wgmma=on_tensor_cores,
    )


def draw_entries() -> Iterator[Entry]:
    """Sums in float64: they leave nothing of the type of the logits."""
    each = {"rows": "*i64", "peaks": "*fp64", "temperatures": "*fp64", "min_logprobs": "*fp64", "totals": "*fp64"}
    options = {"VOCAB": 128256, "TILE": sampling.DRAW_TILE, "num_warps": 4, "enable_fp_fusion": False}
    for name, pointer in (("bf16", "*bf16"), ("fp32", "*fp32"), ("fp64", "*fp64")):  # fp64: penalised rows
        logits = {"logits": pointer, **each, "logits_stride": "i32", "allowed_stride": "i32"}
        drawn = {"distributions": "*i64", "uniforms": "*fp64", "token_ids": "*i64"}
        tiles = triton.cdiv(128256, sampling.DRAW_TILE)
        constants = options | {"TILES": tiles, "WIDTH": triton.next_power_of_2(tiles)}
        for grammar, allowed, none in (("", {}, {"allowed": None}), ("-allowed", {"allowed": "*i32"}, {})):
            yield Entry(f"tile-totals-{name}{grammar}", sampling._tile_totals, logits | allowed, options | none)
            warps = {"num_warps": 8 if allowed else 4}
            yield Entry(f"draw-{name}{grammar}", sampling._draw, logits | drawn | allowed, constants | none | warps)
    table = {"table": "*fp64", "allowed": "*i32", "table_stride": "i32", "allowed_stride": "i32"}
    yield Entry("forbid", sampling._forbid, table, {"VOCAB": 128256, "TILE": sampling.TILE, "num_warps": 8})


def small_entries() -> Iterator[Entry]:
    def integers(*names: str) -> dict[str, str]:
        return dict.fromkeys(names, "*i32") | {"n": "i32", "table_stride": "i32"}

    lanes = {"LANES": block_table.LANES, "num_warps": 4}
    yield Entry("edit-tables", block_table._edit_tables, integers("tables", "edits"), lanes)
    forks = {"tables": "*i32", "forks": "*i32", "table_stride": "i32"}
    yield Entry("fork-tables", block_table._fork_tables, forks, {"PIECE": block_table.PIECE, "num_warps": 4})
    each = ("tables", "rows", "positions", "slots")
    block_size = {"BLOCK_SIZE": 16}
    yield Entry("slot-mapping", block_table._slot_mapping, integers(*each), lanes | block_size)
    every = integers(*each, "context_lens")
    yield Entry("advance-decode", block_table._advance_decode, every, lanes | block_size)
    tiles = triton.cdiv(128256, sampling.TILE)
    merged = {"TILES": tiles, "WIDTH": triton.next_power_of_2(tiles), "num_warps": 1, "enable_fp_fusion": False}
    yield Entry(
        "row-peaks-128256",
        sampling._row_peaks,
        {"tile_tokens": "*i64", "tile_peaks": "*fp32", "tile_totals": "*fp32"}
        | {"token_ids": "*i64", "peaks": "*fp32", "log_totals": "*fp32"},
        merged,
    )
    yield Entry(
        "row-allowed-128256",
        sampling._row_allowed,
        {"tile_tokens": "*i64", "tile_logits": "*fp32", "tile_peaks": "*fp32", "tile_totals": "*fp32"}
        | {"token_ids": "*i64", "found": "*fp64", "peaks": "*fp64", "log_totals": "*fp64"},
        merged,
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


def accesses(opcode: str, code: str) -> dict[str, int]:
    """How many accesses to global memory are 16 bytes wide, and how many are narrower."""
    every = re.findall(rf"\b{opcode}[.\w]*", code)
    wide = sum(".128" in access for access in every)
    return {"wide": wide, "narrow": len(every) - wide}


def machine_code(binary: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return _output_of("nvdisasm", "--print-code", "--no-dataflow", file.name)  # which would only sort out branches


def early_reads(ptx: str) -> list[str]:
    """The instructions that may read shared memory before what others wrote is there.

    What is copied past the registers (cp.async) is there for the thread that waits for it, and for the others behind a
    barrier. And the tensor cores that multiply from shared memory read by a way of their own (the async proxy), on
    which what was written before is seen behind a fence only (PTX ISA, "Async proxy"). Triton 3.6 left it out.
    """
    found, needs_barrier, needs_fence = [], False, False
    for line in 2 * ptx.splitlines():  # twice: the end of a loop comes before its beginning
        instruction = line.strip().removeprefix("@").partition(" ")[2] if line.strip()[:1] == "@" else line.strip()
        if instruction.startswith("cp.async.wait"):
            needs_barrier = needs_fence = True
        elif instruction.startswith("st.shared"):
            needs_fence = True
        elif instruction.startswith("bar.sync"):
            needs_barrier = False
        elif instruction.startswith("fence.proxy.async"):
            needs_fence = False
        elif (needs_barrier and instruction.startswith(("ld.shared", "ldmatrix", *ASYNC_PROXY))) or (
            needs_fence and instruction.startswith(ASYNC_PROXY)
        ):
            found.append(instruction)
    return found


def report(entry: Entry, arch: int) -> dict[str, Any]:
    found = read_back(entry.name, compiled(entry, arch))
    return found | {
        "arch": arch,
        "shared_bytes_reckoned": entry.shared_bytes,
        "tensor_cores_needed": entry.tensor_cores,
        "wgmma_needed": entry.wgmma and arch == 90,
        "wide_needed": sorted(entry.wide) if arch == 90 else [],
    }


def read_back(name: str, kernel: Any) -> dict[str, Any]:
    """What a compiled kernel's machine code is like, and what the assembly (PTX) that it was made of."""
    ptx, binary = kernel.asm["ptx"], kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = _output_of("cuobjdump", "--dump-resource-usage", file.name)
    code = machine_code(binary)
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", code, re.MULTILINE)
    assert len(opcodes) > 20, f"the machine code of {name} could not be read"
    registers = int(re.findall(r"REG:(\d+)", usage)[0])
    return {
        "kernel": name,
        "warps": kernel.metadata.num_warps,
        "registers": registers,
        "spills": opcodes.count("LDL") + opcodes.count("STL"),
        "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared_bytes": kernel.metadata.shared,
        "programs_an_sm": programs_an_sm(registers, kernel.metadata.shared, kernel.metadata.num_warps),
        "instructions": len(opcodes),
        "tensor_cores": [core for core in TENSOR_CORES if core in opcodes],
        "loads": accesses("LDG", code),
        "stores": accesses("STG", code),
        "copies_past_registers": "cp.async.wait" in ptx,
        "early_reads": early_reads(ptx),
        "early_reads_without": {order: early_reads(ptx.replace(order, "//")) for order in ORDER},
    }


def programs_an_sm(registers: int, shared_bytes: int, warps: int) -> int:
    """How many programs a multiprocessor of sm_90 or sm_100 holds at once.

    It has 65,536 registers, given out to warps in lots of 8 a thread; 228 KB of shared memory, of which 1 KB a program
    is the system's; and room for 64 warps (CUDA C++ Programming Guide, technical specifications).
    """
    registers_a_warp = 32 * 8 * -(-registers // 8)
    return min(65_536 // (registers_a_warp * warps), 228 * 1024 // (shared_bytes + 1024), 64 // warps)


def _output_of(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the GPU kernels and print what the machine code is like.")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES)
    parser.add_argument("--sass", metavar="KERNEL", help="print the machine code of this kernel instead")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only kernels whose names begin so")
    parser.add_argument("--sample", metavar="SEED", help="only half of the shapes of attention, drawn by this seed")
    chosen = parser.parse_args()
    for arch in ARCHITECTURES if chosen.arch is None else (chosen.arch,):
        for entry in entries(arch, chosen.sample):
            if chosen.sass == entry.name:
                print(machine_code(compiled(entry, arch).asm["cubin"]))
            elif chosen.sass is None and entry.name.startswith(chosen.only):
                print(json.dumps(report(entry, arch)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
