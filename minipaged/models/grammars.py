"""Grammars for structured outputs: the library llguidance says which tokens of the model may come next.

Four things have to fit together: the request's form (a JSON schema, a regular expression, ...), the bytes that each of
the model's tokens stands for, the tokens that end an output, and the model's vocabulary, which may be larger than the
tokenizer's.

- llguidance gets the bytes of each token from the model's own tokenizer (`Tokenizer.token_bytes`), so that the text
  that it follows is the text that the client gets. A special token never occurs in a text.
- llguidance gets one end token, whose id is just beyond the vocabulary. Wherever it is allowed, the end tokens of the
  request are allowed.
- Compiling, and following a grammar by each token, have limits. The library lacks some of them, so a form that could be
  hostile is compiled in another process first (`grammar_trial.py`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import cached_property, partial
from threading import Lock, Thread, stack_size
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from minipaged.errors import InvalidRequest, RequestFailed
from minipaged.models import grammar_trial
from minipaged.models.tokenizer import Tokenizer
from minipaged.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Made = TypeVar("Made")
MOST_KEPT = 128
"""The number of compiled grammars that are kept for later requests."""
MOST_BYTES_KEPT = 2**29
"""The memory of these, as it was measured when a form was tried, and at least BYTES_A_CHARACTER of each form."""
BYTES_A_CHARACTER = 128
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
        self._kept: OrderedDict[StructuredOutputsParams, tuple[CompiledGrammar, int]] = OrderedDict()  # with its bytes
        self._num_bytes = 0  # of all in `_kept`
        self._used: WeakValueDictionary[StructuredOutputsParams, CompiledGrammar] = WeakValueDictionary()

    def compile(self, form: StructuredOutputsParams) -> CompiledGrammar:
        """Return the compiled grammar. Raises InvalidRequest, with the library's words, if it cannot do this form."""
        if found := self.compiled(form):
            return found
        library = self._library
        try:
            lark = _as_lark(library, form)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error)) from None
        num_bytes = max(_tried(lark) if _may_be_hostile(form) else 0, BYTES_A_CHARACTER * form.num_characters)
        return self._keep(
            form, CompiledGrammar(partial(self._compile, lark), self._vocab_size, self._special), num_bytes
        )

    def compiled(self, form: StructuredOutputsParams) -> CompiledGrammar | None:
        """Return the grammar if it has been compiled, and is still kept or in use."""
        with self._lock:
            if form in self._kept:
                self._kept.move_to_end(form)
            return self._used.get(form)

    def _keep(self, form: StructuredOutputsParams, grammar: CompiledGrammar, num_bytes: int) -> CompiledGrammar:
        with self._lock:
            if form not in self._kept:
                self._num_bytes += num_bytes
                self._kept[form] = grammar, num_bytes
            self._used[form] = grammar
            while len(self._kept) > MOST_KEPT or self._num_bytes > MOST_BYTES_KEPT:
                _, (_, freed) = self._kept.popitem(last=False)
                self._num_bytes -= freed
        return grammar

    def _compile(self, lark: str) -> tuple[LLMatcher, int]:
        """Compile. Return the library's state at the beginning of an output, and the tokens allowed there as bits."""
        try:
            matcher = self._library.LLMatcher(self._ll_tokenizer, lark, log_level=0, limits=self._limits)
            wrong = matcher.get_error()
        except (ValueError, RecursionError) as error:
            raise _refused(str(error)) from None
        if not wrong:
            first = int.from_bytes(matcher.compute_bitmask(), "little")  # the library explores what may come first
            wrong = matcher.get_error()
        if wrong:
            raise _refused(wrong)
        return matcher, first

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
        made: LLParserLimits = grammar_trial.limits(self._library)
        return made

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        """The tokenizer as llguidance uses it. Making it takes some tenths of a second for a large vocabulary."""
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._special)
        made: LLTokenizer = self._library.LLTokenizer(
            vocabulary, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_id
        )
        return made


class CompiledGrammar:
    """A compiled grammar.

    The library's copies of a state share one lexer, whose number of states is limited, over all outputs together. When
    it is full, the states in use fail one after another. Then the grammar is compiled again (its next *generation*),
    and each of them reads its output once more.
    """

    def __init__(
        self, make: Callable[[], tuple[LLMatcher, int]], vocab_size: int, special_token_ids: Collection[int]
    ) -> None:
        """`make`: compiles it (`GrammarCompiler._compile`)."""
        self._make = make
        self._matcher, self.first = _on_a_large_stack(make)
        self._generation = 0
        self._lock = Lock()
        self.vocab_size = vocab_size
        self._special = special_token_ids

    def begin(self, final_token_ids: Collection[int]) -> GrammarState:
        """Return the state of an empty output. The special tokens among `final_token_ids` may end the output wherever
        the grammar may end."""
        ends = sum(1 << token for token in final_token_ids if token in self._special)
        return GrammarState(self, ends)

    def copied(self, failed: int | None = None) -> tuple[LLMatcher, int]:
        """Return a copy of the state at the beginning, and its generation: a later one than `failed`."""
        with self._lock:
            if failed == self._generation:
                self._matcher, _ = _on_a_large_stack(self._make)
                self._generation += 1
            return self._matcher.deep_copy(), self._generation


class GrammarState:
    """The state of one sequence's output in its grammar (`engine.sequence.SequenceGrammar`)."""

    __slots__ = ("_ends", "_generation", "_grammar", "_matcher", "_tokens", "bits")

    def __init__(self, grammar: CompiledGrammar, ends: int) -> None:
        """`ends`: the tokens that may end the output, as bits of an integer."""
        self._grammar = grammar
        self._matcher, self._generation = grammar.copied()
        self._tokens: list[int] = []
        self._ends = ends
        self.bits = self._row(grammar.first)

    def _row(self, allowed: int) -> bytes:
        """Return the row of a set of tokens as bits of an integer, in which the bit just beyond the vocabulary says
        whether the output may end."""
        vocab_size = self._grammar.vocab_size
        if allowed >> vocab_size & 1:
            allowed |= self._ends
        allowed &= (1 << vocab_size) - 1
        return allowed.to_bytes((vocab_size + 31) // 32 * 4, "little")

    def consume(self, token_id: int) -> bool:
        tokens = [*self._tokens, token_id]
        allowed = self._after([token_id])
        if self._matcher.is_error():  # perhaps other outputs have filled the lexer: once more, with an empty one
            self._matcher, self._generation = self._grammar.copied(self._generation)
            allowed = self._after(tokens)
        if self._matcher.is_error():
            words = _plain(self._matcher.get_error())
            raise RequestFailed(f"structured_outputs cannot be followed any further: {words}")
        self._tokens.append(token_id)
        self.bits = self._row(allowed)
        return not self._ends and allowed == 1 << self._grammar.vocab_size

    def _after(self, token_ids: list[int]) -> int:
        """Step on by these tokens; returns what may come next, as bits. On failure the matcher is in error."""
        if not self._matcher.consume_tokens(token_ids):
            return 0
        return int.from_bytes(self._matcher.compute_bitmask(), "little")

    def fork(self) -> GrammarState:
        copy = GrammarState.__new__(GrammarState)
        copy._grammar, copy._matcher, copy._generation = self._grammar, self._matcher.deep_copy(), self._generation
        copy._tokens, copy._ends, copy.bits = list(self._tokens), self._ends, self.bits
        return copy


HARMLESS_CHARACTERS = 20_000
"""The longest schema that is not tried first for its length alone."""
SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
"""Characters that have a meaning in regular expressions."""
RISKY = re.compile(r'"(pattern|patternProperties|propertyNames|multipleOf|allOf|format)"|\\u')
"""Keys of a schema that can make compiling long, also as they may be hidden (`\\u0070attern`)."""


def _may_be_hostile(form: StructuredOutputsParams) -> bool:
    """Whether compiling could take long. Short schemas without patterns and the like cannot, nor can choices."""
    if form.choice is not None or form.json_object:
        return form.whitespace_pattern is not None
    if form.json is None or form.whitespace_pattern is not None:
        return True
    return len(str(form.json)) > HARMLESS_CHARACTERS or bool(RISKY.search(str(form.json)))


def _tried(lark: str) -> int:
    """Compile a form in another process, with limits. Returns the bytes that it took there. Raises InvalidRequest."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", grammar_trial.__file__],
            input=lark.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TRIAL_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refused(f"compiling takes more than {TRIAL_WALL_S} seconds") from None
    if done.returncode:
        most = f"{grammar_trial.TRIAL_S} seconds or {grammar_trial.TRIAL_BYTES >> 20} MiB"
        raise _refused(f"compiling takes more than {most}, or nests too deeply")
    return int(done.stdout or 0)


def _refused(words: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs cannot be followed: {_plain(words)}; change or simplify it")


TRIAL_WALL_S = 8
"""Seconds by the clock that a trial may take, on a busy machine too."""
_starting = Lock()


def _on_a_large_stack(call: Callable[[], Made]) -> Made:
    """Return the result of `call`, from a thread with a large stack. The library recurses once for each rule in a chain
    of rules, and a stack that is too small for that ends the process."""
    result: Future[Made] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    with _starting:  # the size holds for all threads that are started meanwhile
        before = stack_size(grammar_trial.STACK_BYTES)
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
        texts = "|".join(SPECIAL.sub(r"\\\g<0>", text) for text in form.choice)
        return str(library.LLMatcher.grammar_from_regex(texts))
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
