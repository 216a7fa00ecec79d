"""What a worker is started with."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True):
    """One rank, of which model. Written as JSON, as its process's one argument."""

    folder: str
    """The checkpoint's."""
    device: str
    dtype: str
    rank: int
    """Of all ranks: first those of the first stage."""
    tensor_parallel_size: int
    """Ranks of a stage."""
    pipeline_parallel_size: int
    """Stages."""
    num_threads: int
    """Of its own."""
    rendezvous: str = ""
    """A file by which the ranks find each other: its path, or that of an open one's descriptor."""
    socket: int = -1
    """The file descriptor of its end of the connection to the driver."""
    results: int = -1
    """That of the other one, on which one of the ranks tells what has come of steps."""
