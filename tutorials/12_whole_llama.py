# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 12. A whole Llama, both tiers, one answer

# %% [markdown]
# **What you will understand.** Every step between the tokens of a prompt and the next one, in a real model with 30
# layers: first in forty lines of NumPy, then with the fast tier's GPU kernels. Both have to say the same; you will see
# how nearly they do, and when two right computations may still choose different words.
#
# The GPU kernels run in Triton's interpreter ([tutorial 10](10_decode_kernel.py)), so that no GPU is needed and nothing
# is compiled. That makes them slow, and tells nothing of their speed.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np

from minipaged import LLM, SamplingParams

llm = LLM("smollm2-135m-instruct", tier="reference", num_blocks=16, block_size=4)
[output] = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
said = output.outputs[0].token_ids
prompt = list(output.prompt_token_ids)
print([llm.tokenizer.decode([token]) for token in prompt], "->", repr(output.outputs[0].text))

# %% [markdown]
# ## What a Llama is made of
#
# A vector for each token, of 576 numbers, passes through 30 layers. Each adds something to it twice: what attention
# found in earlier tokens, and what a small network (the MLP) made of the token itself. At the end the vector is
# compared with the vector of each of the 49,152 tokens of the vocabulary, and those numbers are the *logits*.

# %%
from minipaged.stepper.pictures import Bars

config, weights = llm.model_config, llm.loaded.weights
sizes = {"embedding": 0, "attention": 0, "MLP": 0, "norms": 0}
for name, weight in weights.items():
    kinds = {"embed": "embedding", "self_attn": "attention", "mlp": "MLP", "norm": "norms"}
    sizes[next(kind for part, kind in kinds.items() if part in name)] += weight.size
print(f"{sum(sizes.values()):,} numbers: {sizes}")
assert sum(sizes.values()) == 134_515_008

Bars(
    [("134.5 million weights", [(kind, round(sizes[kind] / 1e6, 1)) for kind in ("embedding", "attention", "MLP")])],
    {"embedding": "dots", "attention": "lines", "MLP": "full"},
    axis="millions of weights",
)

# %% [markdown]
# ## The pieces
#
# **RMSNorm** brings each token's vector to one length, and weighs its dimensions. **RoPE** tells attention where a
# token is: it turns each pair of numbers in a query or key by an angle that grows with the position. **SiLU** is the
# gate of the MLP: number by number, what comes out of one of its matrices decides how much of another's goes on.


# %%
def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight  # [tokens, hidden]


FREQUENCIES = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)  # radians a position


def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """x: [tokens, heads, head_dim]. Numbers i and i + head_dim / 2 are a pair."""
    angles = (positions[:, None] * FREQUENCIES)[:, None]  # [tokens, 1, head_dim / 2]
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


# %% [markdown]
# **Predict.** A query at position 7 meets a key at position 3; later the same two vectors meet at positions 107 and
# 103. How do the two scores differ?
#
# - the later one is smaller: it is turned further
# - they are equal
#
# <details><summary>See</summary>
#
# **they are equal** (`abs(score(7, 3) - score(107, 103)) < 1e-9`). A product of two turned vectors depends on the angle
# between them, and both were turned further by the same.
#
# </details>

# %%
q, k = np.random.default_rng(0).standard_normal((2, 1, 1, config.head_dim))


def score(query_position: int, key_position: int) -> float:
    return float((rotate(q, np.array([query_position])) * rotate(k, np.array([key_position]))).sum())


print(f"7 and 3: {score(7, 3):.9f}   107 and 103: {score(107, 103):.9f}   7 and 4: {score(7, 4):.9f}")
assert abs(score(7, 3) - score(107, 103)) < 1e-9
assert abs(score(7, 3) - score(7, 4)) > 0.01

# %% [markdown]
# Not at all: only the distance counts. That is why keys can be turned once, when they are computed, and lie in the
# cache ready for all later queries.
#
# ## The forward pass
#
# Everything but attention is done for each token by itself. Attention is where tokens meet, and the only place that
# knows of blocks: the layer's new keys and values are written into their slots, and then read, with all earlier ones,
# through the block table. Here the whole prompt runs at once, so each of its tokens gets logits; a server asks for
# those of the last one only.

# %%
from minipaged.reference.attention import paged_attention
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.reference.kv_cache import KVCache

HEADS, KV_HEADS, DIM = config.num_attention_heads, config.num_key_value_heads, config.head_dim


def forward(token_ids: list[int], dtype: type = np.float32, after_layer: list | None = None) -> np.ndarray:
    """Logits [tokens, vocabulary] after each token."""

    def w(name: str) -> np.ndarray:
        return weights[f"{name}.weight"].astype(dtype, copy=False)

    n = len(token_ids)
    table, cache = BlockTable(4, BlockAllocator(8)), KVCache(config.num_hidden_layers, 8, 4, KV_HEADS, DIM, dtype=dtype)
    table.append(n)
    slots, blocks = table.slot_mapping(0, n), np.array([table.blocks])
    positions, start, context = np.arange(n), np.array([0, n]), np.array([n])

    x = w("model.embed_tokens")[token_ids]  # [tokens, hidden]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        y = rms_norm(x, w(f"{layer}.input_layernorm"))
        q = rotate((y @ w(f"{layer}.self_attn.q_proj").T).reshape(n, HEADS, DIM), positions)
        k = rotate((y @ w(f"{layer}.self_attn.k_proj").T).reshape(n, KV_HEADS, DIM), positions)
        v = (y @ w(f"{layer}.self_attn.v_proj").T).reshape(n, KV_HEADS, DIM)
        cache.write(i, slots, k, v)
        found = paged_attention(q, cache, i, blocks, start, context, DIM**-0.5)  # [tokens, heads, head_dim]
        x = x + found.reshape(n, HEADS * DIM) @ w(f"{layer}.self_attn.o_proj").T
        y = rms_norm(x, w(f"{layer}.post_attention_layernorm"))
        gate, up = y @ w(f"{layer}.mlp.gate_proj").T, y @ w(f"{layer}.mlp.up_proj").T  # [tokens, intermediate]
        x = x + (silu(gate) * up) @ w(f"{layer}.mlp.down_proj").T
        if after_layer is not None:
            after_layer.append(x)
    return rms_norm(x, w("model.norm")) @ w("model.embed_tokens").T


text = prompt + list(said[:-1])  # the last token was chosen and never run
logits = forward(text)
chosen = logits.argmax(-1)[len(prompt) - 1 :]
print([llm.tokenizer.decode([int(token)]) for token in chosen])
assert chosen.tolist() == list(said)

# %% [markdown]
# One pass over the text gave the word after each of its tokens, and from the end of the prompt on these are the words
# that the engine chose one at a time. And they are the logits of the project's own
# [`Llama.forward`](../minipaged/reference/llama.py), up to rounding:

# %%
from minipaged.contracts import BatchRow
from minipaged.reference.llama import Llama

llama = Llama(config, weights, KVCache(config.num_hidden_layers, 8, 4, KV_HEADS, DIM))
[last] = llama.forward([BatchRow(text, first_position=0, blocks=range(8), wants_logits=True)])
difference = float(np.abs(last - logits[-1]).max())
print(f"logits up to {np.abs(last).max():.1f}, largest difference {difference:.1e}")
assert difference < 1e-3

# %% [markdown]
# ## The same with the fast tier
#
# The fast tier's [`Llama`](../minipaged/fast/llama.py) takes other steps to the same place. Between two matrix products
# nothing is worth a pass over memory of its own, so what lies between them is one kernel each: add and normalise; turn
# queries and keys and write keys and values into their slots; attend; gate. The three matrices of queries, keys and
# values are laid one under another and are one product. Here is that pass with the project's own Triton kernels.

# %%
import torch

from minipaged.fast import gpu
from minipaged.fast.attention import attend
from minipaged.fast.kv_cache import KVCache as FastKVCache
from minipaged.fast.rope import rotary_tables


def fast_forward(token_ids: list[int]) -> np.ndarray:
    """Logits [tokens, vocabulary] after each token."""

    def w(*names: str) -> torch.Tensor:
        return torch.cat([torch.from_numpy(weights[f"{name}.weight"]) for name in names])

    n, eps = len(token_ids), config.rms_norm_eps
    cache = FastKVCache(config.num_hidden_layers, 8, 4, KV_HEADS, DIM, kernels=gpu)
    cos, sin = rotary_tables(config, n, cache.device)
    tables = torch.tensor([[5, 2, 7, 0]], dtype=torch.int32)  # any blocks will do
    positions, rows = torch.arange(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    slots = gpu.slot_mapping(tables, rows, positions, 4)
    start, context = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, n], [n]))

    residual = w("model.embed_tokens")[token_ids]  # [tokens, hidden]
    x = torch.zeros_like(residual)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        y = gpu.add_rms_norm(x, residual, w(f"{layer}.input_layernorm"), eps)  # residual += x, then its norm
        qkv = y @ w(*(f"{layer}.self_attn.{part}_proj" for part in "qkv")).T
        keys, values = cache.layer(i)
        q = gpu.rope_and_write(qkv, cos, sin, positions, slots, keys, values, HEADS)  # [tokens, heads, head_dim]
        found = attend(q, cache, i, tables, rows[:1], start, context, DIM**-0.5, max_query_len=n)
        x = found.view(n, -1) @ w(f"{layer}.self_attn.o_proj").T
        y = gpu.add_rms_norm(x, residual, w(f"{layer}.post_attention_layernorm"), eps)
        x = gpu.swiglu(y @ w(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj").T) @ w(f"{layer}.mlp.down_proj").T
    return (gpu.add_rms_norm(x, residual, w("model.norm"), eps) @ w("model.embed_tokens").T).numpy()


fast_logits = fast_forward(text)
fast_chosen = fast_logits.argmax(-1)[len(prompt) - 1 :]
print([llm.tokenizer.decode([int(token)]) for token in fast_chosen])
assert fast_chosen.tolist() == list(said)

# %% [markdown]
# One answer. On your machine the whole fast tier is one option away (on a CPU its kernels are compiled with numba,
# once):
#
#     minipaged generate "The capital of France is" --temperature 0 --tier fast --dtype float32
#     minipaged generate "The capital of France is" --temperature 0 --tier reference
#
# ## How nearly the same?
#
# The logits themselves are not equal. A sum of 576 products, taken in another order, is rounded in other places. How
# much that is can be measured: the same forward pass in float64 stands for the exact logits.
#
# **Predict.** Float32 has some 7 decimal digits. How many of them are left after 30 layers?
#
# - one or two
# - some five
# - all seven
#
# <details><summary>See</summary>
#
# **some five** (`1e-6 < max(errors.values()) / largest < 1e-4`). Each layer errs a little, and most of it averages out.
#
# </details>

# %%
exact = forward(text, np.float64)
errors = {"NumPy": float(np.abs(logits - exact).max()), "Triton": float(np.abs(fast_logits - exact).max())}
largest = float(np.abs(exact).max())
for which, error in errors.items():
    print(f"{which}: off by {error:.1e} at most; the largest logit is {largest:.1f}, so {error / largest:.0e} of it")
assert max(errors.values()) < 1e-4 * largest

# %% [markdown]
# Some five of the seven are left.
#
# ## When may two tokens differ?
#
# If each logit is off by at most *e*, then one right computation can prefer token *a* and another one token *b* only
# where the exact logits of both lie within 2*e* of the best. Such a place is a **tie**. Everywhere else both have to
# choose the same. So look at how far ahead the best token is of the second one:

# %%
second, best = np.sort(exact, axis=-1)[:, -2:].T  # [tokens] each
e = max(errors.values())
for token, gap in zip(text, best - second, strict=True):
    print(f"after {llm.tokenizer.decode([token])!r:>12} the best is {gap:.3f} ahead: {gap / (2 * e):>9,.0f} times 2e")
assert (best - second).min() > 2 * e

# %% [markdown]
# Nowhere on this text could rounding have changed a word, and so both tiers had to agree. The project's tests use the
# same reasoning the other way round. Where two greedy texts part, they do not shrug: they compute the exact logits at
# that place (by transformers, in float64), and the difference is excused only if it is a proven tie. And an error that
# is larger than rounding excuses nothing:


# %%
def is_tie(exact: np.ndarray, computed: np.ndarray, a: int, b: int) -> bool:
    e = np.abs(computed - exact).max()
    if e > 1e-4 * np.abs(exact).max():
        raise AssertionError(f"logits are off by {e}: more than rounding")
    return bool(exact.max() - min(exact[a], exact[b]) <= 2 * e)


made_up = np.array([3.0, 1.0, 3.0 - 1e-6])
rounded = made_up + np.array([-1e-6, 0.0, 1e-6])
assert made_up.argmax() == 0
assert rounded.argmax() == 2  # a right computation, and another word
assert is_tie(made_up, rounded, 0, 2)
assert not is_tie(made_up, rounded, 0, 1)
assert not is_tie(exact[-1], fast_logits[-1], int(exact[-1].argmax()), 0)
print("a tie is told from a mistake")

# %% [markdown]
# In bfloat16, with 8 significant bits in place of 24, ties come every few dozen tokens, and two right computations soon
# write different texts. Where texts have to be the same, ask for float32.
#
# ## Exercise
#
# When does the model know? Each layer only adds to the token's vector, so the vector can be compared with the
# vocabulary after *any* layer, as if it were the last one. `forward(..., after_layer=[])` collects the vectors. Print
# the best word after each fifth layer, for the last token of the prompt. From which layer on is it the answer?

# %% tags=["solution"]
vectors: list[np.ndarray] = []
forward(prompt, after_layer=vectors)
norm, vocabulary = weights["model.norm.weight"], weights["model.embed_tokens.weight"]
guesses = [int((rms_norm(x[-1:], norm) @ vocabulary.T).argmax()) for x in vectors]
for i in range(4, 30, 5):
    print(f"after layer {i + 1:>2}: {llm.tokenizer.decode([guesses[i]])!r}")
first_known = next(i for i in range(30) if set(guesses[i:]) == {said[0]})
print(f"from layer {first_known + 1} on it is {llm.tokenizer.decode([said[0]])!r}")
assert guesses[-1] == said[0]
assert first_known >= 25
# Not before the last layers: until then the vectors are on their way to an answer.
