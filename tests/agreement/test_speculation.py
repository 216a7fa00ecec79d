"""Both tiers verify drafts alike: the same tokens stand, and the same token comes after them.

As in `test_sampling.py`, tokens are compared exactly, with both sets of the fast tier's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipaged.contracts import Draft, SamplingInput
from minipaged.fast import sampling as fast_sampling
from minipaged.fast import speculation as fast
from minipaged.params import SamplingParams
from minipaged.reference import sampling
from minipaged.reference import speculation as reference
from tests.agreement.kernels import KERNEL_SETS, KernelSet
from tests.agreement.test_sampling import (
    TOLERANCE,
    FloatArray,
    assert_same,
    logit_tables,
    sampling_params,
    token_bits,
    with_fixtures,
)


@pytest.fixture(autouse=True, params=KERNEL_SETS, ids=lambda kernel_set: kernel_set.name)
def kernel_set(request: pytest.FixtureRequest) -> Iterator[KernelSet]:
    """What works on the logits, and where they are; each test runs with both."""
    chosen: KernelSet = request.param
    with pytest.MonkeyPatch.context() as patched:
        for module in (fast, fast_sampling):
            patched.setattr(module, "kernels_for", lambda device: chosen.kernels)
        yield chosen


def assert_agreement(
    logits: FloatArray, drafts: Sequence[Draft], draft_logits: FloatArray | None, kernel_set: KernelSet
) -> None:
    def on_device(table: FloatArray) -> torch.Tensor:
        return torch.from_numpy(table.copy()).to(kernel_set.device)

    with np.errstate(over="ignore"):
        expected = reference.verify(logits, drafts, draft_logits)
    found = fast.verify(on_device(logits), drafts, None if draft_logits is None else on_device(draft_logits))
    assert len(found) == len(expected) == len(drafts)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs, TOLERANCE[logits.dtype])


@st.composite
def verifications(draw: st.DrawFn) -> tuple[FloatArray, list[Draft], FloatArray | None]:
    """Logits, drafts of several lengths, perhaps with one more guess each, and the logits from which they were drawn,
    or none.

    The target's logits are near the draft's, so that some tokens stand. Where a draft was not drawn, it is often what
    the target chooses.
    """
    vocab = draw(st.sampled_from([1, 2, 5, 23]))
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    params = draw(st.lists(sampling_params(vocab), min_size=1, max_size=2))
    bits = draw(st.sampled_from([st.none(), token_bits(vocab)]))
    table = draw(logit_tables(sum(lengths) + len(lengths), vocab))
    noise = draw(st.sampled_from([0.0, 0.5, 3.0])) * np.random.default_rng(draw(st.integers(0, 99))).normal(
        size=table.shape
    )
    logits = (table + noise).astype(table.dtype)
    is_drawn, drafts, drafted_from, row = draw(st.booleans()), list[Draft](), list[int](), 0
    num_not_run = draw(st.integers(0, 1))
    for length in lengths:
        seed, stream = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 7))
        chosen, forbidden = draw(st.sampled_from(params)), draw(st.sampled_from([(), (0,)]))
        tokens, inputs = list[int](), list[SamplingInput]()
        for i in range(length + 1):
            inputs.append(
                SamplingInput(row + i, chosen, [0, 0], list(tokens), seed, stream, forbidden, allowed=draw(bits))
            )
            if i < length + num_not_run:
                with np.errstate(over="ignore"):
                    [guess] = sampling.sample(table if is_drawn else logits, [inputs[-1]])
                tokens.append(guess.token_id if is_drawn else draw(st.just(guess.token_id) | st.integers(0, vocab - 1)))
                drafted_from.append(row + i)
        drafts.append(Draft(tokens, inputs))
        row += length + 1
    return logits, drafts, table[drafted_from] if is_drawn else None


@with_fixtures
@given(verifications())
def test_both_tiers_verify_alike(
    kernel_set: KernelSet, verification: tuple[FloatArray, list[Draft], FloatArray | None]
) -> None:
    assert_agreement(*verification, kernel_set)


@with_fixtures
@given(verifications(), st.data())
def test_both_tiers_refuse_the_same_rows(
    kernel_set: KernelSet, verification: tuple[FloatArray, list[Draft], FloatArray | None], data: st.DataObject
) -> None:
    logits, drafts, draft_logits = verification
    tables = [table for table in (logits, draft_logits) if table is not None and len(table)]
    damaged = data.draw(st.sampled_from(tables))
    row = data.draw(st.integers(0, len(damaged) - 1))
    where = data.draw(st.integers(0, logits.shape[1] - 1) | st.just(slice(None)))
    damaged[row, where] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    assert_agreement(logits, drafts, draft_logits, kernel_set)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.05, "temperature": 2.0},
        {"top_k": 40, "top_p": 0.8, "logprobs": 2},
        {"top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {7: 4.0}},
    ],
    ids=str,
)
def test_the_same_tokens_of_a_long_tail(kernel_set: KernelSet, params: dict[str, Any]) -> None:
    """Fifty drafts of three tokens each, from distributions over 800 tokens."""
    r, k, n, vocab = np.random.default_rng(1), 3, 50, 800
    logits = (3 * r.standard_normal((n * (k + 1), vocab))).astype(np.float32)
    draft_logits = logits.reshape(n, k + 1, vocab)[:, :k].reshape(n * k, vocab)
    draft_logits = (draft_logits + r.standard_normal(draft_logits.shape)).astype(np.float32)
    drafts = list[Draft]()
    for i in range(n):
        tokens, inputs = list[int](), list[SamplingInput]()
        for j in range(k + 1):
            inputs.append(SamplingInput(i * (k + 1) + j, SamplingParams(**params), [1, 2], list(tokens), i, 0))
            if j < k:
                tokens.append(sampling.Prediction(draft_logits[i * k + j]).choose(inputs[-1]).token_id)
        drafts.append(Draft(tokens, inputs))
    assert_agreement(logits, drafts, draft_logits, kernel_set)
    num_chosen = {len(one) for one in reference.verify(logits, drafts, draft_logits)}
    assert num_chosen >= {1, 2, 3}  # refusals in several places


def test_nothing_to_verify(kernel_set: KernelSet) -> None:
    assert list(fast.verify(torch.zeros(0, 3), [])) == reference.verify(np.zeros((0, 3)), []) == []


def test_verified_tokens_can_be_indexed_and_counted(kernel_set: KernelSet) -> None:
    greedy = SamplingParams(temperature=0)
    inputs = [SamplingInput(row, greedy, [1], [2] * row, 0, 0) for row in range(2)]
    found = fast.verify(torch.eye(2, device=kernel_set.device), [Draft([0], inputs), Draft([], inputs[:1])])
    assert len(found) == 2
    assert [one.token_id for one in found[0]] == [0, 1]
    assert [one.token_id for one in found[1]] == [0]
