"""Convert text to token ids and back with the model's own tokenizer.

`tokenizer.json` holds the tokenizer (vocabulary, merges, special tokens), the files next to it may add special tokens
(`tokenizer_files.py`), and the `tokenizers` library runs it.
A chat becomes one text too: the model's *chat template* joins the messages with the special tokens that mark each
speaker, and ends where the model's answer begins. Only chats need transformers, so it is imported with the first one:
the import takes longer than everything else here.
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
from minipaged.models.tool_messages import with_parsed_arguments

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast

Message = Mapping[str, Any]
"""One turn of a conversation: a "role", and a "content", which is a text or a list of text parts. It may have OpenAI's
"tool_calls", or be the result of one."""
Tool = Mapping[str, Any]
"""A tool that the model may call: {"type": "function", "function": {"name", "description", "parameters"}}, where the
parameters are a JSON schema."""


class ChatOptions(TypedDict, total=False):
    """Options for rendering a conversation, with vLLM's names."""

    chat_template: str | None
    """A Jinja template that replaces the model's own."""
    add_generation_prompt: bool
    """Whether the text ends where the model's answer begins (the default)."""
    continue_final_message: bool
    """Whether the model continues the last message; needs `add_generation_prompt=False`."""
    tools: Sequence[Tool] | None
    """Tools that the template describes to the model."""
    chat_template_kwargs: Mapping[str, Any] | None
    """More variables for the template, by name."""


MOST_COMPOSED = 4
"""The most characters that Unicode's composed forms combine into one: a Greek vowel with three marks."""


class Tokenizer:
    """The tokenizer of the model in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer. Raises ModelError if `folder` holds no readable one."""
        self.folder = folder
        self._files = read_tokenizer(folder)
        self._backend = self._files.backend

    def least_tokens(self, num_characters: int) -> int:
        """A lower bound for the number of tokens of any text with `num_characters`; 0 if there is no such bound."""
        return num_characters // self._most_characters_a_token if self._most_characters_a_token else 0

    @cached_property
    def _most_characters_a_token(self) -> int | None:
        """The most characters of a text that one token can represent; None if there is no limit.

        There is no limit if the tokenizer drops text (such as spaces between words), has one token for all unknown
        text, or has a special token that absorbs the spaces around it.
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
        """The token ids of `text`. They begin with the beginning-of-text token if the model uses one, unless
        `add_special_tokens` is False."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def places(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The position in `text` at which each token of its encoding begins.

        A token that is part of a character begins with the character. A token that includes a space begins with the
        space. An added special token is empty.
        """
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
        """The text of `ids`, with or without special tokens.

        A character may consist of several tokens: if `ids` end in the middle of one, the text ends in U+FFFD.

        `spaces_between_special_tokens=False` matters only if special tokens are shown, and only for a tokenizer that
        writes spaces between tokens (WordPiece, or one without a decoder). As in vLLM's incremental detokenizer, it
        removes the space between two adjacent added tokens. Spaces between an added token and ordinary ones stay.
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
        """The token's entry in the vocabulary ("Ġis", "▁is", "<0x0A>", "<|im_end|>"), or "" if the id has none."""
        if token_id in self._added_tokens:
            return self._added_tokens[token_id].content
        return (self._backend.id_to_token(token_id) or "") if token_id >= 0 else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of text that the token represents, or b"" if the id has no entry in the vocabulary.

        They result from the vocabulary entry and the rules of the tokenizer's decoder, so that a token for a part of a
        character gives that part's bytes. A special token represents its own name. Rules that apply to the whole text,
        such as dropping its first space, are left out.
        """
        name, rules = self.token_name(token_id), self._decoding_rules
        added = self._added_tokens.get(token_id)
        if added is not None and (added.special or "ByteLevel" in rules):  # not written in the byte alphabet
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
        """The ids of the tokens that `decode` leaves out with skip_special_tokens=True."""
        return frozenset(token_id for token_id, token in self._added_tokens.items() if token.special)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a chat, up to where the model's answer begins. `ChatOptions` describes the options.

        Each message has a "role" ("system", "user", "assistant", "tool") and a "content": a text, or a list of parts
        like {"type": "text", "text": ...}, which become its lines. An assistant's content may be None. The arguments of
        its "tool_calls" are dicts, or texts that hold JSON. Raises InvalidRequest if the template cannot render the
        messages or does not mention tools, and ModelError if neither the model nor the call has a template.
        """
        if not messages:
            raise InvalidRequest("the chat is empty; give at least one message")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message are both True; the answer either begins a new "
                "message or continues the last one: set add_generation_prompt=False for the latter"
            )
        conversation = [
            with_parsed_arguments(with_plain_content(message), f"messages[{place}]")
            for place, message in enumerate(messages)
        ]
        more = dict(chat_template_kwargs or {})
        renderer = self.in_transformers
        if taken := more.keys() & inspect.signature(renderer.apply_chat_template).parameters.keys() - {"documents"}:
            raise InvalidRequest(
                f"chat_template_kwargs holds {min(taken)!r}, which is not a template variable; leave it out"
            )
        if not (chat_template or renderer.chat_template):
            raise ModelError(f"the model in {self.folder} has no chat template; use generate with a plain prompt")
        _check_tools_are_mentioned(self.template_text(chat_template, for_tools=bool(tools)), conversation, tools)
        try:
            text = str(
                renderer.apply_chat_template(
                    conversation,
                    tools=[dict(tool) for tool in tools] if tools else None,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **more,
                )
            )
        except Exception as error:  # a template is a program and can raise any exception
            whose = "the chat template" if chat_template else "the model's chat template"
            raise InvalidRequest(f"{whose} refuses these messages: {error}") from None
        # The template has already written the special tokens, including the first one.
        return self._encode(text, add_special_tokens=False)

    def template_text(self, chat_template: str | None = None, *, for_tools: bool = False) -> str:
        """The chat template that `encode_chat` takes; "" if there is none. `for_tools`: whether tools are given, for
        which some models have a template of their own, named `tool_use`."""
        templates = self.in_transformers.chat_template
        if not isinstance(templates, dict):
            return str(chat_template or templates or "")
        if chat_template is not None:
            return str(templates.get(chat_template, chat_template))
        return str((for_tools and templates.get("tool_use")) or templates.get("default", ""))

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids of the tokens, special or not, that are matched in a text as a whole."""
        return {token.content: token_id for token_id, token in self._added_tokens.items()}

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, by their entry in the vocabulary."""
        return dict(self._backend.get_vocab())

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-text token in the tokenizer's files, or None. A model may have more end tokens."""
        return self._files.eos_token_id

    @cached_property
    def _added_tokens(self) -> dict[int, AddedToken]:
        """The tokens, special or not, that are matched in a text as a whole."""
        return self._backend.get_added_tokens_decoder()

    @cached_property
    def _decoding_rules(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """The steps of the decoder by type, each with its replacements (old, new).

        A replacement whose pattern is not a plain string has the type "Regex".
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
        # A tokenizer may write its tokens in the byte alphabet without declaring a decoder.
        if not rules and any(step["type"] == "ByteLevel" for step in _steps(self._backend.pre_tokenizer)):
            rules["ByteLevel"] = ()
        return rules

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            # A batch of one text, because `encode_batch` lets other threads run and `encode` does not.
            [found] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        except TypeError:
            # A lone surrogate (half a character, from a broken escape) has no UTF-8 form.
            raise InvalidRequest(f"a text must be one that can be written as UTF-8; got {text!r}") from None
        return found

    @cached_property
    def in_transformers(self) -> PreTrainedTokenizerFast:
        """The tokenizer as transformers loads it. Raises ModelError if transformers loads a different one.

        Its `decode` does not clean up spaces, even if the files ask for it, because vLLM's engine does not either.
        """
        # Silence transformers' warning that PyTorch is missing: it is not needed here.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import PreTrainedTokenizerFast

        untyped: dict[str, Any] = {role: self._files.roles[role] for role in self._files.untyped}
        try:
            tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
                self.folder, local_files_only=True, clean_up_tokenization_spaces=False, **untyped
            )
        except Exception as error:  # the files come with the model and may contain anything
            raise ModelError(f"transformers cannot read the tokenizer in {self.folder}: {error}") from error
        if differing := _differences(self._backend, tokenizer.backend_tokenizer):
            raise ModelError(
                f"transformers loads the tokenizer in {self.folder} differently (it differs in {differing}); save it "
                "there again with transformers' tokenizer.save_pretrained"
            )
        return tokenizer


def _differences(ours: Backend, theirs: Backend) -> str:
    """The names of the parts in which two tokenizers from the same files differ."""

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
    """Whether a step of a normalizer or pre-tokenizer drops no characters, though it may change some."""
    kind = step["type"]
    if kind == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    if kind in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return kind in ("ByteLevel", "Digits", "Lowercase", "Metaspace", "NFC", "NFKC", "NFD", "NFKD", "Prepend")


def _steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's component as JSON: the parts of a sequence, the component itself, or [] for None."""
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
    """GPT-2's byte alphabet: the byte for each character. Printable bytes are their own characters; the others are the
    characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _check_tools_are_mentioned(template: str, messages: Sequence[Message], tools: Sequence[Tool] | None) -> None:
    """Raise InvalidRequest if the template would leave out the tools, or calls of them, without a word."""
    way_out = (
        "give one that does: chat_template in Python, --chat-template FILE for a server; "
        "docs/assets/chatml_tools.jinja is one for models with ChatML, such as SmolLM2"
    )
    if tools and "tools" not in template:
        raise InvalidRequest(f"tools are given, and the model's chat template does not mention them; {way_out}")
    for place, message in enumerate(messages):
        if "tool_calls" in message and "tool_calls" not in template:
            raise InvalidRequest(
                f"messages[{place}] has tool_calls, and the model's chat template does not mention them; {way_out}"
            )


def with_plain_content(message: Message) -> dict[str, Any]:
    """The message for a template: with its content as one text and without empty keys.

    As in vLLM, each part of a content is a line, and an assistant's missing content is "". Other keys are removed if
    they are None, "", [] or {}, because a template may take an empty "tool_calls" for tool calls.
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
                f'a part of a "content" is {{"type": "text", "text": ...}}; models here cannot read a part {what}'
            )
        lines.append(part["text"])
    return "\n".join(lines)
