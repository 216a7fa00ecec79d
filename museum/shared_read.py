"""Exhibit 6 of the bug museum: sequences that share a prompt read it once, and one sequence reads the wrong prompt.

All decoding sequences of a step read the blocks that they share from the table of the first one. The search for these
blocks has a bug: docs/museum/shared_read.md.

    python museum/shared_read.py
"""

from dataclasses import replace

from minipaged.course.museum import try_workloads
from minipaged.testing.content_runner import ContentRunner


def num_shared(tables, memory):
    """The number of blocks with which all these tables begin."""
    for number, block in enumerate(tables[0]):
        holders = memory.allocator.ref_count(block)
        if memory.prefix_cache and block in memory.prefix_cache:
            holders -= 1  # the cache holds a reference too, and is no sequence
        if holders != len(tables):
            return number
    return len(tables[0])


class SharedReading(ContentRunner):
    """Runs a step's rows. The rows that decode (they have one new token) read their shared blocks together."""

    def compute(self, rows):
        tables = [row.blocks for row in rows if len(row.token_ids) == 1]
        if len(tables) > 1:
            shared = tables[0][: num_shared(tables, self.engine.blocks)]
            rows = [self.with_shared(row, shared) if len(row.token_ids) == 1 else row for row in rows]
        return super().compute(rows)

    def with_shared(self, row, shared):
        """The row with these blocks in place of its first ones. (It writes into a later block.)"""
        return replace(row, blocks=[*shared, *row.blocks[len(shared) :]])


PARTS = {"runner": SharedReading}

if __name__ == "__main__":
    try_workloads(PARTS)
