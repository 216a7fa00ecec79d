"""Lanes: what runs where, if several steps are in flight at once (pipeline parallelism).

A model that is cut into stages, each with some of the layers, is busy throughout only if every stage has a step to
work on. A sequence cannot be in two steps at once, for its next token is not known before the last stage is done. So
there are as many *lanes* as stages, and each request runs in one of them: its lane's steps follow one another, and
those of other lanes run meanwhile (`pipeline.py`).

- A lane has its own running requests, and its own StepWriter, whose other end is a mirror of its own. The queue of
  those that wait, the blocks, the moves of blocks, and the policy are common to all.
- A request gets its lane when it comes in, and its forks are in the same one. One that was preempted comes in again,
  perhaps into another lane: there it begins, and in the first it is over (`StepWriters.change_lane`).

Without pipeline parallelism there is one lane, and all run in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minipaged.engine.sequence import Request


@dataclass(slots=True, eq=False)
class Lane:
    """The requests that run in one lane."""

    number: int
    running: list[Request] = field(default_factory=list)
    """In order of arrival."""

    @property
    def num_sequences(self) -> int:
        return num_sequences(self.running)


def num_sequences(requests: Sequence[Request]) -> int:
    """How many sequences they have, or will have once their prompts are computed."""
    return sum(request.num_sequences for request in requests)


def share_of(lane: Lane, lanes: Sequence[Lane], entering: Sequence[Request]) -> Sequence[Request]:
    """Which of those that may come in enter this lane: the first of them, as many as it gets if each is dealt to the
    lane that has the fewest sequences then. The others enter the other lanes, whose turns come next.

    The fewest, because every lane's step goes through all stages, and the stages wait for the one that has the most to
    do: even lanes keep all of them busy. The first, so that nobody is overtaken; and the lane with the fewest takes one
    at least, so that nobody waits for a turn in vain. A single lane takes all.
    """
    if len(lanes) == 1 or not entering:
        return entering
    counts = {each: each.num_sequences for each in lanes}
    num_entering = 0
    for request in entering:
        fewest = min(lanes, key=lambda each: (counts[each], each is not lane))
        counts[fewest] += request.num_sequences
        num_entering += fewest is lane
    return entering[:num_entering]
