"""Prefix caching on Mooncake's traces: the hit rate, as a share of all prompt tokens, by the size of the cache.

The traces (Qin et al., FAST 2025) contain, for each request, hashes of its prompt's blocks of 512 tokens. The cache is
the engine's own (`engine/prefix_cache.py`), with such a hash in place of a block's tokens. Requests are handled one
after another, and release their blocks immediately. So this is the best that such a cache of that size can do.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipaged.engine.prefix_cache import PrefixCache
from minipaged.errors import InvalidRequest
from minipaged.paper.figure import Check, FigureResult, Job, Line, Plot
from minipaged.paper.figures.from_files import FromFiles
from minipaged.simulation.simulated import simulated_tier

HASHED_TOKENS = 512
TRACES = ("conversation", "synthetic")
SIZES = (1_000, 2_000, 5_859, 10_000, 30_000, 100_000)
"""Sizes of the cache in blocks of 512 tokens."""
AT = 5_859
"""The size for which Mooncake's authors publish a number: 3 million tokens."""
CEILING = {"conversation": 0.40, "synthetic": 0.66}
"""The share of prompt tokens that occurred before: the highest hit rate of any cache (Qin et al.)."""
PUBLISHED = {"conversation": 0.41, "synthetic": 0.46}
"""The hits of a cache of 3 million tokens as a share of an unlimited cache's hits (Qin et al.)."""
TOLERANCE = 0.06
"""Tolerance of these shares. The eviction of the authors' cache differs in details."""


@dataclass(frozen=True, slots=True)
class HitRate:
    """Prompt tokens found in the cache, and all prompt tokens."""

    found: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CachedTrace:
    """A job that runs one trace through one cache."""

    path: str
    num_blocks: int
    """Size of the cache. 0: unlimited."""
    most: int = 0
    """The number of requests to use. 0: all."""

    def run(self) -> HitRate:
        requests = list(hashes_of(Path(self.path), self.most))
        tier = simulated_tier()
        allocator = tier.block_allocator(self.num_blocks or sum(len(hashes) for hashes, _ in requests))
        cache = PrefixCache(1, allocator)
        num_found = 0
        for hashes, num_tokens in requests:
            found, _ = cache.match([*hashes, -1])  # a prompt ends with tokens of its own
            num_found += min(len(found) * HASHED_TOKENS, num_tokens)  # the last block may not be full
            table = tier.block_table(1, allocator)
            table.adopt(found)
            cache.reused(found)
            new = min(len(hashes) - len(found), allocator.num_free + cache.num_evictable)
            cache.evict(max(0, new - allocator.num_free))
            table.append(new)
            for _ in cache.publish(hashes[: len(found) + new], table, len(found)):
                pass
            blocks = list(table.blocks)
            table.trim(0)
            cache.released(reversed(blocks))
        return HitRate(num_found, sum(num_tokens for _, num_tokens in requests))


def hashes_of(path: Path, most: int) -> Iterator[tuple[list[int], int]]:
    """Yield the hashes of each prompt's blocks, and its number of tokens. Raises InvalidRequest if the file is no such
    trace."""
    number = 0
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                if most and number > most:
                    return
                request = json.loads(line)
                yield [int(one) for one in request["hash_ids"]], int(request["input_length"])
    except (EOFError, UnicodeDecodeError, zlib.error):  # before ValueError, which one of them is
        raise InvalidRequest(f"{path} is cut off or not text after line {number}; download it again") from None
    except OSError as error:
        raise InvalidRequest(f"cannot read the trace {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(
            f"{path}, line {number} is not a JSON object with hash_ids and input_length, as in Mooncake's traces"
        ) from None
    if not number:
        raise InvalidRequest(f"{path} has no requests")


class PrefixCaching(FromFiles):
    """Hit rates of two traces by the size of the cache."""

    name = "beyond/prefix-caching"
    title = "Prefix caching: hit rate against cache size, Mooncake's traces"
    files = tuple(f"mooncake_{name}.jsonl.gz" for name in TRACES)
    source = "FAST25-release/traces of github.com/kvcache-ai/Mooncake (Qin et al., FAST 2025), compressed by gzip"
    look = (
        "Both curves grow slowly, because prefixes return long after their last use. Some 15 million tokens are "
        "needed for nearly all possible hits. The synthetic trace, which has more shared prefixes, gets there with a "
        "slightly smaller cache."
    )
    change_it = (
        "Evict at random instead of the least recently used block (`PrefixCache.evict`): how much of the hit rate is "
        "lost?",
        "Split the requests among four caches in turns: what does a router that ignores prefixes lose?",
        "Use blocks of 4,096 tokens (every eighth hash): what do large blocks cost?",
    )

    def jobs_with(self, paths: Sequence[str], quick: bool, seed: int) -> list[Job]:
        most = 2000 if quick else 0
        return [CachedTrace(path, size, most) for path in paths for size in (*SIZES, 0)]

    def outcome(self, results: Mapping[Job, Any]) -> FigureResult:
        rates: dict[str, dict[int, float]] = {name: {} for name in TRACES}
        for job, result in results.items():
            assert isinstance(job, CachedTrace)
            name = next(name for name, file in zip(TRACES, self.files, strict=True) if job.path.endswith(file))
            rates[name][job.num_blocks] = result["found"] / result["tokens"]
        millions = [size * HASHED_TOKENS / 1e6 for size in SIZES]
        around = 0.8 * AT * HASHED_TOKENS / 1e6, 1.25 * AT * HASHED_TOKENS / 1e6  # a short line for one number
        lines, checks = [], []
        for name, of in rates.items():
            lines += [
                Line(name, "ours", list(zip(millions, (of[size] for size in SIZES), strict=True))),
                Line(f"{name}, endless", "ours", [(millions[0], of[0]), (millions[-1], of[0])]),
                Line(f"{name}, 3 M tokens", "paper", [(x, PUBLISHED[name] * CEILING[name]) for x in around]),
                Line(f"{name}, ceiling", "paper", [(millions[0], CEILING[name]), (millions[-1], CEILING[name])]),
            ]
            what = f"{name}: of an endless cache's hits, at 3 M tokens"
            checks.append(Check(what, PUBLISHED[name], of[AT] / of[0], TOLERANCE, False))
        for name, of in rates.items():
            checks.append(Check(f"{name}: hit rate of an endless cache", CEILING[name], of[0], None, False))
        plot = Plot(self.title, "million tokens", "hit rate", lines, log_x=True)
        return FigureResult(
            [plot],
            checks,
            notes=[
                "Dashed lines are the authors' numbers: their ceilings, and the share of them that a cache of 3 "
                "million tokens reaches.",
                "Our endless cache stays below their ceilings. It finds only whole blocks, from the beginning of a "
                "prompt on. How the authors counted is not known, so the ceilings are not judged.",
            ],
        )
