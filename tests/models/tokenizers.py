"""Small tokenizers of each kind that models have, as `tokenizers.Tokenizer`, for the tests of minipaged/models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

SPECIAL = ("<unk>", "<s>", "</s>")


def byte_level() -> Tokenizer:
    """GPT-2's way: tokens are written in an alphabet of bytes."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe", "Ã©"]
    tokenizer = Tokenizer(
        BPE({name: i for i, name in enumerate(names)}, [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(tokenizer)


def bpe_with_byte_fallback() -> Tokenizer:
    """Llama 2's way: spaces are U+2581, one of them is put first, and what the vocabulary lacks falls back to bytes."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Tokenizer(BPE({n: i for i, n in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_special(tokenizer)


def unigram_with_metaspace() -> Tokenizer:
    """T5's way, with bytes to fall back to."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "the", "▁the"]
    tokenizer = Tokenizer(Unigram([(name, -float(i)) for i, name in enumerate(names)], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_special(tokenizer)


def word_piece() -> Tokenizer:
    """BERT's way: words apart, and their later parts marked."""
    names = [*SPECIAL, "the", "in", "##ner", "t", "##h", "##e"]
    tokenizer = Tokenizer(WordPiece({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return _with_special(tokenizer)


def write(tokenizer: Tokenizer, folder: Path, **settings: Any) -> Path:
    """Writes `tokenizer` and the `settings` of its `tokenizer_config.json` into `folder` and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder


def _with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer
