"""A recording holds the engine's own events, and the lines that Python ran: nothing is told twice."""

from __future__ import annotations

import html
import json
import runpy
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs import build
from minipaged import EngineConfig, InvalidRequest, SamplingParams
from minipaged.engine.engine import Engine
from minipaged.events import (
    EVENT_TYPES,
    BlockCopied,
    Event,
    RequestArrived,
    StepFinished,
    TokenGenerated,
    TokensAccepted,
    TokensComputed,
)
from minipaged.params import SpeculativeConfig
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.stepper import Reciter, Recording, Storyteller, record
from minipaged.stepper.page import UNSEEN, element
from minipaged.stepper.recording import ANCHORS, ROOT, WATCHED
from minipaged.tiers import reference_tier
from tests.source import definitions

TEXTS = ("one two three four five six seven", "one two three four FIVE SIX SEVEN")


def two_samples() -> tuple[Recording, list[Event]]:
    model = Storyteller(TEXTS)
    heard: list[Event] = []
    with record("Two samples", model.decode) as run:
        engine = model.engine(num_blocks=8, block_size=4)
        engine.listeners.append(heard.append)
        engine.add_request(model.encode("one two three"), SamplingParams(n=2, max_tokens=3, seed=1))
        while engine.has_unfinished_requests():
            engine.step()
    return run, heard


def test_the_recorded_events_are_those_that_listeners_hear() -> None:
    run, heard = two_samples()
    assert run.events == [event for event in heard if not isinstance(event, UNSEEN)]
    assert len(run.lines) == len(run.events)


def test_the_source_shown_is_what_stands_in_the_file_that_ran() -> None:
    data = two_samples()[0].data()
    assert {function["name"] for function in data["functions"]} >= {"BlockTable.append", "BlockAllocator.copy_on_write"}
    for function in data["functions"]:
        lines = (ROOT.parent / function["file"]).read_text().splitlines()
        first = function["first"] - 1
        shown = function["source"]
        assert [line.strip() for line in lines[first : first + len(shown)]] == [line.strip() for line in shown]


def test_the_line_lit_for_a_copy_is_where_the_reference_is_given_up() -> None:
    run, _ = two_samples()
    data = run.data()
    [index] = [i for i, event in enumerate(run.events) if isinstance(event, BlockCopied)]
    number, line = data["current"][index]
    function = data["functions"][number]
    assert function["name"] == "BlockAllocator.copy_on_write"
    assert function["source"][line - function["first"]].strip() == "self._ref_counts[block] -= 1"


def test_the_line_lit_is_in_the_function_that_the_sentence_speaks_of() -> None:
    run, _ = two_samples()
    data = run.data()
    before: Event | None = None
    for event, lit in zip(run.events, data["current"], strict=True):
        function = data["functions"][lit[0]]["name"] if lit else None
        if isinstance(event, StepFinished):
            assert function == "Engine._finish_step"
        if isinstance(event, TokensComputed) and not isinstance(before, BlockCopied):
            assert function == ("BlockAllocator.allocate" if event.new_blocks else "BlockTable.append")
        before = event


def test_a_step_shows_only_what_ran_since_the_step_before() -> None:
    run, _ = two_samples()
    data = run.data()
    started = next(i for i, event in enumerate(run.events) if event.name == "step_started")
    tokens = [i for i, event in enumerate(run.events) if event.name == "token_generated"]
    assert tokens[1] == tokens[0] + 1  # both samples' first tokens come from one loop
    for index, expected in [
        (started, ["Engine.add_request", "Launcher.launch", "Launcher.begin"]),
        (tokens[1], ["Committer._commit_samples"]),
    ]:
        assert [data["functions"][number]["name"] for number, _ in data["lines"][data["lines_of"][index]]] == expected


def test_the_line_lit_is_one_that_ran() -> None:
    data = two_samples()[0].data()
    for which, lit in zip(data["lines_of"], data["current"], strict=True):
        ran = {(number, line) for number, lines in data["lines"][which] for line in lines}
        assert (lit is None and not ran) or tuple(lit) in ran


class Loud(BlockAllocator):
    """A part of somebody's own."""

    def allocate(self) -> int:
        return super().allocate()


def test_a_class_that_is_named_is_shown_and_a_note_is_kept_with_the_latest_event() -> None:
    model = Storyteller(TEXTS)
    with record("A part of one's own", model.decode, watch=[Loud]) as run:
        config = EngineConfig(
            num_blocks=4, block_size=4, max_model_len=16, vocab_size=len(model.words), enable_prefix_caching=False
        )
        engine = Engine(config, replace(reference_tier(), block_allocator=Loud), model)
        engine.add_request(model.encode("one two three"), SamplingParams(max_tokens=1))
        run.note("The queue has one.")
        run.note("The pool is full.")
        engine.step()
    data = run.data()
    assert ("Loud.allocate", "tests/stepper/test_recording.py") in {(f["name"], f["file"]) for f in data["functions"]}
    [(index, note)] = data["notes"].items()
    assert isinstance(run.events[index], RequestArrived)
    assert note == "The queue has one. The pool is full."


def kept(name: str) -> dict[str, Any]:
    """What the stepper of an exhibit of the museum is fed with."""
    data: dict[str, Any] = json.loads(json.dumps(runpy.run_path(f"docs/runs/{name}.py")["run"].data()))
    return data


def test_what_an_allocator_believes_stands_beside_what_the_tables_say() -> None:
    """As the page of the exhibit says: after the first request two counts are -1, after the second all four."""
    data = kept("minus_one")
    counts = [{int(block): pair for block, pair in at["blocks"].items()} for at in by_step(data)]
    assert counts[7] == {0: [0, -1], 1: [0, -1]}
    assert counts[16] == counts[-1] == {block: [0, -1] for block in range(4)}
    assert counts[4] == {0: [1, 0], 1: [1, 0]}  # from the first allocation on
    assert counts[:4] == [{}] * 4
    assert "'liveness'" in data["broken"]["message"]
    assert data["notes"]["4"].startswith("In red: ")
    assert data["sentences"][7].endswith("blocks 0 and 1, which should be free again from now on.")


def test_where_a_part_raised_an_error_is_told_and_not_where_it_was_called_last() -> None:
    """After the error the engine has the table give its blocks back."""
    data = kept("remainder")
    assert data["broken"]["message"].endswith(", in BlockTable.slot_mapping")


def test_what_a_table_believes_stands_beside_what_the_events_say() -> None:
    data = kept("stale_table")
    [exchanged] = [i for i, event in enumerate(data["events"]) if event["event"] == "block_deduplicated"]
    own = data["events"][exchanged]["own"]
    for i, at in enumerate(by_step(data)):
        assert bool(at.get("tables")) == (i >= exchanged)
        assert i < exchanged or at["tables"]["1"][0] == own
    assert "broken" not in data


def by_step(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What is wrong after each event, and where it broke off."""
    steps = len(data["events"]) + ("broken" in data)
    return [{"blocks": {}} | data["beliefs"].get(str(i), {}) for i in range(steps)]


def test_an_allocator_that_is_ahead_of_the_events_is_not_wrong() -> None:
    """Several blocks are evicted in one call, and told of one after the other."""
    model = Storyteller(["one two three four five six", "a b c d e f g h"])
    with record("Evicted", model.decode, watch=[Loud]) as run:
        sizes = {"num_blocks": 4, "block_size": 2, "max_model_len": 8, "vocab_size": len(model.words)}
        tier = replace(reference_tier(), block_allocator=Loud)
        engine = Engine(EngineConfig(enable_prefix_caching=True, **sizes), tier, model)
        for prompt in ("one two three four five", "a b c d e f g"):
            engine.add_request(model.encode(prompt), SamplingParams(max_tokens=1, temperature=0))
            while engine.has_unfinished_requests():
                engine.step()
    names = [event.name for event in run.events]
    assert names.count("block_evicted") == 3  # the first prompt's two full blocks, and its last
    assert run.believed[names.index("block_evicted")].counts == dict.fromkeys(range(4), 0)
    assert "beliefs" not in run.data()


def test_a_run_breaks_off_where_an_error_leaves_it_and_not_where_it_goes_on() -> None:
    model = Storyteller(TEXTS)
    with suppress(ZeroDivisionError), record("Broken", model.decode) as run:
        engine = model.engine(num_blocks=8, block_size=4)
        with run.breaks(KeyError):
            raise KeyError("lost")
        assert run.broken
        engine.add_request(model.encode("one"), SamplingParams(max_tokens=1))
        assert not run.broken
        raise ZeroDivisionError("by zero")
    assert run.data()["broken"] == {
        "message": "ZeroDivisionError: by zero",
        "line": None,
        "name": None,
        "should": False,
    }


def test_every_watched_function_exists() -> None:
    """Those that are renamed would silently be shown no more."""
    for file, names in WATCHED.items():
        for name in names:
            assert name in definitions(ROOT / file), f"{name} in {file}"


def test_every_event_is_told_by_a_line_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is changed would silently be lit no more."""
    unlit = {"engine_started", "step_scheduled", "step_failed", "blocks_stored"}
    assert EVENT_TYPES.keys() - ANCHORS.keys() == unlit
    build.check_anchors()
    monkeypatch.setitem(ANCHORS, "block_evicted", (("PrefixCache.evict", "self._allocator.release(block)"),))
    with pytest.raises(ValueError, match="block_evicted"):
        build.check_anchors()


def test_the_line_lit_is_the_one_that_is_named() -> None:
    run, _ = two_samples()
    named = 0
    for event, (function, line) in zip(run.events, lit_lines(run), strict=True):
        starts = [start for name, start in ANCHORS.get(event.name, ()) if name == function]
        assert line.startswith(tuple(starts)) or not starts
        named += bool(starts)
    assert named > len(run.events) - 5  # the second of two tokens that come from one loop, and the first event of all


def windowed(prompts: list[tuple[str, int]], max_tokens: int, **sizes: Any) -> Recording:
    """A model with a group of layers that see everything, and one with a window of three tokens. `prompts`: each with
    its number of samples."""
    model = Storyteller(["one two three four five six seven eight", "one two three four FIVE SIX", "a b c d e f g"])
    with record("Windows", model.decode) as run:
        engine = model.engine(block_size=2, max_model_len=8, group_windows=(None, 3), **sizes)
        for prompt, n in prompts:
            engine.add_request(model.encode(prompt), SamplingParams(n=n, max_tokens=max_tokens, seed=1))
        while engine.has_unfinished_requests():
            engine.step()
    return run


def test_the_lines_of_tables_with_groups_are_lit() -> None:
    prompts = [("one two three", 2), ("one two three four five", 1), ("one two three four five", 1), ("a b c d e", 1)]
    cached = windowed(prompts, 3, num_blocks=12, enable_prefix_caching=True)
    swapped = windowed(2 * [("one two three", 1)], 5, num_blocks=10, num_swap_blocks=12, preemption="swap")
    lit = [
        (event.name, function)
        for run in (cached, swapped)
        for event, (function, _) in zip(run.events, lit_lines(run), strict=True)
    ]
    assert {name: function for name, function in lit if function.startswith("Grouped")} == {
        "block_copied": "GroupedTable.append",
        "blocks_passed": "GroupedTable.give_back",
        "block_cached": "GroupedPrefixCache.publish",
        "block_deduplicated": "GroupedTable.replace",
        "block_evicted": "GroupedPrefixCache._drop",
        "prefix_reused": "GroupedTable.adopt",
        "sequence_forked": "GroupedTable.fork",
        "swapped_out": "GroupedTable.relocate",
        "swapped_in": "GroupedTable.relocate",
        "tokens_computed": "GroupedTable.append",
    }


def lit_lines(run: Recording) -> list[tuple[str, str]]:
    """The function and the text of the line that is lit at each event; empty where none is."""
    data, lit = run.data(), list[tuple[str, str]]()
    for at in data["current"]:
        function = data["functions"][at[0]] if at else {"name": "", "source": [""], "first": 0}
        lit.append((function["name"], function["source"][at[1] - function["first"] if at else 0].strip()))
    return lit


def test_recording_leaves_the_tracing_of_others_as_it_was() -> None:
    before = sys.gettrace()
    with pytest.raises(ZeroDivisionError), record():
        raise ZeroDivisionError
    assert sys.gettrace() is before


def test_a_recording_without_an_engine_is_refused() -> None:
    model = Storyteller(TEXTS)
    engine = model.engine(num_blocks=8, block_size=4)  # too early: its first event is gone
    with pytest.raises(InvalidRequest, match="inside the `with record"), record():
        engine.add_request(model.encode("one"), SamplingParams(max_tokens=1))


def test_a_recording_of_two_engines_is_refused() -> None:
    model = Storyteller(TEXTS)
    with record():
        model.engine(num_blocks=8, block_size=4)
        with pytest.raises(InvalidRequest, match="second"):
            model.engine(num_blocks=8, block_size=4)


def test_samples_of_a_storyteller_part_where_its_texts_do() -> None:
    run, _ = two_samples()
    assert run.data()["words"][3] == "four"
    assert any(isinstance(event, BlockCopied) for event in run.events)
    with pytest.raises(ValueError, match="none of the texts begins"):
        Storyteller(TEXTS).encode("two three")


@pytest.mark.parametrize("kind", [Storyteller, Reciter])
def test_a_storyteller_verifies_drafts(kind: type[Storyteller]) -> None:
    """Prompt lookup drafts something only at the end of its text, which repeats itself."""
    told = []
    for drafts in (None, SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=1)):
        model, heard = kind(TEXTS), list[Event]()
        engine = model.engine(num_blocks=8, block_size=4, speculative_config=drafts)
        engine.listeners.append(heard.append)
        engine.add_request(model.encode("one two three four"), SamplingParams(temperature=0, max_tokens=12))
        while engine.has_unfinished_requests():
            engine.step()
        told.append([event.token_id for event in heard if isinstance(event, TokenGenerated)])
    assert told[0] == told[1]
    assert sum(event.num_accepted for event in heard if isinstance(event, TokensAccepted)) > 2


def test_the_data_in_a_page_is_the_same_to_who_escapes_html_and_who_does_not() -> None:
    data = two_samples()[0].data()
    text = element(data).split('<script type="application/json">')[1].split("</script>")[0]
    assert "->" in str(data["functions"])
    assert html.escape(text, quote=False) == text
    assert json.loads(text)["functions"] == data["functions"]


def test_the_stepper_is_small() -> None:
    assert (Path(ROOT) / "stepper" / "stepper.js").stat().st_size < 60_000
