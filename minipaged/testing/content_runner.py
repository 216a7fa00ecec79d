"""A model without weights that checks every read: the content oracle.

Instead of K/V, each slot holds the name of the token prefix that wrote it. Before a row is run, everything that its
block table leads to is compared with the tokens that the engine believes the sequence to have: the invariant `content`.
The logits depend only on the prefix found in memory, so a wrong read also shows in the tokens. A prefix begins with the
salt of its request, if there is one, so a block that is shared between salts is a wrong read, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from minipaged.contracts import Batch, Logits, PromptInput, Sampled, SampleFunction, SamplingInput, slots_of
from minipaged.engine.engine import Engine
from minipaged.engine.grouped_table import first_seen
from minipaged.errors import Invariant, InvariantViolation
from minipaged.events import HOLE
from minipaged.mirror import Mirror, MirroredRunner
from minipaged.scheduling import Costs
from minipaged.steps import BlockMoves, StepInput
from minipaged.testing.fake_model import FakeModel

Prefix = int
"""A token prefix, as a number given to it when it is first seen; 0 is the empty prefix."""


class Prefixes:
    """Numbers for token prefixes: equal numbers mean equal tokens."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Prefix, int], Prefix] = {}

    def root(self, salt: int) -> Prefix:
        """Return the empty prefix of requests with this salt, which is not 0."""
        return self.extend(0, -salt)

    def extend(self, prefix: Prefix, token: int) -> Prefix:
        return self._numbers.setdefault((prefix, token), len(self._numbers) + 1)

    def tokens(self, prefix: Prefix) -> list[int]:
        """Return the tokens of a numbered prefix."""
        steps, tokens = list(self._numbers), list[int]()
        while prefix:
            prefix, token = steps[prefix - 1]
            tokens.append(token)
        return [token for token in reversed(tokens) if token >= 0]  # a salt is no token


@dataclass(frozen=True)
class GivenRow:
    """A row of a batch, with copies of everything that later steps change."""

    sequence: int
    tokens_before: list[int]
    token_ids: list[int]
    slots: list[list[int]]
    """The slots of the query tokens in each group of layers."""
    blocks: list[int]
    wants_logits: bool
    num_prompt_logits: int
    num_drafted: int


@dataclass(frozen=True)
class WrongRead:
    """A slot that does not hold what its reader expects."""

    sequence: int
    """The sequence that reads."""
    position: int
    block: int
    wanted: list[int]
    """The tokens whose K/V should be there: the sequence's tokens up to this position."""
    found: list[int] | None
    """The tokens whose K/V are there; None for memory that was never written."""


class CheckedMirror(Mirror):
    """A mirror that is compared with the engine's own state after each step."""

    def __init__(self, runner: ContentRunner) -> None:
        super().__init__()
        self._runner = runner
        self._unfilled: dict[int, int] = {}
        """By sequence, the first position whose slot its table does not have yet (`Engine.takes_short_way`)."""

    def apply(self, step: StepInput, *, wait: bool = True) -> None:
        super().apply(step, wait=wait)
        if self._runner.engine is not None:
            self._compare(self._runner.engine, step.lane)

    def sampling_inputs(self) -> tuple[SamplingInput, ...]:
        """Check the inputs at every call, because those of the step before may be used again."""
        inputs = super().sampling_inputs()
        rows = [(row, i) for row in self.rows for i in range(row.num_chosen)]
        for given, (row, i) in zip(inputs, rows, strict=True):
            sequence = self.sequences[row.sequence]
            assert sequence.sampling is not None
            position, output = row.stop, sequence.output_token_ids
            if row.drafted:
                position, output = row.stop - len(row.drafted) + i, [*output, *row.drafted[:i]]
            num_pending = position - len(sequence.prompt_token_ids) - len(output)
            forbidden = sequence.sampling.forbidden_after(output, num_pending)
            is_its_own = output == given.output_token_ids if i else given.output_token_ids is sequence.output_token_ids
            if not is_its_own or given.seed != sequence.sampling.seed:
                self._differs(f"the sampling inputs for sequence {row.sequence} are those of another sequence")
            allowed = None if given.allowed is None else given.allowed.tobytes()
            if self._runner.engine is not None and allowed != _allowed(self._runner.engine, row.sequence):
                self._differs(f"sequence {row.sequence} chooses among other tokens than its grammar allows")
            if (given.position, given.forbidden_token_ids) != (position, forbidden):
                self._differs(
                    f"sequence {row.sequence} chooses a token for position {given.position} instead of {position}"
                )
        return inputs

    def _compare(self, engine: Engine, lane: int) -> None:
        """Raise InvariantViolation unless mirror and engine agree.

        Sequences that have not run yet, or not since an error, are not in the mirror.
        """
        requests = (*engine.scheduler.running, *engine.scheduler.waiting)
        theirs = {sequence.sequence_id: sequence for request in requests for sequence in request.sequences}
        for number, mine in self.sequences.items():
            if number not in theirs:
                self._differs(f"the mirror still has sequence {number}, which has ended")
            if theirs[number].lane != lane:
                self._differs(
                    f"the mirror of lane {lane} has sequence {number}, which is in lane {theirs[number].lane}"
                )
            entries = [] if theirs[number].swapped else list(theirs[number].entries)
            known = [entry if entry == HOLE else block for entry, block in zip(entries, mine.blocks, strict=False)]
            if known != entries or len(mine.blocks) != len(entries):  # a hole is not told
                self._differs(f"the block table of sequence {number} is {entries}, in the mirror {mine.blocks}")
            # The tokens that the step in flight chooses may be known on one side only.
            pairs = zip(theirs[number].tokens, mine.token_ids(0, mine.num_tokens), strict=False)
            most_ahead = 0 if mine.sampling is None else 1
            if abs(mine.num_tokens - len(theirs[number].tokens)) > most_ahead or any(a != b for a, b in pairs):
                self._differs(f"the tokens of sequence {number} are {theirs[number].tokens}, in the mirror others")
        for row in self.rows:
            table, blocks = theirs[row.sequence].table, self.sequences[row.sequence].blocks
            # On the short way the table fills its blocks later, but they already have the slots: those that follow from
            # the blocks, which are compared above. The table's own answer is compared by the sequence's next step after
            # it has filled them; if the sequence ends first, it is not.
            start = min(row.start, self._unfilled.pop(row.sequence, row.start))
            stop = min(row.stop, table.num_tokens) if engine.takes_short_way else row.stop
            slots = list(table.slot_mapping(start, stop)) if stop > start else []
            if slots != [slot for group in self._runner.slots(blocks, start, stop) for slot in group]:
                self._differs(f"positions {start} to {stop - 1} of blocks {blocks} cannot be in slots {slots}")
            if stop < row.stop:
                self._unfilled[row.sequence] = max(start, stop)
            if row.stop > len(blocks) // len(self._runner.windows) * self._runner.block_size:
                self._differs(f"blocks {blocks} of sequence {row.sequence} have no slot for position {row.stop - 1}")

    def _differs(self, message: str) -> NoReturn:
        raise InvariantViolation(Invariant.CONTENT, message)


def _allowed(engine: Engine, number: int) -> bytes | None:
    """The tokens that a running sequence's grammar allows next, as bits; None if it has no grammar."""
    running = (sequence for request in engine.scheduler.running for sequence in request.sequences)
    grammar = next((sequence.grammar for sequence in running if sequence.sequence_id == number), None)
    return grammar.bits if grammar else None


def _held_on_host(engine: Engine, block: int) -> bool:
    """Whether a host block has a holder: the floor below the prefix cache keeps what came back to the device."""
    allocator = engine.blocks.host_allocator
    return allocator is not None and allocator.ref_count(block) > 0


@cache
def numpy_model() -> FakeModel:
    """The default model. (Where there is no NumPy, another one is passed.)"""
    from minipaged.testing.numpy_model import NumpyModel

    return NumpyModel()


class ContentRunner(MirroredRunner):
    """Runs steps on memory that remembers its writers.

    `choose`: the function that chooses tokens; None: the model's own. `model`: the source of the logits; None:
    `NumpyModel`, whose choices are those of the reference tier. `windows`: the window of each group of layers, or None.
    """

    def __init__(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        block_size: int,
        vocab_size: int,
        swap_is_cheap: bool = True,
        choose: SampleFunction | None = None,
        model: FakeModel | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        super().__init__(lambda: CheckedMirror(self))
        self.windows = windows
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.swap_is_cheap = swap_is_cheap
        self.prefixes = Prefixes()
        self._roots: dict[int, Prefix] = {}
        """The empty prefix of each sequence that has a salt."""
        self.device: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[int | None]] = [[None] * block_size for _ in range(num_swap_blocks)]
        self.prompt_logits: dict[int, list[Any]] = {}
        """Prompt logits by sequence, kept until their log-probabilities are reported."""
        self.engine: Engine | None = None
        """The engine whose sequences the mirror is compared with. Set by the test."""
        self.model = model or numpy_model()
        self._choose = choose or self.model.tier.sample

    def move(self, moves: BlockMoves) -> None:
        for device, host in moves.swap_out:
            self.host[host] = list(self.device[device])
        for block in moves.poison:
            self.device[block] = [None] * self.block_size
        for host, device in moves.swap_in:
            self.device[device] = list(self.host[host])
        for host in {host for host, _ in moves.swap_in}:
            if self.engine is None or not _held_on_host(self.engine, host):
                self.host[host] = [None] * self.block_size
        assert not {source for source, _ in moves.copy} & {destination for _, destination in moves.copy}
        for source, destination in moves.copy:
            self.device[destination] = list(self.device[source])

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> list[list[int]]:
        """The slots of positions start to stop - 1, by group of layers. `blocks`: the entries of the block table."""
        groups = len(self.windows)
        return [slots_of(blocks[group::groups], start, stop, self.block_size) for group in range(groups)]

    def forward(self, batch: Batch) -> Any:
        return self.compute(self.take(batch))

    def take(self, batch: Batch) -> list[GivenRow]:
        """Return copies of the rows when a batch is handed over. `batch`: all rows of the step, or the first few."""
        self._note_salts()
        given = []
        for row, of in zip(self.mirror.rows, batch, strict=False):
            before = self.mirror.sequences[row.sequence].token_ids(0, row.start)
            slots = self.slots(of.blocks, row.start, row.stop)
            blocks = list(of.blocks)
            wanted = (of.wants_logits, of.num_prompt_logits, of.num_drafted)
            given.append(GivenRow(row.sequence, before, list(of.token_ids), slots, blocks, *wanted))
        return given

    def compute(self, rows: Sequence[GivenRow]) -> Logits:
        """Run the forward pass. Since `take`, only memory and the tokens being chosen may have changed."""
        tokens = [[*row.tokens_before, *row.token_ids] for row in rows]
        for row, known in zip(rows, tokens, strict=True):  # all writes first, as in a layer of a real model
            prefix = self._roots.get(row.sequence, 0)
            for token in row.tokens_before:
                prefix = self.prefixes.extend(prefix, token)
            for token, *slots in zip(known[len(row.tokens_before) :], *row.slots, strict=True):
                prefix = self.prefixes.extend(prefix, token)
                for group, slot in enumerate(slots):
                    self.device[slot // self.block_size][slot % self.block_size] = self._content(prefix, group)
        logits = []
        for row, known in zip(rows, tokens, strict=True):
            found = self._read(row.sequence, row.blocks, known, len(row.tokens_before))
            if row.wants_logits:
                lengths = range(len(found) - row.num_drafted, len(found) + 1)
                logits += [self.model.logits(found[:length], self.vocab_size) for length in lengths]
            if row.num_prompt_logits:
                first = len(row.tokens_before) + 1
                lengths = range(first, first + row.num_prompt_logits)
                self.prompt_logits[row.sequence] = [self.model.logits(found[:n], self.vocab_size) for n in lengths]
        return self.model.batch(logits, self.vocab_size)

    def prompt_logprobs(self, inputs: Sequence[PromptInput]) -> Mapping[int, Sequence[Sampled]]:
        return {
            sequence: self.model.logprobs(self.prompt_logits.pop(sequence), token_ids, num_logprobs)
            for sequence, token_ids, num_logprobs in inputs
        }

    def sample(self, logits: Logits, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
        return self._choose(logits, inputs)

    def costs(self) -> Costs:
        """Assumed costs: a millisecond per token; a microsecond per block, or a second if swapping is not cheap."""
        return Costs(
            seconds_per_copy=(1e-6 if self.swap_is_cheap else 1.0) / 2,
            copies_per_block=1,
            block_bytes=0,
            link_bytes_per_second=1.0,
            prefill_tokens_per_second=1e3,
        )

    def _content(self, prefix: Prefix, group: int) -> int:
        """What a slot holds: the prefix that wrote it, and the group of layers for which it did, as one number."""
        return prefix * len(self.windows) + group

    def _note_salts(self) -> None:
        """Note where the engine's sequences with a salt begin. A step does not have salts: no model needs them."""
        scheduler = self.engine.scheduler if self.engine else None
        for request in (*scheduler.running, *scheduler.waiting) if scheduler else ():
            for sequence in request.sequences:
                if sequence.salt:
                    self._roots[sequence.sequence_id] = self.prefixes.root(sequence.salt)

    def _read(self, sequence: int, blocks: Sequence[int], tokens: list[int], start: int) -> list[int]:
        """Return the tokens found in memory. They equal `tokens`, unless `on_wrong_read` let a wrong read pass.

        A group of layers reads what the query tokens see, which begin at `start`. A position that none of them sees is
        taken from `tokens`.
        """
        read, prefix = list[int](), self._roots.get(sequence, 0)
        first = [first_seen(window, start) for window in self.windows]
        for position, token in enumerate(tokens):
            prefix = self.prefixes.extend(prefix, token)
            here = [token]
            for group, seen in enumerate(first):
                if position < seen:
                    continue
                block = blocks[position // self.block_size * len(first) + group]
                found = None if block == HOLE else self.device[block][position % self.block_size]
                if found != self._content(prefix, group):
                    there = None if found is None else self.prefixes.tokens(found // len(first))
                    self.on_wrong_read(WrongRead(sequence, position, block, tokens[: position + 1], there))
                    here = there or []
            read += here
        return read

    def on_wrong_read(self, read: WrongRead) -> None:
        """Raise InvariantViolation for the invariant `content`. If an override returns, reading goes on."""
        holds = "nothing" if read.found is None else "the K/V of other tokens"
        raise InvariantViolation(
            Invariant.CONTENT, f"position {read.position} is in block {read.block}, which holds {holds}"
        )
