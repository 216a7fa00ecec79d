"""What vLLM takes and minipaged does not: why, and what to do instead. Read by `LLM`, `SamplingParams`, docs/vllm.md.

Code written for vLLM should run with its import changed, as far as there is the same here. So an argument that asks for
what is done here anyway (`enforce_eager=False`) is let through, and one that asks for something else is refused with
the reason. None is ignored. The names are those of vLLM 0.33, and a few of older versions that scripts still give.
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
    """An argument of vLLM's that minipaged has no use for."""

    why: str
    """Why it is refused, and the way out."""
    let_through: tuple[str | float | None, ...] = (None,)
    """The values that ask for what is done here anyway."""


_NO_LORA = "there is no LoRA here; merge the adapter into the weights, and load those"
_NO_IMAGES = "models here read text alone; leave it out"
_NO_SPECULATION = "every token is the model's own choice, nothing is speculated; leave it out"
_NO_REVISIONS = "of a hub id the newest revision is taken; download the one you want, and give its folder as model"
_GRAPHS = "where CUDA graphs run is decided by the device, and there is no switch; leave it out"

LLM_ARGUMENTS: dict[str, NotHere] = {
    "enable_chunked_prefill": NotHere(
        "a step takes of a prompt what max_num_batched_tokens leaves room for; raise that, and fewer are cut",
        (True, None),
    ),
    "data_parallel_size": NotHere("several engines are a server's: minipaged serve --replicas", (1,)),
    "distributed_executor_backend": NotHere(
        "the ranks of a model are processes of this machine; leave it out", (None, "uni", "mp")
    ),
    "disable_custom_all_reduce": NotHere("sums over ranks are torch.distributed's; leave it out", (False, True)),
    "quantization": NotHere("the checkpoint's config.json says how its weights are quantized; leave it out"),
    "trust_remote_code": NotHere("no code that comes with a model is ever run; leave it out", (False,)),
    "enforce_eager": NotHere(_GRAPHS, (False,)),
    "compilation_config": NotHere(_GRAPHS),
    "cpu_offload_gb": NotHere("all weights stay on the device; take a smaller model, or device='cpu'", (0,)),
    "kv_cache_memory_bytes": NotHere("give the cache's size as num_blocks, or as gpu_memory_utilization"),
    "num_gpu_blocks_override": NotHere("it is num_blocks here"),
    "kv_transfer_config": NotHere("it is kv_connector here, and takes a SharedStorageConnector(folder, role)"),
    "preemption_mode": NotHere("it is preemption here, and takes 'swap', 'recompute' and 'auto'"),
    "scheduler_cls": NotHere("give scheduling_policy a class (minipaged/scheduling.py)"),
    "tokenizer": NotHere("the tokenizer is the one in the model's folder (tokenizer.json); put yours there"),
    "tokenizer_mode": NotHere("there is one, the tokenizers library; leave it out", ("auto", "hf")),
    "skip_tokenizer_init": NotHere("give token ids, and the tokenizer is not asked; leave it out", (False,)),
    "chat_template": NotHere("give it to chat()"),
    "revision": NotHere(_NO_REVISIONS),
    "tokenizer_revision": NotHere(_NO_REVISIONS),
    "download_dir": NotHere("set MINIPAGED_CACHE, or HF_HOME for models from the hub"),
    "load_format": NotHere("weights are read from safetensors or GGUF, by what there is", ("auto",)),
    "hf_token": NotHere("log in with `hf auth login`, or set HF_TOKEN"),
    "hf_overrides": NotHere("change the config.json in the model's folder"),
    "generation_config": NotHere("parameters that are not given are SamplingParams's defaults; give them", ("vllm",)),
    "runner": NotHere("models here generate", ("auto", "generate")),
    "task": NotHere("models here generate", ("auto", "generate")),
    "convert": NotHere("models here generate", ("auto", "none")),
    "enable_lora": NotHere(_NO_LORA, (False,)),
    "speculative_config": NotHere(_NO_SPECULATION),
    "spec_method": NotHere(_NO_SPECULATION),
    "spec_model": NotHere(_NO_SPECULATION),
    "spec_tokens": NotHere(_NO_SPECULATION),
    "limit_mm_per_prompt": NotHere(_NO_IMAGES),
    "mm_processor_kwargs": NotHere(_NO_IMAGES),
    "logits_processors": NotHere("there are no functions between logits and sampling; see SamplingParams for what is"),
    "structured_outputs_config": NotHere("there are no structured outputs; leave it out"),
    "disable_log_stats": NotHere("nothing is logged while it runs; ask LLM.stats()", (True,)),
}
"""Of `LLM`."""

_NO_STRUCTURE = "there is no grammar that tokens could be held to; leave it out"
_NOTHING_BETWEEN = "nothing stands between logits and sampling but what SamplingParams names; leave it out"
_WHEN_TOLD = "generate() gives outputs when all have ended; LLM.stream() gives what is new after each step"
_PROMPT_LOGPROBS = "of a prompt the likeliest tokens are reported; give prompt_logprobs"

SAMPLING_ARGUMENTS: dict[str, NotHere] = {
    "structured_outputs": NotHere(_NO_STRUCTURE),
    "guided_decoding": NotHere(_NO_STRUCTURE),
    "logits_processors": NotHere(_NOTHING_BETWEEN),
    "watermarking": NotHere(_NOTHING_BETWEEN, (None, False)),
    "thinking_token_budget": NotHere(_NOTHING_BETWEEN, (None, -1)),
    "repetition_detection": NotHere(_NOTHING_BETWEEN),
    "best_of": NotHere("sample n with logprobs, and choose", (None, 1)),
    "use_beam_search": NotHere("give LLM.beam_search() a BeamSearchParams", (False,)),
    "detokenize": NotHere("text is made wherever there is a tokenizer; leave it out", (True,)),
    "output_kind": NotHere(_WHEN_TOLD),
    "stream_interval": NotHere(_WHEN_TOLD, (None, 1)),
    "flat_logprobs": NotHere("log-probabilities are dicts, one for each token; leave it out", (False,)),
    "prompt_logprob_token_ids": NotHere(_PROMPT_LOGPROBS),
    "prompt_logprob_start": NotHere(_PROMPT_LOGPROBS),
    "trace_decode_token_ids": NotHere("a token is chosen, and never given in advance; leave it out"),
    "routed_experts_prompt_start": NotHere("models here have no experts; leave it out", (0,)),
    "output_text_buffer_length": NotHere("it follows from stop; leave it out", (0,)),
    "skip_clone": NotHere("parameters cannot be changed, so nobody copies them; leave it out", (False, True)),
    "extra_args": NotHere("there is nobody here to read them; leave it out"),
    "skip_reading_prefix_cache": NotHere("it is for all requests: enable_prefix_caching=False", (None, False)),
}
"""Of `SamplingParams`."""

GENERATE_ARGUMENTS: dict[str, NotHere] = {
    "lora_request": NotHere(_NO_LORA),
    "tokenization_kwargs": NotHere(
        "give the token ids in place of the text; truncate_prompt_tokens is one of SamplingParams"
    ),
    "mm_processor_kwargs": NotHere(_NO_IMAGES),
}
"""Of `LLM.generate`."""

CHAT_ARGUMENTS: dict[str, NotHere] = {
    **GENERATE_ARGUMENTS,
    "tools": NotHere(
        "there are no tools: an answer is text; write into the messages what the model is to know of them"
    ),
    "chat_template_content_format": NotHere("templates are given each content as one text", ("auto", "string")),
}
"""Of `LLM.chat`."""

BEAM_SEARCH_ARGUMENTS: dict[str, NotHere] = {
    "lora_request": NotHere(_NO_LORA),
    "concurrency_limit": NotHere("the engine admits as many as fit; max_num_seqs bounds them"),
}
"""Of `LLM.beam_search`."""

PROMPT_KEYS: dict[str, NotHere] = {
    "multi_modal_data": NotHere(_NO_IMAGES),
    "multi_modal_uuids": NotHere(_NO_IMAGES),
    "mm_processor_kwargs": NotHere(_NO_IMAGES),
    "media_io_kwargs": NotHere(_NO_IMAGES),
    "prompt_embeds": NotHere("a prompt is tokens; give prompt_token_ids"),
    "prompt_is_token_ids": NotHere("a prompt is tokens, all of it; leave it out"),
    "token_type_ids": NotHere("models here have tokens of one type; leave it out"),
    "prompt_token_offsets": NotHere("nobody here asks for them; leave it out"),
    "cache_salt": NotHere(
        "equal prefixes share their blocks, whoever sent them; for privacy enable_prefix_caching=False"
    ),
    "encoder_prompt": NotHere("models here have a decoder alone; give prompt or prompt_token_ids"),
    "decoder_prompt": NotHere("models here have a decoder alone; give prompt or prompt_token_ids"),
}
"""Of a prompt that is a dict."""


def take_own(
    of: str, given: Mapping[str, Any], not_here: Mapping[str, NotHere], own: Collection[str] = ()
) -> dict[str, Any]:
    """What was given of `own`. Raises InvalidRequest for an argument of vLLM's that asks for what there is not, and
    TypeError for one that nobody knows (`of`: whose it would have been)."""
    for name, value in given.items():
        if name in own:
            continue
        if name not in not_here:
            raise TypeError(f"{of} got an unexpected keyword argument {name!r}")
        # Others (a tensor, say) may not even be comparable.
        if not isinstance(value, str | float | int | NoneType) or value not in not_here[name].let_through:
            raise InvalidRequest(f"{name} is {reprlib.repr(value)}; {not_here[name].why}")
    return {name: value for name, value in given.items() if name in own}
