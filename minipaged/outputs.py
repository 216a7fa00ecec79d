"""The results of a request: a RequestOutput at its end, and before it a RequestUpdate for each step with news.

Both have a part for each sequence: CompletionOutput, CompletionUpdate. Names are vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    """Index among the request's outputs; in a beam search, 0 is the best."""
    text: str
    """The decoded output, with a matched stop string cut off; "" if the engine has no tokenizer."""
    token_ids: tuple[int, ...]
    """All generated tokens, including those that ended the sequence."""
    cumulative_logprob: float
    """Sum of the natural-log probabilities of `token_ids`."""
    logprobs: tuple[dict[int, float], ...] | None
    """For each generated token, the log-probabilities of the token itself and of the likeliest tokens at its position
    (or of `logprob_token_ids`), likeliest first. None if the request does not want them."""
    finish_reason: str
    """"stop" (end of sequence, stop string, stop token), "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the sequence; None if something else did."""
    score: float | None = None
    """Beam search only: the logprob sum divided by length ** length_penalty."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds of the engine's clock, which is `time.perf_counter` unless the engine was given another."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All that one request produced."""

    request_id: str
    prompt: str | None
    """The prompt's text, if it was given as text."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    """False if the request was aborted or failed."""
    num_cached_tokens: int
    """Prompt tokens whose K/V came from the prefix cache when the request was first admitted."""
    metrics: RequestMetrics
    error: str | None = None
    """The reason why the request failed, or None. Its outputs hold what it had generated before."""
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
    """For each prompt token, the log-probabilities of the token itself and of the likeliest tokens at its position; the
    first token has None. None if the request does not want them. A request that was cut short has entries only for the
    computed part of its prompt."""


# Not frozen: a frozen dataclass takes four times as long to make, and a step makes two of these per request.


@dataclass(slots=True)
class CompletionUpdate:
    """New output of one sequence. All its updates, joined, are its CompletionOutput."""

    index: int
    new_token_ids: tuple[int, ...]
    new_text: str
    """The new text that can be shown already. Incomplete characters, and text that may become a stop string, wait for
    more tokens; the last update has the rest."""
    new_logprobs: tuple[dict[int, float], ...] | None
    """The log-probabilities of each new token; None if the request does not want them."""
    finish_reason: str | None
    """The reason why the sequence ended; None while it goes on."""
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestUpdate:
    """New output of one request since its last update.

    A beam search has one update, at its end, because until then no beam is certain to stay.
    """

    request_id: str
    completions: tuple[CompletionUpdate, ...]
    """An update for each sequence that has new output."""
    output: RequestOutput | None
    """The whole output once the request has ended (finished, aborted or failed); None before."""
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
    """The prompt_logprobs of its RequestOutput, in the first update that has tokens; None in all others."""
