"""Both Llamas on the same random batches: the same logits within each type's rounding, the same cache afterwards."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from minipaged.contracts import BatchRow, BlockTable, PendingToken, SamplingInput, Tier
from minipaged.fast.kv_cache import KVCache as FastCache
from minipaged.fast.llama import DecodeGraph, FlatBatch, flatten
from minipaged.fast.llama import Llama as FastLlama
from minipaged.fast.llama import inverse_frequencies as fast_frequencies
from minipaged.fast.sampling import Samples, sample
from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.params import SamplingParams
from minipaged.reference.kv_cache import KVCache as ReferenceCache
from minipaged.reference.llama import Llama as ReferenceLlama
from minipaged.reference.llama import inverse_frequencies as reference_frequencies
from minipaged.tiers import fast_tier, reference_tier
from tests.agreement.kernels import TRITON, KernelSet, every_kernel_set, every_kernel_set_and_dtype
from tests.effort import examples

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""|fast - reference| / |reference| over a row of logits: rounding piles up over the layers."""

BLOCK_SIZE, NUM_BLOCKS = 4, 40


def config_of(**changes: object) -> ModelConfig:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    return ModelConfig.from_dict(LlamaConfig(**(sizes | changes)).to_dict())


class Twins:
    """The same model on each tier, serving the same sequences."""

    def __init__(self, kernel_set: KernelSet, dtype: torch.dtype, config: ModelConfig, seed: int) -> None:
        rng = np.random.default_rng(seed)
        weights = {}
        for name, shape in weight_shapes(config).items():
            values = rng.standard_normal(shape) / shape[-1] ** (0.5 if len(shape) == 2 else 0)
            weights[name] = torch.from_numpy(values).to(dtype).float()  # both compute with the same rounded weights
        shape = (config.num_hidden_layers, NUM_BLOCKS, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        arrays = {name: tensor.numpy() for name, tensor in weights.items()}
        self.reference = ReferenceLlama(config, arrays, ReferenceCache(*shape))
        tensors = {name: tensor.to(kernel_set.device, dtype) for name, tensor in weights.items()}
        cache = FastCache(*shape, dtype=dtype, device=kernel_set.device, kernels=kernel_set.kernels)
        self.fast = FastLlama(config, tensors, cache, max_num_seqs=8)
        self.dtype = dtype
        self.sequences: list[Sequence] = []
        self.allocators = {tier.name: tier.block_allocator(NUM_BLOCKS) for tier in (reference_tier(), fast_tier())}

    def begin(self, token_ids: list[int]) -> None:
        tables = {tier.name: self._table(tier) for tier in (reference_tier(), fast_tier())}
        self.sequences.append(Sequence(token_ids, tables))

    def fork(self, parent: int) -> None:
        """The child goes on with other tokens, and copies the block that it shares before it writes."""
        old = self.sequences[parent]
        tables = {name: table.fork() for name, table in old.tables.items()}
        other_tokens = [*old.token_ids[: old.num_done], *reversed(old.token_ids)]
        self.sequences.append(Sequence(other_tokens, tables, old.num_done))

    def run(self, query_lens: list[int]) -> None:
        """The next tokens of each sequence (0: it sits this one out), on both tiers; compares the logits."""
        batches: dict[str, list[BatchRow]] = {"reference": [], "fast": []}
        for sequence, num_tokens in zip(self.sequences, query_lens, strict=True):
            num_tokens = min(num_tokens, len(sequence.token_ids) - sequence.num_done)
            if num_tokens:
                for name, row in sequence.next_rows(num_tokens, self).items():
                    batches[name].append(row)
        if not batches["fast"]:
            return
        expected = self.reference.forward(batches["reference"])
        logits = self.fast.forward(batches["fast"]).float().cpu().numpy()
        error = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert error.max() < TOLERANCE[self.dtype], error

    def _table(self, tier: Tier) -> BlockTable:
        return tier.block_table(BLOCK_SIZE, self.allocators[tier.name])


@dataclass
class Sequence:
    token_ids: list[int]
    tables: dict[str, BlockTable]
    num_done: int = 0

    def next_rows(self, num_tokens: int, twins: Twins) -> dict[str, BatchRow]:
        start, self.num_done = self.num_done, self.num_done + num_tokens
        rows = {}
        for name, table in self.tables.items():
            cache = {"reference": twins.reference, "fast": twins.fast}[name].kv_cache
            cache.copy(table.append(num_tokens))
            rows[name] = BatchRow(self.token_ids[start : self.num_done], start, table, wants_logits=True)
        return rows


@every_kernel_set_and_dtype
@given(data=st.data())
@settings(max_examples=examples(6))
def test_logits_agree_however_the_tokens_are_batched(
    kernel_set: KernelSet, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Prompts in chunks, decoding, mixed batches, forks with copy-on-write."""
    heads, kv_heads = data.draw(st.sampled_from([(4, 2), (3, 3), (6, 1)]))
    config = config_of(num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=heads == 3)
    twins = Twins(kernel_set, dtype, config, data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 3))):
        twins.begin(data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=24)))
    for _ in range(data.draw(st.integers(1, 3 if kernel_set is TRITON else 8))):
        if len(twins.sequences) < 5 and data.draw(st.booleans()):
            twins.fork(data.draw(st.integers(0, len(twins.sequences) - 1)))
        query_len = st.just(1) if data.draw(st.booleans()) else st.integers(0, 8)
        twins.run([data.draw(query_len) for _ in twins.sequences])


@every_kernel_set
def test_rows_that_want_no_logits_give_none(kernel_set: KernelSet) -> None:
    twins = Twins(kernel_set, torch.float32, config_of(), seed=0)
    for token_ids in ([1, 2, 3], [4], [5, 6]):
        twins.begin(token_ids)
    rows = [sequence.next_rows(len(sequence.token_ids), twins)["fast"] for sequence in twins.sequences]
    logits = twins.fast.forward(rows)
    silent = [BatchRow(row.token_ids, 0, row.table, wants_logits=False) for row in rows]
    assert twins.fast.forward(silent).shape == (0, 64)
    some = twins.fast.forward([silent[0], rows[1], silent[2]])
    torch.testing.assert_close(some, logits[1:2], rtol=1e-5, atol=1e-5)


@every_kernel_set
def test_a_token_that_is_being_chosen_runs_as_if_it_were_known(kernel_set: KernelSet) -> None:
    """In a mixed batch and in one that only decodes; whichever of the samples it is."""
    for query_lens in [(1, 1, 1), (1, 4, 1)]:
        twins = Twins(kernel_set, torch.float32, config_of(), seed=1)
        for tokens in ([3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]):
            twins.begin(tokens)
        twins.run([4, 1, 4])
        samples = fast_samples([9, 5, 50], kernel_set.device)  # not in the order of the batch
        rows = [
            sequence.next_rows(num_tokens, twins)["fast"]
            for sequence, num_tokens in zip(twins.sequences, query_lens, strict=True)
        ]
        expected = twins.fast.forward(rows)  # writes the same keys and values as the second time
        pending = [
            replace(rows[0], token_ids=[PendingToken(samples, 1)]),
            rows[1],
            replace(rows[2], token_ids=[PendingToken(samples, 0)]),
        ]
        torch.testing.assert_close(twins.fast.forward(pending), expected, rtol=0, atol=0)
        assert samples._fetched is None, "the host had no need to look"


def fast_samples(token_ids: list[int], device: torch.device) -> Samples:
    """What greedy sampling of logits with these peaks gives."""
    logits = torch.zeros(len(token_ids), 64, device=device)
    logits[torch.arange(len(token_ids)), token_ids] = 1.0
    inputs = [
        SamplingInput(row, SamplingParams(temperature=0), [1], [], seed=0, stream=0) for row in range(len(token_ids))
    ]
    samples = sample(logits, inputs)
    assert isinstance(samples, Samples)
    return samples


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the logic of `DecodeGraph` all the same: a replay computes the step anew in its buffers."""
    if TRITON.device.type == "cuda":
        return

    class Graph(MagicMock):
        def replay(self) -> None:
            self.decode.logits.copy_(self.decode.step())

    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


def captured(twins: Twins) -> DecodeGraph:
    """The graph for 4 sequences, ready to be replayed."""
    twins.fast._capture(max_num_seqs=8)
    assert list(twins.fast._graphs) == [1, 2, 4, 8]
    graph = twins.fast._graphs[4]
    if TRITON.device.type != "cuda":
        for each in twins.fast._graphs.values():
            each.graph.decode = each
    return graph


@pytest.mark.usefixtures("uncaptured")
def test_a_captured_step_finds_the_tokens_that_the_step_before_chose() -> None:
    twins = Twins(TRITON, torch.float32, config_of(), seed=2)
    for tokens in ([3, 1, 4, 1], [9, 2, 6, 5], [5, 8, 9, 7]):
        twins.begin(tokens)
    twins.run([3, 3, 3])
    rows = [sequence.next_rows(1, twins)["fast"] for sequence in twins.sequences]
    expected = twins.fast.forward(rows)
    captured(twins)
    samples = fast_samples([5, 33, 1, 7], TRITON.device)
    pending = [replace(row, token_ids=[PendingToken(samples, i)]) for row, i in zip(rows, (2, 0, 3), strict=True)]
    torch.testing.assert_close(twins.fast.forward(rows), expected)
    torch.testing.assert_close(twins.fast.forward(pending), expected)
    some_known = [pending[0], rows[1], replace(rows[2], wants_logits=False)]
    torch.testing.assert_close(twins.fast.forward(some_known), expected[:2])


@pytest.mark.usefixtures("uncaptured")
def test_a_captured_step_moves_its_sequences_on_by_itself_and_is_told_of_every_other_change() -> None:
    """Decoding of pending tokens, across blocks: nothing is sent. A sequence that goes, comes or stays behind is."""
    twins = Twins(TRITON, torch.float32, config_of(), seed=3)
    digits = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
    for first in range(4):
        twins.begin(digits[first:])
    twins.run([2, 0, 5, 3])
    graph = captured(twins)
    sent: list[list[int]] = []
    graph.numbers = SpiedCopy(graph.numbers, sent)  # type: ignore[assignment]

    def step(*which: int, shuffled: bool = False) -> bool:
        """Decode one token of each of these; whether anything had to be sent."""
        sequences, before = [twins.sequences[i] for i in which], len(sent)
        tokens = [sequence.token_ids[sequence.num_done] for sequence in sequences]
        order = list(reversed(range(len(which)))) if shuffled else list(range(len(which)))
        samples = fast_samples([tokens[i] for i in order], TRITON.device)
        both = [sequence.next_rows(1, twins) for sequence in sequences]
        pending = [
            replace(rows["fast"], token_ids=[PendingToken(samples, order.index(i))]) for i, rows in enumerate(both)
        ]
        expected = twins.reference.forward([rows["reference"] for rows in both])
        logits = twins.fast.forward(pending).cpu().numpy()
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        return len(sent) > before

    assert step(0, 1, 2), "the first step: also that of a sequence without a token"
    assert step(0, 2, 3), "another takes its place"
    assert [step(0, 2, 3) for _ in range(3)] == [False] * 3, "the same ones go on"
    assert step(0, 2, 3, shuffled=True), "their tokens lie in another order"
    assert step(0, 3, 2), "they lie in another order themselves"


@pytest.mark.usefixtures("uncaptured")
def test_a_captured_step_that_was_cut_short_is_told_everything_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may have moved its sequences on already. (On a GPU, Ctrl-C right after the launch.)"""
    twins = Twins(TRITON, torch.float32, config_of(), seed=4)
    for tokens in ([3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]):
        twins.begin(tokens)
    twins.run([3, 3, 3])
    graph = captured(twins)

    def rows_of(sequences: list[Sequence]) -> list[BatchRow]:
        return [sequence.next_rows(1, twins)["fast"] for sequence in sequences]

    def pending(rows: list[BatchRow]) -> list[BatchRow]:
        samples = fast_samples([int(row.token_ids[0]) for row in rows], TRITON.device)
        return [replace(row, token_ids=[PendingToken(samples, i)]) for i, row in enumerate(rows)]

    twins.fast.forward(pending(rows_of(twins.sequences)))
    rows = rows_of(twins.sequences)
    replay = graph.graph.replay

    def cut_short() -> None:
        replay()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(graph, "graph", MagicMock(replay=cut_short))
        with pytest.raises(KeyboardInterrupt):
            twins.fast.forward(pending(rows))
    again = twins.fast.forward(pending(rows)).clone()
    torch.testing.assert_close(again, twins.fast._compute(*plain(twins, rows)))


def plain(twins: Twins, rows: list[BatchRow]) -> tuple[FlatBatch, torch.Tensor]:
    """What the model computes from without a graph."""
    tokens = flatten(rows, twins.fast.tables.sync([row.table for row in rows])).on(TRITON.device)  # type: ignore[misc]
    tables = twins.fast.tables.tables
    return tokens, TRITON.kernels.slot_mapping(tables, tokens.token_rows, tokens.positions, BLOCK_SIZE)


class SpiedCopy:
    """A tensor that notes what is copied into it."""

    def __init__(self, tensor: torch.Tensor, sent: list[list[int]]) -> None:
        self.tensor, self.sent = tensor, sent

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        self.sent.append(source.flatten().tolist())
        self.tensor.copy_(source, non_blocking=non_blocking)


ROPE_PARAMETERS = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
]


@pytest.mark.parametrize("rope", ROPE_PARAMETERS, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_both_turn_by_the_same_frequencies_to_the_last_bit(head_dim: int, rope: dict[str, object]) -> None:
    config = config_of(head_dim=head_dim, rope_parameters=rope)
    np.testing.assert_array_equal(fast_frequencies(config).numpy(), reference_frequencies(config))
