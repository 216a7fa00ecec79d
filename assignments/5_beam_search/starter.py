"""Assignment 5: beam search. Write the methods; everything you need is in handout.md.

minipaged grade beam-search starter.py
"""

from minipaged.contracts import BeamMove, BeamStep  # noqa: F401  (what `step` returns is made of them)
from minipaged.errors import BadLogits  # noqa: F401  (you will raise it)


class BeamSearch:
    """The search of one request: ranks the candidates of all its beams together, step by step.

    It decides; the engine carries the decisions out on the block tables. Keep all state in `self`: the engine steps a
    deep copy, and many searches run at once.
    """

    def __init__(self, params, prompt_length, max_length, eos_token_ids):
        """`params`: a BeamSearchParams (beam_width, length_penalty, early_stopping, ignore_eos are yours to use).

        `max_length`: prompt and output together, in tokens. `eos_token_ids`: the tokens that end a sequence.
        """
        raise NotImplementedError

    def step(self, logits, rows, cumulative_logprobs):
        """Continue every beam by one token; return a BeamStep.

        `logits`: an array [rows, vocab]. `rows[i]` is the row of beam i, `cumulative_logprobs[i]` its sum so far. At
        the first step there is one beam (the prompt), later as many as survived.

        `BeamStep.survivors`: BeamMoves of the beams that go on, best first; empty when the search is over.
        `BeamStep.finished`: pairs (BeamMove, score) of the sequences that ended here and are kept for the ranking.
        Raises BadLogits when a beam's row holds NaN, plus infinity, or nothing but minus infinity.
        """
        raise NotImplementedError
