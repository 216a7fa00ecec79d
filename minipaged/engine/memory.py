"""The memory of an engine: who holds which blocks. What scheduler, commit and checks ask of it, and nothing else.

`BlockManager` (`block_manager.py`) is the engine's own: paging. Another one, `Engine(memory=...)`, may hand out blocks
by other rules; contiguous reservation, for one, where a request gets one piece for all that it may ever hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from minipaged.contracts import BlockAllocator, BlockTable, Tier
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.engine.sequence import Request, SequenceState
from minipaged.engine.step_writer import StepWriters
from minipaged.events import Emit
from minipaged.params import EngineConfig
from minipaged.steps import BlockMoves


class AllocStatus(Enum):
    """Whether a request's blocks can be had."""

    OK = "ok"
    LATER = "later"
    """Not now, but once others have finished."""
    NEVER = "never"
    """Not even with the whole pool to itself."""


class Memory(ABC):
    """Block tables of one engine. What raises OutOfBlocks has changed nothing, but for `append_all`.

    Whenever a table changes its blocks, the memory tells the writer (`StepWriters.table_changed`), keeps `num_entries`
    and `num_tokens`, and emits what happened: TokensComputed at every `append`, BlocksFreed, SequenceForked,
    BlockCopied, SwappedOut and SwappedIn. It keeps what a `SequenceState` knows of its table: `swapped`, and
    `most_computed`, by which recomputing is told.
    """

    block_size: int
    allocator: BlockAllocator
    """Of the device's pool."""
    host_allocator: BlockAllocator | None = None
    """Of the host's pool; None where nothing can be swapped."""
    prefix_cache: PrefixCache | None = None
    num_entries: int = 0
    """Block-table entries of all tables on the device, and `num_tokens`, the slots that they fill."""
    num_tokens: int = 0

    # --- How much room there is -------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: the free ones and those that only the prefix cache holds."""
        return self.allocator.num_free + self.num_cached

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
        """The device's blocks of which a reference is no table's, each as often: of paging those that the prefix cache
        has. With the tables' they are all there are, which debug mode checks."""
        return self.prefix_cache.blocks if self.prefix_cache else ()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def most_blocks(self, request: Request) -> int:
        """Most blocks the request can come to hold; by paging, only the prompt's full blocks are sure to be shared.
        A memory that gives more says so here, or a request is taken that never gets in.

        The last token is chosen but never run, so it needs no slot.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        if request.max_output_tokens == 1:  # all that is ever run is the prompt
            return self.blocks_for(num_prompt_tokens)
        shared = num_prompt_tokens // self.block_size
        each = self.blocks_for(num_prompt_tokens + request.max_output_tokens - 1)
        return shared + request.num_sequences * (each - shared)

    def can_admit(self, request: Request, spare: int = 0) -> AllocStatus:
        """Whether the blocks for everything the request has to run are there, and `spare` more beside them."""
        if self.most_blocks(request) > self.allocator.num_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if self.blocks_to_admit(request) + spare <= self.num_available else AllocStatus.LATER

    @abstractmethod
    def blocks_to_admit(self, request: Request) -> int:
        """How many of the available blocks the waiting request takes for everything it has to run."""

    @abstractmethod
    def blocks_needed(self, work: Sequence[tuple[SequenceState, int]]) -> int:
        """Blocks to take so that each of one request's sequences can run so many more tokens, copies included."""

    # --- Tables that grow and go -------------------------------------------------------------------

    @abstractmethod
    def new_table(self) -> BlockTable:
        """An empty one."""

    @abstractmethod
    def begin(self, request: Request, sequence: SequenceState) -> None:
        """Let an empty table begin with what is already computed, if something is."""

    def load(self, request: Request) -> None:  # noqa: B027
        """The request, for all of whose blocks there is room, has come in: let its first table, if that is empty, begin
        with what other engines have computed."""

    @abstractmethod
    def append(self, sequence: SequenceState, num_tokens: int) -> None:
        """Slots for the sequence's next `num_tokens` tokens. Raises OutOfBlocks."""

    def append_all(self, work: Iterable[tuple[SequenceState, int]]) -> None:
        """`append` for each of these: what a step runs. Raises OutOfBlocks; then some have their slots."""
        for sequence, num_tokens in work:
            self.append(sequence, num_tokens)

    @abstractmethod
    def fork(self, request: Request, parent: SequenceState, child: SequenceState) -> None:
        """`child` (whose table is empty) holds the tokens that `parent` holds. Raises OutOfBlocks."""

    def publish(self, sequence: SequenceState, num_tokens: int) -> None:  # noqa: B027
        """The K/V of the sequence's first `num_tokens` tokens are computed, and others may find them. Only called where
        there is a `prefix_cache`."""

    @abstractmethod
    def free(self, sequence: SequenceState) -> None:
        """Give back all blocks of the sequence, be they on the device or on the host."""

    # --- Swapping (paper, section 4.5), and the step -----------------------------------------------

    def can_swap_out(self, request: Request) -> bool:
        """Whether the host has room for the request's blocks."""
        return False

    def swap_out(self, request: Request) -> None:
        """Give the request host blocks for its device blocks. Raises OutOfBlocks."""
        raise NotImplementedError

    def swap_in(self, request: Request) -> None:
        """Give the request device blocks for its host blocks. Raises OutOfBlocks."""
        raise NotImplementedError

    @abstractmethod
    def take_moves(self) -> BlockMoves:
        """The block moves since the last call, for the coming step."""


MakeMemory = Callable[[EngineConfig, Tier, Callable[[int], BlockAllocator] | None, StepWriters, Emit], Memory]
"""A class of memories, or a function: given the settings, the tier's parts, what makes allocators in place of the
tier's (or None), who is told of every table that changes, and of every event."""
