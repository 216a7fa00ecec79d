"""What is stepped through works in two browsers: every test here that asks for one runs in both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest


@pytest.fixture(scope="session")
def firefox(request: pytest.FixtureRequest) -> Iterator[Any]:
    from tests.browser import Firefox

    with closing(Firefox(request.getfixturevalue("playwright"))) as browser:
        yield browser


@pytest.fixture(params=["chromium", "firefox"])
def browser(request: pytest.FixtureRequest) -> Any:
    """Chromium or Firefox, or a skipped test."""
    return request.getfixturevalue(request.param)
