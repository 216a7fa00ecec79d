"""Floors below the prefix cache: what it evicts moves to host memory, and comes back by a hit.

    device pool    prefix cache   in use / evictable ──evict──► free
                                       │ demote   ▲
                                       ▼ (swap_out)│ promote (swap_in)
    host pool      floor          kept ──drop, for room──► free

The host pool is the one that swapping uses. A block of it is held by preempted requests, or by the floor, or free.
Only full blocks move down. The floor keeps its copy when a block comes back, so evicting it again moves nothing.

*Names.* Block numbers mean nothing across floors, and a hash is no proof. A block is named by a digest of all tokens
up to its end, chained: digest(name of its parent, its own tokens). A folder on disk can use the same names.

*Who owns what.* `HostFloor` owns one reference on each host block that it keeps, least recently used first. The
device's prefix cache does not know it. Preempted requests come first: what the floor keeps counts as available.

*Pins.* The moves of a step run by kind, not in the order in which they were planned: all `swap_out`, then all
`swap_in`. A host block that a promotion reads must not become the destination of a demotion planned after it, or it
would be overwritten first. So each host block that a move reads or writes is *pinned*: one more reference is held on
it until the step with that move has been committed (pinned-in-flight). A pinned block is never given back, so it can
be neither freed nor handed out. If all are pinned, an evicted block is lost, as without a floor.

Device blocks need no pin. The sequence that a block is loaded for holds it. An evicted block may be handed out in the
same step, because `swap_out` runs before everything that writes.

*In a step.* Admission counts the blocks of a promotion as blocks to compute. `load` pins what the floor has after the
prefix cache's blocks, appends device blocks for it, and records `swap_in` pairs, before the first chunk of the prompt.
The loaded blocks enter the prefix cache when the step is committed. Requests are loaded only when they are admitted,
so none is preempted between the plan and the move.

*Run-ahead.* The device works in order of launching. So a later step may load a block whose demotion is in flight.
`take_moves` begins a set of pins for each step; `moves_done` ends the oldest.

*A step that fails.* Nobody knows which moves of the steps in flight were made. `moves_lost` forgets every block that
they read or wrote, demotions and promotions. What is forgotten is computed, so a load that always fails cannot block
a request. Blocks of steps committed before stay.

*Break-even.* Blocks are kept only if carrying one takes less time than computing its tokens, by the cost model that
swapping has (`policy.py`). Both sides grow with the number of blocks, so this is one answer for a machine.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile

from minipaged.contracts import BlockAllocator, Tier
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.cached_blocks import NO_PARENT, CachedBlock
from minipaged.engine.policy import carry_seconds, recompute_seconds
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.engine.sequence import Request
from minipaged.engine.step_writer import StepWriters
from minipaged.events import BlockDemoted, BlocksPromoted, Emit, HostBlockDropped
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves

NAME_BYTES = 16
NO_NAME = b""
"""The parent's name of a sequence's first block."""


class HostFloor:
    """Host blocks by the names of their content, least recently used first, and pins on host blocks."""

    def __init__(self, allocator: BlockAllocator, emit: Emit) -> None:
        self._allocator = allocator
        self._emit = emit
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # name -> host block
        self._planned: list[int] = []  # pinned by moves of the step being planned, one entry per pin
        self._in_flight: deque[list[int]] = deque()  # the same for each launched step, the oldest first

    @property
    def held(self) -> Iterable[int]:
        """The host blocks that the floor holds, one entry per reference: those kept, and the pins."""
        return [*self._kept.values(), *self._pins]

    @property
    def num_available(self) -> int:
        """The number of kept blocks that could be given back now."""
        return len(self._kept) - len(set(self._kept.values()) & set(self._pins))

    @property
    def _pins(self) -> list[int]:
        return [*self._planned, *(block for step in self._in_flight for block in step)]

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Return the host blocks with these names, up to the first that is missing. Now they were used last, parents
        after their children, so that no child stays behind its parent."""
        found = [*takewhile(self._kept.__contains__, names)]
        for name in reversed(found):
            self._kept.move_to_end(name)
        return [self._kept[name] for name in found]

    def keep(self, name: bytes) -> int | None:
        """Return a pinned host block to fill with the content of this name; None if it is kept already, or if every
        block of the pool is held."""
        if name in self._kept:
            self._kept.move_to_end(name)
            return None
        self.give_back(1 - self._allocator.num_free)
        if not self._allocator.num_free:
            return None
        block = self._allocator.allocate()
        self._kept[name] = block
        self.pin([block])
        return block

    def give_back(self, num_blocks: int) -> None:
        """Free the least recently used blocks that are not pinned, at most `num_blocks`."""
        if num_blocks > 0:
            pins = set(self._pins)
            free = [name for name, block in self._kept.items() if block not in pins]
            for name in free[:num_blocks]:
                self._drop(name, "room")

    def _drop(self, name: bytes, reason: str) -> None:
        block = self._kept.pop(name)
        self._allocator.free(block)
        self._emit(HostBlockDropped(block, "room" if reason == "room" else "lost"))

    # --- Pins -------------------------------------------------------------------------------------

    def pin(self, blocks: Iterable[int]) -> None:
        """Hold these blocks until the step that is being planned is committed: a move reads or writes them."""
        for block in blocks:
            self._allocator.share(block)
            self._planned.append(block)

    def launched(self) -> None:
        """Note that the planned moves are on their way."""
        self._in_flight.append(self._planned)
        self._planned = []

    def moves_done(self) -> None:
        """End the pins of the oldest step in flight."""
        self._allocator.free_many(self._in_flight.popleft())

    def moves_lost(self) -> None:
        """Forget every block that a move not known to be done reads or writes, and end all pins."""
        pins, self._planned = self._pins, []
        self._in_flight.clear()
        unknown = set(pins)
        for name in [name for name, block in self._kept.items() if block in unknown]:
            self._drop(name, "lost")
        self._allocator.free_many(pins)


class FlooredBlockManager(BlockManager):
    """Paged memory whose prefix cache has a floor in host memory below it (`EngineConfig.kv_cache_tiers`)."""

    prefix_cache: PrefixCache
    host_allocator: BlockAllocator

    def __init__(
        self,
        config: EngineConfig,
        tier: Tier,
        allocator: Callable[[int], BlockAllocator] | None,
        writer: StepWriters,
        emit: Emit,
    ) -> None:
        super().__init__(config, tier, allocator, writer, emit)
        self.floor = HostFloor(self.host_allocator, emit)
        self._pays: bool | None = None  # whether carrying a block takes less time than computing it
        self._names: dict[int, tuple[CachedBlock, bytes]] = {}  # cached block -> its entry, and the entry's name

    @property
    def num_host_available(self) -> int:
        return self.host_allocator.num_free + self.floor.num_available

    @property
    def held_on_host(self) -> Iterable[int]:
        return self.floor.held

    # --- Down -------------------------------------------------------------------------------------

    def _make_room(self, num_blocks: int) -> None:
        if self._pays:
            for block in self.prefix_cache.next_evicted(num_blocks - self.allocator.num_free):
                self._demote(self.prefix_cache.entry_of[block])
        super()._make_room(num_blocks)

    def _demote(self, entry: CachedBlock) -> None:
        if len(entry.tokens) == self.block_size and (host := self.floor.keep(self._name(entry))) is not None:
            self._swap_out.append((entry.block, host))
            self._emit(BlockDemoted(entry.block, host))

    def _name(self, entry: CachedBlock) -> bytes:
        """The name of a cached block. Its parents are cached too, because children are evicted first."""
        chain: list[CachedBlock] = []
        name = NO_NAME
        while True:
            known, found = self._names.get(entry.block, (None, NO_NAME))
            if known is entry:  # else the block had another content then
                name = found
                break
            chain.append(entry)
            if entry.parent_block == NO_PARENT:
                break
            entry = self.prefix_cache.entry_of[entry.parent_block]
        for entry in reversed(chain):
            name = name_of(name, entry.tokens)
            self._names[entry.block] = entry, name
        return name

    # --- Up ---------------------------------------------------------------------------------------

    def load(self, request: Request, costs: Costs) -> None:
        sequence = request.sequences[0]
        if self._pays is None:
            self._pays = carry_seconds(costs, 1) < recompute_seconds(costs, self.block_size)
        if not self._pays or sequence.num_computed or not request.reads_prefix_cache:
            return
        held = self.prefix_cache.match(sequence.tokens).num_tokens // self.block_size
        most = (len(sequence.tokens) - 1) // self.block_size  # one token has to run
        found = self.floor.match(names_of(sequence.tokens, self.block_size, most)[held:])
        if not found:
            return
        self.floor.pin(found)  # first: making room moves other blocks down
        self.begin(request, sequence, within_block=False)
        self._make_room(len(found))
        num_tokens = len(found) * self.block_size
        sequence.table.append(num_tokens)
        pairs = tuple(zip(found, sequence.table.blocks[held:], strict=True))
        self._swap_in += pairs
        self.num_entries += len(pairs)
        self.num_tokens += num_tokens
        self._writer.table_changed(sequence, held)
        self._emit(BlocksPromoted(sequence.sequence_id, pairs))

    # --- Preempted requests share the host pool ---------------------------------------------------

    def swap_out(self, request: Request) -> None:
        self.floor.give_back(len(request.filled_slots(self.block_size)) - self.host_allocator.num_free)
        num_before = len(self._swap_out)
        super().swap_out(request)
        self.floor.pin(host for _, host in self._swap_out[num_before:])

    def swap_in(self, request: Request) -> None:
        self.floor.pin(list(request.filled_slots(self.block_size)))  # it gives them up at once
        super().swap_in(request)

    # --- Steps ------------------------------------------------------------------------------------

    def take_moves(self) -> BlockMoves:
        self.floor.launched()
        return super().take_moves()

    def moves_done(self) -> None:
        self.floor.moves_done()

    def moves_lost(self) -> None:
        super().take_moves()
        self.floor.moves_lost()


def name_of(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a block, from its parent's name and its own tokens."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=NAME_BYTES).digest()


def names_of(tokens: Sequence[int], block_size: int, num_blocks: int) -> list[bytes]:
    """The names of the first `num_blocks` blocks of these tokens."""
    names, name = list[bytes](), NO_NAME
    for start in range(0, num_blocks * block_size, block_size):
        names.append(name := name_of(name, tokens[start : start + block_size]))
    return names


def paged_memory(
    config: EngineConfig,
    tier: Tier,
    allocator: Callable[[int], BlockAllocator] | None,
    writer: StepWriters,
    emit: Emit,
) -> BlockManager:
    """Make the memory that a config asks for: paging, with or without a floor below its prefix cache."""
    kind = FlooredBlockManager if config.kv_cache_tiers else BlockManager
    return kind(config, tier, allocator, writer, emit)
