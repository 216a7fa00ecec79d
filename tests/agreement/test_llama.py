"""Both Llamas on the same random batches: the same logits within each type's rounding, the same cache afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from minipaged.contracts import BatchRow, Sampled, SamplingInput, StepResult
from minipaged.contracts import BlockTable as AnyTable
from minipaged.engine.grouped_table import GroupedTable
from minipaged.engine.sequence import SequenceState
from minipaged.engine.step_writer import StepWriter
from minipaged.fast import llama as fast_llama
from minipaged.fast import preemption
from minipaged.fast.block_table import DeviceTables
from minipaged.fast.kernels import Paged
from minipaged.fast.kv_cache import KVCache as FastCache
from minipaged.fast.llama import DecodeGraph
from minipaged.fast.llama import Llama as FastLlama
from minipaged.fast.rope import inverse_frequencies as fast_frequencies
from minipaged.fast.sampling import Samples, sample
from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.params import SamplingParams
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.reference.kv_cache import KVCache as ReferenceCache
from minipaged.reference.llama import Llama as ReferenceLlama
from minipaged.reference.rope import inverse_frequencies as reference_frequencies
from minipaged.steps import LOGITS, BlockMoves, Row, Sampling, StepInput
from tests.agreement.kernels import (
    CPU,
    TRITON,
    KernelSet,
    every_kernel_set,
    every_kernel_set_and_dtype,
    every_kernel_set_and_dtype_in_8_bits,
)
from tests.effort import examples, thorough

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""|fast - reference| / |reference| over a row of logits: rounding piles up over the layers."""

BLOCK_SIZE, NUM_BLOCKS = 4, 64


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

    def __init__(
        self,
        kernel_set: KernelSet,
        dtype: torch.dtype,
        config: ModelConfig,
        seed: int,
        kv_cache_dtype: str = "auto",
        *,
        sinks: bool = False,
    ) -> None:
        rng = np.random.default_rng(seed)
        weights = {}
        shapes = weight_shapes(config)
        if sinks:
            shapes |= {f"model.layers.{i}.self_attn.sinks": (config.num_attention_heads,) for i in range(2)}
        for name, shape in shapes.items():
            values = rng.standard_normal(shape) / shape[-1] ** (0.5 if len(shape) == 2 else 0)
            weights[name] = torch.from_numpy(values).to(dtype).float()  # both compute with the same rounded weights
        shape = (config.num_hidden_layers, NUM_BLOCKS, BLOCK_SIZE, config.num_key_value_heads, config.head_dim, 0)
        places = config.groups.places
        arrays = {name: tensor.numpy() for name, tensor in weights.items()}
        self.reference = ReferenceLlama(
            config, arrays, ReferenceCache(*shape, kv_cache_dtype=kv_cache_dtype, places=places)
        )
        tensors = {name: tensor.to(kernel_set.device, dtype) for name, tensor in weights.items()}
        cache = FastCache(*shape, dtype, kv_cache_dtype, None, places, kernel_set.device, kernel_set.kernels)
        self.fast = FastLlama(config, tensors, cache, max_num_seqs=8)
        self.fast.sample = self.choose  # type: ignore[method-assign, assignment]
        self.reference.sample = lambda logits, inputs: list(self.choose(logits, inputs))  # type: ignore[method-assign]
        self.device = kernel_set.device
        self.tolerance = TOLERANCE[dtype]
        if kv_cache_dtype != "auto":  # a number halfway between two codes takes either
            self.tolerance = max(self.tolerance, 0.01 if kv_cache_dtype == "int8" else 0.03)
        self.texts: list[list[int]] = []
        self.sequences: list[SequenceState] = []
        self.num_done: list[int] = []
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.writer = StepWriter()
        self.number = 0
        self.prompt_logprobs: int | None = None
        """What each sequence asks for."""
        self.chosen: list[Samples] = []
        """What was chosen, by the fast one at last."""

    def begin(self, text: list[int], num_known: int | None = None) -> None:
        """A sequence of which the first tokens are known (all, unless it is said), and the others are to be chosen."""
        windows = self.fast.groups.windows
        table: AnyTable = BlockTable(BLOCK_SIZE, self.allocator)
        if windows != (None,):
            table = GroupedTable(BLOCK_SIZE, self.allocator, windows)
        self._begin(text, SequenceState(len(self.texts), text[:num_known], [], table), 0)

    def fork(self, parent: int) -> None:
        """The child goes on with other tokens, and copies the block that it shares before it writes."""
        text, num_done = self.texts[parent], self.num_done[parent]
        other = [*text[:num_done], *reversed(text)]
        self._begin(other, SequenceState(len(self.texts), other, [], self.sequences[parent].table.fork()), num_done)

    def _begin(self, text: list[int], sequence: SequenceState, num_done: int) -> None:
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

    def next_step(
        self, query_lens: list[int], num_choices: list[int] | None = None, drafting: tuple[int, ...] = ()
    ) -> StepInput:
        """The next tokens of each sequence (0: it sits this one out). `num_choices`: logits for all, if left out.
        `drafting`: the sequences of which all but the first token are drafted."""
        rows, owners, copies = [], [], []
        passed = self._give_back()
        for i, sequence in enumerate(self.sequences):
            if num_tokens := min(query_lens[i], len(self.texts[i]) - self.num_done[i]):
                held = len(sequence.entries)
                copied = sequence.table.append(num_tokens)
                self.writer.table_changed(sequence, held - len(copied))
                copies += copied
                first, chosen = self.num_done[i], num_choices[i] if num_choices else LOGITS
                drafted = self.texts[i][first + 1 : first + num_tokens] if i in drafting else ()
                rows.append(Row(i, first, num_tokens, chosen, tuple(drafted)))
                params = SamplingParams(temperature=0, prompt_logprobs=self.prompt_logprobs)
                prompt = sequence.tokens
                request = SimpleNamespace(sampling=Sampling(params, seed=i, stream=0), prompt_token_ids=prompt)
                owners.append((request, sequence))
                self.num_done[i] += num_tokens
        self.number += 1
        return self.writer.write(self.number, rows, owners, BlockMoves(copy=tuple(copies), poison=passed))

    def _give_back(self) -> tuple[int, ...]:
        """Give back what windows have passed. Returns the blocks that nobody holds any more, which become NaN."""
        passed: list[int] = []
        for sequence, num_done in zip(self.sequences, self.num_done, strict=True):
            if isinstance(sequence.table, GroupedTable):
                passed += [block for _, block in sequence.table.give_back(num_done)]
        return tuple(sorted({block for block in passed if not self.allocator.ref_count(block)}))

    def run(self, *arguments: Any) -> StepInput:
        """The next step, on both tiers; compares the logits."""
        step = self.next_step(*arguments)
        _, expected, prompts, _ = self.reference.run(step)
        _, logits, found, _ = self.fast.run(step)
        logits = logits.float().cpu().numpy()
        assert logits.shape == expected.shape
        if len(expected):
            error = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert error.max() < self.tolerance, error
        assert found.keys() == prompts.keys()
        for sequence, tokens in prompts.items():
            assert [one.token_id for one in found[sequence]] == [one.token_id for one in tokens]
            logprobs = [[one.logprob for one in each] for each in (found[sequence], tokens)]
            np.testing.assert_allclose(*logprobs, rtol=0, atol=40 * self.tolerance)  # 2 x |logits|
        return step


COUSINS: list[dict[str, bool]] = [
    {},
    {"qkv_bias": True},
    {"qk_norm": True},
    {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True},
]
"""Of ModelConfig: Llama and Mistral, Qwen2, Qwen3, and all at once."""
GEMMA: dict[str, Any] = {"gemma": True, "layer_windows": (7, None), "query_pre_attn_scalar": 20.0}
FORGETFUL: list[dict[str, Any]] = [
    {"layer_windows": (7, 7)},
    {"layer_windows": (None, 5), "qkv_bias": True},
    GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    GEMMA | {"qk_norm": True, "window_rope_theta": 500.0},
]
"""Settings of ModelConfig: Mistral, Qwen2, Gemma 2 and Gemma 3, with windows that are no multiples of a block."""


@every_kernel_set_and_dtype
@given(data=st.data())
@settings(max_examples=examples(6))
def test_logits_agree_however_the_tokens_are_batched(
    kernel_set: KernelSet, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Prompts in chunks, decoding, mixed batches, forks with copy-on-write."""
    heads, kv_heads = data.draw(st.sampled_from([(4, 2), (3, 3), (6, 1)]))
    config = config_of(num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=heads == 3)
    more = data.draw(st.sampled_from(COUSINS + FORGETFUL))
    config, sinks = replace(config, **more), data.draw(st.booleans())
    twins = Twins(kernel_set, dtype, config, data.draw(st.integers(0, 2**32)), sinks=sinks)
    twins.prompt_logprobs = data.draw(st.sampled_from([None, 0, 2]))
    for _ in range(data.draw(st.integers(1, 3))):
        twins.begin(data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=24)))
    for _ in range(data.draw(st.integers(1, 3 if kernel_set is TRITON else 8))):
        if len(twins.sequences) < 5 and data.draw(st.booleans()):
            twins.fork(data.draw(st.integers(0, len(twins.sequences) - 1)))
        query_len = st.just(1) if data.draw(st.booleans()) else st.integers(0, 8)
        twins.run([data.draw(query_len) for _ in twins.sequences])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("more", FORGETFUL)
@pytest.mark.parametrize("kernel_set", [CPU, pytest.param(TRITON, marks=thorough)], ids=lambda each: each.name)
def test_logits_agree_beyond_a_window(kernel_set: KernelSet, more: dict[str, Any], sinks: bool) -> None:
    """Prompts in chunks that cut windows, decoding, and both at once."""
    twins = Twins(kernel_set, torch.float32, replace(config_of(), **more), seed=0, sinks=sinks)
    for text in (DIGITS * 3, DIGITS * 2, [5]):
        twins.begin(text)
    for query_lens in ([5, 20, 1], [9, 1, 0], [1, 1, 0], [1, 1, 1], [3, 1, 1], [1, 1, 1]):
        twins.run(query_lens)


@every_kernel_set_and_dtype_in_8_bits
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_logits_agree_with_keys_and_values_in_8_bits(
    kernel_set: KernelSet, dtype: torch.dtype, kv_cache_dtype: str
) -> None:
    """Prompts in chunks, decoding, a fork with its copy-on-write."""
    config = replace(config_of(), qk_norm=True)
    twins = Twins(kernel_set, dtype, config, 0, kv_cache_dtype)
    for text in (DIGITS * 2, [7], DIGITS[3:]):
        twins.begin(text)
    for query_lens in ([5, 1, 0], [6, 0, 2], [1, 0, 1]):
        twins.run(query_lens)
    twins.fork(0)
    for query_lens in ([1, 0, 0, 2], [1, 0, 1, 1]):
        twins.run(query_lens)
    exact = Twins(kernel_set, dtype, config, 0)
    exact.begin(DIGITS * 2)
    exact.run([12])
    rounded, expected = (each.fast.kv_cache.read(1, blocks_of(each)) for each in (twins, exact))
    for found, whole in zip(rounded, expected, strict=True):
        apart = (found[0, :12] - whole[0, :12]).float().norm() / whole[0, :12].float().norm()
        assert 1e-3 < apart < 0.05, "they are rounded, and by no more than 8 bits have to be"


def blocks_of(twins: Twins) -> torch.Tensor:
    """The block table of the first sequence, as `KVCache.read` takes it."""
    return torch.tensor([twins.sequences[0].table.blocks], device=twins.device)


@every_kernel_set_and_dtype
def test_biases_and_norms_agree_for_one_token_and_for_many(kernel_set: KernelSet, dtype: torch.dtype) -> None:
    twins = Twins(kernel_set, dtype, replace(config_of(num_hidden_layers=1), **COUSINS[-1]), seed=0)
    for first in range(2):
        twins.begin(DIGITS[first:])
    for query_lens in ([1, 0], [1, 0], [5, 6], [1, 1]):
        twins.run(query_lens)


@every_kernel_set
def test_a_plain_batch_has_the_logits_of_a_step_and_rows_that_want_none_have_none(kernel_set: KernelSet) -> None:
    twins = Twins(kernel_set, torch.float32, config_of(), seed=0)
    twins.fast._graphs = {}  # `forward` takes none, and products of another size may be rounded otherwise
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


# --- Steps in which some sequences decode and others have prompts ---------------------------------


class CountedKernels:
    """Kernels that note how many sequences each attention is for."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.decoded: set[int] = set()
        self.prefilled: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def paged_decode(self, query: torch.Tensor, paged: Paged, *others: Any) -> torch.Tensor:
        self.decoded.add(len(paged.context_lens))
        return self._kernels.paged_decode(query, paged, *others)  # type: ignore[no-any-return]

    def paged_prefill(self, query: torch.Tensor, paged: Paged, *others: Any, max_query_len: int) -> torch.Tensor:
        self.prefilled.add(len(paged.context_lens))
        return self._kernels.paged_prefill(query, paged, *others, max_query_len=max_query_len)  # type: ignore[no-any-return]


def counted(twins: Twins) -> CountedKernels:
    kernels = twins.fast.kv_cache.kernels = CountedKernels(twins.fast.kernels)  # type: ignore[assignment]
    return kernels


@every_kernel_set
def test_rows_of_one_token_take_the_decode_kernel_wherever_they_stand_in_a_batch(kernel_set: KernelSet) -> None:
    """The first rows, the last ones, some in between; those that want no logits; the last token of a prompt."""
    twins = Twins(kernel_set, torch.float32, config_of(), seed=5)
    twins.fast._graphs = {}  # or those that decode would take one, and no kernel would be called
    for first in range(4):
        twins.begin(DIGITS[first:])
    for query_lens, num_choices, decoded, prefilled in (
        ([1, 4, 1, 3], [LOGITS] * 4, {2}, {2}),
        ([3, 1, 0, 1], [LOGITS, 0, 0, LOGITS], {2}, {1}),
        ([2, 2, 1, 0], [LOGITS, 0, 0, 0], {1}, {2}),
        ([1, 1, 2, 1], [0, 0, 0, 0], {3}, {1}),
        ([2, 0, 3, 2], [LOGITS] * 4, set(), {3}),
        ([1, 1, 1, 1], [LOGITS, 0, LOGITS, LOGITS], {4}, set()),
    ):
        kernels = counted(twins)
        twins.run(query_lens, num_choices)
        assert (kernels.decoded, kernels.prefilled) == (decoded, prefilled)


DRAFTING: list[tuple[list[int], list[int], tuple[int, ...], int, int]] = [
    # query tokens and choices of each sequence, those that draft; the rows of both kernels
    ([5, 5, 0, 0], [1, 1, 0, 0], (), 0, 2),
    ([4, 1, 0, 0], [1, 1, 0, 0], (0,), 5, 0),
    ([1, 3, 4, 0], [1, 1, 0, 0], (1,), 4, 1),  # beside a chunk of a prompt
    ([2, 4, 1, 5], [1, 1, 1, 1], (0, 1), 7, 1),  # beside a prompt's last token, and a prompt that comes last
    ([1, 1, 5, 2], [1, 1, 1, 1], (2, 3), 9, 0),
    ([1, 1, 1, 1], [1, 1, 1, 1], (), 4, 0),
    ([1, 1, 1, 1], [1, 1, 1, 1], (), 4, 0),
]


@every_kernel_set
def test_drafted_tokens_take_the_decode_kernel_one_by_one(kernel_set: KernelSet) -> None:
    twins = Twins(kernel_set, torch.float32, config_of(), seed=13)
    twins.fast._graphs = {}
    for first in range(4):
        twins.begin(DIGITS[first:], 5)
    for query_lens, num_choices, drafting, decoded, prefilled in DRAFTING:
        kernels = counted(twins)
        twins.run(query_lens, num_choices, drafting)
        assert (kernels.decoded, kernels.prefilled) == ({decoded} - {0}, {prefilled} - {0})


class Replays:
    """How often each size's graph has been replayed, and how often it was sent numbers."""

    def __init__(self, llama: FastLlama) -> None:
        self.sizes: list[int] = []
        self.sent: list[list[int]] = []
        for size, graph in llama._graphs.items():
            graph.numbers = SpiedCopy(graph.numbers, self.sent)  # type: ignore[assignment]
            graph._replay = partial(self._replay, size, graph._replay)  # type: ignore[method-assign]

    def _replay(self, size: int, right: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        self.sizes.append(size)
        return right(*arguments)


PROMPTS_AMONG_DECODING: list[tuple[list[int], list[int], int | None, bool]] = [
    # query tokens and choices of each sequence; the graph of those that decode, and whether it is sent numbers
    ([5, 5, 0, 0, 0], [1, 1, 0, 0, 0], None, False),  # nobody decodes
    ([1, 1, 0, 5, 0], [1, 1, 0, 1, 0], 2, True),  # a prompt arrives; two go on with tokens that are being chosen
    ([1, 1, 0, 1, 0], [1, 1, 0, 1, 0], 4, True),  # all three decode
    ([1, 1, 0, 1, 0], [1, 1, 0, 1, 0], 4, False),
    ([1, 1, 0, 1, 0], [1, 1, 0, 1, 0], 4, False),
    ([1, 1, 2, 1, 0], [1, 1, 0, 1, 0], 4, False),  # a chunk in the middle: they are where the device has moved them
    ([1, 1, 2, 1, 0], [1, 1, 0, 1, 0], 4, False),
    ([1, 1, 1, 1, 5], [1, 1, 1, 1, 1], 4, True),  # the prompt's last chunk is one token; another prompt
    ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1], 8, True),
    ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1], 8, False),
]


@pytest.mark.usefixtures("uncaptured")
def test_a_captured_step_has_the_tables_and_the_slots_of_every_group() -> None:
    """Far beyond four windows. What they have passed is NaN, or another's. A prompt comes in chunks, with holes behind
    them, and its sequence takes another's place."""
    config = replace(config_of(num_hidden_layers=3), layer_windows=(None, 3, 3))
    twins = Twins(TRITON, torch.float32, config, seed=12)
    assert twins.fast.groups.windows == (None, 3, 3)
    for first, num_known in enumerate((5, 5, 12)):
        twins.begin(DIGITS[first:] * 2, num_known)
    captured(twins)
    replays = Replays(twins.fast)
    twins.run([5, 5, 0], [1, 1, 0])
    for _ in range(10):
        twins.run([1, 1, 0], [1, 1, 0])
    for chunk, chosen in ((5, 0), (4, 0), (3, 1)):
        twins.run([1, 0, chunk], [1, 0, chosen])
    for _ in range(3):
        twins.run([1, 1, 1], [1, 1, 1])
    assert replays.sizes == [2] * 10 + [1] * 3 + [4] * 3
    tables = [sequence.table for sequence in twins.sequences]
    assert [list(table.holes) for table in tables] == [[0, 4, 4], [0, 3, 3], [0, 3, 3]]


def begin_five(seed: int) -> Twins:
    twins = Twins(TRITON, torch.float32, config_of(), seed=seed)
    for first in range(5):
        twins.begin(DIGITS[first:], 5)
    return twins


@pytest.mark.usefixtures("uncaptured")
def test_drafted_tokens_run_in_the_graph_of_their_number() -> None:
    twins = Twins(TRITON, torch.float32, config_of(), seed=14)
    for first in range(4):
        twins.begin(DIGITS[first:], 5)
    captured(twins)
    replays = Replays(twins.fast)
    for query_lens, num_choices, drafting, *_ in DRAFTING:
        twins.run(query_lens, num_choices, drafting)
    assert replays.sizes == [8, 4, 8, 4, 4], "nine rows are more than the largest graph has"


@thorough
@pytest.mark.usefixtures("uncaptured")
def test_sequences_that_decode_keep_their_graph_when_a_prompt_arrives() -> None:
    twins = begin_five(6)
    captured(twins)
    replays = Replays(twins.fast)
    for query_lens, num_choices, size, sends in PROMPTS_AMONG_DECODING:
        num_replays, num_sent, kernels = len(replays.sizes), len(replays.sent), counted(twins)
        twins.run(query_lens, num_choices)
        assert replays.sizes[num_replays:] == ([] if size is None else [size]), query_lens
        assert (len(replays.sent) > num_sent) == sends, query_lens
        assert kernels.prefilled == {sum(n > 1 for n in query_lens)} - {0}
        assert twins.chosen[-1]._fetched is None, "the host had no need to look"


WAYS: dict[str, dict[str, object]] = {
    "in two parts": {},
    "in one pass": {"_has_small_layers": False},
    "more than the largest graph": {"_graphs": {}},
}
NUM_KNOWN = 9


def run_at_random(way: str, *, windows: tuple[int | None, ...] = (), num_steps: int = 20) -> list[str]:
    """Eight sequences that begin one after another, in no order of theirs: in each step each may run a part of its
    prompt, or the token that was chosen for it. Returns the rows of each step: d for one token, p for more,
    in capitals where logits are wanted."""
    twins = Twins(TRITON, torch.float32, replace(config_of(), layer_windows=windows), seed=7)
    for first in range(8):
        twins.begin(DIGITS[first:], NUM_KNOWN)
    captured(twins)
    for name, value in WAYS[way].items():
        setattr(twins.fast, name, value)
    replays, rng, steps = Replays(twins.fast), np.random.default_rng(3), list[str]()
    for step in range(num_steps):
        lens, choices = [0] * 8, [0] * 8
        for i, (done, text) in enumerate(zip(twins.num_done, twins.texts, strict=True)):
            if step >= i * 5 % 8 * 2:
                most = NUM_KNOWN - done if done < NUM_KNOWN else min(1, len(text) - 1 - done)
                lens[i] = min(most, int(rng.choice([1, 1, 2, 4])))
                choices[i] = int(lens[i] > 0 and done + lens[i] >= NUM_KNOWN)
        twins.run(lens, choices)
        rows = [(n, chosen) for n, chosen in zip(lens, choices, strict=True) if n]
        steps.append("".join("dDpP"[2 * (n > 1) + chosen] for n, chosen in rows))
    assert bool(replays.sizes) == bool(twins.fast._graphs)
    return steps


@pytest.mark.usefixtures("uncaptured")
def test_lanes_take_the_graphs_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes that decode by the same graph: each with its own tokens, positions and tables. What the graph has
    computed for one is there still when the other has run."""
    kernel_set = TRITON if TRITON.device.type == "cuda" else CPU
    twins = Twins(kernel_set, torch.float32, config_of(), seed=11)
    fast = twins.fast
    tables = DeviceTables(16, NUM_BLOCKS, kernel_set.device, kernel_set.kernels, num_lanes=2)
    monkeypatch.setattr(fast, "tables", tables)
    monkeypatch.setattr(fast, "_has_lanes", True)
    captured(twins)
    replays = Replays(fast)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    run = fast.run

    def watched(step: StepInput) -> StepResult:
        result = run(step)
        kept.append((result.logits, result.logits.clone()))
        return result

    monkeypatch.setattr(fast, "run", watched)
    for number in range(8):
        twins.begin(DIGITS[number:], 5)
    writers = [StepWriter(lane) for lane in range(2)]
    for tokens in (5, 1, 1, 1, 1, 1):
        for lane in range(2):
            twins.writer = writers[lane]
            here = [number // 4 == lane for number in range(8)]
            twins.run([tokens * mine for mine in here], [int(mine) for mine in here])
    assert replays.sizes == [4] * 10
    assert all(torch.equal(logits, as_they_were) for logits, as_they_were in kept)


@thorough
@pytest.mark.usefixtures("uncaptured")
@pytest.mark.parametrize("windows", [(), (3, None)], ids=["all see everything", "windows"])
@pytest.mark.parametrize("way", WAYS)
def test_logits_agree_whichever_way_a_mixed_batch_goes(way: str, windows: tuple[int | None, ...]) -> None:
    steps = run_at_random(way, windows=windows)
    mixed = [step for step in steps if {"d", "p"} <= set(step.lower())]
    assert len(mixed) > 10
    assert any("P" in step and "D" in step.partition("P")[2] for step in mixed), "a prompt's logits are not the last"
    assert any("D" in step and "d" in step for step in mixed), "some that decode want logits, some do not"
    assert any("D" in step and "P" not in step for step in mixed), "no logits of prompts"
    assert any("P" in step and "D" not in step for step in mixed), "no logits of those that decode"
    assert any(step.islower() for step in mixed), "no logits"


@pytest.mark.usefixtures("uncaptured")
def test_prompts_are_told_of_in_a_step_with_graphs_and_where_a_chunk_is_one_token() -> None:
    """Which is laid out with those that decode, but does not run in their graph."""
    twins = Twins(TRITON, torch.float32, config_of(), seed=7)
    twins.prompt_logprobs = 2
    for first, num_known in ((0, 4), (3, 9), (5, 6)):
        twins.begin(DIGITS[first:], num_known)
    captured(twins)
    replays = Replays(twins.fast)
    for query_lens, num_choices, sizes in (
        ([4, 0, 0], [1, 0, 0], []),
        ([1, 3, 0], [1, 0, 0], [1]),  # the first decodes beside a prompt
        ([1, 1, 4], [1, 0, 0], []),  # a chunk of one token
        ([1, 5, 1], [1, 1, 0], []),
        ([1, 1, 1], [1, 1, 1], [4]),  # the third has its last one, which tells nothing of the prompt
    ):
        before = len(replays.sizes)
        twins.run(query_lens, num_choices)
        assert replays.sizes[before:] == sizes, query_lens
        assert twins.chosen[-1]._fetched is None, "the host had no need to look"


@every_kernel_set
def test_a_prompt_is_told_of_beside_the_logits_of_all_rows(kernel_set: KernelSet) -> None:
    twins = Twins(kernel_set, torch.float32, config_of(), seed=0)
    twins.prompt_logprobs = 0
    twins.begin([3, 1, 4])
    twins.run([1])  # which wants its logits here, though it is a chunk of a prompt
    twins.run([2])


BUGS: dict[str, dict[str, Callable[[Any], object]]] = {
    "logits in the order in which rows are laid out": {"logit_rows": lambda tokens: tokens.logit_rows.sort().values},
    "tokens that are being chosen unknown to the graph": {"chosen": lambda tokens: None},
}


@thorough
@pytest.mark.usefixtures("uncaptured")
@pytest.mark.parametrize("bug", BUGS)
def test_a_batch_that_is_laid_out_wrongly_is_found_out(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = fast_llama.flatten

    def flatten(*arguments: Any) -> Any:
        tokens = right(*arguments)
        is_mixed = 0 < tokens.num_decoding < len(tokens.rows)
        wrong = {name: change(tokens) for name, change in BUGS[bug].items()} if is_mixed else {}
        return replace(tokens, **wrong)

    monkeypatch.setattr(fast_llama, "flatten", flatten)
    with pytest.raises(AssertionError):
        run_at_random("in two parts")


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
