"""Text, one token at a time: as much as can be shown of a sequence that still grows.

Only two things are held back until more is known:

- *the beginning of a character*. A token is some bytes, which need not be whole characters. A decoder shows bytes that
  are no character (or not yet one) as U+FFFD. At the end of the text, these wait for the next tokens;
- *the beginning of a stop string*, because a stop string is cut off the text: after "one tw" with stop="two", "tw"
  waits. If there are several stop strings, the longest such beginning counts. (It also waits if the stop string will
  stay in the text.)

Text that was given out is never taken back, and `finish` gives out the rest. So the pieces joined are always the text.

Some decoders drop a space at the beginning, and some need the neighbours of a byte to find its character. So a token is
decoded after a few earlier ones, and the text that it adds to theirs is new. The first token of the output is decoded
after the prompt's last tokens. So the text of the prompt and the text of the output, joined, are the text of all their
tokens (the invariant text-of-all). A character that begins in the prompt and ends in the output belongs to the output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

from minipaged.errors import DetokenizerFailed

Decode = Callable[..., str]
"""A function from token ids to text. It receives `skip_special_tokens=False` if the text shows special tokens, and
`spaces_between_special_tokens=False` if it shows them without spaces between them."""
Encode = Callable[..., Sequence[int]]
"""A function from a text to token ids. It receives `add_special_tokens=False`."""

NOT_WHOLE = "\ufffd"
"""The character that decoders show for bytes that are no character, or not yet one."""
PANIC = "PanicException"
"""The name of the error that the tokenizers library raises when it fails in Rust; it is no `Exception`."""
MOST_DOUBTFUL = 3
"""The most bytes of an incomplete UTF-8 character. Some decoders show U+FFFD for each of them, others one for all."""
CONTEXT_TOKENS = 6
"""The smallest number of earlier tokens that are decoded along with a new one."""
MOST_TOKENS = 64
"""The largest number of tokens decoded together, even if no character ever becomes whole."""


class Detokenizer:
    """The growing text of one sequence's output, up to the first of its stop strings (`keeps_stop`: including it).

    `prompt_token_ids` come before the output. `prompt`: their text, if they were given as text; its last character is
    then whole. The prompt is decoded when the first token is added.
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
        self._tokens: list[int] | None = None  # the latest, decoded together; None: no token was added yet
        self._known = ""  # the part of their text that later tokens will not change
        self._doubtful = ""  # the rest of it: U+FFFD, perhaps the beginning of a character
        self._held = ""  # known, but perhaps the beginning of a stop string
        self._pieces: list[str] = []  # text given out
        self._num_taken = 0  # pieces that `take` has returned
        self.stopped_by: str | None = None
        """The stop string that was found, if any; the text ends before it, or with it."""

    @classmethod
    def of_all(
        cls, token_ids: Sequence[int], decode: Decode, prompt_token_ids: Sequence[int] = (), prompt: str | None = None
    ) -> Detokenizer:
        """Return the finished detokenizer of a whole output. It decodes all tokens together if that surely gives the
        same text, and one by one otherwise."""
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
        """All text given out."""
        return "".join(self._pieces)

    def take(self) -> str:
        """Return the text given out since the last call."""
        pieces, self._num_taken = self._pieces[self._num_taken :], len(self._pieces)
        return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def add(self, token_id: int, *, may_stop: bool = True) -> None:
        """Add one token. `may_stop`: look for stop strings that end with it. If this raises, nothing has changed."""
        if self._tokens is None:
            self._tokens, self._known = _end_of_prompt(*self._prompt, self._decode)
        tokens = [*self._tokens, token_id]
        text = self._decode(tokens)
        if text and text == self._known:
            return  # a token without text, such as a special token
        known = _known_part(text)
        if len(known) < len(text) and not known.startswith(self._known) and len(tokens) < MOST_TOKENS:
            known = self._known  # bytes that spoil the character before them may yet become a character
        added, doubtful = known[len(self._known) :], text[len(known) :]
        if len(tokens) >= (MOST_TOKENS if doubtful else 2 * CONTEXT_TOKENS):
            tokens, known = _last_tokens(tokens, self._decode)
        self._tokens, self._known, self._doubtful = tokens, known, doubtful
        self._give(added, may_stop)

    def finish(self) -> None:
        """Give out the text held back: no more tokens will come."""
        if self.stopped_by is None and (rest := self._held + self._doubtful):
            self._pieces.append(rest)
        self._held = self._doubtful = ""

    def fork(self) -> Detokenizer:
        """Return a detokenizer for a sequence with the same tokens so far, none of them reported."""
        child = copy.copy(self)
        child._pieces, child._num_taken = list(self._pieces), 0
        return child

    def _give(self, added: str, may_stop: bool) -> None:
        """Add text that is known. Give out what precedes any stop string, and any possible beginning of one."""
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
    """Return the text of a whole output."""
    return Detokenizer.of_all(token_ids, decode, prompt_token_ids, prompt).text


def _end_of_prompt(prompt_token_ids: Sequence[int], prompt: str | None, decode: Decode) -> tuple[list[int], str]:
    """Return the last tokens of a prompt, and their text without the beginning of a character.

    The tokens begin with a whole character, and have some text if the prompt has any. Without text before it (only
    special tokens, or a space that the decoder drops), the first word of the output would lose the space before it.
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
    """Return the text of a prompt given as tokens, without the beginning of a character at its end.

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
    """Yield `first`, twice that, and so on while it is below `last`; then `last`, unless that is 0."""
    while first < last:
        yield first
        first *= 2
    if last:
        yield last


def _last_tokens(tokens: list[int], decode: Decode) -> tuple[list[int], str]:
    """Return the latest tokens, from the beginning of a character on, and the known part of their text."""
    for count in (*range(CONTEXT_TOKENS, CONTEXT_TOKENS + MOST_DOUBTFUL), 2 * CONTEXT_TOKENS, MOST_TOKENS):
        latest = tokens[-count:]
        text = decode(latest)
        if not text.startswith(NOT_WHOLE):
            return latest, _known_part(text)
    latest = tokens[-CONTEXT_TOKENS - MOST_DOUBTFUL :]  # no beginning of a character was found
    return latest, _known_part(decode(latest))


def _known_part(text: str) -> str:
    """Return the text without its last characters that more tokens may change: U+FFFD for an unfinished character."""
    whole = text.rstrip(NOT_WHOLE)
    return text[: max(len(whole), len(text) - MOST_DOUBTFUL)]


def find_stop(text: str, num_added: int, stop: Sequence[str]) -> tuple[int, str] | None:
    """Return (position, string) of the earliest stop string ending in the last `num_added` characters, or None."""
    found = [
        (position, string)
        for string in stop
        if (position := text.find(string, max(0, len(text) - num_added - len(string) + 1))) >= 0
    ]
    return min(found, default=None)


def _length_held(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a stop string without completing it."""
    lengths = ((string, length) for string in stop for length in range(1, min(len(string), len(text) + 1)))
    return max((length for string, length in lengths if text.endswith(string[:length])), default=0)


def naming_failures(decode: Decode) -> Decode:
    """Wrap `decode` so that its errors are raised as DetokenizerFailed, which ends one request and no other."""

    def named(token_ids: Sequence[int]) -> str:
        try:
            return decode(token_ids)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise DetokenizerFailed(
                f"the tokens {[*token_ids[-3:]]} at the end of {len(token_ids)} could not be decoded: "
                f"{type(error).__name__}: {error}; check that the tokenizer is this model's"
            ) from error

    return named
