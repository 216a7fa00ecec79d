"""How beams diverge: which beam each survivor stems from, step after step (paper, section 4.4, Fig. 9).

How many blocks beams share is decided by that alone, not by which tokens they hold. It was heard from real beams of
SmolLM2 (`python -m minipaged.paper.divergence` listens again, and writes `data/beams.json`): for 12 prompts and each
width a *run*, the parents of the survivors, best first, in each of 47 steps. In a simulation every request follows one
of the runs, from some step of it on and around; which, its lengths decide (`DivergingBeams`). So the sharing that Figs.
14 and 15 depend on is measured, though on another model than the paper's.

And there is a model of it, for runs that nobody has heard (`ModelledBeams`). It has one number, `GAP`, fitted to the
measured runs: with it all three widths part as they do there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from minipaged import contracts
from minipaged.contracts import BeamMove, BeamStep, Logits
from minipaged.events import Event, SequenceForked, StepFinished, TokenGenerated
from minipaged.params import BeamSearchParams

Run = list[list[int]]
"""[step][survivor] = index of its parent among the survivors of the step before."""
WIDTHS = (2, 4, 6)
STEPS = 48
GAP = 5.0
"""How much more a less likely token costs a beam than its likeliest. The larger, the longer beams stay apart. Fitted:
of 1, 2, 3, ... the one by which as much is shared as was measured."""
PROMPTS = (
    "Give three tips for staying healthy.",
    "Name the planets of the solar system in order.",
    "Explain why the sky is blue to a child.",
    "Write a short poem about the sea in winter.",
    "What is the difference between a virus and a bacterium?",
    "Suggest a title for a story about a lost dog.",
    "Translate into French: The library opens at nine.",
    "List five things to pack for a trip to the mountains.",
    "Describe how to make a cup of tea.",
    "What are the advantages of public transport?",
    "Write an email that asks for a day off.",
    "Summarize what photosynthesis does in one sentence.",
)


class DivergingBeams(contracts.BeamSearch):
    """A beam search whose survivors stem from the beams that they stemmed from in a measured run. Tokens and scores
    mean nothing: a simulation has no others."""

    def __init__(
        self, params: BeamSearchParams, prompt_length: int, max_length: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._left = max_length - prompt_length
        self.width = params.beam_width
        self.begin(random.Random(f"{prompt_length} {max_length}"))

    def begin(self, drawn: random.Random) -> None:
        """Choose what this search will be. `drawn`: for each request another."""
        runs = measured_runs(self.width)
        self._run = drawn.randrange(len(runs))
        self._at = drawn.randrange(len(runs[self._run]))

    def parents(self) -> list[int]:
        """Of the survivors of the next step, best first."""
        run = measured_runs(self.width)[self._run]
        self._at += 1
        return run[(self._at - 1) % len(run)]

    def step(self, logits: Logits, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
        self._left -= 1
        parents = self.parents() if len(rows) == self.width else [0] * self.width  # of the prompt
        moves = [BeamMove(parent, 0, 0.0) for parent in parents]
        return BeamStep(moves, []) if self._left else BeamStep([], [(move, 0.0) for move in moves])


class ModelledBeams(DivergingBeams):
    """The same, but survivors are found as a beam search finds them, by scores that are drawn: a beam's likeliest token
    costs its score an exponential amount, of mean 1, and each less likely token another one, of mean GAP."""

    def begin(self, drawn: random.Random) -> None:
        self._drawn = drawn
        self._scores = [0.0] * self.width
        """Of the survivors, best first."""

    def parents(self) -> list[int]:
        found: list[tuple[float, int]] = []
        for beam, score in enumerate(self._scores):
            score -= self._drawn.expovariate(1)
            for _ in range(self.width):
                found.append((score, beam))
                score -= self._drawn.expovariate(1 / GAP)
        found.sort(reverse=True)
        self._scores = [score - found[0][0] for score, _ in found[: self.width]]
        return [beam for _, beam in found[: self.width]]


DIVERGENCE = {"measured": DivergingBeams, "modelled": ModelledBeams}


@cache
def measured_runs(width: int) -> list[Run]:
    """One for each prompt."""
    runs: list[Run] = json.loads((files("minipaged.paper") / "data/beams.json").read_text())[str(width)]
    return runs


class Listener:
    """Hears from the events of one beam search which beam each survivor stems from."""

    def __init__(self) -> None:
        self.run: Run = []
        self._before: list[int] = []
        self._now: list[int] = []
        self._parents: dict[int, int] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case SequenceForked():
                self._parents[event.child] = event.parent
            case TokenGenerated():
                self._now.append(event.sequence)
            case StepFinished() if self._now:
                if len(self._before) == len(self._now):
                    stems = [one if one in self._before else self._parents[one] for one in self._now]
                    self.run.append([self._before.index(one) for one in stems])
                self._before, self._now, self._parents = self._now, [], {}


def measure(model: str) -> dict[str, list[Run]]:
    """The runs of all prompts and widths, on a real model."""
    from minipaged.llm import LLM
    from minipaged.setup.loaded_model import LoadedModel

    loaded = LoadedModel.load(model)
    found: dict[str, list[Run]] = {}
    for width in WIDTHS:
        params = BeamSearchParams(beam_width=width, max_tokens=STEPS, ignore_eos=True)
        for prompt in PROMPTS:
            listener = Listener()
            LLM(loaded, listeners=[listener], num_blocks=256).beam_search([prompt], params)
            found.setdefault(str(width), []).append(listener.run)
    return found


if __name__ == "__main__":
    runs = measure("smollm2-135m-instruct")
    lines = ",\n".join(f' "{width}": {json.dumps(of_width, separators=(",", ":"))}' for width, of_width in runs.items())
    Path(__file__).with_name("data").joinpath("beams.json").write_text(f"{{\n{lines}\n}}\n")
