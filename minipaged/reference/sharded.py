"""A Llama in parts: tensor and pipeline parallelism in one process, with every sum written out (paper, section 4.6).

A model too large for one device is split (`models/shards.py`). Each *rank* is a `Llama` of its own with fewer heads,
fewer MLP columns or fewer layers. It has its part of the weights, and a KV cache for its KV heads.

    embedding    a rank has the rows of some tokens, and zeros for all others             x = sum over ranks
    attention    whole heads; its columns of o bring them back to the hidden size         x = x + sum over ranks
    MLP          its columns of gate and up, so its columns of down                       x = x + sum over ranks
    head         the logits of some tokens                                                one after another

In each layer, ranks exchange two sums (Megatron-LM, section 3). Stages exchange x. Each rank does everything else by
itself, from the same step: there is one scheduler and one block table, and block 7 is block 7 in every cache. Therefore
all ranks receive the same step, and no rank ever requests a block from another.

If ranks are processes, a sum is an exchange of messages. Here it is an ordinary sum. It is taken in the order of the
ranks, because floats added in another order differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, reduce

import numpy as np

from minipaged.contracts import Batch
from minipaged.models.config import ModelConfig
from minipaged.models.shards import Shard
from minipaged.reference.flat_batch import flatten
from minipaged.reference.kv_cache import Array
from minipaged.reference.llama import Llama
from minipaged.reference.preemption import carry, measure, probe_cache
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves

NOT_HANDED_OVER = "each rank has a part of every block; blocks are handed over by engines of one rank"


class ShardedLlama(Llama):
    """Runs steps on all ranks of all stages. The logits equal the whole model's, up to rounding."""

    def __init__(
        self, config: ModelConfig, shards: Sequence[Sequence[Shard]], stages: Sequence[Sequence[Llama]]
    ) -> None:
        """`config`: of the whole model. `shards` and `stages`: for each stage, a list with one entry per rank."""
        first = stages[0][0]  # it gives the block size and the dtype
        super().__init__(config, first.weights, first.kv_cache)
        self.shards = shards
        self.stages = stages

    def forward(self, batch: Batch) -> Array:
        """Return the logits [rows that want them, vocab_size] after the last query token of each row."""
        tokens = flatten(batch, self.kv_cache.block_size, len(self.groups.windows))
        rotations = self._rotations(tokens.positions)
        x = self._embed(tokens.ids)  # [tokens, hidden]
        for ranks in self.stages:  # a stage passes only x to the next
            for i in range(ranks[0].config.num_hidden_layers):
                before_attention, after_attention, before_mlp, after_mlp = self._layer_norms(i)
                y = total(rank._attention(i, rank._norm(before_attention, x), tokens, rotations) for rank in ranks)
                x = x + ranks[0]._norm(after_attention, y)  # all ranks have all norms
                y = total(rank._mlp(i, rank._norm(before_mlp, x)) for rank in ranks)
                x = x + ranks[0]._norm(after_mlp, y)
        self.prompt_hidden = x[tokens.prompt_rows]  # [prompt tokens, hidden]
        return self._logits(x[tokens.logit_rows])

    def _embed(self, ids: Array) -> Array:
        parts = []
        for shard, rank in zip(self.shards[0], self.stages[0], strict=True):
            mine = (shard.vocab.start <= ids) & (ids < shard.vocab.stop)  # [tokens]
            part = np.zeros((len(ids), self.config.hidden_size), self.dtype)  # [tokens, hidden]
            part[mine] = rank._embed(ids[mine] - shard.vocab.start)
            parts.append(part)
        return total(parts)

    def _logits(self, x: Array) -> Array:
        return np.concatenate([rank._logits(x) for rank in self.stages[-1]], axis=1)  # [rows, vocab]

    def move(self, moves: BlockMoves) -> None:
        """Make the same moves in every cache."""
        if moves.load:
            raise NotImplementedError(NOT_HANDED_OVER)
        for rank in self._ranks:
            carry(rank.kv_cache, moves)

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """Raise NotImplementedError: the inherited method would read only the first rank's part of each block."""
        raise NotImplementedError(NOT_HANDED_OVER)

    read_host_blocks = read_blocks

    @property
    def _ranks(self) -> list[Llama]:
        return [rank for ranks in self.stages for rank in ranks]

    @cached_property
    def _costs(self) -> Costs:
        """The costs of this model: a block is copied once in each rank's cache, one rank after another."""
        probes = [
            [Llama(rank.config, rank.weights, probe_cache(rank.kv_cache)) for rank in each] for each in self.stages
        ]
        forward = ShardedLlama(self.config, self.shards, probes).forward
        costs = measure(self.kv_cache, forward, len(self.groups.windows))
        block_bytes = sum(rank.kv_cache.block_bytes for rank in self._ranks)
        return replace(costs, copies_per_block=len(self._ranks), block_bytes=block_bytes)


def total(parts: Iterable[Array]) -> Array:
    """Return the sum over ranks, in their order."""
    return reduce(np.add, parts)
