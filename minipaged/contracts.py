"""The contracts: the interfaces that a tier implements. (`errors.py` has the invariants and exceptions they name.)

minipaged is written twice: `reference/` to be read and `fast/` to be fast. Both implement the interfaces in this file,
and everything above them (engine, tests, grader) relies on these alone. The file is plain Python and imports no NumPy,
so that it runs wherever Python runs.

The terms used everywhere (Kwon et al., SOSP 2023, section 4):

- *block*: the keys and values of `block_size` consecutive tokens, in every layer. A *physical* block is
  a number in `range(num_blocks)`; a *logical* block is an index into one sequence's block table.
- *slot*: room for one token. Slot number = block * block_size + offset.
- *block table*: the list of physical blocks of one sequence, in logical order.
- *reference count*: the number of table entries (and prefix-cache entries) that hold a block.
- *copy-on-write*: a sequence that writes into a block held by others too takes a copy of it first.
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
"""An array [rows, vocab_size], of the type that its tier uses. The engine passes it on and never looks inside."""
TokenBits = Any
"""A NumPy array [ceil(vocab_size / 32)] uint32: bit `t & 31` of word `t >> 5` says whether token t may be chosen."""


# --- The block allocator --------------------------------------------------------------------------


class BlockAllocator(ABC):
    """Hands out the physical blocks of one pool. A block is a number in `range(num_blocks)`.

    A block is *free* (reference count 0) or *held* (1 or more):

        free --allocate--> held, 1 --share--> held, 2 ... --free--> held, 1 --free--> free

    A call that raises changes nothing (the invariant atomic-failure). Any class with the abstract members below is
    accepted as an allocator, whether or not it subclasses this one (see `engine.checked_allocator`).
    """

    @abstractmethod
    def __init__(self, num_blocks: int) -> None:
        """Create a pool of `num_blocks` free blocks. Raises ValueError if `num_blocks < 1`."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """The size of the pool, in blocks."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """The number of free blocks."""

    @abstractmethod
    def allocate(self) -> int:
        """Take a free block and return it; its reference count is now 1. Raises OutOfBlocks if no block is free."""

    @abstractmethod
    def share(self, block: int) -> None:
        """Add a reference to a held block. Raises BlockNotAllocated if it is not held."""

    @abstractmethod
    def free(self, block: int) -> None:
        """Give up one reference; at 0 the block is free again. Raises BlockNotAllocated if it is not held."""

    @abstractmethod
    def ref_count(self, block: int) -> int:
        """The reference count of `block`; 0 if it is free. Raises BlockNotAllocated for a number outside the pool."""

    @abstractmethod
    def copy_on_write(self, block: int) -> int:
        """Return the block that the caller may write to instead of `block`.

        This is `block` itself if the caller is its only holder. Otherwise it is a newly allocated block, one
        reference on `block` is given up, and the caller copies the contents. Raises OutOfBlocks, BlockNotAllocated.
        """

    def allocate_many(self, n: int) -> Sequence[int]:
        """Allocate `n` blocks, or raise OutOfBlocks and allocate none. Raises ValueError if `n` is negative."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks; ask for 0 or more")
        if n > self.num_free:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        taken: list[int] = []
        try:
            for _ in range(n):
                taken.append(self.allocate())
        except InvariantViolation:
            raise  # a broken allocator cannot roll back reliably, and the first broken invariant is the one to report
        except BaseException:
            for block in reversed(taken):
                self.free(block)
            raise
        return taken

    def share_many(self, blocks: Iterable[int]) -> None:
        """`share` each of `blocks` (a block may occur twice), or raise BlockNotAllocated and share none."""
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
        """`free` each of `blocks` in this order (one may occur twice), or raise BlockNotAllocated and free none."""
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

    Position p is in logical block `p // block_size` at offset `p % block_size`. All blocks but the last are full; the
    last is filled from its first slot on. The table holds one reference on each of its blocks.
    """

    @abstractmethod
    def __init__(self, block_size: int, allocator: BlockAllocator) -> None:
        """Create an empty table over `allocator`'s pool. Raises ValueError if `block_size < 1`."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[int]:
        """The physical blocks in logical order. The caller must not change them."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """The number of filled slots; they hold positions 0 .. num_tokens - 1."""

    @abstractmethod
    def blocks_needed(self, num_new_tokens: int) -> int:
        """The number of blocks that `append(num_new_tokens)` would allocate, including a copy-on-write."""

    @abstractmethod
    def append(self, num_new_tokens: int) -> list[CopyPair]:
        """Add slots for `num_new_tokens` more tokens, each in a block that only this table holds.

        Returns the copy to make before the new slots are written: one pair if the last block was shared and partly
        filled, else none. If the pool has too few free blocks, raises OutOfBlocks and changes nothing.
        """

    @abstractmethod
    def adopt(self, blocks: Sequence[int]) -> None:
        """Begin this empty table with full blocks that are already held elsewhere, and take a reference on each.

        If the sequence shares only the first tokens of the last block, `trim` follows.
        """

    @abstractmethod
    def fork(self) -> BlockTable:
        """Return a second table over the same blocks, which the two tables now share."""

    @abstractmethod
    def trim(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` positions; free the blocks after them, the last one first.

        `trim(0)` frees all blocks. Raises ValueError outside `0 <= num_tokens <= self.num_tokens`.
        """

    @abstractmethod
    def replace(self, logical_block: int, block: int) -> None:
        """Replace the table's block number `logical_block` by `block`, which has the same content. Share the new block,
        and free the old one."""

    @abstractmethod
    def relocate(self, blocks: Sequence[int], allocator: BlockAllocator) -> None:
        """Use `blocks` of another pool, which hold the same tokens, from now on (swapping).

        The caller has already taken this table's references on `blocks`; the table frees its old blocks.
        """

    @abstractmethod
    def slot_mapping(self, start: int, stop: int) -> Sequence[int]:
        """The slots of positions start .. stop - 1. Raises ValueError if one of them has no slot."""


# --- Running a step -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchRow:
    """The query tokens of one sequence (the tokens that a forward pass runs), with its block table."""

    token_ids: Sequence[int]
    """[num_query_tokens]. If the runner has not waited for the step before, -1 - i means choice i of that step."""
    first_position: int
    """The position of `token_ids[0]`; all earlier positions are in the KV cache already."""
    blocks: Sequence[int]
    """The sequence's block table, which covers positions 0 .. first_position + num_query_tokens - 1."""
    wants_logits: bool
    """Whether the logits after the last query token are needed."""
    num_prompt_logits: int = 0
    """The number of query tokens, from the first, whose logits are needed for the prompt's log-probabilities."""
    num_drafted: int = 0
    """The number of query tokens, from the last, that are guesses: the logits after the token before them, and after
    each of them, are needed."""

    @property
    def context_len(self) -> int:
        """The number of the sequence's tokens that have K and V after the pass."""
        return self.first_position + len(self.token_ids)

    def slots(self, block_size: int) -> list[int]:
        """The slots [num_query_tokens] to write K and V of the query tokens to."""
        return slots_of(self.blocks, self.first_position, self.context_len, block_size)


def slots_of(blocks: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """The slots of positions start .. stop - 1 of the sequence with this block table."""
    return [blocks[p // block_size] * block_size + p % block_size for p in range(start, stop)]


Batch = Sequence[BatchRow]
"""The rows of one forward pass. Prefill rows (many query tokens) and decode rows (one) may be mixed."""


class StepResult(NamedTuple):
    """The result of a step."""

    choices: Sequence[Sampled]
    """The chosen tokens, in the order of the rows. The runner may fetch them only when they are first read. If no token
    can be chosen, the `error` of its `Sampled` says why."""
    logits: Logits
    """Logits [rows whose `num_choices` is not 0, vocab_size], for beam search. A row with drafts has one more for
    each."""
    prompt_logprobs: Mapping[int, Sequence[Sampled]] = {}
    """Log-probabilities of prompt tokens, by sequence, if `SamplingParams.prompt_logprobs` asks for them: an entry for
    each prompt token that follows one of the row's query tokens. They too may be fetched only when first read."""
    drafted: Mapping[int, tuple[int, ...]] = {}
    """By sequence, the tokens that the runner's draft model has guessed for a row of TO_DRAFT."""


def num_standing(drafted: Sequence[int], choices: Sequence[Sampled]) -> int:
    """The number of drafted tokens that stand: those before the first that is not the token chosen in its place."""
    for number, (token_id, chosen) in enumerate(zip(drafted, choices, strict=False)):
        if chosen.token_id != token_id or chosen.error:
            return number
    return len(drafted)


class Runner(ABC):
    """Runs steps. Each tier's Llama is a runner; so are a model that checks every read, and a simulated machine.

    A runner that wants complete batches, and not the differences between steps, is a `mirror.MirroredRunner`.
    """

    @abstractmethod
    def run(self, step: StepInput) -> StepResult:
        """Run one step: apply its differences, move blocks, run the rows, and choose tokens.

        Running a row writes K and V of its query tokens into their slots and attends through its block table. After an
        error the next step is a `fresh` one, so that anything left half done is discarded.
        """

    @abstractmethod
    def costs(self) -> Costs:
        """The costs of swapping and recomputing on this machine. A tier measures them at the first call or earlier."""

    def read_blocks(self, blocks: Sequence[int]) -> Sequence[bytes]:
        """K and V of these device blocks after all steps so far, in the format that `BlockMoves.load` takes.
        (A simulated machine has none.)"""
        raise NotImplementedError(f"{type(self).__name__} has no blocks to read")

    def read_host_blocks(self, blocks: Sequence[int]) -> Sequence[bytes]:
        """K and V of these host blocks, in the same format. Every move that writes them is known to be done.
        (A simulated machine has none.)"""
        raise NotImplementedError(f"{type(self).__name__} has no blocks to read")

    def on_failure(self, call: Callable[[Exception], None]) -> None:
        """Register a function that is called, on any thread, if the runner fails between steps. (Most runners cannot
        fail then, and ignore this.)"""
        del call


# --- Choosing tokens ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """All that is needed to choose one token from a row of logits."""

    row: int
    """Index of the row in the logits. Several inputs may use the same row (parallel sampling, first token)."""
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seed: int
    """The request's seed: `params.seed`, or one that the engine drew for it."""
    stream: int
    """Index of the sequence among the request's `n`: 0 .. n - 1."""
    forbidden_token_ids: Sequence[int] = ()
    """Tokens that must not be chosen: they would end the sequence before `min_tokens`, or complete a bad word."""
    num_pending: int = 0
    """The number of tokens after `output_token_ids` that are still being chosen; 0 if a penalty needs to know them."""
    allowed: TokenBits | None = None
    """The tokens that a grammar allows next; None allows all. Tokens beyond the bits are forbidden. The array's content
    may change from step to step: each step reads it anew."""

    @property
    def position(self) -> int:
        """The position of the token to choose."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending

    @property
    def leaves_logits_alone(self) -> bool:
        """Whether the request changes no logit before the token is chosen."""
        return self.allowed is None and not len(self.forbidden_token_ids) and not self.params.changes_logits

    @property
    def ruled_out_by(self) -> list[str]:
        """The names of the request's fields that rule out tokens for this choice."""
        names = ["structured_outputs"] if self.allowed is not None else []
        names += ["allowed_token_ids"] if self.params.allowed_token_ids is not None else []
        if len(self.forbidden_token_ids):
            forbidding = ["bad_words"] if self.params.bad_words else []
            if self.position - len(self.prompt_token_ids) < self.params.min_tokens:
                forbidding += ["min_tokens", "stop_token_ids"] if self.params.stop_token_ids else ["min_tokens"]
            names += forbidding or ["forbidden_token_ids"]
        return names


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that were guessed for the end of one sequence, and all that is needed to verify them."""

    token_ids: Sequence[int]
    """[k], the drafted tokens; there may be none. Or [k + 1]: the last is a guess for the token after them, and has not
    been run."""
    inputs: Sequence[SamplingInput]
    """[k + 1]. Input i chooses the token after the first i drafted tokens: its output ends with them, and its row is
    the one after them."""


class PromptInput(NamedTuple):
    """Tokens of one prompt whose log-probabilities are to be reported."""

    sequence: int
    token_ids: Sequence[int]
    """Prompt tokens; entry i is the one that follows query token i of the sequence's row."""
    num_logprobs: int
    """The number of likeliest tokens to report in addition to each."""


@dataclass(slots=True)  # not frozen: a frozen one takes four times as long to make, and a step makes one per sequence
class Sampled:
    """A token with its log-probability: chosen for a SamplingInput (or why none can be), or given in a prompt."""

    token_id: int
    logprob: float
    """Natural log of the model's own probability of the token: before penalties, temperature and filters."""
    top_logprobs: dict[int, float] | None
    """Log-probabilities of the tokens to report: `params.logprob_token_ids`, or else the `params.logprobs` likeliest,
    and the chosen one. Likeliest first, then lowest id first. None if the request does not want them."""
    error: str | None = None
    """The reason why no token can be chosen (`why_no_peak`, `why_nothing_left`); `token_id` is then a meaningless 0."""


def why_no_peak(token_id: int, peak: float) -> str | None:
    """Say what is wrong with a model's logits whose largest one, `peak`, is that of `token_id`; None if it is finite.
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
    """Say why the request's changes made the largest logit, `peak`, infinite, when the model's own were finite.
    `ruled_out_by` is `SamplingInput.ruled_out_by`."""
    if peak == math.inf or not ruled_out_by:
        return "repetition_penalty makes the logits overflow; give one nearer to 1"
    *others, last = ruled_out_by
    so_far = ", ".join(others)
    rule, change = (f"{so_far} and {last} together rule", f"{so_far} or {last}") if others else (f"{last} rules", last)
    return f"the request leaves no token to choose: {rule} out every token that the model allows; change {change}"


@dataclass(frozen=True, slots=True)
class BeamMove:
    """A beam of the step before, `parent`, continued by one token."""

    parent: int
    """Index into the beams given to `BeamSearch.step`."""
    token_id: int
    cumulative_logprob: float
    """Sum of the logprobs of all generated tokens, including this one."""


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The decisions of one step of beam search."""

    survivors: list[BeamMove]
    """The beams that go on, best first; empty when the search is over."""
    finished: list[tuple[BeamMove, float]]
    """Sequences that ended in this step and stay in the ranking, each with its score (length penalty applied)."""


class BeamSearch(ABC):
    """Beam search of one request (paper, section 4.4 and Fig. 9), with transformers' rules.

    It ranks the candidates of all beams together, and the engine applies the decisions to the block tables. The engine
    steps a deep copy and keeps it only after it has applied the decisions, so that an error changes nothing.
    """

    @abstractmethod
    def __init__(
        self, params: BeamSearchParams, prompt_length: int, max_length: int, eos_token_ids: Sequence[int]
    ) -> None:
        """`max_length` is the limit on prompt and output together, in tokens."""

    @abstractmethod
    def step(self, logits: Logits, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
        """Rank the continuations of all beams, and decide which go on.

        `rows[i]` is beam i's row of `logits`, and `cumulative_logprobs[i]` its sum of logprobs so far. At the first
        step there is one beam, the prompt; later the beams are the survivors of the step before.
        """


VerifyFunction = Callable[[Logits, Sequence[Draft], Sequence[Logits] | None], Sequence[Sequence[Sampled]]]
"""Chooses the tokens that stand of each draft, and one more; the last argument has a row of logits for each drafted
token, from which a draft model has drawn it (`reference/speculation.py`)."""

SampleFunction = Callable[[Logits, Sequence[SamplingInput]], Sequence[Sampled]]
"""Chooses one token for each input. The token depends on its own input alone, not on the other inputs or their order.

If no token can be chosen from a row of logits, only the inputs that use this row get an error. The function need not
wait for the device: tokens may be fetched only when they are first read. It reads all inputs before it returns.
"""


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier's classes and functions, one for each component, as the engine uses them."""

    name: str
    block_allocator: type[BlockAllocator]
    block_table: type[BlockTable]
    beam_search: type[BeamSearch]
    sample: SampleFunction
    """Chooses tokens for the tier's runners. The engine never calls it."""
