"""Structured outputs with whole models: every finished text has its form, on both tiers, whatever the engine does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from minipaged import LLM, InvalidRequest, RequestOutput, SamplingParams, StructuredOutputsParams
from minipaged.cli import main
from minipaged.events import Event, RequestPreempted
from minipaged.llm import LoadedModel
from tests.memory import give_back

SIZES: dict[str, Any] = {"num_blocks": 400, "block_size": 4}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "a schema": StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
    "a regex": StructuredOutputsParams(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "choices": StructuredOutputsParams(choice=["red", "blue", "bluish green"]),
    "a grammar": StructuredOutputsParams(grammar='start: "f(" (start | /[a-c]{1,3}/) ")"'),
}


def check_form(name: str, text: str) -> None:
    if name == "a schema":
        jsonschema.validate(json.loads(text), PERSON)
    elif name == "a regex":
        assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text)
    elif name == "choices":
        assert text in ("red", "blue", "bluish green")
    else:
        assert re.fullmatch(r"(f\()+[a-c]{1,3}\)+", text)
        assert text.count("(") == text.count(")")


def check(outputs: list[RequestOutput], names: list[str]) -> None:
    """Each output that has come to its end has its form; one that was cut says so."""
    for output, name in zip(outputs, names, strict=True):
        assert output.error is None
        for one in output.outputs:
            if one.finish_reason == "stop":
                check_form(name, one.text)
            else:
                assert one.finish_reason == "length"
    reasons = [one.finish_reason for output in outputs for one in output.outputs]
    assert reasons.count("stop") > len(reasons) // 2


ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 3, "n": 3},
    {"seed": 4, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    {"seed": 5, "presence_penalty": 0.7, "repetition_penalty": 1.1, "logprobs": 2},
    {"seed": 6, "logit_bias": {9: 2.0}, "stop": ["ee"], "ignore_eos": True},
]


def serve(llm: LLM) -> tuple[list[str], list[RequestOutput]]:
    names = [name for name in FORMS for _ in ASKED]
    params = [
        SamplingParams(max_tokens=60, structured_outputs=FORMS[name], **asked) for name in FORMS for asked in ASKED
    ]
    return names, llm.generate(["The answer:"] * len(params), params, use_tqdm=False)


@pytest.fixture(scope="module")
def loaded(tier: str, small_llama: Path) -> LoadedModel:
    return LoadedModel.load(small_llama, tier, dtype="float32")


@pytest.fixture(scope="module")
def expected(small_llama: Path) -> list[tuple[tuple[int, ...], ...]]:
    """The tokens of the reference tier, with room for all."""
    _, outputs = serve(LLM(LoadedModel.load(small_llama, "reference", dtype="float32"), **SIZES))
    return tokens_of(outputs)


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(one.token_ids for one in output.outputs) for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True},
        {"num_blocks": 52, "num_swap_blocks": 200, "preemption": "swap"},
        {"num_blocks": 52, "preemption": "recompute", "enable_prefix_caching": False},
    ],
    ids=["with room", "asynchronously", "swapped", "recomputed"],
)
def test_outputs_have_their_forms_and_both_tiers_choose_the_same(
    loaded: LoadedModel, expected: list[tuple[tuple[int, ...], ...]], settings: dict[str, Any]
) -> None:
    preempted: list[Event] = []
    llm = LLM(loaded, debug=True, listeners=[preempted.append], **SIZES | settings)
    names, outputs = serve(llm)
    whole = [i for i, output in enumerate(outputs) if output.outputs[0].stop_reason is None]  # ended by no stop string
    check([outputs[i] for i in whole], [names[i] for i in whole])
    assert tokens_of(outputs) == expected
    assert any(isinstance(event, RequestPreempted) for event in preempted) == ("preemption" in settings)


@pytest.mark.model
def test_the_real_model_writes_what_a_schema_asks_for(tier: str) -> None:
    give_back()
    llm = LLM("smollm2-135m-instruct", tier=tier, num_blocks=200)
    question = [{"role": "user", "content": "Describe a person as JSON with name, age and tags."}]
    names = ["a schema", "a regex", "choices"]
    params = [SamplingParams(temperature=0, max_tokens=60, structured_outputs=FORMS[name]) for name in names]
    outputs = llm.chat([question] * len(names), params, use_tqdm=False)
    check(outputs, names)
    assert [one.outputs[0].finish_reason for one in outputs] == ["stop"] * len(names)


def test_the_command_line_takes_a_form(small_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tier", "reference", "--num-blocks", "64", "--structured-outputs", '{"choice": ["red", "blue"]}']
    with pytest.raises(SystemExit):
        main(["generate", "The answer:", "--model", str(small_llama), *options])
    out, err = capsys.readouterr()
    assert "red" in out or "blue" in out, err


def test_a_model_without_a_tokenizer_refuses_a_form(loaded: LoadedModel) -> None:
    llm = LLM(replace(loaded, tokenizer=None), **SIZES)
    with pytest.raises(InvalidRequest, match="structured_outputs need a tokenizer"):
        llm.generate([[5, 6]], SamplingParams(structured_outputs=FORMS["choices"]), use_tqdm=False)
