"""A model quantized layer by layer, each matrix for the inputs that it will have.

GPTQ and AWQ ask what a matrix is given. So a calibration text runs through the model, all of its tokens through one
layer after another; and when the pass comes to a matrix, the matrix is quantized, and the pass goes on with what it has
become. Inputs are therefore those of a model quantized so far: each matrix may make up for what the ones before it
spoil. (GPTQ, section 5, "setup"; its authors go matrix by matrix within a layer too, as "true sequential".)

The pass is the reference tier's own Llama, of one layer: what is different is that products quantize first.
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
from minipaged.reference.kv_cache import KVCache
from minipaged.reference.linear import Weight
from minipaged.reference.llama import FlatBatch, Llama, flatten, rotary_tables
from minipaged.reference.quantize.awq import awq_clipped, awq_scales
from minipaged.reference.quantize.gptq import gptq
from minipaged.reference.quantize.rtn import rtn

BLOCK_SIZE = 64
"""Of the calibration's KV cache, in tokens."""


@dataclass(frozen=True, slots=True)
class Fed:
    """Matrices of a layer that have the same inputs, and what those come from."""

    names: tuple[str, ...]
    source: str
    """A norm, or a matrix: by its weights the inputs can be scaled."""


FED = (
    Fed(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    Fed(("self_attn.o_proj",), "self_attn.v_proj"),
    Fed(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    Fed(("mlp.down_proj",), "mlp.up_proj"),
)
"""In the order in which a pass comes to them."""
NOT_CLIPPED = ("self_attn.q_proj", "self_attn.k_proj")
"""AWQ: their outputs meet each other, and large ones decide what is attended to."""


def quantize_layers(
    config: ModelConfig, weights: Mapping[str, Array], recipe: Recipe, windows: Sequence[Sequence[int]]
) -> Iterator[dict[str, Weight]]:
    """What changes, layer by layer and by transformers' names: each matrix becomes a stored one; AWQ scales norms too.

    `windows`: a calibration text's token ids in pieces, which do not see each other; not used by round-to-nearest.
    Raises ModelError for weights, or inputs of matrices, that are no finite numbers.
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
        layer = LayerInMaking(config, own, recipe, num_blocks)
        try:
            x = layer.through(x, tokens)
        except ModelError as error:
            raise ModelError(f"layer {i}: {error}") from None
        yield {prefix + name.removeprefix(FIRST): each for name, each in layer.made.items()}


def in_one_batch(windows: Sequence[Sequence[int]]) -> tuple[FlatBatch, int]:
    """The windows as the prompts of one batch, each in blocks of its own; and how many blocks that takes."""
    rows, used = [], 0
    for ids in windows:
        blocks = range(used, used := used + -(-len(ids) // BLOCK_SIZE))
        rows.append(BatchRow(ids, 0, blocks, wants_logits=False))
    return flatten(rows, BLOCK_SIZE), used


FIRST = "model.layers.0."


class LayerInMaking(Llama):
    """A Llama of one layer, which quantizes each matrix when its inputs come."""

    def __init__(self, config: ModelConfig, own: Mapping[str, Array], recipe: Recipe, num_blocks: int) -> None:
        """`own`: the layer's weights: "input_layernorm.weight", ..."""
        cache = KVCache(1, num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        self.made: dict[str, Weight] = {}
        """What has changed, by its name in this Llama."""
        self._recipe = recipe
        self._scales: dict[str, Array] = {}  # by the matrix: what its inputs are yet to be divided by, [in]
        whole = {FIRST + name: each for name, each in own.items()}
        super().__init__(replace(config, num_hidden_layers=1), whole, cache)

    def through(self, x: Array, tokens: FlatBatch) -> Array:
        """x [tokens, hidden] before the layer -> after it, as it is when quantized."""
        rotation = rotary_tables(tokens.positions, self.inverse_frequencies, x.dtype)
        x = x + self._attention(0, self._norm(f"{FIRST}input_layernorm", x), tokens, rotation)
        return x + self._swiglu(0, self._norm(f"{FIRST}post_attention_layernorm", x))

    def _linear(self, name: str, x: Array) -> Array:
        """x [tokens, in] through a matrix that is quantized now, unless it has been."""
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
            raise ModelError(f"{fed.names[0]} is given numbers that are infinite or none at all")
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
        """Whether the source's rows are these inputs one by one. Where heads share values (grouped-query attention), a
        row of v_proj is several inputs of o_proj; and a bias would have to be divided too."""
        source = self.weights[f"{FIRST}{fed.source}.weight"]
        num_inputs = self.weights[f"{FIRST}{fed.names[0]}.weight"].shape[1]
        return source.shape[0] == num_inputs and f"{FIRST}{fed.source}.bias" not in self.weights

    def _divide(self, name: str, scales: Array) -> None:
        """The outputs of a norm, or of a matrix that has been quantized already, by `scales` [out]. A row's codes stay
        the same when the row is divided; its scales are divided."""
        weight = self.weights[name]
        if isinstance(weight, Grouped):
            divided = (weight.scales / scales[:, None]).astype(np.float16)  # [out, groups]
            self._make({name: replace(weight, scales=divided)})
        else:
            self._make({name: np.asarray(weight) / scales})  # [hidden]

    def _make(self, made: Mapping[str, Weight]) -> None:
        self.made |= made
        self.weights = {**self.weights, **made}
