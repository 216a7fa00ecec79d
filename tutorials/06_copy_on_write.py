# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 6. Reference counts, copy-on-write, parallel sampling

# %% [markdown]
# **What you will understand.** How several continuations of one prompt share its blocks, who may write into a shared
# block, and what that saves (section 4.4 of the paper, Fig. 8). An operating system does the same when a process forks:
# parent and child share their pages until one of them writes.
#
# Ask a model for three suggestions instead of one, and it samples three times from the same prompt. The keys and values
# of a prompt depend on nothing but the prompt. They are computed once; why should they be kept three times?
#
# ## What goes wrong if they are just shared
#
# Take the example of the paper: a prompt of seven tokens, blocks of four, two samples A and B. Block 0 is full, block 1
# has one free slot. Instead of keys and values we put words into the pool; that makes it easier to see whose they are.

# %%
pool = [["Four", "score", "and", "seven"], ["years", "ago", "our", ""], ["", "", "", ""], ["", "", "", ""]]
tables = {"A": [0, 1], "B": [0, 1]}  # both tables name the same blocks


def text(name: str) -> str:
    return " ".join(word for block in tables[name] for word in pool[block]).strip()


pool[tables["A"][1]][3] = "fathers"  # A's next token goes into the free slot of its last block
pool[tables["B"][1]][3] = "mothers"  # and so does B's
print("A:", text("A"))
print("B:", text("B"))
assert text("A") == text("B") == "Four score and seven years ago our mothers"

# %% [markdown]
# A's token is gone: B wrote over it. And A would never notice; it would go on with the wrong keys and values. The rule
# that must hold is **exclusive-write**: a slot is written only in a block that nobody else holds. To keep it, we have
# to know how many hold a block.
#
# ## Reference counts
#
# So the allocator counts. `allocate` hands out a block with a count of 1; `share` adds one; `free` takes one off, and
# at 0 the block is free again. This is the code:

# %%
import inspect
from textwrap import dedent

from minipaged.reference.block_allocator import BlockAllocator

for method in (BlockAllocator.allocate, BlockAllocator.share, BlockAllocator.free):
    print(dedent(inspect.getsource(method)))

# %% [markdown]
# And by hand:

# %%
from minipaged.stepper.pictures import Cells

allocator = BlockAllocator(num_blocks=4)
rows = []


def note(what: str) -> None:
    """What the counts are after `what`, for the picture below."""
    counts = [allocator.ref_count(block) for block in range(allocator.num_blocks)]
    kinds = {0: "free", 1: "held by one"}
    rows.append((what, [(f"{count}", kinds.get(count, "shared")) for count in counts]))


prompt = [allocator.allocate(), allocator.allocate()]
note("A's prompt")
for block in prompt:
    allocator.share(block)
note("B shares it")
allocator.free(prompt[1])
note("one lets go of 1")
allocator.free(prompt[1])
note("the other too")

fills = {"held by one": "dots", "shared": "lines", "free": "empty"}
assert allocator.ref_count(0) == 2
assert allocator.num_free == 3
Cells(rows, fills)

# %% [markdown]
# Each column is a block, 0 to 3, and the number in it its count. After the last `free` block 1 is free; block 0 still
# has two holders. Whoever lets go need not know of the others.
#
# ## Copy-on-write
#
# Before writing into a block, a sequence asks for the block to write to. Here is all of it, from the source:

# %%
print(dedent(inspect.getsource(BlockAllocator.copy_on_write)))

# %% [markdown]
# Alone with the block: go ahead. In company: take a new block, and give up the reference on the old one. The caller
# then copies the contents.
#
# **Predict.** A and B hold blocks 0 and 1, and both want to write their eighth token into block 1. How many blocks are
# copied, one or two?
#
# <details><summary>See</summary>
#
# **1 block** (`copies`). Whoever comes second is alone with the old one.
#
# </details>

# %%
allocator = BlockAllocator(num_blocks=4)
prompt = [allocator.allocate(), allocator.allocate()]
for block in prompt:
    allocator.share(block)
pool = [["Four", "score", "and", "seven"], ["years", "ago", "our", ""], ["", "", "", ""], ["", "", "", ""]]
tables = {"A": list(prompt), "B": list(prompt)}
rows = []
note("both share")
copies = 0
for name, word in (("A", "fathers"), ("B", "mothers")):
    source = tables[name][1]
    target = allocator.copy_on_write(source)
    if target != source:
        copies += 1
        pool[target] = list(pool[source])
        tables[name][1] = target
    pool[target][3] = word
    print(f"{name} writes into block {target}: {text(name)}")
    note(f"{name} has written")

assert copies == 1
assert text("A").endswith("our fathers")
assert text("B").endswith("our mothers")
Cells(rows, fills)

# %% [markdown]
# One. A comes first, finds company, and leaves with a copy. Then B is alone with block 1 and writes in place. With n
# holders the first n - 1 copy, and the last does not.
#
# Block 0 is full, so nobody will ever write into it, and it stays shared to the end. Of each sequence only its last
# block can ever be copied, and that once.
#
# ## A fork of a block table
#
# The block table does this by itself. `fork` shares every block of the parent. `append` asks `copy_on_write` when the
# next slot is in a block that others hold, and returns which block to copy to where.

# %%
from minipaged.reference.block_table import BlockTable

allocator = BlockAllocator(num_blocks=8)
parent = BlockTable(block_size=4, allocator=allocator)
parent.append(7)
child = parent.fork()
print("forked:         ", list(parent.blocks), list(child.blocks), "with", 8 - allocator.num_free, "blocks held")
assert list(child.blocks) == list(parent.blocks)
assert allocator.num_free == 6

print("parent appends: ", parent.append(1), list(parent.blocks))
print("child appends:  ", child.append(1), list(child.blocks))
assert list(parent.blocks) == [0, 2]
assert list(child.blocks) == [0, 1]

# %% [markdown]
# **Predict.** And if the prompt had eight tokens, so that its last block was full? How many blocks are copied, when
# three samples write one token each?
#
# <details><summary>See</summary>
#
# **0 blocks** (`sum(map(len, pairs))`). The ninth token begins a new block.
#
# </details>

# %%
full = BlockTable(block_size=4, allocator=BlockAllocator(num_blocks=8))
full.append(8)
samples = [full, full.fork(), full.fork()]
pairs = [sample.append(1) for sample in samples]
print("copies:", pairs, "tables:", [list(sample.blocks) for sample in samples])
assert pairs == [[], [], []]

# %% [markdown]
# Nothing is copied, whatever the number of samples. Everybody begins a block of their own, because the next slot is not
# in a shared one.
#
# ## Three samples on the engine
#
# Now the whole engine: one request with `n=3`. Its prompt runs once, and three tokens are drawn from what it predicts.
# Then the first sequence is forked twice. Watch the counts (×3 from <a href="?step=7#stepper-1">step 7</a> on), and
# block 1, which is copied twice, for three samples (<a href="?step=13#stepper-1">step 13</a> and
# <a href="?step=15#stepper-1">step 15</a>).

# %%
from minipaged import SamplingParams
from minipaged.stepper import Storyteller, record

model = Storyteller(
    [
        "Four score and seven years ago our fathers brought forth on this continent a new nation",
        "Four score and seven years ago our mothers crossed the wide and stormy sea in a small boat",
        "Four score and seven years ago our children had not yet learned to read or write a word",
    ]
)
with record("Three samples of one prompt", model.decode) as run:
    engine = model.engine(num_blocks=12, block_size=4)
    prompt_tokens = model.encode("Four score and seven years ago our")
    engine.add_request(prompt_tokens, SamplingParams(n=3, max_tokens=6, seed=1))
    while engine.has_unfinished_requests():
        updates = engine.step()  # what is new of each request; of one that has ended, the whole output too
for completion in updates[0].output.outputs:
    print(f"…{completion.text}")
run

# %% [markdown]
# The events say what it came to:

# %%
from minipaged.events import BlockCopied, SequenceForked, TokensComputed

copied = [event for event in run.events if isinstance(event, BlockCopied)]
taken = sum(len(event.new_blocks) for event in run.events if isinstance(event, TokensComputed)) + len(copied)
print("forks: ", len([event for event in run.events if isinstance(event, SequenceForked)]))
print("copies:", [(event.source, event.destination, event.holders) for event in copied], "(source, copy, holders)")
print("blocks:", taken, "for three sequences of 3 blocks each")

assert isinstance(run.events[7 - 1], SequenceForked)
assert copied == [run.events[13 - 1], run.events[15 - 1]]
assert [event.holders for event in copied] == [3, 2]  # and the third sample wrote in place
assert taken == 1 + 3 * 2  # the full block of the prompt once, everything else three times

# %% [markdown]
# ## What it saves
#
# The paper measures sharing by the *blocks saved*: of the blocks that there would be without sharing, the share that
# need not be there. Without sharing every entry of a block table would be a block of its own, so
#
#     saved = (entries in all block tables - different blocks) / entries in all block tables
#
# summed over the steps. The engine counts both.

# %%
stats = engine.current_stats()
print(f"{stats.table_entry_steps} entries, {stats.block_steps} blocks: {stats.share_saved:.1%} saved")
assert stats.share_saved == 1 - stats.block_steps / stats.table_entry_steps

# %% [markdown]
# That is much, because the prompt is long beside what is generated. What is it for requests as people make them? For
# its Alpaca workload (instructions, on average 19 tokens in and 58 out) the paper reports 6.1 to 9.8 % saved by
# parallel sampling, and for ShareGPT (conversations, 161 in and 338 out) 16.2 to 30.5 % (Fig. 15). Its requests come
# from data sets. Here are random ones with the same mean lengths, in blocks of 16; a model that knows a single word
# will do.
#
# **Predict.** Does the share saved grow or shrink with the number of samples? Where does it end?
#
# - it shrinks, to nothing
# - it grows, up to the prompt's share of a sequence
# - it grows, up to everything
#
# <details><summary>See</summary>
#
# **it grows, up to the prompt's share of a sequence** (`shares[(19, 58), 2] < shares[(19, 58), 4] < shares[(19, 58), 6]
# < 19 / (19 + 58)`). The prompt is held once instead of n times; what each sample says is its own.
#
# </details>

# %%
import random

from minipaged.stepper.pictures import Bars

one_word = Storyteller(["and"])


def saved(n: int, mean_prompt: int, mean_output: int) -> float:
    """The share of blocks saved in serving 16 requests of n samples each."""
    r = random.Random(0)
    engine = one_word.engine(num_blocks=4096, block_size=16, max_model_len=4096)
    for _ in range(16):
        prompt, output = 1 + int(r.expovariate(1 / mean_prompt)), 1 + int(r.expovariate(1 / mean_output))
        engine.add_request([0] * prompt, SamplingParams(n=n, max_tokens=output, temperature=0))
    while engine.has_unfinished_requests():
        engine.step()
    return engine.current_stats().share_saved


shares = {(lengths, n): saved(n, *lengths) for lengths in ((19, 58), (161, 338)) for n in (2, 4, 6)}
for ((prompt, output), n), share in shares.items():
    print(f"{prompt:>3} in, {output:>3} out, {n} samples: {share:.1%} saved")

assert shares[(19, 58), 2] < shares[(19, 58), 4] < shares[(19, 58), 6] < 0.2
assert shares[(161, 338), 2] < shares[(161, 338), 4] < shares[(161, 338), 6] < 0.4

# %%
Bars(
    [
        (f"{lengths[0]} in, {lengths[1]} out, {n} samples", [("held", 1 - s), ("saved", s)])
        for (lengths, n), s in shares.items()
    ],
    {"held": "lines", "saved": "empty"},
    percent=True,
)

# %% [markdown]
# It grows: the first sample holds the prompt's full blocks, and each further one saves them once more. It cannot grow
# beyond the share that prompts have in the tables, because what is generated is nobody else's. (The paper's requests
# have the same mean lengths as these and another spread, so its figures need not be the same.)
#
# Where samples have more in common than their prompt, more can be saved: that is beam search, the subject of the
# [next tutorial](07_beam_search.py).
#
# ## Exercise
#
# A request with `n` samples, a prompt of `p` tokens and `t` new tokens each runs in a pool with blocks of `b`. Write
# `most_blocks(n, p, t, b)`: how many blocks does it hold at its end? Remember that the last token is chosen and never
# run. Then compare with `engine.stats.peak_blocks_used` for all the cases you can think of.


# %% tags=["solution"]
def most_blocks(n: int, p: int, t: int, b: int) -> int:
    full = p // b  # of the prompt: shared by all, to the end
    each = -(-(p + t - 1) // b)  # rounded up
    if t == 1:
        return each  # the prompt has run, and nobody has written
    return full + n * (each - full)


for n in (1, 2, 3):
    for p in (1, 3, 4, 5, 8):
        for t in (1, 2, 5):
            engine = one_word.engine(num_blocks=32, block_size=4)
            engine.add_request([0] * p, SamplingParams(n=n, max_tokens=t, temperature=0))
            while engine.has_unfinished_requests():
                engine.step()
            assert engine.stats.peak_blocks_used == most_blocks(n, p, t, 4), (n, p, t)
# The partly filled block of the prompt is not among the shared: n - 1 samples have a copy of it, and one the original.
