"""The reference Llama computes what transformers' own models compute, however the tokens are batched: Llama's, and its
cousins'.

"Within 1e-4" is norm-wise: |ours - theirs| / |theirs| over the vocabulary, for each row of logits.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minipaged.contracts import BatchRow
from minipaged.engine.policy import recompute_seconds, swap_seconds
from minipaged.models.config import ModelConfig
from minipaged.models.layer_groups import LayerGroups
from minipaged.reference.flat_batch import flatten
from minipaged.reference.kv_cache import Array, KVCache
from minipaged.reference.llama import Llama
from minipaged.reference.rope import inverse_frequencies, rotary_tables
from minipaged.steps import BlockMoves
from tests.effort import examples

ROPE_PARAMETERS = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {  # so short an original context that every frequency band has members and tokens go beyond it
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
]


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """These models are too small to share out among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


COUSINS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 13}),  # the longest text here has 60 tokens
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
    ("gemma2", {"sliding_window": 13, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0}),
    ("gemma2", {"sliding_window": 5, "final_logit_softcapping": None, "attention_bias": True}),
    ("gemma3_text", {"sliding_window": 14, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("gemma3_text", {"sliding_window": 5, "query_pre_attn_scalar": 50, "final_logit_softcapping": 4.0}),
]


@st.composite
def llama_configs(draw: st.DrawFn) -> PreTrainedConfig:
    """A small Llama of any shape, or a cousin."""
    model_type, own = draw(st.sampled_from(COUSINS))
    num_layers = draw(st.integers(1, 3))
    rope = dict(draw(st.sampled_from(ROPE_PARAMETERS)))
    if model_type == "gemma3_text":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
    if "layer_types" in own:
        own = own | {"layer_types": own["layer_types"][:num_layers]}
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 4))
    return AutoConfig.for_model(
        model_type,
        **own,
        vocab_size=draw(st.integers(11, 99)),
        hidden_size=heads * draw(st.integers(2, 9)),  # seldom heads * head_dim
        intermediate_size=draw(st.integers(8, 100)),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([32, 48, 64, 96, 128])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        rope_parameters=rope,
        max_position_embeddings=256,
        tie_word_embeddings=draw(st.booleans()),
        initializer_range=0.3,  # so that attention is not uniform and the layers matter
        pad_token_id=None,  # Gemma's is 0, whose embedding would be nothing but zeros
    )


def transformers_llama(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """transformers' model with random weights, norms and biases included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5 - is_gemma(model), 1.5 - is_gemma(model))
        elif name.endswith("bias"):
            torch.nn.init.normal_(weight, 0, 0.5)
    return model


def is_gemma(model: PreTrainedModel) -> bool:
    return str(model.config.model_type).startswith("gemma")


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Make the model compute everything in float64: transformers' own norms, rotary tables and Gemma's softmax are
    float32 in any case."""
    config = ModelConfig.from_dict(model.config.to_dict())

    def norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        eps, weight = (self.eps, 1 + self.weight) if config.gemma else (self.variance_epsilon, self.weight)
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def tables(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        window = model.config.sliding_window if layer_type == "sliding_attention" else None
        cos, sin = rotary_tables(position_ids[0].numpy(), inverse_frequencies(config, window), np.float64)
        return tuple(torch.from_numpy(np.concatenate([t, t], axis=-1))[:, 0][None] for t in (cos, sin))

    model = model.double()
    for weight in model.parameters():
        weight.data *= 1 + 1e-9  # none of them is a float32 now
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm.__get__(module)
    model.model.rotary_emb.forward = tables
    if config.gemma:
        model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size, dtype=torch.float64).sqrt()
        model.set_attn_implementation("exact")
    return model


def exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' own, with a softmax of the queries' type. query: [1, heads, tokens, head_dim]."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling  # [1, heads, tokens, tokens]
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return ((scores + mask).softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@torch.no_grad()
def expected_logits(model: PreTrainedModel, token_ids: list[int]) -> Array:
    return model(torch.tensor([token_ids])).logits[0].numpy()  # [tokens, vocab]


def weights_of(model: PreTrainedModel) -> dict[str, Array]:
    """By name, as they are loaded: Gemma stores the weights of norms as w - 1."""
    return {
        name: tensor.numpy() + 1 if is_gemma(model) and name.endswith("norm.weight") else tensor.numpy()
        for name, tensor in model.state_dict().items()
    }


@dataclass
class Sequence:
    token_ids: list[int]
    block_table: list[int]
    logits: Array  # [tokens, vocab], from transformers
    num_groups: int = 1
    num_done: int = 0

    def next_row(self, num_tokens: int, block_size: int, wants_logits: bool) -> BatchRow:
        positions = range(self.num_done, self.num_done + num_tokens)
        self.num_done += num_tokens
        return BatchRow(
            token_ids=self.token_ids[positions.start : positions.stop],
            first_position=positions.start,
            blocks=self.block_table[: -(-positions.stop // block_size) * self.num_groups],
            wants_logits=wants_logits,
        )


def relative_error(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def check_agreement(model: PreTrainedModel, data: st.DataObject, tolerance: float) -> None:
    """Run some sequences in random chunks, in random company, and compare every row of logits."""
    config = ModelConfig.from_dict(model.config.to_dict())
    dtype = weights_of(model)["model.embed_tokens.weight"].dtype
    block_size = data.draw(st.sampled_from([1, 3, 16, 64]))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    num_groups = len(config.groups.windows)
    num_blocks = [-(-n // block_size) * num_groups for n in lengths]
    cache = KVCache(
        config.num_hidden_layers,
        sum(num_blocks),
        block_size,
        config.num_key_value_heads,
        config.head_dim,
        dtype=dtype,
        places=config.groups.places,
    )
    llama = Llama(config, weights_of(model), cache)
    llama.move(BlockMoves(poison=list(range(cache.num_blocks))))
    tables = np.split(rng.permutation(cache.num_blocks), np.cumsum(num_blocks)[:-1])
    sequences = []
    for n, table in zip(lengths, tables, strict=True):
        token_ids = rng.integers(0, config.vocab_size, n).tolist()
        sequences.append(Sequence(token_ids, table.tolist(), expected_logits(model, token_ids), num_groups))

    while unfinished := [s for s in sequences if s.num_done < len(s.token_ids)]:
        rows, expected = [], []
        for s in data.draw(st.permutations(unfinished))[: data.draw(st.integers(1, len(unfinished)))]:
            rest = len(s.token_ids) - s.num_done
            num_tokens = data.draw(st.sampled_from([1, rest]) | st.integers(1, rest))
            rows.append(s.next_row(num_tokens, block_size, wants_logits=data.draw(st.booleans()) or num_tokens == rest))
            if rows[-1].wants_logits:
                expected.append(s.logits[s.num_done - 1])
        logits = llama.forward(rows)
        assert logits.shape == (len(expected), config.vocab_size)
        assert logits.dtype == dtype
        for ours, theirs in zip(logits, expected, strict=True):
            assert relative_error(ours, theirs) < tolerance


@settings(max_examples=examples(50))
@given(config=llama_configs(), seed=st.integers(0, 2**32), data=st.data())
def test_logits_are_those_of_transformers_in_float32_for_any_batching(
    config: PreTrainedConfig, seed: int, data: st.DataObject
) -> None:
    check_agreement(transformers_llama(config, seed), data, tolerance=1e-4)


@settings(max_examples=examples(25))
@given(config=llama_configs(), seed=st.integers(0, 2**32), data=st.data())
def test_logits_are_those_of_transformers_in_float64_for_any_batching(
    config: PreTrainedConfig, seed: int, data: st.DataObject
) -> None:
    check_agreement(in_float64(transformers_llama(config, seed)), data, tolerance=1e-10)


@pytest.mark.parametrize("chunk", [1, 4, 5, 31])
def test_gpt_oss_attention_is_that_of_transformers(chunk: int) -> None:
    """Its attention alone, in a layer with a window and in one without: sinks and biases. (Its rotary embedding is
    YaRN, which both are given from outside.)"""
    window, num_tokens, block_size = 7, 31, 3
    theirs = AutoConfig.for_model(
        "gpt_oss", hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=32, sliding_window=window
    )
    theirs._attn_implementation = "eager"
    config = ModelConfig(
        vocab_size=1,
        hidden_size=48,
        intermediate_size=1,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_scaling=None,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
        layer_windows=(window, None),
        given_groups=LayerGroups((None,), (0, 0)),  # both in one block table
    )
    torch.manual_seed(0)
    modules = [GptOssAttention(theirs, layer).double() for layer in range(2)]
    for weight in (weight for module in modules for weight in module.parameters()):
        torch.nn.init.normal_(weight, 0, 0.4)
    own = {f"model.layers.{i}.self_attn.{name}": w for i in (0, 1) for name, w in modules[i].state_dict().items()}
    weights = {name: w.numpy() for name, w in own.items()} | {"model.layers.0.input_layernorm.weight": np.ones(48)}
    cache = KVCache(2, 16, block_size, 2, 32, dtype=np.float64)
    llama = Llama(config, weights, cache)
    llama.move(BlockMoves(poison=list(range(16))))
    x = np.random.default_rng(0).standard_normal((num_tokens, 48))
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    for layer, module in enumerate(modules):
        seen = (distance >= 0) & (distance < (config.window(layer) or num_tokens))
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)[None, None]
        tables = rotary_tables(np.arange(num_tokens), inverse_frequencies(config), np.float64)
        cos, sin = (torch.from_numpy(each[:, 0])[None] for each in tables)
        with torch.no_grad():
            expected = module(torch.from_numpy(x)[None], (cos, sin), mask)[0][0].numpy()
        outputs = []
        for first in range(0, num_tokens, chunk):
            ids = [0] * len(x[first : first + chunk])
            row = BatchRow(ids, first, list(range(16))[::-1][: -(-(first + len(ids)) // block_size)], True)
            tokens = flatten([row], block_size)
            part = x[first : first + chunk]
            outputs.append(llama._attention(layer, part, tokens, llama._rotations(tokens.positions)))
        assert relative_error(np.concatenate(outputs), expected) < 1e-12


LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@given(
    rope=st.sampled_from([*ROPE_PARAMETERS, LLAMA_3_1, {"rope_type": "default", "rope_theta": 100000.0}]),
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 256]),
    positions=st.lists(st.integers(0, 8191), min_size=1, max_size=20),
)
def test_rotary_tables_are_those_of_transformers(rope: dict[str, object], head_dim: int, positions: list[int]) -> None:
    config = LlamaConfig(head_dim=head_dim, rope_parameters=dict(rope), max_position_embeddings=131072)
    rotary = LlamaRotaryEmbedding(config)
    frequencies = inverse_frequencies(ModelConfig.from_dict(config.to_dict()))
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=3e-7)  # the last bits may differ
    ours = rotary_tables(np.array(positions), frequencies, np.float32)
    theirs = rotary(torch.zeros(1), torch.tensor([positions]))
    for our_table, their_table in zip(ours, theirs, strict=True):
        half = their_table[0, :, : head_dim // 2].numpy()  # transformers repeats the table for the second half
        np.testing.assert_allclose(our_table[:, 0], half, atol=1e-6 + 3e-7 * max(positions))


def small_llama(
    num_blocks: int = 8, num_swap_blocks: int = 0, vocab_size: int = 50, intermediate_size: int = 64
) -> Llama:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    cache = KVCache(2, num_blocks, 4, 2, 32, num_swap_blocks)
    return Llama(ModelConfig.from_dict(config.to_dict()), weights_of(transformers_llama(config, 0)), cache)


def row(first_position: int, num_tokens: int, block_table: list[int], wants_logits: bool = True) -> BatchRow:
    positions = range(first_position, first_position + num_tokens)
    return BatchRow([(7 * p) % 50 for p in positions], first_position, block_table, wants_logits)


def test_no_rows_that_want_logits_give_no_logits() -> None:
    llama = small_llama()
    assert llama.forward([]).shape == (0, 50)
    assert llama.forward([row(0, 5, [1, 2], wants_logits=False)]).shape == (0, 50)
    assert llama.forward([row(5, 1, [1, 2])]).shape == (1, 50)


def test_a_swapped_sequence_goes_on_as_if_nothing_had_happened() -> None:
    undisturbed, swapped = small_llama(), small_llama(num_swap_blocks=3)
    for llama in (undisturbed, swapped):
        llama.forward([row(0, 7, [3, 1])])
    swapped.move(BlockMoves(swap_out=[(3, 0), (1, 2)], poison=[3, 1]))
    swapped.move(BlockMoves(swap_in=[(0, 6), (2, 3)]))
    swapped.move(BlockMoves(copy=[(3, 5)], poison=[1]))
    swapped.move(BlockMoves(poison=[3]))
    np.testing.assert_array_equal(swapped.forward([row(7, 1, [6, 5])]), undisturbed.forward([row(7, 1, [3, 1])]))


def test_costs_are_measured_once_and_the_live_cache_stays_as_it_is() -> None:
    llama = small_llama(num_blocks=20, num_swap_blocks=2)
    llama.move(BlockMoves(poison=list(range(20))))
    llama.forward([row(0, 7, [0, 1])])
    before = llama.kv_cache.device_blocks.tobytes() + llama.kv_cache.host_blocks.tobytes()
    costs = llama.costs()
    assert 0 < swap_seconds(costs, 1) < swap_seconds(costs, 2)
    assert 0 < recompute_seconds(costs, 1) < recompute_seconds(costs, 2)
    assert llama.kv_cache.device_blocks.tobytes() + llama.kv_cache.host_blocks.tobytes() == before
    assert llama.costs() == costs, "measured once"


@pytest.mark.parametrize(("intermediate_size", "num_tokens"), [(20_000, 1), (64, 16)])
def test_weights_are_used_where_they_are_and_logits_computed_only_where_asked_for(
    intermediate_size: int, num_tokens: int
) -> None:
    llama = small_llama(vocab_size=20_000, intermediate_size=intermediate_size)
    largest_weight = llama.head.nbytes  # 2.6 MB; the logits of one row are 80 KB, of all 16 tokens 1.3 MB
    llama.forward([row(0, 1, [0])])
    tracemalloc.start()
    try:
        llama.forward([row(0, num_tokens, [0, 1, 2, 3])])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < largest_weight / 4


@pytest.mark.parametrize("block", [10, -1])
def test_a_slot_outside_the_cache_is_refused_before_anything_is_written(block: int) -> None:
    llama = small_llama()
    with pytest.raises(IndexError, match="slot"):
        llama.forward([row(0, 5, [0, block])])
    assert not llama.kv_cache.device_blocks.any()
