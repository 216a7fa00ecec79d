"""A short way for steps in which every sequence only decodes. It only saves time: the engine works without it.

In most steps every sequence runs its latest token, gets one more, and nothing else happens. The long way
(`Scheduler.schedule`, `StepWriter.write`, `Committer.commit`) then finds the same result for each sequence in every
step. The short way reuses the lane's latest plan unchanged:

- launch: each sequence whose last block is full gets a block, and nothing is done for the others. The filled slots of
  their tables, and the steps in which they held their blocks, follow from the number of steps. `settle` writes these
  down.
- commit: each sequence gets its token, appended by the committer.

Everything else takes the long way, after `stop`: a sequence that ends, a request that is admitted, too few blocks, an
abort, an error. So do steps with drafted tokens, and with drafts on, all steps while a request waits.
`Engine(steady=False)` takes the long way in every step. Both ways give the same steps, events, outputs and counts
(tests/engine/test_steady.py).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import NamedTuple

from minipaged.engine.batch import LaunchedStep, Plan, ScheduledRequest
from minipaged.engine.commit import Committer
from minipaged.engine.event_queue import EventQueue
from minipaged.engine.grammar import allowed_tokens
from minipaged.engine.invariants import check_exclusive_writes
from minipaged.engine.lanes import Lane
from minipaged.engine.launch import Launcher
from minipaged.engine.memory import Memory
from minipaged.engine.memory_use import memory_held
from minipaged.engine.run_ahead import assign_ahead
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.sequence import Request, RequestState, SequenceState
from minipaged.engine.stats import StepUsage
from minipaged.engine.step_writer import StepWriters
from minipaged.events import Emit, TokensComputed
from minipaged.outputs import CompletionUpdate, RequestUpdate


class Batch:
    """The sequences of a lane that go on decoding, each with one more token per step."""

    def __init__(self, plan: Plan, blocks: Memory, in_flight: int) -> None:
        """`plan`: the lane's latest plan. `in_flight`: how many of the lane's steps have tokens not known yet."""
        self.plan = plan
        self.needs_tokens = any(part.request.needs_tokens_on_host() for part in plan.scheduled)
        """Whether the host must know a step's tokens before it can write the next step."""
        self.steps_left = -in_flight + min(
            part.request.max_output_tokens - len(sequence.output_token_ids)
            for part in plan.scheduled
            for sequence, _ in part.work
        )
        """The number of steps that can still be launched; in the last of them a sequence reaches its length limit."""
        self.sequences = [sequence for sequence, _ in plan.work()]
        self.has_grammars = any(sequence.grammar for sequence in self.sequences)
        self.plain = [Plain.of(part) for part in plan.scheduled]
        self._blocks = blocks
        self._start = [sequence.table.num_tokens for sequence in self.sequences]
        self._num_launched = 0
        self._filled = [0] * len(self.sequences)  # the number of launched steps for which each table has slots
        self._failed_at = 0  # if a launch failed: sequences before this one have their slot
        self._due: defaultdict[int, list[int]] = defaultdict(list)  # launch -> the sequences that need a block then
        for i in range(len(self.sequences)):
            self._note_room(i)
        # The engine's steps in which they held blocks: their number, and the sum of `_num_launched` over them.
        self._held = (0, 0)
        self._noted = [(0, 0)] * len(self.sequences)  # the part of `_held` already counted in each sequence

    def _note_room(self, i: int) -> None:
        table = self.sequences[i].table
        room = len(table.blocks) * self._blocks.block_size - table.num_tokens
        self._due[self._filled[i] + room + 1].append(i)

    @property
    def num_due(self) -> int:
        """The number of blocks that the next step takes."""
        return len(self._due.get(self._num_launched + 1, ()))

    def advance(self, emit: Emit) -> None:
        """Take slots for one more step. If a block is missing, earlier sequences keep theirs, as on the long way."""
        launch, num_sequences = self._num_launched + 1, len(self.sequences)
        due = sorted(self._due.pop(launch, ()))
        try:
            if emit.heard:
                self._advance_heard(launch, {*due}, emit)
            else:
                for i in due:
                    self._failed_at = i
                    self._take_block(i, launch)
                self._blocks.num_tokens += num_sequences - len(due)
        except BaseException:
            if not emit.heard:
                self._blocks.num_tokens += self._failed_at - sum(i < self._failed_at for i in due)
            raise
        self._num_launched, self._failed_at = launch, 0
        self.steps_left -= 1

    def _advance_heard(self, launch: int, due: set[int], emit: Emit) -> None:
        for i, sequence in enumerate(self.sequences):
            self._failed_at = i
            if i in due:
                self._take_block(i, launch)
            else:
                self._blocks.num_tokens += 1
                emit(TokensComputed(sequence.sequence_id, self._start[i] + launch, (), 0))

    def _take_block(self, i: int, launch: int) -> None:
        self._fill(i, launch - 1)
        self._blocks.append(self.sequences[i], 1)
        self._filled[i] = launch
        self._note_room(i)

    def _fill(self, i: int, launch: int) -> None:
        """Take the table's slots for the first `launch` steps. They are all in its last block, so no block is taken."""
        if launch > self._filled[i]:
            self.sequences[i].table.append(launch - self._filled[i])
            self._filled[i] = launch

    def note_step(self) -> None:
        """Count a step of the engine, whether of this batch or of another lane."""
        num_steps, sum_launched = self._held
        self._held = num_steps + 1, sum_launched + self._num_launched

    def settle(self, i: int) -> None:
        """Bring sequence `i` up to date: the slots of its table, and its counts of steps."""
        self._fill(i, self._num_launched + (i < self._failed_at))
        (num_steps, sum_launched), (steps_noted, sum_noted) = self._held, self._noted[i]
        if new := num_steps - steps_noted:
            sequence = self.sequences[i]
            sequence.num_steps += new
            sequence.token_steps += new * self._start[i] + sum_launched - sum_noted
            self._noted[i] = self._held


class Steady:
    """The short way of one engine; it calls the engine's own parts for everything else."""

    def __init__(
        self,
        launcher: Launcher,
        committer: Committer,
        scheduler: Scheduler,
        blocks: Memory,
        writers: StepWriters,
        emit: EventQueue,
    ) -> None:
        self._launcher = launcher
        self._committer = committer
        self._scheduler = scheduler
        self._blocks = blocks
        self._writers = writers
        self._emit = emit
        scheduler.asked.settle = self.settle  # the policy may look at running requests
        self._batches: dict[int, Batch] = {}  # lane -> its batch
        self._latest: dict[int, Plan] = {}  # lane -> its latest plan, while a request runs there

    def settle(self) -> None:
        """Bring all sequences to the state in which the long way would have left them."""
        for batch in self._batches.values():
            for i in range(len(batch.sequences)):
                batch.settle(i)

    def stop(self) -> None:
        """Settle all sequences and forget batches and plans: something other than a step comes next."""
        self._pause()
        self._latest.clear()

    def _pause(self) -> None:
        """Settle all sequences and forget the batches, for a step that takes the long way.

        Lanes in which all sequences still decode then go on by their latest plans.
        """
        self.settle()
        self._batches.clear()

    # --- Launching --------------------------------------------------------------------------------

    def launch(self, ahead: Plan | None = None, lane: int = 0) -> LaunchedStep:
        """Launch a step. `ahead`: the plan that `assign_ahead` returned."""
        batch = self._batches.get(lane)
        if ahead is None:
            batch = self._going_on(lane, in_flight=0)
        elif batch is not None and ahead is not batch.plan:
            batch = None
        if batch is not None:
            return self._launch(batch)
        self._pause()
        step = self._launcher.launch(ahead, lane)
        self._latest[step.plan.lane] = step.plan
        return step

    def assign_ahead(self, lane: int, before: LaunchedStep | None = None) -> Plan | None:
        """Return the lane's next plan; None if it cannot be launched yet. `before`: the lane's step in flight."""
        if batch := self._going_on(lane, in_flight=int(before is not None)):
            if before and batch.needs_tokens:
                return None
            for sequence in batch.sequences if before and self._scheduler.waiting else ():
                sequence.pending = True  # the policy may look at running requests
            return batch.plan
        self.settle()
        scheduler = self._scheduler
        return assign_ahead(scheduler, before) if before else scheduler.assign_ahead(lane)

    def _going_on(self, lane: int, in_flight: int) -> Batch | None:
        """The lane's batch, if its next step can take the short way."""
        batch, scheduler = self._batches.get(lane), self._scheduler
        plan = batch.plan if batch else self._latest.get(lane)
        if plan is None or not (batch or _all_go_on(plan, scheduler.lanes[lane])):
            return None
        if scheduler.drafts and (scheduler.waiting or scheduler.drafts.any_for(plan)):
            return None
        if batch is None:
            batch = self._batches[lane] = Batch(plan, self._blocks, in_flight)
        if batch.steps_left <= 0 or self._writers.of(lane).has_news:
            return None
        num_due = batch.num_due
        return batch if num_due == 0 or num_due <= self._blocks.num_available else None

    def _launch(self, batch: Batch) -> LaunchedStep:
        launcher, plan = self._launcher, batch.plan
        started = launcher.begin()
        batch.advance(self._emit)
        if drafts := self._scheduler.drafts:
            for sequence in batch.sequences:
                drafts.note(sequence, 0, 0)
        if self._scheduler.waiting:
            plan = self._scheduler.admit(plan)
            if plan is not batch.plan:
                self._pause()
                plan.lay_out()
                self._latest[plan.lane] = plan
                return launcher.hand_over(plan, started)
        self._emit.step_scheduled(launcher.step_number, self._memory_held())
        if launcher.debug:
            self.settle()
            check_exclusive_writes(plan.work(), self._blocks)
        allowed = allowed_tokens(plan) if batch.has_grammars else ()
        step = self._writers.of(plan.lane).write_on(launcher.step_number, self._blocks.take_moves(), allowed)
        return LaunchedStep(step.number, started, plan, launcher.runner.run(step))

    def _memory_held(self) -> StepUsage:
        """The result of `memory_use.memory_held`. No two sequences share a last block, so all shared blocks are
        full."""
        num_sequences = 0
        for batch in self._batches.values():
            batch.note_step()
            num_sequences += len(batch.sequences)
        elsewhere = [lane.running for lane in self._scheduler.lanes if lane.number not in self._batches]
        return memory_held(chain.from_iterable(elsewhere), self._blocks, num_sequences)

    # --- Committing -------------------------------------------------------------------------------

    def commit(self, step: LaunchedStep) -> None:
        """Add the step's results to its requests."""
        batch = self._batches.get(step.plan.lane)
        if batch is None or batch.plan is not step.plan:
            self._committer.commit(step)
        elif self._commit(batch, step):
            self._pause()
        if not self._scheduler.lanes[step.plan.lane].running:
            self._latest.pop(step.plan.lane, None)  # an idle lane keeps no sequences

    def _commit(self, batch: Batch, step: LaunchedStep) -> bool:
        """Commit a step of the batch. Returns whether a sequence has ended."""
        blocks, committer, append_token = self._blocks, self._committer, self._committer.append_token
        publishes, block_size = blocks.prefix_cache is not None, blocks.block_size
        sampled = list(step.result.choices)  # this is where the host waits for the device
        ended = False
        for part, first, plain in zip(step.plan.scheduled, step.plan.first_choices, batch.plain, strict=True):
            if plain is not None:
                request, sequence, final_token_ids, last = plain
                choice, num_before = sampled[first], len(sequence.output_token_ids)
                begins_or_ends = not 0 < num_before < last or choice.token_id in final_token_ids
                if not (begins_or_ends or choice.error or sequence.finish_reason):
                    if publishes and (computed := len(sequence.tokens)) // block_size != sequence.num_published:
                        batch.settle(part.first_row)  # first, because filling a shared last block would copy it
                        blocks.publish(sequence, computed)
                    token = choice.token_id
                    append_token(request, sequence, token, choice.logprob)
                    if request.reads_along:  # as `Committer.report`, in half the time
                        sequence.num_reported += 1
                        news = CompletionUpdate(sequence.index, (token,), "", None, None, None)
                        committer.updates.append(RequestUpdate(request.request_id, (news,), None))
                    continue
            for i in range(part.first_row, part.first_row + len(part.work)):
                batch.settle(i)
            committer.commit_part(step, part, sampled[first : first + part.num_sampled])
            ended |= part.request.state is RequestState.FINISHED or any(s.finish_reason for s, _ in part.work)
        return ended


def _all_go_on(plan: Plan, lane: Lane) -> bool:
    """Whether all requests that run in the lane decode by this plan, in order of arrival."""
    if not all(part.decodes and part.num_choices == 1 for part in reversed(plan.scheduled)):
        return False
    if not plan.scheduled or [part.request for part in plan.scheduled] != lane.running:
        return False
    return all(
        len(part.work) == len(part.request.sequences) and not any(s.most_computed for s, _ in part.work)
        for part in plan.scheduled
    )


class Plain(NamedTuple):
    """A sequence whose next token is only appended and reported: it has no text, logprobs, grammar or siblings."""

    request: Request
    sequence: SequenceState
    final_token_ids: frozenset[int]
    last: int
    """The number of its output tokens when its length allows just one more."""

    @classmethod
    def of(cls, part: ScheduledRequest) -> Plain | None:
        request, (sequence, _) = part.request, part.work[0]
        if len(part.work) > 1 or request.beam_search or sequence.detokenizer or sequence.logprobs is not None:
            return None
        if sequence.grammar:
            return None
        return cls(request, sequence, request.final_token_ids, request.max_output_tokens - 1)
