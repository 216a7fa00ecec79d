"""The same requests through one engine on a CPU: minipaged, vLLM's CPU build, or transformers.

    python benchmarks/cpu_engines.py ENGINE FOLDER    ENGINE: minipaged, vllm or transformers

A file to be run by itself, in an environment that has the engine; several of them are to be run in turns, or at once.
FOLDER: SmolLM2-135M-Instruct, as `minipaged model where` names it. Greedy, past the end of sequence, in bfloat16.
Prints, for each workload, the tokens generated a second (of a prompt alone, those read), and for each second of the
processor's time: with OMP_NUM_THREADS=1 that depends little on what else the machine does. (vLLM binds threads itself,
unless VLLM_CPU_OMP_THREADS_BIND=nobind.)
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable

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


def minipaged(folder: str) -> Callable[[list[Request]], None]:
    from minipaged import LLM, SamplingParams

    llm = LLM(
        folder, tier="fast", device="cpu", dtype="bfloat16", num_blocks=1200, max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LENGTH, enable_prefix_caching=False,
    )  # fmt: skip

    def run(requests: list[Request]) -> None:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
        llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)

    return run


def vllm(folder: str) -> Callable[[list[Request]], None]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="bfloat16", max_num_seqs=MAX_SEQS, max_model_len=MAX_LENGTH, enable_prefix_caching=False)

    def run(requests: list[Request]) -> None:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
        llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)

    return run


def transformers(folder: str) -> Callable[[list[Request]], None]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

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


def main() -> None:
    engine, folder = sys.argv[1:]
    run = {"minipaged": minipaged, "vllm": vllm, "transformers": transformers}[engine](folder)
    cases = workloads()
    run([(prompt[:20], 4) for prompt, _ in cases["32 decoding"][:4]])  # warms up
    for name, requests in cases.items():
        start, used = time.perf_counter(), time.process_time()
        run(requests)
        seconds, used = time.perf_counter() - start, time.process_time() - used
        tokens = sum(len(prompt) if count == 1 else count for prompt, count in requests)
        print(
            f"{engine}, {name}: {tokens / seconds:.1f} tokens/s, {tokens / used:.1f} a second of the processor's",
            flush=True,
        )


if __name__ == "__main__":
    main()
