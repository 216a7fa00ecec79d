"""Runs figures. Their jobs run in several processes. Each job's result is stored in a file, so that an interrupted run
can continue.

    results/jobs/<digest>.json      one job: its fields and its result
    results/12a.json                one figure: plots, checks, and the versions that made it

The digest covers the job's fields, the package's version, and the sources that affect jobs (`SIMULATION`). So a result
is never mistaken for another job's, and a change to a machine or a policy makes the affected jobs run again. The digest
does not cover the contents of trace files: if one changes, use another folder or remove this one.
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
"""Files of `paper/` that only show results. They do not count for the digest."""
KEYS = {"figure", "title", "section", "made", "machines", "plots", "checks", "sentences", "notes"}
"""Keys of a figure's result. A result that can be stepped through also has a `recording`."""
KEYS_OF_CHECK = {field.name for field in fields(Check)}


@dataclass(frozen=True, slots=True)
class Provenance:
    """The settings and versions that made a figure's result."""

    seed: int
    quick: bool
    minipaged: str
    numpy: str
    python: str


def made(*, seed: int, quick: bool) -> Provenance:
    return Provenance(seed, quick, this_minipaged(), np.__version__, platform.python_version())


def digest_of(package: Path) -> str:
    """Return a digest of the source files that affect the results of jobs."""
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
    """The version that makes figures here; where minipaged is not installed, its digest stands for the version."""
    version = own_version()
    return f"{CHECKOUT} ({_digest_of_this()[:12]})" if version == CHECKOUT else version


def key_of(job: Job) -> str:
    """Return the digest under which a job's result is stored."""
    made_by = own_version(), _digest_of_this()
    said = json.dumps([*made_by, type(job).__name__, asdict(job)], sort_keys=True)  # type: ignore[call-overload]
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def _run(job: Job) -> Any:
    return asdict(job.run())


class Results:
    """The folder with the stored results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            (folder / "jobs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"cannot keep results in {folder}: {error.strerror}; give another --output") from None
        if not os.access(folder / "jobs", os.W_OK):
            raise InvalidRequest(f"cannot keep results in {folder}: it cannot be written to; give another --output")

    def get(self, job: Job) -> Any | None:
        """Return the stored result of a job, or None if there is none or its file is incomplete."""
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
    """Return the name of a figure's files, without the suffix."""
    return figure.replace("/", "-")


class Unusable(InvalidRequest):
    """Raised for a figure's stored result that cannot be used. `why` is the reason in a few words. The message adds
    what to do."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


def _is_whole(data: Any) -> bool:
    """Return whether a result has everything that pages and tables show."""
    try:
        return (
            data.keys() >= KEYS
            and data["made"].keys() >= set(Provenance.__slots__)
            and all(check.keys() >= KEYS_OF_CHECK for check in data["checks"])
            and all(isinstance(plot["title"], str) for plot in data["plots"])
        )
    except (AttributeError, KeyError, TypeError):  # a part has another type
        return False


def kept_figure(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the figure's result from the folder, or None if there is none.

    Raises Unusable if the result cannot be read, is incomplete, or was made by another version or by other code.
    """
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
    again = f"run it again: minipaged paper run {name} --output {folder}"
    if not data or not _is_whole(data):
        raise Unusable(f"{path} is not a complete result of a figure; remove it, or {again}", "incomplete result")
    maker = data["made"]["minipaged"]
    if maker != this_minipaged():
        raise Unusable(
            f"{path} was made by minipaged {maker}, and this is {this_minipaged()}, whose results may differ; {again}",
            f"made by minipaged {maker}",
        )
    return data


def kept_figures(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the results that the folder has of these figures, in the order of the names. Raises Unusable."""
    found = {name: kept_figure(folder, name) for name in names}
    return {name: data for name, data in found.items() if data is not None}


def run_jobs(jobs: Iterable[Job], results: Results, processes: int, done: Callable[[Job], None]) -> dict[Job, Any]:
    """Return the result of each job, in the order of the jobs. Jobs without a stored result are run.

    `done` is called with each job when its result is there. If interrupted, the results of finished jobs stay stored.
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
    """Yield jobs and results as the jobs finish. With `processes` = 1, jobs run in this process, so that tracebacks and
    debuggers work."""
    if processes == 1 or not jobs:
        for job in jobs:
            yield job, _run(job)
        return
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    # All pools share one fork server. Processes start fast because the server has already imported this module.
    context.set_forkserver_preload(["minipaged.paper.serving"])
    pool = ProcessPoolExecutor(processes, context, _end_with_parent)
    try:
        # Start with the last jobs: those are vLLM's highest rates, which take longest.
        waiting = {pool.submit(_run, job): job for job in reversed(jobs)}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BaseException:  # the other jobs would go on for minutes, for results that nobody uses
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _end_with_parent() -> None:
    """Start a thread in a worker process that ends the process when its parent has ended, in whatever way."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def why_it_fails(figure: Figure, checks: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return notes that explain the failing checks, by the figure's `why`."""
    failing = [check["what"] for check in checks if check["verdict"] == "fails"]
    found = {words: [what for what in failing if words in what] for words in figure.why}
    return [f"Why it fails ({'; '.join(whats)}): {figure.why[words]}" for words, whats in found.items() if whats]


def run_figure(
    figure: Figure, results: Results, *, quick: bool, seed: int, processes: int, done: Callable[[Job], None]
) -> dict[str, Any]:
    """Run a figure, store its result, and return it."""
    jobs = figure.jobs(quick=quick, seed=seed)
    outcome = figure.outcome(run_jobs(jobs, results, 1 if figure.alone else processes, done))
    models = {getattr(job, "model", None) for job in jobs}  # the models served on a simulated machine
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
    plain: dict[str, Any] = json.loads(json.dumps(data))  # exactly what a later read returns
    results.put_figure(figure, plain)
    return plain
