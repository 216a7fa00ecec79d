"""The scheduler: the queues, and the plan of each step (paper, sections 4.3 and 4.5).

Every step is planned anew (continuous batching). The decisions are the policy's (`policy.py`: first come, first
served). The scheduler calls it only where its answer makes a difference, checks the answer, and carries it out:

1. Every running request gets its tokens: all that it has to run if one batch has room for them, otherwise the number
   that the policy gives it (`share_tokens`). Requests that decode come first in the batch.
2. While there are too few blocks for that, the policy names a victim (`victim`) and how it will come back (`way_back`).
   All sequences of a request are preempted together: all or nothing.
3. If no request was preempted, the policy names waiting requests to admit (`admit`): those for which the batch has room
   and the pool has blocks. A request that could NEVER be admitted is refused when it arrives, so none waits in vain.

With asynchronous scheduling a plan may be made while the step before it is in flight (`assign_ahead`). Its decoding
sequences then run a token that is still being chosen. Sequences that reach their length limit with that token are left
out.

With pipeline parallelism the running requests are divided into several lanes, and a step runs those of one lane
(`lanes.py`). Otherwise there is one lane, number 0, with all of them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from minipaged.contracts import Runner
from minipaged.engine.asked_policy import AskedPolicy
from minipaged.engine.batch import Plan, ScheduledRequest
from minipaged.engine.drafts import Drafts
from minipaged.engine.lanes import Lane, num_sequences, share_of
from minipaged.engine.memory import Memory
from minipaged.engine.sequence import Request, RequestState
from minipaged.engine.step_writer import StepWriters
from minipaged.events import Emit, RequestAdmitted, RequestPreempted
from minipaged.params import EngineConfig
from minipaged.scheduling import MakePolicy, Policy


class Scheduler:
    """The queues of one engine. `waiting` and `running` are both in order of arrival."""

    def __init__(
        self,
        config: EngineConfig,
        blocks: Memory,
        runner: Runner,
        emit: Emit,
        policy: MakePolicy,
        writers: StepWriters,
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.lanes = [Lane(number) for number in range(config.pipeline_parallel_size)]
        self.drafts: Drafts | None = None
        self.asked = AskedPolicy(policy, config, blocks, runner)
        self._writers = writers
        self._blocks = blocks
        self._emit = emit
        self._max_tokens = config.max_num_batched_tokens
        # A running sequence takes at least one token of each batch.
        self.max_sequences = min(config.max_num_seqs, config.max_num_batched_tokens)

    @property
    def policy(self) -> Policy:
        """The policy that decides. It may be replaced between two steps."""
        return self.asked.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.asked.policy = policy

    # --- The queues -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue, as the latest arrival."""
        self.waiting.append(request)
        self.asked.queues_changed(())

    def remove(self, request: Request) -> None:
        """Take a request that has ended out of its queue."""
        if request.state is RequestState.RUNNING:
            self._stop(request)
        else:
            self.waiting.remove(request)
        self.asked.queues_changed([request])

    def _wait(self, request: Request, state: RequestState) -> None:
        """Move a running request to its place in the waiting queue."""
        self._stop(request)
        insort(self.waiting, request, key=_order)
        request.state = state
        self.asked.queues_changed([request])

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self.lanes[request.lane].running.remove(request)

    def _run(self, request: Request) -> None:
        """Move a waiting request to its place in the running queue."""
        self.waiting.remove(request)
        for queue in (self.running, self.lanes[request.lane].running):
            insort(queue, request, key=_order)
        request.state = RequestState.RUNNING
        self.asked.queues_changed([request])

    def let_all_wait(self, requests: Iterable[Request]) -> list[Request]:
        """Recover from an error: put all these requests into the waiting queue. Returns them in order of arrival."""
        self.waiting, self.running = sorted(requests, key=_order), []
        self.asked.queues_changed(self.waiting)
        for lane in self.lanes:
            lane.running = []
        return list(self.waiting)

    # --- One step ---------------------------------------------------------------------------------

    def schedule(self, ahead: Plan | None = None, lane: int = 0) -> Plan:
        """Plan the next step and take the blocks for it. `ahead`: the plan that `assign_ahead` has already made.

        If every request of `lane` had to be preempted, the step runs another lane.
        """
        plan, preempted = ahead or self._assign(lane), False
        while ahead is None and (short := self._blocks_short(plan)) > 0:
            self._preempt(short)
            preempted = True
            plan = self._assign(lane if self.lanes[lane].running else self.running[0].lane)
        self._blocks.append_all(plan.work())
        if not preempted:
            plan = self.admit(plan)
        if self.drafts:
            plan = self.drafts.added_to(plan, self._blocks, self._max_tokens - plan.num_query_tokens, self._emit)
        if not plan.scheduled and self.waiting and not self.running:
            self.asked.stuck(self.waiting)
        plan.lay_out()
        return plan

    def assign_ahead(self, lane: int = 0) -> Plan | None:
        """Plan the lane's next step while other steps are in flight. None if blocks are short: nothing in flight is
        preempted, but committing those steps may free some."""
        plan = self._assign(lane)
        return None if self._blocks_short(plan) > 0 else plan

    def has_work(self, lane: int) -> bool:
        """Whether the lane has a request to run, or one to admit."""
        return bool(self.lanes[lane].running or (self.waiting and self._entering(lane, self._max_tokens)))

    # --- 1. Tokens for running requests -----------------------------------------------------------

    def _assign(self, lane: int) -> Plan:
        """Give each running request its tokens: first those that decode, then the others, both in order of arrival."""
        running = self.lanes[lane].running
        decoding: list[ScheduledRequest] = []
        behind: list[ScheduledRequest] = []
        for request in running:
            work = request.remaining()
            if work and all(num_tokens == 1 for _, num_tokens in work):
                decoding.append(ScheduledRequest(request, work, completes=True))
            elif work:  # prompts, and tokens to recompute
                behind.append(self._whole(request))
        wholes = decoding + behind
        plan = Plan(wholes, lane)
        if plan.num_query_tokens <= self._max_tokens:
            return plan
        given = self.asked.share_tokens(running, wholes)
        parts = (self._part(whole, given.get(whole.request.request_id, 0)) for whole in wholes)
        return Plan([part for part in parts if part.work], lane)

    def _whole(self, request: Request) -> ScheduledRequest:
        """Everything that the request could run in one step, however large.

        Its sequences run their last tokens in the same step, because their next tokens are chosen together. After
        recomputation, sequences catch up one after another, so that each can share the blocks that the one before
        computed.
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
        """The part of `whole` that fits in `num_tokens`: all of it, or a chunk of its first sequence behind, or
        nothing."""
        if whole.num_query_tokens <= num_tokens:
            return whole
        behind = [(sequence, n) for sequence, n in whole.request.remaining() if n > 1]
        chunk = [(sequence, min(n - 1, num_tokens)) for sequence, n in behind[:1] if num_tokens > 0]
        return ScheduledRequest(whole.request, chunk, completes=False)

    # --- 2. Blocks for these tokens, and preemption -----------------------------------------------

    def _blocks_short(self, plan: Plan) -> int:
        """The number of blocks missing to run this plan; 0 or less if there are enough."""
        available = self._blocks.num_available
        most = plan.num_query_tokens * self._blocks.num_groups  # if there are that many, skip the exact count
        if most <= available:
            return most - available
        return sum(self._blocks.blocks_needed(part.work) for part in plan.scheduled) - available

    def _preempt(self, short: int) -> None:
        """Take all blocks from the victim that the policy names."""
        victim = self.asked.victim(self.running)
        way = self.asked.way_back(victim)
        filled = victim.filled_slots(self._blocks.block_size)
        num_tokens = victim.num_tokens_held(self._blocks.block_size)
        self._emit(RequestPreempted(victim.request_id, way, len(filled), num_tokens, short))
        victim.num_preemptions += 1
        if way == "swap":
            self._blocks.swap_out(victim)
            self._wait(victim, RequestState.SWAPPED)
        else:
            for sequence in victim.sequences:
                self._blocks.free(sequence)
            self._wait(victim, RequestState.WAITING)

    # --- 3. Admission -----------------------------------------------------------------------------

    def admit(self, plan: Plan) -> Plan:
        """Admit the requests that the policy names, until it names none: each admission may lower what the others need.

        Returns `plan` itself if no request was admitted, else a plan extended by the new ones.
        """
        admitted: list[ScheduledRequest] = []
        tokens_left = self._max_tokens - plan.num_query_tokens
        while self.waiting and tokens_left > 0 and (entering := self._entering(plan.lane, tokens_left)):
            for request in entering:
                if not self._blocks.still_fits(request):
                    break
                if request.lane != plan.lane:
                    self._writers.change_lane(request, plan.lane)
                if request.state is RequestState.SWAPPED:
                    self._blocks.swap_in(request)
                else:
                    num_tokens = sum(len(sequence.tokens) for sequence in request.sequences)
                    num_looked_up = num_tokens if self._blocks.prefix_cache and request.reads_prefix_cache else 0
                    self._emit(RequestAdmitted(request.request_id, num_looked_up))
                self._run(request)
                self._blocks.load(request, self.asked.costs)
                scheduled = self._part(self._whole(request), tokens_left)
                if request.num_cached_tokens is None:
                    request.num_cached_tokens = request.sequences[0].num_computed
                if scheduled.work:
                    self._blocks.append_all(scheduled.work)
                    admitted.append(scheduled)
                    tokens_left -= scheduled.num_query_tokens
        self._blocks.num_spare = 0
        return Plan([*plan.scheduled, *admitted], plan.lane) if admitted else plan

    def _entering(self, lane: int, tokens_left: int) -> Sequence[Request]:
        room = self.max_sequences - num_sequences(self.running)
        named = self.asked.admit(self.waiting, self.running, room, tokens_left)
        return share_of(self.lanes[lane], self.lanes, named)


def _order(request: Request) -> int:
    return request.order
