# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 21. Not every layer remembers

# %% [markdown]
# **What you will understand.** In many newer models most layers see only a window of the last tokens. You will see what
# becomes of the blocks that a window has passed; why layers are put into groups with a block table each; how much
# memory a sequence still needs; why a prefix hit needs only the last window of such layers; and how one missing block
# can make a hit impossible. The paper's models have no windows, so the paper has none of this. Gemma 2 and 3, gpt-oss
# and Ministral have windows.
#
# ## A window
#
# In a layer with a *window* of w, a token sees itself and the w - 1 tokens before it. Other layers see everything, as
# in the paper. Here is one token, at position 8, that attends in a layer with a window of 4. It attends twice: once
# with all keys and values there, and once when those of positions 0 to 4 have been destroyed.

# %%
import numpy as np

from minipaged.reference.attention import paged_attention
from minipaged.reference.kv_cache import KVCache

rng = np.random.default_rng(0)
keys, values = rng.standard_normal((2, 9, 1, 4)).astype(np.float32)  # [tokens, kv_heads, head_dim] each
query = rng.standard_normal((1, 1, 4)).astype(np.float32)  # [tokens, heads, head_dim]
tables, query_start, lens = np.array([[0, 1, 2, 3, 4]]), np.array([0, 1]), np.array([9])


def attend(window, destroyed):
    """What the token at position 8 attends to, with NaN in place of the keys and values of the first positions."""
    cache = KVCache(num_layers=1, num_blocks=5, block_size=2, num_kv_heads=1, head_dim=4)
    cache.write(0, np.arange(9), keys, values)  # layer 0, slots 0 to 8
    nothing = np.full((destroyed, 1, 4), np.nan, np.float32)
    cache.write(0, np.arange(destroyed), nothing, nothing)
    return paged_attention(query, cache, 0, tables, query_start, lens, 0.5, window)


print("window of 4, all there:   ", attend(4, 0))
print("window of 4, 5 destroyed: ", attend(4, 5))
print("sees all, 5 destroyed:    ", attend(None, 5))

assert np.array_equal(attend(4, 0), attend(4, 5))
assert np.isnan(attend(None, 5)).all()
assert np.isnan(attend(4, 6)).all()  # position 5 is in the window

# %% [markdown]
# The window's answer is the same, to the last bit. No later token sees these positions either, because windows only
# move on. So their memory could be used for something else, if no other layer needed it.
#
# ## A table with holes
#
# A block holds the keys and values of some tokens *in some layers*. Layers that see the same tokens can share blocks.
# Layers that do so are a *group*, and each group has a block table of its own. All groups take blocks from one pool.
#
# [`GroupedTable`](../minipaged/engine/grouped_table.py) is such a set of tables. Here it has two groups: one sees
# everything, the other has a window of 4. Blocks have 2 slots. Eight tokens have been computed, and the next one will
# be at position 8.
#
# **Predict.** Which two logical blocks can the group with the window give back now?
#
# <details><summary>See</summary>
#
# **0 and 1** (`[entry // 2 for entry, _ in passed]`). Position 8 sees positions 5 to 8. Position 4 is not seen, but it
# lies in block 2 with position 5, so block 2 stays.
#
# </details>

# %%
from minipaged.engine.grouped_table import GroupedTable
from minipaged.events import HOLE
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.stepper.pictures import Cells

allocator = BlockAllocator(num_blocks=10)
table = GroupedTable(block_size=2, allocator=allocator, windows=(None, 4))
table.append(8)
passed = table.give_back(8)
print("entries:", table.entries)
print(f"given back: {passed}; {allocator.num_free} of 10 blocks are free")


def drawn(entries):
    """A table with two groups as a picture."""
    rows = [
        (name, [("", "hole") if block == HOLE else (str(block), "block") for block in entries[group::2]])
        for group, name in enumerate(("sees all", "window 4"))
    ]
    return Cells(rows, {"block": "lines", "hole": "empty"})


assert allocator.num_free == 4

# %%
drawn(table.entries)

# %% [markdown]
# The entries of both groups stand in one list: those of logical block 0, then those of block 1, and so on. `give_back`
# leaves a *hole* in place of a block. The holes keep their places, so that position p still belongs to logical block
# `p // block_size`.
#
# ### When to give back
#
# A step may compute many tokens of a prompt at once. Each of them has a window of its own, and the *first* one sees
# furthest back. So while a step runs, a group holds a window and everything that the step computes. Blocks are given
# back when the step is done, for the token that comes next.
#
# **Predict.** A prompt of 24 tokens is computed, with a window of 4 and blocks of 2. How many blocks does the group
# with the window hold at most, if one step computes all 24 tokens? And if each step computes 6?
#
# <details><summary>See</summary>
#
# **12 blocks, and 5** (`at_most`). A long step undoes what the window saves, until it is over. With 6 tokens a step,
# the first of them sees 3 tokens before it. Those 9 tokens touch 5 blocks.
#
# </details>

# %%
at_most = []
for chunk in (24, 6):
    one_group, most = GroupedTable(2, BlockAllocator(12), (4,)), 0
    for start in range(0, 24, chunk):
        one_group.append(chunk)
        most = max(most, len(one_group.blocks))
        one_group.give_back(start + chunk)
    at_most.append(most)
    print(f"{chunk} tokens a step: at most {most} blocks; {len(one_group.blocks)} in the end")

# %% [markdown]
# The engine has to know this number before it admits a request. Otherwise it could admit two requests that do not fit
# together. [`blocks_alone`](../minipaged/engine/grouped_memory.py) calculates the number from the longest possible
# step:

# %%
from minipaged.engine.grouped_memory import blocks_alone

print(blocks_alone((4,), num_tokens=24, block_size=2, at_once=6), "blocks are promised")

assert blocks_alone((4,), 24, 2, 6) == at_most[1]

# %% [markdown]
# ## Groups of one size
#
# Gemma 3 has a layer that sees everything after every five that have a window of 512 or 1,024. Take 26 layers: 4 see
# everything, and 22 have a window. Two groups would be natural. But then a block of the second group would be five and
# a half times as large as one of the first, and one pool cannot serve both. So all groups get the same number of
# layers: as many as the rarest kind has.
#
# **Predict.** How many groups do the 26 layers make? They have room for more than 26 layers: for how many more?
#
# <details><summary>See</summary>
#
# **7 groups, 2 layers** (`num_groups, empty`). One group sees everything. The 22 layers with a window are dealt out to
# six groups, which have room for 24: four groups get four layers each, and two get three.
#
# </details>

# %%
from minipaged.models.layer_groups import group_layers

layers = [None if i % 6 == 5 else 512 for i in range(26)]
groups = group_layers(layers)
num_groups = len(groups.windows)
empty = num_groups * groups.layers_per_block - len(layers)
print("windows of the groups:", groups.windows)
print("group of each layer:  ", groups.of_layer)
print(f"{groups.layers_per_block} layers in a block; room for {empty} layers stays empty")

# %% [markdown]
# So a block always has the same number of bytes, and any group can take any free block. The price is the empty room
# here, and more tables.
#
# ## How much is held
#
# **Predict.** Five of six layers have a window of 1,024, and one sees everything. A sequence has 32,768 tokens. How
# much does it hold of what it would hold if all layers saw everything?
#
# - about half
# - about a fifth
# - about a twentieth
#
# <details><summary>See</summary>
#
# **about a fifth** (`0.18 < share < 0.22`). The one layer in six that sees everything is most of it. Five windows of
# 1,024 tokens are the rest.
#
# </details>

# %%
long = GroupedTable(16, BlockAllocator(3000), (None, *[1024] * 5))
for end in range(512, 32_768 + 1, 512):
    long.append(512)
    long.give_back(end)
share = len(long.blocks) / (6 * 32_768 / 16)
print(f"{len(long.blocks):,} blocks of {6 * 32_768 // 16:,}: {share:.1%}")

# %% [markdown]
# Move the sliders, or change the numbers in the notebook. The model has 48 layers, and a token's keys and values take
# 8 KiB in each.
#
# - Up to which length do windows save nothing?
# - How much does a smaller window save at 32,768 tokens? How much does it save if more layers have one?
# - What is the least that a sequence of 32,768 tokens can hold, whatever the window is?

# %% tags=["editable"]
from minipaged.engine.grouped_table import GroupedTable
from minipaged.models.layer_groups import group_layers
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.stepper.pictures import Curves

window = 1024  # slide 128 to 16384 doubling: tokens that a layer with a window sees
between = 5  # slide 1 to 7: layers with a window for each one that sees everything
LAYERS, BLOCK_SIZE, LENGTH, KIB = 48, 16, 32_768, 8

groups = group_layers([None if i % (between + 1) == between else window for i in range(LAYERS)])
table = GroupedTable(BLOCK_SIZE, BlockAllocator(len(groups.windows) * LENGTH // BLOCK_SIZE), groups.windows)
block_gib = groups.layers_per_block * BLOCK_SIZE * KIB / 2**20
held, whole = [(0, 0)], [(0, 0)]
for end in range(512, LENGTH + 1, 512):
    table.append(512)
    table.give_back(end)
    held.append((end / 1000, len(table.blocks) * block_gib))
    whole.append((end / 1000, LAYERS * end * KIB / 2**20))
Curves(
    [("no windows", whole), ("windows", held)],
    x="thousand tokens of the sequence",
    y="GiB held",
    notes=[
        f"{len(groups.windows)} groups of {groups.layers_per_block} layers",
        f"{LENGTH:,} tokens: {held[-1][1]:.2f} GiB in place of {whole[-1][1]:.2f}",
    ],
)

# %% [markdown]
# Up to the window's length nothing is saved. From there on only the layers that see everything grow. A sixth of the
# layers means a sixth of the slope, so no window can save more than five sixths.
#
# ## In the engine
#
# Here is a request that is served: 7 prompt tokens, 6 tokens of answer, the same two groups, blocks of 2. The model is
# a [storyteller](../minipaged/stepper/storyteller.py), which has words and no layers. That does not matter to the
# engine: it knows a model's groups only by their windows (`group_windows`).
#
# **Predict.** Before the last step, 11 tokens have been computed. How many blocks does each group hold then: the one
# that sees everything, and the one with the window?
#
# <details><summary>See</summary>
#
# **6 blocks, and 2** (`last_held`). Eleven tokens need six blocks. The next token, at position 11, sees positions 8 to
# 11, which are in two blocks.
#
# </details>

# %%
from minipaged import SamplingParams
from minipaged.events import BlocksPassed
from minipaged.stepper import Storyteller

story = Storyteller(["one two three four five six seven eight nine ten eleven twelve thirteen"])
engine = story.engine(num_blocks=20, block_size=2, group_windows=(None, 4), debug=True)
happened = []
engine.listeners.append(happened.append)
engine.add_request(
    story.encode("one two three four five six seven"), SamplingParams(max_tokens=6, temperature=0), request_id="A"
)
last_held = None
while engine.has_unfinished_requests():
    engine.step()
    for request in engine.scheduler.running:
        entries = request.sequences[0].entries
        last_held = [sum(block != HOLE for block in entries[group::2]) for group in (0, 1)]
        print(f"{len(entries) // 2} logical blocks; held: {last_held}; used in the pool: {engine.blocks.num_used}")

gone = [event.blocks for event in happened if isinstance(event, BlocksPassed)]
print("given back, in the order of the steps:", gone)

# %% [markdown]
# The first step computes the whole prompt, and two blocks are given back after it. From then on one block is given back
# whenever the window leaves it. The pool's use still grows, by one block for every two tokens. Without windows it would
# grow by two. With `debug=True` the engine checks after each step that every group holds exactly what its next token
# sees.
#
# ## What a hit needs
#
# The prefix cache ([tutorial 9](09_prefix_caching.py)) finds blocks by their content, so that a new request need not
# compute them. With groups, the request needs a block table for each group. Which blocks have to be in these tables?
# Those that the *first token which the request computes itself* sees: all blocks in the group that sees everything, and
# only the blocks of the last window in the others. The rest can be holes.
#
# [`GroupedPrefixCache`](../minipaged/engine/grouped_prefix_cache.py) keeps, for each block of tokens, its blocks in all
# groups. Here a sequence of 16 tokens has been served with the two groups from above. Its blocks are in the cache, also
# those that its window has passed.

# %%
from minipaged.engine.grouped_prefix_cache import GroupedPrefixCache


def served(windows):
    """A cache with the blocks of 16 tokens, from a sequence that has ended. The entries are its block table's, before
    anything was given back."""
    allocator = BlockAllocator(num_blocks=40)
    cache = GroupedPrefixCache(2, allocator, windows)
    table = GroupedTable(2, allocator, windows)
    table.append(16)
    entries = list(table.entries)
    assert len([*cache.publish(text, table, num_published=0)]) == len(entries)
    cache.released(block for _, block in table.give_back(16))
    blocks = table.blocks
    table.trim(0)
    cache.released(reversed(blocks))
    return cache, entries


def num_found(cache, num_tokens):
    """The number of tokens found for a prompt whose first `num_tokens` tokens are those of the text."""
    return len(cache.match([*text[:num_tokens], 99])) // 2 * 2  # two groups, and two tokens in a block


text = list(range(50, 66))
cache, entries = served((None, 4))

# %% [markdown]
# **Predict.** A prompt has these 16 tokens and one more. How many blocks does it get of the group that sees everything?
# And how many of the group with the window?
#
# <details><summary>See</summary>
#
# **8 blocks, and 2** (`[sum(block != HOLE for block in hit[group::2]) for group in (0, 1)]`). The token at position 16
# sees positions 13 to 16 there. Positions 13, 14 and 15 are in logical blocks 6 and 7. The cache has the blocks before
# them too, but they are not needed.
#
# </details>

# %%
hit = cache.match([*text, 99])
drawn(hit)

# %% [markdown]
# So the search cannot go from the left, block by block, until one is missing. In a group with a window, the first
# blocks are usually missing. The search goes from the left only to find how many of the prompt's tokens the cache
# knows. Then it goes back from the right, to the largest number of tokens for which all blocks that the next token sees
# are there.
#
# **Predict.** Block 3 of the group with the window is evicted: its tokens are at positions 6 and 7. How many tokens are
# found for a prompt that shares 10 tokens with the text? And for one that shares 12?
#
# <details><summary>See</summary>
#
# **6 tokens for the first, 12 for the second** (`ten, twelve`). After 8 tokens, position 8 sees positions 5 to 8, so
# the missing block is needed. After 10, position 10 sees 7 to 10: needed again. After 12, position 12 sees 9 to 12. So
# the longer prompt finds everything, and the shorter one does not.
#
# </details>

# %%
cache.reused(entries)  # somebody uses all blocks again,
cache.released([entries[2 * 3 + 1], *entries])  # and releases this one first
assert cache.evict(1) == [entries[2 * 3 + 1]]
ten, twelve = num_found(cache, 10), num_found(cache, 12)
for shared in range(2, 17, 2):
    print(f"{shared:2} tokens shared: {num_found(cache, shared):2} found")

# %% [markdown]
# ### The cliff
#
# Usually more is missing. The cache evicts what was released longest ago. Blocks that a window has passed were released
# while the sequence still ran, so they are evicted first. That is as it should be: without them, a prompt that begins
# with all 16 tokens still finds everything. There are six of these blocks.
#
# **Predict.** Now seven blocks are evicted. How many of the 16 tokens are found?
#
# - 14
# - 12
# - none
#
# <details><summary>See</summary>
#
# **none** (`num_found(after[7], 16) == 0`). The seventh is one of the last window's two blocks. A shorter hit would
# need the blocks of an earlier window, and these were evicted before. No hit is left, although the group that sees
# everything still has all its eight blocks.
#
# </details>

# %%
after = {}
for evicted in range(10):
    cache, entries = served((None, 4))
    cache.evict(evicted)
    after[evicted] = cache
    print(f"{evicted} blocks evicted: {num_found(cache, 16):2} tokens found; {cache.num_evictable} blocks still cached")

assert [num_found(after[n], 16) for n in range(7)] == [16] * 7

# %% [markdown]
# With layers that see everything, a cache loses a prefix from its end, block by block. With windows it falls off a
# cliff. The blocks that are left are of no use, and wait to be evicted as well. The same can happen in a running
# service, where one chat waits while others go on: a [pull request of
# SGLang](https://github.com/sgl-project/sglang/pull/35515) describes how a hit of tens of thousands of tokens became
# none. For the same reason, a group whose blocks never reach the cache makes every hit impossible: *each* group has to
# have the blocks that the next token sees.
#
# ### Chats
#
# What does that mean in the engine? Three chats have a first turn one after another, and then a second one. A first
# turn has 24 tokens and an answer of 8. A second turn sends these 32 tokens and 8 new ones. A third of the layers sees
# everything, and two thirds have a window of 8: three groups.
#
# Beside it is a model whose layers all see everything. It has one group, and its blocks hold three times as many
# layers. So it gets a third of the blocks, which is as much memory.


# %%
chats = Storyteller([" ".join(f"{chat}{i}" for i in range(60)) for chat in "ABC"])
answer = SamplingParams(max_tokens=8, temperature=0)


def serve_chats(**options):
    """How many of the 40 tokens of each second turn are found."""
    engine, found = chats.engine(block_size=4, max_model_len=60, enable_prefix_caching=True, **options), {}
    for num_tokens in (24, 40):
        for chat in "ABC":
            said = " ".join(f"{chat}{i}" for i in range(num_tokens))
            engine.add_request(chats.encode(said), answer, request_id=chat + str(num_tokens))
            while engine.has_unfinished_requests():
                for update in engine.step():
                    if update.output and num_tokens == 40:
                        found[chat] = update.output.num_cached_tokens
    engine.check_invariants()
    return [*found.values()]


# %% [markdown]
# **Predict.** With 20 blocks, each for all layers, the model without windows finds 20, 4 and 0 tokens of the second
# turns of A, B and C. The model with windows has 60 blocks, each for a third of the layers. How many tokens does it
# find for each chat?
#
# - fewer
# - 28, 28 and 28
# - 28, 8 and 0
#
# <details><summary>See</summary>
#
# **28, 28 and 28** (`windows[20] == [28, 28, 28]`). The chats hold less, so all three stay. The last token of an answer
# is not run, so 31 tokens of each chat were computed. 28 of them fill seven blocks.
#
# </details>

# %%
whole, windows = {}, {}
for num_blocks in (16, 20, 24):
    whole[num_blocks] = serve_chats(num_blocks=num_blocks)
    windows[num_blocks] = serve_chats(num_blocks=3 * num_blocks, group_windows=(None, 8, 8))
    print(f"memory for {num_blocks}: found without windows {whole[num_blocks]}, with windows {windows[num_blocks]}")

assert (whole[20], whole[16], windows[16]) == ([20, 4, 0], [4, 0, 0], [0, 0, 0])

# %% [markdown]
# With memory for 16 blocks there is the cliff: the model without windows still finds four tokens, and the one with
# windows finds none. (Without windows, hits may end within a block. So with memory for 24 blocks the model without
# windows finds all 31 tokens of chat A.)
#
# ## Three answers
#
# How should memory be divided between layers that need different amounts of it? Engines have answered in three ways.
#
# ### One pool, one size (vLLM, and here)
#
# All groups take equal blocks from one pool. vLLM calls this its [hybrid KV cache
# manager](https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/). The price is room that stays empty where the
# numbers of layers do not divide, and a search for hits that has to satisfy all groups.
#
# ### A ring for each sequence (transformers)
#
# In transformers' continuous batching, a sequence has a *ring* in each group with a window: as many slots as the window
# has tokens. The token at position p goes to slot p % window, and overwrites the one that the window has just left.
#
# **Predict.** Ten tokens have been written into a ring for a window of 4. Which positions are in its four slots, from
# the first to the last?
#
# <details><summary>See</summary>
#
# **8, 9, 6 and 7** (`ring`). Nothing is given back, because nothing is ever left over. The ring never needs more than a
# window, and it has no holes.
#
# </details>

# %%
ring = [None] * 4  # the position in each slot
for position in range(10):
    ring[position % 4] = position
print("positions in the four slots:", ring)

# %% [markdown]
# That is simple and small. But a page that is shared must never be written again, and every page of a ring is
# overwritten on the next round. Suppose that a second request has the first 8 tokens in common with this one. Its next
# token needs positions 5, 6 and 7.

# %%
needed = {5, 6, 7}
print("needed:", needed, "; in the ring:", needed & {*ring}, "; overwritten:", needed - {*ring})

assert needed - {*ring} == {5}

# %% [markdown]
# So the pages of a ring cannot be shared, and no prefix of it can be found later. In transformers (5.23) the class says
# `supports_block_sharing = False`, and if one group of a model cannot share, the whole model shares no prefix.
#
# ### A pool for each window (TensorRT-LLM)
#
# TensorRT-LLM makes [a pool for each window size](https://nvidia.github.io/TensorRT-LLM/features/kvcache.html). A block
# can then have as many layers as there are of its kind, and no room stays empty. But memory has to be divided between
# the pools when the engine starts. Its own documentation says that this is not optimal. How much can it cost?
#
# Take memory for 24,000 of the equal blocks, with 16 tokens each. Five of six layers have a window of 1,024. Steps
# compute at most 512 tokens. The two pools are divided so that they fit sequences of 32,768 tokens.

# %%
MEMORY, FULL, WITH_WINDOW = 24_000, (None,), (1024,) * 5


def blocks_of(windows, num_tokens):
    return blocks_alone(windows, num_tokens, block_size=16, at_once=512)


def fit(num_tokens, full_pool):
    """The number of sequences of this length that fit into one pool, and into two pools, the first of `full_pool`."""
    one = MEMORY // blocks_of(FULL + WITH_WINDOW, num_tokens)
    two = min(
        full_pool // blocks_of(FULL, num_tokens),
        (MEMORY - full_pool) // blocks_of(WITH_WINDOW, num_tokens),
    )
    return one, two


for_long = round(MEMORY * blocks_of(FULL, 32_768) / blocks_of(FULL + WITH_WINDOW, 32_768))
print(f"the pool of the layers that see everything gets {for_long:,} of {MEMORY:,} blocks")
print("sequences of 32,768 tokens, in one pool and in two:", fit(32_768, for_long))

# %% [markdown]
# **Predict.** Then short sequences come, of 1,000 tokens each. 63 of them fit into one pool. How many fit into the two
# pools?
#
# - 63, as in one pool
# - about 40
# - 14
#
# <details><summary>See</summary>
#
# **14** (`fit(1000, for_long) == (63, 14)`). A short sequence needs five times as many blocks in layers with a window
# as in the others, because no window has passed anything yet. The pool of these layers is full with 14, while most of
# the other is empty.
#
# </details>

# %%
one, two = fit(1000, for_long)
used = two * blocks_of(FULL, 1000)
print(f"in one pool: {one}; in two: {two}")
print(f"the pool of the layers that see everything then has {used:,} of {for_long:,} blocks in use")

# %% [markdown]
# No division is right for both. One pool needs none.
#
# ## What it does not do
#
# - **Only full blocks are kept in the cache.** Without windows a last block that is not full is kept, and hits end
#   within a block ([tutorial 9](09_prefix_caching.py)). With windows neither happens.
# - **There are no floors below the cache** ([tutorial 20](20_a_cache_with_floors.py)), and blocks are not handed to
#   other engines: `kv_cache_tiers` and `kv_connector` are refused.
# - **Samples and beams that were preempted give nothing back until all of them have caught up**, because they share
#   their beginning.
# - **Blocks that no hit can use after the cliff stay in the cache** until they are the oldest.
# - **On a GPU nothing is measured yet**: the code for it has run without one
#   ([on a GPU](../docs/gpu.md#windows-soft-caps-sinks)).
#
# ## Exercises
#
# 1. A layer with a window passes on what it has seen: the token 3 positions back has seen what was 3 positions before
#    it. All layers of a model have a window of 4. From how far back can something reach the last token, with 1, 2 and 3
#    layers?

# %% tags=["solution"]


def reach(num_layers, window=4, position=40):
    known = {position}
    for _ in range(num_layers):
        known = {seen for each in known for seen in range(each - window + 1, each + 1)}
    return position - min(known)


print([reach(num_layers) for num_layers in (1, 2, 3)])

assert [reach(num_layers) for num_layers in (1, 2, 3)] == [3, 6, 9]
# Each layer adds a window less one. So a token can be affected by more than its window, layer by layer. A layer that
# sees everything reaches back at once.

# %% [markdown]
# 2. Give blocks back one token too early: call `give_back(position + 1)` where `give_back(position)` is right. At which
#    positions does a token then need a block that is a hole, with a window of 5 and blocks of 4? Why would a short test
#    miss this?

# %% tags=["solution"]
from minipaged.engine.grouped_table import first_seen

early, wrong = GroupedTable(4, BlockAllocator(20), (5,)), []
for position in range(24):
    early.append(1)
    if early.entries[first_seen(5, position) // 4] == HOLE:
        wrong.append(position)
    early.give_back(position + 2)  # position + 1 is next, so this is one too many
print("wrong at positions:", wrong)

assert wrong == [7, 11, 15, 19, 23]
# Only one position in four is wrong: the one whose window begins in the last slot of a block. The first is at position
# 7, so a shorter text never shows it. And the right keys stay in the block until somebody else writes there. So a test
# should check which blocks are read, and not only which text comes out.

# %% [markdown]
# 3. Groups of two layers each would leave no room empty in the model of 26 layers. How many groups would it have? What
#    grows with the number of groups?

# %% tags=["solution"]
smaller = 26 // 2
print(f"{smaller} groups, and so {smaller} table entries for each logical block, in place of {num_groups}")

assert smaller == 13
# The tables grow, and with them the work to change, send and search them. What is saved is the empty room of 2 layers
# in 28.
