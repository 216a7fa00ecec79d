"""The demo: paging on a real model, told in plain lines. `minipaged demo`, or `python -m minipaged.demo`.

scenes.py      what is shown: six scenes, one idea of the paper each
stage.py       one loaded model, an engine for each run, requests that arrive step by step
memory_map.py  who holds which block, folded from the engine's events alone
story.py       the events, in sentences
measures.py    paging against contiguous reservation, in bytes; what sharing and preemption did
report.py      all that as lines of text, or as JSON
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from minipaged.contracts import BlockAllocator
from minipaged.demo import report
from minipaged.demo.scenes import SCENES, Outcome
from minipaged.demo.stage import Stage
from minipaged.errors import InvalidRequest


def run_demo(
    *,
    scene: str | None = None,
    model: str | Path = "smollm2-135m-instruct",
    tier: str = "auto",
    block_size: int | None = None,
    num_blocks: int | None = None,
    allocator: Callable[[int], BlockAllocator] | None = None,
    seed: int = 0,
    json_output: bool = False,
) -> list[Outcome]:
    """Play one scene, or all, and print what happened; returns the same as data.

    `block_size` and `num_blocks` replace every scene's own. `json_output`: print one JSON document and nothing else.
    Raises InvalidRequest for an unknown scene and for sizes that a scene does not fit, ModelError for the model.
    """
    chosen = [one for one in SCENES if scene in (None, one.name)]
    if not chosen:
        raise InvalidRequest(f"there is no scene {scene!r}; choose one of {', '.join(one.name for one in SCENES)}")
    from minipaged.llm import LoadedModel

    def show(*lines: str) -> None:
        if not json_output:
            print(*lines, sep="\n", flush=True)

    started = time.perf_counter()
    # The demo shows that preemption changes no text. In bfloat16, rounding would.
    loaded = LoadedModel.load(model, tier, dtype="float32")
    stage = Stage(loaded, seed, block_size, num_blocks, allocator)
    outcomes = []
    show(*report.opening(stage))
    for number, one in enumerate(chosen, start=1):
        show(*report.heading(number, len(chosen), one))
        outcomes.append(one.play(stage))
        show(*report.outcome_lines(outcomes[-1]))
    show(report.closing(len(chosen), time.perf_counter() - started))
    if json_output:
        print(report.document(stage, zip(chosen, outcomes, strict=True)))
    return outcomes
