"""The random numbers are the reference's bit for bit; greedy choice is NumPy's argmax, bad rows included."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from minipaged.fast.gpu import sampling as gpu
from minipaged.fast.gpu.sampling import argmax_logsumexp
from minipaged.reference import sampling as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
VOCABS = st.sampled_from([1, 2, 259, gpu.TILE - 1, gpu.TILE, gpu.TILE + 1, 3 * gpu.TILE + 7])


def random_logits(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 5).to(dtype)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 3),
    vocab=VOCABS,
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_the_likeliest_token_and_its_logprob_are_the_references(
    rows: int, vocab: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Ties, forbidden tokens (whole tiles of them too) and rows with a stride included."""
    logits = random_logits(rows, vocab + 5, dtype, data.draw(st.integers(0, 99)))[:, :vocab]
    places = st.sampled_from([0, vocab - 1, vocab // 2, min(gpu.TILE, vocab - 1)])
    for row in logits:
        first, last = sorted((data.draw(places), data.draw(places)))
        change = data.draw(st.sampled_from(["nothing", "tie", "forbid"]))
        if change == "tie":
            row[[first, last]] = 30.0
        elif change == "forbid":  # all but a few
            kept = row[first].item()
            row[:] = -float("inf")
            row[first] = kept

    token_ids, peaks, log_totals = argmax_logsumexp(logits.to(DEVICE))

    assert token_ids.dtype == torch.int64
    wide = logits.float().numpy()
    for i, row in enumerate(wide):
        prediction = reference.Prediction(row.astype(np.float64), i)
        assert token_ids[i].item() == prediction.likeliest
        assert peaks[i].item() == prediction.peak
        assert log_totals[i].item() == pytest.approx(prediction.log_total, rel=2e-6, abs=2e-6)


@settings(deadline=None, max_examples=20)
@given(vocab=VOCABS, dtype=st.sampled_from(DTYPES), data=st.data())
def test_a_row_that_holds_nan_or_infinity_says_so_and_its_neighbours_do_not_care(
    vocab: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    places = st.sampled_from([0, vocab - 1, vocab // 2]) | st.integers(0, vocab - 1)
    logits = random_logits(4, vocab, dtype, seed=9)
    logits[1, data.draw(places)] = float("inf")
    logits[2, data.draw(places)] = float("inf")  # which NaN outweighs
    logits[2, data.draw(places)] = float("nan")
    logits[2, data.draw(places)] = float("nan")
    logits[3] = -float("inf")

    token_ids, peaks, log_totals = argmax_logsumexp(logits.to(DEVICE))

    assert token_ids.tolist() == logits.float().numpy().argmax(axis=1).tolist()  # of NaN: the first
    assert torch.isfinite(peaks[0])
    assert torch.isfinite(log_totals[0])
    assert peaks[1] == float("inf")
    assert torch.isnan(peaks[2])
    assert peaks[3] == -float("inf")
