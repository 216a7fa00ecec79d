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
from minipaged.paper import commands
from minipaged.paper.figures import FIGURES
from minipaged.paper.figures.fig12 import FIG_12, TOLERANCE
from minipaged.paper.figures.panel import BETWEEN, Panel, halfway
from minipaged.paper.machines import facts
from minipaged.paper.pages import counts, knees
from minipaged.paper.running import file_name, made, why_it_fails
from minipaged.tiers import devices

KEPT = Path(__file__).parents[2] / "docs" / "runs" / "paper"

VOID = {"meta", "br", "img", "link"}


def check(what: str, paper: float, ours: float | None, tolerance: float | None, verdict: str) -> dict[str, Any]:
    difference = None if ours is None else ours / paper - 1
    numbers = {"paper": paper, "ours": ours, "tolerance": tolerance, "difference": difference}
    return {"what": what, **numbers, "relative": True, "unit": "/s", "kind": "predicted", "verdict": verdict}


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
    from minipaged.paper.report import report

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


def test_the_page_of_a_run_says_which_figure_it_is_and_what_to_look_at() -> None:
    """Whatever signs its texts have."""
    from minipaged.paper.report import figure_page

    data = {**RESULTS["12a"], "figure": "6", "recording": {"title": "</script><b>"}}
    written = figure_page(data)
    page = Page(written)
    for words in ("Fig. 12a: a & b", "Section 4.3 of the paper.", FIGURES["6"].look[:60], "What n is.", "+50.0%"):
        assert words in page.text, words
    assert all(experiment.partition("`")[0] in page.text for experiment in FIGURES["6"].change_it)
    assert written.count("<title>Fig. 12a: a &amp; b</title>") == 1
    assert written.count("<h1>Fig. 12a: a &amp; b</h1>") == 1
    assert written.count('<div class="stepper"><paged-stepper>') == 1
    assert "</script><b>" not in written
    assert not [value for _, name, value in page.attributes if name in ("href", "src")], "nothing comes from anywhere"


def test_pictures_of_one_page_have_names_of_their_own() -> None:
    """What one picture defines is not what another one uses."""
    from minipaged.paper.drawing import svg

    def names(figure: str) -> set[str]:
        return set(re.findall(r' id="(\w+)"', svg(RESULTS[figure])))

    shared = names("12a") & names("12b")
    assert names("12a") - shared
    assert all(name.startswith("DejaVu") for name in shared), "letters alone, which are the same"
    assert svg(RESULTS["12a"]) == svg(RESULTS["12a"]), "the same for the same data"


def test_the_knees_are_judged_together() -> None:
    line = knees(RESULTS)
    assert line is not None
    assert "The 3 knees of Orca and vLLM in 2 panels of Fig. 12: median error 50.0% (to be within 6%)" in line
    assert "1 never come: fails." in line
    good = {"12a": result("12a", [check("vLLM: x", 1.0, 1.05, 0.18, "holds")])}
    assert (knees(good) or "").endswith("worst 5.0% (within 18%): holds.")
    assert knees({}) is None
    quick = [{**one, "verdict": "not judged"} for one in RESULTS["12a"]["checks"]]
    assert knees({"12a": result("12a", quick)}) is None


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


PANELS = {name: figure for name, figure in FIGURES.items() if isinstance(figure, Panel)}


@pytest.mark.parametrize("name", PANELS)
def test_every_curve_has_the_points_halfway_that_the_rule_asks_for_and_no_others(name: str) -> None:
    """Whatever its verdict: from a curve's other points the rule gives these again."""
    lines = json.loads((KEPT / f"{file_name(name)}.json").read_text())["plots"][0]["lines"]
    for line in (line for line in lines if line["style"] == "ours"):
        system, kept = line["label"], dict(line["points"])
        assert sorted(kept) == sorted(PANELS[name].rates(system)), "what a run would have"
        between = BETWEEN.get(name, {}).get(system, ())
        others, added = {rate: latency for rate, latency in kept.items() if rate not in between}, list[float]()
        while system != "FasterTransformer" and (rate := halfway(sorted(others.items()))):
            assert rate in between, f"{system}, {rate}/s"
            others[rate] = kept[rate]
            added.append(rate)
        assert tuple(added) == between, system


def test_points_halfway_are_for_curves_that_there_are() -> None:
    assert {(name, system) for name, of in BETWEEN.items() for system in of} <= {
        (name, system) for name, panel in PANELS.items() for system in panel.systems
    }


def test_a_point_halfway_is_asked_for_where_a_curve_rises_far_and_steeply() -> None:
    assert halfway([(1, 0.01), (2, 0.1), (2.5, 0.81), (9, 9.9)]) == 2.25
    assert halfway([(1, 0.01), (2, 0.1), (2.5, 0.79), (9, 9.9)]) is None, "less than eightfold; the rest is no knee"
    assert halfway([(20, 0.1), (20.9, 9.9)]) is None, "near each other"
    assert halfway([(20, 0.1), (21.19, 9.9)]) == 20.6, "three digits"
    assert halfway([(1, 0.01), (2, 0.1)]) is None, "no knee"


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json")), ids=lambda path: path.stem)
def test_of_every_failing_check_of_a_kept_result_a_note_says_why(path: Path) -> None:
    """It names the check, and is what its figure says today."""
    data = json.loads(path.read_text())
    failing = [one["what"] for one in data["checks"] if one["verdict"] == "fails"]
    told = [note for note in data["notes"] if note.startswith("Why it fails (")]
    assert told == why_it_fails(FIGURES[data["figure"]], data["checks"])
    assert [what for what in failing if not any(what in note for note in told)] == []
    assert all(len(note.partition("): ")[2]) > 80 for note in told)


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
    assert told["12b"].endswith("made by minipaged 0.0.1; run it again")
    assert told["12c"].endswith("incomplete result; run it again")
    assert told["12d"].endswith("cannot be read: Is a directory; run it again")
    assert told["12e"].endswith("not run")


def test_the_report_is_written_where_it_is_asked_for(kept: Path) -> None:
    file = kept / "mine.html"
    assert minipaged("report", "--results", str(kept), "-o", str(file)).strip().endswith("mine.html")
    assert "Fig. 12a" in Page(file.read_text()).text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "12z"], r"there is no figure '12z' \(did you mean 12\w\?\); there are: 1, .*12a"),
        (["run", "beyond/azur"], r"there is no figure 'beyond/azur' \(did you mean beyond/azure\?\)"),
        (["run", "nonsense"], r"there is no figure 'nonsense'; there are: "),
        (["run", "12a", "--output", "{folder}/12a.json"], r"cannot keep results in .*12a\.json: .*another --output"),
        (["report", "--results", "{folder}/none"], r"there are no results in .*none; minipaged paper run all"),
        (["report", "-r", "{folder}", "-o", "{folder}"], r"cannot write .*: Is a directory; give another --output"),
    ],
)
def test_a_mistake_is_told_with_the_way_out(kept: Path, words: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        minipaged(*(word.format(folder=kept) for word in words))


def test_a_result_that_cannot_be_used_is_left_out_of_the_report(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, damage in (("12b", {"made": {}}), ("12c", {"checks": 5}), ("12d", {"plots": [{"a": 1}]})):
        (kept / f"{name}.json").write_text(json.dumps({**RESULTS["12a"], **damage}))
    commands.write_report(kept, kept / "mine.html")
    said = capsys.readouterr().err
    assert [f"{name} is left out" in said for name in ("12a", "12b", "12c", "12d")] == [False, True, True, True]


def test_what_cannot_be_written_is_told_with_the_way_out(tmp_path: Path) -> None:
    for name in ("table1.svg", "table1.json"):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(InvalidRequest, match=rf"cannot write .*{name}: Is a directory; give another --output"):
            commands.run_figures(["table1"], quick=True, seed=0, processes=1, output=tmp_path / name)


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json")), ids=lambda path: path.stem)
def test_a_kept_result_is_of_todays_machines(path: Path) -> None:
    """Or it has to be made again."""
    data = json.loads(path.read_text())
    figure = next(figure for figure in FIGURES.values() if file_name(figure.name) == path.stem)
    assert (data["figure"], data["title"], data["section"]) == (figure.name, figure.title, figure.section)
    for model, told in data["machines"].items():
        assert told == [vars_of(fact) for fact in facts(model)]


def test_of_all_figures_those_whose_file_is_missing_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --traces and without. Who asks for one of them is told by an error."""
    few = {name: FIGURES[name] for name in ("beyond/azure", "beyond/prefix-caching", "table1")}
    monkeypatch.setattr(commands, "FIGURES", few)
    monkeypatch.setattr("minipaged.paper.drawing.save", lambda data, path: None)
    options: dict[str, Any] = {"quick": True, "seed": 0, "processes": 1, "output": tmp_path}
    why = "needs --traces FOLDER, with .*github"
    for traces in (None, tmp_path):
        assert commands.run_figures(["all"], **options, traces=traces)
        said = capsys.readouterr()
        assert "weights" in said.out
        for name in ("beyond/azure", "beyond/prefix-caching"):
            assert re.search(f"{name} is left out: .*{why}", said.err), said.err
        with pytest.raises(InvalidRequest, match=why):
            commands.run_figures(["beyond/azure"], **options, traces=traces)


def test_who_interrupts_is_told_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_figure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        commands.run_figures(["table1"], quick=True, seed=0, processes=1, output=tmp_path)
    assert f"The finished jobs of table1 are kept in {tmp_path}" in capsys.readouterr().err


def test_what_came_out_is_counted_in_a_sentence() -> None:
    exact = {"kind": "exact", "verdict": "holds"}
    assert counts([{"checks": [exact, exact]}]) == "Of what is exact 2 hold"
    told = counts([{"checks": [{"kind": "predicted", "verdict": "fails"}, {**exact, "kind": "calibrated"}, exact]}])
    assert told == "1 fail; of what calibrates 1 hold; of what is exact 1 hold"
    assert counts([]) == ""


def test_a_number_means_all_its_panels() -> None:
    assert commands.figures_called("12") == [f"12{letter}" for letter in "abcdef"]
    assert commands.figures_called("all") == list(FIGURES)
    assert commands.figures_called("12c") == ["12c"]
    assert commands.figures_called("Fig. 12C") == ["12c"]
    assert commands.figures_called("beyond") == [name for name in FIGURES if name.startswith("beyond/")]
    assert commands.figures_called("18") == ["18a", "18b"]


def without_matplotlib(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where it has not been imported yet."""
    program = "import sys; sys.modules['matplotlib'] = None; from minipaged.cli import main; main()"
    return subprocess.run([sys.executable, "-c", program, "paper", *words], capture_output=True, text=True)


def test_without_matplotlib_the_extra_is_named_before_anything_is_run(tmp_path: Path) -> None:
    for words in (["run", "table1", "-o", str(tmp_path / "new")], ["report", "-r", str(tmp_path)]):
        done = without_matplotlib(*words)
        assert done.returncode != 0
        assert "drawing needs matplotlib; install minipaged with its extra 'paper'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_list_needs_no_matplotlib(kept: Path) -> None:
    done = without_matplotlib("list", "-o", str(kept))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= len(FIGURES)


def test_figures_are_made_on_as_many_cores_as_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's quota may be less than the machine has."""
    given: list[int] = []
    monkeypatch.setattr(devices, "usable_cores", lambda: 3)
    monkeypatch.setattr(commands, "run_figures", lambda names, *, processes, **others: not given.append(processes))
    for jobs in ([], ["--jobs", "2"]):
        assert CliRunner().invoke(app, ["paper", "run", "4", *jobs]).exit_code == 0
    assert given == [3, 2]
