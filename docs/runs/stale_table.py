"""Two requests compute one prompt at the same time; a third is given a block that one of them still points to."""

from dataclasses import replace

from docs.runs.museum import Stage, exhibit, greedy, note_on
from minipaged.events import BlockDeduplicated, TokenGenerated
from minipaged.stepper import record
from minipaged.tiers import reference_tier

part = exhibit("stale_table")["BlockTable"]
stage = Stage("the cat sat", "a dog barked")
with record("One block computed twice", stage.decode, watch=[part]) as run:
    tier = replace(reference_tier(), block_table=part)
    engine = stage.start(run, tier, num_blocks=8, block_size=2, enable_prefix_caching=True)
    for name in "AB":
        engine.add_request(stage.encode("the cat sat"), greedy(4), request_id=name)
    engine.step()
    [exchanged] = [event for event in run.events if isinstance(event, BlockDeduplicated)]
    table = engine.scheduler.running[1].sequences[0].table
    holders = engine.blocks.allocator.ref_count(exchanged.own)
    assert holders == 0
    own, now = exchanged.own, " and ".join(map(str, table.blocks))
    says = f"The table of sequence B itself still says blocks {now}; nobody holds a reference on block {own} any more."
    note_on(BlockDeduplicated, run, says)
    engine.add_request(stage.encode("a dog barked"), greedy(4), request_id="C")
    engine.step()

assert table.blocks[0] == exchanged.own == engine.scheduler.running[2].sequences[0].table.blocks[0]
assert "For sequence B it looks for the keys and values of “the cat” in block 2" in run.notes[19 - 1]
assert "reads those of “a dog”" in run.notes[19 - 1]
assert run.events[11 - 1] is exchanged, "the step that the page names, as it does 19"
words = [event.token_id for event in run.events if isinstance(event, TokenGenerated)]
assert words[0] == words[1]  # of A and B, which have the same prompt
assert words[2] != words[3]
