"""When may two tokens differ? Only at a tie, and a test that meets a difference has to prove that it was one.

Two correct computations of the same logits differ by rounding: sums are taken in another order when a sequence runs
in another batch, in other chunks or over other blocks. If each logit is off by at most e, then one computation can
prefer token a and the other token b only where the exact logits of both lie within 2e of the best.

So at the first difference, transformers computes the logits in float64 (the exact ones), minipaged computes them once
more in float32, in one piece and on an engine of its own, and e is what lies between the two. An e that is larger than
rounding can explain is an error itself: a wrong computation cannot excuse its own differences.

A drawn token is where a number u falls among the running sums of the probabilities, token after token. There the tie is
between neighbours: rounding moves each sum by at most d, and both tokens have to lie within d of where u falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from minipaged.contracts import BatchRow, SamplingInput
from minipaged.llm import LoadedModel
from minipaged.params import EngineConfig
from minipaged.reference.sampling import distribution, penalise, uniform

ROUNDING = 1e-4
"""Most that float32 logits of a Llama may be off, as a fraction of the largest."""

Logits = npt.NDArray[np.floating]


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
    """Fail unless rounding alone can make one computation draw token `a` and another token `b`."""
    error = check_rounding(exact, computed)
    u = uniform(wanted.seed, wanted.stream, wanted.position)
    sums = running_sums(exact, wanted)
    # A logit that is off by e makes a weight wrong by a factor of exp(e / temperature), and so is the sum of all.
    moved = np.expm1(2 * error / wanted.params.temperature) + np.abs(running_sums(computed, wanted) - sums).max()
    for token in (a, b):
        low, high = (sums[token - 1] if token else 0.0), sums[token]
        assert low - moved <= u < high + moved, f"{u} falls {low - u} before, {u - high} after token {token}: no tie"


def running_sums(logits: Logits, wanted: SamplingInput) -> Logits:
    """The probability [vocab] of drawing a token up to each one."""
    chances = distribution(penalise(logits, wanted), wanted.params)
    sums = np.zeros(len(logits))
    sums[chances.token_ids] = chances.cumulative / chances.cumulative[-1]
    return np.maximum.accumulate(sums)


def check_rounding(exact: Logits, computed: Logits) -> float:
    """How far the computed logits are off; fails if that is more than rounding."""
    error = float(np.abs(computed - exact).max())
    assert error <= ROUNDING * np.abs(exact).max(), f"logits are off by {error}: more than rounding"
    return error


def check_tie(exact: Logits, computed: Logits, a: int, b: int) -> None:
    """Fail unless rounding alone can make one computation choose token `a` and another token `b`."""
    error = check_rounding(exact, computed)
    gap = exact.max() - min(exact[a], exact[b])
    assert gap <= 2 * error, f"tokens {a} and {b} differ by {gap} from the best, and rounding is {error}: no tie"


def exact_logits(folder: Path, tokens: Sequence[int]) -> Logits:
    """transformers' logits [vocab] after `tokens`, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0, -1].numpy()


def computed_logits(folder: Path, tokens: Sequence[int], tier: str = "reference") -> Logits:
    """A tier's logits [vocab] after `tokens`, in float32."""
    return logits_of(LoadedModel.load(folder, tier, dtype="float32"), tokens)


def logits_of(model: LoadedModel, tokens: Sequence[int]) -> Logits:
    """A model's logits [vocab] after `tokens`, on an engine of its own: one row, one chunk, one block after another."""
    config, block_size = model.config, 16
    num_blocks = -(-len(tokens) // block_size)
    sizes = EngineConfig(num_blocks, block_size=block_size, max_model_len=len(tokens), vocab_size=config.vocab_size)
    runner = model.wing.make_runner(config, model.weights, sizes)
    row = BatchRow(list(tokens), 0, range(num_blocks), wants_logits=True)
    return np.asarray(runner.forward([row])[0])
