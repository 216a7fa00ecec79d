"""Messages on a socket come whole and in order, however they are cut, and whatever interrupts their reader."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import pytest

from minipaged.parallel.messages import Choices, Making, Ran, Result, encode, results

LARGE = Ran(7, Choices([1, 2], [-0.5, -1.5], {}, {}), logits=bytes(range(256)) * 4096)
MESSAGES: list[Result] = [Making(1), LARGE, Ran(8, Choices([], [], {}, {})), Making(2)]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("size", [1, 3, 5, 1 << 30])
def test_however_they_are_cut(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    ours, theirs = ends
    few = [MESSAGES[0], *MESSAGES[2:]] if size < 10 else MESSAGES
    data = b"".join(map(encode, few))

    def send() -> None:
        for place in range(0, len(data), size):
            theirs.sendall(data[place : place + size])
            time.sleep(0.001)
        theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    incoming = results(ours)
    assert [incoming.read() for _ in few] == few
    assert incoming.read() is None
    assert incoming.read() is None
    sender.join()


def test_what_takes_too_long_can_be_asked_for_again(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 20_000))
    data, incoming = encode(MESSAGES[2]), results(ours)
    for part in (data[:2], data[2:9]):
        theirs.sendall(part)
        with pytest.raises(BlockingIOError):
            incoming.read()
    theirs.sendall(data[9:])
    assert incoming.read() == MESSAGES[2]


def test_ctrl_c_loses_nothing_of_a_message(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Signals come at any moment of reading a long one, which comes in many parts."""
    ours, theirs = ends

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    def send() -> None:
        for _ in range(20):
            theirs.sendall(encode(LARGE))
        theirs.close()

    sender, incoming, interrupted = threading.Thread(target=send), results(ours), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    read: list[Result] = []
    sender.start()
    try:
        while len(read) < 20:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 * 2 ** (interrupted % 10))  # some reads come to their end
                told = incoming.read()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
                continue
            if told is None:
                break
            read.append(told)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        ours.close()
        sender.join()
    assert interrupted
    assert all(told == LARGE for told in read)  # one that was whole may be lost, of another no part
    assert read
