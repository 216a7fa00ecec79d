"""Calls of the policy: its five methods, and the rules that their answers must keep (`scheduling.py`).

A method is called only where its answer makes a difference. What it receives is computed as it is read (`views.py`). An
answer that cannot be carried out raises an InvariantViolation that names the policy: the step fails, its requests wait,
and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from minipaged.contracts import Runner
from minipaged.engine.batch import ScheduledRequest
from minipaged.engine.memory import Memory
from minipaged.engine.sequence import Request
from minipaged.engine.views import LateCosts, LateViews, WaitingView, view_of
from minipaged.errors import InvalidRequest, Invariant, InvariantViolation
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs, MakePolicy, Policy, RequestView, Way


class AskedPolicy:
    """The policy of one engine, with checks of its answers."""

    def __init__(self, make: MakePolicy, config: EngineConfig, blocks: Memory, runner: Runner) -> None:
        self.costs = LateCosts(runner)
        self.policy = _make(make, config, self.costs)
        self._blocks = blocks
        self._preemption = config.preemption
        self._max_tokens = config.max_num_batched_tokens
        self._views: dict[Request, WaitingView] = {}  # of waiting requests
        self.settle: Callable[[], None] = lambda: None
        """Called before running requests are shown to `admit`: brings their tables up to date (`steady.py`)."""
        self._nobody: tuple[Policy, int, int, int] | None = None
        """The policy, room, free blocks and tokens left when it last admitted no request; None once the queues
        change."""

    def queues_changed(self, moved: Iterable[Request]) -> None:
        """Note that the queues have changed. The views of the requests in `moved` are out of date."""
        for request in moved:
            self._views.pop(request, None)
        self._nobody = None

    def check_fits(self, request: Request) -> None:
        """Raise InvalidRequest if the policy does not take a request that has arrived."""
        answer = self.policy.fits(view_of(request, self._blocks))
        if not isinstance(answer, bool):
            self._broken("fits", f"{answer!r}; it must return True or False")
        if not answer:
            raise InvalidRequest(
                f"the engine's policy, {type(self.policy).__name__}, does not take this request, though it could be "
                "served; ask for less, or serve with another policy"
            )

    def share_tokens(self, running: Sequence[Request], wholes: list[ScheduledRequest]) -> Mapping[str, int]:
        """Return the policy's tokens for each running request. Called if one batch has too few for all of them."""
        given = self.policy.share_tokens([view_of(request, self._blocks) for request in running])
        if not isinstance(given, Mapping):
            self._broken("share_tokens", f"{given!r}; it must return a dict, request_id -> tokens")
        most = {request.request_id: 0 for request in running} | {
            whole.request.request_id: whole.num_query_tokens for whole in wholes
        }
        together = {whole.request.request_id for whole in wholes if whole.decodes}
        for name, number in given.items():
            if name not in most:
                self._broken("share_tokens", f"{number!r} tokens for {name!r}, which is not running", most)
            if type(number) is not int or not 0 <= number <= most[name]:
                self._broken("share_tokens", f"{number!r} tokens for {name!r}, which has {most[name]} to run")
            if name in together and 0 < number < most[name]:
                self._broken(
                    "share_tokens", f"{number} tokens for {name!r}, whose {most[name]} sequences decode together"
                )
        if (total := sum(given.values())) > self._max_tokens:
            self._broken("share_tokens", f"{total} tokens in all; a batch has room for {self._max_tokens}")
        if total == 0:
            self._broken("share_tokens", "no tokens for any request, so nothing would ever run")
        return given

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the running request that the policy preempts.

        A request that runs alone is never preempted: it fits, or it would have been refused when it arrived.
        """
        if len(running) < 2:
            raise InvariantViolation(
                Invariant.LIVENESS,
                f"the only running request needs more blocks than the pool of {self._blocks.allocator.num_blocks} has "
                "available, although it was admitted as one that fits",
            )
        name = self.policy.victim([view_of(request, self._blocks) for request in running])
        victim = next((request for request in running if request.request_id == name), None)
        if victim is None:
            self._broken("victim", f"{name!r}, which is not running", (r.request_id for r in running))
        return victim

    def way_back(self, victim: Request) -> Way:
        """Return how the victim comes back. The policy decides if both ways are possible. If the host pool is too full
        to swap, the victim is recomputed."""
        # A sequence that has yet to catch up relies on sharing blocks, which swapping would not give it.
        can_swap = all(s.num_computed for s in victim.sequences) and self._blocks.can_swap_out(victim)
        if self._preemption != "auto" or not can_swap:
            return "swap" if self._preemption != "recompute" and can_swap else "recompute"
        way = self.policy.way_back(view_of(victim, self._blocks), self._blocks.num_host_available)
        if way not in ("swap", "recompute"):
            self._broken("way_back", f"{way!r}; it must return 'swap' or 'recompute'")
        return way

    def admit(
        self, waiting: Sequence[Request], running: Sequence[Request], room: int, tokens_left: int
    ) -> list[Request]:
        """Return the requests that the policy admits. `room`: the number of sequences that can still be added."""
        num_free = self._blocks.num_available
        if room <= 0 or num_free <= 0 or self._said_nobody(room, num_free, tokens_left):
            return []
        shown = LateViews(running, self._blocks, self.settle)
        try:
            names = self.policy.admit(self._waiting_views(waiting), shown, num_free, tokens_left)
        finally:
            shown.close()
        if isinstance(names, str) or not isinstance(names, Sequence):
            self._broken("admit", f"{names!r}; it must return a list of request_ids")
        if not names:
            self._nobody = (self.policy, room, num_free, tokens_left)
            return []
        return self._check_entering(names, waiting, room, num_free, tokens_left)

    def _said_nobody(self, room: int, num_free: int, tokens_left: int) -> bool:
        """Whether the policy has already declined all of these waiting requests, with as much room as now or more."""
        if self._nobody is None or self._blocks.prefix_cache:  # the cache may have more blocks by now
            return False
        policy, *then = self._nobody
        return policy is self.policy and all(a <= b for a, b in zip((room, num_free, tokens_left), then, strict=True))

    def _check_entering(
        self, names: Sequence[str], waiting: Sequence[Request], room: int, num_free: int, tokens_left: int
    ) -> list[Request]:
        """Return the requests that the policy names, if there is room for all of them together."""
        left = {request.request_id: request for request in waiting}
        entering: list[Request] = []
        for name in names:
            if not isinstance(name, str) or name not in left:
                twice = any(name == request.request_id for request in entering)
                self._broken("admit", f"{name!r}{' twice' if twice else ', which is not waiting'}", left)
            request = left.pop(name)
            view = self._waiting_view(request)
            least = view.tokens_to_run if view.decodes else 1
            for what, needed, there in (
                ("sequences", view.num_sequences, room),
                ("blocks", view.blocks_needed, num_free),
                ("tokens", least, tokens_left),
            ):
                if needed > there:
                    self._broken("admit", f"{name!r}, which needs {needed} {what}; {max(0, there)} are left")
            room -= view.num_sequences
            num_free -= view.blocks_needed
            tokens_left -= view.tokens_to_run
            entering.append(request)
        self._blocks.num_spare = num_free
        return entering

    def stuck(self, waiting: Sequence[Request]) -> NoReturn:
        """Raise InvariantViolation: no request runs in this step, so none ever would."""
        views = self._waiting_views(waiting)
        if any(view.blocks_needed <= self._blocks.num_available for view in views):
            self._broken("admit", "no request, though nothing is running", (view.request_id for view in views))
        raise InvariantViolation(
            Invariant.LIVENESS,
            f"request {waiting[0].request_id} cannot be admitted though nothing else runs: the allocator has "
            f"{self._blocks.num_available} of {self._blocks.allocator.num_blocks} blocks available",
        )

    # --- Views of waiting requests --------------------------------------------------------------------

    def _waiting_views(self, waiting: Sequence[Request]) -> list[RequestView]:
        if self._blocks.prefix_cache:
            return [self._waiting_view(request) for request in waiting]
        known = self._views.get  # hundreds may wait, nearly all unchanged
        return [known(request) or self._waiting_view(request) for request in waiting]

    def _waiting_view(self, request: Request) -> RequestView:
        """The view of a waiting request. Until admission, only the blocks it finds in the prefix cache can change."""
        view = self._views.get(request)
        if view is None or (view.counted and self._blocks.prefix_cache):
            view = WaitingView(request, self._blocks, lambda view: self._views.get(request) is view)
            self._views[request] = view
        return view

    def _broken(self, question: str, answer: str, known: Iterable[str] = ()) -> NoReturn:
        """Raise InvariantViolation: the policy broke a rule. Nothing is lost: the step fails, and its requests wait."""
        those = f"; choose from: {', '.join(known)}" if (known := list(known)) else ""
        raise InvariantViolation(
            Invariant.LIVENESS,
            f"the policy {type(self.policy).__name__}: {question} returned {answer}{those}",
        )


def _make(policy: MakePolicy, config: EngineConfig, costs: Costs) -> Policy:
    """Make the policy. Raises InvalidRequest if the result is not a policy."""
    if not callable(policy):
        raise InvalidRequest(f"policy is {policy!r}; it must be a class (or a function) that makes policies")
    made = policy(config.num_blocks, config.block_size, config.max_num_seqs, config.max_num_batched_tokens, costs)
    questions = ("fits", "share_tokens", "victim", "way_back", "admit")
    if missing := [name for name in questions if not callable(getattr(made, name, None))]:
        raise InvalidRequest(
            f"the policy {type(made).__name__} lacks {', '.join(missing)}; it needs all of {', '.join(questions)}"
        )
    return made
