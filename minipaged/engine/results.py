"""What a request that ended has produced, as its user gets it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike

from minipaged.engine.detokenizer import Decode
from minipaged.engine.sequence import Request
from minipaged.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minipaged.params import BeamSearchParams, SamplingParams


def make_output(request: Request, decode: Decode | None, finished_time: float, *, finished: bool) -> RequestOutput:
    """The output of a request all of whose sequences have ended; `finished` is False when it was aborted."""
    outputs = _beam_outputs(request, decode) if request.beam_search else _sample_outputs(request, decode)
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=tuple(outputs),
        finished=finished,
        num_cached_tokens=request.num_cached_tokens or 0,
        metrics=RequestMetrics(
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            finished_time=finished_time,
            num_preemptions=request.num_preemptions,
        ),
    )


def _sample_outputs(request: Request, decode: Decode | None) -> Iterator[CompletionOutput]:
    assert isinstance(request.params, SamplingParams)
    for sequence in sorted(request.done, key=lambda s: s.stream):
        assert sequence.finish_reason is not None
        yield CompletionOutput(
            index=sequence.stream,
            text=_text(sequence.output_token_ids, decode) if sequence.text is None else sequence.text,
            token_ids=tuple(sequence.output_token_ids),
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=None if request.params.logprobs is None else tuple(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )


def _beam_outputs(request: Request, decode: Decode | None) -> Iterator[CompletionOutput]:
    """The best finished sequences; of an aborted search those that had finished."""
    assert isinstance(request.params, BeamSearchParams)
    best = sorted(request.hypotheses, key=lambda h: -h.score)[: request.params.beam_width]
    for index, hypothesis in enumerate(best):
        yield CompletionOutput(
            index=index,
            text=_text(hypothesis.tokens, decode),
            token_ids=hypothesis.tokens,
            cumulative_logprob=hypothesis.cumulative_logprob,
            logprobs=None,
            finish_reason=hypothesis.finish_reason,
            score=hypothesis.score,
        )


def _text(token_ids: ListLike[int], decode: Decode | None) -> str:
    return decode(token_ids) if decode else ""
