"""Assignment 5: beam search. Write the methods; everything you need is in handout.md.

minipaged grade beam-search starter.py
"""

from minipaged.contracts import BeamMove, BeamStep  # noqa: F401  (`step` returns these)
from minipaged.errors import BadLogits  # noqa: F401  (you will raise it)


class BeamSearch:
    """The search of one request: ranks the candidates of all its beams together, step by step.

    The engine carries out its decisions on the block tables. Keep all state in `self`: the engine steps a deep copy,
    and many searches run at the same time.
    """

    def __init__(self, params, prompt_length, max_length, eos_token_ids):
        """`params`: a BeamSearchParams; use its beam_width, length_penalty, early_stopping and ignore_eos.

        `max_length`: the most tokens of prompt and output together. `eos_token_ids`: the tokens that end a sequence.
        """
        raise NotImplementedError

    def step(self, logits, rows, cumulative_logprobs):
        """Continue every beam by one token; return a BeamStep.

        `logits`: an array [rows, vocab]. `rows[i]` is the row of beam i, `cumulative_logprobs[i]` its sum so far. At
        the first step there is one beam (the prompt); later the beams are the survivors of the step before.

        `BeamStep.survivors`: BeamMoves of the beams that continue, best first; empty when the search is over.
        `BeamStep.finished`: pairs (BeamMove, score) of the sequences that ended in this step and are kept.
        Raises BadLogits when a beam's row contains NaN, plus infinity, or nothing but minus infinity.
        """
        raise NotImplementedError
