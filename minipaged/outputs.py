"""What a user gets back: RequestOutput, with one CompletionOutput for each sequence. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    """Position among the request's outputs; for beam search 0 is the best."""
    text: str
    """The decoded output, a matched stop string cut off; "" when the engine has no tokenizer."""
    token_ids: tuple[int, ...]
    """Every generated token, those that ended the sequence included."""
    cumulative_logprob: float
    """Sum of the natural-log probabilities of `token_ids`."""
    logprobs: tuple[dict[int, float], ...] | None
    """For each token the likeliest alternatives and the token itself; None when not asked for."""
    finish_reason: str
    """"stop" (end of sequence, stop string, stop token), "length" or "abort"."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the end of sequence, length and abort."""
    score: float | None = None
    """Beam search only: the logprob sum divided by length ** length_penalty."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock: that of `time.perf_counter`, unless the engine was given another."""

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
    """The prompt's text, where it was given as text."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    """False only for a request that was aborted."""
    num_cached_tokens: int
    """Prompt tokens whose K/V came from the prefix cache when the request was first admitted."""
    metrics: RequestMetrics
