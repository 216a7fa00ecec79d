"""What a reader of a tutorial predicts: every question has an answer that the run has to say, and the page asks it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import markdown
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output
from playwright.sync_api import Browser, Page

from docs import build, predict
from minipaged.stepper.page import NO_CODE, STEPPER
from tests.browser import COLOURS, ROOT, Tabs, Watched, axe_script, axe_violations
from tests.stepper.test_edited import SLIDING, slid

SCRIPTS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
CHOICE = """# **Predict.** Is it?
#
# - yes
# - no
#
# <details><summary>See</summary>
#
# **{answer}**{run}. It is as it is.
#
# </details>
"""
NUMBER = CHOICE.replace("# - yes\n# - no\n#\n", "")

# --- As they are written --------------------------------------------------------------------------


def test_every_prediction_has_an_answer_and_nearly_all_ask_the_run() -> None:
    texts = [script.read_text() for script in SCRIPTS]
    cells = [cell for script in SCRIPTS for cell in jupytext.read(script).cells if cell.cell_type == "markdown"]
    asked = [question for cell in cells for question in predict.questions(cell.source)]
    assert len(asked) == sum(text.count("**Predict.**") for text in texts) >= 55
    assert sum(question.run is None for question in asked) <= 2  # what no line of code can say


def written(folder: Path, question: str, code: str = "x = 0.2  # told, too\ntold = 3") -> Path:
    script = folder / "01_made_up.py"
    script.write_text(f"# %% [markdown]\n# # Made up\n\n# %% [markdown]\n{question}\n# %%\n{code}\n")
    return script


@pytest.mark.parametrize(
    ("question", "answer", "run"),
    [
        (CHOICE, "yes", " (`x == 0.3`)"),
        (NUMBER, "21 %", " (`x`)"),
        (NUMBER, "21 %", " (`x`, give or take 10)"),  # near enough for a reader
        (NUMBER, "20 % and 4", " (`x, told`)"),
        (NUMBER, "20 % and 3", " (`x`)"),
    ],
)
def test_an_answer_that_is_not_the_runs_is_found(question: str, answer: str, run: str) -> None:
    text = question.format(answer=answer, run=run).replace("# ", "").replace("#", "")
    [asked] = predict.questions(text)
    with pytest.raises((AssertionError, ValueError), match=r"the answer to be predicted is|shorter|longer"):
        exec(asked.check(), {"x": 0.2, "told": 3})


def test_an_answer_that_is_not_the_runs_ends_the_build(tmp_path: Path) -> None:
    question = NUMBER.format(answer="21 %", run=" (`x`, give or take 10)")
    with pytest.raises(CellExecutionError, match="the answer to be predicted is"):
        build.run_tutorial(written(tmp_path, question))


def test_an_answer_that_is_the_runs_does_not(tmp_path: Path) -> None:
    right = [(CHOICE, "no", " (`x < told`)"), (NUMBER, "20 %, 3 times", " (`x, told`, give or take 10 %)")]
    question = "#\n".join(text.format(answer=answer, run=run) for text, answer, run in right)
    notebook, page = build.run_tutorial(written(tmp_path, question))
    assert "_check" not in page
    assert "_check" not in notebook
    assert notebook.count("<details><summary>See</summary>") == 2


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("**Predict.** Is it?\n\nNobody says.", "no answer to be seen"),
        (CHOICE.format(answer="perhaps", run="").replace("# ", "").replace("#", ""), "none of the choices"),
        (NUMBER.format(answer="two", run=" (`x`)").replace("# ", "").replace("#", ""), "needs a number"),
        (NUMBER.format(answer="2", run="").replace("# ", "").replace("#", ""), "what the run has to say"),
    ],
)
def test_a_question_without_an_answer_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        predict.questions(text)


def test_what_the_next_text_says_of_an_answer_is_seen_with_it() -> None:
    question = NUMBER.format(answer="2", run=" (`x`)").replace("# ", "").replace("#", "").strip()
    cells = [new_markdown_cell("# Made up"), new_markdown_cell(question), new_code_cell("x = 2")]
    for text, told in {
        "Two, of course.\n\nAnd so on.": "Two, of course.",
        "One word.": "One word.",
        "## Next": "",
        "The events say it:": "",
        f"{question}\n\nAnd so on.": "",
    }.items():
        page = build.as_markdown([*cells, new_markdown_cell(text)], Path("01_made_up.py"), True)
        fold = page[page.index('<details class="see') : page.index("</details>")]
        assert told in fold
        assert told or text[:9] not in fold
        assert "And so on." not in fold
        assert page.count(told or text[:9]) >= 1


def test_code_up_to_the_next_text_is_seen_with_the_answer_but_for_a_recording() -> None:
    question = NUMBER.format(answer="2", run=" (`x`)").replace("# ", "").replace("#", "").strip()
    run = new_output("execute_result", {build.RECORDING: {"title": "A run", "events": [], **NO_CODE}})
    cells = [new_markdown_cell("# Made up"), new_markdown_cell(question), new_code_cell("x = 2")]
    for last, inside in ((new_markdown_cell("## And so on"), False), (new_code_cell("run", outputs=[run]), False)):
        page = build.as_markdown([*cells, new_code_cell("x + 0"), last], Path("01_made_up.py"), True)
        fold = page[page.index('<details class="see') :].partition("</details>")[0]
        assert "x = 2" in fold
        assert "x + 0" in fold
        assert (last.source in fold) == inside
    assert build.as_markdown(cells, Path("01_made_up.py"), True).count("</details>") == 1


@pytest.mark.parametrize(
    "line",
    [
        "pool = 10  # slide 4 to 64 doubling: blocks",
        "pool = 3  # slide 4 to 8: blocks",
        "pool = 4  # slide from 4: blocks",
    ],
)
def test_a_slider_that_cannot_stand_where_it_begins_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="a slider"):
        build.sliders(line)


def test_a_slider_has_the_values_that_its_line_says() -> None:
    lines = "pool = 8  # slide 4 to 32 doubling: blocks\nn = 5  # slide 1 to 9 by 2: samples"
    first, second = build.sliders(lines)
    assert first == {"name": "pool", "what": "blocks", "values": [4, 8, 16, 32], "value": 8}
    assert second["values"] == [1, 3, 5, 7, 9]


# --- In a browser ---------------------------------------------------------------------------------

HEAD = """<!doctype html><html lang="en" data-md-color-scheme="default"><meta charset="utf-8"><title>A tutorial</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>:root {color-scheme: light dark} body {background: Canvas; color: CanvasText; margin: 8px}
pre {white-space: pre-wrap} code {overflow-wrap: anywhere}</style>
<link rel="stylesheet" href="site.css"><script src="iframe-worker.js"></script>
<script src="stepper.js" defer></script><script src="editor.js" defer></script><script src="predict.js" defer></script>
"""
EXTENSIONS = ["attr_list", "md_in_html", "tables", "pymdownx.highlight", "pymdownx.superfences"]  # as in mkdocs.yml


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the first tutorial, without the theme; without Python."""
    folder = tmp_path_factory.mktemp("predict")
    for name in ("editor.js", "predict.js", "iframe-worker.js", "site.css"):
        shutil.copy(ROOT / "docs" / "assets" / name, folder)
    shutil.copy(STEPPER, folder)
    _, page = build.run_tutorial(SCRIPTS[0])
    text = markdown.markdown(page.removeprefix(build.WIDE), extensions=EXTENSIONS)
    (folder / "page.html").write_text(f'{HEAD}<main class="md-typeset">{text}</main>')
    return folder


@pytest.fixture(scope="module")
def with_python(folder: Path, python_scripts: Path) -> Path:
    shutil.copy(python_scripts / "python.js", folder)
    return folder


@pytest.fixture
def opened(tabs: Tabs, browser: Browser, folder: Path) -> Iterator[Page]:
    """Its page, in a tab that an earlier test may have used; it complains of nothing."""
    with tabs.visiting(browser, folder / "page.html") as watched:
        yield watched.page


def questions_of(page: Page) -> Any:
    assert page.locator(".predict").count() == 2
    assert page.locator("details.see[open]").count() == 0
    return page.locator(".predict")


@pytest.mark.parametrize(("key", "said"), [("Space", "Not quite."), ("ArrowDown", "Yes.")])
def test_a_choice_is_made_and_judged_by_keyboard(opened: Page, key: str, said: str) -> None:
    page = opened
    question = questions_of(page).first
    question.get_by_role("radio").first.focus()
    page.keyboard.press(key)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert question.get_by_role("status").text_content() == said
    assert question.locator("label .mark").all_text_contents() == ["✓" if said == "Yes." else "✗"]
    assert question.get_by_text("no, though 6 are free").last.is_visible()
    assert question.get_by_text("First fit looks for one gap").is_visible()
    assert question.get_by_text("which asks for 5, is turned away").last.is_visible()  # what the code printed


@pytest.mark.parametrize(
    ("numbers", "said", "marks"),
    [
        (("20", "32 %", "47.0"), "Yes.", "✓✓✓"),
        (("20", "32", "0,047e3"), "Yes.", "✓✓✓"),  # three decimals, and no thousands
        (("11", "40", "50,5"), "Near enough.", "✓✓✓"),
        (("9", "32", "99"), "Not quite.", "✗✓✗"),
        (("", "", ""), "", ""),
    ],
)
def test_numbers_are_judged_each_and_the_answer_is_said_once(
    opened: Page, numbers: tuple[str, ...], said: str, marks: str
) -> None:
    question = questions_of(opened).nth(1)
    for field, number in zip(question.get_by_role("textbox").all(), numbers, strict=True):
        field.fill(number)
    question.get_by_role("textbox").last.press("Enter")
    assert question.get_by_role("status").text_content() == said
    assert "".join(question.locator(".mark").all_text_contents()) == marks
    assert question.locator("svg").is_visible()
    assert question.inner_text().count("20 % with longest, 32 % with power of two, 47 % with oracle") == 1
    assert "give or take" not in question.inner_text()


def test_what_is_no_number_is_asked_for_again_and_nothing_is_seen(opened: Page) -> None:
    question = questions_of(opened).nth(1)
    question.get_by_role("textbox").first.fill("half")
    question.get_by_role("button", name="See").click()
    assert "a number is missing" in question.get_by_role("status").text_content()
    assert question.get_by_role("textbox").first.evaluate("field => field === document.activeElement")
    assert not question.locator("svg").is_visible()


def test_without_javascript_the_choices_are_a_list_and_the_fold_opens(browser: Browser, folder: Path) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto((folder / "page.html").as_uri())
    question = questions_of(page).first
    assert question.get_by_role("listitem").all_text_contents() == ["yes, since 6 are free", "no, though 6 are free"]
    question.get_by_text("See", exact=True).click()
    assert question.get_by_text("First fit looks for one gap").is_visible()
    assert page.locator(".editable .picture svg").is_visible()
    page.close()


def words(page: Page) -> str:
    label = page.locator(".editable .picture svg").get_attribute("aria-label")
    assert label
    return label


def words_of(picture: str) -> str:
    found = re.search(r'aria-label="(.*?)"', picture)
    assert found
    return found[1]


def test_a_slider_runs_the_code_again_and_shows_what_it_shows_elsewhere(watched: Watched, with_python: Path) -> None:
    page, cell = watched.page, SLIDING["01_contiguous_memory"]
    page.goto((with_python / "page.html").as_uri())
    assert words(page) == words_of(slid(*cell)["picture"])
    assert not any("python" in url for url in watched.asked)  # nothing, until a slider moves
    page.get_by_role("slider", name="slots of a block").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("slider", name="slots of a block").get_attribute("aria-valuetext") == "64"
    page.get_by_text("Your version ran: a picture, below.").wait_for(timeout=200_000)
    page.wait_for_function(
        f"{json.dumps(words_of(slid(*cell, block_size=64)['picture']))} === "
        "document.querySelector('.editable .picture svg').getAttribute('aria-label')",
        timeout=200_000,
    )
    page.get_by_role("button", name="Edit and run this code").click()
    area = page.get_by_role("textbox", name="The code")
    assert "block_size = 64  #" in area.input_value()
    area.fill(area.input_value().replace("pool = 16384", "pool = 4096"))  # and the other way
    assert page.get_by_role("slider", name="slots of memory").get_attribute("aria-valuetext") == "4096"
    area.fill("pool = None")
    assert page.get_by_role("slider", name="slots of memory").is_disabled()
    page.get_by_role("button", name="Reset").click()
    assert words(page) == words_of(slid(*cell)["picture"])
    assert page.get_by_role("slider", name="slots of a block").get_attribute("aria-valuetext") == "16"
    watched.check()


def test_a_slider_moved_while_python_is_loaded_is_run_then(watched: Watched, with_python: Path) -> None:
    page, cell = watched.page, SLIDING["01_contiguous_memory"]
    page.goto((with_python / "page.html").as_uri())
    page.get_by_role("button", name="Edit and run this code").click()
    page.get_by_role("slider", name="slots of a block").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        f"{json.dumps(words_of(slid(*cell, block_size=32)['picture']))} === "
        "document.querySelector('.editable .picture svg').getAttribute('aria-label')",
        timeout=200_000,
    )
    watched.check()


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_on_a_phone_it_fits_and_axe_finds_nothing(browser: Browser, folder: Path, scheme: str) -> None:
    dark = scheme == "slate"
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark" if dark else "light")
    page.goto((folder / "page.html").as_uri())
    question = questions_of(page)
    page.evaluate(f"document.documentElement.dataset.mdColorScheme = {scheme!r}")
    for i in range(2):
        question.nth(i).get_by_role("button", name="See").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.add_script_tag(content=axe_script())
    for place in (".predict", ".editable"):
        violations = axe_violations(page, place, **(COLOURS if dark else {}))
        assert not violations, json.dumps(violations, indent=1)
    page.close()
