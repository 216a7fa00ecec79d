"""Texts for calibration and for measuring: a file, or a text that comes with Python.

The default is the documentation of the Python language in `pydoc_data.topics`, about 110,000 tokens. Its first half is
for measuring. Its second half is for calibration, without paragraphs that are in the first half too (topics repeat each
other), so that no model is measured on the text it was calibrated with. The text differs between versions of Python, so
only figures from the same version can be compared.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

from minipaged.errors import InvalidRequest
from minipaged.models.tokenizer import Tokenizer


def text_of(path: Path | None, *, for_calibration: bool) -> str:
    """The text in a file, or half of the default text. Raises InvalidRequest for a file that cannot be read."""
    if path is None:
        return default_text(for_calibration=for_calibration)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequest(f"the text {path} cannot be read: {reason}") from None


def default_text(*, for_calibration: bool) -> str:
    """One half of Python's documentation, topic after topic: the second for calibration, the first for measuring."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    middle = len(paragraphs) // 2
    if not for_calibration:
        return "\n\n".join(paragraphs[:middle])
    measured = set(paragraphs[:middle])
    return "\n\n".join(paragraph for paragraph in paragraphs[middle:] if paragraph not in measured)


def tokens_of(text: str, folder: Path) -> list[int]:
    """The tokens of a text, by the tokenizer in `folder`. Raises InvalidRequest if there are fewer than two."""
    ids = Tokenizer(folder).encode(text)
    if len(ids) < 2:
        raise InvalidRequest(f"the text has {len(ids)} tokens; give one of at least two")
    return ids


def windows_of(ids: list[int], length: int, num_tokens: int) -> list[list[int]]:
    """Windows of `length` tokens, about `num_tokens` in all, spread evenly; a text that is shorter is one window."""
    if len(ids) <= length:
        return [ids]
    number = min(max(num_tokens // length, 1), len(ids) // length)
    gap = (len(ids) - length) / max(number - 1, 1)  # tokens from the start of one window to that of the next
    return [ids[(first := round(i * gap)) : first + length] for i in range(number)]
