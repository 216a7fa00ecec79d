"""The paper's workloads: lengths as in Fig. 11, arrivals at random, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from minipaged.paper.workloads import MAX_MODEL_LEN, arrivals, draw_lengths

MEANS = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}
"""Of prompts and outputs, as the paper prints them (section 6.1)."""


@pytest.mark.parametrize("dataset", MEANS)
def test_lengths_have_the_papers_means_and_fit_the_model(dataset: str) -> None:
    lengths = np.array(draw_lengths(dataset, 40_000, np.random.default_rng(0)))  # [requests, 2]
    assert lengths.mean(axis=0) == pytest.approx(MEANS[dataset], rel=0.02)
    assert lengths.min() >= 1
    assert lengths.sum(axis=1).max() < MAX_MODEL_LEN


@pytest.mark.parametrize("dataset", MEANS)
def test_requests_come_at_random_so_many_a_second(dataset: str) -> None:
    times = [one.seconds for one in arrivals(dataset, 5.0, 2000.0, seed=3)]
    assert len(times) == pytest.approx(10_000, rel=0.03)
    assert all(0 <= time < 2000 for time in times)
    assert times == sorted(times)
    gaps = np.diff(times)  # [requests - 1] seconds
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "of a Poisson process they are equal"


def test_the_same_seed_gives_the_same_requests_and_another_gives_others() -> None:
    assert arrivals("ShareGPT", 2.0, 100.0, seed=1) == arrivals("ShareGPT", 2.0, 100.0, seed=1)
    assert arrivals("ShareGPT", 2.0, 100.0, seed=1) != arrivals("ShareGPT", 2.0, 100.0, seed=2)


@pytest.mark.parametrize("dataset", [*MEANS, "WMT16"])
def test_a_longer_trace_begins_as_a_shorter_one(dataset: str) -> None:
    short, long = (arrivals(dataset, 3.0, seconds, seed=5) for seconds in (50.0, 3000.0))
    assert len(long) > len(short) > 100
    assert long[: len(short)] == short


def test_another_rate_has_the_same_requests_closer_together() -> None:
    slow, fast = arrivals("Alpaca", 1.0, 400.0, seed=5), arrivals("Alpaca", 4.0, 100.0, seed=5)
    shared = min(len(slow), len(fast))
    assert shared > 300
    for one, other in zip(slow[:shared], fast[:shared], strict=True):
        assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)
        assert one.seconds == pytest.approx(4 * other.seconds)
