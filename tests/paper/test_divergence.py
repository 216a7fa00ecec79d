"""How beams diverge: as was heard, and by a model that was fitted to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import pytest

from minipaged.events import SequenceForked, StepFinished, TokenGenerated
from minipaged.paper import divergence
from minipaged.paper.divergence import (
    DIVERGENCE,
    GAP,
    PROMPTS,
    STEPS,
    WIDTHS,
    Listener,
    ModelledBeams,
    Run,
    measured_runs,
)
from minipaged.params import BeamSearchParams

NOTHING = np.zeros((0, 0))
"""Logits that nobody looks at."""


def search(of: str, width: int, prompt: int, output: int) -> Run:
    """The parents of its survivors, after those of the prompt."""
    beams = DIVERGENCE[of](BeamSearchParams(beam_width=width, max_tokens=output), prompt, prompt + output, [])
    first = beams.step(NOTHING, [0], [0.0])
    assert [move.parent for move in first.survivors] == [0] * width
    run = []
    for _ in range(output - 2):
        run.append([move.parent for move in beams.step(NOTHING, range(width), [0.0] * width).survivors])
    last = beams.step(NOTHING, range(width), [0.0] * width)
    assert not last.survivors
    assert len(last.finished) == width
    return run


def shared(run: Run) -> float:
    """Of the tokens that the beams of a run generate, the part that is in another beam too: 1 - distinct / all."""
    beams: list[list[tuple[int, int]]] = [[] for _ in run[0]]  # of each, its tokens: (step, survivor)
    distinct = total = 0
    for at, parents in enumerate(run):
        beams = [[*beams[parent], (at, i)] for i, parent in enumerate(parents)]
        distinct += len({token for beam in beams for token in beam})
        total += len(beams) * (at + 1)
    return 1 - distinct / total


def model(width: int, runs: int = 100) -> list[Run]:
    found = []
    for seed in range(runs):
        beams = ModelledBeams(BeamSearchParams(beam_width=width, max_tokens=STEPS), 0, STEPS, [])
        beams.begin(random.Random(seed))
        found.append([beams.parents() for _ in range(STEPS - 1)])
    return found


def mean_shared(runs: Sequence[Run]) -> float:
    return fmean(map(shared, runs))


def test_of_each_width_twelve_runs_were_heard() -> None:
    for width in WIDTHS:
        runs = measured_runs(width)
        assert len(runs) == len(PROMPTS) == 12
        for run in runs:
            assert len(run) == STEPS - 2
            assert all(len(parents) == width and set(parents) <= set(range(width)) for parents in run)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_search_goes_through_a_measured_run_and_around(width: int) -> None:
    heard = measured_runs(width)
    found = search("measured", width, 20, 120)
    assert any(
        found == [run[(start + i) % len(run)] for i in range(len(found))] for run in heard for start in range(len(run))
    )


@pytest.mark.parametrize("of", DIVERGENCE)
def test_lengths_decide_which_run_it_is(of: str) -> None:
    assert search(of, 4, 20, 40) == search(of, 4, 20, 40)
    assert len({str(search(of, 4, prompt, 40)) for prompt in range(20, 30)}) > 5


def test_the_model_shares_as_much_as_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each width; and another GAP does not."""
    measured = {width: mean_shared(measured_runs(width)) for width in WIDTHS}

    def off(gap: float) -> float:
        monkeypatch.setattr(divergence, "GAP", gap)
        return sum(abs(mean_shared(model(width)) - measured[width]) for width in WIDTHS)

    assert off(GAP) < min(off(GAP - 1), off(GAP + 1), 0.04)


def test_of_two_beams_the_model_does_what_a_beam_search_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no gap between a beam's tokens the better of two has both survivors; with a wide one each has its own."""
    monkeypatch.setattr(divergence, "GAP", 1e-9)
    assert all(parents[0] == parents[1] for run in model(2, 5) for parents in run)
    monkeypatch.setattr(divergence, "GAP", 1e9)
    assert all(parents[0] != parents[1] for run in model(2, 5) for parents in run)


def test_a_listener_hears_which_beam_each_survivor_stems_from() -> None:
    """Beams 1 and 2; then 2 goes on before its own child, 3; then 3 before a child of 2, 4, whose parent ends."""
    listener = Listener()
    steps = ([], [1, 2]), ([(2, 3)], [2, 3]), ([(2, 4)], [3, 4])
    for forks, survivors in steps:
        for parent, child in forks:
            listener(SequenceForked("request", parent, child))
        for sequence in survivors:
            listener(TokenGenerated("request", sequence, 0, 0.0))
        listener(StepFinished(0, 2, 2, 0.0))
    assert listener.run == [[1, 1], [1, 0]]
