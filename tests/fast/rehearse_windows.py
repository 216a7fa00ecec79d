"""Serve a model with windows on the CUDA path, with a CPU's tensors, far beyond its windows.

    python -m tests.fast.rehearse_windows MODEL

As in `rehearse_mixed_batches.py`, whose GPU this is. Prints one JSON object: for each way of preemption the tokens of
each request by the reference tier and by the fast one, the counts of what happened there, and how often a graph was
replayed. In debug mode, which checks after each step that a sequence holds what its windows see, and writes NaN into
blocks that are given back.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from tests.fast import rehearse_mixed_batches  # there is a GPU from here on

from minipaged import LLM, SamplingParams  # isort: skip
from minipaged.fast.llama import DecodeGraph
from tests.triton_interpreter import skip_idle_work

BLOCK_SIZE, NUM_BLOCKS = 4, 22
STEM = list(range(20, 43))
PROMPTS = [[*STEM, 7], [5], [*STEM[:9], 9, 8], [*STEM, 60]]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def serve(model: str, tier: str, preemption: str) -> dict[str, Any]:
    """All requests at once, in too few blocks for them, and the last one again."""
    llm = LLM(
        model, tier=tier, device="cpu", dtype="float32", debug=True, preemption=preemption, num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE, num_swap_blocks=100, max_num_seqs=4, max_num_batched_tokens=10, max_model_len=60,
        async_scheduling=tier == "fast",
    )  # fmt: skip
    assert (tier == "fast") == bool(getattr(llm.engine.runner, "_graphs", {}))
    outputs = llm.generate(PROMPTS, PARAMS) + llm.generate(PROMPTS[-1:], PARAMS)
    stats = asdict(llm.engine.current_stats())
    counts = "blocks_passed", "preempted_by_swap", "preempted_by_recompute", "prefix_cache_hit_tokens"
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "happened": {name: stats[name] for name in counts},
    }


def main(model: str) -> None:
    skip_idle_work()
    replay, replays = DecodeGraph._replay, [0]

    def counted(*arguments: Any) -> Any:
        replays[0] += 1
        return replay(*arguments)

    DecodeGraph._replay = counted  # type: ignore[method-assign]
    runs: dict[str, Any] = {}
    for preemption in ("swap", "recompute"):
        runs[preemption] = {tier: serve(model, tier, preemption) for tier in ("reference", "fast")}
        runs[preemption]["replays"], replays[0] = replays[0], 0
    print(json.dumps(runs))


if __name__ == "__main__":
    assert rehearse_mixed_batches.device.is_gpu(None)
    main(sys.argv[1])
