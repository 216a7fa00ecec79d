"""A step as data: the input that the engine sends to a runner.

A runner (a tier's Llama, the content oracle, a simulated machine, a process elsewhere, a recording) keeps a *mirror* of
the sequences: each one's tokens, its block table, and how its tokens are chosen (`mirror.py`). A `StepInput` carries
only the changes since the step before. So a step in which all sequences go on decoding is a few bytes, for any number
of sequences; and a list of steps can be run again anywhere, in the same order.

- A sequence is named by a number, which is never used again.
- A step does not carry the tokens that the runner itself has chosen: the mirror appends them. It carries the tokens
  that the host has chosen (beam search).
- While a step is running, the host does not know its tokens. They are named by their index: choice i of that step,
  counted over its rows in order.
- With pipeline parallelism, steps are in *lanes*, each with its own sequences. A step carries the changes since the
  previous step of its lane; the blocks are common to all lanes.

All types here are plain, immutable Python; `step_files.py` describes their encoding as bytes, field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minipaged.params import SamplingParams

CopyPair = tuple[int, int]
"""(source block, destination block)."""

LOGITS = -1
"""The value of `Row.num_choices` for a row that returns its logits and chooses no token."""
TO_DRAFT = -1
"""In `Row.drafted`: a token that the runner's draft model is to guess."""


class BlockMoves(NamedTuple):
    """Blocks to move before a forward pass, in the order of the fields; each field is one batched call."""

    swap_out: tuple[CopyPair, ...] = ()
    """(device block, host block)."""
    poison: tuple[int, ...] = ()
    """Device blocks that were freed or newly allocated, to be filled with NaN. Empty unless debugging."""
    swap_in: tuple[CopyPair, ...] = ()
    """(host block, device block)."""
    copy: tuple[CopyPair, ...] = ()
    """(device block, device block), for copy-on-write. No destination is a source."""
    load: tuple[tuple[int, bytes], ...] = ()
    """(device block, its K and V as bytes), which another engine computed (`kv_connector.py`)."""


class Sampling(NamedTuple):
    """How to choose a sequence's tokens."""

    params: SamplingParams
    seed: int
    """The request's seed: `params.seed`, or one that the engine drew for it."""
    stream: int
    """Index of the sequence among the request's `n`: 0 .. n - 1."""
    forbidden_token_ids: tuple[int, ...] = ()
    """Tokens that must not be chosen before the output has `params.min_tokens` tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """`params.bad_words` as tokens. A word's last token must not be chosen if the output ends with its other tokens."""

    @property
    def needs_tokens(self) -> bool:
        """Whether the next token can be chosen only when the host knows all tokens before it."""
        waits = self.params.has_penalties or self.params.structured_outputs is not None
        return waits or any(len(word) > 1 for word in self.bad_words)

    def forbidden_after(self, output_token_ids: Sequence[int], num_pending: int = 0) -> tuple[int, ...]:
        """The tokens that must not be chosen next. `num_pending`: the number of output tokens still being chosen."""
        early = len(output_token_ids) + num_pending < self.params.min_tokens
        forbidden = self.forbidden_token_ids if early else ()
        if self.bad_words:
            known = len(output_token_ids)
            ends = (word for word in self.bad_words if [*word[:-1]] == [*output_token_ids[known - len(word) + 1 :]])
            forbidden += tuple(word[-1] for word in ends)
        return forbidden


class Begun(NamedTuple):
    """A sequence that is new to the runner in this lane."""

    sequence: int
    token_ids: tuple[int, ...]
    """The prompt, followed by the output so far."""
    prompt_length: int
    blocks: tuple[int, ...]
    """The sequence's block table."""
    sampling: Sampling | None
    """How the runner chooses its tokens; None if the host chooses them (beam search)."""


class Forked(NamedTuple):
    """A sequence that begins as a copy of another one, the parent, in its state after the step before."""

    sequence: int
    parent: int
    choice: int
    """Index of its latest token among those that the step before chose for the parent (0 is the parent's own). From now
    on it is also the sequence's `stream`. LOGITS if no token was chosen in that step."""


class TableChange(NamedTuple):
    """A block table that has changed: it grew, a block was copied or replaced, or all were given up or taken back."""

    sequence: int
    kept: int
    """The number of blocks at the table's beginning that have not changed."""
    blocks: tuple[int, ...]
    """All blocks after those. A sequence that waits, swapped out or dropped, has none."""


class ChosenToken(NamedTuple):
    """A token that the host chose. It replaces the token that the runner chose for this position, if there is one."""

    sequence: int
    position: int
    token_id: int


class AllowedTokens(NamedTuple):
    """The tokens that may be chosen in this step for a sequence whose output has a grammar."""

    sequence: int
    bits: bytes
    """A bit for each token of the vocabulary, in little-endian words of 32 bits: bit t % 32 of word t // 32 says
    whether token t may be chosen."""


class Row(NamedTuple):
    """The query tokens of one sequence: the tokens that a step runs."""

    sequence: int
    start: int
    """The position of the first query token; all earlier positions are in the KV cache already."""
    num_tokens: int
    num_choices: int
    """The number of tokens to choose after the last query token: 1; `n` after a prompt that forks; 0 if later steps run
    more of the prompt (or of dropped tokens) first; or LOGITS."""
    drafted: tuple[int, ...] = ()
    """The last query tokens, where these are guesses (or TO_DRAFT). Then one more token is chosen after each of them,
    and `num_choices` is 1. Only the choices up to the first that is not the drafted token count
    (`contracts.num_standing`)."""

    @property
    def num_chosen(self) -> int:
        """The number of tokens that the step chooses for the row."""
        return max(0, self.num_choices) + len(self.drafted)

    @property
    def stop(self) -> int:
        """The number of the sequence's tokens that have K and V after the step."""
        return self.start + self.num_tokens

    def next(self, steps: int = 1) -> Row:
        """The sequence's row `steps` steps later, if each step runs one token. (After drafts, nobody knows it yet.)"""
        return Row(self.sequence, self.stop + steps - 1, 1, min(self.num_choices, 1))


class StepInput(NamedTuple):
    """One step. A runner applies the fields in this order; anything that a field does not mention is unchanged.

    The rows of a step are those of the step before, in the same order and each one token further (`Row.next`), followed
    by `added`. Rows with `num_choices` 0 or with drafts do not go on, nor do sequences that have ended or that are
    `left_out`. (The step before is always the previous step of the same lane, except in `number`.)
    """

    number: int
    """The step's number: one more than that of the previous step of any lane, unless the step is `fresh`."""
    fresh: bool = False
    """Whether to forget all sequences and rows of the lane first, because a step has failed. (After a failure the next
    step of every lane is fresh.)"""
    forked: tuple[Forked, ...] = ()
    ended: tuple[int, ...] = ()
    """Sequences that will not run again in this lane; a preempted one may go on in another lane."""
    begun: tuple[Begun, ...] = ()
    tables: tuple[TableChange, ...] = ()
    told: tuple[ChosenToken, ...] = ()
    moves: BlockMoves = BlockMoves()
    left_out: tuple[int, ...] = ()
    added: tuple[Row, ...] = ()
    lane: int = 0
    """The step's lane. With pipeline parallelism there are several, with steps in flight at the same time."""
    allowed: tuple[AllowedTokens, ...] = ()
    """One entry for each sequence that has a grammar and chooses tokens in this step."""
