"""Assignment 11, `windows`: which blocks a sequence keeps if some layers see only a window of the last tokens.

The properties run random programs on one object of the student's class: sequences grow, share their blocks, give back
what their windows have passed, and begin with what is cached. Hypothesis generates and shrinks the programs. The
allocator is the reference's, in the grader.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st

from minipaged.course.assignments.windows.session import WindowsSession, WindowStep
from minipaged.course.grader.assignment import Bench, Check
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search

LARGEST_BLOCK = 3
"""The most slots of a block."""
WINDOWS = 2, 6
"""The fewest and the most tokens of a window."""
MOST_TOKENS = 7
"""The most tokens by which a step makes a sequence longer."""
MOST_CACHED = 8
"""The most blocks of a cached text."""

Program = tuple[int, list[int | None], int, list[WindowStep]]
"""The block size, the window of each group, the number of cached blocks, and the steps."""

FULL = st.none()
WINDOW = st.integers(*WINDOWS)


def property_of(
    *kinds: str,
    group: st.SearchStrategy[int | None],
    groups: tuple[int, int] = (1, 1),
    cached: bool = False,
    beginning: Sequence[WindowStep] = (),
) -> Check:
    """Return a check that runs such programs: the beginning, random steps of these kinds, and a hit if a text is
    cached. `group`: the window of one group; `groups`: the fewest and the most groups."""
    ending = [WindowStep("hit")] * cached
    number = st.integers(0, MOST_TOKENS)
    programs = st.tuples(
        st.integers(1, LARGEST_BLOCK),
        st.lists(group, min_size=groups[0], max_size=groups[1]),
        st.integers(1, MOST_CACHED) if cached else st.just(0),
        st.lists(st.builds(WindowStep, st.sampled_from(kinds), number, number), max_size=8),
    )

    def run(bench: Bench, program: Program) -> None:
        block_size, windows, num_cached, steps = program
        WindowsSession(bench, block_size, windows, num_cached).run([*beginning, *steps, *ending])

    return lambda bench: search(bench, programs, partial(run, bench))


CHECKS: dict[str, Check] = {
    "a group that sees everything": property_of("see", "grow", "give_back", group=FULL),
    "what a token sees": property_of("see", group=WINDOW),
    "what a window has passed": property_of("grow", "give_back", group=WINDOW),
    "each group by its window": property_of("see", "grow", "give_back", group=FULL | WINDOW, groups=(2, 3)),
    "blocks that others hold": property_of(
        *("fork", "grow", "give_back", "give_back"),
        group=FULL | WINDOW,
        groups=(1, 2),
        beginning=(WindowStep("begin", b=4), WindowStep("fork")),
    ),
    "a hit of a group with a window": property_of("evict", group=WINDOW, cached=True),
    "a hit of all groups": property_of("evict", "hit", "give_back", group=FULL | WINDOW, groups=(2, 3), cached=True),
}

ASSIGNMENT = described(
    "windows",
    CHECKS,
    part="Windows",
    members=("visible", "give_back", "longest_hit"),
    modules=("minipaged.reference.block_allocator",),  # for students' tests
)
