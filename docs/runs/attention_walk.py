"""The walk on the page about paged attention: a query over 14 keys, in blocks of 4, of which the last is not full."""

import numpy as np

from minipaged.reference.attention import attend
from minipaged.reference.kv_cache import KVCache
from minipaged.stepper import watch_attention

rng = np.random.default_rng(5)  # one in which m rises once late, and stays twice
q = 2 * rng.standard_normal(4).astype(np.float32)  # [head_dim]
K = rng.standard_normal((14, 4)).astype(np.float32)  # [keys, head_dim]
V = rng.standard_normal((14, 4)).astype(np.float32)  # [keys, head_dim]
run = watch_attention(
    attend,
    KVCache,
    q,
    K,
    V,
    [7, 1, 3, 5],
    num_blocks=8,
    block_size=4,
    taken=[2, 6],
    title="A query walks its block table",
)

rises = [turn["fade"] < 1 for turn in run.queries[0]["lengths"][0]["runs"][0]["turns"]]
assert rises == [True, False, True, False]
