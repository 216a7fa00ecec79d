"""Several engines behind a router: the hit rates of their prefix caches, and the times to first token.

The routers are those of `minipaged serve --replicas` (`replicas/routing.py`). As there, they receive the changes of
each cache once per second. Each replica is an engine on a simulated machine with its own clock. Events are processed in
order of time: the busy engine with the earliest clock runs the next step, unless a request arrives or is answered
before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from minipaged.engine.engine import Engine
from minipaged.paper.figure import Check, Figure, FigureResult, Job, Line, Plot
from minipaged.paper.machines import machine
from minipaged.paper.serving import BATCH_TOKENS, VOCABULARY
from minipaged.paper.workloads import MAX_MODEL_LEN, Round, conversations
from minipaged.params import EngineConfig, RequestOutputKind, SamplingParams
from minipaged.replicas.routing import CacheNews, LeastLoaded, PrefixAware, RoundRobin, Router
from minipaged.simulation.simulated import TOKEN, SimulatedRunner, simulated_tier
from minipaged.simulation.traces import Percentiles

BLOCK_SIZE = 16
NEWS_SECONDS = 1.0
"""Seconds between two reports of the replicas' caches to the router (the same interval as Ray's)."""
ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "prefix-aware": partial(PrefixAware, BLOCK_SIZE),
}
QUICK_SECONDS, SECONDS = 60.0, 600.0


@dataclass(frozen=True, slots=True)
class Routed:
    """The result of serving conversations on several replicas."""

    requests: int
    hit_rate: float
    """The share of prompt tokens found in the prefix cache when a request was first admitted."""
    most: float
    """The hit rate if nothing were evicted and all rounds of a conversation went to one replica."""
    first_token: Percentiles
    latency: Percentiles


class Talk:
    """A conversation in progress."""

    def __init__(self, number: int, rounds: Sequence[Round]) -> None:
        self._coming = deque(rounds)
        self._word = TOKEN + 1 + number  # repeated in every message, so that no two conversations share a block
        self.prompt: list[int] = []
        self.history_tokens = 0
        """Tokens of the prompt that belong to earlier rounds."""
        self.round: Round

    def next(self) -> bool:
        """Advance to the next round, and return whether there is one. Its prompt includes the previous answer."""
        if not self._coming:
            return False
        if self.prompt:
            self.prompt += [TOKEN] * self.round.answer_tokens
        self.round, self.history_tokens = self._coming.popleft(), len(self.prompt)
        self.prompt += [self._word] * self.round.said_tokens
        return True


class SimulatedReplica:
    """An engine with a prefix cache, on its own simulated machine and clock."""

    def __init__(self, model: str) -> None:
        self.runner, self.news = SimulatedRunner(machine(model), BLOCK_SIZE), CacheNews()
        config = EngineConfig(
            num_blocks=self.runner.machine.num_blocks(BLOCK_SIZE),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY,
            block_size=BLOCK_SIZE,
            preemption="recompute",
            max_num_batched_tokens=BATCH_TOKENS,
        )
        self.engine = Engine(config, simulated_tier(), self.runner, listeners=[self.news], clock=self.runner.clock)
        self.asked: dict[str, tuple[Talk, float]] = {}
        """Request -> its conversation and its time of arrival."""
        self.load = 0
        """The number of unfinished requests."""

    def take(self, talk: Talk, seconds: float) -> None:
        self.runner.now = max(self.runner.now, seconds)
        params = SamplingParams(max_tokens=talk.round.answer_tokens, ignore_eos=True)
        name = self.engine.add_request(talk.prompt, params, output_kind=RequestOutputKind.FINAL_ONLY)
        self.asked[name] = talk, seconds
        self.load += 1

    def answered(self, seconds: float) -> None:
        self.load -= 1


class Fleet:
    """Replicas behind a router, with a queue of coming events."""

    def __init__(self, router: Router, num_replicas: int, model: str) -> None:
        self._router, self._told = router, 0.0
        self._replicas = {str(i): SimulatedReplica(model) for i in range(num_replicas)}
        for name in self._replicas:
            router.added(name)
        self._coming: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._prompt_tokens = self._found = self._known = 0
        self._first_token, self._latency = list[float](), list[float]()

    def run(self, talks: Iterable[Talk]) -> Routed:
        """Serve all conversations until they end."""
        for talk in talks:
            self._go_on(talk, 0.0)
        while True:
            busy = [replica for replica in self._replicas.values() if replica.engine.has_unfinished_requests()]
            behind = min(busy, key=lambda replica: replica.runner.now, default=None)
            if self._coming and (behind is None or self._coming[0][0] <= behind.runner.now):
                seconds, _, happens = heappop(self._coming)
                happens(seconds)
            elif behind is not None:
                self._step(behind)
            else:
                break
        return Routed(
            requests=len(self._latency),
            hit_rate=self._found / max(1, self._prompt_tokens),
            most=self._known / max(1, self._prompt_tokens),
            first_token=Percentiles.of(self._first_token),
            latency=Percentiles.of(self._latency),
        )

    def _at(self, seconds: float, happens: Callable[[float], None]) -> None:
        heappush(self._coming, (seconds, next(self._order), happens))

    def _go_on(self, talk: Talk, seconds: float) -> None:
        if talk.next():
            self._at(seconds + talk.round.pause, partial(self._ask, talk))

    def _ask(self, talk: Talk, seconds: float) -> None:
        if isinstance(self._router, PrefixAware) and seconds - self._told >= NEWS_SECONDS:
            self._told = seconds
            for name, replica in self._replicas.items():
                self._router.told(name, *replica.news.latest())
        loads = {name: replica.load for name, replica in self._replicas.items()}
        self._replicas[self._router.choose(talk.prompt, loads)].take(talk, seconds)

    def _step(self, replica: SimulatedReplica) -> None:
        for output in [update.output for update in replica.engine.step() if update.output]:
            (talk, came), metrics = replica.asked.pop(output.request_id), output.metrics
            assert metrics.first_token_time is not None
            self._prompt_tokens += len(talk.prompt)
            self._found += output.num_cached_tokens
            self._known += max(0, talk.history_tokens - 1)  # the last token of an answer was never run
            self._first_token.append(metrics.first_token_time - came)
            self._latency.append(metrics.finished_time - came)
            self._at(metrics.finished_time, replica.answered)
            self._go_on(talk, metrics.finished_time)


@dataclass(frozen=True, slots=True)
class RoutedChats:
    """A job that serves conversations on several replicas."""

    router: str
    """The router, a key of ROUTERS."""
    replicas: int
    rate: float
    """The number of conversations that begin per second and replica."""
    seconds: float
    """The time during which conversations begin."""
    seed: int
    model: str = "OPT-13B"

    def run(self) -> Routed:
        begun = conversations(self.rate * self.replicas, self.seconds, self.seed)
        fleet = Fleet(ROUTERS[self.router](), self.replicas, self.model)
        return fleet.run([Talk(number, rounds) for number, rounds in enumerate(begun)])


class Routing(Figure):
    """Hit rate and time to first token by the number of replicas."""

    name = "beyond/routing"
    title = "Replicas behind a router: chatbot, OPT-13B, as many users for each replica"
    section = "beyond"
    look = (
        "The number of users per replica is constant, so ideally nothing changes to the right. With round robin, a "
        "round of a conversation reaches the replica with its history only by chance. The prefix-aware router finds "
        "nearly as much as a single replica. Caches of 15,700 tokens are small: running requests take most of them, "
        "and half of what could be found has been evicted by then."
    )
    change_it = (
        "Begin 0.15 conversations per second (RATE): which improves more now, hits or seconds?",
        "Never report caches to the router (NEWS_SECONDS = 1e9): how good is its own record of what it sent where?",
        "Use `PrefixAware(BLOCK_SIZE, apart=0, ratio=1)`: what does it cost to put balance before everything else?",
    )
    RATE = 0.25
    REPLICAS = (1, 2, 4, 8)

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        seconds = QUICK_SECONDS if quick else SECONDS
        return [RoutedChats(router, num, self.RATE, seconds, seed) for router in ROUTERS for num in self.REPLICAS]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        of: dict[tuple[str, int], Any] = {}
        for job, result in results.items():
            assert isinstance(job, RoutedChats)
            of[job.router, job.replicas] = result

        def plot(title: str, unit: str, number: Callable[[Any], float]) -> Plot:
            lines = [Line(one, "ours", [(num, number(of[one, num])) for num in self.REPLICAS]) for one in ROUTERS]
            return Plot(title, "replicas", unit, lines, log_x=True)

        plots = [
            plot("found in a prefix cache", "of the prompts' tokens", lambda result: result["hit_rate"]),
            plot("time to first token, mean", "s", lambda result: result["first_token"]["mean"]),
            plot("time to first token, 99 %", "s", lambda result: result["first_token"]["p99"]),
            plot("latency, mean", "s", lambda result: result["latency"]["mean"]),
        ]
        last = self.REPLICAS[-1]
        numbers = [("one replica", of["round robin", 1])]
        numbers += [(f"{last} replicas, {router}", of[router, last]) for router in ROUTERS]
        checks = [Check(f"{what}: hit rate", None, result["hit_rate"], None) for what, result in numbers]
        checks += [Check("an endless cache: hit rate", None, of["round robin", last]["most"], None)]
        checks += [
            Check(f"{what}: mean TTFT", None, result["first_token"]["mean"], None, unit=" s")
            for what, result in numbers
        ]
        note = (
            "Each prompt contains all earlier messages and answers of its conversation. Conversations have "
            "ShareGPT's lengths, and continue 20 s after an answer on average. They end with a probability of one "
            "tenth after each round, or when the model's context is full (pauses and ends are assumed). Different "
            "conversations share nothing. The routers are those of `minipaged serve --replicas`. They receive the "
            "changes of the caches once per second."
        )
        return FigureResult(plots, checks, notes=[note])
