"""Everything the engine does goes on working when its model runs in several processes, to the last bit."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, RequestOutput, SamplingParams
from minipaged.events import BlockCopied, Event, PrefixReused, RequestPreempted, SwappedIn, SwappedOut
from tests.effort import quick_cases
from tests.end_to_end.test_scheduling_invariance import BEAMS, GREEDY, SAMPLED, Job, run
from tests.parallel.one_process import ShardsInOneProcess
from tests.tiny_model import make_tiny_model

ASKING = [
    Job((5, 6, 7, 8, 9, 10), SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)),
    Job((5, 6), SamplingParams(temperature=0.7, seed=3, max_tokens=9, repetition_penalty=1.3, logit_bias={7: 2.0})),
    Job((200, 201), SamplingParams(temperature=0, max_tokens=9, bad_words=["a", "bc"], min_tokens=3)),
]
CROWDED = {"block_size": 4, "num_blocks": 34, "num_swap_blocks": 40, "max_num_batched_tokens": 24, "max_num_seqs": 9}


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (output.prompt_logprobs, [(o.token_ids, o.text, o.logprobs, o.cumulative_logprob) for o in output.outputs])
        for output in outputs
    ]


@quick_cases(1)
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (3, {"preemption": "swap", "async_scheduling": True}),
        (2, {"preemption": "recompute", "debug": True}),
        (4, {"preemption": "swap", "debug": True, "kv_cache_dtype": "int8"}),
    ],
)
def test_a_crowded_engine(tmp_path: Path, size: int, settings: dict[str, Any]) -> None:
    """The same requests on the same shards in one process: the same tokens, and all log-probabilities to the bit."""
    folder = make_tiny_model(
        tmp_path / "m", num_attention_heads=9, num_key_value_heads=3, hidden_size=36, intermediate_size=50
    )
    jobs = [*GREEDY, *SAMPLED, *BEAMS, *ASKING]
    settings = CROWDED | settings | {"tier": "fast", "device": "cpu", "dtype": "float32"}
    events: list[Event] = []
    apart = LLM(folder, tensor_parallel_size=size, listeners=[events.append], **settings)
    with closing(apart):
        outputs = run(apart, jobs, arrivals=[i // 2 for i in range(len(jobs))])
    kinds = {type(event) for event in events}
    assert {BlockCopied, PrefixReused, RequestPreempted} <= kinds
    assert (settings["preemption"] != "swap") or {SwappedOut, SwappedIn} <= kinds

    together = LLM(folder, **settings)
    together.engine.runner = ShardsInOneProcess(folder, "float32", size, together.config)
    assert told(outputs) == told(run(together, jobs, arrivals=[i // 2 for i in range(len(jobs))]))
