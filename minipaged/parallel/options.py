"""The options with which the driver starts a worker."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True):
    """The options of one rank. They are passed as JSON, the only argument of the worker's process."""

    folder: str
    """The checkpoint folder."""
    device: str
    dtype: str
    rank: int
    """The rank's number among all ranks, stage by stage."""
    tensor_parallel_size: int
    """The number of ranks per stage."""
    pipeline_parallel_size: int
    """The number of stages."""
    num_threads: int
    """The number of threads for the rank's computations."""
    rendezvous: str = ""
    """The path of a file through which the ranks find each other. It may be the path of an open file descriptor."""
    socket: int = -1
    """The file descriptor of the worker's end of its connection to the driver."""
    results: int = -1
    """The file descriptor of a second connection, on which one rank sends the results of steps."""
