"""The engine: takes requests, runs steps, and returns what each step adds to them (paper, section 4.3, Fig. 4).

One step, in the order of the data flow:

1. the scheduler makes a plan and takes the blocks for it from the block manager (`scheduler.py`, `block_manager.py`);
2. the plan is written down as a StepInput, which says what has changed since the last step (`step_writer.py`);
3. the runner moves blocks, runs the batch through the model and chooses tokens from the logits;
4. the step is committed: tokens are appended, sequences fork and finish, blocks are given back (`commit.py`).

The first three *launch* a step: on a GPU they only queue work, and the tokens are not known yet. With asynchronous
scheduling one more step is launched before this one is committed (`run_ahead.py`); with pipeline parallelism one step
per stage is in flight (`pipeline.py`). If anything raises within a step, the error is passed on, no request is lost and
no block leaks (`recovery.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from minipaged.contracts import BlockAllocator, Runner, Tier
from minipaged.engine.arrivals import Arrivals
from minipaged.engine.batch import LaunchedStep, Plan
from minipaged.engine.commit import Committer
from minipaged.engine.detokenizer import Decode, Encode
from minipaged.engine.drafts import Drafts, drafts_of
from minipaged.engine.event_queue import EventQueue
from minipaged.engine.floors import paged_memory
from minipaged.engine.grammar import Compile
from minipaged.engine.invariants import check_blocks, check_windows
from minipaged.engine.launch import Launcher
from minipaged.engine.memory import MakeMemory
from minipaged.engine.pipeline import Pipeline
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.recovery import start_over
from minipaged.engine.run_ahead import RunAhead, assign_ahead
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.sequence import Request
from minipaged.engine.stats import Stats
from minipaged.engine.steady import Steady
from minipaged.engine.step_writer import StepWriters
from minipaged.errors import InvalidRequest, InvariantViolation
from minipaged.events import EngineStarted, Listener, RequestArrived, RequestRefused, StepFailed
from minipaged.outputs import RequestUpdate
from minipaged.params import BeamSearchParams, EngineConfig, RequestOutputKind, SamplingParams
from minipaged.scheduling import MakePolicy


class Engine:
    """Serves requests on one tier's parts and one runner. Not thread-safe: call its methods from one thread.

    - `allocator`: makes the allocators of the pools (a class or function); None: the tier's own.
    - `memory`, `policy`: make the block manager and the scheduling policy (`scheduling.py`).
    - `decode`, `encode`: turn token ids into text, and text into token ids, called like the methods of a `Tokenizer`.
      Stop strings and the text of outputs need `decode`, bad words `encode`, structured outputs `compile_grammar`.
    - `listeners` receive every event, in order, after the step (or call) that caused it, and may call the engine. If
      one raises, all still receive all events. Then the call fails with that error; its effects remain.
    - `clock`: returns the time in seconds, for all times that the engine reports. A simulation has its own clock.
    - `steady`: whether steps in which all sequences decode may take the short way (`steady.py`), with equal results.
    - `drafts`: guesses tokens, which steps verify; None: as the config asks. Not with windows or asynchronously yet.
    """

    def __init__(
        self,
        config: EngineConfig,
        tier: Tier,
        runner: Runner,
        *,
        allocator: Callable[[int], BlockAllocator] | None = None,
        memory: MakeMemory = paged_memory,
        policy: MakePolicy = FirstComeFirstServed,
        decode: Decode | None = None,
        encode: Encode | None = None,
        compile_grammar: Compile | None = None,
        listeners: Sequence[Listener] = (),
        clock: Callable[[], float] = time.perf_counter,
        steady: bool = True,
        drafts: Drafts | None = None,
    ) -> None:
        drafts = drafts or drafts_of(config.speculative_config)
        self.config = config
        self.stats = Stats()
        self._clock = clock
        self._emit = EventQueue(self.stats, listeners)
        self.listeners = self._emit.listeners
        """Receivers of every event. Append to this list, or remove from it."""
        self._requests: dict[str, Request] = {}
        self._orders = count()
        self._last_commit = 0.0
        writers = StepWriters(config.pipeline_parallel_size)
        self.blocks = memory(config, tier, allocator, writers, self._emit)
        if config.has_windows and not self.blocks.has_windows:
            raise InvalidRequest(
                f"some of the model's layers have a window, and {type(self.blocks).__name__} keeps one block table for "
                "all layers; leave out the memory of your own"
            )
        self.scheduler = Scheduler(config, self.blocks, runner, self._emit, policy, writers)
        ids = count()  # of sequences
        self._arrivals = Arrivals(
            *(config, tier.beam_search, self.scheduler, self.blocks, ids),
            *(decode, encode, clock, self.stats, compile_grammar),
        )
        self._launcher = Launcher(config, self.scheduler, self.blocks, writers, runner, self._emit, clock)
        self._committer = Committer(self._requests, self.scheduler, self.blocks, writers, ids, self._emit, clock)
        self._writers = writers
        self._steady = (
            Steady(self._launcher, self._committer, self.scheduler, self.blocks, writers, self._emit)
            if steady and not self.blocks.has_windows
            else None
        )
        self._launch = (self._steady or self._launcher).launch
        self._ahead: RunAhead | Pipeline | None = None
        if drafts:
            if config.async_scheduling or self.blocks.has_windows:
                raise InvalidRequest("drafts work without asynchronous scheduling and windows only; leave one out")
            self.scheduler.drafts, self._committer.note_drafts = drafts, drafts.note
        if config.pipeline_parallel_size > 1:
            assign: Callable[[int], Plan | None] = (self._steady or self.scheduler).assign_ahead
            self._ahead = Pipeline(self.scheduler, assign, self._launch, self._commit)
        elif config.async_scheduling:
            self._ahead = RunAhead(self._assign_ahead, self._launch, self._commit, self._requests)
        sizes = config.num_blocks, config.num_swap_blocks, config.block_size, config.max_model_len
        self._emit(EngineStarted(*sizes, config.group_windows))

    # --- The methods of callers -------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request; returns its id. Raises InvalidRequest if it could never be served.

        `prompt`: the text of the prompt's tokens, for the output. `output_kind`: when updates of it are returned.
        `priority`: the smaller, the earlier; 0 unless the policy looks at it. `cache_salt`: equal ones share blocks.
        """
        order = next(self._orders)
        if request_id is None:
            request_id = next(str(number) for number in count(order) if str(number) not in self._requests)
        try:
            if request_id in self._requests:
                raise InvalidRequest(f"request id {request_id!r} is in use; wait for that request or choose another id")
            request = self._arrivals.make(
                request_id, order, prompt_token_ids, params, prompt, output_kind, priority, cache_salt
            )
        except InvalidRequest as error:
            self._emit(RequestRefused(request_id, str(error)))
            self._emit.deliver()
            raise
        self._requests[request_id] = request
        self.scheduler.add(request)
        first = request.sequences[0].sequence_id
        self._emit(RequestArrived(request_id, first, request.prompt_token_ids, request.num_sequences))
        self._emit.deliver()
        return request_id

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self._requests or self._committer.updates)

    def step(self) -> list[RequestUpdate]:
        """Run one step; returns what the requests have gained since the last call, in order.

        With asynchronous scheduling or several lanes, this launches one step and commits an earlier one. If something
        raises here (the model, a listener), no update is lost: the next call returns it.
        """
        if self._requests:
            try:
                self._run_step()
            except BaseException as error:
                with suppress(InvariantViolation):  # an allocator that broke its contract may do so again
                    self._recover(error)
                raise
            finally:
                self._emit.deliver()
        return self.take_updates()

    def take_updates(self) -> list[RequestUpdate]:
        """Return the updates that no call has returned yet."""
        updates, self._committer.updates = self._committer.updates, []
        return updates

    def keep_updates(self, updates: Iterable[RequestUpdate]) -> None:
        """Let the next `step` return these updates again, for a caller that received updates meant for another."""
        self._committer.updates[:0] = updates

    def current_stats(self) -> Stats:
        """Return the counts so far, with the blocks as they are now."""
        stats, used = self.stats, self.blocks.num_used
        return replace(
            stats,
            blocks_used=used,
            blocks_cached=self.blocks.num_cached,
            blocks_saved=self.blocks.num_entries - used,
            entries_by_group=tuple(self.blocks.entries_by_group),
            paged=replace(stats.paged),
            contiguous=replace(stats.contiguous),
        )

    @property
    def unfinished_requests(self) -> list[str]:
        """The ids of the requests that wait or run."""
        return list(self._requests)

    def abort(self, request_id: str) -> None:
        """End a request now, in whatever state it is, and give back all its blocks. An unknown id is ignored.

        The next `step` returns what it has generated, with finish reason "abort".
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        self._leave_short_way()
        self._committer.cut_short(request, "abort")
        self._drop_steps_of_nobody()
        self._emit.deliver()

    def check_invariants(self) -> None:
        """Raise InvariantViolation unless conservation, exact-references and window-content hold."""
        if self._steady:
            self._steady.settle()
        check_blocks((sequence for request in self._requests.values() for sequence in request.sequences), self.blocks)
        if self.config.has_windows:
            flying = {part.request for step in self.steps_in_flight for part in step.plan.scheduled}
            check_windows(self._requests.values(), self.config.group_windows, self.config.block_size, flying)

    @property
    def runner(self) -> Runner:
        """The runner of the steps. Before the first request it may be wrapped in another, which passes its costs on."""
        return self._launcher.runner

    @runner.setter
    def runner(self, runner: Runner) -> None:
        self._launcher.runner = runner

    @property
    def takes_short_way(self) -> bool:
        """Whether the tables of running sequences may take their slots only later (`steady.py`)."""
        return self._steady is not None

    @property
    def steps_in_flight(self) -> list[LaunchedStep]:
        """The steps launched and not yet committed. Empty without asynchronous scheduling or several lanes."""
        return self._ahead.steps_in_flight if self._ahead else []

    # --- One step ---------------------------------------------------------------------------------

    def _run_step(self) -> None:
        """Launch a step and commit it, or commit one launched earlier (`run_ahead.py`, `pipeline.py`)."""
        if self._ahead is None:
            self._commit(self._launch())
        else:
            self._ahead.run_step()
            self._drop_steps_of_nobody()
        if self.config.debug:
            self.check_invariants()

    def _commit(self, step: LaunchedStep) -> None:
        """Add the step's results to the requests."""
        (self._steady or self._committer).commit(step)
        self.blocks.moves_done()
        self._finish_step(step)

    def _assign_ahead(self, before: LaunchedStep) -> Plan | None:
        return self._steady.assign_ahead(0, before) if self._steady else assign_ahead(self.scheduler, before)

    def _leave_short_way(self) -> None:
        if self._steady:
            self._steady.stop()

    def _finish_step(self, step: LaunchedStep) -> None:
        """Emit that the step has finished. Its seconds begin at its launch, or at the last commit if that was later."""
        now = self._clock()
        seconds, self._last_commit = now - max(step.started, self._last_commit), now
        self._emit.step_finished(step.number, step.plan, seconds, self._committer.take_num_generated())

    def _drop_steps_of_nobody(self) -> None:
        """Drop the steps in flight if all requests have ended: no request needs their tokens."""
        steps = self._ahead.take() if self._ahead and not self._requests else []
        for step in steps:
            self._finish_step(step)
        if steps:
            self.blocks.moves_lost()

    def _recover(self, error: BaseException) -> None:
        """Recover from an error within a step: no request is lost; K/V that may be incomplete are dropped
        (`recovery.py`)."""
        self._leave_short_way()
        if self._ahead:
            self._ahead.take()
        dropped = start_over(self._requests.values(), self.scheduler, self.blocks, self._writers)
        names = tuple(request.request_id for request in dropped)
        self._emit(StepFailed(self._launcher.step_number, repr(error), names))
