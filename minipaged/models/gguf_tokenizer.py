"""The tokenizer inside a GGUF file, written out as the Hugging Face hub's `tokenizer.json`.

A GGUF file carries vocabulary, merges and token types, but only *names* the rule that cuts a text into words before
the merges apply (`tokenizer.ggml.pre`). Each rule has to be known here; one that is not is an error, since a
tokenizer that is nearly right gives a model that is subtly worse, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
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
"""Llama 3 cuts contractions, words, numbers of up to three digits, punctuation and white space apart;
Qwen every digit by itself."""


class TokenType(IntEnum):
    """llama.cpp's kinds of tokens, as far as they need care."""

    CONTROL = 3
    """Special: never produced by text, left out when decoding."""
    USER_DEFINED = 4
    """Found in the text as a whole, before any merges."""


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` entries describe. Raises ModelError for a kind not known here."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE

    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"the GGUF file has a tokenizer of kind {kind!r}; only 'gpt2' (BPE) is known here: {WAY_OUT}")
    # A missing rule is llama.cpp's "default": its guess for files of converters that did not know the tokenizer.
    rule = metadata.get("tokenizer.ggml.pre", "default")
    is_llama3 = rule == "llama-bpe"
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    tokenizer = Tokenizer(
        BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
            ignore_merges=is_llama3,  # a word that is a token is taken whole, even where no merges lead to it
        )
    )
    tokenizer.pre_tokenizer = _word_splitter(rule)
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    # llama.cpp begins every text with BOS where the file says so, and for Llama 3 where it says nothing.
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", is_llama3):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What `tokenizer_config.json` says beside it: the special tokens by role, and the chat template."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{role}_token"] = metadata["tokenizer.ggml.tokens"][token_id]
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
                f"the GGUF file's tokenizer cuts words by the rule {rule!r}; known here are 'gpt-2', 'smollm', "
                f"'llama-bpe' and 'qwen2': {WAY_OUT}"
            )
