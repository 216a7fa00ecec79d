"""One request that grows by one token a step, until a block is full."""

from dataclasses import replace

from docs.runs.museum import Stage, exhibit, greedy, note_on
from minipaged.events import StepFailed, TokensComputed
from minipaged.stepper import record
from minipaged.tiers import reference_tier

part = exhibit("remainder")["BlockTable"]
text = "Four score and seven years ago our"
stage = Stage(text, "fathers brought forth")
with record("The ninth token", stage.decode, watch=[part]) as run:
    engine = stage.start(run, replace(reference_tier(), block_table=part), num_blocks=4, block_size=4)
    engine.add_request(stage.encode(text), greedy(6), request_id="A")
    with run.breaks(IndexError):
        while engine.has_unfinished_requests():
            engine.step()

last = next(event for event in reversed(run.events) if isinstance(event, TokensComputed))
assert isinstance(run.events[-1], StepFailed)
assert last.num_tokens == 9
assert not last.new_blocks
assert run.events[13 - 1] is last, "the step that the page names"
note_on(TokensComputed, run, "The ninth token has position 8, in logical block 2: the table of sequence A ends with 1.")
