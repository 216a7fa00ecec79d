"""Packs matrices as the tools' own descriptions of their formats have it: bit by bit, with Python's whole numbers.

Each packer returns the config, the tensors (torch's, by what stands behind the module's name), and the weights that
they mean, computed by torch in the type in which the tool computes them.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Packed(NamedTuple):
    """One matrix in one format."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: Tensor
    """[out, in] float32."""


def words(codes: np.ndarray, bits: int) -> Tensor:
    """[rows, count] whole numbers -> [rows, words] int32: each row one stream, from the lowest bit on."""
    size = -(-codes.shape[1] * bits // 32) * 4
    rows = [sum(int(code) << bits * i for i, code in enumerate(row)).to_bytes(size, "little") for row in codes]
    return torch.from_numpy(np.frombuffer(b"".join(rows), "<i4").reshape(len(codes), -1).copy())


def random_scales(r: np.random.Generator, *shape: int, dtype: str = "float16") -> Tensor:
    return torch.from_numpy(r.uniform(0.001, 0.1, shape) * r.choice([-1, 1], shape)).to(TORCH[dtype])


def scaled(codes: np.ndarray, scales: Tensor) -> Tensor:
    """Codes less their zeros, times scales of the same shape, in the scales' type."""
    return (torch.from_numpy(codes.astype(np.float32)).to(scales.dtype) * scales).float()


def gptq(
    r: np.random.Generator,
    shape: tuple[int, int],
    bits: int,
    size: int,
    *,
    sym: bool,
    version: str,
    order: bool,
    dtype: str,
) -> Packed:
    """`size`: of a group, -1 for one that is a row. `sym`: with zeros in the file that mean nothing."""
    outputs, inputs = shape
    groups = math.ceil(inputs / size) if size > 0 else 1
    index = np.arange(inputs) // size if size > 0 else np.zeros(inputs, np.int64)
    if order:
        index = r.permutation(index)
    codes = r.integers(0, 2**bits, shape)
    zeros = np.full((groups, outputs), 2 ** (bits - 1)) if sym else r.integers(0, 2**bits, (groups, outputs))
    scales = random_scales(r, groups, outputs, dtype=dtype)
    written = words(zeros, bits)
    if version == "gptq":
        ones = {2: [0x55555555], 3: [0x24924924, 0x92492492, 0x49249249], 4: [0x11111111], 8: [0x01010101]}[bits]
        each = np.resize(ones, written.shape[1])
        less = [(int(word) - int(one)) % 2**32 for row in written for word, one in zip(row, each, strict=True)]
        written = torch.tensor(less, dtype=torch.int64).to(torch.int32).view(written.shape)
    if sym:
        written = torch.from_numpy(r.integers(-(2**31), 2**31, tuple(written.shape)).astype(np.int32))
    tensors = {".qweight": words(codes, bits).T.contiguous(), ".qzeros": written, ".scales": scales}
    if order or r.integers(2):
        tensors[".g_idx"] = torch.from_numpy(index.astype(np.int32))
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": order}
    config |= {"checkpoint_format": version, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    return Packed(config, tensors, scaled(codes - zeros[index].T, scales[index].T))


def awq(r: np.random.Generator, shape: tuple[int, int], size: int) -> Packed:
    outputs, inputs = shape
    groups = math.ceil(inputs / size)
    index = np.arange(inputs) // size
    codes, zeros = r.integers(0, 16, (inputs, outputs)), r.integers(0, 16, (groups, outputs))
    scales = random_scales(r, groups, outputs)
    order = [8 * word + place for word in range(outputs // 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
    tensors = {".qweight": words(codes[:, order], 4), ".qzeros": words(zeros[:, order], 4), ".scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return Packed(config, tensors, scaled((codes - zeros[index]).T, scales[index].T))


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": layout}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": []}


def blocks_of(shape: tuple[int, int], strategy: str, size: int) -> tuple[int, int]:
    outputs, inputs = shape
    return {"tensor": (outputs, inputs), "channel": (1, inputs), "group": (1, size), "block": (size, 2 * size)}[
        strategy
    ]


def compressed_whole_numbers(
    r: np.random.Generator, shape: tuple[int, int], bits: int, strategy: str, size: int, *, sym: bool, packed: bool
) -> Packed:
    across, along = blocks_of(shape, strategy, size)
    count = (math.ceil(shape[0] / across), math.ceil(shape[1] / along))
    rows, columns = np.arange(shape[0]) // across, np.arange(shape[1]) // along
    half = 2 ** (bits - 1)
    codes = r.integers(-half, half, shape)
    zeros = np.zeros(count, np.int64) if sym else r.integers(-half, half, count)
    scales = random_scales(r, *count, dtype=str(r.choice(["float16", "bfloat16"])))
    stored = scales.reshape(1) if strategy == "tensor" else scales
    if packed:
        tensors = {".weight_packed": words(codes + half, bits), ".weight_scale": stored}
        tensors[".weight_shape"] = torch.tensor(shape)
        if not sym:
            tensors[".weight_zero_point"] = words(zeros.T + half, bits).T.contiguous()
    else:
        tensors = {".weight": torch.from_numpy(codes.astype(np.int8)), ".weight_scale": stored}
        if not sym:
            tensors[".weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8)).reshape(stored.shape)
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": strategy}
    if strategy == "group":
        weights["group_size"] = size
    config = compressed("pack-quantized" if packed else "int-quantized", weights)
    return Packed(config, tensors, scaled(codes - zeros[rows][:, columns], scales[rows][:, columns]))


def floats(r: np.random.Generator, *shape: int) -> Tensor:
    """Floats of 8 bits, each code as likely as the others."""
    codes = r.integers(0, 256, shape).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def compressed_floats(r: np.random.Generator, shape: tuple[int, int], strategy: str, size: int) -> Packed:
    across, along = blocks_of(shape, strategy, size)
    rows, columns = np.arange(shape[0]) // across, np.arange(shape[1]) // along
    scales = random_scales(r, rows[-1] + 1, columns[-1] + 1, dtype=str(r.choice(["float16", "bfloat16", "float32"])))
    codes = floats(r, *shape)
    stored = scales.reshape(1) if strategy == "tensor" else scales
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"group": {"group_size": size}, "block": {"block_structure": [across, along]}}.get(strategy, {})
    values = (codes.to(scales.dtype) * scales[rows][:, columns]).float()
    return Packed(compressed("float-quantized", weights), {".weight": codes, ".weight_scale": stored}, values)


def four_bit_floats(r: np.random.Generator, shape: tuple[int, int], *, nvfp4: bool) -> Packed:
    size = 16 if nvfp4 else 32
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = r.integers(0, 16, shape)
    values = torch.where(torch.from_numpy(codes) < 8, 1.0, -1.0) * sizes[codes % 8]
    tensors = {".weight_packed": torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))}
    if nvfp4:
        scales = floats(r, shape[0], shape[1] // size)
        tensors |= {".weight_scale": scales, ".weight_global_scale": torch.tensor([r.uniform(1, 1000)]).float()}
        each = scales.float() / tensors[".weight_global_scale"]
    else:
        exponents = r.integers(100, 130, (shape[0], shape[1] // size))
        tensors[".weight_scale"] = torch.from_numpy(exponents.astype(np.uint8))
        each = torch.exp2(torch.from_numpy(exponents - 127).float())
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": size}
    weights["strategy"] = "tensor_group" if nvfp4 else "group"
    config = compressed(f"{'nvfp4' if nvfp4 else 'mxfp4'}-pack-quantized", weights)
    weights_of = values * each.repeat_interleave(size, 1)
    return Packed(config, tensors, weights_of.bfloat16().float())


def fp8(
    r: np.random.Generator, shape: tuple[int, int], block: tuple[int, int] | None, *, powers: bool, divide: bool
) -> Packed:
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    across, along = block or shape
    rows, columns = np.arange(shape[0]) // across, np.arange(shape[1]) // along
    count = (rows[-1] + 1, columns[-1] + 1)
    if powers:
        exponents = r.integers(100, 140, count).astype(np.uint8)
        scales, stored = torch.exp2(torch.from_numpy(exponents).float() - 127), torch.from_numpy(exponents)
        stored = stored.view(torch.float8_e8m0fnu)
    else:
        scales = stored = random_scales(r, *count, dtype="float32")
    codes = floats(r, *shape)
    if block:
        config["weight_block_size"] = list(block)
    if divide:
        config["weight_scale_semantics"] = "inverse"
        scales = 1 / scales
    tensors = {".weight": codes, ".weight_scale_inv" if block else ".weight_scale": stored if block else stored[0, 0]}
    return Packed(config, tensors, codes.float() * scales[rows][:, columns])


def nf4(r: np.random.Generator, shape: tuple[int, int], *, double: bool, dtype: str) -> Packed:
    count = math.prod(shape)
    blocks = math.ceil(count / 64)
    codes = r.integers(0, 16, count)
    halves = np.append(codes, 0)[: count + count % 2].reshape(-1, 2)
    table = torch.from_numpy(np.sort(r.uniform(-1, 1, 16))).float()
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": dtype, "shape": list(shape)}
    tensors = {
        ".weight": torch.from_numpy((halves[:, 0] << 4 | halves[:, 1]).astype(np.uint8)[:, None]),
        ".weight.quant_map": table,
    }
    if double:
        places = torch.from_numpy(r.integers(0, 256, blocks).astype(np.uint8))
        levels = torch.from_numpy(np.sort(r.uniform(-1, 1, 256))).float()
        nested = torch.from_numpy(r.uniform(0.01, 0.1, math.ceil(blocks / 256))).float()
        offset = float(np.float32(r.uniform(0.1, 0.5)))
        tensors |= {".weight.absmax": places, ".weight.nested_quant_map": levels, ".weight.nested_absmax": nested}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        scales = levels[places.long()] * nested.repeat_interleave(256)[:blocks] + offset
    else:
        scales = tensors[".weight.absmax"] = torch.from_numpy(r.uniform(0.01, 0.1, blocks)).float()
    text = json.dumps(state).encode()
    tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config["bnb_4bit_use_double_quant"] = double
    values = table[codes] * scales.repeat_interleave(64)[:count]
    return Packed(config, tensors, values.to(TORCH[dtype]).float().view(shape))
