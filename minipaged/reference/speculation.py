"""Verification: how many tokens of a draft stand, and which token comes after them (speculative decoding).

A *draft* is k tokens that something cheap guesses for the end of a sequence. One step runs the sequence's latest token
and all k drafted ones. That costs little more than one token, because decoding waits for memory and the weights are
read once. Row i of the step's k + 1 rows of logits predicts the token after the first i drafted tokens, and is valid
only if these i stand. So a token is chosen from one row after another, and the first that is not the drafted one is the
last: it takes the drafted token's place. If all k stand, row k gives one token more, the *bonus token*. Such a step
gives 1 to k + 1 tokens, and each has the model's own distribution p, after temperature and filters (`sampling.py`).

There are two ways to choose the token of a row, and both keep p exactly:

- *Draw as ever, and compare.* The token is the one that `sample` chooses, drafted or not. **The tokens are those
  without drafts**, whatever was drafted: more tokens, fewer, or none in a full batch. If the draft is certain of its
  token d (found in the prompt, or by a greedy draft model), then d stands with probability p(d). No way accepts it
  more often.
- *Rejection* (Leviathan et al., ICML 2023, algorithm 1; Chen et al., 2023, arXiv 2302.01318), for drafts that a model
  has drawn from its own distribution q. Token d is accepted with probability min(1, p(d) / q(d)). If it is refused, the
  token is drawn from the residual, max(0, p - q) normalised. A drafted token stands with probability Σ min(p, q). No
  way accepts it more often.

**What the same seed gives.** All random numbers are functions of (seed, stream, position, purpose). A draft model draws
with `sample`, so with the number that a plain draw uses. Acceptance and residual have numbers of their own. With
rejection, the token at a position depends on the tokens before it, and on whether a guess has reached this position. So
the draft model guesses at every position, that of the bonus token included. The model does not run this last guess.
(It takes no extra pass: the draft model runs the last drafted token anyway, for its K/V.) Then the tokens do not depend
on the number of drafted tokens, the rest of the batch, preemption, or the tier. They differ from the tokens without a
draft model, but have the same distribution. Tokens that do not depend on the draft at all agree with it less often
(Daliri, Musco and Suresh, 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from minipaged.contracts import Draft, Sampled, SamplingInput, why_nothing_left
from minipaged.errors import BadLogits
from minipaged.reference.sampling import (
    Distribution,
    FloatArray,
    Prediction,
    distribution,
    likeliest_token,
    penalise,
    sample,
    uniform,
)

ACCEPTANCE, RESIDUAL = 1, 2
"""The purposes of random numbers (`uniform`); 0 is the draw of a token."""


def verify(
    logits: FloatArray, drafts: Sequence[Draft], draft_logits: Sequence[FloatArray] | FloatArray | None = None
) -> list[list[Sampled]]:
    """Return for each draft the tokens that stand, and one more: 1 to k + 1 tokens, each as `sample` reports it.

    logits: [rows, vocab], which the drafts' inputs use.
    draft_logits: [all tokens of `drafts`, vocab], in their order: the draft model's logits, from which `sample`
        drew the drafted tokens with the same inputs. None: the drafted tokens count as certain. So does one whose row
        gives no distribution.

    If nothing can be chosen from a row, the last token is an error. Rows after the first token that does not stand are
    not looked at: they predict what comes after tokens that the sequence does not have.
    """
    drafted_from = iter(() if draft_logits is None else draft_logits)  # of [vocab] each
    verified = []
    for draft in drafts:
        rows = [] if draft_logits is None else [next(drafted_from) for _ in draft.token_ids]  # of [vocab] each
        chosen: list[Sampled] = []
        for wanted, drafted, row in zip_longest(draft.inputs, draft.token_ids, rows):
            if drafted is None or row is None or wanted.params.temperature == 0:
                chosen += sample(logits, [wanted])
            else:
                chosen.append(accept_or_draw_again(logits, wanted, drafted, row))
            if chosen[-1].token_id != drafted or chosen[-1].error:
                break
        verified.append(chosen)
    return verified


def accept_or_draw_again(logits: FloatArray, wanted: SamplingInput, drafted: int, draft_logits: FloatArray) -> Sampled:
    """Choose a token from `logits` [rows, vocab] by rejection, where `drafted` was drawn from `draft_logits` [vocab].
    As `sample` does, if one of the two rows gives no distribution."""
    place = (wanted.seed, wanted.stream, wanted.position)
    try:
        p, q = probabilities(logits[wanted.row], wanted), probabilities(draft_logits, wanted)  # [vocab] each
    except BadLogits:
        return sample(logits, [wanted])[0]
    token_id = drafted
    if not is_accepted(p, q, drafted, uniform(*place, ACCEPTANCE)):
        token_id = residual(p, q).at(uniform(*place, RESIDUAL))
    prediction = Prediction(logits[wanted.row])
    return prediction.report(token_id, wanted.params.num_likeliest, wanted.params.logprob_token_ids)


def is_accepted(p: FloatArray, q: FloatArray, drafted: int, u: float) -> bool:
    """Whether the drafted token stands: with probability min(1, p / q), over `u` in [0, 1). p, q: [vocab].

    Where p exceeds q nowhere, the two differ by rounding only, and there is no residual.
    """
    return bool(u * q[drafted] < p[drafted] or (p <= q).all())


def residual(p: FloatArray, q: FloatArray) -> Distribution:
    """The part of p [vocab] that a draft from q [vocab] does not bring about, max(0, p - q), to be drawn from."""
    return Distribution(np.arange(len(p)), np.cumsum(np.maximum(p - q, 0)))  # `at` normalises


def probabilities(logits: FloatArray, wanted: SamplingInput) -> FloatArray:
    """Return the distribution [vocab] from which `sample` draws: float64, 0 for tokens that are ruled out or filtered.

    Raises BadLogits if there is none.
    """
    likeliest_token(logits)
    penalised = logits if wanted.leaves_logits_alone else penalise(logits, wanted)  # [vocab]
    if not math.isfinite(peak := float(penalised.max())):
        raise BadLogits(why_nothing_left(wanted.ruled_out_by, peak))
    kept = distribution(penalised, wanted.params)
    dense = np.zeros(len(logits))  # [vocab]
    dense[kept.token_ids] = np.diff(kept.cumulative, prepend=0) / kept.cumulative[-1]
    return dense
