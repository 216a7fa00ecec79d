"""Both caches hold the same numbers after the same calls, bit for bit, and refuse the same ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.fast import kv_cache as fast
from minipaged.fast import preemption as fast_preemption
from minipaged.reference import kv_cache as reference
from minipaged.reference import preemption as reference_preemption
from minipaged.steps import BlockMoves, CopyPair
from tests.agreement.kernels import KernelSet, every_kernel_set
from tests.effort import examples

NUMPY = {torch.float32: np.float32, torch.float16: np.float16}


class Twins:
    """A cache of each tier, given the same calls."""

    def __init__(
        self,
        kernel_set: KernelSet,
        dtype: torch.dtype,
        sizes: dict[str, int],
        kv_cache_dtype: str = "auto",
        *,
        static: bool = False,
    ) -> None:
        """`static`: scales of a checkpoint, for which some numbers are too large."""
        self.device, self.dtype = kernel_set.device, dtype
        shape = (sizes["num_layers"], 2, sizes["num_kv_heads"])
        scales = 10.0 ** -np.arange(np.prod(shape)).reshape(shape).astype("f4") if static else None
        self.reference = reference.KVCache(
            **sizes, dtype=NUMPY[dtype], kv_cache_dtype=kv_cache_dtype, static_scales=scales
        )
        self.fast = fast.KVCache(
            **sizes,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=kernel_set.device,
            kernels=kernel_set.kernels,
            static_scales=None if scales is None else self.tensor(scales),
        )
        assert self.fast.block_bytes == self.reference.block_bytes
        self.fast.host_blocks.zero_()  # on a GPU pinned memory comes as it is; a block is written before it is read

    def write(self, layer: int, slots: list[int], seed: int) -> None:
        shape = (len(slots), self.reference.num_kv_heads, self.reference.head_dim)
        rng = np.random.default_rng(seed)
        k, v = rng.standard_normal((2, *shape)) * 10.0 ** rng.integers(-4, 3, (2, *shape[:2], 1))
        k[2:3, 0] = 0  # a head of zeros
        k, v = k.astype(NUMPY[self.dtype]), v.astype(NUMPY[self.dtype])
        self.reference.write(layer, slots, k, v)
        self.fast.write(layer, torch.tensor(slots, device=self.device), self.tensor(k), self.tensor(v))

    def move(self, moves: BlockMoves) -> None:
        reference_preemption.carry(self.reference, moves)
        fast_preemption.carry(self.fast, moves)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def check_equal(self) -> None:
        every = np.arange(self.reference.num_blocks)[:, None]
        for layer in range(self.reference.num_layers):
            ours = self.fast.read(layer, self.tensor(every))
            for ours_, theirs in zip(ours, self.reference.read(layer, every), strict=True):
                np.testing.assert_array_equal(ours_.cpu().numpy(), theirs)
        if self.fast.device.type == "cuda":
            torch.cuda.synchronize()
        for ours, theirs in (
            (self.fast.device_blocks, self.reference.device_blocks),
            (self.fast.host_blocks, self.reference.host_blocks),
        ):
            numbers, scales = self.fast.parts(ours.cpu())
            expected = [theirs] if scales is None else [theirs["codes"], theirs["scales"]]
            for part, each in zip((numbers, scales), expected, strict=False):
                # The reference has the slots before the heads.
                np.testing.assert_array_equal(part.transpose(3, 4).numpy(), each)  # type: ignore[union-attr]


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    return {
        "num_layers": draw(st.integers(1, 3)),
        "num_blocks": draw(st.integers(4, 12)),
        "block_size": draw(st.sampled_from([1, 2, 5, 16, 64])),
        "num_kv_heads": draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([2, 12, 32, 40])),
        "num_swap_blocks": draw(st.integers(1, 6)),
    }


def pairs(draw: st.DrawFn, sources: list[int], destinations: list[int]) -> list[CopyPair]:
    """Some pairs, no destination twice."""
    chosen = draw(st.lists(st.sampled_from(destinations), unique=True, max_size=4)) if destinations else []
    return [(draw(st.sampled_from(sources)), destination) for destination in chosen] if sources else []


@every_kernel_set
@given(data=st.data())
@settings(max_examples=examples(25))
def test_any_calls_leave_the_same_content(kernel_set: KernelSet, data: st.DataObject) -> None:
    """Writes with padding, then swapping out, poisoning, swapping in and copying in one batch; again and again."""
    size = data.draw(sizes())
    kind = data.draw(st.sampled_from(["auto", "int8", "fp8"]))
    static = kind != "auto" and data.draw(st.booleans())
    twins = Twins(kernel_set, data.draw(st.sampled_from([torch.float32, torch.float16])), size, kind, static=static)
    device, host = list(range(size["num_blocks"])), list(range(size["num_swap_blocks"]))
    for round_ in range(3):
        slots = data.draw(st.lists(st.integers(-1, size["num_blocks"] * size["block_size"] - 1), max_size=20))
        slots = list(dict.fromkeys(slots)) + [-1] * data.draw(st.integers(0, 2))  # -1 may come more than once
        twins.write(data.draw(st.integers(0, size["num_layers"] - 1)), slots, seed=round_)
        cut = data.draw(st.integers(1, len(device) - 1))
        twins.move(
            BlockMoves(
                swap_out=pairs(data.draw, device, host),
                poison=data.draw(st.lists(st.sampled_from(device), unique=True, max_size=3)),
                swap_in=pairs(data.draw, host, device),
                copy=pairs(data.draw, device[:cut], device[cut:]),
            )
        )
        twins.check_equal()


@every_kernel_set
def test_the_edges_of_the_pool_are_written_and_nothing_else(kernel_set: KernelSet) -> None:
    size = {"num_layers": 2, "num_blocks": 3, "block_size": 5, "num_kv_heads": 2, "head_dim": 12}
    twins = Twins(kernel_set, torch.float32, size | {"num_swap_blocks": 2})
    twins.write(1, [0, 14], seed=0)
    twins.check_equal()
    assert torch.count_nonzero(twins.fast.device_blocks).item() == 2 * 2 * 2 * 12


@every_kernel_set
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@given(data=st.data())
@settings(max_examples=examples(8))
def test_keys_are_rotated_first_and_then_rounded_once_as_the_reference_rounds(
    kernel_set: KernelSet, kv_cache_dtype: str, data: st.DataObject
) -> None:
    """What the same kernel writes without rounding is what the reference is given to round."""
    size = {"num_layers": 2, "num_blocks": 3, "block_size": 4, "num_swap_blocks": 1} | {
        "num_kv_heads": data.draw(st.integers(1, 3)),
        "head_dim": data.draw(st.sampled_from([2, 12, 64, 80])),
    }
    heads, (kv_heads, head_dim) = 4 * size["num_kv_heads"], (size["num_kv_heads"], size["head_dim"])
    slots = data.draw(st.permutations([0, 3, 5, 11, -1, -1]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    normed, static = data.draw(st.booleans()), data.draw(st.booleans())
    shape = (len(slots), heads + 2 * kv_heads, head_dim)
    # Norms add up squares. Small whole numbers have exact sums, whatever order each of the two kernels adds them in.
    qkv = rng.integers(-400, 401, shape) * 2.0**-9 if normed else rng.standard_normal(shape)
    qkv *= (2.0 if normed else 10.0) ** rng.integers(-3, 3, (6, 1, 1))
    turns = rng.standard_normal((2, len(slots), head_dim // 2)).astype(np.float32)  # of any size: nothing is checked
    exact = Twins(kernel_set, torch.float32, size)
    rounded = Twins(kernel_set, torch.float32, size, kv_cache_dtype, static=static)
    queries = []
    for twins in (exact, rounded):
        given_ = torch.from_numpy(qkv.astype(np.float32)).view(len(slots), (heads + 2 * kv_heads) * head_dim)
        places = torch.stack([torch.arange(len(slots)), torch.tensor(slots)]).int().to(twins.device)
        norm = torch.linspace(0.5, 2, 2 * head_dim).view(2, head_dim).to(twins.device) if normed else None
        tables = (twins.tensor(turns[0]), twins.tensor(turns[1]), places[0], places[1])
        where = (*twins.fast.layer(1), heads, norm, 1e-5, twins.fast.scales(1), twins.fast.static(1))
        queries.append(kernel_set.kernels.rope_and_write(given_.to(twins.device), *tables, *where))
    assert torch.equal(*queries)
    k, v = (each.cpu().numpy() for each in exact.fast.read(1, torch.arange(3, device=exact.device)[None]))
    real = [slot for slot in slots if slot >= 0]
    rounded.reference.write(1, real, k[0, real], v[0, real])
    rounded.check_equal()


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # the interpreter computes with NumPy
@every_kernel_set
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_head_that_is_no_number_stays_none_and_no_other_suffers(
    kernel_set: KernelSet, kv_cache_dtype: str, static: bool
) -> None:
    size = {"num_layers": 1, "num_blocks": 2, "block_size": 4, "num_kv_heads": 2, "head_dim": 12}
    twins = Twins(kernel_set, torch.float32, size, kv_cache_dtype, static=static)
    k = np.full((3, 2, 12), 0.015625, np.float32)
    k[1, 0, 5], k[2, 1, 0] = np.nan, np.inf
    v = np.full_like(k, 0.015625)
    twins.reference.write(0, [0, 1, 2], k, v)
    twins.fast.write(0, torch.tensor([0, 1, 2], device=twins.device), twins.tensor(k), twins.tensor(v))
    theirs = twins.reference.read(0, np.array([[0]]))
    ours = twins.fast.read(0, torch.tensor([[0]], device=twins.device))
    for keys, values in (theirs, [each.cpu().numpy() for each in ours]):
        assert np.isnan(keys[0, 1, 0]).all()
        assert not np.isfinite(keys[0, 2, 1]).any()
        assert np.isfinite(keys[0, [0, 1, 2], [0, 1, 0]]).all()
        assert np.isfinite(values[0, :3]).all()
        if not static:
            np.testing.assert_allclose(keys[0, [0, 1, 2], [0, 1, 0]], 0.015625, rtol=1e-6)


def test_in_8_bits_heads_have_an_even_size() -> None:
    with pytest.raises(ValueError, match="head_dim is 5; in 8 bits it must be even"):
        fast.KVCache(1, 1, 1, 1, 5, kv_cache_dtype="int8")


CALLS: dict[str, Any] = {
    "a slot past the pool": lambda cache, array: cache.write(0, array([6]), *[array(np.zeros((1, 1, 4), "f4"))] * 2),
    "a slot before the pool": lambda cache, array: cache.write(0, array([-2]), *[array(np.zeros((1, 1, 4), "f4"))] * 2),
    "no such layer": lambda cache, array: cache.write(1, array([0]), *[array(np.zeros((1, 1, 4), "f4"))] * 2),
    "keys of another shape": lambda cache, array: cache.write(0, array([0]), *[array(np.zeros((2, 1, 4), "f4"))] * 2),
    "a block copied onto a source": lambda cache, array: cache.copy([(0, 1), (1, 2)]),
    "two blocks copied to one place": lambda cache, array: cache.copy([(0, 2), (1, 2)]),
    "copying a block outside": lambda cache, array: cache.copy([(3, 0)]),
    "swapping to a host block outside": lambda cache, array: cache.swap_out([(0, 1)]),
    "swapping from a host block outside": lambda cache, array: cache.swap_in([(1, 0)]),
    "swapping two to one place": lambda cache, array: cache.swap_in([(0, 1), (0, 1)]),
    "poisoning a block outside": lambda cache, array: cache.poison([-1]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@every_kernel_set
def test_both_refuse_the_same_calls_and_change_nothing(kernel_set: KernelSet, call: Any) -> None:
    size = {"num_layers": 1, "num_blocks": 3, "block_size": 2, "num_kv_heads": 1, "head_dim": 4, "num_swap_blocks": 1}
    twins = Twins(kernel_set, torch.float32, size)
    twins.write(0, [0, 1, 2, 3, 4, 5], seed=0)
    with pytest.raises((IndexError, ValueError)) as theirs:
        call(twins.reference, np.asarray)
    with pytest.raises((IndexError, ValueError)) as ours:
        call(twins.fast, lambda values: twins.tensor(np.asarray(values)))
    assert ours.type is theirs.type
    assert str(ours.value) == str(theirs.value)
    twins.check_equal()


@pytest.mark.parametrize("name", ["num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"])
def test_both_refuse_the_same_sizes(name: str) -> None:
    size = dict.fromkeys(["num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"], 2) | {name: 0}
    for cache in (reference.KVCache, fast.KVCache):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be 1 or more"):
            cache(**size)
