"""Sampling without copying the logits to the host: [rows, vocab] stay on the GPU, and a few numbers per row come back.

    argmax_logsumexp    greedy decoding: the likeliest token of each row, and the terms of its log-probability
    likeliest_allowed   the same, with the likeliest of the tokens that a grammar allows
    allowed_only        a row of which a grammar leaves some tokens, for penalties, `top_k` and `top_p`
    draw                a token by temperature, with or without `min_p` and a grammar

`top_k` and `top_p` need the logits in order, and use torch's operations over all rows (`draw_ordered`). Drawing without
them could use those operations too, but that takes some 17 passes over float64 copies of the logits. The kernels read
the logits once, and one tile of each row a second time. The random numbers (`uniform`) are computed on the host, as for
a CPU."""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minipaged.fast.cpu.sampling import largest_by_library as largest
from minipaged.fast.cpu.sampling import uniform

__all__ = [
    "allowed_only",
    "argmax_logsumexp",
    "draw",
    "draw_ordered",
    "largest",
    "likeliest_allowed",
    "token_weights",
    "uniform",
]

DRAW_TILE = 2048
"""The logits of one program of `draw`: with four warps, 16 weights in float64 per thread."""

TILE = 4096
"""The logits of one program of `argmax_logsumexp`, `likeliest_allowed` or `allowed_only`. A row of 128k logits takes 32
programs, so even a single row is read by many multiprocessors in parallel. With eight warps, a thread has two accesses
of 16 bytes in flight in half precision, four in float32."""


def argmax_logsumexp(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `minipaged.fast.kernels`. For float64, which only rows with penalties use, it runs torch's operations."""
    if logits.dtype == torch.float64:
        token_ids = logits.argmax(1)  # [rows], the first maximum; NaN counts as the largest
        peaks = logits.gather(1, token_ids[:, None])  # [rows, 1]
        return token_ids, peaks[:, 0], (logits - peaks).exp().sum(1).log()
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    tile_tokens = torch.empty(rows, tiles, dtype=torch.int64, device=logits.device)
    tile_peaks = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    tile_totals = torch.empty_like(tile_peaks)
    _tile_peaks[rows, tiles](
        logits,
        tile_tokens,
        tile_peaks,
        tile_totals,
        logits.stride(0),
        VOCAB=vocab,
        TILE=TILE,
        num_warps=8,
        enable_fp_fusion=False,
    )
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
    log_totals = torch.empty_like(peaks)
    _row_peaks[(rows,)](
        tile_tokens, tile_peaks, tile_totals, token_ids, peaks, log_totals,
        TILES=tiles, WIDTH=triton.next_power_of_2(tiles), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return token_ids, peaks.double(), log_totals.double()


@triton.jit
def _tile_peaks(logits, tile_tokens, tile_peaks, tile_totals, logits_stride, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """One program per (row, tile) finds the tile's likeliest token, its logit, and the sum of exp(logit - peak)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    x = tl.load(logits + row * logits_stride + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
    likeliest, peak = _first_largest(x, token)
    to = row * tl.num_programs(1) + tile
    tl.store(tile_tokens + to, likeliest)
    tl.store(tile_peaks + to, peak)
    # A tile may hold only minus infinity while the rest of its row does not: -inf - -inf would be NaN.
    tl.store(tile_totals + to, tl.sum(tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)), axis=0))


@triton.jit
def _row_peaks(
    tile_tokens, tile_peaks, tile_totals, token_ids, peaks, log_totals, TILES: tl.constexpr, WIDTH: tl.constexpr
):
    """One program per row merges the tiles' results. The tiles' tokens are in rising order, so ties go to the
    lowest."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, WIDTH)  # [WIDTH]
    tile_peak = tl.load(tile_peaks + row * TILES + tile, mask=tile < TILES, other=-float("inf"))
    tile_total = tl.load(tile_totals + row * TILES + tile, mask=tile < TILES, other=0.0)
    first, peak = _first_largest(tile_peak, tile)
    tl.store(token_ids + row, tl.load(tile_tokens + row * TILES + first))
    tl.store(peaks + row, peak)
    tl.store(log_totals + row, tl.log(tl.sum(tile_total * tl.exp(tile_peak - peak), axis=0)))


def likeliest_allowed(logits: Tensor, rows: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `minipaged.fast.kernels`. For float64 it runs torch's operations, as `argmax_logsumexp` does."""
    if logits.dtype == torch.float64:
        table = logits[rows]  # [inputs, vocab]
        likeliest, peaks, log_totals = argmax_logsumexp(table)
        allowed_only(table, allowed)
        token_ids = torch.where(peaks.isnan(), likeliest, table.argmax(1))  # [inputs]
        return token_ids, table.gather(1, token_ids[:, None])[:, 0], peaks, log_totals
    inputs, vocab = len(rows), logits.shape[1]
    tiles = triton.cdiv(vocab, TILE)
    tile_tokens = torch.empty(inputs, tiles, dtype=torch.int64, device=logits.device)
    tile_logits = torch.empty(inputs, tiles, dtype=torch.float32, device=logits.device)
    tile_peaks, tile_totals = torch.empty_like(tile_logits), torch.empty_like(tile_logits)
    _tile_allowed[inputs, tiles](
        logits, rows, allowed, tile_tokens, tile_logits, tile_peaks, tile_totals,
        logits.stride(0), allowed.stride(0), VOCAB=vocab, TILE=TILE, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    token_ids = torch.empty(inputs, dtype=torch.int64, device=logits.device)
    found = torch.empty(inputs, dtype=torch.float64, device=logits.device)
    peaks, log_totals = torch.empty_like(found), torch.empty_like(found)
    _row_allowed[(inputs,)](
        tile_tokens, tile_logits, tile_peaks, tile_totals, token_ids, found, peaks, log_totals,
        TILES=tiles, WIDTH=triton.next_power_of_2(tiles), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return token_ids, found, peaks, log_totals


# Rows are a piece of one buffer, and `allowed` is the part of a table from some row on: see `kv_cache.py`.
@triton.jit(do_not_specialize=["rows", "allowed"])
def _tile_allowed(
    logits, rows, allowed, tile_tokens, tile_logits, tile_peaks, tile_totals, logits_stride, allowed_stride,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per (input, tile) finds the tile's likeliest allowed token and its logit; and of all the tile's
    tokens the largest logit, and the sum of exp(logit - that)."""
    i = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    row = logits + tl.load(rows + i) * logits_stride
    x = tl.load(row + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
    is_number = x == x
    left = tl.where(_is_allowed(allowed + i * allowed_stride, tile, VOCAB, TILE) | ~is_number, x, -float("inf"))
    likeliest, logit = _first_largest(left, token)
    peak = tl.max(tl.where(is_number, x, -float("inf")), axis=0)
    to = i * tl.num_programs(1) + tile
    tl.store(tile_tokens + to, likeliest)
    tl.store(tile_logits + to, logit)
    tl.store(tile_peaks + to, peak)
    tl.store(tile_totals + to, tl.sum(tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)), axis=0))


@triton.jit
def _row_allowed(
    tile_tokens, tile_logits, tile_peaks, tile_totals, token_ids, found, peaks, log_totals,
    TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per input merges the tiles' results."""
    i = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, WIDTH)  # [WIDTH]
    tile_logit = tl.load(tile_logits + i * TILES + tile, mask=tile < TILES, other=-float("inf"))
    tile_peak = tl.load(tile_peaks + i * TILES + tile, mask=tile < TILES, other=-float("inf"))
    tile_total = tl.load(tile_totals + i * TILES + tile, mask=tile < TILES, other=0.0)
    first, logit = _first_largest(tile_logit, tile)
    peak = tl.max(tile_peak, axis=0)
    tl.store(token_ids + i, tl.load(tile_tokens + i * TILES + first))
    tl.store(found + i, logit.to(tl.float64))
    tl.store(peaks + i, tl.where(logit == logit, peak, float("nan")).to(tl.float64))  # only NaN is left if not allowed
    tl.store(log_totals + i, tl.log(tl.sum(tile_total * tl.exp(tile_peak - peak), axis=0)).to(tl.float64))


def allowed_only(table: Tensor, allowed: Tensor) -> None:
    """See `minipaged.fast.kernels`."""
    vocab = table.shape[1]
    _forbid[len(table), triton.cdiv(vocab, TILE)](
        table, allowed, table.stride(0), allowed.stride(0), VOCAB=vocab, TILE=TILE, num_warps=8
    )


@triton.jit(do_not_specialize=["allowed"])
def _forbid(table, allowed, table_stride, allowed_stride, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """One program per (row, tile) writes minus infinity over the logits that are not allowed; it reads none."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    forbidden = (token < VOCAB) & ~_is_allowed(allowed + row * allowed_stride, tile, VOCAB, TILE)
    tl.store(table + row * table_stride + token, -float("inf"), mask=forbidden)


@triton.jit
def _is_allowed(words, tile, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Return the bit of each token of a tile, [TILE]."""
    number = tile * (TILE // 32) + tl.arange(0, TILE // 32)
    word = tl.load(words + number, mask=number < (VOCAB + 31) // 32, other=0)
    bits = (word[:, None] >> tl.arange(0, 32)[None, :]) & 1
    return tl.reshape(bits, [TILE]) != 0


def draw(
    logits: Tensor,
    rows: Tensor,
    peaks: Tensor,
    temperatures: Tensor,
    min_logprobs: Tensor,
    top_ks: Tensor,
    shares: Tensor,
    distributions: Tensor,
    uniforms: Tensor,
    *,
    depth: int,
    allowed: Tensor | None = None,
) -> Tensor:
    """See `minipaged.fast.kernels`. Distributions may come in any order."""
    given = (logits, rows, peaks, temperatures, min_logprobs)
    if depth == 0:
        return _draw_unordered(*given, distributions, uniforms, allowed)
    return draw_ordered(*given, top_ks, shares, distributions, uniforms, depth=depth, allowed=allowed)


def _draw_unordered(
    logits: Tensor,
    rows: Tensor,
    peaks: Tensor,
    temperatures: Tensor,
    min_logprobs: Tensor,
    distributions: Tensor,
    uniforms: Tensor,
    allowed: Tensor | None,
) -> Tensor:
    vocab = logits.shape[1]
    tiles = triton.cdiv(vocab, DRAW_TILE)
    given = (logits, rows, peaks, temperatures, min_logprobs, allowed)
    strides = (logits.stride(0), 0 if allowed is None else allowed.stride(0))
    totals = torch.empty(len(rows), tiles, dtype=torch.float64, device=logits.device)
    _tile_totals[len(rows), tiles](
        *given, totals, *strides, VOCAB=vocab, TILE=DRAW_TILE, num_warps=4, enable_fp_fusion=False
    )
    token_ids = torch.empty(len(distributions), dtype=torch.int64, device=logits.device)
    warps = 4 if allowed is None else 8  # with the bits of a grammar four warps have too few registers
    _draw[(len(distributions),)](
        *given, totals, distributions, uniforms, token_ids, *strides, VOCAB=vocab, TILE=DRAW_TILE,
        TILES=tiles, WIDTH=triton.next_power_of_2(tiles), num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return token_ids


def draw_ordered(
    logits: Tensor,
    rows: Tensor,
    peaks: Tensor,
    temperatures: Tensor,
    min_logprobs: Tensor,
    top_ks: Tensor,
    shares: Tensor,
    distributions: Tensor,
    uniforms: Tensor,
    *,
    depth: int,
    allowed: Tensor | None = None,
) -> Tensor:
    """`draw` with torch's operations, each over all distributions. `depth` may be 0 here, too."""
    given = (logits, rows, peaks, temperatures, min_logprobs, top_ks, shares)
    kept = token_weights(*given, depth=depth, allowed=allowed)  # [n, vocab]
    # A GPU sums in pieces, so rounding may change a running sum even at a token of weight 0. Setting the sums of
    # dropped tokens to 0 ensures that none of these is the first to exceed the draw.
    cumulative = torch.where(kept > 0, kept.cumsum(1), 0.0)  # [n, vocab]
    target = uniforms * cumulative.amax(1)[distributions]  # [m]
    return (cumulative[distributions] > target[:, None]).int().argmax(1)


def token_weights(
    logits: Tensor,
    rows: Tensor,
    peaks: Tensor,
    temperatures: Tensor,
    min_logprobs: Tensor,
    top_ks: Tensor,
    shares: Tensor,
    *,
    depth: int,
    allowed: Tensor | None = None,
) -> Tensor:
    """See `minipaged.fast.kernels`."""
    vocab = logits.shape[1]
    scaled = (logits[rows].double() - peaks[:, None]) / temperatures[:, None]  # [n, vocab], 0 for the likeliest
    if allowed is not None:
        allowed_only(scaled, allowed)
    threshold = min_logprobs[:, None]  # [n, 1]
    if depth > 0:
        falling = scaled.topk(depth).values  # [n, depth]
        kth = falling.gather(1, (top_ks.clamp(1, depth) - 1)[:, None])  # [n, 1]
        is_limited = ((top_ks > 0) & (top_ks < vocab))[:, None]  # [n, 1]
        threshold = torch.where(is_limited, kth.maximum(threshold), threshold)
        rising = falling.flip(1)  # [n, depth]
        is_listed = rising >= threshold  # [n, depth]
        unlisted = (scaled >= threshold).sum(1, keepdim=True) - is_listed.sum(1, keepdim=True)  # ties with the least
        tail = torch.where(is_listed, rising.exp(), 0.0).cumsum(1) + unlisted * rising[:, :1].exp()  # [n, depth]
        may_go = (tail <= shares[:, None] * tail[:, -1:]).sum(1, keepdim=True)  # [n, 1]
        lightest = rising.gather(1, may_go.clamp(max=depth - 1))  # [n, 1]: its tail is too much for `top_p` to cut off
        threshold = torch.where(shares[:, None] > 0, lightest, threshold)
    return torch.where(scaled >= threshold, scaled.exp(), 0.0)


# The numbers of a batch are pieces of one buffer, at addresses that change from step to step (see `kv_cache.py`).
@triton.jit(do_not_specialize=["rows", "peaks", "temperatures", "min_logprobs"])
def _tile_totals(
    logits, rows, peaks, temperatures, min_logprobs, allowed, totals, logits_stride, allowed_stride,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per (distribution, tile) sums the tile's weights."""
    i = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    weight = _weights(
        i, tile, logits, rows, peaks, temperatures, min_logprobs, allowed, logits_stride, allowed_stride, VOCAB, TILE
    )
    tl.store(totals + i * tl.num_programs(1) + tile, tl.sum(weight, axis=0))


@triton.jit
def _weights(
    i, tile, logits, rows, peaks, temperatures, min_logprobs, allowed, logits_stride, allowed_stride,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the weights [TILE] of a tile's tokens, relative to the likeliest token's 1; 0 for tokens cut off or past
    the end."""
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    row = logits + tl.load(rows + i) * logits_stride
    x = tl.load(row + token, mask=token < VOCAB, other=-float("inf")).to(tl.float64)
    scaled = (x - tl.load(peaks + i)) / tl.load(temperatures + i)
    kept = (token < VOCAB) & (scaled >= tl.load(min_logprobs + i))
    if allowed is not None:
        kept = kept & _is_allowed(allowed + i * allowed_stride, tile, VOCAB, TILE)
    return tl.where(kept, tl.exp(scaled), 0.0)


@triton.jit(
    do_not_specialize=["rows", "peaks", "temperatures", "min_logprobs", "distributions", "uniforms"],
)
def _draw(
    logits, rows, peaks, temperatures, min_logprobs, allowed, totals, distributions, uniforms, token_ids,
    logits_stride, allowed_stride, VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per draw finds the tile in which the cumulative weight exceeds the target, then the token within
    it."""
    number = tl.program_id(0).to(tl.int64)
    i = tl.load(distributions + number)
    tile = tl.arange(0, WIDTH)  # [WIDTH]
    total = tl.load(totals + i * TILES + tile, mask=tile < TILES, other=0.0)
    reached = tl.cumsum(total, axis=0)
    target = tl.load(uniforms + number) * tl.max(reached, axis=0)
    chosen = _first_beyond(reached, total, target, tile)
    before = tl.max(tl.where(tile < chosen, reached, 0.0), axis=0)
    weight = _weights(
        i, chosen, logits, rows, peaks, temperatures, min_logprobs, allowed, logits_stride, allowed_stride, VOCAB, TILE
    )
    within = _first_beyond(before + tl.cumsum(weight, axis=0), weight, target, tl.arange(0, TILE))
    tl.store(token_ids + number, (chosen * TILE + within).to(tl.int64))


@triton.jit
def _first_beyond(reached, weight, target, index):
    """Return the first index with a positive weight at which `reached` exceeds the target. If rounding leaves none,
    return the last index with a positive weight; or 0 if all weights are 0, which is a row that is rejected later."""
    first = tl.min(tl.where((reached > target) & (weight > 0), index, 2**31 - 1), axis=0)
    last = tl.max(tl.where(weight > 0, index, 0), axis=0)
    return tl.where(first == 2**31 - 1, last, first)


@triton.jit
def _first_largest(x, index):
    """Return the lowest index of the maximum of x, and the maximum; NaN counts as the largest. Padding is -inf and
    comes last.

    Maximum and index are found one after the other: finding both together would let the order in which threads are
    merged decide among equals. NaN is excluded from the maximum, because hardware may treat it in any way.
    """
    is_nan = x != x
    peak = tl.max(tl.where(is_nan, -float("inf"), x), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    candidates = tl.where(has_nan, is_nan, x == peak)
    first = tl.min(tl.where(candidates, index, 2**31 - 1), axis=0)
    return first, tl.where(has_nan, float("nan"), peak)
