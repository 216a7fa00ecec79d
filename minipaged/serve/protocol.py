"""The fields of request bodies: those of OpenAI with vLLM's additions.

Pydantic checks types and bounds here. `SamplingParams` and `Engine.add_request` check the values further. Either way a
fault is answered with 400. Unknown fields are ignored, as in vLLM. Known fields that are not supported (images, LoRA
…) are refused by name. A field that is null counts as absent. Every field of vLLM is supported, refused
(`REFUSED`), or without effect (`WITHOUT_EFFECT`).
"""

from __future__ import annotations

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from minipaged.api.vllm_arguments import CHAT_ARGUMENTS, SAMPLING_ARGUMENTS
from minipaged.engine.arrivals import MOST_SALT
from minipaged.errors import InvalidRequest
from minipaged.models.tokenizer import with_plain_content
from minipaged.models.tool_messages import check_calls_and_results
from minipaged.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from minipaged.serve.tools import Tools, tools_of

MOST_PROMPTS = 1024
MOST_ITEMS = 2048
"""The largest number of items in `input` of /v1/responses, and of parts in all of them together."""
MOST_STOP_STRINGS = 4
MOST_LOGPROBS = 20
MOST_CHARACTERS_TO_LOOK_FOR = 1000
"""The longest stop string or bad word, in characters. Each new token is compared with them."""
MOST_CHARACTERS_TO_TELL = 500
"""The longest description of a fault in a message, in characters."""
COMPLETION_TOKENS = 16
"""OpenAI's default for `max_tokens` of a completion."""


def _whole(value: Any) -> Any:
    """Convert 1.0 to 1, because JSON has only one kind of numbers. Leave other values as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _64_bits(value: int) -> int:
    if not -(2**63) <= value < 2**64:  # pydantic's own message would have rounded numbers
        raise ValueError(f"must be from {-(2**63)} to {2**64 - 1}")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
# fail_fast: a list reports only its first fault. Otherwise pydantic would find all of a million before we report ten.
TokenIds = Annotated[list[Whole], Field(fail_fast=True, max_length=2**18)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Word = Annotated[str, Field(max_length=MOST_CHARACTERS_TO_LOOK_FOR)]
Words = Annotated[list[Word], Field(fail_fast=True, max_length=256)]
Stops = Annotated[list[Word], Field(fail_fast=True, max_length=MOST_STOP_STRINGS)]
Count = Annotated[Whole, Field(ge=0)]
Seed = Annotated[Whole, AfterValidator(_64_bits)]
LogitBias = Annotated[dict[str, float], Field(max_length=1024)]


_ELSEWHERE = "minipaged looks nothing up and stores nothing; leave it out, and put the facts into a message"
_THOUGHTS = "models here do not think before they answer; leave it out"
_AS_IN_PYTHON = {**CHAT_ARGUMENTS, **SAMPLING_ARGUMENTS}
_NEWER = {"functions": "tools", "function_call": "tool_choice"}
"""Maps OpenAI's old fields for tools to those that replace them."""
_NO_EXTENSIONS = "nothing here reads it; leave it out"
REFUSED = {
    **{name: _AS_IN_PYTHON[name].why for name in ("lora_request", "repetition_detection", "watermarking", "best_of")},
    "routed_experts_prompt_start": _AS_IN_PYTHON["routed_experts_prompt_start"].why,
    **{name: f"it is the old form of {newer}; send that" for name, newer in _NEWER.items()},
    **dict.fromkeys(
        ("audio", "modalities", "mm_processor_kwargs", "media_io_kwargs"), _AS_IN_PYTHON["mm_processor_kwargs"].why
    ),
    **dict.fromkeys(("web_search_options", "documents", "store"), _ELSEWHERE),
    **dict.fromkeys(("reasoning_effort", "thinking_token_budget", "verbosity"), _THOUGHTS),
    **dict.fromkeys(("vllm_xargs", "ec_transfer_params"), _NO_EXTENSIONS),
    "prediction": "minipaged does not use predicted output, which would change no token; leave it out",
    "service_tier": "all requests get the same service; leave it out, or use priority, if the policy looks at it",
    "kv_transfer_params": "the server finds blocks by their tokens (--kv-connector); leave it out",
    "logits_processors": "a processor is a program; use logit_bias or bad_words instead",
    "suffix": "minipaged does not fill in the middle; leave it out",
    "prompt_embeds": "minipaged takes prompts as text or token ids",
    "stream_interval": "each step's tokens are sent at once; leave it out",
    "return_prompt_text": "the text is not sent back; /tokenize with these messages, and /detokenize, give it",
    "return_token_offsets": "use logprobs instead, whose text_offset says where tokens begin",
    "return_weight_versions": "a model's weights are the same from its start to its end; leave it out",
}
"""Maps a known but unsupported field to the reason, or to what to do instead."""
DONE_ANYWAY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "vllm_xargs", "ec_transfer_params"), ({},)),
    "kv_transfer_params": ({},),
    "service_tier": ("default",),
    "verbosity": ("medium",),
    "reasoning_effort": ("minimal",),
    **{name: _AS_IN_PYTHON[name].let_through for name in ("best_of", "thinking_token_budget", "stream_interval")},
}
"""Maps a field in `REFUSED` to values that are accepted, because they ask for the default behaviour."""
WITHOUT_EFFECT = {
    "session_id": "it identifies a session, and all requests get the same service",
    "include_reasoning": "models here do not think before they answer, so there is nothing to leave out",
    **dict.fromkeys(("mm_payload", "return_mm_kwargs"), "it is about images, and there are none"),
}
"""Maps an ignored field of vLLM to the reason why it makes no difference."""
NOT_WITH_BEAMS = (
    *(
        "logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "logit_bias",
        "allowed_token_ids",
    ),
    *("bad_words", "presence_penalty", "frequency_penalty", "repetition_penalty"),
)
ASKS_FOR_NOTHING: tuple[Any, ...] = (None, False, [], "", "none", "auto", ["text"], {"type": "text"})


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    def check(self) -> None:
        """Raise InvalidRequest for a field that is not supported, or that conflicts with another one."""
        for name, value in (self.model_extra or {}).items():
            if name in REFUSED and value not in (*ASKS_FOR_NOTHING, *DONE_ANYWAY.get(name, ())):
                raise InvalidRequest(f"{name} is not supported: {REFUSED[name]}")


class StreamOptions(_Body):
    include_usage: bool | None = False
    """Whether to send a last chunk with the number of tokens."""
    continuous_usage_stats: bool | None = False
    """Whether to send the number of tokens so far in every chunk."""


def _as_text(schema: Any) -> Any:
    """A JSON schema as text. (A large body is validated in a thread, so this does not hold up others.)"""
    return schema if schema is None or isinstance(schema, str) else json.dumps(schema)


def _with_schema_as_text(given: dict[str, Any]) -> dict[str, Any]:
    return {name: _as_text(value) if name == "json" else value for name, value in given.items() if value is not None}


Schema = Annotated[dict[str, Any] | str, AfterValidator(_as_text)]
Structure = Annotated[dict[str, Any], AfterValidator(_with_schema_as_text)]
"""The fields of `StructuredOutputsParams`."""
GUIDED = ("json", "regex", "choice", "grammar", "whitespace_pattern")
"""The fields that also have vLLM's older names: guided_json and so on."""


class JsonSchema(_Body):
    """The schema of a `response_format`, with its name. An output keeps to it whether it is `strict` or not."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any], AfterValidator(_as_text)] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """OpenAI's field: text, a JSON object of any shape, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def form(self) -> dict[str, Any]:
        """The field of `StructuredOutputsParams` that asks for this; empty for a text."""
        if self.type == "json_schema":
            if self.json_schema is None:
                raise InvalidRequest('response_format has the type "json_schema", and no json_schema; give it one')
            return {"json": self.json_schema.json_schema}
        return {"json_object": True} if self.type == "json_object" else {}


class SamplingBody(_Body):
    """The fields that completions and chats share."""

    model: str | None = None
    n: Annotated[Whole, Field(ge=1)] | None = 1
    temperature: Annotated[float, Field(ge=0)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    seed: Seed | None = None
    stop: Word | Stops | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: Count | None = 0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = 1.0
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Words | None = None
    logprob_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    truncation_side: Literal["left", "right"] | None = None
    """The end of the prompt that truncation cuts off."""
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1)] | None = None
    prompt_logprobs: Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structure | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = 1.0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: Whole | None = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MOST_SALT)] | None = None
    """Requests share cached blocks only with requests of the same salt."""
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    echo: bool | None = False
    user: str | None = None

    def check(self) -> None:
        super().check()
        if not self.stream and self.stream_options is not None and self.stream_options.model_fields_set:
            raise InvalidRequest("stream_options has a meaning only with stream=true; set that, or leave it out")
        if self.stream and self.prompt_logprobs:
            raise InvalidRequest("prompt_logprobs above 0 cannot be streamed; leave out stream")
        if self.logprob_token_ids and self.reported is None:
            raise InvalidRequest("logprob_token_ids has a meaning only with logprobs; set that, or leave it out")
        if self.stream and self.use_beam_search:
            raise InvalidRequest(
                "beam search cannot be streamed, because no beam is final before the end; leave out stream"
            )
        if not self.use_beam_search and self.length_penalty not in (None, 1.0):
            raise InvalidRequest(
                "length_penalty has a meaning only with use_beam_search=true; set that, or leave it out"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens is 0; it must be 1 or more, or -1 for as many as fit")
        for name in NOT_WITH_BEAMS if self.use_beam_search else ():
            if getattr(self, name, None) not in (None, False, [], {}, type(self).model_fields[name].default):
                raise InvalidRequest(f"{name} has no meaning with use_beam_search, which does not sample; leave it out")
        if self.form and self.use_beam_search:
            raise InvalidRequest(
                "structured_outputs and response_format have no meaning with use_beam_search, whose beams follow no "
                "grammar; leave one of them out"
            )

    @property
    @abstractmethod
    def reported(self) -> int | None:
        """The number of likeliest tokens to report with each token; None: no log-probabilities."""

    @cached_property
    def form(self) -> StructuredOutputsParams | None:
        """The form that the output must have; None for any. Raises InvalidRequest."""
        given = {name: form for name, form in self.asked_forms().items() if form is not None}
        if len(given) > 1:
            raise InvalidRequest(f"{' and '.join(given)} are given, and each says what the output must be; give one")
        for form in given.values():
            try:
                return StructuredOutputsParams(**form)
            except TypeError:
                known = ", ".join(each.name for each in dataclasses.fields(StructuredOutputsParams))
                raise InvalidRequest(f"structured_outputs has a field that is none of {known}; leave it out") from None
        return None

    def asked_forms(self) -> dict[str, dict[str, Any] | None]:
        """For each way to ask for a form, the fields of `StructuredOutputsParams` that ask for it; None: not asked."""
        old = {name: value for name in GUIDED if (value := getattr(self, f"guided_{name}")) is not None}
        return {
            "structured_outputs": self.structured_outputs,
            "response_format": (self.response_format and self.response_format.form()) or None,
            "the guided_ fields": old or None,
        }

    def params(self, max_tokens: int | None, prompt_logprobs: int | None) -> SamplingParams | BeamSearchParams:
        """Return the engine's parameters. `max_tokens`: None for as many as fit. Raises InvalidRequest."""
        if self.use_beam_search:
            return BeamSearchParams(
                beam_width=self.n or 1,
                max_tokens=max_tokens,
                length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
                ignore_eos=bool(self.ignore_eos),
            )
        given = {name: value for name in SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token(key): value for key, value in self.logit_bias.items()}
        asked = {"max_tokens": max_tokens, "logprobs": None if self.logprob_token_ids else self.reported}
        if prompt_logprobs is not None:
            asked["prompt_logprobs"] = prompt_logprobs
        if self.form:
            given["structured_outputs"] = self.form
        return SamplingParams(**given | asked)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return bool(self.wants_usage and self.stream_options and self.stream_options.continuous_usage_stats)


OF_THE_SERVER = {"truncate_prompt_tokens", "prompt_logprobs", "logit_bias", "structured_outputs"}
"""Fields that have another meaning or form in a body than in SamplingParams."""
SAMPLING_NAMES = [
    each.name
    for each in dataclasses.fields(SamplingParams)
    if each.name in SamplingBody.model_fields and each.name not in OF_THE_SERVER
]
"""The fields of SamplingParams that are copied from a body unchanged."""


def _token(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise InvalidRequest(f"logit_bias has the key {key[:40]!r}; its keys are token ids") from None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)] | None = None
    max_tokens: Count | None = COMPLETION_TOKENS
    logprobs: Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool | None = True

    @property
    def reported(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        for name in ("tools", "tool_choice"):
            if (self.model_extra or {}).get(name) not in ASKS_FOR_NOTHING:
                raise InvalidRequest(f"{name} is not supported for a prompt; send messages to /v1/chat/completions")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens is 0, which generates nothing; that is allowed only with echo=true, to get the prompt"
            )
        if self.max_tokens == 0 and self.logprob_token_ids:
            raise InvalidRequest(
                "logprob_token_ids is about generated tokens, and max_tokens is 0; leave one of them out"
            )

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, as texts or as token ids. Raises InvalidRequest if there are none or too many."""
        prompt = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))  # type: ignore[index]
        prompts = [prompt] if one else prompt
        if not prompts:
            raise InvalidRequest("prompt is empty; give it at least one token")
        if len(prompts) > MOST_PROMPTS:
            raise InvalidRequest(f"prompt holds {len(prompts)} prompts; at most {MOST_PROMPTS} are taken at a time")
        return prompts  # type: ignore[return-value]


Message = dict[str, Any]
_TEMPLATE_WRITES_THEM = "add_special_tokens is not supported: the chat template adds them; leave it out"
SHAPES = {
    "prompt": f"a text, a list of texts, a list of token ids, or a list of such lists of at most {2**18:,}",
    "tool_choice": '"none", "auto", "required", or an object that names a tool',
    "input": f"a text, or a list of at most {MOST_ITEMS:,} items",
    "stop": f"a text, or a list of at most {MOST_STOP_STRINGS}, of {MOST_CHARACTERS_TO_LOOK_FOR:,} characters at most",
}
"""Maps a field that may have several types to a description of them. Pydantic would report a fault for each type."""


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InvalidRequest for messages that no template can format, or that use unsupported features. Other roles are
    left to the model's template, which may refuse them."""
    for place, message in enumerate(messages):
        where, role = f"messages[{place}]", message.get("role")
        if not isinstance(role, str):
            raise InvalidRequest(f'{where} has no "role"; give it one, such as "system", "user" or "assistant"')
        if role == "function":
            raise InvalidRequest(f'{where} has the role "function", the old form of "tool"; send that')
        if message.get("function_call"):
            raise InvalidRequest(f'{where} has "function_call", the old form of "tool_calls"; send that')
        if message.get("content") is None and role != "assistant":
            raise InvalidRequest(f'{where} has no "content"; give it one, which may be ""')
        try:
            with_plain_content(message)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {str(error)[:MOST_CHARACTERS_TO_TELL]}") from None
    check_calls_and_results(messages)


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] | None = 0
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True

    @property
    def reported(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs has a meaning only with logprobs=true; set that, or leave it out")
        if (self.model_extra or {}).get("add_special_tokens"):
            raise InvalidRequest(_TEMPLATE_WRITES_THEM)
        if self.use_beam_search and self.tools and self.tool_choice != "none":
            raise InvalidRequest("tools cannot be called by a beam search; leave out use_beam_search, or the tools")
        check_messages(self.messages)

    def asked_tools(self) -> Tools | None:
        """Return the tools that the model may call; None if it is to call none. Raises InvalidRequest."""
        return tools_of(self.tools, self.tool_choice, self.parallel_tool_calls)


class TokenizeBody(_Body):
    """POST /tokenize, for a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    return_token_strs: bool | None = False

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequest(_TEMPLATE_WRITES_THEM)
        if self.messages is None and self.tools:
            raise InvalidRequest("tools have a meaning only with messages; leave them out, or send the prompt as those")
        check_messages(self.messages or ())

    def asked_tools(self) -> Tools | None:
        """Return the tools that the template describes. Raises InvalidRequest."""
        return tools_of(self.tools, None, None)


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Count]


FIELDS = {name for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody) for name in body.model_fields}
FIELDS |= REFUSED.keys()
"""All known fields of bodies."""
