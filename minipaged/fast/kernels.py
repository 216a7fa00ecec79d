"""The kernels of the fast tier: what each of them does, with its shapes and types.

There are two sets with the same functions: `gpu/` in Triton, `cpu/` in numba and torch. Each has a file for each room
that calls kernels, and so is this interface divided. All else of the fast tier calls kernels through it, and asks
`kernels_for` (`__init__.py`) which set that is. A new kernel is described here, and written in both.

"The model's type" is float32 or bfloat16 on a CPU; float32, float16 or bfloat16 on a GPU. Where nothing else is said,
tensors are contiguous and on one device. Kernels do not look at the numbers that they are handed (on a GPU the host
would have to wait for them): a row, position, slot or block outside its range is the caller's fault, and reads or
overwrites other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minipaged.models.quantized.stored import StoredMatrix


class Paged(NamedTuple):
    """The keys and values of a batch of sequences, in blocks: one layer's pool, and where each sequence lies in it."""

    keys: Tensor
    """[num_blocks, kv_heads, block_size, head_dim] of the model's type, or codes of 8 bits. The query tokens' own keys
    are already there."""
    values: Tensor
    """The same shape, type and strides as `keys`: both are views of one layer of the cache."""
    tables: Tensor
    """[num_rows, max_blocks] int32: block tables."""
    rows: Tensor
    """[seqs] int32: the row of `tables` that each sequence owns."""
    context_lens: Tensor
    """[seqs] int32: the tokens of each sequence, query tokens included. In `paged_decode` 0 is padding: the kernel
    reads nothing for it and returns zeros."""
    scales: Tensor | None = None
    """The scales of keys and values in 8 bits (`KVCacheKernels`: `kv_scales`); None for the model's type."""


class AttentionKernels(Protocol):
    """Paged attention. Query head h reads key/value head h // (heads / kv_heads)."""

    def paged_decode(self, query: Tensor, paged: Paged, scale: float) -> Tensor:
        """Attention of one query token per sequence over its whole context.

        query: [seqs, heads, head_dim] of the model's type. scale: the factor of the scores, positive.

        Returns [seqs, heads, head_dim].
        """

    def paged_prefill(
        self, query: Tensor, paged: Paged, query_start: Tensor, scale: float, *, max_query_len: int
    ) -> Tensor:
        """Causal attention of sequences with any number of query tokens each: prompts, chunks, single tokens.

        query: [tokens, heads, head_dim] of the model's type, sequence after sequence. Sequence s has the tokens
            query_start[s] to query_start[s + 1] - 1, the last of its context_lens[s] positions. Each token attends to
            the positions up to its own.
        query_start: [seqs + 1] int32.
        scale: the factor of the scores, positive.
        max_query_len: the most query tokens of one sequence, passed so that the host need not read it from a GPU.

        Returns [tokens, heads, head_dim].
        """


class BlockTableKernels(Protocol):
    """All block tables of a batch: `tables` is [num_rows, max_blocks] int32, and a sequence owns a row.

    What a row holds past its sequence's last block is left over from its former owners and means nothing.
    """

    def edit_tables(self, tables: Tensor, edits: Tensor) -> None:
        """Set single entries of many tables: blocks appended, or replaced after a copy-on-write.

        edits: [n, 3] int32: (row, logical block, physical block). No two may set the same entry.
        """

    def fork_tables(self, tables: Tensor, forks: Tensor) -> None:
        """Begin child tables with the leading entries of their parents': parallel sampling and beam search.

        forks: [n, 3] int32: (parent row, child row, number of entries). One parent may have many children, but no
        child's row may be a parent's row too, or come twice. The rest of the child's row stays as it was.
        """

    def slot_mapping(self, tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
        """The slots of n tokens: of position `positions[i]` in the sequence that owns row `rows[i]`.

        rows, positions: [n] int32. Returns [n] int32.
        """

    def advance_decode(
        self, tables: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, context_lens: Tensor, block_size: int
    ) -> None:
        """Move every sequence of a decoding batch to its next position, whose block `tables` has already.

        rows: [n] int32. positions: [n] int32, in place: one more. -1 stands before the first token; what is less is
        padding, and stays. slots: [n] int32, written: that position's slot, -1 for padding. context_lens: [n] int32,
        written: the number of tokens up to it, itself included; 0 for padding.
        """


class KVCacheKernels(Protocol):
    """Keys and values of the model's type: `cache` is [num_blocks, num_layers, 2, kv_heads, block_size, head_dim].

    `keys` and `values` are one layer's views of it, [num_blocks, kv_heads, block_size, head_dim], strided alike.

    Or they are kept in 8 bits. Then `keys` and `values` are int8, or the bits of e4m3 floats in uint8, and `kv_scales`
    is the layer's [num_blocks, 2, kv_heads, block_size] float32, the 2 standing for keys and values, of which blocks
    are as many bytes apart as those of the keys. What is written is divided, in float32, by a scale for each token and
    head: its largest number over 127 or 448, at least the smallest normal float32; it is NaN where there is one. Or by
    `static_scales` [2, kv_heads] float32, of the layer's keys and values, and what is too large becomes the largest
    that there is a code for; where a number is infinite or NaN, the scale is so as well.
    """

    def rope_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
        qk_norm: Tensor | None = None,
        eps: float = 0.0,
        kv_scales: Tensor | None = None,
        static_scales: Tensor | None = None,
    ) -> Tensor:
        """Rotate the query and key of each token by its position; store key and value into its slot.

        qkv: [tokens, (num_heads + 2 * kv_heads) * head_dim]: query, key, value of each token, as one matrix product
        makes them. cos, sin: [max_positions, head_dim / 2] float32. positions, slots: [tokens] int32; slot -1 is
        padding: nothing is written, and the position may be negative. qk_norm: [2, head_dim], weights with which each
        query head and each key head is normalised first, as by `LlamaKernels.rms_norm`, perhaps in place: `qkv` is used
        up. None: they are not. In 8 bits, keys are rounded once, from float32. Returns the rotated queries [tokens,
        num_heads, head_dim].
        """

    def write(
        self,
        slots: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        kv_scales: Tensor | None = None,
        static_scales: Tensor | None = None,
    ) -> None:
        """Store keys and values that are rotated already.

        slots: [tokens] int32 or int64; -1: nothing is written. k, v: [tokens, kv_heads, head_dim], of which tokens may
        be strided.
        """

    def copy_blocks(self, cache: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks, for copy-on-write: all layers, keys and values. In 8 bits `cache` is [num_blocks, bytes].

        pairs: [n, 2] int32 or int64: (source, destination). No destination may be a source too, or come twice.
        """

    def poison_blocks(self, cache: Tensor, blocks: Tensor) -> None:
        """Fill blocks [n] int32 or int64 with NaN (debugging). In 8 bits `cache` is all scales, strided by blocks."""


class Linear(Protocol):
    """What multiplies by a matrix [out, in], and adds a bias [out] that it may have."""

    nbytes: int
    """What of it a product reads."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in] of the model's type times the matrix's transpose, plus the bias: [tokens, out]."""


class Matrix(Linear, Protocol):
    """One of which rows can be read: where embedding and head are tied, it is both."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n], whole numbers: [n, in] of the model's type."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qk_norm: Tensor | None  # [2, head_dim]
    o: Linear  # [hidden, heads * head_dim]
    post_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]


class LlamaKernels(Protocol):
    """What a Llama does beside attention; all tensors are of the model's type. Norms are rounded where transformers
    rounds: to the type before the weight, and after it."""

    def use_threads(self) -> None:
        """Prepare this thread of Python for a step."""

    def linears(
        self,
        sizes: Sequence[tuple[int, int]],
        weights: Iterable[Tensor | StoredMatrix],
        biases: Sequence[Tensor | None],
        like: Tensor,
    ) -> list[Matrix]:
        """All matrices of a model, ready to be multiplied by. `sizes`: (out, in) of each of `weights`, in their order.
        `biases`: [out] each, None for a matrix without one. `like`: a tensor of the device and of the model's type,
        which packed matrices do not tell.

        Each of `weights` is taken when the one before it is done, so that they need not all be in memory.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Each row of x [tokens, hidden] divided by its root mean square, times the weight [hidden]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual, in place, and return the norm of the sum. x, residual: [tokens, hidden]."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, of the two halves of gate_up [tokens, 2 * intermediate]: [tokens, intermediate].

        silu(z) = z / (1 + exp(-z)). Computed in float32, rounded once.
        """

    def one_token(
        self, layers: Sequence[Layer], views: Sequence[tuple[Tensor, Tensor]], num_heads: int
    ) -> Callable[..., Tensor] | None:
        """Return a function that runs a batch of one token through all layers, or None if these layers do not support
        it or gain nothing by it. `views`: each layer's keys and values.

        The function takes the residual [1, hidden], which it overwrites; cos and sin; the token's position and slot
        [1]; `tables`, `rows` and `context_lens` as in `Paged`; the scale of scores; and the norms' epsilon. It returns
        the output of the last layer, [1, hidden].
        """


class SamplingKernels(Protocol):
    """What of sampling goes over whole rows of logits [rows, vocab]: float32 or float64; on a GPU float16 and bfloat16
    too. Rows may be strided."""

    def argmax_logsumexp(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each row of logits: the likeliest token, its logit (the peak), and log(sum(exp(logit - peak))).

        Returns token_ids [rows] int64, peaks [rows] float64, log_totals [rows] float64. The log-probability of any
        token is `logit - peak - log_total`. Ties go to the lowest id. A row that holds NaN has the peak NaN and the id
        of its first NaN; `log_total` means something only where the peak is finite.
        """

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        peaks: Tensor,
        temperatures: Tensor,
        min_logprobs: Tensor,
        top_ks: Tensor,
        shares: Tensor,
        distributions: Tensor,
        uniforms: Tensor,
        *,
        depth: int,
    ) -> Tensor:
        """Draw tokens. Distribution i is row rows[i] of `logits` with a temperature and filters; draw j is made from
        distribution distributions[j], with the number uniforms[j].

        Of each distribution, [n]: rows int64, peaks float64 (the largest logit), temperatures float64, min_logprobs
        float64 (log of `min_p`, -inf for none), top_ks int64 (0 or less for none), shares float64 (the probability that
        `top_p` may cut off, 0 for none). Of each draw, [m]: distributions int64, in rising order; uniforms float64 in
        [0, 1). depth: how many of the largest logits some distribution's filters need in order (nobody waits for a GPU
        to read `top_ks` and `shares`): the largest of the `top_ks`, `vocab` where a share is not 0, 0 without either.

        Returns [m] int64: the first token at which the sum of weights, in float64 and in order of token id, exceeds its
        share of the whole.
        """

    def uniform(
        self, seeds: NDArray[np.uint64], streams: NDArray[np.uint64], positions: NDArray[np.uint64]
    ) -> NDArray[np.float64]:
        """A number in [0, 1) for each (seed, stream, position): 53 bits of Philox4x32-10. All [n], on the host."""


class Kernels(AttentionKernels, BlockTableKernels, KVCacheKernels, LlamaKernels, SamplingKernels, Protocol):
    """All of them: `minipaged.fast.gpu` or `minipaged.fast.cpu`."""
