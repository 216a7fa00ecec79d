"""Why a GPU is not used is said in one line with the way out; `minipaged doctor` says all there is to say."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numba
import pytest
import torch

from minipaged import tiers
from minipaged.cli import main
from minipaged.errors import InvalidRequest
from minipaged.fast import cores
from minipaged.llm import LoadedModel
from minipaged.models.config import ModelConfig
from minipaged.tiers import choose, devices
from tests.tiny_model import SIZES, make_tiny_model


class Machine:
    """A machine with a GPU that could be used, of which something is then taken away."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
        self.shared_memory(228 << 10)
        patch.setattr(devices, "has_nvidia_gpu", lambda: True)
        patch.setattr(devices, "compiler_problem", lambda: None)
        self.triton("3.7.1")

    def triton(self, version: str) -> None:
        there = metadata.version
        self.patch.setattr(metadata, "version", lambda name: version if name == "triton" else there(name))

    def shared_memory(self, size: int) -> None:
        """Bytes of a multiprocessor's."""
        found = SimpleNamespace(shared_memory_per_multiprocessor=size)
        self.patch.setattr(torch.cuda, "get_device_properties", lambda: found)

    def says_at_init(self, message: str) -> None:
        def init() -> None:
            raise RuntimeError(message)

        def is_available() -> bool:
            warnings.warn(f"CUDA initialization: {message}", stacklevel=2)
            return False

        self.patch.setattr(torch.cuda, "is_available", is_available)
        self.patch.setattr(torch.cuda, "init", init)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def cpu_wheel(machine: Machine) -> None:
    machine.patch.setattr(torch.version, "cuda", None)


def old_driver(machine: Machine) -> None:
    machine.says_at_init(
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by ..."
    )


def no_device(machine: Machine) -> None:
    machine.says_at_init("No CUDA GPUs are available")


AT_INIT = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
    "that might have already set an error?"
)


def no_fabric_manager(machine: Machine) -> None:
    machine.says_at_init(f"{AT_INIT} Error 802: system not yet initialized")


def not_of_one_driver(machine: Machine) -> None:
    machine.says_at_init(f"{AT_INIT} Error 803: system has unsupported display driver / cuda driver combination")


def no_driver(machine: Machine) -> None:
    machine.patch.setattr(devices, "has_nvidia_gpu", lambda: False)
    machine.patch.setattr(torch.cuda, "is_available", lambda: False)


def old_gpu(machine: Machine) -> None:
    machine.patch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    machine.patch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))


def no_triton(machine: Machine) -> None:
    there = importlib.util.find_spec
    machine.patch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else there(name))


PROBLEMS = {
    "a torch for CPUs": (cpu_wheel, r"built without CUDA; .* -m pip install 'torch===\d+\.\d+\.\d+'"),
    "an old driver": (
        old_driver,
        r"driver is for CUDA 11.4 and older, but this torch is for CUDA 13.0; update the driver, or",
    ),
    "a driver without a GPU": (no_device, r"cannot use the NVIDIA GPU: No CUDA GPUs are available; see nvidia-smi"),
    "no fabric manager": (no_fabric_manager, r"Error 802: system not yet initialized; start nvidia-fabricmanager"),
    "a library of another driver": (
        not_of_one_driver,
        r"GPU: Error 803: system has unsupported display .*; see nvidia-smi",
    ),
    "no driver": (no_driver, r"no driver for an NVIDIA GPU here \(a container is given it by --gpus all\)"),
    "an old GPU": (old_gpu, r"need compute capability 8.0 \(Ampere\) or newer; the Tesla T4 has 7.5"),
    "no Triton": (no_triton, r"needs triton for a GPU; pip install 'triton>=3.7.1'"),
    "an old Triton": (lambda machine: machine.triton("3.7.0"), r"triton 3.7.0 leaves a fence out .*'triton>=3.7.1'"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_keeps_a_gpu_from_being_used_is_said_with_the_way_out(
    name: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name where the GPU was asked for; in one line, and the CPU is taken, where it was not."""
    take_away, message = PROBLEMS[name]
    assert devices.gpu_problem() is None
    take_away(machine)
    with pytest.raises(InvalidRequest, match=rf"^device is 'cuda', but .*{message}.*; use device='cpu'"):
        tiers.choose_tier("fast", "cuda")
    assert capsys.readouterr().err == ""
    assert tiers.choose_tier("fast").device == "cpu"
    said = capsys.readouterr().err
    assert re.fullmatch(rf"the GPU is not used: .*{message}.*\n" if devices.has_nvidia_gpu() else "", said)
    machine.patch.setattr(devices, "has_nvidia_gpu", lambda: False)
    assert tiers.choose_tier("fast").device == "cpu"
    assert capsys.readouterr().err == "", "where there is no GPU there is nothing to say"


def rtx_4090(machine: Machine) -> None:
    machine.patch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    machine.shared_memory(100 << 10)


WIDE_HEADS = {"head_dim": 512, "num_attention_heads": 1, "num_key_value_heads": 1}
ONE_KEY_FOR_ALL = {"head_dim": 256, "num_attention_heads": 128, "num_key_value_heads": 1}

MISFITS = {
    "wide heads": (lambda machine: None, WIDE_HEADS, "heads of up to 256 numbers, and this model's have 512"),
    "many heads on a small chip": (
        rtx_4090,
        ONE_KEY_FOR_ALL,
        "128 query heads of 256 numbers .* takes [0-9,]+ bytes of shared memory, and this GPU has 101,376 for",
    ),
}


@pytest.fixture(scope="module", params=MISFITS)
def misfit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    """A model, the GPU that has no room for its kernels, and what is said of it."""
    take_away, shape, message = MISFITS[request.param]
    folder = make_tiny_model(tmp_path_factory.mktemp("misfit"), num_hidden_layers=1, hidden_size=128, **shape)
    return folder, take_away, message


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this machine")
def test_a_model_that_the_gpu_has_no_room_for_is_refused_before_its_weights_are_read(
    misfit: tuple[Path, Any, str], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, take_away, message = misfit
    take_away(machine)

    asked: list[str] = []
    machine.patch.setattr(tiers.FastTier, "load_weights", lambda tier, folder, config: asked.append(tier.device))
    with pytest.raises(InvalidRequest, match=rf"^device is 'cuda', but .*{message}.*; use device='cpu', or tier='ref"):
        LoadedModel.load(folder, device="cuda")
    assert capsys.readouterr().err == ""
    assert asked == []
    assert LoadedModel.load(folder).tier == tiers.FastTier.on("cpu", "auto")
    assert asked == ["cpu"]
    assert re.fullmatch(rf"the GPU is not used: .*{message}.*\n", capsys.readouterr().err)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this machine")
@pytest.mark.parametrize("shape", [{}, {"head_dim": 256}, {"head_dim": 64, "num_attention_heads": 71}])
def test_a_model_that_the_gpu_has_room_for_is_not_refused(
    shape: dict[str, int], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    rtx_4090(machine)
    config = ModelConfig.from_dict(SIZES | {"model_type": "llama", "num_key_value_heads": 1} | shape)
    chosen = tiers.choose_tier("fast")
    assert chosen.for_model(config, "auto", "auto") is chosen
    assert chosen.device == "cuda"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("processor", "onednn", "has_avx512_bf16", "dtype"),
    [
        ("x86_64", True, True, "bfloat16"),
        ("x86_64", True, False, "float32"),  # AVX512 alone
        ("AMD64", True, False, "float32"),
        ("x86_64", False, False, "float32"),
        ("aarch64", True, False, "bfloat16"),
        ("aarch64", False, False, "float32"),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_it_multiplies_it(
    processor: str, onednn: bool, has_avx512_bf16: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name it can be had wherever oneDNN has it."""
    monkeypatch.setattr(platform, "machine", lambda: processor)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_avx512_bf16)
    assert tiers.choose_tier("fast", "cpu").dtype == dtype
    if onednn:
        assert tiers.choose_tier("fast", "cpu", "bfloat16").dtype == "bfloat16"
    else:
        with pytest.raises(InvalidRequest, match="'bfloat16', which this cpu device does not compute in; use float32"):
            tiers.choose_tier("fast", "cpu", "bfloat16")


def test_where_a_gpu_waits_for_the_fast_tier_the_command_that_installs_it_is_given(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make demo` installs no torch. So it says how a GPU is used, in one line, and goes on with the reference."""
    command = rf"in a clone: {re.escape(sys.executable)} -m pip install -c constraints.txt -e '.\[fast\]'"
    machine.patch.setattr(choose, "missing_for_fast", lambda: ["torch", "numba"])
    assert tiers.choose_tier("auto", dtype="float32") == tiers.choose_tier("reference")
    assert re.fullmatch(rf"the GPU is not used: the fast tier is not .* \({command}\)\n", capsys.readouterr().err)
    for asked in (("reference", "auto", "auto"), ("auto", "cpu", "auto"), ("auto", "auto", "float64")):
        assert tiers.choose_tier(*asked).name == "reference"
    machine.patch.setattr(devices, "has_nvidia_gpu", lambda: False)
    tiers.choose_tier("auto")
    assert capsys.readouterr().err == "", "nothing is said where there is no GPU, or where none was asked for"


def test_no_compiler_and_no_headers_are_found_before_triton_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")  # Debian's, where no headers are
    headers = {"posix_local": str(tmp_path / "local"), "posix_prefix": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: headers[scheme])
    programs = {"clang", "mycc", "cc"}
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in programs else None)
    assert devices.compiler_problem() is None
    programs.remove("clang")  # Triton does not look for cc
    assert "install gcc or clang, or set CC" in (devices.compiler_problem() or "")
    monkeypatch.setenv("CC", "/nowhere/gcc")
    assert "CC names one that is not here ('/nowhere/gcc')" in (devices.compiler_problem() or "")
    monkeypatch.setenv("CC", "mycc")
    assert devices.compiler_problem() is None
    (tmp_path / "Python.h").unlink()
    assert re.search(r"Debian: python3\.\d+-dev", devices.compiler_problem() or "")


def test_a_package_that_is_installed_under_another_name_is_known_by_itself(machine: Machine) -> None:
    there = metadata.version

    def version(name: str) -> str:
        if name == "triton":
            raise metadata.PackageNotFoundError(name)
        return there(name)

    machine.patch.setattr(metadata, "version", version)
    assert devices.triton_problem() is None
    assert devices.versions()["triton"] == importlib.import_module("triton").__version__


def doctor() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert not ended.value.code


def test_doctor_says_what_there_is_and_what_would_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    doctor()
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"] == metadata.version("torch")
    assert {"Python", "system", "triton", "CPU", "GPU"} <= set(lines)
    assert tiers.choose_tier("auto").description in lines["chosen"]


@pytest.mark.parametrize(("usable", "said"), [(1, "1 of 64 cores may be used"), (64, "64 cores")])
def test_doctor_says_how_many_cores_a_containers_quota_allows(
    usable: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "usable_cores", lambda: usable)
    doctor()
    assert re.search(rf"^CPU .*, {said}$", capsys.readouterr().out, flags=re.MULTILINE)


@pytest.mark.parametrize("layer", ["omp", "tbb", "workqueue"])
def test_doctor_says_when_numba_has_no_threads_but_its_own(
    layer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba, "threading_layer", lambda: layer)
    doctor()
    way_out = r"^threads +numba's own, .* on Linux, install libgomp \(Debian: libgomp1\)"
    assert bool(re.search(way_out, capsys.readouterr().out, flags=re.MULTILINE)) == (layer == "workqueue")


def not_installed(name: str) -> Any:
    raise metadata.PackageNotFoundError(name)


def test_doctor_says_of_a_checkout_that_it_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone that is run where it lies is not installed, and has no version."""
    there = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: not_installed(name) if name == "minipaged" else there(name))
    doctor()
    said = capsys.readouterr().out
    assert re.search(r"^minipaged +a checkout$", said, flags=re.MULTILINE)
    assert re.search(rf"^torch +{re.escape(there('torch'))}$", said, flags=re.MULTILINE)


def test_what_writes_the_version_down_writes_that_of_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    from minipaged.paper.running import PACKAGE, digest_of, made
    from minipaged.recordings.step_files import Header

    tier = SimpleNamespace(name="reference", device="cpu", dtype="float32")
    llm = SimpleNamespace(loaded=SimpleNamespace(tier=tier, draft=None), config=None, model_config=None)
    monkeypatch.setattr(metadata, "version", not_installed)
    assert made(seed=1, quick=True).minipaged == f"a checkout ({digest_of(PACKAGE)[:12]})"
    assert Header.of("model", cast("Any", llm)).version == "a checkout"


def test_doctor_is_of_use_without_the_fast_tier(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "missing_for_fast", lambda: ["torch", "numba"])
    doctor()
    said = capsys.readouterr().out
    assert "no: the fast tier needs torch and numba, not installed here" in said
    assert re.search(r"^chosen +reference tier on cpu", said, flags=re.MULTILINE)


@pytest.mark.parametrize("name", PROBLEMS)
def test_doctor_says_once_what_keeps_a_gpu_from_being_used(
    name: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    take_away, message = PROBLEMS[name]
    take_away(machine)
    machine.patch.setattr(torch.cuda, "device_count", lambda: 0)
    with warnings.catch_warnings(action="error"):  # torch's own, of the same
        doctor()
    said = capsys.readouterr()
    assert re.search(rf"^GPU +not used: .*{message}", said.out, flags=re.MULTILINE)
    assert "fast tier on cpu" in said.out
    assert said.err == ""
