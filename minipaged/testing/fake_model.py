"""What stands in for a model where what is generated does not matter, but that it depends on all that was read does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from minipaged.contracts import Logits, Sampled, Tier


class FakeModel(ABC):
    """Logits after tokens, and how tokens are chosen by them."""

    tier: Tier

    @abstractmethod
    def logits(self, tokens: Sequence[int], vocab_size: int) -> Any:
        """A row [vocab] after `tokens`: arbitrary, but always the same for the same tokens."""

    @abstractmethod
    def batch(self, rows: Sequence[Any], vocab_size: int) -> Logits:
        """Rows as `Tier.sample` takes them: [rows, vocab]."""

    @abstractmethod
    def logprobs(self, rows: Sequence[Any], token_ids: Sequence[int], num_logprobs: int) -> Sequence[Sampled]:
        """What is told of given tokens: token i by row i."""
