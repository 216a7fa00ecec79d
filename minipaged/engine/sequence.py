"""Requests and their sequences: what the engine knows of each, and the states a request moves through.

    waiting --admit--> running --finish--> finished
       ^                  |
       +----preempt-------+      (keeping its blocks on the host when swapped, none when it will be recomputed)

A *request* is one prompt with its parameters; a *sequence* is one continuation of it, with a block table of its own.
A request starts with one sequence and forks when its prompt has been computed (parallel sampling, beam search). Its
sequences are scheduled, preempted and brought back together (paper, section 4.5: all or nothing).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from minipaged.contracts import BeamSearch, BlockTable
from minipaged.engine.detokenizer import Decode, Detokenizer
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.steps import Sampling


class RequestState(Enum):
    WAITING = "waiting"
    """Holds no blocks: new, or preempted and to be recomputed."""
    SWAPPED = "swapped"
    """Waits too, with its K/V in host blocks."""
    RUNNING = "running"
    """Holds device blocks and is part of every step that has room for it."""
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class SequenceState:
    """One continuation of a prompt."""

    sequence_id: int
    tokens: list[int]
    """Prompt and output."""
    output_token_ids: list[int]
    """The output alone."""
    table: BlockTable
    swapped: bool = False
    """Whether `table` is over the host pool."""
    pending: bool = False
    """Whether the step in flight is choosing the token after `tokens`, and it is to run."""
    index: int = 0
    """Which of the request's n samples this is."""
    lane: int = 0
    """Its request's."""
    cumulative_logprob: float = 0.0
    logprobs: list[dict[int, float]] | None = None
    """Of each output token, where the request asks for them."""
    num_published: int = 0
    """Leading blocks of the table known to the prefix cache."""
    most_computed: int = 0
    """The largest number of tokens whose K/V this sequence had when it gave them up: computing below it is recomputing.
    """
    num_steps: int = 0
    """Steps in which it held blocks, and `token_steps`, the tokens they held summed over those steps (for stats)."""
    token_steps: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    detokenizer: Detokenizer | None = None
    """The text so far. Where nobody reads along, and no stop string is looked for, it is made when the sequence ends.
    """
    num_reported: int = 0
    """Output tokens that the request's updates have told of."""

    @property
    def num_computed(self) -> int:
        """Tokens whose K/V have a slot: the pending one too, once its step is scheduled."""
        return self.table.num_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens to run before the next one can be chosen: 1 while decoding; 0 while its last token is chosen."""
        return len(self.tokens) + self.pending - self.table.num_tokens


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
    """Arrival order: no two requests have the same."""
    arrival_time: float
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    final_token_ids: frozenset[int]
    """The tokens that end a sequence of it: the model's, unless they are to be ignored, and its own stop tokens."""
    max_output_tokens: int
    """`max_tokens`, cut to what `max_model_len` leaves."""
    priority: int
    """As whoever sent it wishes: the smaller, the earlier, if the policy looks at it."""
    sequences: list[SequenceState]
    """The sequences that go on. Finished ones move to `done`."""
    sampling: Sampling | None = None
    """How the tokens of its first sequence are chosen; None for beam search."""
    decode: Decode | None = None
    """Makes its text of its tokens."""
    prompt_logprobs: list[dict[int, float]] | None = None
    """Of the prompt's tokens after the first, as far as they are known; None where nobody asks for them."""
    done: list[SequenceState] = field(default_factory=list)
    num_done_reported: int = 0
    """Those of `done` whose end the request's updates have told of."""
    beam_search: BeamSearch | None = None
    hypotheses: list[Hypothesis] = field(default_factory=list)
    reads_along: bool = False
    """Whether its user wants to be told of each step."""
    state: RequestState = RequestState.WAITING
    lane: int = 0
    """The lane that it runs in, or ran in last: with pipeline parallelism there are several (`lanes.py`)."""
    prompt_computed: bool = False
    """Whether it has forked into all its sequences."""
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    @property
    def num_sequences(self) -> int:
        """How many sequences it has or will have once its prompt is computed."""
        if self.prompt_computed and self.beam_search is None:
            return len(self.sequences)
        return self.params.beam_width if isinstance(self.params, BeamSearchParams) else self.params.n

    @property
    def reads_prefix_cache(self) -> bool:
        """Not where the log-probabilities of its prompt are wanted still: they come from computing it."""
        return self.prompt_logprobs is None or self.prompt_computed

    def remaining(self) -> list[tuple[SequenceState, int]]:
        """Its sequences that have tokens to run, each with how many."""
        return [(sequence, n) for sequence in self.sequences if (n := sequence.num_remaining)]

    def ends_by_length(self, sequence: SequenceState) -> bool:
        """Whether the sequence's next token is its last, whichever it is."""
        return len(sequence.output_token_ids) + 1 >= self.max_output_tokens

    def needs_tokens_on_host(self) -> bool:
        """Whether its next step takes more of the tokens now being chosen than their numbers, which the device has.

        Penalties count them, a bad word of several tokens goes by them, beam search forks by them; and the samples of
        one prompt fork when it is computed.
        """
        if self.sampling is None:
            return bool(self.sequences)
        if not self.sampling.needs_tokens and (self.num_sequences == 1 or self.prompt_computed):
            return False
        return not all(self.ends_by_length(sequence) for sequence in self.sequences)

    def filled_slots(self, block_size: int) -> dict[int, int]:
        """For each different block that its sequences hold, in order of first use: how many of its slots are filled."""
        filled: dict[int, int] = {}
        for sequence in self.sequences:
            for logical, block in enumerate(sequence.table.blocks):
                here = min(block_size, sequence.num_computed - logical * block_size)
                filled[block] = max(here, filled.get(block, 0))
        return filled
