"""Reading a quantized checkpoint takes the memory of its packed bytes, and of one matrix on its way."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.models.loading import STORED_DTYPES, load_config, load_weights
from minipaged.models.quantized import formats_of
from minipaged.models.quantized.stored import StoredMatrix
from tests.models.quantized.packers import compressed
from tests.models.quantized.samples import CONFIG, Raw, write

LARGE: dict[str, Any] = CONFIG | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "head_dim": 128,
}
METHODS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "compressed-tensors": compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    ),
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def random_checkpoint(folder: Path, quantization: dict[str, Any]) -> Path:
    """Any bits for codes, ones for scales."""
    config = LARGE | {"quantization_config": quantization}
    formats, tensors = formats_of(quantization), {}
    for name, shape in weight_shapes(ModelConfig.from_dict(config)).items():
        module = name.removesuffix(".weight")
        format_ = formats.of(module, {}) if "layers" in name and len(shape) == 2 else None
        if format_ is None:
            tensors[name] = Raw("F16", list(shape), np.ones(shape, "<f2").tobytes())
            continue
        for part, each in format_.parts((shape[0], shape[1])).items():
            if each.required:
                dtype, size = each.dtypes[0], each.shapes[0]
                ones = np.full(size, 1, STORED_DTYPES[dtype])
                tensors[f"{module}{part}"] = Raw(dtype, list(size), ones.tobytes())
    write(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_loading_takes_the_packed_bytes_and_one_matrix(method: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, METHODS[method] | {"ignore": ["lm_head"]})
    config = load_config(folder)
    load_weights(folder, config)  # tables that are made once
    tracemalloc.start()
    weights = load_weights(folder, config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    held = sum(weight.nbytes for weight in weights.values())
    packed = [weight for weight in weights.values() if isinstance(weight, StoredMatrix)]
    assert len(packed) == 14
    assert held < 1.1 * (folder / "model.safetensors").stat().st_size + 2 * 512 * 256 * 2  # the rest becomes float32
    one = max(weight.nbytes for weight in packed)
    assert peak < held + 2.1 * one + 300_000
    assert one < math.prod(packed[0].shape) * 4  # so that a matrix in floats would be seen
