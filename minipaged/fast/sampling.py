"""Sampling on the device: the next tokens of a whole batch in one call.

The rules are those of `reference/sampling.py`, in the same order and with the same random numbers, so a seed gives the
same tokens in both tiers. The work is organized differently. The logits of a batch are millions of numbers on a device,
and the result is one token and one log-probability per sequence. So

- the parameters of all inputs go to the device in a few copies, however many inputs there are, and all results come
  back in one copy. While the inputs stay the same, their parameters stay on the device (`Choosing`);
- the device does not wait for the host: no branch depends on a logit. Errors (NaN, no token left) are detected at the
  end, in results that the host receives anyway;
- the host does not wait for the device: `sample` returns while the results are still on their way, and the first access
  waits for them (`Samples`). The next batch need not wait, because it reads the tokens on the device;
- an input that is greedy and has no penalties, the commonest kind, costs one read of its row (`argmax_logsumexp`, or
  `likeliest_allowed` with a grammar) and no float64 copy;
- a row or a distribution that several inputs share is computed once. Only inputs with penalties or forbidden tokens
  need their own row.

The functions that read whole rows are kernels (`kernels.SamplingKernels`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minipaged.contracts import Sampled, SamplingInput, why_no_peak, why_nothing_left
from minipaged.fast import kernels_for
from minipaged.fast.device import is_gpu, to_device
from minipaged.fast.kernels import SamplingKernels

PIECE = 2**24
"""The number of logits from which tokens are drawn at a time. Scaling, sorting and summing them takes about 1 GB of a
GPU."""


Column = TypeVar("Column")
"""One field of a record of columns: a list or an array on the host, a tensor on the device. The same record type serves
both sides. `send` copies its columns to the device, `Arriving` back to the host."""


class Samples(Sequence[Sampled]):
    """The chosen tokens, on the device and on their way to the host, which waits for them at the first access."""

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
    """Concatenate several samples into one."""
    token_ids = torch.cat([part.token_ids for part in parts])
    return Samples(token_ids, lambda: [one for part in parts for one in part])


def sample(logits: Tensor, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
    """Choose one token for each input from `logits` [rows, vocab]: float32, float16, bfloat16 or float64, on any
    device.

    If no token can be chosen from a row, each input that uses it gets an error: the row holds NaN or plus infinity, or
    only minus infinity is left.
    """
    return Choosing.of(inputs, logits).sample(logits) if inputs else []


class Choosing:
    """The sampling plan of a batch: computed once, and used again while the inputs stay the same.

    The parameters of the inputs then stay on the device. A later step sends only the random numbers, which depend on
    the inputs' positions, the tokens that grammars allow, and the changes for inputs that need their own row. (An
    input's position advances with its output: `Mirror.sampling_inputs`.)
    """

    def __init__(self, inputs: Sequence[SamplingInput], device: torch.device, vocab: int) -> None:
        self.inputs = inputs
        self._kernels = kernels_for(device)
        rows = [wanted.row for wanted in inputs]
        self._in_order = rows == list(range(len(inputs)))  # input i uses row i
        self._all_greedy = all(_is_plainly_greedy(wanted) for wanted in inputs)
        in_grammar = [index for index, wanted in enumerate(inputs) if wanted.allowed is not None]
        self._in_grammar: list[SamplingInput] = []  # the inputs whose allowed tokens are sent at each step
        if self._all_greedy and self._in_order and not in_grammar:
            return  # the commonest batch: it sends nothing
        altered = [index for index, wanted in enumerate(inputs) if _is_altered(wanted)]
        restricted = [index for index in in_grammar if not _is_altered(inputs[index])]
        if self._all_greedy and in_grammar:
            restricted = list(range(len(inputs)))  # one kernel does all
        self._in_grammar = [inputs[index] for index in restricted]
        if len(in_grammar) > len(restricted):
            self._in_grammar += [inputs[index] for index in altered]
        self._lookups = lookups = _Lookups(
            rows=rows,
            restricted=restricted,
            restricted_rows=[rows[index] for index in restricted],
            altered=altered,
            ranked=sorted({wanted.row for wanted in inputs if wanted.params.num_likeliest}),
            given_rows=[wanted.row for wanted in inputs for _ in wanted.params.logprob_token_ids],
            given_tokens=[token_id for wanted in inputs for token_id in wanted.params.logprob_token_ids],
        )
        self._sent = _Lookups(*send(device, *lookups))
        self._count = max((wanted.params.num_likeliest or 0 for wanted in inputs), default=0)
        self._tells_others = any(
            wanted.params.logprobs is not None or wanted.params.logprob_token_ids for wanted in inputs
        )
        own_rows = {*restricted, *altered}
        plain = [(index, row) for index, row in enumerate(rows) if index not in own_rows]
        of_table = [(index, row) for row, index in enumerate(altered)]
        in_grammar_alone = [(index, rows[index]) for index in restricted]
        drawing = partial(_Drawing, inputs=inputs, device=device, vocab=vocab, kernels=self._kernels)
        self._draws, self._altered_draws = drawing(plain), drawing(of_table)
        self._restricted_draws = drawing(in_grammar_alone, has_grammars=True)

    @classmethod
    def of(cls, inputs: Sequence[SamplingInput], logits: Tensor, before: Choosing | None = None) -> Choosing:
        """Return the plan for inputs and logits [rows, vocab]. It is `before` again if that was made for the same
        inputs object."""
        return before if before is not None and before.inputs is inputs else cls(inputs, logits.device, logits.shape[1])

    def sample(self, logits: Tensor) -> Samples:
        """Choose one token for each input, at its current position; see the function `sample`."""
        if not is_gpu(logits.device) and logits.dtype != torch.float64:
            logits = logits.float()  # holds all float16 and bfloat16 values exactly; the compiled loops support neither
        kernels, inputs = self._kernels, self.inputs
        allowed = send_allowed(logits, self._in_grammar) if self._in_grammar else None
        if self._all_greedy and allowed is not None:
            best = kernels.likeliest_allowed(logits, self._sent.restricted_rows, allowed)  # [inputs] each
            arriving = Arriving(*best)
            return Samples(best[0], lambda: _likeliest_allowed(inputs, *arriving.arrays()))
        raw = kernels.argmax_logsumexp(logits)  # [rows] each
        rows = slice(len(inputs)) if self._in_order else self._sent.rows
        likeliest, peaks, log_totals = (each[rows] for each in raw)  # [inputs] each
        if self._all_greedy:
            arriving = Arriving(likeliest, peaks, log_totals)
            return Samples(likeliest, lambda: _likeliest(inputs, *arriving.arrays()))

        sent, lookups = self._sent, self._lookups
        token_ids = likeliest.clone()  # [inputs]
        self._draws.put_into(token_ids, logits, raw[1])
        restricted_peaks, altered_peaks = peaks[:0], peaks[:0]
        if lookups.restricted and allowed is not None:
            first, allowed = allowed[: len(lookups.restricted)], allowed[len(lookups.restricted) :]
            best = kernels.likeliest_allowed(logits, sent.restricted_rows, first)  # [restricted] each
            token_ids[sent.restricted], restricted_peaks, *_ = best
            self._restricted_draws.put_into(token_ids, logits, restricted_peaks, first)
        if lookups.altered:
            table = penalise(logits, [inputs[index] for index in lookups.altered], allowed)  # [altered, vocab]
            token_ids[sent.altered], altered_peaks, _ = kernels.argmax_logsumexp(table)  # [altered]
            self._altered_draws.put_into(token_ids, table, altered_peaks)

        logprobs = logits[sent.rows, token_ids].double() - peaks - log_totals  # [inputs]
        top, top_logprobs, given_logprobs = token_ids[:0], logprobs[:0], logprobs[:0]
        if lookups.ranked:
            top = largest(logits[sent.ranked], self._count)  # [ranked, count]
            top_logprobs = _logprobs(sent.ranked[:, None], top, logits, *raw[1:])
        if lookups.given_rows:
            given_logprobs = _logprobs(sent.given_rows, sent.given_tokens, logits, *raw[1:])
        results = _Results(
            token_ids=token_ids,
            logprobs=logprobs,
            top=top,
            top_logprobs=top_logprobs,
            given_logprobs=given_logprobs,
            likeliest=likeliest,
            peaks=peaks,
            restricted_peaks=restricted_peaks,
            altered_peaks=altered_peaks,
        )
        arriving = Arriving(*results)

        def fetch() -> list[Sampled]:
            found = _Results(*arriving.arrays())
            chosen = zip(found.token_ids.tolist(), found.logprobs.tolist(), strict=True)
            sampled = [Sampled(token_id, logprob, None) for token_id, logprob in chosen]
            if self._tells_others:
                _tell_others(sampled, inputs, lookups.ranked, found)
            changed = [*lookups.restricted, *lookups.altered]
            own_peaks = np.concatenate((found.restricted_peaks, found.altered_peaks))
            return _without_bad(sampled, inputs, changed, found.likeliest, found.peaks, own_peaks)

        return Samples(token_ids, fetch)


class _Lookups(NamedTuple, Generic[Column]):
    """The rows, inputs and tokens that `sample` looks up."""

    rows: Column  # [inputs], each input's row of the logits
    restricted: Column  # [restricted], inputs to which only a grammar applies; all inputs if all are greedy
    restricted_rows: Column  # [restricted], their rows
    altered: Column  # [altered], inputs that need their own row
    ranked: Column  # [ranked], rows whose likeliest tokens are requested
    given_rows: Column  # [given], rows of the tokens that are requested by id
    given_tokens: Column  # [given], the ids of these tokens


class _Results(NamedTuple, Generic[Column]):
    """The results of `sample`, before they become a `Sampled` for each input."""

    token_ids: Column  # [inputs]
    logprobs: Column  # [inputs]
    top: Column  # [ranked, count], the likeliest tokens
    top_logprobs: Column  # [ranked, count]
    given_logprobs: Column  # [given]
    likeliest: Column  # [inputs], of the raw logits
    peaks: Column  # [inputs], of the raw logits
    restricted_peaks: Column  # [restricted]
    altered_peaks: Column  # [altered]


def _logprobs(rows: Tensor, token_ids: Tensor, logits: Tensor, peaks: Tensor, log_totals: Tensor) -> Tensor:
    """Return the float64 log-probabilities of tokens in rows of `logits`. The shapes of `rows` and `token_ids` must
    broadcast."""
    return logits[rows, token_ids].double() - peaks[rows] - log_totals[rows]


def gather_logprobs(logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> Samples:
    """Return the log-probabilities of given tokens, in the form in which `sample` reports them. Token i uses row i of
    `logits`."""
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
    return params.temperature == 0 and params.num_likeliest is None and not _is_altered(wanted)


def _is_altered(wanted: SamplingInput) -> bool:
    """Whether the request changes logits of this input otherwise than by a grammar."""
    return len(wanted.forbidden_token_ids) > 0 or wanted.params.changes_logits


def _likeliest(
    inputs: Sequence[SamplingInput],
    likeliest: NDArray[np.int64],
    peaks: NDArray[np.float64],
    log_totals: NDArray[np.float64],
) -> list[Sampled]:
    """Return the likeliest token of each input; its logit is the peak. For batches without any other request."""
    chosen = zip(likeliest.tolist(), (-log_totals).tolist(), strict=True)
    sampled = [Sampled(token_id, logprob, None) for token_id, logprob in chosen]
    return _without_bad(sampled, inputs, (), likeliest, peaks, peaks[:0])


def _likeliest_allowed(
    inputs: Sequence[SamplingInput],
    token_ids: NDArray[np.int64],
    logits: NDArray[np.float64],
    peaks: NDArray[np.float64],
    log_totals: NDArray[np.float64],
) -> list[Sampled]:
    """Return the likeliest allowed token of each input. For batches with grammars and without any other request."""
    with np.errstate(invalid="ignore"):  # of infinite logits, which are no numbers to report
        logprobs = logits - peaks - log_totals
    chosen = zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    sampled = [Sampled(token_id, logprob, None) for token_id, logprob in chosen]
    return _without_bad(sampled, inputs, range(len(inputs)), token_ids, peaks, logits)


def _tell_others(
    sampled: Sequence[Sampled], inputs: Sequence[SamplingInput], ranked: Sequence[int], found: _Results[NDArray[Any]]
) -> None:
    """Fill in the log-probabilities of other tokens, for the inputs that request them."""
    likely = zip(ranked, found.top.tolist(), found.top_logprobs.tolist(), strict=True)
    rankings = {row: list(zip(tokens, logprobs, strict=True)) for row, tokens, logprobs in likely}
    arrived = iter(found.given_logprobs.tolist())
    for wanted, one in zip(inputs, sampled, strict=True):
        chosen = {one.token_id: one.logprob}
        if given := wanted.params.logprob_token_ids:
            reported = dict(zip(given, islice(arrived, len(given)), strict=True)) | chosen
            one.top_logprobs = dict(sorted(reported.items(), key=lambda pair: (-pair[1], pair[0])))
        elif wanted.params.logprobs is not None:
            one.top_logprobs = dict(rankings.get(wanted.row, [])[: wanted.params.logprobs]) | chosen


def penalise(logits: Tensor, inputs: Sequence[SamplingInput], allowed: Tensor | None = None) -> Tensor:
    """Return a row in float64 for each input [inputs, vocab], after the restriction to allowed tokens, bias and
    penalties. `allowed`: what `send_allowed` returns for the inputs; None or empty if none of them has a grammar.

    The changes are collected as (place, token) pairs over all inputs, and each rule is applied in one operation.
    """
    limited = [number for number, wanted in enumerate(inputs) if wanted.params.allowed_token_ids is not None]
    listed = _Rules(*(_PairList() for _ in _Rules._fields))
    for number, wanted in enumerate(inputs):
        params, output = wanted.params, _tokens(wanted.output_token_ids)
        listed.allowed.add(number, _tokens(params.allowed_token_ids or ()), 0.0)
        listed.forbidden.add(number, _tokens(wanted.forbidden_token_ids), -math.inf)
        bias = dict(params.logit_bias)
        listed.biased.add(number, _tokens(list(bias)), list(bias.values()))
        if params.repetition_penalty != 1:
            # A token may be listed twice here. Both times its logit is read before either result is written.
            seen = np.concatenate((_tokens(wanted.prompt_token_ids), output))
            listed.seen.add(number, seen, params.repetition_penalty)
        tokens, times = np.unique(output, return_counts=True)  # [generated]
        listed.generated.add(number, tokens, params.frequency_penalty * times + params.presence_penalty)
    [rows, only], *sent = send_records(
        logits.device, [[wanted.row for wanted in inputs], limited], *(pairs.joined() for pairs in listed)
    )
    rules = _Rules(*(_Pairs(*columns) for columns in sent))
    table = logits[rows].double()  # [inputs, vocab]
    if allowed is not None and len(allowed):
        kernels_for(logits.device).allowed_only(table, allowed)
    held = table[rules.allowed.where]  # [allowed]
    table.index_fill_(0, only, -math.inf)
    table[rules.allowed.where] = held
    table[rules.forbidden.where] = rules.forbidden.value
    table[rules.biased.where] += rules.biased.value
    held, penalty = table[rules.seen.where], rules.seen.value  # [seen]
    table[rules.seen.where] = torch.where(held > 0, held / penalty, held * penalty)
    table[rules.generated.where] -= rules.generated.value
    return table


Changes = TypeVar("Changes")


class _Rules(NamedTuple, Generic[Changes]):
    """The changes that each rule makes. The rules apply in this order."""

    allowed: Changes
    forbidden: Changes
    biased: Changes
    seen: Changes
    generated: Changes


class _Pairs(NamedTuple, Generic[Column]):
    """(place, token) pairs, each with a value."""

    place: Column  # [pairs], the number of an input
    token: Column  # [pairs]
    value: Column  # [pairs] float64

    @property
    def where(self) -> tuple[Column, Column]:
        """The pairs as indices into a table [inputs, vocab]."""
        return self.place, self.token


class _PairList:
    """A builder of pairs, filled input by input."""

    def __init__(self) -> None:
        none = np.zeros(0, np.int64)
        self._parts = _Pairs[list[NDArray[Any]]](place=[none], token=[none], value=[np.zeros(0)])

    def add(self, place: int, tokens: NDArray[np.int64], value: float | Sequence[float] | NDArray[Any]) -> None:
        self._parts.place.append(np.full(len(tokens), place))
        self._parts.token.append(tokens)
        self._parts.value.append(np.broadcast_to(value, len(tokens)).astype(np.float64))

    def joined(self) -> _Pairs[NDArray[Any]]:
        return _Pairs(*(np.concatenate(parts) for parts in self._parts))


def _tokens(token_ids: Sequence[int]) -> NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)


# --- Drawing ----------------------------------------------------------------------------------------


class _Drawing:
    """The draws of some inputs, split into pieces that are each drawn in one call."""

    def __init__(
        self,
        users: Sequence[tuple[int, int]],
        inputs: Sequence[SamplingInput],
        device: torch.device,
        vocab: int,
        kernels: SamplingKernels,
        *,
        has_grammars: bool = False,
    ) -> None:
        """`users`: (number of an input, its row of logits) each. Greedy inputs draw nothing. `has_grammars`: each has
        a grammar, and so a distribution of its own."""
        self._device = device
        self._kernels = kernels
        drawing_from: dict[_Distribution, list[int]] = defaultdict(list)  # the inputs that draw from each
        for number, (index, used_row) in enumerate(users):
            params = inputs[index].params
            place = number if has_grammars else used_row
            if params.temperature > 0:
                min_logprob = math.log(params.min_p) if params.min_p > 0 else -math.inf
                filters = (params.top_k, params.temperature, min_logprob, 1 - params.top_p)
                wanted = _Distribution(used_row, place, *filters)
                drawing_from[wanted].append(index)
        only_kernels = is_gpu(device) and not any(one.depth(vocab) for one in drawing_from)  # kernels make no copies
        pending = iter(drawing_from.items())
        at_once = len(drawing_from) if only_kernels else max(1, PIECE // vocab)
        self._pieces: list[tuple[_Draws[Tensor], Counters, int]] = []  # each with its depth
        while piece := dict(islice(pending, at_once)):
            sent = _Draws(*send(device, *_Draws.of(piece)))
            drawing = [inputs[index] for indices in piece.values() for index in indices]
            depth = max(distribution.depth(vocab) for distribution in piece)
            self._pieces.append((sent, Counters(drawing), depth))

    def put_into(self, token_ids: Tensor, logits: Tensor, peaks: Tensor, allowed: Tensor | None = None) -> None:
        """Draw tokens from `logits` [rows, vocab] into `token_ids` [inputs]; peaks: [rows]. With grammars, peaks:
        [users], and allowed: [users, words]."""
        for sent, drawing, depth in self._pieces:
            [numbers] = send(self._device, drawing.uniform(self._kernels))
            token_ids[sent.input] = self._kernels.draw(
                logits,
                sent.row,
                peaks[sent.place],
                sent.temperature,
                sent.min_logprob,
                sent.top_k,
                sent.share,
                sent.distribution,
                numbers,
                depth=depth,
                allowed=None if allowed is None else allowed[sent.place],
            )


class _Distribution(NamedTuple):
    """A row of logits with a temperature and filters, from which one or more inputs draw."""

    row: int
    place: int
    """Where its peak is, and its grammar: the row too, or the number of the only user."""
    top_k: int
    temperature: float
    min_logprob: float
    """The log of `min_p`; -inf for none."""
    share: float
    """The probability that `top_p` may cut off; 0 for none."""

    def depth(self, vocab: int) -> int:
        """Return the number of the largest logits that the filters need in order."""
        if 0 < self.top_k < vocab:
            return self.top_k
        return vocab if self.share > 0 else 0


class _Draws(NamedTuple, Generic[Column]):
    """The draws of one piece, and the distributions that they use."""

    input: Column  # [draws], the number of the input that draws
    distribution: Column  # [draws], the number of its distribution
    row: Column  # [distributions]; see `_Distribution`
    place: Column  # [distributions]
    top_k: Column  # [distributions]
    temperature: Column  # [distributions] float64
    min_logprob: Column  # [distributions] float64
    share: Column  # [distributions] float64

    @staticmethod
    def of(drawing_from: Mapping[_Distribution, Sequence[int]]) -> _Draws[Sequence[Any] | NDArray[Any]]:
        """`drawing_from`: the numbers of the inputs that draw from each distribution."""
        return _Draws(
            input=[index for indices in drawing_from.values() for index in indices],
            distribution=[number for number, indices in enumerate(drawing_from.values()) for _ in indices],
            row=[each.row for each in drawing_from],
            place=[each.place for each in drawing_from],
            top_k=[each.top_k for each in drawing_from],
            temperature=np.array([each.temperature for each in drawing_from]),
            min_logprob=np.array([each.min_logprob for each in drawing_from]),
            share=np.array([each.share for each in drawing_from]),
        )


class Counters:
    """The seeds, streams and positions of some inputs, from which their random numbers are computed."""

    def __init__(self, inputs: Sequence[SamplingInput]) -> None:
        self._first = inputs[0]
        self._first_position = self._first.position
        self._seeds = np.array([wanted.seed & 0xFFFFFFFFFFFFFFFF for wanted in inputs], np.uint64)  # [n]
        self._streams = np.array([wanted.stream for wanted in inputs], np.uint64)  # [n]
        self._positions = np.array([wanted.position for wanted in inputs], np.uint64)  # [n], at the start

    def uniform(self, kernels: SamplingKernels) -> NDArray[np.float64]:
        """Return a number in [0, 1) for each input at its position, [n]: 53 bits of Philox4x32-10 (Salmon et al., SC
        2011).

        The counters are on the host, so the numbers are computed there and sent.
        """
        later = np.uint64(self._first.position - self._first_position)  # all positions advance together
        return kernels.uniform(self._seeds, self._streams, self._positions + later)


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices [rows, count] of the `count` largest values of each row of `values` (all n if there are
    fewer). The largest comes first; on ties, the lowest index."""
    count = min(count, values.shape[1])
    if count == 0 or len(values) == 0:
        return torch.empty((len(values), count), dtype=torch.int64, device=values.device)
    return kernels_for(values.device).largest(values, count)


# --- To the device and back -------------------------------------------------------------------------


def send(device: torch.device, *arrays: Sequence[Any] | NDArray[Any]) -> list[Tensor]:
    """Copy arrays to the device in one transfer: float64 stays float64, integers become int64."""
    wide = [array if isinstance(array, np.ndarray) else np.array(array, dtype=np.int64) for array in arrays]
    together = to_device(torch.from_numpy(np.concatenate([array.view(np.int64) for array in wide])), device)
    parts = torch.split(together, [len(array) for array in wide])
    return [
        part.view(torch.float64) if array.dtype == np.float64 else part for part, array in zip(parts, wide, strict=True)
    ]


def send_allowed(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    """Copy the tokens that the inputs' grammars allow to the device of `logits` [rows, vocab], in one transfer.

    Returns [inputs, ceil(vocab / 32)] int32, for `likeliest_allowed`. An input without a grammar allows all.
    """
    words = -(-logits.shape[1] // 32)
    table = np.zeros((len(inputs), words), np.uint32)  # 0: what lies past the end of the bits is forbidden
    for row, wanted in zip(table, inputs, strict=True):
        if wanted.allowed is None:
            row[:] = 2**32 - 1
        else:
            known = wanted.allowed[:words]
            row[: len(known)] = known
    return to_device(torch.from_numpy(table.view(np.int32)), logits.device)


def send_records(device: torch.device, *records: Sequence[Sequence[Any] | NDArray[Any]]) -> list[list[Tensor]]:
    """Copy several records of arrays to the device in one transfer. Returns the tensors of each."""
    sent = iter(send(device, *chain.from_iterable(records)))
    return [list(islice(sent, len(record))) for record in records]


class Arriving:
    """Tensors of float64 and int64 on their way to the host, in one copy that is queued immediately.

    Waiting for them waits for earlier work only, not for work that is queued later.
    """

    def __init__(self, *tensors: Tensor) -> None:
        together = torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in tensors])
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._together = together.to("cpu", non_blocking=True)  # from a GPU, into pinned memory
        self._copied = torch.cuda.Event() if is_gpu(together.device) else None  # type: ignore[no-untyped-call]
        if self._copied:
            self._copied.record(torch.cuda.current_stream(together.device))

    def arrays(self) -> list[NDArray[Any]]:
        """Return the tensors on the host. Only this method makes the host wait."""
        if self._copied:
            self._copied.synchronize()
        parts = np.split(self._together.numpy(), np.cumsum([shape.numel() for shape, _ in self._shapes])[:-1])
        return [
            (part.view(np.float64) if dtype == torch.float64 else part).reshape(shape)
            for part, (shape, dtype) in zip(parts, self._shapes, strict=True)
        ]


def receive(*tensors: Tensor) -> list[NDArray[Any]]:
    """Return tensors of float64 and int64 on the host, after waiting for them."""
    return Arriving(*tensors).arrays()


# --- What cannot be served --------------------------------------------------------------------------


def _without_bad(
    sampled: list[Sampled],
    inputs: Sequence[SamplingInput],
    changed: Sequence[int],
    likeliest: NDArray[np.int64],
    peaks: NDArray[np.float64],
    own_peaks: NDArray[np.float64],
) -> list[Sampled]:
    """Return `sampled` with an error instead of the token where an input's row has no finite peak: before penalties and
    grammars (`peaks`), or after them (`own_peaks`, of the inputs `changed`)."""
    errors: dict[int, str | None] = {}
    for place in np.flatnonzero(~np.isfinite(own_peaks)).tolist():
        index = changed[place]
        errors[index] = why_nothing_left(inputs[index].ruled_out_by, float(own_peaks[place]))
    for index in np.flatnonzero(~np.isfinite(peaks)).tolist():  # then the logits are at fault, not the request
        errors[index] = why_no_peak(likeliest[index], peaks[index])
    for index, error in errors.items():
        sampled[index] = Sampled(0, math.nan, None, error)
    return sampled
