"""Recovery from an error within a step: no request is lost, no block leaks, and the engine goes on."""

from __future__ import annotations

from collections.abc import Iterable

from minipaged.engine.memory import Memory
from minipaged.engine.scheduler import Scheduler
from minipaged.engine.sequence import Request, RequestState
from minipaged.engine.step_writer import StepWriters


def start_over(requests: Iterable[Request], scheduler: Scheduler, blocks: Memory, writer: StepWriters) -> list[Request]:
    """Drop K/V that may be half written: every request that held some waits to be recomputed from its tokens.

    `requests`: all that have not ended; the error may have left some of them in neither queue. Returns those whose
    blocks were dropped.
    """
    blocks.moves_lost()
    writer.forget()
    requests = scheduler.let_all_wait(requests)
    by_state = sorted(requests, key=lambda request: request.state is RequestState.SWAPPED)
    dropped = [request for request in by_state if request.state is not RequestState.WAITING]
    for request in dropped:
        for sequence in request.sequences:
            blocks.free(sequence)
            sequence.pending = False
        request.state = RequestState.WAITING
    return dropped
