"""Calls a student's prefix cache, and compares each answer with a model.

A `CacheSession` has one cache in the worker, and sequences a, b, c, ... in the grader. A sequence begins with the
blocks that `match` finds for its tokens, and takes further blocks for the others; if none is free, `evict` has to give
some back. Tables and allocator are the reference's. So a block that is shared is copied before it is written, as long
as the cache holds its reference. After each call the answer, the table and all reference counts are compared with the
model.

In the session's events each sequence is a request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from minipaged import events as ev
from minipaged.contracts import BlockTable
from minipaged.course.assignments.block_table.session import OfferedAllocator
from minipaged.course.grader.assignment import Bench
from minipaged.course.grader.counterexample import aligned, letter, said
from minipaged.course.grader.session import Session
from minipaged.course.sandbox.contract import Raised
from minipaged.errors import Invariant
from minipaged.tiers import plain_parts


class OfferedTable:
    """A table of the grader's for the student's cache: its blocks, and `replace`."""

    OFFERED: ClassVar[tuple[str, ...]] = ("blocks", "num_tokens", "replace")

    def __init__(self, inner: BlockTable) -> None:
        self.inner = inner
        self.replaced: list[tuple[int, int, int]] = []
        """(logical block, old block, new block) of each call of `replace`."""

    blocks = property(lambda self: list(self.inner.blocks))
    num_tokens = property(lambda self: self.inner.num_tokens)

    def replace(self, logical_block: int, block: int) -> None:
        old = self.inner.blocks[logical_block]
        self.inner.replace(logical_block, block)
        self.replaced.append((logical_block, old, block))


@dataclass(frozen=True, slots=True)
class CacheStep:
    """One step of a program: its kind, tokens, and numbers that choose a sequence and so on."""

    kind: str
    tokens: tuple[int, ...] = ()
    a: int = 0
    b: int = 0


@dataclass(slots=True)
class _Entry:
    """A cached block of the model."""

    block: int
    parent: int | None
    tokens: tuple[int, ...]
    used: tuple[int, int]
    """The time of its last use, and minus its place in the path that was used: the smallest is evicted first."""


@dataclass(slots=True)
class _Sequence:
    """A sequence that runs."""

    name: str
    number: int
    tokens: list[int]
    table: OfferedTable


class CacheSession(Session):
    """One prefix cache of the student's, with a model of its right answers."""

    KIND = "a prefix cache"

    def __init__(self, bench: Bench, block_size: int, num_blocks: int, *, whole: bool = False) -> None:
        """With `whole`, tokens that begin with a part of a cached block are never looked up."""
        super().__init__(bench)
        self._whole_only = whole
        self.block_size, self.num_blocks = block_size, num_blocks
        self._pool = OfferedAllocator(plain_parts()[0](num_blocks))
        self._entries: dict[int, _Entry] = {}
        self._sequences: list[_Sequence] = []
        self._texts: list[list[int]] = []
        """The tokens of all sequences that ever ran."""
        self._clock = 0
        self._step = 0
        self._events: list[ev.Event] = [ev.EngineStarted(num_blocks, 0, block_size, block_size * num_blocks)]
        shown = f"{self._name}({block_size}, allocator)"
        self._lines += [f"allocator = BlockAllocator({num_blocks})", f"cache = {shown}"]
        self._cache = self._make(shown, block_size, self._pool)
        self._compare(f"cache = {shown}")

    def run(self, ops: Sequence[CacheStep]) -> None:
        """Carry out the steps. A step that lacks a sequence or room is left out."""
        for op in ops:
            self._step += 1
            self._events.append(ev.StepStarted(self._step))
            getattr(self, f"_{op.kind}")(op)
            self._events.append(ev.StepFinished(self._step, 1, 1, 0.0))

    # --- The steps of programs --------------------------------------------------------------------

    def _match(self, op: CacheStep) -> None:
        """Look tokens up, for no sequence."""
        if not self._is_left_out(list(op.tokens)):
            self._found(list(op.tokens))

    def _begin(self, op: CacheStep) -> None:
        self._begin_with(list(op.tokens))

    def _begin_again(self, op: CacheStep) -> None:
        """Begin with the first tokens of an earlier sequence, and perhaps others."""
        if self._texts:
            text = self._texts[op.a % len(self._texts)]
            self._begin_with([*text[: op.b % (len(text) + 1)], *op.tokens] or text[:1])

    def _serve(self, op: CacheStep) -> None:
        """Begin, and publish the full blocks at once.

        Left out if the last of these is cached, but not found whole, because one token has to be left to run.
        """
        found, cached = (self._longest(tokens)[0] for tokens in ([*op.tokens], [*op.tokens, -1]))
        if found == cached and self._begin_with(list(op.tokens)):
            self._publish(CacheStep("publish", a=len(self._sequences) - 1))

    def _begin_with(self, tokens: list[int]) -> bool:
        """Begin a sequence. Returns False if there is no room, or if the step is left out."""
        if self._is_left_out(tokens):
            return False
        number = len(self._texts)
        name = letter(number)
        blocks, found = self._found(tokens)
        table = OfferedTable(plain_parts()[1](self.block_size, self._pool.inner))
        self._lines.append(f"{name} = BlockTable({self.block_size}, allocator)")
        if blocks:
            table.inner.adopt(blocks)
            table.inner.trim(found)
            self._lines += [f"{name}.adopt(blocks)", f"{name}.trim({found})"]
        self._texts.append(tokens)
        sequence = _Sequence(name, number, [], table)
        self._sequences.append(sequence)
        self._events += [ev.RequestArrived(f"r{number}", number, tuple(tokens), 1), ev.RequestAdmitted(f"r{number}")]
        if blocks:
            self._events.append(ev.PrefixReused(number, tuple(blocks), "cache", found))
        sequence.tokens = tokens[:found]
        if self._write(sequence, tokens[found:]):
            return True
        self._free(sequence)
        return False

    def _is_left_out(self, tokens: list[int]) -> bool:
        return self._whole_only and bool(self._longest(tokens)[2])

    def _grow(self, op: CacheStep) -> None:
        """Compute more tokens of a sequence."""
        if self._sequences and op.tokens:
            sequence = self._sequences[op.a % len(self._sequences)]
            if self._write(sequence, list(op.tokens)):
                self._texts[sequence.number] = list(sequence.tokens)

    def _publish(self, op: CacheStep) -> None:
        """Publish the full blocks of a sequence, which goes on."""
        if self._sequences:
            sequence = self._sequences[op.a % len(self._sequences)]
            full = len(sequence.tokens) // self.block_size * self.block_size
            self._publish_tokens(sequence, sequence.tokens[:full])

    def _end(self, op: CacheStep) -> None:
        """Publish all blocks of a sequence, the last one too, and free them."""
        if self._sequences:
            sequence = self._sequences[op.a % len(self._sequences)]
            self._publish_tokens(sequence, sequence.tokens)
            self._free(sequence)

    def _end_full(self, op: CacheStep) -> None:
        """Publish the full blocks of a sequence, and free all."""
        if self._sequences:
            sequence = self._sequences[op.a % len(self._sequences)]
            self._publish(op)
            self._free(sequence)

    def _evict(self, op: CacheStep) -> None:
        self._evict_blocks(op.a)

    # --- Calls of the student's cache, with the right answers ----------------------------------------

    def _found(self, tokens: list[int]) -> tuple[list[int], int]:
        """Call `match`, and return its right answer."""
        shown = f"cache.match({tokens})"
        answer = self._call("match", (tokens,), shown, f"blocks, n = {shown}")
        path, num_tokens, last = self._longest(tokens)
        count = -(-num_tokens // self.block_size)
        try:
            blocks, found = answer
            blocks = [*map(_whole, blocks)]
            found = _whole(found)
        except (TypeError, ValueError):
            self._fail(
                f"{shown} {said(answer)}; it has to return a list of blocks, and a number of tokens",
                "assert isinstance(n, int) and all(isinstance(block, int) for block in blocks), (blocks, n)",
            )
        right = [[*path, block] for block in last] if last else [path]
        if found != num_tokens or blocks not in right:
            why = self._why(tokens, num_tokens, found)
            options = " or ".join(map(str, right))
            self._fail(
                f"{shown} {said(answer)}; it should return {num_tokens} tokens, in {options}: {why}",
                f"assert (n, list(blocks)) in {[(num_tokens, one) for one in right]}, (n, blocks)",
                invariant=Invariant.CONTENT,
            )
        assert len(blocks) == count
        self._use(blocks)
        self._compare(shown)
        return blocks, found

    def _why(self, tokens: list[int], num_tokens: int, found: int) -> str:
        if num_tokens == len(tokens) - 1 and found > num_tokens:
            return "one token has to be left to run"
        if found > num_tokens:
            return f"nothing that is cached begins with {tokens[: num_tokens + 1]}"
        return f"{tokens[:num_tokens]} is cached" if num_tokens else "nothing that is cached begins like this"

    def _publish_tokens(self, sequence: _Sequence, tokens: list[int]) -> None:
        shown = f"cache.publish({tokens}, {sequence.name})"
        table, inner = sequence.table, sequence.table.inner
        table.replaced.clear()
        before = list(inner.blocks)
        self._call("publish", (tokens, table), shown, shown)
        right, parent, new = list(before), None, list[ev.Event]()
        path: list[int] = []
        for logical in range(-(-len(tokens) // self.block_size)):
            own = tuple(tokens[logical * self.block_size : (logical + 1) * self.block_size])
            block = before[logical]
            same = [one for one in self._children(parent) if one.tokens[: len(own)] == own]
            if len(own) == self.block_size and same:
                right[logical] = same[0].block
                if block != same[0].block:
                    new.append(ev.BlockDeduplicated(sequence.number, logical, block, same[0].block))
            elif not same:
                for one in self._children(parent):
                    if own[: len(one.tokens)] == one.tokens:
                        del self._entries[one.block]
                        new.append(ev.BlockEvicted(one.block, "redundant"))
                self._entries[block] = _Entry(block, parent, own, (0, 0))
                new.append(ev.BlockCached(sequence.number, logical, block, 0, len(own)))
            else:
                break  # the last block, whose tokens another one begins with
            parent = right[logical]
            path.append(parent)
        self._use(path)
        if list(inner.blocks) != right:
            self._fail(
                f"after {shown} {sequence.name}.blocks is {list(inner.blocks)}; it should be {right}: a full block "
                "that is cached already takes the place of the table's own block, and nothing else changes",
                f"assert list({sequence.name}.blocks) == {right}, list({sequence.name}.blocks)",
                invariant=Invariant.CONTENT,
            )
        self._events += new
        self._compare(shown)

    def _evict_blocks(self, num_blocks: int) -> None:
        shown = f"cache.evict({num_blocks})"
        answer = self._call("evict", (num_blocks,), shown, f"evicted = {shown}")
        free = [one for one in self._entries.values() if self._holders(one.block) == ["the cache"]]
        right = [one.block for one in sorted(free, key=lambda one: one.used)][:num_blocks]
        try:
            evicted = [*map(_whole, answer)]
        except (TypeError, ValueError):
            evicted = None
        if evicted != right:
            self._fail(
                f"{shown} {said(answer)}; it should return {right}{self._why_evicted(evicted or [], right)}",
                f"assert list(evicted) == {right}, evicted",
                invariant=Invariant.CONTENT if set(evicted or ()) - {one.block for one in free} else None,
            )
        for block in right:
            del self._entries[block]
            self._events.append(ev.BlockEvicted(block))
        self._compare(shown)

    def _why_evicted(self, evicted: list[int], right: list[int]) -> str:
        for block in evicted:
            if block not in self._entries:
                return f": block {block} is not cached"
            if (holders := self._holders(block)) != ["the cache"]:
                return f": block {block} is held by {' and '.join(holders)}"
        if len(evicted) == len(right):
            return ": the block used longest ago comes first, and of one path the last block"
        return ""

    def _call(self, method: str, args: tuple[Any, ...], shown: str, line: str) -> Any:
        self._lines.append(line)
        [answer] = self._ask([(self._cache, method, args)], shown)
        if isinstance(answer, Raised):
            self._raised(method, answer.error, shown)
        return answer

    # --- The grader's part --------------------------------------------------------------------------

    def _write(self, sequence: _Sequence, tokens: list[int]) -> bool:
        """Take slots for these tokens; evict if none are free. Returns False if there is no room."""
        table, name = sequence.table.inner, sequence.name
        if (short := table.blocks_needed(len(tokens)) - self._pool.num_free) > 0:
            self._evict_blocks(short)
        if table.blocks_needed(len(tokens)) > self._pool.num_free:
            return False
        held = len(table.blocks)
        self._lines.append(f"{name}.append({len(tokens)})")
        for source, destination in table.append(len(tokens)):
            count = len(self._holders(source)) + 1
            self._events.append(ev.BlockCopied(sequence.number, held - 1, source, destination, count))
        sequence.tokens = [*sequence.tokens, *tokens]
        new = tuple(table.blocks[held:])
        self._events.append(ev.TokensComputed(sequence.number, len(sequence.tokens), new, 0))
        return True

    def _free(self, sequence: _Sequence) -> None:
        blocks = tuple(sequence.table.inner.blocks)
        sequence.table.inner.trim(0)
        self._sequences.remove(sequence)
        self._lines.append(f"{sequence.name}.trim(0)")
        self._events.append(ev.BlocksFreed(sequence.number, blocks))
        self._events.append(ev.SequenceFinished(f"r{sequence.number}", sequence.number, "length"))
        self._events.append(ev.RequestFinished(f"r{sequence.number}", "finished"))

    # --- The model --------------------------------------------------------------------------------

    def _children(self, parent: int | None) -> list[_Entry]:
        return [one for one in self._entries.values() if one.parent == parent]

    def _longest(self, tokens: list[int]) -> tuple[list[int], int, list[int]]:
        """Return the full blocks that are found, the number of all tokens found, and the blocks of which any one may
        come last, if the last one is found in part."""
        path: list[int] = []
        while True:
            start = len(path) * self.block_size
            rest = tuple(tokens[start : min(start + self.block_size, len(tokens) - 1)])
            children = self._children(path[-1] if path else None)
            common = {one.block: _num_common(one.tokens, rest) for one in children}
            most = max(common.values(), default=0)
            best = [block for block, number in common.items() if number == most]
            if most < self.block_size:
                return path, start + most, best if most else []
            path += best

    def _use(self, path: Sequence[int]) -> None:
        self._clock += 1
        for place, block in enumerate(path):
            self._entries[block].used = self._clock, -place

    def _holders(self, block: int) -> list[str]:
        names = [one.name for one in self._sequences for held in one.table.inner.blocks if held == block]
        return names + ["the cache"] * (block in self._entries)

    def _compare(self, shown: str) -> None:
        """Compare all reference counts with the model."""
        for block in range(self.num_blocks):
            count, holders = self._pool.inner.ref_count(block), self._holders(block)
            if count != len(holders):
                by = f"it is held by {' and '.join(holders)}" if holders else "nobody holds it"
                self._fail(
                    f"after {shown} block {block} has reference count {count}; it should be {len(holders)}: {by}",
                    f"assert allocator.ref_count({block}) == {len(holders)}, allocator.ref_count({block})",
                    invariant=Invariant.EXACT_REFERENCES,
                )

    # --- Telling ----------------------------------------------------------------------------------

    def _imports(self) -> list[str]:
        text = "\n".join(self._lines)
        imports = ["from minipaged.reference.block_allocator import BlockAllocator"]
        if re.search(r"\bBlockTable\(", text):
            imports.append("from minipaged.reference.block_table import BlockTable")
        return imports

    def _story(self, message: str) -> tuple[ev.Event, ...]:
        return (*self._events, ev.StepFailed(self._step, message, ()))

    def _draw(self) -> tuple[str, ...]:
        rows = [["block", "after", "cached tokens", "held by"]]
        for one in self._entries.values():
            after = "-" if one.parent is None else str(one.parent)
            rows.append([str(one.block), after, " ".join(map(str, one.tokens)), ", ".join(self._holders(one.block))])
        running = [f"{one.name}: {one.tokens} in {list(one.table.inner.blocks)}" for one in self._sequences]
        return (*aligned(rows), *running) if len(rows) > 1 else ("nothing is cached", *running)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _whole(value: Any) -> int:
    """Return a whole number as it is. Raises TypeError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(value)
    return value
