"""Find the tokens that end an answer of a model.

A checkpoint names them in up to three places. As in vLLM, each of the tokens found ends an answer:

- `generation_config.json` names the model's end tokens; if it names none, `config.json` does;
- the tokenizer's files name an "eos_token". In a chat model it is often the end of a turn.

A GGUF file names them by id, and llama.cpp adds some that it recognises by their text (`gguf_tokenizer.py`). The
conversion writes all of them into `generation_config.json`.
"""

from __future__ import annotations

from pathlib import Path

from minipaged.models.config import ModelConfig, token_ids
from minipaged.models.json_files import read_json_if_there
from minipaged.models.tokenizer_files import TOKENIZER, read_tokenizer


def end_token_ids(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """The ids of all tokens that end an answer of the model in `folder`, the model's own first.

    `config` has the ids of `config.json`. Ids outside the model's vocabulary, which it cannot generate, are left out.
    """
    generation = read_json_if_there(folder / "generation_config.json")
    ids = token_ids(generation.get("eos_token_id"), "eos_token_id") or config.eos_token_ids
    if (folder / TOKENIZER).is_file() and (own := read_tokenizer(folder).eos_token_id) is not None:
        ids += (own,)
    return tuple(dict.fromkeys(each for each in ids if each < config.vocab_size))
