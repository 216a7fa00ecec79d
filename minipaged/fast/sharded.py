"""One rank's part of a Llama, and what it exchanges with the others (paper, section 4.6; Megatron, arXiv 1909.08053).

The twin of `reference/sharded.py`. Which part is whose, `models/shards.py` says. A rank runs the same `Llama` as ever,
over its own heads, columns of the MLP, and rows of the vocabulary; what the parts have to be put together for, its
matrices do by themselves:

    o, down      columns of the whole matrix: each rank has a summand of the product           summed over the ranks
    embedding    rows of the vocabulary: a token's row is with one rank, the others have zeros summed over the ranks
    head         rows of the vocabulary: each rank has the logits of its tokens                 laid side by side

Two sums a layer, one for the embedding, one exchange of logits. Then every rank has all logits of the step, and chooses
the same tokens by them (the numbers that are drawn are counted, not remembered), so that nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from minipaged.fast.kernels import Linear
from minipaged.fast.llama import Weights
from minipaged.models.config import ModelConfig
from minipaged.models.shards import Shard, shard_of


class Group(Protocol):
    """The ranks of one model, as one of them sees them. All of them make the same calls in the same order."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """What each rank has given, in their order: tensors of the shape and type of `x`, which may be one of them."""


def over_ranks(weights: Weights, config: ModelConfig, shard: Shard, group: Group) -> Weights:
    """One rank's own weights (`models.shards.cut`), with what it takes to put the ranks' results together.

    `config`: the whole model's.
    """
    layers = [
        replace(layer, o=SummedLinear(layer.o, group), down=SummedLinear(layer.down, group)) for layer in weights.layers
    ]
    embed = SplitEmbedding(weights.embed, shard.vocab, group)
    sizes = [len(shard_of(config, rank, shard.size).vocab) for rank in range(shard.size)]
    return replace(weights, embed=embed, layers=layers, head=SplitHead(weights.head, sizes, group))


def summed(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what the ranks have, added in their order, so that it does not depend on how they were exchanged.
    (gloo's own sum of three or more ranks is in another order; of two it is the same.) Rounded once, to their type."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


class SummedLinear(Linear):
    """Some columns of a matrix, times the inputs that belong to them; and the same of the other ranks, added."""

    def __init__(self, part: Linear, group: Group) -> None:
        """A bias is with one rank only."""
        self.nbytes = part.nbytes
        self._part, self._group = part, group

    def __call__(self, x: Tensor) -> Tensor:
        return summed(self._group.gather(self._part(x)))


class SplitEmbedding:
    """Some rows of the embedding, and the same of the other ranks."""

    def __init__(self, part: Callable[[Tensor], Tensor], vocab: range, group: Group) -> None:
        """`part`: row numbers, from 0, -> [tokens, hidden]. `vocab`: the tokens whose rows these are."""
        self._part, self._vocab, self._group = part, vocab, group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token ids [tokens] -> [tokens, hidden]."""
        row = token_ids - self._vocab.start
        is_ours = (row >= 0) & (row < len(self._vocab))
        ours = self._part(row.where(is_ours, 0)).where(is_ours[:, None], 0)
        return summed(self._group.gather(ours))


class SplitHead(Linear):
    """Some rows of the head, and the same of the other ranks."""

    def __init__(self, part: Linear, sizes: Sequence[int], group: Group) -> None:
        """`sizes`: how many rows each rank has."""
        self.nbytes = part.nbytes
        self._part, self._sizes, self._group = part, sizes, group

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, vocab_size]."""
        logits = self._part(x)  # [tokens, rows of this rank]
        most = max(self._sizes)
        even = torch.nn.functional.pad(logits, (0, most - logits.shape[1]))  # [tokens, most]
        parts = self._group.gather(even)
        return torch.cat([part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], 1)
