"""The trace scene prints what the replay measured, and its options are checked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from minipaged.cli import main


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 requests at about 6 a second, of lengths like those of a chat service: more than one machine can serve."""
    r = random.Random(0)
    lines, seconds = ["time,context_tokens,generated_tokens"], 0.0
    for _ in range(300):
        seconds += r.expovariate(6)
        lines.append(
            f"{seconds:.4f},{min(4000, round(r.lognormvariate(6, 1)) + 1)},{round(r.lognormvariate(5, 0.8)) + 1}"
        )
    path = tmp_path_factory.mktemp("traces") / "synthetic.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def scene(capsys: pytest.CaptureFixture[str], trace: Path) -> Callable[..., tuple[str, str, object]]:
    """Runs `minipaged demo --scene trace` with the trace: what it printed, its errors, its exit status."""

    def run(*arguments: str) -> tuple[str, str, object]:
        with pytest.raises(SystemExit) as exit_:
            main(["demo", "--scene=trace", f"--trace={trace}", *arguments])
        captured = capsys.readouterr()
        return captured.out, captured.err, exit_.value.code

    return run


def test_the_scene_tells_of_every_request_in_eighty_columns(scene: Callable[..., tuple[str, str, object]]) -> None:
    summary = json.loads(scene("--json")[0])
    out, err, status = scene()
    assert (err, status) == ("", 0)
    assert max(len(line) for line in out.split("\n")) <= 80
    assert "\x1b" not in out
    assert summary["served"] + summary["refused_too_long"] == 300
    assert summary["preempted_by_recompute"] > 0  # on this machine that is the cheaper way for single sequences
    assert summary["mean_waiting"] > 1
    words = " ".join(out.split())
    assert f"Served {summary['served']} requests and {summary['generated_tokens']:,} tokens" in words
    swapped, recomputed = summary["preempted_by_swap"], summary["preempted_by_recompute"]
    assert f"Preempted {swapped} times by swapping ({summary['blocks_swapped_out']:,} blocks copied out)" in words
    assert f"and {recomputed} times by recomputing ({summary['tokens_recomputed']:,} tokens)" in words
    assert f"paging wasted {1 - summary['paged_share_of_tokens']:.1%}" in words
    assert "With --pace 0." in words
    last_row = [line.split() for line in out.split("\n") if "....." in line or "####" in line][-1]
    assert last_row[1:4] == [str(summary["served"]), "0", "0"]
    assert "0%" in last_row


def test_at_the_pace_that_the_scene_names_the_queue_does_not_grow(
    scene: Callable[..., tuple[str, str, object]],
) -> None:
    words = scene()[0].split()
    pace = words[words.index("--pace") + 1]
    slower = scene(f"--pace={pace}")[0]
    assert "--pace" not in slower
    assert json.loads(scene(f"--pace={pace}", "--json")[0])["latency"]["p50"] < 20


def test_sizes_and_the_number_of_requests_are_taken(scene: Callable[..., tuple[str, str, object]]) -> None:
    summary = json.loads(scene("--json", "--requests=100", "--num-blocks=20", "--block-size=64")[0])
    assert summary["num_blocks"] == 20
    assert summary["served"] + summary["refused_too_long"] + summary["refused_too_large"] == 100
    assert summary["refused_too_large"] > 0  # 1,280 slots, and requests of up to 2,048 tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests=0"], "requests is 0; it must be 1 or more"),
        (["--pace=0"], r"pace is 0.0; it must be a number above 0"),
        (["--block-size=0"], "block_size is 0; it must be between 1 and 256"),
        (["--num-blocks=0"], "num_blocks is 0; it must be 1 or more"),
        (["--trace=/nowhere.csv"], "cannot read the trace /nowhere.csv"),
        (["--model=x"], "--model has no meaning with --scene trace"),
        (["--scene=preemption"], "--trace has a meaning only with --scene trace"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    scene: Callable[..., tuple[str, str, object]], arguments: list[str], message: str
) -> None:
    out, err, status = scene(*arguments)
    assert (out, status) == ("", 1)
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_the_scene_asks_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--scene=trace"])
    assert exit_.value.code == 1
    assert "name it with --trace FILE" in capsys.readouterr().err
