"""The proof that a difference was a tie accepts ties, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.ties import check_same_or_tied, check_tie, computed_logits, exact_logits

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


def test_the_logits_of_both_sides_are_those_of_the_last_token(small_llama: Path):
    tokens = list(range(3, 43))  # more than two blocks
    exact, computed = exact_logits(small_llama, tokens), computed_logits(small_llama, tokens)
    assert exact.dtype == np.float64
    assert computed.dtype == np.float32
    np.testing.assert_allclose(computed, exact, rtol=0, atol=1e-4 * np.abs(exact).max())
