"""Hostile submissions: each is a right allocator that does something else besides. None passes; each is told why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from minipaged.course.grader import assignment
from minipaged.course.grader.assignment import CannotBeGraded, GradeStatus, Submission, TestResult, find_assignment
from minipaged.course.grader.counterexample import ALARM
from minipaged.course.grader.grading import grade
from minipaged.course.sandbox import process
from minipaged.course.sandbox.contract import Limits, Misbehaviour, Raised, Result, StudentError, Verdict
from minipaged.course.sandbox.process import WorkerPool, WorkerProcess
from minipaged.errors import BlockNotAllocated
from tests.course import harness
from tests.course.harness import submit
from tests.course.submissions import REFERENCE, hostile
from tests.effort import quick_cases, thorough

LIMITS = Limits(processes=None, call_seconds=60.0, test_seconds=600.0, memory_bytes=300 << 20)
"""Time enough, however busy the machine is."""
ASSIGNMENT = replace(find_assignment("block-allocator"), limits=LIMITS)


def result_of(source: str, folder: Path, limits: Limits = LIMITS) -> TestResult:
    """One test's verdict on a submission."""
    return harness.result_of(replace(ASSIGNMENT, limits=limits), "allocate and free", submit(source, folder))


IMPATIENT = replace(LIMITS, call_seconds=1.0)
"""For calls that do not return."""


def test_what_is_made_hostile_passes_without_it(tmp_path: Path) -> None:
    assert result_of(hostile(), tmp_path).status is GradeStatus.PASSED


FORGE = """
import json, os
for fd in range(3, 500):
    for message in (b"passed\\n", json.dumps({"token": "0", "ok": [{"ok": 0}] * 9}).encode() + b"\\n"):
        try:
            os.write(fd, message)
        except OSError:
            pass
"""


@quick_cases(3)
@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        pytest.param(hostile("while True: pass"), Verdict.TIMED_OUT, id="endless loop"),
        pytest.param(hostile("import os; os._exit(0)"), Verdict.ENDED, id="exits with status 0"),
        pytest.param(hostile("import os; os.abort()"), Verdict.ENDED, id="aborts"),
        pytest.param(hostile("import time; time.sleep(100)"), Verdict.TIMED_OUT, id="sleeps"),
        pytest.param(hostile("import os; os.closerange(3, 100)"), Verdict.ENDED, id="closes the channel"),
        pytest.param(
            hostile("if self.num_free == 1:\n    for _ in range(10**6): print('passed')"),
            Verdict.FLOODED_OUTPUT,
            id="prints by the million",
        ),
        pytest.param(
            hostile(
                at_import="import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
            ),
            Verdict.LEFT_THREADS,
            id="leaves threads running",
        ),
        pytest.param(
            hostile(at_import="BlockAllocator.__del__ = lambda self: 1 / 0"), Verdict.RAISED_IN_DEL, id="raises in del"
        ),
        pytest.param(
            hostile("import random; random.random = lambda: 0.5"), Verdict.TAMPERED, id="replaces random.random"
        ),
        pytest.param(
            hostile("import random; random.Random.choice = lambda self, items: items[0]"),
            Verdict.TAMPERED,
            id="replaces a method of random.Random",
        ),
        pytest.param(
            hostile("import random; random.Random.random = lambda self: 0.5"),
            Verdict.TAMPERED,
            id="puts a method before the one that random.Random inherits",
        ),
        pytest.param(
            hostile("import minipaged.errors as e; e.OutOfBlocks = Exception"), Verdict.TAMPERED, id="replaces an error"
        ),
        pytest.param(
            hostile("from minipaged.contracts import BlockAllocator as B; B.allocate_many = None"),
            Verdict.TAMPERED,
            id="replaces a method of the contract",
        ),
        pytest.param(
            hostile("import minipaged.course.sandbox.wire as w; w.encode = lambda value, other: 0"),
            Verdict.TAMPERED,
            id="replaces the encoder",
        ),
        pytest.param(
            hostile(at_import="import sys; sys.unraisablehook = print; BlockAllocator.__del__ = lambda self: 1 / 0"),
            Verdict.TAMPERED,
            id="hides what it raises in del",
        ),
        pytest.param(
            hostile("import sys; open(sys.modules['minipaged'].__path__[0] + '/course/grader/grading.py').read()"),
            Verdict.FORBIDDEN,
            id="reads the grader",
        ),
        pytest.param(
            hostile("try:\n    import minipaged.reference.block_table\nexcept Exception:\n    pass"),
            Verdict.FORBIDDEN,
            id="imports the reference, and hides the error",
        ),
        pytest.param(
            hostile("import os, sys; os.open(sys.modules['minipaged'].__path__[0], os.O_RDONLY)"),  # then dir_fd=
            Verdict.FORBIDDEN,
            id="opens a folder, to read what lies in it",
        ),
        pytest.param(hostile("import os; os.chdir('/')"), Verdict.FORBIDDEN, id="leaves its folder"),
        pytest.param(hostile("import ctypes; ctypes.CDLL(None).open"), Verdict.FORBIDDEN, id="calls C"),
        pytest.param(hostile("import os; os.listdir('/')"), Verdict.FORBIDDEN, id="looks around"),
        pytest.param(hostile("open('/etc/passwd').read()"), Verdict.FORBIDDEN, id="reads other files"),
        pytest.param(hostile("open('/proc/%d/environ' % __import__('os').getppid())"), Verdict.FORBIDDEN, id="spies"),
        pytest.param(hostile("open('/tmp/hello', 'w')"), Verdict.FORBIDDEN, id="writes elsewhere"),
        pytest.param(hostile("import subprocess; subprocess.run(['ls'])"), Verdict.FORBIDDEN, id="starts a program"),
        pytest.param(hostile("import os\nif os.fork() == 0: os._exit(0)"), Verdict.FORBIDDEN, id="forks"),
        pytest.param(hostile("import os; os.kill(os.getppid(), 9)"), Verdict.FORBIDDEN, id="kills the grader"),
        pytest.param(
            hostile("import socket; socket.create_connection(('127.0.0.1', 1), 1)"), Verdict.FORBIDDEN, id="connects"
        ),
        pytest.param(hostile(FORGE), Verdict.FORGED_MESSAGE, id="forges answers"),
    ],
)
def test_a_hostile_submission_gets_its_verdict_and_never_a_pass(source: str, verdict: Verdict, tmp_path: Path) -> None:
    started = time.monotonic()
    result = result_of(source, tmp_path, IMPATIENT if verdict is Verdict.TIMED_OUT else LIMITS)
    assert result.status is GradeStatus.FAILED
    assert result.failure is not None
    assert result.failure.verdict == verdict, result.message
    assert time.monotonic() - started < 90, "nobody waits for it to wake up"


@quick_cases(1)
@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        pytest.param(hostile("import os; os._exit(0)"), Verdict.ENDED, id="exits with status 0"),
        pytest.param(hostile("while True: pass"), Verdict.TIMED_OUT, id="endless loop"),
        pytest.param(hostile("import os; os.kill(os.getppid(), 9)"), Verdict.FORBIDDEN, id="kills the grader"),
        pytest.param(hostile(FORGE), Verdict.FORGED_MESSAGE, id="forges answers"),
    ],
)
def test_a_worker_that_is_a_program_gives_the_same_verdicts(
    source: str, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment, "start_process", WorkerProcess)
    result = result_of(source, tmp_path, IMPATIENT if verdict is Verdict.TIMED_OUT else LIMITS)
    assert result.failure is not None
    assert result.failure.verdict == verdict, result.message


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no worker is a copy")
def test_a_grading_ends_the_processes_that_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[WorkerPool] = []

    class Known(WorkerPool):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    monkeypatch.setattr(process, "WorkerPool", Known)
    few = replace(ASSIGNMENT, tests=ASSIGNMENT.tests[:1], measure=None)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert grade(few, submit(hostile(), tmp_path), model=None).results[0].status is GradeStatus.PASSED
    assert len(started) == 1
    assert not started[0]._origins
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@thorough
def test_a_call_that_does_not_return_has_a_short_script_that_does_not_either(tmp_path: Path) -> None:
    result = result_of(hostile("while self.num_free == 0: pass"), tmp_path, IMPATIENT)
    assert result.failure is not None
    assert result.failure.verdict == Verdict.TIMED_OUT
    assert result.failure.script is not None
    assert result.failure.script.count("allocator.allocate()\n") == 2, (
        "one takes the only block, the next waits for ever"
    )
    script = tmp_path / "counterexample.py"
    script.write_text(result.failure.script.replace("threading.Timer(10,", "threading.Timer(2,"))
    ran = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True)
    assert ran.returncode != 0
    assert "KeyboardInterrupt" in ran.stderr
    assert "in allocate\n" in ran.stderr, "it says where it hangs"


def test_a_call_that_does_not_listen_to_its_alarm_is_ended(tmp_path: Path) -> None:
    script = "\n".join(ALARM).replace("Timer(10,", "Timer(0.1,").replace("Timer(15,", "Timer(0.5,")
    deaf = "while True:\n    try:\n        threading.Event().wait(100)\n    except KeyboardInterrupt:\n        pass\n"
    (tmp_path / "deaf.py").write_text(f"{script}\n{deaf}")
    assert subprocess.run([sys.executable, tmp_path / "deaf.py"], check=False, timeout=60).returncode == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(hostile("raise SystemExit(0)"), "raised SystemExit", id="SystemExit"),
        pytest.param(hostile("raise KeyboardInterrupt"), "raised KeyboardInterrupt", id="KeyboardInterrupt"),
        pytest.param(hostile("return self.allocate()"), "RecursionError", id="recursion"),
        pytest.param(hostile("self.hoard = [bytes(1 << 20) for _ in range(1000)]"), "MemoryError", id="memory bomb"),
        pytest.param(hostile("open('big', 'wb').write(bytes(100 << 20))"), "File too large", id="fills the disk"),
        pytest.param(
            hostile("return type('Any', (int,), {'__eq__': lambda *_: True, '__hash__': int.__hash__})(0)"),
            "returned an object of type Any",
            id="equal to everything",
        ),
        pytest.param(hostile("return True"), "returned True", id="a bool"),
        pytest.param(hostile("return '0'"), "returned '0'", id="a text"),
        pytest.param(hostile("return float('nan')"), "returned nan", id="not a number"),
        pytest.param(hostile("return 10 ** 5000"), "returned an object of type int", id="a number of 5000 digits"),
    ],
)
def test_what_a_call_raises_or_returns_fails_the_test_and_is_told(source: str, message: str, tmp_path: Path) -> None:
    result = result_of(source, tmp_path)
    assert result.status is GradeStatus.FAILED
    assert message in result.message


@pytest.mark.parametrize(
    ("at_import", "message"),
    [
        ("import os; os._exit(0)", "ended"),
        ("raise SystemExit(0)", "SystemExit"),
        ("from minipaged.reference.block_allocator import BlockAllocator", "forbidden: .*holds the answer"),
        ("import time; time.sleep(100)", "timed-out"),
        ("def broken(:", r"SyntaxError: .*mine.py:\d+"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(mine.py:\d+ in <module>\)"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
    ],
)
def test_a_file_that_does_not_load_cannot_be_graded(
    at_import: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if message == "timed-out":
        monkeypatch.setattr(WorkerProcess.load, "__kwdefaults__", {"within": 1.0})
    path = tmp_path / "mine.py"
    path.write_text(hostile(at_import=at_import))
    with pytest.raises(CannotBeGraded, match=rf"mine.py does not load: .*{message}"):
        grade(ASSIGNMENT, Submission(path), model=None)


def test_a_submission_is_alone_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_GRADER", "42")
    path = tmp_path / "mine.py"
    path.write_text("import os\ndef look():\n    return dict(os.environ), os.listdir(), os.getcwd()\n")
    with WorkerProcess(Limits()) as process:
        environment, files, folder = process.load(path, "mine").module.call("look")
        assert "SECRET_OF_THE_GRADER" not in environment
        assert files == ["mine.py"]
        process.finish()
    assert not Path(folder).exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(process._process.pid, 0)


def test_objects_stay_in_the_worker_and_errors_of_the_contract_come_back_as_themselves(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(REFERENCE)
    with WorkerProcess(Limits()) as process:
        loaded = process.load(path, "mine")
        allocator = loaded.module.call("BlockAllocator", 2)
        first, second, count, missing = process.batch(
            [
                (allocator, "allocate", ()),
                (allocator, "share", (Result(0),)),
                (allocator, "ref_count", (Result(0),)),
                (allocator, "nothing", ()),
            ]
        )
        assert (first, second, count) == (0, None, 2)
        assert isinstance(missing, Raised)
        with pytest.raises(BlockNotAllocated, match="block 1 is free"):
            allocator.call("free", 1)
        with pytest.raises(StudentError, match="TypeError"):
            allocator.call("free", "text")
        process.finish()


class Host:
    """An object of the grader's that student code may use."""

    OFFERED = ("double", "fail", "size")
    size = property(lambda self: 7)

    def double(self, value: object) -> object:
        return [value, value]

    def fail(self) -> None:
        raise BlockNotAllocated("not here")

    def secret(self) -> str:
        return "never offered"


def test_student_code_can_call_objects_of_the_grader_but_only_what_is_offered(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("""
import numpy as np
from minipaged import BlockNotAllocated
class Part:
    def __init__(self, host): self.host = host
    def use(self):
        try: self.host.fail()
        except BlockNotAllocated as error: told = str(error)
        return self.host.double((1, np.arange(3))), self.host.size, told, self.host
    def pry(self): return self.host.secret()
""")
    host = Host()
    with WorkerProcess(Limits()) as process:
        part = process.load(path, "mine").module.call("Part", host)
        [[one, array], again], size, told, same = part.call("use")
        assert (one, array.tolist(), size, told) == (1, [0, 1, 2], 7, "not here")
        assert again[0] == 1
        assert same is host
        with pytest.raises(StudentError, match="AttributeError: secret"):
            part.call("pry")
        process.finish()


def test_a_worker_that_does_not_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Misbehaviour, match="its process ended"):
        WorkerProcess(LIMITS, ("no_such_module",))
    with WorkerPool() as workers, pytest.raises(Misbehaviour, match="its process could not be started"):
        workers.start(LIMITS, ("no_such_module",))
    assert not list(tmp_path.iterdir())


# --- Copies ---------------------------------------------------------------------------------------


def running(pid: int) -> bool:
    """Whether there is a process of that number, or one that nobody has waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


LOOKS = """
import os, random, sys, tempfile
def look():
    return os.listdir(), os.getcwd(), tempfile.gettempdir(), os.environ["HOME"], "numpy" in sys.modules, random.random()
def spoil():
    sys.modules["numpy"].answer = 42
def spoilt():
    return hasattr(sys.modules["numpy"], "answer")
def start():
    return os.fork() or os.execvp("sleep", ["sleep", "1000"])
"""


def test_copies_have_the_same_modules_and_share_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOOKS)
    with WorkerPool() as workers:
        with workers.start(LIMITS, ("numpy",)) as one, workers.start(LIMITS, ("numpy",)) as other:
            parts = [process.load(tmp_path / "mine.py", "mine").module for process in (one, other)]
            first, second = (part.call("look") for part in parts)
            for (files, *places, loaded, _), process in ((first, one), (second, other)):
                assert files == ["mine.py"]
                assert places == [str(process.folder)] * 3
                assert loaded
            assert first[-1] != second[-1], "each draws its own random numbers"
            parts[0].call("spoil")
            assert [part.call("spoilt") for part in parts] == [True, False]
            other.finish()
        with workers.start(LIMITS, ("numpy",)) as process:
            part = process.load(tmp_path / "mine.py", "mine").module
            assert not part.call("spoilt")


def test_a_copy_ends_with_all_that_it_has_started_and_the_rest_with_the_grading(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOOKS)
    with WorkerPool() as workers:
        with workers.start(replace(LIMITS, processes_allowed=True), ()) as process:
            pid = process._process.pid
            started = process.load(tmp_path / "mine.py", "mine").module.call("start")
            assert running(started)
        assert not running(pid)
        [origin] = workers._origins.values()
        until = time.monotonic() + 60  # killed with its group; whoever inherits it waits for it at some time
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(started).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < until
                time.sleep(0.05)
        assert running(origin._process.pid)
    assert not running(origin._process.pid)


def test_copies_that_are_asked_for_at_the_same_time_are_each_somebodys(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def say(word):\n    return word\n")

    def said(number: int) -> int:
        with workers.start(Limits(), ()) as process:
            answer: int = process.load(tmp_path / "mine.py", "mine").module.call("say", number)
            process.finish()
            return answer

    with WorkerPool() as workers, ThreadPoolExecutor(4) as pool:
        assert [*pool.map(said, range(12))] == [*range(12)]


def test_where_copies_cannot_come_from_any_more_it_is_told_and_the_next_come_from_another(tmp_path: Path) -> None:
    part = submit(REFERENCE, tmp_path).path
    with WorkerPool() as workers:
        with workers.start(LIMITS, ()) as process:
            [origin] = workers._origins.values()
            origin._process.kill()
            origin._process.wait()
            with pytest.raises(Misbehaviour, match="its process ended"):
                process.finish()
        with pytest.raises(Misbehaviour, match="its process could not be started"):
            WorkerProcess(LIMITS, (), origin=origin)
        with workers.start(LIMITS, ()) as process:
            assert process.load(part, "mine").contents
        assert [*workers._origins.values()] != [origin]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no worker is a copy")
def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between a question and its answer."""
    with WorkerPool() as workers:
        with workers.start(LIMITS, ()) as process:
            process.finish()
        [origin] = workers._origins.values()
        with monkeypatch.context() as patch:
            patch.setattr(origin, "_requests", Interrupted(origin._requests))
            with pytest.raises(KeyboardInterrupt):
                workers.start(LIMITS, ())
        assert origin.has_ended()


class Interrupted:
    """A socket whose reader is interrupted."""

    def __init__(self, requests: socket.socket) -> None:
        self.close, self.sendmsg = requests.close, requests.sendmsg

    def recv(self, size: int) -> bytes:
        raise KeyboardInterrupt


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are programs, which lead sessions too")
def test_a_copy_leads_a_session_so_that_nothing_it_starts_can_leave_its_group(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import os\ndef leave():\n    os.setpgid(0, os.getppid())\n")
    with WorkerPool() as workers, workers.start(LIMITS, ()) as process:
        part = process.load(tmp_path / "leaves.py", "leaves")
        assert os.getsid(process._process.pid) == os.getpgid(process._process.pid) == process._process.pid
        with pytest.raises(StudentError, match="PermissionError"):
            part.module.call("leave")


@thorough
def test_elsewhere_than_on_linux_each_worker_is_a_program_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with WorkerPool() as workers, workers.start(LIMITS, ()) as process:
        assert process.load(submit(REFERENCE, tmp_path).path, "mine").contents
        assert not workers._origins
        process.finish()
