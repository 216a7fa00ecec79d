"""`python -m benchmarks.routing [--trace FILE] [--plot FILE.svg]`: who gets a request, of four replicas.

Each replica is a real engine with a real prefix cache on a simulated machine (`minipaged/simulation/simulated.py`);
all run on one clock. The routers are those of `minipaged/replicas/routing.py`. `PrefixAware` is told once a simulated
second what replicas publish, by the code that they publish it with (`CacheNews`, with its bound), and all routers are
given how many requests are outstanding now. Nothing is measured by a wall clock and nothing is drawn without a seed:
the same command gives the same figures.

Two workloads:

- `hot prefixes`, made here: system prompts of 512 to 4,096 tokens, of which the n-th is asked for 1/n as often as the
  first, and every fifth request without one;
- `--trace`: a trace with the hashes of its prompts, as those of Mooncake (github.com/kvcache-ai/Mooncake, FAST25): JSON
  lines with `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one for each 512 tokens. Its first
  `--requests` are served.

A load is the prompt tokens that would have to be computed in a second if all that came before were in one cache without
bounds, as a share of those that the four machines can compute in one second if nobody decodes. So at 1 the machines
could not keep up with the best of routers. A workload comes as much faster or slower as that takes.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minipaged.engine.engine import Engine
from minipaged.outputs import RequestUpdate
from minipaged.params import EngineConfig, RequestOutputKind, SamplingParams
from minipaged.replicas.routing import CacheNews, LeastLoaded, PrefixAware, RoundRobin, Router
from minipaged.simulation.simulated import Machine, SimulatedRunner, simulated_tier

REPLICAS = 4
BLOCK_SIZE = 128
HASHED_TOKENS = 512
"""So many tokens of a trace's prompts have one hash."""
LOADS = (0.4, 0.6, 0.8)
SECONDS_BETWEEN_NEWS = 1.0
BALANCED = 1.5
"""No replica is to have more than so many times the mean load."""

LLAMA_70B_ON_8_A100 = Machine(
    name="Llama-3.1-70B on 8 A100 of 80 GB",
    weight_bytes=141e9,  # 70.6 billion parameters in 16 bits
    kv_bytes_per_token=2 * 80 * 8 * 128 * 2,  # K and V, layers, KV heads, head dimension, bytes
    kv_memory_bytes=400 * 10**9,  # assumed: what weights and activations leave of nine tenths
    max_model_len=131072,
    flops_per_token=141e9,
    weight_bytes_per_second=8 * 0.7 * 2.039e12,  # assumed: the share of the data sheet's that LLaMA-13B's kernels reach
    kv_bytes_per_second=8 * 0.7 * 2.039e12,  # assumed: the same
    flops_per_second=8 * 0.5 * 312e12,  # assumed: half of the data sheet's, which leaves nothing for communication
    link_bytes_per_second=8 * 12e9,  # assumed, and of no effect: nothing is swapped here
    seconds_per_copy=2e-6,
    copies_per_block=2 * 80,
    seconds_per_step=5e-3,  # assumed
    seconds_per_row=0.06e-3,  # assumed: what DistServe (OSDI 2024) measured of OPT-13B in vLLM
)
"""Of the size that the Mooncake trace was served with."""

ROUTERS: dict[str, Callable[[], Router]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "prefix-aware": lambda: PrefixAware(BLOCK_SIZE),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a workload."""

    seconds: float
    """When it arrives, at the workload's own pace."""
    prompt: tuple[tuple[int, int], ...]
    """(token, how often): a text of its own is a token of its own."""
    num_output_tokens: int

    def token_ids(self) -> list[int]:
        return [token for token, times in self.prompt for _ in range(times)]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to. Seconds are simulated."""

    hit_rate: float
    """Of the prompt tokens that were looked up, those that were found."""
    ttft_p50: float
    ttft_p95: float
    output_tokens_per_second: float
    most_requests: float
    """Of the replica that was sent the most, over the mean."""
    most_outstanding: float
    """Requests outstanding, on average over time, of the replica that had the most, over the mean."""
    mean_outstanding: float
    """Of one replica."""


# --- Workloads --------------------------------------------------------------------------------------


def read_hashed(path: Path, most: int) -> list[Asked]:
    """The first requests of a trace. Token 0 is what the simulation generates, so a hash stands for the token after."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        found = [json.loads(line) for line, _ in zip(lines, range(most), strict=False)]
    return [
        Asked(each["timestamp"] / 1000, _hashed_prompt(each["hash_ids"], each["input_length"]), each["output_length"])
        for each in found
    ]


def _hashed_prompt(hashes: Sequence[int], num_tokens: int) -> tuple[tuple[int, int], ...]:
    lengths = (min(HASHED_TOKENS, num_tokens - start) for start in range(0, num_tokens, HASHED_TOKENS))
    return tuple((one + 1, length) for one, length in zip(hashes, lengths, strict=True))


def hot_prefixes(num_requests: int, *, num_prefixes: int = 24, without: float = 0.2, seed: int = 0) -> list[Asked]:
    """System prompts, the n-th 1/n as often as the first (Zipf), each followed by a text of the request's own."""
    rng = random.Random(seed)
    lengths = [rng.randrange(512, 4097, 128) for _ in range(num_prefixes)]
    chances = [1 / (n + 1) for n in range(num_prefixes)]
    found, now = [], 0.0
    for i in range(num_requests):
        own = (1 + num_prefixes + i, rng.randint(64, 1024))
        [prefix] = rng.choices(range(num_prefixes), chances)
        prompt = (own,) if rng.random() < without else ((1 + prefix, lengths[prefix]), own)
        found.append(Asked(now, prompt, rng.randint(32, 256)))
        now += rng.expovariate(1.0)
    return found


def pace_for(load: float, requests: Sequence[Asked], machine: Machine) -> float:
    """How many seconds of the workload have to pass in a simulated one."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    to_compute = 0
    for prompt in (request.prompt for request in requests):
        for end in range(len(prompt), 0, -1):
            if prompt[:end] in seen:
                break
            seen.add(prompt[:end])
            to_compute += prompt[end - 1][1]
    offered = to_compute / max(requests[-1].seconds, 1e-9)
    return load * REPLICAS * machine.flops_per_second / machine.flops_per_token / offered


# --- Four replicas on one clock ---------------------------------------------------------------------


class Replica:
    """An engine that does one step after the other as long as there is anything to do."""

    def __init__(self, name: str, machine: Machine, vocab_size: int) -> None:
        self.name = name
        self.runner = SimulatedRunner(machine, BLOCK_SIZE)
        self.news = CacheNews()
        config = EngineConfig(
            num_blocks=machine.num_blocks(BLOCK_SIZE),
            max_model_len=machine.max_model_len,
            vocab_size=vocab_size,
            block_size=BLOCK_SIZE,
            preemption="recompute",
        )
        self.engine = Engine(config, simulated_tier(), self.runner, listeners=[self.news], clock=self.runner.clock)
        self.inbox: list[tuple[str, list[int], int]] = []
        """Sent while a step runs: they are taken between two steps, as a server does."""
        self.told: list[RequestUpdate] = []
        """What the step that runs will have told when it ends."""
        self.runs = False
        self.published = 0.0

    def start_step(self, now: float) -> bool:
        """Begin one, if there is anything to do; it ends at `runner.now`."""
        self.runner.now = max(self.runner.now, now)
        for request_id, token_ids, num_output_tokens in self.inbox:
            params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
            self.engine.add_request(token_ids, params, request_id=request_id, output_kind=RequestOutputKind.FINAL_ONLY)
        self.inbox.clear()
        self.runs = self.engine.has_unfinished_requests()
        if self.runs:
            self.told = self.engine.step()
        return self.runs


@dataclass
class Fleet:
    """Replicas behind a router: events in order of time, the end of a step before an arrival at the same moment."""

    router: Router
    machine: Machine
    vocab_size: int
    replicas: dict[str, Replica] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    outstanding_seconds: Counter[str] = field(default_factory=Counter)
    """Summed over the requests of a replica: its load over time."""
    ttft: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        for name in (f"replica-{i}" for i in range(REPLICAS)):
            self.replicas[name] = Replica(name, self.machine, self.vocab_size)
            self.loads[name] = 0
            self.router.added(name)
        self._ends: list[tuple[float, str]] = []  # when each replica's step ends

    def serve(self, requests: Iterable[Asked], pace: float) -> None:
        for i, request in enumerate(requests):
            at = request.seconds / pace
            self._run_until(at)
            self.now = at
            self._send(str(i), request)
        self._run_until(math.inf)

    def _send(self, request_id: str, request: Asked) -> None:
        token_ids = request.token_ids()
        name = self.router.choose(token_ids, self.loads)
        self.loads[name] += 1
        self.sent[name] += 1
        self.arrived[request_id] = self.now
        replica = self.replicas[name]
        replica.inbox.append((request_id, token_ids, request.num_output_tokens))
        if not replica.runs:
            self._start_step(replica)

    def _run_until(self, at: float) -> None:
        while self._ends and self._ends[0][0] <= at:
            self.now, name = heapq.heappop(self._ends)
            replica = self.replicas[name]
            for output in (update.output for update in replica.told if update.output):
                arrived = self.arrived.pop(output.request_id)
                assert output.metrics.first_token_time is not None
                self.ttft.append(output.metrics.first_token_time - arrived)
                self.outstanding_seconds[name] += self.now - arrived
                self.num_output_tokens += len(output.outputs[0].token_ids)
                self.loads[name] -= 1
            if isinstance(self.router, PrefixAware) and self.now - replica.published >= SECONDS_BETWEEN_NEWS:
                replica.published = self.now
                self.router.told(name, *replica.news.latest())
            self._start_step(replica)

    def _start_step(self, replica: Replica) -> None:
        if replica.start_step(self.now):
            heapq.heappush(self._ends, (replica.runner.now, replica.name))

    def figures(self) -> Figures:
        stats = [replica.engine.stats for replica in self.replicas.values()]
        looked_up = sum(each.prefix_cache_query_tokens for each in stats)
        outstanding = [self.outstanding_seconds[name] / self.now for name in self.replicas]
        ordered = sorted(self.ttft)
        return Figures(
            hit_rate=sum(each.prefix_cache_hit_tokens for each in stats) / looked_up,
            ttft_p50=ordered[math.ceil(len(ordered) * 0.5) - 1],
            ttft_p95=ordered[math.ceil(len(ordered) * 0.95) - 1],
            output_tokens_per_second=self.num_output_tokens / self.now,
            most_requests=max(self.sent.values()) * REPLICAS / self.sent.total(),
            most_outstanding=max(outstanding) * REPLICAS / sum(outstanding),
            mean_outstanding=sum(outstanding) / REPLICAS,
        )


def simulate(requests: Sequence[Asked], router: Router, load: float, machine: Machine = LLAMA_70B_ON_8_A100) -> Figures:
    """Serve all of them."""
    vocab_size = 1 + max(token for request in requests for token, _ in request.prompt)
    fleet = Fleet(router, machine, vocab_size)
    fleet.serve(requests, pace_for(load, requests, machine))
    assert not any(fleet.loads.values())
    return fleet.figures()


# --- Telling ----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="serve this trace too: JSON lines, .gz or not")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="of each workload (1000)")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, metavar="SHARE", help="to be served under")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it there: .svg or .png (needs matplotlib)")
    given = parser.parse_args()
    workloads = {"hot prefixes": hot_prefixes(given.requests)}
    if given.trace:
        workloads[given.trace.name.partition(".")[0]] = read_hashed(given.trace, given.requests)
    found: dict[str, dict[str, list[Figures]]] = {}
    for workload, requests in workloads.items():
        print(f"\n{workload}: {len(requests)} requests\n")
        print(
            "| load | router | hit rate | TTFT p50 | p95 | output tokens/s | outstanding | most requests | most load |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for load in given.loads:
            for name, make in ROUTERS.items():
                figures = simulate(requests, make(), load)
                found.setdefault(workload, {}).setdefault(name, []).append(figures)
                print(_row(load, name, figures), flush=True)
    if given.plot:
        draw(found, given.loads, given.plot)


def _row(load: float, name: str, figures: Figures) -> str:
    cells = (
        f"{load:g}",
        name,
        f"{figures.hit_rate:.1%}",
        f"{figures.ttft_p50:.2f} s",
        f"{figures.ttft_p95:.2f} s",
        f"{figures.output_tokens_per_second:.0f}",
        f"{figures.mean_outstanding:.1f}",
        f"{figures.most_requests:.2f}",
        f"{figures.most_outstanding:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def draw(found: dict[str, dict[str, list[Figures]]], loads: Sequence[float], file: Path) -> None:
    """A row of panels for each workload, a line for each router over the loads; dashed: the 95th percentile."""
    import matplotlib
    from matplotlib.figure import Figure

    picture = Figure(figsize=(13, 3.4 * len(found)), layout="constrained")
    rows: Any = picture.subplots(len(found), 4, squeeze=False)
    for axes, (workload, routers) in zip(rows, found.items(), strict=True):
        hits, times, speed, balance = axes
        for color, (name, figures) in enumerate(routers.items()):
            line: dict[str, Any] = {"color": f"C{color}", "label": name}
            hits.plot(loads, [100 * each.hit_rate for each in figures], "o-", **line)
            times.plot(loads, [each.ttft_p50 for each in figures], "o-", **line)
            times.plot(loads, [each.ttft_p95 for each in figures], "s--", color=f"C{color}")
            speed.plot(loads, [each.output_tokens_per_second for each in figures], "o-", **line)
            balance.plot(loads, [each.most_outstanding for each in figures], "o-", **line)
        balance.axhline(BALANCED, color="gray", linestyle=":")
        hits.set(title=f"{workload}: hit rate, %", ylim=(0, 100))
        times.set(title="TTFT, s (dashed: p95)", yscale="log")
        speed.set(title="output tokens a second", ylim=(0, None))
        balance.set(title="largest load ÷ mean", ylim=(0.9, None))
        for axis in axes:
            axis.set(xlabel="load", xticks=list(loads))
            axis.grid(alpha=0.3)
        hits.legend()
    with matplotlib.rc_context({"svg.hashsalt": "routing", "svg.fonttype": "none"}):
        picture.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
