"""How many tokens to draft: the number that pays best, judged by a sequence's earlier drafts.

A step that verifies k drafted tokens of a sequence runs k + 1. If each stands with probability a, the step gives
1 + a + ... + a^k tokens. If each one makes the step longer by the share c, drafting gains where

    (1 + a + ... + a^k) / (1 + k c) > 1             (Leviathan et al., ICML 2023, theorem 3.8)

and the best k is the one with the largest quotient. Both numbers are estimated:

- a, for each sequence, from what became of its drafts. Older ones count less with every step, and a share is assumed
  where little is known. So a sequence whose drafts are refused drafts fewer tokens, then none; after some steps without
  drafts it tries one again.
- c, from the batch. Reading the weights takes as long as computing with `tokens_per_read` tokens, so a step of n
  sequences takes the time of tokens_per_read + n tokens. One drafted token for each sequence adds n, so
  c = n / (tokens_per_read + n). A single sequence drafts nearly for free. In a large batch c is nearly 1: a drafted
  token costs as much as any other.

A draft model runs k + 1 passes, one of them in every step. If a pass takes the share s of reading the model's weights
(`draft_cost`), c becomes (c + s) / (1 + s).

The rule measures no time, so a run can be repeated exactly.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftRecord:
    """What became of a sequence's drafts. Tokens after the first refused one are not counted: nobody looked at them."""

    num_tested: float = 0.0
    """Drafted tokens that were accepted or refused, faded."""
    num_accepted: float = 0.0
    """Drafted tokens that were accepted, faded."""


@dataclass(frozen=True, slots=True)
class AdaptiveDrafts:
    """The rule. Its defaults are measured on a CPU (docs/concepts/speculation.md). The first two settings have vLLM's
    names."""

    num_speculative_tokens: int
    """The most tokens to draft."""
    disable_by_batch_size: int | None = None
    """A batch of this many sequences or more drafts nothing. None: no limit."""
    draft_cost: float = 0.0
    """The time of a draft model's pass, as a share of reading the model's weights; 0 if no model guesses."""
    tokens_per_read: float = 12.0
    """The number of tokens whose arithmetic takes as long as reading the model's weights."""
    memory: float = 0.9
    """The factor by which a record's older drafts count less with each step."""
    hope: float = 0.6
    """The share of accepted tokens that is assumed of a sequence without a record."""
    hope_weight: float = 1.0
    """The number of tested tokens that this assumption counts for."""

    def acceptance(self, record: DraftRecord) -> float:
        """Return the share of drafted tokens that is expected to stand, 0 to 1."""
        weight = record.num_tested + self.hope_weight
        return (record.num_accepted + self.hope * self.hope_weight) / weight

    def num_to_draft(self, record: DraftRecord, num_sequences: int) -> int:
        """Return the number of tokens to draft for a sequence in a batch of `num_sequences`; 0 if none pays."""
        if self.disable_by_batch_size is not None and num_sequences >= self.disable_by_batch_size:
            return 0
        acceptance, cost = self.acceptance(record), num_sequences / (self.tokens_per_read + num_sequences)
        cost = (cost + self.draft_cost) / (1 + self.draft_cost)  # a draft model has a pass in every step
        best, best_gain, num_tokens, stands = 0, 1.0, 1.0, 1.0
        for k in range(1, self.num_speculative_tokens + 1):
            stands *= acceptance
            num_tokens += stands
            if (gain := num_tokens / (1 + k * cost)) <= best_gain:  # each further token adds less
                break
            best, best_gain = k, gain
        return best

    def note(self, record: DraftRecord, num_drafted: int, num_accepted: int) -> None:
        """Add a step of the sequence to its record: `num_accepted` of `num_drafted` tokens stood. Both are 0 where
        nothing was drafted."""
        record.num_tested = record.num_tested * self.memory + min(num_drafted, num_accepted + 1)
        record.num_accepted = record.num_accepted * self.memory + num_accepted
