"""Exhibit 4 of the bug museum: a request that is too large for the pool, and a queue that nobody leaves any more.

The engine asks its block manager how many blocks a request can come to hold, and refuses what the pool will never
have. (It then asks its policy too, which here leaves that to the block manager.) Something is wrong with the answer:
docs/museum/never_fits.md.

    python museum/never_fits.py
"""

from minipaged.course.museum import try_workloads
from minipaged.engine import block_manager, policy


class BlockManager(block_manager.BlockManager):
    """The engine's, with an answer of its own."""

    def most_blocks(self, request):
        """What is compared with the whole pool when the request arrives."""
        return self.blocks_for(len(request.prompt_token_ids))


class Policy(policy.FirstComeFirstServed):
    """The engine's, which takes whatever the block manager takes."""

    def fits(self, request):
        """Whether to take the request, which the block manager says could be served."""
        return True


PARTS = {"memory": BlockManager, "policy": Policy}

if __name__ == "__main__":
    try_workloads(PARTS)
