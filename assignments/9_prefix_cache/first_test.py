"""A first test of your prefix cache: `pytest`, in this folder. More of them are yours to write."""

from prefix_cache import PrefixCache

from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable


def test_a_prompt_finds_the_beginning_of_another_one():
    allocator = BlockAllocator(8)
    cache = PrefixCache(2, allocator)
    table = BlockTable(2, allocator)
    table.append(4)
    cache.publish([1, 2, 3, 4], table)
    blocks, num_tokens = cache.match([1, 2, 3, 5, 6])
    assert (list(blocks), num_tokens) == (table.blocks, 3)
