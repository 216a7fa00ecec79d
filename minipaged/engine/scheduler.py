"""The scheduler: the queues, and how a step comes about (paper, sections 4.3 and 4.5).

Decided anew at every step (continuous batching). What there is to decide, the policy decides (`policy.py`: first come,
first served); it is asked only where its answer makes a difference, and what it answers is checked here:

1. Every running request gets its tokens: all that it has to run, if one batch has so many, else what the policy gives
   it (`share_tokens`). Those that decode come first in the batch.
2. While the blocks for that are not there, the policy names a victim (`victim`), and how it is to come back
   (`way_back`). All sequences of a request go together: all or nothing.
3. If nobody was preempted, those that the policy names (`admit`) come in: into a batch with room for them, and when
   their blocks are there. NEVER is said when a request arrives, so none waits for what cannot happen.

With asynchronous scheduling a plan may be made while the step before it is in flight (`assign_ahead`). Its decoding
sequences then run a token that is being chosen; those that end with that token by their length are left out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from minipaged.contracts import Runner
from minipaged.engine.asked_policy import AskedPolicy
from minipaged.engine.batch import Plan, ScheduledRequest
from minipaged.engine.memory import Memory
from minipaged.engine.sequence import Request, RequestState
from minipaged.events import Emit, RequestAdmitted, RequestPreempted
from minipaged.params import EngineConfig
from minipaged.scheduling import MakePolicy, Policy


class Scheduler:
    """The queues of one engine. `waiting` and `running` are both in order of arrival."""

    def __init__(self, config: EngineConfig, blocks: Memory, runner: Runner, emit: Emit, policy: MakePolicy) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.asked = AskedPolicy(policy, config, blocks, runner)
        self._going_on: Plan | None = None
        """The latest plan, if the next step may go by it too, because all that ran goes on decoding. `schedule` keeps
        it; whatever changes a queue or the sequences of a request drops it (`plan_anew`)."""
        self._blocks = blocks
        self._emit = emit
        self._max_tokens = config.max_num_batched_tokens
        # A sequence that runs takes one token of each batch at least.
        self.max_sequences = min(config.max_num_seqs, config.max_num_batched_tokens)

    @property
    def policy(self) -> Policy:
        """Whom the decisions are left to. May be replaced by another between two steps."""
        return self.asked.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.asked.policy = policy

    # --- The queues -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a new request wait: the latest arrival is the last."""
        self.waiting.append(request)
        self.asked.queues_changed(())

    def remove(self, request: Request) -> None:
        """It has ended, wherever it is."""
        (self.running if request.state is RequestState.RUNNING else self.waiting).remove(request)
        self._moved(request)

    def _wait(self, request: Request, state: RequestState) -> None:
        """It ran, and waits now, in its place in the order of arrival."""
        self.running.remove(request)
        insort(self.waiting, request, key=_order)
        request.state = state
        self._moved(request)

    def _run(self, request: Request) -> None:
        """It waited, and runs now."""
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        request.state = RequestState.RUNNING
        self._moved(request)

    def _moved(self, *requests: Request) -> None:
        self.asked.queues_changed(requests)
        self.plan_anew()

    def plan_anew(self) -> None:
        """What has run will not go on as it is: the next step needs a plan of its own."""
        if self._going_on:
            self._going_on.count_steps()
            self._going_on = None

    def let_all_wait(self, requests: Iterable[Request]) -> list[Request]:
        """After an error: all of these wait, whatever the queues were. Returns them in order of arrival."""
        self.waiting, self.running = sorted(requests, key=_order), []
        self._moved(*self.waiting)
        return list(self.waiting)

    # --- One step ---------------------------------------------------------------------------------

    def schedule(self, ahead: Plan | None = None) -> Plan:
        """Decide the next step and take the blocks for it. `ahead`: what `assign_ahead` has decided already.

        The same plan as for the step before if all that ran only goes on.
        """
        plan, preempted = ahead or self._assign(), False
        while ahead is None and (short := self._blocks_short(plan)) > 0:
            self._preempt(short)
            preempted = True
            plan = self._assign()
        self._take_blocks(plan)
        if self.waiting and not preempted:
            plan = self._admit(plan)
        if not plan.scheduled and self.waiting:
            self.asked.stuck(self.waiting)
        if plan is not self._going_on:
            plan.lay_out(sum(len(request.sequences) for request in self.running))
            self.plan_anew()
            self._going_on = plan if plan.decoding else None
        plan.steps_left -= 1
        return plan

    def assign_ahead(self) -> Plan | None:
        """What runs after the step in flight. None if nothing can before that is committed: for want of blocks (its
        tokens may free some, and nothing in flight is preempted), or because all that runs may end with it."""
        plan = self._assign()
        return None if self._blocks_short(plan) > 0 or not plan.scheduled else plan

    # --- 1. Tokens for those that run -------------------------------------------------------------

    def _assign(self) -> Plan:
        """What each running request runs: first those that decode, then the others, both in order of arrival. The plan
        of the step before, if they all go on by it."""
        if self._going_on and self._going_on.steps_left > 0:
            return self._going_on
        decoding: list[ScheduledRequest] = []
        behind: list[ScheduledRequest] = []
        num_tokens = 0
        for request in self.running:
            work = request.remaining()
            if any(n > 1 for _, n in work):  # prompts, and what was dropped
                behind.append(self._whole(request))
                num_tokens += behind[-1].num_query_tokens
            elif work:
                decoding.append(ScheduledRequest(request, work, completes=True))
                num_tokens += len(work)
        wholes = decoding + behind
        if num_tokens <= self._max_tokens:
            return Plan(wholes)
        given = self.asked.share_tokens(self.running, wholes)
        parts = (self._part(whole, given.get(whole.request.request_id, 0)) for whole in wholes)
        return Plan([part for part in parts if part.work])

    def _whole(self, request: Request) -> ScheduledRequest:
        """All that the request could run in one step, however large.

        The last tokens of all its sequences run in the same step, because the next tokens are chosen together.
        After recomputation siblings catch up one after another, so that each can share what the one before computed.
        """
        for sequence in request.sequences:
            if sequence.num_computed == 0:
                self._blocks.begin(request, sequence)
            if sequence.num_remaining > 1:
                break
        work = request.remaining()
        behind = [(sequence, n) for sequence, n in work if n > 1]
        if len(behind) <= 1:
            return ScheduledRequest(request, work, completes=True)
        sequence, n = behind[0]
        return ScheduledRequest(request, [(sequence, n - 1)], completes=False)

    def _part(self, whole: ScheduledRequest, num_tokens: int) -> ScheduledRequest:
        """So many tokens of it: all; or a chunk of its first sequence that is behind; or, if none is, nothing."""
        if whole.num_query_tokens <= num_tokens:
            return whole
        behind = [(sequence, n) for sequence, n in whole.request.remaining() if n > 1]
        chunk = [(sequence, min(n - 1, num_tokens)) for sequence, n in behind[:1] if num_tokens > 0]
        return ScheduledRequest(whole.request, chunk, completes=False)

    # --- 2. The blocks for them, and preemption ---------------------------------------------------

    def _blocks_short(self, plan: Plan) -> int:
        """How many blocks are missing to run this; 0 or less if none."""
        available = self._blocks.num_available
        most = plan.num_query_tokens  # a token takes one block at most: if there are so many, there is no need to count
        if most <= available:
            return most - available
        return sum(self._blocks.blocks_needed(scheduled.work) for scheduled in plan.scheduled) - available

    def _take_blocks(self, plan: Plan) -> None:
        if plan.decoding:
            self._blocks.append_one_each(plan.decoding)
            return
        for scheduled in plan.scheduled:
            for sequence, num_tokens in scheduled.work:
                self._blocks.append(sequence, num_tokens)

    def _preempt(self, short: int) -> None:
        """Take all blocks from the one that the policy names."""
        victim = self.asked.victim(self.running)
        way = self.asked.way_back(victim)
        filled = victim.filled_slots(self._blocks.block_size)
        self._emit(RequestPreempted(victim.request_id, way, len(filled), sum(filled.values()), short))
        victim.num_preemptions += 1
        if way == "swap":
            self._blocks.swap_out(victim)
            self._wait(victim, RequestState.SWAPPED)
        else:
            for sequence in victim.sequences:
                self._blocks.free(sequence)
            self._wait(victim, RequestState.WAITING)

    # --- 3. Admission -----------------------------------------------------------------------------

    def _admit(self, plan: Plan) -> Plan:
        """Let in whom the policy names, until it names nobody: once somebody is in, others may need less.

        Returns the plan with those who have come in.
        """
        admitted: list[ScheduledRequest] = []
        tokens_left = self._max_tokens - plan.num_query_tokens
        while self.waiting and tokens_left > 0 and (entering := self._entering(tokens_left)):
            for request in entering:
                if request.state is RequestState.SWAPPED:
                    self._blocks.swap_in(request)
                else:
                    num_tokens = sum(len(sequence.tokens) for sequence in request.sequences)
                    num_looked_up = num_tokens if self._blocks.prefix_cache and request.reads_prefix_cache else 0
                    self._emit(RequestAdmitted(request.request_id, num_looked_up))
                self._run(request)
                scheduled = self._part(self._whole(request), tokens_left)
                if request.num_cached_tokens is None:
                    request.num_cached_tokens = request.sequences[0].num_computed
                if scheduled.work:
                    for sequence, num_tokens in scheduled.work:
                        self._blocks.append(sequence, num_tokens)
                    admitted.append(scheduled)
                    tokens_left -= scheduled.num_query_tokens
        return plan.joined_by(admitted) if admitted else plan

    def _entering(self, tokens_left: int) -> list[Request]:
        room = self.max_sequences - sum(request.num_sequences for request in self.running)
        return self.asked.admit(self.waiting, self.running, room, tokens_left)


def _order(request: Request) -> int:
    return request.order
