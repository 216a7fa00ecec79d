"""The kernels for a machine without a GPU, in numba and torch. `minipaged.fast.kernels` describes each of them."""

from minipaged.fast.cpu.attention import paged_decode
from minipaged.fast.cpu.block_table import advance_decode, edit_tables, fork_tables, slot_mapping
from minipaged.fast.cpu.kv_cache import copy_blocks, poison_blocks, rope_and_write, write
from minipaged.fast.cpu.llama import add_rms_norm, geglu, linears, rms_norm, swiglu
from minipaged.fast.cpu.one_call import in_one_call
from minipaged.fast.cpu.prefill import paged_prefill
from minipaged.fast.cpu.sampling import allowed_only, argmax_logsumexp, draw, largest, likeliest_allowed, uniform
from minipaged.fast.cpu.threads import computing

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
