"""Everything the engine does goes on working when its model runs in several processes, to the last bit."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minipaged import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from minipaged.engine.engine import Engine
from minipaged.events import BlockCopied, Event, PrefixReused, RequestPreempted, SwappedIn, SwappedOut
from tests.effort import one_case_in, thorough
from tests.end_to_end.test_scheduling_invariance import BEAMS, GREEDY, SAMPLED, Job, run
from tests.parallel.one_process import ShardsInOneProcess
from tests.tiny_model import make_tiny_model

LETTERS = StructuredOutputsParams(regex="[a-e ]{5,}")
ASKING = [
    Job((5, 6, 7, 8, 9, 10), SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)),
    Job((5, 6, 7), SamplingParams(n=2, seed=3, max_tokens=6, logprob_token_ids=[5, 200, 5])),
    Job((5, 6), SamplingParams(temperature=0.7, seed=3, max_tokens=9, repetition_penalty=1.3, logit_bias={7: 2.0})),
    Job((5, 6, 8), SamplingParams(n=2, seed=3, max_tokens=9, structured_outputs=LETTERS)),
    Job((200, 201), SamplingParams(temperature=0, max_tokens=9, bad_words=["a", "bc"], min_tokens=3)),
]
CROWDED = {"block_size": 4, "num_blocks": 34, "num_swap_blocks": 40, "max_num_batched_tokens": 24, "max_num_seqs": 9}


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (output.prompt_logprobs, [(o.token_ids, o.text, o.logprobs, o.cumulative_logprob) for o in output.outputs])
        for output in outputs
    ]


@thorough
@one_case_in(3)
@pytest.mark.parametrize(
    ("tensor", "pipeline", "settings"),
    [
        (2, 2, {"preemption": "swap", "debug": True}),
        (3, 1, {"preemption": "swap", "async_scheduling": True}),
        (2, 1, {"preemption": "recompute", "debug": True}),
        (4, 1, {"preemption": "swap", "debug": True, "kv_cache_dtype": "int8"}),
        (1, 3, {"preemption": "recompute"}),
    ],
)
def test_a_crowded_engine(tmp_path: Path, tensor: int, pipeline: int, settings: dict[str, Any]) -> None:
    """The same requests on the same shards in one process: the same tokens, and all log-probabilities to the bit."""
    shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36, "intermediate_size": 50}
    folder = make_tiny_model(tmp_path / "m", num_hidden_layers=3, **shape)
    jobs = [*GREEDY, *SAMPLED, *BEAMS, *ASKING]
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    settings = CROWDED | settings | {"tier": "fast", "device": "cpu", "dtype": "float32"}
    events: list[Event] = []
    apart = LLM(folder, listeners=[events.append], **sizes, **settings)
    with closing(apart):
        outputs = run(apart, jobs, arrivals=[i // 2 for i in range(len(jobs))])
    kinds = {type(event) for event in events}
    assert {BlockCopied, PrefixReused, RequestPreempted} <= kinds
    assert (settings["preemption"] != "swap") or {SwappedOut, SwappedIn} <= kinds

    runner = ShardsInOneProcess(folder, "float32", apart.config)
    tokenizer = apart.need_tokenizer()
    assert apart.grammars is not None
    words = {"decode": tokenizer.decode, "encode": tokenizer.encode, "compile_grammar": apart.grammars.compile}
    together = Engine(apart.config, apart.loaded.tier, runner, **words)
    again = run(cast("LLM", SimpleNamespace(engine=together)), jobs, arrivals=[i // 2 for i in range(len(jobs))])
    assert told(outputs) == told(again)
