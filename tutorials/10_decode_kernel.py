# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 10. From NumPy to Triton: the decode kernel

# %% [markdown]
# **What you will understand.** How the attention of one new token becomes a GPU kernel: what a program of Triton is,
# why the query heads that share a key/value head go together, why a turn of the loop takes 64 keys whatever the block
# size is, and how one long context keeps a whole GPU busy. Section 5.1 of the paper says that such kernels are needed;
# here is how one is built, from the loop of [`paged_attention`](../minipaged/reference/attention.py) in four
# steps.
#
# You need no GPU: `TRITON_INTERPRET=1` lets Triton run a kernel in Python, one program after another. (Triton itself
# exists for Linux only.) That shows whether a kernel is **right**. It says nothing about how fast it is.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch
import triton
import triton.language as tl

from minipaged.reference.attention import paged_attention
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.reference.kv_cache import KVCache

# %% [markdown]
# ## The task
#
# Three sequences are decoding: each has one query token, with 9 heads of 64 numbers, and a context of keys and values
# with 3 heads. So 3 query heads share each key/value head, as in SmolLM2. What is right is computed first, in float64
# and over keys that never saw a block.

# %%
HEADS, KV_HEADS, DIM, SCALE = 9, 3, 64, 64**-0.5
GROUP = HEADS // KV_HEADS
CONTEXT_LENS = [37, 5, 70]

random = np.random.default_rng(0)
query = random.standard_normal((3, HEADS, DIM), np.float32)  # [seqs, heads, dim]
kv = [random.standard_normal((2, n, KV_HEADS, DIM), np.float32) for n in CONTEXT_LENS]  # [2, context, kv_heads, dim]


def softmax_attention() -> np.ndarray:
    outputs = []
    for q, (k, v) in zip(
        query.astype(np.float64), (x.astype(np.float64).repeat(GROUP, axis=2) for x in kv), strict=True
    ):
        scores = np.einsum("hd,chd->hc", q, k) * SCALE  # [heads, context]
        weights = np.exp(scores - scores.max(1, keepdims=True))
        outputs.append(np.einsum("hc,chd->hd", weights / weights.sum(1, keepdims=True), v))
    return np.stack(outputs)  # [seqs, heads, dim]


EXACT = softmax_attention()

# %% [markdown]
# Now the same keys and values in blocks. The sequences grow in turns, so that their blocks lie mixed; and what no token
# fills is NaN, so that a kernel which reads it gives itself away.


# %%
def paged(block_size: int) -> tuple[KVCache, np.ndarray]:
    """A cache with all three contexts in it, and their block tables [seqs, max_blocks]."""
    allocator = BlockAllocator(sum(-(-n // block_size) for n in CONTEXT_LENS) + 2)
    cache = KVCache(1, allocator.num_blocks, block_size, KV_HEADS, DIM)
    cache.device_blocks[:] = np.nan
    tables = [BlockTable(block_size, allocator) for _ in CONTEXT_LENS]
    for position in range(max(CONTEXT_LENS)):
        for table, (k, v) in zip(tables, kv, strict=True):
            if position < len(k):
                table.append(1)
                now = slice(position, position + 1)
                cache.write(0, table.slot_mapping(position, position + 1), k[now], v[now])
    padded = np.full((len(tables), max(len(table.blocks) for table in tables)), -1, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table.blocks)] = table.blocks
    return cache, padded


cache, tables = paged(block_size=16)
print(tables)
lens = np.array(CONTEXT_LENS)
reference = paged_attention(query, cache, 0, tables, np.arange(4), lens, SCALE)
assert np.abs(reference - EXACT).max() < 1e-6


def check(name: str, out: torch.Tensor) -> None:
    error = np.abs(out.numpy() - EXACT).max()
    print(f"{name}: largest difference from float64 {error:.1e}")
    assert error < 1e-6  # false for NaN too


# %% [markdown]
# ## Step 1: the loop, as a program
#
# A kernel is a function of which the GPU runs many copies, called **programs**. Each knows its number in a grid
# (`tl.program_id`), loads small arrays from memory by their addresses, computes with them, and stores a result.
#
# | NumPy | Triton |
# |---|---|
# | `for s in range(3): for h in range(9):` | a grid of 3 × 9 programs; `tl.program_id(0)`, `tl.program_id(1)` |
# | `K[block]` | `tl.load(keys + addresses)`; a stride counts numbers, not bytes |
# | `x[:n]` | a mask: `tl.load(..., mask=position < n, other=0.0)` |
# | `q @ K.T` | `tl.dot(q, tl.trans(k))`, or products and a `tl.sum` |
# | shapes are found when it runs | shapes are `tl.constexpr`, powers of two; the kernel is compiled for them |
#
# This is the reference's loop: one program for each sequence and query head, which walks along the block table, one
# block a turn. It keeps the running maximum `m`, the running sum of weights `s` (the paper's *l*) and the running
# output `o`, none of which is ever written to memory.


# %%
@triton.jit
def one_head(
    query, keys, values, tables, context_lens, out, scale, block_stride, max_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    context_len = tl.load(context_lens + seq)
    dim, offset = tl.arange(0, DIM), tl.arange(0, BLOCK_SIZE)
    q = tl.load(query + (seq * HEADS + head) * DIM + dim)  # [DIM]
    m, s, o = float("-inf"), 0.0, tl.zeros([DIM], tl.float32)
    for j in range(tl.cdiv(context_len, BLOCK_SIZE)):
        block = tl.load(tables + seq * max_blocks + j)
        filled = j * BLOCK_SIZE + offset < context_len  # [BLOCK_SIZE]
        at = block * block_stride + (offset[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]  # [BLOCK_SIZE, DIM]
        k = tl.load(keys + at, mask=filled[:, None], other=0.0)
        v = tl.load(values + at, mask=filled[:, None], other=0.0)
        scores = tl.where(filled, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))  # [BLOCK_SIZE]
        m_new = tl.maximum(m, tl.max(scores, 0))
        fade, p = tl.exp(m - m_new), tl.exp(scores - m_new)
        s = s * fade + tl.sum(p, 0)
        o = o * fade + tl.sum(p[:, None] * v, 0)
        m = m_new
    tl.store(out + (seq * HEADS + head) * DIM + dim, o / s)


Q, LENS = torch.from_numpy(query), torch.from_numpy(lens.astype(np.int32))
SHAPE = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "DIM": DIM}


def arguments(cache: KVCache, tables: np.ndarray) -> tuple:
    """The same memory that the reference reads: nothing is copied."""
    blocks = torch.from_numpy(cache.device_blocks)  # [num_blocks, layers, 2, block_size, kv_heads, dim]
    return Q, blocks[:, 0, 0], blocks[:, 0, 1], torch.from_numpy(tables), LENS


out = torch.full(query.shape, torch.nan)
strides = (cache.device_blocks[0].size, tables.shape[1])  # numbers in a block, entries in a table
one_head[(3, HEADS)](*arguments(cache, tables), out, SCALE, *strides, **SHAPE, BLOCK_SIZE=16)
check("a program for each head", out)

# %% [markdown]
# What one program does, in numbers that can be looked at: query head 2 of the first sequence, cut to 4 numbers, over
# its first 14 keys in blocks of 4. It is the reference's `attend` that ran here, once for each place where the four
# blocks could lie. Look at what the loop carries from turn to turn, `m`, `l` (above: `s`) and `o`, and at the last
# block: of its 4 slots 2 count. And shuffle the blocks: only `block`, which the program loads from the table, is
# another number.

# %%
from minipaged.reference.attention import attend
from minipaged.stepper import watch_attention

few_keys, few_values = kv[0][:, :14, 0, :4]  # [14 keys, 4] each
watch_attention(
    attend, KVCache, query[0, 2, :4], few_keys, few_values, table=[7, 1, 3, 5], num_blocks=8, block_size=4, taken=[2, 6]
)

# %% [markdown]
# **Predict.** The mask stands on three things: the load of the keys, the load of the values, and the scores. A score of
# minus infinity gives a weight of 0. So could the values be loaded without a mask?
#
# - yes: their weights are 0
# - no: what is there may be NaN
#
# <details><summary>See</summary>
#
# **no: what is there may be NaN** (`np.isnan(weight_of_an_unfilled_slot * np.nan)`). And 0 × NaN is NaN.
#
# </details>

# %%
weight_of_an_unfilled_slot = np.exp(-np.inf)
print(f"{weight_of_an_unfilled_slot} × NaN = {weight_of_an_unfilled_slot * np.nan}")
assert np.isnan(weight_of_an_unfilled_slot * np.nan)

# %% [markdown]
# No: what lies in a slot that nobody has filled is anything at all, and a weight of zero does not remove it.
#
# ## What decoding costs
#
# The kernel is right. What would a GPU say? Count what it reads and what it computes, for the shape of Llama 3 8B: 32
# query heads, 8 key/value heads of 128 numbers in bfloat16, 32 sequences of 2,048 tokens. The two speeds are what
# [the tuning log](../docs/tuning.md) reckons with for an H200: 4.3 TB/s of memory, 780 TFLOP/s of matrix products.

# %%
from minipaged.stepper.pictures import Bars

keys_read = 32 * 8 * 2048  # each once
kv_bytes = keys_read * 2 * 128 * 2  # K and V, 2 bytes a number
flops = keys_read * 4 * (2 * 128 + 2 * 128)  # 4 query heads each: q · k, and weight × v; a multiply-add is 2
print(f"keys and values: {kv_bytes / 1e6:.0f} MB, at 4.3 TB/s {kv_bytes / 4.3e12 * 1e6:.0f} µs")
print(f"arithmetic:      {flops / 1e9:.2f} GFLOP, at 780 TFLOP/s {flops / 780e12 * 1e6:.1f} µs")
print(f"operations for each byte read: {flops / kv_bytes:.0f}; the GPU could do {780e12 / 4.3e12:.0f}")

assert flops / kv_bytes == 4
assert kv_bytes / 4.3e12 > 40 * flops / 780e12

# %% [markdown]
# Decoding is waiting for memory; the arithmetic is next to nothing. So a decode kernel is as good as the share of the
# memory's speed that it gets, and there is one commandment: **read every key and value once.** The kernel above breaks
# it. It has a program for each *query* head, and the 4 that share a key/value head ask for the same keys, each by
# itself.

# %%
Bars(
    [
        ("a program for each query head", [("asked for", round(4 * kv_bytes / 1e6))]),
        ("a program for each key/value head", [("asked for", round(kv_bytes / 1e6))]),
    ],
    {"asked for": "lines"},
    unit=" MB",
)

# %% [markdown]
# ## Step 2: the heads of a group are the rows of a matrix
#
# One program for each sequence and **key/value** head. Its query heads become the rows of one matrix, and their scores
# one product. The units that multiply matrices, the tensor cores, take 16 rows at a time, so 3 rows are padded to 16.
# That sounds like waste, but the 13 idle rows cost arithmetic, of which there is plenty, and not one byte.

# %%
Bars(
    [("the rows of one product", [("query heads", GROUP), ("padding", 16 - GROUP)])],
    {"query heads": "full", "padding": "empty"},
    unit=" rows",
)


# %%
@triton.jit
def one_group(
    query, keys, values, tables, context_lens, out, scale, block_stride, max_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    context_len = tl.load(context_lens + seq)
    dim, offset, row = tl.arange(0, DIM), tl.arange(0, BLOCK_SIZE), tl.arange(0, 16)
    is_head = row < HEADS // KV_HEADS  # [16]
    head = kv_head * (HEADS // KV_HEADS) + row
    q_at = (seq * HEADS + head)[:, None] * DIM + dim[None, :]  # [16, DIM]
    q = tl.load(query + q_at, mask=is_head[:, None], other=0.0)
    m, s, o = tl.full([16], float("-inf"), tl.float32), tl.zeros([16], tl.float32), tl.zeros([16, DIM], tl.float32)
    for j in range(tl.cdiv(context_len, BLOCK_SIZE)):
        block = tl.load(tables + seq * max_blocks + j)
        filled = j * BLOCK_SIZE + offset < context_len  # [BLOCK_SIZE]
        at = block * block_stride + (offset[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]  # [BLOCK_SIZE, DIM]
        k = tl.load(keys + at, mask=filled[:, None], other=0.0)
        v = tl.load(values + at, mask=filled[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [16, BLOCK_SIZE]; ieee: all of float32
        scores = tl.where(filled[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        fade, p = tl.exp(m - m_new), tl.exp(scores - m_new[:, None])
        s = s * fade + tl.sum(p, 1)
        o = tl.dot(p, v, o * fade[:, None], input_precision="ieee")  # p @ v, added to what was there
        m = m_new
    tl.store(out + q_at, o / s[:, None], mask=is_head[:, None])


out = torch.full(query.shape, torch.nan)
one_group[(3, KV_HEADS)](*arguments(cache, tables), out, SCALE, *strides, **SHAPE, BLOCK_SIZE=16)
check("a program for each group", out)

# %% [markdown]
# ## Step 3: a tile is not a block
#
# A turn of that loop takes one block. But the size of a block should suit the memory manager (small ones waste little),
# and the size of a turn should suit the tensor cores and the memory (large ones: each turn pays once for its maxima and
# sums, and more loads are under way at once). And a block of 3 tokens has no `tl.arange` at all.
#
# So a turn takes a **tile** of keys, and each key's block is looked up by itself: position `p` is in logical block
# `p // BLOCK_SIZE`. A tile may span many blocks, or a part of one. Looking up costs little: 4
# bytes beside the 512 of a key and its value.
#
# Two more changes, while we are at it:
#
# - The hardware raises 2 to a power, not e. As e^x = 2^(x · log2 e), the factor log2 e goes into the scale once, and
#   all exponentials are `exp2`.
# - Only the last tile can be partly filled. All before it go through a loop **without masks**; the last one pays for
#   its comparisons alone. `MASKED` is a constant when the kernel is compiled: there are two loops in it, and no
#   question.

# %%
LOG2_E = 1.4426950408889634
TILE = 32  # 64 in the real kernel; here contexts are short


@triton.jit
def turn(
    q, m, s, o, keys, values, table, kv_head, first, end, scale, block_stride,
    MASKED: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The keys at positions first .. first + TILE - 1, of which those from `end` on do not exist."""
    dim, position = tl.arange(0, DIM), first + tl.arange(0, TILE)
    exists = position < end  # [TILE]
    block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=0)  # [TILE]
    at = (block * block_stride + (position % BLOCK_SIZE * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
    if MASKED:
        k = tl.load(keys + at, mask=exists[:, None], other=0.0)
        v = tl.load(values + at, mask=exists[:, None], other=0.0)
    else:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [16, TILE]
    if MASKED:
        scores = tl.where(exists[None, :], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    fade, p = tl.exp2(m - m_new), tl.exp2(scores - m_new[:, None])
    return m_new, s * fade + tl.sum(p, 1), tl.dot(p, v, o * fade[:, None], input_precision="ieee")


@triton.jit
def tiled(
    query, keys, values, tables, context_lens, out, scale, block_stride, max_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    dim, row = tl.arange(0, DIM), tl.arange(0, 16)
    q_at = (seq * HEADS + kv_head * (HEADS // KV_HEADS) + row)[:, None] * DIM + dim[None, :]  # [16, DIM]
    is_head = (row < HEADS // KV_HEADS)[:, None]  # [16, 1]
    q = tl.load(query + q_at, mask=is_head, other=0.0)
    m, s, o = tl.full([16], float("-inf"), tl.float32), tl.zeros([16], tl.float32), tl.zeros([16, DIM], tl.float32)
    end = tl.load(context_lens + seq)
    whole = end // TILE * TILE
    table = tables + seq * max_blocks
    for first in range(0, whole, TILE):
        m, s, o = turn(
            q, m, s, o, keys, values, table, kv_head, first, end, scale, block_stride,
            False, KV_HEADS, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
    if whole < end:
        m, s, o = turn(
            q, m, s, o, keys, values, table, kv_head, whole, end, scale, block_stride,
            True, KV_HEADS, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
    tl.store(out + q_at, o / s[:, None], mask=is_head)


for block_size in (1, 3, 16, 256):
    small, where = paged(block_size)
    out = torch.full(query.shape, torch.nan)
    strides = (small.device_blocks[0].size, where.shape[1])
    tiled[(3, KV_HEADS)](
        *arguments(small, where), out, SCALE * LOG2_E, *strides, **SHAPE, BLOCK_SIZE=block_size, TILE=TILE
    )
    check(f"blocks of {block_size:>3}", out)

# %% [markdown]
# ## Step 4: splits
#
# Now one user with a long context of 8,192 tokens, and the model of 8 key/value heads. How many programs are there?
# Eight. An H200 has 132 multiprocessors, and two programs fit on each: while one multiplies, the other has loads under
# way. (The kernel leaves an eighth of the places free, because sequences do not divide evenly.)

# %%
places = 2 * 132
Bars(
    [
        ("1 sequence: 8 programs", [("at work", 8), ("idle", places - 8)]),
        ("32 sequences", [("at work", 32 * 8), ("idle", places - 32 * 8)]),
        (f"1 sequence in {places // 8} splits", [("at work", places // 8 * 8)]),
    ],
    {"at work": "full", "idle": "empty"},
    unit=" programs",
)

# %% [markdown]
# So a long context is cut into **splits**, each walked by a program of its own, and what they found is added up. That
# is possible because (m, s, o) of two parts can be put together by the same rule by which a new tile is added to the
# old ones. A split writes its own answer `o / s`, and one number that says what it weighs: the logarithm of its sum of
# exponentials, `m + log2(s)`, the *lse*. A second kernel weighs the answers:
#
#     o = Σ 2^(lse_i - M) · o_i  /  Σ 2^(lse_i - M),    with M the largest lse_i
#
# **Predict.** The grid has the same number of splits for all sequences, and the shortest context here has 5 tokens.
# What would a split write that has no keys at all?
#
# - zeros
# - minus infinity
# - not a number
#
# <details><summary>See</summary>
#
# **not a number** (`np.isnan(fade)`). Its largest score would be minus infinity before and after, and the difference of
# two infinities is no number.
#
# </details>

# %%
m = m_new = np.float32(-np.inf)  # nothing seen before, and nothing now
with np.errstate(invalid="ignore"):
    fade = np.exp2(m - m_new)
print(f"fade = 2^(-∞ + ∞) = {fade}, and o / s = 0 / 0")
assert np.isnan(fade)

# %% [markdown]
# So a split without keys writes nothing, and whoever adds up reads nothing of it:


# %%
@triton.jit
def split(
    query, keys, values, tables, context_lens, partial_o, partial_lse, scale, block_stride, max_blocks, per_split,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    seq, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = part * per_split  # a multiple of TILE
    end = tl.minimum(start + per_split, tl.load(context_lens + seq))
    if start >= end:
        return  # an empty split writes nothing
    dim, row = tl.arange(0, DIM), tl.arange(0, 16)
    head = seq * HEADS + kv_head * (HEADS // KV_HEADS) + row  # [16]
    is_head = row < HEADS // KV_HEADS
    q = tl.load(query + head[:, None] * DIM + dim[None, :], mask=is_head[:, None], other=0.0)
    m, s, o = tl.full([16], float("-inf"), tl.float32), tl.zeros([16], tl.float32), tl.zeros([16, DIM], tl.float32)
    whole = end // TILE * TILE
    table = tables + seq * max_blocks
    for first in range(start, whole, TILE):
        m, s, o = turn(
            q, m, s, o, keys, values, table, kv_head, first, end, scale, block_stride,
            False, KV_HEADS, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
    if whole < end:
        m, s, o = turn(
            q, m, s, o, keys, values, table, kv_head, whole, end, scale, block_stride,
            True, KV_HEADS, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
    place = head * tl.num_programs(2) + part  # [16]
    tl.store(partial_o + place[:, None] * DIM + dim[None, :], o / s[:, None], mask=is_head[:, None])
    tl.store(partial_lse + place, m + tl.log2(s), mask=is_head)


@triton.jit
def add_up(
    context_lens, partial_o, partial_lse, out, per_split,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    part, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    in_use = part * per_split < tl.load(context_lens + seq)  # what other places hold is garbage
    place = (seq * HEADS + head) * SPLITS + part
    lse = tl.load(partial_lse + place, mask=in_use, other=float("-inf"))
    o = tl.load(partial_o + place[:, None] * DIM + dim[None, :], mask=in_use[:, None], other=0.0)  # [SPLITS, DIM]
    weight = tl.exp2(lse - tl.max(lse, 0))  # [SPLITS]; 0 where nothing is
    tl.store(out + (seq * HEADS + head) * DIM + dim, tl.sum(weight[:, None] * o, 0) / tl.sum(weight, 0))


SPLITS, PER_SPLIT = 4, TILE
strides = (cache.device_blocks[0].size, tables.shape[1])
partial_o, partial_lse = torch.full((3, HEADS, SPLITS, DIM), torch.nan), torch.full((3, HEADS, SPLITS), torch.nan)
split[(3, KV_HEADS, SPLITS)](
    *arguments(cache, tables), partial_o, partial_lse, SCALE * LOG2_E, *strides, PER_SPLIT,
    **SHAPE, BLOCK_SIZE=16, TILE=TILE,
)  # fmt: skip
out = torch.full(query.shape, torch.nan)
add_up[(3, HEADS)](LENS, partial_o, partial_lse, out, PER_SPLIT, HEADS=HEADS, DIM=DIM, SPLITS=SPLITS)
check("splits", out)

written = torch.isfinite(partial_lse[:, 0]).sum(1).tolist()
print("splits in use:", written)
assert written == [2, 1, 3]  # 37, 5 and 70 tokens, 32 a split

# %% [markdown]
# Whoever has nothing to do leaves at once, and the second kernel does not look at its place. That matters in earnest.
# On a GPU a whole step of decoding is recorded once, as a CUDA graph, and played back for every token. The grid is part
# of the recording and cannot change; the lengths do, at every step. So the grid has room for the most splits there
# could be, and each program reads the lengths from the GPU's memory and finds out whether it is needed.
#
# ## The real one
#
# [`paged_decode`](../minipaged/fast/gpu/attention.py) is made of these steps. It takes keys and values in another
# layout (the keys of one head side by side), in a `Paged` with the tables, and runs in the interpreter too:

# %%
from minipaged.fast.gpu.attention import paged_decode
from minipaged.fast.kernels import Paged

blocks = torch.from_numpy(cache.device_blocks)
keys, values = blocks[:, 0, 0].transpose(1, 2), blocks[:, 0, 1].transpose(1, 2)  # [blocks, kv_heads, block_size, dim]
rows = torch.arange(3, dtype=torch.int32)  # which row of the tables is whose
paged = Paged(keys, values, torch.from_numpy(tables), rows, LENS)
check("the real kernel", paged_decode(Q, paged, SCALE))

# %% [markdown]
# What it has besides: heads of any size (80 is padded to 128), bfloat16 and float16, numbers of splits chosen on the
# device so that the whole batch divides evenly, a direct write where there is one split, the blocks of the last
# tile looked up ahead, and 64-bit addresses. Its docstring says why for each.
#
# How fast is it? For 32 sequences of 2,048 tokens an H200 reads 3.8 TB of keys and values a second, 90 % of what a
# large copy does there. [The page about the GPU](../docs/gpu.md) has every measurement. What was expected of each
# choice, and what came out, is in [the tuning log](../docs/tuning.md).
#
# ## Exercise
#
# Splits can be put together two at a time, in any order, and without their keys. Write `merge(a, b)` for two pairs `(o,
# lse)`, and check that the three splits of the last sequence give the right answer in every order. Then think of
# somebody who has 100 samples of one prompt: what could be computed once for all of them, and merged?

# %% tags=["solution"]
from itertools import permutations

Part = tuple[np.ndarray, np.ndarray]


def merge(a: Part, b: Part) -> Part:
    (o_a, lse_a), (o_b, lse_b) = a, b  # [heads, dim] and [heads]
    lse = np.logaddexp2(lse_a, lse_b)
    return o_a * np.exp2(lse_a - lse)[:, None] + o_b * np.exp2(lse_b - lse)[:, None], lse


parts = [(partial_o[2, :, i].numpy(), partial_lse[2, :, i].numpy()) for i in range(3)]
for first, second, third in permutations(parts):
    merged, _ = merge(merge(first, second), third)
    assert np.abs(merged - EXACT[2]).max() < 1e-6
print("all six orders agree")
# The samples share the prompt's blocks, so attention over the prompt could read each of its keys once for the queries
# of all samples, as rows of one matrix; each sample then merges that with the attention over its own tokens.
