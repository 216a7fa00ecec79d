"""Assignment 1, `block-allocator`: reference counts and copy-on-write (paper, sections 4.2 and 4.4).

The properties run random programs of calls; Hypothesis generates them, and shrinks one that fails. Each test uses
different calls, so that a half-finished part gets its points. Then the real engine serves random workloads with the
student's allocator for both of its pools, on a model that checks every read (`content_runner.py`). Finally SmolLM2 has
to write the same texts as with the reference's allocator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from hypothesis import strategies as st

from minipaged.contracts import BlockAllocator
from minipaged.course.assignments.block_allocator.session import (
    MANY,
    AllocatorSession,
    Call,
    HeldBlock,
    Number,
    Several,
    Variable,
    shorten,
)
from minipaged.course.grader.assignment import (
    Bench,
    Check,
    Failed,
    Failure,
    Performance,
    Submission,
    fastest,
)
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.grader.serving import Parts, check_texts, check_workloads, numbered_workloads
from minipaged.course.sandbox.contract import Handle, Misbehaviour, Raised
from minipaged.engine.checked_allocator import MEMBERS
from minipaged.errors import BlockNotAllocated
from minipaged.testing.workloads import WorkloadRun, random_workload
from minipaged.tiers import plain_parts

LARGEST_POOL = 4
"""The largest pool of the programs that Hypothesis generates."""
MOST_BLOCKS = 4
"""The most blocks in a call of `share_many` or `free_many`."""
LARGE_POOLS = 8, 33, 100, 600
"""The pool sizes of the long runs. Some bugs appear only in pools of hundreds of blocks."""
MOST_MISBEHAVIOURS = 8
"""The most workers lost while a program that hangs or kills its worker is shortened."""
ENGINE_WORKLOADS = 25
TIMED_WORKLOADS = 60
"""The number of workloads whose calls are timed."""

Program = tuple[int, list[Call]]
"""The size of a pool, and the calls to make on it."""


# --- Properties -----------------------------------------------------------------------------------


def programs_of(
    *methods: str, with_numbers: Sequence[str] = (), many: Sequence[str] = (), longest: int = 25
) -> st.SearchStrategy[Program]:
    """Return a strategy for programs: calls of `methods` on held blocks, of `with_numbers` on any number, and of `many`
    on several blocks."""
    held = st.builds(HeldBlock, st.integers(0, LARGEST_POOL - 1))
    numbers = st.builds(Number, st.integers(-1, LARGEST_POOL))
    calls = [st.just(Call("allocate"))]
    calls += [st.builds(Call, st.just(method), held) for method in methods if method != "allocate"]
    calls += [st.builds(Call, st.just(method), numbers) for method in with_numbers]
    some = st.lists(held, max_size=MOST_BLOCKS)
    if with_numbers:  # a bad block among held ones, so that a part may change something before it raises
        few = st.lists(held, max_size=MOST_BLOCKS // 2)
        some = st.one_of(some, st.builds(lambda before, one, after: [*before, one, *after], few, numbers, few))
    several = {
        "allocate_many": st.builds(Number, st.integers(-1, LARGEST_POOL + 1)),
        "share_many": st.builds(Several, some.map(tuple), st.booleans()),
        "free_many": st.builds(Several, some.map(tuple), st.booleans()),
    }
    calls += [st.builds(Call, st.just(method), several[method]) for method in many]
    sizes, programs = st.integers(1, LARGEST_POOL), st.lists(st.one_of(calls), max_size=longest)
    # Half of the programs begin with a full pool, where most bugs appear.
    return st.builds(
        lambda size, full, program: (size, [Call("allocate")] * (size * full) + program), sizes, st.booleans(), programs
    )


def property_of(
    *methods: str,
    with_numbers: Sequence[str] = (),
    many: Sequence[str] = (),
    unless: Callable[[AllocatorSession, Call], bool] = lambda session, call: False,
) -> Callable[[Bench], None]:
    """Return a check that runs such programs.

    `many` are methods to call if the student wrote them. `unless` says which calls to leave out, because another test
    is about them.
    """

    def check(bench: Bench) -> None:
        written = [method for method in many if method in bench.also]
        latest: Program = (1, [])

        def run(program: Program) -> None:
            nonlocal latest
            latest = program
            num_blocks, calls = program
            session = AllocatorSession(bench, num_blocks)
            for call in calls:
                if not unless(session, call):
                    session.call(call)

        try:
            search(bench, programs_of(*methods, with_numbers=with_numbers, many=written), run)
        except Misbehaviour as misbehaviour:
            num_blocks, calls = latest
            raise shorter_misbehaviour(bench, num_blocks, calls, misbehaviour) from None

    return check


def shorter_misbehaviour(bench: Bench, num_blocks: int, calls: list[Call], first: Misbehaviour) -> Misbehaviour:
    """Return a misbehaviour with the same verdict after fewer calls.

    Each successful try costs a worker, and a second if a call does not return. Hypothesis does not shrink these
    programs, because it would wait for thousands of calls that do not return.
    """
    found = [first]
    limits = bench.assignment.limits
    quick = bench.beside(limits=replace(limits, call_seconds=min(1.0, limits.call_seconds)))

    def fails(some: list[Call], size: int) -> bool:
        if len(found) > MOST_MISBEHAVIOURS:
            return False
        done = 0
        try:
            quick.process.forget()
            session = AllocatorSession(quick, size)
            for done, call in enumerate(some, start=1):  # noqa: B007 -- used after the loop
                session.call(call)
            quick.process.finish()
        except Failed:
            return False
        except Misbehaviour as misbehaviour:
            quick.restart()
            if misbehaviour.verdict is first.verdict and misbehaviour.failure:
                del some[done:]
                found.append(misbehaviour)
                return True
        return False

    with quick:
        sizes = [size for size in (1, 2, 3) if size < num_blocks]
        size = next((size for size in sizes if fails(list(calls), size)), num_blocks)
        shorten(list(calls), lambda some: fails(some, size))
    return found[-1]


def check_new_pool(bench: Bench) -> None:
    """Check new allocators of several sizes; `AllocatorSession` compares them when it is made."""
    search(bench, st.integers(-2, 20), lambda num_blocks: AllocatorSession(bench, num_blocks))


def is_copy_in_a_full_pool(session: AllocatorSession, call: Call) -> bool:
    return call.method == "copy_on_write" and session.is_full() and session.is_shared(call.operand)


def is_refused_to_many(session: AllocatorSession, call: Call) -> bool:
    return call.method in MANY and session.is_refused(call)


def check_long_runs(bench: Bench) -> None:
    """Check thousands of calls in larger pools, which fill and empty the pool several times."""
    for num_blocks in LARGE_POOLS:
        r, calls = random.Random(f"{bench.seed} {num_blocks}"), list[Call]()
        for _ in range(3):
            filling = ["allocate"] * 6 + ["share", "copy_on_write", "free", *bench.also]
            emptying = ["free"] * 6 + ["share", "copy_on_write", "allocate", *bench.also]
            for methods in (filling, emptying):
                for _ in range(2 * num_blocks):
                    calls.append(any_call(r, r.choice(methods), num_blocks))
        fail_shortest(bench, num_blocks, calls)


def any_call(r: random.Random, method: str, num_blocks: int) -> Call:
    """Return a random call of this method for a long run."""
    if method == "allocate":
        return Call(method)
    if method == "allocate_many":
        return Call(method, Number(r.randrange(num_blocks // 4)))
    if method in MANY:
        return Call(method, Several(tuple(HeldBlock(r.randrange(num_blocks)) for _ in range(r.randrange(MOST_BLOCKS)))))
    return Call(method, HeldBlock(r.randrange(num_blocks)))


def fail_shortest(bench: Bench, num_blocks: int, calls: list[Call]) -> None:
    """Make the calls; if they fail, raise Failed with the fewest of them that still fail."""

    found: list[Failure] = []

    def fails(some: list[Call], size: int) -> bool:
        bench.process.forget()
        session = AllocatorSession(bench, size)
        for done, call in enumerate(some, start=1):
            try:
                session.call(call)
            except Failed as failed:
                del some[done:]
                found.append(failed.failure)
                return True
        return False

    try:
        if not fails(list(calls), num_blocks):
            return
        sizes = [size for size in (1, 2, 3, *(1 << i for i in range(2, 10))) if size < num_blocks]
        size = next((size for size in sizes if fails(list(calls), size)), num_blocks)
        shorten(list(calls), lambda some: fails(some, size))
    except Misbehaviour:  # time ran out
        if not found:
            raise
    if found:
        raise Failed(found[-1])


# --- The engine -----------------------------------------------------------------------------------


class RemoteAllocator(BlockAllocator):
    """A student's allocator for the engine. It makes every call in the worker, and records it.

    Values that were read are cached until the next call that may change them, since the engine's invariant checks read
    every block's reference count again and again.
    """

    def __init__(self, bench: Bench, num_blocks: int, part: tuple[Handle, str] | None = None) -> None:
        module, name = part or bench.part
        self._process = bench.process
        [made] = self._process.batch([(module, name, (num_blocks,))], seed=bench.seed)
        if isinstance(made, Raised):
            raise made.error
        self._inner: Handle = made
        self._size = num_blocks
        self._known: dict[int, Any] = {}
        self._num_free: Any = None
        self.calls: list[tuple[str, int | None, Any]] = []
        """The calls made: method, block, and the returned value, which is None if the call raised."""

    @property
    def num_blocks(self) -> int:
        return self._size

    @property
    def num_free(self) -> int:
        if self._num_free is None:
            self._look()
        if isinstance(self._num_free, Raised):
            raise self._num_free.error
        number: int = self._num_free
        return number

    def ref_count(self, block: int) -> int:
        if not 0 <= block < self._size:
            raise BlockNotAllocated(f"there is no block {block}")
        if block not in self._known:
            self._look()
        count = self._known[block]
        if isinstance(count, Raised):
            raise count.error
        number: int = count
        return number

    def allocate(self) -> int:
        block: int = self._call("allocate", None)
        return block

    def share(self, block: int) -> None:
        self._call("share", block)

    def free(self, block: int) -> None:
        self._call("free", block)

    def copy_on_write(self, block: int) -> int:
        target: int = self._call("copy_on_write", block)
        return target

    def _call(self, method: str, block: int | None) -> Any:
        self._known.clear()
        self._num_free = None
        args = () if block is None else (block,)
        answer, self._num_free = self._process.batch([(self._inner, method, args), (self._inner, "num_free", None)])
        if isinstance(answer, Raised):
            self.calls.append((method, block, None))
            raise answer.error
        self.calls.append((method, block, answer))
        return answer

    def _look(self) -> None:
        blocks = range(self._size)
        looks = [(self._inner, "num_free", None), *((self._inner, "ref_count", (block,)) for block in blocks)]
        self._num_free, *counts = self._process.batch(looks)
        self._known = dict(zip(blocks, counts, strict=True))

    def as_program(self) -> list[Call]:
        """Return the calls made as a program, in which each block is the result of the last call that returned it."""
        latest: dict[Any, int] = {}
        program: list[Call] = []
        for label, (method, block, returned) in enumerate(self.calls):
            operand = None
            if block is not None:
                operand = Variable(latest[block]) if block in latest else Number(block)
            program.append(Call(method, operand, label if method in ("allocate", "copy_on_write") else None))
            if isinstance(returned, int) and method in ("allocate", "copy_on_write"):
                latest[returned] = label
        return program


CARRIED = type("the allocator that you brought along", (RemoteAllocator,), {})
"""A class whose name appears in messages, to say that a mistake is not in the graded part."""


def carried_allocator(bench: Bench) -> Callable[[int], BlockAllocator] | None:
    """Return a function that makes the student's own allocator, or None if the student brought none."""
    carried = bench.carried_part("block-allocator")
    return partial(CARRIED, bench, part=carried) if carried else None


class Pools:
    """Makes the student's allocators for both pools of an engine."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._pools: list[RemoteAllocator] = []

    def make_parts(self) -> Parts:
        self._pools.clear()
        return Parts(allocator=self._make)

    def _make(self, num_blocks: int) -> RemoteAllocator:
        self._pools.append(RemoteAllocator(self._bench, num_blocks))
        return self._pools[-1]

    def explain(self, error: Exception) -> Exception:
        """Raise Failed with the shortest program of calls that fails without the engine; otherwise return the error."""
        for pool in self._pools:
            fail_shortest(self._bench, pool.num_blocks, pool.as_program())
        return error


def check_engine(bench: Bench) -> None:
    """Check random workloads: sharing, copy-on-write, prefix caching, swap, recomputation, cancelled requests."""
    pools = Pools(bench)
    workloads = islice(numbered_workloads(bench.seed), ENGINE_WORKLOADS)
    check_workloads(bench, workloads, pools.make_parts, explain=pools.explain)


def check_model(bench: Bench) -> None:
    """Check that SmolLM2 writes the same texts as with the reference's allocator, with parallel sampling, beam search
    and preemption."""
    pools = Pools(bench)
    check_texts(bench, pools.make_parts, explain=pools.explain)


# --- Operations per second ------------------------------------------------------------------------


class Recorder(plain_parts()[0]):  # type: ignore[misc]
    """The reference's allocator, which records its calls in the format of `Sandbox.seconds`."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.calls: list[tuple[str, int | None, int | None]] = []
        self._latest: dict[int, int] = {}

    def allocate(self) -> int:
        block: int = super().allocate()
        self._note("allocate", None, block)
        return block

    def share(self, block: int) -> None:
        super().share(block)
        self._note("share", block, None)

    def free(self, block: int) -> None:
        super().free(block)
        self._note("free", block, None)

    def copy_on_write(self, block: int) -> int:
        before = len(self.calls)
        target: int = super().copy_on_write(block)
        del self.calls[before:]  # it may have called allocate
        self._note("copy_on_write", block, target)
        return target

    def _note(self, method: str, block: int | None, returned: int | None) -> None:
        self.calls.append((method, None, None if block is None else self._latest[block]))
        if returned is not None:
            self._latest[returned] = len(self.calls) - 1


def measure(bench: Bench) -> Performance:
    """Measure the operations per second on an engine's calls, and those of the reference on the same calls."""
    runs: list[tuple[int, list[tuple[str, int | None, int | None]]]] = []
    for number in range(TIMED_WORKLOADS):
        pools: list[Recorder] = []

        def make(num_blocks: int, pools: list[Recorder] = pools) -> Recorder:
            pools.append(Recorder(num_blocks))
            return pools[-1]

        WorkloadRun(random_workload(number), allocator=make, steady=False).to_the_end()
        runs += [(pool.num_blocks, pool.calls) for pool in pools if pool.calls]
    with bench.beside(Submission.of_reference("block_allocator", "BlockAllocator")) as theirs:

        def seconds(one: Bench, num_blocks: int, calls: list[tuple[str, int | None, int | None]]) -> float:
            allocator = one.make(num_blocks)
            assert isinstance(allocator, Handle)
            return one.process.seconds(allocator, MEMBERS[2:], calls)

        total = [0.0, 0.0]
        for run in runs:
            best = fastest(3, partial(seconds, bench, *run), partial(seconds, theirs, *run))
            total = [before + more for before, more in zip(total, best, strict=True)]
            bench.process.forget()
            theirs.process.forget()
    num_calls = sum(len(calls) for _, calls in runs)
    return Performance(num_calls / total[0], num_calls / total[1])


# --- The assignment -------------------------------------------------------------------------------

CHECKS: dict[str, Check] = {
    "a new pool": check_new_pool,
    "allocate and free": property_of(
        *("allocate", "free"), many=("allocate_many", "free_many"), unless=is_refused_to_many
    ),
    "reference counts": property_of("allocate", "share", "free", many=MANY, unless=is_refused_to_many),
    "copy-on-write": property_of("allocate", "share", "free", "copy_on_write", unless=is_copy_in_a_full_pool),
    "calls that make no sense are refused": property_of(
        *("allocate", "share", "free"),
        with_numbers=("share", "free", "copy_on_write", "ref_count"),
        many=MANY,
        unless=is_copy_in_a_full_pool,
    ),
    "a call that raises changes nothing": property_of(
        *("allocate", "share", "copy_on_write"),
        with_numbers=("share", "free", "copy_on_write"),
        many=MANY,
    ),
    "long runs in large pools": check_long_runs,
    "the engine, on a small model": check_engine,
    "SmolLM2": check_model,
}

ASSIGNMENT = described(
    "block-allocator",
    CHECKS,
    part="BlockAllocator",
    members=("allocate", "share", "free", "ref_count", "copy_on_write"),
    optional=MANY,
    measure=measure,
)
