"""Arguments of vLLM's that minipaged does not have, each with the reason and the alternative. `LLM` and
`SamplingParams` use these tables, and docs/vllm.md shows them.

Code written for vLLM should run with only its import changed, if minipaged can do what it asks for. So an argument is
accepted if it asks for minipaged's own behaviour (`enforce_eager=False`), and refused with the reason if not. No
argument is ignored. The names are those of vLLM 0.33, and a few of older versions that scripts still use.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from minipaged.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class NotHere:
    """An argument of vLLM's that minipaged does not support."""

    why: str
    """The reason why it is refused, and the way out."""
    let_through: tuple[str | float | None, ...] = (None,)
    """The values that are accepted, because they ask for minipaged's own behaviour."""


_NO_LORA = "merge the adapter into the weights, and load those"
_NO_IMAGES = "models here read and write text only; leave it out"
_IN_SPECULATIVE_CONFIG = "give it in speculative_config, which is a dict"
_AS_THE_MODEL = "the draft model runs as the model does; leave it out"
_NO_REVISIONS = "a hub id means its newest revision; download the one you want, and give its folder as model"
_GRAPHS = "the device decides whether CUDA graphs are used, and there is no switch; leave it out"

LLM_ARGUMENTS: dict[str, NotHere] = {
    "enable_chunked_prefill": NotHere(
        "a prompt is always cut into chunks that fit max_num_batched_tokens; raise that to cut fewer prompts",
        (True, None),
    ),
    "data_parallel_size": NotHere("only a server runs several engines: minipaged serve --replicas", (1,)),
    "distributed_executor_backend": NotHere(
        "the ranks of a model are always processes of this machine; leave it out", (None, "uni", "mp")
    ),
    "disable_custom_all_reduce": NotHere("torch.distributed computes all sums over ranks; leave it out", (False, True)),
    "quantization": NotHere("the checkpoint's config.json says how its weights are quantized; leave it out"),
    "trust_remote_code": NotHere("code that comes with a model is never run; leave it out", (False,)),
    "enforce_eager": NotHere(_GRAPHS, (False,)),
    "compilation_config": NotHere(_GRAPHS),
    "cpu_offload_gb": NotHere("all weights stay on the device; use a smaller model, or device='cpu'", (0,)),
    "kv_cache_memory_bytes": NotHere("give the cache's size as num_blocks, or as gpu_memory_utilization"),
    "num_gpu_blocks_override": NotHere("its name here is num_blocks"),
    "kv_transfer_config": NotHere("its name here is kv_connector, which takes a SharedStorageConnector(folder, role)"),
    "preemption_mode": NotHere("its name here is preemption, which takes 'swap', 'recompute' or 'auto'"),
    "scheduler_cls": NotHere("give a class as scheduling_policy (minipaged/scheduling.py)"),
    "tokenizer": NotHere("the tokenizer is the one in the model's folder (tokenizer.json); put yours there"),
    "tokenizer_mode": NotHere("there is one mode, the tokenizers library; leave it out", ("auto", "hf")),
    "skip_tokenizer_init": NotHere("the tokenizer is not used if prompts are token ids; leave it out", (False,)),
    "chat_template": NotHere("give it to chat()"),
    "revision": NotHere(_NO_REVISIONS),
    "tokenizer_revision": NotHere(_NO_REVISIONS),
    "download_dir": NotHere("set MINIPAGED_CACHE, or HF_HOME for models from the hub"),
    "load_format": NotHere("weights are read from safetensors or GGUF, whichever the model has", ("auto",)),
    "hf_token": NotHere("log in with `hf auth login`, or set HF_TOKEN"),
    "hf_overrides": NotHere("change the config.json in the model's folder"),
    "generation_config": NotHere(
        "the default of every parameter is that of SamplingParams; give the ones you want", ("vllm",)
    ),
    "runner": NotHere("models here only generate text", ("auto", "generate")),
    "task": NotHere("models here only generate text", ("auto", "generate")),
    "convert": NotHere("models here only generate text", ("auto", "none")),
    "enable_lora": NotHere(_NO_LORA, (False,)),
    "spec_method": NotHere(_IN_SPECULATIVE_CONFIG),
    "spec_model": NotHere(_IN_SPECULATIVE_CONFIG),
    "spec_tokens": NotHere(_IN_SPECULATIVE_CONFIG),
    "limit_mm_per_prompt": NotHere(_NO_IMAGES),
    "mm_processor_kwargs": NotHere(_NO_IMAGES),
    "logits_processors": NotHere("functions that change logits are not supported; SamplingParams has other ways"),
    "structured_outputs_config": NotHere("llguidance computes all masks, and has no settings here; leave it out"),
    "disable_log_stats": NotHere("nothing is logged during a run; call LLM.stats()", (True,)),
}
"""Arguments of vLLM's `LLM`."""

_NOTHING_BETWEEN = "only the sampling parameters change how tokens are chosen; leave it out"
_WHEN_TOLD = "generate() returns outputs when all have ended; LLM.stream() yields new output after each step"
_PROMPT_LOGPROBS = "only the likeliest tokens of a prompt are reported; give prompt_logprobs"

SAMPLING_ARGUMENTS: dict[str, NotHere] = {
    "guided_decoding": NotHere("its name here is structured_outputs, which takes a StructuredOutputsParams"),
    "logits_processors": NotHere(_NOTHING_BETWEEN),
    "watermarking": NotHere(_NOTHING_BETWEEN, (None, False)),
    "thinking_token_budget": NotHere(_NOTHING_BETWEEN, (None, -1)),
    "repetition_detection": NotHere("no text ends because it repeats itself; use stop or repetition_penalty"),
    "best_of": NotHere("sample n sequences with logprobs, and choose among them", (None, 1)),
    "use_beam_search": NotHere("call LLM.beam_search() with a BeamSearchParams", (False,)),
    "detokenize": NotHere("text is made whenever there is a tokenizer; leave it out", (True,)),
    "output_kind": NotHere(_WHEN_TOLD),
    "stream_interval": NotHere(_WHEN_TOLD, (None, 1)),
    "flat_logprobs": NotHere("log-probabilities are dicts, one for each token; leave it out", (False,)),
    "prompt_logprob_token_ids": NotHere(_PROMPT_LOGPROBS),
    "prompt_logprob_start": NotHere(_PROMPT_LOGPROBS),
    "trace_decode_token_ids": NotHere("output tokens cannot be given in advance; leave it out"),
    "routed_experts_prompt_start": NotHere("models here have no experts; leave it out", (0,)),
    "output_text_buffer_length": NotHere("it follows from stop; leave it out", (0,)),
    "skip_clone": NotHere("parameters cannot be changed, so they are never copied; leave it out", (False, True)),
    "extra_args": NotHere("nothing here reads them; leave it out"),
    "skip_reading_prefix_cache": NotHere(
        "it is set for all requests together: enable_prefix_caching=False", (None, False)
    ),
}
"""Arguments of vLLM's `SamplingParams`."""

SPECULATIVE_KEYS: dict[str, NotHere] = {
    "draft_tensor_parallel_size": NotHere(_AS_THE_MODEL, (None, 1)),
    "quantization": NotHere(_AS_THE_MODEL),
    "max_model_len": NotHere(_AS_THE_MODEL),
    "revision": NotHere(_NO_REVISIONS),
    "code_revision": NotHere("code that comes with a model is never run; leave it out"),
    "speculative_token_tree": NotHere("a draft is one sequence of tokens; leave it out"),
}
"""Keys of vLLM's `speculative_config`."""

STRUCTURED_OUTPUTS_ARGUMENTS: dict[str, NotHere] = {
    "structural_tag": NotHere("tags that turn a grammar on within a text are not supported; give a grammar"),
    "disable_additional_properties": NotHere('write "additionalProperties": false into the schema', (None, False)),
    "disable_fallback": NotHere("there is one library, and none to fall back on; leave it out", (None, False, True)),
}
"""Arguments of vLLM's `StructuredOutputsParams`."""

GENERATE_ARGUMENTS: dict[str, NotHere] = {
    "lora_request": NotHere(_NO_LORA),
    "tokenization_kwargs": NotHere(
        "give token ids instead of a text; truncate_prompt_tokens is a field of SamplingParams"
    ),
    "mm_processor_kwargs": NotHere(_NO_IMAGES),
}
"""Arguments of vLLM's `LLM.generate`."""

CHAT_ARGUMENTS: dict[str, NotHere] = {
    **GENERATE_ARGUMENTS,
    "chat_template_content_format": NotHere("templates receive each content as one text", ("auto", "string")),
}
"""Arguments of vLLM's `LLM.chat`."""

BEAM_SEARCH_ARGUMENTS: dict[str, NotHere] = {
    "lora_request": NotHere(_NO_LORA),
    "concurrency_limit": NotHere("the engine admits all requests that fit; set max_num_seqs to limit them"),
}
"""Arguments of vLLM's `LLM.beam_search`."""

PROMPT_KEYS: dict[str, NotHere] = {
    "multi_modal_data": NotHere(_NO_IMAGES),
    "multi_modal_uuids": NotHere(_NO_IMAGES),
    "mm_processor_kwargs": NotHere(_NO_IMAGES),
    "media_io_kwargs": NotHere(_NO_IMAGES),
    "prompt_embeds": NotHere("a prompt is tokens; give prompt_token_ids"),
    "prompt_is_token_ids": NotHere("a prompt is tokens, all of it; leave it out"),
    "token_type_ids": NotHere("models here have one type of token; leave it out"),
    "prompt_token_offsets": NotHere("nothing here reads them; leave it out"),
    "encoder_prompt": NotHere("models here have only a decoder; give prompt or prompt_token_ids"),
    "decoder_prompt": NotHere("models here have only a decoder; give prompt or prompt_token_ids"),
}
"""Keys of vLLM's prompt dicts."""


def take_own(
    of: str, given: Mapping[str, Any], not_here: Mapping[str, NotHere], own: Collection[str] = ()
) -> dict[str, Any]:
    """Return the given arguments that are in `own`. Raises InvalidRequest for an argument of vLLM's that is not
    supported, and TypeError for an unknown one (`of` names the function in that message)."""
    for name, value in given.items():
        if name in own:
            continue
        if name not in not_here:
            raise TypeError(f"{of} got an unexpected keyword argument {name!r}")
        # Values of other types (a tensor, say) may not even be comparable.
        if not isinstance(value, str | float | int | NoneType) or value not in not_here[name].let_through:
            raise InvalidRequest(f"{name} is {reprlib.repr(value)}; {not_here[name].why}")
    return {name: value for name, value in given.items() if name in own}
