"""The plan of one step (which sequences run, and how many tokens each), and the step that is carrying it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from minipaged.contracts import StepResult
from minipaged.engine.sequence import Request, SequenceState
from minipaged.steps import LOGITS, Row


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request's part of a step."""

    request: Request
    work: list[tuple[SequenceState, int]]
    """Each of its sequences that runs, with its number of query tokens."""
    completes: bool
    """Whether every sequence of the request then has all its tokens computed, so that the next can be chosen."""
    num_query_tokens: int = field(init=False)
    first_row: int = 0
    """Its rows and its logits begin there (`Plan.lay_out`)."""
    first_logits: int = 0
    num_choices: int = 0
    """How many tokens are chosen for each of its sequences that runs, as in `steps.Row`."""

    def __post_init__(self) -> None:
        self.num_query_tokens = sum(num_tokens for _, num_tokens in self.work)

    @property
    def decodes(self) -> bool:
        """Whether all that it runs is the latest token of each of its sequences."""
        return self.completes and self.num_query_tokens == len(self.work)

    @property
    def num_sampled(self) -> int:
        """How many tokens the step chooses for it."""
        return len(self.work) * max(0, self.num_choices)

    def choices(self) -> int:
        """What `num_choices` is now."""
        if not self.completes:
            return 0
        if self.request.beam_search is not None:
            return LOGITS
        return 1 if self.request.prompt_computed else self.request.num_sequences


@dataclass(slots=True, eq=False)
class Plan:
    """What one step runs. (The block moves that go before it are with the block manager.)"""

    scheduled: list[ScheduledRequest]
    lane: int = 0
    num_query_tokens: int = field(init=False)
    rows: list[Row] = field(default_factory=list)
    """What the runner is to compute."""
    first_choices: list[int] = field(default_factory=list)
    """Of those chosen in the step, where the tokens for each of `scheduled` begin."""

    def __post_init__(self) -> None:
        self.num_query_tokens = sum(scheduled.num_query_tokens for scheduled in self.scheduled)

    def lay_out(self) -> None:
        """Give each request its rows, choices and logits. Their slots are there already."""
        num_choices_before = num_logits = 0
        for scheduled in self.scheduled:
            self.first_choices.append(num_choices_before)
            scheduled.num_choices = num_choices = scheduled.choices()
            scheduled.first_row, scheduled.first_logits = len(self.rows), num_logits
            for sequence, num_tokens in scheduled.work:
                start = sequence.num_computed - num_tokens
                self.rows.append(Row(sequence.sequence_id, start, num_tokens, num_choices))
            num_choices_before += scheduled.num_sampled
            num_logits += len(scheduled.work) if num_choices else 0

    def work(self) -> Iterator[tuple[SequenceState, int]]:
        """The sequence of each row, and how many tokens it runs."""
        return (one for scheduled in self.scheduled for one in scheduled.work)

    def owners(self) -> Iterator[tuple[Request, SequenceState]]:
        """The request and the sequence of each row."""
        return ((scheduled.request, sequence) for scheduled in self.scheduled for sequence, _ in scheduled.work)


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that the runner was given. It is *in flight* until the engine commits it: fetches its tokens."""

    number: int
    started: float
    plan: Plan
    result: StepResult
