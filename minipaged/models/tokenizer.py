"""Text to token ids and back, as the model was trained to see them.

`tokenizer.json` holds the tokenizer (vocabulary, merges, special tokens), the files beside it may add special tokens
(`tokenizer_files.py`), and the `tokenizers` library runs it.
A chat is one text too: the model's *chat template* writes the messages out with the special tokens that mark who
speaks, and ends where the model's answer begins. Only for that is transformers imported, and only when a chat is
asked for: importing it takes longer than everything else here.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from minipaged.errors import InvalidRequest, ModelError
from minipaged.models.tokenizer_files import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as Backend
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


MOST_COMPOSED = 4
"""Characters of a text that Unicode's composed forms make one of, at most: a Greek vowel with three marks."""


class Tokenizer:
    """The tokenizer of the model in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError when `folder` holds no readable tokenizer."""
        self.folder = folder
        self._files = read_tokenizer(folder)
        self._backend = self._files.backend

    def least_tokens(self, num_characters: int) -> int:
        """No text of so many characters has fewer tokens; 0 where this tokenizer may make a few of any text."""
        return num_characters // self._most_characters_a_token if self._most_characters_a_token else 0

    @cached_property
    def _most_characters_a_token(self) -> int | None:
        """The characters of a text that a token can stand for; None if there is no limit.

        There is none where the tokenizer drops text, as spaces between words, or has one token for anything unknown,
        or a special token that takes the spaces beside it.
        """
        model, words = self._backend.model, _steps(self._backend.pre_tokenizer)
        keeps_bytes = getattr(model, "byte_fallback", False) or any(step["type"] == "ByteLevel" for step in words)
        takes_spaces = any(token.lstrip or token.rstrip for token in self._added_tokens.values())
        normalizers = _steps(self._backend.normalizer)
        if not keeps_bytes or takes_spaces or not all(map(_keeps_text, [*normalizers, *words])):
            return None
        composes = any(step["type"] in ("NFC", "NFKC") for step in normalizers)
        return max(map(len, self._backend.get_vocab())) * (MOST_COMPOSED if composes else 1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; the model's beginning-of-text token comes first where the model is used to one, unless
        no special tokens are to be added."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def places(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Where in `text` each token of its encoding begins. The parts of a character begin where it does; a space that
        belongs to a token is its beginning; a token that is added to the text takes no room."""
        encoding = self._encoding(text, add_special_tokens)
        places, end = [], 0
        for (begin, stop), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            if is_added or text[end:begin].isspace():  # some tokenizers leave spaces out of their offsets
                begin = end
            places.append(begin)
            end = end if is_added else max(end, stop)
        return places

    def decode(
        self, ids: Iterable[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of `ids`, without special tokens or with them.

        A character may be spread over several tokens: cut in the middle of one, the text ends in U+FFFD.

        `spaces_between_special_tokens=False` matters only where special tokens are shown, and only to a tokenizer that
        writes spaces between tokens (WordPiece, or one without a decoder). As in vLLM's incremental detokenizer, an
        added token that follows another added token is then written without the space before it. Spaces between an
        added token and ordinary ones stay.
        """
        ids = list(ids)
        pieces, begin = [], 0
        if not (skip_special_tokens or spaces_between_special_tokens):
            for i in range(1, len(ids)):
                if ids[i] in self._added_tokens and ids[i - 1] in self._added_tokens:
                    pieces.append(str(self._backend.decode(ids[begin:i], skip_special_tokens=False)))
                    begin = i  # a decoder writes no space before the first token
        pieces.append(str(self._backend.decode(ids[begin:], skip_special_tokens=skip_special_tokens)))
        return "".join(pieces)

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary writes it ("Ġis", "▁is", "<0x0A>", "<|im_end|>"); "" for an id without an
        entry."""
        if token_id in self._added_tokens:
            return self._added_tokens[token_id].content
        return (self._backend.id_to_token(token_id) or "") if token_id >= 0 else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of text that the token stands for; b"" for an id without an entry.

        They come from the vocabulary, read by the rules that the tokenizer's decoder declares, so that a part of a
        character is that part's bytes. A special token stands for its own name. The rules apply to one token: those
        that look at the whole text, such as dropping its first space, do not.
        """
        name, rules = self.token_name(token_id), self._decoding_rules
        added = self._added_tokens.get(token_id)
        if added is not None and (added.special or "ByteLevel" in rules):  # not written in the alphabet of bytes
            return name.encode()
        if rules.keys() - {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}:
            return str(self._backend.decoder.decode([name])).encode() if name else b""
        for written, meant in rules.get("Replace", ()) + rules.get("Metaspace", ()):
            name = name.replace(written, meant)
        if "ByteFallback" in rules and (byte := BYTE_TOKEN.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        if "ByteLevel" in rules and BYTE_ALPHABET.keys() >= set(name):
            return bytes(BYTE_ALPHABET[character] for character in name)
        return name.encode()

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `decode` leaves out unless they are to be shown."""
        return frozenset(token_id for token_id, token in self._added_tokens.items() if token.special)

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
        {"type": "text", "text": ...}, which become its lines. An assistant's content may be None. Raises
        InvalidRequest for messages the template cannot write out, ModelError when the model has no template and none
        is given.
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

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, as the tokenizer's files name it. A model may have more of them."""
        return self._files.eos_token_id

    @cached_property
    def _added_tokens(self) -> dict[int, AddedToken]:
        """The tokens that are found in a text as a whole, special ones and others."""
        return self._backend.get_added_tokens_decoder()

    @cached_property
    def _decoding_rules(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """The steps of the declared decoder by type, each with what it replaces by what.

        A pattern that is no plain string is a step of its own type, "Regex".
        """
        rules: dict[str, tuple[tuple[str, str], ...]] = {}
        for step in _steps(self._backend.decoder):
            kind: str = step["type"]
            pairs: tuple[tuple[str, str], ...] = ()
            if kind == "Metaspace":
                pairs = ((step["replacement"], " "),)
            elif kind == "Replace" and "String" in step["pattern"]:
                pairs = ((step["pattern"]["String"], step["content"]),)
            elif kind == "Replace":
                kind = "Regex"
            rules[kind] = rules.get(kind, ()) + pairs
        # A tokenizer may write its tokens in the alphabet of bytes and declare no decoder.
        if not rules and any(step["type"] == "ByteLevel" for step in _steps(self._backend.pre_tokenizer)):
            rules["ByteLevel"] = ()
        return rules

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            # As a batch of one: the library lets other threads go on meanwhile, which its `encode` does not.
            [found] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError:
            # A lone surrogate (half a character, as a broken escape leaves behind) has no UTF-8 form.
            raise InvalidRequest(f"a text must be one that can be written as UTF-8; got {text!r}") from None
        return found

    @cached_property
    def in_transformers(self) -> PreTrainedTokenizerFast:
        """This tokenizer as transformers has it. Raises ModelError where it is another one there.

        Its `decode` cleans no spaces up, whatever the files say, because vLLM's engine does not either.
        """
        # transformers would tell the reader that PyTorch is missing, which is as it should be here.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import PreTrainedTokenizerFast

        untyped: dict[str, Any] = {role: self._files.roles[role] for role in self._files.untyped}
        try:
            tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
                self.folder, local_files_only=True, clean_up_tokenization_spaces=False, **untyped
            )
        except Exception as error:  # the files are the model's, and may say anything
            raise ModelError(f"transformers cannot read the tokenizer in {self.folder}: {error}") from error
        if differing := _differences(self._backend, tokenizer.backend_tokenizer):
            raise ModelError(
                f"the tokenizer in {self.folder} is another one in transformers (it differs in {differing}); save it "
                "there again with tokenizer.save_pretrained of transformers"
            )
        return tokenizer


def _differences(ours: Backend, theirs: Backend) -> str:
    """What two tokenizers differ in, as far as their files can make them differ."""

    def parts(backend: Backend) -> dict[str, object]:
        added = backend.get_added_tokens_decoder()
        return {
            "added tokens": {token_id: token.__getstate__() for token_id, token in added.items()},
            "vocabulary size": backend.get_vocab_size(),
            "normalizer": _steps(backend.normalizer),
            "pre-tokenizer": _steps(backend.pre_tokenizer),
            "decoder": _steps(backend.decoder),
            "splitting of special tokens": backend.encode_special_tokens,
        }

    of_ours, of_theirs = parts(ours), parts(theirs)
    return ", ".join(what for what in of_ours if of_ours[what] != of_theirs[what])


def _keeps_text(step: Mapping[str, Any]) -> bool:
    """Whether a declared step of a normalizer or pre-tokenizer leaves no character out, though it may change some."""
    kind = step["type"]
    if kind == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    if kind in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return kind in ("ByteLevel", "Digits", "Lowercase", "Metaspace", "NFC", "NFKC", "NFD", "NFKD", "Prepend")


def _steps(component: Any) -> list[dict[str, Any]]:
    """What a component of a tokenizer declares, as JSON: the parts of a sequence, or itself; nothing for None."""
    if component is None:
        return []
    pending, steps = [json.loads(component.__getstate__())], []
    while pending:
        step = pending.pop(0)
        parts = next((step[key] for key in ("decoders", "pretokenizers", "normalizers") if key in step), None)
        pending[:0] = parts or []
        if parts is None:
            steps.append(step)
    return steps


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the character that stands for each byte. Bytes that print are themselves, and the others are
    characters from U+0100 on, in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def with_plain_content(message: Message) -> dict[str, Any]:
    """The message as a template is given it: its content one text, and no key that says nothing.

    As in vLLM, each part of a content is a line, and an assistant's content that is None or left out is "". Another key
    says nothing if it is None, "", [] or {}: a template that asks whether there are "tool_calls" takes [] for some.
    """
    if (
        not isinstance(message, Mapping)
        or "role" not in message
        or not ("content" in message or message["role"] == "assistant")
    ):
        raise InvalidRequest(f'a message has a "role" and a "content"; got {message!r}')
    content = _plain(message["role"], message.get("content"))
    said = {key: value for key, value in message.items() if not _says_nothing(value)}
    return {**said, "role": message["role"], "content": content}


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | Sequence | Mapping) and not value)


def _plain(role: object, content: object) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
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
    return "\n".join(lines)
