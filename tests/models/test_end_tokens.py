"""The tokens that end an answer come from every file that names one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minipaged import LLM, SamplingParams
from minipaged.models.loading import load_config
from tests.effort import examples
from tests.models import tokenizers
from tests.tiny_model import make_tiny_model

SHAPE = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
IDS = st.none() | st.integers(0, 300) | st.lists(st.integers(0, 300), max_size=3)


def write(folder: Path, name: str, said: dict[str, Any] | None) -> None:
    (folder / name).unlink(missing_ok=True)
    if said is not None:
        (folder / name).write_text(json.dumps(said))


def listed(ids: Any) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=IDS,
    generation=st.none() | st.fixed_dictionaries({}, optional={"eos_token_id": IDS, "top_p": st.just(0.5)}),
    eos=st.sampled_from([None, "</s>", "<|new|>"]),
    as_object=st.booleans(),
    in_older_file=st.booleans(),
    has_tokenizer=st.booleans(),
)
def test_all_files_are_united(
    tmp_path: Path,
    config: Any,
    generation: dict[str, Any] | None,
    eos: str | None,
    as_object: bool,
    in_older_file: bool,
    has_tokenizer: bool,
) -> None:
    """generation_config.json or else config.json, and the tokenizer's own; those that the model does not have apart."""
    backend = tokenizers.byte_level()
    said = {} if eos is None else {"eos_token": {"__type": "AddedToken", "content": eos} if as_object else eos}
    tokenizers.write(backend, tmp_path, **({} if in_older_file else said))
    write(tmp_path, "special_tokens_map.json", said if in_older_file else None)
    if not has_tokenizer:
        (tmp_path / "tokenizer.json").unlink()
    write(tmp_path, "config.json", SHAPE | {"eos_token_id": config})
    write(tmp_path, "generation_config.json", generation)
    own = {"</s>": 2, "<|new|>": backend.get_vocab_size()}.get(eos or "")
    expected = listed((generation or {}).get("eos_token_id")) or listed(config)
    expected = [*expected, *([own] if has_tokenizer and own is not None else [])]
    assert load_config(tmp_path).eos_token_ids == tuple(dict.fromkeys(each for each in expected if each < 264))


def test_an_answer_ends_at_the_tokenizers_own_token(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, eos_token_id=0)  # the tokenizer says <|im_end|>, which is 2
    llm = LLM(str(folder), tier="reference", dtype="float32", num_blocks=16, block_size=4)
    ends = SamplingParams(temperature=1, logit_bias={2: 100.0}, max_tokens=4)
    [output] = llm.generate([[5]], ends)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ((2,), "stop")


@pytest.mark.parametrize("eos", ["", "a token of no vocabulary"])
def test_an_end_token_that_the_model_does_not_have_ends_nothing(tmp_path: Path, eos: str) -> None:
    folder = make_tiny_model(tmp_path, eos_token_id=[1, 10_000])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config.json", settings | {"eos_token": eos})
    assert load_config(folder).eos_token_ids == (1,)
