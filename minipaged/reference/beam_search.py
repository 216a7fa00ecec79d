"""Beam search: keep the `beam_width` likeliest sequences instead of one (paper, section 4.4 and Fig. 9).

Every step continues each running beam by every token, ranks all these candidates together, and keeps the best. This
file decides; the engine moves the blocks:

    before a step            the step decides              after it
    beam 0  [A][B][C ]       0 goes on with two tokens     beam 0  [A][B][C ]   the table of 0
    beam 1  [A][B][D ]       1 goes on with one            beam 1  [A][B][C ]   a fork of it: A, B, C are shared
    beam 2  [A][E][F ]       2 has no survivor             beam 2  [A][B][D ]   the table of 1

- Survivors with the same parent **fork** its block table: every block gets one more reference and nothing is copied.
  Their next tokens differ, so the first of them to write into the shared last block copies it (copy-on-write).
- A parent without survivors gives its blocks back in the same step: E and F become free, A stays with the other beams.

Running beams usually descend from a few recent ancestors, so several beams hold most blocks. Earlier systems copied
large parts of the KV cache from beam to beam at every step; here each beam copies at most one block.

The rules are those of transformers' `generate(num_beams=...)`:

- *Candidates*: the best `max(2, 1 + number of EOS tokens) * beam_width` continuations. Even if every beam with every
  EOS token is among them, `beam_width` others remain that can go on.
- *Finished*: a candidate that ends in EOS, or reaches the maximum length, and ranks among the best `beam_width` of its
  step. (One of a lower rank is dropped.) Its score is its sum of logprobs / generated tokens ** length_penalty, EOS
  counted. The search returns the `beam_width` finished sequences with the best scores.
- *Survivors*: the best `beam_width` candidates that do not end in this step.
- *Over*: the search ends at the maximum length; or when `beam_width` sequences have finished and `early_stopping` is
  True; or when `beam_width` have finished and the best survivor can no longer beat the worst of them. The survivor's
  score is computed as if it ended now. For "never" with a positive length penalty it is computed as if the survivor
  reached the maximum length without losing any more log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minipaged import contracts
from minipaged.contracts import BeamMove, BeamStep
from minipaged.errors import InvalidRequest
from minipaged.params import BeamSearchParams, final_token_ids
from minipaged.reference.sampling import FloatArray, largest, likeliest_token


class BeamSearch(contracts.BeamSearch):
    """The beam search of one request: its state, and the rules above.

    Sums and scores are computed in the precision of the logits (float32 in transformers), because rounding can decide
    which beam wins.
    """

    def __init__(
        self, params: BeamSearchParams, prompt_length: int, max_length: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._params = params
        self._most_tokens = max_length - prompt_length  # the limit on generated tokens
        self._eos_token_ids = final_token_ids(params, eos_token_ids)
        self._generated = 0  # tokens that each running beam has after the prompt
        self._finished_scores: list[float] = []  # scores of the best `beam_width` finished sequences, best first
        _check_length_penalty(params.length_penalty, self._most_tokens)

    def step(self, logits: FloatArray, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
        """Continue each beam by one token; see the contract. Raises BadLogits if a beam's peak logit is not finite."""
        assert self._generated < self._most_tokens, "the search is over: it had no survivors"
        width = self._params.beam_width
        candidates = self._candidates(logits, rows, cumulative_logprobs)
        self._generated += 1
        ends = [self._ends_with(move.token_id) for move in candidates]
        survivors = [move for move, ended in zip(candidates, ends, strict=True) if not ended][:width]
        just_ended = [move for move, ended in zip(candidates[:width], ends, strict=False) if ended]
        finished = self._keep([(move, self._score(logits, move, self._generated)) for move in just_ended])
        if survivors and self._is_over(self._score(logits, survivors[0], self._best_length())):
            survivors = []
        return BeamStep(survivors, finished)

    def _candidates(
        self, logits: FloatArray, rows: Sequence[int], cumulative_logprobs: Sequence[float]
    ) -> list[BeamMove]:
        """The best continuations of all beams, best first; ties go to the earlier beam, then the lower token."""
        sums = np.array(cumulative_logprobs, dtype=logits.dtype)  # [beams]
        sums = sums[:, None] + log_softmax(logits, rows)  # [beams, vocab]
        flat = sums.reshape(-1)  # [beams * vocab]
        count = max(2, 1 + len(self._eos_token_ids)) * self._params.beam_width
        moves = []
        for index in largest(flat, count):
            parent, token_id = divmod(int(index), sums.shape[1])
            moves.append(BeamMove(parent, token_id, float(flat[index])))
        return [move for move in moves if move.cumulative_logprob > -np.inf]  # the others have probability 0

    def _ends_with(self, token_id: int) -> bool:
        return token_id in self._eos_token_ids or self._generated == self._most_tokens

    def _keep(self, ended: list[tuple[BeamMove, float]]) -> list[tuple[BeamMove, float]]:
        """The entries of `ended` that are among the best `beam_width` finished so far; ties go to the earlier one."""
        scores = self._finished_scores + [score for _, score in ended]
        ranking = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._params.beam_width]
        known = len(self._finished_scores)
        self._finished_scores = [scores[index] for index in ranking]
        return [ended[index - known] for index in sorted(ranking) if index >= known]

    def _score(self, logits: FloatArray, move: BeamMove, length: int) -> float:
        """The sum of logprobs of `move`, divided by the length penalty for `length` generated tokens."""
        penalty = length**self._params.length_penalty
        return float(logits.dtype.type(move.cumulative_logprob) / logits.dtype.type(penalty))

    def _best_length(self) -> int:
        """The number of generated tokens at which a running beam is scored: a guess at where its score is best."""
        patient = self._params.early_stopping == "never" and self._params.length_penalty > 0
        return self._most_tokens if patient else self._generated

    def _is_over(self, best_running_score: float) -> bool:
        if len(self._finished_scores) < self._params.beam_width:
            return False
        return self._params.early_stopping is True or best_running_score <= self._finished_scores[-1]


def log_softmax(logits: FloatArray, rows: Sequence[int]) -> FloatArray:
    """The log-probabilities [len(rows), vocab] for these rows of the logits, in the precision of `logits`."""
    peaks = np.array([logits[row, likeliest_token(logits[row])] for row in rows])  # [beams]
    shifted = logits[list(rows)] - peaks[:, None]  # [beams, vocab], at most 0
    totals = np.exp(shifted).sum(axis=1)  # [beams]
    result: FloatArray = shifted - np.log(totals)[:, None]  # [beams, vocab]
    return result


def _check_length_penalty(length_penalty: float, most_tokens: int) -> None:
    """Raise InvalidRequest for a penalty with which scores would overflow."""
    if abs(length_penalty) * np.log10(max(1, most_tokens)) > 30:  # float32 ends at 1e38, and sums reach 1e5
        raise InvalidRequest(
            f"length_penalty is {length_penalty}: with up to {most_tokens} generated tokens the scores overflow; "
            "choose one nearer to 0"
        )
