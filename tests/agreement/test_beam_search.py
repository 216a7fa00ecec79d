"""Both tiers' beam searches make the same decisions from the same logits, step by step.

Both compute in the precision of the logits, and a sum of many terms is rounded by the order in which they are added,
which is each library's own. So what is asked for is

- the very same, without tolerance, where every number is exact whatever the order: there ties abound;
- the same decisions elsewhere, unless two candidates or scores that were compared lie within 1e-5 of each other. Where
  decisions differ, the test proves that there were such two.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.contracts import BeamMove, BeamStep
from minipaged.errors import BadLogits, InvalidRequest
from minipaged.fast.beam_search import BeamSearch as FastBeamSearch
from minipaged.params import BeamSearchParams
from minipaged.reference.beam_search import BeamSearch as ReferenceBeamSearch
from tests.effort import examples

FloatArray = NDArray[np.floating[Any]]
Model = Callable[[int, Sequence[Sequence[int]]], FloatArray]
"""The step and the running beams' tokens -> logits [beams, vocab]."""

ROUNDING = 1e-5
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

early_stoppings: st.SearchStrategy[bool | Literal["never"]] = st.sampled_from([True, False, "never"])


@st.composite
def beam_params(draw: st.DrawFn, vocab: int) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=draw(st.integers(1, vocab)),
        max_tokens=draw(st.integers(1, 8)),
        length_penalty=draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])),
        early_stopping=draw(early_stoppings),
        ignore_eos=draw(st.booleans() | st.just(False)),
    )


class Pair:
    """The search of one request on both tiers, stepped together: the sums handed to both are the reference's."""

    def __init__(self, params: BeamSearchParams, prompt_length: int, eos: Sequence[int], device: str) -> None:
        given_ = (params, prompt_length, prompt_length + params.max_tokens, eos)
        self.reference, self.fast = ReferenceBeamSearch(*given_), FastBeamSearch(*given_)
        self.device = device
        self.beams: list[list[int]] = [[]]
        self.sums = [0.0]
        self.compared: list[float] = []
        """The scores of all that finished so far: each is compared with those that come later."""

    def step(self, logits: FloatArray, row_of_beam: Sequence[int]) -> tuple[BeamStep, BeamStep]:
        """One step of each; the beams go on as the reference decides."""
        expected = self.reference.step(logits, row_of_beam, self.sums)
        self.fast = copy.deepcopy(self.fast)  # as the engine does
        found = self.fast.step(torch.from_numpy(logits.copy()).to(self.device), row_of_beam, self.sums)
        self.beams = [[*self.beams[move.parent], move.token_id] for move in expected.survivors]
        self.sums = [move.cumulative_logprob for move in expected.survivors]
        return expected, found


def decisions(step: BeamStep) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    def chosen(moves: list[BeamMove]) -> list[tuple[int, int]]:
        return [(move.parent, move.token_id) for move in moves]

    return chosen(step.survivors), chosen([move for move, _ in step.finished])


def run(
    model: Model, params: BeamSearchParams, eos: Sequence[int], device: str, prompt_length: int = 3, exact: bool = False
) -> None:
    """Step both searches to the end of the reference's, comparing each step."""
    pair = Pair(params, prompt_length, eos, device)
    finished: list[float] = []  # all scores so far
    for number in itertools.count():
        logits = model(number, pair.beams)
        order = np.random.default_rng(number).permutation(len(logits))  # a row need not be where its beam is
        row_of_beam = np.argsort(order).tolist()
        sums = list(pair.sums)
        expected, found = pair.step(logits[order], row_of_beam)
        if exact:
            assert found == expected
        elif decisions(found) != decisions(expected):
            event("decided differently")
            assert is_a_matter_of_rounding(logits, sums, params, number + 1, finished)
            return
        for (ours, our_score), (theirs, their_score) in zip(found.finished, expected.finished, strict=True):
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=ROUNDING)
            assert our_score == pytest.approx(their_score, rel=ROUNDING, abs=ROUNDING)
        for ours, theirs in zip(found.survivors, expected.survivors, strict=True):
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=ROUNDING)
        finished += [score for _, score in expected.finished]
        if not pair.beams:
            return


def is_a_matter_of_rounding(
    logits: FloatArray, sums: Sequence[float], params: BeamSearchParams, length: int, finished: Sequence[float]
) -> bool:
    """Whether two of the candidates, or of the scores, that this step compared lie within a rounding of each other."""
    wide = torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), dim=1).numpy()  # [beams, vocab]
    candidates = np.sort((wide + np.array(sums)[:, None]).ravel())[::-1]
    scores = [candidates / float(at) ** params.length_penalty for at in (length, params.max_tokens)]
    together = [candidates, *(np.sort(np.concatenate([one, finished])) for one in scores)]
    return any(bool((np.abs(np.diff(one)) < ROUNDING).any()) for one in together)


def exact_model(
    seed: int, vocab: int, dtype: type[np.floating[Any]], eos: Sequence[int], least: int, ruled_out: float
) -> Model:
    """One token of each row has the logit 0, often an EOS one; the others a whole number from `least` to -40, or -inf.

    Next to exp(0) the others' exponentials, 4e-17 together, are less than half a bit of the sum. So the log of the sum
    is 0, a token's log-probability is its logit, and every sum of them is a whole number: there is nothing to round.
    """

    def logits(step: int, beams: Sequence[Sequence[int]]) -> FloatArray:
        rng = np.random.default_rng((seed, step))
        table = rng.integers(least, -39, size=(len(beams), vocab)).astype(dtype)
        table[rng.random(table.shape) < ruled_out] = -np.inf
        for row in table:
            row[rng.choice(eos) if eos and rng.random() < 0.5 else rng.integers(0, vocab)] = 0
        return table

    return logits


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(300))
@given(st.data(), st.integers(2, 9), st.integers(0, 10**6), st.sampled_from([np.float32, np.float64]))
def test_where_nothing_is_rounded_decisions_sums_and_scores_are_the_same(
    device: str, data: st.DataObject, vocab: int, seed: int, dtype: type[np.floating[Any]]
) -> None:
    params = data.draw(beam_params(vocab))
    eos = data.draw(st.lists(st.integers(0, vocab - 1), max_size=2, unique=True))
    least, ruled_out = data.draw(st.sampled_from([-40, -41, -50])), data.draw(st.sampled_from([0.0, 0.0, 0.5]))
    model = exact_model(seed, vocab, dtype, eos, least, ruled_out)
    run(model, params, eos, device, exact=True)


def rounded_model(
    seed: int, vocab: int, dtype: type[np.floating[Any]], kind: str, eos: Sequence[int] = (), eos_bonus: float = 0.0
) -> Model:
    """Random logits, or a few whole numbers; the same for every beam of a step, or not."""

    def logits(step: int, beams: Sequence[Sequence[int]]) -> FloatArray:
        rng = np.random.default_rng((seed, step))
        rows = 1 if kind == "one row for all" else len(beams)
        table = rng.standard_normal((rows, vocab)) * 2
        if kind == "whole numbers":
            table = np.round(table)
        table[:, list(eos)] += eos_bonus
        return np.repeat(table, len(beams) // rows, axis=0).astype(dtype)

    return logits


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(300))
@given(
    st.data(),
    st.sampled_from([2, 5, 9, 200]),
    st.integers(0, 10**6),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from(["random", "whole numbers", "one row for all"]),
)
def test_decisions_are_the_same_unless_a_rounding_decides(
    device: str, data: st.DataObject, vocab: int, seed: int, dtype: type[np.floating[Any]], kind: str
) -> None:
    params = data.draw(beam_params(min(vocab, 9)))
    eos = data.draw(st.lists(st.integers(0, vocab - 1), max_size=2, unique=True))
    bonus = data.draw(st.sampled_from([0.0, 1.0, 3.0]))
    run(rounded_model(seed, vocab, dtype, kind, eos, bonus), params, eos, device)


@pytest.mark.parametrize("device", DEVICES)
def test_random_logits_are_hardly_ever_decided_by_a_rounding(device: str) -> None:
    """The clause above excuses little: with logits like a model's, every decision of 300 steps is the same."""
    for seed in range(10):
        model = rounded_model(seed, 500, np.float32, "random")
        pair = Pair(BeamSearchParams(4, 30, 1.0, "never"), 3, [7], device)
        for number in range(30):
            logits = model(number, pair.beams)
            expected, found = pair.step(logits, range(len(logits)))
            assert decisions(found) == decisions(expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, "all -inf"])
def test_both_tiers_refuse_the_same_logits_and_stay_as_they_were(device: str, bad: float | str) -> None:
    sound = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    broken = sound.copy()
    if isinstance(bad, str):
        broken[2] = -np.inf
    else:
        broken[2, 4] = bad
    pair = Pair(BeamSearchParams(2, 3), 1, [], device)
    with pytest.raises(BadLogits) as expected:
        pair.reference.step(broken, [2], [0.0])
    with pytest.raises(BadLogits) as found:
        pair.fast.step(torch.from_numpy(broken).to(device), [2], [0.0])
    assert str(found.value) == str(expected.value)
    for _ in range(3):
        ours, theirs = pair.step(sound, range(len(pair.beams)))
        assert decisions(ours) == decisions(theirs)
    assert pair.beams == []


def test_both_tiers_refuse_the_same_length_penalties() -> None:
    for length_penalty, most in ((200.0, 500), (-200.0, 500), (29.0, 10), (30.0, 10), (31.0, 10), (200.0, 1)):
        messages = []
        for search in (ReferenceBeamSearch, FastBeamSearch):
            try:
                search(BeamSearchParams(max_tokens=most, length_penalty=length_penalty), 10, 10 + most, [])
                messages.append("")
            except InvalidRequest as error:
                messages.append(str(error))
        assert messages[0] == messages[1]
