"""What a scheduling policy decides, and from what: five questions over plain data (paper, sections 4.3 and 4.5).

The engine's scheduler keeps the queues and takes the blocks. Whatever there is to decide it asks a `Policy`: the
engine's own (`engine/policy.py`), one of `engine/policies/`, or yours: `Engine(policy=...)`, and assignment 4 of the
course. What a policy is told are copies: nothing here leads back into the engine, and nothing is changed by changing
them. (What takes time to find out is found out when it is looked at: look while you are asked. What nobody looked at
is over afterwards: LookupError.) So a policy cannot break anything: its answers are checked, and one that cannot be
carried out is an `InvariantViolation`, which costs the step and no request.

A question is asked only when its answer makes a difference; a step in which all that runs gets its tokens and blocks,
and nobody waits, asks none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Way = Literal["swap", "recompute"]
"""How a preempted request comes back: from blocks on the host, or by computing its keys and values again."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request, as it is when the question is asked.

    It *runs*, or it *waits*: new, swapped out (its blocks are on the host), or dropped (to be recomputed; no blocks).
    """

    request_id: str
    arrival: int
    """Its place in the order of arrival: the smaller, the earlier. No two requests have the same."""
    num_sequences: int = 1
    """Sequences that it runs with, all of them or none: `n` or `beam_width`, less those that have finished."""
    prompt_tokens: int = 1
    max_output_tokens: int = 1
    """Of each sequence."""
    tokens_to_run: int = 1
    """Tokens that it could run in the next step: while it decodes, one for each sequence that it has by then."""
    decodes: bool = False
    """Whether all it has to run is the latest token of each sequence, and no prompt or dropped tokens before it.

    So is a new request whose prompt is a single token: it runs that one, and becomes `num_sequences` afterwards.
    """
    num_blocks: int = 0
    """Different blocks that it holds: on the device if it runs, on the host if it was swapped out."""
    num_tokens: int = 0
    """Tokens whose keys and values are in those blocks; what its sequences share counts once."""
    blocks_needed: int = 0
    """Free blocks that it takes to run what it has to run; if it was swapped out, those for its host blocks too."""
    priority: int = 0
    """As whoever sent it wishes: the smaller, the earlier. Not every policy looks at it."""
    arrival_time: float = 0.0
    """When it arrived, in seconds by the engine's clock."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What the ways in which a request comes back pay for, on one machine and with one KV cache."""

    seconds_per_copy: float
    """What starting one copy costs, however small it is."""
    copies_per_block: int
    """1 when a block is one piece of memory; 2 x layers when every layer has a pool of keys and one of values."""
    block_bytes: int
    """Keys and values of one block, all layers."""
    link_bytes_per_second: float
    """Between device and host, one way."""
    prefill_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Objectives:
    """How soon a request wants to be served (SLO, service level objectives), in seconds.

    Requests a second for which both are met are the *goodput* (Zhong et al., DistServe, OSDI 2024).
    """

    first_token: float
    """TTFT, the time to the first token, at most."""
    between_tokens: float
    """TPOT, the time per output token after the first, on average, at most."""

    def met(self, first_token: float, between_tokens: float) -> bool:
        """Whether these times are within both."""
        return first_token <= self.first_token and between_tokens <= self.between_tokens


class Policy(Protocol):
    """Who comes in, who runs how many tokens, who makes room, and how it comes back.

    It is asked, and changes nothing. Lists of requests come in any order, and are to be read while it is asked. It is
    not told of what becomes of its answers: what it remembers of a request (by `arrival`, which no other has) it has to
    forget by itself. The easy way to another order is a `FirstComeFirstServed` with a `turn` of its own
    (`engine/policies/`).
    """

    def fits(self, request: RequestView) -> bool:
        """Whether to take this request at all; if not, it is refused, and never waits.

        Asked once, when a request arrives that the engine could serve if it had everything to itself. (What it could
        not serve even then, it refuses without asking.)
        """
        ...

    def share_tokens(self, running: Sequence[RequestView]) -> Mapping[str, int]:
        """How many tokens each running request runs in this step: request_id -> tokens, at most its `tokens_to_run`.

        Who is left out gets none. One that `decodes` gets all or none; somebody gets some. Asked at the beginning of a
        step, when all of them together have more to run than the `max_num_batched_tokens` of one batch.
        """
        ...

    def victim(self, running: Sequence[RequestView]) -> str:
        """The request_id of the running request that is preempted: all of its blocks are taken.

        Asked when the blocks for the step are not there and at least two run; after it the step begins anew.
        """
        ...

    def way_back(self, request: RequestView, host_free: int) -> Way:
        """How the victim comes back: "swap" copies its blocks to the host, "recompute" drops them.

        Asked when both are possible: the engine's `preemption` is "auto", and of the host's pool enough blocks are
        free, `host_free`.
        """
        ...

    def admit(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_free: int, tokens_left: int
    ) -> Sequence[str]:
        """The request_ids of those that come in now, in this order, each with all of its sequences.

        Their `blocks_needed` have to be free: there are `num_free`. A batch has room for `max_num_seqs` sequences, and
        for `max_num_batched_tokens`, each of which takes a token. Of the tokens, `tokens_left` are nobody's yet; each
        that comes in takes as many of them as it has to run, and needs one at least, or all if it `decodes`. When
        nothing runs, somebody has to come in.

        Asked at the end of a step, when somebody waits, nobody was preempted, and there are a free block, a token and
        room for a sequence; and again after somebody came in, until the answer is nobody.
        """
        ...


MakePolicy = Callable[[int, int, int, int, Costs], Policy]
"""A class of policies, or a function, given (num_blocks, block_size, max_num_seqs, max_num_batched_tokens, costs)."""
