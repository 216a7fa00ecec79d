# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 9. Prefix caching

# %% [markdown]
# **What you will understand.** How a request can begin with keys and values that another one has computed: how blocks
# are found by what is in them, how a hit can end in the middle of a block, what has to be true of a block that is hit,
# and which blocks are given back first. The paper shares a prefix that the operator names beforehand (section 4.4,
# Fig. 10). Here, as in vLLM today, it is found.
#
# ## What makes two blocks the same
#
# The key and the value of a token depend on the token, its position, and on all tokens before it: attention mixes those
# in, layer by layer. They depend on nothing else, and on no token that comes later. So two requests whose first 40
# tokens are the same have the same keys and values at these 40 positions, and one of them need not compute them.
#
# Requests do begin alike: with the system prompt of a service, with the document that many questions are about, and in
# a chat with everything that was said so far.
#
# To find a block by its content, it gets a name: a hash of its own tokens **and of its parent's hash**, its parent
# being the block before it. So the name of a block stands for everything up to its end, which is just what keys and
# values depend on.

# %%
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.handover.block_hashes import NO_HASH, chain_hash
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable

same_tokens = (5, 6, 7, 8)
after_one = chain_hash(chain_hash(NO_HASH, (1, 2, 3, 4)), same_tokens)  # a first block has no parent
after_another = chain_hash(chain_hash(NO_HASH, (9, 9, 9, 9)), same_tokens)
assert after_one != after_another  # the same tokens after other tokens are another block

# %% [markdown]
# ## Publishing and finding
#
# When a request has filled blocks, it *publishes* them: the prefix cache takes a reference on each, like one more
# sequence that holds it. So the block stays when the request has ended. A new request then asks for the longest chain
# of blocks that its prompt begins with. Where the chain ends, the cache looks at the next blocks that it knows: one of
# them may still begin with the next tokens.
#
# **Predict.** A request of ten tokens, 0 to 9, has published its blocks of 4. How many tokens does `match` find for a
# prompt that is the same; that has the first eight of these tokens; that differs in token 5; that differs in token 0?
#
# <details><summary>See</summary>
#
# **8 tokens for the same, 7 for the first eight, 5 with another token in the middle, 0 with another first one**
# (`[num_tokens for _, num_tokens in found.values()]`). Only full blocks are published: two. A match goes on up to the
# first token that differs, and leaves at least one token to be run.
#
# </details>

# %%
allocator = BlockAllocator(num_blocks=8)
cache = PrefixCache(block_size=4, allocator=allocator)
ten = list(range(10))
table = BlockTable(block_size=4, allocator=allocator)
table.append(10)
for logical, block, _ in cache.publish(ten, table, num_published=0):
    print(f"published: logical block {logical}, which is block {block}, held by {allocator.ref_count(block)} now")

found = {
    "the same ten": cache.match(ten),
    "the first eight": cache.match(ten[:8]),
    "another token 5": cache.match([*ten[:5], 99, *ten[6:]]),
    "another token 0": cache.match([99, *ten[1:]]),
}
for which, (blocks, num_tokens) in found.items():
    print(f"{which:>15}: {num_tokens} tokens, in blocks {blocks}")

assert [num_tokens for _, num_tokens in found.values()] == [8, 7, 5, 0]

# %% [markdown]
# Two blocks are in the cache, the full ones. The request still writes into its third block, so nobody else may have it.
#
# And the first eight find seven tokens, not eight. The next token is chosen from the logits of the *last* prompt token,
# and logits come from running a token. So a match leaves at least one token to be run.
#
# ## A part of a block
#
# Where token 5 differs, token 4 is still the same, and its keys and values are in block 1. So the match includes that
# block, and says that only five tokens count. A newcomer with such a *partial hit* takes a reference on block 1, and
# counts only the first slot of it. The block is shared, so the newcomer's first write copies it
# ([number 6](06_copy_on_write.py)):

# %%
blocks, num_tokens = found["another token 5"]
newcomer = BlockTable(block_size=4, allocator=allocator)
newcomer.adopt(blocks)  # a reference on each, and all slots count
newcomer.trim(num_tokens)  # of the last block, only the shared tokens count
[(source, copy)] = newcomer.append(5)
print(f"block {source} is copied to block {copy}: one token of it is kept, the others are written over")

assert source == blocks[-1]
assert list(newcomer.blocks[:2]) == [blocks[0], copy]
newcomer.trim(0)

# %% [markdown]
# How does the cache find block 1? The cached blocks that come right after a block are its *children*. The cache keeps
# them sorted by their tokens, as a dictionary keeps its words. There, the word that shares the longest beginning with
# yours stands next to the place where yours would be. So the cache searches for this place, and compares its two
# neighbours. That is quick even where the first blocks of all prompts are children of one root.
#
# The other way to find prefixes is a *radix tree*. It has a node wherever two texts part, at any token:
#
#     a radix tree                                   a chain of hashes, with children
#
#     root ─ [0 1 2 3 4] ┬─ [5 6 7]                  root ─ [0 1 2 3] ┬─ [4 5 6 7]
#                        └─ [99 6 7]                                  └─ [4 99 6 7]
#
# In the tree, token 4 is in one place. A chain has a node for each block, so there token 4 is in two blocks: its keys
# and values were copied, not computed again. In return, no node is ever split. And the name of a block is the same
# everywhere, so another machine can ask for it ([number 16](16_replicas.py)).
#
# ## A hash is not proof
#
# Two different blocks can have one hash. By chance that is rare. But somebody who knows the hash function can search
# for such blocks, and the price would be high: an answer computed from another user's prompt. So an entry of the cache
# remembers its tokens and its parent's block, and a lookup compares both. Then even the worst hash function does no
# harm:

# %%
bad = PrefixCache(block_size=4, allocator=allocator, chain_hash=lambda parent, tokens: 0)
list(bad.publish(ten, table, num_published=0))

assert bad.match([50, 51, 52, 53, 54]) == ([], 0)  # the hash is there, and the tokens differ
assert bad.match(ten).num_tokens == 4  # one hash has room for one block: less is found, and nothing wrong

# %% [markdown]
# ## What must be true of a block that is hit
#
# - **No request writes into it** (exclusive-write). A full block has no slot left to write. A block that is not full is
#   cached only when its request has ended. A request that hits it writes into a copy, or takes it out of the cache
#   first.
# - **It has been computed.** It is published after the step that ran its tokens, not when its slots were taken.
# - **It has the right tokens, and the right tokens before it** (content). The lookup compares them.
# - **Somebody holds it.** Between requests the cache does. A request that hits the block takes a reference too, and the
#   block leaves the list of blocks that may be evicted. Otherwise another request could get it next, and overwrite what
#   a running request reads.
#
# [The bug museum](../docs/museum/lost_hash.md) shows a bug that shipped, in which the third does not hold: wrong keys
# and values, and no error.
#
# ## One system prompt, several requests
#
# Now the engine, with made-up words and blocks of 4. All prompts begin with the same eight words. The first asks about
# a page. When it has started, two more arrive; and later somebody asks the first question again.
#
# **Predict.** Each prompt has 12 tokens. How many of them are found for each request? The question about a shelf has
# eleven words in common with the first one.
#
# <details><summary>See</summary>
#
# **page: 0 tokens, book: 8, shelf: 11, page again: 11** (`cached.values()`). Each request finds the longest beginning
# that came before, but never its whole prompt.
#
# </details>

# %%
from minipaged import SamplingParams
from minipaged.events import BlockDeduplicated, BlockEvicted, PrefixReused
from minipaged.stepper import Storyteller, record

SYSTEM = "You are a librarian. Answer in one sentence."
questions = {"page": "What is a page?", "book": "Who wrote this book?", "shelf": "What is a shelf?"}
answers = {"page": "One side of a sheet.", "book": "Nobody knows, I am afraid.", "shelf": "A board that holds books."}
unrelated = "It was the best of times it was the worst of times it was the age of wisdom it was the age of foolishness"
model = Storyteller([*(f"{SYSTEM} {questions[name]} {answers[name]}" for name in questions), unrelated])
few_words = SamplingParams(max_tokens=4, temperature=0)

with record("One system prompt", model.decode) as run:
    engine = model.engine(num_blocks=16, block_size=4, enable_prefix_caching=True)
    updates = []
    for arrivals in (["page"], ["book", "shelf"], ["page again"]):
        for name in arrivals:
            asked = f"{SYSTEM} {questions[name.split()[0]]}"
            engine.add_request(model.encode(asked), few_words, request_id=name)
        updates += engine.step()
    holders = engine.blocks.allocator.ref_count(0)
    while engine.has_unfinished_requests():
        updates += engine.step()

cached = {update.request_id: update.output.num_cached_tokens for update in updates if update.output}
for name, num_cached in cached.items():
    print(f"{name:>10}: {num_cached} of 12 prompt tokens found")

assert cached == {"page": 0, "book": 8, "shelf": 11, "page again": 11}

# %% [markdown]
# The book finds two blocks. The shelf finds two blocks and three quarters of a third. The same question again finds all
# words but one, because one token has to be run. The last two requests both copy the third block, and write their
# twelfth word into the copy. The shelf's twelfth word is new, so its copy is a new block. The repeated question's
# twelfth word is the same as before, so its copy holds what the cached block holds. At the end of the step the request
# takes the cached block and gives its copy back: the block is *deduplicated*.
#
# The stepper shows the cache among the owners of a block. While all four requests run, block 0 has five holders.

# %%
run

# %%
assert holders == 5  # four requests, and the cache
[duplicate] = [event for event in run.events if isinstance(event, BlockDeduplicated)]
print(f"block {duplicate.own} holds what block {duplicate.cached} held already, and is given back")
assert engine.blocks.num_available == 16  # all requests have ended: each block is free or evictable
assert engine.blocks.allocator.num_free < 16

# %% [markdown]
# ## Who has to leave
#
# In the end no request holds a block, and yet not all blocks are free: the cache keeps some. That makes no request
# wait, because a block that only the cache holds counts as available. When too few blocks are free, the cache *evicts*
# such blocks: those that are not full first, then the full ones, the least recently used first (*LRU*). A block is in
# use as long as a request holds it. So of the full blocks, the one that was released first is evicted first.
#
# **Predict.** A pool of 6 blocks. The question about the page has been answered, and the cache has blocks 0 to 3. Block
# 3 is a *partial entry*: it holds three words, and the cache keeps it because its request has ended. Now an unrelated
# prompt comes that needs five blocks. Two are free, so three have to leave. Which, and in which order? (The request
# about the page released all four when it ended.)
#
# <details><summary>See</summary>
#
# **first block 3, then block 2, then block 1** (`evicted[:3]`). Block 3 is not full. Of the full ones, the end of the
# chain goes first: without block 0 nobody could find the others.
#
# </details>

# %%
with record("Leaves before their parents", model.decode) as evicting:
    engine = model.engine(num_blocks=6, block_size=4, enable_prefix_caching=True)
    updates = []
    for name, text in {"page": f"{SYSTEM} {questions['page']}", "other": " ".join(unrelated.split()[:17])}.items():
        engine.add_request(model.encode(text), few_words, request_id=name)
        while engine.has_unfinished_requests():
            updates += engine.step()
    engine.add_request(model.encode(f"{SYSTEM} {questions['book']}"), few_words, request_id="book")
    while engine.has_unfinished_requests():
        updates += engine.step()

evicted = [event.block for event in evicting.events if isinstance(event, BlockEvicted)]
print("evicted, in this order:", evicted)
assert evicted == [3, 2, 1, 5, 4, 3]
assert updates[-1].request_id == "book"
assert updates[-1].output.num_cached_tokens == 4

# %% [markdown]
# A request that ends releases its last block first. So children are evicted before their parents. Had block 0 been
# evicted first, blocks 1 and 2 would still take room, and nobody could find them, since every search begins at the
# first block. So the question about the book still finds block 0, with four of its tokens. To make room for its other
# blocks, the cache evicts blocks 5, 4 and 3 of the unrelated prompt: again children before their parents.

# %%
evicting

# %% [markdown]
# ## A chat
#
# In a chat every turn sends the whole conversation again, and the model answers its end. Here is a chat with the real
# model, on the reference tier, with blocks of 16.

# %%
from itertools import pairwise

from minipaged import LLM
from minipaged.stepper.pictures import Bars

llm = LLM("smollm2-135m-instruct", tier="reference", block_size=16, num_blocks=32)
greedy = SamplingParams(temperature=0, max_tokens=16)
messages, turns = [], []
for question in ("What is a page?", "And what is a book?", "Which of the two is larger?"):
    messages.append({"role": "user", "content": question})
    [turn] = llm.chat(messages, greedy, use_tqdm=False)
    messages.append({"role": "assistant", "content": turn.outputs[0].text})
    turns.append(turn)
    total, num_cached = len(turn.prompt_token_ids), turn.num_cached_tokens
    print(f"{question} -> {turn.outputs[0].text}")
    print(f"    {total} prompt tokens: {num_cached} found, {total - num_cached} computed")

assert turns[0].num_cached_tokens == 0
for before, turn in pairwise(turns):
    computed_before = len(before.prompt_token_ids) + len(before.outputs[0].token_ids) - 1
    assert turn.num_cached_tokens == computed_before  # all of it: the last token of an answer is chosen, and not run

# %%
rows = []
for i, turn in enumerate(turns, start=1):
    computed = len(turn.prompt_token_ids) - turn.num_cached_tokens
    rows.append((f"turn {i}", [("found", turn.num_cached_tokens), ("computed", computed)]))
Bars(rows, {"found": "lines", "computed": "full"}, unit=" tokens")

# %% [markdown]
# The conversation grows from turn to turn, but what is computed does not: only the new question, and the last token of
# the answer before it. The answers are in cached blocks as well, since decoding fills blocks like a prompt does. The
# last block of a turn is hardly ever full. The cache keeps it as a partial entry when the turn has ended. The next turn
# takes it over and goes on filling it, without a copy.
#
# The cache must not change a word. Without it, the last turn is answered with the same tokens:

# %%
plain = LLM(llm.loaded, block_size=16, num_blocks=32, enable_prefix_caching=False)
[same] = plain.generate([turns[-1].prompt_token_ids], greedy, use_tqdm=False)

assert same.num_cached_tokens == 0
assert same.outputs[0].token_ids == turns[-1].outputs[0].token_ids

# %% [markdown]
# A practical consequence: whatever changes belongs at the end of a prompt. If a system prompt begins with the time of
# day, its first block changes every minute, and nothing after it is found.
#
# ## Exercise
#
# Two requests with the same prompt arrive at the same moment. When they are admitted, nothing is published yet, so
# neither finds what the other one computes. How many blocks do the two hold right after their first step, and what are
# the reference counts? Work it out for the question about the page, then look.

# %% tags=["solution"]
with record("Two of the same at once", model.decode) as both:
    engine = model.engine(num_blocks=16, block_size=4, enable_prefix_caching=True)
    for name in ("first", "second"):
        engine.add_request(model.encode(f"{SYSTEM} {questions['page']}"), few_words, request_id=name)
    engine.step()
    held = {block: engine.blocks.allocator.ref_count(block) for block in range(16)}
    while engine.has_unfinished_requests():
        engine.step()

assert not [event for event in both.events if isinstance(event, PrefixReused)]
assert len([event for event in both.events if isinstance(event, BlockDeduplicated)]) == 3
print({block: count for block, count in held.items() if count})
assert [count for count in held.values() if count] == [3, 3, 3]
# In the first step each request computes the prompt in three blocks of its own, so six blocks are filled: the same work
# is done twice. At the end of the step the first request publishes its three blocks. The second one takes them and
# gives its own back. From then on three blocks are held, each by both requests and the cache: the memory is needed
# once.
both
