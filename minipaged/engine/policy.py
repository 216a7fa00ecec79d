"""The engine's own policy: first come, first served (paper, section 4.5).

Assignment 4 is about this policy: students write it, and the grader compares their answers with the ones here. The
policy only decides; `scheduler.py` calls it and carries its decisions out.

1. Every running request gets its tokens: decoding requests first. Those that still compute a prompt share what is left
   of the batch, in order of arrival (chunked prefill).
2. While there are too few blocks for that, the latest arrival is preempted, and comes back in the way that costs less.
   So the oldest request always makes progress. It ends some day, and then the next one is the oldest: liveness.
3. Waiting requests are admitted in order of arrival, as long as their blocks are there, plus one block for each
   sequence that already runs and may still need one. The first request that has to wait stops this: no request
   overtakes another.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipaged.scheduling import Costs, RequestView, Way


class FirstComeFirstServed:
    """Requests in order of arrival, each with all of its sequences or none; the latest arrival is preempted first."""

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, costs: Costs
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_tokens = max_num_batched_tokens
        # A running sequence takes at least one token of each batch.
        self.max_sequences = min(max_num_seqs, max_num_batched_tokens)
        self.costs = costs

    def turn(self, request: RequestView) -> tuple[float, ...]:
        """The request's place in the order: smaller comes first. No two requests share it. It never changes here; a
        policy in which it does must bound by how much."""
        return (request.arrival,)

    # --- Requests that can be served at all -------------------------------------------------------

    def fits(self, request: RequestView) -> bool:
        """Whether the request could be served if it had the whole pool to itself. If not, it is refused: NEVER."""
        return request.num_sequences <= self.max_sequences and self.most_blocks(request) <= self.num_blocks

    def most_blocks(self, request: RequestView) -> int:
        """The most blocks that the request can come to hold."""
        if request.most_blocks is not None:
            return request.most_blocks
        return most_blocks(request.prompt_tokens, request.max_output_tokens, request.num_sequences, self.block_size)

    # --- Every step -------------------------------------------------------------------------------

    def share_tokens(self, running: Sequence[RequestView]) -> dict[str, int]:
        """The number of tokens for each running request: decoding requests first, then prompts, each in its turn."""
        left = self.max_tokens
        tokens: dict[str, int] = {}
        for request in sorted(running, key=lambda r: (not r.decodes, self.turn(r))):
            tokens[request.request_id] = min(request.tokens_to_run, left)
            left -= tokens[request.request_id]
        return tokens

    def victim(self, running: Sequence[RequestView]) -> str:
        """The request to preempt when blocks are short: the last one by `turn`."""
        return max(running, key=self.turn).request_id

    def way_back(self, request: RequestView, host_free: int) -> Way:
        """How the victim comes back: the cheaper way, if the host has room for its blocks."""
        return "swap" if request.num_blocks <= host_free and self.price(request) < 0 else "recompute"

    def price(self, request: RequestView) -> float:
        """The extra seconds that swapping takes compared with recomputing (below 0 if it is faster)."""
        return swap_seconds(self.costs, request.num_blocks) - recompute_seconds(self.costs, request.num_tokens)

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """The requests to admit now, each in its turn, up to the first that has to wait."""
        queue = sorted(waiting, key=self.turn)
        if not queue or queue[0].blocks_needed > num_free:
            return []  # the usual case: no need to look at the running requests
        admitted: list[str] = []
        # Blocks held back for running requests; without them, the newcomer would soon be preempted for their next
        # blocks.
        spare = sum(self.soon(r, r.num_blocks) for r in running)
        sequences = sum(r.num_sequences for r in running)
        for request in queue:
            sequences += request.num_sequences
            least = request.tokens_to_run if request.decodes else 1
            blocks = request.blocks_needed + spare
            if sequences > self.max_sequences or blocks > num_free or least > tokens_left:
                break
            admitted.append(request.request_id)
            num_free -= request.blocks_needed
            tokens_left -= request.tokens_to_run
            spare += self.soon(request, request.blocks_needed)
        return admitted

    def soon(self, request: RequestView, num_blocks: int) -> int:
        """The blocks that a request holding `num_blocks` will want next: one per sequence (and group of layers), up to
        the most it can need."""
        return max(0, min(request.num_sequences * request.num_groups, self.most_blocks(request) - num_blocks))


def most_blocks(prompt_tokens: int, max_output_tokens: int, num_sequences: int, block_size: int) -> int:
    """The most blocks that a request can come to hold: only the prompt's full blocks are sure to be shared."""
    if max_output_tokens == 1:  # it runs nothing but its prompt
        return -(-prompt_tokens // block_size)  # rounded up
    shared = prompt_tokens // block_size
    # The last token is chosen but never run, so it needs no slot.
    each = -(-(prompt_tokens + max_output_tokens - 1) // block_size)
    return shared + num_sequences * (each - shared)


# --- Costs of both ways back (paper, section 4.5, Fig. 19) --------------------------------------------
# Only this file computes them. Tiers and simulated machines only provide their `Costs`.


def swap_seconds(costs: Costs, num_blocks: int) -> float:
    """The time to copy blocks out and back in."""
    return 2 * carry_seconds(costs, num_blocks)


def carry_seconds(costs: Costs, num_blocks: int) -> float:
    """The time to copy blocks one way: each copy takes some time to start, and the bytes take the link's time."""
    copies = num_blocks * costs.copies_per_block * costs.seconds_per_copy
    return copies + num_blocks * costs.block_bytes / costs.link_bytes_per_second


def recompute_seconds(costs: Costs, num_tokens: int) -> float:
    """The time to compute keys and values again: one prefill of all the tokens."""
    return num_tokens / costs.prefill_tokens_per_second
