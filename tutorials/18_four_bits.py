# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 18. Four bits

# %% [markdown]
# **What you will understand.** A step of decoding reads every weight of the model, for one token. So what it takes
# is, nearly, the bytes of the weights divided by what memory gives in a second, and a weight of 4 bits is a quarter
# of one of 16. You will pack a matrix by hand and look at its bytes; see what groups, scales and zeros are for; and
# see why rounding each weight well (*round to nearest*) is not yet the best that can be done with 4 bits (*GPTQ*), on
# a matrix of a real model. Then the same for what grows with every token: keys and values in 8 bits.
#
# You need to know what a matrix product is. What the parts are in this project, and which formats it reads, is on [a
# page of its own](../docs/concepts/quantization.md).
#
# ## A matrix by hand
#
# Two rows of eight weights. The weights of a row that are neighbours form *groups*, of four here. A group has a
# *grid*: with 4 bits 16 values, evenly spaced. The *scale* is the step from one to the next, the *zero* says which of
# the codes 0 to 15 means 0, and a code q stands for (q − zero) × scale.

# %%
import numpy as np

W = np.array(
    [[0.31, -0.12, 0.05, 0.22, -0.40, 0.11, 0.02, -0.26], [0.02, 0.03, -0.01, 0.04, 0.50, -0.70, 0.30, 0.80]],
    dtype=np.float32,
)
BITS, SIZE, TOP = 4, 4, 15

groups = W.reshape(2, 2, SIZE)  # [rows, groups, weights of a group]
low = np.minimum(groups.min(-1, keepdims=True), 0)  # [rows, groups, 1]: 0 is on every grid
high = np.maximum(groups.max(-1, keepdims=True), 0)
scales = ((high - low) / TOP).astype(np.float16).astype(np.float32)  # as they are stored
zeros = np.rint(-low / scales)
codes = np.clip(np.rint(groups / scales) + zeros, 0, TOP)
back = (codes - zeros) * scales

for row in range(2):
    for g in range(2):
        print(f"row {row}, group {g}: scale {scales[row, g, 0]:.4f}, zero {zeros[row, g, 0]:.0f}")
        for w, q, b in zip(groups[row, g], codes[row, g], back[row, g], strict=True):
            print(f"    {w:6.2f} -> code {q:2.0f} -> {b:8.4f}")

# %% [markdown]
# **Predict.** By how much is a weight off at most, in steps of its group's grid?
#
# - a quarter of a step
# - half a step
# - a whole step
#
# <details><summary>See</summary>
#
# **half a step** (`0.25 < off.max() < 0.51`). Between two neighbours of a grid nothing is further from both.
#
# </details>

# %%
off = np.abs(back - groups) / scales
print(f"at most {off.max():.3f} steps")
assert off.max() < 0.51

# %% [markdown]
# Half a step: the nearest value of a grid is never further away. (A step is rounded to float16 before it is stored;
# that adds a little.) So the step is all that matters, and a group that has only small weights has small steps.
#
# ## Its bytes
#
# A code has 4 bits, a byte has 8. The first code goes into the lower half of a byte, the second one into the upper.

# %%
from minipaged.stepper.pictures import Cells

nibbles = codes.reshape(2, 8).astype(np.uint8)
packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4  # [rows, 4] uint8
for row in range(2):
    print(f"row {row}: {' '.join(f'{byte:08b}' for byte in packed[row])}  = {packed[row].tolist()}")
assert (packed & 15 == nibbles[:, 0::2]).all()
assert (packed >> 4 == nibbles[:, 1::2]).all()

rows = []
for i, byte in enumerate(packed[0]):
    group = "the row's first group" if 2 * i < SIZE else "its second"
    rows.append((f"byte {i}: {byte}", [(f"{half:04b} = {half}", group) for half in (byte >> 4, byte & 15)]))
Cells(rows, {"the row's first group": "empty", "its second": "dots"})

# %% [markdown]
# That is what the project has, to the last byte: [`rtn`](../minipaged/reference/quantize/rtn.py) makes a stored
# matrix, [`Grouped`](../minipaged/models/quantized/stored.py), and gives rows of floats back when a product asks for
# them.

# %%
from minipaged.models.quantized.recipe import Recipe
from minipaged.reference.quantize.rtn import rtn

stored = rtn(W, Recipe("rtn", bits=BITS, group_size=SIZE))
assert (stored.codes == packed).all()
assert (stored.zeros == zeros[:, :, 0]).all()
assert np.allclose(stored.rows(), back.reshape(2, 8), atol=1e-3)
print(f"{W.nbytes} bytes in float32, {W.nbytes // 2} in float16, {stored.nbytes} now: ", end="")
print(f"{stored.codes.nbytes} of codes, {stored.scales.nbytes} of scales, {stored.zeros.nbytes} of zeros")

# %% [markdown]
# Groups of four are too small: scales and zeros take more than the codes. A group costs its scale (16 bits) and its
# zero, whatever its size:


# %%
def bits_per_weight(bits: int, size: int, zero_bits: int) -> float:
    return bits + (16 + zero_bits) / size


for size in (4, 32, 64, 128):
    print(f"groups of {size:3}: {bits_per_weight(4, size, zero_bits=4):.3f} bits a weight")
assert bits_per_weight(4, 64, zero_bits=4) < 4.5

# %% [markdown]
# ## A real one
#
# Now a matrix of SmolLM2: the one that makes queries, in the eleventh layer. A matrix is there for its products, so
# we need its inputs too. Two pieces of text run through the first eleven layers, and we keep what comes to this
# matrix: from the first text, to choose codes by; from the second, to judge them.

# %%
from dataclasses import replace

from minipaged.contracts import BatchRow
from minipaged.llm import LoadedModel
from minipaged.quantizing.texts import default_text
from minipaged.reference.kv_cache import KVCache
from minipaged.reference.llama import Llama

LAYER, TOKENS = 10, 384
NAME = f"model.layers.{LAYER}.self_attn.q_proj"

loaded = LoadedModel.load("smollm2-135m-instruct", "reference", dtype="float32")
config = replace(loaded.config, num_hidden_layers=LAYER + 1)
inputs, keys = [], []


class Watching(Llama):
    """Keeps what comes to that matrix, and the keys of its layer."""

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = super()._linear(name, x)
        if name == NAME:
            inputs.append(x)
        if name == NAME.replace("q_proj", "k_proj"):
            keys.append(y)
        return y


for for_calibration in (True, False):
    ids = loaded.tokenizer.encode(default_text(for_calibration=for_calibration))[:TOKENS]
    blocks = TOKENS // 16
    cache = KVCache(LAYER + 1, blocks, 16, config.num_key_value_heads, config.head_dim)
    Watching(config, loaded.weights, cache).forward([BatchRow(ids, 0, range(blocks), wants_logits=True)])

weight = loaded.weights[f"{NAME}.weight"]  # [out, in]
X, unseen = inputs  # [tokens, in] each
print(f"weight {weight.shape}, inputs {X.shape}")
sizes = np.sqrt((X * X).mean(axis=0))  # [in], of each input
print(f"inputs: the largest is {sizes.max() / np.median(sizes):.0f} times as large as the median one")


# %% [markdown]
# What counts is how much the *outputs* are off, compared with their size, on the text that the codes were not chosen
# by:


# %%
def error(quantized: np.ndarray, x: np.ndarray = unseen) -> float:
    return float(np.linalg.norm(x @ (weight - quantized).T) / np.linalg.norm(x @ weight.T))


nearest = rtn(weight, Recipe("rtn", bits=4, group_size=64)).rows()
print(f"round to nearest, groups of 64: the outputs are off by {error(nearest):.1%}")

# %% [markdown]
# ## Making up for it
#
# Rounding a weight errs by half a step at most, and nothing better can be done for *that weight*. But an output is a
# sum over all inputs, and inputs have to do with each other. If rounding column 0 made an output too large whenever
# input 0 is large, and input 7 is large at the same times, then a little less of weight 7 makes up for it. As long as
# column 7 is not rounded yet, that costs nothing.
#
# So [GPTQ](../minipaged/reference/quantize/gptq.py) rounds one column after another, and after each moves all columns
# that are still to come, as is best for the outputs. How they have to move depends only on H = Xᵀ X, and all of it is
# in one triangular matrix U with Uᵀ U = H⁻¹:
#
#     e = (w − what its code stands for) / U[i, i]            w_j −= e × U[i, j]    for all j after i
#
# In full, for groups of 64:

# %%
from minipaged.reference.quantize.gptq import upper_root_of_inverse
from minipaged.reference.quantize.rtn import Grid

RECIPE = Recipe("gptq", bits=4, group_size=64, act_order="none")
DAMP = 0.01  # of the mean of H's diagonal: so that it can be inverted, whatever the text


def by_columns(order: np.ndarray, *, make_up: bool = True) -> tuple[np.ndarray, list[float]]:
    """The weights as they are stored; and what the error of the outputs has grown to after each column."""
    # The grids are those of the weights as they were, of neighbours, whatever the order.
    grid = Grid.over(weight.reshape(len(weight), -1, 64), RECIPE)
    step, zero = (np.repeat(part[:, :, 0], 64, axis=1) for part in (grid.scales, grid.zeros))  # [out, in] each
    U = upper_root_of_inverse((X.T @ X)[order][:, order]).astype(np.float32)
    rest, done = weight[:, order].copy(), np.empty_like(weight)  # [out, in] both
    grown, change = [], np.zeros((len(X), len(weight)), np.float32)  # [tokens, out], of the outputs
    for i, column in enumerate(order):
        s, z = step[:, column], zero[:, column]
        codes = np.clip(np.rint(rest[:, i] / s) + z, 0, TOP)
        done[:, column] = (codes - z) * s
        e = (rest[:, i] - done[:, column]) / U[i, i]
        change += np.outer(X[:, column], done[:, column] - rest[:, i])
        if make_up:
            rest[:, i + 1 :] -= np.outer(e, U[i, i + 1 :])
            change -= np.outer(X[:, order[i + 1 :]] @ U[i, i + 1 :], e)
        if (i + 1) % (len(order) // 4) == 0:
            grown.append(float((change * change).sum() / np.square(X @ weight.T).sum()))
    return done, grown


# %% [markdown]
# **Predict.** Three ways: round to nearest, which is the same without making up; GPTQ from the first column to the
# last; and GPTQ that begins with the largest inputs (*act-order*). Where does GPTQ from the first to the last get its
# error?
#
# - evenly
# - early
# - late
#
# <details><summary>See</summary>
#
# **late** (`grown[-1] - grown[-2] > grown[-1] / 2`). The later a column comes, the fewer are left that can make up for
# it.
#
# </details>

# %%
from minipaged.stepper.pictures import Bars

in_order = np.arange(weight.shape[1])
largest_first = np.argsort(-sizes)
results = {
    "round to nearest": by_columns(in_order, make_up=False),
    "GPTQ": by_columns(in_order),
    "GPTQ, largest inputs first": by_columns(largest_first),
}
for name, (quantized, grown) in results.items():
    parts = np.diff([0.0, *grown])
    print(f"{name:>26}: outputs off by {error(quantized):.1%}; error² by quarter of the columns: ", end="")
    print(", ".join(f"{1e4 * part:5.2f}" for part in parts))
assert np.allclose(results["round to nearest"][0], nearest, atol=1e-3)
assert error(results["GPTQ"][0]) < 0.8 * error(nearest)
assert error(results["GPTQ, largest inputs first"][0]) < error(results["GPTQ"][0])
_, grown = results["GPTQ"]
assert grown[-1] - grown[-2] > grown[-1] / 2  # the last quarter's share

# %%
QUARTERS = {"the first quarter": "full", "the second": "lines", "the third": "dots", "the last": "empty"}
Bars(
    [
        (
            f"{name}: {1e4 * grown[-1]:.1f}",
            [(kind, part / grown[-1]) for kind, part in zip(QUARTERS, np.diff([0.0, *grown]), strict=True)],
        )
        for name, (_, grown) in results.items()
    ],
    QUARTERS,
    percent=True,
)

# %% [markdown]
# The picture shows the squared error of the outputs, cut into what each quarter of the columns added to it, in the
# order in which they were rounded. Beside the names is how much it is in all, in parts of ten thousand of the
# outputs' own square.
#
# Round to nearest errs wherever inputs are large; the one that is so much larger than all others is in the second
# quarter. With GPTQ the first columns add next to nothing, for hundreds of others make up for them, the largest one's
# too; the error goes to the **end**, where nobody is left. And so the order matters: when the largest inputs come
# first, what is left at the end are columns that weigh less.
#
# The weights themselves, by the way, are *further* from the original than the nearest ones:

# %%
for name, (quantized, _) in results.items():
    print(f"{name:>26}: weights off by {np.linalg.norm(quantized - weight) / np.linalg.norm(weight):.1%}")
assert np.linalg.norm(results["GPTQ"][0] - weight) > np.linalg.norm(nearest - weight)

# %% [markdown]
# ## What else there is to choose
#
# **Group size.** Smaller groups have smaller steps, and cost more scales. The project's own
# [`gptq`](../minipaged/reference/quantize/gptq.py) finds each group's grid when the columns come to it, so that it
# fits the weights as they are by then.
#
# **Predict.** Which is better: 4 bits in one group for a whole row, by GPTQ, or 4 bits in groups of 64, rounded to
# nearest?
#
# - one group for a whole row, by GPTQ
# - groups of 64, rounded to nearest
#
# <details><summary>See</summary>
#
# **one group for a whole row, by GPTQ** (`off_by["GPTQ", 4, 576] < off_by["nearest", 4, 64]`). And it takes less room:
# 4.03 bits a weight, not 4.31.
#
# </details>

# %%
from minipaged.reference.quantize.gptq import gptq

H = X.T @ X
off_by = {}  # the outputs
for bits in (4, 3):
    for size in (32, 64, 192, 576):
        plain = off_by["nearest", bits, size] = error(rtn(weight, Recipe("rtn", bits, size)).rows())
        recipe = Recipe("gptq", bits, size, act_order="static")
        better = off_by["GPTQ", bits, size] = error(gptq(weight, H, recipe).rows())
        cost = bits_per_weight(bits, size, zero_bits=bits)
        print(f"{bits} bits in groups of {size:3} ({cost:.2f} a weight): ", end="")
        print(f"nearest {plain:6.1%}, GPTQ {better:6.1%}")
assert off_by["GPTQ", 4, 576] < off_by["nearest", 4, 64]

# %% [markdown]
# GPTQ gains nearly as much as a bit is worth, here. Its gain is for the inputs of the calibration text; other texts
# have other inputs, and on these it gains less. (384 tokens are few for 576 inputs. `minipaged quantize` takes 16,384.)

# %%
better = gptq(weight, H, Recipe("gptq", 4, 64, act_order="static")).rows()
print(f"on the text that the codes were chosen by {error(better, X):.1%}, on another {error(better):.1%}")
assert error(better, X) < error(better)

# %% [markdown]
# **Act-order** in files: with `desc_act`, GPTQ's groups are of columns that follow one another *in that order*, so
# the file says for each input which group it is in, and whoever computes has to look that up. With *static groups*
# the grids are fixed beforehand, of neighbours, as in our loop above: the same gain, nearly, and a file that nobody
# needs to look things up for. `minipaged quantize MODEL -o FOLDER` does that for all matrices of a model; `minipaged
# perplexity` says what is left of it.
#
# ## Keys and values in 8 bits
#
# Weights are read once a step, whatever the batch. Keys and values are read for each sequence, and there is the other
# limit: how many tokens fit into the pool. A block has `block_size` slots, and a slot the keys and values of one
# token, in every layer, for every key/value head. In 8 bits each of these vectors needs a scale: one for each token,
# head, and key or value.


# %%
def block_bytes(bytes_per_number: int, scale_bytes: int = 0, block_size: int = 16) -> int:
    """Of SmolLM2: 30 layers, 3 key/value heads, of 64 numbers each."""
    return block_size * 2 * 30 * 3 * (64 * bytes_per_number + scale_bytes)


POOL = 512 * 2**20
fits = {
    "float32": POOL // block_bytes(4),
    "bfloat16": POOL // block_bytes(2),
    "8 bits and scales": POOL // block_bytes(1, scale_bytes=4),
}
for name, num_blocks in fits.items():
    print(f"{name:>17}: {num_blocks:>5} blocks of 16 tokens in 512 MiB")
assert block_bytes(4) == loaded.block_bytes(16)  # what the engine counts with
assert block_bytes(1, scale_bytes=4) == loaded.block_bytes(16, "int8")  # and with LLM(kv_cache_dtype="int8")
assert fits["8 bits and scales"] > 3.7 * fits["float32"]

Bars([(name, [("blocks", num_blocks)]) for name, num_blocks in fits.items()], {"blocks": "lines"}, unit=" blocks")

# %% [markdown]
# **Predict.** Why a scale for each token, and not one for a whole block? It would be 16 times fewer scales.
#
# - a block's scale would cost more time to read
# - a later key that is larger would change those that are there
#
# <details><summary>See</summary>
#
# **a later key that is larger would change those that are there** (`rewritten > 0`). All would have to be rounded once
# more, to larger steps.
#
# </details>

# %%
head = keys[1][:16, :64]  # [tokens of a block, head_dim]: the keys of one head, as they came


def to_int8(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.rint(x / scale).astype(np.int8)


own = np.abs(head).max(axis=1, keepdims=True) / 127  # [16, 1]: a scale for each token
apart = to_int8(head, own) * own

scale, rewritten = np.float32(1e-6), 0  # one for the block: found as tokens come
block = np.zeros((16, 64), np.int8)
for t, k in enumerate(head):
    needed = np.abs(k).max() / 127
    if needed > scale:  # all that is there has to be rounded once more, to the larger steps
        block[:t] = to_int8(block[:t] * scale, needed)
        scale, rewritten = needed, rewritten + t
    block[t] = to_int8(k, scale)

for name, coded in (("for each token", apart), ("for the block", block * scale)):
    print(f"a scale {name}: keys off by {np.linalg.norm(coded - head) / np.linalg.norm(head):.2%}")
print(f"and {rewritten} keys were written again, because a later one was larger")
assert rewritten > 0
assert np.linalg.norm(apart - head) < np.linalg.norm(block * scale - head)

# %% [markdown]
# With a scale of its own, a key that is written is never touched again: what is appended changes nothing. That is
# what sharing lives on. A block that two sequences hold is written by neither; a copy of a block, or one that is
# swapped, has its scales with it; and the keys of a prefix are the same whoever computed them, so that they can be
# found again. (What becomes of blocks is on the page of the [KV cache](../docs/concepts/kv_cache.md).)
#
# And attention? Scores are products of queries and keys, and an error of one step in 254 on each number of a key
# mostly averages out:

# %%
query = unseen[:16] @ weight[:64].T  # [tokens, head_dim], of the first query head, which reads the first key head


def attend(k: np.ndarray) -> np.ndarray:
    scores = query @ k.T / 8  # [queries, keys]
    return np.exp(scores - scores.max(axis=1, keepdims=True))


exact, coded = (each / each.sum(axis=1, keepdims=True) for each in (attend(head), attend(apart)))
print(f"attention's weights change by {np.abs(exact - coded).max():.4f} at most")
assert np.abs(exact - coded).max() < 0.05

# %% [markdown]
# ## Exercise
#
# A *symmetric* grid has the code in the middle mean 0 in every group, so no zeros are stored: 4.25 bits a weight in
# groups of 64, not 4.31. What does it cost? Round the matrix to nearest on symmetric grids, with your own NumPy, and
# compare. Then say what is odd about a symmetric grid of 16 values: which of its codes is hardly ever used?


# %% tags=["solution"]
def symmetric(weight: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The codes, and what they stand for."""
    groups = weight.reshape(len(weight), -1, size)
    scales = np.float32(np.float16(2 * np.abs(groups).max(-1, keepdims=True) / 15))
    codes = np.clip(np.rint(groups / scales) + 8, 0, 15)
    return codes, ((codes - 8) * scales).reshape(weight.shape)


codes, middle = symmetric(weight, 64)
print(f"symmetric {error(middle):.1%}, asymmetric {error(nearest):.1%}")
counts = np.bincount(codes.astype(int).ravel(), minlength=16)
print(f"code 0 is used {counts[0]} times, code 15 {counts[15]} times, code 8 {counts[8]} times")
assert np.allclose(middle, rtn(weight, Recipe("rtn", 4, 64, symmetric=True)).rows(), atol=1e-3)
assert error(middle) > error(nearest)
# 16 values cannot lie evenly on both sides of 0 and have 0 among them: there are 8 below and 7 above. The grid reaches
# half a step further down than any weight, so code 0 is for weights within half a step of the largest negative one.
