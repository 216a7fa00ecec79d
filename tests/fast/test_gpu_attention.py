"""The Triton attention kernels against softmax(QKᵀ)V in float64, computed here over keys that never saw a block.

Without a GPU they run in Triton's interpreter, one program after another, in fp32 and fp16 (its bf16 is wrong). All
that no token fills is NaN: free blocks, the rest of a last block, what the kernels allocate before they write to it
(`guarded.py`). So whatever reads it shows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

pytest.importorskip("triton")  # there is none for this machine's operating system

from minipaged.fast.gpu import attention, paged_decode, paged_prefill
from minipaged.fast.kernels import Paged
from tests.effort import examples, quick_cases, thorough
from tests.fast.guarded import GuardedMemory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The largest difference from float64, as a part of the largest value. K, V and queries are exact; rounded are the
# output and the weights on their way into the second product (both in the cache's type), and the sums (fp32).
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")

BLOCK_SIZES = [1, 2, 3, 7, 16, 32, 64, 100, 256]
HEAD_DIMS = [32, 64, 80, 96, 32, 64, 80, 128, 256]  # the small ones more often
GARBAGE = [-1, 2**31 - 1, -(2**31), 10**6]
LAYER = 1


@dataclass
class Batch:
    """Sequences in a paged cache, and beside it the K and V that each should see."""

    query: Tensor  # [tokens, heads, head_dim], a part of a wider array
    cache: Tensor  # [num_blocks, layers, 2, kv_heads, block_size, head_dim]
    kv: list[Tensor]  # for each sequence [2, context_len, kv_heads, head_dim]
    tables: Tensor  # [num_rows, max_blocks] int32
    rows: Tensor  # [seqs] int32
    query_lens: list[int]
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None  # [heads]

    @property
    def context_lens(self) -> Tensor:
        return int32([kv.shape[1] for kv in self.kv])

    @property
    def query_start(self) -> Tensor:
        return int32([sum(self.query_lens[:s]) for s in range(len(self.query_lens) + 1)])

    @property
    def scale(self) -> float:
        return 1.3 / float(self.query.shape[2]) ** 0.5

    def exact(self) -> Tensor:
        """[tokens, heads, head_dim] float64; zeros where there is no context."""
        outputs = []
        for kv, query in zip(self.kv, self.query.double().cpu().split(self.query_lens), strict=True):
            k, v = kv.double().cpu().repeat_interleave(query.shape[1] // kv.shape[2], dim=2)
            n, context_len = len(query), len(k)
            if context_len == 0:
                outputs.append(torch.zeros_like(query))
                continue
            scores = torch.einsum("thd,chd->htc", query, k) * self.scale
            if self.soft_cap is not None:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            age = torch.arange(context_len - n, context_len)[:, None] - torch.arange(context_len)  # [n, context_len]
            unseen = (age < 0) | (age >= (self.window or context_len))
            scores = scores.masked_fill(unseen, -torch.inf)
            if self.sinks is not None:  # a key that has no value
                scores = torch.cat([self.sinks.double().cpu()[:, None, None].expand(-1, n, 1), scores], -1)
                v = torch.cat([torch.zeros_like(v[:1]), v])
            outputs.append(torch.einsum("htc,chd->thd", scores.softmax(-1), v))
        return torch.cat(outputs)

    @property
    def paged(self) -> Paged:
        keys, values = self.cache[:, LAYER, 0], self.cache[:, LAYER, 1]
        paged = Paged(keys, values, self.tables, self.rows, self.context_lens)
        return paged._replace(window=self.window, soft_cap=self.soft_cap, sinks=self.sinks)

    def decoded(self, *, num_sms: int) -> Tensor:
        """On a device of so many multiprocessors."""
        return self.decoded_in(GuardedMemory(), num_sms=num_sms)

    def decoded_in(self, memory: GuardedMemory, *, num_sms: int) -> Tensor:
        paged = self.paged
        with pytest.MonkeyPatch.context() as patched, memory:
            patched.setattr(attention, "_num_sms", lambda device: num_sms)
            return paged_decode(self.query, paged, self.scale)

    def prefilled(self) -> Tensor:
        paged, query_start = self.paged, self.query_start
        with GuardedMemory():
            return paged_prefill(self.query, paged, query_start, self.scale, max_query_len=max(self.query_lens))


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def make_batch(
    context_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    block_size: int = 16,
    head_dim: int = 64,
    kv_heads: int = 1,
    group: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    window: int | None = None,
    soft_cap: float | None = None,
    with_sinks: bool = False,
) -> Batch:
    """Blocks that lie before the windows of a sequence's queries are gone: garbage is left of them in its table."""
    random = torch.Generator().manual_seed(seed)
    query_lens = [1] * len(context_lens) if query_lens is None else list(query_lens)
    kv = [torch.randn(2, n, kv_heads, head_dim, generator=random).to(dtype) for n in context_lens]

    # Scattered blocks, the pool's first and last among them.
    needed = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(needed) + 3
    ends = [0, num_blocks - 1]
    taken = (torch.randperm(num_blocks - 2, generator=random) + 1).tolist()
    taken = (ends + taken)[: sum(needed)]
    taken = [taken[i] for i in torch.randperm(len(taken), generator=random).tolist()]
    cache = torch.full((num_blocks, LAYER + 1, 2, kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    num_rows = len(context_lens) + 2
    garbage = torch.randint(len(GARBAGE), (num_rows, max(needed, default=0) + 2), generator=random)
    tables = torch.tensor(GARBAGE, dtype=torch.int64)[garbage].to(torch.int32)
    rows = torch.randperm(num_rows, generator=random)[: len(context_lens)]
    for s, n in enumerate(context_lens):
        gone = 0 if window is None else max(0, n - query_lens[s] + 1 - window) // block_size
        for j in range(gone, needed[s]):
            block = tables[rows[s], j] = taken.pop()
            tokens = slice(j * block_size, min(n, (j + 1) * block_size))
            filled = tokens.stop - tokens.start
            cache[block, LAYER, :, :, :filled] = kv[s][:, tokens].transpose(1, 2)

    # As a model has it: queries, keys and values of a token side by side in one row.
    heads = kv_heads * group
    projected = torch.full((sum(query_lens), heads + 2 * kv_heads, head_dim), torch.nan, dtype=dtype)
    projected[:, :heads] = torch.randn(sum(query_lens), heads, head_dim, generator=random)
    query = projected.to(DEVICE)[:, :heads]
    sinks = 2 * torch.randn(heads, generator=random) if with_sinks else None
    return Batch(
        query,
        cache.to(DEVICE),
        kv,
        tables.to(DEVICE),
        rows.to(torch.int32).to(DEVICE),
        query_lens,
        window,
        soft_cap,
        None if sinks is None else sinks.to(DEVICE),
    )


def assert_close(result: Tensor, batch: Batch) -> None:
    assert torch.isfinite(result).all()
    exact = batch.exact()
    difference = (result.double().cpu() - exact).abs().max()
    tolerance = TOLERANCE[result.dtype] + 2**-21 * (batch.soft_cap or 0)
    assert difference <= tolerance * exact.abs().max()


# --- Drawn shapes ----------------------------------------------------------------------------------


def lengths(block_size: int, at_least: int = 1) -> st.SearchStrategy[int]:
    """Context lengths, those at which a block or a tile begins or ends above all."""
    edges = {1, block_size - 1, block_size, block_size + 1, 63, 64, 65, 127, 128, 129}
    return st.sampled_from(sorted(n for n in edges if n >= at_least)) | st.integers(at_least, 200)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (1, 4), (2, 1), (1, 8), (1, 16), (1, 20)]))
    return {
        "block_size": draw(st.sampled_from(BLOCK_SIZES)),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "kv_heads": kv_heads,
        "group": group,
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 1000)),
        "window": draw(st.none() | st.sampled_from([1, 2, 16, 63, 64, 65, 128]) | st.integers(1, 200)),
        "soft_cap": draw(st.sampled_from([None, None, 0.7, 50.0])),
        "with_sinks": draw(st.booleans()),
    }


@st.composite
def decode_batches(draw: st.DrawFn) -> Batch:
    shape = draw(shapes())
    one = lengths(shape["block_size"]) | st.just(0)  # type: ignore[arg-type]
    batch = make_batch(draw(st.lists(one, min_size=1, max_size=3)), **shape)  # type: ignore[arg-type]
    batch.query[batch.context_lens == 0] = torch.nan  # padding: nobody wrote a query there
    batch.rows[batch.context_lens == 0] = -1
    return batch


@st.composite
def prefill_batches(draw: st.DrawFn) -> Batch:
    shape = draw(shapes())
    context_lens = draw(st.lists(lengths(shape["block_size"]), min_size=1, max_size=3))  # type: ignore[arg-type]
    few = [draw(st.just(1) | st.just(n) | st.integers(1, min(n, 70))) for n in context_lens]
    return make_batch(context_lens, few, **shape)  # type: ignore[arg-type]


@settings(max_examples=examples(30))
@given(batch=decode_batches(), num_sms=st.sampled_from([1, 2, 4]))
def test_decode_is_softmax_over_the_context(batch: Batch, num_sms: int) -> None:
    assert_close(batch.decoded(num_sms=num_sms), batch)


@settings(max_examples=examples(30))
@given(batch=prefill_batches())
def test_prefill_is_causal_softmax_over_the_context(batch: Batch) -> None:
    assert_close(batch.prefilled(), batch)


def test_what_lies_past_a_context_or_a_head_is_not_read() -> None:
    """Rows of 80 elements are padded to 128, and 5 and 70 keys to tiles of 64: the rest there is NaN."""
    batch = make_batch([5, 70], head_dim=80, kv_heads=2, dtype=torch.float16, seed=1)
    assert batch.rows.tolist() != [0, 1]
    assert batch.tables[batch.rows[0], 0] == 0  # the block that masked look-ups name has 11 slots of NaN
    assert_close(batch.decoded(num_sms=1), batch)
    assert_close(batch.prefilled(), batch)


# --- Decode ----------------------------------------------------------------------------------------


@quick_cases(3)
@pytest.mark.parametrize(
    ("context_lens", "parts"),
    [
        ([1], [1]),
        ([128], [1]),  # shorter halves would not pay
        ([129], [2]),
        ([600], [5]),
        ([1, 600, 2], [1, 5, 1]),
        ([0, 600, 64, 0, 700], [0, 5, 1, 0, 6]),
    ],
)
def test_a_long_context_is_divided_and_a_short_one_is_not(context_lens: list[int], parts: list[int]) -> None:
    """Whatever the grid has room for: most of its splits are empty here."""
    batch = make_batch(context_lens, dtype=torch.float16)
    memory = GuardedMemory()
    assert_close(batch.decoded_in(memory, num_sms=8), batch)
    _, _, partial_lse, *_ = memory.allocated  # [seqs, heads, max_splits]
    assert partial_lse.shape[2] >= 12
    written = torch.isfinite(partial_lse)
    expected = [
        [n if n > 1 else 0] * 2 for n in parts
    ]  # for each of two heads; what is not divided is written directly
    assert written.sum(-1).tolist() == expected


def test_a_batch_that_fills_the_gpu_is_not_divided() -> None:
    """Its lengths are the only thing that changes between these two: one graph must serve both."""
    alone, together = make_batch([600] + [0] * 7, dtype=torch.float16), make_batch([600] * 8, dtype=torch.float16)
    for batch, parts in (
        (alone, 2),
        (together, 0),
    ):  # alone it would keep four programs busy: the grid has room for two
        memory = GuardedMemory()
        assert_close(batch.decoded_in(memory, num_sms=2), batch)
        _, _, partial_lse, *_ = memory.allocated
        assert partial_lse.shape == (8, batch.query.shape[1], 2)
        assert int(torch.isfinite(partial_lse).sum()) == parts * batch.query.shape[1]


def test_a_grid_has_room_for_each_sequence_and_for_no_more_splits_than_can_be_added_up() -> None:
    for seqs in range(1, 71):
        assert 1 <= attention._max_splits(seqs, kv_heads=3, num_sms=10) <= 128
    assert attention._max_splits(1, kv_heads=1, num_sms=10_000) == 128


@pytest.mark.parametrize(
    ("window", "room", "parts"), [(128, 1, [0, 0, 0]), (129, 2, [2, 0, 2]), (300, 3, [3, 0, 2]), (5000, 32, [5, 0, 2])]
)
def test_the_splits_are_those_of_the_window(window: int, room: int, parts: list[int]) -> None:
    batch = make_batch([600, 60, 200], dtype=torch.float16, window=window, with_sinks=True)
    memory = GuardedMemory()
    assert_close(batch.decoded_in(memory, num_sms=12), batch)
    _, _, partial_lse, *_ = memory.allocated
    assert partial_lse.shape[2] == room
    assert torch.isfinite(partial_lse).sum(-1).tolist() == [[n, n] for n in parts]


def test_a_batch_is_divided_by_its_windows() -> None:
    """Not by its contexts: windows of 5 tiles each are divided between 3 programs."""
    batch = make_batch([600, 1000], dtype=torch.float16, window=300)
    memory = GuardedMemory()
    assert_close(batch.decoded_in(memory, num_sms=2), batch)
    _, _, partial_lse, *_ = memory.allocated
    assert partial_lse.shape[2] == 3
    assert torch.isfinite(partial_lse).sum(-1).tolist() == [[2, 2], [2, 2]]


def test_decode_divides_by_the_multiprocessors_of_its_device() -> None:
    batch = make_batch([300, 40])
    assert_close(paged_decode(batch.query, batch.paged, batch.scale), batch)


def test_scores_that_would_overflow_are_weighed_right() -> None:
    batch = make_batch([300, 130])
    batch.query *= 300  # 2 to the power of the largest score is past fp32
    result = batch.decoded(num_sms=4)
    assert torch.isfinite(result).all()
    assert (result.double().cpu() - batch.exact()).abs().max() < 1e-3  # a score is itself rounded, by up to 1e-4


def test_a_block_past_two_to_the_31_elements_is_found(tmp_path: Path) -> None:
    block_size, head_dim = 256, 64
    batch = make_batch([300, 40], block_size=block_size, head_dim=head_dim, dtype=torch.float16)
    far = 2**31 // (2 * block_size * head_dim) + 1  # its elements begin past 2^31
    shape = (far + 1, 1, 2, 1, block_size, head_dim)
    if DEVICE == "cuda":
        cache = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    else:  # a file with a hole: only what is written takes room
        size = (far + 1) * 2 * block_size * head_dim
        cache = torch.from_file(str(tmp_path / "cache"), shared=True, size=size, dtype=torch.float16).view(shape)
    block = int(batch.tables[batch.rows[0], 1])
    cache[: len(batch.cache) - 1] = batch.cache[:-1, LAYER : LAYER + 1]
    cache[far] = batch.cache[block, LAYER : LAYER + 1]
    cache[block] = torch.nan
    batch.tables[batch.rows[0], 1] = far
    last = int(batch.tables[batch.rows[1], 0])
    cache[last] = batch.cache[last, LAYER : LAYER + 1]
    paged = batch.paged._replace(keys=cache[:, 0, 0], values=cache[:, 0, 1])
    assert_close(paged_decode(batch.query, paged, batch.scale), batch)
    assert_close(paged_prefill(batch.query, paged, batch.query_start, batch.scale, max_query_len=1), batch)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 500])
def test_one_cuda_graph_serves_all_lengths(window: int | None) -> None:
    lengths = [3000, 1, 0, 0], [1, 90, 64, 5], [700] * 4
    batches = [make_batch(n, kv_heads=2, dtype=torch.bfloat16, window=window) for n in lengths]
    num_blocks, max_blocks = (max(batch.cache.shape[0] for batch in batches), max(b.tables.shape[1] for b in batches))
    cache = torch.full((num_blocks, *batches[0].cache.shape[1:]), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    tables = torch.full((len(batches[0].tables), max_blocks), -1, dtype=torch.int32, device=DEVICE)
    query = batches[0].query.clone()
    rows, context_lens, scale = batches[0].rows.clone(), batches[0].context_lens, batches[0].scale

    def load(batch: Batch) -> None:
        cache.fill_(torch.nan)[: len(batch.cache)] = batch.cache
        tables.fill_(-1)[:, : batch.tables.shape[1]] = batch.tables
        query.copy_(batch.query)
        rows.copy_(batch.rows)
        context_lens.copy_(batch.context_lens)

    def step() -> Tensor:
        paged = Paged(cache[:, LAYER, 0], cache[:, LAYER, 1], tables, rows, context_lens, window=window)
        return paged_decode(query, paged, scale)

    load(batches[0])
    step()  # compiles; nothing can be compiled while a graph is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for batch in batches:
        load(batch)
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, batch)


# --- Prefill ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_prompt_of_several_tiles_is_causal_everywhere(group: int) -> None:
    batch = make_batch([150, 70, 131], [150, 3, 1], group=group, head_dim=32, dtype=torch.float16)
    assert_close(batch.prefilled(), batch)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("window", [1, 5, 40, 64, 100])
@pytest.mark.parametrize("group", [1, 3])
def test_the_rows_of_a_tile_have_windows_of_their_own(window: int, group: int) -> None:
    """In a tile of 128 rows, most rows of a narrow window see none of the first keys, and the first none of the last.
    The rows that fill up the last tile see keys, too: 0 / 0 would be a warning."""
    lengths, queries = [150, 170, 131, 90], [150, 120, 1, 7]
    batch = make_batch(lengths, queries, group=group, head_dim=32, dtype=torch.float16, window=window)
    assert_close(batch.prefilled(), batch)


@thorough
def test_more_sequences_than_are_counted_at_once_are_all_served() -> None:
    """A program counts 128 sequences at a time to find its own, and 128 lengths to divide its batch."""
    random = torch.Generator().manual_seed(1)
    context_lens = torch.randint(1, 9, (140,), generator=random).tolist()
    batch = make_batch(context_lens, [1 + n // 3 for n in context_lens], head_dim=32, group=1, block_size=4)
    assert_close(batch.prefilled(), batch)


def test_a_sequence_without_query_tokens_takes_no_part() -> None:
    batch = make_batch([40, 5, 30], [10, 0, 30])
    assert_close(batch.prefilled(), batch)


# --- What does not fit is refused ------------------------------------------------------------------


def test_an_empty_batch_gives_an_empty_output() -> None:
    batch = make_batch([16])
    nobody = batch.paged._replace(rows=int32([]), context_lens=int32([]))
    assert paged_decode(batch.query[:0], nobody, 1.0).shape == (0, 2, 64)
    empty = paged_prefill(batch.query[:0], nobody, int32([0]), 1.0, max_query_len=0)
    assert empty.shape == (0, 2, 64)


def test_what_does_not_fit_together_is_refused() -> None:
    batch = make_batch([16, 20], kv_heads=2)

    def refused(match: str, query: Tensor = batch.query, scale: float = 1.0, **changed: Any) -> None:
        with pytest.raises(ValueError, match=match):
            paged_decode(query, batch.paged._replace(**changed), scale)

    refused("3 query heads", query=batch.query[:, :3])
    refused("head", query=batch.query[:, :, :32])
    refused("same shape and strides", values=batch.paged.values.contiguous())
    refused("elements of one head must be contiguous", query=batch.query.transpose(1, 2).contiguous().transpose(1, 2))
    refused("float16", query=batch.query.half())
    refused("scale must be positive", scale=0.0)
    refused("a window must have a token", window=0)
    refused("soft_cap must be positive", soft_cap=0.0)
    for sinks in (torch.zeros(2), torch.zeros(4).half(), torch.zeros(8)[::2]):
        refused("sinks must be 4 contiguous float32", sinks=sinks)
