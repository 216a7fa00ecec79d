"""A browser for the tests: Chromium without a window, driven by Playwright. Nothing it asks for leaves the machine.

Where there is no Chromium (or no npm, for axe-core) its tests are skipped, with the reason; MINIPAGED_NEEDS_BROWSER=1
makes that a failure instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from docs import npm

ROOT = Path(__file__).parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_CHROMIUM = "there is no Chromium here; on Debian: apt-get install chromium npm"
AXE = "axe-core@4.14.1"
AXE_SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="


def missing(message: str) -> Any:
    """Skip, or fail where a browser is asked for."""
    if os.environ.get("MINIPAGED_NEEDS_BROWSER") == "1":
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def chromium() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None) or missing(NO_CHROMIUM)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # it opens our pages alone
        yield browser
        browser.close()


class Watched:
    """A page, with what it complained of and what it asked for."""

    def __init__(self, browser: Browser, **settings: Any) -> None:
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page: Page = browser.new_page(**settings)
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type != "log" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def check(self) -> None:
        """Nothing was said on the console, and nothing was asked for but files of this machine."""
        assert not self.complaints, self.complaints
        for url in self.asked:
            assert url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:", "about:")), url


@contextmanager
def watching(browser: Browser, **settings: Any) -> Iterator[Watched]:
    """A page that is checked in the end, and closed whatever happens."""
    watched = Watched(browser, **settings)
    try:
        yield watched
        watched.check()
    finally:
        watched.page.close()


SCREENS = {
    "desktop": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
}


def from_npm(package: str, sha512: str) -> Path:
    """The package's archive, or a skipped test."""
    try:
        return npm.fetch(package, sha512)
    except npm.NotFetched as error:
        return missing(str(error))


def axe_script() -> str:
    """axe-core, fetched once from the npm registry and checked."""
    return npm.read(from_npm(AXE, AXE_SHA512), "axe.min.js").decode()
