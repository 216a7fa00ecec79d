"""The base class of the assignments' sessions: calls the student's part, and reports its failures.

A session calls one part, or several, in the worker and compares every answer with the right one. It keeps a diary: the
calls as lines of Python, a drawing of the current state, and the calls as events. When an answer is wrong, the diary
becomes the failure: a script that reproduces it, a drawing, and a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, Self

from minipaged.course.grader.assignment import Bench, Failed, Failure
from minipaged.course.grader.counterexample import is_unwritten, make_script, must_raise, raised_message, said
from minipaged.course.sandbox.contract import Handle, Misbehaviour, Outcome, Raised, StudentError
from minipaged.errors import Invariant
from minipaged.events import Event


class Session:
    """A student's part, with a model of its right answers. Every method may raise Failed and Misbehaviour."""

    KIND: ClassVar[str]
    """A noun with its article for an object of the student's class, as in "a table"; for messages."""

    def __init__(self, bench: Bench, part: tuple[Handle, str] | None = None, *, beside: Self | None = None) -> None:
        """`part` is an earlier assignment's part. `beside` is another session; both then write one script."""
        self._bench = bench
        self._module, self._name = part or bench.part
        self._lines: list[str] = beside._lines if beside else []
        draws = "random" in bench.submission.path.read_text(errors="replace")
        self._seed = bench.seed if draws else None
        """The seed of the random module, if the part uses it."""

    # --- Overridden by subclasses -----------------------------------------------------------------

    def _imports(self) -> Sequence[str]:
        """Return the script's import lines, apart from the student's part."""
        return []

    def _body(self) -> Sequence[str]:
        """Return the script's lines after the imports."""
        return self._lines

    def _draw(self) -> tuple[str, ...]:
        """Return a drawing of the current state."""
        return ()

    def _story(self, message: str) -> tuple[Event, ...]:
        """Return the run as events; the last one is the failure, with this message."""
        return ()

    def _interrupted(self, shown: str) -> str:
        """Return the source of a call that did not return."""
        return shown or self._lines[-1].strip()[:80]

    # --- Calling the part -------------------------------------------------------------------------

    def _make(self, shown: str, *args: Any) -> Handle:
        """Call the student's class."""
        [made] = self._ask([(self._module, self._name, args)], shown, seed=self._bench.seed)
        if isinstance(made, Raised):
            self._raised("__init__", made.error, shown)
        if not isinstance(made, Handle):
            self._fail(f"{shown} returned {made!r} instead of {self.KIND}")
        return made

    def _refuse_to_make(self, shown: str, why: str, *args: Any) -> None:
        """Check that the student's class raises ValueError for these arguments."""
        self._lines += must_raise("ValueError", shown, why)
        [made] = self._ask([(self._module, self._name, args)], shown, seed=self._bench.seed)
        if not isinstance(made, Raised):
            self._fail(f"{shown} {said(made)}; it has to raise ValueError: {why}")
        if not isinstance(made.error, ValueError):
            self._raised("__init__", made.error, shown, f"; it has to raise ValueError: {why}")

    def _ask(self, calls: Sequence[Any], shown: str = "", *, seed: int | None = None) -> list[Outcome]:
        try:
            return self._bench.process.batch(calls, seed=seed)
        except Misbehaviour as misbehaviour:
            message = f"{self._interrupted(shown)}: {misbehaviour.message}"
            misbehaviour.failure = replace(self._failure(None, message), verdict=misbehaviour.verdict)
            raise

    # --- Failing ----------------------------------------------------------------------------------

    def _raised(self, method: str, error: Exception, shown: str, instead: str = "") -> NoReturn:
        """Fail because a call raised an error. `instead` is added to the message and says what was expected."""
        told = raised_message(method, error, shown)
        failure = self._failure(None, told if is_unwritten(error) else told + instead)
        raise Failed(replace(failure, crashed=isinstance(error, StudentError)))

    def _fail(self, message: str, *lines: str, invariant: Invariant | None = None) -> NoReturn:
        """Fail with this message. `lines` are added to the script; they raise its error."""
        self._lines += lines
        raise Failed(self._failure(invariant, message))

    def _failure(self, invariant: Invariant | None, message: str) -> Failure:
        broken = f"invariant '{invariant}' broken: {message}" if invariant else message
        lines = (self._imports(), self._body())
        script = make_script(self._bench.submission, self._name, invariant, message, *lines, self._seed)
        return Failure(message, invariant, self._draw(), script, self._story(broken))


@contextmanager
def telling(name: str, tell: Callable[..., Failure]) -> Iterator[None]:
    """Turn an error or a misbehaviour of a single call into a failure, which `tell` makes from a message."""
    try:
        yield
    except Misbehaviour as misbehaviour:
        misbehaviour.failure = tell(misbehaviour.message, verdict=misbehaviour.verdict)
        raise
    except Failed:
        raise
    except Exception as error:
        raise Failed(tell(raised_message(name, error, name), crashed=True)) from None
