"""Run the scenes on one loaded model, with a separate engine for each run.

The weights are loaded once. Runs differ in the block size, the pool and the way of preemption. Therefore each run
builds a new engine with an empty pool, adds the requests as they arrive, and steps the engine to the end. If there is a
player, it decides when the next step is due.
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
"""The most tokens of a sequence, which a contiguous cache must reserve for each. It is half of the paper's number."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and the step before which it arrives."""

    shown: str
    """The prompt to display, without the chat template around it."""
    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    step: int = 0


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The results of one run of the engine."""

    outputs: list[RequestOutput]
    """The outputs, in the order in which the requests arrived."""
    story: list[str]
    events: list[Event]
    state: State
    """The state after the last event."""
    measures: Measures
    runner: Runner
    """The engine's runner, with the KV cache as the run left it."""


class DemoServing:
    """An engine with requests to serve, one step at a time (continuous batching).

    `max_steps`: cancel unfinished requests after this number of steps.
    """

    def __init__(self, engine: Engine, arrivals: Iterable[Arrival], max_steps: int | None = None) -> None:
        self.questions: dict[str, str] = {}
        """The prompts to display for requests that have arrived, by request id."""
        self.seconds = 0.0
        """Seconds that the engine has run."""
        self._engine = engine
        self._coming = deque(arrivals)
        self._max_steps = max_steps
        self._step = 0
        self._outputs: dict[str, RequestOutput] = {}

    @property
    def outputs(self) -> list[RequestOutput]:
        """The outputs of the finished requests, in order of arrival."""
        return [self._outputs[name] for name in self.questions if name in self._outputs]

    def advance(self) -> bool:
        """Add the requests that arrive now, then run one step. Returns False if there was nothing left to do."""
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
    """An engine that continues requests after another engine has computed their prompts."""

    def __init__(
        self, engine: Engine, arrivals: Sequence[Arrival], prefilling: DemoServing, max_steps: int | None
    ) -> None:
        super().__init__(engine, (), max_steps)
        self._arrivals = arrivals
        self._prefilling = prefilling
        self._passed: set[str] = set()

    def advance(self) -> bool:
        """Run a step of both engines. Returns False if neither had anything left to do."""
        goes_on = self._prefilling.advance()
        names = list(self._prefilling.questions)
        for output in self._prefilling.outputs:
            if output.request_id not in self._passed and output.finished:
                self._passed.add(output.request_id)
                self._coming.append(replace(self._arrivals[names.index(output.request_id)], step=0))
        return super().advance() or goes_on


@dataclass(frozen=True, slots=True)
class Stage:
    """The model, and the user's settings for all scenes (None: each scene's own setting)."""

    model: LoadedModel
    seed: int = 0
    block_size: int | None = None
    num_blocks: int | None = None
    allocator: Callable[[int], BlockAllocator] | None = None
    max_steps: int | None = None
    prompts: tuple[str, ...] = ()
    """The user's own prompts."""
    player: Player | None = None
    """The player that shows the runs. None: they run without being shown."""
    kv_cache_dtype: KVCacheDtype = "auto"
    tensor_parallel_size: int = 1

    @property
    def max_model_len(self) -> int:
        return min(MAX_MODEL_LEN, self.model.config.max_position_embeddings)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of one token's keys and values in all groups of layers."""
        return len(self._served.config.groups.windows) * self.bytes_per_slot

    @property
    def bytes_per_slot(self) -> int:
        """The bytes of one token's keys and values, in the layers of one group."""
        return self._served.block_bytes(1, self.kv_cache_dtype, self.tensor_parallel_size)

    @property
    def _served(self) -> LoadedModel:
        """The model with the groups of layers that it has for such texts."""
        return replace(self.model, config=self.model.config.up_to(self.max_model_len))

    @property
    def tokenizer(self) -> Tokenizer:
        if self.model.tokenizer is None:
            raise ModelError(f"{self.model.folder} holds no tokenizer.json, which the demo needs; put it there")
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
        """Serve the arrivals (in order of their steps) with an engine of these sizes. `options` go to LLM.

        `topics`: the topics of the story, each with its largest number of lines. `shown_as`: the run's name on the
        screen, if the scene has several runs. `paced`: whether to play it at the pace of a viewer. `ranks`: labels of
        ranks; a pool is drawn for each.
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
        """Serve the arrivals with two engines, each with one of the connectors.

        The first engine computes the prompts and chooses one token for each. The second engine then continues the
        requests. Both pools are drawn; the time shown is that of the second engine.
        """
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
            async_scheduling=False,  # the story describes one step after another
            listeners=listeners,
            **options,
        )

    def _run_of(
        self, name: str, llm: LLM, serving: DemoServing, events: list[Event], topics: Mapping[Topic, int]
    ) -> DemoRun:
        """The results of a finished run."""
        state = State()
        for event in events:
            state.apply(event)
        groups = len(state.group_windows)
        measures = measure(name, llm.stats(), self.bytes_per_slot, state.most_sequences, serving.seconds, groups)
        return DemoRun(serving.outputs, story(events, topics), events, state, measures, llm.engine.runner)

    def played_by(self, player: Player | None) -> Stage:
        """A copy of the stage with this player."""
        return replace(self, player=player)

    def in_one_process(self, tensor_parallel_size: int) -> Stage:
        """A copy of the stage with this number of ranks on the reference tier, all in this process, where their caches
        can be read."""
        from minipaged.setup.loaded_model import LoadedModel

        model = self.model
        if model.tier.name != "reference":
            model = LoadedModel.load(model.folder, "reference", dtype="float32")
        return replace(self, model=model, tensor_parallel_size=tensor_parallel_size)

    def with_windows(self, windows: Sequence[int | None], *, in_groups: bool) -> Stage:
        """A copy of the stage whose model's layers see these windows, in tokens (None: everything). Unless they are
        `in_groups`, all layers share one block table, which keeps all blocks."""
        config = replace(self.model.config, layer_windows=tuple(windows))
        return replace(self, model=replace(self.model, config=config if in_groups else config.in_one_group()))

    def warm_up(self) -> None:
        """Compile the tier's kernels, which may take a while and print messages on stderr."""
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
        """The user's block size, or the scene's own if there is none."""
        return own if self.block_size is None else Settings(block_size=self.block_size).block_size

    def blocks_of(self, slots: int, block_size: int) -> int:
        """The user's number of blocks, or the number that holds `slots` tokens."""
        if self.num_blocks is not None:
            return self.num_blocks
        return -(-slots // block_size)  # rounded up

    # --- Prompts ----------------------------------------------------------------------------------

    def complete(self, text: str, params: SamplingParams | BeamSearchParams, step: int = 0) -> Arrival:
        """An arrival with a text to be continued."""
        return Arrival(text, self._fit(self.tokenizer.encode(text)), params, step)

    def ask(
        self, question: str, params: SamplingParams | BeamSearchParams, step: int = 0, system: str | None = None
    ) -> Arrival:
        """An arrival with a question to be answered, in the model's chat format if it has one."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        try:
            prompt = self.tokenizer.encode_chat(messages)
        except ModelError:  # no chat template
            prompt = self.tokenizer.encode("\n".join(message["content"] for message in messages))
        return Arrival(question, self._fit(prompt), params, step)

    def tokens(self, wanted: int) -> int:
        """The number of tokens to generate: `wanted`, but at most half of max_model_len."""
        return min(wanted, self.max_model_len // 2)

    def _fit(self, prompt: list[int]) -> list[int]:
        return prompt[: self.max_model_len // 2]
