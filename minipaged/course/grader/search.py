"""Looking for a counterexample: Hypothesis makes up inputs, and shortens the first one that fails.

The same seed gives the same inputs, and so the same counterexample.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Run the check on many inputs, on fewer (`examples`) where it is slow. Raises Failed with the shortest failure."""
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
        try:
            run(one)
        except Failed as failed:
            if not shortest or len(failed.failure.script or "") <= len(shortest[-1].script or ""):
                shortest.append(failed.failure)
            raise

    try:
        test()
    except (Flaky, Misbehaviour):  # the same input failed once and passed another time; or time ran out
        if not shortest:
            raise
        raise Failed(shortest[-1]) from None
