"""`python -m benchmarks.partial_hits [--trace FILE ...]`: the share of prompt tokens that the prefix cache finds, with
and without partial hits (`minipaged/engine/partial_hits.py`).

The cache and the block tables are the engine's own. Nothing is computed. Requests are handled one after another, in
order of arrival, and each releases its blocks before the next begins. All draws have a seed, so the same command gives
the same figures.

Two kinds of workloads:

- Conversations with ShareGPT's lengths (`minipaged/paper/workloads.py`, from Fig. 11 of the paper). One conversation
  begins per second. The prompt of each round is all that was said before, and a new message. Tokens are random numbers,
  so no two messages share any. All prompts begin with the same system prompt, or with none.
- `--trace`: traces with hashes of their prompts, one for each 512 tokens, such as Mooncake's. They do not say where two
  prompts part within 512 tokens, so they show nothing about smaller blocks. They show the same thing on a larger scale:
  a hash takes the place of a token, and a block has 2, 4 or 8 hashes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from minipaged.engine.partial_hits import beginning_of, keep
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.paper.figures.prefix_caching import HASHED_TOKENS, hashes_of
from minipaged.paper.workloads import conversations
from minipaged.simulation.simulated import simulated_tier

BLOCK_SIZES = (16, 64, 256)
HASHES_PER_BLOCK = (2, 4, 8)
SYSTEM_PROMPTS = (0, 341)
"""Tokens: none, and the paper's prefix with five examples (section 6.4)."""
CACHE_TOKENS = (0, 100_000, 30_000)
"""The room of the cache, in tokens. 0: unlimited."""
SECONDS_PER_TOKEN = 0.05
"""The time that a token of an answer takes, an assumption. Only the order of the requests depends on it."""


class Served(NamedTuple):
    """A request: its prompt, and the answer's tokens that are computed: all but the last."""

    prompt: Sequence[int]
    answer: Sequence[int]


class Found(NamedTuple):
    """What the cache found for all requests."""

    found: int
    """Prompt tokens that the cache had."""
    tokens: int
    """All prompt tokens."""
    copies: int
    """Blocks copied for a hit that ends within them."""


def found_in(asked: Iterable[Served], block_size: int, num_tokens: int, *, partial: bool) -> Found:
    """Handle the requests, with a cache of `num_tokens` (0: unlimited). `partial`: with partial hits."""
    asked = list(asked)
    tier = simulated_tier()
    endless = sum(-(-(len(one.prompt) + len(one.answer)) // block_size) for one in asked)
    allocator = tier.block_allocator(num_tokens // block_size or endless)
    cache = PrefixCache(block_size, allocator)
    found = copies = 0
    for prompt, answer in asked:
        tokens = [*prompt, *answer]
        spare = allocator.num_free + cache.num_evictable - -(-len(tokens) // block_size)
        beginning = beginning_of(cache, prompt, spare, within_block=partial)
        table = tier.block_table(block_size, allocator)
        table.adopt(beginning.blocks)
        table.trim(beginning.num_tokens)
        cache.reused(beginning.blocks)
        if beginning.takes_over:
            cache.drop(beginning.blocks[-1])
        found += beginning.num_tokens
        new = len(tokens) - beginning.num_tokens
        cache.evict(max(0, table.blocks_needed(new) - allocator.num_free))
        sources = [source for source, _ in table.append(new)]
        copies += len(sources)
        cache.released(sources)
        for _, own, cached in cache.publish(tokens, table, beginning.num_tokens // block_size):
            if own == cached and (shorter := cache.redundant(cached)) is not None:
                cache.drop(shorter)
        entry = keep(cache, tokens, table, allocator) if partial else None
        if entry and (shorter := cache.redundant(entry.block)) is not None:
            cache.drop(shorter)
        blocks = list(table.blocks)
        table.trim(0)
        cache.released(reversed(blocks))
    return Found(found, sum(len(one.prompt) for one in asked), copies)


def chats(seconds: float, seed: int, system_tokens: int) -> list[Served]:
    """Rounds of conversations, in order of arrival."""
    r = random.Random(seed)

    def said(num_tokens: int) -> list[int]:
        return [r.randrange(1 << 32) for _ in range(num_tokens)]

    system = said(system_tokens)
    found: list[tuple[float, Served]] = []
    for rounds in conversations(1.0, seconds, seed):
        now, history = 0.0, list(system)
        for one in rounds:
            now += one.pause
            prompt, answer = [*history, *said(one.said_tokens)], said(one.answer_tokens)
            found.append((now, Served(prompt, answer[:-1])))  # the last token is chosen, and never computed
            history = [*prompt, *answer]
            now += one.answer_tokens * SECONDS_PER_TOKEN
    return [served for _, served in sorted(found, key=lambda pair: pair[0])]


def hashed(path: Path, most: int) -> list[Served]:
    """A trace's prompts, with a hash in place of 512 tokens. Each ends with a token of its own: the one that is run."""
    return [Served([*hashes, -1 - i], ()) for i, (hashes, _) in enumerate(hashes_of(path, most))]


def row(name: str, before: Found, after: Found) -> str:
    (one, tokens, _), (other, _, copies) = before, after
    return f"| {name} | {tokens:,} | {one / tokens:.2%} | {other / tokens:.2%} | {other - one:,} | {copies:,} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="traces with hash_ids (.jsonl or .jsonl.gz)")
    parser.add_argument("--seconds", type=float, default=1000.0, help="of the conversations")
    parser.add_argument("--requests", type=int, default=0, help="of a trace; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    head = "prompt tokens | found before | found now | more tokens | copies"
    print(f"| conversations: system prompt, cache, block size | {head} |\n|---|---|---|---|---|---|")
    for system in SYSTEM_PROMPTS:
        served = chats(asked.seconds, asked.seed, system)
        for room in CACHE_TOKENS:
            for size in BLOCK_SIZES:
                before, after = (found_in(served, size, room, partial=partial) for partial in (False, True))
                print(row(f"{system}, {f'{room:,}' if room else 'unlimited'}, {size}", before, after), flush=True)
    for path in asked.trace:
        served = hashed(path, asked.requests)
        print(f"\n| {path.name}: tokens per block | {head.replace('tokens', 'hashes')} |\n|---|---|---|---|---|---|")
        for size in HASHES_PER_BLOCK:
            before, after = (found_in(served, size, 0, partial=partial) for partial in (False, True))
            print(row(f"{size * HASHED_TOKENS:,}", before, after), flush=True)
        most = ", ".join(f"{len(served) * (size - 1):,} at {size}" for size in BLOCK_SIZES)
        print(f"Within {HASHED_TOKENS} tokens nothing is known. The most that could be found there: {most} tokens.")


if __name__ == "__main__":
    main()
