"""The reference tier's `sample`: the distribution it draws from, and that a draw depends on nothing but its request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minipaged.contracts import Sampled, SamplingInput
from minipaged.params import SamplingParams
from minipaged.reference.sampling import (
    FloatArray,
    distribution,
    gather_logprobs,
    is_allowed,
    largest,
    penalise,
    philox,
    sample,
    uniform,
)
from tests.effort import examples

VOCAB = 23
NO_TOKENS: Any = torch.zeros((1, 0), dtype=torch.long)

token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
seeds = st.integers(0, 2**64 - 1)


def logit_rows(rows: int = 1, dtype: type[np.floating[Any]] = np.float32) -> st.SearchStrategy[FloatArray]:
    """Logits [rows, VOCAB] as models give them; also coarse ones, in which tokens tie."""
    fine = st.floats(-20, 20, width=16)  # so coarse that no two come to tie when they are scaled
    coarse = st.integers(-3, 3).map(float)
    return st.sampled_from([fine, coarse]).flatmap(lambda one: hnp.arrays(dtype, (rows, VOCAB), elements=one))


def distinct_logits() -> st.SearchStrategy[FloatArray]:
    """Logits [1, VOCAB] in float64 of which no two are equal, nor nearly so."""
    gaps = st.lists(st.floats(0.01, 2), min_size=VOCAB, max_size=VOCAB)
    orders = st.permutations(range(VOCAB))
    return st.tuples(gaps, orders).map(lambda made: np.cumsum(made[0])[None, list(made[1])])


@st.composite
def sampling_params(draw: st.DrawFn, /, **fixed: Any) -> SamplingParams:
    chosen = {
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        "top_k": draw(st.integers(-1, VOCAB + 2)),
        "top_p": draw(st.floats(0.01, 1)),
        "min_p": draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        "logprobs": draw(st.sampled_from([None, 0, 1, 5, VOCAB + 3])),
    }
    if draw(st.booleans()):
        chosen["repetition_penalty"] = draw(st.sampled_from([1.0, 1.3, 0.7]))
        chosen["presence_penalty"] = draw(st.sampled_from([0.0, 1.0, -1.0]))
        chosen["frequency_penalty"] = draw(st.sampled_from([0.0, 0.5, -0.5]))
    if draw(st.booleans()):
        chosen["logit_bias"] = draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3))
        chosen["allowed_token_ids"] = draw(st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1))
    return SamplingParams(**(chosen | fixed))


def as_bits(token_ids: Iterable[int], num_words: int = 1) -> NDArray[np.uint32]:
    """The bits [num_words] of these tokens; those past the last word are left out."""
    words = [0] * num_words
    for token in token_ids:
        if token < 32 * num_words:
            words[token // 32] |= 1 << token % 32
    return np.array(words, dtype=np.uint32)


@st.composite
def sampling_inputs(draw: st.DrawFn, /, rows: int, **fixed: Any) -> SamplingInput:
    return SamplingInput(
        row=draw(st.integers(0, rows - 1)),
        params=draw(sampling_params(**fixed)),
        prompt_token_ids=draw(token_lists),
        output_token_ids=draw(token_lists),
        seed=draw(seeds),
        stream=draw(st.integers(0, 7)),
        forbidden_token_ids=draw(st.just(()) | st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1).map(tuple)),
        allowed=draw(st.none() | st.sets(st.integers(0, 31)).map(as_bits)),  # bits past the last token mean nothing
    )


def may_be_chosen(wanted: SamplingInput) -> set[int]:
    """The tokens that neither the request's parameters nor its grammar nor its place rule out."""
    allowed, bits = wanted.params.allowed_token_ids, wanted.allowed
    possible = set(range(VOCAB) if allowed is None else allowed) - set(wanted.forbidden_token_ids)
    return {token for token in possible if bits is None or int(bits[0]) >> token & 1}


def one(logits: FloatArray, params: SamplingParams, **fields: Any) -> Sampled:
    """The token for one input on row 0 of `logits`."""
    defaults: dict[str, Any] = {"prompt_token_ids": [1], "output_token_ids": [], "seed": 0, "stream": 0}
    [sampled] = sample(logits, [SamplingInput(row=0, params=params, **(defaults | fields))])
    return sampled


def log_softmax(row: FloatArray) -> FloatArray:
    """[vocab], in float64."""
    wide = row.astype(np.float64)
    shifted: FloatArray = wide - wide.max()
    result: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return result


def chances(logits: FloatArray, params: SamplingParams) -> FloatArray:
    """The probability [vocab] of each token under `distribution`, to about 1e-16."""
    drawn_from = distribution(logits, params)
    weights = np.diff(drawn_from.cumulative, prepend=0.0)  # [kept]
    result = np.zeros(len(logits))
    result[drawn_from.token_ids] = weights / drawn_from.cumulative[-1]
    return result


def kept(logits: FloatArray, params: SamplingParams) -> FloatArray:
    """Which tokens [vocab] the filters keep."""
    result = np.zeros(len(logits), dtype=bool)
    result[distribution(logits, params).token_ids] = True
    return result


# --- Greedy -----------------------------------------------------------------------------------------


@given(logit_rows(rows=3))
def test_temperature_zero_takes_the_likeliest_token_and_the_lowest_id_on_ties(logits: FloatArray) -> None:
    params = SamplingParams(temperature=0)
    inputs = [SamplingInput(row, params, [1], [], seed=row, stream=0) for row in range(3)]
    expected = [min(range(VOCAB), key=lambda token: (-logits[row, token], token)) for row in range(3)]
    assert [sampled.token_id for sampled in sample(logits, inputs)] == expected


@given(distinct_logits(), seeds)
def test_a_temperature_near_zero_is_as_good_as_greedy(logits: FloatArray, seed: int) -> None:
    for temperature in (1e-4, 1e-300, 5e-324):
        token = one(logits, SamplingParams(temperature=temperature), seed=seed).token_id
        assert token == int(np.argmax(logits[0]))


# --- Penalties and forbidden tokens -----------------------------------------------------------------


@given(logit_rows(dtype=np.float64), sampling_inputs(rows=1))
def test_penalties_are_those_of_their_definitions(logits: FloatArray, wanted: SamplingInput) -> None:
    params, prompt, output = wanted.params, list(wanted.prompt_token_ids), list(wanted.output_token_ids)
    expected = []
    for token in range(VOCAB):
        logit = float(logits[0, token]) + dict(params.logit_bias).get(token, 0)
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        expected.append(logit if token in may_be_chosen(wanted) else -math.inf)
    before = logits.copy()
    np.testing.assert_allclose(penalise(logits[0], wanted), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(logits, before)


@given(logit_rows(dtype=np.float64), token_lists, token_lists, st.floats(0.2, 3))
def test_the_repetition_penalty_is_that_of_transformers(
    logits: FloatArray, prompt: list[int], output: list[int], penalty: float
) -> None:
    params = SamplingParams(repetition_penalty=penalty)
    ours = penalise(logits[0], SamplingInput(0, params, prompt, output, seed=0, stream=0))
    seen = torch.tensor([[*prompt, *output]], dtype=torch.long)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(seen, torch.from_numpy(logits.copy()))
    np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=1e-12)


@given(logit_rows(), sampling_inputs(rows=1, temperature=0.0))
def test_greedy_takes_the_likeliest_token_after_the_penalties(logits: FloatArray, wanted: SamplingInput) -> None:
    [sampled] = sample(logits, [wanted])
    assert sampled.error or sampled.token_id == int(np.argmax(penalise(logits[0], wanted)))


@given(logit_rows(rows=2), st.lists(sampling_inputs(rows=2), max_size=6))
def test_a_token_that_is_not_allowed_is_never_chosen(logits: FloatArray, inputs: list[SamplingInput]) -> None:
    for wanted, sampled in zip(inputs, sample(logits, inputs), strict=True):
        if possible := may_be_chosen(wanted):
            assert sampled.token_id in possible
        else:
            assert (sampled.error or "").startswith("the request leaves no token to choose: ")


@given(st.integers(1, 100), st.sets(st.integers(0, 127)), st.integers(0, 4))
def test_a_bit_for_each_token_says_whether_it_may_be_chosen(vocab: int, tokens: set[int], num_words: int) -> None:
    """Bits past the last token mean nothing, and tokens past the last bit are forbidden."""
    found = is_allowed(as_bits(tokens, num_words), vocab)
    assert found.shape == (vocab,)
    assert set(np.flatnonzero(found).tolist()) == {token for token in tokens if token < min(vocab, 32 * num_words)}


def test_a_grammar_that_leaves_nothing_is_named_with_what_else_rules_tokens_out() -> None:
    logits, params = np.zeros((1, VOCAB)), SamplingParams(temperature=0, allowed_token_ids=[5])
    error = "the request leaves no token to choose: structured_outputs and allowed_token_ids together rule out "
    assert (one(logits, params, allowed=as_bits([3])).error or "").startswith(error)
    assert one(logits, params, allowed=as_bits([3, 5])).token_id == 5


def test_a_bias_is_added_before_the_penalties_and_brings_no_forbidden_token_back() -> None:
    """The repetition penalty then divides or multiplies by the sign that the bias has left."""
    params = SamplingParams(logit_bias={0: 3.0, 1: -3.0, 2: 100.0}, repetition_penalty=2.0)
    wanted = SamplingInput(0, params, [0, 1], [], seed=0, stream=0, forbidden_token_ids=(2,))
    np.testing.assert_array_equal(penalise(np.array([-1.0, 1.0, 0.0]), wanted), [1.0, -4.0, -np.inf])


# --- Temperature and filters ------------------------------------------------------------------------


@given(
    distinct_logits(),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.integers(0, VOCAB + 2),
    st.floats(0.01, 1),
    st.one_of(st.just(0.0), st.floats(0.001, 0.999)),
)
def test_the_filters_are_those_of_transformers_in_the_order_of_vllm(
    logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scores = TemperatureLogitsWarper(temperature)(NO_TOKENS, torch.from_numpy(logits.copy()))
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(NO_TOKENS, scores)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(NO_TOKENS, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(NO_TOKENS, scores)
    ours = chances(logits[0], SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    theirs = torch.softmax(scores, dim=-1)[0].numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@given(logit_rows(), st.integers(1, VOCAB))
def test_top_k_keeps_the_k_likeliest_tokens_and_those_that_tie_with_the_last(logits: FloatArray, top_k: int) -> None:
    last = sorted(logits[0])[-top_k]
    np.testing.assert_array_equal(kept(logits[0], SamplingParams(top_k=top_k)), logits[0] >= last)


@given(logit_rows(), st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_tokens_that_reach_p_and_those_that_tie_with_the_last(
    logits: FloatArray, top_p: float
) -> None:
    probabilities = np.exp(log_softmax(logits[0]))
    kept_by_top_p = kept(logits[0], SamplingParams(top_p=top_p))
    assert probabilities[kept_by_top_p].sum() >= top_p - 1e-9
    last = logits[0, kept_by_top_p].min()
    np.testing.assert_array_equal(kept_by_top_p, logits[0] >= last)
    assert probabilities[logits[0] > last].sum() < top_p + 1e-9


def test_top_p_counts_the_probabilities_that_min_p_and_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert np.count_nonzero(kept(logits, SamplingParams(top_p=0.65))) == 2
    assert np.count_nonzero(kept(logits, SamplingParams(top_p=0.65, top_k=3))) == 2
    assert np.count_nonzero(kept(logits, SamplingParams(top_p=0.55, top_k=2))) == 1
    assert np.count_nonzero(kept(logits, SamplingParams(top_p=0.55, min_p=0.7))) == 1


@pytest.mark.parametrize("top_p", [1e-20, 0.5, 0.9, 0.999, 1 - 2**-53])
def test_top_p_is_right_on_a_vocabulary_with_a_long_tail(top_p: float) -> None:
    logits = np.random.default_rng(0).standard_normal(20_000) * 4
    scores = TopPLogitsWarper(top_p)(NO_TOKENS, torch.from_numpy(logits)[None])
    theirs = torch.softmax(scores, dim=-1)[0].numpy()
    np.testing.assert_allclose(chances(logits, SamplingParams(top_p=top_p)), theirs, rtol=1e-9, atol=1e-15)
    np.testing.assert_array_equal(kept(logits, SamplingParams(top_p=top_p)), theirs > 0)


# --- Drawing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == words


def test_the_uniform_number_is_made_of_the_first_two_words() -> None:
    seed, stream, position = 0x299F31D0A4093822, 5, 9
    first, second, _, _ = philox((position, stream, 0, 0), (0xA4093822, 0x299F31D0))
    assert uniform(seed, stream, position) == ((first >> 5) << 26 | second >> 6) / 2**53


@given(seeds, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_uniform_number_is_at_least_0_and_below_1(seed: int, stream: int, position: int) -> None:
    assert 0 <= uniform(seed, stream, position) < 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=2.0, min_p=0.2),
        SamplingParams(repetition_penalty=2.0),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "repetition_penalty"],
)
@pytest.mark.parametrize("along", ["positions", "streams", "seeds"])
def test_draws_follow_the_distribution_along_positions_streams_and_seeds(params: SamplingParams, along: str) -> None:
    logits = np.random.default_rng(1).standard_normal((1, VOCAB)).astype(np.float32)
    draws = 4000
    inputs = []
    for draw in range(draws):
        position = draw if along == "positions" else 1
        stream = draw if along == "streams" else 0
        seed = draw if along == "seeds" else 11
        prompt = np.zeros(position, dtype=np.int64) if position > 1 else [0]
        inputs.append(SamplingInput(0, params, prompt, [], seed=seed, stream=stream))  # type: ignore[arg-type]
    expected = chances(penalise(logits[0], inputs[1]), params) * draws
    observed = np.bincount([sampled.token_id for sampled in sample(logits, inputs)], minlength=VOCAB)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    chi_square = ((observed[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    freedom = np.count_nonzero(possible) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations above its mean


@given(logit_rows(rows=3), st.lists(sampling_inputs(rows=3), min_size=1, max_size=8), st.randoms())
def test_a_token_depends_on_its_own_input_alone(logits: FloatArray, inputs: list[SamplingInput], random: Any) -> None:
    def chosen(sampled: Sequence[Sampled]) -> list[object]:
        """An error goes with a logprob that is no number, and so not equal to itself."""
        return [one.error or one for one in sampled]

    together = chosen(sample(logits, inputs))
    assert chosen([sample(logits, [wanted])[0] for wanted in inputs]) == together
    order = random.sample(range(len(inputs)), len(inputs))
    assert chosen(sample(logits, [inputs[index] for index in order])) == [together[index] for index in order]
    in_other_rows = np.concatenate([np.zeros_like(logits), logits])
    moved = [replace(wanted, row=3 + wanted.row) for wanted in inputs]
    assert chosen(sample(in_other_rows, moved)) == together


def test_streams_positions_and_seeds_draw_differently() -> None:
    logits = np.zeros((1, 1000), dtype=np.float32)
    params = SamplingParams()
    streams = [one(logits, params, stream=stream).token_id for stream in range(100)]
    positions = [one(logits, params, output_token_ids=[0] * length).token_id for length in range(100)]
    by_seed = [one(logits, params, seed=seed).token_id for seed in range(100)]
    high_seeds = [one(logits, params, seed=seed << 32).token_id for seed in range(100)]
    for tokens in (streams, positions, by_seed, high_seeds):
        assert len(set(tokens)) > 85  # 95 expected: a few of 100 draws from 1000 coincide
    assert len({tuple(streams), tuple(positions), tuple(by_seed), tuple(high_seeds)}) == 4


def test_the_position_counts_prompt_and_output_together() -> None:
    logits = np.zeros((1, 1000), dtype=np.float32)
    split = [
        one(logits, SamplingParams(), prompt_token_ids=[1] * cut, output_token_ids=[2] * (9 - cut)).token_id
        for cut in range(1, 10)
    ]
    assert len(set(split)) == 1


# --- What is reported -------------------------------------------------------------------------------


@given(logit_rows(rows=2), st.lists(sampling_inputs(rows=2), max_size=6))
def test_logprobs_are_of_the_raw_logits_and_the_top_ones_are_ranked(
    logits: FloatArray, inputs: list[SamplingInput]
) -> None:
    for wanted, sampled in zip(inputs, sample(logits, inputs), strict=True):
        expected = log_softmax(logits[wanted.row])
        if sampled.error is not None:
            continue
        assert sampled.logprob == pytest.approx(expected[sampled.token_id], abs=2e-6)
        if wanted.params.logprobs is None:
            assert sampled.top_logprobs is None
            continue
        assert sampled.top_logprobs is not None
        ranking = sorted(range(VOCAB), key=lambda token: (-logits[wanted.row, token], token))
        top = ranking[: wanted.params.logprobs]
        assert list(sampled.top_logprobs) == top + [sampled.token_id] * (sampled.token_id not in top)
        for token, logprob in sampled.top_logprobs.items():
            assert logprob == pytest.approx(expected[token], abs=2e-6)


@given(logit_rows(), sampling_inputs(rows=1, logprobs=None), st.lists(st.integers(0, VOCAB - 1), min_size=1))
def test_tokens_that_are_asked_for_are_reported_in_place_of_the_likeliest(
    logits: FloatArray, wanted: SamplingInput, asked: list[int]
) -> None:
    """The model's own log-probabilities, likeliest first, the lowest id first among equals; the token is the same."""
    [plain] = sample(logits, [wanted])
    for logprobs in (None, len(asked)):
        params = replace(wanted.params, logprobs=logprobs, logprob_token_ids=asked)
        [sampled] = sample(logits, [replace(wanted, params=params)])
        assert (sampled.token_id, sampled.error) == (plain.token_id, plain.error)
        if sampled.error is None:
            assert sampled.top_logprobs is not None
            expected = log_softmax(logits[0])
            ranking = sorted({*asked, sampled.token_id}, key=lambda token: (-logits[0, token], token))
            assert list(sampled.top_logprobs) == ranking
            assert list(sampled.top_logprobs.values()) == pytest.approx(expected[ranking], abs=2e-6)


@given(logit_rows(rows=3), st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=3), st.integers(0, VOCAB + 1))
def test_a_given_token_has_the_logprob_of_its_row_and_the_likeliest_are_ranked_before_it(
    logits: FloatArray, token_ids: list[int], count: int
) -> None:
    for row, told in enumerate(gather_logprobs(logits, token_ids, count)):
        expected = log_softmax(logits[row])
        ranking = sorted(range(VOCAB), key=lambda token: (-logits[row, token], token))[:count]
        assert (told.token_id, told.error) == (token_ids[row], None)
        assert told.logprob == pytest.approx(expected[token_ids[row]], abs=2e-6)
        assert told.top_logprobs is not None
        assert list(told.top_logprobs) == list(dict.fromkeys([*ranking, token_ids[row]]))
        assert list(told.top_logprobs.values()) == pytest.approx([expected[t] for t in told.top_logprobs], abs=2e-6)


def test_a_row_that_is_no_numbers_is_an_error_of_the_token_that_is_given_for_it() -> None:
    first, bad, last = gather_logprobs(np.array([[1.0, 2.0], [0.0, np.nan], [2.0, 1.0]]), [0, 0, 0], 1)
    assert first.error is last.error is None
    assert (bad.error or "").startswith("the model's logits for the next token hold NaN (first at token 1)")


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.integers(-4, 4).map(float)), st.integers(0, 45))
def test_the_largest_values_come_first_and_the_lowest_index_on_ties(values: FloatArray, count: int) -> None:
    assert list(largest(values, count)) == sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


# --- What cannot be served --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@given(logits=logit_rows(rows=3), token=st.integers(0, VOCAB - 1))
def test_nan_in_a_row_is_an_error_of_those_that_use_it(logits: FloatArray, token: int, temperature: float) -> None:
    logits[2, token] = np.nan
    params = SamplingParams(temperature=temperature)
    [alone] = sample(logits, [SamplingInput(1, params, [1], [], seed=0, stream=0)])
    first, bad, last = sample(logits, [SamplingInput(row, params, [1], [], seed=0, stream=0) for row in (1, 2, 1)])
    assert first == last == alone
    assert alone.error is None
    assert bad.error is not None
    assert bad.error.startswith("the model's logits for the next token hold NaN")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_the_model_that_are_infinite_are_an_error_of_the_model(temperature: float) -> None:
    """Whatever the request asks for besides."""
    for more in ({}, {"allowed_token_ids": [1]}, {"repetition_penalty": 2.0}):
        params = SamplingParams(temperature=temperature, **more)
        lowest = np.full((1, VOCAB), -np.inf, dtype=np.float32)
        assert (one(lowest, params).error or "").startswith("the model's logits for the next token are minus infinity")
        highest = np.array([[0.0, np.inf]], dtype=np.float32)
        assert (one(highest, params).error or "").startswith("the model's logits for the next token hold plus infinity")


EVERYTHING = tuple(range(VOCAB))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("params", "place", "words"),
    [
        ({"min_tokens": 2}, {"forbidden_token_ids": EVERYTHING}, "min_tokens rules out every token"),
        ({"min_tokens": 2}, {"forbidden_token_ids": EVERYTHING, "num_pending": 1}, "min_tokens rules out"),
        (
            {"min_tokens": 2, "stop_token_ids": EVERYTHING},
            {"forbidden_token_ids": EVERYTHING},
            "min_tokens and stop_token_ids together rule out every token that the model allows; change min_tokens or "
            "stop_token_ids",
        ),
        ({"bad_words": ["a"]}, {"forbidden_token_ids": EVERYTHING}, "bad_words rules out every token"),
        (
            {"bad_words": ["a"], "min_tokens": 1},
            {"forbidden_token_ids": EVERYTHING, "num_pending": 1},
            "bad_words rules",
        ),
        ({"allowed_token_ids": [3], "bad_words": ["a"]}, {}, "allowed_token_ids rules out every token that the model"),
        (
            {"allowed_token_ids": [4], "bad_words": ["a"], "min_tokens": 2, "logit_bias": {4: 100.0}},
            {"forbidden_token_ids": (4,)},
            "allowed_token_ids, bad_words and min_tokens together rule out every token that the model allows; change "
            "allowed_token_ids, bad_words or min_tokens",
        ),
        ({"repetition_penalty": 5e-324}, {"output_token_ids": [5]}, "repetition_penalty makes the logits overflow"),
        (
            {"repetition_penalty": 5e-324, "allowed_token_ids": [5]},
            {"output_token_ids": [5]},
            "repetition_penalty makes the logits overflow",
        ),
    ],
)
def test_a_request_that_leaves_nothing_is_told_which_of_its_fields_do(
    params: dict[str, Any], place: dict[str, Any], words: str, temperature: float
) -> None:
    """The model rules token 3 out by itself; token 5 has a logit above 0."""
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 3], logits[0, 5] = -np.inf, 9.0
    with np.errstate(over="ignore"):
        error = one(logits, SamplingParams(temperature=temperature, **params), **place).error or ""
    assert error.removeprefix("the request leaves no token to choose: ").startswith(words)


@given(logit_rows(), sampling_inputs(rows=1), st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1))
def test_a_token_that_the_model_rules_out_is_never_chosen(
    logits: FloatArray, wanted: SamplingInput, ruled_out: set[int]
) -> None:
    logits[0, list(ruled_out)] = -np.inf
    if not may_be_chosen(wanted) - ruled_out:
        assert (sample(logits, [wanted])[0].error or "").startswith("the request leaves no token to choose: ")
    else:
        assert sample(logits, [wanted])[0].token_id not in ruled_out


@settings(max_examples=examples(20))
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.8])), min_size=1, max_size=20))
def test_a_row_is_worked_on_once_however_many_inputs_use_it(uses: list[tuple[int, float]]) -> None:
    read: list[int] = []

    class Watched(np.ndarray):
        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, int) and self.ndim == 2:
                read.append(key)
            return np.asarray(super().__getitem__(key))

    logits = np.zeros((4, VOCAB), dtype=np.float32).view(Watched)
    inputs = [
        SamplingInput(row, SamplingParams(temperature=t), [1], [], 0, stream=s) for s, (row, t) in enumerate(uses)
    ]
    sample(logits, inputs)
    assert sorted(read) == sorted({row for row, _ in uses})
