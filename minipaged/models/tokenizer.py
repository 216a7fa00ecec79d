"""Text to token ids and back, as the model was trained to see them.

`tokenizer.json` holds the whole tokenizer (vocabulary, merges, special tokens), and the `tokenizers` library runs it.
A chat is one text too: the model's *chat template* writes the messages out with the special tokens that mark who
speaks, and ends where the model's answer begins. Only for that is transformers imported, and only when a chat is
asked for: importing it takes longer than everything else here.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from minipaged.errors import InvalidRequest, ModelError
from minipaged.models.loading import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast

Message = Mapping[str, Any]
"""One turn of a conversation: its "role", and its "content", which is a text or a list of parts that are text."""


class ChatOptions(TypedDict, total=False):
    """How a conversation is written out; the names are vLLM's."""

    chat_template: str | None
    """A Jinja template to use in place of the model's own."""
    add_generation_prompt: bool
    """End where the model's answer begins (the default)."""
    continue_final_message: bool
    """End within the last message, for the model to go on with it; needs `add_generation_prompt=False`."""
    chat_template_kwargs: Mapping[str, Any] | None
    """What else the template is to know, by name."""


class Tokenizer:
    """The tokenizer of the model in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError when `folder` holds no readable `tokenizer.json`."""
        from tokenizers import Tokenizer as Backend

        self.folder = folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} holds no tokenizer.json; put the model's tokenizer.json there")
        try:
            self._backend: Backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"{path} is damaged or of another format: {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()

    @cached_property
    def longest_token(self) -> int:
        """No token stands for more bytes of a text than this."""
        return max(map(len, self._backend.get_vocab()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; the model's beginning-of-text token comes first where the model is used to one, unless
        no special tokens are to be added."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`, without special tokens or with them.

        A character may be spread over several tokens: cut in the middle of one, the text ends in U+FFFD.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a chat, up to where the model's answer begins. The options are those of `ChatOptions`.

        Each message has a "role" ("system", "user", "assistant") and a "content": a text, or a list of parts like
        {"type": "text", "text": ...}, which become its lines. Raises InvalidRequest for messages the template cannot
        write out, ModelError when the model has no template and none is given.
        """
        if not messages:
            raise InvalidRequest("the chat is empty; give at least one message")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message are both True; the answer either begins a message of "
                "its own or goes on with the last one: set add_generation_prompt=False for the latter"
            )
        conversation = [with_plain_content(message) for message in messages]
        more = dict(chat_template_kwargs or {})
        renderer = self.in_transformers
        if taken := more.keys() & inspect.signature(renderer.apply_chat_template).parameters.keys() - {"documents"}:
            raise InvalidRequest(
                f"chat_template_kwargs holds {min(taken)!r}, which is no variable of a template; leave it out"
            )
        if not (chat_template or renderer.chat_template):
            raise ModelError(f"the model in {self.folder} has no chat template; use generate with a plain prompt")
        try:
            text = str(
                renderer.apply_chat_template(
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **more,
                )
            )
        except Exception as error:  # a template is a program, and raises what it likes
            whose = "the chat template" if chat_template else "the model's chat template"
            raise InvalidRequest(f"{whose} refuses these messages: {error}") from None
        # The template has written the special tokens itself, the first one included.
        return self._encode(text, add_special_tokens=False)

    @cached_property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, as `tokenizer_config.json` names it."""
        path = self.folder / "tokenizer_config.json"
        if not path.is_file():
            return None
        token = read_json(path).get("eos_token")
        if isinstance(token, dict):  # a token written out with its properties
            token = token["content"]
        return None if token is None else self._backend.token_to_id(token)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # As a batch of one: the library lets other threads go on meanwhile, which its `encode` does not.
            [found] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError:
            # A lone surrogate (half a character, as a broken escape leaves behind) has no UTF-8 form.
            raise InvalidRequest(f"a prompt must be text that can be written as UTF-8; got {text!r}") from None
        ids: list[int] = found.ids
        return ids

    @cached_property
    def in_transformers(self) -> PreTrainedTokenizerFast:
        """The same tokenizer as transformers has it."""
        # transformers would tell the reader that PyTorch is missing, which is as it should be here.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import PreTrainedTokenizerFast

        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
        return tokenizer


def with_plain_content(message: Message) -> dict[str, Any]:
    """The message, its content one text. As in vLLM, each part is a line."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise InvalidRequest(f'a message has a "role" and a "content"; got {message!r}')
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f'a "content" is a text, or a list of parts that are text; got {content!r}')
    lines = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"of type {kind!r}" if kind not in (None, "text") else repr(part)
            raise InvalidRequest(
                f'a part of a "content" is {{"type": "text", "text": ...}}; models here read no part {what}'
            )
        lines.append(part["text"])
    return {**message, "content": "\n".join(lines)}
