"""The product that multiplies matrices is measured once on a processor, and chosen alike ever after."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numba
import pytest
import torch
from filelock import FileLock
from numba.core.registry import cpu_target
from torch import Tensor

from minipaged import LLM, SamplingParams
from minipaged.cli import main
from minipaged.fast.cpu import llama, measured, product
from minipaged.fast.cpu.llama import DenseMatrix, linears, uses_tiles
from minipaged.fast.cpu.measured import TOKENS, TURNS, Speeds, kept, speeds
from minipaged.fast.cpu.product import TiledMatrix, can_multiply_tiles
from minipaged.fast.kernels import Matrix
from minipaged.models.quantized.stored import StoredMatrix
from minipaged.tiers import choose_tier
from tests.effort import thorough
from tests.fast.test_cpu_packed import q4_1
from tests.tiny_model import make_tiny_model

pytestmark = pytest.mark.skipif(not can_multiply_tiles(torch.float32), reason="this processor cannot multiply tiles")

SETTINGS: dict[str, Any] = {"num_blocks": 64, "device": "cpu", "dtype": "float32"}
PROMPTS = [[3, 4, 5], [*range(10, 80)], [7]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which nothing is kept yet, in the place of the kernels' folder."""
    monkeypatch.setattr(product.multiply_tiles._cache, "_cache_path", str(tmp_path / "kernels"))
    speeds.cache_clear()
    yield tmp_path / "kernels"
    speeds.cache_clear()


class Clock:
    """Simulated times, in the place of `measured.seconds`. Only the third turn gets the whole core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ratios: float) -> None:
        """`ratios`: the speed of the library relative to tiles, for each of `TOKENS`."""
        self.ratios = dict(zip(TOKENS, ratios, strict=True))
        self.calls: Counter[tuple[bool, int]] = Counter()
        monkeypatch.setattr(measured, "seconds", self.seconds)

    def seconds(self, matrix: Matrix, x: Tensor) -> float:
        assert torch.get_num_threads() == numba.get_num_threads() == 1
        in_tiles = isinstance(matrix, TiledMatrix)
        self.calls[in_tiles, len(x)] += 1
        waited = 1 if self.calls[in_tiles, len(x)] == 3 else 10 if in_tiles else 100
        return waited * (1 if in_tiles else 1 / self.ratios[len(x)])


def never(matrix: Matrix, x: Tensor) -> float:
    raise AssertionError("it is measured again")


def made(dtype: torch.dtype = torch.float32) -> type[Matrix]:
    """The kind of matrix that a process which starts now makes."""
    speeds.cache_clear()
    weight = torch.ones(8, 6, dtype=dtype)
    return type(linears([(8, 6)], [weight], [None], weight)[0])


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.suffix != ".lock")


@pytest.mark.parametrize(
    ("ratios", "kind"),
    [
        ((3.0, 5.0), DenseMatrix),
        ((1.0, 2.1), DenseMatrix),
        ((0.8, 2.6), DenseMatrix),
        ((1.2, 1.2), TiledMatrix),  # slightly better
        ((1.0, 1.9), TiledMatrix),
        ((0.4, 3.0), TiledMatrix),  # prompts gain less than decoding loses
        ((1.0, 1.0), TiledMatrix),
        ((0.7, 0.5), TiledMatrix),
    ],
)
def test_the_library_multiplies_where_it_is_clearly_faster(
    ratios: tuple[float, float], kind: type[Matrix], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, *ratios)
    assert made() is kind
    assert {*clock.calls.values()} == {TURNS}
    assert len(clock.calls) == 2 * len(TOKENS)
    monkeypatch.setattr(measured, "seconds", never)
    assert made() is kind, "the next start reads the answer"
    assert kept(torch.float32) == Speeds(pytest.approx(clock.ratios))  # type: ignore[arg-type]
    assert len(files(folder)) == 1


def test_a_product_is_measured_in_a_moment_and_threads_compute_again(folder: Path) -> None:
    before = torch.get_num_threads(), numba.get_num_threads()
    found = speeds(torch.float32, DenseMatrix).ratios
    assert (torch.get_num_threads(), numba.get_num_threads()) == before
    assert [*found] == [*TOKENS]
    assert all(0.02 < ratio < 50 for ratio in found.values())
    assert kept(torch.float32) == Speeds(found)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the processor's time may have large steps")
def test_a_product_that_waits_for_a_core_takes_no_longer() -> None:
    class Waiting(DenseMatrix):
        def __call__(self, x: Tensor) -> Tensor:
            time.sleep(0.3)
            return x

    assert measured.seconds(Waiting(torch.ones(1, 1), None), torch.ones(1, 1)) < 0.1


def test_nothing_is_measured_where_nothing_depends_on_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "seconds", never)
    with patch.object(llama, "can_multiply_tiles", lambda dtype: False):
        assert made() is DenseMatrix
    packed: StoredMatrix = q4_1((8, 32))
    linears([(8, 32)], [packed], [None], torch.zeros(1))
    assert not folder.exists()


@pytest.mark.parametrize("change", ["dtype", "torch", "onednn", "processor", "kernels"])
def test_under_other_conditions_it_is_measured_again(
    change: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, 1, 1)
    assert made() is TiledMatrix
    clock, dtype = Clock(monkeypatch, 5, 5), torch.float32
    if change == "dtype":
        dtype = torch.bfloat16
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif change == "onednn":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    elif change == "processor":
        codegen = type(cpu_target.target_context.codegen())
        monkeypatch.setattr(codegen, "magic_tuple", lambda self: ("x86_64", "another", "+fma"))
    else:
        monkeypatch.setattr(measured, "digest_of", lambda folder: "another")
    if not can_multiply_tiles(dtype):
        pytest.skip("this processor has no instructions for tiles")
    assert made(dtype) is DenseMatrix
    assert clock.calls
    assert len(files(folder)) == 2, "what was found before is kept beside it"


BROKEN = ["", "{", "[]", "null", "{}", "\0\udcff", "ratios", "another", "few", "words", "none", "infinite", "negative"]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_file_that_cannot_be_read_or_is_foreign_is_written_again(
    broken: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, 1, 1)
    assert made() is TiledMatrix
    (file,) = files(folder)
    told = json.loads(file.read_text())
    changes: dict[str, dict[str, Any]] = {
        "ratios": {"ratios": 5.0},
        "another": {"torch": "another", "ratios": [5.0, 5.0]},
        "few": {"ratios": [5.0]},
        "words": {"ratios": ["5.0", "5.0"]},
        "none": {"ratios": [None, 5.0]},
        "infinite": {"ratios": [float("inf"), 5.0]},
        "negative": {"ratios": [-5.0, -5.0]},
    }
    content = json.dumps(told | changes[broken]) if broken in changes else broken
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert kept(torch.float32) is None
    clock = Clock(monkeypatch, 3, 3)
    assert made() is DenseMatrix
    assert clock.calls
    assert kept(torch.float32) is not None


@pytest.mark.parametrize("why", ["no folder", "a file", "full", "a folder in its place"])
def test_where_the_answer_cannot_be_kept_each_start_measures(
    why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if why == "no folder":
        monkeypatch.setattr(product.multiply_tiles._cache, "_cache_path", None)
    elif why == "a file":
        folder.write_text("")
    elif why == "full":
        monkeypatch.setattr(os, "replace", full)
    else:
        file = measured._file(torch.float32)
        assert file is not None
        file.mkdir(parents=True)
    for ratio, kind in ((5, DenseMatrix), (1, TiledMatrix)):
        clock = Clock(monkeypatch, ratio, ratio)
        assert made() is kind
        assert clock.calls
        assert kept(torch.float32) is None
    if why == "full":
        assert files(folder) == [], "no part of a file is left"


def test_where_files_cannot_be_locked_the_answer_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lock(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(measured, "FileLock", no_lock)
    Clock(monkeypatch, 5, 5)
    assert made() is DenseMatrix
    monkeypatch.setattr(measured, "seconds", never)
    assert made() is DenseMatrix


def test_of_two_processes_that_start_at_once_one_measures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(FileLock):
        """A lock that another process holds until it has measured."""

        def acquire(self, *arguments: Any, **options: Any) -> Any:
            file = measured._file(torch.float32)
            assert file is not None
            measured._keep(file, {**measured._conditions(torch.float32), "ratios": [5.0, 5.0]})
            return super().acquire(*arguments, **options)

    monkeypatch.setattr(measured, "seconds", never)
    monkeypatch.setattr(measured, "FileLock", Late)
    assert made() is DenseMatrix


# --- A model whose matrices the library multiplies ------------------------------------------------------


@pytest.fixture
def chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library is chosen, in other processes too. They use the real folder, which other tests use at the same time.
    So an environment variable that changes nothing, as oneDNN ignores unknown names, makes conditions of their own."""
    monkeypatch.undo()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", f"any, {os.getpid()}")
    speeds.cache_clear()
    file = measured._file(torch.float32)
    assert file is not None
    measured._keep(file, {**measured._conditions(torch.float32), "ratios": [5.0, 5.0]})
    yield file
    file.unlink(missing_ok=True)
    speeds.cache_clear()


MAKES = "import torch; from minipaged.fast.cpu import linears; x = torch.ones(8, 6);"
MAKES += "print(type(linears([(8, 6)], [x], [None], x)[0]).__name__)"


def test_another_process_chooses_as_this_one(chosen: Path) -> None:
    assert made() is DenseMatrix
    told = subprocess.run([sys.executable, "-c", MAKES], capture_output=True, text=True, check=True).stdout
    assert told == "DenseMatrix\n"


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_computes_what_the_reference_does(tied: bool, chosen: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", tie_word_embeddings=tied)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    told = []
    for tier in ("fast", "reference"):
        llm = LLM(model, tier=tier, **SETTINGS)
        told.append([done.outputs[0].token_ids for done in llm.generate(PROMPTS, params, use_tqdm=False)])
        if tier == "fast":
            weights = cast("Any", llm.engine.runner).weights
            assert {type(each.qkv) for each in weights.layers} == {DenseMatrix} == {type(weights.head)}
    assert told[0] == told[1]


@thorough
def test_ranks_in_processes_compute_what_one_process_does(chosen: Path, tmp_path: Path) -> None:
    model, before = make_tiny_model(tmp_path / "tiny"), chosen.stat().st_mtime_ns
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    told = []
    several: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
    for sizes in several:
        with closing(LLM(model, tier="fast", **sizes, **SETTINGS)) as llm:
            told.append([done.outputs[0].token_ids for done in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert told[0] == told[1] == told[2]
    assert chosen.stat().st_mtime_ns == before, "no rank has measured"


# --- The report -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "line"),
    [
        (None, r"in tiles, unless torch's library is clearly faster: the first model in float32 measures it"),
        ((1.0, 0.857), r"in tiles in float32; measured: .* 1\.00 \(24 tokens\), 0\.86 \(256 tokens\); .* 2 or more"),
        ((2.0, 5.0), r"torch's library in float32; measured: .* 2\.00 \(24 tokens\), 5\.00 \(256 tokens\)"),
    ],
)
def test_doctor_says_which_product_is_used_and_why(
    ratios: tuple[float, float] | None,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert choose_tier("fast", "cpu").dtype == "float32"
    if ratios:
        Clock(monkeypatch, *ratios)
        uses_tiles(torch.float32)
    monkeypatch.setattr(measured, "seconds", never)
    assert re.search(rf"^products +{line}", doctor(capsys), flags=re.MULTILINE)


def test_doctor_says_where_there_is_no_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(product, "can_multiply_tiles", lambda dtype: False)
    line = r"^products +torch's library, as this processor has no instructions for tiles in (bfloat16|float32)$"
    assert re.search(line, doctor(capsys), flags=re.MULTILINE)


def doctor(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["doctor"])
    return capsys.readouterr().out
