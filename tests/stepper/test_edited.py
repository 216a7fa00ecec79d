"""What a reader has changed runs where there is only Python, and what goes wrong in it is told with its line."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import pytest

from docs import build, python_in_page
from minipaged import InvariantViolation, SamplingParams
from minipaged.engine.engine import Engine
from minipaged.events import BlockCopied, Event, SwappedIn
from minipaged.reference.block_table import BlockTable
from minipaged.stepper import Reciter, edited
from tests.effort import quick_cases

ROOT = Path(__file__).parent.parent.parent
EDITABLE = [
    (script.stem, cell.source, build.needed(cells))
    for script in sorted((ROOT / "tutorials").glob("*.py"))
    if '"editable"' in script.read_text()  # reading a tutorial as a notebook takes longer
    for cells in [jupytext.read(script).cells]
    for cell in cells
    if "editable" in cell.metadata.get("tags", ())
]
ALLOCATOR = next(source for _, source, _ in EDITABLE if "class Allocator" in source)
TABLE = next(source for _, source, _ in EDITABLE if "class Table" in source)
SLIDING = {name: (source, needed) for name, source, needed in EDITABLE if build.sliders(source)}


def run(source: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(edited.run(source))
    return result


def changed(source: str, *pairs: tuple[str, str]) -> dict[str, Any]:
    for old, new in pairs:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return run(source)


def lit(data: dict[str, Any], event: str) -> list[str]:
    """The lines lit at the events of that name."""
    lines = []
    for happened, current in zip(data["events"], data["current"], strict=True):
        if happened["event"] == event:
            function = data["functions"][current[0]]
            lines.append(function["source"][current[1] - function["first"]].strip())
    return lines


def test_every_editable_cell_runs_by_itself_from_what_a_page_has_of_minipaged(tmp_path: Path) -> None:
    """And with no package beside it: no NumPy."""
    for path, source in python_in_page.sources(python_in_page.PARTS).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    (tmp_path / "cells.json").write_text(json.dumps([cell for _, *cell in EDITABLE]))
    program = (
        f"import json, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from minipaged.stepper.edited import run\n"
        f"cells = json.load(open({str(tmp_path / 'cells.json')!r}))\n"
        "print(json.dumps([json.loads(run(*cell)) for cell in cells]))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(EDITABLE) >= 2
    for (name, *_), result in zip(EDITABLE, json.loads(done.stdout), strict=True):
        assert result["error"] is None, name
        if name in SLIDING:
            assert result["picture"].startswith("<svg"), name
            continue
        assert len(result["run"]["events"]) > 20
        assert "the code above" in {function["file"] for function in result["run"]["functions"]}


def test_there_are_sliders_in_the_tutorials_on_memory_batches_preemption_load_floors_windows_and_drafts() -> None:
    names = {"01_contiguous_memory", "05_continuous_batching", "08_preemption", "19_under_load"}
    names |= {"20_a_cache_with_floors", "21_not_every_layer_remembers", "22_guess_and_verify"}
    assert set(SLIDING) == names


def slid(source: str, needed: str, **values: int) -> dict[str, Any]:
    """What a cell shows with its sliders moved to these values."""
    for slider in build.sliders(source):
        name, value = slider["name"], slider["value"]
        source = source.replace(f"{name} = {value} ", f"{name} = {values.get(name, value)} ")
    result: dict[str, Any] = json.loads(edited.run(source, needed))
    return result


@quick_cases(2)
@pytest.mark.parametrize("name", SLIDING)
def test_a_cell_runs_wherever_its_sliders_stand(name: str) -> None:
    """At both ends of each, in all combinations; and each of them changes what is shown."""
    sliders = {
        slider["name"]: (slider["values"][0], slider["values"][-1]) for slider in build.sliders(SLIDING[name][0])
    }
    shown = {}
    for ends in itertools.product(*sliders.values()):
        shown[ends] = slid(*SLIDING[name], **dict(zip(sliders, ends, strict=True)))
        assert shown[ends]["error"] is None, (ends, shown[ends]["error"])
    for slider, ends in sliders.items():  # the others stand where readers find them
        low, high = (shown[(end,)] if len(sliders) == 1 else slid(*SLIDING[name], **{slider: end}) for end in ends)
        assert low != high, slider


def test_a_change_shows_in_the_events_and_in_the_lines_lit() -> None:
    before, after = run(ALLOCATOR)["run"], changed(ALLOCATOR, ("pop()", "pop(0)"))["run"]
    taken, taken_now = ([e["new_blocks"] for e in r["events"] if "new_blocks" in e] for r in (before, after))
    assert taken[0] == [0, 1]
    assert taken_now[0] == [7, 6]
    assert lit(before, "block_copied") == ["self.holders[block] -= 1"]
    assert lit(before, "tokens_computed")[0] == "self.holders[block] = 1"
    assert lit(run(TABLE)["run"], "tokens_computed")[0] == "self._num_tokens += 1"
    sources = ["\n".join(function["source"]) for function in after["functions"]]
    assert any("self.free_blocks.pop(0)" in source for source in sources)
    assert not any("def num_free" in source or "def ref_count" in source for source in sources)  # asked after each call


@pytest.mark.parametrize(
    ("source", "pair", "error", "at"),
    [
        (
            ALLOCATOR,
            ("return block\n\n    def share", "return blck\n\n    def share"),
            "num_free is 7, not 8; because of NameError: name 'blck' is not defined",
            "return blck",
        ),
        (ALLOCATOR, ("block = self.free_blocks.pop()", "return nothing"), "in allocate: NameError", "return nothing"),
        (ALLOCATOR, ("def share(self, block):", "def share(self, block)"), "SyntaxError", "def share"),
        (
            ALLOCATOR,
            ("def share", "def shar"),
            "NotAnAllocator: Allocator is no block allocator: it lacks share",
            "engine =",
        ),
        (
            ALLOCATOR,
            ("-= 1\n        return copy", "-= 0\n        return copy"),
            "invariant 'exact-references'",
            "engine.step",
        ),
        (ALLOCATOR, ("with record", "exit(3)\nwith record"), "SystemExit: 3", "exit(3)"),
        (TABLE, ("position % self", "position // self"), "invariant 'content' broken: position 5 is", "engine.step"),
        (TABLE, ("return slots", "return []"), "positions 0 to 6 have 0 slots", "engine.step"),
        (TABLE, ("slots.append(", "slots.append(99 + "), "BlockNotAllocated: there is no block 24", "engine.step"),
    ],
)
def test_what_goes_wrong_is_told_with_its_line(source: str, pair: tuple[str, str], error: str, at: str) -> None:
    told = changed(source, pair)
    assert error in told["error"]
    assert told["error"].startswith(f"Line {told['line']}")
    lines = source.replace(*pair).splitlines(keepends=True)
    assert at in lines[told["line"] - 1]


def test_of_a_run_that_fails_there_is_what_was_recorded_until_then() -> None:
    result = changed(ALLOCATOR, ("-= 1\n        return copy", "-= 0\n        return copy"))
    names = [event["event"] for event in result["run"]["events"]]
    assert "sequence_forked" in names
    assert names[-1] == "step_started"  # of an allocator that is broken nothing more is asked


COUNTS_TOO_MUCH = ("-= 1\n        return copy", "-= 0\n        return copy")
MISTYPED = ("return block\n\n    def share", "return blck\n\n    def share")


@pytest.mark.parametrize(
    ("source", "pair", "method", "line", "wrong"),
    [
        (ALLOCATOR, COUNTS_TOO_MUCH, "copy_on_write", "return copy", {"1": [1, 2]}),
        (ALLOCATOR, MISTYPED, "allocate", "return blck", {"0": [0, 1]}),
        (TABLE, ("position % self", "position // self"), "slot_mapping", "return slots", None),
    ],
)
def test_a_run_that_broke_off_says_where_and_what_the_part_believes(
    source: str, pair: tuple[str, str], method: str, line: str, wrong: Any
) -> None:
    data = changed(source, pair)["run"]
    function = data["functions"][data["current"][-1][0]]
    assert len(data["current"]) == len(data["events"]) + 1
    assert function["name"].endswith(f".{method}")
    assert function["source"][data["current"][-1][1] - function["first"]].strip() == line
    assert data["broken"]["line"] == data["current"][-1][1]
    assert data["broken"]["message"].endswith(f"is {data['broken']['line']}, in {function['name']}")
    assert data["beliefs"].get(str(len(data["events"])), {}).get("blocks") == wrong


KEPT_TWICE = ("        if self.holders[block] == 0:\n            self.free_blocks.a", "        self.free_blocks.a")
UNCOUNTED = ("        self.holders[block] = 1\n        return", "        return")


@pytest.mark.parametrize(
    ("pair", "note"),
    [
        (
            COUNTS_TOO_MUCH,
            "before the call that broke. By what was called since, block 1 should have gone from ×2 to ×1",
        ),
        (KEPT_TWICE, "block 0 should have gone from ×2 to ×1, block 2 from ×1 to free and block 4 from ×1 to free."),
        (UNCOUNTED, "The counts in red are from the call that broke; the picture, from after the step was given up."),
    ],
)
def test_a_run_that_broke_in_the_middle_of_a_call_says_of_when_its_picture_is(pair: Any, note: str) -> None:
    data = changed(ALLOCATOR, pair)["run"]
    assert note in data["notes"][str(len(data["events"]))]


def test_what_stands_in_red_is_explained_where_it_stands_first() -> None:
    data = changed(ALLOCATOR, MISTYPED)["run"]
    first = min(data["beliefs"], key=int)
    assert data["notes"][first].startswith("In red: how many hold the block")
    assert not any(note.startswith("In red") for at, note in data["notes"].items() if at != first)


@pytest.mark.parametrize("source", [source for name, source, _ in EDITABLE if name not in SLIDING])
def test_a_run_that_holds_has_nothing_of_that(source: str) -> None:
    assert not {"broken", "beliefs"} & run(source)["run"].keys()


def test_what_is_printed_comes_back_and_a_cell_that_shows_nothing_is_told_so() -> None:
    result = run("print('six times', 7)\n")
    assert result["printed"] == "six times 7\n"
    assert result["run"] is None
    assert "the last line must name a recording" in result["error"]


# --- The reciter ----------------------------------------------------------------------------------

TEXTS = (
    "one two three four five six seven eight",
    "one two three four FIVE SIX SEVEN EIGHT",
    "one two three four 5 6 7 8",
)


def served(engine: Engine, prompts: list[tuple[list[int], SamplingParams]]) -> list[list[str]]:
    """The texts of each request, in the order of arrival."""
    for prompt, params in prompts:
        engine.add_request(prompt, params)
    updates = [update for _ in iter(engine.has_unfinished_requests, False) for update in engine.step()]
    outputs = [update.output for update in updates if update.output]
    assert engine.blocks.allocator.num_free == engine.config.num_blocks
    return [[o.text for o in output.outputs] for output in sorted(outputs, key=lambda output: output.request_id)]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_reciters_samples_part_and_its_reads_hold_through_copies_and_preemption(preemption: str) -> None:
    model = Reciter(TEXTS)
    heard: list[Event] = []
    engine = model.engine(num_blocks=11, block_size=2, num_swap_blocks=12, preemption=preemption, max_model_len=12)
    engine.listeners.append(heard.append)
    prompt = model.encode("one two three")
    three, one = SamplingParams(n=3, max_tokens=5), SamplingParams(max_tokens=9)  # beyond the end of its text
    texts = served(engine, [(prompt, one), (prompt, three)])
    assert texts == [
        [" four five six seven eight eight eight eight eight"],
        [" four five six seven eight", " four FIVE SIX SEVEN EIGHT", " four 5 6 7 8"],
    ]
    assert any(isinstance(event, BlockCopied) for event in heard)
    assert any(isinstance(event, SwappedIn) for event in heard) == (preemption == "swap")
    assert {"request_preempted"} <= {event.name for event in heard}


def test_a_reciter_sees_a_table_that_leads_elsewhere() -> None:
    class Elsewhere(BlockTable):
        def slot_mapping(self, start: int, stop: int) -> list[int]:
            return [slot + (slot == 3) for slot in super().slot_mapping(start, stop)]

    model = Reciter(TEXTS)
    engine = model.engine(num_blocks=8, block_size=4, block_table=Elsewhere)
    with pytest.raises(InvariantViolation, match=r"content.*position 3 is looked up in slot 4, which holds 'five'"):
        served(engine, [(model.encode("one two three four five"), SamplingParams(max_tokens=2))])
