"""Runs recorded steps again, on another tier or machine: the invariant replay-equals-run.

A replay runs the recorded steps and goes on with the recorded tokens: if this runner chooses another token, the next
step replaces it with the recorded one. So each difference is seen once, and all choices after it are compared as well.
A difference may be a tie, which rounding decides; the reference computes in float64 whether it was one (`ties.py`).
Tokens that the host chose (beam search) are taken from the recording, and are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from minipaged.contracts import BatchRow, Runner, Sampled, SamplingInput
from minipaged.errors import BadRecording, InvalidRequest
from minipaged.mirror import Mirror, PerLane
from minipaged.params import EngineConfig
from minipaged.recordings.step_files import Header, RecordedStep
from minipaged.recordings.ties import ROUNDING, Logits, why_no_tie
from minipaged.setup.loaded_model import LoadedModel
from minipaged.steps import ChosenToken, Row, StepInput

Exact = Callable[[tuple[int, ...]], Logits]
"""A function that returns the logits [vocab] after some tokens, in float64."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A choice that differs from the recorded one."""

    step: int
    sequence: int
    position: int
    recorded: int
    chosen: int
    margin: float
    """Distance between this runner's logits of the two tokens."""
    objection: str | None
    """The reason why rounding cannot explain the difference; None if it was a tie."""

    def __str__(self) -> str:
        where = f"step {self.step}, sequence {self.sequence}, position {self.position}"
        if self.chosen == self.recorded:
            return f"{where}: token {self.chosen} is as recorded, but {self.objection}"
        tokens = f"token {self.chosen} was chosen, {self.recorded} is recorded"
        return f"{where}: {tokens}, their logits differ by {self.margin:.3g}: {self.objection or 'a tie'}"


class _Choice(NamedTuple):
    """A token to choose: the row of its sequence, and its number among that row's choices."""

    row: Row
    number: int
    wanted: SamplingInput

    @property
    def position(self) -> int:
        """The position of the token."""
        drafted = self.row.drafted
        return self.row.stop - len(drafted) + self.number if drafted else self.row.stop


@dataclass
class Replay:
    """Runs recorded steps on a runner. Iterate over it to run the steps; it yields the differences as it finds them.

    `dtype`: the coarser one of the recording's and the runner's. Raises BadRecording for a step that does not follow
    from the one before.
    """

    steps: Iterable[RecordedStep]
    runner: Runner
    exact: Exact
    dtype: str = "float32"
    num_steps: int = 0
    num_choices: int = 0
    num_ties: int = 0
    num_failures: int = 0
    """Differences that are not ties."""
    largest_error: float = 0.0
    """Largest difference between the two logprobs of a token that both runs chose."""
    _mirrors: PerLane[Mirror] = field(default_factory=lambda: PerLane(Mirror))  # they hold the recorded tokens
    _mirror: Mirror = field(default_factory=Mirror)  # the mirror of the latest step's lane
    _corrections: dict[int, list[tuple[_Choice, int]]] = field(default_factory=dict)
    # By lane: choices of its step before that differ, with the recorded tokens.

    def __iter__(self) -> Iterator[Difference]:
        for recorded in self.steps:
            for difference in self._run(recorded):
                self.num_ties += difference.objection is None
                self.num_failures += difference.objection is not None
                yield difference

    def _run(self, recorded: RecordedStep) -> Iterator[Difference]:
        step = self._corrected(recorded.step)
        try:
            self._mirror = self._mirrors.of(recorded.step)
            self._mirror.apply(recorded.step)
        except (ValueError, LookupError) as error:
            raise BadRecording(f"step {step.number} does not follow from those before it: {error}") from None
        self.num_steps += 1
        try:
            result = self.runner.run(step)
            chosen = list(result.choices)
        except Exception:
            if recorded.choices is None:  # the recorded step failed as well, or its choices were never read
                return
            raise
        if recorded.choices is None:
            self._mirror.chosen(chosen)
            return
        choices = list(self._choices())
        if len(recorded.choices) != len(choices):
            found = len(recorded.choices)
            raise BadRecording(f"step {step.number} chooses {len(choices)} tokens, but {found} are recorded")
        reached, of_drafts, wrong = True, list[tuple[_Choice, int]](), set[int]()
        for choice, one, (token, logprob) in zip(choices, chosen, recorded.choices, strict=True):
            reached |= choice.number == 0
            if not reached:
                continue  # a choice after a drafted token that did not stand
            self.num_choices += 1
            drafted = choice.row.drafted
            reached = not drafted or (choice.number < len(drafted) and drafted[choice.number] == token)
            if drafted:
                of_drafts.append((choice, token))
            if one.token_id != token:
                wrong.add(choice.row.sequence)
                if not drafted:
                    self._corrections.setdefault(step.lane, []).append((choice, token))
            if difference := self._compare(choice, one, token, logprob, result.logits):
                yield difference
        # After a wrong choice among drafts, the runner has kept more or fewer tokens: it is told all of them.
        corrected = [(choice, token) for choice, token in of_drafts if choice.row.sequence in wrong]
        self._corrections.setdefault(step.lane, []).extend(corrected)
        self._mirror.chosen([Sampled(token, logprob, None) for token, logprob in recorded.choices])

    def _choices(self) -> Iterator[_Choice]:
        """The tokens that this step chooses, in order."""
        inputs = iter(self._mirror.sampling_inputs())
        for row in self._mirror.rows:
            for number in range(row.num_chosen):
                yield _Choice(row, number, next(inputs))

    def _compare(self, choice: _Choice, one: Sampled, token: int, logprob: float, logits: Any) -> Difference | None:
        row, _, wanted = choice
        place = (self._mirror.rows.number, row.sequence, choice.position, token, one.token_id)
        if token == one.token_id:
            error = abs(one.logprob - logprob)
            self.largest_error = max(self.largest_error, error)
            if error <= ROUNDING[self.dtype]:
                return None
            # Both computations may be off by this share of the largest logit, in the token's logit and in the sum.
            allowed = 4 * ROUNDING[self.dtype] * float(np.abs(_on_host(logits[wanted.row])).max())
            if error <= allowed:
                return None
            off = f"its logprob is {one.logprob:.4f} and was {logprob:.4f}: rounding explains only {allowed:.3g}"
            return Difference(*place, 0.0, off)
        computed = _on_host(logits[wanted.row])
        known = (*wanted.prompt_token_ids, *wanted.output_token_ids)
        objection = why_no_tie(self.exact(known), computed, wanted, one.token_id, token, self.dtype)
        return Difference(*place, abs(float(computed[token] - computed[one.token_id])), objection)

    def _corrected(self, step: StepInput) -> StepInput:
        """The step, with the recorded tokens added for choices in which this runner differed."""
        forks = {(forked.parent, forked.choice): forked.sequence for forked in step.forked}
        told: list[ChosenToken] = []
        for choice, token in self._corrections.pop(step.lane, ()):
            is_own = choice.number == 0 or choice.row.drafted
            sequence = choice.row.sequence if is_own else forks.get((choice.row.sequence, choice.number))
            if sequence is not None and sequence not in step.ended and not step.fresh:
                told.append(ChosenToken(sequence, choice.position, token))
        return step._replace(told=(*step.told, *told)) if told else step


def _on_host(logits: Any) -> Logits:
    """Return a row of logits, of any tier, as a NumPy array [vocab] in float64."""
    on_host = logits.double().cpu() if hasattr(logits, "cpu") else logits
    return np.asarray(on_host, dtype=np.float64)


def open_replay(header: Header, steps: Iterable[RecordedStep], loaded: LoadedModel) -> Replay:
    """Make the replay of a recording on a model. Raises BadRecording if another model was recorded."""
    if loaded.config != header.model_config:
        names = [name for name in header.model_config.__slots__ if _differ(name, loaded.config, header.model_config)]
        raise BadRecording(
            f"the steps were recorded with another model, {header.model}, which differs in {', '.join(names)}; "
            "give that model with --model"
        )
    try:
        runner = loaded.tier.make_runner(loaded.config, loaded.weights, header.engine_config)
    except MemoryError:
        sizes = header.engine_config
        raise InvalidRequest(
            f"the recording needs a cache of {sizes.num_blocks} blocks, and {sizes.num_swap_blocks} for swapping, "
            "which is more memory than there is here"
        ) from None
    dtype = max(header.dtype, loaded.tier.dtype, key=ROUNDING.__getitem__)
    if header.dtype != loaded.tier.dtype:
        steps = _without_blocks(steps, header.dtype, loaded.tier.dtype)
    return Replay(steps, runner, exact_logits(loaded), dtype)


def _without_blocks(steps: Iterable[RecordedStep], theirs: str, mine: str) -> Iterator[RecordedStep]:
    """Yield the steps. Raises BadRecording at a step that loads blocks, because they are in another dtype."""
    for recorded in steps:
        if recorded.step.moves.load:
            raise BadRecording(
                f"step {recorded.step.number} loads blocks in {theirs}, but this model computes in {mine}; replay it "
                f"with --dtype {theirs}"
            )
        yield recorded


def _differ(name: str, one: object, other: object) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def exact_logits(model: LoadedModel) -> Exact:
    """Return a function for the model's float64 logits. Its first call loads the model on the reference tier."""

    @cache
    def load() -> LoadedModel:
        return LoadedModel.load(model.folder, "reference", dtype="float64")

    return lambda tokens: logits_of(load(), tokens)


def logits_of(model: LoadedModel, tokens: Sequence[int]) -> Logits:
    """A model's logits [vocab] after `tokens`, in a new cache: one row, one chunk, one block after another."""
    block_size = 16
    num_blocks = -(-len(tokens) // block_size)
    sizes = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=len(tokens),
        vocab_size=model.config.vocab_size,
    )
    runner: Any = model.tier.make_runner(model.config, model.weights, sizes)
    return np.asarray(runner.forward([BatchRow(list(tokens), 0, range(num_blocks), wants_logits=True)])[0])
