"""A first test of your allocator: `pytest`, in this folder. More of them are yours to write."""

from block_allocator import BlockAllocator


def test_a_block_that_is_handed_out_is_not_free():
    allocator = BlockAllocator(4)
    block = allocator.allocate()
    assert block in range(4)
    assert allocator.num_free == 3
    assert allocator.ref_count(block) == 1
