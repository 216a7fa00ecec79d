"""Any matrix of any format, however its groups fall, is read as its tool computes it: bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipaged.errors import ModelError
from minipaged.models.loading import STORED_DTYPES
from minipaged.models.quantized import formats_of
from minipaged.models.quantized.format import Tensor
from minipaged.models.quantized.gguf_blocks import BLOCKS, GGUFBlocks
from minipaged.models.quantized.stored import Grouped, StoredMatrix
from tests.models.quantized import packers
from tests.models.quantized.packers import Packed

MODULE = "model.layers.0.mlp.up_proj"
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def read(packed: Packed) -> StoredMatrix:
    """What the format makes of these tensors, which have to be those that it asks for."""
    dtypes = {f"{MODULE}{part}": DTYPES[tensor.dtype] for part, tensor in packed.tensors.items()}
    format_ = formats_of(packed.config).of(MODULE, dtypes)
    assert format_ is not None
    outputs, inputs = packed.weights.shape
    parts = format_.parts((outputs, inputs))
    assert {part for part, each in parts.items() if each.required} <= packed.tensors.keys() <= parts.keys()
    tensors = {}
    for part, tensor in packed.tensors.items():
        dtype = DTYPES[tensor.dtype]
        assert dtype in parts[part].dtypes, part
        assert not parts[part].shapes or tuple(tensor.shape) in parts[part].shapes, part
        values = tensor.float() if dtype == "BF16" else tensor.view(torch.uint8) if "F8" in dtype else tensor
        tensors[part] = Tensor(values.numpy(), dtype)
        assert dtype == "BF16" or values.numpy().dtype == STORED_DTYPES[dtype]
    return format_.matrix((outputs, inputs), tensors)


def check(packed: Packed) -> StoredMatrix:
    """Every weight, in whichever rows they are asked for."""
    matrix, expected = read(packed), packed.weights.numpy()
    assert matrix.shape == expected.shape
    rows = matrix.rows()
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, expected)
    some = np.array([len(expected) - 1, 0, len(expected) // 2, 0])
    np.testing.assert_array_equal(matrix.rows(some), expected[some])
    np.testing.assert_array_equal(matrix.rows(slice(1, 3)), expected[1:3])
    return matrix


@given(
    r=seeds,
    bits=st.sampled_from([2, 3, 4, 8]),
    outputs=st.integers(1, 3),
    inputs=st.integers(1, 4),
    size=st.sampled_from([-1, 8, 24, 32, 128]),
    sym=st.booleans(),
    version=st.sampled_from(["gptq", "gptq_v2"]),
    order=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16"]),
)
def test_gptq(
    r: np.random.Generator,
    bits: int,
    outputs: int,
    inputs: int,
    size: int,
    sym: bool,
    version: str,
    order: bool,
    dtype: str,
) -> None:
    shape = (32 * outputs, 32 * inputs)
    check(packers.gptq(r, shape, bits, size, sym=sym, version=version, order=order, dtype=dtype))


@given(r=seeds, outputs=st.integers(1, 6), inputs=st.integers(1, 70), size=st.sampled_from([16, 32, 128]))
def test_awq(r: np.random.Generator, outputs: int, inputs: int, size: int) -> None:
    check(packers.awq(r, (8 * outputs, inputs), size))


@given(
    r=seeds,
    shape=st.tuples(st.integers(1, 20), st.integers(1, 70)),
    bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    strategy=st.sampled_from(["tensor", "channel", "group", "block"]),
    size=st.sampled_from([4, 16, 32]),
    sym=st.booleans(),
    packed=st.booleans(),
)
def test_compressed_whole_numbers(
    r: np.random.Generator, shape: tuple[int, int], bits: int, strategy: str, size: int, sym: bool, packed: bool
) -> None:
    bits = bits if packed else 8
    if strategy == "block":
        strategy = "group"
    check(packers.compressed_whole_numbers(r, shape, bits, strategy, size, sym=sym, packed=packed))


@given(
    r=seeds,
    shape=st.tuples(st.integers(1, 20), st.integers(1, 70)),
    strategy=st.sampled_from(["tensor", "channel", "group", "block"]),
    size=st.sampled_from([4, 16]),
)
def test_compressed_floats(r: np.random.Generator, shape: tuple[int, int], strategy: str, size: int) -> None:
    check(packers.compressed_floats(r, shape, strategy, size))


@given(r=seeds, outputs=st.integers(1, 9), groups=st.integers(1, 4), nvfp4=st.booleans())
def test_floats_of_four_bits(r: np.random.Generator, outputs: int, groups: int, nvfp4: bool) -> None:
    check(packers.four_bit_floats(r, (outputs, 32 * groups), nvfp4=nvfp4))


@given(
    r=seeds,
    shape=st.tuples(st.integers(1, 20), st.integers(1, 40)),
    block=st.sampled_from([None, (8, 8), (16, 4)]),
    powers=st.booleans(),
    divide=st.booleans(),
)
def test_fp8(
    r: np.random.Generator, shape: tuple[int, int], block: tuple[int, int] | None, powers: bool, divide: bool
) -> None:
    matrix = check(packers.fp8(r, shape, block, powers=powers, divide=divide))
    assert matrix.activations is not None
    assert matrix.activations.group_size == (block and block[1])


@given(
    r=seeds,
    shape=st.tuples(st.integers(1, 40), st.integers(1, 130)),
    double=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
)
def test_nf4(r: np.random.Generator, shape: tuple[int, int], double: bool, dtype: str) -> None:
    """Blocks of 64 run on from row to row, whatever a row's length."""
    check(packers.nf4(r, shape, double=double, dtype=dtype))


@pytest.mark.parametrize("kind", BLOCKS)
@given(r=seeds, outputs=st.integers(1, 5), count=st.integers(1, 3))
def test_gguf(kind: str, r: np.random.Generator, outputs: int, count: int) -> None:
    """Any bytes are a block, if its floats are numbers."""
    weights, size = BLOCKS[kind]
    blocks = r.integers(0, 256, (outputs, count, size), dtype=np.uint8)
    places = {"Q6_K": [208]}.get(kind, [0, 2] if kind.endswith(("_1", "4_K", "5_K")) else [0])
    for place in places:
        blocks[:, :, place : place + 2] = r.standard_normal((outputs, count, 1)).astype("<f2").view(np.uint8)
    data = blocks.reshape(outputs, -1)
    expected = gguf.quants.dequantize(data, getattr(gguf.GGMLQuantizationType, kind))
    matrix = GGUFBlocks(kind).matrix((outputs, count * weights), {".weight": Tensor(data, "U8")})
    assert isinstance(matrix, Grouped)
    np.testing.assert_array_equal(matrix.rows(), expected)
    assert matrix.nbytes <= 1.06 * data.nbytes
    blocks[-1, -1, places[-1] : places[-1] + 2] = (0, 0x7E)
    with pytest.raises(ModelError, match=r"\.weight holds scales that are infinite or NaN"):
        GGUFBlocks(kind).matrix((outputs, count * weights), {".weight": Tensor(blocks.reshape(outputs, -1), "U8")})


def test_a_zero_of_0_in_the_first_gptq_format_borrows_from_its_neighbour() -> None:
    r = np.random.default_rng(0)
    packed = packers.gptq(r, (32, 32), 4, 8, sym=False, version="gptq", order=False, dtype="float16")
    matrix = check(packed)
    assert isinstance(matrix, Grouped)
    assert not isinstance(matrix.zeros, int)
    assert (matrix.zeros == 0).any()


# --- Which module is stored how -------------------------------------------------------------------


def test_gptq_modules_may_have_settings_of_their_own() -> None:
    plain = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    dynamic = {"-:.*down_proj": {}, r"+:model\.layers\.0\..*": {"bits": 8, "group_size": 32}, ".*lm_head": {"bits": 2}}
    formats = formats_of(plain | {"dynamic": dynamic})
    names = {
        name: format_ and format_.name
        for name in ("model.layers.0.mlp.down_proj", MODULE, "model.layers.1.mlp.up_proj", "lm_head")
        for format_ in [formats.of(name, {})]
    }
    assert list(names.values()) == [
        None,
        "GPTQ, 8 bits, groups of 32",
        "GPTQ, 4 bits, groups of 128",
        "GPTQ, 2 bits, groups of 128",
    ]


def compressed_group(bits: int, *targets: str) -> dict[str, object]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
    return {"targets": list(targets), "weights": weights, "format": "pack-quantized"}


def test_compressed_tensors_finds_a_module_by_its_name_before_its_class() -> None:
    groups = [compressed_group(4, "Linear"), compressed_group(8, "re:.*o_proj$"), compressed_group(3, MODULE)]
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": dict(zip("abc", groups, strict=True)),
        "ignore": ["lm_head", r"re:.*layers\.1\..*"],
        "format": "mixed-precision",
    }
    formats = formats_of(config)
    expected = {
        "model.layers.0.self_attn.q_proj": "4 bits",
        "model.layers.0.self_attn.o_proj": "8 bits",
        MODULE: "3 bits",
        "model.layers.1.self_attn.o_proj": None,
        "lm_head": None,
        "model.embed_tokens": None,
    }
    for name, bits in expected.items():
        format_ = formats.of(name, {})
        assert (format_ is None) == (bits is None), name
        assert format_ is None or (bits is not None and bits in format_.name)
