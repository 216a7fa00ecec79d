"""Which part of a model is one rank's, where several processes share it (paper, section 4.6; Megatron-LM, section 3).

*Tensor parallelism* cuts each layer so that one sum over the ranks is enough for each half of it. What makes many
numbers of a few (q, k, v, gate, up) is cut by its outputs: a rank has whole attention heads, and some columns of the
MLP. What brings them back to the hidden size (o, down) is cut by its inputs: each rank has a part of every output, and
the parts are added. The embedding and the head are cut by the vocabulary: a token's row is one rank's, and the logits
are put one after another.

    x = x + sum over ranks of  o[:, heads of r] @ attention(q[heads of r], k[...], v[...])
    x = x + sum over ranks of  down[:, columns of r] @ (silu(gate[columns of r]) * up[columns of r])

So a rank's KV cache has its KV heads only, and the same block numbers mean the same tokens everywhere: there is one
block table. *Pipeline parallelism* gives each stage some of the layers, one after another.

Sizes need not divide. Ranges are contiguous and as even as can be, the first ranks having one more:

    KV heads   whole ones, each with its query heads. Where there are fewer than ranks, ranks are dealt to KV heads in
               the same way, and the query heads of a KV head to its ranks, which all keep that head's keys and values
    columns    of the MLP: in runs of 128, or of 64, 32, ... as the size allows, so that a quantized matrix' groups stay
               whole
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minipaged.errors import InvalidRequest, ModelError
from minipaged.models.config import ModelConfig

RUN = 128
"""Columns of the MLP that are not parted, if they can be: inputs that share a scale in quantized matrices, mostly."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model. The ranges are numbers of the whole model."""

    rank: int
    """Among those of its stage."""
    size: int
    """The ranks of a stage: `tensor_parallel_size`."""
    stage: int
    num_stages: int
    """`pipeline_parallel_size`."""
    heads: range
    """Of the queries."""
    kv_heads: range
    """Other ranks of the stage may have the same one, if this is only one."""
    intermediate: range
    """Outputs of gate and up, inputs of down."""
    vocab: range
    """Rows of the embedding and of the head."""
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether it is of the stage that looks the tokens up."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it is of the stage that makes logits."""
        return self.stage == self.num_stages - 1


def shards_of(config: ModelConfig, size: int, num_stages: int) -> list[list[Shard]]:
    """The shards of a whole model: of each stage, of each of its ranks. Raises InvalidRequest (`shard_of`)."""
    return [[shard_of(config, rank, size, stage, num_stages) for rank in range(size)] for stage in range(num_stages)]


def shard_of(config: ModelConfig, rank: int, size: int, stage: int = 0, num_stages: int = 1) -> Shard:
    """What is the part of this rank of `size`, in this stage of `num_stages`. Raises InvalidRequest where it would
    be nothing."""
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
    """Raises InvalidRequest unless every rank of every stage has something of the model."""
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
    """The shape of one rank's part, as if it were a model of its own. The vocabulary stays whole: tokens are its
    numbers everywhere."""
    return replace(
        config,
        num_attention_heads=len(shard.heads),
        num_key_value_heads=len(shard.kv_heads),
        intermediate_size=len(shard.intermediate),
        num_hidden_layers=len(shard.layers),
    )


def cut(config: ModelConfig, shard: Shard, name: str) -> tuple[slice, ...] | None:
    """The rank's part of the whole model's weight `name`: `weight[cut(...)]`. None: it has nothing of it.

    A bias that is added to a sum is rank 0's, so that it is added once.
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
        case "self_attn":  # the scales that a checkpoint may bring for keys and values
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
    """One rank's weights, by its own names, out of the whole model's. They are views, but of what is quantized."""
    return {
        local_name(shard, name): part_of(weight, part, name)
        for name, weight in weights.items()
        if (part := cut(config, shard, name)) is not None
    }


def part_of(weight: Any, part: tuple[slice, ...], name: str) -> Any:
    """What `cut` says of an array, or of a packed matrix. Raises ModelError for one that cannot be cut there."""
    if name.endswith("_scale") and len(weight) == 1:  # of keys or values: one for all heads
        return weight
    try:
        return weight[part] if part else weight
    except ModelError as error:
        raise ModelError(
            f"'{name}' cannot be cut for this rank: {error}; use another tensor_parallel_size, pipeline_parallel_size "
            "instead, or the model as it was before it was quantized"
        ) from None


def local_name(shard: Shard, name: str) -> str:
    """What the whole model's weight `name`, which is the rank's, is called there: its first layer is layer 0."""
    if not name.startswith("model.layers."):
        return name
    return name.replace(f"layers.{_layer(name)}.", f"layers.{_layer(name) - shard.layers.start}.", 1)


def _layer(name: str) -> int:
    return int(name.split(".")[2])  # model.layers.7.mlp.up_proj.weight


def _rows(part: range, size: int = 1) -> tuple[slice]:
    return (slice(part.start * size, part.stop * size),)


def _share(count: int, rank: int, size: int) -> range:
    """The numbers below `count` that are this one's of `size`: contiguous, the first have one more."""
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def _heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """A rank's query heads and KV heads: for each of the latter the same, whole, number of the former."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        kv_heads = _share(num_kv_heads, rank, size)
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    kv_head, ranks = next(
        (kv_head, ranks) for kv_head in range(num_kv_heads) if rank in (ranks := _share(size, kv_head, num_kv_heads))
    )
    heads = _share(group, rank - ranks.start, len(ranks))
    return range(kv_head * group + heads.start, kv_head * group + heads.stop), range(kv_head, kv_head + 1)
