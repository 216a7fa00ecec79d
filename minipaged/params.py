"""The settings of requests and engines: SamplingParams, BeamSearchParams, EngineConfig. All are checked and immutable.

A setting is declared once: its name, type, default and bounds, with its help text below. The arguments of `LLM`
(`settings.py`), the command line's options with their help (`options.py`) and the errors for bad values follow from
that declaration.

Names and defaults are vLLM's wherever vLLM has one.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from minipaged.api.vllm_arguments import (
    SAMPLING_ARGUMENTS,
    SPECULATIVE_KEYS,
    STRUCTURED_OUTPUTS_ARGUMENTS,
    NotHere,
    take_own,
)
from minipaged.errors import InvalidRequest

PreemptionMode = Literal["swap", "recompute", "auto"]
KVCacheDtype = Literal["auto", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers that a setting accepts. As a string, they complete the error message "it must be ..."."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    note: str = ""

    def hold(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        most = f" and at most {self.at_most}" if self.at_most is not None else ""
        if self.above is not None:
            words = f"above {self.above}{most}"
        else:
            words = f"between {self.at_least} and {self.at_most}" if most else f"{self.at_least} or more"
        return f"{words} ({self.note})" if self.note else words


def setting(default: Any = MISSING, **bounds: Any) -> Any:
    """Make a dataclass field for a number within `Bounds`, as in `setting(16, at_least=1, at_most=256)`."""
    return field(default=default, metadata={"bounds": Bounds(**bounds)})


def check(params: object) -> None:
    """Raise InvalidRequest for a value that its field's type or bounds exclude; turn NumPy's numbers into Python's."""
    for name, kinds, bounds in _checked_fields(type(params)):  # type: ignore[arg-type]  # a class can be hashed
        value = getattr(params, name)
        if value is None and NoneType in kinds:
            continue
        if wrong := _what_is_wrong(value, kinds, bounds):
            raise InvalidRequest(f"{name} is {_told(value)}; {wrong}")
        if type(value) not in kinds and (int in kinds or float in kinds):
            object.__setattr__(params, name, int(value) if int in kinds else float(value))


@cache
def _checked_fields(params: type) -> list[tuple[str, tuple[Any, ...], Bounds | None]]:
    """The name, types (or choices) and bounds of each field that is a number, a bool or a choice."""
    found = []
    hints = get_type_hints(params)
    for each in fields(params):
        hint = hints[each.name]
        is_choice = get_origin(hint) is Literal
        kinds = get_args(hint) if is_choice or get_origin(hint) is UnionType else (hint,)
        if is_choice or set(kinds) <= {bool, int, float, NoneType}:
            found.append((each.name, kinds, each.metadata.get("bounds")))
    return found


def _what_is_wrong(value: Any, kinds: tuple[Any, ...], bounds: Bounds | None) -> str:
    """Say what a value should be instead; an empty string if it is right."""
    if bool in kinds:
        return "" if isinstance(value, bool) else "it must be True or False"
    if int in kinds:
        if isinstance(value, bool) or not isinstance(value, Integral):
            return "it must be a whole number"
        return "" if bounds is None or bounds.hold(int(value)) else f"it must be {bounds}"
    if float in kinds:
        if isinstance(value, bool) or not isinstance(value, Real):
            return f"it must be a number {bounds}" if bounds and bounds.at_most is not None else "it must be a number"
        if not math.isfinite(value) and (bounds is None or bounds.at_most is None):
            return "it must be finite"
        return "" if bounds is None or bounds.hold(float(value)) else f"it must be {bounds}"
    *choices, last = map(repr, kinds)
    return "" if value in kinds else f"choose {', '.join(choices)} or {last}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20


def _told(value: object) -> str:
    """Return a value for an error message, in at most about 200 characters."""
    told = _SHORT.repr(value)
    return told if len(told) <= 200 else told[:200] + "..."


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)


def _strings(name: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Turn one string or several into a tuple; None becomes an empty one."""
    strings = (given,) if isinstance(given, str) or not isinstance(given, Iterable | None) else tuple(given or ())
    if not all(isinstance(string, str) for string in strings):
        raise InvalidRequest(f"{name} is {_told(given)}; it must hold strings")
    return strings


def _tokens(name: str, given: Iterable[int] | None) -> tuple[int, ...]:
    """Turn token ids, of any integer type, into a tuple of ints; None becomes an empty one."""
    tokens = tuple(given) if isinstance(given, Iterable) else () if given is None else (given,)
    if not (isinstance(given, Iterable | None) and all(map(_is_whole, tokens))):
        raise InvalidRequest(f"{name} is {_told(given)}; token ids are whole numbers")
    return tuple(map(int, tokens))


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


MOST_BIAS = 100
"""The largest `logit_bias`; it makes a token nearly certain, or nearly impossible."""


def _biases(given: Mapping[int, float] | Iterable[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    """Turn a mapping or pairs into (token, bias) pairs, sorted by token."""
    try:
        pairs = dict(given or ())
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"logit_bias is {_told(given)}; it must map tokens to numbers, as in {{42: -100.0}}"
        ) from None
    for token, bias in pairs.items():
        _require(_is_whole(token), f"logit_bias has the key {token!r}; token ids are whole numbers")
        _require(
            isinstance(bias, Real) and not isinstance(bias, bool) and -MOST_BIAS <= bias <= MOST_BIAS,
            f"logit_bias of token {token} is {bias!r}; it must be a number between -{MOST_BIAS} and {MOST_BIAS}",
        )
    return tuple(sorted((int(token), float(bias)) for token, bias in pairs.items()))


MOST_LOGPROB_TOKENS = 128
"""vLLM's limit on the length of `SamplingParams.logprob_token_ids`."""


Described = TypeVar("Described", "SamplingParams", "StructuredOutputsParams")


def _knows_vllms_arguments(not_here: Mapping[str, NotHere]) -> Callable[[type[Described]], type[Described]]:
    """Class decorator that lets the class accept the arguments that only vLLM's class has (`not_here`).

    A value that asks for minipaged's own behaviour is accepted. Any other raises an error that says why.
    """

    def knowing(cls: type[Described]) -> type[Described]:
        make, own = cls.__init__, [each.name for each in fields(cls)]

        @wraps(make)
        def init(self: Described, *values: Any, **given: Any) -> None:
            make(self, *values, **take_own(f"{cls.__name__}()", given, not_here, own))

        cls.__init__ = init  # type: ignore[method-assign]  # the fields' own parameters stay its signature
        return cls

    return knowing


MOST_GRAMMAR_CHARACTERS = 2**18
"""The longest schema, regex, list of choices or grammar."""
MOST_WHITESPACE_CHARACTERS = 1000
"""The longest `whitespace_pattern`."""


@_knows_vllms_arguments(STRUCTURED_OUTPUTS_ARGUMENTS)
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form that a request's output must have: exactly one of the first five fields. Raises InvalidRequest for a
    value that is none of these forms. The engine raises it for a form that its library cannot hold an output to."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a dict (a pydantic model's `model_json_schema()`) or as JSON text."""  # kept as text
    regex: str | None = None
    """A regular expression that matches the whole output."""
    choice: Sequence[str] | None = None
    """Texts, of which the output is one."""
    grammar: str | None = None
    """A context-free grammar, in the syntax of Lark or GBNF."""
    json_object: bool | None = None
    """True: the output is a JSON object, of any shape."""
    disable_any_whitespace: bool = False
    """Write JSON without spaces and line breaks."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the parts of JSON; None: spaces, tabs and line breaks."""

    def __post_init__(self) -> None:
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", _json_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("choice", self.choice))
        check(self)
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, str)):
                raise InvalidRequest(f"{name} is {_told(value)}; it must be a text")
        forms = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in forms if getattr(self, name) not in (None, False)]
        _require(
            len(given) == 1,
            f"structured_outputs has {' and '.join(given) or 'none of its forms'}; give exactly one of "
            f"{', '.join(forms[:-1])} and {forms[-1]}=True",
        )
        _require(self.choice != (), "choice is empty, which leaves nothing to choose; give it the texts to choose from")
        _require(
            given[0] in ("json", "json_object") or not (self.disable_any_whitespace or self.whitespace_pattern),
            f"disable_any_whitespace and whitespace_pattern are about JSON, and {given[0]} is given; leave them out",
        )
        _require(
            len(self.whitespace_pattern or "") <= MOST_WHITESPACE_CHARACTERS,
            f"whitespace_pattern has {len(self.whitespace_pattern or ''):,} characters; {MOST_WHITESPACE_CHARACTERS:,} "
            "are the most: give a shorter one",
        )
        _require(
            self.num_characters <= MOST_GRAMMAR_CHARACTERS,
            f"structured_outputs has {self.num_characters:,} characters of {given[0]}; {MOST_GRAMMAR_CHARACTERS:,} are "
            "the most: give a smaller one",
        )

    @property
    def num_characters(self) -> int:
        """The length of the given form, with its whitespace_pattern."""
        texts = (self.json, self.regex, self.grammar, self.whitespace_pattern, *(self.choice or ()))
        return sum(len(text or "") for text in texts)


def _json_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"json must be a JSON schema, as a dict or as text, and this {type(schema).__name__} has no form in JSON "
            f"({error}); give a pydantic model's model_json_schema()"
        ) from None


@_knows_vllms_arguments(SAMPLING_ARGUMENTS)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request. Raises InvalidRequest (a ValueError) for a value out of range."""

    n: int = setting(1, at_least=1)
    """Number of sequences to sample for the prompt; they share its blocks (paper, Fig. 8)."""
    temperature: float = setting(1.0, at_least=0, note="0 is greedy")
    """Number that divides the logits before a token is drawn; 0 is greedy, which always takes the likeliest token."""
    top_p: float = setting(1.0, above=0, at_most=1, note="1 keeps all tokens")
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least this; 1 keeps all."""
    top_k: int = setting(0, at_least=-1, at_most=2**31 - 1, note="0 and -1 keep all tokens")
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: float = setting(0.0, at_least=0, at_most=1, note="0 keeps all tokens")
    """Keep the tokens that are at least this fraction as likely as the likeliest; 0 keeps all."""
    seed: int | None = None
    """Seed for drawing tokens. Equal seeds give equal tokens, whatever else runs and on either tier, up to the rounding
    of the logits. None: the engine draws a seed for each request."""
    stop: str | Sequence[str] = ()
    """Strings that end a sequence; they are cut off its text."""  # None becomes ()
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended a sequence in its text."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a sequence; they stay in its `token_ids`."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""
    max_tokens: int | None = setting(16, at_least=1, note="None: as many as fit")
    """Maximum number of tokens to generate for each sequence (None: until `max_model_len`, or until the whole pool
    would have no room for all n sequences)."""
    min_tokens: int = setting(0, at_least=0)
    """Number of tokens to generate before anything may end the sequence."""
    logprobs: int | None = setting(None, at_least=0, note="None: no report")
    """Number of likeliest tokens to report at each step, in addition to the chosen one; None: no report."""
    logprob_token_ids: Sequence[int] = ()
    """Tokens to report at each step instead of the likeliest, in addition to the chosen one; 128 at most."""
    prompt_logprobs: int | None = setting(None, at_least=0, note="None: no report")
    """Number of likeliest tokens to report for each token of the prompt, in addition to itself; None: no report. The
    request then computes its whole prompt and uses no blocks of the prefix cache."""
    presence_penalty: float = setting(0.0, at_least=-2, at_most=2, note="0 is off")
    """Amount to subtract from the logit of each token that was already generated; -2 to 2, 0 is off."""
    frequency_penalty: float = setting(0.0, at_least=-2, at_most=2, note="0 is off")
    """Amount to subtract for each time a token was already generated; -2 to 2, 0 is off."""
    repetition_penalty: float = setting(1.0, above=0, note="1 is off")
    """Factor for tokens in the prompt or the output: divides positive logits, multiplies negative ones; 1 is off."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    """Amounts to add to the logits of these tokens, -100 to 100 each."""  # kept as pairs, which can be hashed
    allowed_token_ids: Sequence[int] | None = None
    """Choose among these tokens only; None: among all."""
    bad_words: Sequence[str] = ()
    """Words that must not be generated, at the beginning of a text or after a space."""
    skip_special_tokens: bool = True
    """Leave special tokens, such as the end of sequence, out of the text."""
    spaces_between_special_tokens: bool = True
    """Keep the space that the tokenizer's decoder puts between two special tokens. This matters only if the text shows
    special tokens."""
    truncate_prompt_tokens: int | None = setting(None, at_least=1, note="None: the whole prompt")
    """Number of the prompt's tokens to use, which are the last ones; None: all."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have: JSON by a schema, a regular expression, one of several texts, a grammar."""

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {name: _strings(name, getattr(self, name)) for name in ("stop", "bad_words")}
        for name in ("stop_token_ids", "logprob_token_ids"):
            plain[name] = _tokens(name, getattr(self, name))
        plain["logit_bias"] = _biases(self.logit_bias)
        if self.allowed_token_ids is not None:
            plain["allowed_token_ids"] = _tokens("allowed_token_ids", self.allowed_token_ids)
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        check(self)
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}",
        )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequest(
                f"structured_outputs is {_told(self.structured_outputs)}; give StructuredOutputsParams, as in "
                'StructuredOutputsParams(choice=["yes", "no"])'
            )
        _require(
            self.structured_outputs is None or not self.min_tokens,
            f"min_tokens is {self.min_tokens}, and structured_outputs says where the output may end; leave one of them "
            "out (a schema has minLength and minItems)",
        )
        _require("" not in self.stop, "stop holds an empty string, which would end every sequence at once; drop it")
        _require("" not in self.bad_words, "bad_words holds an empty string; drop it")
        _require(
            self.allowed_token_ids != (), "allowed_token_ids is empty, which leaves nothing to choose; None allows all"
        )
        num_given = len(self.logprob_token_ids)
        _require(
            num_given <= MOST_LOGPROB_TOKENS,
            f"logprob_token_ids holds {num_given} tokens, and may hold {MOST_LOGPROB_TOKENS}; give fewer",
        )
        _require(
            not num_given or self.logprobs in (None, num_given),
            f"logprobs is {self.logprobs}, and logprob_token_ids, which takes the place of the likeliest tokens, holds "
            f"{num_given}; leave logprobs out",
        )

    @property
    def num_likeliest(self) -> int | None:
        """The number of likeliest tokens to report at each step; None: nothing is reported, not even the chosen one."""
        return 0 if self.logprob_token_ids else self.logprobs

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty makes the logits depend on earlier tokens."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def changes_logits(self) -> bool:
        """Whether the request changes the model's logits before a token is chosen."""
        return self.has_penalties or self.allowed_token_ids is not None or bool(self.logit_bias)


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam search for one request, with the rules of transformers' `generate(num_beams=...)`."""

    beam_width: int = setting(4, at_least=1)
    """Number of beams that run, and of sequences that are returned."""
    max_tokens: int | None = setting(16, at_least=1, note="None: as many as fit")
    """Maximum number of tokens to generate (None: until `max_model_len`, or until the whole pool would have no room
    for all beams)."""
    length_penalty: float = 1.0
    """Exponent in score = sum of logprobs / length ** length_penalty: above 0 favours long sequences, below 0 short
    ones."""
    early_stopping: bool | Literal["never"] = False
    """When to stop. True: at `beam_width` finished sequences. False: once no running beam could beat them at its
    present length. "never": once none could beat them at the best length it can still reach."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""

    def __post_init__(self) -> None:
        check(self)
        _require(
            self.early_stopping in (True, False, "never"),
            f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'",
        )


TruncationSide = Literal["left", "right"]


def truncated(token_ids: Sequence[int], most: int | None, side: TruncationSide = "left") -> Sequence[int]:
    """The tokens that a request uses of its prompt, special tokens included: at most `most` (None: all). `side` is the
    side to cut: "left" keeps the last tokens, "right" the first."""
    if most is None or len(token_ids) <= most:
        return token_ids
    return token_ids[len(token_ids) - most :] if side == "left" else token_ids[:most]


def final_token_ids(params: SamplingParams | BeamSearchParams, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """The tokens that end a sequence: the model's, unless `ignore_eos`, and the request's own stop tokens."""
    own = params.stop_token_ids if isinstance(params, SamplingParams) else ()
    return frozenset(own if params.ignore_eos else (*own, *eos_token_ids))


class RequestOutputKind(Enum):
    """When a request gets updates."""

    DELTA = "delta"
    """An update after each step, with the new output."""
    FINAL_ONLY = "final_only"
    """One update at the end, with all output. The text is made only then, unless the request has stop strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Which tokens to draft, and how many. Raises InvalidRequest for a value out of range."""

    method: str
    """How to draft: "ngram" looks the latest tokens of a sequence up among its earlier ones; "draft_model" lets a
    smaller model guess."""
    num_speculative_tokens: int = setting(at_least=1, at_most=128)
    """Maximum number of tokens to draft for a sequence in a step; fewer where fewer pay."""
    model: str | None = None
    """The draft model: a known name, a local folder, a .gguf file or a hub id. It has the model's tokenizer."""
    prompt_lookup_max: int | None = setting(None, at_least=1, at_most=64)
    """Largest number of tokens to look up; by default `prompt_lookup_min`, or 5 if that is not given either."""
    prompt_lookup_min: int | None = setting(None, at_least=1, at_most=64)
    """Smallest number of tokens to look up; by default `prompt_lookup_max`, or 5 if that is not given either."""
    disable_by_batch_size: int | None = setting(None, at_least=2)
    """Number of sequences in a batch from which on nothing is drafted."""

    def __post_init__(self) -> None:
        check(self)
        _require(self.method in _METHODS, f"method is {self.method!r}; choose {' or '.join(map(repr, _METHODS))}")
        _require(
            isinstance(self.model, str | None), f"model is {self.model!r}; give the draft model's name or its folder"
        )
        _require(
            self.method != "draft_model" or self.model is not None,
            "method is 'draft_model', but there is no model; give the draft model's name or its folder as model",
        )
        _require(
            self.method != "ngram" or self.model is None,
            f"model is {self.model!r}, but the method 'ngram' needs none; leave it out, or choose 'draft_model'",
        )
        _require(
            self.model is None or (self.prompt_lookup_max, self.prompt_lookup_min) == (None, None),
            "prompt_lookup_max and prompt_lookup_min are for the method 'ngram'; leave them out",
        )
        shortest, longest = self.lengths
        _require(
            shortest <= longest,
            f"prompt_lookup_min is {shortest}, more than prompt_lookup_max, which is {longest}; lower it",
        )

    @property
    def lengths(self) -> tuple[int, int]:
        """The smallest and the largest number of tokens to look up."""
        shortest = self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP
        return shortest, self.prompt_lookup_max or shortest

    @classmethod
    def read(cls, given: Any) -> SpeculativeConfig:
        """Read a dict with these fields and perhaps other keys of vLLM's. Raises InvalidRequest for other keys."""
        if isinstance(given, SpeculativeConfig):
            return given
        own = [each.name for each in fields(cls)]
        _require(
            isinstance(given, Mapping),
            f"speculative_config is {given!r}; give a dict, as in {_EXAMPLE}",
        )
        for key in given:
            _require(
                key in own or key in SPECULATIVE_KEYS,
                f"speculative_config has the key {key!r}, which is unknown here; it may have {', '.join(own)}",
            )
        if isinstance(given.get("model"), Path):
            given = {**given, "model": str(given["model"])}
        if given.get("model") in ("ngram", "[ngram]"):  # as older versions of vLLM have it
            given = {"method": "ngram", **given, "model": None}
        if given.get("model") is not None:  # vLLM's default
            given = {"method": "draft_model", **given}
        for key in ("method", "num_speculative_tokens"):
            _require(key in given, f"speculative_config has no {key}; give it, as in {_EXAMPLE}")
        return cls(**take_own("speculative_config", given, SPECULATIVE_KEYS, own))


_METHODS = ("ngram", "draft_model")
DEFAULT_LOOKUP = 5
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings that an engine uses exactly as the user gives them."""

    block_size: int = setting(16, at_least=1, at_most=256)
    """Tokens per block, 1 to 256."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Format of the stored keys and values: as they are computed, or as the checkpoint says (auto); or in 8 bits with a
    scale for each token and head, as integers (int8) or floats (fp8). In 8 bits the same memory holds nearly four times
    the blocks of float32."""
    preemption: PreemptionMode = "auto"
    """How to make room: "swap" copies blocks to the host while its pool has room, "recompute" drops them to be computed
    again, "auto" takes the way that costs less."""
    enable_prefix_caching: bool = True
    """Reuse blocks for prompts that begin with the same tokens."""
    kv_cache_tiers: tuple[str, ...] = ()
    """Where blocks go that the prefix cache evicts: "host" keeps them in the host pool that swapping uses, and "disk",
    after it, in `kv_cache_folder`; a later prompt gets them back where that is faster than computing them."""
    max_num_seqs: int = setting(256, at_least=1)
    """Maximum number of sequences in a batch."""
    max_num_batched_tokens: int = setting(2048, at_least=1)
    """Maximum number of query tokens in a batch; a longer prompt runs in chunks."""
    tensor_parallel_size: int = setting(1, at_least=1)
    """Number of ranks among which the heads and MLP columns of each layer, and the vocabulary, are divided."""
    pipeline_parallel_size: int = setting(1, at_least=1)
    """Number of stages among which the layers are divided."""
    seed: int = 0
    """Seed from which requests without their own get theirs. Equal seeds give equal tokens."""
    debug: bool = False
    """Fill freed and new blocks with NaN and check every invariant after every step."""


def check_speculation(settings: EngineSettings, asked: SpeculativeConfig | None, async_scheduling: bool | None) -> None:
    """Raise InvalidRequest if `asked` cannot be used with the other settings."""
    _require(
        not (asked and async_scheduling),
        "speculative_config and async_scheduling are both given, and do not work together: what a step verifies must "
        "be known before the next one is planned; leave one of them out",
    )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        _require(
            asked is None or asked.model is None or getattr(settings, name) == 1,
            f"speculative_config names a draft model and {name} is {getattr(settings, name)}; a draft model works for "
            "models of one rank, so leave one of them out, or draft with the method 'ngram'",
        )


def no_drafts_with(windows: Iterable[int | None]) -> str:
    """Say why nothing is drafted for layers with these windows."""
    return (
        "speculative_config is given, but some of the model's layers have a window, and drafts are for models without "
        "windows only yet: a window may pass blocks that a refused draft needs again; leave it out, or give a "
        f"max_model_len of at most {min((window for window in windows if window), default=0)}"
    )


def check_tiers(settings: EngineSettings, has_no_host_blocks: bool) -> None:
    """Raise InvalidRequest if `kv_cache_tiers` cannot be used with the other settings. Turns it into a tuple."""
    tiers = _strings("kv_cache_tiers", settings.kv_cache_tiers)
    object.__setattr__(settings, "kv_cache_tiers", tiers)
    _require(
        tiers in ((), ("host",), ("host", "disk")),
        f"kv_cache_tiers is {tiers!r}; give ('host',) or ('host', 'disk'), or leave it out",
    )
    _require(
        not tiers or settings.enable_prefix_caching,
        "kv_cache_tiers is given but enable_prefix_caching is False; the floors hold what the prefix cache evicts, so "
        "leave one of them out",
    )
    _require(
        not tiers or not has_no_host_blocks,
        f"kv_cache_tiers is {tiers!r} but num_swap_blocks is 0; give the host pool some blocks or leave it out",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineSettings):
    """All sizes and policies of one engine. (LLM fills in those that its user left open.)"""

    num_blocks: int = setting(at_least=1)
    """Blocks in the KV cache's pool."""
    max_model_len: int = setting(at_least=1)
    """Maximum length of a sequence, prompt and output together, in tokens."""
    vocab_size: int = setting(at_least=1)
    """Size of the vocabulary: token ids are numbers in range(vocab_size)."""
    num_swap_blocks: int = setting(0, at_least=0)
    """Blocks in the host pool that swapping uses."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence tokens."""
    group_windows: tuple[int | None, ...] = (None,)
    """For each group of the model's layers, the number of tokens to which a token attends, itself included; None: all
    before it and itself. Layers of a group share a block table (`engine/grouped_table.py`)."""
    async_scheduling: bool = False
    """Launch the next step before the host knows the tokens of this one, if no request needs them there. No effect with
    `pipeline_parallel_size` above 1, where steps of other sequences are in flight meanwhile."""
    speculative_config: SpeculativeConfig | None = None
    """Which tokens to draft, several of which one step verifies; None: none."""

    @property
    def has_windows(self) -> bool:
        """Whether some layers see only a window of the last tokens."""
        return any(window is not None for window in self.group_windows)

    def __post_init__(self) -> None:
        check(self)
        check_tiers(self, self.num_swap_blocks == 0)
        check_speculation(self, self.speculative_config, self.async_scheduling)
        _require(not (self.speculative_config and self.has_windows), no_drafts_with(self.group_windows))
        _require(
            not (self.kv_cache_tiers and self.has_windows),
            f"kv_cache_tiers is {self.kv_cache_tiers!r}, but some of the model's layers have a window, and the floors "
            "below the prefix cache keep blocks of models without windows only; leave kv_cache_tiers out, or give a "
            f"max_model_len of at most {min((window for window in self.group_windows if window), default=0)}",
        )
        _require(
            self.preemption != "swap" or self.num_swap_blocks > 0,
            "preemption is 'swap' but num_swap_blocks is 0; give the host pool some blocks or choose 'recompute'",
        )
