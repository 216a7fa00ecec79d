"""A KV connector that uses files in a folder that several engines share: on one machine in /dev/shm, which is memory.

    FOLDER/handshake.json         the kind of all blocks here: written by the first engine, compared by the others
    FOLDER/<hash>.block           a block: 16 bytes of digest, then its K and V

A file is named by the chain hash of its block (`block_hashes.py`), which is the same in every process. A hash is not
proof, and a file may be cut short or come from elsewhere. So a file begins with a digest of all that it should hold:
the handshake, all tokens up to the block's end, and the block. A file with another digest counts as missing.

A file is written under another name and renamed, so that a reader finds all of it or nothing. If the blocks take too
much room, the least recently used are removed; files of other kinds are left alone. Everybody who can write to the
folder is trusted, so it is created for its owner alone, and one that others can write to is refused.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from minipaged.errors import InvalidRequest
from minipaged.handover.block_hashes import block_hashes
from minipaged.handover.kv_connector import Handshake

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
DIGEST_BYTES = 16


class SharedStorageConnector:
    """Keeps blocks as files in `folder`. `role` has vLLM's names: a producer only stores, a consumer only loads.

    `max_bytes`: limit on the size of all blocks together, which each engine enforces when it stores.
    Raises InvalidRequest for a folder that cannot be used, or that holds the blocks of another model.
    """

    setting = "kv_connector"
    """The name of the setting to which its messages refer."""
    lost = "blocks that cannot be handed over are computed"
    """The consequence of an error, which its messages name."""

    def __init__(self, folder: str | Path, role: Role = "kv_both", max_bytes: int = 4 << 30) -> None:
        if role not in ("kv_producer", "kv_consumer", "kv_both"):
            raise InvalidRequest(f"role is {role!r}; choose 'kv_producer', 'kv_consumer' or 'kv_both'")
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise InvalidRequest(f"max_bytes is {max_bytes!r}; it must be a whole number of bytes, 1 or more")
        if not str(folder):
            raise InvalidRequest(f"{self.setting}: the folder is ''; name one, on Linux best one in /dev/shm")
        self.folder = Path(folder).expanduser()
        self.role = role
        self.max_bytes = max_bytes
        self._seal = b""  # the handshake's digest, which is part of every block's
        self._block_size = 0
        self._num_bytes = 0  # the size of all blocks when the folder was last scanned
        self._num_since = max_bytes  # bytes stored since then
        self._told: set[bool] = set()  # whether the errors reported so far were those of the system

    def check(self, handshake: Handshake) -> None:
        mine, path = asdict(handshake), self._handshake
        try:
            place = next((one for one in (self.folder, *self.folder.parents) if one.exists()), self.folder)
            there = self.folder.stat() if place == self.folder else None  # None: `open` creates it
            believed = (
                there is None
                or not hasattr(os, "getuid")
                or (there.st_uid == os.getuid() and not there.st_mode & 0o022)
            )
            if believed:
                tempfile.TemporaryFile(dir=place).close()  # raises OSError if it cannot be written to
                theirs = json.loads(path.read_text()) if path.exists() else mine
                if not isinstance(theirs, dict):
                    raise ValueError("not a handshake")
        except OSError as error:
            raise self._unusable(error) from None
        except ValueError:
            raise InvalidRequest(
                f"{self.setting}: {path} is damaged; remove {self.folder}, if no engine uses it, or give another folder"
            ) from None
        if not believed:
            raise InvalidRequest(
                f"{self.setting}: others may write to {self.folder}, and the blocks in it are trusted; make it yours "
                "alone (chmod 700), or give another folder"
            )
        if theirs != mine:
            differ = [
                f"{name} is {theirs.get(name)!r} there and {value!r} here"
                for name, value in mine.items()
                if theirs.get(name) != value
            ]
            raise InvalidRequest(
                f"{self.setting}: {self.folder} has blocks of another kind: "
                f"{'; '.join(differ) or 'see handshake.json'}; give the engines the same settings, or give each kind "
                "its own folder"
            )

    def open(self, handshake: Handshake) -> None:
        self.check(handshake)
        mine = asdict(handshake)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._handshake, json.dumps(mine, indent=1).encode(), only_if_new=True)
        except OSError as error:
            raise self._unusable(error) from None
        self.check(handshake)  # another engine may have written its handshake first
        self._seal = blake2b(json.dumps(mine).encode(), digest_size=DIGEST_BYTES).digest()
        self._block_size = handshake.block_size

    # --- Blocks -----------------------------------------------------------------------------------

    def lacking(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[int]:
        if self.role == "kv_consumer" or start >= stop:
            return ()
        paths = self._paths(token_ids, stop)
        try:
            return [logical for logical in range(start, stop) if not paths[logical].exists()]
        except OSError as error:
            self._tell(error)
            return ()

    def store(self, token_ids: Sequence[int], blocks: Mapping[int, bytes]) -> Sequence[int]:
        """Store the blocks. If the folder is full or gone, report this on stderr, once, and go on without it."""
        stored: list[int] = []
        paths = self._paths(token_ids, max(blocks, default=-1) + 1)
        try:
            for logical, block in blocks.items():
                if DIGEST_BYTES + len(block) > self.max_bytes:
                    break
                self._make_room(DIGEST_BYTES + len(block))
                self._write(paths[logical], self._digest(token_ids, logical, block) + block)
                stored.append(logical)
        except OSError as error:
            self._tell(error)
        return stored

    def load(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[bytes]:
        found: list[bytes] = []
        if self.role == "kv_producer" or start >= stop:
            return found
        for logical, path in enumerate(self._paths(token_ids, stop)[start:], start):
            try:
                data = path.read_bytes()
                os.utime(path)  # the time of its latest use
            except FileNotFoundError:
                break
            except OSError as error:
                self._tell(error)
                break
            digest, block = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
            if digest != self._digest(token_ids, logical, block):
                self._tell(ValueError(f"{path} is cut, damaged or from elsewhere, and is removed"))
                with suppress(OSError):
                    path.unlink()  # so that the right block can be stored
                break
            found.append(block)
        return found

    # --- Files ------------------------------------------------------------------------------------

    @property
    def _handshake(self) -> Path:
        return self.folder / "handshake.json"

    def _unusable(self, error: OSError) -> InvalidRequest:
        return InvalidRequest(f"{self.setting}: {self.folder} cannot be used: {error}; give another folder")

    def _paths(self, token_ids: Sequence[int], stop: int) -> list[Path]:
        hashes = block_hashes(token_ids[: stop * self._block_size], self._block_size)
        return [self.folder / f"{key & (2**64 - 1):016x}.block" for key in hashes]

    def _digest(self, token_ids: Sequence[int], logical: int, block: bytes) -> bytes:
        digest = blake2b(self._seal, digest_size=DIGEST_BYTES)
        digest.update(array("q", token_ids[: (logical + 1) * self._block_size]).tobytes())
        digest.update(block)
        return digest.digest()

    def _write(self, path: Path, data: bytes, *, only_if_new: bool = False) -> None:
        """Write a file in one step, so that a reader or a crash never sees a part of it."""
        descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".partial")
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)  # before its name: a machine that loses power leaves all of it or nothing
            if only_if_new:
                with suppress(FileExistsError):
                    os.link(name, path)
            else:
                os.replace(name, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used blocks (and partial files of writers that died) until `num_bytes` more fit.

        The folder is scanned only after every sixteenth of `max_bytes` that this engine stores. Others store too, so
        each may be wrong by a sixteenth.
        """
        self._num_since += num_bytes
        if 16 * self._num_since <= self.max_bytes and self._num_bytes + self._num_since <= self.max_bytes:
            return
        used = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # other engines remove files too
                if entry.name.endswith((".block", ".partial")):
                    used.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        self._num_bytes, self._num_since = sum(size for _, size, _ in used), num_bytes
        for _, size, path in sorted(used):
            if self._num_bytes + num_bytes <= self.max_bytes:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._num_bytes -= size

    def _tell(self, error: OSError | ValueError) -> None:
        """Report an error on stderr, if it is the first of its kind."""
        kind = isinstance(error, OSError)
        if kind not in self._told:
            print(f"{self.setting}: {error}; {self.lost}", file=sys.stderr)
        self._told.add(kind)
