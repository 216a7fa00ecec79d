"""Five tokens come and go, twice; the third time there is no block left."""

from dataclasses import replace

from docs.runs.museum import Stage, exhibit, greedy, note_on
from minipaged import InvariantViolation, contracts
from minipaged.events import BlocksFreed
from minipaged.stepper import record
from minipaged.tiers import reference_tier

part = exhibit("minus_one")["BlockAllocator"]


class Allocator(part, contracts.BlockAllocator):  # type: ignore[misc, valid-type]
    """The exhibit, with blocks freed one by one and no question asked, as where it shipped."""

    def free_many(self, blocks):
        for block in blocks:
            self.free(block)


text = "we hold these truths to"
stage = Stage(text)
with record("A five-token prompt, three times", stage.decode, watch=[part]) as run:
    engine = stage.start(run, replace(reference_tier(), block_allocator=Allocator), num_blocks=4, block_size=4)
    allocator = engine.blocks.allocator
    for name in "AB":
        engine.add_request(stage.encode(text), greedy(1), request_id=name)
        while engine.has_unfinished_requests():
            engine.step()
        counts = ", ".join(str(allocator.ref_count(block)) for block in range(4))
        says = f"This allocator says: {allocator.num_free} of 4 blocks are free, and the counts are {counts}."
        note_on(BlocksFreed, run, f"Nobody holds a block any more, so all 4 should be free. {says}")
    engine.add_request(stage.encode(text), greedy(1), request_id="C")
    with run.breaks(InvariantViolation):
        engine.step()

assert sorted(run.notes) == [8 - 1, 17 - 1], "the steps that the page names"
assert min(run.data()["beliefs"]) == 5 - 1, "and that from which on something stands in the blocks"
assert [allocator.ref_count(block) for block in range(4)] == [-1] * 4
