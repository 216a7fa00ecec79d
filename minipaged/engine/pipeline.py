"""Several steps in flight: the engine's side of pipeline parallelism, for a model that is cut into stages.

A call of `step` launches a step in each lane (`lanes.py`) that has none in flight, and commits the oldest step. With
two stages and lanes A and B:

    stage 1      | A 1 | B 2 | A 3 | B 4 | A 5 |
    stage 2            | A 1 | B 2 | A 3 | B 4 | A 5 |
    host   launch A 1, B 2, commit 1,  launch A 3, commit 2,  launch B 4, commit 3, ...

A lane's next step is launched after its last one is committed. The host then knows all of its tokens, so penalties,
beams and forks need no special care. Lanes share the blocks. Runners run steps in the order of their launch, so a block
that a commit gives back is overwritten only after the steps in flight have read it. Nothing in flight is preempted. If
blocks are short for the lane whose turn it is, no step is launched until all are committed; then the policy names a
victim among the running requests of all lanes. So the oldest request always makes progress, as it does with one lane.
"""

from __future__ import annotations

from collections.abc import Callable

from minipaged.engine.batch import LaunchedStep, Plan
from minipaged.engine.scheduler import Scheduler


class Pipeline:
    """The steps in flight of one engine. Its functions are methods of the engine's parts."""

    def __init__(
        self,
        scheduler: Scheduler,
        assign_ahead: Callable[[int], Plan | None],
        launch: Callable[[Plan | None, int], LaunchedStep],
        commit: Callable[[LaunchedStep], None],
    ) -> None:
        self.steps_in_flight: list[LaunchedStep] = []
        """The steps in flight, oldest first, at most one per lane."""
        self._turn = 0
        self._scheduler = scheduler
        self._assign_ahead = assign_ahead
        self._launch = launch
        self._commit = commit

    def run_step(self) -> None:
        """Launch as many steps as possible (one, while all lanes go on), and commit the oldest."""
        while step := self._launch_next():
            self.steps_in_flight.append(step)
        self._commit(self.steps_in_flight.pop(0))

    def take(self) -> list[LaunchedStep]:
        """Return the steps in flight and forget them."""
        steps, self.steps_in_flight = self.steps_in_flight, []
        return steps

    def _launch_next(self) -> LaunchedStep | None:
        """Launch a step in the lane whose turn it is. Returns None if no free lane has anything to run, or if blocks
        are short while a step is in flight."""
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
        """The first lane, in turn, that has no step in flight and something to run."""
        busy = {step.plan.lane for step in self.steps_in_flight}
        num_lanes = len(self._scheduler.lanes)
        turns = ((self._turn + i) % num_lanes for i in range(num_lanes))
        return next((lane for lane in turns if lane not in busy and self._scheduler.has_work(lane)), None)
