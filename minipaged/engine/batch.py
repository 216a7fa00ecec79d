"""The plan of one step (which sequences run, and how many tokens each), and the step that is carrying it out."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from minipaged.contracts import BatchRow, Logits, Sampled
from minipaged.engine.sequence import Request, Sequence


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

    def rows(self) -> list[BatchRow]:
        """What the runner is to compute."""
        rows: list[BatchRow] = []
        for sequence, num_tokens in self.work:
            stop = sequence.num_computed
            start = stop - num_tokens
            rows.append(
                BatchRow(
                    token_ids=sequence.query_tokens(start, stop),
                    first_position=start,
                    table=sequence.table,
                    wants_logits=self.completes,
                )
            )
        return rows


@dataclass(slots=True)
class Plan:
    """What one step runs. The block moves that go before it are with the block manager."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def batch(self) -> list[BatchRow]:
        return [row for scheduled in self.scheduled for row in scheduled.rows()]

    @property
    def num_query_tokens(self) -> int:
        return sum(scheduled.num_query_tokens for scheduled in self.scheduled)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step that the runner was given. It is *in flight* until the engine commits it: fetches its tokens."""

    number: int
    started: float
    plan: Plan
    batch: list[BatchRow]
    logits: Logits
    logit_rows: dict[Sequence, int]
    samples: ListLike[Sampled]
    sample_indices: dict[Request, range]
    """Which of `samples` are a request's: one for each of its sequences that ran, in their order; `n` from a prompt."""
