"""Assignment 8: scheduling under load. Write `turn`; everything you need is in handout.md.

minipaged grade under-load starter.py
"""

from minipaged.scheduling import Objectives, RequestView  # noqa: F401  (types of the arguments)


class UnderLoad:
    """Decides the order of service, when more requests arrive than can be served in time."""

    def __init__(self, objectives, longest_wait):
        """`objectives`: an Objectives. `longest_wait`: the most seconds a request may wait for its first token."""
        self.objectives = objectives
        self.longest_wait = longest_wait

    def turn(self, request, now):
        """Return a request's turn: a number, or a tuple of numbers. A smaller turn comes earlier.

        `request`: a RequestView, which runs or waits. `now`: the time, by the clock of its `arrival_time`. For the
        same arguments the answer is the same.
        """
        raise NotImplementedError
