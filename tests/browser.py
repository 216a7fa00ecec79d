"""Browsers for the tests: Chromium and Firefox without a window, driven by Playwright. Nothing they ask for leaves the
machine.

Where there is no such browser (or no npm, for axe-core) its tests are skipped, with the reason;
MINIPAGED_NEEDS_BROWSER=1 makes that a failure instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright

from docs import npm

ROOT = Path(__file__).parent.parent
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_CHROMIUM = "there is no Chromium here; on Debian: apt-get install chromium npm"
FIREFOX = ("firefox-esr", "firefox")
NO_FIREFOX = "there is no Firefox here; on Debian: apt-get install firefox-esr"
AXE = "axe-core@4.14.1"
AXE_SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="


COLOURS = {"runOnly": ["color-contrast", "link-in-text-block"]}
"""The rules of axe that may judge a page otherwise in its other colour scheme."""

in_both = pytest.mark.parametrize("browser", ["chromium", "firefox"], indirect=True)
"""Marks a test of the stepper that runs in Firefox, too."""


def missing(message: str) -> Any:
    """Skip, or fail where a browser is asked for."""
    if os.environ.get("MINIPAGED_NEEDS_BROWSER") == "1":
        pytest.fail(message)
    pytest.skip(message)


def chromium(playwright: Playwright) -> Browser:
    path = next(filter(None, map(shutil.which, CHROMIUM)), None) or missing(NO_CHROMIUM)
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # it opens our pages alone


class Firefox:
    """The Firefox that is installed, by WebDriver BiDi: makes pages, as a `Browser` does.

    What its reader prefers Firefox is told when it starts, so there is one for each preference that a test asks for.
    """

    def __init__(self, playwright: Playwright) -> None:
        self._path = next(filter(None, map(shutil.which, FIREFOX)), None) or missing(NO_FIREFOX)
        self._launch = playwright.firefox.launch
        self._started: dict[tuple[str, str], Browser] = {}

    def new_page(self, *, color_scheme: str = "light", reduced_motion: str = "no-preference", **settings: Any) -> Page:
        prefers = (color_scheme, reduced_motion)
        if prefers not in self._started:
            preferences: dict[str, str | float | bool] = {
                "layout.css.prefers-color-scheme.content-override": ("dark", "light").index(color_scheme),
                "ui.prefersReducedMotion": int(reduced_motion == "reduce"),
            }
            self._started[prefers] = self._launch(
                channel="moz-firefox", executable_path=self._path, firefox_user_prefs=preferences
            )
        return self._started[prefers].new_page(**settings)

    def close(self) -> None:
        for browser in self._started.values():
            browser.close()


class Watched:
    """A page, with what it complained of and what it asked for."""

    def __init__(self, browser: Browser | Firefox, **settings: Any) -> None:
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
def watching(browser: Browser | Firefox, **settings: Any) -> Iterator[Watched]:
    """A page that is checked in the end, and closed whatever happens."""
    watched = Watched(browser, **settings)
    try:
        yield watched
        watched.check()
    finally:
        watched.page.close()


class Tabs:
    """Pages that tests use one after the other. A new one costs ten times as much as going to another address.

    A test finds the page as a new one: the address is loaded again, with the pointer where it was when the tab was
    opened. A test that changes more (the media, the screen, the storage, a clock) needs a page of its own.
    """

    def __init__(self) -> None:
        self._opened: dict[str, Watched] = {}  # until its browser is closed

    @contextmanager
    def visiting(self, browser: Browser | Firefox, file: Path, query: str = "", **settings: Any) -> Iterator[Watched]:
        """The page of that file, which is checked in the end. A test that fails leaves no tab behind."""
        tab = f"{type(browser)} {settings}"
        if (watched := self._opened.pop(tab, None)) is None:
            watched = Watched(browser, **settings)
        page = watched.page
        try:
            watched.complaints.clear()
            watched.asked.clear()
            page.bring_to_front()  # in Firefox, a tab behind another has no focus
            page.mouse.move(0, 0)
            page.goto(file.as_uri() + query)
            yield watched
            watched.check()
        except BaseException:
            page.close()
            raise
        self._opened[tab] = watched


def stop_time(page: Page) -> None:
    """The page's clock stands still; `page.clock.run_for` alone moves it, however busy the machine is."""
    page.clock.install(time=0)
    page.clock.pause_at(3600)  # later than however long the page has taken since then


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


def axe_violations(page: Page, within: str | None = None, **options: Any) -> list[dict[str, Any]]:
    """What axe finds in the page, which has its script: in all of it, or `within` an element. `options` are axe's."""
    found = page.evaluate(
        "([within, options]) => axe.run(within ?? document, {resultTypes: ['violations'], ...options})",
        [within, options],
    )
    listed: list[dict[str, Any]] = found["violations"]
    return listed


def axe_script() -> str:
    """axe-core, fetched once from the npm registry and checked."""
    return npm.read(from_npm(AXE, AXE_SHA512), "axe.min.js").decode()
