"""The docs say what is true: the events' schema field by field, links that lead somewhere, options that exist."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from markdown.extensions.toc import slugify

from docs import build, python_in_page
from minipaged.events import EVENT_TYPES
from minipaged.paper.figures import FIGURES
from minipaged.paper.pages import label
from minipaged.paper.running import file_name, kept_figures
from tests.source import definitions

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
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


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT], ids=lambda page: page.name)
def test_links_from_the_root_lead_to_headings_that_are_there(page: Path) -> None:
    """Links within docs/ are checked when the site is built."""
    for file, anchor in re.findall(r"\]\(([^)#\s]+\.md)#([^)\s]*)\)", page.read_text()):
        headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), flags=re.MULTILINE)
        assert anchor in {slugify(heading.replace("`", ""), "-") for heading in headings}, f"{file}#{anchor}"


# --- The files at the root ------------------------------------------------------------------------

README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_readme_and_the_changelog_are_short() -> None:
    assert len(README.encode()) < 7_000
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) < 80


def test_the_ten_lines_of_the_readme_run(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import minipaged

    [code] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 10
    small = minipaged.LLM(tiny_model, tier="reference", num_blocks=64)
    monkeypatch.setattr(minipaged, "LLM", lambda name: small, raising=False)
    ran: dict[str, Any] = {}
    exec(code, ran)
    assert len(ran["story"].outputs) == 4
    assert ran["update"].output.outputs[0].text in capsys.readouterr().out


def test_every_speed_of_the_readme_stands_in_the_docs() -> None:
    """In one line with how many times as fast as the peer that is."""
    measured = [
        line for page in ("gpu", "benchmarks") for line in (ROOT / "docs" / f"{page}.md").read_text().split("\n")
    ]
    rows = re.findall(r"^\| (?:H200|CPU).*\| ([\d.,]+) \S+ \| .* \| ([\d.]+) × \|$", README, flags=re.MULTILINE)
    assert len(rows) == 5
    for figure, ratio in rows:
        assert any(
            re.search(rf"\| {re.escape(figure)}[ |]", line) and re.search(rf"[ |]{re.escape(ratio)}\b", line)
            for line in measured
        ), (
            figure,
            ratio,
        )


def test_the_changelog_says_where_modules_are_now() -> None:
    rows = re.findall(
        r"^  \| (`minipaged\..*) \| (`minipaged\..*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert rows
    for row in rows:
        before, now = (re.findall(r"`(\S+)`", names) for names in row)
        assert len(before) == len(now)
        assert not [name for name in before if (ROOT / (name.replace(".", "/") + ".py")).exists()]
        assert all((ROOT / (name.replace(".", "/") + ".py")).is_file() for name in now)


def test_what_is_cited_is_the_project_as_it_is() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited.keys() >= {"cff-version", "message", "title", "authors"}  # without these it is no citation file
    assert cited["cff-version"] == "1.2.0"
    assert (cited["title"], cited["version"], cited["license"]) == tuple(
        PROJECT[key] for key in ("name", "version", "license")
    )
    assert cited["abstract"] == PROJECT["description"]
    assert cited["keywords"] == PROJECT["keywords"]
    [paper] = cited["references"]
    assert paper["doi"] == "10.1145/3600006.3613165"


def test_the_command_lines_of_the_docs_are_understood() -> None:
    from typer.testing import CliRunner

    from minipaged.cli import app

    pages = (ROOT / "docs" / "using.md", ROOT / "docs" / "index.md", ROOT / "docs" / "paper" / "index.md")
    text = "\n".join(page.read_text() for page in pages)
    lines = re.findall(r"^\$ (?:.* )?minipaged (.*?)(?: +#.*)?$", text, flags=re.MULTILINE)
    assert len(lines) >= 25
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


def test_the_design_begins_with_the_life_of_a_request_as_a_request_lives_it(tiny_model: Path) -> None:
    """Eight lines, each of which begins with a link to a function. A request enters these in this order."""
    from minipaged import LLM, SamplingParams

    page = (ROOT / "docs" / "design.md").read_text()
    assert page.startswith("# The design\n\n## The life of a request, in eight lines\n\n1. ")
    lines = re.findall(r"^(\d)\. (.*)$", page.partition("\n\nLines 3 to 8")[0], flags=re.MULTILINE)
    assert [int(number) for number, _ in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    links = [link for _, line in lines if (link := CODE_LINK.match(line))]
    assert len(links) == 8
    every = [(ROOT / file, name) for _, line in lines for name, file in CODE_LINK.findall(line)]
    llm = LLM(tiny_model, tier="reference", num_blocks=8)
    entered: list[tuple[Path, str]] = []

    def enter(frame: FrameType, what: str, _: object) -> None:
        if what == "call":
            entered.append((Path(frame.f_code.co_filename), frame.f_code.co_qualname))

    sys.setprofile(enter)
    try:
        llm.generate(["Paging is"], SamplingParams(max_tokens=2))
    finally:
        sys.setprofile(None)
    functions = [place for place in every if place[1] != "StepInput"]
    assert set(functions) <= set(entered)
    first = [entered.index((ROOT / link["file"], link["name"])) for link in links]
    assert first == sorted(first)


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
    table = build.table_of_tests(ROOT / "assignments" / "1_block_allocator" / "tests.toml").splitlines()
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
PARTS_OF_AN_ASSIGNMENT = (".cases", ".mutants", ".ours", ".scenes", ".session", ".worker", ".yardsticks")
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


def test_a_page_says_what_the_calls_of_an_allocator_are_in_a_run() -> None:
    """Its grader takes the sentence out of the handout."""
    handout = (ROOT / "assignments" / "1_block_allocator" / "handout.md").read_text()
    means = build.MEANS.search(handout)
    assert means
    assert means[1].startswith("`allocate` is a request")
