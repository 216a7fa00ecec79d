"""Texts to calibrate with and to measure on: a file, or what every Python brings.

The default is the documentation of Python's language in `pydoc_data.topics`, about 110,000 tokens: its first half is to
measure on. What to calibrate with is the second, without any paragraph that is in the first as well (topics repeat each
other): no model is measured on what it was made with. The text differs between versions of Python, so figures can be
compared only where that is the same.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

from minipaged.errors import InvalidRequest
from minipaged.models.tokenizer import Tokenizer


def text_of(path: Path | None, *, for_calibration: bool) -> str:
    """The text in a file, or half of the default. Raises InvalidRequest for a file that cannot be read."""
    if path is None:
        return default_text(for_calibration=for_calibration)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequest(f"the text {path} cannot be read: {reason}") from None


def default_text(*, for_calibration: bool) -> str:
    """Half of Python's documentation, topic after topic."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    middle = len(paragraphs) // 2
    if not for_calibration:
        return "\n\n".join(paragraphs[:middle])
    measured = set(paragraphs[:middle])
    return "\n\n".join(paragraph for paragraph in paragraphs[middle:] if paragraph not in measured)


def tokens_of(text: str, folder: Path) -> list[int]:
    """The tokens of a text, for the model in `folder`. Raises InvalidRequest if there are fewer than two."""
    ids = Tokenizer(folder).encode(text)
    if len(ids) < 2:
        raise InvalidRequest(f"the text has {len(ids)} tokens; give one of at least two")
    return ids


def windows_of(ids: list[int], length: int, num_tokens: int) -> list[list[int]]:
    """Pieces of `length` tokens, about `num_tokens` in all, spread evenly over the text; one, if it is shorter."""
    if len(ids) <= length:
        return [ids]
    number = min(max(num_tokens // length, 1), len(ids) // length)
    gap = (len(ids) - length) / max(number - 1, 1)  # tokens from one's beginning to the next one's
    return [ids[(first := round(i * gap)) : first + length] for i in range(number)]
