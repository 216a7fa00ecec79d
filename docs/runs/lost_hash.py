"""Three requests, one after the other, in a pool of three blocks."""

from docs.runs.museum import Stage, exhibit, greedy, note_on
from minipaged.events import BlockCached, PrefixReused, TokensComputed
from minipaged.stepper import record

museum = exhibit("lost_hash")
prompts = {"A": "the cat sat", "B": "the cat drank milk slowly", "C": "drank milk quickly"}
stage = Stage(*prompts.values())
with record("Three requests, three blocks", stage.decode, watch=[museum["PrefixCache"]]) as run:
    engine = stage.start(run, parts=museum["PARTS"], num_blocks=3, block_size=2, enable_prefix_caching=True)
    cache = engine.blocks.prefix_cache
    for name, prompt in prompts.items():
        engine.add_request(stage.encode(prompt), greedy(1), request_id=name)
        while engine.has_unfinished_requests():
            engine.step()
        if name == "B":
            assert cache._hash_of[0] == 0
            assert cache._tokens_of[0] == ()
            note_on(PrefixReused, run, "In the cache's book block 0 now has the hash 0 and no tokens.")
            [found], _ = cache.match(stage.encode(prompts["C"]))
            note_on(BlockCached, run, f"Asked for “{prompts['C']}”, the cache would now find block {found}.")

# What the page says of its steps.
assert [event.blocks for event in run.events if isinstance(event, PrefixReused)] == [(0,), (1,)]
assert [type(run.events[index]) for index in run.notes] == [PrefixReused, BlockCached, TokensComputed]
assert [index + 1 for index in run.notes] == [15, 17, 27]
assert "would now find block 1" in run.notes[16]
assert "For sequence C it looks for the keys and values of “drank milk” in block 1" in run.notes[26]
assert "reads those of “the cat drank milk”" in run.notes[26]
