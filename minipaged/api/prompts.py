"""The forms of a prompt: a text, a list of token ids, or one of vLLM's dicts with either."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, NotRequired, TypedDict

from minipaged.api.vllm_arguments import PROMPT_KEYS, take_own
from minipaged.errors import InvalidRequest


class TextPrompt(TypedDict):
    """A prompt as text, and perhaps a salt: requests share cached blocks only with requests of the same salt."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. If its text is given too, the model runs the ids, and the output repeats the text.
    `cache_salt` is that of a `TextPrompt`."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Turn one prompt (a string, a dict, or a list of numbers) or several into a list of prompts."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # `read_prompt` refuses it if it is no prompt
    items = list(prompts)
    if items and isinstance(items[0], Number):
        return [items]
    return items  # type: ignore[return-value]


def read_prompt(prompt: Prompt, encode: Callable[[str], Sequence[int]]) -> tuple[Sequence[int], str | None]:
    """The token ids of a prompt, and its text if that was given. Raises InvalidRequest for an invalid prompt."""
    text: Any = None
    ids: Any = prompt
    if isinstance(prompt, Mapping):
        own = ("prompt", "prompt_token_ids", "cache_salt")
        if unknown := [key for key in prompt if key not in (*own, *PROMPT_KEYS)]:
            raise InvalidRequest(
                f'a prompt has a "prompt" or "prompt_token_ids", and perhaps a "cache_salt", but no {unknown[0]!r}'
            )
        given = take_own("a prompt", prompt, PROMPT_KEYS, own)
        text, ids = given.get("prompt"), given.get("prompt_token_ids")
        if text is None and ids is None:
            raise InvalidRequest('a prompt that is a dict must have a "prompt", its text, or "prompt_token_ids"')
        if isinstance(ids, str) or not isinstance(text, str | None):
            raise InvalidRequest(
                f'"prompt" must be a text and "prompt_token_ids" a list of token ids; the prompt is {prompt!r}'
            )
    elif isinstance(prompt, str):
        text, ids = prompt, None
    if ids is None and text is not None:
        return encode(text), text
    if isinstance(ids, bytes | Mapping) or not hasattr(ids, "__len__"):
        raise InvalidRequest(f"a prompt is a text or a list of token ids, not {type(ids).__name__}: {ids!r}")
    return ids, text


def salt_of(prompt: Prompt) -> str | None:
    """The salt of a prompt, which the engine will check; None without one."""
    return prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
