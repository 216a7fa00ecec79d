"""The command line: `minipaged demo | generate | serve | quantize | page | chat | model | grade | …`.

Each command fills in the same objects that the API takes (LLM, SamplingParams, BeamSearchParams), has their fields for
options (`options.py`), and leaves checking to them: an error is one line on stderr and exit status 1 (2 for a wrong
usage). Heavy imports wait until they are needed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from minipaged.cli.options import Command, given_for, names_of, takes
from minipaged.errors import InvalidRequest, MinipagedError, ModelError
from minipaged.events import Event
from minipaged.outputs import RequestOutput
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.replicas.settings import ReplicaSettings
from minipaged.serve.settings import ServeSettings
from minipaged.setup.own_parts import place_in_users_file
from minipaged.setup.settings import Settings

if TYPE_CHECKING:
    from minipaged.llm import LLM

app = typer.Typer(
    name="minipaged",
    help="PagedAttention and the serving system around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="The models that minipaged knows by name.", no_args_is_help=True)
app.add_typer(model_app, name="model")
course_app = typer.Typer(help="The assignments: their files, and graders.", no_args_is_help=True)
app.add_typer(course_app, name="course")
paper_app = typer.Typer(help="The figures of the PagedAttention paper, made again.", no_args_is_help=True)
app.add_typer(paper_app, name="paper")

ModelOption = Annotated[str, typer.Option(help="A known name, a folder, a .gguf file, or a hub id.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits the process."""
    try:
        app(args=None if arguments is None else list(arguments))
    except MinipagedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has gone, as `head` does
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        where = place_in_users_file(error)
        if where is None:
            raise
        print(f"error: the {where[0]} raised {type(error).__name__}: {error} ({where[1]})", file=sys.stderr)
        sys.exit(1)


SAMPLING_OPTIONS = [name for name in names_of(SamplingParams) if name not in {*names_of(BeamSearchParams), "seed"}]
BEAM_OPTIONS = [name for name in names_of(BeamSearchParams) if name not in {*names_of(SamplingParams), "beam_width"}]

# --- generate -------------------------------------------------------------------------------------


@app.command(cls=Command)
@takes(SamplingParams, BeamSearchParams, Settings, beam_width=0, max_tokens=64, seed=0)
def generate(
    context: typer.Context,
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.", show_default=False)],
    model: ModelOption = "smollm2-135m-instruct",
    chat: Annotated[bool, typer.Option("--chat", help="Take each prompt as a user's message to a chat model.")] = False,
    priority: Annotated[
        list[int] | None,
        typer.Option(help="With --scheduling-policy: the smaller, the earlier (one for each prompt: may be repeated)."),
    ] = None,
    events: Annotated[Path | None, typer.Option(help="Write what happened to this file, as JSON Lines.")] = None,
    record_steps: Annotated[
        Path | None, typer.Option(help="Write each step and the tokens chosen to this file, for replay-steps.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print the engine's counts to stderr at the end.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the outputs as JSON.")] = False,
    **given: Any,
) -> None:
    """Continue each prompt and print the text; a single sample is printed as it is generated."""
    params: SamplingParams | BeamSearchParams
    if given["beam_width"]:
        _refuse_given(context, SAMPLING_OPTIONS, "has no meaning with --beam-width, which does not sample")
        params = BeamSearchParams(**given_for(BeamSearchParams, given))
    else:
        _refuse_given(context, BEAM_OPTIONS, "has no meaning without --beam-width")
        params = SamplingParams(**given_for(SamplingParams, given))
    settings = given_for(Settings, given)
    from minipaged.llm import LLM

    with ExitStack() as stack:
        listeners: list[Callable[[Event], None]] = []
        if events:
            file = stack.enter_context(_open_for_writing(events))
            listeners.append(lambda event: print(event.to_json(), file=file))
        _check_tokenizer(model)
        llm = LLM(model, listeners=listeners, **settings)
        if record_steps:
            stack.enter_context(_recording(llm, model, record_steps))
        streaming = (
            len(prompts) == 1
            and isinstance(params, SamplingParams)
            and params.n == 1
            and not priority
            and not json_output
        )
        try:
            outputs = (
                _stream(llm, prompts[0], params, chat=chat)
                if streaming
                else _run(llm, prompts, params, chat=chat, priority=priority or None)
            )
        except KeyboardInterrupt:
            print("\ninterrupted; every block has been given back", file=sys.stderr)
            raise typer.Exit(130) from None
    if json_output:
        print(json.dumps([asdict(output) for output in outputs], indent=2))
    elif not streaming:
        _print_outputs(outputs)
    print(f"[{llm.description}]", file=sys.stderr)
    if stats:
        print(json.dumps(asdict(llm.stats()), indent=2), file=sys.stderr)
    failed = [(place, output.error) for place, output in enumerate(outputs) if output.error]
    for place, error in failed:
        print(f"error: {f'prompt {place}: ' if len(outputs) > 1 else ''}{error}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _run(
    llm: LLM,
    prompts: list[str],
    params: SamplingParams | BeamSearchParams,
    *,
    chat: bool,
    priority: Sequence[int] | None,
) -> list[RequestOutput]:
    if isinstance(params, BeamSearchParams):
        chats = [llm.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts] if chat else prompts
        return llm.beam_search(chats, params, priority=priority)
    if chat:
        return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params, priority=priority)
    return llm.generate(prompts, params, priority=priority)


def _stream(llm: LLM, prompt: str, params: SamplingParams | BeamSearchParams, *, chat: bool) -> list[RequestOutput]:
    """Print the text of the only sequence as it grows."""
    tokens = llm.encode_chat([{"role": "user", "content": prompt}]) if chat else prompt
    outputs: list[RequestOutput] = []
    for update in llm.stream(tokens, params):
        for new in update.completions:
            print(new.new_text, end="", flush=True)
        if update.output:
            outputs.append(update.output)
    print()
    return outputs


def _refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise InvalidRequest if one of these options was given: an option that does nothing misleads."""
    given = {parameter.name: parameter for parameter in context.command.params if parameter.name in names}
    for name in names:
        if _is_given(context, name):
            raise InvalidRequest(f"{given[name].opts[0].lstrip() if given[name].opts else name} {why}")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _print_outputs(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for completion in output.outputs:
            if len(outputs) > 1 or len(output.outputs) > 1:
                score = "" if completion.score is None else f"  score {completion.score:.3f}"
                print(f"--- prompt {outputs.index(output)}, output {completion.index}{score}")
            print(completion.text)


@app.command(name="replay-steps", cls=Command)
@takes(Settings, only=("tier", "device"))
def replay_steps(
    recording: Annotated[Path, typer.Argument(help="What `generate --record-steps` wrote.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Where the model is here; else as when it was recorded.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What to compute in; else as when it was recorded.")] = None,
    **given: Any,
) -> None:
    """Run recorded steps again, here, and compare each token chosen; what differs has to be a tie."""
    from minipaged.llm import LoadedModel
    from minipaged.recordings.replay_steps import open_replay
    from minipaged.recordings.step_files import read_recording

    header, steps = read_recording(recording)
    loaded = LoadedModel.load(model or header.model, dtype=dtype or header.dtype, **given)
    replay = open_replay(header, steps, loaded)
    for difference in replay:
        print(difference)
    print(f"recorded on the {header.tier} tier in {header.dtype}, run on the {loaded.tier.description}")
    counts = f"{replay.num_steps} steps, {replay.num_choices} tokens: {replay.num_failures} differ"
    print(f"{counts}, and {replay.num_ties} at ties; other logprobs differ by {replay.largest_error:.2g} at most")
    if replay.num_failures:
        raise typer.Exit(1)


@contextmanager
def _recording(llm: LLM, model: str, path: Path) -> Iterator[None]:
    """Record all steps of the LLM, from its first one on; complete however it ends."""
    from minipaged.recordings.step_files import Header, StepRecorder

    with _open_for_writing(path, "wb") as file:
        recorder = StepRecorder(llm.engine.runner, file, Header.of(model, llm))
        llm.engine.runner = recorder
        try:
            yield
        finally:
            recorder.close()


def _open_for_writing(path: Path, mode: str = "w") -> Any:
    try:
        return path.open(mode, encoding=None if "b" in mode else "utf-8")
    except OSError as error:
        what = "steps" if "b" in mode else "events"
        raise InvalidRequest(f"cannot write {what} to {path}: {error.strerror}") from None


# --- chat -----------------------------------------------------------------------------------------


CHAT_OPTIONS = (
    *("temperature", "top_p", "max_tokens", "seed", "tier", "device", "dtype"),
    *("block_size", "num_blocks", "kv_cache_dtype", "kv_connector"),
    *("tensor_parallel_size", "pipeline_parallel_size", "worker_timeout"),
)


@app.command(cls=Command)
@takes(SamplingParams, Settings, only=CHAT_OPTIONS, temperature=0.2, top_p=0.9, max_tokens=512, seed=0)
def chat(
    model: ModelOption = "smollm2-135m-instruct",
    system: Annotated[str | None, typer.Option(help="What the model is told before the first question.")] = None,
    **given: Any,
) -> None:
    """Talk to a chat model, a line a question; below each answer the KV blocks, and what was found in the cache."""
    params = SamplingParams(**given_for(SamplingParams, given))
    from minipaged.cli.chat import run_chat
    from minipaged.llm import LLM

    _check_tokenizer(model)
    # One sequence, so that the pool is no larger than the longest conversation.
    llm = LLM(model, num_swap_blocks=0, max_num_seqs=1, **given_for(Settings, given))
    raise typer.Exit(run_chat(llm, params, system))


# --- serve ----------------------------------------------------------------------------------------


@app.command(cls=Command)
@takes(ServeSettings, ReplicaSettings, Settings)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A known name, a folder, a .gguf file, or a hub id.")] = (
        "smollm2-135m-instruct"
    ),
    **given: Any,
) -> None:
    """Serve a model over HTTP, as OpenAI does: POST /v1/chat/completions, and more; GET / shows the blocks."""
    settings = ServeSettings(**given_for(ServeSettings, given))
    if given["replicas"] is None:
        of_replicas = [name for name in names_of(ReplicaSettings) if name != "replicas"]
        _refuse_given(context, of_replicas, "is given, but there are no replicas; say how many with --replicas")
    replicas = ReplicaSettings(**given_for(ReplicaSettings, given))
    of_engine = given_for(Settings, given)
    try:
        if replicas.replicas is None:
            from minipaged.serve.server import serve as serve_one

            run_server = partial(serve_one, model, settings, **of_engine)
        else:
            from minipaged.replicas.server import serve_replicas

            run_server = partial(serve_replicas, model, settings, replicas, **of_engine)
    except ModuleNotFoundError as error:
        extra, what = ("fast,serve", "serving") if replicas.replicas is None else ("fast,ray", "serving by replicas")
        raise MinipagedError(
            f"{what} needs {error.name}, which is not installed: pip install -c constraints.txt -e '.[{extra}]'"
        ) from None
    try:
        status = run_server()
    except MinipagedError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Exit at once. Python would first take apart all that is loaded, which with torch and numba takes it seconds, and
    wait for threads that have no work to lose."""
    with suppress(OSError):  # nobody reads
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


# --- quantize, perplexity ---------------------------------------------------------------------------


@app.command(cls=Command)
def quantize(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A known name, a folder, or a hub id.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.", show_default=False)],
    method: Annotated[str, typer.Option(help="rtn (round to nearest), gptq or awq.")] = "gptq",
    bits: Annotated[int, typer.Option(help="Of a weight: 2, 3, 4 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale; -1: all of a row.")] = 64,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="Let the middle code mean 0, as some kernels want it.")
    ] = False,
    act_order: Annotated[
        str, typer.Option(help="GPTQ, which inputs come first: none, static (the largest) or group (those grouped).")
    ] = "static",
    form: Annotated[str, typer.Option("--format", help="compressed-tensors or gptq.")] = "compressed-tensors",
    calibration: Annotated[
        Path | None, typer.Option(help="A text to calibrate with; else Python's documentation.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="How many tokens of it to use.")] = 16384,
) -> None:
    """Write a model with weights of a few bits, which transformers and vLLM load too."""
    from minipaged.models.quantized.recipe import Recipe
    from minipaged.quantizing.checkpoint import quantize as make

    if method != "gptq":
        _refuse_given(context, ("act_order",), "has a meaning only with --method gptq")
    if method == "rtn":
        _refuse_given(context, ("calibration", "calibration_tokens"), "has no meaning with --method rtn")
    made = make(
        model,
        output,
        Recipe(method, bits, group_size, symmetric, act_order),  # type: ignore[arg-type]  # it refuses what is not known
        layout=form,  # type: ignore[arg-type]  # the same
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        show_progress=sys.stderr.isatty(),
    )
    megabytes = f"{made.num_bytes / 1e6:,.1f} MB of weights, {made.num_bytes_before / 1e6:,.1f} before"
    calibrated = f", calibrated on {made.calibration_tokens:,} tokens" if made.calibration_tokens else ""
    print(f"{output}: {made.matrices} matrices quantized{calibrated}; {megabytes}")
    if made.calibration_tokens < calibration_tokens // 2 and calibrated:
        few = f"the text has {made.calibration_tokens:,} tokens of the {calibration_tokens:,} to calibrate on"
        print(f"warning: {few}; a longer one makes a better model", file=sys.stderr)


@app.command(cls=Command)
@takes(Settings, only=("tier", "device", "dtype", "kv_cache_dtype"))
def perplexity(
    model: Annotated[
        str, typer.Argument(help="A known name, a folder, a .gguf file, or a hub id.", show_default=False)
    ],
    text: Annotated[Path | None, typer.Argument(help="A file; else Python's documentation.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the text to use, from its beginning.")] = 16384,
    window: Annotated[
        int | None,
        typer.Option(help="The text is cut into pieces of so many tokens; else 2048, or the model's context."),
    ] = None,
    **given: Any,
) -> None:
    """How well a model knows a text: the smaller, the better. Compares quantized models with their original."""
    from minipaged.llm import LLM
    from minipaged.quantizing.perplexity import perplexity as measure
    from minipaged.quantizing.texts import text_of, tokens_of

    words = text_of(text, for_calibration=False)
    _check_tokenizer(model)
    llm = LLM(model, num_swap_blocks=0, **given_for(Settings, given))
    found = measure(llm, tokens_of(words, llm.folder)[:tokens], window)
    print(f"{found.value:.3f}  ({found.num_tokens:,} tokens)")
    print(f"[{llm.description}]", file=sys.stderr)


# --- doctor ---------------------------------------------------------------------------------------


@app.command(cls=Command)
def doctor() -> None:
    """What there is here to compute with, what would be chosen, and why."""
    from minipaged.tiers.doctor import report

    for name, text in report():
        typer.echo(f"{name:15} {text}")


# --- demo -----------------------------------------------------------------------------------------

TRACE_OPTIONS = ("trace", "requests", "pace")
"""Options of the trace's scene alone."""


@app.command(cls=Command)
@takes(Settings, only=("tier", "allocator", "kv_cache_dtype", "tensor_parallel_size"))
def demo(
    context: typer.Context,
    prompts: Annotated[list[str] | None, typer.Argument(help="Your own, for --scene yours.")] = None,
    scene: Annotated[
        str | None, typer.Option(help="Only this scene (or several: a,b); yours: your prompts; trace: --trace.")
    ] = None,
    replay: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Show a run from its events.")] = None,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Record it as FILE.svg or FILE.cast.")] = None,
    speed: Annotated[float, typer.Option(help="2 is twice as fast, inf as fast as can be.")] = 1.0,
    steps: Annotated[int | None, typer.Option(help="Cut every run short after so many steps.")] = None,
    model: ModelOption = "smollm2-135m-instruct",
    block_size: Annotated[int | None, typer.Option(help="Tokens a block, in every scene.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks in the pool, in every scene.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same texts.")] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours, as with NO_COLOR.")] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print what was measured, and all events, as JSON.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="For --scene trace: CSV of times and token counts.")] = None,
    requests: Annotated[int, typer.Option(help="For --scene trace: how many to serve of them.")] = 2000,
    pace: Annotated[float, typer.Option(help="For --scene trace: 0.5 lets them come half as fast.")] = 1.0,
    **given: Any,
) -> None:
    """Watch paging, sharing, copy-on-write, beam search, prefix caching and preemption on a real model.

    In a terminal, live: space pauses, the arrows step back and on, s is the next scene, q quits. Elsewhere, in lines.
    """
    playback: dict[str, Any] = {"speed": speed, "color": not no_color, "record": record}
    of_scenes: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks, "json_output": json_output}
    try:
        if scene != "trace":
            _refuse_given(context, TRACE_OPTIONS, "has a meaning only with --scene trace")
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
"""Options of an engine and its scenes: a replay has neither."""


def _replay_run(context: typer.Context, events: Path, model: str, **playback: Any) -> None:
    """Show a recorded run, with the words of the model if one is named. `playback`: options of `demo.replay`."""
    import minipaged.demo as show

    _refuse_given(context, NOT_WITH_REPLAY, "does not go with --replay, which runs no engine")
    decode = _decoder(model) if _is_given(context, "model") else None
    show.replay(events, decode=decode, **playback)


NOT_WITH_TRACE = ("prompts", "model", "tier", "kv_cache_dtype", "tensor_parallel_size", "seed", "steps")
"""Options of a model and of runs on it: a trace has only times and lengths."""


def _play_trace(
    context: typer.Context, trace: Path | None, given: Mapping[str, Any], *, speed: float, **options: Any
) -> None:
    """Serve the requests of a trace, without a model: as fast as the engine goes, unless a speed was given. `options`:
    others of `play_trace`."""
    from minipaged.demo.trace_scene import play_trace

    _refuse_given(context, NOT_WITH_TRACE, "has no meaning with --scene trace, which runs no model")
    if trace is None:
        raise InvalidRequest("--scene trace replays a file: name it with --trace FILE")
    play_trace(
        trace,
        allocator=given_for(Settings, given)["allocator"],
        speed=speed if _is_given(context, "speed") else None,
        **options,
    )


def _run_scenes(
    scene: str | None, prompts: Sequence[str], model: str, given: Mapping[str, Any], **options: Any
) -> None:
    """Run scenes on a model. `options`: others of `demo.run_demo`."""
    import minipaged.demo as show

    _check_tokenizer(model)
    if scene == "yours" and not prompts:
        prompts = _ask_for_prompts()
    show.run_demo(scene=scene, prompts=prompts, model=model, **given_for(Settings, given), **options)


def _ask_for_prompts() -> list[str]:
    """One a line, from whoever types or from a file, up to an empty line."""
    if sys.stdin is None:
        raise InvalidRequest("--scene yours reads prompts from stdin, which is closed; give them as arguments")
    if sys.stdin.isatty():
        print("one prompt a line; an empty line starts", file=sys.stderr)
    lines = (line.strip() for line in sys.stdin)
    return list(itertools.takewhile(bool, lines))


def _check_tokenizer(model: str) -> None:
    """Raise ModelError for a folder without a tokenizer, which texts need, before the weights in it are loaded."""
    from minipaged.models import hub

    if Path(model).expanduser().is_dir() and not ((folder := hub.resolve(model)) / "tokenizer.json").is_file():
        raise ModelError(f"{folder} holds no tokenizer.json; put the tokenizer there, or give token ids (from Python)")


def _decoder(model: str) -> Callable[[Sequence[int]], str]:
    """What turns the token ids of this model into text: its tokenizer alone, without the weights."""
    from minipaged.models import hub
    from minipaged.models.tokenizer import Tokenizer

    folder = hub.resolve(model)
    if not (folder / "tokenizer.json").is_file():
        raise InvalidRequest(f"--model: {folder} holds no tokenizer.json, which the words of a run need")
    return Tokenizer(folder).decode


# --- page -----------------------------------------------------------------------------------------


@app.command(cls=Command)
def page(
    events: Annotated[Path, typer.Argument(help="What `minipaged generate --events` wrote.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.", show_default=False)],
    title: Annotated[str, typer.Option(help="What the page is called; else the name of the file of events.")] = "",
    model: Annotated[
        str | None, typer.Option(help="Show the words of this model's tokens; else their numbers are shown.")
    ] = None,
) -> None:
    """Make a page that steps through a run, to be opened in a browser or sent to somebody. It needs nothing else."""
    from minipaged.replay.recorded import read_run
    from minipaged.stepper.page import as_data, failure_of, page, words_of

    run = read_run(events).events
    words = words_of(run, _decoder(model)) if model else None
    data = as_data(title or events.name, run, words=words) | failure_of(run)
    try:
        output.write_text(page(data), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write the page to {output}: {error.strerror}") from None
    print(f"{output}: {len(data['events'])} steps")


# --- model ----------------------------------------------------------------------------------------


@model_app.command("list", cls=Command)
def model_list() -> None:
    """The known models, and whether each has been fetched."""
    from minipaged.models import hub

    for name in hub.known_models():
        folder = hub.where(name)
        print(f"{name}  {folder if folder else 'not fetched'}")


@model_app.command("fetch", cls=Command)
def model_fetch(
    name: Annotated[str, typer.Argument(help="A known model.")] = "smollm2-135m-instruct",
    again: Annotated[bool, typer.Option("--again", help="Throw away what is there and fetch it anew.")] = False,
) -> None:
    """Download a known model once, checked, into the cache; prints its folder."""
    from minipaged.models import hub

    print(hub.fetch(name, again=again))


@model_app.command("where", cls=Command)
def model_where(name: Annotated[str, typer.Argument(help="A known model.")] = "smollm2-135m-instruct") -> None:
    """Print the folder of a known model; exit status 1 if it has not been fetched."""
    from minipaged.models import hub

    folder = hub.where(name)
    if folder is None:
        print(f"{name} has not been fetched; run: minipaged model fetch {name}", file=sys.stderr)
        raise typer.Exit(1)
    print(folder)


# --- The paper ------------------------------------------------------------------------------------


@paper_app.command("list", cls=Command)
def paper_list(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where results are kept.")] = Path("paper-results"),
) -> None:
    """What there is to run, and what has been."""
    from minipaged.paper.commands import list_figures

    list_figures(output)


@paper_app.command("run", cls=Command)
def paper_run(
    figures: Annotated[list[str], typer.Argument(metavar="FIG...", help="As in: 12a 13; or all.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Short traces: seconds, and knees come out too high.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same numbers.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; else one for each core.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where results are kept.")] = Path("paper-results"),
    traces: Annotated[Path | None, typer.Option(help="A folder with the traces that some figures need.")] = None,
) -> None:
    """Make figures of the paper again; exit status 1 if one of them is off by more than was allowed."""
    from minipaged.paper.commands import run_figures

    with _drawing():
        good = run_figures(
            figures, quick=quick, seed=seed, processes=jobs or os.cpu_count() or 1, output=output, traces=traces
        )
    if not good:
        raise typer.Exit(1)


@paper_app.command("report", cls=Command)
def paper_report(
    results: Annotated[Path, typer.Option("--results", "-r", help="Where results are kept.")] = Path("paper-results"),
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("paper.html"),
) -> None:
    """All results as one HTML file, with pictures, verdicts, and where each number comes from."""
    from minipaged.paper.commands import write_report

    with _drawing():
        write_report(results, output)


@contextmanager
def _drawing() -> Iterator[None]:
    """What is done within needs matplotlib."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise InvalidRequest(
            "drawing needs matplotlib; install minipaged with its extra 'paper' "
            f"(in a clone: {sys.executable} -m pip install -c constraints.txt -e '.[paper]')"
        ) from None


# --- The course -----------------------------------------------------------------------------------

FormatOption = Annotated[
    str, typer.Option("--format", help="terminal, json, gradescope, prairielearn, or junit.", show_default=True)
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the result here, and again after every test.")
]


@app.command("grade", cls=Command)
def grade_command(
    assignment: Annotated[str, typer.Argument(help="As in: block-allocator.", show_default=False)],
    submission: Annotated[str, typer.Argument(metavar="FILE.py[:Class]", show_default=False)],
    seed: Annotated[int, typer.Option(help="The same seed gives the same score and counterexamples.")] = 0,
    form: FormatOption = "terminal",
    output: OutputOption = None,
    counterexamples: Annotated[
        Path | None, typer.Option(help="Keep the failures' scripts and traces in this folder.")
    ] = Path("counterexamples"),
    model: Annotated[str, typer.Option(help="The real model to grade on.")] = "smollm2-135m-instruct",
    no_model: Annotated[bool, typer.Option("--no-model", help="Leave out the tests on the real model.")] = False,
    carried: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="ASSIGNMENT=FILE.py", help="Use your own part of an earlier assignment."),
    ] = None,
    call_seconds: Annotated[float | None, typer.Option(help="Time limit of one call, else the assignment's.")] = None,
    test_seconds: Annotated[float | None, typer.Option(help="Time limit of one test, else the assignment's.")] = None,
) -> None:
    """Grade your own part: exit status 0 for full marks, 1 for less, 2 when it cannot be graded."""
    from minipaged.course.grader.assignment import CannotBeGraded
    from minipaged.course.grader.commands import Report, run_grade

    try:
        report = Report(form, output, counterexamples)
    except CannotBeGraded as error:
        raise _exit_2(error) from None
    raise typer.Exit(
        run_grade(
            assignment,
            submission,
            report,
            seed=seed,
            model=None if no_model else model,
            carried=carried or (),
            call_seconds=call_seconds,
            test_seconds=test_seconds,
        )
    )


@app.command("grade-tests", cls=Command)
def grade_tests_command(
    assignment: Annotated[str, typer.Argument(help="As in: block-allocator.", show_default=False)],
    tests: Annotated[str, typer.Argument(metavar="TEST_FILE.py", show_default=False)],
    form: FormatOption = "terminal",
    output: OutputOption = None,
) -> None:
    """Grade your own tests: they pass on a right part, and find the bug in each of many wrong ones."""
    from minipaged.course.grader.assignment import CannotBeGraded
    from minipaged.course.grader.commands import Report, run_grade_tests

    try:
        report = Report(form, output)
    except CannotBeGraded as error:
        raise _exit_2(error) from None
    raise typer.Exit(run_grade_tests(assignment, tests, report))


@course_app.command("list", cls=Command)
def course_list() -> None:
    """The assignments, in order."""
    from minipaged.course.grader.assignment import ASSIGNMENTS, CannotBeGraded
    from minipaged.course.grader.handouts import title_of

    try:
        titles = {assignment: title_of(assignment) for assignment in ASSIGNMENTS}
    except CannotBeGraded as error:
        raise _exit_2(error) from None
    for assignment, title in titles.items():
        print(f"{assignment:<16} {title}")


@course_app.command("start", cls=Command)
def course_start(
    assignment: Annotated[str, typer.Argument(help="As in: block-allocator.", show_default=False)],
    folder: Annotated[Path | None, typer.Argument(help="Where to write them, else a folder of its name.")] = None,
) -> None:
    """Write an assignment's handout, starter, and first test."""
    from minipaged.course.grader.assignment import CannotBeGraded
    from minipaged.course.grader.handouts import start

    try:
        written = start(assignment, folder or Path(assignment))
    except CannotBeGraded as error:
        raise _exit_2(error) from None
    print("\n".join(map(str, written)))
    print(f"Read {written[0]}; then, in its folder: minipaged grade {assignment} {written[1].name} --no-model")


@course_app.command("autograder", cls=Command)
def course_autograder(
    assignment: Annotated[str, typer.Argument(help="As in: block-allocator.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The zip to write.")] = Path("autograder.zip"),
    seed: Annotated[int, typer.Option(help="The seed that all submissions are graded with.")] = 0,
    no_model: Annotated[bool, typer.Option("--no-model", help="Leave out the tests on the real model.")] = False,
) -> None:
    """Write a zip that Gradescope takes as an autograder."""
    from minipaged.course.grader.assignment import CannotBeGraded
    from minipaged.course.grader.autograder import write_autograder

    try:
        write_autograder(assignment, output, seed=seed, with_model=not no_model)
    except CannotBeGraded as error:
        raise _exit_2(error) from None
    print(output)


def _exit_2(error: MinipagedError) -> typer.Exit:
    print(f"error: {error}", file=sys.stderr)
    return typer.Exit(2)
