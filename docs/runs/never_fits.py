"""A request that outgrows the pool, and one that waits behind it."""

from contextlib import suppress

from docs.runs.museum import Stage, exhibit, greedy
from minipaged import InvariantViolation
from minipaged.events import StepFailed, StepStarted
from minipaged.stepper import record

museum = exhibit("never_fits")
stage = Stage("tell me everything", "and then some more", "what time is it")
with record("Three blocks, and an answer that needs five", stage.decode, watch=[museum["BlockManager"]]) as run:
    engine = stage.start(run, parts=museum["PARTS"], num_blocks=3, block_size=2)
    engine.add_request(stage.encode("tell me everything"), greedy(7), request_id="long")
    with suppress(InvariantViolation):
        while engine.has_unfinished_requests():
            engine.step()
    engine.add_request(stage.encode("what time is it"), greedy(2), request_id="short")
    for _ in range(2):
        with run.breaks(InvariantViolation):
            engine.step()

assert run.events[20 - 1] == StepStarted(5), "the step that the page names"
assert len([event for event in run.events if isinstance(event, StepFailed)]) == 3
assert engine.unfinished_requests == ["long", "short"]
