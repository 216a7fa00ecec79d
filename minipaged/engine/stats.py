"""The statistics of paging: what it saved and cost, counted from events. `stats_of` counts those of a recorded run
again.

The waste of KV memory is divided as in the paper's Fig. 2:

- *tokens*: slots that hold the K/V of a token;
- *reserved*: slots held now for tokens that come later;
- *internal fragmentation*: slots held for tokens that never come;
- the rest of the pool is *free*.

Paging reserves nothing: it wastes only the unfilled end of each last block, which counts as internal fragmentation. For
comparison, the same sequences are counted as if in a contiguous cache: `max_model_len` slots each, nothing shared.
Which of those slots were reserved, and which were never used, is known once the sequence has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from minipaged import events as ev
from minipaged.events import Event


class StepUsage(NamedTuple):
    """The fields of a StepScheduled without the step's number: counted in each step, and emitted for listeners."""

    num_sequences: int
    num_tokens: int
    table_entries: int
    blocks_used: int
    blocks_cached: int
    slots_unfilled: int


@dataclass(slots=True)
class MemoryUse:
    """Slots, summed over steps. Divide by the number of steps for the mean."""

    tokens: int = 0
    reserved: int = 0
    internal_fragmentation: int = 0

    @property
    def taken(self) -> int:
        return self.tokens + self.reserved + self.internal_fragmentation

    def share_of_tokens(self) -> float:
        """The share of the taken slots that held tokens (1.0 if none was taken)."""
        return self.tokens / self.taken if self.taken else 1.0


@dataclass(slots=True)
class Stats:
    """Counts since the engine started. They need no events about single tokens, which are made only for listeners."""

    steps: int = 0
    step_seconds: float = 0.0
    query_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    block_size: int = 0
    max_model_len: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    """Blocks held by sequences."""
    blocks_cached: int = 0
    """Blocks held by the prefix cache only."""
    blocks_saved: int = 0
    """Block-table entries beyond the first that hold the same block."""
    entries_by_group: tuple[int, ...] = ()
    """Block-table entries in each group of layers. Only `Engine.current_stats` counts them."""
    blocks_passed: int = 0
    """Blocks given back because the windows of their layers had passed them."""
    peak_blocks_used: int = 0
    blocks_copied: int = 0
    """Blocks copied on write."""
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    preempted_by_swap: int = 0
    preempted_by_recompute: int = 0
    tokens_recomputed: int = 0
    num_drafts: int = 0
    """Drafts that were verified: one per sequence and step."""
    tokens_drafted: int = 0
    """Tokens of those drafts."""
    tokens_accepted: int = 0
    """Drafted tokens that stood."""
    tokens_accepted_at: tuple[int, ...] = ()
    """For each place in a draft, the number of tokens there that stood."""
    blocks_rolled_back: int = 0
    """Blocks given back because the drafted tokens in them did not stand."""
    prefix_cache_query_tokens: int = 0
    """Tokens of admitted requests that were looked up in the prefix cache; counted again after a recomputation."""
    prefix_cache_hit_tokens: int = 0
    """Tokens that the prefix cache had when they were looked up."""
    prefix_cache_evictions: int = 0
    prefix_cache_salts: int = 0
    """Different salts of requests so far (`arrivals.MOST_SALTS` at most). Only the engine itself counts them."""
    blocks_stored: int = 0
    """Blocks stored for other engines by a KV connector, and blocks that left the host floor and are on the disk."""
    blocks_loaded: int = 0
    """Blocks loaded from other engines by a KV connector, or from the disk below the prefix cache."""
    blocks_demoted: int = 0
    """Evicted blocks that were copied to the floor below the prefix cache."""
    blocks_promoted: int = 0
    """Blocks that prompts found on the floor below the prefix cache."""
    block_steps: int = 0
    """Distinct blocks held, summed over steps."""
    table_entry_steps: int = 0
    """Block-table entries, summed over steps: the blocks that would be held without sharing."""
    paged: MemoryUse = field(default_factory=MemoryUse)
    contiguous: MemoryUse = field(default_factory=MemoryUse)

    @property
    def share_saved(self) -> float:
        """The share of blocks that sharing saved, over all steps (paper, Fig. 15)."""
        return 1 - self.block_steps / self.table_entry_steps if self.table_entry_steps else 0.0

    def on_event(self, event: Event) -> None:
        """Count one event."""
        match event:
            case ev.StepScheduled():  # the events of every step come first
                self.note_memory(event)
            case ev.StepFinished():
                self.note_step(event.num_query_tokens, event.seconds, event.num_generated)
            case ev.EngineStarted():
                self.block_size = event.block_size
                self.max_model_len = event.max_model_len
                self.blocks_total = event.num_blocks
            case ev.TokensComputed():
                self.tokens_recomputed += event.recomputed
            case ev.BlockCopied():
                self.blocks_copied += 1
            case ev.TokensAccepted():
                self.num_drafts += 1
                self.tokens_drafted += event.num_drafted
                self.tokens_accepted += event.num_accepted
                at, more = self.tokens_accepted_at, event.num_drafted - len(self.tokens_accepted_at)
                self.tokens_accepted_at = tuple(n + (i < event.num_accepted) for i, n in enumerate(at + (0,) * more))
            case ev.BlocksRolledBack():
                self.blocks_rolled_back += len(event.blocks)
            case ev.BlocksPassed():
                self.blocks_passed += len(event.blocks)
            case ev.RequestAdmitted():
                self.prefix_cache_query_tokens += event.num_looked_up
            case ev.PrefixReused() if event.source == "cache":
                self.prefix_cache_hit_tokens += event.num_found(self.block_size)
            case ev.BlockEvicted() if event.reason == "room":
                self.prefix_cache_evictions += 1
            case ev.SwappedOut():
                self.blocks_swapped_out += len(event.pairs)
            case ev.SwappedIn():
                self.blocks_swapped_in += len(event.pairs)
            case ev.RequestPreempted():
                if event.mode == "swap":
                    self.preempted_by_swap += 1
                else:
                    self.preempted_by_recompute += 1
            case ev.BlocksStored():
                self.blocks_stored += len(event.blocks)
            case ev.BlocksLoaded():
                self.blocks_loaded += len(event.blocks)
            case ev.HostBlockDropped(reason="to disk"):
                self.blocks_stored += 1
            case ev.BlockDemoted():
                self.blocks_demoted += 1
            case ev.BlocksPromoted():
                self.blocks_promoted += len(event.pairs)
            case ev.RequestFinished():
                self.finished_requests += 1
            case ev.SequenceFinished():
                self.contiguous.internal_fragmentation -= event.slot_steps_reserved
                self.contiguous.reserved += event.slot_steps_reserved

    def note_step(self, num_query_tokens: int, seconds: float, num_generated: int) -> None:
        """Count a finished step. (This and `note_memory` correspond to the two events that come with every step.
        Without listeners, the engine calls them directly and makes no events.)"""
        self.steps += 1
        self.step_seconds += seconds
        self.query_tokens += num_query_tokens
        self.generated_tokens += num_generated

    def note_memory(self, step: ev.StepScheduled | StepUsage) -> None:
        """Count the memory that running requests held during the step."""
        self.blocks_used, self.blocks_cached = step.blocks_used, step.blocks_cached
        self.blocks_saved = step.table_entries - step.blocks_used
        self.peak_blocks_used = max(self.peak_blocks_used, step.blocks_used)
        self.table_entry_steps += step.table_entries
        self.block_steps += step.blocks_used
        self.paged.internal_fragmentation += step.slots_unfilled
        self.paged.tokens += step.blocks_used * self.block_size - step.slots_unfilled
        self.contiguous.tokens += step.num_tokens
        self.contiguous.internal_fragmentation += step.num_sequences * self.max_model_len - step.num_tokens


def stats_of(events: Iterable[Event]) -> Stats:
    """Return the statistics of a run with these events."""
    stats = Stats()
    for event in events:
        stats.on_event(event)
    return stats
