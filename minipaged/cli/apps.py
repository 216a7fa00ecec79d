"""The Typer apps that the commands register with, and helpers that several commands use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from minipaged.errors import InvalidRequest, ModelError

app = typer.Typer(
    name="minipaged",
    help="PagedAttention and the serving system around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="List and fetch the models that minipaged knows by name.", no_args_is_help=True)
app.add_typer(model_app, name="model")
course_app = typer.Typer(help="List and start assignments, and package their graders.", no_args_is_help=True)
app.add_typer(course_app, name="course")
paper_app = typer.Typer(help="Reproduce the figures of the PagedAttention paper.", no_args_is_help=True)
app.add_typer(paper_app, name="paper")

ModelOption = Annotated[str, typer.Option(help="A known name, a folder, a .gguf file, or a hub id.")]


def refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise InvalidRequest if one of these options was given. An option without effect would mislead."""
    given = {parameter.name: parameter for parameter in context.command.params if parameter.name in names}
    for name in names:
        if is_given(context, name):
            raise InvalidRequest(f"{given[name].opts[0].lstrip() if given[name].opts else name} {why}")


def is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def check_tokenizer(model: str) -> None:
    """Raise ModelError if the model's folder has no tokenizer, before its weights are loaded. Texts need one."""
    from minipaged.models import hub

    if Path(model).expanduser().is_dir() and not ((folder := hub.resolve(model)) / "tokenizer.json").is_file():
        raise ModelError(f"{folder} holds no tokenizer.json; put the tokenizer there, or give token ids (from Python)")


def decoder_of(model: str) -> Callable[[Sequence[int]], str]:
    """Return a function that turns token ids of this model into text. It loads the tokenizer, not the weights."""
    from minipaged.models import hub
    from minipaged.models.tokenizer import Tokenizer

    folder = hub.resolve(model)
    if not (folder / "tokenizer.json").is_file():
        raise InvalidRequest(f"--model: {folder} holds no tokenizer.json, which is needed to show tokens as text")
    return Tokenizer(folder).decode
