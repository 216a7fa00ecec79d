"""An assignment in a page: written, graded by Python in that page, and what failed stepped through there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from playwright.sync_api import Browser, Page

from docs import build, python_in_page
from minipaged.course.grader.assignment import Submission, find_assignment
from minipaged.course.grader.formats import as_json
from minipaged.course.grader.grading import grade
from minipaged.course.grader.handouts import files_of
from minipaged.course.grader.mutants import find_seeded
from minipaged.stepper.page import STEPPER
from tests.browser import Watched, axe_script, axe_violations, watching
from tests.course.conftest import FEWER_IN_A_PAGE

ASSETS = build.ROOT / "docs" / "assets"
SCRIPTS = ("iframe-worker", "stepper", "editor", "grader")
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>An assignment</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>:root {color-scheme: light dark} body {background: Canvas} [hidden] {display: none}</style>
""" + "".join(f'<script src="{name}.js" defer></script>' for name in SCRIPTS)
NAMES = ("block-allocator", "block-table", "scheduler", "prefix-cache", "eviction", "windows", "speculative")
LONG = 240_000
"""Milliseconds: Python in a page is several times slower, and other tests run beside it."""


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line as many as in the page, which in the nightly profile has as many as a grade."""
    if settings.get_current_profile_name() != "nightly":
        for module, name, number in FEWER_IN_A_PAGE:
            monkeypatch.setattr(module, name, number)


def write_grading(folder: Path) -> None:
    """The script `grading.js`, in whose Python there are fewer examples."""
    sources = python_in_page.sources

    def fewer(parts: Sequence[str]) -> dict[str, str]:
        files = sources(parts)
        for module, name, number in FEWER_IN_A_PAGE:
            path = Path(str(module.__file__)).relative_to(python_in_page.ROOT).as_posix()
            files[path], replaced = re.subn(rf"^{name} = .*", f"{name} = {number}", files[path], flags=re.MULTILINE)
            assert replaced == 1
        return files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python_in_page, "sources", fewer)
        python_in_page.write_grading(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, python_scripts: Path) -> Path:
    """A page for each assignment that is graded in one, as the site has it, but for the number of examples."""
    folder = tmp_path_factory.mktemp("grader")
    for script in (STEPPER, *(ASSETS / f"{name}.js" for name in SCRIPTS if name != "stepper")):
        shutil.copy(script, folder)
    for script in ("python.js", "grading.js"):
        shutil.copy(python_scripts / script, folder)
    if settings.get_current_profile_name() != "nightly":
        write_grading(folder)
    for name in NAMES:
        [element] = re.findall(r"<div><paged-grader.*</div>", build.in_the_page(name))
        (folder / f"{name}.html").write_text(f"{HEAD}<main><h1>An assignment</h1>{element}</main>")
    return folder


def opened(page: Page, folder: Path, name: str) -> Any:
    """The text field, once Python is there."""
    page.goto((folder / f"{name}.html").as_uri())
    page.get_by_role("button", name="Write it here").click()
    page.get_by_text("Python is here").wait_for(timeout=LONG)
    return page.get_by_role("textbox", name="The code")


PageOf = Callable[[str], Watched]


@pytest.fixture(scope="module")
def page_of(chromium: Browser, folder: Path) -> Iterator[PageOf]:
    """A page of each assignment, in which tests grade one after the other: to start Python takes seconds."""
    pages: dict[str, Watched] = {}
    with ExitStack() as stack:

        def page_of(name: str) -> Watched:
            if name not in pages:
                pages[name] = stack.enter_context(watching(chromium))
                opened(pages[name].page, folder, name)
            return pages[name]

        yield page_of


def graded(page: Page, source: str) -> str:
    """What is said once this has been graded."""
    page.get_by_role("textbox", name="The code").fill(source)
    page.get_by_role("button", name="Grade").click()
    said = page.get_by_role("status").filter(has_not_text="…")
    said.wait_for(timeout=LONG)
    return said.text_content() or ""


def on_the_command_line(name: str, source: str, folder: Path) -> dict[str, Any]:
    """What --format json says with --no-model."""
    path = folder / f"{name.replace('-', '_')}.py"
    path.write_text(source)
    result = grade(replace(find_assignment(name), measure=None), Submission(path), model=None)
    graded: dict[str, Any] = json.loads(as_json(result))
    return graded


def found_in(page: Page) -> list[list[str]]:
    """Points and name of each test, as the page shows them."""
    lines = page.locator("paged-grader li").filter(has=page.locator(".points"))
    return lines.evaluate_all(
        "lines => lines.map(l => [...l.querySelectorAll('span')].slice(0, 2).map(s => s.textContent))"
    )


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("block-allocator", "copy-keeps-the-reference"),
        ("block-table", "trim gives nothing back"),
        ("scheduler", "the largest makes room"),
        ("prefix-cache", "any beginning will do"),
        ("eviction", "no pins"),
        ("windows", "a token too early"),
        ("speculative", "whole blocks stay"),
    ],
)
def test_a_seeded_bug_gets_the_points_and_the_counterexample_of_the_command_line(
    page_of: PageOf, tmp_path: Path, name: str, bug: str
) -> None:
    watched = page_of(name)
    page = watched.page
    source = find_seeded(name).mutants[bug].source
    assert graded(page, source).startswith("Graded: ")
    there = on_the_command_line(name, source, tmp_path)
    expected = there["tests"]
    points = {"skipped": "not run", "not-graded": "not here"}
    assert found_in(page) == [
        [points.get(test["status"], f"{test['score']}/{test['max_score']}"), test["name"]] for test in expected
    ]
    score = f"{there['score']} of {there['max_score']} points."
    assert page.locator("paged-grader .score").text_content().startswith(score)
    failed = next(test for test in expected if test["status"] == "failed")
    place, here = json.dumps(str(tmp_path)), '"."'  # where the student's file lies
    assert page.locator("paged-grader .found pre").all_text_contents()[:2] == [
        "\n".join(failed["counterexample"]["drawing"]),
        failed["counterexample"]["script"].replace(place, here),
    ]
    stepper = page.locator("paged-grader paged-stepper")
    assert stepper.locator(".say").text_content().startswith("Broken here: ")
    translated = page.get_by_text("In the run allocate is a request that arrives, share a sequence that forks")
    assert translated.count() == (name == "block-allocator")
    [marked] = re.findall(r"▶ (\d+)", page.locator("paged-grader .numbers").text_content())
    assert source.splitlines()[int(marked) - 1].strip() in stepper.locator(".code").text_content()
    watched.check()


def test_a_right_part_gets_all_points_but_those_of_the_command_line(page_of: PageOf) -> None:
    watched = page_of("block-allocator")
    page = watched.page
    assert graded(page, find_seeded("block-allocator").right["the reference"]) == "Graded: all passed."
    assert page.locator("paged-grader .score").text_content() == "90 of 90 points."
    assert page.locator("paged-grader .score + p").text_content() == (
        "The other 10 of 100 are for SmolLM2, on the command line, which also measures the speed: "
        "minipaged grade block-allocator block_allocator.py"
    )
    watched.check()


def test_work_is_kept_saved_and_reset_and_what_is_wrong_with_it_is_told(watched: Watched, folder: Path) -> None:
    page = watched.page
    area = opened(page, folder, "block-allocator")
    starter = files_of("block-allocator")["block_allocator.py"]
    assert area.input_value() == starter
    assert graded(page, f"{starter}# mine\n").startswith("Graded: 7 not written yet, 2 not run. The first is open.")
    assert [points for points, _ in found_in(page)] == ["to write"] * 7 + ["not run", "not here"]
    assert page.locator("paged-grader .failed").count() == 0
    told = page.locator("paged-grader .score + p").text_content()
    assert told.startswith("7 not written yet, 2 not run. The other 10 of 100 are for SmolLM2")
    assert "still to be written:\nline 18" in page.locator("paged-grader .found").first.text_content()
    assert graded(page, "def broken(:\n") == (
        "block_allocator.py does not load: SyntaxError: invalid syntax (block_allocator.py:1)"
    )
    assert "▶ 1" in page.locator("paged-grader .numbers").text_content()
    loop = "while True: block = 0"
    assert graded(page, starter.replace("raise NotImplementedError", loop, 1)).startswith("Graded: ")
    assert "a call did not end within" in page.locator("paged-grader .found").first.text_content()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save block_allocator.py").click()
    assert loop in saved.value.path().read_text()
    page.reload()
    page.get_by_role("button", name="Go on with your version").click()
    assert loop in area.input_value()
    page.get_by_role("button", name="Reset", exact=True).click()
    assert area.input_value() == starter
    page.reload()
    page.get_by_role("button", name="Write it here").click()
    page.get_by_role("button", name="Undo reset").click()
    assert loop in area.input_value()
    watched.check()


def test_a_page_that_hears_nothing_for_long_ends_the_grading(watched: Watched, folder: Path) -> None:
    """A call that the grader cannot end itself, because no line of it is over."""
    page = watched.page
    page.clock.install()
    opened(page, folder, "block-allocator")
    endless = find_seeded("block-allocator").right["the reference"].replace("self._free.pop()", "sum(iter(int, 1))")
    page.get_by_role("textbox", name="The code").fill(endless)
    page.get_by_role("button", name="Grade").click()
    page.get_by_text("Grading: test 2 of 9").wait_for(timeout=LONG)
    page.clock.fast_forward(30_001)
    page.get_by_text("Stopped after 30 seconds").wait_for(timeout=LONG)
    watched.check()


def test_results_fit_a_phone_and_axe_finds_nothing(page_of: PageOf) -> None:
    watched = page_of("block-allocator")
    page = watched.page
    screen = page.viewport_size
    assert screen
    page.set_viewport_size({"width": 390, "height": 844})
    source = find_seeded("block-allocator").mutants["share-not-counted"].source
    graded(page, source)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.add_script_tag(content=axe_script())
    violations = axe_violations(page)
    assert not violations, json.dumps(violations, indent=1)
    page.set_viewport_size(screen)
    watched.check()
