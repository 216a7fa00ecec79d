"""Settings are declared once: what LLM takes, what the command line takes, its help and the docs come from there."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer.main

import minipaged
from minipaged import LLM, BeamSearchParams, EngineConfig, InvalidRequest, SamplingParams
from minipaged.cli import app, main
from minipaged.cli.options import WRITTEN, given_for, help_of, names_of
from minipaged.params import EngineSettings, SpeculativeConfig, StructuredOutputsParams
from minipaged.replicas.settings import ReplicaSettings
from minipaged.serve.settings import ServeSettings
from minipaged.setup.settings import GivenSettings, Settings

DOCS = Path(minipaged.__file__).parent.parent / "docs"
KINDS = (SamplingParams, BeamSearchParams, Settings, ServeSettings)
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OTHER_DEFAULTS = {
    "generate": {"max_tokens": 64, "beam_width": 0, "seed": 0},
    "chat": {"max_tokens": 512, "temperature": 0.2, "top_p": 0.9, "seed": 0},
}
"""Someone who tries a prompt wants more than 16 tokens, and sampling unless beams are asked for; whoever chats wants
longer and soberer answers. And what is typed again is to give the same again."""


def declared(kind: Any) -> dict[str, Any]:
    return {each.name: each.default for each in fields(kind)}


DECLARED = declared(ServeSettings) | declared(Settings) | declared(BeamSearchParams) | declared(SamplingParams)


def test_an_llm_takes_every_setting_by_name_and_with_its_default() -> None:
    parameters = dict(inspect.signature(LLM).parameters)
    assert [parameters.pop(name).name for name in ("model", "listeners", "host_sharers")]
    assert {name: each.default for name, each in parameters.items()} == declared(Settings)


def test_type_checkers_are_told_of_every_setting_and_its_type() -> None:
    assert get_type_hints(GivenSettings) == get_type_hints(Settings)


def test_an_engine_goes_by_every_setting_that_is_about_it() -> None:
    """The others are the tier's, or the LLM's to find out."""
    above = {"tier", "device", "dtype", "gpu_memory_utilization", "swap_space", "allocator", "scheduling_policy"}
    above |= {"worker_timeout", "kv_connector", "kv_cache_folder", "kv_cache_disk_space"}
    assert {*names_of(Settings)} - above == {*names_of(EngineConfig)} - {"vocab_size", "eos_token_ids", "group_windows"}
    left_open = {each.name: each.metadata for each in fields(Settings)}
    for each in fields(EngineConfig):
        if each.name in left_open:
            assert each.metadata == left_open[each.name], each.name
    assert issubclass(EngineConfig, EngineSettings)
    assert issubclass(Settings, EngineSettings)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_an_option_of_generate_or_serve(kind: Any) -> None:
    options = {option.name for option in COMMANDS["serve" if kind is ServeSettings else "generate"].params}
    assert {*names_of(kind)} <= options


@pytest.mark.parametrize("command", ["generate", "chat", "demo", "replay-steps", "serve"])
def test_an_option_has_the_default_and_the_help_of_its_field(command: str) -> None:
    """But for the defaults that the command has others for. These options mean something else: a server's seed is the
    engine's."""
    own = {"demo": {"seed", "block_size", "num_blocks"}, "replay-steps": {"dtype"}, "serve": {"seed"}}.get(
        command, set()
    )
    expected = DECLARED | OTHER_DEFAULTS.get(command, {})
    found = [option for option in COMMANDS[command].params if option.name in {*DECLARED} - own]
    assert found
    for option in found:
        assert option.default == (expected[option.name] if expected[option.name] != () else None), option.name
        text = next(help_of(kind)[option.name] for kind in KINDS if option.name in names_of(kind))
        assert option.help.startswith(text), option.name


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_every_name_whole(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However narrow the terminal; below the headings of what they are about."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    options = [option for option in getattr(COMMANDS[command], "params", []) if option.opts[0].startswith("-")]
    for option in options:
        assert not {*option.opts, *option.secondary_opts} - {*re.split(r"[\s,│]+", text)}, option.name
        assert (option.rich_help_panel or "Options") in text
    assert all(len(line) <= columns for line in text.splitlines())


def test_what_is_written_in_another_way_is_a_field() -> None:
    assert WRITTEN.keys() <= DECLARED.keys()


def test_a_command_without_options_gives_the_defaults() -> None:
    given = COMMANDS["generate"].make_context("generate", ["a prompt"]).params
    assert Settings(**given_for(Settings, given)) == Settings()
    assert SamplingParams(**given_for(SamplingParams, given)) == replace(SamplingParams(), max_tokens=64, seed=0)
    served = COMMANDS["serve"].make_context("serve", []).params
    assert ServeSettings(**given_for(ServeSettings, served)) == ServeSettings()
    assert Settings(**given_for(Settings, served)) == Settings()
    with_beams = given_for(BeamSearchParams, given | {"beam_width": 4})
    assert BeamSearchParams(**with_beams) == BeamSearchParams(max_tokens=64)


def test_options_reach_the_fields_that_they_are_called_after() -> None:
    """A value of its own for each of them, as the command line writes it."""
    values = {
        "stop": "a",
        "stop_token_ids": 3,
        "early_stopping": "never",
        "preemption": "swap",
        "kv_cache_dtype": "fp8",
        "scheduling_policy": "priority",
        "max_tokens": 99,
        "logprobs": 1,  # as many as there are tokens to report in place of the likeliest
        "logit_bias": '{"5": 1.5}',
        "bad_words": "b",
        "min_tokens": 0,  # a form says where an output may end
        "structured_outputs": '{"choice": ["yes", "no"]}',
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    }
    values |= {"tier": "reference", "device": "cpu", "dtype": "float64", "allocator": f"{__file__}:Allocator"}
    values["kv_connector"] = "a folder"
    values |= {"kv_cache_tiers": "host", "kv_cache_folder": "a folder"}
    switches = {"ignore_eos": True, "debug": True, "enable_prefix_caching": False, "async_scheduling": False}
    switches |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
    switches |= {"spaces_between_special_tokens": False}
    repeated = {"stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids"}
    repeated |= {"kv_cache_tiers"}
    number, line, expected = 1, ["a prompt"], dict[str, Any](switches)
    for option in COMMANDS["generate"].params:
        if option.name in switches:
            line.append((option.secondary_opts or option.opts)[0])
        elif option.name in DECLARED:
            number += 1
            value = values.get(option.name, number / 1000 if isinstance(option.default, float) else number)
            line.append(f"{option.opts[0]}={value}")
            expected[option.name] = (value,) if option.name in repeated else value
    expected["logit_bias"] = {5: 1.5}
    expected["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    expected["structured_outputs"] = StructuredOutputsParams(choice=("yes", "no"))
    given = COMMANDS["generate"].make_context("generate", line).params
    found = {name: value for kind in KINDS for name, value in given_for(kind, given).items()}
    assert found.pop("allocator").__name__ == Allocator.__name__
    assert found.pop("kv_connector").folder == Path("a folder")
    del expected["allocator"], expected["kv_connector"]
    assert {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()} == expected
    given["swap_space"] = None  # the other way to say num_swap_blocks
    given["kv_connector"] = None  # does not go without prefix caching, nor with several ranks
    given |= {"kv_cache_tiers": (), "kv_cache_folder": None, "kv_cache_disk_space": 4.0}  # the same
    for kind in KINDS:
        kind(**given_for(kind, given))


class Allocator:
    """What `--allocator` names above."""


@pytest.mark.parametrize("kind", [*KINDS, EngineConfig])
def test_every_field_says_what_it_is(kind: Any) -> None:
    texts = help_of(kind)
    assert texts.keys() == {*names_of(kind)}
    assert all(texts.values())


@pytest.mark.parametrize("text", ["5", "{5: 1}", '{"five": 1}', "[[5, 1]]", '{"5": 1'])
def test_a_logit_bias_that_is_no_json_object_of_tokens_is_refused(text: str) -> None:
    given = COMMANDS["generate"].make_context("generate", ["a prompt", f"--logit-bias={text}"]).params
    with pytest.raises(InvalidRequest, match=r"^--logit-bias is .*; write it as a JSON object"):
        given_for(SamplingParams, given)


@pytest.mark.parametrize("text", ["yes", '["yes"]', '{"choices": ["yes"]}', "{"])
def test_structured_outputs_that_are_no_json_object_of_fields_are_refused(text: str) -> None:
    given = COMMANDS["generate"].make_context("generate", ["a prompt", f"--structured-outputs={text}"]).params
    with pytest.raises(InvalidRequest, match=r"^--structured-outputs is .*; write it as a JSON object"):
        given_for(SamplingParams, given)


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (2, 4)),
        ({"model": None}, (5, 5)),
        ({"model": "ngram"}, (5, 5)),
        ({"model": "[ngram]"}, (5, 5)),
    ],
)
def test_lengths_of_a_prompt_lookup_that_are_left_open_are_vllms(
    given: dict[str, Any], lengths: tuple[int, int]
) -> None:
    asked = Settings(speculative_config=NGRAM | given).speculation
    assert asked is not None
    assert asked.lengths == lengths
    assert Settings(speculative_config=asked).speculation == asked
    assert Settings().speculation is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "draft_model"},
            "^method is 'draft_model', but there is no model; give",
        ),
        ({"method": "eagle"}, "is 'eagle'; choose 'ngram' or 'draft_model'"),
        ({"model": "a/small-model"}, "^model is 'a/small-model', but the method 'ngram' needs none; leave it out, or"),
        ({"method": "draft_model", "model": 3}, "^model is 3; give the draft model's name or its folder"),
        ({"method": "draft_model", "model": "a", "prompt_lookup_max": 3}, "are for the method 'ngram'; leave them out"),
        ({"draft_tensor_parallel_size": 2}, "^draft_tensor_parallel_size is 2; the draft model runs as the model does"),
        (
            {"temperature": 1},
            "^speculative_config has the key 'temperature', which is unknown here; it may have ",
        ),
        ({"num_speculative_tokens": 0}, "^num_speculative_tokens is 0; it must be between 1 and 128"),
        ({"prompt_lookup_min": 0}, "^prompt_lookup_min is 0; it must be between 1"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "^prompt_lookup_min is 5, more than prompt_lookup_max, "),
        ({"disable_by_batch_size": 1}, "^disable_by_batch_size is 1; it must be 2 or more"),
    ],
)
def test_drafts_that_there_are_not_are_refused_by_name_before_the_model_is_looked_for(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        LLM("/no/such/model", speculative_config=NGRAM | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "^speculative_config is 'ngram'; give a dict"),
        ({"method": "ngram"}, "^speculative_config has no num_speculative_tokens; give it"),
        ({"num_speculative_tokens": 4}, "^speculative_config has no method; give it"),
    ],
)
def test_a_speculative_config_needs_its_two_keys(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Settings(speculative_config=given)


@pytest.mark.parametrize(
    ("model", "method"), [("ngram", "ngram"), ("[ngram]", "ngram"), ("a/small-model", "draft_model")]
)
def test_the_model_says_how_to_draft_where_no_method_is_given(model: str, method: str) -> None:
    asked = SpeculativeConfig.read({"model": model, "num_speculative_tokens": 4})
    assert (asked.method, asked.model) == (method, model if method == "draft_model" else None)


def test_drafts_and_asynchronous_scheduling_are_refused_together_where_both_are_asked_for() -> None:
    asked, sizes = SpeculativeConfig(**NGRAM), {"num_blocks": 8, "max_model_len": 8, "vocab_size": 8}
    with pytest.raises(InvalidRequest, match=r"^speculative_config and async_scheduling are both given"):
        Settings(speculative_config=NGRAM, async_scheduling=True)
    assert Settings(speculative_config=NGRAM, async_scheduling=False).speculation
    with pytest.raises(InvalidRequest, match=r"^speculative_config and async_scheduling are both given"):
        EngineConfig(speculative_config=asked, async_scheduling=True, **sizes)
    with pytest.raises(InvalidRequest, match=r"^speculative_config is given, but some .* max_model_len of at most 6"):
        EngineConfig(speculative_config=asked, group_windows=(None, 6), **sizes)


@pytest.mark.parametrize("text", ["ngram", "{", "4"])
def test_a_speculative_config_that_is_no_json_object_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "a prompt", "--model=/no/such/model", f"--speculative-config={text}"]
    assert "JSON object" in (said := told(line, capsys)) or "give a dict" in said


@pytest.mark.parametrize("name", ["", " ", "\t\n"])
def test_a_name_by_which_nobody_can_ask_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^served_model_name is .*; give it a name"):
        ServeSettings(served_model_name=("right", name))


@pytest.mark.parametrize(
    "origin", ["*", "https://example.org", "http://127.0.0.1:8080", "http://[::1]:80", "chrome-extension://abc"]
)
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    assert ServeSettings(cors_origin=(origin,)).cors_origin == (origin,)


@pytest.mark.parametrize(
    "origin",
    [
        *("", "example.org", "example.org:80", "https://", "https://example.org/", "https://example.org/page"),
        *("https://example.org?a", "https://example.org#a", "https://a@example.org", "https://exam ple.org"),
        *("https://Example.org", "HTTPS://example.org", "https://*.example.org", "**", "https://a.org,https://b.org/"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^cors_origin is .*; write it as browsers send it, as in https://"):
        ServeSettings(cors_origin=("*", origin))


def test_a_setting_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'swap_spaces'"):
        LLM(swap_spaces=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("bad", [{"num_blocks": 0}, {"gpu_memory_utilization": True}, {"max_num_seqs": 1.0}])
def test_a_bad_setting_is_refused_before_the_model_is_looked_for(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"^{next(iter(bad))} is .*; it must be "):
        LLM("/no/such/model", **bad)


def test_the_glossary_names_settings_that_there_are() -> None:
    section = (DOCS / "glossary.md").read_text().partition("## Names of the API")[2]
    prose, table = (
        re.search(r"of the settings(.*?), and a request", section, re.DOTALL),
        re.findall(r"^\| (`.*?) \|", section, re.MULTILINE),
    )
    assert prose
    assert table
    names = re.findall(r"`(\w+)`", " ".join([prose[1], *table]))
    assert len(names) > 10
    assert {*names} <= {*names_of(Settings)}


def told(line: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error that a command line ends with."""
    with pytest.raises(SystemExit) as end:
        main(line)
    assert end.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--max-replicas=2", "--ray-address=auto", "--routing=prefix", "--cpus-per-replica=1"]
)
def test_what_is_said_of_replicas_where_there_are_none_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = option.partition("=")[0]
    said = f"error: {name} is given, but there are no replicas; say how many with --replicas\n"
    assert told(["serve", "/no/such/model", option], capsys) == said


@pytest.mark.parametrize("given", [{"routing": "least-loaded"}, {"ray_address": "auto"}, {"gpus_per_replica": 0}])
def test_so_it_is_in_python(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"^{next(iter(given))} is given, but there are no replicas; say how many"):
        ReplicaSettings(**given)
    assert ReplicaSettings(replicas=1, **given)


@pytest.mark.parametrize(
    ("option", "said"), [("--kv-connector=", "the folder is ''; name one"), ("--allocator=", "write it as FILE.py:")]
)
def test_an_option_that_names_nothing_is_refused(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in told(["generate", "a prompt", "--model=/no/such/model", option], capsys)


@pytest.mark.parametrize(("missing", "page"), [("ray", "replicas.md"), ("uvicorn", "serving.md")])
def test_what_is_to_be_installed_is_what_the_docs_say(
    missing: str, page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["serve", "/no/such/model"]
    if missing == "ray":
        line.append("--replicas=2")
    for name in [each for each in sys.modules if each.startswith(("minipaged.replicas.server", "minipaged.serve."))]:
        if not name.endswith("settings"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    [command] = re.findall(r"pip install .*$", told(line, capsys), re.MULTILINE)
    assert command in (DOCS / page).read_text()


def test_a_chat_takes_what_says_where_its_model_runs_and_its_blocks_are() -> None:
    options = {option.name for option in COMMANDS["chat"].params}
    assert {"device", "dtype", "kv_cache_dtype", "kv_connector", "worker_timeout"} <= options
    assert {"tensor_parallel_size", "pipeline_parallel_size"} <= options


def test_one_string_is_one_name_and_not_its_letters() -> None:
    assert ServeSettings(served_model_name="llama").served_model_name == ("llama",)
    assert ServeSettings(cors_origin="*").cors_origin == ("*",)
