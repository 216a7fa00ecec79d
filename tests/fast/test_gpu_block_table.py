"""Tables on the device stay what the reference's block tables are, and slots come out the same."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from minipaged.fast import cpu, gpu
from minipaged.fast.gpu import advance_decode, edit_tables, fork_tables, slot_mapping
from minipaged.fast.gpu.block_table import LANES, PIECE
from minipaged.fast.kernels import BlockTableKernels
from minipaged.reference.block_allocator import BlockAllocator
from minipaged.reference.block_table import BlockTable
from tests.effort import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE = -(2**31)
BLOCK_SIZES = st.sampled_from([1, 2, 3, 16, 256])


def ints(values: list[int], device: str = DEVICE) -> torch.Tensor:
    """[n], with a 0 past its end: a row or a position that could be used, and is not to be."""
    return torch.tensor([*values, 0], dtype=torch.int32, device=device)[:-1]


def triples(values: list[tuple[int, int, int]]) -> torch.Tensor:
    """[n, 3], with one more past its end: as an edit, it would show in the first entry."""
    return torch.tensor([*values, (0, 0, 2**31 - 1)], dtype=torch.int32, device=DEVICE)[:-1]


def garbage(num_rows: int, max_blocks: int, device: str = DEVICE) -> torch.Tensor:
    """Tables of which nothing was written, in rows that do not follow one another closely."""
    return torch.full((num_rows, max_blocks + 3), GARBAGE, dtype=torch.int32, device=device)[:, :max_blocks]


@settings(max_examples=examples(30))
@given(block_size=BLOCK_SIZES, data=st.data())
def test_edits_and_forks_keep_the_device_tables_as_the_reference_tables(block_size: int, data: st.DataObject) -> None:
    """Sequences grow, fork, copy on write and exchange blocks; each step's changes go to the device in two calls."""
    num_rows, max_blocks = 6, 7
    allocator = BlockAllocator(num_rows * max_blocks + num_rows)
    tables = garbage(num_rows, max_blocks)
    on_host = tables.tolist()
    sequences = [BlockTable(block_size, allocator) for _ in range(2)]
    for _ in range(data.draw(st.integers(1, 4))):
        forks, edits = [], []
        if data.draw(st.booleans()):
            for parent in range(data.draw(st.integers(0, min(len(sequences), num_rows - len(sequences))))):
                forks.append((parent, len(sequences), len(sequences[parent].blocks)))
                sequences.append(sequences[parent].fork())
        fork_tables(tables, triples(forks))
        for parent, child, length in forks:
            on_host[child][:length] = on_host[parent][:length]
        assert tables.tolist() == on_host  # the rest of the child's row included
        for row, sequence in enumerate(sequences):
            before = list(sequence.blocks)
            room = max_blocks * block_size - sequence.num_tokens
            sequence.append(data.draw(st.integers(0, min(room, 2 * block_size))))
            now = sequence.blocks
            changed = [i for i in range(len(now)) if i >= len(before) or now[i] != before[i]]
            edits += [(row, logical, now[logical]) for logical in changed]
        edit_tables(tables, triples(edits))
        for row, logical, physical in edits:
            on_host[row][logical] = physical
        assert tables.tolist() == on_host
        for row, sequence in enumerate(sequences):
            assert on_host[row][: len(sequence.blocks)] == list(sequence.blocks)


def test_more_edits_than_one_program_makes_all_arrive():
    num_rows, max_blocks = 3, 100
    tables = garbage(num_rows, max_blocks)
    edits = [(row, logical, row * 1000 + logical) for row in range(num_rows) for logical in range(max_blocks)]
    assert len(edits) > 2 * LANES
    edit_tables(tables, triples(edits))
    assert tables.tolist() == [[row * 1000 + logical for logical in range(max_blocks)] for row in range(num_rows)]


@pytest.mark.parametrize("length", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5])
def test_a_fork_longer_than_one_program_copies_is_whole_and_stops_where_it_should(length: int) -> None:
    max_blocks = 2 * PIECE + 5
    tables = torch.arange(3 * max_blocks, dtype=torch.int32, device=DEVICE).reshape(3, max_blocks)
    expected = tables.clone()
    expected[0, :length] = tables[2, :length]
    expected[1, :1] = tables[2, :1]
    fork_tables(tables, triples([(2, 0, length), (2, 1, 1)]))
    assert torch.equal(tables, expected)


@settings(max_examples=examples(40))
@given(block_size=BLOCK_SIZES, lengths=st.lists(st.integers(0, 600), min_size=1, max_size=4), data=st.data())
def test_slot_mapping_gives_the_slots_that_the_reference_tables_give(
    block_size: int, lengths: list[int], data: st.DataObject
) -> None:
    allocator = BlockAllocator(sum(-(-length // block_size) for length in lengths) + 1)
    tables = garbage(len(lengths), 600)
    rows, positions, expected = [], [], []
    for row, length in enumerate(lengths):
        table = BlockTable(block_size, allocator)
        table.append(length)
        tables[row, : len(table.blocks)] = ints(list(table.blocks))
        first = data.draw(st.integers(max(0, length - 200), length))
        rows += [row] * (length - first)
        positions += range(first, length)
        expected += table.slot_mapping(first, length)
    slots = slot_mapping(tables, ints(rows), ints(positions), block_size)
    assert slots.tolist() == expected
    assert slots.dtype == torch.int32


def test_no_tokens_no_edits_and_no_forks_are_no_work():
    tables = garbage(2, 3)
    before = tables.clone()
    none = ints([])
    edit_tables(tables, triples([]))
    fork_tables(tables, triples([]))
    assert slot_mapping(tables, none, none, 16).tolist() == []
    advance_decode(tables, none, none.clone(), none.clone(), none.clone(), 16)
    assert torch.equal(tables, before)


@pytest.mark.parametrize(
    ("kernels", "device"), [pytest.param(gpu, DEVICE, id="gpu"), pytest.param(cpu, "cpu", id="cpu")]
)
@settings(max_examples=examples(30))
@given(
    block_size=BLOCK_SIZES,
    lengths=st.lists(st.none() | st.integers(0, 300), min_size=1, max_size=5),
    steps=st.integers(1, 5),
)
def test_decoding_advances_on_the_device_as_the_reference_does_on_the_host(
    kernels: BlockTableKernels, device: str, block_size: int, lengths: list[int | None], steps: int
) -> None:
    """`None` is padding. Each sequence has run `length` tokens, perhaps none; every step adds one."""
    max_blocks = 310
    allocator = BlockAllocator(len(lengths) * max_blocks)
    tables = garbage(len(lengths), max_blocks, device)
    sequences: list[BlockTable | None] = []
    for length in lengths:
        sequence = None if length is None else BlockTable(block_size, allocator)
        sequences.append(sequence)
        if sequence is not None:
            sequence.append(length)
    rows = ints([-77 if length is None else row for row, length in enumerate(lengths)], device)
    positions = ints([-2 if length is None else length - 1 for length in lengths], device)
    slots, context_lens = torch.full_like(positions, GARBAGE), torch.full_like(positions, GARBAGE)
    for _ in range(steps):
        expected: list[tuple[int, int, int]] = []
        for row, sequence in enumerate(sequences):
            if sequence is None:
                expected.append((-2, -1, 0))
                continue
            sequence.append(1)
            tables[row, : len(sequence.blocks)] = ints(list(sequence.blocks), device)
            n = sequence.num_tokens
            expected.append((n - 1, *sequence.slot_mapping(n - 1, n), n))

        kernels.advance_decode(tables, rows, positions, slots, context_lens, block_size)

        assert list(zip(positions.tolist(), slots.tolist(), context_lens.tolist(), strict=True)) == expected


def test_a_decoding_batch_wider_than_one_program_advances_whole():
    n = LANES + 3
    tables = torch.arange(n, dtype=torch.int32, device=DEVICE)[:, None].contiguous()  # row r: block r
    memory = torch.full((3, n + 1), 4, dtype=torch.int32, device=DEVICE)  # one number past the batch: not to change
    positions, slots, context_lens = memory[:, :n]
    advance_decode(tables, ints(list(range(n))), positions, slots, context_lens, 8)
    assert positions.tolist() == [5] * n
    assert slots.tolist() == [8 * row + 5 for row in range(n)]
    assert context_lens.tolist() == [6] * n
    assert memory[:, n].tolist() == [4, 4, 4]
