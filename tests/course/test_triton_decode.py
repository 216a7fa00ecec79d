"""Assignment 6: the starter is told where to begin, right kernels get full marks, every seeded bug is caught.

To import torch and Triton takes a worker three seconds. So the properties of all kernels are graded in one worker, and
the counterexamples of all wrong ones are run by one process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.effort import quick_cases, thorough

pytest.importorskip("triton")  # there is none for this machine's operating system

from minipaged.course.assignments.triton_decode import checks as triton_decode
from minipaged.course.assignments.triton_decode.checks import ASSIGNMENT
from minipaged.course.assignments.triton_decode.mutants import PLAIN, SEEDED
from minipaged.course.grader.assignment import Bench, CannotBeGraded, Submission
from minipaged.course.grader.autograder import requirements
from minipaged.course.grader.grading import grade
from minipaged.course.grader.student_tests import grade_tests
from minipaged.course.sandbox.contract import Misbehaviour
from minipaged.errors import Invariant
from tests.course.harness import ROOT, failure_of, folded, submit

MUTANTS = SEEDED.mutants
STARTER = ROOT / "assignments" / "6_triton_decode" / "starter.py"
TESTS = {test.name: test for test in ASSIGNMENT.tests}
PROPERTIES = [test for test in ASSIGNMENT.tests if test.stage == "properties"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wrong kernels lie, and the scripts in which they fail."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def bench(folder: Path) -> Iterator[Bench]:
    """A worker for all of them; whose kernel it is, `failure_of` says."""
    with Bench(ASSIGNMENT, submit(PLAIN, folder), 0) as one:
        yield one


@quick_cases(1)
@pytest.mark.parametrize("source", SEEDED.right.values(), ids=SEEDED.right)
def test_a_right_kernel_passes_every_property(
    source: str, bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_decode, "EXAMPLES", 10)  # enough for this, and faster
    path = folder / f"right_{len(source)}.py"
    path.write_text(source)
    for test in PROPERTIES:
        assert failure_of(test, path, bench) is None
    bench.process.finish()


def test_a_failure_says_where_and_its_events_can_be_folded(bench: Bench, folder: Path) -> None:
    path = folder / "fades.py"
    path.write_text(MUTANTS["the output does not fade"].source)
    failures = [failure_of(TESTS["several blocks, through the table"], path, bench) for _ in range(2)]
    assert failures[0] == failures[1], "the same seed gives the same counterexample"
    [failure, _] = failures
    assert failure is not None
    assert failure.message.startswith("sequence 0 (context "), failure.message
    assert failure.drawing[0].split() == ["sequence", "context", "in", "the", "last", "block", "block", "table"]
    folded(failure)


def test_what_only_a_long_context_shows_is_told_of_the_shortest_that_does(bench: Bench, folder: Path) -> None:
    path = folder / "long.py"
    path.write_text(PLAIN.replace("range(0, length, TILE)", "range(0, tl.minimum(length, 100), TILE)"))
    failure = failure_of(TESTS["several blocks, through the table"], path, bench)
    assert failure is not None
    assert failure.message.startswith("sequence 0 (context 128), query head 0: ")
    assert failure.drawing[-1] == "block_size 16, 1 query heads, 1 key/value heads, head_dim 1, float32"


def test_what_is_written_elsewhere_is_named(bench: Bench, folder: Path) -> None:
    for name, where in (("writes to the cache", "the cache"), ("stores the dimensions that do not exist", "memory")):
        path = folder / "writes.py"
        path.write_text(MUTANTS[name].source)
        failure = failure_of(TESTS[MUTANTS[name].test], path, bench)
        assert failure is not None
        assert failure.message.startswith(f"paged_decode wrote to {where}"), failure.message
        assert failure.invariant is Invariant.EXCLUSIVE_WRITE


def test_an_error_inside_the_kernel_is_told_with_its_line(bench: Bench, folder: Path) -> None:
    path = folder / "raises.py"
    path.write_text(PLAIN.replace("o = o * fade", "o = o * tl.zeros([3], tl.float32)"))
    failure = failure_of(PROPERTIES[0], path, bench)
    assert failure is not None
    [line] = [n for n, text in enumerate(path.read_text().splitlines(), 1) if "zeros([3]" in text]
    assert failure.message == (
        "paged_decode raised KernelError: ValueError: Shape element 0 must be a power of 2 "
        f"(raises.py:{line} in decode_kernel)"
    )


@thorough
def test_what_reaches_far_outside_is_told_as_that(bench: Bench, folder: Path) -> None:
    path = folder / "far.py"
    path.write_text(PLAIN.replace("block.to(tl.int64)", "2**40 * block.to(tl.int64)"))
    failure = failure_of(PROPERTIES[0], path, bench)
    assert failure is not None
    assert failure.verdict == "ended"
    assert "far outside its tensors" in failure.message


def test_torch_alone_is_no_kernel(bench: Bench, folder: Path) -> None:
    """Nor beside a kernel that is imported."""
    past_torch = WITHOUT_TRITON.replace("out[0, 0] = weights @ values[block, 0]", PAST_TORCH)
    for source, message in (
        (WITHOUT_TRITON, "wrote to `out` with torch"),
        (past_torch, "no Triton kernel of its own"),
    ):
        path = folder / "without.py"
        path.write_text(source)
        failure = failure_of(PROPERTIES[0], path, bench)
        assert failure is not None
        assert message in failure.message


WITHOUT_TRITON = """
from triton.language import sum


def paged_decode(query, keys, values, block_tables, context_lens, scale, out):
    block = block_tables[0, 0]
    weights = (keys[block, 0] @ query[0, 0] * scale).softmax(0)
    out[0, 0] = weights @ values[block, 0]
"""
PAST_TORCH = "out.numpy()[0, 0] = (weights @ values[block, 0]).numpy()"


def test_a_worker_in_disorder_passes_nothing(bench: Bench, folder: Path) -> None:
    """An array without numbers has none that is wrong; and what replaces torch's functions is found out."""
    path = folder / "forges.py"
    path.write_text(FORGES)
    failure = failure_of(PROPERTIES[0], path, bench)
    assert failure is not None
    assert failure.message == "it gave (0, 1, 1) instead of an array of shape (1, 1, 4)"
    with pytest.raises(Misbehaviour, match=r"it replaced torch\.Tensor\.numpy"):
        bench.process.finish()
    bench.restart()


FORGES = """
import numpy
import torch


class Forged:
    def __getitem__(self, at):
        return self

    def __setitem__(self, at, value):
        pass

    def reshape(self, shape):
        return self

    def copy(self):
        return numpy.zeros((0, 1, 1))

    def tobytes(self):
        return b""


def paged_decode(query, keys, values, block_tables, context_lens, scale, out):
    torch.Tensor.numpy = lambda self: Forged()
"""


@thorough
def test_a_kernel_is_timed_once_it_is_right_when_compiled(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way, with the interpreter in the place of a GPU."""
    monkeypatch.setattr(triton_decode, "has_gpu", lambda: True)
    monkeypatch.setattr(triton_decode, "GPU_LIMITS", replace(triton_decode.GPU_LIMITS, gpu=False))
    monkeypatch.setattr(triton_decode, "CHECKED", triton_decode.CHECKED[:1])
    monkeypatch.setattr(triton_decode, "ROUNDS", 1)
    small = {"seqs": 1, "context": 20, "heads": 1, "kv_heads": 1, "head_dim": 16, "block_size": 16}
    monkeypatch.setattr(triton_decode, "TIMED", small)
    bench.submission = submit(PLAIN, folder)
    assert triton_decode.measure(bench).index > 0
    bench.submission = submit(MUTANTS["no scale"].source, folder)
    with pytest.raises(RuntimeError, match="compiled for the GPU, it is wrong: sequence 0"):
        triton_decode.measure(bench)


def test_without_triton_it_cannot_be_graded_and_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    with pytest.raises(CannotBeGraded, match=r"triton-decode needs triton, not installed here; install .*course,fast"):
        grade(ASSIGNMENT, Submission(STARTER), model=None)
    with pytest.raises(CannotBeGraded, match=r"triton-decode needs triton, not installed here"):
        grade_tests("triton-decode", Submission(STARTER.with_name("first_test.py")))


def test_the_autograder_installs_what_it_needs() -> None:
    assert not any(one.startswith("triton") for one in requirements())
    assert any(one.startswith("triton") for one in requirements(("course", "fast")))
