"""A model quantized layer by layer, each matrix for the inputs that it will receive.

GPTQ and AWQ need the inputs of a matrix. So a calibration text runs through the model, all its tokens through one layer
after another. When the pass reaches a matrix, the matrix is quantized, and the pass goes on with the quantized one. The
inputs are therefore those of a model quantized so far, and each matrix can compensate for the errors of the ones before
it. (GPTQ, section 5, "setup"; its authors also go matrix by matrix within a layer, as "true sequential".)

The pass is a one-layer Llama of the reference tier; the only difference is that a product quantizes its matrix first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minipaged.contracts import BatchRow
from minipaged.errors import ModelError
from minipaged.models.config import ModelConfig
from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import Array, Grouped
from minipaged.reference.flat_batch import FlatBatch, flatten
from minipaged.reference.kv_cache import KVCache
from minipaged.reference.linear import Weight
from minipaged.reference.llama import Llama
from minipaged.reference.quantize.awq import awq_clipped, awq_scales
from minipaged.reference.quantize.gptq import gptq
from minipaged.reference.quantize.rtn import rtn

BLOCK_SIZE = 64
"""The block size of the calibration's KV cache, in tokens."""


@dataclass(frozen=True, slots=True)
class Fed:
    """Matrices of a layer that have the same inputs, and where these come from."""

    names: tuple[str, ...]
    source: str
    """The norm or matrix that produces the inputs; scaling its weights scales them."""


FED = (
    Fed(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    Fed(("self_attn.o_proj",), "self_attn.v_proj"),
    Fed(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    Fed(("mlp.down_proj",), "mlp.up_proj"),
)
"""The groups of matrices, in the order in which a pass reaches them."""
NOT_CLIPPED = ("self_attn.q_proj", "self_attn.k_proj")
"""Matrices that AWQ does not clip: the products of their outputs decide the attention, and large outputs matter most.
"""


def quantize_layers(
    config: ModelConfig, weights: Mapping[str, Array], recipe: Recipe, windows: Sequence[Sequence[int]]
) -> Iterator[dict[str, Weight]]:
    """Yield what changes in each layer, by transformers' names: stored matrices, and with AWQ also scaled norms.

    `windows`: a calibration text's token ids, in pieces that do not attend to each other; round-to-nearest does not use
    them. Raises ModelError if weights, or inputs of matrices, are not finite.
    """
    if recipe.method == "rtn":
        for i in range(config.num_hidden_layers):
            names = [f"model.layers.{i}.{name}.weight" for fed in FED for name in fed.names]
            yield {name: rtn(weights[name], recipe) for name in names}
        return
    tokens, num_blocks = in_one_batch(windows)
    x = weights["model.embed_tokens.weight"][tokens.ids]  # [tokens, hidden]
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        own = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        one = replace(config, num_hidden_layers=1, layer_windows=config.layer_windows[i : i + 1])
        layer = LayerInMaking(one, own, recipe, num_blocks)
        try:
            x = layer.through(x, tokens)
        except ModelError as error:
            raise ModelError(f"layer {i}: {error}") from None
        yield {prefix + name.removeprefix(FIRST): each for name, each in layer.made.items()}


def in_one_batch(windows: Sequence[Sequence[int]]) -> tuple[FlatBatch, int]:
    """Return the windows as the prompts of one batch, each in its own blocks, and the number of blocks used."""
    rows, used = [], 0
    for ids in windows:
        blocks = range(used, used := used + -(-len(ids) // BLOCK_SIZE))
        rows.append(BatchRow(ids, 0, blocks, wants_logits=False))
    return flatten(rows, BLOCK_SIZE), used


FIRST = "model.layers.0."


class LayerInMaking(Llama):
    """A one-layer Llama that quantizes each matrix when its inputs arrive."""

    def __init__(self, config: ModelConfig, own: Mapping[str, Array], recipe: Recipe, num_blocks: int) -> None:
        """`config`: of the one layer. `own`: its weights: "input_layernorm.weight", ..."""
        cache = KVCache(1, num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        self.made: dict[str, Weight] = {}
        """The changed weights, by their names in this Llama."""
        self._recipe = recipe
        self._scales: dict[str, Array] = {}  # matrix -> scales [in] by which its inputs still have to be divided
        whole = {FIRST + name: each for name, each in own.items()}
        super().__init__(config, whole, cache)

    def through(self, x: Array, tokens: FlatBatch) -> Array:
        """Return x [tokens, hidden] after the quantized layer; the layer is quantized on the way."""
        rotations = self._rotations(tokens.positions)
        x = x + self._attention(0, self._norm(f"{FIRST}input_layernorm", x), tokens, rotations)
        return x + self._mlp(0, self._norm(f"{FIRST}post_attention_layernorm", x))

    def _linear(self, name: str, x: Array) -> Array:
        """Multiply x [tokens, in] by a matrix, which is quantized now unless it already has been."""
        for fed in FED:
            if name == FIRST + fed.names[0]:
                self._quantize(fed, x)
        if name in self._scales:
            x = x / self._scales[name]  # [tokens, in]
        return super()._linear(name, x)

    def _quantize(self, fed: Fed, x: Array) -> None:
        names = [FIRST + name for name in fed.names]
        weights = [np.asarray(self.weights[f"{name}.weight"]) for name in names]  # [out, in] each
        hessian = x.T @ x / x.dtype.type(len(x))  # [in, in]
        if not np.isfinite(hessian).all():
            raise ModelError(f"the inputs of {fed.names[0]} are infinite or NaN")
        if self._recipe.method == "gptq":
            self._make(
                {f"{name}.weight": gptq(w, hessian, self._recipe) for name, w in zip(names, weights, strict=True)}
            )
            return
        if self._can_scale(fed):
            scales = awq_scales(weights, hessian, np.abs(x).mean(axis=0), self._recipe)  # [in]
            weights = [w * scales for w in weights]  # [out, in] each
            hessian = hessian / scales / scales[:, None]  # [in, in]
            self._scales |= dict.fromkeys(names, scales)
            self._divide(f"{FIRST}{fed.source}.weight", scales)
        for name, short, weight in zip(names, fed.names, weights, strict=True):
            make = rtn(weight, self._recipe) if short in NOT_CLIPPED else awq_clipped(weight, hessian, self._recipe)
            self._make({f"{name}.weight": make})

    def _can_scale(self, fed: Fed) -> bool:
        """Whether the inputs correspond one to one to the source's rows.

        Where heads share values (grouped-query attention), a row of v_proj makes several inputs of o_proj; and a bias
        would have to be divided too.
        """
        source = self.weights[f"{FIRST}{fed.source}.weight"]
        num_inputs = self.weights[f"{FIRST}{fed.names[0]}.weight"].shape[1]
        return source.shape[0] == num_inputs and f"{FIRST}{fed.source}.bias" not in self.weights

    def _divide(self, name: str, scales: Array) -> None:
        """Divide the outputs of a norm, or of a quantized matrix, by `scales` [out]. Dividing a row of a quantized
        matrix divides its scales and leaves its codes unchanged."""
        weight = self.weights[name]
        if isinstance(weight, Grouped):
            divided = (weight.scales / scales[:, None]).astype(np.float16)  # [out, groups]
            self._make({name: replace(weight, scales=divided)})
        else:
            self._make({name: np.asarray(weight) / scales})  # [hidden]

    def _make(self, made: Mapping[str, Weight]) -> None:
        self.made |= made
        self.weights = {**self.weights, **made}
