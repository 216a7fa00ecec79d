"""Verification of drafts on the device: a whole batch in one call. The twin of `reference/speculation.py`.

The rules and the random numbers are the reference's. What differs is the order of the work:

- the tokens of all k + 1 rows of every draft are chosen at once, each as if the draft stood up to its row. Then the
  host keeps the tokens up to the first that is not the drafted one. So nothing on the device depends on what stands,
  and neither waits for the other before the host reads the tokens (`sampling.Samples`);
- without `draft_logits`, that is one call of `sample`. With them, each drafted token of a sequence that is not greedy
  takes two distributions over the whole vocabulary in float64. They are made a few at a time (`sampling.PIECE`).

A refused token is not in the residual. So by rejection, too, a token stands exactly where it equals the chosen one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minipaged.contracts import Draft, Sampled, SamplingInput
from minipaged.fast import kernels_for
from minipaged.fast.device import is_gpu
from minipaged.fast.kernels import SamplingKernels
from minipaged.fast.sampling import PIECE, Choosing, Counters, RowDistribution, Samples, penalise, send, send_allowed

ACCEPTANCE, RESIDUAL = 1, 2
"""The purposes of random numbers, as in the reference."""


def verify(
    logits: Tensor, drafts: Sequence[Draft], draft_logits: Sequence[Tensor] | Tensor | None = None
) -> Sequence[list[Sampled]]:
    """Return for each draft the tokens that stand, and one more: 1 to k + 1 tokens, each as `sample` reports it.

    logits: [rows, vocab], which the drafts' inputs use: float32, float16, bfloat16 or float64, on any device.
    draft_logits: [all tokens of `drafts`, vocab] on the same device, in their order: the draft model's logits,
        from which `sample` drew the drafted tokens with the same inputs. None: the drafted tokens count as certain. So
        does one whose row gives no distribution.

    If nothing can be chosen from a row that is reached, the last token is an error. The function does not wait for the
    device; the first access to the result does.
    """
    if not drafts:
        return []
    if draft_logits is not None and not isinstance(draft_logits, Tensor):
        draft_logits = torch.stack(list(draft_logits))
    return Verified(drafts, Verifying(drafts, draft_logits, logits.device, logits.shape[1]).sample(logits))


class Verified(Sequence[list[Sampled]]):
    """The tokens of each draft, on their way to the host, which waits for them at the first access."""

    def __init__(self, drafts: Sequence[Draft], chosen: Samples) -> None:
        self._drafts = drafts
        self._chosen = chosen  # for all rows, in the order of the drafts
        self._kept: list[list[Sampled]] | None = None

    def _on_host(self) -> list[list[Sampled]]:
        if self._kept is None:
            chosen = iter(self._chosen)
            self._kept = [_up_to_the_first_other([next(chosen) for _ in one.inputs], one) for one in self._drafts]
        return self._kept

    def __len__(self) -> int:
        return len(self._drafts)

    def __iter__(self) -> Iterator[list[Sampled]]:
        return iter(self._on_host())

    def __getitem__(self, index: Any) -> Any:
        return self._on_host()[index]


def _up_to_the_first_other(chosen: list[Sampled], draft: Draft) -> list[Sampled]:
    """Return the chosen tokens [k + 1] up to the first that is not the drafted one."""
    for number, (sampled, drafted) in enumerate(zip(chosen, draft.token_ids, strict=False), 1):
        if sampled.token_id != drafted or sampled.error:
            return chosen[:number]
    return chosen


class Verifying(Choosing):
    """The sampling plan of all rows of some drafts. Tokens that a draft model has drawn are accepted, or drawn again
    from the residual."""

    def __init__(self, drafts: Sequence[Draft], draft_logits: Tensor | None, device: torch.device, vocab: int) -> None:
        inputs = [wanted for draft in drafts for wanted in draft.inputs]
        super().__init__(inputs, device, vocab)
        self._draft_logits = draft_logits
        starts = np.cumsum([0, *(len(draft.inputs) for draft in drafts)])
        places = chain.from_iterable(range(at, at + len(d.token_ids)) for d, at in zip(drafts, starts, strict=False))
        drafted = chain.from_iterable(draft.token_ids for draft in drafts)
        self._drawn = [  # place among the inputs, drafted token, row of draft_logits
            (place, token_id, row)
            for row, (place, token_id) in enumerate(zip(places, drafted, strict=True))
            if draft_logits is not None and inputs[place].params.temperature > 0
        ]

    def choose_drafted(self, token_ids: Tensor, logits: Tensor) -> None:
        """Choose by rejection where a draft model has drawn a token. Changes `token_ids` [inputs] in place."""
        kernels, device, at_once = kernels_for(logits.device), logits.device, max(1, PIECE // logits.shape[1])
        for begin in range(0, len(self._drawn), at_once):
            places, tokens, rows = zip(*self._drawn[begin : begin + at_once], strict=True)  # [m] each
            assert self._draft_logits is not None
            inputs = [self.inputs[place] for place in places]
            numbers = Counters(inputs)
            drafting = [replace(wanted, row=row) for wanted, row in zip(inputs, rows, strict=True)]
            p = probabilities(logits, inputs, kernels)  # [m, vocab]
            q = probabilities(self._draft_logits, drafting, kernels)  # [m, vocab]
            place, drafted, u, v = send(
                device, places, tokens, numbers.uniform(kernels, ACCEPTANCE), numbers.uniform(kernels, RESIDUAL)
            )  # [m] each
            p_drafted, q_drafted = (each.gather(1, drafted[:, None])[:, 0] for each in (p, q))  # [m] each
            stands = (u * q_drafted < p_drafted) | (p <= q).all(1)  # [m]
            residual = (p - q).clamp(min=0)  # [m, vocab]
            # A GPU sums in pieces: see `draw_ordered`.
            cumulative = torch.where(residual > 0, residual.cumsum(1), 0.0)  # [m, vocab]
            again = (cumulative > (v * cumulative.amax(1))[:, None]).int().argmax(1)  # [m]
            chosen = torch.where(stands, drafted, again)  # [m]
            token_ids[place] = torch.where(q.isfinite().all(1), chosen, token_ids[place])


def probabilities(logits: Tensor, inputs: Sequence[SamplingInput], kernels: SamplingKernels) -> Tensor:
    """Return the distributions [inputs, vocab] in float64 from which `sample` draws. Each input has a temperature above
    0. A row from which nothing can be drawn gives numbers of no meaning."""
    if all(wanted.leaves_logits_alone for wanted in inputs):
        [rows] = send(logits.device, [wanted.row for wanted in inputs])
        table = logits[rows]  # [inputs, vocab]
        table = table if is_gpu(table.device) or table.dtype == torch.float64 else table.float()
    else:
        grammars = any(wanted.allowed is not None for wanted in inputs)
        table = penalise(logits, inputs, send_allowed(logits, inputs) if grammars else None)  # [inputs, vocab]
    each = [RowDistribution.of(row, wanted.params, row) for row, wanted in enumerate(inputs)]
    rows, top_ks, temperatures, min_logprobs, shares = send(
        logits.device,
        [one.row for one in each],
        [one.top_k for one in each],
        np.array([one.temperature for one in each]),
        np.array([one.min_logprob for one in each]),
        np.array([one.share for one in each]),
    )
    peaks = table.amax(1).double()  # [inputs]
    depth = max(one.depth(table.shape[1]) for one in each)
    weights = kernels.token_weights(table, rows, peaks, temperatures, min_logprobs, top_ks, shares, depth=depth)
    return weights / weights.sum(1, keepdim=True)
