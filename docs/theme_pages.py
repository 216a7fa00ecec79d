"""A hook of mkdocs: mends what axe-core finds wrong in pages as Markdown and the theme make them, and says of a page's
body what it has."""

from __future__ import annotations

import re
from typing import Any

EMPTY_HEADER = re.compile(r"<th([^>]*)></th>")
"""A corner of a table: it is the header of nothing."""
NESTED = re.compile(r'<nav class="md-nav" aria-label="[^"]*">')
"""Within the table of contents: a landmark for each heading, many of the same name."""

HAS = re.compile(r'<(?:div|figure) class="(opening|twins)\b')
"""What site.css draws a whole page otherwise for. It does not ask for it by `:has()`: whenever the theme's script then
puts anything into a long page, a browser looks through all of it. (On a slow machine a page of 1,348 blocks of code
took 48 s, in place of 9.)"""


def on_page_content(html: str, **_: Any) -> str:
    return EMPTY_HEADER.sub(r"<td\1></td>", html)


def on_post_page(output: str, **_: Any) -> str:
    output = NESTED.sub('<nav class="md-nav" role="presentation">', output)
    classes = " ".join(sorted(f"has-{part}" for part in {*HAS.findall(output)}))
    return output.replace("<body ", f'<body class="{classes}" ', 1) if classes else output
