"""GPTQ: whole numbers packed along the inputs in 32-bit words (GPTQModel, AutoGPTQ, auto-round).

    qweight   int32 [in * bits / 32, out]        the words of a column form one stream of codes
    qzeros    int32 [groups, out * bits / 32]    packed along the outputs
    scales    float [groups, out]
    g_idx     int32 [in]                         the group of each input; in order, unless desc_act is set

    w = (q - z) * s

There are two traps. First, a file of `checkpoint_format` "gptq" (the first version, and the default) holds z - 1.
The 1s of all fields were subtracted from the *whole word*, so that a field of 0 borrows from its neighbour; therefore
they must be added to the whole word again. Second, with `sym` z is half the range, although some files contain a
different z.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minipaged.errors import ModelError
from minipaged.models.quantized.format import (
    FLOATS,
    Format,
    Formats,
    Tensor,
    TensorSpec,
    check_finite,
    divided,
    group_size_of,
    pattern_of,
    setting,
)
from minipaged.models.quantized.stored import Array, Grouped, StoredMatrix, unpack

BITS = (2, 3, 4, 8)

ONES = {
    2: (0x55555555,),
    3: (0x24924924, 0x92492492, 0x49249249),
    4: (0x11111111,),
    8: (0x01010101,),
}
"""The numbers that GPTQModel subtracts in turn from the words of `qzeros` when it writes the first format. (For 3 bits
they are not 1 per field, but the reader must add the same numbers.)"""


class GPTQ(Format):
    """The GPTQ format with the settings of one or more modules."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits: int = setting(config, "bits", BITS)
        self.group_size = group_size_of(config)
        self.sym: bool = setting(config, "sym", (True, False), True)
        self.desc_act: bool = setting(config, "desc_act", (True, False), False)
        written = config.get("checkpoint_format", config.get("format"))
        if written not in (None, "gptq", "gptq_v2"):
            raise ModelError(
                f"quantization_config: checkpoint_format = {written!r} is not supported; save the model as 'gptq' or "
                "'gptq_v2' (GPTQModel: QuantizeConfig(format='gptq'))"
            )
        if config.get("pack_dtype", "int32") != "int32":
            raise ModelError(
                f"quantization_config: pack_dtype = {config['pack_dtype']!r} is not supported; only 'int32' is"
            )
        self.zeros_less_one = written != "gptq_v2"
        if self.bits == 3 and self.zeros_less_one and not self.sym and "gptqmodel" not in str(config.get("meta")):
            raise ModelError(
                "quantization_config: AutoGPTQ and GPTQModel write 3-bit zeros differently in the first GPTQ format, "
                "and the file does not name its writer; save the model as checkpoint_format 'gptq_v2'"
            )
        self.name = f"GPTQ, {self.bits} bits, groups of {self.group_size or 'a whole row'}"

    def parts(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        outputs, inputs = shape
        if inputs * self.bits % 32 or outputs * self.bits % 32:
            raise ModelError(f"a matrix of {outputs} x {inputs} does not fill 32-bit words with {self.bits}-bit codes")
        groups = divided(inputs, self.group_size or inputs)
        return {
            ".qweight": TensorSpec(("I32",), ((inputs * self.bits // 32, outputs),)),
            ".qzeros": TensorSpec(("I32",), ((groups, outputs * self.bits // 32),), required=not self.sym),
            ".scales": TensorSpec(FLOATS, ((groups, outputs),)),
            ".g_idx": TensorSpec(("I32",), ((inputs,),), required=self.desc_act),
            ".bias": TensorSpec(FLOATS, ((outputs,),), required=False),  # AutoGPTQ writes zeros if there is none
        }

    def matrix(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        check_finite(tensors, ".scales")
        if ".bias" in tensors and tensors[".bias"].values.any():
            raise ModelError(".bias is not zero; use a model without biases")
        outputs, inputs = shape
        words = np.ascontiguousarray(tensors[".qweight"].values.T)  # [out, in * bits / 32]
        size = self.group_size or inputs
        groups = None
        if ".g_idx" in tensors:
            groups = tensors[".g_idx"].values  # [in]
            last = divided(inputs, size) - 1
            if groups.min() < 0 or groups.max() > last:
                raise ModelError(f".g_idx names groups from {groups.min()} to {groups.max()}; there are 0 to {last}")
            if (groups == np.arange(inputs) // size).all():
                groups = None
        return Grouped(
            shape=shape,
            rounding=tensors[".scales"].rounding,
            bits=self.bits,
            codes=words.view(np.uint8),
            scales=np.ascontiguousarray(tensors[".scales"].values.T),
            zeros=2 ** (self.bits - 1) if self.sym else self._zeros(tensors[".qzeros"].values, outputs),
            group_size=size,
            group_index=groups,
        )

    def _zeros(self, words: Array, outputs: int) -> Array:
        """Unpack zeros: [groups, words] int32 -> [out, groups] uint8."""
        words = words.view(np.uint32)
        if self.zeros_less_one:
            words = words + np.resize(np.array(ONES[self.bits], np.uint32), words.shape[1])  # wraps around
        return np.ascontiguousarray(unpack(words.view(np.uint8), self.bits, outputs).T)


class GPTQFormats(Formats):
    """GPTQ with default settings, and other settings for modules whose names match a regular expression (`dynamic`)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.plain = GPTQ(config)
        self.dynamic = [
            (pattern_of(pattern.removeprefix("-:").removeprefix("+:")), self._meant(config, pattern, overrides))
            for pattern, overrides in (config.get("dynamic") or {}).items()
        ]

    @staticmethod
    def _meant(config: Mapping[str, Any], pattern: str, overrides: Mapping[str, Any]) -> GPTQ | None:
        return None if pattern.startswith("-:") else GPTQ({**config, **overrides})

    def of(self, module: str, dtypes: Mapping[str, str]) -> Format | None:
        for pattern, format_ in self.dynamic:
            if pattern.match(module):
                return format_
        # The head and excluded modules are not quantized, but not every file says so.
        is_plain = f"{module}.weight" in dtypes and f"{module}.qweight" not in dtypes
        return None if is_plain else self.plain
