"""Decode kernels: one program for each sequence and head; one with matrix products; and seeded bugs."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded

PLAIN = """
import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    query, keys, values, block_tables, context_lens, out, scale,
    block_stride, head_stride, slot_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):
    seq = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    length = tl.load(context_lens + seq)
    dim = tl.arange(0, DIM)
    real = dim < HEAD_DIM
    row = (seq * HEADS + head) * HEAD_DIM
    q = tl.load(query + row + dim, mask=real, other=0.0).to(tl.float32)
    m = float("-inf")
    l = 0.0
    o = tl.zeros([DIM], tl.float32)
    for first in range(0, length, TILE):
        position = first + tl.arange(0, TILE)
        filled = position < length
        block = tl.load(block_tables + seq * table_stride + position // BLOCK_SIZE, mask=filled, other=0)
        at = block.to(tl.int64) * block_stride + kv_head * head_stride + position % BLOCK_SIZE * slot_stride
        seen = filled[:, None] & real[None, :]
        k = tl.load(keys + at[:, None] + dim[None, :], mask=seen, other=0.0).to(tl.float32)
        v = tl.load(values + at[:, None] + dim[None, :], mask=seen, other=0.0).to(tl.float32)
        scores = tl.sum(q[None, :] * k, 1) * scale
        scores = tl.where(filled, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 0))
        fade = tl.exp(m - m_new)
        p = tl.exp(scores - m_new)
        l = l * fade + tl.sum(p, 0)
        o = o * fade + tl.sum(p[:, None] * v, 0)
        m = m_new
    tl.store(out + row + dim, o / l, mask=real)


def paged_decode(query, keys, values, block_tables, context_lens, scale, out):
    seqs, heads, head_dim = query.shape
    kv_heads, block_size = keys.shape[1:3]
    decode_kernel[(seqs, heads)](
        query, keys, values, block_tables, context_lens, out, scale,
        keys.stride(0), keys.stride(1), keys.stride(2), block_tables.stride(0),
        HEADS=heads, GROUP=heads // kv_heads, BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim, DIM=triton.next_power_of_2(head_dim), TILE=16,
    )
"""

MATRICES = """
import math

import torch
import triton
import triton.language as tl


@triton.jit
def weigh(m, l, o, scores, v):
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - m_new[:, None])
    fade = tl.exp2(m - m_new)
    return m_new, l * fade + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision="ieee")


@triton.jit
def kernel(
    query, keys, values, block_tables, context_lens, out, scale,
    block_stride, head_stride, slot_stride, table_stride, heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):
    kv_head, seq = tl.program_id(0), tl.program_id(1)
    row, slot, dim = tl.arange(0, ROWS)[:, None], tl.arange(0, SLOTS), tl.arange(0, DIM)[None, :]
    exists = (row < GROUP) & (dim < HEAD_DIM)
    at = (seq * heads + kv_head * GROUP + row) * HEAD_DIM + dim
    q = tl.load(query + at, mask=exists, other=0.0)
    context_len = tl.load(context_lens + seq)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, DIM], tl.float32)
    for logical in range(tl.cdiv(context_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * table_stride + logical).to(tl.int64)
        seen = (slot < BLOCK_SIZE) & (logical * BLOCK_SIZE + slot < context_len)
        where = block * block_stride + kv_head * head_stride + slot[:, None] * slot_stride + dim
        filled = seen[:, None] & (dim < HEAD_DIM)
        k = tl.load(keys + where, mask=filled, other=0.0)
        v = tl.load(values + where, mask=filled, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        m, l, o = weigh(m, l, o, tl.where(seen[None, :], scores, float("-inf")), v)
    tl.store(out + at, (o / l[:, None]).to(out.dtype.element_ty), mask=exists)


def paged_decode(query, keys, values, block_tables, context_lens, scale, out):
    kv_heads, block_size = keys.shape[1:3]
    group = query.shape[1] // kv_heads
    kernel[(kv_heads, len(query))](
        query, keys, values, block_tables, context_lens, out, scale * math.log2(math.e),
        *keys.stride()[:3], block_tables.stride(0), query.shape[1],
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size, SLOTS=max(16, triton.next_power_of_2(block_size)),
        HEAD_DIM=query.shape[2], DIM=max(16, triton.next_power_of_2(query.shape[2])),
    )
"""
"""Another right kernel: one program for all query heads of a key/value head, one block at a time, with tl.dot."""

ONE_BLOCK, BLOCKS, TAIL = "one full block", "several blocks, through the table", "a last block that is not full"
HEADS, BATCH, SIZES = "grouped-query heads", "batches of different lengths", "any block size, any head dimension"
LARGE, LLAMA = "long contexts, large scores, float16", "a small Llama"

BUGS = {
    "no scale: scores are not multiplied by scale": (ONE_BLOCK, "* k, 1) * scale", "* k, 1)"),
    "not divided: the output is not divided by l": (ONE_BLOCK, "o / l, mask", "o, mask"),
    "blocks without a gap between them: the stride between blocks is wrong": (
        ONE_BLOCK,
        "        keys.stride(0),",
        "        keys.stride(0) // 2,",
    ),
    "values from the keys: the keys are summed, not the values": (
        ONE_BLOCK,
        "tl.load(values + at",
        "tl.load(keys + at",
    ),
    "writes to the cache": (
        ONE_BLOCK,
        "        m_new = ",
        "        tl.store(values + at[:, None] + dim[None, :], v * 0, mask=seen)\n        m_new = ",
    ),
    "writes no output: the output is written to query": (ONE_BLOCK, "tl.store(out + row", "tl.store(query + row"),
    "logical blocks for physical ones: the block table is not used": (
        BLOCKS,
        "block = tl.load(block_tables + seq * table_stride + position // BLOCK_SIZE, mask=filled, other=0)",
        "block = position // BLOCK_SIZE",
    ),
    "the output does not fade: o is not scaled down when the maximum rises": (BLOCKS, "o = o * fade", "o = o"),
    "the denominator does not fade: l is not scaled down when the maximum rises": (BLOCKS, "l = l * fade", "l = l"),
    "one position too few: the last position of the context is not read": (
        BLOCKS,
        "length = tl.load(context_lens + seq)",
        "length = tl.load(context_lens + seq) - 1",
    ),
    "no mask at the tail: slots without a token are read": (
        TAIL,
        "filled = position < length",
        "filled = position >= 0",
    ),
    "one position too many: the slot after the last token is read": (
        TAIL,
        "filled = position < length",
        "filled = position <= length",
    ),
    "weighs what is empty by 0: slots without a token are loaded and get the weight 0": (
        TAIL,
        "seen = filled[:, None] & real[None, :]",
        "seen = real[None, :]",
    ),
    "empty scores are 0: slots without a token get the score 0, not minus infinity": (
        TAIL,
        'scores = tl.where(filled, scores, float("-inf"))',
        "",
    ),
    "heads in turns: query head h reads key/value head h % kv_heads": (
        HEADS,
        "kv_head = head // GROUP",
        "kv_head = head % (HEADS // GROUP)",
    ),
    "every query the first: all query heads use the first head's query": (
        HEADS,
        "tl.load(query + row + dim",
        "tl.load(query + seq * HEADS * HEAD_DIM + dim",
    ),
    "everybody's table is the first's: all sequences read the first sequence's blocks": (
        BATCH,
        "block_tables + seq * table_stride",
        "block_tables",
    ),
    "tables side by side: the stride of block_tables is not used": (
        BATCH,
        "block_tables.stride(0),",
        "block_tables.shape[1],",
    ),
    "everybody's length is the first's: all sequences have the first sequence's context length": (
        BATCH,
        "tl.load(context_lens + seq)",
        "tl.load(context_lens)",
    ),
    "stores the dimensions that do not exist: dimensions from head_dim on are stored": (
        SIZES,
        "o / l, mask=real",
        "o / l",
    ),
    "blocks of a power of two: the block size is rounded up to a power of two": (
        SIZES,
        "BLOCK_SIZE=block_size",
        "BLOCK_SIZE=triton.next_power_of_2(block_size)",
    ),
    "no maximum: the largest score is not subtracted": (
        LARGE,
        "m_new = tl.maximum(m, tl.max(scores, 0))",
        "m_new = 0.0",
    ),
    "the maximum begins at 0: the maximum begins at 0, not at minus infinity": (LARGE, 'm = float("-inf")', "m = 0.0"),
    "scores in float16: scores are computed in float16": (
        LARGE,
        "tl.sum(q[None, :] * k, 1)",
        "tl.sum(q[None, :] * k, 1).to(tl.float16)",
    ),
    "keeps the tables of the call before: the block tables of an earlier call are used again": (
        LLAMA,
        "    seqs, heads, head_dim",
        "    block_tables = OLD.setdefault(tuple(block_tables.shape), block_tables.clone())\n    seqs, heads, head_dim",
        "\n\n@triton",
        "\nOLD = {}\n\n\n@triton",
    ),
}

SEEDED = seeded({"a program for each head": PLAIN, "matrix products": MATRICES}, BUGS)
