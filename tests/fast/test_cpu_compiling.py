"""numba's kernels are compiled before a model asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import psutil
import pytest
import torch

from minipaged.fast.cpu import compiling, kernel_cache
from minipaged.fast.cpu.bfloat16 import as_array
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
    compile_all(getattr(torch, dtype))
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


def compile_all(dtype: torch.dtype) -> None:
    with compiling.compiled_meanwhile(dtype):
        pass
    while any(wait_for_one() for wait_for_one in kernel_cache.others_compile):
        pass


@pytest.mark.parametrize("part", [part for part in compiling.PARTS if part not in ("choosing", "sampling")])
def test_a_part_that_is_compiled_for_one_type_is_not_taken_for_compiled_for_another(part: str) -> None:
    compile_all(torch.float32)
    kinds = [numba.from_dtype(as_array(torch.empty(0, dtype=dtype)).dtype) for dtype in (torch.float32, torch.bfloat16)]
    for types, *_ in compiling.PARTS[part].last._cache._cache_file._load_index():
        assert len({getattr(each, "dtype", None) for each in types}.intersection(kinds)) == 1


def test_what_is_compiled_for_another_processor_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_all(torch.float32)
    assert not compiling.missing_parts(torch.float32)
    monkeypatch.setattr(type(compiling.cpu_target.target_context.codegen()), "magic_tuple", lambda _: ("another",))
    assert [part for part, _ in compiling.missing_parts(torch.float32)] == [*compiling.PARTS]


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
    uncompiled.write_text("#!/bin/sh\necho\necho $5 $7 $9 >> $0.asked\nexit 1\n")
    uncompiled.chmod(0o755)
    with compiling.compiled_meanwhile(torch.bfloat16):
        pass
    assert sorted(Path(f"{uncompiled}.asked").read_text().split()) == sorted(compiling.PARTS)  # three each
    assert "compiling the bfloat16 kernels for this processor, once" in capsys.readouterr().err


def test_half_of_what_is_missing_is_half_of_the_work(uncompiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a second type, when sampling is there: what calls kernels of another part is compiled where they are."""
    assert sorted(part for share in compiling.SHARES for part in share) == sorted(compiling.PARTS)
    assert all(sorted(share, key=[*compiling.PARTS].index) == [*share] for share in compiling.SHARES)
    monkeypatch.setattr(compiling, "is_compiled", lambda part, dtype: part in ("choosing", "sampling"))
    uncompiled.write_text("#!/bin/sh\necho $5 $7 $9 ${11} >> $0.asked\n")
    uncompiled.chmod(0o755)
    with compiling.compiled_meanwhile(torch.bfloat16):
        pass
    assert sorted(Path(f"{uncompiled}.asked").read_text().splitlines()) == ["layers decoding one_token", "prompts"]


COMPILE_WHAT_PROMPTS_NEED = """#!/bin/sh
while [ $# -gt 4 ]; do
  case $5 in
    layers) echo; echo; echo; echo; echo;;
    prompts|choosing) echo;;
    *) while [ ! -e $0.$5 ]; do sleep 0.1; done; touch $0.$5.compiled; echo; [ $5 = sampling ] && echo;;
  esac
  shift 2
done
"""


def test_only_what_a_prompt_needs_is_waited_for(uncompiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who calls another kernel meanwhile waits for it, and for no other; who ends does not wait."""
    monkeypatch.setattr(kernel_cache, "others_compile", others := [])
    monkeypatch.setattr(compiling, "others_compile", others)
    uncompiled.write_text(COMPILE_WHAT_PROMPTS_NEED)
    uncompiled.chmod(0o755)
    before = {*psutil.Process().children()}
    with compiling.compiled_meanwhile(torch.float32):
        pass
    assert len({*psutil.Process().children()} - before) == len(compiling.SHARES)
    [wait_for_one] = others
    Path(f"{uncompiled}.decoding").touch()
    assert wait_for_one()
    assert not Path(f"{uncompiled}.one_token.compiled").exists()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(wait_for_one)
        Path(f"{uncompiled}.one_token").touch()
        Path(f"{uncompiled}.sampling").touch()
        assert waiting.result()
    while wait_for_one():
        pass
    assert Path(f"{uncompiled}.one_token.compiled").exists()
    assert Path(f"{uncompiled}.sampling.compiled").exists()
    wait_for_one.__self__.end()
    assert {*psutil.Process().children()} <= before


def test_who_ends_does_not_leave_compilers_behind(uncompiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "others_compile", others := [])
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(compiling.atexit, "register", at_exit.append)
    uncompiled.write_text(COMPILE_WHAT_PROMPTS_NEED)
    uncompiled.chmod(0o755)
    before = {*psutil.Process().children()}
    with compiling.compiled_meanwhile(torch.float32):
        pass
    for end in at_exit:
        end()
    assert {*psutil.Process().children()} <= before
    while others[0]():  # what they have not compiled is not waited for
        pass


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
