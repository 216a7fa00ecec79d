"""How many random examples the tests try: three Hypothesis profiles, and everything that is counted in proportion.

| profile  | command             | examples                                     |
|----------|---------------------|----------------------------------------------|
| quick    | `make test`         | a tenth, always the same ones                |
| thorough | `make test-all`     | all of them, at random; the seed is printed  |
| nightly  | `make test-nightly` | ten times as many, at random                 |

A test that needs another number of examples than its neighbours says so by `examples(n)`: n of them when thorough.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

THOROUGH = 100
"""Hypothesis' own default, and what `examples` counts in proportion to."""

settings.register_profile("quick", max_examples=THOROUGH // 10, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=THOROUGH, deadline=None, print_blob=True)
settings.register_profile("nightly", max_examples=THOROUGH * 10, deadline=None, print_blob=True)

scaled = pytest.mark.scaled
"""Marks a test that counts by `examples`; Hypothesis' own are found without it."""


def examples(thorough: int, least: int = 2) -> int:
    """As many in the profile that runs as `thorough` in the thorough one, and `least` in any."""
    return max(least, thorough * settings.default.max_examples // THOROUGH)


def seeds(thorough: int, chunk: int, *, first: int = 0, least: int = 2) -> list[range]:
    """`examples(thorough, least)` seeds from `first` on, in parts of `chunk`: a test each, so that cores share them."""
    end = first + examples(thorough, least)
    return [range(begin, min(begin + chunk, end)) for begin in range(first, end, chunk)]
