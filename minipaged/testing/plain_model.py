"""A fake model in plain Python, for the engine of a web page, where there is no NumPy.

The content oracle needs a model whose choices depend on all tokens before them and on the seed, so that a wrong read
shows. The chosen tokens mean nothing. So the rules here are as simple as possible, and not those of the tiers: the
token chosen is the allowed one with the largest logit, after adding noise if the temperature is not 0; beams are ranked
by the sums of their logits. The choices are the same on every machine, 32 or 64 bits, and so are the counterexamples
found with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from minipaged import contracts
from minipaged.contracts import BeamMove, BeamStep, Sampled, SamplingInput, Tier
from minipaged.params import BeamSearchParams, final_token_ids
from minipaged.testing.fake_model import FakeModel
from minipaged.tiers import plain_parts

Rows = Sequence[Sequence[float]]
"""Logits [rows, vocab]."""
SPREAD = 2.0
"""The standard deviation of the logits, and of the noise at a temperature of 1."""


def logits(tokens: Sequence[int], vocab_size: int) -> list[float]:
    r = Random(" ".join(map(str, tokens)))  # seeded by a text: with 32 bits, a tuple's hash differs
    return [r.gauss(0, SPREAD) for _ in range(vocab_size)]


def sample(logits: Rows, inputs: Sequence[SamplingInput]) -> list[Sampled]:
    """Choose one token for each input."""
    return [_choose(logits[wanted.row], wanted) for wanted in inputs]


def _choose(row: Sequence[float], wanted: SamplingInput) -> Sampled:
    params, noise = wanted.params, [0.0] * len(row)
    if params.temperature:
        r = Random(f"{wanted.seed} {wanted.stream} {wanted.position}")
        noise = [r.gauss(0, SPREAD * params.temperature) for _ in row]
    allowed = {*(params.allowed_token_ids or range(len(row)))} - {*wanted.forbidden_token_ids}
    if (bits := wanted.allowed) is not None:
        allowed = {token for token in allowed if token < 32 * len(bits) and int(bits[token >> 5]) >> (token & 31) & 1}
    token = max(sorted(allowed), key=lambda token: row[token] + noise[token])
    return _report(row, token, params.num_likeliest, params.logprob_token_ids)


def _report(row: Sequence[float], token: int, num_likeliest: int | None, given: Sequence[int] = ()) -> Sampled:
    tops = None if num_likeliest is None else {each: row[each] for each in (*given, token)}
    return Sampled(token, row[token], tops)


class BeamSearch(contracts.BeamSearch):
    """Beam search that ends when `beam_width` beams have finished, or at the maximum length."""

    def __init__(
        self, params: BeamSearchParams, prompt_length: int, max_length: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._width = params.beam_width
        self._left = max_length - prompt_length
        self._ends = final_token_ids(params, eos_token_ids)
        self._num_finished = 0

    def step(self, logits: Rows, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
        self._left -= 1
        moves = [
            BeamMove(beam, token, before + logit)
            for beam, (row, before) in enumerate(zip(rows, cumulative_logprobs, strict=True))
            for token, logit in enumerate(logits[row])
        ]
        moves.sort(key=lambda move: -move.cumulative_logprob)
        finished = [(move, move.cumulative_logprob) for move in moves[: self._width] if self._is_end(move)]
        self._num_finished += len(finished)
        is_over = self._num_finished >= self._width
        return BeamStep([] if is_over else [m for m in moves if not self._is_end(m)][: self._width], finished)

    def _is_end(self, move: BeamMove) -> bool:
        return not self._left or move.token_id in self._ends


PLAIN_TIER = Tier("plain", *plain_parts(), BeamSearch, sample)


class PlainModel(FakeModel):
    """The reference's allocator and block table, with the choices above."""

    tier = PLAIN_TIER

    def logits(self, tokens: Sequence[int], vocab_size: int) -> list[float]:
        return logits(tokens, vocab_size)

    def batch(self, rows: Sequence[list[float]], vocab_size: int) -> Rows:
        return rows

    def logprobs(self, rows: Rows, token_ids: Sequence[int], num_logprobs: int) -> list[Sampled]:
        return [_report(row, token, num_logprobs) for row, token in zip(rows, token_ids, strict=False)]
