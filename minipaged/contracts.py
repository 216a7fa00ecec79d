"""What a tier must provide: the contracts. (The invariants and exceptions they name are in `errors.py`.)

minipaged is written twice: `reference/` to be read and `fast/` to be fast. This file is what the two
have in common and what everything above them (engine, tests, grader) relies on. It is plain Python,
with no NumPy at import, so that it runs wherever Python runs.

The words used everywhere (Kwon et al., SOSP 2023, section 4):

- *block*: the keys and values of `block_size` consecutive tokens, in every layer. A *physical* block is
  a number in `range(num_blocks)`; a *logical* block is an index into one sequence's block table.
- *slot*: room for one token. Slot number = block * block_size + offset.
- *block table*: the list of physical blocks of one sequence, in logical order.
- *reference count*: how many table entries (and prefix-cache entries) hold a block.
- *copy-on-write*: before writing into a block that others hold too, take a copy of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minipaged.errors import BlockNotAllocated, InvariantViolation, OutOfBlocks
from minipaged.params import BeamSearchParams, SamplingParams
from minipaged.scheduling import Costs
from minipaged.steps import CopyPair, StepInput

Logits = Any
"""An array [rows, vocab_size] of the tier that made it. The engine hands it on and never looks inside."""


# --- The block allocator --------------------------------------------------------------------------


class BlockAllocator(ABC):
    """Hands out the physical blocks of one pool. A block is a number in `range(num_blocks)`.

    A block is *free* (reference count 0) or *held* (1 or more):

        free --allocate--> held, 1 --share--> held, 2 ... --free--> held, 1 --free--> free

    A call that raises changes nothing (atomic-failure). Any class with the abstract members below is accepted
    anywhere, whether or not it subclasses this one (see `engine.checked_allocator`).
    """

    @abstractmethod
    def __init__(self, num_blocks: int) -> None:
        """A pool of `num_blocks` free blocks. Raises ValueError when `num_blocks < 1`."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """The size of the pool, in blocks."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """How many blocks are free."""

    @abstractmethod
    def allocate(self) -> int:
        """A block that was free, now with reference count 1. Raises OutOfBlocks."""

    @abstractmethod
    def share(self, block: int) -> None:
        """One more reference on a held block. Raises BlockNotAllocated."""

    @abstractmethod
    def free(self, block: int) -> None:
        """One reference less; at 0 the block is free again. Raises BlockNotAllocated."""

    @abstractmethod
    def ref_count(self, block: int) -> int:
        """How many hold `block`: 0 when free. Raises BlockNotAllocated for a number outside the pool."""

    @abstractmethod
    def copy_on_write(self, block: int) -> int:
        """The block to write to instead of `block`.

        `block` itself when the caller is its only holder. Otherwise a newly allocated block, and one reference
        on `block` is given up; the caller copies the contents. Raises OutOfBlocks, BlockNotAllocated.
        """

    def allocate_many(self, n: int) -> Sequence[int]:
        """`n` blocks, or OutOfBlocks and none. Raises ValueError when `n` is negative."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks; ask for 0 or more")
        if n > self.num_free:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        taken: list[int] = []
        try:
            for _ in range(n):
                taken.append(self.allocate())
        except InvariantViolation:
            raise  # of an allocator that is broken nothing can be asked; what it broke first is what to report
        except BaseException:
            for block in reversed(taken):
                self.free(block)
            raise
        return taken

    def share_many(self, blocks: Iterable[int]) -> None:
        """`share` each of `blocks` (a block may occur twice), or BlockNotAllocated and none."""
        shared: list[int] = []
        try:
            for block in blocks:
                self.share(block)
                shared.append(block)
        except InvariantViolation:
            raise
        except BaseException:
            for block in reversed(shared):
                self.free(block)
            raise

    def free_many(self, blocks: Iterable[int]) -> None:
        """`free` each of `blocks` in the order given (one may occur twice), or BlockNotAllocated and none."""
        blocks = list(blocks)
        references: dict[int, int] = {}
        for block in blocks:
            references[block] = references.get(block, 0) + 1
        for block, given_up in references.items():
            if self.ref_count(block) < given_up:
                raise BlockNotAllocated(f"block {block} freed {given_up} times but held {self.ref_count(block)} times")
        for block in blocks:
            self.free(block)


# --- The block table ------------------------------------------------------------------------------


class BlockTable(ABC):
    """Maps the positions of one sequence to slots (paper, section 4.2 and Fig. 6).

    Position p lives in logical block `p // block_size` at offset `p % block_size`. All blocks are full but the
    last, of which the first slots are filled. The table holds one reference on each of its blocks.
    """

    @abstractmethod
    def __init__(self, block_size: int, allocator: BlockAllocator) -> None:
        """An empty table over `allocator`'s pool. Raises ValueError when `block_size < 1`."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[int]:
        """The physical blocks in logical order. Not to be changed by the caller."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """How many slots are filled: positions 0 .. num_tokens - 1 have one."""

    @abstractmethod
    def blocks_needed(self, num_new_tokens: int) -> int:
        """How many blocks `append(num_new_tokens)` would allocate, a copy-on-write included."""

    @abstractmethod
    def append(self, num_new_tokens: int) -> list[CopyPair]:
        """Slots for `num_new_tokens` more tokens, each in a block that only this table holds.

        Returns the copy to make before the new slots are written: one pair when the last block was shared and
        partly filled, else none. Raises OutOfBlocks and changes nothing when the pool has too few.
        """

    @abstractmethod
    def adopt(self, blocks: Sequence[int]) -> None:
        """Begin this empty table with full blocks that somebody else holds: takes a reference on each."""

    @abstractmethod
    def fork(self) -> BlockTable:
        """A second table over the same blocks, all now shared."""

    @abstractmethod
    def trim(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` positions; give back the blocks past them, last first.

        `trim(0)` gives everything back. Raises ValueError outside `0 <= num_tokens <= self.num_tokens`.
        """

    @abstractmethod
    def replace(self, logical_block: int, block: int) -> None:
        """Let `logical_block` be held in `block`, which has the same content: share it, give the old one back."""

    @abstractmethod
    def relocate(self, blocks: Sequence[int], allocator: BlockAllocator) -> None:
        """The same tokens now live in `blocks` of another pool (swapping).

        The caller has taken this table's references on `blocks`; the table gives back those on its old blocks.
        """

    @abstractmethod
    def slot_mapping(self, start: int, stop: int) -> Sequence[int]:
        """The slots of positions start .. stop - 1. Raises ValueError where there is none."""


# --- Running a step -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchRow:
    """The tokens of one sequence that one forward pass runs: its query tokens."""

    token_ids: Sequence[int]
    """[num_query_tokens]. Where a runner does not wait for the tokens of the step before, -1 - i is choice i there."""
    first_position: int
    """The position of `token_ids[0]`: everything before it is in the KV cache already."""
    blocks: Sequence[int]
    """The sequence's block table: covers positions 0 .. first_position + num_query_tokens - 1."""
    wants_logits: bool
    """Whether the logits after the last query token are asked for."""
    num_prompt_logits: int = 0
    """After so many of the first query tokens, logits are needed for the log-probabilities of a prompt."""

    @property
    def context_len(self) -> int:
        """How many of the sequence's tokens have K and V after the pass."""
        return self.first_position + len(self.token_ids)

    def slots(self, block_size: int) -> list[int]:
        """[num_query_tokens]: where to write K and V of each token."""
        return slots_of(self.blocks, self.first_position, self.context_len, block_size)


def slots_of(blocks: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """The slots of positions start .. stop - 1 of the sequence with this block table."""
    return [blocks[p // block_size] * block_size + p % block_size for p in range(start, stop)]


Batch = Sequence[BatchRow]
"""One forward pass: prefill (many query tokens), decode (one) and mixed batches are all the same."""


class StepResult(NamedTuple):
    """What a step has come to."""

    choices: Sequence[Sampled]
    """The tokens chosen, in the order of the rows. They may be fetched when they are first looked at. Where none can be
    chosen, its `error` says why."""
    logits: Logits
    """[rows with `num_choices` other than 0, vocab_size], for beam search."""
    prompt_logprobs: Mapping[int, Sequence[Sampled]] = {}
    """By sequence, where `SamplingParams.prompt_logprobs` asks for it: of each token of the prompt that follows one of
    its row's query tokens, given where other tokens are chosen. They too may be fetched when they are first looked at.
    """


class Runner(ABC):
    """What runs steps: each tier's Llama; a model that checks every read; a simulated machine.

    A runner that is given batches of plain rows, and need not know of differences, is a `mirror.MirroredRunner`.
    """

    @abstractmethod
    def run(self, step: StepInput) -> StepResult:
        """Follow the differences; move blocks; run the rows: write K and V of every query token into its slot, attend
        through the block tables; choose tokens.

        After an error the next step is a `fresh` one, so whatever this one has half done is forgotten.
        """

    @abstractmethod
    def costs(self) -> Costs:
        """What swapping and recomputing pay for here. A tier measures it, when it is first asked for or before."""

    def read_blocks(self, blocks: Sequence[int]) -> Sequence[bytes]:
        """K and V of these device blocks, after all steps that it was given: what `BlockMoves.load` brings to others.
        (A simulated machine has none.)"""
        raise NotImplementedError(f"{type(self).__name__} has no blocks to be read")

    def on_failure(self, call: Callable[[Exception], None]) -> None:
        """Call this, on any thread, should it become unable to run steps while it has none to run. (Most cannot.)"""
        del call


# --- Choosing tokens ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """One token to choose."""

    row: int
    """Which row of the logits. Several inputs may use the same row (parallel sampling, first token)."""
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seed: int
    """The request's seed: `params.seed`, or one drawn for it."""
    stream: int
    """Which of the request's `n` sequences: 0 .. n - 1."""
    forbidden_token_ids: Sequence[int] = ()
    """Tokens that must not be chosen (those that would stop before `min_tokens`, or complete a bad word)."""
    num_pending: int = 0
    """Tokens after `output_token_ids` that are being chosen still; 0 where a penalty asks for them."""

    @property
    def position(self) -> int:
        """The position of the token to choose."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending

    @property
    def leaves_logits_alone(self) -> bool:
        """Whether the token is chosen by the logits as they are."""
        return not len(self.forbidden_token_ids) and not self.params.changes_logits

    @property
    def ruled_out_by(self) -> list[str]:
        """The names of the request's fields that rule tokens out here."""
        names = ["allowed_token_ids"] if self.params.allowed_token_ids is not None else []
        if len(self.forbidden_token_ids):
            forbidding = ["bad_words"] if self.params.bad_words else []
            if self.position - len(self.prompt_token_ids) < self.params.min_tokens:
                forbidding += ["min_tokens", "stop_token_ids"] if self.params.stop_token_ids else ["min_tokens"]
            names += forbidding or ["forbidden_token_ids"]
        return names


class PromptInput(NamedTuple):
    """Tokens of one prompt, to tell their log-probabilities."""

    sequence: int
    token_ids: Sequence[int]
    """Those that follow the first query tokens of the sequence's row, one after another."""
    num_logprobs: int
    """How many of the likeliest tokens to tell as well."""


@dataclass(slots=True)  # not frozen: that takes four times as long to make, and a step makes one for each sequence
class Sampled:
    """The token chosen for one SamplingInput, or why none can be; or a token of a prompt, which is given."""

    token_id: int
    logprob: float
    """Natural log of the model's own probability of the token: before penalties, temperature and filters."""
    top_logprobs: dict[int, float] | None
    """The log-probabilities of the reported tokens, likeliest first and the lowest id first among equals: those of
    `params.logprob_token_ids`, or else the `params.logprobs` likeliest; and the chosen one. None when not asked for."""
    error: str | None = None
    """Why no token can be chosen (`why_no_peak`, `why_nothing_left`): `token_id` is then 0, and means nothing."""


def why_no_peak(token_id: int, peak: float) -> str | None:
    """What is wrong with a model's logits whose largest one, the peak, is that of `token_id`; None if it is finite.
    NaN counts as the largest."""
    if math.isfinite(peak):
        return None
    if peak == -math.inf:
        return "the model's logits for the next token are minus infinity for every token: it leaves nothing to choose"
    found = f"NaN (first at token {token_id})" if math.isnan(peak) else "plus infinity"
    return (
        f"the model's logits for the next token hold {found}: the model read K/V that nobody wrote, its weights are "
        "damaged, or its arithmetic overflowed; check the weights, or compute in float32 (dtype)"
    )


def why_nothing_left(ruled_out_by: Sequence[str], peak: float) -> str:
    """Why the model's logits, which have a finite peak, have this one, which is not, once the request has changed them.
    `ruled_out_by`: `SamplingInput.ruled_out_by`."""
    if peak == math.inf or not ruled_out_by:
        return "repetition_penalty takes the logits beyond what a number can hold; give one nearer to 1"
    *others, last = ruled_out_by
    so_far = ", ".join(others)
    rule, change = (f"{so_far} and {last} together rule", f"{so_far} or {last}") if others else (f"{last} rules", last)
    return f"the request leaves no token to choose: {rule} out every token that the model allows; change {change}"


@dataclass(frozen=True, slots=True)
class BeamMove:
    """Beam `parent` continued by one token."""

    parent: int
    """Index into the beams given to `BeamSearch.step`."""
    token_id: int
    cumulative_logprob: float
    """Sum of the logprobs of all generated tokens, this one included."""


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What one step of beam search decided."""

    survivors: list[BeamMove]
    """The beams that go on, best first; empty when the search is over."""
    finished: list[tuple[BeamMove, float]]
    """Sequences that ended here and are kept for the ranking, each with its score (length penalty applied)."""


class BeamSearch(ABC):
    """Beam search of one request (paper, section 4.4 and Fig. 9), with transformers' rules.

    Ranks the candidates of all beams together; the engine carries the decisions out on the block tables.
    The engine steps a deep copy, and keeps it once the decisions are carried out: what raises changes nothing.
    """

    @abstractmethod
    def __init__(
        self, params: BeamSearchParams, prompt_length: int, max_length: int, eos_token_ids: Sequence[int]
    ) -> None:
        """`max_length`: prompt and output together, in tokens."""

    @abstractmethod
    def step(self, logits: Logits, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
        """`rows[i]` is the row of `logits` of beam i, `cumulative_logprobs[i]` its sum so far.

        At the first step there is one beam (the prompt), later as many as survived.
        """


SampleFunction = Callable[[Logits, Sequence[SamplingInput]], Sequence[Sampled]]
"""Chooses one token for each input. The same inputs give the same tokens, in any order and company.

Logits from which nothing can be chosen are an error of the inputs that use that row, and of no other. It need not wait
for the device: the tokens may be fetched when they are first looked at. The inputs are read before it returns.
"""


@dataclass(frozen=True, slots=True)
class Tier:
    """The parts of one of the two ways in which every component is written, as the engine takes them."""

    name: str
    block_allocator: type[BlockAllocator]
    block_table: type[BlockTable]
    beam_search: type[BeamSearch]
    sample: SampleFunction
    """How its runners choose tokens. The engine never calls it."""
