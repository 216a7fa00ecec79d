"""What holds for assignments alike: starters are told where to begin, seeded bugs are caught, seeds repeat a grade."""

from __future__ import annotations

import importlib
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

import pytest

from minipaged.course.grader import search
from minipaged.course.grader.assignment import FOLDER, Status, Submission, find_assignment
from minipaged.course.grader.formats import text
from minipaged.course.grader.grading import grade
from minipaged.course.grader.handouts import folder_of
from minipaged.course.grader.mutants import find_seeded
from minipaged.llm import LoadedModel
from tests.course.harness import result_of, run_script, submit
from tests.effort import quick_cases

NAMES = "block-allocator", "block-table", "paged-attention", "scheduler", "beam-search"
"""Those that have no worker that is slow to start: the others' tests share one."""
WITHOUT_SCRIPT = "a small Llama"
"""The test whose failures have none."""
BUGS = {
    name: [bug.name for bug in find_seeded(name).mutants.values() if bug.test != WITHOUT_SCRIPT] for name in NAMES[1:]
} | {"under-load": [bug.name for bug in find_seeded("under-load").mutants.values() if bug.test == "an order"]}
"""The allocators' are graded by all tests in order, and loads take long to serve: both have tests of their own."""
IN_TURN = [(n, bug) for bugs in zip_longest(*BUGS.values()) for n, bug in zip(BUGS, bugs, strict=True) if bug]


def checks_of(name: str) -> ModuleType:
    return importlib.import_module(f"{FOLDER}.{name.replace('-', '_')}.checks")


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for these tests, and faster."""
    monkeypatch.setattr(search, "EXAMPLES", 100)


@quick_cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_untouched_starter_gets_no_points_and_is_told_where_to_begin(name: str) -> None:
    assignment, starter = find_assignment(name), folder_of(name) / "starter.py"
    result = grade(assignment, Submission(starter), model=None)
    assert (result.score, result.full_marks) == (0, False)
    status = {"properties": Status.FAILED, "engine": Status.SKIPPED, "model": Status.NOT_GRADED}
    assert [one.status for one in result.results] == [status[one.test.stage] for one in result.results]
    lines = starter.read_text().splitlines()
    first = next(n for n, line in enumerate(lines, 1) if "raise NotImplementedError" in line)
    method = "__init__" if assignment.members else assignment.part
    told = f"{method} is not written yet (starter.py:{first}): replace its `raise NotImplementedError`"
    failed = [one for one in result.results if one.test.stage == "properties"]
    assert [one.message for one in failed] == [told] * len(failed)
    assert text(result).count(f"fails like '{failed[0].test.name}'") == len(failed) - 1


@quick_cases(10)
@pytest.mark.parametrize(("name", "bug"), IN_TURN)
def test_every_seeded_bug_is_caught_and_its_counterexample_fails_by_itself(name: str, bug: str, tmp_path: Path) -> None:
    seeded = find_seeded(name)
    mutant = seeded.mutants[bug]
    result = result_of(find_assignment(name), mutant.test, submit(mutant.source, tmp_path))
    assert result.status is Status.FAILED
    assert result.failure is not None
    assert result.failure.script is not None
    assert result.failure.crashed == (bug in ("it raises", "a view is written to", "slots past the end"))
    ran = run_script(result.failure.script, tmp_path)
    assert ran.returncode == 1, result.failure.script + ran.stdout + ran.stderr
    assert "Traceback" in ran.stderr
    (tmp_path / "mine.py").write_text(next(iter(seeded.right.values())))
    fixed = run_script(result.failure.script, tmp_path)
    assert fixed.returncode == 0, "the script fails with a right one too:\n" + result.failure.script + fixed.stderr


REPEATED = {
    "block-allocator": "third-holder-cannot-leave",
    "block-table": "trim gives nothing back",
    "paged-attention": "sees the future",
    "scheduler": "over capacity",
    "beam-search": "the sums so far are forgotten",
}


@quick_cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_score_and_the_same_counterexample(name: str, tmp_path: Path) -> None:
    mutant = find_seeded(name).mutants[REPEATED[name]]
    submission = submit(mutant.source, tmp_path)
    first, again, other = (result_of(find_assignment(name), mutant.test, submission, seed) for seed in (1, 1, 2))
    assert first.failure is not None
    assert first == again
    assert other.failure is not None


WRONG_IN_A_MODEL = {
    "block-allocator": "never-copies",
    "block-table": "fork without references",
    "paged-attention": "sees the future",
    "scheduler": "the oldest is starved",
    "beam-search": "the likeliest comes last",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_model_test_passes_a_right_part_and_fails_a_wrong_one(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, seeded = LoadedModel.load, find_seeded(name)
    monkeypatch.setattr(LoadedModel, "load", lambda model, tier: load(tiny_model, tier))
    wrong = seeded.mutants[WRONG_IN_A_MODEL[name]].source
    for source, status in ((next(iter(seeded.right.values())), Status.PASSED), (wrong, Status.FAILED)):
        result = result_of(find_assignment(name), "SmolLM2", submit(source, tmp_path))
        assert result.status is status, result.message
        assert "Traceback" not in result.message
