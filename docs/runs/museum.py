"""What the recordings of the bug museum share: the stage on which an exhibit is run, step by step.

The tokens are words. Memory is the content oracle's, which knows whose keys and values are in each slot; but where a
test would end with an error, a wrong read is only noted here, and the run goes on, as it did where the bug shipped.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minipaged import SamplingParams
from minipaged.contracts import Tier
from minipaged.engine.engine import Engine
from minipaged.events import Event
from minipaged.params import EngineConfig
from minipaged.replay.teller import letter
from minipaged.stepper import Recording
from minipaged.testing.content_runner import ContentRunner, WrongRead
from minipaged.tiers import reference_tier

MUSEUM = Path(__file__).parent.parent.parent / "museum"


def exhibit(name: str) -> dict[str, Any]:
    """What the file of an exhibit defines."""
    return runpy.run_path(str(MUSEUM / f"{name}.py"))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


class Stage(ContentRunner):
    """A model whose tokens are the words of `texts`, and which notes wrong reads in the recording."""

    def __init__(self, *texts: str) -> None:
        self.words = list(dict.fromkeys(" ".join(texts).split()))
        self.recording: Recording | None = None

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in tokens)

    def start(
        self, recording: Recording, tier: Tier | None = None, parts: Mapping[str, Any] | None = None, **sizes: Any
    ) -> Engine:
        """An engine with this model and these parts of an exhibit's; `sizes` are fields of EngineConfig."""
        self.recording = recording
        sizes = {"max_model_len": 64, "vocab_size": len(self.words), "enable_prefix_caching": False} | sizes
        config = EngineConfig(**sizes)
        super().__init__(config.num_blocks, config.num_swap_blocks, config.block_size, config.vocab_size)
        self.engine = Engine(config, tier or reference_tier(), self, decode=self.decode, steady=False, **(parts or {}))
        return self.engine

    def on_wrong_read(self, read: WrongRead) -> None:
        assert self.recording
        if (read.position + 1) % self.block_size:
            return  # the block's last position tells of the whole block
        there = "that nobody wrote" if read.found is None else f"of “{self.decode(read.found)}”"
        self.recording.note(
            f"Now the model runs. For sequence {letter(read.sequence)} it looks for the keys and values of "
            f"“{self.decode(read.wanted)}” in block {read.block}, and reads those {there}."
        )


def note_on(kind: type[Event], recording: Recording, text: str) -> None:
    """Say something more of the latest event of that kind."""
    recording.notes[max(i for i, event in enumerate(recording.events) if isinstance(event, kind))] = text
