"""Both tiers choose the same tokens from the same logits, and report the same log-probabilities.

Tokens are compared exactly. They could differ only where a number drawn, or the probability that `top_p` counts, comes
within a rounding of a float64 (some 1e-15) of a boundary between two tokens; no test here comes so near. What is
computed in the precision of the logits, the log-probabilities, agrees to 2e-6 for float32 and 1e-12 for float64.

Both sets of the fast tier's kernels are held to the reference here: the loops for a CPU; and those for a GPU, on it or,
where there is none, in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from minipaged.contracts import Sampled, SamplingInput
from minipaged.fast import sampling as fast
from minipaged.params import SamplingParams
from minipaged.reference import sampling as reference
from tests.agreement.kernels import KERNEL_SETS, KernelSet
from tests.effort import examples, one_case_in, quick_cases, thorough

FloatArray = NDArray[np.floating[Any]]

TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-12}


@pytest.fixture(autouse=True, params=KERNEL_SETS, ids=lambda kernel_set: kernel_set.name)
def kernel_set(request: pytest.FixtureRequest) -> Iterator[KernelSet]:
    """What works on the logits, and where they are; each test runs with both."""
    chosen: KernelSet = request.param
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fast, "kernels_for", lambda device: chosen.kernels)
        yield chosen


with_fixtures = settings(
    max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def both(logits: FloatArray, inputs: Sequence[SamplingInput], kernel_set: KernelSet) -> list[list[Sampled]]:
    """What each tier returns."""
    outcomes: list[list[Sampled]] = []
    for tier in (reference.sample, fast.sample):
        given_: Any = logits if tier is reference.sample else torch.from_numpy(logits.copy()).to(kernel_set.device)
        with np.errstate(over="ignore"):  # logits of which the largest and the least differ by more than a float32
            outcomes.append(list(tier(given_, inputs)))
    return outcomes


def assert_agreement(logits: FloatArray, inputs: Sequence[SamplingInput], kernel_set: KernelSet) -> None:
    """Of each input: the same token, or the same error in the same words."""
    expected, found = both(logits, inputs, kernel_set)
    assert_same(found, expected, TOLERANCE[logits.dtype])


def assert_same(found: Sequence[Sampled], expected: Sequence[Sampled], near: float) -> None:
    assert [one.error for one in found] == [one.error for one in expected]
    assert [one.token_id for one in found] == [one.token_id for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, rel=near, abs=near, nan_ok=ours.error is not None)
        assert (ours.top_logprobs is None) == (theirs.top_logprobs is None)
        if ours.top_logprobs is not None and theirs.top_logprobs is not None:
            assert list(ours.top_logprobs) == list(theirs.top_logprobs)
            assert list(ours.top_logprobs.values()) == pytest.approx(
                list(theirs.top_logprobs.values()), rel=near, abs=near
            )


# --- What is drawn ----------------------------------------------------------------------------------


@st.composite
def logit_tables(draw: st.DrawFn, rows: int, vocab: int) -> FloatArray:
    """[rows, vocab]: as models give them, with ties, with tokens ruled out, with a huge range."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    elements: st.SearchStrategy[float] = draw(
        st.sampled_from(
            [
                st.floats(-20, 20, width=16),
                st.integers(-3, 3).map(float),
                st.sampled_from([0.0, -0.0, 1.0, -math.inf]),
                st.sampled_from([3e38, -3e38, 1e30, 0.0, 5.0, -1e-30]),
                st.floats(-1e4, 1e4, width=32),
            ]
        )
    )
    return draw(hnp.arrays(dtype, (rows, vocab), elements=elements))


@st.composite
def sampling_params(draw: st.DrawFn, vocab: int) -> SamplingParams:
    chosen: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5, 100.0, 1e-4, 1e-300, 5e-324])),
        "top_k": draw(st.just(0) | st.integers(-1, vocab + 2)),
        "top_p": draw(st.sampled_from([1.0, 0.95, 0.5, 1e-20, 1 - 2**-53]) | st.floats(0.01, 1)),
        "min_p": draw(st.sampled_from([0.0, 0.05, math.exp(-1), 0.5, 1.0])),
        "logprobs": draw(st.sampled_from([None, None, 0, 1, 5, vocab + 3])),
    }
    if draw(st.integers(0, 3)) == 0:
        asked = draw(st.lists(st.integers(0, vocab - 1), max_size=9))
        chosen |= {"logprob_token_ids": asked, "logprobs": draw(st.sampled_from([None, len(asked)]))}
    if draw(st.booleans()):
        chosen["repetition_penalty"] = draw(st.sampled_from([1.0, 1.3, 0.7]))
        chosen["presence_penalty"] = draw(st.sampled_from([0.0, 1.0, -1.0]))
        chosen["frequency_penalty"] = draw(st.sampled_from([0.0, 0.5, -0.5]))
    if draw(st.booleans()):
        tokens = st.integers(0, vocab - 1)
        chosen["logit_bias"] = draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.1, 100.0]), max_size=3))
        chosen["allowed_token_ids"] = draw(st.none() | st.lists(tokens, min_size=1, max_size=9))
    if draw(st.integers(0, 3)) == 0:  # what is forbidden is given beside: here is only who is named for it
        chosen |= {"bad_words": draw(st.sampled_from([(), "a"])), "min_tokens": draw(st.integers(0, 9))}
    return SamplingParams(**chosen)


def token_bits(vocab: int) -> st.SearchStrategy[NDArray[np.uint32] | None]:
    """What a grammar allows: everything, nothing, a few tokens. Some leave out the last words, and some set bits past
    the last token."""
    words = st.sampled_from([0, 2**32 - 1]) | st.integers(0, 31).map(lambda bit: 1 << bit) | st.integers(0, 2**32 - 1)
    return st.none() | hnp.arrays(np.uint32, st.integers(1, -(-vocab // 32)), elements=words)


@st.composite
def batches(draw: st.DrawFn) -> tuple[FloatArray, list[SamplingInput]]:
    """Logits and what to choose from them: few rows and few parameters, so that inputs share both."""
    vocab, rows = draw(st.sampled_from([1, 2, 23, 70])), draw(st.integers(1, 4))
    params = draw(st.lists(sampling_params(vocab), min_size=1, max_size=3))
    tokens = st.lists(st.integers(0, vocab - 1), max_size=8)
    forbidden = st.just(()) | st.sets(st.integers(0, vocab - 1), max_size=vocab).map(tuple)
    inputs = st.builds(
        SamplingInput,
        row=st.integers(0, rows - 1),
        params=st.sampled_from(params),
        prompt_token_ids=tokens,
        output_token_ids=tokens,
        seed=st.integers(0, 2**64 - 1),
        stream=st.integers(0, 7),
        forbidden_token_ids=forbidden,
        allowed=draw(st.sampled_from([st.none(), token_bits(vocab)])),
    )
    return draw(logit_tables(rows, vocab)), draw(st.lists(inputs, max_size=8))


@with_fixtures
@given(batches())
def test_both_tiers_choose_the_same_tokens(
    kernel_set: KernelSet, batch: tuple[FloatArray, list[SamplingInput]]
) -> None:
    assert_agreement(*batch, kernel_set)


@st.composite
def greedy_batches(draw: st.DrawFn) -> tuple[FloatArray, list[SamplingInput]]:
    vocab, greedy = draw(st.sampled_from([1, 2, 23, 70])), SamplingParams(temperature=0)
    bits = draw(st.sampled_from([st.none(), token_bits(vocab)]))
    rows = draw(st.lists(st.integers(0, 2)) | st.just([0, 1, 2]))
    return draw(logit_tables(3, vocab)), [
        SamplingInput(row, greedy, [1], [], seed=0, stream=0, allowed=draw(bits)) for row in rows
    ]


@with_fixtures
@given(greedy_batches())
def test_both_tiers_agree_where_all_are_greedy(
    kernel_set: KernelSet, batch: tuple[FloatArray, list[SamplingInput]]
) -> None:
    assert_agreement(*batch, kernel_set)


@with_fixtures
@given(batches() | greedy_batches(), st.data())
def test_both_tiers_refuse_the_same_logits_for_the_same_reason(
    kernel_set: KernelSet, batch: tuple[FloatArray, list[SamplingInput]], data: st.DataObject
) -> None:
    logits, inputs = batch
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.integers(0, len(logits) - 1))
        bad = data.draw(st.sampled_from([math.nan, -math.nan, math.inf, -math.inf]))
        where = data.draw(st.integers(0, logits.shape[1] - 1) | st.just(slice(None)))
        logits[row, where] = bad
    assert_agreement(logits, inputs, kernel_set)


def test_both_tiers_blame_the_model_or_the_request_alike(kernel_set: KernelSet) -> None:
    """Row 1 is the model's fault, row 0 that of the input that leaves nothing of it, and of no other."""
    logits = np.zeros((2, 3), dtype=np.float32)
    logits[1] = math.nan
    params, forbidden = SamplingParams(temperature=0), [(), (), (0, 1, 2)]
    inputs = [SamplingInput(i % 2, params, [1], [], 0, 0, forbidden_token_ids=forbidden[i]) for i in range(3)]
    assert_agreement(logits, inputs, kernel_set)


@with_fixtures
@given(st.sampled_from([1, 2, 23, 70]), st.integers(0, 75), st.data())
def test_both_tiers_tell_the_same_of_given_tokens(
    kernel_set: KernelSet, vocab: int, count: int, data: st.DataObject
) -> None:
    """Good rows and bad ones."""
    logits = data.draw(logit_tables(3, vocab))
    if data.draw(st.booleans()):
        logits[1, data.draw(st.integers(0, vocab - 1))] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    token_ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=3, max_size=3))
    with np.errstate(over="ignore"):
        expected = reference.gather_logprobs(logits, token_ids, count)
    found = fast.gather_logprobs(torch.from_numpy(logits.copy()).to(kernel_set.device), token_ids, count)
    assert_same(list(found), expected, TOLERANCE[logits.dtype])


@quick_cases(18)
@one_case_in(3)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.05},
        {"temperature": 50.0},
        {"top_k": 50},
        {"top_k": 50, "temperature": 0.05},
        {"top_k": 2900},
        {"top_p": 0.95},
        {"top_p": 0.95, "temperature": 20.0},
        {"top_p": 0.1},
        {"top_p": 1 - 2**-53},
        {"min_p": 0.02},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
        {"temperature": 2.0, "top_k": 700, "top_p": 0.9, "min_p": 0.001},
        {"temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"top_p": 0.9, "logit_bias": {7: 4.0, 8: -4.0}, "allowed_token_ids": range(1500)},
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [0.0, 0.25], ids=["distinct", "ties"])
def test_the_same_tokens_of_a_long_tail(kernel_set: KernelSet, params: dict[str, Any], step: float) -> None:
    """A hundred draws from each of three rows: of the tokens kept, few go unnoticed when one more or less is kept."""
    wide = np.random.default_rng(3).standard_normal((3, 3000)) * [[1], [3], [40]]
    logits = (np.round(wide / step) * step if step else wide).astype(np.float32)
    wanted = SamplingParams(logprobs=3, **params)
    inputs = [SamplingInput(i % 3, wanted, [1, 2, 3], [4, 4], seed=i, stream=i // 3) for i in range(300)]
    assert_agreement(logits, inputs, kernel_set)


GRAMMARS = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "logit_bias": {5: 9.0}, "repetition_penalty": 1.3},
    {"temperature": 0.8},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.5, "frequency_penalty": 0.3, "allowed_token_ids": range(1, 4000, 2)},
]


@pytest.mark.parametrize("params", [*([one] for one in GRAMMARS), GRAMMARS], ids=str)
@pytest.mark.parametrize("vocab", [4097, pytest.param(49_152, marks=thorough)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_plan_takes_the_tokens_that_grammars_allow_at_each_step(
    kernel_set: KernelSet, params: list[dict[str, Any]], vocab: int, dtype: type[np.floating[Any]]
) -> None:
    """A row of bits changes in place from step to step, and each choice is the reference's. Ties included."""
    random = np.random.default_rng(vocab)
    steps, words = 3, -(-vocab // 32)
    logits = np.round(random.standard_normal((8, vocab)) * 8).astype(dtype) / 2
    bits = np.zeros((8, words), np.uint32)
    inputs = [
        SamplingInput(
            row=i % 7,  # the last one shares the first one's row, with other bits
            params=SamplingParams(**params[i % len(params)]),
            prompt_token_ids=[1, 2, 3],
            output_token_ids=[4, 5],
            seed=i,
            stream=0,
            allowed=None if i == 6 else bits[i],
        )
        for i in range(8)
    ]
    on_device = torch.from_numpy(logits.copy()).to(kernel_set.device)
    plan = fast.Choosing.of(inputs, on_device)
    chosen = []
    for _ in range(steps):
        bits[:] = random.integers(0, 2**32, bits.shape, dtype=np.uint32)
        bits[0], bits[1], bits[2], bits[3, 1:] = 0, 2**32 - 1, 0, 0
        bits[2, random.integers(0, words - 1)] = 1 << int(random.integers(0, 32))  # one token
        found = list(plan.sample(on_device))
        assert_same(found, reference.sample(logits, inputs), TOLERANCE[np.dtype(dtype)])
        assert (found[0].error or "").startswith("the request leaves no token to choose: structured_outputs")
        assert all(reference.is_allowed(bits[i], vocab)[found[i].token_id] for i in (1, 4, 5, 7))
        chosen.append([one.token_id for one in found])
    assert len(set(map(tuple, chosen))) == steps


# --- The parts --------------------------------------------------------------------------------------


@with_fixtures
@given(batches())
def test_penalised_logits_are_the_same_to_the_last_bit(
    kernel_set: KernelSet, batch: tuple[FloatArray, list[SamplingInput]]
) -> None:
    logits, inputs = batch
    on_device = torch.from_numpy(logits).to(kernel_set.device)
    allowed = fast.send_allowed(on_device, inputs)
    found = fast.penalise(on_device, inputs, allowed).cpu().numpy() if inputs else np.zeros((0, 0))
    for ours, wanted in zip(found, inputs, strict=True):
        np.testing.assert_array_equal(ours, reference.penalise(logits[wanted.row], wanted))


words = st.integers(0, 2**32 - 1)


@with_fixtures
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**63, 2**64 - 1]), words, words), min_size=1)
)
def test_the_numbers_drawn_are_the_same_to_the_last_bit(
    kernel_set: KernelSet, counters: list[tuple[int, int, int]]
) -> None:
    inputs = [
        SamplingInput(0, SamplingParams(), range(position), [], seed, stream) for seed, stream, position in counters
    ]
    expected = [reference.uniform(*counter) for counter in counters]
    assert fast.Counters(inputs).uniform(kernel_set.kernels).tolist() == expected


@with_fixtures
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=st.integers(-4, 4).map(float)),
    st.integers(0, 45),
)
def test_the_largest_are_the_same_and_in_the_same_order(kernel_set: KernelSet, values: FloatArray, count: int) -> None:
    found = fast.largest(torch.from_numpy(values).to(kernel_set.device), count)
    assert found.tolist() == [reference.largest(row, count).tolist() for row in values]


@pytest.mark.parametrize("count", [1, 3, 32, 33, 700])
@pytest.mark.parametrize("order", ["random", "rising", "falling", "few values", "ruled out"])
def test_the_largest_of_a_whole_vocabulary_are_the_same(kernel_set: KernelSet, count: int, order: str) -> None:
    values = np.random.default_rng(0).standard_normal((2, 700))
    if order in ("rising", "falling"):
        values = np.sort(values)[:, :: 1 if order == "rising" else -1]
    elif order == "few values":
        values = values.round()
    elif order == "ruled out":
        values[0, 2:], values[1] = -np.inf, -np.inf
    for table in (values.astype(np.float32), np.ascontiguousarray(values)):
        found = fast.largest(torch.from_numpy(table).to(kernel_set.device), count)
        assert found.tolist() == [reference.largest(row, count).tolist() for row in table]


@settings(with_fixtures, max_examples=examples(60, least=15))  # of 64 draws each
@given(
    hnp.arrays(np.float32, st.integers(1, 6), elements=st.integers(-1, 1).map(float)),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.integers(-1, 7),
    st.sampled_from([1.0, 0.9, 0.6, 0.3, 1e-20]),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_a_distribution_is_the_same_at_every_64th(
    kernel_set: KernelSet, logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Numbers that are asked for, not drawn: with equal weights some fall on the very boundary of two tokens."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = [reference.distribution(logits, params).at(number / 64) for number in range(64)]
    min_logprob = math.log(min_p) if min_p > 0 else -math.inf
    found = kernel_set.kernels.draw(
        torch.from_numpy(logits[None]).to(kernel_set.device),
        torch.tensor([0], device=kernel_set.device),
        *torch.tensor([[logits.max()], [temperature], [min_logprob]], dtype=torch.float64, device=kernel_set.device),
        torch.tensor([top_k], device=kernel_set.device),
        torch.tensor([1 - top_p], dtype=torch.float64, device=kernel_set.device),
        torch.zeros(64, dtype=torch.int64, device=kernel_set.device),
        torch.arange(64, dtype=torch.float64, device=kernel_set.device) / 64,
        depth=top_k if 0 < top_k < len(logits) else len(logits) if top_p < 1 else 0,
    )
    assert found.tolist() == expected
