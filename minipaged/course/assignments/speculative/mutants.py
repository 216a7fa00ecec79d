"""Speculative decoding: two right classes, written differently, and seeded bugs."""

from __future__ import annotations

from minipaged.course.grader.mutants import seeded

TOKEN_BY_TOKEN = '''
class Speculative:
    """Token by token."""

    def __init__(self, block_size):
        self.block_size = block_size

    def residual(self, p, q):
        excess = [max(0.0, a - b) for a, b in zip(p, q)]
        total = sum(excess)
        return [weight / total for weight in excess]

    def verify(self, p, q, drafted, u, v):
        k, tokens = len(drafted), []
        for i, token in enumerate(drafted):
            if u[i] * q[i][token] < p[i][token]:
                tokens.append(token)
            else:
                tokens.append(self._drawn(self.residual(p[i], q[i]), v[i]))
                return tokens
        tokens.append(self._drawn(p[k], v[k]))
        return tokens

    def roll_back(self, table, num_drafted, num_accepted):
        num_tokens = table.num_tokens - (num_drafted - num_accepted)
        table.trim(num_tokens)
        return num_tokens // self.block_size

    def _drawn(self, weights, v):
        """The first token whose running sum exceeds v."""
        running = 0.0
        for token, weight in enumerate(weights):
            running += weight
            if v < running:
                return token
        return weights.index(max(weights))  # by rounding, the sum is below 1
'''

STANDING_FIRST = '''
from bisect import bisect_right
from itertools import accumulate


class Speculative:
    """The number of tokens that stand, and then one draw."""

    def __init__(self, block_size):
        self.size = block_size

    def residual(self, p, q):
        common = [*map(min, p, q)]
        left = 1 - sum(common)
        return [(a - c) / left for a, c in zip(p, common)]

    def verify(self, p, q, drafted, u, v):
        n = 0
        while n < len(drafted) and u[n] < min(1, p[n][drafted[n]] / q[n][drafted[n]]):
            n += 1
        sums = [*accumulate(p[n] if n == len(drafted) else self.residual(p[n], q[n]))]
        return (*drafted[:n], bisect_right(sums, v[n] * sums[-1]))

    def roll_back(self, table, num_drafted, num_accepted):
        refused = num_drafted - num_accepted
        if refused:
            table.trim(table.num_tokens - refused)
        blocks = len(table.blocks)
        return blocks if table.num_tokens == blocks * self.size else blocks - 1
'''

PLAIN, STANDS, RESIDUAL = "nothing is drafted", "a drafted token stands, or is refused", "the residual"
PLACE, ALL, REFUSED = "the token in its place", "all tokens stand", "the first that is refused"
GREEDY, SHARES = "greedy tokens", "the distribution"
SLOTS, PUBLISHED = "slots of refused tokens", "blocks to publish"

EXCESS = "max(0.0, a - b)"
NEVER_0 = "sum(excess)", "sum(excess) or 1"
SHARE = "return [weight / total for weight in excess]"
IS_BELOW = "u[i] * q[i][token] < p[i][token]"
LOOP = "        for i, token in enumerate(drafted):\n"
FROM_RESIDUAL = "self._drawn(self.residual(p[i], q[i]), v[i])"
END_AT_REFUSED = "                return tokens\n"
BONUS = "        tokens.append(self._drawn(p[k], v[k]))\n"
DRAWN = "        running = 0.0\n"
ADD, IS_REACHED = "            running += weight\n", "            if v < running:\n                return token\n"
NUM_TOKENS = "num_tokens = table.num_tokens - (num_drafted - num_accepted)"
TRIM = "        table.trim(num_tokens)\n"
NUM_FULL = "return num_tokens // self.block_size"

BUGS = {
    "always the likeliest: v is not used": (PLAIN, DRAWN, f"        return weights.index(max(weights))\n{DRAWN}"),
    "a token too late: a draw compares before it adds": (PLAIN, ADD + IS_REACHED, IS_REACHED + ADD),
    "no draft, no token: nothing is chosen if nothing is drafted": (
        PLAIN,
        LOOP,
        f"        if not drafted:\n            return []\n{LOOP}",
    ),
    "upside down: a token stands with probability q / p": (STANDS, IS_BELOW, "u[i] * p[i][token] < q[i][token]"),
    "up to and with: a token stands if u is equal to p / q": (STANDS, IS_BELOW, "u[i] * q[i][token] <= p[i][token]"),
    "q is forgotten: a token stands with probability p": (STANDS, IS_BELOW, "u[i] < p[i][token]"),
    "p is forgotten: a token stands with probability q": (STANDS, IS_BELOW, "u[i] < q[i][token]"),
    "no luck: a token stands only if p is as large as q": (STANDS, IS_BELOW, "q[i][token] <= p[i][token]"),
    "only the likeliest: a token stands if the model finds no other likelier": (
        STANDS,
        IS_BELOW,
        "p[i][token] == max(p[i])",
    ),
    "not a distribution: the residual is not normalised": (RESIDUAL, SHARE, "return excess"),
    "the model's own: the residual is p": (RESIDUAL, EXCESS, "a"),
    "turned round: the residual is what q has more": (RESIDUAL, EXCESS, "max(0.0, b - a)"),
    "both sides: the residual is the distance of p and q": (RESIDUAL, EXCESS, "abs(a - b)"),
    "below zero: the residual has negative probabilities": (
        RESIDUAL,
        EXCESS,
        "a - b",
        "sum(excess)",
        "sum(excess) or 1",
    ),
    "in common: the residual is the smaller of p and q": (
        RESIDUAL,
        EXCESS,
        "min(a, b)",
        "sum(excess)",
        "sum(excess) or 1",
    ),
    "all alike: what p has more is equally likely": (RESIDUAL, EXCESS, "float(a > b)"),
    "it may come again: the token in the place of a refused one is drawn from p": (
        PLACE,
        FROM_RESIDUAL,
        "self._drawn(p[i], v[i])",
    ),
    "another draft: the token in the place of a refused one is drawn from q": (
        PLACE,
        FROM_RESIDUAL,
        "self._drawn(q[i], v[i])",
    ),
    "the likeliest in its place: a refused token is replaced by the likeliest of the residual": (
        PLACE,
        "                tokens.append(self._drawn(self.residual(p[i], q[i]), v[i]))\n",
        "                left = self.residual(p[i], q[i])\n                tokens.append(left.index(max(left)))\n",
    ),
    "the next number: the token in the place of a refused one is drawn with the next v": (
        PLACE,
        FROM_RESIDUAL,
        "self._drawn(self.residual(p[i], q[i]), v[i + 1])",
    ),
    "nothing in its place: no token is drawn where one was refused": (
        PLACE,
        f"                tokens.append({FROM_RESIDUAL})\n",
        "",
    ),
    "no bonus: no token is drawn after a draft that stands": (ALL, BONUS, f"        if not k:\n    {BONUS}"),
    "the wrong row: the token after the last drafted one is drawn from the row before": (
        ALL,
        "self._drawn(p[k], v[k])",
        "self._drawn(p[max(0, k - 1)], v[k])",
    ),
    "a draft for a bonus: the token after the last drafted one is drawn from q": (
        ALL,
        "self._drawn(p[k], v[k])",
        "self._drawn(q[k - 1] if k else p[k], v[k])",
    ),
    "the first number: the token after the last drafted one is drawn with the first v": (
        ALL,
        "self._drawn(p[k], v[k])",
        "self._drawn(p[k], v[0])",
    ),
    "the last is enough: a draft of which the last token stands stands as a whole": (
        REFUSED,
        LOOP,
        "        if k and u[-1] * q[-1][drafted[-1]] < p[k - 1][drafted[-1]]:\n"
        f"            return [*drafted, self._drawn(p[k], v[k])]\n{LOOP}",
    ),
    "on and on: the tokens after a refused one may stand": (REFUSED, END_AT_REFUSED, ""),
    "a bonus anyway: the token after the last drafted one is drawn though one was refused": (
        REFUSED,
        END_AT_REFUSED,
        "                break\n",
    ),
    "all or nothing: one refused token refuses those before it": (
        REFUSED,
        f"tokens.append({FROM_RESIDUAL})",
        f"tokens = [{FROM_RESIDUAL}]",
    ),
    "in advance: the residuals of all rows are computed first": (
        REFUSED,
        LOOP,
        f"        residuals = [self.residual(a, b) for a, b in zip(p, q) if a != b]\n{LOOP}",
    ),
    "certain is right: a token of which the draft is certain stands": (
        GREEDY,
        IS_BELOW,
        f"q[i][token] == 1 or {IS_BELOW}",
    ),
    "logarithms: log p and log q are compared, though p may be 0": (
        GREEDY,
        IS_BELOW,
        "u[i] < __import__('math').exp(__import__('math').log(p[i][token]) - __import__('math').log(q[i][token]))",
    ),
    "as without drafts: no drafted token stands, and the token is drawn from p": (
        SHARES,
        IS_BELOW,
        "False",
        FROM_RESIDUAL,
        "self._drawn(p[i], v[i])",
    ),
    "one number for two: u is used for the residual too": (
        SHARES,
        FROM_RESIDUAL,
        "self._drawn(self.residual(p[i], q[i]), u[i])",
    ),
    "a slot too many: the table keeps a slot for the token in the place of a refused one": (
        SLOTS,
        NUM_TOKENS,
        "num_tokens = min(table.num_tokens, table.num_tokens - (num_drafted - num_accepted) + 1)",
    ),
    "a slot too few: the latest token before the draft loses its slot": (
        SLOTS,
        NUM_TOKENS,
        "num_tokens = table.num_tokens - (num_drafted - num_accepted) - 1",
    ),
    "all drafts go: accepted tokens lose their slots too": (
        SLOTS,
        NUM_TOKENS,
        "num_tokens = table.num_tokens - num_drafted",
    ),
    "accepted in place of refused: as many slots go as tokens stand": (
        SLOTS,
        NUM_TOKENS,
        "num_tokens = table.num_tokens - num_accepted",
    ),
    "nothing goes back: the table keeps the slots of refused tokens": (SLOTS, TRIM, ""),
    "whole blocks stay: slots go back in the last block only": (
        SLOTS,
        TRIM,
        "        first = max(0, len(table.blocks) - 1) * self.block_size\n"
        "        table.trim(max(num_tokens, min(table.num_tokens, first)))\n",
    ),
    "to the boundary: a block that is not full goes back whole": (
        SLOTS,
        TRIM,
        "        table.trim(num_tokens // self.block_size * self.block_size)\n",
    ),
    "before it is verified: blocks with refused tokens are published": (
        PUBLISHED,
        NUM_FULL,
        "return (num_tokens + num_drafted - num_accepted) // self.block_size",
    ),
    "begun is full: a block that is not full is published": (PUBLISHED, NUM_FULL, "return len(table.blocks)"),
    "a token too early: the latest token counts, which has no keys and values yet": (
        PUBLISHED,
        NUM_FULL,
        "return (num_tokens + 1) // self.block_size",
    ),
    "tokens for blocks: the number of tokens is returned": (PUBLISHED, NUM_FULL, "return num_tokens"),
    "this draft alone: only blocks of accepted tokens are counted": (
        PUBLISHED,
        NUM_FULL,
        "return num_accepted // self.block_size",
    ),
    "whole drafts only: nothing is published where a token was refused": (
        PUBLISHED,
        NUM_FULL,
        "return num_tokens // self.block_size if num_accepted == num_drafted else 0",
    ),
}

SEEDED = seeded({"token by token": TOKEN_BY_TOKEN, "those that stand first": STANDING_FIRST}, BUGS)
