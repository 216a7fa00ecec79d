"""Llama and related models, computed as in transformers, with keys and values in the paged cache.

One forward pass runs a batch of sequences, each with any number of query tokens: a whole prompt, a chunk of one, or one
new token. The tokens of all sequences lie one after another in a single array [tokens, hidden]; only attention needs to
know where one sequence ends and the next begins. Every layer computes

    x = x + attention(rms_norm(x))      write the new K and V into their slots, then attend through the block tables
    x = x + swiglu(rms_norm(x))

and logits are computed only for the rows that want them. Weights have transformers' names and layout ([out, in]
matrices) and are used in place, never copied. Quantized weights stay packed: a product expands a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from minipaged.contracts import Batch, PromptInput, Sampled, SamplingInput
from minipaged.mirror import MirroredRunner
from minipaged.models.config import ModelConfig
from minipaged.models.quantized.stored import StoredMatrix
from minipaged.reference.attention import paged_attention
from minipaged.reference.handover import read_blocks, read_host_blocks
from minipaged.reference.kv_cache import Array, KVCache
from minipaged.reference.linear import Weight, linear
from minipaged.reference.preemption import carry, measure, probe_cache
from minipaged.reference.sampling import gather_logprobs, sample
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves

PIECE = 64
"""Prompt tokens whose logits are held at one time; each token has some 50,000 to 130,000 of them."""


class Llama(MirroredRunner):
    """Runs steps: moves blocks in `kv_cache`, computes logits, and chooses tokens from them.

    It also runs Mistral, Qwen2 (biases) and Qwen3 (norms of queries and keys). See `models/config.py`.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], kv_cache: KVCache) -> None:
        """`weights`: arrays in the cache's floating-point type, by transformers' names; matrices may be packed."""
        super().__init__()
        self.config = config
        self.weights = weights
        self.kv_cache = kv_cache
        self.attend = paged_attention  # the course replaces it with a student's
        self.scale = 1 / math.sqrt(config.head_dim)  # of the attention scores
        self.inverse_frequencies = inverse_frequencies(config)  # [head_dim / 2]
        norm = weights["model.layers.0.input_layernorm.weight"]
        assert isinstance(norm, np.ndarray)  # norms are never packed
        self.dtype = norm.dtype  # the dtype of the computation
        # If a model is split (`sharded.py`), not every part has a head.
        self.head = weights.get("model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight")

    def forward(self, batch: Batch) -> Array:
        """Return the logits [rows that want them, vocab_size] after the last query token of each row."""
        tokens = flatten(batch, self.kv_cache.block_size)
        rotation = rotary_tables(tokens.positions, self.inverse_frequencies, self.dtype)
        x = self._embed(tokens.ids)  # [tokens, hidden]
        for layer in range(self.config.num_hidden_layers):
            x = x + self._attention(layer, self._norm(f"model.layers.{layer}.input_layernorm", x), tokens, rotation)
            x = x + self._swiglu(layer, self._norm(f"model.layers.{layer}.post_attention_layernorm", x))
        self.prompt_hidden = x[tokens.prompt_rows]  # [prompt tokens, hidden], for `prompt_logprobs`
        return self._logits(x[tokens.logit_rows])

    def _embed(self, ids: Array) -> Array:
        table = self.weights["model.embed_tokens.weight"]  # [vocab, hidden]
        if isinstance(table, StoredMatrix):
            return table.rows(ids).astype(self.dtype, copy=False)  # [tokens, hidden]
        return table[ids]  # [tokens, hidden]

    def _logits(self, x: Array) -> Array:
        assert self.head is not None
        x = self._norm("model.norm", x)  # [rows, hidden]
        return np.ascontiguousarray(linear(x, self.head))  # [rows, vocab]

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

    def _attention(self, layer: int, x: Array, tokens: FlatBatch, rotation: tuple[Array, Array]) -> Array:
        name = f"model.layers.{layer}.self_attn"
        q = self._heads(f"{name}.q_proj", x)  # [tokens, heads, head_dim]
        k = self._heads(f"{name}.k_proj", x)  # [tokens, kv_heads, head_dim]
        if self.config.qk_norm:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)  # each head separately
        q, k = rotate(q, rotation), rotate(k, rotation)
        v = self._heads(f"{name}.v_proj", x)  # [tokens, kv_heads, head_dim]
        self.kv_cache.write(layer, tokens.slots, k, v)
        tables, starts, lens = tokens.block_tables, tokens.query_start, tokens.context_lens
        out = self.attend(q, self.kv_cache, layer, tables, starts, lens, self.scale)  # [tokens, heads, head_dim]
        return self._linear(f"{name}.o_proj", out.reshape(len(x), q.shape[1] * q.shape[2]))  # [tokens, hidden]

    def _swiglu(self, layer: int, x: Array) -> Array:
        name = f"model.layers.{layer}.mlp"
        gate = self._linear(f"{name}.gate_proj", x)  # [tokens, intermediate]
        up = self._linear(f"{name}.up_proj", x)  # [tokens, intermediate]
        return self._linear(f"{name}.down_proj", silu(gate) * up)  # [tokens, hidden]

    def _heads(self, name: str, x: Array) -> Array:
        y = self._linear(name, x)  # [tokens, heads * head_dim]
        return y.reshape(len(x), y.shape[1] // self.config.head_dim, self.config.head_dim)  # [tokens, heads, head_dim]

    def _linear(self, name: str, x: Array) -> Array:
        y = linear(x, self.weights[f"{name}.weight"])  # [tokens, out]
        bias = self.weights.get(f"{name}.bias")  # [out]
        return y if bias is None else y + bias

    def _norm(self, name: str, x: Array) -> Array:
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
        return measure(self.kv_cache, probe.forward)


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch as arrays: the query tokens of all sequences, one after another."""

    ids: Array  # [tokens]
    positions: Array  # [tokens]
    slots: Array  # [tokens]
    query_start: Array  # [seqs + 1]
    context_lens: Array  # [seqs]
    block_tables: Array  # [seqs, max_blocks], padded with -1
    logit_rows: Array  # [rows that want logits], indices of their last query tokens
    prompt_rows: Array  # [prompt tokens], indices of the tokens that predict a next prompt token


def flatten(batch: Batch, block_size: int) -> FlatBatch:
    """Lay the rows of a batch out one after another."""
    query_lens = np.array([len(row.token_ids) for row in batch], dtype=np.int64)  # [seqs]
    first = np.array([row.first_position for row in batch], dtype=np.int64)  # [seqs]
    query_start = np.zeros(len(batch) + 1, dtype=np.int64)  # [seqs + 1]
    np.cumsum(query_lens, out=query_start[1:])
    max_blocks = max((len(row.blocks) for row in batch), default=0)
    block_tables = np.full((len(batch), max_blocks), -1, dtype=np.int64)  # [seqs, max_blocks]
    for table, row in zip(block_tables, batch, strict=True):
        table[: len(row.blocks)] = row.blocks
    return FlatBatch(
        ids=np.array([token for row in batch for token in row.token_ids], dtype=np.int64),
        positions=np.arange(query_start[-1]) + np.repeat(first - query_start[:-1], query_lens),
        slots=np.array([slot for row in batch for slot in row.slots(block_size)], dtype=np.int64),
        query_start=query_start,
        context_lens=first + query_lens,
        block_tables=block_tables,
        logit_rows=query_start[1:][[row.wants_logits for row in batch]] - 1,
        prompt_rows=np.array(
            [at + i for at, row in zip(query_start, batch, strict=False) for i in range(row.num_prompt_logits)],
            dtype=np.int64,
        ),
    )


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


def rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotate each pair of dimensions (i, i + head_dim / 2) of x [tokens, heads, head_dim] by its angle."""
    cos, sin = rotation  # [tokens, 1, head_dim / 2] each
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]  # [tokens, heads, head_dim / 2] each
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)  # [tokens, heads, head_dim]


def rotary_tables(positions: Array, frequencies: Array, dtype: npt.DTypeLike) -> tuple[Array, Array]:
    """Return cos and sin of every angle position × frequency: [tokens, 1, head_dim / 2] each, to broadcast over heads.

    The angles are float32 whatever `dtype` is, as in transformers: near position 8000 they are multiples of 0.0005.
    """
    angles = (positions[:, None].astype(np.float32) * frequencies)[:, None]  # [tokens, 1, head_dim / 2]
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def inverse_frequencies(config: ModelConfig) -> Array:
    """Return the rotary frequency of each pair of dimensions, in radians per position: [head_dim / 2] float32.

    Powers are rounded where transformers rounds them: a frequency's last bit makes 0.001 radians at position 8000.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)  # [head_dim / 2]
    powers = (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)  # [head_dim / 2], rounded once
    frequencies: Array = 1 / powers  # [head_dim / 2]
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    stretched: Array = frequencies / scaling.factor  # [head_dim / 2]
    if scaling.rope_type == "linear":
        return stretched
    # llama3: keep the short wavelengths, stretch the long ones, and blend in between.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # [head_dim / 2] within that context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)  # [head_dim / 2]
    keep = np.clip(keep, 0, 1)  # [head_dim / 2]: 1 keeps, 0 stretches
    return keep * frequencies + (1 - keep) * stretched  # [head_dim / 2]
