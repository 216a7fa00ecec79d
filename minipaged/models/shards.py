"""Split a model among ranks, each a process with a part of it (paper, section 4.6; Megatron-LM, section 3).

*Tensor parallelism* splits every layer among the ranks of a stage. Each half of a layer then needs one sum over the
ranks. The projections from the hidden size (q, k, v, gate, up) are split by their outputs: a rank has whole attention
heads and some columns of the MLP. The projections back to the hidden size (o, down) are split by their inputs: each
rank computes a summand of every output. The embedding and the head are split by the vocabulary: each token's row is on
one rank, and the ranks' logits are concatenated.

    x = x + sum over ranks of  o[:, heads of r] @ attention(q[heads of r], k[...], v[...])
    x = x + sum over ranks of  down[:, columns of r] @ (silu(gate[columns of r]) * up[columns of r])

A rank's KV cache therefore holds only its KV heads. A block number means the same tokens on all ranks, so there is one
block table. *Pipeline parallelism* gives each stage a contiguous range of the layers.

Sizes need not be divisible by the number of ranks. Ranges are contiguous and as even as possible, and the first ranks
have one more:

    KV heads   are whole, each with its query heads. If there are fewer KV heads than ranks, several ranks share a KV
               head: each keeps its keys and values and has some of its query heads
    columns    of the MLP are split in runs of 128, or of 64, 32, ... as the size allows, so that the groups of a
               quantized matrix stay whole
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minipaged.errors import InvalidRequest, ModelError
from minipaged.models.config import ModelConfig
from minipaged.models.layer_groups import LayerGroups

RUN = 128
"""Columns of the MLP that stay together if possible: the usual group size in quantized matrices."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model. The ranges index the whole model."""

    rank: int
    """The rank's number within its stage."""
    size: int
    """The number of ranks per stage: `tensor_parallel_size`."""
    stage: int
    num_stages: int
    """The number of stages: `pipeline_parallel_size`."""
    heads: range
    """The query heads."""
    kv_heads: range
    """The KV heads. A single one may be shared with other ranks of the stage."""
    intermediate: range
    """The outputs of gate and up, and inputs of down."""
    vocab: range
    """The rows of the embedding and of the head."""
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether the shard is in the first stage, which embeds the tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the shard is in the last stage, which computes the logits."""
        return self.stage == self.num_stages - 1


def shards_of(config: ModelConfig, size: int, num_stages: int) -> list[list[Shard]]:
    """The shards of a whole model, by stage and rank. Raises InvalidRequest like `shard_of`."""
    return [[shard_of(config, rank, size, stage, num_stages) for rank in range(size)] for stage in range(num_stages)]


def shard_of(config: ModelConfig, rank: int, size: int, stage: int = 0, num_stages: int = 1) -> Shard:
    """The shard of rank `rank` out of `size`, in stage `stage` out of `num_stages`. Raises InvalidRequest if a rank
    would get no part of the model."""
    check_parallel_sizes(config, size, num_stages)
    run = math.gcd(config.intermediate_size, RUN)
    while config.intermediate_size // run < size:
        run //= 2
    columns = _share(config.intermediate_size // run, rank, size)
    heads, kv_heads = _heads(config.num_attention_heads, config.num_key_value_heads, rank, size)
    return Shard(
        rank=rank,
        size=size,
        stage=stage,
        num_stages=num_stages,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=range(columns.start * run, columns.stop * run),
        vocab=_share(config.vocab_size, rank, size),
        layers=_share(config.num_hidden_layers, stage, num_stages),
    )


def check_parallel_sizes(config: ModelConfig, size: int, num_stages: int) -> None:
    """Raises InvalidRequest unless every rank of every stage gets a part of the model."""
    for name, number in (("tensor_parallel_size", size), ("pipeline_parallel_size", num_stages)):
        if number < 1:
            raise InvalidRequest(f"{name} is {number}; it must be 1 or more")
    for what in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if size > (limit := getattr(config, what)):
            raise InvalidRequest(
                f"tensor_parallel_size is {size}, but the model has {what} = {limit}, and each rank needs one of them; "
                f"use {limit} or fewer"
            )
    if num_stages > (limit := config.num_hidden_layers):
        raise InvalidRequest(
            f"pipeline_parallel_size is {num_stages}, but the model has num_hidden_layers = {limit}, and each stage "
            f"needs one of them; use {limit} or fewer"
        )


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The configuration of one rank's part as a model of its own. The vocabulary stays whole, because token ids are
    the same on all ranks."""
    mine = slice(shard.layers.start, shard.layers.stop)
    return replace(
        config,
        num_attention_heads=len(shard.heads),
        num_key_value_heads=len(shard.kv_heads),
        intermediate_size=len(shard.intermediate),
        num_hidden_layers=len(shard.layers),
        layer_windows=config.layer_windows[mine],
        given_groups=LayerGroups(config.groups.windows, config.groups.of_layer[mine]),
    )


def cut(config: ModelConfig, shard: Shard, name: str) -> tuple[slice, ...] | None:
    """The index of the rank's part in the whole model's weight `name`: `weight[cut(...)]`. None: the rank has no part.

    Only rank 0 has the bias of a projection whose outputs are summed over the ranks, so that it is added once.
    """
    if name == "model.embed_tokens.weight":
        needed = shard.is_first or (shard.is_last and config.tie_word_embeddings)
        return _rows(shard.vocab) if needed else None
    if name == "lm_head.weight":
        return _rows(shard.vocab) if shard.is_last else None
    if name == "model.norm.weight":
        return () if shard.is_last else None
    if _layer(name) not in shard.layers:
        return None
    module, kind = name.split(".")[-2:]
    match module:
        case "q_proj":
            return _rows(shard.heads, config.head_dim)
        case "k_proj" | "v_proj":
            return _rows(shard.kv_heads, config.head_dim)
        case "self_attn":  # the checkpoint's scales for keys and values
            return _rows(shard.kv_heads)
        case "gate_proj" | "up_proj":
            return _rows(shard.intermediate)
        case "o_proj" | "down_proj" if kind == "bias":
            return () if shard.rank == 0 else None
        case "o_proj":
            return slice(None), *_rows(shard.heads, config.head_dim)
        case "down_proj":
            return slice(None), *_rows(shard.intermediate)
    return ()  # norms


def cut_weights(config: ModelConfig, shard: Shard, weights: Mapping[str, Any]) -> dict[str, Any]:
    """One rank's part of the whole model's `weights`, under the rank's own names. Arrays are views."""
    return {
        local_name(shard, name): part_of(weight, part, name)
        for name, weight in weights.items()
        if (part := cut(config, shard, name)) is not None
    }


def part_of(weight: Any, part: tuple[slice, ...], name: str) -> Any:
    """The part `part`, from `cut`, of an array or packed matrix. Raises ModelError if a matrix cannot be cut there."""
    if name.endswith("_scale") and len(weight) == 1:  # one scale of keys or values for all heads
        return weight
    try:
        return weight[part] if part else weight
    except ModelError as error:
        raise ModelError(
            f"'{name}' cannot be cut for this rank: {error}; use another tensor_parallel_size, pipeline_parallel_size "
            "instead, or the model without quantization"
        ) from None


def local_name(shard: Shard, name: str) -> str:
    """The rank's own name for the whole model's weight `name`: the rank's first layer is layer 0."""
    if not name.startswith("model.layers."):
        return name
    return name.replace(f"layers.{_layer(name)}.", f"layers.{_layer(name) - shard.layers.start}.", 1)


def _layer(name: str) -> int:
    return int(name.split(".")[2])  # model.layers.7.mlp.up_proj.weight


def _rows(part: range, size: int = 1) -> tuple[slice]:
    return (slice(part.start * size, part.stop * size),)


def _share(count: int, rank: int, size: int) -> range:
    """The rank's share of range(count): contiguous, as even as possible, one more for the first ranks."""
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def _heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """A rank's query heads and KV heads. Each KV head has the same whole number of query heads."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        kv_heads = _share(num_kv_heads, rank, size)
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    kv_head, ranks = next(
        (kv_head, ranks) for kv_head in range(num_kv_heads) if rank in (ranks := _share(size, kv_head, num_kv_heads))
    )
    heads = _share(group, rank - ranks.start, len(ranks))
    return range(kv_head * group + heads.start, kv_head * group + heads.stop), range(kv_head, kv_head + 1)
