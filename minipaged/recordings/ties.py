"""When may two tokens differ? Only at a tie, and each difference must be proved to be one.

Two correct computations of the same logits differ by rounding: sums are taken in another order when a sequence runs
in another batch, in other chunks or over other blocks. If each logit is off by at most e, then one computation can
prefer token a and the other token b only if the exact logits of both lie within 2e of the best. Here e is the largest
distance between one of the computations and the exact logits (in float64). An e that is larger than rounding can
explain is itself an error, so that a wrong computation cannot excuse its own differences.

A token is drawn by a number u: it is the token at which the running sum of the probabilities passes u. Then a tie is
between neighbours: rounding moves each sum by at most d, and both tokens must lie within d of u.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from minipaged import tiers
from minipaged.contracts import SamplingInput

ROUNDING = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}
"""The largest error of a Llama's logits, as a fraction of the largest logit, for each type that it computes in."""

Logits = npt.NDArray[np.floating]


def why_no_tie(
    exact: Logits, computed: Logits, wanted: SamplingInput, a: int, b: int, dtype: str = "float32"
) -> str | None:
    """Say why rounding alone cannot make one computation choose token `a` and another token `b`; None if it can.

    `exact` and `computed` are logits [vocab]: in float64, and of one of the computations, made in `dtype`.
    """
    error = float(np.abs(computed - exact).max())
    allowed = ROUNDING[dtype] * float(np.abs(exact).max())
    if not error <= allowed:
        return f"the logits are off by {error:.3g}, more than rounding, which explains {allowed:.3g}"
    return (
        _no_draw(exact, computed, wanted, (a, b), error)
        if wanted.params.temperature
        else _no_maximum(exact, wanted, (a, b), error)
    )


def _no_maximum(exact: Logits, wanted: SamplingInput, tokens: tuple[int, int], error: float) -> str | None:
    """Say why not, if both choices were greedy. Penalties scale a logit's error as they scale the logit."""
    penalised = tiers.reference_penalties(exact, wanted)
    error *= max(wanted.params.repetition_penalty, 1 / wanted.params.repetition_penalty)
    gap = float(penalised.max() - min(penalised[token] for token in tokens))
    if gap <= 2 * error:
        return None
    return f"tokens {tokens[0]} and {tokens[1]} differ by {gap:.3g} from the best, and rounding is {error:.3g}"


def _no_draw(
    exact: Logits, computed: Logits, wanted: SamplingInput, tokens: tuple[int, int], error: float
) -> str | None:
    u, sums = tiers.reference_draw(exact, wanted)
    _, other = tiers.reference_draw(computed, wanted)
    # If a logit is off by e, its weight is off by a factor of exp(e / temperature), and so is the sum of all weights.
    moved = math.expm1(min(700.0, 2 * error / wanted.params.temperature)) + float(np.abs(other - sums).max())
    for token in tokens:
        low, high = (sums[token - 1] if token else 0.0), sums[token]
        if not low - moved <= u < high + moved:
            return f"{u:.6f} falls {low - u:.3g} before and {u - high:.3g} after token {token}, rounding is {moved:.3g}"
    return None
