"""What only the fast tier's `sample` has: half precision, strided logits, drawing piece by piece, its own exponentials.

That it chooses as the reference does is in `tests/agreement/test_sampling.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minipaged.contracts import SamplingInput
from minipaged.fast import kernels_for, sampling
from minipaged.fast.beam_search import BeamSearch
from minipaged.fast.llama import Llama
from minipaged.params import BeamSearchParams, SamplingParams

VOCAB = 400
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
EVERY_WAY = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=7, repetition_penalty=1.5),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, logprobs=3),
    SamplingParams(temperature=1.5, min_p=0.01, presence_penalty=0.5),
]


def table(dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """[4, VOCAB]"""
    numbers = np.random.default_rng(0).standard_normal((4, VOCAB)) * 3
    return torch.from_numpy(numbers).to(dtype).to(device)


def inputs(params: list[SamplingParams] = EVERY_WAY, each: int = 5) -> list[SamplingInput]:
    return [
        SamplingInput(row, one, [1, 2], [3] * row, seed=stream, stream=stream)
        for one in params
        for row in range(4)
        for stream in range(each)
    ]


def in_grammars(wanted: list[SamplingInput]) -> list[SamplingInput]:
    """Give two of three inputs a grammar: they may choose among half of the tokens."""
    bits = np.random.default_rng(2).integers(0, 2**32, (len(wanted), -(-VOCAB // 32)), dtype=np.uint32)
    return [replace(one, allowed=bits[i] if i % 3 else None) for i, one in enumerate(wanted)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_grammars", [False, True])
@pytest.mark.parametrize("params", [EVERY_WAY[:1], EVERY_WAY], ids=["greedy", "every way"])
def test_half_precision_is_taken_for_the_float32_that_it_is(
    dtype: torch.dtype, device: str, params: list[SamplingParams], has_grammars: bool
) -> None:
    logits = table(dtype, device)
    wanted = in_grammars(inputs(params)) if has_grammars else inputs(params)
    found, expected = sampling.sample(logits, wanted), sampling.sample(logits.float(), wanted)
    assert [one.token_id for one in found] == [one.token_id for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-6)
        assert (ours.top_logprobs or {}).keys() == (theirs.top_logprobs or {}).keys()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_beams_are_ranked_in_float32_where_the_logits_are_in_half_precision(dtype: torch.dtype, device: str) -> None:
    logits = table(dtype, device)
    found, expected = (
        BeamSearch(BeamSearchParams(3, 9), 2, 11, [1]).step(one, [2, 0, 3], [-1.25, -1.0, -1.125])
        for one in (logits, logits.float())
    )
    assert found == expected


@pytest.mark.parametrize("device", DEVICES)
def test_logits_may_be_a_strided_view_and_are_left_as_they_were(device: str) -> None:
    logits = table(device=device)
    wide = torch.full((8, VOCAB + 3), 99.0, device=device)
    view = wide[::2, 1:-2]
    view.copy_(logits)
    found, expected = list(sampling.sample(view, inputs())), list(sampling.sample(logits, inputs()))
    if device == "cuda":  # loads that are not aligned go to other threads, and so sums are added up in another order
        assert [one.token_id for one in found] == [one.token_id for one in expected]
        assert [one.error for one in found] == [one.error for one in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)
            assert list(ours.top_logprobs or ()) == list(theirs.top_logprobs or ())
            assert (ours.top_logprobs or {}) == pytest.approx(theirs.top_logprobs or {}, abs=1e-6)
    else:
        assert found == expected
    assert torch.equal(view, logits)
    assert torch.equal(logits, table(device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_drawn_in_pieces_gives_the_same_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(sampling.sample(table(device=device), inputs()))
    sizes: list[int] = []
    kernels = kernels_for(torch.device(device))

    def watched(*given: Any, draw: Any = kernels.draw, **named: Any) -> Any:
        sizes.append(len(given[1]))
        return draw(*given, **named)

    monkeypatch.setattr(kernels, "draw", watched)
    monkeypatch.setattr(sampling, "PIECE", 3 * VOCAB)
    assert list(sampling.sample(table(device=device), inputs())) == whole
    # 4 distributions without penalties, of which some need their logits in order. 20 with, one for each input; none of
    # these does, and on a GPU all are drawn from at once then.
    assert sizes == [3, 1, *([20] if device == "cuda" else [3] * 6 + [2])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", [*([one] for one in EVERY_WAY), EVERY_WAY], ids=str)
def test_what_was_worked_out_once_chooses_the_same_tokens_as_the_outputs_grow(
    params: list[SamplingParams], device: str
) -> None:
    outputs = [[3] * (number % 4) for number in range(20 * len(params))]
    wanted = [replace(one, output_token_ids=output) for one, output in zip(inputs(params), outputs, strict=True)]
    how = sampling.Choosing(wanted, torch.device(device), VOCAB)
    drawn: list[list[int]] = []
    for _ in range(4):
        found = list(how.sample(table(device=device)))
        assert found == list(sampling.sample(table(device=device), wanted))
        drawn.append([one.token_id for one in found])
        for output, token_id in zip(outputs, drawn[-1], strict=True):
            output.append(token_id)
    if any(one.temperature for one in params):
        assert len(set(map(tuple, drawn))) == 4, "each position draws with a number of its own"


@pytest.mark.parametrize("params", [EVERY_WAY[:1], EVERY_WAY], ids=["greedy", "every way"])
def test_only_a_batch_with_grammars_sends_what_they_allow_and_in_one_copy_a_step(
    params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send_allowed = sampling.send_allowed

    def send(logits: torch.Tensor, wanted: Any) -> torch.Tensor:
        sent.append(len(wanted))
        return send_allowed(logits, wanted)

    monkeypatch.setattr(sampling, "send_allowed", send)
    kernels = kernels_for(torch.device("cpu"))
    for name in ("likeliest_allowed", "allowed_only"):
        monkeypatch.setattr(kernels, name, None)
    list(sampling.sample(table(), inputs(params)))
    assert sent == []
    monkeypatch.undo()
    monkeypatch.setattr(sampling, "send_allowed", send)
    wanted = in_grammars(inputs(params))
    plan = sampling.Choosing.of(wanted, table())
    for _ in range(3):
        list(plan.sample(table()))
    has_grammar = [one.allowed is not None or one.params.changes_logits for one in wanted]  # what is altered is sent
    assert sent == [len(wanted) if len(params) == 1 else sum(has_grammar)] * 3


def test_the_model_works_out_once_how_to_choose_while_a_lane_has_the_same_inputs() -> None:
    model: Any = SimpleNamespace(_choosing={}, mirror="a lane's", kernels=kernels_for(torch.device("cpu")))
    first, other = tuple(inputs()), tuple(inputs())

    def kept_after(wanted: Any, logits: Any = None) -> sampling.Choosing | None:
        Llama.sample(model, table() if logits is None else logits, wanted)
        return model._choosing.get(model.mirror)  # type: ignore[no-any-return]

    kept = kept_after(first)
    assert kept_after(first) is kept
    assert kept_after(other) is not kept
    model.mirror = "another lane's"
    assert kept_after(first) is not kept
    assert len(model._choosing) == 2
    with pytest.raises(AttributeError):
        kept_after(first, "no logits")
    assert model.mirror not in model._choosing, "what was cut short is not gone on from"


@pytest.mark.parametrize("params", EVERY_WAY)
def test_tokens_that_are_asked_for_come_in_the_same_copy_and_cost_nothing_where_there_are_none(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    arriving, gathered, logprobs_of = sampling.Arriving, list[Any](), sampling._logprobs

    def arrive(*tensors: torch.Tensor) -> sampling.Arriving:
        copied.append(sum(map(torch.numel, tensors)))
        return arriving(*tensors)

    def gather(rows: torch.Tensor, *given: Any) -> torch.Tensor:
        gathered.append(rows)
        return logprobs_of(rows, *given)

    monkeypatch.setattr(sampling, "Arriving", arrive)
    monkeypatch.setattr(sampling, "_logprobs", gather)
    asking = replace(params, logprobs=None, logprob_token_ids=[9, 3, 9])
    for one in (params, asking):
        list(sampling.sample(table(), inputs([one])))
    assert len(copied) == 2
    assert [len(rows) for rows in gathered] == [*([4] if params.logprobs else []), 60]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 3.0, 100.0, 1e30])
def test_the_logarithm_of_the_sum_is_right_at_any_spread(dtype: torch.dtype, spread: float) -> None:
    logits = (torch.from_numpy(np.random.default_rng(1).standard_normal((3, 5000))) * spread).to(dtype)
    token_ids, peaks, log_totals = kernels_for(logits.device).argmax_logsumexp(logits)
    assert torch.equal(token_ids, logits.argmax(dim=1))
    assert torch.equal(peaks, logits.double().amax(dim=1))
    expected = torch.logsumexp(logits.double() - peaks[:, None], dim=1)
    tolerance = 2e-7 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(log_totals, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_that_cannot_be_served_are_refused_after_drawing_and_not_within_it(device: str) -> None:
    """A row of NaN goes through every loop before anybody looks: none of them may read past its end."""
    for bad in (math.nan, -math.nan, math.inf, -math.inf):
        logits = table(device=device)
        logits[2] = bad
        for one in (*EVERY_WAY, SamplingParams(top_p=0.5), SamplingParams(top_k=3), SamplingParams(min_p=0.5)):
            for asked in (inputs([one]), in_grammars(inputs([one]))):
                for wanted, chosen in zip(asked, sampling.sample(logits, asked), strict=True):
                    assert (chosen.error or "").startswith("the model's logits for the next token") == (wanted.row == 2)
                    assert (chosen.error is None) == (wanted.row != 2)
