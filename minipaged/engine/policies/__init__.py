"""Policies other than first come, first served: useful ones, and examples of how to write your own.

Each is the engine's own policy with another order of turns (`FirstComeFirstServed.turn`). That order decides
everything: which request gets tokens first, which is admitted first, and which is preempted first (the last). So they
keep the guarantees of the order of arrival: no request overtakes the first waiting one, and the first running one is
never a victim, so it ends some day.

An order in which a request can be overtaken for ever would starve it. In these policies every request has a place in
one queue: its arrival, moved back by a fixed distance. Only requests that arrive within that distance can overtake it.
"""

from __future__ import annotations

from minipaged.engine.policies.longest_prefix_first import LongestPrefixFirst
from minipaged.engine.policies.priority import PriorityFirst
from minipaged.engine.policies.shortest_first import ShortestFirst
from minipaged.engine.policy import FirstComeFirstServed
from minipaged.scheduling import MakePolicy, Policy

POLICIES: dict[str, MakePolicy] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityFirst,
    "shortest-first": ShortestFirst,
    "longest-prefix-first": LongestPrefixFirst,
}
"""The policies, by their names in `LLM` and on the command line."""


def looks_at_priority(policy: Policy) -> bool:
    """Return whether the policy may use priorities: true for `PriorityFirst`, and assumed of every class of a user's
    own.

    A subclass of another policy that ignores priorities has to be named here.
    """
    return type(policy) not in (FirstComeFirstServed, ShortestFirst, LongestPrefixFirst)
