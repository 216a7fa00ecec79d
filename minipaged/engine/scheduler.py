"""The scheduler: who runs in the next step, who waits, who is preempted (paper, sections 4.3 and 4.5).

First come, first served, decided anew at every step (continuous batching):

1. Every running request gets its tokens: decoding ones first, one token a sequence; then those that still compute a
   prompt share what is left of `max_num_batched_tokens`, in order of arrival (chunked prefill).
2. While the blocks for that are not there, a victim is preempted: the latest arrival; among equals (arrived between
   the same two steps) the one that is cheapest to bring back. The oldest running request is never a victim, so that
   somebody always gets on: liveness. All sequences of a request go together: all or nothing.
3. If nobody was preempted, waiting requests are admitted in order of arrival while the answer is OK: their blocks are
   there, and one more for each sequence that runs already, which will need it soon. The first LATER ends it: nobody
   overtakes. NEVER is said when a request arrives, so no request waits for what cannot happen.

With asynchronous scheduling a plan may be made while the step before it is in flight (`assign_ahead`). Its decoding
sequences then run a token that is being chosen; those that end with that token by their length are left out.
"""

from __future__ import annotations

from bisect import insort
from typing import Literal

from minipaged.contracts import Runner
from minipaged.engine.batch import Plan, ScheduledRequest
from minipaged.engine.block_manager import AllocStatus, BlockManager
from minipaged.engine.sequence import Request, RequestState
from minipaged.errors import Invariant, InvariantViolation
from minipaged.events import Emit, RequestAdmitted, RequestPreempted
from minipaged.params import EngineConfig


class Scheduler:
    """The queues of one engine. `waiting` and `running` are both in order of arrival."""

    def __init__(self, config: EngineConfig, blocks: BlockManager, runner: Runner, emit: Emit) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._blocks = blocks
        self._runner = runner
        self._emit = emit
        self._preemption = config.preemption
        self._max_tokens = config.max_num_batched_tokens
        # A sequence that runs takes one token of each batch at least.
        self.max_sequences = min(config.max_num_seqs, config.max_num_batched_tokens)

    def schedule(self, ahead: list[ScheduledRequest] | None = None) -> Plan:
        """Decide the next step and take the blocks for it. `ahead`: what `assign_ahead` has decided already."""
        plan = Plan(ahead or [])
        while ahead is None:
            plan.scheduled = self._assign(self.running, self._max_tokens)
            short = self._blocks_short(plan.scheduled)
            if short <= 0:
                break
            victim = self._choose_victim()
            self._preempt(victim, short)
            plan.preempted.append(victim)
        for scheduled in plan.scheduled:
            self._take_blocks(scheduled)
        if not plan.preempted:
            self._admit(plan)
        if not plan.scheduled and self.waiting:
            raise InvariantViolation(
                Invariant.LIVENESS,
                f"request {self.waiting[0].request_id} cannot be admitted though nothing else runs: the allocator has "
                f"{self._blocks.num_available} of {self._blocks.allocator.num_blocks} blocks available",
            )
        return plan

    def assign_ahead(self) -> list[ScheduledRequest] | None:
        """What runs after the step in flight. None if nothing can before that is committed: for want of blocks (its
        tokens may free some, and nothing in flight is preempted), or because all that runs may end with it."""
        assigned = self._assign(self.running, self._max_tokens)
        return None if self._blocks_short(assigned) > 0 else assigned or None

    def _blocks_short(self, assigned: list[ScheduledRequest]) -> int:
        """How many blocks are missing to run this; 0 or less if none."""
        needed = sum(self._blocks.blocks_needed(scheduled.work) for scheduled in assigned)
        return needed - self._blocks.num_available

    # --- 1. Tokens for those that run -------------------------------------------------------------

    def _assign(self, requests: list[Request], budget: int) -> list[ScheduledRequest]:
        """Share `budget` query tokens among the requests, those that decode first."""
        assigned: list[ScheduledRequest] = []
        for request in sorted(requests, key=Request.is_behind):
            scheduled = self._assign_one(request, budget)
            if scheduled.work:
                assigned.append(scheduled)
                budget -= scheduled.num_query_tokens
        return assigned

    def _assign_one(self, request: Request, budget: int) -> ScheduledRequest:
        """All that the request has left to run; or, if that is too much at once, a chunk of one sequence.

        The last tokens of all its sequences run in the same step, because the next tokens are chosen together.
        After recomputation siblings catch up one after another, so that each can share what the one before computed.
        """
        for sequence in request.sequences:
            if sequence.num_computed == 0:
                self._blocks.begin(request, sequence)
            if sequence.num_remaining > 1:
                break
        work = [(sequence, n) for sequence in request.sequences if (n := sequence.num_remaining)]
        behind = [(sequence, n) for sequence, n in work if n > 1]
        if len(behind) <= 1 and sum(n for _, n in work) <= budget:
            return ScheduledRequest(request, work, completes=True)
        chunk = [(sequence, min(n - 1, budget)) for sequence, n in behind[:1] if budget > 0]
        return ScheduledRequest(request, chunk, completes=False)

    def _take_blocks(self, scheduled: ScheduledRequest) -> None:
        for sequence, num_tokens in scheduled.work:
            self._blocks.append(sequence, num_tokens)

    # --- 2. Preemption ----------------------------------------------------------------------------

    def _choose_victim(self) -> Request:
        if len(self.running) < 2:
            raise InvariantViolation(
                Invariant.LIVENESS,
                f"the only running request needs more blocks than the pool of {self._blocks.allocator.num_blocks} has "
                "available, although it was admitted as one that fits",
            )
        latest = self.running[-1].arrival_step
        equals = [r for r in self.running[1:] if r.arrival_step == latest]
        if len(equals) == 1:
            return equals[0]
        return min(equals, key=lambda r: (self._cheapest_way_back(r)[0], -r.order))

    def _cheapest_way_back(self, request: Request) -> tuple[float, Literal["swap", "recompute"]]:
        """Seconds to bring the request back, and how. (The runner measures a cost when it is first asked for it.)"""
        filled = request.filled_slots(self._blocks.block_size)
        ways: list[tuple[float, Literal["swap", "recompute"]]] = []
        # A sibling that has yet to catch up counts on sharing, which swapping would not give it.
        can_swap = all(s.num_computed for s in request.sequences) and self._blocks.can_swap_out(request)
        if self._preemption != "recompute" and can_swap:
            ways.append((self._runner.swap_seconds(len(filled)), "swap"))
        if self._preemption != "swap" or not ways:
            ways.append((self._runner.recompute_seconds(sum(filled.values())), "recompute"))
        return min(ways, key=lambda way: way[0])

    def _preempt(self, victim: Request, short: int) -> None:
        """Take all blocks from the victim. When the host pool is too full to swap, it is recomputed."""
        _, mode = self._cheapest_way_back(victim)
        filled = victim.filled_slots(self._blocks.block_size)
        self._emit(RequestPreempted(victim.request_id, mode, len(filled), sum(filled.values()), short))
        victim.num_preemptions += 1
        if mode == "swap":
            self._blocks.swap_out(victim)
            victim.state = RequestState.SWAPPED
        else:
            for sequence in victim.sequences:
                self._blocks.free(sequence)
            victim.state = RequestState.WAITING
        self.running.remove(victim)
        insort(self.waiting, victim, key=lambda r: r.order)

    # --- 3. Admission -----------------------------------------------------------------------------

    def _admit(self, plan: Plan) -> None:
        if not self.waiting:
            return
        budget = self._max_tokens - plan.num_query_tokens
        while self.waiting and budget > 0 and self._can_enter(self.waiting[0]):
            request = self.waiting.pop(0)
            insort(self.running, request, key=lambda r: r.order)
            if request.state is RequestState.SWAPPED:
                self._blocks.swap_in(request)
            else:
                self._emit(RequestAdmitted(request.request_id))
            request.state = RequestState.RUNNING
            scheduled = self._assign_one(request, budget)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.sequences[0].num_computed
            if scheduled.work:
                self._take_blocks(scheduled)
                plan.scheduled.append(scheduled)
                budget -= scheduled.num_query_tokens

    def _can_enter(self, request: Request) -> bool:
        """Whether there is room for the first that waits."""
        room = self.max_sequences - sum(r.num_sequences for r in self.running)
        # A block for each sequence that runs: or the newcomer would soon be preempted for their next tokens.
        spare = sum(len(r.sequences) for r in self.running)
        return request.num_sequences <= room and self._blocks.can_admit(request, spare) is AllocStatus.OK
