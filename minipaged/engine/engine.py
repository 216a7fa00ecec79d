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
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from contextlib import suppress
from itertools import count
from typing import Literal

from minipaged.contracts import BeamSearch, BeamStep, BlockAllocator, Runner, Sampled, StepResult, Tier
from minipaged.engine.batch import LaunchedStep, Plan, ScheduledRequest
from minipaged.engine.block_manager import BlockManager, MakeMemory
from minipaged.engine.detokenizer import Decode, Detokenizer, naming_failures
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
    Event,
    RequestArrived,
    RequestFinished,
    RequestRefused,
    SequenceFinished,
    StepFailed,
    StepFinished,
    StepStarted,
    TokenGenerated,
)
from minipaged.outputs import RequestUpdate
from minipaged.params import BeamSearchParams, EngineConfig, RequestOutputKind, SamplingParams
from minipaged.scheduling import MakePolicy
from minipaged.steps import LOGITS, Row

Listener = Callable[[Event], None]
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
        self.listeners: list[Listener] = [self.stats.on_event, *listeners]
        self._events: deque[Event] = deque()
        self._delivering = False
        self._updates: list[RequestUpdate] = []
        self._requests: dict[str, Request] = {}
        self._random = random.Random(config.seed)
        self._sequence_ids = count()
        self._orders = count()
        self._step = 0  # the number of the latest
        self._in_flight: LaunchedStep | None = None
        self._may_run_ahead = False
        self._last_commit = 0.0
        self._writer = StepWriter()
        self.blocks = memory(config, tier, allocator, self._writer, self._emit)
        self.scheduler = Scheduler(config, self.blocks, runner, self._emit, policy)
        self._emit(EngineStarted(config.num_blocks, config.num_swap_blocks, config.block_size, config.max_model_len))

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
            self._deliver_events()
            raise
        if isinstance(params, SamplingParams) and params.seed is None:
            request.seed = self._random.getrandbits(64)  # drawn only now: a refused request uses none up
        self._requests[request_id] = request
        self.scheduler.add(request)
        first = request.sequences[0].sequence_id
        self._emit(RequestArrived(request_id, first, request.prompt_token_ids, request.num_sequences))
        self._deliver_events()
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
                self._deliver_events()
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
        stats.note_blocks(self.scheduler.running, self.blocks)
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
        self._deliver_events()

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

    def _launch(self, ahead: list[ScheduledRequest] | None = None) -> LaunchedStep:
        """Schedule a step and hand it to the device, without looking at what it chooses."""
        started = self._clock()
        self._step += 1
        self._emit(StepStarted(self._step))
        plan = self.scheduler.schedule(ahead)
        self.stats.measure(self.scheduler.running, self.blocks)
        for scheduled in plan.scheduled:
            if scheduled.request.first_scheduled_time is None:
                scheduled.request.first_scheduled_time = started
        rows = plan.rows()
        if self.config.debug:
            for row, (_, sequence) in zip(rows, plan.owners(), strict=True):
                self.blocks.check_exclusive_writes(sequence, row)
        step = self._writer.write(self._step, rows, plan.owners(), self.blocks.take_moves())
        result = self.runner.run(step)
        return self._launched(started, plan, rows, result)

    def _launched(self, started: float, plan: Plan, rows: list[Row], result: StepResult) -> LaunchedStep:
        """Note which of the choices, and which of the logits, are whose."""
        logit_rows: dict[Sequence, int] = {}
        choices: dict[Request, range] = {}
        num_logits = num_choices = 0
        for scheduled in plan.scheduled:
            if scheduled.num_choices > 0:
                first, num_logits = num_choices, num_logits + len(scheduled.work)
                num_choices += len(scheduled.work) * scheduled.num_choices
                choices[scheduled.request] = range(first, num_choices)
            elif scheduled.num_choices == LOGITS:
                for sequence, _ in scheduled.work:
                    logit_rows[sequence] = num_logits
                    num_logits += 1
        return LaunchedStep(self._step, started, plan, rows, result, logit_rows, choices)

    def _expect_tokens(self, step: LaunchedStep) -> bool:
        """Let the sequences that run on know that the step in flight is choosing a token for them.

        False if one of the requests has to know more of them: then the next step is not launched before this one's
        commit.
        """
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
        rows = iter(step.rows)
        for scheduled in step.plan.scheduled:
            computed = [(sequence, next(rows).stop) for sequence, _ in scheduled.work]
            try:
                self._commit_request(step, scheduled, computed, sampled)
            except RequestFailed as error:
                self._cut_short(scheduled.request, "error", str(error))
        self._finish_step(step)

    def _commit_request(
        self,
        step: LaunchedStep,
        scheduled: ScheduledRequest,
        computed: list[tuple[Sequence, int]],
        sampled: list[Sampled],
    ) -> None:
        """One request's part of the step. `computed`: how many tokens of each of its sequences have K/V by now.

        Raises RequestFailed; K/V that led to logits that are no numbers are offered to nobody.
        """
        request = scheduled.request
        if not scheduled.completes or request.state is RequestState.FINISHED:
            self._publish(computed)
        elif request.beam_search is None:
            choices = [sampled[index] for index in step.choices[request]]
            for (sequence, _), choice in zip(computed, choices, strict=False):  # of a prompt, n from one row
                if choice.error and sequence.finish_reason is None:
                    raise BadLogits(choice.error)
            self._publish(computed)
            self._commit_samples(request, [sequence for sequence, _ in computed], choices)
        else:
            search = copy.deepcopy(request.beam_search)  # put in place once nothing can raise any more
            beams = request.sequences
            sums = [beam.cumulative_logprob for beam in beams]
            decided = search.step(step.result.logits, [step.logit_rows[beam] for beam in beams], sums)
            self._publish(computed)
            self._commit_beams(request, search, decided)

    def _publish(self, computed: list[tuple[Sequence, int]]) -> None:
        for sequence, num_tokens in computed:
            if sequence.finish_reason is None:
                self.blocks.publish(sequence, num_tokens)

    def _finish_step(self, step: LaunchedStep) -> None:
        """Seconds are counted once, though steps overlap: from the launch, or the commit of the step before."""
        now = self._clock()
        seconds, self._last_commit = now - max(step.started, self._last_commit), now
        self._emit(StepFinished(step.number, len(step.rows), step.plan.num_query_tokens, seconds))

    def _drop_step_of_nobody(self) -> None:
        """When all requests have ended, nobody will ask for what the step in flight chooses."""
        if self._in_flight and not self._requests:
            self._finish_step(self._in_flight)
            self._in_flight = None

    def _recover(self, error: BaseException) -> None:
        """After an error within a step: drop all K/V that may be half written; their requests wait to be recomputed."""
        self.blocks.take_moves()
        self._writer.forget()
        self._in_flight = None
        dropped = self.scheduler.start_over(self._requests.values())
        self._emit(StepFailed(self._step, repr(error), tuple(request.request_id for request in dropped)))

    # --- Parallel sampling (paper, section 4.4, Fig. 8) -------------------------------------------

    def _commit_samples(self, request: Request, sequences: list[Sequence], choices: list[Sampled]) -> None:
        """Append the tokens chosen for the sequences that ran; the samples of a prompt fork from it first."""
        if not request.prompt_computed:
            [parent] = sequences
            others = range(1, len(choices))
            children = self._fork(request, [(parent, choice) for choice in others])
            for stream, child in zip(others, children, strict=True):
                child.stream = stream
            sequences = [parent, *children]
            request.sequences.extend(children)
            request.prompt_computed = True
            request.first_token_time = self._clock()
        for sequence, choice in zip(sequences, choices, strict=True):
            if sequence.finish_reason is None:
                self._commit_token(request, sequence, choice)
        self._report(request)

    def _commit_token(self, request: Request, sequence: Sequence, choice: Sampled) -> None:
        """Append a token, and end the sequence if that was its last."""
        # Decoding may raise, so it comes first: a token is appended together with what follows from it.
        reason, sequence.stop_reason = self._finish_reason(request, sequence, choice.token_id)
        self._append_token(request, sequence, choice.token_id, choice.logprob)
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
        stop_token = may_stop and token in params.stop_token_ids
        ends = stop_token or (may_stop and token in self._eos_token_ids(params))
        if text := sequence.detokenizer:
            text.add(token, may_stop=may_stop and not ends)
            if text.stopped_by is not None:
                return "stop", text.stopped_by
        if ends:
            return "stop", token if stop_token else None
        return "length" if request.ends_by_length(sequence) else None, None

    # --- Beam search (paper, section 4.4, Fig. 9) -------------------------------------------------

    def _commit_beams(self, request: Request, search: BeamSearch, step: BeamStep) -> None:
        """Survivors fork their parents' tables; beams without survivors give their blocks back at once."""
        beams = list(request.sequences)
        eos = self._eos_token_ids(request.params)
        parents = [beams[move.parent] for move in step.survivors]
        first = [beam not in parents[:i] for i, beam in enumerate(parents)]
        others = [(beam, LOGITS) for beam, goes_on in zip(parents, first, strict=True) if not goes_on]
        forks = iter(self._fork(request, others))
        survivors = [beam if goes_on else next(forks) for beam, goes_on in zip(parents, first, strict=True)]
        request.beam_search = search

        for move, score in step.finished:
            parent = beams[move.parent]
            reason = "stop" if move.token_id in eos else "length"
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
        self._emit(TokenGenerated(request.request_id, sequence.sequence_id, token, logprob))

    def _end_sequence(self, request: Request, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._writer.ended(sequence)
        self._emit(SequenceFinished(request.request_id, sequence.sequence_id, reason))
        self.blocks.free(sequence)
        self.stats.sequence_ended(sequence)
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
        elif request.output_kind is RequestOutputKind.DELTA:
            self._updates.append(make_update(request))

    def _eos_token_ids(self, params: SamplingParams | BeamSearchParams) -> tuple[int, ...]:
        """The tokens that end a sequence with these parameters because the model says so."""
        return () if params.ignore_eos else self.config.eos_token_ids

    def _forbidden_at_first(self, params: SamplingParams | BeamSearchParams) -> tuple[int, ...]:
        """The tokens that must not be chosen before there are `min_tokens`, because they would end the sequence."""
        if isinstance(params, BeamSearchParams) or params.min_tokens == 0:
            return ()
        return tuple({*params.stop_token_ids, *self._eos_token_ids(params)})

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
        beam_search = None
        if isinstance(params, BeamSearchParams):
            eos = self._eos_token_ids(params)
            num_prompt = len(prompt_token_ids)
            beam_search = self._tier.beam_search(params, num_prompt, num_prompt + max_output, eos)
        seed = (params.seed or 0) if isinstance(params, SamplingParams) else 0
        return Request(
            request_id=request_id,
            order=order,
            arrival_time=self._clock(),
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            params=params,
            seed=seed & (2**64 - 1),
            forbidden_token_ids=self._forbidden_at_first(params),
            max_output_tokens=max_output,
            output_kind=output_kind,
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

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def _deliver_events(self) -> None:
        """Hand the events on in order. A listener that calls the engine adds events to the end of the same list.

        One that raises keeps no other from any event; its error is raised when all is delivered, the first of several.
        """
        if self._delivering:
            return
        self._delivering = True
        errors: list[BaseException] = []
        try:
            while self._events:
                event = self._events.popleft()
                for listener in self.listeners:
                    try:
                        listener(event)
                    except BaseException as error:
                        errors.append(error)
        finally:
            self._delivering = False
        if errors:
            raise errors[0]
