"""The workloads of the paper's evaluation (section 6.1, Fig. 11): lengths of ShareGPT and Alpaca, Poisson arrivals.

The paper prints one histogram of prompt lengths and one of output lengths. How they pair is not known. Here they are
drawn independently, except that no pair exceeds the model's 2,048 tokens. With the same seed, a longer trace of
"ShareGPT", "Alpaca" or "WMT16" begins with the requests of a shorter one, and a trace at a higher rate has the same
requests closer together. This is not true of conversations ("chat") and of pairs drawn with `apart`.

Real requests can be read from files: pairs of ShareGPT's lengths, and the times and lengths of Azure's traces.
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
"""Assumed gamma distributions of WMT16's lengths, English to German, in LLaMA's tokens: the mean, and the standard
deviation as a fraction of the mean. The paper does not say how long its sentences were."""
PREFIX = {"16a": 80, "16b": 341}
"""Tokens of the prefix that all requests of the panel share: an instruction with one example (16a) or five (16b)."""
MAX_MODEL_LEN = 2048
"""OPT's longest sequence, in tokens."""
BLOCK = 4096
"""The number of requests that are drawn together. Always the same, so that a longer trace begins like a shorter one."""
CHAT_PROMPT = 1024
"""The limit of a conversation's prompt, in tokens: longer ones are cut to their last tokens (section 6.4). Answers are
cut to about as many."""
CHAT_ENDS = 0.1
"""Assumed: the probability that a conversation ends after a round."""

CHAT_PAUSE, MOST_ROUNDS = 20.0, 20
"""Assumed: the mean pause of a user between an answer and the next round, in seconds (exponentially distributed), and
the largest number of rounds of a conversation."""


@dataclass(frozen=True, slots=True)
class PaperRequest:
    """One request of a workload."""

    seconds: float
    """The time of arrival."""
    prompt_tokens: int
    """Tokens of the prompt, including a shared prefix."""
    output_tokens: int
    """Tokens that each of its sequences generates, whatever their values are."""


@cache
def _lengths(dataset: str, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all lengths in the range of a histogram of Fig. 11, and their probabilities, uniform within a bin."""
    first, last, counts = published.histogram(dataset, side)
    edges = np.linspace(first, last, len(counts) + 1)  # [bins + 1]
    lengths = np.arange(int(first), int(last) + 1)  # [lengths]
    of_bin = np.minimum(np.searchsorted(edges, lengths, side="right") - 1, len(counts) - 1)  # [lengths]
    in_bin = np.bincount(of_bin, minlength=len(counts))  # [bins]
    weights = np.asarray(counts)[of_bin] / in_bin[of_bin]
    return lengths, weights / weights.sum()


def draw_lengths(dataset: str, num: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Draw (prompt, output) lengths of `num` requests.

    "ShareGPT" and "Alpaca" are distributed as in Fig. 11, "WMT16" as in TRANSLATION. "chat" is rounds of conversations
    with ShareGPT's lengths. Pairs that are too long together swap their outputs with other pairs. They are not dropped,
    because that would make long prompts too rare.
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
    """Swap the outputs of pairs that are too long together with other outputs, in place. Both arrays: [requests]."""
    for i in np.flatnonzero(prompt + output >= MAX_MODEL_LEN):
        while prompt[i] + output[i] >= MAX_MODEL_LEN:
            j = rng.integers(len(prompt))
            if prompt[i] + output[j] < MAX_MODEL_LEN and prompt[j] + output[i] < MAX_MODEL_LEN:
                output[i], output[j] = output[j], output[i]


def _chat(rounds: list[tuple[int, int]], rng: np.random.Generator) -> list[tuple[int, int]]:
    """Make conversations of these rounds. A round's prompt contains the earlier rounds, cut to the last CHAT_PROMPT
    tokens."""
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
"""A function that draws (prompt, output) lengths of the given number of requests."""


def arrivals(dataset: str, rate: float, seconds: float, seed: int, prefix: int = 0) -> list[PaperRequest]:
    """Draw requests of a dataset with Poisson arrivals: `rate` per second, during `seconds`. Each prompt gets `prefix`
    additional tokens."""
    return poisson(partial(draw_lengths, dataset), rate, seconds, seed, prefix)


def poisson(draw: Draw, rate: float, seconds: float, seed: int, prefix: int = 0) -> list[PaperRequest]:
    """Draw requests with Poisson arrivals like `arrivals`, with lengths from `draw`."""
    lengths, gaps = (np.random.default_rng((seed, stream)) for stream in range(2))
    expected = round(rate * seconds)
    num = expected + 10 * round(expected**0.5) + 10
    times = np.cumsum(gaps.exponential(1, num)) / rate  # [num] seconds
    asked = zip(times.tolist(), draw(num, lengths), strict=True)
    return [PaperRequest(time, prefix + prompt, output) for time, (prompt, output) in asked if time < seconds]


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a conversation: a user's message and the answer."""

    pause: float
    """Seconds since the previous answer. For the first round, seconds since time 0."""
    said_tokens: int
    """Tokens of the user's message."""
    answer_tokens: int


def conversations(rate: float, seconds: float, seed: int) -> list[list[Round]]:
    """Draw conversations that begin as a Poisson process, `rate` per second, with ShareGPT's lengths.

    A round's prompt is all earlier messages and answers, and the new message. After each round the conversation ends
    with probability CHAT_ENDS. It also ends after MOST_ROUNDS, or if the next round would not fit the model."""
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
"""Column names of Sarathi-Serve's file of ShareGPT's lengths (microsoft/sarathi-serve, Agrawal et al., OSDI 2024)."""


def azure(path: Path) -> list[PaperRequest]:
    """Read an Azure LLM inference trace with `traces.read_trace`."""
    return [PaperRequest(one.seconds, one.context_tokens, one.generated_tokens) for one in read_trace(path)]


def sharegpt(path: Path) -> list[PaperRequest]:
    """Read pairs of lengths from the SHAREGPT_COLUMNS of a CSV file, which may be gzipped. All arrival times are 0.

    Raises InvalidRequest if it is no such file."""
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
    """Return the requests that fit in the model's context. The others are left out. Cutting them would make requests
    that no user sent. Raises InvalidRequest if none is left."""
    found = [one for one in asked if one.prompt_tokens + one.output_tokens < MAX_MODEL_LEN]
    if not found:
        raise InvalidRequest(f"all requests have {MAX_MODEL_LEN:,} tokens or more, which the model cannot hold")
    return found


def draw_pairs(
    asked: Sequence[PaperRequest], num: int, rng: np.random.Generator, *, apart: bool = False
) -> list[tuple[int, int]]:
    """Draw (prompt, output) lengths of `num` of these requests, with replacement. With `apart`, outputs are paired with
    prompts at random, as if only histograms were known."""
    chosen = [asked[i] for i in rng.integers(len(asked), size=num)]
    prompt, output = (
        np.array([getattr(one, side) for one in chosen], int) for side in ("prompt_tokens", "output_tokens")
    )  # [num] each
    if apart:
        rng.shuffle(output)
        _exchange(prompt, output, rng)
    return list(zip(prompt.tolist(), output.tolist(), strict=True))


def at_rate(asked: Sequence[PaperRequest], rate: float) -> list[PaperRequest]:
    """Stretch or compress a trace's times so that `rate` requests arrive per second on average. A burst keeps its
    requests, but its duration changes. Raises InvalidRequest if all requests arrive at the same time."""
    if asked[-1].seconds == 0:
        raise InvalidRequest("all requests of this trace arrive at the same time; use a trace with different times")
    pace = len(asked) / asked[-1].seconds / rate
    return [replace(one, seconds=one.seconds * pace) for one in asked]


def at_random(asked: Sequence[PaperRequest], seed: int) -> list[PaperRequest]:
    """Draw new arrival times for the requests, uniform over the trace's duration: a Poisson process with a known number
    of arrivals."""
    rng = np.random.default_rng((seed, 2))
    times = np.sort(rng.uniform(0, asked[-1].seconds, len(asked))).tolist()  # [requests] seconds
    return [replace(one, seconds=time) for one, time in zip(asked, times, strict=True)]


def in_any_order(asked: Sequence[PaperRequest], seed: int) -> list[PaperRequest]:
    """Shuffle the requests among the trace's arrival times."""
    others = np.random.default_rng((seed, 3)).permutation(len(asked)).tolist()  # [requests]
    return [replace(asked[other], seconds=one.seconds) for one, other in zip(asked, others, strict=True)]
