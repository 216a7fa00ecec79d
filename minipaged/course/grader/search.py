"""Searches for a counterexample: Hypothesis generates inputs, and shrinks the first one that fails.

The same seed gives the same inputs, and so the same counterexample, on the command line, in a page, and however
minipaged is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from minipaged.course.grader.assignment import Bench, Failed, Failure
from minipaged.course.sandbox.contract import Misbehaviour

EXAMPLES = 200
"""The number of inputs tried for each property."""
PHASES = (Phase.generate, Phase.shrink)
"""Hypothesis finds a failure, then shrinks it, which takes most of the time."""


def search(
    bench: Bench, inputs: st.SearchStrategy[Any], run: Callable[[Any], object], examples: int | None = None
) -> None:
    """Run the check on many inputs, each with no objects left from the one before. Raises Failed with the shortest
    failure.

    `examples` is the number of inputs, for a check that is too slow for EXAMPLES of them.
    """
    shortest: list[Failure] = []

    @with_seed(bench.seed)
    @settings(
        max_examples=examples or EXAMPLES,
        database=None,
        deadline=None,
        phases=PHASES,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
    )
    @given(inputs)
    def test(one: Any) -> None:
        bench.process.forget()
        try:
            run(one)
        except Failed as failed:
            if not shortest or len(failed.failure.script or "") <= len(shortest[-1].script or ""):
                shortest.append(failed.failure)
            raise

    try:
        with no_local_constants():
            test()
    except (Flaky, Misbehaviour):  # an input failed once and passed once, or time ran out
        if not shortest:
            raise
        raise Failed(shortest[-1]) from None


@contextmanager
def no_local_constants() -> Iterator[None]:
    """Keep Hypothesis from trying constants that it finds in loaded modules outside of installed packages.

    These constants differ between an installed minipaged and a clone, and a page has none. This patches internals of
    Hypothesis; in a version without them the inputs may differ, and nothing else.
    """
    try:
        from hypothesis.internal.conjecture import providers
        from hypothesis.internal.constants_ast import Constants

        find, none, cache = providers._get_local_constants, Constants(), providers.CONSTANTS_CACHE.cache
    except (ImportError, AttributeError):
        yield
        return
    cache.clear()
    providers._get_local_constants = lambda: none
    try:
        yield
    finally:
        providers._get_local_constants = find
        cache.clear()
