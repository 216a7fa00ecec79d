"""How many random examples the tests try: three Hypothesis profiles, and everything that is counted in proportion.

| profile  | command              | examples                                     |
|----------|----------------------|----------------------------------------------|
| quick    | `make test`          | a tenth, always the same ones                |
| thorough | `make test-thorough` | half of them, at random; the seed is printed |
| nightly  | `make test-nightly`  | ten times all of them, at random             |

`examples(n)` scales a test's own number of examples, n, to the profile. With `seeds(n, chunk)` examples are numbered,
and the thorough profile goes on after the quick profile's. Of a test's many cases the thorough profile may run a sample
(`one_case_in(n)`).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import settings

ALL = 100
"""Hypothesis' own default, and what `examples` counts in proportion to."""

settings.register_profile("quick", max_examples=ALL // 10, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=ALL // 2, deadline=None, print_blob=True)
settings.register_profile("nightly", max_examples=ALL * 10, deadline=None, print_blob=True)

scaled = pytest.mark.scaled
"""Marks a test that counts by `examples`; Hypothesis' own are found without it."""

thorough = pytest.mark.thorough
"""Marks a test that is too long for `make test`."""


def examples(all_of_them: int, least: int = 2) -> int:
    """How many of them are tried in the profile that runs; `least` in any."""
    return max(least, all_of_them * settings.default.max_examples // ALL)


def seeds(all_of_them: int, chunk: int, *, first: int = 0, least: int = 2, tried: bool = True) -> list[range]:
    """Numbered seeds from `first` on, `examples(all_of_them, least)` of them, in ranges of `chunk`: one case each, so
    that cores share them.

    With `tried`, the thorough profile skips the seeds that `make test` runs. Pass `tried=False` if any case of the test
    is thorough, because `make test` does not run that case.
    """
    end = first + examples(all_of_them, least)
    if tried and settings.get_current_profile_name() == "thorough":
        first += max(least, all_of_them // 10)
    return [range(begin, min(begin + chunk, end)) for begin in range(first, end, chunk)]


T = TypeVar("T")


def drawn(one_in: int, all_of_them: Sequence[T], key: str) -> list[T]:
    """One of every `one_in` of them, one at least; the same for the same key, which has the run's seed."""
    return random.Random(key).sample(all_of_them, -(-len(all_of_them) // one_in))


SHARE_OF_CALLS = 5
"""The thorough profile tries one of every five calls."""


def calls_that_raise(request: pytest.FixtureRequest, calls: Sequence[int]) -> Sequence[int]:
    """Which of these calls are to raise, one in each run of a workload: all of them, and in the thorough profile a
    fifth, but one at least, drawn anew by the run's seed for each case of the test."""
    if settings.get_current_profile_name() != "thorough":
        return calls
    seed = request.config.getoption("--hypothesis-seed")
    return sorted(drawn(SHARE_OF_CALLS, calls, f"{seed} {request.node.nodeid}"))


def quick_cases(number: int) -> pytest.MarkDecorator:
    """Marks a test with many cases, of which only the first `number` are in `make test`."""
    return pytest.mark.quick_cases(number)


def one_case_in(number: int) -> pytest.MarkDecorator:
    """Marks a test with many cases. The thorough profile runs one of every `number` of the thorough cases (of all, if
    none is thorough), drawn by the run's seed. The nightly profile runs them all."""
    return pytest.mark.one_case_in(number)


NOT_DRAWN = pytest.StashKey[bool]()
"""Set for a case that the thorough profile leaves out."""


def choose(items: list[pytest.Item], seed: object = None) -> set[pytest.Item]:
    """Marks as thorough the cases beyond `quick_cases` and all tests that need a browser or the built site. Returns the
    cases to leave out: in the thorough profile, those that `one_case_in` did not draw."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for test, same in cases.items():
        quick, one_in = (same[0].get_closest_marker(name) for name in ("quick_cases", "one_case_in"))
        in_browser = not {"browser", "chromium", "site"}.isdisjoint(getattr(same[0], "fixturenames", ()))
        for item in same if in_browser else same[quick.args[0] :] if quick is not None else ():
            item.add_marker("thorough")
        if one_in is not None and settings.get_current_profile_name() == "thorough":
            # Where no case is marked, all are in `make test` too, with fewer examples.
            drawn_from = [item for item in same if item.get_closest_marker("thorough")] or same
            left_out |= {*drawn_from} - {*drawn(one_in.args[0], drawn_from, f"{seed} {test}")}
    for item in left_out:
        item.stash[NOT_DRAWN] = True
    return left_out
