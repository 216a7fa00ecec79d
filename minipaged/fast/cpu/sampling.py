"""The loops of sampling over whole rows of logits, compiled for a CPU, with one thread per row.

A row (49,152 logits for SmolLM2, 200 KB) fits the second-level cache, so several passes over it are cheap, as long as
each takes a few vector instructions for several tokens. Sorting the row would not be cheap. The two filters that seem
to need the tokens in order, `top_k` and `top_p`, need only one logit of that order: their threshold. A histogram finds
it. One pass puts each token into a drawer by its distance from the likeliest token, and adds up the drawer's content:
tokens for `top_k`, probability for `top_p`. The sums show which drawer has the threshold, and only that one is sorted.
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
"""LLVM's fast-math flags: sums may be added in any order, and so in vectors; NaN and infinity are preserved."""

TAYLOR = tuple(1 / math.factorial(power) for power in range(13, -1, -1))
"""1/13!, 1/12!, ... 1/0!: the terms of exp that 53 bits need for arguments within ln(2)/2 of 0."""
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln(2) in two parts. The first has few enough bits that its products with integers below 2**20 are exact."""
LOWEST = -708.0
"""Lower arguments are raised to it. exp is near the least float64 there, negligible beside the likeliest token's 1."""

SINGLE = np.float32
TAYLOR_SINGLE = tuple(SINGLE(1 / math.factorial(power)) for power in range(7, -1, -1))
LN2_HIGH_SINGLE, LN2_LOW_SINGLE = SINGLE(0.693359375), SINGLE(-2.12194440e-4)
LOWEST_SINGLE = SINGLE(-87.0)
"""The corresponding constants for float32, which has 24 bits."""

ZERO, HALF, WORD = np.uint64(0), np.uint64(32), np.uint64(2**32 - 1)
PHILOX_LEFT, PHILOX_RIGHT = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
"""Philox4x32 (Salmon et al., SC 2011): its multipliers, and the constants added to the key after each round."""

DRAWER_SHIFT = 52 - 7
"""The shift from a distance's bits to its drawer's number: the exponent and the first 7 bits of the fraction. An octave
has 128 drawers, so that most distances spread over many drawers whatever the temperature."""
NEAREST = (1023 - 10) << 7
"""The number of the drawer for a distance of 2**-10. Smaller distances go there too."""
DRAWERS = 26 << 7
"""The number of drawers, from a distance of 2**-10 to 2**16. Larger distances go into the last."""


CHUNK = 256
"""The number of logits among which `largest` looks at once for one that is large enough."""
MOST_INSERTED = 32
"""The largest `count` for which `largest` inserts one number after another: 20 of 49,152 random logits in 16 rows take
0.2 ms, and 18 ms if they rise from the first to the last. torch takes 8 to 9 ms."""


def argmax_logsumexp(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `minipaged.fast.kernels`."""
    table, bits, magnitude = _with_bits(logits)
    token_ids = np.empty(len(table), dtype=np.int64)
    peaks, log_totals = np.empty(len(table)), np.empty(len(table))
    _argmax_logsumexp(table, bits, magnitude, token_ids, peaks, log_totals)
    return torch.from_numpy(token_ids), torch.from_numpy(peaks), torch.from_numpy(log_totals)


def _with_bits(logits: Tensor) -> tuple[NDArray[Any], NDArray[Any], Any]:
    """Return logits as an array, the same as integers, and the integer that has all bits but the sign's."""
    table: NDArray[Any] = logits.contiguous().numpy()
    kind = np.int32 if logits.dtype == torch.float32 else np.int64
    return table, table.view(kind), kind(np.iinfo(kind).max)


def likeliest_allowed(logits: Tensor, rows: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `minipaged.fast.kernels`."""
    table, bits, magnitude = _with_bits(logits)
    token_ids = np.empty(len(rows), dtype=np.int64)
    found, peaks, log_totals = np.empty((3, len(rows)))
    given = (rows.numpy(), allowed.numpy())
    _likeliest_allowed(table, bits, magnitude, *given, token_ids, found, peaks, log_totals)
    return torch.from_numpy(token_ids), torch.from_numpy(found), torch.from_numpy(peaks), torch.from_numpy(log_totals)


def allowed_only(table: Tensor, allowed: Tensor) -> None:
    """See `minipaged.fast.kernels`."""
    _allowed_only(table.numpy(), allowed.numpy())


def largest(values: Tensor, count: int) -> Tensor:
    """See `minipaged.fast.kernels`."""
    if count > MOST_INSERTED:
        return largest_by_library(values, count)
    found = np.empty((len(values), count), np.int64)
    _largest(values.contiguous().numpy(), found)
    return torch.from_numpy(found)


def largest_by_library(values: Tensor, count: int) -> Tensor:
    """What `largest` returns, on any device. `topk` guarantees no order among equal values, so it is called twice:
    first for the last value that qualifies, then on ranks without ties."""
    n = values.shape[1]
    last = values.topk(count).values[:, -1:]  # [rows, 1]
    backwards = torch.arange(n, 0, -1, device=values.device)  # [n], the first index has the highest number
    rank = (values >= last) * backwards + (values > last) * n  # [rows, n]
    chosen = rank.topk(count).indices  # [rows, count]: those above the last by index, then its equals by index
    order = values.gather(1, chosen).sort(dim=1, descending=True, stable=True).indices  # [rows, count]
    return chosen.gather(1, order)


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
    allowed: Tensor | None = None,
) -> Tensor:
    """See `minipaged.fast.kernels`. `depth` is ignored: thresholds are found without sorting the row."""
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
        np.zeros((len(rows), 0), np.int32) if allowed is None else allowed.numpy(),
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
    """Return exp(x) for x <= 0, to about the last bit: 2**n * exp(r). A call into the C library does not vectorise."""
    x = max(x, LOWEST)
    n = math.floor(x * LOG2_E + 0.5)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    power = 0.0
    for coefficient in TAYLOR:
        power = power * r + coefficient
    return power * np.int64((np.int64(n) + 1023) << 52).view(np.float64)


@inner(fastmath={"contract"}, error_model="numpy")
def _exp_single(x):
    """Return exp(x) for a float32 x <= 0. A vector has twice the numbers that it has in `_exp`, with fewer terms."""
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


@kernel(parallel=True, fastmath=REORDERED, error_model="numpy")
def _likeliest_allowed(logits, bits, magnitude, rows, allowed, token_ids, found, peaks, log_totals):
    """The row's likeliest token is often allowed. Only where it is not, the row is copied and searched once more."""
    for i in prange(len(rows)):
        row = logits[rows[i]]
        token = _argmax(row, bits[rows[i]], magnitude)
        peak = row[token]
        peaks[i] = found[i] = peak
        total = _total_single(row, peak) if bits.itemsize == 4 else _total(row, peak)
        log_totals[i] = math.log(total)
        if not np.isnan(peak) and not (allowed[i, token >> 5] >> (token & 31)) & 1:
            left = row.copy()
            _forbid(left, allowed[i])
            token = _argmax(left, left.view(bits.dtype), magnitude)
            found[i] = left[token]
        token_ids[i] = token


@kernel(parallel=True)
def _allowed_only(table, allowed):
    for row in prange(len(table)):
        _forbid(table[row], allowed[row])


@inner()
def _forbid(row, words):
    """Set the logits whose bit is 0 to minus infinity. A loop over the bits of one word has vector instructions."""
    for word in range(len(row) >> 5):
        bits, begin = words[word], word << 5
        for bit in range(32):
            row[begin + bit] = row[begin + bit] if (bits >> bit) & 1 else -np.inf
    for token in range(len(row) & ~31, len(row)):
        row[token] = row[token] if (words[token >> 5] >> (token & 31)) & 1 else -np.inf


@kernel(parallel=True)
def _largest(values, found):
    for row in prange(len(values)):
        _insert_largest(values[row], found[row])


@inner()
def _insert_largest(row, found):
    """Write the indices of the largest numbers to `found`, which is kept in order. Most chunks hold none of them, which
    a loop over the chunk finds out with vector instructions."""
    count, held = len(found), 0
    for begin in range(0, len(row), CHUNK):
        chunk = row[begin : begin + CHUNK]
        if held == count:
            has_more, least = False, row[found[count - 1]]
            for i in range(len(chunk)):
                has_more |= chunk[i] > least
            if not has_more:
                continue
        for i in range(len(chunk)):
            if held == count and not chunk[i] > row[found[count - 1]]:
                continue
            place = min(held, count - 1)
            while place and chunk[i] > row[found[place - 1]]:
                found[place] = found[place - 1]
                place -= 1
            found[place] = begin + i
            held = min(held + 1, count)


@inner()
def _argmax(row, bits, magnitude):
    """Return the first index of the largest number, or of the first NaN. Loops without a branch are faster than one
    with branches.

    Floats are compared as integers of the same order (if the sign bit is set, the other bits are inverted), because
    integers have vector instructions for the maximum, which NaN does not disturb.
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
    peak = row[first]  # 0 and -0 are equal as floats but not as integers: search once more, with floats
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
    """Exponentials in float32, which is as precise as the softmax of float32 logits can be; summed in float64."""
    total = 0.0
    for token in range(len(row)):
        total += np.float64(_exp_single(SINGLE(row[token] - peak)))
    return total


@kernel(parallel=True, error_model="numpy")
def _draw(logits, rows, peaks, temperatures, min_logprobs, top_ks, shares, distributions, uniforms, allowed, token_ids):
    for i in prange(len(rows)):
        begin, end = _first_beyond(distributions, i - 1), _first_beyond(distributions, i)
        kept, cumulative = _distribution(
            logits[rows[i]], peaks[i], temperatures[i], min_logprobs[i], top_ks[i], shares[i], allowed[i]
        )
        for j in range(begin, end):
            fell_on = _first_beyond(cumulative, uniforms[j] * cumulative[-1])
            token_ids[j] = kept[min(fell_on, len(kept) - 1)]


@inner(error_model="numpy")
def _first_beyond(rising, x):
    """Return the number of values in `rising`, which is sorted, that are at most x."""
    first, last = 0, len(rising)
    while first < last:
        middle = (first + last) // 2
        if rising[middle] <= x:
            first = middle + 1
        else:
            last = middle
    return first


@inner(error_model="numpy")
def _distribution(row, peak, temperature, threshold, top_k, share, words):
    """Return the tokens that the filters keep, by rising id, and the cumulative sum of their weights. `words`: the bits
    of the tokens that a grammar allows; none if it allows all."""
    scaled = np.empty(len(row))  # [vocab], 0 for the likeliest token
    token_ids = np.empty(len(row), np.int64)
    if len(words):
        kept = _scale_allowed(row, peak, temperature, words, scaled, token_ids)
    else:
        kept = len(row)
        for token in range(len(row)):
            scaled[token] = (row[token] - peak) / temperature
            token_ids[token] = token
    if 0 < top_k < kept:
        threshold = max(threshold, _largest_but(top_k, scaled[:kept]))
    if threshold > -np.inf:
        kept = _keep(scaled, token_ids, kept, threshold)
    if share > 0:
        kept = _keep(scaled, token_ids, kept, _lightest_kept(scaled[:kept], share))
    kept = max(kept, 1)  # a row of NaN keeps nothing: it is refused later, and must not be read past its end here
    weights = _exps(scaled[:kept])
    cumulative = 0.0
    for i in range(kept):  # sequentially, by token id, as the interface defines: draws are compared with this sum
        cumulative += weights[i]
        weights[i] = cumulative
    return token_ids[:kept], weights


@inner(error_model="numpy")
def _scale_allowed(row, peak, temperature, words, scaled, token_ids):
    """Write the allowed tokens and their scaled logits to the front, and return their number. A word whose tokens are
    all forbidden is skipped. With none left, the first place holds a token that is refused later."""
    scaled[0], token_ids[0], kept = 0.0, 0, 0
    for word in range(len(words)):
        bits = words[word]
        if bits == 0:
            continue
        for token in range(word << 5, min((word + 1) << 5, len(row))):
            if (bits >> (token & 31)) & 1:
                scaled[kept] = (row[token] - peak) / temperature
                token_ids[kept] = token
                kept += 1
    return kept


@inner(error_model="numpy")
def _exps(scaled):
    """Return exp of each number [n], in a separate loop: one that also sums in order would not vectorise."""
    weights = np.empty(len(scaled))
    for i in range(len(scaled)):
        weights[i] = _exp(scaled[i])
    return weights


@inner(error_model="numpy")
def _keep(scaled, token_ids, count, threshold):
    """Move the tokens at or above the threshold to the front, in order. Return their number."""
    kept = 0
    for i in range(count):
        if scaled[i] >= threshold:
            scaled[kept] = scaled[i]
            token_ids[kept] = token_ids[i]
            kept += 1
    return kept


@inner(inline="always", error_model="numpy")
def _drawer(scaled):
    """Return the number of a scaled logit's drawer. Lower logits have higher numbers."""
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
    """Return the lowest logit that `top_p` keeps: the tokens up to it, from the least likely, exceed `share`."""
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
            return rising[-1]  # the drawer's sum is a bit lower in this order
        below += masses[drawer]
    return 0.0  # a share of 1: the likeliest token stays


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
    """Sort in rising order, in place, by heapsort: `np.sort` takes 1.5 s to compile."""
    for i in range(len(values) // 2 - 1, -1, -1):
        _sink(values, i, len(values))
    for end in range(len(values) - 1, 0, -1):
        values[0], values[end] = values[end], values[0]
        _sink(values, 0, end)


@inner(error_model="numpy")
def _sink(heap, i, size):
    """Move heap[i] down until it is at least as large as its children. Those of place j are at 2 j + 1 and 2 j + 2."""
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
