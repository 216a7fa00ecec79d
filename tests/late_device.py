"""A device that is as late as it may be: what it was given is done, in order, only when somebody waits for a result.

On a GPU the engine is ahead of the device by an amount that nobody controls. Here it is ahead as far as it can get.
So whatever the engine takes for done and is not, shows: memory read before it was written, a token looked at too early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from minipaged.contracts import BeamStep, PromptInput, Sampled, SamplingInput, StepResult, Tier
from minipaged.reference.beam_search import BeamSearch
from minipaged.reference.sampling import sample
from minipaged.steps import StepInput
from minipaged.testing.content_runner import ContentRunner, GivenRow
from tests.workloads import REFERENCE


class Later:
    """Something that the device is to do, and what comes of it."""

    def __init__(self, device: LateDevice, work: Callable[[], Any]) -> None:
        self.device = device
        self._work = work
        self.is_done = False
        self._value: Any = None
        self._error: BaseException | None = None
        device.queue.append(self)

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self.is_done = True

    def result(self) -> Any:
        """Wait for it; raises what it raised."""
        while not self.is_done:
            self.device.queue.popleft().run()
        if self._error:
            raise self._error
        return self._value


class LateDevice:
    """A queue of work, and a log of what the host did: ("launch", n), and ("fetch", n) at the first look at samples."""

    def __init__(self) -> None:
        self.queue: deque[Later] = deque()
        self.log: list[tuple[str, int]] = []
        self.num_launched = 0

    def finish(self) -> None:
        """Do all that is left; nothing of it may fail."""
        while self.queue:
            self.queue[0].result()


class LateSamples(Sequence[Sampled]):
    """Tokens that are chosen when the device comes to it."""

    def __init__(self, later: Later, number: int, length: int) -> None:
        self.later, self.number, self.length = later, number, length
        self.is_fetched = False

    def _fetch(self) -> list[Sampled]:
        if not self.is_fetched:
            self.later.device.log.append(("fetch", self.number))
            self.is_fetched = True
        sampled: list[Sampled] = self.later.result()
        return sampled

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Sampled]:
        return iter(self._fetch())

    def __getitem__(self, index: Any) -> Any:
        return self._fetch()[index]


class LateLogprobs(LateSamples):
    """What is told of a prompt when the device comes to it."""

    def __init__(self, told: Later, asked: PromptInput) -> None:
        super().__init__(told, told.device.num_launched, len(asked.token_ids))
        self._asked = asked

    def _fetch(self) -> list[Sampled]:
        told: list[Sampled] = self.later.result()[self._asked.sequence]
        return told


class LateRunner(ContentRunner):
    """The content oracle on a late device. What is done there asks nothing of the mirror, which is ahead of it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._choose = sample_late
        self.late = LateDevice()

    def run(self, step: StepInput) -> StepResult:
        mirror = self.mirror = self.mirrors.of(step)
        before = mirror.latest  # chosen by the step before in its lane
        mirror.apply(step, wait=False)
        Later(self.late, lambda: self.move(step.moves))
        rows = self.take(mirror.batch())
        self.late.num_launched += 1
        self.late.log.append(("launch", self.late.num_launched))
        logits = Later(self.late, lambda: self.compute([known(row, before) for row in rows]))
        inputs = mirror.prompt_inputs
        told = Later(self.late, lambda: self.prompt_logprobs(inputs))
        chosen = self.sample(logits, mirror.sampling_inputs())
        mirror.chosen(chosen)
        return StepResult(chosen, logits, {one.sequence: LateLogprobs(told, one) for one in inputs})


def known(row: GivenRow, before: Sequence[Sampled]) -> GivenRow:
    """The row with the tokens that the step before has chosen: the device has them, and the host need not look."""

    def token_id(token: int) -> int:
        if token >= 0:
            return token
        assert isinstance(before, LateSamples)
        assert before.later.is_done, "the device works in order"
        chosen: int = before.later.result()[-1 - token].token_id
        return chosen

    return replace(row, token_ids=list(map(token_id, row.token_ids)))


class LateBeams(BeamSearch):
    """Looks at the logits, and so waits for them."""

    def step(self, logits: Later, rows: Sequence[int], cumulative_logprobs: Sequence[float]) -> BeamStep:
        return super().step(logits.result(), rows, cumulative_logprobs)


def sample_late(logits: Later, inputs: Sequence[SamplingInput]) -> LateSamples:
    """The reference's `sample`, once the logits are there."""
    given = [replace(one, output_token_ids=list(one.output_token_ids)) for one in inputs]  # as they are now
    later = Later(logits.device, lambda: sample(logits.result(), given))
    return LateSamples(later, logits.device.num_launched, len(given))


LATE: Tier = replace(REFERENCE, name="late", beam_search=LateBeams, sample=sample_late)
