"""The docs say what is true: the events' schema field by field, links that lead somewhere, options that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from docs import build, python_in_page
from minipaged.events import EVENT_TYPES
from minipaged.paper.figures import FIGURES
from minipaged.paper.pages import label
from minipaged.paper.running import file_name, kept_figures
from tests.source import definitions

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "assignments").glob("*/*.md"),
        *(ROOT / "tutorials").glob("*.py"),
    ]
)


def test_the_schema_of_events_names_every_event_with_every_field_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "docs" / "events.md").read_text(), flags=re.MULTILINE)
    documented = {name: re.findall(r"`(\w+)`", columns) for name, columns in rows}
    assert documented == {name: [field.name for field in fields(event)] for name, event in EVENT_TYPES.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_command_lines_of_the_readme_are_understood() -> None:
    from typer.testing import CliRunner

    from minipaged.cli import app

    lines = re.findall(r"^\$ minipaged (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        words = re.findall(r'"[^"]*"|\S+', line)
        shown = CliRunner().invoke(app, [word.strip('"') for word in words] + ["--help"])
        assert shown.exit_code == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in shown.output, f"{option} in: {line}"


CODE_LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?:\.\./)+(?P<file>minipaged/[\w/]+\.py)\)")
"""A link of a page that names something in a file, or the file as it is imported."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_docs_name_is_in_the_file_that_they_link(page: Path) -> None:
    """Without this the site cannot be built: the name has no place in the API."""
    for name, file in CODE_LINK.findall(page.read_text()):
        module = file.removesuffix(".py").replace("/", ".")
        assert name in definitions(ROOT / file) | {module}, f"{name} in {file}"


def test_the_map_of_the_paper_names_functions() -> None:
    assert len(CODE_LINK.findall((ROOT / "docs" / "paper.md").read_text())) > 30


# --- The paper's figures --------------------------------------------------------------------------


def test_what_is_told_of_the_papers_figures_comes_from_whole_runs_with_the_usual_seed() -> None:
    results = kept_figures(build.RESULTS, FIGURES)
    assert results
    assert {path.stem for path in build.RESULTS.iterdir()} == {file_name(name) for name in results}
    for name, data in results.items():
        assert not data["made"]["quick"], name
        assert data["made"]["seed"] == 0, name


def test_a_figure_without_a_result_has_no_page_and_the_table_says_so() -> None:
    results = kept_figures(build.RESULTS, FIGURES)
    first = next(iter(results))
    told = build.verdicts({first: results[first]})
    missing = told.rpartition("without a page: ")[2]
    assert f'href="{file_name(first)}.html"' in told
    assert all(label(name) in missing for name in FIGURES if name != first)
    page = build.figure_page(results[first], [first])
    assert f"({file_name(first)}.svg)" in page
    assert FIGURES[first].look in page


# --- Code in a page -------------------------------------------------------------------------------


def test_a_page_shows_code_as_it_is_in_the_source() -> None:
    source = build.source_of("tests/test_docs.py", "Example.method")
    assert source == '@property\ndef method(self) -> int:\n    """Shown."""\n    return 1  # and this'
    shown = build.as_in_the_source("tests/test_docs.py", ["Example.method", "Example"], Path("concepts/a.md"))
    assert source in shown
    assert "class Example:" in shown
    assert "[minipaged/llm.py][minipaged.llm]" in build.as_in_the_source("minipaged/llm.py", ["LLM"], Path("a.md"))


class Example:
    @property
    def method(self) -> int:
        """Shown."""
        return 1  # and this

    # not this


@pytest.mark.parametrize("name", ["Example.other", "method", "Example.method.inner"])
def test_a_page_that_shows_what_is_not_there_is_not_built(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} of tests/test_docs.py")):
        build.source_of("tests/test_docs.py", name)


CONCEPTS = sorted((ROOT / "docs" / "concepts").glob("*.md"))


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_a_concept_is_shown_with_the_test_that_holds_it(page: Path) -> None:
    shown = [(code["file"], name) for code in build.CODE.finditer(page.read_text()) for name in code["names"].split()]
    for file, name in shown:
        build.source_of(file, name)
    assert any(file.startswith("tests/") and name.startswith("test_") for file, name in shown)
    assert any(file.startswith("minipaged/") for file, _ in shown)


def test_every_handout_has_a_place_for_the_table_of_its_tests() -> None:
    handouts = sorted((ROOT / "assignments").glob("*/handout.md"))
    assert handouts
    for handout in handouts:
        assert len(build.TESTS.findall(handout.read_text())) == 1
    table = build.table_of_tests(handouts[0].parent / "tests.toml").splitlines()
    assert table[2].startswith("| a new pool | 5 | At any moment every block is either free or held;")
    assert len(table) == 2 + 9


def test_a_page_looks_for_mistakes_with_the_hypothesis_of_the_command_line() -> None:
    tested = (ROOT / "constraints.txt").read_text().split()
    [used] = [wheel for wheel in python_in_page.WHEELS if wheel.startswith("hypothesis==")]
    assert used in tested


# --- The API --------------------------------------------------------------------------------------

NOT_IN_THE_API = {
    *(  # `minipaged --help` tells them
        f"cli.{path.stem}" for path in (ROOT / "minipaged" / "cli").glob("[a-z]*.py") if path.stem != "conversation"
    ),
    *(
        f"demo.{name}"
        for name in ("player", "recording", "report", "stage", "terminal", "ticker", "trace_scene", "view")
    ),
    *(
        "course.grader.test_runner",
        "course.sandbox.answering",
        "course.sandbox.wire",
        "course.sandbox.worker",
    ),  # the other end of the grader's process
}
PARTS_OF_AN_ASSIGNMENT = (".cases", ".mutants", ".ours", ".scenes", ".session", ".worker")
"""Files of an assignment's folder; its checks are in the API."""


def test_every_module_has_its_place_in_the_api_or_a_reason() -> None:
    paths = {path.relative_to(ROOT / "minipaged").with_suffix("") for path in (ROOT / "minipaged").rglob("*.py")}
    modules = {".".join(path.parts) for path in paths if not path.name.startswith("_")}
    parts = {
        name for name in modules if name.startswith("course.assignments.") and name.endswith(PARTS_OF_AN_ASSIGNMENT)
    }
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = re.findall(r"^::: minipaged\.(\S+)$", pages, flags=re.MULTILINE)
    assert len(documented) == len(set(documented)), "a module has one place"
    assert set(documented) == modules - parts - NOT_IN_THE_API
    assert modules >= NOT_IN_THE_API
