"""What a config.json says, in both of transformers' formats, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from minipaged.errors import ModelError
from minipaged.models.config import HARMLESS, ModelConfig, RopeScaling, weight_shapes
from minipaged.reference.rope import inverse_frequencies
from tests.effort import examples

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: list[dict[str, Any]] = [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.5}, LLAMA3]


@st.composite
def llama_settings(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    head_dim = 2 * draw(st.integers(1, 8))
    return {
        "vocab_size": draw(st.integers(1, 50)),
        "hidden_size": kv_heads * group * draw(st.sampled_from([2, 4, head_dim])),
        "intermediate_size": draw(st.integers(1, 50)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "max_position_embeddings": draw(st.integers(1, 10_000)),
        "tie_word_embeddings": draw(st.booleans()),
        "eos_token_id": draw(st.sampled_from([None, 2, [2, 5]])),
        "rope_parameters": {"rope_theta": draw(st.sampled_from([10000.0, 5e5]))} | draw(st.sampled_from(ROPES)),
    }


def as_v4(d: dict[str, Any]) -> dict[str, Any]:
    rope = dict(d["rope_parameters"])
    d = {key: value for key, value in d.items() if key != "rope_parameters"}
    d["rope_theta"] = rope.pop("rope_theta")
    d["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    return d


@pytest.fixture
def valid() -> dict[str, Any]:
    d = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2).to_dict()
    return {key: value for key, value in d.items() if value is not None}


@settings(max_examples=examples(30))
@given(llama_settings())
def test_both_formats_of_transformers_say_the_same(wanted: dict[str, Any]) -> None:
    d = LlamaConfig(**wanted).to_dict()
    config = ModelConfig.from_dict(d)
    assert config == ModelConfig.from_dict(as_v4(d))
    same_name = wanted.keys() - {"eos_token_id", "rope_parameters"}
    assert {name: getattr(config, name) for name in same_name} == {name: wanted[name] for name in same_name}
    eos = wanted["eos_token_id"]
    assert config.eos_token_ids == (() if eos is None else (2,) if eos == 2 else (2, 5))
    assert config.rope_theta == wanted["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias", "no_bias"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"])
@settings(max_examples=examples(10))
@given(wanted=llama_settings())
def test_weight_shapes_are_those_of_transformers(wanted: dict[str, Any], model_type: str, bias: str) -> None:
    """Biases included, also where an architecture does not heed what is written of them."""
    if model_type == "gemma3_text":
        wanted = wanted | {"rope_parameters": {"full_attention": wanted["rope_parameters"]}}
    theirs = AutoConfig.for_model(model_type, **wanted, **{bias: True})
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(theirs).state_dict()
    if wanted["tie_word_embeddings"]:
        del state["lm_head.weight"]
    config = ModelConfig.from_dict(theirs.to_dict())
    assert weight_shapes(config) == {name: tuple(weight.shape) for name, weight in state.items()}


def test_every_rope_type_is_read_with_its_parameters(valid: dict[str, Any]) -> None:
    scalings = [ModelConfig.from_dict(valid | {"rope_parameters": rope}).rope_scaling for rope in ROPES]
    assert scalings == [None, RopeScaling("linear", 2.5), RopeScaling("llama3", 8.0, 1.0, 4.0, 64)]


def test_the_oldest_spelling_of_a_rope_type_is_read(valid: dict[str, Any]) -> None:
    del valid["rope_parameters"]
    config = ModelConfig.from_dict(valid | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4}})
    assert (config.rope_theta, config.rope_scaling) == (500.0, RopeScaling("linear", 4.0))


def test_what_is_not_written_is_as_in_transformers(valid: dict[str, Any]) -> None:
    for key in ("head_dim", "num_key_value_heads", "rope_parameters", "tie_word_embeddings", "rms_norm_eps"):
        del valid[key]
    config = ModelConfig.from_dict(valid)
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    assert (config.tie_word_embeddings, config.rms_norm_eps) == (False, 1e-6)


WRITTEN: list[dict[str, Any]] = [{}, {"sliding_window": None}, {"sliding_window": 7}]
SLIDE = {"use_sliding_window": True}
USES: list[dict[str, Any]] = [{}, SLIDE, SLIDE | {"max_window_layers": 1}]
LAST_SLIDES = SLIDE | {"layer_types": ["full_attention", "sliding_attention"]}
NONE_SLIDES = SLIDE | {"layer_types": ["full_attention", "full_attention"]}
QWENS = [{}, {"sliding_window": 7}]  # with types of layers, transformers takes no window of null


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *(
            (kind, uses | written)
            for kind in ("llama", "mistral", "qwen2", "qwen3")
            for uses in USES
            for written in WRITTEN
        ),
        *(
            (kind, uses | written)
            for kind in ("qwen2", "qwen3")
            for uses in (LAST_SLIDES, NONE_SLIDES)
            for written in QWENS
        ),
    ],
)
def test_a_window_is_read_as_transformers_reads_it(
    valid: dict[str, Any], model_type: str, changes: dict[str, Any]
) -> None:
    """Which is what its masks are made by: of Mistral the window, of Qwen that of layers that slide."""
    check_windows(valid | {"num_hidden_layers": 2, "model_type": model_type} | changes)


def check_windows(d: dict[str, Any]) -> None:
    """Compare the windows that are read with transformers', from this config.json and from the one that it writes."""
    theirs = AutoConfig.for_model(**d)
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
    if d["model_type"] == "mistral" and theirs.sliding_window:
        kinds = ["sliding_attention"] * theirs.num_hidden_layers
    windows = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    for read in (d, theirs.to_dict()):
        config = ModelConfig.from_dict(read)
        assert config.layer_windows == (windows if any(windows) else ())
        assert [config.window(layer) for layer in range(len(kinds))] == list(windows)


GEMMA2: dict[str, Any] = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "cache_implementation": "hybrid",
    "attention_bias": False,
    "rope_theta": 10000.0,
    "query_pre_attn_scalar": 144,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
"""The keys of gemma-2-27b's config.json, which v4 wrote; smaller."""
GEMMA3: dict[str, Any] = {key: value for key, value in GEMMA2.items() if "logit" not in key and key != "hidden_act"} | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_local_base_freq": 20000,
    "rope_scaling": None,
    "rope_theta": 3000000,
    "sliding_window": 512,
    "sliding_window_pattern": 3,
}
"""The keys of gemma-3-1b's."""


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"sliding_window": 5},
        {"sliding_window_pattern": 1},
        {"layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 4},
        {"layer_types": ["full_attention"] * 7, "_sliding_window_pattern": 6},
    ],
)
@pytest.mark.parametrize("d", [GEMMA2, GEMMA3, {k: v for k, v in GEMMA3.items() if k != "sliding_window_pattern"}])
def test_gemmas_windows_are_read_as_transformers_reads_them(d: dict[str, Any], change: dict[str, Any]) -> None:
    check_windows(d | change)


def test_what_is_gemmas_own_is_read() -> None:
    two, three = ModelConfig.from_dict(GEMMA2), ModelConfig.from_dict(GEMMA3)
    assert two.gemma
    assert three.gemma
    assert not two.qk_norm
    assert three.qk_norm
    assert (two.query_pre_attn_scalar, two.attn_logit_softcapping, two.final_logit_softcapping) == (144, 50, 30)
    assert (three.query_pre_attn_scalar, three.attn_logit_softcapping, three.final_logit_softcapping) == (
        144,
        None,
        None,
    )
    assert two.rope(None) == two.rope(4096) == (10000, None)
    assert three.rope(None) == (3000000, None)
    assert three.rope(512) == (20000, None)
    assert ModelConfig.from_dict(GEMMA3 | {"final_logit_softcapping": 20}).final_logit_softcapping == 20


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 3e4},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 5e5},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7e5}}},
        {
            "rope_parameters": {
                "full_attention": LLAMA3 | {"rope_theta": 7e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            }
        },
    ],
)
def test_gemma3s_two_sets_of_rotary_settings_are_read_in_both_formats(written: dict[str, Any]) -> None:
    """By the frequencies that transformers makes of them."""
    d = {key: value for key, value in GEMMA3.items() if not key.startswith("rope")} | written
    theirs = AutoConfig.for_model(**d)
    with torch.device("cpu"):
        rotary = AutoModelForCausalLM.from_config(theirs).model.rotary_emb
    for read in (d, theirs.to_dict()):
        config = ModelConfig.from_dict(read)
        np.testing.assert_allclose(inverse_frequencies(config), rotary.full_attention_inv_freq.numpy(), rtol=1e-6)
        np.testing.assert_allclose(
            inverse_frequencies(config, 512), rotary.sliding_attention_inv_freq.numpy(), rtol=1e-6
        )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sliding_window": 0}, ["sliding_window = 0", "1 or more"]),
        ({"sliding_window": None}, ["'sliding_window' is missing"]),
        ({"sliding_window_pattern": 0}, ["sliding_window_pattern = 0", "1 or more"]),
        ({"layer_types": ["full_attention"]}, ["layer_types has 1 entries", "num_hidden_layers = 7"]),
        ({"layer_types": ["chunked_attention"] * 7}, ["layer_types names 'chunked_attention'"]),
        ({"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar = 0", "positive"]),
        ({"final_logit_softcapping": -1.0}, ["final_logit_softcapping = -1.0", "positive"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping = 50.0", "Gemma3ForCausalLM"]),
        ({"rope_local_base_freq": -1}, ["rope_theta = -1", "positive"]),
        ({"rope_parameters": {"rope_type": "default"}}, ["rope_type in rope_parameters", "'sliding_attention'"]),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, ["'linear'", "sliding"]),
        ({"rope_parameters": {"full_attention": [1]}}, ["[1]", "expected an object"]),
        ({"hidden_activation": "silu"}, ["hidden_activation = 'silu'", "gelu_pytorch_tanh"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention = True"]),
        ({"use_qk_norm": False}, ["use_qk_norm = False"]),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, ["gemma3", "only Llama"]),
        ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, ["GptOssForCausalLM", "experts"]),
        ({"architectures": ["GptOssForCausalLM"], "model_type": None}, ["GptOssForCausalLM", "experts"]),
    ],
)
def test_what_of_a_gemma_cannot_run_is_refused_by_name(change: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ModelError) as raised:
        ModelConfig.from_dict(GEMMA3 | change)
    assert all(words in str(raised.value) for words in says), raised.value


def test_layers_of_a_mistral_are_not_mixed() -> None:
    kinds = ["full_attention", "sliding_attention"]
    d = {"vocab_size": 32, "hidden_size": 256, "intermediate_size": 8, "num_hidden_layers": 2, "layer_types": kinds}
    says = "MistralForCausalLM has 'full_attention' or 'sliding_attention', the same in all layers"
    with pytest.raises(ModelError, match=says):
        ModelConfig.from_dict(d | {"num_attention_heads": 32, "model_type": "mistral"})


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_what_a_cousin_leaves_out_is_as_in_transformers(model_type: str) -> None:
    d: dict[str, Any] = {"vocab_size": 32, "hidden_size": 256, "intermediate_size": 8, "num_hidden_layers": 1}
    d |= {"num_attention_heads": 32, "model_type": model_type, "bos_token_id": 1, "eos_token_id": 2}
    assert ModelConfig.from_dict(d) == ModelConfig.from_dict(AutoConfig.for_model(**d).to_dict())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, ["MixtralForCausalLM", "only Llama"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "only Llama"]),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}, ["LlamaForCausalLM", "'qwen2'", "only Llama"]),
        ({"model_type": "qwen2_moe"}, ["'qwen2_moe'", "only Llama", "Qwen3ForCausalLM (model_type 'qwen3')"]),
        ({"model_type": None}, ["None", "only Llama"]),
        ({"model_type": "mistral", "sliding_window": 0}, ["sliding_window = 0", "1 or more"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["'yarn'", "'llama3'"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["'factor' is missing"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads = 4", "num_key_value_heads = 3"]),
        ({"hidden_size": 66, "head_dim": None}, ["hidden_size = 66", "num_attention_heads = 4"]),
        ({"head_dim": 15}, ["head_dim = 15", "odd"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers = 0", "1 or more"]),
        ({"vocab_size": "many"}, ["vocab_size = 'many'"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps = -1.0", "positive"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
    ],
)
def test_what_cannot_run_is_refused_by_name(valid: dict[str, Any], change: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ModelError) as raised:
        ModelConfig.from_dict(valid | change)
    assert all(words in str(raised.value) for words in says), raised.value


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_key_is_named(valid: dict[str, Any], key: str) -> None:
    del valid[key]
    with pytest.raises(ModelError, match=f"'{key}' is missing"):
        ModelConfig.from_dict(valid)


ANOTHER_COMPUTATION: list[tuple[str, Any]] = [
    ("hidden_activation", "gelu"),
    ("is_causal", False),
    ("is_encoder_decoder", True),
    ("add_cross_attention", True),
    ("use_bidirectional_attention", True),
    ("alibi", True),
    ("attention_chunk_size", 8192),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("attention_multiplier", 0.5),
    ("query_pre_attn_scalar", 144),
    ("clip_qkv", 8.0),
    ("position_embedding_type", "relative_key"),
    ("partial_rotary_factor", 0.5),
    ("rope_interleave", True),
    ("rope_local_base_freq", 10000.0),
    ("no_rope_layer_interval", 4),
    ("no_rope_layers", [1, 1, 1, 0]),
    ("no_rope_layers", 3),
    ("logit_softcapping", 30.0),
    ("attention_logit_cap", 10.0),
    ("attn_output_gate", True),
    ("attn_temperature_tuning", True),
    ("attention_scaling", 0.5),
    ("rotary_pct", 0.5),
    ("rope_pct", 0.25),
    ("qk_norm", True),
    ("layer_types", 1),
    ("layer_types", ["full_attention", "chunked_attention"]),
    ("layer_types", ["sliding_attention"]),
    ("use_parallel_residual", True),
    ("embedding_multiplier", 12.0),
    ("residual_multiplier", 0.22),
    ("logits_scaling", 8.0),
    ("logit_scale", 0.0625),
    ("num_experts", 8),
    ("num_local_experts", 8),
    ("use_qk_norm", True),
    ("v_head_dim", 64),
]


@pytest.mark.parametrize(("key", "value"), ANOTHER_COMPUTATION)
def test_a_key_that_says_another_computation_is_refused_by_name(valid: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {key}\b"):
        ModelConfig.from_dict(valid | {key: value})
    assert ModelConfig.from_dict(valid | {key: None}) == ModelConfig.from_dict(valid)


def test_every_key_that_is_refused_has_a_test() -> None:
    same = {"use_alibi", "rope_interleaved", "parallel_attn", "embedding_scale", "scale_emb", "residual_scale"}
    same |= {"lm_head_multiplier", "n_routed_experts", "hidden_act"}
    assert {key for key, _ in ANOTHER_COMPUTATION} | same >= HARMLESS.keys()


@pytest.mark.parametrize(
    "said",
    [
        {"hidden_act": "swish", "hidden_activation": "silu", "is_causal": True, "pretraining_tp": 2},
        {"attention_multiplier": 0.25, "query_pre_attn_scalar": 16, "v_head_dim": 16, "logits_scaling": 1.0},
        {"embedding_multiplier": 1, "residual_multiplier": 1.0, "partial_rotary_factor": 1.0, "alibi": False},
        {"attn_logit_softcapping": 0.0, "num_experts": 0, "no_rope_layers": [1, 1], "layer_types": ["full_attention"]},
        {"use_qk_norm": False, "use_cache": False, "attention_dropout": 0.1, "initializer_range": 0.5, "task": "chat"},
        {"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 3, "num_nextn_predict_layers": 1},
        {"no_rope_layers": [], "layer_types": None, "position_embedding_type": "absolute"},
    ],
)
def test_a_key_that_says_nothing_is_let_through(valid: dict[str, Any], said: dict[str, Any]) -> None:
    assert ModelConfig.from_dict(valid | said) == ModelConfig.from_dict(valid)


def test_norms_of_heads_are_qwen3s(valid: dict[str, Any]) -> None:
    qwen3 = {key: value for key, value in valid.items() if key != "architectures"} | {"model_type": "qwen3"}
    assert ModelConfig.from_dict(qwen3 | {"use_qk_norm": True}) == ModelConfig.from_dict(qwen3)
    with pytest.raises(ModelError, match="use_qk_norm = False"):
        ModelConfig.from_dict(qwen3 | {"use_qk_norm": False})


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"factor": 4.0}, "factor = 4.0 .*'default'"),
        ({"rope_type": "linear", "factor": 4.0, "attention_factor": 1.2}, "attention_factor = 1.2"),
        ({"rope_type": "linear", "factor": 4.0, "low_freq_factor": 1.0}, "low_freq_factor = 1.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section = "),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, "full_attention = "),
        (LLAMA3 | {"beta_fast": 32}, "beta_fast = 32"),
        ([4.0], "expected an object"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rotary_setting_that_is_not_read_is_refused_by_name(
    valid: dict[str, Any], key: str, rope: Any, says: str
) -> None:
    del valid["rope_parameters"]
    with pytest.raises(ModelError, match=says):
        ModelConfig.from_dict(valid | {key: rope})


@pytest.mark.parametrize(
    "written",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "original_max_position_embeddings": 128},
        {"rope_parameters": {"rope_type": "default", "factor": 1.0, "attention_factor": None, "rope_theta": 500.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "rope_theta": 500.0},
    ],
)
def test_rotary_settings_written_twice_are_read_as_transformers_reads_them(
    valid: dict[str, Any], written: dict[str, Any]
) -> None:
    """Its frequencies are ours."""
    del valid["rope_parameters"]
    valid |= {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8} | written
    theirs = LlamaForCausalLM(LlamaConfig(**valid)).model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(inverse_frequencies(ModelConfig.from_dict(valid)), theirs, rtol=1e-6)
