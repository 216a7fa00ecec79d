"""A step as data: what the engine asks of a runner, and what comes back.

Whoever runs steps (a tier's Llama, the content oracle, a simulated machine, a process elsewhere, a recording) keeps a
*mirror*: of each sequence its tokens, its block table, and how its tokens are chosen (`mirror.py`). A `StepInput`
carries only what has changed since the step before. So a step in which all go on decoding says hardly anything, however
many they are; and the same steps, in the same order, can be run anywhere.

- Sequences are named by numbers that are never used again.
- A token that a runner has chosen is not told to it: the mirror appends it by itself. What the host chose (beam search)
  is told.
- While a step is running, nobody on the host knows its tokens. Its choices are named by their place there: choice i of
  that step, counted over its rows in order.
- With pipeline parallelism steps come in *lanes*, each with sequences of its own. A step says what has changed since
  the one before it in its lane; the blocks are common to all.

All of it is plain Python and immutable; `step_files.py` has its encoding in bytes, field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minipaged.params import SamplingParams

CopyPair = tuple[int, int]
"""(source block, destination block)."""

LOGITS = -1
"""As `Row.num_choices`: no token is chosen, the logits are asked for."""


class BlockMoves(NamedTuple):
    """Blocks to move before a forward pass. Run in the order of the fields, each as one batched call."""

    swap_out: tuple[CopyPair, ...] = ()
    """(device block, host block)."""
    poison: tuple[int, ...] = ()
    """Device blocks whose content is now nobody's: filled with NaN. Empty unless debugging."""
    swap_in: tuple[CopyPair, ...] = ()
    """(host block, device block)."""
    copy: tuple[CopyPair, ...] = ()
    """(device block, device block), for copy-on-write. No destination is a source."""
    load: tuple[tuple[int, bytes], ...] = ()
    """(device block, its K and V): another engine computed them (`kv_connector.py`)."""


class Sampling(NamedTuple):
    """What choosing a sequence's tokens takes, beside its tokens."""

    params: SamplingParams
    seed: int
    """The request's seed: `params.seed`, or one drawn for it."""
    stream: int
    """Which of the request's `n` sequences: 0 .. n - 1."""
    forbidden_token_ids: tuple[int, ...] = ()
    """Tokens that must not be chosen before there are `params.min_tokens`."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """`params.bad_words` in tokens: the last of them must not be chosen where the output ends with those before it."""

    @property
    def needs_tokens(self) -> bool:
        """Whether the next token cannot be chosen before those until then are known to the host."""
        return self.params.has_penalties or any(len(word) > 1 for word in self.bad_words)

    def forbidden_after(self, output_token_ids: Sequence[int], num_pending: int = 0) -> tuple[int, ...]:
        """The tokens that must not be chosen next. `num_pending`: so many more are being chosen, and not known."""
        early = len(output_token_ids) + num_pending < self.params.min_tokens
        forbidden = self.forbidden_token_ids if early else ()
        if self.bad_words:
            known = len(output_token_ids)
            ends = (word for word in self.bad_words if [*word[:-1]] == [*output_token_ids[known - len(word) + 1 :]])
            forbidden += tuple(word[-1] for word in ends)
        return forbidden


class Begun(NamedTuple):
    """A sequence that the runner does not know yet in this lane."""

    sequence: int
    token_ids: tuple[int, ...]
    """Prompt, and output as far as there is some."""
    prompt_length: int
    blocks: tuple[int, ...]
    """Its block table."""
    sampling: Sampling | None
    """None: the host chooses its tokens (beam search)."""


class Forked(NamedTuple):
    """A sequence that begins as a copy of another, as that was after the step before."""

    sequence: int
    parent: int
    choice: int
    """Its latest token is this one of those that the step before chose for the parent (0 is the parent's own), and it
    is sample number `choice` from now on. LOGITS: nothing was chosen there."""


class TableChange(NamedTuple):
    """A block table that has changed: it grew, a block was copied or exchanged, or it was given up, or taken back."""

    sequence: int
    kept: int
    """So many blocks at its beginning are as they were."""
    blocks: tuple[int, ...]
    """Those after them, all of them. A sequence that waits has none, be it swapped out or dropped."""


class ChosenToken(NamedTuple):
    """A token that the host chose. Where the runner has chosen one for that position, this one takes its place."""

    sequence: int
    position: int
    token_id: int


class Row(NamedTuple):
    """The tokens of one sequence that a step runs: its query tokens."""

    sequence: int
    start: int
    """The position of the first: all before it is in the KV cache already."""
    num_tokens: int
    num_choices: int
    """How many tokens to choose after the last of them: 1; `n` after a prompt that forks; 0 where there is more to run
    first; or LOGITS."""

    @property
    def stop(self) -> int:
        """How many of the sequence's tokens have K and V after the step."""
        return self.start + self.num_tokens

    def next(self, steps: int = 1) -> Row:
        """The same sequence after so many steps, one token further in each."""
        return Row(self.sequence, self.stop + steps - 1, 1, min(self.num_choices, 1))


class StepInput(NamedTuple):
    """One step. A runner takes the fields in this order; what a field leaves out is as it was.

    The rows of a step are those of the step before, in the same order and each one token further (`Row.next`), and
    after them `added`. Rows that chose nothing do not go on, nor do sequences that have ended or that are `left_out`.
    (The step before is everywhere the one before in the same lane, but for the number.)
    """

    number: int
    """The step's: one more than that of the step before, in whatever lane, unless it is `fresh`."""
    fresh: bool = False
    """Forget all sequences and rows of the lane first: something has failed, and what follows begins anew. (When steps
    fail, the next one of every lane is fresh.)"""
    forked: tuple[Forked, ...] = ()
    ended: tuple[int, ...] = ()
    """Sequences that will not run again in this lane; one that was preempted may go on in another."""
    begun: tuple[Begun, ...] = ()
    tables: tuple[TableChange, ...] = ()
    told: tuple[ChosenToken, ...] = ()
    moves: BlockMoves = BlockMoves()
    left_out: tuple[int, ...] = ()
    added: tuple[Row, ...] = ()
    lane: int = 0
    """Of several with pipeline parallelism, whose steps are in flight at the same time."""
