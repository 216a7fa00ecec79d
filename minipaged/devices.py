"""What this machine computes with: whether the fast tier can use its GPU and, if not, why not and what to do about it.

`minipaged doctor` prints all of it. `tiers.py` asks before a tier is chosen.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

LEAST_TRITON = (3, 7)
LEAST_CAPABILITY = (8, 0)
PACKAGES = ("numpy", "torch", "triton", "numba", "transformers")


def has_nvidia_gpu() -> bool:
    """Whether there is a driver for one, be it in use or not."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so"))


def gpu_problem() -> str | None:
    """What keeps the fast tier from computing on an NVIDIA GPU here, and the way out; None if nothing does.

    torch has to be installed.
    """
    import torch

    if torch.version.cuda is None:
        return "this torch was built without CUDA; install the one for GPUs (in a clone: make test TORCH=cuda)"
    if not torch.cuda.is_available():
        return _why_torch_finds_none()
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        least = _dotted(LEAST_CAPABILITY)
        return f"the kernels need compute capability {least} (Ampere) or newer; the {name} has {_dotted(capability)}"
    return triton_problem() or compiler_problem()


def _why_torch_finds_none() -> str:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        said = " ".join(str(error).split()).partition(". ")[0]
        if "too old" in said:
            return f"{said}; update the driver, or install a torch for an older CUDA"
        if has_nvidia_gpu():
            return f"torch cannot use the NVIDIA GPU: {said}; nvidia-smi may say more"
    return "torch finds no NVIDIA GPU"


def triton_problem() -> str | None:
    """Why the kernels for GPUs cannot be compiled with the Triton that is installed, and the way out."""
    least = _dotted(LEAST_TRITON)
    if importlib.util.find_spec("triton") is None:
        return f"the fast tier needs triton for a GPU; pip install 'triton>={least}'"
    version = metadata.version("triton")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST_TRITON:
        return (
            f"triton {version} leaves a fence out of the prefill kernel on Hopper, so that it may read what is not "
            f"written yet; pip install 'triton>={least}', and the torch that goes with it"
        )
    return None


def compiler_problem() -> str | None:
    """Why Triton cannot compile what starts its kernels, and the way out. (It needs a C compiler, Python's headers.)"""
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))):
        return "Triton needs a C compiler, and there is none; install gcc or clang, or set CC"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Triton needs Python.h, which is not here; install Python's headers (Debian: python3-dev)"
    return None


def versions() -> dict[str, str]:
    """Of Python, the system, and the packages that matter; "not installed" where one is not."""
    found = {"Python": f"{platform.python_version()} ({sys.executable})", "system": platform.platform()}
    for package in ("minipaged", *PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
