"""Looking for a counterexample: Hypothesis makes up inputs, and shortens the first one that fails.

The same seed gives the same inputs, and so the same counterexample: on the command line, however minipaged is
installed, and in a page.
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
"""Inputs tried for each property."""
PHASES = (Phase.generate, Phase.shrink)
"""Find a failure, then look for the shortest: that takes most of the time."""


def search(
    bench: Bench, inputs: st.SearchStrategy[Any], run: Callable[[Any], object], examples: int | None = None
) -> None:
    """Run the check on many inputs, on fewer (`examples`) where it is slow; what one has made, the next does not find.
    Raises Failed with the shortest failure."""
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
    except (Flaky, Misbehaviour):  # the same input failed once and passed another time; or time ran out
        if not shortest:
            raise
        raise Failed(shortest[-1]) from None


@contextmanager
def no_local_constants() -> Iterator[None]:
    """Within it Hypothesis does not try the constants of the modules that are loaded, but for those of packages: they
    would be others for who has installed minipaged than for who has a clone, and none in a page.

    A Hypothesis that is not the tested one may have them elsewhere: what it tries may then differ, and nothing else.
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
