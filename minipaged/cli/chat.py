"""`minipaged chat`: a conversation with a model (`conversation.py`)."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from minipaged.cli.apps import ModelOption, app, check_tokenizer
from minipaged.cli.options import Command, given_for, takes
from minipaged.params import SamplingParams
from minipaged.setup.settings import Settings

CHAT_OPTIONS = (
    *("temperature", "top_p", "max_tokens", "seed", "tier", "device", "dtype"),
    *("block_size", "num_blocks", "kv_cache_dtype", "kv_connector", "speculative_config"),
    *("tensor_parallel_size", "pipeline_parallel_size", "worker_timeout"),
)


@app.command(cls=Command)
@takes(SamplingParams, Settings, only=CHAT_OPTIONS, temperature=0.2, top_p=0.9, max_tokens=512, seed=0)
def chat(
    model: ModelOption = "smollm2-135m-instruct",
    system: Annotated[str | None, typer.Option(help="A system prompt, which comes before the first question.")] = None,
    **given: Any,
) -> None:
    """Chat with a model, one question per line. Shows KV block use and prefix-cache hits below each answer."""
    params = SamplingParams(**given_for(SamplingParams, given))
    from minipaged.cli.conversation import run_chat
    from minipaged.llm import LLM

    check_tokenizer(model)
    # One sequence at a time, so the pool is no larger than the longest conversation.
    llm = LLM(model, num_swap_blocks=0, max_num_seqs=1, **given_for(Settings, given))
    raise typer.Exit(run_chat(llm, params, system))
