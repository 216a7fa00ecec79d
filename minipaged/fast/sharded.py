"""One rank's part of a Llama, and what it exchanges with the others (paper, section 4.6; Megatron, arXiv 1909.08053).

The twin of `reference/sharded.py`. Which part is whose, `models/shards.py` says. A rank runs the same `Llama` as ever,
over its own heads, columns of the MLP, and rows of the vocabulary. What the parts have to be put together for, its
matrices do by themselves:

    o, down      columns of the whole matrix: each rank has a summand of the product            summed over the ranks
    embedding    rows of the vocabulary: a token's row is with one rank, the others have zeros  summed over the ranks
    head         rows of the vocabulary: each rank has the logits of its tokens                 laid side by side

Two sums a layer, one for the embedding, one exchange of logits. Then every rank has all logits of the step, and chooses
the same tokens by them (the numbers that are drawn are counted, not remembered), so that nobody has to be told.

Of a model that is cut into stages, a stage is a `Llama` with some of the layers. What goes in comes from the stage
before, in the place of the embedding; what comes out goes to the next one, in the place of logits. Only the last stage
chooses tokens, and the others are told when they are known (`StageLlama.tell`): with a lane for each stage that is
before they need them.
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
    """The ranks of one model, as one of them sees them."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """What each rank of this stage has given, in their order: tensors of the shape and type of `x`. All of them
        call it, in the same order of calls."""

    def hand_on(self, x: Tensor) -> None:
        """Give x to the rank with the same number in the next stage. `x` must not change any more."""

    def take(self, x: Tensor) -> None:
        """Fill x with what the rank with the same number in the stage before has given, when it has."""


def over_ranks(weights: Weights, config: ModelConfig, shard: Shard, ranks: Ranks) -> Weights:
    """One rank's own weights (`models.shards.cut`), with what it takes to put the ranks' results together.

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
    """The sum of what the ranks have, added in their order, so that it does not depend on how they were exchanged.
    (gloo's own sum of three or more ranks is in another order; of two it is the same.) Rounded once, to their type."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


class SummedLinear(Linear):
    """Some columns of a matrix, times the inputs that belong to them; and the same of the other ranks, added."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        """A bias is with one rank only."""
        self.nbytes = part.nbytes
        self._part, self._ranks = part, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return summed(self._ranks.gather(self._part(x)))


class SplitEmbedding:
    """Some rows of the embedding, and the same of the other ranks."""

    def __init__(self, part: Callable[[Tensor], Tensor], vocab: range, ranks: Ranks) -> None:
        """`part`: row numbers, from 0, -> [tokens, hidden]. `vocab`: the tokens whose rows these are."""
        self._part, self._vocab, self._ranks = part, vocab, ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token ids [tokens] -> [tokens, hidden]."""
        row = token_ids - self._vocab.start
        is_ours = (row >= 0) & (row < len(self._vocab))
        ours = self._part(row.where(is_ours, 0)).where(is_ours[:, None], 0)
        return summed(self._ranks.gather(ours))


class SplitHead(Linear):
    """Some rows of the head, and the same of the other ranks."""

    def __init__(self, part: Linear, sizes: Sequence[int], ranks: Ranks) -> None:
        """`sizes`: how many rows each rank has."""
        self.nbytes = part.nbytes
        self._part, self._sizes, self._ranks = part, sizes, ranks

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, vocab_size]."""
        logits = self._part(x)  # [tokens, rows of this rank]
        most = max(self._sizes)
        even = torch.nn.functional.pad(logits, (0, most - logits.shape[1]))  # [tokens, most]
        parts = self._ranks.gather(even)
        return torch.cat([part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], 1)


class TakenOver:
    """What the stage before has made of the tokens."""

    def __init__(self, hidden_size: int, like: Tensor, ranks: Ranks) -> None:
        self._hidden_size, self._like, self._ranks = hidden_size, like, ranks

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token ids [tokens], of which only the number matters -> [tokens, hidden]."""
        x = self._like.new_empty(len(token_ids), self._hidden_size)
        self._ranks.take(x)
        return x


class StageLlama(Llama):
    """A stage that is not the last one: it makes no logits, and is told which tokens were chosen."""

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
        """The tokens chosen in the step of this number, before the next one in its lane."""
        if number in self._untold:  # and the lane has not begun anew since
            self._untold.pop(number).token_ids = token_ids

    def sample(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
        return ToldLater(len(inputs))

    def prompt_logprobs(self, inputs: Sequence[PromptInput]) -> dict[int, Sequence[Sampled]]:
        return {}

    def _leave(self, tokens: FlatBatch, x: Tensor, residual: Tensor) -> Tensor:
        """Hand on what the next layer would have added: there it is what the embedding is for the first layer."""
        self._ranks.hand_on(residual.add_(x))
        return self._no_logits()


class ToldLater(Sequence[Sampled]):
    """Choices that another stage makes. Only the tokens come to be known."""

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
