"""Assignment 12: speculative decoding. Write the methods; everything you need is in handout.md.

minipaged grade speculative starter.py
"""


class Speculative:
    """Decides which drafted tokens stand, and gives back the slots of the others.

    A distribution is a list with a probability for each token of the vocabulary. One object serves all sequences: it
    keeps nothing from one call to the next.
    """

    def __init__(self, block_size):
        """Serve tables whose blocks have `block_size` slots."""
        raise NotImplementedError

    def residual(self, p, q):
        """Return the distribution of the token that takes the place of a refused one: max(0, p - q), normalised.

        `p`: the model's distribution. `q`: that of the draft, which is another one.
        """
        raise NotImplementedError

    def verify(self, p, q, drafted, u, v):
        """Return the tokens by which a sequence grows: the drafted tokens that stand, and one more.

        `drafted`: k tokens; token i was drawn from the distribution `q[i]`. `p`: k + 1 distributions of the model;
        `p[i]` is valid only if the first i drafted tokens stand. Drafted token i stands if `u[i]` is below p / q. `v`:
        k + 1 numbers. The token in the place of drafted token i is drawn with `v[i]`, the one after all of them with
        `v[k]`. All numbers are random, in [0, 1).
        """
        raise NotImplementedError

    def roll_back(self, table, num_drafted, num_accepted):
        """Give back the slots of refused tokens (`table.trim`); return the number of blocks that may be published.

        `table` has slots for all tokens that the step has run: those of the sequence, and `num_drafted` drafted ones at
        its end, of which the first `num_accepted` stand. The token that `verify` returned last is not among them. A
        block may be published if each of its slots has the keys and values of a token that stands.
        """
        raise NotImplementedError
