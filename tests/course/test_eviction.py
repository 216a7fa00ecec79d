"""Assignment 10: failures are drawn and told, the shares are those of the policies, and student code does not learn the
seed. (Starter and seeded bugs are in `test_every_assignment.py`.)"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minipaged.course.assignments.eviction.checks import ASSIGNMENT, BETTER, NEARLY_OURS, NUM_PROMPTS
from minipaged.course.assignments.eviction.mutants import IN_ORDER, OURS, SEEDED
from minipaged.course.assignments.eviction.ours import OurEviction
from minipaged.course.assignments.eviction.yardsticks import shares
from minipaged.course.grader.assignment import GradeStatus
from minipaged.course.grader.handouts import folder_of
from minipaged.course.sandbox.contract import Limits
from minipaged.simulation.floored_cache import (
    AT_ONCE,
    CARRY_SECONDS,
    COMPUTE_SECONDS,
    DEVICE_BLOCKS,
    HOST_BLOCKS,
    EvictionPolicy,
    FlooredCache,
    WrongEviction,
    prompts,
    serve,
)
from tests.course import harness
from tests.course.harness import folded, run_script, submit
from tests.effort import examples, thorough

result_of = partial(harness.result_of, ASSIGNMENT)
ANSWER = "        return block\n"
GOOD, BETTER_TEST = "as good as the least recently used", "better than the least recently used"


def test_a_failure_is_drawn_and_told_as_events_that_can_be_folded(tmp_path: Path) -> None:
    failure = result_of("never a pinned block", submit(SEEDED.mutants["no pins on the host"].source, tmp_path)).failure
    assert failure is not None
    assert failure.message == "policy.evict('host', [0]) returned 0; it should return 1: block 0 is pinned"
    assert failure.invariant == "pinned-in-flight"
    assert failure.drawing == (
        "block  parent  lies on   pinned by",
        "0      -       the host  request 2",
        "1      -       the host",
    )
    memory = folded(failure)
    assert [sequence.table for sequence in memory.sequences.values()] == [[]]
    assert not memory.cached
    assert set(memory.demoted) == {0, 1}


def test_what_two_policies_share_is_told_by_a_program_that_fails_by_itself(tmp_path: Path) -> None:
    """Though the worker has made other policies before, which shared it too."""
    submission = submit(SEEDED.mutants["one cache for all"].source, tmp_path)
    failure = result_of("the same calls, the same answers", submission).failure
    assert failure is not None
    assert failure.message == "policy.evict('device', []) returned None; it should return 0: block 0 may leave"
    assert failure.script is not None
    assert failure.script.count(".begin(") == 2
    assert failure.message in run_script(failure.script, tmp_path).stderr


def test_a_counterexample_follows_other_answers_than_those_it_was_found_with(tmp_path: Path) -> None:
    """It runs to its end once the bug is gone, whichever block leaves first."""
    source = SEEDED.mutants["parents leave"].source
    script = result_of("children first", submit(source, tmp_path)).failure.script  # type: ignore[union-attr]
    assert script is not None
    assert "WrongEviction: policy.evict('device', []) returned 0" in run_script(script, tmp_path).stderr
    for right in (OURS, IN_ORDER):
        submit(right, tmp_path)
        assert run_script(script, tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("[block]", "returned [None]; it should return None: a block is an int"),
        ("False", "returned False; it should return None: a block is an int"),
        ("object()", "returned an object of type object; it has to return a block, or None"),
    ],
)
def test_an_answer_of_another_kind_is_told(answer: str, told: str, tmp_path: Path) -> None:
    source = OURS.replace(ANSWER, f"        return {answer}\n")
    failure = result_of("empty floors", submit(source, tmp_path)).failure
    assert failure is not None
    assert told in failure.message
    assert failure.script is not None
    assert run_script(failure.script, tmp_path).returncode == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("raise LookupError('nothing')", "evict raised LookupError: nothing (mine.py:"),
        ("return object()", "evict returned an object of type object; it has to return a block, or None"),
        ("return -1", "returned -1; it should return "),
        ("while True: pass", "a call did not end within 1 second: an endless loop, or far too slow"),
    ],
)
def test_what_goes_wrong_only_when_prompts_are_served_is_told(line: str, told: str, tmp_path: Path) -> None:
    submission = submit(OURS.replace(ANSWER, f"        if self._clock > 200:\n            {line}\n{ANSWER}"), tmp_path)
    impatient = replace(ASSIGNMENT, limits=Limits(call_seconds=1))
    result = harness.result_of(impatient, GOOD, submission)
    assert result.status is GradeStatus.FAILED
    assert told in result.message
    assert result.failure is not None
    if result.failure.verdict is None:
        assert "saved = serve(prompts(0, " in (result.failure.script or "")


def test_student_code_does_not_learn_the_seed(tmp_path: Path) -> None:
    source = OURS.replace(ANSWER, f"        raise LookupError(random.random())\n{ANSWER}").replace(
        "from math import log2", "import random\nfrom math import log2"
    )
    first, second = (result_of(GOOD, submit(source, tmp_path), seed).message for seed in (0, 1))
    assert "LookupError" in first
    assert first == second


def test_the_least_recently_used_policy_gets_the_points_for_that_and_is_told_the_required_share(tmp_path: Path) -> None:
    submission = submit(SEEDED.mutants["only the time counts"].source, tmp_path)
    assert result_of(GOOD, submission).status is GradeStatus.PASSED
    message = result_of(BETTER_TEST, submission).message
    least, most = shares(0, 100)
    assert message == (
        f"{least:.1%} of the seconds are saved; {least + BETTER * (most - least):.1%} are required. The least recently "
        f"used policy saves {least:.1%}, one that knows the future {most:.1%}"
    )


def test_the_handout_has_the_numbers_of_the_grade() -> None:
    handout = " ".join((folder_of("eviction") / "handout.md").read_text().split())
    least, most = shares(0, NUM_PROMPTS)
    ours = serve(prompts(0, NUM_PROMPTS), OurEviction(DEVICE_BLOCKS, HOST_BLOCKS))
    assert f"With seed 0 they save {100 * least:.1f} % and {100 * most:.1f} %." in handout
    assert (BETTER, NEARLY_OURS) == (0.2, 0.4)
    for way in (0.0, BETTER, NEARLY_OURS):
        assert f"| {100 * (least + way * (most - least)):.1f} % | 10" in handout
    assert f"Ours goes {100 * (ours - least) / (most - least):.0f} % of the way with seed 0" in handout
    assert f"makes up {NUM_PROMPTS} requests" in handout
    assert f"room for {DEVICE_BLOCKS} blocks, the host for {HOST_BLOCKS}." in handout
    assert f"carrying one up costs {CARRY_SECONDS} seconds, computing one costs {COMPUTE_SECONDS:g} second." in handout
    assert AT_ONCE == 3


@thorough
def test_right_policies_get_all_points_whatever_is_drawn() -> None:
    made = dict[str, Any]()
    exec(IN_ORDER, made)
    for seed in range(min(20, examples(6))):
        least, most = shares(seed, NUM_PROMPTS)
        for kind in (OurEviction, made["Eviction"]):
            saved = serve(prompts(seed, NUM_PROMPTS), kind(DEVICE_BLOCKS, HOST_BLOCKS))
            assert least + NEARLY_OURS * (most - least) < saved < most, seed


# --- The cache that asks a policy -------------------------------------------------------------------


def test_seconds_are_those_of_blocks_computed_and_carried() -> None:
    policy: EvictionPolicy = OurEviction(2, 1)
    cache = FlooredCache(policy, 2, 1)
    cache.begin([0, 1])  # computed: 2
    cache.end(0)
    cache.begin([2])  # computed, and block 1 goes down
    cache.end(1)
    cache.begin([0, 1])  # found, and carried; block 2 goes down
    assert cache.seconds == 3 * COMPUTE_SECONDS + CARRY_SECONDS
    cache.begin([3, 4])  # all that is on the device is pinned
    assert cache.evicted[-1] == ("device", None)
    assert cache.seconds == 5 * COMPUTE_SECONDS + CARRY_SECONDS
    assert cache.saved == 1 - cache.seconds / (7 * COMPUTE_SECONDS)
    cache.drain()
    assert not any(cache.on.values())


class Says:
    """A policy that gives these answers."""

    def __init__(self, *answers: int | None) -> None:
        self.answers = [*answers]

    def use(self, block: int, parent: int | None) -> None: ...

    def evict(self, floor: str, pinned: object) -> int | None:
        return self.answers.pop(0)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "returned None; it should return 1 or 2: block 1 may leave"),
        (0, "returned 0; it should return 1 or 2: block 0 is the parent of block 1, which is on the device too"),
        (3, "returned 3; it should return 1 or 2: block 3 is pinned"),
        (4, "returned 4; it should return 1 or 2: block 4 is on the host"),
        (5, "returned 5; it should return 1 or 2: it is not cached"),
    ],
)
def test_a_wrong_eviction_is_an_error_that_says_what_would_be_right(answer: int | None, told: str) -> None:
    cache = FlooredCache(Says(4, answer), 8, 8)
    cache.begin([0, 1])
    cache.begin([0, 2])
    cache.begin([4])
    for number in range(3):
        cache.end(number)
    cache.evict("device")
    cache.begin([3])
    with pytest.raises(WrongEviction, match="evict.'device', .3.. " + told):
        cache.evict("device")
