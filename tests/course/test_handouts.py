"""What students begin with: every assignment's files are there, its first test means something, wheels have them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minipaged.cli import app
from minipaged.course.grader.assignment import ASSIGNMENTS, CannotBeGraded, Submission, find_assignment
from minipaged.course.grader.grading import grade
from minipaged.course.grader.handouts import files_of, folder_of, start, title_of, to_do
from minipaged.course.grader.mutants import find_seeded
from tests.course.harness import ROOT
from tests.course.submissions import REFERENCE


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_a_starter_is_written_and_knows_what_is_to_do(assignment: str, tmp_path: Path) -> None:
    handout, starter, _ = start(assignment, tmp_path / "mine")
    assert "](../" not in handout.read_text(), "nothing of the repository lies beside it"
    assert title_of(assignment) in handout.read_text().partition("\n")[0]
    assert starter.name == f"{assignment.replace('-', '_')}.py"
    assert f"minipaged grade {assignment} {starter.name}" in starter.read_text()
    assert to_do(starter)
    starter.write_text(next(iter(find_seeded(assignment).right.values())))
    assert not to_do(starter)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "block_table.py").write_text("mine")
    with pytest.raises(CannotBeGraded, match=r"block_table\.py exists already and is not overwritten; name another"):
        start("block-table", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["block_table.py"]
    assert (tmp_path / "block_table.py").read_text() == "mine"
    with pytest.raises(CannotBeGraded, match=r"cannot write to .*: Not a directory; name another folder"):
        start("block-table", tmp_path / "block_table.py" / "in")
    with pytest.raises(CannotBeGraded, match="there is no assignment 'nine'; choose one of block-allocator, "):
        start("nine", tmp_path)


def test_the_commands_list_them_and_begin_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = CliRunner().invoke(app, ["course", "list"]).output.splitlines()
    assert [line.split()[0] for line in listed] == list(ASSIGNMENTS)
    begun = CliRunner().invoke(app, ["course", "start", "scheduler"])
    assert begun.exit_code == 0
    assert all((tmp_path / line).is_file() for line in begun.output.splitlines()[:3])
    assert CliRunner().invoke(app, ["course", "start", "block_table"]).exit_code == 0  # as its file is called
    again = CliRunner().invoke(app, ["course", "start", "scheduler"])
    assert again.exit_code == 2


def test_an_unwritten_part_gets_a_list_of_what_is_to_do_and_no_counterexample(tmp_path: Path) -> None:
    _, starter, _ = start("block-allocator", tmp_path)
    todo = to_do(starter)
    starter.write_text(starter.read_text().replace("raise NotImplementedError", "return None", 1))
    assert to_do(starter) == todo[1:]
    first = grade(find_assignment("block-allocator"), Submission(starter), model=None).results[1].failure
    assert first is not None
    assert first.script is None
    assert not first.events
    assert first.drawing[0] == "still to be written:"
    assert first.drawing[1:] == tuple(to_do(starter))
    assert len(first.drawing) == 1 + 7
    assert first.drawing[-1].endswith("copy_on_write(block)")


IN_A_FULL_POOL = "        self._check_held(block)\n        self._ref_counts[block] -= 1\n"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("NotImplementedError", "free is not written yet"),
        ("OutOfBlocks", "allocator.free(a) raised OutOfBlocks, but it needs no free block"),
    ],
)
def test_an_error_where_nothing_is_left_to_write_has_its_counterexample(raised: str, told: str, tmp_path: Path) -> None:
    assert REFERENCE.count(IN_A_FULL_POOL) == 1
    path = tmp_path / "mine.py"
    raising = f"        if not self._free:\n            raise {raised}\n"
    path.write_text(REFERENCE.replace(IN_A_FULL_POOL, raising + IN_A_FULL_POOL))
    assert not to_do(path)
    assignment = find_assignment("block-allocator")
    two_tests = replace(assignment, tests=assignment.tests[:2], measure=None)  # the second finds it
    results = grade(two_tests, Submission(path), model=None).results
    first = next(result.failure for result in results if result.failure)
    assert first.message.startswith(told)
    assert first.script is not None


@pytest.mark.thorough
def test_a_wheel_has_all_of_them(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(ROOT)], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("minipaged-*.whl"))) as wheel:
        names = set(wheel.namelist())
    for path in (ROOT / "assignments").rglob("*"):
        if path.suffix in (".md", ".py", ".toml"):
            assert f"minipaged/course/handed_out/{path.relative_to(ROOT / 'assignments')}" in names


def test_marks_of_the_site_are_not_handed_out() -> None:
    assert "<!-- grade block-allocator -->" in (folder_of("block-allocator") / "handout.md").read_text()
    assert not [name for name in ASSIGNMENTS if "<!--" in files_of(name)["handout.md"]]
