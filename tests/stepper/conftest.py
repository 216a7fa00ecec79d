"""What is stepped through works in two browsers: tests of pointer, layout and each kind of page run in both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

import pytest


@pytest.fixture(scope="session")
def firefox(request: pytest.FixtureRequest) -> Iterator[Any]:
    from tests.browser import Firefox

    with closing(Firefox(request.getfixturevalue("playwright"))) as browser:
        yield browser


@pytest.fixture
def browser(request: pytest.FixtureRequest) -> Any:
    """Chromium, and Firefox too where a test is marked `in_both`; or a skipped test."""
    return request.getfixturevalue(getattr(request, "param", "chromium"))


@pytest.fixture
def visiting(tabs: Any, browser: Any) -> Callable[..., AbstractContextManager[Any]]:
    """Opens a page in a tab that an earlier test may have used: `with visiting(file, **settings) as watched`."""
    return partial(tabs.visiting, browser)
