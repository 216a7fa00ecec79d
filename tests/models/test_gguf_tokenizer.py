"""The tokenizer built from a GGUF file's metadata cuts and names text as the model's own tokenizer does."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GemmaTokenizer, Qwen2Tokenizer
from transformers.tokenization_utils_base import generate_merges

from minipaged.errors import ModelError
from minipaged.models.gguf_tokenizer import build_tokenizer, tokenizer_config
from tests.models.conftest import GEMMAS_TOKENS, sentence_piece

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


def test_sentence_piece_is_gemmas_tokenizer_in_transformers(gemmas_tokenizer: Metadata) -> None:
    tokens, scores = (gemmas_tokenizer[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
    ids = {token: i for i, token in enumerate(tokens)}
    whole = [*GEMMAS_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = generate_merges(ids, dict(zip(tokens, scores, strict=True)), skip_tokens=whole)
    theirs = GemmaTokenizer(vocab=ids, merges=merges, add_bos_token=False)
    ours = build_tokenizer(gemmas_tokenizer | {"tokenizer.ggml.add_bos_token": False})
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text).input_ids, text
        assert ours.decode(ours.encode(text).ids) == text


TEXTS = ["in the thing and", " the in", "", "Überall: é, 東京!\tthe", "an\nthe\r", "thethe anding"]
"""Texts with bytes, and without more spaces in a row than Gemma's tokenizer in transformers writes as one token."""


@given(text=st.text(alphabet="theindagr é\nß", max_size=40))
def test_sentence_piece_joins_the_pair_with_the_best_score(text: str) -> None:
    """The algorithm by its definition. Among equals it takes the first from the left."""
    metadata = sentence_piece(320)
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    score = {
        token: s for token, s in zip(tokens, scores, strict=True) if "<" not in token and token not in GEMMAS_TOKENS
    }
    ids = {token: i for i, token in enumerate(tokens)}
    expected = [2]
    for part in re.split("(\n\n| {2,3})", text):
        pieces = [part] if part in GEMMAS_TOKENS else list(part.replace(" ", "▁"))
        while joined := [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in score]:
            at = min(joined)[1]
            pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
        for piece in pieces:
            expected += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    assert build_tokenizer(metadata).encode(text).ids == expected


def test_spaces_in_a_row_and_turns_are_tokens_by_themselves(gemmas_tokenizer: Metadata) -> None:
    tokenizer = build_tokenizer(gemmas_tokenizer)
    found = tokenizer.encode("<start_of_turn>in  the   \n\nin<end_of_turn>")
    turn = ["<bos>", "<start_of_turn>", "in", "  ", "the", "   ", "\n\n", "in", "<end_of_turn>"]
    assert found.tokens == turn
    assert tokenizer.decode(found.ids) == "in  the   \n\nin"


def test_no_pieces_join_to_a_byte_or_the_unknown_token(gemmas_tokenizer: Metadata) -> None:
    """A text that spells one out is still a text."""
    tokens = list(gemmas_tokenizer["tokenizer.ggml.tokens"])
    tokens[-11:] = ["<", ">", "0", "A", "<0", "x0", "<0x0", "A>", "un", "<un", "k>"]
    tokenizer = build_tokenizer(gemmas_tokenizer | {"tokenizer.ggml.tokens": tokens})
    assert tokenizer.encode("<0x0A><unk>").tokens == ["<bos>", "<0x0", "A>", "<un", "k>"]


@pytest.mark.parametrize(("says", "first"), [(None, "▁the"), (True, "▁the"), (False, "the")])
def test_a_text_of_sentence_piece_begins_with_a_space_unless_the_file_says_no(
    gemmas_tokenizer: Metadata, says: bool | None, first: str
) -> None:
    metadata = gemmas_tokenizer | {"tokenizer.ggml.add_space_prefix": says}
    if says is None:
        del metadata["tokenizer.ggml.add_space_prefix"]
    tokenizer = build_tokenizer(metadata)
    found = tokenizer.encode("the thing")
    assert found.tokens[1] == first
    assert tokenizer.decode(found.ids) == "the thing"


def test_sentence_piece_begins_with_bos_by_default(gemmas_tokenizer: Metadata) -> None:
    del gemmas_tokenizer["tokenizer.ggml.add_bos_token"]
    assert build_tokenizer(gemmas_tokenizer).encode("the").tokens == ["<bos>", "the"]


def test_sentence_piece_without_scores_or_with_too_few_is_refused(gemmas_tokenizer: Metadata) -> None:
    with pytest.raises(ModelError, match=r"remove_extra_whitespaces is set.*put the model's tokenizer.json"):
        build_tokenizer(gemmas_tokenizer | {"tokenizer.ggml.remove_extra_whitespaces": True})
    scores = gemmas_tokenizer["tokenizer.ggml.scores"]
    with pytest.raises(ModelError, match=r"tokenizer.ggml.scores has 319 entries for 320 tokens.*put the model's"):
        build_tokenizer(gemmas_tokenizer | {"tokenizer.ggml.scores": scores[1:]})
    del gemmas_tokenizer["tokenizer.ggml.scores"]
    with pytest.raises(ModelError, match=r"tokenizer.ggml.scores has 0 entries for 320 tokens.*put the model's"):
        build_tokenizer(gemmas_tokenizer)
