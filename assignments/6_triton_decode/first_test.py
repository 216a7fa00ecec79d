"""A first test of your kernel: `TRITON_INTERPRET=1 pytest`, in this folder. More of them are yours to write."""

import torch
from triton_decode import paged_decode


def test_with_equal_scores_the_output_is_the_mean_of_the_values():
    keys = torch.zeros(2, 1, 16, 16)  # [blocks, kv_heads, block_size, head_dim]
    values = torch.arange(16.0).reshape(1, 1, 16, 1).expand(2, 1, 16, 16).contiguous()
    query, out = torch.zeros(1, 1, 16), torch.full((1, 1, 16), -1.0)  # [seqs, heads, head_dim]
    tables, lengths = torch.tensor([[1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    paged_decode(query, keys, values, tables, lengths, 1.0, out)
    assert torch.allclose(out, torch.full_like(out, 2.0))  # of 0, 1, 2, 3, 4
