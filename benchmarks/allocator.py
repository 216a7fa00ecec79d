"""What the fast tier's block allocator gains over the reference's, both timed in turns in one run.

    python -m benchmarks.allocator [--repetitions R]

A repetition runs each contestant for a few milliseconds, one after another, so that a machine that slows down slows
both. Reported is the fastest repetition of each: what disturbs a run of plain Python only ever makes it slower. What
calling costs by itself is taken off.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minipaged.contracts import BlockAllocator
from minipaged.fast.block_allocator import BlockAllocator as Fast
from minipaged.reference.block_allocator import BlockAllocator as Reference

POOL = 32_768
MANY = 4_096
SECONDS = 0.004
"""How long one contestant runs in one repetition."""


@dataclass(frozen=True)
class Case:
    what: str
    make: Callable[[BlockAllocator], Callable[[], object]]
    """Prepares an allocator; what it returns is timed, and leaves the allocator as it found it."""
    target: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the fast block allocator beside the reference's.")
    parser.add_argument("--repetitions", type=int, default=50, help="runs of each contestant; the fastest counts")
    print_table(allocator_results(parser.parse_args().repetitions))


def allocator_results(repetitions: int = 50) -> list[dict[str, Any]]:
    """One dict for each kind of call: seconds a call of either tier, their ratio, and the ratio aimed at."""
    return [measure(case, repetitions) for case in CASES]


def measure(case: Case, repetitions: int) -> dict[str, Any]:
    calls = [case.make(allocator(POOL)) for allocator in (Reference, Fast)] + [nothing]
    counts = []
    for call in calls:
        count, _ = timeit.Timer(call).autorange()  # as many as take 0.2 s or longer; warms up, too
        counts.append(max(1, round(count * SECONDS / 0.2)))
    fastest = [float("inf")] * len(calls)
    for _ in range(repetitions):
        for i, (call, count) in enumerate(zip(calls, counts, strict=True)):
            fastest[i] = min(fastest[i], timeit.timeit(call, number=count) / count)
    reference, fast = fastest[0] - fastest[-1], fastest[1] - fastest[-1]
    ratio = reference / fast
    return {
        "what": case.what,
        "reference_seconds": reference,
        "fast_seconds": fast,
        "ratio": ratio,
        "target": case.target,
        "met": ratio >= case.target,
    }


def nothing() -> None:
    """What calling costs by itself."""


def print_table(results: list[dict[str, Any]]) -> None:
    print(f"pool of {POOL} blocks; microseconds a call, fastest repetition\n")
    print(f"{'':44}{'reference':>11}{'fast':>9}{'ratio':>9}  target")
    for r in results:
        print(
            f"{r['what']:44}{r['reference_seconds'] * 1e6:11.3f}{r['fast_seconds'] * 1e6:9.3f}{r['ratio']:8.2f}x  "
            f">= {r['target']:g}x  {'met' if r['met'] else 'MISSED'}"
        )


# --- The calls ------------------------------------------------------------------------------------


def allocate_and_free(a: BlockAllocator) -> Callable[[], object]:
    return lambda: a.free(a.allocate())


def share_and_free(a: BlockAllocator) -> Callable[[], object]:
    block = a.allocate()

    def run() -> None:
        a.share(block)
        a.free(block)

    return run


def ref_count(a: BlockAllocator) -> Callable[[], object]:
    block = a.allocate_many(1000)[-1]
    return lambda: a.ref_count(block)


def copy_on_write_alone(a: BlockAllocator) -> Callable[[], object]:
    block = a.allocate()
    return lambda: a.copy_on_write(block)


def copy_on_write_shared(a: BlockAllocator) -> Callable[[], object]:
    """The block stays shared: what was given up is taken again."""
    block = a.allocate()
    a.share(block)

    def run() -> None:
        copy = a.copy_on_write(block)
        a.share(block)
        a.free(copy)

    return run


def allocate_many_and_free_many(n: int) -> Callable[[BlockAllocator], Callable[[], object]]:
    return lambda a: lambda: a.free_many(a.allocate_many(n))


def share_many_and_free_many(n: int) -> Callable[[BlockAllocator], Callable[[], object]]:
    def make(a: BlockAllocator) -> Callable[[], object]:
        blocks: Sequence[int] = a.allocate_many(n)

        def run() -> None:
            a.share_many(blocks)
            a.free_many(blocks)

        return run

    return make


CASES = [
    Case("allocate, free", allocate_and_free, 1),
    Case("share, free", share_and_free, 1),
    Case("ref_count", ref_count, 1),
    Case("copy_on_write, sole holder", copy_on_write_alone, 1),
    Case("copy_on_write, share, free", copy_on_write_shared, 1),
    *(Case(f"allocate_many({n}), free_many", allocate_many_and_free_many(n), 1) for n in (0, 1, 2, 4, 16, 64, 256)),
    Case(f"allocate_many({MANY}), free_many", allocate_many_and_free_many(MANY), 20),
    *(Case(f"share_many of {n}, free_many", share_many_and_free_many(n), 1) for n in (1, 4, 64)),
    Case(f"share_many of {MANY}, free_many", share_many_and_free_many(MANY), 20),
]


if __name__ == "__main__":
    main()
