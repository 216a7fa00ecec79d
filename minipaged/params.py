"""What a user may set: SamplingParams, BeamSearchParams, EngineConfig. Validated when made, then immutable.

Names and defaults are vLLM's wherever vLLM has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Literal

from minipaged.errors import InvalidRequest

PreemptionMode = Literal["swap", "recompute", "auto"]
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def _take_integers(params: object, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Make these fields ints (NumPy's integers become Python's); those in `optional` may be None."""
    for name in (*names, *optional):
        value = getattr(params, name)
        if value is None and name in optional:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InvalidRequest(f"{name} is {value!r}; it must be a whole number")
        object.__setattr__(params, name, int(value))


def _take_numbers(params: object, *names: str) -> None:
    """Make these fields floats."""
    for name in names:
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidRequest(f"{name} is {value!r}; it must be a number")
        object.__setattr__(params, name, float(value))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request. Raises InvalidRequest (a ValueError) for a value out of range."""

    n: int = 1
    """How many sequences to sample for the prompt; they share its blocks (paper, Fig. 8)."""
    temperature: float = 1.0
    """0 is greedy: the likeliest token, always."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach this sum; 1 keeps all."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; 0 keeps all."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs and on either tier, up to the rounding of the logits.
    None: the engine draws one, another for each request."""
    stop: str | Sequence[str] = ()
    """Strings that end a sequence; they are cut off its text. None is taken for none."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a sequence; kept in its `token_ids`."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: until `max_model_len`."""
    min_tokens: int = 0
    """Tokens to generate before anything may end the sequence."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report at each step, besides the chosen one; None: no report."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted for each time the token was already generated."""
    repetition_penalty: float = 1.0
    """Divides positive logits (multiplies negative ones) of tokens in the prompt or the output."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        _require(all(isinstance(string, str) for string in stop), f"stop is {self.stop!r}; it must hold strings")
        object.__setattr__(self, "stop", stop)
        _require(
            all(isinstance(token, Integral) and not isinstance(token, bool) for token in self.stop_token_ids or ()),
            f"stop_token_ids is {self.stop_token_ids}; token ids are whole numbers",
        )
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids or ()))
        _take_integers(self, "n", "top_k", "min_tokens", optional=("seed", "max_tokens", "logprobs"))
        _take_numbers(self, "temperature", "top_p", "min_p", *PENALTIES)
        _require(self.n >= 1, f"n is {self.n}; it must be 1 or more")
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number",
        )
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 keeps all tokens)")
        _require(self.top_k >= -1, f"top_k is {self.top_k}; it must be 1 or more, or 0 to keep all tokens")
        _require(0 <= self.min_p <= 1, f"min_p is {self.min_p}; it must be between 0 and 1 (0 keeps all tokens)")
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max_tokens is {self.max_tokens}; it must be 1 or more, or None for as many as fit",
        )
        _require(self.min_tokens >= 0, f"min_tokens is {self.min_tokens}; it must be 0 or more")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}",
        )
        _require(
            self.logprobs is None or self.logprobs >= 0,
            f"logprobs is {self.logprobs}; it must be 0 or more, or None for no report",
        )
        _require("" not in self.stop, "stop holds an empty string, which would end every sequence at once; drop it")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, f"{name} is {value}; it must be between -2 and 2 (0 is off)")
        _require(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1 is off)",
        )

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam search for one request, with the rules of transformers' `generate(num_beams=...)`."""

    beam_width: int = 4
    """How many beams run, and how many sequences are returned."""
    max_tokens: int = 16
    """Tokens to generate at most."""
    length_penalty: float = 1.0
    """score = sum of logprobs / length ** length_penalty: above 0 favours long sequences, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """True: stop at `beam_width` finished sequences. False: stop when no running beam can beat them, going by
    its present length. "never": by the best length it could still reach."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""

    def __post_init__(self) -> None:
        _take_integers(self, "beam_width", "max_tokens")
        _take_numbers(self, "length_penalty")
        _require(self.beam_width >= 1, f"beam_width is {self.beam_width}; it must be 1 or more")
        _require(self.max_tokens >= 1, f"max_tokens is {self.max_tokens}; it must be 1 or more")
        _require(math.isfinite(self.length_penalty), f"length_penalty is {self.length_penalty}; it must be finite")
        _require(
            self.early_stopping in (True, False, "never"),
            f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'",
        )


class RequestOutputKind(Enum):
    """When a request is told of."""

    DELTA = "delta"
    """After each step, with what is new."""
    FINAL_ONLY = "final_only"
    """When it has ended, with everything. Its text is made only then, unless it has stop strings."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The sizes and policies of one engine, all known (LLM fills in what its user left open)."""

    num_blocks: int
    """Blocks in the KV cache's pool."""
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    vocab_size: int
    """Tokens are numbers in range(vocab_size)."""
    block_size: int = 16
    """Tokens a block, 1 to 256."""
    num_swap_blocks: int = 0
    """Blocks in the host pool that swapping uses."""
    preemption: PreemptionMode = "auto"
    """How to make room: copy blocks to the host, drop and recompute them, or whichever costs less."""
    enable_prefix_caching: bool = True
    max_num_seqs: int = 256
    """Sequences in one batch at most."""
    max_num_batched_tokens: int = 2048
    """Query tokens in one batch at most; a longer prompt runs in chunks."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence tokens."""
    seed: int = 0
    """Where requests without a seed get theirs from."""
    async_scheduling: bool = False
    """Launch the next step before the tokens of this one are known to the host, where no request needs them there."""
    debug: bool = False
    """Fill freed and new blocks with NaN and check every invariant after every step."""

    def __post_init__(self) -> None:
        sizes = ("num_blocks", "max_model_len", "vocab_size", "max_num_seqs", "max_num_batched_tokens")
        _take_integers(self, "block_size", "num_swap_blocks", "seed", *sizes)
        for name in ("enable_prefix_caching", "async_scheduling", "debug"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} is {value!r}; it must be True or False")
        _require(1 <= self.block_size <= 256, f"block_size is {self.block_size}; it must be between 1 and 256")
        for name in sizes:
            value = getattr(self, name)
            _require(value >= 1, f"{name} is {value}; it must be 1 or more")
        _require(self.num_swap_blocks >= 0, f"num_swap_blocks is {self.num_swap_blocks}; it must be 0 or more")
        _require(
            self.preemption in ("swap", "recompute", "auto"),
            f"preemption is {self.preemption!r}; choose 'swap', 'recompute' or 'auto'",
        )
        _require(
            self.preemption != "swap" or self.num_swap_blocks > 0,
            "preemption is 'swap' but num_swap_blocks is 0; give the host pool some blocks or choose 'recompute'",
        )
