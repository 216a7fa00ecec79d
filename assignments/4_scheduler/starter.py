"""Assignment 4: the scheduler. Write the methods; everything you need is in handout.md.

minipaged grade scheduler starter.py
"""

from minipaged.scheduling import Costs, RequestView  # noqa: F401  (types of the arguments)


class Scheduler:
    """Decides which requests are served next, and which ones make room. First come, first served.

    Its methods change nothing: neither their arguments, nor the scheduler after `__init__`. Lists of requests are in
    any order; `arrival` has the order of arrival.
    """

    def __init__(self, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, costs):
        """`num_blocks`: the blocks of the whole pool. `block_size`: the tokens of a block.

        `max_num_seqs`, `max_num_batched_tokens`: the most sequences and tokens of one batch. `costs`: a Costs.
        """
        raise NotImplementedError

    def fits(self, request):
        """Return whether the request (a RequestView) could be served if it had the pool and the batch to itself."""
        raise NotImplementedError

    def share_tokens(self, running):
        """Return the number of tokens that each running request runs in this step: a dict, request_id -> tokens."""
        raise NotImplementedError

    def victim(self, running):
        """Return the request_id of the request to preempt, when there are too few blocks. At least two run."""
        raise NotImplementedError

    def way_back(self, request, host_free):
        """Return how the victim comes back: "swap" or "recompute". `host_free`: free blocks of the host's pool."""
        raise NotImplementedError

    def admit(self, waiting, running, num_free, tokens_left):
        """Return the waiting requests to admit now: a list of request_ids in order of arrival.

        `num_free`: free blocks of the pool. `tokens_left`: tokens of the batch that are still unused, at least 1.
        """
        raise NotImplementedError
