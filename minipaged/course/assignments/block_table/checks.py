"""Assignment 2, `block-table`: block tables and slot mapping (paper, sections 4.2 and 4.4, Figs. 6 and 8).

The properties are programs on a few tables over two small pools, which Hypothesis makes up and shortens; the allocators
are the grader's, so that it sees every block taken and given back. Then the real engine serves random workloads with
the student's tables, on a model that checks every read (`content_runner.py`); then SmolLM2 has to write the same texts
as with the reference's. In these two a student's own allocator may lie under the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import minipaged
from minipaged import contracts
from minipaged.contracts import BlockAllocator, Tier
from minipaged.course.assignments.block_allocator.checks import PROMPTS, RemoteAllocator
from minipaged.course.assignments.block_table.session import OfferedAllocator, Op, TableSession
from minipaged.course.grader.assignment import (
    Bench,
    Check,
    Failed,
    Failure,
    Performance,
    Submission,
    fastest,
)
from minipaged.course.grader.counterexample import make_script, must_raise, raised_message
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search
from minipaged.course.sandbox.contract import Handle, Raised, StudentError
from minipaged.errors import InvariantViolation
from minipaged.events import Event, StepFailed
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.steps import CopyPair
from minipaged.testing.plain_model import PLAIN_TIER, PlainModel
from minipaged.testing.workloads import Run, all_sound, random_workload
from minipaged.tiers import plain_parts

ENGINE_WORKLOADS = 20
LARGEST_POOL = 6
LARGEST_BLOCK = 4
TIMED_PROMPTS = tuple(range(1, 640, 20))
"""Lengths in tokens."""
TIMED_TOKENS, TIMED_BLOCK_SIZE = 64, 16
ROUNDS = 5
"""Measurements of speed, of which the fastest counts."""

Program = tuple[int, int, list[Op]]
"""Slots of a block, blocks of each pool, and what to do."""


# --- Properties -----------------------------------------------------------------------------------


def programs_of(*kinds: str, beginning: Sequence[Op] = ()) -> st.SearchStrategy[Program]:
    """Programs of steps of these kinds, after the beginning."""
    small = st.integers(0, 7)
    steps = st.lists(st.builds(Op, st.sampled_from(kinds), small, small, small), max_size=12)
    return st.builds(
        lambda size, blocks, ops: (size, blocks, [*beginning, *ops]),
        st.integers(1, LARGEST_BLOCK),
        st.integers(1, LARGEST_POOL),
        steps,
    )


def property_of(*kinds: str, beginning: Sequence[Op] = (), slots: bool = False) -> Callable[[Bench], None]:
    """A check that runs such programs. `slots`: with all slots compared after each step."""

    def check(bench: Bench) -> None:
        def run(program: Program) -> None:
            block_size, num_blocks, ops = program
            TableSession(bench, block_size, num_blocks, slots=slots).run(ops)

        search(bench, programs_of(*kinds, beginning=beginning), run)

    return check


def check_new_table(bench: Bench) -> None:
    """`TableSession` checks a new table by itself."""

    def run(block_size: int) -> None:
        if block_size > 0:
            TableSession(bench, block_size, 2)
            return
        module, name = bench.part
        shown = f"{name}({block_size}, allocator)"
        offered = OfferedAllocator(plain_parts()[0](2))
        [made] = bench.process.batch([(module, name, (block_size, offered))])
        if isinstance(made, Raised) and isinstance(made.error, ValueError):
            return
        why = "a block has at least 1 slot"
        message = f"{shown} was accepted; it has to raise ValueError: {why}"
        if isinstance(made, Raised):
            message = raised_message("__init__", made.error, shown)
        lines = ["allocator = BlockAllocator(2)", *must_raise("ValueError", shown, why)]
        imports = ["from minipaged.reference.block_allocator import BlockAllocator"]
        script = make_script(bench.submission, name, None, message, imports, lines)
        raise Failed(Failure(message, script=script))

    search(bench, st.integers(-2, 20), run)


# --- The engine -----------------------------------------------------------------------------------


class RemoteTables:
    """Makes tables of the student's for an engine: `Tier.block_table`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._offered: dict[int, OfferedAllocator] = {}

    def __call__(self, block_size: int, allocator: BlockAllocator) -> contracts.BlockTable:
        module, name = self.bench.part
        [made] = self.bench.process.batch([(module, name, (block_size, self.offer(allocator)))])
        if isinstance(made, Raised):
            raise made.error
        if not isinstance(made, Handle):
            raise TypeError(f"{name}({block_size}, allocator) gave {made!r}, no table")
        return RemoteTable(self, made)

    def offer(self, allocator: BlockAllocator) -> OfferedAllocator:
        """The same wrapping for the same allocator."""
        return self._offered.setdefault(id(allocator), OfferedAllocator(allocator))

    def outcome(self, answer: Any) -> Any:
        """What a call returned. Where it raised because an allocator under it is broken, that is what to say."""
        if not isinstance(answer, Raised):
            return answer
        broken = [offered.broken for offered in self._offered.values() if offered.broken]
        raise broken[0] if broken else answer.error


class RemoteTable(contracts.BlockTable):
    """A student's table as the engine uses it. What was looked at stays known until the next call that changes it."""

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
            raise TypeError(f"fork() returned {made!r}, no table")
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


def tier_of(bench: Bench) -> tuple[Tier, Callable[[int], BlockAllocator] | None]:
    """The plain parts with the student's table, and the student's allocator if one was brought along."""
    carried = bench.carried_part("block-allocator")
    tier = replace(PLAIN_TIER, block_table=RemoteTables(bench))  # type: ignore[arg-type]
    return tier, (lambda num_blocks: RemoteAllocator(bench, num_blocks, carried)) if carried else None


def check_engine(bench: Bench) -> None:
    """Random workloads: sharing, copy-on-write, prefix caching, both ways of preempting, cancelled requests."""
    for number in range(ENGINE_WORKLOADS):
        workload_seed = bench.seed * 1000 + number
        events: list[Event] = []
        bench.process.forget()
        tier, allocator = tier_of(bench)
        try:
            workload, plain = random_workload(workload_seed), PlainModel()
            run = Run(workload, tier, allocator=allocator, listeners=[events.append], model=plain)
            run.to_the_end()
            run.check_outputs()
            run.check_nothing_leaked()
        except Exception as error:
            raise Failed(in_engine(error, f"in the engine, workload {workload_seed}", events)) from None


def in_engine(error: Exception, where: str, events: list[Event]) -> Failure:
    """What went wrong while the engine used the part."""
    invariant = error.invariant if isinstance(error, InvariantViolation) else None
    if not isinstance(events[-1] if events else None, StepFailed):
        events.append(StepFailed(0, repr(error), ()))
    said = str(error) if isinstance(error, InvariantViolation | StudentError) else f"{type(error).__name__}: {error}"
    said = said.replace(RemoteAllocator.__name__, "the allocator that you brought along")  # and no fault of the table's
    return Failure(f"{where}: {said}", invariant, events=tuple(events))


def check_model(bench: Bench) -> None:
    """Parallel sampling, beam search and preemption on SmolLM2: the same texts as with the reference's table."""
    from minipaged.llm import LLM, LoadedModel

    loaded = LoadedModel.load(bench.model, "reference")
    events: list[Event] = []

    def texts(tier: Tier, allocator: Callable[[int], BlockAllocator] | None = None) -> list[list[str]]:
        llm = LLM(
            replace(loaded, tier=replace(loaded.tier, block_table=tier.block_table)),
            block_size=4,
            num_blocks=12,  # too few for all at once, so that some are preempted
            num_swap_blocks=12,
            max_model_len=64,
            allocator=allocator,
            listeners=[events.append],
        )
        assert llm.tokenizer
        prompts = [llm.tokenizer.encode(prompt)[:15] for prompt in PROMPTS]
        sampled = llm.generate(prompts, SamplingParams(n=2, temperature=0.8, seed=bench.seed, max_tokens=8))
        beams = llm.beam_search(prompts[:1], BeamSearchParams(beam_width=3, max_tokens=5))
        return [[one.text for one in output.outputs] for output in all_sound([*sampled, *beams])]

    expected = texts(PLAIN_TIER)
    events.clear()
    try:
        found = texts(*tier_of(bench))
    except Exception as error:
        raise Failed(in_engine(error, "with SmolLM2", events)) from None
    if found != expected:
        raise Failed(Failure(f"SmolLM2 wrote {found!r} instead of {expected!r}", events=tuple(events)))


def measure(bench: Bench) -> Performance:
    """Calls a second of tables that grow as in an engine, in turns with the reference's."""
    reference = Submission(Path(minipaged.__file__).parent / "reference" / "block_table.py", "BlockTable")
    num_blocks = 2 * sum(-(-(prompt + TIMED_TOKENS) // TIMED_BLOCK_SIZE) for prompt in TIMED_PROMPTS)
    with bench.beside(reference) as theirs:

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
"""Two tables with the same blocks, the last partly filled where that can be."""

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
