"""Real requests in the place of drawn ones: what is read of files, what is left out, what is served."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minipaged.errors import InvalidRequest
from minipaged.paper.figure import Figure
from minipaged.paper.figures import FIGURES, real_requests
from minipaged.paper.figures.prefix_caching import CachedTrace, HitRate, PrefixCaching
from minipaged.paper.figures.real_requests import ServedLengths, ServedTrace
from minipaged.paper.pages import body
from minipaged.paper.running import Results, run_figure
from minipaged.paper.workloads import (
    MAX_MODEL_LEN,
    PaperRequest,
    at_random,
    at_rate,
    azure,
    draw_pairs,
    in_any_order,
    sharegpt,
    that_fit,
)

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
SHAREGPT = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"
LENGTHS = [(100, 30), (20, 60), (2000, 48), (300, 5), (50, 20), (2000, 47), (100, 2000)]
"""The third and the last one are too long, the one before the last one just not: requests have less than 2,048."""


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A folder with a trace of 70 requests, one each second, and lengths."""
    folder = tmp_path / "traces-of-mine"
    folder.mkdir()
    lines = [f"2023-11-16 18:{15 + i // 60}:{i % 60:02}.5000000,{p},{o}\n" for i, (p, o) in enumerate(LENGTHS * 10)]
    (folder / real_requests.Azure.files[0]).write_text(AZURE + "".join(lines))
    with gzip.open(folder / real_requests.ShareGPTPairs.files[0], "wt") as file:
        file.write(SHAREGPT + "".join(f"{p},{o},{p + o},{p / o}\n" for p, o in LENGTHS))
    return folder


# --- What is read ---------------------------------------------------------------------------------


def test_an_azure_trace_is_read_with_its_times(traces: Path) -> None:
    asked = azure(traces / real_requests.Azure.files[0])
    assert asked[:3] == [PaperRequest(0, 100, 30), PaperRequest(1, 20, 60), PaperRequest(2, 2000, 48)]
    assert len(asked) == 70


def test_lengths_are_read_compressed_or_not(traces: Path, tmp_path: Path) -> None:
    compressed = traces / real_requests.ShareGPTPairs.files[0]
    plain = tmp_path / "lengths.csv"
    plain.write_bytes(gzip.decompress(compressed.read_bytes()))
    assert sharegpt(compressed) == sharegpt(plain) == [PaperRequest(0, *pair) for pair in LENGTHS]


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", SHAREGPT, SHAREGPT + "1\n", SHAREGPT + "1,x,1,1\n", SHAREGPT + "0,3,3,0\n"]
)
def test_what_is_no_file_of_lengths_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"lengths\.csv has no lengths.*num_prefill_tokens"):
        sharegpt(path)


def test_files_that_are_not_there_or_are_not_compressed_are_named(tmp_path: Path) -> None:
    for name in ("none.csv", "text.csv.gz"):
        (tmp_path / "text.csv.gz").write_text(SHAREGPT)
        with pytest.raises(InvalidRequest, match=f"cannot read the lengths .*{name}"):
            sharegpt(tmp_path / name)


def test_requests_as_long_as_the_model_are_left_out() -> None:
    fit = that_fit([PaperRequest(0, *pair) for pair in LENGTHS])
    assert [(one.prompt_tokens, one.output_tokens) for one in fit] == [LENGTHS[i] for i in (0, 1, 3, 4, 5)]
    with pytest.raises(InvalidRequest, match="cannot hold"):
        that_fit([PaperRequest(0, MAX_MODEL_LEN - 1, 1)])


def test_a_slowed_trace_keeps_its_bursts() -> None:
    asked = [PaperRequest(seconds, 8, 8) for seconds in (0.0, 0.1, 0.2, 8.0)]
    slow = at_rate(asked, 0.25)
    assert [one.seconds for one in slow] == pytest.approx([0.0, 0.2, 0.4, 16.0])
    with pytest.raises(InvalidRequest, match="arrive at the same time"):
        at_rate(asked[:1], 1.0)


def test_at_random_as_many_come_in_the_same_time() -> None:
    asked = [PaperRequest(float(i // 100), i, 8) for i in range(2000)]  # a hundred at a time
    spread = at_random(asked, seed=0)
    assert [one.prompt_tokens for one in spread] == list(range(2000))
    times = [one.seconds for one in spread]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= asked[-1].seconds
    gaps = np.diff(times)  # [requests - 1] seconds
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1), "of a Poisson process they are equal"


def test_in_any_order_only_who_comes_when_changes() -> None:
    asked = [PaperRequest(float(i), i + 1, 2 * i + 1) for i in range(100)]
    drawn = in_any_order(asked, seed=0)
    assert [one.seconds for one in drawn] == [one.seconds for one in asked]
    assert drawn != asked
    assert sorted(drawn, key=lambda one: one.prompt_tokens) != drawn
    assert {(one.prompt_tokens, one.output_tokens) for one in drawn} == {(i + 1, 2 * i + 1) for i in range(100)}


def test_pairs_are_drawn_as_they_are_or_apart() -> None:
    asked = [PaperRequest(0, 100 + i, 1000 - i) for i in range(900)]
    pairs = draw_pairs(asked, 3000, np.random.default_rng(0))
    assert all(prompt + output == 1100 for prompt, output in pairs)
    apart = draw_pairs(asked, 3000, np.random.default_rng(0), apart=True)
    assert sum(prompt + output == 1100 for prompt, output in apart) < 30
    assert [sorted(side) for side in zip(*apart, strict=True)] == [sorted(side) for side in zip(*pairs, strict=True)]


# --- Real requests served -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["beyond/azure", "beyond/sharegpt", "beyond/prefix-caching"])
def test_without_a_folder_it_is_said_where_the_trace_is(name: str) -> None:
    figure = FIGURES[name]
    assert figure.needs_traces
    with pytest.raises(InvalidRequest, match=r"--traces FOLDER, with .*github\.com"):
        figure.jobs(quick=True, seed=0)


def result_of(figure: Figure, folder: Path) -> dict[str, Any]:
    return run_figure(figure, Results(folder), quick=True, seed=0, processes=1, done=lambda job: None)


@pytest.mark.parametrize(("name", "left_out"), [("beyond/azure", "20 of 70"), ("beyond/sharegpt", "2 of 7")])
def test_requests_that_are_left_out_are_counted_and_no_path_is_kept(
    name: str, left_out: str, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_requests, "QUICK_SECONDS", 20.0)
    data = result_of(FIGURES[name].given(traces), tmp_path / "results")
    assert left_out in data["notes"][0]
    assert "traces-of-mine" not in json.dumps(data)
    assert data["machines"].keys() == {"OPT-13B"}
    assert {check["verdict"] for check in data["checks"]} == {"not judged"}
    assert f"minipaged paper run {name} --quick --traces FOLDER" in body(FIGURES[name], data, level=2)


def test_all_that_fit_are_served(traces: Path) -> None:
    path = str(traces / real_requests.Azure.files[0])
    found = ServedTrace(path, 1.0, seed=0).run()
    assert (found.served.requests, found.of_file, found.too_long) == (50, 70, 20)
    assert ServedTrace(path, 1.0, seed=0, most=7).run().served.requests == 5


def test_a_burst_waits_longer_than_the_same_requests_at_random(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    lines = [f"{60 * (i // 40)},500,100\n" for i in range(160)]  # forty a minute, all at once
    path.write_text("time,context_tokens,generated_tokens\n" + "".join(lines))
    burst, spread = (ServedTrace(str(path), 0.5, seed=0, poisson=poisson).run().served for poisson in (False, True))
    assert burst.first_token.mean > 5 * spread.first_token.mean


def test_lengths_paired_anew_are_other_requests(traces: Path) -> None:
    job = ServedLengths(str(traces / real_requests.ShareGPTPairs.files[0]), "vLLM", 2.0, 20.0, seed=0)
    assert job.run().served != replace(job, apart=True).run().served


# --- Prefixes -------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A folder with two traces of two prompts by turns, which share a block; the last block of each is not full."""
    both = [{"input_length": 1100, "hash_ids": [0, 1, 2]}, {"input_length": 600, "hash_ids": [0, 3]}]
    for file in PrefixCaching.files:
        with gzip.open(tmp_path / file, "wt") as lines:
            lines.write("".join(json.dumps(both[i % 2]) + "\n" for i in range(4)))
    return tmp_path


def test_an_endless_cache_finds_each_token_that_was_there_before(prompts: Path) -> None:
    path = str(prompts / PrefixCaching.files[0])
    assert CachedTrace(path, 0).run() == HitRate(0 + 512 + 1100 + 600, 2 * (1100 + 600))
    assert CachedTrace(path, 3).run() == HitRate(0 + 512 + 1024 + 512, 2 * (1100 + 600)), "the last block made room"
    assert CachedTrace(path, 0, most=2).run() == HitRate(512, 1700)


def test_the_ceilings_of_prefix_caching_are_told_and_not_judged(prompts: Path, tmp_path: Path) -> None:
    data = result_of(FIGURES["beyond/prefix-caching"].given(prompts), tmp_path / "results")
    ceilings = [check for check in data["checks"] if check["what"].endswith("hit rate of an endless cache")]
    assert [check["paper"] for check in ceilings] == [0.40, 0.66]
    assert all(check["tolerance"] is None for check in ceilings)
    assert all(check["ours"] == pytest.approx(2212 / 3400) for check in ceilings)


def test_a_trace_that_is_cut_off_or_empty_is_refused(prompts: Path) -> None:
    path = prompts / PrefixCaching.files[0]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(InvalidRequest, match="is cut off or not text after line 4; download it again"):
        CachedTrace(str(path), 0).run()
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(InvalidRequest, match="has no requests"):
        CachedTrace(str(path), 0).run()


@pytest.mark.parametrize("line", ['{"hash_ids": [1]}', '{"input_length": 5}', "[]", "no JSON"])
def test_what_is_no_trace_of_prefixes_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    message = r"trace\.jsonl, line 1 is not a JSON object with hash_ids and input_length"
    with pytest.raises(InvalidRequest, match=message):
        CachedTrace(str(path), 0).run()
