"""Choosing the next token from the logits of a row: greedily, or by drawing from a distribution.

Decoding is what a serving system does between two reads of its KV cache. The sequences of one request that are
sampled in parallel (paper, section 4.4 and Fig. 8) differ only in what is drawn here, and everything they have in
common before their first difference is held in the same blocks. For each token, in vLLM's order:

1. the logits of tokens that are not allowed become minus infinity: all but `allowed_token_ids`, those that complete a
   bad word, those that would end the sequence before `min_tokens`. Then `logit_bias` is added;
2. penalties: repetition (tokens of prompt and output), then frequency and presence (tokens of the output);
3. temperature 0: the token with the largest logit, the lowest id on ties. Done;
4. otherwise divide by the temperature and keep the tokens at or above a threshold: `min_p`, then `top_k`, then
   `top_p`, which counts the probabilities renormalised over what the two before it kept;
5. draw one uniform number and look up in the cumulative sum, in order of token id, which token it falls on.

A filter is a threshold on the logit, so tokens that tie with the last one kept are kept as well (`top_k=2` of the
logits 3, 1, 1, 0 keeps three tokens): the outcome never depends on how something was sorted.

**The same seed gives the same tokens**, however the scheduler batched, preempted or swapped the request: the uniform
number is no state that every draw moves on, but a function of (seed, stream, position). It is the generator
Philox4x32-10 (Salmon et al., SC 2011), which Triton has too: `tl.philox(seed, position, stream, 0, 0)` returns the
same four words (with counters of 32 bits; for 64-bit ones it runs another Philox).

The log-probabilities reported are the model's own: of the raw logits, before steps 1 to 4. They are those of the chosen
token and of the likeliest ones (`logprobs`), or of the tokens that the request names (`logprob_token_ids`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minipaged.contracts import Sampled, SamplingInput, why_no_peak, why_nothing_left
from minipaged.errors import BadLogits
from minipaged.params import SamplingParams

FloatArray = NDArray[np.floating[Any]]


def sample(logits: FloatArray, inputs: Sequence[SamplingInput]) -> list[Sampled]:
    """One token for each input, from `logits` [rows, vocab], float32 or float64.

    The work on a row is done once, however many inputs use it. A row from which nothing can be chosen is an error of
    the inputs that use it: it holds NaN or plus infinity, or nothing but minus infinity is left.
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
    """What `sample` reports of tokens that it chose, for tokens that are given: token i by row i of `logits`."""
    gathered = []
    for row, token_id in enumerate(token_ids):
        try:
            gathered.append(Prediction(logits[row]).report(token_id, num_logprobs))
        except BadLogits as error:
            gathered.append(Sampled(0, math.nan, None, str(error)))
    return gathered


class Prediction:
    """What the model predicts for one next token: one row of the logits, and what all its users need of it."""

    def __init__(self, logits: FloatArray) -> None:
        self.logits = logits  # [vocab]
        self.likeliest = likeliest_token(logits)
        self.peak = float(logits[self.likeliest])
        exponentials = np.subtract(logits, logits[self.likeliest])  # [vocab], at most 0
        np.exp(exponentials, out=exponentials)
        self.log_total = math.log(float(exponentials.sum()))  # log of the softmax's denominator, less the peak
        self.distributions: dict[SamplingParams, Distribution] = {}

    def choose(self, wanted: SamplingInput) -> Sampled:
        """The token for one input, with its log-probability."""
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
        """This token's log-probability and, unless `num_likeliest` is None, those of that many of the likeliest tokens,
        or of the `given` ones in their place."""
        top = None
        if given:
            top = {token: self._logprob(token) for token in sorted({*given, token_id})}
            top = dict(sorted(top.items(), key=lambda one: -one[1]))  # likeliest first, lowest id first among equals
        elif num_likeliest is not None:  # the chosen one comes last, unless it is among the likeliest
            top = {token: self._logprob(token) for token in [*largest(self.logits, num_likeliest).tolist(), token_id]}
        return Sampled(token_id, self._logprob(token_id), top)

    def _logprob(self, token_id: int) -> float:
        return float(self.logits[token_id]) - self.peak - self.log_total


def penalise(logits: FloatArray, wanted: SamplingInput) -> FloatArray:
    """A float64 copy of `logits` [vocab] with the tokens that are allowed alone, the bias and the penalties."""
    params = wanted.params
    penalised = logits.astype(np.float64)  # [vocab]
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


@dataclass(frozen=True, slots=True)
class Distribution:
    """What to draw from: the tokens kept, by increasing id, and the running sum of their weights."""

    token_ids: NDArray[np.intp]
    """[kept]"""
    cumulative: FloatArray
    """[kept], float64, not normalised: the last one is the sum of all."""

    def at(self, u: float) -> int:
        """The token on which `u`, in [0, 1), falls: the first whose running sum exceeds that share of the whole."""
        return int(self.token_ids[np.searchsorted(self.cumulative, u * self.cumulative[-1], side="right")])


def distribution(logits: FloatArray, params: SamplingParams) -> Distribution:
    """Temperature and filters over `logits` [vocab], in float64."""
    wide = logits.astype(np.float64)  # [vocab]
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to minus infinity, as it should
        scaled = (wide - wide.max()) / params.temperature  # [vocab], the likeliest is 0
    token_ids = np.flatnonzero(scaled >= smallest_kept(scaled, params))  # [kept]
    return Distribution(token_ids, np.cumsum(np.exp(scaled[token_ids])))


def smallest_kept(scaled: FloatArray, params: SamplingParams) -> float:
    """The threshold that the filters put on the scaled logits [vocab], of which the largest is 0."""
    threshold = math.log(params.min_p) if params.min_p > 0 else -math.inf
    if 0 < params.top_k < len(scaled):
        threshold = max(threshold, float(np.partition(scaled, -params.top_k)[-params.top_k]))
    if params.top_p < 1:
        candidates = scaled[scaled >= threshold]  # [candidates]
        share = 1 - params.top_p  # of the probability: the least likely tokens that fit in it together may go
        # Sorting is what costs. Against the likeliest's weight of 1, tokens below share / candidates each all fit in it
        # together: no need to order them.
        light = candidates < math.log(share / len(candidates))  # [candidates]
        rising = np.sort(candidates[~light])  # [the others], least likely first
        tail = np.exp(candidates[light]).sum() + np.cumsum(np.exp(rising))  # [the others]: itself and all less likely
        may_go = int(np.searchsorted(tail, share * tail[-1], side="right"))
        threshold = float(rising[min(may_go, len(rising) - 1)])  # the likeliest stays
    return threshold


def largest(values: FloatArray, count: int) -> NDArray[np.intp]:
    """The indices of the `count` largest of `values` [n] (of all, if fewer): largest first, lowest index on ties."""
    count = min(count, len(values))
    if count == 0:
        return np.zeros(0, dtype=np.intp)
    candidates = np.flatnonzero(values >= np.partition(values, -count)[-count])  # [count or more, where some tie]
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]  # [count]


def likeliest_token(logits: FloatArray) -> int:
    """The lowest id among the largest of a model's logits [vocab]. Raises BadLogits if that is not finite."""
    token_id = int(np.argmax(logits))  # argmax stops at the first NaN, if there is one
    if error := why_no_peak(token_id, float(logits[token_id])):
        raise BadLogits(error)
    return token_id


def uniform(seed: int, stream: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: 27 from the first word of Philox, 26 from the second."""
    first, second, _, _ = philox((position, stream, 0, 0), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return ((first >> 5) * 2**26 + (second >> 6)) / 2**53


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: ten rounds that turn a counter and a key, in 32-bit words, into four random words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # 64 bits each: high word, low word
        c0, c1, c2, c3 = (
            product2 >> 32 ^ c1 ^ k0,
            product2 & 0xFFFFFFFF,
            product0 >> 32 ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3
