"""The KV cache keeps what was written where it was written, and refuses what would go elsewhere."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.models.quantized.stored import e4m3_values
from minipaged.reference.eight_bits import LARGEST, dequantize, quantize
from minipaged.reference.kv_cache import Array, KVCache


@st.composite
def caches(draw: st.DrawFn, min_blocks: int = 1, min_swap_blocks: int = 0) -> KVCache:
    """A small cache of any shape, filled with numbers that are all different."""
    cache = KVCache(
        num_layers=draw(st.integers(1, 3)),
        num_blocks=draw(st.integers(min_blocks, 6)),
        block_size=draw(st.sampled_from([1, 2, 3, 16, 256])),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([2, 5])),
        num_swap_blocks=draw(st.integers(min_swap_blocks, 5)),
        dtype=draw(st.sampled_from([np.float32, np.float64])),
    )
    for pool, first in ((cache.device_blocks, 1), (cache.host_blocks, 1_000_000)):
        pool[:] = np.arange(first, first + pool.size).reshape(pool.shape)
    return cache


def tokens(cache: KVCache, n: int, first: int = -1) -> Array:
    """Keys or values of n tokens, unlike anything `caches` fills in."""
    return -np.arange(-first, n * cache.num_kv_heads * cache.head_dim - first, dtype=cache.dtype).reshape(
        n, cache.num_kv_heads, cache.head_dim
    )


def everything(cache: KVCache) -> bytes:
    return cache.device_blocks.tobytes() + cache.host_blocks.tobytes()


@given(cache=caches(), data=st.data())
def test_what_is_written_into_slots_is_read_through_their_blocks_and_nothing_else_changes(
    cache: KVCache, data: st.DataObject
) -> None:
    num_slots = cache.num_blocks * cache.block_size
    slots = data.draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=20))
    padded = data.draw(st.permutations(slots + [-1] * data.draw(st.integers(0, 3))))
    layer = data.draw(st.integers(0, cache.num_layers - 1))
    k, v = tokens(cache, len(padded)), tokens(cache, len(padded), first=-10_000)
    expected = cache.device_blocks.copy()
    for slot, one_k, one_v in zip(padded, k, v, strict=True):
        if slot != -1:
            expected[slot // cache.block_size, layer, 0, slot % cache.block_size] = one_k
            expected[slot // cache.block_size, layer, 1, slot % cache.block_size] = one_v

    cache.write(layer, padded, k, v)

    np.testing.assert_array_equal(cache.device_blocks, expected)
    tables = np.arange(cache.num_blocks)[None, ::-1]  # one sequence that holds every block, backwards
    keys, values = cache.read(layer, tables)
    for slot, one_k, one_v in zip(padded, k, v, strict=True):
        if slot != -1:
            position = (cache.num_blocks - 1 - slot // cache.block_size) * cache.block_size + slot % cache.block_size
            np.testing.assert_array_equal(keys[0, position], one_k)
            np.testing.assert_array_equal(values[0, position], one_v)


@given(cache=caches(), data=st.data())
def test_a_slot_outside_the_cache_is_refused_and_nothing_is_written(cache: KVCache, data: st.DataObject) -> None:
    num_slots = cache.num_blocks * cache.block_size
    wrong = data.draw(st.integers(num_slots, num_slots + 3) | st.integers(-num_slots - 3, -2))
    slots = [*data.draw(st.lists(st.integers(-1, num_slots - 1), max_size=4)), wrong]
    before = everything(cache)
    with pytest.raises(IndexError, match=f"slot {wrong} is outside"):
        cache.write(0, slots, tokens(cache, len(slots)), tokens(cache, len(slots)))
    assert everything(cache) == before


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_outside_the_cache_is_refused(layer: int) -> None:
    cache = KVCache(2, 2, 4, 1, 2)
    with pytest.raises(IndexError, match=f"layer {layer}"):
        cache.write(layer, [0], tokens(cache, 1), tokens(cache, 1))
    with pytest.raises(IndexError, match=f"layer {layer}"):
        cache.read(layer, np.array([[0]]))


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 2), (2, 1, 1), (3, 1, 2)])
def test_keys_that_numpy_would_stretch_to_fit_are_refused(shape: tuple[int, ...]) -> None:
    cache = KVCache(1, 2, 4, 1, 2)
    right = np.ones((2, 1, 2), np.float32)
    for k, v in ((np.ones(shape, np.float32), right), (right, np.ones(shape, np.float32))):
        with pytest.raises(ValueError, match="need keys and values"):
            cache.write(0, [0, 1], k, v)
    assert not cache.device_blocks.any()


@given(cache=caches(min_blocks=2), data=st.data())
def test_copying_gives_each_destination_its_sources_content_in_every_layer(cache: KVCache, data: st.DataObject) -> None:
    destinations = data.draw(st.lists(st.integers(0, cache.num_blocks - 1), unique=True, max_size=cache.num_blocks - 1))
    others = sorted(set(range(cache.num_blocks)) - set(destinations))
    pairs = [(data.draw(st.sampled_from(others)), destination) for destination in destinations]
    expected = cache.device_blocks.copy()
    for source, destination in pairs:
        expected[destination] = expected[source]
    cache.copy(pairs)
    np.testing.assert_array_equal(cache.device_blocks, expected)


@given(cache=caches(min_swap_blocks=1), data=st.data())
def test_blocks_swapped_out_and_in_again_elsewhere_hold_what_they_held(cache: KVCache, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, min(cache.num_blocks, cache.num_swap_blocks)))
    device = data.draw(st.permutations(range(cache.num_blocks)))[:n]
    host = data.draw(st.permutations(range(cache.num_swap_blocks)))[:n]
    back = data.draw(st.permutations(range(cache.num_blocks)))[:n]
    before, host_before = cache.device_blocks.copy(), cache.host_blocks.copy()

    cache.swap_out(list(zip(device, host, strict=True)))
    cache.poison(range(cache.num_blocks))
    assert np.isnan(cache.device_blocks).all()
    cache.swap_in(list(zip(host, back, strict=True)))

    np.testing.assert_array_equal(cache.device_blocks[back], before[device])
    assert np.isnan(cache.device_blocks[sorted(set(range(cache.num_blocks)) - set(back))]).all()
    untouched = sorted(set(range(cache.num_swap_blocks)) - set(host))
    np.testing.assert_array_equal(cache.host_blocks[untouched], host_before[untouched])


@given(cache=caches(), data=st.data())
def test_poison_fills_exactly_the_blocks_named(cache: KVCache, data: st.DataObject) -> None:
    blocks = data.draw(st.lists(st.integers(0, cache.num_blocks - 1)))
    before = cache.device_blocks.copy()
    cache.poison(blocks)
    for block in range(cache.num_blocks):
        if block in blocks:
            assert np.isnan(cache.device_blocks[block]).all()
        else:
            np.testing.assert_array_equal(cache.device_blocks[block], before[block])


@given(cache=caches(min_blocks=3, min_swap_blocks=3), data=st.data())
def test_a_move_with_a_block_outside_its_pool_is_refused_and_moves_nothing(cache: KVCache, data: st.DataObject) -> None:
    operation = data.draw(st.sampled_from(["copy", "swap_out", "swap_in", "poison"]))
    wrong_side = data.draw(st.integers(0, 1))
    side_is_host = (operation, wrong_side) in {("swap_out", 1), ("swap_in", 0)}
    size = cache.num_swap_blocks if side_is_host else cache.num_blocks
    wrong = data.draw(st.sampled_from([-1, -size, size, size + 7]))
    before = everything(cache)
    bad_pair = (wrong, 2) if wrong_side == 0 else (1, wrong)
    argument = [0, wrong] if operation == "poison" else [(1, 0), bad_pair]
    with pytest.raises(IndexError, match=f"block {wrong} is outside the {'host' if side_is_host else 'device'} pool"):
        getattr(cache, operation)(argument)
    assert everything(cache) == before


def test_a_copy_whose_result_would_depend_on_the_order_is_refused() -> None:
    cache = KVCache(1, 4, 2, 1, 2, num_swap_blocks=4)
    cache.device_blocks[:] = np.arange(cache.device_blocks.size).reshape(cache.device_blocks.shape)
    before = everything(cache)
    with pytest.raises(ValueError, match="block 1 is both copied from and copied to"):
        cache.copy([(0, 1), (1, 2)])
    for operation in (cache.copy, cache.swap_out, cache.swap_in):
        with pytest.raises(ValueError, match="to the same place"):
            operation([(0, 2), (1, 2)])
    assert everything(cache) == before


def test_a_pool_of_gigabytes_takes_no_memory_until_blocks_are_written() -> None:
    before = psutil.Process().memory_info().rss
    cache = KVCache(30, 3000, 16, 3, 64, num_swap_blocks=500)  # 2.6 GB
    cache.write(0, [3000 * 16 - 1], tokens(KVCache(1, 1, 1, 3, 64), 1), tokens(KVCache(1, 1, 1, 3, 64), 1))
    assert psutil.Process().memory_info().rss - before < 100e6


def test_a_block_of_smollm2_takes_46080_bytes_a_token() -> None:
    cache = KVCache(30, 1, 16, 3, 64)
    assert cache.block_bytes == cache.device_blocks[0].nbytes == 46_080 * 16
    assert cache.device_blocks[0].flags.c_contiguous, "all that belongs to a block is one piece of memory"


@pytest.mark.parametrize("argument", ["num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"])
def test_a_size_below_one_is_refused_by_name(argument: str) -> None:
    sizes = {"num_layers": 1, "num_blocks": 1, "block_size": 1, "num_kv_heads": 1, "head_dim": 1, argument: 0}
    with pytest.raises(ValueError, match=f"{argument} is 0"):
        KVCache(**sizes)
    with pytest.raises(ValueError, match="num_swap_blocks is -1"):
        KVCache(1, 1, 1, 1, 1, num_swap_blocks=-1)


# --- 8 bits ---------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", ["int8", "fp8"])


def heads(seed: int, *shape: int) -> Array:
    """Keys or values of heads that are large and small, a few of them zeros."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-6, 4, (*shape[:-1], 1)) * (rng.random((*shape[:-1], 1)) > 0.1)
    return (rng.standard_normal(shape) * sizes).astype(np.float32)


@KINDS
@given(seed=st.integers(0, 2**32), head_dim=st.integers(1, 40))
def test_a_code_is_the_nearest_one_and_the_largest_number_keeps_its_size(kind: str, seed: int, head_dim: int) -> None:
    x = heads(seed, 20, head_dim)
    codes, scales = quantize(x, kind)
    assert (codes.dtype, scales.dtype) == (np.int8 if kind == "int8" else np.uint8, np.float32)
    stands_for = np.arange(-127, 128) if kind == "int8" else np.delete(e4m3_values(), [0x7F, 0xFF])
    with np.errstate(over="ignore"):
        nearest = np.abs(x[..., None] - stands_for * scales[:, None, None].astype(np.float64)).min(axis=-1)
    error = np.abs(x - dequantize(codes, scales).astype(np.float64))
    largest = np.abs(x).max(axis=-1)
    assert (error <= nearest + 1e-6 * largest[:, None]).all()
    np.testing.assert_allclose(np.abs(dequantize(codes, scales)).max(axis=-1), largest, rtol=1e-6)


@KINDS
def test_rounding_takes_the_even_one_of_two_that_are_as_near(kind: str) -> None:
    most = LARGEST[kind]
    x = {"int8": [most, 0.5, 1.5, -2.5, -3.5], "fp8": [most, 17, 19, -(2.0**-10), 3 * 2.0**-10]}[kind]
    expected = {"int8": [most, 0, 2, -2, -4], "fp8": [most, 16, 20, -0.0, 2.0**-8]}[kind]
    codes, scales = quantize(np.array([x], np.float32), kind)
    assert scales == [1]
    found = dequantize(codes, scales)[0]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    np.testing.assert_array_equal(np.signbit(found[1:4]), [False, False, True])


@KINDS
@given(seed=st.integers(0, 2**32), data=st.data())
def test_what_is_appended_changes_nothing_that_is_there_and_scales_go_where_their_block_goes(
    kind: str, seed: int, data: st.DataObject
) -> None:
    cache = KVCache(2, 4, 3, 2, 6, num_swap_blocks=2, kv_cache_dtype=kind)
    k, v = heads(seed, 2, 6, 2, 6)
    number = data.draw(st.integers(1, 3))
    cache.write(1, list(range(number)), k[:number], v[:number])
    before = cache.read(1, np.array([[0]]))
    cache.write(1, list(range(number, 6)), k[number:], v[number:])
    for each, then in zip(cache.read(1, np.array([[0]])), before, strict=True):
        np.testing.assert_array_equal(each[0, :number], then[0, :number])
    whole = cache.read(1, np.array([[0, 1]]))
    for each, given_ in zip(whole, (k, v), strict=True):  # as if each token had been written alone
        codes_and_scales = [quantize(token, kind) for token in given_]
        np.testing.assert_array_equal(each[0], [dequantize(*one) for one in codes_and_scales])
    cache.swap_out([(0, 1)])
    cache.copy([(1, 2)])
    cache.poison([0, 1])
    cache.swap_in([(1, 3)])
    for each, then in zip(cache.read(1, np.array([[3, 2]])), whole, strict=True):
        np.testing.assert_array_equal(each, then)
    assert all(np.isnan(each).all() for each in cache.read(1, np.array([[0, 1]])))


@KINDS
def test_in_8_bits_a_token_of_smollm2_takes_12240_bytes_in_one_piece(kind: str) -> None:
    cache = KVCache(30, 1, 16, 3, 64, kv_cache_dtype=kind)
    assert cache.block_bytes == cache.device_blocks.nbytes == 12_240 * 16
    assert 46_080 / 12_240 > 3.7
