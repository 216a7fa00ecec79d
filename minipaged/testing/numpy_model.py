"""A fake model in NumPy. It chooses as the reference tier does: sampling and beam search."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from minipaged.contracts import Sampled
from minipaged.testing.fake_model import FakeModel
from minipaged.tiers import reference_logprobs, reference_tier


def fake_logits(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return logits [vocab] after `tokens`."""
    return _logits(tuple(tokens), vocab_size).copy()


@lru_cache(maxsize=20_000)
def _logits(tokens: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """The logits are cached, because each request is also served alone to find the output that it must produce."""
    key = hash(tokens) & (2**64 - 1)
    return 2 * np.random.Generator(np.random.Philox(key=key)).standard_normal(vocab_size, dtype=np.float32)


class NumpyModel(FakeModel):
    """The fake model from whose logits any of the tiers can choose."""

    def __init__(self) -> None:
        self.tier = reference_tier()

    def logits(self, tokens: Sequence[int], vocab_size: int) -> np.ndarray:
        return fake_logits(tokens, vocab_size)

    def batch(self, rows: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
        return np.array(rows).reshape(len(rows), vocab_size)

    def logprobs(self, rows: Sequence[np.ndarray], token_ids: Sequence[int], num_logprobs: int) -> Sequence[Sampled]:
        return reference_logprobs(rows, token_ids, num_logprobs)
