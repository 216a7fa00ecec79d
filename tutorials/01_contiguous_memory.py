# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 1. Why a contiguous KV cache wastes most of its memory

# %% [markdown]
# **What you will understand.** A language model keeps two vectors for every token that it has seen, in every layer: a
# *key* and a *value*. Together they are the *KV cache*, and how much of it fits into memory decides how many requests
# can be served at once. This page reserves that memory in the obvious way, one contiguous piece for each request, and
# counts what becomes of it. The paper does so in section 3.1, Fig. 2 and Fig. 3. *The paper* is, on all these pages,
# [Kwon et al., 2023](../docs/paper.md): it introduces PagedAttention, and vLLM, the server that is built on it.
#
# You need to know what a Transformer is. You need nothing of vLLM.
#
# ## How large is the KV cache of one token?
#
# A key and a value (that is the 2), in each layer, for each key/value head, of so many numbers each:


# %%
def bytes_per_token(layers: int, kv_heads: int, head_dim: int, bytes_per_number: int) -> int:
    return 2 * layers * kv_heads * head_dim * bytes_per_number


print(f"SmolLM2-135M in float32: {bytes_per_token(30, 3, 64, 4):>9,} bytes a token")
print(f"OPT-13B in float16:      {bytes_per_token(40, 40, 128, 2):>9,} bytes a token")
print(f"OPT-13B, 2048 tokens:    {2048 * bytes_per_token(40, 40, 128, 2) / 2**30:>9.2f} GiB")

assert bytes_per_token(40, 40, 128, 2) == 819_200

# %% [markdown]
# One long request of a 13-billion-parameter model takes more than a gibibyte and a half. And nobody knows beforehand
# how long a request will become: the model decides that token by token.
#
# ## The obvious way: one piece of memory for each request
#
# Tensors are contiguous, so a request gets one contiguous piece, and the piece has to be there before its first token.
# Memory is a row of *slots*, each with room for the keys and values of one token. The first gap that is large enough is
# taken.

# %% tags=["needed"]
from dataclasses import dataclass, field


@dataclass
class ContiguousCache:
    """A row of slots, reserved in contiguous pieces: first fit."""

    num_slots: int
    pieces: dict[str, tuple[int, int]] = field(default_factory=dict)  # request -> (start, size)

    def reserve(self, request: str, size: int) -> bool:
        start = 0
        for taken, length in sorted(self.pieces.values()):
            if taken - start >= size:
                break
            start = taken + length
        if self.num_slots - start < size:
            return False  # no gap is large enough, though all of them together may be
        self.pieces[request] = (start, size)
        return True

    def free(self, request: str) -> None:
        del self.pieces[request]


cache = ContiguousCache(num_slots=16)
assert cache.reserve("A", 6)
assert cache.reserve("B", 4)
assert cache.reserve("C", 4)
cache.free("B")
print(cache.pieces)

# %% [markdown]
# **Predict.** 6 of the 16 slots are free now. Will a request for 5 slots get its memory?
#
# - yes, since 6 are free
# - no, though 6 are free
#
# <details><summary>See</summary>
#
# **no, though 6 are free** (`"D" not in cache.pieces`). First fit looks for one gap of 5 slots, and no gap has more
# than 4.
#
# </details>

# %%
num_free = 16 - sum(size for _, size in cache.pieces.values())
assert num_free == 6
assert not cache.reserve("D", 5)
print(f"{num_free} slots are free, and D, which asks for 5, is turned away")

# %% [markdown]
# The free slots lie in two pieces of 4 and 2. That is **external fragmentation**: memory that is free and of no use.

# %%
from minipaged.stepper.pictures import Bars

Bars(
    [("memory, 16 slots", [("request A", 6), ("free", 4), ("request C", 4), ("free", 2)])],
    {"request A": "full", "request C": "lines", "free": "empty"},
    unit=" slots",
)

# %% [markdown]
# ## Two more ways to waste it
#
# How large a piece should a request ask for? Its final length is not known. Three answers, from easy to impossible:
#
# - **longest**: as much as the model's longest sequence needs, 2048 slots. It is always enough.
# - **power of two**: suppose that we could guess the length to within a factor of two, and round up.
# - **oracle**: suppose that we knew the final length. (Nobody does.)
#
# Whatever the answer, at any moment a piece has up to three parts: slots with **tokens** in them; slots that are
# **reserved** for tokens still to come, and which nobody else can use meanwhile; and slots that will never hold any,
# the **internal fragmentation**.
#
# Now serve many requests and look at the whole memory after every step. Lengths are random, with the means that the
# paper reports for conversations (161 tokens in, 338 out); there is always somebody waiting.

# %% tags=["needed"]
import random
from collections.abc import Callable

LONGEST = 2048


def workload(count: int, mean_answer: int = 338) -> list[tuple[int, int]]:
    """(prompt tokens, final length) of each request."""
    r = random.Random(0)
    requests = []
    for _ in range(count):
        prompt = min(1 + int(r.expovariate(1 / 161)), LONGEST // 2)
        requests.append((prompt, min(prompt + 1 + int(r.expovariate(1 / mean_answer)), LONGEST)))
    return requests


def serve(
    size_of: Callable[[int], int], num_slots: int = 8 * LONGEST, steps: int = 3000, mean_answer: int = 338
) -> dict[str, float]:
    """What the slots are used for, summed over the steps. `size_of`: slots to reserve for a final length."""
    cache, waiting = ContiguousCache(num_slots), workload(2000, mean_answer)
    running: dict[str, list[int]] = {}  # request -> [tokens now, final length]
    use = {"tokens": 0, "reserved": 0, "internal": 0, "external": 0}
    for _ in range(steps):
        while cache.reserve(name := str(len(waiting)), size_of(waiting[-1][1])):
            running[name] = list(waiting.pop())
        for name, (tokens, final) in list(running.items()):
            size = cache.pieces[name][1]
            use["tokens"] += tokens
            use["reserved"] += final - tokens
            use["internal"] += size - final
            running[name][0] += 1  # everybody gets one more token
            if tokens + 1 > final:
                cache.free(name)
                del running[name]
        use["external"] += num_slots - sum(size for _, size in cache.pieces.values())
    total = sum(use.values())
    return {kind: slots / total for kind, slots in use.items()}


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


# %% [markdown]
# **Predict.** What share of the memory will hold tokens, with each of the three answers?
#
# <details><summary>See</summary>
#
# **20 % with longest, 32 % with power of two, 47 % with oracle** (`use["tokens"] for use in shares.values()`, give or
# take 10). Knowing more helps, and is not enough.
#
# </details>

# %%
shares = {
    "longest": serve(lambda final: LONGEST),
    "power of two": serve(next_power_of_two),
    "oracle": serve(lambda final: final),
}
for name, use in shares.items():
    print(f"{name:>12}: " + ", ".join(f"{kind} {share:.1%}" for kind, share in use.items()))

assert shares["longest"]["tokens"] < 0.25
assert shares["longest"]["tokens"] < shares["power of two"]["tokens"] < shares["oracle"]["tokens"]
assert shares["oracle"]["tokens"] < 0.8

# %%
Bars(
    [(name, list(use.items())) for name, use in shares.items()],
    {"tokens": "full", "reserved": "lines", "internal": "dots", "external": "empty"},
    percent=True,
)

# %% [markdown]
# The easy answer leaves four fifths of the memory without a token in it. Even the oracle cannot use all of it, since a
# piece has to be there from the first token on, and must lie in one place.
#
# The paper measured the same three answers with real requests, on a server of the kind that there was before (Orca):
# between 20.4 % and 38.2 % of the KV cache memory held tokens (Fig. 2). Memory is what limits the number of requests
# served at once, so a server with such a cache does a fraction of what its memory would allow.
#
# Operating systems met this problem long ago, and no program asks for contiguous physical memory any more. The next
# tutorial takes over their answer: pages.
#
# ## Other lengths, other pools
#
# Here is the same again, for lengths and a pool of your choice, and below it that answer: memory cut into *blocks* of
# one size, of which a request takes one whenever its last one is full. (Who finds none left takes the place of whoever
# came last, who has to begin again.) On this page move the sliders, and it is run again; in the notebook change the
# numbers.
#
# - Make the answers short. Which of the three suffers most, and why?
# - Make the pool small. Whose share falls, and is it the internal or the external fragmentation that grows?
# - Make blocks large. What do they have in common then with pieces of the longest length?

# %% tags=["editable"]
from minipaged import OutOfBlocks
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.stepper.pictures import Bars

mean_answer = 338  # slide 104 to 650 by 26: mean tokens of an answer
pool = 16384  # slide 2048 to 32768 doubling: slots of memory
block_size = 16  # slide 1 to 512 doubling: slots of a block
STEPS = 500


def serve_in_blocks() -> dict[str, float]:
    allocator, waiting = BlockAllocator(pool // block_size), workload(2000, mean_answer)
    running: list[tuple[BlockTable, int, int]] = []  # with the prompt's tokens and the final length
    use = {"tokens": 0, "internal": 0}
    for _ in range(STEPS):
        while (waiting[-1][0] - 1) // block_size + 1 + len(running) <= allocator.num_free:  # and one to spare for each
            running.append((BlockTable(block_size, allocator), *waiting.pop()))
            running[-1][0].append(running[-1][1])
        use["tokens"] += sum(table.num_tokens for table, _, _ in running)
        use["internal"] += sum(len(table.blocks) * block_size - table.num_tokens for table, _, _ in running)
        for request in list(running):
            table, _, final = request
            while request in running:
                try:
                    if table.num_tokens == final:
                        table.trim(0)  # gives all its blocks back
                        running.remove(request)
                    else:
                        table.append(1)
                    break
                except OutOfBlocks:
                    last, *lengths = running.pop()
                    last.trim(0)
                    waiting.append(tuple(lengths))
    shares = {kind: slots / (pool * STEPS) for kind, slots in use.items()}
    return shares | {"external": 1 - sum(shares.values())}


rows = {
    "longest": serve(lambda final: LONGEST, pool, STEPS, mean_answer),
    "power of two": serve(next_power_of_two, pool, STEPS, mean_answer),
    "oracle": serve(lambda final: final, pool, STEPS, mean_answer),
    f"blocks of {block_size}": serve_in_blocks(),
}
Bars(
    [(name, list(use.items())) for name, use in rows.items()],
    {"tokens": "full", "reserved": "lines", "internal": "dots", "external": "empty"},
    percent=True,
)

# %% [markdown]
# Of the blocks nothing is reserved, and what is free is of use to anybody. What is wasted is at the end of each
# request's last block: about half of it, where requests are much longer than a block.
#
# ## Exercise
#
# Could memory be moved together (*compaction*) whenever a request is turned away although enough slots are free in all?
# Write `compact(cache)`, which moves all pieces to the front, and returns how many slots had to be copied. Then work
# out how many bytes are moved if that happens to OPT-13B when all `8 * LONGEST` slots of the server above are taken.


# %% tags=["solution"]
def compact(cache: ContiguousCache) -> int:
    copied, start = 0, 0
    for name, (old, size) in sorted(cache.pieces.items(), key=lambda piece: piece[1]):
        copied += size if old != start else 0
        cache.pieces[name] = (start, size)
        start += size
    return copied


assert compact(cache) == 4  # C moves from slot 10 to slot 6
assert cache.reserve("D", 5)
gigabytes = 8 * LONGEST * bytes_per_token(40, 40, 128, 2) / 1e9
print(f"to move all {8 * LONGEST} slots of OPT-13B is to move {gigabytes:.1f} GB, while everybody waits")
# It cures external fragmentation alone: the reserved and the internal parts stay as large as they were.
