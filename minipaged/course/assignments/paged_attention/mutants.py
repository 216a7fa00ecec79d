"""Paged attention: a plain one, which loops over queries and heads; the reference's; and seeded bugs."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded, source_of

PLAIN = """
import numpy as np


def paged_attention(query, kv_cache, layer, block_tables, query_start, context_lens, scale):
    output = np.zeros_like(query)
    size = kv_cache.block_size
    group = query.shape[1] // kv_cache.num_kv_heads
    for s in range(len(context_lens)):
        start, stop = query_start[s], query_start[s + 1]
        for t in range(start, stop):
            last = context_lens[s] - (stop - t)
            m, l, o = np.full(query.shape[1], -np.inf), np.zeros(query.shape[1]), np.zeros(query.shape[1:])
            for j in range(last // size + 1):
                block = block_tables[s, j]
                keys, values = kv_cache.read(layer, np.array([[block]]))
                seen = min(size, last + 1 - j * size)
                keys, values = keys[0, :seen], values[0, :seen]
                for h in range(query.shape[1]):
                    scores = keys[:, h // group] @ query[t, h] * scale
                    m_new = max(m[h], scores.max())
                    fade = np.exp(m[h] - m_new)
                    p = np.exp(scores - m_new)
                    l[h] = l[h] * fade + p.sum()
                    o[h] = o[h] * fade + p @ values[:, h // group]
                    m[h] = m_new
            output[t] = o / l[:, None]
    return output
"""

ONE_BLOCK, BLOCKS, CAUSAL = "one query, one block", "contexts over several blocks", "several new tokens: causal"
HEADS, MIXED, LARGE = "grouped-query heads", "mixed batches", "large scores"
UNFILLED, MEMORY, LLAMA = "what nobody filled is not seen", "memory stays small", "a small Llama"

BUGS = {
    "no scale: scores are not multiplied by scale": (ONE_BLOCK, " * scale", ""),
    "not divided: the output is not divided by l": (ONE_BLOCK, "output[t] = o / l[:, None]", "output[t] = o"),
    "values from the keys: the keys are summed, not the values": (ONE_BLOCK, "p @ values[:", "p @ keys[:"),
    "float64 comes back: the output is float64, not the query's dtype": (
        ONE_BLOCK,
        "output = np.zeros_like(query)",
        "output = np.zeros(query.shape)",
    ),
    "the key before the last is the last: a query does not see the key at its own position": (
        ONE_BLOCK,
        "stop - t)",
        "stop - t) - 1 * (context_lens[s] > 1)",
    ),
    "reads past the last block's tokens: slots without a token are read": (
        ONE_BLOCK,
        "seen = min(size, last + 1 - j * size)",
        "seen = size",
    ),
    "sums do not fade: o is not scaled down when the maximum rises": (BLOCKS, "o[h] = o[h] * fade", "o[h] = o[h]"),
    "denominator does not fade: l is not scaled down when the maximum rises": (
        BLOCKS,
        "l[h] = l[h] * fade",
        "l[h] = l[h]",
    ),
    "only the last block counts: the output has the values of the last block alone": (
        BLOCKS,
        "o[h] = o[h] * fade + p",
        "o[h] = p",
    ),
    "a block too few when the last is full: the last block is left out unless it is full": (
        BLOCKS,
        "range(last // size + 1)",
        "range(max(1, (last + 1) // size))",
    ),
    "logical blocks for physical ones: the block table is not used": (
        BLOCKS,
        "block = block_tables[s, j]",
        "block = j",
    ),
    "sees the future: queries see the keys after their own position": (
        CAUSAL,
        "last = context_lens[s] - (stop - t)",
        "last = context_lens[s] - 1",
    ),
    "positions from the front: the new tokens are taken for the first of the context": (
        CAUSAL,
        "last = context_lens[s] - (stop - t)",
        "last = min(t - start + (stop - start == 1) * context_lens[s], context_lens[s] - 1)",
    ),
    "heads in turns: query head h reads key/value head h % kv_heads": (
        HEADS,
        "values[:, h // group]",
        "values[:, h % kv_cache.num_kv_heads]",
    ),
    "every query the first: all query heads use the first head's query": (HEADS, "@ query[t, h] *", "@ query[t, 0] *"),
    "everybody's table is the first's: all sequences read the first sequence's blocks": (
        MIXED,
        "block_tables[s, j]",
        "block_tables[0, j]",
    ),
    "no maximum: the largest score is not subtracted": (LARGE, "m_new = max(m[h], scores.max())", "m_new = 0.0"),
    "the maximum begins at 0: the maximum begins at 0, not at minus infinity": (
        LARGE,
        "np.full(query.shape[1], -np.inf)",
        "np.zeros(query.shape[1])",
    ),
    "weighs what is empty by 0: slots without a token are read and get the weight 0": (
        UNFILLED,
        "keys, values = keys[0, :seen], values[0, :seen]",
        "keys, values = np.nan_to_num(keys[0]), values[0]",
        "p = np.exp(scores - m_new)",
        "p = np.exp(scores - m_new) * (np.arange(size) < seen)",
    ),
    "gathers the whole context: all keys and values are copied together": (
        MEMORY,
        "            for j in range",
        "            everything = kv_cache.read(layer, block_tables[s : s + 1, : last // size + 1])\n"
        "            for j in range",
    ),
    "keeps all scores": (
        MEMORY,
        "                    m_new = max",
        "                    kept.append(scores)\n                    m_new = max",
        "    size = kv_cache",
        "    kept = []\n    size = kv_cache",
    ),
    "writes to the cache": (
        ONE_BLOCK,
        "seen = min(",
        "kv_cache.device_blocks[block, layer, 0, 0] *= 0.5\n                seen = min(",
    ),
    "writes to its arguments": (ONE_BLOCK, "    return output", "    query[:] = 0\n    return output"),
    "keeps the tables of the call before: the block tables of an earlier call are used again": (
        LLAMA,
        "    size = kv_cache",
        "    block_tables = OLD.setdefault(len(query) * 1000 + len(block_tables), block_tables)\n    size = kv_cache",
        "\n\ndef",
        "\nOLD = {}\n\n\ndef",
    ),
}

SEEDED = seeded({"loops": PLAIN, "the reference": source_of("reference/attention")}, BUGS)
