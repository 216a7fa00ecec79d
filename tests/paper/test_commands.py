"""`minipaged paper`: what it prints, what it writes, what it says of mistakes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from minipaged.cli import app
from minipaged.errors import InvalidRequest
from minipaged.paper import commands, drawing
from minipaged.paper.figures import FIGURES
from minipaged.paper.figures.fig12 import FIG_12, TOLERANCE
from minipaged.paper.pages import knees
from minipaged.paper.report import report
from minipaged.paper.running import file_name, made

KEPT = Path(__file__).parents[2] / "docs" / "runs" / "paper"

VOID = {"meta", "br", "img", "link"}


def check(what: str, paper: float, ours: float | None, tolerance: float | None, verdict: str) -> dict[str, Any]:
    difference = None if ours is None else ours / paper - 1
    numbers = {"paper": paper, "ours": ours, "tolerance": tolerance, "difference": difference}
    return {"what": what, **numbers, "relative": True, "unit": "/s", "verdict": verdict}


def result(name: str, checks: list[dict[str, Any]]) -> dict[str, Any]:
    """A figure's, made up."""
    line = {"label": "vLLM", "style": "ours", "points": [[1, 0.1], [2, 0.4]]}
    plot = {"title": "a < b", "x": "x", "y": "y", "lines": [line, {**line, "style": "calibrated", "label": ""}]}
    says = {"says": "1.7-2.7 × Oracle", "section": "6.2", "in_paper": "1.47", "ours": "1.5", "holds_in_paper": False}
    return {
        "figure": name,
        "title": f"Fig. {name}: a & b",
        "section": "6.2",
        "made": {**vars_of(made(seed=7, quick=True))},
        "machines": {"OPT-13B": [{"what": "weights", "value": "26 GB", "kind": "paper"}]},
        "plots": [{**plot, "y_max": 1.0, "log_x": False, "log_y": False, "groups": [], "stacked": False}],
        "checks": checks,
        "sentences": [says],
        "notes": ["What `n` is."],
    }


def vars_of(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__}


RESULTS = {
    "12a": result(
        "12a",
        [
            check("vLLM: requests/s at 0.5 s/token", 2.0, 2.1, 0.18, "holds"),
            check("Orca (Max): requests/s at 0.5 s/token", 1.0, 1.5, 0.18, "fails"),
            check("FasterTransformer: requests/s at 0.5 s/token", 1.0, 1.5, None, "not judged"),
        ],
    ),
    "12b": result("12b", [check("vLLM: requests/s at 0.5 s/token", 1.0, None, 0.18, "fails")]),
}


class Page(HTMLParser):
    """What a page is made of, and whether every element is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def test_the_report_stands_alone_and_says_everything() -> None:
    written = report(RESULTS)
    page = Page(written)
    references = [value for _, name, value in page.attributes if name in ("href", "src", "xlink:href", "data")]
    assert references
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert all(reference.startswith("#") for reference in references), "nothing comes from anywhere"
    assert {reference[1:] for reference in references} <= set(ids), "every link leads somewhere"
    assert "url(http" not in written
    assert "@import" not in written
    assert "<script" not in written
    assert ("meta", "name", "viewport") in page.attributes
    assert sum(tag == "svg" and name == "aria-label" for tag, name, _ in page.attributes) == 2
    for words in (
        "replicated in simulation",
        "+5.0%",
        "1 hold, 2 fail, 1 not judged",
        "not borne out",
        "minipaged paper run 12a --quick --seed 7",
        "Where the machine's numbers come from: OPT-13B",
        FIGURES["12a"].look[:60],
    ):
        assert words in page.text, words
    assert written.count('class="fails"') == 2 * 2 + 2, "each failure red in both tables, and each sentence"


def test_pictures_of_one_page_have_names_of_their_own() -> None:
    """What one picture defines is not what another one uses."""

    def names(figure: str) -> set[str]:
        return set(re.findall(r' id="(\w+)"', drawing.svg(RESULTS[figure])))

    shared = names("12a") & names("12b")
    assert names("12a") - shared
    assert all(name.startswith("DejaVu") for name in shared), "letters alone, which are the same"
    assert drawing.svg(RESULTS["12a"]) == drawing.svg(RESULTS["12a"]), "the same for the same data"


def test_the_knees_are_judged_together() -> None:
    line = knees(RESULTS)
    assert line is not None
    assert "The 3 knees of Orca and vLLM in 2 panels of Fig. 12: median error 50.0% (to be within 6%)" in line
    assert "1 never come: fails." in line
    good = {"12a": result("12a", [check("vLLM: x", 1.0, 1.05, 0.18, "holds")])}
    assert (knees(good) or "").endswith("worst 5.0% (within 18%): holds.")
    assert knees({}) is None


def test_four_knees_of_a_panel_are_judged_and_no_height() -> None:
    panel = FIG_12[0]
    curves = {system: [(0.1, 0.04), (1.5, 0.05), (3.0, 1.0)] for system in panel.systems}
    judged = [check for check in panel.checks(curves) if check.tolerance == TOLERANCE]
    assert [check.what.partition(",")[0] for check in judged] == ["Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM"]


def test_the_table_of_a_figure_fits_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    commands.show(RESULTS["12a"], console)
    lines = console.export_text().splitlines()
    [row] = [line for line in lines if "FasterTransformer" in line]
    assert row.split() == ["FasterTransformer", "1/s", "1.5/s", "+50.0%", "-", "not", "judged"]
    assert any("Not borne out" in line for line in lines)


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json")), ids=lambda path: path.stem)
def test_no_word_in_the_table_of_a_kept_result_is_cut_in_80_columns(path: Path) -> None:
    data = json.loads(path.read_text())
    console = Console(width=80, record=True, file=io.StringIO())
    commands.show({**data, "sentences": [], "notes": []}, console)
    assert "…" not in console.export_text()


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json")), ids=lambda path: path.stem)
def test_every_curve_of_a_kept_result_goes_on_to_its_knee(path: Path) -> None:
    """A knee that never came would be no number at all."""
    checks = json.loads(path.read_text())["checks"]
    assert [one["what"] for one in checks if one["what"].endswith("requests/s") and one["ours"] is None] == []


# --- The commands ---------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with a result of Fig. 12a, made up, of this version."""
    (tmp_path / f"{file_name('12a')}.json").write_text(json.dumps(RESULTS["12a"]))
    return tmp_path


def minipaged(*words: str) -> str:
    done = CliRunner().invoke(app, ["paper", *words], env={"COLUMNS": "200"})
    if isinstance(done.exception, InvalidRequest):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_the_list_says_what_is_kept(kept: Path) -> None:
    rows = minipaged("list", "--output", str(kept)).splitlines()
    assert len(rows) == len(FIGURES)
    assert [row.split(maxsplit=1)[0] for row in rows] == list(FIGURES)
    told = dict(zip(FIGURES, (row.rstrip() for row in rows), strict=True))
    assert told["12a"].endswith("1 hold, 1 fail, 1 not judged (quick)")
    assert told["12b"].endswith("not run")


def test_the_list_says_which_results_cannot_be_used_and_goes_on(kept: Path) -> None:
    older = {**RESULTS["12b"], "made": {**RESULTS["12b"]["made"], "minipaged": "0.0.1"}}
    (kept / "12b.json").write_text(json.dumps(older))
    (kept / "12c.json").write_text(json.dumps(RESULTS["12b"])[:100])
    (kept / "12d.json").mkdir()
    rows = minipaged("list", "--output", str(kept)).splitlines()
    told = dict(zip(FIGURES, (row.rstrip() for row in rows), strict=True))
    assert told["12a"].endswith("1 hold, 1 fail, 1 not judged (quick)")
    assert told["12b"].endswith("made by minipaged 0.0.1; to be made again")
    assert told["12c"].endswith("no whole result; to be made again")
    assert told["12d"].endswith("cannot be read: Is a directory; to be made again")
    assert told["12e"].endswith("not run")
    with pytest.raises(InvalidRequest, match=r"12b\.json was made by minipaged 0\.0\.1"):
        minipaged("report", "--results", str(kept))


def test_the_report_is_written_where_it_is_asked_for(kept: Path) -> None:
    file = kept / "mine.html"
    assert minipaged("report", "--results", str(kept), "-o", str(file)).strip().endswith("mine.html")
    assert "Fig. 12a" in Page(file.read_text()).text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "12z"], r"there is no figure '12z' \(did you mean 12\w\?\); there are: 1, .*12a"),
        (["run", "Fig. 12a"], r"there is no figure 'Fig\. 12a' \(did you mean 12a\?\)"),
        (["run", "nonsense"], r"there is no figure 'nonsense'; there are: "),
        (["run", "12a", "--output", "{folder}/12a.json"], r"cannot keep results in .*12a\.json: .*another --output"),
        (["report", "--results", "{folder}/none"], r"there are no results in .*none; minipaged paper run all"),
        (["report", "-r", "{folder}", "-o", "{folder}"], r"cannot write .*: Is a directory; give another --output"),
    ],
)
def test_a_mistake_is_told_with_the_way_out(kept: Path, words: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        minipaged(*(word.format(folder=kept) for word in words))


def test_a_number_means_all_its_panels() -> None:
    assert commands.figures_called("12") == [f"12{letter}" for letter in "abcdef"]
    assert commands.figures_called("all") == list(FIGURES)
    assert commands.figures_called("12c") == ["12c"]


def test_without_matplotlib_the_extra_is_named() -> None:
    """In a process of its own, where it has not been imported yet."""
    program = "import sys; sys.modules['matplotlib'] = None; from minipaged.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "paper", "list"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "drawing needs matplotlib; install minipaged with its extra 'paper'" in done.stderr
