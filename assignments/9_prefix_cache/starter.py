"""Assignment 9: the prefix cache. Write the methods; everything you need is in handout.md.

minipaged grade prefix-cache starter.py
"""


class PrefixCache:
    """Keeps blocks after use, and finds them again by their tokens and all tokens before them.

    The cache holds one reference on each cached block. A cached block has a parent, the block before it in the text;
    the first block of a text has none.
    """

    def __init__(self, block_size, allocator):
        """Make an empty cache of blocks with `block_size` slots, which come from `allocator`."""
        raise NotImplementedError

    def match(self, tokens):
        """Return (blocks, num_tokens): cached blocks that hold the longest beginning of `tokens`, in order, and the
        number of tokens that they hold of it.

        All blocks but the last are full of these tokens; the last one may only begin with some of them. At least one
        token is left to run: `num_tokens` is less than len(tokens). The blocks count as used now. `match` takes no
        references; the caller does.
        """
        raise NotImplementedError

    def publish(self, tokens, table):
        """Cache the blocks of a sequence that has computed these tokens, the first ones of its table.

        A block whose content is cached already is not cached again. If it is full, the cached block takes its place
        in the table (`table.replace`). The last block may not be full. Then it is cached only if no cached block
        begins with its tokens after the same parent. A cached block whose tokens are only the beginning of a new one,
        after the same parent, is given up. The cached blocks of the table count as used now.
        """
        raise NotImplementedError

    def evict(self, num_blocks):
        """Give back up to `num_blocks` blocks that only the cache holds, and return them in order.

        The block that was used longest ago is the first. Of blocks that one call used, the last one of the text comes
        first, so that no block stays without its parent.
        """
        raise NotImplementedError
