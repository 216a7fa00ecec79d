"""One rank's part of a Llama, and its communication with the others (paper, section 4.6; Megatron, arXiv 1909.08053).

The twin of `reference/sharded.py`. `models/shards.py` assigns the parts. Each rank runs the usual `Llama` on its own
heads, columns of the MLP, and rows of the vocabulary. Each matrix does its own communication:

    o, down      columns of the whole matrix: each rank has a summand of the product             summed over the ranks
    embedding    rows of the vocabulary: one rank has a token's row, the others produce zeros    summed over the ranks
    head         rows of the vocabulary: each rank has the logits of its tokens                  concatenated

That is two sums per layer, one for the embedding, and one exchange of logits. Afterwards every rank has all logits of
the step. Each rank chooses the same tokens from them, because random numbers are computed from counters, so no rank has
to send its choice to the others.

In pipeline parallelism, a stage is a `Llama` with some of the layers. Its input, in place of the embedding, comes from
the previous stage; its output, in place of logits, goes to the next one. Only the last stage chooses tokens. The others
receive the tokens once they are known (`StageLlama.tell`); with a lane for each stage, that is before they need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from minipaged.contracts import PromptInput, Sampled, SamplingInput, StepResult
from minipaged.fast.kernels import Linear
from minipaged.fast.kv_cache import KVCache
from minipaged.fast.llama import FlatBatch, Llama, Weights
from minipaged.models.config import ModelConfig
from minipaged.models.quantized.stored import StoredMatrix
from minipaged.models.shards import Shard, shard_of
from minipaged.steps import StepInput


class Ranks(Protocol):
    """One rank's connection to the other ranks of its model."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks of this stage, in rank order, each with the shape and type of `x`. All ranks
        must make these calls in the same order."""

    def hand_on(self, x: Tensor) -> None:
        """Send x to the rank with the same number in the next stage. `x` must not change afterwards."""

    def take(self, x: Tensor) -> None:
        """Wait for the tensor of the rank with the same number in the previous stage, and fill x with it."""


def over_ranks(weights: Weights, config: ModelConfig, shard: Shard, ranks: Ranks) -> Weights:
    """Wrap one rank's own weights (`models.shards.cut`) so that they combine the ranks' results.

    `config`: the whole model's.
    """
    embed, head, layers = weights.embed, weights.head, weights.layers
    if shard.size > 1:
        sizes = [len(shard_of(config, rank, shard.size).vocab) for rank in range(shard.size)]
        layers = [replace(each, o=SummedLinear(each.o, ranks), down=SummedLinear(each.down, ranks)) for each in layers]
        head = head and SplitHead(head, sizes, ranks)
        embed = embed and SplitEmbedding(embed, shard.vocab, ranks)
    if not shard.is_first:
        embed = TakenOver(config.hidden_size, layers[0].input_norm, ranks)
    return replace(weights, embed=embed, layers=layers, head=head)


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the ranks' tensors, rounded once to their type. It adds in rank order, so that the result does
    not depend on the transport. (gloo's own sum adds three or more ranks in another order; for two the result is the
    same.)"""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


class SummedLinear(Linear):
    """Some columns of a matrix. The output is the sum of all ranks' products."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        """Only one rank's part has the bias."""
        self.nbytes = part.nbytes
        self._part, self._ranks = part, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return summed(self._ranks.gather(self._part(x)))


class SplitEmbedding:
    """Some rows of the embedding. The output combines the rows of all ranks."""

    def __init__(self, part: Callable[[Tensor], Tensor], vocab: range, ranks: Ranks) -> None:
        """`part`: maps row numbers, from 0, to [tokens, hidden]. `vocab`: the tokens whose rows this rank has."""
        self._part, self._vocab, self._ranks = part, vocab, ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Map token ids [tokens] to [tokens, hidden]."""
        row = token_ids - self._vocab.start
        is_ours = (row >= 0) & (row < len(self._vocab))
        ours = self._part(row.where(is_ours, 0)).where(is_ours[:, None], 0)
        return summed(self._ranks.gather(ours))


class SplitHead(Linear):
    """Some rows of the head. The output concatenates the logits of all ranks."""

    def __init__(self, part: Linear, sizes: Sequence[int], ranks: Ranks) -> None:
        """`sizes`: the number of rows of each rank."""
        self.nbytes = part.nbytes
        self._part, self._sizes, self._ranks = part, sizes, ranks

    def __call__(self, x: Tensor) -> Tensor:
        """Map [tokens, hidden] to [tokens, vocab_size]."""
        logits = self._part(x)  # [tokens, rows of this rank]
        most = max(self._sizes)
        even = torch.nn.functional.pad(logits, (0, most - logits.shape[1]))  # [tokens, most]
        parts = self._ranks.gather(even)
        return torch.cat([part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], 1)


class TakenOver:
    """The input of a stage that is not the first: the previous stage's output, in place of an embedding."""

    def __init__(self, hidden_size: int, like: Tensor, ranks: Ranks) -> None:
        self._hidden_size, self._like, self._ranks = hidden_size, like, ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return [tokens, hidden] for token ids [tokens]. Only the number of ids is used."""
        x = self._like.new_empty(len(token_ids), self._hidden_size)
        self._ranks.take(x)
        return x


class StageLlama(Llama):
    """A stage that is not the last one. It makes no logits, and receives the chosen tokens from outside."""

    chooses = False

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | Mapping[str, Tensor | StoredMatrix],
        kv_cache: KVCache,
        *,
        ranks: Ranks,
        **sizes: Any,
    ) -> None:
        """`sizes`: as for `Llama`."""
        self._ranks = ranks
        self._untold: dict[int, ToldLater] = {}  # by step
        super().__init__(config, weights, kv_cache, **sizes)

    def run(self, step: StepInput) -> StepResult:
        if step.fresh:
            self._untold = {number: one for number, one in self._untold.items() if one.lane != step.lane}
        result = super().run(step)
        assert isinstance(result.choices, ToldLater)
        result.choices.lane = step.lane
        if len(result.choices):
            self._untold[step.number] = result.choices
        return result

    def tell(self, number: int, token_ids: Sequence[int]) -> None:
        """Receive the tokens chosen in step `number`. This must precede the next step in its lane."""
        if number in self._untold:  # no longer there if the lane has had a fresh step since
            self._untold.pop(number).token_ids = token_ids

    def sample(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
        return ToldLater(len(inputs))

    def prompt_logprobs(self, inputs: Sequence[PromptInput]) -> dict[int, Sequence[Sampled]]:
        return {}

    def _leave(self, tokens: FlatBatch, x: Tensor, residual: Tensor) -> Tensor:
        """Hand on the sum that the next layer would have made. The next stage uses it like an embedding."""
        self._ranks.hand_on(residual.add_(x))
        return self._no_logits()


class ToldLater(Sequence[Sampled]):
    """Choices that another stage makes. Only the tokens become known here, without log-probabilities."""

    def __init__(self, count: int) -> None:
        self.token_ids: Sequence[int] | None = None if count else ()
        self.lane = 0
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sampled]:
        assert self.token_ids is not None, "a lane goes on before its tokens are known"
        return (Sampled(token, 0.0, None) for token in self.token_ids)

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]
