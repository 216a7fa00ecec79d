# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 14. A server around the engine: streaming, cancelling, measuring

# %% [markdown]
# **What you will understand.** What it takes to let many people use one engine at once: why it gets a thread of its own
# beside an event loop, how words get to each reader while they are generated, what becomes of a reader who is slow, or
# goes away, what is said to those who are too many, and by which figures one tells how good a service is. Last, how an
# output is held to the form that a client asks for, such as JSON. In the paper the server is two sentences of section
# 5; the measuring is section 6.1. Forms are not in it.
#
# All of it happens in this process, without a network, so that one sees what a web server and an application say to
# each other. It needs the extra `serve`, which includes `structured`: `pip install -e '.[serve]'`.
#
# ## Two loops that do not fit
#
# A web server is an *event loop*: thousands of conversations in one thread, each of which runs until it has to wait for
# something (`await`), and then lets another one go on. That works as long as nobody keeps the turn for long.
#
# An engine is a loop too, and each of its turns is a step, which waits for nothing and computes. While it does, nobody
# is heard: no request is accepted, nobody is sent his words, and who hangs up goes unnoticed.
#
# **Predict.** Six steps of SmolLM2, of some 60 milliseconds each. A coroutine beside them asks for its turn every
# millisecond. How often does it get it when the steps are run in the event loop, and how often when they are run in a
# thread?
#
# - as often in both: NumPy does the work
# - some 6 times in the loop, and far more often in a thread
# - never in the loop, 6 times in a thread
#
# <details><summary>See</summary>
#
# **some 6 times in the loop, and far more often in a thread** (`turns[in_the_loop] <= NUM_STEPS + 1 and
# turns[in_a_thread] > 2 * NUM_STEPS`). While a step is computed in the loop, nobody else has a turn.
#
# </details>

# %%
import asyncio
import threading
from collections.abc import Coroutine

from minipaged import LLM, SamplingParams

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()


def run(work: Coroutine):
    """In an event loop that stays from cell to cell. (A notebook runs in one of its own, which is taken.)"""
    return asyncio.run_coroutine_threadsafe(work, loop).result(timeout=100)


async def turns_beside(work: Coroutine) -> int:
    """How often another coroutine gets its turn until `work` is done."""
    turns = 0

    async def ask() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    asking = asyncio.create_task(ask())
    await work
    asking.cancel()
    return turns


llm = LLM("smollm2-135m-instruct", tier="reference", block_size=4, num_blocks=64)
engine = llm.engine


async def in_the_loop() -> None:
    while engine.has_unfinished_requests():
        engine.step()
        await asyncio.sleep(0)  # whoever waits may go on now


async def in_a_thread() -> None:
    while engine.has_unfinished_requests():
        await asyncio.to_thread(engine.step)


NUM_STEPS = 6
turns = {}
for steps in (in_the_loop, in_a_thread):
    engine.add_request(llm.tokenizer.encode("Once upon a time"), SamplingParams(temperature=0, max_tokens=NUM_STEPS))
    turns[steps] = run(turns_beside(steps()))
    print(f"{steps.__name__}: more than a turn for each step? {turns[steps] > 2 * NUM_STEPS}")

assert turns[in_the_loop] <= NUM_STEPS + 1
assert turns[in_a_thread] > 2 * NUM_STEPS

# %% [markdown]
# In the loop it is one turn a step: with prompts of thousands of tokens, one turn in seconds. In a thread there are as
# many as one asks for, because NumPy lets go of Python's lock (the GIL) while it multiplies, as the kernels of the fast
# tier do.
#
# (vLLM gives its engine a process instead. Where a step takes a few milliseconds on a GPU and hundreds of streams want
# their words, Python code of the one would still wait for that of the other.)
#
# ## One thread owns the engine
#
# So there are two threads, and an engine is no thing for two: nothing in it is locked, and between two steps its block
# tables have to be as a step has left them. The way out is *ownership*. [`AsyncLLM`](../minipaged/async_llm.py) has a
# thread that alone touches the engine, and they only pass messages:
#
#     coroutines ──► inbox: add, abort ──► engine's thread: step, step, step …
#          ▲                                        │
#       streams ◄── one hand-over to the loop ◄─────┘  after each step
#
# What coroutines want goes into an *inbox*, and is done between two steps. What a step brings, for all requests, is
# handed to the loop in one go: `call_soon_threadsafe` wakes the loop, which costs the same for one sequence as for 256.
#
# Here are two readers at once. An observer, which is told of each step where it happens, notes who runs the engine.

# %%
from minipaged.async_llm import AsyncLLM, AsyncRequest


class Watch:
    """Notes of each step in which thread it ran, how many requests were running after it, and the blocks they held."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []

    def added(self, request_id, params, num_prompt_tokens, arrival_time) -> None:
        """A request has come in: not our concern."""

    def after_step(self, updates, stats, num_running, num_waiting, now) -> None:
        self.steps.append((threading.current_thread().name, num_running, stats.blocks_used))


watch = Watch()
allm = AsyncLLM(
    llm.loaded,
    block_size=4,
    num_blocks=64,
    max_num_seqs=2,
    max_waiting=3,
    enable_prefix_caching=False,
    observers=[watch],
)
heard: list[tuple[str, str]] = []


async def read(name: str, prompt: str) -> None:
    async for update in allm.generate(prompt, SamplingParams(temperature=0, max_tokens=6), request_id=name):
        heard.append((name, update.completions[0].new_text))


async def two_readers() -> None:
    await asyncio.gather(read("A", "Once upon a time"), read("B", "The capital of France is"))


run(two_readers())
for name, text in heard:
    print(f"{name}: {text!r}")
print("the engine was run by", *{thread for thread, _, _ in watch.steps})

assert {thread for thread, _, _ in watch.steps} == {"minipaged-engine"}
assert {name for name, _ in heard} == {"A", "B"}

# %% [markdown]
# ## A slot, not a queue
#
# A reader may be slow: a phone in a tunnel. The engine goes on meanwhile, and his words have to be somewhere. In a
# queue they would pile up, an entry for each step, and each entry has a price, when it is made and when it is sent. The
# other extreme is to let the engine wait for him; but then everybody in his batch waits for the slowest of all.
#
# Words are easier to keep than most things, because two pieces of a text can be one piece. So each request has one
# *slot*: if the reader has not taken what is in there, what is new is [`joined`](../minipaged/async_llm.py) to it. What
# grows is the text that he has not read, and nothing else.
#
# **Predict.** A request of 16 tokens, whose reader sleeps from beginning to end. How many steps, and how many updates?
#
# <details><summary>See</summary>
#
# **16 steps, 1 update** (`len(watch.steps), len(updates)`). The engine waits for no reader, and what is not yet read is
# joined.
#
# </details>

# %%
watch.steps.clear()


async def sleep_and_read() -> list:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    stream = await allm.add([AsyncRequest("sleeper", llm.tokenizer.encode("Once upon a time"), params)])
    while allm.num_open:
        await asyncio.sleep(0.01)
    return [update async for update in stream]


updates = run(sleep_and_read())
print(f"{len(watch.steps)} steps, {len(updates)} update, of {len(updates[0].completions[0].new_token_ids)} tokens:")
print(updates[0].completions[0].new_text)

assert len(watch.steps) == 16
assert len(updates) == 1
assert len(updates[0].completions[0].new_token_ids) == 16

# %% [markdown]
# ## What an application hears and says: ASGI
#
# Between the streams and the world stands an application. minipaged's is made with FastAPI, and like any in Python that
# is asynchronous it is, in the end, one coroutine function: `app(scope, receive, send)`. The *scope* says what is asked
# for. With `receive` it hears the client: first the body, and, should that happen, that he has hung up. With `send` it
# speaks: a start (status and headers), and then the body in as many pieces as it likes. That is ASGI, and a web server
# (uvicorn) does no more than translate it to HTTP and sockets.
#
# So a client can be had without either: two queues. What the client says waits in one, what he is told in the other.
# That one has room for one message, as a socket has room for some bytes: if he does not read, `send` waits. This is
# *backpressure*.

# %%
import json
import time
from collections.abc import AsyncIterator

from minipaged.serve.app import create_app
from minipaged.serve.serving import LocalModel

app = create_app(LocalModel(allm, ["smollm2"]))


class Client:
    """Asks the application for one thing."""

    def __init__(self, path: str, **body: object) -> None:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST" if body else "GET",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.says: asyncio.Queue = asyncio.Queue()
        self.is_told: asyncio.Queue = asyncio.Queue(maxsize=1)
        self.says.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self.asked = time.perf_counter()
        self.served = asyncio.create_task(app(scope, self.says.get, self.is_told.put))

    async def begin(self) -> int:
        """The status of the answer, once it has begun."""
        start = await self.is_told.get()
        self.headers = dict(start["headers"])
        return start["status"]

    async def body(self) -> AsyncIterator[bytes]:
        """What comes then, piece by piece."""
        while True:
            message = await self.is_told.get()
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                await self.served
                return

    async def events(self) -> AsyncIterator[dict]:
        """The same, of a streamed answer (next section): what is in each piece, as JSON."""
        async for piece in self.body():
            if piece != b"data: [DONE]\n\n":
                yield json.loads(piece.removeprefix(b"data: "))["choices"][0]

    async def hang_up(self) -> None:
        self.says.put_nowait({"type": "http.disconnect"})
        await self.served


# %% [markdown]
# ## Streaming
#
# With `"stream": true` the answer is *server-sent events*: a body that goes on, of lines `data: …` with an empty line
# after each. In OpenAI's format each has a small JSON object with what is new, and `[DONE]` ends it. Here is all that
# comes, as it comes:

# %%
ask = {"prompt": "The capital of France is", "temperature": 0, "stream": True}


async def show_events() -> list[bytes]:
    client = Client("/v1/completions", **ask, max_tokens=3, request_id="france")
    print("status", await client.begin(), client.headers[b"content-type"].decode(), end="\n\n")
    return [piece async for piece in client.body()]


pieces = run(show_events())
print(b"".join(pieces).decode())
assert pieces[-1] == b"data: [DONE]\n\n"
assert json.loads(pieces[0].removeprefix(b"data: "))["choices"][0]["text"].startswith(" Paris")

# %% [markdown]
# An answer that has begun with status 200 cannot become an error any more. If the engine fails now, that is an event
# too: `data: {"error": …}`.
#
# ## What is held back
#
# Not every token can be sent when it is there. A character of three bytes may come as three tokens, and a third of a
# character is not text. And a *stop string* must not be in the answer, although its beginning may be one token, and its
# end another. What has been sent cannot be taken back. So text that may be the beginning of a stop string waits in the
# detokenizer.
#
# **Predict.** The story goes on ", the city of Nova Haven was a thriving metropolis". It is to stop at "Nova Scotia" or
# at "thriving metropolis". What is sent after each token?
#
# - each token's text, at once
# - nothing, until it is known how the text ends
# - what can no longer be part of a stop string
#
# <details><summary>See</summary>
#
# **what can no longer be part of a stop string** (`"".join(event["text"] for event in events) == ", the city of Nova
# Haven was a "`). The rest waits, for as long as it could still become one.
#
# </details>


# %%
async def tell_a_story() -> list[dict]:
    stop = ["Nova Scotia", "thriving metropolis"]
    client = Client("/v1/completions", **story, max_tokens=20, stop=stop)
    await client.begin()
    return [event async for event in client.events()]


story = ask | {"prompt": "Once upon a time", "return_token_ids": True}  # one of vLLM's fields: tokens beside the text
events = run(tell_a_story())
for event in events:
    print(f"{llm.tokenizer.decode(event['token_ids'])!r:>14} is chosen, {event['text']!r} is sent")

assert "".join(event["text"] for event in events) == ", the city of Nova Haven was a "
assert any("Nova Haven" in event["text"] for event in events)

# %% [markdown]
# "Nova" waits, until "Haven" shows that it was nothing. "thriving" waits too, and "metropolis" shows that it was right
# to: both are dropped. (Servers have shipped that streamed a stop string's first half. A test in which the whole of it
# is one token does not see that.)
#
# ## Hanging up
#
# Somebody closes his browser. For the server that is one message, `http.disconnect`, and it comes while the server is
# busy with something else: awaiting the next words. So whoever works for a client *races*: the work against
# `receive()`, and whichever is first ends the other. If it is the client, the stream is closed, and that puts an
# *abort* into the inbox.
#
# Why it matters, you know by now: what is generated for nobody holds blocks, and a place in the batch.
#
# **Predict.** Two clients with prompts of 4 and of 5 tokens, blocks of 4. The first one hangs up at its third word.
# When are its blocks free, and what becomes of the other request?
#
# - when its 40 tokens are there; the other gets all of its words
# - before the next step; the other gets all of its words
# - before the next step; the other begins once more
#
# <details><summary>See</summary>
#
# **before the next step; the other gets all of its words** (`num_left == 1 and blocks_of_one < blocks_of_two and
# len(token_ids) == 12`). No other sequence is touched.
#
# </details>

# %%
watch.steps.clear()


async def one_hangs_up() -> list[int]:
    """The tokens of the one who stays."""
    leaving = Client("/v1/completions", **story, max_tokens=40)
    staying = Client("/v1/completions", **ask, return_token_ids=True, max_tokens=12)

    async def read_three_words() -> None:
        await leaving.begin()
        words = leaving.events()
        for _ in range(3):
            await anext(words)
        await leaving.hang_up()

    leaves = asyncio.create_task(read_three_words())
    await staying.begin()
    token_ids = [token async for event in staying.events() for token in event["token_ids"]]
    await leaves
    return token_ids


token_ids = run(one_hangs_up())
for number, (_, num_running, num_blocks) in enumerate(watch.steps, 1):
    print(f"after step {number:>2}: {num_running} running, {num_blocks} blocks held")

last = max(number for number, (_, num_running, _) in enumerate(watch.steps) if num_running == 2)
(_, _, blocks_of_two), (_, num_left, blocks_of_one) = watch.steps[last : last + 2]
assert num_left == 1
assert blocks_of_one < blocks_of_two
assert watch.steps[-1][1:] == (0, 0)
assert len(token_ids) == 12  # the other one has got all of its words

# %% [markdown]
# The very next step runs without it: an abort is done between two steps, like all that is in the inbox. The promise has
# a name, **no-orphan**: whatever ends a request, its blocks are free before the next step. It has to hold wherever a
# client may leave: while his body is read, while his request is *being added*, while it waits, in the middle of its
# prompt, while `send` waits for a buffer that nobody empties. (Cancelled while it was being added, a request has kept
# its blocks for good in a server that many use.)
#
# (That also tells why chunks of prompts have a size. An abort waits for the step in progress; if that is a prompt of
# 100,000 tokens at once, it waits for all of them.)
#
# ## Step through it
#
# The same without a server, as the engine's thread sees it: step, step, step, and an order from the inbox. Words are
# made up again, and the prefix cache is off. Look at where B's blocks go, and that A notices nothing.

# %%
from minipaged.stepper import Storyteller, record

model = Storyteller(["It was the best of times it was the worst", "Four score and seven years ago our fathers"])

with record("B hangs up", model.decode) as hung_up:
    small = model.engine(num_blocks=6, block_size=4)
    for name, prompt in {"A": "It was the best", "B": "Four score and seven"}.items():
        small.add_request(model.encode(prompt), SamplingParams(temperature=0, max_tokens=6), request_id=name)
    for _ in range(3):
        small.step()
    held = small.blocks.num_used
    small.abort("B")  # between two steps
    left = small.blocks.num_used
    ended = []
    while small.has_unfinished_requests():
        ended += [update.output for update in small.step() if update.output]

print(f"{held} blocks held, and after the abort {left}")
for output in ended:
    print(f"{output.request_id}: {output.outputs[0].finish_reason}, …{output.outputs[0].text}")
assert (held, left) == (4, 2)
assert [(output.request_id, output.finished) for output in ended] == [("B", False), ("A", True)]
hung_up

# %% [markdown]
# ## Too many
#
# Two requests run here at most (`max_num_seqs=2`), and others wait. Waiting costs hardly any memory, so the queue could
# be as long as one likes. But a queue makes no server faster. It makes everybody behind it wait longer, until they hang
# up and ask again. A server does better to say *no* at once, while somebody else can still be asked: status 503, with
# the header `Retry-After`. This is backpressure again, one level up.
#
# **Predict.** Here three may wait (`max_waiting=3`), and two can run. Six requests arrive, one after another. How many
# are taken, and how many are sent away?
#
# <details><summary>See</summary>
#
# **5 are taken, 1 is sent away** (`statuses.count(200), statuses.count(503)`). Two run, three wait. With a 503 the
# sixth is told when to try again.
#
# </details>


# %%
async def six_requests() -> list[int]:
    clients, statuses = [], []
    for _ in range(6):
        client = Client("/v1/completions", **ask, max_tokens=40)
        clients.append(client)
        statuses.append(await client.begin())
        if len(clients) <= 2:
            await anext(client.events())  # it runs; those that come now have to wait
    print(statuses, "Retry-After:", clients[-1].headers[b"retry-after"].decode())
    async for piece in clients[-1].body():
        print(json.loads(piece)["error"]["message"])
    for client in clients[:-1]:
        await client.hang_up()
    return statuses


statuses = run(six_requests())
assert statuses == [200, 200, 200, 200, 200, 503]


# %% [markdown]
# (A streamed answer begins when the request has been *taken*, not when it runs. So those that wait have their 200. Then
# all five have hung up, three of them in the queue, and nothing is left of them.)
#
# ## Measuring
#
# How good is a service? Tokens a second is what its owner wants to know. Somebody who waits feels something else, and
# there are names for it:
#
# | | what it is | what it is made of |
# |---|---|---|
# | **TTFT**, time to first token | how long one looks at nothing | waiting, and the prompt |
# | **ITL**, inter-token latency | from one token to the next | the steps, with all that run in them |
# | **TPOT**, time per output token | (latency − TTFT) ÷ (tokens − 1): the mean ITL of a request | |
#
# (The paper has one figure for all of it, *normalized latency*: latency ÷ tokens.) With the times at which its events
# come, a client can reckon each of them. For this we start another server, which has nothing else to tell of.
#
# **Predict.** Three clients ask for 8 tokens each, at the same moment; two can run. Which of its figures tell that the
# third had to wait?
#
# - TTFT
# - TPOT
# - the longest ITL
#
# <details><summary>See</summary>
#
# **TTFT** (`ttft[2] > latency[0]`). It waits before its first token; after that it is as fast as anybody.
#
# </details>

# %%
from itertools import pairwise

run(allm.shutdown())
allm = AsyncLLM(llm.loaded, block_size=4, num_blocks=64, max_num_seqs=2)
app = create_app(LocalModel(allm, ["smollm2"]))
NUM_TOKENS = 8


async def times_of(client: Client) -> list[float]:
    """When its events came, in seconds after it asked."""
    await client.begin()
    return [time.perf_counter() - client.asked async for _ in client.events()]


async def three_clients() -> list[list[float]]:
    clients = [Client("/v1/completions", **ask, max_tokens=NUM_TOKENS) for _ in range(3)]
    return await asyncio.gather(*(times_of(client) for client in clients))


times = run(three_clients())

ttft = [of_one[0] for of_one in times]
latency = [of_one[-1] for of_one in times]
tpot = [(last - first) / (NUM_TOKENS - 1) for first, last in zip(ttft, latency, strict=True)]
itl = [[later - earlier for earlier, later in pairwise(of_one)] for of_one in times]
for number in range(3):
    print(
        f"client {number + 1}: TTFT {1e3 * ttft[number]:4.0f} ms, TPOT {1e3 * tpot[number]:3.0f} ms, "
        f"longest ITL {1e3 * max(itl[number]):3.0f} ms"
    )

assert ttft[2] > latency[0]
assert all(abs(sum(gaps) / (NUM_TOKENS - 1) - mean) < 1e-9 for gaps, mean in zip(itl, tpot, strict=True))

# %% [markdown]
# Only TTFT does. The third gets its first token after the first client has had all of his; from then on it is no
# slower than the others. So one figure is not enough, and neither is a mean: that of TTFT would say that everybody
# waits a while, which is true of nobody. One gives percentiles, and for ITL too: a long prompt that is run beside those
# who decode is one long pause in each of their streams, and TPOT hides it.
#
# The server reckons the same for itself, for every request, in the histograms of `/metrics`
# ([`Metrics`](../minipaged/serve/metrics.py)). A histogram has the sum of its values and their number:

# %%
from prometheus_client.parser import text_string_to_metric_families

names = {
    "TTFT": "vllm:time_to_first_token_seconds",
    "of that, queueing": "vllm:request_queue_time_seconds",
    "ITL": "vllm:inter_token_latency_seconds",
}


async def scrape() -> str:
    client = Client("/metrics")
    await client.begin()
    return b"".join([piece async for piece in client.body()]).decode()


samples = [sample for family in text_string_to_metric_families(run(scrape())) for sample in family.samples]
values = {sample.name: sample.value for sample in samples}
server = {what: (values[f"{name}_count"], values[f"{name}_sum"]) for what, name in names.items()}
for what, (count, total) in server.items():
    print(f"{what}: {count:.0f} values, {total:.2f} seconds in all")
print(f"as the clients have it: {sum(ttft):.2f} seconds to first tokens")

assert [count for count, _ in server.values()] == [3, 3, 3 * (NUM_TOKENS - 1)]
assert server["of that, queueing"][1] < server["TTFT"][1] < sum(ttft)

# %% [markdown]
# A client's TTFT is a little longer: it includes what lies between him and the engine, which is here some JSON and two
# hand-overs. If the two differ by much, it is not the engine that is slow.
#
# ## Closing time
#
# To stop a server is to drain it: take no more, let those in flight finish, abort what takes too long, and then end. So
# a service can be replaced by its next version with nobody cut off in the middle of a sentence.


# %%
async def close() -> tuple[list[int], int]:
    """The tokens of somebody who is being served when the server closes; the status for somebody who comes then."""
    client = Client("/v1/completions", **story, max_tokens=NUM_TOKENS)
    await client.begin()
    closing = asyncio.create_task(allm.shutdown(timeout=60))
    await asyncio.sleep(0)
    late = Client("/v1/completions", **ask)
    status = await late.begin()
    async for refusal in late.body():
        print(json.loads(refusal)["error"]["message"])
    token_ids = [token async for event in client.events() for token in event["token_ids"]]
    await closing
    return token_ids, status


token_ids, status = run(close())
print(f"who was there got {len(token_ids)} tokens; who came was told {status}")
assert (len(token_ids), status) == (NUM_TOKENS, 503)
assert allm.llm.engine.blocks.num_used == 0

# %% [markdown]
# ## How many can it serve?
#
# "TTFT is 200 ms" means nothing without the load under which it was measured. There are two ways to make a load.
#
# - A **closed loop**: so many users, each of whom asks again when he has his answer.
# - An **open loop**: requests come when they come, so many a second on average, whatever has become of the others. (At
#   random and independently, which is a Poisson process: so the paper's experiments are made.)
#
# And there is a figure that says in one what a service can promise: **goodput**, the requests a second that meet all
# their objectives. Here these are: the first token within a second, and then 100 ms a token at most. A request that
# misses one has cost as much as the others, and counts nothing. A server that gives each of twice as many people half
# of the speed may have the same throughput, and no goodput at all.
#
# This takes many requests, so the machine is the simulated one of the paper's size: the engine is real, time is not.
# Each request has a prompt of 128 tokens, and 64 are generated.
#
# **Predict.** In a closed loop the number of users doubles: 20, 40, 80, 160. In an open loop the rate does: 3.5, 7, 14,
# 28 a second. The machine can serve some 15 requests a second. What becomes of the median TTFT, when there are more?
#
# - in both loops it grows for as long as requests come
# - in the closed loop it stays as it is, in the open one it grows for as long as requests come
# - in the closed loop it grows up to what so many users make it, in the open one for as long as requests come
#
# <details><summary>See</summary>
#
# **in the closed loop it grows up to what so many users make it, in the open one for as long as requests come**
# (`closed[80][0] < 1 < closed[160][0] and half[0] < 0.6 * opened[28][0]`). A user of the closed loop who waits asks for
# nothing meanwhile.
#
# </details>

# %%
from collections import deque
from math import inf
from random import Random

from minipaged.simulation.traces import TraceReplay


def serve(arrivals: list[float], again: int = 0, max_waiting: float = inf) -> tuple[list[tuple[float, float]], float]:
    """TTFT and TPOT of each request that was served, and how many seconds it took in all.

    `arrivals`: when requests come. `again`: so many more come, one whenever another has ended.
    """
    machine = TraceReplay([])  # for its engine, and the clock
    engine, runner = machine.engine, machine.runner
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    coming = deque(arrivals)
    arrived: dict[str, float] = {}
    served = []
    while coming or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            runner.now = max(runner.now, coming[0])
        while coming and coming[0] <= runner.now:
            arrival = coming.popleft()
            if len(engine.scheduler.waiting) < max_waiting:  # else: 503
                arrived[engine.add_request(range(128), params)] = arrival
        for output in (update.output for update in engine.step() if update.output):
            first, last = output.metrics.first_token_time, output.metrics.finished_time
            served.append((first - arrived[output.request_id], (last - first) / (64 - 1)))
            if again:
                again -= 1
                coming.append(runner.now)
    return served, runner.now


def poisson(rate: float, num_requests: int = 400) -> list[float]:
    """The arrivals of an open loop, `rate` a second on average."""
    random, now, arrivals = Random(0), 0.0, []
    for _ in range(num_requests):
        now += random.expovariate(rate)
        arrivals.append(now)
    return arrivals


def tell(what: str, served: list[tuple[float, float]], seconds: float) -> tuple[float, float]:
    """The median TTFT, and the goodput."""
    median = sorted(ttft for ttft, _ in served)[len(served) // 2]
    goodput = sum(ttft <= 1 and tpot <= 0.1 for ttft, tpot in served) / seconds
    print(f"{what:>16}: {len(served) / seconds:4.1f} served/s, median TTFT {median:4.2f} s, goodput {goodput:4.1f}/s")
    return median, goodput


closed = {users: tell(f"{users} users", *serve([0.0] * users, again=400 - users)) for users in (20, 40, 80, 160)}
opened = {rate: tell(f"{rate} a second", *serve(poisson(rate))) for rate in (3.5, 7, 14, 28)}
half = tell("28, half as long", *serve(poisson(28, num_requests=200)))

assert closed[80][0] < 0.5 < 1 < closed[160][0]
assert opened[14][0] < 0.2 < 1 < opened[28][0]
assert opened[28][1] < opened[14][1] / 2
assert half[0] < 0.6 * opened[28][0]

# %% [markdown]
# Up to the *knee*, at some 15 a second, waiting is short, and what is served is served in time. Beyond it the server
# still serves as many, and few of them in time: everybody waits first, in a queue that others have made.
#
# The two loops differ beyond the knee. Users of a closed loop hold back when the server is slow. No more than 160 can
# ever wait, so TTFT is what 160 users make it. In the open loop nobody holds back, and the queue grows as long as one
# measures: half the requests, not half the TTFT. Such a figure tells of the measurement, not of the server. The people
# who use a service do not know of each other, so they are an open loop, and a test with a few users who take turns will
# never show what happens to a service when there are more of them than it can serve.
#
# `python -m benchmarks.serve` puts such a load on any server with OpenAI's interface, and finds the knee
# ([measuring a server](../docs/measuring.md)).
#
# ## A form is a machine
#
# Programs ask a server, too, and a program wants an answer that it can read: one word of a list, or a JSON object. The
# API calls this *structured output*. A model that is asked for JSON often writes something else. So the engine forbids
# every token that would break the form.
#
# A form is a *state machine*. It reads the output one character at a time, and each state says which characters may
# come next. This one reads objects such as `{"age":42,"size":7}`, without spaces:

# %%
import string

import numpy as np

END = ""  # the end token, which stands for no text
OBJECT = [  # for each state: the characters that may come, and the state after each
    {"{": 1},
    {'"': 2},
    dict.fromkeys(string.ascii_lowercase, 3),  # a name begins
    dict.fromkeys(string.ascii_lowercase, 3) | {'"': 4},
    {":": 5},
    dict.fromkeys("123456789", 6),  # a number begins
    dict.fromkeys(string.digits, 6) | {",": 1, "}": 7},
    {},  # the object is complete
]


def step_on(form: list[dict[str, int]], state: int, text: str) -> int | None:
    """The state after the text; None if the form does not allow it."""
    for character in text:
        if character not in form[state]:
            return None
        state = form[state][character]
    return state


def mask_of(form: list[dict[str, int]], state: int, tokens: list[str]) -> np.ndarray:
    """Whether each token may come next [tokens]. The end may come where nothing else can."""
    return np.array([step_on(form, state, token) is not None if token else not form[state] for token in tokens])


# %% [markdown]
# A model chooses tokens, and most tokens have several characters. A token is allowed if the machine can read all of its
# characters, one after another. The answers for all tokens of the vocabulary are the *mask*: one bit for each token.
#
# **Predict.** The machine has read `{"age`. Which of the four tokens `"`, `":`, `":7` and `":}` may come next?
#
# - only the first: the next character is a quotation mark
# - the first three
# - all four: each begins with a quotation mark
#
# <details><summary>See</summary>
#
# **the first three** (`may_come == [True, True, True, False]`). A number has to follow the colon, so the machine stops
# in the middle of the last token.
#
# </details>

# %%
may_come = mask_of(OBJECT, step_on(OBJECT, 0, '{"age'), ['"', '":', '":7', '":}']).tolist()
print(may_come)
assert may_come == [True, True, True, False]

# %% [markdown]
# Now the machine steps with the tokens. Before each token it gives the mask. The logit of each token whose bit is 0
# becomes minus infinity, and the likeliest of the others is chosen. Then the machine reads the chosen token. The logits
# here are random numbers: this "model" knows nothing of JSON, and its output is JSON all the same. Each column is a
# step, and shows the state, the mask and the choice:

# %%
from minipaged.stepper.pictures import Cells

TOKENS = ["{", '{"', "age", "size", '"', '":', '":7', '":}', ":", "42", ',"', "}", "Sure", END]
random = np.random.default_rng(195)  # a seed that gives a short output with both names
state, text, choice = 0, "", None
states, columns = [], []
while choice != END:
    mask = mask_of(OBJECT, state, TOKENS)
    choice = TOKENS[np.argmax(np.where(mask, random.standard_normal(len(TOKENS)), -np.inf))]
    states.append((str(state), "cannot come"))
    columns.append(["may come" if bit else "cannot come" for bit in mask])
    columns[-1][TOKENS.index(choice)] = "chosen"
    text, state = text + choice, step_on(OBJECT, state, choice)

print(text)
assert all(isinstance(value, int) for value in json.loads(text).values())

names = [token or "end" for token in TOKENS]
rows = [(name, [("", kind) for kind in row]) for name, row in zip(names, zip(*columns, strict=True), strict=True)]
Cells([("state", states), *rows], {"chosen": "full", "may come": "dots", "cannot come": "empty"})

# %% [markdown]
# "Sure" is never allowed, and the end only when the object is complete.
#
# **Predict.** SmolLM2 has 49,152 tokens. The output must be "yes" or "no". How many tokens does the first mask allow?
#
# <details><summary>See</summary>
#
# **5 tokens** (`len(first)`, give or take 3). They are the beginnings of both words: a model may write "yes" in one
# token, or in several.
#
# </details>

# %%
from minipaged import StructuredOutputsParams

YES_OR_NO = [{"y": 1, "n": 3}, {"e": 2}, {"s": 4}, {"o": 4}, {}]
vocabulary = [llm.tokenizer.token_bytes(token).decode("latin-1") for token in range(llm.model_config.vocab_size)]
mask = mask_of(YES_OR_NO, 0, vocabulary)
first = [vocabulary[token] for token in np.flatnonzero(mask)]
print(f"{len(first)} of {len(mask):,} tokens: {first}; the mask has {np.packbits(mask).nbytes:,} bytes")

yes_or_no = StructuredOutputsParams(choice=["yes", "no"])
bits = llm.grammars.compile(yes_or_no).begin(llm.model_config.eos_token_ids).bits
assert np.packbits(mask, bitorder="little").tobytes() == bits  # the engine's first mask is the same

# %% [markdown]
# Five tokens are left of 49,152, and the mask of the engine has the same bits. (Where only one text is left, the engine
# allows fewer tokens: those in which the tokenizer writes this text, and no other split of it.)
#
# In the engine a library (llguidance) makes the machine. It computes a mask in about 40 microseconds, without a loop
# over all tokens. The rest is as above: each sequence has a state, a step carries the masks, and sampling applies them.
#
# **Predict.** A JSON schema says which object the output must be. The model would write one of more than 8 tokens. What
# comes with `max_tokens=8`?
#
# - a shorter object: the engine closes it in time
# - the beginning of an object
# - an error, and no text
#
# <details><summary>See</summary>
#
# **the beginning of an object** (`said[2].finish_reason == "length" and said[3].text.startswith(said[2].text)`). The
# mask knows nothing of `max_tokens`. The finish reason "length" says that the output was cut off.
#
# </details>

# %%
properties = {"city": {"type": "string"}, "country": {"type": "string"}}
city = StructuredOutputsParams(json={"type": "object", "properties": properties, "required": [*properties]})
question, fact = "Is Paris a city? Answer:", "Paris is in France. As JSON: "
asked = [(question, None, 8), (question, yes_or_no, 8), (fact, city, 8), (fact, city, 40)]

params = [SamplingParams(temperature=0, max_tokens=most, structured_outputs=form) for _, form, most in asked]
said = [output.outputs[0] for output in llm.generate([prompt for prompt, *_ in asked], params, use_tqdm=False)]
for one in said:
    print(f"{one.finish_reason:>6}: {one.text!r}")

assert [one.finish_reason for one in said[1:]] == ["stop", "length", "stop"]
assert said[0].text not in ("yes", "no")
assert said[1].text == "no"
assert json.loads(said[3].text).keys() == properties.keys()

# %% [markdown]
# Without a form, the model answers "Is Paris a city?" with a list. With the form it answers in one word, and the word
# is wrong. A mask decides how an answer looks, not whether it is true.
#
# **Why the next step has to wait.** Look at the columns above: each mask depends on the token that was chosen in the
# column before. With *asynchronous scheduling* an engine launches step k+1 before it knows the tokens of step k. They
# stay on the device, where step k+1 reads them. But the machine runs on the host. It can give no mask for step k+1
# before the token of step k has been fetched. So as long as a request with a form runs, each step is launched after
# the one before has ended, and the device is idle in between. The requests without a form in the same batch wait, too.
#
# Blocks are not concerned. A state depends on the tokens of the output alone: a preempted sequence keeps its state, a
# prefix found in the cache changes no mask, and a fork copies the state
# ([structured output](../docs/concepts/structured.md)).
#
# ## Exercises
#
# 1. 28 requests a second come, and the machine can serve half of them. Save the goodput with a limit to the queue:
#    what is it with 64, 16 and 4 who may wait, and what is the price?

# %% tags=["solution"]
limited = {most: serve(poisson(28), max_waiting=most) for most in (64, 16, 4)}
goodputs = {most: tell(f"{most} may wait", *served)[1] for most, served in limited.items()}
for most, (served, _) in limited.items():
    print(f"{most} may wait: {400 - len(served)} of 400 are told to ask again later")

assert goodputs[16] > 2 * opened[28][1]
assert goodputs[16] > 0.9 * opened[14][1]
# The price is that many are refused, and that is no price: they would have been served too late, and made everybody
# behind them late. Who is refused at once can still ask another server.

# %% [markdown]
# 2. Backpressure reaches from the client's socket to the slot. Somebody reads the first event of an answer of 12 tokens
#    and then nothing, until the engine has done its part. How many events does he find then? (`Client.is_told` has room
#    for one message.) Write it. The server was closed above, so it takes another.


# %% tags=["solution"]
async def read_late() -> list[str]:
    """The text of each event."""
    client = Client("/v1/completions", **story, max_tokens=12)
    await client.begin()
    events = client.events()
    texts = [(await anext(events))["text"]]
    while allm.num_open:
        await asyncio.sleep(0.01)
    return texts + [event["text"] async for event in events]


allm = AsyncLLM(llm.loaded, block_size=4, num_blocks=64)
app = create_app(LocalModel(allm, ["smollm2"]))
texts = run(read_late())
run(allm.shutdown())
print(texts)
assert len(texts) <= 4
assert "".join(texts) == ", the city of Nova Haven was a thriving metropolis, with"
# The one that he read; one that was under way (in the queue); one that the server was just about to send, when `send`
# made it wait. All that came later is one event.

# %% [markdown]
# 3. The machine `OBJECT` has 8 states, so all of its masks can be computed before the first request comes. Do it for
#    SmolLM2's vocabulary. How many bytes are they? Why can this not be done for every JSON schema?

# %% tags=["solution"]
masks = np.array([mask_of(OBJECT, state, vocabulary) for state in range(len(OBJECT))])  # [states, tokens]
table = np.packbits(masks, axis=1)
print(f"{table.nbytes:,} bytes; allowed in each state: {masks.sum(axis=1).tolist()}")

assert table.nbytes == len(OBJECT) * 6_144
# JSON nests: a reader has to remember which brackets are open, and there is no limit to their number. So there is no
# limit to the states, and a library computes the mask of a state when it is reached.
