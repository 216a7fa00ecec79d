"""Lanes: which requests run in which step, if several steps are in flight (pipeline parallelism).

A model that is cut into stages, each with some of the layers, is fully busy only if every stage has a step to work on.
A sequence cannot be in two steps at the same time, because its next token is not known before the last stage is done.
So there are as many *lanes* as stages, and each request runs in one of them. The steps of one lane follow one another,
and those of other lanes run meanwhile (`pipeline.py`).

- A lane has its own running requests, and its own StepWriter with a mirror at the runner. The waiting queue, the
  blocks, the block moves and the policy are common to all lanes.
- A request gets its lane when it is admitted, and its forks stay in it. A preempted request may be admitted into
  another lane: it begins there, and has ended in the first (`StepWriters.change_lane`).

Without pipeline parallelism there is one lane with all running requests.
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
    """The running requests, in order of arrival."""

    @property
    def num_sequences(self) -> int:
        return num_sequences(self.running)


def num_sequences(requests: Sequence[Request]) -> int:
    """The number of sequences that these requests have, or will have once their prompts are computed."""
    return sum(request.num_sequences for request in requests)


def share_of(lane: Lane, lanes: Sequence[Lane], entering: Sequence[Request]) -> Sequence[Request]:
    """The requests of `entering` that enter this lane: the first ones, up to the lane's share. To find the share, each
    request is dealt in turn to the lane with the fewest sequences. The others enter other lanes, whose turns come next.

    Lanes of equal size keep all stages busy: every lane's step goes through all stages, and the stages wait for the
    largest. Taking the first ones means that no request is overtaken. The lane with the fewest sequences takes at least
    one request, so none waits for a turn in vain. A single lane takes all.
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
