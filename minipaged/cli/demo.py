"""`minipaged demo`: shows scenes on a real model, a recorded run, or the replay of a trace."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from minipaged.cli.apps import ModelOption, app, check_tokenizer, decoder_of, is_given, refuse_given
from minipaged.cli.options import Command, given_for, takes
from minipaged.errors import InvalidRequest
from minipaged.setup.settings import Settings

TRACE_OPTIONS = ("trace", "requests", "pace")
"""Options that only the trace scene uses."""


@app.command(cls=Command)
@takes(Settings, only=("tier", "allocator", "kv_cache_dtype", "tensor_parallel_size"))
def demo(
    context: typer.Context,
    prompts: Annotated[list[str] | None, typer.Argument(help="Your prompts, for --scene yours.")] = None,
    scene: Annotated[
        str | None,
        typer.Option(
            help="Show only this scene, or several: a,b. 'yours' runs your prompts, 'trace' the requests of --trace."
        ),
    ] = None,
    replay: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Show a recorded run.")] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record the demo as FILE.svg or FILE.cast.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Playback speed: 2 is twice as fast, inf as fast as possible.")] = 1.0,
    steps: Annotated[int | None, typer.Option(help="Stop every run after this number of steps.")] = None,
    model: ModelOption = "smollm2-135m-instruct",
    block_size: Annotated[int | None, typer.Option(help="Tokens per block, in every scene.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks in the pool, in every scene.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed: the same seed gives the same texts.")] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="Use no colours, as with NO_COLOR.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the measurements and all events as JSON.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="For --scene trace: a CSV file of arrival times and token counts.")
    ] = None,
    requests: Annotated[int, typer.Option(help="For --scene trace: the number of requests to serve.")] = 2000,
    pace: Annotated[
        float, typer.Option(help="For --scene trace: arrival speed; at 0.5 requests come half as fast.")
    ] = 1.0,
    **given: Any,
) -> None:
    """Watch paging, sharing, copy-on-write, beam search, prefix caching and preemption on a real model.

    In a terminal the demo is live: space pauses, the arrow keys step, s goes to the next scene, q quits. Elsewhere it
    prints lines.
    """
    playback: dict[str, Any] = {"speed": speed, "color": not no_color, "record": record}
    of_scenes: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks, "json_output": json_output}
    try:
        if scene != "trace":
            refuse_given(context, TRACE_OPTIONS, "has a meaning only with --scene trace")
        if replay is not None:
            _replay_run(context, replay, model, **playback)
        elif scene == "trace":
            _play_trace(context, trace, given, num_requests=requests, pace=pace, **of_scenes, **playback)
        else:
            _run_scenes(scene, prompts or (), model, given, seed=seed, steps=steps, **of_scenes, **playback)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


NOT_WITH_REPLAY = (
    *("prompts", "scene", "steps", "tier", "block_size", "num_blocks", "kv_cache_dtype"),
    *("tensor_parallel_size", "allocator", "seed", "json_output"),
)
"""Options that configure an engine or its scenes. A replay has neither."""


def _replay_run(context: typer.Context, events: Path, model: str, **playback: Any) -> None:
    """Show a recorded run, with its tokens as text if a model is named. `playback`: options of `demo.replay`."""
    import minipaged.demo as show

    refuse_given(context, NOT_WITH_REPLAY, "does not go with --replay, which runs no engine")
    decode = decoder_of(model) if is_given(context, "model") else None
    show.replay(events, decode=decode, **playback)


NOT_WITH_TRACE = ("prompts", "model", "tier", "kv_cache_dtype", "tensor_parallel_size", "seed", "steps")
"""Options that configure a model or runs on it. A trace has only times and lengths."""


def _play_trace(
    context: typer.Context, trace: Path | None, given: Mapping[str, Any], *, speed: float, **options: Any
) -> None:
    """Serve the requests of a trace without a model, as fast as the engine runs unless a speed was given. `options`:
    the other arguments of `play_trace`."""
    from minipaged.demo.trace_scene import play_trace

    refuse_given(context, NOT_WITH_TRACE, "has no meaning with --scene trace, which runs no model")
    if trace is None:
        raise InvalidRequest("--scene trace replays a file: name it with --trace FILE")
    play_trace(
        trace,
        allocator=given_for(Settings, given)["allocator"],
        speed=speed if is_given(context, "speed") else None,
        **options,
    )


def _run_scenes(
    scene: str | None, prompts: Sequence[str], model: str, given: Mapping[str, Any], **options: Any
) -> None:
    """Run scenes on a model. `options`: the other arguments of `demo.run_demo`."""
    import minipaged.demo as show

    check_tokenizer(model)
    if scene == "yours" and not prompts:
        prompts = _ask_for_prompts()
    show.run_demo(scene=scene, prompts=prompts, model=model, **given_for(Settings, given), **options)


def _ask_for_prompts() -> list[str]:
    """Read prompts from stdin, one per line, up to an empty line or the end."""
    if sys.stdin is None:
        raise InvalidRequest("--scene yours reads prompts from stdin, which is closed; give them as arguments")
    if sys.stdin.isatty():
        print("one prompt a line; an empty line starts", file=sys.stderr)
    lines = (line.strip() for line in sys.stdin)
    return list(itertools.takewhile(bool, lines))
