"""Running figures: what is kept is not run again, a cut file is no result, and processes change no number."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from minipaged.errors import InvalidRequest
from minipaged.paper import running
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, Plot
from minipaged.paper.figures import FIGURES
from minipaged.paper.running import (
    PACKAGE,
    SIMULATION,
    Results,
    digest_of,
    kept_figure,
    kept_figures,
    key_of,
    run_figure,
    run_jobs,
)
from minipaged.paper.serving import ServingResult, ServingSetup
from minipaged.tiers.devices import CHECKOUT


@dataclass(frozen=True)
class Answer:
    number: int


@dataclass(frozen=True)
class Double:
    """A job that leaves a line in a file whenever it runs."""

    number: int
    notes: str
    fails: bool = False

    def run(self) -> Answer:
        with Path(self.notes).open("a") as file:
            file.write(f"{self.number}\n")
        if self.fails:
            raise KeyboardInterrupt
        return Answer(2 * self.number)


@dataclass(frozen=True)
class Triple(Double):
    pass


@dataclass(frozen=True)
class Slow(Double):
    """Takes a moment, unless it fails."""

    def run(self) -> Answer:
        answer = super().run()
        time.sleep(0.5)
        return answer


def doubles(folder: Path, *, failing: int | None = None) -> list[Double]:
    return [Double(i, str(folder / "notes"), fails=i == failing) for i in range(4)]


def ran(folder: Path) -> list[int]:
    notes = folder / "notes"
    return sorted(map(int, notes.read_text().split())) if notes.exists() else []


def run(jobs: list[Double], folder: Path, processes: int = 1) -> dict[Job, Any]:
    return run_jobs(jobs, Results(folder), processes, lambda job: None)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_kept_is_not_run_again(tmp_path: Path, processes: int) -> None:
    jobs = doubles(tmp_path)
    first = run(jobs[:2], tmp_path, processes)
    assert first == {jobs[0]: {"number": 0}, jobs[1]: {"number": 2}}
    for _ in range(2):  # the second time all are kept
        assert run([*jobs, jobs[0]], tmp_path, processes) == {job: {"number": 2 * job.number} for job in jobs}
    assert ran(tmp_path) == [0, 1, 2, 3]


def test_whoever_waits_is_told_of_every_job_once(tmp_path: Path) -> None:
    jobs, done = doubles(tmp_path), list[Job]()
    run(jobs[:1], tmp_path)
    run_jobs(jobs, Results(tmp_path), 1, done.append)
    assert done == jobs


@pytest.mark.parametrize("text", ['{"job": "Double", "result": {"num', "", "[]", '{"job": "Double"}', "3"])
def test_a_file_that_was_cut_off_is_no_result(tmp_path: Path, text: str) -> None:
    [job, *_] = doubles(tmp_path)
    run([job], tmp_path)
    [path] = (tmp_path / "jobs").iterdir()
    path.write_text(text)
    assert run([job], tmp_path) == {job: {"number": 0}}
    assert ran(tmp_path) == [0, 0]
    assert json.loads(path.read_text())["result"] == {"number": 0}


def test_a_part_that_was_being_written_is_no_result(tmp_path: Path) -> None:
    [job, *_] = doubles(tmp_path)
    run([job], tmp_path)
    [path] = (tmp_path / "jobs").iterdir()
    path.rename(path.with_suffix(".part"))
    run([job], tmp_path)
    assert ran(tmp_path) == [0, 0]


def test_an_interrupted_run_keeps_what_has_ended(tmp_path: Path) -> None:
    jobs = doubles(tmp_path, failing=2)
    with pytest.raises(KeyboardInterrupt):
        run(jobs, tmp_path)
    assert ran(tmp_path) == [0, 1, 2]
    again = doubles(tmp_path)
    assert len(run([*again[:2], again[3]], tmp_path)) == 3
    assert ran(tmp_path) == [0, 1, 2, 3], "only the last had not been run"


def test_after_an_error_nobody_waits_for_the_jobs_that_are_left(tmp_path: Path) -> None:
    """Processes that go on with the queue would take minutes for each, and nobody would have the results.

    The last job is the first to run.
    """
    notes = str(tmp_path / "notes")
    jobs: list[Double] = [Slow(i, notes, fails=i == 19) for i in range(20)]
    with pytest.raises(KeyboardInterrupt):
        run(jobs, tmp_path, processes=2)
    assert len(ran(tmp_path)) < 10


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_jobs(tmp_path: Path, processes: int) -> None:
    """Whatever was kept before, and whoever ends first."""
    jobs = doubles(tmp_path)
    run(jobs[2:], tmp_path)
    assert list(run(jobs, tmp_path, processes)) == jobs


def test_a_result_is_never_taken_for_anothers(tmp_path: Path) -> None:
    job = ServingSetup("vLLM", "OPT-13B", "Alpaca", 1.0, 2.0)
    others = [
        replace(job, system="Orca (Max)"),
        replace(job, model="OPT-66B"),
        replace(job, dataset="ShareGPT"),
        replace(job, rate=1.5),
        replace(job, seconds=3.0),
        replace(job, seed=1),
        replace(job, n=2),
        replace(job, block_size=32),
    ]
    assert len({key_of(one) for one in [job, *others]}) == 9
    assert key_of(Double(1, "a")) != key_of(Triple(1, "a"))


def test_of_other_code_the_same_job_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Double(1, "a")
    before = key_of(job)
    monkeypatch.setattr(running, "_digest_of_this", lambda: "another")
    assert key_of(job) != before


@pytest.mark.parametrize(
    "changed",
    [
        *("paper/machines.py", "paper/figures/fig12.py", "paper/data/paper.json"),
        *("engine/scheduler.py", "simulation/simulated.py"),
    ],
)
def test_a_result_is_not_kept_beyond_a_change_of_what_made_it(changed: str, tmp_path: Path) -> None:
    package = shutil.copytree(PACKAGE, tmp_path / "minipaged", ignore=shutil.ignore_patterns("__pycache__"))
    before = digest_of(package)
    assert before == digest_of(PACKAGE)
    (package / "paper" / "drawing.py").write_text("# pictures make no results")
    (package / "cli" / "apps.py").write_text("")
    assert digest_of(package) == before
    with (package / changed).open("a") as file:
        file.write(" ")
    assert digest_of(package) != before


UNCOUNTED = {"__init__", "contracts", "errors", "events", "outputs", "models/__init__", "models/config"}
UNCOUNTED |= {"models/shards", "models/layer_groups", "api/__init__", "api/prompts", "api/vllm_arguments"}
UNCOUNTED |= {
    f"tiers/{name}" for name in ("__init__", "choose", "device_tier", "devices", "drafted", "fast", "reference")
}


def test_all_by_which_a_job_is_run_counts_for_its_result() -> None:
    """What jobs import of minipaged, but for what only says how things are named, told or checked."""
    code = (
        "import sys, minipaged.paper.serving\n"
        "print(*(module.__file__ for name, module in sys.modules.items() if name.startswith('minipaged')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    imported = {Path(file).relative_to(PACKAGE) for file in done.stdout.split()}
    counted = {path.relative_to(PACKAGE) for pattern in SIMULATION for path in PACKAGE.glob(pattern)}
    assert len(imported) > 40
    assert {path.with_suffix("").as_posix() for path in imported - counted} <= UNCOUNTED


class Small(Figure):
    """Two points of a curve, each of a few requests."""

    name = "small"
    title = "A small one"

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        return [ServingSetup("vLLM", "OPT-13B", "Alpaca", rate, 4.0, seed) for rate in (3.0, 8.0)]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        points = list[tuple[float, float]]()
        for job, result in results.items():
            assert isinstance(job, ServingSetup)
            points.append((job.rate, result["normalized_latency"]))
        points.sort()
        plot = Plot("small", "requests/s", "s/token", [Line("vLLM", "ours", points)])
        return FigureResult([plot], [Check("latency", 0.03, points[0][1], 0.5)])


def test_the_same_seed_gives_the_same_numbers_in_one_process_and_in_two(tmp_path: Path) -> None:
    found = {
        (seed, processes): run_figure(
            Small(),
            Results(tmp_path / f"{seed}-{processes}"),
            quick=False,
            seed=seed,
            processes=processes,
            done=lambda job: None,
        )
        for seed, processes in ((0, 1), (0, 2), (1, 1))
    }
    assert found[0, 1] == found[0, 2]
    assert found[0, 1]["plots"] != found[1, 1]["plots"]
    assert found[0, 1]["made"]["seed"] == 0
    assert {fact["kind"] for fact in found[0, 1]["machines"]["OPT-13B"]} >= {"paper", "measured", "calibrated"}
    kept = json.loads((tmp_path / "0-1" / "small.json").read_text())
    assert kept == found[0, 1], "what is kept is what was told"


def test_a_check_that_fails_has_a_note_and_one_that_holds_or_is_quick_has_none(tmp_path: Path) -> None:
    class Explained(Small):
        why: Mapping[str, str] = {"lat": "it is too low.", "nothing": "it is too high."}

    def notes(paper: float, *, quick: bool = False) -> list[str]:
        figure = Explained()
        outcome = figure.outcome
        figure.outcome = lambda found: replace(outcome(found), checks=[Check("latency", paper, 1.0, 0.5)])  # type: ignore[method-assign]
        told = run_figure(figure, Results(tmp_path), quick=quick, seed=0, processes=1, done=lambda job: None)
        assert isinstance(told["notes"], list)
        return told["notes"]

    assert notes(3.0) == ["Why it fails (latency): it is too low."]
    assert notes(1.0) == []
    assert notes(3.0, quick=True) == []


def test_every_request_of_a_trace_is_served() -> None:
    for system in ("vLLM", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "FasterTransformer"):
        served = ServingSetup(system, "OPT-13B", "Alpaca", 5.0, 4.0, seed=2).run()
        assert isinstance(served, ServingResult)
        assert served.requests > 10
        assert 0 < served.normalized_latency < 5


# --- What a check says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "verdict", "difference"),
    [
        (Check("a", 2.0, 2.3, 0.16), "holds", 0.15),
        (Check("a", 2.0, 2.4, 0.16), "fails", 0.2),
        (Check("a", 2.0, 1.6, 0.16), "fails", -0.2),
        (Check("a", 2.0, None, 0.16), "fails", None),
        (Check("a", 2.0, 9.0, None), "not judged", 3.5),
        (Check("a", None, 9.0, None), "not judged", None),
        (Check("a", 20.0, 21.5, 2.0, relative=False, unit=" %"), "holds", 1.5),
        (Check("a", 20.0, 22.5, 2.0, relative=False, unit=" %"), "fails", 2.5),
    ],
)
def test_a_verdict_goes_by_the_tolerance_and_by_nothing_else(
    check: Check, verdict: str, difference: float | None
) -> None:
    assert check.verdict == verdict
    assert check.difference == (None if difference is None else pytest.approx(difference))


@pytest.mark.parametrize("name", [name for name, figure in FIGURES.items() if not figure.needs_traces])
def test_a_figure_says_beforehand_what_it_runs(name: str) -> None:
    """The same jobs each time, each able to be told from the others; quick ones no more than the whole."""
    figure = FIGURES[name]
    for quick in (False, True):
        jobs = figure.jobs(quick=quick, seed=3)
        assert jobs == figure.jobs(quick=quick, seed=3)
        assert len({key_of(job) for job in jobs}) == len(set(jobs))
    assert figure.title
    assert figure.look


# --- What is kept is read again -------------------------------------------------------------------


def write(folder: Path, data: Any) -> None:
    (folder / "12a.json").write_text(data if isinstance(data, str) else json.dumps(data))


WHOLE = {
    "figure": "12a",
    "title": "Fig. 12a",
    "section": "6.2",
    "made": {"seed": 0, "quick": False, "minipaged": "0.0.1", "numpy": "2", "python": "3"},
    "machines": {},
    "plots": [],
    "checks": [],
    "sentences": [],
    "notes": [],
}


def test_results_are_read_in_the_order_of_the_names_and_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    for name in ("small", "beyond/one"):
        figure = Small()
        figure.name = name
        run_figure(figure, Results(tmp_path), quick=True, seed=0, processes=1, done=lambda job: None)
    assert list(kept_figures(tmp_path, ["beyond/one", "none", "small"])) == ["beyond/one", "small"]
    assert kept_figures(tmp_path / "nowhere", FIGURES) == {}


def test_a_figure_of_a_checkout_counts_in_a_checkout_of_the_same_code_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "own_version", lambda: CHECKOUT)
    made = run_figure(Small(), Results(tmp_path), quick=True, seed=0, processes=1, done=lambda job: None)
    assert kept_figure(tmp_path, "small") == made
    monkeypatch.setattr(running, "_digest_of_this", lambda: 64 * "0")
    with pytest.raises(InvalidRequest, match=r"made by minipaged a checkout \(\w{12}\), and this is .* \(0{12}\)"):
        kept_figure(tmp_path, "small")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (WHOLE, r"12a\.json was made by minipaged 0\.0\.1, and this is .* run it again: minipaged paper run 12a"),
        ('{"figure": "12', r"12a\.json is not a complete result of a figure; remove it, or run it again: minipaged p"),
        ([1, 2], "is not a complete result"),
        ({"figure": "12a"}, "is not a complete result"),
        ({**WHOLE, "checks": [{"what": "vLLM", "paper": 1.0}]}, "is not a complete result"),
    ],
    ids=["another version", "cut off", "a list", "a part", "a part of a check"],
)
def test_a_result_that_cannot_be_used_is_refused_with_the_way_out(tmp_path: Path, data: Any, message: str) -> None:
    write(tmp_path, data)
    with pytest.raises(InvalidRequest, match=message):
        kept_figures(tmp_path, ["12a"])


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"cannot keep results in .*file/in: Not a directory; give another --out"):
        Results(tmp_path / "file" / "in")


@pytest.mark.thorough
def test_who_is_ended_leaves_no_process_at_work(tmp_path: Path) -> None:
    """Jobs of an hour's trace take minutes; nobody would have their results."""
    command = [sys.executable, "-m", "minipaged", "paper", "run", "12d", "--jobs", "2", "-o", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        this = psutil.Process(running.pid)
        while len(children := this.children(recursive=True)) < 4:  # the jobs' two, and who begins and tracks them
            assert running.poll() is None
            time.sleep(0.1)
        running.terminate()
    assert running.returncode == 143
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
