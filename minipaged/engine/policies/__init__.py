"""Policies beside first come, first served: examples of the door, and useful ones.

Each is the engine's own with another order of turns (`FirstComeFirstServed.turn`), and that one order decides all: who
gets tokens first, who comes in first, and who makes room last. So what is said of the order of arrival holds of it too:
nobody passes the first of those that wait, the first of those that run is never a victim, and so it ends some day.

An order in which somebody can be passed for ever would starve him. Here everybody has a place in one queue, given by
arrival and moved back by so much and no more: it is passed only by those that arrive until then.
"""

from __future__ import annotations

from minipaged.engine.policies.priority import PriorityFirst
from minipaged.engine.policies.shortest_first import ShortestFirst
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.scheduling import MakePolicy, Policy

POLICIES: dict[str, MakePolicy] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityFirst,
    "shortest-first": ShortestFirst,
}
"""By the names that `LLM` and the command line know them by."""


def looks_at_priority(policy: Policy) -> bool:
    """Whether it may make a difference to this policy: to one of somebody's own, for all that is known."""
    return type(policy) not in (FirstComeFirstServed, ShortestFirst)
