"""The plan of one step (which sequences run, and how many tokens each), and the launched step that carries it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from minipaged.contracts import StepResult
from minipaged.engine.sequence import Request, SequenceState
from minipaged.steps import LOGITS, Row


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request's part of a step."""

    request: Request
    work: list[tuple[SequenceState, int]]
    """The sequences that run, each with its number of query tokens."""
    completes: bool
    """Whether all tokens of all its sequences are computed after this step, so that the next ones can be chosen."""
    drafts: Mapping[int, tuple[int, ...]] | None = None
    """The drafted tokens of its sequences (or TO_DRAFT), by sequence number; `work` counts them. None if none are
    drafted."""
    num_query_tokens: int = field(init=False)
    first_row: int = 0
    """The index of its first row in the plan (set by `Plan.lay_out`)."""
    first_logits: int = 0
    """The index of its first row of logits."""
    num_choices: int = 0
    """The number of tokens to choose for each of its sequences that runs, as in `steps.Row`."""

    def __post_init__(self) -> None:
        self.num_query_tokens = sum(num_tokens for _, num_tokens in self.work)

    @property
    def decodes(self) -> bool:
        """Whether it runs only the latest token of each of its sequences, and no drafts."""
        return self.completes and self.num_query_tokens == len(self.work)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the step chooses for it."""
        num_drafted = sum(map(len, self.drafts.values())) if self.drafts else 0
        return len(self.work) * max(0, self.num_choices) + num_drafted

    def drafted(self, sequence: SequenceState) -> tuple[int, ...]:
        """The tokens that are drafted for one of its sequences."""
        return self.drafts.get(sequence.sequence_id, ()) if self.drafts else ()

    def choices(self) -> int:
        """Compute `num_choices`."""
        if not self.completes:
            return 0
        if self.request.beam_search is not None:
            return LOGITS
        return 1 if self.request.prompt_computed else self.request.num_sequences


@dataclass(slots=True, eq=False)
class Plan:
    """The work of one step. (The block manager has the block moves that precede it.)"""

    scheduled: list[ScheduledRequest]
    lane: int = 0
    num_query_tokens: int = field(init=False)
    rows: list[Row] = field(default_factory=list)
    """The rows that the runner computes."""
    first_choices: list[int] = field(default_factory=list)
    """The index, for each of `scheduled`, of its first token among those that the step chooses."""

    def __post_init__(self) -> None:
        self.num_query_tokens = sum(scheduled.num_query_tokens for scheduled in self.scheduled)

    def lay_out(self) -> None:
        """Give each request its rows, choices and logits. Its slots have already been taken."""
        num_choices_before = num_logits = 0
        for scheduled in self.scheduled:
            self.first_choices.append(num_choices_before)
            scheduled.num_choices = num_choices = scheduled.choices()
            scheduled.first_row, scheduled.first_logits = len(self.rows), num_logits
            for sequence, num_tokens in scheduled.work:
                start = sequence.num_computed - num_tokens
                self.rows.append(Row(sequence.sequence_id, start, num_tokens, num_choices, scheduled.drafted(sequence)))
            num_choices_before += scheduled.num_sampled
            num_logits += scheduled.num_sampled if scheduled.drafts else len(scheduled.work) if num_choices else 0

    def work(self) -> Iterator[tuple[SequenceState, int]]:
        """The sequence of each row, with its number of tokens."""
        return (one for scheduled in self.scheduled for one in scheduled.work)

    def owners(self) -> Iterator[tuple[Request, SequenceState]]:
        """The request and the sequence of each row."""
        return ((scheduled.request, sequence) for scheduled in self.scheduled for sequence, _ in scheduled.work)


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that the runner has received. It is *in flight* until the engine commits it, which fetches its tokens."""

    number: int
    started: float
    plan: Plan
    result: StepResult
