"""What the paper printed, as it is read here: knees, units, histograms."""

from __future__ import annotations

import pytest

from minipaged.paper import published

KNEES = {
    "12a": (0.231, 0.525, 0.774, 1.099, 1.929),
    "12b": (0.100, 0.203, 0.269, 0.403, 0.939),
    "12c": (0.115, 0.918, 1.277, 1.622, 2.377),
    "12d": (2.53, 3.85, 16.1, 21.1, 28.1),
    "12e": (1.26, 1.25, 6.29, 10.5, 18.7),
    "12f": (0.87, 5.11, 17.1, 19.2, 20.2),
}
"""Requests a second at 0.5 s a token, read from the paper's figures by hand, once and apart from this code."""
SYSTEMS = ("FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM")


@pytest.mark.parametrize("panel", KNEES)
def test_the_knees_are_those_that_were_read_by_hand(panel: str) -> None:
    found = [published.knee(published.with_exit(panel, system)) for system in SYSTEMS]
    assert found == pytest.approx(KNEES[panel], rel=0.006)


def test_a_knee_lies_on_the_straight_line_between_two_points() -> None:
    assert published.knee([(1, 0.1), (2, 0.3), (4, 0.7), (5, 3.0)]) == pytest.approx(3.0)
    assert published.knee([(1, 0.1), (2, 0.3)]) is None
    assert published.knee([]) is None


@pytest.mark.parametrize("panel", published.panels())
def test_every_curve_is_in_order_of_rate_and_ends_no_lower_than_it_began(panel: str) -> None:
    for system, line in published.curves(panel).items():
        rates = [rate for rate, _ in line]
        assert rates == sorted(rates), system
        assert line[-1][1] >= line[0][1] > 0, system


@pytest.mark.parametrize(
    ("dataset", "side", "mean"),
    [
        ("ShareGPT", "input", 161.31),
        ("ShareGPT", "output", 337.99),
        ("Alpaca", "input", 19.31),
        ("Alpaca", "output", 58.45),
    ],
)
def test_histograms_have_the_means_that_the_paper_prints(dataset: str, side: str, mean: float) -> None:
    """Fig. 11: by the middle of each bin, which is a few tokens wide."""
    first, last, counts = published.histogram(dataset, side)
    width = (last - first) / len(counts)
    middle = sum(count * (first + (i + 0.5) * width) for i, count in enumerate(counts)) / sum(counts)
    assert abs(middle - mean) < width


def test_the_source_is_named() -> None:
    assert "arXiv 2309.06180" in published.source()
