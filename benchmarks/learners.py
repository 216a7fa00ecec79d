"""What those who learn from it wait for: the demo's drawing, the tutorials, the grader's performance index.

    python -m benchmarks.learners [--json FILE]

A view that is drawn beside a model takes its time from it: its share is the seconds that the player counts for
following the events, telling them, drawing and the escape sequences, against those of the engine (SmolLM2, float32, 120
by 40, speed 1), scene by scene. A tutorial is timed as a script, as whoever runs one waits for it. The index of a
submission is its speed against the reference's: that of the reference itself has to be about 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.side_by_side import Result, report

ROOT = Path(__file__).parent.parent
DRAWING_PERCENT = 5.0
"""Most of the engine's time that the view may take, over the whole show."""
TUTORIAL_SECONDS = 30.0
GRADING_SECONDS = 60.0
REFERENCES = {
    "block-allocator": ("reference/block_allocator.py", "BlockAllocator"),
    "block-table": ("reference/block_table.py", "BlockTable"),
    "paged-attention": ("reference/attention.py", "paged_attention"),
    "scheduler": ("engine/policy.py", "FirstComeFirstServed"),
}
"""The file of each assignment's solution, and what it is called there."""
INDEX = (0.5, 2.0)
"""Between these the reference measured against itself has to lie."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what learners wait for.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and machine to this file")
    arguments = parser.parse_args()
    report([*drawing(), *grading(), *tutorials()], {}, arguments.json)


def drawing() -> list[Result]:
    """The view's share of the engine's time, in percent: each scene's, and the whole show's."""
    from rich.color import ColorSystem

    from minipaged.demo.player import Film, Player
    from minipaged.demo.scenes import SCENES
    from minipaged.demo.stage import Stage
    from minipaged.demo.view import Frame, StateView
    from minipaged.llm import LoadedModel

    class Canvas(Film):
        def show(self, frame: Frame) -> None:
            frame.ansi(ColorSystem.EIGHT_BIT)

    stage = Stage(LoadedModel.load("smollm2-135m-instruct", dtype="float32"))
    player = Player(Canvas(120, 40), StateView(stage.tokenizer.decode), speed=1.0)
    results, drawn, computed = [], 0.0, 0.0
    for scene in SCENES:
        scene.play(stage.played_by(player))
        share = 100 * (player.drawing_seconds - drawn) / (player.engine_seconds - computed)
        drawn, computed = player.drawing_seconds, player.engine_seconds
        results.append(Result(f"drawing, {scene.name}", share, "% of engine"))
    share = 100 * drawn / computed
    target = f"<= {DRAWING_PERCENT:.0f}"
    return [*results, Result("drawing, all scenes", share, "% of engine", target=target, met=share <= DRAWING_PERCENT)]


def grading() -> list[Result]:
    """How long the reference's own file is graded (without SmolLM2), and its performance index."""
    from minipaged.course.grader.assignment import Submission, find_assignment
    from minipaged.course.grader.grading import grade

    results = []
    for name, (file, part) in REFERENCES.items():
        start = time.perf_counter()
        graded = grade(find_assignment(name), Submission(ROOT / "minipaged" / file, part), model=None)
        seconds = time.perf_counter() - start
        target = f"<= {GRADING_SECONDS:.0f}"
        results.append(Result(f"grading, {name}", seconds, "s", target=target, met=seconds <= GRADING_SECONDS))
        assert graded.performance is not None
        index = graded.performance.index
        met = INDEX[0] <= index <= INDEX[1]
        results.append(Result(f"index, {name}", index, "", target=f"{INDEX[0]} to {INDEX[1]}", met=met))
    return results


def tutorials() -> list[Result]:
    """Each as a script."""
    results = []
    for script in sorted((ROOT / "tutorials").glob("*.py")):
        start = time.perf_counter()
        subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, check=True)
        seconds = time.perf_counter() - start
        target = f"<= {TUTORIAL_SECONDS:.0f}"
        results.append(Result(script.stem, seconds, "s", target=target, met=seconds <= TUTORIAL_SECONDS))
    return results


if __name__ == "__main__":
    main()
