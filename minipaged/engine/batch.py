"""The plan of one step (which sequences run, and how many tokens each), and the step that is carrying it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from minipaged.contracts import StepResult
from minipaged.engine.sequence import Request, Sequence
from minipaged.steps import LOGITS, Row


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step."""

    request: Request
    work: list[tuple[Sequence, int]]
    """Each of its sequences that runs, with its number of query tokens (slots are there already)."""
    completes: bool
    """Whether every sequence of the request then has all its tokens computed, so that the next can be chosen."""

    @property
    def num_query_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.work)

    @property
    def decodes(self) -> bool:
        """Whether all that it runs is the latest token of each of its sequences."""
        return self.completes and self.num_query_tokens == len(self.work)

    @property
    def num_choices(self) -> int:
        """How many tokens are chosen for each of its sequences that runs, as in `steps.Row`."""
        if not self.completes:
            return 0
        if self.request.beam_search is not None:
            return LOGITS
        return 1 if self.request.prompt_computed else self.request.num_sequences

    def rows(self) -> list[Row]:
        """What the runner is to compute."""
        return [
            Row(sequence.sequence_id, sequence.num_computed - num_tokens, num_tokens, self.num_choices)
            for sequence, num_tokens in self.work
        ]


@dataclass(slots=True)
class Plan:
    """What one step runs. The block moves that go before it are with the block manager."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def rows(self) -> list[Row]:
        return [row for scheduled in self.scheduled for row in scheduled.rows()]

    def owners(self) -> Iterator[tuple[Request, Sequence]]:
        """The request and the sequence of each row."""
        return ((scheduled.request, sequence) for scheduled in self.scheduled for sequence, _ in scheduled.work)

    @property
    def num_query_tokens(self) -> int:
        return sum(scheduled.num_query_tokens for scheduled in self.scheduled)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step that the runner was given. It is *in flight* until the engine commits it: fetches its tokens."""

    number: int
    started: float
    plan: Plan
    rows: list[Row]
    result: StepResult
    logit_rows: dict[Sequence, int]
    """Where the logits of sequences are for which none is chosen: beams."""
    choices: dict[Request, range]
    """Which of the result's choices are a request's: one for each of its sequences that ran, in their order; `n` from a
    prompt."""
