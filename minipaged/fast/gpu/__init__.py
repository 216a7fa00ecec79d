"""The Triton kernels, each with the function that launches it: for CUDA tensors, or any with `TRITON_INTERPRET=1`."""

from minipaged.fast.gpu.attention import paged_decode, paged_prefill
from minipaged.fast.gpu.block_table import edit_tables, fork_tables, slot_mapping
from minipaged.fast.gpu.kv_cache import copy_blocks, poison_blocks, rope_and_write, write
from minipaged.fast.gpu.llama import Linear, add_rms_norm, rms_norm, swiglu

__all__ = [
    "Linear",
    "add_rms_norm",
    "copy_blocks",
    "edit_tables",
    "fork_tables",
    "paged_decode",
    "paged_prefill",
    "poison_blocks",
    "rms_norm",
    "rope_and_write",
    "slot_mapping",
    "swiglu",
    "write",
]
