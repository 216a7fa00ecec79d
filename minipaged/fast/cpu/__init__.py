"""The fast tier's kernels for a machine without a GPU: numba and torch. The same names as in `gpu/`."""

from minipaged.fast.cpu.attention import paged_decode, paged_prefill
from minipaged.fast.cpu.block_table import edit_tables, fork_tables, slot_mapping
from minipaged.fast.cpu.kv_cache import copy_blocks, poison_blocks, rope_and_write, write
from minipaged.fast.cpu.llama import add_rms_norm, kernels_are_compiled, linears, rms_norm, swiglu, use_threads

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "edit_tables",
    "fork_tables",
    "kernels_are_compiled",
    "linears",
    "paged_decode",
    "paged_prefill",
    "poison_blocks",
    "rms_norm",
    "rope_and_write",
    "slot_mapping",
    "swiglu",
    "use_threads",
    "write",
]
