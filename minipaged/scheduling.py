"""What a scheduler decides from: plain data about requests, blocks and costs (paper, section 4.5).

A scheduler of one's own (assignment 4 of the course) is asked five questions, and this is what it is told. They are
copies: nothing here leads back into the engine, and nothing is changed by changing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class Costs:
    """What bringing a request back costs on one machine."""

    seconds_per_copy: float
    """What starting one copy costs, however small it is."""
    copies_per_block: int
    """1 when a block is one piece of memory; 2 x layers when every layer has a pool of keys and one of values."""
    block_bytes: int
    """Keys and values of one block, all layers."""
    link_bytes_per_second: float
    """Between device and host, one way."""
    prefill_tokens_per_second: float
