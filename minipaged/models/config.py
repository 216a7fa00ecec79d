"""The shape of a Llama or a related model: `config.json`, checked, with the names that transformers uses.

The model is a decoder of `num_hidden_layers` layers. Each layer has an attention, where `num_attention_heads` query
heads share `num_key_value_heads` key/value heads (grouped-query attention), and a gated MLP. This determines the size
of the KV cache per token: 2 (K and V) * layers * KV heads * head_dim numbers.

The related models differ from Llama:

    Mistral   a token attends to the last `sliding_window` tokens only (newer versions: to all, like Llama)
    Qwen2     the query, key and value projections add a bias
    Qwen3     the query and the key of each head are normalised before they are rotated
    Gemma 2   every other layer has a window; soft caps of scores and logits, a scale of its own for scores, and the
              four things that `ModelConfig.gemma` names
    Gemma 3   five of six layers have a window, and rotary frequencies of their own; those four things, and the norms
              of Qwen3

transformers has written the rotary settings in two ways, and both are read:

    v4    "rope_theta": 10000.0, "rope_scaling": null or {"rope_type": ..., "factor": ...}   (older: "type")
    v5    "rope_parameters": {"rope_theta": 10000.0, "rope_type": ..., "factor": ...}

Gemma 3 has two sets of them. v4 adds "rope_local_base_freq", the base in layers with a window; v5 has a set for each
type of layer: {"full_attention": {"rope_theta": ...}, "sliding_attention": {"rope_theta": ...}}. Which layers have a
window is written as `layer_types`; v4's Gemma 3 has a `sliding_window_pattern` of n, where each nth layer has none.

Some settings would make the result wrong if they were ignored: another architecture, another activation, a factor that
only other architectures have. They are refused here, before any weight is read. `quantized/` refuses quantized weights
that it cannot read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minipaged.errors import ModelError
from minipaged.models.layer_groups import LayerGroups, group_layers


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
    layer_windows: tuple[int | None, ...] = ()
    """For each layer, the number of tokens, itself included, to which a token attends; None: all before it and itself.
    Empty if no layer has a window."""
    window_rope_theta: float | None = None
    """The base of the rotary frequencies in layers with a window, which are not scaled. None: as in the other layers.
    """
    query_pre_attn_scalar: float | None = None
    """Scores are divided by its square root. None: head_dim."""
    attn_logit_softcapping: float | None = None
    """Scores become cap × tanh(score / cap), so that none is larger than the cap. None: no cap."""
    final_logit_softcapping: float | None = None
    """A cap for the logits, in the same way. None: no cap."""
    gemma: bool = False
    """Whether the model has what Gemma 2 and 3 have in common: embeddings are multiplied by the square root of
    hidden_size; the results of attention and MLP are normalised too, before they are added; the weights of norms are
    stored as w - 1 (loading adds 1); the MLP's gate is GELU (with tanh) in place of SiLU."""
    given_groups: LayerGroups | None = None
    """The groups of the layers, if they are those of a pipeline's stage, or one for all; None: those that
    `group_layers` makes."""
    kv_cache_dtype: str = "auto"
    """"int8" or "fp8" if the checkpoint contains scales for storing keys and values in that type."""

    def window(self, layer: int) -> int | None:
        """The layer's window in tokens; None if its tokens attend to all before them."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def groups(self) -> LayerGroups:
        """The groups of layers that share a block table."""
        return self.given_groups or group_layers(self.layer_windows or (None,) * self.num_hidden_layers)

    def in_one_group(self) -> ModelConfig:
        """The configuration with all layers in one group, whose block table keeps everything."""
        return replace(self, given_groups=LayerGroups((None,), (0,) * self.num_hidden_layers))

    def up_to(self, max_model_len: int | None) -> ModelConfig:
        """The configuration for texts of at most this many tokens (None: as many as the model allows). If no window is
        shorter, no block is ever passed, and all layers are in one group."""
        longest = self.max_position_embeddings if max_model_len is None else max_model_len
        passes = any(window is not None and window < longest for window in self.layer_windows)
        return self if passes else self.in_one_group()

    def rope(self, window: int | None) -> tuple[float, RopeScaling | None]:
        """The base of the rotary frequencies, and their scaling, in layers with this window (or None)."""
        if window is None or self.window_rope_theta is None:
            return self.rope_theta, self.rope_scaling
        return self.window_rope_theta, None

    @property
    def layer_norms(self) -> tuple[str, str | None, str, str | None]:
        """The names of a layer's norms: before and after attention, before and after the MLP. None: there is none."""
        if self.gemma:
            return (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        return "input_layernorm", None, "post_attention_layernorm", None  # "post": after attention was added

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
        rope, window_rope = _rope_parameters(d, model_type)
        bos = d.get("bos_token_id")
        attention_bias = model_type not in ("mistral", "qwen2") and bool(d.get("attention_bias"))  # those ignore it
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
            qk_norm=model_type in HEADS_NORMALISED,
            layer_windows=_layer_windows(d, model_type),
            window_rope_theta=_window_rope_theta(window_rope),
            query_pre_attn_scalar=_number(d, "query_pre_attn_scalar") if model_type in GEMMAS else None,
            attn_logit_softcapping=_optional_number(d, "attn_logit_softcapping") if model_type == "gemma2" else None,
            final_logit_softcapping=_optional_number(d, "final_logit_softcapping") if model_type in GEMMAS else None,
            gemma=model_type in GEMMAS,
        )


QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
GEMMA |= {"sliding_window": 4096, "query_pre_attn_scalar": 256}
TWO_BASES = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", MISTRAL),
    "qwen2": ("Qwen2ForCausalLM", QWEN),
    "qwen3": ("Qwen3ForCausalLM", QWEN | {"head_dim": 128}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA | CAPS | {"max_position_embeddings": 8192}),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA | TWO_BASES | {"max_position_embeddings": 131072}),
}
"""For each model_type: the class in transformers, and its defaults where they differ from Llama's."""
GEMMAS = ("gemma2", "gemma3_text")
HEADS_NORMALISED = ("qwen3", "gemma3_text")
"""The types that normalise each head's query and key."""


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
        before_attention, *other_norms = (f"{layer}.{norm}.weight" for norm in config.layer_norms if norm)
        shapes |= {
            before_attention: (hidden,),
            f"{layer}.self_attn.q_proj.weight": (query_dim, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, query_dim),
            **dict.fromkeys(other_norms, (hidden,)),
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
    if model_type == "gpt_oss" or "GptOssForCausalLM" in written:
        raise ModelError(
            "config.json: GptOssForCausalLM (model_type 'gpt_oss') is a mixture of experts; only dense models are "
            "supported"
        )
    known = ", ".join(f"{name} (model_type '{kind}')" for kind, (name, _) in ARCHITECTURES.items())
    raise ModelError(f"config.json: architectures = {written}, model_type = {model_type!r}; only {known} are supported")


HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "swish")),
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
Llama, Mistral, Qwen2, Qwen3 and Gemma ignore are accepted, because they do not change the result.
"""
READ_BY_GEMMA = {
    "gemma2": ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3_text": ("query_pre_attn_scalar", "final_logit_softcapping", "rope_local_base_freq"),
}
"""Keys of HARMLESS that these types read."""


def _check_supported(d: Mapping[str, Any], model_type: str, head_dim: int) -> None:
    """Raises ModelError for a key that asks for a computation which is not supported."""
    harmless = HARMLESS | {
        "attention_multiplier": (head_dim**-0.5,),
        "query_pre_attn_scalar": (head_dim,),
        "v_head_dim": (head_dim,),
        **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), (model_type in HEADS_NORMALISED,)),
    }
    if model_type in GEMMAS:
        harmless |= dict.fromkeys(("hidden_act", "hidden_activation"), ("gelu_pytorch_tanh",))
    for key, values in harmless.items():
        if key in READ_BY_GEMMA.get(model_type, ()):
            continue
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
    is_mixed = model_type == "mistral" and len(kinds) > 1
    if is_mixed or not kinds <= known:
        raise ModelError(
            f"config.json: layer_types names {', '.join(sorted(map(repr, kinds)))}, and {ARCHITECTURES[model_type][0]} "
            f"has {' or '.join(sorted(map(repr, known)))}" + (", the same in all layers" if is_mixed else "")
        )


def _layer_windows(d: Mapping[str, Any], model_type: str) -> tuple[int | None, ...]:
    """The window of each layer; empty if none has one. Qwen writes a window even where it uses none, and may use it in
    the last layers only."""
    num_layers = _size(d, "num_hidden_layers")
    if model_type == "llama" or (d["sliding_window"] is None and model_type not in GEMMAS):
        return ()
    if model_type.startswith("qwen") and not d.get("use_sliding_window"):
        return ()
    window = _size(d, "sliding_window")
    if model_type == "mistral":  # all layers, whatever layer_types says
        return (window,) * num_layers
    if (kinds := d.get("layer_types")) is None and model_type in GEMMAS:
        every = 2 if model_type == "gemma2" else _size(d, "sliding_window_pattern", default=6)
        slides = [(i + 1) % every > 0 for i in range(num_layers)]
    elif kinds is None:
        first = _present(d, "max_window_layers", 0)
        slides = [i >= first for i in range(num_layers)]
    elif len(kinds) == num_layers:
        slides = [kind == "sliding_attention" for kind in kinds]
    else:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries, and num_hidden_layers = {num_layers}")
    return tuple(window if each else None for each in slides) if any(slides) else ()


def _rope_parameters(d: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary settings in the form of transformers v5: of layers that see all tokens, and of layers with a window
    (empty: the same). As in transformers, v4's settings win if both are present."""
    written, v4 = _settings(d, "rope_parameters"), _settings(d, "rope_scaling")
    if model_type == "gemma3_text":
        if others := written.keys() - {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"config.json: {min(others)} in rope_parameters is not supported; Gemma3ForCausalLM has one set of "
                "rotary settings for 'full_attention' and one for 'sliding_attention'"
            )
        local = {"rope_theta": d["rope_local_base_freq"], **_settings(written, "sliding_attention")}
        return {"rope_theta": d["rope_theta"], **_settings(written, "full_attention"), **v4}, local
    rope = {"rope_theta": d["rope_theta"]} if "rope_theta" in d else {}
    rope |= v4 or written
    if (original := d.get("original_max_position_embeddings")) is not None:
        rope["original_max_position_embeddings"] = original
    return rope, {}


def _settings(d: Mapping[str, Any], key: str) -> dict[str, Any]:
    written = d.get(key) or {}
    if not isinstance(written, dict):
        raise ModelError(f"config.json: the rotary settings read {written!r}; expected an object or null")
    return written


def _window_rope_theta(rope: Mapping[str, Any]) -> float | None:
    """The base of the rotary frequencies in layers with a window. Raises ModelError if they are scaled there."""
    if not rope:
        return None
    if _rope_scaling(rope) is not None:
        raise ModelError(
            f"config.json: rope type {rope['rope_type']!r} for 'sliding_attention' is not supported; layers with a "
            "window have 'default'"
        )
    return _number(rope, "rope_theta")


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


def _optional_number(d: Mapping[str, Any], key: str) -> float | None:
    return None if d.get(key) is None else _number(d, key)


def _present(d: Mapping[str, Any], key: str, default: float | None) -> Any:
    value = d.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: '{key}' is missing")
    return value
