"""Assignment 11: windows. Write the methods; everything you need is in handout.md.

minipaged grade windows starter.py
"""


class Windows:
    """Decides which blocks a sequence keeps, if the model's layers are in groups and some see only a window.

    A sequence has a block table for each group: a list with its blocks in order, and None for each that was given back.
    Each list has the same length. Tokens are named by their position in the text, from 0 on.
    """

    def __init__(self, block_size, windows, allocator):
        """Serve blocks with `block_size` slots, which come from `allocator`.

        `windows`: for each group, the number of tokens that a token sees in its layers, itself among them, 2 or more;
        None: all tokens up to itself.
        """
        raise NotImplementedError

    def visible(self, group, position):
        """Return the logical blocks that the token at `position` sees in this group, its own among them: a list of
        indexes into the table of the group, in order."""
        raise NotImplementedError

    def give_back(self, tables, position):
        """Give back each block that no token from `position` on sees, and return the tables afterwards.

        The sequence gives up its reference on the block (`allocator.free`), and the table has None in its place. The
        token at `position` is the next one to run; the tables may already have slots for it and for later ones.
        """
        raise NotImplementedError

    def longest_hit(self, cached):
        """Return the tables with which a sequence begins that finds the most of its text in the prefix cache.

        `cached` has a list for each group: the cached blocks of the text in order, and None for each that is not
        cached. The sequence can begin with n blocks if everything is cached that the token after them sees, the one at
        n * block_size. The tables of the answer have n entries each, for the largest n. They hold the blocks that this
        token sees, with a reference on each (`allocator.share`), and None in all other places.
        """
        raise NotImplementedError
