"""Exhibit 4 of the bug museum: a request that is too large for the pool, and a queue that nobody leaves any more.

The engine asks its block manager how many blocks a request can come to hold, and refuses what the pool will never
have. Something is wrong with the answer: docs/museum/never_fits.md.

    python museum/never_fits.py
"""

from minipaged.course.museum import try_workloads
from minipaged.engine import block_manager


class BlockManager(block_manager.BlockManager):
    """The engine's, with an answer of its own."""

    def most_blocks(self, request):
        """What is compared with the whole pool when the request arrives."""
        return self.blocks_for(len(request.prompt_token_ids))


def exchange(engine):
    """Let the engine's block manager be one of this class."""
    engine.blocks.__class__ = BlockManager


if __name__ == "__main__":
    try_workloads(exchange)
