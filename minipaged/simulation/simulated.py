"""A runner without a model: it computes how long a step would take on a given machine, and advances a clock by that.

The engine, its scheduler, its block tables and allocators are the real ones. Only the runner is replaced:
`SimulatedRunner` computes no tokens. It counts the bytes and the operations of each step and advances its clock by the
seconds that a machine of given speeds would need for them. So thousands of requests are served in seconds, and memory
management can be studied at the scale of the paper's evaluation (section 6) on any laptop.

The cost of a step distinguishes prefill from decode:

    seconds = t0 + r * rows + max(weights / bandwidth, operations / peak) + K/V / bandwidth2
    rows         sequences of the batch
    weights      their bytes, read once
    operations   flops_per_token for each query token
    K/V          the bytes of every row's whole context

Decoding is limited by memory: a step of 1 row and one of 8 cost nearly the same, which is why batching pays. A prefill
is limited by arithmetic. Attention reads K and V after and before the products with the weights, so its time is added;
a roofline that takes the maximum over all bytes puts the ends of the paper's curves 16 to 138 % too far to the right.
The operations of attention itself are left out (a few percent at contexts of 2,000 tokens). A swap takes its full time,
before the step that it makes room for. The steps of several lanes (`pipeline_parallel_size`) run one after another, as
on one machine, so that the gain of a pipeline does not show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from minipaged import tiers
from minipaged.contracts import Runner, Sampled, StepResult, Tier
from minipaged.engine.policy import carry_seconds
from minipaged.errors import InvalidRequest
from minipaged.mirror import PerLane, Rows
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves, StepInput

TOKEN = 0
"""The token that is always chosen: a simulation has the length of a text, not its words."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One accelerator serving one model: the sizes and speeds that costs are computed from."""

    name: str
    weight_bytes: float
    """Size of the weights, which each step reads once."""
    kv_bytes_per_token: int
    """Size of K and V of one token in all layers."""
    kv_memory_bytes: int
    """Memory that the weights leave for the KV cache."""
    max_model_len: int
    """Maximum length of a sequence that the model was made for, in tokens."""
    flops_per_token: float
    """Operations per token: two for each parameter, a multiplication and an addition."""
    weight_bytes_per_second: float
    """Bandwidth at which weights are read."""
    kv_bytes_per_second: float
    """Bandwidth at which attention reads K and V."""
    flops_per_second: float
    link_bytes_per_second: float
    """Bandwidth between device and host, one way."""
    seconds_per_copy: float
    """Time to start one copy, whatever its size."""
    copies_per_block: int
    """Copies that move one block: 1 if it is one piece of memory; 2 x layers if each layer has a pool of keys and one
    of values."""
    seconds_per_step: float
    """Additional time of every step: scheduling, launching."""
    seconds_per_row: float
    """Additional time of every row: choosing its token, and updating its block table."""

    def num_blocks(self, block_size: int) -> int:
        """The number of blocks of `block_size` tokens that the KV memory holds."""
        return self.kv_memory_bytes // (block_size * self.kv_bytes_per_token)

    def step_seconds(self, num_rows: int, num_query_tokens: int, num_context_tokens: int) -> float:
        """The time of one forward pass. `num_context_tokens`: the context lengths, summed over the rows."""
        weights = self.weight_bytes / self.weight_bytes_per_second
        arithmetic = num_query_tokens * self.flops_per_token / self.flops_per_second
        kv = num_context_tokens * self.kv_bytes_per_token / self.kv_bytes_per_second
        return self.seconds_per_step + num_rows * self.seconds_per_row + max(weights, arithmetic) + kv

    def costs(self, block_size: int) -> Costs:
        """The costs of swapping and recomputing, with blocks of `block_size` tokens."""
        return Costs(
            seconds_per_copy=self.seconds_per_copy,
            copies_per_block=self.copies_per_block,
            block_bytes=block_size * self.kv_bytes_per_token,
            link_bytes_per_second=self.link_bytes_per_second,
            prefill_tokens_per_second=self.flops_per_second / self.flops_per_token,
        )


OPT_13B_ON_AN_A100 = Machine(
    name="OPT-13B on an A100 of 40 GB",
    weight_bytes=26e9,  # Table 1: 13 billion parameters in 16 bits
    kv_bytes_per_token=2 * 40 * 5120 * 2,  # K and V, layers, hidden size, bytes: the paper's 800 KB (section 3)
    kv_memory_bytes=12 << 30,  # Table 1
    max_model_len=2048,
    flops_per_token=26e9,
    weight_bytes_per_second=0.698 * 1.555e12,  # the data sheet's value, times the share that measured kernels reach
    kv_bytes_per_second=0.624 * 1.555e12,  # calibrated by the paper's flat points (`paper/calibration.py`)
    flops_per_second=0.635 * 312e12,  # the data sheet's value, times the share that measured kernels reach
    link_bytes_per_second=12.6e9,  # Fig. 19a, if its blocks hold 256 tokens in all
    seconds_per_copy=2.64e-6,  # Fig. 19a too
    copies_per_block=2 * 40,
    seconds_per_step=4.21e-3,  # calibrated
    seconds_per_row=0.277e-3,  # calibrated
)
"""The smallest setting of the paper's evaluation (section 6.1, Table 1); `paper/machines.py` computes it."""


class SimulatedRunner(Runner):
    """Runs steps by advancing its clock, which is also to be the engine's: `Engine(..., clock=runner.clock)`."""

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
        self.now += self.step_seconds(step, rows)
        return StepResult([_CHOSEN] * rows.num_choices, None)

    def step_seconds(self, step: StepInput, rows: Rows) -> float:
        """The time of a step without its moves: one forward pass of these rows."""
        return self.machine.step_seconds(len(rows), rows.num_query_tokens, rows.num_context_tokens)

    def move(self, moves: BlockMoves) -> None:
        """Advance the clock by the time of these moves."""
        if moves.swap_out or moves.swap_in or moves.load:
            num_blocks = len(moves.swap_out) + len(moves.swap_in) + len(moves.load)
            self.now += carry_seconds(self._costs, num_blocks)
        copied = 2 * len(moves.copy) * self.block_size * self.machine.kv_bytes_per_token  # read and written
        self.now += copied / self.machine.kv_bytes_per_second

    def costs(self) -> Costs:
        return self._costs


def simulated_tier() -> Tier:
    """The parts of the reference tier. Those that need NumPy are imported only when they are used.

    So a simulation runs without NumPy, in a web page too. Tokens are not drawn: the engine never calls that part.
    """
    return Tier("simulated", *tiers.plain_parts(), _beam_search, _draw)  # type: ignore[arg-type]


def _beam_search(*given: Any, **more: Any) -> Any:
    return tiers.reference_tier().beam_search(*given, **more)


def _draw(*_: Any) -> NoReturn:
    raise InvalidRequest("a simulated machine draws no tokens: it has no logits to draw them from")


_CHOSEN = Sampled(TOKEN, logprob=0.0, top_logprobs=None)
