"""The page: a run as data, as an element to put into another page, and as a page that needs nothing else.

The page holds the web component (`stepper.js`) and the run as JSON; it asks for nothing on the network, so that it can
be sent to somebody and opened from a file.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minipaged.errors import InvalidRequest
from minipaged.events import BeamFinished, EngineStarted, Event, RequestArrived, StepScheduled, TokenGenerated
from minipaged.replay.state import State
from minipaged.replay.teller import explain

STEPPER = Path(__file__).with_name("stepper.js")
UNSEEN = (StepScheduled,)
"""Events that are no steps of the page: they count, and change nothing that it shows."""
NO_CODE: dict[str, Any] = {"functions": [], "lines": [], "lines_of": [], "current": []}


def as_data(
    title: str,
    events: Iterable[Event],
    *,
    words: Mapping[int, str] | None = None,
    notes: Mapping[int, str] | None = None,
    code: Mapping[str, Any] = NO_CODE,
) -> dict[str, Any]:
    """What `stepper.js` is fed with.

    `words`: the text of tokens; `notes`: what more to say of an event, by its index; `code`: the lines that ran before
    each event, from a recording.
    Raises InvalidRequest unless the events begin where the engine does: they could not be followed.
    """
    events = list(events)
    if not events:
        raise InvalidRequest("the run has no events; write some with: minipaged generate ... --events run.jsonl")
    if not isinstance(events[0], EngineStarted) or any(isinstance(event, EngineStarted) for event in events[1:]):
        raise InvalidRequest(
            "a run is followed from its one engine_started event, the first; this is a piece of a run, or several"
        )
    events = [event for event in events if not isinstance(event, UNSEEN)]
    return {
        "title": title,
        "events": [{"event": event.name, **asdict(event)} for event in events],
        "sentences": sentences_of(events, words),
        "words": words,
        "notes": notes or {},
        **code,
    }


def words_of(events: Iterable[Event], decode: Callable[[list[int]], str]) -> dict[int, str]:
    """The text of every token that the events name."""
    tokens: set[int] = set()
    for event in events:
        if isinstance(event, RequestArrived):
            tokens.update(event.prompt_token_ids)
        elif isinstance(event, TokenGenerated | BeamFinished):
            tokens.add(event.token_id)
    return {token: decode([token]) for token in sorted(tokens)}


def sentences_of(events: Iterable[Event], words: Mapping[int, str] | None = None) -> list[str]:
    """What is said of each event.

    A run of somebody's faulty part may contradict itself. From there on nobody knows what an event means: the sentences
    tell the contradiction.
    """

    def quoted(token: int) -> str:
        return f"“{visible(words.get(token, str(token))).strip()}”" if words is not None else str(token)

    state, said, contradiction = State(), list[str](), ""
    for event in events:
        if not contradiction:
            try:
                sentence = explain(state, event, quoted)
                state.apply(event)
            except (LookupError, ValueError) as error:
                why = str(error) if isinstance(error, ValueError) else f"nobody knows of {error}"
                contradiction = f"does not follow from what happened before: {why}."
        said.append(f"This ({event.name}) {contradiction}" if contradiction else sentence)
    return said


def visible(word: str) -> str:
    """A word of line breaks or spaces alone would look like nothing."""
    return (
        "\N{OPEN BOX}" * len(word)
        if word and not word.strip(" ")
        else word.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")
    )


def element(data: Mapping[str, Any], *, id: str = "", with_script: bool = False) -> str:
    """The stepper as a piece of HTML. The page around it brings `stepper.js`, unless `with_script`."""
    text = json.dumps(data, separators=(",", ":"))
    for sign in "<>&":  # so that no text ends the script element, and none is changed by who escapes HTML
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    script = f"<script>{STEPPER.read_text(encoding='utf-8')}</script>" if with_script else ""
    name = f' id="{html.escape(id)}"' if id else ""
    return (
        f'<div class="stepper"><paged-stepper{name}>'
        f'<script type="application/json">{text}</script></paged-stepper>{script}</div>'
    )


def page(data: Mapping[str, Any]) -> str:
    """A whole page around one stepper."""
    title = html.escape(data["title"] or "A run of minipaged, step by step")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 80rem; margin: 0 auto; padding: 1rem; font-family: system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>Step with the buttons or the slider, or with the arrow keys once the stepper has the focus.</p>
{element(data, with_script=True)}
</main>
</body>
</html>
"""
