"""What the fast tier delivers on a machine without a GPU, beside transformers and torch, in one run.

    python -m benchmarks.fast [--repetitions R] [--quick] [--json FILE]

SmolLM2-135M-Instruct, greedy, past the end of sequence. A repetition runs each contestant once, one after another, so
that a machine that slows down slows all of them; reported are medians, and ratios of medians. All contestants run in
this one process, with their libraries' default number of threads, and prefix caching is off.

- One sequence: transformers' `generate` in the same dtype.
- Many requests: random lengths of prompts and outputs. minipaged takes them all at once and runs 32 sequences at a
  time (continuous batching). transformers takes them 32 at a time in order of arrival, padded on the left; a batch runs
  until its longest output is there, and tokens that nobody asked for do not count.
- Paged attention: 32 sequences of one query each, blocks of 16 in random places, 30 calls a turn. The peer gathers each
  sequence's blocks into one tensor and calls `scaled_dot_product_attention`.
- Block allocator: see `benchmarks.allocator`.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.allocator import allocator_results
from benchmarks.side_by_side import Result, at_least, median_seconds, report
from minipaged import LLM, SamplingParams
from minipaged.fast.cpu import paged_decode
from minipaged.fast.kernels import Paged

MODEL = "smollm2-135m-instruct"
PROMPT = "The librarian opened the oldest book in the house and began to read aloud to the children:"
NEW_TOKENS = 112
PREFILL_TOKENS = 512
BATCH = 32
CALLS = 30
"""Of paged attention, in one turn: a model has as many layers."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the fast tier on a CPU beside transformers and torch.")
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each contestant; the median counts")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and requests: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and machine to this file")
    arguments = parser.parse_args()
    repetitions, quick = arguments.repetitions, arguments.quick
    results = allocator(2 if quick else 50)
    results += [
        attention(dtype, context, repetitions * 3) for dtype in ("float32", "bfloat16") for context in (256, 1024)
    ]
    for dtype in ("float32", "bfloat16"):
        results += one_sequence(dtype, 16 if quick else NEW_TOKENS, repetitions)
    results.append(many_requests("bfloat16", 8 if quick else 64, max(1, repetitions // 2)))
    report(results, {"repetitions": repetitions, "quick": quick}, arguments.json)


# --- Parts ----------------------------------------------------------------------------------------


def allocator(repetitions: int) -> list[Result]:
    """The batched calls of 4,096 blocks, and of the operations on single blocks the one that gains least."""
    print("block allocator", file=sys.stderr)
    measured = allocator_results(repetitions)
    many = next(case for case in measured if case["what"].startswith("allocate_many(4096)"))
    single = min((case for case in measured if "many" not in case["what"]), key=lambda case: case["ratio"])
    cases = (("allocate_many, free_many of 4,096", many), (single["what"], single))
    return [
        at_least(
            what,
            1e-3 / case["fast_seconds"],
            "calls/ms",
            "reference",
            1e-3 / case["reference_seconds"],
            case["target"],
        )
        for what, case in cases
    ]


def attention(dtype: str, context: int, repetitions: int) -> Result:
    """Bytes of keys and values read a second by a step of decoding, in SmolLM2's shapes."""
    heads, kv_heads, head_dim, block_size = 9, 3, 64, 16
    blocks = BATCH * context // block_size
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(blocks, 1, 2, kv_heads, block_size, head_dim, generator=generator).to(getattr(torch, dtype))
    keys, values = cache[:, 0, 0], cache[:, 0, 1]
    tables = torch.randperm(blocks, generator=generator).view(BATCH, -1).int()
    query = torch.randn(BATCH, heads, head_dim, generator=generator).to(cache.dtype)
    rows, lens = torch.arange(BATCH, dtype=torch.int32), torch.full((BATCH,), context, dtype=torch.int32)
    scale = head_dim**-0.5

    def ours() -> torch.Tensor:
        return paged_decode(query, Paged(keys, values, tables, rows, lens), scale)

    def theirs() -> torch.Tensor:
        k, v = (pool[tables.long()].transpose(1, 2).flatten(2, 3) for pool in (keys, values))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query[:, :, None], k, v, scale=scale, enable_gqa=True)[:, :, 0]

    torch.testing.assert_close(ours(), theirs(), rtol=2e-2, atol=2e-2)
    turns = {
        name: lambda call=call: [call() for _ in range(CALLS)] for name, call in (("ours", ours), ("theirs", theirs))
    }
    medians = median_seconds(repetitions, turns, quiet=True)
    size = CALLS * cache.numel() * cache.itemsize / 1e9
    what = f"paged attention, {BATCH} x {context}, {dtype}"
    result = at_least(what, size / medians["ours"], "GB/s", "gather + SDPA", size / medians["theirs"], 10)
    met = bool(result.met) and result.value >= 15
    return Result(result.what, result.value, result.unit, result.against, result.ratio, ">= 15 GB/s, 10x", met)


# --- The model ------------------------------------------------------------------------------------


def one_sequence(dtype: str, new_tokens: int, repetitions: int) -> list[Result]:
    """Decoding one sequence, and a prompt of 512 tokens."""
    llm, model = load(dtype, 1)
    prompt = llm.tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    long_prompt = (prompt * PREFILL_TOKENS)[:PREFILL_TOKENS]
    ours, theirs = served(llm, [(prompt, new_tokens)])[0], generated(model, [(prompt, new_tokens)])[0]
    same = next((i for i in range(new_tokens) if ours[i] != theirs[i]), new_tokens)
    print(f"{dtype}: the same first {same} of {new_tokens} tokens as transformers", file=sys.stderr)
    medians = median_seconds(
        repetitions,
        {
            "ours": lambda: served(llm, [(prompt, new_tokens)]),
            "theirs": lambda: generated(model, [(prompt, new_tokens)]),
            "prefill": lambda: served(llm, [(long_prompt, 1)]),
            "their prefill": lambda: generated(model, [(long_prompt, 1)]),
        },
    )
    one, their_one = new_tokens / medians["ours"], new_tokens / medians["theirs"]
    prefill, their_prefill = PREFILL_TOKENS / medians["prefill"], PREFILL_TOKENS / medians["their prefill"]
    return [
        at_least(f"generate, 1 sequence, {dtype}", one, "tokens/s", "transformers", their_one, 2.0),
        at_least(f"prefill of {PREFILL_TOKENS}, {dtype}", prefill, "tokens/s", "transformers", their_prefill, None),
    ]


def many_requests(dtype: str, num_requests: int, repetitions: int) -> Result:
    """Requests of different lengths: continuous batching beside static, padded batches."""
    llm, model = load(dtype, BATCH)
    r = random.Random(0)
    jobs = [
        ([r.randrange(1000, 40_000) for _ in range(r.randint(10, 120))], r.randint(20, 200))
        for _ in range(num_requests)
    ]
    wanted = sum(count for _, count in jobs)

    def theirs() -> None:
        for start in range(0, num_requests, BATCH):
            generated(model, jobs[start : start + BATCH])

    served(llm, jobs[:4])  # warms up
    medians = median_seconds(repetitions, {"ours": lambda: served(llm, jobs), "theirs": theirs})
    rates = [wanted / medians[name] for name in ("ours", "theirs")]
    return at_least(
        f"{num_requests} requests, {BATCH} at a time, {dtype}", rates[0], "tokens/s", "transformers", rates[1], 2.5
    )


def load(dtype: str, batch: int) -> tuple[LLM, Any]:
    """The model in both systems."""
    llm = LLM(
        MODEL, tier="fast", device="cpu", dtype=dtype, num_blocks=1000, num_swap_blocks=1, max_num_seqs=batch,
        enable_prefix_caching=False,
    )  # fmt: skip
    print(llm.loaded.tier.description, file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(llm.folder, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None  # so that it, too, goes on
    return llm, model


def served(llm: LLM, jobs: list[tuple[list[int], int]]) -> list[tuple[int, ...]]:
    """The outputs of prompts, each with its number of tokens, by minipaged."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in jobs]
    return [o.outputs[0].token_ids for o in llm.generate([prompt for prompt, _ in jobs], params, use_tqdm=False)]


def generated(model: Any, jobs: list[tuple[list[int], int]]) -> list[list[int]]:
    """The same by transformers: one batch, padded on the left, as long as its longest output."""
    longest = max(len(prompt) for prompt, _ in jobs)
    ids = torch.zeros(len(jobs), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(jobs):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = torch.tensor(prompt), 1
    most = max(count for _, count in jobs)
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=most, pad_token_id=0)
    return [row[longest : longest + count].tolist() for row, (_, count) in zip(out, jobs, strict=True)]


if __name__ == "__main__":
    main()
