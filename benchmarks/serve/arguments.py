"""The command line of `python -m benchmarks.serve`, and what of it does not go together."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.serve.client import Server
from benchmarks.serve.figures import OBJECTIVES, parse_objective
from benchmarks.serve.load import parse_lengths

DEFAULT_REQUESTS = 100
PROMPT_TOKENS, OUTPUT_TOKENS = "16-256", "16-160"
"""What is asked for where nothing is said: short questions, and answers of a paragraph or two."""


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description="Open-loop load for any OpenAI-compatible server."
    )
    lengths = "128, 16-256, or median=200,p95=1000"
    server, load, out = (parser.add_argument_group(name) for name in ("server", "load", "what to make of it"))
    server.add_argument(
        "--url",
        action="append",
        required=True,
        type=_named_url,
        metavar="[NAME=]URL",
        help="where it listens; several are measured in turns",
    )
    server.add_argument("--model", help="the name to ask for (default: the first of /v1/models)")
    server.add_argument("--api", choices=("completions", "chat"), default="completions", help="the endpoint")
    server.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    load.add_argument(
        "--rate",
        nargs="+",
        type=_rate,
        metavar="R",
        help="requests a second (default: 1, or a trace's own times); several are run in turns, up to the first "
        "that the server does not keep up with; inf: all requests at once",
    )
    load.add_argument("--requests", type=_count, metavar="N", help=f"how many of them (default: {DEFAULT_REQUESTS})")
    load.add_argument("--seconds", type=_positive, metavar="S", help="or for how long they arrive")
    load.add_argument("--prompt-tokens", type=_lengths, metavar="LENGTHS", help=f"{lengths} (default: {PROMPT_TOKENS})")
    load.add_argument("--output-tokens", type=_lengths, metavar="LENGTHS", help=f"the same (default: {OUTPUT_TOKENS})")
    load.add_argument(
        "--trace", type=Path, metavar="CSV", help="lengths and arrivals from a file, as in `minipaged demo`"
    )
    load.add_argument("--pace", type=_positive, default=1.0, help="seconds of the trace in one (default: 1)")
    load.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and prompts (default: 0)")
    load.add_argument(
        "--warm-up", type=_count, default=4, metavar="N", help="requests before, not counted (default: 4)"
    )
    load.add_argument("--rounds", type=_count, default=1, metavar="N", help="how often all is run (default: 1)")
    load.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="for one request (default: 600)")
    out.add_argument(
        "--objective",
        nargs="+",
        action="extend",
        type=_objective,
        default=[],
        metavar="WHAT=TIME",
        help=f"for goodput: {', '.join(OBJECTIVES)}, as in ttft=200ms tpot=50ms",
    )
    out.add_argument(
        "--engine", metavar="MODEL", help="also run LLM(MODEL).generate on the same requests, as a yardstick"
    )
    out.add_argument(
        "--engine-settings", type=_mapping, default={}, metavar="JSON", help="keyword arguments of that LLM"
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw it there: .svg, .png or .pdf (needs matplotlib)")
    arguments = parser.parse_args(words)
    _check_together(parser, arguments)
    return arguments


def _check_together(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    names = [name for name, _ in given.url]
    if len(set(names)) < len(names):
        parser.error("two --url have the same name; call them --url NAME=URL")
    if given.trace and (given.prompt_tokens or given.output_tokens or given.seconds):
        parser.error("a --trace says how long requests are and how many: --requests takes the first so many of them")
    if given.requests and given.seconds:
        parser.error("--requests and --seconds both say when to stop; give one of them")
    if not given.trace:
        given.prompt_tokens, given.output_tokens = (
            given.prompt_tokens or PROMPT_TOKENS,
            given.output_tokens or OUTPUT_TOKENS,
        )
    given.rate = sorted(set(given.rate)) if given.rate else [None if given.trace else 1.0]
    if given.seconds and math.inf in given.rate:
        parser.error("--rate inf sends all requests at once: say how many with --requests")
    if given.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed: pip install matplotlib, or leave --plot out")
    if given.plot and given.plot.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot {given.plot}: the name has to end in .svg, .png or .pdf")
    for file in (given.json, given.plot):
        if file and not file.absolute().parent.is_dir():
            parser.error(f"{file}: there is no folder {file.absolute().parent}")


def _checked(read: Any) -> Any:
    """For argparse, which shows the message of this error only."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


@_checked
def _named_url(text: str) -> tuple[str, str]:
    named = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", text)
    assert named is not None
    name, url = named.groups()
    return name or Server.at(url, None).url.partition("://")[2], Server.at(url, None).url


def _number(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise ValueError(f"{text!r} is not {what}")
    return number


@_checked
def _rate(text: str) -> float:
    return _number(text, "a number of requests a second above 0, or inf")


@_checked
def _positive(text: str) -> float:
    if (number := _number(text, "a number above 0")) == math.inf:
        raise ValueError("inf is too much")
    return number


@_checked
def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"{text!r} is not a whole number above 0")
    return int(text)


@_checked
def _mapping(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError('it must be JSON like {"max_num_seqs": 32}')
    return found


@_checked
def _lengths(text: str) -> str:
    parse_lengths(text)
    return text


_objective = _checked(parse_objective)
