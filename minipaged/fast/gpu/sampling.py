"""Choosing tokens without bringing the logits to the host: [rows, vocab] stay, a few numbers a row come back.

    argmax_logsumexp   greedy decoding: the likeliest token of each row, and what its log-probability takes
    draw               a token by temperature, with or without `min_p`

`top_k` and `top_p` need the logits in order, and are torch's operations over all rows (`fast/sampling.py`). Drawing
without them could be as well, but that is some 17 passes over float64 copies of the logits; `draw` reads them once, and
one tile of each row a second time.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DRAW_TILE = 2048
"""Logits of one program of `draw`: with four warps, 16 weights in float64 a thread."""

TILE = 4096
"""Logits of one program. A row of 128k logits is 32 programs, so that even a single row is read by many multiprocessors
at once; with eight warps a thread has two accesses of 16 bytes in flight in half precision, four in float32."""


def argmax_logsumexp(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of logits: the likeliest token, its logit (the peak), and log(sum(exp(logit - peak))).

    logits: [rows, vocab] float32, float16 or bfloat16, rows may be strided. Returns token_ids [rows] int64, peaks
    [rows] float32, log_totals [rows] float32. The log-probability of any token is `logit - peak - log_total`.

    As in NumPy's argmax, ties go to the lowest id, and NaN counts as the largest: a row that holds NaN has the peak NaN
    and the id of its first NaN. `log_total` means something only where the peak is finite.
    """
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
    return token_ids, peaks, log_totals


@triton.jit
def _tile_peaks(logits, tile_tokens, tile_peaks, tile_totals, logits_stride, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Program (row, tile): the tile's likeliest token, its logit, and the sum of exp(logit - peak)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    x = tl.load(logits + row * logits_stride + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
    likeliest, peak = _first_largest(x, token)
    to = row * tl.num_programs(1) + tile
    tl.store(tile_tokens + to, likeliest)
    tl.store(tile_peaks + to, peak)
    # A tile may hold nothing but minus infinity, while others of the row do not: -inf - -inf would be NaN.
    tl.store(tile_totals + to, tl.sum(tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)), axis=0))


@triton.jit
def _row_peaks(
    tile_tokens, tile_peaks, tile_totals, token_ids, peaks, log_totals, TILES: tl.constexpr, WIDTH: tl.constexpr
):
    """Program row: the tiles' results as one. The tiles' tokens are in rising order, so ties go to the lowest."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, WIDTH)  # [WIDTH]
    tile_peak = tl.load(tile_peaks + row * TILES + tile, mask=tile < TILES, other=-float("inf"))
    tile_total = tl.load(tile_totals + row * TILES + tile, mask=tile < TILES, other=0.0)
    first, peak = _first_largest(tile_peak, tile)
    tl.store(token_ids + row, tl.load(tile_tokens + row * TILES + first))
    tl.store(peaks + row, peak)
    tl.store(log_totals + row, tl.log(tl.sum(tile_total * tl.exp(tile_peak - peak), axis=0)))


def draw(
    logits: Tensor,
    rows: Tensor,
    peaks: Tensor,
    temperatures: Tensor,
    min_logprobs: Tensor,
    distributions: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """Draw tokens. Distribution i is row rows[i] of `logits`, at its temperature, without what `min_p` cuts off.

    logits: [rows, vocab], any float, rows may be strided. Of each distribution, [n]: rows int64, peaks float64 (the
    largest logit), temperatures float64, min_logprobs float64 (log of `min_p`, -inf for none). Of each draw, [m]:
    distributions int64 (which one), uniforms float64 in [0, 1). Returns [m] int64: the first token at which the sum of
    weights exceeds its share of the whole. All sums are in float64, as the reference's are.
    """
    vocab = logits.shape[1]
    tiles = triton.cdiv(vocab, DRAW_TILE)
    given = (logits, rows, peaks, temperatures, min_logprobs)
    totals = torch.empty(len(rows), tiles, dtype=torch.float64, device=logits.device)
    _tile_totals[len(rows), tiles](
        *given, totals, logits.stride(0), VOCAB=vocab, TILE=DRAW_TILE, num_warps=4, enable_fp_fusion=False
    )
    token_ids = torch.empty(len(distributions), dtype=torch.int64, device=logits.device)
    _draw[(len(distributions),)](
        *given, totals, distributions, uniforms, token_ids, logits.stride(0), VOCAB=vocab, TILE=DRAW_TILE,
        TILES=tiles, WIDTH=triton.next_power_of_2(tiles), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return token_ids


# The numbers of a batch are pieces of one buffer, at addresses that differ from step to step (see `kv_cache.py`).
@triton.jit(do_not_specialize=["rows", "peaks", "temperatures", "min_logprobs"])
def _tile_totals(
    logits, rows, peaks, temperatures, min_logprobs, totals, logits_stride, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    """Program (distribution, tile): the sum of the tile's weights."""
    i = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    weight = _weights(i, tile, logits, rows, peaks, temperatures, min_logprobs, logits_stride, VOCAB, TILE)
    tl.store(totals + i * tl.num_programs(1) + tile, tl.sum(weight, axis=0))


@triton.jit
def _weights(
    i, tile, logits, rows, peaks, temperatures, min_logprobs, logits_stride, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    """The weights [TILE] of a tile's tokens, next to the likeliest token's 1; 0 for those cut off, and past the end."""
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    row = logits + tl.load(rows + i) * logits_stride
    x = tl.load(row + token, mask=token < VOCAB, other=-float("inf")).to(tl.float64)
    scaled = (x - tl.load(peaks + i)) / tl.load(temperatures + i)
    return tl.where((token < VOCAB) & (scaled >= tl.load(min_logprobs + i)), tl.exp(scaled), 0.0)


@triton.jit(
    do_not_specialize=["rows", "peaks", "temperatures", "min_logprobs", "distributions", "uniforms"],
)
def _draw(
    logits, rows, peaks, temperatures, min_logprobs, totals, distributions, uniforms, token_ids, logits_stride,
    VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program draw: first the tile in which the sum of weights exceeds the target, then the token within it."""
    number = tl.program_id(0).to(tl.int64)
    i = tl.load(distributions + number)
    tile = tl.arange(0, WIDTH)  # [WIDTH]
    total = tl.load(totals + i * TILES + tile, mask=tile < TILES, other=0.0)
    reached = tl.cumsum(total, axis=0)
    target = tl.load(uniforms + number) * tl.max(reached, axis=0)
    chosen = _first_beyond(reached, total, target, tile)
    before = tl.max(tl.where(tile < chosen, reached, 0.0), axis=0)
    weight = _weights(i, chosen, logits, rows, peaks, temperatures, min_logprobs, logits_stride, VOCAB, TILE)
    within = _first_beyond(before + tl.cumsum(weight, axis=0), weight, target, tl.arange(0, TILE))
    tl.store(token_ids + number, (chosen * TILE + within).to(tl.int64))


@triton.jit
def _first_beyond(reached, weight, target, index):
    """The first index of some weight where `reached` is beyond the target. Where rounding lets none be: the last one
    of some weight; 0 if none has any, which is a row that is refused later."""
    first = tl.min(tl.where((reached > target) & (weight > 0), index, 2**31 - 1), axis=0)
    last = tl.max(tl.where(weight > 0, index, 0), axis=0)
    return tl.where(first == 2**31 - 1, last, first)


@triton.jit
def _first_largest(x, index):
    """The lowest index among the largest of x, and that x; NaN counts as the largest. Padding is -inf and comes last.

    Maximum and index are found one after the other: finding both at once would leave the choice among equals to the
    order in which threads are merged. The maximum itself must not meet a NaN, with which hardware may do as it likes.
    """
    is_nan = x != x
    peak = tl.max(tl.where(is_nan, -float("inf"), x), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    candidates = tl.where(has_nan, is_nan, x == peak)
    first = tl.min(tl.where(candidates, index, 2**31 - 1), axis=0)
    return first, tl.where(has_nan, float("nan"), peak)
