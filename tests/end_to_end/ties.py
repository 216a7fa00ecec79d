"""Where two tokens differ that should be the same, a test proves that it was at a tie (`minipaged/recordings/ties.py`).

At the first difference transformers computes the logits in float64 (the exact ones), and minipaged computes them once
more in float32, in one piece and on an engine of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from minipaged.contracts import SamplingInput
from minipaged.llm import LoadedModel
from minipaged.params import SamplingParams
from minipaged.recordings.replay_steps import logits_of
from minipaged.recordings.ties import Logits, why_no_tie
from minipaged.tiers import reference_draw


def check_same_or_tied(folder: Path, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> None:
    """Fail unless the greedy continuations of `prompt` are equal, or part at a proven tie."""
    if list(ours) == list(theirs):
        return
    agree = num_agreeing(ours, theirs)
    tokens = [*prompt, *ours[:agree]]
    check_tie(exact_logits(folder, tokens), computed_logits(folder, tokens), ours[agree], theirs[agree])


def check_same_or_tied_draws(folder: Path, wanted: SamplingInput, ours: Sequence[int], theirs: Sequence[int]) -> None:
    """Fail unless two drawn continuations are equal, or part at a proven tie. `wanted`: what was asked for at first."""
    if list(ours) == list(theirs):
        return
    agree = num_agreeing(ours, theirs)
    tokens = [*wanted.prompt_token_ids, *ours[:agree]]
    wanted = replace(wanted, output_token_ids=list(ours[:agree]))
    check_tied_draw(exact_logits(folder, tokens), computed_logits(folder, tokens), wanted, ours[agree], theirs[agree])


def num_agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two different continuations have in common; both must go on after them."""
    agree = 0
    while agree < min(len(ours), len(theirs)) and ours[agree] == theirs[agree]:
        agree += 1
    assert agree < min(len(ours), len(theirs)), f"one ends early: {list(ours)} against {list(theirs)}"
    return agree


def check_tied_draw(exact: Logits, computed: Logits, wanted: SamplingInput, a: int, b: int) -> None:
    """Fail unless rounding alone can make one computation choose token `a` and another token `b`."""
    objection = why_no_tie(exact, computed, wanted, a, b)
    assert objection is None, f"no tie: {objection}"


def check_tie(exact: Logits, computed: Logits, a: int, b: int) -> None:
    """The same for greedy choices."""
    check_tied_draw(exact, computed, SamplingInput(0, SamplingParams(temperature=0), [], [], seed=0, stream=0), a, b)


def running_sums(logits: Logits, wanted: SamplingInput) -> Logits:
    """The probability [vocab] of drawing a token up to each one."""
    sums: Logits = reference_draw(logits, wanted)[1]
    return sums


def exact_logits(folder: Path, tokens: Sequence[int]) -> Logits:
    """transformers' logits [vocab] after `tokens`, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0, -1].numpy()


def computed_logits(folder: Path, tokens: Sequence[int], tier: str = "reference") -> Logits:
    """A tier's logits [vocab] after `tokens`, in float32."""
    return logits_of(LoadedModel.load(folder, tier, dtype="float32"), tokens)
