"""Text, one token at a time: what can be shown of a sequence that still grows.

Two things are held back until more is known, and never anything else:

- *the beginning of a character*. A token is some bytes, and they need not be whole characters. A decoder shows those
  that are none (or none yet) as U+FFFD; at the end of the text they wait for the tokens to come;
- *the beginning of a stop string*, which is cut off the text: after "one tw" and with stop="two", "tw" waits. Of
  several stop strings the longest beginning counts. (It waits also where the stop string is to stay in the text.)

What was given out is never taken back, and `finish` gives the rest. So the pieces joined are the text, always.

Some decoders drop a space at the beginning, and some need the neighbours of a byte to tell its character. So a token is
decoded behind a few earlier ones; what it adds to their text is new. The first token of the output has the prompt's
last tokens before it. So the text of the prompt and the text of the output, joined, are the text of all their tokens
(the invariant text-of-all). A character that begins in the prompt and ends in the output belongs to the output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

from minipaged.errors import DetokenizerFailed

Decode = Callable[..., str]
"""Called with token ids; with `skip_special_tokens=False` where the text shows special tokens, and with
`spaces_between_special_tokens=False` where it shows them without spaces between."""
Encode = Callable[..., Sequence[int]]
"""Called with a text and `add_special_tokens=False`."""

NOT_WHOLE = "\ufffd"
"""What decoders show for bytes that are no character, or none yet."""
PANIC = "PanicException"
"""What the tokenizers library raises, which is no `Exception`, where it fails in Rust."""
MOST_DOUBTFUL = 3
"""Bytes of a character (in UTF-8) that is not whole: some decoders show U+FFFD for each, others one for all."""
CONTEXT_TOKENS = 6
"""How many earlier tokens are decoded along with a new one, at least."""
MOST_TOKENS = 64
"""And at most, also where no character ever becomes whole."""


class Detokenizer:
    """The growing text of one sequence's output, up to the first of its stop strings (`keeps_stop`: with it).

    `prompt_token_ids` come before the output. `prompt` is their text, if they were given as text; its last character is
    then whole. The prompt is decoded with the first token that is added.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        *,
        keeps_stop: bool = False,
        prompt_token_ids: Sequence[int] = (),
        prompt: str | None = None,
    ) -> None:
        self._decode = decode
        self._stop = stop
        self._keeps_stop = keeps_stop
        self._prompt = (prompt_token_ids, prompt)
        self._tokens: list[int] | None = None  # the latest, which are decoded together; None: no token was added yet
        self._known = ""  # of their text, what later tokens will not change
        self._doubtful = ""  # what comes after it: U+FFFD, which may turn out to be the beginning of a character
        self._held = ""  # known, but perhaps the beginning of a stop string
        self._pieces: list[str] = []  # given out
        self._num_taken = 0  # of the pieces
        self.stopped_by: str | None = None
        """The stop string that was found; the text ends before it, or with it."""

    @classmethod
    def of_all(
        cls, token_ids: Sequence[int], decode: Decode, prompt_token_ids: Sequence[int] = (), prompt: str | None = None
    ) -> Detokenizer:
        """The detokenizer of a whole output, finished. Decodes all tokens at once if that surely gives the same text,
        and one by one otherwise."""
        made = cls(decode, prompt_token_ids=prompt_token_ids, prompt=prompt)
        if not token_ids:
            return made
        before, known = _end_of_prompt(prompt_token_ids, prompt, decode)
        text = decode([*before, *token_ids])
        if text.startswith(known) and NOT_WHOLE not in text[len(known) :]:
            made._pieces.append(text[len(known) :])
            return made
        for token_id in token_ids:
            made.add(token_id)
        made.finish()
        return made

    @property
    def text(self) -> str:
        """All that was given out."""
        return "".join(self._pieces)

    def take(self) -> str:
        """What was given out since the last call."""
        pieces, self._num_taken = self._pieces[self._num_taken :], len(self._pieces)
        return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def add(self, token_id: int, *, may_stop: bool = True) -> None:
        """Take one more token. `may_stop`: look for stop strings that end with it. What raises changes nothing."""
        if self._tokens is None:
            self._tokens, self._known = _end_of_prompt(*self._prompt, self._decode)
        tokens = [*self._tokens, token_id]
        text = self._decode(tokens)
        if text and text == self._known:
            return  # a token without text, as special ones are
        known = _known_part(text)
        if len(known) < len(text) and not known.startswith(self._known) and len(tokens) < MOST_TOKENS:
            known = self._known  # bytes that spoil the character before them may yet turn out to be one themselves
        added, doubtful = known[len(self._known) :], text[len(known) :]
        if len(tokens) >= (MOST_TOKENS if doubtful else 2 * CONTEXT_TOKENS):
            tokens, known = _last_tokens(tokens, self._decode)
        self._tokens, self._known, self._doubtful = tokens, known, doubtful
        self._give(added, may_stop)

    def finish(self) -> None:
        """No token comes any more: give out what was held back."""
        if self.stopped_by is None and (rest := self._held + self._doubtful):
            self._pieces.append(rest)
        self._held = self._doubtful = ""

    def fork(self) -> Detokenizer:
        """A detokenizer for a sequence that has the same tokens so far, and has reported none of them."""
        child = copy.copy(self)
        child._pieces, child._num_taken = list(self._pieces), 0
        return child

    def _give(self, added: str, may_stop: bool) -> None:
        """More text is known: give out all of it that is before any stop string, and before what may become one."""
        text = self._held + added
        if self._stop:
            if may_stop and (found := find_stop(text, len(added), self._stop)):
                position, self.stopped_by = found
                position += len(self.stopped_by) if self._keeps_stop else 0
            else:
                position = len(text) - _length_held(text, self._stop)
            self._held = text[position:]
            text = text[:position]
        if text:
            self._pieces.append(text)


def text_of(
    token_ids: Sequence[int], decode: Decode, prompt_token_ids: Sequence[int] = (), prompt: str | None = None
) -> str:
    """The text of a whole output."""
    return Detokenizer.of_all(token_ids, decode, prompt_token_ids, prompt).text


def _end_of_prompt(prompt_token_ids: Sequence[int], prompt: str | None, decode: Decode) -> tuple[list[int], str]:
    """The last tokens of a prompt, and their text without the beginning of a character.

    They begin with a whole character, and have some text if the prompt has any. With no text before it (special tokens
    alone, or a space that the decoder drops), the first word of the output would lose the space before it.
    """
    tokens, text = list(prompt_token_ids[-CONTEXT_TOKENS:]), ""
    for count in _doublings(CONTEXT_TOKENS, len(prompt_token_ids)):
        latest = list(prompt_token_ids[-count:])
        if text := decode(latest):
            tokens = latest
            if count >= MOST_TOKENS or not text.startswith(NOT_WHOLE):
                break
    if prompt is not None and prompt.endswith(text[len(text.rstrip(NOT_WHOLE)) :]):
        return tokens, text  # the prompt's own text ends with these U+FFFD
    return tokens, text_without_end(tokens, decode)


def text_without_end(token_ids: Sequence[int], decode: Decode) -> str:
    """The text of a prompt that is given as tokens, without the beginning of a character at its end.

    Some decoders show all bytes around a bad one as U+FFFD. Decoding fewer tokens then shows the characters before it.
    """
    whole = decode(token_ids)
    if not whole.endswith(NOT_WHOLE):
        return whole
    text = _known_part(whole)
    for count in range(1, CONTEXT_TOKENS):  # some of them may be special tokens, which have no text
        shorter = decode(token_ids[: len(token_ids) - count])
        if not shorter.endswith(NOT_WHOLE):
            return max(text.rstrip(NOT_WHOLE), shorter, key=len)
    return text


def _doublings(first: int, last: int) -> Iterator[int]:
    """`first`, twice that, and so on, and then `last`; nothing if `last` is 0."""
    while first < last:
        yield first
        first *= 2
    if last:
        yield last


def _last_tokens(tokens: list[int], decode: Decode) -> tuple[list[int], str]:
    """The latest tokens, from the beginning of a character on, and what is known of their text."""
    for count in (*range(CONTEXT_TOKENS, CONTEXT_TOKENS + MOST_DOUBTFUL), 2 * CONTEXT_TOKENS, MOST_TOKENS):
        latest = tokens[-count:]
        text = decode(latest)
        if not text.startswith(NOT_WHOLE):
            return latest, _known_part(text)
    latest = tokens[-CONTEXT_TOKENS - MOST_DOUBTFUL :]  # there is no character in sight
    return latest, _known_part(decode(latest))


def _known_part(text: str) -> str:
    """The text without its last characters that more tokens may change: U+FFFD in place of an unfinished character."""
    whole = text.rstrip(NOT_WHOLE)
    return text[: max(len(whole), len(text) - MOST_DOUBTFUL)]


def find_stop(text: str, num_added: int, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest stop string begins that ends within the last `num_added` characters, and which it is."""
    found = [
        (position, string)
        for string in stop
        if (position := text.find(string, max(0, len(text) - num_added - len(string) + 1))) >= 0
    ]
    return min(found, default=None)


def _length_held(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of `text` with which a stop string begins, but does not end."""
    lengths = ((string, length) for string in stop for length in range(1, min(len(string), len(text) + 1)))
    return max((length for string, length in lengths if text.endswith(string[:length])), default=0)


def naming_failures(decode: Decode) -> Decode:
    """The same function; an error within it is raised as DetokenizerFailed, which ends one request and no other."""

    def named(token_ids: Sequence[int]) -> str:
        try:
            return decode(token_ids)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise DetokenizerFailed(
                f"the tokens {[*token_ids[-3:]]} at the end of {len(token_ids)} could not be decoded: "
                f"{type(error).__name__}: {error}; see that the tokenizer is this model's"
            ) from error

    return named
