"""numba's kernels, compiled in processes side by side before a model needs them.

    python -m minipaged.fast.cpu.compiling DTYPE PART [DTYPE PART ...]

numba compiles on one core at a time, and a first start waits for little else. So two processes compile a share of the
kernels' parts each, while this one reads weights; they leave what they make where kernels are kept. What a prompt needs
comes first, and is waited for. The rest is compiled while the first tokens come; a kernel that is called before it is
there is waited for then. Nothing depends on these processes: what is missing, because one of them failed, is compiled
where it is called.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Condition, Thread
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from filelock import FileLock
from numba.core.registry import cpu_target

from minipaged.fast import cpu
from minipaged.fast.cpu.attention import _decode
from minipaged.fast.cpu.bfloat16 import as_array
from minipaged.fast.cpu.kernel_cache import others_compile
from minipaged.fast.cpu.llama import _swiglu
from minipaged.fast.cpu.one_token import _run
from minipaged.fast.cpu.prefill import _prefill, _read_heads
from minipaged.fast.cpu.sampling import _argmax_logsumexp, _draw
from minipaged.fast.cpu.vectors import number_type
from minipaged.fast.kernels import Layer, Matrix

ROOT = Path(__file__).parents[3]
"""Where minipaged lies."""
HEAD_DIM = 32
"""The least that can be multiplied in pairs of bfloat16."""


def prompts(dtype: torch.dtype, head_dim: int = HEAD_DIM) -> Iterator[None]:
    """Compile their attention. These iterators yield after each kernel; the last one is the part's sign, in PARTS."""
    one = torch.zeros(1, dtype=torch.int32)
    query, (keys, values) = torch.zeros(2, 2, head_dim, dtype=dtype), torch.zeros(2, 1, 1, 4, head_dim, dtype=dtype)
    ends = torch.tensor([0, 2], dtype=torch.int32)
    cpu.paged_prefill(query, keys, values, one[:, None], one, ends, one + 2, 1.0, max_query_len=2)
    yield


def decoding(dtype: torch.dtype, head_dim: int = HEAD_DIM) -> Iterator[None]:
    """Its attention."""
    one = torch.zeros(1, dtype=torch.int32)
    query, (keys, values) = torch.zeros(1, 2, head_dim, dtype=dtype), torch.zeros(2, 1, 1, 4, head_dim, dtype=dtype)
    cpu.paged_decode(query, keys, values, one[:, None], one, one + 1, 1.0)
    yield


def choosing(dtype: torch.dtype) -> Iterator[None]:
    """The likeliest token. `dtype`: of logits, which are float64 where they are penalised."""
    cpu.argmax_logsumexp(torch.zeros(1, 4, dtype=dtype))
    yield


def sampling(dtype: torch.dtype) -> Iterator[None]:
    """Any other token. `dtype`: of logits."""
    whole, real = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    cpu.uniform(*np.zeros((3, 1), np.uint64))
    yield
    cpu.draw(torch.zeros(1, 4, dtype=dtype), whole, real, real + 1, real, whole, real, whole, real, depth=0)
    yield


def layers(dtype: torch.dtype) -> Iterator[None]:
    """What is between."""
    one, angles = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4)
    x, weight, qkv = (torch.zeros(1, size, dtype=dtype) for size in (8, 8, 32))
    keys, values = torch.zeros(2, 1, 1, 4, 8, dtype=dtype)
    _linears(dtype)[-1](x)
    yield
    cpu.rms_norm(x, weight[0], 1e-5)
    yield
    cpu.add_rms_norm(x, x.clone(), weight[0], 1e-5)
    yield
    cpu.rope_and_write(qkv, angles, angles, one, one, keys, values, 2)
    yield
    cpu.swiglu(x)
    yield


def one_token(dtype: torch.dtype) -> Iterator[None]:
    """All layers for a single token, which take up what `layers` and `decoding` have compiled."""
    one, angles = torch.zeros(1, dtype=torch.int32), torch.zeros(1, HEAD_DIM // 2)
    x, weight = torch.zeros(1, 8, dtype=dtype), torch.zeros(8, dtype=dtype)
    keys, values = torch.zeros(2, 1, 1, 4, HEAD_DIM, dtype=dtype)
    qkv, o, gate_up, down = _linears(dtype)
    run = cpu.one_token([Layer(weight, qkv, None, o, weight, gate_up, down)], [(keys, values)], 1)
    assert run is not None
    run(x, angles, angles, one, one, one[:, None], one, one + 1, 1.0, 1e-5)
    yield


def _linears(dtype: torch.dtype) -> list[Matrix]:
    """Of a layer with a single head and a hidden size of 8."""
    sizes = [(3 * HEAD_DIM, 8), (8, HEAD_DIM), (16, 8), (8, 8)]
    weights = [torch.zeros(size, dtype=dtype) for size in sizes]
    return cpu.linears(sizes, weights, [None] * len(sizes), torch.zeros(1, 8, dtype=dtype))


class Part(NamedTuple):
    """Kernels that are compiled one after another."""

    compile: Callable[[torch.dtype], Iterator[None]]
    last: Any
    """The one that is compiled last. Its arrays all have the numbers that it is compiled for."""
    num_kernels: int


HAS_VECTORS = number_type(torch.float32) is not None
"""Of 512 bits. Without them a prompt's products are the library's, and only what reads keys and values is compiled."""
PARTS = {
    "prompts": Part(prompts, _prefill if HAS_VECTORS else _read_heads, 1),
    "choosing": Part(choosing, _argmax_logsumexp, 1),
    "layers": Part(layers, _swiglu, 5),
    "decoding": Part(decoding, _decode, 1),
    "one_token": Part(one_token, _run, 1),
    "sampling": Part(sampling, _draw, 2),
}
OF_A_PROMPT = ("prompts", "choosing", "layers")
"""What the first token needs."""
SHARES = (("prompts", "choosing", "sampling"), ("layers", "decoding", "one_token"))
"""What each process compiles: half of the work, and half of what a prompt needs at first. Each imports torch and numba
anew: 1.3 s of a core. Two are done sooner than three on two cores, and reading weights leaves them time on a third."""


def is_compiled(part: str, dtype: torch.dtype) -> bool:
    """Whether numba will find the part's last kernel for tensors of this type, made for this processor."""
    here = cpu_target.target_context.codegen().magic_tuple()
    stored = numba.from_dtype(as_array(torch.empty(0, dtype=dtype)).dtype)
    compiled = PARTS[part].last._cache._cache_file._load_index()
    return any(  # a key is (types of the arguments, processor, ...)
        processor == here and stored in (getattr(argument, "dtype", None) for argument in types)
        for types, processor, *_ in compiled
    )


def missing_parts(dtype: torch.dtype) -> list[tuple[str, torch.dtype]]:
    """Of a model that computes in `dtype`: parts that are not compiled, and what for. (Logits are float32.)"""
    wanted = [(part, torch.float32 if part in ("choosing", "sampling") else dtype) for part in PARTS]
    return [(part, of) for part, of in wanted if not is_compiled(part, of)]


@contextmanager
def compiled_meanwhile(dtype: torch.dtype) -> Iterator[None]:
    """On leaving, what most models in `dtype` need for a prompt is compiled, and the rest of what they need is under
    way; in between there is time to do something else. Left out is what few ask for: packed weights, keys and values in
    8 bits, heads that cannot be multiplied in pairs, penalties.

    Says on stderr that it compiles, if there is anything to, and on a terminal how far it is.
    """
    missing = missing_parts(dtype)
    if not missing:
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    print(f"compiling the {_name(dtype)} kernels for this processor, once: about 15 seconds", file=sys.stderr)
    bars = Progress(
        console=Console(stderr=True), transient=True, redirect_stdout=False, disable=not sys.stderr.isatty()
    )
    total = sum(PARTS[part].num_kernels for part, _ in missing if part in OF_A_PROMPT)
    compilers = Compilers(missing, partial(bars.advance, bars.add_task("compiling", total=total)))
    try:
        with bars:
            yield
            compilers.wait_for_prompts()
    except BaseException:
        compilers.end()
        raise


class Compilers:
    """The processes that compile, and what they have not compiled yet. They end with this one."""

    def __init__(self, parts: list[tuple[str, torch.dtype]], advance: Callable[[], object]) -> None:
        """`advance` is called after each kernel that a prompt needs."""
        self._advance = advance
        self._changed = Condition()
        self._left: list[list[str]] = []  # of each process: the part of each kernel that is still to come
        self._processes: list[subprocess.Popen[bytes]] = []
        atexit.register(self.end)
        for names in SHARES:
            share = [(part, dtype) for part, dtype in parts if part in names]
            if not share:
                continue
            try:
                process = _start(share)
            except OSError:  # there is no room for it, or no Python to be started
                break
            left = [part for part, _ in share for _ in range(PARTS[part].num_kernels)]
            self._left.append(left)
            self._processes.append(process)
            Thread(target=self._follow, args=(process, left), daemon=True).start()
        others_compile.append(self.wait_for_one)

    def _follow(self, process: subprocess.Popen[bytes], left: list[str]) -> None:
        assert process.stdout is not None
        for _ in process.stdout:
            with self._changed:
                if left and left.pop(0) in OF_A_PROMPT:
                    self._advance()
                self._changed.notify_all()
        with self._changed:
            left.clear()  # whatever it has not done it will not do
            self._changed.notify_all()

    def wait_for_prompts(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not any(part in OF_A_PROMPT for left in self._left for part in left))

    def wait_for_one(self) -> bool:
        """For the next kernel; False: there is none to come."""
        with self._changed:
            before = sum(map(len, self._left))
            self._changed.wait_for(lambda: sum(map(len, self._left)) < before or before == 0)
            return before > 0

    def end(self) -> None:
        """What is not compiled yet will be where it is called."""
        atexit.unregister(self.end)
        for process in self._processes:
            process.kill()
            process.wait()


def _start(parts: list[tuple[str, torch.dtype]]) -> subprocess.Popen[bytes]:
    """A process that compiles them, and sees the modules that this one does, but none that lie where it was started."""
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
    """In this process; a line on stdout after each kernel. Where others are at it, theirs is waited for. (The file by
    which they know stays in numba's folder, beside what is kept there.)"""
    kernels, last, _ = PARTS[part]
    folder = Path(last._cache.cache_path)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{part}-{_name(dtype)}.lock"):
        for _ in kernels(dtype):
            print(flush=True)


if __name__ == "__main__":
    for name, part in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        compile_part(part, getattr(torch, name))
