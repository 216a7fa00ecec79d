"""Where the scenes are played: one loaded model, and for each run an engine of its own on top of it.

The weights are loaded once. What differs from run to run is small: the block size, the pool, the way of preempting;
so each run builds a new engine with an empty pool, feeds it requests as they arrive, and steps it to the end. Where
there is a player, it decides when the next step is due.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minipaged.contracts import BlockAllocator, Runner
from minipaged.demo.measures import Measures, measure
from minipaged.demo.player import Player
from minipaged.demo.ticker import story
from minipaged.engine.engine import Engine
from minipaged.errors import ModelError
from minipaged.events import Event, Listener
from minipaged.handover.kv_connector import KVConnector
from minipaged.outputs import RequestOutput
from minipaged.params import BeamSearchParams, KVCacheDtype, RequestOutputKind, SamplingParams
from minipaged.replay.state import State
from minipaged.replay.teller import Topic
from minipaged.replay.timeline import Timeline
from minipaged.setup.settings import Settings

if TYPE_CHECKING:
    from minipaged.llm import LLM
    from minipaged.models.tokenizer import Tokenizer
    from minipaged.setup.loaded_model import LoadedModel

MAX_MODEL_LEN = 1024
"""Tokens that a sequence may have, and that a contiguous cache has to reserve for it: half of what the paper's had."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the step before which it arrives."""

    shown: str
    """The prompt as the reader sees it: without the chat template around it."""
    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    step: int = 0


@dataclass(frozen=True, slots=True)
class DemoRun:
    """What came of one run of the engine."""

    outputs: list[RequestOutput]
    """In order of arrival."""
    story: list[str]
    events: list[Event]
    state: State
    """After the last event."""
    measures: Measures
    runner: Runner
    """With its KV cache, as the run has left it."""


class DemoServing:
    """An engine and the requests that are to arrive: served one step at a time (continuous batching).

    `max_steps`: cancel what is unfinished after so many.
    """

    def __init__(self, engine: Engine, arrivals: Iterable[Arrival], max_steps: int | None = None) -> None:
        self.questions: dict[str, str] = {}
        """The prompts of those that have arrived, as a reader wants them."""
        self.seconds = 0.0
        """That the engine has taken."""
        self._engine = engine
        self._coming = deque(arrivals)
        self._max_steps = max_steps
        self._step = 0
        self._outputs: dict[str, RequestOutput] = {}

    @property
    def outputs(self) -> list[RequestOutput]:
        """Of the requests that have ended, in order of arrival."""
        return [self._outputs[name] for name in self.questions if name in self._outputs]

    def advance(self) -> bool:
        """Add each request whose step has come, then run one step; False when there is nothing left to do."""
        if self._step == self._max_steps:
            self._coming.clear()
            for name in self._engine.unfinished_requests:
                self._engine.abort(name)
        if not self._coming and not self._engine.has_unfinished_requests():
            return False
        started = time.perf_counter()
        while self._coming and self._coming[0].step <= self._step:
            arrival = self._coming.popleft()
            name = self._engine.add_request(arrival.prompt, arrival.params, output_kind=RequestOutputKind.FINAL_ONLY)
            self.questions[name] = arrival.shown
        self._outputs |= {update.request_id: update.output for update in self._engine.step() if update.output}
        self._step += 1
        self.seconds += time.perf_counter() - started
        return True


class HandedOver(DemoServing):
    """Requests whose prompts another engine computes first: each goes on here when it is done there."""

    def __init__(
        self, engine: Engine, arrivals: Sequence[Arrival], prefilling: DemoServing, max_steps: int | None
    ) -> None:
        super().__init__(engine, (), max_steps)
        self._arrivals = arrivals
        self._prefilling = prefilling
        self._passed: set[str] = set()

    def advance(self) -> bool:
        """A step of either engine."""
        goes_on = self._prefilling.advance()
        names = list(self._prefilling.questions)
        for output in self._prefilling.outputs:
            if output.request_id not in self._passed and output.finished:
                self._passed.add(output.request_id)
                self._coming.append(replace(self._arrivals[names.index(output.request_id)], step=0))
        return super().advance() or goes_on


@dataclass(frozen=True, slots=True)
class Stage:
    """The model, and what the user chose for every scene (None: the scene's own)."""

    model: LoadedModel
    seed: int = 0
    block_size: int | None = None
    num_blocks: int | None = None
    allocator: Callable[[int], BlockAllocator] | None = None
    max_steps: int | None = None
    prompts: tuple[str, ...] = ()
    """The user's own."""
    player: Player | None = None
    """Shows the runs; None: they are run without being watched."""
    kv_cache_dtype: KVCacheDtype = "auto"
    tensor_parallel_size: int = 1

    @property
    def max_model_len(self) -> int:
        return min(MAX_MODEL_LEN, self.model.config.context_length)

    @property
    def bytes_per_token(self) -> int:
        """That its keys and values take."""
        return self.model.block_bytes(1, self.kv_cache_dtype, self.tensor_parallel_size)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.model.tokenizer is None:
            raise ModelError(f"{self.model.folder} holds no tokenizer.json, and the demo shows text; put it there")
        return self.model.tokenizer

    def run(
        self,
        name: str,
        arrivals: Iterable[Arrival],
        topics: Mapping[Topic, int],
        *,
        block_size: int,
        num_blocks: int,
        shown_as: str = "",
        paced: bool = True,
        ranks: Sequence[str] = (),
        **options: Any,
    ) -> DemoRun:
        """Serve the arrivals (in order of their steps) with an engine of these sizes. `options`: those of LLM.

        `topics`: what to tell of it in lines, and how often at most. `shown_as`: its name
        on the screen, where a scene has several. `paced`: whether it is to be watched slowly. `ranks`: a pool is drawn
        for each of these.
        """
        timeline, events = Timeline(), list[Event]()
        llm = self._llm([events.append, timeline.append], block_size=block_size, num_blocks=num_blocks, **options)
        serving = DemoServing(llm.engine, arrivals, self.max_steps)
        if self.player:
            self.player.play(
                timeline, serving.advance, run=shown_as, questions=serving.questions, paced=paced, ranks=ranks
            )
        while serving.advance():
            pass
        return self._run_of(name, llm, serving, events, topics)

    def run_disaggregated(
        self,
        arrivals: Sequence[Arrival],
        topics: Mapping[Topic, int],
        connectors: tuple[KVConnector, KVConnector],
        **options: Any,
    ) -> tuple[DemoRun, DemoRun]:
        """Two engines, with a connector each: one computes the prompts, and chooses one token each; the other has them
        when that is done, and goes on. Both pools are drawn; the time that is shown is the second one's."""
        names = ("prefilling", "decoding")
        timeline, before = Timeline(), State()
        first, second = list[Event](), list[Event]()
        one = self._llm([first.append, before.apply], kv_connector=connectors[0], **options)
        other = self._llm([second.append, timeline.append], kv_connector=connectors[1], **options)
        prompts = [replace(arrival, params=SamplingParams(max_tokens=1)) for arrival in arrivals]
        prefilling = DemoServing(one.engine, prompts, self.max_steps)
        decoding = HandedOver(other.engine, arrivals, prefilling, self.max_steps)
        if self.player:
            shown = ("prefilling engine", "decoding engine")
            self.player.play(timeline, decoding.advance, questions=decoding.questions, ranks=shown, beside=before)
        while decoding.advance():
            pass
        return (
            self._run_of(names[0], one, prefilling, first, topics),
            self._run_of(names[1], other, decoding, second, topics),
        )

    def _llm(self, listeners: Sequence[Listener], **options: Any) -> LLM:
        from minipaged.llm import LLM

        return LLM(
            self.model,
            kv_cache_dtype=self.kv_cache_dtype,
            tensor_parallel_size=self.tensor_parallel_size,
            max_model_len=self.max_model_len,
            allocator=self.allocator,
            async_scheduling=False,  # the story is told step by step
            listeners=listeners,
            **options,
        )

    def _run_of(
        self, name: str, llm: LLM, serving: DemoServing, events: list[Event], topics: Mapping[Topic, int]
    ) -> DemoRun:
        """What came of it."""
        state = State()
        for event in events:
            state.apply(event)
        measures = measure(name, llm.stats(), self.bytes_per_token, state.most_sequences, serving.seconds)
        return DemoRun(serving.outputs, story(events, topics), events, state, measures, llm.engine.runner)

    def played_by(self, player: Player | None) -> Stage:
        """The same stage, watched by that player."""
        return replace(self, player=player)

    def in_one_process(self, tensor_parallel_size: int) -> Stage:
        """The same stage with so many ranks on the reference tier: all in one process, where they can be looked at."""
        from minipaged.setup.loaded_model import LoadedModel

        model = self.model
        if model.tier.name != "reference":
            model = LoadedModel.load(model.folder, "reference", dtype="float32")
        return replace(self, model=model, tensor_parallel_size=tensor_parallel_size)

    def warm_up(self) -> None:
        """Compile whatever the tier compiles, which may take a while and be told on stderr."""
        from minipaged.llm import LLM

        LLM(
            self.model,
            num_blocks=8,
            block_size=16,
            num_swap_blocks=0,
            kv_cache_dtype=self.kv_cache_dtype,
            tensor_parallel_size=self.tensor_parallel_size,
        )

    # --- Sizes ------------------------------------------------------------------------------------

    def block_size_or(self, own: int) -> int:
        """The user's block size, or else the scene's own."""
        return own if self.block_size is None else Settings(block_size=self.block_size).block_size

    def blocks_of(self, slots: int, block_size: int) -> int:
        """The user's number of blocks, or else as many as hold `slots` tokens."""
        if self.num_blocks is not None:
            return self.num_blocks
        return -(-slots // block_size)  # rounded up

    # --- Prompts ----------------------------------------------------------------------------------

    def complete(self, text: str, params: SamplingParams | BeamSearchParams, step: int = 0) -> Arrival:
        """A text to go on with."""
        return Arrival(text, self._fit(self.tokenizer.encode(text)), params, step)

    def ask(
        self, question: str, params: SamplingParams | BeamSearchParams, step: int = 0, system: str | None = None
    ) -> Arrival:
        """A question to answer, in the model's chat format where it has one."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        try:
            prompt = self.tokenizer.encode_chat(messages)
        except ModelError:  # no chat template
            prompt = self.tokenizer.encode("\n".join(message["content"] for message in messages))
        return Arrival(question, self._fit(prompt), params, step)

    def tokens(self, wanted: int) -> int:
        """Tokens to generate: as many as wanted, or half of what a small model can take."""
        return min(wanted, self.max_model_len // 2)

    def _fit(self, prompt: list[int]) -> list[int]:
        return prompt[: self.max_model_len // 2]
