"""What ends a worker ends them all, is told at once and by name, and leaves nothing behind.

Starting workers takes most of the time, so tests share those that go on (`shared`), and each kind of end has a start.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from minipaged import LLM, SamplingParams
from minipaged.errors import InvalidRequest, ModelError, WorkerFailed
from minipaged.llm import LoadedModel
from minipaged.parallel import workers as workers_module
from minipaged.parallel.messages import RunStep
from minipaged.parallel.workers import RankProcesses
from minipaged.steps import ChosenToken, StepInput
from tests.effort import thorough
from tests.serve.harness import PATIENCE_S, served, wait_until
from tests.tiny_model import make_tiny_model

LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
SIZES = {"num_blocks": 256, "num_swap_blocks": 8}
SOON_S = 1
"""How long a worker that has stopped for good is waited for. (`worker_timeout` is 60 s if it is not given.)"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


Lend = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Lend]:
    """A model with two workers, which run until a test has ended them: the next test gets others."""
    running: dict[tuple[int, int], LoadedModel] = {}

    def lend(tensor: int = 2, pipeline: int = 1) -> LoadedModel:
        before = running.get((tensor, pipeline))
        if before is None or workers_of(before)._heard.failure:
            made = LoadedModel.load(folder, "fast", "cpu", "float32", tensor, pipeline)
            running[tensor, pipeline] = made
        return running[tensor, pipeline]

    yield lend
    for model in running.values():
        model.close()


@pytest.fixture
def llm(shared: Lend) -> LLM:
    return LLM(shared(), **SIZES)


def workers_of(model: LLM | LoadedModel) -> RankProcesses:
    workers = (model.loaded if isinstance(model, LLM) else model).weights
    assert isinstance(workers, RankProcesses)
    return workers


def gone(pids: list[int]) -> bool:
    """Whether none of these processes is left in the end, not even as a zombie."""
    deadline = time.monotonic() + PATIENCE_S
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def run_until_it_fails(llm: LLM) -> WorkerFailed:
    try:
        while True:
            llm.engine.step()
    except WorkerFailed as error:
        return error


def begin(llm: LLM) -> None:
    """A long request, and its first steps."""
    llm.engine.add_request([1, 2, 3], LONG)
    for _ in range(5):
        llm.engine.step()


def stop(workers: RankProcesses, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker hangs for good, and from then on the driver is impatient with it. (On a busy machine an impatient
    driver might give up on those that work.) The others have time to answer."""
    os.kill(workers.pids[rank], signal.SIGSTOP)
    workers.timeout = SOON_S
    soon = workers_module._timeval(SOON_S)
    workers._heard.results.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, soon)
    for process in workers._processes:
        process.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, soon)
    monkeypatch.setattr(workers_module, "TO_ANSWER_S", 10.0)


def test_a_worker_that_dies_is_named_at_once_and_nothing_keeps_the_others(folder: Path) -> None:
    llm = LLM(folder, tier="fast", device="cpu", dtype="float32", tensor_parallel_size=2, **SIZES)
    pids, kept = workers_of(llm).pids, weakref.ref(workers_of(llm))
    begin(llm)
    os.kill(pids[1], signal.SIGKILL)
    error = run_until_it_fails(llm)  # if it took worker_timeout, it would be said to hang
    assert f"worker 1 of 2 (process {pids[1]}) was killed by SIGKILL" in str(error)
    with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):  # and so ends whatever comes after
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    for request in llm.engine.unfinished_requests:
        llm.engine.abort(request)
    assert llm.stats().blocks_used == llm.stats().blocks_cached
    del llm, error
    gc.collect()
    assert kept() is None
    assert gone(pids)


def test_what_cannot_start_is_told_at_once(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"tensor_parallel_size is 5, but the model has num_attention_heads = 4"):
        LLM(folder, tier="fast", device="cpu", tensor_parallel_size=5)


# --- Workers that go on --------------------------------------------------------------------------------


@thorough
def test_workers_serve_one_llm_after_another(shared: Lend) -> None:
    loaded = shared()
    params = SamplingParams(max_tokens=6, temperature=0)
    first = LLM(loaded, num_blocks=16)
    expected = first.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    first.engine.add_request([1, 2, 3], LONG)
    first.engine.step()
    second = LLM(first.loaded, num_blocks=8)
    assert second.generate([[1, 2, 3]], params)[0].outputs[0].token_ids == expected
    with pytest.raises(InvalidRequest, match="its workers serve that one now"):
        first.engine.step()
    with pytest.raises(InvalidRequest, match="tensor_parallel_size is 3, but the model was loaded for 2"):
        LLM(first.loaded, num_blocks=8, tensor_parallel_size=3)
    with pytest.raises(InvalidRequest, match="worker_timeout is 5, but the model was loaded for 60"):
        LLM(first.loaded, num_blocks=8, worker_timeout=5)


@thorough
def test_stages_go_on_after_all_requests_were_aborted(folder: Path, shared: Lend) -> None:
    """Nobody asks for what the steps in flight have chosen; the first stage has to know it all the same."""
    llm = LLM(shared(1, 2), num_blocks=64)
    names = [llm.engine.add_request([1, 2, 3 + i], LONG) for i in range(2)]
    for _ in range(3):
        llm.engine.step()
    for name in names:
        llm.engine.abort(name)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3], [4, 5]], params)
    alone = LLM(folder, tier="fast", device="cpu", dtype="float32", num_blocks=64).generate([[1, 2, 3], [4, 5]], params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]


# --- Ends ------------------------------------------------------------------------------------------------


@thorough
def test_a_rank_without_memory_says_so(shared: Lend) -> None:
    said = r"num_blocks is \d+: .* more than the free memory; lower num_blocks.*\. What failed: \S"
    with pytest.raises(InvalidRequest, match=said):
        LLM(shared(), num_blocks=2**40, num_swap_blocks=0)


@thorough
def test_one_rank_without_memory_is_enough(llm: LLM) -> None:
    """The others have room, and wait for it."""
    process = psutil.Process(workers_of(llm).pids[1])
    most = process.memory_info().vms + (128 << 20)
    before = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (most, before[1]))
    with pytest.raises(InvalidRequest, match=r"num_blocks is 120000: .* more than the free memory"):
        LLM(llm.loaded, num_blocks=120_000, num_swap_blocks=0)
    with suppress(psutil.NoSuchProcess):  # it may not have lived through it
        process.rlimit(psutil.RLIMIT_AS, before)


@thorough
def test_an_interrupted_message_ends_all_workers(shared: Lend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that were told would wait for those that were not, or take the next step's numbers for this one's."""
    llm = LLM(shared(1, 2), **SIZES)
    second = workers_of(llm)._processes[1]

    class Interrupted:
        def sendall(self, data: bytes) -> None:
            raise KeyboardInterrupt

    connection = second.connection
    monkeypatch.setattr(second, "connection", Interrupted())
    llm.engine.add_request([1, 2, 3], LONG)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    monkeypatch.setattr(second, "connection", connection)
    with pytest.raises(WorkerFailed, match="interrupted"):
        llm.engine.step()


@thorough
def test_one_that_hangs_is_given_up_and_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = workers_of(llm).pids
    begin(llm)
    stop(workers_of(llm), 1, monkeypatch)
    said = f"worker 1 of 2 (process {pids[1]}) hangs: it does not answer at all (worker_timeout is {SOON_S} s)"
    assert said in str(run_until_it_fails(llm))
    llm.close()
    assert gone(pids)


@thorough
def test_a_message_that_nobody_reads_does_not_hold_the_driver_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than what a socket holds, to a worker that has stopped."""
    workers = workers_of(llm)
    stop(workers, 0, monkeypatch)
    with pytest.raises(WorkerFailed, match=f"process {workers.pids[0]}.*takes no more messages"):
        workers.tell(RunStep(StepInput(1, told=tuple(ChosenToken(i, i, i) for i in range(400_000)))))


@thorough
def test_one_that_dies_while_nothing_runs_is_heard_of_and_a_server_says_so_and_ends(
    shared: Lend, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = shared()
    workers = workers_of(loaded)
    heard: list[Exception] = []
    with served(loaded) as running:
        assert running.get("/health").status_code == 200
        wait_until(lambda: workers._heard.on_failure is not None)
        tell_server = workers._heard.on_failure
        assert tell_server

        def hear(error: WorkerFailed) -> None:
            heard.append(error)
            tell_server(error)

        running.allm.llm.engine.runner.on_failure(hear)
        with running.last_words():
            os.kill(workers.pids[0], signal.SIGKILL)
            wait_until(lambda: bool(heard))
            assert "worker 0 of 2" in str(heard[0])
            assert "SIGKILL" in str(heard[0])
            wait_until(lambda: running.get("/health").status_code == 503)
        running.thread.join(PATIENCE_S)
        assert not running.thread.is_alive()
        assert running.server.status == 1
    assert "worker 0 of 2" in capsys.readouterr().err
    loaded.close()
    assert gone(workers.pids)


@thorough
def test_closing_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = {"num_blocks": 16, "tensor_parallel_size": 2, "worker_timeout": 37}
    llm = LLM(folder, tier="fast", device="cpu", dtype="float32", **settings)
    workers = workers_of(llm)
    pids, connections = workers.pids, len(psutil.Process().net_connections("unix"))
    assert workers.timeout == 37
    patience = [workers._heard.results.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)]
    patience += [each.connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16) for each in workers._processes]
    assert patience == [workers_module._timeval(37)] * 3
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].finished
    llm.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not list(tmp_path.iterdir())
    assert len(psutil.Process().net_connections("unix")) < connections
    with pytest.raises(WorkerFailed, match="closed"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))


DRIVER = """
import sys, time
from minipaged import LLM, SamplingParams
llm = LLM(sys.argv[1], tier="fast", device="cpu", dtype="float32", num_blocks=256, tensor_parallel_size=2)
print(*llm.loaded.weights.pids, flush=True)
llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=900, temperature=0, ignore_eos=True))
"""


@thorough
def test_workers_go_when_their_driver_is_killed(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(folder)]
    own_place = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own_place) as driver:
        assert driver.stdout
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert Path("/proc/self/fd").is_dir() is not any(tmp_path.iterdir())  # else there is one file, with a name
        driver.kill()
        assert gone(pids)
    assert not list(tmp_path.iterdir())


@thorough
def test_a_checkpoint_that_no_rank_can_load_is_told_as_ever(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        LLM(tmp_path / "cut", tier="fast", device="cpu", tensor_parallel_size=2)


@thorough
def test_what_fails_after_loading_leaves_no_worker(folder: Path) -> None:
    """Not even while its traceback is kept."""

    class Allocator:
        def __init__(self, num_blocks: int) -> None:
            raise RuntimeError("no pool today")

    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(RuntimeError, match="no pool today") as kept:
        LLM(folder, tier="fast", device="cpu", num_blocks=64, tensor_parallel_size=2, allocator=Allocator)  # type: ignore[arg-type]
    assert {child.pid for child in psutil.Process().children()} <= before
    assert kept.tb


@thorough
def test_a_server_whose_worker_dies_says_so_and_ends(folder: Path, tmp_path: Path) -> None:
    options = ["--tier", "fast", "--device", "cpu", "--dtype", "float32", "--num-blocks", "128", "--port", "0"]
    command = [sys.executable, "-m", "minipaged", "serve", str(folder), "--tensor-parallel-size", "2", *options]
    own_place = os.environ | {"TMPDIR": str(tmp_path)}
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=own_place) as program,
        httpx.Client(verify=False, timeout=PATIENCE_S) as client,
    ):
        assert program.stderr
        url = next(line.split("listening on ")[1].split()[0] for line in program.stderr if "listening on " in line)
        pids = [child.pid for child in psutil.Process(program.pid).children()]
        assert len(pids) == 2
        body = {"prompt": "a long one", "max_tokens": 900, "ignore_eos": True, "stream": True}
        lines: list[str] = []
        with client.stream("POST", url + "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 6:
                    os.kill(pids[1], signal.SIGKILL)
        assert "worker 1 of 2" in lines[-1] or "worker 1 of 2" in "".join(lines[-4:])
        killed = time.monotonic()
        statuses = set()
        while time.monotonic() < killed + PATIENCE_S:
            try:
                statuses.add(client.get(url + "/health").status_code)
            except httpx.TransportError:
                break
            time.sleep(0.02)
        assert 503 in statuses
        assert program.wait(PATIENCE_S) == 1
        assert "worker 1 of 2" in program.stderr.read()
    assert gone(pids)
    assert not list(tmp_path.glob("minipaged-workers-*"))
