# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 11. From NumPy to Triton: prefill and tiling

# %% [markdown]
# **What you will understand.** Why the attention of a whole prompt is another problem than that of one token, although
# the mathematics is the same: why queries go through the kernel in tiles, what the causal diagonal costs, and how
# prompts, pieces of prompts and single tokens share one grid. It builds on [tutorial 10](10_decode_kernel.py), which
# says what a program and a tile are. As there, the kernels run in Triton's interpreter: no GPU is needed, and nothing
# here says how fast one would be.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch
import triton
import triton.language as tl

from minipaged.reference.attention import paged_attention
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.reference.kv_cache import KVCache
from minipaged.stepper.pictures import Cells

# %% [markdown]
# ## Why tiles
#
# A key and a value that were read from memory can serve one query, or many. A prompt has many: all its tokens are there
# at once. Say that a program holds `rows` queries, and takes each tile of keys for all of them. For each key, a row
# costs 2 products of `dim` numbers, which is 4 × `dim` operations; and the key and its value are 2 × `dim` numbers of 2
# bytes, read once for all rows:


# %%
def operations_per_byte(rows: int, dim: int = 128) -> float:
    return rows * 4 * dim / (2 * dim * 2)


balance = 780e12 / 4.3e12  # products and memory of an H200, as the tuning log reckons
for rows, what in [(1, "one query"), (4, "a group of 4, one token (decode)"), (16, ""), (64, ""), (128, ""), (256, "")]:
    share = min(1.0, operations_per_byte(rows) / balance)
    print(f"{rows:>3} rows: {operations_per_byte(rows):>3.0f} operations a byte, {share:>4.0%} of the peak  {what}")

assert operations_per_byte(128) == 128
assert 181 < balance < 182

# %% [markdown]
# The last column is the most that the products could reach if every byte came from memory. With one query at a time the
# tensor cores would wait more than 99 % of the time. Tiles of 128 rows come to 71 %; and as other programs read the
# same keys at about the same time, many of those bytes can come from the chip's L2 cache and not from memory.
#
# **Predict.** Then why not 1,024 rows? What does a program have to keep, for each of its rows?
#
# - the keys and values that it reads
# - its output so far, and its scores with one tile of keys
# - its scores with all keys
#
# <details><summary>See</summary>
#
# **its output so far, and its scores with one tile of keys** (`2 * registers < 255 < 4 * registers`). They have to stay
# in registers, and with 512 rows there are too few of these. The keys and values of a tile are read once for all rows.
#
# </details>

# %%
rows, dim, tile, threads = 128, 128, 64, 8 * 32  # a program is eight warps of 32 threads
registers = (rows * dim + rows * tile) / threads  # the output so far, and the scores of one tile: float32 each
print(f"{registers:.0f} registers a thread for outputs and scores; there are 255")
assert registers == 96
assert 2 * registers < 255 < 4 * registers

# %% [markdown]
# The running output of every row, and the scores of a tile, live in registers, beside addresses, weights and maxima.
# With 128 rows they are 96 of a thread's 255; with 512 there would be no room, and what does not fit goes to memory and
# back at every turn: it *spills*.
#
# ## Rows are pairs
#
# As in decoding, the query heads that share a key/value head go together. Now there are many tokens too, so a row is a
# pair (query token, head): row `r` is head `r % GROUP` of token `r // GROUP`. All rows of a tile read the same keys.
# What they may **see** differs by token: a token at position `p` sees the keys `0 .. p`.
#
# Here is a prompt of 64 tokens, 4 query heads for one key/value head, in tiles of 32 rows (so 8 tokens) and 8 keys.
# A row of the picture is one program, its columns are the tiles of keys from the first to the last, and each cell is
# one turn of its loop:


# %%
def kind_of(first_pair: int, first_key: int, rows: int, tile: int, group: int) -> str:
    first_seen, last_seen = first_pair // group, (first_pair + rows - 1) // group  # by the first row, by the last
    if first_key > last_seen:
        return "left out"
    return "without mask" if first_key + tile - 1 <= first_seen else "masked"


FILLS = {"without mask": "full", "masked": "lines", "left out": "empty"}


def turns(tokens: int, rows: int, tile: int, group: int) -> list[list[str]]:
    pairs, keys = range(0, tokens * group, rows), range(0, tokens, tile)
    return [[kind_of(pair, key, rows, tile, group) for key in keys] for pair in pairs]


Cells(
    [(f"tokens {8 * i}-{8 * i + 7}", [("", kind) for kind in row]) for i, row in enumerate(turns(64, 32, 8, 4))], FILLS
)

# %% [markdown]
# Three kinds of turns. Above the diagonal no row sees anything: the loop ends before. Below it every row sees every
# key: no comparison is needed. Only on the diagonal must scores be masked one by one. So the kernel has two loops
# again: one without masks, and one for the diagonal.
#
# **Predict.** A prompt of 4,096 tokens, tiles of 128 rows and 64 keys, group 4. What share of the turns that are run
# needs a mask?
#
# <details><summary>See</summary>
#
# **3 %** (`kinds.count("masked") / run`, give or take 2). Only where the diagonal goes through: of up to 64 turns of a
# tile of rows, that is one.
#
# </details>

# %%
kinds = [kind for row in turns(4096, 128, 64, 4) for kind in row]
run = len(kinds) - kinds.count("left out")
print(f"{run} of {len(kinds)} turns are run, {run / len(kinds):.1%}; {kinds.count('masked') / run:.1%} of them masked")
assert kinds.count("masked") / run < 0.031
assert 0.5 < run / len(kinds) < 0.51

# %% [markdown]
# Half of the square is never computed, and 3 % of the rest pays for comparisons.
#
# ## The kernel
#
# One program has one tile of rows of one key/value head. `turn` is that of tutorial 10, except that what a row may see
# is its own affair: `last_seen` is the position of its query token.

# %%
LOG2_E = 1.4426950408889634


@triton.jit
def turn(
    q, m, s, o, keys, values, table, kv_head, first, end, last_seen, scale, block_stride,
    MASKED: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The keys at positions first .. first + TILE - 1, of which none from `end` on is read."""
    dim, position = tl.arange(0, DIM), first + tl.arange(0, TILE)
    block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)  # [TILE]
    at = (block * block_stride + (position % BLOCK_SIZE * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
    if MASKED:
        k = tl.load(keys + at, mask=(position < end)[:, None], other=0.0)
        v = tl.load(values + at, mask=(position < end)[:, None], other=0.0)
    else:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [ROWS, TILE]
    if MASKED:
        scores = tl.where(position[None, :] <= last_seen[:, None], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    fade, p = tl.exp2(m - m_new), tl.exp2(scores - m_new[:, None])
    return m_new, s * fade + tl.sum(p, 1), tl.dot(p, v, o * fade[:, None], input_precision="ieee")


# %% [markdown]
# ## A mixed batch
#
# The engine does not run one prompt at a time. A batch may hold a whole prompt, a chunk of another one whose first part
# is in the cache already, and sequences that decode one token each. Their query tokens lie one after another in one
# array, and `query_start` says where each sequence's begin.
#
# How many programs does such a batch need? A sequence with `n` query tokens has `n × GROUP` pairs and may end in a
# partial tile. Adding up the exact numbers of tiles would mean a sum over all sequences before one's own, in every
# program. A little generosity avoids it: sequence `s` gets the tiles from
#
#     query_start[s] * GROUP // ROWS + s
#
# on. That is never too few, and the grid is at most one tile a sequence too long. A program finds its sequence by
# counting those that begin no later than its own tile; if its tile has no pairs, it leaves.


# %%
def owners(query_lens: list[int], rows: int, group: int) -> list[tuple[int, int]]:
    """For each program: its sequence, and its first pair in it."""
    start = np.cumsum([0, *query_lens])
    begins = [int(start[s]) * group // rows + s for s in range(len(query_lens))]
    grid = int(start[-1]) * group // rows + len(query_lens)
    found = []
    for program in range(grid):
        s = sum(begin <= program for begin in begins) - 1
        found.append((s, (program - begins[s]) * rows))
    return found


r = np.random.default_rng(0)
for _ in range(200):
    lens = r.integers(1, 200, r.integers(1, 9)).tolist()
    served = {(s, pair) for s, first in owners(lens, 16, 3) for pair in range(first, min(first + 16, lens[s] * 3))}
    assert served == {(s, pair) for s, n in enumerate(lens) for pair in range(n * 3)}  # each pair, of each sequence
print(owners([33, 20, 1, 1], rows=32, group=3))

# %% [markdown]
# The last one of these belongs to a sequence with a single token. It has 3 pairs in a tile of 32 rows, and the other 29
# are idle: such batches are right for a chunk beside a few decoding sequences, and batches that only decode have a
# kernel of their own.


# %%
@triton.jit
def prefill(
    query, keys, values, tables, query_start, context_lens, out, seqs, scale, block_stride, max_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, MOST_SEQS: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    each = tl.arange(0, MOST_SEQS)
    begins = tl.load(query_start + each, mask=each < seqs, other=0) * GROUP // ROWS + each
    seq = tl.sum(((each < seqs) & (begins <= tile)).to(tl.int32), 0) - 1
    first_token = tl.load(query_start + seq)
    num_pairs = (tl.load(query_start + seq + 1) - first_token) * GROUP
    first_pair = (tile - (first_token * GROUP // ROWS + seq)) * ROWS
    if first_pair >= num_pairs:
        return

    dim, pair = tl.arange(0, DIM), first_pair + tl.arange(0, ROWS)
    exists = (pair < num_pairs)[:, None]  # [ROWS, 1]
    q_at = ((first_token + pair // GROUP) * HEADS + kv_head * GROUP + pair % GROUP)[:, None] * DIM + dim[None, :]
    q = tl.load(query + q_at, mask=exists, other=0.0)  # [ROWS, DIM]
    before = tl.load(context_lens + seq) - num_pairs // GROUP  # tokens before the first query token
    position = before + pair // GROUP  # [ROWS], of each row's token: the last one it sees
    # Up to here the first row sees all keys, and so does every row.
    whole = (before + first_pair // GROUP + 1) // TILE * TILE
    end = before + (tl.minimum(first_pair + ROWS, num_pairs) - 1) // GROUP + 1  # here the last row ends

    table = tables + seq * max_blocks
    m, s, o = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, DIM], tl.float32),
    )
    for first in range(0, whole, TILE):
        m, s, o = turn(
            q, m, s, o, keys, values, table, kv_head, first, end, position, scale, block_stride,
            False, KV_HEADS, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
    for first in range(whole, end, TILE):
        m, s, o = turn(
            q, m, s, o, keys, values, table, kv_head, first, end, position, scale, block_stride,
            True, KV_HEADS, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
    tl.store(out + q_at, o / s[:, None], mask=exists)


# %% [markdown]
# A batch of four, with SmolLM2's heads: a prompt of 33 tokens; a chunk of 20 after 31 that are in the cache; and two
# that decode. What no token fills is NaN again.

# %%
HEADS, KV_HEADS, DIM, BLOCK_SIZE, SCALE = 9, 3, 64, 16, 64**-0.5
GROUP = HEADS // KV_HEADS
QUERY_LENS, CONTEXT_LENS = np.array([33, 20, 1, 1]), np.array([33, 51, 40, 7])

random = np.random.default_rng(1)
query_start = np.cumsum([0, *QUERY_LENS])
query = random.standard_normal((int(query_start[-1]), HEADS, DIM), np.float32)  # [tokens, heads, dim]
kv = [random.standard_normal((2, n, KV_HEADS, DIM), np.float32) for n in CONTEXT_LENS]

allocator = BlockAllocator(12)
cache = KVCache(1, 12, BLOCK_SIZE, KV_HEADS, DIM)
cache.device_blocks[:] = np.nan
tables = np.full((4, 4), -1, np.int32)
for row, (k, v) in zip(tables, kv, strict=True):
    table = BlockTable(BLOCK_SIZE, allocator)
    table.append(len(k))
    cache.write(0, table.slot_mapping(0, len(k)), k, v)
    row[: len(table.blocks)] = table.blocks


def softmax_attention() -> np.ndarray:
    """Causal attention in float64, over keys that never saw a block: [tokens, heads, dim]."""
    outputs = []
    for s, (k, v) in enumerate(x.astype(np.float64).repeat(GROUP, axis=2) for x in kv):
        q = query[query_start[s] : query_start[s + 1]].astype(np.float64)  # [n, heads, dim]
        scores = np.einsum("thd,chd->htc", q, k) * SCALE  # [heads, n, context]
        later = np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]  # [n, context]
        weights = np.exp(np.where(later, -np.inf, scores - scores.max(-1, keepdims=True)))
        outputs.append(np.einsum("htc,chd->thd", weights / weights.sum(-1, keepdims=True), v))
    return np.concatenate(outputs)


EXACT = softmax_attention()


def check(name: str, out: np.ndarray) -> None:
    error = np.abs(out - EXACT).max()
    print(f"{name}: largest difference from float64 {error:.1e}")
    assert error < 1e-6  # false for NaN too


check("reference", paged_attention(query, cache, 0, tables, query_start, CONTEXT_LENS, SCALE))

# %% [markdown]
# What the mask does to one query, in numbers that can be looked at: a chunk of 4 tokens, at positions 7 to 10, after 7
# that are in the cache. (It is head 6 of the prompt, cut to 4 numbers; the reference's `attend` ran for one query after
# the other.) Choose a query, and look at what is hatched: the keys of all four are in the cache before any of them is
# scored, but each query's walk ends at its own position, with logical block 1 for the first of them, within
# logical block 2 for the others.

# %%
from minipaged.reference.attention import attend
from minipaged.stepper import watch_attention

few_keys, few_values = kv[0][:, :11, 2, :4]  # [11 keys, 4] each
watch_attention(
    attend, KVCache, query[7:11, 6, :4], few_keys, few_values, table=[7, 1, 3], num_blocks=8, block_size=4, taken=[2, 6]
)

# %%
ROWS, TILE = 32, 16  # 128 and 64 in the real kernel
blocks = torch.from_numpy(cache.device_blocks)  # [num_blocks, layers, 2, block_size, kv_heads, dim]
out = torch.full(query.shape, torch.nan)
integers = [torch.from_numpy(x.astype(np.int32)) for x in (tables, query_start, CONTEXT_LENS)]
grid = (KV_HEADS, len(query) * GROUP // ROWS + len(QUERY_LENS))
prefill[grid](
    torch.from_numpy(query), blocks[:, 0, 0], blocks[:, 0, 1], *integers, out,
    len(QUERY_LENS), SCALE * LOG2_E, cache.device_blocks[0].size, tables.shape[1],
    HEADS=HEADS, KV_HEADS=KV_HEADS, DIM=DIM, BLOCK_SIZE=BLOCK_SIZE, ROWS=ROWS, TILE=TILE, MOST_SEQS=4,
)  # fmt: skip
check("this page's kernel", out.numpy())

# %% [markdown]
# ## The real one
#
# [`paged_prefill`](../minipaged/fast/gpu/attention.py) does the same with larger tiles:

# %%
from minipaged.fast.gpu.attention import paged_prefill
from minipaged.fast.kernels import Paged

keys, values = blocks[:, 0, 0].transpose(1, 2), blocks[:, 0, 1].transpose(1, 2)  # [blocks, kv_heads, block_size, dim]
where, starts, context_lens = integers
rows = torch.arange(4, dtype=torch.int32)  # which row of the tables is whose
paged = Paged(keys, values, where, rows, context_lens)
real = paged_prefill(torch.from_numpy(query), paged, starts, SCALE, max_query_len=int(QUERY_LENS.max()))
check("the real kernel", real.numpy())

# %% [markdown]
# ## What the compiler shows
#
# A kernel can be **compiled** for a GPU on a machine that has none, and the machine code read. That does not say how
# fast it is either, but it shows what would make it slow: registers that spill, and tensor cores that are left out.
# Hopper GPUs (H100, H200) have two kinds of matrix instructions: `HMMA` (mma.sync), by one warp, and `HGMMA` (wgmma),
# by four warps together, the only one that reaches the peak. This compiles the real kernel for one, with 128 rows (for
# prompts) and with 32 (for a few tokens each). Interpreting and compiling exclude each other in one process, so this
# has one of its own. (It needs the project's tests: run the notebook in a clone.)

# %%
import json
import subprocess
import sys

environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
command = ["-m", "tests.fast.compile_kernels", "--arch", "90", "--only", "prefill-bf16-d128-g4"]
compiled = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
reports = {report["kernel"]: report for report in map(json.loads, compiled.stdout.splitlines())}
for name, report in reports.items():
    print(f"{name}: {report['registers']} registers, {report['spills']} spills, {report['tensor_cores']}")

many, few = (reports[f"prefill-bf16-d128-g4-b16-rows{rows}"] for rows in (128, 32))
assert many["spills"] == few["spills"] == 0
assert many["tensor_cores"] == ["HGMMA"]
assert few["tensor_cores"] == ["HMMA"]

# %% [markdown]
# No spills, and wgmma for the large tiles. [The tuning log](../docs/tuning.md) counts the instructions of the loop: for
# each tile of keys the products take the tensor cores 1,024 cycles, and to start the loop's instructions takes 898. If
# the two overlapped wholly the kernel would be as fast as its products; if not at all, it would reach 53 % of that.
# Which it is only a GPU can say. An H200 did 375 TFLOP/s, 48 % of a large matrix product: the two overlap little, if at
# all ([on a GPU](../docs/gpu.md)).

# %%
assert round(1024 / (1024 + 898), 2) == 0.53

# %% [markdown]
# ## Exercise
#
# Late tiles of a prompt see more keys than early ones. A GPU starts programs in the order of the grid, and the next one
# wherever a place becomes free. In which order should the tiles be started? Write `finished(costs, places)`, the time
# at which the last program ends, for a prompt of 4,096 tokens (8 key/value heads, tiles of 128 rows and 64 keys, group
# 4, 132 places, a turn as the unit of time), and compare the order of the prompt with its reverse.

# %% tags=["solution"]
import heapq


def finished(costs: list[int], places: int) -> int:
    free_at = [0] * places
    for cost in costs:
        heapq.heappush(free_at, heapq.heappop(free_at) + cost)
    return max(free_at)


a_head = [len(row) - row.count("left out") for row in turns(4096, 128, 64, 4)]
costs = [cost for cost in a_head for _ in range(8)]  # the heads of a tile are neighbours in the grid
at_best = sum(costs) / 132
for order, in_order in (("shortest first", costs), ("longest first", costs[::-1])):
    print(f"{order}: {finished(in_order, 132)} turns; evenly divided it would be {at_best:.0f}")
assert finished(costs[::-1], 132) < finished(costs, 132)
assert finished(costs[::-1], 132) < 1.05 * at_best
# What is started last should be short, so that nobody waits for it: the real kernel counts its tiles from the end.
