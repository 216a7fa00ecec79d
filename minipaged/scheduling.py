"""The scheduling policy: five decisions, each made from plain data (paper, sections 4.3 and 4.5).

The engine's scheduler keeps the queues and takes the blocks. It leaves every decision to a `Policy`: the engine's own
(`engine/policy.py`), one of `engine/policies/`, or yours (`Engine(policy=...)`, and assignment 4 of the course).

A policy cannot break anything. Its arguments are copies, so that changing them changes nothing in the engine. Its
answers are checked; one that cannot be carried out raises an `InvariantViolation`, which fails the step but no request.
(Values that are slow to compute are computed when they are first read. Read them during the call: afterwards, a value
that was not read raises LookupError.)

The policy is called only if its answer makes a difference. A step in which every running request gets its tokens and
blocks, and no request waits, does not call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Way = Literal["swap", "recompute"]
"""The way in which a preempted request comes back: from blocks on the host, or by recomputing its keys and values."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request, as it is when the policy is called.

    It *runs* or *waits*. A waiting request is new, swapped out (its blocks are on the host), or dropped (it has no
    blocks and is to be recomputed).
    """

    request_id: str
    arrival: int
    """Its place in the order of arrival: smaller is earlier. Each request has its own."""
    num_sequences: int = 1
    """Its sequences, which run all together or not at all: `n` or `beam_width`, less those that have finished."""
    prompt_tokens: int = 1
    max_output_tokens: int = 1
    """The most output tokens that each sequence can have."""
    tokens_to_run: int = 1
    """Tokens that it could run in the next step. While it decodes, this is one for each sequence in that step."""
    decodes: bool = False
    """Whether it has only the latest token of each sequence to run, and no prompt or dropped tokens before it.

    A new request whose prompt is a single token decodes too: it runs that token, and then has `num_sequences`.
    """
    num_blocks: int = 0
    """Different blocks that it holds, on the device if it runs, on the host if it is swapped out."""
    num_tokens: int = 0
    """Tokens whose keys and values are in those blocks; a token that its sequences share counts once."""
    blocks_needed: int = 0
    """Free blocks that it needs to run `tokens_to_run`; if it is swapped out, including those for its host blocks."""
    priority: int = 0
    """The priority that its sender gave it: smaller is earlier. Not every policy uses it."""
    arrival_time: float = 0.0
    """The time of its arrival, in seconds of the engine's clock."""
    num_cached_tokens: int = 0
    """If it waits without blocks: its first tokens that the prefix cache has now, counted in full blocks. It need not
    run them if it is admitted now. They can be more or fewer at the next call."""
    most_blocks: int | None = None
    """The most blocks that it can come to hold, if layers of the model have windows; None: as a policy counts them."""
    num_groups: int = 1
    """The groups of the model's layers. Each has a block of its own for every `block_size` tokens of a sequence."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Figures from which the costs of swapping and recomputing follow, for one machine and one KV cache."""

    seconds_per_copy: float
    """Time to start one copy, whatever its size."""
    copies_per_block: int
    """Copies that move one block: 1 if it is one piece of memory; 2 x layers if each layer has a pool of keys and one
    of values."""
    block_bytes: int
    """Size of one block: keys and values of all layers."""
    link_bytes_per_second: float
    """Bandwidth between device and host, one way."""
    prefill_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits on how long a request may take (SLO, service level objectives), in seconds.

    The requests per second that meet both limits are the *goodput* (Zhong et al., DistServe, OSDI 2024).
    """

    first_token: float
    """Limit on TTFT, the time to the first token."""
    between_tokens: float
    """Limit on TPOT, the average time per output token after the first."""

    def met(self, first_token: float, between_tokens: float) -> bool:
        """Whether these times are within both limits."""
        return first_token <= self.first_token and between_tokens <= self.between_tokens


class Policy(Protocol):
    """Decides which requests are admitted, how many tokens each runs, which one is preempted, and how it comes back.

    A policy returns decisions and changes nothing. Lists of requests come in any order, and must be read during the
    call. A policy does not learn what becomes of its decisions: if it remembers anything about a request (by `arrival`,
    which is unique), it must forget that by itself. The easy way to another order is a subclass of
    `FirstComeFirstServed` with its own `turn` (`engine/policies/`).
    """

    def fits(self, request: RequestView) -> bool:
        """Return whether to take this request at all. If not, it is refused and never waits.

        Called once, when a request arrives that the engine could serve if it ran alone. (The engine refuses any other
        request without this call.)
        """
        ...

    def share_tokens(self, running: Sequence[RequestView]) -> Mapping[str, int]:
        """Return how many tokens each request runs in this step: request_id -> tokens, at most its `tokens_to_run`.

        A request that is left out gets none. One that `decodes` gets all or none. At least one request must get tokens.
        Called at the beginning of a step if the requests have more than `max_num_batched_tokens` tokens to run.
        """
        ...

    def victim(self, running: Sequence[RequestView]) -> str:
        """Return the request_id of the running request to preempt, which loses all of its blocks.

        Called when the step lacks blocks and at least two requests run. The step is then decided again from its start.
        """
        ...

    def way_back(self, request: RequestView, host_free: int) -> Way:
        """Return how the victim comes back: "swap" copies its blocks to the host, "recompute" drops them.

        Called when both are possible: the engine's `preemption` is "auto", and `host_free`, the number of free blocks
        in the host's pool, is large enough.
        """
        ...

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> Sequence[str]:
        """Return the request_ids of the waiting requests to admit now, in this order, each with all of its sequences.

        - Blocks: their `blocks_needed` must fit into the `num_free` free blocks.
        - Sequences: at most `max_num_seqs` may run, and at most `max_num_batched_tokens`, since each needs a token of
          every batch.
        - Tokens: `tokens_left` tokens of this batch are free. Each admitted request takes its `tokens_to_run` or what
          is left; it needs at least one token, or all of them if it `decodes`.
        - If no request runs, at least one must be admitted.

        Called last in a step, if a request waits, none was preempted, and a free block, a token and room for a sequence
        are left. Called again after each admission, until it returns no request.
        """
        ...


MakePolicy = Callable[[int, int, int, int, Costs], Policy]
"""A policy class (or a function) to call with num_blocks, block_size, max_num_seqs, max_num_batched_tokens, costs."""
