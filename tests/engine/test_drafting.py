"""The rule for the number of drafted tokens: it follows acceptance and the batch, and comes back after a pause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.engine.drafting import AdaptiveDrafts, DraftRecord

RULE = AdaptiveDrafts(num_speculative_tokens=4)
shares = st.floats(0, 1)
batches = st.integers(1, 300)


def record_of(acceptance: float) -> DraftRecord:
    """A long record with this share of accepted tokens."""
    return DraftRecord(1e9, acceptance * 1e9)


def drafted(rule: AdaptiveDrafts, num_steps: int, num_sequences: int, stands: bool) -> list[int]:
    """The numbers of tokens drafted in these steps for a sequence all of whose drafts stand, or none."""
    record, numbers = DraftRecord(), list[int]()
    for _ in range(num_steps):
        numbers.append(rule.num_to_draft(record, num_sequences))
        rule.note(record, numbers[-1], numbers[-1] if stands else 0)
    return numbers


@given(shares, batches, st.integers(0, 8), st.sampled_from([0.0, 0.1, 0.8]))
def test_no_other_number_of_tokens_gains_more(
    acceptance: float, num_sequences: int, most: int, draft_cost: float
) -> None:
    """Against the theorem's formula, written out: tokens by time. A draft model has a pass more than it drafts."""
    rule = AdaptiveDrafts(most, draft_cost=draft_cost)
    estimated = rule.acceptance(record_of(acceptance))
    longer = num_sequences / (rule.tokens_per_read + num_sequences)
    seconds = [1 + k * longer + (k + 1) * draft_cost for k in range(most + 1)]
    gains = [sum(estimated**i for i in range(k + 1)) / seconds[k] for k in range(most + 1)]
    assert gains[rule.num_to_draft(record_of(acceptance), num_sequences)] == pytest.approx(max(gains))


@given(shares, shares, batches, batches)
def test_more_refused_tokens_or_a_larger_batch_never_draft_more(a: float, b: float, m: int, n: int) -> None:
    assert RULE.num_to_draft(record_of(min(a, b)), m) <= RULE.num_to_draft(record_of(max(a, b)), m)
    assert RULE.num_to_draft(record_of(a), max(m, n)) <= RULE.num_to_draft(record_of(a), min(m, n))


def test_a_sequence_whose_drafts_stand_goes_on_drafting_as_many_as_it_may() -> None:
    first, *others = drafted(RULE, 20, num_sequences=1, stands=True)
    assert first == 3  # a sequence without a record is taken to accept 0.6
    assert set(others) == {4}


@pytest.mark.parametrize("num_sequences", [1, 4, 8])
def test_a_sequence_whose_drafts_are_refused_drafts_less_and_then_hardly_ever(num_sequences: int) -> None:
    numbers = drafted(RULE, 200, num_sequences, stands=False)
    assert numbers[0] == max(numbers) > 0
    assert max(numbers[10:]) == 1
    assert 0 in numbers
    assert 1 in numbers[100:], "it tries again"
    if num_sequences > 1:
        assert sum(numbers[10:]) < 190 / num_sequences


def test_it_drafts_again_once_drafts_stand() -> None:
    record = DraftRecord()
    for _ in range(50):
        RULE.note(record, RULE.num_to_draft(record, 1), 0)
    for _ in range(40):
        number = RULE.num_to_draft(record, 1)
        RULE.note(record, number, number)
    assert RULE.num_to_draft(record, 1) == 4


def test_a_full_batch_drafts_nothing() -> None:
    rule = AdaptiveDrafts(4, disable_by_batch_size=8)
    assert [rule.num_to_draft(record_of(1), n) > 0 for n in (1, 7, 8, 9, 256)] == [True, True, False, False, False]
    assert RULE.num_to_draft(record_of(0.9), 256) == 0, "nor does a large one, where it does not pay"


def test_tokens_after_the_first_refused_one_are_not_counted() -> None:
    few, many = DraftRecord(), DraftRecord()
    RULE.note(few, 2, 1)
    RULE.note(many, 4, 1)
    assert few == many == DraftRecord(2, 1)
