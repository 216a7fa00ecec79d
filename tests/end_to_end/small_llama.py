"""Small random Llamas and cousins, written as transformers writes a checkpoint, with a tokenizer of their own.

Their weights are scaled so that the logits spread over a few units and attention counts for as much as the token
itself: greedy text wanders, and a key or value read from the wrong slot changes it within a few tokens.
"""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_model import CHAT_TEMPLATE, CONTROL_TOKENS

MERGES = ["t h", "e r", "o n", "a n", "i n", "r e", "e n", "o r", "t i", "s t", "a l", "a r", "l e", "e d", "i s"]
MERGES += ["th e", "Ġ the", "an d", "in g", "0 0", "1 0", "Ġ a", "Ġ o", "Ġ s", "l l", "o u", "c h", "s h", "e e"]
CONFIG = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_small_llama(
    folder: Path,
    *,
    model_type: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    chat_template: str | None = CHAT_TEMPLATE,
    **config: Any,
) -> Path:
    """Write a model to `folder` and return it. `config`: fields of its configuration that differ from CONFIG."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(CONFIG | config)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5).sub_(int(model_type.startswith("gemma")))  # Gemma stores w - 1
            elif name.endswith("bias"):
                weight.normal_(0, 0.5)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.normal_(0, 2.5 / math.sqrt(weight.shape[1]))
            else:
                weight.normal_(0, 1.5 / math.sqrt(weight.shape[1]))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder, chat_template)
    return folder


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """A tokenizer of 128 tokens: three special ones, printable ASCII and the newline, and the merges."""
    letters = string.digits + string.ascii_letters + string.punctuation + "ĠĊ"  # the last two: space and newline
    vocab = [*CONTROL_TOKENS, *letters, *(merge.replace(" ", "") for merge in MERGES)]
    ids = {token: i for i, token in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[tuple(merge.split()) for merge in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
