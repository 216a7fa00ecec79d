"""A Llama small enough to run in milliseconds, as a folder: random weights, and a tokenizer with a token a byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": len(CONTROL_TOKENS) + 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # large, so that no two logits come close
}


def make_tiny_model(folder: Path, *, seed: int = 0, chat_template: bool = True, **config: Any) -> Path:
    """Write config, weights and tokenizer into `folder` and return it. `config`: what to change of LlamaConfig."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(SIZES | config))).save_pretrained(folder)
    write_byte_tokenizer(folder, chat_template=chat_template)
    return folder


def write_byte_tokenizer(folder: Path, *, chat_template: bool) -> None:
    """Every byte is a token: any text can be written, and none is more than one token a byte."""
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate((*CONTROL_TOKENS, *alphabet))}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": CONTROL_TOKENS[2]}
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
