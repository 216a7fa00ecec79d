"""Calls a student's block allocator, and compares each answer with a model.

An `AllocatorSession` makes one allocator in the worker and then calls it. After every call it compares the answer,
`num_free` and the reference counts with a list of the holders of each block. In its drawing and its events every holder
of a block is a sequence with a table of one block, named A, B, C, ...:

    allocate         a request arrives; its table gets the block
    share            the holder's sequence forks
    copy_on_write    the holder that shared last writes: its table gets a copy, or keeps the block when it is alone
    free             the holder that shared last ends

If the student wrote `allocate_many`, `share_many` or `free_many`, a call of these counts as several of the above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from minipaged import events as ev
from minipaged.course.grader.assignment import Bench
from minipaged.course.grader.counterexample import aligned, letter, must_raise, said
from minipaged.course.grader.session import Session
from minipaged.course.sandbox.contract import Handle, Outcome, Raised, Result
from minipaged.errors import BlockNotAllocated, Invariant, OutOfBlocks

BLOCK_SIZE = 16
ALL_CHECKED = 12
"""The largest pool in which every call is followed by a check of all reference counts. In a larger pool only the blocks
that the call names are checked."""
MOST_CALLS = 40_000
"""The most calls made to shorten a program. This takes seconds, however long the program is."""
MANY = "allocate_many", "share_many", "free_many"
"""Optional methods of an allocator. Each either succeeds as a whole, or raises and changes nothing."""
DRAWN = 8
"""The most blocks in a drawing."""


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A held block: number `pick`, modulo the number of held blocks, in the order in which they were allocated."""

    pick: int


@dataclass(frozen=True, slots=True)
class Variable:
    """The block that the call with this label returned, whether it is still held or not."""

    label: int


@dataclass(frozen=True, slots=True)
class Number:
    """A number that may be outside the pool; for `allocate_many` the number of blocks."""

    number: int


@dataclass(frozen=True, slots=True)
class Several:
    """Blocks for `share_many` and `free_many`; one may occur twice."""

    blocks: tuple[HeldBlock | Number, ...]
    once: bool = False
    """Whether they are passed as an iterator, which can be consumed only once."""


Operand = HeldBlock | Variable | Number | Several | None


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method with its block or blocks."""

    method: str
    operand: Operand = None
    label: int | None = None
    """The label by which later calls refer to the result; None if none does."""


@dataclass(slots=True)
class _Holder:
    """One holder of a block."""

    name: str
    sequence: int
    request: str
    block: int
    num_tokens: int = 1


class AllocatorSession(Session):
    """One allocator of the student's, with a model of its right answers."""

    KIND = "an allocator"

    def __init__(self, bench: Bench, num_blocks: int, part: tuple[Handle, str] | None = None) -> None:
        super().__init__(bench, part)
        self.num_blocks = num_blocks
        self._tables: list[_Holder] = []
        self._counted: dict[int, int] | None = None
        """The cached result of `_counts`, until a table changes."""
        self._variables: list[tuple[str, int]] = []
        """The script's variables, in order: the name and value of each returned block."""
        self._num_results = 0
        self._labelled: dict[int, tuple[str, int]] = {}
        self._events: list[ev.Event] = [ev.EngineStarted(num_blocks, 0, BLOCK_SIZE, BLOCK_SIZE * max(1, num_blocks))]
        self._step = 0
        self._num_tables = 0
        self._observed: dict[int, Any] = {}
        self._observed_free: Any = None
        self._made = f"{self._name}({num_blocks})"
        if num_blocks < 1:
            self._refuse_to_make(self._made, "a pool needs at least 1 block", num_blocks)
            return
        self._lines.append(f"allocator = {self._made}")
        self._allocator = self._make(self._made, num_blocks)
        [found] = self._ask([(self._allocator, "num_blocks", None)])
        if isinstance(found, Raised):
            self._lines.append("allocator.num_blocks")
            self._raised("num_blocks", found.error, "num_blocks")
        if found != num_blocks or isinstance(found, bool):
            self._fail(
                f"num_blocks is {found!r}; it should be {num_blocks}",
                f'assert allocator.num_blocks == {num_blocks}, f"num_blocks is {{allocator.num_blocks}}"',
                invariant=Invariant.CONSERVATION,
            )
        everything = range(num_blocks)
        self._observe(self._ask(self._looks(everything)), everything)
        self._check_state(everything, self._made, refused=False)

    # --- Calls ------------------------------------------------------------------------------------

    def call(self, call: Call) -> None:
        """Make one call, and compare its answer and the state with the model."""
        method, (name, value) = call.method, self._resolve(call.operand)
        if method != "allocate" and value is None:
            return
        self._step += 1
        self._events.append(ev.StepStarted(self._step))
        shown = f"allocator.{method}({name})"
        args = () if value is None else (value,)
        looks = self._to_look_at([] if method == "allocate_many" else _as_blocks(value))
        once = isinstance(call.operand, Several) and call.operand.once
        make = [(value, "__iter__", ())] if once else []  # made in the worker, since iterators do not travel
        asked = (self._allocator, method, (Result(0),) if once else args)
        answer, *state = self._ask([*make, asked, *self._looks(looks)], shown)[len(make) :]
        self._observe(state, looks)
        if expected := self._expected_error(method, value):
            error, why = expected
            self._lines += must_raise(error.__name__, shown, why)
            if isinstance(answer, Raised) and not isinstance(answer.error, error):
                self._raised(method, answer.error, shown, f"; it has to raise {error.__name__}: {why}")
            if not isinstance(answer, Raised):
                conserves = method in ("allocate", "free", "allocate_many", "free_many")
                invariant = Invariant.CONSERVATION if conserves else Invariant.EXACT_REFERENCES
                self._fail(f"{shown} {said(answer)}; it has to raise {error.__name__}: {why}", invariant=invariant)
            self._check_state(looks, shown, refused=True)
        else:
            returns = method in ("allocate", "allocate_many", "copy_on_write")
            variable = self._add_line(shown, returns=returns)
            if isinstance(answer, Raised):
                self._wrongly_raised(method, value, shown, answer)
            new = self._carry_out(method, name, value, variable, shown, answer)
            if new := [block for block in new if block not in looks]:
                self._observe(self._ask(self._looks(new)), new)
            self._check_state([*looks, *new], shown, refused=False)
            if call.label is not None:
                self._labelled[call.label] = self._variables[-1]
        self._events.append(ev.StepFinished(self._step, 1, 1, 0.0))

    def _carry_out(
        self, method: str, name: str, value: int | list[int] | None, variable: str, shown: str, answer: Outcome
    ) -> list[int]:
        """Check the answer of a successful call, update the model, and return the blocks that the call allocated."""
        if method == "allocate_many":
            assert isinstance(value, int)
            new: list[int] = []
            for number, block in enumerate(self._as_many(value, answer, variable, shown)):
                if block in new:
                    self._fail(
                        f"{shown} {said(answer)}: block {block} is in it twice",
                        f'assert len(set({variable})) == {value}, f"got {{{variable}}}"',
                        invariant=Invariant.EXCLUSIVE_WRITE,
                    )
                self._take(block, f"{variable}[{number}]", shown)
                new.append(block)
            return new
        if method == "allocate":
            self._take(answer, variable, shown)
            return [answer]
        for block in _as_blocks(value):
            if method in ("share", "share_many"):
                self._fork(block)
            elif method in ("free", "free_many"):
                self._end(block)
        if method != "copy_on_write":
            return []
        assert isinstance(value, int)
        holders = self._counts()[value]
        if holders == 1 and (answer != value or isinstance(answer, bool)):
            self._fail(
                f"{shown} {said(answer)}; block {value} has only one holder, which may write to it without a copy",
                f'assert {variable} == {name}, f"got block {{{variable}}}"',
                invariant=Invariant.EXCLUSIVE_WRITE,
            )
        if holders > 1 and answer == value:
            self._fail(
                f"{shown} returned block {value} itself, but it has {holders} holders: a write would change what the "
                "others read",
                f'assert {variable} != {name}, f"got block {{{variable}}} again"',
                invariant=Invariant.EXCLUSIVE_WRITE,
            )
        if holders > 1:
            self._check_new_block(answer, variable, shown)
        self._variables.append((variable, answer))
        self._write(value, answer)
        return [answer]

    def _as_many(self, n: int, answer: Outcome, variable: str, shown: str) -> list[Any]:
        """Return the answer of `allocate_many(n)` as a list; it may be an array."""
        blocks = answer.tolist() if hasattr(answer, "tolist") else answer
        if not isinstance(blocks, list | tuple) or len(blocks) != n:
            self._fail(
                f"{shown} {said(answer)}; it has to return a list of {n} blocks",
                f'assert len({variable}) == {n}, f"got {{{variable}}}"',
                invariant=Invariant.CONSERVATION,
            )
        return list(blocks)

    def _add_line(self, shown: str, *, returns: bool) -> str:
        """Add the call to the script, and return the name of its result."""
        variable = letter(self._num_results)
        self._num_results += returns
        self._lines.append(f"{variable} = {shown}" if returns else shown)
        return variable

    def _wrongly_raised(self, method: str, value: int | list[int] | None, shown: str, answer: Raised) -> NoReturn:
        if isinstance(answer.error, OutOfBlocks):
            if method == "copy_on_write" and isinstance(value, int) and self._counts()[value] == 1:
                self._fail(
                    f"{shown} raised OutOfBlocks, but block {value} has only one holder, so no copy is needed",
                    invariant=Invariant.EXCLUSIVE_WRITE,
                )
            takes = method.startswith("allocate") or method == "copy_on_write"
            why = f"{self.num_blocks - len(self._counts())} blocks are free" if takes else "it needs no free block"
            self._fail(f"{shown} raised OutOfBlocks, but {why}", invariant=Invariant.CONSERVATION)
        self._raised(method, answer.error, shown)

    def _take(self, answer: Outcome, variable: str, shown: str) -> None:
        """Check a newly allocated block, and give it a holder in the model."""
        self._check_new_block(answer, variable, shown)
        self._variables.append((variable, answer))
        self._add_table(answer)

    def _check_new_block(self, answer: Outcome, variable: str, shown: str) -> None:
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < self.num_blocks:
            self._fail(
                f"{shown} {said(answer)}; blocks are 0 to {self.num_blocks - 1}",
                f'assert {variable} in range({self.num_blocks}), f"got block {{{variable}}}"',
                invariant=Invariant.CONSERVATION,
            )
        if held := [table.name for table in self._tables if table.block == answer]:
            other = self._name_of(answer)
            self._fail(
                f"{shown} returned block {answer}, which is still held by {', '.join(held)}",
                f'assert {variable} != {other}, f"got block {{{variable}}}, which is held"',
                invariant=Invariant.EXCLUSIVE_WRITE,
            )

    def _name_of(self, block: int) -> str:
        """Return the block's name in the script: the last variable with its value."""
        return next((name for name, value in reversed(self._variables) if value == block), str(block))

    # --- The model --------------------------------------------------------------------------------

    def _counts(self) -> dict[int, int]:
        """Return the number of holders of each held block, ordered by first holder. Callers must not change it."""
        if self._counted is None:
            self._counted = {}
            for table in self._tables:
                self._counted[table.block] = self._counted.get(table.block, 0) + 1
        return self._counted

    def _expected_error(self, method: str, value: int | list[int] | None) -> tuple[type[Exception], str] | None:
        counts = self._counts()
        if method == "allocate_many" and isinstance(value, int):
            free = self.num_blocks - len(counts)
            if value < 0:
                return ValueError, "the number of blocks is negative"
            return (OutOfBlocks, f"num_free is {free}") if value > free else None
        for block in _as_blocks(value):
            if not 0 <= block < self.num_blocks:
                return BlockNotAllocated, f"the pool has blocks 0 to {self.num_blocks - 1}"
            if method != "ref_count" and block not in counts:
                return BlockNotAllocated, f"block {block} is not held"
            times = _as_blocks(value).count(block)
            if method == "free_many" and times > counts[block]:
                return (
                    BlockNotAllocated,
                    f"block {block} is freed {times} times, but ref_count({block}) is {counts[block]}",
                )
        if method in ("ref_count", "share_many", "free_many"):
            return None
        full = len(counts) == self.num_blocks
        copies = method == "copy_on_write" and isinstance(value, int) and counts[value] > 1
        if full and (method == "allocate" or copies):
            return OutOfBlocks, "no block is free"
        return None

    def is_refused(self, call: Call) -> bool:
        """Whether the call has to raise an error."""
        return self._expected_error(call.method, self._resolve(call.operand)[1]) is not None

    def is_full(self) -> bool:
        return len(self._counts()) == self.num_blocks

    def is_shared(self, operand: Operand) -> bool:
        block = self._resolve(operand)[1]
        return isinstance(block, int) and self._counts().get(block, 0) > 1

    def _resolve(self, operand: Operand) -> tuple[str, int | list[int] | None]:
        """Return the operand's name in the script and its block number, or a list of numbers for several blocks.

        The number is None if there is no such block.
        """
        match operand:
            case None:
                return "", None
            case Several(operands, once):
                found = [self._resolve(one) for one in operands]
                shown = f"[{', '.join(name for name, block in found if block is not None)}]"
                return (
                    f"iter({shown})" if once else shown,
                    [block for _, value in found for block in _as_blocks(value)],
                )
            case Number(number):
                return str(number), number
            case Variable(label):
                return self._labelled.get(label, ("", None))
            case HeldBlock(pick):
                held = list(self._counts())
                if not held:
                    return "", None
                block = held[pick % len(held)]
                return self._name_of(block), block

    # --- Reading the state ------------------------------------------------------------------------

    def _to_look_at(self, blocks: list[int]) -> Sequence[int]:
        if self.num_blocks <= ALL_CHECKED:
            return range(self.num_blocks)
        return [block for block in dict.fromkeys(blocks) if 0 <= block < self.num_blocks]

    def _looks(self, blocks: Sequence[int]) -> list[tuple[Handle, str, Sequence[Any] | None]]:
        looks: list[tuple[Handle, str, Sequence[Any] | None]] = [(self._allocator, "num_free", None)]
        return looks + [(self._allocator, "ref_count", (block,)) for block in blocks]

    def _observe(self, state: Sequence[Any], blocks: Sequence[int]) -> None:
        self._observed_free = state[0]
        self._observed.update(zip(blocks, state[1:], strict=True))

    def _check_state(self, blocks: Sequence[int], shown: str, *, refused: bool) -> None:
        """Compare the observed state of these blocks with the model."""
        counts = self._counts()
        says = f"{shown} was refused, but changed something:" if refused else f"after {shown}"
        number, num_free = self._observed_free, self.num_blocks - len(counts)
        if isinstance(number, Raised):
            self._lines.append("allocator.num_free")
            self._raised("num_free", number.error, f"after {shown}, num_free")
        if number != num_free or isinstance(number, bool):
            self._fail(
                f"{says} num_free is {number!r}; it should be {num_free}",
                f'assert allocator.num_free == {num_free}, f"num_free is {{allocator.num_free}}"',
                invariant=Invariant.ATOMIC_FAILURE if refused else Invariant.CONSERVATION,
            )
        for block in blocks:
            count, right, name = self._observed[block], counts.get(block, 0), self._name_of(block)
            if isinstance(count, Raised):
                self._lines.append(f"allocator.ref_count({name})")
                self._raised("ref_count", count.error, f"after {shown}, ref_count({block})", f"; it is {right}")
            if count != right or isinstance(count, bool):
                shown_count = f"ref_count({name}) is {{allocator.ref_count({name})}}"
                self._fail(
                    f"{says} ref_count({block}) is {count!r}; it should be {right}",
                    f'assert allocator.ref_count({name}) == {right}, f"{shown_count}"',
                    invariant=Invariant.ATOMIC_FAILURE if refused else Invariant.EXACT_REFERENCES,
                )

    # --- The diary --------------------------------------------------------------------------------

    def _add_table(self, block: int) -> None:
        table = _Holder(letter(self._num_tables).upper(), self._num_tables, letter(self._num_tables).upper(), block)
        self._num_tables += 1
        self._tables.append(table)
        self._counted = None
        self._events += [
            ev.RequestArrived(table.request, table.sequence, (0,), 1),
            ev.RequestAdmitted(table.request),
            ev.TokensComputed(table.sequence, 1, (block,), 0),
        ]

    def _last_holder(self, block: int) -> _Holder:
        return next(table for table in reversed(self._tables) if table.block == block)

    def _fork(self, block: int) -> None:
        parent = self._last_holder(block)
        child = _Holder(letter(self._num_tables).upper(), self._num_tables, parent.request, block, parent.num_tokens)
        self._num_tables += 1
        self._tables.append(child)
        self._counted = None
        self._events.append(ev.SequenceForked(parent.request, parent.sequence, child.sequence))

    def _end(self, block: int) -> None:
        table = self._last_holder(block)
        self._tables.remove(table)
        self._counted = None
        self._events += [
            ev.SequenceFinished(table.request, table.sequence, "length"),
            ev.BlocksFreed(table.sequence, (block,)),
        ]
        if not any(other.request == table.request for other in self._tables):
            self._events.append(ev.RequestFinished(table.request, "finished"))

    def _write(self, block: int, target: int) -> None:
        table = self._last_holder(block)
        if target != block:
            holders = self._counts()[block]
            self._events.append(ev.BlockCopied(table.sequence, 0, block, target, holders))
            table.block = target
            self._counted = None
        if table.num_tokens < BLOCK_SIZE:
            table.num_tokens += 1
            self._events.append(ev.TokenGenerated(table.request, table.sequence, 0, 0.0))
        self._events.append(ev.TokensComputed(table.sequence, table.num_tokens, (), 0))

    # --- Failing ----------------------------------------------------------------------------------

    def _interrupted(self, shown: str) -> str:
        if shown and shown != self._made:
            self._lines.append(shown)
        return shown or self._made

    def _story(self, message: str) -> tuple[ev.Event, ...]:
        children = [event.request for event in self._events if isinstance(event, ev.SequenceForked)]
        return tuple(
            replace(event, num_sequences=1 + children.count(event.request))
            if isinstance(event, ev.RequestArrived)
            else event
            for event in (*self._events, ev.StepFailed(self._step, message, ()))
        )

    def _draw(self) -> tuple[str, ...]:
        counts = self._counts()
        wrong = [block for block, value in self._observed.items() if value != counts.get(block, 0)]
        shown = sorted([*wrong, *(block for block in range(self.num_blocks) if block not in wrong)][:DRAWN])
        if not shown:
            return ()
        rows = [
            ["block", *map(str, shown), "num_free"],
            ["held by", *(" ".join(t.name for t in self._tables if t.block == block) or "-" for block in shown), ""],
            [
                "ref_count should be",
                *(str(counts.get(block, 0)) for block in shown),
                str(self.num_blocks - len(counts)),
            ],
            [
                "your allocator says",
                *(_observed(self._observed.get(block), counts.get(block, 0)) for block in shown),
                _observed(self._observed_free, self.num_blocks - len(counts)),
            ],
        ]
        lines = aligned(rows)
        if tables := "  ".join(f"{table.name}: [{table.block}]" for table in self._tables[:DRAWN]):
            lines.append(f"tables: {tables}")
        if len(shown) < self.num_blocks:
            lines.append(f"(the pool has {self.num_blocks} blocks)")
        return tuple(lines)


def _as_blocks(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _observed(value: Any, right: int) -> str:
    if value is None:
        return "?"
    shown = "raises" if isinstance(value, Raised) else value.kind if isinstance(value, Handle) else repr(value)
    return shown if value == right and not isinstance(value, bool) else f"{shown} <--"


def shorten(calls: list[Call], fails: Callable[[list[Call]], bool]) -> None:
    """Search for a shorter list of calls that still fails. The last list for which `fails` returned True is the result.

    This leaves out halves of the list, then quarters, down to single calls, if the rest still fails. `fails` removes
    the calls after the one that failed.
    """
    if not fails(calls):
        return
    size, trials, to_make = len(calls), 250, MOST_CALLS
    while size >= 1 and trials > 0 and to_make > 0:
        start = 0
        while start < len(calls) and trials > 0 and to_make > 0:
            rest = calls[:start] + calls[start + size :]
            trials -= 1
            to_make -= len(rest)
            if fails(rest):
                calls = rest
            else:
                start += size
        size = min(size, len(calls)) // 2
