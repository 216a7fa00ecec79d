"""Assignment 10, `eviction`: which block leaves a floor of the cache.

The properties run random requests on a `FlooredCache` with floors of a few blocks; any block that may leave is a right
answer. Hypothesis generates and shrinks the requests. On made-up prompts, the share of seconds that the student's
policy saves is compared with the shares of two other policies: the least recently used, and one that knows the future.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st

from minipaged.course.assignments.eviction.session import EvictionSession, EvictionStep
from minipaged.course.assignments.eviction.yardsticks import shares
from minipaged.course.grader.assignment import Bench, Check, Failed, Failure
from minipaged.course.grader.counterexample import make_script, raised_message, shown
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.sandbox.contract import Handle, Raised, StudentError
from minipaged.simulation.floored_cache import (
    DEVICE_BLOCKS,
    HOST_BLOCKS,
    Floor,
    WrongEviction,
    prompts,
    serve,
)

MOST_TOKENS = 4
"""The most blocks of a request's text."""
NUM_PROMPTS = 400
"""The number of requests that are served for a score."""
BETTER, NEARLY_OURS = 0.2, 0.4
"""The required shares of the way from the least recently used policy to the one that knows the future."""
ROUNDING = 1e-9
"""A share that is smaller by this much is enough."""

Program = tuple[int, int, list[EvictionStep]]
"""The sizes of the device and of the host, and the steps."""


# --- Properties ---------------------------------------------------------------------------------------


def tokens_of(number: int) -> tuple[int, ...]:
    """Return the tokens 0 and 1 that a number stands for. So a step is few choices, and Hypothesis can leave it out."""
    return tuple(map(int, f"{number:b}"[1:]))


SINGLE = st.integers(0, 3).map(lambda token: (token,))
NO_HOST, HOSTS = st.just(0), st.integers(0, 3)
FEW, DEVICES = st.integers(1, 2), st.integers(1, 4)
TEXTS = st.integers(2, 2 ** (MOST_TOKENS + 1) - 1).map(tokens_of)


def programs_of(
    *kinds: str,
    texts: st.SearchStrategy[tuple[int, ...]],
    devices: st.SearchStrategy[int],
    hosts: st.SearchStrategy[int],
) -> st.SearchStrategy[Program]:
    """Return a strategy for programs with random steps of these kinds, and requests with these texts."""
    steps = st.lists(st.builds(EvictionStep, st.sampled_from(kinds), texts, st.integers(0, 3)), max_size=10)
    return st.tuples(devices, hosts, steps)


def property_of(
    *kinds: str,
    texts: st.SearchStrategy[tuple[int, ...]] = SINGLE,
    devices: st.SearchStrategy[int] = DEVICES,
    hosts: st.SearchStrategy[int] = NO_HOST,
    twice: bool = False,
) -> Check:
    """Return a check that runs such programs; `twice`, with two policies whose answers have to be equal."""

    def run(bench: Bench, program: Program) -> None:
        device, host, steps = program
        session = EvictionSession(bench, device, host)
        if twice:
            try:
                session.run(steps)
                other = EvictionSession(bench, device, host, beside=session)
                other.run(steps)
                session.run([EvictionStep("drain")])
                other.run([EvictionStep("drain")])
            except Failed:
                bench.restart()  # what two policies share must not be there when shorter programs are tried
                raise
        else:  # at the end all blocks leave, so that a lost one is missed
            session.run([*steps, EvictionStep("drain")])

    return lambda bench: search(
        bench, programs_of(*kinds, texts=texts, devices=devices, hosts=hosts), partial(run, bench)
    )


# --- The score on prompts -------------------------------------------------------------------------------


class RemoteEviction:
    """An object of the student's class in the worker. Its `use` calls go with the next `evict`, in one message."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        module, name = bench.part
        # Another seed than that of the prompts, which student code shall not learn.
        [made] = bench.process.batch([(module, name, (DEVICE_BLOCKS, HOST_BLOCKS))], seed=0)
        self._check("__init__", name, made)
        if not isinstance(made, Handle):
            raise Failed(Failure(f"{name}({DEVICE_BLOCKS}, {HOST_BLOCKS}) returned {made!r} instead of a policy"))
        self._policy = made
        self._uses: list[tuple[Handle, str, Sequence[Any]]] = []

    def use(self, block: int, parent: int | None) -> None:
        self._uses.append((self._policy, "use", (block, parent)))

    def evict(self, floor: Floor, pinned: Sequence[int]) -> int | None:
        calls = [*self._uses, (self._policy, "evict", (floor, pinned))]
        self._uses.clear()
        answers = self._bench.process.batch(calls)
        for (_, method, _), answer in zip(calls, answers, strict=True):
            self._check(method, method, answer)
        if isinstance(answers[-1], Handle):
            raise Failed(Failure(f"evict returned {shown(answers[-1])}; it has to return a block, or None"))
        block: int | None = answers[-1]
        return block

    def close(self) -> None:
        """Make the calls of `use` that are left."""
        for answer in self._bench.process.batch(self._uses):
            self._check("use", "use", answer)

    @staticmethod
    def _check(method: str, call: str, answer: Any) -> None:
        if isinstance(answer, Raised):
            crashed = isinstance(answer.error, StudentError)
            raise Failed(Failure(raised_message(method, answer.error, call), crashed=crashed))


def check_prompts(way: float) -> Callable[[Bench], None]:
    """Return a check that the policy has gone this share of the way between the two others."""

    def check(bench: Bench) -> None:
        least, most = shares(bench.seed, NUM_PROMPTS)
        required = least + way * (most - least) - ROUNDING
        policy = RemoteEviction(bench)
        try:
            saved = serve(prompts(bench.seed, NUM_PROMPTS), policy)
            policy.close()
        except WrongEviction as wrong:
            raise Failed(failure(bench, str(wrong))) from None
        except Failed as failed:
            raise Failed(failure(bench, failed.failure.message, crashed=failed.failure.crashed)) from None
        if saved < required:
            message = (
                f"{saved:.1%} of the seconds are saved; {required:.1%} are required. The least recently used policy "
                f"saves {least:.1%}, one that knows the future {most:.1%}"
            )
            told = f'assert saved >= {required!r}, f"{{saved:.1%}} of the seconds are saved"'
            raise Failed(failure(bench, message, told))

    return check


def failure(bench: Bench, message: str, *lines: str, crashed: bool = False) -> Failure:
    """Return a failure whose script serves the prompts again."""
    name = bench.part[1]
    body = [
        f"policy = {name}({DEVICE_BLOCKS}, {HOST_BLOCKS})",
        f"saved = serve(prompts({bench.seed}, {NUM_PROMPTS}), policy)",
        *lines,
    ]
    imports = ["from minipaged.simulation.floored_cache import prompts, serve"]
    return Failure(message, script=make_script(bench.submission, name, None, message, imports, body), crashed=crashed)


# --- The assignment -------------------------------------------------------------------------------

CHECKS: dict[str, Check] = {
    "empty floors": property_of("evict"),
    "a block that is there": property_of("visit", "visit", "evict"),
    "down to the host, and up": property_of("visit", "visit", "evict", hosts=HOSTS),
    "never a pinned block": property_of("begin", "begin", "visit", "end", "evict", devices=FEW, hosts=FEW),
    "children first": property_of("begin", "visit", "visit", "end", "evict", texts=TEXTS, hosts=HOSTS),
    "the same calls, the same answers": property_of("begin", "visit", "end", texts=TEXTS, hosts=HOSTS, twice=True),
    "as good as the least recently used": check_prompts(0.0),
    "better than the least recently used": check_prompts(BETTER),
    "well above the least recently used": check_prompts(NEARLY_OURS),
}

ASSIGNMENT = described(
    "eviction",
    CHECKS,
    part="Eviction",
    members=("use", "evict"),
    modules=("minipaged.simulation.floored_cache",),  # for students' tests
)
