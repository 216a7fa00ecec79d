"""Where the time goes on a CPU in the workloads of `cpu_engines.py`, part by part, beside what the machine could do.

    python -m benchmarks.cpu_profile [WORKLOAD ...]    all, or those named

For each part its share of the time, and its floor: the bytes that it has to read at the rate at which this machine
reads much memory, or its operations at the rate of a large bf16 product, whichever takes longer, call by call. Both
rates are measured first. Element-wise work and sampling have no floor here; "engine and the rest" is what no part
accounts for. The clocks around each call cost the smallest workload a few percent. The call that runs all layers for
sequences that decode (`minipaged/fast/cpu/one_call.py`) has no room for clocks between its parts, so decoding takes
longer in the table than it does. The line below the table is from a second run, with that call.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.cpu_engines import MAX_LENGTH, MAX_SEQS, Request, workloads
from minipaged import LLM, SamplingParams
from minipaged.fast import cpu, llama
from minipaged.fast.cpu.llama import DenseMatrix
from minipaged.fast.cpu.product import TiledMatrix
from minipaged.fast.kernels import RunLayers

ELEMENT_WISE = ("rms_norm", "add_rms_norm", "swiglu", "rope_and_write")
SAMPLING = ("allowed_only", "argmax_logsumexp", "draw", "likeliest_allowed")


def best(call: Callable[[], Any], rounds: int = 7) -> float:
    """Seconds of the fastest."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def rates() -> tuple[float, float]:
    """Bytes a second that are read, and operations a second of a bf16 product."""
    much = torch.zeros(1 << 28)
    size = 2048
    x, w = (torch.rand(size, size, dtype=torch.bfloat16) for _ in range(2))
    return much.nbytes / best(much.sum), 2 * size**3 / best(lambda: linear(x, w))


Work = Callable[..., tuple[float, float]]
"""Of a call with these arguments: bytes to be read, operations."""


class Profile:
    """Clocks around the parts of a model's layers, for as long as one workload runs."""

    def __init__(self, read_rate: float, product_rate: float) -> None:
        self.read_rate, self.product_rate = read_rate, product_rate
        self.seconds: Counter[str] = Counter()
        self.floors: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self._before: list[tuple[Any, str, Any]] = []

    def put_clock(self, owner: Any, attribute: str, name: Callable[..., str], work: Work) -> None:
        """Around `owner.attribute`; `name` says for its arguments which part a call is."""
        call = getattr(owner, attribute)

        def noted(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **more)
            part = name(*args)
            self.seconds[part] += time.perf_counter() - start
            num_bytes, operations = work(*args)
            self.floors[part] += max(num_bytes / self.read_rate, operations / self.product_rate)
            self.operations[part] += int(operations)
            return result

        self._before.append((owner, attribute, call))
        setattr(owner, attribute, noted)

    def put_clocks(self, names: dict[tuple[int, int], str]) -> None:
        """`names`: of matrices by their shapes."""
        for kind in (DenseMatrix, TiledMatrix):
            self.put_clock(kind, "__call__", lambda matrix, x: names[tuple(matrix.shape)], product)
        self.put_clock(llama, "attend", lambda *_: "attention", attention)
        for part, kernels in (("element-wise", ELEMENT_WISE), ("sampling", SAMPLING)):
            for kernel in kernels:
                self.put_clock(cpu, kernel, lambda *_, part=part: part, lambda *_: (0.0, 0.0))

    def take_clocks_away(self) -> None:
        for owner, attribute, call in self._before:
            setattr(owner, attribute, call)


def product(matrix: DenseMatrix | TiledMatrix, x: torch.Tensor) -> tuple[float, float]:
    return matrix.nbytes, 2.0 * len(x) * math.prod(matrix.shape)


def attention(
    query: torch.Tensor,
    cache: Any,
    layer: int,
    tables: Any,
    rows: Any,
    starts: torch.Tensor,
    lens: torch.Tensor,
    *_: Any,
) -> tuple[float, float]:
    """All keys and values once, and the products that causality leaves."""
    contexts = lens.tolist()
    new = [1] * (len(contexts) - len(starts) + 1) + starts.diff().tolist()  # query tokens of each sequence
    keys, _values = cache.layer(layer)
    scores = sum(n * (c - (n - 1) / 2) for n, c in zip(new, contexts, strict=True))
    return sum(contexts) * 2.0 * keys[0, :, 0].nbytes, 4.0 * query[0].numel() * scores


def shapes(llm: LLM) -> dict[tuple[int, int], str]:
    """What the model's matrices are called, by their shapes [out, in]."""
    c = llm.loaded.config
    heads = c.num_attention_heads * c.head_dim
    return {
        (heads + 2 * c.num_key_value_heads * c.head_dim, c.hidden_size): "products: q, k, v",
        (c.hidden_size, heads): "products: o",
        (2 * c.intermediate_size, c.hidden_size): "products: gate, up",
        (c.hidden_size, c.intermediate_size): "products: down",
        (c.vocab_size, c.hidden_size): "products: head",
    }


class InOneCall:
    """The call that runs all layers, with a clock around it."""

    def __init__(self, run: RunLayers) -> None:
        self.run, self.most_tokens = run, run.most_tokens
        self.seconds = 0.0

    def __call__(self, *args: Any) -> torch.Tensor:
        start = time.perf_counter()
        result = self.run(*args)
        self.seconds += time.perf_counter() - start
        return result


def seconds_of(requests: list[Request], llm: LLM, in_one_call: InOneCall | None) -> float:
    """The seconds that an LLM takes for a workload, with this call for its decoding steps or without one."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
    runner: Any = llm.engine.runner
    given, runner._one_call = runner._one_call, in_one_call
    start = time.perf_counter()
    try:
        llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    finally:
        runner._one_call = given
    return time.perf_counter() - start


def show(name: str, requests: list[Request], llm: LLM, profile: Profile) -> None:
    profile.put_clocks(shapes(llm))
    try:
        whole = seconds_of(requests, llm, None)
    finally:
        profile.take_clocks_away()
    profile.seconds["engine and the rest"] = whole - sum(profile.seconds.values())
    print(f"\n{name}: {whole:.2f} s")
    print(f"{'part':22} {'share':>6} {'seconds':>8} {'floor':>7} {'of the floor':>13} {'GFLOP/s':>8}")
    for part, seconds in profile.seconds.most_common():
        floor, rate = profile.floors[part], profile.operations[part] / seconds / 1e9
        beside = f"{floor:7.2f} {floor / seconds:12.0%} {rate:8.0f}" if floor else ""
        print(f"{part:22} {seconds / whole:6.1%} {seconds:8.2f} {beside}", flush=True)
    runner: Any = llm.engine.runner
    if runner._one_call:
        in_one_call = InOneCall(runner._one_call)
        whole = seconds_of(requests, llm, in_one_call)
        print(f"with all layers in one call: {whole:.2f} s, {in_one_call.seconds:.2f} of them in that call", flush=True)


def main() -> None:
    cases = workloads()
    chosen = sys.argv[1:] or list(cases)
    if unknown := set(chosen) - set(cases):
        sys.exit(f"there is no workload {min(unknown)!r}; choose of {', '.join(cases)}")
    read_rate, product_rate = rates()
    threads = torch.get_num_threads()
    print(f"read {read_rate / 1e9:.1f} GB/s, bf16 products {product_rate / 1e9:.0f} GFLOP/s, {threads} threads")
    llm = LLM(
        "smollm2-135m-instruct", tier="fast", device="cpu", dtype="bfloat16", num_blocks=1200, max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LENGTH, enable_prefix_caching=False,
    )  # fmt: skip
    llm.generate([cases["32 decoding"][0][0]], SamplingParams(max_tokens=4), use_tqdm=False)
    for name in chosen:
        show(name, cases[name], llm, Profile(read_rate, product_rate))


if __name__ == "__main__":
    main()
