"""Assignment 9, `prefix-cache`: blocks found again by their content, the last one in part (paper, section 4.4).

The properties run random programs on one cache: sequences begin with what `match` finds, compute the rest, publish
their blocks and end. Hypothesis generates and shrinks the programs. Allocator and tables are the reference's, in the
grader, so that it sees every reference that the cache takes or gives up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hypothesis import strategies as st

from minipaged.course.assignments.prefix_cache.session import CacheSession, CacheStep
from minipaged.course.grader.assignment import Bench, Check
from minipaged.course.grader.points import described
from minipaged.course.grader.search import search

LARGEST_BLOCK = 4
"""The most slots of a block."""
MOST_TOKENS = 6
"""The most tokens that a step names."""
NUM_BLOCKS = {"small": 5, "large": 40}
"""The size of the pool: a small one, in which blocks have to be evicted, or one in which all have room."""

Program = tuple[int, list[CacheStep]]
"""The block size, and the steps."""


def tokens_of(number: int) -> tuple[int, ...]:
    """Return the tokens 0 and 1 that a number stands for. So a step is few choices, and Hypothesis can leave it out."""
    return tuple(map(int, f"{number + 2:b}"[1:]))


def programs_of(*kinds: str, beginning: Sequence[CacheStep] = ()) -> st.SearchStrategy[Program]:
    """Return a strategy for programs: the beginning, followed by random steps of these kinds."""
    small, tokens = st.integers(0, 5), st.integers(0, 2 ** (MOST_TOKENS + 1) - 3).map(tokens_of)
    steps = st.lists(st.builds(CacheStep, st.sampled_from(kinds), tokens, small, small), max_size=10)
    return st.builds(lambda size, ops: (size, [*beginning, *ops]), st.integers(1, LARGEST_BLOCK), steps)


def property_of(
    *kinds: str, pool: str = "large", whole: bool = False, beginning: Sequence[CacheStep] = ()
) -> Callable[[Bench], None]:
    """Return a check that runs such programs in a small or a large pool. With `whole`, no block is found in part."""

    def run(bench: Bench, program: Program) -> None:
        block_size, ops = program
        CacheSession(bench, block_size, NUM_BLOCKS[pool], whole=whole).run(ops)

    return lambda bench: search(bench, programs_of(*kinds, beginning=beginning), partial(run, bench))


FIRST = (CacheStep("serve", (0, 1, 0, 1, 1)),)
"""A step that caches one block or more."""

CHECKS: dict[str, Check] = {
    "an empty cache": property_of("match", "evict"),
    "full blocks are found again": property_of("serve", "match", whole=True, beginning=FIRST),
    "one copy is enough": property_of(
        *("begin", "begin", "publish", "end_full", "match"),
        whole=True,
        beginning=(*(CacheStep("begin", (0, 1, 0, 1, 1)),) * 2, CacheStep("publish", a=0), CacheStep("publish", a=1)),
    ),
    "the beginning of a block is found": property_of(
        "begin_again", "end_full", "match", beginning=(*FIRST, CacheStep("end_full"))
    ),
    "the last block is kept": property_of("begin_again", "end", "match", beginning=(*FIRST, CacheStep("end"))),
    "the least recently used goes first": property_of(
        *("match", "begin_again", "end", "evict"),
        beginning=(*FIRST, CacheStep("end"), CacheStep("serve", (1, 0, 1, 1)), CacheStep("end")),
    ),
    "never a block that is held": property_of(
        *("begin_again", "publish", "evict"),
        beginning=(*FIRST, CacheStep("serve", (1, 0, 1, 1)), CacheStep("end", a=1), CacheStep("evict", a=1)),
    ),
    "a small pool": property_of("begin", "begin_again", "grow", "publish", "end", "end_full", pool="small"),
}

ASSIGNMENT = described(
    "prefix-cache",
    CHECKS,
    part="PrefixCache",
    members=("match", "publish", "evict"),
    modules=("minipaged.reference.block_allocator", "minipaged.reference.block_table"),  # for students' tests
)
