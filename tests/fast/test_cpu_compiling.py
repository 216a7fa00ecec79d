"""numba's kernels are compiled before a model asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numba
import numpy as np
import psutil
import pytest
import torch

from minipaged.fast.cpu import compiling
from minipaged.tiers import FastTier, choose_tier
from tests.effort import thorough
from tests.tiny_model import make_tiny_model

SERVE = """
import sys
from numba.core import event
from minipaged import LLM, SamplingParams

compiled = []
class Listener(event.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"])
    def on_end(self, event):
        pass

event.register("numba:compile", Listener())
llm = LLM(sys.argv[1], tier="fast", device="cpu", dtype=sys.argv[2], num_blocks=64)
params = [SamplingParams(temperature=t, max_tokens=4, ignore_eos=True) for t in (0, 1)]
llm.generate(["a prompt", "another one"], params, use_tqdm=False)
print(compiled)
"""


@pytest.mark.parametrize("dtype", sorted({"float32", choose_tier("fast", "cpu").dtype}))
def test_a_model_finds_everything_compiled(dtype: str, tmp_path: Path) -> None:
    with compiling.compiled_meanwhile(getattr(torch, dtype)):
        pass
    model = make_tiny_model(tmp_path / "tiny", head_dim=compiling.HEAD_DIM)
    check_all_is_compiled(model, dtype)


@thorough
def test_where_a_library_multiplies_prompts_everything_is_compiled_too(tmp_path: Path) -> None:
    """A processor without vectors of 512 bits: a second start compiles nothing."""
    model = make_tiny_model(tmp_path / "tiny", head_dim=compiling.HEAD_DIM)
    generic = os.environ | {"NUMBA_CPU_NAME": "generic"}
    subprocess.run([sys.executable, "-c", SERVE, model, "float32"], env=generic, capture_output=True, check=True)
    check_all_is_compiled(model, "float32", generic)


def check_all_is_compiled(model: str, dtype: str, env: Mapping[str, str] = os.environ) -> None:
    """Nothing is left to compile for a model that is started now, and nothing is said of it."""
    served = subprocess.run([sys.executable, "-c", SERVE, model, dtype], env=env, capture_output=True, text=True)
    assert (served.stdout, served.returncode) == ("[]\n", 0), served.stderr
    assert "compiling" not in served.stderr


def test_what_is_compiled_for_another_processor_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling.compiled_meanwhile(torch.float32):
        pass
    assert not compiling.missing_parts(torch.float32)
    monkeypatch.setattr(type(compiling.cpu_target.target_context.codegen()), "magic_tuple", lambda _: ("another",))
    assert [part for part, _ in compiling.missing_parts(torch.float32)] == [*compiling.PARTS]


def test_a_kernel_is_compiled_for_the_dtype_that_it_is_called_with_and_if_its_file_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Drawing from logits in float32 takes arrays of float64, too."""
    single, double = numba.typeof(np.zeros((1, 4), np.float32)), numba.typeof(np.zeros(1))
    kept = compiling.PARTS["sampling"].last._cache._cache_file
    here = compiling.cpu_target.target_context.codegen().magic_tuple()
    monkeypatch.setattr(kept, "_load_index", lambda: {((single, double), here, ()): "a.nbc"})
    monkeypatch.setattr(kept, "_cache_path", str(tmp_path))
    assert not compiling.is_compiled("sampling", torch.float32)
    (tmp_path / "a.nbc").touch()
    assert compiling.is_compiled("sampling", torch.float32)
    assert not compiling.is_compiled("sampling", torch.float64)


@pytest.mark.parametrize("part", compiling.PARTS)
def test_the_bar_knows_how_many_kernels_there_are(part: str) -> None:
    assert sum(1 for _ in compiling.PARTS[part].compile(torch.float32)) == compiling.PARTS[part].num_kernels


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is compiled; in the place of Python, a script of the test's is started."""
    monkeypatch.setattr(compiling, "is_compiled", lambda part, dtype: False)
    script = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(script))
    return script


def test_a_compiler_that_fails_stops_nobody(uncompiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uncompiled.write_text("#!/bin/sh\necho\necho $5 $7 >> $0.asked\nexit 1\n")
    uncompiled.chmod(0o755)
    with compiling.compiled_meanwhile(torch.bfloat16):
        pass
    assert sorted(Path(f"{uncompiled}.asked").read_text().split()) == sorted(compiling.PARTS)  # two each
    assert "compiling the bfloat16 kernels for this processor, once" in capsys.readouterr().err


def test_two_processes_compile_what_is_missing(uncompiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a second type, when sampling is there."""
    assert sorted(part for share in compiling.SHARES for part in share) == sorted(compiling.PARTS)
    monkeypatch.setattr(compiling, "is_compiled", lambda part, dtype: part == "sampling")
    uncompiled.write_text("#!/bin/sh\necho $5 $7 $9 >> $0.asked\n")
    uncompiled.chmod(0o755)
    with compiling.compiled_meanwhile(torch.bfloat16):
        pass
    assert sorted(Path(f"{uncompiled}.asked").read_text().splitlines()) == ["decoding", "prompts layers"]


def test_where_no_process_can_be_started_nobody_is_stopped(uncompiled: Path) -> None:
    assert not uncompiled.exists()
    before = psutil.Process().children()
    with compiling.compiled_meanwhile(torch.float32):
        assert psutil.Process().children() == before


def test_weights_are_read_while_kernels_are_compiled(uncompiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "for n in $(seq 600); do [ -e $0.read ] && touch $0.saw && break; sleep 0.1; done"
    uncompiled.write_text(f"#!/bin/sh\n{wait}\n")
    uncompiled.chmod(0o755)

    def load(*_: object) -> str:
        Path(f"{uncompiled}.read").touch()  # what they wait for
        return "weights"

    monkeypatch.setattr(FastTier, "_load", load)
    tier = choose_tier("fast", "cpu")
    assert tier.load_weights(uncompiled.parent, None) == "weights"  # type: ignore[arg-type]
    assert Path(f"{uncompiled}.saw").exists()


def test_who_interrupts_does_not_wait_for_compilers(uncompiled: Path) -> None:
    uncompiled.write_text("#!/bin/sh\nexec sleep 600\n")
    uncompiled.chmod(0o755)
    before = set(psutil.Process().children())

    def interrupted() -> None:
        with compiling.compiled_meanwhile(torch.float32):
            assert len(set(psutil.Process().children()) - before) == len(compiling.SHARES)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not set(psutil.Process().children()) - before
