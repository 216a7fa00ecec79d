"""Assignment 8, `under-load`: the order of service when more requests arrive than can be served in time.

The real engine serves random loads on a simulated machine; the student's part decides the order. The score depends on
the share of requests served within two objectives (goodput: Zhong et al., DistServe, OSDI 2024). The longest wait for a
first token is bounded by LONGER times that in order of arrival, so that no request is starved. The required share lies
between those of two orders: that of arrival, and our own (`Ours`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any

from hypothesis import strategies as st

from minipaged.course.assignments.under_load.ours import Ours
from minipaged.course.grader.assignment import Bench, Check, Failed, Failure, Performance
from minipaged.course.grader.counterexample import aligned, make_script, raised_message, shown
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.grader.serving import Parts, check_texts, check_workloads, crowded_workloads
from minipaged.course.sandbox.contract import Handle, Limits, Raised, StudentError
from minipaged.engine.policies.in_turn import InTurn
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.views import plain
from minipaged.scheduling import Objectives, RequestView
from minipaged.simulation.traces import ServedRequest, TraceReplay, TraceRequest, attainment, poisson_trace

OBJECTIVES = Objectives(first_token=3.0, between_tokens=0.12)
BATCH_TOKENS = 512
LONGER = 1.5
"""The bound on the longest wait, as a multiple of that in order of arrival."""
LEAST_BOUND = 10.0
"""The least bound on the longest wait in seconds, for loads in which requests hardly wait in order of arrival."""
ENGINE_WORKLOADS = 8
MOST_STEPS = 5
"""The most steps of a replay, as a multiple of those in order of arrival. An order that needs more gets nowhere."""


@dataclass(frozen=True, slots=True)
class ArrivalLoad:
    """Requests that arrive at random, in phases: (seconds, requests per second)."""

    name: str
    phases: tuple[tuple[float, float], ...]

    def requests(self, seed: int) -> list[TraceRequest]:
        return poisson_trace(self.phases, seed=seed)


LIGHT = ArrivalLoad("a light load", ((60, 1.5),))
OVERLOAD = ArrivalLoad("an overload", ((60, 4.5),))
BURSTS = ArrivalLoad("bursts", ((20, 7.0), (40, 1.5), (20, 7.0), (40, 1.5)))


# --- A student's policy -----------------------------------------------------------------------------


class RemotePolicy:
    """One object of the student's class in the worker. Its methods raise Failed and Misbehaviour."""

    def __init__(self, bench: Bench, longest_wait: float) -> None:
        self._bench = bench
        self._made = f"{bench.part[1]}({OBJECTIVES!r}, {longest_wait!r})"
        module, name = bench.part
        made = self._ask(name, (module, name, (OBJECTIVES, longest_wait)))
        if not isinstance(made, Handle):
            raise Failed(Failure(f"{self._made} returned {made!r} instead of a policy"))
        self._policy = made

    def turns(self, requests: Sequence[RequestView], now: float) -> list[tuple[float, ...]]:
        """Return the turn of each request as a tuple."""
        try:
            answers = self._ask("turn", self._asked(requests, now))
        except Failed as failed:
            raise Failed(replace(failed.failure, script=self._raising(requests, now, failed.failure.message))) from None
        assert isinstance(answers, list)
        assert len(answers) == len(requests)
        return [self._turn(answer, request, now) for answer, request in zip(answers, requests, strict=True)]

    def _asked(self, requests: Sequence[RequestView], now: float) -> tuple[Handle, str, tuple[Any, ...]]:
        values = [list(astuple(plain(request))) for request in requests]
        return self._bench.process.modules[0], "turns", (self._policy, values, now)

    def _raising(self, requests: Sequence[RequestView], now: float, message: str) -> str | None:
        """Return a script of the first call that raises by itself, or None."""
        outcomes = self._bench.process.batch([self._asked([request], now) for request in requests])
        raising = (request for request, answer in zip(requests, outcomes, strict=True) if isinstance(answer, Raised))
        request = next(raising, None)
        return None if request is None else self._question(plain(request), now, message)

    def _turn(self, answer: Any, request: RequestView, now: float) -> tuple[float, ...]:
        numbers = answer if isinstance(answer, tuple | list) else (answer,)
        if numbers and all(isinstance(n, int | float) and not math.isnan(n) for n in numbers):
            return tuple(numbers)
        message = f"turn returned {shown(answer)}; it has to return a number, or a tuple of numbers"
        raise Failed(Failure(message, script=self._question(plain(request), now, message)))

    def _ask(self, method: str, call: tuple[Handle, str, tuple[Any, ...]]) -> Any:
        [answer] = self._bench.process.batch([call], seed=self._bench.seed)
        if isinstance(answer, Raised):
            crashed = isinstance(answer.error, StudentError)
            raise Failed(Failure(raised_message(method, answer.error, method), crashed=crashed))
        return answer

    def _question(self, request: RequestView, now: float, message: str) -> str:
        lines = [
            f"turn = {self._made}.turn({request!r}, now={now!r})",
            "numbers = turn if isinstance(turn, tuple) else (turn,)",
            'assert numbers and all(number == number + 0 for number in numbers), f"turn returned {turn!r}"',
        ]
        return script(self._bench, message, lines)


def script(bench: Bench, message: str, lines: Sequence[str]) -> str:
    """Return a program that reproduces a failure."""
    text = "\n".join(lines)
    imports = []
    for module, names in (
        ("minipaged.scheduling", ("Objectives", "RequestView")),
        ("minipaged.simulation.traces", ("TraceReplay", "attainment", "poisson_trace")),
    ):
        if used := [name for name in names if f"{name}(" in text]:
            imports.append(f"from {module} import {', '.join(used)}")
    return make_script(bench.submission, bench.part[1], None, message, imports, lines)


class StudentTurns(InTurn):
    """An engine's policy with the student's order. It gets many turns in one message, because messages are slow."""

    def __init__(self, part: RemotePolicy, *settings: Any) -> None:
        super().__init__(*settings, by=self._known_turn, clock=time.perf_counter)
        self._part = part
        self._known: dict[int, tuple[float, ...]] = {}

    def _known_turn(self, request: RequestView, now: float) -> tuple[float, ...]:
        return self._known[request.arrival]

    def _learn(self, requests: Sequence[RequestView]) -> None:
        turns = self._part.turns(requests, self.clock())
        self._known = {request.arrival: turn for request, turn in zip(requests, turns, strict=True)}

    def share_tokens(self, running: Sequence[RequestView]) -> dict[str, int]:
        self._learn(running)
        return super().share_tokens(running)

    def victim(self, running: Sequence[RequestView]) -> str:
        self._learn(running)
        return super().victim(running)

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        self._learn(waiting)
        return super().admit(waiting, running, num_free, tokens_left)


# --- Loads --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of serving a load."""

    served: Sequence[ServedRequest]
    steps: int

    @property
    def in_time(self) -> float:
        """The share of requests served within both objectives."""
        return attainment(self.served, OBJECTIVES)

    @property
    def longest_wait(self) -> float:
        """The longest wait for a first token, in seconds."""
        return max(one.first_token for one in self.served)


def bound(first_come: LoadResult) -> float:
    """Return the longest allowed wait for a first token, in seconds."""
    return round(max(LEAST_BOUND, LONGER * first_come.longest_wait), 1)


def served(requests: Sequence[TraceRequest], most_steps: float = math.inf, **order: Any) -> LoadResult:
    """Serve the requests to the end, or for `most_steps` steps. `order` is a `policy` or a `turn`."""
    replay = TraceReplay(requests, max_num_batched_tokens=BATCH_TOKENS, **order)
    policy = replay.engine.scheduler.policy
    if isinstance(policy, StudentTurns):
        policy.clock = replay.runner.clock
    for step, _ in enumerate(replay, 1):
        if step >= most_steps:
            break
    return LoadResult(replay.served, step)


@cache
def beside(load: ArrivalLoad, seed: int) -> tuple[LoadResult, LoadResult]:
    """Return the results in order of arrival and in our order. All tests of the load share them."""
    requests = load.requests(seed)
    first_come = served(requests, policy=FirstComeFirstServed)
    return first_come, served(requests, turn=Ours(OBJECTIVES, bound(first_come)).turn)


@dataclass(frozen=True, slots=True)
class Graded:
    """One load, served in three orders."""

    load: ArrivalLoad
    seed: int
    requests: Sequence[TraceRequest]
    first_come: LoadResult
    ours: LoadResult
    students: LoadResult

    @classmethod
    def of(cls, bench: Bench, load: ArrivalLoad) -> Graded:
        """Serve the load. Raises Failed if the student's order does not end, or a request waits too long."""
        requests = load.requests(bench.seed)
        first_come, ours = beside(load, bench.seed)
        longest = bound(first_come)
        bench.process.forget()
        part = RemotePolicy(bench, longest)
        students = served(requests, MOST_STEPS * first_come.steps, policy=partial(StudentTurns, part))
        graded = cls(load, bench.seed, requests, first_come, ours, students)
        if left := len(requests) - len(students.served):
            graded.fail(
                bench,
                f"after {students.steps:,} steps {left} of {len(requests)} requests have not ended; in order of "
                f"arrival all have ended after {first_come.steps:,}",
                [f"assert len(replay.served) == {len(requests)}, 'not all requests have ended'"],
            )
        if students.longest_wait > longest:
            graded.fail(
                bench,
                f"a request waits {students.longest_wait:.1f} s for its first token; {longest:g} s are allowed (in "
                f"order of arrival the longest wait is {first_come.longest_wait:.1f} s)",
                [
                    "waited = max(one.first_token for one in replay.served)",
                    f'assert waited <= {longest!r}, f"a request waits {{waited:.1f}} s for its first token"',
                ],
            )
        return graded

    def least(self, share: float) -> float:
        """Return the share in time that is `share` of the way from order of arrival to our order."""
        return self.first_come.in_time + share * (self.ours.in_time - self.first_come.in_time)

    def require(self, bench: Bench, least: float, why: str) -> None:
        """Raise Failed if a smaller share is served in time."""
        if self.students.in_time < least:
            message = f"{self.students.in_time:.1%} of the requests are served in time; {least:.1%} are required: {why}"
            self.fail(
                bench,
                message,
                [
                    "in_time = attainment(replay.served, objectives)",
                    f'assert in_time >= {least!r}, f"{{in_time:.1%}} of the requests are served in time"',
                ],
            )

    def fail(self, bench: Bench, message: str, lines: Sequence[str]) -> None:
        """Raise Failed, with the load as a script and a table of the results."""
        message = f"under {self.load.name}: {message}"
        body = [
            f"objectives = {OBJECTIVES!r}",
            f"policy = {bench.part[1]}(objectives, longest_wait={bound(self.first_come)!r})",
            f"requests = poisson_trace({self.load.phases!r}, seed={self.seed})",
            f"replay = TraceReplay(requests, turn=policy.turn, max_num_batched_tokens={BATCH_TOKENS})",
            "for step, _ in enumerate(replay):",
            f"    if step > {MOST_STEPS * self.first_come.steps}:",
            "        break",
            *lines,
        ]
        raise Failed(Failure(message, drawing=self.drawing(), script=script(bench, message, body)))

    def drawing(self) -> tuple[str, ...]:
        """Draw a table of the requests by size: the share in time and the longest wait of each quarter."""
        rows = [["tokens in all", "requests", "in time: yours", "by arrival", "longest wait: yours", "by arrival"]]
        sizes = sorted(map(_tokens, self.requests))
        quarters = [sizes[len(sizes) * i // 4] for i in (1, 2, 3)]
        for low, high in zip([0, *quarters], [*quarters, math.inf], strict=True):
            of = [
                LoadResult([one for one in each.served if low <= _tokens(one.request) < high], 0)
                for each in (self.students, self.first_come)
            ]
            count = sum(low <= _tokens(one) < high for one in self.requests)
            waits = [f"{each.longest_wait:.1f} s" if each.served else "-" for each in of]
            shares = [f"{each.in_time:.0%}" for each in of]
            rows.append([f"{low} to {high - 1}" if high < math.inf else f"from {low}", f"{count}", *shares, *waits])
        return tuple(aligned(rows))


def _tokens(request: TraceRequest) -> int:
    return request.context_tokens + request.generated_tokens


# --- Tests --------------------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> RequestView:
    """Draw a request at a random stage of its computation."""
    prompt, answer = draw(st.integers(1, 900)), draw(st.integers(1, 900))
    has = draw(st.sampled_from([0, prompt // 2, prompt, prompt + answer // 2]))
    return RequestView(
        request_id=draw(st.sampled_from("abc")),
        arrival=draw(st.integers(0, 999)),
        prompt_tokens=prompt,
        max_output_tokens=answer,
        tokens_to_run=max(1, prompt - has),
        decodes=has >= prompt,
        num_blocks=-(-has // 16),
        num_tokens=has,
        blocks_needed=draw(st.integers(0, 60)),
        arrival_time=draw(st.sampled_from([0.0, 0.5, 3.0, 40.0])),
    )


def check_order(bench: Bench) -> None:
    """Check that `turn` returns numbers, and the same numbers for the same arguments."""

    def run(drawn: tuple[RequestView, float]) -> None:
        request, later = drawn
        part, now = RemotePolicy(bench, 20.0), request.arrival_time + later
        first, second = part.turns([request] * 2, now)
        if first != second:
            message = f"turn was called twice with the same arguments, and returned {first}, then {second}"
            lines = [
                f"policy = {bench.part[1]}({OBJECTIVES!r}, 20.0)",
                f"turns = [policy.turn({request!r}, {now!r}) for _ in range(2)]",
                'assert turns[0] == turns[1], f"two equal calls returned {turns}"',
            ]
            raise Failed(Failure(message, script=script(bench, message, lines)))

    search(bench, st.tuples(views(), st.sampled_from([0.0, 0.1, 3.0, 3.5, 19.0, 100.0])), run)


def check_light(bench: Bench) -> None:
    graded = Graded.of(bench, LIGHT)
    graded.require(bench, graded.first_come.in_time, "the share in order of arrival, which is good enough here")


def check_loads(share: float, *loads: ArrivalLoad) -> Callable[[Bench], None]:
    """Return a check that the share in time is at least `share` of the way from order of arrival to our order."""

    def check(bench: Bench) -> None:
        for load in loads:
            graded = Graded.of(bench, load)
            by_arrival, ours = (f"{each.in_time:.1%}" for each in (graded.first_come, graded.ours))
            way = f"{share:.0%} of the way from {by_arrival}, in order of arrival, to our {ours}"
            graded.require(bench, graded.least(share), way)

    return check


def parts_of(bench: Bench) -> Parts:
    return Parts(policy=partial(StudentTurns, RemotePolicy(bench, 20.0)))


def check_engine(bench: Bench) -> None:
    """Check crowded pools, beams and prefix caching: all requests end, with the tokens that each has alone."""
    check_workloads(bench, islice(crowded_workloads(bench.seed), ENGINE_WORKLOADS), partial(parts_of, bench))


def check_model(bench: Bench) -> None:
    """Check that SmolLM2 writes the same texts as in order of arrival."""
    check_texts(bench, partial(parts_of, bench))


def measure(bench: Bench) -> Performance:
    """Measure the goodput under an overload: requests in time per second of arrivals, and that of our order."""
    graded = Graded.of(bench, OVERLOAD)
    seconds = sum(seconds for seconds, _ in OVERLOAD.phases)
    students, ours = (each.in_time * len(graded.requests) / seconds for each in (graded.students, graded.ours))
    return Performance(students, ours, "requests in time")


# --- The assignment -------------------------------------------------------------------------------

CHECKS: dict[str, Check] = {
    "an order": check_order,
    "a light load": check_light,
    "the engine, on a small model": check_engine,
    "an overload": check_loads(0.5, OVERLOAD),
    "bursts": check_loads(0.5, BURSTS),
    "nearly as good as ours": check_loads(0.85, OVERLOAD, BURSTS),
    "SmolLM2": check_model,
}

ASSIGNMENT = described(
    "under-load",
    CHECKS,
    part="UnderLoad",
    members=("turn",),
    limits=Limits(test_seconds=300),
    modules=(
        "minipaged.course.assignments.under_load.worker",
        *("minipaged.simulation.traces", "minipaged.reference.block_allocator", "minipaged.reference.block_table"),
    ),  # the others are there so that students' tests can replay loads
    measure=measure,
)
