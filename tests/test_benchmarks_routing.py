"""`benchmarks/routing.py`: four replicas on one clock, at a small scale."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import routing
from minipaged.replicas.routing import PrefixAware, RoundRobin


class OnePlace(RoundRobin):
    """The first replica, always."""

    def choose(self, token_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        return min(loads)


def test_prefixes_are_found_more_often_and_nobody_has_too_much_to_do() -> None:
    requests = routing.hot_prefixes(160)
    found = {name: routing.simulate(requests, make(), load=0.7) for name, make in routing.ROUTERS.items()}
    aware = found["prefix-aware"]
    assert aware.hit_rate > max(found["round robin"].hit_rate, found["least loaded"].hit_rate)
    assert aware.most_requests < routing.BALANCED
    assert aware.most_outstanding < routing.BALANCED
    assert found["round robin"].most_requests == 1.0


def test_a_run_is_the_same_every_time() -> None:
    requests = routing.hot_prefixes(60)
    assert requests == routing.hot_prefixes(60)
    first, second = (routing.simulate(requests, PrefixAware(routing.BLOCK_SIZE), load=0.7) for _ in range(2))
    assert first == second


def test_a_trace_says_what_its_prompts_have_in_common(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 2, "hash_ids": [0, 1]},
        {"timestamp": 60_000, "input_length": 1000, "output_length": 3, "hash_ids": [0, 2]},
        {"timestamp": 60_000, "input_length": 9, "output_length": 3, "hash_ids": [3]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "plain.jsonl").write_text(text)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    requests = routing.read_hashed(tmp_path / "plain.jsonl", 2)
    assert requests == routing.read_hashed(tmp_path / "packed.jsonl.gz", 2)
    assert [request.token_ids() for request in requests] == [[1] * 512 + [2] * 188, [1] * 512 + [3] * 488]
    assert [request.seconds for request in requests] == [0, 60]
    one = routing.simulate(requests, OnePlace(), load=0.1)
    assert one.hit_rate == 512 / 1700
    assert one.most_requests == routing.REPLICAS
    assert routing.simulate(requests, RoundRobin(), load=0.1).hit_rate == 0


def test_a_load_is_of_the_tokens_that_have_to_be_computed_once() -> None:
    requests = [
        routing.Asked(0.0, ((1, 100), (2, 50)), 1),
        routing.Asked(1.0, ((1, 100), (3, 20)), 1),
        routing.Asked(2.0, ((1, 100), (2, 50)), 1),
    ]
    machine = routing.LLAMA_70B_ON_8_A100
    prefilled = routing.REPLICAS * machine.flops_per_second / machine.flops_per_token  # tokens a second
    assert routing.pace_for(0.5, requests, machine) == pytest.approx(0.5 * prefilled / (170 / 2))


def test_the_command_tells_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["routing", "--requests", "8", "--loads", "0.5", "--plot", str(tmp_path / "plot.svg")]
    monkeypatch.setattr("sys.argv", arguments)
    routing.main()
    told = capsys.readouterr().out
    assert all(f"| 0.5 | {name} |" in told for name in routing.ROUTERS)
    assert "prefix-aware" in (tmp_path / "plot.svg").read_text()
