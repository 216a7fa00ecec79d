"""Products with packed matrices on a GPU, against float64 on the weights that the checkpoint means."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from minipaged.contracts import BatchRow
from minipaged.fast import gpu
from minipaged.fast import llama as fast_llama
from minipaged.fast.gpu import llama
from minipaged.fast.gpu import packed as room
from minipaged.fast.gpu.packed import PackedMatrix, packed, quantized
from minipaged.fast.kv_cache import KVCache
from minipaged.fast.linear import QuantizingLinear
from minipaged.models import gguf
from minipaged.models.loading import load_config, load_weights
from minipaged.models.quantized.stored import (
    Activations,
    Codebook4,
    Float8,
    Grouped,
    StoredMatrix,
    e4m3_values,
    pack,
)
from minipaged.reference.kv_cache import KVCache as ReferenceCache
from minipaged.reference.llama import Llama as ReferenceLlama
from tests.effort import examples, quick_cases
from tests.fast.guarded import GuardedMemory
from tests.models.quantized.samples import HERE, write_sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()

HOPPERS_FLOAT8 = 2**-11
"""What a product of floats of 8 bits may be off by on Hopper, as a share of what is summed up. The tensor cores keep 14
bits while they add (`minipaged/fast/gpu/packed.py`). On an H200, 2^-12.2 was the most that these tests saw."""

NORMAL_FLOAT4 = np.array(
    [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0],
    np.float32,
)


def grouped(
    shape: tuple[int, int],
    bits: int,
    size: int,
    *,
    seed: int = 0,
    zeros: str = "one",
    minima: bool = False,
    order: bool = False,
    supers: bool = False,
    activations: Activations | None = None,
) -> Grouped:
    """`zeros`: "one" for all groups, or "each" has its own."""
    r = np.random.default_rng(seed)
    outputs, inputs = shape
    groups = -(-inputs // size)
    index = r.permutation(np.arange(inputs) // size).astype(np.int32) if order else None
    parts = 2 if supers and groups % 2 == 0 else 1
    small = {name: r.integers(1, 64, (outputs, groups), dtype=np.uint8) for name in ("scales", "minima")}
    plain = {name: r.uniform(0.01, 0.1, (outputs, groups)).astype(np.float16) for name in ("scales", "minima")}
    of_small = {f"super_{name}": r.uniform(1e-3, 2e-3, (outputs, parts)).astype(np.float16) for name in small}
    scales = small if supers else plain
    return Grouped(
        shape=shape,
        rounding="float32",
        activations=activations,
        bits=bits,
        codes=pack(r.integers(0, 2**bits, shape, dtype=np.uint8), bits),
        scales=scales["scales"],
        zeros=2 ** (bits - 1) if zeros == "one" else r.integers(0, 2**bits, (outputs, groups), dtype=np.uint8),
        minima=scales["minima"] if minima else None,
        group_size=size,
        group_index=index,
        super_scales=of_small["super_scales"] if supers else None,
        super_minima=of_small["super_minima"] if supers and minima else None,
    )


def float8(
    shape: tuple[int, int], block: tuple[int, int], *, seed: int = 0, activations: Activations | None = None
) -> Float8:
    r = np.random.default_rng(seed)
    codes = r.integers(0, 256, shape, dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # no numbers
    blocks = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    scales = r.uniform(1e-3, 1e-2, blocks).astype(np.float32)
    return Float8(shape=shape, rounding="float32", activations=activations, codes=codes, scales=scales, block=block)


def codebook(shape: tuple[int, int], size: int, *, seed: int = 0) -> Codebook4:
    r = np.random.default_rng(seed)
    return Codebook4(
        shape=shape,
        rounding="float32",
        codes=pack(r.integers(0, 16, shape, dtype=np.uint8), 4),
        table=NORMAL_FLOAT4,
        scales=r.uniform(0.1, 1, (shape[0], shape[1] // size)).astype(np.float32),
        group_size=size,
    )


def numbers(rows: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def made(matrix: StoredMatrix, dtype: torch.dtype, bias: torch.Tensor | None = None) -> PackedMatrix:
    found = packed(matrix, bias, dtype, DEVICE)
    assert isinstance(found, PackedMatrix)
    return found


def check(matrix: StoredMatrix, x: torch.Tensor, found: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """What is rounded: sums in float32, at most 2^-22 of what is summed up at each of some steps (codes and their sums
    are exact); the result once, to its type; and a table of 16 values, to the same."""
    weights = torch.from_numpy(matrix.rows()).double()
    wide = x.double().cpu()
    exact, summed_up = wide @ weights.T, wide.abs() @ weights.abs().T
    if isinstance(matrix, Grouped):  # of which codes and minima are summed up by themselves
        summed_up += wide.abs().sum(1)[:, None] * weights.abs().amax(1)
    if bias is not None:
        exact += bias.double().cpu()
    step = torch.finfo(x.dtype).eps / 2
    allowed = 2**-20 * summed_up + step * exact.abs() + 1e-7
    if isinstance(matrix, Codebook4):
        allowed += step * summed_up
    is_hopper = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
    if isinstance(matrix, Float8) and matrix.activations is not None and is_hopper:
        allowed += HOPPERS_FLOAT8 * summed_up
    assert found.dtype == x.dtype
    error = (found.double().cpu() - exact).abs()
    assert (error <= allowed).all(), f"off by {float((error / allowed).max()):.3g} of what rounding explains"


MATRICES: dict[str, StoredMatrix] = {
    "gptq, 4 bits": grouped((20, 128), 4, 32),
    "gptq, 4 bits, zeros": grouped((20, 192), 4, 64, zeros="each"),
    "gptq, 2 bits": grouped((20, 64), 2, 32, zeros="each"),
    "gptq, 3 bits": grouped((20, 128), 3, 128, zeros="each"),
    "gptq, act-order": grouped((20, 128), 4, 32, zeros="each", order=True),
    "gptq, 8 bits, act-order, a smaller last group": grouped((20, 80), 8, 32, zeros="each", order=True),
    "4 bits, one group": grouped((20, 96), 4, 96),
    "4 bits, one group, odd": grouped((7, 50), 4, 50, zeros="each"),
    "Q4_0": grouped((20, 96), 4, 32),
    "Q4_1": grouped((20, 96), 4, 32, minima=True),
    "Q5_1": grouped((20, 96), 5, 32, minima=True),
    "Q8_0": grouped((20, 96), 8, 32),
    "Q4_K": grouped((20, 256), 4, 32, minima=True, supers=True),
    "Q6_K": grouped((20, 256), 6, 16, supers=True),
    "int8, one group": grouped((20, 96), 8, 96),
    "float8, blocks": float8((20, 130), (8, 64)),
    "float8, blocks, one across": float8((20, 96), (8, 128)),
    "float8, one scale": float8((20, 96), (20, 96)),
    "NF4": codebook((20, 128), 64),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_a_product_is_that_of_the_weights_that_are_meant(name: str, dtype: torch.dtype) -> None:
    matrix = MATRICES[name]
    x, bias = numbers(3, matrix.shape[1], dtype), numbers(1, matrix.shape[0], dtype, seed=1)[0]
    multiply = made(matrix, dtype, bias)
    with GuardedMemory():
        found = multiply(x)
    check(matrix, x, found, bias)


@pytest.mark.parametrize("name", MATRICES)
def test_rows_are_those_that_are_meant(name: str) -> None:
    """As they are looked up where embedding and head are one."""
    matrix = MATRICES[name]
    ids = torch.tensor([3, 0, 3, matrix.shape[0] - 1], dtype=torch.int32, device=DEVICE)
    expected = torch.from_numpy(matrix.rows(ids.cpu().numpy()))
    multiply = made(matrix, torch.float32)
    with GuardedMemory():
        found = multiply.rows(ids)
    # A minimum and what it is added to are rounded by themselves.
    largest = expected.abs().amax()
    torch.testing.assert_close(found.cpu(), expected, rtol=2**-22, atol=float(largest) * 2**-22)
    half = made(matrix, torch.float16).rows(ids.long())
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float().cpu(), expected, rtol=2**-10, atol=float(largest) * 2**-11)
    assert multiply.rows(ids[:0]).shape == (0, matrix.shape[1])


KINDS = st.sampled_from(["int", "float8", "codebook"])


@st.composite
def matrices(draw: st.DrawFn) -> StoredMatrix:
    """Of all forms; groups of all sizes that are computed with, and inputs that fill the last one, or not."""
    outputs, seed = draw(st.sampled_from([1, 7, 64, 130])), draw(st.integers(0, 1000))
    kind, size = draw(KINDS), draw(st.sampled_from([32, 64, 96, 128, 160]))
    inputs = size * draw(st.integers(1, 3)) + (draw(st.sampled_from([0, 0, 1, 16, 31])) if kind != "codebook" else 0)
    if kind == "codebook":
        return codebook((outputs, inputs), size, seed=seed)
    if kind == "float8":
        block = (draw(st.sampled_from([1, 4, outputs])), draw(st.sampled_from([size, inputs])))
        return float8((outputs, inputs), block, seed=seed)
    return grouped(
        (outputs, inputs),
        draw(st.sampled_from([2, 3, 4, 5, 6, 8])),
        draw(st.sampled_from([size, inputs])),
        seed=seed,
        zeros=draw(st.sampled_from(["one", "each"])),
        minima=draw(st.booleans()),
        order=draw(st.booleans()),
        supers=draw(st.booleans()),
    )


@settings(max_examples=examples(60))
@given(matrix=matrices(), rows=st.sampled_from([0, 1, 2, 16, 17, 33, 65]), dtype=st.sampled_from(DTYPES))
def test_a_product_is_right_whatever_the_shape(matrix: StoredMatrix, rows: int, dtype: torch.dtype) -> None:
    x = numbers(rows, matrix.shape[1], dtype)
    check(matrix, x, made(matrix, dtype)(x))


def test_rows_of_x_may_be_strided() -> None:
    matrix = MATRICES["Q4_1"]
    x = numbers(5, 2 * matrix.shape[1], torch.float16)[:, : matrix.shape[1]]
    check(matrix, x, made(matrix, torch.float16)(x))


@pytest.mark.parametrize("name", ["Q4_1", "int8, one group"])
def test_a_product_in_splits_is_the_same_each_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows, inputs are divided; partial sums are added in their order."""
    bits, size = (4, 32) if name == "Q4_1" else (8, 1216)
    matrix = grouped((20, 1216), bits, size, minima=name == "Q4_1")
    x, bias = numbers(3, 1216, torch.float32), numbers(1, 20, torch.float32)[0]
    multiply = made(matrix, torch.float32, bias)
    taken = []
    monkeypatch.setattr(room, "MIN_STEPS", 3)
    real = room._steps_a_split
    monkeypatch.setattr(room, "_steps_a_split", lambda *given: taken.append((real(*given), given[1])) or taken[-1][0])
    with GuardedMemory():
        found = multiply(x)
    assert all(2 * each < steps for each, steps in taken), "it was not divided into three or more"
    check(matrix, x, found, bias)
    assert torch.equal(multiply(x), found)
    for row in range(3):  # what a token gets does not depend on who else is in the batch
        assert torch.equal(multiply(x[row : row + 1])[0], found[row])


def test_splits_fill_the_gpu_and_are_never_empty() -> None:
    for tiles in (1, 5, 32, 112, 1000):
        for steps in (1, 3, 4, 9, 16, 64, 223):
            each = room._steps_a_split(tiles, steps, 132)
            splits = -(-steps // each)
            assert (splits - 1) * each < steps
            assert splits == 1 or (each >= room.MIN_STEPS and splits <= room.MAX_SPLITS)
    assert -(-64 // room._steps_a_split(32, 64, 132)) > 8


# --- Inputs that are quantized too -----------------------------------------------------------------

INT8 = [
    Activations("int8"),
    Activations("int8", symmetric=False),
    Activations("int8", scale=0.02),
    Activations("int8", symmetric=False, scale=0.02, zero=-17),
    Activations("int8", group_size=32),
]
FLOAT8 = [
    Activations("float8"),
    Activations("float8", scale=0.005),
    Activations("float8", group_size=32),
    Activations("float8", group_size=64),
]


@settings(max_examples=examples(100))
@given(
    how=st.sampled_from(INT8 + FLOAT8),
    tokens=st.integers(0, 4),
    inputs=st.integers(1, 100),
    size=st.sampled_from([0, 1e-9, 1e-3, 1.0, 9.0]),
    seed=st.integers(0, 1000),
)
def test_inputs_get_the_codes_that_they_have_for_everybody_else(
    how: Activations, tokens: int, inputs: int, size: float, seed: int
) -> None:
    x = numbers(tokens, inputs, torch.float32, seed) * size
    codes, scales, zeros = quantized(x, how)
    group = how.group_size or inputs
    meant = (codes.float() - (0 if zeros is None else zeros[:, None])) * scales.repeat_interleave(group, 1)[:, :inputs]
    np.testing.assert_array_equal(meant.cpu().numpy(), how.applied(x.cpu().numpy()))


def test_every_float_of_8_bits_is_found_and_what_lies_between_goes_to_the_nearest() -> None:
    values = e4m3_values()[:127].astype(np.float32)
    halfway = (values[1:] + values[:-1]) / 2
    beside = np.nextafter(halfway, np.float32(0)), np.nextafter(halfway, np.float32(500))
    x = torch.from_numpy(np.concatenate([values, halfway, *beside, [500.0]]).astype(np.float32))[None]
    x = torch.cat([x, -x]).to(DEVICE)
    codes, _, _ = quantized(x, Activations("float8", scale=1.0))
    assert torch.equal(codes.float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_what_is_no_number_stays_none() -> None:
    x = numbers(2, 64, torch.float32)
    x[1, 5] = torch.nan
    for matrix in (
        grouped((4, 64), 8, 64, activations=Activations("int8")),
        float8((4, 64), (4, 64), activations=Activations("float8", scale=0.01)),
    ):
        found = made(matrix, torch.float32)(x)
        assert found[0].isfinite().all()
        assert found[1].isnan().all()


def quantizing(how: Activations, inputs: int, *, size: int, outputs: int = 20) -> StoredMatrix:
    if how.kind == "int8":
        return grouped((outputs, inputs), 8, size, activations=how)
    return float8((outputs, inputs), (4, size), activations=how)


@pytest.mark.parametrize("how", INT8 + FLOAT8, ids=str)
@pytest.mark.parametrize(("inputs", "size"), [(96, 96), (128, 64), (80, 80)])
def test_a_product_of_codes_is_that_of_the_floats_that_they_stand_for(how: Activations, inputs: int, size: int) -> None:
    """`QuantizingLinear`'s; in float32 it rounds nothing else. Both sides have 8 bits at most in what is added up."""
    matrix = quantizing(how, inputs, size=size)
    x, bias = numbers(5, inputs, torch.float32), numbers(1, 20, torch.float32)[0]
    multiply = made(matrix, torch.float32, bias)
    assert multiply._form in (room.INT8.value, room.FLOAT8.value)
    with GuardedMemory():
        found = multiply(x)
    floats = torch.from_numpy(how.applied(x.cpu().numpy()))
    check(matrix, floats.to(DEVICE), found, bias)
    ids = torch.tensor([1, 19], device=DEVICE)
    np.testing.assert_allclose(multiply.rows(ids).cpu(), matrix.rows(ids.cpu().numpy()), rtol=2**-22)


@pytest.mark.parametrize(
    "matrix",
    [
        grouped((20, 96), 4, 32, activations=Activations("int8")),  # weights of 4 bits
        grouped((20, 96), 8, 32, zeros="each", activations=Activations("int8")),
        grouped((20, 96), 8, 32, order=True, activations=Activations("int8")),
        grouped((20, 96), 8, 96, activations=Activations("int8", group_size=24)),
        grouped((20, 96), 8, 96, activations=Activations("int8", group_size=24, scale=0.0123)),
        grouped((20, 96), 8, 96, activations=Activations("int8", group_size=32, symmetric=False)),
        grouped((20, 96), 8, 96, activations=Activations("float8")),
        float8((20, 96), (20, 96), activations=Activations("int8")),
    ],
    ids=lambda matrix: f"{type(matrix).__name__} {matrix.activations}",
)
def test_where_codes_cannot_be_multiplied_the_floats_that_they_stand_for_are(matrix: StoredMatrix) -> None:
    found = packed(matrix, None, torch.float32, DEVICE)
    assert isinstance(found, QuantizingLinear)
    assert isinstance(found.matrix, PackedMatrix)
    x = numbers(3, 96, torch.float32)
    assert matrix.activations is not None
    floats = torch.from_numpy(matrix.activations.applied(x.cpu().numpy()))
    check(replace(matrix, activations=None), floats.to(DEVICE), found(x))


def test_a_chip_without_floats_of_8_bits_multiplies_what_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_has_float8", lambda _: False)
    matrix = float8((20, 96), (20, 96), activations=Activations("float8"))
    assert isinstance(packed(matrix, None, torch.float32, DEVICE), QuantizingLinear)


@pytest.mark.parametrize(
    "matrix",
    [
        grouped((20, 96), 4, 16),
        grouped((20, 96), 4, 24),
        grouped((20, 96), 8, 8),
        replace(grouped((20, 96), 4, 32), group_index=np.arange(96, dtype=np.int32) % 2),  # groups of other sizes
        codebook((20, 96), 16),  # nvfp4
    ],
    ids=["16", "24", "8 of 8 bits", "unequal", "nvfp4"],
)
def test_what_there_is_no_kernel_for_is_left_to_the_caller(matrix: StoredMatrix) -> None:
    assert packed(matrix, None, torch.float16, DEVICE) is None


def test_a_matrix_takes_the_bytes_of_its_codes_and_scales() -> None:
    matrix = grouped((64, 1024), 4, 64)
    assert made(matrix, torch.float16).nbytes == matrix.nbytes == 64 * 1024 // 2 + 64 * 16 * 2


def test_codes_are_laid_out_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = MATRICES["gptq, act-order"]
    x = numbers(2, matrix.shape[1], torch.float32)
    whole = made(matrix, torch.float32)(x)
    monkeypatch.setattr(room, "LOADED", 3 * matrix.shape[1])
    assert torch.equal(made(matrix, torch.float32)(x), whole)


# --- Whole models ----------------------------------------------------------------------------------


SAMPLED = [
    "gptq_int4_g32_sym_actorder",
    "ct_w8a8_int8_static",
    "gptq_int2_g32_asym",
    "awq_int4_g32",
    "gptq_int4_channel_sym",
    "ct_w8a16_channel",
    "ct_w8a8_int8_dynamic",
    "ct_fp8_block",
    "ct_fp8_static_tensor",
    "bnb_nf4",
    "ct_mxfp4a16",
    "ct_nvfp4a16",
    "gguf_q4_1",
]
"""What other tools have made, one for each form."""


@quick_cases(2)
@pytest.mark.parametrize("name", SAMPLED)
def test_a_model_that_another_tool_has_packed_computes_what_the_reference_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_llama, "measure", lambda *_: None)  # what preemption costs does not matter here
    few_tiles = {"BLOCKS_A_STEP": 1, "TILE_OUT": 512, "TILE_ROWS": 16, "num_warps": 4, "num_stages": 2}
    if DEVICE.type == "cpu":  # the interpreter takes as long for small ones
        monkeypatch.setattr(room, "tile_options", lambda *_, **__: few_tiles)
    if name.startswith("gguf"):
        monkeypatch.setattr(gguf, "_write_tokenizer", lambda *there_is_none: None)
        gguf.convert(HERE / f"{name}.gguf", tmp_path)
    else:
        write_sample(name, tmp_path)
    config = load_config(tmp_path)
    shape = (config.num_hidden_layers, 4, 16, config.num_key_value_heads, config.head_dim)
    weights = {  # nothing rounds them here
        each: replace(values, rounding="float32") if isinstance(values, StoredMatrix) else values
        for each, values in load_weights(tmp_path, config).items()
    }
    ids = np.load(HERE / "input_ids.npy")[0, :9].tolist()
    batch = [BatchRow(tuple(ids), 0, (0,), wants_logits=True)]
    theirs = ReferenceLlama(config, weights, ReferenceCache(*shape)).forward(batch)
    tensors = {
        each: values if isinstance(values, StoredMatrix) else torch.from_numpy(values).to(DEVICE)
        for each, values in weights.items()
    }
    made = []
    monkeypatch.setattr(llama, "packed", lambda *given: made.append(packed(*given)) or made[-1])
    ours = fast_llama.Llama(
        config, tensors, KVCache(*shape, dtype=torch.float32, device=DEVICE, kernels=gpu), max_num_seqs=2
    )
    assert made
    assert (None in made) == (name == "ct_nvfp4a16")  # groups of 16
    logits = ours.forward(batch).cpu().numpy()
    quantizes = any(isinstance(each, StoredMatrix) and each.activations for each in weights.values())
    # An input halfway between two codes takes either.
    allowed = 0.03 if quantizes else 1e-4
    error = np.abs(logits - theirs).max() / np.abs(theirs).max()
    assert error < allowed
