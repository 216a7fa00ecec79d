"""compressed-tensors: the format of llm-compressor and vLLM. It is one container for several layouts.

    pack-quantized         weight_packed      int32 [out, words]     codes of 2 to 8 bits, one stream per row
    int-quantized          weight             int8 [out, in]
    float-quantized        weight             F8_E4M3 [out, in]
    nvfp4-pack-quantized   weight_packed      uint8 [out, in / 2]    two 4-bit floats per byte, the low half first
    mxfp4-pack-quantized   like nvfp4, but the scales are powers of 2

    weight_scale [out, groups] or [out, 1] or [1] or [blocks, blocks]; weight_zero_point if not symmetric

Packed codes and packed zero points are whole numbers plus half the range. The config assigns modules to groups by name,
by regular expression ("re:...") or by class ("Linear"), and each group has its own settings. `ignore` names the modules
that are not quantized. A group may also quantize the inputs, either with a new scale for each token or with one scale
from calibration (`input_scale`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from minipaged.errors import ModelError
from minipaged.models.quantized.format import (
    FLOATS,
    Format,
    Formats,
    Tensor,
    TensorSpec,
    check_finite,
    check_float8,
    divided,
    group_size_of,
    pattern_of,
    setting,
)
from minipaged.models.quantized.fp8 import float_scales
from minipaged.models.quantized.stored import (
    Activations,
    Array,
    Codebook4,
    Float8,
    Grouped,
    StoredMatrix,
    e4m3_values,
    unpack,
)

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
"""The value of each code of the lower 3 bits in a 4-bit float. The upper bit is the sign."""

WEIGHTS = "quantization_config: config_groups"


class CompressedTensors(Format):
    """The format of one group of modules, with the group's settings."""

    def __init__(self, group: Mapping[str, Any], layout: str) -> None:
        weights = group["weights"]
        self.layout: str = setting({"format": group.get("format") or layout}, "format", tuple(LAYOUTS))
        self.bits: int = setting(weights, "num_bits", LAYOUTS[self.layout])
        whole = self.layout in ("pack-quantized", "int-quantized")
        if self.layout == "naive-quantized":  # either of two layouts, depending on the type
            whole = weights.get("type") == "int"
            self.layout = "int-quantized" if whole else "float-quantized"
        setting(weights, "type", ("int",) if whole else ("float",))
        self.symmetric: bool = setting(weights, "symmetric", (True, False) if whole else (True,), True)
        strategies: tuple[str, ...] = ("tensor", "channel", "group", "block")
        if "fp4" in self.layout:
            strategies = ("group", "tensor_group")
        self.strategy: str = setting(weights, "strategy", strategies)
        self.group_size = None
        if "group" in self.strategy:
            self.group_size = group_size_of(weights)
        if self.strategy == "block":
            self.block = _block(weights)
        if group.get("output_activations"):
            raise ModelError(
                f"{WEIGHTS}: quantized outputs are not supported; use a checkpoint without output_activations"
            )
        self.inputs = _activations(group.get("input_activations"))
        self.name = f"compressed-tensors, {self.layout}, {self.bits} bits, one scale a {self.strategy}"

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The number of outputs and of inputs that share a scale."""
        outputs, inputs = shape
        match self.strategy:
            case "tensor":
                return outputs, inputs
            case "channel":
                return 1, inputs
            case "block":
                return self.block
        return 1, self.group_size or inputs

    def parts(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        outputs, inputs = shape
        across, along = self.block_of(shape)
        scales: tuple[tuple[int, ...], ...] = ((divided(outputs, across), divided(inputs, along)),)
        if self.strategy == "tensor":
            scales += ((1,), ())
        parts = {}
        if self.layout == "pack-quantized":
            parts[".weight_packed"] = TensorSpec(("I32",), ((outputs, divided(inputs * self.bits, 32)),))
            parts[".weight_shape"] = TensorSpec(("I64", "I32"), ((2,),), required=False)
            parts[".weight_scale"] = TensorSpec(FLOATS, scales)
            if not self.symmetric:
                packed = ((divided(scales[0][0] * self.bits, 32), scales[0][1]),)
                parts[".weight_zero_point"] = TensorSpec(("I32",), packed)
            parts[".weight_g_idx"] = TensorSpec(("I32", "I64"), ((inputs,),), required=False)
        elif self.layout == "int-quantized":
            parts[".weight"] = TensorSpec(("I8",), (shape,))
            parts[".weight_scale"] = TensorSpec(FLOATS, scales)
            if not self.symmetric:
                parts[".weight_zero_point"] = TensorSpec(("I8",), scales)
        elif self.layout == "float-quantized":
            parts[".weight"] = TensorSpec(("F8_E4M3",), (shape,))
            parts[".weight_scale"] = TensorSpec(FLOATS, scales)
        else:
            if inputs % along:
                raise ModelError(f"a matrix of {outputs} x {inputs} does not divide into groups of {along} inputs")
            nvfp4 = self.layout.startswith("nvfp4")
            parts[".weight_packed"] = TensorSpec(("U8",), ((outputs, inputs // 2),))
            parts[".weight_scale"] = TensorSpec(("F8_E4M3",) if nvfp4 else ("U8", "F8_E8M0"), scales)
            if nvfp4:
                parts[".weight_global_scale"] = TensorSpec(("F32",), ((1,), ()))
        if self.inputs is not None and self.is_calibrated:
            parts[".input_scale"] = TensorSpec(FLOATS, ((1,), ()))
            if not self.inputs.symmetric:
                parts[".input_zero_point"] = TensorSpec(("I8",), ((1,), ()))
        return parts

    def matrix(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredMatrix:
        check_finite(tensors, ".weight_scale", ".weight_global_scale", ".input_scale")
        activations = self._calibrated(tensors)
        if self.layout == "float-quantized":
            return self._floats(shape, tensors, activations)
        if "fp4" in self.layout:
            return self._codebook(shape, tensors, activations)
        return self._grouped(shape, tensors, activations)

    @property
    def is_calibrated(self) -> bool:
        """Whether the checkpoint contains the inputs' scale."""
        return self.inputs is not None and self.inputs.scale is not None

    def _calibrated(self, tensors: Mapping[str, Tensor]) -> Activations | None:
        if self.inputs is None or not self.is_calibrated:
            return self.inputs
        scale = float(tensors[".input_scale"].values.reshape(()))
        zero = 0 if self.inputs.symmetric else int(tensors[".input_zero_point"].values.reshape(()))
        if scale <= 0:
            raise ModelError(f".input_scale is {scale}; expected a positive number")
        return Activations(self.inputs.kind, symmetric=self.inputs.symmetric, scale=scale, zero=zero)

    def _grouped(
        self, shape: tuple[int, int], tensors: Mapping[str, Tensor], activations: Activations | None
    ) -> StoredMatrix:
        outputs, inputs = shape
        across, along = self.block_of(shape)
        scales = tensors[".weight_scale"].values.reshape(divided(outputs, across), -1)  # [blocks, groups]
        zeros: Array | int = 2 ** (self.bits - 1)
        if self.layout == "pack-quantized":
            _check_shape(tensors, shape)
            words = np.ascontiguousarray(tensors[".weight_packed"].values)  # [out, words]
            codes = words.view(np.uint8)[:, : divided(inputs * self.bits, 8)]
            if not self.symmetric:
                words = np.ascontiguousarray(tensors[".weight_zero_point"].values.T)  # [groups, words]
                zeros = np.ascontiguousarray(unpack(words.view(np.uint8), self.bits, len(scales)).T)
        else:
            codes = _unsigned(tensors[".weight"].values)
            if not self.symmetric:
                zeros = _unsigned(tensors[".weight_zero_point"].values).reshape(scales.shape)
        if across > 1:  # repeat the scales and zeros of a block for each output
            block = np.arange(outputs) // across
            scales = scales[block]
            zeros = zeros if isinstance(zeros, int) else zeros[block]
        index = None
        if ".weight_g_idx" in tensors and (tensors[".weight_g_idx"].values >= 0).all():  # -1: groups are in order
            index = tensors[".weight_g_idx"].values.astype(np.int32)
            if index.max() >= scales.shape[1]:
                raise ModelError(f".weight_g_idx names group {index.max()}; there are 0 to {scales.shape[1] - 1}")
        return Grouped(
            shape=shape,
            rounding=tensors[".weight_scale"].rounding,
            activations=activations,
            bits=self.bits,
            codes=np.ascontiguousarray(codes),
            scales=scales,
            zeros=zeros,
            group_size=along,
            group_index=index,
        )

    def _floats(
        self, shape: tuple[int, int], tensors: Mapping[str, Tensor], activations: Activations | None
    ) -> StoredMatrix:
        check_float8(tensors, ".weight")
        across, along = self.block_of(shape)
        return Float8(
            shape=shape,
            rounding=tensors[".weight_scale"].rounding,
            activations=activations,
            codes=tensors[".weight"].values,
            scales=tensors[".weight_scale"].values.reshape(divided(shape[0], across), -1),
            block=(across, along),
        )

    def _codebook(
        self, shape: tuple[int, int], tensors: Mapping[str, Tensor], activations: Activations | None
    ) -> StoredMatrix:
        stored = tensors[".weight_scale"]
        if self.layout.startswith("nvfp4"):
            check_float8(tensors, ".weight_scale")
            whole = tensors[".weight_global_scale"].values.reshape(())
            if whole <= 0:
                raise ModelError(f".weight_global_scale is {whole}; expected a positive number")
            scales = e4m3_values()[stored.values] / whole
        else:
            scales = float_scales(Tensor(stored.values, "F8_E8M0"), ".weight_scale")
        table = np.array(E2M1, np.float32)
        return Codebook4(
            shape=shape,
            rounding="bfloat16",
            activations=activations,
            codes=tensors[".weight_packed"].values,
            table=np.concatenate((table, -table)),
            scales=scales,
            group_size=self.block_of(shape)[1],
        )


LAYOUTS: dict[str, tuple[int, ...]] = {
    "pack-quantized": (4, 8, 3, 2, 5, 6),
    "int-quantized": (8,),
    "float-quantized": (8,),
    "naive-quantized": (8,),
    "nvfp4-pack-quantized": (4,),
    "mxfp4-pack-quantized": (4,),
}
"""The supported layouts, each with the supported numbers of bits."""


def _check_shape(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    if ".weight_shape" in tensors and tuple(tensors[".weight_shape"].values) != shape:
        raise ModelError(f".weight_shape reads {tensors['.weight_shape'].values.tolist()}; expected {list(shape)}")


def _unsigned(values: Array) -> Array:
    """Convert int8 to uint8 by adding 128."""
    return values.view(np.uint8) ^ np.uint8(128)


def _block(weights: Mapping[str, Any]) -> tuple[int, int]:
    block = weights.get("block_structure")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ModelError(f"{WEIGHTS}: block_structure = {block!r}; expected two whole numbers")
    return block[0], block[1]


def _activations(config: Mapping[str, Any] | None) -> Activations | None:
    """The quantization of the inputs. Its scale is a placeholder of 1 if the checkpoint contains the actual one."""
    if not config:
        return None
    setting(config, "num_bits", (8,))
    type_: str = setting(config, "type", ("int", "float"))
    kind: Literal["int8", "float8"] = "int8" if type_ == "int" else "float8"
    symmetric: bool = setting(config, "symmetric", (True, False) if kind == "int8" else (True,), True)
    if not setting(config, "dynamic", (True, False), False):
        setting(config, "strategy", ("tensor",))
        return Activations(kind, symmetric=symmetric, scale=1.0)
    # With one scale for a whole batch, the result of a request would depend on the other requests.
    strategy: str = setting(config, "strategy", ("token", "group"))
    return Activations(kind, group_size_of(config) if strategy == "group" else None, symmetric)


class CompressedTensorsFormats(Formats):
    """The format of each module, by the group it belongs to."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        for key in ("transform_config", "sparsity_config"):
            if (config.get(key) or {}).get("format", config.get(key) or "dense") != "dense":
                raise ModelError(f"quantization_config: {key} is not supported; use a checkpoint without it")
        self.ignore = _patterns(config, "ignore")
        self.groups: list[tuple[list[re.Pattern[str]], Format]] = []
        for name, group in (config.get("config_groups") or {}).items():
            if not isinstance(group, dict):
                raise ModelError(f"{WEIGHTS}: {name} reads {group!r}")
            if not group.get("weights"):
                raise ModelError(f"{WEIGHTS}: {name} quantizes no weights; use the original model")
            layout = str(config.get("format", "dense"))
            self.groups.append((_patterns(group, "targets"), CompressedTensors(group, layout)))
        if kv_cache := config.get("kv_cache_scheme"):
            setting(kv_cache, "num_bits", (8,))
            setting(kv_cache, "strategy", ("tensor", "attn_head"))
            setting(kv_cache, "symmetric", (True,), True)
            type_ = setting(kv_cache, "type", ("int", "float"), "int")
            # Dynamic scales are in no file: any checkpoint can have them, if the user sets kv_cache_dtype.
            if not setting(kv_cache, "dynamic", (True, False), False):
                self.kv_cache_dtype = "int8" if type_ == "int" else "fp8"

    def of(self, module: str, dtypes: Mapping[str, str]) -> Format | None:
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        if any(pattern.match(module) or pattern.match(kind) for pattern in self.ignore):
            return None
        for meant in (module, kind):  # a name comes before a class
            for patterns, format_ in self.groups:
                if any(pattern.match(meant) for pattern in patterns):
                    return format_
        return None


def _patterns(config: Mapping[str, Any], key: str) -> list[re.Pattern[str]]:
    """Regular expressions for the entries of `config[key]`: plain names, or expressions with the prefix "re:"."""
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"quantization_config: {key} = {names!r}; expected a list of names")
    return [
        pattern_of(name.removeprefix("re:") if name.startswith("re:") else rf"{re.escape(name)}\Z") for name in names
    ]
