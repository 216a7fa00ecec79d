"""Choosing the next tokens of a whole batch at once, where the logits are.

The rules are those of `reference/sampling.py`, in the same order and with the same numbers drawn, so that a seed gives
the same tokens on both tiers. What differs is the shape of the work. The logits of a batch are millions of
numbers on a device, and what is wanted of them is a token and a log-probability a sequence. So

- the parameters of all inputs go to the device in one copy, and all results come back in one;
- in between, nothing waits for the host: no branch depends on a logit. What cannot be served (NaN, nothing left to
  choose) is found out at the end, from results that came back anyway;
- nor does the host wait for the device: the results are on their way to it when `sample` returns, and are waited for
  when they are first looked at (`Samples`). The next batch need not look: it finds the tokens on the device;
- an input that is greedy and has no penalties, the commonest, costs one reading of its row (`argmax_logsumexp`) and
  nothing in float64;
- a row or a distribution that several inputs share is worked on once. Only inputs with penalties or forbidden tokens
  need a row of their own.

The two functions that read whole rows are kernels (`kernels.SamplingKernels`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minipaged.contracts import Sampled, SamplingInput, why_no_peak, why_nothing_left
from minipaged.fast import kernels_for
from minipaged.fast.device import is_gpu, to_device
from minipaged.fast.kernels import SamplingKernels

PIECE = 2**24
"""Logits from which tokens are drawn in one go: what is scaled, sorted and added up meanwhile is some 1 GB of a GPU."""


class Samples(Sequence[Sampled]):
    """The chosen tokens, on the device and on their way to the host, which waits for them when it first looks."""

    def __init__(self, token_ids: Tensor, fetch: Callable[[], list[Sampled]]) -> None:
        self.token_ids = token_ids  # [inputs] int64, on the device
        self._fetch = fetch
        self._fetched: list[Sampled] | None = None

    def _on_host(self) -> list[Sampled]:
        if self._fetched is None:
            self._fetched = self._fetch()
        return self._fetched

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[Sampled]:
        return iter(self._on_host())

    def __getitem__(self, index: Any) -> Any:
        return self._on_host()[index]


def joined(parts: Sequence[Samples]) -> Samples:
    """Several as one."""
    token_ids = torch.cat([part.token_ids for part in parts])
    return Samples(token_ids, lambda: [one for part in parts for one in part])


def sample(logits: Tensor, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
    """One token for each input, from `logits` [rows, vocab], float32, float16, bfloat16 or float64, on any device.

    A row from which nothing can be chosen is an error of the inputs that use it: it holds NaN or plus infinity, or
    nothing but minus infinity is left.
    """
    if not inputs:
        return []
    if not is_gpu(logits.device) and logits.dtype != torch.float64:
        logits = logits.float()  # which holds all values of float16 and bfloat16; the compiled loops know neither
    kernels = kernels_for(logits.device)
    likeliest, peaks, log_totals = kernels.argmax_logsumexp(logits)  # [rows]
    if all(_is_plainly_greedy(wanted) for wanted in inputs):
        chosen_from = [wanted.row for wanted in inputs]
        one_each = chosen_from == list(range(len(likeliest)))
        arriving = Arriving(likeliest, peaks, log_totals)
        return Samples(
            likeliest if one_each else likeliest[send(logits.device, chosen_from)[0]],
            lambda: _likeliest(inputs, *arriving.arrays()),
        )

    altered = [index for index, wanted in enumerate(inputs) if not wanted.leaves_logits_alone]
    plain = [index for index, wanted in enumerate(inputs) if wanted.leaves_logits_alone]
    ranked = sorted({wanted.row for wanted in inputs if wanted.params.num_likeliest})  # whose likeliest are asked for
    given = [token_id for wanted in inputs for token_id in wanted.params.logprob_token_ids]
    of_rows = [wanted.row for wanted in inputs for _ in wanted.params.logprob_token_ids]
    lists = ([wanted.row for wanted in inputs], altered, ranked, of_rows, given)
    rows, where_altered, ranked_rows, given_rows, given_tokens = send(logits.device, *lists)

    token_ids = likeliest[rows]  # [inputs]
    _draw_into(token_ids, logits, peaks, inputs, [(index, inputs[index].row) for index in plain], kernels)
    altered_peaks = peaks[:0]
    if altered:
        table = penalise(logits, [inputs[index] for index in altered])  # [altered, vocab]
        token_ids[where_altered], altered_peaks, _ = kernels.argmax_logsumexp(table)  # [altered]
        users = [(index, row) for row, index in enumerate(altered)]
        _draw_into(token_ids, table, altered_peaks, inputs, users, kernels)

    raw = (logits, peaks, log_totals)
    logprobs = _logprobs(rows, token_ids, *raw)  # [inputs]
    count = max(wanted.params.num_likeliest or 0 for wanted in inputs)
    top = largest(logits[ranked_rows], count)  # [ranked, count]
    top_logprobs = _logprobs(ranked_rows[:, None], top, *raw)  # [ranked, count]
    given_logprobs = _logprobs(given_rows, given_tokens, *raw) if given else logprobs[:0]  # [given]

    results = (token_ids, logprobs, top, top_logprobs, given_logprobs)
    on_the_way = Arriving(*results, likeliest[rows], peaks[rows], altered_peaks)

    def fetch() -> list[Sampled]:
        *found, of_raw, raw_peaks, of_altered = on_the_way.arrays()
        return _without_bad(_sampled(inputs, ranked, *found), inputs, altered, of_raw, raw_peaks, of_altered)

    return Samples(token_ids, fetch)


def _logprobs(rows: Tensor, token_ids: Tensor, logits: Tensor, peaks: Tensor, log_totals: Tensor) -> Tensor:
    """In float64, of tokens in rows of `logits`, both of any shape."""
    return logits[rows, token_ids].double() - peaks[rows] - log_totals[rows]


def gather_logprobs(logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> Samples:
    """What `sample` reports of tokens that it chose, for tokens that are given: token i by row i of `logits`."""
    if not is_gpu(logits.device) and logits.dtype != torch.float64:
        logits = logits.float()
    likeliest, *totals = kernels_for(logits.device).argmax_logsumexp(logits)  # [tokens] each
    [given] = send(logits.device, token_ids)
    rows = torch.arange(len(given), device=logits.device)
    top = largest(logits, num_logprobs)  # [tokens, num_logprobs]
    logprobs, top_logprobs = _logprobs(rows, given, logits, *totals), _logprobs(rows[:, None], top, logits, *totals)
    on_the_way = Arriving(logprobs, top, top_logprobs, likeliest, totals[0])

    def fetch() -> list[Sampled]:
        gathered = []
        for token_id, logprob, likely, logs, first, peak in zip(
            token_ids, *(array.tolist() for array in on_the_way.arrays()), strict=True
        ):
            error = why_no_peak(first, peak)
            tops = dict(zip(likely, logs, strict=True)) | {token_id: logprob}
            gathered.append(Sampled(0, math.nan, None, error) if error else Sampled(token_id, logprob, tops))
        return gathered

    return Samples(given, fetch)


def _is_plainly_greedy(wanted: SamplingInput) -> bool:
    params = wanted.params
    return params.temperature == 0 and params.num_likeliest is None and wanted.leaves_logits_alone


def _likeliest(
    inputs: Sequence[SamplingInput],
    likeliest: NDArray[np.int64],
    peaks: NDArray[np.float64],
    log_totals: NDArray[np.float64],
) -> list[Sampled]:
    """The likeliest token of each row, for inputs that ask for nothing else: its logit is the peak."""
    rows = np.array([wanted.row for wanted in inputs])
    chosen = zip(likeliest[rows].tolist(), (-log_totals[rows]).tolist(), strict=True)
    sampled = [Sampled(token_id, logprob, None) for token_id, logprob in chosen]
    return _without_bad(sampled, inputs, (), likeliest[rows], peaks[rows], peaks[:0])


def _sampled(inputs: Sequence[SamplingInput], ranked: Sequence[int], *results: NDArray[Any]) -> list[Sampled]:
    """The results as the engine wants them."""
    token_ids, logprobs, top, top_logprobs, given_logprobs = (array.tolist() for array in results)
    rankings = {row: list(zip(*both, strict=True)) for row, *both in zip(ranked, top, top_logprobs, strict=True)}
    sampled, arrived = [], iter(given_logprobs)
    for wanted, token_id, logprob in zip(inputs, token_ids, logprobs, strict=True):
        tops = None
        if given := wanted.params.logprob_token_ids:
            reported = dict(zip(given, islice(arrived, len(given)), strict=True)) | {token_id: logprob}
            tops = dict(sorted(reported.items(), key=lambda one: (-one[1], one[0])))
        elif wanted.params.logprobs is not None:
            tops = dict(rankings.get(wanted.row, [])[: wanted.params.logprobs]) | {token_id: logprob}
        sampled.append(Sampled(token_id, logprob, tops))
    return sampled


def penalise(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    """A row in float64 for each input [inputs, vocab]: the tokens that are allowed alone, the bias and the penalties.

    What is changed is listed as (place, token) pairs over all inputs, and changed in one operation a rule.
    """
    limited = [number for number, wanted in enumerate(inputs) if wanted.params.allowed_token_ids is not None]
    allowed, forbidden, biased, seen, generated = (_Pairs() for _ in range(5))
    for number, wanted in enumerate(inputs):
        params, output = wanted.params, _tokens(wanted.output_token_ids)
        allowed.add(number, _tokens(params.allowed_token_ids or ()), 0.0)
        forbidden.add(number, _tokens(wanted.forbidden_token_ids), -math.inf)
        bias = dict(params.logit_bias)
        biased.add(number, _tokens(list(bias)), list(bias.values()))
        if params.repetition_penalty != 1:
            # A token may be listed twice here: both times its logit is read before either is written.
            seen.add(number, np.concatenate((_tokens(wanted.prompt_token_ids), output)), params.repetition_penalty)
        tokens, times = np.unique(output, return_counts=True)  # [generated]
        generated.add(number, tokens, params.frequency_penalty * times + params.presence_penalty)
    lists = (one.arrays() for one in (allowed, forbidden, biased, seen, generated))
    rows, only, *sent = send(logits.device, [wanted.row for wanted in inputs], limited, *chain.from_iterable(lists))
    table = logits[rows].double()  # [inputs, vocab]
    place, token, _ = sent[:3]  # [allowed]
    held = table[place, token]  # [allowed]
    table.index_fill_(0, only, -math.inf)
    table[place, token] = held
    place, token, value = sent[3:6]  # [forbidden]
    table[place, token] = value
    place, token, value = sent[6:9]  # [biased]
    table[place, token] += value
    place, token, penalty = sent[9:12]  # [seen]
    held = table[place, token]  # [seen]
    table[place, token] = torch.where(held > 0, held / penalty, held * penalty)
    place, token, amount = sent[12:]  # [generated]
    table[place, token] -= amount
    return table


class _Pairs:
    """(place, token) pairs, each with a number."""

    def __init__(self) -> None:
        self._parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]

    def add(self, place: int, tokens: NDArray[np.int64], value: float | Sequence[float] | NDArray[Any]) -> None:
        self._parts.append(
            (np.full(len(tokens), place), tokens, np.broadcast_to(value, len(tokens)).astype(np.float64))
        )

    def arrays(self) -> tuple[NDArray[Any], ...]:
        return tuple(np.concatenate(arrays) for arrays in zip(*self._parts, strict=True))


def _tokens(token_ids: Sequence[int]) -> NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)


# --- Drawing ----------------------------------------------------------------------------------------


def _draw_into(
    token_ids: Tensor,
    logits: Tensor,
    peaks: Tensor,
    inputs: Sequence[SamplingInput],
    users: Sequence[tuple[int, int]],
    kernels: SamplingKernels,
) -> None:
    """Put a token drawn into `token_ids` for those of `users`, (index of an input, row of `logits`), not greedy."""
    drawing_from: dict[_Distribution, list[int]] = defaultdict(list)  # the inputs that draw from each
    for index, used_row in users:
        params = inputs[index].params
        if params.temperature > 0:
            min_logprob = math.log(params.min_p) if params.min_p > 0 else -math.inf
            wanted = _Distribution(used_row, params.top_k, params.temperature, min_logprob, 1 - params.top_p)
            drawing_from[wanted].append(index)
    vocab = logits.shape[1]
    only_kernels = is_gpu(logits.device) and not any(one.depth(vocab) for one in drawing_from)  # which make no copies
    pending = iter(drawing_from.items())
    at_once = len(drawing_from) if only_kernels else max(1, PIECE // vocab)
    while piece := dict(islice(pending, at_once)):
        drawing = [index for indices in piece.values() for index in indices]
        where, distributions, uniforms, row, top_k, temperature, least, share = send(
            logits.device,
            drawing,
            [place for place, indices in enumerate(piece.values()) for _ in indices],
            uniform(
                kernels,
                [inputs[index].seed for index in drawing],
                [inputs[index].stream for index in drawing],
                [inputs[index].position for index in drawing],
            ),
            [distribution.row for distribution in piece],
            [distribution.top_k for distribution in piece],
            np.array([distribution.temperature for distribution in piece]),
            np.array([distribution.min_logprob for distribution in piece]),
            np.array([distribution.share for distribution in piece]),
        )
        token_ids[where] = kernels.draw(
            logits,
            row,
            peaks[row],
            temperature,
            least,
            top_k,
            share,
            distributions,
            uniforms,
            depth=max(distribution.depth(vocab) for distribution in piece),
        )


class _Distribution(NamedTuple):
    """A row of logits with a temperature and filters: what one or more inputs draw from."""

    row: int
    top_k: int
    temperature: float
    min_logprob: float
    """log of `min_p`; -inf for none."""
    share: float
    """The probability that `top_p` may cut off; 0 for none."""

    def depth(self, vocab: int) -> int:
        """How many of the largest logits the filters need in order."""
        if 0 < self.top_k < vocab:
            return self.top_k
        return vocab if self.share > 0 else 0


def uniform(
    kernels: SamplingKernels, seeds: Sequence[int], streams: Sequence[int], positions: Sequence[int]
) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, stream, position), [n]: 53 bits of Philox4x32-10 (Salmon et al., SC 2011).

    Nothing of it is on the device. So it is computed on the host, and travels with the other parameters.
    """
    bits = [seed & 0xFFFFFFFFFFFFFFFF for seed in seeds]
    return kernels.uniform(*(np.array(words, dtype=np.uint64) for words in (bits, streams, positions)))


def largest(values: Tensor, count: int) -> Tensor:
    """The indices [rows, count] of the `count` largest of each row of `values` (of all n, if fewer).

    Largest first, and the lowest index on ties. `topk` promises no order among equals, so it is asked twice: first for
    the value of the last one, then for what to take, ranked so that no two are equal.
    """
    n = values.shape[1]
    count = min(count, n)
    if count == 0 or len(values) == 0:
        return torch.empty((len(values), count), dtype=torch.int64, device=values.device)
    last = values.topk(count).values[:, -1:]  # [rows, 1]
    backwards = torch.arange(n, 0, -1, device=values.device)  # [n], the first index has the highest number
    rank = (values >= last) * backwards + (values > last) * n  # [rows, n]
    chosen = rank.topk(count).indices  # [rows, count]: those above the last one by index, then its equals by index
    order = values.gather(1, chosen).sort(dim=1, descending=True, stable=True).indices  # [rows, count]
    return chosen.gather(1, order)


# --- To the device and back -------------------------------------------------------------------------


def send(device: torch.device, *arrays: Sequence[Any] | NDArray[Any]) -> list[Tensor]:
    """Arrays of float64, and of whole numbers as int64, on the device: in one copy, side by side."""
    wide = [array if isinstance(array, np.ndarray) else np.array(array, dtype=np.int64) for array in arrays]
    together = to_device(torch.from_numpy(np.concatenate([array.view(np.int64) for array in wide])), device)
    parts = torch.split(together, [len(array) for array in wide])
    return [
        part.view(torch.float64) if array.dtype == np.float64 else part for part, array in zip(parts, wide, strict=True)
    ]


class Arriving:
    """Tensors of float64 and int64 on their way to the host: in one copy, which is queued right away.

    So who waits for it waits for the work before it, and not for what was queued since.
    """

    def __init__(self, *tensors: Tensor) -> None:
        together = torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in tensors])
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._together = together.to("cpu", non_blocking=True)  # from a GPU, into pinned memory
        self._copied = torch.cuda.Event() if is_gpu(together.device) else None  # type: ignore[no-untyped-call]
        if self._copied:
            self._copied.record(torch.cuda.current_stream(together.device))

    def arrays(self) -> list[NDArray[Any]]:
        """The tensors on the host. This is the only time the host waits."""
        if self._copied:
            self._copied.synchronize()
        parts = np.split(self._together.numpy(), np.cumsum([shape.numel() for shape, _ in self._shapes])[:-1])
        return [
            (part.view(np.float64) if dtype == torch.float64 else part).reshape(shape)
            for part, (shape, dtype) in zip(parts, self._shapes, strict=True)
        ]


def receive(*tensors: Tensor) -> list[NDArray[Any]]:
    """Tensors of float64 and int64 on the host, waited for."""
    return Arriving(*tensors).arrays()


# --- What cannot be served --------------------------------------------------------------------------


def _without_bad(
    sampled: list[Sampled],
    inputs: Sequence[SamplingInput],
    altered: Sequence[int],
    likeliest: NDArray[np.int64],
    peaks: NDArray[np.float64],
    altered_peaks: NDArray[np.float64],
) -> list[Sampled]:
    """With the error in place of the token where the row of an input has no finite peak, or none once penalised."""
    errors: dict[int, str | None] = {}
    for place in np.flatnonzero(~np.isfinite(altered_peaks)).tolist():
        index = altered[place]
        errors[index] = why_nothing_left(inputs[index].ruled_out_by, float(altered_peaks[place]))
    for index in np.flatnonzero(~np.isfinite(peaks)).tolist():  # then it is not the request that leaves nothing
        errors[index] = why_no_peak(likeliest[index], peaks[index])
    for index, error in errors.items():
        sampled[index] = Sampled(0, math.nan, None, error)
    return sampled
