"""Both Llamas on the same random batches: the same logits within each type's rounding, the same cache afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from minipaged.contracts import BatchRow, Sampled, SamplingInput
from minipaged.engine.sequence import Sequence
from minipaged.engine.step_writer import StepWriter
from minipaged.fast import preemption
from minipaged.fast.kv_cache import KVCache as FastCache
from minipaged.fast.llama import DecodeGraph
from minipaged.fast.llama import Llama as FastLlama
from minipaged.fast.llama import inverse_frequencies as fast_frequencies
from minipaged.fast.sampling import Samples, sample
from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.params import SamplingParams
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.reference.kv_cache import KVCache as ReferenceCache
from minipaged.reference.llama import Llama as ReferenceLlama
from minipaged.reference.llama import inverse_frequencies as reference_frequencies
from minipaged.steps import LOGITS, BlockMoves, Row, StepInput
from tests.agreement.kernels import TRITON, KernelSet, every_kernel_set, every_kernel_set_and_dtype
from tests.effort import examples, thorough

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


@pytest.fixture(scope="module", autouse=True)
def _short_probe() -> Iterator[None]:
    """How fast a model prefills does not matter here, and interpreted kernels take seconds to tell."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(preemption, "PROBE_TOKENS", 1)
        yield


class Twins:
    """The same model on each tier, given the same steps. Every sequence has a text; the token to choose is the next."""

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
        self.fast.sample = self.choose  # type: ignore[method-assign, assignment]
        self.reference.sample = lambda logits, inputs: list(self.choose(logits, inputs))  # type: ignore[method-assign]
        self.device, self.dtype = kernel_set.device, dtype
        self.texts: list[list[int]] = []
        self.sequences: list[Sequence] = []
        self.num_done: list[int] = []
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.writer = StepWriter()
        self.number = 0
        self.chosen: list[Samples] = []
        """What was chosen, by the fast one at last."""

    def begin(self, text: list[int], num_known: int | None = None) -> None:
        """A sequence of which the first tokens are known (all, unless it is said), and the others are to be chosen."""
        table = BlockTable(BLOCK_SIZE, self.allocator)
        self._begin(text, Sequence(len(self.texts), text[:num_known], [], table), 0)

    def fork(self, parent: int) -> None:
        """The child goes on with other tokens, and copies the block that it shares before it writes."""
        text, num_done = self.texts[parent], self.num_done[parent]
        other = [*text[:num_done], *reversed(text)]
        self._begin(other, Sequence(len(self.texts), other, [], self.sequences[parent].table.fork()), num_done)

    def _begin(self, text: list[int], sequence: Sequence, num_done: int) -> None:
        self.texts.append(text)
        self.sequences.append(sequence)
        self.num_done.append(num_done)

    def choose(self, _: object, inputs: list[SamplingInput]) -> Samples | list[Sampled]:
        """For each the next token of its text; further choices are others."""
        if not inputs:
            return []
        token_ids = [(self.texts[one.seed][one.position] + one.stream) % 64 for one in inputs]
        self.chosen.append(fast_samples(token_ids, self.device))
        return self.chosen[-1]

    def next_step(self, query_lens: list[int], num_choices: list[int] | None = None) -> StepInput:
        """The next tokens of each sequence (0: it sits this one out). `num_choices`: logits for all, if left out."""
        rows, owners, copies = [], [], []
        for i, sequence in enumerate(self.sequences):
            if num_tokens := min(query_lens[i], len(self.texts[i]) - self.num_done[i]):
                held = len(sequence.table.blocks)
                copied = sequence.table.append(num_tokens)
                self.writer.table_changed(sequence, held - len(copied))
                copies += copied
                rows.append(Row(i, self.num_done[i], num_tokens, num_choices[i] if num_choices else LOGITS))
                params = SamplingParams(temperature=0)
                prompt = sequence.tokens
                request = SimpleNamespace(params=params, seed=i, prompt_token_ids=prompt, forbidden_token_ids=())
                owners.append((request, sequence))
                self.num_done[i] += num_tokens
        self.number += 1
        return self.writer.write(self.number, rows, owners, BlockMoves(copy=tuple(copies)))

    def run(self, *arguments: list[int]) -> StepInput:
        """The next step, on both tiers; compares the logits."""
        step = self.next_step(*arguments)
        expected = self.reference.run(step).logits
        logits = self.fast.run(step).logits.float().cpu().numpy()
        assert logits.shape == expected.shape
        if len(expected):
            error = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert error.max() < TOLERANCE[self.dtype], error
        return step


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
def test_a_plain_batch_has_the_logits_of_a_step_and_rows_that_want_none_have_none(kernel_set: KernelSet) -> None:
    twins = Twins(kernel_set, torch.float32, config_of(), seed=0)
    for token_ids in ([1, 2, 3], [4], [5, 6]):
        twins.begin(token_ids)
    logits = twins.fast.run(twins.next_step([3, 1, 2])).logits
    batch = [BatchRow(sequence.tokens, 0, sequence.table.blocks, wants_logits=True) for sequence in twins.sequences]
    torch.testing.assert_close(twins.fast.forward(batch), logits, rtol=0, atol=0)
    silent = [replace(row, wants_logits=False) for row in batch]
    assert twins.fast.forward(silent).shape == (0, 64)
    some = twins.fast.forward([silent[0], batch[1], silent[2]])
    torch.testing.assert_close(some, logits[1:2], rtol=1e-5, atol=1e-5)


DIGITS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]


@every_kernel_set
def test_a_token_that_is_being_chosen_runs_as_if_it_were_known(kernel_set: KernelSet) -> None:
    """In a mixed batch and in ones that only decode; whichever of the choices it is."""
    twins = Twins(kernel_set, torch.float32, config_of(), seed=1)
    for first, num_known in ((0, 4), (4, None), (9, 4)):
        twins.begin(DIGITS[first:], num_known)
    for query_lens, num_choices in (
        ([4, 1, 4], [1, 0, 1]),  # two prompts, and a chunk of a third
        ([1, 4, 1], [1, 0, 1]),  # the third goes on
        ([1, 3, 1], [1, 3, 1]),  # it is done, and three tokens are chosen: the last row's is choice 4
        ([1, 0, 1], [1, 0, 1]),
        ([1, 0, 1], [1, 0, 1]),  # they go on
        ([1, 0, 1], [1, 0, 1]),
        ([0, 0, 1], [0, 0, 1]),
        ([1, 0, 1], [1, 0, 1]),  # one has been left out, and comes back
        ([1, 0, 1], [1, 0, 1]),
    ):
        twins.run(query_lens, num_choices)
        assert twins.chosen[-1]._fetched is None, "the host had no need to look"


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
def test_a_captured_step_moves_its_sequences_on_by_itself_and_is_told_of_every_other_change() -> None:
    """Decoding of tokens being chosen, across blocks: nothing is sent. That one goes, comes or stays behind is sent."""
    twins = Twins(TRITON, torch.float32, config_of(), seed=3)
    for first in range(4):
        twins.begin(DIGITS[first:], 5)
    twins.run([5, 5, 5, 0], [1, 1, 1, 0])
    graph = captured(twins)
    sent: list[list[int]] = []
    graph.numbers = SpiedCopy(graph.numbers, sent)  # type: ignore[assignment]

    def step(*which: int, silent: int | None = None) -> bool:
        """Decode one token of each of these; whether anything had to be sent."""
        before, replayed = len(sent), graph.replays
        lens = [int(i in which) for i in range(4)]
        twins.run(lens, [n * (i != silent) for i, n in enumerate(lens)])
        assert graph.replays == replayed + 1
        return len(sent) > before

    graph.replays = 0  # type: ignore[attr-defined]
    replay = graph._replay

    def counted(*arguments: Any) -> torch.Tensor:
        graph.replays += 1  # type: ignore[attr-defined]
        return replay(*arguments)

    graph._replay = counted  # type: ignore[method-assign]
    assert step(0, 1, 2), "the first step"
    assert [step(0, 1, 2) for _ in range(4)] == [False] * 4, "the same ones go on"
    assert step(0, 2, 3, silent=3), "another takes a place, with a known token, and wants no logits"
    assert step(0, 2, 3, silent=3)
    assert step(0, 1, 2), "the first comes back, with a known token"
    assert step(0, 1, 2), "each runs the choice of its own row from here on"
    assert [step(0, 1, 2) for _ in range(3)] == [False] * 3


@thorough
@pytest.mark.usefixtures("uncaptured")
def test_after_a_captured_step_that_was_cut_short_a_fresh_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may have moved its sequences on already. (On a GPU, Ctrl-C right after the launch.)"""
    twins = Twins(TRITON, torch.float32, config_of(), seed=4)
    for first in range(3):
        twins.begin(DIGITS[first:], 3)
    twins.run([3, 3, 3], [1, 1, 1])
    graph = captured(twins)
    for _ in range(3):
        twins.run([1, 1, 1], [1, 1, 1])
    replay = graph.graph.replay

    def cut_short() -> None:
        replay()
        raise KeyboardInterrupt

    step = twins.next_step([1, 1, 1], [1, 1, 1])
    with monkeypatch.context() as patch:
        patch.setattr(graph, "graph", MagicMock(replay=cut_short))
        with pytest.raises(KeyboardInterrupt):
            twins.fast.run(step)
    twins.writer.forget()
    for i, sequence in enumerate(twins.sequences):
        sequence.tokens = twins.texts[i][:7]
        twins.num_done[i] -= 1  # once more
        sequence.table.trim(6)
    for _ in range(3):
        twins.run([1, 1, 1], [1, 1, 1])


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
