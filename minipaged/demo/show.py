"""The show: scenes or a recorded run, played live on a terminal, told in lines anywhere else.

A terminal that can be drawn on gets the live view; a pipe, a file, or TERM=dumb gets lines. `--record` without a
terminal plays the same film for nobody and writes it to a file.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.color import ColorSystem
from rich.console import Console

from minipaged.contracts import BlockAllocator
from minipaged.demo import report
from minipaged.demo.player import Film, NextScene, Player, Quit, Screen
from minipaged.demo.recording import Screencast
from minipaged.demo.scenes import DISAGGREGATED, SCENES, TENSOR_PARALLEL, YOURS, Scene, SceneResult
from minipaged.demo.stage import Stage
from minipaged.demo.terminal import Terminal, color_system, is_live
from minipaged.demo.ticker import LEFT_OUT, printable, story
from minipaged.demo.view import BASIC_COLORS, COLORS, Caption, StateView
from minipaged.engine.detokenizer import Decode
from minipaged.errors import InvalidRequest
from minipaged.params import KVCacheDtype
from minipaged.replay.recorded import read_run

FILM_SIZE = (100, 30)
"""Columns and lines of a recording without a terminal, unless COLUMNS and LINES say otherwise."""


def run_demo(
    *,
    scene: str | None = None,
    prompts: Sequence[str] = (),
    model: str | Path = "smollm2-135m-instruct",
    tier: str = "auto",
    block_size: int | None = None,
    num_blocks: int | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    tensor_parallel_size: int = 1,
    allocator: Callable[[int], BlockAllocator] | None = None,
    seed: int = 0,
    steps: int | None = None,
    speed: float = 1.0,
    color: bool = True,
    record: Path | None = None,
    json_output: bool = False,
) -> list[SceneResult]:
    """Play one scene, several (their names with commas between), or all; returns what happened as data.

    `block_size` and `num_blocks` replace every scene's own; `steps` cuts every run short. `speed`: 2 plays twice as
    fast. `record`: write what is drawn to this file. `json_output`: print one JSON document and nothing else. Raises
    InvalidRequest for an unknown scene and for sizes that a scene does not fit, ModelError for the model.
    """
    chosen = _choose(scene, prompts)
    _check(speed, steps)
    from minipaged.setup.loaded_model import LoadedModel

    console = make_console(color=color)
    show = _Lines(console, silent=json_output or _draws(console))
    recording = Screencast(record) if record else None
    started = time.perf_counter()
    # The demo shows that preemption changes no text. In bfloat16, rounding would.
    if _draws(console) and not json_output:
        print(f"loading {model} ...", flush=True)
    loaded = LoadedModel.load(model, tier, dtype="float32", tensor_parallel_size=tensor_parallel_size)
    stage = Stage(
        loaded,
        seed,
        block_size,
        num_blocks,
        allocator,
        steps,
        tuple(prompts),
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
    )
    show(*report.opening(stage))
    outcomes: dict[str, SceneResult] = {}
    with player(console, stage.tokenizer.decode, speed, recording, live=not json_output, before=stage.warm_up) as one:
        stage = stage.played_by(one)
        for number, each in enumerate(chosen, start=1):
            show(*report.heading(number, len(chosen), each))
            if one:
                one.caption = Caption(f"{number}/{len(chosen)} {each.title}", each.watch)
            try:
                outcomes[each.name] = each.play(stage)
                if one:
                    one.close((*outcomes[each.name].tree, *outcomes[each.name].findings))
            except NextScene:
                continue
            except Quit:
                break
            show(*report.outcome_lines(outcomes[each.name]))
    show(report.closing(len(outcomes), time.perf_counter() - started))
    played = [(each, outcomes[each.name]) for each in chosen if each.name in outcomes]
    if json_output:
        print(report.document(stage, played))
    elif show.silent:
        print(*report.summary(played), sep="\n")
    return list(outcomes.values())


def replay(
    path: Path,
    *,
    decode: Decode | None = None,
    speed: float = 1.0,
    color: bool = True,
    record: Path | None = None,
) -> None:
    """Play a run that was written to a file of events. Without `decode`, token ids take the place of words.

    Raises InvalidRequest for a file that is no such run.
    """
    _check(speed, None)
    timeline = read_run(path)
    console = make_console(color=color)
    recording = Screencast(record) if record else None
    lines = report.run_lines(timeline.state)
    timeline.seek(0)
    with player(console, decode, speed, recording) as one:
        if one:
            one.caption = Caption(f"replay of {path.name}")
            try:
                one.play(timeline, lambda: False)
                one.close(tuple(lines))
            except (NextScene, Quit):
                pass
    if not _draws(console):
        print(*map(printable, story(timeline.events, dict.fromkeys(LEFT_OUT, sys.maxsize))), sep="\n")
    print(*map(printable, lines), sep="\n")


# --- The parts of a show --------------------------------------------------------------------------


def make_console(*, color: bool) -> Console:
    """What rich found out about the output: NO_COLOR, FORCE_COLOR, TERM and the encoding are its business."""
    return Console(no_color=None if color else True, highlight=False)


@contextmanager
def player(
    console: Console,
    decode: Decode | None,
    speed: float,
    recording: Screencast | None,
    *,
    live: bool = True,
    before: Callable[[], None] = lambda: None,
) -> Iterator[Player | None]:
    """A player on the terminal, or for the recording alone; None where there is neither. `before`: what to do before
    the terminal is drawn on. Afterwards the terminal is as it was, and the recording is written."""
    unicode = console.encoding.startswith("utf")
    live = live and _draws(console)
    few = live and color_system(console) is ColorSystem.STANDARD
    colors = () if console.no_color else BASIC_COLORS if few else COLORS
    view = StateView(decode, colors, unicode=unicode or not live)
    with ExitStack() as stack:
        if recording:
            stack.callback(recording.save)
        if live:
            before()
            screen: Screen = stack.enter_context(Terminal(console))
        elif recording:
            screen = Film(*shutil.get_terminal_size(FILM_SIZE))
        else:
            yield None
            return
        yield Player(screen, view, speed=speed, recording=recording, keys=live)


def _draws(console: Console) -> bool:
    return is_live(sys.stdout, console)


def _choose(names: str | None, prompts: Sequence[str]) -> list[Scene]:
    if names is None:
        return [YOURS] if prompts else list(SCENES)
    known = {one.name: one for one in (*SCENES, TENSOR_PARALLEL, DISAGGREGATED, YOURS)}
    for name in names.split(","):
        if name not in known:
            raise InvalidRequest(f"there is no scene {name!r}; choose of {', '.join(known)}, or trace alone")
    chosen = [known[name] for name in names.split(",")]
    if prompts and YOURS not in chosen:
        raise InvalidRequest("prompts are for --scene yours alone")
    return chosen


def _check(speed: float, steps: int | None) -> None:
    if math.isnan(speed) or speed <= 0:
        raise InvalidRequest(f"speed is {speed}; it must be above 0 (2 is twice as fast, inf as fast as can be)")
    if steps is not None and steps < 1:
        raise InvalidRequest(f"steps is {steps}; it must be at least 1")


class _Lines:
    """Prints lines, unless something else is on the screen. Headings and findings stand out where there are colours."""

    def __init__(self, console: Console, *, silent: bool) -> None:
        self.silent = silent
        self._console = console

    def __call__(self, *lines: str) -> None:
        for line in () if self.silent else lines:
            style = "bold" if line.startswith(("===", report.INDENT + "=>")) else None
            self._console.print(line, style=style, markup=False, emoji=False, soft_wrap=True)
        self._console.file.flush()
