# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 5. Continuous batching and the scheduler

# %% [markdown]
# **What you will understand.** Why a server runs many requests together, why it must not wait for the longest of them,
# and how minipaged's scheduler decides, anew at every step, who runs and how many tokens each. It is what the paper
# builds on in section 2.3 and describes in sections 4.3 and 4.5.
#
# ## Why requests run together
#
# To choose one token, a model reads all of its weights. To choose one token each for eight requests, it reads them once
# as well. So a pass over a *batch* costs little more than a pass for one request. What does grow with the batch is the
# rest: each row's keys and values are read, its token is chosen, its block table is kept; and, in the end, there is so
# much to compute that arithmetic takes longer than reading the weights. minipaged has a model of such a machine, with
# figures that are the paper's, measured, or calibrated by the paper's curves
# ([the design](../docs/design.md#the-simulated-machine) says which):

# %%
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100

seconds = {rows: OPT_13B_ON_AN_A100.step_seconds(rows, rows, 200 * rows) for rows in (1, 8, 32)}
for rows, cost in seconds.items():
    print(f"{rows:>2} requests decode one token each: {1000 * cost:.1f} ms")

assert seconds[8] < 1.2 * seconds[1]
assert seconds[32] < 1.5 * seconds[1]  # for 32 times the tokens

# %% [markdown]
# What a server earns is therefore the number of requests that it keeps in its batch. An empty row is lost.
#
# ## The obvious way: a batch from beginning to end
#
# Take as many requests as the batch has rows, run them until all have ended, take the next ones. That is a *static*
# batch. But nobody knows beforehand how long an answer becomes, and a request that has ended leaves its row empty until
# the longest has ended too.
#
# The other way fills a row as soon as it is free. Both as a simulation, where a request is nothing but the number of
# steps that it takes:

# %%
Timeline = list[list[tuple[str, int]]]  # for each row of the batch: what is in it, and for how many steps


def static(lengths: list[int], rows: int) -> Timeline:
    timeline: Timeline = [[] for _ in range(rows)]
    for first in range(0, len(lengths), rows):
        batch = lengths[first : first + rows]
        for row, length in zip(timeline, batch, strict=False):
            row += [("request", length), ("nobody", max(batch) - length)]
    return timeline


def continuous(lengths: list[int], rows: int) -> Timeline:
    timeline: Timeline = [[] for _ in range(rows)]
    for length in lengths:
        free_first = min(timeline, key=num_steps)
        free_first.append(("request", length))
    return timeline


def num_steps(row: list[tuple[str, int]]) -> int:
    return sum(steps for _, steps in row)


# %% [markdown]
# **Predict.** Nine requests take 3, 9, 4, 2, 2, 8, 3, 5 and 2 steps, in a batch of three rows. After how many steps are
# all of them served, by each of the two?
#
# <details><summary>See</summary>
#
# **after 22 steps (static) and 14 (continuous)** (`max(map(num_steps, timeline)) for timeline in ways.values()`).
# Static: the longest of the first three, of the next three, and of the last: 9 + 8 + 5.
#
# </details>

# %%
nine = [3, 9, 4, 2, 2, 8, 3, 5, 2]
ways = {"static": static(nine, rows=3), "continuous": continuous(nine, rows=3)}
for way, timeline in ways.items():
    print(f"{way:>10}: {max(map(num_steps, timeline))} steps")

assert max(map(num_steps, ways["static"])) == 9 + 8 + 5
assert max(map(num_steps, ways["continuous"])) == 14

# %% [markdown]
# Each bar is a row of the batch, time goes to the right, and the number is how many steps a piece takes:

# %%
from minipaged.stepper.pictures import Bars

Bars(
    [
        (f"{way}, row {row}", [piece for piece in pieces if piece[1]])
        for way, timeline in ways.items()
        for row, pieces in enumerate(timeline)
    ],
    {"request": "lines", "nobody": "empty"},
    axis="steps",
)

# %% [markdown]
# ## The same with the engine
#
# Now 128 requests and a batch of eight rows, and beside the simulation minipaged's engine, which is given the same
# requests. (Its model here only counts, and there are blocks for everybody.) Lengths are random, with the mean that the
# paper reports for the answers of its Alpaca workload, 58 tokens.
#
# To batch statically, the engine is simply not told of the next eight requests before the last of the present ones has
# ended.

# %%
import random

from minipaged import SamplingParams
from minipaged.stepper import Storyteller

ROWS = 8
r = random.Random(0)
lengths = [1 + int(r.expovariate(1 / 58)) for _ in range(128)]
counting = Storyteller([" ".join(str(number) for number in range(512))])


def engine_steps(at_once: int) -> int:
    """Steps that the engine takes for all requests, `at_once` of them handed over whenever it has none."""
    engine = counting.engine(num_blocks=512, block_size=16, max_model_len=512, max_num_seqs=ROWS)
    for first in range(0, len(lengths), at_once):
        for length in lengths[first : first + at_once]:
            engine.add_request([0], SamplingParams(max_tokens=length, temperature=0))
        while engine.has_unfinished_requests():
            engine.step()
    return engine.current_stats().steps


used = sum(lengths)
steps = {"static": engine_steps(at_once=ROWS), "continuous": engine_steps(at_once=len(lengths))}
for way, timeline in {"static": static(lengths, ROWS), "continuous": continuous(lengths, ROWS)}.items():
    assert steps[way] == max(map(num_steps, timeline)), "the engine does what the simulation says"
    print(f"{way:>10}: {steps[way]:>4} steps, {used / (ROWS * steps[way]):.0%} of the rows used")

assert steps["static"] > 2 * steps["continuous"]
assert used / (ROWS * steps["continuous"]) > 0.85

# %%
Bars(
    [(way, [("request", used), ("nobody", ROWS * total - used)]) for way, total in steps.items()],
    {"request": "full", "nobody": "empty"},
    unit=" row-steps",
)

# %% [markdown]
# The same answers in less than half of the steps. The rows that are empty even so are those of the end, when no further
# request waits.
#
# This is called **continuous batching**, or *iteration-level scheduling*: an iteration is one pass of the model, here
# one `Engine.step`, and before each of them the scheduler decides afresh. It needs a KV cache from which a request can
# leave, and into which another can come, at any step. Blocks make that easy.
#
# ## Chunks: a prompt beside those that decode
#
# A newcomer brings a prompt, and that can be long. If it were run at once, everybody else would wait for that one pass.
# So a step has a **token budget**, `max_num_batched_tokens`. Requests that decode are served first, one token each.
# What is left goes to prompts, and a prompt for which it is not enough is cut: its next *chunk* runs in the next step.
# The paper does not have this; vLLM calls it *chunked prefill*.
#
# That costs no second kind of pass. A batch is a list of rows, and a row is "these tokens of this sequence, from that
# position on": one token or five hundred.
#
# **Predict.** The budget is 6 tokens. A has a prompt of 3 tokens and runs, which is step 1. Then B arrives with a
# prompt of 13 tokens, and right after it C with 2. In which step will each of the two have its first token?
#
# <details><summary>See</summary>
#
# **B in step 4, C in step 4** (`first_token["B"], first_token["C"]`). One token of each step's six is A's, so B's 13
# are cut into 5, 5 and 3, and the last step has room for C too.
#
# </details>

# %%
from minipaged.events import RequestAdmitted, StepFinished, TokenGenerated
from minipaged.stepper import record

A = "It was the best of times it was the worst of times"
B = "Four score and seven years ago our fathers brought forth on this continent a new nation"
C = "Call me Ishmael some years ago"
model = Storyteller([A, B, C])


def prompt(text: str, num_words: int) -> list[int]:
    return model.encode(" ".join(text.split()[:num_words]))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


with record("A budget of six tokens", model.decode) as run:
    engine = model.engine(num_blocks=12, block_size=4, max_num_batched_tokens=6)
    engine.add_request(prompt(A, 3), greedy(6), request_id="A")
    engine.step()
    engine.add_request(prompt(B, 13), greedy(2), request_id="B")
    engine.add_request(prompt(C, 2), greedy(2), request_id="C")
    while engine.has_unfinished_requests():
        engine.step()

step, first_token = 1, {}
for event in run.events:
    if isinstance(event, StepFinished):
        print(f"step {step}: tokens {event.num_query_tokens}, sequences {event.num_sequences}")
        step += 1
    elif isinstance(event, TokenGenerated):
        first_token.setdefault(event.request, step)
print("first tokens in step", first_token)

assert [e.num_query_tokens for e in run.events if isinstance(e, StepFinished)] == [3, 6, 6, 6, 3, 1]
assert first_token == {"A": 1, "B": 4, "C": 4}

# %% [markdown]
# In steps 2, 3 and 4 A takes one token of the budget and B gets the other five, five, and its last three. Those leave
# two for C, which has exactly two. And A, in the middle of it all, gets a token in every step.
#
# Watch the two queues, and at the beginning of each step the code of
# [`Scheduler.schedule`](../minipaged/engine/scheduler.py) and of the policy,
# [`FirstComeFirstServed.admit`](../minipaged/engine/policy.py).

# %%
run

# %% [markdown]
# ## Other budgets, other prompts
#
# The same three, with a budget, a prompt of B and a pool of your choice. A column is a step, and a number says how many
# tokens of a request it runs. On this page move the sliders, and the engine is run again; in the notebook change the
# numbers.
#
# - From which budget on does B's prompt need one step alone? If a step takes longer the more tokens it runs, what does
#   A notice of that?
# - What does a budget of 2 do to C?
# - Make the pool smaller. When does C have to wait longer than for its share of the budget? (It says why below.)

# %% tags=["editable"]
from minipaged import InvalidRequest, SamplingParams
from minipaged.events import RequestAdmitted, RequestArrived, StepStarted, TokensComputed
from minipaged.stepper import Reciter
from minipaged.stepper.pictures import Cells

budget = 6  # slide 2 to 24: tokens that a step may run
prompt_of_b = 13  # slide 1 to 32: tokens of B's prompt
pool = 12  # slide 3 to 12: blocks of 4 slots

counting = Reciter([" ".join([name, *map(str, range(40))]) for name in "ABC"])
engine = counting.engine(num_blocks=pool, block_size=4, max_model_len=48, max_num_batched_tokens=budget)
events = []
engine.listeners.append(events.append)


def add(name, num_tokens, max_tokens):
    words = [name, *map(str, range(num_tokens - 1))]
    try:
        engine.add_request(counting.encode(" ".join(words)), SamplingParams(max_tokens=max_tokens), request_id=name)
    except InvalidRequest as refusal:
        print(f"{name}: {refusal}")


add("A", 3, max_tokens=6)
engine.step()
add("B", prompt_of_b, max_tokens=2)
add("C", 2, max_tokens=2)
while engine.has_unfinished_requests():
    engine.step()

ran = {name: [] for name in "ABC"}  # tokens in each step
names, slots = {}, {}
for event in events:
    match event:
        case RequestArrived():
            names[event.sequence] = event.request
        case RequestAdmitted():
            slots[event.request] = 0
        case StepStarted():
            for each in ran.values():
                each.append(0)
        case TokensComputed():
            name = names[event.sequence]
            ran[name][-1] += event.num_tokens - slots[name]
            slots[name] = event.num_tokens

ran["in all"] = list(map(sum, zip(*ran.values(), strict=True)))
Cells(
    [(name, [(f"{n}", "runs") if n else ("", "does not run") for n in each]) for name, each in ran.items()],
    {"runs": "lines", "does not run": "empty"},
)

# %% [markdown]
# ## Admission: OK, LATER, NEVER
#
# Rows and tokens are one limit; the blocks of the pool are the other. For the request at the head of the queue the
# scheduler asks whether there are blocks, and there are three answers:
#
# - **OK**: for everything that it has to run, and one more for each sequence that runs already and can still need one,
#   since it soon will. It moves from waiting to running.
# - **LATER**: not now. It stays at the head of the queue, and nobody overtakes it, however small: a large request would
#   otherwise wait for as long as small ones keep coming.
# - **NEVER**: at its full length it would not fit even if it had the whole pool to itself. That is known when it
#   arrives, and it is told so at once. In a queue it would wait forever, and everybody behind it too.
#
# **Predict.** A pool of 5 blocks of 4. A runs and holds 2 blocks. D arrives with a prompt of 13 tokens and asks for 12
# more, which is 24 slots, since the last token is never run; then B with a prompt of 9 tokens; then C with 2. Which of
# them gets which answer?
#
# - D: LATER, B: LATER, C: LATER
# - D: NEVER, B: OK, C: LATER
# - D: NEVER, B: LATER, C: OK
#
# <details><summary>See</summary>
#
# **D: NEVER, B: LATER, C: OK** (`[answer.name for answer in answers.values()] == ["LATER", "OK"]`). D's 24 slots are
# six blocks, one more than there are. B needs three blocks for its prompt and one to spare, and three are free.
#
# </details>

# %%
from minipaged import InvalidRequest

with record("OK, LATER, NEVER", model.decode) as queues:
    engine = model.engine(num_blocks=5, block_size=4, max_model_len=64)
    engine.add_request(prompt(A, 7), greedy(4), request_id="A")
    engine.step()
    try:
        engine.add_request(prompt(B, 13), greedy(12), request_id="D")
    except InvalidRequest as refusal:
        print(f"D: {refusal}")
    engine.add_request(prompt(B, 9), greedy(3), request_id="B")
    engine.add_request(prompt(C, 2), greedy(3), request_id="C")
    answers = {r.request_id: engine.blocks.can_admit(r, spare=1) for r in engine.scheduler.waiting}
    print(*(f"{name}: {answer.name}" for name, answer in answers.items()), sep="\n")
    while engine.has_unfinished_requests():
        engine.step()

assert {name: answer.name for name, answer in answers.items()} == {"B": "LATER", "C": "OK"}
assert [event.request for event in queues.events if isinstance(event, RequestAdmitted)] == ["A", "B", "C"]

# %% [markdown]
# Three blocks are free. B needs three and one to spare: LATER. For C there would be room, but it does not overtake.
# When A has ended, both are admitted in the same step.

# %%
queues

# %% [markdown]
# A request that is admitted has blocks for its prompt and for hardly more. What if they all grow and the pool runs out?
# Then somebody has to give blocks back: that is *preemption*, the subject of [tutorial 8](08_preemption.py).
#
# ## Exercise
#
# What does `max_num_batched_tokens` do to the neighbours of a long prompt, and to the prompt itself? The function below
# makes a real engine over the simulated machine of the first section: `engine.step()` computes nothing, and moves
# `runner.now` on by the seconds that the step would take. Let A decode, let B arrive with a prompt of 1,500 tokens, and
# measure for budgets of 2048, 512, 128 and 32 tokens how long A waits at most between two of its tokens, and how long B
# waits for its first. (`engine.listeners` is a list of functions: each is called with every event, as it happens.)

# %%
from itertools import pairwise

from minipaged.engine.engine import Engine
from minipaged.params import EngineConfig
from minipaged.simulation.simulated import SimulatedRunner, simulated_tier


def simulated(budget: int) -> tuple[Engine, SimulatedRunner]:
    runner = SimulatedRunner(OPT_13B_ON_AN_A100, block_size=16)
    config = EngineConfig(num_blocks=256, max_model_len=2048, vocab_size=1, max_num_batched_tokens=budget)
    return Engine(config, simulated_tier(), runner, clock=runner.clock), runner


# %% tags=["solution"]
def waits(budget: int) -> tuple[float, float]:
    """Seconds: A's longest between two tokens, and B's from its arrival to its first."""
    engine, runner = simulated(budget)
    times: dict[str, list[float]] = {"A": [], "B": []}

    def listen(event: object) -> None:
        if isinstance(event, TokenGenerated):
            times[event.request].append(runner.now)

    engine.listeners.append(listen)
    engine.add_request([0] * 16, SamplingParams(max_tokens=80), request_id="A")
    for _ in range(10):
        engine.step()
    arrival = runner.now
    engine.add_request([0] * 1500, SamplingParams(max_tokens=1), request_id="B")
    while engine.has_unfinished_requests():
        engine.step()
    gaps = [later - earlier for earlier, later in pairwise(times["A"])]
    return max(gaps), times["B"][0] - arrival


found = {budget: waits(budget) for budget in (2048, 512, 128, 32)}
for budget, (longest, first) in found.items():
    print(f"{budget:>4} tokens: A waits up to {1000 * longest:3.0f} ms, B {1000 * first:.0f} ms for its first token")

assert found[2048][0] > 6 * found[128][0]
assert found[128][1] < 2 * found[2048][1]
assert found[32][1] > 6 * found[2048][1]
# A chunk of 128 tokens is computed while the weights are being read, so A hardly notices it. Still smaller ones win
# nothing for A, and B needs many more passes, each of which reads all the weights again.
