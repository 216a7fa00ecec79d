# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 20. A cache with floors

# %% [markdown]
# **What you will understand.** What becomes of a block that the prefix cache evicts, and how it can come back from
# slower memory: the host's, and a disk. Why a block needs another name there; why the order of moves within a step
# matters, and what a *pin* is for; when carrying a block is faster than computing it; and how much all of it gains. The
# paper has a second floor only for preempted requests (section 4.5). vLLM calls this KV offloading, SGLang calls it
# HiCache.
#
# ## Chats that come back
#
# A chat has pauses. The user reads the answer and thinks, and meanwhile others use the pool. When the next message
# comes, the whole conversation has to be in the cache again ([tutorial 9](09_prefix_caching.py)).
#
# Here are three invented chats with a librarian. Each word is one token, and a block has 4. All begin with the same
# four words. A first message has 8 words, a second one 4, and each answer has 4.

# %%
from minipaged import SamplingParams
from minipaged.stepper import Storyteller, record

SYSTEM = "You are a librarian."
chats = {
    "A": ("Where can I find the story of Troy?", "In the first hall.", "And who wrote it?", "A blind poet, Homer."),
    "B": (
        "Which shelf has the maps of the sea?",
        "Shelf nine, behind you.",
        "May I borrow them?",
        "Only for one night.",
    ),
    "C": (
        "Do you have a book about the moon?",
        "Yes, there are three.",
        "Which is the shortest?",
        "The one with pictures.",
    ),
}
texts = [" ".join([SYSTEM, *said]) for said in chats.values()]
model = Storyteller(texts)
four_words = SamplingParams(max_tokens=4, temperature=0)


def prompt(turn):
    """The tokens of a turn, such as "A2": everything that was said in chat A up to its second message."""
    said = chats[turn[0]][: 2 * int(turn[1]) - 1]
    return model.encode(" ".join([SYSTEM, *said]))


def serve(engine, turns):
    """Serve the turns, one after another. Returns how many prompt tokens of each are found."""
    found = {}
    for turn in turns:
        engine.add_request(prompt(turn), four_words, request_id=turn)
        while engine.has_unfinished_requests():
            for update in engine.step():
                if update.output:
                    found[turn] = update.output.num_cached_tokens
    engine.check_invariants()
    return found


# %% [markdown]
# After the first turn of a chat, 15 of its 16 words are computed: the last one is chosen, and not run. They fill three
# blocks, and three slots of a fourth.
#
# **Predict.** All three chats have their first turn, then all three have their second. How many of the 20 prompt tokens
# of a second turn are found in a pool of 6 blocks? And in one of 24?
#
# <details><summary>See</summary>
#
# **4 in the small pool, 15 in the large one** (`small["A2"], large["A2"]`). When a chat comes back, two others have
# been served since. Only the four words that all have in common are left.
#
# </details>

# %%
TURNS = ("A1", "B1", "C1", "A2", "B2", "C2")
small, large = (
    serve(model.engine(num_blocks=blocks, block_size=4, enable_prefix_caching=True), TURNS) for blocks in (6, 24)
)
for turn in TURNS:
    tokens = len(prompt(turn))
    print(f"{turn}: {tokens} prompt tokens; {small[turn]:2} found in a pool of 6, {large[turn]:2} in a pool of 24")
again = sum(large[turn] - small[turn] for turn in TURNS)
print(f"{again} tokens are computed a second time, because they were evicted")

assert [small[turn] for turn in TURNS[3:]] == [4, 4, 4]
assert [large[turn] for turn in TURNS[3:]] == [15, 15, 15]
assert again == 33

# %% [markdown]
# In a pool of 24 blocks nothing has to leave. But the device's memory is what a service has least of. The host often
# has several times as much, and a disk far more. So an evicted block could be *copied* there first. That is a cache
# with floors:
#
#     device pool   prefix cache     what is used now, and what was used lately
#                     │ demote   ▲
#                     ▼          │ promote
#     host pool     host floor       what was evicted
#                     │ store    ▲
#                     ▼          │ load
#     a folder      disk floor       what the host had to drop
#
# ## A name that holds on every floor
#
# To find a block, one needs a name for it. Three names come to mind, and two of them will not do.
#
# - **Its number.** The prefix cache knows that block 5 follows block 2, and compares numbers. On another floor a block
#   has another number, and when it comes back it is in whatever block is free.
# - **A hash of 64 bits.** The prefix cache uses one, but only to look: it compares the tokens afterwards, and the
#   parent's number. On a floor there are no such numbers to compare, so there the hash would have to be proof.
# - **A digest of all tokens up to the block's end.** It has 128 bits, and comes from a cryptographic function (BLAKE2):
#   to find two contents with one digest would take some 10 to the 19th tries. It is chained: the digest of a block is
#   made from its parent's digest and its own tokens, so each token is read only once.
#
# How much may a short hash be trusted? Here is the engine's hash, cut to 16 bits so that something happens in a small
# example.
#
# **Predict.** There are 65,536 such hashes. Of 1,000 different blocks, how many have one that an earlier block has
# already?
#
# - none
# - fewer than 20
# - more than 100
#
# <details><summary>See</summary>
#
# **fewer than 20** (`0 < collisions < 20`). The 1,000th block has 999 others to meet. With 64 bits it takes some
# billions of blocks, or somebody who searches for two on purpose. The price would be an answer from another user's
# prompt.
#
# </details>

# %%
from random import Random

from minipaged.engine.floors import name_of, names_of
from minipaged.handover.block_hashes import block_hashes

random = Random(0)
blocks = [[random.randrange(50_000) for _ in range(4)] for _ in range(1000)]
hashes = [block_hashes(tokens, 4)[0] % 2**16 for tokens in blocks]
collisions = len(hashes) - len(set(hashes))
digests = {name_of(None, tokens).digest for tokens in blocks}
print(f"{collisions} of {len(blocks):,} blocks have another's hash of 16 bits; {len(digests):,} different digests")

assert len(digests) == 1000

# %% [markdown]
# **Predict.** Two prompts have two blocks each. The first blocks differ, the second ones have the same four tokens. How
# many different names are there, if a name is a digest of a block's own tokens? And if it is chained?
#
# <details><summary>See</summary>
#
# **3 of own tokens, 4 chained** (`own, chained`). The two second blocks have the same tokens and different keys and
# values, because attention mixes in what was before. One name for both would give one prompt the other's.
#
# </details>

# %%
one, other = [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9, 5, 6, 7, 8]
own = len({name_of(None, tokens[i : i + 4]).digest for tokens in (one, other) for i in (0, 4)})
chained = len({name.digest for tokens in (one, other) for name in names_of(tokens, 4, 2)})
print(f"{own} names of own tokens, {chained} chained ones")

# %% [markdown]
# ## A floor by hand
#
# A floor is a dictionary from names to pages of the slower memory, and a rule for which page has to leave: the one that
# was used longest ago. A Python dictionary keeps its entries in the order in which they were put in. So to use an entry
# is to take it out and put it in again, and the first entry is the oldest.

# %%
from itertools import takewhile

from minipaged.stepper.pictures import Cells


class Shelf:
    def __init__(self, num_pages):
        self.free = [*range(num_pages)]
        self.page_of = {}  # name -> page; the one used longest ago first
        self.pinned = set()  # pages that must stay as they are until the step is over

    def use(self, name):
        self.page_of[name] = self.page_of.pop(name)

    def find(self, names):
        """The pages with these names, up to the first that is missing."""
        found = [*takewhile(self.page_of.__contains__, names)]
        for name in reversed(found):  # parents are used after their children
            self.use(name)
        return [self.page_of[name] for name in found]

    def keep(self, name):
        """A page to copy a block to; None if the block is there already, or if every page is pinned."""
        if name in self.page_of:
            self.use(name)
            return None
        if not self.free:
            oldest = next((name for name, page in self.page_of.items() if page not in self.pinned), None)
            if oldest is None:
                return None
            self.free.append(self.page_of.pop(oldest))
        self.page_of[name] = self.free.pop(0)
        return self.page_of[name]


def move(device, host, down, up):
    """What the device does before it computes: all that goes down, then all that comes up."""
    for block, page in down:
        host[page] = device[block]
    for page, block in up:
        device[block] = host[page]


# %% [markdown]
# Three blocks on the device, two pages on the shelf. A1 and A2 are the two blocks of a chat; the name "A2" stands for
# everything up to the end of A's second block. Chat B needs two more blocks. So A2 goes down, and then A1, the child
# before its parent as always.

# %%
device, host, shelf = ["A1", "A2", "B1"], [None, None], Shelf(num_pages=2)
down = [(block, shelf.keep(device[block])) for block in (1, 0)]
move(device, host, down, up=[])
device[0], device[1] = "B2", "B3"  # computed in this step, after the moves
print("down:", down, "; device:", device, "; shelf:", host)

assert host == ["A2", "A1"]
fills = {"on the device": "lines", "on the shelf": "dots"}
Cells(
    [("device", [(name, "on the device") for name in device]), ("shelf", [(name, "on the shelf") for name in host])],
    fills,
)

# %% [markdown]
# Chat A comes back. Its two blocks are on the shelf. To load them, two device blocks are needed, so B2 and B3 are
# evicted. They are kept on the shelf, like everything that is evicted. The plan of the step is easily written down:


# %%
def plan(device, shelf, names, room):
    """Load what the shelf has of these names into the device blocks `room`, whose content is evicted."""
    pages = shelf.find(names)
    down = [(block, page) for block in room if (page := shelf.keep(device[block])) is not None]
    return down, [*zip(pages, room, strict=True)]


# %% [markdown]
# **Predict.** The step moves what goes down, and then what comes up. What is in blocks 0 and 1 when it computes?
#
# - A1 and A2
# - B2 and B3
# - A1 and B3
#
# <details><summary>See</summary>
#
# **B2 and B3** (`set(device[:2]) == {"B2", "B3"}`). The request reads another chat's keys and values as its own, and no
# error is raised.
#
# </details>

# %%
down, up = plan(device, shelf, ["A1", "A2"], room=[0, 1])
move(device, host, down, up)
print("down:", down, "; up:", up, "; device:", device)

Cells(
    [("device", [(name, "on the device") for name in device]), ("shelf", [(name, "on the shelf") for name in host])],
    fills,
)

# %% [markdown]
# Making room for the load has given away the pages that are being loaded. `find` has marked them as used just now, but
# the shelf is small: B2 takes the page of A2, and B3 that of A1. Would it help to move up first? No: block 0 would be
# overwritten before B2 has left it.
#
# The cure is one line in the right place. Whoever finds something that can be dropped *holds* it before the next call
# that may drop it. The page is **pinned**, until the moves have been made:


# %%
def plan_pinned(device, shelf, names, room):
    pages = shelf.find(names)
    shelf.pinned.update(pages)  # before anything is kept
    down = [(block, page) for block in room if (page := shelf.keep(device[block])) is not None]
    return down, [*zip(pages, room, strict=True)]


device, host, shelf = ["B2", "B3", "B1"], ["A2", "A1"], Shelf(num_pages=2)
assert [shelf.keep(name) for name in ("A2", "A1")] == [0, 1]
down, up = plan_pinned(device, shelf, ["A1", "A2"], room=[0, 1])
move(device, host, down, up)
shelf.pinned.clear()
print("down:", down, "; up:", up, "; device:", device)

assert (down, device) == ([], ["A1", "A2", "B1"])

# %% [markdown]
# Now B2 and B3 are lost, because every page is pinned. That costs time later; a wrong page costs the text. SGLang has
# shipped this bug, and [the bug museum](../docs/museum/late_pin.md) has it with a failing run.
#
# A step that is *launched* is not over. While the device works, the engine may plan the next one. So a pin lasts until
# the results of its step are there, and there is a set of pins for each step in flight.
#
# ## The engine's floor
#
# [`HostFloor`](../minipaged/engine/floors.py) is this shelf. Its pages are the blocks of the host pool, which swapping
# uses too ([tutorial 8](08_preemption.py)). The moves are those of swapping as well: `swap_out`, then `swap_in`. So no
# kernel and no runner had to change. Preempted requests come first: what the floor keeps is given up for them.
#
# In Python it is `LLM(..., kv_cache_tiers=("host",), num_swap_blocks=...)`. Here are the same three chats, with 8 host
# blocks.
#
# **Predict.** A's second turn has 20 prompt tokens, of which 15 were computed before. Its first 4 are on the device.
# How many tokens are found in all?
#
# - 12
# - 15
# - 19
#
# <details><summary>See</summary>
#
# **12** (`found["A2"] == 12`). The fourth block had three of four slots filled. Only full blocks move down.
#
# </details>


# %%
class Watched(Storyteller):
    """Notes the moves before each step."""

    def move(self, moves):
        self.moved.append((moves.swap_out, moves.swap_in))


model = Watched(texts)
model.moved = []
with record("A chat comes back from the host", model.decode) as run:
    engine = model.engine(
        num_blocks=6, num_swap_blocks=8, block_size=4, enable_prefix_caching=True, kv_cache_tiers=("host",)
    )
    found = serve(engine, TURNS[:4])
print(found)

assert found == {"A1": 0, "B1": 4, "C1": 4, "A2": 12}

# %%
from minipaged.events import BlockDemoted, BlocksPromoted

sentences = run.data()["sentences"]
for number, (event, sentence) in enumerate(zip(run.events, sentences, strict=True), start=1):
    if isinstance(event, BlockDemoted | BlocksPromoted):
        print(f"step {number}: {sentence}")

[promoted] = [event for event in run.events if isinstance(event, BlocksPromoted)]
assert isinstance(run.events[57 - 1], BlockDemoted)
assert run.events.index(promoted) == 90 - 1

# %% [markdown]
# In the stepper the host pool is shown beside the other one, and *floor* marks the blocks that the floor keeps. The
# first one moves down in <a href="?step=57#stepper-1">step 57</a>, to make room for chat C. A's two blocks come back in
# <a href="?step=90#stepper-1">step 90</a>, for A's second turn, which is sequence D. Their copies stay on the floor: if
# the blocks are evicted again, nothing has to be moved.

# %%
run

# %% [markdown]
# These are the moves of the *engine's* step in which A's second turn begins, as (from, to). It is several steps of the
# stepper:

# %%
down, up = next((down, up) for down, up in model.moved if up)
print("down, device to host:", down)
print("up, host to device:  ", up)
leaves = {block for block, _ in down}
both = [block for _, block in up if block in leaves]
print(f"block {both[0]} is copied down, and then filled from the host")

assert (down, up) == (((5, 2), (4, 3), (3, 4)), ((1, 5), (0, 1)))
assert both == [5]
assert not {host for _, host in down} & {host for host, _ in up}  # which pins have to ensure

# %% [markdown]
# Why is there no pin on a *device* block? The block that is loaded into is held by its sequence. The block that moves
# down may be handed out in the same step, since it is read before anything is written.
#
# **What if a step fails?** Then nobody knows which of its moves were made. The floor forgets every block that they read
# or wrote, and these tokens are computed. What was moved in earlier steps stays.
#
# ## Does it pay?
#
# Carrying a block takes bytes ÷ link, computing it takes tokens ÷ prefill rate. Both grow with the number of blocks. So
# there is no length from which on it pays: on one machine, with one model, carrying a block is always faster than
# computing it, or never. The engine computes this once, from measured costs, and does not use a floor that is slower.
# (Faster is not enough: exercise 2 has a floor that costs time.)
#
# In [tutorial 8](08_preemption.py) swapping never paid on the paper's smallest machine, OPT-13B on an A100: with blocks
# of 16 it cost a fifth more than to compute.
#
# **Predict.** Does a floor pay on that machine, with blocks of 16?
#
# - no, the link is the same
# - yes
#
# <details><summary>See</summary>
#
# **yes** (`carrying < computing`). Swapping is out and in. With a floor, a request waits for one way only: what moves
# down does so while the step computes.
#
# </details>

# %%
from minipaged.engine.policy import carry_seconds, recompute_seconds, swap_seconds
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100 as GPU

costs = GPU.costs(16)
carrying, computing = carry_seconds(costs, 1), recompute_seconds(costs, 16)
print(f"{GPU.name}, one block of 16 tokens")
print(
    f"swap: {1e3 * swap_seconds(costs, 1):.2f} ms; one way: {1e3 * carrying:.2f} ms; compute: {1e3 * computing:.2f} ms"
)

assert swap_seconds(costs, 1) > computing

# %% [markdown]
# What does it depend on? A larger model takes more operations for a token, and they grow faster than the bytes. On an
# H200 this project has measured 786 TFLOP/s for a large product, and 55.5 GB/s from the host, by PCIe 5
# ([measurements](../docs/gpu.md)). The figures below count only the products with the weights, at that speed. Real
# prefill is slower, and so is carrying scattered blocks, so these ratios are only a guide.
#
# **Predict.** The same GPU, four models, from 0.135 to 70 billion parameters. For how many of them is the host faster
# than computing?
#
# - for all four
# - for three, not for the smallest
# - for three, not for the largest
#
# <details><summary>See</summary>
#
# **for three, not for the smallest** (`[ratio > 1 for ratio in gains.values()] == [False, True, True, True]`). The
# smallest is computed faster than its keys and values come through the link.
#
# </details>

# %%
from minipaged.stepper.pictures import Bars

MODELS = {  # bytes of K and V for a token (layers × K and V × heads × head size × 2 bytes), operations for a token
    "SmolLM2-135M": (30 * 2 * 3 * 64 * 2, 2 * 0.135e9),
    "Llama-3.2-1B": (16 * 2 * 8 * 64 * 2, 2 * 1.24e9),
    "Llama-3.1-8B": (32 * 2 * 8 * 128 * 2, 2 * 8.03e9),
    "Llama-3.1-70B": (80 * 2 * 8 * 128 * 2, 2 * 70.6e9),
}
FLOPS, LINK = 786e12, 55.5e9  # a second
gains = {}
for name, (num_bytes, operations) in MODELS.items():
    computing, carrying = operations / FLOPS, num_bytes / LINK
    gains[name] = computing / carrying
    print(
        f"{name:>13}: a token is computed in {1e6 * computing:6.2f} µs, carried in {1e6 * carrying:.2f} µs: "
        f"{gains[name]:4.1f} times as fast"
    )

assert gains["Llama-3.1-70B"] > 20
Bars(
    [(name, [("carrying", round(ratio, 1))]) for name, ratio in gains.items()],
    {"carrying": "lines"},
    axis="times as fast as computing",
)

# %% [markdown]
# Move the sliders, or in the notebook change the numbers. A block has 16 tokens.
#
# - From which speed of the link on does the host pay for a model of 8 billion parameters?
# - What changes if more query heads share keys and values, or if keys and values have 8 bits?
# - A disk that is read at 5 GB/s is `link = 5`. If only reading counted: which models could use it?

# %% tags=["editable"]
from minipaged.engine.policy import carry_seconds, recompute_seconds
from minipaged.scheduling import Costs
from minipaged.stepper.pictures import Bars

link = 55  # slide 5 to 105 by 10: GB a second
layers = 32  # slide 16 to 128 by 16: layers of the model, each with a hidden size of 128 times as many
sharing = 4  # slide 1 to 8 doubling: query heads to a key/value head
bits = 16  # slide 4 to 16 doubling: bits of a number in the cache

hidden_size = 128 * layers
parameters = 12 * layers * hidden_size**2
chosen = Costs(
    seconds_per_copy=0,
    copies_per_block=1,
    block_bytes=16 * 2 * layers * hidden_size // sharing * bits // 8,  # 16 tokens, K and V
    link_bytes_per_second=1e9 * link,
    prefill_tokens_per_second=786e12 / (2 * parameters),
)
carry_us, compute_us = 1e6 * carry_seconds(chosen, 1), 1e6 * recompute_seconds(chosen, 16)
better = "the floor pays" if carry_us < compute_us else "computing is faster"
Bars(
    [
        (f"a block, {parameters / 1e9:.1f} billion parameters", [("compute", round(compute_us, 1))]),
        (better, [("carry", round(carry_us, 1))]),
    ],
    {"compute": "full", "carry": "lines"},
    unit=" µs",
)

# %% [markdown]
# On one core of a small machine without a GPU, computing is so slow that both floors paid: for SmolLM2-135M the first
# token of a second turn came after 728 ms by computing, after 100 from the host, and after 114 from files, which were
# most likely still in the system's memory ([measured](../docs/benchmarks.md#floors-below-the-prefix-cache)).
#
# ## The disk below
#
# What the host floor drops can go to a folder, one file for a block (`kv_cache_tiers=("host", "disk")`,
# `kv_cache_folder`, `kv_cache_disk_space`). There the time to store a block counts as well as the time to load it; both
# are measured when the folder is opened. Files outlive the process, and other processes can see them. So more can
# happen to a file than to memory: it may be cut, or come from elsewhere, and whoever writes it may die halfway.
#
# - A file's name is the block's hash, which says only where to look. The file begins with a **seal**: a digest of the
#   model and the format, of all tokens up to the block's end, and of the bytes. If the seal is wrong, the file is
#   removed, and the block is computed.
# - A file is written under another name and then **renamed**, which the system does at once or not at all. So a reader
#   finds a whole file, or none. (After a loss of power a file may have its name without its content. The seal shows
#   that.)

# %%
import tempfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from minipaged.handover.disk_floor import DiskFloor
from minipaged.handover.kv_connector import Handshake

KIND = Handshake(  # what engines must have in common to read each other's files
    model="a librarian",
    dtype="float32",
    kv_cache_dtype="auto",
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    block_size=4,
    block_bytes=64,
)
temporary = tempfile.TemporaryDirectory()


def opened(folder):
    disk = DiskFloor(folder)
    disk.open(KIND)
    return disk


folder = Path(temporary.name) / "kept"
tokens = [*range(16)]  # four blocks
contents = {logical: bytes([65 + logical]) * 64 for logical in range(4)}  # 64 times A, B, C, D
writer, reader = opened(folder), opened(folder)  # as two processes would
print("stored:", writer.store(tokens, contents))
print("loaded:", [block[:1] for block in reader.load(tokens, 0, 4)])

assert reader.load(tokens, 0, 4) == [*contents.values()]

# %% [markdown]
# **Predict.** The file of logical block 1 is cut to half, and that of block 2 gets the bytes of block 3's. How many
# blocks does a load of all four return, and how many of the two bad files does it report?
#
# <details><summary>See</summary>
#
# **1 block, 1 report** (`len(loaded), said.getvalue().count("cut, damaged")`). A load ends at the first block that is
# missing, since nothing after it can be used. Then it looks for more bad files and removes
# them, without another message: one is enough to make somebody look.
#
# </details>

# %%
paths = [path for block in contents.values() for path in folder.glob("*.block") if path.read_bytes().endswith(block)]
paths[1].write_bytes(paths[1].read_bytes()[:40])
paths[2].write_bytes(paths[3].read_bytes())
with redirect_stderr(StringIO()) as said:
    loaded = reader.load(tokens, 0, 4)
    assert reader.load(tokens, 2, 4) == []  # the block after it is bad too
print(said.getvalue().replace(str(folder), "FOLDER"))

assert loaded == [contents[0]]
assert sorted(reader.lacking(tokens, 0, 4)) == [1, 2]  # so the right ones can be stored again

# %% [markdown]
# **Predict.** Another process is killed in the middle of storing block 1: it has written its bytes, and not renamed the
# file. What does the next process find?
#
# - a part of block 1, and its seal is wrong
# - block 1
# - no block 1, and a file of another name
#
# <details><summary>See</summary>
#
# **no block 1, and a file of another name** (`partial == 1 and 1 in lacking`). Such a file is removed when the folder
# is full.
#
# </details>

# %%
import subprocess
import sys

KILLED = f"""
import os
from minipaged.handover.disk_floor import DiskFloor
from minipaged.handover.kv_connector import Handshake
disk = DiskFloor({str(folder)!r})
disk.open({KIND!r})
os.replace = lambda *names: os._exit(9)  # dies at once, where it would rename the file
disk.store({tokens!r}, {{1: {contents[1]!r}}})
"""
code = subprocess.run([sys.executable, "-c", KILLED]).returncode
partial, lacking = len([*folder.glob("*.partial")]), reader.lacking(tokens, 0, 4)
print(f"exit code {code}; missing: {lacking}; {partial} partial file")

assert code == 9

# %% [markdown]
# ### Two engines, one folder
#
# Now the chats again, with five host blocks, so that a part of what is evicted goes on to the folder. (The storyteller
# has no keys and values, so a block is 64 zeros here.) When all three have had both turns, the engine stops. A new one
# starts with an empty pool and the same folder, and serves the second turns of A and B.
#
# **Predict.** How many of A's 20 prompt tokens does the new engine find, and how many of B's, which come after?
#
# - 12 of A's, 12 of B's
# - none of A's, 12 of B's
# - none of A's, 4 of B's
#
# <details><summary>See</summary>
#
# **none of A's, 12 of B's** (`second["A2"] == 0 and second["B2"] == 12`). Every turn uses the first block, and its
# children leave before it. So it was never evicted, and is not in the folder; what comes after it is of no use without
# it. When A has computed it, B finds it on the device, and goes on from the disk.
#
# </details>

# %%
from functools import partial as given

from minipaged.engine.engine import Engine
from minipaged.engine.floors import FlooredBlockManager
from minipaged.params import EngineConfig


def read_nothing(host_blocks):
    return [bytes(64) for _ in host_blocks]


def with_a_disk(folder, num_host_blocks=5):
    """An engine with both floors. An LLM does all this by itself."""
    sizes = {"num_blocks": 6, "num_swap_blocks": num_host_blocks, "block_size": 4, "max_model_len": 24}
    config = EngineConfig(**sizes, vocab_size=len(model.words), kv_cache_tiers=("host", "disk"))
    disk = opened(folder)
    disk.seconds_per_block = 0  # so that it pays, whatever this machine's disk is doing
    memory = given(FlooredBlockManager, disk=disk, read_host_blocks=read_nothing, block_bytes=64)
    return Engine(config, model.tier(), model, memory=memory, decode=model.decode)


shared = Path(temporary.name) / "shared"
first_engine = with_a_disk(shared)
first = serve(first_engine, TURNS)
print("first engine: ", first, f"; {len([*shared.glob('*.block')])} files")
second = serve(with_a_disk(shared), ("A2", "B2"))
print("second engine:", second)

assert first["A2"] == first["B2"] == first["C2"] == 12
assert first_engine.stats.blocks_loaded > 0
temporary.cleanup()

# %% [markdown]
# ## How much does it gain?
#
# That depends on how often something comes back, and on how much else comes between. Here are 60 chats on the simulated
# machine of the paper (OPT-13B on an A100, with room for 15,700 tokens). Each begins with a long message of 1,000
# tokens. Three messages of 100 tokens follow, and each answer has 40. Users think for 20 seconds on average. All chats
# together are five and a half times what the device has room for. The host floor has 0, 1 and 4 times as many blocks as
# the device.
#
# What comes up is carried before its step, since the step needs it. What goes down is carried beside the step, as on a
# GPU.

# %%
from statistics import fmean

from minipaged.simulation.simulated import SimulatedRunner, simulated_tier


class Beside(SimulatedRunner):
    """What goes down is carried while the step computes; the step takes as long as the longer of the two."""

    leaving = 0.0

    def move(self, moves):
        self.leaving = carry_seconds(self.costs(), len(moves.swap_out))
        super().move(moves._replace(swap_out=()))

    def step_seconds(self, step, rows):
        leaving, self.leaving = self.leaving, 0.0
        return max(leaving, super().step_seconds(step, rows))


def come_back(times, runner_class=Beside, machine=GPU):
    """Serve the chats with a floor of `times` the device. Returns the share of prompt tokens that is found, and the
    mean time to the first token in seconds, of all turns but the first ones."""
    runner, arrive, think = runner_class(machine, 16), Random(0), Random(1)
    num_blocks, params = machine.num_blocks(16), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    config = EngineConfig(
        num_blocks=num_blocks,
        num_swap_blocks=times * num_blocks,
        block_size=16,
        max_model_len=2048,
        vocab_size=1000,
        kv_cache_tiers=("host",) if times else (),
        preemption="recompute",
    )
    engine = Engine(config, simulated_tier(), runner, clock=runner.clock)
    coming, now = [], 0.0  # (seconds, chat, turn, what was said before)
    for chat in range(60):
        now += arrive.expovariate(1)
        coming.append((now, chat, 0, []))
    served, waits, found, asked = {}, [], 0, 0
    while coming or served:
        coming.sort()
        if not served:
            runner.now = max(runner.now, coming[0][0])
        while coming and coming[0][0] <= runner.now:
            due, chat, turn, before = coming.pop(0)
            said = [*before, *[10 * chat + turn + 1] * (100 if turn else 1000)]
            served[engine.add_request(said, params)] = due, chat, turn, said
        for output in [update.output for update in engine.step() if update.output and update.output.finished]:
            due, chat, turn, said = served.pop(output.request_id)
            found, asked = found + output.num_cached_tokens, asked + len(said)
            if turn:
                waits.append(output.metrics.first_token_time - due)
            if turn < 3:
                coming.append(
                    (runner.now + think.expovariate(1 / 20), chat, turn + 1, [*said, *output.outputs[0].token_ids])
                )
    return found / asked, fmean(waits)


# %% [markdown]
# **Predict.** Without a floor, 21 % of the prompt tokens are found, and a later turn has its first token after 0.19
# seconds on average. With a floor as large as the device, 40 % are found. And the first token?
#
# - it comes in half the time
# - it comes a fifth sooner
# - it hardly changes
#
# <details><summary>See</summary>
#
# **it hardly changes** (`0.97 < came[1][1] / came[0][1] < 1.03`). Twice as much is found. But on this machine carrying
# a block takes 60 % of computing it, and every step has to wait for what comes up.
#
# </details>

# %%
came = {times: come_back(times) for times in (0, 1, 4)}
for times, (share, seconds) in came.items():
    print(f"floor of {times} × the device: {share:.0%} found, first token after {seconds:.3f} s")

assert [round(share, 2) for share, _ in came.values()] == [0.21, 0.40, 0.68]
assert came[4][1] < 0.9 * came[0][1]
Bars(
    [
        (f"a floor of {times} × the device", [("found", share), ("computed", 1 - share)])
        for times, (share, _) in came.items()
    ],
    {"found": "lines", "computed": "full"},
    percent=True,
)

# %% [markdown]
# **Predict.** The same machine with the link of the H200 above, and with a block in one piece, not in 80. The floor is
# four times the device. With the A100's link the first token came after 0.16 s, and without a floor after 0.19. And
# now?
#
# - after 0.16 s, as before
# - in less than half of 0.19 s
#
# <details><summary>See</summary>
#
# **in less than half of 0.19 s** (`fast[4][1] < came[0][1] / 2`). As many tokens are found as before. What differs is
# how much time each of them saves.
#
# </details>

# %%
from dataclasses import replace

FAST_LINK = replace(GPU, link_bytes_per_second=LINK, copies_per_block=1)
fast = {times: come_back(times, machine=FAST_LINK) for times in (1, 4)}
for times, (share, seconds) in fast.items():
    print(f"fast link, floor of {times} × the device: {share:.0%} found, first token after {seconds:.3f} s")

rows = [("no floor", came[0][1])]
for link_name, results in (("the A100's link", came), ("a fast link", fast)):
    rows += [(f"{times} × the device, {link_name}", results[times][1]) for times in (1, 4)]
Bars([(name, [("first token", round(1000 * seconds))]) for name, seconds in rows], {"first token": "lines"}, unit=" ms")

# %% [markdown]
# These chats are friendly: everybody comes back, and soon. With a recorded trace of a real service on a simulated
# machine ([figures](../docs/benchmarks.md#floors-below-the-prefix-cache)), a floor of four times the device found 4.4 %
# of the prompt tokens, where the device alone found 3.8 %. Nearly everything that moved down was never asked for. So
# measure with your own requests. `llm.stats()` has `blocks_demoted`, `blocks_promoted` and `blocks_loaded`.
#
# ## What it does not do
#
# - **Blocks that are not full do not move down.** Of a chat that has been evicted, up to a block's tokens are computed
#   again.
# - **Every other evicted block moves down if there is a page for it**, even if it will never come back. SGLang can wait
#   until a block has been hit.
# - **What is never evicted is on no floor.** So a new engine may have to compute the beginning before it can use the
#   folder.
# - **The engine's own thread does the disk's work.** A file is read when its request is admitted, and written when the
#   host needs room. SGLang reads ahead, while a request waits in the queue.
#
# ## Exercises
#
# 1. If only reading counted: which of the four models above could use a disk that reads 5 GB a second? Which speed does
#    each need at least?

# %% tags=["solution"]
DISK = 5e9
needed = {name: num_bytes / operations * FLOPS for name, (num_bytes, operations) in MODELS.items()}
for name, least in needed.items():
    print(f"{name:>13}: at least {least / 1e9:4.1f} GB/s; {'yes' if least < DISK else 'no'}")

assert [name for name, least in needed.items() if least < DISK] == ["Llama-3.1-70B"]
# Only the largest. For the one of 8 billion parameters it is close, and real prefill is slower than a large product. So
# the engine measures both speeds when it starts.

# %% [markdown]
# 2. On a machine that cannot copy while it computes, what goes down takes its time before the step, too.
#    `SimulatedRunner` is such a machine. When does the first token come there, with a floor as large as the device? Why
#    can a floor cost time, if carrying each block is faster than computing it?

# %% tags=["solution"]
share, before = come_back(1, SimulatedRunner)
print(f"{share:.0%} found, first token after {before:.3f} s; without a floor {came[0][1]:.3f} s")

assert before > 1.5 * came[0][1]
# Break-even compares one way up with computing. Here every evicted block is carried down as well, and most of them
# never come up. All are paid for, and only a few save time.

# %% [markdown]
# 3. `Shelf.find` uses parents after their children. Take out `reversed`, keep three blocks of a chat on a shelf of
#    three pages, find them, and then keep a block of another chat. How many of the first chat's blocks are found now?
#    And with `reversed`?

# %% tags=["solution"]


class InOrder(Shelf):
    def find(self, names):
        found = [*takewhile(self.page_of.__contains__, names)]
        for name in found:
            self.use(name)
        return [self.page_of[name] for name in found]


left = {}
for kind in (InOrder, Shelf):
    shelf = kind(num_pages=3)
    for name in ("A3", "A2", "A1", "B1"):
        if name == "B1":
            shelf.find(["A1", "A2", "A3"])
        shelf.keep(name)
    left[kind.__name__] = len(shelf.find(["A1", "A2", "A3"]))
print(left)

assert left == {"InOrder": 0, "Shelf": 2}
# In order, A1 is the oldest, and is dropped. A2 and A3 still take two pages, and nobody can find them.

# %% [markdown]
# 4. Run the two engines with a folder again, with 2 host blocks instead of 5. Less is found. Which blocks never reach
#    the folder, and why?
#
# Which block should leave first is a question of its own: [assignment 10](../assignments/10_eviction/handout.md).

# %% tags=["solution"]
with tempfile.TemporaryDirectory() as name:
    few = serve(with_a_disk(Path(name), num_host_blocks=2), TURNS)
print("5 host blocks:", first)
print("2 host blocks:", few)

assert (few["A2"], few["B2"]) == (12, 4)
# When A comes back, the two host blocks are those that A loads, and they are pinned. What is evicted in this step has
# no host block to go to, and the only way to the folder leads through the host. So blocks of B are lost.
