"""Open-loop load for any OpenAI-compatible server: how long people wait at a rate, and up to which rate it keeps up.

    python -m benchmarks.serve --url http://127.0.0.1:8000 --rate 2 --requests 200
    python -m benchmarks.serve --url ours=http://127.0.0.1:8000 --url theirs=http://127.0.0.1:8001 --rate 1 2 4 8 16 \\
        --objective ttft=500ms tpot=100ms --json run.json --plot run.svg
    python -m benchmarks.serve --url http://127.0.0.1:8000 --rate inf --requests 32 --engine smollm2-135m-instruct

Requests arrive independently of each other (Poisson), whether or not earlier ones have been answered. Several servers
are measured in turns under the same load. docs/measuring.md says what each figure means and how to find the knee.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any

from rich.console import Console

from benchmarks.serve.arguments import DEFAULT_REQUESTS, parse_arguments
from benchmarks.serve.client import RequestFailed, Server, ask, look_up
from benchmarks.serve.engine import EngineProcess
from benchmarks.serve.figures import Figures
from benchmarks.serve.load import PromptWriter, Request, from_trace, parse_lengths, poisson
from benchmarks.serve.report import Measurement, knees, show_all, show_run
from benchmarks.serve.run import HOLDS, Target, run
from benchmarks.side_by_side import cpu_model
from minipaged.errors import InvalidRequest
from minipaged.simulation.traces import read_trace

SHORT_TIMEOUT = 30.0
"""Seconds, for everything but the requests that are measured."""


class CannotMeasure(Exception):
    """What is wrong, and the way out."""


# --- Before the load ------------------------------------------------------------------------------


async def find_target(name: str, url: str, given: argparse.Namespace) -> tuple[Target, float]:
    """The server at `url`, and the longest prompt and output together that it takes (inf where it does not say)."""
    try:
        server = await look_up(Server.at(url, given.api_key), timeout=SHORT_TIMEOUT)
        told = json.loads(await ask(server, "GET", "/v1/models", timeout=SHORT_TIMEOUT))
        cards = [card for card in told["data"] if given.model in (None, card["id"])]
    except RequestFailed as failure:
        raise CannotMeasure(f"{url}: {_what_to_do(failure)}") from None
    except (ValueError, KeyError, TypeError):
        raise CannotMeasure(f"{url}/v1/models gives no list of models: this is no OpenAI-compatible server") from None
    card = cards[0] if cards else {}
    model = given.model or card.get("id", "default")
    return Target(name, server, model, given.api == "chat", "ignore_eos"), card.get("max_model_len") or math.inf


def _what_to_do(failure: RequestFailed) -> str:
    ways = {
        "cannot connect": "is the server running, and is that its port?",
        "HTTP 401": "it wants a key: give --api-key or set OPENAI_API_KEY",
        "HTTP 404": "an OpenAI-compatible server has /v1/models and the endpoint; try --api chat, or look at the path",
        "not HTTP": "something else than a web server listens there (or it wants https)",
    }
    return f"{failure}" + (f" ({ways[failure.kind]})" if failure.kind in ways else "")


async def warm_up(target: Target, requests: list[Request], given: argparse.Namespace) -> Target:
    """Send some requests that do not count; the same target, with the way in which it holds lengths.

    A server that refuses a field it does not know is asked without it. Raises CannotMeasure where the first request
    fails every way.
    """
    first_failure: str | None = None
    for hold in HOLDS:
        target = replace(target, hold=hold)
        probe = (await run(target, requests[:1], timeout=given.timeout)).records[0]
        if probe.error is None:
            await run(target, requests[1:], timeout=given.timeout)
            return target
        failure = RequestFailed(probe.error, probe.message)
        first_failure = first_failure or _what_to_do(failure)
        if failure.kind not in ("HTTP 400", "HTTP 422"):
            break
    raise CannotMeasure(f"{target.server.url}{target.path}: the first request failed: {first_failure}")


def plan(rate: float | None, given: argparse.Namespace) -> list[Request]:
    if given.trace:
        trace = read_trace(given.trace)[: given.requests]
        return from_trace(trace, rate=rate, pace=given.pace, seed=given.seed)
    assert rate is not None
    count = given.requests or (None if given.seconds else DEFAULT_REQUESTS)
    prompt, output = parse_lengths(given.prompt_tokens), parse_lengths(given.output_tokens)
    return poisson(rate, prompt, output, seed=given.seed, requests=count, seconds=given.seconds)


# --- The load -------------------------------------------------------------------------------------


class Session:
    """All runs of one call, written to the JSON file after each of them: what is measured is never lost."""

    def __init__(self, given: argparse.Namespace, console: Console) -> None:
        self.given = given
        self.console = console
        self.targets: list[Target] = []
        self.longest = math.inf
        self.measured: list[Measurement] = []
        self.too_much: dict[str, float] = {}
        """By server: the lowest rate with which it did not keep up."""

    async def measure(self) -> None:
        given = self.given
        for name, url in given.url:
            target, longest = await find_target(name, url, given)
            self.longest = min(self.longest, longest)
            self.targets.append(target)
        self.writer = await self._find_writer()
        planned = self._fitting(plan(given.rate[0], given))[: given.warm_up]
        warm = await self.writer.write([replace(request, seconds=0.0) for request in planned], f"{given.seed} warm-up")
        self.targets = [await warm_up(target, warm, given) for target in self.targets]
        engine = EngineProcess(given.engine, given.engine_settings, chat=given.api == "chat") if given.engine else None
        with engine or nullcontext():
            for turn in range(given.rounds):
                for rate in given.rate:
                    await self._measure_at(rate, turn, engine)

    async def _find_writer(self) -> PromptWriter:
        """Of the first server that has /tokenize: all are sent the same prompts."""
        for target in self.targets:
            writer = PromptWriter(target.server, target.model, chat=target.chat, timeout=SHORT_TIMEOUT)
            await writer.write([Request(0.0, 8, 1)], "")
            if writer.counts:
                break
        return writer

    def _fitting(self, planned: list[Request]) -> list[Request]:
        """Those that every server can hold; what is left out is told."""
        fitting = [request for request in planned if request.prompt_tokens + request.output_tokens <= self.longest]
        if not fitting:
            raise CannotMeasure(
                f"no request is left that fits the model's {self.longest} tokens: give smaller --prompt-tokens and "
                "--output-tokens"
            )
        if len(fitting) < len(planned):
            left_out = len(planned) - len(fitting)
            print(
                f"{left_out} of {len(planned)} requests do not fit the model's {self.longest} tokens", file=sys.stderr
            )
        return fitting

    async def _measure_at(self, rate: float | None, turn: int, engine: EngineProcess | None) -> None:
        goes_on = [t for t in self.targets if rate in (None, math.inf) or rate <= self.too_much.get(t.name, math.inf)]
        if not goes_on:
            return
        planned = self._fitting(plan(rate, self.given))
        requests = await self.writer.write(planned, f"{self.given.seed} {turn} {rate}")
        yardstick = engine.tokens_per_second(requests) if engine else None
        for target in goes_on:
            done = await run(target, requests, timeout=self.given.timeout)
            figures = Figures.of(done, dict(self.given.objective))
            self.measured.append(Measurement(turn, rate, target.name, figures, yardstick, done))
            show_run(self.measured[-1], self.console)
            if rate is not None and figures.keeps_up is False:
                self.too_much[target.name] = min(rate, self.too_much.get(target.name, math.inf))
            self._write()

    def _write(self) -> None:
        if self.given.json:
            self.given.json.write_text(json.dumps(self.as_json()) + "\n")

    def as_json(self) -> dict[str, Any]:
        given = self.given
        load = {
            "rates": ["inf" if rate == math.inf else rate for rate in given.rate],
            "requests": given.requests,
            "seconds": given.seconds,
            "trace": given.trace and str(given.trace),
            "pace": given.pace,
            "prompt_tokens": given.prompt_tokens,
            "output_tokens": given.output_tokens,
            "timeout": given.timeout,
            "api": given.api,
            "objectives": dict(given.objective),
            "seed": given.seed,
            "prompts": str(self.writer),
            "engine": given.engine,
            "engine_settings": given.engine_settings,
        }
        machine = {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.platform()}
        return {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": machine,
            "load": load,
            "targets": [
                {"name": t.name, "url": t.server.url, "model": t.model, "lengths_held_by": t.hold} for t in self.targets
            ],
            "knees": knees(self.measured),
            "runs": [measurement.as_json() for measurement in self.measured],
        }


def main(words: list[str] | None = None) -> int:
    given = parse_arguments(words)
    session = Session(given, Console())
    try:
        asyncio.run(session.measure())
    except (CannotMeasure, InvalidRequest, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = f"; the runs that ended are in {given.json}" if given.json and session.measured else ""
        print(f"\ninterrupted{kept}", file=sys.stderr)
        return 130
    show_all(session.measured, session.console)
    print(f"prompts: {session.writer}")
    if given.plot:
        from benchmarks.serve.plot import draw

        draw(session.measured, given.plot)
    return 0 if all(m.figures.completed for m in session.measured) else 1


if __name__ == "__main__":
    sys.exit(main())
