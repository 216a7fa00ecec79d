"""A first test of your policy: `pytest`, in this folder. More of them are yours to write."""

from eviction import Eviction

from minipaged.simulation.floored_cache import FlooredCache


def test_a_pinned_block_stays():
    policy = Eviction(2, 2)
    policy.use(0, None)
    policy.use(1, None)
    assert policy.evict("device", [0]) == 1


def test_requests_end_and_no_block_is_lost():
    cache = FlooredCache(Eviction(2, 1), 2, 1)  # raises an error for a block that may not leave
    cache.begin([0, 1])
    cache.end(0)
    cache.begin([0, 2])
    cache.drain()
