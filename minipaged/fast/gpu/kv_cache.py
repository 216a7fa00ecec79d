"""Writing keys and values into the paged cache, and copying blocks within it (paper, section 5.1).

The cache is one contiguous tensor [num_blocks, num_layers, 2, kv_heads, block_size, head_dim]; the 2 is keys, values.
Each block is contiguous, so copying a block copies one run of bytes. Within a layer, the keys of one head in one block
are a dense tile [block_size, head_dim], which is the unit that attention loads. A layer's keys are the strided view
`cache[:, layer, 0]` and its values `cache[:, layer, 1]`; a token's slot is `block * block_size + offset`.

    rope_and_write   once per layer: rotate the query and the key of each token, store key and value into its slot; if
                     the model has norms of queries and keys, they come first and in the same registers
    write            the same without rotation, for keys that are rotated already
    copy_blocks      copy-on-write: all pairs, all layers, keys and values in one launch (section 5.1, third kernel)
    poison_blocks    NaN into free blocks (debugging only)

With keys and values in 8 bits, a program holds whole heads: it finds the largest absolute value of each head, divides
by the scale and rounds, all in registers. The bits of absolute values, as integers, have the same order as the values,
and NaN comes after all of them, so the maximum is taken over the bits. Rounding is bit arithmetic too: it is the same
on every GPU (older ones lack floats of 8 bits) and in the interpreter (whose own conversion to them is wrong).

Memory bandwidth or the launch limits all these kernels. So they touch each byte once, in accesses of 16 bytes, and
take one launch where plain tensor code would take many. They do not check their arguments (the numbers are in the
device's memory, and reading them would stop the host until the device is done). A slot, position or block out of range
is the caller's error, and overwrites other memory.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 512
"""The elements of one half of the heads that a program rotates: with two warps, each thread loads 8 elements, which are
16 bytes in fp16."""

SMALLEST_SCALE = tl.constexpr(2.0**-126)
"""The scale of a head of zeros, so that nothing is divided by 0: the smallest normal float32."""

PIECE = 2048
"""The words of a block that a program copies: with four warps and 8-byte words, each thread has eight 16-byte loads in
flight before it stores the first."""


def rope_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
    kv_scales: Tensor | None = None,
    static_scales: Tensor | None = None,
) -> Tensor:
    """See `minipaged.fast.kernels`. Rows of `qkv` may be strided, and `head_dim` must be even. Positions and slots may
    be int64, and a negative position rotates like position 0."""
    _, num_kv_heads, block_size, head_dim = keys.shape
    query = qkv.new_empty(len(qkv), num_heads, head_dim)
    half = triton.next_power_of_2(head_dim // 2)
    heads = max(1, TILE // half)  # per program
    programs = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)  # per token
    query_norm, key_norm = (None, None) if qk_norm is None else qk_norm.unbind()  # [head_dim] each
    _rope_and_write[len(qkv), programs](
        qkv, cos, sin, positions, slots, query_norm, key_norm, query, keys, values, kv_scales, static_scales,
        qkv.stride(0), *keys.stride()[:3], eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        HEADS=heads, HALF=half, num_warps=2, enable_fp_fusion=False,  # rounded between * and +, like the reference
    )  # fmt: skip
    return query


# Index tensors are often pieces of one buffer, at addresses that change from step to step. Triton would recompile the
# kernel for each combination of those that 16 divides, and gain nothing by it: they are read one by one.
@triton.jit(do_not_specialize=["positions", "slots"])
def _rope_and_write(
    qkv, cos, sin, positions, slots, query_norm, key_norm, query, keys, values, kv_scales, static_scales,
    qkv_stride, block_stride, head_stride, slot_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One program per (token, group) rotates HEADS query heads; in the last groups, it rotates and stores HEADS key
    heads, and stores their values.

    One program per token would leave most of the GPU idle in decoding, where tokens are few.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    half_dim: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HALF)[None, :]  # [1, HALF]
    in_head = d < half_dim

    # Padding in a batch of fixed size has no position. Its result is discarded, but it must not read out of bounds.
    position = tl.maximum(tl.load(positions + token).to(tl.int64), 0)
    turn_cos = tl.load(cos + position * half_dim + d, mask=in_head, other=0.0)  # [1, HALF]
    turn_sin = tl.load(sin + position * half_dim + d, mask=in_head, other=0.0)  # [1, HALF]

    row = qkv + token * qkv_stride
    if group < query_groups:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
        mask = (head < NUM_HEADS) & in_head  # [HEADS, HALF]
        first, second = _rotated(row + head * HEAD_DIM, d, query_norm, eps, turn_cos, turn_sin, mask, half_dim)
        to = query + token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + d
        tl.store(to, first, mask=mask)
        tl.store(to + half_dim, second, mask=mask)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            head = (group - query_groups) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
            exists = head < NUM_KV_HEADS  # [HEADS, 1]
            mask = exists & in_head  # [HEADS, HALF]
            key = row + (NUM_HEADS + head) * HEAD_DIM
            first, second = _rotated(key, d, key_norm, eps, turn_cos, turn_sin, mask, half_dim)
            value = key + NUM_KV_HEADS * HEAD_DIM + d
            value_first = tl.load(value, mask=mask)
            value_second = tl.load(value + half_dim, mask=mask)
            to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + head * head_stride + d
            if kv_scales is not None:
                at = kv_scales + _scale_at(slot, head, block_stride, BLOCK_SIZE)  # [HEADS, 1]
                kind: tl.constexpr = keys.dtype.element_ty
                largest = tl.maximum(_largest(first, mask), _largest(second, mask))  # [HEADS, 1]
                scale = _scale(largest, static_scales, head, exists, kind)  # [HEADS, 1]
                tl.store(at, scale, mask=exists)
                first = _codes(first, scale, kind)
                second = _codes(second, scale, kind)
                largest = tl.maximum(_largest(value_first, mask), _largest(value_second, mask))
                scale = _scale(largest, static_scales, NUM_KV_HEADS + head, exists, kind)
                tl.store(at + NUM_KV_HEADS * BLOCK_SIZE, scale, mask=exists)
                value_first = _codes(value_first, scale, kind)
                value_second = _codes(value_second, scale, kind)
            tl.store(keys + to, first, mask=mask)
            tl.store(keys + to + half_dim, second, mask=mask)
            tl.store(values + to, value_first, mask=mask)
            tl.store(values + to + half_dim, value_second, mask=mask)


@triton.jit
def _rotated(heads, d, norm, eps, turn_cos, turn_sin, mask, half_dim: tl.constexpr):
    """Return both halves of some heads in float32, each pair (i, i + half_dim) rotated by its angle. They are rounded
    once, when stored.

    A program holds whole pairs, so a head is two tiles of half_dim, each read once: nothing has to be shuffled.
    """
    a = tl.load(heads + d, mask=mask, other=0.0)  # [HEADS, HALF]
    b = tl.load(heads + d + half_dim, mask=mask, other=0.0)  # [HEADS, HALF]
    dtype = a.dtype
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if norm is not None:  # rounded like `llama._normed`
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1))[:, None] / (2 * half_dim) + eps)  # [HEADS, 1]
        in_head = d < half_dim
        a = ((a * scale).to(dtype) * tl.load(norm + d, mask=in_head, other=0.0)).to(tl.float32)
        b = ((b * scale).to(dtype) * tl.load(norm + d + half_dim, mask=in_head, other=0.0)).to(tl.float32)
    return a * turn_cos - b * turn_sin, b * turn_cos + a * turn_sin


@triton.jit
def _scale_at(slot, head, block_stride, BLOCK_SIZE: tl.constexpr):
    """Return the offset of a slot's key scales. Blocks of scales and of codes have the same stride in bytes."""
    return slot // BLOCK_SIZE * (block_stride // 4) + head * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def _largest(x, mask):
    """Return the bits of the largest absolute value in each row of x [HEADS, n]: [HEADS, 1] int32."""
    sizes = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # [HEADS, n]
    return tl.max(tl.where(mask, sizes, 0), axis=1)[:, None]


@triton.jit
def _scale(largest, static, place, exists, kind: tl.constexpr):
    """Return the scale of heads from the bits of their largest absolute values, for codes of this type; or the static
    scale at `place`, if there are static scales."""
    most: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, most, tl.float32))
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)  # NaN is not less
    if static is not None:
        scale = tl.where(largest < 0x7F800000, tl.load(static + place, mask=exists, other=1.0), scale)
    return scale


@triton.jit
def _codes(x, scale, kind: tl.constexpr):
    """Encode x [HEADS, n] as codes, int8 or the bits of e4m3 floats, each rounded to nearest, ties to even."""
    scaled = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale, x.shape))
    if kind == tl.int8:
        scaled = tl.clamp(scaled, -128.0, 127.0)  # only a static scale lets it be larger
        codes = (scaled + 12582912.0).to(tl.int32, bitcast=True)  # the lowest bits of 1.5 * 2**23 + n are those of n
    else:
        bits = tl.clamp(scaled, -448.0, 448.0).to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Below 2**-6 the spacing is 2**-9, as from 16384 on in float32.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        # The exponent's bias is 7 instead of 127, above a fraction of 3 bits.
        other = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        codes = tl.where(size < (121 << 23), small, other) | ((bits >> 24) & 128)
    return codes.to(kind)


def write(
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_scales: Tensor | None = None,
    static_scales: Tensor | None = None,
) -> None:
    """Store the keys and values of some tokens into their slots."""
    _, num_kv_heads, block_size, head_dim = keys.shape
    dims = triton.next_power_of_2(head_dim)
    heads = max(1, TILE // dims)  # per program
    _write[len(k), triton.cdiv(num_kv_heads, heads)](
        slots, k, v, keys, values, kv_scales, static_scales, k.stride(0), v.stride(0), *keys.stride()[:3],
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, HEADS=heads, DIMS=dims, num_warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots"])
def _write(
    slots, k, v, keys, values, kv_scales, static_scales, k_stride, v_stride, block_stride, head_stride, slot_stride,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """One program per (token, group) stores HEADS key heads and their values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
        d = tl.arange(0, DIMS)[None, :]  # [1, DIMS]
        exists = head < NUM_KV_HEADS  # [HEADS, 1]
        mask = exists & (d < HEAD_DIM)  # [HEADS, DIMS]
        key = tl.load(k + token * k_stride + head * HEAD_DIM + d, mask=mask)
        value = tl.load(v + token * v_stride + head * HEAD_DIM + d, mask=mask)
        to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + head * head_stride + d
        if kv_scales is not None:
            at = kv_scales + _scale_at(slot, head, block_stride, BLOCK_SIZE)  # [HEADS, 1]
            kind: tl.constexpr = keys.dtype.element_ty
            scale = _scale(_largest(key, mask), static_scales, head, exists, kind)  # [HEADS, 1]
            tl.store(at, scale, mask=exists)
            key = _codes(key, scale, kind)
            scale = _scale(_largest(value, mask), static_scales, NUM_KV_HEADS + head, exists, kind)
            tl.store(at + NUM_KV_HEADS * BLOCK_SIZE, scale, mask=exists)
            value = _codes(value, scale, kind)
        tl.store(keys + to, key, mask=mask)
        tl.store(values + to, value, mask=mask)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """See `minipaged.fast.kernels`. All pairs are copied in one launch, at the same time."""
    blocks = cache.view(len(cache), -1)
    block_bytes = blocks.shape[1] * cache.element_size()
    words = blocks.view(_word(block_bytes | cache.data_ptr()))
    words_per_block = words.shape[1]
    piece = min(PIECE, triton.next_power_of_2(words_per_block))
    _copy_blocks[(len(pairs) * triton.cdiv(words_per_block, piece),)](
        words, pairs, WORDS=words_per_block, PIECE=piece, num_warps=4
    )


def _word(bytes_and_address: int) -> torch.dtype:
    """Return the widest integer type that divides both a block's size and the address at which the cache begins.

    If the size is an even number of 8-byte words, neighbouring words become one access of 16 bytes.
    """
    wide = (dtype for dtype in (torch.int64, torch.int32, torch.int16) if bytes_and_address % dtype.itemsize == 0)
    return next(wide, torch.uint8)


@triton.jit(do_not_specialize=["pairs"])
def _copy_blocks(words, pairs, WORDS: tl.constexpr, PIECE: tl.constexpr):
    """One program per (pair, piece) copies a piece of a block: neighbouring programs copy neighbouring pieces.

    The grid has one dimension, because its second one is limited to 65535. WORDS is fixed for a cache, so as a constant
    it costs one compilation, and the compiler sees whether blocks begin at multiples of 16 bytes.
    """
    pieces: tl.constexpr = (WORDS + PIECE - 1) // PIECE
    pair = tl.program_id(0) // pieces
    word = tl.program_id(0) % pieces * PIECE + tl.arange(0, PIECE)  # [PIECE]
    source = tl.load(pairs + 2 * pair).to(tl.int64)
    destination = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    mask = word < WORDS
    content = tl.load(words + source * WORDS + word, mask=mask)
    tl.store(words + destination * WORDS + word, content, mask=mask)


def poison_blocks(cache: Tensor, blocks: Tensor) -> None:
    """See `minipaged.fast.kernels`. For debugging, torch's kernel is enough."""
    cache.index_fill_(0, blocks.long(), float("nan"))
