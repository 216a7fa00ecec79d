"""Convert a run to data, to an HTML element for another page, or to a self-contained page.

The page contains the web component (`stepper.js`) and the run as JSON. It uses no network, so that it can be sent to
other people and opened from a file.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minipaged.errors import InvalidRequest
from minipaged.events import (
    BeamFinished,
    EngineStarted,
    Event,
    RequestArrived,
    StepFailed,
    StepScheduled,
    TokenGenerated,
    TokensDrafted,
)
from minipaged.replay.state import State
from minipaged.replay.teller import explain, letter

STEPPER = Path(__file__).with_name("stepper.js")
UNSEEN = (StepScheduled,)
"""Events that are not steps of the page, because they change nothing that it shows."""
COUNT = re.compile(r"ref_count\((\d+)\) is (-?\d+); it should be (\d+)")
"""The grader's message about a reference count: the block, the allocator's count, and the correct count."""
NO_CODE: dict[str, Any] = {"functions": [], "lines": [], "lines_of": [], "current": []}


def as_data(
    title: str,
    events: Iterable[Event],
    *,
    words: Mapping[int, str] | None = None,
    notes: Mapping[int, str] | None = None,
    code: Mapping[str, Any] = NO_CODE,
    doubted: Mapping[int, Collection[int]] | None = None,
) -> dict[str, Any]:
    """The data for `stepper.js`.

    `words`: the text of tokens; `notes`: additional sentences for events, by the event's index; `code`: the lines that
    ran before each event, from a recording; `doubted`: the blocks with a wrong count in the allocator after an event,
    by the event's index.
    Raises InvalidRequest unless the events begin at the start of the engine, because the state would be unknown.
    """
    events = list(events)
    if not events:
        raise InvalidRequest("the run has no events; write some with: minipaged generate ... --events run.jsonl")
    if not isinstance(events[0], EngineStarted) or any(isinstance(event, EngineStarted) for event in events[1:]):
        raise InvalidRequest(
            "a run has one engine_started event, at its beginning; these events are a part of a run, or several runs"
        )
    events = [event for event in events if not isinstance(event, UNSEEN)]
    return {
        "title": title,
        "events": [{"event": event.name, **asdict(event)} for event in events],
        "sentences": sentences_of(events, words, doubted),
        "words": words,
        "notes": notes or {},
        **code,
    }


def failure_of(events: Sequence[Event]) -> dict[str, Any]:
    """The failure of a run that ends in a failed step, as the grader's counterexamples do; {} for any other run.

    It has the error message and, if a reference count was wrong, the allocator's count and the correct one.
    """
    if not events or not isinstance(events[-1], StepFailed):
        return {}
    seen = sum(not isinstance(event, UNSEEN) for event in events)
    wrong = {int(block): (int(should), int(says)) for block, says, should in COUNT.findall(events[-1].error)}
    broken = {"message": lettered(events[-1].error), "line": None, "should": False}
    return {"beliefs": {seen - 1: {"blocks": wrong}, seen: {"blocks": wrong}} if wrong else {}, "broken": broken}


def words_of(events: Iterable[Event], decode: Callable[[list[int]], str]) -> dict[int, str]:
    """The text of every token in the events."""
    tokens: set[int] = set()
    for event in events:
        if isinstance(event, RequestArrived):
            tokens.update(event.prompt_token_ids)
        elif isinstance(event, TokensDrafted):
            tokens.update(event.token_ids)
        elif isinstance(event, TokenGenerated | BeamFinished):
            tokens.add(event.token_id)
    return {token: decode([token]) for token in sorted(tokens)}


def sentences_of(
    events: Iterable[Event],
    words: Mapping[int, str] | None = None,
    doubted: Mapping[int, Collection[int]] | None = None,
) -> list[str]:
    """A sentence for each event.

    A run with a faulty part may contradict itself. From then on the state is unknown, and the sentences describe the
    contradiction.
    """

    def quoted(token: int) -> str:
        return f"“{visible(words.get(token, str(token))).strip()}”" if words is not None else str(token)

    state, said, contradiction = State(), list[str](), ""
    for i, event in enumerate(events):
        if not contradiction:
            try:
                sentence = explain(state, event, quoted, (doubted or {}).get(i, ()))
                state.apply(event)
            except (LookupError, ValueError) as error:
                why = str(error) if isinstance(error, ValueError) else f"nobody knows of {error}"
                contradiction = f"does not follow from what happened before: {why}."
        said.append(lettered(f"This ({event.name}) {contradiction}" if contradiction else sentence))
    return said


def lettered(text: str) -> str:
    """Replace sequence numbers, which error messages contain, by the letters that the page shows."""
    return re.sub(r"\bsequence (\d+)\b", lambda found: f"sequence {letter(int(found[1]))}", text)


def visible(word: str) -> str:
    """Make white space in a token visible: signs replace line breaks, and the spaces of a token of spaces only."""
    return (
        "\N{OPEN BOX}" * len(word)
        if word and not word.strip(" ")
        else word.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")
    )


def element(
    data: Mapping[str, Any],
    *,
    tag: str = "paged-stepper",
    script: Path = STEPPER,
    instead: str = "",
    id: str = "",
    start: int = 1,
    with_script: bool = False,
) -> str:
    """A web component as an HTML element, which opens at step `start`. `with_script`: include the component's script;
    otherwise the page must include it.

    `instead`: HTML to show if scripts are off.
    """
    code = f"<script>{script.read_text(encoding='utf-8')}</script>" if with_script else ""
    name = f' id="{html.escape(id)}"' if id else ""
    first = f' start="{start}"' if start > 1 else ""
    return f'<div class="stepper"><{tag}{name}{first}>{instead}{in_script(data)}</{tag}>{code}</div>'


def in_script(data: Any) -> str:
    """A script element with the data as JSON, to be put inside a component."""
    text = json.dumps(data, separators=(",", ":"))
    for sign in "<>&":  # so that no text ends the element, and no HTML escaping or Markdown changes it
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json">{text}</script>'


def page(data: Mapping[str, Any]) -> str:
    """A self-contained page with one stepper."""
    how = "Step with the buttons or on the timeline, or with the arrow keys once the stepper has the focus."
    return page_around(data["title"] or "A run of minipaged, step by step", how, element(data, with_script=True))


def page_around(title: str, how: str, shown: str) -> str:
    """A self-contained page around a piece of HTML. `how`: a sentence that explains the use."""
    title = html.escape(title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
html {{ background: Canvas; color: CanvasText; }}
body {{ max-width: 80rem; margin: 0 auto; padding: 1rem; font-family: system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{how}</p>
{shown}
</main>
</body>
</html>
"""
