"""The fast tier's kernels for a machine without a GPU: numba and torch. The same names as in `gpu/`.

numba has threads of its own. It is told to use no more than torch does: OMP_NUM_THREADS then holds for both, and two
processes that share a machine, each with its part of the cores, do not wait for each other at every loop's end.
"""

import numba
import torch

from minipaged.fast.cpu.attention import paged_decode, paged_prefill
from minipaged.fast.cpu.block_table import edit_tables, fork_tables, slot_mapping
from minipaged.fast.cpu.kv_cache import copy_blocks, poison_blocks, rope_and_write, write
from minipaged.fast.cpu.llama import add_rms_norm, linears, rms_norm, swiglu

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "edit_tables",
    "fork_tables",
    "linears",
    "paged_decode",
    "paged_prefill",
    "poison_blocks",
    "rms_norm",
    "rope_and_write",
    "slot_mapping",
    "swiglu",
    "write",
]

numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
