"""Calls a student's windows, and compares each answer with a model.

A `WindowsSession` has one object of the student's class in the worker, and sequences a, b, c, ... in the grader. Their
tables travel by value. The allocator is the reference's, so the grader sees every reference that the student's code
takes or gives up. After each call the answer and all reference counts are compared with the model, which lists the
positions that a token sees.

In the session's events each sequence is a request, or the fork of one. The text in the prefix cache is that of a
request that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from minipaged import events as ev
from minipaged.course.assignments.block_table.session import OfferedAllocator
from minipaged.course.grader.assignment import Bench
from minipaged.course.grader.counterexample import aligned, letter, said
from minipaged.course.grader.session import Session
from minipaged.course.sandbox.contract import Raised
from minipaged.errors import Invariant
from minipaged.tiers import plain_parts

NUM_BLOCKS = 60
"""The size of the pool."""

Table = list[int | None]
"""The blocks of one group, with None for each hole."""


@dataclass(frozen=True, slots=True)
class WindowStep:
    """One step of a program: its kind, and two numbers that choose the sequence, the number of tokens and so on."""

    kind: str
    a: int = 0
    b: int = 0


@dataclass(slots=True)
class _TabledSequence:
    """The right state of a sequence."""

    name: str
    number: int
    request: int
    """The number of the sequence that the request began with."""
    tables: list[Table]
    num_tokens: int = 0
    """The number of slots that are taken."""
    position: int = 0
    """The latest position that blocks were given back for."""


class WindowsSession(Session):
    """One object of the student's class, with a model of its right answers."""

    KIND = "an object"

    def __init__(self, bench: Bench, block_size: int, windows: Sequence[int | None], num_cached: int) -> None:
        """`num_cached`: the number of blocks of a text that is in the prefix cache in all groups."""
        super().__init__(bench)
        self.block_size, self.windows = block_size, [*windows]
        self._pool = OfferedAllocator(plain_parts()[0](NUM_BLOCKS))
        self._sequences: list[_TabledSequence] = []
        self._cached: list[Table] = [[] for _ in windows]
        self._num_sequences = 0
        self._step = 0
        self._events: list[ev.Event] = [
            ev.EngineStarted(NUM_BLOCKS, 0, block_size, block_size * NUM_BLOCKS, tuple(windows))
        ]
        shown = f"{self._name}({block_size}, {self.windows}, allocator)"
        self._lines += [f"allocator = BlockAllocator({NUM_BLOCKS})", f"windows = {shown}"]
        self._windows = self._make(shown, block_size, self.windows, self._pool)
        self._compare(f"windows = {shown}")
        if num_cached:
            self._cache(num_cached)

    def run(self, steps: Sequence[WindowStep]) -> None:
        """Carry out the steps. A step that lacks room is left out."""
        for step in steps:
            self._step += 1
            self._events.append(ev.StepStarted(self._step))
            getattr(self, f"_{step.kind}")(step)
            self._events.append(ev.StepFinished(self._step, 1, 1, 0.0))

    # --- The steps of programs --------------------------------------------------------------------

    def _see(self, step: WindowStep) -> None:
        group, position = step.a % len(self.windows), step.b
        shown = f"windows.visible({group}, {position})"
        answer = self._call("visible", (group, position), shown, f"blocks = {shown}")
        if answer != (right := [*self._seen(group, position)]):
            self._fail(
                f"{shown} {said(answer)}; it should return {right}: {self._why(group, position)}",
                f"assert blocks == {right}, blocks",
                invariant=Invariant.WINDOW_CONTENT,
            )
        self._compare(shown)

    def _begin(self, step: WindowStep) -> None:
        """Begin a sequence with some tokens."""
        sequence = self._new([[] for _ in self.windows], num_tokens=step.b)
        self._lines.append(f"{sequence.name} = {sequence.tables}")
        self._take(sequence, step.b)

    def _grow(self, step: WindowStep) -> None:
        """Take slots for more tokens of a sequence."""
        self._take(self._sequence(step), step.b)

    def _fork(self, step: WindowStep) -> None:
        """Begin a sequence with all that another one holds."""
        parent, number = self._sequence(step), self._num_sequences
        child = _TabledSequence(
            letter(len(self._sequences)),
            number,
            parent.request,
            [[*table] for table in parent.tables],
            parent.num_tokens,
            parent.position,
        )
        self._num_sequences += 1
        self._sequences.append(child)
        self._lines.append(f"{child.name} = [[*table] for table in {parent.name}]")
        self._lines += [f"allocator.share({block})" for block in held(child.tables)]
        for block in held(child.tables):
            self._pool.inner.share(block)
        self._events.append(ev.SequenceForked(f"r{parent.request}", parent.number, number))

    def _give_back(self, step: WindowStep) -> None:
        """Give back what the next token of a sequence does not see; this token is `b` tokens after the one before."""
        sequence = self._sequence(step)
        sequence.position = position = min(sequence.position + step.b, sequence.num_tokens)
        before, name = sequence.tables, sequence.name
        shown = f"windows.give_back({name}, {position})"
        answer = self._call("give_back", (before, position), shown, f"{name} = {shown}")
        right = self._kept(before, position)
        if answer != right:
            self._fail(
                f"{shown} {said(answer)}; it should return {right}: {self._why_tables(answer, right, position)}",
                f"assert {name} == {right}, {name}",
                invariant=Invariant.WINDOW_CONTENT,
            )
        sequence.tables = right
        entries = zip(in_entries(before), in_entries(right), strict=True)
        passed = [(i, old) for i, (old, new) in enumerate(entries) if old != new]
        if passed:
            self._events.append(ev.BlocksPassed(sequence.number, *zip(*passed, strict=True)))
        self._compare(shown)

    def _evict(self, step: WindowStep) -> None:
        """Evict one block of the cached text in one group."""
        group, i = step.a % len(self.windows), step.b % len(self._cached[0])
        block = self._cached[group][i]
        if block is not None and self._pool.inner.ref_count(block) == 1:
            self._cached[group][i] = None
            self._pool.inner.free(block)
            self._lines.append(f"allocator.free({block})  # block {i} of group {group} is evicted")
            self._events.append(ev.BlockEvicted(block))

    def _hit(self, step: WindowStep) -> None:
        """Begin a sequence with what is found of the cached text."""
        cached = self._cached
        shown = f"windows.longest_hit({cached})"
        name = letter(len(self._sequences))
        answer = self._call("longest_hit", (cached,), shown, f"{name} = {shown}")
        right: list[Table] = next(filter(None, map(self._hit_of, range(len(cached[0]), 0, -1))), [[] for _ in cached])
        num_tokens = len(right[0]) * self.block_size
        if answer != right:
            self._fail(
                f"{shown} {said(answer)}; it should return {right}: {self._why_hit(answer, right)}",
                f"assert {name} == {right}, {name}",
                invariant=Invariant.WINDOW_CONTENT,
            )
        sequence = self._new(right, num_tokens=num_tokens)
        if num_tokens:
            self._events.append(ev.PrefixReused(sequence.number, in_entries(right), "cache", num_tokens))
        sequence.num_tokens = sequence.position = num_tokens
        self._compare(shown)

    # --- The right answers --------------------------------------------------------------------------

    def _seen(self, group: int, position: int) -> range:
        """The logical blocks that the token at `position` sees."""
        positions = self._positions(group, position)
        return range(positions[0] // self.block_size, positions[-1] // self.block_size + 1)

    def _positions(self, group: int, position: int) -> range:
        window = self.windows[group]
        everything = range(position + 1)
        return everything if window is None else everything[-window:]

    def _hit_of(self, n: int) -> list[Table] | None:
        """The tables of a sequence that begins with n cached blocks; None if something is missing."""
        if self._missing(n):
            return None
        return self._kept([table[:n] for table in self._cached], n * self.block_size)

    def _kept(self, tables: Sequence[Table], position: int) -> list[Table]:
        """The tables without what no token from `position` on sees."""
        return [
            [block if i >= self._seen(group, position).start else None for i, block in enumerate(table)]
            for group, table in enumerate(tables)
        ]

    def _missing(self, n: int) -> list[tuple[int, int]]:
        """The groups and blocks that are not cached and would be seen after a hit of n blocks."""
        return [
            (group, i)
            for group, table in enumerate(self._cached)
            for i in self._seen(group, n * self.block_size)
            if i < n and table[i] is None
        ]

    # --- Why ----------------------------------------------------------------------------------------

    def _why(self, group: int, position: int) -> str:
        window, positions = self.windows[group], self._positions(group, position)
        kind = "no window" if window is None else f"window {window}"
        return f"in group {group} ({kind}) the token at {position} sees {span(positions)}"

    def _why_tables(self, answer: Any, right: Sequence[Table], position: int) -> str:
        """Explain the first entry that is not right."""
        if num_entries(answer, len(right)) != len(right[0]):
            return "a list for each group, with an entry for each block"
        group, i = next((g, i) for g, table in enumerate(right) for i in range(len(table)) if answer[g][i] != table[i])
        block = f"block {i} of the table has {span(range(i * self.block_size, (i + 1) * self.block_size))}"
        return f"{self._why(group, position)}, and {block}"

    def _why_hit(self, answer: Any, right: Sequence[Table]) -> str:
        found, num_right = num_entries(answer, len(right)), len(right[0])
        if found is None or found == num_right or found > len(self._cached[0]):
            return self._why_tables(answer, right, num_right * self.block_size)
        if missing := self._missing(found):
            group, i = missing[0]
            return f"{self._why(group, found * self.block_size)}, and block {i} is not cached"
        return f"all that the token at {num_right * self.block_size} sees is cached"

    # --- The grader's part --------------------------------------------------------------------------

    def _cache(self, num_blocks: int) -> None:
        """A text of so many full blocks is in the prefix cache, in all groups."""
        self._lines.append(f"cached = [[allocator.allocate() for _ in range({num_blocks})] for _ in {self.windows}]")
        self._cached = [[self._pool.inner.allocate() for _ in range(num_blocks)] for _ in self.windows]
        number, blocks, num_tokens = self._num_sequences, in_entries(self._cached), num_blocks * self.block_size
        self._arrive(number, num_tokens)
        self._events += [
            ev.TokensComputed(number, num_tokens, blocks, 0),
            *(ev.BlockCached(number, entry, block, 0, self.block_size) for entry, block in enumerate(blocks)),
            ev.BlocksFreed(number, blocks),
            ev.SequenceFinished(f"r{number}", number, "length"),
            ev.RequestFinished(f"r{number}", "finished"),
        ]
        self._num_sequences += 1

    def _new(self, tables: list[Table], *, num_tokens: int) -> _TabledSequence:
        """A sequence of a request that arrives with this many tokens."""
        number = self._num_sequences
        self._arrive(number, num_tokens)
        self._num_sequences += 1
        self._sequences.append(_TabledSequence(letter(len(self._sequences)), number, number, tables))
        return self._sequences[-1]

    def _arrive(self, number: int, num_tokens: int) -> None:
        prompt = tuple(range(num_tokens)) or (0,)
        self._events += [ev.RequestArrived(f"r{number}", number, prompt, 1), ev.RequestAdmitted(f"r{number}")]

    def _sequence(self, step: WindowStep) -> _TabledSequence:
        if not self._sequences:
            self._begin(WindowStep("begin"))
        return self._sequences[step.a % len(self._sequences)]

    def _take(self, sequence: _TabledSequence, num_tokens: int) -> None:
        """Take slots for more tokens. A last block that others hold too, and that is not full, is copied first."""
        name, tables, pool = sequence.name, sequence.tables, self._pool.inner
        num_blocks = -(-(sequence.num_tokens + num_tokens) // self.block_size) - len(tables[0])  # rounded up
        is_partly_full = sequence.num_tokens % self.block_size > 0
        if not num_tokens or (num_blocks + is_partly_full) * len(tables) > pool.num_free:
            return
        if is_partly_full and any(pool.ref_count(table[-1]) > 1 for table in tables):  # type: ignore[arg-type]
            self._lines.append(f"for table in {name}: table[-1] = allocator.copy_on_write(table[-1])")
            for group, table in enumerate(tables):
                source, i = table[-1], len(table) - 1
                assert source is not None  # the next token sees the block that it is written into
                if (count := pool.ref_count(source)) > 1:
                    table[-1] = copy = pool.copy_on_write(source)
                    entry = i * len(tables) + group
                    self._events.append(ev.BlockCopied(sequence.number, entry, source, copy, count))
        new: list[Table] = [[pool.allocate() for _ in range(num_blocks)] for _ in tables]
        if num_blocks:
            self._lines.append(f"for table in {name}: table += [allocator.allocate() for _ in range({num_blocks})]")
        for table, blocks in zip(tables, new, strict=True):
            table += blocks
        sequence.num_tokens += num_tokens
        self._events.append(ev.TokensComputed(sequence.number, sequence.num_tokens, in_entries(new), 0))

    def _call(self, method: str, args: tuple[Any, ...], shown: str, line: str) -> Any:
        self._lines.append(line)
        [answer] = self._ask([(self._windows, method, args)], shown)
        if isinstance(answer, Raised):
            self._raised(method, answer.error, shown)
        return answer

    def _compare(self, shown: str) -> None:
        """Compare all reference counts with the model."""
        holders: dict[int, list[str]] = {block: [] for block in range(NUM_BLOCKS)}
        for name, tables in self._named():
            for block in held(tables):
                holders[block].append(name)
        for block, names in holders.items():
            if (count := self._pool.inner.ref_count(block)) != len(names):
                by = f"it is held by {' and '.join(names)}" if names else "nobody holds it"
                self._fail(
                    f"after {shown} block {block} has reference count {count}; it should be {len(names)}: {by}",
                    f"assert allocator.ref_count({block}) == {len(names)}, allocator.ref_count({block})",
                    invariant=Invariant.EXACT_REFERENCES,
                )

    def _named(self) -> list[tuple[str, list[Table]]]:
        return [*((one.name, one.tables) for one in self._sequences), ("the cache", self._cached)]

    # --- Telling ----------------------------------------------------------------------------------

    def _imports(self) -> list[str]:
        return ["from minipaged.reference.block_allocator import BlockAllocator"]

    def _story(self, message: str) -> tuple[ev.Event, ...]:
        return (*self._events, ev.StepFailed(self._step, message, ()))

    def _draw(self) -> tuple[str, ...]:
        rows = [["tables of", "group", "window", "blocks"]]
        for name, tables in self._named():
            for group, (window, table) in enumerate(zip(self.windows, tables, strict=True)):
                blocks = " ".join("-" if block is None else str(block) for block in table)
                rows.append([name, str(group), "-" if window is None else str(window), blocks])
        return tuple(aligned([row for row in rows if row[-1]])) if any(row[-1] for row in rows[1:]) else ()


def held(tables: Sequence[Table]) -> list[int]:
    """The blocks in the tables, one group after another."""
    return [block for block in chain(*tables) if block is not None]


def in_entries(tables: Sequence[Table]) -> tuple[int, ...]:
    """The entries as events have them: those of all groups for a logical block, then those for the next."""
    return tuple(ev.HOLE if block is None else block for block in chain(*zip(*tables, strict=True)))


def num_entries(answer: Any, num_groups: int) -> int | None:
    """The number of entries in each table; None if the answer is not a list of tables of one length."""
    if not isinstance(answer, list) or len(answer) != num_groups or not all(isinstance(one, list) for one in answer):
        return None
    lengths = {len(table) for table in answer}
    return lengths.pop() if len(lengths) == 1 else None


def span(positions: range) -> str:
    return f"position {positions[0]}" if len(positions) == 1 else f"positions {positions[0]} to {positions[-1]}"
