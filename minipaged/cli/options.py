"""Settings and parameters as options of the command line: a command that `takes` them has an option for each field.

The field (in `params.py` or `settings.py`) defines an option's type, bounds and default, and the docstring below the
field is its help. This file holds only how the command line writes a field, where that differs from Python.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from minipaged.errors import InvalidRequest
from minipaged.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from minipaged.replicas.settings import ReplicaSettings
from minipaged.serve.settings import ServeSettings
from minipaged.setup.own_parts import FROM_TEXT
from minipaged.setup.settings import Function, Settings, with_parameters

PANELS = {
    SamplingParams: "How tokens are chosen",
    BeamSearchParams: "Beam search",
    Settings: "The engine",
    ServeSettings: "The server",
    ReplicaSettings: "Several replicas, on Ray",
}


@dataclass(frozen=True)
class OptionSpelling:
    """The option of one field, where it differs from the field."""

    as_option: str | None = None
    """The option's name, if it differs from the field's. For a switch that can also be turned off: "--on/--off"."""
    kind: Any = None
    """The option's type, if typer does not support the field's type."""
    read: Callable[[Any], Any] | None = None
    """A function that converts the option's value to the field's."""
    metavar: str | None = None
    note: str = ""
    """A sentence that follows the field's docstring in the help."""


def _read_early_stopping(value: str) -> Any:
    """Convert "true" and "false" to bools, and keep any other text, which BeamSearchParams checks."""
    return {"true": True, "false": False}.get(value.lower(), value)


def _read_logit_bias(text: str | None) -> Any:
    """Parse a JSON object, and convert its keys, which are strings in JSON, to token ids."""
    try:
        return {int(token): bias for token, bias in json.loads(text).items()} if text else ()
    except (ValueError, AttributeError):
        raise InvalidRequest(f'--logit-bias is {text!r}; write it as a JSON object, e.g. {{"42": -100}}') from None


def _read_file(name: str | None) -> str | None:
    """Return the text of a file."""
    try:
        return None if name is None else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--chat-template is {name!r}, which cannot be read: {error}; give a Jinja file") from None


def _read_structured_outputs(text: str | None) -> Any:
    """Parse a JSON object with fields of StructuredOutputsParams."""
    try:
        return StructuredOutputsParams(**json.loads(text)) if text else None
    except (json.JSONDecodeError, TypeError):
        raise InvalidRequest(
            f"--structured-outputs is {text!r}; write it as a JSON object, e.g. "
            '{"choice": ["yes", "no"]} or {"json": {"type": "object"}}'
        ) from None


def _read_speculative_config(text: str | None) -> Any:
    """Parse a JSON object."""
    try:
        return None if text is None else json.loads(text)
    except json.JSONDecodeError:
        raise InvalidRequest(
            f"--speculative-config is {text!r}; write it as a JSON object, e.g. "
            '{"method": "ngram", "num_speculative_tokens": 4}'
        ) from None


WRITTEN = {
    "stop": OptionSpelling(kind=list[str] | None, note="May be repeated."),
    "stop_token_ids": OptionSpelling("--stop-token-id", kind=list[int] | None, note="May be repeated."),
    "logprobs": OptionSpelling(note="(With --json.)"),
    "logprob_token_ids": OptionSpelling(
        "--logprob-token-id", kind=list[int] | None, note="May be repeated. (With --json.)"
    ),
    "prompt_logprobs": OptionSpelling(note="(With --json.)"),
    "logit_bias": OptionSpelling(kind=str | None, read=_read_logit_bias, metavar="JSON", note='As in {"42": -100}.'),
    "structured_outputs": OptionSpelling(
        kind=str | None, read=_read_structured_outputs, metavar="JSON", note='As in {"choice": ["yes", "no"]}.'
    ),
    "speculative_config": OptionSpelling(
        kind=str | None,
        read=_read_speculative_config,
        metavar="JSON",
        note='As in {"method": "ngram", "num_speculative_tokens": 4}.',
    ),
    "allowed_token_ids": OptionSpelling(
        "--allowed-token-id", kind=list[int] | None, read=lambda tokens: tokens or None, note="May be repeated."
    ),
    "bad_words": OptionSpelling("--bad-word", kind=list[str] | None, note="May be repeated."),
    "spaces_between_special_tokens": OptionSpelling("--special-token-spaces/--no-special-token-spaces"),
    "include_stop_str_in_output": OptionSpelling("--include-stop-str-in-output"),
    "beam_width": OptionSpelling(note="0 samples instead."),
    "ignore_eos": OptionSpelling("--ignore-eos"),
    "early_stopping": OptionSpelling(kind=str, read=_read_early_stopping),
    "preemption": OptionSpelling(kind=str),
    "kv_cache_dtype": OptionSpelling(kind=str),
    "served_model_name": OptionSpelling(
        kind=list[str] | None, read=lambda given: tuple(given or ()), note="May be repeated."
    ),
    "cors_origin": OptionSpelling(
        kind=list[str] | None, read=lambda given: tuple(given or ()), note="May be repeated."
    ),
    "chat_template": OptionSpelling(kind=str | None, read=_read_file, metavar="FILE"),
    "tool_call_parser": OptionSpelling(kind=str),
    "trust_request_chat_template": OptionSpelling("--trust-request-chat-template"),
    "log_level": OptionSpelling(kind=str),
    "structured_output_backend": OptionSpelling(kind=str),
    "enable_prefix_caching": OptionSpelling("--prefix-caching/--no-prefix-caching"),
    "kv_cache_tiers": OptionSpelling(
        "--kv-cache-tier", kind=list[str] | None, read=lambda given: tuple(given or ()), note="May be repeated."
    ),
    "debug": OptionSpelling("--debug"),
    "allocator": OptionSpelling(
        kind=str | None,
        metavar="FILE.py:Class",
        read=FROM_TEXT["allocator"],
    ),
    "scheduling_policy": OptionSpelling(
        kind=str,
        metavar="NAME or FILE.py:Class",
        read=FROM_TEXT["scheduling_policy"],
    ),
    "kv_connector": OptionSpelling(
        kind=str | None,
        metavar="FOLDER",
        read=FROM_TEXT["kv_connector"],
        note="The option takes the folder of a SharedStorageConnector; on Linux /dev/shm is the best place for it.",
    ),
}


def takes(*kinds: type, only: Collection[str] = (), **defaults: Any) -> Callable[[Function], Function]:
    """Return a decorator that gives a command an option for each field of these dataclasses (or only the fields in
    `only`), in place of its last parameter, `**given`. `defaults` replaces the fields' defaults. If several fields have
    the same name, the first one counts."""
    options: dict[str, inspect.Parameter] = {}
    for kind in kinds:
        for name in names_of(kind):
            if name not in options and (name in only or not only):
                options[name] = _option(kind, name, defaults)
    assert {*only, *defaults} <= options.keys()
    return lambda command: with_parameters(command, inspect.signature(command, eval_str=True), options.values())


def given_for(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values of the fields of `kind`, converted to the fields' types. Raises InvalidRequest for a
    value that cannot be converted, such as a class that its file does not have."""
    read = {name: WRITTEN[name].read if name in WRITTEN else None for name in names_of(kind) if name in given}
    return {name: how(given[name]) if how else given[name] for name, how in read.items()}


def names_of(kind: Any) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [each.name for each in fields(kind)]


def _option(kind: Any, name: str, defaults: Mapping[str, Any]) -> inspect.Parameter:
    [declared] = [each.default for each in fields(kind) if each.name == name]
    default = defaults.get(name, None if declared == () else declared)
    written = WRITTEN.get(name, OptionSpelling())
    names = [written.as_option] if written.as_option else []
    text = f"{help_of(kind)[name]} {written.note}".strip()
    option = typer.Option(*names, help=text, metavar=written.metavar, rich_help_panel=PANELS[kind])
    annotation: Any = Annotated[written.kind or get_type_hints(kind)[name], option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def help_of(kind: type) -> dict[str, str]:
    """Return the docstring of each field, own or inherited."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        [source] = [node for node in _source_of(base.__module__) if node.name == base.__name__]
        for node, text in pairwise(source.body):
            if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(node.target)] = " ".join(str(text.value.value).split())
    return texts


@cache
def _source_of(module: str) -> list[ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


class Command(TyperCommand):
    """A command whose help is plain lists, because typer's tables cut option names in a narrow terminal."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(TyperCommand, self).format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one list for each panel."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            if record := each.get_help_record(ctx):
                kind = "Arguments" if each.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(each, "rich_help_panel", None) or kind, []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)
