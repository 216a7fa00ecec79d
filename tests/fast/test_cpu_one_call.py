"""Sequences that decode through all layers in one call: to the last bit what they are layer by layer, and only where
that is so."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from minipaged.contracts import BatchRow
from minipaged.fast import cpu, preemption
from minipaged.fast.cpu import computing
from minipaged.fast.cpu import llama as cpu_llama
from minipaged.fast.kv_cache import KVCache
from minipaged.fast.llama import Llama
from minipaged.models.config import ModelConfig, weight_shapes

SHAPES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "sliding_window": 40,  # not Llama's, and Qwen3's only if it is to use it
}


def make(model_type: str, dtype: torch.dtype, kv_cache_dtype: str = "auto", *, sinks: bool = False) -> Llama:
    config = ModelConfig.from_dict(SHAPES | {"model_type": model_type})
    torch.manual_seed(0)
    weights = {
        name: torch.randn(shape).mul(shape[-1] ** -0.5).to(dtype) for name, shape in weight_shapes(config).items()
    }
    if sinks:
        weights["model.layers.1.self_attn.sinks"] = torch.randn(config.num_attention_heads).to(dtype)
    sizes = config.num_hidden_layers, 40, 4, config.num_key_value_heads, config.head_dim, 0
    return Llama(config, weights, KVCache(*sizes, dtype, kv_cache_dtype))


class Counted:
    """A function that runs all layers, and counts its calls."""

    def __init__(self, run: Any) -> None:
        self.run, self.most_tokens, self.calls = run, run.most_tokens, 0

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.calls += 1
        return self.run(*arguments)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "PROBE_TOKENS", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])  # then norms of queries and keys; a window
@pytest.mark.parametrize("context", [1, 2, 63, 64, 150])
def test_logits_and_what_is_cached_are_the_loops(dtype: torch.dtype, model_type: str, context: int) -> None:
    llama = make(model_type, dtype)
    blocks = [(7 * i + 3) % 40 for i in range(-(-context // 4))]
    rows = [BatchRow([token % 64], token, blocks, wants_logits=True) for token in range(max(0, context - 3), context)]
    if rows[0].first_position:
        llama.forward([BatchRow([5] * rows[0].first_position, 0, blocks, wants_logits=False)])
    before = [torch.stack(llama.kv_cache.layer(i)) for i in range(3)]
    llama._one_call = Counted(llama._one_call)
    found = [llama.forward([row]) for row in rows]
    after = [torch.stack(llama.kv_cache.layer(i)) for i in range(3)]
    assert llama._one_call.calls == len(rows)
    llama._one_call = None
    for i in range(3):
        for kept, was in zip(llama.kv_cache.layer(i), before[i], strict=True):
            kept.copy_(was)
    for logits, row in zip(found, rows, strict=True):
        assert torch.equal(llama.forward([row]), logits)
    assert all(torch.equal(torch.stack(llama.kv_cache.layer(i)), after[i]) for i in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_seqs", [2, 7, 19])
def test_a_batch_in_one_call_gives_the_bits_of_the_loop_and_of_each_sequence_alone(
    num_seqs: int, dtype: torch.dtype
) -> None:
    llama = make("qwen3", dtype)
    contexts = [1 + 3 * i % 8 for i in range(num_seqs)]
    rows = [BatchRow([i], context - 1, [2 * i, 2 * i + 1], wants_logits=True) for i, context in enumerate(contexts)]
    for row in rows:
        if row.first_position:
            llama.forward([BatchRow([row.token_ids[0] + 1] * row.first_position, 0, row.blocks, wants_logits=False)])
    in_one_call = llama._one_call
    assert in_one_call is not None
    assert in_one_call.most_tokens == (sys.maxsize if cpu_llama.uses_tiles(dtype) else 1)
    llama._one_call = counted = Counted(in_one_call)
    together = llama.forward(rows)
    assert counted.calls == (in_one_call.most_tokens > 1)
    llama.forward([*rows[1:], BatchRow([1, 2], 0, [39], wants_logits=True)])
    assert counted.calls == (in_one_call.most_tokens > 1), "a batch with a prompt is run layer by layer"
    if in_one_call.most_tokens > 1:  # the products of a library may depend on the batch
        assert torch.equal(together, torch.cat([llama.forward([row]) for row in rows]))
    llama._one_call = None
    assert torch.equal(llama.forward(rows), together)


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_another_kernel_that_is_put_into_the_cache_is_called(num_seqs: int) -> None:
    """The course puts a student's kernel there."""
    llama = make("llama", torch.float32)
    right, calls = llama.kv_cache.kernels.paged_decode, []

    def counting(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return right(*arguments)

    llama.kv_cache.kernels = SimpleNamespace(paged_decode=counting)  # type: ignore[assignment]
    llama.forward([BatchRow([i], 0, [i], wants_logits=True) for i in range(num_seqs)])
    assert len(calls) == SHAPES["num_hidden_layers"]


def test_a_gemma_and_a_layer_with_sinks_are_run_layer_by_layer() -> None:
    assert make("gemma2", torch.float32)._one_call is None
    assert make("llama", torch.float32, sinks=True)._one_call is None


def test_where_a_library_multiplies_one_token_at_a_time_is_run_in_one_call() -> None:
    with patch.object(cpu_llama, "can_multiply_tiles", lambda dtype: False):
        in_one_call = make("llama", torch.float32)._one_call
    assert in_one_call is not None
    assert in_one_call.most_tokens == 1


def test_what_cannot_be_run_so_is_run_layer_by_layer() -> None:
    assert make("qwen2", torch.float32)._one_call is None  # its projections have a bias
    assert make("llama", torch.float32, "int8")._one_call is None


def test_passes_in_which_as_many_sequences_decode_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their times may be compared (`Threads`)."""
    kinds: list[Hashable] = []

    def noted(*, throughout: bool = True, kind: Hashable = None) -> AbstractContextManager[None]:
        kinds.append(kind)
        return computing(throughout=throughout, kind=kind)

    llama = make("llama", torch.float32)
    monkeypatch.setattr(cpu, "computing", noted)
    two, three = ([BatchRow([i], 0, [i], wants_logits=True) for i in range(count)] for count in (2, 3))
    with_prompt = [*two, BatchRow([1, 2], 0, [39], wants_logits=True)]
    for rows in (two, three, two, with_prompt):
        llama.forward(rows)
    first, second, third, fourth = kinds
    assert first == third != second
    assert None not in (first, second)
    assert fourth is None
