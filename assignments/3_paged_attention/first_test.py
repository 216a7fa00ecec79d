"""A first test of your attention: `pytest`, in this folder. More of them are yours to write."""

import numpy as np
from paged_attention import paged_attention

from minipaged.reference.kv_cache import KVCache


def test_each_query_sees_the_positions_up_to_its_own():
    cache = KVCache(num_layers=1, num_blocks=2, block_size=2, num_kv_heads=1, head_dim=1)
    keys, values = np.zeros((2, 1, 1), np.float32), np.array([1, 3], np.float32).reshape(2, 1, 1)
    cache.write(0, [2, 3], keys, values)  # the slots of block 1
    query = np.zeros((2, 1, 1), np.float32)  # two tokens of one sequence
    out = paged_attention(query, cache, 0, np.array([[1]]), np.array([0, 2]), np.array([2]), 1.0)
    assert np.allclose(out.ravel(), [1, 2])  # the second sees both, and scores are equal
