"""A kept result is given out again, and never once something has changed that it is made of."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fast.kept import ROOT, kept

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no Triton for this machine", allow_module_level=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that prints what another file says, and counts in `runs` how often it has run."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # by size and second it would take an edited file for the same
    (tmp_path / "part.py").write_text("says = 'one'\n")
    program = "import sys, part\nopen('runs', 'a').write('.')\nprint(part.says, *sys.argv[1:])\nsys.exit()\n"
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "minipaged" / "fast").mkdir(parents=True)
    (tmp_path / "minipaged" / "fast" / "read_as_text.py").write_text("")
    return tmp_path


def edit(project: Path) -> str:
    (project / "part.py").write_text("says = 'two'\n")
    return "two"


def edit_the_program(project: Path) -> str:
    program = project / "program.py"
    program.write_text(program.read_text().replace("part.says", "'three'"))
    return "three"


def edit_what_is_read_as_text(project: Path) -> str:
    (project / "minipaged" / "fast" / "read_as_text.py").write_text("pass\n")
    return "one"


def add_what_could_be_read_as_text(project: Path) -> str:
    (project / "minipaged" / "fast" / "another.py").write_text("")
    return "one"


def test_a_result_is_kept_for_its_arguments(project: Path) -> None:
    assert [kept("result", "program", "a", root=project) for _ in range(3)] == ["one a\n"] * 3
    assert (project / "runs").read_text() == "."
    assert kept("result", "program", "b", root=project) == "one b\n"
    assert (project / "runs").read_text() == ".."


@pytest.mark.parametrize("change", [edit, edit_the_program, edit_what_is_read_as_text, add_what_could_be_read_as_text])
def test_a_result_is_forgotten_with_what_it_is_made_of(project: Path, change: Callable[[Path], str]) -> None:
    kept("result", "program", root=project)
    expected = change(project)
    assert kept("result", "program", root=project) == f"{expected}\n"
    assert (project / "runs").read_text() == ".."


def test_a_setting_of_a_package_makes_a_result_of_its_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept("result", "program", root=project)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/another")
    kept("result", "program", root=project)
    assert (project / "runs").read_text() == ".."


def test_a_program_that_fails_keeps_nothing(project: Path) -> None:
    part = project / "part.py"
    part.write_text("raise SystemExit('broken')\n")
    with pytest.raises(AssertionError, match="broken"):
        kept("result", "program", root=project)
    part.write_text("says = 'mended'\n")
    assert kept("result", "program", root=project) == "mended\n"
