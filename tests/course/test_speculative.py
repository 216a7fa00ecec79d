"""Assignment 12: failures are drawn and told, right classes answer as the reference does, and the engine uses the part.
(Starter and seeded bugs are in `test_every_assignment.py` and `test_student_tests.py`.)"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minipaged.course.assignments.speculative.checks import ASSIGNMENT, DRAWS, LARGEST_CHI_SQUARE, P, Q
from minipaged.course.assignments.speculative.mutants import SEEDED, STANDING_FIRST, TOKEN_BY_TOKEN
from minipaged.course.assignments.speculative.session import RollBackSession, SpeculativeSession, Verification
from minipaged.course.assignments.speculative.worker import outcomes
from minipaged.course.grader.assignment import GradeStatus
from minipaged.course.grader.handouts import folder_of
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.reference.sampling import Distribution
from minipaged.reference.speculation import is_accepted, residual
from tests.course import harness
from tests.course.harness import folded, run_script, submit

result_of = partial(harness.result_of, ASSIGNMENT)
ALL, REFUSED, SLOTS, ENGINE = (
    *("all tokens stand", "the first that is refused"),
    *("slots of refused tokens", "the engine, on a small model"),
)


def test_a_wrong_token_is_drawn_and_told_as_events_that_can_be_folded(tmp_path: Path) -> None:
    failure = result_of(REFUSED, submit(SEEDED.mutants["the last is enough"].source, tmp_path)).failure
    assert failure is not None
    assert failure.message == (
        "speculative.verify(p, q, [1, 1], [0.0, 0.0], [0.0625, 0.0625, 0.0625]) returned [1, 1, 1]; it should return "
        "[0]: token 1 is refused, since u[0] = 0.0 is not below p / q = 0 / 1, and nothing after it counts"
    )
    assert failure.drawing == (
        "row  drafted  p  q  u                 v       right  yours",
        "0    1        0  1  0  refused        0.0625  0      1",
        "1    1        1  1  0  not looked at  -       -      1",
        "2    -        -  -  -  not looked at  -       -      1",
    )
    memory = folded(failure)
    assert memory.counts["tokens drafted"] == 2
    assert [sequence.num_computed for sequence in memory.sequences.values()] == [3]


def test_slots_that_are_left_are_drawn_and_told(tmp_path: Path) -> None:
    failure = result_of(SLOTS, submit(SEEDED.mutants["whole blocks stay"].source, tmp_path)).failure
    assert failure is not None
    assert failure.invariant == "exact-references"
    assert failure.message == (
        "after speculative.roll_back(a, 3, 1) the table has 8 slots; it should have 7: the last 2 of 9 belong to "
        "refused tokens, and blocks [7, 8] go back"
    )
    assert failure.drawing == ("table  slots  blocks", "a      8      0 1 2 3 4 5 6 7", "blocks of 1")
    assert [sequence.table for sequence in folded(failure).sequences.values()] == [[*range(9)]]


def test_forks_and_published_blocks_are_events_that_can_be_folded(tmp_path: Path) -> None:
    """In a class that forgets the slots of a draft of four tokens, all of which are refused."""
    wrong = TOKEN_BY_TOKEN.replace("        table.trim(num_tokens)\n", "        table.trim(num_tokens + (FOUR))\n")
    wrong = wrong.replace("(FOUR)", "(num_drafted > 3 and not num_accepted)")
    failure = result_of(SLOTS, submit(wrong, tmp_path)).failure
    assert failure is not None
    memory = folded(failure)
    assert len(memory.sequences) >= 2
    assert memory.cached
    assert memory.counts["tokens accepted"] >= 1


@pytest.mark.parametrize(
    ("right", "wrong", "test", "told"),
    [
        ("return [weight / total for weight in excess]", "return total", "the residual", "a list with a probability"),
        ("return [weight / total for weight in excess]", "return [None]", "the residual", "a list with a probability"),
        ("        return tokens\n\n", "        return None\n\n", ALL, "returned None; it should return [1]: a list"),
        ("        return tokens\n\n", "        return tokens[0]\n\n", ALL, "should return [1]: a list of tokens"),
        (
            "        return tokens\n\n",
            "        return tokens + [0.5]\n\n",
            ALL,
            "it should return [1]: a list of tokens",
        ),
        ("        return tokens\n\n", "        return self\n\n", ALL, "returned an object of type Speculative"),
        ("return num_tokens // self.block_size", "return None", "blocks to publish", "returned None; it should return"),
        ("return num_tokens // self.block_size", "return False", "blocks to publish", "returned False; it should retu"),
    ],
)
def test_an_answer_of_another_kind_is_told(right: str, wrong: str, test: str, told: str, tmp_path: Path) -> None:
    assert TOKEN_BY_TOKEN.count(right) == 1
    failure = result_of(test, submit(TOKEN_BY_TOKEN.replace(right, wrong), tmp_path)).failure
    assert failure is not None
    assert told in failure.message
    assert failure.script is not None
    assert run_script(failure.script, tmp_path).returncode == 1


def test_arrays_and_numbers_of_numpy_are_answers_too(tmp_path: Path) -> None:
    source = f"import numpy as np\n{TOKEN_BY_TOKEN}".replace(
        "return [weight / total for weight in excess]", "return np.array(excess) / total"
    )
    source = source.replace("weights.index(max(weights))", "int(np.argmax(weights))")
    source = source.replace("        return tokens\n\n", "        return np.array(tokens)\n\n")
    for test in ("the residual", ALL, "the distribution"):
        result = result_of(test, submit(source, tmp_path))
        assert result.status is GradeStatus.PASSED, result.message


@pytest.mark.parametrize("source", SEEDED.right.values(), ids=SEEDED.right)
def test_right_classes_answer_as_the_reference_does(source: str) -> None:
    made = dict[str, Any]()
    exec(source, made)
    speculative = made["Speculative"](4)
    r = random.Random(0)
    accepted = Counter[bool]()
    for _ in range(500):
        vocab, k = r.randint(2, 9), r.randint(0, 4)
        p, q = (np.random.default_rng(r.randrange(2**32)).dirichlet([0.5] * vocab, k + 1) for _ in range(2))
        drafted = [r.choices(range(vocab), row)[0] for row in q[:k]]
        u, v = [r.random() for _ in drafted], [r.random() for _ in p]
        right = list[int]()
        for i, token in enumerate(drafted):
            accepted[is_accepted(p[i], q[i], token, u[i])] += 1
            if not is_accepted(p[i], q[i], token, u[i]):
                right.append(residual(p[i], q[i]).at(v[i]))
                break
            right.append(token)
        else:
            right.append(Distribution(np.arange(vocab), np.cumsum(p[k])).at(v[k]))
        assert list(speculative.verify(p.tolist(), q[:k].tolist(), drafted, u, v)) == right
        assert Verification(p.tolist(), q[:k].tolist(), drafted, u, v).tokens == right
        weights = np.diff(residual(p[0], q[0]).cumulative, prepend=0)
        assert speculative.residual(p[0].tolist(), q[0].tolist()) == pytest.approx(weights / weights.sum())
    assert min(accepted[True], accepted[False]) > 100


@pytest.mark.parametrize("source", SEEDED.right.values(), ids=SEEDED.right)
def test_the_examples_of_the_handout_are_right(source: str) -> None:
    made = dict[str, Any]()
    exec(source, made)
    speculative = made["Speculative"](4)
    handout = (folder_of("speculative") / "handout.md").read_text()
    verify, roll_back = (
        re.findall(rf"(speculative\.{name}.*\)) +returns (.*)", handout) for name in ("verify", "roll")
    )
    p = [[0.5, 0.25, 0.25], [0, 0.25, 0.75], [1, 0, 0]]
    q = [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]
    assert all(" ".join(f"{share:<5g}" for share in row).rstrip() in handout for row in [*p, *q])
    assert speculative.residual(p[1], q[1]) == [0, 0, 1]
    table = BlockTable(4, BlockAllocator(8))
    table.append(10)
    for [(call, answer)] in (verify, roll_back):
        found = eval(call, {"speculative": speculative, "p": p, "q": q, "table": table})
        assert (found if isinstance(found, int) else list(found)) == eval(answer)
    assert len(table.blocks) == 2


def test_many_draws_of_a_right_class_stay_far_from_the_bounds() -> None:
    made = dict[str, Any]()
    exec(STANDING_FIRST, made)
    for seed in range(5):
        counts = outcomes(made["Speculative"](4), P, Q, DRAWS, seed)
        stand = sum(n for tokens, n in counts.items() if len(tokens) == 2) / DRAWS
        assert stand == pytest.approx(0.5, abs=0.01)
        for place, row in enumerate(P):
            at = Counter(tokens[place] for tokens in Counter(counts).elements() if len(tokens) > place)
            expected = [at.total() * share for share in row]
            chi_square = sum((at[t] - n) ** 2 / n for t, n in enumerate(expected))
            assert chi_square < LARGEST_CHI_SQUARE / 2
    assert 5 * math.sqrt(0.25 / DRAWS) == pytest.approx(0.01, abs=0.001), "five standard deviations are 1 %"


def test_a_class_that_raises_while_many_tokens_are_drawn_is_told(tmp_path: Path) -> None:
    source = TOKEN_BY_TOKEN.replace(
        "        k, tokens = len(drafted), []\n", "        k, tokens = len(drafted), 1 / 0\n"
    )
    failure = result_of("the distribution", submit(source, tmp_path)).failure
    assert failure is not None
    assert failure.crashed
    assert failure.message.startswith("verify raised ZeroDivisionError: division by zero (mine.py:")


def test_the_engine_verifies_and_rolls_back_with_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, verify, roll_back = Counter[str](), SpeculativeSession.verify, RollBackSession.roll_back

    def verified(session: SpeculativeSession, case: Verification, **more: Any) -> list[int]:
        counts.update(drafted=len(case.drafted), accepted=case.num_accepted)
        counts["whole"] += case.num_accepted == len(case.drafted)
        return verify(session, case, **more)

    def rolled_back(session: RollBackSession, table: BlockTable, *given: Any) -> None:
        before = len(table.blocks)
        roll_back(session, table, *given)
        counts["blocks given back"] += before - len(table.blocks)

    monkeypatch.setattr(SpeculativeSession, "verify", verified)
    monkeypatch.setattr(RollBackSession, "roll_back", rolled_back)
    result = result_of(ENGINE, submit(TOKEN_BY_TOKEN, tmp_path))
    assert result.status is GradeStatus.PASSED, result.message
    assert 0 < counts["accepted"] < counts["drafted"]
    assert counts["whole"]
    assert counts["blocks given back"]


@pytest.mark.parametrize(
    ("bug", "told"),
    [
        ("no bonus", "; it should return ["),
        ("upside down", " is refused, since u["),
        ("a slot too many", " belong to refused tokens"),
        ("before it is verified", " has no K/V of a token that stands"),
    ],
)
def test_a_wrong_part_fails_in_the_engine(bug: str, told: str, tmp_path: Path) -> None:
    failure = result_of(ENGINE, submit(SEEDED.mutants[bug].source, tmp_path)).failure
    assert failure is not None
    assert failure.message.startswith("in the engine, workload ")
    assert told in failure.message
    assert failure.script is not None
    assert run_script(failure.script, tmp_path).returncode == 1
    assert folded(failure).counts["tokens drafted"]


def test_the_engine_itself_finds_tokens_and_slots_that_no_session_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on with the student's answers."""
    part = submit(TOKEN_BY_TOKEN, tmp_path)
    verify, roll_back = SpeculativeSession.verify, RollBackSession.roll_back
    monkeypatch.setattr(SpeculativeSession, "verify", lambda *given, **more: [*verify(*given, **more)[:-1], 0])
    assert result_of(ENGINE, part).status is GradeStatus.FAILED
    monkeypatch.setattr(SpeculativeSession, "verify", verify)
    monkeypatch.setattr(RollBackSession, "roll_back", lambda session, table, *given: table.trim(table.num_tokens - 1))
    assert result_of(ENGINE, part).status is GradeStatus.FAILED
    monkeypatch.setattr(RollBackSession, "roll_back", roll_back)
    assert result_of(ENGINE, part).status is GradeStatus.PASSED
