# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 22. Guess, then verify

# %% [markdown]
# **What you will understand.** A step of decoding reads the whole model to make one token. It can check several guessed
# tokens with the same reading. You will write the guessing in ten lines; see how one step says which guesses are right;
# give the memory of the wrong ones back; find out why the output stays exactly the model's, greedy or sampled; and
# compute when all of this does not pay. The idea is called *speculative decoding* (Leviathan et al., ICML 2023, [arXiv
# 2211.17192](https://arxiv.org/abs/2211.17192)), and the PagedAttention paper has none of it.
#
# ## What a step waits for
#
# Take a model of 8 billion weights with 16 bits each, on a GPU that reads 4.8 TB and computes 989 trillion operations
# per second (an H200, by its data sheet). A step reads every weight once, whatever it runs. For each token that it
# runs, it multiplies and adds once per weight. Reading and computing overlap, so the longer one counts.

# %%
from minipaged.stepper.pictures import Curves

WEIGHTS, BYTES_A_SECOND, OPERATIONS_A_SECOND = 8e9, 4.8e12, 989e12


def milliseconds(num_tokens):
    reading = 2 * WEIGHTS / BYTES_A_SECOND
    computing = 2 * WEIGHTS * num_tokens / OPERATIONS_A_SECOND
    return 1000 * max(reading, computing)


for num_tokens in (1, 5, 32, 512):
    print(f"a step with {num_tokens:3} tokens: {milliseconds(num_tokens):.2f} ms")

assert milliseconds(5) == milliseconds(1)

# %% [markdown]
# **Predict.** With how many tokens does computing take as long as reading?
#
# <details><summary>See</summary>
#
# **206** (`even`, give or take 100). Until then another token takes no time in this model of a machine. The real one
# has more to do: attention, and the work around each step.
#
# </details>

# %%
even = OPERATIONS_A_SECOND / BYTES_A_SECOND  # 2 bytes are read per weight, 2 operations computed per weight and token
print(f"{even:.0f} tokens")
Curves([("a step", [(n, milliseconds(n)) for n in range(0, 513, 8)])], x="tokens in the step", y="milliseconds")

# %% [markdown]
# So a step of five tokens takes as long as a step of one.
#
# Usually this room is filled with other requests ([tutorial 5](05_continuous_batching.py)). But a single user has no
# other requests, and waits for one token after another. That is where guesses help: if we *had* the next four tokens,
# one step could run them together. It would even read the sequence's keys and values only once.
#
# ## A guess that costs nothing
#
# Where could we get the next tokens from? An edited file repeats most of the file, and an answer about a text repeats
# words of the text. So we take the last few tokens (an *n-gram*) and look where they occurred before. The guess, called
# the *draft*, is what came after them there. This is *prompt lookup*:


# %%
def lookup(tokens, k, longest=3, shortest=1):
    """Up to k tokens that may come next: what followed the longest n-gram at the end, where it occurred first."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


words = ["the", "cat", "sat", "on", "the", "mat", ".", "the", "cat"]
print(" ".join(words), "->", lookup(words, k=4))

assert lookup(words, 4) == ["sat", "on", "the", "mat"]

# %% [markdown]
# **Predict.** What does it draft after `a b c a b d a b`, with k = 2?
#
# - d a
# - c a
# - nothing
#
# <details><summary>See</summary>
#
# **c a** (`lookup([*"abcabdab"], 2) == ["c", "a"]`). "d a b" did not occur before. "a b" occurred twice,
# and the first time counts.
#
# </details>

# %%
import random

from minipaged.engine.prompt_lookup import PromptLookup

print(lookup([*"abcabdab"], k=2))
for seed in range(200):
    tokens = random.Random(seed).choices(range(4), k=seed % 20)
    assert PromptLookup(tokens, 1, 3).draft(4) == lookup(tokens, 4)

# %% [markdown]
# The project's [`PromptLookup`](../minipaged/engine/prompt_lookup.py) drafts the same tokens. It finds them in an
# index, because our loop would search a long text again in every step.
#
# The other usual source of drafts is a small *draft model* (`"method": "draft_model"`). It guesses token after token,
# so it runs several times per step. In minipaged its keys and values lie in the same blocks as the model's.
#
# ## One step verifies all
#
# Now the real model reads a text, and a draft of four tokens. The step runs the text's last token and the drafted ones:
# five *query tokens*. `num_drafted` asks for logits after each of the five, and not only after the last. Row i predicts
# the token after the first i drafted ones.

# %%
from minipaged import LLM, SamplingParams
from minipaged.contracts import BatchRow
from minipaged.reference.kv_cache import KVCache
from minipaged.reference.llama import Llama

llm = LLM("smollm2-135m-instruct", tier="reference", block_size=4, num_blocks=64)
config, decode = llm.model_config, llm.tokenizer.decode


def model():
    """The model with an empty cache of 16 blocks."""
    cache = KVCache(config.num_hidden_layers, 16, 4, config.num_key_value_heads, config.head_dim)
    return Llama(config, llm.loaded.weights, cache)


text = llm.tokenizer.encode("Peter likes Anna. Anna likes Tom. Tom likes")
draft = lookup(text, k=4)
llama, blocks = model(), range(16)
llama.forward([BatchRow(text[:-1], 0, blocks, wants_logits=False)])  # all but the last token are computed
query = [text[-1], *draft]
logits = llama.forward([BatchRow(query, len(text) - 1, blocks, wants_logits=True, num_drafted=4)])  # [5, vocabulary]
chosen = [int(row.argmax()) for row in logits]
for i, token in enumerate(query):
    wanted = f"drafted {decode([draft[i]])!r}" if i < 4 else ""
    print(f"row {i}, after {decode([token])!r:9}: {decode([chosen[i]])!r:9} {wanted}")

# %% [markdown]
# The model chooses greedily here: each row's token is the likeliest one.
#
# **Predict.** How many of the four drafted tokens stand, and how many tokens does the step give in all?
#
# <details><summary>See</summary>
#
# **2 stand, 3 tokens** (`stand, len(given)`). " Anna" and "." are what the model would have said. Row 2 says a new line
# and not " Anna". That ends it, and the new line takes the place of the drafted token. Row 3 agrees with the draft
# again, but it predicts what comes after a wrong word, so it says nothing about our text.
#
# </details>

# %%
stand = 0
while stand < 4 and chosen[stand] == draft[stand]:
    stand += 1
given = chosen[: stand + 1]  # the tokens that stand, and the model's own next one
print(f"{stand} stand; the step gives {[decode([token]) for token in given]}")

assert chosen[3] == draft[3]

# %% [markdown]
# The first token that differs is the last one that counts. Without drafts, one token per step, the model says:

# %%
[plain] = llm.generate([text], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
print([decode([token]) for token in plain.outputs[0].token_ids])

assert [*plain.outputs[0].token_ids] == given

# %% [markdown]
# The same. A wrong draft never changes the output, because each token that we keep was chosen by the model, after
# tokens that the model also chose. Even if all four had been refused, row 0 would have given the one token that a plain
# step gives. And if all four stand, row 4 gives one more, the *bonus token*. So a step with k drafted tokens gives 1 to
# k + 1 tokens.
#
# ## Roll back
#
# To be run, the drafted tokens needed slots, and now there are keys and values of refused tokens in them. The block
# table gives these slots back with `trim`. Here are the table's slots during the step, and after it.

# %%
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from minipaged.stepper.pictures import Cells

allocator = BlockAllocator(num_blocks=8)
table = BlockTable(4, allocator)
table.append(len(text))  # the text, whose last token the step runs
table.append(len(draft))
during = list(table.blocks)
table.trim(len(text) + stand)
print(f"during the step: {len(during)} blocks; after it: {len(table.blocks)} blocks, {table.num_tokens} tokens in them")

# %%
ran = [decode([token]).strip() or "↵" for token in [*text, *draft]]
kinds = ["text"] * len(text) + ["stands"] * stand + ["given back"] * (4 - stand)
cells = list(zip(ran, kinds, strict=True)) + [("", "never used")] * (-len(ran) % 4)
Cells(
    [(f"block {block}", cells[4 * i : 4 * i + 4]) for i, block in enumerate(during)],
    {"text": "full", "stands": "dots", "given back": "lines", "never used": "empty"},
)

# %% [markdown]
# **Predict.** The sequence now has its text, the two tokens that stand, and the new line: how many tokens, and how many
# of them have keys and values?
#
# <details><summary>See</summary>
#
# **13 tokens, 12 with keys and values** (`len(text) + len(given), table.num_tokens`). The last token of a sequence
# never has any. It came *out of* the step, and keys and values are made of tokens that go *into* a step. The next step
# runs it.
#
# </details>

# %%
sequence = [*text, *given]
print(f"{len(sequence)} tokens; next, position {table.num_tokens} is run: {decode([sequence[table.num_tokens]])!r}")

assert len(sequence) == table.num_tokens + 1
assert allocator.num_free == 5  # block 3 is free again

# %% [markdown]
# Block 3 is free again, for any sequence.
#
# Two rules keep this simple in the engine. A step's slots are trimmed before anything else can happen to the sequence.
# So preemption, a fork or an error never meets a slot of a refused token. And a block goes to the prefix cache
# ([tutorial 9](09_prefix_caching.py)) only when all its tokens are verified, because others may read it from then on.
#
# It is easy to be off by one here. If the bonus token is counted as computed, then its slot is read before anybody has
# written it. And a draft model that stops at its last guess is one token further behind: it never ran that guess. Here
# are both counts, if all k tokens stand:
#
#     tokens            ... t  d1  d2  d3  d4  bonus
#     model ran             t  d1  d2  d3  d4             next it runs the bonus token
#     draft model ran       t  d1  d2  d3                 next it runs d4 and the bonus token
#
# A bug in the last line has shipped, and [the bug museum](../docs/museum/bonus_token.md) has it with a failing run. In
# minipaged the draft model runs its last guess, too, so that its keys and values are there: k + 1 passes for k drafted
# tokens. So it is never behind.
#
# ## When tokens are sampled
#
# With a temperature, the model does not say one token but a distribution p. A draft model has another one, q, and draws
# its guess from it. Which guesses may stand, so that the output still has distribution p?
#
# The obvious way is to draw a token from p as ever, and to *compare*. That is right, but two independent draws often
# differ, even if p and q are equal. *Rejection* accepts more. A drafted token x stands with probability
# min(1, p(x) / q(x)). If it is refused, a token is drawn from what q gives too little of: the *residual*, which is
# max(0, p − q), divided by its sum.

# %%
import numpy as np

NAMES = ["tea", "milk", "beer", "rum"]
p = np.array([0.50, 0.30, 0.15, 0.05])  # the model's
q = np.array([0.30, 0.10, 0.50, 0.10])  # the draft model's
rng = np.random.default_rng(0)
DRAWS = 200_000


def draw(weights, size=DRAWS):
    """Tokens [size] drawn with these weights."""
    return rng.choice(4, size, p=weights / weights.sum())


drafted = draw(q)
stands = rng.random(DRAWS) < p[drafted] / q[drafted]
residual = np.maximum(0, p - q)
output = np.where(stands, drafted, draw(residual))

# %% [markdown]
# **Predict.** The two distributions are in the cell above. Which share of the drafted tokens stands, in per cent?
#
# <details><summary>See</summary>
#
# **60 %** (`stands.mean()`, give or take 2). Tea is drafted in 30 % of all draws and always stands; so does milk, in
# 10 %. Beer is drafted in 50 % of all draws, and drafted and kept in only 15 %; rum in 10 %, and kept in 5 %. Each
# token x brings min(p(x), q(x)), so the share is their sum. No other way accepts more.
#
# </details>

# %%
print(f"{stands.mean():.1%} stand; the sum of min(p, q) is {np.minimum(p, q).sum():.1%}")
for x, name in enumerate(NAMES):
    print(f"{name:5} wanted {p[x]:.0%}, drafted {np.mean(drafted == x):.1%}, in the output {np.mean(output == x):.1%}")

assert np.abs(np.bincount(output) / DRAWS - p).max() < 0.005
assert abs(stands.mean() - np.minimum(p, q).sum()) < 0.005

# %% [markdown]
# The output has the model's distribution, although more than half of it was guessed by another model. This can also be
# seen without drawing: token x gets min(p, q) from drafts that stand, and p − min(p, q) from the residual.
#
# ### The same seed, the same tokens
#
# Comparing has another advantage. In minipaged the random number of a draw depends on the request's seed, the sample
# and the position, and on nothing else. (The draft model draws with the same number as the model, so the two agree more
# often than independent draws.) Rejection needs two more numbers at a position: one for acceptance, one for the
# residual. They follow from the same seed, sample and position, but each purpose has a number of its own.
#
# A model with a vocabulary of five tokens says 20 of them with one seed, in five ways: without drafts; with 1 and with
# 4 drafted tokens per step that are compared; with 1 and with 4 that stand by rejection.
#
# **Predict.** Which of the five texts are equal?
#
# - all five: the seed is the same
# - the first three
# - none
#
# <details><summary>See</summary>
#
# **the first three** (`say(4)[0] == say(1)[0] == say(0)[0] != say(4, True)[0] != say(1, True)[0]`). Where tokens are
# compared, each token is the one that a plain draw gives, drafted or not. With rejection, a drafted token that stands
# was drawn from q.
#
# </details>

# %%
from minipaged.contracts import Draft, SamplingInput
from minipaged.reference.sampling import sample
from minipaged.reference.speculation import verify

sampled = SamplingParams(temperature=1.0)


def logits_after(tokens):
    return 1.5 * np.random.default_rng([1, *tokens]).normal(size=5)  # [5]


def draft_logits_after(tokens):
    return logits_after(tokens) + np.random.default_rng([2, *tokens]).normal(size=5)  # [5]


def wanted(row, output):
    return SamplingInput(row, sampled, prompt_token_ids=[0], output_token_ids=output, seed=7, stream=0)


def say(k, reject=False, bonus=0, length=20):
    """The tokens with k drafted ones per step, and the number of steps. `bonus`: 1 if it also guesses the token after
    them, which is not run."""
    said, num_steps = [], 0
    while len(said) < length:
        guess, q = [], np.empty((k + bonus, 5))
        for i in range(k + bonus):
            q[i] = draft_logits_after(said + guess)
            [token] = sample(q[i : i + 1], [wanted(0, said + guess)])
            guess.append(token.token_id)
        befores = [said + guess[:i] for i in range(k + 1)]
        rows = np.stack([logits_after(before) for before in befores])  # [k + 1, 5]
        inputs = [wanted(row, before) for row, before in enumerate(befores)]
        [tokens] = verify(rows, [Draft(guess, inputs)], q if reject else None)
        said += [token.token_id for token in tokens]
        num_steps += 1
    return said[:length], num_steps


for name, k, reject in [
    ("no drafts", 0, False),
    ("1, compared", 1, False),
    ("4, compared", 4, False),
    ("1, rejection", 1, True),
    ("4, rejection", 4, True),
]:
    said, num_steps = say(k, reject)
    print(f"{name:13}{''.join('ABCDE'[token] for token in said)}  in {num_steps} steps")

# %% [markdown]
# Rejection gives different texts, from the same distribution. But its two texts also differ from each other. In an
# engine, the number of drafted tokens depends on the batch. So a user who sets a seed to get the same answer again
# would get a different one when the server is full. The number matters because it decides which positions have a guess.
# The position of the bonus token has none. So let the draft model guess that token, too, and accept or refuse it like
# the others:

# %%
for k in (0, 1, 4):
    said, num_steps = say(k, reject=True, bonus=1)
    print(f"{k}, rejection {''.join('ABCDE'[token] for token in said)}  in {num_steps} steps")

assert say(0, True, 1)[0] == say(1, True, 1)[0] == say(4, True, 1)[0]

# %% [markdown]
# Now the number of drafted tokens changes nothing, even if it is 0. That is what minipaged does with a draft model. But
# these are not the tokens that the model gives without one. Nobody can have both: the most accepted drafts (rejection),
# and tokens that do not depend on the drafts at all (comparing). [The concept
# page](../docs/concepts/speculation.md#verification) has the reason. Prompt lookup has no such choice to make. Its
# draft is certain of its token (q is 1 there), so comparing accepts as much as rejection would.
#
# ## In the engine
#
# A setting turns it on. The model is asked to repeat a few lines of code, which is the best case for prompt lookup.

# %%
CODE = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return area(width, height) * depth
"""
ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ask = [{"role": "user", "content": f"Rewrite this code with the name breadth in place of width.\n{CODE}"}]
greedy = SamplingParams(temperature=0, max_tokens=60)
drafting = LLM(llm.loaded, block_size=4, num_blocks=64, speculative_config=ngram)
[without] = llm.chat(ask, greedy, use_tqdm=False)
[within] = drafting.chat(ask, greedy, use_tqdm=False)
print(without.outputs[0].text.strip("`\n"))

assert within.outputs[0].token_ids == without.outputs[0].token_ids

# %% [markdown]
# (It copied, and renamed nothing. It is a small model.) The tokens are the same with drafts and without.
#
# **Predict.** The answer has 51 tokens, so without drafts it takes 51 steps. With four drafted tokens per step, each
# step gives five at most. How many steps does it take?
#
# <details><summary>See</summary>
#
# **14** (`stats.steps`, give or take 4). Nearly every drafted token stands. The first steps find nothing to copy: the
# answer has to begin before its words occur in the prompt.
#
# </details>

# %%
stats = drafting.stats()
print(f"{len(within.outputs[0].token_ids)} tokens in {stats.steps} steps")
print(f"{stats.tokens_drafted} drafted, {stats.tokens_accepted} of them stood; {stats.blocks_rolled_back} blocks back")

assert len(without.outputs[0].token_ids) == 51

# %% [markdown]
# Each step gave 3.6 tokens on average.
#
# Now a shorter run in a pool of 8 blocks, with the text from above. (A step of the picture is one event; a step of the
# model has several.) The step that computes the prompt gives " Anna". So the first draft is what came after "likes
# Anna". In <a href="?step=10#stepper-1">step 10</a> the four tokens are guessed. Next they get slots, and a fourth
# block for them. Then they are verified. In <a href="?step=13#stepper-1">step 13</a> the slots of the refused ones go
# back, and the block with them.

# %%
from minipaged.events import BlocksRolledBack, TokensAccepted, TokensDrafted
from minipaged.stepper import record

with record("Four guesses, and one of them right", decode) as run:
    short = LLM(llm.loaded, block_size=4, num_blocks=8, enable_prefix_caching=False, speculative_config=ngram)
    [said] = short.generate([text], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)

for event in run.events:
    if isinstance(event, TokensDrafted):
        print(f"drafted {[decode([token]) for token in event.token_ids]}")
    if isinstance(event, TokensAccepted):
        print(f"    {event.num_accepted} of {event.num_drafted} stand")
    if isinstance(event, BlocksRolledBack):
        print(f"    rolled back to {event.num_tokens} tokens; blocks given back: {[*event.blocks]}")

assert isinstance(run.events[10 - 1], TokensDrafted)
assert run.events[13 - 1] == BlocksRolledBack(sequence=0, num_tokens=12, blocks=(3,))
run

# %% [markdown]
# The second draft has one token, because only one came after the line break that was looked up.
#
# ## When it does not pay
#
# Refused tokens are computed for nothing. Suppose that each drafted token stands with probability a, and makes the step
# longer by the share c. A step with k of them gives 1 + a + ... + a^k tokens on average, and takes 1 + k c times as
# long. So decoding gets faster by the factor
#
#     (1 + a + ... + a^k) / (1 + k c)
#
# What is c? Call r the number of tokens whose computing takes as long as reading the weights: 206 for the GPU above,
# and far fewer for a CPU. The rule, [`AdaptiveDrafts`](../minipaged/engine/drafting.py), adds both times. (The first
# cell took the longer one.) A step of n sequences then takes as long as computing r + n tokens, and one drafted token
# for each sequence adds n. So c = n / (r + n). For a single sequence c is small: a drafted token is nearly free. In a
# large batch c is nearly 1: a drafted token costs as much as any other. (The rule's name for r is `tokens_per_read`. A
# draft model adds the time of its passes.)
#
# **Predict.** A batch has 32 sequences, r is 16, and 60 % of the drafted tokens stand. By which factor is decoding
# faster with one drafted token for each sequence?
#
# <details><summary>See</summary>
#
# **0.96** (`factor(0.6, 1, 32 / (16 + 32))`, give or take 0.1). It is slower. The step gives 1.6 tokens instead of one,
# and takes 1.67 times as long.
#
# </details>


# %%
def factor(a, k, c):
    return sum(a**i for i in range(k + 1)) / (1 + k * c)


for n in (1, 4, 8, 16, 32):
    factors = " ".join(f"{factor(0.6, k, n / (16 + n)):.2f}" for k in range(1, 9))
    print(f"{n:2} sequences, k = 1 to 8: {factors}")

# %% [markdown]
# The table has the factors for other numbers of sequences and of drafted tokens.
#
# The rule takes the k with the largest factor, and drafts nothing if every factor is below 1. It assumes a share
# (`hope`) for a sequence that it knows nothing about. From then on it goes by what became of the sequence's own drafts.

# %%
from minipaged.engine.drafting import AdaptiveDrafts, DraftRecord

rule = AdaptiveDrafts(num_speculative_tokens=8, tokens_per_read=16, hope=0.6)
best = {n: rule.num_to_draft(DraftRecord(), num_sequences=n) for n in (1, 2, 4, 8, 16, 32)}
print("tokens to draft, by the number of sequences:", best)

assert best[1] > 1
assert best[32] == 0

# %% [markdown]
# Move the sliders.
#
# - Where half of the drafted tokens stand: how many are worth drafting for one sequence, and for eight?
# - From which share on does drafting pay for 32 sequences, if computing is as fast as on the GPU above (r = 200)?

# %% tags=["editable"]
from minipaged.engine.drafting import AdaptiveDrafts, DraftRecord
from minipaged.stepper.pictures import Curves

stand = 60  # slide 10 to 95 by 5: per cent of the drafted tokens that stand
sequences = 8  # slide 1 to 64 doubling: sequences in the batch
computed = 16  # slide 8 to 200 by 8: tokens computed in the time of reading the weights

cost = sequences / (computed + sequences)
curve = [(k, sum((stand / 100) ** i for i in range(k + 1)) / (1 + k * cost)) for k in range(13)]
rule = AdaptiveDrafts(12, tokens_per_read=computed, hope=stand / 100)
best = rule.num_to_draft(DraftRecord(), sequences)
Curves(
    [("drafting", curve), ("not drafting", [(0, 1), (12, 1)])],
    x="drafted tokens per sequence",
    y="times as fast",
    notes=[
        f"each drafted token makes the step longer by {cost:.0%}",
        f"best: {best}, {curve[best][1]:.2f} times as fast",
    ],
)

# %% [markdown]
# A user alone at a machine gains the most, and a full server gains nothing: its steps are filled with other requests'
# tokens, and each of those is certain to be needed. So `speculative_config` also has vLLM's `disable_by_batch_size`.
#
# ## What it does not do
#
# - **One line of guesses.** There are engines that draft a tree of alternatives and verify all branches in one step.
# - **Beams and grammars draft nothing.** A grammar's mask is known for the next token only.
# - **Logits are equal up to rounding.** A step with five tokens adds numbers in another order than a step with one. So
#   where two tokens are all but equally likely, the other one may be chosen, above all in bfloat16.
# - **Prompt lookup gains nothing without repetition.** In a text that repeats nothing it finds few drafts, and most of
#   them are refused. A draft model can guess any text, but its own passes take time.
#
# [The concept page](../docs/concepts/speculation.md) lists what cannot be combined with drafts.
#
# ## Exercises
#
# 1. A drafted token is refused, and someone draws the replacement from p in place of the residual. Which distribution
#    does the output have then? Compute it for the four drinks.

# %% tags=["solution"]
p, q = np.array([0.50, 0.30, 0.15, 0.05]), np.array([0.30, 0.10, 0.50, 0.10])
agreed = np.minimum(p, q)
wrong = agreed + (1 - agreed.sum()) * p
right = agreed + (1 - agreed.sum()) * np.maximum(0, p - q) / np.maximum(0, p - q).sum()
print("from p:           ", wrong)
print("from the residual:", right)

assert np.allclose(right, p)
assert np.allclose(wrong, [0.50, 0.22, 0.21, 0.07])
# Beer and rum come too often. What the draft model likes is drawn once as a guess, and once more after a refusal. Such
# a fault is hard to see in a text: only counting shows it.

# %% [markdown]
# 2. In a repetition such as `a a a a a a`, why is it better to take the first occurrence than the latest one?

# %% tags=["solution"]


def latest(tokens, k, longest=3, shortest=1):
    for n in range(longest, shortest - 1, -1):
        for start in reversed(range(len(tokens) - n)):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


print("first occurrence:", lookup([*"aaaaaa"], 4), " latest:", latest([*"aaaaaa"], 4))

assert latest([*"aaaaaa"], 4) == ["a"]
assert lookup([*"aaaaaa"], 4) == ["a"] * 3
# The latest occurrence ends one token before the end, so only one token came after it. In a conversation the latest may
# be the better guess, because a text turns to new things. Measured on a few texts, neither wins.

# %% [markdown]
# 3. For which a and c does one drafted token pay? And can two drafted tokens pay where one does not?

# %% tags=["solution"]
shares = [i / 20 for i in range(20)]
pays = {(a, c): [factor(a, k, c) > 1 + 1e-9 for k in (1, 2, 3)] for a in shares for c in shares}

assert all(one == (a > c) for (a, c), (one, _, _) in pays.items())
assert not any((two or three) and not one for one, two, three in pays.values())
# One pays if (1 + a) / (1 + c) > 1, so if a > c. More tokens never pay where one does not: the second costs c as well,
# and brings a² only, which is less than a.
