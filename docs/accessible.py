"""A hook of mkdocs: mends what axe-core finds wrong in pages as Markdown and the theme make them."""

from __future__ import annotations

import re
from typing import Any

EMPTY_HEADER = re.compile(r"<th([^>]*)></th>")
"""A corner of a table: it is the header of nothing."""
NESTED = re.compile(r'<nav class="md-nav" aria-label="[^"]*">')
"""Within the table of contents: a landmark for each heading, many of the same name."""


def on_page_content(html: str, **_: Any) -> str:
    return EMPTY_HEADER.sub(r"<td\1></td>", html)


def on_post_page(output: str, **_: Any) -> str:
    return NESTED.sub('<nav class="md-nav" role="presentation">', output)
