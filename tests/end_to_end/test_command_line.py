"""`minipaged generate` and `minipaged model` say what the API says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.cli import main
from minipaged.engine.engine import Engine
from minipaged.events import EngineStarted, RequestFinished, StepFinished, TokenGenerated, read_jsonl
from minipaged.models import hub
from tests.effort import thorough

Cli = Callable[..., str]
NAME = "smollm2-135m-instruct"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line, which must succeed, and returns its stdout."""

    def run(*arguments: str | Path) -> str:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert exit_.value.code in (0, None), captured.err
        return captured.out

    return run


@pytest.fixture(scope="module")
def llm(small_llama: Path) -> LLM:
    """It finds nothing of earlier prompts in its cache, like the new engine of each command: then no product is added
    up in another order, and in bfloat16 too the outputs are the same to the last digit."""
    return LLM(small_llama, num_blocks=64, enable_prefix_caching=False)


@pytest.fixture
def generate(cli: Cli, small_llama: Path) -> Cli:
    """`minipaged generate` with the small model."""
    return lambda *arguments: cli("generate", "--model", small_llama, "--num-blocks=64", *arguments)


# --- What is printed ------------------------------------------------------------------------------


def test_a_single_sample_is_streamed_as_the_text_that_the_api_returns(generate: Cli, llm: LLM):
    [output] = llm.generate("The one", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert len(output.outputs[0].text) > 30
    assert generate("The one", "--temperature=0", "--max-tokens=30", "--ignore-eos") == output.outputs[0].text + "\n"


@pytest.mark.parametrize("options", [(), ("--stop", "~never~")])
def test_a_stream_comes_token_by_token(generate: Cli, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]):
    """Each token is printed before the next step begins."""
    order: list[str] = []
    write, run_step = print, Engine.step

    def printed(*values: object, **options: object) -> None:
        if options.get("flush"):
            order.append("print")
        write(*values, **options)  # type: ignore[call-overload]

    def stepped(engine: Engine) -> object:
        order.append("step")
        return run_step(engine)

    monkeypatch.setattr(Engine, "step", stepped)
    monkeypatch.setattr("builtins.print", printed)
    generate("ab", "--temperature=0", "--max-tokens=4", "--ignore-eos", *options)
    assert order == ["step", "print"] * 4


@thorough
def test_a_stream_is_complete_even_where_it_ends_within_a_character(cli: Cli, tiny_model: Path):
    """A token a byte, and random weights: most texts end in a character that is not whole, shown as U+FFFD."""
    ends = set()
    for max_tokens in range(1, 25):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        [output] = LLM(tiny_model, num_blocks=16).generate("東京は", params)
        settings = ("--model", tiny_model, "--num-blocks=16", "--temperature=0", "--ignore-eos")
        out = cli("generate", "東京は", f"--max-tokens={max_tokens}", *settings)
        assert out == output.outputs[0].text + "\n"
        ends.add(out[-2:-1] == "\ufffd")
    assert ends == {True, False}


def test_several_outputs_are_printed_one_after_another_with_their_places(generate: Cli, llm: LLM):
    outputs = llm.generate(["ab", "cd"], SamplingParams(n=2, seed=4, max_tokens=6))
    expected = ""
    for place, output in enumerate(outputs):
        for completion in output.outputs:
            expected += f"--- prompt {place}, output {completion.index}\n{completion.text}\n"
    assert generate("ab", "cd", "--n=2", "--seed=4", "--max-tokens=6") == expected


def test_two_equal_prompts_are_told_apart(generate: Cli):
    out = generate("ab", "ab", "--temperature=0", "--max-tokens=4")
    assert "--- prompt 0, output 0\n" in out
    assert "--- prompt 1, output 0\n" in out


def test_beams_are_printed_best_first_with_their_scores(generate: Cli, llm: LLM):
    [output] = llm.beam_search("ab", BeamSearchParams(3, max_tokens=6, length_penalty=0.5, early_stopping=True))
    expected = "".join(f"--- prompt 0, output {c.index}  score {c.score:.3f}\n{c.text}\n" for c in output.outputs)
    arguments = ("--beam-width=3", "--max-tokens=6", "--length-penalty=0.5", "--early-stopping=true")
    assert generate("ab", *arguments) == expected
    scores = [completion.score for completion in output.outputs]
    assert scores == sorted(scores, reverse=True)


def test_json_holds_the_whole_of_every_output(generate: Cli, llm: LLM):
    params = SamplingParams(n=2, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=9, max_tokens=8, logprobs=3)
    printed = json.loads(generate("ab", "--n=2", "--temperature=0.7", "--top-p=0.9", "--top-k=20", "--min-p=0.01",
                                  "--seed=9", "--max-tokens=8", "--logprobs=3", "--json"))  # fmt: skip
    [expected] = json.loads(json.dumps([asdict(output) for output in llm.generate("ab", params)]))
    [got] = printed
    assert got["outputs"] == expected["outputs"]
    assert got["prompt"] == "ab"
    assert got.keys() == expected.keys()
    assert got["metrics"]["first_token_time"] <= got["metrics"]["finished_time"]


def test_penalties_and_stop_tokens_reach_the_sampler(generate: Cli, llm: LLM):
    settings = {"presence_penalty": 1.5, "frequency_penalty": -1.0, "repetition_penalty": 1.3, "min_tokens": 4}
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=list(range(60, 128)), **settings)
    plain = SamplingParams(temperature=0, max_tokens=30)
    [expected], [without] = llm.generate("ab", params)[0].outputs, llm.generate("ab", plain)[0].outputs
    assert expected.token_ids != without.token_ids
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    arguments += [f"--stop-token-id={token}" for token in range(60, 128)]
    [got] = json.loads(generate("ab", "--temperature=0", "--max-tokens=30", "--json", *arguments))[0]["outputs"]
    assert tuple(got["token_ids"]) == expected.token_ids
    assert (got["finish_reason"], got["stop_reason"]) == ("stop", expected.token_ids[-1])


def test_a_stop_string_ends_the_text_before_it(generate: Cli, llm: LLM):
    whole = llm.generate("ab", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].outputs[0].text
    stop = whole[10:13]  # across tokens
    [output] = llm.generate("ab", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop, "~never~"]))
    [completion] = output.outputs
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 40
    out = generate("ab", "--temperature=0", "--max-tokens=40", "--ignore-eos", "--stop", stop, "--stop", "~never~")
    assert out == completion.text + "\n"


def test_a_chat_goes_through_the_models_template(generate: Cli, llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=10)
    [chatted] = llm.chat([{"role": "user", "content": "hello"}], params)
    [written_out] = llm.generate("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", params)
    assert chatted.prompt_token_ids == written_out.prompt_token_ids
    assert chatted.outputs[0].token_ids == written_out.outputs[0].token_ids
    assert generate("hello", "--chat", "--temperature=0", "--max-tokens=10") == chatted.outputs[0].text + "\n"


# --- What is recorded -----------------------------------------------------------------------------


def test_the_file_of_events_tells_the_whole_run(generate: Cli, tmp_path: Path):
    path = tmp_path / "events.jsonl"
    outputs = json.loads(generate("abc", "abcde", "--seed=2", "--max-tokens=9", "--json", "--events", path))
    events = list(read_jsonl(path.read_text().splitlines()))
    assert isinstance(events[0], EngineStarted)
    assert events[0].num_blocks == 64
    assert isinstance(events[-1], StepFinished)
    for output in outputs:
        tokens = [e.token_id for e in events if isinstance(e, TokenGenerated) and e.request == output["request_id"]]
        assert tokens == output["outputs"][0]["token_ids"]
    assert {e.request for e in events if isinstance(e, RequestFinished)} == {o["request_id"] for o in outputs}


def test_stats_are_printed_to_stderr_when_asked_for(small_llama: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["generate", "abcdefghij", "--model", str(small_llama), "--num-blocks=12", "--block-size=2", "--n=2",
              "--max-tokens=5", "--ignore-eos", "--debug", "--stats"])  # fmt: skip
    what_ran, _, stats = capsys.readouterr().err.partition("\n")
    assert what_ran.startswith("[fast tier on ")
    stats = json.loads(stats)
    assert (stats["blocks_total"], stats["block_size"], stats["generated_tokens"]) == (12, 2, 10)
    assert stats["table_entry_steps"] > stats["block_steps"] > stats["blocks_used"] == 0


# --- Models ---------------------------------------------------------------------------------------


def test_a_model_that_was_not_fetched_is_listed_so(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path))
    assert cli("model", "list") == f"{NAME}  not fetched\n{NAME}-q4_1  not fetched\n"
    with pytest.raises(SystemExit) as exit_:
        main(["model", "where", NAME])
    assert exit_.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{NAME} has not been fetched; run: minipaged model fetch {NAME}\n"


@pytest.mark.model
def test_a_model_that_was_fetched_is_found(cli: Cli, smollm2_folder: Path):
    assert cli("model", "where") == f"{smollm2_folder}\n"
    assert cli("model", "fetch", NAME) == f"{smollm2_folder}\n"
    assert cli("model", "list").startswith(f"{NAME}  {smollm2_folder}\n")
    assert hub.where(NAME) == smollm2_folder
