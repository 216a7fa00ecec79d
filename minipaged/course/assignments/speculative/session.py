"""Calls a student's part of speculative decoding, and compares each answer with a model.

A `SpeculativeSession` has one object of the student's class in the worker. Distributions are lists of floats, and
travel by value. A `RollBackSession` also has sequences a, b, c, ... in the grader, which decode with drafts, fork, and
publish their full blocks. Their block tables are the reference's. After each call of `roll_back` the answer, the table
and all reference counts are compared with the model.

In the events each sequence is a request, or the fork of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from minipaged import events as ev
from minipaged.contracts import BlockAllocator, BlockTable
from minipaged.course.assignments.windows.session import span
from minipaged.course.grader.assignment import Bench
from minipaged.course.grader.counterexample import aligned, letter, said
from minipaged.course.grader.session import Session
from minipaged.course.sandbox.contract import Raised
from minipaged.errors import Invariant
from minipaged.tiers import plain_parts

Row = list[float]
"""A distribution: the probability of each token."""
TOLERANCE = 1e-9
"""The rounding error that a residual may have."""
NUM_BLOCKS = 100
"""The size of the pool."""


# --- The right answers of `verify` ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verification:
    """The arguments of `verify`, and what is right."""

    p: list[Row]
    """[k + 1] rows; NaN in rows that nobody may look at."""
    q: list[Row]
    """[k] rows."""
    drafted: list[int]
    u: list[float]
    """[k], for acceptance."""
    v: list[float]
    """[k + 1], for the tokens that are drawn."""

    def stands(self, i: int) -> bool:
        """Whether drafted token i is accepted, if all before it are."""
        token = self.drafted[i]
        return self.u[i] * self.q[i][token] < self.p[i][token]

    @property
    def num_accepted(self) -> int:
        return next((i for i in range(len(self.drafted)) if not self.stands(i)), len(self.drafted))

    @property
    def weights(self) -> Row:
        """The weights from which the last token is drawn."""
        n = self.num_accepted
        return self.p[n] if n == len(self.drafted) else excess(self.p[n], self.q[n])

    @property
    def tokens(self) -> list[int]:
        n, weights = self.num_accepted, self.weights
        threshold = self.v[n] * sum(weights)
        return [*self.drafted[:n], next(i for i, running in enumerate(accumulate(weights)) if threshold < running)]


def excess(p: Row, q: Row) -> Row:
    """The amounts by which p exceeds q."""
    return [max(0.0, a - b) for a, b in zip(p, q, strict=True)]


# --- Verifying --------------------------------------------------------------------------------------


class SpeculativeSession(Session):
    """One object of the student's class, with a model of its right answers."""

    KIND = "an object"

    def __init__(self, bench: Bench, block_size: int = 4) -> None:
        super().__init__(bench)
        self.block_size = block_size
        self._step = 1
        self._events: list[ev.Event] = [ev.EngineStarted(NUM_BLOCKS, 0, block_size, block_size * NUM_BLOCKS)]
        self._drawing: tuple[str, ...] = ()
        shown = f"{self._name}({block_size})"
        self._lines.append(f"speculative = {shown}")
        self.speculative = self._make(shown, block_size)

    def residual(self, p: Row, q: Row) -> None:
        """Compare the residual of two different distributions."""
        shown = f"speculative.residual({p}, {q})"
        answer = self._call("residual", (p, q), shown, f"residual = {shown}")
        weights = excess(p, q)
        right, found = [weight / sum(weights) for weight in weights], numbers(answer)
        rows = [["token", "p", "q", "p - q", "residual"]]
        rows += [
            [str(i), f"{a:g}", f"{b:g}", f"{a - b:g}", f"{share:.4g}"]
            for i, (a, b, share) in enumerate(zip(p, q, right, strict=True))
        ]
        if found is not None:
            mine = [f"{number:.4g}" for number in found] + ["-"] * len(p)
            rows = [[*row, *one] for row, one in zip(rows, [["yours"], *([one] for one in mine)], strict=False)]
        self._drawing = tuple(aligned(rows))
        if found is None or len(found) != len(right) or not all(map(is_close, found, right)):
            self._fail(
                f"{shown} {said(answer)}; it should return {short(right)}: {self._why_residual(found, p, q, right)}",
                f"right = {right}",
                "assert len(residual) == len(right), residual",
                f"assert all(abs(a - b) < {TOLERANCE} for a, b in zip(residual, right)), residual",
            )

    def verify(self, case: Verification, *, last: bool = True, invariant: Invariant | None = None) -> list[int]:
        """Compare the tokens of a draft, and return the right ones. Without `last`, whatever token comes last is right.

        `invariant`: the one that a wrong answer breaks.
        """
        given = f"{case.drafted}, {case.u}, {case.v}"
        shown = f"speculative.verify(p, q, {given})"
        if any(math.isnan(number) for row in case.p for number in row):
            self._lines.append('nan = float("nan")  # nobody may look at these')
        self._lines += [f"p = {case.p}", f"q = {case.q}"]
        self._tell(case)
        self._drawing = ()
        answer = self._call("verify", (case.p, case.q, case.drafted, case.u, case.v), shown, f"tokens = {shown}")
        found, right = whole_numbers(answer), case.tokens
        self._drawing = self._draw_rows(case, found)
        seen = found if last or not found else found[:-1]
        if found is None or len(found) != len(right) or seen != right[: len(seen or ())]:
            told = right if last else f"two tokens, first {right[0]}" if right[1:] else "one token"
            self._fail(
                f"{shown} {said(answer)}; it should return {told}: {self._why(case, found)}",
                f"assert list(tokens) == {right}, tokens"
                if last
                else f"assert len(tokens) == {len(right)} and list(tokens[:-1]) == {right[:-1]}, tokens",
                invariant=invariant,
            )
        return right

    def _call(self, method: str, args: tuple[Any, ...], shown: str, line: str) -> Any:
        self._lines.append(line)
        [answer] = self._ask([(self.speculative, method, args)], shown)
        if isinstance(answer, Raised):
            self._raised(method, answer.error, shown)
        return answer

    # --- Why ----------------------------------------------------------------------------------------

    def _why_residual(self, found: Row | None, p: Row, q: Row, right: Row) -> str:
        if found is None or len(found) != len(right):
            return "a list with a probability for each token"
        token = next(i for i, pair in enumerate(zip(found, right, strict=True)) if not is_close(*pair))
        if right[token] == 0:
            return f"at token {token}, p is {p[token]:g} and q is {q[token]:g}, so drafts bring enough of it"
        return (
            f"at token {token}, p exceeds q by {p[token] - q[token]:g}, of {sum(excess(p, q)):g} by which it exceeds "
            "q in all"
        )

    def _why(self, case: Verification, found: list[int] | None) -> str:
        """Explain the first difference."""
        n, right = case.num_accepted, case.tokens
        if found is None:
            return "a list of tokens"
        same = next((i for i, (a, b) in enumerate(zip(found, right, strict=False)) if a != b), len(found))
        if same < n:
            return self._why_one(case, same)
        refused = n < len(case.drafted)
        if refused and (len(found) > len(right) or (found[n:] == case.drafted[n : n + 1] != right[n:])):
            also = ", and nothing after it counts" if len(found) > len(right) else ", and cannot come again"
            return self._why_one(case, n) + also
        why = f"v[{n}] = {case.v[n]} falls on token {right[n]} of "
        if refused:
            total = sum(case.weights)
            return f"{self._why_one(case, n)}, and {why}the residual {short([one / total for one in case.weights])}"
        first = f"all {n} drafted tokens stand" if n > 1 else "the drafted token stands" if n else "nothing is drafted"
        return f"{first}, and {why}p[{n}]"

    def _why_one(self, case: Verification, i: int) -> str:
        token = case.drafted[i]
        p, q = case.p[i][token], case.q[i][token]
        if case.stands(i):
            return f"token {token} stands, since u[{i}] = {case.u[i]} is below p / q = {p:g} / {q:g}"
        return f"token {token} is refused, since u[{i}] = {case.u[i]} is not below p / q = {p:g} / {q:g}"

    # --- Telling ------------------------------------------------------------------------------------

    def _draw_rows(self, case: Verification, found: list[int] | None) -> tuple[str, ...]:
        rows = [["row", "drafted", "p", "q", "u", "", "v", "right", "yours"]]
        n, k, right = case.num_accepted, len(case.drafted), case.tokens
        for i in range(k + 1):
            cells = ["-"] * 4
            if i < k:
                token = case.drafted[i]
                cells = [str(token), f"{case.p[i][token]:g}", f"{case.q[i][token]:g}", f"{case.u[i]:g}"]
            becomes = "not looked at" if i > n else "" if i == k else "stands" if i < n else "refused"
            chosen = [str(tokens[i]) if i < len(tokens) else "-" for tokens in (right, found or ())]
            rows.append([str(i), *cells, becomes, f"{case.v[i]:g}" if i == n else "-", *chosen])
        return tuple(aligned(rows))

    def _tell(self, case: Verification) -> None:
        """Add a sequence that runs these drafted tokens to the events."""
        del self._events[1:]
        num_tokens = 1 + len(case.drafted)
        blocks = tuple(range(-(-num_tokens // self.block_size)))
        self._events += [ev.RequestArrived("r0", 0, (0,), 1), ev.RequestAdmitted("r0"), ev.StepStarted(self._step)]
        self._events += [ev.TokensDrafted(0, tuple(case.drafted))] if case.drafted else []
        self._events.append(ev.TokensComputed(0, num_tokens, blocks, 0))

    def _draw(self) -> tuple[str, ...]:
        return self._drawing

    def _story(self, message: str) -> tuple[ev.Event, ...]:
        return (*self._events, ev.StepFailed(self._step, message, ()))


# --- Rolling back -----------------------------------------------------------------------------------


class RolledBackTable:
    """A table of the grader's for the student's `roll_back`."""

    OFFERED: ClassVar[tuple[str, ...]] = ("blocks", "num_tokens", "trim")

    def __init__(self, inner: BlockTable) -> None:
        self.inner = inner

    blocks = property(lambda self: list(self.inner.blocks))
    num_tokens = property(lambda self: self.inner.num_tokens)

    def trim(self, num_tokens: int) -> None:
        self.inner.trim(num_tokens)


@dataclass(frozen=True, slots=True)
class RollBackStep:
    """One step of a program: its kind, and numbers that choose the sequence, the number of tokens and so on."""

    kind: str
    a: int = 0
    b: int = 0
    c: int = 0


@dataclass(slots=True)
class _DraftingSequence:
    """A sequence that decodes with drafts."""

    name: str
    number: int
    request: int
    """The number of the sequence that the request began with."""
    table: BlockTable


class RollBackSession(SpeculativeSession):
    """Sequences whose refused tokens are rolled back."""

    def __init__(self, bench: Bench, block_size: int) -> None:
        self._sequences: list[_DraftingSequence] = []
        self._cached: list[int] = []
        self._pool: BlockAllocator = plain_parts()[0](NUM_BLOCKS)
        super().__init__(bench, block_size)
        self._step = 0
        self._lines.append(f"allocator = BlockAllocator({NUM_BLOCKS})")

    def run(self, steps: Sequence[RollBackStep]) -> None:
        """Carry out the steps. A step that lacks room is left out."""
        for step in steps:
            self._step += 1
            self._events.append(ev.StepStarted(self._step))
            getattr(self, f"_{step.kind}")(step)
            self._events.append(ev.StepFinished(self._step, 1, 1, 0.0))

    def roll_back(
        self, table: BlockTable, num_drafted: int, num_accepted: int, name: str = "a", *, counted: bool = True
    ) -> None:
        """Compare the table and the number of blocks to publish after these drafts. Unless `counted`, that number is
        not compared."""
        shown = f"speculative.roll_back({name}, {num_drafted}, {num_accepted})"
        before, blocks, num_refused = table.num_tokens, list(table.blocks), num_drafted - num_accepted
        given = RolledBackTable(table), num_drafted, num_accepted
        answer = self._call("roll_back", given, shown, f"published = {shown}")
        right = before - num_refused
        if table.num_tokens != right:
            kept = -(-right // self.block_size)
            why = f"the last {num_refused} of {before} belong to refused tokens" if num_refused else "all tokens stand"
            if kept < len(blocks):
                why += f", and blocks {blocks[kept:]} go back"
            self._fail(
                f"after {shown} the table has {table.num_tokens} slots; it should have {right}: {why}",
                f"assert {name}.num_tokens == {right}, {name}.num_tokens",
                invariant=Invariant.CONTENT if table.num_tokens < right else Invariant.EXACT_REFERENCES,
            )
        full = right // self.block_size
        if counted and (answer != full or isinstance(answer, bool)):
            self._fail(
                f"{shown} {said(answer)}; it should return {full}: {self._why_published(answer, right, before)}",
                f"assert published == {full}, published",
                invariant=Invariant.CONTENT,
            )

    def slots_left(self, num_tokens: int, num_drafted: int, num_accepted: int) -> int:
        """Roll back a new table with this many slots, and return the number of slots that are left."""
        table = plain_parts()[1](self.block_size, self._pool)
        table.append(num_tokens)
        self._lines += [f"a = BlockTable({self.block_size}, allocator)", f"a.append({num_tokens})"]
        self.roll_back(table, num_drafted, num_accepted)
        return table.num_tokens

    def _why_published(self, answer: Any, right: int, before: int) -> str:
        size, full = self.block_size, right // self.block_size
        if isinstance(answer, int) and full < answer <= -(-before // size):
            positions = span(range(full * size, (full + 1) * size))
            return f"block {full} has {positions}, and position {right} has no K/V of a token that stands"
        return f"{right} tokens are verified and have K/V, and a block takes {size}"

    # --- The steps of programs ----------------------------------------------------------------------

    def _begin(self, step: RollBackStep) -> None:
        """Begin a sequence, and compute its prompt."""
        number, num_tokens, name = len(self._sequences), step.b + 1, letter(len(self._sequences))
        table = plain_parts()[1](self.block_size, self._pool)
        if table.blocks_needed(num_tokens) > self._pool.num_free:
            return
        table.append(num_tokens)
        self._sequences.append(_DraftingSequence(name, number, number, table))
        self._lines += [f"{name} = BlockTable({self.block_size}, allocator)", f"{name}.append({num_tokens})"]
        self._events += [
            ev.RequestArrived(f"r{number}", number, tuple(range(num_tokens)), 1),
            ev.RequestAdmitted(f"r{number}"),
            ev.TokensComputed(number, num_tokens, tuple(table.blocks), 0),
        ]

    def _fork(self, step: RollBackStep) -> None:
        """Begin a sequence with all that another one holds."""
        parent, number = self._sequence(step), len(self._sequences)
        child = _DraftingSequence(letter(number), number, parent.request, parent.table.fork())
        self._sequences.append(child)
        self._lines.append(f"{child.name} = {parent.name}.fork()")
        self._events.append(ev.SequenceForked(f"r{parent.request}", parent.number, number))

    def _draft(self, step: RollBackStep) -> None:
        self._run_draft(step, counted=False)

    def _draft_and_publish(self, step: RollBackStep) -> None:
        self._run_draft(step, counted=True)

    def _run_draft(self, step: RollBackStep, *, counted: bool) -> None:
        """Run the latest token of a sequence and `b` drafted ones, of which some stand."""
        sequence, num_drafted = self._sequence(step), step.b
        num_accepted, table, name = step.c % (num_drafted + 1), sequence.table, sequence.name
        if table.blocks_needed(1 + num_drafted) > self._pool.num_free:
            return
        held = len(table.blocks)
        self._lines.append(f"{name}.append({1 + num_drafted})  # its latest token, and {num_drafted} drafted")
        self._events += [ev.TokensDrafted(sequence.number, (0,) * num_drafted)] if num_drafted else []
        for source, destination in table.append(1 + num_drafted):
            holders = len(self._holders(source)) + 1
            self._events.append(ev.BlockCopied(sequence.number, held - 1, source, destination, holders))
        blocks = tuple(table.blocks)
        self._events.append(ev.TokensComputed(sequence.number, table.num_tokens, blocks[held:], 0))
        self.roll_back(table, num_drafted, num_accepted, name, counted=counted)
        if num_drafted:
            self._events.append(ev.TokensAccepted(sequence.number, num_drafted, num_accepted))
        if num_drafted > num_accepted:
            gone = blocks[len(table.blocks) :]
            self._events.append(ev.BlocksRolledBack(sequence.number, table.num_tokens, gone))
        self._compare(f"speculative.roll_back({name}, {num_drafted}, {num_accepted})")
        for entry, block in enumerate(table.blocks[: table.num_tokens // self.block_size]):
            if block not in self._cached:
                self._cached.append(block)
                self._pool.share(block)
                self._lines.append(f"allocator.share({block})  # block {entry} of {name} is published")
                self._events.append(ev.BlockCached(sequence.number, entry, block, 0, self.block_size))

    def _sequence(self, step: RollBackStep) -> _DraftingSequence:
        if not self._sequences:
            self._begin(RollBackStep("begin"))
        return self._sequences[step.a % len(self._sequences)]

    def _holders(self, block: int) -> list[str]:
        names = [one.name for one in self._sequences if block in one.table.blocks]
        return names + ["the cache"] * (block in self._cached)

    def _compare(self, shown: str) -> None:
        """Compare all reference counts with the model."""
        for block in range(NUM_BLOCKS):
            names, count = self._holders(block), self._pool.ref_count(block)
            if count != len(names):
                by = f"it is held by {' and '.join(names)}" if names else "nobody holds it"
                self._fail(
                    f"after {shown} block {block} has reference count {count}; it should be {len(names)}: {by}",
                    f"assert allocator.ref_count({block}) == {len(names)}, allocator.ref_count({block})",
                    invariant=Invariant.EXACT_REFERENCES,
                )

    # --- Telling ------------------------------------------------------------------------------------

    def _imports(self) -> list[str]:
        modules = {"BlockAllocator": "block_allocator", "BlockTable": "block_table"}
        return [f"from minipaged.reference.{module} import {name}" for name, module in modules.items()]

    def _draw(self) -> tuple[str, ...]:
        rows = [["table", "slots", "blocks"]]
        for one in self._sequences:
            blocks = " ".join(f"{block}*" if block in self._cached else str(block) for block in one.table.blocks)
            rows.append([one.name, str(one.table.num_tokens), blocks])
        published = ("*: published",) if self._cached else ()
        return (*aligned(rows), f"blocks of {self.block_size}", *published) if rows[1:] else ()


# --- Answers ----------------------------------------------------------------------------------------


def numbers(answer: Any) -> list[float] | None:
    """The answer as a list of numbers; None if it is none."""
    items = answer.tolist() if hasattr(answer, "tolist") else answer
    if not isinstance(items, list | tuple) or not all(type(item) in (int, float) for item in items):
        return None
    return [float(item) for item in items]


def whole_numbers(answer: Any) -> list[int] | None:
    """The answer as a list of tokens; None if it is none."""
    items = numbers(answer)
    return None if items is None or any(item != item // 1 for item in items) else [int(item) for item in items]


def is_close(found: float, right: float) -> bool:
    return abs(found - right) < TOLERANCE


def short(row: Row) -> str:
    return f"[{', '.join(f'{number:.4g}' for number in row)}]"
