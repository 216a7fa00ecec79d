"""Prefix caching on Mooncake's traces: what share of the prompts' tokens a cache of so many tokens would have had.

The traces (Qin et al., FAST 2025) say of each request the hashes of its prompt's blocks, of 512 tokens each. The cache
is the engine's own (`engine/prefix_cache.py`), with such a hash in the place of a block's tokens. Requests come one
after another and give their blocks back at once; so this is the best that such a cache of that size could do.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipaged.engine.prefix_cache import PrefixCache
from minipaged.errors import InvalidRequest
from minipaged.paper.figure import Check, Figure, Job, Line, Outcome, Plot
from minipaged.simulated import simulated_tier

HASHED_TOKENS = 512
FILES = {"conversation": "mooncake_conversation.jsonl.gz", "synthetic": "mooncake_synthetic.jsonl.gz"}
SIZES = (1_000, 2_000, 5_859, 10_000, 30_000, 100_000)
"""Blocks of 512 tokens; 5,859 are the 3 million tokens at which Mooncake's authors give a number."""
AT = 5_859
PUBLISHED = {"conversation": 0.41, "synthetic": 0.46}
"""Of what an endless cache would have had, what one of 3 million tokens has (Qin et al.)."""
TOLERANCE = 0.06
"""In shares. How the authors' cache evicts differs in detail, and they count tokens."""


@dataclass(frozen=True, slots=True)
class HitRate:
    """Hits and lookups, in blocks."""

    hits: int
    looked_up: int


@dataclass(frozen=True, slots=True)
class CachedTrace:
    """One trace through one cache."""

    path: str
    num_blocks: int
    """0: no end of them."""
    most: int = 0
    """Requests; 0: all."""

    def run(self) -> HitRate:
        requests = list(hashes_of(Path(self.path), self.most))
        tier = simulated_tier()
        allocator = tier.block_allocator(self.num_blocks or sum(map(len, requests)))
        cache = PrefixCache(1, allocator)
        hits = looked_up = 0
        for hashes in requests:
            found = cache.match([*hashes, -1])  # a prompt ends with tokens of its own
            hits, looked_up = hits + len(found), looked_up + len(hashes)
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
        return HitRate(hits, looked_up)


def hashes_of(path: Path, most: int) -> Iterator[list[int]]:
    """Of each request the hashes of its prompt's blocks. Raises InvalidRequest for what is no such trace."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                if most and number > most:
                    return
                yield [int(one) for one in json.loads(line)["hash_ids"]]
    except OSError as error:
        raise InvalidRequest(f"cannot read the trace {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(
            f"{path}, line {number}: no JSON object with hash_ids, as Mooncake's traces have"
        ) from None


class PrefixCaching(Figure):
    """Hit rate against the size of the cache, for two traces."""

    name = "beyond/prefix-caching"
    title = "Prefix caching: hit rate against cache size, Mooncake's traces"
    section = "beyond"
    needs_traces = True
    look = (
        "Both curves grow slowly, for prefixes come again long after they were there: it takes some 15 million tokens "
        "for nearly all that there is to have. The synthetic trace, which has more of them, is there a little sooner."
    )
    change_it = (
        "Evict at random in place of the least recently used (`PrefixCache.evict`): how much of the curve is lost?",
        "Split the requests among four caches by turns: what does a router without prefixes throw away?",
        "Let blocks have 4,096 tokens (every eighth hash): what do large blocks cost?",
    )

    def __init__(self, traces: Path | None = None) -> None:
        self._traces = traces

    def given(self, traces: Path) -> PrefixCaching:
        return PrefixCaching(traces)

    def jobs(self, *, quick: bool, seed: int) -> list[Job]:
        if self._traces is None:
            raise InvalidRequest(
                f"{self.name} needs --traces FOLDER, with {' and '.join(FILES.values())}: FAST25-release/traces of "
                "github.com/kvcache-ai/Mooncake, compressed by gzip"
            )
        most = 2000 if quick else 0
        paths = [str(self._traces / file) for file in FILES.values()]
        return [CachedTrace(path, size, most) for path in paths for size in (*SIZES, 0)]

    def outcome(self, results: Mapping[Job, Any]) -> Outcome:
        rates: dict[str, dict[int, float]] = {name: {} for name in FILES}
        for job, result in results.items():
            assert isinstance(job, CachedTrace)
            name = next(name for name, file in FILES.items() if job.path.endswith(file))
            rates[name][job.num_blocks] = result["hits"] / result["looked_up"]
        lines = [
            Line(name, "ours", [(size * HASHED_TOKENS / 1e6, of[size]) for size in SIZES]) for name, of in rates.items()
        ]
        lines += [
            Line(name, "paper", [(AT * HASHED_TOKENS / 1e6, PUBLISHED[name] * of[0])]) for name, of in rates.items()
        ]
        checks = [
            Check(
                f"{name}: of an endless cache's hits, at 3 M tokens", PUBLISHED[name], of[AT] / of[0], TOLERANCE, False
            )
            for name, of in rates.items()
        ]
        checks += [Check(f"{name}: hit rate of an endless cache", None, of[0], None) for name, of in rates.items()]
        plot = Plot(self.title, "million tokens", "hit rate", lines, log_x=True)
        return Outcome([plot], checks, notes=["Dashed (a point each): the authors' number, times our endless cache's."])
