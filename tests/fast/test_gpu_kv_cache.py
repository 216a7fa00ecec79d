"""The Triton kernels of the KV cache do what the reference does, and touch nothing else."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from minipaged.fast.gpu import copy_blocks, poison_blocks, rope_and_write, write
from minipaged.fast.gpu.kv_cache import PIECE, TILE
from minipaged.reference import llama
from minipaged.reference.kv_cache import KVCache
from tests.effort import examples
from tests.fast.guarded import GuardedMemory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative, of one rounding
SHAPES = st.tuples(  # blocks, layers, kv heads, block size, head dim
    st.integers(1, 4),
    st.integers(1, 2),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3, 16, 256]),
    st.sampled_from([2, 32, 36, 64, 80, 256]),
)
Shape = tuple[int, int, int, int, int]


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def filled_memory(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A cache, `memory[1:-1]`, with a block before and after it, where a write outside shows. No two neighbours are
    equal, and some slots hold NaN."""
    blocks, layers, kv_heads, block_size, head_dim = shape
    memory = numbers(blocks + 2, layers, 2, kv_heads, block_size, head_dim, dtype=dtype, seed=1)
    memory[:, :, :, :, ::3] = float("nan")
    return memory


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@st.composite
def slot_lists(draw: st.DrawFn, num_slots: int) -> list[int]:
    """Slots for some tokens, padding among them, the first and the last of the pool more often than not."""
    edges = draw(st.sets(st.sampled_from([0, num_slots - 1])))
    inner = draw(st.sets(st.integers(0, num_slots - 1), max_size=3))
    return draw(st.permutations(sorted(edges | inner) + [-1] * draw(st.integers(0, 2))))


def indices(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@settings(max_examples=examples(40))
@given(
    shape=SHAPES,
    group=st.sampled_from([1, 3, 4]),
    dtype=st.sampled_from(DTYPES),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    strided=st.booleans(),
    normed=st.booleans(),
    data=st.data(),
)
def test_rope_and_write_rotates_as_the_reference_and_writes_only_the_slots(
    shape: Shape,
    group: int,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    strided: bool,
    normed: bool,
    data: st.DataObject,
) -> None:
    blocks, layers, _, block_size, _ = shape
    slots = data.draw(slot_lists(blocks * block_size))
    positions = [data.draw(st.sampled_from([0, 1, 500, 8191])) for _ in slots]
    layer = data.draw(st.integers(0, layers - 1))
    check_rope_and_write(shape, group, dtype, index_dtype, strided, slots, positions, layer, normed)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [80, 256])
def test_rope_and_write_reaches_heads_past_those_of_one_program(head_dim: int, normed: bool) -> None:
    kv_heads = 17
    assert kv_heads * head_dim // 2 > TILE
    shape, places = (2, 1, kv_heads, 4, head_dim), ([7, -1, 0], [3, 2, 9])
    check_rope_and_write(shape, 2, torch.float16, torch.int32, False, *places, 0, normed)


def check_rope_and_write(
    shape: Shape,
    group: int,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    strided: bool,
    slots: list[int],
    positions: list[int],
    layer: int,
    normed: bool,
) -> None:
    _, _, kv_heads, block_size, head_dim = shape
    heads = kv_heads * group
    n, width = len(slots), (heads + 2 * kv_heads) * head_dim
    qkv = numbers(n, width + 5 * strided, dtype=dtype, seed=2)[:, :width]
    frequencies = 10_000.0 ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    angles = torch.from_numpy(np.arange(8192, dtype=np.float32)[:, None] * frequencies)  # [positions, head_dim / 2]
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    memory = filled_memory(shape, dtype)
    cache, expected = memory[1:-1], memory.clone()
    where = (indices(positions, index_dtype), indices(slots, index_dtype))
    norms = numbers(2, head_dim, dtype=dtype, seed=6)

    with GuardedMemory():
        norm = (norms, 1e-2) if normed else ()
        query = rope_and_write(qkv, cos, sin, *where, cache[:, layer, 0], cache[:, layer, 1], heads, *norm)

    wide = qkv.double().cpu().numpy().reshape(n, heads + 2 * kv_heads, head_dim)
    if normed:
        weights = norms.double().cpu().numpy().repeat((heads, kv_heads), axis=0)  # [heads + kv_heads, head_dim]
        wide[:, : heads + kv_heads] = llama.rms_norm(wide[:, : heads + kv_heads], weights, 1e-2)
    turn = tuple(table.cpu().double().numpy()[positions][:, None] for table in (cos, sin))  # [n, 1, head_dim / 2] each
    rotated = torch.from_numpy(llama.rotate(wide[:, : heads + kv_heads], turn))  # [n, heads + kv_heads, head_dim]
    roundings = 8 if normed else 1  # two more, and of products with weights of up to 3
    tolerance = {"rtol": roundings * ROUNDING[dtype], "atol": roundings * ROUNDING[dtype]}
    torch.testing.assert_close(query.cpu().double(), rotated[:, :heads], **tolerance)
    for token, slot in enumerate(slots):
        if slot != -1:
            block, offset = divmod(slot, block_size)
            written = cache[block, layer, 0, :, offset]
            torch.testing.assert_close(written.cpu().double(), rotated[token, heads:], **tolerance)
            expected[1 + block, layer, 0, :, offset] = written  # compared above
            expected[1 + block, layer, 1, :, offset] = qkv[token].reshape(-1, head_dim)[heads + kv_heads :]
    assert same_bits(memory, expected)


def test_padding_without_a_position_reads_no_table_out_of_bounds():
    """A batch of fixed size has rows for no sequence: position -1, slot -1."""
    qkv = numbers(2, 4 * 8, dtype=torch.float32, seed=3)
    tables = torch.full((3, 4), float("nan"), device=DEVICE)  # around the one row of cos or sin that may be read
    tables[1] = 1.0
    memory = filled_memory((1, 1, 1, 4, 8), torch.float32)
    cache, before = memory[1:-1], memory.clone()
    minus_one = indices([-1, -1], torch.int32)
    query = rope_and_write(qkv, tables[1:2], tables[1:2], minus_one, minus_one, cache[:, 0, 0], cache[:, 0, 1], 2)
    assert torch.isfinite(query).all()
    assert same_bits(memory, before)


@settings(max_examples=examples(40))
@given(
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    data=st.data(),
)
def test_write_stores_what_the_reference_stores(
    shape: Shape, dtype: torch.dtype, index_dtype: torch.dtype, data: st.DataObject
) -> None:
    blocks, layers, kv_heads, block_size, head_dim = shape
    slots = data.draw(slot_lists(blocks * block_size))
    layer = data.draw(st.integers(0, layers - 1))
    kv = numbers(len(slots), 2, kv_heads, head_dim, dtype=dtype, seed=4)
    k, v = kv[:, 0], kv[:, 1]  # strided rows
    memory = filled_memory(shape, dtype)
    cache, before = memory[1:-1], memory.clone()
    reference = KVCache(layers, blocks, block_size, kv_heads, head_dim)
    reference.device_blocks[:] = cache.float().cpu().numpy().swapaxes(3, 4)
    reference.write(layer, slots, k.float().cpu().numpy(), v.float().cpu().numpy())

    write(indices(slots, index_dtype), k, v, cache[:, layer, 0], cache[:, layer, 1])

    np.testing.assert_array_equal(cache.float().cpu().numpy(), reference.device_blocks.swapaxes(3, 4))
    assert same_bits(memory[[0, -1]], before[[0, -1]])


@st.composite
def copies(draw: st.DrawFn, num_blocks: int) -> list[tuple[int, int]]:
    """Pairs of which no destination is a source or comes twice; a source may."""
    order = draw(st.permutations(range(num_blocks)))
    cut = draw(st.integers(1, num_blocks))
    sources, free = order[:cut], order[cut:]
    destinations = free[: draw(st.integers(0, len(free)))]
    return [(draw(st.sampled_from(sources)), destination) for destination in destinations]


@settings(max_examples=examples(40))
@given(
    num_blocks=st.integers(1, 6),
    block_elements=st.sampled_from([1, 3, 4, 6, 16, 500, 2048, 2049, 4099]) | st.integers(1, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.uint8]),
    offset=st.sampled_from([0, 1, 8]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    data=st.data(),
)
def test_copy_blocks_copies_every_byte_of_the_pairs_and_changes_no_other(
    num_blocks: int,
    block_elements: int,
    dtype: torch.dtype,
    offset: int,
    index_dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    """Of any block size, also where the cache does not begin at a multiple of 16 bytes."""
    pairs = data.draw(copies(num_blocks))
    size = num_blocks * block_elements * dtype.itemsize
    start = offset * dtype.itemsize
    room = start + size + PIECE * 8  # past the end: what a whole program copies
    memory = torch.randint(0, 256, (room,), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    expected = memory.clone()
    blocks = expected[start : start + size].view(num_blocks, -1)
    for source, destination in pairs:
        blocks[destination] = blocks[source]
    memory = memory.to(DEVICE)
    cache = memory[start : start + size].view(dtype).view(num_blocks, block_elements)

    copy_blocks(cache, torch.tensor(pairs, dtype=index_dtype, device=DEVICE).reshape(-1, 2))

    assert torch.equal(memory.cpu(), expected)


def test_copy_blocks_moves_all_layers_keys_and_values():
    cache = filled_memory((3, 3, 2, 4, 36), torch.float16)
    expected = cache.clone()
    expected[4], expected[1] = cache[0], cache[0]
    copy_blocks(cache, torch.tensor([[0, 4], [0, 1]], dtype=torch.int32, device=DEVICE))
    assert same_bits(cache, expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("blocks", [[], [0], [3, 1]])
def test_poison_fills_the_blocks_named_and_no_other(blocks: list[int], index_dtype: torch.dtype) -> None:
    cache = torch.zeros(4, 2, 2, 1, 3, 5, device=DEVICE)
    poison_blocks(cache, indices(blocks, index_dtype))
    for block in range(4):
        assert torch.isnan(cache[block]).all() if block in blocks else (cache[block] == 0).all()
