"""Windows: two right classes, written differently, and seeded bugs."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded

FIRST = '''
class Windows:
    """Everything follows from the first position that a token sees."""

    def __init__(self, block_size, windows, allocator):
        self.block_size, self.windows, self.allocator = block_size, windows, allocator

    def visible(self, group, position):
        return list(range(self._first(group, position), position // self.block_size + 1))

    def give_back(self, tables, position):
        for group, table in enumerate(tables):
            for i in range(self._first(group, position)):
                if table[i] is not None:
                    self.allocator.free(table[i])
                    table[i] = None
        return tables

    def longest_hit(self, cached):
        for n in range(len(cached[0]), 0, -1):
            first = [self._first(group, n * self.block_size) for group in range(len(self.windows))]
            seen = [table[start:n] for table, start in zip(cached, first)]
            if all(None not in blocks for blocks in seen):
                for blocks in seen:
                    for block in blocks:
                        self.allocator.share(block)
                return [[None] * start + blocks for start, blocks in zip(first, seen)]
        return [[] for _ in cached]

    def _first(self, group, position):
        """The logical block of the first position that the token sees."""
        window = self.windows[group]
        if window is None:
            return 0
        return max(0, position - window + 1) // self.block_size
'''

LAST_SEEN_BY = '''
class Windows:
    """Everything follows from the last token that sees a block."""

    def __init__(self, block_size, windows, allocator):
        self.size, self.pool = block_size, allocator
        self.windows = [float("inf") if window is None else window for window in windows]

    def visible(self, group, position):
        return [i for i in range(position + 1) if i * self.size <= position <= self.last_seen_by(group, i)]

    def give_back(self, tables, position):
        return [[self.kept(group, i, block, position) for i, block in enumerate(tables[group])]
                for group in range(len(tables))]

    def longest_hit(self, cached):
        longest = 0
        for n in range(1, len(cached[0]) + 1):
            if all(block is not None or self.last_seen_by(group, i) < n * self.size
                   for group, table in enumerate(cached) for i, block in enumerate(table[:n])):
                longest = n
        tables = [[None] * longest for _ in cached]
        for group, table in enumerate(cached):
            for i in range(longest):
                if self.last_seen_by(group, i) >= longest * self.size:
                    tables[group][i] = table[i]
                    self.pool.share(table[i])
        return tables

    def last_seen_by(self, group, logical_block):
        return (logical_block + 1) * self.size - 1 + self.windows[group] - 1

    def kept(self, group, logical_block, block, position):
        if block is None or self.last_seen_by(group, logical_block) >= position:
            return block
        self.pool.free(block)
'''

ALL, SEES, PASSED = "a group that sees everything", "what a token sees", "what a window has passed"
GROUPS, OTHERS = "each group by its window", "blocks that others hold"
HIT, HITS = "a hit of a group with a window", "a hit of all groups"

FIRST_SEEN = "max(0, position - window + 1) // self.block_size"
TO_PASS = "for i in range(self._first(group, position)):"
IS_HELD = "if table[i] is not None:"
FREE = "                    self.allocator.free(table[i])\n"
IN_SIGHT = "first = [self._first(group, n * self.block_size) for"
IS_HIT = "if all(None not in blocks for blocks in seen):"
SHARE = "                for blocks in seen:\n"
NO_HOLES_SHARED = (
    "                    for block in blocks:\n",
    "                    for block in filter(lambda block: block is not None, blocks):\n",
)
LENGTHS = "for n in range(len(cached[0]), 0, -1):"

BUGS = {
    "no window, no sight: a group without a window sees only the token itself": (
        ALL,
        "return 0\n",
        "return position // self.block_size\n",
    ),
    "the token itself is not there: visible leaves out the block of the token": (
        ALL,
        "position // self.block_size + 1",
        "position // self.block_size",
    ),
    "nothing is for ever: give_back gives back the full blocks of a group without a window": (
        ALL,
        TO_PASS,
        "for i in range(self._first(group, position) if self.windows[group] else position // self.block_size):",
    ),
    "a window too small: a token sees only w - 1 tokens, itself among them": (
        SEES,
        FIRST_SEEN,
        "max(0, position - window + 2) // self.block_size",
    ),
    "a window too large: a token sees w tokens and itself": (
        SEES,
        FIRST_SEEN,
        "max(0, position - window) // self.block_size",
    ),
    "before the beginning: the first tokens see positions below 0": (
        SEES,
        FIRST_SEEN,
        "(position - window + 1) // self.block_size",
    ),
    "whole blocks only: a block that is seen in part is not visible": (
        SEES,
        FIRST_SEEN,
        "-(-max(0, position - window + 1) // self.block_size)",
    ),
    "a block too many: a token sees the block before its window too": (
        SEES,
        FIRST_SEEN,
        "max(0, max(0, position - window + 1) // self.block_size - 1)",
    ),
    "a token too early: give_back gives back what only the token at position still sees": (
        PASSED,
        TO_PASS,
        "for i in range(min(len(table), self._first(group, position + 1))):",
    ),
    "a token too late: give_back keeps what only the token before position has seen": (
        PASSED,
        TO_PASS,
        "for i in range(self._first(group, max(0, position - 1))):",
    ),
    "the last one goes: give_back gives back the last block as soon as it is full": (
        PASSED,
        TO_PASS,
        "for i in [*range(self._first(group, position)), *[len(table) - 1] * (table != [] and "
        "position == len(table) * self.block_size)]:",
    ),
    "one at a time: give_back gives back no more than one block of a group": (
        PASSED,
        "                    table[i] = None\n",
        "                    table[i] = None\n                    break\n",
    ),
    "a hole is given back: give_back does not look whether a block is still there": (PASSED, IS_HELD, "if True:"),
    "a hole and no room: the table has a hole, and the block is not free": (PASSED, FREE, ""),
    "gone and still there: the table keeps the number of a block that is free": (
        PASSED,
        "                    table[i] = None\n",
        "                    pass\n",
    ),
    "holes are left out: give_back returns shorter tables": (
        PASSED,
        "        return tables\n",
        "        return [[block for block in table if block is not None] for table in tables]\n",
    ),
    "one window for all: every group gives back what the first group's window has passed": (
        GROUPS,
        TO_PASS,
        "for i in range(self._first(0, position)):",
    ),
    "the window of another group: the windows are read in the reverse order": (
        GROUPS,
        "window = self.windows[group]",
        "window = self.windows[-1 - group]",
    ),
    "shared is kept: give_back keeps a block that others hold too": (
        OTHERS,
        IS_HELD,
        "if table[i] is not None and self.allocator.ref_count(table[i]) == 1:",
    ),
    "taken from a sibling: give_back frees a block that others hold too": (
        OTHERS,
        FREE,
        "                    while self.allocator.ref_count(table[i]):\n    " + FREE,
    ),
    "one sequence for all: give_back begins where it has ended last, for whatever sequence": (
        OTHERS,
        TO_PASS,
        "for i in self._from_there(group, position):",
        "    def _first(",
        "    def _from_there(self, group, position):\n"
        "        ends = self.__dict__.setdefault('ends', {})\n"
        "        start, ends[group] = ends.get(group, 0), self._first(group, position)\n"
        "        return range(start, ends[group])\n\n"
        "    def _first(",
    ),
    "without its window: a hit needs only its last block": (
        HIT,
        IS_HIT,
        "if all(table[n - 1] is not None for table in cached):",
        *NO_HOLES_SHARED,
    ),
    "a hole in sight: a hit may lack the first block of its window": (
        HIT,
        IS_HIT,
        "if all(None not in blocks[1:] for blocks in seen):",
        *NO_HOLES_SHARED,
    ),
    "a hit too early: the window is the one of the hit's last token": (
        HIT,
        IN_SIGHT,
        "first = [self._first(group, n * self.block_size - 1) for",
    ),
    "a hit too late: the window is the one of the second token after the hit": (
        HIT,
        IN_SIGHT,
        "first = [min(n, self._first(group, n * self.block_size + 1)) for",
    ),
    "from the left: a hit ends at the first block that is not cached": (
        HIT,
        LENGTHS,
        "for n in range(next((i for i in range(len(cached[0])) if any(table[i] is None for table in cached)), "
        "len(cached[0])), 0, -1):",
    ),
    "all or nothing: a hit has all blocks of the text": (HIT, LENGTHS, "for n in [len(cached[0])]:"),
    "the shortest: the first hit from the left is taken": (HIT, LENGTHS, "for n in range(1, len(cached[0]) + 1):"),
    "no reference: a hit takes no references": (HIT, "self.allocator.share(block)", "pass"),
    "more than it sees: a hit holds all cached blocks before its window": (
        HIT,
        "            seen = [table[start:n] for table, start in zip(cached, first)]\n",
        "            seen = [table[start:n] for table, start in zip(cached, first)]\n"
        "            if all(None not in table[:n] for table in cached):\n"
        "                first, seen = [0] * len(cached), [table[:n] for table in cached]\n",
    ),
    "one group is enough: a hit of any group is a hit": (
        HITS,
        IS_HIT,
        "if any(None not in blocks for blocks in seen):",
        *NO_HOLES_SHARED,
    ),
    "only windows count: a hit may lack blocks of a group that sees everything": (
        HITS,
        IS_HIT,
        "if all(None not in blocks for blocks, window in zip(seen, self.windows) if window):",
        *NO_HOLES_SHARED,
    ),
    "the last group is not asked: a hit may lack blocks of the last group": (
        HITS,
        IS_HIT,
        "if all(None not in blocks for blocks in seen[:-1]):",
        *NO_HOLES_SHARED,
    ),
    "references of one group: a hit takes references on the first group's blocks alone": (
        HITS,
        SHARE,
        "                for blocks in seen[:1]:\n",
    ),
}

SEEDED = seeded({"the first that is seen": FIRST, "the last that sees it": LAST_SEEN_BY}, BUGS)
