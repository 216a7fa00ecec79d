"""A worker's process: it carries out the driver's orders one by one, and can report its activity at any time.

The driver starts it as `python -m minipaged.parallel.worker OPTIONS`, with one end of a socket. One thread reads the
driver's orders and passes them to the other thread, which carries them out. When the driver ends, for any reason, the
socket closes, and the reading thread ends the process immediately. That thread starts before any large import.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import msgspec

from minipaged.errors import ModelError
from minipaged.parallel.messages import (
    Answer,
    Doing,
    Make,
    Making,
    NoRoom,
    RankFailed,
    RankLoaded,
    RankRefused,
    Result,
    RunStep,
    Where,
    encode,
    orders,
)
from minipaged.parallel.options import Options


class RankWorker:
    """The worker of one rank, with its connection to the driver."""

    def __init__(self, connection: socket.socket, results: socket.socket, rendezvous: Path) -> None:
        """Make a worker that has loaded nothing yet. `results`: a second connection, for the results of steps.
        `rendezvous`: the file through which the ranks find each other."""
        self._rendezvous = rendezvous
        self.doing = "starting"
        """The current activity in a few words, for the driver."""
        self.waits = False
        """Whether the rank is waiting for another one."""
        self._connection, self._results = connection, results
        self._may_write = threading.Lock()
        self._orders: SimpleQueue[Make | RunStep] = SimpleQueue()

    def read_orders(self) -> None:
        """Read orders until the driver closes the connection, then end the process."""
        try:
            told = orders(self._connection)
            while order := told.read():
                if isinstance(order, Where):
                    self._tell(Doing(self.doing, self.waits))
                else:
                    self._orders.put(order)
        finally:
            with suppress(OSError):  # a driver that was killed leaves the file behind if it has a name
                self._rendezvous.unlink()
            os._exit(0)

    def serve(self, options: Options) -> None:
        """Load a rank's part of the model, then carry out orders forever."""
        try:
            from minipaged.parallel.rank import Rank

            try:
                rank = Rank(options, self)
            except ModelError as error:
                self._tell(RankRefused(str(error)))
                threading.Event().wait()  # until the driver ends all workers
            self._tell(RankLoaded(rank.free_device_bytes()))
            while True:
                self.doing, self.waits = "waiting for a step", True
                order = self._orders.get()
                self.waits = False
                match order:
                    case Make(config, number):
                        if rank.tells:
                            self._tell_result(Making(number))
                        self.doing = "reserving the KV cache and preparing the kernels"
                        try:
                            self._tell(rank.make(config, number))
                        except MemoryError as error:
                            self._tell(NoRoom(str(error)))
                    case RunStep():
                        self.doing = f"running step {order.step.number}"
                        if ran := rank.run(order):
                            self._tell_result(ran)
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            self._tell(RankFailed(f"{type(error).__name__}: {error}"))
            threading.Event().wait()  # until the driver ends all workers

    def _tell(self, answer: Answer) -> None:
        try:
            with self._may_write:
                self._connection.sendall(encode(answer))
        except OSError:
            os._exit(0)  # the driver has ended

    def _tell_result(self, result: Result) -> None:
        try:
            self._results.sendall(encode(result))
        except OSError:
            os._exit(0)  # the driver has ended


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # meant for the driver, but all processes may get them
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection, results = socket.socket(fileno=options.socket), socket.socket(fileno=options.results)
    worker = RankWorker(connection, results, Path(options.rendezvous))
    threading.Thread(target=worker.read_orders, name="orders", daemon=True).start()
    worker.serve(options)


if __name__ == "__main__":
    main()
