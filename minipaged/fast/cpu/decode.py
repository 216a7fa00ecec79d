"""Attention of one token on a CPU that multiplies pairs of bfloat16: keys and values go from memory into the product.

Decoding is bound by memory only if the work on each number takes no longer than fetching it. That was not so when keys
and values were first widened to float32 and stored. Here they are not copied: an array holds the address of each key of
a tile, in any block.

    scores    a vector holds 32 numbers of a key. It is multiplied by those of a query, pair by pair, and the sums of
              16 keys are reduced to one vector: in four rounds, two vectors become one
    weights   of 16 keys at a time, rounded to bfloat16
    values    two neighbouring keys are interleaved, for up to GROUP queries; the sums of 32 dimensions are in registers
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minipaged.fast.cpu.vectors import BITS32, BITS64, FLOATS, INTEGERS, LANES, OUT_BFLOATS, PAIRS, Vectors

GROUP = 4
"""The number of queries for which two keys' values are interleaved once."""
TILE = 64
"""The number of keys between two updates of the largest score."""


@intrinsic
def score_tile(typingctx, q, keys, size, group, head_dim, scale, p, o, m_l):
    """Compute the scores of `size` keys (up to TILE) for the `group` queries at q [group, head_dim]. m_l receives each
    query's largest score and sum. p [group, TILE] receives the weights in bfloat16. o [group, head_dim] is rescaled.
    All arguments are int64 (q, keys, p, o, m_l: addresses), except `scale`, a float32. At `keys` are the addresses of
    TILE keys; those past `size` may point to any existing key."""

    def codegen(context, builder, signature, arguments):
        Decode(builder, *arguments[3:5]).take_scores(*arguments[:3], *arguments[5:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5, types.float32, *[types.int64] * 3), codegen


@intrinsic
def add_values(typingctx, values, size, group, head_dim, p, o):
    """Add the weighted values to o. `values`: the values' addresses, like `keys` of `score_tile`."""

    def codegen(context, builder, signature, arguments):
        Decode(builder, *arguments[2:4]).add_values(*arguments[:2], *arguments[4:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 6), codegen


class Decode(Vectors):
    """Writes the instructions of `score_tile` and `add_values`, in LLVM's language."""

    def __init__(self, builder, group, head_dim) -> None:
        super().__init__(builder)
        self.group = group
        self.row_bytes = builder.mul(head_dim, BITS64(2))
        self.pieces = builder.lshr(head_dim, BITS64(5))  # the number of vectors in a key

    def take_scores(self, q, keys, size, scale, p, o, m_l) -> None:
        b = self.builder
        chunks = b.lshr(b.add(size, BITS64(LANES - 1)), BITS64(4))
        lanes = ir.Constant(INTEGERS, list(range(LANES)))
        vectors = cgutils.alloca_once(b, FLOATS, TILE // LANES)  # the scores of one query
        scale = self.spread(scale)
        with cgutils.for_range(b, self.group) as queries:
            query = b.add(q, b.mul(queries.index, self.row_bytes))
            at = self.place(m_l, queries.index, 8)
            before = self.load(at, ir.FloatType())
            highest = self.variable()
            b.store(self.spread(before), highest)
            with cgutils.for_range(b, chunks) as loop:
                first = b.mul(loop.index, BITS64(LANES))
                score = b.fmul(self.joined(self.products(query, self.place(keys, first, 8))), scale)
                there = b.icmp_signed("<", lanes, self.spread(b.trunc(b.sub(size, first), BITS32)))
                score = b.select(there, score, self.all_of(FLOATS, -math.inf))
                b.store(score, b.gep(vectors, [loop.index]))
                m = b.load(highest)
                b.store(b.select(b.fcmp_ordered(">", score, m), score, m), highest)
            m = self.over_lanes(b.load(highest), lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
            total = self.variable()
            with cgutils.for_range(b, chunks) as loop:
                weight = self.exp(b.fsub(b.load(b.gep(vectors, [loop.index])), m))
                b.store(b.fadd(b.load(total), weight), total)
                to = b.add(self.place(p, queries.index, 2 * TILE), b.mul(loop.index, BITS64(2 * LANES)))
                rounded = b.fptrunc(weight, OUT_BFLOATS)
                b.store(rounded, b.inttoptr(to, OUT_BFLOATS.as_pointer()), align=2)
            fade = self.exp(b.fsub(self.spread(before), m))
            total = self.over_lanes(b.load(total), b.fadd)
            old = self.spread(self.load(at, ir.FloatType(), 4))
            self.store(self.first_of(m), at)
            self.store(self.first_of(b.fadd(b.fmul(old, fade), total)), at, 4)
            sums = b.add(o, b.mul(queries.index, b.mul(self.row_bytes, BITS64(2))))
            with cgutils.for_range(b, b.mul(self.pieces, BITS64(2))) as loop:
                place = self.place(sums, loop.index, 64)
                self.store(b.fmul(self.load(place, FLOATS), fade), place)

    def products(self, query, keys):
        """Return a vector for each of LANES keys; the sum of its lanes is the key's score."""
        b = self.builder
        addresses = [self.load(keys, BITS64, 8 * j) for j in range(LANES)]
        sums = [self.variable() for _ in addresses]
        with cgutils.for_range(b, self.pieces) as loop:
            part = self.load(self.place(query, loop.index, 64), PAIRS)
            for address, total in zip(addresses, sums, strict=True):
                self.add_product(total, part, self.load(self.place(address, loop.index, 64), PAIRS))
        return [b.load(total) for total in sums]

    def joined(self, vectors):
        """Reduce LANES vectors to one, whose lane i is the sum over vector i."""
        b, half = self.builder, LANES // 2
        while half:
            starts = range(0, 2 * LANES, 2 * half)
            lower = [i for start in starts for i in range(start, start + half)]
            masks = [ir.Constant(INTEGERS, [i + more for i in lower]) for more in (0, half)]
            vectors = [
                b.fadd(*(b.shuffle_vector(x, y, mask) for mask in masks))
                for x, y in zip(vectors[0::2], vectors[1::2], strict=True)
            ]
            half //= 2
        return vectors[0]

    def over_lanes(self, x, join):
        """Combine all lanes; each lane of the result holds the total."""
        half = LANES // 2
        while half:
            mask = ir.Constant(INTEGERS, [i ^ half for i in range(LANES)])
            x = join(x, self.builder.shuffle_vector(x, x, mask))
            half //= 2
        return x

    def first_of(self, x):
        return self.builder.extract_element(x, BITS32(0))

    def exp(self, x):
        return self.power(self.builder.fmul(x, self.all_of(FLOATS, math.log2(math.e))))

    def add_values(self, values, size, p, o) -> None:
        b = self.builder
        pairs = b.lshr(b.add(size, BITS64(1)), BITS64(1))
        done = BITS64(0)
        for count in range(GROUP, 0, -1):
            times = b.udiv(b.sub(self.group, done), BITS64(count))
            with cgutils.for_range(b, times) as batches, cgutils.for_range(b, self.pieces) as loop:
                first = b.add(done, b.mul(batches.index, BITS64(count)))
                queries = [b.add(first, BITS64(g)) for g in range(count)]
                self.add_piece(values, pairs, loop.index, p, o, queries)
            done = b.add(done, b.mul(times, BITS64(count)))

    def add_piece(self, values, pairs, piece, p, o, queries) -> None:
        """Add the values' 32 dimensions of one piece to the sums of some queries."""
        b = self.builder
        places = [
            b.add(b.add(o, b.mul(query, b.mul(self.row_bytes, BITS64(2)))), b.mul(piece, BITS64(128)))
            for query in queries
        ]
        sums = [[self.variable(), self.variable()] for _ in queries]
        for place, totals in zip(places, sums, strict=True):
            for i, total in enumerate(totals):
                b.store(self.load(place, FLOATS, 64 * i), total)
        weights = [self.place(p, query, 2 * TILE) for query in queries]
        masks = [
            ir.Constant(ir.VectorType(BITS32, 2 * LANES), [i for d in range(LANES) for i in (half + d, half + d + 32)])
            for half in (0, LANES)
        ]
        with cgutils.for_range(b, pairs) as loop:
            two = self.place(values, loop.index, 16)
            rows = [self.load(self.place(self.load(two, BITS64, 8 * i), piece, 64), PAIRS) for i in range(2)]
            vectors = [b.shuffle_vector(*rows, mask) for mask in masks]
            for at, totals in zip(weights, sums, strict=True):
                weight = b.bitcast(self.spread(self.load(self.place(at, loop.index, 4), BITS32)), PAIRS)
                for total, vector in zip(totals, vectors, strict=True):
                    self.add_product(total, weight, vector)
        for place, totals in zip(places, sums, strict=True):
            for i, total in enumerate(totals):
                self.store(b.load(total), place, 64 * i)
