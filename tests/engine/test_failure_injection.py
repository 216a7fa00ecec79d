"""Whatever raises in the middle of a step, nothing is lost: atomic-failure of the engine as a whole.

For each workload, the first, second, third, ... call of one of the parts raises, one call in each run (the thorough
profile draws some of the calls, the others try all). The error comes out of `step`; after it no block is leaked, and
when stepping goes on every request ends with exactly the tokens that it gets without any error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from minipaged.contracts import Batch, Logits, Sampled, SamplingInput
from minipaged.engine.drafts import Drafts
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.reference.beam_search import BeamSearch
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.sampling import sample
from minipaged.steps import BlockMoves
from minipaged.testing.content_runner import ContentRunner
from tests.effort import calls_that_raise, one_case_in, quick_cases, scaled, seeds
from tests.workloads import REFERENCE, Workload, WorkloadRequest, WorkloadRun, ended, random_workload


class Fault(Exception):
    """The one error that is injected."""


@dataclass
class Fuse:
    """Blows in call number `blows_at` (from 1 on) of those that `part` makes."""

    part: str
    blows_at: int = 0
    error: type[BaseException] = Fault
    calls: int = 0

    def check(self, part: str) -> None:
        if part == self.part:
            self.calls += 1
            if self.calls == self.blows_at:
                raise self.error(f"call {self.calls} of {part}")


def wired(workload: Workload, fuse: Fuse, drafts: Drafts | None = None) -> WorkloadRun:
    """A run in which every part asks the fuse first."""

    class Allocator(BlockAllocator):
        def allocate(self) -> int:
            fuse.check("allocate")
            return super().allocate()

        def share(self, block: int) -> None:
            fuse.check("share")
            super().share(block)

        def copy_on_write(self, block: int) -> int:
            fuse.check("copy_on_write")
            return super().copy_on_write(block)

    class Runner(ContentRunner):
        def move(self, moves: BlockMoves) -> None:
            if moves.copy:
                fuse.check("copy")
            if moves.swap_out:
                fuse.check("swap out")
            if moves.swap_in:
                fuse.check("swap in")
            super().move(moves)
            fuse.check("after moving")

        def forward(self, batch: Batch) -> Any:
            fuse.check("forward")
            half = batch[: len(batch) // 2]
            super().forward(half)
            fuse.check("half way through forward")
            return super().forward(batch)

    class Beams(BeamSearch):
        def step(self, logits: Any, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> Any:
            fuse.check("beam search")
            decided = super().step(logits, rows, cumulative_logprobs)
            fuse.check("after beam search")
            return decided

    class Samples(list[Sampled]):
        def __iter__(self) -> Iterator[Sampled]:
            fuse.check("fetch")
            return super().__iter__()

    def sample_or_fail(logits: Logits, inputs: Sequence[SamplingInput]) -> list[Sampled]:
        fuse.check("sample")
        return Samples(sample(logits, inputs))

    tier = replace(REFERENCE, beam_search=Beams, sample=sample_or_fail)
    return WorkloadRun(workload, tier, make_runner=Runner, allocator=Allocator, drafts=drafts)


def run_through(run: WorkloadRun, error: type[BaseException] = Fault) -> int:
    """Drive the run to its end, stepping on after errors; returns how many there were."""
    errors = 0
    for now in range(500):
        try:
            goes_on = run.advance(now)
        except error:
            errors += 1
            goes_on = True
            run.engine.check_invariants()
        if not goes_on:
            break
    run.check_outputs()
    run.check_nothing_leaked()
    return errors


def crowded(preemption: str, *, prefix_caching: bool) -> Workload:
    """A small pool and requests of every kind: chunked prefill, forks, beams, copies, preemption, a shared prefix."""
    config = EngineConfig(
        num_blocks=10,
        num_swap_blocks=8,
        block_size=2,
        max_model_len=20,
        vocab_size=11,
        preemption=preemption,  # type: ignore[arg-type]
        enable_prefix_caching=prefix_caching,
        max_num_batched_tokens=8,
        eos_token_ids=(2,),
        debug=True,
    )
    requests = (
        WorkloadRequest(0, (1, 3, 5, 7), SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True)),
        WorkloadRequest(0, (1, 3, 5, 8, 1), BeamSearchParams(beam_width=2, max_tokens=4)),
        WorkloadRequest(1, (1, 3, 5, 7, 9, 4, 1, 1, 6), SamplingParams(seed=2, max_tokens=8, ignore_eos=True)),
        WorkloadRequest(2, (4,), SamplingParams(temperature=0, seed=3, max_tokens=7, ignore_eos=True)),
    )
    return Workload(config, requests, swap_is_cheap=True)


WORKLOADS = {
    "swap": crowded("swap", prefix_caching=False),
    "swap, prefix caching": crowded("swap", prefix_caching=True),
    "recompute": crowded("recompute", prefix_caching=False),
    "recompute, prefix caching": crowded("recompute", prefix_caching=True),
}
PARTS = [
    "allocate",
    "share",
    "copy_on_write",
    "copy",
    "after moving",
    "forward",
    "half way through forward",
    "sample",
    "fetch",
    "beam search",
    "after beam search",
]


@quick_cases(12)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("part", PARTS)
def test_every_request_gets_its_tokens_and_no_block_leaks_whichever_call_raises(
    part: str, workload: Workload, request: pytest.FixtureRequest
) -> None:
    """Atomic-failure, exact-references, content, liveness."""
    calls = Fuse(part)
    assert run_through(wired(workload, calls)) == 0
    assert calls.calls > 0, "this workload never makes that call"
    for number in calls_that_raise(request, range(1, calls.calls + 1)):
        assert run_through(wired(workload, Fuse(part, number))) == 1, f"call {number} of {part}"


def test_the_workloads_are_crowded() -> None:
    """Without preemption, eviction and sharing the tests above would show little."""
    happened: set[str] = set()
    for workload in WORKLOADS.values():
        run = WorkloadRun(workload)
        run.to_the_end()
        happened |= set(run.happened)
    assert happened >= {"preempted by swap", "preempted by recompute", "block evicted", "prefix reused from cache"}
    assert happened >= {"block copied", "block deduplicated", "prompt computed in chunks"}


@pytest.mark.parametrize("part", ["swap out", "swap in"])
def test_every_request_gets_its_tokens_and_no_block_leaks_whichever_swap_raises(part: str) -> None:
    """Atomic-failure, exact-references, content, liveness."""
    for workload in (WORKLOADS["swap"], WORKLOADS["swap, prefix caching"]):
        calls = Fuse(part)
        run_through(wired(workload, calls))
        assert calls.calls > 0, "this workload never swaps"
        for number in range(1, calls.calls + 1):
            assert run_through(wired(workload, Fuse(part, number))) == 1


@pytest.mark.parametrize("part", ["allocate", "forward", "sample"])
def test_an_interrupt_by_the_user_is_survived_like_any_error(part: str) -> None:
    """Atomic-failure: Ctrl-C is no Exception, and comes at any time."""
    for number in range(1, 12):
        fuse = Fuse(part, number, KeyboardInterrupt)
        assert run_through(wired(WORKLOADS["swap, prefix caching"], fuse), KeyboardInterrupt) == 1


def test_requests_survive_errors_that_come_again_and_again() -> None:
    """Liveness: as long as there is time to catch up in between, every request finishes."""

    class EveryEighth(Fuse):
        def check(self, part: str) -> None:
            if part == self.part:
                self.calls += 1
                if self.calls % 8 == 0:
                    raise Fault

    for workload in WORKLOADS.values():
        assert run_through(wired(workload, EveryEighth("forward"))) >= 2


@one_case_in(3)
@scaled
@pytest.mark.parametrize("seeds", seeds(300, 50), ids=str)
def test_random_workloads_survive_an_error_anywhere(seeds: range) -> None:
    """Atomic-failure, exact-references, content, liveness: one call of one part raises, drawn by the seed."""
    for seed in seeds:
        drawn = random.Random(seed)
        fuse = Fuse(drawn.choice([*PARTS, "swap out", "swap in"]), drawn.randint(1, 20))
        try:
            run_through(wired(random_workload(seed), fuse))
        except Exception as error:
            error.add_note(f"in workload {seed}, {fuse}")
            raise


def test_after_an_error_a_request_can_still_be_cancelled() -> None:
    run = wired(WORKLOADS["swap, prefix caching"], Fuse("forward", 4))
    for now in range(4):
        try:
            run.advance(now)
        except Fault:
            break
    for name, _ in run.named_requests():
        run.engine.abort(name)
    assert {output.finished for output in ended(run.engine.step())} == {False}
    run.check_nothing_leaked()
