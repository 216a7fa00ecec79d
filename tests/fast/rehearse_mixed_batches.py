"""Serve requests on the CUDA path, with a CPU's tensors: decoding sequences, and prompts that arrive among them.

    python -m tests.fast.rehearse_mixed_batches MODEL

Kernels run in Triton's interpreter; a stream is nothing; a CUDA graph computes its step anew in its own buffers. Prints
one JSON object: the tokens of each request by the reference tier, and by the fast one with the decoding sequences of a
mixed batch in their graph, and beside the prompts in one pass; how many steps were mixed, and in how many of them a
graph was replayed. In a process of its own, for all of the fast tier has to believe in the GPU before it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ["TRITON_INTERPRET"] = "1"

import torch

from minipaged.fast import device

device.is_gpu = lambda device: True


class Graph(MagicMock):
    """What was captured is the step of the `DecodeGraph` that it was captured for."""

    def replay(self) -> None:
        self.decode.logits.copy_(self.decode.step())


for name in ("Stream", "Event", "current_stream", "synchronize"):
    setattr(torch.cuda, name, MagicMock())
torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment]
torch.cuda.graph = lambda graph, **options: nullcontext()  # type: ignore[misc, assignment]
torch.cuda.CUDAGraph = Graph  # type: ignore[misc]
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=2)  # type: ignore[assignment]
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.Tensor.pin_memory = torch.Tensor.clone  # type: ignore[assignment]
torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
empty = torch.empty
torch.empty = lambda *size, pin_memory=False, **options: empty(*size, **options)  # type: ignore[assignment]

from minipaged import LLM, SamplingParams  # noqa: E402
from minipaged.fast import llama, preemption  # noqa: E402
from tests.triton_interpreter import skip_idle_work  # noqa: E402

llama.BATCH_SIZES[:] = [2, 4]
preemption.PROBE_TOKENS_ON_GPU = 4
prepare = llama.DecodeGraph.__init__


def prepared(self: llama.DecodeGraph, *arguments: Any) -> None:
    prepare(self, *arguments)
    self.graph.decode = self  # type: ignore[attr-defined]


llama.DecodeGraph.__init__ = prepared  # type: ignore[method-assign]

STEM = [7, 8, 9, 10, 11, 12, 13, 14]
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.8, "seed": 5}
REQUESTS: list[tuple[int, list[int], dict[str, Any]]] = [
    # the step before which it comes, its prompt, and how its tokens are chosen
    (0, [*STEM, 20], {"max_tokens": 12, **GREEDY}),
    (0, [30, 31, 32], {"max_tokens": 9, **DRAWN}),
    (3, [*STEM, 21, 22], {"max_tokens": 6, **DRAWN, "n": 2}),  # its first blocks are there already; two samples
    (6, list(range(40, 58)), {"max_tokens": 5, **GREEDY}),  # in chunks
    (10, [33, 34, 35], {"max_tokens": 3, **GREEDY}),
    (10, [60], {"max_tokens": 4, **GREEDY, "repetition_penalty": 1.2}),  # a prompt of one token, after a longer one
]


class Counted:
    """How many of a runner's steps were mixed, and how many of those replayed a graph."""

    def __init__(self, runner: Any) -> None:
        self.mixed = self.replayed = 0
        self._runner, self._forward = runner, runner._forward
        runner._forward = self.forward
        for graph in runner._graphs.values():
            graph.graph.replay = self._counting(graph.graph.replay)

    def _counting(self, replay: Any) -> Any:
        def counted() -> None:
            self.replayed += self._is_mixed
            replay()

        return counted

    def forward(self) -> Any:
        lengths = {min(row.num_tokens, 2) for row in self._runner.mirror.rows}
        self._is_mixed = len(lengths) == 2
        self.mixed += self._is_mixed
        return self._forward()


def serve(model: str, tier: str, **changes: object) -> dict[str, Any]:
    """`changes`: attributes of the runner to be set beforehand."""
    llm = LLM(
        model, tier=tier, device="cpu", dtype="float32", num_blocks=24, block_size=4, num_swap_blocks=8,
        max_num_seqs=6, max_num_batched_tokens=10, max_model_len=32, async_scheduling=tier == "fast",
    )  # fmt: skip
    for name, value in changes.items():
        setattr(llm.engine.runner, name, value)
    counted = Counted(llm.engine.runner) if tier == "fast" else None
    tokens: dict[str, list[list[int]]] = {}
    step = 0
    while step <= REQUESTS[-1][0] or llm.engine.has_unfinished_requests():
        for number, (arrives, prompt, how) in enumerate(REQUESTS):
            if arrives == step:
                llm.engine.add_request(prompt, SamplingParams(**how, ignore_eos=True), request_id=str(number))
        for update in llm.engine.step():
            if update.output:
                tokens[update.request_id] = [list(one.token_ids) for one in update.output.outputs]
        step += 1
    return {"tokens": tokens, "mixed": counted and counted.mixed, "replayed": counted and counted.replayed}


def main(model: str) -> None:
    skip_idle_work()
    runs = {
        "reference": serve(model, "reference"),
        "in two parts": serve(model, "fast"),
        "in one pass": serve(model, "fast", _has_small_layers=False),
    }
    print(json.dumps(runs))


if __name__ == "__main__":
    main(sys.argv[1])
