"""The interface of the fast tier's kernels: each kernel's job, shapes and types.

Two sets implement the same functions: `gpu/` in Triton, `cpu/` in numba and torch. Each set, and this interface, is
divided by the room that calls the kernels. The rest of the fast tier calls kernels through this interface, and
`kernels_for` (`__init__.py`) selects the set. A new kernel is described here and written in both sets.

"The model's type" is float32 or bfloat16 on a CPU; float32, float16 or bfloat16 on a GPU. Unless stated otherwise,
tensors are contiguous and on one device. Kernels do not check the numbers that they receive, because on a GPU the host
would have to wait for them. A row, position, slot or block out of range is the caller's error, and makes a kernel read
or overwrite other memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minipaged.models.quantized.stored import StoredMatrix


class Shared(NamedTuple):
    """Prefixes that sequences share. Their members are the sequences that begin with them, each with one at most."""

    members: Tensor
    """[members] int32: indices of sequences in the batch, prefix after prefix."""
    starts: Tensor
    """[prefixes + 1] int32: prefix g has the members from starts[g] to starts[g + 1] - 1."""
    num_tokens: Tensor
    """[prefixes] int32: the tokens of each prefix. Its blocks are full, and end before every member's query."""


class Paged(NamedTuple):
    """The keys and values of a batch of sequences, in blocks: one layer's pool, and where each sequence lies in it."""

    keys: Tensor
    """[num_blocks, kv_heads, block_size, head_dim] of the model's type, or codes of 8 bits. The query tokens' own keys
    are already there."""
    values: Tensor
    """Values, of the shape, type and strides of `keys`: both are views of one layer of the cache."""
    tables: Tensor
    """[num_rows, max_blocks] int32: block tables."""
    rows: Tensor
    """[seqs] int32: the row of `tables` that each sequence owns."""
    context_lens: Tensor
    """[seqs] int32: the tokens of each sequence, query tokens included. In `paged_decode` 0 is padding: the kernel
    reads nothing for it and returns zeros."""
    scales: Tensor | None = None
    """The scales of keys and values in 8 bits (`KVCacheKernels`: `kv_scales`); None for the model's type."""
    shared: Shared | None = None
    """Sequences whose common blocks `paged_decode` may read once for all of them. None: each reads its own. There are
    none in a layer with a window, whose queries do not see the beginnings of their contexts."""
    window: int | None = None
    """The number of tokens that a query sees, its own included. Blocks that lie before the window of a sequence's first
    query are not read, and their entries in `tables` may be anything. None: a query sees all tokens up to its own."""
    soft_cap: float | None = None
    """Scores become soft_cap × tanh(score / soft_cap). None: they stay as they are."""
    sinks: Tensor | None = None
    """[heads] float32: a score for each head, of no token, which joins the softmax's denominator. None: there is none.
    """


class AttentionKernels(Protocol):
    """Paged attention. Query head h reads key/value head h // (heads / kv_heads)."""

    def paged_decode(self, query: Tensor, paged: Paged, scale: float) -> Tensor:
        """Attention of one query token per sequence over its whole context.

        `paged.shared` changes the speed, and on a CPU no bit of the result. On a GPU the result differs by rounding.

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
    """The block tables of a batch: `tables` is [num_rows, max_blocks] int32, and each sequence owns a row.

    Entries of a row past its sequence's last block are leftovers of a former owner and have no meaning.
    """

    def edit_tables(self, tables: Tensor, edits: Tensor) -> None:
        """Set single entries of many tables: blocks appended, or replaced after a copy-on-write.

        edits: [n, 3] int32: (row, logical block, physical block). No two edits may set the same entry.
        """

    def fork_tables(self, tables: Tensor, forks: Tensor) -> None:
        """Copy the leading entries of parents' tables to their children's: parallel sampling and beam search.

        forks: [n, 3] int32: (parent row, child row, number of entries). A parent may have many children, but a child's
        row must be distinct from all other children's and from all parents' rows. The rest of the child's row is
        unchanged.
        """

    def slot_mapping(self, tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
        """Return the slots [n] int32 of n tokens: token i is at `positions[i]` of the sequence that owns row `rows[i]`.

        rows, positions: [n] int32.
        """

    def advance_decode(
        self, tables: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, context_lens: Tensor, block_size: int
    ) -> None:
        """Move each sequence of a decoding batch to its next position, whose block must already be in `tables`.

        rows: [n] int32. positions: [n] int32, incremented in place. -1 is the position before the first token; a lower
        position is padding and stays. slots: [n] int32, output: the new position's slot, -1 for padding. context_lens:
        [n] int32, output: the number of tokens up to and including that position, 0 for padding.
        """


class KVCacheKernels(Protocol):
    """Keys and values of the model's type: `cache` is [num_blocks, num_layers, 2, kv_heads, block_size, head_dim].

    `keys` and `values` are one layer's views of it, [num_blocks, kv_heads, block_size, head_dim], with equal strides.

    In an 8-bit cache, `keys` and `values` are int8, or e4m3 floats as their bits in uint8. `kv_scales` is the layer's
    [num_blocks, 2, kv_heads, block_size] float32; the 2 is keys, values, and its blocks are as many bytes apart as the
    keys' blocks. The kernels divide, in float32, by a scale for each token and head: its largest absolute value over
    127 (int8) or 448 (e4m3), at least the smallest normal float32, and NaN if a number is NaN. Or they divide by the
    layer's `static_scales` [2, kv_heads] float32, 2: keys, values. Then numbers too large for the code are clamped to
    the largest code, and if a number is infinite or NaN, so is the stored scale.
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
        """Rotate each token's query and key by its position, and store its key and value in its slot.

        qkv: [tokens, (num_heads + 2 * kv_heads) * head_dim]: query, key and value of each token, the result of one
            matrix product. It may be overwritten.
        cos, sin: [max_positions, head_dim / 2] float32.
        positions, slots: [tokens] int32. Slot -1 is padding: nothing is written, and the position may be negative.
        qk_norm: [2, head_dim], the weights by which each query head and key head is first normalized, as in
            `LlamaKernels.rms_norm`. None: no normalization.

        Returns the rotated queries [tokens, num_heads, head_dim]. In 8 bits, keys are rounded once, from float32.
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

        slots: [tokens] int32 or int64; for -1 nothing is written. k, v: [tokens, kv_heads, head_dim]; the tokens may be
        strided.
        """

    def copy_blocks(self, cache: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks, for copy-on-write: all layers, keys and values. In 8 bits `cache` is [num_blocks, bytes].

        pairs: [n, 2] int32 or int64: (source, destination). Destinations must be distinct, and none may be a source.
        """

    def poison_blocks(self, cache: Tensor, blocks: Tensor) -> None:
        """Fill blocks [n] int32 or int64 with NaN (debugging). In 8 bits `cache` is all scales, strided by blocks."""


class Linear(Protocol):
    """A linear layer: multiplies by a matrix [out, in] and adds a bias [out] if it has one."""

    nbytes: int
    """The number of bytes that a product reads of the matrix."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x times the matrix's transpose, plus the bias. x: [tokens, in] of the model's type; result:
        [tokens, out]."""


class Matrix(Linear, Protocol):
    """A linear layer whose rows can be read too. With tied embeddings, it is both the head and the embedding."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` [n] (integers) of the matrix: [n, in] of the model's type."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    input_norm: Tensor  # [hidden], before attention
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qk_norm: Tensor | None  # [2, head_dim]
    o: Linear  # [hidden, heads * head_dim]
    post_norm: Tensor  # [hidden], before the MLP
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]
    attention_norm: Tensor | None = None  # [hidden], of attention's result; Gemma only
    mlp_norm: Tensor | None = None  # [hidden], of the MLP's result; Gemma only
    sinks: Tensor | None = None  # [heads] float32


class RunLayers(Protocol):
    """A function that runs sequences with one query token each through all layers."""

    most_tokens: int
    """The number of sequences up to which it is faster than layer by layer."""

    def __call__(
        self,
        residual: Tensor,
        positions: Tensor,
        slots: Tensor,
        tables: Tensor,
        rows: Tensor,
        context_lens: Tensor,
        shared: Shared | None = None,
    ) -> Tensor:
        """Return the output of the last layer, [seqs, hidden]. The residual [seqs, hidden] is overwritten.

        positions, slots: [seqs]. The others: as in `Paged`.
        """


class LlamaKernels(Protocol):
    """The other kernels of a Llama. All tensors are of the model's type. Norms are rounded where transformers rounds:
    before the weight is applied, and after."""

    def computing(self, *, throughout: bool = True, kind: Hashable = None) -> AbstractContextManager[None]:
        """Return a context in which the calling Python thread calls kernels.

        throughout: nearly all of the time. kind: equal where the same work is done; None: there is no other like it.
        """

    def linears(
        self,
        sizes: Sequence[tuple[int, int]],
        weights: Iterable[Tensor | StoredMatrix],
        biases: Sequence[Tensor | None],
        like: Tensor,
    ) -> list[Matrix]:
        """Prepare all matrices of a model for products.

        sizes: (out, in) of each of `weights`, in order.
        weights: the next one is taken when the one before it is done, so that they need not all be in memory.
        biases: [out] each, None for a matrix without one.
        like: a tensor on the device and of the model's type, since packed matrices name neither.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return each row of x [tokens, hidden] divided by its root mean square, times the weight [hidden]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual, in place, and return the norm of the sum. x, residual: [tokens, hidden]."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [tokens, intermediate] of the two halves of gate_up [tokens, 2 * intermediate].

        silu(z) = z / (1 + exp(-z)). Computed in float32, rounded once.
        """

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, as `swiglu` does with silu.

        gelu(z) = z / (1 + exp(-2 u)), with u = sqrt(2 / pi) * (z + 0.044715 z³): GELU with tanh.
        """

    def in_one_call(
        self,
        layers: Sequence[Layer],
        views: Sequence[tuple[Tensor, Tensor]],
        windows: Sequence[int | None],
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        scale: float,
        eps: float,
    ) -> RunLayers | None:
        """Return a function that runs sequences with one query token each through all layers, or None if these layers
        do not support it or gain nothing by it. (On a CPU, layers with sinks do not.)

        views: each layer's keys and values. windows: each layer's (`Paged`). cos, sin: as in `rope_and_write`.
        scale: of the scores. eps: of the norms.
        """


class SamplingKernels(Protocol):
    """The parts of sampling that read whole rows of logits [rows, vocab]. Logits are float32 or float64; on a GPU also
    float16 or bfloat16. Rows may be strided."""

    def largest(self, values: Tensor, count: int) -> Tensor:
        """Return the indices [rows, count] int64 of the `count` largest of each row of `values` [rows, n], the largest
        first; on ties, the lowest index. `count`: 1 to n. For a row that holds NaN, any indices."""

    def argmax_logsumexp(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each row of logits the likeliest token, its logit (the peak), and log(sum(exp(logit - peak))).

        Returns token_ids [rows] int64, peaks [rows] float64, log_totals [rows] float64. The log-probability of any
        token is `logit - peak - log_total`. Ties go to the lowest id. For a row that holds NaN, the peak is NaN and the
        id is that of the first NaN. `log_total` is valid only if the peak is finite.
        """

    def likeliest_allowed(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return for each input i the likeliest token of row rows[i] of `logits` among those that allowed[i] allows,
        its logit, and the peak and log_total of the whole row (see `argmax_logsumexp`).

        rows: [inputs] int64. allowed: [inputs, ceil(vocab / 32)] int32; bit `t & 31` of word `t >> 5` says whether
        token t is allowed, and bits past the last token mean nothing.

        Returns token_ids [inputs] int64, their logits [inputs] float64 (-inf if no token is left; the id is then any),
        peaks [inputs] float64, log_totals [inputs] float64. Ties go to the lowest id. For a row that holds NaN, the
        peak is NaN, and the id is that of the first NaN, whether allowed or not.
        """

    def allowed_only(self, table: Tensor, allowed: Tensor) -> None:
        """Set the logits that allowed[i] does not allow to minus infinity, in each row i of `table` [n, vocab] float64.
        `allowed` [n, words] is that of `likeliest_allowed`."""

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
        allowed: Tensor | None = None,
    ) -> Tensor:
        """Draw tokens. Distribution i is row rows[i] of `logits` with a temperature and filters. Draw j uses
        distribution distributions[j] and the random number uniforms[j].

        For each distribution, [n]: rows int64, peaks float64 (the largest logit), temperatures float64, min_logprobs
            float64 (log of `min_p`, -inf for none), top_ks int64 (0 or less for none), shares float64 (the probability
            that `top_p` may cut off, 0 for none).
        For each draw, [m]: distributions int64, in rising order; uniforms float64 in [0, 1).
        depth: the most logits that a distribution's filters need in order: `vocab` if any share is above 0, else the
            largest of the `top_ks`, else 0. It is passed so that the host need not read `top_ks` and `shares` from a
            GPU.
        allowed: [n, ceil(vocab / 32)] int32, the tokens that each distribution may draw, in the bits of
            `likeliest_allowed`; `peaks` are then those of the allowed tokens. None: all.

        Returns [m] int64: the first token whose cumulative weight exceeds uniforms[j] of the total weight. Weights are
        summed in float64, in order of token id.
        """

    def uniform(
        self, seeds: NDArray[np.uint64], streams: NDArray[np.uint64], positions: NDArray[np.uint64]
    ) -> NDArray[np.float64]:
        """Return a number in [0, 1) for each (seed, stream, position): 53 bits of Philox4x32-10. All [n], on the
        host."""


class Kernels(AttentionKernels, BlockTableKernels, KVCacheKernels, LlamaKernels, SamplingKernels, Protocol):
    """The interface of a complete set of kernels: `minipaged.fast.gpu` or `minipaged.fast.cpu`."""
