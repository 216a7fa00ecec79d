"""A browser for the tests: Chromium without a window, driven by Playwright. Nothing it asks for leaves the machine.

Where there is no Chromium (or no npm, for axe-core) its tests are skipped, with the reason; MINIPAGED_NEEDS_BROWSER=1
makes that a failure instead.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
AXE = "axe-core@4.14.1"
AXE_SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="


def missing(what: str) -> Any:
    """Skip, or fail where a browser is asked for."""
    message = f"there is no {what} here; on Debian: apt-get install chromium npm"
    if os.environ.get("MINIPAGED_NEEDS_BROWSER") == "1":
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def chromium() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None) or missing("Chromium")
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
        assert not self.complaints
        for url in self.asked:
            assert url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:", "about:")), url


def axe_script() -> str:
    """axe-core, fetched once from the npm registry and checked."""
    folder = ROOT / "build" / "axe"
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{AXE.replace('@', '-')}.tgz"
    with FileLock(folder / "lock"):
        if not archive.is_file():
            npm = shutil.which("npm") or missing("npm")
            subprocess.run([npm, "pack", AXE, "--silent"], cwd=folder, check=True, capture_output=True, timeout=120)
    digest = hashlib.sha512(archive.read_bytes()).digest()
    assert base64.b64encode(digest).decode() == AXE_SHA512, f"{archive} is not what it was"
    with tarfile.open(archive) as files:
        script = files.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()
