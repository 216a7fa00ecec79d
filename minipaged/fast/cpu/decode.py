"""Attention of one token on a CPU that multiplies pairs of bfloat16. Products read keys and values in place.

Decoding is bound by memory only if computing with a number takes no longer than fetching it. It did take longer while
keys and values were first widened to float32 and stored. Here nothing is copied: an array has the address of each key
of a tile, whatever its block.

    scores    A vector has 32 numbers of a key. They are multiplied by a query's, pair by pair. That gives 16 sums for
              each of 16 keys, which four rounds of pairwise additions reduce to one vector with the 16 scores.
    weights   are computed for 16 keys at a time and rounded to bfloat16.
    values    of two neighbouring keys are interleaved, for up to GROUP queries. The sums of 32 dimensions stay in
              registers.

Many queries can share a tile's keys: those of sequences that begin with the same blocks. The keys are then *turned*
once: each vector has one pair of numbers of 16 keys. A vector of 16 scores needs no additions across lanes any more.
The sums are added in the same order, so a query's result has the same bits as it has alone.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, call-arg, attr-defined"

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minipaged.fast.cpu.vectors import BITS32, BITS64, FLOATS, INTEGERS, LANES, OUT_BFLOATS, PAIRS, Vectors

GROUPS = (8, 4, 3, 2, 1)
"""The numbers of queries for which two values are interleaved once. The most queries come first."""
TILE = 64
"""The number of keys between two updates of the largest score."""
SCORED = 4
"""The number of queries that are scored together against turned keys."""


@intrinsic
def score_tile(typingctx, q, keys, size, group, head_dim, scale, cap, p, o, m_l):
    """Score `size` keys, at most TILE, against the `group` queries q [group, head_dim].

    Writes the weights as bfloat16 to p [group, TILE], updates m_l [group, 2] (largest score, sum of weights) and scales
    o [group, head_dim] to the new largest score. q, keys, p, o and m_l are addresses. All arguments are int64, except
    `scale` and `cap` (the soft cap, 0 for none), float32. `keys` is an array of the addresses of TILE keys; those past
    `size` may be of any readable key.
    """

    def codegen(context, builder, signature, arguments):
        Decode(builder, *arguments[3:5]).take_scores(*arguments[:3], *arguments[5:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5, *[types.float32] * 2, *[types.int64] * 3), codegen


@intrinsic
def turn_keys(typingctx, keys, head_dim, turned):
    """Write the TILE keys at the addresses in the array `keys` to `turned`: [TILE / 16, head_dim / 2, 16] pairs."""

    def codegen(context, builder, signature, arguments):
        Decode(builder, BITS64(0), arguments[1]).turn_keys(arguments[0], arguments[2])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3), codegen


@intrinsic
def score_turned(typingctx, q, turned, num_queries, head_dim, scale, cap, p, o, m_l):
    """Score TILE turned keys against `num_queries` queries, a multiple of SCORED. Writes what `score_tile` writes."""

    def codegen(context, builder, signature, arguments):
        Decode(builder, *arguments[2:4]).take_turned_scores(*arguments[:2], *arguments[4:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4, *[types.float32] * 2, *[types.int64] * 3), codegen


@intrinsic
def add_values(typingctx, values, size, group, head_dim, p, o):
    """Add the weighted values to o. `values` is an array of addresses, like `keys` in `score_tile`."""

    def codegen(context, builder, signature, arguments):
        Decode(builder, *arguments[2:4]).add_values(*arguments[:2], *arguments[4:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 6), codegen


class Decode(Vectors):
    """Writes `score_tile` and `add_values` as LLVM code."""

    def __init__(self, builder, group, head_dim) -> None:
        super().__init__(builder)
        self.group = group
        self.row_bytes = builder.mul(head_dim, BITS64(2))
        self.pieces = builder.lshr(head_dim, BITS64(5))  # vectors of a key

    def take_scores(self, q, keys, size, scale, cap, p, o, m_l) -> None:
        b = self.builder
        chunks = b.lshr(b.add(size, BITS64(LANES - 1)), BITS64(4))
        lanes = ir.Constant(INTEGERS, list(range(LANES)))
        vectors = cgutils.alloca_once(b, FLOATS, TILE // LANES)  # the scores of a query
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
                self.raise_to(highest, score)
            with self.where_capped(cap):
                self.cap_scores(vectors, chunks, cap, before, highest)
            self.take_weights(queries.index, vectors, chunks, before, highest, p, o, at)

    def raise_to(self, highest, score) -> None:
        m = self.builder.load(highest)
        higher = self.builder.fcmp_ordered(">", score, m)
        self.builder.store(self.builder.select(higher, score, m), highest)

    def take_weights(self, query, vectors, chunks, before, highest, p, o, at) -> None:
        """Write the weights of a query, given by its number, and update its sums. `vectors`: its scores. `before`: its
        largest score so far. `at`: the address of its entry in m_l."""
        b = self.builder
        m = self.over_lanes(b.load(highest), lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
        total = self.variable()
        with cgutils.for_range(b, chunks) as loop:
            weight = self.exp(b.fsub(b.load(b.gep(vectors, [loop.index])), m))
            b.store(b.fadd(b.load(total), weight), total)
            to = b.add(self.place(p, query, 2 * TILE), b.mul(loop.index, BITS64(2 * LANES)))
            rounded = b.fptrunc(weight, OUT_BFLOATS)
            b.store(rounded, b.inttoptr(to, OUT_BFLOATS.as_pointer()), align=2)
        total = self.first_of(self.over_lanes(b.load(total), b.fadd))
        old, highest = self.load(at, ir.FloatType(), 4), self.first_of(m)
        with b.if_else(b.fcmp_ordered("==", highest, before)) as (as_before, is_higher):
            with as_before:  # nothing fades: the factor would be 1
                self.store(b.fadd(old, total), at, 4)
            with is_higher:
                fade = self.exp(b.fsub(self.spread(before), m))
                self.store(highest, at)
                self.store(b.fadd(b.fmul(old, self.first_of(fade)), total), at, 4)
                sums = b.add(o, b.mul(query, b.mul(self.row_bytes, BITS64(2))))
                with cgutils.for_range(b, b.mul(self.pieces, BITS64(2))) as loop:
                    place = self.place(sums, loop.index, 64)
                    self.store(b.fmul(self.load(place, FLOATS), fade), place)

    def turn_keys(self, keys, turned) -> None:
        b = self.builder
        to = cgutils.alloca_once_value(b, turned)
        with cgutils.for_range(b, BITS64(TILE // LANES)) as chunk, cgutils.for_range(b, self.pieces) as piece:
            first = self.place(keys, chunk.index, 8 * LANES)
            rows = [
                b.bitcast(self.load(self.place(self.load(first, BITS64, 8 * j), piece.index, 64), PAIRS), INTEGERS)
                for j in range(LANES)
            ]
            at = b.load(to)
            for i, pairs in enumerate(self.transposed(rows)):
                self.store(pairs, at, 64 * i)
            b.store(b.add(at, BITS64(64 * LANES)), to)

    def transposed(self, rows):
        """Return LANES vectors with the lanes of LANES `rows`: vector i has lane i of every row."""
        b, half = self.builder, LANES // 2
        while half:
            masks = [
                ir.Constant(INTEGERS, [(i & ~half) + more + (LANES if i & half else 0) for i in range(LANES)])
                for more in (0, half)
            ]
            for i in range(LANES):
                if not i & half:
                    pair = rows[i], rows[i + half]
                    rows[i], rows[i + half] = (b.shuffle_vector(*pair, mask) for mask in masks)
            half //= 2
        return rows

    def take_turned_scores(self, q, turned, scale, cap, p, o, m_l) -> None:
        b, chunks = self.builder, TILE // LANES
        vectors = [cgutils.alloca_once(b, FLOATS, chunks) for _ in range(SCORED)]  # the scores of some queries
        scale = self.spread(scale)
        chunk_bytes = b.mul(self.pieces, BITS64(64 * LANES))
        with cgutils.for_range(b, b.udiv(self.group, BITS64(SCORED))) as batches:
            numbers = [b.add(b.mul(batches.index, BITS64(SCORED)), BITS64(i)) for i in range(SCORED)]
            queries = [b.add(q, b.mul(number, self.row_bytes)) for number in numbers]
            places = [self.place(m_l, number, 8) for number in numbers]
            before = [self.load(place, ir.FloatType()) for place in places]
            highest = [self.variable() for _ in numbers]
            for variable, m in zip(highest, before, strict=True):
                b.store(self.spread(m), variable)
            with cgutils.for_range(b, BITS64(chunks // 2)) as loop:
                first = b.add(turned, b.mul(loop.index, b.mul(chunk_bytes, BITS64(2))))
                scores = self.turned_products(queries, [first, b.add(first, chunk_bytes)])
                for i in range(SCORED):
                    for c, score in enumerate(scores[2 * i : 2 * i + 2]):
                        score = b.fmul(score, scale)
                        number = b.add(b.mul(loop.index, BITS64(2)), BITS64(c))
                        b.store(score, b.gep(vectors[i], [number]))
                        self.raise_to(highest[i], score)
            with self.where_capped(cap):
                for i, m in enumerate(before):
                    self.cap_scores(vectors[i], BITS64(chunks), cap, m, highest[i])
            for i, number in enumerate(numbers):
                self.take_weights(number, vectors[i], BITS64(chunks), before[i], highest[i], p, o, places[i])

    def cap_scores(self, vectors, chunks, cap, before, highest) -> None:
        """Cap a query's scores, and find the largest again."""
        b, lowest = self.builder, self.all_of(FLOATS, -math.inf)
        b.store(self.spread(before), highest)
        with cgutils.for_range(b, chunks) as loop:
            at = b.gep(vectors, [loop.index])
            score = b.load(at)
            score = b.select(b.fcmp_ordered("==", score, lowest), lowest, self.capped(score, cap))
            b.store(score, at)
            self.raise_to(highest, score)

    def turned_products(self, queries, chunks):
        """Return for each of some queries, and each chunk of LANES turned keys, a vector of the scores, before the
        scale. A score's sums of the pairs i + 16 j are added in the order of `joined`."""

        def total(pair, apart):
            """The sums of the pairs from `pair` on that are `apart` from each other."""
            if apart == LANES // 2:
                return self.two_products(queries, chunks, pair)
            both = total(pair, 2 * apart), total(pair + apart, 2 * apart)
            return [self.builder.fadd(x, y) for x, y in zip(*both, strict=True)]

        return total(0, 1)

    def two_products(self, queries, chunks, pair):
        """The sums of the pairs `pair` and `pair` + 8 of all pieces, added up."""
        b, pairs = self.builder, (pair, pair + LANES // 2)
        sums = [[self.variable() for _ in pairs] for _ in queries for _ in chunks]
        with cgutils.for_range(b, self.pieces) as loop:
            here = [self.place(keys, loop.index, 64 * LANES) for keys in chunks]
            numbers = [self.place(query, loop.index, 64) for query in queries]
            for i, pair in enumerate(pairs):
                vectors = [self.load(keys, PAIRS, 64 * pair) for keys in here]
                totals = iter(sums)
                for at in numbers:
                    number = b.bitcast(self.spread(self.load(at, BITS32, 4 * pair)), PAIRS)
                    for vector in vectors:
                        self.add_product(next(totals)[i], number, vector)
        return [b.fadd(b.load(x), b.load(y)) for x, y in sums]

    def products(self, query, keys):
        """Return a vector for each of LANES keys. The sum of its lanes is the key's score, before the scale."""
        b = self.builder
        addresses = [self.load(keys, BITS64, 8 * j) for j in range(LANES)]
        sums = [self.variable() for _ in addresses]
        with cgutils.for_range(b, self.pieces) as loop:
            part = self.load(self.place(query, loop.index, 64), PAIRS)
            for address, total in zip(addresses, sums, strict=True):
                self.add_product(total, part, self.load(self.place(address, loop.index, 64), PAIRS))
        return [b.load(total) for total in sums]

    def joined(self, vectors):
        """Sum the lanes of each of LANES vectors. Return a vector with the sum of vector i in lane i."""
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
        """Reduce all lanes by `join`; the result is in every lane."""
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
        for count in GROUPS:
            times = b.udiv(b.sub(self.group, done), BITS64(count))
            with cgutils.for_range(b, times) as batches, cgutils.for_range(b, self.pieces) as loop:
                first = b.add(done, b.mul(batches.index, BITS64(count)))
                queries = [b.add(first, BITS64(g)) for g in range(count)]
                self.add_piece(values, pairs, loop.index, p, o, queries)
            done = b.add(done, b.mul(times, BITS64(count)))

    def add_piece(self, values, pairs, piece, p, o, queries) -> None:
        """Add the weighted values of 32 dimensions to the sums of some queries."""
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
