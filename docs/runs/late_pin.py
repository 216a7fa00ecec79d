"""A block goes down to the only page of the floor, and should come back; three blocks are in the pool."""

from docs.runs.museum import Stage, exhibit, greedy, note_on
from minipaged.events import BlockEvicted, BlocksLoaded
from minipaged.stepper import record

museum = exhibit("late_pin")


class OnePage(museum["BlockManager"]):  # type: ignore[misc]
    """The exhibit's, with a small floor."""

    NUM_PAGES = 1


class Lift(Stage, museum["Runner"]):  # type: ignore[misc]
    """The stage, on which blocks go down and up."""


prompts = {"A": "the cat", "B": "a dog barked loudly all night", "C": "the cat purred"}
stage = Lift(*prompts.values())
with record("Down, and up again", stage.decode, watch=[museum["Floor"], museum["BlockManager"]]) as run:
    parts = {"memory": OnePage}
    engine = stage.start(run, parts=parts, num_blocks=3, block_size=2, enable_prefix_caching=True)
    for name, prompt in prompts.items():
        engine.add_request(stage.encode(prompt), greedy(1), request_id=name)
        while engine.has_unfinished_requests():
            engine.step()
down = [i for i, event in enumerate(run.events) if isinstance(event, BlockEvicted)][:2]
run.notes[down[0]] = "Its content is to go down to page 0 of the floor."
run.notes[down[1]] = "Its content is to go down, too: to page 0, the only page."
note_on(BlocksLoaded, run, "Here it is no other engine: what is on page 0 of the floor is to come up.")

# What the page says of its steps.
assert [i + 1 for i in down] == [15, 28]
assert isinstance(run.events[29 - 1], BlocksLoaded)
[(step, note)] = [(i + 1, note) for i, note in run.notes.items() if "reads those of" in note]
assert step == 31
assert "For sequence C it looks for the keys and values of “the cat” in block 2" in note
assert "reads those of “a dog barked loudly all night”" in note
