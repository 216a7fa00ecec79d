"""The divergence of beams: the parent of each surviving beam in each step (paper, section 4.4, Fig. 9).

The parents alone decide how many blocks beams share; their tokens do not matter. The parents were measured on real
beams of SmolLM2, for 12 prompts and each width. A *run* lists the parents of the survivors, best first, in each of 47
steps. In a simulation every request follows one run from a random step on, and starts over at the run's end. The
request's lengths seed the choice of both (`DivergingBeams`). The sharing in Figs. 14 and 15 is thus measured, but on
another model than the paper's. `python -m minipaged.paper.divergence` measures again and writes `data/beams.json`.

`ModelledBeams` is a model of divergence that needs no measured run. Its one parameter, `GAP`, is fitted to the measured
runs and matches them at all three widths.
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
"""A run: `run[step][survivor]` is the index of its parent among the survivors of the step before."""
WIDTHS = (2, 4, 6)
STEPS = 48
GAP = 5.0
"""The mean amount by which each less likely token lowers a beam's score. The likeliest lowers it by 1. With a larger
gap beams stay separate for longer. The value is fitted: of 1, 2, 3, ... the one with the measured amount of sharing."""
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
    """A beam search whose survivors have the same parents as in a measured run. Tokens and scores are dummies, as
    everywhere in a simulation."""

    def __init__(
        self, params: BeamSearchParams, prompt_length: int, max_length: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._left = max_length - prompt_length
        self.width = params.beam_width
        self.begin(random.Random(f"{prompt_length} {max_length}"))

    def begin(self, drawn: random.Random) -> None:
        """Choose a run and the step to start at. `drawn` is the random generator of this request."""
        runs = measured_runs(self.width)
        self._run = drawn.randrange(len(runs))
        self._at = drawn.randrange(len(runs[self._run]))

    def parents(self) -> list[int]:
        """Return the parents of the next step's survivors, best first."""
        run = measured_runs(self.width)[self._run]
        self._at += 1
        return run[(self._at - 1) % len(run)]

    def step(self, logits: Logits, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
        self._left -= 1
        parents = self.parents() if len(rows) == self.width else [0] * self.width  # all stem from the prompt
        moves = [BeamMove(parent, 0, 0.0) for parent in parents]
        return BeamStep(moves, []) if self._left else BeamStep([], [(move, 0.0) for move in moves])


class ModelledBeams(DivergingBeams):
    """A beam search over random scores instead of a measured run. A beam's likeliest token lowers its score by an
    exponentially distributed amount with mean 1. Each less likely token lowers it further, with mean GAP."""

    def begin(self, drawn: random.Random) -> None:
        self._drawn = drawn
        self._scores = [0.0] * self.width
        """The survivors' scores, best first."""

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
    """Load the measured runs of this width, one for each prompt."""
    runs: list[Run] = json.loads((files("minipaged.paper") / "data/beams.json").read_text())[str(width)]
    return runs


class Listener:
    """An event listener that records the parents of the survivors of one beam search."""

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
    """Measure the runs of all prompts and widths on a real model."""
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
