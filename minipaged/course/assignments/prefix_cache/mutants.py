"""Prefix caches: two right ones, written differently, and seeded bugs."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded

CHILDREN = '''"""A prefix cache that is a tree of blocks."""

from collections import OrderedDict


def num_common(one, other):
    """The number of tokens with which both begin."""
    count = 0
    for a, b in zip(one, other):
        if a != b:
            break
        count += 1
    return count


class PrefixCache:
    """Each cached block knows its tokens and its children."""

    def __init__(self, block_size, allocator):
        self.block_size = block_size
        self._allocator = allocator
        self._children = {None: []}  # a cached block, or None for the root -> the cached blocks after it
        self._parent = {}
        self._tokens = {}
        self._order = OrderedDict()  # every cached block; the one used longest ago comes first

    def match(self, tokens):
        found, num_tokens, parent = [], 0, None
        while True:
            rest = tokens[num_tokens : min(num_tokens + self.block_size, len(tokens) - 1)]
            common, block = self._longest(parent, rest)
            if common > 0:
                found.append(block)
            num_tokens += common
            if common < self.block_size:
                break
            parent = block
        self._use(found)
        return found, num_tokens

    def publish(self, tokens, table):
        path, parent = [], None
        blocks = list(table.blocks)
        for start in range(0, len(tokens), self.block_size):
            logical = start // self.block_size
            own = list(tokens[start : start + self.block_size])
            common, cached = self._longest(parent, own)
            if common == len(own) == self.block_size:
                if cached != blocks[logical]:
                    table.replace(logical, cached)
                block = cached
            elif common == len(own):
                break  # another one begins with the tokens of the last
            else:
                block = blocks[logical]
                for child in list(self._children[parent]):
                    if own[: len(self._tokens[child])] == self._tokens[child]:
                        self._drop(child)
                self._add(block, parent, own)
            path.append(block)
            parent = block
        self._use(path)

    def evict(self, num_blocks):
        evicted = []
        for block in list(self._order):
            if len(evicted) == num_blocks:
                break
            if self._allocator.ref_count(block) == 1:
                self._drop(block)
                evicted.append(block)
        return evicted

    def _longest(self, parent, tokens):
        """How many of the tokens a child begins with at most, and that child."""
        best = 0, None
        for block in self._children[parent]:
            common = num_common(self._tokens[block], tokens)
            if common > best[0]:
                best = common, block
        return best

    def _add(self, block, parent, tokens):
        self._allocator.share(block)
        self._children[parent].append(block)
        self._children[block] = []
        self._parent[block], self._tokens[block] = parent, tokens
        self._order[block] = None

    def _drop(self, block):
        self._children[self._parent.pop(block)].remove(block)
        del self._children[block], self._tokens[block], self._order[block]
        self._allocator.free(block)

    def _use(self, path):
        for block in reversed(path):  # so the last one is evicted before those that it comes after
            self._order.move_to_end(block)
'''

WHOLE_TEXTS = '''
class PrefixCache:
    """A dictionary from whole texts to blocks: a block's name is all tokens up to its end."""

    def __init__(self, block_size, allocator):
        self.size, self.pool, self.now = block_size, allocator, 0
        self.block_of, self.used = {}, {}

    def match(self, tokens):
        sought = tuple(tokens[:-1])
        best, n = (), 0
        for text in self.block_of:
            common = 0
            while common < min(len(text), len(sought)) and text[common] == sought[common]:
                common += 1
            if common > n:
                best, n = text, common
        texts = [best[:end] for end in self._ends(best) if end - self.size < n]
        self._use(texts)
        return [self.block_of[text] for text in texts], n

    def publish(self, tokens, table):
        tokens, texts = tuple(tokens), []
        for i, end in enumerate(self._ends(tokens)):
            text, block = tokens[:end], table.blocks[i]
            if end % self.size:
                longer = range(end, end - end % self.size + self.size + 1)
                if any(known[:end] == text and len(known) in longer for known in self.block_of):
                    break
            elif text in self.block_of:
                if self.block_of[text] != block:
                    table.replace(i, self.block_of[text])
                texts.append(text)
                continue
            for shorter in range(i * self.size + 1, end):
                if text[:shorter] in self.block_of:
                    self._forget(text[:shorter])
            self.pool.share(block)
            self.block_of[text] = block
            texts.append(text)
        self._use(texts)

    def evict(self, n):
        gone = []
        for text in sorted(self.block_of, key=lambda text: (self.used[text], -len(text))):
            if len(gone) < n and self.pool.ref_count(self.block_of[text]) < 2:
                gone.append(self._forget(text))
        return gone

    def _ends(self, text):
        return [min(start + self.size, len(text)) for start in range(0, len(text), self.size)]

    def _forget(self, text):
        block = self.block_of.pop(text)
        self.pool.free(block)
        return block

    def _use(self, texts):
        self.now += 1
        for text in texts:
            self.used[text] = self.now
'''

EMPTY, FULL, ONCE = "an empty cache", "full blocks are found again", "one copy is enough"
PART, LAST = "the beginning of a block is found", "the last block is kept"
ORDER, HELD, SMALL = "the least recently used goes first", "never a block that is held", "a small pool"

BUGS = {
    "nothing is found: match always answers that nothing is cached": (
        FULL,
        "            if common > 0:\n                found.append(block)\n            num_tokens += common\n",
        "            common = 0\n",
    ),
    "nothing is left to run: match finds the last token too": (
        FULL,
        "min(num_tokens + self.block_size, len(tokens) - 1)",
        "num_tokens + self.block_size",
    ),
    "two are left to run: match leaves two tokens to run": (FULL, "len(tokens) - 1)]", "max(0, len(tokens) - 2))]"),
    "the words alone: a block is found by its own tokens, after any other block": (
        FULL,
        "for block in self._children[parent]:\n            common = num_common(self._tokens[block], tokens)\n",
        "for block in self._tokens:\n            common = num_common(self._tokens[block], tokens)\n",
    ),
    "only the first block: publish caches only the first block": (
        FULL,
        "for start in range(0, len(tokens), self.block_size):",
        "for start in range(0, min(len(tokens), self.block_size), self.block_size):",
    ),
    "no reference: the cache takes no reference on a block": (FULL, "self._allocator.share(block)", "pass"),
    "a reference too many: publish takes a reference on a block that is cached already": (
        FULL,
        "                block = cached\n",
        "                block = cached\n                self._allocator.share(block)\n",
    ),
    "two copies: the table keeps its own block where the content is cached": (
        ONCE,
        "table.replace(logical, cached)",
        "pass",
    ),
    "the wrong place: publish replaces the table's first block": (
        ONCE,
        "table.replace(logical, cached)",
        "table.replace(0, cached)",
    ),
    "whole blocks only: match finds no beginning of a block": (
        PART,
        "            if common > 0:\n                found.append(block)\n            num_tokens += common\n",
        "            if common == self.block_size:\n                found.append(block)\n"
        "                num_tokens += common\n",
    ),
    "any beginning will do: match takes the first child that begins with some of the tokens": (
        PART,
        "                best = common, block\n        return best",
        "                return common, block\n        return best",
    ),
    "all of the block: match counts the whole block where only its beginning fits": (
        PART,
        "            num_tokens += common\n",
        "            num_tokens += len(self._tokens[block]) if common else 0\n",
    ),
    "a hole is no end: match counts equal tokens behind a different one": (
        FULL,
        "        if a != b:\n            break\n        count += 1\n",
        "        count += a == b\n",
    ),
    "full blocks only: publish does not cache a last block that is not full": (
        LAST,
        "            common, cached = self._longest(parent, own)\n",
        "            if len(own) < self.block_size:\n                break\n"
        "            common, cached = self._longest(parent, own)\n",
    ),
    "the shorter one stays: a block that is only the beginning of a new one stays cached": (
        LAST,
        "                        self._drop(child)\n",
        "                        pass\n",
    ),
    "the shorter one goes in any case: publish drops all children of the new block's parent": (
        FULL,
        "if own[: len(self._tokens[child])] == self._tokens[child]:",
        "if True:",
    ),
    "cached twice: the last block is cached although another one begins with its tokens": (
        LAST,
        "            elif common == len(own):\n"
        "                break  # another one begins with the tokens of the last\n",
        "            elif common == len(own) and self._tokens.get(blocks[logical]) == own:\n                break\n",
    ),
    "the first in goes first: a block that is found again counts as old": (
        ORDER,
        "            parent = block\n        self._use(found)\n",
        "            parent = block\n",
    ),
    "a publisher uses nothing: a block that is published again counts as old": (
        ORDER,
        "            parent = block\n        self._use(path)\n",
        "            parent = block\n",
    ),
    "the latest goes first: evict gives back the block used last": (
        ORDER,
        "for block in list(self._order):",
        "for block in list(reversed(self._order)):",
    ),
    "parents before children: of a text that was used, the first block is evicted first": (
        ORDER,
        "for block in reversed(path):",
        "for block in path:",
    ),
    "one too few: evict gives back one block less": (
        ORDER,
        "if len(evicted) == num_blocks:",
        "if len(evicted) >= num_blocks - 1:",
    ),
    "stale: an evicted block is still found": (
        ORDER,
        "                self._drop(block)\n                evicted.append(block)\n",
        "                del self._order[block]\n                self._allocator.free(block)\n"
        "                evicted.append(block)\n",
        "            self._order.move_to_end(block)",
        "            if block in self._order:\n                self._order.move_to_end(block)",
    ),
    "evicted and kept: evict does not give up the cache's reference": (
        ORDER,
        "del self._children[block], self._tokens[block], self._order[block]\n        self._allocator.free(block)",
        "del self._children[block], self._tokens[block], self._order[block]",
    ),
    "held or not: evict gives back blocks that a sequence holds": (
        HELD,
        "if self._allocator.ref_count(block) == 1:",
        "if True:",
    ),
    "the first one held ends it: evict stops at a block that a sequence holds": (
        HELD,
        "            if self._allocator.ref_count(block) == 1:\n                self._drop(block)\n"
        "                evicted.append(block)\n",
        "            if self._allocator.ref_count(block) > 1:\n                break\n            self._drop(block)\n"
        "            evicted.append(block)\n",
    ),
    "all at once: evict gives back everything that it can": (
        ORDER,
        "            if len(evicted) == num_blocks:\n                break\n",
        "",
    ),
}

SEEDED = seeded({"a tree of blocks": CHILDREN, "whole texts": WHOLE_TEXTS}, BUGS)
