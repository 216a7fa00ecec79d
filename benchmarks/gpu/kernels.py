"""How fast: what this card can do at best, and each kernel as a share of that, beside peers where they are installed.

Attention's peers get the same queries, keys and values. Those that page read our cache through our block tables; those
that do not (`contiguous` in their names) read keys and values that were gathered into one piece before the clock
started, so they are spared the look-ups. A peer that is not installed is named as missing, and one that refuses the
shape is named with what it said.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.harness import Job, Row, Setting, num_inputs, time_calls, wall_seconds, work
from minipaged.fast import gpu
from minipaged.fast.cascade import shared_prefixes
from minipaged.fast.gpu import attention, block_table, kv_cache, llama, sampling
from minipaged.fast.kernels import Paged, Shared
from minipaged.fast.kv_cache import KVCache

BLOCK_SIZE = 16


def ceilings(setting: Setting) -> list[Job]:
    return [
        Job("copy", partial(copy_ceiling, setting)),
        Job("matmul", partial(matmul_ceiling, setting)),
        Job("device to host", partial(link_ceiling, setting, True)),
        Job("host to device", partial(link_ceiling, setting, False)),
    ]


def copy_ceiling(setting: Setting) -> Row:
    """A large copy within the device, counting bytes read and bytes written.

    A kernel does it, which negates each number on its way. A CUDA graph makes the driver's own memcpy of a mere copy,
    and that took its time: 2.76 TB/s on an H200, where kernels move 4.3.
    """
    source = torch.randn(1 << (8 if setting.tiny else 30), device=setting.device)
    destination = torch.empty_like(source)
    call = partial(torch.neg, source, out=destination)
    return time_calls([call], setting).row(2 * source.nbytes, "GB/s", "copy")


def matmul_ceiling(setting: Setting) -> Row:
    n = 32 if setting.tiny else 8192
    a, b = torch.randn(2, n, n, device=setting.device).to(setting.half)
    return time_calls([lambda: a @ b], setting).row(2 * n**3, "TFLOP/s", "matmul")


def link_ceiling(setting: Setting, out: bool) -> Row:
    """One large copy between the device and pinned memory."""
    size = 1 << (10 if setting.tiny else 29)
    device = torch.randint(-100, 100, (size,), dtype=torch.int8, device=setting.device)
    host = torch.zeros(size, dtype=torch.int8, pin_memory=setting.on_gpu)
    call = partial(host.copy_, device, non_blocking=True) if out else partial(device.copy_, host, non_blocking=True)
    return time_calls([call], setting).row(size, "GB/s", "device to host" if out else "host to device")


def kernel_timings(setting: Setting) -> list[Job]:
    """Those that take next to no time first; last what compiles for long: should time run out, little is lost."""
    others: dict[str, Callable[[Setting], Row]] = {
        "rope_and_write": time_rope_and_write,
        "write": time_write,
        **{
            f"{name}, {model}": partial(time, widths=widths)
            for model, widths in DECODE_WIDTHS.items()
            for name, time in (("rope_and_write", time_rope_and_write), ("write", time_write))
        },
        "copy of 256 blocks of 2 MB": partial(time_copy, blocks=256, layers=32, kv_heads=8, head_dim=128),
        "copy of 1024 blocks of 0.4 MB": partial(time_copy, blocks=1024, layers=30, kv_heads=3, head_dim=64),
        **{
            f"swap {'out' if out else 'in'}, blocks of {size}{', scattered' if scattered else ''}": partial(
                time_swap, layers=layers, out=out, scattered=scattered
            )
            for layers, size in ((8, "0.5 MB"), (32, "2 MB"))
            for scattered in (False, True)
            for out in (True, False)
        },
        **{
            f"{name}, {tokens} tokens of {hidden}": partial(time, tokens=tokens, hidden=hidden)
            for tokens, hidden in ((8192, 4096), (256, 4096), (256, 576))
            for name, time in (
                ("rms_norm", partial(time_norm, added=False)),
                ("add_rms_norm", partial(time_norm, added=True)),
            )
        },
        **{
            f"swiglu, {tokens} tokens of {width}": partial(time_swiglu, tokens=tokens, width=width)
            for tokens, width in ((8192, 14336), (256, 14336), (256, 1536))
        },
        **{
            f"{name}, {rows} rows of {vocab}": partial(time, rows=rows, vocab=vocab)
            for rows, vocab in ((256, 128256), (8, 128256), (256, 49152))
            for name, time in (("argmax_logsumexp", time_argmax), ("draw", time_draw))
        },
        "advance_decode, 256 sequences": time_advance,
    }
    # At one shape each, because compiling takes this peer longer than all else together.
    compiled: dict[str, Peer] = {"FlexAttention, contiguous": flex}
    decode, prefill = usual_shapes(setting)
    return [
        *(Job(name, partial(time, setting)) for name, time in others.items()),
        *(Job(f"prefill {shape}", partial(time_prefill, shape, setting)) for shape in prefill_shapes(setting)),
        *(Job(f"decode {shape}", partial(time_decode, shape, setting)) for shape in decode_shapes(setting)),
        Job("mixed batch", partial(time_mixed, setting)),
        Job("shared reading", partial(time_shared, setting)),
        Job(f"decode {decode}, again", partial(time_decode, decode, setting, compiled)),
        Job(f"prefill {prefill}, again", partial(time_prefill, prefill, setting, compiled)),
    ]


def tuning(setting: Setting) -> list[Job]:
    """The choices of `gpu/attention.py` beside others, at one shape: docs/tuning.md has what to expect of each."""
    decode, prefill = usual_shapes(setting)
    narrow = Shape(prefill.seqs, prefill.context, prefill.kv_heads, prefill.group, 16 if setting.tiny else 64)
    per_sm = {f"{n} programs a multiprocessor": {"PROGRAMS_PER_SM": n} for n in (1, 2, 3, 4)}
    tiles = {f"tiles of {n} keys": {"TILE": n} for n in (32, 128)}
    stages = {f"{n} stages": {"num_stages": n} for n in (3, 4, 5)}
    wide = {"tiles of 128 keys, 4 stages": {"TILE": 128, "num_stages": 4}}
    two_programs = {"64 rows, 4 warps": {"ROWS": 64, "num_warps": 4}}
    trials: list[tuple[str, Callable[..., Row], Shape, dict[str, dict[str, int]]]] = [
        ("decode", time_decode, decode, per_sm | tiles | stages),
        ("prefill", time_prefill, prefill, wide | stages | two_programs),
        ("prefill", time_prefill, narrow, wide | stages),
    ]
    return [
        Job(
            f"{what} {shape}, tuning",
            partial(time, shape, setting, {name: partial(changed, changes) for name, changes in others.items()}),
        )
        for what, time, shape, others in trials
    ]


def usual_shapes(setting: Setting) -> tuple[Shape, Shape]:
    """For decode and prefill, where one shape has to do."""
    if setting.tiny:
        return decode_shapes(setting)[0], prefill_shapes(setting)[0]
    return Shape(32, 2048, 8, 4, 128), Shape(4, 4096, 8, 4, 128)


# --- Attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    seqs: int
    context: int
    kv_heads: int
    group: int
    head_dim: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def __str__(self) -> str:
        return f"{self.seqs} x {self.context} D{self.head_dim} group {self.group}"


def decode_shapes(setting: Setting) -> list[Shape]:
    if setting.tiny:
        return [Shape(2, 80, 1, 2, 16)]
    sizes = [(seqs, context) for seqs in (1, 8, 32, 128) for context in (1024, 2048, 8192)]
    if setting.quick:
        sizes = [(1, 1024), (32, 2048), (128, 2048)]
    return [Shape(*size, *heads) for heads in ((8, 4, 128), (3, 3, 64)) for size in sizes]


def prefill_shapes(setting: Setting) -> list[Shape]:
    """As many sequences as make 16k tokens, with the heads of Llama 3 8B and of Llama 3.2 1B."""
    if setting.tiny:
        return [Shape(2, 40, 1, 2, 16)]
    contexts = (4096,) if setting.quick else (1024, 4096, 8192)
    return [Shape(16384 // context, context, 8, 4, head_dim) for head_dim in (128, 64) for context in contexts]


@dataclass
class Inputs:
    """One batch in the paged cache, and the same keys and values in one piece each."""

    shape: Shape
    query: Tensor  # [tokens, heads, head_dim]
    keys: Tensor  # [num_blocks, kv_heads, BLOCK_SIZE, head_dim], strided
    values: Tensor
    tables: Tensor  # [seqs, max_blocks]
    rows: Tensor  # [seqs]
    context_lens: Tensor  # [seqs]

    @property
    def paged(self) -> Paged:
        return Paged(self.keys, self.values, self.tables, self.rows, self.context_lens)

    def contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """query [seqs, heads, queries, head_dim], keys and values [seqs, kv_heads, context, head_dim]."""
        shape = self.shape
        query = self.query.view(shape.seqs, -1, shape.heads, shape.head_dim).transpose(1, 2).contiguous()
        gathered = [
            blocks[self.tables.long()].transpose(1, 2).flatten(2, 3)[:, :, : shape.context].contiguous()
            for blocks in (self.keys, self.values)
        ]
        return query, gathered[0], gathered[1]


def make_inputs(shape: Shape, setting: Setting, queries: int, copies: int) -> list[Inputs]:
    """Several batches with blocks of their own, in random places of one cache."""
    blocks = -(-shape.context // BLOCK_SIZE)
    num_blocks = copies * shape.seqs * blocks
    size = (num_blocks, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    cache = torch.randn(size, device=setting.device, dtype=setting.half)
    every = torch.randperm(num_blocks, device=setting.device).int().view(copies, shape.seqs, blocks)
    query = torch.randn(
        copies, shape.seqs * queries, shape.heads, shape.head_dim, device=setting.device, dtype=setting.half
    )
    rows = torch.arange(shape.seqs, dtype=torch.int32, device=setting.device)
    lengths = torch.full_like(rows, shape.context)
    return [Inputs(shape, query[i], cache[:, 0], cache[:, 1], every[i], rows, lengths) for i in range(copies)]


def time_decode(shape: Shape, setting: Setting, peers: dict[str, Peer] | None = None) -> Row:
    kv_bytes = 2 * shape.seqs * shape.context * shape.kv_heads * shape.head_dim * setting.half.itemsize
    inputs = make_inputs(shape, setting, 1, num_inputs(kv_bytes, setting))

    def timed(make: Peer) -> Row:
        return time_calls([make(given) for given in inputs], setting).row(kv_bytes, "GB/s", "copy")

    operations = 4 * shape.seqs * shape.context * shape.heads * shape.head_dim
    found = timed(ours) | work(operations, kv_bytes + 2 * inputs[0].query.nbytes)
    return found | {"peers": beside(peers or DECODE_PEERS, timed, ours(inputs[0])(), inputs[0])}


def time_prefill(shape: Shape, setting: Setting, peers: dict[str, Peer] | None = None) -> Row:
    """Causal, the whole prompt. Counted are the products of what is seen: half of the square."""
    inputs = make_inputs(shape, setting, shape.context, 1)
    seen = shape.context * (shape.context + 1) / 2
    operations = 4 * shape.seqs * shape.heads * shape.head_dim * seen

    def timed(make: Peer) -> Row:
        return time_calls([make(given) for given in inputs], setting).row(operations, "TFLOP/s", "matmul")

    kv_bytes = 2 * shape.seqs * shape.context * shape.kv_heads * shape.head_dim * setting.half.itemsize
    found = timed(ours) | work(operations, kv_bytes + 2 * inputs[0].query.nbytes)
    return found | {"peers": beside(peers or PREFILL_PEERS, timed, ours(inputs[0])(), inputs[0])}


def time_mixed(setting: Setting) -> Row:
    """What a server does all the time: sequences that decode, and a chunk of somebody's prompt, in one batch.

    As it is, the decoding ones go through the decode kernel and the chunk through the prefill kernel; beside it, all of
    them through the prefill kernel.
    """
    shape, chunk = (Shape(3, 40, 1, 2, 16), 20) if setting.tiny else (Shape(33, 4096, 8, 4, 128), 2048)
    (given,) = make_inputs(shape, setting, 1, 1)
    alone = shape.seqs - 1  # one query token each; the last sequence has the chunk
    query = torch.randn(alone + chunk, shape.heads, shape.head_dim, device=setting.device).to(setting.half)
    starts = torch.arange(shape.seqs + 1, dtype=torch.int32, device=setting.device)
    starts[-1] = len(query)
    last_start = starts[alone:] - alone
    paged = given.paged

    def apart() -> Tensor:
        first, rest = (
            paged._replace(rows=paged.rows[part], context_lens=paged.context_lens[part])
            for part in (slice(alone), slice(alone, None))
        )
        decoded = attention.paged_decode(query[:alone], first, shape.scale)
        prompt = attention.paged_prefill(query[alone:], rest, last_start, shape.scale, max_query_len=chunk)
        return torch.cat([decoded, prompt])

    def together() -> Tensor:
        return attention.paged_prefill(query, paged, starts, shape.scale, max_query_len=chunk)

    check_same(apart(), together())
    seen = alone * shape.context + sum(range(shape.context - chunk + 1, shape.context + 1))
    operations = 4 * shape.heads * shape.head_dim * seen

    def timed(call: Callable[[], object]) -> Row:
        return time_calls([call], setting).row(operations, "TFLOP/s", "matmul")

    return timed(apart) | {"peers": {"all in the prefill kernel": timed(together)}}


def time_shared(setting: Setting) -> Row:
    """Sequences that decode behind one prompt, whose blocks are read once for all of them; beside it, each reads them
    for itself. Counted are the bytes that sharing reads. (64 x 2048: about `LEAST_SAVED_ON_GPU`.)"""
    shape, prompt = (Shape(3, 80, 1, 2, 16), 64) if setting.tiny else (Shape(64, 2112, 8, 4, 128), 2048)
    token_bytes = 2 * shape.kv_heads * shape.head_dim * setting.half.itemsize
    kv_bytes = (prompt + shape.seqs * (shape.context - prompt)) * token_bytes
    inputs = make_inputs(shape, setting, 1, num_inputs(kv_bytes, setting))
    for given in inputs:
        given.tables[:, : prompt // BLOCK_SIZE] = given.tables[0, : prompt // BLOCK_SIZE].clone()
    found = shared_prefixes(inputs[0].tables.cpu(), inputs[0].context_lens.cpu(), BLOCK_SIZE)
    assert found is not None
    shared = Shared(*(each.to(setting.device) for each in found))

    def once(given: Inputs) -> Callable[[], Tensor]:
        paged = given.paged._replace(shared=shared)
        return lambda: attention.paged_decode(given.query, paged, shape.scale)

    def timed(make: Peer) -> Row:
        return time_calls([make(given) for given in inputs], setting).row(kv_bytes, "GB/s", "copy")

    return timed(once) | {"peers": beside({"each for itself": ours}, timed, once(inputs[0])(), inputs[0])}


def ours(given: Inputs) -> Callable[[], Tensor]:
    """The decode kernel for one query token a sequence, the prefill kernel for the whole prompts."""
    shape, paged = given.shape, given.paged
    if len(given.query) == shape.seqs:
        return lambda: attention.paged_decode(given.query, paged, shape.scale)
    starts = torch.arange(shape.seqs + 1, dtype=torch.int32, device=given.query.device) * shape.context
    return lambda: attention.paged_prefill(given.query, paged, starts, shape.scale, max_query_len=shape.context)


def changed(changes: dict[str, int], given: Inputs) -> Callable[[], Tensor]:
    """Ours, but for some of the choices: constants of `gpu/attention.py`, or what its `_shape` returns."""
    call, shape = ours(given), attention._shape
    constants = {name: value for name, value in changes.items() if hasattr(attention, name)}
    others = {name: value for name, value in changes.items() if name not in constants}

    def call_changed() -> Tensor:
        replaced: dict[str, Any] = constants | {"_shape": lambda *what: shape(*what) | others}
        with patch.multiple(attention, **replaced):
            return call()

    return call_changed


Peer = Callable[[Inputs], Callable[[], Any]]
"""Prepares whatever is not to be timed. What it returns computes the attention, or raises ModuleNotFoundError."""


def beside(
    peers: dict[str, Peer], timed: Callable[[Peer], Row], expected: Tensor, given: Inputs
) -> dict[str, Row | str]:
    """Each peer's time; or that it is missing, or why it would not. One that computes something else is not timed."""
    found: dict[str, Row | str] = {}
    for name, peer in peers.items():
        try:
            result = peer(given)()
            result = result.reshape(expected.shape) if result.numel() == expected.numel() else result
            check_same(result, expected)
            found[name] = timed(peer)
        except ModuleNotFoundError as missing:
            found[name] = f"missing ({missing.name})"
        except Exception as error:  # whatever it is, it is said
            found[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
    return found


def check_same(result: Tensor, ours: Tensor) -> None:
    error = float((result.double() - ours.double()).norm() / ours.double().norm())
    if not error < 0.02:
        raise ArithmeticError(f"its result differs from ours by {error:.3g}")


def sdpa(backend: SDPBackend, given: Inputs) -> Callable[[], Tensor]:
    query, keys, values = given.contiguous()
    causal = query.shape[2] > 1

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)

    if not query.is_cuda:
        backend = SDPBackend.MATH
    return lambda: call().transpose(1, 2)


def flex(given: Inputs) -> Callable[[], Tensor]:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, keys, values = given.contiguous()
    call: Any = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention
    mask = None
    if query.shape[2] > 1:
        n = query.shape[2]
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, n, n, device=query.device.type)
    return lambda: call(query, keys, values, block_mask=mask, enable_gqa=True).transpose(1, 2)


def flashinfer_decode(given: Inputs) -> Callable[[], Tensor]:
    flashinfer = importlib.import_module("flashinfer")
    shape, device = given.shape, given.query.device
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    # Its documentation: the tensor cores pay for large groups. Without them it has no kernel for every group.
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=shape.group >= 3)
    blocks = given.tables.shape[1]
    starts = torch.arange(shape.seqs + 1, dtype=torch.int32, device=device) * blocks
    last = torch.full((shape.seqs,), (shape.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        starts, given.tables.flatten(), last, shape.heads, shape.kv_heads, shape.head_dim, BLOCK_SIZE,
        q_data_type=given.query.dtype, kv_data_type=given.query.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(given.query, (given.keys, given.values))


def flashinfer_prefill(given: Inputs) -> Callable[[], Tensor]:
    flashinfer = importlib.import_module("flashinfer")
    shape, device = given.shape, given.query.device
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    numbers = torch.arange(shape.seqs + 1, dtype=torch.int32, device=device)
    last = torch.full((shape.seqs,), (shape.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        numbers * shape.context, numbers * given.tables.shape[1], given.tables.flatten(), last, shape.heads,
        shape.kv_heads, shape.head_dim, BLOCK_SIZE, causal=True, q_data_type=given.query.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(given.query, (given.keys, given.values))


def flash_attention_3() -> Any:
    """By either of the names that it is packaged under."""
    names = ("flash_attn_interface", "fa3_fwd_interface")
    found = [name for name in names if importlib.util.find_spec(name) is not None]
    return importlib.import_module(found[0] if found else names[0])


def fa3_decode(paged: bool, given: Inputs) -> Callable[[], Tensor]:
    """Its cache is [num_blocks, block_size, kv_heads, head_dim], in any strides: ours, seen so.

    The wheel `fa3-fwd` is built without paging (FLASHATTENTION_DISABLE_PAGEDKV) and says so; hence gathered, too.
    """
    module, query = flash_attention_3(), given.query[:, None]  # [seqs, 1, heads, head_dim]
    if paged:
        keys, values = given.keys.transpose(1, 2), given.values.transpose(1, 2)
        return lambda: module.flash_attn_with_kvcache(
            query, keys, values, cache_seqlens=given.context_lens, page_table=given.tables
        )
    keys, values = (tensor.transpose(1, 2).contiguous() for tensor in given.contiguous()[1:])
    return lambda: module.flash_attn_with_kvcache(query, keys, values, cache_seqlens=given.context_lens)


def fa3_prefill(given: Inputs) -> Callable[[], Tensor]:
    module = flash_attention_3()
    query, keys, values = (tensor.transpose(1, 2).contiguous() for tensor in given.contiguous())

    def call() -> Tensor:
        result = module.flash_attn_func(query, keys, values, causal=True)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return call


def fa2_decode(given: Inputs) -> Callable[[], Tensor]:
    """It pages blocks of 256 and more only: ours are gathered."""
    module = importlib.import_module("flash_attn")
    query, keys, values = (tensor.transpose(1, 2).contiguous() for tensor in given.contiguous())
    return lambda: module.flash_attn_with_kvcache(query, keys, values, cache_seqlens=given.context_lens)


def fa2_prefill(given: Inputs) -> Callable[[], Tensor]:
    module = importlib.import_module("flash_attn")
    query, keys, values = (tensor.transpose(1, 2).contiguous() for tensor in given.contiguous())
    return lambda: module.flash_attn_func(query, keys, values, causal=True)


def conch_decode(given: Inputs) -> Callable[[], Tensor]:
    """Its cache is [num_blocks, block_size, kv_heads, head_dim], in any strides: ours, seen so."""
    module = importlib.import_module("conch.ops.attention.paged_attention")
    keys, values = given.keys.transpose(1, 2), given.values.transpose(1, 2)
    return lambda: module.paged_attention(
        given.query, keys, values, given.tables, given.context_lens, scale=given.shape.scale
    )


def conch_prefill(given: Inputs) -> Callable[[], Tensor]:
    module = importlib.import_module("conch.ops.attention.varlen_attention")
    shape = given.shape
    keys, values = given.keys.transpose(1, 2), given.values.transpose(1, 2)
    starts = torch.arange(shape.seqs + 1, dtype=torch.int32, device=given.query.device) * shape.context
    return lambda: module.varlen_attention(
        given.query, keys, values, starts, shape.context, given.context_lens, shape.context, given.tables,
        causal=True, scale=shape.scale,
    )  # fmt: skip


DECODE_PEERS: dict[str, Peer] = {
    "SDPA flash, contiguous": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN, contiguous": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "FlashInfer": flashinfer_decode,
    "FlashAttention 3": partial(fa3_decode, True),
    "FlashAttention 3, contiguous": partial(fa3_decode, False),
    "FlashAttention 2, contiguous": fa2_decode,
    "conch": conch_decode,
}
PREFILL_PEERS: dict[str, Peer] = {
    "SDPA flash, contiguous": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN, contiguous": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "FlashInfer": flashinfer_prefill,
    "FlashAttention 3, contiguous": fa3_prefill,
    "FlashAttention 2, contiguous": fa2_prefill,
    "conch": conch_prefill,
}


# --- The cache -------------------------------------------------------------------------------------


Widths = tuple[int, int, int, int]
"""Tokens, heads, kv heads and head dim of what is written."""
LARGE: Widths = (8192, 32, 8, 128)
"""One large prefill step of Llama 3 8B."""
DECODE_WIDTHS: dict[str, Widths] = {"256 tokens of 8B": (256, 32, 8, 128), "256 tokens of SmolLM2": (256, 9, 3, 64)}
"""A step of decoding: few bytes, so what counts is the launch."""
TINY: Widths = (3, 4, 2, 16)


def time_rope_and_write(setting: Setting, widths: Widths = LARGE) -> Row:
    tokens, heads, kv_heads, dim = widths = TINY if setting.tiny else widths
    cos, sin = torch.rand(2, tokens, dim // 2, device=setting.device)
    positions = torch.arange(tokens, dtype=torch.int32, device=setting.device)
    moved = 2 * tokens * (heads + 2 * kv_heads) * dim * setting.half.itemsize
    calls = []
    for _ in range(num_inputs(moved, setting)):
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=setting.device).to(setting.half)
        keys, values, slots = empty_cache(setting, widths)
        calls.append(partial(kv_cache.rope_and_write, qkv, cos, sin, positions, slots, keys, values, heads))
    operations = 3 * tokens * (heads + kv_heads) * dim  # two multiplications and an addition for each element
    return time_calls(calls, setting).row(moved, "GB/s", "copy") | work(operations, moved)


def time_write(setting: Setting, widths: Widths = LARGE) -> Row:
    tokens, _, kv_heads, dim = widths = TINY if setting.tiny else widths
    moved = 4 * tokens * kv_heads * dim * setting.half.itemsize
    inputs = []
    for _ in range(num_inputs(moved, setting)):
        k, v = torch.randn(2, tokens, kv_heads, dim, device=setting.device).to(setting.half)
        inputs.append((k, v, *empty_cache(setting, widths)))

    def plain(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        keys[blocks, :, offsets], values[blocks, :, offsets] = k, v

    def timed(write: Callable[..., None]) -> Row:
        return time_calls([partial(write, *given) for given in inputs], setting).row(moved, "GB/s", "copy")

    mine = timed(lambda k, v, keys, values, slots: kv_cache.write(slots, k, v, keys, values))
    return mine | {"peers": {"torch, indexed": timed(plain)}}


def empty_cache(setting: Setting, widths: Widths) -> tuple[Tensor, Tensor, Tensor]:
    """One layer's keys and values, and slots in whole blocks at random places."""
    tokens, _, kv_heads, dim = widths
    blocks = -(-tokens // BLOCK_SIZE)
    cache = torch.zeros(blocks, 2, kv_heads, BLOCK_SIZE, dim, device=setting.device, dtype=setting.half)
    offsets = torch.arange(BLOCK_SIZE, device=setting.device)
    slots = (torch.randperm(blocks, device=setting.device)[:, None] * BLOCK_SIZE + offsets).flatten()[:tokens]
    return cache[:, 0], cache[:, 1], slots.int()


def time_copy(setting: Setting, *, blocks: int, layers: int, kv_heads: int, head_dim: int) -> Row:
    if setting.tiny:
        blocks, layers, kv_heads, head_dim = 2, 1, 1, 16
    size = (2 * blocks, layers, 2, kv_heads, BLOCK_SIZE, head_dim)
    cache = torch.randn(size, device=setting.device, dtype=setting.half)
    pairs = torch.randperm(2 * blocks, device=setting.device).int().view(blocks, 2)
    moved = cache.numel() * cache.element_size()  # half of it is read, half of it written

    def plain() -> None:
        cache[pairs[:, 1]] = cache[pairs[:, 0]]

    def timed(call: Callable[[], None]) -> Row:
        return time_calls([call], setting).row(moved, "GB/s", "copy")

    return timed(partial(kv_cache.copy_blocks, cache, pairs)) | {"peers": {"torch, indexed": timed(plain)}}


def time_swap(setting: Setting, *, layers: int, out: bool, scattered: bool = False) -> Row:
    """All that a swap takes, from the call to the last byte, on the host's clock: several streams are at work."""
    blocks, kv_heads, dim = 4096 // layers, 8, 128  # 256 MB
    if setting.tiny:
        blocks, layers, kv_heads, dim = 2, 1, 1, 16
    sizes = (layers, 2 * blocks, BLOCK_SIZE, kv_heads, dim, 2 * blocks)
    cache = KVCache(*sizes, setting.half, device=setting.device, kernels=gpu)
    cache.device_blocks.normal_()
    places = torch.randperm(2 * blocks).tolist()[:blocks]
    hosts = list(range(0, 2 * blocks, 2)) if scattered else list(range(blocks))
    if out:
        call = partial(cache.swap_out, list(zip(places, hosts, strict=True)))
    else:
        call = partial(cache.swap_in, list(zip(hosts, places, strict=True)))
    call()
    rounds = sorted(wall_seconds(call, setting) for _ in range(1 if setting.tiny else 9))
    seconds, ceiling = rounds[len(rounds) // 2], "device to host" if out else "host to device"
    return {
        "seconds": seconds, "least": rounds[0], "most": rounds[-1], "how": "host's clock",
        "rate": blocks * cache.block_bytes / seconds, "unit": "GB/s", "ceiling": ceiling,
    }  # fmt: skip


# --- Between the matrix products -------------------------------------------------------------------


def time_norm(setting: Setting, *, added: bool, tokens: int, hidden: int) -> Row:
    """Read x, write the norm; with `added` the residual is read and written, too."""
    tokens, hidden = (2, 64) if setting.tiny else (tokens, hidden)
    moved = (4 if added else 2) * tokens * hidden * setting.half.itemsize
    weight = torch.randn(hidden, device=setting.device).to(setting.half)
    calls: list[Callable[[], Tensor]] = []
    for _ in range(num_inputs(moved, setting)):
        x, other = torch.randn(2, tokens, hidden, device=setting.device).to(setting.half)
        call = partial(llama.add_rms_norm, x, other, weight, 1e-5) if added else None
        calls.append(call or partial(llama.rms_norm, x, weight, 1e-5))
    operations = (5 if added else 4) * tokens * hidden  # (add,) square, sum up, times the scale, times the weight
    return time_calls(calls, setting).row(moved, "GB/s", "copy") | work(operations, moved)


def time_swiglu(setting: Setting, *, tokens: int, width: int) -> Row:
    tokens, width = (2, 64) if setting.tiny else (tokens, width)
    moved = 3 * tokens * width * setting.half.itemsize
    calls = []
    for _ in range(num_inputs(moved, setting)):
        gate_up = torch.randn(tokens, 2 * width, device=setting.device).to(setting.half)
        calls.append(partial(llama.swiglu, gate_up))
    found = time_calls(calls, setting).row(moved, "GB/s", "copy")
    return found | work(5 * tokens * width, moved)  # negate, exp, add, divide, multiply


def time_argmax(setting: Setting, *, rows: int, vocab: int) -> Row:
    rows, vocab = (2, 300) if setting.tiny else (rows, vocab)
    size = rows * vocab * setting.half.itemsize
    inputs = [
        torch.randn(rows, vocab, device=setting.device).to(setting.half) for _ in range(num_inputs(size, setting))
    ]
    calls = [partial(sampling.argmax_logsumexp, logits) for logits in inputs]
    return time_calls(calls, setting).row(size, "GB/s", "copy") | work(4 * rows * vocab, size)  # compare, -, exp, +


def time_draw(setting: Setting, *, rows: int, vocab: int) -> Row:
    """By temperature, a token a row; counted is reading the logits once. Beside it: the same by torch's operations."""
    rows, vocab = (2, 300) if setting.tiny else (rows, vocab)
    size = rows * vocab * setting.half.itemsize
    order = torch.arange(rows, device=setting.device)
    temperatures = torch.full((rows,), 0.6, dtype=torch.float64, device=setting.device)
    least, uniforms = torch.full_like(temperatures, -torch.inf), torch.rand_like(temperatures)
    no_top_k, no_top_p = torch.zeros_like(order), torch.zeros_like(temperatures)
    inputs = []
    for _ in range(num_inputs(size, setting)):
        logits = torch.randn(rows, vocab, device=setting.device).to(setting.half)
        inputs.append((logits, logits.double().amax(1)))

    def timed(draw: Callable[..., Tensor]) -> Row:
        others = (temperatures, least, no_top_k, no_top_p, order, uniforms)
        calls = [partial(draw, logits, order, peaks, *others, depth=0) for logits, peaks in inputs]
        return time_calls(calls, setting).row(size, "GB/s", "copy")

    return timed(sampling.draw) | {"peers": {"torch's operations": timed(sampling.draw_ordered)}}


def time_advance(setting: Setting) -> Row:
    """Next to no bytes: what counts is that it is one short launch."""
    seqs = 4 if setting.tiny else 256
    tables = torch.zeros(seqs, 8192, dtype=torch.int32, device=setting.device)
    rows = torch.arange(seqs, dtype=torch.int32, device=setting.device)
    positions, slots, lengths = torch.zeros(3, seqs, dtype=torch.int32, device=setting.device)
    call = partial(block_table.advance_decode, tables, rows, positions, slots, lengths, BLOCK_SIZE)
    return vars(time_calls([call], setting))
