"""Figs. 4 to 10: the paper's small examples as recorded runs of the engine, and pictures drawn from their events.

A run's words come from a model without weights that knows them by heart; the scheduler, the block tables, reference
counts and copies are the engine's own. What is kept of a run is its recording, and what was sent to the model; whoever
draws or judges folds the events again (`replay/`) and asks the engine nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minipaged.contracts import Batch, StepResult
from minipaged.events import Event, StepFinished, StepStarted, TokensComputed, from_json
from minipaged.mirror import Mirror
from minipaged.paper.figure import Blocks, Box, Entry, Table
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.replay.state import LiveSequence, State
from minipaged.stepper import Storyteller, record
from minipaged.steps import StepInput
from minipaged.tiers import reference_tier

WORKERS = 2
"""Besides the model itself, so many follow the steps (Fig. 4)."""


@dataclass
class Teller(Storyteller):
    """A storyteller that has odds for words, and workers that are sent each step, as data."""

    odds: Mapping[str, float] = field(default_factory=dict)
    """Of words that compete; those not named have 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.workers = [Mirror() for _ in range(WORKERS)]
        self.sent: list[Sent] = []

    def run(self, step: StepInput) -> StepResult:
        """Nothing but the step goes to a worker."""
        for worker in self.workers:
            worker.apply(step)
        self.sent.append(Sent(step.number, [self._seen(worker) for worker in self.workers]))
        result = super().run(step)
        for worker in self.workers:
            worker.chosen(result.choices)
        return result

    def _seen(self, worker: Mirror) -> Seen:
        return Seen(
            [self.decode(row.token_ids) for row in worker.batch()],
            {str(number): list(sequence.blocks) for number, sequence in worker.sequences.items()},
        )

    def forward(self, batch: Batch) -> Any:
        """Logits [rows that want them, words]: the logarithms of the odds of what may follow."""
        logits = super().forward(batch)
        odds = np.log([self.odds.get(word, 1) for word in self.words]).astype(np.float32)  # [words]
        return np.where(logits == 0, odds, -np.inf).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a worker knows of a step."""

    queries: list[str]
    """Of each row of the batch the tokens to run."""
    tables: dict[str, list[int]]
    """Of each sequence its block table."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One step."""

    step: int
    seen: list[Seen]
    """By each worker."""


@dataclass(frozen=True, slots=True)
class TaleRequest:
    """A request of a run."""

    prompt: str
    tokens: int
    """To be generated."""
    after: int = 0
    """Steps before it arrives."""
    samples: int = 1
    beams: int = 0
    """0: no beam search."""


@dataclass(frozen=True, slots=True)
class Tale:
    """One run of the reference engine, recorded."""

    title: str
    texts: tuple[str, ...]
    """What the model knows; a prompt is the beginning of one."""
    requests: tuple[TaleRequest, ...]
    num_blocks: int = 9
    block_size: int = 4
    first_blocks: tuple[int, ...] = ()
    """Those that the pool, which is not new, hands out first."""
    odds: tuple[tuple[str, float], ...] = ()
    prefix_caching: bool = False
    seed: int = 0

    def run(self) -> Recorded:
        """The same recording for the same seed: what a step took is left out."""
        model = Teller(self.texts, odds=dict(self.odds))
        with record(self.title, model.decode) as run:
            engine = model.engine(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                allocator=handing_out(self.first_blocks),
                enable_prefix_caching=self.prefix_caching,
            )
            last, step = max(asked.after for asked in self.requests), 0
            while step <= last or engine.has_unfinished_requests():
                for i, asked in enumerate(self.requests):
                    if asked.after == step:
                        tokens = model.encode(asked.prompt)
                        engine.add_request(tokens, self._params(asked), request_id=str(i))
                engine.step()
                step += 1
        run.events = [replace(event, seconds=0.0) if isinstance(event, StepFinished) else event for event in run.events]
        return Recorded(json.loads(json.dumps(run.data())), model.sent)

    def _params(self, asked: TaleRequest) -> SamplingParams | BeamSearchParams:
        if asked.beams:
            return BeamSearchParams(beam_width=asked.beams, max_tokens=asked.tokens)
        return SamplingParams(
            n=asked.samples, max_tokens=asked.tokens, temperature=float(asked.samples > 1), seed=self.seed
        )


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is kept of a run."""

    recording: dict[str, Any]
    """As the stepper takes it (`stepper/page.py`)."""
    sent: list[Sent]


def handing_out(first: Sequence[int]) -> Callable[[int], Any]:
    """An allocator whose blocks have all been used before, and given back so that these come first (the reference's
    hands out first what came back last)."""

    def make(num_blocks: int) -> Any:
        allocator = reference_tier().block_allocator(num_blocks)
        blocks = [allocator.allocate() for _ in range(num_blocks)]
        for block in [*(block for block in reversed(blocks) if block not in first), *reversed(first)]:
            if block < num_blocks:  # the pool on the host is one more, and smaller
                allocator.free(block)
        return allocator

    return make


class RetoldRun:
    """A run, followed from its events."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.recording: dict[str, Any] = result["recording"]
        self.sent: list[Mapping[str, Any]] = result["sent"]
        self.words: Mapping[str, str] = self.recording["words"]
        self.events: list[Event] = [from_json(json.dumps(event)) for event in self.recording["events"]]

    def until(self, last: Callable[[Event], bool], count: int = 1, *, before: bool = False) -> State:
        """What there was right after (or `before`) the `count`-th event for which `last` holds."""
        state = State()
        for event in self.events:
            count -= last(event)
            if count == 0 and before:
                return state
            state.apply(event)
            if count == 0:
                return state
        raise ValueError(f"the run {self.recording['title']!r} has no such moment")

    def after_step(self, number: int) -> State:
        """What there was when so many steps had finished."""
        return self.until(lambda event: isinstance(event, StepFinished), number)

    def computed_in(self, step: int) -> State:
        """What there was when all of a step had been given slots, and nothing had been chosen yet."""
        events = [event for event in self.events if isinstance(event, StepStarted | TokensComputed)]
        starts = [i for i, event in enumerate(events) if isinstance(event, StepStarted)] + [len(events)]
        return self.until(lambda event: isinstance(event, TokensComputed), starts[step] - step)

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def words_in(self, state: State, block: int) -> list[str]:
        """Of one block, as far as it is filled."""
        tokens: Iterable[int] = state.cached.get(block, ())
        for number in state.device.holders.get(block, ()):
            sequence = state.sequences[number]
            tokens = sequence.tokens_in(sequence.table.index(block), state.block_size)
        return [self.words[str(token)] for token in tokens]

    def picture(self, title: str, state: State, *, marked: Iterable[int] = (), said: Mapping[int, str] = {}) -> Blocks:
        """All block tables and the pool at one moment. `marked`: blocks to be seen first; `said`: a word on some."""
        return Blocks(
            title,
            state.block_size,
            [
                Table(f"sequence {sequence.letter}", entries(sequence, state.block_size))
                for sequence in state.sequences.values()
                if sequence.table
            ],
            [
                Box(block, self.words_in(state, block), state.ref_count(block), block in marked, said.get(block, ""))
                for block in range(state.device.num_blocks)
            ],
        )


def entries(sequence: LiveSequence, block_size: int) -> list[Entry]:
    """Of a sequence's block table."""
    return [
        Entry(block, min(block_size, sequence.num_computed - logical * block_size))
        for logical, block in enumerate(sequence.table)
    ]
