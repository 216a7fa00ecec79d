"""No kernel loses an offset of more than 32 bits: a cache of 2^33 elements, rows that lie 2^30 elements apart.

In Triton's interpreter, on memory that exists only where it is touched. Each kernel gets the same numbers twice, at low
addresses and at high ones, and has to do the same with them. That this would show a 32-bit offset is tried, too: with
each widening to 64 bits taken out of the kernels' source, at high addresses, until the first result that differs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import mmap
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no Triton for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("a GPU's memory exists whether it is touched or not", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction, InterpreterError

import minipaged.fast
from minipaged.fast.kernels import Paged, Shared
from minipaged.models.quantized.stored import Activations
from tests.effort import thorough
from tests.fast.test_gpu_packed import grouped
from tests.triton_interpreter import watched

FOLDER = Path(minipaged.fast.__file__).parent / "gpu"
APART = 2**30
"""Elements from one row to the next: the third begins where 32 bits end."""
NO_RESERVE = 0x4000
"""MAP_NORESERVE, which Python has no name for before 3.13: the system need not have as much memory."""

Results = Generator[Tensor, None, None]
"""One after the other, each computed when it is asked for. None is changed afterwards."""


def untouched(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take up memory only where they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def far_apart(rows: Tensor) -> Tensor:
    """The same rows, `APART` from each other."""
    rows_apart = untouched(len(rows) * APART, rows.dtype).view(len(rows), APART)[:, : rows[0].numel()]
    rows_apart.copy_(rows.flatten(1))
    return rows_apart.unflatten(1, rows.shape[1:])


def numbers(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def integers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@contextmanager
def within_their_tensors() -> Iterator[None]:
    """Kernels that reach beyond them are stopped, before the process is."""
    run = InterpretedFunction.run

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        with watched(args):
            run(kernel, *args, **kwargs)

    with patch.object(InterpretedFunction, "run", launch):
        yield


# --- Each kernel, at low addresses and at high ones -----------------------------------------------------

LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, HEADS = 2, 2, 16, 64, 4
BLOCK = LAYERS * 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM  # elements
NUM_BLOCKS = 2**33 // BLOCK
LOW, HIGH = [3, 5, 7], [NUM_BLOCKS - 1, 2**31 // BLOCK, 2**32 // BLOCK + 1]


def big_cache(*, shifted: int = 0) -> Tensor:
    """[blocks, layers, 2, kv_heads, block_size, head_dim] float16. `shifted`: elements by which it begins late."""
    memory = untouched(2**33 + shifted, torch.float16)
    return memory[shifted:].view(NUM_BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)


def filled_cache(blocks: Sequence[int]) -> Tensor:
    cache = big_cache()
    cache[blocks] = numbers(len(blocks), *cache.shape[1:])
    return cache


def placed(high: bool) -> tuple[Sequence[int], Callable[[Tensor], Tensor]]:
    """The blocks, and what is done to rows."""
    return (HIGH, far_apart) if high else (LOW, lambda rows: rows)


def attention(module: ModuleType, high: bool) -> Results:
    """Decode, in one part and in splits that are added up; prefill. Results, too, lie where the others do."""
    _, spread = placed(high)
    with patch.object(torch, "empty_like", lambda query, **_: spread(torch.zeros(query.shape, dtype=query.dtype))):
        yield from attended(module, high)
        yield from attended_by_many_heads(module, high)
        yield split_decode(module, high)
        yield from shared_decode(module, high)
        yield from attended_in_8_bits(module, high)
        yield from attended_with_a_window(module, high)


def attended(module: ModuleType, high: bool) -> Results:
    blocks, spread = placed(high)
    cache = filled_cache(blocks)
    keys, values = cache[:, 1, 0], cache[:, 1, 1]
    tables, rows, lengths = spread(integers([-1] * 3, [-1] * 3, blocks)), integers(2, 2, 2), integers(1, 20, 41)
    query = spread(numbers(3, HEADS, HEAD_DIM))
    yield module.paged_decode(query, Paged(keys, values, tables, rows, lengths), 0.1)
    one = Paged(keys, values, tables, rows[:1], lengths[2:])
    yield module.paged_prefill(query, one, integers(0, 3), 0.1, max_query_len=3)


def attended_with_a_window(module: ModuleType, high: bool) -> Results:
    """And soft caps and sinks: with tokens of the last two blocks alone; the entry of the first is left over."""
    blocks, spread = placed(high)
    cache = filled_cache(blocks)
    keys, values = cache[:, 1, 0], cache[:, 1, 1]
    tables, rows, lengths = spread(integers([-1] * 3, [-1] * 3, [-1, *blocks[1:]])), integers(2), integers(41)
    query = spread(numbers(3, HEADS, HEAD_DIM))
    variants = {"window": 20, "soft_cap": 1.0, "sinks": numbers(HEADS, dtype=torch.float32)}
    paged = Paged(keys, values, tables, rows, lengths, **variants)
    yield module.paged_decode(query[2:], paged, 0.1)
    yield module.paged_prefill(query, paged, integers(0, 3), 0.1, max_query_len=3)


def attended_in_8_bits(module: ModuleType, high: bool) -> Results:
    """Scales lie before the codes of their block, which are 2 bytes further apart than they need be for each."""
    blocks, spread = placed(high)
    memory = big_cache().view(NUM_BLOCKS, -1).view(torch.uint8)  # [blocks, bytes]
    slots = (NUM_BLOCKS, 2, KV_HEADS, BLOCK_SIZE)
    scale_bytes = 4 * math.prod(slots[1:])
    scales = memory[:, :scale_bytes].view(torch.float32).view(slots)
    codes = memory[:, scale_bytes : scale_bytes + scale_bytes // 4 * HEAD_DIM].view(torch.int8).view(*slots, HEAD_DIM)
    scales[blocks] = numbers(len(blocks), *slots[1:], dtype=torch.float32).abs() / 50
    codes[blocks] = (20 * numbers(len(blocks), *codes.shape[1:], dtype=torch.float32)).to(torch.int8)
    keys, values = codes.unbind(1)
    tables, rows, lengths = spread(integers([-1] * 3, [-1] * 3, blocks)), integers(2, 2, 2), integers(1, 20, 41)
    query = spread(numbers(3, HEADS, HEAD_DIM))
    yield module.paged_decode(query, Paged(keys, values, tables, rows, lengths, scales), 0.1)
    one = Paged(keys, values, tables, rows[:1], lengths[2:], scales)
    yield module.paged_prefill(query, one, integers(0, 3), 0.1, max_query_len=3)


def attended_by_many_heads(module: ModuleType, high: bool) -> Results:
    """With keys and values in another order: a whole key/value head, then the next."""
    _, spread = placed(high)
    keys, values = (spread(numbers(3, 2, BLOCK_SIZE, 16) * i).transpose(0, 1) for i in (1, 2))
    query, tables, rows, lengths = numbers(1, 3, 16), integers([1, 0]), integers(0), integers(20)
    paged = Paged(keys, values, tables, rows, lengths)
    yield module.paged_decode(query, paged, 0.1)
    yield module.paged_prefill(query, paged, integers(0, 1), 0.1, max_query_len=1)


def shared_decode(module: ModuleType, high: bool) -> Results:
    """Three sequences that begin with the same 64 tokens, which are read once for all of them."""
    blocks, spread = placed(high)
    cache = filled_cache(blocks)
    keys, values = cache[:, 1, 0], cache[:, 1, 1]
    tables, rows, lengths = (
        spread(integers([-1] * 6, [-1] * 6, [*blocks, *blocks])),
        integers(2, 2, 2),
        integers(66, 70, 90),
    )
    shared = Shared(integers(0, 1, 2), integers(0, 3), integers(64))
    query = spread(numbers(3, HEADS, HEAD_DIM))
    yield module.paged_decode(query, Paged(keys, values, tables, rows, lengths, shared=shared), 0.1)
    keys, values = (spread(numbers(3, 2, BLOCK_SIZE, 16) * i).transpose(0, 1) for i in (1, 2))
    tables, rows, lengths = integers([1, 0] * 3, [1, 0] * 3), integers(0, 1), integers(66, 70)
    shared = Shared(integers(0, 1), integers(0, 2), integers(64))
    yield module.paged_decode(numbers(2, 3, 16), Paged(keys, values, tables, rows, lengths, shared=shared), 0.1)
    with patch.object(module, "_max_splits_of_both", lambda room, *_: (room, 2)):
        yield split_decode(module, high, Shared(integers(0, 1, 2), integers(0, 3), integers(64)))


def split_decode(module: ModuleType, high: bool, shared: Shared | None = None) -> Tensor:
    """With one sequence in three splits, and (`high`) room for so many that partial results are far apart."""
    cache = numbers(17, 2, 1, BLOCK_SIZE, 16)
    query, tables = numbers(3, 1, 16), torch.arange(17, dtype=torch.int32).expand(3, 17).contiguous()
    kernel, room = module._decode_kernel, 2**26 if high else 4

    class FewPrograms:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return kernel[(*grid[:2], 4)]  # the others would find nothing to do

    new_empty = Tensor.new_empty

    def untouched_partials(query: Tensor, *shape: int, **options: Any) -> Tensor:
        if options != {"dtype": torch.float32}:  # the interpreter's own
            return new_empty(query, *shape, **options)
        return untouched(math.prod(shape), torch.float32).view(shape)

    with (
        patch.object(module, "_decode_kernel", FewPrograms()),
        patch.object(module, "_max_splits", lambda *_: room),
        patch.object(Tensor, "new_empty", untouched_partials),
    ):
        lengths = integers(1, 1, 260) if shared is None else integers(65, 65, 260)
        paged = Paged(cache[:, 0], cache[:, 1], tables, integers(0, 1, 2), lengths, shared=shared)
        decoded: Tensor = module.paged_decode(query, paged, 0.1)
    return decoded


def block_table(module: ModuleType, high: bool) -> Results:
    """Edits, forks, slots, and one position further."""
    _, spread = placed(high)
    tables = spread(torch.zeros(4, 5, dtype=torch.int32))
    module.edit_tables(tables, integers([2, 0, 11], [2, 1, 12], [3, 4, 13]))
    module.fork_tables(tables, integers([2, 3, 2], [3, 0, 5]))
    rows, positions = integers(2, 3), integers(5, 2)
    slots = module.slot_mapping(tables, rows, positions, 4)
    lengths, further = torch.zeros_like(rows), torch.zeros_like(rows)
    module.advance_decode(tables, rows, positions, further, lengths, 4)
    yield from (tables, slots, positions, further, lengths)


def kv_cache(module: ModuleType, high: bool) -> Results:
    """Rotation and writing, writing alone, copies of blocks."""
    blocks, spread = placed(high)
    cache = big_cache(shifted=1)  # so that a block is copied in words of 2 bytes
    slots = integers(*[block * BLOCK_SIZE + 3 for block in blocks])
    angle = APART if high else 1  # of all positions: cos and sin have HEAD_DIM // 2 elements for each
    turns = untouched((angle // (HEAD_DIM // 2) * 3 + 1) * HEAD_DIM // 2, torch.float32).view(-1, HEAD_DIM // 2)
    last = len(turns) - 1
    turns[last] = numbers(HEAD_DIM // 2, dtype=torch.float32)
    qkv = spread(numbers(3, (HEADS + 2 * KV_HEADS) * HEAD_DIM))
    positions = integers(last, last, last)
    query = module.rope_and_write(qkv, turns, turns, positions, slots, cache[:, 1, 0], cache[:, 1, 1], HEADS)
    key = spread(numbers(3, KV_HEADS, HEAD_DIM))
    module.write(slots, key, key, cache[:, 0, 0], cache[:, 0, 1])
    others = [block - 1 for block in blocks]
    module.copy_blocks(cache, integers(*zip(blocks, others, strict=True)))
    yield from (query, cache[blocks].clone(), cache[others].clone())
    module.poison_blocks(cache, integers(*blocks))
    yield from (cache[blocks].isnan(), cache[others].isnan())


def llama(module: ModuleType, high: bool) -> Results:
    _, spread = placed(high)
    x, residual, weight = spread(numbers(3, 20)), spread(numbers(3, 20) + 1), numbers(20)
    yield module.rms_norm(x, weight, 1e-5)
    yield module.add_rms_norm(x, residual, weight, 1e-5)
    yield residual
    yield module.swiglu(x)
    yield module.geglu(x)


def packed(module: ModuleType, high: bool) -> Results:
    """Products, in one part and in splits that are added up; rows looked up; inputs that are quantized, too."""
    _, spread = placed(high)
    matrix = grouped((OUTPUTS, 128), 4, 32, zeros="each", minima=True)
    codes = grouped((OUTPUTS, 128), 8, 32, activations=Activations("int8", group_size=32))
    x, bias = spread(numbers(3, 128, dtype=torch.float32)), numbers(OUTPUTS, dtype=torch.float32)
    multiply = laid_apart(module.packed(matrix, bias, torch.float32, x.device), high)
    with few_programs(module), patch.object(Tensor, "new_empty", thrifty(Tensor.new_empty)):
        yield multiply(x)[:, :OUTPUTS]
        with patch.object(module, "_steps_a_split", lambda *_: 1), patch.object(torch, "empty", thrifty(torch.empty)):
            yield multiply(x)[:, :OUTPUTS]
    if high:
        multiply.shape = (APART, APART)
    with patch.object(torch, "empty", thrifty(torch.empty)):
        yield multiply.rows(integers(5, 0, OUTPUTS - 1))[:, :128]
    yield from module.quantized(x, Activations("int8", symmetric=False))
    yield scaled_by_groups(module, module.packed(codes, None, torch.float32, x.device), high)


OUTPUTS = 256
"""A whole number of any kernel's tiles: no program reaches beyond them."""


def laid_apart(matrix: Any, high: bool) -> Any:
    """`high`: as one of `APART` outputs has it in memory, with the first few there."""
    if high:
        blocks, _, width = matrix._codes.shape
        codes = untouched(blocks * APART * width, matrix._codes.dtype).view(blocks, APART, width)
        codes[:, :OUTPUTS] = matrix._codes
        matrix.shape, matrix._codes = (APART, matrix.shape[1]), codes
        for name in ("_scales", "_zeros", "_minima"):
            setattr(matrix, name, far_apart(getattr(matrix, name)))
    return matrix


@contextmanager
def few_programs(module: ModuleType) -> Iterator[None]:
    """Those of the first `OUTPUTS` outputs alone."""

    class Few:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                tile = options.get("TILE_OUT") or options["TILE"]
                self.kernel[(OUTPUTS // tile, *grid[1:])](*args, **options)

            return launch

    with (
        patch.object(module, "_multiply", Few(module._multiply)),
        patch.object(module, "_sum", Few(module._sum)),
    ):
        yield


def thrifty(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.empty` or `Tensor.new_empty`, of memory that exists only where it is touched if there is much of it."""

    def made(*given: Any, **options: Any) -> Tensor:
        like, shape = (given[0], given[1:]) if isinstance(given[0], Tensor) else (None, given)
        if not all(isinstance(size, int) for size in shape) or math.prod(shape) < APART:
            return make(*given, **options)
        dtype = like.dtype if like is not None else options["dtype"]
        return untouched(math.prod(shape), dtype).view(shape)

    return made


def scaled_by_groups(module: ModuleType, matrix: Any, high: bool) -> Tensor:
    """34 tokens; `high`: with scales for the groups of nearly 2^31 inputs each."""
    of_codes = module.quantized(numbers(34, 128, dtype=torch.float32), matrix._activations)
    codes, scales, _ = of_codes
    if high:
        inputs = 2**31 - 64
        groups = inputs // 32
        memory = untouched(2**31 + 34 * groups, scales.dtype)[2**31 :]  # before them, for an offset that is negative
        of_codes = codes, memory.view(34, groups)[:, : scales.shape[1]].copy_(scales), None
        matrix.shape = (OUTPUTS, inputs)
    with patch.object(module, "quantized", lambda *_: of_codes):
        found: Tensor = matrix(torch.empty(34, 128))
    return found


def sampling(module: ModuleType, high: bool) -> Results:
    _, spread = placed(high)
    logits = spread(numbers(3, 100))
    token_ids, peaks, log_totals = module.argmax_logsumexp(logits)
    ones, zeros = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    rows = torch.arange(3)
    drawn = module.draw(logits, rows, peaks, ones, -torch.inf * ones, zeros, 0 * ones, rows, 0.6 * ones, depth=0)
    yield from (token_ids, peaks, log_totals, drawn)
    bits = spread(integers([0, 0, 0, 0], [-1, 0, 5, 0], [1 << 9, 0, 0, 1]))  # a row of each input
    yield from module.likeliest_allowed(logits, rows, bits)
    peaks = module.likeliest_allowed(logits, rows, bits)[1]
    given = (logits, rows, peaks, ones, -torch.inf * ones, zeros, 0 * ones, rows, 0.6 * ones)
    yield module.draw(*given, depth=0, allowed=bits)
    table = spread(numbers(3, 100, dtype=torch.float64))
    module.allowed_only(table, bits)
    yield table


SETS = [attention, block_table, kv_cache, llama, packed, sampling]


def module_of(kernels: Callable[..., Results]) -> ModuleType:
    return importlib.import_module(f"minipaged.fast.gpu.{kernels.__name__}")


@pytest.fixture(scope="module")
def low() -> Callable[[Callable[..., Results]], list[Tensor]]:
    """What a set of kernels comes to at low addresses."""

    @functools.cache
    def computed(kernels: Callable[..., Results]) -> list[Tensor]:
        with within_their_tensors():
            return list(kernels(module_of(kernels), high=False))

    return computed


def same(low: list[Tensor], high: Results) -> bool:
    """`high` is computed up to the first difference."""
    return all(torch.equal(a, b) for a, b in zip(low, high, strict=True))


@pytest.mark.parametrize("kernels", SETS)
def test_what_lies_far_apart_is_found_like_what_lies_together(
    kernels: Callable[..., Results], low: Callable[[Callable[..., Results]], list[Tensor]]
) -> None:
    together = low(kernels)
    with within_their_tensors(), closing(kernels(module_of(kernels), high=True)) as apart:
        assert same(together, apart)


# --- Offsets of 32 bits, to see them found ----------------------------------------------------------------

WIDENING = ".to(tl.int64)"
IN_VAIN = {
    "_row_peaks: row = tl.program_id(0).to(tl.int64)",
    "_row_allowed: i = tl.program_id(0).to(tl.int64)",
    "_draw: number = tl.program_id(0).to(tl.int64)",
    "_draw: tl.store(token_ids + number, (chosen * TILE + within).to(tl.int64))",
}
"""Those that no machine has the memory for: they count tiles of logits, draws, or tokens of a vocabulary."""


class Narrow(NamedTuple):
    """One place where a kernel's source widens a number, left out."""

    file: str
    place: int
    """In the text."""
    line: str
    """With its kernel."""

    def module(self, folder: Path) -> ModuleType:
        """The file without it, as a module."""
        text = (FOLDER / self.file).read_text()
        changed = folder / self.file
        changed.write_text(text[: self.place] + text[self.place + len(WIDENING) :])
        spec = importlib.util.spec_from_file_location(f"narrow_{changed.stem}", changed)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def widenings() -> list[Narrow]:
    """All that can be missed."""
    found = []
    for kernels in SETS:
        text = (FOLDER / f"{kernels.__name__}.py").read_text()
        for match in re.finditer(re.escape(WIDENING), text):
            line = text[text.rindex("\n", 0, match.start()) + 1 : text.index("\n", match.end())].strip()
            kernel = re.findall(r"^def (\w+)", text[: match.start()], re.MULTILINE)[-1]
            found.append(Narrow(f"{kernels.__name__}.py", match.start(), f"{kernel}: {line}"))
    assert {narrow.line for narrow in found} >= IN_VAIN
    return [narrow for narrow in found if narrow.line not in IN_VAIN]


@thorough
@pytest.mark.parametrize("narrow", widenings(), ids=lambda narrow: narrow.line)
def test_an_offset_of_32_bits_is_found(
    narrow: Narrow, low: Callable[[Callable[..., Results]], list[Tensor]], tmp_path: Path
) -> None:
    kernels = next(one for one in SETS if f"{one.__name__}.py" == narrow.file)
    together, module = low(kernels), narrow.module(tmp_path)
    with within_their_tensors(), closing(kernels(module, high=False)) as narrowed:
        assert same(together, narrowed)  # there 32 bits suffice
    with within_their_tensors(), closing(kernels(module, high=True)) as apart:
        try:
            found = not same(together, apart)
        except InterpreterError:  # of an overflow, or of memory that is not the kernel's
            found = True
    assert found
