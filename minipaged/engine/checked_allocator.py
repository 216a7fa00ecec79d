"""A wrapper around a block allocator that reports every breach of the contract immediately, by name.

Every call is compared with counts kept here. If a student's allocator hands out a block twice, miscounts, or changes
something in a call that raises, the wrapper raises InvariantViolation with the name of the invariant and what was
expected. The engine wraps every allocator that a user brings, and its own when debugging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NoReturn

from minipaged.contracts import BlockAllocator
from minipaged.errors import BlockNotAllocated, Invariant, InvariantViolation, NotAnAllocator, OutOfBlocks

MEMBERS = ("num_blocks", "num_free", "allocate", "share", "free", "ref_count", "copy_on_write")


class CheckedAllocator(BlockAllocator):
    """A wrapper around an object with the single-block methods, which checks it after each call."""

    def __init__(self, num_blocks: int, make: Callable[[int], Any]) -> None:
        """Make the allocator to be checked, as `make(num_blocks)`."""
        unfinished: frozenset[str] = getattr(make, "__abstractmethods__", frozenset())
        _check_members(make, [member for member in ("__init__", *MEMBERS) if member in unfinished])
        self._inner = make(num_blocks)
        self._kind = type(self._inner).__name__
        _check_members(type(self._inner), [member for member in MEMBERS if not hasattr(self._inner, member)])
        self._num_blocks = num_blocks
        self._counts: dict[int, int] = {}
        self.touched: set[int] = set()
        """Blocks allocated or completely freed since this set was last cleared."""
        if self._inner.num_blocks != num_blocks:
            self._broken(
                Invariant.CONSERVATION, f"num_blocks is {self._inner.num_blocks}, not {num_blocks} as asked for"
            )
        self._check("__init__", None)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return int(self._inner.num_free)

    def ref_count(self, block: int) -> int:
        if not 0 <= block < self._num_blocks:
            raise BlockNotAllocated(f"there is no block {block}; the pool has blocks 0 to {self._num_blocks - 1}")
        self._check("ref_count", block)
        return self._counts.get(block, 0)

    def allocate(self) -> int:
        with self._unchanged_if_it_raises("allocate()", None):
            allocated = self._inner.allocate()
        block = self._check_new(allocated, "allocate()")
        self._counts[block] = 1
        self.touched.add(block)
        self._check("allocate()", block)
        return block

    def share(self, block: int) -> None:
        with self._unchanged_if_it_raises(f"share({block})", block):
            self._inner.share(block)
        if block not in self._counts:
            self._broken(Invariant.EXACT_REFERENCES, f"share({block}) was accepted for a block that nobody holds")
        self._counts[block] += 1
        self._check(f"share({block})", block)

    def free(self, block: int) -> None:
        with self._unchanged_if_it_raises(f"free({block})", block):
            self._inner.free(block)
        if block not in self._counts:
            self._broken(Invariant.CONSERVATION, f"free({block}) was accepted for a block that nobody holds")
        self._counts[block] -= 1
        if self._counts[block] == 0:
            del self._counts[block]
            self.touched.add(block)
        self._check(f"free({block})", block)

    def copy_on_write(self, block: int) -> int:
        call = f"copy_on_write({block})"
        with self._unchanged_if_it_raises(call, block):
            target = self._inner.copy_on_write(block)
        holders = self._counts.get(block, 0)
        if holders == 0:
            self._broken(Invariant.EXACT_REFERENCES, f"{call} was accepted for a block that nobody holds")
        if (target == block) != (holders == 1):
            self._broken(
                Invariant.EXCLUSIVE_WRITE, f"{call} returned block {target} although {holders} hold block {block}"
            )
        if target != block:
            target = self._check_new(target, call)
            self._counts[block] -= 1
            self._counts[target] = 1
            self.touched.add(target)
            self._check(call, target)
        self._check(call, block)
        return int(target)

    @contextmanager
    def _unchanged_if_it_raises(self, call: str, block: int | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, OutOfBlocks) and len(self._counts) < self._num_blocks:
                free = self._num_blocks - len(self._counts)
                self._broken(Invariant.CONSERVATION, f"{call} raised OutOfBlocks with {free} blocks free", error)
            try:
                self._check(call, block)
            except InvariantViolation as change:
                self._broken(
                    Invariant.ATOMIC_FAILURE, f"{call} raised {type(error).__name__} and changed state: {change}", error
                )
            raise

    def _check_new(self, block: Any, call: str) -> int:
        """Return `block` as an int (NumPy's integers are accepted) if it was free."""
        if isinstance(block, bool) or not isinstance(block, Integral) or not 0 <= int(block) < self._num_blocks:
            self._broken(Invariant.CONSERVATION, f"{call} returned {block!r}, not a block in range({self._num_blocks})")
        if block in self._counts:
            self._broken(Invariant.EXCLUSIVE_WRITE, f"{call} returned block {block}, which is already held")
        return int(block)

    def _check(self, call: str, block: int | None) -> None:
        free = self._num_blocks - len(self._counts)
        if self._inner.num_free != free:
            self._broken(Invariant.CONSERVATION, f"after {call} num_free is {self._inner.num_free}, not {free}")
        if block is not None and 0 <= block < self._num_blocks:
            expected = self._counts.get(block, 0)
            try:
                count = self._inner.ref_count(block)
            except Exception as error:
                self._broken(
                    Invariant.EXACT_REFERENCES,
                    f"after {call} ref_count({block}) raised {error!r}; it is {expected}",
                    error,
                )
            if count != expected:
                self._broken(Invariant.EXACT_REFERENCES, f"after {call} ref_count({block}) is {count}, not {expected}")

    def _broken(self, invariant: Invariant, message: str, cause: Exception | None = None) -> NoReturn:
        raise InvariantViolation(invariant, f"{self._kind}: {message}") from cause


def _check_members(kind: Callable[[int], Any], missing: list[str]) -> None:
    if missing:
        name = getattr(kind, "__name__", repr(kind))
        raise NotAnAllocator(f"{name} is no block allocator: it lacks {', '.join(missing)}")
