"""The block manager: every change of a block table goes through here (paper, section 4.3, the KV cache manager).

It connects parts that do not know each other: the allocator of the device pool, the allocator of the host pool, the
prefix cache, and the sequences' block tables. It makes no decisions; the scheduler does. It records the block moves
that the runner has to make before the coming step.

The available blocks are the free ones and those that only the prefix cache holds. `_make_room` evicts from the cache
just before blocks are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from minipaged.contracts import BlockAllocator, BlockTable, Tier
from minipaged.engine.checked_allocator import CheckedAllocator
from minipaged.engine.memory import Memory
from minipaged.engine.partial_hits import Beginning, beginning_of, keep
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.engine.sequence import Request, RequestState, SequenceState
from minipaged.engine.step_writer import StepWriters
from minipaged.events import (
    BlockCached,
    BlockCopied,
    BlockDeduplicated,
    BlockEvicted,
    BlocksFreed,
    Emit,
    PrefixReused,
    SequenceForked,
    SwappedIn,
    SwappedOut,
    TokensComputed,
)
from minipaged.params import EngineConfig
from minipaged.steps import BlockMoves, CopyPair


class BlockManager(Memory):
    """Paged memory: block tables over one device pool and one host pool."""

    def __init__(
        self,
        config: EngineConfig,
        tier: Tier,
        allocator: Callable[[int], BlockAllocator] | None,
        writer: StepWriters,
        emit: Emit,
    ) -> None:
        """`writer` is notified of every table that changes."""

        def pool(num_blocks: int) -> BlockAllocator:
            if allocator is None and not config.debug:
                return tier.block_allocator(num_blocks)
            return CheckedAllocator(num_blocks, allocator or tier.block_allocator)

        self.block_size = config.block_size
        self.allocator = pool(config.num_blocks)
        self.host_allocator = pool(config.num_swap_blocks) if config.num_swap_blocks else None
        self.prefix_cache = PrefixCache(config.block_size, self.allocator) if config.enable_prefix_caching else None
        self._swap_out: list[CopyPair] = []  # block moves since the last `take_moves`
        self._swap_in: list[CopyPair] = []
        self._copy: list[CopyPair] = []
        self._debug = config.debug
        self._make_table = tier.block_table
        self._writer = writer
        self._emit = emit

    # --- Available blocks -------------------------------------------------------------------------

    def blocks_needed(self, work: Sequence[tuple[SequenceState, int]]) -> int:
        """The blocks that this work of one request takes, copies included. `work`: sequences with numbers of tokens."""
        needed = sum(sequence.table.blocks_needed(num_tokens) for sequence, num_tokens in work)
        if len(work) < 2:
            return needed
        # Only sequences of one request share a block that is not full. If all its holders write into it, the last one
        # finds itself the only holder and needs no copy.
        writers = Counter(
            (self._pool_of(sequence), sequence.table.blocks[-1])
            for sequence, num_tokens in work
            if num_tokens and sequence.table.num_tokens % self.block_size
        )
        return needed - sum(
            holders > 1 and pool.ref_count(block) == holders for (pool, block), holders in writers.items()
        )

    def _pool_of(self, sequence: SequenceState) -> BlockAllocator:
        """The allocator of the blocks in the sequence's table."""
        return self.host_allocator if sequence.swapped and self.host_allocator else self.allocator

    def blocks_to_admit(self, request: Request) -> int:
        """The number of available blocks that the waiting request takes for everything it has to run."""
        if request.state is RequestState.SWAPPED:  # its blocks, and those that its next step adds
            needed = len(request.filled_slots(self.block_size))
            return needed + self.blocks_needed([(s, s.num_remaining) for s in request.sequences])
        needed = self._blocks_for_all(request)
        if self.prefix_cache and request.reads_prefix_cache:
            cached = beginning_of(self.prefix_cache, request.sequences[0].key_tokens, within_block=False).blocks
            # A cached block that only the cache holds counts as available.
            needed -= sum(not self.prefix_cache.is_evictable(block) for block in cached)
        return needed

    def _blocks_for_all(self, request: Request) -> int:
        """The blocks of all its tokens. Full blocks with which several of its sequences begin count once."""
        needed = 0
        for i, sequence in enumerate(request.sequences):
            needed += self.blocks_for(len(sequence.tokens))
            needed -= max((self._shared_blocks(sequence, s) for s in request.sequences[:i]), default=0)
        return needed

    def _shared_blocks(self, sequence: SequenceState, sibling: SequenceState) -> int:
        """The number of full blocks with which both sequences begin; `sequence` keeps at least one token to run."""
        most = min(len(sequence.tokens) - 1, len(sibling.tokens))
        common = min(most, len(sequence.tokens) - len(sequence.output_token_ids))  # the prompt is the same
        while common < most and sequence.tokens[common] == sibling.tokens[common]:
            common += 1
        return common // self.block_size

    # --- Growing ----------------------------------------------------------------------------------

    def _entries(self, table: BlockTable) -> Sequence[int]:
        """The table as a runner gets it (`SequenceState.entries`)."""
        return table.blocks

    def new_table(self) -> BlockTable:
        return self._make_table(self.block_size, self.allocator)

    def begin(self, request: Request, sequence: SequenceState, *, within_block: bool = True) -> None:
        """Start an empty table with blocks already computed, from the prefix cache or a sequence of the same request.

        Sharing between a request's sequences matters after recomputation: those that shared blocks before must share
        them again, or a request that fitted the pool would no longer fit.
        """
        found = Beginning([], 0)
        if self.prefix_cache and request.reads_prefix_cache:
            within_block &= len(request.sequences) == 1  # it is being admitted: the copy is made in this step
            found = beginning_of(self.prefix_cache, sequence.key_tokens, self.num_spare, within_block=within_block)
        for sibling in request.sequences:
            if sibling is sequence:
                break
            shared = min(self._shared_blocks(sequence, sibling), sibling.table.num_tokens // self.block_size)
            if shared > len(found.blocks):
                found = Beginning(sibling.table.blocks[:shared], shared * self.block_size, "sibling")
        if not found.blocks:
            return
        sequence.table.adopt(found.blocks)
        sequence.table.trim(found.num_tokens)  # of the last block it may share only the first slots
        self._count(sequence, 1)
        self._writer.table_changed(sequence, 0)
        if self.prefix_cache:
            self.prefix_cache.reused(found.blocks)
            if found.takes_over:
                self.prefix_cache.drop(found.blocks[-1])
                self._emit(BlockEvicted(found.blocks[-1], "taken over"))
        self.num_spare -= found.num_pinned
        if found.source == "cache":
            sequence.num_published = found.num_tokens // self.block_size
        self._emit(PrefixReused(sequence.sequence_id, tuple(found.blocks), found.source, found.num_tokens))

    def append(self, sequence: SequenceState, num_tokens: int) -> None:
        """Take slots for the sequence's next `num_tokens` tokens. Raises OutOfBlocks, having changed nothing."""
        table = sequence.table
        start, held = table.num_tokens, len(self._entries(table))
        self._make_room(table.blocks_needed(num_tokens))
        copies = table.append(num_tokens)
        for entry, (source, destination) in enumerate(copies, held - len(copies)):
            self._copy.append((source, destination))
            self._writer.table_changed(sequence, entry)
            holders = self.allocator.ref_count(source) + 1  # before the copy
            self._emit(BlockCopied(sequence.sequence_id, entry, source, destination, holders))
        new = len(self._entries(table)) - held
        if new:
            self._writer.table_changed(sequence, held)
        self.num_entries += new
        self.num_tokens += num_tokens
        recomputed = max(0, min(sequence.most_computed, table.num_tokens) - start)
        if table.num_tokens >= sequence.most_computed:
            sequence.most_computed = 0
        if recomputed or self._emit.heard:
            blocks = tuple(self._entries(table)[held:])
            self._emit(TokensComputed(sequence.sequence_id, table.num_tokens, blocks, recomputed))

    def fork(self, request: Request, parent: SequenceState, child: SequenceState) -> None:
        """Let `child`, whose table is empty, share all blocks of `parent`."""
        child.table = parent.table.fork()
        self._count(child, 1)
        child.num_published = parent.num_published
        child.most_computed = parent.most_computed
        self._emit(SequenceForked(request.request_id, parent.sequence_id, child.sequence_id))

    def publish(self, sequence: SequenceState, num_tokens: int) -> None:
        """Add to the prefix cache the blocks newly filled by the sequence's first `num_tokens` tokens.

        The table may have more slots: those of the step in flight, whose tokens are not all known or computed yet.
        """
        num_full = num_tokens // self.block_size
        if not self.prefix_cache or num_full == sequence.num_published:
            return
        tokens = sequence.key_tokens[: num_full * self.block_size]
        published = self.prefix_cache.publish(tokens, sequence.table, sequence.num_published)
        for logical, own, cached in published:
            if own == cached:
                self._tell_cached(sequence, logical, cached, self.block_size)
            else:
                self._writer.table_changed(sequence, logical)
                self._emit(BlockDeduplicated(sequence.sequence_id, logical, own, cached))
        sequence.num_published = num_full

    def keep_last(self, sequence: SequenceState) -> None:
        if (cache := self.prefix_cache) and (entry := keep(cache, sequence.key_tokens, sequence.table, self.allocator)):
            self._tell_cached(sequence, len(sequence.tokens) // self.block_size, entry.block, len(entry.tokens))

    def _tell_cached(self, sequence: SequenceState, logical: int, block: int, num_tokens: int) -> None:
        """Report a new entry of the prefix cache, and drop a partial entry that is only the beginning of it."""
        assert self.prefix_cache
        self._emit(BlockCached(sequence.sequence_id, logical, block, self.prefix_cache.hash_of(block), num_tokens))
        if (shorter := self.prefix_cache.redundant(block)) is not None:
            self.prefix_cache.drop(shorter)
            self._emit(BlockEvicted(shorter, "redundant"))

    def _count(self, sequence: SequenceState, sign: int) -> None:
        self.num_entries += sign * len(sequence.table.blocks)
        self.num_tokens += sign * sequence.table.num_tokens

    def _make_room(self, num_blocks: int) -> None:
        if self.prefix_cache and (short := num_blocks - self.allocator.num_free) > 0:
            for block in self.prefix_cache.evict(min(short, self.prefix_cache.num_evictable)):
                self._emit(BlockEvicted(block))

    # --- Giving back ------------------------------------------------------------------------------

    def free(self, sequence: SequenceState) -> None:
        """Give back all blocks of the sequence, on the device or on the host."""
        blocks, num_tokens = tuple(sequence.table.blocks), sequence.table.num_tokens
        sequence.table.trim(0)
        sequence.most_computed = max(sequence.most_computed, num_tokens)
        sequence.num_published = 0
        if sequence.swapped:
            sequence.swapped = False
            sequence.table = self.new_table()
        else:
            self.num_entries -= len(blocks)
            self.num_tokens -= num_tokens
            self._released(blocks)
        if num_tokens:
            self._writer.table_changed(sequence, 0)
            self._emit(BlocksFreed(sequence.sequence_id, blocks))

    def _released(self, blocks: Sequence[int]) -> None:
        if self.prefix_cache:
            self.prefix_cache.released(reversed(blocks))

    # --- Swapping (paper, section 4.5) ------------------------------------------------------------

    def swap_out(self, request: Request) -> None:
        """Move the request from device blocks to host blocks. Raises OutOfBlocks, having changed nothing."""
        assert self.host_allocator is not None
        pairs = self._move(request, self.host_allocator)
        self._swap_out += pairs
        self._emit(SwappedOut(request.request_id, tuple(pairs)))

    def swap_in(self, request: Request) -> None:
        """Move the request from host blocks to device blocks. Raises OutOfBlocks, having changed nothing."""
        self._make_room(len(request.filled_slots(self.block_size)))
        pairs = self._move(request, self.allocator)
        self._swap_in += pairs
        self._emit(SwappedIn(request.request_id, tuple(pairs)))

    def _move(self, request: Request, target: BlockAllocator) -> list[CopyPair]:
        """Relocate all tables of the request. A block that several of them hold is moved once and stays shared."""
        blocks = list(request.filled_slots(self.block_size))
        pairs = list(zip(blocks, target.allocate_many(len(blocks)), strict=True))
        new = dict(pairs)
        # `allocate` counted one holder of each block; the other table entries that hold it need references too.
        holders = Counter(block for sequence in request.sequences for block in sequence.table.blocks)
        try:
            target.share_many(new[block] for block, count in holders.items() for _ in range(count - 1))
        except BaseException:
            target.free_many(new.values())
            raise
        for sequence in request.sequences:
            old = tuple(sequence.table.blocks)
            sequence.table.relocate([new[block] for block in old], target)
            self._writer.table_changed(sequence, 0)
            sequence.num_published = 0
            sequence.swapped = target is self.host_allocator
            self._count(sequence, -1 if sequence.swapped else 1)
            if sequence.swapped:
                self._released(old)
        return pairs

    # --- Before and after a step ------------------------------------------------------------------

    def take_moves(self) -> BlockMoves:
        """Return the block moves recorded since the last call."""
        poison: list[int] = []
        if self._debug and isinstance(self.allocator, CheckedAllocator):
            poison = sorted(self.allocator.touched)
            self.allocator.touched.clear()
        moves = BlockMoves(tuple(self._swap_out), tuple(poison), tuple(self._swap_in), tuple(self._copy))
        self._released([source for source, _ in self._copy])  # they may be evicted once their copies are made
        self._swap_out, self._swap_in, self._copy = [], [], []
        return moves
