"""The loops of sampling over whole rows of logits, compiled for a CPU: one thread per row.

A row (49,152 logits for SmolLM2, 200 KB) fits the second-level cache, so several passes over it are cheap if each takes
a few vector instructions for several tokens. Sorting a row would be too slow. The two filters that seem to need the
tokens in order, `top_k` and `top_p`, need only one logit of that order: their threshold. It is found with a histogram,
whose bins are called drawers. One pass puts each token into a drawer by its distance from the likeliest token, and sums
up each drawer: the number of tokens for `top_k`, the probability for `top_p`. The sums show which drawer holds the
threshold, and only that drawer is sorted.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from minipaged.fast.cpu.kernel_cache import inner, kernel

REORDERED = {"reassoc", "contract", "nsz"}
"""Options with which the terms of a sum may be added in any order, and so in vectors. NaN and infinity are
preserved."""

TAYLOR = tuple(1 / math.factorial(power) for power in range(13, -1, -1))
"""1/13!, 1/12!, ... 1/0!: the terms of exp that 53 bits need for arguments within ln(2)/2 of 0."""
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln(2) in two parts. The first has so few bits that its products with an integer below 2**20 are exact."""
LOWEST = -708.0
"""The smallest argument of exp, whose result is near the least float64: negligible next to the likeliest token's 1."""

SINGLE = np.float32
TAYLOR_SINGLE = tuple(SINGLE(1 / math.factorial(power)) for power in range(7, -1, -1))
LN2_HIGH_SINGLE, LN2_LOW_SINGLE = SINGLE(0.693359375), SINGLE(-2.12194440e-4)
LOWEST_SINGLE = SINGLE(-87.0)
"""The constants of `_exp_single`: those of `_exp`, for the 24 bits of a float32."""

ZERO, HALF, WORD = np.uint64(0), np.uint64(32), np.uint64(2**32 - 1)
PHILOX_LEFT, PHILOX_RIGHT = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
"""Philox4x32 (Salmon et al., SC 2011): its multipliers, and the numbers added to the key after each round."""

DRAWER_SHIFT = 52 - 7
"""The number of low bits to drop from a distance, so that the rest names its drawer: the exponent and the first 7 bits
of the fraction, 128 drawers per octave. At any temperature, most distances are then spread over many drawers."""
NEAREST = (1023 - 10) << 7
"""The name of the drawer for 2**-10. Tokens nearer to the likeliest go into it too."""
DRAWERS = 26 << 7
"""The number of drawers, which reach up to 2**16. Tokens farther away go into the last one."""


def argmax_logsumexp(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `minipaged.fast.kernels`."""
    table: NDArray[Any] = logits.contiguous().numpy()
    kind = np.int32 if logits.dtype == torch.float32 else np.int64
    bits, magnitude = table.view(kind), kind(np.iinfo(kind).max)
    token_ids = np.empty(len(table), dtype=np.int64)
    peaks, log_totals = np.empty(len(table)), np.empty(len(table))
    _argmax_logsumexp(table, bits, magnitude, token_ids, peaks, log_totals)
    return torch.from_numpy(token_ids), torch.from_numpy(peaks), torch.from_numpy(log_totals)


def draw(
    logits: Tensor,
    rows: Tensor,
    peaks: Tensor,
    temperatures: Tensor,
    min_logprobs: Tensor,
    top_ks: Tensor,
    shares: Tensor,
    distributions: Tensor,
    uniforms: Tensor,
    *,
    depth: int,
) -> Tensor:
    """See `minipaged.fast.kernels`. The thresholds are found without sorting, so `depth` is not used."""
    token_ids = np.empty(len(uniforms), dtype=np.int64)
    _draw(
        logits.contiguous().numpy(),
        rows.numpy(),
        peaks.numpy(),
        temperatures.numpy(),
        min_logprobs.numpy(),
        top_ks.numpy(),
        shares.numpy(),
        distributions.numpy(),
        uniforms.numpy(),
        token_ids,
    )
    return torch.from_numpy(token_ids)


def uniform(
    seeds: NDArray[np.uint64], streams: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, stream, position): 53 bits of Philox4x32-10."""
    numbers = np.empty(len(seeds))
    _uniform(seeds, streams, positions, numbers)
    return numbers


# --- Compiled ---------------------------------------------------------------------------------------


@kernel()
def _uniform(seeds, streams, positions, numbers):
    for i in range(len(seeds)):
        k0, k1 = seeds[i] & WORD, seeds[i] >> HALF
        c0, c1, c2, c3 = positions[i], streams[i], ZERO, ZERO
        for _ in range(10):
            left, right = c0 * PHILOX_LEFT, c2 * PHILOX_RIGHT  # 64 bits each: high word, low word
            c0, c1, c2, c3 = (right >> HALF) ^ c1 ^ k0, right & WORD, (left >> HALF) ^ c3 ^ k1, left & WORD
            k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
        # 27 bits of the first word, 26 of the second
        numbers[i] = (np.float64(c0 >> np.uint64(5)) * 2**26 + np.float64(c1 >> np.uint64(6))) / 2**53


@inner(fastmath={"contract"}, error_model="numpy")
def _exp(x):
    """Return exp(x) for x <= 0, accurate to about the last bit: 2**n * exp(r). A C library call would not vectorize."""
    x = max(x, LOWEST)
    n = math.floor(x * LOG2_E + 0.5)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    power = 0.0
    for coefficient in TAYLOR:
        power = power * r + coefficient
    return power * np.int64((np.int64(n) + 1023) << 52).view(np.float64)


@inner(fastmath={"contract"}, error_model="numpy")
def _exp_single(x):
    """Return exp(x) for a float32 x <= 0: twice as many lanes per vector as `_exp`, and fewer terms."""
    x = max(x, LOWEST_SINGLE)
    n = np.floor(x * SINGLE(LOG2_E) + SINGLE(0.5))
    r = (x - n * LN2_HIGH_SINGLE) - n * LN2_LOW_SINGLE
    power = SINGLE(0)
    for coefficient in TAYLOR_SINGLE:
        power = power * r + coefficient
    return power * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@kernel(parallel=True, fastmath=REORDERED, error_model="numpy")
def _argmax_logsumexp(logits, bits, magnitude, token_ids, peaks, log_totals):
    for row in prange(len(logits)):
        token_ids[row] = _argmax(logits[row], bits[row], magnitude)
        peak = logits[row, token_ids[row]]
        peaks[row] = peak
        total = _total_single(logits[row], peak) if bits.itemsize == 4 else _total(logits[row], peak)
        log_totals[row] = math.log(total)


@inner()
def _argmax(row, bits, magnitude):
    """Return the index of the first maximum, or of the first NaN. Loops without branches are faster.

    Floats are compared as integers of the same order (if the sign bit is set, the other bits are flipped), because
    integer maxima vectorize without any rule for NaN.
    """
    shift = 8 * bits.itemsize - 1
    peak_bits = ~magnitude
    for token in range(len(bits)):
        key = bits[token] ^ ((bits[token] >> shift) & magnitude)
        peak_bits = max(peak_bits, key)
    has_nan = False
    for token in range(len(row)):
        has_nan |= row[token] != row[token]
    first = len(row)
    if has_nan:
        for token in range(len(row)):
            first = min(first, token if row[token] != row[token] else len(row))
        return first
    for token in range(len(row)):
        key = bits[token] ^ ((bits[token] >> shift) & magnitude)
        first = min(first, token if key == peak_bits else len(row))
    peak = row[first]  # 0 and -0 are equal as floats only, so search again with the floats
    for token in range(len(row)):
        first = min(first, token if row[token] == peak else len(row))
    return first


@inner(fastmath=REORDERED, error_model="numpy")
def _total(row, peak):
    total = 0.0
    for token in range(len(row)):
        total += _exp(row[token] - peak)
    return total


@inner(fastmath=REORDERED, error_model="numpy")
def _total_single(row, peak):
    """Sum in float64 the exponentials in float32, since float32 logits allow no more digits."""
    total = 0.0
    for token in range(len(row)):
        total += np.float64(_exp_single(SINGLE(row[token] - peak)))
    return total


@kernel(parallel=True, error_model="numpy")
def _draw(logits, rows, peaks, temperatures, min_logprobs, top_ks, shares, distributions, uniforms, token_ids):
    for i in prange(len(rows)):
        begin, end = _first_beyond(distributions, i - 1), _first_beyond(distributions, i)
        kept, cumulative = _distribution(
            logits[rows[i]], peaks[i], temperatures[i], min_logprobs[i], top_ks[i], shares[i]
        )
        for j in range(begin, end):
            fell_on = _first_beyond(cumulative, uniforms[j] * cumulative[-1])
            token_ids[j] = kept[min(fell_on, len(kept) - 1)]


@inner(error_model="numpy")
def _first_beyond(rising, x):
    """Return the number of values that are x or less, among values in rising order."""
    first, last = 0, len(rising)
    while first < last:
        middle = (first + last) // 2
        if rising[middle] <= x:
            first = middle + 1
        else:
            last = middle
    return first


@inner(error_model="numpy")
def _distribution(row, peak, temperature, threshold, top_k, share):
    """Return the tokens that the filters keep, by rising id, and the cumulative sum of their weights."""
    scaled = np.empty(len(row))  # [vocab], 0 for the likeliest
    token_ids = np.empty(len(row), np.int64)
    for token in range(len(row)):
        scaled[token] = (row[token] - peak) / temperature
        token_ids[token] = token
    if 0 < top_k < len(row):
        threshold = max(threshold, _largest_but(top_k, scaled))
    kept = len(row)
    if threshold > -np.inf:
        kept = _keep(scaled, token_ids, kept, threshold)
    if share > 0:
        kept = _keep(scaled, token_ids, kept, _lightest_kept(scaled[:kept], share))
    kept = max(kept, 1)  # a row of NaN keeps no token; it is rejected later, but must not be read past its end here
    weights = _exps(scaled[:kept])
    cumulative = 0.0
    for i in range(kept):  # sequentially in order of token id, since draws are compared with exactly this sum
        cumulative += weights[i]
        weights[i] = cumulative
    return token_ids[:kept], weights


@inner(error_model="numpy")
def _exps(scaled):
    """Return exp of [n] values. A separate loop, because one that also sums in order cannot be vectorized."""
    weights = np.empty(len(scaled))
    for i in range(len(scaled)):
        weights[i] = _exp(scaled[i])
    return weights


@inner(error_model="numpy")
def _keep(scaled, token_ids, count, threshold):
    """Move the tokens at or above the threshold to the front, in order, and return their number."""
    kept = 0
    for i in range(count):
        if scaled[i] >= threshold:
            scaled[kept] = scaled[i]
            token_ids[kept] = token_ids[i]
            kept += 1
    return kept


@inner(inline="always", error_model="numpy")
def _drawer(scaled):
    """Return the drawer of a scaled logit: the lower the logit, the higher the number."""
    distance_bits = np.float64(0.0 - scaled).view(np.int64)
    return min(max((distance_bits >> DRAWER_SHIFT) - NEAREST, 0), DRAWERS - 1)


@inner(error_model="numpy")
def _largest_but(top_k, scaled):
    """Return the `top_k`-th largest of `scaled` [vocab]."""
    tokens = np.zeros(DRAWERS, np.int64)
    for token in range(len(scaled)):
        tokens[_drawer(scaled[token])] += 1
    drawer = 0
    while tokens[drawer] < top_k:
        top_k -= tokens[drawer]
        drawer += 1
    return _sorted_drawer(scaled, drawer)[-top_k]


@inner(error_model="numpy")
def _lightest_kept(scaled, share):
    """Return the smallest logit such that the tokens with at most this logit have more than `share` of the
    probability."""
    weights = _exps(scaled)
    masses = np.zeros(DRAWERS)
    for i in range(len(scaled)):
        masses[_drawer(scaled[i])] += weights[i]
    total = 0.0
    for drawer in range(DRAWERS - 1, -1, -1):
        total += masses[drawer]
    may_go = share * total
    below = 0.0
    for drawer in range(DRAWERS - 1, -1, -1):
        if below + masses[drawer] > may_go:
            rising = _sorted_drawer(scaled, drawer)
            for logit in rising:
                below += _exp(logit)
                if below > may_go:
                    return logit
            return rising[-1]  # in another order of summation, the drawer's sum is slightly smaller
        below += masses[drawer]
    return 0.0  # the share is everything: the likeliest token stays


@inner(error_model="numpy")
def _sorted_drawer(scaled, drawer):
    """Return the logits in one drawer, in rising order."""
    inside = np.empty(len(scaled))
    count = 0
    for logit in scaled:
        if _drawer(logit) == drawer:
            inside[count] = logit
            count += 1
    _sort(inside[:count])
    return inside[:count]


@inner(error_model="numpy")
def _sort(values):
    """Heapsort in rising order, in place: `np.sort` takes 1.5 s to compile."""
    for i in range(len(values) // 2 - 1, -1, -1):
        _sink(values, i, len(values))
    for end in range(len(values) - 1, 0, -1):
        values[0], values[end] = values[end], values[0]
        _sink(values, 0, end)


@inner(error_model="numpy")
def _sink(heap, i, size):
    """Sift heap[i] down below its larger children, which are at 2 i + 1 and 2 i + 2."""
    x = heap[i]
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= x:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = x
