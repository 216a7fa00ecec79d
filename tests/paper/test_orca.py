"""The paper's baselines through the real engine: contiguous chunks serve the same tokens, by the same invariants."""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from minipaged.contracts import StepResult
from minipaged.engine.engine import Engine
from minipaged.errors import InvalidRequest
from minipaged.events import Event, RequestAdmitted, RequestFinished, SequenceForked, StepFinished
from minipaged.paper import buddy, chunk, faster_transformer, orca, orca_memory
from minipaged.paper.buddy import LARGEST_TOKENS, power_of_two
from minipaged.paper.faster_transformer import FasterTransformer
from minipaged.paper.orca import ESTIMATES, Orca
from minipaged.paper.serving import ServingSetup, systems
from minipaged.params import BeamSearchParams, EngineConfig, SamplingParams
from minipaged.simulation.simulated import OPT_13B_ON_AN_A100, SimulatedRunner
from minipaged.steps import StepInput
from minipaged.testing.content_runner import ContentRunner, GivenRow
from minipaged.testing.workloads import Workload, WorkloadRequest, WorkloadRun, random_workload
from tests.effort import examples, scaled
from tests.workloads import REFERENCE

EOS = 2
SYSTEMS: dict[str, tuple[Callable[[], Orca], int | None]] = {
    "Orca (Oracle)": (lambda: Orca("Orca (Oracle)"), None),
    "Orca (Pow2)": (lambda: Orca("Orca (Pow2)"), None),
    "Orca (Max)": (lambda: Orca("Orca (Max)"), LARGEST_TOKENS),
    "FasterTransformer": (FasterTransformer, LARGEST_TOKENS),
}
"""The systems, and how many tokens each chunk is for; None where that depends on the request."""


def crowded(seed: int, longest: int | None) -> Workload:
    """One of the engine's random workloads, without what contiguous memory does not know: caching, limits of a batch,
    blocks of any size. Samples, beams and cancelling stay. The pool has room for the largest request, of `longest`
    tokens if there is one size for all, or for two of them.
    """
    workload, r = random_workload(seed), random.Random(seed)
    block_size = r.choice([1, 2, 4, 8, 16] if longest is None else [16, 32])

    def tokens(request: WorkloadRequest) -> int:
        return longest or len(request.prompt) + (request.params.max_tokens or 16)

    need = max(
        sequences_of(request.params) * power_of_two(-(-tokens(request) // block_size)) for request in workload.requests
    )
    config = replace(
        workload.config,
        num_blocks=round(need * r.choice([1, 1, 1.4, 2])),
        num_swap_blocks=0,
        preemption="auto",
        block_size=block_size,
        max_model_len=64,
        enable_prefix_caching=False,
        max_num_seqs=1 << 20,
        max_num_batched_tokens=1 << 20,
        debug=True,
    )
    return replace(workload, config=config)


def sequences_of(params: SamplingParams | BeamSearchParams) -> int:
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n


def run_on(name: str, seed: int, listen: Callable[[Event], None]) -> WorkloadRun:
    system, longest = SYSTEMS[name]
    baseline = system()
    return WorkloadRun(crowded(seed, longest), memory=baseline.memory, policy=baseline.policy, listeners=[listen])


@scaled
@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_read_is_what_was_written_and_no_block_is_lost(name: str) -> None:
    """Content, exclusive-write, conservation, exact-references (`debug`, after every step), liveness; the tokens are
    those that each request gets alone. Nobody is ever preempted."""
    happened: Counter[str] = Counter()
    for seed in range(examples(120, least=40)):
        run = run_on(name, seed, lambda event: happened.update([type(event).__name__]))
        try:
            run.to_the_end()
            run.check_outputs()
            run.check_nothing_leaked()
        except Exception as error:
            error.add_note(f"in workload {seed}")
            raise
        happened.update(run.happened)
        of_beams = (one.params for one in run.workload.requests if isinstance(one.params, BeamSearchParams))
        happened["beams"] += any(params.beam_width > 1 for params in of_beams)
    assert happened[SequenceForked.__name__] > 20, "no n > 1 among the workloads"
    assert happened["beams"] > 5
    assert happened["block copied"] > 20, "a fork copies"
    assert happened["cancelled while running"] > 0
    assert not [what for what in happened if what.startswith("preempted")]


class Batches:
    """A listener: who came in while somebody ran who had come in an earlier step."""

    def __init__(self) -> None:
        self.came: set[str] = set()
        self.running: set[str] = set()
        self.joined: list[str] = []
        self.sizes: list[int] = []

    def __call__(self, event: Event) -> None:
        match event:
            case RequestAdmitted():
                self.came.add(event.request)
                if self.running:
                    self.joined.append(event.request)
            case RequestFinished():
                self.running.discard(event.request)
                self.came.discard(event.request)
            case StepFinished() if self.came:
                self.sizes.append(len(self.came))
                self.running |= self.came
                self.came = set()


def test_fastertransformer_admits_nobody_while_somebody_runs() -> None:
    found = {name: Batches() for name in ("FasterTransformer", "Orca (Max)")}
    for name, batches in found.items():
        for seed in range(20):
            run_on(name, seed, batches).to_the_end()
    assert found["FasterTransformer"].joined == []
    assert max(found["FasterTransformer"].sizes) > 1, "it does batch"
    assert len(found["Orca (Max)"].joined) > 10, "Orca's come in as soon as there is room"


@pytest.mark.parametrize(("name", "blocks"), [("Orca (Oracle)", 4), ("Orca (Pow2)", 8), ("Orca (Max)", 128)])
def test_a_chunk_is_for_what_is_expected_rounded_up_to_a_power_of_two(name: str, blocks: int) -> None:
    """A prompt of 20 and an output of 33: 53 tokens are 4 blocks; 20 + 64 are 6, so 8; and Max takes all 2,048."""
    orca = Orca(name)
    config = EngineConfig(num_blocks=512, block_size=16, max_model_len=2048, vocab_size=11, enable_prefix_caching=False)
    engine = Engine(config, REFERENCE, ContentRunner(512, 0, 16, 11), memory=orca.memory, policy=orca.policy)
    engine.add_request([1] * 20, SamplingParams(n=3, max_tokens=33, ignore_eos=True))
    engine.step()
    assert engine.blocks.num_used == 3 * blocks, "a chunk for each sequence"
    assert list(ESTIMATES) == ["Orca (Max)", "Orca (Pow2)", "Orca (Oracle)"]


def test_a_request_whose_chunks_the_pool_never_has_is_refused_at_the_door() -> None:
    orca = Orca("Orca (Oracle)")
    config = EngineConfig(num_blocks=6, block_size=4, max_model_len=24, vocab_size=11, enable_prefix_caching=False)
    engine = Engine(config, REFERENCE, ContentRunner(6, 0, 4, 11), memory=orca.memory, policy=orca.policy)
    with pytest.raises(InvalidRequest, match=r"can need 8 blocks.*the whole pool has 6"):
        engine.add_request([1] * 12, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.add_request([1] * 12, SamplingParams(max_tokens=4, ignore_eos=True))


def test_free_blocks_that_lie_apart_let_nobody_in() -> None:
    """External fragmentation: 4 of 8 blocks are free, and no 4 of them together. When two buddies are, they are one."""
    orca = Orca("Orca (Oracle)")
    config = EngineConfig(num_blocks=8, block_size=4, max_model_len=16, vocab_size=11, enable_prefix_caching=False)
    engine = Engine(config, REFERENCE, ContentRunner(8, 0, 4, 11), memory=orca.memory, policy=orca.policy)
    small, large = (SamplingParams(max_tokens=most, ignore_eos=True) for most in (4, 8))
    for name in "abcd":
        engine.add_request([1] * 4, small, request_id=name)  # 2 blocks
    engine.step()
    engine.abort("a")
    engine.abort("c")
    engine.add_request([1] * 8, large, request_id="e")  # 4 blocks
    engine.step()
    assert engine.blocks.num_available == 4
    assert [request.request_id for request in engine.scheduler.waiting] == ["e"]
    engine.abort("b")
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["d", "e"]


class FailsOnce(SimulatedRunner):
    """In its fifth step."""

    def run(self, step: StepInput) -> StepResult:
        if step.number == 5:
            raise RuntimeError("the fifth step")
        return super().run(step)


@pytest.mark.parametrize("pool", [16, 64])
def test_after_an_error_siblings_share_the_chunks_of_their_request(pool: int) -> None:
    """Three samples of a request are dropped and computed again: in the chunks of one request, not of three."""
    orca, runner = Orca("Orca (Oracle)"), FailsOnce(OPT_13B_ON_AN_A100, block_size=4)
    config = EngineConfig(
        num_blocks=pool,
        block_size=4,
        max_model_len=64,
        vocab_size=64,
        enable_prefix_caching=False,
        max_num_batched_tokens=1 << 20,
        debug=True,
    )
    engine = Engine(config, REFERENCE, runner, memory=orca.memory, policy=orca.policy, clock=runner.clock)
    for _ in range(2):
        engine.add_request(range(6), SamplingParams(n=3, max_tokens=10, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        try:
            outputs += [update.output for update in engine.step() if update.output]
        except RuntimeError:
            assert engine.blocks.num_used == 0
        assert engine.blocks.num_used <= 2 * 3 * 4
    assert [len(one.token_ids) for output in outputs for one in output.outputs] == 6 * [10]
    assert engine.blocks.num_used == 0


class CertainOfSome(ContentRunner):
    """After three tokens two beams can go on with one token each, and all others can only end."""

    def compute(self, rows: Sequence[GivenRow]) -> np.ndarray:
        logits = super().compute(rows)
        if len(rows) == 4 and rows[0].slots[0][0] % self.block_size == 3:
            allowed = np.full_like(logits, -np.inf)
            for row, token in enumerate((3, 3, EOS, EOS)):
                allowed[row, token] = 0
            return allowed
        return logits


def test_a_search_that_loses_beams_and_gets_more_keeps_its_chunks() -> None:
    """Two of four beams end while nobody forks; in the next step there are four again, each with a chunk."""
    orca = Orca("Orca (Oracle)")
    config = EngineConfig(
        num_blocks=16,
        block_size=4,
        max_model_len=16,
        vocab_size=11,
        eos_token_ids=(EOS,),
        enable_prefix_caching=False,
        debug=True,
    )
    engine = Engine(config, REFERENCE, CertainOfSome(16, 0, 4, 11), memory=orca.memory, policy=orca.policy)
    engine.add_request([1], BeamSearchParams(beam_width=4, max_tokens=12))
    beams, held = list[int](), set[int]()
    while engine.has_unfinished_requests():
        engine.step()
        beams += [len(request.sequences) for request in engine.scheduler.running]
        held.add(engine.blocks.num_used)
    assert beams[2:5] == [4, 2, 4]
    assert held == {16, 0}, "what was reserved, until the search is over"


def test_who_outgrows_a_chunk_is_told_and_not_served_for_nothing() -> None:
    buddies = buddy.BuddyAllocator(4)
    table = chunk.Chunk(16, buddies)
    table.take(buddies.take(2))
    table.append(32)
    with pytest.raises(InvalidRequest, match="32 tokens outgrows its chunk of 32: give it a larger est"):
        table.append(1)
    assert table.num_tokens == 32


def test_an_estimate_below_the_truth_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ESTIMATES, "Orca (Pow2)", lambda output: output // 4)
    with pytest.raises(InvalidRequest, match="outgrows its chunk"):
        ServingSetup("Orca (Pow2)", "OPT-13B", "ShareGPT", rate=20.0, seconds=1.0).run()


def test_an_estimate_that_is_added_makes_a_system(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(systems())
    assert before == {"vLLM", *SYSTEMS}
    monkeypatch.setitem(ESTIMATES, "Orca (Twice)", lambda output: 2 * output)
    assert systems().keys() - before == {"Orca (Twice)"}
    assert ServingSetup("Orca (Twice)", "OPT-13B", "Alpaca", rate=5.0, seconds=4.0).run().requests > 10


def lines_of_code(path: Path) -> int:
    """Lines with more on them than comments and docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    words = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    said = {line for word in words for line in range(word.lineno, (word.end_lineno or 0) + 1)}
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in said for i, line in lines)


@pytest.mark.parametrize(
    "module", [buddy, chunk, orca_memory, orca, faster_transformer], ids=lambda module: module.__name__
)
def test_a_baseline_is_under_150_lines(module: ModuleType) -> None:
    assert module.__file__ is not None
    assert 20 < lines_of_code(Path(module.__file__)) < 150
