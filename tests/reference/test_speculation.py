"""The reference tier's `verify`: greedy and compared tokens are those without drafts; rejection keeps the distribution.

Faults that are known from elsewhere are planted in the source, and each must be found.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipaged.contracts import Draft, Sampled, SamplingInput
from minipaged.fast.cpu.sampling import uniform as uniforms
from minipaged.params import SamplingParams
from minipaged.reference import speculation
from minipaged.reference.sampling import FloatArray, sample
from minipaged.reference.speculation import ACCEPTANCE, RESIDUAL, is_accepted, probabilities, residual, verify
from tests.effort import quick_cases, thorough
from tests.reference.test_sampling import sampling_params

PROMPT = (1, 2)


class SmallModel:
    """Logits [vocab] as a function of all tokens, and those of a draft model that errs a bit."""

    def __init__(self, vocab: int, seed: int, noise: float = 1.0) -> None:
        self.vocab, self.noise, self._seed = vocab, noise, seed
        self.logits = cache(self._logits)
        self.draft_logits = cache(self._draft_logits)

    def _random(self, tokens: tuple[int, ...], what: int) -> FloatArray:
        return np.random.default_rng([self._seed, what, *tokens]).normal(size=self.vocab)

    def _logits(self, tokens: tuple[int, ...]) -> FloatArray:
        return 1.5 * self._random(tokens, 0)

    def _draft_logits(self, tokens: tuple[int, ...]) -> FloatArray:
        return self._logits(tokens) + self.noise * self._random(tokens, 1)


def input_after(output: Sequence[int], params: SamplingParams, seed: int, row: int = 0) -> SamplingInput:
    return SamplingInput(row, params, PROMPT, list(output), seed, stream=1)


def plain(model: SmallModel, params: SamplingParams, seed: int, length: int) -> list[Sampled]:
    """The tokens without drafts."""
    output: list[Sampled] = []
    for _ in range(length):
        tokens = [one.token_id for one in output]
        output += sample(model.logits((*PROMPT, *tokens))[None], [input_after(tokens, params, seed)])
    return output


def verified(
    model: SmallModel,
    output: Sequence[int],
    drafted: Sequence[int],
    params: SamplingParams,
    seed: int,
    *,
    is_drawn: bool,
    verify: Callable[..., list[list[Sampled]]] = verify,
    num_not_run: int = 0,
) -> list[Sampled]:
    """What a step gives after `output` with these drafted tokens. `num_not_run`: 1 if the last one is not run."""
    befores = [(*output, *drafted[:i]) for i in range(len(drafted) + 1 - num_not_run)]
    inputs = [input_after(before, params, seed, row) for row, before in enumerate(befores)]
    logits = np.stack([model.logits((*PROMPT, *before)) for before in befores])  # [k + 1, vocab]
    drafted_from = [model.draft_logits((*PROMPT, *before)) for before in befores[: len(drafted)]]  # of [vocab] each
    q = np.reshape(drafted_from, (len(drafted), model.vocab)) if is_drawn else None  # [drafted tokens, vocab]
    [chosen] = verify(logits, [Draft(drafted, inputs)], q)
    return chosen


# --- Drafts that are compared ---------------------------------------------------------------------------


@given(
    st.integers(0, 99),
    st.integers(0, 2**64 - 1),
    sampling_params(logit_bias={}, allowed_token_ids=None, logprobs=None),
    st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=8, max_size=8),
    st.booleans(),
)
def test_whatever_is_drafted_the_tokens_are_those_without_drafts(
    number: int, seed: int, params: SamplingParams, drafts: list[list[int]], is_near: bool
) -> None:
    """And so is what is reported of them. Drafts are near the right tokens, so that some stand, or anything."""
    model, length = SmallModel(5, number), 8
    expected = plain(model, params, seed, length + 6)
    output: list[Sampled] = []
    for draft in drafts:
        tokens = [one.token_id for one in output]
        right = [one.token_id for one in expected[len(output) :]]
        drafted = [token if token else to for token, to in zip(draft, right, strict=False)] if is_near else draft
        output += verified(model, tokens, drafted, params, seed, is_drawn=False)
        if len(output) >= length:
            break
    assert output == expected[: len(output)]
    assert len(output) >= length


def test_a_right_draft_stands_and_brings_one_token_more() -> None:
    model, params = SmallModel(5, 0), SamplingParams(temperature=0)
    tokens = [one.token_id for one in plain(model, params, 0, 5)]
    assert [one.token_id for one in verified(model, [], tokens[:4], params, 0, is_drawn=False)] == tokens
    wrong = [*tokens[:2], (tokens[2] + 1) % 5, tokens[3]]
    assert [one.token_id for one in verified(model, [], wrong, params, 0, is_drawn=False)] == tokens[:3]


def test_a_greedy_request_compares_also_what_a_model_drafted() -> None:
    model, params = SmallModel(5, 0), SamplingParams(temperature=0)
    tokens = [one.token_id for one in plain(model, params, 0, 5)]
    assert [one.token_id for one in verified(model, [], tokens[:4], params, 0, is_drawn=True)] == tokens


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_row_of_nan_is_an_error_only_where_it_is_reached(is_drawn: bool) -> None:
    logits = np.array([[0.0, 9, 0], [0, 0, 9], [math.nan, 0, 0]])
    params = SamplingParams(temperature=0.01)
    inputs = [input_after([1, 2][:row], params, 0, row) for row in range(3)]
    q = logits[:2] if is_drawn else None
    [chosen] = verify(logits, [Draft([1, 2], inputs)], q)
    assert [one.token_id for one in chosen[:2]] == [1, 2]
    assert chosen[2].error
    assert "NaN" in chosen[2].error
    q = np.array([[0.0, 9, 0], [9, 0, 0]]) if is_drawn else None
    [chosen] = verify(logits, [Draft([1, 0], inputs)], q)  # the second does not stand
    assert [(one.token_id, one.error) for one in chosen] == [(1, None), (2, None)]
    logits[0] = math.nan  # an error is no token 0 that stands
    [chosen] = verify(logits, [Draft([0, 0], inputs)], q)
    assert [one.error is None for one in chosen] == [False]


def test_a_request_that_leaves_nothing_is_an_error() -> None:
    inputs = [replace(input_after([], SamplingParams(), 0), forbidden_token_ids=(0, 1))] * 2
    [chosen] = verify(np.zeros((1, 2)), [Draft([1], inputs)], np.zeros((1, 2)))
    assert [one.error is None for one in chosen] == [False]


# --- Rejection ------------------------------------------------------------------------------------------

SMALL = [  # logits of the target, logits of the draft, parameters
    ([0.0, 1.0, 2.0, 0.5], [1.0, 1.0, 0.0, 0.5], {}),
    ([0.0, 1.0, 2.0, 0.5, -1.0], [2.0, 1.0, 0.0, 0.4, 2.0], {"top_k": 3}),
    ([0.0, 1.0, 2.0, 0.5, -1.0], [0.1, 1.2, 1.7, 0.5, -1.0], {"top_p": 0.8, "temperature": 1.5}),
    ([0.0, 0.0, 0.0], [0.0, 0.0, -5.0], {"temperature": 0.7}),
    ([3.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0, 0.0, 0.0], {"min_p": 0.04}),
]
DRAWS = 200_000


def p_value(counts: Sequence[int], expected: FloatArray) -> float:
    """The probability that draws from the `expected` distribution differ from it as much as these (chi-square)."""
    possible = expected > 0
    assert not np.any(np.asarray(counts)[~possible])
    wanted = expected[possible] * np.sum(counts)
    statistic = float(((np.asarray(counts)[possible] - wanted) ** 2 / wanted).sum())
    free = torch.tensor((possible.sum() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(free, torch.tensor(statistic / 2, dtype=torch.float64)))


@quick_cases(3)
@pytest.mark.parametrize("seed", range(20))
def test_tokens_chosen_by_rejection_have_the_targets_distribution(seed: int) -> None:
    """And drafts stand as often as can be. Positions are counted up; the numbers are those of the request's seed."""
    target, draft, given_ = SMALL[seed % len(SMALL)]
    wanted = input_after([], SamplingParams(**given_), seed)
    p, q = probabilities(np.array(target), wanted), probabilities(np.array(draft), wanted)  # [vocab] each
    drawing, rest = speculation.Distribution(np.arange(len(q)), np.cumsum(q)), residual(p, q)
    counters = np.full(DRAWS, seed, np.uint64), np.ones(DRAWS, np.uint64), np.arange(DRAWS, dtype=np.uint64)
    numbers = (uniforms(*counters, purpose).tolist() for purpose in (0, ACCEPTANCE, RESIDUAL))
    counts, num_accepted = [0] * len(p), 0
    for drawn, u, v in zip(*numbers, strict=True):
        drafted = drawing.at(drawn)
        accepted = is_accepted(p, q, drafted, u)
        num_accepted += accepted
        counts[drafted if accepted else rest.at(v)] += 1
    assert p_value(counts, p) > 0.001
    assert num_accepted / DRAWS == pytest.approx(np.minimum(p, q).sum(), rel=0.01)


def test_a_draft_that_is_certain_of_its_token_stands_with_the_tokens_probability() -> None:
    """Σ min(p, q) for a q that is 1 at one token: the plain draw is this token."""
    target, _, given_ = SMALL[2]
    wanted = input_after([], SamplingParams(**given_), 0)
    p = probabilities(np.array(target), wanted)  # [vocab]
    drawing = speculation.Distribution(np.arange(len(p)), np.cumsum(p))
    numbers = uniforms(np.zeros(DRAWS, np.uint64), np.ones(DRAWS, np.uint64), np.arange(DRAWS, dtype=np.uint64))
    drawn = Counter(drawing.at(u) for u in numbers.tolist())
    for drafted in np.flatnonzero(p).tolist():
        assert drawn[drafted] / DRAWS == pytest.approx(p[drafted], rel=0.02)


@given(st.integers(0, 999), st.integers(0, 2**64 - 1), st.integers(0, 4))
def test_a_draft_from_the_same_distribution_stands_and_is_the_plain_draw(number: int, seed: int, length: int) -> None:
    model, params = SmallModel(6, number, noise=0), SamplingParams(top_p=0.9)
    tokens = [one.token_id for one in plain(model, params, seed, length + 1)]
    assert [one.token_id for one in verified(model, [], tokens[:-1], params, seed, is_drawn=True)] == tokens


def test_distributions_that_differ_by_rounding_only_accept() -> None:
    p, q = np.array([0.5, 0.5]), np.array([0.5, np.nextafter(0.5, 1)])
    assert is_accepted(p, q, 1, u=np.nextafter(1.0, 0))


# --- Several tokens ---------------------------------------------------------------------------------------

LENGTH, VOCAB = 3, 4
PARAMS = SamplingParams(top_k=3, temperature=1.2)
MODEL = SmallModel(VOCAB, seed=3, noise=1.5)


def by_rounds(
    verify: Callable[..., list[list[Sampled]]], seed: int, num_drafted: Callable[[int], int], num_not_run: int = 0
) -> list[int]:
    """Generate with drafts of the draft model's, `num_drafted(position)` in the step that begins there. `num_not_run`:
    1 if it also guesses the token after them."""
    output: list[int] = []
    while len(output) < LENGTH:
        drafted: list[int] = []
        for _ in range(num_drafted(len(output)) + num_not_run):
            logits = MODEL.draft_logits((*PROMPT, *output, *drafted))
            [guess] = sample(logits[None], [input_after([*output, *drafted], PARAMS, seed)])
            drafted.append(guess.token_id)
        chosen = verified(MODEL, output, drafted, PARAMS, seed, is_drawn=True, verify=verify, num_not_run=num_not_run)
        output += [one.token_id for one in chosen]
    return output[:LENGTH]


@cache
def joint_distribution() -> FloatArray:
    """The exact probability of each of the VOCAB ** LENGTH outputs, in order."""
    exact = np.ones((VOCAB,) * LENGTH)
    for tokens in product(range(VOCAB), repeat=LENGTH):
        for i, token in enumerate(tokens):
            wanted = input_after(tokens[:i], PARAMS, 0)
            exact[tokens] *= probabilities(MODEL.logits((*PROMPT, *tokens[:i])), wanted)[token]
    return exact.ravel()


def fit(verify: Callable[..., list[list[Sampled]]], num_outputs: int, num_not_run: int = 0) -> float:
    """How well outputs of all seeds, drafted two tokens at a time, fit: the p-value, or 0 for impossible outputs."""
    counts = Counter(tuple(by_rounds(verify, seed, lambda position: 2, num_not_run)) for seed in range(num_outputs))
    found = np.array([counts[tokens] for tokens in product(range(VOCAB), repeat=LENGTH)])
    exact = joint_distribution()
    return 0.0 if found[exact == 0].any() else p_value(found.tolist(), exact)


@pytest.mark.parametrize("num_not_run", [0, pytest.param(1, marks=thorough)])
def test_several_tokens_have_their_joint_distribution(num_not_run: int) -> None:
    assert fit(verify, 2_000, num_not_run) > 0.001


def test_with_a_guess_at_every_position_the_number_of_drafted_tokens_changes_no_token() -> None:
    """What the module's docstring says about seeds. Without a guess for the bonus token, the number does."""
    different = 0
    for seed in range(30):
        tokens = by_rounds(verify, seed, lambda position: 2, 1)
        for number in (lambda position: 0, lambda position: 3, lambda position: position % 2):
            assert by_rounds(verify, seed, number, 1) == tokens
        different += by_rounds(verify, seed, lambda position: position % 2) != by_rounds(verify, seed, lambda _: 2)
    assert different > 5


@pytest.mark.parametrize("row", [[math.nan, 0.0, 0.0], [-math.inf] * 3, [math.inf, 0.0, 0.0]], ids=str)
def test_a_draft_model_whose_logits_are_no_distribution_changes_nothing(row: list[float]) -> None:
    logits, params = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 2.0]]), SamplingParams()
    for seed in range(20):
        inputs = [input_after([0][:i], params, seed, i) for i in range(2)]
        [chosen] = verify(logits, [Draft([0], inputs)], np.array([row]))
        [first] = sample(logits, inputs[:1])
        assert chosen[0] == first
        assert len(chosen) == 1 + (first.token_id == 0)


CHOOSE = "chosen += sample(logits, [wanted])"
FAULTS = {
    "the residual is not normalised": (
        "np.cumsum(np.maximum(p - q, 0)))",
        "np.append(np.cumsum(np.maximum(p - q, 0))[:-1], 1.0))",
    ),
    "p / q of the distributions before the filters": (
        "if not is_accepted(p, q,",
        "if not is_accepted(*(probabilities(x, replace(wanted, params=replace(wanted.params, top_k=0))) "
        "for x in (logits[wanted.row], draft_logits)),",
    ),
    "the bonus token from the row before": (
        CHOOSE,
        "chosen += sample(logits, [replace(wanted, row=wanted.row - (drafted is None and wanted.row > 0))])",
    ),
    "a refused token is drawn from p": ("residual(p, q).at(", "residual(p, 0 * q).at("),
    "acceptance uses the draft's own number": ("ACCEPTANCE, RESIDUAL = 1, 2", "ACCEPTANCE, RESIDUAL = 0, 2"),
    "the residual uses the number of acceptance": ("ACCEPTANCE, RESIDUAL = 1, 2", "ACCEPTANCE, RESIDUAL = 1, 1"),
    "q / p": ("u * q[drafted] < p[drafted]", "u * p[drafted] < q[drafted]"),
    "all drafted tokens are accepted": ("u * q[drafted] < p[drafted]", "p[drafted] > 0"),
}


@quick_cases(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_known_fault_is_found(fault: str) -> None:
    right, wrong = FAULTS[fault]
    source = inspect.getsource(speculation)
    assert source.count(right) == 1
    module = ModuleType("faulty")
    exec(
        "from dataclasses import replace\n" + source.replace(right, wrong).replace("from __future__", "#"), vars(module)
    )
    assert fit(module.verify, 1_000) < 1e-6


def test_a_token_after_one_that_does_not_stand_is_found() -> None:
    """Without the `break`, tokens would come from rows that predict what follows other tokens."""
    source = inspect.getsource(speculation).replace("                break\n", "                pass\n")
    module: Any = ModuleType("faulty")
    exec(source.replace("from __future__", "#"), vars(module))
    assert fit(module.verify, 500) < 1e-6
