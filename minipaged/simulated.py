"""A runner without a model: what a step would cost on a machine that is not here, and a clock that shows it.

The engine, its scheduler, its block tables and allocators are the real ones. Only what carries a plan out is replaced:
`SimulatedRunner` computes nothing. It counts the bytes and the operations of each step and moves its clock on by the
seconds that a machine of stated speeds would need for them. So thousands of requests are served in seconds, and memory
can be studied at the scale of the paper's evaluation (section 6) on any laptop.

The cost of a step is the simplest that tells prefill from decode, a roofline:

    seconds = seconds_per_step + max(bytes / memory speed, operations / arithmetic speed)
    bytes        the weights once, and the K/V of every row's whole context
    operations   flops_per_token for each query token

Decoding waits for memory: a step of 1 row and one of 30 cost nearly the same, which is why batching pays. A prefill
waits for arithmetic. Left out are the operations of attention itself (a few percent at contexts of 2,000 tokens) and
whatever a machine does at the same time; a swap is paid in full, before the step that it makes room for. The steps of
several lanes (`pipeline_parallel_size`) take their time one after another, as on one machine: of what a pipeline would
gain nothing is said here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minipaged import tiers
from minipaged.contracts import Runner, Sampled, StepResult, Tier
from minipaged.engine.policy import carry_seconds
from minipaged.mirror import PerLane, Rows
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves, StepInput

TOKEN = 0
"""The token that is always chosen: a simulation knows how long a text is, not what it says."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One accelerator serving one model: the sizes and speeds that costs are computed from."""

    name: str
    weight_bytes: float
    """Read once a step."""
    kv_bytes_per_token: int
    """K and V of one token in all layers."""
    kv_memory_bytes: int
    """What is left for the KV cache beside the weights."""
    max_model_len: int
    """Longest sequence that the model was made for, in tokens."""
    flops_per_token: float
    """Two for each parameter: a multiplication and an addition."""
    memory_bytes_per_second: float
    flops_per_second: float
    link_bytes_per_second: float
    """Between device and host, one way."""
    seconds_per_copy: float
    """What starting one copy costs, however small it is."""
    copies_per_block: int
    """1 where a block is one piece of memory; 2 x layers where each layer has a pool of keys and one of values."""
    seconds_per_step: float
    """What every step costs beside: scheduling, launching, sampling."""

    def num_blocks(self, block_size: int) -> int:
        """Blocks of `block_size` tokens that the KV memory holds."""
        return self.kv_memory_bytes // (block_size * self.kv_bytes_per_token)

    def step_seconds(self, num_query_tokens: int, num_context_tokens: int) -> float:
        """One forward pass; `num_context_tokens`: the context lengths of all rows together."""
        num_bytes = self.weight_bytes + num_context_tokens * self.kv_bytes_per_token
        memory = num_bytes / self.memory_bytes_per_second
        arithmetic = num_query_tokens * self.flops_per_token / self.flops_per_second
        return self.seconds_per_step + max(memory, arithmetic)

    def costs(self, block_size: int) -> Costs:
        """What swapping and recomputing pay for, with blocks of `block_size` tokens."""
        return Costs(
            seconds_per_copy=self.seconds_per_copy,
            copies_per_block=self.copies_per_block,
            block_bytes=block_size * self.kv_bytes_per_token,
            link_bytes_per_second=self.link_bytes_per_second,
            prefill_tokens_per_second=self.flops_per_second / self.flops_per_token,
        )


OPT_13B_ON_AN_A100 = Machine(
    name="OPT-13B on an A100 of 40 GB",
    weight_bytes=26e9,  # 13 billion parameters in 16 bits
    kv_bytes_per_token=2 * 40 * 5120 * 2,  # K and V, layers, hidden size, bytes: the paper's 800 KB (section 3)
    kv_memory_bytes=12 << 30,  # Table 1
    max_model_len=2048,
    flops_per_token=26e9,
    memory_bytes_per_second=0.8 * 1.555e12,  # assumed: four fifths of the data sheet's
    flops_per_second=0.5 * 312e12,  # assumed: half of the data sheet's, which gives a prefill of 6,000 tokens a second
    link_bytes_per_second=12e9,  # assumed, over PCIe
    seconds_per_copy=2e-6,  # assumed
    copies_per_block=2 * 40,
    seconds_per_step=5e-3,  # assumed
)
"""The smallest setting of the paper's evaluation (section 6.1, Table 1). What is assumed says so."""


class SimulatedRunner(Runner):
    """Runs plans by moving its clock, which is what an engine's `clock` wants: `Engine(..., clock=runner.clock)`."""

    def __init__(self, machine: Machine, block_size: int) -> None:
        self.machine = machine
        self.block_size = block_size
        self._costs = machine.costs(block_size)
        self.now = 0.0
        """Seconds since the simulation began."""
        self._rows = PerLane(Rows)

    def clock(self) -> float:
        return self.now

    def run(self, step: StepInput) -> StepResult:
        rows = self._rows.of(step)
        rows.follow(step)
        if any(step.moves):
            self.move(step.moves)
        self.now += self.machine.step_seconds(rows.num_query_tokens, rows.num_context_tokens)
        return StepResult([_CHOSEN] * rows.num_choices, None)

    def move(self, moves: BlockMoves) -> None:
        """Pay for the moves."""
        if moves.swap_out or moves.swap_in or moves.load:
            num_blocks = len(moves.swap_out) + len(moves.swap_in) + len(moves.load)
            self.now += carry_seconds(self._costs, num_blocks)
        copied = 2 * len(moves.copy) * self.block_size * self.machine.kv_bytes_per_token  # read and written
        self.now += copied / self.machine.memory_bytes_per_second

    def costs(self) -> Costs:
        return self._costs


def simulated_tier() -> Tier:
    """The reference tier's block allocator and block table: all that an engine with such a runner needs."""
    return replace(tiers.reference_tier(), name="simulated")


_CHOSEN = Sampled(TOKEN, logprob=0.0, top_logprobs=None)
