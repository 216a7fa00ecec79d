"""Shared reading in Triton: the result is that of reading every block for each sequence, whoever shares.

Without a GPU the kernels run in Triton's interpreter, in fp32 and fp16. All that no token fills is NaN, and so is what
they allocate, until they write it (`guarded.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

pytest.importorskip("triton")  # there is none for this machine's operating system

from minipaged.fast.cascade import shared_prefixes
from minipaged.fast.gpu import attention, paged_decode
from minipaged.fast.kernels import Paged, Shared
from minipaged.fast.kv_cache import KVCache as FastCache
from minipaged.reference.attention import paged_attention
from minipaged.reference.cascade import cascade_attention
from minipaged.reference.kv_cache import KVCache as ReferenceCache
from tests.agreement.kernels import TOLERANCE, TRITON
from tests.effort import examples
from tests.fast.guarded import GuardedMemory

LAYER = 1


@dataclass
class Batch:
    """Sequences with one query token each, in the caches of both tiers, and the groups that share."""

    query: torch.Tensor  # [seqs, heads, head_dim]
    cache: FastCache
    reference_cache: ReferenceCache
    tables: np.ndarray  # [seqs, max_blocks]
    lens: np.ndarray  # [seqs]
    scale: float = 0.3

    @property
    def shared(self) -> Shared | None:
        return shared_prefixes(torch.from_numpy(self.tables), torch.from_numpy(self.lens), self.cache.block_size)

    def decoded(self, shared: Shared | None, num_sms: int = 2) -> torch.Tensor:
        device = self.query.device
        tables, lens = (torch.from_numpy(each).to(device) for each in (self.tables, self.lens))
        rows = torch.arange(len(lens), dtype=torch.int32, device=device)
        on_device = None if shared is None else Shared(*(each.to(device) for each in shared))
        keys, values = self.cache.layer(LAYER)
        paged = Paged(keys, values, tables, rows, lens, self.cache.scales(LAYER), on_device)
        with pytest.MonkeyPatch.context() as patched, GuardedMemory():
            patched.setattr(attention, "_num_sms", lambda device: num_sms)
            return paged_decode(self.query, paged, self.scale)

    def expected(self) -> np.ndarray:
        """By the reference, which reads every block for each sequence; and by its own shared reading."""
        query = self.query.float().cpu().numpy()
        starts = np.arange(len(self.lens) + 1)
        one_by_one = paged_attention(query, self.reference_cache, LAYER, self.tables, starts, self.lens, self.scale)
        together = cascade_attention(query, self.reference_cache, LAYER, self.tables, self.lens, self.scale)
        np.testing.assert_allclose(together, one_by_one, rtol=0, atol=1e-5 * np.abs(one_by_one).max())
        return one_by_one

    def check(self, found: torch.Tensor) -> None:
        expected, result = self.expected(), found.float().cpu().numpy()
        assert np.isfinite(result).all()
        tolerance = TOLERANCE[found.dtype]
        np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def make_batch(
    groups: Sequence[tuple[int, int]],
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
    """`groups`: of each the number of members, and of blocks with which all of them begin. `lens`: of all sequences,
    the tokens after those; the sequences after the groups' members share nothing. They are in random order."""
    rng = np.random.default_rng(seed)
    common = [number for members, blocks in groups for number in [blocks] * members]
    common += [0] * (len(lens) - len(common))
    context_lens = np.array(common) * block_size + lens
    counts = -(-context_lens // block_size)
    total = int(counts.sum()) + 1
    shape = (LAYER + 1, total, block_size, kv_heads, head_dim, 0)
    cache = FastCache(*shape, dtype, kv_cache_dtype, None, TRITON.device, TRITON.kernels)
    reference_cache = ReferenceCache(*shape, kv_cache_dtype=kv_cache_dtype)
    cache.poison(range(total))
    reference_cache.poison(range(total))
    places = iter(rng.permutation(total).tolist())
    tables = np.full((len(lens), int(counts.max())), -1, np.int32)
    first = 0
    for members, blocks in groups:
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
    groups = data.draw(
        st.lists(st.tuples(st.integers(2, 8), st.integers(1, most) | st.just(most)), min_size=1, max_size=3)
    )
    alone = data.draw(st.integers(0, 2))
    seqs = sum(members for members, _ in groups) + alone
    own = st.sampled_from([1, block_size - 1, block_size, block_size + 1, 64]) | st.integers(1, 100)
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (1, 8), (1, 20)]))
    batch = make_batch(
        groups,
        data.draw(st.lists(own.map(lambda n: max(1, n)), min_size=seqs, max_size=seqs)),
        block_size=block_size,
        kv_heads=kv_heads,
        group=group,
        head_dim=data.draw(st.sampled_from([16, 32, 40])),
        dtype=data.draw(st.sampled_from(TRITON.dtypes)),
        kv_cache_dtype=data.draw(st.sampled_from(["auto", "auto", "int8", "fp8"])),
        seed=data.draw(st.integers(0, 2**32)),
    )
    shared = batch.shared
    assert shared is not None
    assert set(groups) <= {(len(shared.members), 0)} or len(shared.num_tokens) == len(groups)
    batch.check(batch.decoded(shared, num_sms=data.draw(st.sampled_from([1, 2, 16]))))
