"""The shape of a Llama or a related model: `config.json`, checked, with the names that transformers uses.

The model is a decoder of `num_hidden_layers` equal layers. Each layer has an attention, where `num_attention_heads`
query heads share `num_key_value_heads` key/value heads (grouped-query attention), and a gated MLP. This determines
the size of the KV cache per token: 2 (K and V) * layers * KV heads * head_dim numbers.

The related models differ from Llama in one point each:

    Mistral   a token attends to the last `sliding_window` tokens only (newer versions: to all, like Llama)
    Qwen2     the query, key and value projections add a bias
    Qwen3     the query and the key of each head are normalised before they are rotated

transformers has written the rotary settings in two ways, and both are read:

    v4    "rope_theta": 10000.0, "rope_scaling": null or {"rope_type": ..., "factor": ...}   (older: "type")
    v5    "rope_parameters": {"rope_theta": 10000.0, "rope_type": ..., "factor": ...}

Some settings would make the result wrong if they were ignored: another architecture, another activation, a factor that
only other architectures have. They are refused here, before any weight is read. `quantized/` refuses quantized weights
that it cannot read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minipaged.errors import ModelError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies are scaled for contexts longer than those in training."""

    rope_type: str
    """"linear" or "llama3"."""
    factor: float
    low_freq_factor: float = 1.0
    """llama3 only: wavelengths above original_max_position_embeddings / low_freq_factor are multiplied by `factor`."""
    high_freq_factor: float = 4.0
    """llama3 only: wavelengths below original_max_position_embeddings / high_freq_factor stay as they are."""
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of one model. Fields have the names of transformers' `LlamaConfig` where it has them."""

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
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias."""
    o_bias: bool = False
    """Whether the attention's output projection adds a bias."""
    mlp_bias: bool = False
    """Whether the three projections of the MLP add a bias."""
    qk_norm: bool = False
    """Whether each head's query and key get an RMS norm over head_dim before they are rotated."""
    sliding_window: int | None = None
    """The number of tokens, itself included, to which a token attends in layers with a window. None: no layer has one.
    """
    kv_cache_dtype: str = "auto"
    """"int8" or "fp8" if the checkpoint contains scales for storing keys and values in that type."""

    @property
    def context_length(self) -> int:
        """The longest sequence that can run. A sliding window limits it, because attention here applies no window."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> ModelConfig:
        """Make a ModelConfig from the content of a `config.json`. Raises ModelError if a key is missing or the model is
        not supported."""
        model_type = _model_type(d)
        d = {**ARCHITECTURES[model_type][1], **d}
        hidden_size = _size(d, "hidden_size")
        num_heads = _size(d, "num_attention_heads")
        num_kv_heads = _size(d, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = "
                f"{num_kv_heads}; each KV head serves the same number of query heads"
            )
        if d.get("head_dim") is None and hidden_size % num_heads:
            raise ModelError(
                f"config.json: hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}, "
                "and no head_dim says how large a head is"
            )
        head_dim = _size(d, "head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim = {head_dim} is odd; rotary embeddings turn pairs of dimensions")
        _check_supported(d, model_type, head_dim)
        rope = _rope_parameters(d)
        bos = d.get("bos_token_id")
        attention_bias = model_type in ("llama", "qwen3") and bool(d.get("attention_bias"))  # the others ignore it
        return cls(
            vocab_size=_size(d, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(d, "intermediate_size"),
            num_hidden_layers=_size(d, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(d, "rms_norm_eps", default=1e-6),
            rope_theta=_number(rope, "rope_theta", default=10000.0),
            rope_scaling=_rope_scaling(rope),
            max_position_embeddings=_size(d, "max_position_embeddings", default=2048),
            tie_word_embeddings=bool(d.get("tie_word_embeddings", False)),
            bos_token_id=None if bos is None else token_ids(bos, "bos_token_id")[0],
            eos_token_ids=token_ids(d.get("eos_token_id"), "eos_token_id"),
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=model_type == "llama" and bool(d.get("mlp_bias")),
            qk_norm=model_type == "qwen3",
            sliding_window=_sliding_window(d, model_type),
        )


QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", MISTRAL),
    "qwen2": ("Qwen2ForCausalLM", QWEN),
    "qwen3": ("Qwen3ForCausalLM", QWEN | {"head_dim": 128}),
}
"""For each model_type: the class in transformers, and its defaults where they differ from Llama's."""


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of the model, by its name in transformers' checkpoints.

    A projection is stored as [outputs, inputs]: y = x @ weight.T
    """
    hidden, mlp = config.hidden_size, config.intermediate_size
    query_dim = config.num_attention_heads * config.head_dim
    kv_dim = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (query_dim, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, query_dim),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (mlp, hidden),
            f"{layer}.mlp.up_proj.weight": (mlp, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, mlp),
        }
        biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] if config.qkv_bias else []
        biased += ["self_attn.o_proj"] if config.o_bias else []
        biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] if config.mlp_bias else []
        shapes |= {f"{layer}.{name}.bias": shapes[f"{layer}.{name}.weight"][:1] for name in biased}
        if config.qk_norm:
            shapes |= {f"{layer}.self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def token_ids(value: object, key: str) -> tuple[int, ...]:
    """The token ids in `value`, which `config.json` writes as null, one number or a list."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"{key} is {value!r}; expected a token id, a list of them, or null")
    return tuple(ids)


def _model_type(d: Mapping[str, Any]) -> str:
    """The key of ARCHITECTURES that `architectures`, `model_type` or both name."""
    written, model_type = d.get("architectures") or [], d.get("model_type")
    for kind, (name, _) in ARCHITECTURES.items():
        if model_type in (None, kind) and all(each == name for each in written) and (written or model_type):
            return kind
    known = ", ".join(f"{name} (model_type '{kind}')" for kind, (name, _) in ARCHITECTURES.items())
    raise ModelError(f"config.json: architectures = {written}, model_type = {model_type!r}; only {known} are supported")


HARMLESS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    # which tokens a token attends to, and with what weight
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "alibi": (False,),
    "use_alibi": (False,),
    "attention_chunk_size": (0,),
    **dict.fromkeys(("attn_logit_softcapping", "logit_softcapping", "attention_logit_cap"), (0,)),
    **dict.fromkeys(("attn_output_gate", "attn_temperature_tuning"), (False,)),
    "attention_scaling": (1,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (0,),
    # positions of tokens
    # older versions wrote "absolute" by default, without any meaning
    "position_embedding_type": ("rope", "rotary", "absolute"),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope_pct"), (1,)),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "no_rope_layer_interval": (0,),
    # residual stream and logits
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "embedding_multiplier": (1,),
    "embedding_scale": (1,),
    "scale_emb": (1,),
    "residual_multiplier": (1,),
    "residual_scale": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "lm_head_multiplier": (1,),
    "final_logit_softcapping": (0,),
    # mixtures of experts
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
}
"""Keys that can ask for a different computation, with the values that do not (null never does).
transformers' Llama ignores most of them, but a checkpoint that sets one needs it. All other keys that transformers'
Llama, Mistral, Qwen2 and Qwen3 ignore are accepted, because they do not change the result.
"""


def _check_supported(d: Mapping[str, Any], model_type: str, head_dim: int) -> None:
    """Raises ModelError for a key that asks for a computation which is not supported."""
    harmless = HARMLESS | {
        "attention_multiplier": (head_dim**-0.5,),
        "query_pre_attn_scalar": (head_dim,),
        "v_head_dim": (head_dim,),
        **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), (model_type == "qwen3",)),
    }
    for key, values in harmless.items():
        if (value := d.get(key)) is not None and value not in values:
            wanted = " or ".join(map(repr, values)) or "null"
            raise ModelError(
                f"config.json: {key} = {value!r} is not supported; {ARCHITECTURES[model_type][0]} has {wanted}"
            )
    for key in ("no_rope_layers", "layer_types"):
        if not isinstance(d.get(key), list | None):
            raise ModelError(f"config.json: {key} = {d[key]!r}; expected a list, with an entry for each layer")
    if not all(d.get("no_rope_layers") or ()):
        raise ModelError("config.json: no_rope_layers names layers without rotary embeddings, which are not supported")
    known = {"full_attention", "sliding_attention"} if model_type != "llama" else {"full_attention"}
    kinds = set(d.get("layer_types") or ())
    if not kinds <= known or (model_type == "mistral" and len(kinds) > 1):
        raise ModelError(
            f"config.json: layer_types names {', '.join(sorted(map(repr, kinds)))}, and {ARCHITECTURES[model_type][0]} "
            f"has {' or '.join(sorted(map(repr, known)))}"
        )


def _sliding_window(d: Mapping[str, Any], model_type: str) -> int | None:
    """The sliding window, or None. Qwen writes one even where it uses none, and may use it in the last layers only."""
    if model_type == "llama" or d["sliding_window"] is None:
        return None
    if model_type != "mistral":
        layers = d.get("layer_types")  # transformers v5 writes this instead of max_window_layers
        first = _present(d, "max_window_layers", 0)
        slides = first < _size(d, "num_hidden_layers") if layers is None else "sliding_attention" in layers
        if not (slides and d.get("use_sliding_window")):
            return None
    return _size(d, "sliding_window")


def _rope_parameters(d: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings in the form of transformers v5. As in transformers, v4's settings win if both are present."""
    written = d.get("rope_scaling") or d.get("rope_parameters") or {}
    if not isinstance(written, dict):
        raise ModelError(f"config.json: the rotary settings read {written!r}; expected an object or null")
    rope = {"rope_theta": d["rope_theta"]} if "rope_theta" in d else {}
    rope |= written
    if (original := d.get("original_max_position_embeddings")) is not None:
        rope["original_max_position_embeddings"] = original
    return rope


ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}
"""The keys that describe the scaling, by type of rotary embedding."""
ROPE_HARMLESS: dict[str, tuple[Any, ...]] = {
    "factor": (1,),
    "partial_rotary_factor": (1,),
    "attention_factor": (1,),
    "mscale": (0, 1),
    "mscale_all_dim": (0, 1),
}
"""Other keys, with the values that change nothing. Keys in neither table, and settings per layer, must be null."""


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KEYS:
        raise ModelError(
            f"config.json: rope type {kind!r} is not supported; supported are 'default', 'linear' and 'llama3'"
        )
    read = ROPE_KEYS[kind] | {"rope_theta", "rope_type", "type", "original_max_position_embeddings"}
    for key, value in rope.items():
        if key not in read and value is not None and value not in ROPE_HARMLESS.get(key, ()):
            raise ModelError(
                f"config.json: {key} = {value!r} in the rotary settings of type {kind!r} is not supported; remove "
                "it if it has no effect, or name the type that it belongs to"
            )
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", _number(rope, "factor"))
    return RopeScaling(
        "llama3",
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_position_embeddings=_size(rope, "original_max_position_embeddings"),
    )


def _size(d: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _present(d, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} = {value!r}; expected a whole number, 1 or more")
    return value


def _number(d: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _present(d, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {key} = {value!r}; expected a positive number")
    return float(value)


def _present(d: Mapping[str, Any], key: str, default: float | None) -> Any:
    value = d.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: '{key}' is missing")
    return value
