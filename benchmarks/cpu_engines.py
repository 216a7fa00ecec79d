"""Run the same requests through one engine on a CPU: minipaged, vLLM's CPU build, OpenVINO GenAI, or transformers.

    python benchmarks/cpu_engines.py ENGINE FOLDER    ENGINE: minipaged, vllm, openvino or transformers

A file to be run by itself, in an environment that has the engine. FOLDER: SmolLM2-135M-Instruct, as `minipaged model
where` names it; for OpenVINO, what `optimum-cli export openvino -m FOLDER --task text-generation-with-past
--weight-format fp16 IR_FOLDER` makes of it. Greedy, past the end of sequence, in bfloat16, or with `--dtype float32`.

With a peer, both engines take turns, each in a process of its own. The peer has a Python of its own, because its
packages are other versions:

    python benchmarks/cpu_engines.py minipaged FOLDER --peer openvino --peer-folder IR_FOLDER --peer-python PYTHON

Prints, for each workload, the tokens generated a second (of a prompt alone, those read), and for each second of the
processor's time: with OMP_NUM_THREADS=1 that depends little on what else the machine does. `--busy N` starts N
processes that only compute, for as long as an engine is measured. (vLLM binds threads itself, unless
VLLM_CPU_OMP_THREADS_BIND=nobind.)
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Request = tuple[list[int], int]
"""A prompt, and how many tokens are to follow."""
MAX_SEQS, MAX_LENGTH = 32, 4352


def workloads() -> dict[str, list[Request]]:
    r = random.Random(7)

    def prompt(size: int) -> list[int]:
        return [r.randrange(1000, 40_000) for _ in range(size)]

    return {
        "one request": [(prompt(18), 112)],
        "32 decoding": [(prompt(64), 96) for _ in range(32)],
        "64 mixed": [(prompt(r.randint(16, 256)), r.randint(16, 160)) for _ in range(64)],
        "8 of 1,024": [(prompt(1024), 64) for _ in range(8)],
        "prefill of 512": [(prompt(512), 1)],
        "prefill of 4,096": [(prompt(4096), 1)],
    }


def minipaged(folder: str, dtype: str) -> Callable[[list[Request]], None]:
    from minipaged import LLM, SamplingParams

    llm = LLM(
        folder, tier="fast", device="cpu", dtype=dtype, num_blocks=1200, max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LENGTH, enable_prefix_caching=False,
    )  # fmt: skip

    def run(requests: list[Request]) -> None:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
        llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)

    return run


def vllm(folder: str, dtype: str) -> Callable[[list[Request]], None]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype=dtype, max_num_seqs=MAX_SEQS, max_model_len=MAX_LENGTH, enable_prefix_caching=False)

    def run(requests: list[Request]) -> None:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
        llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)

    return run


def openvino(folder: str, dtype: str) -> Callable[[list[Request]], None]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = 2  # GB
    scheduling.max_num_seqs = MAX_SEQS
    scheduling.max_num_batched_tokens = 2048
    scheduling.dynamic_split_fuse, scheduling.enable_prefix_caching = True, False
    settings = {"INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[dtype]}
    if threads := os.environ.get("OMP_NUM_THREADS"):  # which OpenVINO does not read
        settings["INFERENCE_NUM_THREADS"] = threads
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduling, "CPU", settings)

    def run(requests: list[Request]) -> None:
        params = [
            genai.GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True) for _, count in requests
        ]
        pipeline.generate([ov.Tensor(np.array([prompt], np.int64)) for prompt, _ in requests], params)

    return run


def transformers(folder: str, dtype: str) -> Callable[[list[Request]], None]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def run(requests: list[Request]) -> None:
        """MAX_SEQS at a time, padded on the left; each batch runs until its longest output is there."""
        for start in range(0, len(requests), MAX_SEQS):
            batch = requests[start : start + MAX_SEQS]
            longest, count = max(len(prompt) for prompt, _ in batch), max(count for _, count in batch)
            ids = torch.tensor([[2] * (longest - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            model.generate(
                ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=2
            )

    return run


ENGINES = {"minipaged": minipaged, "vllm": vllm, "openvino": openvino, "transformers": transformers}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run processes that only compute. They end by themselves if this one does."""
    spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
    running = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def measure(engine: str, folder: str, dtype: str, names: list[str], busy_processes: int) -> None:
    run = ENGINES[engine](folder, dtype)
    cases = workloads()
    run([(prompt[:20], 4) for prompt, _ in cases["32 decoding"][:4]])  # warms up
    with busy(busy_processes):
        for name in names:
            requests = cases[name]
            start, used = time.perf_counter(), time.process_time()
            run(requests)
            seconds, used = time.perf_counter() - start, time.process_time() - used
            tokens = sum(len(prompt) if count == 1 else count for prompt, count in requests)
            print(
                f"{engine}, {name}: {tokens / seconds:.1f} tokens/s, {tokens / used:.1f} a second of the processor's",
                flush=True,
            )


def main() -> None:
    names = list(workloads())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("folder")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--workload", choices=names, nargs="+", default=names)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute beside the engine")
    parser.add_argument("--peer", choices=ENGINES, help="an engine to take turns with")
    parser.add_argument("--peer-folder", help="the peer's model; by default FOLDER")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON", help="the one that has the peer")
    parser.add_argument("--turns", type=int, default=2, help="the number of turns, with a peer")
    asked = parser.parse_args()
    if not asked.peer:
        measure(asked.engine, asked.folder, asked.dtype, asked.workload, asked.busy)
        return
    each = ["--dtype", asked.dtype, "--busy", str(asked.busy), "--workload", *asked.workload]
    contestants = [
        (sys.executable, asked.engine, asked.folder),
        (asked.peer_python, asked.peer, asked.peer_folder or asked.folder),
    ]
    for _ in range(asked.turns):
        for python, engine, folder in contestants:
            subprocess.run([python, str(Path(__file__)), engine, folder, *each], check=True)


if __name__ == "__main__":
    main()
