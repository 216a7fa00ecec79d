"""The Triton kernels, each with the function that launches it: for CUDA tensors, or any with `TRITON_INTERPRET=1`.

`minipaged.fast.kernels` describes each of them.
"""

from minipaged.fast.gpu.attention import paged_decode, paged_prefill
from minipaged.fast.gpu.block_table import advance_decode, edit_tables, fork_tables, slot_mapping
from minipaged.fast.gpu.kv_cache import copy_blocks, poison_blocks, rope_and_write, write
from minipaged.fast.gpu.llama import add_rms_norm, computing, geglu, in_one_call, linears, rms_norm, swiglu
from minipaged.fast.gpu.sampling import allowed_only, argmax_logsumexp, draw, largest, likeliest_allowed, uniform

__all__ = [
    "add_rms_norm",
    "advance_decode",
    "allowed_only",
    "argmax_logsumexp",
    "computing",
    "copy_blocks",
    "draw",
    "edit_tables",
    "fork_tables",
    "geglu",
    "in_one_call",
    "largest",
    "likeliest_allowed",
    "linears",
    "paged_decode",
    "paged_prefill",
    "poison_blocks",
    "rms_norm",
    "rope_and_write",
    "slot_mapping",
    "swiglu",
    "uniform",
    "write",
]
