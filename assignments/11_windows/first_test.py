"""A first test of your windows: `pytest`, in this folder. More of them are yours to write."""

from windows import Windows

from minipaged.reference.block_allocator import BlockAllocator


def test_what_the_window_has_passed_is_given_back():
    allocator = BlockAllocator(8)
    windows = Windows(2, [None, 4], allocator)
    tables = [[allocator.allocate() for _ in range(4)] for _ in range(2)]
    assert windows.give_back(tables, 8) == [[0, 1, 2, 3], [None, None, 6, 7]]
    assert allocator.num_free == 2
