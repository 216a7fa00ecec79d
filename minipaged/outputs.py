"""What a user gets back: a RequestOutput at the end, and on the way to it a RequestUpdate for each step that told more.

Each has one part for each sequence: CompletionOutput, CompletionUpdate. Names are vLLM's.
"""

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
    """For each token the likeliest at its place, or those of `logprob_token_ids`, and the token itself, likeliest
    first; None when not asked for."""
    finish_reason: str
    """"stop" (end of sequence, stop string, stop token), "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for whatever else did."""
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
    """False for a request that was aborted, or that failed."""
    num_cached_tokens: int
    """Prompt tokens whose K/V came from the prefix cache when the request was first admitted."""
    metrics: RequestMetrics
    error: str | None = None
    """Why the request failed; its outputs are what it had produced until then."""
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
    """For each token of the prompt the likeliest at its place and the token itself; the first has None. None when not
    asked for. Of a request that was cut short, as far as its prompt had been computed."""


# Not frozen: a frozen dataclass takes four times as long to make, and a step makes two of these for each request.


@dataclass(slots=True)
class CompletionUpdate:
    """What is new of one sequence. All its updates joined are its CompletionOutput."""

    index: int
    new_token_ids: tuple[int, ...]
    new_text: str
    """What can be shown by now: incomplete characters wait for the next token, as does what may become a stop string.
    The last update brings the rest."""
    new_logprobs: tuple[dict[int, float], ...] | None
    """As many as new tokens; None when not asked for."""
    finish_reason: str | None
    """None while it goes on."""
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestUpdate:
    """What is new of one request since its last update.

    The beams of a search have nothing that stays until it is over: their one update comes at the end.
    """

    request_id: str
    completions: tuple[CompletionUpdate, ...]
    """Of those sequences of which there is something new."""
    output: RequestOutput | None
    """All that it produced, once it has ended: finished, aborted or failed."""
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None = None
    """The prompt_logprobs of its RequestOutput, in the first update that has tokens; None in every other one."""
