"""The engine: requests in, steps from outside, outputs back (paper, section 4.3, Fig. 4).

One step, as data flows:

1. the scheduler makes a plan and the block manager takes the blocks for it;
2. the runner moves blocks, then runs the batch through the model;
3. the tier chooses tokens from the logits: for all sequences of a request, or one beam-search step;
4. the engine commits: tokens are appended, sequences fork and finish, full blocks are published, blocks given back.

The first three *launch* a step: on a GPU they only queue work, and nobody has seen the tokens yet. With asynchronous
scheduling a call of `step` leaves the step that it launched *in flight*, and the next call launches one more before it
commits this one, so that the device has work while the host commits and schedules:

    device       | step 1        | step 2        | step 3        |
    host   launch 1, launch 2,  commit 1, launch 3,  commit 2, launch 4, ...

The token that a sequence runs in step 2 is the one that step 1 is choosing: it stays on the device.
If step 1 turns out to have ended the sequence, its row of step 2 is thrown away. Where the next step needs to know
more of the tokens than the device does (penalties, beam search, a fork, a preemption), it waits for the commit.

What is new of each request is returned as updates: tokens, text, how it ended (`minipaged/outputs.py`).

What goes wrong with one request (logits that are no numbers, tokens that have no text) ends that request, with its
error, and no other. If anything else raises within a step, the error is passed on, nothing is lost and nothing leaks:
K/V that may be half written are dropped, and every request that held some waits to be recomputed from its tokens
(`_recover`).
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from contextlib import suppress
from itertools import count
from typing import Literal

from minipaged.contracts import BeamSearch, BeamStep, BlockAllocator, Runner, Sampled, Tier
from minipaged.engine.batch import LaunchedStep, Plan, ScheduledRequest
from minipaged.engine.block_manager import BlockManager, MakeMemory
from minipaged.engine.detokenizer import Decode, Detokenizer, naming_failures
from minipaged.engine.event_queue import EventQueue
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.engine.request_checks import check_fits, check_params, check_priority, check_prompt
from minipaged.engine.results import make_output, make_update
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.sequence import Hypothesis, Request, RequestState, Sequence
from minipaged.engine.stats import Stats
from minipaged.engine.step_writer import StepWriter
from minipaged.errors import BadLogits, DetokenizerFailed, InvalidRequest, InvariantViolation, RequestFailed
from minipaged.events import (
    BeamFinished,
    EngineStarted,
    Listener,
    RequestArrived,
    RequestFinished,
    RequestRefused,
    SequenceFinished,
    StepFailed,
    StepFinished,
    StepStarted,
    TokenGenerated,
)
from minipaged.outputs import CompletionUpdate, RequestUpdate
from minipaged.params import BeamSearchParams, EngineConfig, RequestOutputKind, SamplingParams
from minipaged.scheduling import MakePolicy
from minipaged.steps import LOGITS

FinishReason = Literal["stop", "length", "abort", "error", "dropped"]


class Engine:
    """Serves requests on one tier's parts and one runner. Not thread-safe: call its methods from one thread.

    `allocator` is a class (or function) that makes the pools' allocators, in place of the tier's own; `memory` one that
    makes the block manager; `policy` one that makes what decides who is served when (`scheduling.py`), in place of
    first come, first served. `decode` turns token ids into text and is needed for stop strings and for the text of
    outputs. Listeners get every event, in order, after the step (or call) that caused it; they may call the engine's
    methods. A listener that raises makes that call fail with its error, once all listeners have been given everything;
    what the call did stays done. `clock`: what all times are told by, in seconds; a simulation has one of its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        tier: Tier,
        runner: Runner,
        *,
        allocator: Callable[[int], BlockAllocator] | None = None,
        memory: MakeMemory = BlockManager,
        policy: MakePolicy = FirstComeFirstServed,
        decode: Decode | None = None,
        listeners: ListLike[Listener] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.stats = Stats()
        self._tier = tier
        self.runner = runner
        self._decode = naming_failures(decode) if decode else None
        self._clock = clock
        self._block_size = config.block_size
        self._emit = EventQueue(self.stats, listeners)
        self._updates: list[RequestUpdate] = []
        self._requests: dict[str, Request] = {}
        self._random = random.Random(config.seed)
        self._sequence_ids = count()
        self._orders = count()
        self._step = 0  # the number of the latest
        self._num_generated = 0  # tokens, since a step finished
        self._in_flight: LaunchedStep | None = None
        self._may_run_ahead = False
        self._last_commit = 0.0
        self._writer = StepWriter()
        self._written: Plan | None = None  # by which the latest step was written
        self.blocks = memory(config, tier, allocator, self._writer, self._emit)
        self.scheduler = Scheduler(config, self.blocks, runner, self._emit, policy)
        self._emit(EngineStarted(config.num_blocks, config.num_swap_blocks, config.block_size, config.max_model_len))

    @property
    def listeners(self) -> list[Listener]:
        """Those who get every event: to be appended to and removed from."""
        return self._emit.listeners

    # --- What callers do --------------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: ListLike[int],
        params: SamplingParams | BeamSearchParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
        priority: int = 0,
    ) -> str:
        """Let a request wait for its turn; returns its id. Raises InvalidRequest when it could never be served.

        `prompt`: the text that the tokens came from, for its output. `output_kind`: when it is told of. `priority`: the
        smaller, the earlier, where the policy goes by it.
        """
        order = next(self._orders)
        if request_id is None:
            request_id = next(str(number) for number in count(order) if str(number) not in self._requests)
        try:
            if request_id in self._requests:
                raise InvalidRequest(f"request id {request_id!r} is in use; wait for that request or choose another id")
            check_prompt(prompt_token_ids, self.config)
            check_params(params, output_kind, self.config, has_tokenizer=self._decode is not None)
            check_priority(priority)
            tokens = tuple(int(token) for token in prompt_token_ids)  # NumPy's integers, for one, are not JSON
            request = self._new_request(request_id, order, tokens, params, prompt, output_kind, int(priority))
            check_fits(request, self.config, self.scheduler.max_sequences, self.blocks)
            self.scheduler.check_fits(request)
        except InvalidRequest as error:
            self._emit(RequestRefused(request_id, str(error)))
            self._emit.deliver()
            raise
        if isinstance(params, SamplingParams) and params.seed is None:
            request.seed = self._random.getrandbits(64)  # drawn only now: a refused request uses none up
        self._requests[request_id] = request
        self.scheduler.add(request)
        first = request.sequences[0].sequence_id
        self._emit(RequestArrived(request_id, first, request.prompt_token_ids, request.num_sequences))
        self._emit.deliver()
        return request_id

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self._requests or self._updates)

    def step(self) -> list[RequestUpdate]:
        """Run one step; returns what is new of the requests since the last call, in the order in which it came.

        With asynchronous scheduling: launch one step and commit the one before. What raises here (the model, a
        listener) loses no update: they come with the next call.
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
        """What is new of the requests and was not yet returned."""
        updates, self._updates = self._updates, []
        return updates

    def keep_updates(self, updates: Iterable[RequestUpdate]) -> None:
        """Let the next `step` return these (again): for a caller that was given somebody else's."""
        self._updates[:0] = updates

    def current_stats(self) -> Stats:
        """What was counted so far, with the blocks as they are now."""
        stats = copy.deepcopy(self.stats)
        stats.blocks_used = self.blocks.num_used
        stats.blocks_cached = self.blocks.num_cached
        stats.blocks_saved = self.blocks.num_entries - stats.blocks_used
        return stats

    @property
    def unfinished_requests(self) -> list[str]:
        """The ids of the requests that wait or run."""
        return list(self._requests)

    def abort(self, request_id: str) -> None:
        """End a request now, in whatever state it is, and give back all its blocks. An unknown id is ignored.

        What it has generated is returned by the next `step`, with finish reason "abort".
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        self._cut_short(request, "abort")
        self._drop_step_of_nobody()
        self._emit.deliver()

    def check_invariants(self) -> None:
        """Raise InvariantViolation unless conservation and exact-references hold."""
        self.blocks.check(sequence for request in self._requests.values() for sequence in request.sequences)

    # --- One step ---------------------------------------------------------------------------------

    def _run_step(self) -> None:
        """Launch a step and commit one: the same, or with asynchronous scheduling the one launched before."""
        before, self._in_flight = self._in_flight, None
        launched = self._launch_ahead() if before else None
        if before:
            self._commit(before)
        if launched is None and self._requests:
            launched = self._launch()
        if launched and not self.config.async_scheduling:
            self._commit(launched)
        elif launched:
            self._in_flight = launched
            self._may_run_ahead = self._expect_tokens(launched)
            self._drop_step_of_nobody()
        if self.config.debug:
            self.check_invariants()

    def _launch_ahead(self) -> LaunchedStep | None:
        """Launch the step after the one in flight, unless it has to wait for what that one chooses, or for room."""
        ahead = self.scheduler.assign_ahead() if self._may_run_ahead else None
        return self._launch(ahead) if ahead else None

    def _launch(self, ahead: Plan | None = None) -> LaunchedStep:
        """Schedule a step and hand it to the device, without looking at what it chooses."""
        started = self._clock()
        self._step += 1
        self._emit(StepStarted(self._step))
        plan = self.scheduler.schedule(ahead)
        self._emit(self.blocks.held(self._step, plan, self.scheduler.running))
        if self.config.debug:
            for sequence, num_tokens in plan.work():
                self.blocks.check_exclusive_writes(sequence, num_tokens)
        moves = self.blocks.take_moves()
        if plan is self._written:
            step = self._writer.write_on(self._step, moves)
        else:
            step = self._writer.write(self._step, plan.rows, plan.owners(), moves)
            for scheduled in plan.scheduled:
                if scheduled.request.first_scheduled_time is None:
                    scheduled.request.first_scheduled_time = started
        self._written = plan
        return LaunchedStep(self._step, started, plan, self.runner.run(step))

    def _expect_tokens(self, step: LaunchedStep) -> bool:
        """Let the sequences that run on know that the step in flight is choosing a token for them.

        False if one of the requests has to know more of them: then the next step is not launched before this one's
        commit.
        """
        if step.plan.steps_left > 0:
            if step.plan.needs_tokens:
                return False
            for sequence in step.plan.decoding:
                sequence.pending = True
            return True
        completed = [scheduled for scheduled in step.plan.scheduled if scheduled.completes]
        if any(scheduled.request.needs_tokens_on_host() for scheduled in completed):
            return False
        for scheduled in completed:
            request = scheduled.request
            for sequence, _ in scheduled.work:
                if sequence.finish_reason is None and not request.ends_by_length(sequence):
                    sequence.pending = True
        return True

    def _commit(self, step: LaunchedStep) -> None:
        """Make the step's results part of the requests. Everything is chosen before anything is changed.

        What ended while the step was in flight (with the token before, or aborted) has no use for them. Its blocks are
        given back already: the device works in order, so whoever was given them writes after this step has.
        """
        sampled = list(step.result.choices)  # this is where the host waits for the device
        for scheduled in step.plan.scheduled:
            plain = scheduled.plain
            if plain and self._commit_plain(scheduled, plain, sampled[scheduled.first_choice]):
                continue
            try:
                self._commit_request(step, scheduled, sampled)
            except RequestFailed as error:
                self._cut_short(scheduled.request, "error", str(error))
        self._finish_step(step)

    def _commit_plain(self, scheduled: ScheduledRequest, sequence: Sequence, choice: Sampled) -> bool:
        """What `_commit_request` comes to in nearly all cases: one sequence has one token more, and goes on.

        False, and nothing has changed, if this is none of them.
        """
        token, tokens = choice.token_id, sequence.tokens
        scheduled.tokens_left -= 1
        ends = token in scheduled.final_token_ids or scheduled.tokens_left <= 0
        if ends or choice.error or sequence.finish_reason is not None or not sequence.output_token_ids:
            return False
        if len(tokens) // self._block_size != sequence.num_published:
            self.blocks.publish(sequence, len(tokens))
        sequence.pending = False
        tokens.append(token)
        sequence.output_token_ids.append(token)
        sequence.cumulative_logprob += choice.logprob
        self._num_generated += 1
        if self._emit.listeners:
            self._emit(TokenGenerated(scheduled.request_id, sequence.sequence_id, token, choice.logprob))
        if scheduled.reads_along:
            sequence.num_reported += 1
            news = CompletionUpdate(sequence.stream, (token,), "", None, None, None)
            self._updates.append(RequestUpdate(scheduled.request_id, (news,), None))
        return True

    def _commit_request(self, step: LaunchedStep, scheduled: ScheduledRequest, sampled: list[Sampled]) -> None:
        """One request's part of the step.

        Raises RequestFailed; K/V that led to logits that are no numbers are offered to nobody.
        """
        request = scheduled.request
        if request.beam_search is None and scheduled.completes and request.state is not RequestState.FINISHED:
            first = scheduled.first_choice
            choices = sampled[first : first + len(scheduled.work) * scheduled.num_choices]
            for (sequence, _), choice in zip(scheduled.work, choices, strict=False):  # of a prompt, n from one row
                if choice.error and sequence.finish_reason is None:
                    raise BadLogits(choice.error)
            self._publish(step, scheduled)
            self._commit_samples(request, scheduled.work, choices)
        elif not scheduled.completes or request.state is RequestState.FINISHED:
            self._publish(step, scheduled)
        else:
            assert request.beam_search is not None
            search = copy.deepcopy(request.beam_search)  # put in place once nothing can raise any more
            rows = range(scheduled.first_logits, scheduled.first_logits + len(scheduled.work))
            decided = search.step(step.result.logits, rows, [beam.cumulative_logprob for beam in request.sequences])
            self._publish(step, scheduled)
            self._commit_beams(request, search, decided)

    def _publish(self, step: LaunchedStep, scheduled: ScheduledRequest) -> None:
        """Let the prefix cache know of the tokens that have K/V by now."""
        if self.blocks.prefix_cache is None:
            return
        for i, (sequence, _) in enumerate(scheduled.work, scheduled.first_row):
            # All that were known, if all that it ran was the latest. A step that was planned anew says how many.
            num_computed = len(sequence.tokens) if scheduled.decodes else step.plan.rows[i].stop
            if num_computed // self.config.block_size != sequence.num_published and sequence.finish_reason is None:
                self.blocks.publish(sequence, num_computed)

    def _finish_step(self, step: LaunchedStep) -> None:
        """Seconds are counted once, though steps overlap: from the launch, or the commit of the step before."""
        now = self._clock()
        seconds, self._last_commit = now - max(step.started, self._last_commit), now
        num_generated, self._num_generated = self._num_generated, 0
        self._emit(StepFinished(step.number, step.plan.num_rows, step.plan.num_query_tokens, seconds, num_generated))

    def _drop_step_of_nobody(self) -> None:
        """When all requests have ended, nobody will ask for what the step in flight chooses."""
        if self._in_flight and not self._requests:
            self._finish_step(self._in_flight)
            self._in_flight = None

    def _recover(self, error: BaseException) -> None:
        """After an error within a step: drop all K/V that may be half written; their requests wait to be recomputed."""
        self.blocks.take_moves()
        self._writer.forget()
        self._in_flight = self._written = None
        dropped = self.scheduler.start_over(self._requests.values())
        self._emit(StepFailed(self._step, repr(error), tuple(request.request_id for request in dropped)))

    # --- Parallel sampling (paper, section 4.4, Fig. 8) -------------------------------------------

    def _commit_samples(self, request: Request, work: list[tuple[Sequence, int]], choices: list[Sampled]) -> None:
        """Append the tokens chosen for the sequences that ran; the samples of a prompt fork from it first."""
        if request.prompt_computed:
            sequences = [sequence for sequence, _ in work]
        else:
            [(parent, _)] = work
            sequences = [parent, *self._fork_samples(request, parent, len(choices))]
        for sequence, choice in zip(sequences, choices, strict=True):
            if sequence.finish_reason is None:
                self._commit_token(request, sequence, choice)
        self._report(request)

    def _fork_samples(self, request: Request, parent: Sequence, n: int) -> list[Sequence]:
        """The other samples of a prompt that has just been computed."""
        children = self._fork(request, [(parent, choice) for choice in range(1, n)])
        for stream, child in enumerate(children, 1):
            child.stream = stream
        request.sequences.extend(children)
        request.prompt_computed = True
        request.first_token_time = self._clock()
        return children

    def _commit_token(self, request: Request, sequence: Sequence, choice: Sampled) -> None:
        """Append a token, and end the sequence if that was its last."""
        token, reason = choice.token_id, None
        num_output = len(sequence.output_token_ids) + 1
        if token in request.final_token_ids or num_output >= request.max_output_tokens or sequence.detokenizer:
            # Decoding may raise, so it comes first: a token is appended together with what follows from it.
            reason, sequence.stop_reason = self._finish_reason(request, sequence, token)
        self._append_token(request, sequence, token, choice.logprob)
        sequence.cumulative_logprob += choice.logprob
        if sequence.logprobs is not None and choice.top_logprobs is not None:
            sequence.logprobs.append(choice.top_logprobs)
        if reason:
            self._finish_text(sequence)
            self._end_sequence(request, sequence, reason)

    def _finish_reason(
        self, request: Request, sequence: Sequence, token: int
    ) -> tuple[FinishReason | None, int | str | None]:
        """Why the sequence ends with its next token, if it does, and which stop it was. Adds the token to its text."""
        params = request.params
        assert isinstance(params, SamplingParams)
        may_stop = len(sequence.output_token_ids) + 1 >= params.min_tokens
        ends = may_stop and token in request.final_token_ids
        if text := sequence.detokenizer:
            text.add(token, may_stop=may_stop and not ends)
            if text.stopped_by is not None:
                return "stop", text.stopped_by
        if ends:
            return "stop", token if token in params.stop_token_ids else None
        return "length" if request.ends_by_length(sequence) else None, None

    # --- Beam search (paper, section 4.4, Fig. 9) -------------------------------------------------

    def _commit_beams(self, request: Request, search: BeamSearch, step: BeamStep) -> None:
        """Survivors fork their parents' tables; beams without survivors give their blocks back at once."""
        beams = list(request.sequences)
        parents = [beams[move.parent] for move in step.survivors]
        first = [beam not in parents[:i] for i, beam in enumerate(parents)]
        others = [(beam, LOGITS) for beam, goes_on in zip(parents, first, strict=True) if not goes_on]
        forks = iter(self._fork(request, others))
        survivors = [beam if goes_on else next(forks) for beam, goes_on in zip(parents, first, strict=True)]
        request.beam_search = search

        for move, score in step.finished:
            parent = beams[move.parent]
            reason = "stop" if move.token_id in request.final_token_ids else "length"
            tokens = (*parent.output_token_ids, move.token_id)
            request.hypotheses.append(Hypothesis(tokens, move.cumulative_logprob, score, reason))
            self._emit(BeamFinished(request.request_id, parent.sequence_id, move.token_id, score))
        if not request.prompt_computed:
            request.prompt_computed = True
            request.first_token_time = self._clock()
        for beam in beams:
            if beam not in survivors:
                self._end_sequence(request, beam, "dropped")
        request.sequences[:] = survivors
        for beam, move in zip(survivors, step.survivors, strict=True):
            self._append_token(request, beam, move.token_id, move.cumulative_logprob - beam.cumulative_logprob)
            self._writer.told(beam)
            beam.cumulative_logprob = move.cumulative_logprob
        if not survivors:
            self._finish_request(request, "finished")

    # --- Sequences and requests -------------------------------------------------------------------

    def _fork(self, request: Request, parents: list[tuple[Sequence, int]]) -> list[Sequence]:
        """A child of each parent (one may occur twice), sharing all its blocks; all of them or an error and none. Its
        newest token will be that choice of those for the parent (or LOGITS: none of them)."""
        children: list[Sequence] = []
        try:
            for parent, choice in parents:
                child = Sequence(
                    next(self._sequence_ids),
                    list(parent.tokens),
                    list(parent.output_token_ids),
                    self.blocks.new_table(),
                    cumulative_logprob=parent.cumulative_logprob,
                    logprobs=None if parent.logprobs is None else list(parent.logprobs),
                    detokenizer=parent.detokenizer.fork() if parent.detokenizer else None,
                )
                self.blocks.fork(request, parent, child)
                self._writer.forked(child, parent, choice)
                children.append(child)
        except BaseException:
            for child in children:
                self._writer.ended(child)
                self._emit(SequenceFinished(request.request_id, child.sequence_id, "dropped"))
                self.blocks.free(child)
            raise
        return children

    def _append_token(self, request: Request, sequence: Sequence, token: int, logprob: float) -> None:
        sequence.pending = False
        sequence.tokens.append(token)
        sequence.output_token_ids.append(token)
        self._num_generated += 1
        if self._emit.heard:
            self._emit(TokenGenerated(request.request_id, sequence.sequence_id, token, logprob))

    def _end_sequence(self, request: Request, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._writer.ended(sequence)
        self.scheduler.sequences_change()
        reserved = self.blocks.slot_steps_reserved(sequence)
        self._emit(SequenceFinished(request.request_id, sequence.sequence_id, reason, reserved))
        self.blocks.free(sequence)
        request.sequences.remove(sequence)
        request.done.append(sequence)

    def _finish_text(self, sequence: Sequence) -> None:
        """The text that was held back, or all of it where nobody read along. Raises DetokenizerFailed."""
        if sequence.detokenizer is None and self._decode:
            sequence.detokenizer = Detokenizer.of_all(sequence.output_token_ids, self._decode)
        if sequence.detokenizer:
            sequence.detokenizer.finish()

    def _cut_short(self, request: Request, reason: Literal["abort", "error"], error: str | None = None) -> None:
        """End a request that has not come to its end: cancelled, or failed with `error`."""
        for sequence in list(request.sequences):
            try:
                if request.beam_search is None:
                    self._finish_text(sequence)
            except DetokenizerFailed as failed:
                reason, error = "error", error or str(failed)
            sequence.stop_reason = None
            self._end_sequence(request, sequence, reason)
        self._finish_request(request, "aborted" if reason == "abort" else "failed", error)

    def _finish_request(
        self, request: Request, reason: Literal["finished", "aborted", "failed"], error: str | None = None
    ) -> None:
        self.scheduler.remove(request)
        del self._requests[request.request_id]
        request.state = RequestState.FINISHED
        now, finished = self._clock(), reason == "finished"
        try:
            output = make_output(request, self._decode, now, finished=finished, error=error)
        except DetokenizerFailed as failed:  # beams get their text only now
            reason = "failed"
            output = make_output(request, None, now, finished=False, error=error or str(failed))
        self._emit(RequestFinished(request.request_id, reason))
        self._updates.append(make_update(request, output))

    def _report(self, request: Request) -> None:
        """Tell what a step has brought: always at the end, and on the way to it if somebody reads along."""
        if not request.sequences:
            self._finish_request(request, "finished")
        elif request.reads_along:
            self._updates.append(make_update(request))

    def _new_detokenizer(
        self, params: SamplingParams | BeamSearchParams, output_kind: RequestOutputKind
    ) -> Detokenizer | None:
        """One for a sequence whose text is wanted while it grows."""
        if self._decode is None or isinstance(params, BeamSearchParams):
            return None
        wanted = params.stop or output_kind is RequestOutputKind.DELTA
        return Detokenizer(self._decode, params.stop) if wanted else None

    # --- Requests and events ----------------------------------------------------------------------

    def _new_request(
        self,
        request_id: str,
        order: int,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams | BeamSearchParams,
        prompt: str | None,
        output_kind: RequestOutputKind,
        priority: int,
    ) -> Request:
        room = self.config.max_model_len - len(prompt_token_ids)
        max_output = room if params.max_tokens is None else min(params.max_tokens, room)
        beam_search, final = None, () if params.ignore_eos else self.config.eos_token_ids
        if isinstance(params, BeamSearchParams):
            num_prompt = len(prompt_token_ids)
            beam_search = self._tier.beam_search(params, num_prompt, num_prompt + max_output, final)
        else:
            final = (*params.stop_token_ids, *final)
        seed = (params.seed or 0) if isinstance(params, SamplingParams) else 0
        return Request(
            request_id=request_id,
            order=order,
            arrival_time=self._clock(),
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            params=params,
            seed=seed & (2**64 - 1),
            final_token_ids=frozenset(final),
            max_output_tokens=max_output,
            reads_along=output_kind is RequestOutputKind.DELTA,
            priority=priority,
            sequences=[
                Sequence(
                    next(self._sequence_ids),
                    list(prompt_token_ids),
                    [],
                    self.blocks.new_table(),
                    logprobs=None if isinstance(params, BeamSearchParams) or params.logprobs is None else [],
                    detokenizer=self._new_detokenizer(params, output_kind),
                )
            ],
            beam_search=beam_search,
        )
