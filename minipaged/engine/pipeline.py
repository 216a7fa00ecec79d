"""Several steps in flight: the engine's side of pipeline parallelism, for a model that is cut into stages.

A call of `step` launches a step in each lane (`lanes.py`) that has none in flight, and commits the oldest. So with two
stages, and lanes A and B:

    stage 1      | A 1 | B 2 | A 3 | B 4 | A 5 |
    stage 2            | A 1 | B 2 | A 3 | B 4 | A 5 |
    host   launch A 1, B 2, commit 1,  launch A 3, commit 2,  launch B 4, commit 3, ...

A lane's next step is launched when its last one is committed: nothing that it runs is unknown to the host, and so
penalties, beams and forks need no care. What lanes share are blocks. Runners run steps in the order of launching, so
a block that a commit gives back is written by others only after those in flight have read it. Nothing in flight is
preempted: if blocks are short for the lane whose turn it is, no step is launched until all are committed; then the
policy is asked for a victim among all that run, whatever its lane. So the oldest request gets on, as it does in one
lane.
"""

from __future__ import annotations

from collections.abc import Callable

from minipaged.engine.batch import LaunchedStep, Plan
from minipaged.engine.scheduler import Scheduler


class Pipeline:
    """The steps in flight of one engine, whose methods these are."""

    def __init__(
        self,
        scheduler: Scheduler,
        assign_ahead: Callable[[int], Plan | None],
        launch: Callable[[Plan | None, int], LaunchedStep],
        commit: Callable[[LaunchedStep], None],
    ) -> None:
        self.steps_in_flight: list[LaunchedStep] = []
        """The oldest first; of each lane one at most."""
        self._turn = 0
        self._scheduler = scheduler
        self._assign_ahead = assign_ahead
        self._launch = launch
        self._commit = commit

    def run_step(self) -> None:
        """Launch as many steps as can be, which is one while all lanes go on; and commit the oldest."""
        while step := self._launch_next():
            self.steps_in_flight.append(step)
        self._commit(self.steps_in_flight.pop(0))

    def take(self) -> list[LaunchedStep]:
        """The steps in flight, which are not in flight any more."""
        steps, self.steps_in_flight = self.steps_in_flight, []
        return steps

    def _launch_next(self) -> LaunchedStep | None:
        """Launch a step in the lane whose turn it is. None if no lane without one has anything to run; and if blocks
        are short, as long as any step is in flight."""
        if len(self.steps_in_flight) == len(self._scheduler.lanes):
            return None
        lane = self._next_lane()
        if not self.steps_in_flight:
            step = self._launch(None, self._turn if lane is None else lane)  # if nothing can run, this raises
        elif lane is None or (ahead := self._assign_ahead(lane)) is None:
            return None
        else:
            step = self._launch(ahead, lane)
        self._turn = (step.plan.lane + 1) % len(self._scheduler.lanes)
        return step

    def _next_lane(self) -> int | None:
        """The first lane, by turns, that has no step in flight and something to run."""
        busy = {step.plan.lane for step in self.steps_in_flight}
        num_lanes = len(self._scheduler.lanes)
        turns = ((self._turn + i) % num_lanes for i in range(num_lanes))
        return next((lane for lane in turns if lane not in busy and self._scheduler.has_work(lane)), None)
