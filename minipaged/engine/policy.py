"""The engine's own policy: first come, first served (paper, section 4.5).

This is what is right in assignment 4: students write it, the grader compares theirs with it, and the engine is run by
it. It is asked, and decides; `scheduler.py` asks, and carries out.

1. Every running request gets its tokens: decoding ones first, then those that still compute a prompt share what is left
   of the batch, in order of arrival (chunked prefill).
2. While the blocks for that are not there, the latest arrival makes room, and comes back by whichever way costs less.
   So the oldest always gets on, it ends some day, and then the next one is the oldest: liveness.
3. Those that wait come in in order of arrival, as long as their blocks are there, and one more for each sequence that
   runs already and can still need one. The first that has to wait ends it: nobody overtakes.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipaged.scheduling import Costs, RequestView, Way


class FirstComeFirstServed:
    """In order of arrival; all of a request's sequences or none; the latest arrival makes room."""

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, costs: Costs
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_tokens = max_num_batched_tokens
        # A sequence that runs takes one token of each batch at least.
        self.max_sequences = min(max_num_seqs, max_num_batched_tokens)
        self.costs = costs

    def turn(self, request: RequestView) -> tuple[float, ...]:
        """Whose turn it is: the smaller, the earlier. Of a request it is always the same, and no two have the same."""
        return (request.arrival,)

    # --- Who can be served at all -----------------------------------------------------------------

    def fits(self, request: RequestView) -> bool:
        """Whether the request could be served if it had everything to itself. If not, the answer to it is NEVER."""
        return request.num_sequences <= self.max_sequences and self.most_blocks(request) <= self.num_blocks

    def most_blocks(self, request: RequestView) -> int:
        """Most blocks that the request can come to hold: only the prompt's full blocks are sure to be shared."""
        if request.max_output_tokens == 1:  # it has no sequences but its prompt
            return self.blocks_for(request.prompt_tokens)
        shared = request.prompt_tokens // self.block_size
        # The last token is chosen but never run, so it needs no slot.
        each = self.blocks_for(request.prompt_tokens + request.max_output_tokens - 1)
        return shared + request.num_sequences * (each - shared)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    # --- Every step -------------------------------------------------------------------------------

    def share_tokens(self, running: Sequence[RequestView]) -> dict[str, int]:
        """How many tokens each running request gets: decoding ones first, then prompts, each in its turn."""
        left = self.max_tokens
        tokens: dict[str, int] = {}
        for request in sorted(running, key=lambda r: (not r.decodes, self.turn(r))):
            tokens[request.request_id] = min(request.tokens_to_run, left)
            left -= tokens[request.request_id]
        return tokens

    def victim(self, running: Sequence[RequestView]) -> str:
        """Who makes room, when blocks are short: whose turn is last."""
        return max(running, key=self.turn).request_id

    def way_back(self, request: RequestView, host_free: int) -> Way:
        """How the victim comes back: the cheaper way, if the host has room for its blocks."""
        return "swap" if request.num_blocks <= host_free and self.price(request) < 0 else "recompute"

    def price(self, request: RequestView) -> float:
        """Seconds that swapping costs more than recomputing."""
        return swap_seconds(self.costs, request.num_blocks) - recompute_seconds(self.costs, request.num_tokens)

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> list[str]:
        """Who comes in now: each in its turn, up to the first that has to wait."""
        queue = sorted(waiting, key=self.turn)
        if not queue or queue[0].blocks_needed > num_free:
            return []  # as it mostly is: then there is no need to look at all that run
        admitted: list[str] = []
        # Held back for those that run, or the newcomer would soon be preempted for their next blocks.
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
        """Blocks that a request with so many will ask for next: one for each sequence, unless it can need no more."""
        return max(0, min(request.num_sequences, self.most_blocks(request) - num_blocks))


# --- What the ways back cost (paper, section 4.5, Fig. 19) --------------------------------------------
# Nowhere else is this reckoned. Tiers and simulated machines say what their `Costs` are, and no more.


def swap_seconds(costs: Costs, num_blocks: int) -> float:
    """What it takes to copy blocks out, and in again."""
    return 2 * carry_seconds(costs, num_blocks)


def carry_seconds(costs: Costs, num_blocks: int) -> float:
    """One way: each copy takes its time to start, whatever its size, and all bytes take the link's time for them."""
    copies = num_blocks * costs.copies_per_block * costs.seconds_per_copy
    return copies + num_blocks * costs.block_bytes / costs.link_bytes_per_second


def recompute_seconds(costs: Costs, num_tokens: int) -> float:
    """What it takes to compute keys and values again: one prefill of all the tokens."""
    return num_tokens / costs.prefill_tokens_per_second
