"""Greedy choice is NumPy's argmax, bad rows included; a token is drawn where the reference draws it."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from minipaged.fast.gpu import allowed_only, argmax_logsumexp, draw, likeliest_allowed
from minipaged.fast.gpu import sampling as gpu
from minipaged.params import SamplingParams
from minipaged.reference import sampling as reference
from tests.effort import examples
from tests.fast.guarded import GuardedMemory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
VOCABS = st.sampled_from([1, 2, 259, gpu.TILE - 1, gpu.TILE, gpu.TILE + 1, 3 * gpu.TILE + 7])


def random_logits(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 5).to(dtype)


@settings(max_examples=examples(40))
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

    logits = logits.to(DEVICE)
    with GuardedMemory():
        token_ids, peaks, log_totals = argmax_logsumexp(logits)
    logits = logits.cpu()

    assert [found.dtype for found in (token_ids, peaks, log_totals)] == [torch.int64, torch.float64, torch.float64]
    wide = logits.float().numpy()
    for i, row in enumerate(wide):
        prediction = reference.Prediction(row.astype(np.float64))
        assert token_ids[i].item() == prediction.likeliest
        assert peaks[i].item() == prediction.peak
        assert log_totals[i].item() == pytest.approx(prediction.log_total, rel=2e-6, abs=2e-6)


@settings(max_examples=examples(20))
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


# --- Grammars ---------------------------------------------------------------------------------------


def allowed_tokens(inputs: int, vocab: int, data: st.DataObject) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each token is allowed [inputs, vocab], and the bits [inputs, words] with more bits past the last token.
    The bits do not begin where their memory does, as those of a batch's last inputs."""
    words = -(-vocab // 32)
    bits = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 2**32, (inputs + 1, words), dtype=np.uint32)
    for row in bits:
        kind = data.draw(st.sampled_from(["half", "all", "none", "one", "the first words"]))
        if kind != "half":
            row[:] = 2**32 - 1 if kind == "all" else 0
        if kind == "one":
            token = data.draw(st.integers(0, vocab - 1))
            row[token // 32] = 1 << token % 32
        elif kind == "the first words":
            row[: words // 2] = 2**32 - 1
    known = np.unpackbits(bits.astype("<u4").view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    return torch.from_numpy(known[1:] == 1), torch.from_numpy(bits.view(np.int32)).to(DEVICE)[1:]


@settings(max_examples=examples(40))
@given(vocab=VOCABS, dtype=st.sampled_from([*DTYPES, torch.float64]), data=st.data())
def test_the_likeliest_allowed_token_is_the_likeliest_of_those_that_are_left(
    vocab: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """And the rest is what `argmax_logsumexp` tells of the whole row. Rows with a stride, ties, and bad ones."""
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 2), max_size=4)), dtype=torch.int64)
    logits = random_logits(3, vocab + 5, dtype, seed=vocab).round()[:, :vocab]
    if data.draw(st.booleans()):
        where = data.draw(st.integers(0, vocab - 1) | st.just(slice(None)))
        logits[1, where] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    is_allowed, bits = allowed_tokens(len(rows), vocab, data)

    with GuardedMemory():
        token_ids, found, peaks, log_totals = likeliest_allowed(logits.to(DEVICE), rows.to(DEVICE), bits)
    likeliest, *expected = argmax_logsumexp(logits.to(DEVICE))

    assert [each.dtype for each in (token_ids, found, peaks, log_totals)] == [torch.int64, *[torch.float64] * 3]
    torch.testing.assert_close((peaks, log_totals), tuple(each[rows.to(DEVICE)] for each in expected), equal_nan=True)
    for i, row in enumerate(rows.tolist()):
        left = torch.where(is_allowed[i], logits[row].double(), -math.inf)
        if math.isnan(peaks[i]):
            assert token_ids[i] == likeliest[row]
        else:
            assert found[i].item() == left.max().item()
            assert token_ids[i] == left.argmax() or left.max() == -math.inf


@settings(max_examples=examples(20))
@given(vocab=VOCABS, data=st.data())
def test_what_is_not_allowed_is_set_to_minus_infinity_and_nothing_else_is_touched(
    vocab: int, data: st.DataObject
) -> None:
    """A table with a stride."""
    around = random_logits(data.draw(st.integers(0, 3)), vocab + 5, torch.float64, seed=vocab)
    is_allowed, bits = allowed_tokens(len(around), vocab, data)
    expected = around.clone()
    expected[:, 2:-3] = torch.where(is_allowed, around[:, 2:-3], -math.inf)
    around = around.to(DEVICE)
    allowed_only(around[:, 2:-3], bits)
    assert torch.equal(around.cpu(), expected)


# --- Drawing ----------------------------------------------------------------------------------------


def drawn(
    logits: torch.Tensor, temperatures: list[float], min_ps: list[float], uniforms: list[float], *, of: list[int]
) -> list[int]:
    """What `draw` draws with the numbers `uniforms` from rows `of` of the logits, each row with its parameters."""
    rows = torch.randperm(len(logits), generator=torch.Generator().manual_seed(len(of)))  # in any order
    logits = logits[rows.argsort()]
    least = [math.log(min_p) if min_p > 0 else -math.inf for min_p in min_ps]
    doubles = [torch.tensor(values, dtype=torch.float64, device=DEVICE) for values in (temperatures, least, uniforms)]
    peaks = logits.double().amax(1)[rows].to(DEVICE)
    distributions = torch.tensor(of, device=DEVICE)
    none = torch.zeros_like(rows, device=DEVICE)
    given = (logits.to(DEVICE), rows.to(DEVICE), peaks, *doubles[:2], none, none.double(), distributions, doubles[2])
    with GuardedMemory():
        tokens = draw(*given, depth=0)
    assert tokens.dtype == torch.int64
    found: list[int] = tokens.tolist()
    return found


@settings(max_examples=examples(40))
@given(
    vocab=st.sampled_from([1, 2, 259, gpu.DRAW_TILE - 1, gpu.DRAW_TILE, gpu.DRAW_TILE + 1, 3 * gpu.DRAW_TILE + 7]),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_a_draw_is_the_references(vocab: int, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    """Any temperature, with and without `min_p`, several draws from one row, tokens ruled out."""
    logits = random_logits(3, vocab, dtype, seed)
    if vocab > 2:
        logits[1, data.draw(st.integers(0, vocab - 2)) :] = -float("inf")
        logits[1, 0] = 0
    temperatures = data.draw(st.tuples(*[st.sampled_from([0.05, 0.7, 1.0, 30.0])] * 3))
    min_ps = data.draw(st.tuples(*[st.sampled_from([0.0, 0.02, 1.0])] * 3))
    of = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    numbers = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53])
    uniforms = data.draw(st.lists(numbers, min_size=len(of), max_size=len(of)))

    found = drawn(logits, list(temperatures), list(min_ps), uniforms, of=of)

    for token, row, u in zip(found, of, uniforms, strict=True):
        params = SamplingParams(temperature=temperatures[row], min_p=min_ps[row])
        chances = reference.distribution(logits[row].double().numpy(), params)
        reached = np.zeros(vocab + 1)  # the running sum before each token, and at the end
        reached[chances.token_ids + 1] = chances.cumulative
        reached = np.maximum.accumulate(reached)
        target, rounding = u * reached[-1], 1e-12 * reached[-1]
        assert token in chances.token_ids
        assert reached[token] - rounding <= target <= reached[token + 1] + rounding
        if min(abs(target - reached[token]), abs(target - reached[token + 1])) > rounding:
            assert token == chances.at(u)


def test_a_token_of_no_weight_is_never_drawn_and_a_row_without_any_does_no_harm():
    logits = torch.full((2, 2 * gpu.DRAW_TILE), -float("inf"))
    logits[0, 100] = logits[0, gpu.DRAW_TILE + 5] = 2.0
    found = drawn(logits, [1.0, 1.0], [0.0, 0.0], [0.0, 0.499, 0.5, 1 - 2**-53, 0.3], of=[0, 0, 0, 0, 1])
    assert found == [100, 100, gpu.DRAW_TILE + 5, gpu.DRAW_TILE + 5, 0]


def test_torchs_operations_draw_the_same_where_nothing_needs_an_order():
    """They are timed beside the kernels (`benchmarks/gpu`)."""
    logits = random_logits(3, 500, torch.float32, seed=7).to(DEVICE)
    rows, of = torch.arange(3, device=DEVICE), torch.arange(3, device=DEVICE).repeat_interleave(40)
    temperatures = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, device=DEVICE)
    least = torch.tensor([-math.inf, -3.0, -math.inf], dtype=torch.float64, device=DEVICE)
    uniforms = (torch.arange(120, dtype=torch.float64, device=DEVICE) + 0.5) / 120
    none = torch.zeros_like(rows)
    given = (logits, rows, logits.double().amax(1), temperatures, least, none, none.double(), of, uniforms)
    assert torch.equal(gpu.draw_ordered(*given, depth=0), draw(*given, depth=0))
