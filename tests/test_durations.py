"""What a run says of itself is true: what tests cost, what is too dear, how far it is, and what was left running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numba
import psutil
import pytest
from numba.core import event

from tests import durations
from tests.compile_numba import Compiling
from tests.durations import Cost, Measuring, compare, over_budget
from tests.progress import how_far, screen

ROOT = Path(__file__).parent.parent

CONFTEST = """
import time
from pathlib import Path

import pytest

from tests import durations, progress
from tests.durations import Measuring
from tests.left_running import LeftRunning
from tests.progress import Progress

durations.WRITTEN = Path(__file__).parent / "durations.json"
durations.budget = lambda: {"test": 0.6, "margin": 1.5, "yardstick": 1.0}
durations.yardstick = lambda: 1.0


def pytest_configure(config):
    for plugin in (Measuring(), LeftRunning(patience_s=0.2), Progress(config)):
        config.pluginmanager.register(plugin)


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture(scope="session")
def shared():
    compute(0.4)
"""

TESTS = """
import subprocess
import sys

from conftest import compute


def test_asks_for_what_is_shared(shared):
    compute(0.2)


def test_computes_in_a_process():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.7: pass"])


def test_leaves_a_grandchild_behind():
    child = "import subprocess; print(subprocess.Popen(['sleep', '100'], stdout=-3, stderr=-3).pid)"
    print("pid", subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)


def test_is_the_last():
    pass
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Cost]]:
    """What a small run of pytest with our plugins printed, and wrote."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-rP", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    for pid in re.findall(r"^pid (\d+)", done.stdout, re.MULTILINE):
        if psutil.pid_exists(int(pid)):
            os.kill(int(pid), signal.SIGKILL)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, durations.read(str(folder / "durations.json"))


def test_a_process_that_ends_is_counted_once_however_short_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that a file's tests share end in the last test's teardown, and have cost earlier tests their seconds."""
    computes = "import time\nwhile time.process_time() < 0.7: pass\nprint(flush=True); input()"
    meter = durations.Meter()
    end = meter.measure()
    with subprocess.Popen([sys.executable, "-c", computes], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        assert end()[1] > 0.65
        monkeypatch.setattr(durations, "LOOK_S", 60)
        end = meter.measure()
        child.communicate(b"\n")
        assert end()[1] < 0.35


def test_a_test_costs_what_it_and_its_processes_compute_and_a_shared_fixture_costs_by_itself(
    run: tuple[str, list[Cost]],
) -> None:
    _, costs = run
    seconds = {test.partition("::")[2]: processor for test, (processor, _) in durations.by_test(costs).items()}
    assert 0.15 < seconds["test_asks_for_what_is_shared"] < 0.4
    assert seconds["test_computes_in_a_process"] > 0.65
    assert seconds["test_is_the_last"] < 0.35  # looking for what is left running
    fixtures = {name.rpartition(" ")[2]: processor for name, (processor, _) in durations.by_fixture(costs).items()}
    assert 0.35 < fixtures["shared"] < 0.6
    assert all(cost.memory > 5 for cost in costs if cost.fixture is None)


def test_what_numba_compiles_costs_no_test() -> None:
    measuring = Measuring()
    with event.install_listener("numba:compile", Compiling(measuring)):
        end = measuring._meter.measure()
        numba.njit(lambda x: inner(x) + 1)(1)
        _, own = end()
    lists = {cost.fixture: cost for cost in measuring._costs}
    assert len(lists) == 2
    assert all(str(name).startswith("numba: ") and name.endswith(">") for name in lists)
    assert all(durations.room(cost.owner) == "tests" for cost in lists.values())
    assert own < sum(cost.processor for cost in lists.values())


inner = numba.njit(lambda x: x)


def test_a_test_that_leaves_a_process_behind_is_named_in_an_error(run: tuple[str, list[Cost]]) -> None:
    said, _ = run
    assert re.search(r"left running: \d+ \(sleep 100\), started by test_some.py::test_leaves_a_grandchild_behind", said)
    assert said.count("left running") == 1 + said.count("ERROR test_some.py::test_is_the_last - ")


def test_a_dear_test_fails_a_run_unless_it_is_marked_thorough(run: tuple[str, list[Cost]]) -> None:
    said, costs = run
    dear = "test_some.py::test_computes_in_a_process"
    assert re.search(f"too dear: {dear} took .* s of processor", said)
    costs = [Cost(dear, "setup", 1, 6), Cost(dear, "call", 1, 6), Cost(dear, "session", 1, 50, fixture="tests: model")]
    assert re.match(f"{dear} took 12.0 s", over_budget(costs, set(), {})[0])
    assert not over_budget(costs, {dear}, {})
    assert not over_budget([costs[0], costs[2]], set(), {})  # what is shared is nobody's own


def test_a_room_has_a_budget_and_what_all_rooms_share_has_one() -> None:
    rooms, margin = {"engine": 20, "tests": 4}, durations.budget()["margin"]
    costs = [Cost(f"tests/engine/test_x.py::test_{i}", "call", 1, margin * 4.9) for i in range(4)]
    costs.append(Cost("tests/engine/test_x.py::test_0", "session", 1, margin * 3, fixture="tests: model"))
    assert not over_budget(costs, set(), rooms)
    costs.append(Cost("tests/engine/test_x.py::test_5", "call", 1, margin))
    costs.append(Cost("tests/test_house.py::test_y", "call", 1, margin * 2))
    at = "in all at the budget's pace; its budget allows"
    assert over_budget(costs, set(), rooms) == [
        f"tests/engine took {20.6 * margin:.0f} s of processor {at} {20 * margin:.0f}",
        f"tests/tests took {5 * margin:.0f} s of processor {at} {4 * margin:.0f}",
    ]


def test_a_budget_is_for_a_processor_of_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = durations.budget()["test"]
    for pace, is_over in ((0.5, True), (1, True), (1.9, True), (2.1, False)):
        costs = [Cost("tests/a.py::test", "call", 1, 2 * allowed + 0.1, pace=pace)]
        assert bool(over_budget(costs, set(), {})) == is_over
    assert not over_budget([Cost("tests/a.py::test", "call", 1, 0.9 * allowed, pace=0.5)], set(), {})
    taken = iter([2.0, 4.0])
    monkeypatch.setattr(durations, "yardstick", lambda: durations.budget()["yardstick"] * next(taken))
    pace = durations.Pace()
    assert [pace(), pace()] == [2.0, 2.0]  # looked at once a second
    monkeypatch.setattr(pace, "_at", time.monotonic() - 2)
    assert pace() == 4.0


@pytest.mark.parametrize("profile", ["quick", "thorough"])
def test_every_room_has_a_budget(profile: str) -> None:
    rooms = {durations.room(str(file.relative_to(ROOT))) for file in (ROOT / "tests").glob("**/test_*.py")}
    assert set(durations.budget()[profile]) == rooms


def test_how_far_a_run_is_is_told_by_what_rooms_cost() -> None:
    every, done = Counter(models=2, engine=1000), Counter(models=1, engine=400)
    rooms = {"models": 90, "engine": 10, "serve": 5}
    assert how_far(every, done, rooms, 75.4) == "1:15  49 %  401 of 1,002; left: engine 600, models 1"
    assert how_far(every, every, rooms, 75.4).endswith("100 %  1,002 of 1,002; left: nothing")


def test_the_screen_fits_a_terminal_and_has_the_dearest_first() -> None:
    costs = [Cost(f"tests/engine/test_{i}.py::test", "call", 1, i, 10 * i) for i in range(1, 40)]
    costs += [Cost("tests/a.py::test", "module", 1, i, fixture=f"tests/{'a' * 70}.py: made{i}") for i in range(5)]
    lines = screen(costs)
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 120
    assert re.match(r" +39\.0 engine/test_39.py +4\.0 a+.py: made4$", lines[1])
    assert lines[-1] == "most memory of a test process: 0.38 GiB, in tests/engine/test_39.py::test"


def test_two_runs_are_compared_where_they_differ_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = [Cost("tests/engine/test_x.py::a", "call", 1, 5), Cost("tests/serve/test_y.py::b", "call", 1, 7)]
    new = [Cost("tests/engine/test_x.py::a", "call", 1, 2), Cost("tests/engine/test_x.py::c", "call", 1, 0.5)]
    lines = compare(old, new)
    assert lines[:3] == [
        "rooms: 12.0 s of processor before, 2.5 s now",
        "      7.0       -    -7.0  serve",
        "      5.0     2.5    -2.5  engine",
    ]
    assert "        -     0.5    +0.5  tests/engine/test_x.py::c" in lines
    monkeypatch.setattr(durations, "WRITTEN", tmp_path / "build" / "durations.json")
    durations.write(new, 3.0)
    assert durations.read(str(durations.WRITTEN)) == new
    assert json.loads(durations.WRITTEN.read_text())["seconds"] == 3.0
