"""The disk floor: the lowest floor of the prefix cache, as files in a folder (`engine/floors.py`).

The files are those of a `SharedStorageConnector`, sealed in the same way. So one folder may serve both: engines with a
disk floor find what a prefilling engine has left, and what an engine before them has kept. Several processes may use it
at a time. A process that is killed leaves whole files, and at most one of another name, which is removed later.

Its speed is measured when it is opened, because a block is worth keeping only where storing and loading it takes less
time than computing it.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from errno import EIO
from pathlib import Path

from minipaged.handover.kv_connector import Handshake
from minipaged.handover.shared_storage import SharedStorageConnector

PROBES, PROBE_SECONDS = 8, 0.025
"""The most blocks that are stored and loaded to measure the speed, and the time after which no more are."""


class DiskFloor(SharedStorageConnector):
    """Keeps evicted blocks as files in `folder`, of `max_bytes` together."""

    setting = "kv_cache_folder"
    limit_setting = "kv_cache_disk_space"
    best_place = "on a disk of this machine"
    lost = "blocks that cannot be kept there are computed"

    def __init__(self, folder: str | Path, max_bytes: int = 4 << 30) -> None:
        super().__init__(folder, "kv_both", max_bytes)
        self.seconds_per_block = float("inf")
        """The time to store a block and to load it again; infinite before `open`."""

    def open(self, handshake: Handshake) -> None:
        super().open(handshake)
        try:
            self.seconds_per_block = self._measure()
        except OSError as error:
            raise self._unusable(error) from None

    def _measure(self) -> float:
        """Store blocks and load them again, one at a time. Returns the median of the seconds that both take together.

        The blocks are of tokens that no prompt has. Nothing is removed for them, unless the file system is full. One
        that another engine removes, for room, is not counted.
        """
        measured: list[float] = []
        began = time.perf_counter()
        for _ in range(PROBES):
            if measured and time.perf_counter() - began > PROBE_SECONDS:
                break
            tokens, block = [-1 - secrets.randbits(62)] * self._block_size, os.urandom(self._block_bytes)
            [path], [digest] = self._paths(tokens, 0, 1), self._digests(tokens, 0, 1)
            try:
                start = time.perf_counter()
                self._write_block(path, digest, block)
                seconds = time.perf_counter() - start
                leave_memory(path)
                start = time.perf_counter()
                if self.load(tokens, 0, 1):
                    measured.append(seconds + time.perf_counter() - start)
            except FileNotFoundError:
                pass  # removed before it was read
            finally:
                path.unlink(missing_ok=True)
        if not measured:
            raise OSError(EIO, "blocks cannot be read after they were written")
        return statistics.median(measured)


def leave_memory(path: Path) -> None:
    """Write a file out and drop the system's copy in memory, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
