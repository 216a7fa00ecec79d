"""Assignment 8: the starter fails with a helpful message, right ones get full marks, every wrong one is caught."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from minipaged.course.assignments.under_load import checks as under_load
from minipaged.course.assignments.under_load.checks import (
    ASSIGNMENT,
    BURSTS,
    LIGHT,
    LONGER,
    OBJECTIVES,
    OVERLOAD,
    ArrivalLoad,
    Graded,
    RemotePolicy,
    bound,
    check_loads,
    served,
)
from minipaged.course.assignments.under_load.mutants import ORDER, OURS
from minipaged.course.assignments.under_load.ours import Ours
from minipaged.course.grader.assignment import Bench, Failed, GradeStatus
from minipaged.course.grader.formats import text
from minipaged.course.grader.grading import grade
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.scheduling import RequestView
from tests.course import harness
from tests.course.harness import ROOT, run_script, submit
from tests.effort import examples, thorough

STARTER = ROOT / "assignments" / "8_under_load" / "starter.py"
FEW = ArrivalLoad("a small load", ((8, 6.0),))
result_of = partial(harness.result_of, ASSIGNMENT)


def with_turn(body: str) -> str:
    """A file whose `turn` is these lines."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return (
        "import random\n\n\nclass UnderLoad:\n    def __init__(self, objectives, longest_wait):\n"
        "        self.o, self.longest, self.asked = objectives, longest_wait, 0\n\n"
        f"    def turn(self, request, now):\n{lines}\n"
    )


BY_ARRIVAL = with_turn("return request.arrival")
SHORTEST = with_turn("return request.prompt_tokens + request.max_output_tokens")
BACKWARDS = with_turn("return -request.arrival")


@thorough
def test_by_arrival_passes_what_asks_for_no_gain_and_is_told_by_how_much_it_falls_short(tmp_path: Path) -> None:
    result = grade(ASSIGNMENT, submit(BY_ARRIVAL, tmp_path), model=None)
    failed = [one.test.name for one in result.results if one.status is GradeStatus.FAILED]
    assert failed == ["an overload", "bursts", "nearly as good as ours"]
    assert result.score == 35
    assert "of the requests are served in time" in text(result)


@thorough
@pytest.mark.parametrize("load", [LIGHT, OVERLOAD, BURSTS], ids=lambda load: load.name)
def test_ours_is_fair_and_better_whatever_is_drawn(load: ArrivalLoad) -> None:
    for seed in range(min(10, examples(6))):  # three in the thorough part, ten in the nightly
        requests = load.requests(seed)
        first_come = served(requests, policy=FirstComeFirstServed)
        ours = served(requests, turn=Ours(OBJECTIVES, bound(first_come)).turn)
        assert ours.longest_wait <= bound(first_come)
        assert ours.in_time >= first_come.in_time + (0 if load is LIGHT else 0.15)


@thorough
def test_who_starves_somebody_gets_nothing_for_the_load_however_many_are_in_time(tmp_path: Path) -> None:
    """The shortest first has more requests in time than by arrival."""
    with Bench(ASSIGNMENT, submit(SHORTEST, tmp_path), 0) as bench, pytest.raises(Failed) as failed:
        check_loads(0.0, BURSTS)(bench)
    failure = failed.value.failure
    assert failure.message.startswith("under bursts: a request waits ")
    assert failure.script is not None
    done = run_script(failure.script, tmp_path)
    assert done.returncode == 1
    assert "AssertionError: a request waits" in done.stderr
    (tmp_path / "mine.py").write_text(OURS)
    assert run_script(failure.script, tmp_path).returncode == 0


def test_a_load_is_served_in_the_students_order_as_in_the_same_order_here(tmp_path: Path) -> None:
    """And the table says who of which length was in time."""
    with Bench(ASSIGNMENT, submit(BACKWARDS, tmp_path), 3) as bench:
        part, requests = RemotePolicy(bench, 1e9), FEW.requests(3)
        students = served(requests, policy=partial(under_load.StudentTurns, part))
        first_come = served(requests, policy=FirstComeFirstServed)
    here = served(requests, turn=lambda request, now: -request.arrival)
    assert students == here
    assert students.served != first_come.served
    table = Graded(FEW, 3, requests, first_come, first_come, students).drawing()
    counts = [int(row.split()[3 if row[0] != "f" else 2]) for row in table[1:]]
    assert sum(counts) == len(requests)
    assert len(table) == 5


def test_an_order_that_never_gets_anywhere_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_load, "MOST_STEPS", 0.5)
    with Bench(ASSIGNMENT, submit(BY_ARRIVAL, tmp_path), 0) as bench, pytest.raises(Failed) as failed:
        Graded.of(bench, FEW)
    failure = failed.value.failure
    assert "requests have not ended; in order of arrival all have ended after" in failure.message
    assert failure.script is not None
    assert "not all requests have ended" in run_script(failure.script, tmp_path).stderr


def test_the_engine_alone_catches_what_only_it_asks_and_says_where(tmp_path: Path) -> None:
    """Requests with several sequences come in the engine's workloads only."""
    source = with_turn("return request.arrival if request.num_sequences == 1 else None")
    assert result_of(ORDER, submit(source, tmp_path)).status is GradeStatus.PASSED
    result = result_of("the engine, on a small model", submit(source, tmp_path))
    assert result.status is GradeStatus.FAILED
    assert result.message.startswith("in the engine, workload ")
    assert "turn returned None" in result.message


@thorough
@pytest.mark.model
def test_smollm2s_texts_are_those_of_any_order(tmp_path: Path) -> None:
    result = result_of("SmolLM2", submit(BACKWARDS, tmp_path))
    assert result.status is GradeStatus.PASSED, result.message


def test_the_bound_is_what_the_handout_says() -> None:
    handout = (STARTER.parent / "handout.md").read_text()
    assert LONGER == 1.5
    assert "1.5 times the longest wait in\n  order of arrival" in handout
    assert f"the most seconds from arrival to the first token: {OBJECTIVES.first_token:g} |" in handout
    assert f"the most seconds per token after the first, on average: {OBJECTIVES.between_tokens:g} |" in handout


def test_ours_tells_four_kinds_of_requests_apart() -> None:
    order = Ours(OBJECTIVES, longest_wait=50.0)
    waiting = RequestView("", 0, prompt_tokens=10, max_output_tokens=10, arrival_time=100.0)
    answering = RequestView("", 0, prompt_tokens=10, max_output_tokens=99, num_tokens=12, arrival_time=0.0)
    in_time, late, urgent = (order.turn(waiting, now) for now in (103.0, 103.1, 131.0))
    assert urgent < in_time < order.turn(answering, 200.0) < late
    assert math.isfinite(sum(urgent))
