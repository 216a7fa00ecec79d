"""Assignment 2, `block-table`: block tables and slot mapping (paper, sections 4.2 and 4.4, Figs. 6 and 8).

The properties run random programs on a few tables over two small pools; Hypothesis generates and shrinks them. The
allocators are the grader's, so that it sees every block that a table takes or frees. Then the real engine serves random
workloads with the student's tables, on a model that checks every read (`content_runner.py`). Finally SmolLM2 has to
write the same texts as with the reference's tables. In the last two, the tables may use a student's own allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from hypothesis import strategies as st

from minipaged import contracts
from minipaged.contracts import BlockAllocator
from minipaged.course.assignments.block_allocator.checks import carried_allocator
from minipaged.course.assignments.block_table.session import OfferedAllocator, Op, TableSession
from minipaged.course.grader.assignment import (
    Bench,
    Check,
    Performance,
    Submission,
    fastest,
)
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.grader.serving import Parts, check_texts, check_workloads, numbered_workloads
from minipaged.course.sandbox.contract import Handle, Raised
from minipaged.steps import CopyPair

ENGINE_WORKLOADS = 20
LARGEST_POOL = 6
LARGEST_BLOCK = 4
TIMED_PROMPTS = tuple(range(1, 640, 20))
"""The lengths of the timed prompts in tokens."""
TIMED_TOKENS, TIMED_BLOCK_SIZE = 64, 16
ROUNDS = 5
"""The number of speed measurements; the fastest one counts."""

Program = tuple[int, int, list[Op]]
"""The block size, the number of blocks in each pool, and the steps."""


# --- Properties -----------------------------------------------------------------------------------


def programs_of(*kinds: str, beginning: Sequence[Op] = ()) -> st.SearchStrategy[Program]:
    """Return a strategy for programs: the beginning, followed by random steps of these kinds."""
    small = st.integers(0, 7)
    steps = st.lists(st.builds(Op, st.sampled_from(kinds), small, small, small), max_size=12)
    return st.builds(
        lambda size, blocks, ops: (size, blocks, [*beginning, *ops]),
        st.integers(1, LARGEST_BLOCK),
        st.integers(1, LARGEST_POOL),
        steps,
    )


def property_of(*kinds: str, beginning: Sequence[Op] = (), slots: bool = False) -> Callable[[Bench], None]:
    """Return a check that runs such programs. With `slots`, all slots are compared after each step."""

    def run(bench: Bench, program: Program) -> None:
        block_size, num_blocks, ops = program
        TableSession(bench, block_size, num_blocks, slots=slots).run(ops)

    return lambda bench: search(bench, programs_of(*kinds, beginning=beginning), partial(run, bench))


def check_new_table(bench: Bench) -> None:
    """Check new tables of several block sizes; `TableSession` compares them when it is made."""
    search(bench, st.integers(-2, 20), lambda block_size: TableSession(bench, block_size, 2))


# --- The engine -----------------------------------------------------------------------------------


class RemoteTables:
    """Makes the student's tables for an engine (`Tier.block_table`)."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._offered: dict[int, OfferedAllocator] = {}

    def __call__(self, block_size: int, allocator: BlockAllocator) -> contracts.BlockTable:
        module, name = self.bench.part
        made = module.call(name, block_size, self.offer(allocator))
        if not isinstance(made, Handle):
            raise TypeError(f"{name}({block_size}, allocator) returned {made!r} instead of a table")
        return RemoteTable(self, made)

    def offer(self, allocator: BlockAllocator) -> OfferedAllocator:
        """Return the wrapper of an allocator, always the same one."""
        return self._offered.setdefault(id(allocator), OfferedAllocator(allocator))

    def outcome(self, answer: Any) -> Any:
        """Return the answer of a call, or raise its error. A broken allocator under the table takes precedence."""
        if not isinstance(answer, Raised):
            return answer
        broken = [offered.broken for offered in self._offered.values() if offered.broken]
        raise broken[0] if broken else answer.error


class RemoteTable(contracts.BlockTable):
    """A student's table for the engine. Values that were read are cached until the next call that changes them."""

    def __init__(self, tables: RemoteTables, inner: Handle) -> None:
        self._tables, self._inner = tables, inner
        self._known: dict[str, Any] = {}

    @property
    def blocks(self) -> Sequence[int]:
        found: list[int] = self._look("blocks")
        return found

    @property
    def num_tokens(self) -> int:
        number: int = self._look("num_tokens")
        return number

    def slot_mapping(self, start: int, stop: int) -> list[int]:
        if "slots" not in self._known:
            self._known["slots"] = list(self._call("slot_mapping", 0, self.num_tokens))
        slots: list[int] = self._known["slots"][start:stop]
        return slots

    def blocks_needed(self, num_new_tokens: int) -> int:
        needed: int = self._call("blocks_needed", num_new_tokens)
        return needed

    def append(self, num_new_tokens: int) -> list[CopyPair]:
        return [(source, destination) for source, destination in self._change("append", num_new_tokens)]

    def adopt(self, blocks: Sequence[int]) -> None:
        self._change("adopt", list(blocks))

    def fork(self) -> contracts.BlockTable:
        made = self._call("fork")
        if not isinstance(made, Handle):
            raise TypeError(f"fork() returned {made!r} instead of a table")
        return RemoteTable(self._tables, made)

    def trim(self, num_tokens: int) -> None:
        self._change("trim", num_tokens)

    def replace(self, logical_block: int, block: int) -> None:
        self._change("replace", logical_block, block)

    def relocate(self, blocks: Sequence[int], allocator: BlockAllocator) -> None:
        self._change("relocate", list(blocks), self._tables.offer(allocator))

    def _look(self, member: str) -> Any:
        if member not in self._known:
            process = self._tables.bench.process
            blocks, num_tokens = process.batch([(self._inner, one, None) for one in ("blocks", "num_tokens")])
            self._known["blocks"] = [int(block) for block in self._tables.outcome(blocks)]
            self._known["num_tokens"] = self._tables.outcome(num_tokens)
        return self._known[member]

    def _call(self, method: str, *args: Any) -> Any:
        return self._tables.outcome(self._tables.bench.process.batch([(self._inner, method, args)])[0])

    def _change(self, method: str, *args: Any) -> Any:
        self._known.clear()
        return self._call(method, *args)


def parts_of(bench: Bench) -> Parts:
    """Return the parts of an engine with the student's table, and with the student's allocator if there is one."""
    return Parts({"block_table": RemoteTables(bench)}, carried_allocator(bench))


def check_engine(bench: Bench) -> None:
    """Check random workloads: sharing, copy-on-write, prefix caching, swap, recomputation, cancelled requests."""
    check_workloads(bench, islice(numbered_workloads(bench.seed), ENGINE_WORKLOADS), partial(parts_of, bench))


def check_model(bench: Bench) -> None:
    """Check that SmolLM2 writes the same texts as with the reference's table, with parallel sampling, beam search and
    preemption."""
    check_texts(bench, partial(parts_of, bench))


def measure(bench: Bench) -> Performance:
    """Measure the calls per second of tables that grow as in an engine, in turns with the reference's tables."""
    num_blocks = 2 * sum(-(-(prompt + TIMED_TOKENS) // TIMED_BLOCK_SIZE) for prompt in TIMED_PROMPTS)
    with bench.beside(Submission.of_reference("block_table", "BlockTable")) as theirs:

        def seconds(one: Bench) -> float:
            allocators, worker = one.process.modules
            allocator = allocators.call("BlockAllocator", num_blocks)
            given = (*one.part, TIMED_BLOCK_SIZE, allocator, TIMED_PROMPTS, TIMED_TOKENS)
            return float(worker.call("seconds", *given))

        best = fastest(ROUNDS, lambda: seconds(bench), lambda: seconds(theirs))
    num_calls = len(TIMED_PROMPTS) * (5 + 2 * 3 * TIMED_TOKENS)
    return Performance(num_calls / best[0], num_calls / best[1])


# --- The assignment -------------------------------------------------------------------------------

SHARED = (Op("append_that_fits", 0, 3), Op("fork"))
"""Steps that make two tables with the same blocks. The last block is partly filled if the block size allows it."""

CHECKS: dict[str, Check] = {
    "a new table": check_new_table,
    "append and slots": property_of("append_that_fits", "slot_range", "hold", slots=True),
    "blocks_needed is what append takes": property_of("needed_then_append", "append_that_fits", "fork"),
    "copy-on-write": property_of("append_that_fits", "fork", beginning=SHARED),
    "fork, adopt and replace share": property_of(
        "fork", "hold", "adopt", "replace", "append_that_fits", beginning=(Op("hold"),)
    ),
    "trim gives back, last first": property_of(
        *("append_that_fits", "trim", "trim", "trim_all", "fork"), beginning=(Op("append_that_fits", 0, 7),)
    ),
    "relocate": property_of("append_that_fits", "relocate", "relocate", "trim_in_any_order", "fork", slots=True),
    "an append that raises changes nothing": property_of(
        "append_too_many", "append", "fork", "trim_in_any_order", beginning=SHARED
    ),
    "calls that make no sense are refused": property_of(
        *("append_that_fits", "hold", "new"),
        *("bad_trim", "bad_slots", "bad_adopt", "bad_replace", "bad_append"),
        beginning=(Op("hold"), Op("append_that_fits", 0, 3)),
    ),
    "the engine, on a small model": check_engine,
    "SmolLM2": check_model,
}

ASSIGNMENT = described(
    "block-table",
    CHECKS,
    part="BlockTable",
    members=("blocks_needed", "append", "adopt", "fork", "trim", "replace", "relocate", "slot_mapping"),
    builds_on=("block-allocator",),
    modules=("minipaged.reference.block_allocator", "minipaged.course.assignments.block_table.worker"),
    measure=measure,
)
