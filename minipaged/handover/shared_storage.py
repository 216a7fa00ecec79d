"""A KV connector that uses files in a folder that several engines share: on one machine in /dev/shm, which is memory.

    FOLDER/handshake.json         the kind of all blocks here: written by the first engine, compared by the others
    FOLDER/<hash>.block           a block: 16 bytes of digest, then its K and V

A file is named by the chain hash of its block (`block_hashes.py`), which is the same in every process. A hash is not
proof, and a file may be cut short or come from elsewhere. So a file begins with a digest of all that it should hold:
the handshake, all tokens up to the block's end, and the block. A file with another digest counts as missing.

A file is written under another name and renamed, so that a reader finds all of it or nothing. If the blocks take too
much room, the least recently used are removed, and children before their parents, without which they cannot be found.
Files of other kinds are left alone. Everybody who can write to the
folder is trusted, so it is created for its owner alone, and one that others can write to is refused.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from minipaged.errors import InvalidRequest
from minipaged.handover.block_hashes import NO_HASH, hash_blocks, token_bytes
from minipaged.handover.kv_connector import Handshake

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
DIGEST_BYTES = 16
NS_APART = 1000
"""Nanoseconds between the times of a block and of its parent: more than a file system's times are rounded by."""


class SharedStorageConnector:
    """Keeps blocks as files in `folder`. `role` has vLLM's names: a producer only stores, a consumer only loads.

    `max_bytes`: limit on the size of all blocks together, which each engine enforces when it stores. Where the file
    system is full before, the size of the blocks that are there takes its place.
    Raises InvalidRequest for a folder that cannot be used, or that holds the blocks of another model, and for a limit
    below the size of one block.
    """

    setting = "kv_connector"
    """The name of the setting to which its messages refer."""
    limit_setting = "max_bytes"
    """The name of the setting that limits the size of all blocks."""
    best_place = "on Linux best one in /dev/shm"
    """The advice to users who give no folder."""
    lost = "blocks that cannot be handed over are computed"
    """The consequence of an error, which its messages name."""

    def __init__(self, folder: str | Path, role: Role = "kv_both", max_bytes: int = 4 << 30) -> None:
        if role not in ("kv_producer", "kv_consumer", "kv_both"):
            raise InvalidRequest(f"role is {role!r}; choose 'kv_producer', 'kv_consumer' or 'kv_both'")
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise InvalidRequest(f"max_bytes is {max_bytes!r}; it must be a whole number of bytes, 1 or more")
        if not str(folder):
            raise InvalidRequest(f"{self.setting}: the folder is ''; name one, {self.best_place}")
        self.folder = Path(folder).expanduser()
        self.role = role
        self.max_bytes = max_bytes
        self._seal = b""  # the handshake's digest, which is part of every block's
        self._block_size = 0  # in tokens
        self._block_bytes = 0
        self._num_bytes = 0  # the size of all blocks when the folder was last scanned
        self._num_since = max_bytes  # bytes stored since then
        self._told: set[bool] = set()  # whether the errors reported so far were those of the system

    def check(self, handshake: Handshake) -> None:
        mine, path = handshake.compared(), self._handshake
        if (size := DIGEST_BYTES + handshake.block_bytes) > self.max_bytes:
            raise InvalidRequest(
                f"{self.setting}: {self.limit_setting} allows {self.max_bytes:,} bytes, and one block takes {size:,}; "
                "allow more"
            )
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
                f"{self.setting}: {path} is damaged; remove it, if no engine uses the folder, or give another folder"
            ) from None
        if not believed:
            raise InvalidRequest(
                f"{self.setting}: others may write to {self.folder}, and the blocks in it are trusted; give a folder "
                f"of your own, such as {self.folder / 'kv'} (it is made for you alone)"
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
        mine = handshake.compared()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._handshake.exists():
                self._write(self._handshake, json.dumps(mine, indent=1).encode(), to_stay=True)
        except OSError as error:
            raise self._unusable(error) from None
        self.check(handshake)  # another engine may have written its handshake first
        self._seal = blake2b(json.dumps(mine).encode(), digest_size=DIGEST_BYTES).digest()
        self._block_size, self._block_bytes = handshake.block_size, handshake.block_bytes

    # --- Blocks -----------------------------------------------------------------------------------

    def lacking(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[int]:
        """Return the numbers of the missing blocks. The others count as used now, as if they were stored again."""
        if self.role == "kv_consumer" or start >= stop:
            return ()
        try:
            there = self._touch(self._paths(token_ids, start, stop))
        except OSError as error:
            self._tell(error)
            return ()
        return [logical for logical, is_there in enumerate(there, start) if not is_there]

    def store(self, token_ids: Sequence[int], blocks: Mapping[int, bytes]) -> Sequence[int]:
        """Store the blocks. If the folder cannot be written to, report this on stderr, once, and go on without it."""
        stored: dict[int, Path] = {}
        start, stop = min(blocks, default=0), max(blocks, default=-1) + 1
        files = zip(self._paths(token_ids, start, stop), self._digests(token_ids, start, stop), strict=True)
        try:
            for logical, (path, digest) in enumerate(files, start):
                if logical in blocks:
                    self._make_room(DIGEST_BYTES + len(blocks[logical]))
                    self._write_block(path, digest, blocks[logical])
                    stored[logical] = path
            self._touch(stored.values())
        except OSError as error:
            self._tell(error)
        return list(stored)

    def load(self, token_ids: Sequence[int], start: int, stop: int) -> Sequence[bytes]:
        found: dict[Path, bytes] = {}
        if self.role == "kv_producer" or start >= stop:
            return []
        files = zip(self._paths(token_ids, start, stop), self._digests(token_ids, start, stop), strict=True)
        is_whole = True
        try:
            with suppress(FileNotFoundError):
                for path, digest in files:
                    block = self._read_block(path, digest)
                    is_whole &= block is not None
                    if block is not None and is_whole:  # after a bad file, look for more, so that all are mended
                        found[path] = block
            self._touch(found)
        except OSError as error:
            self._tell(error)
        return list(found.values())

    # --- Files ------------------------------------------------------------------------------------

    @property
    def _handshake(self) -> Path:
        return self.folder / "handshake.json"

    def _unusable(self, error: OSError) -> InvalidRequest:
        return InvalidRequest(f"{self.setting}: {self.folder} cannot be used: {error}; give another folder")

    def _paths(self, token_ids: Sequence[int], start: int, stop: int) -> Iterator[Path]:
        """The files of the logical blocks start to stop - 1."""
        for logical, key, _ in hash_blocks(token_ids, self._block_size, 0, stop, NO_HASH):
            if logical >= start:
                yield self.folder / f"{key & (2**64 - 1):016x}.block"

    def _digests(self, token_ids: Sequence[int], start: int, stop: int) -> Iterator[blake2b]:
        """For each of these blocks, the digest of the handshake and all tokens up to its end. The block comes next."""
        size = self._block_size
        digest = blake2b(self._seal, digest_size=DIGEST_BYTES)
        digest.update(token_bytes(token_ids[: start * size]))
        for logical in range(start, stop):
            digest.update(token_bytes(token_ids[logical * size : (logical + 1) * size]))
            yield digest.copy()

    def _read_block(self, path: Path, digest: blake2b) -> bytes | None:
        """Return the block in this file. Removes a file with anything else in it, and returns None."""
        with path.open("rb") as file:
            data = file.read(DIGEST_BYTES + self._block_bytes + 1)  # a file from elsewhere may be of any size
        block = data[DIGEST_BYTES:]
        digest.update(block)
        if data[:DIGEST_BYTES] == digest.digest():
            return block
        self._tell(ValueError(f"{path} is cut, damaged or from elsewhere, and is removed"))
        with suppress(OSError):
            path.unlink()  # so that the right block can be stored
        return None

    def _write_block(self, path: Path, digest: blake2b, block: bytes) -> None:
        """Write a block's file. If the file system is full, make room there, and try once more."""
        digest.update(block)
        data = digest.digest() + block
        try:
            self._write(path, data)
        except OSError as error:
            if error.errno not in (ENOSPC, EDQUOT):
                raise
            self._make_room(len(data), is_full=True)
            self._write(path, data)

    def _write(self, path: Path, data: bytes, *, to_stay: bool = False) -> None:
        """Write a file in one step, so that a reader, or a process that is killed, never leaves or sees a part of it.

        `to_stay`: replace no file, and be on the disk before having a name. Blocks need neither. If the machine loses
        power, a file may have its name and not its content, and a block is sealed against that.
        """
        descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".partial")
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                if to_stay:
                    file.flush()
                    os.fsync(descriptor)
            if to_stay:
                with suppress(FileExistsError):
                    os.link(name, path)
            else:
                os.replace(name, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)

    def _touch(self, paths: Iterable[Path]) -> list[bool]:
        """Note that these blocks were used now, parents after their children. Returns whether each is there."""
        now, there = time.time_ns(), list[bool]()
        for number, path in enumerate(paths):
            used = now - number * NS_APART
            try:
                os.utime(path, ns=(used, used))
            except FileNotFoundError:
                there.append(False)
            else:
                there.append(True)
        return there

    def _make_room(self, num_bytes: int, *, is_full: bool = False) -> None:
        """If `num_bytes` more do not fit, remove the least recently used blocks (and partial files of dead writers).

        This needs a scan of the folder. So more is removed than must be: a sixteenth of `max_bytes` is free then, and
        the folder is scanned again when this engine has stored more than that. Others store too, so each may be wrong
        by a sixteenth. `is_full`: the file system has no room left, so the size of all files now is the limit.
        """
        is_due = 16 * self._num_since > self.max_bytes
        self._num_since += num_bytes
        if not (is_due or is_full) and self._num_bytes + self._num_since <= self.max_bytes:
            return
        used = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # other engines remove files too
                if entry.name.endswith((".block", ".partial")):
                    used.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        self._num_bytes, self._num_since = sum(size for _, size, _ in used), num_bytes
        limit = self._num_bytes if is_full else self.max_bytes
        if self._num_bytes + num_bytes <= limit:
            return
        for _, size, path in sorted(used):
            if self._num_bytes <= limit - max(num_bytes, limit // 16):
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._num_bytes -= size

    def _tell(self, error: OSError | ValueError) -> None:
        """Report an error on stderr, if it is the first of its kind."""
        kind = isinstance(error, OSError)
        if kind not in self._told:
            why = (
                f"{self.folder} cannot be used now: {error.strerror or error}" if isinstance(error, OSError) else error
            )
            print(f"{self.setting}: {why}; {self.lost}", file=sys.stderr)
        self._told.add(kind)
