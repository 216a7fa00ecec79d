"""Floors below the prefix cache: what it evicts moves to host memory, then to a disk, and comes back by a hit.

    device pool    prefix cache   in use / evictable ──evict──► free
                                       │ demote    ▲
                                       ▼ (swap_out)│ promote (swap_in)
    host pool      host floor     kept ──drop, for room──► free
                                       │ store     ▲
                                       ▼           │ load into the device pool
    folder         disk floor     files, the least recently used removed

The host pool is the one that swapping uses. A block of it is held by preempted requests, or by the floor, or free.
Only full blocks move down, and only those that are evicted for room: a block that a sequence takes over, to write into
it, does not. Each floor keeps its copy when a block comes back, so evicting it again moves nothing.

*Names.* Block numbers mean nothing across floors, and a hash is no proof. A block is named by a digest of all tokens
up to its end, chained: digest(name of its parent, its own tokens). A name leads to its parents' tokens too, because
the disk floor is a KV connector, which takes a block by all tokens up to its end.

*The disk* (`disk_floor.py`) takes and gives bytes. A host block that is dropped is not pinned: the step that filled it
has been committed. (A GPU copies beside its steps, so reading the block waits for its copies.) A file is read when its
request is admitted, and its bytes travel with the step, like blocks that another engine hands over. If the disk
fails, its blocks are computed; at most one step fails, and no request. After an exception the disk is not used again.

*Who owns what.* `HostFloor` owns one reference on each host block that it keeps, least recently used first. The
device's prefix cache does not know it. Preempted requests come first: what the floor keeps counts as available.

*Pins.* The moves of a step run by kind, not in the order in which they were planned: all `swap_out`, then all
`swap_in`. A host block that a promotion reads must not become the destination of a demotion planned after it, or it
would be overwritten first. So each host block that a move reads or writes is *pinned*: one more reference is held on
it until the step with that move has been committed (pinned-in-flight). A pinned block is never given back, so it can
be neither freed nor handed out. If there are fewer unpinned host blocks than evicted blocks, those on the disk are
left out, and then children are lost before their parents.

Device blocks need no pin. The sequence that a block is loaded for holds it. An evicted block may be handed out in the
same step, because `swap_out` runs before everything that writes.

*In a step.* Admission reserves device blocks for a promotion as if they were to be computed. `load` pins the host
blocks that continue the prefix cache's hit, appends device blocks for it, and records `swap_in` pairs, before the first
chunk of the prompt. The loaded blocks enter the prefix cache when the step is committed. Requests are loaded only when
they are admitted, so none is preempted between the plan and the move.

*Run-ahead.* The device works in order of launching. So a step that is planned while an earlier one runs may load a
block whose demotion is in flight.
`take_moves` begins a set of pins for each step; `moves_done` ends the oldest.

*A step that fails.* Nobody knows which moves of the steps in flight were made. `moves_lost` forgets every block that
they read or wrote, demotions and promotions. What is forgotten is computed, so a load that always fails cannot block
a request. Blocks of steps committed before stay.

*Break-even.* A floor is used only if carrying a block from there takes less time than computing its tokens, by the
cost model that swapping has (`policy.py`). The disk adds the time of storing a block and of loading it. Both sides grow
with the number of blocks, so this is one answer for a machine.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Literal, NamedTuple, Protocol

from minipaged.contracts import BlockAllocator, Tier
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.cached_blocks import NO_PARENT, CachedBlock
from minipaged.engine.connected_memory import LoadingBlockManager
from minipaged.engine.grouped_memory import GroupedBlockManager
from minipaged.engine.memory import MemoryParts
from minipaged.engine.policy import carry_seconds, recompute_seconds
from minipaged.engine.prefix_cache import PrefixCache
from minipaged.engine.sequence import Request
from minipaged.engine.step_writer import StepWriters
from minipaged.errors import InvalidRequest
from minipaged.events import BlockDemoted, BlocksLoaded, BlocksPromoted, Emit, HostBlockDropped
from minipaged.handover.block_hashes import token_bytes
from minipaged.handover.kv_connector import KVConnector
from minipaged.params import EngineConfig
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves

DIGEST_BYTES = 16
MOST_BELOW = 1 << 17
"""The number of names of the floor below that are known, of some 100 bytes each."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockName:
    """The name of a full block."""

    digest: bytes
    tokens: tuple[int, ...]
    """The block's own tokens."""
    parent: BlockName | None
    """The name of the block before it; None for a sequence's first block."""
    logical: int
    """The number of blocks before it."""

    def all_tokens(self) -> list[int]:
        """All tokens up to the block's end."""
        parts, name = list[tuple[int, ...]](), self
        while True:
            parts.append(name.tokens)
            if name.parent is None:
                return [token for part in reversed(parts) for token in part]
            name = name.parent


def name_of(parent: BlockName | None, tokens: Sequence[int]) -> BlockName:
    """The name of the block with these tokens after its parent."""
    before = parent.digest if parent else b""
    digest = blake2b(before + token_bytes(tokens), digest_size=DIGEST_BYTES).digest()
    return BlockName(digest, tuple(tokens), parent, parent.logical + 1 if parent else 0)


def names_of(tokens: Sequence[int], block_size: int, num_blocks: int) -> Iterator[BlockName]:
    """Yield the names of the first `num_blocks` blocks of these tokens."""
    name: BlockName | None = None
    for start in range(0, num_blocks * block_size, block_size):
        name = name_of(name, tokens[start : start + block_size])
        yield name


class KeptBlock(NamedTuple):
    """A host block of the floor, and the name of its content."""

    name: BlockName
    block: int


class HostFloor:
    """Host blocks by the names of their content, least recently used first, and pins on host blocks.

    `move_down`: receives the blocks that are about to be dropped for room, and returns those that are on the floor
    below now.
    """

    def __init__(
        self, allocator: BlockAllocator, emit: Emit, move_down: Callable[[Sequence[KeptBlock]], Collection[KeptBlock]]
    ) -> None:
        self._allocator = allocator
        self._emit = emit
        self._move_down = move_down
        self._kept: OrderedDict[bytes, KeptBlock] = OrderedDict()  # by the digest of its name
        self._below: OrderedDict[bytes, None] = OrderedDict()  # the latest names that were found on the floor below
        self._planned: list[int] = []  # pinned by moves of the step being planned, one entry per pin
        self._in_flight: deque[list[int]] = deque()  # the same for each launched step, the oldest first
        self._pins: Counter[int] = Counter()  # host block -> its pins, planned and in flight

    @property
    def held(self) -> Iterable[int]:
        """The host blocks that the floor holds, one entry per reference: those kept, and the pins."""
        return [*(kept.block for kept in self._kept.values()), *self._pins.elements()]

    @property
    def num_available(self) -> int:
        """The number of kept blocks that could be given back now."""
        return sum(kept.block not in self._pins for kept in self._kept.values())

    def match(self, names: Iterable[BlockName]) -> list[int]:
        """Return the host blocks with these names, up to the first that is missing. Now they were used last, parents
        after their children, so that no child stays behind its parent."""
        found = [*takewhile(lambda name: name.digest in self._kept, names)]
        self._used(reversed(found))
        return [self._kept[name.digest].block for name in found]

    def keep(self, names: Sequence[BlockName]) -> dict[bytes, int]:
        """Keep content with these names, the least recently used first, children before parents. Returns the pinned
        host blocks to fill, by digest; names that are kept already have none. Where there is not room for all, those
        that the floor below has are left out, and then those farthest from their prompts' beginnings: a child without
        its parents could not be found."""
        room = self._allocator.num_free + self.num_available
        if room < len(names):
            names = [name for name in names if name.digest not in self._below]
            nearest = set(sorted(names, key=lambda name: name.logical)[:room])
            names = [name for name in names if name in nearest]
        lacking = {name.digest: name for name in names if name.digest not in self._kept}
        self._used(names)  # so that none of them is given back for the others
        self.give_back(len(lacking) - self._allocator.num_free)
        blocks = dict(zip(lacking, self._allocator.allocate_many(len(lacking)), strict=True))
        self._kept |= {digest: KeptBlock(name, blocks[digest]) for digest, name in lacking.items()}
        self._used(names)
        self.pin(blocks.values())
        return blocks

    def _used(self, names: Iterable[BlockName]) -> None:
        for name in names:
            if name.digest in self._kept:
                self._kept.move_to_end(name.digest)

    def give_back(self, num_blocks: int) -> None:
        """Free the least recently used blocks that are not pinned, at most `num_blocks`."""
        if num_blocks <= 0:
            return
        leaving = list(islice((kept for kept in self._kept.values() if kept.block not in self._pins), num_blocks))
        below: Collection[KeptBlock] = ()
        try:
            below = self._move_down(leaving)
        finally:  # a floor below that always fails would otherwise stop everybody
            self.note_below(kept.name for kept in below)
            for kept in leaving:
                self._drop(kept, "to disk" if kept in below else "room")

    def note_below(self, there: Iterable[BlockName], missing: Iterable[BlockName] = ()) -> None:
        """Note which names the floor below has, and which it has not. The latest MOST_BELOW are known."""
        self._below |= dict.fromkeys(name.digest for name in there)
        for name in missing:
            self._below.pop(name.digest, None)
        while len(self._below) > MOST_BELOW:
            self._below.popitem(last=False)

    def _drop(self, kept: KeptBlock, reason: Literal["room", "to disk", "lost"]) -> None:
        del self._kept[kept.name.digest]
        self._allocator.free(kept.block)
        self._emit(HostBlockDropped(kept.block, reason))

    # --- Pins -------------------------------------------------------------------------------------

    def pin(self, blocks: Iterable[int]) -> None:
        """Hold these blocks until the step that is being planned is committed: a move reads or writes them."""
        for block in blocks:
            self._allocator.share(block)
            self._planned.append(block)
            self._pins[block] += 1

    def launched(self) -> None:
        """Note that the planned moves are on their way."""
        self._in_flight.append(self._planned)
        self._planned = []

    def moves_done(self) -> None:
        """End the pins of the oldest step in flight."""
        done = self._in_flight.popleft()
        self._pins -= Counter(done)  # without those that are 0 then
        self._allocator.free_many(done)

    def moves_lost(self) -> None:
        """Forget every block that a move not known to be done reads or writes, and end all pins."""
        for kept in [kept for kept in self._kept.values() if kept.block in self._pins]:
            self._drop(kept, "lost")
        self._allocator.free_many(self._pins.elements())
        self._pins.clear()
        self._planned.clear()
        self._in_flight.clear()


class Disk(KVConnector, Protocol):
    """A KV connector whose speed is known (`disk_floor.py`)."""

    seconds_per_block: float
    """The time to store a block and to load it again."""


class FlooredBlockManager(LoadingBlockManager):
    """Paged memory whose prefix cache has a floor in host memory below it (`EngineConfig.kv_cache_tiers`).

    `disk`: the floor below that, if there is one. `read_host_blocks`: `Runner.read_host_blocks`. `block_bytes`: the
    size of one block. The disk needs both.
    """

    prefix_cache: PrefixCache
    host_allocator: BlockAllocator

    def __init__(
        self,
        *parts: *MemoryParts,
        disk: Disk | None = None,
        read_host_blocks: Callable[[Sequence[int]], Sequence[bytes]] | None = None,
        block_bytes: int = 0,
    ) -> None:
        super().__init__(*parts, block_bytes=block_bytes)
        self.floor = HostFloor(self.host_allocator, self._emit, self._move_to_disk)
        self._disk = disk
        self._read_host_blocks = read_host_blocks
        self._pays: bool | None = None  # whether carrying a block takes less time than computing it; None: unknown yet
        self._disk_pays = False
        self._names: dict[int, tuple[CachedBlock, BlockName]] = {}  # cached block -> its entry, and the entry's name

    @property
    def num_host_available(self) -> int:
        return self.host_allocator.num_free + self.floor.num_available

    @property
    def held_on_host(self) -> Iterable[int]:
        return self.floor.held

    # --- Down -------------------------------------------------------------------------------------

    def _make_room(self, num_blocks: int) -> None:
        if self._pays:
            evicted = self.prefix_cache.next_evicted(num_blocks - self.allocator.num_free)
            self._demote([self.prefix_cache.entry_of[block] for block in evicted])
        super()._make_room(num_blocks)

    def _demote(self, entries: Iterable[CachedBlock]) -> None:
        names = {self._name(entry): entry.block for entry in entries if len(entry.tokens) == self.block_size}
        hosts = self.floor.keep([*names])
        for name, block in names.items():
            if (host := hosts.get(name.digest)) is not None:
                self._swap_out.append((block, host))
                self._emit(BlockDemoted(block, host))

    def _name(self, entry: CachedBlock) -> BlockName:
        """The name of a cached block. Its parents are cached too, because children are evicted first."""
        chain: list[CachedBlock] = []
        name: BlockName | None = None
        while True:
            known, found = self._names.get(entry.block, (None, None))
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
        assert name
        return name

    def _move_to_disk(self, leaving: Sequence[KeptBlock]) -> Collection[KeptBlock]:
        """Write host blocks to the disk; returns those that are there now. No move is under way for any of them."""
        there: set[KeptBlock] = set()
        if not self._disk or not self._read_host_blocks or not self._disk_pays:
            return there
        for kept in leaving:
            tokens, logical = kept.name.all_tokens(), kept.name.logical
            with self._asking() as disk:
                lacking = disk.lacking(tokens, logical, logical + 1)
            block = self._read_host_blocks([kept.block])[0] if lacking else b""
            with self._asking() as disk:
                if not lacking or disk.store(tokens, {logical: block}):
                    there.add(kept)
        return there

    @contextmanager
    def _asking(self) -> Iterator[Disk]:
        """Use the disk. If it raises, it is not asked again, or the same request might fail for ever."""
        assert self._disk
        try:
            yield self._disk
        except Exception:
            self._disk = None
            raise

    # --- Up ---------------------------------------------------------------------------------------

    def load(self, request: Request, costs: Costs) -> None:
        sequence = request.sequences[0]
        if self._pays is None:
            self._decide(costs)
        if not self._pays or sequence.num_computed or not request.reads_prefix_cache:
            return
        tokens = sequence.key_tokens
        held = self.prefix_cache.match(tokens).num_tokens // self.block_size
        most = (len(tokens) - 1) // self.block_size  # one token has to run
        names = [*names_of(tokens, self.block_size, most)]
        runs: list[tuple[list[int], list[bytes]]] = []  # what comes next: host blocks, and then contents from the disk
        num_blocks = 0
        while True:
            kept = self.floor.match(names[held + num_blocks :])
            start = held + num_blocks + len(kept)
            # A sequence that starts over, preempted or not, computes: what it loaded may have made its step fail.
            stored = [] if sequence.most_computed else self._stored(tokens, names, start)
            if not kept and not stored:
                break
            runs.append((kept, stored))
            num_blocks += len(kept) + len(stored)
        if not runs:
            return
        self.floor.pin(block for kept, _ in runs for block in kept)  # first: making room moves other blocks down
        self.begin(request, sequence, within_block=False)
        blocks = iter(self._extend(sequence, num_blocks))
        for kept, stored in runs:
            if pairs := [(host, next(blocks)) for host in kept]:
                self._swap_in += pairs
                self._emit(BlocksPromoted(sequence.sequence_id, tuple(pairs)))
            if loads := [(next(blocks), content) for content in stored]:
                self._load += loads
                self._emit(BlocksLoaded(sequence.sequence_id, tuple(block for block, _ in loads), "disk"))

    def _decide(self, costs: Costs) -> None:
        """Decide which floors pay, on this machine. A floor that is not used is reported on stderr."""
        computing, carrying = recompute_seconds(costs, self.block_size), carry_seconds(costs, 1)
        self._pays = carrying < computing
        seconds = {"host": carrying}
        if self._disk:
            seconds["disk"] = carrying + self._disk.seconds_per_block
            self._disk_pays = seconds["disk"] < computing
        for floor, taken in seconds.items():
            if taken >= computing:
                print(
                    f"kv_cache_tiers: the {floor} is not used: moving a block takes {1e3 * taken:.2f} ms, computing it "
                    f"{1e3 * computing:.2f} ms",
                    file=sys.stderr,
                )

    def _stored(self, tokens: Sequence[int], names: Sequence[BlockName], start: int) -> list[bytes]:
        """The blocks from logical block `start` on that the disk has, up to the first that is missing or of another
        size. `names`: those of all blocks of these tokens."""
        if not self._disk or not self._disk_pays or start >= len(names):
            return []
        with self._asking() as disk:
            blocks = self._whole(disk.load(tokens, start, len(names)))
        there, missing = names[start : start + len(blocks)], names[start + len(blocks) :][:1]
        self.floor.note_below(there, missing)
        return blocks

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


def paged_memory(
    config: EngineConfig,
    tier: Tier,
    allocator: Callable[[int], BlockAllocator] | None,
    writer: StepWriters,
    emit: Emit,
) -> BlockManager:
    """Make the memory that a config asks for: paging, with or without a floor below its prefix cache.

    Raises InvalidRequest for a floor on disk, because the config does not name its folder.
    """
    if "disk" in config.kv_cache_tiers:
        raise InvalidRequest(
            "kv_cache_tiers has 'disk', but this engine knows no folder; give LLM a kv_cache_folder, or give Engine a "
            "memory, partial(FlooredBlockManager, disk=...)"
        )
    kind: type[BlockManager] = FlooredBlockManager if config.kv_cache_tiers else BlockManager
    if config.has_windows:
        kind = GroupedBlockManager
    return kind(config, tier, allocator, writer, emit)
