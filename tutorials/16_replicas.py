# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 16. Replicas and prefixes

# %% [markdown]
# **What you will understand.** What is to be decided where several engines serve one model, each with blocks and a
# prefix cache of its own. How somebody who has no cache knows what is in all of them; why to share out the work evenly
# is not enough; why to follow the prefixes alone is worse, and how one line of such a policy sends all new work to one
# replica. The paper has one engine (and its workers, [tutorial 15](15_several_workers.py)). This comes after it:
# [SGLang](https://arxiv.org/abs/2312.07104)'s router, [Preble](https://arxiv.org/abs/2407.00023) and
# [Mooncake](https://arxiv.org/abs/2407.00079) are about it.
#
# `minipaged serve --replicas 4` does with Ray, in processes, what is done here in this one. The routers are the same
# ([`replicas/routing.py`](../minipaged/replicas/routing.py)), and so are the engines.
#
# ## What a router knows
#
# A prefix cache knows a block by a chain of hashes: of its tokens, and of its parent's hash
# ([tutorial 9](09_prefix_caching.py)). No address is in that, no time and no random number. So whoever has a prompt can
# compute the names of its blocks, on any machine, and they are the names that every cache would give them.
#
# A *replica* is one engine of several. It publishes what becomes of its cache: such a hash is there now, such a one is
# gone ([`CacheNews`](../minipaged/replicas/routing.py) listens to the engine's events). The *router*, who gives each
# request to one of them, needs no tokens of old prompts, and no blocks. It keeps a set of numbers for each replica.
#
# **Predict.** A librarian again, with blocks of four words. The replica "left" has answered the question about the
# page. How many blocks of each of these prompts does the router believe to be there? The system prompt has eight words,
# each question four.
#
# <details><summary>See</summary>
#
# **3 blocks of the page's, 2 of the shelf's, 0 of the one without a system prompt** (`believed.values()`). A hash
# stands for a block and everything before it.
#
# </details>

# %%
from minipaged import SamplingParams
from minipaged.handover.block_hashes import block_hashes
from minipaged.replicas.routing import CacheNews, LeastLoaded, PrefixAware, RoundRobin
from minipaged.stepper import Storyteller, record
from minipaged.stepper.pictures import Bars, Cells

SYSTEM = "You are a librarian. Answer in one sentence."
answers = {"What is a page?": "One side of a sheet.", "What is a shelf?": "A board that holds books."}
asked = {"page": f"{SYSTEM} What is a page?", "shelf": f"{SYSTEM} What is a shelf?", "no system": "What is a page?"}
model = Storyteller([*(f"{SYSTEM} {question} {answer}" for question, answer in answers.items()), "What is a page?"])
few_words = SamplingParams(max_tokens=4, temperature=0)

router, news = PrefixAware(block_size=4), CacheNews()
router.added("left")
router.added("right")

with record("What a replica tells", model.decode) as run:
    engine = model.engine(num_blocks=4, block_size=4, enable_prefix_caching=True)
    engine.listeners.append(news)
    for name in ("page", "shelf"):
        engine.add_request(model.encode(asked[name]), few_words, request_id=name)
        while engine.has_unfinished_requests():
            engine.step()
            router.told("left", *news.latest())
            run.note(f"The replica tells its news. The router knows of {len(router.known('left'))} blocks.")
        if name == "page":
            known = router.known("left")

believed = {name: sum(one in known for one in block_hashes(model.encode(text), 4)) for name, text in asked.items()}
for name, count in believed.items():
    print(f"{name:>9}: {count} of {len(asked[name].split()) // 4} blocks")
assert believed == {"page": 3, "shelf": 2, "no system": 0}

# %% [markdown]
# The question alone is a block of the same four words, and yet another block: its chain begins elsewhere. Below is the
# replica at work. Each step ends with its news; when the last block that is free has been taken, a block is *evicted*
# for the second request, and the router hears of that, too.

# %%
run

# %%
cache = engine.blocks.prefix_cache
full = [block for block in cache.blocks if len(cache.entry_of[block].tokens) == cache.block_size]
assert router.known("left") == {cache.hash_of(block) for block in full}  # a block that is not full has no hash
number, changes = news.latest()
print(f"{number} changes: " + ", ".join("stored" if there else "evicted" for _, there in changes))

# %% [markdown]
# What it does not hear of is what has not happened yet. News come once a second. In that second a hundred prompts with
# the same new beginning may come, and if the router went by the news alone, it would scatter them: each replica would
# compute what one could. So it also notes what it has sent where; such blocks are *coming*.
#
# ## Four replicas
#
# To see what a choice costs takes many requests, so the machines are simulated ones of the paper's size, as in
# [tutorial 14](14_a_server.py): the engines, their caches and the routers are real, time is not. Each machine has room
# for some 15,700 tokens.

# %%
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from random import Random

from minipaged.engine.engine import Engine
from minipaged.params import EngineConfig, RequestOutputKind
from minipaged.replicas.routing import Router
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100, SimulatedRunner, simulated_tier

NAMES = ("A", "B", "C", "D")


@dataclass
class Request:
    arrival: float  # seconds
    token_ids: list[int]
    document: int | None = None  # that it begins with


class Replica:
    """An engine that does one step after another while there is something to do."""

    def __init__(self) -> None:
        self.runner, self.news = SimulatedRunner(OPT_13B_ON_AN_A100, block_size=16), CacheNews()
        sizes = {"num_blocks": OPT_13B_ON_AN_A100.num_blocks(16), "max_model_len": 2048, "vocab_size": 10_000}
        config = EngineConfig(**sizes, preemption="recompute")
        self.engine = Engine(
            config, simulated_tier(), self.runner, listeners=[self.news], clock=lambda: self.runner.now
        )
        self.arrived: dict[str, float] = {}  # of the requests that are outstanding
        self.ttft: list[float] = []
        self.ended: list = []  # by the step that runs

    def take(self, request: Request) -> None:
        self.runner.now = max(self.runner.now, request.arrival)
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        name = self.engine.add_request(request.token_ids, params, output_kind=RequestOutputKind.FINAL_ONLY)
        self.arrived[name] = request.arrival

    def work_until(self, time: float) -> None:
        while self.runner.now <= time and self.arrived:
            for output in self.ended:
                self.ttft.append(output.metrics.first_token_time - self.arrived.pop(output.request_id))
            self.ended = [update.output for update in self.engine.step() if update.output] if self.arrived else []


@dataclass
class Outcome:
    hit_rate: float
    ttft: list[float]
    sent: Counter = field(default_factory=Counter)
    documents: dict = field(default_factory=dict)  # replica -> those that it was asked about
    most: int = 0  # requests outstanding at one replica at one time


def serve(router: Router, requests: list[Request], seconds_between_news: float = 1.0) -> Outcome:
    """Have four replicas serve all requests."""
    replicas, published = {name: Replica() for name in NAMES}, 0.0
    outcome = Outcome(0, [], documents={name: set() for name in NAMES})
    for name in NAMES:
        router.added(name)
    for request in requests:
        for replica in replicas.values():
            replica.work_until(request.arrival)
        if request.arrival - published >= seconds_between_news and isinstance(router, PrefixAware):
            published = request.arrival
            for name, replica in replicas.items():
                router.told(name, *replica.news.latest())
        loads = {name: len(replica.arrived) for name, replica in replicas.items()}
        chosen = router.choose(request.token_ids, loads)
        replicas[chosen].take(request)
        outcome.sent[chosen] += 1
        outcome.documents[chosen].add(request.document)
        outcome.most = max(outcome.most, loads[chosen] + 1)
    for replica in replicas.values():
        replica.work_until(inf)
        outcome.ttft += replica.ttft
    stats = [replica.engine.stats for replica in replicas.values()]
    outcome.hit_rate = sum(s.prefix_cache_hit_tokens for s in stats) / sum(s.prefix_cache_query_tokens for s in stats)
    outcome.ttft.sort()
    assert len(outcome.ttft) == len(requests)
    return outcome


def tell(what: str, outcome: Outcome) -> Outcome:
    median, late = (outcome.ttft[int(len(outcome.ttft) * share)] for share in (0.5, 0.95))
    print(
        f"{what:>14}: {outcome.hit_rate:4.0%} found, TTFT {median:5.2f} s ({late:5.2f} s for one in twenty), ", end=""
    )
    print(f"sent {[outcome.sent[name] for name in NAMES]}, at most {outcome.most} at one")
    return outcome


# %% [markdown]
# The work: questions about documents. There are 24 documents of 1,000 tokens, all equally popular, and each question is
# 40 tokens of its own. Together the documents are half as much again as one machine has room for. 32 questions a second
# come, at random.
#
# **Predict.** How much of the prompts is found when the replicas take turns? When each question goes to who has the
# fewest? And how much could be found at best?
#
# <details><summary>See</summary>
#
# **53 % in turns, 50 % by the fewest requests, 92 % at best** (`came["round robin"].hit_rate, came["least
# loaded"].hit_rate, best`, give or take 10). A machine that is asked about all 24 documents has room for 15.
#
# </details>

# %%
BOS = 1


def questions(num_requests: int, rate: float, documents: int = 24, alone: float = 0.0, length: int = 1000) -> list:
    """Prompts that begin with a document, but for a share that stands alone."""
    random, now, requests = Random(0), 0.0, []
    for i in range(num_requests):
        now += random.expovariate(rate)
        document = None if random.random() < alone else random.randrange(documents)
        beginning = [] if document is None else [BOS + 1 + document] * length
        requests.append(Request(now, [*beginning, *[100 + i] * 40], document))
    return requests


work = questions(600, rate=32)
routers = {"round robin": RoundRobin(), "least loaded": LeastLoaded(), "prefix-aware": PrefixAware(block_size=16)}
came = {name: tell(name, serve(router, work)) for name, router in routers.items()}
best = 1 - (24 * 1000 + 600 * 40) / sum(len(request.token_ids) for request in work)
print(f"if each document were computed once: {best:.0%}")

assert came["round robin"].hit_rate < 0.6
assert came["least loaded"].hit_rate < 0.6
assert came["prefix-aware"].hit_rate > 0.85
assert came["round robin"].ttft[300] > 10 * came["prefix-aware"].ttft[300]

# %% [markdown]
# Round robin has each document on each machine, by and by, and each machine has room for 15 of 24. So half of what was
# computed has been evicted when it is asked for again. Least loaded is no better: it balances what is *to be done*, and
# makes as much of it. Both work as hard as they can, and fall behind.
#
# Prefix-aware routing makes four caches one: a document has its place. Here is who was asked about which of the 24:

# %%
rows = []
for way in ("round robin", "prefix-aware"):
    for name in NAMES:
        asked_here = came[way].documents[name]
        rows.append((f"{way}, {name}", [("", "asked" if i in asked_here else "never") for i in range(24)]))
places = {way: sum(map(len, came[way].documents.values())) for way in came}
print(places)
assert places["round robin"] == 4 * 24
assert places["prefix-aware"] < 2 * 24
Cells(rows, {"asked": "lines", "never": "empty"})

# %% [markdown]
# ## All new work goes to one replica
#
# "The longest match gets it." That is one line, and it looks right:


# %%
class LongestMatch(PrefixAware):
    """Knows what `PrefixAware` knows, and asks for nothing else."""

    def choose(self, token_ids, loads):
        hashes = block_hashes(token_ids, self.block_size)
        chosen = max(loads, key=lambda name: self._known[name].match(hashes))  # this one
        self._known[chosen].expect(hashes)
        return chosen


# %% [markdown]
# **Predict.** Half of the same questions. But now there is a service around them, and all prompts begin with its system
# prompt: 112 tokens, seven blocks. Who gets what from `LongestMatch`?
#
# - each machine a quarter of the documents
# - A everything
# - A the new documents, the others what they know
#
# <details><summary>See</summary>
#
# **A everything** (`wrong.sent == {"A": 300}`). Who has had one prompt has the longest match with every other.
#
# </details>

# %%
in_a_service = [Request(each.arrival, [BOS] * 112 + each.token_ids, each.document) for each in work[:300]]
wrong = tell("longest match", serve(LongestMatch(block_size=16), in_a_service))
right = tell("prefix-aware", serve(PrefixAware(block_size=16), in_a_service))

assert wrong.sent == {"A": 300}
assert wrong.ttft[150] > 100 * right.ttft[150]
assert max(right.sent.values()) < 1.5 * 75
Bars(
    [
        (what, [(f"at {name}", came.sent[name]) for name in NAMES])
        for what, came in (("longest match", wrong), ("prefix-aware", right))
    ],
    {"at A": "full", "at B": "lines", "at C": "dots", "at D": "grid"},
    axis="requests",
)

# %% [markdown]
# The first prompt matches nowhere, and `max` takes the first of equals: A. From then on, A has seven blocks of every
# prompt that will ever come, and nobody else has one. So it gets them all, new documents too, and three machines stand
# idle. Nothing fails; there is only a queue that grows. Faults of this kind have been shipped more than once: routers
# that sent all new work to worker 0, because it was the first of those with equal loads, or to who knew least.
#
# **Predict.** The cause seems to be that `max` takes the first. What if a tie were broken by the load: the longest
# match, and of several the one with the fewest requests? Would that mend it?
#
# - yes
# - no
#
# <details><summary>See</summary>
#
# **no** (`tied.sent == {"A": 300}`). Seven blocks are more than none, whatever the load.
#
# </details>


# %%
class LongestMatchThenLoad(LongestMatch):
    def choose(self, token_ids, loads):
        hashes = block_hashes(token_ids, self.block_size)
        chosen = max(loads, key=lambda name: (self._known[name].match(hashes), -loads[name]))
        self._known[chosen].expect(hashes)
        return chosen


tied = tell("and then load", serve(LongestMatchThenLoad(block_size=16), in_a_service))
assert tied.sent == {"A": 300}

# %% [markdown]
# No: there is no tie. `PrefixAware` has two rules instead, and each is about what a match is worth.
#
# - **A match has to be worth going there**: three tenths of the prompt, or the least loaded gets it (`least_match`).
#   Seven blocks of 72 are not. So new documents spread, and old ones are found.
# - **No match is worth any queue.** Who has over 8 requests more than the least loaded, and over half as many again, is
#   too busy for it (`apart`, `ratio`). Then another one computes the document, and from then on there are two places
#   for it: what is popular gets more machines, and what is not keeps one.
#
# And where all is equal, whoever was chosen longest ago is chosen, not the first in the list.
#
# ## When a replica goes
#
# **Predict.** A replica dies, with its cache, and a new one comes under its name. What does a router have to forget?
# What if it forgets nothing?
#
# - nothing: the name is the same
# - what it believes to be there; else answers would be wrong
# - what it believes to be there; else some prompts go where nothing is left of them
#
# <details><summary>See</summary>
#
# **what it believes to be there; else some prompts go where nothing is left of them** (`router.known(place) ==
# frozenset() and other != place`). Nothing would be wrong, only slower.
#
# </details>

# %%
router, question = routers["prefix-aware"], work[0].token_ids
place = router.choose(question, dict.fromkeys(NAMES, 0))
loads = dict.fromkeys(NAMES, 0) | {place: 5}
assert router.choose(question, loads) == place  # that is worth a queue of five

known = len(router.known(place))
router.removed(place)
router.added(place)
other = router.choose(question, loads)
print(f"{place}: {known} blocks known, then {len(router.known(place))}; now {other} is asked about the document")
assert known > 900
assert router.known(place) == frozenset()
assert other != place

# %% [markdown]
# What a router believes is a guess. If it is wrong, a prompt goes to somebody who has to compute it, and that is all:
# the engine compares tokens (tutorial 9), so no answer is ever made from it. A router that forgot nothing would send
# the dead one's documents to the new one, past a queue, and they would be computed there all the same; one that forgets
# gives them to who has least to do. What the clients of the dead one are told, and what is tried again, is not the
# router's business ([replicas](../docs/replicas.md#when-a-replica-dies)).
#
# ## Exercises
#
# 1. One document is so popular that all ask about it, 60 times a second. How are the requests shared out, and how long
#    does one wait, with `apart` 8 and with `apart` 10 ** 9? And what does a small `apart` cost where 24 documents are
#    equally popular: compare 0 with 8.

# %% tags=["solution"]
hot = questions(300, rate=60, documents=1)
limited, endless = (
    tell(f"hot, {apart:g} apart", serve(PrefixAware(block_size=16, apart=apart), hot)) for apart in (8, 10**9)
)
even, usual = (tell(f"{apart} apart", serve(PrefixAware(block_size=16, apart=apart), work)) for apart in (0, 8))

assert endless.sent == {"A": 300}
assert endless.ttft[285] > 5 * limited.ttft[285]  # of one in twenty
assert max(limited.sent.values()) < 1.5 * 75
assert even.hit_rate < usual.hit_rate
# With 8 apart all four have the document after a moment, for a thousand tokens each, computed once. With 0 apart a
# document leaves its place whenever somebody else has one request less: more places, fewer documents in each.

# %% [markdown]
# 2. Let there be 60 documents: four times what one machine has room for, and as many as all four have. What is found
#    if the replicas tell nothing (`seconds_between_news=inf`), and what if they do? Why does it matter less with 24?

# %% tags=["solution"]
many = questions(1200, rate=24, documents=60)
told, untold = (
    tell(f"news {what}", serve(PrefixAware(block_size=16), many, seconds))
    for what, seconds in (("each second", 1.0), ("never", inf))
)
few = serve(PrefixAware(block_size=16), work, inf)
assert told.hit_rate > untold.hit_rate + 0.03
assert abs(few.hit_rate - came["prefix-aware"].hit_rate) < 0.02
# Who is told nothing still knows what it has sent where. It does not know what was evicted since, and sends a prompt
# after blocks that are gone, past a machine that has less to do. Of 24 documents each machine has some ten, which are
# asked for too often to be evicted; old questions are.
