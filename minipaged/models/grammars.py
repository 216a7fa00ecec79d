"""Grammars for structured outputs: the library llguidance says which tokens of the model may come next.

Four things have to fit together: the request's form (a JSON schema, a regular expression, ...), the bytes that each of
the model's tokens stands for, the tokens that end an output, and the model's vocabulary, which may be larger than the
tokenizer's.

- llguidance gets the bytes of each token from the model's own tokenizer (`Tokenizer.token_bytes`), so that the text
  that it follows is the text that the client gets. A special token never occurs in a text.
- llguidance gets one end token, whose id is just beyond the vocabulary. Wherever it is allowed, the end tokens of the
  request are allowed.
- Compiling, and following a grammar by each token, have limits: a hostile schema mostly costs milliseconds, at worst
  seconds of one thread, and never the engine.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import cached_property, partial
from threading import Lock, Thread, stack_size
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from minipaged.errors import InvalidRequest, RequestFailed
from minipaged.models.tokenizer import Tokenizer
from minipaged.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MOST_KEPT = 128
"""The number of compiled grammars that are kept for later requests."""
MOST_CHARACTERS_KEPT = 2**22
"""The most characters that the forms of the kept grammars have together."""
MOST_CHARACTERS_TOLD = 500
"""The longest explanation of the library that is passed on, in characters."""


class GrammarCompiler:
    """Compiles grammars for one model, and keeps those that were used last. Threads may share it.

    `end_token_ids`: the model's end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._special = {token for token in (*tokenizer.special_token_ids, *end_token_ids) if token < vocab_size}
        self._lock = Lock()
        self._kept: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()
        self._num_characters = 0  # of the forms in `_kept`
        self._used: WeakValueDictionary[StructuredOutputsParams, CompiledGrammar] = WeakValueDictionary()

    def compile(self, form: StructuredOutputsParams) -> CompiledGrammar:
        """Return the compiled grammar. Raises InvalidRequest, with the library's explanation, if the library cannot
        compile this form, and if llguidance is not installed."""
        return self.compiled(form) or self._keep(form, _on_a_large_stack(partial(self._compile, form)))

    def compiled(self, form: StructuredOutputsParams) -> CompiledGrammar | None:
        """Return the grammar if it has been compiled, and is still kept or in use."""
        with self._lock:
            if form in self._kept:
                self._kept.move_to_end(form)
            return self._used.get(form)

    def _keep(self, form: StructuredOutputsParams, grammar: CompiledGrammar) -> CompiledGrammar:
        with self._lock:
            if form not in self._kept:
                self._num_characters += form.num_characters
            self._kept[form] = self._used[form] = grammar
            while len(self._kept) > MOST_KEPT or self._num_characters > MOST_CHARACTERS_KEPT:
                dropped, _ = self._kept.popitem(last=False)
                self._num_characters -= dropped.num_characters
        return grammar

    def _compile(self, form: StructuredOutputsParams) -> CompiledGrammar:
        library = self._library
        try:
            matcher = library.LLMatcher(self._ll_tokenizer, _as_lark(library, form), log_level=0, limits=self._limits)
            wrong = matcher.get_error()
        except (ValueError, RecursionError) as error:
            wrong = str(error)
        if not wrong:
            first = int.from_bytes(matcher.compute_bitmask(), "little")  # the library explores what may come first
            wrong = matcher.get_error()
        if wrong:
            raise InvalidRequest(f"structured_outputs cannot be followed: {_plain(wrong)}; change or simplify it")
        return CompiledGrammar(matcher, first, self._vocab_size, self._special)

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError:
            raise InvalidRequest(
                "structured outputs need the package llguidance: pip install 'minipaged[structured]'"
            ) from None
        return llguidance

    @cached_property
    def _limits(self) -> LLParserLimits:
        limits: LLParserLimits = self._library.LLParserLimits(
            max_lexer_states=MOST_LEXER_STATES, max_items_in_row=MOST_ALTERNATIVES, verbose_errors=False
        )
        return limits

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        """The tokenizer as llguidance uses it. Making it takes some tenths of a second for a large vocabulary."""
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._special)
        made: LLTokenizer = self._library.LLTokenizer(
            vocabulary, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_id
        )
        return made


MOST_LEXER_STATES = 50_000
"""The most states of the lexer of one sequence, at about 2 kB each."""
MOST_ALTERNATIVES = 8_000
"""The most rules in progress at one place of an output. An object takes four for each optional property."""


class CompiledGrammar:
    """A compiled grammar."""

    def __init__(self, matcher: LLMatcher, first: int, vocab_size: int, special_token_ids: Collection[int]) -> None:
        """`matcher`: the library's state at the beginning of an output. `first`: its allowed tokens."""
        self._matcher = matcher
        self._first = first
        self._vocab_size = vocab_size
        self._special = special_token_ids

    def begin(self, final_token_ids: Collection[int]) -> GrammarState:
        """Return the state of an empty output. The special tokens among `final_token_ids` may end the output wherever
        the grammar may end."""
        ends = sum(1 << token for token in final_token_ids if token in self._special)
        return GrammarState(self._matcher.deep_copy(), self._first, self._vocab_size, ends)


class GrammarState:
    """The state of one sequence's output in its grammar (`engine.sequence.SequenceGrammar`)."""

    __slots__ = ("_ends", "_matcher", "_vocab_size", "bits")

    def __init__(self, matcher: LLMatcher, allowed: int, vocab_size: int, ends: int) -> None:
        """`allowed`, `ends`: sets of tokens as bits of an integer. In `allowed`, the bit just beyond the vocabulary
        says whether the output may end."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self.bits = self._row(allowed)

    def _row(self, allowed: int) -> bytes:
        if allowed >> self._vocab_size & 1:
            allowed |= self._ends
        allowed &= (1 << self._vocab_size) - 1
        return allowed.to_bytes((self._vocab_size + 31) // 32 * 4, "little")

    def consume(self, token_id: int) -> bool:
        matcher = self._matcher
        if matcher.consume_token(token_id):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise RequestFailed(f"structured_outputs cannot be followed any further: {_plain(matcher.get_error())}")
        self.bits = self._row(allowed)
        return not self._ends and allowed == 1 << self._vocab_size

    def fork(self) -> GrammarState:
        copy = GrammarState.__new__(GrammarState)
        copy._matcher = self._matcher.deep_copy()
        copy._vocab_size, copy._ends, copy.bits = self._vocab_size, self._ends, self.bits
        return copy


STACK_BYTES = 2**29
"""The stack on which forms are compiled. Only what is used of it takes memory."""
_starting = Lock()


def _on_a_large_stack(call: Callable[[], CompiledGrammar]) -> CompiledGrammar:
    """Return the result of `call`, from a thread with a large stack. The library recurses once for each rule in a chain
    of rules, and a stack that is too small for that ends the process."""
    result: Future[CompiledGrammar] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    with _starting:  # the size holds for all threads that are started meanwhile
        before = stack_size(STACK_BYTES)
        try:
            Thread(target=run, name="minipaged-grammar", daemon=True).start()
        finally:
            stack_size(before)
    return result.result()


def _as_lark(library: Any, form: StructuredOutputsParams) -> str:
    """Return the form in the library's own notation. Raises ValueError."""
    if form.json is not None or form.json_object:
        spaces: dict[str, Any] = {"whitespace_flexible": not form.disable_any_whitespace}
        if form.whitespace_pattern is not None:
            spaces["whitespace_pattern"] = form.whitespace_pattern
        schema = '{"type": "object"}' if form.json is None else form.json
        return str(library.LLMatcher.grammar_from_json_schema(schema, overrides=spaces))
    if form.regex is not None:
        return str(library.LLMatcher.grammar_from_regex(form.regex))
    if form.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        return str(library.LLMatcher.grammar_from_lark(f"start: {texts}"))
    return str(library.grammar_from("grammar", form.grammar))


def _plain(error: str) -> str:
    """The library's explanation in one line."""
    words = " ".join(error.partition("<backtrace>")[0].replace("<non-verbose/>", "").split())
    return words if len(words) <= MOST_CHARACTERS_TOLD else words[:MOST_CHARACTERS_TOLD] + " ..."


class _Vocabulary:
    """The tokens of a model, in the form that llguidance expects. An id without a token has no bytes, and is never
    allowed."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, special_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(special_token_ids)
        self.tokens = [*map(tokenizer.token_bytes, range(vocab_size)), b""]
        self.eos_token_id = vocab_size
        self.special_token_ids = [*special_token_ids, vocab_size]

    def __call__(self, text: str) -> list[int]:
        """The tokens in which a text is usually written. Where a grammar leaves no choice, only those are allowed."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        written = text.encode()
        as_usual = self._special.isdisjoint(ids) and max(ids, default=0) < self.eos_token_id
        return ids if as_usual and b"".join(self.tokens[i] for i in ids) == written else self._longest_first(written)

    def _longest_first(self, text: bytes) -> list[int]:
        """The tokens of a text, each the longest that fits: for texts that do not stand for themselves when they are
        encoded (some tokenizers put a space before the first word)."""
        ids, begin = list[int](), 0
        while begin < len(text):
            ends = range(min(len(text), begin + self._longest), begin, -1)
            found = next((end for end in ends if text[begin:end] in self._by_bytes), None)
            if found is None:
                break
            ids.append(self._by_bytes[text[begin:found]])
            begin = found
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        known = range(self.eos_token_id)
        return {self.tokens[token]: token for token in known if self.tokens[token] and token not in self._special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes))
