"""Runs figures: their jobs in several processes, each result kept in a file, so that what was cut off goes on.

    results/jobs/<digest>.json      one job: what it was, and its result
    results/12a.json                one figure: plots, checks, and what it was made with

A digest is of everything that a job says, of the package's version, and of the code and the constants by which jobs are
run (`SIMULATION`). So a result is never taken for another's, and who changes a machine or a policy runs again what that
may have changed. (Who changes a file of traces but not its name gives another folder, or removes this one.)
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from minipaged.errors import InvalidRequest
from minipaged.paper.figure import Check, Figure, Job
from minipaged.paper.machines import SETTINGS, facts
from minipaged.tiers.devices import CHECKOUT, own_version

PACKAGE = Path(__file__).parents[1]
SIMULATION = (
    *("scheduling.py", "mirror.py", "steps.py", "params.py", "handover/*.py", "simulation/*.py"),
    *("engine/**/*.py", "reference/*.py", "replicas/*.py", "paper/*.py", "paper/figures/*.py", "paper/data/*.json"),
)
TOLD_ONLY = {"commands.py", "drawing.py", "pages.py", "report.py", "telling.py"}
"""Of `paper/`, what shows results and makes none."""
KEYS = {"figure", "title", "section", "made", "machines", "plots", "checks", "sentences", "notes"}
"""Of a figure's result. One that can be stepped through has its `recording` too."""
KEYS_OF_CHECK = {field.name for field in fields(Check)}


@dataclass(frozen=True, slots=True)
class Provenance:
    """By what a figure's result was made."""

    seed: int
    quick: bool
    minipaged: str
    numpy: str
    python: str


def made(*, seed: int, quick: bool) -> Provenance:
    return Provenance(seed, quick, this_minipaged(), np.__version__, platform.python_version())


def digest_of(package: Path) -> str:
    """Of the files that say what comes of a job."""
    files = sorted({path for pattern in SIMULATION for path in package.glob(pattern)})
    digest = hashlib.sha256()
    for path in files:
        if not (path.parent.name == "paper" and path.name in TOLD_ONLY):
            digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _digest_of_this() -> str:
    return digest_of(PACKAGE)


def this_minipaged() -> str:
    """The version that makes figures here. A checkout has none, and is named by its digest."""
    version = own_version()
    return f"{CHECKOUT} ({_digest_of_this()[:12]})" if version == CHECKOUT else version


def key_of(job: Job) -> str:
    """By which its result is found again."""
    made_by = own_version(), _digest_of_this()
    said = json.dumps([*made_by, type(job).__name__, asdict(job)], sort_keys=True)  # type: ignore[call-overload]
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def _run(job: Job) -> Any:
    return asdict(job.run())


class Results:
    """The folder in which results are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            (folder / "jobs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"cannot keep results in {folder}: {error.strerror}; give another --output") from None
        if not os.access(folder / "jobs", os.W_OK):
            raise InvalidRequest(f"cannot keep results in {folder}: it cannot be written to; give another --output")

    def get(self, job: Job) -> Any | None:
        """The kept result, if there is one. A file that was cut off is none."""
        try:
            return json.loads(self._path(job).read_text())["result"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, job: Job, result: Any) -> None:
        said = {"job": type(job).__name__, **asdict(job), "result": result}  # type: ignore[call-overload]
        self._write(self._path(job), said)

    def _path(self, job: Job) -> Path:
        return self.folder / "jobs" / f"{key_of(job)}.json"

    def _write(self, path: Path, data: Any) -> None:
        part = path.with_suffix(".part")
        try:
            part.write_text(json.dumps(data, indent=1) + "\n")
            part.replace(path)
        except OSError as error:
            raise InvalidRequest(f"cannot write {path}: {error.strerror}; give another --output") from None

    def put_figure(self, figure: Figure, data: Mapping[str, Any]) -> Path:
        path = self.folder / f"{file_name(figure.name)}.json"
        self._write(path, data)
        return path


def file_name(figure: str) -> str:
    """Of all files of a figure, without what they end in."""
    return figure.replace("/", "-")


class Unusable(InvalidRequest):
    """A figure's kept result that cannot be used. `why` says it in a few words, the message with the way out."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


def _is_whole(data: Any) -> bool:
    """Whether it has all that is told of a result."""
    try:
        return (
            data.keys() >= KEYS
            and data["made"].keys() >= set(Provenance.__slots__)
            and all(check.keys() >= KEYS_OF_CHECK for check in data["checks"])
            and all(isinstance(plot["title"], str) for plot in data["plots"])
        )
    except (AttributeError, KeyError, TypeError):  # something else in their place
        return False


def kept_figure(folder: Path, name: str) -> dict[str, Any] | None:
    """The figure's result that is in the folder; None if there is none. Raises Unusable for one that cannot be read, or
    that another version of minipaged has made, or a checkout of other code."""
    path = folder / f"{file_name(name)}.json"
    data: dict[str, Any] | None
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"cannot read {path}: {error.strerror}", f"cannot be read: {error.strerror}") from None
    except ValueError:
        data = None
    again = f"make it again: minipaged paper run {name} --output {folder}"
    if not data or not _is_whole(data):
        raise Unusable(f"{path} is no whole result of a figure; remove it, or {again}", "no whole result")
    maker = data["made"]["minipaged"]
    if maker != this_minipaged():
        raise Unusable(
            f"{path} was made by minipaged {maker}, and this is {this_minipaged()}, whose figures may come out "
            f"otherwise; {again}",
            f"made by minipaged {maker}",
        )
    return data


def kept_figures(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The figures' results that are in the folder, in the order of the names. Raises Unusable."""
    found = {name: kept_figure(folder, name) for name in names}
    return {name: data for name, data in found.items() if data is not None}


def run_jobs(jobs: Iterable[Job], results: Results, processes: int, done: Callable[[Job], None]) -> dict[Job, Any]:
    """The result of each, in the order of the jobs, from the folder or by running it; `done` is told of each as it
    ends. Interrupted, it keeps what has ended.
    """
    found: dict[Job, Any] = {}
    missing: list[Job] = []
    asked = list(dict.fromkeys(jobs))
    for job in asked:
        if (kept := results.get(job)) is not None:
            found[job] = kept
            done(job)
        else:
            missing.append(job)
    for job, result in _each(missing, processes):
        results.put(job, result)
        found[job] = result
        done(job)
    return {job: found[job] for job in asked}


def _each(jobs: list[Job], processes: int) -> Iterator[tuple[Job, Any]]:
    """As they end. One process is this one: errors, and the debugger, are then where they belong."""
    if processes == 1 or not jobs:
        for job in jobs:
            yield job, _run(job)
        return
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    # The server of the first pool is the next ones' too: by what it has imported their processes begin at once.
    context.set_forkserver_preload(["minipaged.paper.serving"])
    pool = ProcessPoolExecutor(processes, context, _end_with_parent)
    try:
        # The last first: the highest rates of vLLM are, and they take longest.
        waiting = {pool.submit(_run, job): job for job in reversed(jobs)}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BaseException:  # a job takes minutes, and nobody wants the results of the others any more
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _end_with_parent() -> None:
    """In a process of the pool: end when whoever wanted the results is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def why_it_fails(figure: Figure, checks: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is known of it, of each check that fails."""
    failing = [check["what"] for check in checks if check["verdict"] == "fails"]
    found = {words: [what for what in failing if words in what] for words in figure.why}
    return [f"Why it fails ({'; '.join(whats)}): {figure.why[words]}" for words, whats in found.items() if whats]


def run_figure(
    figure: Figure, results: Results, *, quick: bool, seed: int, processes: int, done: Callable[[Job], None]
) -> dict[str, Any]:
    """Run it, keep its result, and return that."""
    jobs = figure.jobs(quick=quick, seed=seed)
    outcome = figure.outcome(run_jobs(jobs, results, 1 if figure.alone else processes, done))
    models = {getattr(job, "model", None) for job in jobs}  # those that are served on a simulated machine
    checks = [
        {**asdict(check), "difference": check.difference, "verdict": "not judged" if quick else check.verdict}
        for check in outcome.checks
    ]
    data = {
        "figure": figure.name,
        "title": figure.title,
        "section": figure.section,
        "made": asdict(made(seed=seed, quick=quick)),
        "machines": {model: [asdict(fact) for fact in facts(model)] for model in SETTINGS if model in models},
        "plots": [asdict(plot) for plot in outcome.plots],
        "checks": checks,
        "sentences": [asdict(sentence) for sentence in outcome.sentences],
        "notes": [*outcome.notes, *why_it_fails(figure, checks)],
        **({"recording": outcome.recording} if outcome.recording else {}),
    }
    plain: dict[str, Any] = json.loads(json.dumps(data))  # as it is read again
    results.put_figure(figure, plain)
    return plain
