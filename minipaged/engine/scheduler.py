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
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from typing import NoReturn

from minipaged.contracts import Runner
from minipaged.engine.batch import Plan, ScheduledRequest
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.sequence import Request, RequestState
from minipaged.engine.views import LateCosts, LateViews, WaitingView, view_of
from minipaged.errors import InvalidRequest, Invariant, InvariantViolation
from minipaged.events import Emit, RequestAdmitted, RequestPreempted
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs, MakePolicy, Policy, RequestView, Way


class Scheduler:
    """The queues of one engine. `waiting` and `running` are both in order of arrival."""

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, runner: Runner, emit: Emit, policy: MakePolicy
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.policy = _make(policy, config, LateCosts(runner))
        """May be replaced by another between two steps."""
        self._views: dict[Request, WaitingView] = {}  # of those that wait
        self._nobody: tuple[Policy, int, int, int] | None = None
        """Room, free blocks and tokens left when the policy let nobody in; None once others wait."""
        self._latest: Plan | None = None
        """The latest plan, if the next step may go by it too: all go on decoding."""
        self._blocks = blocks
        self._emit = emit
        self._preemption = config.preemption
        self._max_tokens = config.max_num_batched_tokens
        # A sequence that runs takes one token of each batch at least.
        self.max_sequences = min(config.max_num_seqs, config.max_num_batched_tokens)

    # --- The queues -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a new request wait: the latest arrival is the last."""
        self.waiting.append(request)
        self._nobody = None

    def remove(self, request: Request) -> None:
        """It has ended, wherever it is."""
        (self.running if request.state is RequestState.RUNNING else self.waiting).remove(request)
        self._views.pop(request, None)
        self._nobody = None
        self._forget_plan()

    def _wait(self, request: Request, state: RequestState) -> None:
        """It ran, and waits now, in its place in the order of arrival."""
        self.running.remove(request)
        insort(self.waiting, request, key=_order)
        request.state = state
        self._nobody = None
        self._forget_plan()

    def _run(self, request: Request) -> None:
        """It waited, and runs now."""
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        request.state = RequestState.RUNNING
        self._views.pop(request, None)
        self._nobody = None
        self._forget_plan()

    def sequences_change(self) -> None:
        """A running request will not have the sequences any more that it has."""
        self._forget_plan()

    def _forget_plan(self) -> None:
        """What has run does not go on as it was."""
        if self._latest:
            self._latest.count_steps()
            self._latest = None

    def start_over(self, requests: Iterable[Request]) -> list[Request]:
        """After an error: those that hold blocks, whose K/V may be half written, give them back, and all wait.

        `requests`: all that have not ended; whatever raised may have left some of them in neither queue.
        """
        self.waiting, self.running = sorted(requests, key=_order), []
        self._views.clear()
        self._nobody = None
        self._forget_plan()
        by_state = sorted(self.waiting, key=lambda request: request.state is RequestState.SWAPPED)
        dropped = [request for request in by_state if request.state is not RequestState.WAITING]
        for request in dropped:
            for sequence in request.sequences:
                self._blocks.free(sequence)
                sequence.pending = False
            request.state = RequestState.WAITING
        return dropped

    # --- One step ---------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """Raise InvalidRequest if the policy does not take a request that has arrived."""
        answer = self.policy.fits(view_of(request, self._blocks))
        if not isinstance(answer, bool):
            self._broken("fits", f"{answer!r}; it has to answer True or False")
        if not answer:
            raise InvalidRequest(
                f"the engine's policy, {type(self.policy).__name__}, does not take this request, though it could be "
                "served; ask for less, or serve with another policy"
            )

    def schedule(self, ahead: Plan | None = None) -> Plan:
        """Decide the next step and take the blocks for it. `ahead`: what `assign_ahead` has decided already.

        The same plan as for the step before if all that ran only goes on.
        """
        plan, preempted = ahead or self._assign(), []
        while ahead is None and (short := self._blocks_short(plan)) > 0:
            preempted.append(self._preempt(short))
            plan = self._assign()
        self._take_blocks(plan)
        if self.waiting and not preempted:
            plan = self._admit(plan)
        if not plan.scheduled and self.waiting:
            self._stuck()
        if plan is not self._latest:
            plan.preempted = preempted
            plan.lay_out(sum(len(request.sequences) for request in self.running))
            self._forget_plan()
            self._latest = plan if plan.decoding else None
        plan.steps_left -= 1
        return plan

    def assign_ahead(self) -> Plan | None:
        """What runs after the step in flight. None if nothing can before that is committed: for want of blocks (its
        tokens may free some, and nothing in flight is preempted), or because all that runs may end with it."""
        plan = self._assign()
        return None if self._blocks_short(plan) > 0 or not plan.scheduled else plan

    # --- 1. Tokens for those that run -------------------------------------------------------------

    def _assign(self) -> Plan:
        """What each running request runs: first those that decode, then the others, both in order of arrival."""
        if self._latest and self._latest.steps_left > 0:
            return self._latest
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
        given = self._share_tokens(wholes)
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

    def _share_tokens(self, wholes: list[ScheduledRequest]) -> Mapping[str, int]:
        """Ask who gets how many tokens of a batch that has not enough of them."""
        given = self.policy.share_tokens([view_of(request, self._blocks) for request in self.running])
        if not isinstance(given, Mapping):
            self._broken("share_tokens", f"{given!r}; it has to answer with a dict, request_id -> tokens")
        most = {request.request_id: 0 for request in self.running} | {
            whole.request.request_id: whole.num_query_tokens for whole in wholes
        }
        together = {whole.request.request_id for whole in wholes if whole.decodes}
        for name, number in given.items():
            if name not in most:
                self._broken("share_tokens", f"{number!r} tokens for {name!r}, which does not run", most)
            if type(number) is not int or not 0 <= number <= most[name]:
                self._broken("share_tokens", f"{number!r} tokens for {name!r}, which has {most[name]} to run")
            if name in together and 0 < number < most[name]:
                self._broken(
                    "share_tokens", f"{number} tokens for {name!r}, whose {most[name]} sequences decode together"
                )
        if (total := sum(given.values())) > self._max_tokens:
            self._broken("share_tokens", f"{total} tokens in all; a batch has {self._max_tokens}")
        if total == 0:
            self._broken("share_tokens", "no token for anybody, and so nothing would ever run")
        return given

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

    def _preempt(self, short: int) -> Request:
        """Take all blocks from the one that the policy names."""
        victim = self._victim()
        way = self._way_back(victim)
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
        return victim

    def _victim(self) -> Request:
        """Ask who makes room. (The last one that runs never has to: it fits, or it would not have been taken.)"""
        if len(self.running) < 2:
            raise InvariantViolation(
                Invariant.LIVENESS,
                f"the only running request needs more blocks than the pool of {self._blocks.allocator.num_blocks} has "
                "available, although it was admitted as one that fits",
            )
        name = self.policy.victim([view_of(request, self._blocks) for request in self.running])
        victim = next((request for request in self.running if request.request_id == name), None)
        if victim is None:
            self._broken("victim", f"{name!r}, which does not run", (r.request_id for r in self.running))
        return victim

    def _way_back(self, victim: Request) -> Way:
        """Ask how it comes back, if both ways are there. When the host pool is too full to swap, it is recomputed."""
        # A sibling that has yet to catch up counts on sharing, which swapping would not give it.
        can_swap = all(s.num_computed for s in victim.sequences) and self._blocks.can_swap_out(victim)
        if self._preemption != "auto" or not can_swap:
            return "swap" if self._preemption != "recompute" and can_swap else "recompute"
        assert self._blocks.host_allocator is not None
        way = self.policy.way_back(view_of(victim, self._blocks), self._blocks.host_allocator.num_free)
        if way not in ("swap", "recompute"):
            self._broken("way_back", f"{way!r}; there are 'swap' and 'recompute'")
        return way

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
                    self._emit(RequestAdmitted(request.request_id))
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
        """Ask who comes in, if there is room for anybody."""
        room = self.max_sequences - sum(request.num_sequences for request in self.running)
        num_free = self._blocks.num_available
        if room <= 0 or num_free <= 0 or self._said_nobody(room, num_free, tokens_left):
            return []
        running = LateViews(self.running, self._blocks)
        try:
            names = self.policy.admit(self._waiting_views(), running, num_free, tokens_left)
        finally:
            running.close()
        if isinstance(names, str) or not isinstance(names, ListLike):
            self._broken("admit", f"{names!r}; it has to answer with a list of request_ids")
        if not names:
            self._nobody = (self.policy, room, num_free, tokens_left)
            return []
        return self._check_entering(names, room, num_free, tokens_left)

    def _said_nobody(self, room: int, num_free: int, tokens_left: int) -> bool:
        """Whether the policy has let in nobody of the same that wait, when there was as much for them as now."""
        if self._nobody is None or self._blocks.prefix_cache:  # which may have come to know more
            return False
        policy, *then = self._nobody
        return policy is self.policy and all(a <= b for a, b in zip((room, num_free, tokens_left), then, strict=True))

    def _check_entering(self, names: ListLike[str], room: int, num_free: int, tokens_left: int) -> list[Request]:
        """Those that the policy names, if there is room for all of them together."""
        waiting = {request.request_id: request for request in self.waiting}
        entering: list[Request] = []
        for name in names:
            if not isinstance(name, str) or name not in waiting:
                twice = any(name == request.request_id for request in entering)
                self._broken("admit", f"{name!r}{' twice' if twice else ', which does not wait'}", waiting)
            request = waiting.pop(name)
            view = self._waiting_view(request)
            least = view.tokens_to_run if view.decodes else 1
            for what, needed, left in (
                ("sequences", view.num_sequences, room),
                ("blocks", view.blocks_needed, num_free),
                ("tokens", least, tokens_left),
            ):
                if needed > left:
                    self._broken("admit", f"{name!r}, which needs {needed} {what}, and {max(0, left)} are left for it")
            room -= view.num_sequences
            num_free -= view.blocks_needed
            tokens_left -= view.tokens_to_run
            entering.append(request)
        return entering

    def _waiting_views(self) -> list[RequestView]:
        if self._blocks.prefix_cache:
            return [self._waiting_view(request) for request in self.waiting]
        known = self._views.get  # hundreds may wait, and none of them has changed
        return [known(request) or self._waiting_view(request) for request in self.waiting]

    def _waiting_view(self, request: Request) -> RequestView:
        """Of a request that waits: it stays as it is until it comes in, but for what the prefix cache has of it."""
        view = self._views.get(request)
        if view is None or (view.counted and self._blocks.prefix_cache):
            view = WaitingView(request, self._blocks, lambda view: self._views.get(request) is view)
            self._views[request] = view
        return view

    # --- What cannot be carried out ---------------------------------------------------------------

    def _stuck(self) -> NoReturn:
        """Nothing runs in this step, and so nothing ever would."""
        views = self._waiting_views()
        if any(view.blocks_needed <= self._blocks.num_available for view in views):
            self._broken("admit", "nobody, though nothing runs", (view.request_id for view in views))
        raise InvariantViolation(
            Invariant.LIVENESS,
            f"request {self.waiting[0].request_id} cannot be admitted though nothing else runs: the allocator has "
            f"{self._blocks.num_available} of {self._blocks.allocator.num_blocks} blocks available",
        )

    def _broken(self, question: str, answer: str, known: Iterable[str] = ()) -> NoReturn:
        """The policy broke a rule. Nothing is lost: the step fails, and its requests wait."""
        those = f"; there are: {', '.join(known)}" if (known := list(known)) else ""
        raise InvariantViolation(
            Invariant.LIVENESS,
            f"the policy {type(self.policy).__name__}, asked for {question}, answers {answer}{those}",
        )


def _order(request: Request) -> int:
    return request.order


def _make(policy: MakePolicy, config: EngineConfig, costs: Costs) -> Policy:
    """Raises InvalidRequest for what is no policy."""
    if not callable(policy):
        raise InvalidRequest(f"policy is {policy!r}; it must be a class (or a function) that makes policies")
    made = policy(config.num_blocks, config.block_size, config.max_num_seqs, config.max_num_batched_tokens, costs)
    questions = ("fits", "share_tokens", "victim", "way_back", "admit")
    if missing := [name for name in questions if not callable(getattr(made, name, None))]:
        raise InvalidRequest(
            f"the policy {type(made).__name__} lacks {', '.join(missing)}; it needs all of {', '.join(questions)}"
        )
    return made
