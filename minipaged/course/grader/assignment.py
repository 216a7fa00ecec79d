"""What an assignment is, in data: a name, the tests in order, and what a submission must have to be graded at all.

An assignment is a folder of `course/assignments/` whose `checks.py` has an `ASSIGNMENT`. Its tests come in stages:
*properties* of the part alone, then the real *engine* with the part in it on a small model, then the real *model*. A
stage is run when all before it has passed. A test is a function that asks a `Bench` for the student's part and raises
`Failed` with what it found; it runs in the grader's process, and only the calls it makes on the part run in the worker.
"""

from __future__ import annotations

import contextlib
import importlib.util
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

import minipaged
from minipaged.course.sandbox.contract import Handle, Limits, LoadedFile, Sandbox, StartSandbox, StudentError
from minipaged.errors import Invariant, MinipagedError
from minipaged.events import Event

Stage = Literal["properties", "engine", "model"]

ASSIGNMENTS = (
    "block-allocator",
    "block-table",
    "paged-attention",
    "scheduler",
    "beam-search",
    "triton-decode",
    "quantize",
    "under-load",
)
"""In the order of the course. The folder of each has its name, with underscores."""
FOLDER = "minipaged.course.assignments"

ORDER = "the assignment's name comes first, then your file: minipaged grade block-allocator block_allocator.py"


class CannotBeGraded(MinipagedError):
    """The submission (or the grader's surroundings) is such that no grade can be given; the message says why."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A student's file, and which of its classes (or functions) is the part."""

    path: Path
    name: str | None = None

    @classmethod
    def parse(cls, spec: str) -> Submission:
        """From FILE.py or FILE.py:Name. Raises CannotBeGraded."""
        file, colon, name = spec.rpartition(":")
        if not colon or not file.endswith(".py"):
            file, name = spec, ""
        path = Path(file).expanduser()
        if not path.exists():
            raise CannotBeGraded(f"there is no file {file}; name the one to grade, as in mine.py or mine.py:Name")
        if path.is_dir():
            raise CannotBeGraded(f"{file} is a folder; name the file in it, as in {file}/my_part.py")
        if path.suffix != ".py":
            raise CannotBeGraded(f"{file} is no Python file; its name must end in .py")
        if colon and name and not name.isidentifier():
            raise CannotBeGraded(f"{name!r} is no name of a class; write FILE.py:Name")
        return cls(path.resolve(), name or None)

    @classmethod
    def of_reference(cls, module: str, name: str) -> Submission:
        """A file of the reference's, as a student would hand it in."""
        return cls(Path(minipaged.__file__).parent / "reference" / f"{module}.py", name)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a test found, for the student to learn from."""

    message: str
    """What was expected and what was there instead."""
    invariant: Invariant | None = None
    """The one that broke, where it is another than the test's own."""
    drawing: tuple[str, ...] = ()
    """Blocks and tables at the step where it went wrong."""
    script: str | None = None
    """A Python program that fails by itself, with the student's file beside it."""
    events: tuple[Event, ...] = ()
    """The same as events, for `minipaged demo --replay`."""
    crashed: bool = False
    """Whether the part raised an error of its own: a test's hint, which is about what it decides, would not fit."""
    verdict: str | None = None
    """What the submission did to its process, if that is what failed it (see `contract.Verdict`)."""


class Failed(Exception):
    """A test's way of saying that the part is wrong."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


Check = Callable[["Bench"], None]
"""What one test does with the student's part. Raises Failed."""


@dataclass(frozen=True, slots=True)
class Test:
    """One thing that has to hold."""

    __test__ = False  # not for pytest

    name: str
    points: int
    invariant: Invariant | None
    meaning: str
    """One sentence on what the invariant means here."""
    hint: str
    """Where to look; never the answer."""
    check: Check
    stage: Stage = "properties"
    hidden: bool = False
    """Whether students see only its points, not what it found."""


@dataclass(frozen=True, slots=True)
class Performance:
    """How fast a right submission is; reported, never part of the score."""

    operations_per_second: float
    reference_operations_per_second: float
    operations: str = "operations"
    """What is counted."""

    @property
    def index(self) -> float:
        """1 is as fast as the reference, 2 twice as fast."""
        return self.operations_per_second / self.reference_operations_per_second


def fastest(rounds: int, *runs: Callable[[], float]) -> list[float]:
    """The least that each run says it took. They run in turns, so that a busy machine slows all of them."""
    rows = [[run() for run in runs] for _ in range(rounds)]
    return [min(times) for times in zip(*rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Assignment:
    """One assignment of the course."""

    name: str
    part: str
    """The name of the class (or function) that a submission is expected to have, if it has several candidates."""
    members: tuple[str, ...]
    """The methods that the class must have; empty where the part is a function."""
    tests: tuple[Test, ...]
    cap: int
    """The score that no submission exceeds which fails a test."""
    optional: tuple[str, ...] = ()
    """Methods that the class may have besides, and that the tests then call too (see `Bench.also`)."""
    limits: Limits = field(default_factory=Limits)
    modules: tuple[str, ...] = ()
    """Of ours, to be loaded in the worker before the student's file (adapters; what is slow to import)."""
    needs: tuple[str, ...] = ()
    """Packages of the extra `fast` without which nothing can be graded."""
    builds_on: tuple[str, ...] = ()
    """Earlier assignments of which a student's own part can be carried into this one."""
    measure: Callable[[Bench], Performance] | None = None

    @property
    def max_score(self) -> int:
        return sum(test.points for test in self.tests)

    def check_needs(self) -> None:
        """Raises CannotBeGraded where a package is not there without which nothing can be."""
        if missing := [package for package in self.needs if importlib.util.find_spec(package) is None]:
            raise CannotBeGraded(
                f"{self.name} needs {' and '.join(missing)}, not installed here; install minipaged with its extras "
                "'course' and 'fast' (in a clone: pip install -e '.[course,fast]'), on Linux: there is no Triton "
                "elsewhere"
            )

    def choose(self, submission: Submission, loaded: LoadedFile) -> str:
        """The name of the part in a loaded file. Raises CannotBeGraded, and says what to do."""
        file, wants_class = submission.path.name, bool(self.members)
        kind = "class" if wants_class else "function"
        candidates = {item.name: item for item in loaded.contents if item.is_class == wants_class}
        name = submission.name
        if name is None:
            fitting = [one for one, item in candidates.items() if not set(self.members) - set(item.members)]
            if self.part in candidates:
                name = self.part
            elif len(fitting) == 1 and wants_class:
                [name] = fitting
            elif len(fitting) > 1:
                raise CannotBeGraded(
                    f"{file} has several classes that could be the part: {', '.join(fitting)}; say which, as in "
                    f"{file}:{fitting[0]}"
                )
            elif len(candidates) == 1 and wants_class:
                [name] = candidates
            else:
                name = self.part
        if name not in candidates:
            has = ", ".join(candidates)
            others = f"it has {has}; rename yours, or say which it is, as in {file}:{next(iter(candidates), '')}"
            raise CannotBeGraded(
                f"{file} has no {kind} {name}; " + (others if has else "the starter file shows what is needed")
            )
        item = candidates[name]
        missing = [member for member in self.members if member not in item.members]
        missing += [member for member in item.unfinished if member not in missing]
        if missing:
            raise CannotBeGraded(
                f"{name} in {file} lacks {', '.join(missing)}; the starter file has all that is needed"
            )
        return name


def start_process(limits: Limits, modules: Sequence[str]) -> Sandbox:
    """A process of its own."""
    from minipaged.course.sandbox.process import WorkerProcess

    return WorkerProcess(limits, modules)


@dataclass(slots=True)
class Bench:
    """Where one test runs: the student's part in a worker of its own, and what makes the run repeatable."""

    assignment: Assignment
    submission: Submission
    seed: int
    carried: Mapping[str, Submission] = field(default_factory=dict)
    """Own parts from earlier assignments, by the assignment's name."""
    model: str = "smollm2-135m-instruct"
    start: StartSandbox = field(default_factory=lambda: start_process)
    """Makes what the part runs in."""
    _process: Sandbox | None = None
    _part: tuple[Handle, str] | None = None
    _also: tuple[str, ...] = ()
    _carried_parts: dict[str, tuple[Handle, str]] = field(default_factory=dict)
    output: str = ""
    """What the submission printed, the beginning of it."""

    @property
    def process(self) -> Sandbox:
        """The worker, started when first asked for. Raises CannotBeGraded when the file cannot be loaded."""
        if self._process is None:
            self._process = self.start(self.assignment.limits, self.assignment.modules)
            for name, submission in self.carried.items():
                carried, chosen = self._load(find_assignment(name), submission)
                self._carried_parts[name] = carried.module, chosen
            self._load_part()
        return self._process

    def _load_part(self) -> None:
        loaded, chosen = self._load(self.assignment, self.submission)
        self._part = loaded.module, chosen
        [written] = [item.written for item in loaded.contents if item.name == chosen]
        self._also = tuple(method for method in self.assignment.optional if method in written)

    def _load(self, assignment: Assignment, submission: Submission) -> tuple[LoadedFile, str]:
        assert self._process is not None
        try:
            loaded = self._process.load(submission.path, assignment.name.replace("-", "_") + "_submission")
        except StudentError as error:
            raise CannotBeGraded(f"{submission.path.name} does not load: {error}") from None
        return loaded, assignment.choose(submission, loaded)

    def beside(self, submission: Submission | None = None, limits: Limits | None = None) -> Bench:
        """Another one in the same surroundings: for another submission (a reference's), or under other limits."""
        assignment = replace(self.assignment, limits=limits or self.assignment.limits)
        return Bench(assignment, submission or self.submission, self.seed, self.carried, self.model, self.start)

    def make(self, *args: object) -> object:
        """Call the student's class (or function)."""
        module, name = self.part
        return module.call(name, *args)

    @property
    def part(self) -> tuple[Handle, str]:
        """The student's module, and the name of the part in it."""
        assert self.process
        assert self._part is not None
        return self._part

    @property
    def also(self) -> tuple[str, ...]:
        """The optional methods that the student wrote (one inherited from minipaged's own class is none of them)."""
        assert self.process
        return self._also

    def carried_part(self, name: str) -> tuple[Handle, str] | None:
        """The same of an earlier assignment's part, if the student brought one; else the reference's is to be taken."""
        assert self.process
        return self._carried_parts.get(name)

    def restart(self) -> None:
        """Throw the worker away; the next use starts a fresh one."""
        if self._process is not None:
            self._process.close()
            self.output = self.output or self._process.output
        self._process, self._part = None, None
        self._carried_parts.clear()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.restart()


# --- Results --------------------------------------------------------------------------------------


class TestStatus(StrEnum):
    """What came of a test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not run: an earlier stage has to pass first. Counts as 0 points."""
    NOT_GRADED = "not-graded"
    """Left out on request (`--no-model`): it counts neither for nor against."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test, graded."""

    __test__ = False

    test: Test
    status: TestStatus
    message: str = ""
    failure: Failure | None = None
    output: str = ""
    """What the submission printed meanwhile, the beginning of it."""

    @property
    def score(self) -> int:
        return self.test.points if self.status is TestStatus.PASSED else 0


@dataclass(slots=True)
class Grade:
    """A submission, graded; complete once `finished` is set."""

    assignment: Assignment
    submission: Submission
    seed: int
    results: list[TestResult] = field(default_factory=list)
    performance: Performance | None = None
    isolation: dict[str, str] = field(default_factory=dict)
    also_checked: tuple[str, ...] = ()
    """Optional methods that the submission has."""
    lead: tuple[str, ...] = ()
    """Lines to begin the closing words with."""
    finished: bool = False
    error: str | None = None
    """Why it cannot be graded, if it cannot."""

    @classmethod
    def refused(cls, assignment: str, submission: Submission | None, error: str) -> Grade:
        """That of a submission that cannot be graded."""
        return cls(Assignment(assignment, "", (), (), 0), submission or Submission(Path()), 0, error=error)

    @property
    def max_score(self) -> int:
        left_out = sum(result.test.points for result in self.results if result.status is TestStatus.NOT_GRADED)
        return self.assignment.max_score - left_out

    @property
    def capped(self) -> bool:
        """Whether the cap took points away."""
        return self._failed and self._sum > self.assignment.cap

    @property
    def score(self) -> int:
        return min(self._sum, self.assignment.cap) if self._failed else self._sum

    @property
    def full_marks(self) -> bool:
        return self.finished and self.score == self.max_score

    @property
    def _sum(self) -> int:
        return sum(result.score for result in self.results)

    @property
    def _failed(self) -> bool:
        return any(result.status in (TestStatus.FAILED, TestStatus.SKIPPED) for result in self.results)


@contextlib.contextmanager
def needs_hypothesis() -> Iterator[None]:
    """Turn a missing hypothesis (or pytest, which runs students' tests) into a message that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("hypothesis", "pytest"):
            raise
        raise CannotBeGraded(
            f"the grader needs {error.name}, not installed here; install minipaged with its extra 'course' "
            "(in a clone: pip install -e '.[course]')"
        ) from None


def name_of(name: str) -> str:
    """As ASSIGNMENTS has it, also of one written with underscores. Raises CannotBeGraded."""
    found = name.replace("_", "-")
    if found not in ASSIGNMENTS:
        raise CannotBeGraded(f"there is no assignment {name!r}; choose one of {', '.join(ASSIGNMENTS)}")
    return found


def find_assignment(name: str) -> Assignment:
    """The assignment called `name`, or the `ASSIGNMENT` of an instructor's own file. Raises CannotBeGraded."""
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise CannotBeGraded(f"there is no file {name} with an assignment; {ORDER}")
        with needs_hypothesis():
            assignment = runpy.run_path(name).get("ASSIGNMENT")
        if not isinstance(assignment, Assignment):
            raise CannotBeGraded(f"{name} has no ASSIGNMENT (docs/instructors.md); {ORDER}")
        return assignment
    name = name_of(name)
    with needs_hypothesis():
        found: Assignment = importlib.import_module(f"{FOLDER}.{name.replace('-', '_')}.checks").ASSIGNMENT
    return found
