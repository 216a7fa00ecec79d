"""A Llama small enough to run in milliseconds, as a folder: random weights, and a tokenizer with a token a byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def make_successor_model(folder: Path, vocab_size: int, successors: Mapping[int, int], **config: Any) -> Path:
    """Write a Llama after whose token t comes successors[t], whatever was before; and return its folder.

    Its layers add nothing: the embeddings are unit vectors, and the head says what follows each.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SIZES | {"vocab_size": vocab_size, "hidden_size": vocab_size + -vocab_size % 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**(sizes | {"eos_token_id": None} | config)))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.fill_(1 if "norm" in name else 0)
        for token_id in range(vocab_size):
            model.model.embed_tokens.weight[token_id, token_id] = 1
        for token_id, then in successors.items():
            model.lm_head.weight[then, token_id] = 1
    model.save_pretrained(folder)
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
