"""The launch: a step is planned, written down and given to the runner; its tokens are not looked at yet."""

from __future__ import annotations

from collections.abc import Callable

from minipaged.contracts import Runner
from minipaged.engine.batch import LaunchedStep, Plan
from minipaged.engine.event_queue import EventQueue
from minipaged.engine.grammar import allowed_tokens
from minipaged.engine.invariants import check_exclusive_writes
from minipaged.engine.memory import Memory
from minipaged.engine.memory_use import memory_held
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.step_writer import StepWriters
from minipaged.params import EngineConfig


class Launcher:
    """Launches the steps of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        blocks: Memory,
        writers: StepWriters,
        runner: Runner,
        emit: EventQueue,
        clock: Callable[[], float],
    ) -> None:
        self.runner = runner
        self.step_number = 0
        """The number of the latest step."""
        self.debug = config.debug
        self._scheduler = scheduler
        self._blocks = blocks
        self._writers = writers
        self._emit = emit
        self._clock = clock

    def launch(self, ahead: Plan | None = None, lane: int = 0) -> LaunchedStep:
        """Launch the lane's next step. `ahead`: its plan, if that is already made."""
        started = self.begin()
        return self.hand_over(self._scheduler.schedule(ahead, lane), started)

    def begin(self) -> float:
        """Number the next step. Returns its start time, in seconds."""
        started = self._clock()
        self.step_number += 1
        self._emit.step_started(self.step_number)
        return started

    def hand_over(self, plan: Plan, started: float) -> LaunchedStep:
        """Write a planned step down and give it to the runner."""
        moves = self._blocks.take_moves()  # first: cached blocks that are copied from are available again
        self._emit.step_scheduled(self.step_number, memory_held(self._scheduler.running, self._blocks))
        if self.debug:
            check_exclusive_writes(plan.work(), self._blocks)
        writer = self._writers.of(plan.lane)
        step = writer.write(self.step_number, plan.rows, plan.owners(), moves, allowed_tokens(plan))
        for request in (scheduled.request for scheduled in plan.scheduled):
            if request.first_scheduled_time is None:
                request.first_scheduled_time = started
        return LaunchedStep(self.step_number, started, plan, self.runner.run(step))
