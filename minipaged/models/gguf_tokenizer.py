"""Build the tokenizer of a GGUF file, to be saved as a `tokenizer.json` in the Hugging Face hub's format.

There are two kinds (`tokenizer.ggml.model`):

    gpt2    tokens in an alphabet of bytes, with merges. The file only *names* the rule that splits a text into words
            before the merges apply (`tokenizer.ggml.pre`); this module implements the rules
    llama   SentencePiece, of Llama 2, Mistral and Gemma: no words, spaces are written as U+2581, and each token has a
            score instead of merges. What the vocabulary lacks becomes the tokens of its bytes

Another kind or an unknown rule is an error: a tokenizer that is nearly right makes a model subtly worse, and the user
would not notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from minipaged.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

WAY_OUT = "put the model's tokenizer.json (and tokenizer_config.json) beside the .gguf file and try again"

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
"""Llama 3 separates contractions, words, numbers of up to three digits, punctuation and white space.
Qwen2 also separates every digit."""


class TokenType(IntEnum):
    """The token types of llama.cpp that need special treatment."""

    UNKNOWN = 2
    """The token for text that has no other."""
    CONTROL = 3
    """A special token: decoding leaves it out."""
    USER_DEFINED = 4
    """A token that is matched in the text as a whole, before any merges."""
    BYTE = 6
    """A byte, "<0x0A>", of a character that is not in the vocabulary."""


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that the `tokenizer.ggml.*` entries describe. Raises ModelError for an unknown kind."""
    from tokenizers import AddedToken, processors

    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"the GGUF file has a tokenizer of kind {kind!r}; only 'gpt2' (BPE) and 'llama' (SentencePiece) are "
            f"supported: {WAY_OUT}"
        )
    refused = ["add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap"]
    for key in refused if kind == "llama" else [*refused, "add_space_prefix"]:
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise ModelError(f"tokenizer.ggml.{key} is set, which is not supported: {WAY_OUT}")
    # A missing rule means llama.cpp's "default", its guess for files from converters that did not know the tokenizer.
    rule = metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = _byte_level(metadata, rule) if kind == "gpt2" else _sentence_piece(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    added = [
        AddedToken(token, special=_is_control(token, token_type), normalized=False)
        for token, token_type in _typed_tokens(metadata)
        if _is_control(token, token_type) or token_type == TokenType.USER_DEFINED
    ]
    tokenizer.add_tokens(added)
    # As in llama.cpp, a text begins with BOS if the file says so, and by default for Llama 3 and SentencePiece; it ends
    # with EOS if the file says so.
    first, last = token_id(metadata, "bos"), token_id(metadata, "eos")
    first = first if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or rule == "llama-bpe") else None
    last = last if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if (first, last) != (None, None):
        before, after = (None if each is None else tokens[each] for each in (first, last))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[each for each in (before, "$A", after) if each],
            pair=[each for each in (before, "$A", "$B", after) if each],
            special_tokens=[(tokens[each], each) for each in {first, last} if each is not None],
        )
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], rule: str) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    tokenizer = Tokenizer(
        BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
            ignore_merges=rule == "llama-bpe",  # a word in the vocabulary is one token, even if no merges produce it
        )
    )
    tokenizer.pre_tokenizer = _word_splitter(rule)
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    tokens, unknown = metadata["tokenizer.ggml.tokens"], token_id(metadata, "unknown")
    tokenizer = Tokenizer(
        BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_by_score(metadata),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_space = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        tokenizer.decoder = decoders.Sequence([*to_space, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.decoder = decoders.Sequence(to_space)
    return tokenizer


SPACE = "\u2581"


def _merges_by_score(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of tokens that form a token, the best score first.

    SentencePiece joins, among all neighbours that form a token, those whose token has the best score. Pairs of the same
    score are in transformers' order: the longest left part first.
    """
    tokens, scores = _typed_tokens(metadata), metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise ModelError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens: {WAY_OUT}")
    pieces = {
        token: score
        for (token, kind), score in zip(tokens, scores, strict=True)
        if kind not in (TokenType.UNKNOWN, TokenType.BYTE) and not _is_control(token, kind)
    }
    pairs = [
        (score, token[:cut], token[cut:])
        for token, score in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
    return [(left, right) for _, left, right in pairs]


def token_id(metadata: Mapping[str, Any], role: str) -> int | None:
    """The id of the token for a role ("bos", "eos", ...), or None. Like llama.cpp, ignores an id without a token."""
    found = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return found if isinstance(found, int) and 0 <= found < len(metadata.get("tokenizer.ggml.tokens", ())) else None


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of the tokens that end an answer, by llama.cpp's rules.

    They are the tokens that the file names as the end of a text, a turn or a message, and those in END_NAMES.
    """
    named = [token_id(metadata, role) for role in ("eos", "eot", "eom")]
    both = enumerate(_typed_tokens(metadata))
    called = [i for i, (token, kind) in both if token in END_NAMES and _is_control(token, kind)]
    return list(dict.fromkeys(each for each in (*named, *called) if each is not None))


def _typed_tokens(metadata: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Each token with its type; None if the file has no type for it."""
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", [])
    return list(zip_longest(tokens, types[: len(tokens)]))


def _is_control(token: str, token_type: int | None) -> bool:
    """Whether a token is a control token by its type or, as in llama.cpp, by its name. The name "</s>" does not count,
    because it is also an HTML tag."""
    return token_type == TokenType.CONTROL or (token in END_NAMES and token != "</s>")


END_NAMES = {
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>"),
    *("<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
}
"""Names of tokens that end a text or a turn, for models whose files name only one of them."""


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: the special tokens by role, the context length and the chat template."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (found := token_id(metadata, key)) is not None:
            config[f"{role}_token"] = metadata["tokenizer.ggml.tokens"][found]
    if (length := metadata.get(f"{metadata.get('general.architecture')}.context_length")) is not None:
        config["model_max_length"] = length
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config


def _word_splitter(rule: str) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    match rule:
        case "gpt-2":
            return ByteLevel(add_prefix_space=False, use_regex=True)
        case "smollm":
            return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
        case "llama-bpe" | "qwen2":
            words = Split(Regex(LLAMA3_WORDS if rule == "llama-bpe" else QWEN2_WORDS), behavior="isolated")
            return Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
        case _:
            raise ModelError(
                f"the GGUF file's tokenizer splits words by the rule {rule!r}; supported are 'gpt-2', 'smollm', "
                f"'llama-bpe' and 'qwen2': {WAY_OUT}"
            )
