"""The real engine with a student's part in it: random workloads on the content oracle, and SmolLM2.

In a page there is neither NumPy nor SmolLM2; the workloads run there all the same, on a model in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from minipaged.contracts import BlockAllocator
from minipaged.course.grader.assignment import Bench, Failed, Failure
from minipaged.course.sandbox.contract import StudentError
from minipaged.engine.engine import Engine
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.errors import InvariantViolation
from minipaged.events import Event, StepFailed
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.scheduling import MakePolicy
from minipaged.testing.fake_model import FakeModel
from minipaged.testing.plain_model import PlainModel
from minipaged.testing.workloads import Workload, WorkloadRun, all_sound, random_workload

if TYPE_CHECKING:
    from minipaged.llm import LLM

PROMPTS = (
    "Paging is a way to",
    "Four score and seven years ago our fathers brought forth on this continent",
    "The capital of France is",
)
CROWDED: dict[str, Any] = {"block_size": 4, "num_blocks": 12, "num_swap_blocks": 12, "max_model_len": 64}
"""Of an LLM: a pool that is too small for all of `texts` at once."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made with in place of its own."""

    of_tier: Mapping[str, Any] = field(default_factory=dict)
    """`block_table`, `beam_search`."""
    allocator: Callable[[int], BlockAllocator] | None = None
    policy: MakePolicy = FirstComeFirstServed


MakeParts = Callable[[], Parts]
Attach = Callable[[Engine], object]
"""Tells the student's part in which engine it is."""
Explain = Callable[[Exception], Exception]
"""Says better what went wrong, where that can be said; or raises Failed."""


def numbered_workloads(seed: int) -> Iterator[tuple[int, Workload]]:
    """Sharing, copy-on-write, prefix caching, both ways of preempting, cancelled requests."""
    return ((number, random_workload(number)) for number in count(1000 * seed))


def crowded_workloads(seed: int) -> Iterator[tuple[int, Workload]]:
    """Those in which the engine's own scheduler preempts; how they come back is the scheduler's choice."""
    for number, workload in numbered_workloads(seed):
        crowded = replace(workload, config=replace(workload.config, preemption="auto"))
        run = WorkloadRun(crowded, model=PlainModel(), steady=False)
        run.to_the_end()
        if run.happened["preempted by swap"] + run.happened["preempted by recompute"]:
            yield number, crowded


def workloads_with_beams(seed: int) -> Iterator[tuple[int, Workload]]:
    """Those in which some request searches with several beams."""
    for number, workload in numbered_workloads(seed):
        if any(isinstance(one.params, BeamSearchParams) and one.params.beam_width > 1 for one in workload.requests):
            yield number, workload


def check_workloads(
    bench: Bench,
    workloads: Iterable[tuple[int, Workload]],
    make_parts: MakeParts,
    attach: Attach = lambda engine: None,
    explain: Explain = lambda error: error,
    model: FakeModel | None = None,
) -> None:
    """Every request ends, with the tokens that it has alone, and nothing is left behind. `model`: what chooses them, a
    PlainModel if none is named. Raises Failed."""
    model = model or PlainModel()
    for number, workload in workloads:
        bench.process.forget()
        events: list[Event] = []
        try:
            parts = make_parts()
            tier = replace(model.tier, **parts.of_tier)
            run = WorkloadRun(
                workload,
                tier,
                allocator=parts.allocator,
                policy=parts.policy,
                listeners=[events.append],
                steady=False,
                model=model,
            )
            attach(run.engine)
            run.to_the_end()
            run.check_outputs()
            run.check_nothing_leaked()
        except Exception as error:
            raise in_engine(explain(error), f"in the engine, workload {number}", events) from None


def check_texts(
    bench: Bench,
    make_parts: MakeParts,
    attach: Attach = lambda engine: None,
    explain: Explain = lambda error: error,
) -> None:
    """SmolLM2 writes with the student's part what it writes without. Raises Failed."""
    from minipaged.llm import LLM
    from minipaged.setup.loaded_model import LoadedModel

    loaded = LoadedModel.load(bench.model, "reference")
    expected = texts(LLM(loaded, **CROWDED), bench.seed)
    events: list[Event] = []
    bench.process.forget()
    try:
        parts = make_parts()
        own = replace(loaded, tier=replace(loaded.tier, **parts.of_tier))
        given = {"allocator": parts.allocator, "scheduling_policy": parts.policy, "listeners": [events.append]}
        llm = LLM(own, **CROWDED | given)
        attach(llm.engine)
        found = texts(llm, bench.seed)
    except Exception as error:
        raise in_engine(explain(error), "with SmolLM2", events) from None
    if found != expected:
        raise Failed(Failure(f"SmolLM2's tokens are {found!r}; they should be {expected!r}", events=tuple(events)))


def texts(llm: LLM, seed: int) -> list[list[tuple[int, ...]]]:
    """The tokens of parallel samples and of beams, of which some are preempted."""
    assert llm.tokenizer
    prompts = [llm.tokenizer.encode(prompt)[:15] for prompt in PROMPTS]
    sampled = llm.generate(prompts, SamplingParams(n=2, temperature=0.8, seed=seed, max_tokens=8))
    beams = llm.beam_search(prompts[::2], BeamSearchParams(beam_width=3, max_tokens=5))
    return [[tuple(one.token_ids) for one in output.outputs] for output in all_sound([*sampled, *beams])]


def in_engine(error: Exception, where: str, events: list[Event]) -> Failed:
    """What went wrong while an engine used the part, with the engine's events up to there."""
    if isinstance(error, Failed):
        failure = error.failure
    else:
        invariant = error.invariant if isinstance(error, InvariantViolation) else None
        known = isinstance(error, InvariantViolation | StudentError | AssertionError)
        failure = Failure(str(error) if known else f"{type(error).__name__}: {error}", invariant)
    message = f"{where}: {failure.message}"
    if events and isinstance(events[-1], StepFailed):
        events[-1] = replace(events[-1], error=message)
    else:
        events.append(StepFailed(0, message, ()))
    return Failed(replace(failure, message=message, events=tuple(events)))
