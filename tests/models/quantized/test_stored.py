"""The arithmetic under the formats: streams of bits, rounding, floats of 8 bits, and inputs that are quantized."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.errors import ModelError
from minipaged.fast import kernels_for, linear
from minipaged.fast import llama as fast
from minipaged.fast.linear import QuantizingLinear, expanded
from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.models.quantized.stored import (
    Activations,
    Codebook4,
    Float8,
    Grouped,
    StoredMatrix,
    as_floats,
    can_stack,
    e4m3_values,
    pack,
    round_to,
    round_to_e4m3,
    stack,
    unpack,
)
from minipaged.reference import linear as reference
from tests.effort import examples
from tests.models.quantized.samples import CONFIG

FLOAT8 = torch.float8_e4m3fn


@given(bits=st.integers(2, 8), rows=st.integers(0, 4), count=st.integers(1, 40), seed=st.integers(0, 1000))
def test_codes_come_back_as_they_were_packed(bits: int, rows: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, count), dtype=np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (rows, -(-bits * count // 8))
    for row, stream in zip(codes, packed, strict=True):
        assert int.from_bytes(stream.tobytes(), "little") == sum(int(code) << bits * i for i, code in enumerate(row))
    np.testing.assert_array_equal(unpack(packed, bits, count), codes)
    np.testing.assert_array_equal(as_floats(packed, bits, count), codes.astype(np.float32))


def every_float32(seed: int) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 2**32, 100_000, dtype=np.uint32)
    edges = np.array([0, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F808000, 0x3F818000, 0x7F7FFFFF], np.uint32)
    return np.concatenate((bits, edges)).view(np.float32)


@pytest.mark.parametrize("rounding", ["float32", "float16", "bfloat16"])
def test_numbers_are_rounded_as_torch_rounds_them(rounding: str) -> None:
    values = every_float32(0)
    expected = torch.from_numpy(values).to(getattr(torch, rounding)).float().numpy()
    np.testing.assert_array_equal(round_to(values, rounding), expected)  # type: ignore[arg-type]


def test_each_float_of_8_bits_means_what_it_means_to_torch() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float().numpy()
    np.testing.assert_array_equal(e4m3_values(), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_are_rounded_to_8_bits_as_torch_rounds_them(dtype: type) -> None:
    near = np.random.default_rng(0).standard_normal(100_000).astype(np.float32) * np.exp2(np.arange(-14, 11)).repeat(
        4000
    )
    halfway = (e4m3_values()[:126] + e4m3_values()[1:127]) / 2
    values = np.concatenate((near.astype(np.float32), halfway, -halfway, e4m3_values()[:127])).astype(dtype)
    clipped = torch.from_numpy(values).float().clamp(-448, 448)
    np.testing.assert_array_equal(round_to_e4m3(values), clipped.to(FLOAT8).to(torch.float64).numpy())


KINDS = [
    Activations("int8"),
    Activations("int8", symmetric=False),
    Activations("int8", scale=0.01),
    Activations("int8", symmetric=False, scale=0.02, zero=-17),
    Activations("float8"),
    Activations("float8", group_size=16),
    Activations("float8", scale=0.005),
]


class Same:
    """A matrix that changes nothing."""

    nbytes = 0

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return ids

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("how", KINDS, ids=str)
@given(
    tokens=st.integers(0, 4),
    inputs=st.integers(1, 50),
    seed=st.integers(0, 1000),
    size=st.sampled_from([0, 1e-3, 1, 9]),
)
def test_an_input_becomes_the_nearest_that_has_a_code(
    how: Activations, tokens: int, inputs: int, seed: int, size: float
) -> None:
    """Within half a step of its group's; and both tiers take the same one."""
    x = (size * np.random.default_rng(seed).standard_normal((tokens, inputs))).astype(np.float32)
    found = how.applied(x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found[-1:], how.applied(x[-1:]))  # each token for itself
    np.testing.assert_array_equal(QuantizingLinear(Same(), how)(torch.from_numpy(x)).numpy(), found)
    for row, given_back in zip(x, found, strict=True):
        for first in range(0, inputs, how.group_size or inputs):
            group = slice(first, first + (how.group_size or inputs))
            check_nearest(how, row[group].astype(np.float64), given_back[group].astype(np.float64))


def check_nearest(how: Activations, x: np.ndarray, found: np.ndarray) -> None:
    low, high = min(x.min(), 0), max(x.max(), 0)
    largest, smallest = max(-low, high), float(np.finfo(np.float32).eps)
    if how.kind == "float8":
        scale = how.scale or max(largest / 448, smallest)
        x = np.clip(x, -448 * scale, 448 * scale)
        allowed = np.maximum(np.abs(x) / 16, scale / 1024)  # 3 bits of fraction; the smallest float is 2 ** -9
    elif how.scale is not None:
        x = np.clip(x, (-128 - how.zero) * how.scale, (127 - how.zero) * how.scale)
        allowed = np.full_like(x, how.scale / 2)
    elif how.symmetric:
        allowed = np.full_like(x, max(largest / 127.5, smallest) / 2)
    else:  # 0 is moved to the nearest code, and the ends of the range with it
        allowed = np.full_like(x, max((high - low) / 255, smallest))
    assert (np.abs(found - x) <= 1.001 * allowed).all()


def random_grouped(shape: tuple[int, int], activations: Activations | None = None) -> Grouped:
    r = np.random.default_rng(0)
    return Grouped(
        shape=shape,
        rounding="float16",
        activations=activations,
        bits=4,
        codes=pack(r.integers(0, 16, shape, dtype=np.uint8), 4),
        scales=r.uniform(0.01, 0.02, (shape[0], shape[1] // 8)).astype(np.float16),
        zeros=8,
        group_size=8,
    )


@pytest.mark.parametrize("activations", [None, Activations("int8"), Activations("float8", group_size=16)])
@pytest.mark.parametrize("tile", [1, 100, 2**18])
def test_a_product_takes_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tile: int, activations: Activations | None
) -> None:
    matrix = random_grouped((37, 32), activations)
    x = np.random.default_rng(1).standard_normal((5, 32)).astype(np.float32)
    monkeypatch.setattr(reference, "TILE", tile)
    inputs = x if activations is None else activations.applied(x)
    np.testing.assert_allclose(reference.linear(x, matrix), inputs @ matrix.rows().T, rtol=1e-5, atol=1e-5)
    if activations is not None:
        assert np.abs(reference.linear(x, matrix) - x @ matrix.rows().T).max() > 1e-4
    wide = reference.linear(x.astype(np.float64), matrix)
    assert wide.dtype == np.float64


def test_the_fast_tier_takes_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_grouped((37, 32))
    monkeypatch.setattr(linear, "EXPANDED", 100)
    found = expanded(matrix, torch.device("cpu"), torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.from_numpy(matrix.rows()).bfloat16())


def test_a_product_never_holds_the_matrix_in_floats() -> None:
    """8192 x 8192 of 4 bits are 34 MB and would be 268 MB in float32."""
    matrix = random_grouped((8192, 64))
    codes = np.broadcast_to(matrix.codes[:, :1], (8192, 4096))
    scales = np.broadcast_to(matrix.scales[:, :1], (8192, 1024))
    large = dataclasses.replace(matrix, shape=(8192, 8192), codes=codes, scales=scales)
    x = np.ones((1, 8192), np.float32)
    tracemalloc.start()
    reference.linear(x, large)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


def test_matrices_that_become_one_keep_their_own_way_to_round_inputs() -> None:
    """q, k and v are one product, unless the checkpoint rounds the inputs of each by another scale."""
    config = ModelConfig.from_dict(CONFIG | {"num_hidden_layers": 1})
    kinds = {"q_proj": Activations("int8", scale=0.03), "k_proj": Activations("int8", scale=0.3), "v_proj": None}
    weights: dict[str, Any] = {}
    for name, shape in weight_shapes(config).items():
        part = name.split(".")[-2]
        how = kinds.get(part, Activations("float8"))
        dense = torch.ones(shape)
        packed = len(shape) == 2 and dataclasses.replace(random_grouped((shape[0], shape[1]), how), rounding="float32")
        weights[name] = packed if "layers" in name and packed else dense
    x = np.random.default_rng(2).standard_normal((3, 128)).astype(np.float32)
    attention = "model.layers.0.self_attn"
    expected = [reference.linear(x, weights[f"{attention}.{part}.weight"]) for part in kinds]
    layer = fast.Weights.of(config, weights, kernels_for(torch.device("cpu"))).layers[0]
    found = layer.qkv(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, np.concatenate(expected, axis=1), rtol=1e-4, atol=1e-4)
    assert found.shape == (3, 256)


def forms(rows: int, seed: int) -> list[StoredMatrix]:
    """One matrix [rows, 32] of each form that can be one of a stack."""
    r = np.random.default_rng(seed)
    codes, scales = r.integers(0, 127, (rows, 32), dtype=np.uint8), r.uniform(0.1, 1, (rows, 4)).astype(np.float32)
    whole: dict[str, Any] = {"shape": (rows, 32), "rounding": "float32"}
    grouped: dict[str, Any] = whole | {"bits": 4, "codes": codes[:, :16], "scales": scales, "zeros": 8, "group_size": 8}
    zeros = r.integers(0, 16, (rows, 4), dtype=np.uint8)
    order = np.arange(32, dtype=np.int32) % 4
    small, supers = zeros, scales[:, :2].astype(np.float16)
    return [
        Grouped(**grouped),
        Grouped(**grouped | {"zeros": zeros}),
        Grouped(**grouped | {"minima": scales}),
        Grouped(**grouped | {"group_index": order}),
        Grouped(**grouped | {"scales": small, "minima": small, "super_scales": supers, "super_minima": supers}),
        Float8(**whole, codes=codes, scales=scales[:1, :1], block=(rows, 32)),
        Float8(**whole, codes=codes, scales=scales[: -(-rows // 3), :3], block=(3, 12)),
        Codebook4(**whole, codes=codes[:, :16], table=np.arange(16, dtype=np.float32), scales=scales, group_size=8),
    ]


@pytest.mark.parametrize("form", range(8))
def test_matrices_packed_alike_become_one(form: int) -> None:
    parts = [forms(rows, seed=rows)[form] for rows in (3, 5, 8)]
    assert can_stack(parts)
    stacked = stack(parts)
    assert stacked.shape == (16, 32)
    np.testing.assert_array_equal(stacked.rows(), np.concatenate([part.rows() for part in parts]))
    some = np.array([15, 0, 4])
    np.testing.assert_array_equal(stacked.rows(some), stacked.rows()[some])
    assert stack(parts[:1]) is parts[0]


FORMS = ["grouped", "act-order", "super", "float8", "codebook"]


@st.composite
def large_forms(draw: st.DrawFn, form: str) -> StoredMatrix:
    """A matrix [6, 96] of one of FORMS, of which columns can be cut out, in groups of 96, 64 (and 32), 32 or 16."""
    r = np.random.default_rng(draw(st.integers(0, 1000)))
    size, bits = draw(st.sampled_from([96, 64, 32, 16])), draw(st.sampled_from([2, 3, 4, 5, 6, 8]))
    codes, groups = r.integers(0, 2**bits, (6, 96), dtype=np.uint8), -(-96 // size)
    scales = r.uniform(0.1, 1, (6, groups)).astype(np.float32)
    whole: dict[str, Any] = {"shape": (6, 96), "rounding": draw(st.sampled_from(["float32", "float16", "bfloat16"]))}
    if form == "float8":
        codes, block = r.integers(0, 127, (6, 96), dtype=np.uint8), (draw(st.sampled_from([1, 2, 4, 6])), size)
        return Float8(**whole, codes=codes, scales=scales[: -(-6 // block[0])], block=block)
    if form == "codebook":
        size = 32 if size == 64 else size  # whole groups only
        scales = r.uniform(0.1, 1, (6, 96 // size)).astype(np.float32)
        table = r.standard_normal(16).astype(np.float32)
        return Codebook4(**whole, codes=pack(codes & 15, 4), table=table, scales=scales, group_size=size)
    zeros: Any = draw(st.sampled_from([2 ** (bits - 1), r.integers(0, 2**bits, scales.shape, dtype=np.uint8)]))
    parts: dict[str, Any] = {"bits": bits, "codes": pack(codes, bits), "zeros": zeros, "group_size": size}
    parts |= {"scales": scales, "minima": draw(st.sampled_from([None, -scales]))}
    if form == "act-order":
        parts["group_index"] = r.integers(0, groups, 96).astype(np.int32)
    if form == "super":
        few = r.uniform(0.1, 1, (6, 1)).astype(np.float16)
        parts |= {"scales": (scales * 60).astype(np.uint8), "super_scales": few}
        parts |= {} if parts["minima"] is None else {"minima": parts["scales"], "super_minima": few}
    return Grouped(**whole, **parts)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(300))
@given(data=st.data())
def test_what_is_cut_out_of_a_packed_matrix_are_its_weights(form: str, data: st.DataObject) -> None:
    """To the last bit, and packed as densely."""
    matrix = data.draw(large_forms(form))
    rows, columns = (
        slice(*sorted(data.draw(st.lists(which, min_size=2, max_size=2, unique=True))))
        for which in (st.integers(0, 6), st.integers(0, 12).map((8).__mul__))
    )
    whole, found = matrix.rows(), matrix[rows, columns]
    assert found.shape == whole[rows, columns].shape
    np.testing.assert_array_equal(found.rows(), whole[rows, columns])
    np.testing.assert_array_equal(matrix[rows,].rows(), whole[rows])
    np.testing.assert_array_equal(found[:1, :8].rows(), whole[rows, columns][:1, :8])
    assert found.codes.size / found.rows().size == matrix.codes.size / whole.size  # type: ignore[attr-defined]
    assert matrix[:, :] is matrix[:,] is matrix


def test_weights_that_share_a_byte_or_a_small_group_are_not_parted() -> None:
    four_bits = Grouped(
        shape=(2, 32),
        rounding="float32",
        bits=4,
        codes=np.zeros((2, 16), np.uint8),
        scales=np.ones((2, 1), np.float32),
        zeros=8,
        group_size=32,
    )
    assert four_bits[:, 6:].shape == (2, 26)
    with pytest.raises(ModelError, match="the codes of inputs 6 and 7, 4 bits each, share a byte"):
        four_bits[:, 7:]
    small = dataclasses.replace(four_bits, scales=np.ones((2, 4), np.float32), group_size=8)
    assert small[:, 8:14].shape == (2, 6)
    with pytest.raises(ModelError, match="inputs 6 to 31 cut through groups of 8"):
        small[:, 6:]


@pytest.mark.parametrize(
    ("how", "may_be_cut"),
    [
        (Activations("int8", scale=0.1), True),
        (Activations("float8", group_size=16), True),
        (Activations("float8", group_size=32), False),
        (Activations("int8"), False),
    ],
    ids=str,
)
def test_inputs_that_share_a_scale_are_not_parted(how: Activations, may_be_cut: bool) -> None:
    matrix = random_grouped((8, 64), how)
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    assert matrix[2:4,].shape == (2, 64)
    if may_be_cut:
        parts = [reference.linear(x[:, part], matrix[:, part]) for part in (slice(0, 16), slice(16, 64))]
        np.testing.assert_allclose(sum(parts), reference.linear(x, matrix), atol=1e-4)
        return
    for part in (slice(0, 16), slice(16, 64)):
        with pytest.raises(
            ModelError, match=r"scale, which would need the inputs of all ranks|groups of 32, and a group would be cut"
        ):
            matrix[:, part]


def test_matrices_packed_differently_stay_by_themselves() -> None:
    first = forms(3, seed=0)
    for i, one in enumerate(first):
        for j, other in enumerate(forms(5, seed=1)):
            assert can_stack([one, other]) == (i == j or ({i, j} == {5, 6} and one.block[1] == other.block[1]))  # type: ignore[attr-defined]
    grouped, indexed, coded = first[0], first[3], first[7]
    for matrix, change in (
        (grouped, {"bits": 8}),
        (grouped, {"group_size": 16}),
        (grouped, {"zeros": 7}),
        (grouped, {"rounding": "float16"}),
        (grouped, {"activations": Activations("int8")}),
        (grouped, {"scales": np.ones((3, 4), np.float16)}),
        (indexed, {"group_index": np.arange(32, dtype=np.int32) // 8}),
        (coded, {"table": np.ones(16, np.float32)}),
    ):
        assert can_stack([matrix, matrix])
        assert not can_stack([matrix, dataclasses.replace(matrix, **change)])
