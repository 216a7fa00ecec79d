"""Llama and related models, computed as in transformers, with keys and values in the paged cache.

One forward pass runs a batch of sequences, each with any number of query tokens: a whole prompt, a chunk of one, or one
new token. The tokens of all sequences lie one after another in a single array [tokens, hidden]; only attention needs to
know where one sequence ends and the next begins. Every layer computes

    x = x + attention(rms_norm(x))      write the new K and V into their slots, then attend through the block tables
    x = x + mlp(rms_norm(x))

and logits are computed only for the rows that want them. (In Gemma the results of attention and MLP are normalised too,
before they are added.) Weights have transformers' names and layout ([out, in] matrices) and are used in place, never
copied. Quantized weights stay packed: a product expands a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from minipaged.contracts import Batch, PromptInput, Sampled, SamplingInput
from minipaged.mirror import MirroredRunner
from minipaged.models.config import ModelConfig
from minipaged.models.quantized.stored import StoredMatrix
from minipaged.reference.attention import paged_attention
from minipaged.reference.flat_batch import FlatBatch, flatten
from minipaged.reference.handover import read_blocks, read_host_blocks
from minipaged.reference.kv_cache import Array, KVCache
from minipaged.reference.linear import Weight, linear
from minipaged.reference.preemption import carry, measure, probe_cache
from minipaged.reference.rope import Rotation, inverse_frequencies, rotary_tables, rotate
from minipaged.reference.sampling import gather_logprobs, sample
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves

Rotations = Mapping[int | None, Rotation]
"""The rotary tables by window; None: of layers without one."""
PIECE = 64
"""Prompt tokens whose logits are held at one time; each token has some 50,000 to 130,000 of them."""


class Llama(MirroredRunner):
    """Runs steps: moves blocks in `kv_cache`, computes logits, and chooses tokens from them.

    It also runs Mistral (windows), Qwen2 (biases), Qwen3 (norms of queries and keys), and Gemma 2 and 3 (all of these
    but biases, and more). See `models/config.py`.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], kv_cache: KVCache) -> None:
        """`weights`: arrays in the cache's floating-point type, by transformers' names; matrices may be packed."""
        super().__init__()
        self.config = config
        self.weights = weights
        self.kv_cache = kv_cache
        self.groups = config.groups
        self.attend = paged_attention  # the course replaces it with a student's
        self.scale = 1 / math.sqrt(config.query_pre_attn_scalar or config.head_dim)  # of the attention scores
        windows = set(config.layer_windows) or {None}
        self.inverse_frequencies = {window: inverse_frequencies(config, window) for window in windows}  # [head_dim / 2]
        norm = weights["model.layers.0.input_layernorm.weight"]
        assert isinstance(norm, np.ndarray)  # norms are never packed
        self.dtype = norm.dtype  # the dtype of the computation
        # If a model is split (`sharded.py`), not every part has a head.
        self.head = weights.get("model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight")

    def forward(self, batch: Batch) -> Array:
        """Return the logits [rows that want them, vocab_size] after the last query token of each row."""
        tokens = flatten(batch, self.kv_cache.block_size, len(self.groups.windows))
        rotations = self._rotations(tokens.positions)
        x = self._embed(tokens.ids)  # [tokens, hidden]
        for layer in range(self.config.num_hidden_layers):
            before_attention, after_attention, before_mlp, after_mlp = self._layer_norms(layer)
            y = self._attention(layer, self._norm(before_attention, x), tokens, rotations)  # [tokens, hidden]
            x = x + self._norm(after_attention, y)
            y = self._mlp(layer, self._norm(before_mlp, x))  # [tokens, hidden]
            x = x + self._norm(after_mlp, y)
        self.prompt_hidden = x[tokens.prompt_rows]  # [prompt tokens, hidden], for `prompt_logprobs`
        return self._logits(x[tokens.logit_rows])

    def _embed(self, ids: Array) -> Array:
        table = self.weights["model.embed_tokens.weight"]  # [vocab, hidden]
        x = table.rows(ids) if isinstance(table, StoredMatrix) else table[ids]  # [tokens, hidden]
        x = x.astype(self.dtype, copy=False)  # [tokens, hidden]
        return x * self.dtype.type(math.sqrt(x.shape[1])) if self.config.gemma else x  # [tokens, hidden]

    def _logits(self, x: Array) -> Array:
        assert self.head is not None
        x = self._norm("model.norm", x)  # [rows, hidden]
        logits = np.ascontiguousarray(linear(x, self.head))  # [rows, vocab]
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * np.tanh(logits / cap)  # [rows, vocab]

    def prompt_logprobs(self, inputs: Sequence[PromptInput]) -> dict[int, list[Sampled]]:
        """Return the log-probabilities of prompts, by sequence. Their logits are computed and dropped in pieces."""
        told: dict[int, list[Sampled]] = {asked.sequence: [] for asked in inputs}
        first = 0  # row of this prompt's first token in `prompt_hidden`
        for asked in inputs:
            for i in range(0, len(asked.token_ids), PIECE):
                token_ids = asked.token_ids[i : i + PIECE]
                logits = self._logits(self.prompt_hidden[first + i : first + i + len(token_ids)])  # [piece, vocab]
                told[asked.sequence] += gather_logprobs(logits, token_ids, asked.num_logprobs)
            first += len(asked.token_ids)
        return told

    def _attention(self, layer: int, x: Array, tokens: FlatBatch, rotations: Rotations) -> Array:
        name, window = f"model.layers.{layer}.self_attn", self.config.window(layer)
        q = self._heads(f"{name}.q_proj", x)  # [tokens, heads, head_dim]
        k = self._heads(f"{name}.k_proj", x)  # [tokens, kv_heads, head_dim]
        if self.config.qk_norm:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)  # each head separately
        q, k = rotate(q, rotations[window]), rotate(k, rotations[window])
        v = self._heads(f"{name}.v_proj", x)  # [tokens, kv_heads, head_dim]
        group = self.groups.of_layer[layer]
        self.kv_cache.write(layer, tokens.slots[group], k, v)
        tables, starts, lens = tokens.block_tables[group], tokens.query_start, tokens.context_lens
        cap, sinks = self.config.attn_logit_softcapping, self.weights.get(f"{name}.sinks")
        more: dict[str, Any] = {"window": window, "soft_cap": cap, "sinks": sinks}
        more = {key: value for key, value in more.items() if value is not None}  # a Llama has none of them
        out = self.attend(q, self.kv_cache, layer, tables, starts, lens, self.scale, **more)  # same shape as q
        return self._linear(f"{name}.o_proj", out.reshape(len(x), q.shape[1] * q.shape[2]))  # [tokens, hidden]

    def _mlp(self, layer: int, x: Array) -> Array:
        name = f"model.layers.{layer}.mlp"
        gate = self._linear(f"{name}.gate_proj", x)  # [tokens, intermediate]
        up = self._linear(f"{name}.up_proj", x)  # [tokens, intermediate]
        activate = gelu if self.config.gemma else silu
        return self._linear(f"{name}.down_proj", activate(gate) * up)  # [tokens, hidden]

    def _heads(self, name: str, x: Array) -> Array:
        y = self._linear(name, x)  # [tokens, heads * head_dim]
        return y.reshape(len(x), y.shape[1] // self.config.head_dim, self.config.head_dim)  # [tokens, heads, head_dim]

    def _linear(self, name: str, x: Array) -> Array:
        y = linear(x, self.weights[f"{name}.weight"])  # [tokens, out]
        bias = self.weights.get(f"{name}.bias")  # [out]
        return y if bias is None else y + bias

    def _layer_norms(self, layer: int) -> list[str | None]:
        """Return the names of the norms before and after attention, and before and after the MLP, where there are."""
        return [norm and f"model.layers.{layer}.{norm}" for norm in self.config.layer_norms]

    def _rotations(self, positions: Array) -> Rotations:
        """Return the rotary tables of layers, by their windows: Gemma 3 has other frequencies in layers with one."""
        frequencies = self.inverse_frequencies.items()
        return {window: rotary_tables(positions, each, self.dtype) for window, each in frequencies}

    def _norm(self, name: str | None, x: Array) -> Array:
        if name is None:
            return x
        weight = self.weights[f"{name}.weight"]  # [hidden]
        assert isinstance(weight, np.ndarray)
        return rms_norm(x, weight, self.config.rms_norm_eps)  # same shape as x

    def move(self, moves: BlockMoves) -> None:
        """Carry out the moves in this order: swap out, poison, swap in, copy, load."""
        carry(self.kv_cache, moves)

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        return read_blocks(self.kv_cache, blocks)

    def read_host_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        return read_host_blocks(self.kv_cache, blocks)

    def sample(self, logits: Array, inputs: Sequence[SamplingInput]) -> list[Sampled]:
        """Choose one token for each input."""
        return sample(logits, inputs)

    def costs(self) -> Costs:
        """Return what swapping and recomputing cost on this machine. They are measured once, at the first call."""
        return self._costs

    @cached_property
    def _costs(self) -> Costs:
        probe = Llama(self.config, self.weights, probe_cache(self.kv_cache))
        return measure(self.kv_cache, probe.forward, len(self.groups.windows))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Divide each row of x [..., size] by its root mean square, and multiply by a weight for each dimension."""
    mean_square = np.vecdot(x, x)[..., None] / x.shape[-1]  # [..., 1]
    normed: Array = x / np.sqrt(mean_square + eps) * weight  # [..., size]
    return normed


def silu(x: Array) -> Array:
    """Return x × sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp(-x) may be inf, and then x / inf = 0 is right
        activated: Array = x / (1 + np.exp(-x))  # [tokens, intermediate]
    return activated


def gelu(x: Array) -> Array:
    """Return x × (probability that a normal variate is below x), with tanh in place of the exact probability."""
    inner = math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)  # [tokens, intermediate]
    activated: Array = 0.5 * x * (1 + np.tanh(inner))  # [tokens, intermediate]
    return activated
