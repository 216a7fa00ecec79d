"""What the sessions of all assignments have in common: asking the student's part, and telling how it failed.

A session calls one part (or a few) in the worker and compares every answer with what is right. It keeps a diary: the
lines of Python that were carried out, a drawing of how things stand, and the same as events. When an answer is wrong
the diary becomes the failure: a script that fails by itself, a picture, a run.
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
    """A part of the student's and what it ought to say. Every method raises Failed and Misbehaviour."""

    KIND: ClassVar[str]
    """What the student's class makes, in a word."""

    def __init__(self, bench: Bench, part: tuple[Handle, str] | None = None, *, beside: Self | None = None) -> None:
        """`part`: an earlier assignment's. `beside`: another session whose script this one is to be part of."""
        self._bench = bench
        self._module, self._name = part or bench.part
        self._lines: list[str] = beside._lines if beside else []
        draws = "random" in bench.submission.path.read_text(errors="replace")
        self._seed = bench.seed if draws else None
        """Of the random module, for a part that draws from it."""

    # --- What each has of its own -----------------------------------------------------------------

    def _imports(self) -> Sequence[str]:
        """Lines of a script, beside the student's part."""
        return []

    def _body(self) -> Sequence[str]:
        """Lines of a script, after the imports."""
        return self._lines

    def _draw(self) -> tuple[str, ...]:
        """How things stand."""
        return ()

    def _story(self, message: str) -> tuple[Event, ...]:
        """What happened, up to the failure that the message tells."""
        return ()

    def _interrupted(self, shown: str) -> str:
        """What to call the call that did not come back."""
        return shown or self._lines[-1].strip()[:80]

    # --- Asking -----------------------------------------------------------------------------------

    def _make(self, shown: str, *args: Any) -> Handle:
        """Call the student's class."""
        [made] = self._ask([(self._module, self._name, args)], shown, seed=self._bench.seed)
        if isinstance(made, Raised):
            self._raised("__init__", made.error, shown)
        if not isinstance(made, Handle):
            self._fail(f"{shown} gave {made!r}, no {self.KIND}")
        return made

    def _refuse_to_make(self, shown: str, why: str, *args: Any) -> None:
        """Making one like this has to raise ValueError."""
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
        """A call raised that should not have. `instead`: what to say of it besides."""
        told = raised_message(method, error, shown)
        failure = self._failure(None, told if is_unwritten(error) else told + instead)
        raise Failed(replace(failure, crashed=isinstance(error, StudentError)))

    def _fail(self, message: str, *lines: str, invariant: Invariant | None = None) -> NoReturn:
        """`lines`: those in which the script fails."""
        self._lines += lines
        raise Failed(self._failure(invariant, message))

    def _failure(self, invariant: Invariant | None, message: str) -> Failure:
        broken = f"invariant '{invariant}' broken: {message}" if invariant else message
        lines = (self._imports(), self._body())
        script = make_script(self._bench.submission, self._name, invariant, message, *lines, self._seed)
        return Failure(message, invariant, self._draw(), script, self._story(broken))


@contextmanager
def telling(name: str, tell: Callable[..., Failure]) -> Iterator[None]:
    """For a single call: what it raises, or does to its process, becomes a failure. `tell` makes it of a message."""
    try:
        yield
    except Misbehaviour as misbehaviour:
        misbehaviour.failure = tell(misbehaviour.message, verdict=misbehaviour.verdict)
        raise
    except Failed:
        raise
    except Exception as error:
        raise Failed(tell(raised_message(name, error, name), crashed=True)) from None
