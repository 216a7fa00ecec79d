"""Two requests decode beside each other; a third holds a block of the first, and is not among those that decode."""

from docs.runs.museum import Stage, exhibit, greedy, note_on
from minipaged.events import PrefixReused
from minipaged.stepper import record

museum = exhibit("shared_read")


class Reader(Stage, museum["SharedReading"]):  # type: ignore[misc]
    """The stage, which reads as the exhibit does."""


stage = Reader("the cat sat", "a dog barked", "the cat sat on the mat")
with record("Two that decode, and one that does not yet", stage.decode, watch=[museum["SharedReading"]]) as run:
    engine = stage.start(run, num_blocks=8, block_size=2, enable_prefix_caching=True)
    for name, prompt in {"A": "the cat sat", "B": "a dog barked"}.items():
        engine.add_request(stage.encode(prompt), greedy(4), request_id=name)
    engine.step()
    engine.add_request(stage.encode("the cat sat on the mat"), greedy(1), request_id="C")
    engine.step()
    [shared] = engine.scheduler.running[0].sequences[0].table.blocks[:1]
    note_on(PrefixReused, run, f"Two sequences hold block {shared} now: A and C. Two sequences decode: A and B.")

# What the page says of its steps.
assert shared == 0
assert isinstance(run.events[19 - 1], PrefixReused)
[(step, note)] = [(i + 1, note) for i, note in run.notes.items() if "reads those of" in note]
assert step == 20
assert "For sequence B it looks for the keys and values of “a dog” in block 0, and reads those of “the cat”" in note
