"""The workloads of the paper's evaluation (section 6.1, Fig. 11): lengths of ShareGPT and Alpaca, Poisson arrivals.

Of the lengths the paper prints histograms, one of prompts and one of outputs. How the two pair is not known: here they
are drawn independently, as far as both together do not exceed the model's 2,048 tokens. Drawn from the same seed, a
longer trace of "ShareGPT", "Alpaca" or "WMT16" begins as a shorter one does, and one of another rate has the same
requests closer together. Rounds of conversations, and pairs that are taken apart, are others where more are drawn.

Beside them there are real requests, read from files: lengths of ShareGPT in pairs, and the times and lengths of Azure's
traces.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from minipaged.errors import InvalidRequest
from minipaged.paper import published
from minipaged.simulation.traces import read_trace

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

CHAT_PAUSE, MOST_ROUNDS = 20.0, 20
"""Assumed: mean seconds from an answer to what is said next, exponentially distributed; rounds of a conversation."""


@dataclass(frozen=True, slots=True)
class PaperRequest:
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
        _exchange(prompt, output, rng)
        found += zip(prompt.tolist(), output.tolist(), strict=True)
    return found[:num]


def _exchange(prompt: np.ndarray, output: np.ndarray, rng: np.random.Generator) -> None:
    """Outputs of pairs that are too long together change places with others; [requests] each."""
    for i in np.flatnonzero(prompt + output >= MAX_MODEL_LEN):
        while prompt[i] + output[i] >= MAX_MODEL_LEN:
            j = rng.integers(len(prompt))
            if prompt[i] + output[j] < MAX_MODEL_LEN and prompt[j] + output[i] < MAX_MODEL_LEN:
                output[i], output[j] = output[j], output[i]


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


Draw = Callable[[int, np.random.Generator], Sequence[tuple[int, int]]]
"""(prompt, output) of so many requests."""


def arrivals(dataset: str, rate: float, seconds: float, seed: int, prefix: int = 0) -> list[PaperRequest]:
    """Requests of a dataset that arrive at random, `rate` a second on average, for so many seconds. `prefix`: tokens
    before each prompt."""
    return poisson(partial(draw_lengths, dataset), rate, seconds, seed, prefix)


def poisson(draw: Draw, rate: float, seconds: float, seed: int, prefix: int = 0) -> list[PaperRequest]:
    """The same with any lengths."""
    lengths, gaps = (np.random.default_rng((seed, stream)) for stream in range(2))
    expected = round(rate * seconds)
    num = expected + 10 * round(expected**0.5) + 10
    times = np.cumsum(gaps.exponential(1, num)) / rate  # [num] seconds
    asked = zip(times.tolist(), draw(num, lengths), strict=True)
    return [PaperRequest(time, prefix + prompt, output) for time, (prompt, output) in asked if time < seconds]


@dataclass(frozen=True, slots=True)
class Round:
    """Of a conversation: what is said, and answered."""

    pause: float
    """Seconds from the answer before it; of the first round, from 0."""
    said_tokens: int
    answer_tokens: int


def conversations(rate: float, seconds: float, seed: int) -> list[list[Round]]:
    """Conversations that begin at random, `rate` a second, in ShareGPT's lengths. The prompt of a round is all that was
    said and answered before, and what is said now; the conversation ends by CHAT_ENDS, or where the next round would
    not fit the model."""
    rng = np.random.default_rng((seed, 4))
    begin = arrivals("ShareGPT", rate, seconds, seed)
    more = iter(draw_lengths("ShareGPT", MOST_ROUNDS * len(begin), rng))
    found = []
    for first in begin:
        rounds = [Round(first.seconds, first.prompt_tokens, first.output_tokens)]
        history = first.prompt_tokens + first.output_tokens
        while len(rounds) < MOST_ROUNDS and rng.random() >= CHAT_ENDS:
            said, answer = next(more)
            history += said + answer
            if history >= MAX_MODEL_LEN:
                break
            rounds.append(Round(rng.exponential(CHAT_PAUSE), said, answer))
        found.append(rounds)
    return found


# --- Real requests, from files --------------------------------------------------------------------

SHAREGPT_COLUMNS = "num_prefill_tokens", "num_decode_tokens"
"""As in Sarathi-Serve's file of ShareGPT's lengths (microsoft/sarathi-serve, Agrawal et al., OSDI 2024)."""


def azure(path: Path) -> list[PaperRequest]:
    """An Azure LLM inference trace, as `traces.read_trace` reads it."""
    return [PaperRequest(one.seconds, one.context_tokens, one.generated_tokens) for one in read_trace(path)]


def sharegpt(path: Path) -> list[PaperRequest]:
    """Pairs of lengths, one a line of a CSV file (compressed or not) with SHAREGPT_COLUMNS; they arrive at no time of
    their own: 0. Raises InvalidRequest for what is no such file."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            found = [
                PaperRequest(0.0, *(int(row[column]) for column in SHAREGPT_COLUMNS)) for row in csv.DictReader(lines)
            ]
    except OSError as error:
        raise InvalidRequest(f"cannot read the lengths {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, EOFError, csv.Error):
        found = []
    if not found or min(min(one.prompt_tokens, one.output_tokens) for one in found) < 1:
        raise InvalidRequest(
            f"{path} has no lengths; it must be a CSV file with numbers above 0 in the columns "
            f"{' and '.join(SHAREGPT_COLUMNS)}"
        )
    return found


def that_fit(asked: Sequence[PaperRequest]) -> list[PaperRequest]:
    """Those that the model can hold. The others are left out and not cut: a cut request is one that nobody sent. Raises
    InvalidRequest where none is left."""
    found = [one for one in asked if one.prompt_tokens + one.output_tokens < MAX_MODEL_LEN]
    if not found:
        raise InvalidRequest(f"all requests have {MAX_MODEL_LEN:,} tokens or more, which the model cannot hold")
    return found


def draw_pairs(
    asked: Sequence[PaperRequest], num: int, rng: np.random.Generator, *, apart: bool = False
) -> list[tuple[int, int]]:
    """(prompt, output) of so many of these requests, drawn with replacement. `apart`: each output goes with the prompt
    of another one, as where only histograms are known."""
    chosen = [asked[i] for i in rng.integers(len(asked), size=num)]
    prompt, output = (
        np.array([getattr(one, side) for one in chosen], int) for side in ("prompt_tokens", "output_tokens")
    )  # [num] each
    if apart:
        rng.shuffle(output)
        _exchange(prompt, output, rng)
    return list(zip(prompt.tolist(), output.tolist(), strict=True))


def at_rate(asked: Sequence[PaperRequest], rate: float) -> list[PaperRequest]:
    """A trace by a slower or a faster clock, so that `rate` requests a second come on average. Its bursts stay as they
    are, in requests, and last longer or less long. Raises InvalidRequest where all came at one time."""
    if asked[-1].seconds == 0:
        raise InvalidRequest("a trace has requests at different times, and in this one all came at once")
    pace = len(asked) / asked[-1].seconds / rate
    return [replace(one, seconds=one.seconds * pace) for one in asked]


def at_random(asked: Sequence[PaperRequest], seed: int) -> list[PaperRequest]:
    """As many requests in the same time, but at random: a Poisson process of which one knows how many came."""
    rng = np.random.default_rng((seed, 2))
    times = np.sort(rng.uniform(0, asked[-1].seconds, len(asked))).tolist()  # [requests] seconds
    return [replace(one, seconds=time) for one, time in zip(asked, times, strict=True)]


def in_any_order(asked: Sequence[PaperRequest], seed: int) -> list[PaperRequest]:
    """The same requests at the same times, but who comes when is drawn."""
    others = np.random.default_rng((seed, 3)).permutation(len(asked)).tolist()  # [requests]
    return [replace(asked[other], seconds=one.seconds) for one, other in zip(asked, others, strict=True)]
