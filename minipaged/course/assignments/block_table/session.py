"""Calls a student's block tables, and compares each answer with a model.

A `TableSession` makes tables in the worker, over allocators in the grader, so that the grader sees every block that a
table takes or frees. After each call it compares the returned value, every table's `blocks` and `num_tokens`, and the
reference count of every block with a model, which has a list of blocks and a number of tokens for each table.

The tables are named a, b, c, ... There are two pools, `allocator` and `other`; `relocate` moves a table between them,
as swapping does. Blocks `cached0`, `cached1`, ... are held outside of the tables, as by the prefix cache. In the
session's events each table is a sequence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from minipaged import events as ev
from minipaged.contracts import BlockAllocator
from minipaged.course.grader.assignment import Bench
from minipaged.course.grader.counterexample import aligned, letter, must_raise, said
from minipaged.course.grader.session import Session
from minipaged.course.sandbox.contract import Handle, Raised
from minipaged.engine.checked_allocator import MEMBERS
from minipaged.errors import BlockNotAllocated, Invariant, InvariantViolation, OutOfBlocks
from minipaged.tiers import plain_parts


class OfferedAllocator:
    """An allocator of the grader's for the student's tables. It records freed blocks and broken invariants."""

    OFFERED: ClassVar[tuple[str, ...]] = (*MEMBERS, "allocate_many", "share_many", "free_many")

    def __init__(self, inner: BlockAllocator) -> None:
        self.inner = inner
        self.freed: list[int] = []
        """The blocks freed since this list was last cleared, in order."""
        self.broken: InvariantViolation | None = None
        """The invariant that the allocator broke. The worker receives it as an error without this type."""

    num_blocks = property(lambda self: self.inner.num_blocks)
    num_free = property(lambda self: self.inner.num_free)

    def __getattr__(self, method: str) -> Any:
        """Return the inner allocator's method, with recording."""

        def call(*args: Any) -> Any:
            try:
                answer = getattr(self.inner, method)(*args)
            except InvariantViolation as violation:
                self.broken = self.broken or violation
                raise
            if method in ("free", "free_many"):
                self.freed += args if method == "free" else args[0]
            return answer

        return call


@dataclass(frozen=True, slots=True)
class Op:
    """One step of a program: its kind, and numbers that choose the table, the number of tokens, and so on."""

    kind: str
    a: int = 0
    b: int = 0
    c: int = 0


@dataclass(slots=True)
class _ExpectedTable:
    """The right state of one table."""

    name: str
    number: int
    handle: Handle
    pool: str
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    seen: Any = None
    """The `blocks` that the student's table reports."""
    seen_tokens: Any = None


class TableSession(Session):
    """Several tables of the student's, with a model of their right answers."""

    KIND = "a table"

    def __init__(self, bench: Bench, block_size: int, num_blocks: int, *, slots: bool = False) -> None:
        """With `slots`, all slots are compared after each call too."""
        super().__init__(bench)
        self._slots = slots
        self.block_size, self.num_blocks = block_size, num_blocks
        self._pools = {name: OfferedAllocator(plain_parts()[0](num_blocks)) for name in POOLS}
        self._tables: list[_ExpectedTable] = []
        self._cached: list[int] = []
        """Blocks of the first pool that are held outside of the tables."""
        size = max(1, block_size)
        self._events: list[ev.Event] = [ev.EngineStarted(num_blocks, num_blocks, size, size * num_blocks)]
        self._step = 0
        self._lines += [f"{name} = BlockAllocator({num_blocks})" for name in POOLS]
        if block_size < 1:
            shown = f"{self._name}({block_size}, allocator)"
            self._refuse_to_make(shown, "a block has at least 1 slot", block_size, self._pools["allocator"])
        else:
            self._new()

    def run(self, ops: Sequence[Op]) -> None:
        """Carry out the steps. A step that lacks a table or block is left out."""
        for op in ops:
            self._step += 1
            self._events.append(ev.StepStarted(self._step))
            getattr(self, f"_{op.kind}")(op)
            self._events.append(ev.StepFinished(self._step, 1, 1, 0.0))

    # --- The steps of programs --------------------------------------------------------------------

    def _new(self, op: Op | None = None) -> None:
        name = letter(len(self._tables))
        shown = f"{self._name}({self.block_size}, allocator)"
        self._lines.append(f"{name} = {shown}")
        self._add(name, self._make(shown, self.block_size, self._pools["allocator"]), "allocator")
        self._compare(shown)

    def _append(self, op: Op) -> None:
        table, n = self._table(op), op.b
        needed = self._needed(table, n)
        if needed > self._pools[table.pool].num_free:
            self._refused(table, f"append({n})", (n,), OutOfBlocks, f"it needs {needed} blocks")
            return
        self._succeed_to_append(table, n)

    def _append_too_many(self, op: Op) -> None:
        """Append the fewest tokens that do not fit; a single block is missing."""
        table, n = self._table(op), 1
        while self._needed(table, n) <= self._pools[table.pool].num_free:
            n += 1
        self._append(Op("append", op.a, n))

    def _append_that_fits(self, op: Op) -> None:
        """Append `b` tokens, or as many as fit."""
        table, n = self._table(op), op.b
        while self._needed(table, n) > self._pools[table.pool].num_free:
            n -= 1
        self._succeed_to_append(table, n)

    def _succeed_to_append(self, table: _ExpectedTable, n: int) -> None:
        shown = f"{table.name}.append({n})"
        pool, before = self._pools[table.pool], list(table.blocks)
        free = {block for block in range(self.num_blocks) if pool.ref_count(block) == 0}
        copies = self._writes_into_shared(table, n)
        self._lines += [f"before = list({table.name}.blocks)", f"copies = {shown}"]
        answer = self._call(table, "append", (n,), shown)
        kept = len(before) - copies
        pairs = [tuple(pair) if isinstance(pair, list) else pair for pair in _listed(answer) or ()]
        found = self._blocks_of(table, shown)
        num_blocks = self._blocks_for(table.num_tokens + n)
        if len(found) != num_blocks:
            self._fail(
                f"after {shown} the table has {len(found)} blocks; its {table.num_tokens + n} tokens need {num_blocks}",
                f"assert len({table.name}.blocks) == {num_blocks}, list({table.name}.blocks)",
                invariant=Invariant.EXCLUSIVE_WRITE if copies and len(found) > num_blocks else Invariant.CONTENT,
            )
        if found[:kept] != before[:kept]:
            self._fail(
                f"{shown} changed blocks that already contain tokens: {before[:kept]} became {found[:kept]}",
                f"assert list({table.name}.blocks)[:{kept}] == before[:{kept}], list({table.name}.blocks)",
                invariant=Invariant.CONTENT,
            )
        if copies and found[kept] == before[kept]:
            self._fail(
                f"{shown} will write into block {before[kept]}, which is held by "
                f"{self._holders(table.pool, before[kept])}: the table needs a copy of its own",
                f"assert {table.name}.blocks[{kept}] != before[{kept}], 'it writes into a block that others hold'",
                invariant=Invariant.EXCLUSIVE_WRITE,
            )
        for i, block in enumerate(found[kept:], start=kept):
            if block not in free:
                others = [f"*{one.name}.blocks" for one in self._tables if one is not table]
                others += [f"cached{k}" for k, _ in enumerate(self._cached)]
                self._fail(
                    f"after {shown} logical block {i} is block {block}, which was not free",
                    f"assert {table.name}.blocks[{i}] not in [{', '.join([*others, '*before'])}], {table.name}.blocks",
                    invariant=Invariant.EXCLUSIVE_WRITE,
                )
            if found.count(block) > 1:
                self._fail(
                    f"after {shown} block {block} is in the table twice: {found}",
                    f"assert len(set({table.name}.blocks)) == {num_blocks}, list({table.name}.blocks)",
                    invariant=Invariant.EXCLUSIVE_WRITE,
                )
        expected = [(before[kept], found[kept])] if copies else []
        if pairs != expected or _listed(answer) is None:
            right = f"[(before[{kept}], {table.name}.blocks[{kept}])]" if copies else "[]"
            self._fail(
                f"{shown} {said(answer)}; it should return {expected}"
                + (f": block {before[kept]} was copied to {found[kept]}" if copies else ": no block needs a copy"),
                f"assert list(copies) == {right}, copies",
                invariant=Invariant.CONTENT if copies else Invariant.EXCLUSIVE_WRITE,
            )
        if copies:
            holders = pool.ref_count(before[kept]) + 1
            self._events.append(ev.BlockCopied(table.number, kept, before[kept], found[kept], holders))
        table.blocks, table.num_tokens = found, table.num_tokens + n
        self._events.append(ev.TokensComputed(table.number, table.num_tokens, tuple(found[len(before) :]), 0))
        self._compare(shown)

    def _needed_then_append(self, op: Op) -> None:
        table, n = self._table(op), op.b
        shown = f"{table.name}.blocks_needed({n})"
        pool, right = self._pools[table.pool], self._needed(table, n)
        free = pool.num_free
        self._lines.append(f"needed = {shown}")
        answer = self._call(table, "blocks_needed", (n,), shown)
        if answer != right or isinstance(answer, bool):
            self._fail(
                f"{shown} {said(answer)}; {table.name}.append({n}) takes {right} of the free blocks",
                f"assert needed == {right}, needed",
                invariant=Invariant.CONSERVATION,
            )
        self._compare(shown)
        if right <= free:
            self._succeed_to_append(table, n)

    def _slot_range(self, op: Op) -> None:
        table = self._table(op)
        start = op.b % (table.num_tokens + 1)
        self._check_slots(table, start, start + op.c % (table.num_tokens - start + 1))

    def _fork(self, op: Op) -> None:
        parent, name = self._table(op), letter(len(self._tables))
        shown = f"{parent.name}.fork()"
        self._lines.append(f"{name} = {shown}")
        made = self._call(parent, "fork", (), shown)
        if not isinstance(made, Handle):
            self._fail(f"{shown} {said(made)} instead of a table", f"assert hasattr({name}, 'blocks')")
        if any(made.number == table.handle.number for table in self._tables):
            self._fail(f"{shown} returned the table itself", f"assert {name} is not {parent.name}")
        self._add(name, made, parent.pool)
        self._tables[-1].blocks, self._tables[-1].num_tokens = list(parent.blocks), parent.num_tokens
        self._events.append(ev.TokensComputed(self._tables[-1].number, parent.num_tokens, tuple(parent.blocks), 0))
        self._compare(shown)

    def _trim(self, op: Op) -> None:
        table = self._table(op)
        self._trim_to(table, op.b % (table.num_tokens + 1))

    def _trim_in_any_order(self, op: Op) -> None:
        """Trim without checking the order of the freed blocks, in tests about something else."""
        table = self._table(op)
        self._trim_to(table, op.b % (table.num_tokens + 1), in_any_order=True)

    def _trim_all(self, op: Op) -> None:
        self._trim_to(self._table(op), 0)

    def _trim_to(self, table: _ExpectedTable, n: int, *, in_any_order: bool = False) -> None:
        shown = f"{table.name}.trim({n})"
        kept = self._blocks_for(n)
        expected = table.blocks[kept:][::-1]
        pool = self._pools[table.pool]
        pool.freed.clear()
        self._lines += [f"before = list({table.name}.blocks)", shown]
        self._call(table, "trim", (n,), shown)
        freed = list(pool.freed)
        del table.blocks[kept:]
        table.num_tokens = n
        self._events += [
            ev.BlocksFreed(table.number, tuple(expected)),
            ev.TokensComputed(table.number, n, tuple(table.blocks), 0),
        ]
        self._compare(shown, f"before[:{kept}]")
        if freed != expected and not in_any_order:
            self._lines[-1:] = [
                f"freed, free = [], {table.pool}.free",
                f"{table.pool}.free = lambda block: (free(block), freed.append(block))",
                shown,
            ]
            self._fail(
                f"{shown} freed the blocks {freed}; it should free the last one first: {expected}",
                f"assert freed == before[{kept}:][::-1], freed",
                invariant=Invariant.EXACT_REFERENCES,
            )

    def _hold(self, op: Op) -> None:
        """Allocate a block that is held outside of the tables, as by the prefix cache."""
        pool = self._pools["allocator"]
        if pool.num_free:
            self._lines.append(f"cached{len(self._cached)} = allocator.allocate()")
            self._cached.append(pool.inner.allocate())
            self._events.append(ev.BlockCached(0, 0, self._cached[-1]))

    def _adopt(self, op: Op) -> None:
        blocks = self._cached[: op.b % (len(self._cached) + 1)]
        table = self._an_empty_table(op)
        shown = f"{table.name}.adopt([{', '.join(f'cached{i}' for i, _ in enumerate(blocks))}])"
        self._lines.append(shown)
        self._call(table, "adopt", (blocks,), shown)
        table.blocks, table.num_tokens = list(blocks), len(blocks) * self.block_size
        self._events.append(ev.PrefixReused(table.number, tuple(blocks), "cache"))
        self._compare(shown, f"[{', '.join(f'cached{i}' for i, _ in enumerate(blocks))}]")

    def _an_empty_table(self, op: Op) -> _ExpectedTable:
        empty = [table for table in self._tables if not table.blocks and table.pool == "allocator"]
        if not empty:
            self._new()
            empty = self._tables[-1:]
        return empty[op.a % len(empty)]

    def _replace(self, op: Op) -> None:
        table = self._table(op)
        num_full = table.num_tokens // self.block_size
        if not num_full or not self._cached or table.pool != "allocator":
            return
        logical, i = op.b % num_full, op.c % len(self._cached)
        block = self._cached[i]
        if block in table.blocks and table.blocks[logical] != block:
            return
        shown = f"{table.name}.replace({logical}, cached{i})"
        self._lines += [f"before = list({table.name}.blocks)", shown]
        self._call(table, "replace", (logical, block), shown)
        self._events.append(ev.BlockDeduplicated(table.number, logical, table.blocks[logical], block))
        table.blocks[logical] = block
        self._compare(shown, f"[*before[:{logical}], cached{i}, *before[{logical + 1}:]]")

    def _relocate(self, op: Op) -> None:
        table = self._table(op)
        target = POOLS[1 - POOLS.index(table.pool)]
        pool = self._pools[target]
        if pool.num_free < len(table.blocks):
            return
        blocks = list(pool.inner.allocate_many(len(table.blocks)))
        shown = f"{table.name}.relocate(moved, {target})"
        self._lines += [f"moved = {target}.allocate_many({len(blocks)})", shown]
        self._call(table, "relocate", (blocks, pool), shown)
        moved = tuple(zip(table.blocks, blocks, strict=True))
        table.blocks, table.pool = blocks, target
        request = f"r{table.number}"
        self._events.append(ev.SwappedOut(request, moved) if target == "other" else ev.SwappedIn(request, moved))
        self._compare(shown, "list(moved)")

    # --- Calls that have to be refused ------------------------------------------------------------

    def _bad_trim(self, op: Op) -> None:
        table = self._table(op)
        n = -1 - op.b if op.c % 2 else table.num_tokens + 1 + op.b
        self._refused(table, f"trim({n})", (n,), ValueError, f"the table has {table.num_tokens} tokens")

    def _bad_slots(self, op: Op) -> None:
        table = self._table(op)
        start, stop = ((-1 - op.b, table.num_tokens), (op.b % (table.num_tokens + 1), table.num_tokens + 1))[op.c % 2]
        why = f"the table has positions 0 to {table.num_tokens - 1}" if table.num_tokens else "the table is empty"
        self._refused(table, f"slot_mapping({start}, {stop})", (start, stop), ValueError, why)

    def _bad_adopt(self, op: Op) -> None:
        table = self._an_empty_table(op) if op.c % 2 else self._table(op)
        if table.pool != "allocator" or not self._cached:
            return
        if table.blocks:
            self._refused(table, "adopt([cached0])", ([self._cached[0]],), ValueError, "the table is not empty")
        elif (free := self._a_free_block()) is not None:
            shown = f"adopt([cached0, {free}])"
            why = f"block {free} is not held"
            self._refused(table, shown, ([self._cached[0], free],), BlockNotAllocated, why)

    def _bad_replace(self, op: Op) -> None:
        table = self._table(op)
        free = self._a_free_block()
        if table.pool == "allocator" and table.blocks and free is not None:
            self._refused(table, f"replace(0, {free})", (0, free), BlockNotAllocated, f"block {free} is not held")

    def _bad_append(self, op: Op) -> None:
        n = -1 - op.b % 2
        self._refused(self._table(op), f"append({n})", (n,), ValueError, "the number of tokens is negative")

    def _a_free_block(self) -> int | None:
        """Return the number of a free block for a script, or None.

        It is one that stays free in whatever order tables take blocks, so there may be none.
        """
        pool = self._pools["allocator"]
        free = [block for block in range(self.num_blocks) if pool.ref_count(block) == 0]
        return free[-1] if free else None

    def _refused(
        self, table: _ExpectedTable, call: str, args: tuple[Any, ...], error: type[Exception], why: str
    ) -> None:
        """Make a call that has to raise this error and change nothing."""
        shown = f"{table.name}.{call}"
        self._lines += [f"before = list({table.name}.blocks)", *must_raise(error.__name__, shown, why)]
        [answer] = self._ask([(table.handle, call.partition("(")[0], args)], shown)
        if not isinstance(answer, Raised):
            self._look(shown)
            self._fail(f"{shown} {said(answer)}; it has to raise {error.__name__}: {why}")
        if not isinstance(answer.error, error):
            self._raised(call.partition("(")[0], answer.error, shown, f"; it has to raise {error.__name__}: {why}")
        self._compare(shown, "before", refused=True)

    # --- The model --------------------------------------------------------------------------------

    def _table(self, op: Op) -> _ExpectedTable:
        return self._tables[op.a % len(self._tables)]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _writes_into_shared(self, table: _ExpectedTable, n: int) -> bool:
        partly = table.num_tokens % self.block_size != 0
        return n > 0 and partly and self._count(table.pool, table.blocks[-1]) > 1

    def _needed(self, table: _ExpectedTable, n: int) -> int:
        more = self._blocks_for(table.num_tokens + n) - len(table.blocks)
        return more + self._writes_into_shared(table, n)

    def _count(self, pool: str, block: int) -> int:
        entries = sum(table.blocks.count(block) for table in self._tables if table.pool == pool)
        return entries + (self._cached.count(block) if pool == "allocator" else 0)

    def _holders(self, pool: str, block: int) -> str:
        names = [table.name for table in self._tables if table.pool == pool and block in table.blocks]
        names += [f"cached{i}" for i, one in enumerate(self._cached) if one == block and pool == "allocator"]
        return " and ".join(names) or "no table"

    # --- Comparing --------------------------------------------------------------------------------

    def _look(self, shown: str) -> None:
        """Read each table's `blocks` and `num_tokens`."""
        looks = [(table.handle, member, None) for table in self._tables for member in ("blocks", "num_tokens")]
        answers = self._ask(looks, shown)
        for table, blocks, num_tokens in zip(self._tables, answers[::2], answers[1::2], strict=True):
            table.seen, table.seen_tokens = _listed(blocks) if _listed(blocks) is not None else blocks, num_tokens

    def _blocks_of(self, table: _ExpectedTable, shown: str) -> list[int]:
        self._look(shown)
        self._check_kind(table, shown)
        found: list[int] = table.seen
        return found

    def _check_kind(self, table: _ExpectedTable, shown: str) -> None:
        for member, value in (("blocks", table.seen), ("num_tokens", table.seen_tokens)):
            if isinstance(value, Raised):
                self._lines.append(f"{table.name}.{member}")
                self._raised(member, value.error, f"after {shown}, {table.name}.{member}")
        if not isinstance(table.seen, list) or not all(type(block) is int for block in table.seen):
            self._fail(
                f"{table.name}.blocks {said(table.seen).replace('returned', 'is')} instead of a list of block numbers",
                f"assert all(isinstance(block, int) for block in list({table.name}.blocks))",
            )

    def _compare(self, shown: str, blocks_then: str = "", *, refused: bool = False) -> None:
        """Compare the state of all tables and pools with the model.

        `blocks_then` is the script's expression for the right blocks of the called table.
        """
        self._look(shown)
        says, broken = f"after {shown}", Invariant.CONTENT
        if refused:
            says, broken = f"{shown} was refused, but changed something:", Invariant.ATOMIC_FAILURE
        for table in self._tables:
            self._check_kind(table, shown)
            if table.seen != table.blocks:
                called = shown.startswith(f"{table.name}.")
                then = blocks_then if called and blocks_then else ""
                if shown.endswith("fork()"):
                    then = f"list({shown.partition('.')[0]}.blocks)" if table is self._tables[-1] else ""
                if not then:  # another table than the one called
                    position = next(i for i in reversed(range(len(self._lines))) if shown in self._lines[i])
                    self._lines.insert(position, f"unchanged = list({table.name}.blocks)")
                    then = "unchanged"
                self._fail(
                    f"{says} {table.name}.blocks is {table.seen}; it should be {table.blocks}",
                    f"assert list({table.name}.blocks) == {then}, list({table.name}.blocks)",
                    invariant=broken,
                )
            if table.seen_tokens != table.num_tokens or isinstance(table.seen_tokens, bool):
                self._fail(
                    f"{says} {table.name}.num_tokens is {table.seen_tokens!r}; it should be {table.num_tokens}",
                    f"assert {table.name}.num_tokens == {table.num_tokens}, {table.name}.num_tokens",
                    invariant=broken,
                )
        for name, pool in self._pools.items():
            self._check_counts(name, pool, says, broken if refused else None)
        if self._slots:
            for table in self._tables:
                self._check_slots(table, 0, table.num_tokens)

    def _check_counts(self, name: str, pool: OfferedAllocator, says: str, broken: Invariant | None) -> None:
        for block in range(self.num_blocks):
            count, right = pool.inner.ref_count(block), self._count(name, block)
            if count == right:
                continue
            message = f"{says} block {block} has reference count {count} in {name}; it should be {right} "
            message += f"({self._holders(name, block)})" if right else "(no table has it)"
            if right:
                holder = next((f"cached{i}" for i, b in enumerate(self._cached) if b == block), "")
                for table in self._tables:
                    if table.pool == name and block in table.blocks:
                        holder = f"{table.name}.blocks[{table.blocks.index(block)}]"
                wrong = f"assert {name}.ref_count({holder}) == {right}, {name}.ref_count({holder})"
            else:
                free = sum(self._count(name, one) == 0 for one in range(self.num_blocks))
                wrong = f"assert {name}.num_free == {free}, {name}.num_free"
            self._fail(message, wrong, invariant=broken or Invariant.EXACT_REFERENCES)

    def _check_slots(self, table: _ExpectedTable, start: int, stop: int) -> None:
        shown = f"{table.name}.slot_mapping({start}, {stop})"
        [answer] = self._ask([(table.handle, "slot_mapping", (start, stop))], shown)
        if isinstance(answer, Raised):
            self._lines.append(shown)
            self._raised("slot_mapping", answer.error, shown)
        size = self.block_size
        right = [table.blocks[p // size] * size + p % size for p in range(start, stop)]
        if _listed(answer) != right:
            name = f"{table.name}.blocks"
            self._lines.append(f"slots = list({shown})")
            self._fail(
                f"{shown} {said(answer)}; with blocks {table.blocks} it should be {right}",
                f"assert slots == [{name}[p // {size}] * {size} + p % {size} for p in range({start}, {stop})], slots",
                invariant=Invariant.CONTENT,
            )

    # --- Calling ----------------------------------------------------------------------------------

    def _add(self, name: str, handle: Handle, pool: str) -> None:
        number = len(self._tables)
        self._tables.append(_ExpectedTable(name, number, handle, pool))
        self._events += [ev.RequestArrived(f"r{number}", number, (0,), 1), ev.RequestAdmitted(f"r{number}")]

    def _call(self, table: _ExpectedTable, method: str, args: tuple[Any, ...], shown: str) -> Any:
        """Make a call that has to succeed, and return its answer."""
        [answer] = self._ask([(table.handle, method, args)], shown)
        if isinstance(answer, Raised):
            self._look(shown)
            free = self._pools[table.pool].num_free
            known = f", but {free} blocks are free" if isinstance(answer.error, OutOfBlocks) else ""
            self._raised(method, answer.error, shown, known)
        return answer

    def _imports(self) -> list[str]:
        return ["from minipaged.reference.block_allocator import BlockAllocator"]

    def _body(self) -> list[str]:
        return _without_idle("\n".join(self._lines).splitlines())

    def _story(self, message: str) -> tuple[ev.Event, ...]:
        return (*self._events, ev.StepFailed(self._step, message, ()))

    def _draw(self) -> tuple[str, ...]:
        rows = [["table", "tokens", "blocks", "your table says"]]
        for table in self._tables[:6]:
            where = "" if table.pool == "allocator" else " in the other pool"
            said = "?" if table.seen is None else f"{table.seen_tokens} tokens, {table.seen}"
            if isinstance(table.seen, Raised):
                said = "raises"
            mark = "" if (table.seen, table.seen_tokens) in ((table.blocks, table.num_tokens), (None, None)) else " <--"
            rows.append([table.name, str(table.num_tokens), f"{table.blocks}{where}", said + mark])
        lines = aligned(rows)
        for name, pool in self._pools.items():
            counts = [(pool.inner.ref_count(block), self._count(name, block)) for block in range(self.num_blocks)]
            if name == "other" and not any(found or right for found, right in counts):
                continue
            rows = [
                [f"block of {name}", *map(str, range(self.num_blocks))],
                ["ref_count should be", *(str(right) for _, right in counts)],
                ["it is", *(f"{found}" if found == right else f"{found} <--" for found, right in counts)],
            ]
            lines += aligned(rows)
        return tuple(lines)


POOLS = ("allocator", "other")


def _without_idle(lines: list[str]) -> list[str]:
    """Remove unused names from a script: the second pool, `before`, names of results."""
    kept: list[str] = []
    for number, line in enumerate(lines):
        name, equals, call = line.partition(" = ")
        rest: list[str] = []
        for later in lines[number + 1 :]:
            if later.startswith(f"{name} = "):
                break
            rest.append(later)
        word = re.compile(rf"\b{re.escape(name)}[],.)\[]|\b{re.escape(name)}$")
        used = not equals or not name.isidentifier() or any(word.search(later) for later in rest)
        if used:
            kept.append(line)
        elif name not in ("before", "other"):
            kept.append(call if name in ("copies", "needed") else line)
    return kept


def _listed(value: Any) -> list[Any] | None:
    """Return a list, tuple or array as a list, and None for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None
