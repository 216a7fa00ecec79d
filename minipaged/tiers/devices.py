"""The devices of this machine: whether the fast tier can use its GPU and, if not, why not and what to do about it.

`minipaged doctor` prints all of it, and `choose.py` chooses the tier by it.
"""

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

LEAST_TRITON = (3, 7, 1)
LEAST_CAPABILITY = (8, 0)
NO_DRIVER = "there is no driver for an NVIDIA GPU here (a container is given it by --gpus all)"
CHECKOUT = "a checkout"
"""The version that is reported when minipaged runs from its source files without being installed."""
PACKAGES = ("numpy", "torch", "triton", "numba", "transformers")


def own_version() -> str:
    """Return the installed version of minipaged, or `CHECKOUT`."""
    try:
        return metadata.version("minipaged")
    except metadata.PackageNotFoundError:
        return CHECKOUT


def usable_cores() -> int:
    """Return the number of cores that this process may use: those that it is bound to, within its container's quota."""
    from minipaged.fast import cores

    return cores.usable_cores()


def has_nvidia_gpu() -> bool:
    """Whether this machine has a driver for an NVIDIA GPU, whether or not the GPU can be used."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so"))


def gpu_problem() -> str | None:
    """Say why the fast tier cannot compute on an NVIDIA GPU here, and the way out; None if it can.

    torch must be installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the problems that this returns
        return _gpu_problem()


def _gpu_problem() -> str | None:
    import torch

    if torch.version.cuda is None:
        if not has_nvidia_gpu():
            return NO_DRIVER
        version = torch.__version__.partition("+")[0]
        return (
            "this torch was built without CUDA; to install the one with CUDA (2.5 GB): "
            f"{sys.executable} -m pip install 'torch==={version}'"
        )
    if not torch.cuda.is_available():
        return _why_torch_finds_none()
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        least = _dotted(LEAST_CAPABILITY)
        return f"the kernels need compute capability {least} (Ampere) or newer; the {name} has {_dotted(capability)}"
    return triton_problem() or compiler_problem()


def _why_torch_finds_none() -> str:
    import torch

    if not has_nvidia_gpu():
        return NO_DRIVER
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        said = " ".join(str(error).split())
        if version := re.search(r"found version (\d+)\d{3}\b", said):  # 12080: 12.8
            knows = f"{version[1]}.{int(version[0][-3:-1])}"
            return (
                f"the driver is for CUDA {knows} and older, but this torch is for CUDA {torch.version.cuda}; update "
                "the driver, or install a torch for an older CUDA (https://pytorch.org/get-started/locally)"
            )
        if number := re.search(r"Error (\d+): .*", said):
            more = "start nvidia-fabricmanager, of the driver's version" if number[1] == "802" else "see nvidia-smi"
            return f"torch cannot use the NVIDIA GPU: {number[0]}; {more}"
        return f"torch cannot use the NVIDIA GPU: {said}; see nvidia-smi"
    return "torch finds no NVIDIA GPU; see nvidia-smi"


def triton_problem() -> str | None:
    """Say why the installed Triton cannot compile the kernels for GPUs, and the way out; None if it can."""
    least = _dotted(LEAST_TRITON)
    if importlib.util.find_spec("triton") is None:
        return f"the fast tier needs triton for a GPU; pip install 'triton>={least}'"
    version = _version_of("triton")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < LEAST_TRITON:
        return (
            f"triton {version} leaves a fence out of the prefill kernel on Hopper, so that it may read memory before "
            f"it is written; pip install 'triton>={least}' 'torch>=2.12.1'"
        )
    return None


def threads_problem() -> str | None:
    """Say why the kernels for CPUs run on slower threads here, and the way out; None if they do not.

    torch and numba must be installed.
    """
    from minipaged.fast.cpu.threads import threading_layer

    if threading_layer() != "workqueue":
        return None
    return (
        "numba's own, which decoded 32 sequences a third slower than OpenMP's, and engines of one process take turns "
        "on them; for OpenMP's on Linux, install libgomp (Debian: libgomp1) and leave NUMBA_THREADING_LAYER unset"
    )


def products(dtype: str) -> str:
    """Say which product multiplies matrices on this CPU in `dtype`, and why.

    torch and numba must be installed.
    """
    import torch

    from minipaged.fast.cpu import measured
    from minipaged.fast.cpu.product import can_multiply_tiles

    of = getattr(torch, dtype)
    if not can_multiply_tiles(of):
        return f"torch's library, as this processor has no instructions for tiles in {dtype}"
    speeds = measured.kept(of)
    if speeds is None:
        return f"in tiles, unless torch's library is clearly faster: the first model in {dtype} measures it"
    chosen = "torch's library" if speeds.library_is_better else "in tiles"
    each = ", ".join(f"{ratio:.2f} ({tokens} tokens)" for tokens, ratio in speeds.ratios.items())
    limit = f"the library is taken if their product is {measured.CLEARLY:g} or more"
    return f"{chosen} in {dtype}; measured: tiles' time / the library's is {each}; {limit}"


def compiler_problem() -> str | None:
    """Say why Triton cannot compile the code that launches its kernels, and the way out; None if it can.

    Triton needs a C compiler and Python's headers for that.
    """
    chosen = os.environ.get("CC")
    if chosen is not None and shutil.which(chosen) is None:
        return f"Triton needs a C compiler, but CC names one that is not here ({chosen!r}); set CC to gcc or clang"
    if chosen is None and not any(map(shutil.which, ("gcc", "clang"))):  # the names that Triton looks for
        return "Triton needs a C compiler, and there is none; install gcc or clang, or set CC"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does, for Debian
    if not Path(sysconfig.get_path("include", scheme), "Python.h").exists():
        python = "python{}.{}-dev".format(*sys.version_info)
        return f"Triton needs Python.h, which is not here; install Python's headers (Debian: {python})"
    return None


def versions() -> dict[str, str]:
    """The versions of Python, the system, and the packages that matter; "not installed" for a missing package."""
    found = {"Python": f"{platform.python_version()} ({sys.executable})", "system": platform.platform()}
    found["minipaged"] = own_version()
    for package in PACKAGES:
        is_there = importlib.util.find_spec(package) is not None
        found[package] = _version_of(package) if is_there else "not installed"
    return found


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # installed under another name, as pytorch-triton is
        return str(importlib.import_module(package).__version__)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
