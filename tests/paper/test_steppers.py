"""Figs. 4 to 10: runs that are recorded, what is drawn and judged from their events, and what shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from docs import build
from minipaged.cli import app
from minipaged.mirror import Mirror
from minipaged.paper.figure import Blocks, FigureResult
from minipaged.paper.figures import FIGURES
from minipaged.paper.figures.steppers import FIGS_4_TO_10, SPEECH, Fig4, Stepped
from minipaged.paper.running import Results, run_figure
from minipaged.paper.telling import RetoldRun, Tale, TaleRequest
from minipaged.reference.block_table import BlockTable
from minipaged.steps import StepInput

FIGURE: dict[str, Stepped] = {figure.name: figure for figure in FIGS_4_TO_10}


def ran(figure: Stepped, **changes: Any) -> FigureResult:
    """`changes`: of its run."""
    [job] = figure.jobs(quick=False, seed=0)
    assert isinstance(job, Tale)
    job = replace(job, **changes)
    return figure.outcome({job: json.loads(json.dumps(asdict(job.run())))})


@cache
def outcome(name: str) -> FigureResult:
    return ran(FIGURE[name])


def failing(found: FigureResult) -> list[str]:
    return [check.what for check in found.checks if check.verdict == "fails"]


def tables(picture: Any) -> dict[str, list[tuple[int, int]]]:
    assert isinstance(picture, Blocks)
    return {table.label: [(entry.block, entry.filled) for entry in table.entries] for table in picture.tables}


def in_pool(picture: Any) -> dict[int, tuple[str, int]]:
    assert isinstance(picture, Blocks)
    return {box.number: (" ".join(box.words), box.holders) for box in picture.pool if box.holders}


# --- The paper's examples -------------------------------------------------------------------------


def test_they_stand_in_the_papers_order() -> None:
    names = list(FIGURES)
    first = names.index("4")
    assert names[first - 1 : first + 8] == ["3", *FIGURE, "11"]


@pytest.mark.parametrize("name", FIGURE)
def test_what_the_paper_says_of_its_example_holds(name: str) -> None:
    found = outcome(name)
    assert failing(found) == []
    assert len(found.checks) >= 4
    assert {check.tolerance for check in found.checks} == {0.0}


def test_a_block_table_is_drawn_as_in_the_paper() -> None:
    prompt, first, second = outcome("6").plots
    assert tables(prompt) == {"sequence A": [(7, 4), (1, 3)]}
    assert tables(first) == {"sequence A": [(7, 4), (1, 4)]}
    assert tables(second) == {"sequence A": [(7, 4), (1, 4), (3, 1)]}
    words = {7: ("Four score and seven", 1), 1: ("years ago our fathers", 1), 3: ("brought", 1)}
    assert in_pool(second) == words


def test_samples_are_drawn_before_and_after_the_copy() -> None:
    before, after = outcome("8").plots
    assert in_pool(before) == {7: ("Four score and seven", 2), 1: ("years ago our", 2)}
    assert sorted(in_pool(after)) == [1, 3, 7]
    assert {in_pool(after)[block][0] for block in (1, 3)} == {"years ago our fathers", "years ago our mothers"}
    assert [in_pool(after)[block][1] for block in (1, 3, 7)] == [1, 1, 2]


def test_beams_are_drawn_with_what_they_share() -> None:
    before, after = (tables(picture) for picture in outcome("9").plots)
    assert sorted([block for block, _ in table] for table in before.values()) == [
        [0, 1, 3, 5],
        [0, 1, 3, 6],
        [0, 1, 3, 7],
        [0, 2, 4, 8],
    ]
    assert sorted([block for block, _ in table][:4] for table in after.values()) == [
        *2 * [[0, 1, 3, 5]],
        *2 * [[0, 1, 3, 6]],
    ]
    assert {block for table in after.values() for block, _ in table[4:]} == {2, 4, 7, 8}


def test_workers_know_the_tables_of_the_manager() -> None:
    manager, *workers = outcome("4").plots
    assert tables(manager)["sequence A"] == [(7, 4), (1, 4), (3, 1)]
    assert [tables(worker) for worker in workers] == 2 * [tables(manager)]


# --- What turns verdicts red ----------------------------------------------------------------------


def test_a_worker_that_hears_of_no_new_blocks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Mirror.apply

    def deaf(mirror: Mirror, step: StepInput, **options: Any) -> None:
        apply(mirror, step._replace(tables=()), **options)

    monkeypatch.setattr(Mirror, "apply", deaf)
    assert "block tables of worker 0 that are not the manager's, in all steps" in failing(ran(Fig4()))


def test_a_table_that_never_copies_has_no_such_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockTable, "_writes_into_shared_block", lambda table, num_new_tokens: False)
    with pytest.raises(ValueError, match="no such moment"):
        ran(FIGURE["8"])


def test_who_arrives_first_gets_the_first_blocks() -> None:
    """The order changes which block is whose, and nothing that the paper says."""
    a, b = FIGURE["7"].tale.requests
    found = ran(FIGURE["7"], requests=(replace(b, after=0), replace(a, after=1)))
    assert in_pool(found.plots[0])[7] == ("It was the best", 1)
    at_once = ran(FIGURE["7"], requests=(a, replace(b, after=0)))
    assert [entry[0] for entry in tables(at_once.plots[0])["sequence B"]] == [5, 2]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("5", {"block_size": 2}),
        ("6", {"block_size": 16}),
        ("6", {"block_size": 2}),
        ("7", {"block_size": 2}),
        ("8", {"requests": (TaleRequest("Four score and seven years ago our", 4, samples=3),)}),
        ("8", {"block_size": 8}),
        ("9", {"block_size": 3}),
        ("9", {"odds": (("a", 9.0), ("noon", 5.0))}),
        ("10", {"prefix_caching": False}),
    ],
)
def test_another_run_than_the_papers_is_drawn_and_fails(name: str, changes: dict[str, Any]) -> None:
    found = ran(FIGURE[name], **changes)
    assert found.plots
    assert failing(found)


def told_of(found: FigureResult) -> dict[str, float | None]:
    return {check.what: check.ours for check in found.checks}


def test_three_samples_are_counted_as_three() -> None:
    found = ran(FIGURE["8"], requests=(TaleRequest("Four score and seven years ago our", 4, samples=3),))
    told = told_of(found)
    assert told["samples of the prompt"] == 3
    assert told["blocks of the prompt that all samples have"] == 2
    assert told["blocks copied"] == 2
    assert told["blocks of all samples together"] == 4
    said = [box.said for box in found.plots[1].pool if box.said] if isinstance(found.plots[1], Blocks) else []
    assert sorted(said) == ["copy of 1", "copy of 1", "in place"]


def test_blocks_of_another_request_are_not_counted_among_the_samples() -> None:
    [asked] = FIGURE["8"].tale.requests
    found = ran(FIGURE["8"], requests=(asked, replace(asked, samples=1, after=1)))
    assert told_of(found) == told_of(outcome("8"))


def test_three_beams_are_counted_as_three() -> None:
    found = ran(FIGURE["9"], requests=(TaleRequest("It was", 8, beams=3),))
    told = told_of(found)
    assert told["before: candidates"] == 3
    assert told["before: blocks that all have"] == 3
    assert told["before: candidates that went their own way from the second block on"] == 0
    assert told["after: blocks that all have"] == 3
    assert [plot.title for plot in found.plots] == ["3 beams", "3 of 2 of them"]
    assert len(found.notes) == 1


def test_a_beams_last_block_is_full_only_when_it_is() -> None:
    assert told_of(ran(FIGURE["9"], block_size=3))["before: full blocks of each"] == 2


# --- Recordings -----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_recording() -> None:
    assert ran(FIGURE["8"]) == outcome("8")
    assert outcome("8").recording == json.loads(json.dumps(outcome("8").recording))


def test_a_used_pool_hands_out_what_came_back_last() -> None:
    tale = Tale(
        "", (SPEECH,), (TaleRequest("Four score and seven years ago our", 4),), first_blocks=(5, 20, 2), num_blocks=6
    )
    found = RetoldRun(asdict(tale.run()))
    assert found.after_step(3).sequences[0].table[:2] == [5, 2]


def test_a_moment_that_never_comes_is_told() -> None:
    [job] = FIGURE["6"].jobs(quick=False, seed=0)
    with pytest.raises(ValueError, match="'Four score and seven years ago our' has no such moment"):
        RetoldRun(asdict(job.run())).after_step(99)


@pytest.mark.parametrize("name", FIGURE)
def test_the_result_that_is_kept_for_its_page_is_of_this_code(name: str) -> None:
    """Whoever changes what the engine does makes it again (`minipaged paper run 4 5 ...`, docs/contributing.md)."""
    kept, found = json.loads((build.RESULTS / f"{name}.json").read_text()), outcome(name)
    assert found.recording is not None
    assert kept["recording"]["events"] == found.recording["events"]
    assert kept["plots"] == json.loads(json.dumps([asdict(plot) for plot in found.plots]))


# --- What is shown --------------------------------------------------------------------------------


def words_drawn(name: str) -> Sequence[str]:
    pytest.importorskip("matplotlib")
    from minipaged.paper.drawing import draw

    data = json.loads(json.dumps({"figure": name, "title": "T", "plots": [asdict(p) for p in outcome(name).plots]}))
    canvas = draw(data)
    return [text.get_text() for axes in canvas.axes for text in axes.texts]


def test_a_picture_has_tables_words_and_counts() -> None:
    drawn = words_drawn("8")
    assert drawn.count("fathers") == drawn.count("mothers") == 1
    assert drawn.count("×2") == 3
    assert drawn.count("0: 7, 4") == 4
    assert {"sequence A", "sequence B", "×1 copy of 1"} <= {*drawn}


def test_a_picture_is_told_in_words() -> None:
    from minipaged.paper.drawing import in_words

    data = {"figure": "6", "title": "T", "plots": [asdict(plot) for plot in outcome("6").plots]}
    assert "“brought” takes a block: sequence A has blocks 7 1 3" in in_words(data)


def test_the_command_writes_a_stepper(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = CliRunner().invoke(app, ["paper", "run", "6", "--jobs", "1", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = (tmp_path / "6.html").read_text()
    assert "<paged-stepper" in written
    assert "<h1>Fig. 6: block table translation</h1>" in written
    assert "only #filled changes" in written, "what to look at"
    assert json.loads((tmp_path / "6.json").read_text())["recording"]["title"] in written
    assert (tmp_path / "6.png").stat().st_size > 10_000


def test_the_page_of_such_a_figure_has_the_stepper_and_no_word_of_lines(tmp_path: Path) -> None:
    def page(figure: Any) -> str:
        data = run_figure(figure, Results(tmp_path), quick=False, seed=0, processes=1, done=lambda job: None)
        return build.figure_page(data, [figure.name])

    found = page(FIGURE["6"])
    assert found.count("<paged-stepper") == 1
    assert "dashed" not in found
    other = page(FIGURES["3"])
    assert "paged-stepper" not in other
    assert "dashed" in other
