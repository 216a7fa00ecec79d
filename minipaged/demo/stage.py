"""Where the scenes are played: one loaded model, and for each run an engine of its own on top of it.

The weights are loaded once. What differs from run to run is small: the block size, the pool, the way of preempting;
so each run builds a new engine with an empty pool, feeds it requests as they arrive, and steps it to the end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minipaged.contracts import BlockAllocator
from minipaged.demo.measures import Measures, measure
from minipaged.demo.memory_map import MemoryMap
from minipaged.demo.story import Story, Topic
from minipaged.engine.engine import Engine
from minipaged.errors import InvalidRequest, ModelError
from minipaged.outputs import RequestOutput
from minipaged.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from minipaged.llm import LoadedModel
    from minipaged.models.tokenizer import Tokenizer

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
class Run:
    """What came of one run of the engine."""

    outputs: list[RequestOutput]
    """In order of arrival."""
    story: list[str]
    memory: MemoryMap
    measures: Measures


@dataclass(frozen=True, slots=True)
class Stage:
    """The model, and what the user chose for every scene (None: the scene's own)."""

    model: LoadedModel
    seed: int = 0
    block_size: int | None = None
    num_blocks: int | None = None
    allocator: Callable[[int], BlockAllocator] | None = None

    @property
    def max_model_len(self) -> int:
        return min(MAX_MODEL_LEN, self.model.config.max_position_embeddings)

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
        **options: Any,
    ) -> Run:
        """Serve the arrivals (in order of their steps) with an engine of these sizes. `options`: those of LLM."""
        from minipaged.llm import LLM

        story = Story(topics)
        llm = LLM(
            self.model,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=self.max_model_len,
            allocator=self.allocator,
            async_scheduling=False,  # the story is told step by step
            listeners=[story.on_event],
            **options,
        )
        started = time.perf_counter()
        outputs = serve(llm.engine, arrivals)
        seconds = time.perf_counter() - started
        slot_bytes = self.model.block_bytes(1)
        measures = measure(name, llm.stats(), slot_bytes, story.most_sequences, seconds)
        return Run(outputs, story.lines(), story.memory, measures)

    # --- Sizes ------------------------------------------------------------------------------------

    def block_size_or(self, own: int) -> int:
        """The user's block size, or else the scene's own."""
        if self.block_size is not None and self.block_size < 1:
            raise InvalidRequest(f"block_size is {self.block_size}; it must be between 1 and 256")
        return own if self.block_size is None else self.block_size

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


def serve(engine: Engine, arrivals: Iterable[Arrival]) -> list[RequestOutput]:
    """Add each request when its step has come, and step the engine until all have ended (continuous batching)."""
    coming, ids = deque(arrivals), list[str]()
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while coming or engine.has_unfinished_requests():
        while coming and coming[0].step <= step:
            arrival = coming.popleft()
            ids.append(engine.add_request(arrival.prompt, arrival.params))
        outputs |= {output.request_id: output for output in engine.step()}
        step += 1
    return [outputs[request_id] for request_id in ids]
