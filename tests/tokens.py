"""A vocabulary of bytes: characters whole and in parts, cut anywhere; and two ways to decode it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from minipaged.engine.detokenizer import text_without_end

_EURO, _SMILE = "€".encode(), "😀".encode()
PIECES = (
    *(b"a", b"b", b" ", b" a", b"ab", b"", b"\xff", b"\x80", _EURO, _SMILE, _SMILE[:2], _SMILE[2:], _EURO[:2]),
    *(bytes([byte]) for byte in _EURO + _SMILE),
    *(b"b" + _EURO[:1], _EURO[1:] + b"a", _EURO[2:] + _EURO[:1], b"a" + _SMILE[:3], _SMILE[3:] + _EURO[:2]),
)
"""The bytes of each token."""


def token(piece: bytes | str) -> int:
    """The token of these bytes."""
    return PIECES.index(piece.encode() if isinstance(piece, str) else piece)


def bytes_joined(token_ids: Sequence[int]) -> str:
    """As byte-level BPE does it."""
    return b"".join(PIECES[one] for one in token_ids).decode(errors="replace")


def bytes_alone(token_ids: Sequence[int]) -> str:
    """As decoders with a byte fallback do it: a token that is no text is a byte, and a row of them, unless all of it is
    UTF-8, is shown as U+FFFD for each. (A token without text is none of the row.)"""
    pieces = [PIECES[one] for one in token_ids if PIECES[one]]
    text = ""
    for are_bytes, row in groupby(pieces, key=lambda piece: len(piece) == 1 and piece[0] >= 0x80):
        joined = list(row)
        try:
            text += b"".join(joined).decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(joined) if are_bytes else b"".join(joined).decode(errors="replace")
    return text


def text_behind(prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of an output behind a prompt, by `bytes_joined`: what is left of the text of all their tokens without
    the prompt's text, which ends before a character that it only begins."""
    if not token_ids:
        return ""
    shown = text_without_end(prompt_token_ids, bytes_joined)
    whole = bytes_joined([*prompt_token_ids, *token_ids])
    assert whole.startswith(shown)
    assert bytes_joined(prompt_token_ids).removeprefix(shown).strip("\ufffd") == ""
    return whole.removeprefix(shown)
