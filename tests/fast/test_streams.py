"""The CUDA path puts its work in order: nothing races, and all get their tokens, with graphs and running ahead or not.

Rehearsed on a pretended GPU, in a process of its own (`rehearse_streams.py`). What it would find is tried, too: each
wait of the fast tier forgotten, and mistakes of other kinds (`stream_mistakes.py`).
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.effort import thorough
from tests.fast.kept import kept
from tests.fast.stream_mistakes import MISTAKES, Mistake

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no Triton for this machine", allow_module_level=True)

pytestmark = thorough

Report = dict[str, Any]


@pytest.fixture(scope="session")
def reports() -> dict[str, Report]:
    """By name. Rehearsed by one process, and only if something has changed."""
    printed = kept("rehearsed-streams", "tests.fast.rehearse_streams")
    return {report["name"]: report for report in map(json.loads, printed.splitlines())}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
def test_nothing_races_and_every_request_gets_the_references_tokens(
    reports: dict[str, Report], asynchronous: bool, graphs: bool
) -> None:
    """Also after errors. And the host waits for the device only where it fetches the tokens that were chosen."""
    report = reports[f"{asynchronous=}, {graphs=}"]
    assert report["races"] == {}
    assert report["others"] == []
    assert list(report["waits"]) == ["Arriving.arrays"]
    happened = report["happened"]
    assert happened["failures"] == 2
    apart = {"sizes of graphs", "sizes with padding", "steps in two parts"}
    apart |= {"blocks stored", "blocks loaded", "blocks passed"}
    served = {name: number for name, number in happened.items() if name not in apart}
    assert all(served.values()), served
    assert (happened["steps in two parts"] > 0) == graphs
    assert (happened["sizes of graphs"] >= 3 and happened["sizes with padding"] >= 1) == graphs, happened


def test_nothing_races_for_groups_of_layers(reports: dict[str, Report]) -> None:
    """Each has tables of its own, whose slots a graph looks up, and gives back blocks that are swapped and computed."""
    report = reports["windows"]
    assert report["races"] == {}
    assert report["others"] == []
    assert list(report["waits"]) == ["Arriving.arrays"]
    happened = {name: n for name, n in report["happened"].items() if name not in ("blocks stored", "blocks loaded")}
    assert all(happened.values()), happened
    assert happened["blocks passed"] > 20


def test_blocks_are_handed_over_in_order(reports: dict[str, Report]) -> None:
    """From the reference and to it. Of that, the host waits for blocks that it reads, and for nothing else."""
    producer, consumer = reports["kv_producer"], reports["kv_consumer"]
    assert consumer["happened"]["blocks loaded"] > 3
    assert producer["happened"]["blocks stored"] > 3
    assert consumer["races"] == producer["races"] == {}
    assert consumer["others"] == producer["others"] == []
    assert {*consumer["waits"]} == {"Arriving.arrays"}
    assert {*producer["waits"]} == {"Arriving.arrays", "read_blocks"}


def test_host_blocks_are_read_when_they_have_arrived(reports: dict[str, Report]) -> None:
    """For the disk. The host waits for the copies then, and for nothing else."""
    report = reports["floors"]
    assert report["happened"]["blocks stored"] > 3
    assert report["races"] == {}
    assert report["others"] == []
    assert {*report["waits"]} == {"Arriving.arrays", "KVCache.read_host"}


def test_what_the_pretended_gpu_should_find_it_finds_and_nothing_else(reports: dict[str, Report]) -> None:
    tried = {name: report["found"] for name, report in reports.items() if "careful=" in name}
    assert len(tried) >= 20
    assert tried == {name: name.endswith("careful=False") for name in tried}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found(reports: dict[str, Report], mistake: Mistake) -> None:
    report = reports[mistake.name]
    assert report["found"]
    assert report[mistake.field]
    assert mistake.shows in str(report[mistake.field])
    assert bool(report["error"]) == (mistake.field == "error")
