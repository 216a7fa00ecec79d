# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 7. Beam search that shares

# %% [markdown]
# **What you will understand.** What beam search is, and why it is the decoding method that gains most from
# PagedAttention: its sequences branch and die all the time, and their blocks branch and die with them, without being
# copied (section 4.4 of the paper, Fig. 9). [Tutorial 6](06_copy_on_write.py) has what is used here: forks, reference
# counts, copy-on-write.
#
# ## The likeliest word is not always on the way to the likeliest text
#
# Take a model that knows a few beginnings of stories, and how likely each next word is: by the odds below, where words
# compete. (It is a model without weights, as before; the logarithms of the odds are its logits.)

# %%
import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from minipaged import BeamSearchParams
from minipaged.stepper import Storyteller, record


@dataclass
class Teller(Storyteller):
    """A Storyteller that has odds for words; those not named have 1."""

    odds: dict[str, float] = field(default_factory=dict)

    def log_odds(self) -> np.ndarray:
        return np.log([self.odds.get(word, 1) for word in self.words]).astype(np.float32)  # [words]

    def forward(self, batch):
        logits = super().forward(batch)  # [rows, words]: 0 for what may follow
        return np.where(logits == 0, self.log_odds(), -np.inf).astype(np.float32)  # [rows, words]

    def following_words(self, token: int) -> dict[int, float]:
        """What may follow the token, with the log of its probability."""
        odds = {following: self.odds.get(self.words[following], 1) for following in self.following[token]}
        return {following: math.log(odd / sum(odds.values())) for following, odd in odds.items()}


model = Teller(
    [
        "It was the best .",
        "It was the worst .",
        "It was the age of wisdom .",
        "It was the age of foolishness .",
        "It was a dark .",
        "It was a dark and stormy night .",
        "It was a far better thing .",
    ],
    odds={"the": 6, "a": 4, "age": 4, "best": 3, "worst": 3, "wisdom": 5, "foolishness": 4}
    | {"dark": 9, ".": 6, "and": 4},
)
prompt = model.encode("It was")

# %% [markdown]
# **Greedy** decoding takes the likeliest word each time. Probabilities of words in a row are multiplied, so their
# logarithms, the *logprobs*, are added.

# %%
tokens, total = list(prompt), 0.0
while model.words[tokens[-1]] != ".":
    token, logprob = max(model.following_words(tokens[-1]).items(), key=lambda item: item[1])
    tokens, total = [*tokens, token], total + logprob
print(f"greedy: {model.decode(tokens)}  probability {math.exp(total):.3f}")
greedy = total

other = model.encode("It was a dark .")
likelier = sum(model.following_words(before)[after] for before, after in pairwise(other[1:]))
print(f"but:    {model.decode(other)}  probability {math.exp(likelier):.3f}")
assert math.exp(greedy) < 0.14 < 0.21 < math.exp(likelier)

# %% [markdown]
# "a" was the less likely word, and greedy never came back to it. To look at all texts is out of the question: with
# every word their number is multiplied by the size of the vocabulary. **Beam search** keeps the `width` likeliest so
# far, the *beams*, and continues all of them.
#
# ## A search by hand
#
# One step: continue every beam by every word, rank all these *candidates* together by their sums of logprobs, and keep
# the best `width`. A candidate that ends with "." has come to its end (a real model has a token for that, EOS). It is
# *finished* if it is among the best `width` of its step, and does not go on. The search is over when no beam is left,
# or when `width` texts are finished and the best beam, if it ended now, would not be among them.
#
# **Predict.** So that `width` beams can go on even if some candidates end: how many of the best candidates must be
# looked at, at most?
#
# - `width`
# - `width + 1`
# - `2 * width`
#
# <details><summary>See</summary>
#
# **`2 * width`**. At most `width` of them end.
#
# </details>

# %%
Beam = tuple[float, list[int]]  # the sum of logprobs, the tokens


def search(width: int, length_penalty: float, show: bool = False) -> list[Beam]:
    """The finished beams, best first, each with its score in place of its sum."""
    beams: list[Beam] = [(0.0, prompt)]
    finished: list[Beam] = []
    length = 0  # words after the prompt
    while beams:
        length += 1
        candidates = [
            (total + logprob, [*tokens, token])
            for total, tokens in beams
            for token, logprob in model.following_words(tokens[-1]).items()
        ]
        candidates = sorted(candidates, key=lambda candidate: -candidate[0])[: 2 * width]
        ends = [model.words[tokens[-1]] == "." for _, tokens in candidates]
        beams = [candidate for candidate, end in zip(candidates, ends, strict=True) if not end][:width]
        for rank, ((total, tokens), end) in enumerate(zip(candidates, ends, strict=True)):
            if end and rank < width:
                finished.append((total / length**length_penalty, tokens))
            if show:
                going = (total, tokens) in beams
                fate = "goes on" if going else "finished" if end and rank < width else "dropped"
                print(f"{length}  {math.exp(total):.3f}  {fate:<8}  {model.decode(tokens)}")
        finished = sorted(finished, key=lambda beam: -beam[0])[:width]
        if len(finished) == width and beams and beams[0][0] / length**length_penalty <= finished[-1][0]:
            break  # the best beam would not come in, if it ended now
    return finished


best = search(width=2, length_penalty=0, show=True)[0]
assert model.decode(best[1]) == "It was a dark ."
assert best[0] > greedy

# %% [markdown]
# `2 * width`: each beam has one EOS, so at most `width` candidates end, and of twice as many at least `width` do not.
# (If a model has more than one EOS, more have to be looked at.)
#
# Read the table from the top. At step 2 "a dark" overtakes "the age". At step 3 it ends, and its other continuation
# goes on.
#
# ## The length penalty
#
# Every word makes the sum smaller, so a short text beats a long one merely because it is short. To make up for it, the
# sum is divided by the length to some power: with `length_penalty` 0 the sum counts, with 1 the mean of the logprobs.
#
# **Predict.** "a dark ." has 3 words, "a dark and stormy night ." has 6. Which one wins with 1?
#
# - "a dark ."
# - "a dark and stormy night ."
#
# <details><summary>See</summary>
#
# **"a dark and stormy night ."** (`long_first[0] == "a dark and stormy night ."`). With 1 the score is the mean logprob
# of a word: a long text is no longer punished for each of its words.
#
# </details>

# %%
for penalty in (0.0, 1.0):
    found = [f"{score:.3f} {model.decode(tokens[2:])!r}" for score, tokens in search(2, penalty)]
    print(f"length_penalty {penalty:.0f}:", *found)

short_first = [model.decode(tokens[2:]) for _, tokens in search(2, 0.0)]
long_first = [model.decode(tokens[2:]) for _, tokens in search(2, 1.0)]
assert short_first == ["a dark .", "a dark and stormy night ."]
assert long_first == ["a dark and stormy night .", "the age of wisdom ."]

# %% [markdown]
# minipaged's [`BeamSearch`](../minipaged/reference/beam_search.py) has the same rules, which are those of transformers,
# and a few more. On the engine:

# %%
eos = tuple(token for token, word in enumerate(model.words) if word == ".")
for penalty in (0.0, 1.0):
    engine = model.engine(num_blocks=32, block_size=2, eos_token_ids=eos)
    engine.add_request(prompt, BeamSearchParams(beam_width=2, max_tokens=10, length_penalty=penalty))
    while engine.has_unfinished_requests():
        updates = engine.step()  # what is new of each request; of one that has ended, the whole output too
    for one, (score, tokens) in zip(updates[0].output.outputs, search(2, penalty), strict=True):
        assert [*prompt, *one.token_ids] == tokens
        assert abs(one.score - score) < 1e-6
print("the engine finds the same")

# %% [markdown]
# ## What it means for the blocks
#
# After each step some beams have several continuations among the best, others none. So the tables do what beams do:
#
# - a beam with several survivors is **forked**: each of them holds all its blocks, and nothing is copied;
# - a beam without a survivor **frees** its blocks: those that nobody else holds can be handed out again at once.
#
# The run below has the shape of the paper's Fig. 9, with blocks of 2. Four beams hold four full blocks each. The first
# block, the prompt, belongs to all of them; three beams have two more blocks in common, and the fourth went its own way
# from the second block on. Then the four likeliest continuations turn out to come from only two of the beams.
#
# **Predict.** Is anything copied at that moment? And how many blocks come free?
#
# <details><summary>See</summary>
#
# **4 blocks come free** (`len({*sum(tables[5].values(), [])} - {*sum(tables[6].values(), [])})`). And nothing is
# copied: all blocks are full, and nobody writes into a full one.
#
# </details>

# %%
tale = Teller(
    [
        "It was a dark and stormy noon at sea and calm",
        "It was a dark and stormy night and the rain fell",
        "It was a dark and stormy night and our ship sank",
        "It was a dark and stormy evening when nobody came home",
        "It was a dark and stormy evening when everybody sang along",
        "It was the best of times it was the worst",
    ],
    odds={"a": 9, "noon": 0.25},
)

tables = []  # after each step, the block table of each beam: sequence -> its blocks
with record("Four beams", tale.decode) as run:
    engine = tale.engine(num_blocks=18, block_size=2)
    engine.add_request(tale.encode("It was"), BeamSearchParams(beam_width=4, max_tokens=8))
    while engine.has_unfinished_requests():
        engine.step()
        beams = [beam for request in engine.scheduler.running for beam in request.sequences]
        tables.append({chr(ord("A") + beam.sequence_id): list(beam.table.blocks) for beam in beams})
run

# %% [markdown]
# The moment is engine step 7. Its beams before and after as a picture: each row is a sequence with its blocks in
# logical order.

# %%
from collections import Counter

from minipaged.stepper.pictures import Cells


def picture(of_step: int) -> Cells:
    """The tables that the beams of a step had when it had run."""
    held = tables[of_step - 1]
    holders = Counter(block for table in held.values() for block in table)
    kinds = {1: "held by one beam", len(held): "held by all"}
    return Cells(
        [(name, [(f"{b}", kinds.get(holders[b], "held by some")) for b in table]) for name, table in held.items()],
        {"held by all": "grid", "held by some": "lines", "held by one beam": "dots"},
    )


before = {"A": [0, 1, 3, 5], "C": [0, 1, 3, 6], "D": [0, 1, 3, 7], "B": [0, 2, 4, 8]}
assert tables[5] == before
picture(6)

# %% [markdown]
# After it, A and C have two survivors each, and E and F are their forks; D and B have none:

# %%
assert tables[6] == {"A": before["A"], "E": before["A"], "C": before["C"], "F": before["C"]}
picture(7)

# %% [markdown]
# Nothing is copied: all blocks are full, and full blocks are never written. The two beams that died had eight table
# entries. Four of them are of blocks that others hold too, and those stay. The other four blocks are free, and in the
# next step the four new beams begin a block each: just these.

# %%
from minipaged.events import BlockCopied, BlocksFreed, SequenceForked, TokensComputed

first, second = [event.blocks for event in run.events if isinstance(event, BlocksFreed)][:2]
still_held = {block for table in tables[6].values() for block in table}
came_free = {*first, *second} - still_held
begun = [event.new_blocks for event in run.events if isinstance(event, TokensComputed)][-4:]
print("given back:", first, second)
print("now free:  ", sorted(came_free))
print("begun next:", begun)

assert came_free == {2, 4, 7, 8}
assert {block for blocks in begun for block in blocks} == came_free
assert not any(isinstance(event, BlockCopied) for event in run.events)

# %% [markdown]
# So a beam that dies gives its blocks back without asking: `free` takes one off each count, and what reaches 0 is free.
# No beam knows who else there is. The memory of the search is what its living beams hold, and nothing of the dead.
#
# A cache of contiguous pieces would copy all keys and values of the parent at every fork. In this short search:

# %%


def tokens_to_copy(events) -> list[int]:
    """How many tokens the parent had in its cache, for each fork."""
    lengths: dict[int, int] = {}  # sequence -> tokens in the cache
    at_forks = []
    for event in events:
        if isinstance(event, TokensComputed):
            lengths[event.sequence] = event.num_tokens
        if isinstance(event, SequenceForked):
            lengths[event.child] = lengths[event.parent]
            at_forks.append(lengths[event.parent])
    return at_forks


print("forks of sequences with", tokens_to_copy(run.events), "tokens; minipaged copied none")
assert tokens_to_copy(run.events) == [2, 6, 6, 8, 8]

# %% [markdown]
# ## Beams of a real model
#
# SmolLM2 now, on the reference tier, with blocks of 16. Its prompt has 15 tokens, which do not fill a block.
#
# **Predict.** Four *samples* of this prompt, what share of their blocks would they save? And four beams?
#
# <details><summary>See</summary>
#
# **0 % with samples, 37 % with beams** (`sampling.stats.share_saved, stats.share_saved`, give or take 15). A prompt of
# 15 tokens fills no block of 16, so the samples have nothing to share. Beams have a common past beyond it.
#
# </details>

# %%
from minipaged import LLM, SamplingParams

events = []
llm = LLM(
    "smollm2-135m-instruct",
    tier="reference",
    num_blocks=32,
    enable_prefix_caching=False,
    listeners=[events.append],
)
sun = "The sun rises in the east and sets in the west. This is because"
[output] = llm.beam_search([sun], BeamSearchParams(beam_width=4, max_tokens=24), use_tqdm=False)
for beam in output.outputs:
    print(f"{beam.score:.3f} {beam.text!r}")

sampling = Storyteller(["and"]).engine(num_blocks=32, block_size=16)  # for blocks a single word will do
sampling.add_request([0] * 15, SamplingParams(n=4, max_tokens=24, temperature=0))
while sampling.has_unfinished_requests():
    sampling.step()

stats = llm.stats()
print(f"four samples save {sampling.stats.share_saved:.1%} of their blocks, four beams {stats.share_saved:.1%}")
assert len(output.prompt_token_ids) == 15
assert sampling.stats.share_saved == 0
assert stats.share_saved > 0.2

# %%
from minipaged.stepper.pictures import Bars

both = [("four samples", sampling.stats), ("four beams", stats)]
Bars(
    [(name, [("held", 1 - s.share_saved), ("saved", s.share_saved)]) for name, s in both],
    {"held": "lines", "saved": "empty"},
    percent=True,
)

# %% [markdown]
# Samples share the full blocks of their prompt, of which there are none here. Beams share what they have in common,
# because each stems from a few recent ancestors: the texts above begin alike, and only their ends differ. For its
# Alpaca workload the paper reports 37.6 to 55.2 % of the blocks saved by beam search, against 6.1 to 9.8 % by parallel
# sampling (Fig. 15).
#
# The price is copy-on-write, where beams part within a block. A fork then costs one block, however long the sequence
# is; in contiguous memory it costs the whole sequence:

# %%
contiguous, copied = sum(tokens_to_copy(events)), stats.blocks_copied
print(f"for the forks: {contiguous} tokens to copy in contiguous memory; here {copied} blocks, {16 * copied} slots")
assert 16 * copied < contiguous

# %% [markdown]
# Beam search is yours to write in [assignment 5](../assignments/5_beam_search/handout.md); the engine carries out what
# you decide, and SmolLM2 runs with it.
#
# ## Exercise
#
# In the run of Fig. 9 nothing was copied, because every fork came when the last block was full. Predict for other block
# sizes, from the lengths at the forks (2, 6, 6, 8 and 8 tokens), how many blocks are copied. Then run them.


# %% tags=["solution"]
def copies(block_size: int) -> int:
    return len([length for length in tokens_to_copy(run.events) if length % block_size])


for block_size in range(1, 10):
    engine = tale.engine(num_blocks=48, block_size=block_size, max_model_len=16)
    engine.add_request(tale.encode("It was"), BeamSearchParams(beam_width=4, max_tokens=8))
    while engine.has_unfinished_requests():
        engine.step()
    print(f"block size {block_size}: {engine.stats.blocks_copied} copied, {engine.stats.share_saved:.1%} saved")
    assert engine.stats.blocks_copied == copies(block_size)
# Of n beams that hold an unfilled block n - 1 copy it: one copy for each fork.
