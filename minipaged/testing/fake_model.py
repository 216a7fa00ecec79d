"""The interface of fake models: their tokens mean nothing, but depend on everything that was read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from minipaged.contracts import Logits, Sampled, Tier


class FakeModel(ABC):
    """Logits after tokens, and a way to choose tokens from them."""

    tier: Tier

    @abstractmethod
    def logits(self, tokens: Sequence[int], vocab_size: int) -> Any:
        """Return a row [vocab] after `tokens`: arbitrary, but always the same for the same tokens."""

    @abstractmethod
    def batch(self, rows: Sequence[Any], vocab_size: int) -> Logits:
        """Return the rows in the form that `Tier.sample` takes: [rows, vocab]."""

    @abstractmethod
    def logprobs(self, rows: Sequence[Any], token_ids: Sequence[int], num_logprobs: int) -> Sequence[Sampled]:
        """Return the log-probabilities of given tokens: token i by row i."""
