"""Assignment 8: scheduling under load. Write `turn`; everything you need is in handout.md.

minipaged grade under-load starter.py
"""

from minipaged.scheduling import Objectives, RequestView  # noqa: F401  (what the class is given)


class UnderLoad:
    """Whose turn it is, when more requests come than can be served in time."""

    def __init__(self, objectives, longest_wait):
        """`objectives`: an Objectives, in seconds. `longest_wait`: nobody may wait longer for a first token."""
        self.objectives = objectives
        self.longest_wait = longest_wait

    def turn(self, request, now):
        """Whose turn it is: a number, or a tuple of numbers; the smaller, the earlier.

        `request`: a RequestView, which runs or waits. `now`: the time, by the clock of its `arrival_time`. The same
        question has the same answer.
        """
        raise NotImplementedError
