# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 3. Online softmax from scratch, then paged

# %% [markdown]
# **What you will understand.** How attention is computed over keys and values that lie in scattered blocks, one block
# at a time, without ever having all scores of a query (section 4.1 of the paper, Eq. 4). First the softmax, then the
# block table, then what a real Llama needs besides: several heads, several query tokens. At the end SmolLM2 runs with
# the function written here.
#
# ## Attention with all scores at hand
#
# One query `q` looks at the keys of all positions so far, its own among them. Each score becomes a weight, and the
# output is the weighted mean of the values. The comment beside a line is the shape of the array.

# %%
import math

import numpy as np

from minipaged.reference.kv_cache import Array, KVCache  # Array: any of NumPy's, as a type

rng = np.random.default_rng(0)
num_keys, head_dim = 11, 8
q = rng.standard_normal(head_dim).astype(np.float32)  # [head_dim]
K = rng.standard_normal((num_keys, head_dim)).astype(np.float32)  # [keys, head_dim]
V = rng.standard_normal((num_keys, head_dim)).astype(np.float32)  # [keys, head_dim]
scale = head_dim**-0.5


def attend(q: Array, K: Array, V: Array) -> Array:
    scores = K @ q * scale  # [keys]
    weights = np.exp(scores)  # [keys]
    return weights / weights.sum() @ V  # [head_dim]


exact = attend(q.astype(np.float64), K.astype(np.float64), V.astype(np.float64))  # [head_dim]
print("in float32:", attend(q, K, V).round(4))
print("in float64:", exact.round(4))
assert abs(attend(q, K, V) - exact).max() < 1e-6

# %% [markdown]
# ## Why the largest score is subtracted
#
# The largest number that float32 knows is about 3.4e38, and models compute in float32 or in something smaller.
#
# **Predict.** `exp(88)` is about 1.7e38. Let the query be 100 times as long, so that the largest score is 145. What
# will the output be?
#
# - infinity
# - the value of the key with the largest score
# - not a number
#
# <details><summary>See</summary>
#
# **not a number** (`np.isnan(broken).all()`). Float32 ends at 3.4e38, and `exp(145)` is far beyond that.
#
# </details>

# %%
with np.errstate(over="ignore", invalid="ignore"):  # NumPy would warn
    broken = attend(100 * q, K, V)  # [head_dim]
print("largest score:", f"{(K @ (100 * q) * scale).max():.0f}")
print("output:       ", broken)
assert 1.6e38 < math.exp(88) < 1.7e38 < float(np.finfo(np.float32).max) < 3.5e38
assert round((K @ (100 * q) * scale).max()) == 145
assert np.isnan(broken).all()

# %% [markdown]
# The weight is infinite, the sum of the weights too, and infinity divided by infinity is not a number. Nothing is wrong
# with the result that was asked for, only with the way to it: every weight is divided by their sum, so a common factor
# changes nothing. Take `exp(-m)` as that factor, where `m` is the largest score. Then the largest exponent is 0.


# %%
def attend_safely(q: Array, K: Array, V: Array) -> Array:
    scores = K @ q * scale  # [keys]
    weights = np.exp(scores - scores.max())  # [keys], at most 1
    return weights / weights.sum() @ V  # [head_dim]


sharp = attend_safely(100 * q.astype(np.float64), K, V)  # [head_dim]
print("error with scores as above:", f"{abs(attend_safely(100 * q, K, V) - sharp).max():.1e}")
assert abs(attend_safely(100 * q, K, V) - sharp).max() < 1e-4
assert abs(attend_safely(q, K, V) - exact).max() < 1e-6

# %% [markdown]
# ## The trouble with blocks
#
# Now let the keys and values come in blocks of 4. The largest score is known only after the last block. Must every
# score be kept until then, or every block be fetched twice, once for the maximum and once for the sum?
#
# Neither. Keep three running values:
#
# - `m`, the largest score *so far*;
# - `l`, the sum of `exp(score - m)` so far: the denominator;
# - `o`, the sum of `exp(score - m) * v` so far: the numerator.
#
# A new block may raise `m`. What was summed under the old one has the factor `exp(-m_old)` in it and should have
# `exp(-m_new)`. That is mended by one multiplication, whatever the number of terms: `exp(m_old - m_new)`. This is the
# **online softmax** (Milakov and Gimelshein, 2018).


# %%
def update(m: float, l: float, o: Array, scores: Array, v: Array) -> tuple[float, float, Array]:
    """The three values after some more keys, with their scores [keys] and their values v [keys, head_dim]."""
    m_new = max(m, float(scores.max()))
    fade = math.exp(m - m_new)  # 1 if no score was larger than all before
    p = np.exp(scores - m_new)  # [keys]
    return m_new, l * fade + float(p.sum()), o * fade + p @ v


# %% [markdown]
# **Predict.** The largest score of the first block is 1, that of the second is 3. By what is the sum of the first block
# multiplied, once the second has been seen? And what does `fade` come to at the very first block, before which `m` is
# minus infinity?
#
# <details><summary>See</summary>
#
# **by 0.14; at the very first block by 0** (`math.exp(1 - 3), math.exp(-math.inf - 1)`, give or take 0.02). The sum was
# in units of `exp(1)`, and is to be in units of `exp(3)`.
#
# </details>

# %%
from minipaged.stepper.pictures import Bars

blocks = {"block 0": [1.0, 0.5, 0.2, 0.9], "block 1": [3.0, 2.1, 0.4, 1.5], "block 2": [2.5, 2.8, 1.1, 0.3]}
m, l, o = -math.inf, 0.0, np.zeros(head_dim)
parts: list[tuple[str, float]] = []
rows: list[tuple[str, list[tuple[str, float]]]] = []
for name, scores in blocks.items():
    m_old, l_old = m, l
    m, l, o = update(m, l, o, np.array(scores), np.zeros((4, head_dim)))
    fade = math.exp(m_old - m)
    parts = [(block, share * fade) for block, share in parts] + [(name, l - l_old * fade)]
    rows.append((f"l after {name}", parts))
    print(f"after {name}: m = {m}, fade = {fade:.3f}, l = {l:.3f}")
    assert abs(sum(share for _, share in parts) - l) < 1e-12

assert math.exp(1 - 3) < 0.14  # what the first block is still worth
Bars(
    [(name, [(b, round(s, 2)) for b, s in cut]) for name, cut in rows],
    {"block 0": "full", "block 1": "lines", "block 2": "dots"},
    axis="l, the sum of the weights",
)

# %% [markdown]
# The second block brings a larger score, so the first one's part of `l` shrinks to `exp(-2)`, about a seventh. The
# third does not, and what was there stays. At the start `fade` is `exp(-inf)`, which is 0: the empty sums need no
# special case.
#
# Now with the keys and values from above. After every block `o / l` is the attention over the keys so far, as if the
# sequence ended there. And as no exponent is ever above 0, long queries do no harm.

# %%
block_size = 4

for name, one in (("q", q), ("100 q", 100 * q)):
    m, l, o = -math.inf, 0.0, np.zeros(head_dim, np.float32)  # o: [head_dim]
    for start in range(0, num_keys, block_size):
        stop = min(start + block_size, num_keys)
        m, l, o = update(m, l, o, K[start:stop] @ one * scale, V[start:stop])
        error = abs(o / l - attend_safely(one.astype(np.float64), K[:stop], V[:stop])).max()
        print(f"{name:>5}, {stop:>2} keys: m = {m:7.3f}, l = {l:.3f}, error {error:.0e}")
        assert error < 1e-6

# %% [markdown]
# What comes of it without the rescaling?

# %%
m, l, o = -math.inf, 0.0, np.zeros(head_dim)  # o: [head_dim]
for start in range(0, num_keys, block_size):
    scores = K[start : start + block_size] @ q * scale  # [keys of this block]
    m = max(m, float(scores.max()))
    p = np.exp(scores - m)  # [keys of this block]
    l, o = l + float(p.sum()), o + p @ V[start : start + block_size]  # every block under its own m
print(f"error without fade: {abs(o / l - exact).max():.2f}")
assert abs(o / l - exact).max() > 0.01

# %% [markdown]
# ## Through a block table
#
# Nothing in `update` asks where a block came from. So let the keys lie as PagedAttention keeps them: in a *pool* of
# blocks, this sequence's being 7, 1 and 3, as in Fig. 6 of the paper. Whatever nobody has written is NaN here, so that
# reading it would show.

# %%
num_blocks = 8
pool_k = np.full((num_blocks, block_size, head_dim), np.nan, np.float32)  # [blocks, block_size, head_dim]
pool_v = np.full((num_blocks, block_size, head_dim), np.nan, np.float32)  # [blocks, block_size, head_dim]
table = [7, 1, 3]
for position in range(num_keys):
    logical, offset = divmod(position, block_size)
    pool_k[table[logical], offset] = K[position]  # [head_dim]
    pool_v[table[logical], offset] = V[position]  # [head_dim]

# %%
from minipaged.stepper.pictures import Cells

held = {table[p // block_size] * block_size + p % block_size: p for p in range(num_keys)}  # slot -> position
slots = [held.get(slot) for slot in range(num_blocks * block_size)]
cells = [("", "nobody's") if position is None else (f"{position}", "this sequence's") for position in slots]
Cells(
    [(f"block {block}", cells[block * block_size : (block + 1) * block_size]) for block in range(num_blocks)],
    {"this sequence's": "lines", "nobody's": "empty"},
)

# %% [markdown]
# 11 keys fill two blocks and three slots of the third. The fourth slot of block 3 is NaN.
#
# **Predict.** To leave a key out one usually sets its score to minus infinity, so that its weight is 0. Is that enough
# for the empty slot?
#
# - yes, a weight of 0 leaves nothing of it
# - no, something of it is left
#
# <details><summary>See</summary>
#
# **no, something of it is left** (`weights[3] == 0 and np.isnan(weights @ v).all()`). The weight is 0, and what it is
# multiplied by counts even so.
#
# </details>

# %%
k, v = pool_k[3], pool_v[3]  # [block_size, head_dim] each
scores = np.where(np.arange(4) < 3, k @ q * scale, -np.inf)  # [block_size]
weights = np.exp(scores - scores.max())  # [block_size]
print("weights:          ", weights.round(3))
print("weights @ values: ", weights @ v)
assert weights[3] == 0
assert np.isnan(weights @ v).all()

# %% [markdown]
# It is not: 0 × NaN is NaN. The values of empty slots have to be left out too (or set to 0, as minipaged does). Here we
# cut the last block.


# %%
def attend_paged(q: Array, pool_k: Array, pool_v: Array, table: list[int], context_len: int) -> Array:
    m, l, o = -math.inf, 0.0, np.zeros(head_dim, q.dtype)  # o: [head_dim]
    for logical, block in enumerate(table):
        filled = min(block_size, context_len - logical * block_size)
        k, v = pool_k[block, :filled], pool_v[block, :filled]  # [filled, head_dim] each
        m, l, o = update(m, l, o, k @ q * scale, v)
    return o / l  # [head_dim]


paged = attend_paged(q, pool_k, pool_v, table, num_keys)  # [head_dim]
print(f"error: {abs(paged - exact).max():.0e}")
assert abs(paged - exact).max() < 1e-6

# %% [markdown]
# That is PagedAttention. Nothing was copied together, and no more than one block was looked at at a time.
#
# minipaged has the same loop for one query, `attend`. Below it runs over `q`, `K` and `V`, and its variables are looked
# at. Step through it and look at the two rows of bars: a score above `m` lifts the line, and all weights shrink by the
# same factor, until they fill the dashed outlines of the softmax over all scores. Two blocks of the pool are marked B:
# they are another sequence's, which no turn reads and no shuffle moves. Then shuffle the blocks, and see what changes
# and what does not; and take the query 100 times as long, as above, to see what `m` is for.

# %%
from minipaged.reference.attention import attend as attend_as_minipaged
from minipaged.stepper import watch_attention

walk = watch_attention(attend_as_minipaged, KVCache, q, K, V, table, num_blocks=8, block_size=4, taken=[2, 6])
print(f"places for the blocks, in each of which it ran: {len(walk.tables)}")
answers = [run["answer"] for run in walk.queries[0]["lengths"][0]["runs"]]  # different ones: [head_dim] each
assert abs(np.array(answers) - exact).max() < 1e-6
walk

# %% [markdown]
# ## Several query heads share one key/value head
#
# SmolLM2 has 9 query heads and 3 key/value heads in each layer: query heads 0, 1, 2 read the first, 3, 4, 5 the second,
# and so on. This is *grouped-query attention*, and it makes the KV cache a third as large. A block is fetched once for
# all heads, so heads are one more dimension of the same loop: query head `h` reads key/value head `h // group`.
#
# ## Several query tokens: the causal mask
#
# A sequence that is being continued has one query token, its newest. A prompt runs with all its tokens at once, and a
# token must not look at those behind it. The queries are the last of the context; a query sees the keys up to its own
# position.

# %%
context_len, num_queries = 11, 6
query_positions = np.arange(context_len - num_queries, context_len)  # [queries]
seen = np.arange(context_len) <= query_positions[:, None]  # [queries, keys]
Cells(
    [
        (f"query {position}", [(f"{key}", "seen" if sees else "not seen") for key, sees in enumerate(row)])
        for position, row in zip(query_positions, seen, strict=True)
    ],
    {"seen": "lines", "not seen": "empty"},
)

# %% [markdown]
# In blocks of 4, block 0 is seen whole by all of these queries, block 1 only in part by queries 5 and 6, and block 2
# not at all by queries 5, 6 and 7. Where a query sees no key of a block, all its scores there are minus infinity and
# its three values stay as they are. `m` is a number then already, because every query sees position 0.
#
# All of it together, for one sequence. It is the loop from above with two more dimensions:


# %%
def attend_sequence(query: Array, keys: Array, values: Array, table: Array, context_len: int, scale: float) -> Array:
    """The queries [queries, heads, head_dim] are the last of the context; the result has their shape.

    keys and values are pools [blocks, block_size, kv_heads, head_dim]; table: [blocks of the sequence].
    """
    num_queries, heads, head_dim = query.shape
    block_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    q = query.reshape(num_queries, kv_heads, group, head_dim)  # [queries, kv_heads, group, head_dim]
    position = np.arange(context_len - num_queries, context_len)  # [queries]
    m = np.full((num_queries, kv_heads, group, 1), -np.inf, q.dtype)  # [queries, kv_heads, group, 1]
    l = np.zeros_like(m)  # [queries, kv_heads, group, 1]
    o = np.zeros_like(q)  # [queries, kv_heads, group, head_dim]
    for start in range(0, context_len, block_size):
        block = table[start // block_size]
        key = np.arange(start, min(start + block_size, context_len))  # [keys], the positions in this block
        k, v = keys[block, : len(key)], values[block, : len(key)]  # [keys, kv_heads, head_dim] each
        scores = np.einsum("tngd,snd->tngs", q, k) * scale  # [queries, kv_heads, group, keys]
        seen = key <= position[:, None, None, None]  # [queries, 1, 1, keys]
        scores = np.where(seen, scores, -np.inf)  # [queries, kv_heads, group, keys]
        m_new = np.maximum(m, scores.max(axis=-1, keepdims=True))  # [queries, kv_heads, group, 1]
        fade = np.exp(m - m_new)  # [queries, kv_heads, group, 1]
        p = np.exp(scores - m_new)  # [queries, kv_heads, group, keys]
        l = l * fade + p.sum(axis=-1, keepdims=True)  # [queries, kv_heads, group, 1]
        o = o * fade + np.einsum("tngs,snd->tngd", p, v)  # [queries, kv_heads, group, head_dim]
        m = m_new  # [queries, kv_heads, group, 1]
    return (o / l).reshape(query.shape).astype(query.dtype)  # [queries, heads, head_dim]


def attend_batch(
    query: Array,
    kv_cache: KVCache,
    layer: int,
    tables: Array,
    query_start: Array,
    context_lens: Array,
    scale: float,
) -> Array:
    """Sequence after sequence. These are the arguments of minipaged's `paged_attention`:

    query [tokens, heads, head_dim]; tables [seqs, blocks]; sequence s has the query tokens query_start[s] to
    query_start[s + 1] - 1, and context_lens[s] positions. Returns [tokens, heads, head_dim].
    """
    keys, values = kv_cache.device_blocks[:, layer, 0], kv_cache.device_blocks[:, layer, 1]  # pools, as above
    output = np.empty_like(query)  # [tokens, heads, head_dim]
    for s, table in enumerate(tables):
        own = slice(query_start[s], query_start[s + 1])
        output[own] = attend_sequence(query[own], keys, values, table, context_lens[s], scale)
    return output


# %% [markdown]
# ## The same as minipaged's
#
# minipaged's [`paged_attention`](../minipaged/reference/attention.py) is this loop too; it takes several sequences and
# several small blocks in one turn, because a call of NumPy costs about as much for few keys as for many. Give both the
# same batch: a prompt of 6 tokens behind a context of 5, and a sequence of 9 tokens that goes on with one more. Their
# tables grow in turn, so that their blocks lie among each other's.

# %%
from minipaged.reference.attention import paged_attention
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable

heads, kv_heads, head_dim = 9, 3, 64  # SmolLM2's
cache = KVCache(num_layers=1, num_blocks=8, block_size=4, num_kv_heads=kv_heads, head_dim=head_dim)
cache.poison(range(8))  # NaN everywhere
allocator = BlockAllocator(num_blocks=8)
first, second = BlockTable(4, allocator), BlockTable(4, allocator)
for table_of_one, tokens in [(first, 4), (second, 3), (first, 7), (second, 7)]:
    table_of_one.append(tokens)
print("tables:", list(first.blocks), list(second.blocks))

contiguous = {}  # table -> its keys and values, [keys, kv_heads, head_dim] each, in one piece
for one in (first, second):
    shape = (one.num_tokens, kv_heads, head_dim)
    k, v = rng.standard_normal((2, *shape)).astype(np.float32)  # [keys, kv_heads, head_dim] each
    cache.write(0, one.slot_mapping(0, one.num_tokens), k, v)  # layer 0, the slots of all positions
    contiguous[one] = k, v

query = rng.standard_normal((7, heads, head_dim)).astype(np.float32)  # [tokens, heads, head_dim]
batch = (np.array([first.blocks, second.blocks]), np.array([0, 6, 7]), np.array([11, 10]), head_dim**-0.5)
ours = attend_batch(query, cache, 0, *batch)  # [tokens, heads, head_dim]
minipageds = paged_attention(query, cache, 0, *batch)  # [tokens, heads, head_dim]

# %% [markdown]
# And what is right? Ordinary attention in float64, head by head and query by query, over keys in one piece.

# %%
right = np.zeros(query.shape)  # [tokens, heads, head_dim]
places = [(first, position) for position in range(5, 11)] + [(second, 9)]  # of each query
for token, (one, position) in enumerate(places):
    for head in range(heads):
        k, v = (array[: position + 1, head // 3] for array in contiguous[one])  # [keys, head_dim] each
        scores = k.astype(np.float64) @ query[token, head] * head_dim**-0.5  # [keys]
        weights = np.exp(scores - scores.max())  # [keys]
        right[token, head] = weights / weights.sum() @ v  # [head_dim]

print(f"ours against float64:        {abs(ours - right).max():.0e}")
print(f"minipaged's against float64: {abs(minipageds - right).max():.0e}")
assert abs(ours - right).max() < 1e-5
assert abs(minipageds - right).max() < 1e-5

# %% [markdown]
# ## A real Llama
#
# minipaged has a *reference tier*, in NumPy, to be read, and a *fast tier*, with kernels. In each, a *runner* runs the
# model. That of the reference tier calls its function `attend` in each of the 30 layers. Put ours in its place: the
# words have to be the same. (Prefix caching is off until tutorial 9, which is about it.)

# %%
from minipaged import LLM, SamplingParams
from minipaged.engine.engine import Engine
from minipaged.stepper import record

llm = LLM("smollm2-135m-instruct", tier="reference", block_size=4, num_blocks=8, enable_prefix_caching=False)
prompt = llm.tokenizer.encode("The capital of France is")

config = llm.loaded.config
assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)


def write(attention) -> str:
    tier = llm.loaded.tier  # the parts of the reference tier, and its runner
    runner = tier.make_runner(config, llm.loaded.weights, llm.config)
    runner.attend = attention
    engine = Engine(llm.config, tier, runner, decode=llm.tokenizer.decode)
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=6))
    while engine.has_unfinished_requests():
        updates = engine.step()
    return updates[0].output.outputs[0].text


with record("The capital of France", llm.tokenizer.decode) as run:
    theirs = write(paged_attention)
print(f"with minipaged's: {theirs!r}")
print(f"with ours:        {write(attend_batch)!r}")
assert write(attend_batch) == theirs

# %% [markdown]
# Step to a token that is generated, and look at the lines of `_attend` that ran for it; the one that is lit divides by
# `l`. You know them all: scores, the mask (only where some query must not see some key), `m_new`, `fade`, `p`, and the
# three sums.

# %%
run

# %% [markdown]
# Now you can write your own, with a grader that finds the smallest batch that it gets wrong:
# [assignment 3](../assignments/3_paged_attention/handout.md).
#
# ## Exercise
#
# Two processors share the work: one attends to the first half of a context, the other to the second half, and neither
# knows the other's scores. Each ends with its own `(m, l, o)`. Write `merge(a, b)`, which makes one of the
# two. (This is how the fast tier decodes long contexts.)

# %% tags=["solution"]
State = tuple[float, float, Array]


def merge(a: State, b: State) -> State:
    m = max(a[0], b[0])
    fade_a, fade_b = math.exp(a[0] - m), math.exp(b[0] - m)
    return m, a[1] * fade_a + b[1] * fade_b, a[2] * fade_a + b[2] * fade_b


nothing = (-math.inf, 0.0, np.zeros(8, np.float32))
halves = [update(*nothing, K[half] @ q * scale, V[half]) for half in (slice(0, 5), slice(5, 11))]
m, l, o = merge(*halves)
print(f"error: {abs(o / l - exact).max():.0e}")
assert abs(o / l - exact).max() < 1e-6
# `update` is `merge` with one more block. The order does not matter either: positions are in the keys (RoPE) and in the
# mask, not in the sum.
assert np.allclose(merge(*halves)[2], merge(*halves[::-1])[2])
