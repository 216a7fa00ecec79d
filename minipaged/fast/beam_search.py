"""Beam search (paper, section 4.4 and Fig. 9): ranked on the device, decided on the host.

A step has `beams * vocab` candidates, of which at most `max(2, 1 + number of EOS tokens) * beam_width` matter. They are
found where the logits are, in one ranking over all beams, and come back in one copy, together with what tells whether
the logits were sound. On those few the rules of `reference/beam_search.py` are carried out: what has finished,
what goes on, whether the search is over.

The engine steps a deep copy of a search. So a search holds no arrays: its parameters, a counter, and the scores of the
finished sequences that are still in the running.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minipaged import contracts
from minipaged.contracts import BeamMove, BeamStep, why_no_peak
from minipaged.errors import BadLogits, InvalidRequest
from minipaged.fast.sampling import largest, receive, send
from minipaged.params import BeamSearchParams, final_token_ids

LARGEST_PENALTY = 30
"""Powers of ten that a score may be moved by: float32 ends at 1e38, and sums of log-probabilities reach 1e5."""


class BeamSearch(contracts.BeamSearch):
    """The search of one request.

    Sums and scores are rounded as the logits are (float16 and bfloat16 count as float32): a rounding can decide.
    """

    def __init__(
        self, params: BeamSearchParams, prompt_length: int, max_length: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._params = params
        self._steps_left = max_length - prompt_length
        self._generated = 0  # tokens by which each running beam is longer than the prompt
        self._ends = final_token_ids(params, eos_token_ids)
        self._best_scores: list[float] = []  # of the finished sequences that are kept, best first
        if abs(params.length_penalty) * math.log10(max(1, self._steps_left)) > LARGEST_PENALTY:
            raise InvalidRequest(
                f"length_penalty is {params.length_penalty}: with up to {self._steps_left} generated tokens the scores "
                "overflow; choose one nearer to 0"
            )

    def step(self, logits: Tensor, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
        """One more token for each beam; see the contract. `logits`: [rows, vocab] on any device.

        Raises BadLogits where a beam's `logits` have no finite peak; the search is then as it was.
        """
        assert self._steps_left > 0, "the search is over: it had no survivors"
        width = self._params.beam_width
        candidates = _best_moves(logits, rows, cumulative_logprobs, max(2, 1 + len(self._ends)) * width)
        precision = np.float64 if logits.dtype == torch.float64 else np.float32
        self._generated += 1
        self._steps_left -= 1

        survivors: list[BeamMove] = []
        ended: list[tuple[BeamMove, float]] = []
        for rank, move in enumerate(candidates):
            if self._steps_left > 0 and move.token_id not in self._ends:
                survivors.append(move)
            elif rank < width:
                ended.append((move, self._score(move, self._generated, precision)))
        finished = self._keep_best(ended)
        if survivors and self._cannot_improve(survivors[0], precision):
            survivors = []
        return BeamStep(survivors[:width], finished)

    def _score(self, move: BeamMove, length: int, precision: type[np.float32 | np.float64]) -> float:
        """The sum of logprobs over length ** length_penalty; the sum, the power and the quotient are rounded."""
        return float(precision(move.cumulative_logprob) / precision(length**self._params.length_penalty))

    def _keep_best(self, ended: list[tuple[BeamMove, float]]) -> list[tuple[BeamMove, float]]:
        """Those of `ended` that are among the best `beam_width` finished so far; the earlier one on ties."""
        ranking = list(self._best_scores)
        origin: list[int | None] = [None] * len(ranking)  # the index into `ended`, where it has just ended
        for index, (_, score) in enumerate(ended):
            place = bisect.bisect_right(ranking, -score, key=lambda kept: -kept)  # behind its equals
            ranking.insert(place, score)
            origin.insert(place, index)
        width = self._params.beam_width
        self._best_scores = ranking[:width]
        return [ended[index] for index in sorted(index for index in origin[:width] if index is not None)]

    def _cannot_improve(self, best: BeamMove, precision: type[np.float32 | np.float64]) -> bool:
        """Whether no running beam, of which `best` is the best, will displace a finished sequence."""
        if len(self._best_scores) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        length = self._generated  # at which the beam is judged
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length += self._steps_left  # the later the better, if nothing more were lost on the way
        return self._score(best, length, precision) <= self._best_scores[-1]


def _best_moves(
    logits: Tensor, rows: Sequence[int], cumulative_logprobs: Sequence[float], count: int
) -> list[BeamMove]:
    """The `count` likeliest continuations of all beams together, best first; the earlier beam, then the lower token, on
    ties. Fewer where the model rules tokens out."""
    where, sums = send(logits.device, rows, np.array(cumulative_logprobs))  # [beams]
    table = logits[where] if logits.dtype == torch.float64 else logits[where].float()  # [beams, vocab]
    peaks, likeliest = table.max(1)  # [beams]; NaN, if there is one
    shifted = table - peaks[:, None]  # [beams, vocab], at most 0
    totals = shifted.exp().sum(1, keepdim=True).log()  # [beams, 1]
    flat = (sums.to(table.dtype)[:, None] + (shifted - totals)).view(1, -1)  # [1, beams * vocab]
    best = largest(flat, count)  # [1, count], by beam and then by token, where some tie
    indices, best_sums, likeliest_ids, found_peaks = receive(
        best[0], flat.gather(1, best)[0].double(), likeliest, peaks.double()
    )
    for token_id, peak in zip(likeliest_ids.tolist(), found_peaks.tolist(), strict=True):
        if error := why_no_peak(token_id, peak):
            raise BadLogits(error)
    parents, token_ids = np.divmod(indices, table.shape[1])
    moves = zip(parents.tolist(), token_ids.tolist(), best_sums.tolist(), strict=True)
    return [BeamMove(*move) for move in moves if move[-1] > -math.inf]
