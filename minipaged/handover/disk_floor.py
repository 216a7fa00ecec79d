"""The disk floor: the lowest floor of the prefix cache, as files in a folder (`engine/floors.py`).

The files are those of a `SharedStorageConnector`, sealed in the same way. So one folder may serve both: engines with a
disk floor find what a prefilling engine has left, and what an engine before them has kept. Several processes may use it
at a time. A process that is killed leaves whole files, and at most one of another name, which is removed later.

Its speed is measured when it is opened, because a block is worth keeping only where loading it takes less time than
computing it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from minipaged.handover.kv_connector import Handshake
from minipaged.handover.shared_storage import SharedStorageConnector

PROBE_BYTES = 8 << 20
"""The size of the file with which the speed is measured."""


class DiskFloor(SharedStorageConnector):
    """Keeps evicted blocks as files in `folder`, of `max_bytes` together."""

    setting = "kv_cache_folder"
    lost = "blocks that cannot be kept there are computed"

    def __init__(self, folder: str | Path, max_bytes: int = 4 << 30) -> None:
        super().__init__(folder, "kv_both", max_bytes)
        self.bytes_per_second = 0.0
        """The speed at which a file is read; 0 before `open`."""

    def open(self, handshake: Handshake) -> None:
        super().open(handshake)
        try:
            self.bytes_per_second = self._measure()
        except OSError as error:
            raise self._unusable(error) from None

    def _measure(self) -> float:
        """The speed of reading a file that is not in memory, in bytes per second."""
        descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".partial")
        try:
            os.write(descriptor, os.urandom(PROBE_BYTES))
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(descriptor, 0, os.SEEK_SET)
            start = time.perf_counter()
            num_bytes = len(os.read(descriptor, PROBE_BYTES))
            return num_bytes / (time.perf_counter() - start)
        finally:
            os.close(descriptor)
            os.unlink(name)
