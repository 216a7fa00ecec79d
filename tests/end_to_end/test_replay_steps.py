"""Replay-equals-run: steps recorded on one tier, run on the other, with all that a real engine does in between."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from minipaged.cli import main
from minipaged.contracts import Sampled, SamplingInput
from minipaged.events import Event
from minipaged.fast.llama import Llama as FastLlama
from minipaged.llm import LoadedModel
from minipaged.recordings.replay_steps import Replay, open_replay
from minipaged.recordings.step_files import Header, StepRecorder, read_recording
from minipaged.reference.llama import Llama
from tests.effort import quick_cases, thorough
from tests.end_to_end.small_llama import make_small_llama
from tests.memory import give_back

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 12, 13], [40, 41], [5, 6, 7, 8, 9, 99, 98, 97, 96, 95, 94, 93]]
OTHER = {"reference": "fast", "fast": "reference"}


def record(llm: LLM, path: Path, cancel_after: int = 9) -> set[str]:
    """Serve some of everything, and write down the steps; returns what has happened, by the names of events."""
    happened: set[str] = set()

    def note(event: Event) -> None:
        happened.add(getattr(event, "mode", event.name))

    with path.open("wb") as file:
        engine = llm.engine
        engine.runner = recorder = StepRecorder(engine.runner, file, Header.of(str(llm.folder), llm))
        engine.listeners.append(note)
        kinds: list[SamplingParams | BeamSearchParams] = [
            SamplingParams(temperature=0, max_tokens=24),
            SamplingParams(n=3, seed=5, max_tokens=16, ignore_eos=True),
            SamplingParams(n=2, temperature=0.7, top_p=0.9, seed=6, presence_penalty=0.4, max_tokens=20, min_tokens=9),
            BeamSearchParams(beam_width=3, max_tokens=14),
            SamplingParams(n=2, seed=7, max_tokens=14, structured_outputs=StructuredOutputsParams(regex="[a-e ]{5,}")),
        ]
        for i, params in enumerate(kinds * 2):
            engine.add_request(PROMPTS[i % 4], params, request_id=str(i))
        for step in range(500):
            engine.step()
            if step == cancel_after:
                engine.abort("4")
        assert not engine.has_unfinished_requests()
        recorder.close()
    return happened


def replay(path: Path, model: LoadedModel) -> Replay:
    header, steps = read_recording(path)
    return open_replay(header, steps, model)


@quick_cases(4)
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_what_one_tier_ran_the_other_runs_again(
    small_llama: Path, tier: str, preemption: str, async_scheduling: bool, tmp_path: Path
) -> None:
    """Forks, beams, penalties, prefix hits, chunked prompts, preemption, a request that is cancelled."""
    models = {name: LoadedModel.load(small_llama, name, dtype="float32") for name in OTHER}
    llm = LLM(
        models[tier],
        block_size=4,
        num_blocks=26,
        num_swap_blocks=30,
        max_model_len=64,
        preemption=preemption,  # type: ignore[arg-type]
        max_num_batched_tokens=16,
        async_scheduling=async_scheduling,
        debug=True,
    )
    happened = record(llm, tmp_path / "steps")
    assert happened >= {preemption, "sequence_forked", "block_copied", "prefix_reused", "beam_finished"}
    for other in (OTHER[tier], tier):
        replayed = replay(tmp_path / "steps", models[other])
        for difference in replayed:
            assert difference.objection is None, difference
        assert replayed.num_choices > 100
        assert replayed.largest_error < 1e-3


@thorough
@pytest.mark.model
def test_smollm2_recorded_on_the_reference_runs_on_the_fast_tier(smollm2_folder: Path, tmp_path: Path) -> None:
    sizes = {"num_blocks": 16, "block_size": 4, "max_model_len": 48, "num_swap_blocks": 8}
    llm = LLM(smollm2_folder, tier="reference", dtype="float32", **sizes)  # type: ignore[arg-type]
    with (tmp_path / "steps").open("wb") as file:
        llm.engine.runner = recorder = StepRecorder(llm.engine.runner, file, Header.of(str(smollm2_folder), llm))
        prompts = ["Once upon a time there was", "Once upon a time there were two"]
        llm.generate(prompts, SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=12, ignore_eos=True))
        recorder.close()
    del llm, recorder
    give_back()  # one tier's weights at a time
    replayed = replay(tmp_path / "steps", LoadedModel.load(smollm2_folder, "fast", dtype="float32"))
    for difference in replayed:
        assert difference.objection is None, difference
    assert replayed.num_choices == 48


# --- The command ----------------------------------------------------------------------------------

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line: its exit status, stdout and stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def recording(cli: Cli, small_llama: Path, tmp_path: Path) -> Path:
    path = tmp_path / "steps"
    code, _, err = cli(
        *("generate", "The one", "and the other", "--model", small_llama, "--tier=reference", "--n=2"),
        *("--num-blocks=40", "--max-tokens=12", "--record-steps", path),
    )
    assert code == 0, err
    return path


def test_recorded_steps_are_replayed_from_the_command_line(cli: Cli, recording: Path, tier: str) -> None:
    code, out, err = cli("replay-steps", recording, "--tier", tier)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-2].startswith("recorded on the reference tier in float32, run on the " + tier)
    assert ": 0 differ, and 0 at ties" in lines[-1]


def test_a_runner_that_chooses_otherwise_is_found_out(
    cli: Cli, recording: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrong token once; the recorded ones go on, so that it is the only one."""
    kind: Any = {"reference": Llama, "fast": FastLlama}[tier]
    right = kind.sample

    def wrong(self: Any, logits: Any, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
        chosen = list(right(self, logits, inputs))
        for i, one in enumerate(inputs):
            if one.position == 9 and one.stream == 1:
                chosen[i] = Sampled(100, chosen[i].logprob, None)
        return chosen

    monkeypatch.setattr(kind, "sample", wrong)
    code, out, _ = cli("replay-steps", recording, "--tier", tier)
    assert code == 1
    *found, _, last = out.splitlines()
    assert len(found) == 2
    for line in found:
        assert "position 9: token 100 was chosen, " in line
        assert "is recorded, their logits differ by " in line
        assert "falls " in line
    assert ": 2 differ, and 0 at ties" in last


def test_a_recording_of_another_model_is_refused(cli: Cli, recording: Path, tmp_path: Path) -> None:
    other = make_small_llama(tmp_path / "other", hidden_size=32, vocab_size=130)
    code, out, err = cli("replay-steps", recording, "--model", other)
    assert (code, out) == (1, "")
    assert "the steps were recorded with another model" in err
    assert "which differs in vocab_size, hidden_size, head_dim; give that model with --model" in err


def test_a_model_that_is_gone_and_a_file_that_is_none_are_told(cli: Cli, recording: Path, tmp_path: Path) -> None:
    code, _, err = cli("replay-steps", recording, "--model", tmp_path / "nowhere")
    assert code == 1
    assert err.startswith("error: ")
    (tmp_path / "text").write_text("hello")
    code, out, err = cli("replay-steps", tmp_path / "text")
    assert (code, out) == (1, "")
    assert "is no recording; `minipaged generate --record-steps FILE` writes one" in err


def test_steps_cannot_be_written_where_there_is_no_folder(cli: Cli, small_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "steps"
    code, _, err = cli("generate", "a", "--model", small_llama, "--num-blocks=40", "--record-steps", path)
    assert code == 1
    assert "cannot write steps to" in err


def test_steps_with_a_draft_model_are_not_recorded(cli: Cli, small_llama: Path, tmp_path: Path) -> None:
    path, asked = tmp_path / "steps", {"model": str(small_llama), "num_speculative_tokens": 2}
    command = ["generate", "a", "--model", small_llama, "--num-blocks=40", "--speculative-config", json.dumps(asked)]
    code, _, err = cli(*command, "--record-steps", path)
    assert code == 1
    assert "steps in which a draft model guesses cannot be recorded" in err
    assert not path.exists()
    code, out, _ = cli(*command, "--max-tokens=4")
    assert code == 0
    assert out
