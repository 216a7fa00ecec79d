"""The prefix cache of a model whose layers are in groups: prefixes are nodes of a tree, each with a block per group.

    root ── [1 2] ── [3 4] ── [5 6]          a node: the tokens of one block, after those of its parent
    group 0   7        2        5            its layers see everything
    group 1   -        4        6            its layers have a window; the first block has been evicted

In every group, the K/V of a block depend on all tokens up to the block's end. So a node is identified in the same way
as a full block in `prefix_cache.py`: by a chain of hashes, its own tokens and its parent. In each group a node has a
block or none.

A sequence can begin with n nodes if they have everything that the token after them sees: all n blocks in each group
that sees everything, and the blocks of the last window in each other group. So the search first goes from the left, as
far as there are nodes. Then it goes back from the right, to the largest n for which everything seen is there. A missing
block rules out each n whose last window contains it, and no other. So the search goes on with the n before it.

Ownership is as in `prefix_cache.py`: the cache has one reference on each block, and a block that only the cache holds
is evictable, least recently used first. When a window passes a block, the sequence releases it, long before its own
end. So that block is evicted before the blocks that the sequence still sees.

- *With a group that sees everything*, a node without its block there can be part of no hit. So when that block is
  evicted, the whole node is dropped, with its other blocks. No sequence holds these: it would hold the evicted block as
  well, because that group gives nothing back. Children are dropped before their parents (`prefix_cache.py` says why).
- *Without such a group*, a node may lose all its blocks while nodes after it have theirs. It stays, empty, until the
  last of these is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from minipaged.contracts import BlockAllocator
from minipaged.engine.cached_blocks import Node
from minipaged.engine.grouped_table import GroupedTable, first_seen
from minipaged.events import HOLE
from minipaged.handover.block_hashes import NO_HASH, ChainHash, chain_hash, hash_blocks


class GroupedPrefixCache:
    """Blocks of all groups by content. `windows`: the window of each group, or None."""

    def __init__(
        self,
        block_size: int,
        allocator: BlockAllocator,
        windows: Sequence[int | None],
        chain_hash: ChainHash = chain_hash,
    ) -> None:
        self.block_size = block_size
        self._allocator = allocator
        self._windows = windows
        self._chain_hash = chain_hash
        self._root = Node(None, NO_HASH, (), len(windows))
        self._nodes: dict[int, Node] = {}  # by hash
        self._places: dict[int, tuple[Node, int]] = {}  # block -> its node and group
        self._evictable: OrderedDict[int, None] = OrderedDict()  # in order of release

    @property
    def blocks(self) -> Iterable[int]:
        """Every cached block."""
        return self._places.keys()

    @property
    def num_evictable(self) -> int:
        """Blocks that could be given back now."""
        return len(self._evictable)

    def is_evictable(self, block: int) -> bool:
        return block in self._evictable

    def hash_of(self, block: int) -> int:
        """The hash that identifies the block's content, in any group."""
        return self._places[block][0].key

    def match(self, tokens: Sequence[int], found: list[Node] | None = None) -> list[int]:
        """The entries of the blocks with which a sequence of these tokens can begin (`GroupedTable.adopt`). At least
        one token is left to run.

        `found`: what an earlier call has found, which is not looked up again; it is brought up to date.
        """
        nodes = [] if found is None else found
        while nodes and self._nodes.get(nodes[-1].key) is not nodes[-1]:  # a node goes only after its children
            nodes.pop()
        node = nodes[-1] if nodes else self._root
        most = (len(tokens) - 1) // self.block_size
        chain = hash_blocks(tokens, self.block_size, len(nodes), most, node.key, self._chain_hash)
        for _, key, block_tokens in chain:
            child = self._nodes.get(key)
            if child is None or not child.is_for(node, block_tokens):
                break
            nodes.append(node := child)
        n = len(nodes)
        while n:
            first = [first_seen(window, n * self.block_size) // self.block_size for window in self._windows]
            # The shortest windows first: what they lack is found soon.
            seen_by = sorted(((seen, group) for group, seen in enumerate(first)), reverse=True)
            lacking = (i for seen, group in seen_by for i in range(seen, n) if nodes[i].blocks[group] == HOLE)
            missing = next(lacking, None)
            if missing is None:
                return [
                    block if i >= seen else HOLE
                    for i, node in enumerate(nodes[:n])
                    for block, seen in zip(node.blocks, first, strict=True)
                ]
            n = missing  # each n between has this block in its window
        return []

    def reused(self, blocks: Iterable[int]) -> None:
        """Note that sequences hold these cached blocks again: they are not evictable."""
        for block in blocks:
            self._evictable.pop(block, None)

    def released(self, blocks: Iterable[int]) -> None:
        """Note that a sequence gave up these blocks. Those that only the cache holds become evictable, in order."""
        for block in blocks:
            if block in self._places and self._allocator.ref_count(block) == 1:
                self._evictable[block] = None

    def publish(self, tokens: Sequence[int], table: GroupedTable, num_published: int) -> Iterator[tuple[int, int, int]]:
        """Cache the full blocks of `tokens` from logical block `num_published` on, one per iteration.

        Yields (entry, the table's own block, the cached block). They are equal if the cache took a reference on the
        table's own block. If the content was already cached, the table now holds the cached block instead.
        """
        node = self._before(table, num_published)
        if node is None:
            return
        num_full = len(tokens) // self.block_size
        for logical, key, block_tokens in hash_blocks(
            tokens, self.block_size, num_published, num_full, node.key, self._chain_hash
        ):
            child = self._nodes.get(key)
            if child is None:
                child = self._nodes[key] = Node(node, key, block_tokens, len(self._windows))
                node.num_children += 1
            elif not child.is_for(node, block_tokens):
                break  # a hash collision: this node and those after it are not cached
            node = child
            for group in range(len(self._windows)):
                entry = logical * len(self._windows) + group
                own, cached = table.entries[entry], child.blocks[group]
                if own in (HOLE, cached):
                    continue
                if cached == HOLE:
                    self._allocator.share(own)
                    child.blocks[group] = own
                    self._places[own] = child, group
                    yield entry, own, own
                else:
                    table.replace(entry, cached)
                    self.reused([cached])
                    yield entry, own, cached
        self._prune(node)

    def _before(self, table: GroupedTable, num_published: int) -> Node | None:
        """The node of the table's last published block; None if it is not cached (after a hash collision), or not to be
        found, because windows no longer than a block have passed it."""
        if not num_published:
            return self._root
        groups = len(self._windows)
        for block in table.entries[(num_published - 1) * groups : num_published * groups]:
            if block in self._places:
                return self._places[block][0]
        return None

    def evict(self, num_blocks: int) -> list[int]:
        """Give back at least `num_blocks` evictable blocks, the least recently used first. Returns them."""
        evicted: list[int] = []
        while len(evicted) < num_blocks:
            [block] = islice(self._evictable, 1)
            evicted += self._drop(block)
        return evicted

    def _drop(self, block: int) -> list[int]:
        """Give up the block; if its group sees everything, with the other blocks of its node. Returns them."""
        node, group = self._places[block]
        dropped = [block]
        if self._windows[group] is None:
            dropped += [other for other in node.blocks if other not in (HOLE, block)]
        for each in dropped:
            node.blocks[self._places.pop(each)[1]] = HOLE
            self._evictable.pop(each, None)
            self._allocator.free(each)
        self._prune(node)
        return dropped

    def _prune(self, node: Node) -> None:
        """Remove the node if it has neither blocks nor children, and then its parents, as far as that is true of
        them."""
        while node.parent is not None and not node.num_children and all(block == HOLE for block in node.blocks):
            del self._nodes[node.key]
            node = node.parent
            node.num_children -= 1
