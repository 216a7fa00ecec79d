"""Assignment 7: the starter is told where to begin, right quantizers get full marks, every seeded bug is caught."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from minipaged.course.assignments.quantize import checks as quantize
from minipaged.course.assignments.quantize.cases import (
    Yardstick,
    column_right,
    grid_right,
    packed_right,
    upper_root_of_inverse,
    wrong_rounding,
)
from minipaged.course.assignments.quantize.checks import ASSIGNMENT
from minipaged.course.assignments.quantize.mutants import LLAMA, PLAIN, SEEDED
from minipaged.course.grader.assignment import Bench
from minipaged.models.quantized.recipe import Recipe
from minipaged.models.quantized.stored import pack, unpack
from minipaged.reference.quantize.gptq import gptq
from minipaged.reference.quantize.rtn import rtn
from tests.course.harness import ROOT, failure_of, result_of, submit
from tests.effort import quick_cases

MUTANTS = SEEDED.mutants
STARTER = ROOT / "assignments" / "7_quantize" / "starter.py"
TESTS = {test.name: test for test in ASSIGNMENT.tests}
PROPERTIES = [test for test in ASSIGNMENT.tests if test.stage == "properties"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wrong quantizers lie, and the scripts in which they fail."""
    return tmp_path_factory.mktemp("quantizers")


@pytest.fixture(scope="module")
def bench(folder: Path) -> Iterator[Bench]:
    """A worker for all of them; whose quantizer it is, `failure_of` says."""
    with Bench(ASSIGNMENT, submit(PLAIN, folder), 0) as one:
        yield one


# --- What is right ----------------------------------------------------------------------------------


def test_the_yardstick_packs_and_rounds_as_the_project_does() -> None:
    """Of float64 weights there are no ties, and both have to choose the same codes."""
    rng = np.random.default_rng(0)
    for bits in (2, 3, 4, 8):
        codes = rng.integers(0, 2**bits, (3, 13)).astype(np.uint8)
        np.testing.assert_array_equal(packed_right(codes, bits), pack(codes, bits))
        for symmetric in (False, True):
            weights = rng.standard_normal((5, 24)).astype(np.float32)
            weights[3:] *= 1e-6  # whose scales lose much in float16
            ours = rtn(weights, Recipe("rtn", bits, 8, symmetric))
            answer = Yardstick(bits, symmetric).round_to_nearest(weights.reshape(5, 3, 8))
            assert wrong_rounding(weights.reshape(5, 3, 8), bits, symmetric, answer) == ""
            found, scales, zeros = answer
            np.testing.assert_array_equal(found.reshape(5, 24), unpack(ours.codes, bits, 24))
            np.testing.assert_array_equal(scales, ours.scales)
            np.testing.assert_array_equal(zeros, np.broadcast_to(ours.zeros, zeros.shape))


def test_the_yardstick_is_gptq_and_its_formula_the_least_squares() -> None:
    rng = np.random.default_rng(1)
    weights, x = rng.standard_normal((6, 16)).astype(np.float32), quantize.related_inputs(rng, 64, 16)
    hessian = x.T @ x / len(x)
    made = quantize.quantized(quantize.Here(4, symmetric=False), weights, hessian, 8)
    ours = gptq(weights, hessian, Recipe("gptq", 4, 8, act_order="none"))
    np.testing.assert_array_equal(made.rows(), ours.rows())
    scales, zeros = grid_right(weights, 4, symmetric=False)
    U = upper_root_of_inverse(hessian)
    codes, rest = Yardstick(4, symmetric=False).round_column(weights, U, scales, zeros)
    right = column_right(weights, hessian, codes, scales, zeros)
    np.testing.assert_allclose(rest, right, rtol=1e-9, atol=1e-9)
    d0 = (np.float64(codes) - zeros) * np.float64(scales) - weights[:, 0]
    d = np.hstack([d0[:, None], right - weights[:, 1:]])
    least = np.vdot(d @ hessian, d)
    for _ in range(20):  # no other change of the other columns is better
        other = d + np.hstack([np.zeros((6, 1)), 0.01 * rng.standard_normal((6, 15))])
        assert np.vdot(other @ hessian, other) > least


def test_what_is_let_pass_is_half_a_step_away_at_most() -> None:
    """But for what rounding the step to float16 adds, which is more the more codes there are."""
    rng = np.random.default_rng(2)
    for bits in (2, 3, 4, 8):
        for symmetric in (False, True):
            groups = rng.standard_normal((4, 5, 32)).astype(np.float32)
            answer = Yardstick(bits, symmetric).round_to_nearest(groups)
            assert wrong_rounding(groups, bits, symmetric, answer) == ""
            codes, scales, zeros = (np.float64(each) for each in answer)
            steps = abs(groups - (codes - zeros[..., None]) * scales[..., None]) / scales[..., None]
            assert steps.max() <= 0.5 + 2.0 ** (bits - 11)


# --- Grading ----------------------------------------------------------------------------------------


@quick_cases(1)
@pytest.mark.parametrize("source", SEEDED.right.values(), ids=SEEDED.right)
def test_a_right_quantizer_passes_every_property_and_makes_a_small_llama(
    source: str, bench: Bench, folder: Path
) -> None:
    path = folder / f"right_{len(source)}.py"
    path.write_text(source)
    for test in (*PROPERTIES, TESTS[LLAMA]):
        assert failure_of(test, path, bench) is None
    bench.process.finish()


def test_a_failure_says_where_and_the_same_seed_says_the_same(bench: Bench, folder: Path) -> None:
    path = folder / "sign.py"
    path.write_text(MUTANTS["errors with the wrong sign"].source)
    failures = [failure_of(TESTS["one column of GPTQ"], path, bench) for _ in range(2)]
    assert failures[0] == failures[1]
    [failure, _] = failures
    assert failure is not None
    assert failure.message.startswith("row 0: rounding the first column lost "), failure.message
    assert failure.drawing[0].split("  ")[0] == "row"


def test_what_is_no_array_is_told_as_that(bench: Bench, folder: Path) -> None:
    path = folder / "forms.py"
    path.write_text(PLAIN.replace('axis=1, bitorder="little")\n\n', 'axis=1, bitorder="little").tolist()\n\n', 1))
    failure = failure_of(TESTS["pack"], path, bench)
    assert failure is not None
    assert failure.message == "pack returned: an object of type list, not an array"
    path.write_text(PLAIN.replace("return codes, weights[:, 1:] -", "return weights[:, 1:] -"))
    failure = failure_of(TESTS["one column of GPTQ"], path, bench)
    assert failure is not None
    assert failure.message == "round_column should return two arrays: the codes, and the other columns"


def test_the_answer_lies_nowhere_in_the_worker(tmp_path: Path) -> None:
    """Neither the project's packing nor its makers can be imported, nor the yardstick."""
    for module, name in (
        ("models.quantized.stored", "pack"),
        ("reference.quantize.rtn", "rtn"),
        ("course.assignments.quantize.cases", "packed_right"),
    ):
        source = PLAIN.replace(
            "        each = codes", f"        from minipaged.{module} import {name}\n        each = codes"
        )
        result = result_of(ASSIGNMENT, "pack", submit(source, tmp_path))
        assert result.failure is not None, module
        assert result.failure.verdict == "forbidden"
