"""Exhibit 7 of the bug museum: a page is about to come back, and making room for it overwrites the page.

Below the pool lies a floor of slower memory, made of pages. Full blocks that the prefix cache evicts go down to these
pages. If a prompt's next blocks are there, they come up again, which is cheaper than computing them. The way up has a
bug: docs/museum/late_pin.md.

    python museum/late_pin.py
"""

from minipaged.course.museum import try_workloads
from minipaged.engine import block_manager
from minipaged.events import BlockEvicted, BlocksLoaded
from minipaged.handover.block_hashes import block_hashes
from minipaged.testing.content_runner import ContentRunner


class Floor:
    """A few pages, each with the content of one block. The page used longest ago is given up first."""

    def __init__(self, num_pages):
        self._hash_on = dict.fromkeys(range(num_pages))  # page -> hash of its block; the page used longest ago first
        self._pinned = set()

    def find(self, block_hash):
        """The page with the block of this hash, or None."""
        return next((page for page, there in self._hash_on.items() if there == block_hash), None)

    def take(self, block_hash):
        """A page for the block of this hash, or None if all pages are pinned. Its old content is lost."""
        page = next((page for page in self._hash_on if page not in self._pinned), None)
        if page is not None:
            self._use(page, block_hash)
        return page

    def pin(self, pages):
        """Keep these pages as they are until `unpin_all`."""
        self._pinned.update(pages)
        for page in pages:
            self._use(page, self._hash_on[page])

    def unpin_all(self):
        self._pinned.clear()

    def _use(self, page, block_hash):
        del self._hash_on[page]
        self._hash_on[page] = block_hash


class BlockManager(block_manager.BlockManager):
    """The engine's block manager, with a floor below. It plans what goes down and up; `Runner` moves it."""

    NUM_PAGES = 3

    def __init__(self, *settings):
        super().__init__(*settings)
        self.floor = Floor(self.NUM_PAGES)
        self.down, self.up = [], []

    def load(self, request, costs):
        """Begin an admitted request with cached blocks of the pool, then with the next ones from the floor."""
        sequence = request.sequences[0]
        if not self.prefix_cache or sequence.num_computed or not request.reads_prefix_cache:
            return
        held = self.prefix_cache.match(sequence.key_tokens).num_tokens // self.block_size
        pages = []
        for block_hash in block_hashes(sequence.key_tokens[:-1], self.block_size)[held:]:  # one token has to run
            if (page := self.floor.find(block_hash)) is None:
                break
            pages.append(page)
        self.begin(request, sequence, within_block=not pages)
        if pages:
            self._make_room(len(pages))
            self.floor.pin(pages)
            sequence.table.append(len(pages) * self.block_size)
            blocks = sequence.table.blocks[held:]
            self.up += zip(pages, blocks, strict=True)
            self.num_entries += len(blocks)
            self.num_tokens += len(blocks) * self.block_size
            self._writer.table_changed(sequence, held)
            self._emit(BlocksLoaded(sequence.sequence_id, tuple(blocks)))

    def _make_room(self, num_blocks):
        """Let the prefix cache evict blocks until `num_blocks` are free, and send the full ones down."""
        short = num_blocks - self.allocator.num_free
        if self.prefix_cache and short > 0:
            hashes = {block: self.prefix_cache.hash_of(block) for block in self.prefix_cache.blocks}
            for block in self.prefix_cache.evict(short):
                self._emit(BlockEvicted(block))
                if hashes[block] and (page := self.floor.take(hashes[block])) is not None:
                    self.down.append((block, page))


class Runner(ContentRunner):
    """Moves blocks before each step: first down, before anything overwrites them, then up."""

    def move(self, moves):
        memory = self.engine.blocks
        self.pages = getattr(self, "pages", {})
        for block, page in memory.down:
            self.pages[page] = list(self.device[block])
        super().move(moves)
        for page, block in memory.up:
            self.device[block] = list(self.pages[page])
        memory.down, memory.up = [], []
        memory.floor.unpin_all()


PARTS = {"memory": BlockManager, "runner": Runner}

if __name__ == "__main__":
    try_workloads(PARTS)
