"""The memory of an engine: which sequence holds which blocks. Scheduler, commit and checks use only this interface.

`BlockManager` (`block_manager.py`) is the engine's own memory: paging. Another one, `Engine(memory=...)`, may hand out
blocks by other rules. One such rule is contiguous reservation: a request gets one piece for all that it may ever hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from minipaged.contracts import BlockAllocator, BlockTable, Tier
from minipaged.engine.policy import most_blocks
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.engine.sequence import Request, RequestState, SequenceState
from minipaged.engine.step_writer import StepWriters
from minipaged.events import Emit
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves


class AllocStatus(Enum):
    """Whether a request's blocks are available."""

    OK = "ok"
    LATER = "later"
    """Not now, but once other requests have finished."""
    NEVER = "never"
    """The request needs more blocks than the whole pool has."""


class Memory(ABC):
    """The block tables of one engine. A method that raises OutOfBlocks has changed nothing, except `append_all`.

    Whenever a table changes its blocks, the memory notifies the writer (`StepWriters.table_changed`), updates
    `num_entries` and `num_tokens`, and emits an event: TokensComputed at every `append`, BlocksFreed, SequenceForked,
    BlockCopied, SwappedOut and SwappedIn. It updates two fields of the `SequenceState`: `swapped`, and `most_computed`,
    from which recomputation is counted.
    """

    block_size: int
    allocator: BlockAllocator
    """The allocator of the device's pool."""
    host_allocator: BlockAllocator | None = None
    """The allocator of the host's pool; None if nothing can be swapped."""
    prefix_cache: PrefixCache | None = None
    num_entries: int = 0
    """Block-table entries of all tables on the device."""
    num_tokens: int = 0
    """Tokens of all tables on the device. Each fills a slot, in each group of layers."""
    num_groups: int = 1
    """The groups of the model's layers (`grouped_table.py`). A logical block takes a block in each."""
    has_windows: bool = False
    """Whether blocks are given back while their sequence goes on (`give_back`)."""
    num_spare: int = 0
    """While requests are admitted: the available blocks that none of them was promised."""

    # --- Available blocks -------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: the free ones and those that only the prefix cache holds."""
        return self.allocator.num_free + self.num_cached

    @property
    def num_filled(self) -> int:
        """Slots filled by all tables on the device, in all groups of layers."""
        return self.num_tokens

    @property
    def entries_by_group(self) -> Sequence[int]:
        """`num_entries`, divided by groups of layers."""
        return [self.num_entries]

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.allocator.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix cache holds."""
        return self.prefix_cache.num_evictable if self.prefix_cache else 0

    @property
    def held_beside_tables(self) -> Iterable[int]:
        """Device blocks referenced from outside any table, one entry per reference: with paging, those of the prefix
        cache. Debug mode checks that there are no references besides these and the tables'."""
        return self.prefix_cache.blocks if self.prefix_cache else ()

    @property
    def num_host_available(self) -> int:
        """Host blocks that can be taken now."""
        return self.host_allocator.num_free if self.host_allocator else 0

    @property
    def held_on_host(self) -> Iterable[int]:
        """Host blocks referenced from outside any table, one entry per reference: those of the floor below the prefix
        cache."""
        return ()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def blocks_of_prompt(self, request: Request) -> int:
        """The blocks that the request's prompt alone needs."""
        return self.blocks_for(len(request.prompt_token_ids))

    def most_blocks(self, request: Request) -> int:
        """The most blocks that the request can come to hold (`policy.most_blocks`).

        A memory that gives a request more blocks must override this, or it will accept requests that can never be
        admitted.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        return most_blocks(num_prompt_tokens, request.max_output_tokens, request.num_sequences, self.block_size)

    def can_admit(self, request: Request, spare: int = 0) -> AllocStatus:
        """Whether there are enough blocks for everything the request has to run, and `spare` blocks more."""
        if self.most_blocks(request) > self.allocator.num_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if self.blocks_to_admit(request) + spare <= self.num_available else AllocStatus.LATER

    def still_fits(self, request: Request) -> bool:
        """Whether a request that the policy has just admitted has its blocks after those admitted with it."""
        return True

    @abstractmethod
    def blocks_to_admit(self, request: Request) -> int:
        """The number of available blocks that the waiting request takes for everything it has to run."""

    def num_cached_tokens(self, request: Request) -> int:
        """The tokens of a waiting request without blocks that are in the prefix cache now, in full blocks."""
        if not self.prefix_cache or not request.reads_prefix_cache or request.state is not RequestState.WAITING:
            return 0
        first = request.sequences[0]
        self.prefix_cache.look_up(first.key_tokens, first.found)
        return len(first.found) * self.prefix_cache.block_size

    @abstractmethod
    def blocks_needed(self, work: Sequence[tuple[SequenceState, int]]) -> int:
        """The blocks that this work of one request takes, copies included. `work`: sequences with numbers of tokens."""

    # --- Tables: growing and giving back -----------------------------------------------------------

    @abstractmethod
    def new_table(self) -> BlockTable:
        """Return an empty table."""

    @abstractmethod
    def begin(self, request: Request, sequence: SequenceState) -> None:
        """Start an empty table with blocks that are already computed, if there are any."""

    def load(self, request: Request, costs: Costs) -> None:  # noqa: B027
        """Start an admitted request's first table, if empty, with blocks that are computed but not on this device: on
        the floor below, or by other engines.

        Enough blocks are available for the whole request. `costs`: what moving and computing them takes.
        """

    @abstractmethod
    def append(self, sequence: SequenceState, num_tokens: int) -> None:
        """Take slots for the sequence's next `num_tokens` tokens. Raises OutOfBlocks."""

    def append_all(self, work: Iterable[tuple[SequenceState, int]]) -> None:
        """Take slots for all the work of a step. If it raises OutOfBlocks, some sequences already have theirs."""
        for sequence, num_tokens in work:
            self.append(sequence, num_tokens)

    @abstractmethod
    def fork(self, request: Request, parent: SequenceState, child: SequenceState) -> None:
        """Let `child`, whose table is empty, hold the tokens that `parent` holds. Raises OutOfBlocks."""

    def trim(self, sequence: SequenceState, num_tokens: int) -> tuple[int, ...]:
        """Give back the slots after the sequence's first `num_tokens` tokens, whose tokens were drafted and did not
        stand. Returns the blocks given back. (The prefix cache has none of them: it gets verified tokens.)"""
        table = sequence.table
        blocks, num_slots = tuple(table.blocks), table.num_tokens
        table.trim(num_tokens)
        given_back = blocks[len(table.blocks) :]
        self.num_entries -= len(given_back)
        self.num_tokens -= num_slots - num_tokens
        return given_back

    def publish(self, sequence: SequenceState, num_tokens: int) -> None:  # noqa: B027
        """Let others find the computed K/V of the sequence's first `num_tokens` tokens. Needs a `prefix_cache`."""

    def keep_last(self, sequence: SequenceState) -> None:  # noqa: B027
        """Let others find the last block, although it is not full, of a sequence that is about to end.

        All tokens of the sequence are computed; the one with which it ends is not among them yet.
        """

    def give_back(self, request: Request, sequence: SequenceState, num_computed: int) -> None:  # noqa: B027
        """Give back the blocks that no layer sees any more. `num_computed`: the sequence's tokens that have K/V in all
        committed steps."""

    @abstractmethod
    def free(self, sequence: SequenceState) -> None:
        """Give back all blocks of the sequence, on the device or on the host."""

    # --- Swapping (paper, section 4.5), and the step -----------------------------------------------

    def can_swap_out(self, request: Request) -> bool:
        """Whether the host has room for the request's blocks."""
        return self.host_allocator is not None and len(request.filled_slots(self.block_size)) <= self.num_host_available

    def swap_out(self, request: Request) -> None:
        """Move the request from device blocks to host blocks. Raises OutOfBlocks."""
        raise NotImplementedError

    def swap_in(self, request: Request) -> None:
        """Move the request from host blocks to device blocks. Raises OutOfBlocks."""
        raise NotImplementedError

    @abstractmethod
    def take_moves(self) -> BlockMoves:
        """Return the block moves since the last call, for the coming step, which is launched now."""

    def moves_done(self) -> None:  # noqa: B027
        """Note that the oldest launched step has run, with its moves."""

    def moves_lost(self) -> None:
        """Forget the moves of all steps that are planned or launched, and not known to be done: the steps have failed,
        or nobody waits for them."""
        self.take_moves()


MemoryParts = tuple[EngineConfig, Tier, Callable[[int], BlockAllocator] | None, StepWriters, Emit]
"""What a memory is made of: the settings, the tier's parts, a maker of allocators to use instead of the tier's (or
None), the writers to notify of changed tables, and the receiver of events."""
MakeMemory = Callable[[*MemoryParts], Memory]
"""Makes a memory: a class or function."""
