"""Grammars as the engine uses them: each sequence of a request with `structured_outputs` has a state
(`sequence.SequenceGrammar`), whose bits say which tokens may come next.

    arrive: compile ──► Grammar.begin ──► state of the first sequence; its bits go into the prompt's step
    commit: the chosen token ──► consume ──► the bits for the next token
    launch: the bits of all sequences that choose a token go into the step (`StepInput.allowed`)

- A state depends on the output's tokens alone. So it stays as it is when its sequence is preempted, swapped or computed
  again, and a prefix found in the cache makes no difference.
- The state needs every token of the output. So with asynchronous scheduling the next step waits for the tokens of the
  one before, as it does for penalties (`Sampling.needs_tokens`).
- A fork copies the state.

`models/grammars.py` has the grammars for real models. Tests use simpler ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from minipaged.engine.batch import Plan
from minipaged.engine.sequence import SequenceGrammar
from minipaged.params import StructuredOutputsParams
from minipaged.steps import AllowedTokens


class Grammar(Protocol):
    """A compiled grammar. Any number of sequences may follow it."""

    def begin(self, final_token_ids: Collection[int]) -> SequenceGrammar:
        """Return the state of an empty output. `final_token_ids`: the tokens that end a sequence of the request."""


Compile = Callable[[StructuredOutputsParams], Grammar]
"""Compiles a request's grammar, or returns it if it has been compiled before. Raises InvalidRequest."""


def allowed_tokens(plan: Plan) -> tuple[AllowedTokens, ...]:
    """The allowed tokens of the sequences that have a grammar and choose tokens in this step."""
    return tuple(
        AllowedTokens(sequence.sequence_id, sequence.grammar.bits)
        for part in plan.scheduled
        if part.num_choices > 0 and part.work[0][0].grammar
        for sequence, _ in part.work
        if sequence.grammar
    )
