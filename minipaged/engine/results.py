"""The results of a request, as its user receives them: updates with what is new, and the output once it has ended."""

from __future__ import annotations

from collections.abc import Iterator

from minipaged.engine.detokenizer import text_of
from minipaged.engine.sequence import Request, SequenceState
from minipaged.outputs import CompletionOutput, CompletionUpdate, RequestMetrics, RequestOutput, RequestUpdate
from minipaged.params import BeamSearchParams


def make_update(request: Request, output: RequestOutput | None = None) -> RequestUpdate:
    """Return what is new of the request since its last update. `output`: its whole output, if it has ended."""
    if request.beam_search:
        beams = output.outputs if output else ()
        return RequestUpdate(request.request_id, tuple(map(_whole_beam, beams)), output)
    prompt_logprobs = None
    if request.prompt_logprobs is not None and request.prompt_computed:
        is_told = any(each.num_reported for each in (*request.sequences, *request.done))  # sent with the first tokens
        prompt_logprobs = None if is_told else _of_prompt(request)
    news = [_news(sequence) for sequence in request.sequences if sequence.num_reported < len(sequence.output_token_ids)]
    if len(request.done) > request.num_done_reported:
        news += map(_news, request.done[request.num_done_reported :])
        request.num_done_reported = len(request.done)
    return RequestUpdate(request.request_id, tuple(news), output, prompt_logprobs)


def _of_prompt(request: Request) -> tuple[dict[int, float] | None, ...] | None:
    """Log-probabilities of the prompt's tokens, as far as they are known; the first token has none."""
    return None if request.prompt_logprobs is None else (None, *request.prompt_logprobs)


def _news(sequence: SequenceState) -> CompletionUpdate:
    """The update of one sequence, nearly always a single token. Called per step and sequence, so it must be fast."""
    token_ids, since = sequence.output_token_ids, sequence.num_reported
    sequence.num_reported = count = len(token_ids)
    return CompletionUpdate(
        sequence.index,
        (token_ids[-1],) if count == since + 1 else tuple(token_ids[since:]),
        sequence.detokenizer.take() if sequence.detokenizer else "",
        None if sequence.logprobs is None else tuple(sequence.logprobs[since:]),
        sequence.finish_reason,
        sequence.stop_reason,
    )


def _whole_beam(beam: CompletionOutput) -> CompletionUpdate:
    return CompletionUpdate(beam.index, beam.token_ids, beam.text, None, beam.finish_reason, None)


def make_output(request: Request, finished_time: float, *, finished: bool, error: str | None) -> RequestOutput:
    """Return the output of a request whose sequences have all ended. Raises DetokenizerFailed, for beams."""
    outputs = tuple(_beam_outputs(request) if request.beam_search else _sample_outputs(request))
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=outputs,
        finished=finished,
        num_cached_tokens=request.num_cached_tokens or 0,
        metrics=RequestMetrics(
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            finished_time=finished_time,
            num_preemptions=request.num_preemptions,
        ),
        error=error,
        prompt_logprobs=_of_prompt(request),
    )


def _sample_outputs(request: Request) -> Iterator[CompletionOutput]:
    for sequence in sorted(request.done, key=lambda s: s.index):
        assert sequence.finish_reason is not None
        yield CompletionOutput(
            index=sequence.index,
            text=sequence.detokenizer.text if sequence.detokenizer else "",
            token_ids=tuple(sequence.output_token_ids),
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=None if sequence.logprobs is None else tuple(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )


def _beam_outputs(request: Request) -> Iterator[CompletionOutput]:
    """The best finished sequences; if the search was cut short, the best of those that had finished."""
    assert isinstance(request.params, BeamSearchParams)
    best = sorted(request.hypotheses, key=lambda h: -h.score)[: request.params.beam_width]
    for index, hypothesis in enumerate(best):
        yield CompletionOutput(
            index=index,
            text=text_of(hypothesis.tokens, request.decode, request.prompt_token_ids, request.prompt)
            if request.decode
            else "",
            token_ids=hypothesis.tokens,
            cumulative_logprob=hypothesis.cumulative_logprob,
            logprobs=None,
            finish_reason=hypothesis.finish_reason,
            score=hypothesis.score,
        )
