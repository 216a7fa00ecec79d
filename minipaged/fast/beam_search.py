"""Beam search (paper, section 4.4 and Fig. 9): ranked on the device, decided on the host.

A step has `beams * vocab` candidates, but at most the best `max(2, 1 + number of EOS tokens) * beam_width` matter. The
device finds these in one ranking over all beams. They come back in one copy, together with the numbers that show
whether the logits were valid. The host applies the rules of `reference/beam_search.py` to these few candidates: which
beams finish, which continue, and whether the search is over.

The engine steps a deep copy of a search. So a search holds no arrays, only its parameters, counters, and the scores of
the best finished sequences.
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
from minipaged.fast import kernels_for
from minipaged.fast.device import is_gpu
from minipaged.fast.kernels import Kernels
from minipaged.fast.sampling import largest, receive, send
from minipaged.params import BeamSearchParams, final_token_ids

LARGEST_PENALTY = 30
"""The largest power of ten by which `length_penalty` may change a score: float32 ends at 1e38, and sums of
log-probabilities reach 1e5."""


class BeamSearch(contracts.BeamSearch):
    """The beam search of one request.

    Sums and scores are rounded to the logits' type (float32 for float16 and bfloat16), because rounding can decide a
    tie.
    """

    def __init__(
        self, params: BeamSearchParams, prompt_length: int, max_length: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._params = params
        self._steps_left = max_length - prompt_length
        self._generated = 0  # number of tokens that each running beam has generated
        self._ends = final_token_ids(params, eos_token_ids)
        self._best_scores: list[float] = []  # the scores of the finished sequences that are kept, best first
        if abs(params.length_penalty) * math.log10(max(1, self._steps_left)) > LARGEST_PENALTY:
            raise InvalidRequest(
                f"length_penalty is {params.length_penalty}: with up to {self._steps_left} generated tokens the scores "
                "overflow; choose one nearer to 0"
            )

    def step(self, logits: Tensor, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
        """Extend each beam by one token; see the contract. `logits`: [rows, vocab] on any device.

        Raises BadLogits if a beam's `logits` have no finite peak; the search is then unchanged.
        """
        assert self._steps_left > 0, "the search is over: it had no survivors"
        width = self._params.beam_width
        kernels = kernels_for(logits.device)
        with kernels.computing(throughout=False):
            count = max(2, 1 + len(self._ends)) * width
            candidates = _best_moves(kernels, logits, rows, cumulative_logprobs, count)
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
        """The sum of log-probabilities over length ** length_penalty. The sum, the power and the quotient are each
        rounded."""
        return float(precision(move.cumulative_logprob) / precision(length**self._params.length_penalty))

    def _keep_best(self, ended: list[tuple[BeamMove, float]]) -> list[tuple[BeamMove, float]]:
        """Return the sequences in `ended` that are among the best `beam_width` finished so far. On ties the earlier one
        wins."""
        ranking = list(self._best_scores)
        origin: list[int | None] = [None] * len(ranking)  # index into `ended`; None: finished earlier
        for index, (_, score) in enumerate(ended):
            place = bisect.bisect_right(ranking, -score, key=lambda kept: -kept)  # behind equal scores
            ranking.insert(place, score)
            origin.insert(place, index)
        width = self._params.beam_width
        self._best_scores = ranking[:width]
        return [ended[index] for index in sorted(index for index in origin[:width] if index is not None)]

    def _cannot_improve(self, best: BeamMove, precision: type[np.float32 | np.float64]) -> bool:
        """Whether no running beam can displace a finished sequence any more. `best`: the best running beam."""
        if len(self._best_scores) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        length = self._generated  # the length at which the beam is scored
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length += self._steps_left  # a longer beam scores higher, if it loses nothing more on the way
        return self._score(best, length, precision) <= self._best_scores[-1]


def _best_moves(
    kernels: Kernels, logits: Tensor, rows: Sequence[int], cumulative_logprobs: Sequence[float], count: int
) -> list[BeamMove]:
    """The `count` likeliest continuations of all beams together, best first. On ties the earlier beam comes first, then
    the lower token. Fewer if the model rules tokens out. No bit depends on the number of threads."""
    where, sums = send(logits.device, rows, np.array(cumulative_logprobs))  # [beams]
    given = logits[where]  # [beams, vocab]
    table = given if given.dtype == torch.float64 else given.float()
    # On a GPU the kernel for the model's type is compiled already, because samples are chosen by it.
    found = kernels.argmax_logsumexp(given if is_gpu(given.device) else table)
    likeliest, peaks, log_totals = found  # [beams]; the peak is NaN if the row holds NaN
    peak, log_total, before = (each.to(table.dtype)[:, None] for each in (peaks, log_totals, sums))  # [beams, 1]
    flat = (before + (table - peak - log_total)).view(1, -1)  # [1, beams * vocab]
    best = largest(flat, count)  # [1, count]; ties are ordered by beam, then by token
    indices, best_sums, likeliest_ids, found_peaks = receive(
        best[0], flat.gather(1, best)[0].double(), likeliest, peaks
    )
    for token_id, found_peak in zip(likeliest_ids.tolist(), found_peaks.tolist(), strict=True):
        if error := why_no_peak(token_id, found_peak):
            raise BadLogits(error)
    parents, token_ids = np.divmod(indices, table.shape[1])
    moves = zip(parents.tolist(), token_ids.tolist(), best_sums.tolist(), strict=True)
    return [BeamMove(*move) for move in moves if move[-1] > -math.inf]
