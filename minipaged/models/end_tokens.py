"""Where the tokens come from that end an answer: decided here, for every model.

A checkpoint names them in up to three places, and any of its tokens ends an answer, as in vLLM:

- `generation_config.json`, which says what ends an answer of this model; where it is silent, `config.json`;
- the tokenizer's own end of text: the "eos_token" that its files name. A chat model's is often the end of a turn.

A GGUF file names them by id, and llama.cpp takes some more by their names (`gguf_tokenizer.py`); conversion writes
all of them into `generation_config.json`.
"""

from __future__ import annotations

from pathlib import Path

from minipaged.models.config import ModelConfig, token_ids
from minipaged.models.json_files import read_json_if_there
from minipaged.models.tokenizer_files import TOKENIZER, read_tokenizer


def end_token_ids(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """The ids of all tokens that end an answer of the model in `folder`, the model's own first.

    `config` has those of `config.json`. An id that the model has no logit for ends nothing, and is left out.
    """
    generation = read_json_if_there(folder / "generation_config.json")
    ids = token_ids(generation.get("eos_token_id"), "eos_token_id") or config.eos_token_ids
    if (folder / TOKENIZER).is_file() and (own := read_tokenizer(folder).eos_token_id) is not None:
        ids += (own,)
    return tuple(dict.fromkeys(each for each in ids if each < config.vocab_size))
