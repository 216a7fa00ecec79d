"""Describe a run in plain lines: the first few events of each topic, for outputs without pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from minipaged.events import Event
from minipaged.replay.teller import Topic, tell
from minipaged.replay.timeline import Timeline

LEFT_OUT: dict[Topic, str] = {
    "grow": "more blocks taken",
    "join": "more requests joined",
    "leave": "more requests left",
    "prefix": "more requests that found their beginning in the prefix cache",
    "load": "more requests with blocks of another engine",
    "store": "more times blocks were left for other engines",
    "same": "more blocks that were cached already",
    "pass": "more times that windows passed blocks",
    "draft": "more drafts",
    "accept": "more drafts verified",
    "roll back": "more drafts whose blocks went back",
    "fork": "more forks",
    "copy": "more writes into shared blocks",
    "beams": "more steps in which beams forked and were dropped",
    "preempt": "more preemptions",
    "return": "more requests came back",
    "fail": "more steps failed",
}
"""The topics for plain lines, each with a name for the events that are left out."""


def story(events: Iterable[Event], topics: Mapping[Topic, int]) -> list[str]:
    """A run in plain lines. `topics`: the topics to describe, each with its largest number of lines."""
    timeline, told, lines = Timeline(events), Counter[Topic](), list[str]()
    while not timeline.at_end:
        sentence = tell(timeline.state, timeline.next_event())
        timeline.forward()
        if sentence and sentence.topic in topics:
            told[sentence.topic] += 1
            if told[sentence.topic] <= topics[sentence.topic]:
                lines.append(f"step {timeline.state.step:>3}  {sentence.text}")
    for topic, limit in topics.items():
        if told[topic] > limit:
            lines.append(f"{'':8}  ... and {told[topic] - limit} {LEFT_OUT[topic]}")
    return lines


def printable(text: str) -> str:
    """The text with all characters replaced that a terminal could take for a command."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
