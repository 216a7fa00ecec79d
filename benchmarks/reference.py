"""What the reference tier delivers on this machine, measured in one run beside transformers.

    python -m benchmarks.reference [--new-tokens N] [--repetitions R] [--json FILE]

Everything is SmolLM2-135M-Instruct in float32, greedy, past the end of sequence. A repetition runs each contestant
once, one after another, so that a machine that slows down slows all of them; reported are medians, and ratios of
medians. transformers runs in this same process, in turns with minipaged: both find the same clock, caches and memory,
and the threads of the one are asleep while the other computes. Each keeps its library's default number of threads.
Prefix caching is off, so that each repetition computes its prompts again (but on where the share of scheduling is
measured, because looking blocks up and publishing them is part of it).

The start of `minipaged generate` is timed from outside, by a small process that has imported nothing else: Linux counts
the memory of the process that starts another one towards the peak of that other one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import Result, at_least, median_seconds, report

MODEL = "smollm2-135m-instruct"
PROMPT = "The librarian opened the oldest book in the house and began to read aloud to the children:"
PREFILL_TOKENS = 512
CROWD = 64
"""Sequences that run at once when the share of scheduling is measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the reference tier beside transformers.")
    parser.add_argument("--new-tokens", type=int, default=112, help="tokens to generate for each sequence")
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each contestant; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and machine to this file")
    arguments = parser.parse_args()
    results = start_of_the_command(arguments.repetitions)  # first, while this process is small
    results += speeds(arguments.new_tokens, arguments.repetitions)
    report(results, {"new_tokens": arguments.new_tokens, "repetitions": arguments.repetitions}, arguments.json)


# --- Generating -----------------------------------------------------------------------------------


def speeds(new_tokens: int, repetitions: int) -> list[Result]:
    """Decoding one sequence and sixteen, prefill, and what scheduling costs."""
    import torch
    from transformers import AutoModelForCausalLM

    from minipaged import LLM, SamplingParams

    llm = LLM(MODEL, tier="reference", num_blocks=640, enable_prefix_caching=False)
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode(PROMPT)
    long_prompt = (prompt * PREFILL_TOKENS)[:PREFILL_TOKENS]
    sixteen = [[*prompt[:-1], token] for token in range(1000, 1016)]
    model = AutoModelForCausalLM.from_pretrained(llm.folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # so that it, too, goes on

    def ours(prompts: list[list[int]], count: int) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    def theirs(tokens: list[int], count: int) -> list[int]:
        ids = torch.tensor([tokens])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        return out[0, len(tokens) :].tolist()

    outputs = {"ours": list(ours([prompt], new_tokens)[0]), "theirs": theirs(prompt, new_tokens)}  # warms up, too
    same = next((i for i in range(new_tokens) if outputs["ours"][i] != outputs["theirs"][i]), new_tokens)
    print(f"the same first {same} of {new_tokens} tokens as transformers", file=sys.stderr)
    medians = median_seconds(
        repetitions,
        {
            "one": lambda: ours([prompt], new_tokens),
            "their one": lambda: theirs(prompt, new_tokens),
            "sixteen": lambda: ours(sixteen, new_tokens),
            "prefill": lambda: ours([long_prompt], 1),
            "their prefill": lambda: theirs(long_prompt, 1),
        },
    )
    one, their_one = new_tokens / medians["one"], new_tokens / medians["their one"]
    batch = len(sixteen) * new_tokens / medians["sixteen"]
    prefill, their_prefill = PREFILL_TOKENS / medians["prefill"], PREFILL_TOKENS / medians["their prefill"]
    return [
        at_least("generate, 1 sequence", one, "tokens/s", "transformers", their_one, 1.5),
        at_least("generate, 16 sequences", batch, "tokens/s", "1 sequence", one, 3.0),
        at_least(f"prefill of {PREFILL_TOKENS} tokens", prefill, "tokens/s", "transformers", their_prefill, None),
        share_of_scheduling(llm, prompt, max(2, new_tokens // 4)),
    ]


def share_of_scheduling(llm: Any, prompt: list[int], num_steps: int) -> Result:
    """Of the time of a step that decodes CROWD sequences: what is not the runner's work.

    That is the scheduler, the block manager, committing the tokens, and counting the events.
    """
    from minipaged import SamplingParams
    from minipaged.contracts import Runner, StepResult
    from minipaged.engine.engine import Engine
    from minipaged.scheduling import Costs
    from minipaged.steps import StepInput

    spent = 0.0  # in the runner

    class Timed(Runner):
        def __init__(self, runner: Runner) -> None:
            self._runner = runner

        def run(self, step: StepInput) -> StepResult:
            nonlocal spent
            start = time.perf_counter()
            result = self._runner.run(step)
            spent += time.perf_counter() - start
            return result

        def costs(self) -> Costs:
            raise AssertionError("the pool is large enough for all")

    loaded, config = llm.loaded, llm.config
    config = replace(config, num_swap_blocks=0, enable_prefix_caching=True)
    runner = loaded.tier.make_runner(loaded.config, loaded.weights, config)
    engine = Engine(config, loaded.tier, Timed(runner))
    for i in range(CROWD):
        params = SamplingParams(temperature=0, max_tokens=num_steps + 1, ignore_eos=True)
        engine.add_request([*prompt[:-1], 1000 + i], params)
    engine.step()  # the prompts
    shares = []
    while engine.has_unfinished_requests():
        assert len(engine.scheduler.running) == CROWD
        spent, start = 0.0, time.perf_counter()
        engine.step()
        whole = time.perf_counter() - start
        shares.append(1 - spent / whole)
    share = 100 * statistics.median(shares)
    return Result(f"scheduling, {CROWD} sequences", share, "% of a step", target="< 5 %", met=share < 5)


# --- Starting -------------------------------------------------------------------------------------

LAUNCHER = """
import json, os, subprocess, sys, time
start = time.perf_counter()
with subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE) as process:
    process.stdout.read(1)
    first = time.perf_counter() - start
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps([first, usage.ru_maxrss * unit, process.returncode]))
"""


def start_of_the_command(repetitions: int) -> list[Result]:
    """Seconds from the shell to the first token, and the most memory on the way."""
    from minipaged.models import hub

    weights = (hub.fetch(MODEL) / "model.safetensors").stat().st_size
    # Through `-m`, which is what the `minipaged` script does, and is there without an activated environment.
    command = [sys.executable, "-m", "minipaged", "generate", PROMPT, "--temperature=0", "--max-tokens=8"]
    command.append("--tier=reference")
    runs = []
    for _ in range(1 + repetitions):  # the first fills the disk cache
        launched = subprocess.run(
            [sys.executable, "-c", LAUNCHER, *command], capture_output=True, text=True, check=True
        )
        seconds, peak, status = json.loads(launched.stdout)
        if status != 0:
            sys.exit(f"{' '.join(command)} failed:\n{launched.stderr}")
        runs.append((seconds, peak))
    first_token = statistics.median(seconds for seconds, _ in runs[1:])
    peak = statistics.median(peak for _, peak in runs[1:])
    ratio = peak / weights
    against = f"weights: {weights / 1e6:.0f} MB"
    return [
        Result("start to first token", first_token, "s", target="< 5 s", met=first_token < 5),
        Result("peak memory of that", peak / 1e6, "MB", against, ratio, "< 2x", ratio < 2),
    ]


if __name__ == "__main__":
    main()
