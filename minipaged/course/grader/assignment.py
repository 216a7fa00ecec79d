"""The classes that describe an assignment and a grade.

An assignment has a name, tests in order, and the members that a submission must have to be graded. It is a folder of
`course/assignments/` whose `checks.py` defines `ASSIGNMENT`. Its tests have stages: *properties* of the part alone,
then the real *engine* with the part in it on a small model, then the real *model*. A stage runs if all tests before it
passed. A test is a function that takes the student's part from a `Bench` and raises `Failed` when it finds a mistake.
The test runs in the grader's process; only its calls on the part run in the worker.
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
    "prefix-cache",
    "eviction",
    "windows",
    "speculative",
)
"""The assignments, in the order of the course. Each one's folder has its name, with underscores."""
FOLDER = "minipaged.course.assignments"

ORDER = "the assignment's name comes first, then your file: minipaged grade block-allocator block_allocator.py"


class CannotBeGraded(MinipagedError):
    """The submission cannot be graded, because of its file or of the grader's surroundings; the message says why."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A student's file, and optionally the name of the class or function in it that is the part."""

    path: Path
    name: str | None = None

    @classmethod
    def parse(cls, spec: str) -> Submission:
        """Return the submission for FILE.py or FILE.py:Name. Raises CannotBeGraded."""
        file, colon, name = spec.rpartition(":")
        if not colon or not file.endswith(".py"):
            file, name = spec, ""
        path = Path(file).expanduser()
        if not path.exists():
            raise CannotBeGraded(f"there is no file {file}; name the one to grade, as in mine.py or mine.py:Name")
        if path.is_dir():
            raise CannotBeGraded(f"{file} is a folder; name the file in it, as in {file}/my_part.py")
        if path.suffix != ".py":
            raise CannotBeGraded(f"{file} is not a Python file; its name must end in .py")
        if colon and name and not name.isidentifier():
            raise CannotBeGraded(f"{name!r} is not a valid class name; write FILE.py:Name")
        return cls(path.resolve(), name or None)

    @classmethod
    def of_reference(cls, module: str, name: str) -> Submission:
        """Return a file of `minipaged/reference/` as a submission."""
        return cls(Path(minipaged.__file__).parent / "reference" / f"{module}.py", name)


@dataclass(frozen=True, slots=True)
class Failure:
    """A mistake that a test found, with all that explains it to the student."""

    message: str
    """The expected and the actual result."""
    invariant: Invariant | None = None
    """The broken invariant, if it is not the test's own."""
    drawing: tuple[str, ...] = ()
    """A drawing of blocks and tables at the failing step, as lines of text."""
    script: str | None = None
    """A Python program that reproduces the failure, run beside the student's file."""
    events: tuple[Event, ...] = ()
    """The failing run as events, for `minipaged demo --replay`."""
    crashed: bool = False
    """Whether the part raised an error of its own. The test's hint, which is about wrong results, is then not shown."""
    verdict: str | None = None
    """How the submission misbehaved in its process, if that is why it failed (see `contract.Verdict`)."""


class Failed(Exception):
    """Raised by a test when the part is wrong."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


Check = Callable[["Bench"], None]
"""The function of one test, which checks the student's part. Raises Failed."""


@dataclass(frozen=True, slots=True)
class Test:
    """One test of an assignment."""

    __test__ = False  # not a pytest class

    name: str
    points: int
    invariant: Invariant | None
    meaning: str
    """One sentence that says what the invariant means in this test."""
    hint: str
    """A hint where to look. It never gives the answer."""
    check: Check
    stage: Stage = "properties"
    hidden: bool = False
    """Whether students see only the test's points, and not its failure."""


@dataclass(frozen=True, slots=True)
class Performance:
    """The measured speed of a correct submission. It is reported, and never part of the score."""

    operations_per_second: float
    reference_operations_per_second: float
    operations: str = "operations"
    """The name of the operations that are counted."""

    @property
    def index(self) -> float:
        """The speed relative to the reference: 2 is twice as fast."""
        return self.operations_per_second / self.reference_operations_per_second


def fastest(rounds: int, *runs: Callable[[], float]) -> list[float]:
    """Return the least time that each run reported. They run in turns, so that a busy machine slows all of them."""
    rows = [[run() for run in runs] for _ in range(rounds)]
    return [min(times) for times in zip(*rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Assignment:
    """One assignment of the course."""

    name: str
    part: str
    """The expected name of the class or function; decides between several candidates in a file."""
    members: tuple[str, ...]
    """The methods that the class must have; empty if the part is a function."""
    tests: tuple[Test, ...]
    cap: int
    """The highest score of a submission that fails a test."""
    optional: tuple[str, ...] = ()
    """Methods that the class may have; the tests call those it has (see `Bench.also`)."""
    limits: Limits = field(default_factory=Limits)
    modules: tuple[str, ...] = ()
    """Modules that the worker imports before the student's file: minipaged's adapters, and slow imports."""
    needs: tuple[str, ...] = ()
    """Packages of the extra `fast` that grading requires."""
    builds_on: tuple[str, ...] = ()
    """Earlier assignments whose parts a student can bring into this one (`--with`)."""
    measure: Callable[[Bench], Performance] | None = None

    @property
    def max_score(self) -> int:
        return sum(test.points for test in self.tests)

    def check_needs(self) -> None:
        """Raise CannotBeGraded if a required package is not installed."""
        if missing := [package for package in self.needs if importlib.util.find_spec(package) is None]:
            raise CannotBeGraded(
                f"{self.name} needs {' and '.join(missing)}, not installed here; install minipaged with its extras "
                "'course' and 'fast' (in a clone: pip install -e '.[course,fast]'), on Linux, because Triton exists "
                "only there"
            )

    def choose(self, submission: Submission, loaded: LoadedFile) -> str:
        """Return the name of the part in a loaded file. Raises CannotBeGraded with advice if it is not clear."""
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
    """Start a worker as a program of its own."""
    from minipaged.course.sandbox.process import WorkerProcess

    return WorkerProcess(limits, modules)


@dataclass(slots=True)
class Bench:
    """The surroundings of one test: the student's part in a fresh worker, and the seed that makes it repeatable."""

    assignment: Assignment
    submission: Submission
    seed: int
    carried: Mapping[str, Submission] = field(default_factory=dict)
    """The student's parts for earlier assignments, by the assignment's name."""
    model: str = "smollm2-135m-instruct"
    start: StartSandbox = field(default_factory=lambda: start_process)
    """Starts the sandbox that the part runs in."""
    _process: Sandbox | None = None
    _part: tuple[Handle, str] | None = None
    _also: tuple[str, ...] = ()
    _carried_parts: dict[str, tuple[Handle, str]] = field(default_factory=dict)
    output: str = ""
    """The beginning of the submission's printed output."""

    @property
    def process(self) -> Sandbox:
        """The worker, started on first use. Raises CannotBeGraded if the file cannot be loaded."""
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
        """Return another bench with the same settings, for another submission (the reference's) or other limits."""
        assignment = replace(self.assignment, limits=limits or self.assignment.limits)
        return Bench(assignment, submission or self.submission, self.seed, self.carried, self.model, self.start)

    def make(self, *args: object) -> object:
        """Call the student's class or function."""
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
        """The optional methods that the student wrote. Those inherited from a minipaged class do not count."""
        assert self.process
        return self._also

    def carried_part(self, name: str) -> tuple[Handle, str] | None:
        """Return `part` for an earlier assignment, or None if the student brought none; then use the reference's."""
        assert self.process
        return self._carried_parts.get(name)

    def restart(self) -> None:
        """Close the worker; the next use starts a fresh one."""
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


class GradeStatus(StrEnum):
    """The outcome of a test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """The test did not run, because an earlier stage has to pass first. It counts as 0 points."""
    NOT_GRADED = "not-graded"
    """The test was left out on request (`--no-model`). Its points count neither for nor against."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of one test."""

    __test__ = False

    test: Test
    status: GradeStatus
    message: str = ""
    failure: Failure | None = None
    output: str = ""
    """The beginning of the submission's printed output during this test."""

    @property
    def score(self) -> int:
        return self.test.points if self.status is GradeStatus.PASSED else 0


@dataclass(slots=True)
class Grade:
    """The grade of a submission; complete once `finished` is set."""

    assignment: Assignment
    submission: Submission
    seed: int
    results: list[TestResult] = field(default_factory=list)
    performance: Performance | None = None
    isolation: dict[str, str] = field(default_factory=dict)
    also_checked: tuple[str, ...] = ()
    """Optional methods that the submission has and the tests called."""
    lead: tuple[str, ...] = ()
    """Lines shown before the score."""
    finished: bool = False
    error: str | None = None
    """The reason why the submission cannot be graded, if so."""

    @classmethod
    def refused(cls, assignment: str, submission: Submission | None, error: str) -> Grade:
        """Return the grade of a submission that cannot be graded."""
        return cls(Assignment(assignment, "", (), (), 0), submission or Submission(Path()), 0, error=error)

    @property
    def max_score(self) -> int:
        left_out = sum(result.test.points for result in self.results if result.status is GradeStatus.NOT_GRADED)
        return self.assignment.max_score - left_out

    @property
    def capped(self) -> bool:
        """Whether the cap reduced the score."""
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
        return any(result.status in (GradeStatus.FAILED, GradeStatus.SKIPPED) for result in self.results)


@contextlib.contextmanager
def needs_hypothesis() -> Iterator[None]:
    """Turn a missing hypothesis or pytest into an error that says how to install it. pytest runs students' tests."""
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
    """Return the assignment's name as in ASSIGNMENTS; accepts underscores for hyphens. Raises CannotBeGraded."""
    found = name.replace("_", "-")
    if found not in ASSIGNMENTS:
        raise CannotBeGraded(f"there is no assignment {name!r}; choose one of {', '.join(ASSIGNMENTS)}")
    return found


def find_assignment(name: str) -> Assignment:
    """Return the assignment called `name`, or the `ASSIGNMENT` of an instructor's own file. Raises CannotBeGraded."""
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise CannotBeGraded(f"there is no assignment file {name}; {ORDER}")
        with needs_hypothesis():
            assignment = runpy.run_path(name).get("ASSIGNMENT")
        if not isinstance(assignment, Assignment):
            raise CannotBeGraded(f"{name} has no ASSIGNMENT (docs/instructors.md); {ORDER}")
        return assignment
    name = name_of(name)
    with needs_hypothesis():
        found: Assignment = importlib.import_module(f"{FOLDER}.{name.replace('-', '_')}.checks").ASSIGNMENT
    return found
