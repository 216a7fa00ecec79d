"""A block manager for models with groups of layers, where some groups see only a window of the last tokens.

It is a `BlockManager` with these differences:

- A sequence has a block table for each group (`grouped_table.py`). A token takes a slot in each.
- When a step has been committed, a sequence gives back the blocks that lie wholly before the next token's window,
  because no later token sees them (the invariant window-content). Their contents may stay in the prefix cache.
- The prefix cache has blocks of each group (`grouped_prefix_cache.py`). It keeps full blocks only.

*Admission.* In a group with a window, a sequence holds at most the blocks of one window and of the tokens that are
being computed. In the other groups it holds all its blocks. Admission counts this many blocks (`blocks_alone`).

*Several sequences of a request* share the blocks of their common beginning. After they are dropped, they are computed
again one after another (`Scheduler._whole`), and each begins with the blocks of an earlier one. The earlier one's
windows have passed these blocks by then. So the request gives nothing back until all its sequences have caught up. Its
admission counts blocks as if no layer had a window.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from minipaged.contracts import BlockTable
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.grouped_prefix_cache import GroupedPrefixCache
from minipaged.engine.grouped_table import GroupedTable, first_seen
from minipaged.engine.memory import MemoryParts
from minipaged.engine.sequence import Request, RequestState, SequenceState
from minipaged.events import (
    HOLE,
    BlockCached,
    BlocksPassed,
    PrefixReused,
)
from minipaged.params import EngineConfig


def most_at_once(max_num_batched_tokens: int, async_scheduling: bool) -> int:
    """The most tokens of a sequence that are being computed at one time: its next chunk may be launched before the last
    one is committed."""
    return max_num_batched_tokens * (2 if async_scheduling else 1)


def blocks_alone(windows: Sequence[int | None], num_tokens: int, block_size: int, at_once: int) -> int:
    """The most blocks that one sequence holds on its way to `num_tokens`, in all groups. `at_once`: `most_at_once`."""
    whole, needed = -(-num_tokens // block_size), 0  # rounded up
    for window in windows:
        held = num_tokens if window is None else window - 1 + at_once  # what is computed, and what its first token sees
        needed += min(whole, (held + block_size - 2) // block_size + 1)  # it may begin within a block
    return needed


def pool_tokens(config: EngineConfig) -> int:
    """The longest sequence, in tokens, that the pool holds if it has it to itself; at most 2^30."""
    at_once = most_at_once(config.max_num_batched_tokens, config.async_scheduling)

    def needed(num_tokens: int) -> int:
        return blocks_alone(config.group_windows, num_tokens, config.block_size, at_once)

    return bisect_right(range(1, 1 << 30), config.num_blocks, key=needed)


class GroupedBlockManager(BlockManager):
    """Paged memory with a block table for each group of layers."""

    has_windows = True

    def __init__(self, *parts: *MemoryParts) -> None:
        super().__init__(*parts)
        config: EngineConfig = parts[0]
        self.windows = config.group_windows
        self.num_groups = len(config.group_windows)
        self._holes = [0] * self.num_groups  # by group, in all tables on the device
        self._most_at_once = most_at_once(config.max_num_batched_tokens, config.async_scheduling)
        self._nodes: GroupedPrefixCache | None = None
        if config.enable_prefix_caching:
            self._nodes = GroupedPrefixCache(config.block_size, self.allocator, config.group_windows)
            self.prefix_cache = self._nodes  # type: ignore[assignment]  # for methods that both kinds have

    @property
    def num_filled(self) -> int:
        return self.num_groups * self.num_tokens - self.block_size * sum(self._holes)

    @property
    def entries_by_group(self) -> Sequence[int]:
        logical = (self.num_entries + sum(self._holes)) // self.num_groups  # logical blocks, of all tables
        return [logical - holes for holes in self._holes]

    # --- Available blocks -------------------------------------------------------------------------

    def _blocks_alone(self, num_tokens: int) -> int:
        return blocks_alone(self.windows, num_tokens, self.block_size, self._most_at_once)

    def blocks_of_prompt(self, request: Request) -> int:
        return self._blocks_alone(len(request.prompt_token_ids))

    def most_blocks(self, request: Request) -> int:
        if request.num_sequences > 1:
            return self.num_groups * super().most_blocks(request)
        return self._blocks_alone(len(request.prompt_token_ids) + request.max_output_tokens - 1)

    def blocks_needed(self, work: Sequence[tuple[SequenceState, int]]) -> int:
        needed = sum(sequence.table.blocks_needed(num_tokens) for sequence, num_tokens in work)
        return needed - self.num_groups * (needed - super().blocks_needed(work))  # all groups share last blocks alike

    def blocks_to_admit(self, request: Request) -> int:
        if len(request.sequences) > 1:
            if request.state is RequestState.SWAPPED:
                return super().blocks_to_admit(request)
            return self.num_groups * self._blocks_for_all(request)
        # A prompt that was swapped out halfway needs no more than a whole one: it gives back blocks on its way.
        needed = self._blocks_alone(len(request.sequences[0].tokens))
        if request.state is RequestState.WAITING and self._nodes:
            for i, block in enumerate(self._match(request)):
                # A block that only the cache holds counts as available. One that a window will pass saves nothing.
                in_use = block != HOLE and not self._nodes.is_evictable(block)
                needed -= in_use and self.windows[i % self.num_groups] is None
        return needed

    def still_fits(self, request: Request) -> bool:
        """A request that is admitted may evict blocks within a window without which another one's hit is lost."""
        return self.blocks_to_admit(request) <= self.num_available

    def num_cached_tokens(self, request: Request) -> int:
        if request.state is not RequestState.WAITING:
            return 0
        return len(self._match(request)) // self.num_groups * self.block_size

    def _match(self, request: Request) -> list[int]:
        """The entries with which the request can begin, from the prefix cache. None with several sequences: each would
        need blocks that the windows of those before it have passed."""
        if self._nodes is None or not request.reads_prefix_cache or len(request.sequences) > 1:
            return []
        sequence = request.sequences[0]
        return self._nodes.match(sequence.key_tokens, _table(sequence).found)

    # --- Growing ----------------------------------------------------------------------------------

    def _entries(self, table: BlockTable) -> Sequence[int]:
        assert isinstance(table, GroupedTable)
        return table.entries

    def new_table(self) -> BlockTable:
        return GroupedTable(self.block_size, self.allocator, self.windows)

    def begin(self, request: Request, sequence: SequenceState, *, within_block: bool = True) -> None:
        entries = self._match(request)
        source: Literal["cache", "sibling"] = "cache"
        for sibling in request.sequences:
            if sibling is sequence:
                break
            shared = min(self._shared_blocks(sequence, sibling), sibling.num_computed // self.block_size)
            if shared * self.num_groups > len(entries):
                entries, source = self._seen_after(sibling.entries[: shared * self.num_groups]), "sibling"
        if not entries:
            return
        sequence.table.adopt(entries)
        self._count(sequence, 1)
        self._writer.table_changed(sequence, 0)
        if self._nodes:
            self._nodes.reused(sequence.table.blocks)
        if source == "cache":
            sequence.num_published = sequence.num_computed // self.block_size
        self._emit(PrefixReused(sequence.sequence_id, tuple(entries), source, sequence.num_computed))
        if sequence is request.sequences[-1] and not catches_up(request):  # it has all but a token
            self._give_back_others(request, sequence)

    def _seen_after(self, entries: Sequence[int]) -> list[int]:
        """These entries with holes in place of blocks that the next token does not see."""
        position = len(entries) // self.num_groups * self.block_size
        first = [first_seen(window, position) // self.block_size for window in self.windows]
        return [
            block if i // self.num_groups >= first[i % self.num_groups] else HOLE for i, block in enumerate(entries)
        ]

    def _tell_cached(self, sequence: SequenceState, logical: int, block: int, num_tokens: int) -> None:
        assert self._nodes
        self._emit(BlockCached(sequence.sequence_id, logical, block, self._nodes.hash_of(block), num_tokens))

    def keep_last(self, sequence: SequenceState) -> None:
        """Do nothing: only full blocks are kept."""

    def _count(self, sequence: SequenceState, sign: int) -> None:
        super()._count(sequence, sign)
        self._count_holes(_table(sequence).holes, sign)

    def _count_holes(self, holes: Sequence[int], sign: int) -> None:
        self._holes = [before + sign * more for before, more in zip(self._holes, holes, strict=True)]

    # --- Giving back ------------------------------------------------------------------------------

    def give_back(self, request: Request, sequence: SequenceState, num_computed: int) -> None:
        if catches_up(request):
            return  # a sequence that has yet to begin may share these blocks
        if sequence is request.sequences[-1]:  # the last to catch up
            self._give_back_others(request, sequence)
        self._give_back(sequence, num_computed)

    def _give_back_others(self, request: Request, last: SequenceState) -> None:
        """Give back what the other sequences of the request have kept until the last one has caught up."""
        for other in request.sequences:
            if other is not last:
                self._give_back(other, len(other.tokens) - 1)  # its last token may be in flight

    def _give_back(self, sequence: SequenceState, num_computed: int) -> None:
        if passed := _table(sequence).give_back(num_computed):
            entries, blocks = zip(*passed, strict=True)
            self.num_entries -= len(blocks)
            for entry in entries:
                self._holes[entry % self.num_groups] += 1
            if self._nodes:
                self._nodes.released(blocks)
            self._emit(BlocksPassed(sequence.sequence_id, entries, blocks))

    def free(self, sequence: SequenceState) -> None:
        holes = [0] * self.num_groups if sequence.swapped else [*_table(sequence).holes]
        super().free(sequence)
        self._count_holes(holes, -1)


def catches_up(request: Request) -> bool:
    """Whether several sequences of the request were dropped and are being computed again, one after another."""
    return len(request.sequences) > 1 and any(sequence.num_remaining > 1 for sequence in request.sequences)


def _table(sequence: SequenceState) -> GroupedTable:
    assert isinstance(sequence.table, GroupedTable)
    return sequence.table
