"""Show scenes or a recorded run: live on a terminal, as lines of text on other outputs.

A terminal that can be drawn on gets the live view; a pipe, a file, or TERM=dumb gets lines. `--record` without a
terminal plays the show without displaying it and writes it to a file.
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
from minipaged.demo.scenes import (
    DISAGGREGATED,
    SCENES,
    SPECULATION,
    TENSOR_PARALLEL,
    WINDOWS,
    YOURS,
    Scene,
    SceneResult,
)
from minipaged.demo.stage import Stage
from minipaged.demo.terminal import Terminal, color_system, is_live
from minipaged.demo.ticker import LEFT_OUT, printable, story
from minipaged.demo.view import BASIC_COLORS, COLORS, Caption, StateView
from minipaged.engine.detokenizer import Decode
from minipaged.errors import InvalidRequest
from minipaged.params import KVCacheDtype
from minipaged.replay.recorded import read_run

FILM_SIZE = (100, 30)
"""The columns and lines of a recording without a terminal, unless COLUMNS and LINES are set."""


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
    """Play one scene, several (names separated by commas), or all, and return their results.

    `block_size` and `num_blocks` replace every scene's own. `steps`: the most steps of a run. `speed`: 2 plays twice as
    fast. `record`: a file for a recording of the pictures. `json_output`: print only one JSON document. Raises
    InvalidRequest for an unknown scene or unsuitable sizes, and ModelError if the model cannot be loaded.
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
    """Play a run from a file of events. Without `decode` it shows token ids in place of words.

    Raises InvalidRequest if the file does not contain a run.
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
    """A console for the output. rich evaluates NO_COLOR, FORCE_COLOR, TERM and the encoding."""
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
    """A context with a player for the terminal or for a recording; None if there is neither.

    `before` is called before the terminal is drawn on. On exit, the terminal is restored and the recording is written.
    """
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
    known = {one.name: one for one in (*SCENES, TENSOR_PARALLEL, WINDOWS, DISAGGREGATED, SPECULATION, YOURS)}
    for name in names.split(","):
        if name not in known:
            raise InvalidRequest(f"there is no scene {name!r}; choose from {', '.join(known)}, or trace alone")
    chosen = [known[name] for name in names.split(",")]
    if prompts and YOURS not in chosen:
        raise InvalidRequest("prompts are only for --scene yours; leave them out for other scenes")
    return chosen


def _check(speed: float, steps: int | None) -> None:
    if math.isnan(speed) or speed <= 0:
        raise InvalidRequest(f"speed is {speed}; it must be above 0 (2 is twice as fast, inf as fast as possible)")
    if steps is not None and steps < 1:
        raise InvalidRequest(f"steps is {steps}; it must be at least 1")


class _Lines:
    """Prints lines, unless it is silent because the screen shows pictures. Headings and findings are bold."""

    def __init__(self, console: Console, *, silent: bool) -> None:
        self.silent = silent
        self._console = console

    def __call__(self, *lines: str) -> None:
        for line in () if self.silent else lines:
            style = "bold" if line.startswith(("===", report.INDENT + "=>")) else None
            self._console.print(line, style=style, markup=False, emoji=False, soft_wrap=True)
        self._console.file.flush()
