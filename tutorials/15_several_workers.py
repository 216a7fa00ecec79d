# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 15. One model, several workers

# %% [markdown]
# **What you will understand.** A model that is too large for one device is shared out to several. What is cut where,
# and why the parts meet only twice a layer ([Megatron-LM](https://arxiv.org/abs/1909.08053), section 3); why one
# scheduler and one block table are enough for all of them (section 4.6 of the paper); what a worker is told in a step,
# and how many bytes that is; what becomes of the others when one dies. And why a model that is cut the other way, into
# stages, needs several steps at once.
#
# First the parts are in this process, in NumPy, where one can look at them. Then they are processes. That part needs
# the extra `fast`. Two cores are no faster for it: what it shows is that the tokens are the same.
#
# ## Two products, one sum
#
# This is the MLP of a layer of SmolLM2. Two matrices make 1,536 numbers of each token's 576, a gate goes over them,
# number by number, and a third matrix brings them back to 576.

# %%
import numpy as np

from minipaged.llm import LoadedModel
from minipaged.reference.llama import silu

loaded = LoadedModel.load("smollm2-135m-instruct", "reference", dtype="float32")
config = loaded.config
gate, up, down = (loaded.weights[f"model.layers.10.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
print(f"gate and up {gate.shape}, down {down.shape}: [out, in]")

x = np.random.default_rng(0).standard_normal((3, config.hidden_size), dtype=np.float32)  # [tokens, hidden]


def mlp(columns: slice) -> np.ndarray:
    """What some of the 1,536 numbers, and no others, add to each token."""
    return (silu(x @ gate[columns].T) * (x @ up[columns].T)) @ down[:, columns].T  # [tokens, hidden]


# %% [markdown]
# **Predict.** Rank 0 gets the first half of the 1,536 numbers: those rows of gate and up, and the *columns* of down
# that read them. Rank 1 gets the others. What have the two to tell each other, and when?
#
# - each other's half of the 1,536 numbers, before down
# - one sum, at the very end
# - a sum before the gate, and one at the end
#
# <details><summary>See</summary>
#
# **one sum, at the very end** (`off(parts[0] + parts[1]) < 1e-6`). Down adds up its inputs, and these may be added in
# two parts.
#
# </details>

# %%
whole = mlp(slice(None))
parts = [mlp(slice(0, 768)), mlp(slice(768, 1536))]


def off(y: np.ndarray, right: np.ndarray = whole) -> float:
    return float(np.linalg.norm(y - right) / np.linalg.norm(right))


print(f"rank 0 alone is off by {off(parts[0]):.0%}, the sum of both by {off(parts[0] + parts[1]):.1e}")
assert off(parts[0]) > 0.3
assert off(parts[0] + parts[1]) < 1e-6

# %% [markdown]
# One sum, at the very end. The gate looks at one number at a time, so who has that number can do it alone; and a
# product is a sum over its inputs, which may as well be added later. What is left of the difference is rounding: a sum
# in another order.
#
# Cut the other way (rank 0 reads the first half of each token, and has gate's columns for it) each rank would have a
# *summand* of all 1,536 numbers, and the gate of a summand is of no use. They would have to be added before it as well:

# %%
halves = [silu(x[:, part] @ gate[:, part].T) for part in (slice(0, 288), slice(288, 576))]
print(f"gates of halves, added: off by {off(halves[0] + halves[1], silu(x @ gate.T)):.0%}")
assert off(halves[0] + halves[1], silu(x @ gate.T)) > 0.3

# %% [markdown]
# So the rule is: *the first matrix by its outputs, the second one by its inputs*. Attention goes by it, too. Queries,
# keys and values are made by matrices that are cut by their outputs, and what lies between them and the output matrix o
# is attention, which each head does by itself. So a rank has **whole heads**, and o's columns for them.
#
#     x = x + sum over ranks of  o[:, heads of r] @ attention(q[heads of r], k[...], v[...])
#     x = x + sum over ranks of  down[:, columns of r] @ (silu(gate[columns of r]) * up[columns of r])
#
# Two sums a layer. The embedding is cut by the vocabulary: a token's row is with one rank, the others have zeros, and
# that is a sum again. The head is cut in the same way, and its logits are laid side by side.
#
# ## Heads that do not divide
#
# SmolLM2 has 9 query heads. Three of them read the same keys and values, so there are 3 *KV heads*. Three ranks would
# be easy.
#
# **Predict.** Who gets what on two ranks? And on four, where there are fewer KV heads than ranks: how many KV heads do
# the four keep in all?
#
# <details><summary>See</summary>
#
# **4 KV heads** (`sum(len(shard.kv_heads) for shard in shards)`). Each rank needs the KV head of its queries, so one is
# there twice.
#
# </details>

# %%
from minipaged.models.shards import shard_of
from minipaged.stepper.pictures import Cells

rows = []
for size in (2, 3, 4):
    shards = [shard_of(config, rank, size) for rank in range(size)]
    for shard in shards:
        kinds = [f"KV head {head // 3}" for head in shard.heads]
        assert set(kinds) == {f"KV head {head}" for head in shard.kv_heads}
        rows.append(
            (f"{size} ranks, rank {shard.rank}", [(f"q{h}", kind) for h, kind in zip(shard.heads, kinds, strict=True)])
        )
    assert [head for shard in shards for head in shard.heads] == list(range(9))
    assert sum(len(shard.kv_heads) for shard in shards) == max(3, size)
Cells(rows, {"KV head 0": "empty", "KV head 1": "dots", "KV head 2": "lines"})

# %% [markdown]
# [`shard_of`](../minipaged/models/shards.py) deals contiguous ranges, the first ranks get one more. On two ranks the
# first has two KV heads with all their queries. On four, KV head 0 is there *twice*: ranks 0 and 1 both keep its keys
# and values, and share its queries. That costs memory, a third more for the whole cache, and saves asking each other.

# %%
from minipaged.models.shards import cut_weights

for size in (1, 2, 3, 4):
    shards = [shard_of(config, rank, size) for rank in range(size)]
    held = [sum(part.nbytes for part in cut_weights(config, shard, loaded.weights).values()) for shard in shards]
    block = loaded.block_bytes(16, tensor_parallel_size=size)
    print(f"{size} ranks: {' + '.join(f'{each / 1e6:.0f}' for each in held)} MB of weights; ", end="")
    print(f"a block of 16 tokens takes {block:,} bytes on all of them")
    assert sum(held) < 1.02 * 4 * 134_515_008  # in float32: next to nothing is there twice
assert loaded.block_bytes(16, tensor_parallel_size=4) == 4 * loaded.block_bytes(16) // 3

# %% [markdown]
# ## One block table, many caches
#
# On the reference tier all ranks are in this process: [`ShardedLlama`](../minipaged/reference/sharded.py) has a `Llama`
# for each, with its weights and its KV cache, and adds what they have made. The engine does not know. Here is the same
# request with one rank, two and four; and what the engine has told its runner, step by step.

# %%
from minipaged import LLM, SamplingParams
from minipaged.steps import StepInput

PROMPT, PARAMS = "The capital of France is", SamplingParams(temperature=0, max_tokens=9)


def watch(engine) -> list[StepInput]:
    """The steps that the engine tells its runner from now on."""
    steps, run = [], engine.runner.run

    def run_and_note(step: StepInput):
        steps.append(step)
        return run(step)

    engine.runner.run = run_and_note
    return steps


llms, told, token_ids = {}, {}, {}
for size in (1, 2, 4):
    llms[size] = LLM(loaded, tensor_parallel_size=size, num_blocks=8, block_size=4, num_swap_blocks=0)
    told[size] = watch(llms[size].engine)
    [output] = llms[size].generate(PROMPT, PARAMS, use_tqdm=False)
    token_ids[size] = output.outputs[0].token_ids
    print(f"{size} rank{'s' * (size > 1)}: {output.outputs[0].text!r}")

assert token_ids[1] == token_ids[2] == token_ids[4]
assert told[1] == told[2] == told[4]

for step in told[2]:
    news = [f"begins with the block table {list(begun.blocks)}" for begun in step.begun]
    news += [f"its table goes on with {list(change.blocks)}" for change in step.tables]
    print(f"step {step.number}: {'; '.join(news) or 'all go on'}")

# %% [markdown]
# The same tokens; and the very same steps. Nobody is told of ranks, for a block has one number everywhere. Block 1 of
# rank 0 and block 1 of rank 1 hold the same tokens, each for its own KV heads. Together they are what a single cache
# holds in its block 1:

# %%
whole = llms[1].engine.runner.kv_cache.device_blocks  # [blocks, layers, K or V, slots, KV heads, head_dim]
sharded = llms[2].engine.runner
for shard, rank in zip(sharded.shards[0], sharded.stages[0], strict=True):
    mine = rank.kv_cache.device_blocks
    heads = slice(shard.kv_heads.start, shard.kv_heads.stop)
    print(f"rank {shard.rank}: {mine.shape[0]} blocks, {mine.nbytes // mine.shape[0]:,} bytes each; KV heads ", end="")
    print(f"{list(shard.kv_heads)}; at most {np.abs(mine - whole[..., heads, :]).max():.1e} from the whole cache's")
    assert np.allclose(mine, whole[..., heads, :], atol=1e-3)

# %% [markdown]
# This is what section 4.6 of the paper is about. The workers never have to agree on memory: where a token goes is told
# to all of them, at the beginning of each step, with the same words. Whatever the engine does with blocks, it does
# once. A block that is copied on write, swapped out, or found in the prefix cache, is so on every rank.
#
# ## What a step says
#
# In the paper the scheduler sends, in each step, the tokens of all requests and their block tables. But a worker knows
# most of that: it was told the tables before, and it has chosen the tokens itself. (All ranks have all logits, and draw
# the same random numbers. So all choose the same, and none needs to be told.) What it cannot know is what has
# *changed*.
#
# **Predict.** 256 sequences decode, with some 600 tokens each, in blocks of 16. How large is a message with all tables,
# and how large is one with what has changed? The machine is the simulated one here; engine and messages are real.
#
# - some 30 kB; some 15 kB
# - some 30 kB; less than 200 bytes
# - some 3 MB; some 30 kB
#
# <details><summary>See</summary>
#
# **some 30 kB; less than 200 bytes** (`25_000 < everything < 35_000 and max(sizes) < 200`). A table has 38 entries and
# more; and of all tables some 16 grow by one entry in a step.
#
# </details>

# %%
import msgspec

from minipaged.engine.engine import Engine
from minipaged.parallel.messages import RunStep, encode
from minipaged.params import EngineConfig
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100, SimulatedRunner, simulated_tier


def simulated(num_requests: int, num_steps: int, **settings) -> list[StepInput]:
    """The first steps of an engine that many requests come to at once."""
    sizes = {"num_blocks": 20_000, "max_model_len": 2048, "max_num_batched_tokens": 200_000, "vocab_size": 1}
    config = EngineConfig(**sizes, **settings)
    engine = Engine(config, simulated_tier(), SimulatedRunner(OPT_13B_ON_AN_A100, block_size=16))
    steps = watch(engine)
    for i in range(num_requests):
        engine.add_request([0] * (500 + i % 100), SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(num_steps):
        engine.step()
    return steps


first, *steady = simulated(256, 101, enable_prefix_caching=False)
tables = {begun.sequence: list(begun.blocks) for begun in first.begun}
for step in steady:
    for change in step.tables:  # what a worker does with it
        tables[change.sequence][change.kept :] = change.blocks
everything = len(msgspec.msgpack.encode([(0, table) for table in tables.values()]))
sizes = [len(encode(RunStep(step))) for step in steady]  # as they go through the socket
print(f"all tokens and tables: {everything:,} bytes; what has changed: {min(sizes)} to {max(sizes)} bytes, ", end="")
print(f"{sum(sizes) / len(sizes):.0f} in the mean")

assert len(first.begun) == len(tables) == 256
assert everything > 25_000
assert max(sizes) < 2048
assert len(encode(RunStep(StepInput(number=50)))) == 28  # no table grows: that all go on needs no words

# %% [markdown]
# A table grows when its last block is full, so in a step one sequence in 16 has something to tell, more or less. Where
# none has, the message is 28 bytes long, and says little more than the number of the step.
#
# ## Real processes
#
# `tensor_parallel_size=2` on the fast tier starts two *workers*, processes that load a rank's part of the weights each.
# The engine stays here, in the *driver*, which has no weights. Each step it sends both of them the same bytes; they
# exchange their sums (with torch.distributed), and rank 0 tells which tokens were chosen. Starting them takes some
# seconds; longer the first time, when kernels are compiled.

# %%
import os

llm = LLM(
    "smollm2-135m-instruct",
    tier="fast",
    device="cpu",
    dtype="float32",
    tensor_parallel_size=2,
    num_blocks=8,
    block_size=4,
    num_swap_blocks=0,
)
pids = llm.loaded.weights.pids
steps = watch(llm.engine)
[output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
print(f"{len(pids)} workers: {output.outputs[0].text!r}")

assert os.getpid() not in pids
assert output.outputs[0].token_ids == token_ids[1]
assert steps == told[1]

# %% [markdown]
# The tokens of one rank, and once more the very same steps: the engine is not told whether its runner is one `Llama` or
# several processes.
#
# The *logits* are not quite the same as with one rank, for a sum in parts is rounded otherwise. So there are two
# promises ([*parallel-invariance*](../docs/design.md#the-invariants)). Against one rank, the same tokens, but where two
# logits lie as close as rounding. Against the same shards in one process, the same bits, which takes some care: a sum
# of floats depends on the order in which it is taken.

# %%
parts = [np.float32(1), np.float32(2**-24), np.float32(2**-24)]  # of three ranks
print(f"in the order of the ranks {sum(parts):.9f}, in another {sum(parts[::-1]):.9f}")
assert sum(parts) != sum(parts[::-1])

# %% [markdown]
# torch's own `all_reduce` on CPUs adds in another order, with three ranks or more. So the workers gather all parts, and
# each adds them in the order of the ranks ([`summed`](../minipaged/fast/sharded.py)).
#
# ## One dies
#
# **Predict.** Somebody kills rank 1 between two tokens. Could rank 0 go on? What should the caller be told?
#
# - it could; nothing but that it is slower
# - it could not; which worker has died, and of what
# - it could not; nothing, rank 1 is started again
#
# <details><summary>See</summary>
#
# **it could not; which worker has died, and of what** (`said.startswith("worker 1 of 2") and "SIGKILL" in said`). Half
# of the weights and of the cache went with it.
#
# </details>

# %%
import signal

from minipaged.errors import WorkerFailed

llm.engine.add_request(llm.tokenizer.encode(PROMPT), PARAMS)
for _ in range(3):
    llm.engine.step()
os.kill(pids[1], signal.SIGKILL)
try:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
except WorkerFailed as error:
    said = str(error)
    print(said.replace(str(pids[1]), "1234"))  # so that this page does not change whenever it is made
llm.close()

assert said.startswith("worker 1 of 2")
assert "SIGKILL" in said
for pid in pids:
    try:
        os.kill(pid, 0)
        raise AssertionError(f"process {pid} is left")
    except ProcessLookupError:
        pass  # as it should be

# %% [markdown]
# Without its half, no token can be computed, and what rank 1 had in its cache is lost. So one end is everybody's: the
# driver hears of it at once (the socket between them closes), ends the others, and says which one it was, what of, and
# the last lines that it has printed. It works the other way round too: when the driver goes, however it goes, the
# workers' sockets close, and they go by themselves. One that hangs is found by a timeout, and a server answers
# `/health` with 503 and ends ([the page on parallelism](../docs/concepts/parallelism.md)).
#
# ## Stages, and why they need lanes
#
# The other way to share a model out is by layers: *stage* 0 has the first 15 of them, stage 1 the others
# (`pipeline_parallel_size=2`). All that one hands to the next is a vector for each token, once a step instead of 61
# times. But the stages work one after the other. And the next step of a sequence cannot begin before its last one is
# through, for its token is not known.
#
# **Predict.** How much of the time do two stages stand idle? And what if the requests are dealt to two *lanes*, whose
# steps take turns?
#
# <details><summary>See</summary>
#
# **50 % with one lane, 14 % with two** (`sum(kind == "idle" for _, kind in rows[0][1]) / len(rows[0][1]), 1 - busy`,
# give or take 15). Each step has to be through both stages before the same requests' next one. Two lanes are idle at
# the beginning and at the end alone.
#
# </details>

# %%
STAGES = 2


def when(steps: list[StepInput]) -> list[list[StepInput | None]]:
    """Which step each stage works on, if a stage takes one unit of time for any."""
    stages: list[list[StepInput | None]] = [[] for _ in range(STAGES)]
    known = {step.lane: 0 for step in steps}  # of each lane: when the tokens of its latest step are
    for step in steps:
        time = known[step.lane]
        for stage in stages:
            time = max(time, len(stage))  # this stage may be at work still
            stage += [None] * (time - len(stage)) + [step]
            time += 1
        known[step.lane] = time
    return stages


LANES = {None: "idle", 0: "lane 0", 1: "lane 1"}
rows = []
for num_lanes in (1, 2):
    stages = when(simulated(4, 6, pipeline_parallel_size=num_lanes)[:6])
    time = max(map(len, stages))
    busy = sum(step is not None for stage in stages for step in stage) / (STAGES * time)
    for number, stage in enumerate(stages):
        stage += [None] * (time - len(stage))
        cells = [("", LANES[None]) if step is None else (f"{step.number}", LANES[step.lane]) for step in stage]
        rows.append((f"{num_lanes} lane{'s' * (num_lanes > 1)}, stage {number}", cells))
    print(f"{num_lanes} lane{'s' * (num_lanes > 1)}: 6 steps take {time} units, of which the stages work {busy:.0%}")
    assert busy == 1 / 2 if num_lanes == 1 else busy > 0.8
Cells(rows, {"idle": "empty", "lane 0": "lines", "lane 1": "dots"})

# %% [markdown]
# The steps are those of a real engine, and the numbers are theirs. With one lane half of the time is lost. With as many
# lanes as stages nothing is, but for the beginning and the end: while stage 1 works on lane 0's step, stage 0 has lane
# 1's. A lane is no more than this: a request stays in the one that it was given, and each has its own rows, and its own
# "what has changed". Blocks and queues are common ([engine/lanes.py](../minipaged/engine/lanes.py),
# [engine/pipeline.py](../minipaged/engine/pipeline.py)).
#
# ## Exercise
#
# How much do two ranks, and two stages, have to send each other? Count the numbers that one of them gives away in a
# step of one token of SmolLM2: as rank 0 of two, and as stage 0 of two. Then check how many sums there are with a
# counting `total` in [reference/sharded.py](../minipaged/reference/sharded.py). Which of the two ways would you
# choose between machines, and which within one?

# %% tags=["solution"]
from minipaged.reference import sharded as shards_in_one_process

sums, add = [], shards_in_one_process.total


def counting(parts):
    sums.append(add(parts))
    return sums[-1]


shards_in_one_process.total = counting
llms[2].generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False)
shards_in_one_process.total = add

as_rank = sum(each.size for each in sums) + config.vocab_size // 2
as_stage = config.hidden_size
print(f"{len(sums)} sums; a rank gives away {as_rank:,} numbers a token, a stage {as_stage}")
assert len(sums) == 2 * config.num_hidden_layers + 1
assert as_rank > 100 * as_stage
# A sum is waited for 61 times a step, by everybody; so ranks belong where messages are fast, within a machine. A stage
# hands on little, once. But a rank makes each step shorter, and stages only make room for more of them at once: a
# single request is as slow with stages as without.
