"""Parallel compilation of numba's kernels, in processes of their own, before a model needs them.

    python -m minipaged.fast.cpu.compiling DTYPE PART [DTYPE PART ...]

numba compiles on one core at a time, which is nearly all of the time of a first start. So two processes each compile a
share of the kernels while this process reads weights. They save the kernels on disk (`kernel_cache.py`). If one of them
fails, its missing kernels are compiled when they are called.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from filelock import FileLock
from numba.core.registry import cpu_target

from minipaged.fast import cpu
from minipaged.fast.cpu.attention import _decode
from minipaged.fast.cpu.bfloat16 import as_array
from minipaged.fast.cpu.kernel_cache import KernelCache
from minipaged.fast.cpu.one_call import _run
from minipaged.fast.cpu.prefill import _prefill, _read_heads
from minipaged.fast.cpu.sampling import _draw
from minipaged.fast.cpu.vectors import HAS_VECTORS
from minipaged.fast.kernels import Layer, Paged

ROOT = Path(__file__).parents[3]
"""The folder that contains the package minipaged."""
HEAD_DIM = 32
"""The smallest head size that can be multiplied in pairs of bfloat16."""


def prompts(dtype: torch.dtype, head_dim: int = HEAD_DIM) -> Iterator[None]:
    """Compile attention for prompts. Each iterator here yields after every kernel that it compiles. `PARTS` names its
    last kernel: if that one is stored, `is_compiled` counts the whole part as compiled."""
    one = torch.zeros(1, dtype=torch.int32)
    query, (keys, values) = torch.zeros(2, 2, head_dim, dtype=dtype), torch.zeros(2, 1, 1, 4, head_dim, dtype=dtype)
    ends = torch.tensor([0, 2], dtype=torch.int32)
    cpu.paged_prefill(query, Paged(keys, values, one[:, None], one, one + 2), ends, 1.0, max_query_len=2)
    yield


def decoding(dtype: torch.dtype, head_dim: int = HEAD_DIM) -> Iterator[None]:
    """Compile attention for decoding."""
    one = torch.zeros(1, dtype=torch.int32)
    query, (keys, values) = torch.zeros(1, 2, head_dim, dtype=dtype), torch.zeros(2, 1, 1, 4, head_dim, dtype=dtype)
    cpu.paged_decode(query, Paged(keys, values, one[:, None], one, one + 1), 1.0)
    yield


def sampling(dtype: torch.dtype) -> Iterator[None]:
    """Compile sampling. `dtype`: the type of logits, which is float64 if they are penalised."""
    whole, real = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    logits = torch.zeros(1, 4, dtype=dtype)
    cpu.argmax_logsumexp(logits)
    yield
    cpu.likeliest_allowed(logits, whole, torch.zeros(1, 1, dtype=torch.int32))
    yield
    cpu.largest(logits, 1)
    yield
    cpu.uniform(*np.zeros((3, 1), np.uint64))
    yield
    cpu.draw(logits, whole, real, real + 1, real, whole, real, whole, real, depth=0)
    yield


def layers(dtype: torch.dtype) -> Iterator[None]:
    """Compile the kernels around attention (norms, activation, rotation, matrix products), then the one that runs
    sequences that decode through all layers. That one links the attention kernel that `decoding` has compiled."""
    one, angles = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4)
    x, weight, qkv = (torch.zeros(1, size, dtype=dtype) for size in (8, 8, 32))
    keys, values = torch.zeros(2, 1, 1, 4, 8, dtype=dtype)
    cpu.rms_norm(x, weight[0], 1e-5)
    yield
    cpu.add_rms_norm(x, x.clone(), weight[0], 1e-5)
    yield
    cpu.swiglu(x)
    yield
    cpu.rope_and_write(qkv, angles, angles, one, one, keys, values, 2)
    yield
    sizes = [(3 * HEAD_DIM, 8), (8, HEAD_DIM), (16, 8), (8, 8)]  # with a single head
    matrices = cpu.linears(sizes, [torch.zeros(size, dtype=dtype) for size in sizes], [None] * len(sizes), x)
    matrices[-1](x)
    yield
    keys, values = torch.zeros(2, 1, 1, 4, HEAD_DIM, dtype=dtype)
    qkv_matrix, o, gate_up, down = matrices
    layer = Layer(weight[0], qkv_matrix, None, o, weight[0], gate_up, down)
    angles = torch.zeros(1, HEAD_DIM // 2)
    run = cpu.in_one_call([layer], [(keys, values)], [None], 1, angles, angles, 1.0, 1e-5)
    assert run is not None
    run(x, one, one, one[:, None], one, one + 1)
    yield


class CompileJob(NamedTuple):
    """A list of kernels that are compiled one after another."""

    compile: Callable[[torch.dtype], Iterator[None]]
    last: Any
    """The kernel that is compiled last."""
    argument: slice
    """The arguments of `last` whose types show for which dtype it is compiled."""
    num_kernels: int


PARTS = {
    # Without vectors of 512 bits torch computes the matrix products of a prompt's attention, and only the kernel that
    # reads keys and values is compiled.
    "prompts": CompileJob(prompts, _prefill, slice(1), 1)
    if HAS_VECTORS
    else CompileJob(prompts, _read_heads, slice(None), 1),
    "decoding": CompileJob(decoding, _decode, slice(1), 1),
    "sampling": CompileJob(sampling, _draw, slice(1), 5),
    "layers": CompileJob(layers, _run, slice(2, 3), 6),
}
SHARES = (("decoding", "sampling"), ("prompts", "layers"))
"""The parts that each process compiles, half of the work. `decoding` is stored before the last kernel of `layers`
links it; otherwise that process would compile it again. On two cores, two processes finish sooner than three, because
each must import torch and numba, 1.3 s of one core."""


def is_compiled(part: str, dtype: torch.dtype) -> bool:
    """Return whether numba will find the part's last kernel on disk, for this dtype and this processor."""
    here = cpu_target.target_context.codegen().magic_tuple()
    stored = numba.from_dtype(as_array(torch.empty(0, dtype=dtype)).dtype)
    kept = PARTS[part].last._cache._cache_file
    return any(  # a key is (types of the arguments, processor, ...)
        processor == here
        and stored in (getattr(argument, "dtype", None) for argument in types[PARTS[part].argument])
        and Path(kept._data_path(file)).exists()  # numba writes the index, which names the file, first
        for (types, processor, *_), file in kept._load_index().items()
    )


def missing_parts(dtype: torch.dtype) -> list[tuple[str, torch.dtype]]:
    """Return the parts that a model computing in `dtype` needs and that are not compiled yet, each with its dtype.
    (Logits without penalties are float32.) Empty if kernels cannot be stored: compiling them ahead would be useless."""
    if not all(isinstance(part.last._cache, KernelCache) for part in PARTS.values()):
        return []
    wanted = [(part, torch.float32 if part == "sampling" else dtype) for part in PARTS]
    return [(part, of) for part, of in wanted if not is_compiled(part, of)]


@contextmanager
def compiled_meanwhile(dtype: torch.dtype) -> Iterator[None]:
    """Compile the kernels that most models in `dtype` need, while the caller does other work in this context. Leaving
    it waits until they are compiled. Kernels that few models need are left out: those for packed weights, for keys and
    values in 8 bits, for heads that cannot be multiplied in pairs, and for penalties.

    If there is anything to compile, stderr gets a message, and on a terminal a progress bar.
    """
    missing = missing_parts(dtype)
    if not missing:
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    print(f"compiling the {_name(dtype)} kernels for this processor, once: about 20 seconds", file=sys.stderr)
    bars = Progress(
        console=Console(stderr=True), transient=True, redirect_stdout=False, disable=not sys.stderr.isatty()
    )
    with bars, ExitStack() as at_the_end:
        bar = bars.add_task("compiling", total=sum(PARTS[part].num_kernels for part, _ in missing))

        def follow(child: subprocess.Popen[bytes]) -> None:
            assert child.stdout is not None
            for _ in child.stdout:
                bars.advance(bar)

        followers = []
        for parts in SHARES:
            share = [(part, of) for part, of in missing if part in parts]
            if not share:
                continue
            try:
                child = _start(share)
            except OSError:  # not enough memory for it, or no Python executable
                break
            follower = Thread(target=follow, args=(child,), daemon=True)
            follower.start()
            followers.append(follower)
            at_the_end.push(child)
            at_the_end.callback(follower.join)
            at_the_end.callback(child.kill)  # runs before the two lines above; does nothing if the child has ended
        yield
        for follower in followers:
            follower.join()


def _start(parts: list[tuple[str, torch.dtype]]) -> subprocess.Popen[bytes]:
    """Start a process that compiles `parts`. It can import the same modules as this process, but none from the current
    directory."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *(word for part, dtype in parts for word in (_name(dtype), part))],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compile_part(part: str, dtype: torch.dtype) -> None:
    """Compile a part in this process and print an empty line after each kernel. If another process is compiling the
    same part, wait for it first. The lock file stays in the folder of the kernels."""
    folder = Path(PARTS[part].last._cache.cache_path)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{part}-{_name(dtype)}.lock"):
        for _ in PARTS[part].compile(dtype):
            print(flush=True)


if __name__ == "__main__":
    gc.disable()  # no object made here is freed before the end (saved 6 and 16 % of the time in two paired runs)
    for name, part in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        compile_part(part, getattr(torch, name))
