"""The tokenizer built from a GGUF file's metadata cuts and names text as the model's own tokenizer does."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from minipaged.errors import ModelError
from minipaged.models.gguf_tokenizer import build_tokenizer, tokenizer_config

Metadata = dict[str, Any]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("gpt-2", ["I", "'ll", "Ġpay", "Ġ12345", "!!", "ĊĊ", "Ġnow"]),
        ("smollm", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "!!", "ĊĊ", "Ġnow"]),
        ("llama-bpe", ["I", "'ll", "Ġpay", "Ġ", "123", "45", "!!ĊĊ", "Ġnow"]),
        ("qwen2", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "!!ĊĊ", "Ġnow"]),
    ],
)
def test_each_rule_cuts_words_its_own_way(gguf_metadata: Metadata, rule: str, words: list[str]) -> None:
    tokenizer = build_tokenizer(gguf_metadata | {"tokenizer.ggml.pre": rule})
    cut = tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 12345!!\n\n now")
    assert [word for word, _ in cut] == words


def test_qwens_rule_is_that_of_transformers(gguf_metadata: Metadata) -> None:
    ours = build_tokenizer(gguf_metadata | {"tokenizer.ggml.pre": "qwen2"})
    theirs = Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer
    text = "Cafe\u0301 I'LL pay 12345!!\n\n  now\tx\r\n"
    assert ours.normalizer.normalize_str(text) == theirs.normalizer.normalize_str(text) != text
    assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


def test_a_rule_that_is_missing_is_not_guessed(gguf_metadata: Metadata) -> None:
    del gguf_metadata["tokenizer.ggml.pre"]
    with pytest.raises(ModelError, match=r"rule 'default'; supported are .* put the model's tokenizer.json"):
        build_tokenizer(gguf_metadata)


def test_merges_apply_within_words_only(gguf_metadata: Metadata) -> None:
    tokenizer = build_tokenizer(gguf_metadata)
    assert tokenizer.encode("in the 12").tokens == ["in", "Ġthe", "Ġ", "1", "2"]
    assert "1 2" in gguf_metadata["tokenizer.ggml.merges"]  # known, but the digits are words of their own
    one_word = build_tokenizer(gguf_metadata | {"tokenizer.ggml.pre": "gpt-2"})
    assert one_word.encode("in the 12").tokens == ["in", "Ġthe", "Ġ", "12"]


def test_control_tokens_are_found_in_text_and_left_out_of_it(gguf_metadata: Metadata) -> None:
    tokenizer = build_tokenizer(gguf_metadata)
    ids = tokenizer.encode("<|im_start|>the<|im_end|>").ids
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids) == "the"


def test_user_defined_tokens_are_found_whole_and_kept(gguf_metadata: Metadata) -> None:
    types = list(gguf_metadata["tokenizer.ggml.token_type"])
    types[300] = 4
    tokens = list(gguf_metadata["tokenizer.ggml.tokens"])
    tokens[300] = "two words"
    tokenizer = build_tokenizer(gguf_metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    ids = tokenizer.encode("xtwo wordsx").ids
    assert 300 in ids
    assert tokenizer.decode(ids) == "xtwo wordsx"
    assert tokenizer.get_vocab_size() == len(tokens)


@pytest.mark.parametrize(
    ("says", "rule", "begins"),
    [(True, "smollm", True), (False, "smollm", False), (None, "smollm", False), (None, "llama-bpe", True)],
)
def test_a_text_begins_with_bos_where_llama_cpp_puts_it(
    gguf_metadata: Metadata, says: bool | None, rule: str, begins: bool
) -> None:
    metadata = gguf_metadata | {"tokenizer.ggml.pre": rule, "tokenizer.ggml.add_bos_token": says}
    if says is None:
        del metadata["tokenizer.ggml.add_bos_token"]
    assert (build_tokenizer(metadata).encode("the").ids[0] == 1) == begins


def test_llama3_takes_a_word_that_is_a_token_whole(gguf_metadata: Metadata) -> None:
    tokens = list(gguf_metadata["tokenizer.ggml.tokens"])
    tokens[300] = "zebra"  # no merges lead here
    metadata = gguf_metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_bos_token": False}
    assert build_tokenizer(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("zebra").ids == [300]
    assert len(build_tokenizer(metadata | {"tokenizer.ggml.pre": "smollm"}).encode("zebra").ids) == 5


def test_the_settings_name_the_special_tokens(gguf_metadata: Metadata) -> None:
    config = tokenizer_config(gguf_metadata)
    named = {role: config[f"{role}_token"] for role in ("bos", "eos", "unk", "pad")}
    assert named == {"bos": "<|im_start|>", "eos": "<|im_end|>", "unk": "<|endoftext|>", "pad": "<|im_end|>"}
    assert config["chat_template"] == gguf_metadata["tokenizer.chat_template"]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_a_text_begins_and_ends_as_the_file_says(gguf_metadata: Metadata, bos: bool, eos: bool) -> None:
    said = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    tokenizer = build_tokenizer(gguf_metadata | said)
    within = tokenizer.encode("in the", add_special_tokens=False).ids
    assert tokenizer.encode("in the").ids == [1] * bos + within + [2] * eos
    assert tokenizer.encode("in the", "in the").ids == [1] * bos + within + within + [2] * eos


@pytest.mark.parametrize("key", ["add_sep_token", "add_space_prefix", "remove_extra_whitespaces"])
def test_what_another_kind_of_tokenizer_does_is_refused(gguf_metadata: Metadata, key: str) -> None:
    assert build_tokenizer(gguf_metadata | {f"tokenizer.ggml.{key}": False})
    with pytest.raises(ModelError, match=rf"tokenizer.ggml.{key} is set.*put the model's tokenizer.json"):
        build_tokenizer(gguf_metadata | {f"tokenizer.ggml.{key}": True})


def test_a_special_token_without_an_entry_is_none(gguf_metadata: Metadata) -> None:
    metadata = gguf_metadata | {"tokenizer.ggml.bos_token_id": 2**32 - 1, "tokenizer.ggml.add_bos_token": True}
    assert "bos_token" not in tokenizer_config(metadata)
    assert build_tokenizer(metadata).encode("in").ids == build_tokenizer(gguf_metadata).encode("in").ids
