"""Text to ids and back; chats through the model's own template."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from minipaged.errors import InvalidRequest, ModelError
from minipaged.models.gguf import convert
from minipaged.models.tokenizer import Tokenizer
from tests.effort import examples, thorough
from tests.models import tokenizers

MakeLlama = Callable[..., LlamaForCausalLM]
WriteGGUF = Callable[..., Path]

# SmolLM2's vocabulary lacks six control characters, and the bytes that only planes 4 to 11 of Unicode need (where
# nothing is assigned): its tokenizer drops them, in transformers as here.
TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF),
    max_size=40,
)


@pytest.fixture
def folder(tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path) -> Path:
    convert(write_gguf(tiny_llama()), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer(smollm2)


def test_a_chat_is_written_out_up_to_the_answer(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": "in the"}])
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "user\nin the\nassistant\n"
    written = "<|im_start|>user\nin the<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer.encode(written)
    assert tokenizer.decode(ids, skip_special_tokens=False) == written


def test_bos_comes_once_where_the_template_writes_it(
    tiny_llama: MakeLlama, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    convert(write_gguf(tiny_llama(), **{"tokenizer.ggml.add_bos_token": True}), tmp_path / "model")
    tokenizer = Tokenizer(tmp_path / "model")
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False) == tokenizer.encode("the")[1:]
    assert tokenizer.encode_chat([{"role": "user", "content": "the"}]).count(1) == 2  # user and assistant


def test_a_model_without_a_chat_template_says_so(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no chat template; use generate"):
        Tokenizer(folder).encode_chat([{"role": "user", "content": "hi"}])


def test_messages_that_cannot_be_written_out_are_refused(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    with pytest.raises(InvalidRequest, match="the chat is empty"):
        tokenizer.encode_chat([])
    with pytest.raises(InvalidRequest, match=r'a "role" and a "content"; got .*\'text\''):
        tokenizer.encode_chat([{"role": "user", "text": "hi"}])
    with pytest.raises(InvalidRequest, match="got 'hi'"):
        tokenizer.encode_chat(["hi"])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="refuses these messages: roles must alternate"):
        Tokenizer(folder).encode_chat([{"role": "user", "content": "hi"}])


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a text, or a list of parts that are text; got None"),
        (b"hi", "a text, or a list of parts that are text; got b'hi'"),
        ({"type": "text", "text": "hi"}, "a text, or a list of parts"),
        ([{"type": "image_url", "image_url": {"url": "a.png"}}], "cannot read a part of type 'image_url'"),
        ([{"type": "text"}], r"cannot read a part \{'type': 'text'\}"),
        ([{"type": "text", "text": 3}], "cannot read a part .*3"),
        (["hi"], "cannot read a part 'hi'"),
    ],
)
def test_content_that_is_no_text_is_refused(folder: Path, content: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Tokenizer(folder).encode_chat([{"role": "user", "content": content}])


def test_parts_that_are_text_become_lines(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    parts = [{"type": "text", "text": "in"}, {"type": "text", "text": "the"}]
    chat = [{"role": "user", "content": parts}]
    assert tokenizer.encode_chat(chat) == tokenizer.encode_chat([{"role": "user", "content": "in\nthe"}])
    assert chat == [{"role": "user", "content": parts}]  # it is the caller's


def test_an_answer_begins_anew_or_goes_on(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    chat = [*HI, {"role": "assistant", "content": "in the"}]
    going_on = tokenizer.encode_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(going_on) == "user\nhi\nassistant\nin the"
    with pytest.raises(InvalidRequest, match=r"both True; .* set add_generation_prompt=False"):
        tokenizer.encode_chat(chat, continue_final_message=True)
    silent = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(InvalidRequest, match=r"the chat template refuses these messages: .*continue_final_message"):
        tokenizer.encode_chat(chat, chat_template=silent, add_generation_prompt=False, continue_final_message=True)


def test_a_template_of_ones_own_is_given_what_one_gives_it(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode_chat(
        HI, chat_template="{{ messages[0].content }} {{ who }}", chat_template_kwargs={"who": "you"}
    )
    assert tokenizer.decode(ids) == "hi you"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "unexpected 'end of template'"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.a.b }}", "has no attribute 'a'"),
        ("{{ 1 + 'a' }}", "operand"),
    ],
)
def test_a_template_that_fails_says_how(folder: Path, template: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the chat template refuses these messages: .*{message}"):
        Tokenizer(folder).encode_chat(HI, chat_template=template)


@pytest.mark.parametrize("name", ["tokenize", "tools", "return_tensors", "conversation", "chat_template", "messages"])
def test_what_is_no_variable_of_a_template_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}'"):
        Tokenizer(folder).encode_chat(HI, chat_template_kwargs={name: True})


def test_half_a_character_is_refused(folder: Path) -> None:
    """Whatever the text is for: prompts, stop strings and bad words are all encoded here."""
    with pytest.raises(InvalidRequest, match=r"^a text must be one that can be written as UTF-8"):
        Tokenizer(folder).encode("a\ud800")


SAYS_NOTHING: list[Any] = [None, [], {}, ""]


@pytest.mark.parametrize("value", SAYS_NOTHING)
@pytest.mark.parametrize("key", ["tool_calls", "name", "reasoning_content"])
def test_a_key_of_a_message_that_says_nothing_does_not_reach_the_template(folder: Path, key: str, value: Any) -> None:
    template = "{% for m in messages %}{{ m.keys() | list }}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(folder)
    chat = [{"role": "user", "content": "", key: value}]
    given = tokenizer.encode_chat(chat, chat_template=template)
    assert tokenizer.decode(given) == "['role', 'content']"
    assert chat == [{"role": "user", "content": "", key: value}]  # it is the caller's


@pytest.mark.parametrize("value", [0, False, "x", [0], {"a": None}])
def test_a_key_of_a_message_that_says_something_does(folder: Path, value: Any) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode_chat([HI[0] | {"key": value}], chat_template="{{ messages[0]['key'] }}")
    assert tokenizer.decode(ids) == str(value)


def test_an_assistant_that_says_none_says_an_empty_text(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    chat = [HI[0], {"role": "assistant", "content": None}, HI[0]]
    assert tokenizer.encode_chat(chat) == tokenizer.encode_chat([HI[0], {"role": "assistant", "content": ""}, HI[0]])
    with pytest.raises(InvalidRequest, match="got None"):
        tokenizer.encode_chat([{"role": "user", "content": None}])


def test_a_missing_or_damaged_tokenizer_is_named(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:1000])
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        Tokenizer(folder)
    path.unlink()
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        Tokenizer(folder)


def test_a_start_without_a_chat_imports_neither_transformers_nor_torch(folder: Path) -> None:
    program = f"""
import sys
from collections.abc import Callable
from pathlib import Path
from minipaged.models.tokenizer import Tokenizer
Tokenizer(Path({str(folder)!r})).encode("hi")
print(sorted({{"torch", "transformers", "gguf", "huggingface_hub", "rich"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.model
@settings(max_examples=examples(200))
@given(text=TEXT)
def test_decoding_gives_back_what_was_encoded(smollm2_tokenizer: Tokenizer, text: str) -> None:
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


@thorough
@pytest.mark.model
def test_smollm2_tokenizes_as_transformers_does(
    smollm2_tokenizer: Tokenizer, smollm2: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    # transformers' own reading of the GGUF file knows nothing of cutting digits apart, so there are none here.
    texts = [
        "Hello, world!",
        "I'll say: naïve café, 東京 — 🎉👩‍👩‍👧 \t\n\n  x = [y]  ",
        "",
        " ",
        "Zażółć gęślą jaźń",
        "don't STOP",
    ]
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    fast = PreTrainedTokenizerFast.from_pretrained(smollm2)
    for text in texts:
        ids = smollm2_tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ids == fast.encode(text)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
    ours = smollm2_tokenizer.encode_chat(messages)
    assert ours == fast.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours[:1] == [1]
    assert ours.count(2) == 2


@pytest.mark.model
def test_smollm2_cuts_numbers_into_digits(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("2026")
    assert [smollm2_tokenizer.decode([i]) for i in ids] == ["2", "0", "2", "6"]
    assert smollm2_tokenizer.eos_token_id == 2


@pytest.mark.model
def test_a_template_in_a_file_of_its_own_is_used(smollm2: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(smollm2 / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "hi!"


WITH_BYTES = [tokenizers.byte_level, tokenizers.bpe_with_byte_fallback, tokenizers.unigram_with_metaspace]


@pytest.fixture(scope="module", params=WITH_BYTES, ids=lambda make: make.__name__)
def with_bytes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tokenizers.write(request.param(), tmp_path_factory.mktemp("tokenizer")))


@settings(max_examples=examples(100))
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
@example(text="the thé, 東京\n  🎉")
def test_the_bytes_of_a_texts_tokens_are_the_bytes_of_the_text(with_bytes: Tokenizer, text: str) -> None:
    """But for a space that the tokenizer puts first. Characters cut into tokens are cut into those bytes."""
    found = b"".join(map(with_bytes.token_bytes, with_bytes.encode(text)))
    assert found in (text.encode(), b" " + text.encode())


def test_a_token_has_the_name_and_the_bytes_that_the_vocabulary_gives_it(tmp_path: Path) -> None:
    def of(make: Callable[[], Any], *names: str) -> list[bytes]:
        backend = make()
        tokenizer = Tokenizer(tokenizers.write(backend, tmp_path / make.__name__))
        ids = [backend.token_to_id(name) for name in names]
        assert [tokenizer.token_name(i) for i in ids] == list(names)
        for padding in (backend.get_vocab_size(), 10**9, -1):
            assert (tokenizer.token_name(padding), tokenizer.token_bytes(padding)) == ("", b"")
        return [tokenizer.token_bytes(i) for i in ids]

    assert of(tokenizers.byte_level, "Ġthe", "Ċ", "Ã", "</s>") == [b" the", b"\n", b"\xc3", b"</s>"]
    assert of(tokenizers.bpe_with_byte_fallback, "▁the", "<0x0A>", "<0xC3>", "</s>") == [
        b" the",
        b"\n",
        b"\xc3",
        b"</s>",
    ]
    assert of(tokenizers.unigram_with_metaspace, "▁the", "<0xFF>") == [b" the", b"\xff"]
    assert of(tokenizers.word_piece, "the", "<unk>") == [b"the", b"<unk>"]


def test_an_added_token_is_not_written_in_the_alphabet_of_bytes(tmp_path: Path) -> None:
    backend = tokenizers.byte_level()
    backend.add_tokens(["né"])
    tokenizer = Tokenizer(tokenizers.write(backend, tmp_path))
    [found] = tokenizer.encode("né")
    assert tokenizer.token_bytes(found) == "né".encode()


def test_a_tokenizer_without_a_decoder_says_by_its_words_that_they_are_bytes(tmp_path: Path) -> None:
    backend = tokenizers.byte_level()
    backend.decoder = None
    tokenizer = Tokenizer(tokenizers.write(backend, tmp_path))
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(" the é"))) == " the é".encode()


def test_special_tokens_are_those_that_decoding_leaves_out(tmp_path: Path) -> None:
    backend = tokenizers.byte_level()
    backend.add_tokens(["<tool>"])
    tokenizer = Tokenizer(tokenizers.write(backend, tmp_path))
    everything = range(backend.get_vocab_size())
    assert tokenizer.special_token_ids == {i for i in everything if not tokenizer.decode([i])} == {0, 1, 2}


SHOWN: dict[str, Any] = {"skip_special_tokens": False}


def test_spaces_between_special_tokens_can_be_left_out(tmp_path: Path) -> None:
    """Where a tokenizer writes any: with each added token that follows another, as vLLM's detokenizer does."""
    tokenizer = Tokenizer(tokenizers.write(tokenizers.word_piece(), tmp_path))
    ids = [1, 2, 3, 4, 5, 2, 1, 1, 3]
    assert tokenizer.decode(ids, **SHOWN) == "<s> </s> the inner </s> <s> <s> the"
    assert tokenizer.decode(ids, **SHOWN, spaces_between_special_tokens=False) == "<s></s> the inner </s><s><s> the"
    assert tokenizer.decode(ids, spaces_between_special_tokens=False) == tokenizer.decode(ids) == "the inner the"


@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_tokenizer_that_writes_no_spaces_between_tokens_leaves_none_out(
    with_bytes: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, 259) | st.integers(0, 2)))
    shown = with_bytes.decode(ids, **SHOWN)
    assert with_bytes.decode(ids, **SHOWN, spaces_between_special_tokens=False) == shown


# Tokenizers of one folder ------------------------------------------------------------------------------------------

NAMES = ("<|a|>", "<|b|>", "<tool>", "</s>", "the", "Ġ", "▁the", "é", " x ")
PROPERTIES = ("lstrip", "rstrip", "single_word", "normalized", "special")


def written_tokens(typed: bool) -> st.SearchStrategy[dict[str, Any]]:
    flags = st.fixed_dictionaries({}, optional={flag: st.booleans() for flag in PROPERTIES})
    mark = {"__type": "AddedToken"} if typed else {}
    return st.builds(lambda name, given: {"content": name} | mark | given, st.sampled_from(NAMES), flags)


ROLE_TOKENS = st.sampled_from(NAMES) | written_tokens(typed=True)
ROLES_OF_A_FILE = st.fixed_dictionaries(
    {}, optional={role: st.none() | ROLE_TOKENS for role in ("bos_token", "eos_token", "unk_token", "pad_token")}
)
TOKENIZER_CONFIGS = st.builds(
    lambda *parts: {key: value for part in parts for key, value in part.items()},
    ROLES_OF_A_FILE,
    st.fixed_dictionaries(
        {},
        optional={
            "additional_special_tokens": st.lists(st.sampled_from(NAMES), max_size=3),
            "extra_special_tokens": st.lists(ROLE_TOKENS, max_size=3)
            | st.dictionaries(st.sampled_from(["image_token", "x_token"]), st.sampled_from(NAMES)),
            "added_tokens_decoder": st.dictionaries(
                st.integers(0, 500).map(str), written_tokens(typed=False), max_size=3
            ),
            "image_token": st.sampled_from(NAMES),
            "split_special_tokens": st.booleans(),
            "add_bos_token": st.booleans(),
            "add_eos_token": st.booleans(),
            "add_prefix_space": st.booleans(),
            "clean_up_tokenization_spaces": st.booleans(),
        },
    ),
)
OLDER_CONFIGS = st.builds(
    lambda roles, extra: roles | extra,
    st.fixed_dictionaries(
        {},
        optional={
            role: st.sampled_from(NAMES) | written_tokens(typed=False) for role in ("eos_token", "pad_token", "y_token")
        },
    ),
    st.fixed_dictionaries({}, optional={"additional_special_tokens": st.lists(st.sampled_from(NAMES), max_size=2)}),
)
ADDED_TOKENS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 500), max_size=3)
MAKERS = [*WITH_BYTES, tokenizers.word_piece]


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    make=st.sampled_from(MAKERS),
    config=TOKENIZER_CONFIGS,
    older=st.none() | OLDER_CONFIGS,
    added=st.none() | ADDED_TOKENS,
    padding=st.sampled_from([None, "</s>", "<|pad|>"]),
    text=st.lists(st.sampled_from([*NAMES, "<|pad|>", "t", " ", "in", "né", "."])).map("".join),
)
def test_a_tokenizer_is_the_same_one_in_transformers(
    tmp_path: Path,
    make: Callable[[], Any],
    config: dict[str, Any],
    older: dict[str, Any] | None,
    added: dict[str, int] | None,
    padding: str | None,
    text: str,
) -> None:
    """Whatever the files beside tokenizer.json declare. Where they contradict themselves, transformers says so or we
    do; but a text is never encoded in two ways."""
    backend = make()
    if padding:
        backend.enable_padding(pad_token=padding)
    folder = tokenizers.write(backend, tmp_path, **config)
    for name, said in (("special_tokens_map.json", older), ("added_tokens.json", added)):
        (folder / name).unlink(missing_ok=True)
        if said is not None:
            (folder / name).write_text(json.dumps(said))
    try:
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:
        event(f"transformers refuses: {type(error).__name__} {error}")
        with pytest.raises(ModelError):
            _ = Tokenizer(folder).in_transformers
        return
    ours = Tokenizer(folder)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    ids = ours.encode(text)
    for skip in (False, True):
        shown = ours.decode(ids, skip_special_tokens=skip)
        assert shown == theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert shown == ours.in_transformers.decode(ids, skip_special_tokens=skip)
    assert ours.in_transformers.get_added_vocab() == theirs.get_added_vocab()
    assert ours.eos_token_id == theirs.eos_token_id


def test_a_token_that_several_roles_declare_differently_is_the_same_one_in_transformers(tmp_path: Path) -> None:
    """The last one counts, and one that is written as a text is not taken for one that is written as an object."""
    stripping = {"content": "<|a|>", "__type": "AddedToken", "lstrip": True}
    folder = tokenizers.write(tokenizers.byte_level(), tmp_path, bos_token="<|a|>", unk_token=stripping)
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<|a|>"}}))
    ours, theirs = Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.encode(" <|a|>") == theirs.encode(" <|a|>")
    assert len(ours.encode(" <|a|>")) == 2
    assert ours.in_transformers.encode(" <|a|>") == theirs.encode(" <|a|>")


@pytest.mark.parametrize("bos", ["<|a|>", {"content": "<|a|>", "__type": "AddedToken"}])
def test_a_role_that_is_listed_with_an_id_is_the_token_of_the_list(tmp_path: Path, bos: object) -> None:
    """Even where the list's id is taken by a token of tokenizer.json, so that the list itself adds nothing."""
    folder = tokenizers.write(tokenizers.bpe_with_byte_fallback(), tmp_path, bos_token=bos)
    (folder / "added_tokens.json").write_text(json.dumps({"<|a|>": 0}))
    ours, theirs = Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.encode("<|a|><|a|>") == theirs.encode("<|a|><|a|>") == ours.in_transformers.encode("<|a|><|a|>")


@pytest.mark.parametrize("typed", [False, True])
def test_a_role_written_as_an_object_is_the_same_token_in_transformers(tmp_path: Path, typed: bool) -> None:
    """With "__type" as transformers writes it, or without, which transformers itself does not read."""
    eos = {"content": "<|end|>", "lstrip": True} | ({"__type": "AddedToken"} if typed else {})
    tokenizer = Tokenizer(tokenizers.write(tokenizers.byte_level(), tmp_path, eos_token=eos))
    assert tokenizer.eos_token_id == tokenizer.in_transformers.eos_token_id == tokenizer.encode("<|end|>")[0]
    for text in ("<|end|>", " t <|end|>t"):
        assert tokenizer.encode(text) == tokenizer.in_transformers.encode(text)


@pytest.mark.parametrize("value", [3, {"text": "<|end|>"}, ["<|end|>"], {"content": "a", "lstrip": "yes"}])
def test_a_special_token_that_is_no_token_is_refused(tmp_path: Path, value: Any) -> None:
    folder = tokenizers.write(tokenizers.byte_level(), tmp_path, eos_token=value)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: eos_token reads .*expected a token's text"):
        Tokenizer(folder)


def test_a_tokenizer_that_is_another_one_in_transformers_is_refused(tmp_path: Path) -> None:
    """A version of transformers may read the files in another way than this one does."""
    tokenizer = Tokenizer(tokenizers.write(tokenizers.byte_level(), tmp_path))
    tokenizers.write(tokenizers.byte_level(), tmp_path, eos_token="<|end|>")
    with pytest.raises(
        ModelError,
        match=r"transformers loads the tokenizer in .* differently .it differs in added tokens, vocabulary size",
    ):
        _ = tokenizer.in_transformers


# --- The least tokens of a text -------------------------------------------------------------------


@pytest.mark.parametrize("make", [tokenizers.byte_level, tokenizers.bpe_with_byte_fallback, tokenizers.word_piece])
@settings(max_examples=examples(60))
@given(st.lists(st.sampled_from(["the", " ", "\t", "é", "😀", "x", "<s>", "e\u0301"]), max_size=60).map("".join))
def test_no_text_has_fewer_tokens_than_its_length_says(
    make: Callable[[], Backend], tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    tokenizer = Tokenizer(tokenizers.write(make(), tmp_path_factory.getbasetemp() / f"least-{make.__name__}"))
    assert tokenizer.least_tokens(len(text)) <= len(tokenizer.encode(text))


def test_a_tokenizer_that_keeps_all_text_bounds_its_length(tmp_path: Path) -> None:
    """And one that drops spaces, takes them into a token, or has a token for anything unknown, does not."""

    def least(name: str, made: Backend) -> int:
        return Tokenizer(tokenizers.write(made, tmp_path / name)).least_tokens(1000)

    assert least("bytes", tokenizers.byte_level()) > 0
    assert least("fallback", tokenizers.bpe_with_byte_fallback()) > 0
    assert least("words", tokenizers.word_piece()) == 0
    composing = tokenizers.byte_level()
    composing.normalizer = normalizers.NFC()
    assert 0 < least("composing", composing) < least("bytes", tokenizers.byte_level())
    for number, step in enumerate((normalizers.Strip(), normalizers.Replace("a", ""), normalizers.StripAccents())):
        dropping = tokenizers.byte_level()
        dropping.normalizer = step
        assert least(f"dropping {number}", dropping) == 0
    removing = tokenizers.byte_level()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert least("removing", removing) == 0
    taking = tokenizers.byte_level()
    taking.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    assert least("taking", taking) == 0


def test_special_tokens_without_spaces_are_decoded_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of nothing else would take ever longer."""
    tokenizer, decoded = Tokenizer(tokenizers.write(tokenizers.word_piece(), tmp_path)), list[int]()

    class Counting:
        def decode(self, ids: list[int], **options: bool) -> str:
            decoded.extend(ids)
            return str(backend.decode(ids, **options))

    assert tokenizer.special_token_ids
    backend, ids = tokenizer._backend, [1, 2, *tokenizer.encode("the inner"), 1, 1] * 100
    expected = tokenizer.decode(ids, skip_special_tokens=False).replace("> <", "><")
    monkeypatch.setattr(tokenizer, "_backend", Counting())
    without = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert tokenizer.decode(ids, **without) == expected
    assert decoded == ids


# --- Where tokens begin ---------------------------------------------------------------------------


def test_a_token_begins_in_the_text_where_its_characters_do(tmp_path: Path) -> None:
    """Also where the tokenizer changes the text first, takes spaces into a token, or leaves them out."""

    def places(name: str, made: Backend, text: str) -> list[int]:
        return Tokenizer(tokenizers.write(made, tmp_path / name)).places(text)

    assert places("bytes", tokenizers.byte_level(), "the the<s>€x") == [0, 3, 7, 10, 10, 10, 11]
    composing = tokenizers.byte_level()
    composing.normalizer = normalizers.NFC()
    assert places("composing", composing, "e\u0301xy") == [0, 2, 3]
    taking = tokenizers.byte_level()
    taking.add_special_tokens(
        [AddedToken("<a>", lstrip=True, special=True), AddedToken("<b>", rstrip=True, special=True)]
    )
    assert places("taking", taking, "x <a> y<b> z") == [0, 1, 5, 6, 7, 11]
    trimming = tokenizers.byte_level()
    trimming.post_processor = processors.ByteLevel(trim_offsets=True)
    assert places("trimming", trimming, "the the") == [0, 3]
    begun = tokenizers.bpe_with_byte_fallback()
    begun.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    assert places("begun", begun, "the the") == [0, 0, 3, 7]
    assert places("words", tokenizers.word_piece(), "the <s> inner") == [0, 3, 7, 10]
