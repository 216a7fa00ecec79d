"""Choosing the next token from a row of logits: greedily, or by drawing from a distribution.

Sequences of one request that are sampled in parallel (paper, section 4.4 and Fig. 8) differ only in what is drawn here.
Everything before their first difference is held in the same blocks. For each token, in vLLM's order:

1. the logits of forbidden tokens become minus infinity: all that a grammar does not allow, all but `allowed_token_ids`,
   those that complete a bad word, those that would end the sequence before `min_tokens`. Then `logit_bias` is added;
2. penalties: repetition (tokens of prompt and output), then frequency and presence (tokens of the output);
3. temperature 0: the token with the largest logit, the lowest id on ties. Done;
4. otherwise divide by the temperature and keep the tokens at or above a threshold: `min_p`, then `top_k`, then `top_p`,
   which counts the probabilities renormalised over the tokens that the other two kept;
5. draw one uniform number and look up which token it falls on in the cumulative sum, in order of token id.

A filter is a threshold on the logit, so tokens that tie with the last one kept are kept as well (`top_k=2` of the
logits 3, 1, 1, 0 keeps three tokens): the result never depends on the order of a sort.

**The same seed gives the same tokens**, however the scheduler batched, preempted or swapped the request. The uniform
number is not drawn from a state that every draw advances; it is a function of (seed, stream, position). The generator
is Philox4x32-10 (Salmon et al., SC 2011), which Triton has too: `tl.philox(seed, position, stream, 0, 0)` returns the
same four words (with 32-bit counters; for 64-bit counters it runs another Philox).

The reported log-probabilities are the model's own: they come from the raw logits, before steps 1 to 4. They cover the
chosen token and the likeliest ones (`logprobs`), or the tokens that the request names (`logprob_token_ids`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minipaged.contracts import Sampled, SamplingInput, TokenBits, why_no_peak, why_nothing_left
from minipaged.errors import BadLogits
from minipaged.params import SamplingParams

FloatArray = NDArray[np.floating[Any]]


def sample(logits: FloatArray, inputs: Sequence[SamplingInput]) -> list[Sampled]:
    """Choose one token for each input, from `logits` [rows, vocab], float32 or float64.

    The work on a row is done once, however many inputs use it. If nothing can be chosen from a row (it holds NaN or
    plus infinity, or only minus infinity is left), the inputs that use it get an error.
    """
    users: dict[int, list[int]] = defaultdict(list)  # row -> the indices of the inputs that use it
    for index, wanted in enumerate(inputs):
        users[wanted.row].append(index)
    sampled: dict[int, Sampled] = {}
    for row, indices in users.items():
        prediction = None
        for index in indices:
            try:
                prediction = prediction or Prediction(logits[row])
                sampled[index] = prediction.choose(inputs[index])
            except BadLogits as error:
                sampled[index] = Sampled(0, math.nan, None, str(error))
    return [sampled[index] for index in range(len(inputs))]


def gather_logprobs(logits: FloatArray, token_ids: Sequence[int], num_logprobs: int) -> list[Sampled]:
    """Return the log-probabilities of given tokens, as `sample` does for chosen ones: token i by row i of `logits`."""
    gathered = []
    for row, token_id in enumerate(token_ids):
        try:
            gathered.append(Prediction(logits[row]).report(token_id, num_logprobs))
        except BadLogits as error:
            gathered.append(Sampled(0, math.nan, None, str(error)))
    return gathered


class Prediction:
    """The model's prediction for one next token: a row of the logits, and the values that all inputs using it need."""

    def __init__(self, logits: FloatArray) -> None:
        self.logits = logits  # [vocab]
        self.likeliest = likeliest_token(logits)
        self.peak = float(logits[self.likeliest])
        exponentials = np.subtract(logits, logits[self.likeliest])  # [vocab], at most 0
        np.exp(exponentials, out=exponentials)
        self.log_total = math.log(float(exponentials.sum()))  # log of the softmax's denominator, minus the peak
        self.distributions: dict[SamplingParams, Distribution] = {}

    def choose(self, wanted: SamplingInput) -> Sampled:
        """Return the token for one input, with its log-probability."""
        params = wanted.params
        if wanted.leaves_logits_alone:
            token_id = self.likeliest
            if params.temperature > 0:
                if params not in self.distributions:
                    self.distributions[params] = distribution(self.logits, params)
                token_id = self.distributions[params].at(uniform(wanted.seed, wanted.stream, wanted.position))
        else:
            penalised = penalise(self.logits, wanted)  # [vocab]
            token_id = int(np.argmax(penalised))
            if not math.isfinite(penalised[token_id]):
                raise BadLogits(why_nothing_left(wanted.ruled_out_by, penalised[token_id]))
            if params.temperature > 0:
                token_id = distribution(penalised, params).at(uniform(wanted.seed, wanted.stream, wanted.position))
        return self.report(token_id, params.num_likeliest, params.logprob_token_ids)

    def report(self, token_id: int, num_likeliest: int | None, given: Sequence[int] = ()) -> Sampled:
        """Return this token with its log-probability.

        Unless `num_likeliest` is None, the log-probabilities of that many of the likeliest tokens are included. If
        `given` is not empty, those of the given tokens are included instead.
        """
        top = None
        if given:
            top = {token: self._logprob(token) for token in sorted({*given, token_id})}
            top = dict(sorted(top.items(), key=lambda one: -one[1]))  # likeliest first, lowest id first among equals
        elif num_likeliest is not None:  # the chosen token comes last, unless it is among the likeliest
            top = {token: self._logprob(token) for token in [*largest(self.logits, num_likeliest).tolist(), token_id]}
        return Sampled(token_id, self._logprob(token_id), top)

    def _logprob(self, token_id: int) -> float:
        return float(self.logits[token_id]) - self.peak - self.log_total


def penalise(logits: FloatArray, wanted: SamplingInput) -> FloatArray:
    """Return a float64 copy of `logits` [vocab] with forbidden tokens ruled out, and bias and penalties applied."""
    params = wanted.params
    penalised = logits.astype(np.float64)  # [vocab]
    if wanted.allowed is not None:
        penalised[~is_allowed(wanted.allowed, len(logits))] = -np.inf
    if params.allowed_token_ids is not None:
        penalised[np.isin(np.arange(len(logits)), params.allowed_token_ids, invert=True)] = -np.inf
    penalised[list(wanted.forbidden_token_ids)] = -np.inf
    for token_id, bias in dict(params.logit_bias).items():
        penalised[token_id] += bias
    if params.repetition_penalty != 1:
        seen = np.unique(np.array([*wanted.prompt_token_ids, *wanted.output_token_ids], dtype=np.int64))  # [seen]
        held = penalised[seen]  # [seen]
        penalised[seen] = np.where(held > 0, held / params.repetition_penalty, held * params.repetition_penalty)
    generated, times = np.unique(np.array(wanted.output_token_ids, dtype=np.int64), return_counts=True)  # [generated]
    penalised[generated] -= params.frequency_penalty * times + params.presence_penalty
    return penalised


def is_allowed(bits: TokenBits, vocab: int) -> NDArray[np.bool_]:
    """Return whether each token may be chosen, [vocab]. The bits start at the lowest one of the first word."""
    known = np.unpackbits(bits.astype("<u4").view(np.uint8), bitorder="little")[:vocab]  # [at most vocab], 0 or 1
    return np.pad(known, (0, vocab - len(known))).astype(bool)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution to draw from: the tokens kept, by increasing id, and the running sum of their weights."""

    token_ids: NDArray[np.intp]
    """[kept]"""
    cumulative: FloatArray
    """[kept], float64, not normalised: the last one is the sum of all weights."""

    def at(self, u: float) -> int:
        """The token on which `u`, in [0, 1), falls: the first whose running sum exceeds the share `u` of the total."""
        return int(self.token_ids[np.searchsorted(self.cumulative, u * self.cumulative[-1], side="right")])


def distribution(logits: FloatArray, params: SamplingParams) -> Distribution:
    """Apply the temperature and the filters to `logits` [vocab], in float64."""
    wide = logits.astype(np.float64)  # [vocab]
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to minus infinity: correct
        scaled = (wide - wide.max()) / params.temperature  # [vocab], the likeliest is 0
    token_ids = np.flatnonzero(scaled >= smallest_kept(scaled, params))  # [kept]
    return Distribution(token_ids, np.cumsum(np.exp(scaled[token_ids])))


def smallest_kept(scaled: FloatArray, params: SamplingParams) -> float:
    """Return the threshold that the filters set for the scaled logits [vocab]; the largest of these is 0."""
    threshold = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if 0 < params.top_k < len(scaled):
        threshold = max(threshold, float(np.partition(scaled, -params.top_k)[-params.top_k]))
    if params.top_p < 1:
        candidates = scaled[scaled >= threshold]  # [candidates]
        share = 1 - params.top_p  # of the probability: drop the least likely tokens that fit in it together
        # Sorting is the slow part. Tokens whose weight is below share / candidates of the likeliest's weight, which is
        # 1, fit into the share all together, so they need no sorting.
        light = candidates < math.log(share / len(candidates))  # [candidates]
        rising = np.sort(candidates[~light])  # [the others], least likely first
        tail = np.exp(candidates[light]).sum() + np.cumsum(np.exp(rising))  # [the others]: each and all less likely
        may_go = int(np.searchsorted(tail, share * tail[-1], side="right"))
        threshold = float(rising[min(may_go, len(rising) - 1)])  # the likeliest stays
    return threshold


def largest(values: FloatArray, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest (or all) of `values` [n], largest first; ties go to the lower index."""
    count = min(count, len(values))
    if count == 0:
        return np.zeros(0, dtype=np.intp)
    candidates = np.flatnonzero(values >= np.partition(values, -count)[-count])  # [count, or more on ties]
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]  # [count]


def likeliest_token(logits: FloatArray) -> int:
    """Return the lowest id among the largest logits [vocab] of a row. Raises BadLogits if that logit is not finite."""
    token_id = int(np.argmax(logits))  # argmax stops at the first NaN, if there is one
    if error := why_no_peak(token_id, float(logits[token_id])):
        raise BadLogits(error)
    return token_id


def uniform(seed: int, stream: int, position: int, purpose: int = 0) -> float:
    """Return a number in [0, 1) with 53 random bits: 27 from the first word of Philox, 26 from the second."""
    first, second, _, _ = philox((position, stream, purpose, 0), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return ((first >> 5) * 2**26 + (second >> 6)) / 2**53


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: ten rounds that turn a counter and a key, in 32-bit words, into four random words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # 64 bits each: high word, low word
        c0, c1 = product2 >> 32 ^ c1 ^ k0, product2 & 0xFFFFFFFF
        c2, c3 = product0 >> 32 ^ c3 ^ k1, product0 & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3
