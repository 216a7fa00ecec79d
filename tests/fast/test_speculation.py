"""The fast tier's `verify` in large batches: outputs of many steps have the model's joint distribution."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from minipaged.contracts import Draft, SamplingInput
from minipaged.fast.sampling import sample
from minipaged.fast.speculation import verify
from tests.effort import thorough
from tests.reference.test_speculation import (
    LENGTH,
    MODEL,
    PARAMS,
    PROMPT,
    VOCAB,
    by_rounds,
    input_after,
    joint_distribution,
    p_value,
)
from tests.reference.test_speculation import verify as verify_in_reference

MOST_DRAFTED = 2
BEGINNINGS = [tokens for n in range(LENGTH + MOST_DRAFTED) for tokens in product(range(VOCAB), repeat=n)]
ROW = {tokens: row for row, tokens in enumerate(BEGINNINGS)}
LOGITS = torch.from_numpy(np.stack([MODEL.logits((*PROMPT, *tokens)) for tokens in BEGINNINGS]))  # [beginnings, vocab]
DRAFT_LOGITS = torch.from_numpy(np.stack([MODEL.draft_logits((*PROMPT, *tokens)) for tokens in BEGINNINGS]))


def wanted_after(tokens: tuple[int, ...], seed: int) -> SamplingInput:
    return input_after(tokens, PARAMS, seed, ROW[tokens])


def outputs_of(seeds: range) -> list[tuple[int, ...]]:
    """The first LENGTH tokens of each seed, with two tokens drafted for each in every step, all in one batch."""
    outputs: list[tuple[int, ...]] = [() for _ in seeds]
    while unfinished := [i for i, output in enumerate(outputs) if len(output) < LENGTH]:
        guesses = [outputs[i] for i in unfinished]
        for _ in range(MOST_DRAFTED):
            inputs = [wanted_after(tokens, seeds[i]) for i, tokens in zip(unfinished, guesses, strict=True)]
            guesses = [(*to, one.token_id) for to, one in zip(guesses, sample(DRAFT_LOGITS, inputs), strict=True)]
        drafts, drafted_from = list[Draft](), list[int]()
        for i, guess in zip(unfinished, guesses, strict=True):
            begin = len(outputs[i])
            befores = [guess[:stop] for stop in range(begin, len(guess) + 1)]
            drafts.append(Draft(guess[begin:], [wanted_after(before, seeds[i]) for before in befores]))
            drafted_from += [ROW[before] for before in befores[:-1]]
        for i, chosen in zip(unfinished, verify(LOGITS, drafts, DRAFT_LOGITS[drafted_from]), strict=True):
            outputs[i] += tuple(one.token_id for one in chosen)
    return [output[:LENGTH] for output in outputs]


@pytest.mark.parametrize("num_outputs", [8_000, pytest.param(200_000, marks=thorough)])
def test_outputs_drafted_by_a_model_have_the_targets_joint_distribution(num_outputs: int) -> None:
    counts = Counter(outputs_of(range(num_outputs)))
    found = [counts[tokens] for tokens in product(range(VOCAB), repeat=LENGTH)]
    assert p_value(found, joint_distribution()) > 0.001


def test_outputs_are_the_references() -> None:
    seeds = range(100)
    assert outputs_of(seeds) == [tuple(by_rounds(verify_in_reference, seed, lambda position: 2)) for seed in seeds]
