"""Running ahead: asynchronous scheduling.

A call of `step` leaves the step that it launched *in flight*. The next call launches one more before it commits this
one, so that the device has work while the host commits and schedules:

    device       | step 1        | step 2        | step 3        |
    host   launch 1, launch 2,  commit 1, launch 3,  commit 2, launch 4, ...

The token that a sequence runs in step 2 is the one that step 1 is choosing: it stays on the device. If step 1 turns out
to end the sequence, its row of step 2 is thrown away. If planning the next step needs the tokens on the host
(penalties, beam search, a fork, a preemption), it waits for the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sized

from minipaged.engine.batch import LaunchedStep, Plan
from minipaged.engine.scheduler import Scheduler


class RunAhead:
    """The step in flight of one engine. Its functions are methods of the engine's parts.

    `assign_ahead`: returns the plan to launch while this step is in flight; None if its tokens or its blocks are needed
    first.
    """

    def __init__(
        self,
        assign_ahead: Callable[[LaunchedStep], Plan | None],
        launch: Callable[[Plan | None], LaunchedStep],
        commit: Callable[[LaunchedStep], None],
        requests: Sized,
    ) -> None:
        self.in_flight: LaunchedStep | None = None
        self._assign_ahead = assign_ahead
        self._launch = launch
        self._commit = commit
        self._requests = requests

    def run_step(self) -> None:
        """Launch a step, and commit the one launched before."""
        before, self.in_flight = self.in_flight, None
        launched = None
        if before:
            if (ahead := self._assign_ahead(before)) and ahead.scheduled:  # else all running requests may end with it
                launched = self._launch(ahead)
            self._commit(before)
        if launched is None and self._requests:
            launched = self._launch(None)
        self.in_flight = launched

    @property
    def steps_in_flight(self) -> list[LaunchedStep]:
        return [self.in_flight] if self.in_flight else []

    def take(self) -> list[LaunchedStep]:
        """Return the step in flight, if there is one, and forget it."""
        steps, self.in_flight = self.steps_in_flight, None
        return steps


def assign_ahead(scheduler: Scheduler, step: LaunchedStep) -> Plan | None:
    """Plan what the sequences of the step in flight run next, before its tokens are known. None if a request needs
    these tokens on the host, or if blocks are short: the next step is then launched after this one's commit."""
    completed = [scheduled for scheduled in step.plan.scheduled if scheduled.completes]
    if any(scheduled.request.needs_tokens_on_host() for scheduled in completed):
        return None
    for scheduled in completed:
        for sequence, _ in scheduled.work:
            if sequence.finish_reason is None and not scheduled.request.ends_by_length(sequence):
                sequence.pending = True
    return scheduler.assign_ahead()
