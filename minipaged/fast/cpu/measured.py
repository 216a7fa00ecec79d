"""Which product multiplies a model's matrices, where the processor has instructions for both: measured once, then kept.

Where a processor can multiply tiles (`product.py`), torch's library may still be faster. Processors with AMX multiply
matrices in it, and only the library uses that. So both multiply one small matrix for a few numbers of tokens, when the
first model is loaded. The answer is kept in a file beside the compiled kernels. Later starts read it, and so they
compute the same bits.

- **On one thread, in its processor time.** Processors differ in their instructions, which each core has for itself.
  With more threads, another program that takes a core would decide. The number of threads, which is another one for a
  model in several processes, does not matter.
- **A fixed matrix.** The answer does not depend on the model that happens to be loaded first.
- **Not one token.** A product with one token waits for memory, whatever the instructions are. The library's way
  (`llama.DenseMatrix`) then is a loop over rows, which takes 1.2 to 2.6 times as long as tiles (the table in
  `product.py`). It would have to be compiled for the measurement alone, and where tiles are chosen it is never used.
- **Clearly better.** `CLEARLY` allows for that loss with few tokens, and for noise.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from numba.core.registry import cpu_target
from torch import Tensor

from minipaged.fast.cpu.kernel_cache import digest_of
from minipaged.fast.cpu.product import TiledMatrix, multiply_tiles, num_bytes
from minipaged.fast.cpu.threads import on_one_thread
from minipaged.fast.kernels import Matrix

TOKENS = (24, 256)
"""The numbers of tokens: of a batch that decodes, and of a prompt. (512 would take twice the time.)"""
SIDE = 576
"""The number of the matrix's rows and of its columns, as SmolLM2-135M's projections have them."""
TURNS = 5
"""Each product is computed as often for each number of tokens, in turns, and the fastest counts. The first is slow: it
loads or compiles its code."""
CLEARLY = 2.0
"""The least product of all ratios for which the library is chosen. With one token it takes about 1.5 times as long as
tiles, which is not measured. The rest is left for noise."""
LONGEST_WAIT = 30.0
"""Seconds to wait for another process that measures. It may have to compile the product first, in 2 seconds."""


class Speeds(NamedTuple):
    """How fast the library's product is beside the one in tiles, on this processor and in one dtype."""

    ratios: Mapping[int, float]
    """The time in tiles ÷ the library's time, by the number of tokens."""

    @property
    def library_is_better(self) -> bool:
        """Whether the library is so much faster that it is chosen."""
        return math.prod(self.ratios.values()) >= CLEARLY


@lru_cache
def speeds(dtype: torch.dtype, library: Callable[[Tensor, None], Matrix]) -> Speeds:
    """Return the speeds that are kept for this processor, or measure them and keep them.

    dtype: of inputs and weights; `can_multiply_tiles(dtype)` holds. library: makes the library's matrix of a tensor
    [out, in] and of no bias. Where no file can be read or written, each process measures for itself.
    """
    file, found = _file(dtype), kept(dtype)
    with ExitStack() as lock:
        if found is None and file is not None:
            with suppress(OSError, NotImplementedError):  # not writable, or another process measures for too long
                file.parent.mkdir(parents=True, exist_ok=True)
                lock.enter_context(FileLock(f"{file}.lock", timeout=LONGEST_WAIT))
                found = kept(dtype)  # another process may have measured meanwhile
        if found is None:
            found = _measure(dtype, library)
            if file is not None:
                _keep(file, {**_conditions(dtype), "ratios": [*found.ratios.values()]})
    return found


def kept(dtype: torch.dtype) -> Speeds | None:
    """Return the speeds that were measured before under the same conditions; None if no file has them."""
    file = _file(dtype)
    try:
        told = json.loads(file.read_text()) if file is not None else None
    except (OSError, ValueError):  # not there, not for us to read, or no JSON
        return None
    if not isinstance(told, dict):
        return None
    ratios = told.pop("ratios", None)
    if told != _conditions(dtype) or not isinstance(ratios, list) or len(ratios) != len(TOKENS):
        return None
    if not all(isinstance(ratio, float) and 0 < ratio < math.inf for ratio in ratios):
        return None
    return Speeds(dict(zip(TOKENS, ratios, strict=True)))


def _conditions(dtype: torch.dtype) -> dict[str, Any]:
    """What the speeds depend on, besides the versions in the digest of the kernels: what numba calls the processor,
    its features (as for kernels), torch's version with its library, and the limit that the library was given."""
    return {
        "processor": [*cpu_target.target_context.codegen().magic_tuple()],
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        "tokens": [*TOKENS],
    }


def _file(dtype: torch.dtype) -> Path | None:
    """The file of these conditions, in the folder of the compiled kernels; None if kernels cannot be stored."""
    folder = multiply_tiles._cache.cache_path
    if folder is None:
        return None
    conditions = hashlib.sha256(json.dumps(_conditions(dtype)).encode()).hexdigest()[:12]
    return Path(folder) / f"{digest_of(Path(__file__).parent)}.product-{conditions}.json"


def _keep(file: Path, content: Mapping[str, Any]) -> None:
    """Write the file as a whole or not at all: another process may read it meanwhile, and this one may be ended."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    with suppress(OSError):  # the next process measures again
        partial.write_text(json.dumps(content))
        os.replace(partial, file)
    with suppress(OSError):
        partial.unlink(missing_ok=True)


def _measure(dtype: torch.dtype, library: Callable[[Tensor, None], Matrix]) -> Speeds:
    # Most models are published in bfloat16; in float32 their tiles are of bfloat16, too.
    weight = torch.linspace(-1, 1, SIDE * SIDE).bfloat16().to(dtype).view(SIDE, SIDE)
    matrices = TiledMatrix(weight, None, np.empty(num_bytes(weight), np.uint8)), library(weight, None)
    ratios = {}
    with on_one_thread():
        for tokens in TOKENS:
            x, best = weight[0].expand(tokens, SIDE).contiguous(), [math.inf, math.inf]
            for _ in range(TURNS):
                for i, matrix in enumerate(matrices):
                    best[i] = min(best[i], seconds(matrix, x))
            ratios[tokens] = best[0] / best[1]
    return Speeds(ratios)


def seconds(matrix: Matrix, x: Tensor) -> float:
    """Return the time of one product: the processor's, which goes on only while the process has a core. (Elsewhere than
    on Linux it may count in steps that are too large.)"""
    clock = time.process_time if sys.platform == "linux" else time.perf_counter
    began = clock()
    matrix(x)
    return clock() - began
