"""Figs. 4 to 10: the paper's small examples as recorded runs of the engine, and pictures drawn from their events.

The words of a run come from a model without weights that recites given texts. The scheduler, block tables, reference
counts and copies are the engine's own. A run's result is its recording and the steps sent to the workers. Pictures and
checks are made by replaying the events (`replay/`), without the engine.
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
"""The number of workers that follow the steps in addition to the model (Fig. 4)."""


@dataclass
class Teller(Storyteller):
    """A storyteller with odds for words, and with workers that receive each step as data."""

    odds: Mapping[str, float] = field(default_factory=dict)
    """The odds of a word among the words that may come next. Words that are not named have odds of 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.workers = [Mirror() for _ in range(WORKERS)]
        self.sent: list[Sent] = []

    def run(self, step: StepInput) -> StepResult:
        """Send the step to each worker, and run it. The workers receive nothing else but the choices."""
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
        """Return logits [rows that need logits, words]: the logarithm of the odds of each word that may come next."""
        logits = super().forward(batch)
        odds = np.log([self.odds.get(word, 1) for word in self.words]).astype(np.float32)  # [words]
        return np.where(logits == 0, odds, -np.inf).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's view of a step."""

    queries: list[str]
    """The tokens to run, as text, for each row of the batch."""
    tables: dict[str, list[int]]
    """The block table of each sequence."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One step, as the workers received it."""

    step: int
    """The step's number."""
    seen: list[Seen]
    """The view of each worker."""


@dataclass(frozen=True, slots=True)
class TaleRequest:
    """A request of a run."""

    prompt: str
    tokens: int
    """The number of tokens to generate."""
    after: int = 0
    """The number of steps before it arrives."""
    samples: int = 1
    beams: int = 0
    """The beam width, or 0 for no beam search."""


@dataclass(frozen=True, slots=True)
class Tale:
    """A job: one recorded run of the reference engine."""

    title: str
    texts: tuple[str, ...]
    """The texts that the model can recite. A prompt is the beginning of one of them."""
    requests: tuple[TaleRequest, ...]
    num_blocks: int = 9
    block_size: int = 4
    first_blocks: tuple[int, ...] = ()
    """The blocks that the pool hands out first. The pool is not new: all its blocks were used before."""
    odds: tuple[tuple[str, float], ...] = ()
    prefix_caching: bool = False
    seed: int = 0

    def run(self) -> Recorded:
        """Run it. Durations are left out, so that the same seed gives the same recording."""
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
    """The result of a run."""

    recording: dict[str, Any]
    """The recording in the stepper's format (`stepper/page.py`)."""
    sent: list[Sent]
    """The steps that the workers received."""


def handing_out(first: Sequence[int]) -> Callable[[int], Any]:
    """Return a function that makes an allocator. The allocator hands out the blocks in `first` before all others.

    The function allocates all blocks once, and frees the blocks in `first` last. The reference allocator reuses the
    most recently freed block first."""

    def make(num_blocks: int) -> Any:
        allocator = reference_tier().block_allocator(num_blocks)
        blocks = [allocator.allocate() for _ in range(num_blocks)]
        for block in [*(block for block in reversed(blocks) if block not in first), *reversed(first)]:
            if block < num_blocks:  # the host's pool is made here too, and is smaller
                allocator.free(block)
        return allocator

    return make


class RetoldRun:
    """A recorded run, replayed from its events."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.recording: dict[str, Any] = result["recording"]
        self.sent: list[Mapping[str, Any]] = result["sent"]
        self.words: Mapping[str, str] = self.recording["words"]
        self.events: list[Event] = [from_json(json.dumps(event)) for event in self.recording["events"]]

    def until(self, last: Callable[[Event], bool], count: int = 1, *, before: bool = False) -> State:
        """Return the state right after (or `before`) the `count`-th event for which `last` is true. Raises ValueError
        if the run has fewer such events."""
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
        """Return the state when `number` steps had finished."""
        return self.until(lambda event: isinstance(event, StepFinished), number)

    def computed_in(self, step: int) -> State:
        """Return the state when all rows of a step had their slots, and no token had been chosen yet."""
        events = [event for event in self.events if isinstance(event, StepStarted | TokensComputed)]
        starts = [i for i, event in enumerate(events) if isinstance(event, StepStarted)] + [len(events)]
        return self.until(lambda event: isinstance(event, TokensComputed), starts[step] - step)

    def of(self, kind: type[Any]) -> list[Any]:
        """Return all events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def words_in(self, state: State, block: int) -> list[str]:
        """Return the words in the filled slots of a block."""
        tokens: Iterable[int] = state.cached.get(block, ())
        for number in state.device.holders.get(block, ()):
            sequence = state.sequences[number]
            tokens = sequence.tokens_in(sequence.table.index(block), state.block_size)
        return [self.words[str(token)] for token in tokens]

    def picture(self, title: str, state: State, *, marked: Iterable[int] = (), said: Mapping[int, str] = {}) -> Blocks:
        """Return a picture of all block tables and the pool in one state. `marked` blocks are highlighted. `said` maps
        blocks to labels."""
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
    """Return the entries of a sequence's block table."""
    return [
        Entry(block, min(block_size, sequence.num_computed - logical * block_size))
        for logical, block in enumerate(sequence.table)
    ]
