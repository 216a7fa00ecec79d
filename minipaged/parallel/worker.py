"""A worker: one rank of a model, in a process of its own, that does what the driver says and decides nothing.

The driver starts it as `python -m minipaged.parallel.worker OPTIONS` with a socket. Two threads: one reads the driver's
orders and puts them into a queue; the other carries them out. So a worker can always say what it is doing, and when the
driver goes, in whatever way, its end of the socket closes, and the reading thread ends the process at once.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from minipaged.contracts import StepResult
from minipaged.mirror import Rows
from minipaged.models.loading import load_config
from minipaged.models.shards import Shard, local_config, shard_of
from minipaged.parallel.messages import (
    Answer,
    Choices,
    Doing,
    Failed,
    Loaded,
    Made,
    Make,
    Order,
    Ran,
    Run,
    Where,
    encode,
    read_order,
)
from minipaged.parallel.options import Options
from minipaged.params import EngineConfig
from minipaged.steps import StepInput
from minipaged.tiers import FastTier

LONGEST_EXCHANGE = timedelta(days=1)
"""For how long a rank waits for the others. It is the driver that gives up, and then it ends them all."""


class Worker:
    """Carries out orders."""

    def __init__(self, options: Options, connection: socket.socket) -> None:
        self.options = options
        self._connection = connection
        self._may_write = threading.Lock()
        self._orders: SimpleQueue[Make | Run] = SimpleQueue()
        self._doing = "starting"
        self._group: ProcessGroup | None = None
        self._rows = Rows()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def serve(self) -> None:
        """Load, and carry out orders until the driver goes (or something raises)."""
        try:
            self._load()
            while True:
                self._doing = "waiting for a step"
                match self._orders.get():
                    case Make(config):
                        self._make(config)
                    case Run(step):
                        self._run(step)
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            self._tell(Failed(f"{type(error).__name__}: {error}"))
            threading.Event().wait()  # the driver ends us all

    def _load(self) -> None:
        self._doing = "loading the weights"
        options = self.options
        if options.device == "cuda":
            torch.cuda.set_device(options.rank)
        backend = "nccl" if options.device == "cuda" else "gloo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # by its default gloo looks this machine's name up
        size = options.tensor_parallel_size
        store = dist.FileStore(options.rendezvous, size)
        dist.init_process_group(backend, store=store, rank=options.rank, world_size=size, timeout=LONGEST_EXCHANGE)
        self._group = ProcessGroup()
        folder = Path(options.folder)
        self.config = load_config(folder)
        self.shard = shard_of(self.config, options.rank, options.tensor_parallel_size)
        self.tier = FastTier.on(options.device, options.dtype)
        self.weights = self.tier.load_shard(folder, self.config, self.shard, self._group)
        self._tell(Loaded(torch.cuda.mem_get_info()[0] if options.device == "cuda" else None))

    def _make(self, config: EngineConfig) -> None:
        self._doing = "reserving the KV cache and preparing the kernels"
        self.runner = self.tier.make_runner(local_config(self.config, self.shard), self.weights, config)
        self._tell(Made(self.runner.costs()))

    def _run(self, step: StepInput) -> None:
        self._doing = f"running step {step.number}"
        self._rows.follow(step)
        result = self.runner.run(step)
        if self.options.rank == 0:
            self._tell(self._outcome(step, result))

    def _outcome(self, step: StepInput, result: StepResult) -> Ran:
        asks_for_logits = any(row.num_choices < 0 for row in self._rows)
        return Ran(
            step.number,
            Choices.of(list(result.choices)),
            {sequence: Choices.of(list(told)) for sequence, told in result.prompt_logprobs.items()},
            result.logits.float().cpu().numpy().tobytes() if asks_for_logits else b"",
        )

    # --- The driver -------------------------------------------------------------------------------

    def _read(self) -> None:
        while order := read_order(self._connection):
            if isinstance(order, Where):
                waits = self._group is not None and self._group.is_waiting
                self._tell(Doing(f"{self._doing}, where it waits for the other ranks" if waits else self._doing))
            else:
                self._orders.put(order)
        os._exit(0)

    def _tell(self, answer: Answer) -> None:
        try:
            with self._may_write:
                self._connection.sendall(encode(answer))
        except OSError:
            os._exit(0)  # the driver has gone


class ProcessGroup:
    """The ranks of one model, as one of them sees them (`fast.sharded.Group`)."""

    def __init__(self) -> None:
        self.is_waiting = False
        self._size = dist.get_world_size()

    def gather(self, x: Tensor) -> list[Tensor]:
        """What each rank has given, in their order."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self.is_waiting = True
        # As bytes, for not every backend knows all types; and nothing is computed on the way.
        dist.all_gather([part.view(torch.uint8) for part in parts], x.view(torch.uint8))
        self.is_waiting = False
        return parts


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(options.num_threads)
    Worker(options, socket.socket(fileno=options.socket)).serve()


if __name__ == "__main__":
    main()
