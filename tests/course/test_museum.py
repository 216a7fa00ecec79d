"""The bug museum: every exhibit fails as its page says, and with the fix that its page tells, it passes."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from minipaged.course import museum
from minipaged.course.grader import search
from minipaged.course.grader.assignment import Submission, find_assignment
from minipaged.course.grader.formats import text
from minipaged.course.grader.grading import grade
from tests.course.harness import ROOT, result_of
from tests.effort import quick_cases, thorough

PAGES = ROOT / "docs" / "museum"

GRADED = {
    "minus_one": ("block-allocator", "allocate and free"),
    "remainder": ("block-table", "append and slots"),
    "stale_table": ("block-table", "fork, adopt and replace share"),
}
"""Those that are answers to an assignment, and the test that its page shows."""
SERVED = ("never_fits", "lost_hash", "shared_read", "late_pin", "one_window", "bonus_token")


def fixes(name: str) -> list[tuple[str, str]]:
    """Of each patch on the page: what it takes away or finds there, and what it puts in place."""
    found = []
    for patch in re.findall(r"```diff\n(.*?)```", (PAGES / f"{name}.md").read_text(), flags=re.DOTALL):
        lines = patch.splitlines(keepends=True)
        found.append(tuple("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +")))
    return found


def mended(name: str, folder: Path, fix: int = -1) -> Path:
    """The exhibit with one fix of its page, the last one."""
    source, (before, after) = (ROOT / "museum" / f"{name}.py").read_text(), fixes(name)[fix]
    assert source.count(before) == 1
    path = folder / f"{name}.py"
    path.write_text(source.replace(before, after))
    return path


def shown(name: str) -> str:
    """What the page shows of a terminal."""
    [console] = re.findall(r"```console\n(.*?)```", (PAGES / f"{name}.md").read_text(), flags=re.DOTALL)
    return str(console)


def test_every_exhibit_has_a_page_a_recording_and_a_test() -> None:
    names = {path.stem for path in (ROOT / "museum").glob("*.py")}
    assert names == {*GRADED, *SERVED}
    assert names == {path.stem for path in PAGES.glob("*.md")} - {"index"}
    for name in names:
        page = (PAGES / f"{name}.md").read_text()
        assert f"<!-- run ../runs/{name}.py -->" in page
        assert (ROOT / "docs" / "runs" / f"{name}.py").is_file()
        assert f"({name}.md)" in (PAGES / "index.md").read_text()
        for test, file in re.findall(r"`(test_\w+)`[^`]*?\[(tests/\S+\.py)\]", page.replace("\n", " ")):
            assert f"def {test}(" in (ROOT / file).read_text(), "a page names a test that is not there"


# --- Graded ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRADED)
def test_the_grader_finds_it_and_prints_what_the_page_shows(name: str) -> None:
    assignment, test = GRADED[name]
    failure = result_of(find_assignment(assignment), test, Submission(ROOT / "museum" / f"{name}.py")).failure
    assert failure is not None
    assert failure.script is not None
    page = shown(name)
    assert f"grade {GRADED[name][0]} museum/{name}.py" in page
    assert failure.message in page
    quoted = [line.strip() for line in page.splitlines() if line.startswith(" " * 14)]
    assert "\n".join(quoted) in failure.script


@quick_cases(1)
@pytest.mark.parametrize("name", GRADED)
def test_mended_it_gets_full_marks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "EXAMPLES", 20)
    result = grade(find_assignment(GRADED[name][0]), Submission(mended(name, tmp_path)), model=None)
    assert result.full_marks, text(result)


def test_counting_the_remainder_one_later_fails_for_blocks_of_one_token(tmp_path: Path) -> None:
    path = mended("remainder", tmp_path, fix=0)
    assignment = find_assignment("block-table")
    failure = result_of(assignment, "blocks_needed is what append takes", Submission(path)).failure
    assert failure is not None
    assert failure.script is not None
    assert "a = BlockTable(1, allocator)" in failure.script


# --- Served ---------------------------------------------------------------------------------------


def parts_of(path: Path) -> museum.Parts:
    parts: museum.Parts = runpy.run_path(str(path))["PARTS"]
    return parts


@thorough
@pytest.mark.parametrize("name", SERVED)
def test_the_program_prints_what_the_page_shows_and_mended_it_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: dict[int, bool] = {}
    right = museum.run_workload

    def noting(seed: int, parts: museum.Parts) -> None:
        tried[seed] = False
        right(seed, parts)
        tried[seed] = True

    monkeypatch.setattr(museum, "run_workload", noting)
    monkeypatch.setattr(sys, "argv", [f"museum/{name}.py"])
    with pytest.raises(SystemExit) as ended:
        museum.try_workloads(parts_of(ROOT / "museum" / f"{name}.py"))
    assert ended.value.code == 1
    assert f"$ python museum/{name}.py\n{capsys.readouterr().out}" == shown(name)
    parts = parts_of(mended(name, tmp_path))
    for seed in (seed for seed, passed in tried.items() if not passed):
        right(seed, parts)
