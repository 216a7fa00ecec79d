"""Quantized weights: choose the format of a checkpoint by its `quantization_config`. Unsupported ones raise ModelError.

`stored.py` defines quantized matrices in memory; each other file reads the format of one family of tools.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from minipaged.errors import ModelError
from minipaged.models.quantized.awq import AWQFormats
from minipaged.models.quantized.bitsandbytes import BitsAndBytesFormats
from minipaged.models.quantized.compressed_tensors import CompressedTensorsFormats
from minipaged.models.quantized.format import Formats
from minipaged.models.quantized.fp8 import FP8Formats
from minipaged.models.quantized.gguf_blocks import GGUFFormats
from minipaged.models.quantized.gptq import GPTQFormats

WAY_OUT = (
    "use another checkpoint of this model: GPTQ, AWQ (version 'gemm'), compressed-tensors, FP8, bitsandbytes in 4 "
    "bits, a .gguf file, or the original in fp32, fp16 or bf16"
)

NAMES_OF_TOOLS = {
    ".g_idx": "GPTQ",
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight.absmax": "bitsandbytes",
    ".weight_scale_inv": "FP8 (in blocks)",
    ".weight_scale": "FP8 or compressed-tensors",
}
"""Suffixes of tensor names that only these tools write. The most specific ones come first."""


def check_unquantized(names: Collection[str]) -> None:
    """Raise ModelError if `names` contain a tensor that only quantized checkpoints have."""
    for part, tool in NAMES_OF_TOOLS.items():
        if found := sorted(name for name in names if name.endswith(part)):
            raise ModelError(
                f"tensor '{found[0]}' has a name that {tool} gives, so the weights are quantized, but the "
                "quantization_config that says how is missing in config.json; take the config.json (or "
                f"quantize_config.json, quant_config.json) that was published with these weights, or {WAY_OUT}"
            )


def formats_of(config: Mapping[str, Any]) -> Formats:
    """The formats of the modules in a checkpoint with this `quantization_config`.

    Raises ModelError for a method, or a variant of one, that is not supported.
    """
    try:
        return _formats_of(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a value of the wrong type
        raise ModelError(f"quantization_config is damaged ({type(error).__name__}: {error}); {WAY_OUT}") from None


def _formats_of(config: Mapping[str, Any]) -> Formats:
    method = config.get("quant_method")
    if method is None and "w_bit" in config:  # AutoAWQ's own file
        method = "awq"
    if method is None and "bits" in config:  # AutoGPTQ's own file
        method = "gptq"
    match method:
        case "gptq":
            return GPTQFormats(config)
        case "awq":
            return AWQFormats(config)
        case "compressed-tensors":
            return CompressedTensorsFormats(config)
        case "fp8":
            return FP8Formats(config)
        case "bitsandbytes":
            return BitsAndBytesFormats(config)
        case "gguf":
            return GGUFFormats(config)
    raise ModelError(f"quantization_config: quant_method = {method!r} is not supported; {WAY_OUT}")
