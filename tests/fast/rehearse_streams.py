"""Serving on a GPU, rehearsed where there is none: `python -m tests.fast.rehearse_streams` prints what it found.

The engine serves requests of every kind by the fast tier's Llama, which takes the branches of a GPU because it is given
one, a pretended one (`pretended_gpu.py`). A process of its own, because `torch.cuda` is replaced in it.

One line of JSON for each rehearsal: what was served, and what was found. The first four are of the code as it is, with
asynchronous scheduling and graphs, on and off. The fifth serves a model with windows. The next two hand blocks over, to
the reference and from it. Then come `CASES`, which try out the pretended GPU itself. The others are of the code with
one of the mistakes of `stream_mistakes.py` in it, and end at the first thing found.
"""

# ruff: noqa: E402 (who has a GPU is decided before the rest of the wing is imported)

from __future__ import annotations

import functools
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

import minipaged.fast.device
from tests.fast.pretended_gpu import DEVICE, pretended_gpu

minipaged.fast.device.is_gpu = lambda device: device == DEVICE  # before the others of the wing ask for it by name

from minipaged.contracts import Runner
from minipaged.engine.block_manager import BlockManager
from minipaged.engine.connected_memory import ConnectedBlockManager
from minipaged.engine.engine import Engine
from minipaged.engine.floors import FlooredBlockManager
from minipaged.engine.grouped_memory import GroupedBlockManager
from minipaged.engine.memory import MakeMemory
from minipaged.fast import llama as fast_llama
from minipaged.fast.gpu import advance_decode
from minipaged.fast.kv_cache import KVCache
from minipaged.handover.disk_floor import DiskFloor
from minipaged.handover.kv_connector import Handshake
from minipaged.handover.shared_storage import Role, SharedStorageConnector
from minipaged.models.config import ModelConfig, weight_shapes
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.reference.kv_cache import KVCache as ReferenceCache
from minipaged.reference.llama import Llama as ReferenceLlama
from minipaged.scheduling import Costs
from minipaged.tiers import fast_tier, reference_tier
from tests.fast.stream_mistakes import MISTAKES
from tests.triton_interpreter import skip_idle_work

BLOCK_SIZE, NUM_BLOCKS, NUM_SWAP_BLOCKS = 4, 11, 24
MAX_NUM_SEQS, MAX_MODEL_LEN = 5, 32
MODEL = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
)
FORGETFUL = replace(MODEL, num_hidden_layers=2, layer_windows=(None, 5))
"""Two groups of layers. The second has a few blocks of each sequence."""

HANDSHAKE = Handshake(
    model="rehearsed",
    dtype="float32",
    kv_cache_dtype="auto",
    num_layers=1,
    num_kv_heads=1,
    head_dim=MODEL.head_dim,
    block_size=BLOCK_SIZE,
    block_bytes=BLOCK_SIZE * 2 * MODEL.head_dim * 4,
)

Tokens = dict[str, list[list[int]]]
"""request -> the tokens of each of its sequences."""


@dataclass
class Report:
    name: str
    races: dict[str, int] = field(default_factory=dict)
    error: str = ""
    others: list[str] = field(default_factory=list)
    """Requests that got other tokens than from the reference."""
    happened: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    """Where the host has waited for the device while it served, and how often."""

    @property
    def found(self) -> bool:
        return bool(self.races or self.error or self.others or self.waits.keys() - {"Arriving.arrays"})


# --- What is served -------------------------------------------------------------------------------


class Call(NamedTuple):
    """Made before the engine's step of that number."""

    step: int
    make: Callable[[Engine], object]


def calls() -> Iterator[Call]:
    """Requests that come, and two that are cancelled: one while it runs, one while it waits."""
    drawn = random.Random(8)
    shared = [drawn.randrange(64) for _ in range(9)]
    for number in range(10):
        prompt = [drawn.randrange(64) for _ in range(drawn.choice([1, 2, 5, 9]))]
        if number % 4 == 3:
            prompt = [*shared, *prompt]
        max_tokens = drawn.randint(3, 14)
        params: SamplingParams | BeamSearchParams = SamplingParams(
            temperature=drawn.choice([0.0, 0.0, 0.7]),
            seed=number,
            n=2 if number % 5 == 2 else 1,
            top_k=drawn.choice([0, 5]),
            repetition_penalty=1.3 if number == 5 else 1.0,
            logprobs=2 if number == 6 else None,
            prompt_logprobs=2 if number == 6 else None,
            logit_bias={5: 3.0} if number == 8 else {},
            allowed_token_ids=range(40) if number == 8 else None,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        if number == 4:
            params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
        arrival = functools.partial(Engine.add_request, prompt_token_ids=prompt, params=params, request_id=str(number))
        yield Call(number, arrival)
    for step, number in ((2, 10), (11, 11)):
        long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        yield Call(
            step, functools.partial(Engine.add_request, prompt_token_ids=shared, params=long, request_id=str(number))
        )
        yield Call(step + 12 * (number == 10), functools.partial(Engine.abort, request_id=str(number)))


class Fault(Exception):
    """What the rehearsal lets fail."""


class FailingLlama(fast_llama.Llama):
    """Fails twice, when a step is queued in part: after its blocks have moved, and before its tokens are chosen."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.fuses = {"move": 3, "sample": 18}
        """In which call of each it fails, from here on."""
        self.graphs_used: set[tuple[int, int]] = set()
        """(size, sequences in it)."""
        self.num_apart = 0
        """Steps in which some decoded, in their graph, and others did not."""

    def move(self, moves: Any) -> None:
        super().move(moves)
        if moves.swap_out or moves.swap_in:
            self._burn("move")

    def sample(self, logits: Any, inputs: Any) -> Any:
        self._burn("sample")
        return super().sample(logits, inputs)

    def _run_apart(self, tokens: Any, graph: Any) -> Any:
        self.num_apart += 1
        return super()._run_apart(tokens, graph)

    def _burn(self, part: str) -> None:
        self.fuses[part] -= 1
        if self.fuses[part] == 0:
            raise Fault(part)

    def _graph_for(self, num_seqs: int) -> fast_llama.DecodeGraph | None:
        graph = super()._graph_for(num_seqs)
        if graph:
            self.graphs_used.add((len(graph.logits), num_seqs))
        return graph


def config(model: ModelConfig = MODEL, *, asynchronous: bool) -> EngineConfig:
    return EngineConfig(
        num_blocks=NUM_BLOCKS + 7 * len(model.groups.windows[1:]),
        num_swap_blocks=NUM_SWAP_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=16,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=MODEL.vocab_size,
        group_windows=model.groups.windows,
        preemption="swap",
        enable_prefix_caching=True,
        async_scheduling=asynchronous,
    )


def serve(engine: Engine, report: Report, *, enough: Callable[[Tokens], bool] = lambda tokens: False) -> Tokens:
    """All calls, to the end or until there is `enough`. Counts in `report` what has happened."""
    tokens: Tokens = {}
    failures = 0
    left = sorted(calls(), key=lambda call: call.step)
    for step in range(500):
        while left and left[0].step <= step:
            left.pop(0).make(engine)
        try:
            for update in engine.step():
                if update.output and update.output.finished:
                    tokens[update.request_id] = [one.token_ids for one in update.output.outputs]
        except Fault:
            failures += 1
        if enough(tokens) or not (left or engine.has_unfinished_requests()):
            break
    stats = engine.stats
    report.happened = {
        "requests finished": len(tokens),
        "failures": failures,
        "blocks swapped out": stats.blocks_swapped_out,
        "blocks swapped in": stats.blocks_swapped_in,
        "blocks copied": stats.blocks_copied,
        "tokens found in the prefix cache": stats.prefix_cache_hit_tokens,
        "blocks passed": stats.blocks_passed,
        "blocks stored": stats.blocks_stored,
        "blocks loaded": stats.blocks_loaded,
    }
    return tokens


@functools.cache
def weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(shape, generator=drawn) for name, shape in weight_shapes(model).items()}


@functools.cache
def references_tokens(folder: str | None = None, model: ModelConfig = MODEL) -> Tokens:
    """Of the reference tier, one step after another."""
    return serve(references_engine(folder, model), Report("reference"))


def references_engine(folder: str | None, model: ModelConfig = MODEL) -> Engine:
    """`folder`: where it leaves its blocks, and takes others."""
    arrays = {name: tensor.numpy() for name, tensor in weights(model).items()}
    sizes = config(model, asynchronous=False)
    shape = sizes.num_blocks, BLOCK_SIZE, 1, MODEL.head_dim, NUM_SWAP_BLOCKS
    runner = ReferenceLlama(model, arrays, ReferenceCache(model.num_hidden_layers, *shape, places=model.groups.places))
    memory = connected(runner, SharedStorageConnector(folder)) if folder else memory_of(model)
    return Engine(sizes, reference_tier(), runner, memory=memory)


def memory_of(model: ModelConfig) -> MakeMemory:
    return GroupedBlockManager if model.layer_windows else BlockManager


# --- Rehearsals -----------------------------------------------------------------------------------


def connected(runner: Runner, connector: SharedStorageConnector) -> MakeMemory:
    """The memory of an engine that hands its blocks over by this connector."""
    connector.open(HANDSHAKE)
    return functools.partial(
        ConnectedBlockManager,
        connector=connector,
        read_blocks=runner.read_blocks,
        block_bytes=HANDSHAKE.block_bytes,
    )


def floored(runner: Runner, folder: str) -> MakeMemory:
    """The memory of an engine with floors on the host and on disk below its prefix cache."""
    disk = DiskFloor(folder)
    disk.open(HANDSHAKE)
    disk.seconds_per_block = 0.0
    read = runner.read_host_blocks
    return functools.partial(FlooredBlockManager, disk=disk, read_host_blocks=read, block_bytes=HANDSHAKE.block_bytes)


def rehearse_floors(name: str, *, to_the_end: bool = False) -> Report:
    """Serve on the pretended GPU, with a disk below the host."""
    with tempfile.TemporaryDirectory() as folder:
        return rehearse(name, to_the_end=to_the_end, folder=folder)


def hand_over(role: Role) -> Report:
    """The pretended GPU as the producer of blocks or as their consumer; the reference is the other one."""
    with tempfile.TemporaryDirectory() as folder:
        if role == "kv_consumer":
            references_tokens(folder)
        report = rehearse(role, to_the_end=True, connector=SharedStorageConnector(folder, role))
        if role == "kv_producer":
            engine = references_engine(folder)
            assert serve(engine, Report("reference")) == references_tokens()
            assert engine.stats.blocks_loaded
    return report


def rehearse(
    name: str,
    *,
    asynchronous: bool = True,
    graphs: bool = True,
    to_the_end: bool = False,
    connector: SharedStorageConnector | None = None,
    folder: str | None = None,
    model: ModelConfig = MODEL,
) -> Report:
    """Serve on the pretended GPU; to the first thing found, unless `to_the_end`. `folder`: of the floor on disk."""
    report = Report(name)
    with pretended_gpu() as gpu:
        try:
            on_device = {name: tensor.to(DEVICE) for name, tensor in weights(model).items()}
            sizes = config(model, asynchronous=asynchronous)
            shape = sizes.num_blocks, BLOCK_SIZE, 1, MODEL.head_dim, NUM_SWAP_BLOCKS
            places = model.groups.places
            cache = KVCache(model.num_hidden_layers, *shape, torch.float32, places=places, device=DEVICE)
            llama = FailingLlama(model, on_device, cache, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
                pass  # somebody else's
            if not graphs:
                llama._graphs = {}
            gpu.waits.clear()
            expected = references_tokens(model=model)

            def found(tokens: Tokens) -> bool:
                report.races, report.waits = dict(gpu.order.races), dict(gpu.waits)
                report.others = [request for request in tokens if tokens[request] != expected[request]]
                return report.found and not to_the_end

            memory = connected(llama, connector) if connector else memory_of(model)
            if folder:
                memory = floored(llama, folder)
                sizes = replace(sizes, kv_cache_tiers=("host", "disk"), num_swap_blocks=2, preemption="auto")
            engine = Engine(sizes, fast_tier(), llama, memory=memory)
            tokens = serve(engine, report, enough=found)
            if to_the_end:
                assert tokens.keys() == expected.keys()
            report.happened["steps in two parts"] = llama.num_apart
            report.happened["sizes of graphs"] = len({size for size, _ in llama.graphs_used})
            report.happened["sizes with padding"] = len({size for size, used in llama.graphs_used if used < size})
        except Exception as error:
            if to_the_end:
                raise
            report.error = repr(error)
    report.races = dict(gpu.order.races)
    return report


# --- What the pretended GPU has to find ---------------------------------------------------------------


def reads_what_arrives(careful: bool) -> None:
    """The host looks at pinned memory; careless, before a copy into it has arrived."""
    copy = torch.ones(4, device=DEVICE).to("cpu", non_blocking=True)
    if careful:
        torch.cuda.synchronize()
    copy.tolist()


def reads_an_old_array(careful: bool) -> None:
    """The same through an array that it got before."""
    pinned = torch.zeros(4, pin_memory=True)
    array = pinned.numpy()
    pinned.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
    if careful:
        torch.cuda.synchronize()
    assert array.sum() == 4, array


def overwrites_what_is_copied(careful: bool) -> None:
    """The host writes to pinned memory; careless, before it was copied from."""
    pinned = torch.ones(4, pin_memory=True)
    pinned.to(DEVICE, non_blocking=True)
    if careful:
        torch.cuda.synchronize()
    pinned.fill_(2)


def overwrites_it_by_an_array(careful: bool) -> None:
    pinned = torch.ones(4, pin_memory=True)
    pinned.to(DEVICE, non_blocking=True)
    if careful:
        torch.cuda.synchronize()
    pinned.numpy()[:] = 2
    torch.cuda.synchronize()


def gives_back_what_another_stream_reads(careful: bool) -> None:
    """And the caching allocator gives it to the next who asks."""
    side = torch.cuda.Stream()
    numbers = torch.ones(4, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        numbers.neg()
    if careful:
        numbers.record_stream(side)


def gives_back_what_a_graph_copies(careful: bool) -> None:
    """Pinned memory waits for the copies that were queued, but no one tells it of replays."""
    numbers, pinned = torch.zeros(4, device=DEVICE), torch.ones(4, pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.copy_(pinned, non_blocking=True)
    if not careful:
        del pinned
    graph.replay()
    torch.cuda.synchronize()


def overwrites_what_a_graph_copies(careful: bool) -> None:
    numbers, pinned = torch.zeros(4, device=DEVICE), torch.ones(4, pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.copy_(pinned, non_blocking=True)
    graph.replay()
    if careful:
        torch.cuda.synchronize()
    pinned.numpy()[:] = 2
    torch.cuda.synchronize()


def reads_what_a_kernel_writes(careful: bool) -> None:
    """Beside a kernel on another stream: what that writes (careless), or what it only reads."""
    side = torch.cuda.Stream()
    tables, rows, positions, slots, lengths = (torch.zeros(1, 1, dtype=torch.int32, device=DEVICE) for _ in range(5))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        advance_decode(tables, rows[0], positions[0], slots[0], lengths[0], BLOCK_SIZE)
    (tables if careful else slots).neg()
    torch.cuda.synchronize()


def waits_during_a_capture(careful: bool) -> None:
    numbers = torch.zeros(4, device=DEVICE)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        if not careful:
            numbers.sum().item()


def mixes_devices(careful: bool) -> None:
    torch.ones(4, device=DEVICE) + torch.ones(4, device=DEVICE if careful else "cpu")


CASES = [
    reads_what_arrives,
    reads_an_old_array,
    overwrites_what_is_copied,
    overwrites_it_by_an_array,
    gives_back_what_another_stream_reads,
    gives_back_what_a_graph_copies,
    overwrites_what_a_graph_copies,
    reads_what_a_kernel_writes,
    waits_during_a_capture,
    mixes_devices,
]


def try_out(case: Callable[[bool], None], *, careful: bool) -> Report:
    report = Report(f"{case.__name__}, {careful=}")
    with pretended_gpu() as gpu:
        try:
            case(careful)
        except Exception as error:
            report.error = repr(error)
    report.races = dict(gpu.order.races)
    return report


def main() -> None:
    skip_idle_work()
    costs = Costs(1e-5, 1, 1 << 12, 1e10, 1e5)
    fast_llama.measure = lambda *_: costs  # which waits for the device, and would hide who else forgets to
    for asynchronous in (True, False):
        for graphs in (True, False):
            name = f"{asynchronous=}, {graphs=}"
            tell(rehearse(name, asynchronous=asynchronous, graphs=graphs, to_the_end=True))
    tell(rehearse("windows", to_the_end=True, model=FORGETFUL))
    roles: tuple[Role, ...] = ("kv_producer", "kv_consumer")
    for role in roles:
        tell(hand_over(role))
    tell(rehearse_floors("floors", to_the_end=True))
    for case in CASES:
        for careful in (True, False):
            tell(try_out(case, careful=careful))
    for mistake in MISTAKES:
        with mistake.planted():
            of_floors = mistake.function == "KVCache.read_host"
            tell(rehearse_floors(mistake.name) if of_floors else rehearse(mistake.name))


def tell(report: Report) -> None:
    print(json.dumps(asdict(report) | {"found": report.found}), flush=True)


if __name__ == "__main__":
    main()
