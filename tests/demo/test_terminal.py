"""The demo in a real pseudo-terminal: its keys work, and it leaves the terminal as it was, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest

from tests.effort import thorough

pexpect = pytest.importorskip("pexpect")
pyte = pytest.importorskip("pyte")
termios = pytest.importorskip("termios")
tty = pytest.importorskip("tty")

from rich.console import Console  # noqa: E402

from minipaged.cli import main  # noqa: E402
from minipaged.demo.terminal import ENTER, LEAVE, Terminal  # noqa: E402
from tests.demo.test_view import small_run  # noqa: E402
from tests.serve.harness import PATIENCE_S  # noqa: E402

ROOT = Path(__file__).parents[2]
Held = TypeVar("Held")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run.jsonl"
    path.write_text("".join(f"{event.to_json()}\n" for event in small_run()))
    return path


class Session:
    """A demo that runs in a pseudo-terminal, and what its screen shows."""

    def __init__(self, *arguments: str, width: int = 80, height: int = 24, **environment: str) -> None:
        known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        known |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
        command = ["-m", "minipaged", "demo", *arguments]
        self.child = pexpect.spawn(sys.executable, command, dimensions=(height, width), env=known, timeout=PATIENCE_S)
        self.before = termios.tcgetattr(self.child.child_fd)
        self.raw = b""
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def read(self, seconds: float = 0.05) -> bool:
        """Take in what was written; False once there is nothing more to come."""
        try:
            got = self.child.read_nonblocking(1 << 16, timeout=seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += got
        self._stream.feed(got)
        return True

    def wait_until(self, holds: Callable[[], Held]) -> Held:
        """Read until something holds of the screen; returns what it says."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if found := holds():
                return found
            if not self.read():
                break
        raise AssertionError(f"it is not on the screen:\n{self.text}")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Until the screen shows it."""
        match = self.wait_until(lambda: re.search(pattern, self.text))
        assert match
        return match

    def press(self, keys: str) -> None:
        self.child.send(keys)

    def resize(self, width: int, height: int) -> None:
        self.child.setwinsize(height, width)
        self.screen.resize(height, width)

    def end(self) -> int:
        """Wait for its end; its exit status."""
        until = time.monotonic() + PATIENCE_S
        while self.read() and time.monotonic() < until:
            pass
        self.child.wait()
        return self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus

    def check_terminal_is_as_it_was(self) -> None:
        assert self.raw.count(ENTER.encode()) == self.raw.count(LEAVE.encode()) == 1
        assert self.raw.rfind(LEAVE.encode()) > self.raw.rfind(b"\x1b[24;1H")  # nothing is drawn afterwards
        assert termios.tcgetattr(self.child.child_fd) == self.before


PAUSED = r"PAUSED event (\d+)/(\d+)"


@pytest.fixture
def live(run_file: Path) -> Iterator[Session]:
    session = Session("--replay", str(run_file))
    session.wait_for("q quit")
    yield session
    session.child.close(force=True)


def test_pause_step_back_and_on_resize_and_quit(live: Session) -> None:
    live.wait_for("joins")
    live.press(" ")
    place = int(live.wait_for(PAUSED)[1])
    live.press("\x1b[C")
    live.wait_for(f"PAUSED event {place + 1}/")
    there = live.text
    for step in range(1, 4):
        live.press("\x1b[D")
        live.wait_for(f"PAUSED event {place + 1 - step}/")
    live.press("\x1bOC" * 3)  # the same arrow, as some terminals send it
    live.wait_for(f"PAUSED event {place + 1}/")
    live.wait_until(lambda: live.text == there)
    live.read(0.2)
    assert live.text == there  # and so it stays
    live.resize(110, 30)
    live.wait_for(r"q quit[^\n]*\Z")  # in the last line, which has moved
    live.press("x")  # a key that means nothing
    live.press(" ")
    live.wait_for(r"(?s)\A(?!.*PAUSED).*step \d+")
    live.press("q")
    assert live.end() == 0
    live.check_terminal_is_as_it_was()


def test_ctrl_c_ends_with_130_and_the_terminal_as_it_was(live: Session) -> None:
    live.child.sendintr()
    assert live.end() == 130
    live.check_terminal_is_as_it_was()
    assert b"Traceback" not in live.raw


def test_being_terminated_leaves_the_terminal_as_it_was(live: Session) -> None:
    live.child.kill(15)
    assert live.end() == 143
    live.check_terminal_is_as_it_was()


@thorough
def test_next_scene_of_a_real_run_and_the_measures_afterwards(tiny_model: Path) -> None:
    scenes = "one-request,parallel-sampling"
    session = Session("--model", str(tiny_model), "--tier", "reference", "--scene", scenes, "--speed", "20")
    session.wait_for(r"1/2 One request")
    session.press("s")
    session.wait_for(r"2/2 Parallel sampling")
    session.wait_for("measured")
    session.wait_for("Sharing saved")
    assert session.end() == 0
    session.check_terminal_is_as_it_was()
    after = session.raw.split(LEAVE.encode())[1].decode()
    assert "Parallel sampling, with copy-on-write (parallel-sampling)" in after
    assert "=> Sharing saved" in after
    assert "One request" not in after  # it was not played to its end


def test_stepping_on_at_the_end_of_what_has_happened_runs_the_engine(tiny_model: Path) -> None:
    session = Session("--model", str(tiny_model), "--tier", "reference", "--scene", "one-request")
    session.wait_for(r"1/1 One request")
    session.press(" ")
    total = int(session.wait_for(PAUSED)[2])
    session.press("\x1b[C" * 12)
    match = session.wait_for(r"PAUSED event (1[2-9])/")
    assert int(session.wait_for(PAUSED)[2]) > total
    assert int(match[1]) >= 12
    session.press("q")
    assert session.end() == 0


@thorough
def test_a_trace_is_shown_live_and_told_afterwards(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i / 10},{100 + 7 * i},{50 + i}\n" for i in range(60))
    trace.write_text("time,context_tokens,generated_tokens\n" + rows)
    session = Session("--scene", "trace", "--trace", str(trace), "--num-blocks", "100")
    session.wait_for("A trace on a simulated machine")
    session.press(" ")
    session.wait_for(PAUSED)
    session.press(" ")
    assert session.end() == 0
    session.check_terminal_is_as_it_was()
    assert b"Served 60 requests" in session.raw.split(LEAVE.encode())[1]


@thorough
@pytest.mark.parametrize(("environment", "options"), [({"NO_COLOR": "1"}, []), ({}, ["--no-color"])])
def test_no_colours_where_none_are_wanted(run_file: Path, environment: dict[str, str], options: list[str]) -> None:
    session = Session("--replay", str(run_file), "--speed", "50", *options, **environment)
    session.wait_for("measured")
    session.press("q")
    assert session.end() == 0
    codes = {code for given in re.findall(rb"\x1b\[([0-9;]+)m", session.raw) for code in given.split(b";")}
    assert codes <= {b"0", b"1", b"2", b"3", b"4", b"7"}
    assert b"7" in codes


def test_a_dumb_terminal_gets_lines(run_file: Path) -> None:
    session = Session("--replay", str(run_file), TERM="dumb")
    assert session.end() == 0
    assert b"\x1b" not in session.raw
    assert b"preempted by swap" in session.raw


def test_in_a_pipe_force_color_makes_headings_stand_out(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["demo", "--model", str(tiny_model), "--tier", "reference", "--scene", "one-request"])
    assert end.value.code in (0, None)
    printed = capsys.readouterr().out
    assert "\x1b[1m=== 1/1 One request" in printed
    assert LEAVE not in printed


def test_an_error_leaves_the_terminal_as_it_was_and_is_told_afterwards(tiny_model: Path) -> None:
    session = Session("--model", str(tiny_model), "--tier", "reference", "--scene", "beam-search", "--num-blocks", "2")
    assert session.end() == 1
    session.check_terminal_is_as_it_was()
    assert b"the whole pool has 2" in session.raw.split(LEAVE.encode())[1]


# --- Without a process ----------------------------------------------------------------------------


def test_a_terminal_is_put_back_when_something_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    with open(theirs, encoding="utf-8") as stdin, open(theirs, "w", encoding="utf-8", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(theirs)
        terminal = Terminal(Console(file=stdout, force_terminal=True), stdout)

        def show() -> None:
            with terminal:
                assert termios.tcgetattr(theirs) != before
                os.write(ours, b"\x1b[C q\x1b[15~x")
                assert [terminal.key(1.0) for _ in range(4)] == ["right", "space", "q", "other"]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            show()
        assert termios.tcgetattr(theirs) == before
    written = everything_from(ours)
    assert written.startswith(ENTER)
    assert written.endswith(LEAVE)
    os.close(ours)


def everything_from(ours: int) -> str:
    """What a terminal was sent whose other end is closed. It may come in pieces."""
    pieces = []
    with contextlib.suppress(OSError):  # EIO: there is no more
        while piece := os.read(ours, 10_000):
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_keys_of_several_bytes_may_come_in_pieces_and_unknown_ones_take_no_other_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    with open(theirs, encoding="utf-8") as stdin, open(theirs, "w", encoding="utf-8", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        terminal = Terminal(Console(file=stdout, force_terminal=True), stdout)

        def check(typed: bytes, keys: list[str]) -> None:
            os.write(ours, typed)
            assert [terminal.key(PATIENCE_S) for _ in keys] == keys
            assert terminal.key(0.05) is None

        check(b"\x1b[C" * 30, ["right"] * 30)
        check(b"\x1b[15~qs", ["other", "q", "s"])
        check(b"\x1b[1;5Cq", ["other", "q"])
        check(b"\x1b", ["other"])  # Escape alone
        monkeypatch.setattr("minipaged.demo.terminal.BEGUN_SECONDS", PATIENCE_S)
        os.write(ours, b"\x1b[")
        later = threading.Timer(0.02, os.write, (ours, b"D"))
        later.start()
        assert terminal.key(PATIENCE_S) == "left"
    os.close(ours)


def test_only_lines_that_changed_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    output = SimpleNamespace(write=written.append, flush=lambda: None, fileno=lambda: 99)
    terminal = Terminal(Console(force_terminal=True), output)  # type: ignore[arg-type]

    def frame(*lines: str) -> SimpleNamespace:
        return SimpleNamespace(ansi=lambda colors: [*lines])

    terminal.show(frame("one", "two"))  # type: ignore[arg-type]
    assert "one" in written[-1]
    terminal.show(frame("one", "three"))  # type: ignore[arg-type]
    assert "one" not in written[-1]
    assert "\x1b[2;1Hthree" in written[-1]


def test_the_module_is_imported_without_termios() -> None:
    code = "import sys; sys.modules['termios'] = sys.modules['tty'] = None; import minipaged.demo, minipaged.cli"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0


def test_json_is_not_disturbed_by_a_terminal(tiny_model: Path) -> None:
    arguments = ("--model", str(tiny_model), "--tier", "reference", "--scene", "one-request", "--steps", "3", "--json")
    session = Session(*arguments)
    assert session.end() == 0
    (scene,) = json.loads(session.raw)["scenes"]
    assert scene["runs"][0]["events"][0]["event"] == "engine_started"
