"""Text to token ids and back, as the model was trained to see them.

`tokenizer.json` holds the whole tokenizer (vocabulary, merges, special tokens), and the `tokenizers` library runs it.
A chat is one text too: the model's *chat template* writes the messages out with the special tokens that mark who
speaks, and ends where the model's answer begins. Only for that is transformers imported, and only when a chat is
asked for: importing it takes longer than everything else here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from minipaged.errors import InvalidRequest, ModelError
from minipaged.models.loading import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; the model's beginning-of-text token comes first where the model is used to one, unless
        no special tokens are to be added."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`, without special tokens or with them.

        A character may be spread over several tokens: cut in the middle of one, the text ends in U+FFFD.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a chat, up to where the model's answer begins.

        Each message has a "role" ("system", "user", "assistant") and a "content". Raises InvalidRequest for messages
        the model's template cannot write out, ModelError when the model has no template.
        """
        if not messages:
            raise InvalidRequest("the chat is empty; give at least one message")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise InvalidRequest(f'a message has a "role" and a "content"; got {message!r}')
        if not self._chat.chat_template:
            raise ModelError(f"the model in {self.folder} has no chat template; use generate with a plain prompt")
        from jinja2 import TemplateError

        try:
            text = str(
                self._chat.apply_chat_template(
                    [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
                )
            )
        except (TemplateError, TypeError) as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from None
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
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            # A lone surrogate (half a character, as a broken escape leaves behind) has no UTF-8 form.
            raise InvalidRequest(f"a prompt must be text that can be written as UTF-8; got {text!r}") from None
        return ids

    @cached_property
    def _chat(self) -> PreTrainedTokenizerFast:
        # transformers would tell the reader that PyTorch is missing, which is as it should be here.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import PreTrainedTokenizerFast

        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
        return tokenizer
