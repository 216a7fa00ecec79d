"""What is asked of a server, and when: lengths, arrivals and prompts, all from one seed."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

from benchmarks.serve.client import RequestFailed, Server, ask
from minipaged.simulation.traces import MOST_TOKENS, TraceRequest

Lengths = Callable[[random.Random], int]
"""Draws a number of tokens."""
# fmt: off
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room",
    "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word",
    "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game",
    "line", "end", "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea",
    "body", "information", "back", "parent", "face", "others", "level", "office", "door", "health", "person",
    "art", "war", "history", "party", "result", "change", "morning", "reason", "research", "girl", "guy",
    "moment", "air", "teacher", "force", "education",
)
# fmt: on
"""Common enough to be one token each, with the space before it, in about every vocabulary in use."""
FITTINGS = 4
"""How often a prompt is counted by /tokenize and changed, at most."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it is to be sent, and how long prompt and output are to be, in tokens."""

    seconds: float
    """From the beginning of the run."""
    prompt_tokens: int
    output_tokens: int
    prompt: str = ""


# --- Lengths --------------------------------------------------------------------------------------


def parse_lengths(text: str) -> Lengths:
    """`128`: always; `16-256`: each number between is as likely; `median=200,p95=1000`: half are longer than 200 and
    one in twenty is longer than 1000 (lognormal, as lengths in real services are). Raises ValueError."""
    if "=" in text:
        return _lognormal(text)
    ends = text.split("-")
    if len(ends) > 2 or not all(end.isascii() and end.isdigit() and 1 <= int(end) <= MOST_TOKENS for end in ends):
        raise ValueError(
            f"{text!r} is no number of tokens; give 128 (always), 16-256 (any between), "
            "or median=200,p95=1000 (half are longer than 200, one in twenty longer than 1000)"
        )
    low, high = int(ends[0]), int(ends[-1])
    if low > high:
        raise ValueError(f"{text!r}: the smaller number comes first")
    return lambda rng: rng.randint(low, high)


def _lognormal(text: str) -> Lengths:
    given = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    try:
        median, p95 = float(given.pop("median")), float(given.pop("p95"))
    except (KeyError, ValueError):
        raise ValueError(f"{text!r}: both are needed, as in median=200,p95=1000") from None
    if given or not 1 <= median < p95 <= MOST_TOKENS:
        raise ValueError(f"{text!r}: it must be median=M,p95=P with 1 <= M < P")
    mu, sigma = math.log(median), math.log(p95 / median) / NormalDist().inv_cdf(0.95)
    return lambda rng: min(MOST_TOKENS, max(1, round(rng.lognormvariate(mu, sigma))))


# --- Arrivals -------------------------------------------------------------------------------------


def poisson(
    rate: float, prompt: Lengths, output: Lengths, *, seed: int, requests: int | None, seconds: float | None
) -> list[Request]:
    """`requests` requests, or those of `seconds`, that come independently of each other, `rate` a second on average.

    The first comes at once. `rate` inf: all of them do. The same seed gives the same lengths at every rate, and the
    same arrivals but for their scale.
    """
    gaps, lengths = random.Random(f"{seed} arrivals"), random.Random(f"{seed} lengths")
    found: list[Request] = []
    now = 0.0
    while (len(found) < requests) if requests is not None else (now < (seconds or 0)):
        found.append(Request(now, prompt(lengths), output(lengths)))
        now += gaps.expovariate(1.0) / rate
    return found


def from_trace(trace: list[TraceRequest], *, rate: float | None, pace: float, seed: int) -> list[Request]:
    """The lengths of a trace, at its own times (`pace` times as fast), or as Poisson arrivals at `rate`."""
    if rate is None:
        return [Request(r.seconds / pace, r.context_tokens, r.generated_tokens) for r in trace]
    gaps = random.Random(f"{seed} arrivals")
    times = itertools.accumulate((gaps.expovariate(1.0) / rate for _ in trace[1:]), initial=0.0)
    return [Request(now, r.context_tokens, r.generated_tokens) for now, r in zip(times, trace, strict=True)]


# --- Prompts --------------------------------------------------------------------------------------


class PromptWriter:
    """Prompts of random words with a wanted number of tokens, as the server counts them.

    `/tokenize` is asked where the server has it, for the prompt as it will be sent (a chat's template counts too).
    Where it has none, a prompt has a word for each token, and the counts that come back with the answers tell how near
    it is.
    """

    def __init__(self, server: Server, model: str, *, chat: bool, timeout: float) -> None:
        self._server, self._model, self._chat, self._timeout = server, model, chat, timeout
        self.counts = True
        """Whether the server has /tokenize, as far as is known."""
        self.furthest = 0
        """From the wanted number of tokens: the largest difference so far."""
        self._more = 0
        """Tokens beside one for each word, in the prompt before."""

    def __str__(self) -> str:
        if self.counts:
            return f"counted by /tokenize, at most {self.furthest} tokens beside what was asked for"
        return "one word for each token, not counted: the server has no /tokenize"

    async def write(self, requests: list[Request], seed: str) -> list[Request]:
        """The same requests with their prompts. Another seed gives other prompts from the first word on, so that none
        is found in a prefix cache."""
        found = []
        for place, request in enumerate(requests):
            prompt = await self._write_one(request.prompt_tokens, random.Random(f"{seed} {place}"))
            found.append(replace(request, prompt=prompt))
        return found

    async def _write_one(self, wanted: int, rng: random.Random) -> str:
        words = [rng.choice(WORDS) for _ in range(max(1, wanted - self._more))]
        if not self.counts:
            return " ".join(words)
        for _ in range(FITTINGS):
            count = await self._count(" ".join(words))
            if count is None or count == wanted or (count > wanted and len(words) == 1):
                break
            self._more = max(0, count - len(words))
            words = words[: max(1, len(words) + wanted - count)]
            words += [rng.choice(WORDS) for _ in range(wanted - count)]
        else:
            count = await self._count(" ".join(words))
        if count is not None:
            self.furthest = max(self.furthest, abs(count - wanted))
        return " ".join(words)

    async def _count(self, prompt: str) -> int | None:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        body = json.dumps({"model": self._model, **asked}).encode()
        try:
            answer = json.loads(await ask(self._server, "POST", "/tokenize", body, timeout=self._timeout))
            return int(answer["count"])
        except (RequestFailed, ValueError, KeyError, TypeError):
            self.counts = False
            return None
