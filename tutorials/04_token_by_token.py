# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 4. One request, token by token

# %% [markdown]
# **What you will understand.** What the model, the block table and the pool do for one request from its arrival to its
# end: the prompt in one pass, then token by token, with memory taken only when it is needed. It is the example of the
# paper's Fig. 6 (section 4.3), with its prompt and its block size, served by a real Llama: SmolLM2-135M on the
# reference tier.
#
# The words are a real model's. (A small one: it does not know the speech.)

# %%
from minipaged import LLM, SamplingParams
from minipaged.events import StepFinished, TokenGenerated, TokensComputed
from minipaged.stepper import record

llm = LLM("smollm2-135m-instruct", tier="reference", block_size=4, num_blocks=8)
prompt = "Four score and seven years ago our"
token_ids = llm.tokenizer.encode(prompt)
print([llm.tokenizer.decode([token]) for token in token_ids])

assert len(token_ids) == 7

# %% [markdown]
# ## Two phases
#
# - **Prefill.** All 7 tokens of the prompt go through the model in one pass. Their keys and values are written into the
#   cache, and out comes one new token.
# - **Decode.** Each further pass runs a single token, the newest: its keys and values are written, it attends to
#   everything before it through the block table, and out comes the next token.
#
# So the newest token is always known before its keys and values are in the cache. They are computed by the pass that
# chooses the token after it.
#
# (The engine is made once more below, inside `record`, which catches what an engine tells of itself from its first
# moment on. The weights are those loaded above.)
#
# **Predict.** The request asks for 6 new tokens. How many passes does the model make, how many slots are filled in the
# end, and how many blocks of 4 does that take?
#
# <details><summary>See</summary>
#
# **6 passes, 12 slots, 3 blocks** (`len(passes), slots, blocks`). The first pass is the prompt's, and it chooses a
# token already; the last token is chosen and never run.
#
# </details>

# %%
with record("Four score and seven years ago our", llm.tokenizer.decode) as run:
    small = LLM(llm.loaded, block_size=4, num_blocks=8, enable_prefix_caching=False)
    [output] = small.generate([prompt], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
print(prompt + output.outputs[0].text)

passes = [event for event in run.events if isinstance(event, StepFinished)]
slots = max(event.num_tokens for event in run.events if isinstance(event, TokensComputed))
blocks = sum(len(event.new_blocks) for event in run.events if isinstance(event, TokensComputed))
print(f"{len(passes)} passes, of {[event.num_query_tokens for event in passes]} tokens; {slots} slots, {blocks} blocks")

assert [event.num_query_tokens for event in passes] == [7, 1, 1, 1, 1, 1]
assert (slots, blocks) == (12, 3)

# %% [markdown]
# Six passes for six tokens: the first of them is the prompt's. And 12 slots for 13 tokens, because the last token is
# chosen and never run. Twelve slots are three blocks, without one empty slot.
#
# ## Step through it
#
# Watch the last block. When it has room, a token costs nothing but its slot. When it is full, `BlockTable.append` asks
# the allocator for one more. A token with a dashed frame is known, but its keys and values are not in the cache yet.
# Where the model has chosen a token, the code shown is its attention, which has read the blocks: the loop of tutorial
# 3. (A token stands in its slot as soon as the slot is assigned; the pass that follows writes its keys and values
# there.)

# %%
run

# %% [markdown]
# ## Where each token is
#
# Position `p` is in logical block `p // 4`, at offset `p % 4`. The block table turns that into a slot of the pool.

# %%
table: list[int] = []
for event in run.events:
    if isinstance(event, TokensComputed):
        table += event.new_blocks
tokens = [*token_ids, *(event.token_id for event in run.events if isinstance(event, TokenGenerated))]
for position, token in enumerate(tokens[:-1]):
    logical, offset = divmod(position, 4)
    slot = table[logical] * 4 + offset
    print(f"{llm.tokenizer.decode([token])!r:>15}  position {position:>2}  logical block {logical}  slot {slot:>2}")

# %% [markdown]
# In Fig. 6 of the paper the blocks are 7, 1 and 3. Here they are the first three of a fresh pool; any others would do
# as well. The model never sees the difference: its words depend on what is in the slots, not on where they are.
#
# ## Exercise
#
# Show that last claim. Give the same request an allocator that hands out block 7, then 1, then 3, and compare the
# words. `LLM(..., allocator=YourAllocator)` takes any class with the members of
# [`BlockAllocator`](../minipaged/contracts.py). (The reference tier's, of tutorial 2, keeps the free blocks in a list,
# `_free`, and hands out the last of it: a subclass can put that list in another order.)

# %% tags=["solution"]
from minipaged.reference.block_allocator import BlockAllocator


class PaperAllocator(BlockAllocator):
    """Hands out the blocks of Fig. 6 first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        order = [block for block in (7, 1, 3) if block < num_blocks]  # the host pool has one of these too
        self._free = [block for block in self._free if block not in order] + order[::-1]


with record("The blocks of Fig. 6", llm.tokenizer.decode) as paper:
    other = LLM(llm.loaded, block_size=4, num_blocks=8, enable_prefix_caching=False, allocator=PaperAllocator)
    [same] = other.generate([prompt], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)

blocks = [block for event in paper.events if isinstance(event, TokensComputed) for block in event.new_blocks]
assert blocks == [7, 1, 3]
assert same.outputs[0].token_ids == output.outputs[0].token_ids
paper
