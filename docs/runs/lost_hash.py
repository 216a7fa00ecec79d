"""Three requests, one after the other, in a pool of three blocks."""

from docs.runs.museum import Stage, exhibit, greedy
from minipaged.events import PrefixReused
from minipaged.stepper import record

museum = exhibit("lost_hash")
prompts = {"A": "the cat sat", "B": "the cat drank milk slowly", "C": "drank milk quickly"}
stage = Stage(*prompts.values())
with record("Three requests, three blocks", stage.decode, watch=[museum["PrefixCache"]]) as run:
    engine = stage.start(run, num_blocks=3, block_size=2, enable_prefix_caching=True)
    museum["exchange"](engine)
    for name, prompt in prompts.items():
        engine.add_request(stage.encode(prompt), greedy(1), request_id=name)
        while engine.has_unfinished_requests():
            engine.step()

assert [event.blocks for event in run.events if isinstance(event, PrefixReused)] == [(0,), (1,)]
[read] = run.notes.values()
assert "of “the cat drank”" in read
