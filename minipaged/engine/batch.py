"""The plan of one step (which sequences run, and how many tokens each), and the step that is carrying it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from minipaged.contracts import StepResult
from minipaged.engine.sequence import Request, Sequence
from minipaged.steps import LOGITS, Row


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request's part of a step."""

    request: Request
    work: list[tuple[Sequence, int]]
    """Each of its sequences that runs, with its number of query tokens."""
    completes: bool
    """Whether every sequence of the request then has all its tokens computed, so that the next can be chosen."""
    num_query_tokens: int = field(init=False)
    first_row: int = 0
    """Its rows and its logits begin there (`Plan.lay_out`), if it is not `plain`."""
    first_logits: int = 0
    num_choices: int = 0
    """How many tokens are chosen for each of its sequences that runs, as in `steps.Row`."""
    plain: Sequence | None = None
    """The one sequence that decodes, if what it chooses is only appended to its tokens and reported: no text, no
    logprobs, no beams. What that takes stands together here: `request_id`, and so on. A part that has it stays as it
    is, and is a part of many plans (`DecodingParts`)."""
    request_id: str = ""
    final_token_ids: frozenset[int] = frozenset()
    reads_along: bool = False
    needs_tokens: bool = False
    """Whether how its next token is chosen goes by those before."""
    last: int = 0
    """How many tokens its output has before the last one that its length allows."""

    def __post_init__(self) -> None:
        self.num_query_tokens = sum(num_tokens for _, num_tokens in self.work)

    @property
    def decodes(self) -> bool:
        """Whether all that it runs is the latest token of each of its sequences."""
        return self.completes and self.num_query_tokens == len(self.work)

    def choices(self) -> int:
        """What `num_choices` is now."""
        if not self.completes:
            return 0
        if self.request.beam_search is not None:
            return LOGITS
        return 1 if self.request.prompt_computed else self.request.num_sequences


class DecodingParts:
    """The parts of requests whose sequences run their latest tokens, and no more.

    A request of one sequence, of which nobody asks for more than its tokens, decodes for hundreds of steps, and many of
    them are planned anew, because others come and go. So its part is `plain`, and kept.
    """

    def __init__(self) -> None:
        self._plain: dict[Request, ScheduledRequest] = {}

    def of(self, request: Request) -> ScheduledRequest | None:
        """None if it has more to run, or nothing."""
        kept = self._plain.get(request)
        if kept and kept.plain and kept.plain.num_remaining == 1:
            return kept
        work = request.remaining()
        if not work or any(num_tokens > 1 for _, num_tokens in work):
            return None
        part = ScheduledRequest(request, work, completes=True)
        told_of_prompt = request.prompt_logprobs is not None and not request.prompt_computed
        if request.sampling is not None and request.is_plain and part.choices() == 1 and not told_of_prompt:
            [(part.plain, _)], part.num_choices = work, 1
            part.request_id, part.reads_along = request.request_id, request.reads_along
            part.final_token_ids, part.last = request.final_token_ids, request.max_output_tokens - 1
            part.needs_tokens = request.sampling.needs_tokens
            self._plain[request] = part
        return part

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._plain.pop(request, None)


@dataclass(slots=True, eq=False)
class Plan:
    """What one step runs; and, as long as all of it only goes on decoding, what the steps after it run.

    The block moves that go before a step are with the block manager.
    """

    scheduled: list[ScheduledRequest]
    lane: int = 0
    num_query_tokens: int = field(init=False)
    rows: list[Row] = field(default_factory=list)
    """What the runner is to compute in the first of these steps."""
    first_choices: list[int] = field(default_factory=list)
    """Of those chosen in the step, where the tokens for each of `scheduled` begin."""
    decoding: list[Sequence] = field(default_factory=list)
    """All sequences of the plan, if all that it runs is their latest tokens and it may be used again."""
    needs_tokens: bool = False
    """Whether the step after one of these takes more of its tokens than the device knows."""
    num_steps: int = 0
    """In so many steps of the engine they have held blocks by this plan, and `count_steps` has yet to note it."""
    num_more: int = 0
    """So many tokens more than in the first of these steps each of them holds now, and `sum_more`, the same summed
    over the steps: one more with each step, but for those of other lanes."""
    sum_more: int = 0
    steps_left: int = 0
    """In so many steps by this plan, the latest that was launched among them, no sequence ends by its length."""

    def __post_init__(self) -> None:
        self.num_query_tokens = sum(scheduled.num_query_tokens for scheduled in self.scheduled)

    def joined_by(self, others: list[ScheduledRequest]) -> Plan:
        """A plan with others beside these. A step by this one may be in flight, so it stays as it is."""
        these = [one if one.plain else ScheduledRequest(one.request, one.work, one.completes) for one in self.scheduled]
        return Plan([*these, *others], self.lane)

    def lay_out(self, num_running: int) -> None:
        """Give each request its rows, choices and logits. Their slots are there already.

        `num_running`: how many sequences run in its lane, in this step or not.
        """
        self.decoding = []
        self.rows = rows = []
        self.first_choices = first_choices = []
        num_choices_before = num_logits = 0
        for scheduled in self.scheduled:
            first_choices.append(num_choices_before)
            if sequence := scheduled.plain:
                rows.append(Row(sequence.sequence_id, sequence.table.num_tokens - 1, 1, 1))
                num_choices_before += 1
                num_logits += 1
                continue
            scheduled.num_choices = num_choices = scheduled.choices()
            scheduled.first_row, scheduled.first_logits = len(rows), num_logits
            for sequence, num_tokens in scheduled.work:
                rows.append(Row(sequence.sequence_id, sequence.num_computed - num_tokens, num_tokens, num_choices))
            num_choices_before += len(scheduled.work) * max(0, num_choices)
            num_logits += len(scheduled.work) if num_choices else 0
        if rows and len(rows) == num_running:
            self._note_whether_it_goes_on()

    def _note_whether_it_goes_on(self) -> None:
        left: list[int] = []
        latest = -1
        for scheduled in self.scheduled:
            request = scheduled.request
            if request.order < latest:
                return  # those that ran with others before them have their places in the next step
            latest = request.order
            if sequence := scheduled.plain:
                self.needs_tokens |= scheduled.needs_tokens and request.needs_tokens_on_host()
                left.append(scheduled.last + 1 - len(sequence.output_token_ids) - sequence.pending)
                continue
            if not scheduled.decodes or scheduled.num_choices != 1:
                return
            self.needs_tokens |= request.needs_tokens_on_host()
            for sequence, _ in scheduled.work:
                left.append(request.max_output_tokens - len(sequence.output_token_ids) - sequence.pending)
        self.steps_left = min(left)
        self.decoding = [sequence for scheduled in self.scheduled for sequence, _ in scheduled.work]

    def note_step(self, *, runs: bool) -> None:
        """The engine makes a step, by this plan (`runs`) or by that of another lane."""
        self.num_more += runs and self.num_steps > 0
        self.num_steps += 1
        self.sum_more += self.num_more

    def count_steps(self) -> None:
        """Note the steps in which its sequences have held blocks.

        To be called before it is known how one of them ends, and not again.
        """
        n, more, self.num_steps = self.num_steps, self.num_steps + self.sum_more, 0
        for sequence, (_, start, _, _) in zip(self.decoding, self.rows, strict=True):
            sequence.num_steps += n
            sequence.token_steps += n * start + more

    def work(self) -> Iterator[tuple[Sequence, int]]:
        """The sequence of each row, and how many tokens it runs."""
        return (one for scheduled in self.scheduled for one in scheduled.work)

    def owners(self) -> Iterator[tuple[Request, Sequence]]:
        """The request and the sequence of each row."""
        return ((scheduled.request, sequence) for scheduled in self.scheduled for sequence, _ in scheduled.work)


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that the runner was given. It is *in flight* until the engine commits it: fetches its tokens."""

    number: int
    started: float
    plan: Plan
    result: StepResult
