"""A first test of your block table: `pytest`, in this folder. More of them are yours to write."""

from block_table import BlockTable

from minipaged.reference.block_allocator import BlockAllocator


def test_three_tokens_take_two_blocks_of_two():
    allocator = BlockAllocator(4)
    table = BlockTable(2, allocator)
    assert table.blocks_needed(3) == 2
    table.append(3)
    assert table.num_tokens == 3
    assert len(table.blocks) == 2
    assert allocator.num_free == 2
