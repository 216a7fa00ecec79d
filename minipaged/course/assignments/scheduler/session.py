"""Calls a student's scheduler, and compares each answer with the rules.

A `SchedulerSession` has one scheduler in the worker. Each of its methods calls the scheduler's method of the same name,
and compares the answer with the rules of the handout. The rules on admission leave some freedom; there the session
checks bounds. `StudentPolicy` is a session that serves as an engine's policy: the engine keeps the queues and blocks
and carries out the decisions, which are the student's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

from minipaged.course.grader.assignment import Bench, Failed, Failure
from minipaged.course.grader.counterexample import aligned, shown
from minipaged.course.grader.session import Session
from minipaged.course.sandbox.contract import Raised, Result
from minipaged.engine.engine import Engine
from minipaged.engine.memory import Memory
from minipaged.engine.policy import FirstComeFirstServed, recompute_seconds
from minipaged.engine.sequence import Request, RequestState
from minipaged.engine.views import plain, view_of
from minipaged.errors import Invariant
from minipaged.events import Event
from minipaged.scheduling import Costs, RequestView, Way

CLOSE = 1e-9
"""The largest relative difference of the two costs for which both "swap" and "recompute" are right."""
METHODS = ("fits", "share_tokens", "victim", "way_back", "admit")

Rule = Literal["order", "batch", "blocks", "no idling"]
"""A rule on admission: no request overtakes another; the batch has room; the pool has room; no request waits without a
reason."""
RULES: tuple[Rule, ...] = ("order", "batch", "blocks", "no idling")


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The arguments that a scheduler is made with."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    costs: Costs

    def as_arguments(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Scenery:
    """The drawing and events of a failure."""

    drawing: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()


class SchedulerSession(Session):
    """One scheduler of the student's, with the rules that its answers must follow."""

    KIND = "a scheduler"

    def __init__(
        self,
        bench: Bench,
        settings: SchedulerSettings,
        scenery: Callable[[str], Scenery] = lambda message: Scenery(),
        *,
        beside: SchedulerSession | None = None,
    ) -> None:
        """Make the scheduler. `scenery` returns the drawing and events for a failure's message."""
        super().__init__(bench, beside=beside)
        self.settings = settings
        self._scenery = scenery
        self.right = FirstComeFirstServed(*settings.as_arguments())
        self._variable = "other" if beside else "scheduler"
        self.latest: tuple[str, tuple[Any, ...]] = ("", ())
        """The method and arguments of the latest call."""
        sizes = ", ".join(f"{f.name}={getattr(settings, f.name)}" for f in fields(settings) if f.name != "costs")
        self._lines.append(f"costs = {_literal(settings.costs)}")
        self._lines.append(f"{self._variable} = {self._name}({sizes}, costs=costs)")
        self._scheduler = self._make(f"{self._name}(...)", *settings.as_arguments())

    # --- The calls --------------------------------------------------------------------------------

    def fits(self, request: RequestView) -> bool:
        """Check whether the request could ever be served, and return the right answer."""
        answer = self._question("fits", request)
        right = self.right.fits(request)
        if not isinstance(answer, bool):
            self._fail(
                f"fits returned {shown(answer)}; it has to return True or False",
                'assert isinstance(answer, bool), f"fits returned {answer!r}"',
            )
        if answer is not right:
            self._lines.append(f'assert answer is {right}, f"fits returned {{answer}}"')
            most, total = self.right.most_blocks(request), self.settings.num_blocks
            room = self.right.max_sequences
            self._fail(
                f"fits({request.request_id}) is {answer}; it should be {right}: the request can hold up to "
                f"{counted(most, 'block')}, and the pool has {total}; it has "
                f"{counted(request.num_sequences, 'sequence')}, and a batch has room for {room}"
            )
        return right

    def share_tokens(self, running: Sequence[RequestView]) -> dict[str, int]:
        """Check the tokens given to each running request, and return the right numbers."""
        answer = self._question("share_tokens", list(running))
        right = {name: number for name, number in self.right.share_tokens(running).items() if number}
        if not isinstance(answer, dict) or not all(_is_number(number) for number in answer.values()):
            self._fail(
                f"share_tokens returned {shown(answer)}; it has to return a dict from request_id to a number of tokens",
                'assert isinstance(answer, dict), f"share_tokens returned {answer!r}"',
                "assert all(type(number) is int and number >= 0 for number in answer.values()), answer",
            )
        answer = {name: number for name, number in answer.items() if number}
        if answer != right:
            self._fail(
                f"share_tokens returned {answer}; it should return {right}: a batch has "
                f"{self.settings.max_num_batched_tokens} tokens in all",
                "given = {name: number for name, number in answer.items() if number}",
                f'assert given == {right!r}, f"share_tokens returned {{answer}}"',
            )
        return right

    def victim(self, running: Sequence[RequestView]) -> str:
        """Check the choice of the running request to preempt, and return the right one."""
        answer = self._question("victim", list(running))
        right = self.right.victim(running)
        if not isinstance(answer, str) or answer != right:
            self._lines.append(f'assert answer == {right!r}, f"the victim is {{answer!r}}"')
            known = isinstance(answer, str) and any(answer == r.request_id for r in running)
            self._fail(
                f"the victim is {answer}; it should be {right}"
                if known
                else f"the victim is {shown(answer)}; it has to be the request_id of a running request: "
                f"{', '.join(sorted(r.request_id for r in running))}"
            )
        return right

    def way_back(self, request: RequestView, host_free: int) -> Way:
        """Check the choice between swap and recompute for the victim, and return the student's answer."""
        answer = self._question("way_back", request, host_free)
        right = self.right.way_back(request, host_free)
        if not isinstance(answer, str) or answer not in ("swap", "recompute"):
            self._fail(
                f'way_back returned {shown(answer)}; it has to return "swap" or "recompute"',
                'assert answer in ("swap", "recompute"), f"way_back returned {answer!r}"',
            )
        recompute = recompute_seconds(self.settings.costs, request.num_tokens)
        difference = self.right.price(request)
        has_room = request.num_blocks <= host_free
        if answer != right and not (has_room and abs(difference) <= CLOSE * recompute):
            self._fail(
                f"the way back of {request.request_id} is {answer!r}; it should be {right!r}: swapping its "
                f"{counted(request.num_blocks, 'block')} costs {_seconds(recompute + difference)}, recomputing its "
                f"{counted(request.num_tokens, 'token')} costs {_seconds(recompute)}, and the host has "
                f"{counted(host_free, 'block')} free",
                f'assert answer == {right!r}, f"way_back returned {{answer!r}}"',
            )
        way: Way = "swap" if answer == "swap" else "recompute"
        return way

    def admit(
        self,
        waiting: Sequence[RequestView],
        running: Sequence[RequestView],
        num_free: int,
        tokens_left: int,
        rules: Sequence[Rule] = RULES,
    ) -> list[str]:
        """Check the admitted requests by these rules, and return them in order of arrival."""
        answer = self._question("admit", list(waiting), list(running), num_free, tokens_left)
        names = [r.request_id for r in sorted(waiting, key=lambda r: r.arrival)]
        if isinstance(answer, tuple):
            answer = list(answer)
        if not isinstance(answer, list) or not all(isinstance(name, str) for name in answer):
            self._fail(
                f"admit returned {shown(answer)}; it has to return a list of request_ids",
                'assert isinstance(answer, list | tuple), f"admit returned {answer!r}"',
                'assert all(isinstance(name, str) for name in answer), f"admit returned {answer!r}"',
            )
        wrong = [name for name in answer if name not in names] or [
            n for n, times in Counter(answer).items() if times > 1
        ]
        if wrong:
            self._lines += [
                f'assert set(answer) <= {set(names)!r}, f"admit returned {{answer}}"',
                'assert len(answer) == len(set(answer)), f"admit returned {answer}"',
            ]
            why = "is in it twice" if wrong[0] in names else f"is not waiting; the waiting are {', '.join(names)}"
            self._fail(f"admit returned {shown(answer)}: {wrong[0]!r} {why}")
        admitted = [r for r in sorted(waiting, key=lambda r: r.arrival) if r.request_id in answer]
        if "order" in rules and (overtaken := [name for name in names[: len(answer)] if name not in answer]):
            first = next(name for name in names if name in answer and names.index(name) > names.index(overtaken[0]))
            self._fail(
                f"admit returned {answer}: {first} overtakes {overtaken[0]}, which arrived before it",
                f'assert {overtaken[0]!r} in answer or {first!r} not in answer, f"{first} overtakes {overtaken[0]}"',
            )
        if "batch" in rules:
            self._check_batch(admitted, running, tokens_left)
        if "blocks" in rules and (needed := sum(r.blocks_needed for r in admitted)) > num_free:
            self._fail(
                f"admit returned {answer}: together they need {counted(needed, 'block')}, but {num_free} are free",
                "needed = sum(r.blocks_needed for r in waiting if r.request_id in answer)",
                f'assert needed <= {num_free}, f"{{answer}} need {{needed}} blocks, {num_free} are free"',
            )
        if "no idling" in rules:
            self._check_idling(admitted, waiting, running, num_free, tokens_left)
        return [r.request_id for r in admitted]

    def _check_batch(self, admitted: list[RequestView], running: Sequence[RequestView], tokens_left: int) -> None:
        answer, most = [r.request_id for r in admitted], self.right.max_sequences
        total = sum(r.num_sequences for r in [*running, *admitted])
        if admitted and total > most:
            self._fail(
                f"admit returned {answer}: then {total} sequences run, but the batch has room for {most}",
                "admitted = [r for r in waiting if r.request_id in answer]",
                "total = sum(r.num_sequences for r in running + admitted)",
                f'assert total <= {most}, f"with {{answer}} {{total}} sequences run, there is room for {most}"',
            )
        left = tokens_left
        for request in admitted:
            if (least := _least(request)) > left:
                name = request.request_id
                self._fail(
                    f"admit returned {answer}: of the {tokens_left} tokens left, {max(0, left)} remain for {name}, "
                    f"but it needs at least {least}",
                    f'assert {name!r} not in answer, f"admit returned {{answer}}: {name} has no tokens"',
                )
            left -= request.tokens_to_run

    def _check_idling(
        self,
        admitted: list[RequestView],
        waiting: Sequence[RequestView],
        running: Sequence[RequestView],
        num_free: int,
        tokens_left: int,
    ) -> None:
        """Fail if a request waits that cannot cause a shortage, or is the first while no other runs."""
        answer = [r.request_id for r in admitted]
        sequences = sum(r.num_sequences for r in running)
        most = sum(max(self.right.most_blocks(r), r.num_blocks) for r in running)
        for place, request in enumerate(sorted(waiting, key=lambda r: r.arrival)):
            sequences += request.num_sequences
            most += self.right.most_blocks(request)
            num_free -= request.blocks_needed
            if sequences > self.right.max_sequences or _least(request) > tokens_left or num_free < 0:
                return
            if most <= self.settings.num_blocks:
                why = (
                    f"together with all running requests and all before it, it can hold up to "
                    f"{counted(most, 'block')}, and the pool has {self.settings.num_blocks}"
                )
            elif not running and place == 0:
                why = "no other request runs, so no block will ever be freed"
            else:
                return
            name = request.request_id
            if name not in answer:
                self._fail(
                    f"admit returned {answer}: {name} has to be admitted; it needs at least "
                    f"{counted(_least(request), 'token')} of the {tokens_left} left for it, and {why}",
                    f'assert {name!r} in answer, f"admit returned {{answer}}: {name} waits without a reason"',
                )
            tokens_left -= request.tokens_to_run

    def unchanged(self, method: str, *arguments: Any) -> None:
        """Call a method twice with the same arguments; fail if these or the answer change."""
        names = self._write(method, arguments)
        self._lines += [
            f"before = copy.deepcopy([{names}])",
            f"answers = [{self._variable}.{method}({names}) for _ in range(2)]",
        ]
        copies = [(self._bench.process.modules[0], "copy", (value,)) for value in arguments]
        given = tuple(Result(i) for i in range(len(arguments)))
        asked = [(self._scheduler, method, given)] * 2
        looks = [(self._bench.process.modules[0], "copy", (one,)) for one in given]
        outcomes = self._ask([*copies, *asked, *looks], seed=self._bench.seed)
        first, second = outcomes[len(arguments) :][:2]
        for answer in (first, second):
            if isinstance(answer, Raised):
                self._raised(method, answer.error, method)
        looked = zip(NAMES[method], arguments, outcomes[len(arguments) + 2 :], strict=True)
        for i, (name, value, after) in enumerate(looked):
            if after != value:
                self._fail(
                    f"{method} changed its argument {name}",
                    f'assert {name} == before[{i}], f"{method} changed {name}: {{{name}}}"',
                )
        if first != second:
            self._fail(
                f"{method} was called twice with the same arguments, and returned {shown(first)}, then {shown(second)}",
                'assert answers[0] == answers[1], f"two equal calls returned {answers}"',
            )

    # --- Calling and failing ----------------------------------------------------------------------

    def _question(self, method: str, *arguments: Any) -> Any:
        arguments = tuple(_as_data(value) for value in arguments)
        self.latest = method, arguments
        self._lines.append(f"answer = {self._variable}.{method}({self._write(method, arguments)})")
        [answer] = self._ask([(self._scheduler, method, arguments)], seed=self._bench.seed)
        if isinstance(answer, Raised):
            self._raised(method, answer.error, method)
        return answer

    def _write(self, method: str, arguments: Sequence[Any]) -> str:
        """Add the arguments to the script, and return their names."""
        self._lines += [f"{name} = {_literal(value)}" for name, value in zip(NAMES[method], arguments, strict=True)]
        return ", ".join(NAMES[method])

    def _imports(self) -> list[str]:
        views = [view for view in ("Costs", "RequestView") if any(f"{view}(" in line for line in self._lines)]
        return [f"from minipaged.scheduling import {', '.join(views)}"]

    def _failure(self, invariant: Invariant | None, message: str) -> Failure:
        scenery = self._scenery(message)
        return replace(super()._failure(invariant, message), drawing=scenery.drawing, events=scenery.events)


# --- In the engine --------------------------------------------------------------------------------


class StudentPolicy(SchedulerSession):
    """A student's scheduler as an engine's policy. Answers that break a rule raise Failed."""

    def __init__(self, bench: Bench, *settings: Any) -> None:
        """Make the policy with the arguments that an engine gives its policies."""
        given = SchedulerSettings(*settings)
        self._engine: Engine | None = None
        super().__init__(bench, replace(given, costs=plain(given.costs)), lambda message: Scenery(self.drawing()))

    @classmethod
    def of(cls, engine: Engine) -> StudentPolicy:
        """Return the engine's policy. From now on failures show the engine's queues and pools."""
        policy = engine.scheduler.policy
        assert isinstance(policy, cls)
        policy._engine = engine
        return policy

    def drawing(self) -> tuple[str, ...]:
        """Draw the engine's queues and pools."""
        if self._engine is None:
            return ()
        scheduler = self._engine.scheduler
        return draw([*scheduler.running, *scheduler.waiting], self._engine.blocks)

    def shorter(self, failed: Failed) -> Failed:
        """Return the failure with a script of the latest call, if that call fails by itself."""
        method, arguments = self.latest
        if not method:
            return failed
        try:
            getattr(SchedulerSession(self._bench, self.settings), method)(*arguments)
        except Failed as again:
            if again.failure.message == failed.failure.message:
                return Failed(replace(failed.failure, script=again.failure.script))
        return failed


# --- Drawing --------------------------------------------------------------------------------------


def draw(requests: Sequence[Request], blocks: Memory) -> tuple[str, ...]:
    """Draw the requests as a table, and the pools with the holder of each block."""
    rows = [["request", "arrived", "state", "sequences", "to run", "needs", "block tables"]]
    for request in sorted(requests, key=lambda r: r.order):
        view = view_of(request, blocks)
        tables = [f"{list(s.table.blocks)}".replace(",", "") for s in request.sequences if s.table.blocks]
        state = "dropped" if request.state is RequestState.WAITING and request.num_preemptions else request.state.value
        rows.append(
            [
                *(view.request_id, str(view.arrival), state, str(view.num_sequences)),
                counted(view.tokens_to_run, "token"),
                counted(view.blocks_needed, "block"),
                " ".join(tables) + " on the host" * (request.state is RequestState.SWAPPED),
            ]
        )
    lines = aligned(rows)
    pools = [("pool", blocks.allocator, False)]
    if blocks.host_allocator:
        pools.append(("host", blocks.host_allocator, True))
    for name, allocator, on_host in pools:
        cells = ["."] * allocator.num_blocks
        for request in requests:
            for sequence in request.sequences:
                for block in sequence.table.blocks if sequence.swapped == on_host else ():
                    cells[block] = request.request_id
        lines.append(f"{name}: {' '.join(cells)}   ({allocator.num_free} of {len(cells)} free)")
    return (*lines[: len(rows)], "", *lines[len(rows) :])


# --- Helpers --------------------------------------------------------------------------------------

NAMES = {
    "fits": ("request",),
    "share_tokens": ("running",),
    "victim": ("running",),
    "way_back": ("request", "host_free"),
    "admit": ("waiting", "running", "num_free", "tokens_left"),
}
"""The names of each method's arguments in scripts and messages."""


def _as_data(value: Any) -> Any:
    """Convert an engine's views, and lists of them, to plain data that can be sent."""
    if isinstance(value, list):
        return [plain(view) for view in value]
    return plain(value) if isinstance(value, RequestView) else value


def _least(request: RequestView) -> int:
    """Return the fewest tokens with which the request can run. Its sequences decode together."""
    return request.tokens_to_run if request.decodes else 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _literal(value: Any) -> str:
    """Return a value's source in a script. Fields with their default value are left out."""
    if isinstance(value, list):
        if not value:
            return "[]"
        return "[\n" + "".join(f"    {_literal(item)},\n" for item in value) + "]"
    if isinstance(value, RequestView | Costs):
        given = {f.name: getattr(value, f.name) for f in fields(value)}
        defaults = {f.name: f.default for f in fields(value) if f.default is not MISSING}
        shown = [f"{name}={one!r}" for name, one in given.items() if name not in defaults or defaults[name] != one]
        return f"{type(value).__name__}({', '.join(shown)})"
    return repr(value)


def counted(number: int, what: str) -> str:
    """Return the number with its noun: "1 block", "2 blocks"."""
    return f"{number} {what}{'s'[: number != 1]}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s"
