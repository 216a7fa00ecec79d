"""Block tables with given blocks, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minipaged.contracts import BlockTable, Tier


class AnyBlocks:
    """Stands in for an allocator: every block is held, and nothing is counted."""

    def share_many(self, blocks: Iterable[int]) -> None:
        """Nothing to count."""


def table_of(blocks: Sequence[int], block_size: int, tier: Tier) -> BlockTable:
    """A table of the tier's that holds exactly these blocks, all of them full."""
    table = tier.block_table(block_size, AnyBlocks())  # type: ignore[arg-type]
    table.adopt(blocks)
    return table
