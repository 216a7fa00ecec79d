"""`minipaged generate`: continues prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minipaged.cli.apps import ModelOption, app, check_tokenizer, refuse_given
from minipaged.cli.options import Command, given_for, names_of, takes
from minipaged.errors import InvalidRequest
from minipaged.events import Event
from minipaged.outputs import RequestOutput
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.setup.settings import Settings

if TYPE_CHECKING:
    from minipaged.llm import LLM

SAMPLING_OPTIONS = [name for name in names_of(SamplingParams) if name not in {*names_of(BeamSearchParams), "seed"}]
BEAM_OPTIONS = [name for name in names_of(BeamSearchParams) if name not in {*names_of(SamplingParams), "beam_width"}]


@app.command(cls=Command)
@takes(SamplingParams, BeamSearchParams, Settings, beam_width=0, max_tokens=64, seed=0)
def generate(
    context: typer.Context,
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.", show_default=False)],
    model: ModelOption = "smollm2-135m-instruct",
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user's message to a chat model.")] = False,
    priority: Annotated[
        list[int] | None,
        typer.Option(help="Priority of a prompt, for --scheduling-policy; smaller is earlier. Repeat it per prompt."),
    ] = None,
    events: Annotated[Path | None, typer.Option(help="Write the engine's events to this file, as JSON Lines.")] = None,
    record_steps: Annotated[
        Path | None, typer.Option(help="Write each step and its chosen tokens to this file, for replay-steps.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print the engine's statistics to stderr at the end.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the outputs as JSON.")] = False,
    **given: Any,
) -> None:
    """Continue each prompt and print the text. A single sample is printed as it is generated."""
    params: SamplingParams | BeamSearchParams
    if given["beam_width"]:
        refuse_given(context, SAMPLING_OPTIONS, "has no meaning with --beam-width, which does not sample")
        params = BeamSearchParams(**given_for(BeamSearchParams, given))
    else:
        refuse_given(context, BEAM_OPTIONS, "has no meaning without --beam-width")
        params = SamplingParams(**given_for(SamplingParams, given))
    settings = given_for(Settings, given)
    from minipaged.llm import LLM

    with ExitStack() as stack:
        listeners: list[Callable[[Event], None]] = []
        if events:
            file = stack.enter_context(_open_for_writing(events))
            listeners.append(lambda event: print(event.to_json(), file=file))
        check_tokenizer(model)
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
    """Generate for one prompt, and print the text of its only sequence as it grows."""
    tokens = llm.encode_chat([{"role": "user", "content": prompt}]) if chat else prompt
    outputs: list[RequestOutput] = []
    for update in llm.stream(tokens, params):
        for new in update.completions:
            print(new.new_text, end="", flush=True)
        if update.output:
            outputs.append(update.output)
    print()
    return outputs


def _print_outputs(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for completion in output.outputs:
            if len(outputs) > 1 or len(output.outputs) > 1:
                score = "" if completion.score is None else f"  score {completion.score:.3f}"
                print(f"--- prompt {outputs.index(output)}, output {completion.index}{score}")
            print(completion.text)


@contextmanager
def _recording(llm: LLM, model: str, path: Path) -> Iterator[None]:
    """Record all steps of the LLM from its first one on. The file is complete even if the run fails."""
    from minipaged.recordings.step_files import Header, StepRecorder

    header = Header.of(model, llm)
    with _open_for_writing(path, "wb") as file:
        recorder = StepRecorder(llm.engine.runner, file, header)
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
