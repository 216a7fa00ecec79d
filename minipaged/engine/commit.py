"""The commit: adding the results of a step to its requests (paper, section 4.4).

Tokens are appended, sequences fork and finish, full blocks are published, blocks are given back, and updates are made
for users who read along. Requests are committed one after another, and for each of them everything is decided before
anything is changed. So an error in one request (logits that are not finite, tokens that cannot be decoded) ends that
request and no other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from minipaged.contracts import BeamSearch, BeamStep, Sampled, num_standing
from minipaged.engine.batch import LaunchedStep, ScheduledRequest
from minipaged.engine.detokenizer import Detokenizer
from minipaged.engine.memory import Memory
from minipaged.engine.memory_use import slot_steps_reserved
from minipaged.engine.results import make_output, make_update
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.sequence import Hypothesis, Request, RequestState, SequenceState
from minipaged.engine.step_writer import StepWriters
from minipaged.errors import BadLogits, DetokenizerFailed, RequestFailed
from minipaged.events import (
    BeamFinished,
    BlocksRolledBack,
    Emit,
    RequestFinished,
    SequenceFinished,
    TokenGenerated,
    TokensAccepted,
    TokensDrafted,
)
from minipaged.outputs import RequestUpdate
from minipaged.params import SamplingParams
from minipaged.steps import LOGITS, TO_DRAFT

FinishReason = Literal["stop", "length", "abort", "error", "dropped"]


class Committer:
    """Commits steps. `requests`: all requests of an engine, by id; those that end are removed."""

    def __init__(
        self,
        requests: dict[str, Request],
        scheduler: Scheduler,
        blocks: Memory,
        writer: StepWriters,
        sequence_ids: Iterator[int],
        emit: Emit,
        clock: Callable[[], float],
    ) -> None:
        self.updates: list[RequestUpdate] = []
        """Updates that `Engine.take_updates` has not returned yet."""
        self.note_drafts: Callable[[SequenceState, int, int], None] = lambda sequence, drafted, accepted: None
        """Called with a sequence whose drafts were verified, and the numbers of drafted and accepted tokens."""
        self._num_generated = 0
        self._requests = requests
        self._scheduler = scheduler
        self._blocks = blocks
        self._writer = writer
        self._sequence_ids = sequence_ids
        self._emit = emit
        self._clock = clock

    def take_num_generated(self) -> int:
        """Return the number of tokens appended since the last call."""
        number, self._num_generated = self._num_generated, 0
        return number

    def commit(self, step: LaunchedStep) -> None:
        """Add the step's results to its requests.

        Sequences that ended while the step was in flight (with the token before, or by an abort) ignore them. Their
        blocks have already been given back. The device works in order, so a new holder of such a block writes to it
        only after this step.
        """
        sampled = list(step.result.choices)  # this is where the host waits for the device
        for scheduled, first_choice in zip(step.plan.scheduled, step.plan.first_choices, strict=True):
            self.commit_part(step, scheduled, sampled[first_choice : first_choice + scheduled.num_sampled])

    def commit_part(self, step: LaunchedStep, scheduled: ScheduledRequest, choices: list[Sampled]) -> None:
        """Commit one request's part of the step, with the tokens chosen for it. If that fails, the request ends."""
        try:
            self._commit_request(step, scheduled, choices)
        except RequestFailed as error:
            self.cut_short(scheduled.request, "error", str(error))

    def _commit_request(self, step: LaunchedStep, scheduled: ScheduledRequest, choices: list[Sampled]) -> None:
        """Commit one request's part, or raise RequestFailed. K/V that led to invalid logits are never published."""
        request = scheduled.request
        if request.prompt_logprobs is not None and request.state is not RequestState.FINISHED:
            self._keep_prompt_logprobs(step, scheduled, request.prompt_logprobs)
        if not scheduled.completes or request.state is RequestState.FINISHED:
            self._publish(step, scheduled)
        elif scheduled.drafts:
            self._commit_drafted(request, scheduled, choices, step.result.drafted)
        elif request.beam_search is None:
            for (sequence, _), choice in zip(scheduled.work, choices, strict=False):  # n choices for a prompt's row
                if choice.error and sequence.finish_reason is None:
                    raise BadLogits(choice.error)
            self._publish(step, scheduled)
            self._commit_samples(request, scheduled.work, choices)
        else:
            search = copy.deepcopy(request.beam_search)  # replaces the original once nothing can raise any more
            rows = range(scheduled.first_logits, scheduled.first_logits + len(scheduled.work))
            decided = search.step(step.result.logits, rows, [beam.cumulative_logprob for beam in request.sequences])
            self._publish(step, scheduled)
            self._commit_beams(request, search, decided)

    def _keep_prompt_logprobs(
        self, step: LaunchedStep, scheduled: ScheduledRequest, known: list[dict[int, float]]
    ) -> None:
        """Add the step's log-probabilities of prompt tokens to `known`; a step that computes tokens again adds nothing.

        Raises RequestFailed if log-probabilities are missing, because not every runner can report them.
        """
        request = scheduled.request
        if request.prompt_computed:
            return
        [(sequence, num_tokens)] = scheduled.work
        start = step.plan.rows[scheduled.first_row].start  # its first token predicts the second
        assert start <= len(known), "such a request takes nothing from the prefix cache"
        told = step.result.prompt_logprobs.get(sequence.sequence_id, ())
        for one in told[len(known) - start :]:
            if one.error is not None or one.top_logprobs is None:
                raise BadLogits(one.error)
            known.append(one.top_logprobs)
        if len(known) < min(start + num_tokens, len(request.prompt_token_ids) - 1):
            raise RequestFailed("this runner cannot report log-probabilities of prompts; leave out prompt_logprobs")

    def _publish(self, step: LaunchedStep, scheduled: ScheduledRequest) -> None:
        """Publish to the prefix cache the blocks whose tokens all have K/V now, and give back those that no layer sees
        any more."""
        if self._blocks.prefix_cache is None and not self._blocks.has_windows:
            return
        for i, (sequence, _) in enumerate(scheduled.work, scheduled.first_row):
            # All known tokens, if it ran only the latest. Otherwise its row has the number.
            num_computed = len(sequence.tokens) if scheduled.decodes else step.plan.rows[i].stop
            if sequence.finish_reason is not None:
                continue
            if num_computed // self._blocks.block_size != sequence.num_published:
                self._blocks.publish(sequence, num_computed)
            if self._blocks.has_windows:
                self._blocks.give_back(scheduled.request, sequence, num_computed)

    # --- Parallel sampling (paper, section 4.4, Fig. 8) -------------------------------------------

    def _commit_samples(self, request: Request, work: list[tuple[SequenceState, int]], choices: list[Sampled]) -> None:
        """Append the tokens chosen for the sequences that ran. After a prompt, its other samples fork first."""
        if request.prompt_computed:
            sequences = [sequence for sequence, _ in work]
        else:
            [(parent, _)] = work
            sequences = [parent, *self._fork_samples(request, parent, len(choices))]
        for sequence, choice in zip(sequences, choices, strict=True):
            if sequence.finish_reason is None:
                self._commit_token(request, sequence, choice)
        self.report(request)

    def _commit_drafted(
        self,
        request: Request,
        scheduled: ScheduledRequest,
        choices: list[Sampled],
        by_runner: Mapping[int, tuple[int, ...]],
    ) -> None:
        """Append the drafted tokens that stand, and one more, to each sequence; give back the slots of the others.
        `by_runner`: by sequence, the tokens that the runner's draft model has guessed."""
        own, first = list[tuple[SequenceState, tuple[int, ...], list[Sampled]]](), 0
        for sequence, _ in scheduled.work:
            drafted = by_runner.get(sequence.sequence_id, scheduled.drafted(sequence))
            if TO_DRAFT in drafted:
                raise RequestFailed("this runner has no draft model; leave speculative_config out")
            chosen = choices[first : first + len(drafted) + 1]
            num_accepted = num_standing(drafted, chosen)
            if chosen[num_accepted].error:
                raise BadLogits(chosen[num_accepted].error)
            own.append((sequence, drafted, chosen[: num_accepted + 1]))
            first += len(chosen)
        for sequence, drafted, chosen in own:
            num_drafted = len(drafted)
            if sequence.sequence_id in by_runner and self._emit.heard:
                self._emit(TokensDrafted(sequence.sequence_id, drafted))
            if num_drafted:
                self._emit(TokensAccepted(sequence.sequence_id, num_drafted, len(chosen) - 1))
            if num_refused := num_drafted + 1 - len(chosen):
                self._roll_back(sequence, sequence.table.num_tokens - num_refused)
            self.note_drafts(sequence, num_drafted, len(chosen) - 1)
            for choice in chosen:
                self._blocks.publish(sequence, len(sequence.tokens))  # all that are known so far have K/V
                self._commit_token(request, sequence, choice)
                if sequence.finish_reason is not None:
                    break
        self.report(request)

    def _roll_back(self, sequence: SequenceState, num_tokens: int) -> None:
        """Give back the slots after the sequence's first `num_tokens` tokens."""
        given_back = self._blocks.trim(sequence, num_tokens)
        if given_back:
            self._writer.table_changed(sequence, len(sequence.table.blocks))
        self._emit(BlocksRolledBack(sequence.sequence_id, num_tokens, given_back))

    def _fork_samples(self, request: Request, parent: SequenceState, n: int) -> list[SequenceState]:
        """Fork the other samples of a prompt that has just been computed."""
        children = self._fork(request, [(parent, choice) for choice in range(1, n)])
        for index, child in enumerate(children, 1):
            child.index = index
        request.sequences.extend(children)
        request.prompt_computed = True
        request.first_token_time = self._clock()
        return children

    def _commit_token(self, request: Request, sequence: SequenceState, choice: Sampled) -> None:
        """Append a token, and end the sequence if the token was its last."""
        # Decoding, keeping a block and the grammar may raise, so they come first: nothing has been changed then.
        reason, sequence.stop_reason = self._finish_reason(request, sequence, choice.token_id)
        if sequence.grammar and reason != "stop" and sequence.grammar.consume(choice.token_id):
            reason = "stop"
        self.append_token(request, sequence, choice.token_id, choice.logprob)
        if sequence.logprobs is not None and choice.top_logprobs is not None:
            sequence.logprobs.append(choice.top_logprobs)
        if reason:
            self._finish_text(request, sequence)
            self._end_sequence(request, sequence, reason)

    def _finish_reason(
        self, request: Request, sequence: SequenceState, token: int
    ) -> tuple[FinishReason | None, int | str | None]:
        """Add the next token to the sequence's text. Returns why the sequence ends here (or None), and at which
        stop. Lets others find its last block then."""
        params = request.params
        assert isinstance(params, SamplingParams)
        may_stop = len(sequence.output_token_ids) + 1 >= params.min_tokens
        ends = may_stop and token in request.final_token_ids
        too_long = request.ends_by_length(sequence)
        if ends or too_long:
            self._blocks.keep_last(sequence)
        if text := sequence.detokenizer:
            if text.stopped_by is None:  # it has stopped already if keeping the block failed then
                text.add(token, may_stop=may_stop and not ends)
            if text.stopped_by is not None:
                self._blocks.keep_last(sequence)
                return "stop", text.stopped_by
        if ends:
            return "stop", token if token in params.stop_token_ids else None
        return "length" if too_long else None, None

    # --- Beam search (paper, section 4.4, Fig. 9) -------------------------------------------------

    def _commit_beams(self, request: Request, search: BeamSearch, step: BeamStep) -> None:
        """Fork the tables of the survivors' parents; beams without survivors give their blocks back."""
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
            self.append_token(request, beam, move.token_id, move.cumulative_logprob - beam.cumulative_logprob)
            self._writer.told(beam)
            beam.cumulative_logprob = move.cumulative_logprob  # the sum as beam search has rounded it
        if not survivors:
            self._finish_request(request, "finished")

    # --- Sequences --------------------------------------------------------------------------------

    def _fork(self, request: Request, parents: list[tuple[SequenceState, int]]) -> list[SequenceState]:
        """Fork a child from each parent, sharing all its blocks; a parent may occur twice. If one fork fails, all are
        undone.

        The number with each parent says which of its choices is the child's newest token (LOGITS: none of them).
        """
        children: list[SequenceState] = []
        try:
            for parent, choice in parents:
                child = SequenceState(
                    next(self._sequence_ids),
                    list(parent.tokens),
                    list(parent.output_token_ids),
                    self._blocks.new_table(),
                    lane=parent.lane,
                    salt=parent.salt,
                    cumulative_logprob=parent.cumulative_logprob,
                    logprobs=None if parent.logprobs is None else list(parent.logprobs),
                    detokenizer=parent.detokenizer.fork() if parent.detokenizer else None,
                    grammar=parent.grammar.fork() if parent.grammar else None,
                )
                self._blocks.fork(request, parent, child)
                self._writer.forked(child, parent, choice)
                children.append(child)
        except BaseException:
            for child in children:
                self._emit(SequenceFinished(request.request_id, child.sequence_id, "dropped"))
                self._free(child)
            raise
        return children

    def append_token(self, request: Request, sequence: SequenceState, token: int, logprob: float) -> None:
        """Append one token to the sequence."""
        sequence.pending = False
        sequence.tokens.append(token)
        sequence.output_token_ids.append(token)
        sequence.cumulative_logprob += logprob
        self._num_generated += 1
        if self._emit.heard:
            self._emit(TokenGenerated(request.request_id, sequence.sequence_id, token, logprob))

    def _end_sequence(self, request: Request, sequence: SequenceState, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        reserved = slot_steps_reserved(sequence)
        self._emit(SequenceFinished(request.request_id, sequence.sequence_id, reason, reserved))
        self._free(sequence)
        request.sequences.remove(sequence)
        request.done.append(sequence)

    def _free(self, sequence: SequenceState) -> None:
        """Give back the blocks of a sequence that has ended."""
        try:
            self._blocks.free(sequence)
        finally:
            self._writer.ended(sequence)  # afterwards, because it drops what `free` tells of the table

    def _finish_text(self, request: Request, sequence: SequenceState) -> None:
        """Complete the sequence's text: add what was held back, or make all of it now. Raises DetokenizerFailed."""
        if sequence.detokenizer:
            sequence.detokenizer.finish()
        elif request.decode:
            sequence.detokenizer = Detokenizer.of_all(
                sequence.output_token_ids, request.decode, request.prompt_token_ids, request.prompt
            )

    # --- Requests ---------------------------------------------------------------------------------

    def report(self, request: Request) -> None:
        """Make an update: always when the request ends, and after each step if its user reads along."""
        if not request.sequences:
            self._finish_request(request, "finished")
        elif request.reads_along:
            self.updates.append(make_update(request))

    def cut_short(self, request: Request, reason: Literal["abort", "error"], error: str | None = None) -> None:
        """End a request early: aborted, or failed with `error`."""
        for sequence in list(request.sequences):
            try:
                if request.beam_search is None:
                    self._finish_text(request, sequence)
            except DetokenizerFailed as failed:
                reason, error = "error", error or str(failed)
            sequence.stop_reason = None
            self._end_sequence(request, sequence, reason)
        self._finish_request(request, "aborted" if reason == "abort" else "failed", error)

    def _finish_request(
        self, request: Request, reason: Literal["finished", "aborted", "failed"], error: str | None = None
    ) -> None:
        self._scheduler.remove(request)
        del self._requests[request.request_id]
        request.state = RequestState.FINISHED
        now, finished = self._clock(), reason == "finished"
        try:
            output = make_output(request, now, finished=finished, error=error)
        except DetokenizerFailed as failed:  # beams get their text only here
            reason, request.decode = "failed", None
            output = make_output(request, now, finished=False, error=error or str(failed))
        self._emit(RequestFinished(request.request_id, reason))
        self.updates.append(make_update(request, output))
