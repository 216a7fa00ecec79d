"""Both sets of kernels offer what `minipaged.fast.kernels` describes, by the same names and called in the same way."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from minipaged.fast import cpu, kernels

ROOMS = (
    kernels.AttentionKernels,
    kernels.BlockTableKernels,
    kernels.KVCacheKernels,
    kernels.LlamaKernels,
    kernels.SamplingKernels,
)


def functions(room: type) -> set[str]:
    return {name for name in vars(room) if not name.startswith("_")}


DESCRIBED = [(name, room) for room in ROOMS for name in sorted(functions(room))]


@pytest.fixture(params=["cpu", "gpu"])
def side(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "cpu":
        return cpu
    pytest.importorskip("triton")  # there is none for this machine's operating system
    from minipaged.fast import gpu

    return gpu


def parameters(function: Callable[..., object]) -> list[tuple[object, ...]]:
    """Names, kinds, defaults and types, and the type of the result."""
    signature = inspect.signature(function, eval_str=True)
    found = [(p.name, p.kind, p.default, p.annotation) for p in signature.parameters.values()]
    return [*found, (signature.return_annotation,)]


def test_the_interface_is_all_of_its_rooms() -> None:
    assert set(kernels.Kernels.__mro__) > set(ROOMS)
    assert functions(kernels.Kernels) == set()
    assert len({name for name, _ in DESCRIBED}) == len(DESCRIBED) > 15


def test_a_side_offers_what_is_described_and_nothing_else(side: ModuleType) -> None:
    assert side.__all__ == sorted(name for name, _ in DESCRIBED)


@pytest.mark.parametrize(("name", "room"), DESCRIBED)
def test_a_kernel_is_called_as_it_is_described(side: ModuleType, name: str, room: type) -> None:
    itself, *expected = parameters(getattr(room, name))
    assert itself[0] == "self"
    assert parameters(getattr(side, name)) == expected


def test_nothing_is_loaded_before_it_is_needed() -> None:
    """The whole fast tier is imported where there is no Triton; and numba not before somebody asks for kernels."""
    script = """
import sys
sys.modules["triton"] = None  # to import it raises ImportError
import minipaged.fast.beam_search, minipaged.fast.llama, minipaged.fast.preemption, minipaged.fast.sampling
assert "numba" not in sys.modules
import torch
from minipaged.fast import kernels_for
kernels_for(torch.device("cpu")).computing()
assert "numba" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
