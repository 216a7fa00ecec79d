"""`python -m benchmarks.shared_prefix`: a decoding step of sequences that begin with the same prompt, on a CPU.

It prints the median time of a step; `--nothing-shared`: also of a step in which nothing is shared. Compare two versions
by running it with each, in turns: `PYTHONPATH=OTHER_CHECKOUT python benchmarks/shared_prefix.py`. On a machine that is
not quiet, `OMP_NUM_THREADS=1` and `--processor-time` give the seconds of one thread's processor, which others disturb
less.
"""

from __future__ import annotations

import argparse
import statistics
import time

from minipaged import LLM, SamplingParams


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="smollm2-135m-instruct")
    arguments.add_argument("--dtype", default="bfloat16")
    arguments.add_argument("--kv-cache-dtype", default="auto")
    arguments.add_argument("--sequences", type=int, default=32)
    arguments.add_argument("--prompt", type=int, nargs="+", default=[2048], help="tokens that all prompts begin with")
    arguments.add_argument("--own", type=int, default=8, help="tokens of each prompt that are its own")
    arguments.add_argument("--processor-time", action="store_true", help="count seconds of the processor")
    arguments.add_argument("--nothing-shared", action="store_true", help="measure that too")
    arguments.add_argument("--steps", type=int, default=40)
    given = arguments.parse_args()
    most = max(given.prompt)
    llm = LLM(
        given.model,
        tier="fast",
        dtype=given.dtype,
        kv_cache_dtype=given.kv_cache_dtype,
        max_num_seqs=given.sequences,
        max_model_len=most + given.own + 2 * given.steps,
        max_num_batched_tokens=4096,
        num_blocks=given.sequences * (-(-(most + given.own + 2 * given.steps) // 16)),
        enable_prefix_caching=True,
    )
    for length in given.prompt:
        for shared in (True, False) if given.nothing_shared else (True,):
            seconds = statistics.median(step_seconds(llm, length, shared, given))
            what = "shared" if shared else "nothing shared"
            print(
                f"{given.dtype}, K/V {given.kv_cache_dtype}: {given.sequences} sequences behind {length} tokens, "
                f"{what}: {seconds * 1e3:.2f} ms a step",
                flush=True,
            )


def step_seconds(llm: LLM, length: int, shared: bool, given: argparse.Namespace) -> list[float]:
    """The times of steps in which all sequences decode. The first prompt runs alone, so that the others find it."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=2 * given.steps, ignore_eos=True)
    for i in range(given.sequences):
        common = [(7 * k + 3 + length + (0 if shared else 1000 + 13 * i)) % 40000 for k in range(length)]
        engine.add_request(common + [(11 * i + k) % 40000 for k in range(given.own)], params)
        if i == 0:
            while not engine.scheduler.running or not engine.scheduler.running[0].prompt_computed:
                engine.step()
    while engine.scheduler.waiting or not all(request.prompt_computed for request in engine.scheduler.running):
        engine.step()
    for _ in range(4):
        engine.step()
    clock = time.process_time if given.processor_time else time.perf_counter
    seconds = []
    while len(engine.scheduler.running) == given.sequences and len(seconds) < given.steps:
        began = clock()
        engine.step()
        seconds.append(clock() - began)
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


if __name__ == "__main__":
    main()
