"""PagedAttention on a GPU (paper, sections 4.1 and 5.1): three Triton kernels and a reduction.

The mathematics is that of `reference/attention.py`: loop over the keys of a sequence, look up each key's block in the
block table, and keep a running maximum m, a running sum l and a running output o for every query (online softmax). The
loop is organized for the hardware. A GPU has about a hundred multiprocessors that each multiply small matrices, and
that wait a microsecond for memory unless they have requested much of it ahead. Hence:

- **Rows.** The query heads that share a key/value head read the same keys: they become the rows of one matrix, so that
  K and V are fetched once for all of them, and Q·K is one product. Prefill packs (query, head) pairs in the same way.
- **Tiles.** An iteration takes 64 keys (fewer if registers are short), whatever the block size: the tile suits
  the tensor cores, and the block size suits the memory manager. Each key's block is looked up separately, so a tile may
  span 64 blocks of one token or a quarter of a block of 256.
- **No needless masks.** In most tiles every row sees every key. Only the last tiles (the end of the context, the causal
  diagonal) pay for comparisons. There, nothing past the context is even loaded: an unfilled slot may hold NaN, and a
  weight of zero does not remove it (0 × NaN is NaN).
- **exp2.** The hardware raises 2 to a power; e^x is 2^(x · log2 e). The factor log2 e is folded into the softmax scale.

**Decode: splits.** With one query per sequence there are (sequences × key/value heads) programs, often far fewer than
the GPU can run at a time. So a long context is divided into splits. Each split is a program of its own, which writes a
partial result (its output and its log-sum-exp, which gives its weight), and a second kernel merges them. A sequence's
number of splits depends on lengths that change at every step, but a CUDA graph cannot change. So the grid has room for
the largest number. Every program reads the lengths from GPU memory, computes the splits in use, and exits immediately
if its split is not among them. Thus one recorded graph serves all lengths. A sequence with one split writes its result
directly.

**Decode: shared reading.** Blocks with which many sequences begin (`kernels.Shared`) are read by a kernel of their own.
Its rows are the query heads of many sequences, packed as in prefill, so a key that is read serves up to 128 of them.
Its results are more splits of each sequence: the decode kernel leaves these tokens out, and the same reduction merges
all splits, as `reference/cascade.py` merges two parts. Shared tokens are read together in whole lots of 64. What is
left of a context is the sequence's own, and begins where a tile begins.

**Prefill: tiles of a mixed batch.** The grid has room for the largest number of tiles: (rows ÷ tile), and one more for
each sequence, since each may end in a partial tile. A program finds its sequence by counting those that begin before
it. Tiles late in a sequence see more keys than early ones and are started first, so that the last ones to start are
short.

**8 bits.** Codes are decoded to the queries' type in registers, between the load and the product: memory delivers half
the bytes, or a quarter. Every type represents both kinds of code exactly, so nothing is rounded again. The scales of
keys are applied to the scores, and those of values to the weights, which are far fewer; applied to the tile itself,
they would spill registers. (In float16 a weight times a scale is lost below 6e-8: values that are all below a
thousandth would be coarse.)

**Windows, soft caps, sinks.** They are as in `reference/attention.py`, and a kernel without them has no instruction for
them. A decode reads from its window's first token on, so a window needs no mask there: a tile may begin anywhere. The
splits are those of the window. The rows of a prefill tile have windows that begin one after another, so its first tiles
of keys are masked, like its last ones. A sink begins the sum of one split per sequence, the first of its own tokens. A
layer with a window shares nothing: shared tokens lie at the beginning. tanh is computed with exp2, and one factor
contains the softmax scale, log2 e and the cap. (A score's error is up to 2^-21 of the cap.)

The rounding of a sequence's result depends a little on the batch, because the number of splits does. The mathematics
does not.
"""

# Triton kernels have no Python types: their arguments are pointers and scalars on the device.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.fast.device import is_gpu
from minipaged.fast.kernels import Paged

MIN_ROWS = tl.constexpr(16)
"""The number of rows that the tensor cores multiply at a time: fewer rows are padded."""

MIN_KEYS_PER_SPLIT = tl.constexpr(128)
"""The smallest split. A shorter one costs more to write and merge than it saves."""

MAX_SPLITS = tl.constexpr(128)
"""The most splits of one sequence: the reduction holds all their weights in one vector."""

SHARED_LOT = tl.constexpr(64)
"""The number of tokens in a lot of shared ones: a multiple of every tile, so that no tile of them needs a mask."""

PROGRAMS_PER_SM = 1.75
"""Programs with work per multiprocessor: while one multiplies, the other has loads under way. All of them must fit at
the same time, because a program that waits for a place delays all. Two fit. An eighth is left free, since sequences do
not divide evenly: 32 of 8,192 tokens and 8 heads made 512 programs of half their length, and a second wave that was
nearly empty. Now they make 256 (278 µs on an H200, 297 before)."""

GRID_PER_SM = 8
"""Programs in the grid of a decode, per multiprocessor. Sequences of equal lengths use PROGRAMS_PER_SM, and the rest
exit immediately. With mixed lengths, the spare programs let the longest sequence be divided finer than the average."""

E4M3_FACTOR = tl.constexpr(2.0**120)
"""The factor between the exponent biases of float32 (127) and of e4m3 floats (7)."""

MAX_HEAD_DIM = 256
"""The widest heads for which the compiled kernels have been examined."""

LOG2_E = tl.constexpr(math.log2(math.e))

LOWEST = tl.constexpr(-(2.0**126))
"""A maximum below all scores, for rows that may see no key in their first tiles: -inf - -inf would be NaN."""


# --- Decode ----------------------------------------------------------------------------------------


def paged_decode(query: Tensor, paged: Paged, scale: float) -> Tensor:
    """See `minipaged.fast.kernels`. Queries may be strided by token and by head.

    Raises ValueError for shapes or strides that do not fit. Its allocations depend on shapes alone, so that a CUDA
    graph can record it. (Of `paged.shared`, a graph would record the numbers of prefixes and members.) With a window,
    `paged.shared` is ignored.
    """
    keys, values, tables, rows, context_lens, kv_scales, shared, window, soft_cap, sinks = paged
    seqs, heads, head_dim = query.shape
    group = _check(query, paged, scale)
    factor, cap = _factors(scale, soft_cap)
    kv_heads = keys.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if seqs == 0:
        return out
    num_sms = _num_sms(query.device)
    shape = query.dtype, head_dim, group, keys.shape[2], _capability(query.device), kv_scales is not None
    max_splits = _max_splits(seqs, kv_heads, num_sms)
    if window is not None:
        max_splits = min(max_splits, -(-window // int(MIN_KEYS_PER_SPLIT.value)))
        shared = None
    max_shared_splits = 0
    if shared is not None:
        together = shared_options(*shape)
        tiles = _shared_tiles(len(shared.members), len(shared.num_tokens), group, together["ROWS"])
        max_splits, max_shared_splits = _max_splits_of_both(max_splits, tiles, kv_heads, num_sms)
    splits = max_shared_splits + max_splits
    partial_o = query.new_empty(seqs, heads, splits, head_dim, dtype=torch.float32)  # each split's output
    partial_lse = query.new_empty(seqs, heads, splits, dtype=torch.float32)  # log2 of its sum of weights
    lots = None
    if shared is not None:
        lots = context_lens.new_zeros(seqs)  # of each sequence, the lots that are read together
        _shared_kernel[(kv_heads, tiles, max_shared_splits)](
            query,
            keys,
            values,
            kv_scales,
            tables,
            rows,
            *shared,
            lots,
            partial_o,
            partial_lse,
            len(shared.num_tokens),
            max_shared_splits,
            splits,
            factor,
            cap,
            *query.stride()[:2],
            *keys.stride()[:3],
            tables.stride(0),
            **together,
        )
    options = decode_options(*shape, split=splits > 1)
    programs = int(PROGRAMS_PER_SM * num_sms)
    lengths = context_lens, window, seqs, kv_heads, programs, max_splits, lots, max_shared_splits or None
    _decode_kernel[(kv_heads, seqs, max_splits)](
        query,
        keys,
        values,
        kv_scales,
        tables,
        rows,
        out,
        partial_o,
        partial_lse,
        *lengths,
        factor,
        cap,
        sinks,
        *query.stride()[:2],
        *out.stride()[:2],
        *keys.stride()[:3],
        tables.stride(0),
        **options,
    )
    if splits > 1:
        _reduce_kernel[(heads, seqs)](
            out, partial_o, partial_lse, *lengths, *out.stride()[:2], **reduce_options(options)
        )
    return out


def _max_splits(seqs: int, kv_heads: int, num_sms: int) -> int:
    """Return the number of splits of each sequence for which the grid has room, given the number of multiprocessors."""
    room = GRID_PER_SM * num_sms // (seqs * kv_heads)
    return max(1, min(int(MAX_SPLITS.value), room))


def _shared_tiles(members: int, prefixes: int, group: int, rows: int) -> int:
    """Return the number of tiles of `rows` (member, head) pairs for which the grid has room. `group`: the query heads
    of a key/value head.

    It depends on these numbers alone, because the host does not know how many members each prefix has. One prefix fills
    it exactly.
    """
    return (members * group - prefixes) // rows + prefixes


def _max_splits_of_both(max_splits: int, tiles: int, kv_heads: int, num_sms: int) -> tuple[int, int]:
    """Return the most splits of a sequence's own tokens, and of a tile of shared ones: such that the tiles are one
    program per multiprocessor, since no more fit if heads have 128 numbers."""
    most = int(MAX_SPLITS.value) // 2
    return min(max_splits, most), max(1, min(most, num_sms // (tiles * kv_heads)))


# The integers of a batch are pieces of one buffer, at addresses that change from step to step. Triton would recompile a
# kernel for each combination of those that 16 divides, and gain nothing by it.
@triton.jit(
    do_not_specialize=[
        "rows", "context_lens", "window", "seqs", "kv_heads", "programs", "max_splits", "max_shared_splits", "sinks",
        "table_stride",
    ]
)  # fmt: skip
def _decode_kernel(
    query,  # [seqs, heads, HEAD_DIM]
    keys,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
    values,  # like keys
    kv_scales,  # None, or [num_blocks, 2, kv_heads, BLOCK_SIZE]
    tables,  # [num_rows, max_blocks]
    rows,  # [seqs]
    out,  # [seqs, heads, HEAD_DIM]
    partial_o,  # [seqs, heads, max_shared_splits + max_splits, HEAD_DIM]: in use are the first, shared ones before own
    partial_lse,  # [seqs, heads, max_shared_splits + max_splits]
    context_lens,  # [seqs]
    window,  # None, or the number of tokens that a query sees
    seqs,
    kv_heads,
    programs,
    max_splits,
    lots,  # None, or [seqs]: the lots of shared tokens, which are left out here
    max_shared_splits,  # None without `lots`
    scale,
    soft_cap,  # None, or the cap, as `_factors` says
    sinks,  # None, or [heads]
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    kv_head_stride,
    slot_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program per (key/value head, sequence, split): its rows are the query heads of the key/value head, and it
    attends to one split of the context, or of the window.

    The split is the slowest axis of the grid, so that programs with nothing to do come last. The key/value head is the
    fastest: neighbouring programs read neighbouring parts of the same block.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    row = tl.arange(0, ROWS)  # [ROWS]; the first GROUP are query heads
    dim = tl.arange(0, DIM)  # [DIM]; the first HEAD_DIM exist
    exists = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]  # [ROWS, DIM]
    head = kv_head * GROUP + row  # [ROWS]
    out_at = seq.to(tl.int64) * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    if context_len == 0:
        if split == 0:
            tl.store(out + out_at, tl.zeros([ROWS, DIM], out.dtype.element_ty), mask=exists)
        return

    start = 0
    end = context_len
    num_splits = 1
    if lots is not None:
        start += tl.load(lots + seq) * SHARED_LOT
    if window is not None:
        start = tl.maximum(context_len - window, 0)
    if SPLIT:
        own = context_len - start
        per_split = TILE * _tiles_per_split(own, context_lens, window, seqs, kv_heads, programs, max_splits, lots, TILE)
        num_splits = tl.cdiv(own, per_split)
        start += split * per_split
        end = tl.minimum(start + per_split, context_len)
        if split >= num_splits:
            return

    q_at = seq.to(tl.int64) * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + q_at, mask=exists, other=0.0)  # [ROWS, DIM]
    table = tables + tl.load(rows + seq).to(tl.int64) * table_stride
    kv_at = kv_head.to(tl.int64) * kv_head_stride
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    o = tl.zeros([ROWS, DIM], tl.float32)
    if sinks is not None:
        m = tl.where(split == 0, tl.load(sinks + head, mask=row < GROUP, other=0.0) * LOG2_E, m)
        l += 1.0  # of no weight while m is -inf  # noqa: E741
    if lots is not None:  # the shared splits come before; counted after the loop, their number would spill
        split += _shared_splits(tl.load(lots + seq), max_shared_splits)[0]
    whole = end // TILE * TILE  # tiles are whole up to here, since `start` is a multiple of TILE
    if window is not None:  # unless it is where the window begins
        whole = start + (end - start) // TILE * TILE
    # The last tile's blocks are looked up now, so that their numbers have arrived when the loop is done. Codes and
    # lots together leave some shapes no registers for these numbers, so there they are looked up after the loop.
    if lots is None or kv_scales is None:
        last_block = _look_up(table, whole, end, BLOCK_SIZE, TILE)
    for first in range(start, whole, TILE):
        block = _look_up(table, first, end, BLOCK_SIZE, TILE)
        m, l, o = _attend(  # noqa: E741
            q, m, l, o, keys + kv_at, values + kv_at, kv_scales, block, first, end, row,
            scale, soft_cap, None, block_stride, slot_stride, BLOCK_SIZE, TILE, HEAD_DIM, DIM, MASKED=False,
        )  # fmt: skip
    if lots is not None and kv_scales is not None:
        last_block = _look_up(table, whole, end, BLOCK_SIZE, TILE)
    # A loop of one iteration, so that its loads use shared memory too: in registers they would be the kernel's peak.
    last_seen = tl.full([ROWS], end - 1, tl.int32)
    for first in tl.range(whole, end, TILE, num_stages=2):
        m, l, o = _attend(  # noqa: E741
            q, m, l, o, keys + kv_at, values + kv_at, kv_scales, last_block, first, end, last_seen,
            scale, soft_cap, None, block_stride, slot_stride, BLOCK_SIZE, TILE, HEAD_DIM, DIM, MASKED=True,
        )  # fmt: skip
    o = o / l[:, None]

    if num_splits == 1 and lots is None:
        tl.store(out + out_at, o.to(out.dtype.element_ty), mask=exists)
    else:
        splits = max_splits
        if lots is not None:  # the shared splits come before
            splits += max_shared_splits
        partial = (seq * kv_heads * GROUP + head).to(tl.int64) * splits + split  # [ROWS]
        tl.store(partial_o + partial[:, None] * HEAD_DIM + dim[None, :], o, mask=exists)
        tl.store(partial_lse + partial, m + tl.log2(l), mask=row < GROUP)


@triton.jit
def _tiles_per_split(own, context_lens, window, seqs, kv_heads, programs, max_splits, lots, TILE: tl.constexpr):
    """Return the tiles per split of one sequence, which has `own` tokens to read by itself, such that the whole batch
    divides evenly over `programs`.

    So a sequence of twice the length gets twice the splits. Then they are evened out: 9 tiles at no fewer than 4 each
    are 5 and 4, not 4, 4 and 1. No split in use is empty.
    """
    total = 0  # tiles in the batch
    for first in range(0, seqs, 128):
        seq = first + tl.arange(0, 128)
        lens = tl.load(context_lens + seq, mask=seq < seqs, other=0)
        if lots is not None:
            lens -= SHARED_LOT * tl.load(lots + seq, mask=seq < seqs, other=0)
        if window is not None:
            lens = tl.minimum(lens, window)
        total += tl.sum(tl.cdiv(lens, TILE))
    tiles = tl.cdiv(own, TILE)
    at_least = tl.maximum(tl.cdiv(total * kv_heads, programs), tl.cdiv(tiles, max_splits))
    at_least = tl.maximum(at_least, MIN_KEYS_PER_SPLIT // TILE)
    return tl.cdiv(tiles, tl.cdiv(tiles, at_least))


@triton.jit
def _shared_splits(lots, max_splits):
    """Return the number of splits of a shared part, and the lots per split. None is empty; without lots there is none.

    Only the prefix's own length decides, so that each sequence's programs come to the same number by themselves.
    """
    at_least = tl.maximum(tl.cdiv(lots, max_splits), MIN_KEYS_PER_SPLIT // SHARED_LOT)
    per_split = tl.maximum(tl.cdiv(lots, tl.maximum(tl.cdiv(lots, at_least), 1)), 1)
    return tl.cdiv(lots, per_split), per_split


@triton.jit(
    do_not_specialize=[
        "rows", "members", "starts", "num_tokens", "prefixes", "max_shared_splits", "splits", "table_stride"
    ]
)  # fmt: skip
def _shared_kernel(
    query,  # [seqs, heads, HEAD_DIM]
    keys,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
    values,  # like keys
    kv_scales,  # None, or [num_blocks, 2, kv_heads, BLOCK_SIZE]
    tables,  # [num_rows, max_blocks]
    rows,  # [seqs]
    members,  # [members]: `kernels.Shared`, like the next two
    starts,  # [prefixes + 1]
    num_tokens,  # [prefixes]
    lots,  # [seqs], zeros: set to the lots that are read together
    partial_o,  # [seqs, heads, splits, HEAD_DIM]
    partial_lse,  # [seqs, heads, splits]
    prefixes,
    max_shared_splits,
    splits,
    scale,
    soft_cap,  # None, or the cap, as `_factors` says
    query_token_stride,
    query_head_stride,
    block_stride,
    kv_head_stride,
    slot_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program per (key/value head, tile, split): its rows are ROWS consecutive (member, head) pairs of one shared
    prefix, and they attend to one split of its tokens, through the table of its first member.

    Pair r of a prefix is head r % GROUP of its member r // GROUP.
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)

    # Prefix i owns the tiles from (starts[i] * GROUP - i) // ROWS + i on: at least as many as it needs. This tile
    # belongs to the last prefix that begins no later.
    prefix = -1
    for first in range(0, prefixes, 128):
        i = first + tl.arange(0, 128)
        begins = (tl.load(starts + i, mask=i < prefixes, other=0) * GROUP - i) // ROWS + i
        prefix += tl.sum(((i < prefixes) & (begins <= tile)).to(tl.int32))
    first_member = tl.load(starts + prefix)
    num_pairs = (tl.load(starts + prefix + 1) - first_member) * GROUP
    first_pair = (tile - ((first_member * GROUP - prefix) // ROWS + prefix)) * ROWS
    here = tl.load(num_tokens + prefix) // SHARED_LOT
    num_splits, per_split = _shared_splits(here, max_shared_splits)
    if (first_pair >= num_pairs) | (split >= num_splits):
        return

    pair = first_pair + tl.arange(0, ROWS)  # [ROWS]
    dim = tl.arange(0, DIM)  # [DIM]; the first HEAD_DIM exist
    real = pair < num_pairs  # [ROWS]
    exists = real[:, None] & (dim < HEAD_DIM)[None, :]  # [ROWS, DIM]
    seq = tl.load(members + first_member + pair // GROUP, mask=real, other=0)  # [ROWS]
    head = kv_head * GROUP + pair % GROUP  # [ROWS]
    q_at = seq.to(tl.int64) * query_token_stride + head * query_head_stride  # [ROWS]
    q = tl.load(query + q_at[:, None] + dim[None, :], mask=exists, other=0.0)  # [ROWS, DIM]

    table = tables + tl.load(rows + tl.load(members + first_member)).to(tl.int64) * table_stride
    kv_at = kv_head.to(tl.int64) * kv_head_stride
    start = split * per_split * SHARED_LOT
    end = tl.minimum(start + per_split * SHARED_LOT, here * SHARED_LOT)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    o = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(start, end, TILE):
        block = _look_up(table, first, end, BLOCK_SIZE, TILE)
        m, l, o = _attend(  # noqa: E741
            q, m, l, o, keys + kv_at, values + kv_at, kv_scales, block, first, end, pair,
            scale, soft_cap, None, block_stride, slot_stride, BLOCK_SIZE, TILE, HEAD_DIM, DIM, MASKED=False,
        )  # fmt: skip
    o = o / l[:, None]
    partial = (seq * (tl.num_programs(0) * GROUP) + head).to(tl.int64) * splits + split  # [ROWS]
    tl.store(partial_o + partial[:, None] * HEAD_DIM + dim[None, :], o, mask=exists)
    tl.store(partial_lse + partial, m + tl.log2(l), mask=real)
    if (kv_head == 0) & (split == 0):
        tl.store(lots + seq, here, mask=real)


@triton.jit(
    do_not_specialize=["context_lens", "window", "seqs", "kv_heads", "programs", "max_splits", "max_shared_splits"]
)
def _reduce_kernel(
    out,  # [seqs, heads, HEAD_DIM]
    partial_o,  # [seqs, heads, max_shared_splits + max_splits, HEAD_DIM]: in use are the first, shared ones before own
    partial_lse,  # [seqs, heads, max_shared_splits + max_splits]
    context_lens,  # [seqs]
    window,  # None, or the number of tokens that a query sees
    seqs,
    kv_heads,
    programs,
    max_splits,
    lots,  # None, or [seqs]: the lots of shared tokens, which are left out here
    max_shared_splits,  # None without `lots`
    out_token_stride,
    out_head_stride,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program per (query head, sequence) merges the splits, each weighted by its sum of exponentials."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    context_len = tl.load(context_lens + seq)
    if context_len == 0:
        return
    own = context_len
    splits = max_splits
    num_splits = 0
    if lots is not None:
        here = tl.load(lots + seq)
        num_splits, _ = _shared_splits(here, max_shared_splits)
        own -= here * SHARED_LOT
        splits += max_shared_splits
    if window is not None:
        own = tl.minimum(own, window)
    per_split = TILE * _tiles_per_split(own, context_lens, window, seqs, kv_heads, programs, max_splits, lots, TILE)
    num_splits += tl.cdiv(own, per_split)
    if num_splits == 1 and lots is None:  # written already
        return

    base = (seq * tl.num_programs(0) + head).to(tl.int64) * splits
    every = tl.arange(0, MAX_SPLITS)
    m = tl.max(tl.load(partial_lse + base + every, mask=every < num_splits, other=float("-inf")))
    dim = tl.arange(0, DIM)
    weights = tl.zeros([16], tl.float32)
    o = tl.zeros([DIM], tl.float32)
    for first in range(0, num_splits, 16):
        split = first + tl.arange(0, 16)
        in_use = split < num_splits  # other splits' places hold garbage
        weight = tl.exp2(tl.load(partial_lse + base + split, mask=in_use, other=float("-inf")) - m)  # [16]
        part_at = (base + split)[:, None] * HEAD_DIM + dim[None, :]
        part = tl.load(partial_o + part_at, mask=in_use[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)  # [16, DIM]
        weights += weight
        o += tl.sum(weight[:, None] * part, 0)
    o = o / tl.sum(weights)
    out_at = seq.to(tl.int64) * out_token_stride + head * out_head_stride + dim
    tl.store(out + out_at, o.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


# --- Prefill ---------------------------------------------------------------------------------------


def paged_prefill(query: Tensor, paged: Paged, query_start: Tensor, scale: float, *, max_query_len: int) -> Tensor:
    """See `minipaged.fast.kernels`. Queries may be strided by token and by head.

    Raises ValueError for shapes or strides that do not fit.
    """
    keys, values, tables, rows, context_lens, kv_scales, _, window, soft_cap, sinks = paged
    tokens, _, head_dim = query.shape
    group = _check(query, paged, scale)
    seqs = len(context_lens)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    capability = _capability(query.device)
    shape = query.dtype, head_dim, group, keys.shape[2], capability, kv_scales is not None
    options = prefill_options(*shape, max_query_len, windowed=window is not None)
    num_tiles = tokens * group // options["ROWS"] + seqs
    if tokens == 0:
        return out
    _prefill_kernel[(keys.shape[1], num_tiles)](
        query,
        keys,
        values,
        kv_scales,
        tables,
        rows,
        out,
        query_start,
        context_lens,
        window,
        seqs,
        *_factors(scale, soft_cap),
        sinks,
        *query.stride()[:2],
        *out.stride()[:2],
        *keys.stride()[:3],
        tables.stride(0),
        **options,
    )
    return out


@triton.jit(do_not_specialize=["rows", "query_start", "context_lens", "window", "seqs", "sinks", "table_stride"])
def _prefill_kernel(
    query,  # [tokens, heads, HEAD_DIM]
    keys,  # [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
    values,  # like keys
    kv_scales,  # None, or [num_blocks, 2, kv_heads, BLOCK_SIZE]
    tables,  # [num_rows, max_blocks]
    rows,  # [seqs]
    out,  # [tokens, heads, HEAD_DIM]
    query_start,  # [seqs + 1]
    context_lens,  # [seqs]
    window,  # None, or the number of tokens that a query sees
    seqs,
    scale,
    soft_cap,  # None, or the cap, as `_factors` says
    sinks,  # None, or [heads]
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    kv_head_stride,
    slot_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program per (key/value head, tile): its rows are ROWS consecutive (query token, head) pairs of one sequence,
    and it attends to all keys that they see.

    Pair r of a sequence is head r % GROUP of query token r // GROUP.
    """
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # a sequence's last tile, the longest, is started first

    # Sequence s owns the tiles from query_start[s] * GROUP // ROWS + s on: at least as many as it needs, without a sum
    # over the sequences before it. This tile belongs to the last sequence that begins no later.
    seq = -1
    for first in range(0, seqs, 128):
        s = first + tl.arange(0, 128)
        begins = tl.load(query_start + s, mask=s < seqs, other=0) * GROUP // ROWS + s
        seq += tl.sum(((s < seqs) & (begins <= tile)).to(tl.int32))
    first_token = tl.load(query_start + seq)
    num_pairs = (tl.load(query_start + seq + 1) - first_token) * GROUP
    first_pair = (tile - (first_token * GROUP // ROWS + seq)) * ROWS
    if first_pair >= num_pairs:
        return

    pair = first_pair + tl.arange(0, ROWS)  # [ROWS]
    dim = tl.arange(0, DIM)  # [DIM]; the first HEAD_DIM exist
    exists = (pair < num_pairs)[:, None] & (dim < HEAD_DIM)[None, :]  # [ROWS, DIM]
    head = kv_head * GROUP + pair % GROUP  # [ROWS]
    token = (first_token + pair // GROUP).to(tl.int64)  # [ROWS]
    q_at = token * query_token_stride + head * query_head_stride
    q = tl.load(query + q_at[:, None] + dim[None, :], mask=exists, other=0.0)  # [ROWS, DIM]

    before = tl.load(context_lens + seq) - num_pairs // GROUP  # positions before the sequence's first query token
    position = before + pair // GROUP  # [ROWS], the position of each row's query token: the last one it sees
    whole = (before + first_pair // GROUP + 1) // TILE * TILE  # up to here every row sees every key
    end = before + (tl.minimum(first_pair + ROWS, num_pairs) - 1) // GROUP + 1  # the last row ends here
    start = 0  # from here to `whole` every row sees every key
    if window is not None:
        position = tl.minimum(position, end - 1)  # rows that do not exist see keys, too
        begin = tl.maximum(before + first_pair // GROUP + 1 - window, 0)  # the first row's window begins here
        whole = begin + (before + first_pair // GROUP + 1 - begin) // TILE * TILE
        start = begin + tl.cdiv(tl.maximum(end - window - begin, 0), TILE) * TILE  # the last row's has begun
        start = tl.minimum(start, whole)

    table = tables + tl.load(rows + seq).to(tl.int64) * table_stride
    kv_at = kv_head.to(tl.int64) * kv_head_stride
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    o = tl.zeros([ROWS, DIM], tl.float32)
    if window is not None:
        m = tl.full([ROWS], LOWEST, tl.float32)
    if sinks is not None:
        m = tl.load(sinks + head) * LOG2_E
        l += 1.0  # noqa: E741
    for first in range(start, whole, TILE):
        block = _look_up(table, first, end, BLOCK_SIZE, TILE)
        m, l, o = _attend(  # noqa: E741
            q, m, l, o, keys + kv_at, values + kv_at, kv_scales, block, first, end, position,
            scale, soft_cap, None, block_stride, slot_stride, BLOCK_SIZE, TILE, HEAD_DIM, DIM, MASKED=False,
        )  # fmt: skip
    masked_from, masked_to = whole, end
    if window is not None:  # the tiles before `start` and those from `whole` on, in one loop
        masked_from, masked_to = begin, end - (whole - start)
    for first in range(masked_from, masked_to, TILE):
        if window is not None:
            first += tl.where(first >= start, whole - start, 0)
        block = _look_up(table, first, end, BLOCK_SIZE, TILE)
        m, l, o = _attend(  # noqa: E741
            q, m, l, o, keys + kv_at, values + kv_at, kv_scales, block, first, end, position,
            scale, soft_cap, window, block_stride, slot_stride, BLOCK_SIZE, TILE, HEAD_DIM, DIM, MASKED=True,
        )  # fmt: skip
    o = o / l[:, None]
    out_at = token * out_token_stride + head * out_head_stride
    tl.store(out + out_at[:, None] + dim[None, :], o.to(out.dtype.element_ty), mask=exists)


# --- Parts of both kernels -------------------------------------------------------------------------


@triton.jit
def _look_up(table, first, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return the block of each position first .. first + TILE - 1 in one sequence's table; 0 from `end` on."""
    position = first + tl.arange(0, TILE)  # [TILE]
    return tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)  # past the context: never read


@triton.jit
def _attend(
    q,  # [rows, DIM]
    m,  # [rows], the largest score so far, times log2 e
    l,  # [rows], the sum of exponentials so far, in units of 2^m  # noqa: E741
    o,  # [rows, DIM], the sum of weighted values so far, in units of 2^m
    keys,  # of this program's key/value head, like `values`
    values,
    kv_scales,  # None, or all heads' scales
    block,  # [TILE], each key's block
    first,
    end,
    last_seen,  # [rows], the last position that each row sees
    scale,
    soft_cap,  # None, or the cap, as `_factors` says
    window,  # None, or the number of positions that each row sees; used if MASKED
    block_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One iteration of the paper's loop: attends to the keys at positions first .. first + TILE - 1, except those from
    `end` on.

    m must be finite, or every row must see a key in its first tile: then -inf - -inf never occurs.
    """
    position = first + tl.arange(0, TILE)  # [TILE]
    dim = tl.arange(0, DIM)[None, :]  # [1, DIM]
    # 64 bits: a cache has more elements than 32 bits can count.
    at = (block.to(tl.int64) * block_stride + position % BLOCK_SIZE * slot_stride)[:, None] + dim  # [TILE, DIM]
    if MASKED:
        filled = (position < end)[:, None] & (dim < HEAD_DIM)  # [TILE, DIM]
        k = tl.load(keys + at, mask=filled, other=0.0)
        v = tl.load(values + at, mask=filled, other=0.0)
    elif DIM != HEAD_DIM:
        k = tl.load(keys + at, mask=dim < HEAD_DIM, other=0.0)
        v = tl.load(values + at, mask=dim < HEAD_DIM, other=0.0)
    else:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    if kv_scales is not None:
        slot = position % BLOCK_SIZE
        scale_at = block.to(tl.int64) * (block_stride // 4) + tl.program_id(0) * BLOCK_SIZE + slot  # [TILE]
        value_scale_at = scale_at + tl.num_programs(0) * BLOCK_SIZE  # [TILE]: after the scales of all heads' keys
        if MASKED:
            k_scale = tl.load(kv_scales + scale_at, mask=position < end, other=0.0)  # [TILE]
            v_scale = tl.load(kv_scales + value_scale_at, mask=position < end, other=0.0)
        else:
            k_scale = tl.load(kv_scales + scale_at)
            v_scale = tl.load(kv_scales + value_scale_at)
        k, v = _numbers(k, q.dtype), _numbers(v, q.dtype)

    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [rows, TILE]; ieee: fp32 is not reduced to tf32
    if kv_scales is not None:
        scores *= k_scale[None, :]
    if soft_cap is not None:  # tanh x = 1 - 2 / (1 + e^2x)
        scores = soft_cap - 2 * soft_cap / (1 + tl.exp2(scores * scale))
        scale = 1.0
    if MASKED:
        seen = position[None, :] <= last_seen[:, None]
        if window is not None:
            seen &= position[None, :] > last_seen[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    fade = tl.exp2(m - m_new)  # [rows]
    p = tl.exp2(scores * scale - m_new[:, None])  # [rows, TILE]: one multiply-add and one exp2 each
    l = l * fade + tl.sum(p, 1)  # noqa: E741
    if kv_scales is not None:
        p *= v_scale[None, :]
    o = tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision="ieee")
    return m_new, l, o


@triton.jit
def _numbers(codes, dtype: tl.constexpr):
    """Decode codes [TILE, DIM], int8 or the bits of e4m3 floats, without their scale. The result is exact in any
    dtype."""
    if codes.dtype == tl.int8:
        wide = codes.to(tl.float32)
    else:  # move sign, exponent and fraction to float32's places; the factor adds the missing 120 to the exponent
        bits = codes.to(tl.int32)
        wide = (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * E4M3_FACTOR
    return wide.to(dtype)


# --- Compile options ----------------------------------------------------------------------------------


def _shape(dtype: torch.dtype, dim: int, rows: int, capability: int, in_8_bits: bool) -> dict[str, int]:
    """Return the shape of a program: the keys in a tile, its warps of 32 threads, and the pipeline stages.

    They are chosen so that nothing spills: values beyond a thread's 255 registers go to memory and back in each
    iteration. A program holds `rows` × `dim` sums and `rows` × TILE scores, and also the queries if it cannot multiply
    from shared memory. The stages are divided between two dependent loads, first the block table, then K and V: 5
    stages keep two tiles of K and V under way, and their look-ups two iterations ahead. If a tile has wide heads, there
    is room for only 3. An exception is data-centre Blackwell, where Triton 3.7.1 omits a fence with 3 stages, so that
    the first V may be multiplied before it has arrived (`early_reads` in tests/fast/compile_kernels.py). Hopper has
    room for 7, three tiles: on an H200 32 sequences of 8,192 tokens took 250 µs instead of 278, and prompts 3 % less.
    (Heads of 64 gain nothing by it.) Codes of 8 bits are in registers as decoded numbers, so tiles are smaller when
    there is least room.
    """
    if dtype == torch.float32:  # no tensor cores: sums of single multiplications, which take registers
        few = dim <= 64 and not in_8_bits
        return {"TILE": 16, "num_warps": 4 if few else 8, "num_stages": 5 if dim <= 128 else 3}
    crowded = dim > 128 or (rows >= 64 and not _multiplies_from_shared_memory(capability))
    num_stages = 7 if capability // 10 == 9 and dim == 128 else 5
    if dim > 128 and rows >= 64 and capability // 10 != 10:
        num_stages = 3
    return {
        "TILE": 16 if crowded and in_8_bits else 32 if crowded else 64,
        "num_warps": 8 if rows >= 128 or (crowded and rows >= 64) else 4,
        "num_stages": num_stages,
    }


def decode_options(
    dtype: torch.dtype, head_dim: int, group: int, block_size: int, capability: int, in_8_bits: bool, *, split: bool
) -> dict[str, Any]:
    """Return the decode kernel's compile options on a GPU of this compute capability (× 10). in_8_bits: whether the
    cache is."""
    rows = max(MIN_ROWS.value, triton.next_power_of_2(group))
    return _options(dtype, head_dim, group, block_size, capability, in_8_bits, rows) | {"SPLIT": split}


def prefill_options(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    capability: int,
    in_8_bits: bool,
    max_query_len: int,
    *,
    windowed: bool = False,
) -> dict[str, Any]:
    """Return the prefill kernel's compile options. More rows fetch K and V less often; fewer rows leave none idle."""
    most = 32 if dtype == torch.float32 else 128
    if (_padded(head_dim) > 128 or in_8_bits) and not _multiplies_from_shared_memory(capability):
        most //= 2
    rows = max(MIN_ROWS.value, min(most, triton.next_power_of_2(max_query_len * group)))
    options = _options(dtype, head_dim, group, block_size, capability, in_8_bits, rows)
    if windowed and dtype == torch.float32:
        options["num_warps"] = 8  # with 4, the masks of a window spill
    return options


def shared_options(
    dtype: torch.dtype, head_dim: int, group: int, block_size: int, capability: int, in_8_bits: bool
) -> dict[str, Any]:
    """Return the compile options of the kernel that reads shared blocks: those of a long prompt, whatever the number of
    members, so that there is one kernel to compile."""
    return prefill_options(dtype, head_dim, group, block_size, capability, in_8_bits, max_query_len=1024)


def reduce_options(decode: dict[str, Any]) -> dict[str, Any]:
    """Return the compile options of the reduction that belongs to a decode kernel with these options."""
    return {name: decode[name] for name in ("TILE", "HEAD_DIM", "DIM", "enable_fp_fusion")} | {"num_warps": 4}


def _options(
    dtype: torch.dtype, head_dim: int, group: int, block_size: int, capability: int, in_8_bits: bool, rows: int
) -> dict[str, Any]:
    return {
        "GROUP": group,
        "ROWS": rows,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "DIM": _padded(head_dim),
        "enable_fp_fusion": True,  # fuses a multiplication and an addition into one instruction
        **_shape(dtype, _padded(head_dim), rows, capability, in_8_bits),
    }


def shared_bytes(dtype: torch.dtype, options: dict[str, Any], capability: int) -> int:
    """Return the shared memory, in bytes, of a decode or prefill kernel with these options, or up to 10 KB more.

    It holds the tiles of K and V that are under way, and the one that is multiplied from there; the queries; the
    weights, unless they can stay in registers; the block numbers of the next tiles, and what warps exchange.
    """
    rows, tile, dim = options["ROWS"], options["TILE"], options["DIM"]
    in_place = rows >= 64 and dtype != torch.float32 and _multiplies_from_shared_memory(capability)
    tiles = (options["num_stages"] - 1) // 2 + in_place
    numbers = tiles * 2 * tile * dim + rows * dim + (0 if in_place else rows * tile)
    return int(numbers * dtype.itemsize + 16 * tile + 8 * rows)


def shape_problem(dtype: torch.dtype, head_dim: int, group: int, capability: int, shared_memory: int) -> str | None:
    """Return why these kernels do not support a model on a GPU of this compute capability (× 10) with this many bytes
    of shared memory per program; None if they do. `group`: query heads for each key/value head."""
    if head_dim > MAX_HEAD_DIM:
        return f"the kernels are for heads of up to {MAX_HEAD_DIM} numbers, and this model's have {head_dim}"
    shape = (dtype, head_dim, group, 1, capability, False)  # 8 bits take less
    choices = [decode_options(*shape, split=True), *(prefill_options(*shape, 2**i) for i in range(8))]
    needed = max(shared_bytes(dtype, options, capability) for options in choices)
    if needed > shared_memory:
        return (
            f"attention in {str(dtype).removeprefix('torch.')} with {group} query heads of {head_dim} numbers for each "
            f"key/value head takes {needed:,} bytes of shared memory, and this GPU has {shared_memory:,} for a program"
        )
    return None


def _multiplies_from_shared_memory(capability: int) -> bool:
    """Whether this is Hopper or data-centre Blackwell. They have over twice the shared memory of consumer chips (99
    KB)."""
    return capability // 10 in (9, 10)


def _padded(head_dim: int) -> int:
    """Return the head dimension padded for the tensor cores, which multiply powers of two."""
    return max(16, int(triton.next_power_of_2(head_dim)))


# --- Checks, and the device -----------------------------------------------------------------------


def _check(query: Tensor, paged: Paged, scale: float) -> int:
    """Return the number of query heads for each key/value head. Raises ValueError if the arguments do not fit
    together."""
    keys, values, *_, kv_scales, _, window, soft_cap, sinks = paged
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[1]
    if heads % kv_heads or keys.shape[3] != head_dim:
        raise ValueError(
            f"{heads} query heads of {head_dim} do not match {kv_heads} key/value heads of {keys.shape[3]}"
        )
    if keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError("keys and values must have the same shape and strides: views of one cache")
    if query.stride(2) != 1 or keys.stride(3) != 1:
        raise ValueError("the elements of one head must be contiguous, in queries and in the cache")
    if kv_scales is not None:
        if keys.dtype not in (torch.int8, torch.uint8) or kv_scales[0, 0].shape != keys.shape[1:3]:
            raise ValueError(f"keys in {keys.dtype} {tuple(keys.shape)} do not match scales {tuple(kv_scales.shape)}")
    elif query.dtype != keys.dtype:
        raise ValueError(f"queries in {query.dtype} do not match keys in {keys.dtype}")
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")
    if window is not None and window < 1:
        raise ValueError(f"a window must have a token or more, not {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, not {soft_cap}")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != torch.float32 or sinks.stride() != (1,)):
        raise ValueError(f"sinks must be {heads} contiguous float32, not {sinks.dtype} {tuple(sinks.shape)}")
    return heads // kv_heads


def _factors(scale: float, soft_cap: float | None) -> tuple[float, float | None]:
    """Return the kernels' `scale` and `soft_cap`, such that scores come out times log2 e. With a cap, 2 to the power of
    a product of query and key times `scale` is e^2x, x being that of the cap's tanh."""
    if soft_cap is None:
        return scale * LOG2_E.value, None
    return 2 * scale / soft_cap * LOG2_E.value, soft_cap * LOG2_E.value


def _num_sms(device: torch.device) -> int:
    if is_gpu(device):
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2  # Triton's interpreter runs programs one after another, so a short grid


def _capability(device: torch.device) -> int:
    if is_gpu(device):
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    return 80
