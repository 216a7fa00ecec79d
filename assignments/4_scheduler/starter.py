"""Assignment 4: the scheduler. Write the methods; everything you need is in handout.md.

minipaged grade scheduler starter.py
"""

from minipaged.scheduling import Costs, RequestView  # noqa: F401  (what the methods are given)


class Scheduler:
    """Decides who is served next, and who makes room. First come, first served.

    It is asked, and changes nothing: neither what it is given, nor itself after `__init__`. Lists of requests are in
    any order; `arrival` tells who came first.
    """

    def __init__(self, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, costs):
        """`num_blocks`: of the whole pool, of `block_size` tokens each.

        `max_num_seqs`, `max_num_batched_tokens`: sequences and tokens of one batch, at most. `costs`: a Costs.
        """
        raise NotImplementedError

    def fits(self, request):
        """Whether the request (a RequestView) could be served if it had the pool and the batch to itself: a bool."""
        raise NotImplementedError

    def share_tokens(self, running):
        """How many tokens each of the running requests runs in this step: a dict, request_id -> tokens."""
        raise NotImplementedError

    def victim(self, running):
        """Blocks are short: the request_id of the one that is preempted. At least two run."""
        raise NotImplementedError

    def way_back(self, request, host_free):
        """How the victim is to come back: "swap" or "recompute". `host_free`: free blocks of the host's pool."""
        raise NotImplementedError

    def admit(self, waiting, running, num_free, tokens_left):
        """Who of the waiting comes in now, all or none of its sequences: a list of request_ids, in order.

        `num_free`: free blocks of the pool. `tokens_left`: tokens of the batch that nobody has yet, at least 1.
        """
        raise NotImplementedError
