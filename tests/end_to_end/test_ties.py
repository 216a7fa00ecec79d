"""The proof that a difference was a tie accepts ties, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minipaged import SamplingParams
from minipaged.contracts import SamplingInput
from minipaged.reference.sampling import sample
from tests.effort import quick_cases
from tests.end_to_end.ties import (
    check_same_or_tied,
    check_tie,
    check_tied_draw,
    computed_logits,
    exact_logits,
    running_sums,
)

EXACT = np.array([3.0, 1.0, 3.0 - 1e-6, -2.0])
ROUNDED = EXACT + np.array([-1e-6, 0.0, 1e-6, 1e-7])


def test_two_tokens_within_the_rounding_error_of_each_other_are_a_tie():
    check_tie(EXACT, ROUNDED, 0, 2)
    check_tie(EXACT, ROUNDED, 2, 0)


@pytest.mark.parametrize("other", [1, 3])
def test_a_token_further_off_than_the_rounding_error_is_no_tie(other):
    with pytest.raises(AssertionError, match="no tie"):
        check_tie(EXACT, ROUNDED, 0, other)


def test_two_equal_tokens_that_are_not_the_best_are_no_tie():
    with pytest.raises(AssertionError, match="no tie"):
        check_tie(np.array([3.0, 1.0, 1.0]), np.array([3.0, 1.0, 1.000001]), 1, 2)


def test_a_wrong_computation_does_not_excuse_itself():
    with pytest.raises(AssertionError, match="more than rounding"):
        check_tie(EXACT, EXACT + np.array([0.0, 2.5, 0.0, 0.0]), 0, 1)


def test_a_made_up_difference_between_two_continuations_is_refused(small_llama: Path):
    prompt = [5, 6, 7]
    best, second = np.argsort(-exact_logits(small_llama, prompt))[:2].tolist()
    check_same_or_tied(small_llama, prompt, [best, 9], [best, 9])
    with pytest.raises(AssertionError, match="no tie"):
        check_same_or_tied(small_llama, prompt, [best], [second])
    with pytest.raises(AssertionError, match="ends early"):
        check_same_or_tied(small_llama, prompt, [best], [best, second])


def drawing(seed: int, **filters: Any) -> SamplingInput:
    return SamplingInput(0, SamplingParams(temperature=0.5, **filters), [1], [], seed=seed, stream=0)


@quick_cases(2)
@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}, {"repetition_penalty": 1.3}])
def test_only_tokens_beside_the_number_drawn_are_a_tie(filters: dict[str, Any]) -> None:
    """Of many draws from logits that are off by rounding: those which differ are ties, and no others would be."""
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(5000)
    computed = exact + rng.uniform(-1e-5, 1e-5, 5000)
    parted = 0
    for seed in range(600):
        wanted = drawing(seed, **filters)
        (drawn,), (theirs,) = sample(exact[None], [wanted]), sample(computed[None], [wanted])
        check_tied_draw(exact, computed, wanted, drawn.token_id, theirs.token_id)
        parted += drawn.token_id != theirs.token_id
        kept = np.flatnonzero(np.diff(running_sums(exact, wanted), prepend=0) > 0)
        far = kept[(np.searchsorted(kept, drawn.token_id) + len(kept) // 2) % len(kept)]
        with pytest.raises(AssertionError, match="no tie"):
            check_tied_draw(exact, computed, wanted, drawn.token_id, int(far))
    assert parted or filters.keys() & {"top_k", "min_p"}, "none of these draws was a tie"  # these keep few tokens


def test_wrong_logits_do_not_excuse_another_draw():
    with pytest.raises(AssertionError, match="more than rounding"):
        check_tied_draw(EXACT, EXACT + np.array([0.0, 2.5, 0.0, 0.0]), drawing(0), 0, 1)


def test_the_logits_of_both_sides_are_those_of_the_last_token(small_llama: Path):
    tokens = list(range(3, 43))  # more than two blocks
    exact, computed = exact_logits(small_llama, tokens), computed_logits(small_llama, tokens)
    assert exact.dtype == np.float64
    assert computed.dtype == np.float32
    np.testing.assert_allclose(computed, exact, rtol=0, atol=1e-4 * np.abs(exact).max())
