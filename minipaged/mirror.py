"""The mirror: a runner's copy of the sequences, kept up to date by the differences that steps carry (`steps.py`).

    StepInput ──► Mirror.apply ──► a complete batch: each row's tokens, positions and block table;
                                   and the inputs for choosing the next tokens
                  Mirror.chosen ◄── the choices

A `MirroredRunner` is a model that receives complete batches and no differences. The reference's Llama is one, and so
are the models without weights that tests, grader and tutorials run. A runner that makes use of the differences (the
fast tier keeps block tables, positions and tokens on the device) has a mirror and reads the steps itself. With pipeline
parallelism there is a mirror for each lane of steps (`PerLane`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from minipaged.contracts import (
    Batch,
    BatchRow,
    Logits,
    PromptInput,
    Runner,
    Sampled,
    SamplingInput,
    StepResult,
    TokenBits,
    num_standing,
)
from minipaged.steps import Begun, BlockMoves, Row, Sampling, StepInput


class MirroredSequence:
    """A runner's copy of one sequence."""

    __slots__ = ("allowed", "blocks", "first_choice", "output_token_ids", "prompt_token_ids", "sampling")

    def __init__(
        self, prompt: tuple[int, ...], output: list[int], blocks: Sequence[int], sampling: Sampling | None
    ) -> None:
        self.prompt_token_ids = prompt
        self.output_token_ids = output
        """The output so far, without tokens that the step before has chosen and that have not been read yet."""
        self.blocks = list(blocks)
        self.sampling = sampling
        self.first_choice = 0
        """Index of its first choice in the latest step that chose tokens for it."""
        self.allowed: TokenBits | None = None
        """The tokens that its grammar allows in the latest step that chose tokens for it; None without a grammar. Each
        step writes into the same array."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The tokens at positions start .. stop - 1, as far as they are known."""
        length = len(self.prompt_token_ids)
        output = self.output_token_ids[max(0, start - length) : max(0, stop - length)]
        return [*self.prompt_token_ids[start:stop], *output]


class _Chosen(NamedTuple):
    """The choices of a step, which may not have been read yet."""

    sequences: Sequence[MirroredSequence]
    indices: Sequence[int]
    """For each sequence, the index of the choice that is its next token."""
    drafted: Sequence[tuple[int, ...]]
    """For each sequence, the tokens that were drafted for it; they have a choice each, before one more."""
    choices: Sequence[Sampled]


class Rows:
    """The rows of the latest step. A runner that computes nothing and only counts needs no more than these.

    The rows are stored as of the last step that changed them. Steps in which every row just goes on are counted and
    touch no row. The rows are brought up to date when they are read and when a step changes them.
    """

    def __init__(self) -> None:
        self.number = 0
        """The number of the latest step."""
        self.num_choices = 0
        """The number of tokens that the step chooses."""
        self.num_query_tokens = 0
        self.num_context_tokens = 0
        """Tokens that have K and V after the step, summed over the rows."""
        self.num_steady = 0
        """The number of steps since the rows last changed; in each of them every row just went on."""
        self._rows: list[Row] = []  # as they were `num_steady` steps ago
        self._all_go_on = False  # whether each row chooses one token

    def follow(self, step: StepInput) -> None:
        """Update the rows to the lane's next step."""
        self.number = step.number
        changed = step.fresh or step.ended or step.told or step.left_out or step.added
        if changed or not self._all_go_on:
            self._change(step)
        else:
            self.num_steady += 1
            self.num_query_tokens = len(self._rows)
            self.num_context_tokens += len(self._rows)

    def _change(self, step: StepInput) -> None:
        before = [] if step.fresh else self._rows
        out, steps = {*step.ended, *step.left_out}, self.num_steady + 1
        going = [row.next(steps) for row in before if row.num_choices and not row.drafted and row.sequence not in out]
        self._rows, self.num_steady = [*going, *step.added], 0
        numbers = [row.num_choices + len(row.drafted) for row in self._rows]
        self._all_go_on = numbers.count(1) == len(numbers)
        self.num_choices = sum([number for number in numbers if number > 0])
        self.num_query_tokens = sum([row.num_tokens for row in self._rows])
        self.num_context_tokens = sum([row.stop for row in self._rows])

    def fill_in(self, drafted: Mapping[int, tuple[int, ...]]) -> None:
        """Put guessed tokens, given by sequence, in the place of TO_DRAFT."""
        self._rows = [row._replace(drafted=drafted.get(row.sequence, row.drafted)) for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        steps = self.num_steady
        return (row.next(steps) for row in self._rows) if steps else iter(self._rows)


class Mirror:
    """All sequences of one lane, and the rows of its latest step."""

    def __init__(self) -> None:
        self.rows = Rows()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.sequences: dict[int, MirroredSequence] = {}
        self._choosing: list[MirroredSequence] = []  # the sequences of the rows that choose tokens
        self._first_choices: list[int] = []  # for each of them, the index of its first choice
        self._drafted: list[tuple[int, ...]] = []  # for each of them, its drafted tokens
        self._needs_tokens = False
        self._inputs: tuple[SamplingInput, ...] = ()  # those of the step before, or empty if they cannot be used again
        self.prompt_inputs: list[PromptInput] = []
        """Prompt tokens whose log-probabilities the latest step reports, in the order of its rows."""
        self._unsettled: list[_Chosen] = []
        self.latest: Sequence[Sampled] = ()
        """The choices of the latest step that ran."""

    # --- Following --------------------------------------------------------------------------------

    def apply(self, step: StepInput, *, wait: bool = True) -> None:
        """Apply one step's differences. After an error the mirror is half changed, and the next step must be fresh.

        `wait`: read the choices of the step before. If false, a token that is not known yet is named by the index of
        its choice (`BatchRow.token_ids`). Choices of earlier steps are known: the engine reads them one step later.
        """
        if step.fresh:
            self._begin_anew()
        self.rows.follow(step)
        self._settle(keep=0 if wait or step.told or step.forked or any(self._drafted) else 1)
        self._follow_sequences(step)
        self.prompt_inputs = []
        if not self.rows.num_steady:
            self._inputs = ()
            self._note_choices()
            self._note_prompts()
        if self._needs_tokens:  # the engine has already waited for these tokens
            self._settle(keep=0)

    def fill_in(self, drafted: Mapping[int, tuple[int, ...]]) -> None:
        """Put the tokens that a draft model has guessed, given by sequence, in the place of TO_DRAFT."""
        if drafted:
            self.rows.fill_in(drafted)
            self._note_choices()

    def chosen(self, choices: Sequence[Sampled]) -> None:
        """Take the choices of the step applied last. They are read only when they are needed."""
        if len(choices) != self.rows.num_choices:
            raise ValueError(f"{len(choices)} tokens were chosen, not {self.rows.num_choices}")
        self.latest = choices
        self._unsettled.append(_Chosen(self._choosing, self._first_choices, self._drafted, choices))

    def _settle(self, keep: int) -> None:
        """Append the tokens of all choices but the latest `keep`."""
        while len(self._unsettled) > keep:
            sequences, indices, drafts, choices = self._unsettled.pop(0)
            tokens = [sampled.token_id for sampled in choices]
            for sequence, index, drafted in zip(sequences, indices, drafts, strict=True):
                if drafted:
                    standing = num_standing(drafted, choices[index : index + len(drafted)])
                    sequence.output_token_ids += tokens[index : index + standing + 1]
                else:
                    sequence.output_token_ids.append(tokens[index])

    def _follow_sequences(self, step: StepInput) -> None:
        sequences = self.sequences
        for child, parent, choice in step.forked:
            sequences[child] = self._fork(sequences[parent], choice)
        for ended in step.ended:
            del sequences[ended]
        for begun in step.begun:
            sequences[begun.sequence] = _begin(begun)
        for changed, kept, blocks in step.tables:
            sequences[changed].blocks[kept:] = blocks
        for told, position, token in step.told:
            sequence = sequences[told]
            sequence.output_token_ids[position - len(sequence.prompt_token_ids) :] = [token]
        for number, bits in step.allowed:
            sequence, allowed = sequences[number], token_bits(bits)
            if sequence.allowed is None:
                sequence.allowed = allowed.copy()
            else:
                sequence.allowed[:] = allowed

    def _fork(self, parent: MirroredSequence, choice: int) -> MirroredSequence:
        output, sampling = list(parent.output_token_ids), parent.sampling
        if choice >= 0:
            assert sampling is not None
            output[-1] = self.latest[parent.first_choice + choice].token_id
            sampling = sampling._replace(stream=choice)
        return MirroredSequence(parent.prompt_token_ids, output, parent.blocks, sampling)

    def _note_choices(self) -> None:
        """Note which sequence each choice of this step belongs to."""
        self._choosing, self._first_choices, self._drafted, self._needs_tokens = [], [], [], False
        num_choices = 0
        for row in self.rows:
            if row.num_choices > 0:
                sequence = self.sequences[row.sequence]
                sequence.first_choice = num_choices
                self._choosing.append(sequence)
                self._first_choices.append(num_choices)
                self._drafted.append(row.drafted)
                num_choices += row.num_chosen
                self._needs_tokens |= sequence.sampling is not None and sequence.sampling.needs_tokens

    def _note_prompts(self) -> None:
        """Note the prompt tokens whose log-probabilities are wanted. One sequence of a request reports them."""
        for row in self.rows:
            sampling = self.sequences[row.sequence].sampling
            if sampling is None or sampling.params.prompt_logprobs is None or sampling.stream:
                continue
            if followers := self.sequences[row.sequence].prompt_token_ids[row.start + 1 : row.stop + 1]:
                self.prompt_inputs.append(PromptInput(row.sequence, followers, sampling.params.prompt_logprobs))

    # --- The inputs of the model ------------------------------------------------------------------

    def batch(self) -> list[BatchRow]:
        """The rows of the latest step, complete with tokens, positions and block tables."""
        pending: dict[MirroredSequence, int] = {}
        for chosen in self._unsettled:
            pending = dict(zip(chosen.sequences, chosen.indices, strict=True))
        asked = {prompt.sequence: len(prompt.token_ids) for prompt in self.prompt_inputs}
        batch: list[BatchRow] = []
        for row in self.rows:
            sequence = self.sequences[row.sequence]
            tokens = sequence.token_ids(row.start, row.stop)
            if len(tokens) + len(row.drafted) < row.num_tokens:
                tokens.append(-1 - pending[sequence])
            tokens += row.drafted
            num_asked = asked.get(row.sequence, 0)
            wants_logits, num_drafted = row.num_choices != 0, len(row.drafted)
            batch.append(BatchRow(tokens, row.start, sequence.blocks, wants_logits, num_asked, num_drafted))
        return batch

    def sampling_inputs(self) -> tuple[SamplingInput, ...]:
        """One input for each token to choose, in the order of the rows.

        Returns the inputs of the step before if only positions and allowed tokens have moved on, since an input's
        position moves with its output, and its allowed tokens are written into the same array. That is so if every row
        just goes on, each has the same number of pending tokens as before, and no token can become forbidden.
        """
        if self._inputs:
            first = next(iter(self.rows))
            if self._inputs[0].num_pending == first.stop - self.sequences[first.sequence].num_tokens:
                return self._inputs
        inputs: list[SamplingInput] = []
        may_come_again = self.rows.num_steady > 0  # when rows have just changed, one that came back has none pending
        place = -1  # the row of the logits
        for row in self.rows:
            if row.num_choices <= 0:
                place += row.num_choices < 0
                continue
            sequence = self.sequences[row.sequence]
            sampling, output = sequence.sampling, sequence.output_token_ids
            assert sampling is not None
            num_pending = row.stop - len(row.drafted) - sequence.num_tokens
            for i in range(len(row.drafted) + 1):
                place += 1
                if i:
                    output = [*output, row.drafted[i - 1]]
                forbidden: tuple[int, ...] = ()
                if sampling.forbidden_token_ids or sampling.bad_words:  # hardly ever
                    forbidden = sampling.forbidden_after(output, num_pending)
                    may_come_again &= not forbidden and not sampling.bad_words
                inputs += [
                    SamplingInput(
                        row=place,
                        params=sampling.params,
                        prompt_token_ids=sequence.prompt_token_ids,
                        output_token_ids=output,
                        seed=sampling.seed,
                        stream=sampling.stream + choice,
                        forbidden_token_ids=forbidden,
                        num_pending=num_pending,
                        allowed=sequence.allowed,
                    )
                    for choice in range(row.num_choices)
                ]
        chosen_for = tuple(inputs)
        self._inputs = chosen_for if may_come_again else ()
        return chosen_for


def token_bits(bits: bytes) -> TokenBits:
    """The bits of a step (`steps.AllowedTokens`) as an array."""
    import numpy as np

    return np.frombuffer(bits, "<u4")


def _begin(begun: Begun) -> MirroredSequence:
    prompt, output = begun.token_ids[: begun.prompt_length], begun.token_ids[begun.prompt_length :]
    return MirroredSequence(prompt, list(output), begun.blocks, begun.sampling)


Kept = TypeVar("Kept")


class PerLane(Generic[Kept]):
    """One object for each lane of steps: a mirror, or rows."""

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make = make
        self._by_lane: dict[int, Kept] = {}
        self._number = 0  # the number of the latest step

    def of(self, step: StepInput) -> Kept:
        """The object of the step's lane. Raises ValueError for a step that is not the next one."""
        if not step.fresh and step.number != self._number + 1:
            raise ValueError(f"step {step.number} cannot follow step {self._number}; only a fresh one can")
        self._number = step.number
        if step.lane not in self._by_lane:
            self._by_lane[step.lane] = self._make()
        return self._by_lane[step.lane]


class MirroredRunner(Runner):
    """A model that runs complete batches one after another, each once the tokens of the batch before are known."""

    def __init__(self, make_mirror: Callable[[], Mirror] = Mirror) -> None:
        self.mirrors = PerLane(make_mirror)
        self.mirror = make_mirror()
        """The mirror of the lane whose step is being run."""

    @abstractmethod
    def move(self, moves: BlockMoves) -> None:
        """Swap out, poison, swap in, copy and load blocks, in this order, each batched over blocks, layers and K/V."""

    @abstractmethod
    def forward(self, batch: Batch) -> Logits:
        """Write K/V of every query token into its slot, and attend through the block tables.

        Returns logits [number of rows with `wants_logits`, vocab_size], in row order.
        """

    @abstractmethod
    def sample(self, logits: Logits, inputs: Sequence[SamplingInput]) -> Sequence[Sampled]:
        """Choose one token for each input (`contracts.SampleFunction`)."""

    def prompt_logprobs(self, inputs: Sequence[PromptInput]) -> Mapping[int, Sequence[Sampled]]:
        """The log-probabilities of prompts, by sequence, after the latest `forward` (`BatchRow.num_prompt_logits`).

        A runner that cannot report any keeps this default, and requests that ask for them fail.
        """
        return {}

    def run(self, step: StepInput) -> StepResult:
        self.mirror = self.mirrors.of(step)
        self.mirror.apply(step)
        self.move(step.moves)
        logits = self.forward(self.mirror.batch())
        choices = self.sample(logits, self.mirror.sampling_inputs())
        self.mirror.chosen(choices)
        return StepResult(choices, logits, self.prompt_logprobs(self.mirror.prompt_inputs))
