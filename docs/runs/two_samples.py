"""The run on the home page: two samples share a prompt, and part ways by copy-on-write (paper, Fig. 8)."""

from minipaged import SamplingParams
from minipaged.events import BlockCopied
from minipaged.stepper import Storyteller, record

model = Storyteller(
    [
        "Four score and seven years ago our fathers brought forth on this continent",
        "Four score and seven years ago our mothers crossed the wide and stormy sea",
    ]
)
with record("Two samples of one prompt", model.decode) as run:
    engine = model.engine(num_blocks=7, block_size=2)
    two = SamplingParams(n=2, max_tokens=4, seed=0)
    engine.add_request(model.encode("Four score and seven years ago our"), two)
    while engine.has_unfinished_requests():
        updates = engine.step()  # what is new of each request; of one that has ended, the whole output too
start = "block_copied"  # where the stepper begins

assert {completion.text.split()[0] for completion in updates[0].output.outputs} == {"fathers", "mothers"}
assert len([event for event in run.events if isinstance(event, BlockCopied)]) == 1
