"""A model and its draft model, as one runner (speculative decoding with a draft model).

    StepInput ──► draft model   runs all query tokens, and makes k + 1 guesses: k + 1 passes
                  model         runs all query tokens and the first k guesses: one pass
                  verify        chooses the tokens that stand, and one more

**The draft model's keys and values lie in the blocks of the model's.** Block b of the pool is a piece of the model's
cache and a piece of the draft model's, and both caches make the same moves. So there is one block table for both, and
whatever happens to a block happens to both parts: a fork shares them, copy-on-write copies them, a swap, a hit in the
prefix cache and a connector take them along.

**The draft model runs whatever the model runs**, also in a step that drafts nothing. So after each step a slot has the
K/V of both models or of neither, and no step must find out what the draft model has missed. The price is one pass more:
the last drafted token is run, too, for its K/V. That pass also guesses the next token. The model does not run this
guess, but `verify` accepts or refuses it (`reference/speculation.py`). So the draft model guesses at every position,
and the tokens of a seed do not depend on how many are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minipaged.contracts import (
    Batch,
    BatchRow,
    Draft,
    Logits,
    Runner,
    Sampled,
    SamplingInput,
    StepResult,
    VerifyFunction,
)
from minipaged.mirror import Mirror, PerLane
from minipaged.params import SamplingParams
from minipaged.scheduling import Costs
from minipaged.steps import TO_DRAFT, Begun, BlockMoves, Row, Sampling, StepInput


@dataclass(slots=True)
class _Guesses:
    """The draft model's guesses for one sequence, or for one of a prompt's samples."""

    row: Row
    first: SamplingInput
    """The input that chooses the sequence's next token."""
    token_ids: list[int] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    """For each guess, the logits [vocab] that it was drawn from."""


class DraftedRunner(Runner):
    """Runs steps on a model with guesses of a smaller one.

    `model`, `draft_model`: a tier's Llamas, with caches of the same numbers of blocks. `verify`: that of the tier.
    """

    def __init__(self, model: Any, draft_model: Any, verify: VerifyFunction) -> None:
        self.mirrors = PerLane(Mirror)
        self.mirror = Mirror()
        """The mirror of the lane whose step is being run."""
        self.model = model
        self.draft_model = draft_model
        self._verify = verify

    def run(self, step: StepInput) -> StepResult:
        self.mirror = self.mirrors.of(step)
        self.mirror.apply(step)
        self.move(step.moves)
        guesses = self._guess()
        drafted = {one.row.sequence: tuple(one.token_ids[:-1]) for one in guesses if one.row.drafted}
        self.mirror.fill_in(drafted)
        logits = self.model.forward(self.mirror.batch())
        choices = self._choose(logits, guesses)
        self.mirror.chosen(choices)
        return StepResult(choices, logits, self.model.prompt_logprobs(self.mirror.prompt_inputs), drafted)

    def warm_up(self) -> None:
        """Draw, and verify what is drawn, so that kernels compile now. The caches must be unused."""
        sampling = Sampling(SamplingParams(temperature=1), seed=0, stream=0)
        begun = Begun(0, (0,), prompt_length=1, blocks=(0, 0), sampling=sampling)
        row = Row(0, 0, 2, num_choices=1, drafted=(TO_DRAFT,))
        self.run(StepInput(0, fresh=True, begun=(begun,), added=(row,)))

    def _guess(self) -> list[_Guesses]:
        """Run the draft model on the step's tokens, and let it guess those to draft and one more."""
        inputs, rows = iter(self.mirror.sampling_inputs()), list(self.mirror.rows)
        batch = [
            replace(
                each,
                token_ids=each.token_ids[: row.num_tokens - len(row.drafted)],
                wants_logits=row.num_choices > 0,
                num_prompt_logits=0,
                num_drafted=0,
            )
            for row, each in zip(rows, self.mirror.batch(), strict=True)
        ]
        guesses, places = list[_Guesses](), list[int]()
        for place, row in enumerate(row for row in rows if row.num_choices > 0):
            firsts = [next(inputs) for _ in range(row.num_chosen)]
            guesses += [_Guesses(row, first) for first in firsts[: row.num_choices]]
            places += [place] * row.num_choices
        blocks = {row.sequence: each.blocks for row, each in zip(rows, batch, strict=True)}
        self._draw(batch, guesses, places)
        number = 0  # of drafted tokens that have run
        while going := [one for one in guesses if len(one.row.drafted) > number]:
            starts = [one.row.stop - len(one.row.drafted) + number for one in going]
            rows_of = zip(going, starts, strict=True)
            batch = [
                BatchRow(one.token_ids[-1:], at, blocks[one.row.sequence], wants_logits=True) for one, at in rows_of
            ]
            self._draw(batch, going, range(len(going)))
            number += 1
        return guesses

    def _draw(self, batch: Batch, guesses: Sequence[_Guesses], places: Sequence[int]) -> None:
        """Run a pass of the draft model. `places`: for each of the guesses to extend, its row of the pass's logits."""
        logits = self.draft_model.forward(batch)
        drawn = self.draft_model.sample(logits, [self._input(one, at) for one, at in zip(guesses, places, strict=True)])
        for one, place, sampled in zip(guesses, places, drawn, strict=True):
            one.token_ids.append(sampled.token_id)
            one.logits.append(logits[place])

    def _input(self, guesses: _Guesses, place: int) -> SamplingInput:
        """The input that chooses the next guess."""
        first, sampling = guesses.first, self.mirror.sequences[guesses.row.sequence].sampling
        assert sampling is not None
        if not guesses.token_ids:
            return replace(first, row=place)
        output = [*first.output_token_ids, *guesses.token_ids]
        return replace(first, row=place, output_token_ids=output, forbidden_token_ids=sampling.forbidden_after(output))

    def _choose(self, logits: Logits, guesses: Sequence[_Guesses]) -> list[Sampled]:
        """Choose all tokens of the step; those after the first that differs from its guess have no meaning."""
        inputs = iter(self.mirror.sampling_inputs())
        drafts = [Draft(one.token_ids, [next(inputs) for _ in one.token_ids]) for one in guesses]
        is_drawn = any(one.first.params.temperature > 0 for one in guesses)
        drawn_from = [row for one in guesses for row in one.logits] if is_drawn else None
        chosen = self._verify(logits, drafts, drawn_from)
        missing = [len(draft.inputs) - len(each) for draft, each in zip(drafts, chosen, strict=True)]
        return [one for each, n in zip(chosen, missing, strict=True) for one in [*each, *[each[-1]] * n]]

    # --- Both caches ------------------------------------------------------------------------------

    def move(self, moves: BlockMoves) -> None:
        if not moves.load:
            self.model.move(moves)
            self.draft_model.move(moves)
            return
        size = self.model.kv_cache.block_bytes
        self.model.move(moves._replace(load=tuple((block, content[:size]) for block, content in moves.load)))
        self.draft_model.move(moves._replace(load=tuple((block, content[size:]) for block, content in moves.load)))

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        return _joined(self.model.read_blocks(blocks), self.draft_model.read_blocks(blocks))

    def read_host_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        return _joined(self.model.read_host_blocks(blocks), self.draft_model.read_host_blocks(blocks))

    def costs(self) -> Costs:
        """The costs of both models' parts of a block together."""
        one: Costs = self.model.costs()
        other: Costs = self.draft_model.costs()
        seconds_per_token = 1 / one.prefill_tokens_per_second + 1 / other.prefill_tokens_per_second
        return replace(
            one,
            copies_per_block=one.copies_per_block + other.copies_per_block,
            block_bytes=one.block_bytes + other.block_bytes,
            prefill_tokens_per_second=1 / seconds_per_token,
        )


def _joined(parts: Sequence[bytes], others: Sequence[bytes]) -> list[bytes]:
    return [part + other for part, other in zip(parts, others, strict=True)]
