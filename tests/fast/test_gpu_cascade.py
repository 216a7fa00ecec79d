"""Shared reading in Triton: the result is that of reading every block for each sequence, whoever shares.

Without a GPU the kernels run in Triton's interpreter, in fp32 and fp16. All that no token fills is NaN, and so is what
they allocate, until they write it (`guarded.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

pytest.importorskip("triton")  # there is none for this machine's operating system

from minipaged.contracts import BatchRow, Runner, Tier
from minipaged.engine.engine import Engine
from minipaged.fast import llama as fast_llama
from minipaged.fast import preemption
from minipaged.fast.cascade import shared_prefixes
from minipaged.fast.gpu import attention, paged_decode
from minipaged.fast.kernels import Paged, Shared
from minipaged.fast.kv_cache import KVCache as FastCache
from minipaged.params import EngineConfig, SamplingParams
from minipaged.reference.attention import paged_attention
from minipaged.reference.cascade import cascade_attention
from minipaged.reference.kv_cache import KVCache as ReferenceCache
from minipaged.tiers import fast_tier, reference_tier
from tests.agreement.kernels import TOLERANCE, TRITON
from tests.agreement.test_llama import Replays, Twins, captured, config_of, uncaptured  # noqa: F401
from tests.effort import examples, thorough
from tests.fast.guarded import GuardedMemory
from tests.fast.test_cpu_cascade import prefixes_of

LAYER = 1


@dataclass
class Batch:
    """Sequences with one query token each, in the caches of both tiers, and their shared prefixes."""

    query: torch.Tensor  # [seqs, heads, head_dim]
    cache: FastCache
    reference_cache: ReferenceCache
    tables: np.ndarray  # [seqs, max_blocks]
    lens: np.ndarray  # [seqs]
    scale: float = 0.3
    window: int | None = None
    soft_cap: float | None = None
    sinks: np.ndarray | None = None  # [heads]

    @property
    def shared(self) -> Shared | None:
        return shared_prefixes(torch.from_numpy(self.tables), torch.from_numpy(self.lens), self.cache.block_size)

    def decoded(self, shared: Shared | None, num_sms: int = 2) -> torch.Tensor:
        device = self.query.device
        tables, lens = (torch.from_numpy(each).to(device) for each in (self.tables, self.lens))
        rows = torch.arange(len(lens), dtype=torch.int32, device=device)
        on_device = None if shared is None else Shared(*(each.to(device) for each in shared))
        keys, values = self.cache.layer(LAYER)
        sinks = None if self.sinks is None else torch.from_numpy(self.sinks).to(device)
        variants = self.window, self.soft_cap, sinks
        paged = Paged(keys, values, tables, rows, lens, self.cache.scales(LAYER), on_device, *variants)
        with pytest.MonkeyPatch.context() as patched, GuardedMemory():
            patched.setattr(attention, "_num_sms", lambda device: num_sms)
            return paged_decode(self.query, paged, self.scale)

    def expected(self) -> np.ndarray:
        """By the reference, which reads every block for each sequence; and by its own shared reading."""
        query = self.query.float().cpu().numpy()
        starts = np.arange(len(self.lens) + 1)
        cache, rest = self.reference_cache, (self.lens, self.scale, self.window, self.soft_cap, self.sinks)
        one_by_one = paged_attention(query, cache, LAYER, self.tables, starts, *rest)
        together = cascade_attention(query, cache, LAYER, self.tables, *rest)
        np.testing.assert_allclose(together, one_by_one, rtol=0, atol=1e-5 * np.abs(one_by_one).max())
        return one_by_one

    def check(self, found: torch.Tensor) -> None:
        expected, result = self.expected(), found.float().cpu().numpy()
        assert np.isfinite(result).all()
        tolerance = TOLERANCE[found.dtype]
        np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())

    def check_who_reads(self, shared: Shared, blocks: int) -> None:
        """The blocks of each prefix are read in its first member's table: the others' entries lead to NaN here."""
        expected = self.decoded(None)
        unused = min(set(range(self.cache.num_blocks)) - set(self.tables.ravel().tolist()))
        first = shared.members[shared.starts[:-1].long()].tolist()
        others = [member for member in shared.members.tolist() if member not in first]
        tables = self.tables.copy()
        tables[others, :blocks] = unused
        found = replace(self, tables=tables).decoded(shared)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def make_batch(
    prefixes: Sequence[tuple[int, int]],
    lens: Sequence[int],
    *,
    block_size: int = 16,
    kv_heads: int = 1,
    group: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float16,
    kv_cache_dtype: str = "auto",
    seed: int = 0,
) -> Batch:
    """`prefixes`: of each the number of members, and of its blocks. `lens`: of all sequences, the tokens after
    those; the sequences after the members share nothing. They are in random order."""
    rng = np.random.default_rng(seed)
    common = [number for members, blocks in prefixes for number in [blocks] * members]
    common += [0] * (len(lens) - len(common))
    context_lens = np.array(common) * block_size + lens
    counts = -(-context_lens // block_size)
    total = int(counts.sum()) + 1
    shape = (LAYER + 1, total, block_size, kv_heads, head_dim, 0)
    cache = FastCache(*shape, dtype, kv_cache_dtype, device=TRITON.device, kernels=TRITON.kernels)
    reference_cache = ReferenceCache(*shape, kv_cache_dtype=kv_cache_dtype)
    cache.poison(range(total))
    reference_cache.poison(range(total))
    places = iter(rng.permutation(total).tolist())
    tables = np.full((len(lens), int(counts.max())), -1, np.int32)
    first = 0
    for members, blocks in prefixes:
        tables[first : first + members, :blocks] = [next(places) for _ in range(blocks)]
        first += members
    for table, shared, count in zip(tables, common, counts, strict=True):
        table[shared:count] = [next(places) for _ in range(count - shared)]
    for table, length in zip(tables, context_lens, strict=True):
        slots = table[np.arange(length) // block_size] * block_size + np.arange(length) % block_size
        k, v = torch.from_numpy(rng.standard_normal((2, int(length), kv_heads, head_dim))).to(TRITON.device, dtype)
        cache.write(LAYER, torch.from_numpy(slots).to(TRITON.device), k, v)
        reference_cache.write(LAYER, slots, k.float().cpu().numpy(), v.float().cpu().numpy())
    order = rng.permutation(len(lens))
    query = torch.from_numpy(rng.standard_normal((len(lens), kv_heads * group, head_dim))).to(TRITON.device, dtype)
    return Batch(query, cache, reference_cache, tables[order], context_lens[order].astype(np.int32))


@given(data=st.data())
@settings(max_examples=examples(24))
def test_what_is_read_once_gives_the_result_of_reading_it_for_each(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([16, 4, 7, 64, 100, 256]))
    most = max(1, 300 // block_size)
    prefixes = data.draw(
        st.lists(st.tuples(st.integers(2, 8), st.integers(1, most) | st.just(most)), min_size=1, max_size=3)
    )
    alone = data.draw(st.integers(0, 2))
    seqs = sum(members for members, _ in prefixes) + alone
    own = st.sampled_from([1, block_size - 1, block_size, block_size + 1, 64]) | st.integers(1, 100)
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (1, 8), (1, 20)]))
    batch = make_batch(
        prefixes,
        data.draw(st.lists(own.map(lambda n: max(1, n)), min_size=seqs, max_size=seqs)),
        block_size=block_size,
        kv_heads=kv_heads,
        group=group,
        head_dim=data.draw(st.sampled_from([16, 32, 40])),
        dtype=data.draw(st.sampled_from(TRITON.dtypes)),
        kv_cache_dtype=data.draw(st.sampled_from(["auto", "auto", "int8", "fp8"])),
        seed=data.draw(st.integers(0, 2**32)),
    )
    if data.draw(st.booleans()):
        batch.soft_cap = data.draw(st.sampled_from([None, 0.7, 10.0]))
        batch.sinks = np.random.default_rng(0).standard_normal(kv_heads * group).astype(np.float32)
    shared = batch.shared
    assert shared is not None
    assert set(prefixes) <= {(len(shared.members), 0)} or len(shared.num_tokens) == len(prefixes)
    batch.check(batch.decoded(shared, num_sms=data.draw(st.sampled_from([1, 2, 16]))))


def test_what_is_read_once_has_soft_caps_and_one_sink() -> None:
    batch = make_batch([(3, 9)], [5, 20, 70, 200], dtype=torch.float32)
    batch.soft_cap, batch.sinks = 0.7, np.array([1.0, 3.0], np.float32)
    batch.check(batch.decoded(batch.shared, num_sms=16))


def test_a_layer_with_a_window_shares_nothing() -> None:
    batch = make_batch([(3, 9)], [5, 20, 70, 30], dtype=torch.float32)
    shared = batch.shared
    assert shared is not None
    batch.window = 50
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention, "_shared_kernel", None)
        batch.check(batch.decoded(shared))


@thorough
def test_every_prefix_has_the_tiles_that_it_needs() -> None:
    """The first prefix fills its one tile, and the second has a row more than a tile. Nothing is left of the grid then:
    if the second began a tile later, its last sequence would have none, and would read its own entries."""
    rows = attention.shared_options(torch.float32, 16, 1, 64, 80, in_8_bits=False)["ROWS"]
    sizes = [rows, rows + 1]
    batch = make_batch([(size, 1) for size in sizes], [1] * sum(sizes), block_size=64, group=1, dtype=torch.float32)
    shared = in_order(batch.shared, sizes)
    assert attention._shared_tiles(sum(sizes), 2, 1, rows) == 3
    batch.check_who_reads(shared, 1)


def in_order(shared: Shared | None, sizes: list[int]) -> Shared:
    """Order the same prefixes by these sizes."""
    assert shared is not None
    members, starts, num_tokens = shared
    parts = {z - a: (members[a:z], n) for (a, z), n in zip(pairwise(starts.tolist()), num_tokens, strict=True)}
    first = torch.tensor([0, *sizes]).cumsum(0).int()
    return Shared(torch.cat([parts[size][0] for size in sizes]), first, torch.stack([parts[size][1] for size in sizes]))


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_shared_lots_are_read_once() -> None:
    """144 tokens are two whole lots of 64, and a rest that each reads for itself."""
    batch = make_batch([(3, 9)], [5, 20, 70, 30], dtype=torch.float32)
    shared = batch.shared
    assert shared is not None
    assert shared.num_tokens.tolist() == [144]
    batch.check_who_reads(shared, 8)
    with pytest.raises(AssertionError):
        batch.check_who_reads(shared, 9)


# --- The model ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "PROBE_TOKENS", 1)


class Seen:
    """The shared prefixes of each decoding attention of the first layer. From here on models take a GPU's way, and
    share all that can be shared."""

    def __init__(self, twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefixes: list[list[tuple[list[int], int]]] = []
        cache = twins.fast.kv_cache
        self._first, self._decode = cache.layer(0)[0].data_ptr(), cache.kernels.paged_decode
        monkeypatch.setattr(cache.kernels, "paged_decode", self._seen)
        monkeypatch.setattr(fast_llama, "is_gpu", lambda device: True)
        monkeypatch.setattr(fast_llama, "LEAST_SAVED_ON_GPU", 1)

    def _seen(self, query: torch.Tensor, paged: Paged, scale: float) -> torch.Tensor:
        if paged.keys.data_ptr() == self._first:
            self.prefixes.append(prefixes_of(paged.shared))
        return self._decode(query, paged, scale)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [
        (torch.float32, "auto"),
        pytest.param(torch.float16, "auto", marks=thorough),
        pytest.param(torch.float32, "int8", marks=thorough),
    ],
)
def test_logits_are_the_references(dtype: torch.dtype, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences share; before them are one that shares nothing, and a prompt; behind them is one whose table
    differs from theirs in one block."""
    twins = Twins(TRITON, dtype, config_of(max_position_embeddings=256), 2, kv_cache_dtype)
    seen = Seen(twins, monkeypatch)
    rows = [
        BatchRow([7], 20, [31, 30, 29, 28, 27, 33], wants_logits=True),
        BatchRow([1, 2, 3], 0, [38], wants_logits=True),
        *(BatchRow([3 + i], 128, [*range(32), 34 + i], wants_logits=True) for i in range(3)),
        BatchRow([9], 128, [*range(20), 5, *range(21, 32), 37], wants_logits=True),
    ]
    for batch in ([BatchRow([7 * i % 64 for i in range(128)], 0, range(32), wants_logits=False)], rows):
        expected, logits = twins.reference.forward(batch), twins.fast.forward(batch).float().cpu().numpy()
    assert seen.prefixes == [[([1, 2, 3], 128)]]
    error = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < twins.tolerance, error


@pytest.mark.usefixtures("uncaptured")
@pytest.mark.parametrize("windows", [(), (200, 5)], ids=["all see everything", "windows"])
def test_a_step_that_shares_is_not_replayed_and_its_prefixes_stay_while_its_sequences_go_on(
    windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window of 200 is longer than a sequence can be, and such layers share. They are the second group."""
    twins = Twins(TRITON, torch.float32, replace(config_of(), layer_windows=windows), seed=8)
    twins.begin([7 * i % 64 for i in range(90)], 68)
    twins.run([68], [1])
    twins.fork(0)
    twins.fork(0)
    captured(twins)
    seen, replays, searched = Seen(twins, monkeypatch), Replays(twins.fast), list[int]()

    def counted(*arguments: Any, **least: int) -> Shared | None:
        searched.append(1)
        return shared_prefixes(*arguments, **least)

    monkeypatch.setattr(fast_llama, "shared_prefixes", counted)
    for _ in range(5):
        twins.run([1, 1, 1], [1, 1, 1])
    twins.begin([1, 2, 3, 4, 5, 6, 7, 8])
    twins.run([1, 1, 1, 5], [1, 1, 1, 1])  # beside a prompt
    window_shares: list[Any] = [[]] if windows else []  # its layer has the same place in its group's blocks
    assert seen.prefixes == [[([0, 1, 2], 68)], *window_shares] * 6
    assert len(searched) == 3
    assert replays.sizes == []
    saved = 2 * 68 * 2 * 2 * 32 * 4  # bytes: two read what the third reads; keys, values; 2 heads of 32 numbers
    if windows:
        saved //= 2  # by one of two layers
    for least, sizes in ((saved + 1, [4]), (saved, [])):
        monkeypatch.setattr(fast_llama, "LEAST_SAVED_ON_GPU", least)
        before = len(replays.sizes)
        twins.run([1, 1, 1, 0], [1, 1, 1, 0])
        twins.run([0, 0, 0, 1], [0, 0, 0, 0])
        assert replays.sizes[before:] == [*sizes, 1]


def test_requests_get_the_references_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prompt whose blocks they share, by the engine."""
    twins = Twins(TRITON, torch.float32, config_of(), seed=9)
    del twins.fast.sample, twins.reference.sample  # which choose what a test says
    seen = Seen(twins, monkeypatch)
    config = EngineConfig(
        num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=80, max_model_len=100, vocab_size=64
    )
    stem = [7 * i % 64 for i in range(70)]

    def served(tier: Tier, runner: Runner) -> dict[str, list[list[int]]]:
        engine, tokens = Engine(config, tier, runner), dict[str, list[list[int]]]()
        for number in range(4):
            params = SamplingParams(temperature=0.0, max_tokens=7, n=2 if number == 2 else 1, ignore_eos=True)
            engine.add_request([*stem, number, 9], params, request_id=str(number))
            for update in engine.step():
                assert update.output is None or not update.output.finished
        while engine.has_unfinished_requests():
            for update in engine.step():
                if update.output and update.output.finished:
                    tokens[update.request_id] = [list(one.token_ids) for one in update.output.outputs]
        return tokens

    expected = served(reference_tier(), twins.reference)
    assert served(fast_tier(), twins.fast) == expected
    assert len(expected) == 4
    assert max(len(members) for prefixes in seen.prefixes for members, n in prefixes if n == 68) == 5
