"""Drafts in a plan: guessed tokens for decoding sequences, which the same step verifies.

A drafted token takes a slot, as a query token does. If it does not stand, the commit gives the slot back
(`Committer._commit_drafted`). So between two steps no table has a slot of a token that is not verified. Drafts take
only what is left when all requests of the step have their tokens and blocks, and nothing is preempted for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from minipaged.engine.batch import Plan, ScheduledRequest
from minipaged.engine.drafting import AdaptiveDrafts
from minipaged.engine.memory import Memory
from minipaged.engine.prompt_lookup import PromptLookup
from minipaged.engine.sequence import Request, SequenceState
from minipaged.events import Emit, TokensDrafted
from minipaged.params import SpeculativeConfig
from minipaged.steps import TO_DRAFT


class Drafts(ABC):
    """Guesses tokens, as many as a rule says (`drafting.py`)."""

    def __init__(self, rule: AdaptiveDrafts) -> None:
        self.rule = rule

    @abstractmethod
    def draft(self, request: Request, sequence: SequenceState, num_sequences: int) -> list[int]:
        """Return tokens that may come next in a sequence of this request, in a batch of `num_sequences`. The list is
        empty for a sequence with a grammar, because the grammar's mask is known for the next token only."""

    def any_for(self, plan: Plan) -> bool:
        """Whether a token would be drafted if all sequences of this plan went on decoding."""
        return any(self.draft(request, sequence, len(plan.rows)) for request, sequence in plan.owners())

    def note(self, sequence: SequenceState, num_drafted: int, num_accepted: int) -> None:
        """Note what became of a sequence's drafts in a step."""
        self.rule.note(sequence.draft_record, num_drafted, num_accepted)

    def added_to(self, plan: Plan, blocks: Memory, tokens_left: int, emit: Emit) -> Plan:
        """Return the plan with drafts added for its decoding sequences, and take slots for the drafted tokens. The
        sequences' own slots are taken already.

        `tokens_left`: the number of further tokens that the batch may run. `emit`: receives TokensDrafted.
        """
        num_sequences, parts = sum(len(part.work) for part in plan.scheduled), list[ScheduledRequest]()
        for part in plan.scheduled:
            request, may_draft = part.request, part.decodes and part.request.prompt_computed
            drafts, work = dict[int, tuple[int, ...]](), list[tuple[SequenceState, int]]()
            for sequence, num_tokens in part.work if may_draft and request.beam_search is None else ():
                # The last token of an output is not run, so none is drafted for its place or after it.
                most = min(tokens_left, request.max_output_tokens - len(sequence.output_token_ids) - 1)
                drafted = tuple(self.draft(request, sequence, num_sequences)[: max(0, most)])
                if sequence.table.blocks_needed(len(drafted)) > blocks.num_available:
                    drafted = ()
                if drafted:
                    drafts[sequence.sequence_id] = drafted
                    if emit.heard and TO_DRAFT not in drafted:  # a draft model's are known at the commit
                        emit(TokensDrafted(sequence.sequence_id, drafted))
                    blocks.append(sequence, len(drafted))
                else:
                    self.note(sequence, 0, 0)
                tokens_left -= len(drafted)
                work.append((sequence, num_tokens + len(drafted)))
            parts.append(ScheduledRequest(request, work, completes=True, drafts=drafts) if drafts else part)
        return Plan(parts, plan.lane)


class LookupDrafts(Drafts):
    """Drafts by prompt lookup (`prompt_lookup.py`), of n-grams of `prompt_lookup_min` to `prompt_lookup_max` tokens."""

    def __init__(self, rule: AdaptiveDrafts, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        super().__init__(rule)
        self._lengths = prompt_lookup_min, prompt_lookup_max

    def draft(self, request: Request, sequence: SequenceState, num_sequences: int) -> list[int]:
        most = self.rule.num_to_draft(sequence.draft_record, num_sequences)
        if not most or sequence.grammar:
            return []
        if sequence.lookup is None:
            sequence.lookup = PromptLookup(sequence.tokens, *self._lengths)
        return sequence.lookup.draft(most)


class ModelDrafts(Drafts):
    """Drafts by the runner's draft model, which guesses them in the step that verifies them (`tiers/drafted.py`)."""

    def draft(self, request: Request, sequence: SequenceState, num_sequences: int) -> list[int]:
        """Return TO_DRAFT for each token to guess."""
        most = self.rule.num_to_draft(sequence.draft_record, num_sequences)
        return [] if sequence.grammar else [TO_DRAFT] * most


def drafts_of(asked: SpeculativeConfig | None, draft_cost: float = 0.0) -> Drafts | None:
    """Return the drafts that `asked` describes, or None without it. `draft_cost`: see `AdaptiveDrafts`."""
    if asked is None:
        return None
    rule = AdaptiveDrafts(asked.num_speculative_tokens, asked.disable_by_batch_size, draft_cost)
    return LookupDrafts(rule, *asked.lengths) if asked.model is None else ModelDrafts(rule)
