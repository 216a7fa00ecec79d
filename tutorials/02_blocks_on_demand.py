# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 2. Blocks, block tables, allocation on demand

# %% [markdown]
# **What you will understand.** How PagedAttention keeps the keys and values of a sequence in blocks that lie anywhere
# in memory, how a *block table* finds them again, and why almost nothing is wasted (sections 4.1 and 4.2 of the paper).
# The code is minipaged's own, from `minipaged/reference/`.
#
# An operating system cuts memory into pages of one size, gives a process pages as it needs them, and keeps a page table
# that says where each one is. Here a *sequence* takes the place of the process, a *token* that of the byte, and a page
# is called a **block**: room for the keys and values of `block_size` tokens.
#
# | operating system | PagedAttention |
# |---|---|
# | process | sequence |
# | byte | token |
# | page | block |
# | page table | block table |
#
# ## The allocator
#
# All blocks have one size, so any free block is as good as any other, and there is no external fragmentation. The
# allocator is a list of those that are free.

# %%
from minipaged import OutOfBlocks
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable

allocator = BlockAllocator(num_blocks=8)
first, second = allocator.allocate(), allocator.allocate()
print(f"handed out {first} and {second}; {allocator.num_free} of {allocator.num_blocks} are free")
allocator.free(first)
assert allocator.allocate() == first  # the block freed last is handed out first

# %% [markdown]
# ## The block table
#
# A sequence sees its cache as *logical* blocks 0, 1, 2, … without gaps; the table says which *physical* block each of
# them is in. It takes a block only when its last one is full.
#
# **Predict.** A prompt has 7 tokens, a block has 4 slots. How many blocks will the table hold? And how many after one
# more token, and after two more?
#
# <details><summary>See</summary>
#
# **2 blocks, then 2, then 3** (`held`). The eighth token takes the last slot of the second block, the ninth begins a
# third one.
#
# </details>

# %%
table = BlockTable(block_size=4, allocator=allocator)
held = []  # blocks, each time
for num_new_tokens in (7, 1, 1):
    table.append(num_new_tokens)
    held.append(len(table.blocks))
    print(f"{table.num_tokens} tokens: blocks {list(table.blocks)}")

assert held == [2, 2, 3]

# %% [markdown]
# Nothing is reserved for tokens that may never come. At most `block_size - 1` slots of a sequence are empty, all in its
# last block.
#
# ## Two sequences at once
#
# Now the whole engine, which takes in requests, decides who runs and calls the model, serves two of them, with a small
# model that knows two texts by heart: where blocks are the subject, its words will do. **Every frame below is recorded
# from the code that ran for this page.** On one side are the source lines that ran, with the one that did it lit; on
# the other the pool of blocks, the block tables and the tokens.
#
# A request can have several sequences (that is [tutorial 6](06_copy_on_write.py)); here each has one. A letter is a
# sequence, on all of these pages as in `make demo`: here A is that of request A, and B that of B. ×1 says that one
# sequence holds a block. A request that waits has no block yet; the scheduler, which decides who runs, is the subject
# of [tutorial 5](05_continuous_batching.py).
#
# Watch two things. A block of a request need not lie beside its others: both requests take from one pool, whenever they
# need to (<a href="?step=17#stepper-1">step 17</a>). And a sequence that ends gives all its blocks back at once, for
# whoever comes next (<a href="?step=27#stepper-1">step 27</a>).

# %%
from minipaged import SamplingParams
from minipaged.stepper import Storyteller, record

model = Storyteller(
    [
        "Four score and seven years ago our fathers brought forth on this continent",
        "It was the best of times it was the worst of times",
    ]
)
greedy = SamplingParams(max_tokens=4, temperature=0)

with record("Two requests, one pool", model.decode) as run:
    engine = model.engine(num_blocks=8, block_size=4)
    engine.add_request(model.encode("Four score and seven years ago our"), greedy, request_id="A")
    engine.step()
    engine.add_request(model.encode("It was the"), greedy, request_id="B")
    while engine.has_unfinished_requests():
        engine.step()
run

# %% [markdown]
# The run as data holds no secret: these are the events of the [events page](../docs/events.md). Each pair of brackets
# is one sequence that needed slots, or that ended; `()` is one whose last block had room.

# %%
from minipaged.events import BlocksFreed, TokensComputed

taken = [event.new_blocks for event in run.events if isinstance(event, TokensComputed)]
given_back = [event.blocks for event in run.events if isinstance(event, BlocksFreed)]
print("taken:     ", *taken)
print("given back:", *given_back)

assert sum(map(len, taken)) == sum(map(len, given_back))
assert (run.events[17 - 1].new_blocks, run.events[27 - 1].blocks) == ((3,), (0, 1, 3))
assert engine.blocks.allocator.num_free == 8

# %% [markdown]
# ## What it saves
#
# Serve random requests of the lengths of [tutorial 1](01_contiguous_memory.py), with minipaged's engine and blocks of
# 16 tokens. It counts in every step what the slots are used for: its own blocks, and what contiguous pieces of the
# longest length would have held for the same sequences.
#
# **Predict.** What share of the slots taken will hold a token?
#
# <details><summary>See</summary>
#
# **99 %** (`stats.paged.share_of_tokens()`, give or take 3). Only the last block of a sequence has empty slots, half of
# one on average.
#
# </details>

# %%
import random

from minipaged.stepper.pictures import Bars

r = random.Random(0)
counting = Storyteller([" ".join(str(number) for number in range(2048))])
engine = counting.engine(num_blocks=256, block_size=16, max_model_len=2048)
for _ in range(24):
    prompt, output = 1 + int(r.expovariate(1 / 161)), 1 + int(r.expovariate(1 / 338))
    engine.add_request(range(min(prompt, 1000)), SamplingParams(max_tokens=min(output, 1000), temperature=0))
while engine.has_unfinished_requests():
    engine.step()

stats = engine.current_stats()
print(f"paged: {stats.paged.share_of_tokens():.1%} of the slots taken hold a token")
print(f"contiguous, longest: {stats.contiguous.share_of_tokens():.1%}")
assert stats.paged.share_of_tokens() > 0.95
assert stats.contiguous.share_of_tokens() < 0.25

# %%
Bars(
    [
        (name, [("tokens", use.tokens), ("reserved", use.reserved), ("internal", use.internal_fragmentation)])
        for name, use in [("blocks of 16", stats.paged), ("longest pieces", stats.contiguous)]
    ],
    {"tokens": "full", "reserved": "lines", "internal": "dots"},
    percent=True,
)

# %% [markdown]
# The two bars have one scale: so much less memory is held for the same tokens. The paper reports about 96 % for vLLM.
# (In tutorial 1 the longest pieces came to 20 %: that was a share of the whole memory, free slots too, and of other
# requests.)
#
# ## An allocator to change
#
# Here is a whole allocator. A block may have several holders: two samples of one prompt share its blocks, until one of
# them writes (`copy_on_write`). On this page the code can be changed: press the button, change something, run it, and
# step through what *your* version did. (In the notebook: run the cell again.) Try, one at a time:
#
# - `pop(0)` in place of `pop()`. Which block does the second request get after the first one is finished?
# - A `copy_on_write` that forgets `self.holders[block] -= 1`. Which invariant is broken, and at which step is it seen?
# - A `free` that hands a block back while somebody still holds it.

# %% tags=["editable"]
from minipaged import BlockNotAllocated, OutOfBlocks, SamplingParams
from minipaged.stepper import Reciter, record


class Allocator:
    """A list of the free blocks, and for each block how many hold it."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.holders = [0] * num_blocks
        self.free_blocks = list(reversed(range(num_blocks)))

    @property
    def num_free(self):
        return len(self.free_blocks)

    def allocate(self):
        if not self.free_blocks:
            raise OutOfBlocks("every block is held")
        block = self.free_blocks.pop()
        self.holders[block] = 1
        return block

    def share(self, block):
        self.check_held(block)
        self.holders[block] += 1

    def free(self, block):
        self.check_held(block)
        self.holders[block] -= 1
        if self.holders[block] == 0:
            self.free_blocks.append(block)

    def ref_count(self, block):
        return self.holders[block]

    def copy_on_write(self, block):
        self.check_held(block)
        if self.holders[block] == 1:
            return block
        copy = self.allocate()
        self.holders[block] -= 1
        return copy

    def check_held(self, block):
        if self.holders[block] == 0:
            raise BlockNotAllocated(f"nobody holds block {block}")


model = Reciter(  # a Storyteller that checks every read
    [
        "Four score and seven years ago our fathers brought forth on this continent",
        "Four score and seven years ago our mothers crossed the wide and stormy sea",
    ]
)
with record("An allocator at work", model.decode, watch=[Allocator]) as run:
    engine = model.engine(num_blocks=8, block_size=4, allocator=Allocator)
    prompt = model.encode("Four score and seven years ago our")
    engine.add_request(prompt, SamplingParams(n=2, max_tokens=3))
    engine.step()
    engine.add_request(prompt[:3], SamplingParams(max_tokens=6))
    while engine.has_unfinished_requests():
        engine.step()
run

# %% [markdown]
# ## A block table to change
#
# And here are the two methods that make a block table: one takes blocks, the other finds a token's slot. The rest is
# the reference's. In each step the model looks up every token that was written before. Try:
#
# - A block one token early: `>=` in place of `==`, and `- 1` at the end of that line. What does it waste?
# - `//` in place of `%`. Which invariant is broken, and what became of the other tokens of that block?

# %% tags=["editable"]
from minipaged import SamplingParams
from minipaged.reference.block_table import BlockTable
from minipaged.stepper import Reciter, record


class Table(BlockTable):
    """Enough for sequences that share nothing."""

    def append(self, num_new_tokens):
        for _ in range(num_new_tokens):
            if self._num_tokens == len(self._blocks) * self.block_size:  # the last block is full
                self._blocks.append(self._allocator.allocate())
            self._num_tokens += 1
        return []  # nothing has to be copied

    def slot_mapping(self, start, stop):
        slots = []
        for position in range(start, stop):
            block = self._blocks[position // self.block_size]
            slots.append(block * self.block_size + position % self.block_size)
        return slots


model = Reciter(
    [
        "Four score and seven years ago our fathers brought forth on this continent",
        "It was the best of times it was the worst of times",
    ]
)
with record("A block table at work", model.decode, watch=[Table]) as run:
    engine = model.engine(num_blocks=8, block_size=4, block_table=Table)
    engine.add_request(model.encode("Four score and seven years ago our"), SamplingParams(max_tokens=4), request_id="A")
    engine.step()
    engine.add_request(model.encode("It was the"), SamplingParams(max_tokens=4), request_id="B")
    while engine.has_unfinished_requests():
        engine.step()
run

# %% [markdown]
# ## The price
#
# The keys and values of a sequence are no longer side by side, so attention has to look up where each block is. That is
# what the paper's kernel does, and it is the subject of the next tutorials.
#
# ## Exercise
#
# The model asks for *slots*: slot `block * block_size + offset`. Write `slot(table, position)`, which finds the slot of
# one position, and check it against `table.slot_mapping(start, stop)`. Then make the pool too small and see what
# `append` does: which invariant does the table keep?


# %% tags=["solution"]
def slot(table: BlockTable, position: int) -> int:
    logical, offset = divmod(position, table.block_size)
    return table.blocks[logical] * table.block_size + offset


assert [slot(table, position) for position in range(9)] == table.slot_mapping(0, 9)

small = BlockTable(block_size=4, allocator=BlockAllocator(num_blocks=2))
small.append(8)
try:
    small.append(1)
except OutOfBlocks as error:
    print(f"OutOfBlocks: {error}")
assert small.num_tokens == 8  # atomic-failure: a call that raises leaves everything as it was
