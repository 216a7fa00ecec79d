"""Is every kernel right? Each against float64, on random inputs that are new in each run.

Results are compared row by row, as ‖result - exact‖ / ‖exact‖: the worst row counts. While a kernel is launched, torch
fills all memory that it hands out with NaN (or the largest integer), outputs given by the caller too; cache slots that
no token fills are NaN, and table entries that mean nothing point outside the cache. So what a kernel forgot to write,
or read without being asked to, shows.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.harness import ROOT, TEST_SECONDS, Job, Row, Setting
from benchmarks.gpu.packed import FORMS, exact_product, random_matrix
from minipaged import steps
from minipaged.fast import gpu, kernels_for
from minipaged.fast.block_allocator import BlockAllocator
from minipaged.fast.block_table import BlockTable
from minipaged.fast.gpu import attention, block_table, kv_cache, llama, packed, sampling
from minipaged.fast.kernels import Paged
from minipaged.fast.kv_cache import KVCache
from minipaged.fast.llama import Llama, Weights
from minipaged.models.config import ModelConfig, weight_shapes

ROUNDED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Tolerance where a result is rounded once or twice."""
MULTIPLIED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""And where what is rounded goes through a matrix product."""
WHOLE_MODEL = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""And where rounding piles up over the layers."""

SUITES = ("tests/fast", "tests/agreement")
SUITE_PROCESSES = 14
"""At most."""


def kernel_checks(setting: Setting) -> list[Job]:
    jobs = []
    for dtype in setting.dtypes:
        name = str(dtype).removeprefix("torch.")
        checks: dict[str, Callable[[Setting, torch.dtype, torch.Generator], Row]] = {
            **{f"paged_decode {shape}": partial(check_decode, shape) for shape in attention_shapes(setting, dtype)},
            **{f"paged_prefill {shape}": partial(check_prefill, shape) for shape in attention_shapes(setting, dtype)},
            "rope_and_write": check_rope_and_write,
            "write": check_write,
            "copy_blocks": check_copy_blocks,
            "swap": check_swap,
            "rms_norm": check_rms_norm,
            "add_rms_norm": check_add_rms_norm,
            "swiglu": check_swiglu,
            "argmax_logsumexp": check_argmax_logsumexp,
            "likeliest_allowed": check_likeliest_allowed,
            "allowed_only": check_allowed_only,
            "draw": check_draw,
            **{f"packed {name}": partial(check_packed, name) for name in packed_forms(setting, dtype)},
        }
        if setting.on_gpu:
            checks["paged_decode in one CUDA graph for all lengths"] = check_decode_in_a_graph
        for what, check in checks.items():
            jobs.append(job(f"{what} {name}", check, setting, dtype))
    jobs.append(job("block tables", check_block_tables, setting, torch.int32))
    return jobs


def job(name: str, check: Callable[..., Row], setting: Setting, dtype: torch.dtype) -> Job:
    return Job(name, lambda: check(setting, dtype, setting.random(name)))


def compare(result: Tensor, exact: Tensor, tolerance: float) -> Row:
    """Fail unless each row of `result` (its first axis) is as close to `exact` (float64) as the tolerance asks."""
    result, exact = result.double().reshape(len(result), -1), exact.reshape(len(exact), -1)
    assert torch.isfinite(result).all(), f"{int((~torch.isfinite(result)).sum())} elements are NaN or infinite"
    sizes = exact.norm(dim=1)
    errors = (result - exact).norm(dim=1)
    assert not errors[sizes == 0].any(), "rows that should be zero are not"
    error = float((errors[sizes > 0] / sizes[sizes > 0]).max()) if (sizes > 0).any() else 0.0
    assert error <= tolerance, f"a row is off by {error:.3g} of its size; rounding explains {tolerance:.3g}"
    return {"error_of_float64": error, "tolerance": tolerance}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@contextmanager
def poisoned() -> Iterator[None]:
    """torch fills memory that nobody has written with NaN and largest integers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def normal(*shape: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=random, device=random.device).to(dtype)


def nan(*shape: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=random.device)


def int32(numbers: Sequence[Any], random: torch.Generator) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=random.device)


def randint(low: int, high: int, random: torch.Generator) -> int:
    """From `low` to `high`, both included."""
    return int(torch.randint(low, high + 1, (1,), generator=random, device=random.device))


# --- Attention -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionShape:
    kv_heads: int
    group: int
    head_dim: int
    block_size: int

    def __str__(self) -> str:
        return f"D{self.head_dim} group {self.group} block {self.block_size}"


def attention_shapes(setting: Setting, dtype: torch.dtype) -> list[AttentionShape]:
    """All of them in one type, some in the others: each is a kernel to compile, which is what takes the time."""
    if setting.tiny:
        return [AttentionShape(2, 2, 64, 16), AttentionShape(1, 3, 80, 7)]
    shapes = [
        AttentionShape(8, 4, 128, 16),  # Llama 3 8B
        AttentionShape(3, 3, 64, 16),  # SmolLM2
        AttentionShape(2, 8, 128, 1),
        AttentionShape(4, 1, 80, 100),
        AttentionShape(8, 4, 64, 32),
        AttentionShape(2, 1, 256, 256),
    ]
    return shapes[: {torch.bfloat16: 6, torch.float16: 3, torch.float32: 2}[dtype]]


def make_paged(
    shape: AttentionShape, lengths: Sequence[int], dtype: torch.dtype, random: torch.Generator
) -> tuple[Paged, list[Tensor]]:
    """Sequences in one layer of a cache of two, and the keys and values of each [2, context, kv_heads, head_dim].

    Blocks are in random places of the cache, rows in random places of the tables.
    """
    size, device = shape.block_size, random.device
    counts = [-(-length // size) for length in lengths]
    num_blocks = sum(counts) + 3
    places = torch.randperm(num_blocks, generator=random, device=device)
    cache = nan(num_blocks, 2, 2, shape.kv_heads, size, shape.head_dim, dtype=dtype, random=random)
    tables = torch.full((len(lengths) + 2, max(counts) + 2), 2**30, dtype=torch.int32, device=device)
    rows = torch.randperm(len(tables), generator=random, device=device)[: len(lengths)].int()
    kv, used = [], 0
    for row, length, count in zip(rows.tolist(), lengths, counts, strict=True):
        sequence = normal(2, length, shape.kv_heads, shape.head_dim, dtype=dtype, random=random)
        padded = nan(2, count * size, shape.kv_heads, shape.head_dim, dtype=dtype, random=random)
        padded[:, :length] = sequence
        blocks = places[used : used + count]
        cache[blocks, 1] = padded.view(2, count, size, *sequence.shape[2:]).permute(1, 0, 3, 2, 4)
        tables[row, :count] = blocks.int()
        kv.append(sequence)
        used += count
    return Paged(cache[:, 1, 0], cache[:, 1, 1], tables, rows, int32(lengths, random)), kv


def exact_attention(query: Tensor, kv: Tensor, scale: float) -> Tensor:
    """Causal attention in float64: the last of the queries [n, heads, head_dim] sees all keys [2, context, ...]."""
    n, heads, context = len(query), query.shape[1], kv.shape[1]
    if context == 0:
        return torch.zeros_like(query, dtype=torch.float64)
    k, v = kv.double().repeat_interleave(heads // kv.shape[2], dim=2)  # [context, heads, head_dim]
    scores = torch.einsum("thd,chd->htc", query.double(), k) * scale
    positions = torch.arange(context, device=query.device)
    scores.masked_fill_(positions > positions[context - n :, None], -torch.inf)
    return torch.einsum("htc,chd->thd", scores.softmax(-1), v)


def lengths_to_check(setting: Setting, random: torch.Generator) -> list[int]:
    """Where blocks, tiles and splits begin and end; one that is split; and random ones."""
    if setting.tiny:
        return [0, 1, 65, randint(129, 200, random)]
    return [0, 1, 15, 16, 17, 63, 64, 65, 128, 129, randint(4000, 9000, random)] + [
        randint(1, 700, random) for _ in range(20)
    ]


def check_decode(shape: AttentionShape, setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    lengths = lengths_to_check(setting, random)
    paged, each_kv = make_paged(shape, lengths, dtype, random)
    query = normal(len(lengths), shape.kv_heads * shape.group, shape.head_dim, dtype=dtype, random=random)
    scale = 1.3 * shape.head_dim**-0.5
    with poisoned():
        out = attention.paged_decode(query, paged, scale)
    exact = [exact_attention(query[s : s + 1], kv, scale) for s, kv in enumerate(each_kv)]
    return compare(out, torch.cat(exact), MULTIPLIED[dtype])


def check_decode_in_a_graph(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    """Captured with short contexts, run with long ones: how they are split is decided on the device."""
    shape = AttentionShape(3, 3, 64, 16)
    longest = [5000, 40, 700, 1]
    paged, each_kv = make_paged(shape, longest, dtype, random)
    query = normal(4, 9, 64, dtype=dtype, random=random)
    context_lens, scale = int32([1, 0, 2, 1], random), 0.125
    arguments = (query, paged._replace(context_lens=context_lens), scale)
    attention.paged_decode(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.paged_decode(*arguments)
    for lengths in (longest, [1, 40, 0, 1], [randint(1, n, random) for n in longest]):
        context_lens.copy_(int32(lengths, random))
        out.fill_(torch.nan)
        graph.replay()
        seen = [kv[:, :length] for kv, length in zip(each_kv, lengths, strict=True)]
        exact = [exact_attention(query[s : s + 1], kv, scale) for s, kv in enumerate(seen)]
        row = compare(out, torch.cat(exact), MULTIPLIED[dtype])
    return row


def check_prefill(shape: AttentionShape, setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    """Whole prompts, chunks of prompts and single tokens in one batch."""
    lengths = lengths_to_check(setting, random)[1:]
    queries = [(randint(1, n, random), n, 1, min(n, 3))[s % 4] for s, n in enumerate(lengths)]
    queries = [min(n, 500) for n in queries]
    paged, each_kv = make_paged(shape, lengths, dtype, random)
    starts = [sum(queries[:s]) for s in range(len(queries) + 1)]
    query = normal(starts[-1], shape.kv_heads * shape.group, shape.head_dim, dtype=dtype, random=random)
    scale = 1.3 * shape.head_dim**-0.5
    with poisoned():
        out = attention.paged_prefill(query, paged, int32(starts, random), scale, max_query_len=max(queries))
    exact = [exact_attention(q, kv, scale) for q, kv in zip(query.split(queries), each_kv, strict=True)]
    return compare(out, torch.cat(exact), MULTIPLIED[dtype])


# --- The cache -------------------------------------------------------------------------------------


def new_tokens(setting: Setting, random: torch.Generator) -> tuple[AttentionShape, int, Tensor]:
    """A shape, the blocks of its cache, and slots for tokens, padding among them."""
    shape = AttentionShape(2, 2, 36, 7) if setting.tiny else AttentionShape(8, 4, 128, 16)
    tokens = 5 if setting.tiny else 700
    num_blocks = 3 if setting.tiny else 100
    slots = torch.randperm(num_blocks * shape.block_size, generator=random, device=random.device)[:tokens].int()
    slots[1::5] = -1
    return shape, num_blocks, slots


def check_slots(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor, tolerance: float) -> Row:
    """The slots of layer 1 hold k and v [tokens, kv_heads, head_dim] (float64), and all others are NaN as before."""
    written = slots[slots >= 0].long()
    assert bool(cache[:, 0].isnan().all()), "another layer was written to"
    size = cache.shape[4]
    tokens = cache[:, 1].permute(0, 3, 1, 2, 4)[written // size, written % size]  # [written, 2, kv_heads, head_dim]
    row = compare(tokens, torch.stack([k, v], 1)[slots >= 0], tolerance)
    assert int((~cache.isnan()).sum()) == tokens.numel(), "slots that nobody named were written to"
    return row


def check_rope_and_write(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    shape, num_blocks, slots = new_tokens(setting, random)
    kv_heads, heads, dim = shape.kv_heads, shape.kv_heads * shape.group, shape.head_dim
    cache = nan(num_blocks, 2, 2, kv_heads, shape.block_size, dim, dtype=dtype, random=random)
    qkv = normal(len(slots), (heads + 2 * kv_heads) * dim + 8, dtype=dtype, random=random)[:, :-8]  # strided rows
    angles = torch.rand(9000, dim // 2, generator=random, device=random.device) * 6.3
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(9000, (len(slots),), generator=random, device=random.device).int()
    with poisoned():
        query = kv_cache.rope_and_write(qkv, cos, sin, positions, slots, cache[:, 1, 0], cache[:, 1, 1], heads)
    every = qkv.double().view(len(slots), heads + 2 * kv_heads, dim)
    first, second = every.chunk(2, dim=2)
    c, s = cos[positions.long(), None].double(), sin[positions.long(), None].double()
    rotated = torch.cat([first * c - second * s, second * c + first * s], dim=2)
    row = check_slots(cache, slots, rotated[:, heads : heads + kv_heads], every[:, heads + kv_heads :], ROUNDED[dtype])
    return row | compare(query, rotated[:, :heads], ROUNDED[dtype])


def check_write(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    shape, num_blocks, slots = new_tokens(setting, random)
    cache = nan(num_blocks, 2, 2, shape.kv_heads, shape.block_size, shape.head_dim, dtype=dtype, random=random)
    k, v = normal(2, len(slots), shape.kv_heads, shape.head_dim, dtype=dtype, random=random)
    kv_cache.write(slots, k, v, cache[:, 1, 0], cache[:, 1, 1])
    return check_slots(cache, slots, k.double(), v.double(), 0)


def check_copy_blocks(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    shape, pairs = ((9, 2, 2, 1, 7, 3), 3) if setting.tiny else ((700, 32, 2, 8, 16, 16), 300)
    cache = normal(*shape, dtype=dtype, random=random)
    expected = cache.clone()
    places = torch.randperm(shape[0], generator=random, device=random.device)[: 2 * pairs].view(2, pairs)
    expected[places[1]] = cache[places[0]]
    kv_cache.copy_blocks(cache, places.t().int().contiguous())
    assert same_bits(cache, expected), "the cache is not what it should be after copying"
    return {}


def check_swap(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    """Out to the host and back to other blocks, while what was left behind is overwritten at once."""
    sizes = (2, 12, 4, 2, 8, 12) if setting.tiny else (16, 160, 16, 8, 128, 160)
    num_blocks, num_swap_blocks = sizes[1], sizes[-1]
    cache = KVCache(*sizes, dtype, device=setting.device, kernels=gpu)
    for how_many in (3, num_blocks // 2, num_blocks // 2):
        places, hosts = (
            torch.randperm(n, generator=random, device=random.device).tolist() for n in (num_blocks, num_swap_blocks)
        )
        if how_many == 3:
            hosts.sort()  # neighbours: one copy
        leaving, arriving = places[:how_many], places[how_many : 2 * how_many]
        content = normal(*cache.device_blocks.shape, dtype=dtype, random=random)
        if setting.on_gpu:
            torch.cuda._sleep(50_000_000)  # some 30 ms: the copies must wait until the blocks are written
        cache.device_blocks.copy_(content)
        cache.swap_out(list(zip(leaving, hosts, strict=False)))
        cache.poison(leaving)
        cache.swap_in(list(zip(hosts, arriving, strict=False)))
        assert same_bits(cache.device_blocks[arriving], content[leaving]), "what came back is not what left"
        assert cache.device_blocks[leaving].isnan().all()
        untouched = places[2 * how_many :]
        assert same_bits(cache.device_blocks[untouched], content[untouched]), "other blocks were written to"
    # What comes back is on its way while the device still works on something that reads and writes its places.
    before = normal(*cache.device_blocks.shape, dtype=dtype, random=random)
    if setting.on_gpu:
        torch.cuda._sleep(50_000_000)
    cache.device_blocks.copy_(before)
    seen = cache.device_blocks.clone()
    cache.swap_in(list(zip(hosts, arriving, strict=False)))
    assert same_bits(seen, before), "blocks came back before what was queued first had read their places"
    assert same_bits(cache.device_blocks[arriving], content[leaving]), "what came back was written over"
    return {}


# --- Between the matrix products, and after the last ------------------------------------------------


def widths(setting: Setting) -> list[tuple[int, int]]:
    """(tokens, elements of a row)"""
    return [(3, 80)] if setting.tiny else [(1, 576), (300, 2048), (64, 4096), (5, 8192), (7, 1000)]


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(1, keepdim=True) + eps).sqrt() * weight.double()


def check_rms_norm(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    for tokens, hidden in widths(setting):
        x = normal(tokens, hidden, dtype=dtype, random=random)
        weight = normal(hidden, dtype=dtype, random=random)
        with poisoned():
            out = llama.rms_norm(x, weight, 1e-5)
        row = compare(out, exact_norm(x, weight, 1e-5), ROUNDED[dtype])
    return row


def check_add_rms_norm(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    for tokens, hidden in widths(setting):
        x, residual = normal(2, tokens, hidden, dtype=dtype, random=random)
        weight = normal(hidden, dtype=dtype, random=random)
        exact_sum = x.double() + residual.double()
        with poisoned():
            normed = llama.add_rms_norm(x, residual, weight, 1e-5)
        compare(residual, exact_sum, ROUNDED[dtype])
        row = compare(normed, exact_norm(residual, weight, 1e-5), ROUNDED[dtype])
    return row


def check_swiglu(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    for tokens, width in widths(setting):
        gate_up = normal(tokens, 2 * width, dtype=dtype, random=random) * 3
        with poisoned():
            out = llama.swiglu(gate_up)
        gate, up = gate_up.double().chunk(2, dim=1)
        row = compare(out, gate * gate.sigmoid() * up, ROUNDED[dtype])
    return row


def check_argmax_logsumexp(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    rows, vocab = (4, 300) if setting.tiny else (67, 128256)
    logits = normal(rows, vocab, dtype=dtype, random=random) * 4
    logits[1, vocab // 3] = logits[1, vocab - 1] = 30  # a tie: the first of them
    logits[2] = -torch.inf
    logits[2, 7] = 1.5
    logits[3, vocab // 2 :] = torch.nan
    with poisoned():
        token_ids, peaks, log_totals = sampling.argmax_logsumexp(logits)
    exact = logits.double()
    finite = torch.arange(rows, device=logits.device) != 3
    expected = exact.argmax(1)
    expected[1], expected[3] = vocab // 3, vocab // 2
    assert token_ids.tolist() == expected.tolist(), "a token is not the likeliest one"
    assert bool(peaks[3].isnan()), "a row that holds NaN must say so"
    assert torch.equal(peaks[finite], exact[finite].amax(1)), "a peak is not the largest logit"
    totals = (exact[finite].logsumexp(1) - exact[finite].amax(1)).exp()
    return compare(log_totals[finite].exp(), totals, 1e-5)


def check_likeliest_allowed(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    """Half of the tokens allowed, one, none; and a row that holds NaN."""
    rows, vocab, inputs = (4, 300, 7) if setting.tiny else (67, 128256, 200)
    logits = (normal(rows, vocab + 5, dtype=dtype, random=random) * 4)[:, :vocab]  # strided
    logits[3, vocab // 2 :] = torch.nan
    of = torch.randint(rows, (inputs,), generator=random, device=random.device)
    of[:4] = torch.arange(4, device=random.device)
    is_allowed, bits = some_allowed(inputs, vocab, random)
    with poisoned():
        token_ids, found, peaks, log_totals = sampling.likeliest_allowed(logits, of, bits)
    finite = of != 3
    assert bool(peaks[~finite].isnan().all()), "a row that holds NaN must say so"
    assert bool((token_ids[~finite] == vocab // 2).all()), "the first NaN must be named"
    exact = logits.double()[of]
    left = exact.masked_fill(~is_allowed, -torch.inf)
    assert torch.equal(found[finite], left[finite].amax(1)), "a logit is not the largest that is allowed"
    some = finite & is_allowed.any(1)
    assert torch.equal(token_ids[some], left[some].argmax(1)), "a token is not the likeliest that is allowed"
    assert torch.equal(peaks[finite], exact[finite].amax(1)), "a peak is not the largest logit"
    totals = (exact[finite].logsumexp(1) - exact[finite].amax(1)).exp()
    return compare(log_totals[finite].exp(), totals, 1e-5)


def check_allowed_only(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    rows, vocab = (4, 300) if setting.tiny else (67, 128256)
    around = normal(rows, vocab + 5, dtype=dtype, random=random).double()
    is_allowed, bits = some_allowed(rows, vocab, random)
    expected = around.clone()
    expected[:, 2:-3].masked_fill_(~is_allowed, -torch.inf)
    sampling.allowed_only(around[:, 2:-3], bits)
    assert torch.equal(around, expected), "not the forbidden logits alone are minus infinity"
    return compare(around.exp(), expected.exp(), 0)


def some_allowed(inputs: int, vocab: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Whether each token is allowed [inputs, vocab], and the same as bits [inputs, words] int32 that begin where no 16
    bytes do: of half of the tokens in most rows, of the last one, and of none."""
    words = -(-vocab // 32)
    every = torch.randint(-(2**31), 2**31, (inputs * words + 1,), generator=random, device=random.device)
    bits = every.to(torch.int32)[1:].view(inputs, words)
    bits[1:3] = 0
    bits[1, (vocab - 1) // 32] = 1 << (vocab - 1) % 32
    token = torch.arange(vocab, device=random.device)
    return (bits[:, token // 32] >> (token % 32)) & 1 == 1, bits


def check_draw(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    """Several draws from each row, with and without `min_p`: each token is where the running sum reaches its number."""
    rows, vocab, draws = (3, 300, 7) if setting.tiny else (67, 128256, 600)
    logits = (normal(rows, vocab + 5, dtype=dtype, random=random) * 4)[:, :vocab]  # strided
    logits[1, 5:] = -torch.inf
    temperatures = 0.3 + torch.rand(rows, generator=random, device=random.device, dtype=torch.float64)
    least = torch.full((rows,), -torch.inf, dtype=torch.float64, device=random.device)
    least[::2] = math.log(0.02)
    of = torch.randint(rows, (draws,), generator=random, device=random.device)
    uniforms = torch.rand(draws, generator=random, device=random.device, dtype=torch.float64)
    order = torch.randint(rows, (rows,), generator=random, device=random.device)
    # Two of one row, the row that holds minus infinity, and none of these in its own place.
    order[:3] = torch.tensor([rows - 1, rows - 1, 1], device=random.device)
    exact = logits.double()[order]
    peaks = exact.amax(1)
    none = torch.zeros_like(order)
    with poisoned():
        tokens = sampling.draw(logits, order, peaks, temperatures, least, none, none.double(), of, uniforms, depth=0)
    scaled = (exact - peaks[:, None]) / temperatures[:, None]
    weights = torch.where(scaled >= least[:, None], scaled.exp(), 0.0)
    reached = weights.cumsum(1)
    target, rounding = uniforms * reached[of, -1], 1e-9 * reached[of, -1]
    assert bool(((tokens >= 0) & (tokens < vocab)).all()), "a token is none of the vocabulary"
    assert bool((weights[of, tokens] > 0).all()), "a token was drawn that is cut off"
    assert bool((reached[of, tokens] >= target - rounding).all()), "a token lies before its number"
    assert bool((reached[of, tokens] - weights[of, tokens] <= target + rounding).all()), "a token lies after its number"
    return {}


def check_block_tables(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    """edit_tables, fork_tables, slot_mapping and advance_decode, against loops."""
    num_rows, width, size = (6, 9, 4) if setting.tiny else (500, 3000, 16)
    device = random.device
    tables = torch.randint(10**6, (num_rows, width), generator=random, device=device).int()
    expected = tables.tolist()
    places = torch.randperm(num_rows * width, generator=random, device=device)[: num_rows * 3].tolist()
    edits = [(place // width, place % width, i) for i, place in enumerate(places)]
    for table_row, logical, block in edits:
        expected[table_row][logical] = block
    block_table.edit_tables(tables, int32(edits, random))
    assert tables.tolist() == expected, "edit_tables"

    rows = torch.randperm(num_rows, generator=random, device=device).tolist()
    half = num_rows // 2
    forks = [(rows[i // 2], rows[half + i], randint(0, width, random)) for i in range(half)]
    for parent, child, count in forks:
        expected[child][:count] = expected[parent][:count]
    block_table.fork_tables(tables, int32(forks, random))
    assert tables.tolist() == expected, "fork_tables"

    def slot(table_row: int, position: int) -> int:
        return expected[table_row][position // size] * size + position % size

    positions = [randint(0, width * size - 1, random) for _ in rows]
    with poisoned():
        slots = block_table.slot_mapping(tables, int32(rows, random), int32(positions, random), size)
    assert slots.tolist() == list(map(slot, rows, positions)), "slot_mapping"

    before = [-2, -1, *(position - 1 for position in positions[2:])]  # padding, a first token, others
    after = [-2, *(position + 1 for position in before[1:])]
    now, slots, context_lens = int32(before, random), torch.empty_like(slots), torch.empty_like(slots)
    block_table.advance_decode(tables, int32(rows, random), now, slots, context_lens, size)
    assert now.tolist() == after, "advance_decode: positions"
    assert slots.tolist() == [-1, *map(slot, rows[1:], after[1:])], "advance_decode: slots"
    assert context_lens.tolist() == [0, *(position + 1 for position in after[1:])], "advance_decode: context lengths"
    return {}


# --- Packed matrices --------------------------------------------------------------------------------


def packed_forms(setting: Setting, dtype: torch.dtype) -> list[str]:
    """All of them in one type, some in the others."""
    return list(FORMS) if dtype == setting.half else ["Q4_1", "W8A8 INT8"]


def check_packed(name: str, setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    """With numbers of rows on both sides of each choice of tiles; looked up, too. The same bits each time, and in a
    CUDA graph."""
    shape = (40, 256) if setting.tiny else (1000, 4160 if FORMS[name].group_size else 4100)
    matrix = random_matrix(FORMS[name], shape, randint(0, 2**31 - 1, random))
    bias = normal(shape[0], dtype=dtype, random=random)
    multiply = packed.packed(matrix, bias, dtype, random.device)
    assert multiply is not None, "there is no kernel for it"
    row: Row = {}
    for rows in (1, 17) if setting.tiny else (1, 3, 16, 17, 32, 33, 64, 65, 129, 300):
        x = normal(rows, shape[1], dtype=dtype, random=random)
        with poisoned():
            out = multiply(x)
        row = compare(out, exact_product(matrix, x) + bias.double(), MULTIPLIED[dtype])
        assert same_bits(out, multiply(x)), "not the same bits when it is done again"
        if setting.on_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = multiply(x)
            again.fill_(torch.nan)
            graph.replay()
            assert same_bits(out, again), "not the same bits in a CUDA graph"
    ids = torch.randint(shape[0], (5,), generator=random, device=random.device)
    with poisoned():
        found = multiply.rows(ids)
    exact = torch.from_numpy(matrix.rows(ids.cpu().numpy())).to(random.device)
    return compare(found, exact.double(), MULTIPLIED[dtype]) | row


# --- The whole model, and the test suites ------------------------------------------------------------


def model_checks(setting: Setting) -> list[Job]:
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in setting.dtypes if dtype != torch.float16}
    return [
        job(f"Llama: CUDA graphs, no graphs and CPU agree, {name}", check_llama, setting, dtype)
        for dtype, name in names.items()
    ]


def check_llama(setting: Setting, dtype: torch.dtype, random: torch.Generator) -> Row:
    """Greedy decoding of some sequences, three times over the same tokens: the logits, and the tokens but for ties.

    Random weights, in the shapes of SmolLM2-135M. All follow the tokens that the first one chooses, so that one tie
    does not part them for good. Where another one would choose differently, its best must be within rounding of it.
    """
    config = random_llama_config(setting)
    weights = {
        name: normal(*shape, dtype=torch.float32, random=random)
        .div(1 if len(shape) == 1 else shape[1] ** 0.5)
        .to(dtype)
        for name, shape in weight_shapes(config).items()
    }
    cpu = torch.device("cpu")
    on_device = Weights.of(config, dict(weights), gpu)
    on_cpu = Weights.of(config, {name: tensor.to(cpu) for name, tensor in weights.items()}, kernels_for(cpu))
    size = (6, 4) if setting.tiny else (128, 16)  # blocks, and tokens of one
    runners = {
        "graphs": Served(config, on_device, size, dtype, setting.device.type, gpu),
        "no graphs": Served(config, on_device, size, dtype, setting.device.type, gpu),
        "CPU": Served(config, on_cpu, size, dtype, "cpu", kernels_for(cpu)),
    }
    if setting.on_gpu:
        assert runners["graphs"].llama._graphs, "nothing was captured"
        runners["no graphs"].llama._graphs.clear()
    lengths = [1, 3, 5] if setting.tiny else [1, 16, 17, 130, 600]
    vocab = config.vocab_size
    tokens = [[randint(0, vocab - 1, random) for _ in range(length)] for length in lengths]
    worst = 0.0
    for _ in range(3 if setting.tiny else 24):
        logits = {name: runner.step(tokens).double().cpu() for name, runner in runners.items()}
        ours = logits["graphs"]
        assert torch.isfinite(ours).all(), "logits are NaN or infinite"
        chosen = ours.argmax(1)
        for name in ("no graphs", "CPU"):
            other = logits[name]
            error = float(((ours - other).norm(dim=1) / other.norm(dim=1)).max())
            assert error <= WHOLE_MODEL[dtype], f"graphs and {name}: logits differ by {error:.3g} of their size"
            worst = max(worst, error)
            gaps = other.amax(1) - other.gather(1, chosen[:, None])[:, 0]  # [sequences], 0 where both choose alike
            rounding = 2 * (ours - other).abs().amax(1)
            assert bool((gaps <= rounding).all()), f"graphs and {name} choose different tokens, and it is no tie"
        tokens = [[token] for token in chosen.tolist()]
    return {"difference": worst, "tolerance": WHOLE_MODEL[dtype]}


def random_llama_config(setting: Setting) -> ModelConfig:
    smallest = {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 80, "vocab_size": 64}
    full = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1} if setting.tiny else {
        "num_attention_heads": 9, "num_key_value_heads": 3,
    }  # fmt: skip
    return ModelConfig.from_dict(
        {"model_type": "llama", "rope_theta": 1e5, "tie_word_embeddings": True, "max_position_embeddings": 1024}
        | (smallest if setting.tiny else full)
        | heads
    )


class Served:
    """A Llama with some sequences in its cache, of which every slot that they do not fill is NaN."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        size: tuple[int, int],
        dtype: torch.dtype,
        device: str,
        kernels: Any,
    ) -> None:
        num_blocks, self.block_size = size
        cache = KVCache(
            config.num_hidden_layers, num_blocks, self.block_size, config.num_key_value_heads, config.head_dim,
            dtype=dtype, device=device, kernels=kernels,
        )  # fmt: skip
        self.llama = Llama(config, weights, cache, max_num_seqs=8)
        cache.poison(range(num_blocks))
        self._allocator = BlockAllocator(num_blocks)
        self._tables: list[BlockTable] = []
        self._tokens: list[list[int]] = []

    def step(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits [sequences, vocab] after these further tokens of each sequence."""
        self._tables = self._tables or [BlockTable(self.block_size, self._allocator) for _ in tokens]
        self._tokens = self._tokens or [[] for _ in tokens]
        begun, rows = [], []
        for number, (table, known, new) in enumerate(zip(self._tables, self._tokens, tokens, strict=True)):
            rows.append(steps.Row(number, len(known), len(new), steps.LOGITS))
            known += new
            table.append(len(new))
            begun.append(steps.Begun(number, tuple(known), len(known), tuple(table.blocks), None))
        logits: Tensor = self.llama.run(steps.StepInput(0, fresh=True, begun=tuple(begun), added=tuple(rows))).logits
        return logits.clone()


def suite_checks(setting: Setting) -> list[Job]:
    return [Job(f"pytest {' '.join(SUITES)}", partial(run_suites, setting))]


def run_suites(setting: Setting) -> Row:
    """The test suites that use the GPU where there is one, without their thorough tests.

    What only compiles needs no GPU, and is left out.
    """
    if setting.tiny:
        return {"status": "skipped", "reason": "a dry run; `make test` runs them"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not thorough", *SUITES]
    command += ["--ignore=tests/fast/test_compiled_kernels.py"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(SUITE_PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        said = (expired.stdout or b"").decode(errors="replace")
        raise TimeoutError(f"not done after {TEST_SECONDS} seconds\n{said[-1500:]}") from None
    lines = done.stdout.splitlines() or [f"pytest said nothing, and ended with status {done.returncode}"]
    row = {"summary": lines[-1]}
    if not done.returncode:
        return row
    failed = [line.partition(" ")[2].partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    error = "\n".join([lines[-1], *failed, done.stderr[-1000:]]).rstrip()
    return row | {"status": "failed", "error": error, "failed_tests": failed}
