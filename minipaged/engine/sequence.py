"""Requests and their sequences: what the engine knows of each, and the states of a request.

    waiting --admit--> running --finish--> finished
       ^                  |
       +----preempt-------+      (keeping its blocks on the host when swapped, none when it will be recomputed)

A *request* is one prompt with its parameters; a *sequence* is one continuation of it, with a block table of its own. A
request starts with one sequence and forks when its prompt has been computed (parallel sampling, beam search). Its
sequences are scheduled, preempted and brought back together (paper, section 4.5: all or nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from minipaged.contracts import BeamSearch, BlockTable
from minipaged.engine.cached_blocks import CachedBlock
from minipaged.engine.detokenizer import Decode, Detokenizer
from minipaged.engine.drafting import DraftRecord
from minipaged.engine.grouped_table import GroupedTable
from minipaged.engine.prompt_lookup import PromptLookup
from minipaged.events import HOLE
from minipaged.handover.block_hashes import salted
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.steps import Sampling


class RequestState(Enum):
    """The state of a request."""

    WAITING = "waiting"
    """Holds no blocks: new, or preempted and to be recomputed."""
    SWAPPED = "swapped"
    """Waits with its K/V in host blocks."""
    RUNNING = "running"
    """Holds device blocks, and is part of every step that has room for it."""
    FINISHED = "finished"


class SequenceGrammar(Protocol):
    """How far a sequence's output has come in its grammar (`grammar.py`)."""

    @property
    def bits(self) -> bytes:
        """The tokens that may come next, as in `steps.AllowedTokens`."""

    def consume(self, token_id: int) -> bool:
        """Go on by one token, which is none of the final ones. Returns whether the output ends with it, because the
        grammar allows nothing after it and the request has no token to end with. Raises RequestFailed if the token is
        not allowed, or if the grammar cannot be followed any further."""

    def fork(self) -> SequenceGrammar:
        """Return a copy for another sequence."""


@dataclass(eq=False, slots=True)
class SequenceState:
    """One continuation of a prompt."""

    sequence_id: int
    tokens: list[int]
    """Tokens of prompt and output."""
    output_token_ids: list[int]
    """Tokens of the output alone."""
    table: BlockTable
    swapped: bool = False
    """Whether the blocks of `table` are in the host pool."""
    pending: bool = False
    """Whether the step in flight is choosing the token after `tokens`, and that token will be run."""
    index: int = 0
    """The number of this sample among the request's n samples."""
    lane: int = 0
    """The lane of its request."""
    salt: int = 0
    """The number of its request's salt; 0 without one (`block_hashes.salt_number`)."""
    salted_tokens: list[int] = field(default_factory=list)
    """What `key_tokens` has returned; `tokens` are only ever appended to."""
    cumulative_logprob: float = 0.0
    logprobs: list[dict[int, float]] | None = None
    """Log-probabilities reported for each output token; None unless the request wants them."""
    num_published: int = 0
    """The number of blocks at the start of the table that are in the prefix cache."""
    found: list[CachedBlock] = field(default_factory=list)
    """What the last look into the prefix cache found for its request, while that waited (`PrefixCache.look_up`)."""
    most_computed: int = 0
    """The number of tokens whose K/V this sequence had when it gave up its blocks; computing them again is
    recomputation. 0 once it has caught up."""
    num_steps: int = 0
    """The number of steps in which it held blocks (for stats)."""
    token_steps: int = 0
    """The tokens that its blocks held, summed over the steps (for stats)."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    detokenizer: Detokenizer | None = None
    """The text so far. It is made only when the sequence ends if no update and no stop string needs it earlier."""
    grammar: SequenceGrammar | None = None
    """Its state in the request's grammar; None without one."""
    num_reported: int = 0
    """The number of output tokens that updates of the request have included."""
    lookup: PromptLookup | None = None
    """Finds drafts among its tokens, once some were asked for."""
    draft_record: DraftRecord = field(default_factory=DraftRecord)
    """What became of its drafts."""

    @property
    def key_tokens(self) -> Sequence[int]:
        """The tokens by which its blocks are named, here and elsewhere: `tokens`, with the salt in the first one."""
        if not self.salt:
            return self.tokens
        known = self.salted_tokens
        known += self.tokens[len(known) :] if known else salted(self.tokens, self.salt)
        return known

    @property
    def entries(self) -> Sequence[int]:
        """Its block table as a runner gets it: with holes, and with an entry in each group of layers for every logical
        block (`grouped_table.py`)."""
        return self.table.entries if isinstance(self.table, GroupedTable) else self.table.blocks

    @property
    def num_blocks(self) -> int:
        """The number of blocks that it holds."""
        return self.table.num_blocks if isinstance(self.table, GroupedTable) else len(self.table.blocks)

    @property
    def num_groups(self) -> int:
        return self.table.num_groups if isinstance(self.table, GroupedTable) else 1

    @property
    def num_computed(self) -> int:
        """Tokens whose K/V have a slot, including the pending one once its step is scheduled."""
        return self.table.num_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens to run before the next one can be chosen: 1 while decoding; 0 while its last token is being chosen, or
        drafts are being verified, which have slots and are not among its tokens."""
        num_remaining = len(self.tokens) + self.pending - self.table.num_tokens
        return num_remaining if num_remaining > 0 else 0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence of a beam search."""

    tokens: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass(eq=False, slots=True)
class Request:
    """One prompt, its parameters, and its sequences."""

    request_id: str
    order: int
    """Its place in the order of arrival; no two requests have the same."""
    arrival_time: float
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    final_token_ids: frozenset[int]
    """Tokens that end a sequence: the model's EOS tokens, unless they are ignored, and the request's stop tokens."""
    max_output_tokens: int
    """`max_tokens`, limited to what `max_model_len` leaves."""
    priority: int
    """The priority given by the sender: smaller comes first, if the policy looks at it."""
    sequences: list[SequenceState]
    """The sequences that have not ended. Finished ones move to `done`."""
    sampling: Sampling | None = None
    """How the tokens of its first sequence are chosen; None for beam search."""
    decode: Decode | None = None
    """Turns its tokens into text."""
    prompt_logprobs: list[dict[int, float]] | None = None
    """Log-probabilities of the prompt's tokens after the first, as far as known; None if the request wants none."""
    done: list[SequenceState] = field(default_factory=list)
    num_done_reported: int = 0
    """The number of sequences in `done` whose end an update has reported."""
    beam_search: BeamSearch | None = None
    hypotheses: list[Hypothesis] = field(default_factory=list)
    reads_along: bool = False
    """Whether its user wants an update after each step."""
    state: RequestState = RequestState.WAITING
    lane: int = 0
    """The lane in which it runs or last ran; with pipeline parallelism there are several (`lanes.py`)."""
    prompt_computed: bool = False
    """Whether its prompt is computed and it has forked into all its sequences."""
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    @property
    def num_sequences(self) -> int:
        """The number of sequences that it has, or will have once its prompt is computed."""
        if self.prompt_computed and self.beam_search is None:
            return len(self.sequences)
        return self.params.beam_width if isinstance(self.params, BeamSearchParams) else self.params.n

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it may use the prefix cache: False while log-probabilities of its prompt are still to be computed."""
        return self.prompt_logprobs is None or self.prompt_computed

    def remaining(self) -> list[tuple[SequenceState, int]]:
        """Its sequences that have tokens to run, each with their number."""
        return [(sequence, n) for sequence in self.sequences if (n := sequence.num_remaining)]

    def ends_by_length(self, sequence: SequenceState) -> bool:
        """Whether the sequence's next token is its last, whichever token it is."""
        return len(sequence.output_token_ids) + 1 >= self.max_output_tokens

    def needs_tokens_on_host(self) -> bool:
        """Whether the host must know the tokens now being chosen before it can write the request's next step.

        Penalties count these tokens, a grammar and a bad word of several tokens depend on them, beam search forks by
        them, and the samples of a prompt fork when it is computed.
        """
        if self.sampling is None:
            return bool(self.sequences)
        if not self.sampling.needs_tokens and (self.num_sequences == 1 or self.prompt_computed):
            return False
        return not all(self.ends_by_length(sequence) for sequence in self.sequences)

    def filled_slots(self, block_size: int) -> dict[int, int]:
        """The filled slots of each block that its sequences hold, as block -> number, in order of first use."""
        filled: dict[int, int] = {}
        for sequence in self.sequences:
            groups, num_computed = sequence.num_groups, sequence.num_computed
            for i, block in enumerate(sequence.entries):
                if block != HOLE:
                    here = min(block_size, num_computed - i // groups * block_size)
                    filled[block] = max(here, filled.get(block, 0))
        return filled

    def num_tokens_held(self, block_size: int) -> int:
        """The tokens of its sequences that were computed. Those in a block that several share count once. The block
        table of the first group of layers shows what is shared: that group sees everything, if any does. Where a window
        has left holes in it, blocks of the prompt count as shared, and others do not."""
        if len(self.sequences) == 1:
            return self.sequences[0].num_computed
        computed: dict[tuple[int, int, int], int] = {}
        for sequence in self.sequences:
            for logical, block in enumerate(sequence.entries[:: sequence.num_groups]):
                here = min(block_size, sequence.num_computed - logical * block_size)
                is_prompt = (logical + 1) * block_size <= len(self.prompt_token_ids)
                place = (block, -1, -1) if block != HOLE else (HOLE, logical, -1 if is_prompt else sequence.sequence_id)
                computed[place] = max(here, computed.get(place, 0))
        return sum(computed.values())
