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
# In <a href="?step=51#stepper-1">step 51</a> C is preempted: a cross marks it on the timeline.
# `Scheduler.schedule` finds that the blocks for the next step are not there. The three blocks of C go to the *host
# pool*, which is shown beside the other one, and C's block table now leads there. It waits ("swapped out"), ahead of
# whoever may come. When A has ended and given its blocks back, C's blocks are copied to the device again
# (<a href="?step=69#stepper-1">step 69</a>), into whatever blocks are free then. Its block table says which
# ones, so it does not matter that they are others than before.

# %%
from minipaged.events import SwappedIn, SwappedOut

[out] = [event for event in swap.events if isinstance(event, SwappedOut)]
[back] = [event for event in swap.events if isinstance(event, SwappedIn)]
print("blocks of C before:", [device for device, _ in out.pairs], "and after:", [device for _, device in back.pairs])
assert {host for _, host in out.pairs} == {host for host, _ in back.pairs}
assert [device for device, _ in out.pairs] != [device for _, device in back.pairs]
assert (swap.events.index(out), swap.events.index(back)) == (51, 68)  # after step 51; in step 69
swap

# %% [markdown]
# ## Recompute, step by step
#
# The same, up to that moment (<a href="?step=51#stepper-2">step 51</a>). Then C lets go of its blocks, and
# nothing is copied. When it comes back (<a href="?step=70#stepper-2">step 70</a>), its prompt *and* the tokens
# that it has generated so far are run like a prompt, all in one pass. They are all known by then, so this is no
# token-by-token decoding again.

# %%
recompute

# %%
for name, run in (("swap", swap), ("recompute", recompute)):
    print(f"{name:>9}: tokens in each step", [e.num_query_tokens for e in run.events if isinstance(e, StepFinished)])
again = [event.recomputed for event in recompute.events if isinstance(event, TokensComputed) and event.recomputed]
print(f"tokens computed a second time: {sum(again)}, in {len(again)} pass")

assert again == [9]
assert isinstance(recompute.events[51 - 1], RequestPreempted)
assert isinstance(recompute.events[70 - 1], TokensComputed)
assert recompute.events[70 - 1].recomputed == 9
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
    print(f"{output.request_id}:", *(f"…{completion.text}" for completion in output.outputs))

[out] = [event for event in siblings.events if isinstance(event, SwappedOut)]
[back] = [event for event in siblings.events if isinstance(event, SwappedIn)]
print(f"{len(out.pairs)} blocks of request {out.request} go to the host, {len(back.pairs)} come back")
assert out.request == back.request == "1"
assert len(out.pairs) == len(back.pairs) == 3

# %% [markdown]
# In the stepper, ×2 stands at the shared block before, in the host pool (<a href="?step=29#stepper-3">step 29</a>),
# and after (<a href="?step=45#stepper-3">step 45</a>):

# %%
assert (siblings.events.index(out), siblings.events.index(back)) == (29 - 1, 45 - 1)
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
from minipaged.scheduling import Costs

NUM_TOKENS = 256


def measured(block_size: int) -> Costs:
    config = replace(llm.config, block_size=block_size, num_blocks=64)
    return llm.loaded.tier.make_runner(llm.loaded.config, llm.loaded.weights, config).costs()


here = {block_size: measured(block_size) for block_size in (1, 16, 64)}
computing = recompute_seconds(here[16], NUM_TOKENS)
print(f"recompute: {1e3 * computing:.0f} ms, whatever the block size")
for block_size, of in here.items():
    swapping = swap_seconds(of, NUM_TOKENS // block_size)
    print(f"swap, blocks of {block_size:>2}: {1e3 * swapping:.1f} ms")
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
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100 as GPU
from minipaged.simulation.simulated import Machine

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def ways(machine: Machine) -> tuple[float, dict[int, float]]:
    """Milliseconds: what recomputing costs, and by block size what swapping does."""
    swapping = {size: 1e3 * swap_seconds(machine.costs(size), NUM_TOKENS // size) for size in SIZES}
    return 1e3 * recompute_seconds(machine.costs(16), NUM_TOKENS), swapping


print(f"{GPU.costs(1).prefill_tokens_per_second:,.0f} tokens of prefill a second")
recomputing, by_size = ways(GPU)
print(f"recompute: {recomputing:.1f} ms, whatever the block size")
for size, ms in by_size.items():
    print(f"swap, blocks of {size:>3}: {ms:5.1f} ms, {ms / recomputing - 1:+.0%}")

assert list(by_size.values()) == sorted(by_size.values(), reverse=True)
assert by_size[1] > 4 * recomputing
assert all(recomputing < by_size[size] < 1.2 * recomputing for size in (16, 32, 64))
assert recomputing < by_size[256] < 1.01 * recomputing

# %%
from minipaged.stepper.pictures import Bars


def rows(machine: Machine) -> list[tuple[str, list[tuple[str, float]]]]:
    """What recomputing costs, and for some block sizes what swapping pays for, in milliseconds."""
    recomputing, by_size = ways(machine)
    moving = 2e3 * NUM_TOKENS * machine.kv_bytes_per_token / machine.link_bytes_per_second
    parts = [("recompute, any block size", [("prefill", round(recomputing, 1))])]
    for size in (1, 4, 16, 64, 256):
        starting = round(by_size[size] - moving, 1)
        parts.append((f"swap, blocks of {size}", [("bytes", round(moving, 1)), ("starts of copies", starting)]))
    return parts


fills = {"prefill": "full", "bytes": "lines", "starts of copies": "dots"}
Bars(rows(GPU), fills, unit=" ms")

# %% [markdown]
# Swapping is poor at small blocks, recomputation flat. With blocks of 16 swapping still costs a fifth more, with 64
# four per cent, and with 256 next to nothing; but by these figures it never costs less.
#
# ### A larger model
#
# That is not so everywhere. What is *computed* for a token grows with the number of parameters, so with the square of
# the hidden size; what is *moved* grows with the hidden size alone. So the larger the model, the better is swapping.
# OPT-66B is served by four A100, each with a quarter of the model, of the keys and values, and a link of its own.
#
# **Predict.** Its hidden size is 9,216, that of OPT-13B is 5,120. From which block size on is swapping cheaper than
# recomputing?
#
# - at none, as with OPT-13B
# - from 16 on
# - from 1 on
#
# <details><summary>See</summary>
#
# **from 16 on** (`min(size for size in SIZES if larger[size] < recomputing_larger) == 16`). The bytes take little more
# than half of what computing takes. So there is room for starts of copies, but not for as many as blocks of 8 need.
#
# </details>

# %%
from minipaged.paper.machines import machine

LARGER = machine("OPT-66B")
recomputing_larger, larger = ways(LARGER)
print(f"{LARGER.name}: recompute {recomputing_larger:.1f} ms")
for size, ms in larger.items():
    print(f"swap, blocks of {size:>3}: {ms:5.1f} ms, {ms / recomputing_larger - 1:+.0%}")

assert all((larger[size] < recomputing_larger) == (size >= 16) for size in SIZES)
assert larger[256] < 0.6 * recomputing_larger

# %%
Bars(rows(LARGER), fills, unit=" ms")

# %% [markdown]
# ### What the paper measured
#
# Section 7.3 of the paper: recomputing is better with small blocks, swapping with large ones, and from 16 to 64 tokens
# a block the two are comparable. Its Fig. 19a is of OPT-13B, for which swapping did not win above. What is missing
# above? The paper's recomputing is a step of its own, and a step takes more than its arithmetic: it is scheduled,
# launched, and chooses a token. `recompute_seconds` leaves that out, since in minipaged the tokens join a step that
# runs anyway.

# %%
from minipaged.paper import published

figure = published.other("19a time (ms) by block size")
paper = dict(zip(SIZES, zip(figure["Swap in + out"], figure["Recompute"], strict=True), strict=True))
assert figure["block"] == list(SIZES)
own_step = 1e3 * GPU.step_seconds(num_rows=1, num_query_tokens=NUM_TOKENS, num_context_tokens=NUM_TOKENS)
print(f"recompute, in a step of its own: {own_step:.1f} ms")
for size, (swapped_in_paper, recomputed_in_paper) in paper.items():
    print(
        f"blocks of {size:>3}: swap {by_size[size]:5.1f} ms, in the paper {swapped_in_paper:5.1f}; "
        f"recompute in the paper {recomputed_in_paper:.1f}"
    )

assert all((by_size[size] < own_step) == (swap < again) == (size >= 32) for size, (swap, again) in paper.items())
assert all(0.85 < swap / again < 1.15 for size, (swap, again) in paper.items() if 16 <= size <= 64)

# %% [markdown]
# So with a step of its own swapping wins from 32 on, in the paper and here. (The speed of the link and the time to
# start a copy are from that figure, so that swapping agrees is no wonder. Recomputing is not.)
#
# ## Other links, other models
#
# The same for a model, a link and a request of your choice. A block is in two pieces a layer, as above. Counted are the
# products with the weights; attention's own operations, a few per cent at 2,000 tokens, are left out. On this page move
# the sliders; in the notebook change the numbers.
#
# - Each generation of PCIe doubles the link. What does that do to small blocks, and what to large ones?
# - In many models several query heads share a key/value head. Which of the two ways does that help?
# - Make the request eight times as long. Which way is cheaper now?

# %% tags=["editable"]
from dataclasses import replace

from minipaged.engine.policy import recompute_seconds, swap_seconds
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100
from minipaged.stepper.pictures import Bars

link = 13  # slide 13 to 104 doubling: GB a second between GPU and host
hidden_size = 5120  # slide 1024 to 12288 by 1024: hidden size of the model
sharing = 1  # slide 1 to 8 doubling: query heads to a key/value head
tokens = 256  # slide 256 to 2048 doubling: tokens of the request
LAYERS = 40

parameters = (10 + 2 / sharing) * LAYERS * hidden_size**2  # of the layers; keys and values have a part of their own
chosen = replace(
    OPT_13B_ON_AN_A100,
    flops_per_token=2 * parameters,
    kv_bytes_per_token=2 * LAYERS * hidden_size // sharing * 2,  # K and V, layers, numbers, bytes
    link_bytes_per_second=1e9 * link,
)
recompute_ms = 1e3 * recompute_seconds(chosen.costs(1), tokens)
moving_ms = 2e3 * tokens * chosen.kv_bytes_per_token / chosen.link_bytes_per_second
parts = [("recompute, any block size", [("prefill", round(recompute_ms, 1))])]
for size in (1, 4, 16, 64, 256):
    swap_ms = 1e3 * swap_seconds(chosen.costs(size), tokens // size)
    copies = ("starts of copies", round(swap_ms - moving_ms, 1))
    better = ": cheaper" if swap_ms < recompute_ms else ""
    parts.append((f"swap, blocks of {size}{better}", [("bytes", round(moving_ms, 1)), copies]))
Bars(parts, {"prefill": "full", "bytes": "lines", "starts of copies": "dots"}, unit=" ms")

# %% [markdown]
# A faster link and shared heads make less of the bytes, which helps large blocks; the starts of copies stay, and small
# blocks gain next to nothing. The length of the request, as it is counted here, decides nothing: both ways take twice
# as long for twice the tokens.
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
ONE_PIECE = replace(GPU, copies_per_block=1)
_, one_piece = ways(ONE_PIECE)
print(f"blocks of   1: {one_piece[1]:.1f} ms, in 80 pieces {by_size[1]:.1f}")
print(f"blocks of 256: {one_piece[256]:.1f} ms, in 80 pieces {by_size[256]:.1f}")
assert one_piece[1] < 1.05 * one_piece[256]
assert all(0.95 < ms / recomputing < 1.05 for ms in one_piece.values())
# Next to nothing: the block size hardly matters any more, and swapping and recomputing cost the same at all of these
# sizes. What the figure shows is not a law of swapping, but what a layout costs.
Bars(rows(ONE_PIECE), fills, unit=" ms")
