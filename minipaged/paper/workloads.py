"""The workloads of the paper's evaluation (section 6.1, Fig. 11): lengths of ShareGPT and Alpaca, Poisson arrivals.

Of the lengths the paper prints histograms, one of prompts and one of outputs. How the two pair is not known: here they
are drawn independently, as far as both together do not exceed the model's 2,048 tokens. Drawn from the same seed, a
longer trace begins as a shorter one does, and one of another rate has the same requests closer together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from minipaged.paper import published

TRANSLATION = {"input": (40, 0.6), "output": (35, 0.6)}
"""Assumed, of WMT16 English to German in LLaMA's tokens: mean, and standard deviation as a part of it; by a gamma
distribution. The paper does not say how long its sentences were."""
PREFIX = {"16a": 80, "16b": 341}
"""Tokens of the prefix that all requests of the panel share: an instruction and one, or five, examples."""
MAX_MODEL_LEN = 2048
"""Of OPT, in tokens."""
BLOCK = 4096
"""Requests that are drawn together, however many are wanted."""
CHAT_PROMPT = 1024
"""Section 6.4: of a conversation, the last so many tokens are the prompt; and so many are the longest answer."""
CHAT_ENDS = 0.1
"""Assumed: with this probability the next request begins a new conversation."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    seconds: float
    """When it arrives."""
    prompt_tokens: int
    """With what it shares with others."""
    output_tokens: int
    """Of each of its sequences: it generates so many, whatever it generates."""


@cache
def _lengths(dataset: str, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Every length that a histogram of Fig. 11 may hold, and the probability of each: even within a bin."""
    first, last, counts = published.histogram(dataset, side)
    edges = np.linspace(first, last, len(counts) + 1)  # [bins + 1]
    lengths = np.arange(int(first), int(last) + 1)  # [lengths]
    of_bin = np.minimum(np.searchsorted(edges, lengths, side="right") - 1, len(counts) - 1)  # [lengths]
    in_bin = np.bincount(of_bin, minlength=len(counts))  # [bins]
    weights = np.asarray(counts)[of_bin] / in_bin[of_bin]
    return lengths, weights / weights.sum()


def draw_lengths(dataset: str, num: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(prompt, output) of so many requests: of "ShareGPT" or "Alpaca" distributed as in Fig. 11; of "chat" rounds of
    conversations in ShareGPT's lengths; of "WMT16" by TRANSLATION.

    Pairs that are too long together are not dropped, or long prompts would be rarer than they were: they change their
    outputs with others.
    """
    if dataset == "chat":
        return _chat(draw_lengths("ShareGPT", num, rng), rng)
    found: list[tuple[int, int]] = []
    while len(found) < num:
        prompt, output = (_draw(dataset, side, BLOCK, rng) for side in ("input", "output"))  # [BLOCK] each
        for i in np.flatnonzero(prompt + output >= MAX_MODEL_LEN):
            while prompt[i] + output[i] >= MAX_MODEL_LEN:
                j = rng.integers(BLOCK)
                if prompt[i] + output[j] < MAX_MODEL_LEN and prompt[j] + output[i] < MAX_MODEL_LEN:
                    output[i], output[j] = output[j], output[i]
        found += zip(prompt.tolist(), output.tolist(), strict=True)
    return found[:num]


def _chat(rounds: list[tuple[int, int]], rng: np.random.Generator) -> list[tuple[int, int]]:
    """Each round's prompt has the rounds before it, cut to its last tokens."""
    history, found = 0, []
    for (prompt, output), ends in zip(rounds, rng.random(len(rounds)) < CHAT_ENDS, strict=True):
        answer = min(output, MAX_MODEL_LEN - CHAT_PROMPT - 8)
        history += prompt
        found.append((min(history, CHAT_PROMPT), answer))
        history = 0 if ends else history + answer
    return found


def _draw(dataset: str, side: str, num: int, rng: np.random.Generator) -> np.ndarray:
    if dataset == "WMT16":
        mean, spread = TRANSLATION[side]
        return np.ceil(rng.gamma(spread**-2, mean * spread**2, num)).astype(int)  # [num]
    lengths, probabilities = _lengths(dataset, side)
    drawn: np.ndarray = rng.choice(lengths, size=num, p=probabilities)  # [num]
    return drawn


def arrivals(dataset: str, rate: float, seconds: float, seed: int, prefix: int = 0) -> list[Asked]:
    """Requests that arrive at random, `rate` a second on average, for so many seconds. `prefix`: tokens before each
    prompt."""
    lengths, gaps = (np.random.default_rng((seed, stream)) for stream in range(2))
    expected = round(rate * seconds)
    num = expected + 10 * round(expected**0.5) + 10
    times = np.cumsum(gaps.exponential(1, num)) / rate  # [num] seconds
    asked = zip(times.tolist(), draw_lengths(dataset, num, lengths), strict=True)
    return [Asked(time, prefix + prompt, output) for time, (prompt, output) in asked if time < seconds]
