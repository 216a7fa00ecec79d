"""The offline API: it takes prompts and returns outputs. A thin loop around the engine's steps.

llm = LLM("smollm2-135m-instruct")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Unpack

from minipaged import tiers
from minipaged.api.prompts import Prompt, as_list, read_prompt, salt_of
from minipaged.api.vllm_arguments import (
    BEAM_SEARCH_ARGUMENTS,
    CHAT_ARGUMENTS,
    GENERATE_ARGUMENTS,
    LLM_ARGUMENTS,
    take_own,
)
from minipaged.contracts import Runner
from minipaged.engine.connected_memory import ConnectedBlockManager
from minipaged.engine.drafts import drafts_of
from minipaged.engine.engine import Engine
from minipaged.engine.floors import Disk, FlooredBlockManager, paged_memory
from minipaged.engine.memory import MakeMemory
from minipaged.engine.stats import Stats
from minipaged.errors import InvalidRequest, InvariantViolation, ModelError
from minipaged.events import Event, Listener, RequestFinished, TokenGenerated
from minipaged.models.grammars import GrammarCompiler
from minipaged.models.tokenizer import ChatOptions, Message, Tokenizer, Tool
from minipaged.outputs import RequestOutput, RequestUpdate
from minipaged.params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)
from minipaged.scheduling import MakePolicy
from minipaged.setup.loaded_model import LoadedModel, check_for_model, disk_floor, handshake, policy_named
from minipaged.setup.settings import GivenSettings, Settings, takes_settings
from minipaged.setup.sizes import engine_config

if TYPE_CHECKING:
    from minipaged.models.tokenizer import PreTrainedTokenizerFast

__all__ = ["LLM", "LoadedModel", "Params", "interrupt_between_steps"]

Params = SamplingParams | BeamSearchParams

FROZEN_BY_SOMEBODY = 10_000
"""Threshold: if more objects are frozen, the program itself has called `gc.freeze`. (Python 3.12 freezes some hundred.)
"""


class LLM:
    """A model that is loaded and ready to serve.

    `model` is a known name, a local folder, a .gguf file or a hub id; `settings` are those of `Settings`, by name.
    `listeners` receive every event. Raises ModelError for a model that cannot be found, fetched or run, and
    InvalidRequest (a ValueError) for a setting out of range. Other arguments of vLLM's `LLM` are accepted if they ask
    for minipaged's own behaviour, and raise an error with the reason if not (docs/vllm.md).

    Several LLMs can share one `LoadedModel`, each with its own sizes, policies and KV cache: give it as `model`
    (`LLM(llm.loaded, num_blocks=8)`). Its `tier`, `device` and `dtype` cannot be changed. It has the draft model, too,
    if there is one.

    `host_sharers` is the number of engines, in separate processes, that share this machine's memory. Pool sizes that
    are left open are computed from this engine's share of the free memory. (Memory is taken page by page at first use,
    so engines that start together would each see all of it as free.) Raises InvalidRequest if it is less than 1.
    """

    @takes_settings
    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2-135m-instruct",
        *,
        listeners: Sequence[Listener] = (),
        host_sharers: int = 1,
        **settings: Unpack[GivenSettings],
    ) -> None:
        if host_sharers < 1:
            raise InvalidRequest(f"host_sharers is {host_sharers}; it must be 1 or more, this engine included")
        own = [each.name for each in fields(Settings)]
        asked = Settings(**take_own("LLM()", settings, LLM_ARGUMENTS, own))
        policy = policy_named(asked.scheduling_policy)  # raises its errors before anything is loaded
        if isinstance(model, LoadedModel):
            asked = model.settled(asked)
            loaded = model
            check_for_model(asked, model.folder, model.config, model.tier)
        else:
            where = (asked.tier, asked.device, asked.dtype)
            sizes = (asked.tensor_parallel_size, asked.pipeline_parallel_size)
            check = partial(check_for_model, asked)
            loaded = LoadedModel.load(model, *where, *sizes, asked.worker_timeout, asked.max_model_len, check)
        try:
            self._begin(loaded.with_draft_model(asked), asked, policy, listeners, host_sharers)
        except BaseException:
            if loaded is not model:  # it is used nowhere else, and it may have worker processes
                loaded.close()
            raise
        # Python's garbage collector traverses all objects again and again: hundreds of thousands, nearly all of which
        # stay alive. In a step of 1,024 sequences that takes a third of the host's time. So the present objects are
        # frozen while this LLM lives, unless the program has already frozen its objects.
        if gc.get_freeze_count() < FROZEN_BY_SOMEBODY:
            gc.collect()
            gc.freeze()
            weakref.finalize(self, gc.unfreeze).atexit = False  # or Python would traverse them once more at exit

    def _begin(
        self,
        loaded: LoadedModel,
        asked: Settings,
        policy: MakePolicy,
        listeners: Sequence[Listener],
        host_sharers: int,
    ) -> None:
        """Make the engine, and its runner with the KV cache."""
        self.loaded = loaded
        self.folder, self.model_config, self.tokenizer = loaded.folder, loaded.config, loaded.tokenizer
        loaded = replace(loaded, config=loaded.config.up_to(asked.max_model_len))
        self.config = engine_config(asked, loaded, host_sharers)
        try:
            runner = loaded.make_runner(self.config)
        except MemoryError as error:
            num_blocks, num_swap_blocks = self.config.num_blocks, self.config.num_swap_blocks
            size = (num_blocks + num_swap_blocks) * loaded.block_bytes(
                asked.block_size, asked.kv_cache_dtype, asked.tensor_parallel_size, asked.pipeline_parallel_size
            )
            raise InvalidRequest(
                f"num_blocks is {num_blocks}: with {num_swap_blocks} for swapping they take {size:,} bytes, more than "
                "the free memory; lower num_blocks, or num_swap_blocks (swap_space)"
                + (f". What failed: {error}" if str(error) else "")
            ) from None
        # Threads may share an LLM; their calls run one after another. A thread that reads a stream may call `generate`
        # between two updates.
        self._lock = threading.RLock()
        disk = disk_floor(asked)
        self.grammars = (
            GrammarCompiler(self.tokenizer, self.config.vocab_size, self.config.eos_token_ids)
            if self.tokenizer
            else None
        )
        self.engine = Engine(
            self.config,
            loaded.tier,
            runner,
            allocator=asked.allocator,
            memory=self._memory(asked, loaded, runner, disk),
            policy=policy,
            decode=self.tokenizer.decode if self.tokenizer else None,
            encode=self.tokenizer.encode if self.tokenizer else None,
            compile_grammar=self.grammars.compile if self.grammars else None,
            listeners=listeners,
            drafts=drafts_of(self.config.speculative_config, loaded.draft_cost),
        )
        for shared in (asked.kv_connector, disk):
            if shared is not None:
                shared.open(handshake(asked, loaded.folder, loaded.config, loaded.tier))

    # --- What users call --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        **not_here: None,
    ) -> list[RequestOutput]:
        """Continue each prompt, and return one output per prompt, in order.

        A prompt is a text, a list of token ids, a `TextPrompt` or a `TokensPrompt`. `sampling_params`: one for all, or
        one for each prompt. `use_tqdm`: show a progress bar, if stderr is a terminal. `priority`: one for all, or one
        for each prompt; smaller is earlier, for a `scheduling_policy` that uses it: `priority` and classes of your own.
        For the others it must be 0. `not_here`: other arguments of vLLM's. Raises InvalidRequest for a prompt that
        cannot be served; then, and on Ctrl-C, every block is freed. If a request fails on the way
        (`RequestOutput.error` says why), the others go on to their end."""
        take_own("LLM.generate()", not_here, GENERATE_ARGUMENTS)
        return self._run(as_list(prompts), sampling_params, SamplingParams, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **not_here: None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of {"role", "content"}), or each of several.

        `ChatOptions` describes the options of the chat template; `generate` describes the other arguments.
        """
        take_own("LLM.chat()", not_here, CHAT_ARGUMENTS)
        conversations: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            self.encode_chat(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(prompts, sampling_params, SamplingParams, use_tqdm, priority)

    def encode_chat(self, messages: Sequence[Message], **how: Unpack[ChatOptions]) -> list[int]:
        """The token ids of a conversation in the model's chat template, up to the beginning of the model's answer."""
        return self.need_tokenizer().encode_chat(messages, **how)

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer as a transformers class, which is what vLLM returns; ours is `llm.tokenizer`."""
        return self.need_tokenizer().in_transformers

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
        **not_here: None,
    ) -> list[RequestOutput]:
        """Return the `beam_width` best continuations of each prompt, best first, by transformers' beam search rules."""
        take_own("LLM.beam_search()", not_here, BEAM_SEARCH_ARGUMENTS)
        return self._run(as_list(prompts), params, BeamSearchParams, use_tqdm, priority)

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[RequestUpdate]:
        """Continue one prompt, and yield its new output after each step.

        The last update carries the whole output. A caller who does not want the rest closes the iterator (or drops it);
        then the request is cancelled, and its blocks are freed. Raises the errors of `generate` at the first `next()`.
        """
        with self._lock:
            given = SamplingParams() if params is None else params
            for _, update in self._serve([(prompt, given, 0)], RequestOutputKind.DELTA, use_tqdm=False):
                yield update

    def read_prompt(self, prompt: Prompt) -> tuple[Sequence[int], str | None]:
        """The token ids of a prompt, and its text if that was given. Raises InvalidRequest for an invalid prompt."""
        return read_prompt(prompt, lambda text: self.need_tokenizer().encode(text))

    def need_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelError if it has none."""
        if self.tokenizer is None:
            raise ModelError(
                f"{self.folder} holds no tokenizer.json; put the tokenizer there, or give token ids (from Python)"
            )
        return self.tokenizer

    @property
    def description(self) -> str:
        """Tier, device, kernels, dtype and the parts into which the model is split, in a few words."""
        told = self.loaded.tier.description
        tensor, pipeline = self.config.tensor_parallel_size, self.config.pipeline_parallel_size
        if tensor * pipeline == 1 or isinstance(self.loaded.tier, tiers.FastTier):  # its own description has the parts
            return told
        sizes = f"tensor parallel {tensor}, pipeline parallel {pipeline}"
        return f"{told}, in {tensor * pipeline} parts in one process ({sizes})"

    def stats(self) -> Stats:
        """Counts so far: blocks used, shared, copied and swapped; tokens recomputed; cache hits; waste of each kind."""
        return self.engine.current_stats()

    def close(self) -> None:
        """End the model's worker processes, if it has any; running requests fail. The processes also end when the last
        reference to this LLM is gone."""
        self.loaded.close()

    # --- The loop around the engine ---------------------------------------------------------------

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] | None,
        kind: type[Params],
        use_tqdm: bool,
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        if not isinstance(use_tqdm, bool):
            raise InvalidRequest(f"use_tqdm is {use_tqdm!r}; it must be True or False: the bar here is not tqdm's")
        params = kind() if params is None else params
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts need {len(prompts)} params, or one for all; got {len(each)}")
        for item in each:
            if not isinstance(item, kind):
                raise InvalidRequest(f"params must be {kind.__name__}, not {type(item).__name__}")
        priorities = priority if isinstance(priority, Sequence) else [priority or 0] * len(prompts)
        if len(priorities) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts need {len(prompts)} priorities; got {len(priorities)}")
        outputs: dict[int, RequestOutput] = {}
        requests = list(zip(prompts, each, priorities, strict=True))
        with self._lock:
            for place, update in self._serve(requests, RequestOutputKind.FINAL_ONLY, use_tqdm):
                if update.output:
                    outputs[place] = update.output
        return [outputs[place] for place in range(len(prompts))]

    def _serve(
        self, requests: Sequence[tuple[Prompt, Params, int]], kind: RequestOutputKind, use_tqdm: bool
    ) -> Iterator[tuple[int, RequestUpdate]]:
        """Add the requests (prompt, params, priority), step the engine until they have ended, and yield their updates,
        each with the index of its prompt. If this ends early, for any reason, all of them are aborted."""
        places: dict[str, int] = {}
        unfinished = set(range(len(requests)))
        # Requests that were added to the engine directly keep their updates.
        others, kept = set(self.engine.unfinished_requests), self.engine.take_updates()
        try:
            for place, (prompt, params, priority) in enumerate(requests):
                ids, text = self.read_prompt(prompt)
                name = self.engine.add_request(
                    ids, params, prompt=text, output_kind=kind, priority=priority, cache_salt=salt_of(prompt)
                )
                places[name] = place
            with interrupt_between_steps() as interrupted, self._progress_bar(len(requests), use_tqdm):
                while unfinished:
                    if interrupted():
                        raise KeyboardInterrupt
                    updates = self.engine.step()
                    kept += [update for update in updates if update.request_id not in places]
                    for update in updates:
                        if update.request_id in places:
                            if update.output:
                                unfinished.remove(places[update.request_id])
                            yield places[update.request_id], update
                if interrupted():  # during the last step
                    raise KeyboardInterrupt
        except BaseException:
            with suppress(InvariantViolation):  # an allocator that broke its contract may do so again
                for request_id in set(self.engine.unfinished_requests) - others:
                    self.engine.abort(request_id)
            kept += [update for update in self.engine.take_updates() if update.request_id in others]
            raise
        finally:
            self.engine.keep_updates(kept)

    def _memory(self, asked: Settings, loaded: LoadedModel, runner: Runner, disk: Disk | None) -> MakeMemory:
        """The class or function that makes the block manager."""
        connector = asked.kv_connector
        size = loaded.block_bytes(asked.block_size, asked.kv_cache_dtype)
        if disk:
            read = runner.read_host_blocks
            return partial(FlooredBlockManager, disk=disk, read_host_blocks=read, block_bytes=size)
        if connector is None:
            return paged_memory
        return partial(ConnectedBlockManager, connector=connector, read_blocks=runner.read_blocks, block_bytes=size)

    @contextmanager
    def _progress_bar(self, num_requests: int, use_tqdm: bool) -> Iterator[None]:
        """Show finished requests and tokens per second on stderr while the context lasts, if it is a terminal."""
        if not (use_tqdm and sys.stderr.isatty()):
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True)) as bar:
            task = bar.add_task("requests", total=num_requests, speed="")
            num_tokens = 0

            def show(event: Event) -> None:
                nonlocal num_tokens
                if isinstance(event, TokenGenerated):
                    num_tokens += 1
                    elapsed = bar.tasks[task].elapsed
                    bar.update(task, speed=f"{num_tokens / elapsed:.0f} tokens/s" if elapsed else "")
                elif isinstance(event, RequestFinished):
                    bar.advance(task)

            self.engine.listeners.append(show)
            try:
                yield
            finally:
                self.engine.listeners.remove(show)


@contextmanager
def interrupt_between_steps(
    notice: str = "finishing the step; Ctrl-C again stops at once",
) -> Iterator[Callable[[], bool]]:
    """Delay a first Ctrl-C to the end of the step, so that no change of a table is cut in half; a second one acts now.

    Yields a function that returns whether there was one. `notice` is the message to print then; "" prints none. Does
    nothing outside the main thread, where no signal arrives.
    """
    seen: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        if notice:
            print(f"\n{notice}", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
