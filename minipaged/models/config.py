"""The shape of a Llama: what `config.json` says, checked and named as transformers names it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those trained on."""

    rope_type: str
    """"linear" or "llama3"."""
    factor: float
    low_freq_factor: float = 1.0
    """llama3 only: wavelengths longer than original_max_position_embeddings / low_freq_factor are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3 only: wavelengths shorter than original_max_position_embeddings / high_freq_factor are kept."""
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One Llama architecture. Field names are those of transformers' `LlamaConfig`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
