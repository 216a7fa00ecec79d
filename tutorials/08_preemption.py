# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 8. Preemption: swap or recompute

# %% [markdown]
# **What you will understand.** Why a pool can run out although nobody asked for too much, who then gives blocks back,
# the two ways in which a request comes back from that without losing a word, and what each way costs. In the paper this
# is section 4.5 and Fig. 19.
#
# ## Why a pool runs out
#
# Nothing is reserved for tokens that may never come: that is where paging gets its room from. So a request is admitted
# when there are blocks for what it has *now*, and then it grows. If many grow at once, there comes a step for which the
# blocks are not there.
#
# Somebody then gives up all its blocks and waits. That is **preemption**, and these are its rules:
#
# - **The latest arrival goes first**, and the oldest never goes. So the oldest always gets on and ends some day, and
#   then the next one is the oldest: everybody is served in the end.
# - **All or nothing.** A token attends to everything before it, so half of a request's blocks are of no use to it. All
#   of its blocks go together, and if it has several sequences, all of those.
# - **It loses time, never words.** There are two ways back. **Swap**: copy its blocks from the memory of the device
#   (the GPU) to that of the host (the CPU's machine) now, and back later. **Recompute**: drop them, and later compute
#   keys and values again.
#
# ## Three requests in a pool too small
#
# Since words must not be lost, this needs a model with words to lose: SmolLM2-135M on the reference tier, as in
# [tutorial 4](04_token_by_token.py). Three requests arrive one after another, and ask for 8 tokens each.

# %%
from minipaged import LLM, SamplingParams
from minipaged.events import RequestPreempted, StepFinished, TokensComputed
from minipaged.stepper import Recording, record

llm = LLM("smollm2-135m-instruct", tier="reference", block_size=4, num_blocks=16)
prompts = {
    "A": "Four score and seven years ago our",
    "B": "It was the best of times",
    "C": "Once upon a time there was",
}
tokens = {name: llm.tokenizer.encode(prompt) for name, prompt in prompts.items()}
print({name: len(ids) for name, ids in tokens.items()}, "prompt tokens")


def serve(title: str, **sizes: object) -> tuple[Recording, dict[str, str]]:
    """The run, and the words that each request was given."""
    with record(title, llm.tokenizer.decode) as run:
        engine = LLM(llm.loaded, block_size=4, enable_prefix_caching=False, **sizes).engine
        updates = []
        for name, ids in tokens.items():
            engine.add_request(ids, SamplingParams(temperature=0, max_tokens=8), request_id=name)
            updates += engine.step()
        while engine.has_unfinished_requests():
            updates += engine.step()
    engine.check_invariants()
    assert engine.blocks.allocator.num_free == engine.config.num_blocks
    return run, {update.request_id: update.output.outputs[0].text for update in updates if update.output}


_, words = serve("Room for all", num_blocks=16)
for name, text in words.items():
    print(f"{name}: {prompts[name]}…{text!r}")

# %% [markdown]
# The last token is chosen and never run, so A comes to 14 slots, B and C to 13: four blocks of 4 each, 12 in all.
#
# **Predict.** Now the pool has only 9 blocks (and for swapping there is a pool of 4 in the host's memory). Who is
# preempted, how many blocks does it give up when one is missing, and what will its words be in the end?
#
# - A, one block; its words will be others
# - C, one block; its words will be the same
# - C, all of its three blocks; its words will be the same
#
# <details><summary>See</summary>
#
# **C, all of its three blocks; its words will be the same** (`(event.request, event.num_blocks) == ("C", 3) and swapped
# == recomputed == words`). Who came last goes first, and altogether: with a part of its keys and values nobody can go
# on.
#
# </details>

# %%
swap, swapped = serve("A pool of 9 blocks: swap", num_blocks=9, num_swap_blocks=4, preemption="swap")
recompute, recomputed = serve("A pool of 9 blocks: recompute", num_blocks=9, preemption="recompute")

for run in (swap, recompute):
    [event] = [event for event in run.events if isinstance(event, RequestPreempted)]
    print(f"{event.blocks_short} block short: {event.request} gives up {event.num_blocks} blocks, by {event.mode}")
    assert (event.request, event.num_blocks, event.blocks_short) == ("C", 3, 1)

assert swapped == recomputed == words
print("the words are the same as with room for all")

# %% [markdown]
# The invariant behind that last line is called **scheduling-invariance**: what a request says (choosing greedily, as
# here) does not depend on who runs beside it, on the size of the pool, nor on whether it was preempted, and how.
#
# ## Swap, step by step
#
# Look for the moment at which C is preempted: a cross marks it on the timeline. `Scheduler.schedule` finds that the
# blocks for the next step are not there. The three blocks of C go to the *host pool*, which is shown beside the other
# one, and C's block table now leads there. It waits ("swapped out"), ahead of whoever may come. When A has ended and
# given its blocks back, C's blocks are copied to the device again, into whatever blocks are free then. Its block table
# says which ones, so it does not matter that they are others than before.

# %%
from minipaged.events import SwappedIn, SwappedOut

[out] = [event for event in swap.events if isinstance(event, SwappedOut)]
[back] = [event for event in swap.events if isinstance(event, SwappedIn)]
print("blocks of C before:", [device for device, _ in out.pairs], "and after:", [device for _, device in back.pairs])
assert {host for _, host in out.pairs} == {host for host, _ in back.pairs}
assert [device for device, _ in out.pairs] != [device for _, device in back.pairs]
swap

# %% [markdown]
# ## Recompute, step by step
#
# The same, up to that moment. Then C lets go of its blocks, and nothing is copied. When it comes back, its prompt *and*
# the tokens that it has generated so far are run like a prompt, all in one pass. They are all known by then, so this is
# no token-by-token decoding again.

# %%
recompute

# %%
for name, run in (("swap", swap), ("recompute", recompute)):
    print(f"{name:>9}: tokens in each step", [e.num_query_tokens for e in run.events if isinstance(e, StepFinished)])
again = [event.recomputed for event in recompute.events if isinstance(event, TokensComputed) and event.recomputed]
print(f"tokens computed a second time: {sum(again)}, in {len(again)} pass")

assert again == [9]
assert not any(event.recomputed for event in swap.events if isinstance(event, TokensComputed))

# %% [markdown]
# ## Siblings go together
#
# A request with several sequences (here two samples of one prompt) shares blocks among them. Preempted together, they
# keep sharing: a block that both hold is copied to the host once, and both tables then hold that one copy. The words do
# not matter for this, so the model is again one that knows texts by heart.
#
# **Predict.** When there is no room, the tables of the two samples have two entries each, and the first block, the full
# one of their prompt, is in both. How many blocks are copied?
#
# <details><summary>See</summary>
#
# **3 blocks** (`len(out.pairs)`). The shared block goes once, and both tables lead to that one copy.
#
# </details>

# %%
from minipaged.stepper import Storyteller

model = Storyteller(
    [
        "It was the best of times it was the worst of times it was the age of wisdom",
        "Four score and seven years ago our fathers brought forth on this continent a new nation",
        "Four score and seven years ago our mothers crossed the wide and stormy sea to live here",
    ]
)

with record("Two samples are preempted together", model.decode) as siblings:
    engine = model.engine(num_blocks=7, num_swap_blocks=4, block_size=4, preemption="swap")
    single, double = SamplingParams(max_tokens=6, temperature=0), SamplingParams(n=2, max_tokens=4, seed=0)
    engine.add_request(model.encode("It was the best of times"), single)
    updates = engine.step()
    engine.add_request(model.encode("Four score and seven years ago our"), double)
    while engine.has_unfinished_requests():
        updates += engine.step()
for output in [update.output for update in updates if update.output]:
    print(f"{output.request_id}:", *(f"… {completion.text}" for completion in output.outputs))

[out] = [event for event in siblings.events if isinstance(event, SwappedOut)]
[back] = [event for event in siblings.events if isinstance(event, SwappedIn)]
print(f"{len(out.pairs)} blocks of request {out.request} go to the host, {len(back.pairs)} come back")
assert out.request == back.request == "1"
assert len(out.pairs) == len(back.pairs) == 3

# %% [markdown]
# In the stepper, ×2 stands at the shared block before, in the host pool, and after:

# %%
siblings

# %% [markdown]
# ## What it costs
#
# Which of the two ways is better is a question of cost, and it has few terms
# ([`swap_seconds`](../minipaged/engine/policy.py) and [`recompute_seconds`](../minipaged/engine/policy.py)):
#
#     swapping     2 × (number of copies × seconds to start one + bytes ÷ bytes a second)       out, and in again
#     recomputing  tokens ÷ prefill tokens a second
#
# Every copy costs something to start, whatever its size. With small blocks there are many copies, and little in each.
# Recomputing does not care about blocks at all.
#
# ### On this machine
#
# minipaged measures all of these where it runs. What would it take to bring back a request of 256 tokens?

# %%
from dataclasses import replace

from minipaged.engine.policy import recompute_seconds, swap_seconds

NUM_TOKENS = 256
for block_size in (1, 16, 64):
    config = replace(llm.config, block_size=block_size, num_blocks=64)
    measured = llm.loaded.tier.make_runner(llm.loaded.config, llm.loaded.weights, config).costs()
    swapping, computing = swap_seconds(measured, NUM_TOKENS // block_size), recompute_seconds(measured, NUM_TOKENS)
    print(f"blocks of {block_size:>2}: swap {1e3 * swapping:.1f} ms, recompute {1e3 * computing:.0f} ms")
    assert swapping < computing / 5

# %% [markdown]
# The reference tier runs on a CPU. There, "device" and "host" are one memory, a block is copied at that memory's speed,
# and computing is slow: **on a CPU swapping is always the cheaper way**, whatever the block size. So these figures say
# nothing about a GPU, except that one should measure.
#
# ### On a GPU, by its figures
#
# A GPU computes far faster, and its host is at the other end of a slow link. Take the smallest machine of the paper's
# evaluation, OPT-13B on an A100. From the paper are 800 KB of keys and values a token; and from its Fig. 19a, if the
# blocks there hold 256 tokens in all, 12.6 GB a second over PCIe and 2.64 microseconds to start a copy. **Assumed** is
# a pool of keys and one of values for each of the 40 layers, so 80 copies a block. Kernels that were measured on an
# A100 reach 63.5 % of the arithmetic speed of the data sheet, which gives the prefill speed.

# %%
from minipaged.scheduling import Costs
from minipaged.simulated import OPT_13B_ON_AN_A100 as GPU


def costs(block_size: int, copies_per_block: int = GPU.copies_per_block) -> Costs:
    return replace(GPU.costs(block_size), copies_per_block=copies_per_block)


print(f"{costs(1).prefill_tokens_per_second:,.0f} tokens of prefill a second")
recomputing = recompute_seconds(costs(16), NUM_TOKENS)
by_size = {size: swap_seconds(costs(size), NUM_TOKENS // size) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
print(f"recompute: {1e3 * recomputing:.1f} ms, whatever the block size")
for size, seconds in by_size.items():
    print(f"swap, blocks of {size:>3}: {1e3 * seconds:5.1f} ms")

assert list(by_size.values()) == sorted(by_size.values(), reverse=True)
assert by_size[1] > 2 * recomputing
assert all(0.8 < by_size[size] / recomputing < 1.25 for size in (16, 32, 64))

# %%
from minipaged.stepper.pictures import Bars


def rows(copies_per_block: int = GPU.copies_per_block) -> list[tuple[str, list[tuple[str, float]]]]:
    """What recomputing costs, and for each block size what swapping pays for, in milliseconds."""
    moving = round(2e3 * NUM_TOKENS * GPU.kv_bytes_per_token / GPU.link_bytes_per_second)
    parts = [("recompute, any block size", [("prefill", round(1e3 * recomputing))])]
    for size in (1, 4, 16, 64, 256):
        whole = round(1e3 * swap_seconds(costs(size, copies_per_block), NUM_TOKENS // size))
        parts.append((f"swap, blocks of {size}", [("bytes", moving), ("starts of copies", whole - moving)]))
    return parts


fills = {"prefill": "full", "bytes": "lines", "starts of copies": "dots"}
Bars(rows(), fills, unit=" ms")

# %% [markdown]
# That is the shape of the paper's Fig. 19: swapping is poor at small blocks, recomputation flat, and from 16 to 64
# tokens a block the two are comparable. With another link or another model the bars get longer or shorter, and the two
# meet elsewhere.
#
# Neither way is the better one everywhere, so minipaged has both. `preemption="auto"`, the default, asks the runner for
# the two costs of the very request that has to go, and takes the cheaper. (vLLM began with both too, as in the paper;
# its present engine recomputes.)
#
# ## Exercise
#
# The starts of copies are so many because of a *layout*: a block lies in 80 pieces of memory. minipaged's own
# [`KVCache`](../minipaged/reference/kv_cache.py) keeps all of a block, every layer, keys and values, in one piece.
# Draw the picture again for such a cache. What is left of the disadvantage of small blocks?

# %% tags=["solution"]
one_piece = {size: swap_seconds(costs(size, copies_per_block=1), NUM_TOKENS // size) for size in by_size}
print(f"blocks of   1: {1e3 * one_piece[1]:.1f} ms, in 80 pieces {1e3 * by_size[1]:.1f}")
print(f"blocks of 256: {1e3 * one_piece[256]:.1f} ms, in 80 pieces {1e3 * by_size[256]:.1f}")
assert one_piece[1] < 1.05 * one_piece[256]
assert all(0.95 < seconds / recomputing < 1.05 for seconds in one_piece.values())
# Next to nothing: the block size hardly matters any more, and swapping and recomputing cost the same at all of these
# sizes. What the figure shows is not a law of swapping, but what a layout costs.
Bars(rows(copies_per_block=1), fills, unit=" ms")
