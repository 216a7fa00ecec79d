"""What holds for assignments alike: starters are told where to begin, seeded bugs are caught, seeds repeat a grade."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from minipaged.course.assignments.block_allocator import checks as block_allocator
from minipaged.course.assignments.block_allocator.checks import LARGE_POOLS
from minipaged.course.grader.assignment import ASSIGNMENTS, GradeStatus, Submission, find_assignment
from minipaged.course.grader.formats import text
from minipaged.course.grader.grading import grade
from minipaged.course.grader.handouts import folder_of
from minipaged.course.grader.mutants import find_seeded
from minipaged.llm import LoadedModel
from tests.course.harness import result_of, submit
from tests.effort import quick_cases, thorough

NAMES = (
    *("block-allocator", "block-table", "paged-attention", "scheduler", "beam-search"),
    *("prefix-cache", "eviction", "windows", "speculative"),
)
"""Those that have no worker that is slow to start: the others' tests share one."""


TOLD = re.compile(r"(\w+) is not written yet \(starter\.py:(\d+)\): replace its `raise NotImplementedError`")


BEGINS = {"pack": "pack", "unpack": "unpack", "one column of GPTQ": "round_column"}
"""Of `quantize`: the tests that begin with another function than `round_to_nearest`."""


@quick_cases(2)
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_the_untouched_starter_gets_no_points_and_is_told_where_to_begin(name: str) -> None:
    if name == "triton-decode":
        pytest.importorskip("triton")
    assignment, starter = find_assignment(name), folder_of(name) / "starter.py"
    result = grade(assignment, Submission(starter), model=None)
    assert (result.score, result.full_marks) == (0, False)
    status = {"properties": GradeStatus.FAILED, "engine": GradeStatus.SKIPPED, "model": GradeStatus.NOT_GRADED}
    assert [one.status for one in result.results] == [status[one.test.stage] for one in result.results]
    lines = starter.read_text().splitlines()
    failed = [one.message for one in result.results if one.test.stage == "properties"]
    for message in failed:
        told = TOLD.fullmatch(message)
        assert told is not None, message
        above = lines[: int(told[2])]
        assert above.pop().strip() == "raise NotImplementedError"
        assert next(line for line in reversed(above) if "def " in line).strip().startswith(f"def {told[1]}(")
    assert text(result).count("fails like '") == len(failed) - len({*failed})
    if name == "quantize":
        asked = {one.test.name: TOLD.fullmatch(one.message)[1] for one in result.results if one.message in failed}
        assert asked == dict.fromkeys(asked, "round_to_nearest") | BEGINS
    if name in NAMES:  # each test makes one, or asks the one function
        first = next(n for n, line in enumerate(lines, 1) if "raise NotImplementedError" in line)
        method = "__init__" if assignment.members else assignment.part
        told_first = f"{method} is not written yet (starter.py:{first}): replace its `raise NotImplementedError`"
        assert failed == [told_first] * len(failed)


USUAL = dict.fromkeys(NAMES, "the reference") | {
    "triton-decode": "a program for each head",
    "quantize": "bits as arrays",
    "under-load": "ours",
    "prefix-cache": "a tree of blocks",
    "eviction": "ours",
    "windows": "the first that is seen",
    "speculative": "token by token",
}
"""The right part that is graded with SmolLM2 too."""
INDEX = {
    ("scheduler", "the reference"): (0.9, 1.1),
    ("under-load", "ours"): (1, 1),
    ("paged-attention", "loops"): (1e-6, 0.5),
}
"""Least and most, where it is known how fast it is: as fast as its like, or a hundred times slower."""


UNITS = {"scheduler": "simulated tokens a second", "under-load": "requests in time a second"}


def check_full_marks(name: str, what: str, folder: Path, **given: Any) -> str:
    """The grade as it is told."""
    result = grade(find_assignment(name), submit(find_seeded(name).right[what], folder), **given)
    assert result.full_marks, text(result)
    assert UNITS.get(name, "") in text(result)
    if result.performance is not None:
        least, most = INDEX.get((name, what), (1e-6, 100))
        assert least <= result.performance.index <= most
    elif result.assignment.measure:
        assert "speed: not measured: there is no GPU here" in text(result)
    return text(result)


@thorough
@pytest.mark.usefixtures("examples_of_a_right_part")
@pytest.mark.parametrize(
    ("name", "what"), [(name, what) for name in ASSIGNMENTS for what in find_seeded(name).right if USUAL[name] != what]
)
def test_a_right_but_unusual_part_gets_full_marks(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_allocator, "LARGE_POOLS", LARGE_POOLS)
    check_full_marks(name, what, tmp_path, model=None)


@thorough
@pytest.mark.model
@pytest.mark.usefixtures("examples_of_a_right_part")
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_a_right_part_gets_full_marks_with_smollm2(name: str, tmp_path: Path) -> None:
    (tmp_path / "allocator.py").write_text(find_seeded("block-allocator").right["the reference"])
    carries = name == "block-table"
    carried = {"block-allocator": Submission(tmp_path / "allocator.py")} if carries else None
    assert "100 of 100" in check_full_marks(name, USUAL[name], tmp_path, carried=carried)


REPEATED = {
    "block-allocator": "third-holder-cannot-leave",
    "block-table": "trim gives nothing back",
    "paged-attention": "sees the future",
    "scheduler": "over capacity",
    "beam-search": "the sums so far are forgotten",
    "prefix-cache": "any beginning will do",
    "eviction": "no pins",
    "windows": "without its window",
    "speculative": "it may come again",
}


@quick_cases(1)
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
    "under-load": "no number",
    "quantize": "bytes are subtracted",
    "speculative": "no bonus",
}


@quick_cases(2)
@pytest.mark.parametrize("name", WRONG_IN_A_MODEL)
def test_the_model_test_passes_a_right_part_and_fails_a_wrong_one(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, seeded = LoadedModel.load, find_seeded(name)
    monkeypatch.setattr(LoadedModel, "load", lambda model, *rest, **more: load(tiny_model, *rest, **more))
    wrong = seeded.mutants[WRONG_IN_A_MODEL[name]].source
    for source, status in ((next(iter(seeded.right.values())), GradeStatus.PASSED), (wrong, GradeStatus.FAILED)):
        result = result_of(find_assignment(name), "SmolLM2", submit(source, tmp_path))
        assert result.status is status, result.message
        assert "Traceback" not in result.message
