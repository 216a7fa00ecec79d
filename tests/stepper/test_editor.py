"""The editor of a page: what a reader changes is run by Python in that page, opened from a file, and shown."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from docs import build
from minipaged.stepper.page import STEPPER, element
from tests.browser import Watched, axe_script, axe_violations, in_both
from tests.stepper.test_edited import ALLOCATOR, lit, run

ASSETS = build.ROOT / "docs" / "assets"
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>An allocator</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>:root {color-scheme: light dark} body {background: Canvas} [hidden] {display: none}</style>
<script src="iframe-worker.js"></script><script src="stepper.js" defer></script><script src="editor.js" defer></script>
"""
ENDLESS = ALLOCATOR.replace("block = self.free_blocks.pop()", "while True: pass")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with one editor, as the site has it; without Python."""
    folder = tmp_path_factory.mktemp("editor")
    for script in (STEPPER, ASSETS / "editor.js", ASSETS / "iframe-worker.js"):
        shutil.copy(script, folder)
    code = f'<div class="highlight"><pre tabindex="0">{html.escape(ALLOCATOR)}</pre></div>'
    parts = code + build.editor(ALLOCATOR, "test: a run") + element(run(ALLOCATOR)["run"], id="stepper-1")
    (folder / "page.html").write_text(f'{HEAD}<main><h1>An allocator</h1><div class="editable">{parts}</div></main>')
    return folder


@pytest.fixture(scope="module")
def with_python(folder: Path, python_scripts: Path) -> Path:
    """Its address, with Python beside it."""
    shutil.copy(python_scripts / "python.js", folder)
    return folder


def opened(page: Page, folder: Path) -> Any:
    """The text field, once Python is there."""
    page.goto((folder / "page.html").as_uri())
    page.get_by_role("button", name="Edit and run this code").click()
    page.get_by_text("Python is here").wait_for(timeout=90_000)
    return page.get_by_role("textbox", name="The code")


def ran(page: Page, source: str) -> str:
    """What is said once this has been run."""
    page.get_by_role("textbox", name="The code").fill(source)
    page.get_by_role("button", name="Run").click()
    return settled(page)


def settled(page: Page) -> str:
    said = page.get_by_role("status").filter(has_not_text="…")
    said.wait_for(timeout=90_000)
    return said.text_content() or ""


def shown(page: Page) -> dict[str, Any]:
    """What the stepper shows now."""
    data: dict[str, Any] = json.loads(page.evaluate("JSON.stringify(document.querySelector('paged-stepper').data)"))
    return data


@in_both
def test_an_edited_allocator_runs_and_its_steps_are_shown(watched: Watched, with_python: Path) -> None:
    page = watched.page
    page.goto((with_python / "page.html").as_uri())
    assert not any("python" in url or "blob:" in url for url in watched.asked)  # nothing, until it is asked for
    recorded = shown(page)
    opened(page, with_python)

    assert ran(page, ALLOCATOR).startswith("Your version ran: 52 steps")
    same = shown(page)
    for before, after in zip(recorded["events"], same["events"], strict=True):
        assert before | {"seconds": 0} == after | {"seconds": 0}
    assert [recorded[key] for key in recorded if key != "events"] == [same[key] for key in recorded if key != "events"]

    assert ran(page, ALLOCATOR.replace("pop()", "pop(0)")).startswith("Your version ran")
    assert page.evaluate("document.querySelector('paged-stepper').getBoundingClientRect().top < innerHeight / 2")
    taken = [event["new_blocks"] for event in shown(page)["events"] if "new_blocks" in event]
    assert taken[0] == [7, 6]
    page.locator("paged-stepper").evaluate("s => s.go(s.events.findIndex((e) => e.new_blocks) + 1)")
    assert "pop(0)" in page.locator("paged-stepper .code").text_content()
    assert lit(shown(page), "tokens_computed")[0] == "self.holders[block] = 1"

    said = ran(page, ALLOCATOR.replace("-= 1\n        return copy", "-= 0\n        return copy"))
    assert "invariant 'exact-references' broken" in said
    assert page.locator("paged-stepper .n").text_content() == "12 / 12"
    assert page.locator("paged-stepper .say").text_content().startswith("Broken here: InvariantViolation")
    assert "allocator says \N{MULTIPLICATION SIGN}2" in page.locator("paged-stepper .wrong .claim").text_content()
    wrong = re.findall(r"▶ (\d+)", page.locator("paged-editor .numbers").text_content())
    source = page.get_by_role("textbox", name="The code").input_value().splitlines()
    assert [source[int(line) - 1].strip() for line in wrong] == ["return copy"]  # and not where that was called
    assert said.startswith(f"Line {wrong[0]}, in Allocator.copy_on_write: InvariantViolation")
    out = re.findall(r"It came out in line (\d+)\.", said)
    assert [source[int(line) - 1].strip() for line in out] == ["engine.step()"]
    assert said.endswith("Below are the 12 steps until then.")

    said = ran(page, ALLOCATOR.replace("block = self.free_blocks.pop()", "print('here')\n        return nothing"))
    assert said.startswith("Line 21, in allocate: NameError: name 'nothing' is not defined.")
    assert "▶ 21" in page.locator("paged-editor .numbers").text_content()
    assert page.get_by_role("group", name="Printed").text_content() == "here\n"
    assert page.locator("paged-stepper").is_visible()  # what it did until then
    assert ran(page, "input()").startswith("Line 1: EOFError")  # nobody types there
    assert not page.locator("paged-stepper").is_visible()  # it would be another code's run
    assert page.get_by_text("The run from before is hidden").is_visible()
    assert ran(page, ALLOCATOR).startswith("Your version ran")
    assert page.locator("paged-stepper").is_visible()
    assert not page.get_by_text("The run from before is hidden").is_visible()

    page.get_by_role("textbox", name="The code").fill(ENDLESS)
    page.get_by_role("button", name="Run").click()
    page.get_by_text("Running …").wait_for(timeout=90_000)
    page.get_by_role("button", name="Stop").click()
    assert settled(page).startswith("Stopped")
    watched.check()


def test_an_endless_loop_is_stopped_and_python_comes_back(watched: Watched, with_python: Path) -> None:
    """By itself; by the button: the test before, whose page has Python already."""
    page = watched.page
    page.clock.install()
    opened(page, with_python)
    page.get_by_role("textbox", name="The code").fill(ENDLESS)
    page.get_by_role("button", name="Run").click()
    page.get_by_text("Running …").wait_for(timeout=90_000)
    page.clock.fast_forward(10_001)
    assert settled(page).startswith("Stopped")
    assert "an endless loop?" in settled(page)
    assert not page.locator("paged-stepper").is_visible()
    page.get_by_role("button", name="Reset", exact=True).click()
    assert page.locator("paged-stepper").is_visible()
    assert len(shown(page)["events"]) == 52  # the recorded run is there still
    page.get_by_role("textbox", name="The code").fill(ENDLESS)
    page.get_by_role("button", name="Run").click()
    page.get_by_text("Running …").wait_for(timeout=90_000)
    page.get_by_role("button", name="Reset", exact=True).click()  # while it runs
    page.get_by_text("The code is as it was").wait_for()
    assert page.locator("paged-stepper").is_visible()
    assert not page.get_by_text("The run from before is hidden").is_visible()
    watched.check()


def test_work_is_kept_until_it_is_reset(watched: Watched, folder: Path) -> None:
    page = watched.page
    page.goto((folder / "page.html").as_uri())
    page.get_by_role("button", name="Edit and run this code").click()
    area = page.get_by_role("textbox", name="The code")
    assert area.input_value() == ALLOCATOR
    assert not page.locator(".highlight").is_visible()
    area.evaluate("area => area.setSelectionRange(area.value.length, area.value.length)")
    for key in ("Enter", "i", "f", " ", "1", ":", "Enter", "x", "Enter", "Tab", "y", "Shift+Tab"):
        page.keyboard.press(key)
    edited = f"{ALLOCATOR}\nif 1:\n    x\n    y"
    assert area.input_value() == edited
    page.reload()
    page.get_by_role("button", name="Go on with your version").click()
    assert area.input_value() == edited
    assert page.locator("paged-editor .paint").text_content() == f"{edited}\n"
    painted = {kind: page.locator(f"paged-editor .{kind}") for kind in ("keyword", "string", "function", "number")}
    assert [painted[kind].first.text_content() for kind in ("keyword", "function")] == ["from", "Allocator"]
    assert (
        painted["string"].first.text_content()
        == '"""A list of the free blocks, and for each block how many hold it."""'
    )
    assert painted["number"].last.text_content() == "1"
    place = "part => { const {x, y, height} = part.getBoundingClientRect(); return [x, y, height]; }"
    field, paint = (page.locator(f"paged-editor {part}").evaluate(place) for part in ("textarea", ".paint"))
    assert field == paint
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert page.get_by_role("button", name="Run").evaluate("button => button.getRootNode().activeElement === button")
    page.get_by_role("button", name="Reset", exact=True).click()
    assert area.input_value() == ALLOCATOR
    page.reload()
    assert page.get_by_role("button", name="Edit and run this code").is_visible()


def test_a_reset_is_undone_also_later_and_nothing_is_lost_by_that(browser: Browser, folder: Path) -> None:
    page = browser.new_page()
    page.goto((folder / "page.html").as_uri())
    page.get_by_role("button", name="Edit and run this code").click()
    area, reset, undo = (
        page.get_by_role("textbox", name="The code"),
        *(page.get_by_role("button", name=name, exact=True) for name in ("Reset", "Undo reset")),
    )
    assert not undo.is_visible()
    area.fill("mine = 1")
    reset.click()
    assert undo.evaluate("button => button.getRootNode().activeElement === button")
    reset.click()  # once more: there is nothing to be kept
    page.reload()
    page.get_by_role("button", name="Edit and run this code").click()
    undo.click()
    assert area.input_value() == "mine = 1"
    assert not undo.is_visible()
    reset.click()
    area.fill("mine = 2")  # and then the first one is wanted
    undo.click()
    assert area.input_value() == "mine = 1"
    undo.click()
    assert area.input_value() == "mine = 2"
    page.close()


@in_both
@pytest.mark.parametrize("height", [844, 600])
def test_the_button_and_what_is_said_are_in_view_below_long_code(browser: Browser, folder: Path, height: int) -> None:
    page = browser.new_page(viewport={"width": 390, "height": height})
    page.goto((folder / "page.html").as_uri())
    page.get_by_role("button", name="Edit and run this code").click()
    assert page.get_by_role("textbox", name="The code").bounding_box()["height"] > height
    page.evaluate("scrollTo(0, 0)")
    for part in (page.get_by_role("button", name="Run", exact=True), page.get_by_role("status")):
        box = part.bounding_box()
        assert 0 < box["y"] < box["y"] + box["height"] < height + 1
    page.close()


def test_without_python_the_page_says_why_and_the_recorded_run_stays(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    """And, on a phone and in the dark, all of it fits and axe finds nothing."""
    shutil.copytree(folder, tmp_path, ignore=shutil.ignore_patterns("python.js"), dirs_exist_ok=True)
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page.goto((tmp_path / "page.html").as_uri())
    page.get_by_role("button", name="Edit and run this code").click()
    said = settled(page)
    assert "Python could not be loaded" in said
    assert "make docs-serve" in said
    page.get_by_role("button", name="Next step").click()
    assert page.locator("paged-stepper .n").text_content() == "2 / 52"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.add_script_tag(content=axe_script())
    violations = axe_violations(page)
    assert not violations, json.dumps(violations, indent=1)
    page.close()
