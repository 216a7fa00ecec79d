"""Compiled grammars: which tokens a form allows, in which vocabulary, and what is refused."""

from __future__ import annotations

import json
import random
import re
import resource
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from minipaged.errors import InvalidRequest, RequestFailed
from minipaged.models import grammar_trial, grammars
from minipaged.models.gguf_tokenizer import build_tokenizer
from minipaged.models.grammars import GrammarCompiler, GrammarState
from minipaged.models.tokenizer import Tokenizer
from minipaged.params import StructuredOutputsParams
from tests.models import tokenizers
from tests.tiny_model import write_byte_tokenizer

VOCAB = 259
END = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with a token for each byte."""
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder, chat_template=False)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, [END])


def allowed(state: GrammarState) -> list[int]:
    bits = int.from_bytes(state.bits, "little")
    return [token for token in range(len(state.bits) * 8) if bits >> token & 1]


def written(state: GrammarState, ends: Collection[int], seed: int, most: int = 200) -> tuple[list[int], bool]:
    """A random output that follows the grammar, and whether it has ended."""
    r, output = random.Random(seed), list[int]()
    while len(output) < most:
        token = r.choice(allowed(state))
        if token in ends:
            return output, True
        output.append(token)
        if state.consume(token):
            return output, True
    return output, False


CHOICES = ["ja", "jawohl", 'n"\\ö 😀\n']
FORMS: list[tuple[StructuredOutputsParams, Any]] = [
    (StructuredOutputsParams(json=PERSON), lambda text: jsonschema.validate(json.loads(text), PERSON)),
    (StructuredOutputsParams(json_object=True), lambda text: json.loads(text).items()),
    (StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), lambda text: text.index('{"name":"')),
    (StructuredOutputsParams(regex="[a-c]{2,4}-(x|yz)"), lambda text: re.fullmatch("[a-c]{2,4}-(x|yz)", text).end()),
    (
        StructuredOutputsParams(choice=["ja", "jawohl", 'n"\\ö 😀\n']),
        lambda text: ["ja", "jawohl", 'n"\\ö 😀\n'].index(text),
    ),
    (StructuredOutputsParams(grammar='start: "a" start "b" | "c"'), lambda text: re.fullmatch("a*cb*", text).end()),
    (StructuredOutputsParams(grammar='root ::= "a" root | "b"'), lambda text: re.fullmatch("a*b", text).end()),
]


@pytest.mark.parametrize(("form", "check"), FORMS, ids=range(len(FORMS)))
@pytest.mark.parametrize("ends", [{END}, set()], ids=["with an end token", "without one"])
def test_an_output_that_has_ended_has_the_form(
    compiler: GrammarCompiler, tokenizer: Tokenizer, form: StructuredOutputsParams, check: Any, ends: set[int]
) -> None:
    num_ended = 0
    for seed in range(30):
        output, has_ended = written(compiler.compile(form).begin(ends), ends, seed)
        if has_ended:
            num_ended += 1
            check(tokenizer.decode(output))
    assert num_ended


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4))
def test_exactly_the_choices_can_be_written(choices: list[str]) -> None:
    """Each of them, byte by byte; and after each beginning only a byte with which a choice goes on."""
    compiler, tokenizer = _of_bytes()
    grammar, texts = compiler.compile(StructuredOutputsParams(choice=choices)), [choice.encode() for choice in choices]
    for text in texts:
        state = grammar.begin({END})
        for i in range(len(text) + 1):
            following = {other[i : i + 1] for other in texts if other[:i] == text[:i]}
            assert {b"" if one == END else tokenizer.token_bytes(one) for one in allowed(state)} == following
            if i < len(text):
                [token] = [
                    one for one in allowed(state) if one != END and tokenizer.token_bytes(one) == text[i : i + 1]
                ]
                state.consume(token)


_made: list[tuple[GrammarCompiler, Tokenizer]] = []


def _of_bytes() -> tuple[GrammarCompiler, Tokenizer]:
    """A compiler for Hypothesis, which wants no fixture of a module."""
    if not _made:
        import tempfile

        folder = Path(tempfile.mkdtemp())
        write_byte_tokenizer(folder, chat_template=False)
        _made.append((GrammarCompiler(Tokenizer(folder), VOCAB, [END]), Tokenizer(folder)))
    return _made[0]


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def closed(properties: dict[str, dict[str, Any]], num_required: int) -> dict[str, Any]:
        required = list(properties)[:num_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(closed, st.dictionaries(st.text(max_size=3), inner, max_size=3), st.integers(0, 3))


numbers = st.tuples(st.integers(-50, 50), st.integers(0, 60)).map(
    lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
)
texts = st.tuples(st.integers(0, 2), st.integers(0, 3)).map(
    lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
)
values = st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4)
leaves = st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}])
leaves |= numbers | texts | st.builds(lambda given: {"enum": given}, st.lists(values, min_size=1, max_size=3))
leaves |= st.sampled_from(["date", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name})
schemas = st.recursive(
    leaves,
    lambda inner: (
        objects(inner)
        | st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3))
        | st.builds(lambda any_of: {"anyOf": any_of}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=6,
)


@given(schemas, st.integers(0, 99))
def test_whatever_the_schema_an_output_that_has_ended_validates(schema: dict[str, Any], seed: int) -> None:
    compiler, tokenizer = _of_bytes()
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    for ends in ({END}, set[int]()):
        output, has_ended = written(compiler.compile(form).begin(ends), ends, seed)
        if has_ended:
            value = json.loads(tokenizer.decode(output))
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())


def test_the_end_is_allowed_only_where_the_form_may_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(StructuredOutputsParams(regex="ab?")).begin({END})
    [a, b] = tokenizer.encode("ab", add_special_tokens=False)
    assert allowed(state) == [a]
    assert not state.consume(a)
    assert sorted(allowed(state)) == sorted([b, END])
    assert not state.consume(b)
    assert allowed(state) == [END]


def test_a_stop_token_that_stands_for_text_ends_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """If it is allowed, then as text. Another special token ends the output where the form may end."""
    [a] = tokenizer.encode("a", add_special_tokens=False)
    state = compiler.compile(StructuredOutputsParams(regex="b")).begin({a, 1})
    [b] = allowed(state)
    state.consume(b)
    assert allowed(state) == [1]


def test_a_fork_goes_its_own_way(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(StructuredOutputsParams(choice=["ax", "by"])).begin({END})
    [a, b, x, y] = tokenizer.encode("abxy", add_special_tokens=False)
    fork = state.fork()
    state.consume(a)
    assert allowed(fork) == [a, b]
    fork.consume(b)
    assert (allowed(state), allowed(fork)) == ([x], [y])


def test_a_token_that_is_not_allowed_fails(compiler: GrammarCompiler) -> None:
    state = compiler.compile(StructuredOutputsParams(choice=["a"])).begin({END})
    with pytest.raises(RequestFailed, match=r"^structured_outputs cannot be followed any further: "):
        state.consume(7)


# --- Vocabularies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("beyond", [0, 1, 29, 30, 31, 64, 1000])
def test_a_model_may_have_more_tokens_than_its_tokenizer(tokenizer: Tokenizer, beyond: int) -> None:
    """The others are never allowed, and a row has a bit for each of them."""
    state = (
        GrammarCompiler(tokenizer, VOCAB + beyond, [END]).compile(StructuredOutputsParams(regex="(?s:.*)")).begin({END})
    )
    assert len(state.bits) == (VOCAB + beyond + 31) // 32 * 4
    assert allowed(state)[-1] < VOCAB
    assert END in allowed(state)


def test_a_model_may_have_fewer_tokens_than_its_tokenizer(tokenizer: Tokenizer) -> None:
    state = GrammarCompiler(tokenizer, 100, [END]).compile(StructuredOutputsParams(regex=".*")).begin({END})
    assert allowed(state)[-1] < 100


TOKENIZERS = [
    tokenizers.byte_level,
    tokenizers.bpe_with_byte_fallback,
    tokenizers.unigram_with_metaspace,
]


WORDS = StructuredOutputsParams(choice=["hello world", "hello"])
OBJECT = StructuredOutputsParams(json_object=True)


@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("form", [WORDS, OBJECT], ids=["choice", "json"])
def test_the_text_of_the_tokens_has_the_form(make: Any, form: StructuredOutputsParams, tmp_path: Path) -> None:
    """With each kind of tokenizer. The text is the bytes of the tokens, the space before a first word included."""
    tokenizer = Tokenizer(tokenizers.write(make(), tmp_path))
    compiler = GrammarCompiler(tokenizer, tokenizer._backend.get_vocab_size(), [])
    num_ended = 0
    for seed in range(20):
        try:
            output, has_ended = written(compiler.compile(form).begin(()), (), seed)
        except IndexError:  # its vocabulary cannot write what the grammar asks for
            continue
        if not has_ended:
            continue
        num_ended += 1
        text = b"".join(map(tokenizer.token_bytes, output)).decode()
        if form.choice:
            assert text in form.choice
        else:
            json.loads(text)
    assert num_ended


def test_a_tokenizer_from_a_gguf_file(gguf_metadata: dict[str, Any], tmp_path: Path) -> None:
    backend: Backend = build_tokenizer(gguf_metadata)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    size = backend.get_vocab_size()
    compiler = GrammarCompiler(tokenizer, size, [])
    output, has_ended = written(compiler.compile(StructuredOutputsParams(choice=["in the 12"])).begin(()), (), 1)
    assert has_ended
    assert tokenizer.decode(output) == "in the 12"


# --- What is refused, and how long it takes -------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (StructuredOutputsParams(json={"type": "person"}), "Invalid type: person"),
        (StructuredOutputsParams(json={"not": {}}), 'Unimplemented keys: ["not"]'),
        (StructuredOutputsParams(json="[1"), "EOF while parsing"),
        (StructuredOutputsParams(json="5"), "object"),
        (StructuredOutputsParams(json={"$ref": "https://example.org/schema"}), "Default retriever does not fetch"),
        (StructuredOutputsParams(json={"$ref": "#"}), ""),
        (StructuredOutputsParams(regex="(?=a)b"), "look-around"),
        (StructuredOutputsParams(regex="(ab"), "unclosed group"),
        (StructuredOutputsParams(grammar="start: other"), "other"),
        (StructuredOutputsParams(grammar="nothing of the kind"), "Expected"),
        (StructuredOutputsParams(grammar=""), ""),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[24:70],
)
def test_what_the_library_cannot_do_is_refused_with_its_words(
    compiler: GrammarCompiler, form: StructuredOutputsParams, words: str
) -> None:
    with pytest.raises(
        InvalidRequest, match=f"^structured_outputs cannot be followed: .*{re.escape(words)}"
    ) as refused:
        compiler.compile(form)
    assert "\n" not in str(refused.value)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


def rules(number: int) -> str:
    """A chain of rules, which the library follows by recursion."""
    return "start: r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(number)) + f'\nr{number}: "c"'


ALL_PATTERNS = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, 40)]}
HOSTILE = {
    "many values": StructuredOutputsParams(json={"enum": [f"value {i}" for i in range(10_000)]}),
    "many patterns": StructuredOutputsParams(
        json={"properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 50 + 1}}}$"} for i in range(1000)}}
    ),
    "a product of choices": StructuredOutputsParams(
        json={"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {}}} for j in range(6)]} for i in range(12)]}
    ),
    "doubling": StructuredOutputsParams(json=nested(10)),
    "deep": StructuredOutputsParams(json='{"items":' * 5000 + "{}" + "}" * 5000),
    "long strings": StructuredOutputsParams(json={"type": "string", "minLength": 10**6, "maxLength": 10**7}),
    "long lists": StructuredOutputsParams(json={"type": "array", "items": {"type": "string"}, "minItems": 10**6}),
    "repeated repetitions": StructuredOutputsParams(regex="((a{1,1000}){1,1000}){1,1000}b"),
    "backtracking": StructuredOutputsParams(regex="(a+)+(b|bb)*(a|aa)+" + "(x+x+)+y" * 20),
    "a large class": StructuredOutputsParams(regex=r"[\p{L}\p{N}]{0,5000}" * 50),
    "many choices": StructuredOutputsParams(choice=[f"choice number {i}" for i in range(10_000)]),
    "a chain of rules": StructuredOutputsParams(grammar=rules(15_000)),
    "patterns that must all match": StructuredOutputsParams(json=ALL_PATTERNS),
    "multiples of a large number": StructuredOutputsParams(json={"type": "integer", "multipleOf": 1_234_567}),
    "an ambiguous grammar": StructuredOutputsParams(grammar='start: start start | "a" | ""'),
    "gbnf of many parentheses": StructuredOutputsParams(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_form_that_explodes_is_refused_soon_or_followed(compiler: GrammarCompiler, name: str) -> None:
    """In seconds of processor; a loop and a step wait for neither (`AsyncLLM`)."""
    said, begun, slowest = "", time.process_time(), 0.0
    try:
        state = compiler.compile(HOSTILE[name]).begin({END})
        compiling = time.process_time() - begun
        for _ in range(30):
            begun = time.process_time()
            token = allowed(state)[0]
            if token == END or state.consume(token):
                break
            slowest = max(slowest, time.process_time() - begun)
    except (InvalidRequest, RequestFailed) as error:
        compiling, said = time.process_time() - begun, str(error)
    assert len(said) < 1000
    assert compiling < 5
    assert slowest < 0.5


def test_a_form_that_takes_too_much_ends_a_process_of_its_own(compiler: GrammarCompiler) -> None:
    """The library has no limit for it, and would take minutes and gigabytes."""
    begun = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(InvalidRequest, match=r"compiling takes more than 2 seconds or 256 MiB, or nests too deeply"):
        compiler.compile(StructuredOutputsParams(json=ALL_PATTERNS))
    assert 0 < resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begun < 5


def test_only_forms_that_could_be_hostile_are_tried_in_another_process(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[str]()
    monkeypatch.setattr(grammars, "_tried", lambda lark: tried.append(lark) or 0)
    compiler = GrammarCompiler(tokenizer, VOCAB, [END])
    for form in (
        StructuredOutputsParams(json=PERSON),
        StructuredOutputsParams(choice=["a"]),
        StructuredOutputsParams(json_object=True),
    ):
        compiler.compile(form)
    assert not tried
    risky = [
        StructuredOutputsParams(json={"type": "string", "pattern": "a"}),
        StructuredOutputsParams(json='{"type": "string", "p\\u0061ttern": "b"}'),
        StructuredOutputsParams(json={"enum": ["a" * 30_000]}),
        StructuredOutputsParams(json_object=True, whitespace_pattern=" *"),
        StructuredOutputsParams(regex="a"),
        StructuredOutputsParams(grammar='start: "a"'),
    ]
    for form in risky:
        compiler.compile(form)
    assert len(tried) == len(risky)


def test_outputs_wear_a_grammar_out_for_nobody(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's copies of a state share a lexer, whose states are limited. When it is full, another takes over."""
    monkeypatch.setattr(grammar_trial, "MOST_LEXER_STATES", 1500)
    form = StructuredOutputsParams(json={"type": "string", "maxLength": 300}, disable_any_whitespace=True)
    grammar = GrammarCompiler(tokenizer, VOCAB, [END]).compile(form)
    begun = written(waiting := grammar.begin({END}), {END}, 0, 50)[0]
    generations = set[int]()
    for seed in range(8):
        output, has_ended = written(state := grammar.begin({END}), {END}, seed, 700)
        generations.add(state._generation)
        if has_ended:
            assert isinstance(json.loads(tokenizer.decode(output)), str)
    assert len(generations) > 2
    alone = GrammarCompiler(tokenizer, VOCAB, [END]).compile(form).begin({END})
    for token in begun:
        alone.consume(token)
    fork = waiting.fork()
    for _ in range(100):
        token = allowed(alone)[0]
        for each in (alone, waiting, fork):
            each.consume(token)
        assert alone.bits == waiting.bits == fork.bits


def test_a_large_schema_of_optional_properties_is_followed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(1000)}}
    state = compiler.compile(StructuredOutputsParams(json=schema, disable_any_whitespace=True)).begin({END})
    for token in tokenizer.encode('{"p3":true,"p700":false}', add_special_tokens=False):
        assert token in allowed(state)
        state.consume(token)
    assert allowed(state) == [END]


# --- What is kept ---------------------------------------------------------------------------------


def test_a_form_seen_before_is_not_compiled_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MOST_KEPT", 3)
    compiler = GrammarCompiler(tokenizer, VOCAB, [END])
    forms = [StructuredOutputsParams(choice=[str(i)]) for i in range(5)]
    first = compiler.compile(forms[0])
    assert compiler.compile(StructuredOutputsParams(choice=["0"])) is first
    for form in forms[1:3]:
        compiler.compile(form)
    compiler.compile(forms[0])  # used more lately than the second
    compiler.compile(forms[3])
    assert [compiler.compiled(form) is not None for form in forms] == [True, False, True, True, False]
    for form in forms:
        compiler.compile(form)
    assert compiler.compiled(forms[0]) is first, "what is in use is not compiled again, though it was dropped"
    del first
    assert compiler.compiled(forms[0]) is None


def test_what_is_kept_is_bounded_in_memory(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MOST_BYTES_KEPT", 100 * grammars.BYTES_A_CHARACTER)
    compiler = GrammarCompiler(tokenizer, VOCAB, [END])
    forms = [StructuredOutputsParams(choice=[str(i) * 40]) for i in range(4)]
    for form in (*forms, forms[3]):
        compiler.compile(form)
    assert [compiler.compiled(form) is not None for form in forms] == [False, False, True, True]
    assert compiler._num_bytes == 80 * grammars.BYTES_A_CHARACTER
    monkeypatch.setattr(grammars, "_tried", lambda lark: 101 * grammars.BYTES_A_CHARACTER)
    compiler.compile(StructuredOutputsParams(regex="a"))
    assert compiler._num_bytes == 0


def test_threads_may_compile_at_the_same_time(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB, [END])
    found: list[tuple[int, list[int]]] = []

    def work(number: int) -> None:
        for i in range(20):
            text = str((number + i) % 7)
            output, _ = written(compiler.compile(StructuredOutputsParams(choice=[text])).begin({END}), {END}, 0)
            found.append((int(text), output))

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(tokenizer.decode(output) == str(number) for number, output in found)


def test_without_the_library_the_error_says_how_to_get_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'minipaged\[structured\]'"):
        GrammarCompiler(tokenizer, VOCAB, [END]).compile(StructuredOutputsParams(choice=["a"]))
