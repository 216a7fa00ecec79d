"""Packages of the npm registry, fetched once into build/npm and checked: what the site ships, and what tests it."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

from filelock import FileLock

FOLDER = Path(__file__).parent.parent / "build" / "npm"


class NotFetched(Exception):
    """There is no npm here, or it could not fetch the package."""


def fetch(package: str, sha512: str) -> Path:
    """The archive of `name@version`, whose bytes have this digest (base64, as the registry states it).

    Raises NotFetched; and ValueError for an archive that is another.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    archive = FOLDER / f"{package.replace('@', '-')}.tgz"
    with FileLock(FOLDER / "lock"):
        if not archive.is_file():
            npm = shutil.which("npm")
            if npm is None:
                raise NotFetched("there is no npm here; on Debian: apt-get install npm")
            # One more try, soon: without a network npm would keep whoever builds waiting for a minute.
            command = [npm, "pack", package, "--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
            try:
                subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, text=True, timeout=120)
            except subprocess.SubprocessError as error:
                said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
                first = "\n".join(said.splitlines()[:4])  # what went wrong; npm's own stack follows
                raise NotFetched(f"npm could not fetch {package}: {first}") from None
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != sha512:
        raise ValueError(f"{archive} is not what it was when it was chosen; delete it, and it is fetched again")
    return archive


def read(archive: Path, name: str) -> bytes:
    """A file of the package."""
    with tarfile.open(archive) as files:
        member = files.extractfile(f"package/{name}")
        assert member is not None
        return member.read()
